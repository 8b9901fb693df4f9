"""The runs of a source that are in progress, and how long a rank waits for their loader workers.

Problem. A loader worker may hang: it was stopped, or a read of it never returns. Torch's loader waits for the worker's
next batch without a bound. The other ranks give up and name the rank; the rank itself would wait for ever. If a worker
stops in the middle of a message, the thread that reads the message waits inside the read, and looks at no clock.

Decision. Where other ranks wait for this rank, a thread checks from time to time how long this rank has waited for one
batch. Only the time counts in which the consumer waits for the batch too: slow training is no fault, nor are slow
workers that are still ahead of the consumer. At the bound, the thread names the late worker and ends all workers of the
run. Their end wakes the thread that reads from them, and the run raises. The bound is a little shorter than the other
ranks' bound, so that they learn the name by the vote. They learn of a dead worker in the same way: the thread that
waits for its batch reports it, and not torch's signal handler, which would raise wherever the main thread is. Where the
user gave the loader a ``timeout``, torch's rule holds. In one process torch's rule holds too, and a warning names the
worker.
"""

from __future__ import annotations

import logging
import threading
import weakref
from time import perf_counter
from typing import Final, Protocol

from torchdistinput.step_types import Origin, ReadFailure

_LOG = logging.getLogger("torchdistinput")
_PART_OF_TIMEOUT: Final = 0.9
"""The part of the bound used here. The rest is left for the vote that tells the other ranks."""
_WARN_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 1.0


class _Run(Protocol):
    """See ``loader_runs.LoaderRun``."""

    fresh: int
    waits_since: float | None
    warned: bool

    @property
    def has_own_timeout(self) -> bool: ...

    def let_torch_forget(self) -> None: ...

    def awaited_worker(self) -> tuple[str, Origin]: ...

    def give_up(self, failure: ReadFailure, /) -> None: ...


class OpenRuns:
    """The runs of one source that are in progress."""

    def __init__(self) -> None:
        self._running: list[_Run] = []
        self._fresh = 0  # of the runs that ended
        self._seconds: float | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.consumers: dict[object, float] = {}
        """Since when each waiting consumer waits for a batch, by ``perf_counter``."""

    def add(self, run: _Run) -> None:
        """A run began. Idempotent."""
        if run not in self._running:
            self._running.append(run)
        if self._seconds is not None:
            run.let_torch_forget()

    def remove(self, run: _Run) -> None:
        """A run ended. Idempotent."""
        if run in self._running:
            self._fresh += run.fresh
        self._running = [each for each in self._running if each is not run]
        if not self._running:
            self._ended.set()
            self._thread = None

    def fresh_batches(self) -> int:
        """How many batches of loader workers came in newly allocated memory, in all runs so far. Local."""
        return self._fresh + sum(run.fresh for run in self._running)

    @property
    def bound_seconds(self) -> float | None:
        """How long this rank waits for a loader worker, if other ranks wait for this rank."""
        return self._seconds

    def bound(self, timeout_seconds: float) -> None:
        """Sets the bound of the waits of the runs in progress and of later runs. Local; called again for each epoch.

        Args:
          timeout_seconds: how long the other ranks wait for this one.
        """
        self._seconds = _PART_OF_TIMEOUT * timeout_seconds
        for run in self._running:
            run.let_torch_forget()
        if not any(not run.has_own_timeout for run in self._running):
            return
        if self._thread is None or not self._thread.is_alive():  # a fork does not have the thread
            self._ended = threading.Event()
            arguments = weakref.ref(self), self._ended
            self._thread = threading.Thread(target=_watch, args=arguments, name="torchdistinput-workers", daemon=True)
            self._thread.start()

    def check_workers(self) -> float:
        """Warns of a loader worker that is long awaited, and gives up where the waits are bounded. Any thread.

        After giving up, the run raises a ``ReadFailure``.

        Returns:
          after how many seconds to look again.
        """
        seconds = self._seconds
        again = _LOOK_SECONDS if seconds is None else min(_LOOK_SECONDS, seconds / 2)
        consumers = list(self.consumers.values())
        if not consumers:
            return again
        consumer = min(consumers)
        for run in list(self._running):
            since = run.waits_since
            if since is None or run.has_own_timeout:
                continue
            waited = perf_counter() - max(since, consumer)
            if seconds is not None:
                again = max(0.0, min(again, seconds - waited))
            if seconds is not None and waited >= seconds:
                run.give_up(late(*run.awaited_worker(), seconds))
            elif waited >= _WARN_SECONDS and not run.warned:
                run.warned = True
                _LOG.warning("waiting for %s for %.0f seconds", run.awaited_worker()[0], waited)
        return again


def late(worker: str, origin: Origin, seconds: float) -> ReadFailure:
    """The error for a loader worker that does not answer.

    Args:
      worker: the worker, in words.
      origin: the worker, as values.
      seconds: how long this rank waited for the worker.
    """
    failure = ReadFailure(worker, origin)
    failure.__cause__ = TimeoutError(
        f"the loader worker did not answer within {seconds:g} seconds, in which this rank waited for it and the other "
        "ranks for this one. It stands still (it was stopped, or a read of it never returns), or is slow: look at it "
        "with py-spy dump --pid. If it is only slow, raise timeout_seconds; a timeout= of the DataLoader's own counts "
        "instead."
    )
    return failure


def _watch(runs: weakref.ref[OpenRuns], ended: threading.Event) -> None:
    seconds = 0.0
    while not ended.wait(seconds):
        open_runs = runs()
        if open_runs is None:
            return
        seconds = open_runs.check_workers()
        del open_runs
