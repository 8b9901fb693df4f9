"""An argument of another type on one rank only is an error of every rank, at once, that names it and the rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchdistinput as tdi
from tests.support.epochs import Raised, raised
from torchdistinput.testing import run_ranks

SOON = 20.0  # far below the timeouts that these tests leave alone
NUMBERS: Any = range(8)


def on_one_rank(value: Any, other: Any) -> Any:
    return value if dist.get_rank() == 1 else other


CALLS: dict[str, tuple[Callable[[Any], Any], list[Any], str]] = {
    "timeout_seconds": (
        lambda value: tdi.Strategy(timeout_seconds=on_one_rank(value, 60)),
        ["60", None, [], True, torch.tensor(60.0), float("inf"), 10**30],
        "timeout_seconds",
    ),
    "process_group": (
        lambda value: tdi.Strategy(process_group=on_one_rank(value, None)),
        ["x", 5, [1]],
        "process_group",
    ),
    "mesh": (lambda value: tdi.Strategy(mesh=on_one_rank(value, None)), ["x", 5, [1]], "mesh"),
    "module": (
        lambda value: tdi.Strategy(timeout_seconds=60).mirror(on_one_rank(value, nn.Linear(2, 2))),
        [None, "x", torch.ones(2)],
        "mirror.*module",
    ),
    "device": (
        lambda value: iter(tdi.DataLoader(NUMBERS, 4, device=on_one_rank(value, "cpu"))),
        ["nonsense", -1, 3.0],
        "devices",
    ),
}


def all_calls() -> dict[str, list[tuple[Raised | None, float]]]:
    """One rank: what each wrong value raises, and how soon."""
    return {name: each_value(name) for name in CALLS}


def each_value(name: str) -> list[tuple[Raised | None, float]]:
    call, values, _ = CALLS[name]
    found = []
    for value in values:
        began = time.monotonic()
        found.append((raised(partial(call, value)), time.monotonic() - began))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[tuple[Raised | None, float]]]]:
    return run_ranks(2, all_calls)


@pytest.mark.parametrize("name", CALLS)
def test_what_one_rank_was_given_wrongly_is_told_to_all(
    name: str, ranks: list[dict[str, list[tuple[Raised | None, float]]]]
) -> None:
    first, second = ranks
    for (ours, seconds), (theirs, _) in zip(first[name], second[name], strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.kind == theirs.kind
        assert ours.kind in {"TypeError", "ValueError"}
        assert "rank 1" in ours.message
        assert seconds < SOON


def test_a_strategy_of_the_drop_in_that_is_none_is_refused_at_once() -> None:
    wrong: Any = "ddp"
    with pytest.raises(TypeError, match="strategy is a str"):
        tdi.DataLoader(NUMBERS, 4, strategy=wrong)
