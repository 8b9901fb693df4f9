"""A batch that users collate is taken, cut and put together whatever it is made of, on every replica."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import raised
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
from torchdistinput.testing import run_ranks


class Boxed:
    """A batch that nobody can look into."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


def parts_of(batches: Any, replicas: int, **options: Any) -> list[tuple[Any, ...]]:
    """The parts of each replica at each step."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    dataset = strategy.distribute_dataset(batches, tdi.InputOptions(**options))
    found = []
    for element in dataset:
        parts = strategy.local_results(element)
        assert len(parts) == replicas
        found.append(parts)
    return found


def of_a_class_that_no_name_finds() -> Any:
    """The last batch has one sample, and the class is made in this function."""

    @dataclass
    class Hidden:
        x: torch.Tensor

    def collate(rows: list[int]) -> Any:
        return Hidden(torch.tensor(rows))

    data: Any = DataLoader(range(1), 2, collate_fn=collate)  # type: ignore[arg-type]
    return raised(lambda: [*tdi.Strategy(devices=["cpu"]).distribute_dataset(data)])


def test_a_class_that_a_rank_without_a_sample_cannot_find_is_named_on_all_ranks() -> None:
    first, second = run_ranks(2, of_a_class_that_no_name_finds)
    for found in (first, second):
        assert found.kind == "BatchingError"
        assert "rank 1" in found.message
        assert "this rank has seen no sample and" in found.message
        assert "cannot build the batch's dataclass tests.batches.test_any_batches:" in found.message


def count(batch: Boxed) -> int:
    return len(batch.numbers)


def split(batch: Boxed, sizes: list[int]) -> list[Boxed]:
    assert sum(sizes) == len(batch.numbers)
    assert all(sizes)
    numbers = iter(batch.numbers)
    return [Boxed([next(numbers) for _ in range(size)]) for size in sizes]


BOXES = [Boxed([*range(4)]), Boxed([4])]
FUNCTIONS: dict[str, Any] = {"count_fn": count, "split_fn": split, "empty_fn": lambda: Boxed([])}


@pytest.mark.parametrize(
    ("replicas", "steps"),
    [
        (1, [[[0, 1, 2, 3]], [[4]]]),
        (2, [[[0, 1], [2, 3]], [[4], []]]),
        (3, [[[0, 1], [2, 3], []], [[4], [], []]]),
    ],
)
def test_ready_batches_are_counted_and_cut_by_the_users_functions(replicas: int, steps: list[Any]) -> None:
    assert [[part.numbers for part in parts] for parts in parts_of(BOXES, replicas, **FUNCTIONS)] == steps


@pytest.mark.parametrize("by_function", [False, True])
def test_where_a_function_counts_each_batch_is_counted_also_where_all_have_the_same_shapes(by_function: bool) -> None:
    batches = [{"document": torch.tensor(each)} for each in ([0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1])]
    options = tdi.InputOptions(count_fn=lambda batch: int(batch["document"].max()) + 1)
    strategy = tdi.Strategy(["cpu"])
    if by_function:
        loader = strategy.distribute_datasets_from_function(lambda _: batches, options)
    else:
        loader = strategy.distribute_dataset(lambda: iter(batches), options)
    with loader:
        assert [loader.step.global_size for _ in loader] == [3, 2]


SAMPLES, BATCH = 10, 4


class Ragged:
    """Samples of one to three rows; the last two have one row each, so that their pack has as many rows as samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1 if index > 7 else 1 + index % 3, 2), index)


def nested(samples: list[Any]) -> Any:
    return torch.nested.nested_tensor(samples, layout=torch.jagged)


def packed(samples: list[Any]) -> Any:
    offsets = torch.tensor([0, *map(len, samples)]).cumsum(0)
    return {"tokens": torch.cat(samples), "cu_seqlens": offsets}


def padded(samples: list[Any]) -> Any:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


@pytest.mark.parametrize("collate", [nested, packed, lambda samples: Boxed([len(sample) for sample in samples])])
def test_padding_what_has_no_row_for_each_sample_is_refused_at_the_first_step(collate: Any) -> None:
    loader: Any = DataLoader(Ragged(), BATCH, collate_fn=collate)  # type: ignore[arg-type]
    with pytest.raises(tdi.BatchingError, match="(?s)step 0 of epoch 0.*has not one row for each"):
        parts_of(loader, 2, partial_batch="pad", empty_fn=lambda: None)
    filled: Any = DataLoader(Ragged(), BATCH, collate_fn=padded)  # type: ignore[arg-type]
    masks = [[mask.tolist() for _, mask in parts] for parts in parts_of(filled, 2, partial_batch="pad")]
    assert masks == [[[True] * 2] * 2] * 2 + [[[True, False]] * 2]


IMAGE_BATCHES = [*((channels, sizes) for channels in (1, 2, 3) for sizes in ((3, 3), (8, 3), (1,), (2, 2)))]


