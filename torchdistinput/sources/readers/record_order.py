"""The order in which records are read, without reading: of files whose numbers of records are known, and of mixtures.

What ``interleave``, ``fragment_reader`` and ``mixed`` yield, from either end: by the laws of ``plan`` that they follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, final

from torchdistinput.plan.interleaving import InterleavedOrder
from torchdistinput.plan.mixing import KnownOrder
from torchdistinput.plan.permutation import Permutation
from torchdistinput.sources.kernel.epoch_order import FileRecord, SampleSequence, SourceSample, cannot_know, place_in

_FILE: Final = 2**40  # of ``kernel.sample_index``, law I2
_WINDOWS_KEPT: Final = 64
_MOST_TURNS: Final = 10_000

_interleaved = lru_cache(256)(InterleavedOrder)
"""The order of the same files, which goes on where its last walk stopped."""


@final
class FileSequence:
    """The records of some files in the order of an epoch; see ``SampleSequence``.

    Args:
      names: of all files.
      counts: how many records each file has.
      order: the files that are read, by their place in the list, in order.
      interleaving: ``cycle_length`` and ``block_length``.
      window: ``shuffle_buffer``; 0 for none.
      key: the seed and the epoch, by which windows are shuffled.
    """

    def __init__(
        self,
        names: Sequence[str],
        counts: Sequence[int],
        order: Sequence[int],
        interleaving: tuple[int, int],
        window: int,
        key: tuple[int, int],
    ) -> None:
        self._names, self._counts, self._order = names, counts, order
        self._interleaved = _interleaved(tuple(counts[file] for file in order), *interleaving)
        self._window, self._key = window, key
        self._permutation = lru_cache(_WINDOWS_KEPT)(self._made)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {file: place for place, file in enumerate(self._order)}

    def __len__(self) -> int:
        return len(self._interleaved)

    def _made(self, file: int, number: int) -> Permutation:
        size = min(self._window, self._counts[file] - number * self._window)
        return Permutation(size, *self._key, file, number)

    def between(self, lo: int, hi: int) -> list[FileRecord]:
        """See ``SampleSequence.between``."""
        found = []
        for place, yielded in self._interleaved.between(lo, hi):
            file, record = self._order[place], yielded
            if self._window:
                number, inside = divmod(yielded, self._window)
                record += int(self._permutation(file, number).block(inside, inside + 1)[0]) - inside
            found.append(FileRecord(self._names[file], record))
        return found

    def places_of(self, sample: Any) -> list[int]:
        """See ``SampleSequence.places_of``: of (file, record), or of the number that ``with_index=True`` gives."""
        file, record = self._number_of(sample)
        place = self._places.get(file)
        if place is None:
            return []  # another rank reads it
        if self._window:
            number, inside = divmod(record, self._window)
            record = number * self._window + place_in(self._permutation(file, number), inside)
        return [self._interleaved.place_of(place, record)]

    def _number_of(self, sample: Any) -> tuple[int, int]:
        file, record = divmod(sample, _FILE) if type(sample) is int else _pair(sample, "(file, record)")
        file = self._names.index(file) if isinstance(file, str) and file in self._names else file
        known = type(file) is int and 0 <= file < len(self._names)
        if not known or type(record) is not int or not 0 <= record < self._counts[file]:
            raise ValueError(
                f"found the sample {sample!r:.100}; (file, record) is needed, with the name of one of the "
                f"{len(self._names)} files and the number of one of its records from 0 on."
            )
        return file, record


@final
class IndexSequence:
    """The samples of a map-style source of a mixture in an epoch of its own; see ``SampleSequence``.

    Args:
      length: how many it has.
      order: in which they come; ``None`` for that of their numbers.
    """

    def __init__(self, length: int, order: Permutation | None) -> None:
        self._length, self._order = length, order

    def __len__(self) -> int:
        return self._length

    def between(self, lo: int, hi: int) -> list[int]:
        """See ``SampleSequence.between``."""
        if self._order is None:
            return list(range(lo, hi))
        found: list[int] = self._order.block(lo, hi).tolist()
        return found

    def places_of(self, sample: Any) -> list[int]:
        """See ``SampleSequence.places_of``."""
        if type(sample) is not int or not 0 <= sample < self._length:
            raise ValueError(f"found the sample {sample!r:.100}; an index of the source is needed.")
        return [sample if self._order is None else place_in(self._order, sample)]


@final
class MixtureSequence:
    """The samples of a mixture in order; see ``SampleSequence``.

    Args:
      names: of the sources.
      order: which source comes at a position, and which of its samples.
      of_source: returns the order of a source, by its number, in one of its own epochs.
    """

    def __init__(
        self,
        names: Sequence[str],
        order: KnownOrder,
        of_source: Callable[[int, int], SampleSequence],
    ) -> None:
        self._names, self._sizes, self._order = names, order.sizes, order
        self._of_source = lru_cache(2 * len(names))(of_source)

    def __len__(self) -> int:
        return len(self._order)

    def between(self, lo: int, hi: int) -> list[SourceSample]:
        """See ``SampleSequence.between``."""
        found = []
        for source, number in map(self._order.at, range(lo, hi)):
            turn, place = divmod(number, self._sizes[source])
            (sample,) = self._of_source(source, turn).between(place, place + 1)
            found.append(SourceSample(self._names[source], sample))
        return found

    def places_of(self, sample: Any) -> list[int]:
        """See ``SampleSequence.places_of``: of (source, sample)."""
        name, inner = _pair(sample, "(source, sample)")
        if name not in self._names:
            raise ValueError(f"found the source {name!r:.100}; the sources are {', '.join(map(repr, self._names))}.")
        source, size = self._names.index(name), self._sizes[self._names.index(name)]
        turns = -(-self._order.count_of(source) // max(1, size))
        if turns > _MOST_TURNS:
            raise cannot_know(f"the sample comes {turns} times in the epoch", "Give the mixture num_samples.")
        found = []
        for turn in range(turns):
            numbers = [turn * size + place for place in self._of_source(source, turn).places_of(inner)]
            found += [place for each in numbers if (place := self._order.place_of(source, each)) is not None]
        return sorted(found)


def _pair(sample: Any, needed: str) -> tuple[Any, Any]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise ValueError(f"found the sample {sample!r:.100}; a pair {needed} is needed.")
    return sample[0], sample[1]
