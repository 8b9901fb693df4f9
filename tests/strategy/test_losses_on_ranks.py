"""``average_loss`` under DDP and FSDP on real ranks: the gradients of one process on the same global batch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.fsdp import shard, whole
from torchdistinput.batches.per_replica import PerReplica
from torchdistinput.losses import average_loss
from torchdistinput.plan.options import Step
from torchdistinput.strategy import Strategy
from torchdistinput.testing import run_ranks

CUTS = {2: [[3, 2], [5, 0], [1, 0]], 3: [[2, 2, 1], [1, 0, 0]], 4: [[4, 4, 1, 0], [1, 0, 0, 0]]}
WRAPPERS = ["DDP", "DDP with static_graph", "FSDP"]
BOUND = 1e-12


class Net(nn.Module):
    """Layers with parameters of several shapes, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.outer = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.norm(torch.tanh(self.inner(torch.tanh(self.inner(x))))))
        return out


def new_net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def batch_of(size: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    rows = torch.randn(size, 4, dtype=torch.float64, generator=made)
    weights = torch.randint(0, 5, (size,), generator=made)
    weights[:1] = 3
    return rows, torch.randint(0, 3, (size,), generator=made), weights


def wrap(net: Net, wrapper: str) -> nn.Module:
    if wrapper == "FSDP":
        shard(net)
        return net
    return DistributedDataParallel(net, static_graph=wrapper == "DDP with static_graph")


def per_sample(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def largest_error(net: nn.Module, mean: Tensor, reference: Net) -> float:
    want = torch.autograd.grad(mean, list(reference.parameters()))
    found = [whole(p.grad) for p in net.parameters() if p.grad is not None]
    assert len(found) == len(want)
    return max((one - other).abs().max().item() for one, other in zip(found, want, strict=True))


def error_of_one_replica_per_rank(cut: list[int], wrapper: str, *, weighted: bool) -> float:
    """Two steps with the same weights, as static_graph learns its graph in the first."""
    rank, size = dist.get_rank(), sum(cut)
    start = sum(cut[:rank])
    rows, labels, weights = batch_of(size)
    mine = slice(start, start + cut[rank])
    step = Step(0, 0, size, (cut[rank],), len(cut), len(cut))
    net, reference = new_net(), new_net()
    model = wrap(net, wrapper)
    for _ in range(2):
        model.zero_grad()
        losses = per_sample(model, rows[mine], labels[mine])
        given = weights[mine] if weighted else None
        torch.autograd.backward(average_loss(losses, step, given))
    expected = per_sample(reference, rows, labels)
    mean = (expected * weights).sum() / weights.sum() if weighted else expected.mean()
    return largest_error(net, mean, reference)


def errors_of_one_replica_per_rank(cuts: list[list[int]], everything: bool) -> dict[str, float]:
    """Every cut and wrapper, with and without weights by turns."""
    turns = zip(itertools.product(cuts, WRAPPERS), itertools.cycle(((False,), (True,))), strict=False)
    with Strategy().scope():
        return {
            f"{cut, wrapper, weighted}": error_of_one_replica_per_rank(cut, wrapper, weighted=weighted)
            for (cut, wrapper), turn in turns
            for weighted in ((False, True) if everything else turn)
        }


@pytest.mark.parametrize("world", sorted(CUTS))
def test_gradients_over_uneven_and_empty_parts_are_those_of_one_process(world: int, all_cells: bool) -> None:
    for errors in run_ranks(world, errors_of_one_replica_per_rank, CUTS[world], all_cells):
        assert max(errors.values()) < BOUND, errors
        assert len(errors) == len(CUTS[world]) * len(WRAPPERS) * (1 + all_cells)


def errors_of_two_replicas_per_rank() -> dict[str, float]:
    """Worker i has the replicas 2i and 2i+1 on one module; their gradients add up, then the workers' are averaged."""

    def step(x: Tensor, y: Tensor, w: Tensor) -> None:
        torch.autograd.backward(average_loss(per_sample(net, x, y), sizes, w if weighted else None))

    cut, errors = [4, 4, 1, 0], {}
    strategy, rank = Strategy(devices=["cpu"] * 2), dist.get_rank()
    rows, labels, weights = batch_of(9)
    for weighted in (False, True):
        net, reference = new_net(), new_net()
        sizes = Step(0, 0, 9, tuple(cut[2 * rank : 2 * rank + 2]), num_replicas=4, num_workers=2)
        parts = [PerReplica(torch.split(all_of, cut)[2 * rank : 2 * rank + 2]) for all_of in (rows, labels, weights)]
        strategy.run(step, parts)
        for parameter in net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        expected = per_sample(reference, rows, labels)
        mean = (expected * weights).sum() / weights.sum() if weighted else expected.mean()
        errors["weighted" if weighted else "plain"] = largest_error(net, mean, reference)
    return errors


def test_several_replicas_on_each_of_several_ranks_do_as_well() -> None:
    for errors in run_ranks(2, errors_of_two_replicas_per_rank):
        assert max(errors.values()) < BOUND, errors
