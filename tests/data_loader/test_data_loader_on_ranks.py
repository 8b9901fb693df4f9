"""The drop-in DataLoader on real ranks: the same batches as torch's in one process, and the same ends."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

import torchdistinput as tdi
from tests.data import Numbers, Order, Repeated
from tests.support.beside_torch import Ours, Torchs, as_torch, epochs
from tests.support.epochs import lists, raised
from tests.support.faults import kill_worker
from tests.support.processes import run_to_the_end
from torchdistinput.testing import run_ranks

# --------------------------------------------------------------------------------------------- when ranks are found


def read_without_rank(left: bool) -> tuple[list[Any], list[Any], int, int]:
    told = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        data: Any = list(range(6))
        loader = tdi.DataLoader(data, batch_size=4)
        alone = lists(list(loader))
        if left:
            next(iter(loader))  # and dropped: its epoch is over
        iter(loader).has_next()  # and dropped: its epoch is the next one
    finally:
        os.environ.update(told)
    dist.init_process_group("gloo")
    together = lists(list(loader))
    dist.destroy_process_group()
    return alone, together, len(loader), loader.step.epoch


@pytest.mark.parametrize("left", [False, True])
def test_the_rank_is_found_at_iter_and_a_group_that_came_later_is_found_at_the_next_one(left: bool) -> None:
    first, second = run_ranks(2, read_without_rank, left, init_group=False)
    assert first == ([[0, 1, 2, 3], [4, 5]], [[0, 1], [4]], 2, 1 + left)
    assert second == ([[0, 1, 2, 3], [4, 5]], [[2, 3], [5]], 2, 1 + left)


def under_torchrun() -> tuple[bool, list[Any], list[Any]]:
    """One rank that torchrun launched; nobody initialised a group."""
    data: Any = list(range(5))
    training, validation = tdi.DataLoader(data, batch_size=4), tdi.DataLoader(data, batch_size=3)
    early = dist.is_initialized()
    return early, lists(list(training)), lists(list(validation))


def test_a_launch_by_torchrun_is_enough() -> None:
    first, second = run_ranks(2, under_torchrun, init_group=False)
    assert first == (False, [[0, 1], [4]], [[0, 1], [3]])
    assert second == (False, [[2, 3], []], [[2], [4]])


class CannotFork(ForkContext):
    def Process(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]  # noqa: N802 - its name in Python
        raise tdi.SourceError("no list of samples") from FileNotFoundError("no more processes")


def only_tried_where_it_cannot_begin() -> tuple[str, str | None]:
    context = CannotFork() if dist.get_rank() == 1 else "fork"
    data: Any = list(range(6))
    strategy = tdi.Strategy(timeout_seconds=20)
    loader = tdi.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context, strategy=strategy)

    def try_it() -> None:
        iterator = iter(loader)
        assert iterator is not None  # has a name here, as in a trainer that tries it

    try_it()
    try:
        next(iter(loader))
    except tdi.SourceError as error:
        return str(error), error.kind
    return "", None


def test_an_iterator_that_cannot_begin_on_one_rank_is_dropped_on_all(scenes: Scenes) -> None:
    """Else that rank begins another epoch, while the others go on with this one."""
    for message, kind in scenes("cannot begin"):
        assert "the input of rank 1 failed at step 0 of epoch 0: SourceError: no list of samples" in message
        assert kind == "FileNotFoundError"


# ------------------------------------------------------------------------------------- scenes, all in one launch


Scenes = Callable[[str], list[Any]]
"""What the two ranks returned in the scene of that name."""


def play() -> dict[str, Any]:
    return {
        "iterables": iterables_with_workers(),
        "already divided, DATA": already_divided(tdi.AutoShardPolicy.DATA),
        "already divided, OFF": already_divided(tdi.AutoShardPolicy.OFF),
        "an epoch as data": an_epoch_as_data(),
        "copies of a loader with a strategy": copies_of_a_loader_with_a_strategy(),
        "broken promises, 0 workers": broken_promises(0),
        "broken promises, 2 workers": broken_promises(2),
        "cannot begin": only_tried_where_it_cannot_begin(),
        "refusals": refusals(),
        "divided": divided(),
        "one iterator, True": epochs_of_one_iterator(True),
        "one iterator, False": epochs_of_one_iterator(False),
        "asked, as usual": asked_for(None),
        "asked, 2 ahead": asked_for(2),
    }


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    """A launch takes longer than a scene."""
    ranks = run_ranks(2, play, timeout_seconds=120)
    return lambda name: [rank[name] for rank in ranks]


# ---------------------------------------------------------------------------------------------------- what is told


def told(caught: list[warnings.WarningMessage]) -> list[tuple[str, str]]:
    return [(str(each.message), Path(each.filename).name) for each in caught if each.category is UserWarning]


def iterables_with_workers() -> list[Any]:
    found = []
    loaders: list[Any] = [
        tdi.DataLoader(Repeated(6), batch_size=4, num_workers=2),
        tdi.DataLoader(Repeated(6), batch_size=4),
        tdi.DataLoader(range(6), batch_size=4, num_workers=2),  # type: ignore[arg-type]
    ]
    for loader in loaders:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for _ in loader:
                    pass
        found.append(told(caught))
    return found


def test_an_iterable_that_every_rank_and_loader_worker_reads_is_warned_of_once(scenes: Scenes) -> None:
    first, second = scenes("iterables")
    ((several, place),), ((one, _),), none = first
    assert place == "test_data_loader_on_ranks.py"
    assert several == one
    assert "each of the 2 ranks, and each of their loader workers, iterates over all of it" in several
    assert "HINT" in several
    assert none == second[0] == second[1] == []


# --------------------------------------------------------------------------------------------------- per-rank samplers


def already_divided(policy: tdi.AutoShardPolicy) -> tuple[Any, list[Any]]:
    data: Any = list(range(8))

    def make() -> Any:
        options = tdi.InputOptions(auto_shard_policy=policy)
        return tdi.DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), options=options)

    refusal = raised(make)
    if refusal is not None:
        return (refusal.kind, refusal.message), []
    loader = make()
    return None, [(lists(batch), loader.step.global_size) for batch in loader]


def test_a_sampler_for_one_rank_is_refused_as_it_would_be_divided_twice(scenes: Scenes) -> None:
    for (kind, message), _ in scenes("already divided, DATA"):
        assert kind == "ShardingError"
        assert "DistributedSampler" in message
        assert "divided twice" in message
        assert "OFF" in message


def test_a_sampler_for_one_rank_is_taken_as_it_is_under_off(scenes: Scenes) -> None:
    assert scenes("already divided, OFF") == [
        (None, [([0, 2], 4), ([4, 6], 4)]),
        (None, [([1, 3], 4), ([5, 7], 4)]),
    ]


def an_epoch_as_data() -> list[Any]:
    data: Any = list(range(4))
    strategy, loader = tdi.Strategy(), tdi.DataLoader(data, batch_size=4)
    return [
        raised(lambda: strategy.distribute_dataset(iter(loader))),
        raised(lambda: strategy.distribute_datasets_from_function(lambda _: iter(loader))),
        lists(list(strategy.distribute_datasets_from_function(lambda _: loader))),
    ]


def test_an_epoch_of_the_drop_in_is_divided_already(scenes: Scenes) -> None:
    for rank, (*refusals, parts) in enumerate(scenes("an epoch as data")):
        assert parts == [[2 * rank, 2 * rank + 1]]
        for refusal in refusals:
            assert refusal.kind == "InputError"
            assert "found a LoaderIterator as data, which is divided among the ranks already" in refusal.message
            assert "give the data that it was made of" in refusal.message


def copies_of_a_loader_with_a_strategy() -> list[Any]:
    """The batches of three loaders, the refusals to pickle, and those of what is bound to the process."""
    data: Any = list(range(4))
    strategy = tdi.Strategy(["cpu"])
    loader = tdi.DataLoader(data, batch_size=2, strategy=strategy)
    running = iter(loader)
    next(running)
    loaders = (copy.copy(loader), copy.deepcopy(loader), loader)
    bound = (running, divided := strategy.distribute_dataset(loader), begun := iter(divided))
    calls = [partial(call, each) for each in bound for call in (copy.copy, copy.deepcopy, pickle.dumps)]
    begun.close()
    running.close()
    refused = [raised(partial(pickle.dumps, each)) for each in (loader, {"strategy": strategy})]
    return [[lists(list(each)) for each in loaders], refused, [raised(call) for call in calls]]


def test_a_loader_with_a_strategy_is_copied_and_what_is_bound_to_the_process_says_so(scenes: Scenes) -> None:
    for rank, (batches, refused, bound) in enumerate(scenes("copies of a loader with a strategy")):
        assert batches == [[[rank], [2 + rank]]] * 3
        for error in refused:
            assert error.kind == "TypeError"
            assert "cannot pickle a Strategy of several ranks" in error.message
            assert "Make a Strategy() in the other process" in error.message
        kinds = [kind for kind in ("LoaderIterator", "DistributedDataset", "DistributedIterator") for _ in range(3)]
        for error, kind in zip(bound, kinds, strict=True):
            assert error.kind == "TypeError"
            assert f"cannot copy or pickle a {kind}" in error.message
            assert "state_dict() and load_state_dict() carry the position over" in error.message


def first_of(count: int, _: int) -> range:
    return range(count)


def broken_promises(workers: int) -> Any:
    """A sampler that yields more or fewer than its length says."""
    data: Any = list(range(9))
    found = []
    for given in (3, 8):
        sampler = Order(5, partial(first_of, given))
        loader = tdi.DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers)
        found.append((len(loader), [lists(list(loader)) for _ in range(2)]))
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_yields_what_it_yields_whatever_its_length_says(workers: int, scenes: Scenes) -> None:
    first, second = scenes(f"broken promises, {workers} workers")
    assert first == [(3, [[[0], [2]]] * 2), (3, [[[0], [2], [4], [6]]] * 2)]
    assert second == [(3, [[[1], []]] * 2), (3, [[[1], [3], [5], [7]]] * 2)]


def asked_for(prefetch: int | None) -> tuple[int, bool]:
    """One rank: samples that it asked for before it got its first batch of two, and whether all on the main thread."""
    on_main: list[bool] = []
    data = Numbers(20, each=lambda _: on_main.append(threading.current_thread() is threading.main_thread()))
    loader = tdi.DataLoader(data, batch_size=4, options=tdi.InputOptions(prefetch=prefetch))
    iterator = iter(loader)
    next(iterator)
    first = len(data.asked)
    for _ in iterator:
        pass
    return first, all(on_main)


def test_code_of_the_user_runs_on_the_callers_thread_and_not_ahead_unless_asked(scenes: Scenes) -> None:
    assert scenes("asked, as usual") == [(2, True)] * 2
    assert all(2 < first <= 6 and main for first, main in scenes("asked, 2 ahead"))


# --------------------------------------------------------------------------------------------- a death


def reader(rank: int, folder: str) -> None:
    """One rank: reads until it hears of the death; what it heard."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # loader workers are children, whose death is signalled
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    # Batch 5 is samples 20 to 23; samples 22 and 23 are rank 1's, read by its loader worker 1.
    loader = tdi.DataLoader(Numbers(100_000, {22: kill_worker}), batch_size=4, num_workers=2)

    def loop() -> None:
        for step, _ in enumerate(loader):
            if rank == 1 and step == 2:
                time.sleep(2)  # torch's signal handler would raise here

    error = raised(loop)
    story = {} if error is None else {"kind": error.kind, "message": error.message}
    Path(folder, f"{rank}.json").write_text(json.dumps(story))
    os._exit(0)


