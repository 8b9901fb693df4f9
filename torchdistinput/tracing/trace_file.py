"""The trace file of this rank, in the form of ``events``, written by a thread of its own.

The training thread appends tuples to a queue of bounded length. The thread makes lines of them and writes these in one
call every fraction of a second. A file that cannot be written is warned of once; training goes on. The thread ends, and
the rest is written, when the owner of the file is dropped or Python exits. A fork leaves the file to its parent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, Final, final

from torchdistinput.coordination.fork_safety import register_for_forks
from torchdistinput.plan.options import InputOptions
from torchdistinput.tracing.events import FIRST_PID, FORM, head, line_of, track_names, track_of

_LOG = logging.getLogger("torchdistinput")

ENVIRONMENT: Final = "TORCHDISTINPUT_TRACE"
"""The environment variable that names a folder, where ``InputOptions.trace`` does not."""
_SECONDS: Final = 0.2
_MOST_EVENTS: Final = 1 << 16
"""Events that wait to be written; a disk that stands still for longer loses the oldest of them."""
_JOIN_SECONDS: Final = 5.0


@final
class LineMaker:
    """Makes the lines of one file. One thread at a time.

    Args:
      rank: this rank, as users know it.
      base: when the file's clock began, by ``perf_counter``.
    """

    def __init__(self, rank: int, base: float) -> None:
        self._rank, self._base = rank, base
        self._datasets: dict[str, int] = {}
        self._named: set[int] = set()

    def clock(self, seconds: float) -> float:
        """A reading of ``perf_counter`` in microseconds since the start of the file's clock, to the nanosecond."""
        return round((seconds - self._base) * 1e9) / 1000

    def slice(self, dataset: str, stage: str, began: float, ended: float, name: str, args: Mapping[str, Any]) -> str:
        """The line of a slice; before the first one of a track, those that name it."""
        number = self._datasets.setdefault(dataset, len(self._datasets))
        worker = args.get("worker")
        track, start = track_of(number, stage, worker), self.clock(began)
        lines = ""
        if track not in self._named:
            self._named.add(track)
            title = f"{stage}{'' if worker is None else f', loader worker {worker}'}"
            title += f", dataset {dataset}" if number else ""
            lines = "".join(line_of(each) for each in track_names(self._rank, track, title))
        duration = round(self.clock(ended) - start, 3)
        event = {"ph": "X", "cat": stage, "name": name, "pid": FIRST_PID + self._rank, "tid": track}
        return lines + line_of({**event, "ts": start, "dur": duration, "args": args})

    def instant(self, name: str, at: float, args: Mapping[str, Any]) -> str:
        """The line of an instant."""
        event = {"ph": "i", "s": "p", "cat": name, "name": name, "pid": FIRST_PID + self._rank, "tid": 0}
        return line_of({**event, "ts": self.clock(at), "args": args})


QueuedLines = tuple[Callable[[LineMaker, Any], Iterable[str]], Any]
"""A function that makes lines, and what it makes them of."""


def with_folder_of_environment(options: InputOptions) -> InputOptions:
    """The options, with the folder that the environment names if they name none. Local."""
    folder = os.environ.get(ENVIRONMENT)
    return replace(options, trace=folder) if folder and options.trace is None else options


