"""The sampler, batch sampler and dataset that show their epoch are told it, unless the user told them another."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import torchdistinput as tdi
from tests.support.epochs import lists
from torchdistinput.sources.rng import SharedRng, generators_of, packed, unpacked
from torchdistinput.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Rotated(Sampler[int]):
    """Begins at its epoch."""

    def __init__(self, count: int = 6, epoch: Any = 0) -> None:
        self.count = count
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + index) % self.count for index in range(self.count)])


class Quiet(Sampler[int]):
    """The same, which shows its epoch to nobody."""

    def __init__(self) -> None:
        self._inner = Rotated()

    def set_epoch(self, epoch: int) -> None:
        self._inner.set_epoch(epoch)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(self._inner)


class Modulo(Rotated):
    """Keeps what it needs of its epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch % 6


class Slotted:
    """Has no ``__dict__``."""

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(rotated(self.epoch))


class OfEpoch:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Items(OfEpoch, Dataset[int]):
    """Tells its epoch in each sample."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


class Stream(OfEpoch, IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([100 * self.epoch + index for index in range(6)])


class Counting(Rotated):
    """Counts its epochs by itself, twice as fast."""

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        self.epoch += 2
        return iter(order)


def rotated(epoch: int) -> list[int]:
    return [*Rotated(epoch=epoch)]


def of_epoch(epoch: int) -> list[int]:
    return [100 * epoch + index for index in range(6)]


Make = Callable[[], tuple[Any, Any]]  # a loader of one process, and who is told

SAMPLERS: dict[str, Make] = {
    "sampler": lambda: ((own := Rotated()), DataLoader(range(6), 4, sampler=own))[::-1],  # type: ignore[arg-type]
    "inside a batch sampler": lambda: (
        (own := Rotated()),
        DataLoader(range(6), batch_sampler=BatchSampler(own, 4, drop_last=False)),  # type: ignore[arg-type]
    )[::-1],
    "counting by itself": lambda: ((own := Counting()), DataLoader(range(6), 4, sampler=own))[::-1],  # type: ignore[arg-type]
}


def flat(epoch: Any) -> list[int]:
    return [number for batch in epoch for number in lists(batch)]


def distributed(loader: Any) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(loader)


def drop_in(loader: DataLoader[Any]) -> Any:
    if isinstance(loader.dataset, IterableDataset) or loader.num_workers:
        more: dict[str, Any] = {"num_workers": loader.num_workers, "persistent_workers": loader.persistent_workers}
        return tdi.DataLoader(loader.dataset, 4, **more)
    return tdi.DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)


WAYS = pytest.mark.parametrize("divide", [distributed, drop_in])


@WAYS
@pytest.mark.parametrize("name", SAMPLERS)
def test_each_epoch_is_told_to_the_sampler(divide: Any, name: str) -> None:
    with divide(SAMPLERS[name]()[0]) as loader:
        assert [flat(loader) for _ in range(3)] == [rotated(0), rotated(1), rotated(2)]
        state = loader.state_dict()
        loader.set_epoch(5)
        assert [flat(loader), flat(loader)] == [rotated(5), rotated(6)]
    with divide(SAMPLERS[name]()[0]) as resumed:
        resumed.load_state_dict(state)
        assert flat(resumed) == rotated(3)
        resumed.seek(7, 1)
        assert flat(resumed) == rotated(7)[4:]


@WAYS
@pytest.mark.parametrize("workers", [0, 2, -2], ids=["here", "workers", "persistent"])
@pytest.mark.parametrize("make", [Items, Stream, lambda: Subset(Items(), range(6))], ids=["map", "iterable", "subset"])
def test_each_epoch_is_told_to_the_dataset_wherever_it_is_read(divide: Any, workers: int, make: Any) -> None:
    data = make()
    lasting = workers < 0
    loader = DataLoader(
        data,
        4,
        num_workers=abs(workers),
        persistent_workers=lasting,
        multiprocessing_context="fork" if workers else None,
    )
    repeats = abs(workers) if isinstance(data, IterableDataset) and workers else 1
    with divide(loader) as own:
        for epoch in (0, 1, 2):
            assert sorted(flat(own)) == sorted(of_epoch(epoch) * repeats)
        own.set_epoch(7)
        assert sorted(flat(own)) == sorted(of_epoch(7) * repeats)
        own.set_epoch(3)
        assert sorted(flat(own)) == sorted(of_epoch(3) * repeats)


@WAYS
def test_set_epoch_of_the_sampler_itself_counts_as_one_of_the_loader(divide: Any) -> None:
    torch_loader, sampler = SAMPLERS["sampler"]()
    sampler.set_epoch(4)  # before the loader has looked at it
    with divide(torch_loader) as loader:
        assert [flat(loader), flat(loader)] == [rotated(4), rotated(5)]
        assert loader.step.epoch == 5
        for epoch in (2, 3):
            sampler.set_epoch(epoch)
            next(iter(loader))
            assert loader.step.epoch == epoch
        state = loader.state_dict()
        sampler.set_epoch(1)
        assert loader.state_dict()["epoch"] in {1, 3}  # the iterator that was left may be alive
    torch_loader, sampler = SAMPLERS["sampler"]()
    with divide(torch_loader) as resumed:
        resumed.load_state_dict(state)
        sampler.set_epoch(3)  # as a script says again, which goes on there
        assert flat(resumed) == rotated(3)[4:]
        assert flat(resumed) == rotated(4)
        sampler.set_epoch(9)
        resumed.load_state_dict(state)
        assert flat(resumed) == rotated(3)[4:]


def mixture() -> Any:
    return tdi.Mixture({"a": range(12), "b": range(100, 112)}, {"a": 1, "b": 1}, stop="all")


def of_mixture() -> tuple[Any, Any]:
    mixed = mixture()
    return DataLoader(mixed, batch_size=4), mixed


def of_batches(made: Any, sampler: Any) -> tuple[Any, Any]:
    return DataLoader(range(24), batch_sampler=made), sampler  # type: ignore[arg-type]


def shuffle() -> tdi.ShuffleSampler:
    return tdi.ShuffleSampler(24, seed=1)


def of_lines(folder: Path, *, mixed: bool) -> tuple[Any, Any]:
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(f"{10 * number + each}\n" for each in range(6)))
    lines = tdi.FileDataset(f"{folder}/*.txt", tdi.readers.text_lines, map_fn=int, shuffle_files=True, shuffle_buffer=5)
    data: Any = tdi.Mixture({"lines": lines}, {"lines": 1}, stop="all") if mixed else lines
    return DataLoader(data, batch_size=4), data


SET: dict[str, Callable[[], tuple[Any, Any]]] = {  # a loader of one process, and the object that the user tells
    "ShuffleSampler": lambda: ((own := shuffle()), DataLoader(range(24), 4, sampler=own))[::-1],  # type: ignore[arg-type]
    "TokenBatchSampler": lambda: of_batches(own := tdi.TokenBatchSampler(shuffle(), [1] * 24, 4), own),
    "BucketBatchSampler": lambda: of_batches(own := tdi.BucketBatchSampler(shuffle(), [1] * 24, [2], 4), own),
    "the sampler inside": lambda: of_batches(tdi.TokenBatchSampler(own := shuffle(), [1] * 24, 4), own),
    "Mixture": of_mixture,
    "kept modulo its length": lambda: ((own := Modulo()), DataLoader(range(6), 4, sampler=own))[::-1],  # type: ignore[arg-type]
    "with slots": lambda: ((own := Slotted()), DataLoader(range(6), 4, sampler=own))[::-1],  # type: ignore[arg-type]
}


def as_it_is(loader: Any) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return tdi.DataLoader(loader.dataset, loader.batch_size)
    if loader.batch_size is None:
        return tdi.DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    return tdi.DataLoader(loader.dataset, loader.batch_size, sampler=loader.sampler)


@pytest.mark.parametrize("divide", [distributed, as_it_is])
@pytest.mark.parametrize("name", [*SET, "FileDataset", "a mixture of files"])
def test_set_epoch_that_the_user_calls_is_always_taken(divide: Any, name: str, tmp_path: Path) -> None:
    """A script that goes on with ``for epoch in range(5, 10): sampler.set_epoch(epoch)`` trains these epochs."""
    make = SET.get(name, lambda: of_lines(tmp_path, mixed=name == "a mixture of files"))
    torch_loader, _ = make()
    with divide(torch_loader) as loader:
        epochs = [flat(loader) for _ in range(8)]
    assert len({*map(tuple, epochs)}) > 1
    torch_loader, sampler = make()
    with divide(torch_loader) as loader:
        for epoch in (5, 2):
            sampler.set_epoch(epoch)
            assert flat(loader) == epochs[epoch]
            assert loader.step.epoch == epoch
        loader.set_epoch(7)
        sampler.set_epoch(epoch=4)  # the last call counts
        assert flat(loader) == epochs[4]
        sampler.set_epoch(1)
        loader.set_epoch(7)
        assert flat(loader) == epochs[7]
        sampler.set_epoch(1)
        loader.seek(6)
        assert flat(loader) == epochs[6]
        sampler.set_epoch(3)
        state = loader.state_dict()
    torch_loader, sampler = make()
    with divide(torch_loader) as resumed:
        resumed.load_state_dict(state)
        assert [flat(resumed), flat(resumed)] == epochs[3:5]
    torch_loader, sampler = make()
    sampler.set_epoch(5)  # before the loader was made
    with divide(torch_loader) as loader:
        assert [flat(loader), flat(loader)] == epochs[5:7]


def quiet_loader() -> tuple[Any, Any]:
    return (own := Quiet()), DataLoader(range(6), 4, sampler=own)  # type: ignore[arg-type]


@WAYS
def test_who_does_not_show_its_epoch_is_told_by_its_owner_or_by_the_loaders_set_epoch_and_seek_alone(
    divide: Any,
) -> None:
    sampler, torch_loader = quiet_loader()
    with divide(torch_loader) as loader:
        assert [flat(loader), flat(loader)] == [rotated(0), rotated(0)]
        for epoch in (5, 5, 2):  # as a script that goes on at another number than the loader
            sampler.set_epoch(epoch)
            assert flat(loader) == rotated(epoch)
        assert loader.step.epoch == 4
        loader.set_epoch(3)
        assert [flat(loader), flat(loader)] == [rotated(3), rotated(3)]
        loader.set_epoch(1)
        sampler.set_epoch(4)  # the last call counts
        assert flat(loader) == rotated(4)
        loader.seek(7, 1)
        assert flat(loader) == rotated(7)[4:]
        sampler.set_epoch(5)
        next(iter(loader))
        state = loader.state_dict()
    sampler, torch_loader = quiet_loader()
    with divide(torch_loader) as resumed:
        resumed.load_state_dict(state)
        sampler.set_epoch(5)
        assert flat(resumed) == rotated(5)[4:]
    sampler, torch_loader = quiet_loader()
    with divide(torch_loader) as resumed:
        resumed.load_state_dict(state)
        with pytest.raises(tdi.StateMismatch, match="set_epoch"):
            flat(resumed)


class QuietItems(Dataset[int]):
    """Shows its epoch in its samples only."""

    def __init__(self) -> None:
        self._told = 0

    def set_epoch(self, epoch: int) -> None:
        self._told = epoch

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return 100 * self._told + index


@WAYS
def test_persistent_loader_workers_hear_of_the_loaders_set_epoch_for_data_that_does_not_show_its_epoch(
    divide: Any,
) -> None:
    data: Any = QuietItems()
    lasting = DataLoader(data, 4, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    with divide(lasting) as loader:
        assert [flat(loader), flat(loader)] == [of_epoch(0), of_epoch(0)]
        loader.set_epoch(7)
        assert [flat(loader), flat(loader)] == [of_epoch(7), of_epoch(7)]


def test_a_users_class_and_its_objects_stay_as_they_are() -> None:
    class Own(Rotated):
        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)

    before = Own.set_epoch
    given, never_given = Own(), Own()
    with distributed(DataLoader(Items(), 4, sampler=given)) as loader:
        flat(loader)
        given.set_epoch(3)
        never_given.set_epoch(5)
    assert vars(never_given) == {"count": 6, "epoch": 5}
    assert vars(given) == {"count": 6, "epoch": 3}
    assert Own.set_epoch is before


def test_a_dataset_function_and_an_iterable_are_told_too() -> None:
    strategy = tdi.Strategy(["cpu"])
    for data in (Stream(), lambda: Stream()):  # noqa: PLW0108 - a class is refused
        with strategy.distribute_dataset(data, global_batch_size=4) as loader:
            assert [flat(loader) for _ in range(3)] == [of_epoch(0), of_epoch(1), of_epoch(2)]
    sampler = Rotated()
    made = DataLoader(Items(), 4, sampler=sampler)
    with strategy.distribute_datasets_from_function(lambda _: made) as loader:
        assert [flat(loader) for _ in range(2)] == [rotated(0), [100 + index for index in rotated(1)]]


def test_what_set_epoch_raises_is_raised_at_the_first_step() -> None:
    class Refuses(Items):
        def set_epoch(self, epoch: int) -> None:
            raise OSError("no epoch")

    with distributed(DataLoader(Refuses(), 4)) as loader, pytest.raises(tdi.SourceError, match="no epoch"):
        flat(loader)


class Shuffling(Sampler[int]):
    """Shuffles by its epoch, and shows it to nobody."""

    def set_epoch(self, epoch: int) -> None:
        self._random = random.Random(epoch)

    def __len__(self) -> int:
        return 13

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(13), 13))


class Telling(Shuffling):
    """Shows it."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch = epoch


