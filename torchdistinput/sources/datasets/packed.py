"""``Packed``: samples of different lengths in rows of one length. The law is ``plan.packing``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, chain
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from torchdistinput.plan.packing import (
    Item,
    Overflow,
    Packing,
    PackingStrategy,
    PositionsIn,
    check_packing,
    pack_window,
)
from torchdistinput.sources.checks import MapStyle
from torchdistinput.sources.kernel.epoch_order import PackItem, PackOf
from torchdistinput.sources.map_style.piece_dataset import samples_of
from torchdistinput.sources.map_style.samplers import Lengths, length_reader

_TOKENS = "tokens"
_MEASURED_AT_ONCE: Final = 4096  # by one call of a dataset that reads several at once


@final
class Packed(Dataset[dict[str, Tensor]]):
    """Packs of samples of a map-style dataset. A map-style dataset itself: a pack is one sample of a global batch.

    The packs follow from the lengths of the samples, before any split, so they are the same at any number of ranks, and
    a resume is that of any map-style data. A loader may shuffle the packs. The constructor plans all windows once, 0.1
    to 1 us a sample, and keeps 8 bytes a sample for the lengths; a window is planned again when a pack of it is read.

    Each pack is a dict: the fields, concatenated, and the segment of each token and its position in the segment. A
    segment is a sample, or the part of it that the pack has. Without ``pad`` packs have different lengths, and
    ``cu_seqlens`` for attention of variable length.

    >>> tdi.Packed([[1, 2, 3], [4], [5, 6]], max_length=4)[0]  # doctest: +NORMALIZE_WHITESPACE
    {'tokens': tensor([1, 2, 3, 4]), 'segment_ids': tensor([1, 1, 1, 2], dtype=torch.int32),
     'positions': tensor([0, 1, 2, 0]), 'cu_seqlens': tensor([0, 3, 4], dtype=torch.int32)}

    What is read from front to end (files, fragments, a mixture) is refused: a state and the numbers of samples count
    what is read, and would have to count packs in whole windows. Such data is packed while it is read, by a reader of
    one's own: a function of a file that yields packs. Packs may be mixed: ``Mixture({name: Packed(...)})``.

    Args:
      dataset: samples are one-dimensional tensors, arrays or lists; or dicts of them, with ``fields``. Map-style.
      max_length: tokens of a pack at most.
      lengths: the number of tokens of each sample: an array, or a function of the index. ``None``: each sample is read
        once, here.
      window: how many consecutive samples are packed together.
      strategy: "best_fit", "first_fit", or "concat", which cuts samples where a pack is full.
      overflow: what is done with a sample of more than ``max_length`` tokens: "error", "split", "truncate" or "drop".
      fields: the fields of a dict that have an entry for each token.
      pad: the value that fills packs up to ``max_length``, or one for each field; its segment is 0.
      positions: "segment": they begin at 0 in each segment, so all are less than ``max_length``; or "sample": those in
        the whole sample, where a pack has a later part of one.

    Raises:
      TypeError: the dataset has no length, or no index.
      ValueError: an argument is out of range or another word; a sample is too long (it is named), or a length negative.
    """

    def __init__(  # noqa: PLR0913 - what is packed, and how
        self,
        dataset: Any,
        max_length: int,
        *,
        lengths: Lengths | None = None,
        window: int = 4096,
        strategy: PackingStrategy = "best_fit",
        overflow: Overflow = "error",
        fields: Sequence[str] | None = None,
        pad: float | Mapping[str, float] | None = None,
        positions: PositionsIn = "segment",
    ) -> None:
        check_packing(max_length, window, strategy, overflow, positions)
        self.dataset, self._max_length, self._window = _checked(dataset), max_length, window
        self._strategy: PackingStrategy = strategy
        self._overflow: Overflow = overflow
        self._positions: PositionsIn = positions
        self._fields = None if fields is None else list(fields)
        names = [_TOKENS] if fields is None else list(fields)
        self._pad = pad if isinstance(pad, Mapping) or pad is None else dict.fromkeys(names, pad)
        self._lengths = self._measured(lengths)
        self.dropped_tokens = self.truncated_tokens = 0
        """Tokens of samples that were left out, and tokens that were cut off."""
        counts = []
        for number in range(-(-len(self._lengths) // window)):
            planned = self._planned(number)
            counts.append(len(planned))
            self.dropped_tokens += planned.dropped
            self.truncated_tokens += planned.truncated
        self._ends = list(accumulate(counts))
        self._plan = lru_cache(2)(self._planned)

    def __getstate__(self) -> dict[str, Any]:
        """The copy for a loader worker: all but the windows that were planned last."""
        return {**self.__dict__, "_plan": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plan = lru_cache(2)(self._planned)

    def _measured(self, lengths: Lengths | None) -> Any:
        count = len(self.dataset)
        if lengths is None:
            starts = range(0, count, _MEASURED_AT_ONCE)
            parts = (range(start, min(start + _MEASURED_AT_ONCE, count)) for start in starts)
            samples = chain.from_iterable(samples_of(self.dataset, [*part]) for part in parts)
            return np.fromiter((len(self._columns(sample)[0]) for sample in samples), np.int64, count)
        if callable(lengths):
            return np.fromiter(map(length_reader(lengths), range(count)), np.int64, count)
        found = np.asarray(lengths, np.int64)
        if found.shape != (count,):
            raise ValueError(
                f"lengths has shape {found.shape}; the dataset has {count} samples, each needs one number."
            )
        return found

    def _planned(self, number: int) -> Packing:
        start = number * self._window
        part = self._lengths[start : start + self._window]
        return pack_window(part, start, self._max_length, self._strategy, self._overflow)

    def _columns(self, sample: Any) -> list[Any]:
        return [sample] if self._fields is None else [sample[name] for name in self._fields]

    def __len__(self) -> int:
        """How many packs there are."""
        return self._ends[-1] if self._ends else 0

    @property
    def efficiency(self) -> float:
        """The tokens of all packs, of the places that they have."""
        kept = int(self._lengths.sum()) - self.dropped_tokens - self.truncated_tokens
        return kept / max(1, len(self) * self._max_length)

    @property
    def checksum(self) -> int:
        """A number of the lengths, and what is done with them: ranks with the same have the same packs."""
        found = blake2b(np.ascontiguousarray(self._lengths).data, digest_size=8)
        found.update(f"{self._max_length} {self._window} {self._strategy} {self._overflow} {self._positions}".encode())
        return int.from_bytes(found.digest(), "little")

    def items(self, pack: int) -> list[Item]:
        """The samples of a pack, and the tokens of them that it has. Local, reads no sample."""
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} is outside of {len(self)} packs")
        number = bisect_right(self._ends, pack)
        before = self._ends[number - 1] if number else 0
        return self._plan(number).pack(pack - before)

    def parts_of_sample(self, index: int) -> PackOf:
        """See ``TellsParts``: the samples of a pack."""
        return PackOf(index, tuple(PackItem(item.sample, item.start, item.stop) for item in self.items(index)))

    def indices_of(self, parts: Any) -> list[int]:
        """See ``TellsParts``."""
        if not isinstance(parts, PackOf):
            raise ValueError(f"found the sample {parts!r:.100}; the number of a pack is needed.")  # noqa: TRY004 - as for a number that is out of range
        return [parts.pack]

    def __getitem__(self, pack: int) -> dict[str, Tensor]:
        """A pack; see the class.

        Raises:
          ValueError: a sample has another length than was told; it is named.
        """
        items = self.items(pack)
        parts: list[list[Tensor]] = []
        samples = samples_of(self.dataset, [item.sample for item in items])
        for item, sample in zip(items, samples, strict=True):
            columns = [torch.as_tensor(column) for column in self._columns(sample)]
            for column in columns:
                if column.shape[:1] != (int(self._lengths[item.sample]),):
                    raise ValueError(
                        f"sample {item.sample} has shape {tuple(column.shape)}; its length was given as "
                        f"{self._lengths[item.sample]}."
                    )
            parts.append([column[item.start : item.stop] for column in columns])
        names = [_TOKENS] if self._fields is None else self._fields
        found = {name: torch.cat(list(each)) for name, each in zip(names, zip(*parts, strict=True), strict=True)}
        sizes = torch.tensor([item.stop - item.start for item in items])
        found["segment_ids"] = torch.arange(1, len(items) + 1, dtype=torch.int32).repeat_interleave(sizes)
        begins = [item.start if self._positions == "segment" else 0 for item in items]
        places = [torch.arange(item.start - at, item.stop - at) for item, at in zip(items, begins, strict=True)]
        found["positions"] = torch.cat(places)
        if self._pad is None:
            found["cu_seqlens"] = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
            return found
        missing = self._max_length - int(sizes.sum())
        return {
            name: torch.nn.functional.pad(column, (0, missing), value=self._pad.get(name, 0))
            for name, column in found.items()
        }


def _checked(dataset: Any) -> Any:
    """The dataset, which has to be map-style."""
    if not isinstance(dataset, MapStyle) or isinstance(dataset, IterableDataset):
        raise TypeError(
            "Packed takes a map-style dataset, with __len__ and __getitem__, whose samples it reads in any order; "
            f"found a {type(dataset).__name__}. Pack its records while they are read: FileDataset(files, read) with a "
            "function read of a file that yields packs."
        )
    return dataset
