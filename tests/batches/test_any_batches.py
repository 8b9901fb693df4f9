"""Ready batches of any form: counted and cut by rules, or by the user's functions; and what cannot be padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import raised
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