def go_on(workers: int, lasting: bool, *, tells: bool) -> list[tuple[int, list[int]]]:
    """A script that goes on at epoch 5, and leaves epoch 6 after a step."""
    sampler, found = (Telling if tells else Shuffling)(), []
    data: Any = range(13)
    with tdi.DataLoader(data, 4, sampler=sampler, num_workers=workers, persistent_workers=lasting) as loader:
        for epoch in range(5, 8):
            sampler.set_epoch(epoch)
            for batch in loader:
                assert loader.step.epoch == (epoch if tells else epoch - 5)
                found.append((epoch, batch.tolist()))
                if epoch == 6:
                    break
    return found


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize(("workers", "lasting"), [(0, False), (2, False), (2, True)])
def test_a_script_that_sets_the_epochs_of_its_sampler_gets_these_epochs(
    workers: int, lasting: bool, tells: bool
) -> None:
    whole = go_on(workers, lasting, tells=tells)
    assert [epoch for epoch, _ in whole] == [5] * 4 + [6] + [7] * 4
    for epoch in (5, 7):
        order = [number for each, batch in whole if each == epoch for number in batch]
        assert order == random.Random(epoch).sample(range(13), 13)
    ranks = run_ranks(2, partial(go_on, workers, lasting, tells=tells))
    assert [(one[0], one[1] + other[1]) for one, other in zip(*ranks, strict=True)] == whole


