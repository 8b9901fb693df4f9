"""Closing: by another thread, cut short, after an interruption; and a Ctrl-C at any line of the library.

Of each kind of loader and each call nothing is lost, and nothing is left; nor is what a handler of signals raises,
while samples are read.
"""

from __future__ import annotations

import contextvars
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import torchdistinput as tdi
from tests.data import Mapped, Numbers, Repeated, Stream
from tests.support.collectives import FakeCollectives
from tests.support.interruptions import Interruption
from tests.support.platforms import linux_processes
from tests.support.processes import in_fork
from tests.support.scenes import Footprint, left_since
from tests.support.scripted import Script, compose, values
from tests.support.waiting import wait_for_end
from torchdistinput import iterator as iterator_module
from torchdistinput import readers
from torchdistinput.pipeline.end_errors import left_to_parent
from torchdistinput.tracing import waits

BOUND_SECONDS = 30.0


SLOW = Numbers(100_000, each=lambda _: time.sleep(0.002))


def _of(loader: Any, prefetch: int | None) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(loader, tdi.InputOptions(prefetch=prefetch))


def _of_function(prefetch: int | None) -> Any:
    options = tdi.InputOptions(prefetch=prefetch)
    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: DataLoader(SLOW, 2), options)


SOURCES: dict[str, Callable[[int | None], Any]] = {
    "map-style, workers": lambda prefetch: _of(DataLoader(SLOW, 2, num_workers=1), prefetch),
    "iterable": lambda prefetch: _of(DataLoader(Stream(lambda: map(SLOW.__getitem__, range(100_000))), 2), prefetch),
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
        assert _threads()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "join", _interrupted)
            with pytest.raises(KeyboardInterrupt):  # the thread may have ended since
                iterator.close()
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
    wait_for_end(_threads)

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


def ready(steps: int, rows: int, **options: Any) -> tdi.DistributedIterator:
    batches = [(torch.zeros(rows, 4), torch.zeros(rows))] * steps
    strategy = tdi.Strategy(devices=["cpu"])
    return iter(strategy.distribute_dataset(lambda: iter(batches), tdi.InputOptions(prefetch=0, **options)))


def calls_of(work: Callable[[], Any]) -> list[str]:
    """The Python functions of ours that it calls."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "torchdistinput" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def steady_calls(iterator: Iterator[Any], warm: int) -> list[str]:
    """The calls of one step, and of no garbage collection: that of another test's iterator ends its epoch."""
    for _ in range(warm):
        next(iterator)
    gc.collect()
    gc.disable()
    try:
        return calls_of(lambda: next(iterator))
    finally:
        gc.enable()


def test_the_work_of_a_step_does_not_grow_with_the_batch_the_epoch_or_the_steps_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waits, "_LEAST", 3600.0)  # no wait of a busy machine is looked into
    first = steady_calls(ready(50, 8), 19)
    assert steady_calls(ready(5000, 8), 19) == first
    assert steady_calls(ready(5000, 4096), 19) == first
    assert steady_calls(ready(5000, 8), 3019) == first
    measured = steady_calls(ready(50, 8, log_every=1000), 19)
    assert len(measured) <= len(first) + 30
    assert steady_calls(ready(5000, 4096, log_every=1000), 419) == measured


def interrupted_once() -> Numbers:
    """Its fourth sample is read when somebody presses Ctrl-C, the first time."""

    def press() -> None:
        del data.at[3]
        raise KeyboardInterrupt

    data = Numbers(6, {3: press})
    return data


@pytest.mark.parametrize("prefetch", [0, None])
def test_after_an_interruption_an_iterator_refuses_to_go_on_and_a_new_one_misses_nothing(prefetch: int | None) -> None:
    dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
        DataLoader(interrupted_once(), batch_size=1), tdi.InputOptions(prefetch=prefetch)
    )
    iterator = iter(dataset)
    assert [next(iterator).item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(tdi.InputError, match=r"interrupted while it read, after step 3"):
        next(iterator)
    assert [next(iterator, "ended") for _ in range(2)] == ["ended"] * 2  # of the iteration, but not of the epoch:
    assert dataset.step.index == 2
    state = dataset.state_dict()
    assert (state["step"], state["samples"]) == (3, 3)
    dataset.load_state_dict(state)
    assert [element.item() for element in dataset] == [3, 4, 5]


def test_the_order_of_an_epoch_is_let_go_of_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[weakref.ref[Any]] = []

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        memory = randperm(*args, **kwargs).numpy().copy()
        orders.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", noted)
    dataset = tdi.Strategy(devices=["cpu"]).distribute_dataset(
        DataLoader(TensorDataset(torch.arange(40)), 8, shuffle=True)
    )
    iterator = iter(dataset)
    assert len(list(iterator)) == 5
    gc.collect()
    assert orders
    assert [order() for order in orders] == [None] * len(orders)
    assert dataset.state_dict()["step"] == 0  # of the next epoch


STEPS, SIZE = 5, 2


def rows(first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + STEPS * SIZE))


