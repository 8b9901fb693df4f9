"""Trainers and engines of others, each by the loop that its page shows: the weights of one process.

Over three ranks a batch of four is cut into 2, 2 and 0 samples, so that parts differ in size and some are empty; an
epoch ends with a step of one sample. Where the sums of a group come with the votes, there is one reduction less a step.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

SAMPLES, BATCH, EPOCHS = 21, 4, 2  # 6 steps in each epoch
STEPS = 6 * EPOCHS

Weights = list[float]


def samples() -> TensorDataset:
    """Features, targets and weights, of which some are zero; no step has zeros alone."""
    features = torch.rand(SAMPLES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.randint(0, 4, (SAMPLES,), generator=torch.Generator().manual_seed(7))
    return TensorDataset(features, features.sum(dim=1).sin(), weights)


def loader_of(cls: Any, **more: Any) -> Any:
    return cls(samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3), **more)


def weight_in(batch: Any) -> int:
    return int(((batch["labels"] + 1).clamp(min=0) if isinstance(batch, dict) else batch[2]).sum())


def ours(*, summed: bool, drop_in: bool = True) -> Any:
    sums = {"weights": weight_in, "num_items_in_batch": weight_in} if summed else {}
    options = tdi.InputOptions(sums=sums)
    if drop_in:
        return loader_of(tdi.DataLoader, options=options)
    return tdi.get_strategy().distribute_dataset(loader_of(DataLoader), options)


def net_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def weights_of(net: nn.Module) -> Weights:
    return torch.cat([each.detach().flatten() for each in net.parameters()]).tolist()


def losses_of(net: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    squares: torch.Tensor = (net(batch[0]).squeeze(1) - batch[1]).square()
    return squares


def loss_of(net: nn.Module, batch: list[torch.Tensor], group: Any) -> torch.Tensor:
    """Of a batch of a group, or of a step."""
    losses = losses_of(net, batch)
    if not isinstance(group, tdi.Step) and group.sums:
        return tdi.average_loss(losses, group, batch[2], total="weights")
    step = group if isinstance(group, tdi.Step) else group[0][1]
    return tdi.average_loss(losses, step, batch[2])


def one_process(together: int = 1) -> Weights:
    """torch alone: a group is one batch."""
    net = net_of()
    optimizer, loader = optimizer_of(net), loader_of(DataLoader)
    for _ in range(EPOCHS):
        batches = iter(loader)
        while group := list(itertools.islice(batches, together)):
            batch = [torch.cat(parts) for parts in zip(*group, strict=True)]
            optimizer.zero_grad()
            torch.autograd.backward((losses_of(net, batch) * batch[2]).sum() / batch[2].sum())
            optimizer.step()
    return weights_of(net)


def means_of_steps(together: int) -> Weights:
    """torch alone, as an engine that divides by the number of steps; a group goes on in the next epoch."""
    net = net_of()
    optimizer, loader = optimizer_of(net), loader_of(DataLoader)
    epochs = [list(loader) for _ in range(EPOCHS)]
    for place, batch in enumerate(itertools.chain.from_iterable(epochs)):
        mean = (losses_of(net, batch) * batch[2]).sum() / batch[2].sum()
        torch.autograd.backward(mean / together)
        if (place + 1) % together == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net)


# -------------------------------------------------------------------------------------------------------- the loops


def in_groups(loader: Any, together: int, net: Any, optimizer: Any, no_sync: Any, backward: Any) -> None:
    for _ in range(EPOCHS):
        for group in tdi.groups(loader, together):
            for batch, step in group:
                with contextlib.nullcontext() if step is group[-1][1] else no_sync():
                    backward(loss_of(net, batch, group))
            optimizer.step()
            optimizer.zero_grad()


def plain(loader: Any, together: int) -> Weights:
    """A loop such as torchtitan's."""
    net = DistributedDataParallel(net_of())
    in_groups(loader, together, net, optimizer_of(net), net.no_sync, torch.autograd.backward)
    return weights_of(net)


