"""The drop-in loader inside other people's training loops: each sample comes once, and nobody divides it again."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support.fsdp import shard
from torchdistinput.testing import run_ranks

SAMPLES = 11
BATCH = 4
EPOCHS = 2

Epochs = list[list[list[int]]]
"""The samples of each step of each epoch."""
Weights = list[list[float]]


def data() -> TensorDataset:
    features = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES
    return TensorDataset(torch.arange(SAMPLES), features, features.sum(dim=1))


def loader_of(cls: Any) -> Any:
    return cls(data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


def one_process() -> tuple[Epochs, Weights]:
    """The samples of each batch with torch's loader in one process, and the weights after training."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = loader_of(DataLoader)
    epochs: Epochs = []
    for _ in range(EPOCHS):
        epochs.append([])
        for number, x, y in loader:
            optimizer.zero_grad()
            (model(x).squeeze(1) - y).square().mean().backward()
            optimizer.step()
            epochs[-1].append(number.tolist())
    return epochs, model.weight.tolist()


def check(ranks: list[tuple[Epochs, Weights]], expected: tuple[Epochs, Weights]) -> None:
    """The ranks' samples put together are the batches of one process; the weights are its weights."""
    epochs, weight = expected
    assert [
        [[sample for part in parts for sample in part] for parts in zip(*steps, strict=True)]
        for steps in zip(*(seen for seen, _ in ranks), strict=True)
    ] == epochs
    for _, found in ranks:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(weight), rtol=0, atol=1e-6)


def train(model: nn.Module, optimizer: Any, loader: Any, backward: Any = torch.Tensor.backward) -> list[Any]:
    """A plain loop; the samples of each of this rank's batches."""
    epochs: list[Any] = []
    for _ in range(EPOCHS):
        epochs.append([])
        for number, x, y in loader:
            optimizer.zero_grad()
            losses = (model(x).squeeze(1) - y).square()
            backward(tdi.average_loss(losses, loader.step))
            optimizer.step()
            epochs[-1].append(number.tolist())
    return epochs


def with_ddp() -> Any:
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    model = DistributedDataParallel(net)
    epochs = train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of(tdi.DataLoader))
    return epochs, net.weight.tolist()


def with_fsdp2() -> Any:
    torch.manual_seed(0)
    model = shard(nn.Linear(2, 1))
    epochs = train(model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of(tdi.DataLoader))
    return epochs, model.weight.full_tensor().tolist()


def test_a_plain_loop_with_ddp_is_the_training_of_one_process() -> None:
    check(run_ranks(2, with_ddp), one_process())


def test_a_plain_loop_with_fsdp2_is_the_training_of_one_process() -> None:
    check(run_ranks(2, with_fsdp2), one_process())


def with_accelerate() -> Any:
    from accelerate import Accelerator  # noqa: PLC0415 - seconds, and only its own test needs it

    from torchdistinput.integrations.accelerate import prepare  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = prepare(accelerator, loader_of(tdi.DataLoader))
    model, prepared, loader = accelerator.prepare(net, optimizer, given)
    assert accelerator.num_processes == 2
    assert loader is given
    epochs = train(model, prepared, loader, accelerator.backward)
    weight = accelerator.unwrap_model(model).weight.tolist()
    accelerator.end_training()
    return epochs, weight


def test_accelerate_with_its_defaults_does_not_divide_a_prepared_loader_again() -> None:
    check(run_ranks(2, with_accelerate, init_group=False, timeout_seconds=120), one_process())


def with_lightning(folder: str, ours: bool) -> Any:
    """One rank: two epochs by a Trainer, with the loader of this library or with torch's own."""
    warnings.simplefilter("ignore")  # its own advice
    import lightning  # noqa: PLC0415 - as above

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)
            self.epochs: list[Any] = []
            self.validated: list[int] = []

        def on_train_epoch_start(self) -> None:
            self.epochs.append([])

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            number, x, y = batch
            self.epochs[-1].append(number.tolist())
            losses = (self.net(x).squeeze(1) - y).square()
            return tdi.average_loss(losses, training.step) if ours else losses.mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.validated.extend(batch[0].tolist())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    module = Module()
    cls: Any = tdi.DataLoader if ours else DataLoader
    training, validation = loader_of(cls), cls(data(), batch_size=BATCH)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp" if ours else "auto",  # "ddp" would put a DistributedSampler into torch's loader
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, training, validation)
    return (module.epochs, module.net.weight.tolist()), module.validated


def test_lightnings_trainer_with_its_defaults_does_not_divide_the_loader_again(tmp_path: Path) -> None:
    ((alone, _),) = run_ranks(1, with_lightning, str(tmp_path), False, init_group=False, timeout_seconds=120)
    found = run_ranks(2, with_lightning, str(tmp_path), True, init_group=False, timeout_seconds=120)
    check([training for training, _ in found], alone)
    validated = [sample for _, samples in found for sample in samples]
    assert sorted(validated) == sorted(list(range(SAMPLES)) * EPOCHS)


# ------------------------------------------------------------------------ who asks whether a loader is torch's