def divided(data: Any, prefetch: int, **settings: Any) -> Any:
    options = tdi.InputOptions(prefetch=prefetch)
    return tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, SIZE, **settings), options)


def of_function(prefetch: int, **settings: Any) -> Any:
    options = tdi.InputOptions(prefetch=prefetch)
    loader: Any = DataLoader(Repeated(STEPS * SIZE), SIZE, **settings)
    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: loader, options)


def drop_in(prefetch: int, **settings: Any) -> Any:
    return tdi.DataLoader(Mapped(STEPS * SIZE, int), SIZE, options=tdi.InputOptions(prefetch=prefetch), **settings)


def ready_batches(prefetch: int) -> Any:
    batches = [torch.arange(first, first + SIZE) for first in range(0, STEPS * SIZE, SIZE)]
    return tdi.Strategy(["cpu"]).distribute_dataset(batches, tdi.InputOptions(prefetch=prefetch))


def files(folder: Path, prefetch: int) -> Any:
    for number in range(2):
        (folder / f"{number}.txt").write_text("".join(f"{STEPS * number + line}\n" for line in range(STEPS)))
    return divided(tdi.FileDataset(f"{folder}/*.txt", readers.text_lines, map_fn=int), prefetch)


PARTS: Subset[Any] = Subset(ConcatDataset([rows(), rows(STEPS * SIZE)]), [*range(0, 4 * STEPS, 2)])
KINDS: dict[str, Callable[..., Any]] = {
    "tensors": lambda _, prefetch: divided(rows(), prefetch),
    "parts of tensors": lambda _, prefetch: divided(PARTS, prefetch),
    "samples": lambda _, prefetch: divided(Mapped(STEPS * SIZE, int), prefetch),
    "ready": lambda _, prefetch: ready_batches(prefetch),
    "iterable": lambda _, prefetch: divided(Repeated(STEPS * SIZE), prefetch),
    "function": lambda _, prefetch: of_function(prefetch),
    "files": files,
    "drop-in": lambda _, prefetch: drop_in(prefetch),
    "mixture": lambda _, prefetch: divided(
        tdi.Mixture({"a": range(9), "b": range(100, 109)}, {"a": 1.0, "b": 2.0}, num_samples=STEPS * SIZE), prefetch
    ),
}
WITH_WORKERS: dict[str, Callable[..., Any]] = {
    "samples, a worker": lambda _, prefetch: divided(Mapped(STEPS * SIZE, int), prefetch, num_workers=1),
    "function, a worker": lambda _, prefetch: of_function(prefetch, num_workers=1, persistent_workers=True),
    "drop-in, a worker": lambda _, prefetch: drop_in(prefetch, num_workers=1, persistent_workers=True),
}


def plain(batch: Any) -> list[int]:
    return [int(each) for each in (batch[0] if isinstance(batch, list) else batch)]


def begin(data: Any, _: Any, found: list[Any]) -> None:
    iterator = iter(data)
    found.append(iterator)
    found.append(plain(next(iterator)))


def go_on(_: Any, iterator: Any, found: list[Any]) -> None:
    found.append(plain(next(iterator)))


CALLS: dict[str, tuple[int, Callable[[Any, Any, list[Any]], object]]] = {
    "iter": (0, begin),
    "next": (1, go_on),
    "close of the iterator": (2, lambda _, iterator, __: iterator.close()),
    "close": (2, lambda data, _, __: data.close()),
    "state_dict": (2, lambda data, _, __: data.state_dict()),
}
"""The steps in front, and the call."""


class Alarm(Exception):
    """What a handler of signals raises."""


def press(
    line: int, call: Callable[[], object], kind: type[BaseException]
) -> tuple[Interruption, list[type[BaseException]]]:
    """Interrupts a call, and what was raised; what is raised while an object is freed Python only prints."""
    interruption, heard = Interruption(line, raises=kind), list[Any]()

    def noted() -> None:
        try:
            call()
        except (KeyboardInterrupt, Exception) as error:
            heard.append(kind if isinstance(error.__cause__, kind) else type(error))

    def pressed() -> None:
        hook, sys.unraisablehook = sys.unraisablehook, lambda unheard: heard.append(unheard.exc_type)
        try:
            interruption.press_in(noted)
        finally:
            sys.unraisablehook = hook

    contextvars.copy_context().run(pressed)  # between the end of a ``with`` and its exit, Python forgets what it set
    return interruption, heard


