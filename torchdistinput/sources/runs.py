"""Running a torch ``DataLoader``: one epoch's iterator, its loader workers, and their end.

Torch ends its workers when the iterator is garbage collected, which takes seconds a worker, and leaves a thread that
waits for them in its wait for ever. A *run* can be closed from any thread: the workers are ended, and whoever waits is
woken by an item that torch cannot unpack. Torch has no public way to either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchdistinput.flow import Origin, ReadFailure
from torchdistinput.sources.arrivals import see_in
from torchdistinput.sources.torch_loaders import WorkerInit

__all__ = ["LoaderRun", "LoaderRuns"]


@final
class LoaderRun(Iterator[Any]):
    """One epoch of a torch loader.

    Args:
      iterator: torch's.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._workers = iterator if isinstance(iterator, _MultiProcessingDataLoaderIter) else None
        self._waiting = False
        self._closed = False
        init = None if self._workers is None else self._workers._worker_init_fn  # noqa: SLF001 - see the top
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
        """
        if self._closed:
            raise StopIteration
        self._left.clear()
        self._waiting = threading.get_ident()
        try:
            return self._next()
        except (RuntimeError, OSError, EOFError) as error:
            # The sockets of a process that is killed end before the process does.
            dead = self._wait_for_dead(0.0 if isinstance(error, RuntimeError) else _DEATH_SECONDS)
            if not dead:
                raise
            raise ReadFailure(self.dead_workers(), Origin(worker=dead[0][0])) from error
        finally:
            self._waiting = None
            self._left.set()

    def _next(self) -> Any:
        inlet = self._inlet
        if inlet is None:
            return next(self._iterator)
        inlet.take_back()
        sent = next(self._iterator)
        item = inlet.open(sent)
        return pin_memory(item) if self._pins and isinstance(sent, Packed) else item

    def _wait_for_dead(self, seconds: float) -> list[tuple[int, int]]:
        until = time.monotonic() + seconds
        while not (dead := self._dead()) and self._workers is not None and time.monotonic() < until:
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
        codes = [(number, process.exitcode) for number, process in enumerate(self._workers._workers)]  # noqa: SLF001 - top
        return [(number, code) for number, code in codes if code]

    def close(self) -> None:
        """Ends the loader workers. Idempotent, from any thread."""
        if self._closed:
            return
        self._closed = True
        if self._workers is None:
            return
        workers, waiting = self._workers, self._waiting
        workers._shutdown_workers()  # noqa: SLF001 - see the top
        if waiting is not None:
            self._wake(workers, waiting)
        if self._inlet is not None:
            self._inlet.close()

    def _wake(self, workers: _MultiProcessingDataLoaderIter, waiting: int) -> None:
        """Lets the thread leave that waits for an item."""
        results = workers._data_queue  # noqa: SLF001 - see the top
        results.put(None)
        if self._pins or waiting == threading.get_ident() or not self._left.wait(_LEAVE_SECONDS):
            return
        # Not before: the number of a descriptor that is polled would go to another file.
        results.close()
        results.join_thread()


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
        self._lasting: Iterable[Any] | None = None
        self._user: LoaderRun | None = None
        self._last: LoaderRun | None = None
        self._running: list[LoaderRun] = []

    def can_last(self) -> bool:
        """Whether the next run will use workers that live on: not while an earlier one uses them."""
        return self._wants_to_last and self._user is None

    def start(self, dataset: Any, *, once: bool = False) -> LoaderRun:
        """A run over a dataset; over the first one, where workers that live on have it already.

        Args:
          dataset: what is read.
          once: whether the run has workers of its own, because the dataset is for this epoch only.
        """
        if self.can_last() and not once:
            if self._lasting is None:
                self._lasting = self._new_loader(dataset)
            run = self._user = self._last = _begin(*self._lasting)
        else:
            run = _begin(*self._new_loader(dataset))
        self._running.append(run)
        return run

    def _new_loader(self, dataset: Any) -> tuple[DataLoader[Any], Inlet | None]:
        loader = self._build(dataset)
        inlet = through_slots(loader)
        if inlet is not None:
            self._inlets.add(inlet)
        return loader, inlet

    def fresh_batches(self) -> int:
        """Batches of loader workers that came in fresh memory, in all runs so far. Local."""
        return self._fresh_of_ended + sum(inlet.fresh for inlet in self._inlets)

    def finish(self, run: LoaderRun) -> None:
        """Ends a run, and its loader workers unless they are to live on. Idempotent."""
        self._running = [each for each in self._running if each is not run]
        if run is self._user:
            self._user = None
        if run is not self._last:
            run.close()

    def lost_workers(self) -> str:
        """Which loader workers of the runs in progress died. Local."""
        return ", ".join(filter(None, (run.dead_workers() for run in self._running)))

    def close(self) -> None:
        """Ends the loader workers that live on. Idempotent."""
        last, self._last, self._lasting, self._user = self._last, None, None, None
        if last is not None:
            last.close()
