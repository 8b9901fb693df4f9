"""What users must mind with empty parts, and with parts of one row: each trap beside its way out.

The parts come from real splits of short batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import RankFailed, run_ranks


def parts_of(images: Tensor, replicas: int) -> tuple[Tensor, ...]:
    """What the replicas get of one global batch."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    loader = strategy.distribute_dataset(DataLoader(TensorDataset(images), batch_size=len(images)))
    ((element,),) = loader
    return tuple(piece for piece in strategy.local_results(element))


def images(rows: int) -> Tensor:
    return torch.randn(rows, 2, 4, 4, generator=torch.Generator().manual_seed(1))


def empty_part() -> Tensor:
    _, part = parts_of(images(1), 2)
    assert part.shape == (0, 2, 4, 4)
    return part


def one_row() -> Tensor:
    _, part = parts_of(images(3), 2)
    assert part.shape == (1, 2, 4, 4)
    return part


def norm_of_one_row(norm: nn.Module) -> Callable[[Tensor], Any]:
    """Asks a norm for a part of one row."""
    return lambda _: norm(one_row().flatten(1))


TRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "view": (lambda x: x.view(len(x), -1), lambda x: x.flatten(1)),
    "reshape": (lambda x: x.reshape(len(x), -1), lambda x: x.view(-1, 32)),
    "amax": (lambda x: x.amax(dim=0), lambda x: x.sum(dim=0)),
    "argmax": (lambda x: x.argmax(dim=0), lambda x: x.flatten(1).argmax(dim=1)),
    "the first": (lambda x: x[0], lambda x: x[:1]),
    "InstanceNorm": (nn.InstanceNorm2d(2, affine=True), nn.GroupNorm(2, 2)),
    "BatchNorm": (norm_of_one_row(nn.BatchNorm1d(32)), norm_of_one_row(nn.BatchNorm1d(32).eval())),
    "statistics": (norm_of_one_row(nn.BatchNorm1d(32)), norm_of_one_row(nn.LayerNorm(32))),
}
"""What fails on an empty part, or a part of one row, and what to write instead."""


@pytest.mark.parametrize(("fails", "works"), TRAPS.values(), ids=TRAPS)
def test_what_fails_on_a_short_part_has_a_way_out(
    fails: Callable[[Tensor], Any], works: Callable[[Tensor], Any]
) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        fails(empty_part())
    works(empty_part())


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.int64)),
    "mse_loss": lambda out: F.mse_loss(out, torch.ones_like(out)),
    "mean": lambda out: out.mean(),
}


@pytest.mark.parametrize("loss", MEANS)
def test_a_mean_loss_of_an_empty_part_is_nan_but_its_gradients_are_zero(loss: str) -> None:
    model = nn.Linear(16, 3)
    value = MEANS[loss](model(empty_part()[:, 0].flatten(1)))
    torch.autograd.backward(value)
    assert math.isnan(value.item())
    assert [p.grad is not None and p.grad.eq(0).all().item() for p in model.parameters()] == [True, True]


def test_the_mean_of_the_parts_means_is_not_the_mean_but_average_loss_is() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    loader = strategy.distribute_dataset(
        DataLoader(TensorDataset(torch.tensor([1.0, 1.0, 4.0]).double()), batch_size=3)
    )
    ((losses,),) = loader
    parts = strategy.local_results(losses)
    assert [part.tolist() for part in parts] == [[1.0, 1.0], [4.0]]
    assert [part.mean().item() for part in parts] == [1.0, 4.0]
    assert sum(tdi.average_loss(part, loader.step).item() for part in parts) == pytest.approx(2.0)
    assert strategy.reduce("MEAN", losses, axis=0) == 2.0  # for logs and metrics


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Linear": (nn.Linear(4, 3), (2, 4)),
    "Conv2d": (nn.Conv2d(2, 3, 3), (2, 4, 4)),
    "MaxPool2d": (nn.MaxPool2d(2), (2, 4, 4)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(1), (2, 4, 4)),
    "BatchNorm2d": (nn.BatchNorm2d(2), (2, 4, 4)),
    "LSTM": (nn.LSTM(4, 3, batch_first=True), (5, 4)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (5, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_an_empty_batch_and_get_gradients_of_zero(name: str) -> None:
    layer, shape = LAYERS[name]
    out = layer(torch.zeros(0, *shape, requires_grad=True))
    out = out[0] if isinstance(out, tuple) else out
    assert len(out) == 0
    torch.autograd.backward(out.sum())
    assert all(p.grad is not None and p.grad.eq(0).all() for p in layer.parameters())


# Under DDP every rank runs every layer at every step

SAMPLES = 5
OVER_TWO_RANKS = {4: ["2 + 2", "1 + 0"], 1: ["1 + 0"] * 5}  # the parts by global batch size
PATIENCE_SECONDS = 60.0


class Net(nn.Module):
    """Two layers; ``skips`` leaves the first one out where there is nothing to do."""

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.outer = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.skips and len(x) == 0 else torch.tanh(self.inner(x))
        out: Tensor = self.outer(hidden)
        return out


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(SAMPLES, 3, dtype=torch.float64, generator=made), torch.arange(SAMPLES) % 2)


def gradients(
    global_batch: int, skips: bool, finds: bool, passes_over: bool = False, timeout_seconds: float = PATIENCE_SECONDS
) -> list[float]:
    """Those of an epoch, added up."""
    net = Net(skips=skips)
    model = DistributedDataParallel(net, find_unused_parameters=finds)
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=timeout_seconds)
    loader = strategy.distribute_dataset(DataLoader(data(), global_batch))
    for x, y in loader:
        if passes_over and len(x) == 0:
            continue
        per_sample = F.cross_entropy(model(x), y, reduction="none")
        torch.autograd.backward(tdi.average_loss(per_sample, loader.step))
    return flat(net)


def all_gradients(cases: list[tuple[int, bool, bool]]) -> list[list[float]]:
    return [gradients(*case) for case in cases]


def gradients_of_one_process(global_batch: int) -> list[float]:
    net = Net()
    for x, y in DataLoader(data(), global_batch):
        torch.autograd.backward(F.cross_entropy(net(x), y))
    return flat(net)


def flat(net: Net) -> list[float]:
    return [value for p in net.parameters() if p.grad is not None for value in p.grad.flatten().tolist()]


def test_running_every_layer_or_finding_the_unused_gives_the_gradients_of_one_process() -> None:
    cases = [(size, unused, unused) for size in OVER_TWO_RANKS for unused in (False, True)]
    for found in run_ranks(2, all_gradients, cases):
        for (size, *_), of_case in zip(cases, found, strict=True):
            assert of_case == pytest.approx(gradients_of_one_process(size), abs=1e-12)


def test_a_layer_that_is_skipped_where_the_part_is_empty_breaks_the_next_step() -> None:
    with pytest.raises(RankFailed, match="Expected to have finished reduction in the prior iteration"):
        run_ranks(2, gradients, 1, True, False)


def test_passing_over_an_empty_part_leaves_the_others_waiting_for_its_gradients() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, gradients, 1, False, False, True, 2.0)
    assert isinstance(failure.value.__cause__, tdi.CoordinationTimeout)