def with_accelerate(loader: Any, together: int) -> Weights:
    from accelerate import Accelerator  # noqa: PLC0415 - seconds, and only here

    from torchdistinput.integrations.accelerate import prepare  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True)  # whose own steps of an update end where the data is read to its end
    prepared = prepare(accelerator, loader)
    net = net_of()
    model, optimizer = accelerator.prepare(net, optimizer_of(net))
    in_groups(prepared, together, model, optimizer, lambda: accelerator.no_sync(model), accelerator.backward)
    return weights_of(accelerator.unwrap_model(model))


def with_lightning(loader: Any, together: int) -> Weights:
    import lightning  # noqa: PLC0415 - as above

    class Grouped:
        def __iter__(self) -> Iterator[Any]:
            return tdi.groups(loader, together)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net_of()
            self.automatic_optimization = False

        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            return batch

        def training_step(self, group: Any, _: int) -> None:
            optimizer: Any = self.optimizers()
            wrapped: Any = self.trainer.model
            for batch, step in group:
                with contextlib.nullcontext() if step is group[-1][1] else wrapped.no_sync():
                    self.manual_backward(loss_of(self.net, batch, group))
            optimizer.step()
            optimizer.zero_grad()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Grouped())
    return weights_of(module.net)


def with_fabric(loader: Any, together: int) -> Weights:
    """Fabric sets up the model and the optimizer, and needs no loader."""
    import lightning  # noqa: PLC0415 - as above

    fabric = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size())
    fabric.launch()
    net = net_of()
    model, optimizer = fabric.setup(net, optimizer_of(net))
    in_groups(loader, together, model, optimizer, lambda: fabric.no_backward_sync(model), fabric.backward)
    return weights_of(net)


