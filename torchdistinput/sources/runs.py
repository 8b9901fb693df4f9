"""Running a torch ``DataLoader``: one epoch's iterator, its loader workers, and their end.

Torch ends its workers when the iterator is garbage collected, which takes seconds a worker, and leaves a thread that
waits for them in its wait for ever. A *run* can be closed from any thread: the workers are ended, and whoever waits is
woken by an item that torch cannot unpack. Torch has no public way to either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchdistinput.flow import Origin, ReadFailure

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

    def __next__(self) -> Any:
        """The next item.

        Raises:
          ReadFailure: a loader worker died; it is named.
        """
        if self._closed:
            raise StopIteration
        self._waiting = True
        try:
            return next(self._iterator)
        except RuntimeError as error:
            dead = self.dead_workers()
            if not dead:
                raise
            raise ReadFailure(dead, Origin(worker=self._dead()[0][0])) from error
        finally:
            self._waiting = False

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
        self._workers._shutdown_workers()  # noqa: SLF001 - see the top
        if self._waiting:
            results = self._workers._worker_result_queue  # noqa: SLF001 - see the top
            results.put(None)
            results.close()
            results.join_thread()


@final
class LoaderRuns:
    """The runs of one loader. With persistent workers they share one iterator, if they do not overlap.

    Args:
      build: makes the loader for a given dataset.
      lasting: whether its workers live on from run to run.
    """

    def __init__(self, build: Callable[[Any], DataLoader[Any]], *, lasting: bool) -> None:
        self._build = build
        self._wants_to_last = lasting
        self._lasting: DataLoader[Any] | None = None
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
                self._lasting = self._build(dataset)
            run = self._user = self._last = LoaderRun(iter(self._lasting))
        else:
            run = LoaderRun(iter(self._build(dataset)))
        self._running.append(run)
        return run

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