def check(
    make: Callable[[], Any], call: str, line: int, whole: list[list[int]], kind: type[BaseException] = KeyboardInterrupt
) -> int:
    """One interruption, and how many lines were run; none at line 0."""
    before = Footprint.now()
    data = make()
    steps, ask = CALLS[call]
    iterator: Any = iter(data) if steps else None
    found: list[Any] = [plain(next(iterator)) for _ in range(steps)] if iterator is not None else []
    interruption, heard = press(line, partial(ask, data, iterator, found), kind)
    at = f"{call} at {interruption.at}"
    while kind is Alarm and interruption.at and not heard:  # in a step that was drawn ahead: it comes with this step
        try:
            found.append(plain(next(iterator)))
        except Exception as error:
            heard.append(kind if isinstance(error.__cause__, kind) else type(error))
    assert heard.count(kind) == (interruption.at is not None), at
    delivered = [each for each in found if isinstance(each, list)]
    assert delivered == whole[: len(delivered)], at
    state = data.state_dict()
    data.close()
    data.close()
    again = make()
    again.load_state_dict(state)
    rest = [plain(batch) for batch in again]
    assert rest in (whole[len(delivered) :], whole[len(delivered) + 1 :]), at  # a step may be taken, and not yet told
    assert state["step"] + len(rest) == len(whole), at
    again.close()
    del data, iterator, again, found
    gc.collect()
    assert left_since(before, frozenset()) == [], at
    return interruption.lines


def check_lines(
    make: Callable[[], Any], call: str, most: int | None, draw: random.Random, kinds: Sequence[type[BaseException]]
) -> None:
    with make() as data:
        whole = [plain(batch) for batch in data]
    assert len(whole) == STEPS
    lines = range(1, 1 + check(make, call, 0, whole))
    assert lines
    for line in lines if most is None else draw.sample(lines, min(most, len(lines))):
        for kind in kinds:
            check(make, call, line, whole, kind)


def interrupted_at(exits: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The ``__exit__`` of a mode of torch, in which Ctrl-C is pressed once."""
    times = iter(range(1, sys.maxsize))

    def leave(mode: Any, *args: Any) -> None:
        exits(mode, *args)
        if getattr(mode, "name", "torchdistinput::wait") == "torchdistinput::wait" and next(times) == at:
            raise KeyboardInterrupt

    return leave


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("profiled", [False, True])
def test_an_interruption_as_a_mode_of_torch_ends_loses_no_step(
    at: int, profiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop in inference mode trains on what is read ahead, and a profiler has a range for each ``next``."""
    mode: Any = torch.autograd.profiler.record_function if profiled else torch.no_grad
    seen: list[list[int]] = []
    interrupted = 0
    data = DataLoader(Numbers(10), 2, num_workers=1)
    with tdi.Strategy().distribute_dataset(data, tdi.InputOptions(prefetch=2)) as loader:
        iterator = iter(loader)
        outer: Any = torch.profiler.profile() if profiled else torch.inference_mode()
        with outer:
            monkeypatch.setattr(mode, "__exit__", interrupted_at(mode.__exit__, at))
            while len(seen) < 5:
                try:
                    seen.append(next(iterator).tolist())
                except KeyboardInterrupt:
                    interrupted += 1
            monkeypatch.undo()
    assert (seen, interrupted) == ([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], 1)


@linux_processes
def test_an_interruption_finds_a_step_counted_whole_or_not_at_all(tmp_path: Path) -> None:
    """At each line of the iterator's module, where a step is counted."""
    for line in range(1, 200):
        with files(tmp_path, 0) as data:
            delivered: list[Any] = []
            begin(data, None, delivered)
            loop = delivered.pop(0)
            was_interrupted = Interruption(line, iterator_module).press_in(partial(go_on, data, loop, delivered))
            state, counted = data.state_dict(), data.step
        with files(tmp_path, 0) as again:
            again.load_state_dict(state)
            rest = [plain(batch) for batch in again]
        assert (state["step"], state["samples"]) == (STEPS - len(rest), SIZE * (STEPS - len(rest)))
        assert counted.index == state["step"] - 1
        assert len(delivered) <= state["step"]
        if not was_interrupted:
            break
    assert line > 10


@linux_processes
@pytest.mark.filterwarnings("ignore:.*read again", "ignore:unclosed file")  # of a file that nobody has yet
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [*KINDS, *WITH_WORKERS])
def test_an_interruption_at_any_line_loses_nothing_and_leaves_nothing(
    kind: str, call: str, tmp_path: Path, all_cells: bool
) -> None:
    """At each line with ``--all-cells``, else at some."""
    draw = random.Random(f"{kind} {call}")
    make = {**KINDS, **WITH_WORKERS}[kind]
    for prefetch in (0, 2) if all_cells else (draw.choice((0, 2)),):
        most = None if all_cells else 2 if kind in WITH_WORKERS else 10
        handled = kind in ("tensors", "parts of tensors", "samples") and call == "next"
        kinds = [KeyboardInterrupt, Alarm] if handled else [KeyboardInterrupt]
        check_lines(partial(make, tmp_path, prefetch), call, most, draw, kinds)