@pytest.mark.parametrize("container", [list, tuple])
def test_what_len_counts_is_cut_whatever_the_sizes_of_images(container: type) -> None:
    for replicas in (1, 2, 4):
        for channels, sizes in IMAGE_BATCHES:
            batches = [container(torch.full((channels, 4), float(place)) for place in range(size)) for size in sizes]
            for size, parts in zip(sizes, parts_of(batches, replicas, count_fn=len), strict=True):
                share = -(-size // replicas)
                assert [len(part) for part in parts] == [max(0, min(share, size - k * share)) for k in range(replicas)]
                assert {type(part) for part in parts} == {container}
                whole = [(*image.shape, int(image[0, 0])) for part in parts for image in part]
                assert whole == [(channels, 4, place) for place in range(size)]


COLUMNS = (torch.arange(2), torch.arange(2))


@pytest.mark.parametrize("batch", [COLUMNS, [*COLUMNS], {"x": COLUMNS[0], "y": COLUMNS[1]}])
def test_columns_of_as_many_samples_are_cut_as_columns(batch: Any) -> None:
    for given in ({}, {"count_fn": lambda batch: len(batch["x"])}) if isinstance(batch, dict) else ({},):
        (parts,) = parts_of([batch], 2, **given)
        leaves = [[*part.values()] if isinstance(part, dict) else part for part in parts]
        assert [[leaf.tolist() for leaf in each] for each in leaves] == [[[0], [0]], [[1], [1]]]


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ((torch.zeros(4), torch.zeros(3)), {}, r"\[0\] has 4, \[1\] has 3.*count_fn=.*split_fn="),
    ((torch.zeros(8, 3), torch.zeros(10)), {}, "have different batch sizes"),
    ([torch.zeros(4), torch.zeros(3)], {}, "have different batch sizes"),
    ({0: torch.zeros(4), 1: torch.zeros(3)}, {}, "have different batch sizes"),
    ((torch.zeros(4), torch.zeros(3)), {"count_fn": lambda batch: len(batch[0])}, "one entry for each.*split_fn="),
    (([torch.zeros(3, 2)] * 3, torch.zeros(3)), {"count_fn": lambda _: 3}, "a list of 3 in the batch could.*split_fn="),
    ((torch.zeros(2), torch.zeros(2)), {"count_fn": lambda batch: len(batch[0])}, "a list of 2 in the batch.*=len"),
    (torch.eye(4).to_sparse(), {}, "the batch is a sparse tensor.*split_fn="),
    (torch.nested.nested_tensor([torch.ones(1)] * 2, layout=torch.jagged), {"count_fn": lambda _: 2}, "split_fn="),
    (BOXES[0], {**FUNCTIONS, "count_fn": lambda _: "many"}, "step 0.*count_fn returned 'many'"),
    (BOXES[0], {**FUNCTIONS, "split_fn": lambda batch, _: [batch]}, "step 0.*split_fn returned a list of 1"),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "options", "told"), BAD)
def test_a_ready_batch_that_could_be_read_in_two_ways_or_not_be_cut_names_what_to_give(
    batch: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(tdi.BatchingError, match=f"(?s){told}"):
        parts_of([batch], 2, **options)


def strided_nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)])


UNCUT: dict[str, tuple[Any, int]] = {
    "sparse": (torch.eye(4).to_sparse, 2),
    "sparse, of another size": (torch.eye(6)[:, :4].to_sparse, 2),
    "compressed": (torch.eye(4).to_sparse_csr, 2),
    "nested": (strided_nested, 2),
    "nested, in one part": (strided_nested, 1),
}
quiet = pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR tensor support")


@quiet
@pytest.mark.parametrize(
    "put", [lambda leaf: leaf, lambda leaf: {"x": leaf}, lambda leaf: (leaf, ["a"] * leaf.size(0))]
)
@pytest.mark.parametrize("name", UNCUT)
def test_a_tensor_that_cannot_be_cut_is_told_as_in_the_first_batch_also_after_dense_ones(name: str, put: Any) -> None:
    make, replicas = UNCUT[name]
    texts = []
    for before in ([], [put(torch.eye(4))]):
        with pytest.raises(tdi.BatchingError) as caught:
            parts_of([*before, put(make())], replicas)
        texts.append(str(caught.value).partition("\n")[0].replace(f"step {len(before)}", "its step"))
    assert texts[0] == texts[1]


@quiet
def test_a_nested_tensor_in_one_process_comes_as_it_is_also_after_dense_ones() -> None:
    batches: Any = [torch.eye(4), strided_nested()]
    found = list(tdi.DataLoader(batches, batch_size=None))
    assert [each.is_nested for each in found] == [False, True]


def halves(batch: Any, sizes: list[int]) -> list[Any]:
    """Cuts a batch of time-first tensors."""
    parts = {key: leaf.split(sizes, 1) for key, leaf in batch.items()}
    return [{key: each[place] for key, each in parts.items()} for place in range(len(sizes))]


def test_the_empty_part_of_what_split_fn_cuts_follows_from_its_pieces() -> None:
    batches = [{"x": torch.zeros(5, count), "y": torch.ones(7, count)} for count in (4, 1)]
    found = parts_of(batches, 2, count_fn=lambda batch: batch["x"].shape[1], split_fn=halves)
    shapes = [[[tuple(leaf.shape) for leaf in part.values()] for part in parts] for parts in found]
    assert shapes == [[[(5, 2), (7, 2)]] * 2, [[(5, 1), (7, 1)], [(5, 0), (7, 0)]]]


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
