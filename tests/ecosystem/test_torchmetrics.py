"""torchmetrics and a loader of this library: each sample is seen once, and empty parts change no value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

pytest.importorskip("torchmetrics")

SAMPLES = 11


def test_torchmetrics_sees_each_sample_once() -> None:
    for value, own in run_ranks(2, with_torchmetrics, timeout_seconds=120):
        assert value == sum(range(SAMPLES)) / SAMPLES
        assert own is True


def with_torchmetrics() -> tuple[float, bool]:
    """The mean over all ranks; and whether this rank's part alone has another one."""
    from torchmetrics import MeanMetric  # noqa: PLC0415 - seconds, and only here

    metric, alone = MeanMetric(), MeanMetric(sync_on_compute=False)
    for (number,) in tdi.DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=4):
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
