"""Runs one epoch of a torch ``DataLoader``: its iterator, its loader workers, and how they are ended.

Torch waits for a loader worker without a bound, and ends its workers when the iterator is garbage collected, which
takes seconds for each worker. A *run* gives torch's loader a short ``timeout``, and asks again whenever it is over. So
it sees that it was closed, from any thread, that a worker died, or that one is late. Its ``close`` asks all workers to
leave at once, for which torch has no public way. Where this release lacks a private name that is needed, the iterator
is only dropped, and torch ends the workers.

A process that the user forks has copies of its parent's runs, which go on in the parent. Neither closing or dropping
these copies nor the end of the fork ends a worker of the parent.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess as Process
from multiprocessing.util import Finalize
from typing import Any, Final, cast, final

from torch.utils.data import DataLoader

from torchdistinput.coordination.failures import plain_indices
from torchdistinput.coordination.fork_safety import register_for_forks
from torchdistinput.coordination.private_names import look_up
from torchdistinput.pipeline.end_errors import left_to_parent
from torchdistinput.sources.kernel.batcher import as_is
from torchdistinput.sources.map_style.map_stream import IndexFeed
from torchdistinput.sources.map_style.piece_dataset import indices_as_text, indices_of
from torchdistinput.sources.random_state import BaseSeeds
from torchdistinput.sources.set_epoch import loader_worker
from torchdistinput.sources.torch_loader.open_runs import OpenRuns, late
from torchdistinput.sources.torch_loader.private_names import (
    ENDING,
    PINNING,
    PIPE,
    children_of_this_process,
    is_of_loader_workers,
)
from torchdistinput.sources.torch_loader.settings import RebuiltLoader, settings_of
from torchdistinput.sources.torch_loader.shared_memory.pool import forks_of_workers
from torchdistinput.sources.torch_loader.shared_memory.transport import BatchDecoder, Fresh, send_through_pool
from torchdistinput.sources.torch_loader.worker_processes import is_stopped, words_for
from torchdistinput.step_types import Origin, ReadFailure
from torchdistinput.tracing.read_times import ReadTimes, TimedItem

# ruff: noqa: SLF001 - torch has no public way to its loader workers, see above

_NO_BOUND: Final = 1e6
"""Seconds that torch takes for a timeout and that nobody waits."""
_DEATH_SECONDS: Final = 1.0
"""The longest time between the end of a worker's sockets and the end of the worker."""
_LEAVE_SECONDS: Final = 5.0
"""The longest wait for loader workers that were asked to leave."""
_TIMED_OUT: Final = "DataLoader timed out after"
"""How torch begins what it says after its timeout."""

