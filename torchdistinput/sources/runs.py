"""Running a torch ``DataLoader``: one epoch's iterator, its loader workers, and their end.

Torch ends its workers when the iterator is garbage collected, which takes seconds a worker, and leaves a thread that
waits for them in its wait for ever. A *run* can be closed from any thread: the workers are ended, and whoever waits is
woken by an item that torch cannot unpack. Torch has no public way to either.

A process that the user forks has the runs of its parent, which go on there. What it closes or drops of them, or has at
its end, ends no worker of the parent's.
"""

from __future__ import annotations

import itertools
import multiprocessing.process
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from typing import Any, Final, cast, final

from torch._C._autograd import _profiler_enabled
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter

from torchdistinput.backends.forks import told_of_forks
from torchdistinput.backends.slots import forks_of_workers
from torchdistinput.endings import left_to_parent
from torchdistinput.flow import Origin, ReadFailure
from torchdistinput.sources.arrivals import see_in
from torchdistinput.sources.slotted import Fresh, Inlet, through_slots
from torchdistinput.sources.torch_loaders import WorkerInit

# ruff: noqa: SLF001 - torch has no public way to its loader workers, see above

__all__ = ["LoaderRun", "LoaderRuns"]

_DEATH_SECONDS: Final = 1.0
"""From the end of a worker's sockets to the end of the worker, at most."""
_LOCK_SECONDS: Final = 1.0
"""For a loader worker to end its last message, at most."""
_LEAVE_SECONDS: Final = 5.0
"""For a thread that was woken to leave, at most."""


@final
class LoaderRun(Iterator[Any]):
    """One epoch of a torch loader.

    Args:
      iterator: torch's.
      inlet: opens what its workers send, if they send it in memory that is used again.
    """

    def __init__(self, iterator: Iterator[Any], inlet: Inlet | None = None) -> None:
        self._iterator = iterator
        self._inlet = inlet
        self._workers = iterator if isinstance(iterator, _MultiProcessingDataLoaderIter) else None
        self._pins: bool = self._workers is not None and self._workers._pin_memory
        self._waiting: int | None = None  # the thread in __next__
        self._closed = False
        self._closing = threading.RLock()
        self._ended = False
        self.is_a_parents = False
        """Whether the process that this one was forked from began it."""
        self.fresh = 0
        """Items that came in fresh memory, as they did not fit into what is used again."""
        told_of_forks(self)
        init = None if self._workers is None else self._workers._worker_init_fn
        if isinstance(init, WorkerInit) and init.arrivals is not None:
            try:
                see_in(self._workers, init.arrivals)
            except BaseException:  # the exception leaves nobody who would end them
                self.close()
                raise

    def __next__(self) -> Any:
        """The next item.

        Raises:
          ReadFailure: a loader worker died; it is named.
          InputError: it was begun by the process that this one was forked from.
        """
        # Before the look at whether it is closed, as close() looks the other way round.
        self._waiting = threading.get_ident()
        try:
            if self._closed:
                if self.is_a_parents:
                    raise left_to_parent()
                raise StopIteration
            return self._next()
        except (RuntimeError, OSError, EOFError, TypeError) as error:
            if self._closed:  # whoever waits is woken by something that torch cannot read
                raise StopIteration from None
            # The sockets of a process that is killed end before the process does.
            dead = self._wait_for_dead(isinstance(error, OSError | EOFError))
            if not dead:
                raise
            raise ReadFailure(self.dead_workers(), Origin(worker=dead[0][0])) from error
        finally:
            self._waiting = None

    def _next(self) -> Any:
        inlet = self._inlet
        if inlet is None:
            return next(self._iterator)
        inlet.take_back()
        sent = self._sent()
        item = inlet.open(sent)
        fresh = isinstance(sent, Fresh)
        self.fresh += fresh
        if self._pins and not fresh:  # torch's own thread has not seen what is in it
            item = pin_memory(item)  # type: ignore[no-untyped-call] # torch's
        return item

    def _sent(self) -> Any:
        """What a worker sent next.

        Torch's ``__next__`` tells its profiler of each batch, also where none runs, and counts those of iterable
        datasets; of map-style ones it does nothing else, in a tenth of the time that a batch takes this process.
        """
        workers = self._workers
        if workers is None or workers._dataset_kind != _DatasetKind.Map or _profiler_enabled():
            return next(self._iterator)
        return workers._next_data()  # type: ignore[no-untyped-call] # torch's

    def _wait_for_dead(self, lost: bool) -> list[tuple[int, int]]:  # noqa: FBT001 - whether a connection was lost
        until = time.monotonic() + (_DEATH_SECONDS if lost and self._workers is not None else 0.0)
        while not (dead := self._dead()) and not self._closed and time.monotonic() < until:
            time.sleep(0.01)
        return dead

    def dead_workers(self) -> str:
        """Which loader workers ended on their own, and how; nothing where none did. Local: any thread."""
        return ", ".join(
            f"loader worker {number} {f'was killed by signal {-code}' if code < 0 else f'exited with code {code}'}"
            for number, code in self._dead()
        )

    def _dead(self) -> list[tuple[int, int]]:
        """The numbers of the loader workers that ended on their own, and their exit codes."""
        if self._workers is None or self._closed:
            return []
        codes = [(number, process.exitcode) for number, process in enumerate(self._workers._workers)]
        return [(number, code) for number, code in codes if code]

    def close(self) -> None:
        """Ends the loader workers. Any thread. Idempotent; the next call does what an interruption left to do."""
        with self._closing:
            if self._ended:
                return
            self._closed = True
            if self._workers is not None:
                self._end(self._workers)
            self._ended = True

    def leave_to_parent(self) -> None:
        """See ``forks.Inherited``: the loader workers are the parent's."""
        self._closing = threading.RLock()  # whoever had the other one is not here
        if self._workers is not None and not self._ended:
            self._workers._shutdown = True  # or torch would end them when the iterator is garbage
            # Python terminates those that it takes for its children when it ends.
            cast(Any, multiprocessing.process)._children.difference_update(self._workers._workers)
            self._closed = self._ended = self.is_a_parents = True

    def _end(self, workers: _MultiProcessingDataLoaderIter) -> None:
        workers._shutdown_workers()
        for process in workers._workers:
            if process.is_alive():  # torch was interrupted, and does nothing when it is asked again
                process.terminate()
                process.join(_DEATH_SECONDS)
        waiting = self._waiting
        if waiting is not None and waiting != threading.get_ident():
            self._wake(workers)
        if self._inlet is not None:
            self._inlet.close()

    def _wake(self, workers: _MultiProcessingDataLoaderIter) -> None:
        """Lets the thread leave that waits for an item, once the loader workers ended."""
        results: Any = workers._data_queue
        if self._pins:  # the queue of a thread of this process
            results.put(None)
            return
        lock, writer = results._wlock, results._writer
        if lock is not None and not lock.acquire(timeout=_LOCK_SECONDS):
            # A worker that ends in the middle of a message takes the queue's lock with it, for which a `put` would wait
            # for ever. As nobody else writes, the end of the file comes in the middle of the message.
            writer.close()
        else:
            if wait([results._reader], 0) == []:
                writer.send_bytes(pickle.dumps(None))
            if lock is not None:
                lock.release()
        until = time.monotonic() + _LEAVE_SECONDS
        while self._waiting is not None and time.monotonic() < until:
            time.sleep(0.001)
        if self._waiting is None:
            # Not before: the number of a descriptor that is polled would go to another file.
            results.close()


