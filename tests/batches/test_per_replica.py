"""How values come apart for the local replicas, and together again."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.structures import KINDS
from torchdistinput.batches.collated import structure_of_collated
from torchdistinput.batches.per_replica import (
    PerReplica,
    local_results,
    regroup,
    regroup_batches,
    select,
    take_apart,
)
from torchdistinput.batches.pytree import flatten, has_rows, map_leaves
from torchdistinput.batches.schema import structure_of


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    x: Any
    y: Any


def test_a_long_per_replica_is_shown_on_a_line_for_each_replica() -> None:
    shown = repr(PerReplica([torch.zeros(3, 2), torch.ones(40)]))
    assert shown.startswith("PerReplica(\n  0: tensor(")
    assert shown.endswith(",\n)")


@pytest.mark.parametrize(("values", "error"), [([], ValueError), (torch.zeros(2), TypeError), ("ab", TypeError)])
def test_per_replica_needs_a_sequence_with_a_value_for_each_replica(values: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="one value"):
        PerReplica(values)


@pytest.mark.parametrize(
    "make", [Pair, Record, lambda x, y: {"x": x, "y": y}, lambda x, y: [x, y], lambda x, y: (x, y)]
)
def test_a_structure_stays_outside_and_comes_apart_as_it_was(make: Any) -> None:
    parts = [make(torch.tensor(k), [k, {"k": str(k)}]) for k in range(3)]
    whole = regroup(parts)
    assert type(whole) is type(parts[0])
    assert all(isinstance(leaf, PerReplica) for leaf in take_apart(whole)[1])
    assert [take_apart(part)[1] for part in local_results(whole, 3)] == [take_apart(part)[1] for part in parts]
    assert select(whole, 1) == parts[1]


def test_the_same_object_on_all_replicas_stays_bare_also_as_a_leaf() -> None:
    shared = object()
    whole = regroup([{"s": shared, "k": 0}, {"s": shared, "k": 1}])
    assert whole["s"] is shared
    assert whole["k"].values == (0, 1)
    assert regroup([None, None]) is None


def test_equal_numbers_of_the_replicas_need_not_be_told_apart() -> None:
    assert local_results(regroup([5, 5]), 2) == (5,)


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, r"at \['a'\]"),
        ({"a": 1}, {"b": 1}, "different structures: replica 0 has dict"),
        ((1, (2, 3)), (1, torch.zeros(1)), r"at \[1\]: replica 0 has tuple .* replica 1 has Tensor"),
        (Pair(1, 2), (1, 3), "different structures"),
    ],
)
def test_different_structures_are_refused_with_the_path(first: Any, second: Any, path: str) -> None:
    with pytest.raises(ValueError, match=path):
        regroup([first, second])


def test_a_batch_keeps_a_list_of_strings_as_one_leaf_and_its_constants_bare() -> None:
    batch = {"s": ["a", "b"], "x": torch.ones(2), "n": 3}
    whole = regroup_batches([batch, {"s": [], "x": torch.ones(0), "n": 3}], structure_of(batch))
    assert whole["s"].values == (["a", "b"], [])
    assert whole["n"] == 3
    assert [len(x) for x in whole["x"].values] == [2, 0]
    own = regroup_batches([batch, {**batch}], structure_of(batch), of_one_batch=False)
    assert own["n"].values == (3, 3)  # equal in this step, and perhaps not in the next one


def test_select_gives_back_the_same_object_where_there_is_nothing_to_select() -> None:
    untouched = {"deep": [1, (2, "x")]}
    whole = [untouched, PerReplica([1, 2])]
    assert select(untouched, 0) is untouched
    assert select(whole, 1)[0] is untouched
    assert select(whole, 1)[1] == 2


def test_a_plain_value_has_one_local_result_whatever_the_number_of_replicas() -> None:
    tensor = torch.zeros(3)
    assert local_results(tensor, 2) == (tensor,)
    assert local_results([1, 2], 2) == ([1, 2],)


def test_a_value_of_another_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"PerReplica with 2 value\(s\), and this process has 3"):
        local_results({"x": PerReplica([1, 2])}, 3)
    with pytest.raises(ValueError, match="none for local replica 2"):
        select(PerReplica([1, 2]), 2)


def _together(leaf: Any, values: tuple[Any, ...]) -> Any:
    return PerReplica(values) if has_rows(leaf) else leaf


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_structure_come_together_leaf_by_leaf(kind: str) -> None:
    pieces = [KINDS[kind](size) for size in (2, 1, 0)]
    whole = regroup_batches(pieces, structure_of(pieces[0]))
    leaves = iter(list(zip(*(flatten(piece)[0] for piece in pieces), strict=True)))
    expected = map_leaves(lambda leaf: _together(leaf, next(leaves)), pieces[0])
    assert type(whole) is type(expected)
    assert repr(whole) == repr(expected)
    for replica, piece in enumerate(pieces):
        mine, nesting = flatten(select(whole, replica))
        leaves_of_piece, its = flatten(piece)
        assert nesting == its
        assert all(each is own for each, own in zip(mine, leaves_of_piece, strict=True))


def test_pieces_of_different_structure_come_together_as_they_are() -> None:
    first, second = torch.zeros(2), torch.zeros(1)
    for pieces in (
        ([first] * 2, [first]),
        ((first, second), (second,)),
        ({"x": first}, {"y": second}),
        ({"x": first}, [second]),
        (first, {"x": second}),
    ):
        for structure in (None, structure_of(first), structure_of(pieces[0])):
            assert regroup_batches(pieces, structure).values == pieces
    ragged = structure_of_collated({"images": [first], "n": 1}, {"images": [first] * 2, "n": 2})
    for count in (1, 2):  # the same element whether replicas have equally many samples or not
        whole = regroup_batches([{"images": [first] * 2, "n": 2}, {"images": [second] * count, "n": count}], ragged)
        assert whole["images"].values == ([first] * 2, [second] * count)
        assert whole["n"].values == (2, count)