@final
class _Lines:
    """The queue, and where it is written. The thread refers to it, and not to its owner, whose end ends the thread.

    A later owner goes on in the same file, with the same clock.

    Args:
      path: the file.
      rank: this rank, as users know it.
      facts: of the file, without the start of its clock.
    """

    def __init__(self, path: Path, rank: int, facts: Mapping[str, Any]) -> None:
        self.events: deque[QueuedLines] = deque(maxlen=_MOST_EVENTS)
        self.ends = threading.Event()
        self.iterators = count()
        self._path = path
        self._maker = LineMaker(rank, perf_counter())
        facts = {"form": FORM, "rank": rank, "pid": os.getpid(), "base_ns": time.time_ns(), **facts}
        first = head(rank, facts["host"], facts["pid"], facts)
        self._head = "[\n" + "".join(map(line_of, first))  # until it is written
        self._file: int | None = None
        self._failed = False
        self._writes = threading.Lock()

    def begin(self) -> bool:
        """Opens the file, and writes its first line if it is new. Returns whether it can be written."""
        if self._failed:
            return False
        self.ends.clear()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._fail(error)
            return False
        text, self._head = self._head, ""
        self._write(text)
        return not self._failed

    def run(self) -> None:
        """Writes until the end; on the thread."""
        while not self.ends.wait(_SECONDS):
            self.write()

    def write(self) -> None:
        """Writes what waits. Any thread."""
        with self._writes:
            self._write_waiting()

    def _write_waiting(self) -> None:
        lines: list[str] = []
        try:
            while True:
                make, event = self.events.popleft()
                lines += make(self._maker, event)
                time.sleep(0)  # lets the training thread run: it would wait for the interpreter lock for milliseconds
        except IndexError:
            pass
        if lines and not self._failed:
            self._write("".join(lines))

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode(errors="surrogatepass"))
        try:
            while rest and self._file is not None:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed = True
        self.close_file()
        _LOG.warning(
            "the trace of this rank ends here, as %s cannot be written (%s); training goes on", self._path, error
        )

    def close_file(self) -> None:
        """Closes the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


@final
class TraceFile:
    """The trace file of one rank, open. See ``TracedRun.file``."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self.append: Callable[[QueuedLines], object] = lines.events.append
        """Queues an event. Any thread."""
        self._thread = threading.Thread(target=self._lines.run, name="torchdistinput-trace", daemon=True)
        if self._lines.begin():
            self._thread.start()
        else:
            self.append = _ignore
        self._finalizer = weakref.finalize(self, _end, self._lines, self._thread)
        register_for_forks(self)

    def next_iterator(self) -> int:
        """The number of an iterator among those of the program, which all ranks begin in the same order."""
        return next(self._lines.iterators)

    def flush(self) -> None:
        """Writes what waits."""
        if self._finalizer.alive:
            self._lines.write()

    def close(self) -> None:
        """Writes the rest, and closes the file. Idempotent."""
        self._finalizer()

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: the parent has the thread, and writes what waits."""
        self._finalizer.detach()
        self.append = _ignore
        self._lines.close_file()


@final
class TracedRun:
    """What the trace files of a program have in common: all strategies of a default group write into the same ones."""

    def __init__(self) -> None:
        self.name = ""
        """The same on all ranks; the dataset that is distributed first gives it."""
        self._lines: dict[Path, _Lines] = {}
        self._open: weakref.WeakValueDictionary[Path, TraceFile] = weakref.WeakValueDictionary()

    def file(self, folder: str, rank: int, facts: Mapping[str, Any]) -> TraceFile:
        """The file of a rank in a folder, which stays open while somebody has it. Local.

        Args:
          folder: where it lies; made if it is missing.
          rank: this rank, as users know it.
          facts: more facts for the first line.
        """
        path = Path(folder) / f"rank-{rank:05}-{self.name}.json"
        found = self._open.get(path)
        if found is None:
            if path not in self._lines:
                self._lines[path] = _Lines(path, rank, {"run": self.name, **facts})
            found = self._open[path] = TraceFile(self._lines[path])
        return found


@final
class _PresentRun:
    """The run of this process and its present default group; that of an earlier group has ended."""

    def __init__(self) -> None:
        self._place: tuple[int, Any] | None = None
        self._run = TracedRun()

    def get(self, group: Any) -> TracedRun:
        place = os.getpid(), None if group is None else weakref.ref(group)  # a fork is a program of its own
        if place != self._place:
            self._place, self._run = place, TracedRun()
        return self._run


_PRESENT: Final = _PresentRun()


def run_of(group: Any) -> TracedRun:
    """The run of this process and its default group, which may be ``None``. Local."""
    return _PRESENT.get(group)


def _end(lines: _Lines, thread: threading.Thread) -> None:
    lines.ends.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
    lines.write()
    lines.close_file()


def _ignore(queued: QueuedLines) -> None:
    pass