class Labelled(nn.Module):
    """A model as a Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net_of()

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"losses": losses_of(self.net, [features, targets])}


def labelled(rows: Any) -> dict[str, torch.Tensor]:
    features, targets, weights = torch.utils.data.default_collate(rows)
    # The label of a row that is added to an empty part is -100.
    return {"features": features, "targets": targets, "labels": torch.where(weights > 0, weights - 1, -100)}


def with_transformers(loader: Any, together: int) -> Weights:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - as above

    from torchdistinput.integrations.transformers import prepare  # noqa: PLC0415 - as above

    loader.collate_fn = labelled

    class OnRanks(Trainer):  # type: ignore[misc] # of a package without its types here
        def get_train_dataloader(self) -> Any:
            return prepare(self, loader)

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> Any:
        return (outputs["losses"] * (labels + 1).clamp(min=0)).sum() / num_items_in_batch

    with tempfile.TemporaryDirectory() as folder:
        trainer = OnRanks(
            Labelled(),
            TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                num_train_epochs=EPOCHS,
                gradient_accumulation_steps=together,
                learning_rate=0.1,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                optim="sgd",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=samples(),
            compute_loss_func=loss,
        )
        trainer.train()
    return weights_of(trainer.model)


def with_ignite(loader: Any, _: int) -> Weights:
    """Taken up in the middle of the second epoch, from the states of engine and loader."""
    ignite: Any = import_module("ignite.engine")  # it is in an environment of its own
    net = net_of()
    model, state = DistributedDataParallel(net), dict[str, Any]()
    optimizer = optimizer_of(net)
    for last, given in ((STEPS - 4, loader), (STEPS, ours(summed=False))):

        def step(engine: Any, batch: Any, given: Any = given) -> None:
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, batch, given.step))
            optimizer.step()

        engine: Any = ignite.Engine(step)
        engine.add_event_handler(ignite.Events.ITERATION_COMPLETED(once=last), engine.terminate)
        held = {"engine": engine, "loader": given}
        for name, part in state.items():
            held[name].load_state_dict(part)
        engine.run(given, max_epochs=EPOCHS)
        state = {name: part.state_dict() for name, part in held.items()}
    return weights_of(net)


def with_deepspeed(stage: int, loader: Any, together: int) -> Weights:
    warnings.simplefilter("ignore")  # its own
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed: Any = import_module("deepspeed")

    net = net_of().float()  # it reduces no float64
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # of its own loader
        "gradient_accumulation_steps": together,
        "gradient_clipping": 0.0,  # by default 1.0
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer_of(net), config=settings)
    for _ in range(EPOCHS):
        for batch in loader:
            engine.backward(loss_of(engine, [*map(torch.Tensor.float, batch)], loader.step))
            engine.step()
    return weights_of(net)


def with_keras(loader: Any, together: int) -> Weights:
    """A model of Keras is a module; its first weights are those of the others."""
    warnings.simplefilter("ignore")  # Keras's own
    keras: Any = import_module("keras")

    net: Any = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, dtype="float64")])
    first = net_of()
    net.set_weights([first.weight.detach().T.numpy(), first.bias.detach().numpy()])  # type: ignore[operator]
    model = DistributedDataParallel(net)
    in_groups(loader, together, model, optimizer_of(net), model.no_sync, torch.autograd.backward)
    return [float(each) for array in net.get_weights() for each in array.flatten()]


class Trainer(NamedTuple):
    """A row of the table.

    Args:
      train: the weights after a training, given a loader and the number of steps of an update.
      packages: what it needs.
      summed: whether it can take the sums of groups from the votes.
      together: the steps of an update.
      expected: the weights of one process, given that number.
      within: how far they may differ.
    """

    train: Callable[[Any, int], Weights]
    packages: tuple[str, ...] = ()
    summed: bool = False
    together: int = 1
    expected: Callable[[int], Weights] = one_process
    within: float = 1e-12


def of_stage(stage: int) -> Callable[[Any, int], Weights]:
    return lambda loader, together: with_deepspeed(stage, loader, together)


TRAINERS = {
    "plain": Trainer(plain, summed=True, together=2),
    "accelerate": Trainer(with_accelerate, ("accelerate",), summed=True, together=2),
    "lightning": Trainer(with_lightning, ("lightning",), summed=True, together=2),
    "fabric": Trainer(with_fabric, ("lightning",)),
    "transformers": Trainer(with_transformers, ("transformers", "accelerate"), summed=True, together=2),
    "ignite": Trainer(with_ignite, ("ignite",)),
    "keras": Trainer(with_keras, ("keras",), summed=True, together=2, within=1e-6),  # it computes in float32
    "deepspeed, stage 0": Trainer(of_stage(0), ("deepspeed",), within=1e-6),
    "deepspeed, stage 2": Trainer(of_stage(2), ("deepspeed",), within=1e-6),
    "deepspeed, stage 1": Trainer(of_stage(1), ("deepspeed",), together=2, expected=means_of_steps, within=1e-6),
    "deepspeed, stage 3": Trainer(of_stage(3), ("deepspeed",), together=2, expected=means_of_steps, within=1e-6),
}


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The reductions of tensors in here: by torch, and by a strategy, which sends small ones over its own sockets."""
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        by_strategy = [
            stack.enter_context(mock.patch.object(tdi.Strategy, name, autospec=True, side_effect=call))
            for name, call in (("reduce", tdi.Strategy.reduce), ("gather", tdi.Strategy.gather))
        ]
        profile = stack.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]))
        yield found
    by_torch = sum(each.count for each in profile.key_averages() if each.key == "c10d::allreduce_")
    found.append(by_torch + sum(each.call_count for each in by_strategy))


def trained(name: str) -> tuple[Weights, list[int]]:
    """One rank: the weights; and the reductions where each step is a group, summed in votes and not."""
    trainer, reductions = TRAINERS[name], list[int]()
    with tdi.Strategy(devices=["cpu"]).scope():
        weights = trainer.train(ours(summed=trainer.summed), trainer.together)
        for summed in (True, False) if trainer.summed else ():
            with counted() as found:
                trainer.train(ours(summed=summed), 1)
            reductions += found
    return weights, reductions


@pytest.mark.parametrize("name", TRAINERS)
def test_the_weights_are_those_of_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    trainer = TRAINERS[name]
    for package in trainer.packages:
        pytest.importorskip(package)
    expected = trainer.expected(trainer.together)
    for weights, reductions in run_ranks(3, trained, name, timeout_seconds=300):  # DeepSpeed compiles once
        torch.testing.assert_close(weights, expected, rtol=0, atol=trainer.within)
        assert not trainer.summed or reductions[1] - reductions[0] == STEPS


