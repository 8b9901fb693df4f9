"""What is passed on, from the source to the user's loop: rows, shares, outcomes.

- A source reads *rows*. A row is one piece of a batch for each local replica, in order. ``None`` stands for an empty
  piece; it is made later, when the structure of the batches is known.
- The stages pass on *shares*: a row that was measured, as this worker's part of a step.
- What all ranks agreed on is an *outcome*: a share that every rank now delivers, a step to pass over, how far to read
  ahead from here on, the end, or an error.

Rows are read in two halves, so that user code runs where torch would run it. ``draw`` runs on the caller's thread: the
user's sampler, and data that is read in this process. ``fetch`` does the rest; it may run on the background thread
where ``in_background`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, final, runtime_checkable

__all__ = [
    "MOST_TOLD",
    "NOTHING_SKIPPED",
    "NOWHERE",
    "ROWS_BETWEEN_LANDMARKS",
    "Ahead",
    "CatchesUp",
    "Counted",
    "Digest",
    "Drawn",
    "EmptyStep",
    "End",
    "Failed",
    "Held",
    "LocalStep",
    "Missed",
    "OpaqueBatch",
    "Origin",
    "Outcome",
    "PartialPiece",
    "PastEnd",
    "PeriodicSync",
    "Raised",
    "ReadFailure",
    "Row",
    "RowSizes",
    "Rows",
    "SizedRow",
    "Skipped",
    "Start",
    "Stream",
]

MOST_TOLD: Final = 10
"""Of how many samples that were left out each worker tells in an epoch; the others are only counted."""

Digest = int | Callable[[], int]
"""A number made of what the user's sampler drew, so that ranks can compare that; or a function that makes the number
when it is asked for. 0 where there is nothing to compare."""

Row = list[Any]
"""One piece for each local replica; ``None`` for an empty one, ``PartialPiece`` around one that lost samples."""


@final
class Counted(NamedTuple):
    """A row, and how many samples each piece has: the number of the samples that it was made of.

    They were counted where the batch was cut. A ``PartialPiece`` piece has fewer by those that it lost.
    """

    pieces: Row
    sizes: tuple[int, ...]


@final
class RowSizes(NamedTuple):
    """How a row is cut from its batch. A reader gives the same object for all batches that are cut alike."""

    samples: int
    """Samples in the batch."""
    pieces: tuple[int, ...]
    """Samples in each piece of the row."""
    schema: object = None
    """The same object for all batches that the reader knows to have one schema; ``None`` where it knows nothing."""


SizedRow = tuple[Row, RowSizes, Digest]
"""A row that a reader in this process made, its sizes, and the digest of what the sampler drew.

A plain tuple, since one is made for every step."""


class Origin(NamedTuple):
    """Where and how data failed, as far as that is known where it failed. Plain values, of bounded size."""

    indices: tuple[int | str, ...] | None = None
    """The samples."""
    file: str | None = None
    offset: int | None = None
    """The start of the record in the file, in bytes."""
    worker: int | None = None
    """The loader worker."""
    kind: str | None = None
    """The name of the type of what was raised; an exception that cannot travel arrives as one of another type."""
    text: str | None = None
    """The exception as Python prints it."""
    traceback: str | None = None


NOWHERE: Final = Origin()


class ReadFailure(Exception):
    """The data failed. The original is the ``__cause__``; ``where`` tells in words which samples, file or worker.

    Args:
      where: that.
      origin: the same as values.
      goes_on: whether the next row can be read, and is to be, as in torch's loader.
    """

    def __init__(self, where: str, origin: Origin = NOWHERE, *, goes_on: bool = False) -> None:
        super().__init__(where)
        self.where = where
        self.origin = origin
        self.goes_on = goes_on


class Skipped(NamedTuple):
    """Samples that were left out because they could not be read."""

    samples: int = 0
    """How many."""
    first: tuple[str, ...] = ()
    """The first few, each in a line: the file and record or offset, or the index, and the error."""

    def plus(self, other: Skipped) -> Skipped:
        """Both."""
        return Skipped(self.samples + other.samples, (*self.first, *other.first)[:MOST_TOLD])  # torch pins to lists


class PartialPiece(NamedTuple):
    """A piece from which samples were left out. A named tuple, so that torch pins what is in it."""

    piece: Any
    """What is left; ``None`` where nothing is."""
    skipped: Skipped
    left_out: tuple[int, ...] = ()
    """Positions of the samples left out, among those that the piece was to have."""


class OpaqueBatch(NamedTuple):
    """A batch that nobody looks into: it stays in this process. A named tuple, so that torch pins what is in it."""

    content: Any
    size: int
    """Samples in it."""


NOTHING_SKIPPED: Final = Skipped()

ROWS_BETWEEN_LANDMARKS: Final = 64
"""Rows from one periodic sync to the next: there the workers tell each other something, see ``PeriodicSync``."""


@final
@dataclass(frozen=True)
class Start:
    """Where an epoch begins, if not at its first row.

    Args:
      steps: steps that were delivered before.
      samples: samples in them, over all replicas.
      drawn: the digest of what the sampler drew for the last of them; 0 where there is none to compare.
      position: what the stream's ``position`` said there; ``None`` where so many steps, counted from the front, end.
      replay: whole epochs whose random draws come before this one.
      base_seed: when a loader draws the seed of its workers; see ``sources.base.Source``.
    """

    steps: int = 0
    samples: int = 0
    drawn: int = 0
    position: Sequence[Any] | None = None
    replay: int = 0
    base_seed: str = ""


class PeriodicSync(Protocol):
    """What a worker tells the others of where it stands, from time to time: so every worker knows all positions."""

    every: int
    """Rows from one periodic sync to the next, the same on every rank."""
    early: bool
    """Whether there are some before the first of these, after 1, 2, 4, ... rows."""

    def mine(self, rows: int) -> str:
        """Where this worker stands after so many rows. Any thread."""

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        """Takes what all ranks said, by rank. Any thread."""


class Rows(Protocol):
    """Rows that are read in two halves."""

    in_background: bool
    """Whether ``fetch`` may run on the background thread; else it runs on the caller's, right after ``draw``."""

    def draw(self) -> Any:
        """Takes what belongs to the next row from user code in this process; ``None`` at the end. Caller's thread.

        A plain tuple is a ``SizedRow``, the row itself: there is nothing to fetch.
        """

    def expect(self, rows: int) -> None:
        """So many rows will be drawn at once; what is done for each may be done together, if no user can tell."""

    def fetch(self, drawn: Any) -> Counted | None:
        """The row; ``None`` past the end, where only the reading itself finds the end."""

    def digest_of(self, drawn: Any) -> Digest:
        """The digest of what the user's sampler drew for the row; 0 where there is nothing to compare."""

    def close(self) -> None:
        """Ends loader workers and open files. Idempotent."""


