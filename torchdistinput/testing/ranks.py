"""Real ranks in a test: ``run_ranks(2, fn)`` calls ``fn`` in two fresh processes that share a gloo group.

Problem: a test of ranks must start fast, must never hang, and must say which rank failed and where.

Decision
  - The processes come from a fork server that has imported torch once: fresh memory for each rank, a start in a
    fraction of a second, and no fork of a process in which torch has started threads.
  - The ranks meet through a file in a temporary folder: no ports, hence no clash between tests.
  - A rank reports through a pipe of its own, with plain pickle: torch's way of sending tensors between processes keeps
    file descriptors of a sender that is about to end.
  - The earliest failure is reported: the others often fail a moment later only because their peer has gone. A rank that
    died without a report comes before one that could still report.
  - Each rank leads a process group of its own, so that killing it takes its DataLoader workers along, and Ctrl-C in a
    terminal reaches only the parent, which then kills them all.

Considered and refused: ``torch.multiprocessing.spawn`` (it imports torch again in each rank, which takes seconds each
time); ranks that stay alive between tests (their state leaks from test to test, and one crash ends all); threads (torch
has no public way to a process group for each thread, and a waiting thread cannot be killed).
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

__all__ = ["RankFailed", "run_ranks"]

T = TypeVar("T")

_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "torch._dynamo",  # which the constructor of an optimizer imports
    "numpy",
    "fsspec",
    "torchdistinput",
]
_AFTERMATH_SECONDS = 0.1  # after a failure, how long the report of an earlier failure may still be on its way
_STACKS_SECONDS = 2.0  # how long a hanging rank gets to write its stacks
_EXIT_SECONDS = 10.0  # how long a killed process may take to end
_ORPHAN_SECONDS = 60.0  # how long a rank outlives its timeout if its parent was killed


@final
class RankFailed(RuntimeError):
    """Raised by ``run_ranks`` when a rank raised, died or did not end in time.

    Args:
      message: the failure, with the rank's own traceback or the stacks of the hanging ranks.
      ranks: the rank that failed first, or all the ranks that had not finished in time.
    """

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks

    @property
    def rank(self) -> int:
        """The first of the failing ranks."""
        return self.ranks[0]


def run_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: object,
    timeout_seconds: float = 60.0,
    init_group: bool = True,
) -> list[T]:
    """Calls ``fn(*args)`` in ``world_size`` processes that form a gloo group, and returns the results by rank.

    Each rank has the environment of the caller with ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE``
    set as torchrun sets them, and one torch thread. ``fn`` finds its rank by ``torch.distributed.get_rank()``.

    Args:
      world_size: the number of ranks.
      fn: a function at the top level of a module that can be imported; it is sent by name.
      *args: values that can be pickled, the same for every rank.
      timeout_seconds: the bound on the whole run, and of each wait of the group.
      init_group: False leaves the process group to ``fn``; ``MASTER_ADDR`` and ``MASTER_PORT`` are then set,
        as by torchrun.

    Raises:
      RankFailed: with the first failing rank's traceback and the original exception as ``__cause__`` where it can be
        pickled, the signal that ended a rank, or the stacks of the ranks that had not finished in time. The other
        ranks are killed at once. A rank whose result cannot be pickled failed, too.
      TypeError: if ``fn`` or an argument cannot be pickled, or was written in a notebook.
    """
    call = _pickled_call(fn, args)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        ranks: list[_Rank] = []
        address = {} if init_group else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment = {**os.environ, **address}
        deadline = time.monotonic() + timeout_seconds
        try:
            for rank in range(world_size):
                job = _Job(rank, world_size, call, environment, folder, timeout_seconds, init_group)
                ranks.append(_start(job))
            _watch(ranks, deadline, timeout_seconds)
            return [pickle.loads(rank.report.result) for rank in ranks if rank.report is not None]
        finally:
            _kill(ranks)


def _pickled_call(fn: Callable[..., Any], args: tuple[object, ...]) -> bytes:
    try:
        call = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks cannot send {fn!r} with its arguments to other processes ({error}); "
            "give a function at the top level of a module, and arguments that can be pickled"
        ) from error
    if b"__main__" in call and getattr(sys.modules["__main__"], "__file__", None) is None:
        raise TypeError(
            f"run_ranks cannot send {fn!r} with its arguments to other processes: something of it was written in a "
            "notebook or an interactive session, from which they cannot import. Put it into a module (a .py file), and "
            "import it from there."
        )
    return call


def free_port() -> int:
    """Returns a port of this host on which nobody listens, and which the system gives to no outgoing connection."""
    while True:
        # Linux gives outgoing connections the ports from 32768 on, macOS from 49152 on.
        port = random.SystemRandom().randrange(10240, 32768)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


# ---------------------------------------------------------------------------------------------- the parent's side


@dataclass(frozen=True)
class _Job:
    """The arguments of a rank's process: plain values, sent once."""

    rank: int
    world_size: int
    call: bytes
    environment: Mapping[str, str]
    folder: str
    timeout_seconds: float
    init_group: bool

    @property
    def stacks_path(self) -> Path:
        return Path(self.folder) / f"stacks-{self.rank}.txt"


