"""Data that is divided already, or differs between ranks: refused on every rank at the same step, with a way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

import torchdistinput as tdi
from tests.data import Mapped, Stream
from tests.oracle.test_in_process import fake_strategy
from tests.support.collectives import FakeCollectives
from tests.support.epochs import raised
from tests.support.launched import Scenes, launched
from torchdistinput.sources.iterable.divided_sources import _tell_unchecked


def told(*data: Any) -> list[str]:
    """The class and text of what each rank is told, which gives the data of its place."""
    ranks = FakeCollectives(len(data), timeout_seconds=20)

    def distribute(rank: int) -> str:
        given, size = (DataLoader(data[rank], 2), None) if isinstance(data[rank], list) else (data[rank], 2)
        try:
            fake_strategy(ranks, rank, 1).distribute_dataset(given, global_batch_size=size)
        except tdi.InputError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return [str(each) for each in ranks.run(distribute)]


class Unread(Dataset[Any]):
    """A dataset that must not be read."""

    def __init__(self, length: int = 8, **attributes: Any) -> None:
        self.length = length
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> NoReturn:
        raise AssertionError(index)


class NoDataset:
    """The same of another class."""

    def __init__(self, rows: list[int]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> NoReturn:
        raise AssertionError(index)


WHOLE = Unread()
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a list": ([1, 2], [3, 4]),
    "a list of samples": ([(torch.zeros(2), "a")], [(torch.ones(2), "a")]),
    "a range": (range(0, 8, 2), range(1, 8, 2)),
    "an array": (np.arange(4), np.arange(4, 8)),
    "a subset of a list": (Subset([1, 2], [0]), Subset([3, 4], [0])),  # type: ignore[arg-type]
    "a subset": (Subset(WHOLE, range(0, 8, 2)), Subset(WHOLE, range(1, 8, 2))),
    "a list of indices": (Subset(WHOLE, [0, 1]), Subset(WHOLE, [2, 3])),
    "a subset's subset": (Subset(Subset(WHOLE, [0, 1, 2]), [0, 1]), Subset(Subset(WHOLE, [3, 4, 5]), [0, 1])),
    "a subset in a wrapper": (Unread(2, data=Subset(WHOLE, [0, 1])), Unread(2, data=Subset(WHOLE, [2, 3]))),
    "a subset among others": (ConcatDataset([WHOLE, Subset(WHOLE, [0])]), ConcatDataset([WHOLE, Subset(WHOLE, [1])])),
    "tensors": (TensorDataset(torch.arange(4)), TensorDataset(torch.arange(4, 8))),
    "columns": ({"x": np.zeros(3)}, {"x": np.ones(3)}),
    "files": (Unread(2, files=["a", "b"]), Unread(2, files=["c", "d"])),
    "images and classes": (Unread(2, samples=[("a", 0), ("b", 1)]), Unread(2, samples=[("b", 1), ("a", 0)])),
    "folders": (Unread(2, files=["a/1", "b/1"]), Unread(2, files=["c/1", "d/1"])),
    "rows of its own": (Unread(2, rows=[{"x": 1}, {"x": 2}]), Unread(2, rows=[{"x": 3}, {"x": 4}])),
    "numbers of its own": (Unread(2, numbers=[0, 2]), Unread(2, numbers=[1, 3])),
    "tensors of its own": (Unread(2, images=torch.zeros(2, 3)), Unread(2, images=torch.ones(2, 3))),
    "tokens, many for a sample": (Unread(2, tokens=np.arange(8)), Unread(2, tokens=np.arange(8, 16))),
    "samples by key": (Unread(2, by_id={"a": 1, "b": 2}), Unread(2, by_id={"c": 1, "d": 2})),
    "samples in a list": (Unread(1, data=[torch.zeros(2)]), Unread(1, data=[torch.ones(2)])),
    "a class that is no Dataset": (NoDataset([1, 2]), NoDataset([3, 4])),
    "one inside": (Unread(2, data=NoDataset([1, 2])), Unread(2, data=NoDataset([3, 4]))),
    "indices of its own": (Unread(2, indices=torch.tensor([0, 2])), Unread(2, indices=torch.tensor([1, 3]))),
}


def grain_part(rank: int, *, by_slice: bool) -> Any:
    whole: Any = pytest.importorskip("grain").MapDataset.source(list(range(8))).map(int)
    return whole.slice(slice(rank, None, 2)) if by_slice else whole[rank::2]


@pytest.mark.parametrize("name", [*DIFFERENT, "a slice of grain's", "grain's own slice"])
def test_parts_of_the_same_data_are_refused_with_the_way_out(name: str) -> None:
    if "grain" in name:
        one, other = (grain_part(rank, by_slice="own" in name) for rank in range(2))
    else:
        one, other = DIFFERENT[name]
    assert told(one, one) == ["", ""]
    for text in told(one, other):
        assert text.startswith("RankDisagreement: ")
        assert "give every rank the whole" in text
        assert "distribute_datasets_from_function" in text


ALIKE: dict[str, tuple[Any, Any]] = {
    "attributes of the rank's": (Unread(rank=0, seed=1, device="cuda:0"), Unread(rank=1, seed=2, device="cuda:1")),
    "a list that is being filled": (Unread(2, cache=[None, 1]), Unread(2, cache=[4, None])),
    "lists of another length": (Unread(2, names=["a"]), Unread(2, names=["b"])),
    "objects in a list": ([object()], [object()]),
    "an index as a range": (Subset(WHOLE, range(3)), Subset(WHOLE, [0, 1, 2])),
}


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_what_may_differ_from_rank_to_rank_counts_for_nothing(one: Any, other: Any) -> None:
    assert told(one, other) == ["", ""]


class Counted(Unread):
    """A dataset that counts how often it is asked for its length; it knows its sibling datasets."""

    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return super().__len__()


def siblings(last: int) -> list[Counted]:
    """Datasets that know each other; the last one has other files."""
    found = [Counted(2, files=[number, last if number == 4 else 0]) for number in range(5)]
    for each in found:
        each.__dict__.update({f"sibling_{number}": other for number, other in enumerate(found) if other is not each})
    return found


def test_each_of_several_datasets_that_know_each_other_is_looked_at_once() -> None:
    one, same, other = siblings(0), siblings(0), siblings(1)
    assert told(one[0], same[0]) == ["", ""]
    assert [each.asked for each in one[1:]] == [1] * 4
    assert all(text.startswith("RankDisagreement: ") for text in told(one[0], other[0]))


def test_a_dataset_far_inside_is_compared() -> None:
    def nested(files: list[str]) -> Unread:
        found = Unread(2, files=files)
        for _ in range(20):
            found = Unread(2, data=found)
        return found

    assert told(nested(["a", "b"]), nested(["a", "b"])) == ["", ""]
    assert all(told(nested(["a", "b"]), nested(["c", "d"])))


def test_what_a_rank_notes_in_a_dataset_after_it_was_first_divided_counts_for_nothing() -> None:
    scores = [0.0, 0.0]
    data = Unread(2, scores=scores)
    assert told(data, data) == ["", ""]
    scores[1] = 0.5
    assert told(data, Unread(2, scores=[0.0, 0.0])) == ["", ""]
    assert all(told(data, Unread(2, scores=[0.0, 0.5])))


def test_a_dataset_that_holds_nothing_is_said_to_be_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    _tell_unchecked.cache_clear()
    caplog.set_level("INFO")
    assert told(Unread(), Unread()) == told(Unread(), Unread()) == ["", ""]
    assert len([record for record in caplog.records if "Unread holds nothing" in record.getMessage()]) == 1


@pytest.mark.parametrize(("package", "name"), [("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "table")])
def test_a_table_is_compared_by_its_rows(package: str, name: str) -> None:
    make = getattr(pytest.importorskip(package), name)
    whole, other = ({"n": [*numbers], "t": [*map(str, numbers)]} for numbers in (range(200), range(1, 201)))
    assert told(*(Unread(200, rows=make(whole)) for _ in range(2))) == ["", ""]
    assert all(told(Unread(200, rows=make(whole)), Unread(200, rows=make(other))))


def test_a_stream_of_hugging_face_inside_of_a_dataset_counts_for_nothing() -> None:
    stream = pytest.importorskip("datasets").Dataset.from_dict({"x": [1]}).to_iterable_dataset()
    assert told(Unread(2, names=["a", "b"], stream=stream), Unread(2, names=["a", "b"])) == ["", ""]


def test_the_indices_of_a_subset_are_told_in_words() -> None:
    assert "0, 2, 4, 6, ..." in told(*(Subset(Unread(20), range(rank, 20, 2)) for rank in range(2)))[0]


SAMPLES = 103


class Own(IterableDataset[int]):
    """Numbers, of which each rank yields its own ones from one on; or its last ones are missing."""

    def __init__(self, kind: str, length: int = SAMPLES) -> None:
        self.kind, self.length = kind, length

    def __iter__(self) -> Iterator[int]:
        rank, world = dist.get_rank() if dist.is_initialized() else RANK, WORLD
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, every):
            if self.kind == "divides" and number // every % world != rank:
                continue
            if self.kind == "ends" and rank == 1 and number >= 60:
                return
            if self.kind == "ends early in a batch" and rank == 1 and number >= 66:
                return
            if self.kind == "turns" and rank == 1 and number >= 300:
                yield -number
                continue
            yield number


RANK, WORLD = 0, 2


def set_rank(rank: int, worker: int) -> None:
    """A loader worker knows its rank by what it is told: it is in no group."""
    global RANK  # noqa: PLW0603
    RANK = rank


def read(kind: str, workers: int, policy: str, *, epochs: int = 1, length: int = SAMPLES) -> Any:
    rank = dist.get_rank()
    loader = DataLoader(
        Own(kind, length),
        batch_size=10,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=partial(set_rank, rank),
    )
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    seen: list[list[int]] = []

    def loop() -> None:
        with tdi.Strategy(["cpu"]).distribute_dataset(loader, options) as dataset:
            for _ in range(epochs):
                seen.append([])
                for batch in dataset:
                    seen[-1] += batch.tolist()

    return raised(loop), seen


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_divides_itself_is_refused_under_data_and_right_under_off(workers: int, scenes: Scenes) -> None:
    for error, seen in scenes(2, f"divides, {workers} workers"):
        assert error.kind == "RankDisagreement", error
        assert "at step 0 of epoch 0" in error.message
        assert "AutoShardPolicy.OFF" in error.message
        assert "distribute_datasets_from_function" in error.message
        assert seen == [[]]
    ranks = scenes(2, f"divides, OFF, {workers} workers")
    for epoch in range(2):
        assert sorted(number for _, seen in ranks for number in seen[epoch]) == list(range(SAMPLES))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["ends", "ends early in a batch"])
def test_a_source_that_ends_earlier_on_a_rank_is_refused_there(kind: str, workers: int, scenes: Scenes) -> None:
    for error, seen in scenes(2, f"{kind}, {workers} workers"):
        assert error.kind == "RankDisagreement", error
        assert "at step 6 of epoch 0" in error.message
        assert ("ended" if kind == "ends" and not workers else "sample(s)") in error.message or workers
        assert len(seen[0]) == 30


@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_differs_from_a_step_on_is_refused_at_the_next_one_that_is_compared(
    workers: int, scenes: Scenes
) -> None:
    for error, seen in scenes(2, f"turns, {workers} workers"):
        assert error.kind == "RankDisagreement", error
        step = 30 if workers else 31  # the 16th batch of a loader worker; the 32nd one
        assert f"at step {step} of epoch 0" in error.message
        assert len(seen[0]) == 5 * step


def augmented(index: int) -> torch.Tensor:
    """A sample with random augmentation, which each rank draws otherwise."""
    return index + torch.rand(()) * 0.5


def read_map_style(unequal: bool) -> Any:
    """Each rank augments for itself; or gives so many of its own."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data: Any = TensorDataset(torch.arange(8)[rank * 3 :]) if unequal else Mapped(8, augmented)
    seen: list[int] = []

    def loop() -> None:
        for batch in tdi.Strategy(["cpu"]).distribute_dataset(data, global_batch_size=2):
            seen.extend(batch.int().tolist())

    return raised(loop), seen