class Stream(Rows, Protocol):
    """One epoch of one worker's rows, which knows where it stands."""

    strings: bool
    """Whether pieces that are lists certainly hold strings and nothing else, so that nobody needs to look."""
    one_structure: bool
    """Whether the source yields its batches ready, so that all must be of one structure; see ``schema_check``."""

    @property
    def owns_state(self) -> bool:
        """Whether the position holds a state of the user's own, which may differ from worker to worker."""

    @property
    def periodic_sync(self) -> PeriodicSync | None:
        """What the workers tell each other, where a position depends on what others read."""

    def position(self, rows: int) -> list[Any]:
        """Where the stream stands after so many rows since it was opened, in plain ints, strings and lists.

        Caller's thread, never for fewer rows than before. What is given back as ``Start.position`` goes on there.
        """


@runtime_checkable
class CatchesUp(Protocol):
    """A stream that may draw from generators of the user's further ahead than torch would."""

    draws_ahead: bool
    """Whether it does."""

    def catch_up(self, rows: int) -> None:
        """The user asks for so many rows since it was opened: the generators are as torch would leave them then.

        Caller's thread.
        """


@final
@dataclass(slots=True)
class LocalStep:
    """This worker's part of a step: one piece for each local replica; and what all ranks know of it, once it is agreed.

    Args:
      pieces: the batches; ``None`` for an empty one that could not be made yet.
      sizes: samples in each.
      parcels: the pieces on their way to the devices.
      drew: the digest of what the sampler drew; 0 where there is nothing to compare.
      read: the digest of the pieces, for the ranks that read the same ones; 0 where it was not made.
      skipped: samples that are missing in the pieces.
      global_size: samples over all replicas, once the step is agreed.
      rows: rows of the stream up to this one, those passed over included, once the step is agreed.
    """

    pieces: Sequence[Any]
    sizes: tuple[int, ...]
    parcels: Sequence[Any] = ()
    drew: Digest = 0
    skipped: Skipped = NOTHING_SKIPPED
    global_size: int = 0
    rows: int = 0
    read: int = 0

    @property
    def digest(self) -> int:
        """The number made of what the sampler drew. Made when it is asked for: a rank that is alone seldom asks."""
        drew = self.drew
        if not isinstance(drew, int):
            drew = self.drew = drew()
        return drew


@final
class Drawn(NamedTuple):
    """A row that was drawn in this process; the rest of it is fetched in the background."""

    content: Any
    """What the stream's ``draw`` gave."""


@final
class PastEnd:
    """A step past this worker's end of data."""


@final
class Failed(NamedTuple):
    """A step whose data failed.

    Args:
      error: what was raised; only where ``goes_on`` may it be no ``Exception``, but a Ctrl-C, say.
      where: the samples, file or loader worker, in words.
      origin: the same as values.
      goes_on: see ``ReadFailure``.
    """

    error: BaseException
    where: str
    origin: Origin = NOWHERE
    goes_on: bool = False


Held = LocalStep | PastEnd | Failed
"""What a rank holds of a step before the ranks have agreed on it."""


@final
class EmptyStep(NamedTuple):
    """A step without a sample on any rank.

    Args:
      share: this worker's empty part, to be given up; ``None`` past the worker's end of data.
    """

    share: LocalStep | None


@final
class Ahead(NamedTuple):
    """How far the ranks read ahead from here on.

    Args:
      steps: how many, beyond the one that the consumer waits for.
    """

    steps: int


@final
class End:
    """The end of the data for every rank."""


@final
class Missed(NamedTuple):
    """A step whose data failed, in a process that is alone: its error is raised, and the epoch goes on, as in torch."""

    error: BaseException


@final
class Raised(NamedTuple):
    """The error that every rank raises at this step."""

    error: BaseException


Outcome = LocalStep | EmptyStep | Ahead | End | Missed | Raised
"""What the ranks agreed on."""
