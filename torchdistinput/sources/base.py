"""What every source offers, and what it may find in the user's objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from functools import partial
from typing import Any, Protocol, cast, final, runtime_checkable

import torch

from torchdistinput.errors import InputError
from torchdistinput.sources.in_worker import Failure
from torchdistinput.sources.iterable.cursor import Compared
from torchdistinput.sources.rng import Draw, plainly
from torchdistinput.sources.set_epoch import ToldEpochs
from torchdistinput.sources.torch_loader.open_runs import OpenRuns
from torchdistinput.step_types import Counted, Digest, PeriodicSync, SizedRow, Start, Stream

__all__ = [
    "DrawsAlone",
    "Exchange",
    "HoldsTorchLoader",
    "KeepsBetweenEpochs",
    "KnowsEpochs",
    "ReadByAll",
    "RowStream",
    "SeedsSamples",
    "Shards",
    "Source",
    "TellsEpochs",
    "TellsPart",
    "Track",
    "length_of",
]

_LOG = logging.getLogger("torchdistinput")

Exchange = Callable[[Callable[[], Any]], list[Any]]
"""Makes a plain value on every rank, or fails there; returns those of all ranks, or fails alike on all."""


class Source(Protocol):
    """The data of one distributed dataset, as one worker reads it."""

    draws_from_default_generator: bool
    """Whether making a stream draws from torch's default random state (rank 0's then counts for all ranks)."""
    certain_piece_size: int | None
    """The size of every piece, where it is certain."""
    largest_piece_size: int | None
    """The size that no piece exceeds, where it is known."""
    needs_default_state: bool
    """Whether the order of an epoch may follow from torch's default random state."""
    draws_order: bool
    """Whether ``open`` takes ``draws`` to begin an epoch with, and then to draw each batch of indices, the first one by
    the first ``next`` if not at once."""
    bound_to_world: bool
    """Whether a saved position fits the same number of workers only."""
    collective_state: bool
    """Whether each worker has a position of its own, so that all must meet for a state."""

    @property
    def may_lack_samples(self) -> bool:
        """Whether some replica may be left without a sample at some step."""

    @property
    def workers(self) -> OpenRuns | None:
        """The loader workers of this process, where it may have some."""

    @property
    def base_seed(self) -> str:
        """When torch's loader draws a seed for its workers: "every" epoch, the "first" one only, or "never" again.

        It draws from the random state that the order of the data may follow from. With "+again" the sampler is asked
        for its batches before and once more after each such draw. With "+drawn" that of the epoch itself was drawn
        before the random states that are told with it.
        """

    def fingerprint(self) -> Mapping[str, Any]:
        """Plain facts that must be equal on all ranks."""

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """Plain facts that must be equal on all ranks when an epoch starts, such as a generator's state."""

    def num_steps(self) -> int | None:
        """Steps of an epoch, where they are known before it is read."""

    def set_epoch(self, epoch: int) -> None:
        """Tells the user's sampler or dataset the epoch that comes, as ``DataLoader`` users do."""

    def close(self) -> None:
        """Ends loader workers that outlive an epoch. Idempotent; an ``open`` starts new ones."""

    def generators(self) -> Sequence[torch.Generator]:
        """The generators from which the order of an epoch follows, each once."""

    def check(self, position: Sequence[Any]) -> None:
        """Refuses a position that cannot be entered. Local.

        Raises:
          StateMismatch: it is malformed, or what it speaks of has changed since.
        """

    def resume(self, epoch: int, start: Start, share: Exchange) -> Start:
        """Makes ready for an ``open`` that does not begin at the front. Caller's thread.

        Args:
          epoch: its number.
          start: where the epoch is to begin.
          share: makes something on every rank and returns what all have made, by rank; raises alike on all.

        Returns:
          where it is to begin, as ``open`` takes it.

        Raises:
          StateMismatch: the position cannot be entered.
        """

    def open(self, epoch: int, draws: Draw, start: Start) -> Stream:
        """A stream of one epoch. Caller's thread.

        Args:
          epoch: its number.
          draws: calls user code that may draw from the default random state.
          start: where in the epoch it begins.
        """


@runtime_checkable
class DrawsAlone(Protocol):
    """A source whose workers may each draw from random states of their own, which are then part of their positions."""

    @property
    def draws_alone(self) -> bool:
        """Whether they do."""

    def first_position(self) -> list[Any]:
        """The position at the start of an epoch that begins now. Caller's thread."""

    def restore(self, position: Sequence[Any]) -> None:
        """Sets this worker's random states to those of a position. Caller's thread."""


@runtime_checkable
class SeedsSamples(Protocol):
    """A source in whose samples ``sample_seed()`` follows from a base that a state carries."""

    @property
    def sample_seed(self) -> int | None:
        """The base of the epoch begun last, or of the state that was loaded; ``None`` before."""

    def give_sample_seed(self, seed: int | None) -> None:
        """Sets the base of this and later epochs; ``None`` leaves it to the random state."""


@runtime_checkable
class KnowsEpochs(Protocol):
    """A source that keeps something from epoch to epoch."""

    def go_on_from(self, before: Source) -> None:
        """Takes over what a source of the same data kept, in whose place it comes. Local."""