_NAMED_DEAD: Final = re.compile(r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly")
"""What torch says where it finds that loader workers have ended."""
_remove_worker_pids: Final = look_up("torch._C._remove_worker_pids")
_pin_memory: Final = look_up("torch.utils.data._utils.pin_memory.pin_memory")
_EXIT_STATUS: Final = "torch.utils.data._utils.python_exit_status"

_Workers = Any
"""Torch's ``_MultiProcessingDataLoaderIter``."""


@final
class LoaderRun(Iterator[Any]):
    """One epoch of a torch loader.

    Args:
      iterator: torch's iterator, with the timeout of ``settings_of``.
      runs: the runs among which this one counts.
      timeout: the user's own timeout; 0 for none.
      decoder: decodes the items of its workers, if they send them in reused shared memory.
      times: takes the times that its workers send with their items; ``None`` where they send none.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        runs: OpenRuns,
        *,
        timeout: float = 0,
        decoder: BatchDecoder | None = None,
        times: ReadTimes | None = None,
    ) -> None:
        self._iterator = iterator
        self._runs = weakref.ref(runs)  # who keeps a run, and is to be garbage at the last reference
        self._timeout = timeout
        self._decoder = decoder
        self._times = times
        self.workers = _workers_of(iterator)
        """The iterator, where its loader workers can be ended here."""
        self._pins = bool(getattr(iterator, "_pin_memory", False))
        self.warned = False
        """Whether a warning has named a late worker."""
        self.failure: ReadFailure | None = None
        """The failure with which the run was given up."""
        self._closed = False
        self._closing = threading.RLock()
        self._ended = False
        self.is_a_parents = False
        """Whether the parent process began this run, before this process was forked."""
        self.fresh = 0
        """How many items came in newly allocated memory, because they did not fit into the reused memory."""
        register_for_forks(self)

    def __next__(self) -> Any:
        """The next item.

        Raises:
          ReadFailure: a loader worker died, or was given up; the error names the worker.
          InputError: the parent process began this run, before this process was forked.
        """
        since = time.perf_counter()
        if self._decoder is not None:
            self._decoder.take_back()
        while not self._closed:
            try:
                return self._received(next(self._iterator))
            except (RuntimeError, OSError, EOFError, TypeError, ValueError) as error:  # noqa: PERF203 - each may end the wait
                if not self._goes_on(error, since):
                    raise
        if self.is_a_parents:
            raise left_to_parent()
        if self.failure is not None:
            raise self.failure from self.failure.__cause__
        raise StopIteration

    def _goes_on(self, error: Exception, since: float) -> bool:
        """Whether to ask torch again, which gave no item: after its timeout, or to find that this run was closed.

        Args:
          error: what torch raised.
          since: when the item was asked for.

        Raises:
          ReadFailure: a loader worker is dead, or late.
        """
        if self._closed:
            return True
        dead = self._wait_for_dead(error)
        if dead:
            raise ReadFailure(*self._read_of(*dead[0])) from error
        if not (isinstance(error, RuntimeError) and str(error).startswith(_TIMED_OUT)):
            return False
        if self._timeout:
            if time.perf_counter() - since >= self._timeout:
                raise RuntimeError(f"{_TIMED_OUT} {self._timeout} seconds") from None
            return True
        runs = self._runs()
        failure = None if runs is None else runs.late(self, since)
        if failure is not None:
            self.failure = failure
            self.close()
        return True

    def _received(self, sent: Any) -> Any:
        item, decoder = sent, self._decoder
        if decoder is not None:
            item = decoder.open(sent)
            fresh = isinstance(sent, Fresh)
            self.fresh += fresh
            if self._pins and not fresh:  # torch's pinning thread could not see the tensors inside
                item = _pin_memory(item)
        return item if self._times is None else self._untimed(item, self._times)

    @staticmethod
    def _untimed(item: Any, times: ReadTimes) -> Any:
        if type(item) is not TimedItem:  # torch's own account of a failure
            return item
        times.received.append(item.times)
        return item.item

    def _wait_for_dead(self, error: Exception) -> list[tuple[int, int]]:
        lost = isinstance(error, OSError | EOFError)
        until = time.monotonic() + (_DEATH_SECONDS if lost and self.workers is not None else 0.0)
        while not (dead := self._dead(str(error))) and not self._closed and time.monotonic() < until:
            time.sleep(0.01)
        return dead

    def _read_of(self, number: int, code: int) -> tuple[str, Origin]:
        """How a loader worker ended on its own, and the read that it owes, in words and as values."""
        workers = cast(_Workers, self.workers)
        owed = range(workers._rcvd_idx, workers._send_idx)
        # A task is the number of its worker, and the result once that has come.
        places = (place for place in owed if tuple(workers._task_info.get(place, ())) == (number,))
        samples, indices = self._request(next(places, workers._send_idx))
        return ", ".join([_end_in_words(number, code), *samples]), Origin(indices, worker=number)

    def _dead(self, told: str) -> list[tuple[int, int]]:
        """The numbers of the loader workers that ended on their own, and their exit codes.

        A worker whose data has ended leaves with code 0, too. Torch then no longer counts on it. Nor does it count on
        one that it found dead; that one is named in its error.

        Args:
          told: the text of the error.
        """
        workers = self.workers
        if workers is None or self._closed:
            return []
        named = _NAMED_DEAD.search(told)
        pids = named[1].split(", ") if named else []
        codes = [(number, process.pid, process.exitcode) for number, process in enumerate(workers._workers)]
        return [
            (number, code)
            for number, pid, code in codes
            if code or (code == 0 and (workers._workers_status[number] or str(pid) in pids))
        ]

    @property
    def can_go_on(self) -> bool:
        """Whether no loader worker was given up, and none is stopped. Local: any thread."""
        processes = [] if self.workers is None else self.workers._workers
        return self.failure is None and not any(map(is_stopped, processes))

    def awaited_worker(self) -> tuple[str, Origin]:
        """The loader worker that sends the next item, and its read, in words and as values."""
        workers = self.workers
        if workers is None:
            return "a loader worker", Origin()
        task: tuple[Any, ...] = workers._task_info.get(workers._rcvd_idx, (None,))
        number: int | None = task[0]
        words, indices = ([], None) if number is None else self._request(workers._rcvd_idx)
        if number is not None:
            words = [words_for(number, workers._workers[number]), *words]
        others = [(each, process) for each, process in enumerate(workers._workers) if each != number]
        words += [words_for(each, process) for each, process in others if number is None or is_stopped(process)]
        return ", ".join(words), Origin(indices, worker=number)

    def _request(self, place: int) -> tuple[list[str], tuple[int | str, ...] | None]:
        """The samples that were requested as a batch, in words and as values, where they are known."""
        workers = cast(_Workers, self.workers)
        feed = workers._index_sampler
        requests = list(feed.taken) if isinstance(feed, IndexFeed) else []
        outstanding = workers._send_idx - place
        if not 0 < outstanding <= len(requests):
            return [], None
        wanted = indices_of(requests[-outstanding])
        return [f"samples {indices_as_text(wanted)}"], plain_indices(wanted)

    def let_torch_forget(self) -> None:
        """Keeps torch's signal handler from reporting the end of a loader worker; ``__next__`` reports it. Any thread.

        The handler raises an error wherever the main thread is. Other ranks could not learn it at the same step.
        """
        if self.workers is not None and not self._closed:
            _let_torch_forget(self.workers)

    def close(self) -> None:
        """Ends the loader workers. Any thread. Idempotent; after an interruption, the next call does the rest."""
        with self._closing:
            if self._ended:
                return
            self._closed = True
            if self.workers is not None:
                self._end(self.workers)
            else:
                self._iterator = iter(())  # torch ends its workers when the iterator is garbage
            self._ended = True

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: the loader workers belong to the parent."""
        self._closing = threading.RLock()  # in the parent, another thread may have held the old lock
        if self.workers is not None and not self._ended:
            self.workers._shutdown = True  # else torch would end them when the iterator is garbage
            # When Python ends, it terminates the processes in this set.
            children_of_this_process().difference_update(self.workers._workers)
            self._closed = self._ended = self.is_a_parents = True

    def _end(self, workers: _Workers) -> None:
        if self.failure is not None or any(process.exitcode or is_stopped(process) for process in workers._workers):
            self._kill(workers)
        elif not (self._pins or workers._shutdown or look_up(_EXIT_STATUS)):
            _ask_to_leave(workers)
        workers._shutdown_workers()
        _end_by_force(workers)  # torch was interrupted, and does nothing on a second call
        if not self._pins:
            workers._worker_result_queue._writer.close()  # a thread in the middle of a message finds its end
        if self._decoder is not None:
            self._decoder.close()

    def _kill(self, workers: _Workers) -> None:
        """Kills the workers, where one is stopped or was killed: it may hold a lock for which torch would wait."""
        workers._shutdown = True
        _let_torch_forget(workers)  # also where all have ended: another iterator may get the same id
        _end_by_force(workers, at_once=True)
        if self._pins:
            workers._pin_memory_thread_done_event.set()
        for requests in workers._index_queues:
            requests.cancel_join_thread()
            requests.close()


def _workers_of(iterator: object) -> _Workers | None:
    """The iterator, if it is torch's iterator over loader workers and every name needed to end them is there."""
    if not is_of_loader_workers(iterator) or not ENDING.is_usable(iterator):
        return None
    workers: _Workers = iterator
    if workers._pin_memory and not PINNING.is_usable(workers):
        return None
    return workers if PIPE.is_usable(workers._worker_result_queue) else None


def _ask_to_leave(workers: _Workers) -> None:
    """Ends the workers as torch does, but waits for all of them at once; busy ones are ended by force."""
    workers._workers_done_event.set()
    for requests in workers._index_queues:
        requests.put(None)
    _join(workers, _LEAVE_SECONDS)
    _end_by_force(workers)


def _end_by_force(workers: _Workers, *, at_once: bool = False) -> None:
    """Ends the workers that are alive.

    Args:
      workers: torch's iterator.
      at_once: whether they are killed at once; else they are terminated first, and killed if they do not end.
    """
    for end in (Process.kill,) if at_once else (Process.terminate, Process.kill):
        living = [process for process in workers._workers if process.is_alive()]
        if not living:
            return
        _let_torch_forget(workers)
        for process in living:
            end(process)
        _join(workers, _DEATH_SECONDS)


def _kill_stopped(number: int, processes: Sequence[Process]) -> None:
    """Kills the loader workers that are stopped (SIGSTOP): no other signal ends them.

    Args:
      number: by which torch's signal handler knows the workers.
      processes: the workers.
    """
    stopped = [process for process in processes if process.is_alive() and is_stopped(process)]
    if stopped:
        with suppress(ValueError):  # torch forgot them before
            _remove_worker_pids(number)
    for process in stopped:
        process.kill()


def _end_in_words(number: int, code: int) -> str:
    return f"loader worker {number} {f'was killed by signal {-code}' if code < 0 else f'exited with code {code}'}"


def _let_torch_forget(workers: _Workers) -> None:
    """Keeps torch's signal handler from reporting the end of the workers as a failure."""
    if workers._worker_pids_set:
        workers._worker_pids_set = False
        _remove_worker_pids(id(workers))


def _join(workers: _Workers, seconds: float) -> None:
    until = time.monotonic() + seconds
    for process in workers._workers:
        process.join(max(0.0, until - time.monotonic()))


@final
class _Timing:
    """In a loader worker: puts the times of an item beside it; see ``read_times``."""

    def __init__(self, times: ReadTimes) -> None:
        self._times = times

    def __call__(self, item: Any) -> TimedItem:
        return TimedItem(item, self._times.take(loader_worker()[0]))


@final
class LoaderRuns(OpenRuns):
    """The runs of one loader. With persistent workers they share one iterator, if they do not overlap.

    Args:
      loader: the user's, whose settings count for the loader that reads.
      seeds: draw the base seeds of the workers; ``None``: torch draws them from the generator of the user's loader.
      sampler: yields the requests for the items of a map-style dataset; ``None`` for an iterable one. An item is a
        whole piece or batch.
      times: measures how long the loader workers read; ``None``: they do not measure it.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seeds: BaseSeeds | None = None,
        *,
        sampler: Iterable[Any] | None = None,
        times: ReadTimes | None = None,
    ) -> None:
        super().__init__()
        self.counted_in: OpenRuns | None = None
        """The runs of all datasets of a dataset function, among which these count."""
        # Without loader workers the process that reads is this one, and asks for its times itself.
        self._times = times if loader.num_workers else None
        self._given = loader
        self._seeds = seeds
        self._sampler = sampler
        self._persistent: tuple[DataLoader[Any], BatchDecoder | None] | None = None
        self._user: LoaderRun | None = None
        self._last: LoaderRun | None = None

    @property
    def _counted(self) -> OpenRuns:
        return self if self.counted_in is None else self.counted_in  # a reference to itself would keep it alive

    def can_persist(self) -> bool:
        """Whether the next run will use persistent workers: not while an earlier run uses them."""
        return self._given.persistent_workers and self._user is None

    def start(self, dataset: Any, *, once: bool = False) -> LoaderRun:
        """A run over a dataset. Persistent workers read the dataset that they have already.

        Args:
          dataset: the dataset to read.
          once: whether the run gets workers of its own, because the dataset is for this epoch only.
        """
        if self._last is not None and (self._last.workers is None or self._last.is_a_parents or self._last.failure):
            self.close()
        if self._times is not None:
            self._times.take()  # loader workers begin with a copy
        if self.can_persist() and not once:
            if self._persistent is None:
                self.close()  # finishes a close that was interrupted
                self._persistent = self._new_loader(dataset)
            try:
                run = self._user = self._last = self._begin(*self._persistent)
            except BaseException:
                self.close()  # the state of these workers is unknown: the next run gets new ones
                raise
        else:
            run = self._begin(*self._new_loader(dataset))
        self._counted.add(run)
        return run

    def _begin(self, loader: DataLoader[Any], decoder: BatchDecoder | None) -> LoaderRun:
        """A run of a loader.

        Raises:
          ReadFailure: persistent workers did not answer within the bound, if there is one.
        """
        if isinstance(loader.sampler, IndexFeed):
            loader.sampler.taken = deque(maxlen=loader.num_workers * (loader.prefetch_factor or 0))
        before = None if self._last is None else self._last.workers
        try:
            with forks_of_workers():
                iterator = iter(loader) if before is None else self._reset(loader, before)
                workers = _workers_of(iterator)
                if workers is not None and workers is not before:
                    # Runs just before Python terminates persistent workers, and waits for them without a bound.
                    Finalize(workers, _kill_stopped, (id(workers), workers._workers), exitpriority=0)
                timeout, counted = self._given.timeout, self._counted
                return LoaderRun(iterator, counted, timeout=timeout, decoder=decoder, times=self._times)
        finally:  # also where the workers could not be started: nobody else would close the descriptor
            if decoder is not None:
                decoder.seal()

    def _reset(self, loader: DataLoader[Any], workers: _Workers) -> Iterator[Any]:
        """Torch's iterator, at its next epoch. Torch asks persistent workers for an answer, and waits for all."""
        seconds, look = self._counted.bound_seconds, workers._timeout
        workers._timeout = self._given.timeout or seconds or _NO_BOUND
        try:
            return iter(loader)
        except RuntimeError as error:  # torch's, which says no more than that
            processes = list(enumerate(workers._workers))
            for number, process in processes:
                if process.exitcode is not None:
                    raise ReadFailure(_end_in_words(number, process.exitcode), Origin(worker=number)) from error
            if self._given.timeout or seconds is None:
                raise
            stopped = [each for each in processes if is_stopped(each[1])]
            words = ", ".join(words_for(*each) for each in stopped or processes)
            failure = late(words, Origin(worker=stopped[0][0] if stopped else None), seconds)
            raise failure from failure.__cause__
        finally:
            workers._timeout = look

    def _new_loader(self, dataset: Any) -> tuple[DataLoader[Any], BatchDecoder | None]:
        settings = settings_of(self._given)
        if self._seeds is not None:
            settings["generator"] = self._seeds.generator
        loader: DataLoader[Any] = RebuiltLoader(
            dataset,
            batch_size=None,
            sampler=self._sampler,
            collate_fn=as_is if self._times is None else _Timing(self._times),
            **settings,
        )
        return loader, send_through_pool(loader)

    def finish(self, run: LoaderRun) -> None:
        """Ends a run, and its loader workers unless they persist. Idempotent."""
        self._counted.remove(run)
        if run is self._user:
            self._user = None
        if run is not self._last:
            run.close()
        elif not run.can_go_on:  # a thread may still wait for one of its workers
            self.close()

    def close(self) -> None:
        """Ends the persistent loader workers. Idempotent; after an interruption, the next call does the rest."""
        self._persistent = self._user = None
        if self._last is not None:
            self._last.close()
            self._last = None