def used(seed: int, numbers: int, *, normal: bool = False) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    (torch.randn if normal else torch.rand)(numbers, generator=generator)
    return generator


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("numbers", [0, 1, 623, 624, 625, 10_000])
def test_a_state_comes_back_from_its_text_exactly_and_draws_the_same(seed: int, numbers: int) -> None:
    for normal in (False, True):
        generator = used(seed, numbers, normal=normal)
        text = json.loads(json.dumps(packed(generator.get_state())))
        assert len(text) <= 3500
        assert torch.equal(unpacked(text), generator.get_state())
        other = torch.Generator()
        other.set_state(unpacked(text))
        assert torch.equal(torch.randn(99, generator=other), torch.randn(99, generator=generator))


def test_a_damaged_text_is_refused_wherever_the_damage_is() -> None:
    text = packed(used(1, 5).get_state())
    content = base64.b64decode(text)
    for place in [*range(40), 1000, len(content) - 1]:
        changed = bytearray(content)
        changed[place] ^= 4
        with pytest.raises(tdi.StateMismatch, match="saved random state cannot be read"):
            unpacked(base64.b64encode(changed).decode())
    for length in (0, 1, 4, 11, 12, 20, 100, len(content) - 4, len(content) - 1):
        with pytest.raises(tdi.StateMismatch, match="cannot be read"):
            unpacked(base64.b64encode(content[:length]).decode())