def test_what_would_be_trained_otherwise_is_told_apart() -> None:
    """What the bound is worth."""
    found = [one_process(), one_process(2), means_of_steps(2), weights_of(net_of())]
    for one, other in itertools.combinations(found, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-4


SEVENTEEN, UPDATES_OF = 17, 2


def data(size: int = SEVENTEEN) -> TensorDataset:
    features = torch.arange(2.0 * size).reshape(size, 2) / size
    return TensorDataset(torch.arange(size), features, features.sum(dim=1))


def shuffled(cls: Any, **more: Any) -> Any:
    return cls(data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3), **more)


def train(accelerator: Any, loader: Any, step: Any) -> tuple[list[float], int]:
    """One epoch with accumulation; the weights and the number of updates."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    updates = 0
    for _, x, y in loader:
        with accelerator.accumulate(model):
            losses = (model(x).squeeze(1) - y).square()
            accelerator.backward(step(losses))
            updates += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.flatten().tolist(), updates


def everything(folder: str) -> dict[str, Any]:
    """One rank."""
    from accelerate import Accelerator, skip_first_batches  # noqa: PLC0415 - seconds, and only here

    from torchdistinput.integrations.accelerate import prepare  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=UPDATES_OF)
    found: dict[str, Any] = {}
    # A loader that accelerate does not know; others are refused: test_wrong.py.
    even = accelerator.prepare(tdi.DataLoader(data(), batch_size=BATCH, drop_last=True))
    accelerator.gradient_accumulation_steps = 1
    found["even"] = [each[0].tolist() for each in even]
    accelerator.gradient_accumulation_steps = UPDATES_OF
    # One that it knows.
    loader = prepare(accelerator, shuffled(tdi.DataLoader))
    assert accelerator.prepare(loader) is loader
    found["trained"] = train(accelerator, loader, lambda losses: tdi.average_loss(losses, loader.step))
    strategy = tdi.Strategy()
    steps = prepare(accelerator, strategy.distribute_dataset(DataLoader(data(), batch_size=BATCH)))
    found["gathered"] = [accelerator.gather_for_metrics({"n": each[0]})["n"].tolist() for each in steps]
    found["scalars"] = accelerator.gather(torch.tensor(accelerator.process_index)).tolist()
    found["objects"] = accelerator.gather_for_metrics([f"of {accelerator.process_index}"], use_gather_object=True)
    found["rest"] = [each[0].tolist() for each in skip_first_batches(steps, 3)]
    fresh = prepare(accelerator, shuffled(tdi.DataLoader))
    whole = [each[0].tolist() for each in fresh]
    found["state after an epoch"] = [fresh.state_dict()[name] for name in ("epoch", "step")]
    again = prepare(accelerator, shuffled(tdi.DataLoader))
    skipped = skip_first_batches(again, 2)
    found["skip"] = whole[2:], [each[0].tolist() for each in skipped], len(skipped)
    saving = Accelerator(cpu=True)
    for step, _ in enumerate(prepare(saving, shuffled(tdi.DataLoader))):
        if step == 1:
            saving.save_state(folder)
            break
    going_on = Accelerator(cpu=True)
    rest = prepare(going_on, shuffled(tdi.DataLoader))
    going_on.load_state(folder)
    found["saved"] = whole[2:], [each[0].tolist() for each in rest]
    second = [each[0].tolist() for each in fresh]
    later = prepare(accelerator, shuffled(tdi.DataLoader))
    later.set_epoch(1)
    found["later"] = second, [each[0].tolist() for each in later]
    ends = []
    for _ in steps:
        ends.append(accelerator.gradient_state.end_of_dataloader)
        if len(ends) == 3:
            break  # the next epoch is told of all the same
    ends.extend(accelerator.gradient_state.end_of_dataloader for _ in steps)
    found["ends"] = ends, accelerator.gradient_state.active_dataloader is steps
    accelerator.end_training()
    return found


def in_one_process() -> tuple[list[float], int]:
    """With a loader of torch's."""
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=UPDATES_OF)
    return train(accelerator, accelerator.prepare_data_loader(shuffled(DataLoader)), torch.Tensor.mean)


def in_one_process_with_ours() -> tuple[list[float], int]:
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    from torchdistinput.integrations.accelerate import prepare  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=UPDATES_OF)
    loader = prepare(accelerator, shuffled(tdi.DataLoader))
    return train(accelerator, loader, torch.Tensor.mean)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("accelerate")
    folder = str(tmp_path_factory.mktemp("accelerate"))
    return run_ranks(2, everything, folder, init_group=False, timeout_seconds=120)


