"""Weighted means over groups of steps in loops of others: the weights of one process, one reduction less a step."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

SAMPLES, BATCH, TOGETHER, EPOCHS = 21, 4, 2, 2  # 6 steps in each epoch, the last of them of 1 sample
STEPS = 6 * EPOCHS

Weights = list[float]


def samples() -> TensorDataset:
    """Features, targets and weights."""
    made = torch.Generator().manual_seed(0)
    features = torch.rand(SAMPLES, 3, generator=made, dtype=torch.float64)
    return TensorDataset(features, features.sum(dim=1).sin(), torch.randint(0, 4, (SAMPLES,), generator=made))


def loader_of(cls: Any, **more: Any) -> Any:
    return cls(samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3), **more)


def weight_in(batch: Any) -> int:
    return int(((batch["labels"] + 1).clamp(min=0) if isinstance(batch, dict) else batch[2]).sum())


def ours(*, summed: bool) -> Any:
    sums = {"weights": weight_in, "num_items_in_batch": weight_in} if summed else {}
    return loader_of(tdi.DataLoader, options=tdi.InputOptions(sums=sums))


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
    """Of a batch of a group."""
    losses = losses_of(net, batch)
    if group.sums:
        return tdi.average_loss(losses, group, batch[2], total="weights")
    ((_, step),) = group
    return tdi.average_loss(losses, step, batch[2])


def one_process() -> Weights:
    """torch alone: a group is one batch."""
    net = net_of()
    optimizer, loader = optimizer_of(net), loader_of(DataLoader)
    for _ in range(EPOCHS):
        batches = iter(loader)
        while group := list(itertools.islice(batches, TOGETHER)):
            batch = [torch.cat(parts) for parts in zip(*group, strict=True)]
            optimizer.zero_grad()
            torch.autograd.backward((losses_of(net, batch) * batch[2]).sum() / batch[2].sum())
            optimizer.step()
    return weights_of(net)


def plain(loader: Any, accumulate: int) -> Weights:
    """A loop such as torchtitan's."""
    net = DistributedDataParallel(net_of())
    optimizer = optimizer_of(net)
    for _ in range(EPOCHS):
        for group in tdi.groups(loader, accumulate):
            for batch, step in group:
                with contextlib.nullcontext() if step is group[-1][1] else net.no_sync():
                    torch.autograd.backward(loss_of(net, batch, group))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net)


def with_accelerate(loader: Any, accumulate: int) -> Weights:
    from accelerate import Accelerator  # noqa: PLC0415 - seconds, and only here

    from torchdistinput.integrations.accelerate import prepare  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True)  # whose own steps of an update end where the data is read to its end
    prepared = prepare(accelerator, loader)
    net = net_of()
    model, optimizer = accelerator.prepare(net, optimizer_of(net))
    for _ in range(EPOCHS):
        for group in tdi.groups(prepared, accumulate):
            for batch, step in group:
                with contextlib.nullcontext() if step is group[-1][1] else accelerator.no_sync(model):
                    accelerator.backward(loss_of(model, batch, group))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(accelerator.unwrap_model(model))


def with_lightning(loader: Any, accumulate: int) -> Weights:
    import lightning  # noqa: PLC0415 - as above

    class Grouped:
        def __iter__(self) -> Iterator[Any]:
            return tdi.groups(loader, accumulate)

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


class Labelled(nn.Module):
    """A model as a Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net_of()

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"losses": losses_of(self.net, [features, targets])}


def with_transformers(loader: Any, accumulate: int) -> Weights:
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - as above

    from torchdistinput.integrations.transformers import prepare  # noqa: PLC0415 - as above

    def collate(rows: Any) -> dict[str, torch.Tensor]:
        features, targets, weights = torch.utils.data.default_collate(rows)
        # The label of a row that is added to an empty part is -100.
        return {"features": features, "targets": targets, "labels": torch.where(weights > 0, weights - 1, -100)}

    loader.collate_fn = collate

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
                gradient_accumulation_steps=accumulate,
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


LOOPS: dict[str, Callable[[Any, int], Weights]] = {
    "plain": plain,
    "transformers": with_transformers,
    "accelerate": with_accelerate,
    "lightning": with_lightning,
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
    """One rank: the weights by groups; and the reductions where each step is a group, summed in votes and not."""
    reductions = []
    loop = LOOPS[name]
    with tdi.Strategy(devices=["cpu"]).scope():
        weights = loop(ours(summed=True), TOGETHER)
        for summed in (True, False):
            with counted() as found:
                loop(ours(summed=summed), 1)
            reductions += found
    return weights, reductions


@pytest.mark.parametrize("name", LOOPS)
def test_the_weights_are_those_of_one_process_with_one_reduction_less_in_each_step(name: str) -> None:
    if name != "plain":
        pytest.importorskip(name)
    for weights, (summed, weighted) in run_ranks(3, trained, name, timeout_seconds=120):
        torch.testing.assert_close(weights, one_process(), rtol=0, atol=1e-12)
        assert weighted - summed == STEPS
