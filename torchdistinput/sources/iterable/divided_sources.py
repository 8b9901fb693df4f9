"""Detects data that is already divided among the ranks, and says what to do about it.

Under policy DATA every rank must have the same data, and takes its part of it. For an opaque iterable, the ranks
compare the batches that they read (see ``batch_digests``). For map-style data each rank reads other samples, so the
ranks compare facts that are known without reading a sample: the indices of a ``Subset``, a few entries of a list, a few
bytes of tensors in memory, a few rows of an Arrow table, and the names of files or samples that a dataset keeps in a
list. Reading a sample might draw random numbers, count, or take long. So a user's dataset that picks samples by its
rank is not detected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from torchdistinput.coordination.batch_digests import digest_of_read
from torchdistinput.sources.base import length_of
from torchdistinput.sources.map_style.packed import Packed
from torchdistinput.sources.map_style.table import Table

_OFF: Final = "auto_shard_policy=AutoShardPolicy.OFF (in the drop-in policy=AutoShardPolicy.OFF)"
_BY_INDEX: Final = (
    "For each sample once, at any number of ranks, give a map-style dataset whose __getitem__(index) returns "
    f"stream[index]; or read it under {_OFF}."
)
_BY_LIBRARY: Final = {
    "litdata": "A StreamingDataset of LitData divides itself by the default process group where it is iterated. "
    f"{_BY_INDEX} LitData drops samples then, so that the parts are of one size.",
    "streaming": "A StreamingDataset of MosaicML divides itself by RANK and WORLD_SIZE where it is iterated. "
    f"{_BY_INDEX} MosaicML repeats samples then, so that the parts are of one size.",
    "webdataset": "A WebDataset divides its shards by its nodesplitter: give nodesplitter=None, and where it shuffles "
    f"an rng= that is seeded alike on all ranks; or keep split_by_node, and read it under {_OFF}.",
    "datasets": "A dataset of Hugging Face is divided by split_dataset_by_node: leave that out, and seed shuffle() "
    f"alike on all ranks; or keep it, and read the dataset under {_OFF}.",
    "ray": f"A shard of Ray (get_dataset_shard, streaming_split) is a rank's own part: read it under {_OFF}.",
}
_IN_GENERAL: Final = (
    "This source divides itself, or what is random in it is not the same on all ranks. If each rank's part is to be "
    f"trained on, use {_OFF}: each rank then reads what its source yields, and nothing else; AutoShardPolicy.HINT for "
    "one that has shard(num_shards, index); or distribute_datasets_from_function. Else tell the source not to divide "
    "itself, and seed what it shuffles or augments alike on every rank, not by the rank."
)
_MOST_INSIDE: Final = 8
PART_WAY_OUT: Final = (
    "If each rank was given a part of the data already (a Subset of its own, split_dataset_by_node): give every rank "
    "the whole data, and each rank will take its part of each batch; or keep the parts, and use "
    "distribute_datasets_from_function. Random splits and random data (random_split, torch.randn) need the same seed "
    "on all ranks, and lists of files the same order."
)
"""Advice for the user if the ranks have different map-style data."""
_MOST_COMPARED: Final = 64
_NAMES_OF_INDICES: Final = ("indices", "index", "idx", "idxs", "ids")


def way_out_for(data: object) -> str:
    """Advice for the user if an iterable yields different data on each rank. Local."""
    known = (_BY_LIBRARY[library] for each in _nested(data) if (library := _library_of(each)) in _BY_LIBRARY)
    advice = next(known, "")
    return f"{advice} {_IN_GENERAL}" if advice else _IN_GENERAL


def divides_itself(data: object) -> bool:
    """Whether the data certainly yields another part on each rank. Local."""
    for each in _nested(data):
        library = _library_of(each)
        if library in ("litdata", "streaming") and type(each).__name__ == "StreamingDataset":
            return True
        if library == "datasets" and getattr(each, "_distributed", None) is not None:
            return True
        if library == "webdataset" and any(
            getattr(stage, "__name__", "") == "split_by_node" for stage in getattr(each, "pipeline", ())
        ):
            return True
    return False


def _library_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _nested(data: object) -> Iterator[object]:
    """The data, and the data inside of it, as far as its attributes show."""
    for _ in range(_MOST_INSIDE):
        yield data
        inner: Any = getattr(data, "dataset", None)
        if inner is None or inner is data:
            return
        data = inner


def part_of(dataset: Any) -> str:
    """Identifies the samples of a map-style dataset without reading any; empty if that is not possible. Local.

    Returns:
      a short text that is equal for equal data.
    """
    digests = list(_digests_of(dataset, _MOST_INSIDE))
    if not digests:
        return ""
    indices = getattr(dataset, "indices", None)
    first = f" with the indices {_few(indices)}" if isinstance(dataset, Subset) and indices is not None else ""
    return f"a {type(dataset).__name__}{first} (checksum {_joined(digests):x})"


def _joined(digests: Iterable[int]) -> int:
    return digest_of_read(" ".join(map(str, digests)).encode())


def _few(indices: Sequence[Any]) -> str:
    return ", ".join(str(int(each)) for each in indices[:4]) + (", ..." if len(indices) > 4 else "")


def _digests_of(dataset: Any, depth: int) -> Iterator[int]:
    """Digests of the known facts of a dataset's samples, and of the datasets inside of it."""
    if depth == 0:
        return
    if isinstance(dataset, TensorDataset | Table):
        yield digest_of_read(list(dataset.tensors) if isinstance(dataset, TensorDataset) else dataset.columns)
    elif isinstance(dataset, Packed):
        yield dataset.checksum
        yield from _digests_of(dataset.dataset, depth - 1)
    elif isinstance(dataset, ConcatDataset):
        for each in dataset.datasets[:_MOST_INSIDE]:
            yield from _digests_of(each, depth - 1)
    elif isinstance(dataset, list | tuple | range) and dataset:  # these are the samples themselves
        yield _joined(map(digest_of_read, dataset[:: -(-len(dataset) // _MOST_COMPARED)]))
    elif isinstance(dataset, np.ndarray | torch.Tensor):
        yield digest_of_read(dataset)
    elif _library_of(dataset) == "datasets" and hasattr(dataset, "with_format"):
        yield _rows_of_arrow(dataset)
    elif isinstance(dataset, Dataset):
        yield from _attributes_of(dataset, depth)


def _rows_of_arrow(dataset: Any) -> int:
    """A digest of some rows as the table stores them: the user's formats and transforms are not applied."""
    length = len(dataset)
    places = sorted({0, length // 3, 2 * length // 3, length - 1}) if length else []
    return digest_of_read([length, dataset.with_format("arrow")[places].to_pydict() if places else None])


def _attributes_of(dataset: Dataset[Any], depth: int) -> Iterator[int]:
    """The attributes that describe a dataset's samples: indices or names, one for each, and a wrapped dataset."""
    length = length_of(dataset)
    for name, value in sorted(getattr(dataset, "__dict__", {}).items()):
        is_inside = isinstance(value, Dataset) or _library_of(value) == "datasets"
        if is_inside or (name == "dataset" and isinstance(dataset, Subset)):
            yield from _digests_of(value, depth - 1)
        elif length and _is_sequence(value) and len(value) == length:
            some = value[:: -(-length // _MOST_COMPARED)]
            if all(map(_is_name, some)) or (name in _NAMES_OF_INDICES and all(map(_is_index, some))):
                yield _joined(digest_of_read(_plain(each)) for each in some)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | range) or (isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1)


def _is_name(value: Any) -> bool:
    """Whether the value is a text, or a tuple that begins with one, such as (path, class) of an image."""
    if isinstance(value, list | tuple) and value:
        return isinstance(value[0], str) and all(isinstance(each, str | int) for each in value)
    return isinstance(value, str)


def _is_index(value: Any) -> bool:
    return isinstance(value, int | np.integer) or (
        isinstance(value, torch.Tensor) and not value.is_floating_point() and value.device.type == "cpu"
    )


def _plain(value: Any) -> Any:
    return value if _is_name(value) else int(value)
