"""The exact mean over the global batch from uneven and empty parts; ``test_weights.py`` has it under DDP and FSDP."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchdistinput import PerReplica, Step, Strategy, average_loss
from torchdistinput.testing import run_ranks


def sized(global_size: int | None, local_sizes: tuple[int, ...], num_workers: int = 1, num_replicas: int = 1) -> Step:
    return Step(0, 0, global_size, local_sizes, num_replicas, num_workers)


def parts_of(rows: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    return list(torch.split(rows, list(sizes)))


def test_the_shares_of_all_workers_average_to_the_mean_for_every_cut() -> None:
    losses = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0], dtype=torch.float64)
    for first, second in itertools.combinations_with_replacement(range(6), 2):
        sizes = (first, second - first, 5 - second)
        shares = [
            average_loss(part, sized(5, (len(part),), num_workers=3, num_replicas=3))
            for part in parts_of(losses, sizes)
        ]
        torch.testing.assert_close(torch.stack(shares).mean(), losses.mean(), rtol=0, atol=1e-12)


def test_an_empty_part_gives_zero_and_keeps_its_graph() -> None:
    model = torch.nn.Linear(2, 1)
    loss = average_loss(model(torch.zeros(0, 2)).squeeze(1), sized(3, (0,), num_workers=2, num_replicas=2))
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_what_a_sample_has_in_further_dims_is_summed() -> None:
    losses = torch.arange(6.0).reshape(2, 3)
    assert average_loss(losses, sized(2, (2,))).item() == losses.sum(1).mean().item()


def test_the_weighted_loss_is_divided_by_the_sum_of_the_weights_of_all() -> None:
    losses = torch.arange(1.0, 7.0).reshape(2, 3)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    padded = losses.masked_fill(~mask, torch.nan)  # a padded row may well have such a loss
    assert average_loss(padded, sized(2, (2,)), mask).item() == losses[mask].mean().item()
    per_sample = torch.tensor([1.0, 3.0])
    assert average_loss(losses, sized(2, (2,)), per_sample).item() == (6 * 1 + 15 * 3) / 4
    ones = torch.ones(2, dtype=torch.int64)
    assert average_loss(losses, sized(2, (2,)), ones).item() == average_loss(losses, sized(2, (2,))).item()


def test_with_weights_flattened_tokens_need_not_be_samples() -> None:
    assert average_loss(torch.ones(12), sized(3, (3,)), torch.ones(12)).item() == 1


def test_weights_that_are_all_zero_give_zero() -> None:
    losses = torch.ones(2, requires_grad=True)
    loss = average_loss(losses, sized(2, (2,)), torch.zeros(2))
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert losses.grad is not None
    assert losses.grad.tolist() == [0, 0]


def test_the_dtype_is_that_of_the_loss_with_weights_of_any_dtype() -> None:
    for dtype in (torch.bool, torch.int64, torch.float64, torch.float16):
        loss = average_loss(torch.ones(2), sized(2, (2,)), torch.ones(2, dtype=dtype))
        assert loss.item() == 1
        assert loss.dtype == torch.float32


@pytest.mark.parametrize("weighted", [False, True])
def test_the_replicas_of_a_process_add_up_to_the_gradients_of_the_whole_batch(weighted: bool) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        per_sample = model(x).square().sum(1)
        loss = average_loss(per_sample, sizes, w if weighted else None)
        torch.autograd.backward(loss)
        return loss.detach()

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    rows, weights = torch.randn(7, 3, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    sizes = sized(7, (3, 3, 1, 0), num_replicas=4)
    whole = model(rows).square().sum(1)
    mean = (whole * weights).sum() / weights.sum() if weighted else whole.mean()
    want = torch.autograd.grad(mean, list(model.parameters()))
    args = (PerReplica(parts_of(rows, sizes.local_sizes)), PerReplica(parts_of(weights, sizes.local_sizes)))
    strategy = Strategy(["cpu"] * 4)
    found = strategy.local_results(strategy.run(step, args))
    torch.testing.assert_close(sum(found), mean.detach(), rtol=0, atol=1e-12)
    for parameter, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-12)


def errors_of_two_replicas_per_rank() -> list[float]:
    """Worker i has the replicas 2i and 2i+1 on one module; their gradients add up, then the workers' are averaged."""

    def step(x: Tensor, w: Tensor) -> None:
        losses = net(x).square().sum(1)
        torch.autograd.backward(average_loss(losses, sizes, w if weighted else None))

    cut, errors, strategy, rank = [4, 4, 1, 0], [], Strategy(devices=["cpu"] * 2), dist.get_rank()
    mine = slice(2 * rank, 2 * rank + 2)
    sizes = sized(9, tuple(cut[mine]), num_workers=2, num_replicas=4)
    torch.manual_seed(0)
    net, rows = torch.nn.Linear(3, 2).double(), torch.randn(9, 3, dtype=torch.float64)
    weights = torch.arange(9) % 4
    whole = net(rows).square().sum(1)
    for weighted in (False, True):
        mean = (whole * weights).sum() / weights.sum() if weighted else whole.mean()
        want = torch.autograd.grad(mean, list(net.parameters()), retain_graph=True)
        net.zero_grad()
        strategy.run(step, [PerReplica(torch.split(all_of, cut)[mine]) for all_of in (rows, weights)])
        for parameter, grad in zip(net.parameters(), want, strict=True):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            errors.append((parameter.grad / 2 - grad).abs().max().item())
    return errors


def test_several_replicas_on_each_of_several_ranks_do_as_well() -> None:
    for errors in run_ranks(2, errors_of_two_replicas_per_rank):
        assert max(errors) < 1e-12, errors


@pytest.mark.parametrize(
    ("loss", "step", "weights", "error", "message"),
    [
        (torch.tensor(1.0), sized(2, (2,)), None, ValueError, "scalar: this loss is reduced already.*reduction='none'"),
        (1.0, sized(2, (2,)), None, TypeError, "got float"),
        (torch.ones(2), sized(None, (2,)), None, RuntimeError, "step.global_size is None.*coordination='off'"),
        (torch.ones(2), sized(None, (2,)), torch.ones(2), RuntimeError, "step.global_size is None"),
        (torch.ones(6), sized(2, (2,)), None, ValueError, r"got 6 losses .* has 2 sample\(s\)"),
        (torch.ones(3), sized(4, (2, 2), num_replicas=2), None, ValueError, r"has 2 sample\(s\)"),
        (torch.ones(0), sized(0, (0,)), None, ValueError, "global_size=0"),
        (torch.ones(2), sized(2, (2,)), 1.0, TypeError, "weights as a tensor, got float"),
        (torch.ones(2), sized(2, (2,)), torch.tensor(1.0), ValueError, r"weights of shape \[\]"),
        (torch.ones(2, 3), sized(2, (2,)), torch.ones(3), ValueError, r"shape \[3\] for losses of shape \[2, 3\]"),
        (torch.ones(2, 3), sized(2, (2,)), torch.ones(2, 1), ValueError, r"shape \[2, 1\]"),
        (torch.ones(2), sized(2, (2,)), torch.ones(2, 1), ValueError, r"shape \[2, 1\]"),
        (
            torch.ones(2),
            sized(4, (2,), 2, 2),
            torch.ones(2),
            RuntimeError,
            "cannot sum the weights over the 2 replicas",
        ),
        (torch.ones(2), sized(4, (2, 2), 1, 2), torch.ones(2), RuntimeError, "given to strategy.run"),
    ],
)
def test_what_would_give_a_wrong_scale_is_refused(
    loss: Any, step: Step, weights: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        average_loss(loss, step, weights)
