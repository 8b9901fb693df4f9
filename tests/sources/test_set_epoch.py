"""The sampler, batch sampler and dataset that show their epoch are told it, unless the user told them another."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
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
    TensorDataset,
)

import torchdistinput as tdi
from tests.data import Fragments, Order
from tests.support.epochs import lists
from torchdistinput.sources.rng import SharedRng, generators_of, packed, unpacked

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def rotated(epoch: int) -> list[int]:
    return [(epoch + index) % 6 for index in range(6)]


class Quiet(Sampler[int]):
    """Shows its epoch to nobody."""

    def __init__(self) -> None:
        self._inner = Order(6, rotated)

    def set_epoch(self, epoch: int) -> None:
        self._inner.set_epoch(epoch)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(self._inner)


class Slotted:
    """Has no ``__dict__``, and keeps what it needs of its epoch."""

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch % 6

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter(rotated(self.epoch))


class Items(Dataset[int]):
    """Tells its epoch in each sample."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


def of_epoch(epoch: int) -> list[int]:
    return [100 * epoch + index for index in range(6)]


def flat(epoch: Any) -> list[int]:
    return [number for batch in epoch for number in lists(batch)]


def distributed(loader: Any) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(loader)


def drop_in(loader: DataLoader[Any]) -> Any:
    if loader.num_workers:
        more: dict[str, Any] = {"num_workers": loader.num_workers, "persistent_workers": loader.persistent_workers}
        return tdi.DataLoader(loader.dataset, 4, **more)
    return tdi.DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)


WAYS = pytest.mark.parametrize("divide", [distributed, drop_in])


def of_batches(made: Any, sampler: Any) -> tuple[Any, Any]:
    return DataLoader(range(24), batch_sampler=made), sampler  # type: ignore[arg-type]


def shuffle() -> tdi.ShuffleSampler:
    return tdi.ShuffleSampler(24, seed=1)


def fragments() -> tdi.FragmentDataset:
    return tdi.FragmentDataset(Fragments({0: 9, 9: 15}, of=torch.tensor), shuffle_buffer=24, seed=1)


SET: dict[str, Callable[[], tuple[Any, Any]]] = {  # a loader of one process, and the object that the user tells
    "TokenBatchSampler": lambda: of_batches(own := tdi.TokenBatchSampler(shuffle(), [1] * 24, 4), own),
    "BucketBatchSampler": lambda: of_batches(own := tdi.BucketBatchSampler(shuffle(), [1] * 24, [2], 4), own),
    "the sampler inside": lambda: of_batches(tdi.TokenBatchSampler(own := shuffle(), [1] * 24, 4), own),
    "with slots, kept modulo its length": lambda: (
        (own := Slotted()),
        DataLoader(range(6), 4, sampler=own),  # type: ignore[arg-type]
    )[::-1],
    "fragments": lambda: (DataLoader(own := fragments(), 4), own),
}


def as_it_is(loader: Any) -> Any:
    if loader.batch_size is None:
        return tdi.DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    samples = isinstance(loader.dataset, IterableDataset)
    return tdi.DataLoader(loader.dataset, loader.batch_size, sampler=None if samples else loader.sampler)


@pytest.mark.parametrize("divide", [distributed, as_it_is])
@pytest.mark.parametrize("name", SET)
def test_set_epoch_that_the_user_calls_is_always_taken(divide: Any, name: str) -> None:
    """A script that goes on with ``for epoch in range(5, 10): sampler.set_epoch(epoch)`` trains these epochs."""
    make = SET[name]
    torch_loader, _ = make()
    with divide(torch_loader) as loader:
        begun = loader.state_dict()
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
        sampler.set_epoch(2)
        loader.load_state_dict(begun)
        assert flat(loader) == epochs[0]
        sampler.set_epoch(2)  # the number of before, after an epoch of another one
        assert flat(loader) == epochs[2]
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
    class Own(Items):
        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)

    before = Own.set_epoch
    given, never_given = Own(), Own()
    with distributed(DataLoader(given, 4)) as loader:
        flat(loader)
        given.set_epoch(3)
        never_given.set_epoch(5)
    assert (vars(never_given), vars(given)) == ({"epoch": 5}, {"epoch": 3})
    assert Own.set_epoch is before


def test_the_loader_of_a_dataset_function_is_told_too() -> None:
    made = DataLoader(Items(), 4, sampler=Order(6, rotated))
    with tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: made) as loader:
        assert [flat(loader) for _ in range(2)] == [rotated(0), [100 + index for index in rotated(1)]]


def test_what_set_epoch_raises_is_raised_at_the_first_step() -> None:
    class Refuses(Items):
        def set_epoch(self, epoch: int) -> None:
            raise OSError("no epoch")

    with distributed(DataLoader(Refuses(), 4)) as loader, pytest.raises(tdi.SourceError, match="no epoch"):
        flat(loader)


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
