"""What a collate function returns is handed over as it is; the size of a piece is the number of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from tests.support.epochs import raised
from torchdistinput.testing import run_ranks

SAMPLES, BATCH = 10, 4
WORLDS = [1, 2, 3]


class Boxed:
    """A batch that nobody can look into."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


@dataclass
class Record:
    """A batch whose tensor has no row for each sample."""

    packed: torch.Tensor
    numbers: list[int]


class Images:
    """Each sample is a tensor with its number in each place."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 2), index), index


class Stream(IterableDataset[Any]):
    """The same samples, one after the other."""

    def __iter__(self) -> Any:
        images = Images()
        return (images[index] for index in range(SAMPLES))


def listed(samples: list[Any]) -> Any:
    return [image for image, _ in samples]


def detection(samples: list[Any]) -> Any:
    return tuple(zip(*[(image, {"boxes": image[: number % 3]}) for image, number in samples], strict=True))


def boxed(samples: list[Any]) -> Any:
    return Boxed([number for _, number in samples])


def recorded(samples: list[Any]) -> Any:
    return Record(torch.cat([image.flatten() for image, _ in samples]), [number for _, number in samples])


def one_tensor(samples: list[Any]) -> Any:
    return torch.cat([image.flatten() for image, _ in samples])


def nothing(samples: list[Any]) -> Any:
    return None


def texts(samples: list[Any]) -> Any:
    return " ".join(str(number) for _, number in samples)


COLLATES = [listed, detection, boxed, recorded, one_tensor, nothing, texts]


def numbers_in(batch: Any) -> list[int]:
    """The numbers of the samples that a batch was made of."""
    match batch:
        case None:
            return []
        case str():
            return [int(text) for text in batch.split()]
        case Boxed() | Record():
            return batch.numbers
        case torch.Tensor():
            return batch[::6].tolist()
        case (tuple(images), tuple(_)):
            return numbers_in(list(images))
        case list():
            return [int(image[0, 0]) for image in batch]
        case _:
            return []


def steps(
    collate: str, num_workers: int, drop_in: bool, iterable: bool, samples: int = SAMPLES
) -> list[tuple[list[int], int | None, tuple[int, ...]]]:
    function = next(each for each in COLLATES if each.__name__ == collate)
    data: Any = Stream() if iterable else torch.utils.data.Subset(Images(), range(samples))  # type: ignore[arg-type]
    settings: Any = {"batch_size": BATCH, "collate_fn": function, "num_workers": num_workers}
    loader: Any
    if drop_in:
        loader = tdi.DataLoader(data, **settings)
    else:
        empty = tdi.InputOptions(empty_fn=lambda: Boxed([]))
        loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(DataLoader(data, **settings), empty)
    with loader:
        return [(numbers_in(batch), loader.step.global_size, loader.step.local_sizes) for batch in loader]


def all_steps() -> dict[str, Any]:
    cases = [(each.__name__, 0, False, iterable) for each in COLLATES for iterable in (False, True)]
    cases += [("detection", 2, False, False), ("boxed", 1, False, True), ("listed", 2, True, False)]
    return {str(case): steps(*case) for case in cases}


@pytest.mark.parametrize("world", WORLDS)
def test_what_a_collate_function_returns_is_handed_over_and_its_samples_are_counted(world: int) -> None:
    results = run_ranks(world, all_steps)
    for case in results[0]:
        sizes = [[step[1] for step in result[case]] for result in results]
        assert sizes == [[4, 4, 2]] * world, case
        parts = [[step[2][0] for step in result[case]] for result in results]
        assert [sum(each) for each in zip(*parts, strict=True)] == [4, 4, 2], case
        if "one" not in case and "nothing" not in case:
            put_together = [[number for result in results for number in result[case][step][0]] for step in range(3)]
            assert put_together == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], case


def refused(samples: int) -> list[str]:
    told = []
    for drop_in in (True, False):
        try:
            data: Any = torch.utils.data.Subset(Images(), range(samples))  # type: ignore[arg-type]
            settings: Any = {"batch_size": BATCH, "collate_fn": boxed}
            strategy = tdi.Strategy(devices=["cpu"])
            loader: Any = (
                tdi.DataLoader(data, **settings, strategy=strategy)
                if drop_in
                else strategy.distribute_dataset(DataLoader(data, **settings))
            )
            told.append(str(len(list(loader))))
        except tdi.BatchingError as error:
            told.append(str(error))
    return told


def test_where_a_replica_may_be_left_without_a_sample_the_first_step_says_so_on_all_ranks() -> None:
    assert run_ranks(2, refused, 10) == [["3", "3"]] * 2  # the last batch has a sample for each
    for of_rank in run_ranks(2, refused, 9):
        for told in of_rank:
            assert "step 0 of epoch 0" in told
            assert "it is not known how to make an element of type Boxed without a sample" in told
            assert "empty_fn=" in told


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
    assert first == second
    assert first.kind == "BatchingError"
    assert first.message.startswith(
        "rank 1: this rank has seen no sample and cannot build the batch's dataclass tests.batches.test_any_batches:"
    )


def files(folder: str) -> list[Any]:
    dataset = tdi.FileDataset(f"{folder}/*.txt", tdi.readers.text_lines, map_fn=as_record)
    strategy = tdi.Strategy(devices=["cpu"])
    found = []
    for policy in (tdi.AutoShardPolicy.DATA, tdi.AutoShardPolicy.FILE):
        loader = strategy.distribute_dataset(
            dataset, tdi.InputOptions(auto_shard_policy=policy), global_batch_size=4, collate_fn=list
        )
        found.append([(batch, loader.step.local_sizes, loader.step.global_size) for batch in loader])
    return found


def as_record(line: str) -> tuple[str, int]:
    return line, int(line)


def test_records_that_are_tuples_may_be_collated_to_lists_of_them(tmp_path: Path) -> None:
    for name in range(2):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{line}\n" for line in range(5)))
    for world in (1, 2):
        results = run_ranks(world, files, str(tmp_path))
        for policy in range(2):
            records = [record for result in results for batch, _, _ in result[policy] for record in batch]
            assert sorted(records) == sorted(
                (f"{name}{line}", 10 * name + line) for name in range(2) for line in range(5)
            )
            for result in results:
                assert all(len(batch) == sizes[0] for batch, sizes, _ in result[policy])


def ready(kind: str) -> list[Any]:
    batches: list[Any] = [Boxed([*range(4)]), Boxed([4])]
    options = tdi.InputOptions(count_fn=count, split_fn=split, empty_fn=lambda: Boxed([]))
    if kind == "count":
        options = tdi.InputOptions(count_fn=lambda _: "many", split_fn=split)  # type: ignore[arg-type, return-value]
    if kind == "split":
        options = tdi.InputOptions(count_fn=count, split_fn=lambda batch, _: [batch])
    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(batches, options)
    try:
        return [(batch.numbers, loader.step.global_size) for batch in loader]
    except tdi.BatchingError as error:
        return [str(error)]


def count(batch: Boxed) -> int:
    return len(batch.numbers)


def split(batch: Boxed, sizes: list[int]) -> list[Boxed]:
    assert sum(sizes) == len(batch.numbers)
    assert all(sizes)
    numbers = iter(batch.numbers)
    return [Boxed([next(numbers) for _ in range(size)]) for size in sizes]


def test_ready_batches_are_counted_and_cut_by_the_users_functions() -> None:
    assert run_ranks(1, ready, "good") == [[([0, 1, 2, 3], 4), ([4], 1)]]
    assert run_ranks(2, ready, "good") == [[([0, 1], 4), ([4], 1)], [([2, 3], 4), ([], 1)]]
    assert run_ranks(3, ready, "good") == [[([0, 1], 4), ([4], 1)], [([2, 3], 4), ([], 1)], [([], 4), ([], 1)]]
    for kind, told in (("count", "count_fn returned 'many'"), ("split", "split_fn returned a list of 1")):
        for (error,) in run_ranks(2, ready, kind):
            assert told in error
            assert "step 0" in error


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


def padding() -> list[Any]:
    found: list[Any] = []
    strategy = tdi.Strategy(devices=["cpu"])
    for collate in (nested, packed, boxed_ragged, padded):
        loader: Any = DataLoader(Ragged(), BATCH, collate_fn=collate)  # type: ignore[arg-type]
        options = tdi.InputOptions(partial_batch="pad", empty_fn=lambda: None)
        try:
            found.append(
                [(batch.shape[0], mask.tolist()) for batch, mask in strategy.distribute_dataset(loader, options)]
            )
        except tdi.BatchingError as error:
            found.append(str(error))
    return found


def boxed_ragged(samples: list[Any]) -> Any:
    return Boxed([len(sample) for sample in samples])


def test_padding_what_has_no_row_for_each_sample_is_refused_at_the_first_step() -> None:
    for *refused, filled in run_ranks(2, padding):
        for told in refused:
            assert "step 0 of epoch 0" in told
            assert "has not one row for each" in told
        assert filled == [(2, [True, True])] * 2 + [(2, [True, False])]


IMAGE_BATCHES = [*((channels, sizes) for channels in (1, 2, 3) for sizes in ((3, 3), (8, 3), (1,), (2, 2)))]


def cut_lists(counts: Any, container: type) -> list[Any]:
    found = []
    for channels, sizes in IMAGE_BATCHES:
        batches = [container(torch.full((channels, 4), float(place)) for place in range(count)) for count in sizes]
        loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(batches, tdi.InputOptions(count_fn=counts))
        found.append([(type(part), [(*image.shape, int(image[0, 0])) for image in part]) for part in loader])
    return found


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("counts", [len, lambda batch: sum(1 for _ in batch)], ids=["len", "lambda"])
def test_what_count_fn_counts_is_cut_whatever_the_sizes_of_images(counts: Any, container: type) -> None:
    strategies = [run_in_replicas(counts, container, replicas) for replicas in (1, 2, 4)]
    for parts in strategies:
        for (channels, sizes), steps in zip(IMAGE_BATCHES, parts, strict=True):
            put_together = [[image for part in step for image in part] for step in steps]
            assert put_together == [[(channels, 4, place) for place in range(count)] for count in sizes]
    if counts is len:
        first, second = run_ranks(2, cut_lists, counts, container)
        for steps, own, other in zip(strategies[1], first, second, strict=True):
            assert [[*map(list, step)] for step in steps] == [
                [one, two] for (_, one), (_, two) in zip(own, other, strict=True)
            ]
            assert {kind for kind, _ in own + other} == {container}


def run_in_replicas(counts: Any, container: type, replicas: int) -> list[Any]:
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    found = []
    for channels, sizes in IMAGE_BATCHES:
        batches = [container(torch.full((channels, 4), float(place)) for place in range(count)) for count in sizes]
        loader = strategy.distribute_dataset(batches, tdi.InputOptions(count_fn=counts))
        steps = [strategy.local_results(element) for element in loader]
        found.append([[[(*image.shape, int(image[0, 0])) for image in part] for part in step] for step in steps])
    return found


COLUMNS = (torch.arange(2), torch.arange(2))


@pytest.mark.parametrize("batch", [COLUMNS, [*COLUMNS], {"x": COLUMNS[0], "y": COLUMNS[1]}])
def test_columns_of_as_many_samples_are_cut_as_columns_where_a_column_is_counted(batch: Any) -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    options = tdi.InputOptions(count_fn=lambda batch: len(batch["x"] if isinstance(batch, dict) else batch[0]))
    for given in (None, options):
        (element,) = strategy.distribute_dataset([batch], given)
        parts = strategy.local_results(element)
        leaves = [[*part.values()] if isinstance(part, dict) else part for part in parts]
        assert [[leaf.tolist() for leaf in each] for each in leaves] == [[[0], [0]], [[1], [1]]]


@pytest.mark.parametrize(
    ("batch", "count", "told"),
    [
        ((torch.zeros(4), torch.zeros(3)), None, r"\[0\] has 4, \[1\] has 3.*count_fn=.*split_fn="),
        ((torch.zeros(8, 3), torch.zeros(10)), None, "have different batch sizes"),
        ([torch.zeros(4), torch.zeros(3)], None, "have different batch sizes"),
        ({0: torch.zeros(4), 1: torch.zeros(3)}, None, "have different batch sizes"),
        ((torch.zeros(4), torch.zeros(3)), lambda batch: len(batch[0]), "one entry for each.*split_fn="),
        (([torch.zeros(3, 2)] * 3, torch.zeros(3)), lambda batch: 3, "a list of 3 in the batch could hold.*split_fn="),
        (torch.eye(4).to_sparse(), None, "the batch is a sparse tensor.*split_fn="),
        ({"x": torch.zeros(2), "n": torch.nested.nested_tensor([torch.ones(1)] * 2, layout=torch.jagged)},
         lambda batch: 2, "split_fn="),
    ],
)  # fmt: skip
def test_a_ready_batch_that_could_be_read_in_two_ways_or_not_be_cut_names_what_to_give(
    batch: Any, count: Any, told: str
) -> None:
    dataset = tdi.Strategy(devices=["cpu"] * 2).distribute_dataset([batch], tdi.InputOptions(count_fn=count))
    with pytest.raises(tdi.BatchingError, match=told):
        next(iter(dataset))


def halves(batch: Any, sizes: list[int]) -> list[Any]:
    """Cuts a batch of time-first tensors."""
    parts = {key: leaf.split(sizes, 1) for key, leaf in batch.items()}
    return [{key: each[place] for key, each in parts.items()} for place in range(len(sizes))]


def time_first_batches() -> list[Any]:
    batches = [{"x": torch.zeros(5, count), "y": torch.ones(7, count)} for count in (4, 1)]
    options = tdi.InputOptions(count_fn=lambda batch: batch["x"].shape[1], split_fn=halves)
    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(batches, options)
    return [[tuple(leaf.shape) for leaf in batch.values()] for batch in loader]


def test_the_empty_part_of_what_split_fn_cuts_follows_from_its_pieces() -> None:
    assert run_ranks(2, time_first_batches) == [
        [[(5, 2), (7, 2)], [(5, 1), (7, 1)]],
        [[(5, 2), (7, 2)], [(5, 0), (7, 0)]],
    ]
