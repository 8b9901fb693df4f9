"""What flows through the house: rows from a source, shares from stage to stage, outcomes to the consumer.

A *row* is one piece for each local replica, in order; ``None`` stands for an empty piece, which is made later, when the
structure is known. A stream of rows is read in two halves, so that user code runs where torch would run it: ``draw`` on
the caller's thread (the user's sampler, and in-process data), ``fetch`` on the thread that ``in_background`` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

__all__ = [
    "Delivered",
    "Drawn",
    "End",
    "Failed",
    "Held",
    "Outcome",
    "PassedOver",
    "PastEnd",
    "Raised",
    "ReadFailure",
    "Row",
    "Share",
    "Stream",
]

Row = list[Any]
"""One piece for each local replica; ``None`` for an empty one."""


class ReadFailure(Exception):
    """The data failed. The original is the ``__cause__``; ``where`` tells which samples, file or worker it was."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class Stream(Protocol):
    """One epoch of one worker's rows."""

    in_background: bool
    """Whether ``fetch`` may run on the background thread; else it runs on the caller's, right after ``draw``."""

    def draw(self) -> Any:
        """Takes what belongs to the next row from user code in this process; ``None`` at the end. Caller's thread."""

    def fetch(self, drawn: Any) -> Row | None:
        """The row; ``None`` past the end, where only the reading itself finds the end."""

    def digest_of(self, drawn: Any) -> int:
        """A number of what the user's sampler drew for the row, equal on all ranks; 0 where none is to compare."""

    def close(self) -> None:
        """Ends loader workers and open files. Idempotent."""


@final
@dataclass(slots=True)
class Share:
    """One piece for each local replica.

    Args:
      pieces: the batches; ``None`` for an empty one that could not be made yet.
      sizes: samples in each.
      parcels: the pieces on their way to the devices.
      digest: a number of what the sampler drew, equal on all ranks; 0 where there is none to compare.
    """

    pieces: list[Any]
    sizes: tuple[int, ...]
    parcels: Sequence[Any] = field(default_factory=tuple)
    digest: int = 0


@final
@dataclass(frozen=True)
class Drawn:
    """A row whose in-process half was done; the rest is fetched in the background.

    Args:
      content: what the stream gave.
    """

    content: Any


@final
@dataclass(frozen=True)
class PastEnd:
    """A step past this worker's end of data."""


@final
@dataclass(frozen=True)
class Failed:
    """A step whose data failed.

    Args:
      error: what was raised.
      where: the samples, file or loader worker.
    """

    error: Exception
    where: str


Held = Share | PastEnd | Failed
"""What a rank holds of a step before the ranks have agreed on it."""


@final
@dataclass(frozen=True)
class Delivered:
    """An agreed step.

    Args:
      share: this worker's part.
      global_size: samples over all replicas, or ``None`` where that is not known.
    """

    share: Share
    global_size: int | None


@final
@dataclass(frozen=True)
class PassedOver:
    """A step without a sample on any rank.

    Args:
      share: this worker's empty part, to be given up; ``None`` past its end.
    """

    share: Share | None = None


@final
@dataclass(frozen=True)
class End:
    """The end of the data for every rank."""


@final
@dataclass(frozen=True)
class Raised:
    """The error that every rank raises at this step."""

    error: BaseException


Outcome = Delivered | PassedOver | End | Raised
"""What the ranks agreed on."""
