"""The runs of a source that are in progress, and how long a rank waits for their loader workers.

Problem. A loader worker may hang: it was stopped, or a read of it never returns. Torch's loader waits for the worker's
next batch without a bound. The other ranks give up and name the rank; the rank itself would wait for ever.

Decision. A run that waits looks from time to time (``LOOK_SECONDS``, the timeout of torch's loader) how long it has
waited for one batch. Only the time counts in which the consumer waits for the batch too: slow training is no fault, nor
are slow workers that are still ahead of the consumer. Where other ranks wait for this rank, the run names the late
worker at a bound, ends its workers, and raises. The bound is a little shorter than the other ranks' bound, so that they
learn the name by the vote. They learn of a dead worker in the same way: the thread that waits for its batch reports it,
and not torch's signal handler, which would raise wherever the main thread is. Where the user gave the loader a
``timeout``, torch's rule holds. In one process torch's rule holds too, and a warning names the worker. A worker that
stops in the middle of a message is not named: the thread that reads the message looks at no clock. The rank is named.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Final, Protocol

from torchdistinput.step_types import Origin, ReadFailure

_LOG = logging.getLogger("torchdistinput")
_PART_OF_TIMEOUT: Final = 0.8
"""The part of the bound used here. The rest is left for the vote that tells the other ranks."""
_WARN_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.1


class _Run(Protocol):
    """See ``loader_runs.LoaderRun``."""

    fresh: int
    warned: bool

    def let_torch_forget(self) -> None: ...

    def awaited_worker(self) -> tuple[str, Origin]: ...


class OpenRuns:
    """The runs of one source that are in progress."""

    def __init__(self) -> None:
        self._running: list[_Run] = []
        self._fresh = 0  # of the runs that ended
        self.bound_seconds: float | None = None
        """How long this rank waits for a loader worker, if other ranks wait for this rank."""
        self.consumers: dict[object, float] = {}
        """Since when each waiting consumer waits for a batch, by ``perf_counter``."""

    def add(self, run: _Run) -> None:
        """A run began. Idempotent."""
        if run not in self._running:
            self._running.append(run)
        if self.bound_seconds is not None:
            run.let_torch_forget()

    def remove(self, run: _Run) -> None:
        """A run ended. Idempotent."""
        if run in self._running:
            self._fresh += run.fresh
        self._running = [each for each in self._running if each is not run]

    def fresh_batches(self) -> int:
        """How many batches of loader workers came in newly allocated memory, in all runs so far. Local."""
        return self._fresh + sum(run.fresh for run in self._running)

    def bound(self, timeout_seconds: float) -> None:
        """Sets the bound of the waits of the runs in progress and of later runs. Local; called again for each epoch.

        Args:
          timeout_seconds: how long the other ranks wait for this one.
        """
        self.bound_seconds = _PART_OF_TIMEOUT * timeout_seconds
        for run in self._running:
            run.let_torch_forget()

    def late(self, run: _Run, since: float) -> ReadFailure | None:
        """Warns of a loader worker that is long awaited; the failure that names it where the bound is reached.

        Args:
          run: the run that waits.
          since: when it began to wait, by ``perf_counter``.
        """
        seconds, consumers = self.bound_seconds, list(self.consumers.values())
        if not consumers:
            return None
        waited = perf_counter() - max(since, min(consumers))
        if seconds is not None and waited >= seconds:
            return late(*run.awaited_worker(), seconds)
        if waited >= _WARN_SECONDS and not run.warned:
            run.warned = True
            _LOG.warning("waiting for %s for %.0f seconds", run.awaited_worker()[0], waited)
        return None


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