@dataclass(frozen=True)
class _Report:
    """The report of a rank: its result, or its failure (``text`` not empty)."""

    at: float  # time.monotonic(), one clock for all processes of a machine
    result: bytes = b""
    text: str = ""
    error: bytes = b""


@dataclass
class _Rank:
    """A started rank, as the parent sees it."""

    job: _Job
    process: BaseProcess
    pipe: Connection
    report: _Report | None = None

    @property
    def finished(self) -> bool:
        return self.report is not None and self.process.exitcode == 0

    @property
    def failed(self) -> bool:
        code = self.process.exitcode
        if self.report is None:
            return code is not None
        return bool(self.report.text) or code not in (None, 0)

    def listen(self) -> None:
        """Receives the report, if it has come."""
        if self.report is None and self.pipe.poll():
            # A pipe at its end without a report belongs to a rank that died; its exit code tells the rest.
            with suppress(EOFError, ConnectionResetError):
                self.report = pickle.loads(self.pipe.recv_bytes())

    def waits_on(self) -> list[Any]:
        pipe = [self.pipe] if self.report is None and not self.pipe.closed else []
        return [*pipe, self.process.sentinel]


def _start(job: _Job) -> _Rank:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(job, sending), name=f"rank {job.rank}")
    process.start()
    sending.close()
    return _Rank(job, process, receiving)


def _watch(ranks: Sequence[_Rank], deadline: float, timeout_seconds: float) -> None:
    while unfinished := [rank for rank in ranks if not rank.finished]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise _late(unfinished, timeout_seconds)
        wait([thing for rank in unfinished for thing in rank.waits_on()], timeout=remaining)
        for rank in unfinished:
            rank.listen()
        if any(rank.failed for rank in unfinished):
            time.sleep(_AFTERMATH_SECONDS)
            _raise_the_first_failure(unfinished)


