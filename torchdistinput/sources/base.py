"""What every source offers, and what it may find in the user's objects."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, final, runtime_checkable

from torch.utils.data import DataLoader

from torchdistinput.flow import Row, Stream

__all__ = ["HasWorkers", "HoldsTorchLoader", "RowStream", "SetsEpoch", "Shards", "Source", "tell_epoch"]


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


def tell_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tells a loader's sampler, batch sampler and dataset the epoch that comes, as far as they want to know. Local."""
    told: tuple[Any, ...] = (loader.sampler, loader.batch_sampler, loader.dataset)
    for each in told:
        if isinstance(each, SetsEpoch):
            each.set_epoch(epoch)


@final
class RowStream:
    """The stream over a generator of rows.

    Args:
      rows: the rows.
      in_background: whether reading them runs no user code in this process.
      close: ends what else there is to end.
      draws: calls user code that may draw from the default random state, where all ranks must draw the same.
    """

    def __init__(
        self,
        rows: Generator[Row, None, None],
        *,
        in_background: bool,
        close: Callable[[], None] | None = None,
        draws: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        self.in_background = in_background
        self._rows = rows
        self._close = close
        self._draws = draws

    def draw(self) -> Row | bool | None:
        """See ``Stream.draw``."""
        if self.in_background:
            return True
        if self._draws is None:
            return next(self._rows, None)
        row: Row | None = self._draws(lambda: next(self._rows, None))
        return row

    def fetch(self, drawn: Any) -> Row | None:
        """See ``Stream.fetch``."""
        row: Row | None = next(self._rows, None) if self.in_background else drawn
        return row

    def digest_of(self, drawn: Any) -> int:
        """See ``Stream.digest_of``."""
        return 0

    def close(self) -> None:
        """See ``Stream.close``. Closes the user's files and generators too, unless a thread may still read them."""
        close, self._close = self._close, None
        if close is not None:
            close()
        if not self.in_background:
            self._rows.close()