def test_what_accelerate_makes_of_a_loader_is_divided(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["gathered"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16]]
        assert found["scalars"] == [0, 1]
        assert found["objects"] == ["of 0", "of 1"]
        whole, skipped, length = found["skip"]
        assert skipped == whole
        assert length == len(whole) == 3
        assert found["state after an epoch"] == [1, 0]
        assert found["saved"][0] == found["saved"][1]
        second, later = found["later"]
        assert later == second
        assert found["ends"] == ([False] * 3 + [False] * 4 + [True], False)
    assert [rank["rest"] for rank in ranks] == [[[12, 13], [16]], [[14, 15], []]]
    assert [rank["even"][0] for rank in ranks] == [[0, 1], [2, 3]]


def test_accumulation_makes_the_last_update_and_the_weights_are_those_of_one_process(
    ranks: list[dict[str, Any]],
) -> None:
    ((weights, updates),) = run_ranks(1, in_one_process, init_group=False, timeout_seconds=120)
    ((same, as_many),) = run_ranks(1, in_one_process_with_ours, init_group=False, timeout_seconds=120)
    assert updates == as_many == 3
    assert same == weights
    for found in ranks:
        assert found["trained"][1] == 3
        torch.testing.assert_close(torch.tensor(found["trained"][0]), torch.tensor(weights), rtol=0, atol=1e-6)


ELEVEN = 11
DATA = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)


def world() -> int:
    """The number of ranks, also after Lightning has removed it from the environment."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def lightning_loader(cls: Any, *, shuffle: bool = True) -> Any:
    return cls(data(ELEVEN), batch_size=BATCH, shuffle=shuffle, generator=torch.Generator().manual_seed(3))


def distributed(*, shuffle: bool = True) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(lightning_loader(DataLoader, shuffle=shuffle))


def module_of(step: Any) -> Any:
    """A module that notes its samples; ``step`` tells the size of a step, where the loss is over all ranks."""
    import lightning  # noqa: PLC0415 - seconds, and only here

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(2, 1)
            self.epochs: list[Any] = []

        def on_train_epoch_start(self) -> None:
            self.epochs.append([])

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            number, x, y = batch
            self.epochs[-1].append(number.tolist())
            losses = (self.net(x).squeeze(1) - y).square()
            return losses.mean() if step is None else tdi.average_loss(losses, step())

        def predict_step(self, batch: Any, _: int) -> list[int]:
            return [int(number) for number in batch[0]]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def trainer_of(folder: str, **more: Any) -> Any:
    import lightning  # noqa: PLC0415 - as above

    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world(),
        "strategy": "ddp" if world() > 1 else "auto",
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        **more,
    }
    return lightning.Trainer(**settings)


def fitted(folder: str, loader: Any, *, ours: bool, **more: Any) -> tuple[Any, Any]:
    """The samples of each step of each epoch, and the weights."""
    module = module_of((lambda: loader.step) if ours else None)
    trainer_of(folder, **more).fit(module, loader)
    return module.epochs, module.net.weight.tolist()


def resumed(folder: str, make: Any, steps: int) -> Any:
    """The samples of each step that come after a checkpoint of so many steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415 - as above

    saving = ModelCheckpoint(dirpath=folder, filename="saved", every_n_train_steps=steps)
    fitted(folder, make(), ours=False, callbacks=[saving], enable_checkpointing=True, max_steps=steps + 1)
    module = module_of(None)
    module.epochs = [[]]  # Lightning does not say again that the epoch starts
    trainer_of(folder).fit(module, make(), ckpt_path=f"{folder}/saved.ckpt")
    return module.epochs


def written(folder: str, loader: Any) -> list[tuple[list[int], list[int]]]:
    """What a writer of predictions gets: the predictions, and the numbers that come in the batch."""
    from lightning.pytorch.callbacks import BasePredictionWriter  # noqa: PLC0415 - as above

    seen: list[Any] = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(self, *given: Any) -> None:
            _, _, prediction, batch_indices, (index, _), *_ = given
            assert not batch_indices  # Lightning warns that it does not know them
            seen.append((prediction, index.tolist()))

    module = module_of(None)
    module.predict_step = lambda batch: [int(number) for number in batch[1][0]]
    trainer = trainer_of(folder, callbacks=[Writer("batch")])
    trainer.predict(module, loader)
    assert trainer.num_predict_batches == [len(seen)]
    return seen


