"""What every source offers, and what it may find in the user's objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, final, runtime_checkable

from torchdistinput.flow import Row, Stream

__all__ = ["HasWorkers", "HoldsTorchLoader", "RowStream", "SetsEpoch", "Shards", "Source"]


class Source(Protocol):
    """The data of one distributed dataset, as one worker reads it."""

    draws_from_default_generator: bool
    """Whether making a stream draws from torch's default random state (rank 0's then counts for all ranks)."""
    certain_piece_size: int | None
    """The size of every piece, where it is certain."""
    largest_piece_size: int | None
    """The size that no piece exceeds, where it is known."""

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

    def open(self, epoch: int, draws: Callable[[Callable[[], Any]], Any]) -> Stream:
        """A stream of one epoch. Caller's thread.

        Args:
          epoch: its number.
          draws: calls user code that may draw from the default random state.
        """


@runtime_checkable
class SetsEpoch(Protocol):
    """A sampler or dataset with torch's ``set_epoch``."""

    def set_epoch(self, epoch: int) -> None:
        """Takes the number of the coming epoch."""


@runtime_checkable
class HasWorkers(Protocol):
    """A source that reads through loader workers."""

    def lost_workers(self) -> str:
        """Which of them died, in words; nothing where none did. Local."""


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
        """The ``index``-th of ``num_shards`` parts."""


@final
class RowStream:
    """The stream over an iterator of rows.

    Args:
      rows: the rows.
      in_background: whether reading the iterator runs no user code in this process.
      close: ends what the iterator holds.
    """

    def __init__(self, rows: Iterator[Row], *, in_background: bool, close: Callable[[], None]) -> None:
        self.in_background = in_background
        self._rows = rows
        self._close = close

    def draw(self) -> Row | bool | None:
        """See ``Stream.draw``."""
        return True if self.in_background else next(self._rows, None)

    def fetch(self, drawn: Any) -> Row | None:
        """See ``Stream.fetch``."""
        row: Row | None = next(self._rows, None) if self.in_background else drawn
        return row

    def close(self) -> None:
        """See ``Stream.close``."""
        self._close()
