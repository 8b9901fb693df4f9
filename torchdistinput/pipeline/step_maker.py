"""The pipeline stages before the vote: read a step, check it, pad it, send it to the devices, and measure the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol, final

from torchdistinput.batches.padding import Pad
from torchdistinput.batches.pytree import bytes_held
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.errors import InputError
from torchdistinput.pipeline.fetch import Fetch
from torchdistinput.pipeline.metrics import COPY, FETCH, Metrics, in_range
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.step_types import Drawn, Failed, Held, LocalStep


class _LoaderWorkers(Protocol):
    """The loader workers of a source; see ``open_runs.OpenRuns``."""

    consumers: dict[object, float]

    def check_workers(self) -> object: ...


@final
class StepMaker:
    """Makes the steps of this rank. No other rank takes part.

    Args:
      fetch: reads the rows.
      checker: knows the structure of the elements.
      pad: pads the pieces to one size; ``None`` for no padding.
      to_device: copies the pieces to the devices.
      replicas_per_worker: pieces of a step.
      metrics: collects the times.
      workers: the loader workers of the source.
      draw: ``fetch.draw``, or what takes its place.
      give_back: is called with ``to_device`` when the pipeline no longer needs it.
    """

    def __init__(  # noqa: PLR0913 - each argument is a stage
        self,
        fetch: Fetch,
        checker: SchemaChecker,
        pad: Pad | None,
        to_device: ToDevice,
        replicas_per_worker: int,
        metrics: Metrics,
        workers: _LoaderWorkers,
        *,
        draw: Callable[[], Drawn | Held],
        give_back: Callable[[ToDevice], None] | None = None,
    ) -> None:
        self._fetch = fetch
        self._checker = checker
        self._pad = pad
        self._to_device = to_device
        self._local = replicas_per_worker
        self._metrics = metrics
        self._give_back = give_back
        # Some of these are called for every step, so they are bound methods without a wrapper.
        self.draw = draw
        """The half of the next step that belongs to the consumer's thread."""
        self.close_source = fetch.close
        """Ends loader workers and open files."""
        self.enter_thread = to_device.enter_thread
        """The thread that calls ``produce`` calls this first."""
        self.consumers = workers.consumers
        """The consumers that wait for a step now, each with the time since when, by ``perf_counter``."""
        self.check_workers = workers.check_workers
        """Checks whether a loader worker is late for a consumer that waits."""

    def produce(self, drawn: Drawn | Held) -> Held:
        """The complete step: fetched, and its copies to the devices begun."""
        held = self._finish(drawn) if type(drawn) is Drawn else drawn
        if type(held) is LocalStep and not held.transfers:
            if 0 in held.sizes and not self._checker.makes_empty:
                self._checker.want()
                return held
            try:
                self.complete(held)
            except Exception as error:  # for example out of memory: a failed step like any other
                return Failed(error, "" if isinstance(error, InputError) else "copying to the devices")
        return held

    def _finish(self, drawn: Drawn) -> Held:
        began = perf_counter()
        held = in_range(FETCH, self._fetch.finish, drawn)
        ended = perf_counter()
        self._metrics.fetching += ended - began
        if self._metrics.trace is not None:
            self._metrics.trace.fetched(began, ended)
        return held

    def complete(self, step: LocalStep) -> None:
        """Makes the empty pieces of a step, pads it, sends it to the devices. Each step passes here or ``fill``."""
        self._metrics.copying += self._sent(step)

    def fill(self, step: LocalStep) -> None:
        """``complete`` during a vote, for a step whose structure was unknown. ``complete`` may run at the same time."""
        self._metrics.filling += self._sent(step)

    def _sent(self, step: LocalStep) -> float:
        """Sends a step. Returns the seconds that it took."""
        began = perf_counter()
        in_range(COPY, self._send, step)
        ended = perf_counter()
        if self._metrics.trace is not None:
            self._metrics.trace.copied(step, began, ended)
        return ended - began

    def _send(self, step: LocalStep) -> None:
        step.sizes = step.sizes or (0,) * self._local
        pieces = step.pieces or [None] * self._local
        # A piece that has samples is None where the user's collate function returned None.
        given = self._checker.has_empty_fn
        step.pieces = [
            self._checker.empty() if not size and (piece is None or given) else piece
            for piece, size in zip(pieces, step.sizes, strict=True)
        ]
        if self._pad is not None:
            self._pad(step, self._checker.structure)
        step.transfers = self._to_device.send(step.pieces)
        step.pieces = []

    def weigh(self, step: LocalStep) -> int:
        """About how many bytes a step takes; 0 where the size is not known."""
        pieces = [each.batch for each in step.transfers] if self._to_device.moves else step.transfers or step.pieces
        weights = [bytes_held(piece) for piece in pieces if piece is not None]
        return 0 if None in weights else sum(weight or 0 for weight in weights)

    def discard(self, steps: Sequence[LocalStep]) -> None:
        """Discards steps that will not be delivered."""
        for step in steps:
            if step.transfers:
                self._to_device.discard(step.transfers)

    def close_devices(self) -> None:
        """Releases the devices, once the thread has stopped."""
        if self._give_back is not None:
            self._give_back(self._to_device)