def test_a_loader_worker_that_is_killed_while_a_rank_trains_is_named_on_every_rank_at_once(
    tmp_path: Path,
) -> None:
    run_to_the_end(reader, [(rank, str(tmp_path)) for rank in range(2)])
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["kind"] == "SourceError"
        where = "(loader worker 1 was killed by signal 9, samples 22, 23)"
        assert f"rank 1 failed at step 5 of epoch 0 {where}" in told["message"]


class Endless:
    """Asks for the sampler's epochs one after the other."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


def with_one_iterator(base: Any, unlock: bool) -> Any:
    """One iterator over all epochs: the loader workers never stop.

    Args:
      base: the class.
      unlock: whether torch's own lock is opened for it, as timm's MultiEpochsDataLoader does; else it is gone round, as
        by Ultralytics' InfiniteDataLoader.
    """

    class OneIterator(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            name = "sampler" if self.batch_sampler is None else "batch_sampler"
            self.epoch_length = len(getattr(self, name))
            endless = Endless(getattr(self, name))
            if unlock:
                self._DataLoader__initialized = False
                setattr(self, name, endless)
                self._DataLoader__initialized = True
            else:
                object.__setattr__(self, name, endless)
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return self.epoch_length

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

    return OneIterator


def process_of(rows: list[int]) -> tuple[list[int], int]:
    return rows, os.getpid()


CALLS: dict[str, dict[str, Any]] = {
    "batches": {"batch_size": 3},
    "no batches": {"batch_size": None},
    "loader workers": {"batch_size": 3, "num_workers": 2},
}


@pytest.mark.parametrize("unlock", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_one_iterator_for_all_epochs_gives_torchs_batches(call: str, unlock: bool) -> None:
    def look(cls: Any) -> Any:
        loader = with_one_iterator(cls, unlock)(range(7), shuffle=True, **CALLS[call])
        with pytest.raises(ValueError, match="batch_sampler attribute should not be set"):
            loader.batch_sampler = [[0]]
        return len(loader), epochs(loader, 3)

    as_torch(look)


def test_its_loader_workers_are_the_same_in_all_epochs() -> None:
    loader = with_one_iterator(Ours, True)(range(8), batch_size=2, num_workers=2, collate_fn=process_of)
    epochs = [{process for _, process in loader} for _ in range(3)]
    assert len(epochs[0]) == 2
    assert epochs[0] == epochs[1] == epochs[2]
    loader.close()


class Wrapped(tdi.DataLoader[Any]):
    """What most subclasses do: a collate function of their own, and something done to each batch."""

    def __init__(self, data: Any, follow: str = "", **more: Any) -> None:
        more.pop("collate_fn", None)
        self.follow = follow
        super().__init__(data, collate_fn=sorted, **more)

    def __iter__(self) -> Any:
        return ((self.follow, batch) for batch in super().__iter__())


def test_a_subclass_with_attributes_a_collate_function_and_an_iter_of_its_own() -> None:
    loader = Wrapped([3, 1, 2], follow="next", batch_size=2, collate_fn=list)
    assert [*loader] == [("next", [1, 3]), ("next", [2])]
    loader.follow, loader.batches_seen = "after", 2
    assert next(loader.__iter__()) == ("after", [1, 3])


# ------------------------------------------------------------------------------------------------------ on two ranks


def epochs_of_one_iterator(unlock: bool) -> tuple[list[Any], int, str]:
    loader = with_one_iterator(tdi.DataLoader, unlock)(
        range(7), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    found = [lists([*loader]) for _ in range(3)]
    loader.close()
    try:
        data: Any = range(7)
        with_one_iterator(tdi.DataLoader, unlock)(data, batch_size=4, sampler=DistributedSampler(data))
    except tdi.ShardingError as error:
        return found, len(loader), str(error)
    return found, len(loader), "none"


@pytest.mark.parametrize("unlock", [True, False])
def test_one_iterator_for_all_epochs_gives_each_rank_its_part(unlock: bool, scenes: Scenes) -> None:
    whole = with_one_iterator(Torchs, unlock)(
        range(7), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    expected = [lists([*whole]) for _ in range(3)]
    (first, length, refusal), (second, _, _) = scenes(f"one iterator, {unlock}")
    assert length == 2
    assert "DistributedSampler" in refusal
    for parts in zip(first, second, expected, strict=True):
        for one, other, batch in zip(*parts, strict=True):
            assert one + other == batch


SAMPLES, BATCH = 12, 4


class Skipping:
    """As frameworks pass over the first batches."""

    def __init__(self, batches: Any, skipped: int) -> None:
        self.batches, self.skipped = batches, skipped

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.batches):
            if number >= self.skipped:
                yield batch


class Wrapping:
    """A batch sampler that is not torch's, around a sampler that is not torch's either."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler

    def __iter__(self) -> Any:
        for number in self.batch_sampler:
            yield [number]


