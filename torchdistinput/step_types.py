"""The types that pass through the pipeline, from the source to the training loop: rows and steps.

- A source reads *rows*. A row is one piece of a batch for each local replica, in order. ``None`` stands for an empty
  piece; it is made later, when the structure of the batches is known.
- The pipeline passes on one ``LocalStep`` for each row, and for each draw past the end of the data.

Rows are read in two halves, so that user code runs on the thread on which torch would run it. ``draw`` runs on the
caller's thread: the user's sampler, and a dataset that is read in this process. ``fetch`` does the rest. It may run on
the background thread where ``in_background`` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, final

from torchdistinput.plan.balancing import Division, StepCosts

MAX_DESCRIBED: Final = 10
"""How many left-out samples each worker describes in an epoch; it only counts the others."""

Digest = int | Callable[[], int]
"""A hash of the indices that the user's sampler drew, for the ranks to compare; or a function that makes the hash when
it is needed. 0 where there is nothing to compare."""


@final
@dataclass(frozen=True)
class FilesRead:
    """The ``Digest`` of the files that a reader has read to their end, where some of them ended in this batch."""

    number: int
    ends: tuple[tuple[int, str, int], ...]
    """Of the first of these files: how many files ended before it, its name, and how many records it had."""

    def __call__(self) -> int:
        """The digest."""
        return self.number


@final
@dataclass(frozen=True)
class DividedDraw:
    """The ``Digest`` of a draw whose batch was divided by cost. States do not depend on the division."""

    draw_digest: Digest
    division: Division

    def __call__(self) -> int:
        """The digest of the draw."""
        return self.draw_digest if isinstance(self.draw_digest, int) else self.draw_digest()


Row = list[Any]
"""One piece for each local replica; ``None`` for an empty one, ``PartialPiece`` around one that lost samples."""


@final
class RowSizes(NamedTuple):
    """The sizes of a row and of its batch. A reader uses one object for all batches that are cut in the same way."""

    samples: int
    """Samples in the batch; 0 where nobody asks for them."""
    pieces: tuple[int, ...]
    """Samples in each piece of the row, counted where the batch was cut; those that were left out are included."""
    structure: Any = None
    """The structure of the batches (``batches.schema``), where whoever made the row knows it; pickled, from a loader
    worker. The same object for all batches of one structure."""


SizedRow = tuple[Row, RowSizes, Digest]
"""A row, its sizes, and the digest of the sampler's draw, or of the data that was read.

A plain tuple, since one is made for every step."""


class Origin(NamedTuple):
    """Where and how the data failed; ``None`` for an unknown value. Plain values of bounded size."""

    indices: tuple[int | str, ...] | None = None
    """The indices of the samples."""
    file: str | None = None
    offset: int | None = None
    """The start of the record in the file, in bytes."""
    worker: int | None = None
    """The number of the loader worker."""
    kind: str | None = None
    """The class name of the exception. An exception that cannot be pickled arrives as one of another class."""
    text: str | None = None
    """The exception as Python prints it."""
    traceback: str | None = None


NO_ORIGIN: Final = Origin()


class ReadFailure(Exception):
    """The data failed. The original exception is the ``__cause__``.

    Args:
      where: the samples, the file or the loader worker, in words.
      origin: the same facts as values.
    """

    def __init__(self, where: str, origin: Origin = NO_ORIGIN) -> None:
        super().__init__(where)
        self.where = where
        self.origin = origin


class Skipped(NamedTuple):
    """Samples that were left out because they could not be read."""

    samples: int = 0
    """The number of samples."""
    first: tuple[str, ...] = ()
    """One line for each of the first samples: the file and record or offset, or the index, and the error."""

    def plus(self, other: Skipped) -> Skipped:
        """The samples of both."""
        return Skipped(self.samples + other.samples, (*self.first, *other.first)[:MAX_DESCRIBED])  # torch pins to lists


class PartialPiece(NamedTuple):
    """A piece from which samples were left out. A named tuple, so that torch pins its content."""

    piece: Any
    """The remaining samples; ``None`` where there are none."""
    skipped: Skipped
    left_out: tuple[int, ...] = ()
    """The positions of the left-out samples in the full piece."""


class Described(NamedTuple):
    """A piece, with the structure of all. A named tuple, so that torch pins its content."""

    piece: Any
    structure: Any
    """See ``RowSizes.structure``."""


class OpaqueBatch(NamedTuple):
    """A batch that is passed through unchanged and unchecked. A named tuple, so that torch pins its content."""

    content: Any
    size: int
    """Samples in it."""


NOTHING_SKIPPED: Final = Skipped()

SourceCounts = dict[str, dict[str, int]]
"""``samples`` and ``tokens`` by the name of a source."""


@final
@dataclass(frozen=True)
class Start:
    """The place at which an epoch begins. The defaults are the first row.

    Args:
      steps: steps that were delivered before.
      samples: samples in these steps, over all replicas.
      draw_digest: the digest of the sampler's draw for the last of these steps; 0 where there is none to compare.
      position: the value of the stream's ``position`` there; ``None``: after ``steps`` steps from the first row.
      replay: whole epochs whose random draws come before this one.
      seeds: when torch's loader draws the base seed of its loader workers; ``None``: as the source says.
    """

    steps: int = 0
    samples: int = 0
    draw_digest: int = 0
    position: Sequence[Any] | None = None
    replay: int = 0
    seeds: str | None = None


class Rows(Protocol):
    """Rows that are read in two halves."""

    in_background: bool
    """Whether ``fetch`` may run on the background thread; else it runs on the caller's, right after ``draw``."""

    def draw(self) -> Any:
        """Runs the user code for the next row in this process; ``None`` at the end. Caller's thread.

        Returns a value for ``fetch``. A plain tuple is a ``SizedRow``, the row itself, and needs no ``fetch``.
        """

    def fetch(self, drawn: Any) -> SizedRow | None:
        """The row for a value from ``draw``; ``None`` past the end, where only reading the data finds the end."""

    def close(self) -> None:
        """Ends loader workers and open files. Idempotent."""


