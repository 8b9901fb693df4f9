"""A torch sampler that shuffles in constant memory, by ``plan/permutation.py`` or ``plan/block_shuffle.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from torch.utils.data import Sampler

from torchdistinput.plan.block_shuffle import BlockShuffle
from torchdistinput.plan.permutation import Permutation
from torchdistinput.sources.checks import checked_int

_MAX_LENGTH: Final = 2**45
_WINDOW: Final = 16


@final
class ShuffleSampler(Sampler[int]):
    """Shuffles ``[0, n)`` anew in each epoch, in constant memory, and can start anywhere in the order at once.

    The order of an epoch is a function of ``(n, seed, epoch)``, the same on every rank and machine and in every
    version; no random state is read or moved. torch's ``RandomSampler`` draws the whole order first: with 10**9 samples
    8 GB and minutes, here nothing. Each ``iter()`` is the next epoch, starting from 0 or from what ``set_epoch`` said.
    Local: no communication.

    >>> list(torch.utils.data.DataLoader(range(10), batch_size=8, sampler=tdi.ShuffleSampler(10, seed=1)))
    [tensor([8, 2, 1, 3, 4, 9, 7, 0]), tensor([5, 6])]

    **Data that is stored in blocks**, such as row groups, or chunks of HDF5 and zarr: with ``block`` whole blocks are
    shuffled, and the samples of each ``window`` consecutive blocks among each other; see ``plan.block_shuffle``. A
    dataset that keeps the last ``window`` blocks that it read, for example by ``functools.lru_cache``, then reads each
    block once in an epoch. Under policy DATA each rank has a part of each batch, and so reads the blocks too.

    Args:
      n: how many samples, from 0 to ``2**45``.
      seed: an int of any size and sign, the same on every rank.
      block: samples of a block as the data is stored; ``None``: the order is a full shuffle.
      window: blocks whose samples are mixed; with ``block`` only.

    Raises:
      TypeError: an argument is not an int.
      ValueError: ``n`` is out of range; ``block`` or ``window`` is less than 1; there is a ``window`` without a
        ``block``.
    """

    def __init__(self, n: int, seed: int = 0, *, block: int | None = None, window: int | None = None) -> None:
        length = checked_int("n", n)
        if not 0 <= length <= _MAX_LENGTH:
            raise ValueError(f"n is {length}; a ShuffleSampler needs 0 <= n <= 2**45, the number of samples.")
        self._length = length
        self._seed = checked_int("seed", seed)
        if block is None and window is not None:
            raise ValueError(f"window={window!r} was given without block, the number of samples of a block")
        self._block = None if block is None else checked_int("block", block, at_least=1)
        self._window = checked_int("window", _WINDOW if window is None else window, at_least=1)
        self._epoch = 0

    @property
    def seed(self) -> int:
        """The seed of all epochs. Local."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch of the next ``iter()``. Local."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next ``iter()``; later ones follow. Local.

        Raises:
          TypeError: ``epoch`` is not an int.
        """
        self._epoch = checked_int("epoch", epoch)

    @property
    def key(self) -> int | str:
        """What the orders of all epochs follow from, with ``n``: the seed, and the blocks. Local."""
        return self._seed if self._block is None else f"{self._seed}, blocks of {self._block}, {self._window} a window"

    def order(self, epoch: int) -> Permutation | BlockShuffle:
        """The order of an epoch, for looking up any position in it. Local."""
        if self._block is None:
            return Permutation(self._length, self._seed, epoch)
        return BlockShuffle(self._length, self._block, self._window, self._seed, epoch)

    def next_order(self) -> Permutation | BlockShuffle:
        """Begins the next epoch, as ``iter()`` does, and returns its order. Local."""
        order = self.order(self._epoch)
        self._epoch += 1
        return order

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """The samples of the next epoch."""
        return iter(self.next_order())
