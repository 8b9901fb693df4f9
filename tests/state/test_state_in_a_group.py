"""Accumulated steps: what a state in the middle of a group says, and by what a loss is divided."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

NUMBERS: Any = torch.arange(7.0)


def by_groups_of_two() -> Any:
    return tdi.DataLoader(NUMBERS, 2, accumulate=2)


@pytest.mark.xfail(
    strict=True,
    reason="groups are to be made outside of the loader, which then says that a state has no gradients of first steps",
)
def test_who_goes_on_in_a_group_is_told_that_the_gradients_of_its_first_steps_are_not_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = by_groups_of_two()
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = by_groups_of_two()
    with caplog.at_level(logging.WARNING, logger="torchdistinput"):
        resumed.load_state_dict(state)
        next(iter(resumed))
    assert "gradients" in caplog.text


def gradients_of_groups() -> list[float]:
    """The gradient of each group at a weight that multiplies the samples: the mean of its samples, over all ranks."""
    loader = by_groups_of_two()
    weight = torch.ones((), requires_grad=True)
    found = []
    for samples in loader:
        tdi.average_loss(samples * weight, loader.step).backward()  # type: ignore[no-untyped-call] # of torch
        if loader.step.last_in_group:
            assert weight.grad is not None
            mean = loader.step.num_workers
            found.append(tdi.Strategy().reduce("SUM", weight.grad, axis=None).item() / mean)
            weight.grad = None
    return found


@pytest.mark.xfail(
    strict=True, reason="a loss is to know by what it gets what to divide by: a step of a group, or the whole group"
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_of_an_accumulated_step_is_divided_by_its_group(world_size: int) -> None:
    ranks = [gradients_of_groups()] if world_size == 1 else run_ranks(world_size, gradients_of_groups)
    for found in ranks:
        assert found == pytest.approx([NUMBERS[:4].mean().item(), NUMBERS[4:].mean().item()])