def data() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES))


def read(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in loader]


def refusals() -> list[str]:
    """What is said of each loader that nobody divides."""
    loader = tdi.DataLoader(data(), batch_size=BATCH, shuffle=True)
    wrapping = tdi.DataLoader(data(), batch_sampler=Wrapping(range(SAMPLES)))
    made = [
        DataLoader(loader.dataset, batch_sampler=loader.batch_sampler),
        DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, num_workers=1),
        DataLoader(loader.dataset, batch_size=BATCH, sampler=loader.sampler),
        DataLoader(loader.dataset, batch_sampler=BatchSampler(loader.sampler, 2, drop_last=False)),
        DataLoader(loader.dataset, batch_sampler=Skipping(loader.batch_sampler, 1)),
        DataLoader(loader.dataset, batch_size=BATCH, collate_fn=loader.collate_fn),
        DataLoader(loader.dataset, batch_size=BATCH, sampler=loader.batch_sampler.sampler),
        DataLoader(loader.dataset, batch_sampler=BatchSampler(loader.batch_sampler.sampler, 2, drop_last=False)),
        DataLoader(loader.dataset, batch_size=BATCH, sampler=wrapping.batch_sampler.batch_sampler),
        loader.sampler,
        copy.copy(loader.sampler),
        pickle.loads(pickle.dumps(loader.batch_sampler)),
        tdi.Strategy().distribute_dataset(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)),
    ]
    told = []
    for each in made:
        with pytest.raises(tdi.InputError) as caught:
            list(each)
        told.append(str(caught.value))
    with pytest.raises(tdi.InputError) as caught:
        loader.collate_fn([loader.dataset[0]])
    told.append(str(caught.value))
    return told


