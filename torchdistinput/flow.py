"""What flows through the house: rows from a source, shares from stage to stage, outcomes to the consumer.

A *row* is one piece for each local replica, in order; ``None`` stands for an empty piece, which is made later, when the
structure is known. A stream of rows is read in two halves, so that user code runs where torch would run it: ``draw`` on
the caller's thread (the user's sampler, and in-process data), ``fetch`` on the thread that ``in_background`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, final

__all__ = [
    "MOST_TOLD",
    "NOTHING_SKIPPED",
    "NOWHERE",
    "ROWS_BETWEEN_LANDMARKS",
    "Ahead",
    "Digest",
    "Drawn",
    "End",
    "Failed",
    "Held",
    "Kinds",
    "Known",
    "Landmarks",
    "Like",
    "Origin",
    "Outcome",
    "PassedOver",
    "PastEnd",
    "Raised",
    "ReadFailure",
    "Row",
    "Rows",
    "Sealed",
    "Share",
    "Skipped",
    "Start",
    "Stream",
    "Thinned",
]

MOST_TOLD: Final = 10
"""How many of the samples that were left out are told of, by each worker in each epoch."""

Digest = int | Callable[[], int]
"""A number of what the user's sampler drew, equal on all ranks, or what makes it when somebody asks; 0: of nothing."""

Row = list[Any]
"""One piece for each local replica; ``None`` for an empty one, ``Thinned`` around one that lost samples."""


@final
class Like:
    """How a reader in this process found a row to be: all rows that come with the same object are exactly alike.

    Args:
      kind: the same object for all rows that are alike but for their sizes.
      samples: samples in the batch that the row is of.
      sizes: samples in each piece.
    """

    def __init__(self, kind: object, samples: int, sizes: tuple[int, ...]) -> None:
        self.kind = kind
        self.samples = samples
        self.sizes = sizes
        self.is_full = 0 not in sizes
        """Whether no piece is empty."""


@final
class Kinds:
    """The kinds of the rows that one reader makes: one with an empty piece tells nothing of the others."""

    def __init__(self) -> None:
        self._full, self._lacking = object(), object()

    def like(self, samples: int, limits: Sequence[tuple[int, int]]) -> Like:
        """How a row will be, with the limits of its pieces in a batch of so many samples."""
        sizes = tuple(hi - lo for lo, hi in limits)
        return Like(self._lacking if 0 in sizes else self._full, samples, sizes)


Known = tuple[Row, Like, Digest]
"""A row, how it is, and what the sampler drew for it. A plain tuple, as one is made for every step."""


class Origin(NamedTuple):
    """Where data failed, and how, as far as the place of the failure knew it. Plain values, of bounded size."""

    indices: tuple[int | str, ...] | None = None
    """The samples."""
    file: str | None = None
    offset: int | None = None
    """The start of the record in the file, in bytes."""
    worker: int | None = None
    """The loader worker."""
    kind: str | None = None
    """The name of the exception's type; where the exception itself could not come along, it has another one."""
    text: str | None = None
    """The exception as Python prints it."""
    traceback: str | None = None


NOWHERE: Final = Origin()


class ReadFailure(Exception):
    """The data failed. The original is the ``__cause__``; ``where`` tells in words which samples, file or worker."""

    def __init__(self, where: str, origin: Origin = NOWHERE) -> None:
        super().__init__(where)
        self.where = where
        self.origin = origin


class Skipped(NamedTuple):
    """Samples that were left out, as they could not be read."""

    samples: int = 0
    """How many."""
    first: tuple[str, ...] = ()
    """The first few, each in a line: the file and record or offset, or the index, and the error."""

    def plus(self, other: Skipped) -> Skipped:
        """Both."""
        return Skipped(self.samples + other.samples, (*self.first, *other.first)[:MOST_TOLD])  # torch pins to lists


class Thinned(NamedTuple):
    """A piece from which samples were left out. A named tuple, so that torch pins what is in it."""

    piece: Any
    """What is left; ``None`` where nothing is."""
    skipped: Skipped
    left_out: tuple[int, ...] = ()
    """Their positions among the samples that the piece was to have."""


class Sealed(NamedTuple):
    """A batch that nobody looks into, as it stays in this process. A named tuple, so that torch pins what is in it."""

    content: Any
    size: int
    """Samples in it."""


NOTHING_SKIPPED: Final = Skipped()