EACH_ONCE = [([0, 1], [2, 3]), ([4, 5], [6, 7]), ([8, 9], [10])]
"""The samples of both ranks in each step."""


def asked_by_lightning(folder: str) -> Any:
    """The batches that a Trainer predicts on, and the lengths that it sees."""
    warnings.simplefilter("ignore")
    import lightning  # noqa: PLC0415 - as above

    class Module(lightning.LightningModule):
        def predict_step(self, batch: Any, _: int) -> list[int]:
            return [int(number) for number in batch[0]]

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    predicted = trainer.predict(Module(), tdi.DataLoader(data(), batch_size=BATCH))
    return predicted, trainer.num_predict_batches


def test_lightnings_trainer_sees_the_right_length_and_predicts_on_each_sample_once(tmp_path: Path) -> None:
    (first, length), (second, other) = run_ranks(
        2, asked_by_lightning, str(tmp_path), init_group=False, timeout_seconds=120
    )
    assert length == other == [3]
    assert [*zip(first, second, strict=True)] == EACH_ONCE


def asked_by_fabric() -> Any:
    """What Fabric says, and what comes without it."""
    warnings.simplefilter("ignore")
    import lightning  # noqa: PLC0415 - as above

    fabric = lightning.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    loader: Any = tdi.DataLoader(data(), batch_size=BATCH, device=fabric.device)
    try:
        fabric.setup_dataloaders(loader)
    except TypeError as error:
        return str(error), [number.tolist() for number, *_ in loader]
    return "", []


def test_fabric_refuses_the_loader_which_needs_no_setup() -> None:
    (refusal, first), (_, second) = run_ranks(2, asked_by_fabric, init_group=False, timeout_seconds=120)
    assert "Only PyTorch DataLoader are currently supported" in refusal
    assert [*zip(first, second, strict=True)] == EACH_ONCE


def test_torchmetrics_sees_each_sample_once() -> None:
    for value, own in run_ranks(2, with_torchmetrics, timeout_seconds=120):
        assert value == sum(range(SAMPLES)) / SAMPLES
        assert own is True


def with_torchmetrics() -> tuple[float, bool]:
    """The mean over all ranks; and whether this rank's part alone has another one."""
    from torchmetrics import MeanMetric  # noqa: PLC0415 - as above

    metric, alone = MeanMetric(), MeanMetric(sync_on_compute=False)
    for number, *_ in tdi.DataLoader(data(), batch_size=BATCH):
        metric.update(number)
        alone.update(number)
    return float(metric.compute()), float(alone.compute()) != float(metric.compute())


KEEPS_LISTS = ("AUROC", "SpearmanCorrCoef")
"""Metrics that keep what they get: on a rank that never had a sample they need the dtypes of an empty part."""


def metrics_of(parts: list[Any]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The values where most metrics pass over empty parts; and the metrics that fail on an empty part."""
    import torchmetrics  # noqa: PLC0415 - as above

    classes: Any = {"task": "multiclass", "num_classes": 3}
    values: dict[str, Any] = {}
    fail = set()
    for name in ("Accuracy", "F1Score", "AUROC", "ConfusionMatrix", "JaccardIndex"):
        metric = getattr(torchmetrics, name)(**classes)
        values[name] = (metric, lambda scores, labels: (scores, labels))
    for name in ("MeanSquaredError", "PearsonCorrCoef", "R2Score", "SpearmanCorrCoef"):
        values[name] = (getattr(torchmetrics, name)(), lambda scores, labels: (scores[:, 0], labels.float()))
    values["MeanMetric"] = (torchmetrics.MeanMetric(), lambda scores, _: (scores[:, 0],))
    found = {}
    for name, (metric, inputs) in values.items():
        for scores, labels in parts:
            if len(labels) or name in KEEPS_LISTS:
                metric.update(*inputs(scores, labels))
        found[name] = metric.compute()
        try:
            metric.update(*inputs(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))
        except (RuntimeError, IndexError):
            fail.add(name)
    return found, fail


def scored() -> TensorDataset:
    made = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(21, 3, generator=made), torch.arange(21) % 3)


def metrics_with_empty_parts(batch: int) -> tuple[dict[str, torch.Tensor], set[str], int]:
    parts = [tuple(part) for part in tdi.DataLoader(scored(), batch_size=batch)]
    return *metrics_of(parts), sum(len(labels) for _, labels in parts)


@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
def test_metrics_that_pass_over_an_empty_part_have_the_values_of_one_process() -> None:
    """The last batch has one sample, so the second rank has none; with batches of one it never has any."""
    expected, _ = metrics_of([scored().tensors])
    for batch, samples in ((10, [11, 10]), (1, [21, 0])):
        ranks = run_ranks(2, metrics_with_empty_parts, batch, timeout_seconds=120)
        assert [count for *_, count in ranks] == samples
        for values, fail, _ in ranks:
            assert fail >= {"Accuracy", "F1Score", "PearsonCorrCoef"}
            for name, value in values.items():
                torch.testing.assert_close(value, expected[name], msg=name)
