"""Accumulated steps: where a state of a group goes on, and by what a loss is divided."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

NUMBERS: Any = torch.arange(7.0)


def test_a_state_is_that_after_the_last_step_of_the_group() -> None:
    loader, state = tdi.DataLoader(NUMBERS, 2), {}
    for _, step in next(tdi.groups(loader, 3)):
        state = json.loads(json.dumps(loader.state_dict()))
        assert (step.epoch, state["step"]) == (0, 3)
    resumed = tdi.DataLoader(NUMBERS, 2)
    resumed.load_state_dict(state)
    (group,) = tdi.groups(resumed, 3)
    assert [(batch.tolist(), step.index) for batch, step in group] == [([6.0], 3)]
    assert (group.global_size, group.sums) == (1, {})


def test_an_error_comes_before_the_first_step_of_its_group() -> None:
    bad: Any = [*NUMBERS[:3], None]
    groups = tdi.groups(tdi.DataLoader(bad, 1), 2)
    assert len(next(groups)) == 2
    with pytest.raises(TypeError, match="found <class 'NoneType'>"):
        next(groups)
    with pytest.raises(ValueError, match="count=0; a group has 1 step or more"):
        tdi.groups(tdi.DataLoader(bad, 1), 0)


def state_of_0_2(group: list[Any]) -> dict[str, Any]:
    """A state that 0.2 took with ``accumulate=2``: after 1 step, in a group, or after the group."""
    loader = tdi.DataLoader(NUMBERS, 2)
    batches = iter(loader)
    for _ in range(1 if group else 2):
        next(batches)
    return {**loader.state_dict(), "group": group}


def test_a_state_of_0_2_that_was_taken_in_a_group_says_whose_gradients_are_not_in_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for group, rest in (([2, 2, []], 3), ([], 2)):
        loader = tdi.DataLoader(NUMBERS, 2)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="torchdistinput"):
            loader.load_state_dict(state_of_0_2(group))
        assert ("The gradients of the first of them are not in it" in caplog.text) == bool(group)
        assert len(list(loader)) == rest


def gradients_of_groups() -> list[float]:
    """The gradient of each group at a weight that multiplies the samples: the mean of its samples, over all ranks."""
    loader = tdi.DataLoader(NUMBERS, 2)
    weight = torch.ones((), requires_grad=True)
    found = []
    for group in tdi.groups(loader, 2):
        for samples, _ in group:
            tdi.average_loss(samples * weight, group).backward()  # type: ignore[no-untyped-call] # of torch
        assert weight.grad is not None
        found.append(tdi.Strategy().reduce("SUM", weight.grad, axis=None).item() / loader.step.num_workers)
        weight.grad = None
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_of_an_accumulated_step_is_divided_by_its_group(world_size: int) -> None:
    ranks = [gradients_of_groups()] if world_size == 1 else run_ranks(world_size, gradients_of_groups)
    for found in ranks:
        assert found == pytest.approx([NUMBERS[:4].mean().item(), NUMBERS[4:].mean().item()])
