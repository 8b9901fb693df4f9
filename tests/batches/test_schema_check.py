"""The structure of the elements: learned from the first, checked with every other, the latest for empty batches."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.structures import KINDS, described
from torchdistinput.batches import pytree
from torchdistinput.batches.pytree import batch_size, structure_of
from torchdistinput.batches.schema_check import KnownSchema, SchemaChecker
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
    assert known.size_of(last) is None
    known.remember(last, pytree.batch_size(last))
    again = pytree.map_leaves(torch.ones_like, last)
    assert known.size_of(last) == known.size_of(again) == pytree.batch_size(again)
    for other in [*KNOWN, *UNKNOWN, *OTHERS]:
        assert (known.size_of(other) is not None) == (other is last)
    known.forget()
    assert known.size_of(last) is None


@pytest.mark.parametrize("last", [*UNKNOWN, *NOTHING], ids=lambda _: "")
def test_what_is_not_plain_is_not_remembered(last: Any) -> None:
    known = KnownSchema()
    known.remember((x, y), 4)
    known.remember(last, 4)
    assert not known.is_plain
    assert all(known.size_of(batch) is None for batch in [*KNOWN, *UNKNOWN, *OTHERS])


@pytest.mark.parametrize("last", KNOWN, ids=lambda _: "")
def test_where_the_structure_is_known_a_batch_of_another_size_is_the_last_one_from_then_on(last: Any) -> None:
    structure = pytree.structure_of(last)
    twice = pytree.map_leaves(lambda leaf: torch.cat([leaf, leaf]), last)
    sizes = [pytree.cut(twice, 0, size) for size in (0, 1, 4, 7)]
    uneven = [leaf[:1] for leaf in last] if isinstance(last, list) else last
    for other in [*sizes, *KNOWN, *UNKNOWN, *OTHERS, uneven, torch.tensor(3), (torch.tensor(3), y)]:
        known = KnownSchema()
        known.structure = structure
        known.remember(last, 4)
        known.mark = "noted"
        size = structure.size_of_same(other)
        assert known.size_of(other) == size
        if size is None or other is last:
            assert known.mark == "noted"
            assert known.is_plain
        elif known.is_plain:  # not of a tensor of the user's own class
            known.structure = None
            assert known.size_of(other) == size
            assert (known.size_of(last) is None) == (size != 4)


def measured(checker: SchemaChecker, piece: Any) -> int:
    """Lets a schema checker see a batch; samples in it."""
    size = batch_size(piece)
    checker.see(piece, size)
    return size


def test_a_new_checker_knows_nothing() -> None:
    checker = SchemaChecker()
    assert checker.structure is None
    assert checker.digest is None
    assert not checker.knows(torch.zeros(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_is_measured_and_makes_empty_pieces_like_it(kind: str) -> None:
    checker = SchemaChecker()
    assert measured(checker, KINDS[kind](3)) == 3
    assert checker.structure is not None
    assert described(checker.structure.empty()) == described(KINDS[kind](0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_size_is_the_measured_one(kind: str) -> None:
    checker = SchemaChecker()
    measured(checker, KINDS[kind](3))
    for size in (0, 1, 5):
        checker.knows(KINDS[kind](size))
        assert measured(checker, KINDS[kind](size)) == size


def test_the_common_kinds_are_known_without_measuring() -> None:
    for kind in ("bare", "halves", "flags", "mapping", "named"):
        checker = SchemaChecker()
        measured(checker, KINDS[kind](3))
        assert checker.knows(KINDS[kind](2))


def test_every_other_structure_is_refused_and_never_taken_for_known() -> None:
    for before in KINDS:
        for now in KINDS:
            if before == now:
                continue
            checker = SchemaChecker()
            measured(checker, KINDS[before](2))
            assert not checker.knows(KINDS[now](2))
            with pytest.raises(BatchingError, match=r"structure of the elements changed: before .*, now .*"):
                measured(checker, KINDS[now](2))


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(2, 3), "y": torch.zeros(2)},  # a dtype
        {"x": torch.zeros(2, 3, dtype=torch.int64), "y": torch.zeros(2, 1)},  # a dim more
        {"x": torch.zeros(2, 3, dtype=torch.int64)},  # a key less
        {"x": torch.zeros(2, 3, dtype=torch.int64), "z": torch.zeros(2)},  # another key
        [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)],  # another container
    ],
)
def test_nesting_names_dtypes_and_number_of_dims_must_stay(other: Any) -> None:
    checker = SchemaChecker()
    measured(checker, {"x": torch.zeros(2, 3, dtype=torch.int64), "y": torch.zeros(2)})
    assert not checker.knows(other)
    with pytest.raises(BatchingError, match="structure of the elements changed"):
        measured(checker, other)


def test_the_order_of_the_keys_of_a_dict_may_change_and_becomes_that_of_the_first() -> None:
    checker = SchemaChecker()
    measured(checker, {"x": torch.zeros(2), "y": torch.ones(2)})
    digest = checker.digest
    piece = checker.see({"y": torch.ones(3), "x": torch.zeros(3)}, 3)
    assert list(piece) == ["x", "y"]
    assert piece["y"].tolist() == [1, 1, 1]
    assert checker.digest == digest


def test_a_number_as_a_key_is_not_its_text() -> None:
    checker = SchemaChecker()
    measured(checker, {1: torch.zeros(2)})
    with pytest.raises(BatchingError, match="changed"):
        measured(checker, {"1": torch.zeros(2)})


def test_unequal_sizes_inside_a_piece_are_never_taken_for_known() -> None:
    checker = SchemaChecker()
    measured(checker, (torch.zeros(2), torch.zeros(2)))
    assert not checker.knows((torch.zeros(2), torch.zeros(3)))


def test_what_another_rank_told_is_as_if_seen_here() -> None:
    seen, told = SchemaChecker(), SchemaChecker()
    measured(seen, {"x": torch.zeros(2, 3)})
    told.learn(structure_of({"x": torch.zeros(9, 5)}))
    assert seen.digest == told.digest
    with pytest.raises(BatchingError, match="changed"):
        measured(told, torch.zeros(2))


@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_hold_strings_for_certain_are_not_looked_at_and_everything_else_is(kind: str) -> None:
    certain, other = SchemaChecker(strings=True), SchemaChecker()
    assert not certain.knows(["a"])
    for checker in (certain, other):
        measured(checker, KINDS[kind](3))
    for batch in ([], ["a", "b"], ("a", "b"), KINDS[kind](2), torch.zeros(3), {"x": ["a"]}):
        assert certain.knows(batch) == other.knows(batch)
    texts = SchemaChecker(strings=True)
    measured(texts, ["a", "b"])
    assert texts.knows([object()] * 3)  # nobody looked
    assert not texts.knows((1, 2))
