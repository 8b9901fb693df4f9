"""``Mixture``: several map-style datasets as one, in shares that hold at every moment. The law is ``plan.mixing``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
from torch.utils.data import Dataset, Sampler

from torchdistinput.plan.mixing import MixedOrder, Stop, shares
from torchdistinput.plan.permutation import Permutation
from torchdistinput.sources.base import MapStyle
from torchdistinput.sources.checks import checked_int
from torchdistinput.sources.in_worker import FetchesBatches

__all__ = ["Mixture", "MixtureSampler"]

_STOPS: Final = ("first", "all", "repeat")
_KEPT: Final = 4  # permutations for each source


@final
class Mixture(Dataset[Any]):
    """Samples of several map-style datasets, mixed by weights. A map-style dataset itself, so it is divided like any.

    Which source a position belongs to, and which of its samples, follows from the weights, the seed and the position:
    the same at any number of ranks and loader workers, and after a resume. The share of each source is exact in every
    block of positions, to less than one sample; each source comes in shuffled epochs of its own.

        mixture = tdi.Mixture({"web": web, "code": code}, {"web": 0.7, "code": 0.3}, stop="all")
        loader = tdi.DataLoader(mixture, batch_size=G, sampler=mixture.sampler())

    Without the sampler each epoch has the order of the first one. ``shuffle=True`` would undo the shares.

    Args:
      sources: the datasets by name. A ``Mixture`` is one too; it comes in its own order.
      weights: by name; 0 leaves a source out. Or pairs ``(position, weights)``: from this position (in samples) on
        these weights hold; the first is 0.
      stop: ``"first"``: an epoch ends where a source would begin again. ``"all"``: it goes on with the others, their
        weights scaled, until each sample came once. ``"repeat"``: sources begin again, for ``num_samples``.
      num_samples: how many samples an epoch has; with ``"first"`` and ``"all"`` at most.
      seed: of all orders; the same on every rank.
      shuffle: whether the samples of each source are in a new order in each of its epochs.
      temperature: weights are raised to the power ``1 / temperature``: above 1 small sources come more often.
      with_source: whether samples come as ``(name, sample)``.

    Raises:
      TypeError: a source has no length or no index.
      ValueError: weights are negative, all 0, or of an unknown source; a source with a weight is empty; ``"repeat"``
        without ``num_samples``.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]],
        *,
        stop: Stop = "first",
        num_samples: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        temperature: float | None = None,
        with_source: bool = False,
    ) -> None:
        if stop not in _STOPS:
            raise ValueError(f"stop is {stop!r}; it must be {', '.join(map(repr, _STOPS))}.")
        self._names = list(sources)
        self._sources = [_checked(name, source) for name, source in sources.items()]
        self._sizes = [len(source) for source in self._sources]
        plan = [(0, weights)] if isinstance(weights, Mapping) else list(weights)
        self._changes = [(checked_int("position", at), self._shares(each, temperature)) for at, each in plan]
        self._stop = stop
        self._num_samples = None if num_samples is None else checked_int("num_samples", num_samples, at_least=1)
        self._seed = checked_int("seed", seed)
        self._shuffle, self._with_source = shuffle, with_source
        self._permutations: dict[tuple[int, int, int], Permutation] = {}
        self._check_sizes()
        # The sources at all positions are the same in each epoch, and so is the length; their samples are not.
        self._order = MixedOrder(self._sizes, self._changes, stop, (self._seed,), self._num_samples)
        self._length = len(self._order)

    def _shares(self, weights: Mapping[str, float], temperature: float | None) -> list[Any]:
        unknown = [name for name in weights if name not in self._names]
        if unknown:
            raise ValueError(
                f"there is a weight for {unknown[0]!r}; the sources are {', '.join(map(repr, self._names))}."
            )
        return shares([weights.get(name, 0) for name in self._names], temperature)

    def _check_sizes(self) -> None:
        for _, weights in self._changes:
            for name, weight, size in zip(self._names, weights, self._sizes, strict=True):
                if weight and not size:
                    raise ValueError(f"the source {name!r} is empty; give it the weight 0, or leave it out.")

    def sampler(self) -> MixtureSampler:
        """The positions of each epoch in order, for a ``DataLoader``; each ``iter()`` is the next epoch. Local."""
        return MixtureSampler(len(self))

    def __len__(self) -> int:
        """The samples of an epoch."""
        return self._length

    def locate(self, position: int) -> tuple[str, int]:
        """The source of a position, and the index of the sample in it. Local.

        Args:
          position: ``epoch * len(self)`` plus the place in the epoch.
        """
        source, index = self._located([position])[0]
        return self._names[source], index

    def _located(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        epochs, places = np.divmod(np.asarray(positions, np.int64), self._length)
        sources, indices = self._order.at(places)
        found = zip(sources.tolist(), indices.tolist(), epochs.tolist(), strict=True)
        return [(source, self._sample_of(source, index, epoch)) for source, index, epoch in found]

    def _sample_of(self, source: int, index: int, epoch: int) -> int:
        size = self._sizes[source]
        if isinstance(self._sources[source], Mixture):
            return epoch * size + index  # it has an order of its own
        round_of, place = divmod(index, size)
        if not self._shuffle:
            return place
        key = (source, epoch, round_of)
        order = self._permutations.get(key)
        if order is None:
            if len(self._permutations) >= _KEPT * len(self._sources):
                del self._permutations[next(iter(self._permutations))]
            order = self._permutations[key] = Permutation(size, self._seed, epoch, source, round_of)
        return int(order.at(np.array([place]))[0])

    def __getitem__(self, position: int) -> Any:
        """The sample at a position; see ``locate``."""
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """The samples at positions; those of one source are read together."""
        located = self._located(positions)
        samples: list[Any] = [None] * len(located)
        for source in {source for source, _ in located}:
            rows = [row for row, (own, _) in enumerate(located) if own == source]
            data = self._sources[source]
            indices = [located[row][1] for row in rows]
            read = data.__getitems__(indices) if isinstance(data, FetchesBatches) else [data[each] for each in indices]
            for row, sample in zip(rows, read, strict=True):
                samples[row] = (self._names[source], sample) if self._with_source else sample
        return samples

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {size}" for name, size in zip(self._names, self._sizes, strict=True))
        return f"Mixture({parts}; {self._length} samples, stop={self._stop!r}, seed={self._seed})"


@final
class MixtureSampler(Sampler[int]):
    """The positions of a ``Mixture``, epoch after epoch. Made by ``Mixture.sampler``.

    Args:
      length: the samples of an epoch.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next ``iter()``; later ones follow. Local."""
        self._epoch = checked_int("epoch", epoch)

    def __len__(self) -> int:
        """The samples of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """The positions of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        return iter(range(epoch * self._length, (epoch + 1) * self._length))


def _checked(name: str, source: Any) -> Any:
    if not issubclass(type(source), MapStyle):
        raise TypeError(
            f"the source {name!r} is a {type(source).__name__}; a map-style dataset is needed, with __len__ and "
            "__getitem__."
        )
    return source
