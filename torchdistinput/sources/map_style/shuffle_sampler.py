"""A torch sampler that shuffles in constant memory, by the keyed permutation of ``plan/permutation.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

from torch.utils.data import Sampler

from torchdistinput.plan.permutation import Permutation
from torchdistinput.sources.checks import checked_int

__all__ = ["ShuffleSampler"]

_MAX_LENGTH: Final = 2**62


@final
class ShuffleSampler(Sampler[int]):
    """Shuffles ``[0, n)`` anew in each epoch, in constant memory, and can start anywhere in the order at once.

    The order of an epoch is a function of ``(n, seed, epoch)``, the same on every rank and machine and in every
    version; no random state is read or moved. torch's ``RandomSampler`` draws the whole order first: with 10**9 samples
    8 GB and minutes, here nothing. Each ``iter()`` is the next epoch, starting from 0 or from what ``set_epoch`` said.
    Local: no communication.

    Give it to any loader::

        DataLoader(dataset, batch_size=256, sampler=tdi.ShuffleSampler(len(dataset), seed=1))

    >>> list(ShuffleSampler(10, seed=1))
    [8, 2, 1, 3, 4, 9, 7, 0, 5, 6]

    Args:
      n: how many samples, from 0 to ``2**62``.
      seed: an int of any size and sign, the same on every rank.

    Raises:
      TypeError: ``n`` or ``seed`` is not an int.
      ValueError: ``n`` is out of range.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        length = checked_int("n", n)
        if not 0 <= length <= _MAX_LENGTH:
            raise ValueError(f"n is {length}; a ShuffleSampler needs 0 <= n <= 2**62, the number of samples.")
        self._length = length
        self._seed = checked_int("seed", seed)
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

    def order(self, epoch: int) -> Permutation:
        """The order of an epoch, for looking up any position in it. Local."""
        return Permutation(self._length, self._seed, epoch)

    def next_order(self) -> Permutation:
        """Begins the next epoch, as ``iter()`` does, and returns its order. Local."""
        order = self.order(self._epoch)
        self._epoch += 1
        return order

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        """The samples of the next epoch."""
        return iter(self.next_order())