def test_map_style_data_with_random_augmentation_is_no_disagreement_and_of_unequal_lengths_is(scenes: Scenes) -> None:
    ranks = scenes(2, "augmented")
    assert [error for error, _ in ranks] == [None, None]
    assert sorted(number for _, seen in ranks for number in seen) == list(range(8))
    for error, _ in scenes(2, "unequal"):
        assert error.kind == "RankDisagreement", error
        assert "give every rank the whole" in error.message


def named() -> Iterator[dict[str, Any]]:
    """Divides itself; the names of the files are the same in each folder."""
    yield from ({"path": f"part-{dist.get_rank()}/{number:04}.jpg", "number": number} for number in range(8))


class Cuts:
    """A collection of samples that is one item of a sampler, and shows only their number."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __repr__(self) -> str:
        return f"Cuts(len={len(self.numbers)})"


class Key:
    def __init__(self, number: int) -> None:
        self.number = number


def of_key(key: Any) -> torch.Tensor:
    return torch.tensor(key.numbers if isinstance(key, Cuts) else key.number)


def read_items(kind: str, drop_in: bool) -> Any:
    rank, keyed = dist.get_rank(), Mapped(20, of_key)
    data, sampler, size = {
        "names": (Stream(named), None, 4),
        "collections of its own": (keyed, [Cuts([*range(first + rank, first + 8, 2)]) for first in (0, 8)], None),
        "objects": (keyed, [Key(number) for number in range(20)], 5),
    }[kind]
    seen: list[Any] = []

    def make() -> Any:
        if drop_in:
            return tdi.DataLoader(data, size, sampler=sampler)
        return tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, size, sampler=sampler))

    def loop() -> None:
        with make() as loader:
            for step, batch in enumerate(loader):
                seen.append(batch["number"].tolist() if isinstance(batch, dict) else batch.tolist())
                if step == 1:
                    break
            state = loader.state_dict()
        with make() as loader:
            loader.load_state_dict(state)
            seen.extend(batch.tolist() for batch in loader)

    return raised(loop), seen


ITEMS = ("names", "collections of its own", "objects")


@pytest.mark.parametrize("drop_in", [False, True])
@pytest.mark.parametrize("kind", ITEMS)
def test_what_differs_is_noticed_by_its_content_and_what_is_equal_is_no_disagreement(
    kind: str, drop_in: bool, scenes: Scenes
) -> None:
    ranks = scenes(2, f"{kind}, {drop_in}")
    if kind == "objects":
        assert [error for error, _ in ranks] == [None, None]
        assert sorted(number for _, seen in ranks for part in seen for number in part) == list(range(20))
        return
    for error, seen in ranks:
        assert error.kind == "RankDisagreement", error
        assert "at step 0 of epoch 0" in error.message
        assert not seen


def scenes_of(_: int, __: Path) -> dict[str, Callable[[], Any]]:
    """What is played by two ranks."""
    found: dict[str, Callable[[], Any]] = {
        f"{kind}, {way}": partial(read_items, kind, way) for kind in ITEMS for way in (False, True)
    }
    for workers in (0, 2):
        for kind in ("divides", "ends", "ends early in a batch"):
            found[f"{kind}, {workers} workers"] = partial(read, kind, workers, "DATA")
        found[f"divides, OFF, {workers} workers"] = partial(read, "divides", workers, "OFF", epochs=2)
        found[f"turns, {workers} workers"] = partial(read, "turns", workers, "DATA", length=400)
    return found | {"augmented": partial(read_map_style, False), "unequal": partial(read_map_style, True)}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return launched((2,), scenes_of, tmp_path_factory.mktemp("nothing"))
