"""Random augmentation that does not depend on who reads a sample: a seed for each sample of each epoch.

Problem: random state in a loader worker depends on which samples it had before, so an augmented dataset changes with
the number of ranks and loader workers.

Decision: the seed of a sample is a pure function of (base seed, epoch, index of the sample). The first two are mixed to
one word where the epoch starts, and travel with each request, so that loader workers need no state. Whoever reads says
which sample comes next, in a context variable; nothing is computed unless ``sample_seed`` asks.
"""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Callable, Sequence
from typing import Any, final

from torchdistinput.plan.permutation import word
from torchdistinput.sources.index import number_of
from torchdistinput.sources.walks import RecordPlace, RecordWalk

__all__ = ["Samples", "calls_on", "epoch_key", "sample_seed"]

_WAY_OUT = (
    "It works inside the __getitem__ of a map-style dataset that is asked for one sample by its int index, and inside "
    "the map_fn of a FileDataset, when they are read through torchdistinput, and on the thread that called them."
)


_current: contextvars.ContextVar[Samples | _LastOf | None] = contextvars.ContextVar("samples", default=None)


@final
class Samples:
    """Says which sample is read, to ``sample_seed``. A context manager around the reading of some samples.

    Args:
      key: the word of the epoch.
    """

    __slots__ = ("_found", "_token", "index", "key", "places")

    def __init__(self, key: int) -> None:
        self.key = key
        self.index: Any = None
        """The index of the sample that is read now, set before each; of records, which of ``places`` is its own."""
        self.places: Callable[[], Sequence[RecordPlace]] | None = None
        """Tells where the records come from that are read now."""
        self._found: Sequence[RecordPlace] | None = None

    def __enter__(self) -> Samples:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def number(self) -> Any:
        """What was said of the sample: its number, or what is none."""
        if self.places is None:
            return self.index
        if self._found is None:
            self._found = self.places()
        return number_of(self._found[self.index])


@final
class _LastOf:
    """The last record of a walk, as the sample that is read."""

    def __init__(self, walk: RecordWalk, key: int) -> None:
        self.key = key
        self._walk = walk

    def number(self) -> int:
        """See ``Samples.number``."""
        return number_of(self._walk.place)


def calls_on(walk: RecordWalk, key: int) -> Callable[..., Any]:
    """A function that calls another one, ``sample_seed`` in which is that of the walk's last record.

    In a context of its own, as of now: entering it costs next to nothing, setting a variable for every record more.
    """
    context = contextvars.copy_context()
    context.run(_current.set, _LastOf(walk, key))
    return context.run


def epoch_key(seed: int, epoch: int) -> int:
    """The word of an epoch: what the seeds of its samples have in common."""
    return word(seed, epoch)


def sample_seed() -> int:
    """A seed for the random augmentation of the sample that is read now.

    It depends on the base seed, the epoch and the index of the sample, and on nothing else: it is the same at any world
    size, with any number of loader workers, persistent or not. Local.

    The base seed is the ``seed`` of a ``FileDataset``; for a map-style dataset that of the ``DataLoader``'s
    ``generator``, or without one ``torch.initial_seed()`` of rank 0. No random number is drawn.

    Example:
      >>> class Noisy(torch.utils.data.Dataset):
      ...     def __getitem__(self, index):
      ...         generator = torch.Generator().manual_seed(tdi.sample_seed())
      ...         return self.images[index] + torch.randn(3, 32, 32, generator=generator)

    Returns:
      An int in ``[0, 2**63)``; every bit depends on every bit of what it is made of.

    Raises:
      RuntimeError: no single sample with a number is being read here: outside of a dataset, in ``__getitems__``, in a
        collate function, in an iterable dataset, or in a thread of the dataset's own.
    """
    samples = _current.get()
    if samples is None:
        raise RuntimeError(
            f"sample_seed() was called where no numbered sample is being read. {_WAY_OUT} The samples of an iterable "
            "have no number that is the same on all ranks: seed a generator by something in the sample itself, or give "
            "the data as a map-style dataset or FileDataset."
        )
    index = samples.number()
    if isinstance(index, list | tuple) or index is None:
        raise RuntimeError(
            f"sample_seed() was called while many samples are read at once (__getitems__, or a sampler that yields "
            f"lists of indices). {_WAY_OUT} Read the samples one by one in __getitem__."
        )
    try:
        number = operator.index(index)
    except TypeError:
        raise RuntimeError(
            f"sample_seed() was called for the sample {index!r}, whose index is a {type(index).__name__} and not an "
            f"int. {_WAY_OUT}"
        ) from None
    return word(samples.key, number) >> 1