def validated(folder: str, make: Any) -> list[int]:
    """The samples of this rank in the validation of two epochs, by a Trainer with its defaults."""
    module, seen = module_of(None), list[int]()
    module.validation_step = lambda batch: seen.extend(batch[0].tolist())
    trainer_of(folder).fit(module, make(), make(shuffle=False))
    return seen


def lightning_scenes(folder: str) -> dict[str, Any]:
    """One rank; alone it reads with torch's loaders."""
    warnings.simplefilter("ignore")
    ours = world() > 1
    made: dict[str, Any] = {"drop-in": partial(lightning_loader, tdi.DataLoader), "dataset": distributed}
    if not ours:
        made = {"torch": partial(lightning_loader, DataLoader)}
    found: dict[str, Any] = {}
    for name, make in made.items():
        found[name] = fitted(folder, make(), ours=ours)
        found[f"{name}, overfitted"] = fitted(folder, make(shuffle=False), ours=ours, overfit_batches=2)
        if ours:
            found[f"{name}, validated"] = validated(folder, make)
            for steps in RESUMED:
                found[f"{name}, resumed {steps}"] = resumed(f"{folder}/{name} {steps}", make, steps)
    if ours:
        loader = lightning_loader(DataLoader, shuffle=False)
        options = tdi.InputOptions(with_index=True)
        found["written"] = written(folder, tdi.Strategy(["cpu"]).distribute_dataset(loader, options))
    return found


def together(first: Any, second: Any) -> Any:
    """The samples of both ranks."""
    return [[[*one, *other] for one, other in zip(*steps, strict=True)] for steps in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def lightning_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both of two ranks found."""
    pytest.importorskip("lightning")
    folder = str(tmp_path_factory.mktemp("lightning"))
    return run_ranks(2, lightning_scenes, folder, init_group=False, timeout_seconds=180)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found with torch's loaders."""
    pytest.importorskip("lightning")
    folder = str(tmp_path_factory.mktemp("alone"))
    (found,) = run_ranks(1, lightning_scenes, folder, init_group=False, timeout_seconds=180)
    return found


@pytest.mark.parametrize("kind", ["drop-in", "dataset"])
@pytest.mark.parametrize("how", ["", ", overfitted"])
def test_the_order_and_the_weights_are_those_of_torchs_loader_in_one_process(
    lightning_ranks: list[dict[str, Any]], alone: dict[str, Any], kind: str, how: str
) -> None:
    (first, weights), (second, _) = (found[kind + how] for found in lightning_ranks)
    epochs, expected = alone["torch" + how]
    assert together(first, second) == epochs
    torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=0, atol=1e-6)


RESUMED = (3, 4)
"""After the last step of an epoch, and after the first one of the next."""


@pytest.mark.parametrize("steps", RESUMED)
@pytest.mark.parametrize("kind", ["drop-in", "dataset"])
def test_a_checkpoint_goes_on_with_the_next_step(
    lightning_ranks: list[dict[str, Any]], alone: dict[str, Any], kind: str, steps: int
) -> None:
    first, second = (found[f"{kind}, resumed {steps}"] for found in lightning_ranks)
    assert together(first, second) == [alone["torch"][0][1][steps - 3 :]]


@pytest.mark.parametrize("kind", ["drop-in", "dataset"])
def test_validation_sees_each_sample_once(lightning_ranks: list[dict[str, Any]], kind: str) -> None:
    seen = sorted(sample for found in lightning_ranks for sample in found[f"{kind}, validated"])
    assert seen == sorted([*range(ELEVEN)] * EPOCHS)


def test_a_writer_of_predictions_finds_the_numbers_of_the_samples_in_the_batch(
    lightning_ranks: list[dict[str, Any]],
) -> None:
    for found, parts in zip(lightning_ranks, ([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]), strict=True):
        assert found["written"] == [(part, part) for part in parts]
