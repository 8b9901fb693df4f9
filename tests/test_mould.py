"""The structure of the elements: learned from the first, checked with every other, the latest for empty batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.structures import KINDS, described
from torchdistinput.errors import BatchingError
from torchdistinput.mould import Mould
from torchdistinput.tree import structure_of


def measured(mould: Mould, piece: Any) -> int:
    return mould.measure(piece)[1]


def test_a_new_mould_knows_nothing() -> None:
    mould = Mould()
    assert mould.structure is None
    assert mould.digest is None
    assert mould.known_size(torch.zeros(3)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_is_measured_and_makes_empty_pieces_like_it(kind: str) -> None:
    mould = Mould()
    assert measured(mould, KINDS[kind](3)) == 3
    assert mould.structure is not None
    assert described(mould.structure.empty()) == described(KINDS[kind](0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_size_is_the_measured_one(kind: str) -> None:
    mould = Mould()
    mould.measure(KINDS[kind](3))
    for size in (0, 1, 5):
        assert mould.known_size(KINDS[kind](size)) in (None, size)
        assert measured(mould, KINDS[kind](size)) == size


def test_the_common_kinds_are_known_without_measuring() -> None:
    for kind in ("bare", "halves", "flags", "mapping", "named"):
        mould = Mould()
        mould.measure(KINDS[kind](3))
        assert mould.known_size(KINDS[kind](2)) == 2


def test_every_other_structure_is_refused_and_never_taken_for_known() -> None:
    for before in KINDS:
        for now in KINDS:
            if before == now:
                continue
            mould = Mould()
            mould.measure(KINDS[before](2))
            assert mould.known_size(KINDS[now](2)) is None
            with pytest.raises(BatchingError, match=r"structure of the elements changed: before .*, now .*"):
                mould.measure(KINDS[now](2))


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
    mould = Mould()
    mould.measure({"x": torch.zeros(2, 3, dtype=torch.int64), "y": torch.zeros(2)})
    assert mould.known_size(other) is None
    with pytest.raises(BatchingError, match="structure of the elements changed"):
        mould.measure(other)


def test_the_order_of_the_keys_of_a_dict_may_change_and_becomes_that_of_the_first() -> None:
    mould = Mould()
    mould.measure({"x": torch.zeros(2), "y": torch.ones(2)})
    digest = mould.digest
    piece, size = mould.measure({"y": torch.ones(3), "x": torch.zeros(3)})
    assert (list(piece), size) == (["x", "y"], 3)
    assert piece["y"].tolist() == [1, 1, 1]
    assert mould.digest == digest


def test_a_number_as_a_key_is_not_its_text() -> None:
    mould = Mould()
    mould.measure({1: torch.zeros(2)})
    with pytest.raises(BatchingError, match="changed"):
        mould.measure({"1": torch.zeros(2)})


def test_unequal_sizes_inside_a_piece_are_never_taken_for_known() -> None:
    mould = Mould()
    mould.measure((torch.zeros(2), torch.zeros(2)))
    assert mould.known_size((torch.zeros(2), torch.zeros(3))) is None


def test_what_another_rank_told_is_as_if_seen_here() -> None:
    seen, told = Mould(), Mould()
    seen.measure({"x": torch.zeros(2, 3)})
    told.learn(structure_of({"x": torch.zeros(9, 5)}))
    assert seen.digest == told.digest
    with pytest.raises(BatchingError, match="changed"):
        told.measure(torch.zeros(2))


@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_hold_strings_for_certain_are_not_looked_at_and_everything_else_is(kind: str) -> None:
    certain, other = Mould(strings=True), Mould()
    assert certain.known_size(["a"]) is None
    for mould in (certain, other):
        mould.measure(KINDS[kind](3))
    for batch in ([], ["a", "b"], ("a", "b"), KINDS[kind](2), torch.zeros(3), {"x": ["a"]}):
        assert certain.known_size(batch) == other.known_size(batch)
    texts = Mould(strings=True)
    texts.measure(["a", "b"])
    assert texts.known_size([object()] * 3) == 3  # nobody looked
    assert texts.known_size((1, 2)) is None