@runtime_checkable
class TellsEpochs(Protocol):
    """A source that tells the user's objects the epoch, each time that one is opened."""

    @property
    def told(self) -> ToldEpochs:
        """What they were told."""


@runtime_checkable
class KeepsBetweenEpochs(Protocol):
    """A source whose data may keep a state of its own from epoch to epoch."""

    @property
    def keeps_between(self) -> bool:
        """Whether it does."""

    def front(self) -> list[Any]:
        """The position at which the epoch begins that comes next. Caller's thread."""


@runtime_checkable
class ReadByAll(Protocol):
    """A source that nobody can divide before it is read, so that every worker may have to read all of it."""

    @property
    def way_out(self) -> str:
        """What to do where the workers read different data; empty where they need not read the same."""


@runtime_checkable
class TellsPart(Protocol):
    """A source of map-style data."""

    @property
    def part(self) -> str:
        """Which samples it has, where they must be the same on all workers and that can be told; else nothing."""


@runtime_checkable
class HoldsTorchLoader(Protocol):
    """The drop-in ``DataLoader``, which stands on a higher floor."""

    @property
    def torch_loader(self) -> Any:
        """The torch loader of one process."""


@runtime_checkable
class Shards(Protocol):
    """A source that shards itself, as Hugging Face datasets do (policy HINT)."""

    def shard(self, num_shards: int, index: int) -> Any:
        """The ``sample_index``-th of ``num_shards`` parts."""


def length_of(data: object) -> int | None:
    """The length of the user's object; ``None`` where it has none, or ``len`` raises. It is not needed to read it.

    What is made of others, as torch's ``ChainDataset``, raises what ``len`` raises for one of those without a length;
    base classes raise ``NotImplementedError``.
    """
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except Exception as error:
        _LOG.debug("len() of a %s raised, so its length is not known: %r", type(data).__name__, error)
        return None


class Track(Protocol):
    """Knows where a stream of rows stands."""

    owns_state: bool
    """See ``Stream.owns_state``."""

    def drawn(self) -> None:
        """Another row was asked for, which is fetched in the background. Caller's thread."""

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``."""


@final
class RowStream:
    """The stream over a generator of rows.

    Args:
      rows: the rows; a ``Failure`` among them is raised in its place.
      in_background: whether reading them runs no user code in this process.
      close: ends what else there is to end.
      track: knows where the stream stands.
      draws: calls user code that may draw from the default random state, where all ranks must draw the same.
      periodic_sync: see ``Stream.periodic syncs``.
      strings: see ``Stream.strings``.
      one_structure: see ``Stream.one_structure``.
    """

    def __init__(
        self,
        rows: Generator[Counted | Compared | SizedRow | Failure, None, None],
        *,
        in_background: bool,
        track: Track,
        close: Callable[[], None] | None = None,
        draws: Draw | None = None,
        periodic_sync: PeriodicSync | None = None,
        strings: bool = False,
        one_structure: bool = False,
    ) -> None:
        self.in_background = in_background
        self.one_structure = one_structure
        self.strings = strings
        self.periodic_sync = periodic_sync
        self.draw: Callable[[], Counted | Compared | SizedRow | Failure | bool | None]
        """See ``Stream.draw``."""
        self._rows = rows
        self._read: Digest = 0  # of the row that was fetched last
        self._next = partial(next, rows, None)
        self._track = track
        self._close = close
        if in_background:
            self.draw = partial(_asked, track)
        elif draws is None or draws is plainly:
            self.draw = self._next
        else:
            self.draw = partial(draws, self._next)

    @property
    def owns_state(self) -> bool:
        """See ``Stream.owns_state``. As of the last position."""
        return self._track.owns_state

    def expect(self, rows: int) -> None:
        """See ``Stream.expect``."""

    def fetch(self, drawn: Any) -> Counted | None:
        """See ``Stream.fetch``."""
        row: Counted | Compared | SizedRow | Failure | None = self._next() if self.in_background else drawn
        if type(row) is Failure:
            row.reraise(goes_on=not isinstance(row.error, InputError))
        if type(row) is tuple:
            known = cast(SizedRow, row)
            self._read = known[2]
            return Counted(known[0], known[1].pieces)
        if type(row) is Compared:
            self._read = row.read
            return Counted(row.pieces, row.sizes)
        self._read = 0
        return cast("Counted | None", row)

    def digest_of(self, drawn: Any) -> Digest:
        """See ``Stream.digest_of``. Of the row that was fetched last: the number of the batch that it was cut from."""
        return self._read

    def position(self, rows: int) -> list[Any]:
        """See ``Stream.position``."""
        return self._track.position(rows)

    def close(self) -> None:
        """See ``Stream.close``. Closes the user's files and generators too, unless a thread may still read them."""
        if self._close is not None:
            self._close()
            self._close = None
        if self.in_background:
            return
        try:
            self._rows.close()
        except ValueError as error:
            if str(error) != "generator already executing":
                raise
            _LOG.debug("closed while another thread reads, which closes its files when it is done: %s", error)


def _asked(track: Track) -> bool:
    """Draws a row that is fetched in the background: all that is to be done here is to tell of it."""
    track.drawn()
    return True
