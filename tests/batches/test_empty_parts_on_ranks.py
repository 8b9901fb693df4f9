"""What users must mind with empty parts under DDP: every rank runs every layer at every step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import RankFailed, run_ranks

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
