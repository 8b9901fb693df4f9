"""Lightning and a loader of this library: trained alike, or refused with what to write."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

SAMPLES, BATCH, EPOCHS = 11, 4, 2
DATA = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)


def world() -> int:
    """The number of ranks, also after Lightning has removed it from the environment."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def data() -> TensorDataset:
    features = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES
    return TensorDataset(torch.arange(SAMPLES), features, features.sum(dim=1))


def loader_of(cls: Any, *, shuffle: bool = True) -> Any:
    return cls(data(), batch_size=BATCH, shuffle=shuffle, generator=torch.Generator().manual_seed(3))


def distributed(*, shuffle: bool = True) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(loader_of(DataLoader, shuffle=shuffle))


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


def everything(folder: str) -> dict[str, Any]:
    """One rank; alone it reads with torch's loaders."""
    warnings.simplefilter("ignore")
    ours = world() > 1
    made: dict[str, Any] = {"drop-in": partial(loader_of, tdi.DataLoader), "dataset": distributed}
    if not ours:
        made = {"torch": partial(loader_of, DataLoader)}
    found: dict[str, Any] = {}
    for name, make in made.items():
        found[name] = fitted(folder, make(), ours=ours)
        found[f"{name}, overfitted"] = fitted(folder, make(shuffle=False), ours=ours, overfit_batches=2)
        if ours:
            found[f"{name}, validated"] = validated(folder, make)
            for steps in RESUMED:
                found[f"{name}, resumed {steps}"] = resumed(f"{folder}/{name} {steps}", make, steps)
    if ours:
        with pytest.raises(ValueError, match=r"needs to subclass `torch.utils.data.DataLoader`"):
            fitted(folder, loader_of(tdi.DataLoader), ours=True, overfit_batches=2)  # shuffled, which it would undo
        loader = loader_of(DataLoader, shuffle=False)
        options = tdi.InputOptions(with_index=True)
        found["written"] = written(folder, tdi.Strategy(["cpu"]).distribute_dataset(loader, options))
    return found


def together(first: Any, second: Any) -> Any:
    """The samples of both ranks."""
    return [[[*one, *other] for one, other in zip(*steps, strict=True)] for steps in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both of two ranks found."""
    pytest.importorskip("lightning")
    folder = str(tmp_path_factory.mktemp("lightning"))
    return run_ranks(2, everything, folder, init_group=False, timeout_seconds=180)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process found with torch's loaders."""
    pytest.importorskip("lightning")
    folder = str(tmp_path_factory.mktemp("alone"))
    (found,) = run_ranks(1, everything, folder, init_group=False, timeout_seconds=180)
    return found


@pytest.mark.parametrize("kind", ["drop-in", "dataset"])
@pytest.mark.parametrize("how", ["", ", overfitted"])
def test_the_order_and_the_weights_are_those_of_torchs_loader_in_one_process(
    ranks: list[dict[str, Any]], alone: dict[str, Any], kind: str, how: str
) -> None:
    (first, weights), (second, _) = (found[kind + how] for found in ranks)
    epochs, expected = alone["torch" + how]
    assert together(first, second) == epochs
    torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=0, atol=1e-6)


RESUMED = (3, 4)
"""After the last step of an epoch, and after the first one of the next."""


@pytest.mark.parametrize("steps", RESUMED)
@pytest.mark.parametrize("kind", ["drop-in", "dataset"])
def test_a_checkpoint_goes_on_with_the_next_step(
    ranks: list[dict[str, Any]], alone: dict[str, Any], kind: str, steps: int
) -> None:
    first, second = (found[f"{kind}, resumed {steps}"] for found in ranks)
    assert together(first, second) == [alone["torch"][0][1][steps - 3 :]]


@pytest.mark.parametrize("kind", ["drop-in", "dataset"])
def test_validation_sees_each_sample_once(ranks: list[dict[str, Any]], kind: str) -> None:
    seen = sorted(sample for found in ranks for sample in found[f"{kind}, validated"])
    assert seen == sorted([*range(SAMPLES)] * EPOCHS)


def test_a_writer_of_predictions_finds_the_numbers_of_the_samples_in_the_batch(ranks: list[dict[str, Any]]) -> None:
    for found, parts in zip(ranks, ([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]), strict=True):
        assert found["written"] == [(part, part) for part in parts]