def test_a_torch_loader_of_the_attributes_of_a_divided_one_is_refused_also_without_its_collate_fn(
    scenes: Scenes,
) -> None:
    for told in scenes("refusals"):
        assert len(told) == 14
        for message in told:
            assert "with it every rank would read whole batches" in message
            assert "integrations.accelerate.prepare(accelerator, loader)" in message
            assert "loader.seek(epoch, step)" in message
            assert "loader.torch_loader" in message


def divided() -> dict[str, Any]:
    """What is made of the attributes and divided, and what else one may do with them."""
    loader = tdi.DataLoader(data(), batch_size=BATCH, sampler=Order(SAMPLES, partial(first_of, SAMPLES)))
    parts = (loader.dataset, loader.batch_sampler)
    found: dict[str, Any] = {
        "drop-in": read(tdi.DataLoader(parts[0], batch_sampler=parts[1], collate_fn=loader.collate_fn)),
        "with workers": read(
            tdi.DataLoader(parts[0], batch_sampler=parts[1], collate_fn=loader.collate_fn, num_workers=1)
        ),
        "inner sampler": read(tdi.DataLoader(parts[0], batch_size=BATCH, sampler=parts[1].sampler)),
        "inside another": read(tdi.DataLoader(parts[0], batch_sampler=Skipping(parts[1], 0))),
        "by hand": list(loader.torch_loader.batch_sampler or ()),
        "whole": read(loader.torch_loader),
        "kind": (isinstance(loader.sampler, Order), isinstance(loader.batch_sampler.sampler, Order)),
        "not": isinstance(loader.sampler, RandomSampler),
        "lengths": (len(loader.sampler), len(loader.batch_sampler), loader.batch_sampler.batch_size),
        "same": repr(loader.sampler) == repr(loader.torch_loader.sampler),
    }
    loader.batch_sampler.sampler = loader.sampler
    found["same inside"] = loader.torch_loader.batch_sampler.sampler is loader.torch_loader.sampler  # type: ignore[union-attr]
    loader.batch_sampler.sampler.set_epoch(5)
    list(loader)
    found["epochs"] = loader.step.epoch, loader.sampler.epoch
    return found


def test_what_is_divided_all_the_same_works_and_the_attributes_look_as_they_are(scenes: Scenes) -> None:
    first, second = scenes("divided")
    for name in ("drop-in", "with workers", "inner sampler", "inside another"):
        assert first[name] == [[0, 1], [4, 5], [8, 9]], name
        assert second[name] == [[2, 3], [6, 7], [10, 11]], name
    for found in (first, second):
        assert found["by hand"] == found["whole"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert found["kind"] == (True, True)
        assert found["not"] is False
        assert found["lengths"] == (12, 3, BATCH)
        assert found["same"] is True
        assert found["same inside"] is True
        assert found["epochs"] == (5, 5)
