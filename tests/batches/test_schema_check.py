"""The structure of the elements: learned from the first, checked with every other, the latest for empty batches."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.structures import KINDS, described
from torchdistinput.batches import pytree
from torchdistinput.batches.known_schema import KnownSchema
from torchdistinput.batches.pytree import batch_size, structure_of
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.errors import BatchingError


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
def test_exactly_what_has_the_shapes_of_the_last_batch_is_known(last: Any) -> None:
    known = KnownSchema()
    assert known.size_of(last, None) is None
    known.remember(last, pytree.batch_size(last))
    again = pytree.map_leaves(torch.ones_like, last)
    assert known.size_of(last, None) == known.size_of(again, None) == pytree.batch_size(again)
    for other in [*KNOWN, *UNKNOWN, *OTHERS]:
        assert (known.size_of(other, None) is not None) == (other is last)


@pytest.mark.parametrize("last", [*UNKNOWN, *NOTHING], ids=lambda _: "")
def test_what_is_not_plain_is_not_remembered(last: Any) -> None:
    known = KnownSchema()
    known.remember((x, y), 4)
    known.remember(last, 4)
    assert not known.is_plain
    assert all(known.size_of(batch, None) is None for batch in [*KNOWN, *UNKNOWN, *OTHERS])


def measured(checker: SchemaChecker, piece: Any) -> int:
    """Lets a schema checker see a batch; samples in it."""
    checker.take(structure_of(piece))
    return batch_size(piece)


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_is_measured_and_makes_empty_pieces_like_it(kind: str) -> None:
    checker = SchemaChecker()
    assert measured(checker, KINDS[kind](3)) == 3
    assert checker.structure is not None
    assert described(checker.structure.empty()) == described(KINDS[kind](0))


def test_every_other_structure_is_refused() -> None:
    for before in KINDS:
        for now in KINDS:
            if before == now:
                continue
            checker = SchemaChecker()
            measured(checker, KINDS[before](2))
            with pytest.raises(BatchingError, match=r"structure of the elements changed: before .*, now .*"):
                measured(checker, KINDS[now](2))


def test_the_order_of_the_keys_of_a_dict_may_change_and_that_of_the_first_is_kept() -> None:
    checker = SchemaChecker()
    first = {"x": torch.zeros(2), "y": {"a": torch.ones(2), "b": torch.ones(2)}}
    measured(checker, first)
    digest = checker.digest
    for other in ({"y": first["y"], "x": first["x"]}, {"x": first["x"], "y": {"b": first["x"], "a": first["x"]}}):
        for found in (structure_of(other), pickle.dumps(structure_of(other)), pickle.dumps(structure_of(other))):
            assert checker.take(found)
            assert checker.structure is not None
            assert list(checker.structure.keys) == ["x", "y"]
    assert not checker.take(structure_of(first))
    assert checker.digest == digest


def test_what_another_rank_told_is_as_if_seen_here() -> None:
    seen, told = SchemaChecker(), SchemaChecker()
    measured(seen, {"x": torch.zeros(2, 3)})
    told.learn(structure_of({"x": torch.zeros(9, 5)}))
    assert seen.digest == told.digest
    with pytest.raises(BatchingError, match="changed"):
        measured(told, torch.zeros(2))


def test_elements_that_a_function_collated_keep_their_first_structure_and_may_differ() -> None:
    checker = SchemaChecker(one_structure=False, may_lack=True)
    checker.take(structure_of({"x": torch.zeros(2, 3)}))
    assert not checker.take(structure_of([torch.zeros(2)]))
    assert described(checker.empty()) == described({"x": torch.zeros(0, 3)})
    assert checker.digest == SchemaChecker(one_structure=False).digest