class Stream(Rows, Protocol):
    """One epoch of one worker's rows, with its position for a saved state."""

    structure: Any
    """The structure of the elements, where it is certain before the first one."""
    one_structure: bool
    """Whether the source yields ready batches, so that all must be of one structure; see ``schema_check``."""

    @property
    def samples_passed(self) -> int | None:
        """The samples of the steps before the one where the stream begins, where it has counted them."""

    @property
    def owns_state(self) -> bool:
        """Whether the position holds the ``state_dict`` of a user's object, which may differ from worker to worker."""

    def position(self, rows: int) -> list[Any]:
        """The position of the stream after ``rows`` rows since it was opened, in plain ints, strings and lists.

        Caller's thread; ``rows`` never decreases. A stream that is opened with this value as ``Start.position``
        continues there.
        """

    def counts(self, rows: int) -> SourceCounts | None:
        """The samples and tokens of each source of a mixture, over all ranks, after so many rows; else ``None``.

        From the start of the epoch. Caller's thread; ``rows`` as in ``position``.
        """


class Failed(NamedTuple):
    """How the data of a step failed.

    Args:
      error: the exception.
      where: the samples, file or loader worker, in words.
      origin: the same facts as values.
    """

    error: BaseException
    where: str
    origin: Origin = NO_ORIGIN


@final
@dataclass(slots=True)
class LocalStep:
    """A step of this rank: one piece for each local replica. One object from the draw to the loop.

    It is *drawn*, then *made* (its pieces, its failure or the end of the data are known), then *agreed* by all ranks.

    Args:
      pieces: the batches; ``None`` for an empty one that could not be made yet.
      sizes: the number of samples of each piece.
      transfers: the pieces whose copies to the devices were begun.
      draw_digest: the digest of the sampler's draw; 0 where there is nothing to compare.
      costs: how the batch was divided by cost, if it was.
      read: the digest of the pieces, for ranks that must read the same data; 0 where it was not made.
      ends: the files that ended in the batch of this step, see ``FilesRead.ends``; for messages.
      skipped: samples that are missing in the pieces.
      global_size: samples over all replicas, once the step is agreed.
      rows: rows of the stream up to this one, empty steps included, once the step is agreed.
      local_sums: the sums over the pieces that the user asked for, by the names in order.
      sums: the same over all replicas, once the step is agreed.
      drawn: the value of the stream's ``draw``, until the step is made.
      is_made: whether it is made.
      is_past_end: whether it is past this rank's end of data.
      failure: how its data failed.
      is_passed: whether it is agreed, and is not delivered: no rank has a sample.
    """

    pieces: Sequence[Any] = ()
    sizes: tuple[int, ...] = ()
    transfers: Sequence[Any] = ()
    draw_digest: Digest = 0
    skipped: Skipped = NOTHING_SKIPPED
    global_size: int = 0
    rows: int = 0
    read: int = 0
    ends: Sequence[tuple[int, str, int]] = ()
    local_sums: Sequence[int] = ()
    sums: Sequence[int] = ()
    drawn: Any = None
    is_made: bool = False
    is_past_end: bool = False
    failure: Failed | None = None
    is_passed: bool = False
    costs: StepCosts | None = None

    @property
    def digest(self) -> int:
        """The digest of the sampler's draw, computed at the first use: without other ranks it is rarely needed."""
        if not isinstance(self.draw_digest, int):
            self.draw_digest = self.draw_digest()
        return self.draw_digest

    @property
    def compared(self) -> int:
        """The number of the draw and of the division that must be the same on all ranks."""
        return self.digest if self.costs is None else self.digest + self.costs.digest
