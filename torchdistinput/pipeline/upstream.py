"""All that comes before the vote: a step is read, checked, padded, and sent to the devices, and timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import final

from torchdistinput.batches.padding import Pad
from torchdistinput.batches.pytree import bytes_held
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.errors import InputError
from torchdistinput.pipeline.fetch import Fetch
from torchdistinput.pipeline.metrics import COPY, FETCH, Metrics, in_range
from torchdistinput.pipeline.prefetch_thread import LoaderWorkers
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.step_types import Drawn, Failed, Held, LocalStep

__all__ = ["StepMaker"]


@final
class StepMaker:
    """Makes the steps of this rank; see ``prefetch_thread.Upstream``.

    Args:
      fetch: reads the rows.
      checker: knows the structure of the elements.
      pad: gives the pieces one size, if asked for.
      to_device: brings them onto the devices.
      replicas_per_worker: pieces of a step.
      metrics: takes down how long they take.
      workers: the loader workers that read.
      expect: is told how many steps will be drawn at once.
      draw: draws with other random states, if it must.
      give_back: is called once nobody needs ``to_device`` any more.
    """

    def __init__(  # noqa: PLR0913 - each is a part of it
        self,
        fetch: Fetch,
        checker: SchemaChecker,
        pad: Pad | None,
        to_device: ToDevice,
        replicas_per_worker: int,
        metrics: Metrics,
        workers: LoaderWorkers,
        expect: Callable[[int], None],
        *,
        draw: Callable[[], Drawn | Held] | None = None,
        give_back: Callable[[ToDevice], None] | None = None,
    ) -> None:
        self._fetch = fetch
        self._checker = checker
        self._pad = pad
        self._to_device = to_device
        self._local = replicas_per_worker
        self._metrics = metrics
        self._give_back = give_back
        # Called for every step: without a call in between.
        self.draw = fetch.draw if draw is None else draw
        self.expect = expect
        self.close_source = fetch.close
        self.enter_thread = to_device.enter_thread
        self.consumers = workers.consumers
        self.lost_workers = workers.lost_workers
        self.look = workers.look

    def produce(self, drawn: Drawn | Held) -> Held:
        """See ``Upstream.produce``."""
        held = self._finish(drawn) if type(drawn) is Drawn else drawn
        if type(held) is LocalStep and not held.parcels and (self._checker.makes_empty or 0 not in held.sizes):
            try:
                self.complete(held)
            except Exception as error:  # out of memory, say: a failed step like any other
                return Failed(error, "" if isinstance(error, InputError) else "copying to the devices")
        return held

    def _finish(self, drawn: Drawn) -> Held:
        began = perf_counter()
        held = in_range(FETCH, self._fetch.finish, drawn)
        self._metrics.fetching += perf_counter() - began
        return held

    def complete(self, share: LocalStep) -> None:
        """Makes the empty pieces of a share, pads it, sends it to the devices. Once for each, here or in ``fill``."""
        began = perf_counter()
        in_range(COPY, self._send, share)
        self._metrics.copying += perf_counter() - began

    def fill(self, share: LocalStep) -> None:
        """The same, in a vote: for one whose structure was not known before. Others may be completed meanwhile."""
        began = perf_counter()
        in_range(COPY, self._send, share)
        self._metrics.filling += perf_counter() - began

    def _send(self, share: LocalStep) -> None:
        share.sizes = share.sizes or (0,) * self._local
        pieces = share.pieces or [None] * self._local
        # What has samples may be None all the same, if the user's collate function says so.
        share.pieces = [
            self._checker.empty() if piece is None and not size else piece
            for piece, size in zip(pieces, share.sizes, strict=True)
        ]
        if self._pad is not None:
            self._pad(share, self._checker.structure)
        share.parcels = self._to_device.send(share.pieces)
        share.pieces = []

    def weigh(self, share: LocalStep) -> int:
        """See ``Upstream.weigh``. What is on its way to a device consists of tensors, which the metrics count."""
        if self._to_device.moves:
            return 0
        weights = [bytes_held(piece) for piece in share.parcels or share.pieces if piece is not None]
        return 0 if None in weights else sum(weight or 0 for weight in weights)

    def discard(self, shares: Sequence[LocalStep]) -> None:
        """See ``Upstream.discard``."""
        for share in shares:
            if share.parcels:
                self._to_device.discard(share.parcels)

    def close_devices(self) -> None:
        """See ``Upstream.close_devices``."""
        if self._give_back is not None:
            self._give_back(self._to_device)
