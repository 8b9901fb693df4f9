"""What is known at a look is what is found by looking closely, and nothing else is known at a look."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from torchdistinput.batches import pytree
from torchdistinput.batches.same_schema import SameSchema


class Pair(NamedTuple):
    a: Any
    b: Any


class Own(torch.Tensor):
    """May be anything."""


x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
KNOWN: list[Any] = [x, y, (x, y), [x, y], {"x": x, "y": y}, (x,), [y]]
UNKNOWN: list[Any] = [Pair(x, y), OrderedDict(x=x), {"x": {"y": y}}, [x, "label"], (x, [y]), x.as_subclass(Own)]
NOTHING: list[Any] = [(), [], {}]  # is no batch
OTHERS: list[Any] = [
    *(torch.zeros(5, 2), torch.zeros(4, 3), torch.zeros(4, 2, 1), x.double()),
    *((x, y, y), (y, x), (x, x), (x, y.int()), (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))),
    *([y, x], [x, y, x], {"y": y, "x": x}, {"x": x}, {"x": x, "z": y}, {"x": x, "y": y, "z": y}),
    *((x, None), {"x": x, "y": 3}, [x, [y]], None, 3, "xy", (), [], {}, (x.as_subclass(Own), y)),
]


@pytest.mark.parametrize("last", KNOWN, ids=lambda _: "")
def test_exactly_what_is_like_the_last_batch_is_known(last: Any) -> None:
    alike = SameSchema()
    assert alike.size_of(last) is None
    alike.remember(last, pytree.batch_size(last))
    again = pytree.map_leaves(torch.ones_like, last)
    assert alike.size_of(last) == alike.size_of(again) == pytree.batch_size(again)
    for other in [*KNOWN, *UNKNOWN, *OTHERS]:
        assert (alike.size_of(other) is not None) == (other is last)
    alike.forget()
    assert alike.size_of(last) is None


@pytest.mark.parametrize("last", [*UNKNOWN, *NOTHING], ids=lambda _: "")
def test_what_cannot_be_known_at_a_look_is_not_remembered(last: Any) -> None:
    alike = SameSchema()
    alike.remember((x, y), 4)
    alike.remember(last, 4)
    assert all(alike.size_of(batch) is None for batch in [*KNOWN, *UNKNOWN, *OTHERS])


@pytest.mark.parametrize("last", KNOWN, ids=lambda _: "")
def test_what_differs_in_its_size_only_is_what_the_structure_takes_for_the_same(last: Any) -> None:
    structure = pytree.structure_of(last)
    twice = pytree.map_leaves(lambda leaf: torch.cat([leaf, leaf]), last)
    sizes = [pytree.cut(twice, 0, size) for size in (0, 1, 4, 7)]
    uneven = [leaf[:1] for leaf in last] if isinstance(last, list) else last
    for other in [*sizes, *KNOWN, *UNKNOWN, *OTHERS, uneven, torch.tensor(3), (torch.tensor(3), y)]:
        alike = SameSchema()
        alike.remember(last, 4)
        alike.mark = "noted"
        # Tensors of other classes may be anything.
        plain = structure.size_of_same(other) if own_class(other) == own_class(last) else None
        assert alike.resized(other) == plain
        assert alike.mark == "noted"
        now = last if plain is None else other
        assert alike.size_of(now) == pytree.batch_size(now)
        assert alike.size_of(last) == (4 if plain in (None, 4) else None)


def own_class(batch: Any) -> bool:
    leaves = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else [batch]
    return any(isinstance(leaf, Own) for leaf in leaves)
