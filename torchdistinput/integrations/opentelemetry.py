"""OpenTelemetry: the numbers of a loader as observable gauges, for whatever exporter the program has set up.

Without the package (extra ``opentelemetry``), or without an SDK, nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol


class HasStats(Protocol):
    """A loader that tells its measurements."""

    def stats(self, *, flat: bool = False) -> dict[str, Any]:
        """See ``DistributedDataset.stats``."""


def observe(loader: HasStats) -> None:
    """Offers ``loader.stats(flat=True)`` as gauges ``torchdistinput.wait_seconds`` and so on. Local.

    They are read when an exporter asks. Call it once for a loader, after the meter provider was set. The attribute
    ``rank`` of a gauge comes from the resource that the program gives its provider.
    """
    try:
        from opentelemetry import metrics  # noqa: PLC0415 - an optional package
    except ImportError:
        return
    meter = metrics.get_meter("torchdistinput")
    for name in loader.stats(flat=True):
        read: Callable[[Any], Iterable[Any]] = partial(_observed, metrics.Observation, loader, name)
        meter.create_observable_gauge(f"torchdistinput.{name}", callbacks=[read])


def _observed(make: Callable[[float], Any], loader: HasStats, name: str, options: object) -> Iterable[Any]:
    return [make(loader.stats(flat=True)[name])]
