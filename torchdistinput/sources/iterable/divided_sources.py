"""Detects data that is already divided among the ranks, and says what to do about it.

Under policy DATA every rank must have the same data, and takes its part of it. For an opaque iterable, the ranks
compare the batches that they read (see ``batch_digests``). For map-style data each rank reads other samples, so the
ranks compare what a dataset holds: the indices of a ``Subset``, and a few entries of each list, array and table with an
entry for each sample. Reading a sample might draw random numbers, count, or take long. Of a dataset of Grain, where it
does none of these, a few samples are read. A dataset that holds nothing of this kind is not compared, which is logged.

A dataset is compared as it is when it is first divided: later a list may hold what its rank noted while it read. Before
each epoch, the ranks compare once more how many samples there are, and which: the length, the indices of each
``Subset``, the entries of a list and the tensors of a ``TensorDataset``. A digest is made anew only where an index, or
one of these objects, is another one than before: what a rank notes inside of a sample is no change. Only as many
entries are looked at as at first, so that costs the same whatever the number of samples. The names of files need no
second look: they are a tuple that is made once; and what the files hold is compared before each epoch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, Final, final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from torchdistinput.coordination.batch_digests import digest_of_element, digest_of_read
from torchdistinput.sources.checks import MapStyle, length_of
from torchdistinput.sources.datasets.packed import Packed
from torchdistinput.sources.map_style.table import SERIES, Table, kinds_of

_LOG = logging.getLogger("torchdistinput")

_OFF: Final = "InputOptions(auto_shard_policy=AutoShardPolicy.OFF)"
WAY_OUT: Final = (
    "This source divides itself (as LitData, MosaicML's StreamingDataset, WebDataset with split_by_node, "
    "split_dataset_by_node and the shards of Ray do), or what is random in it is not the same on all ranks. If each "
    f"rank's part is to be trained on, use {_OFF}: each rank then reads what its source yields, and nothing else; "
    "AutoShardPolicy.HINT for one that has shard(num_shards, index); or distribute_datasets_from_function. Else tell "
    "the source not to divide itself (WebDataset: nodesplitter=None; LitData, MosaicML: a map-style dataset whose "
    "__getitem__(index) returns stream[index]), and seed what it shuffles or augments alike on every rank, not by the "
    "rank. Paths are compared whole: let them be the same on every machine."
)
"""Advice for the user if an iterable yields different data on each rank."""
_MOST_INSIDE: Final = 8
PART_HINT: Final = (
    "If each rank was given a part of the data already (a Subset of its own, split_dataset_by_node): give every rank "
    "the whole data, and each rank will take its part of each batch; or keep the parts, and use "
    "distribute_datasets_from_function. Random splits and random data (random_split, torch.randn) need the same seed "
    "on all ranks, and lists of files the same order and the same paths on every machine. What a rank notes for itself "
    "does not belong into a list of the dataset."
)
"""Advice for the user if the ranks have different map-style data."""
SAMPLES: Final = "the samples"
"""The name of the fact that identifies the samples of map-style data."""
_MOST_COMPARED: Final = 64
_MOST_LOOKED_INTO: Final = 256
_TABLES: Final = {
    *(("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")),
    *SERIES,
}
_SEEN: Final[dict[int, SamplesSeen]] = {}
"""What was seen of each dataset, by its identity, as a tensor may not be compared with itself."""


def _library_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def part_of(dataset: Any) -> str:
    """Identifies the samples of a map-style dataset; empty if that is not possible, which is logged once. Local.

    Returns:
      a short text that is equal for equal data.
    """
    seen = SamplesSeen.of(dataset)
    if seen.first is None:
        seen.first = _part_of(dataset)
    return seen.first


@final
class SamplesSeen:
    """What identified the samples of a dataset, as far as its lists say which these are, when they were last looked at.

    The entries of a list by which a change is seen are kept, and no digest of them: a rank may note things inside.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        """What identified the samples when the dataset was first divided."""
        self._entries: list[Any] = []
        self._told = ""

    @classmethod
    def of(cls, dataset: Any) -> SamplesSeen:
        """What was seen of a dataset, by any loader over it, as long as it lives."""
        seen = _SEEN.get(id(dataset)) or cls()
        if id(dataset) not in _SEEN:
            with contextlib.suppress(TypeError):  # nobody is told of the end of a list
                weakref.finalize(dataset, _SEEN.pop, id(dataset), None).atexit = False
                _SEEN[id(dataset)] = seen
        return seen

    def now(self, dataset: Any) -> str:
        """A short text that is equal for equal samples; empty where there is no list. Local."""
        lists = [each for each in _lists_in(dataset) if _is_sequence(each)]
        entries = [entry for each in lists for entry in _some_of(each)]
        if len(entries) != len(self._entries) or not all(map(_is_same, entries, self._entries)):
            self._entries = entries
            self._told = _told(dataset, [digest for each in lists for digest in _entries_of(each)])
        return self._told


def _lists_in(dataset: Any) -> Iterator[Any]:
    """The lists that say which samples a dataset has; an attribute of a class of the user's may be any list."""
    for each in _datasets_in(dataset):
        if isinstance(each, TensorDataset):
            yield each.tensors
        elif isinstance(each, Subset):
            yield from (getattr(each, "indices", None), each.dataset)
        elif isinstance(each, list | tuple):
            yield each