ROWS_BETWEEN_LANDMARKS: Final = 64
"""Where the workers tell each other something, see ``Landmarks``."""


@final
@dataclass(frozen=True)
class Start:
    """Where an epoch begins, if not at its first row.

    Args:
      steps: steps that were delivered before.
      samples: samples in them, over all replicas.
      drawn: the digest of what the sampler drew for the last of them; 0 where there is none to compare.
      position: what the stream's ``position`` said then; ``None``: where so many steps end, counted from the front.
      replay: whole epochs whose random draws come before this one.
      base_seed: when a loader draws the seed of its workers; see ``sources.base.Source``.
    """

    steps: int = 0
    samples: int = 0
    drawn: int = 0
    position: Sequence[Any] | None = None
    replay: int = 0
    base_seed: str = ""


class Landmarks(Protocol):
    """What a worker tells the others from time to time of where it stands, so that each knows all positions."""

    every: int
    """Rows from one landmark to the next, the same on every rank."""
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

        A plain tuple is ``Known``, the row itself: there is nothing to fetch.
        """

    def expect(self, rows: int) -> None:
        """So many will be drawn at once: what nobody can tell from drawing one by one may be done together."""

    def fetch(self, drawn: Any) -> Row | None:
        """The row; ``None`` past the end, where only the reading itself finds the end."""

    def digest_of(self, drawn: Any) -> Digest:
        """Of what the user's sampler drew for the row; 0 where there is none to compare."""

    def close(self) -> None:
        """Ends loader workers and open files. Idempotent."""


class Stream(Rows, Protocol):
    """One epoch of one worker's rows, which knows where it stands."""

    strings: bool
    """Whether it is certain that pieces which are lists hold strings and nothing else, so that nobody needs to look."""

    @property
    def owns_state(self) -> bool:
        """Whether the position holds a state of the user's own, which may differ from worker to worker."""

    @property
    def landmarks(self) -> Landmarks | None:
        """What the workers tell each other, where a position depends on what others read."""

    def position(self, rows: int) -> list[Any]:
        """Where the stream stands after so many rows since it was opened, in plain ints, strings and lists.

        Caller's thread, never for fewer rows than before. What is given back as ``Start.position`` goes on there.
        """


@final
@dataclass(slots=True)
class Share:
    """This worker's part of a step: one piece for each local replica; and once it is agreed, what all ranks know of it.

    Args:
      pieces: the batches; ``None`` for an empty one that could not be made yet.
      sizes: samples in each.
      parcels: the pieces on their way to the devices.
      drew: of what the sampler drew; 0 where there is none to compare.
      skipped: samples that are missing in the pieces.
      global_size: of a step that is agreed: samples over all replicas.
      rows: of such a step: rows of the stream up to this one, those passed over included.
    """

    pieces: list[Any]
    sizes: tuple[int, ...]
    parcels: Sequence[Any] = ()
    drew: Digest = 0
    skipped: Skipped = NOTHING_SKIPPED
    global_size: int = 0
    rows: int = 0

    @property
    def digest(self) -> int:
        """The number of what the sampler drew. It is made when somebody asks: one rank alone never compares it."""
        drew = self.drew
        if not isinstance(drew, int):
            drew = self.drew = drew()
        return drew


@final
class Drawn(NamedTuple):
    """A row whose in-process half was done; the rest is fetched in the background."""

    content: Any
    """What the stream gave."""


@final
class PastEnd:
    """A step past this worker's end of data."""


@final
class Failed(NamedTuple):
    """A step whose data failed.

    Args:
      error: what was raised.
      where: the samples, file or loader worker, in words.
      origin: the same as values.
    """

    error: Exception
    where: str
    origin: Origin = NOWHERE


Held = Share | PastEnd | Failed
"""What a rank holds of a step before the ranks have agreed on it."""


@final
class PassedOver(NamedTuple):
    """A step without a sample on any rank.

    Args:
      share: this worker's empty part, to be given up; ``None`` past its end.
    """

    share: Share | None = None


@final
class Ahead(NamedTuple):
    """From here on, the ranks read so far ahead.

    Args:
      steps: beyond the one that the consumer waits for.
    """

    steps: int


@final
class End:
    """The end of the data for every rank."""


@final
class Raised(NamedTuple):
    """The error that every rank raises at this step."""

    error: BaseException


Outcome = Share | PassedOver | Ahead | End | Raised
"""What the ranks agreed on."""
