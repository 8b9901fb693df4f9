"""Closing: by another thread than the one that reads, or cut short; ``test_at_any_line`` has all other moments."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from tests.data import Numbers
from tests.support.collectives import FakeCollectives
from tests.support.processes import in_fork
from tests.support.scripted import Script, compose, values
from torchdistinput.pipeline.end_errors import left_to_parent

BOUND_SECONDS = 30.0


SLOW = Numbers(100_000, each=lambda _: time.sleep(0.002))


class SlowStream(IterableDataset[int]):
    """The same, in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(map(SLOW.__getitem__, range(100_000)))


def _of(loader: Any, prefetch: int | None) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(loader, tdi.InputOptions(prefetch=prefetch))


def _of_function(prefetch: int | None) -> Any:
    options = tdi.InputOptions(prefetch=prefetch)
    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: DataLoader(SLOW, 2), options)


SOURCES: dict[str, Callable[[int | None], Any]] = {
    "map-style, workers": lambda prefetch: _of(DataLoader(SLOW, 2, num_workers=1), prefetch),
    "iterable": lambda prefetch: _of(DataLoader(SlowStream(), 2), prefetch),
    "function": _of_function,
    "drop-in": lambda prefetch: tdi.DataLoader(SLOW, 2, num_workers=1, options=tdi.InputOptions(prefetch=prefetch)),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_who_reads_while_another_thread_closes_is_told_so(make: Callable[[int | None], Any], prefetch: int) -> None:
    """Never that the data has ended, nor that another rank was lost."""
    dataset = make(prefetch)
    iterator = iter(dataset)
    found: list[BaseException] = []
    begun = threading.Event()

    def train() -> None:
        try:
            while True:
                next(iterator)
                begun.set()
        except BaseException as error:
            found.append(error)
            with pytest.raises(tdi.InputError, match="closed by another thread"):
                next(iterator)

    reader = threading.Thread(target=train, daemon=True)
    reader.start()
    assert begun.wait(BOUND_SECONDS)
    iterator.close()
    reader.join(BOUND_SECONDS)
    assert not reader.is_alive()
    assert isinstance(found[0], tdi.InputError)
    assert "the iterator was closed by another thread after step" in str(found[0])
    with pytest.raises(StopIteration):  # as ever, for who closed it
        next(iterator)
    dataset.close()


def test_an_iterator_whose_close_was_cut_short_is_closed_by_the_next_call_or_when_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dropped in (False, True):
        iterator = iter(_of(DataLoader(SLOW, 2, num_workers=1), 2))
        next(iterator)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", _interrupted)
            with pytest.raises(KeyboardInterrupt):
                iterator.close()
        assert _threads()
        if dropped:
            del iterator
            gc.collect()  # the traceback has it
        else:
            iterator.close()
        assert not _threads()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torchdistinput-input"]


WORLDS: dict[str, tuple[Callable[[], FakeCollectives | None], int]] = {
    "in line": (lambda: None, 0),
    "alone": (lambda: None, 2),
    "with votes": (lambda: FakeCollectives(1), 2),
    "with votes, in line": (lambda: FakeCollectives(1), 0),
}


def has_ended(threads: Callable[[], Any]) -> bool:
    until = time.monotonic() + BOUND_SECONDS
    while threads() and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    return not threads()


def test_an_interruption_of_the_start_of_the_thread_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def started_and_interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "torchdistinput-input":
            raise KeyboardInterrupt

    dataset = _of(DataLoader(SLOW, 2, num_workers=1), 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", started_and_interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(dataset))
    assert has_ended(_threads)

    dataset.close()


@pytest.mark.parametrize(("world", "depth"), WORLDS.values(), ids=WORLDS)
def test_a_fork_reads_on_only_where_that_takes_nothing_that_it_lacks(
    world: Callable[[], FakeCollectives | None], depth: int
) -> None:
    """Else it would wait for ever for a thread that it does not have, or vote in the place of its parent."""
    party = compose(world(), 0, Script((1,) * 5, in_background=depth > 0), depth=depth)

    def read() -> list[Any]:
        return [values(share) for share in iter(party.engine.take, None)]

    first = party.engine.take()
    assert first is not None
    found = [in_fork(read) for _ in range(2)]
    assert in_fork(party.engine.close) is None
    left = read()
    assert len(left) == 4
    if depth or world() is not None:
        assert found == [repr(left_to_parent())] * 2
    else:
        assert found == [left, left]
    party.engine.close()
    assert party.engine.closed
    assert not _threads()
    assert (party.stream.closed >= 1, party.devices_closed) == (True, 1)