@pytest.mark.parametrize("text", ["", "abc", "no base64 at all", "é" * 16, "A" * 16, None, 5, ["AAAA"]])
def test_what_is_no_text_of_a_state_is_refused(text: Any) -> None:
    with pytest.raises(tdi.StateMismatch, match="cannot be read"):
        unpacked(text)


def test_generators_are_found_once_each_in_order() -> None:
    first, second = torch.Generator(), torch.Generator()
    sampler = RandomSampler(range(9), generator=first)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(9)), sampler=sampler, generator=second)
    found = generators_of(loader, sampler, loader, loader.batch_sampler, SequentialSampler(range(9)), None, [first])
    assert [id(generator) for generator in found] == [id(second), id(first)]
    equal = generators_of(RandomSampler(range(9), generator=first), RandomSampler(range(9), generator=first))
    assert [id(generator) for generator in equal] == [id(first)]


def test_generators_of_samplers_within_are_found_at_any_depth() -> None:
    generator, outer = torch.Generator(), torch.Generator()
    inner: Any = BatchSampler(RandomSampler(range(9), generator=generator), 2, drop_last=False)
    batches = BatchSampler(inner, 2, drop_last=False)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(9)), batch_sampler=batches, generator=outer)
    for holders in ((batches,), (loader.sampler, loader.batch_sampler)):
        assert [id(each) for each in generators_of(*holders)] == [id(generator)]
    assert [id(each) for each in generators_of(loader, batches)] == [id(outer), id(generator)]
    circle = SimpleNamespace(generator=outer)
    circle.sampler = circle
    assert [id(each) for each in generators_of(circle)] == [id(outer)]


def test_the_lent_state_is_told_as_the_calls_left_it() -> None:
    torch.manual_seed(1)
    lent = used(2, 0)
    borrowed = SharedRng(lent.get_state())
    assert torch.equal(borrowed.state, lent.get_state())
    borrowed.state.zero_()
    inside = borrowed(lambda: (torch.rand(3), borrowed.state))
    assert torch.equal(inside[0], torch.rand(3, generator=lent))
    assert torch.equal(inside[1], lent.get_state())
    assert torch.equal(borrowed.state, lent.get_state())
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(1).get_state())
