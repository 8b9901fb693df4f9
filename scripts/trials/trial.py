"""One trial: a program on real ranks, an event, and what was found afterwards.

A trial is led by a process of its own, from which the ranks are forked, so torch is imported once for all trials. It
adopts what its descendants leave behind, and so finds every process of the trial, also loader workers whose rank died.

A forked rank must come to its end as any script does. So ``conduct`` returns in each process that it forks, with what
this process is to do; whoever called calls that next, with no frame of the trial left.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import select
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.oracle.data import write_files
from torchdistinput.testing.ranks import free_port
from trials import playing, processes
from trials.events import ACTIONS, FREEZE_SECONDS, Event
from trials.expected import Steps, expected_steps
from trials.playing import Tell, teller
from trials.programs import Program, inside

__all__ = ["Found", "RankEnd", "Task", "Trial", "conduct", "found_in"]

Task = Callable[[], Any]

AFTER_TIMEOUT_SECONDS: Final = 5.0
START_SECONDS: Final = 10.0
_TICK_SECONDS: Final = 0.05
_STACKS_SECONDS: Final = 1.0
_FOUND = "found.pickle"


@dataclass(frozen=True)
class Trial:
    """What is tried.

    Args:
      number: of the trial.
      program: what the ranks run.
      event: what happens to it, if anything does.
      slack_seconds: what all may take longer on a loaded machine.
    """

    number: int
    program: Program
    event: Event | None
    slack_seconds: float

    @property
    def bound_seconds(self) -> float:
        """How long a survivor may live after the event."""
        return self.program.timeout_seconds + AFTER_TIMEOUT_SECONDS + self.slack_seconds


@dataclass
class RankEnd:
    """What is known of a rank.

    Args:
      code: its exit code; ``None`` if it had to be killed at the end of the trial.
      at: when it ended.
      raised: the kind and the text of the error that ended it.
      end_at: when it had done all that it had to do, but for its exit.
      steps: of each iterator, by its number, what was delivered: the samples of each input in it.
      words: the last that it printed, or where it stood when it had to be killed.
      is_ignored: whether Python said that it ignores a ``KeyboardInterrupt``, which came while it dropped an object.
    """

    code: int | None = None
    at: float = 0.0
    raised: tuple[str, str] | None = None
    end_at: float | None = None
    steps: dict[int, list[list[list[int]]]] = field(default_factory=dict)
    words: str = ""
    is_ignored: bool = False

    @property
    def num_steps(self) -> int:
        """Steps that it delivered."""
        return sum(map(len, self.steps.values()))


@dataclass
class Found:
    """What a trial found.

    Args:
      ranks: how they ended.
      expected: of each iterator, the right steps of each rank.
      event_at: when the event happened, or was over; ``None`` if it did not come.
      hit: whom it hit.
      left: what was left behind.
    """

    ranks: list[RankEnd]
    expected: list[list[Steps]] = field(default_factory=list)
    event_at: float | None = None
    hit: str = ""
    left: list[str] = field(default_factory=list)


def conduct(trial: Trial, folder: Path) -> Task:
    """Leads a trial in this process, which was forked for it, and ends it. Returns in each process of the trial.

    Args:
      trial: the trial.
      folder: an empty one; what was found is left there.

    Returns:
      What this process is to do.
    """
    os.setsid()
    processes.die_with_parent()
    processes.adopt_orphans()
    (folder / "temporary").mkdir()
    for number, source in enumerate(trial.program.inputs):
        inside(folder, number).mkdir()
        if source.has_files:
            write_files(source, inside(folder, number))
    watch = _Watch(trial, folder)
    program = trial.program
    port = free_port()
    while program.own_store and not watch.store_is_up:
        port = free_port()
        task = watch.fork("store", partial(playing.be_store, port))
        if task is not None:
            return task
        watch.listen(None)
    roles = [(f"rank {rank}", partial(playing.be_rank, program, rank, port, folder)) for rank in range(program.world)]
    for name, role in [*roles, ("model", partial(_be_model, program, folder))]:
        task = watch.fork(name, role)
        if task is not None:
            return task
    (folder / _FOUND).write_bytes(pickle.dumps(watch.look_on()))
    os._exit(0)  # what an interpreter does at its end costs more than all that was done here


def found_in(folder: Path) -> Found | None:
    """What the trial found, or ``None`` if it broke off itself."""
    place = folder / _FOUND
    found = pickle.loads(place.read_bytes()) if place.exists() else None
    return found if isinstance(found, Found) else None


def _be_model(program: Program, folder: Path, tell: Tell) -> None:
    """Computes the right steps."""
    for steps in expected_steps(program, folder):
        tell("expected", steps)
    os._exit(0)


class _Watch:
    """The processes of a trial, as its leader sees them."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self._trial, self._folder = trial, folder
        self._found = Found([RankEnd() for _ in range(trial.program.world)])
        self._pids: dict[str, int] = {}
        self._names: dict[int, str] = {}  # of the pipes
        self._halves: dict[int, bytes] = {}
        self._running: set[str] = set()
        self._forked: dict[int, list[int]] = {rank: [] for rank in range(trial.program.world)}
        self._all_pids: set[int] = set()
        self._sockets: set[str] = set()
        self._told: Counter[tuple[str, str]] = Counter()
        self._last_told = time.monotonic()
        self._due: float | None = None
        self._thaw: tuple[float, int] | None = None
        self._frozen = ""
        self._is_over = False  # whoever ends now was killed by us

    # -------------------------------------------------------------------------------------------- its processes

    @property
    def store_is_up(self) -> bool:
        """Whether the process that hosts the store has said so."""
        return self._told["store", "store"] > 0

    def fork(self, name: str, role: Callable[[Tell], None]) -> Task | None:
        """Starts a process. Returns its task in it, and ``None`` here."""
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.close(reader)
            processes.die_with_parent()
            return partial(role, teller(writer))
        os.close(writer)
        self._pids[name] = pid
        self._names[reader] = name
        self._running.add(name)
        self._all_pids.add(pid)
        return None

    def listen(self, seconds: float | None) -> None:
        """Waits for what is told, so long at most."""
        ready, _, _ = select.select(list(self._names), [], [], seconds)
        for pipe in ready:
            data = os.read(pipe, 1 << 16)
            if not data:
                os.close(pipe)
                del self._names[pipe]
                continue
            *lines, self._halves[pipe] = (self._halves.get(pipe, b"") + data).split(b"\n")
            for line in lines:
                self._hear(self._names[pipe], *json.loads(line))

    def _hear(self, name: str, at: float, pid: int, what: str, *facts: Any) -> None:
        self._told[name, what] += 1
        if what == "expected":
            self._found.expected.append(facts[0])
            return
        if not name.startswith("rank"):
            return
        rank = int(name.split()[1])
        end = self._found.ranks[rank]
        if what == "fork":
            self._forked[rank].append(pid)
            self._all_pids.add(pid)
            return
        self._last_told = time.monotonic()
        if what == "step":
            end.steps.setdefault(facts[0], []).append(facts[1])
        elif what == "raised":
            end.raised = (facts[0], facts[1])
        elif what == "end":
            end.end_at = at

    def _reap(self) -> None:
        """Takes the exit codes of processes that ended, also of orphans."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                for name in [name for name in self._running if self._pids[name] == pid]:
                    self._running.discard(name)
                    if name.startswith("rank") and not self._is_over:
                        end = self._found.ranks[int(name.split()[1])]
                        end.code, end.at = os.waitstatus_to_exitcode(status), time.monotonic()

    # ------------------------------------------------------------------------------------------------ the event

    def _act(self) -> None:
        """Lets the event happen when its time has come, and ends a short freeze."""
        now = time.monotonic()
        if self._thaw is not None and now >= self._thaw[0]:
            with suppress(ProcessLookupError):
                os.kill(self._thaw[1], signal.SIGCONT)
            self._thaw, self._found.event_at = None, now
        event = self._trial.event
        if event is None or self._found.event_at is not None or self._thaw is not None:
            return
        if self._due is None and self._is_reached(event):
            self._due = now + event.delay
        if self._due is not None and now >= self._due:
            self._happen(event, now)

    def _is_reached(self, event: Event) -> bool:
        program = self._trial.program
        met = all(self._told[f"rank {rank}", "group"] for rank in range(program.world)) or not program.own_group
        return met and self._told[f"rank {event.rank}", event.after] >= event.count

    def _happen(self, event: Event, now: float) -> None:
        self._sample_sockets()
        hit = []
        for name, pid in self._targets(event):
            try:
                os.kill(pid, ACTIONS[event.action])
            except ProcessLookupError:  # it has just ended
                continue
            hit.append(name)
            if event.action == "freeze for 3 s":
                self._thaw = (now + FREEZE_SECONDS, pid)
            elif event.action == "freeze":
                self._frozen = name
        self._found.hit = ", ".join(hit)
        if hit and self._thaw is None:
            self._found.event_at = now

    def _targets(self, event: Event) -> Iterator[tuple[str, int]]:
        """Names and processes of those whom it hits, as far as they live."""
        if event.target == "loader worker":
            owner = self._pids[f"rank {event.rank}"]
            forked = [pid for pid in self._forked[event.rank] if processes.parent_of(pid) == owner]
            alive = [pid for pid in forked if processes.state_of(pid) != "Z"]
            if alive and f"rank {event.rank}" in self._running:
                yield f"a loader worker of rank {event.rank}", alive[event.count % len(alive)]
            return
        names = {"rank": [f"rank {event.rank}"], "store": ["store"]}
        for name in names.get(event.target, [f"rank {rank}" for rank in range(self._trial.program.world)]):
            if name in self._running:
                yield name, self._pids[name]

    # -------------------------------------------------------------------------------------------------- its end

    def look_on(self) -> Found:
        """Until all ranks have ended, or their time is over; then what is left of them."""
        while self._waits_for():
            self.listen(min(_TICK_SECONDS, max(0.0, (self._due or 0.0) - time.monotonic()) or _TICK_SECONDS))
            self._reap()
            self._act()
            if time.monotonic() > self._deadline():
                self._is_over = True
                self._end_those_that_hang()
                break
        self._is_over = True
        for rank, end in enumerate(self._found.ranks):
            end.words = end.words or self._last_words(rank)
            end.is_ignored = re.search(r"(?s)Exception ignored.*KeyboardInterrupt", self._log(rank)) is not None
        self._sample_sockets()
        for name in [name for name in self._running if name in {self._frozen, "store"}]:
            os.kill(self._pids[name], signal.SIGKILL)
        self._await_the_last()
        while self._names:  # what was told before the pipes were closed
            before = len(self._names)
            self.listen(0)
            if len(self._names) == before and not select.select(list(self._names), [], [], 0)[0]:
                break
        return self._found

    def _waits_for(self) -> set[str]:
        return self._running - {"store", self._frozen}

    def _deadline(self) -> float:
        if self._thaw is not None:
            return self._thaw[0] + 1.0
        happened = self._found.event_at
        more = START_SECONDS if happened is None else 0.0
        return max(happened or 0.0, self._last_told) + self._trial.bound_seconds + more

    def _end_those_that_hang(self) -> None:
        for name in sorted(self._waits_for()):
            if name.startswith("rank"):
                rank = int(name.split()[1])
                self._found.ranks[rank].words = self._where(rank, self._pids[name])
            os.kill(self._pids[name], signal.SIGKILL)

    def _where(self, rank: int, pid: int) -> str:
        """Where a process stands that is a rank, or was forked by it."""
        before = len(self._log(rank))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)
        return _innermost(self._log(rank)[before:])

    def _await_the_last(self) -> None:
        """Waits until no process is left, within the same bound; then looks what else is."""
        began = time.monotonic()
        while (left := self._left()) and time.monotonic() < began + self._trial.bound_seconds:
            self.listen(_TICK_SECONDS)
        sockets = processes.open_sockets(self._sockets)  # before those who have them are killed
        for pid in left:
            self._found.left.append(f"process {pid} {self._told_of(pid)}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._found.left += [f"/dev/shm/{name}" for name in processes.shared_memory(self._all_pids)]
        self._found.left += [f"socket {each}" for each in sockets]
        temporary = self._folder / "temporary"
        # A process that is killed cannot remove the socket of its fork server, Python's default from 3.14 on.
        files = [each.relative_to(temporary) for each in temporary.rglob("*")]
        self._found.left += [f"temporary file {each}" for each in files if not each.parts[0].startswith("pymp-")]

    def _left(self) -> list[int]:
        self._reap()
        return processes.descendants(os.getpid())

    def _told_of(self, pid: int) -> str:
        owners = [rank for rank, pids in self._forked.items() if pid in pids]
        state = processes.state_of(pid)
        if owners:
            return f"(forked by rank {owners[0]}, state {state}: {self._where(owners[0], pid)})"
        known = [name for name, each in self._pids.items() if each == pid]
        return f"({''.join(known) or 'forked by nobody known'}, state {state})"

    def _sample_sockets(self) -> None:
        self._sockets |= processes.sockets_of(processes.descendants(os.getpid()))

    # ------------------------------------------------------------------------------------------------- its words

    def _log(self, rank: int) -> str:
        place = self._folder / f"rank-{rank}.txt"
        return place.read_text(errors="replace") if place.exists() else ""

    def _last_words(self, rank: int) -> str:
        """What an aborted rank left: the first line that tells of it."""
        lines = [line for line in self._log(rank).splitlines() if line.strip()]
        told = [line for line in lines if re.search(r"terminate called|what\(\):|Fatal Python error", line)]
        return " | ".join(told[:3] or lines[-1:])[:500]


def _innermost(stacks: str) -> str:
    """The innermost frames of the main thread, which faulthandler prints last."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', re.split(r"(?m)^(?:Current t|T)hread ", stacks)[-1])
    told = " < ".join(f"{Path(file).name}:{line} {function}" for file, line, function in frames[:7])
    return told or "no frame of Python: the interpreter is ending"


def clear(folder: Path, keep: Path | None) -> None:
    """Removes the folder of a trial, or moves it to where it is kept, in place of what an earlier run left there."""
    shutil.rmtree(folder if keep is None else keep, ignore_errors=True)
    if keep is not None:
        shutil.move(str(folder), str(keep))