def _some_of(value: Any) -> Iterator[Any]:
    """The entries of a list by which a change of it is seen; of an array a digest."""
    yield len(value)
    yield from value[:: _step_of(value)] if isinstance(value, list | tuple | range) else _entries_of(value)


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is int and type(before) is int and now == before)


def _part_of(dataset: Any) -> str:
    digests = [digest for each in _datasets_in(dataset) for digest in _own_digests_of(each)]
    if not digests:
        with _TELLING:  # of two threads that call a cached function at once, both run it
            _tell_unchecked(type(dataset).__name__)
        return ""
    return _told(dataset, digests)


def _told(dataset: Any, digests: Sequence[int]) -> str:
    """The samples of a dataset in words; empty where there is no digest of them."""
    if not digests:
        return ""
    indices = getattr(dataset, "indices", None)
    first = f" with the indices {_few(indices)}" if isinstance(dataset, Subset) and indices is not None else ""
    return f"a {type(dataset).__name__}{first} (checksum {_joined(digests):x})"


_TELLING = threading.Lock()


@cache
def _tell_unchecked(name: str) -> None:
    """Says it once in a process."""
    _LOG.info(
        "%s holds nothing by which its samples can be compared: nobody checks that all ranks have the same.", name
    )


def _joined(digests: Iterable[int]) -> int:
    return digest_of_read(" ".join(map(str, digests)).encode())


def _few(indices: Sequence[Any]) -> str:
    return ", ".join(str(int(each)) for each in indices[:4]) + (", ..." if len(indices) > 4 else "")


def _datasets_in(dataset: Any) -> Iterator[Any]:
    """A dataset and the datasets inside of it, each one once."""
    left, seen = deque([dataset]), dict[int, Any]()  # whose values keep the keys from being used again
    while left and len(seen) < _MOST_LOOKED_INTO:
        each = left.popleft()
        if id(each) not in seen:
            seen[id(each)] = each
            yield each
            left.extend(_inside(each))


def _inside(dataset: Any) -> Iterable[Any]:
    """The datasets that a dataset holds, where these describe its samples."""
    if isinstance(dataset, Packed):
        return [dataset.dataset]
    if isinstance(dataset, ConcatDataset):
        return dataset.datasets[:_MOST_INSIDE]
    if isinstance(dataset, TensorDataset | Table) or _library_of(dataset) in ("datasets", "grain"):
        return ()
    if _is_sequence(dataset):
        return ()
    return [value for _, value in sorted(getattr(dataset, "__dict__", {}).items()) if _is_data(value)]


def _own_digests_of(dataset: Any) -> Iterator[int]:
    """Digests of the facts of one dataset."""
    if isinstance(dataset, TensorDataset | Table):
        yield digest_of_read(list(dataset.tensors) if isinstance(dataset, TensorDataset) else dataset.columns)
    elif isinstance(dataset, Packed):
        yield dataset.checksum
    elif _library_of(dataset) == "datasets" and _has_index(dataset):
        yield _rows_of_arrow(dataset)
    elif _library_of(dataset) == "grain":
        yield from _samples_of(dataset)
    elif _is_sequence(dataset):  # these are the samples themselves
        yield from _entries_of(dataset)
    else:
        yield from _attributes_of(dataset)


def _places(length: int) -> list[int]:
    return sorted({0, length // 3, 2 * length // 3, length - 1}) if length else []


def _rows_of_arrow(dataset: Any) -> int:
    """A digest of some rows as the table stores them: the user's formats and transforms are not applied."""
    places = _places(len(dataset))
    return digest_of_read([len(dataset), dataset.with_format("arrow")[places].to_pydict() if places else None])


def _samples_of(dataset: Any) -> Iterator[int]:
    """Digests of some samples, where reading one has no effect on later ones."""
    try:
        yield from [digest_of_read(dataset[place]) for place in _places(length_of(dataset) or 0)]
    except Exception as error:
        _LOG.debug("while samples were read to compare them: %r", error)


def _attributes_of(dataset: Any) -> Iterator[int]:
    """Digests of the attributes that describe a dataset's samples: of those with an entry for each."""
    length = length_of(dataset)
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        if _is_sequence(value):
            is_samples = name == "dataset" and isinstance(dataset, Subset)
            if is_samples or (length and (len(value) == length or (_is_array(value) and len(value) > length))):
                yield from _entries_of(value)


def _is_data(value: object) -> bool:
    if _is_sequence(value):
        return False
    return isinstance(value, Dataset) or (_has_index(value) and not isinstance(value, str | bytes | torch.nn.Module))


def _has_index(value: object) -> bool:
    return issubclass(type(value), MapStyle)


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor) and value.ndim > 0


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | range | dict) or _is_array(value) or _is_table(value)


def _is_table(value: object) -> bool:
    return bool(kinds_of(value) & _TABLES)


def _step_of(value: Any) -> int:
    """How far the entries of a list lie apart that are compared."""
    return -(-len(value) // _MOST_COMPARED) or 1


def _entries_of(value: Any) -> Iterator[int]:
    """A digest of some entries; none of an empty list, or of one that is being filled."""
    if _is_array(value):
        yield digest_of_read(value)
        return
    step = _step_of(value)
    if _is_table(value):
        library = _library_of(value)
        rows = value.iloc[::step] if library == "pandas" else value[::step] if library == "polars" else value
        yield digest_of_element(rows)
        return
    some = [*islice(value.items(), 0, None, step)] if isinstance(value, dict) else value[::step]
    if len(some) and not any(each is None for each in some):
        yield _joined(map(digest_of_read, some))
