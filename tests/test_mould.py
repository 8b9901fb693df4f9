"""The structure of the elements: learned from the first, checked with every other, the latest for empty batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.structures import KINDS, described
from torchdistinput.errors import BatchingError
from torchdistinput.mould import Mould
from torchdistinput.tree import batch_size, structure_of


def measured(mould: Mould, piece: Any) -> int:
    """Lets a mould see a batch; samples in it."""
    size = batch_size(piece)
    mould.see(piece, size)
    return size


def test_a_new_mould_knows_nothing() -> None:
    mould = Mould()
    assert mould.structure is None
    assert mould.digest is None
    assert not mould.knows(torch.zeros(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_is_measured_and_makes_empty_pieces_like_it(kind: str) -> None:
    mould = Mould()
    assert measured(mould, KINDS[kind](3)) == 3
    assert mould.structure is not None
    assert described(mould.structure.empty()) == described(KINDS[kind](0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_size_is_the_measured_one(kind: str) -> None:
    mould = Mould()
    measured(mould, KINDS[kind](3))
    for size in (0, 1, 5):
        mould.knows(KINDS[kind](size))
        assert measured(mould, KINDS[kind](size)) == size


def test_the_common_kinds_are_known_without_measuring() -> None:
    for kind in ("bare", "halves", "flags", "mapping", "named"):
        mould = Mould()
        measured(mould, KINDS[kind](3))
        assert mould.knows(KINDS[kind](2))


def test_every_other_structure_is_refused_and_never_taken_for_known() -> None:
    for before in KINDS:
        for now in KINDS:
            if before == now:
                continue
            mould = Mould()
            measured(mould, KINDS[before](2))
            assert not mould.knows(KINDS[now](2))
            with pytest.raises(BatchingError, match=r"structure of the elements changed: before .*, now .*"):
                measured(mould, KINDS[now](2))


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
    measured(mould, {"x": torch.zeros(2, 3, dtype=torch.int64), "y": torch.zeros(2)})
    assert not mould.knows(other)
    with pytest.raises(BatchingError, match="structure of the elements changed"):
        measured(mould, other)


def test_the_order_of_the_keys_of_a_dict_may_change_and_becomes_that_of_the_first() -> None:
    mould = Mould()
    measured(mould, {"x": torch.zeros(2), "y": torch.ones(2)})
    digest = mould.digest
    piece = mould.see({"y": torch.ones(3), "x": torch.zeros(3)}, 3)
    assert list(piece) == ["x", "y"]
    assert piece["y"].tolist() == [1, 1, 1]
    assert mould.digest == digest


def test_a_number_as_a_key_is_not_its_text() -> None:
    mould = Mould()
    measured(mould, {1: torch.zeros(2)})
    with pytest.raises(BatchingError, match="changed"):
        measured(mould, {"1": torch.zeros(2)})


def test_unequal_sizes_inside_a_piece_are_never_taken_for_known() -> None:
    mould = Mould()
    measured(mould, (torch.zeros(2), torch.zeros(2)))
    assert not mould.knows((torch.zeros(2), torch.zeros(3)))


def test_what_another_rank_told_is_as_if_seen_here() -> None:
    seen, told = Mould(), Mould()
    measured(seen, {"x": torch.zeros(2, 3)})
    told.learn(structure_of({"x": torch.zeros(9, 5)}))
    assert seen.digest == told.digest
    with pytest.raises(BatchingError, match="changed"):
        measured(told, torch.zeros(2))


@pytest.mark.parametrize("kind", KINDS)
def test_lists_that_hold_strings_for_certain_are_not_looked_at_and_everything_else_is(kind: str) -> None:
    certain, other = Mould(strings=True), Mould()
    assert not certain.knows(["a"])
    for mould in (certain, other):
        measured(mould, KINDS[kind](3))
    for batch in ([], ["a", "b"], ("a", "b"), KINDS[kind](2), torch.zeros(3), {"x": ["a"]}):
        assert certain.knows(batch) == other.knows(batch)
    texts = Mould(strings=True)
    measured(texts, ["a", "b"])
    assert texts.knows([object()] * 3)  # nobody looked
    assert not texts.knows((1, 2))
