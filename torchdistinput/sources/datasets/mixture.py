"""``Mixture``: several datasets as one, in shares that hold at every moment. The law is ``plan.mixing``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from torch.utils.data import Dataset, Sampler

from torchdistinput.plan.arrays import Ints
from torchdistinput.plan.mixing import MixedOrder, Stop
from torchdistinput.sources.checks import checked_int
from torchdistinput.sources.datasets.stream_mixture import StreamMixture, Unit, Weights, is_stream
from torchdistinput.sources.kernel.epoch_order import SourceSample
from torchdistinput.sources.map_style.length_batches import Lengths
from torchdistinput.sources.map_style.piece_dataset import samples_of


@final
class Mixture(Dataset[Any]):
    """Samples of several datasets, mixed by weights: of map-style datasets a map-style dataset, else a stream.

    Which source a position belongs to, and which of its samples, follows from the weights, the seed and the position:
    the same at any number of ranks and loader workers, and after a resume. The share of each source is exact in every
    block of positions, to less than one sample; each source comes in epochs of its own.

    >>> mixture = tdi.Mixture({"web": range(100), "code": range(100, 200)}, {"web": 0.75, "code": 0.25}, seed=1)
    >>> [mixture[place] for place in range(8)]
    [120, 0, 129, 190, 36, 48, 29, 61]
    >>> loader = tdi.DataLoader(mixture, batch_size=8, sampler=mixture.sampler())

    A ``DataLoader`` without the sampler has the order of the first epoch in each; ``shuffle=True`` would undo the
    shares. With the sampler, and in ``distribute_dataset(mixture, global_batch_size=G)``, the library reads the mixture
    as a stream, so that ``set_weights`` works and ``stats()`` counts by source.

    Where a source is a ``FileDataset``, a ``FragmentSource`` or such a mixture, or the shares are of tokens, the call
    returns a ``StreamMixture`` of the same arguments, without ``__getitem__`` and sampler; its documentation has more.

    Args:
      sources: the datasets by name. A ``Mixture`` is one too; it comes in its own order.
      weights: of all sources, by name; 0 leaves one out. Or pairs ``(start, weights)``: from a start on these weights
        hold; the first is 0. The starts are samples, or steps with ``batch_size``.
      unit: of the weights: shares of the samples, or of the tokens.
      lengths: tokens by the name of the source: an array, or a function of the index, of a map-style dataset; a
        function of the undecoded record of files and fragments. For all sources with ``unit="tokens"``.
      stop: ``"first"``: an epoch ends where a source would begin again. ``"all"``: it goes on with the others, their
        weights scaled, until each sample came once. ``"repeat"``: sources begin again, for ``num_samples``.
      num_samples: how many samples an epoch has; with ``"first"`` and ``"all"`` at most.
      batch_size: the global batch size, if the starts of weights are steps.
      seed: of all orders; the same on every rank.
      shuffle: whether the samples of each source are in a new order in each of its epochs.
      temperature: weights are raised to the power ``1 / temperature``: above 1 small sources come more often.
      with_source: whether samples come as ``(name, sample)``.

    Raises:
      TypeError: a source has no length or no index, and is no stream that can be entered again.
      ValueError: weights are negative, all 0, of an unknown source, or missing; a source with a weight is empty;
        ``"repeat"`` without ``num_samples``, unless it is a stream.
    """

    def __new__(cls, sources: Mapping[str, Any] | None = None, *arguments: Any, **options: Any) -> Any:
        """A ``StreamMixture`` where the order needs a source to be read from front to end."""
        if sources is not None and (options.get("unit") == "tokens" or any(map(is_stream, sources.values()))):
            return StreamMixture(sources, *arguments, **options)
        return super().__new__(cls)

    def __init__(  # noqa: PLR0913 - one mixture is one call
        self,
        sources: Mapping[str, Any],
        weights: Weights,
        *,
        unit: Unit = "samples",
        lengths: Mapping[str, Lengths] | None = None,
        stop: Stop = "first",
        num_samples: int | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        temperature: float | None = None,
        with_source: bool = False,
    ) -> None:
        self.stream = StreamMixture(
            sources,
            weights,
            unit=unit,
            lengths=lengths,
            stop=stop,
            num_samples=num_samples,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            temperature=temperature,
            with_source=with_source,
        )
        """The same samples in the same order as a stream, as the library's loaders read them."""
        self._names = list(sources)
        self._sources = list(sources.values())
        self._sizes = [len(source) for source in self._sources]
        self._stop, self._seed, self._with_source = stop, seed, with_source
        # The sources at all positions are the same in each epoch, and so is the length; their samples are not.
        self._order = MixedOrder(self._sizes, self.stream.weights.changes(0), stop, (seed,), num_samples)
        self._length = len(self._order)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """See ``StreamMixture.set_weights``. Local.

        It works in a loader of this library that has ``mixture.sampler()``, and in ``distribute_dataset(mixture,
        global_batch_size=G)``. Any other loader, ``locate`` and indexing keep the weights that were given first.
        """
        self.stream.set_weights(weights)

    def sampler(self) -> MixtureSampler:
        """The positions of each epoch in order, for a ``DataLoader``; each ``iter()`` is the next epoch. Local."""
        return MixtureSampler(self)

    def positions(self, epoch: int) -> range:
        """The positions of an epoch. Local."""
        return range(epoch * self._length, (epoch + 1) * self._length)

    def __len__(self) -> int:
        """The samples of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """The samples of epoch 0, in order: without it, Python would ask for positions without end."""
        return map(self.__getitem__, range(self._length))

    def locate(self, position: int) -> tuple[str, int]:
        """The source of a position, and the index of the sample in it. Local.

        Args:
          position: ``epoch * len(self)`` plus the place in the epoch.
        """
        sources, samples = self._located([position])
        return self._names[int(sources[0])], int(samples[0])

    def parts_of_sample(self, index: int) -> SourceSample:
        """See ``TellsParts``."""
        return SourceSample(*self.locate(index))

    def indices_of(self, parts: Any) -> list[int]:
        """See ``TellsParts``."""
        return self.stream.sequence(self._order, 0).places_of(parts)

    def _located(self, positions: Sequence[int]) -> tuple[Ints, Ints]:
        """The sources of positions, and the indices of the samples in them."""
        epochs, places = np.divmod(np.asarray(positions, np.int64), self._length)
        sources, indices = self._order.at(places)
        turns, places = np.divmod(indices, np.array(self._sizes)[sources])
        samples = np.empty(len(places), np.int64)
        for source, epoch, turn in set(zip(sources.tolist(), epochs.tolist(), turns.tolist(), strict=True)):
            rows = (sources == source) & (epochs == epoch) & (turns == turn)
            samples[rows] = self.stream.indices_in(source, epoch, turn, places[rows])
        return sources, samples

    def __getitem__(self, position: int) -> Any:
        """The sample at a position; see ``locate``."""
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        """The samples at positions; those of one source are read together."""
        sources, found = self._located(positions)
        samples: list[Any] = [None] * len(found)
        for source in set(sources.tolist()):
            rows = np.flatnonzero(sources == source)
            read = samples_of(self._sources[source], found[rows].tolist())
            for row, sample in zip(rows.tolist(), read, strict=True):
                samples[row] = (self._names[source], sample) if self._with_source else sample
        return samples

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {size}" for name, size in zip(self._names, self._sizes, strict=True))
        return f"Mixture({parts}; {self._length} samples, stop={self._stop!r}, seed={self._seed})"


@final
class MixtureSampler(Sampler[int]):
    """The positions of a ``Mixture``, epoch after epoch. Made by ``Mixture.sampler``.

    Args:
      mixture: the mixture.
    """

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next ``iter()``. Local."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next ``iter()``; later ones follow. Local."""
        self._epoch = checked_int("epoch", epoch)

    def __len__(self) -> int:
        """The samples of an epoch."""
        return len(self.mixture)

    def __iter__(self) -> Iterator[int]:
        """The positions of the next epoch."""
        epoch, self._epoch = self._epoch, self._epoch + 1
        return iter(self.mixture.positions(epoch))
