"""Cuts the batches of samples of an opaque iterable, in the process that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torchdistinput.coordination.batch_digests import digest_of_samples, number_of_size
from torchdistinput.plan.batching import Cutter
from torchdistinput.sources.kernel.batcher import Batcher, Collator
from torchdistinput.sources.kernel.cut import Cut, MarkedBatch, TakenBatches
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.sample_costs import CostDivider
from torchdistinput.sources.plain_epochs import loader_worker
from torchdistinput.step_types import Digest


@final
class CutSamples:
    """Collates a list of samples into rows.

    Args:
      collate: makes a batch of a list of samples.
      cutter: cuts batches by the laws of ``plan``.
      balance: divides batches by cost; ``None``: they are cut by place.
      asks: whether ``collate`` is asked for the structure of its batches.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        cutter: Cutter,
        balance: CostDivider | None = None,
        *,
        asks: bool = False,
    ) -> None:
        self._collator = Collator(collate, asks=asks)
        self._batcher = Batcher(cutter, balance)
        self._compares = cutter.read_by_all

    def __call__(self, batch: list[Any] | MarkedBatch | Failure) -> Cut | Failure:
        """The rows of a batch of samples, or the failure with which reading ended."""
        if isinstance(batch, Failure):
            return batch
        samples, mark, compared = batch if isinstance(batch, MarkedBatch) else (batch, None, False)
        try:
            read: Digest = 0
            if self._compares:
                read = digest_of_samples(samples) if compared else number_of_size(len(samples))
            divided = self._batcher.divide(samples, read)
            order = divided.order
            places = None if order is None else divided.of_pieces(lambda lo, hi: order[lo:hi])
            told = len(samples), (TakenBatches(loader_worker()[0], 1, mark),)
            return divided.cut(self._piece, self._collator, told, places)
        except Exception as error:
            return Failure(error, "collating")

    def _piece(self, samples: list[Any], lo: int, hi: int) -> Any:
        return self._collator(samples[lo:hi])