def _begin(loader: Iterable[Any], inlet: Inlet | None) -> LoaderRun:
    try:
        with forks_of_workers():
            rested = _at_rest(loader)
            return LoaderRun(iter(loader) if rested is None else rested, inlet)
    finally:  # also where the workers could not be started: nobody else would close what it closes
        if inlet is not None:
            inlet.seal()


def _at_rest(loader: Iterable[Any]) -> Iterator[Any] | None:
    """The iterator of workers that live on, at its next epoch, if they sent all that was asked for; else ``None``.

    Torch says to each worker that an epoch begins, waits until all have heard of it, and drops what they still sent of
    the last one; the workers then look at their iterable dataset anew. Where there is nothing to drop, and the dataset
    is map-style, all of that comes to nothing, but takes longer than the first batch.
    """
    workers = loader._iterator if isinstance(loader, DataLoader) else None
    if not isinstance(workers, _MultiProcessingDataLoaderIter) or workers._dataset_kind != _DatasetKind.Map:
        return None
    if workers._task_info or workers._shutdown:
        return None
    workers._sampler_iter = iter(workers._index_sampler)
    workers._num_yielded = 0
    workers._worker_queue_idx_cycle = itertools.cycle(range(workers._num_workers))
    for _ in range(workers._prefetch_factor * workers._num_workers):
        workers._try_put_index()
    return workers


@final
class LoaderRuns:
    """The runs of one loader. With persistent workers they share one iterator, if they do not overlap.

    Args:
      build: makes the loader for a given dataset.
      lasting: whether its workers live on from run to run.
    """

    def __init__(self, build: Callable[[Any], Iterable[Any]], *, lasting: bool) -> None:
        self._build = build
        self._wants_to_last = lasting
        self._lasting: tuple[Iterable[Any], Inlet | None] | None = None
        self._user: LoaderRun | None = None
        self._last: LoaderRun | None = None
        self._running: list[LoaderRun] = []
        self._fresh = 0  # of the runs that ended

    def can_last(self) -> bool:
        """Whether the next run will use workers that live on: not while an earlier one uses them."""
        return self._wants_to_last and self._user is None

    def start(self, dataset: Any, *, once: bool = False) -> LoaderRun:
        """A run over a dataset; over the first one, where workers that live on have it already.

        Args:
          dataset: what is read.
          once: whether the run has workers of its own, because the dataset is for this epoch only.
        """
        if self._last is not None and self._last.is_a_parents:
            self.close()
        if self.can_last() and not once:
            if self._lasting is None:
                self.close()  # where that was interrupted before
                self._lasting = self._new_loader(dataset)
            try:
                run = self._user = self._last = _begin(*self._lasting)
            except BaseException:
                self.close()  # the next run has workers of its own, whatever became of these
                raise
        else:
            run = _begin(*self._new_loader(dataset))
        self._running.append(run)
        return run

    def _new_loader(self, dataset: Any) -> tuple[Iterable[Any], Inlet | None]:
        loader = self._build(dataset)
        return loader, through_slots(loader) if isinstance(loader, DataLoader) else None

    def fresh_batches(self) -> int:
        """Batches of loader workers that came in fresh memory, in all runs so far. Local."""
        return self._fresh + sum(run.fresh for run in self._running)

    def finish(self, run: LoaderRun) -> None:
        """Ends a run, and its loader workers unless they are to live on. Idempotent."""
        if run in self._running:
            self._fresh += run.fresh
        self._running = [each for each in self._running if each is not run]
        if run is self._user:
            self._user = None
        if run is not self._last:
            run.close()

    def lost_workers(self) -> str:
        """Which loader workers of the runs in progress died. Local."""
        return ", ".join(filter(None, (run.dead_workers() for run in self._running)))

    def close(self) -> None:
        """Ends the loader workers that live on. Idempotent; the next call does what an interruption left to do."""
        self._lasting = self._user = None
        if self._last is not None:
            self._last.close()
            self._last = None
