"""When torch's ``DataLoader`` draws the base seed of its loader workers, as far as a resumed epoch must know it.

torch draws one base seed for each epoch; with persistent loader workers, one for the first epoch only. The seed comes
from the random state on which the order of the data may depend. A resumed epoch starts its loader workers anew. It must
draw a seed where the uninterrupted epoch drew one, and only there, or all later draws would differ.

torch calls ``iter(sampler)`` before it draws the seed. Where it starts loader workers, it calls ``iter(sampler)`` once
more after the draw, and uses the second iterator. A sampler that draws at once when ``iter`` is called, as samplers do
that return ``iter(batches)``, then draws twice.
"""

from __future__ import annotations

from enum import Enum
from typing import final


@final
class SeedSchedule(Enum):
    """The base seeds that an epoch and the epochs after it draw. The values are the words in a saved state."""

    EVERY_EPOCH = "every"
    """This epoch and each later one draws a seed."""
    THIS_EPOCH = "first"
    """This epoch draws a seed, later ones draw none: the loader workers are persistent, and not started yet."""
    NO_EPOCH = "never"
    """No epoch draws a seed: persistent loader workers were started."""
    EVERY_EPOCH_THIS_ONE_DRAWN = "every+drawn"
    """Of states of 0.1 and 0.2: the saved random states are from after this epoch's draw; each later one draws."""
    EVERY_EPOCH_SAMPLER_TWICE = "every+again"
    """As ``EVERY_EPOCH``; torch calls ``iter(sampler)`` again after each draw."""
    THIS_EPOCH_SAMPLER_TWICE = "first+again"
    """As ``THIS_EPOCH``; torch calls ``iter(sampler)`` again after the draw."""

    @classmethod
    def of(cls, *, persistent: bool, sampler_twice: bool = False) -> SeedSchedule:
        """The schedule of a loader that was not iterated yet.

        Args:
          persistent: whether the loader has persistent loader workers.
          sampler_twice: whether torch calls ``iter(sampler)`` twice, and the second call may draw other indices.
        """
        if sampler_twice:
            return cls.THIS_EPOCH_SAMPLER_TWICE if persistent else cls.EVERY_EPOCH_SAMPLER_TWICE
        return cls.THIS_EPOCH if persistent else cls.EVERY_EPOCH

    @property
    def draws(self) -> bool:
        """Whether this epoch draws a seed."""
        return self not in (SeedSchedule.NO_EPOCH, SeedSchedule.EVERY_EPOCH_THIS_ONE_DRAWN)

    @property
    def sampler_twice(self) -> bool:
        """Whether torch calls ``iter(sampler)`` again after the draw of this epoch."""
        return self in (SeedSchedule.EVERY_EPOCH_SAMPLER_TWICE, SeedSchedule.THIS_EPOCH_SAMPLER_TWICE)

    @property
    def next(self) -> SeedSchedule:
        """The schedule of the next epoch."""
        if self is SeedSchedule.EVERY_EPOCH_THIS_ONE_DRAWN:
            return SeedSchedule.EVERY_EPOCH
        if self in (SeedSchedule.THIS_EPOCH, SeedSchedule.THIS_EPOCH_SAMPLER_TWICE):
            return SeedSchedule.NO_EPOCH
        return self