def _raise_the_first_failure(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.listen()
        code = rank.process.exitcode
        if code is not None and rank.failed and not (rank.report and rank.report.text):
            raise _died(rank, code)
    failures = [(rank.report.at, rank.job.rank, rank.report) for rank in ranks if rank.report and rank.report.text]
    _, number, report = min(failures, key=lambda failure: failure[:2])
    raise RankFailed(f"rank {number} failed:\n{report.text}", (number,)) from _original(report)


def _original(report: _Report) -> BaseException | None:
    error = pickle.loads(report.error) if report.error else None
    return error if isinstance(error, BaseException) else None


def _died(rank: _Rank, code: int) -> RankFailed:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    when = "before it gave a result" if rank.report is None else "after it had given its result, while it was ending"
    stacks = _read(rank.job.stacks_path)
    return RankFailed(f"rank {rank.job.rank} {how} {when}\n{stacks}".rstrip(), (rank.job.rank,))


def _late(ranks: Sequence[_Rank], timeout_seconds: float) -> RankFailed:
    numbers = tuple(rank.job.rank for rank in ranks)
    silent = [rank for rank in ranks if rank.process.exitcode is None]
    for rank in silent:
        if rank.job.stacks_path.exists():  # the handler is in place, so the signal does not kill
            for pid in _group_of(_pid(rank)):
                _ask_for_stacks(pid, rank.job.stacks_path)
    stories = [f"rank {rank.job.rank}, {_state(rank)}:\n{_read(rank.job.stacks_path)}" for rank in ranks]
    found = f"rank(s) {', '.join(map(str, numbers))} had not finished after {timeout_seconds:g} s"
    return RankFailed("\n".join([found, *stories]), numbers)


def _group_of(leader: int) -> list[int]:
    """The rank, and the loader workers that it forked, which have its handler; the rank alone without /proc."""
    group = [leader]
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(ProcessLookupError):
            if pid != leader and os.getpgid(pid) == leader:
                group.append(pid)
    return group


def _ask_for_stacks(pid: int, path: Path) -> None:
    """Waits until the stacks are written: all processes of a rank write into the same file."""
    with path.open("a") as stacks:
        stacks.write(f"process {pid}:\n")
    before = last = path.stat().st_size
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < until:
        time.sleep(0.05)
        size = path.stat().st_size
        if size == last > before:
            return
        last = size


def _state(rank: _Rank) -> str:
    return "still at work" if rank.report is None else "done, but its process does not end"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _pid(rank: _Rank) -> int:
    pid = rank.process.pid
    if pid is None:
        raise RuntimeError(f"rank {rank.job.rank} has no process")
    return pid


def _kill(ranks: Sequence[_Rank]) -> None:
    """Kills every rank with the loader workers that it started: they are in the rank's process group."""
    for rank in ranks:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(_pid(rank), signal.SIGKILL)
        rank.process.kill()
    for rank in ranks:
        rank.process.join(_EXIT_SECONDS)
        rank.pipe.close()


# ---------------------------------------------------------------------------------------------- the rank's side


def _run(job: _Job, pipe: Connection) -> None:
    os.setpgid(0, 0)
    with job.stacks_path.open("a") as stacks:
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        # No process would kill a rank that outlives its parent.
        faulthandler.dump_traceback_later(job.timeout_seconds + _ORPHAN_SECONDS, exit=True)
        report = _report(job)
        pipe.send_bytes(pickle.dumps(report))
        pipe.close()
        if report.text:
            sys.exit(1)
        _end()


def _report(job: _Job) -> _Report:
    try:
        _prepare(job)
        fn, args = pickle.loads(job.call)
        result = fn(*args)
        return _Report(time.monotonic(), result=pickle.dumps(result))
    except BaseException as error:  # of any kind: the parent raises it
        return _Report(time.monotonic(), text=traceback.format_exc(), error=_pickled_error(error))


def _prepare(job: _Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank))
    os.environ.update(WORLD_SIZE=str(job.world_size), LOCAL_WORLD_SIZE=str(job.world_size))
    # The children of a fork server default to the fork server; a DataLoader worker would then take seconds to start.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    if job.init_group:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.folder}/rendezvous",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_seconds),
        )
        # A rank that ends as soon as it is connected closes connections that its peers still make.
        dist.barrier()


def _pickled_error(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # many exceptions do not survive pickling; their traceback, as text, does
        return b""
    return data


def _end() -> None:
    """Ends the process as a script ends: multiprocessing itself runs no exit functions."""
    atexit._run_exitfuncs()
    if dist.is_initialized():
        dist.destroy_process_group()
