"""A seed for each sample of each epoch: random augmentation that is the same on any rank and in any loader worker.

Problem: the random state of a loader worker depends on the samples that it read before, so an augmented dataset changes
with the number of ranks and loader workers.

Decision: the seed of a sample is a pure function of (base seed, epoch, index of the sample). The first two are mixed
into one int, the *key* of the epoch, when the epoch starts. The key travels with each request, so that loader workers
need no state. The reading code notes the next sample in a context variable. The seed is computed only if
``sample_seed`` is called.

With ``InputOptions(seed_samples=True)`` the global generators of torch (on the CPU), NumPy and ``random`` are seeded
with it before each sample, and restored after the last sample of a piece. So augmentation that draws from them, as most
does, is the same everywhere too. NumPy's generator gets 32 bits of the seed, as it takes no more.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np
import torch

from torchdistinput.errors import InputError
from torchdistinput.plan.permutation import word, words_after
from torchdistinput.sources.kernel.read_failures import RecordPlace
from torchdistinput.sources.kernel.sample_index import number_of
from torchdistinput.sources.rng import global_states, set_global_states

_WAY_OUT = (
    "It works inside the __getitem__ of a map-style dataset that is asked for one sample by its int index, and inside "
    "the map_fn of a FileDataset, when they are read through torchdistinput, and on the thread that called them."
)


_NUMPY_BITS: Final = 2**32 - 1

_words_of = functools.lru_cache(maxsize=8)(words_after)  # all samples of an epoch have one key

_current: contextvars.ContextVar[Samples | None] = contextvars.ContextVar("samples", default=None)


@final
class Samples:
    """Tells ``sample_seed`` which sample is being read. A context manager around the reading of some samples.

    Args:
      key: the key of the epoch.
      seeds: whether the global generators are seeded for each sample, and restored at the end.
    """

    __slots__ = ("_found", "_saved", "_seeds", "_token", "_word", "index", "key", "places")

    def __init__(self, key: int, *, seeds: bool = False) -> None:
        self.key = key
        self.index: Any = None
        """The index of the sample that is being read, set before each one; for a record, its index in ``places``."""
        self.places: Callable[[], Sequence[RecordPlace]] | None = None
        """Returns the origins (file and number) of the records that are being read."""
        self._found: Sequence[RecordPlace] | None = None
        self._seeds = seeds
        self._saved: Sequence[Any] | None = None

    def __enter__(self) -> Samples:
        self._token = _current.set(self)
        if self._seeds:
            self._word = _words_of(self.key)
            self._saved = global_states()
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
        if self._saved is not None:
            states, self._saved = self._saved, None
            set_global_states(states)

    def begin(self, index: Any) -> None:
        """Notes that the next sample is being read.

        Args:
          index: see the attribute.

        Raises:
          InputError: the generators are to be seeded, and ``index`` is not the index of one sample, an int.
        """
        self.index = index
        if not self._seeds:
            return
        try:
            seed = self._word(operator.index(index if self.places is None else self.number())) >> 1
        except TypeError:
            raise InputError(
                f"seed_samples=True was given, and the index {index!r:.100} is a {type(index).__name__} and no int: no "
                "seed follows from it. Let the sampler yield ints, one for each sample; or seed in the dataset itself."
            ) from None
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed & _NUMPY_BITS)
        random.seed(seed)

    def number(self) -> Any:
        """The number of the sample, or the index as it was given if it is not a number."""
        if self.places is None:
            return self.index
        if self._found is None:
            self._found = self.places()
        return number_of(self._found[self.index])


def calls_on(samples: Samples) -> Callable[..., Any]:
    """A function that calls another function, in which ``sample_seed`` is the seed of the sample that was begun last.

    The calls run in one context that is made now: entering it is cheaper than setting a variable for every record.
    """
    context = contextvars.copy_context()
    context.run(_current.set, samples)
    return context.run


def cannot_seed(what: str) -> InputError:
    """The error for data whose samples cannot be seeded."""
    return InputError(
        f"seed_samples=True was given with {what}, whose samples have no number that is the same on all ranks. It is "
        "for map-style datasets and FileDatasets; seed by something in the sample itself in your own dataset."
    )


def epoch_key(seed: int, epoch: int) -> int:
    """The key of an epoch: an int from which the seeds of all its samples are computed."""
    return word(seed, epoch)


def sample_seed() -> int:
    r"""A seed for the random augmentation of the sample that is read now.

    It depends on the base seed, the epoch and the index of the sample, and on nothing else: it is the same at any world
    size, with any number of loader workers, persistent or not. Local.

    The base seed is the ``seed`` of a ``FileDataset``; for a map-style dataset it is the seed of
    the ``DataLoader``'s ``generator``, or without a generator ``torch.initial_seed()`` of rank 0. No random number is
    drawn.

    Example:
      >>> def noisy(line):
      ...     generator = torch.Generator().manual_seed(tdi.sample_seed())
      ...     return int(line) + torch.randn((), generator=generator)
      >>> fsspec.filesystem("memory").pipe("/data/numbers", b"1\n2\n3")
      >>> files = tdi.FileDataset("memory://data/numbers", tdi.readers.text_lines, map_fn=noisy)
      >>> one, two = tdi.Strategy(["cpu"]), tdi.Strategy(["cpu", "cpu"])
      >>> (x,), (parts,) = (each.distribute_dataset(files, global_batch_size=3) for each in (one, two))
      >>> bool(torch.equal(x, torch.cat(parts.values)))
      True

    Returns:
      An int in ``[0, 2**63)``; every bit depends on every bit of what it is made of.

    Raises:
      RuntimeError: no single sample with a number is being read here: outside of a dataset, in ``__getitems__``, in a
        collate function, in an iterable dataset, or in a thread of the dataset's own.
    """
    samples = _current.get()
    if samples is None:
        raise RuntimeError(
            f"sample_seed() was called where no numbered sample is being read. {_WAY_OUT} For an iterable "
            "seed a generator by something in the sample itself."
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
    return _words_of(samples.key)(number) >> 1
