"""A Hugging Face streaming dataset as a ``FragmentSource``: it resumes exactly at any world size, under FILE and DATA.

Problem. The package resumes at the same number of ranks and loader workers only, and takes one example at a time.

Decisions.
- A fragment is one of the dataset's shards: a file, or a row group of a Parquet file after ``reshard()``.
- A position is the shard's own ``state_dict()`` at a batch of examples. So a resume reads the open shards again from
  their start, as the package does, but calls no ``map`` and no ``filter`` for the examples in front.
- Steps that look across shards, or whose state is not exact, are refused: each step must be of a known type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from datasets import IterableDataset

from torchdistinput.errors import InputError, SourceError
from torchdistinput.sources.formats.arrow import columns_of
from torchdistinput.sources.fragments import Fragment, FragmentSource

__all__ = ["PRIVATE_NAMES", "fragments"]

PRIVATE_NAMES: Final = {
    "datasets.IterableDataset._distributed": "whether split_dataset_by_node() gave each rank a part of its own",
    "datasets.IterableDataset._formatting": "whether examples come as Arrow tables, of which many are read at once",
    "datasets.IterableDataset._ex_iterable": "whether a step looks across shards, as a shuffle buffer or take() does",
}
"""The private names of datasets that are used here, and why."""

_BATCH: Final = 64  # examples that are made at once: 8 times faster than one by one
_BATCH_OF_COLUMNS: Final = 4096
_WITHIN_A_SHARD: Final = {
    "ExamplesIterable",
    "ArrowExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "MappedExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}
_WAYS_OUT: Final = {
    "BufferShuffledExamplesIterable": "shuffle() goes across shards: leave it out, and give the FragmentDataset "
    "shuffle_fragments=True, shuffle_buffer= and seed=",
    "RepeatExamplesIterable": "repeat() has no end of its own: leave it out, and iterate over the loader again",
    "TakeExamplesIterable": "take() counts across shards: leave it out",
    "SkipExamplesIterable": "skip() counts across shards: leave it out",
    "CyclingMultiSourcesExamplesIterable": "interleave_datasets() mixes shards: give each dataset a loader of its own",
    "RandomlyCyclingMultiSourcesExamplesIterable": "interleave_datasets() mixes shards: give each dataset a loader of "
    "its own",
}
_ELSE: Final = (
    "Or give the dataset itself to torchdistinput.DataLoader(dataset, batch_size=G): each rank then reads all of it, "
    "and keeps its part"
)


def fragments(dataset: IterableDataset, *, fill_null: Any = None) -> FragmentSource:
    """The shards of a streaming dataset as fragments, with its features, ``map`` and ``filter``. Local.

    ``torchdistinput.FragmentDataset(fragments(dataset), map_fn=...)`` shuffles and interleaves them; without more,
    ``strategy.distribute_dataset(fragments(dataset), global_batch_size=G)``. The examples are those of
    ``iter(dataset)``, with two differences: the batches and the indices of ``map`` and ``filter`` begin again in each
    shard, and under ``with_format("numpy")`` a single number may be a NumPy scalar in place of an array without
    dimensions.

    ``fragments(dataset.with_format("arrow"))`` is many times faster for numbers and texts: batches are made of whole
    columns, with the types that ``readers.parquet`` gives them, if there is no ``map_fn`` and no ``collate_fn``.

    ``map`` and ``filter`` run where examples are read: on each rank under policy DATA, and in each loader worker. What
    takes long belongs into ``map_fn``, which is called for the examples that a rank keeps; for images
    ``dataset.decode(False)`` and a ``map_fn`` that decodes. ``on_error="skip"`` leaves out examples for which
    ``map_fn`` fails; a failure in ``map`` or ``filter`` ends the epoch on all ranks.

    A resume reads the open shards from their start up to the place, as the package does. After ``dataset.reshard()`` a
    shard of Parquet is a row group, and little is read again.

    Args:
      dataset: as ``load_dataset(..., streaming=True)`` gives it, or ``map``, ``filter``, ``select_columns``,
        ``concatenate_datasets`` and the like. Its format: that of Python, ``"torch"``, ``"numpy"`` or ``"arrow"``.
      fill_null: with ``"arrow"``, what takes the place of missing values, as for ``readers.parquet``.

    Raises:
      InputError: it is another kind of dataset, or has a step that looks across shards; the message says what to do.
    """
    if not isinstance(dataset, IterableDataset):
        raise InputError(
            f"found a {type(dataset).__name__}; a datasets.IterableDataset (streaming=True) is needed. A Dataset with "
            "an index is given to torchdistinput.DataLoader as it is."
        )
    settings = vars(dataset)
    if not {"_distributed", "_ex_iterable", "_formatting"} <= settings.keys():
        raise InputError(
            "this release of datasets does not show whether the dataset was divided among the ranks, or shuffled "
            f"across shards; then it cannot be read shard by shard. {_ELSE}."
        )
    if settings["_distributed"] is not None:
        raise InputError(
            "the dataset was divided among the ranks by split_dataset_by_node(): leave that out, as each rank takes "
            "its fragments of the whole."
        )
    strange = {type(step).__name__ for step in _steps_in(settings["_ex_iterable"])} - _WITHIN_A_SHARD
    if strange:
        known = [way_out for kind, way_out in _WAYS_OUT.items() if kind in strange]
        problem = known[0] if known else f"{min(strange)} is not known to stay within a shard"
        raise InputError(f"the dataset cannot be read shard by shard: {problem}. {_ELSE}.")
    state = dataset.shard(num_shards=dataset.num_shards, index=0).state_dict()
    as_tables = getattr(settings["_formatting"], "format_type", None) == "arrow"
    steps = json.dumps([state, as_tables, str(dataset.features)])
    return _StreamFragments(dataset, steps, as_tables=as_tables, fill_null=fill_null)


@final
class _StreamFragments:
    """See ``fragments``.

    Args:
      dataset: the dataset.
      steps: a text that changes with the steps of the dataset, so that a position of other steps is refused.
      as_tables: whether examples come as Arrow tables.
      fill_null: what takes the place of missing values in them.
    """

    def __init__(self, dataset: IterableDataset, steps: str, *, as_tables: bool, fill_null: Any) -> None:
        self._dataset = dataset
        self._steps = steps
        self._as_tables = as_tables
        self._fill_null = fill_null

    def fragments(self) -> Sequence[Fragment]:
        """See ``FragmentSource.fragments``."""
        count = self._dataset.num_shards
        return [Fragment(f"shard {index} of {count}", fingerprint=self._steps) for index in range(count)]

    def read(self, fragment: Fragment, position: Any) -> Iterator[tuple[Any, Any]]:
        """See ``FragmentSource.read``."""
        shard = self._dataset.shard(num_shards=self._dataset.num_shards, index=int(fragment.name.split()[1]))
        if position is not None:
            shard.load_state_dict(position)
        at = shard.state_dict() if position is None else position
        # By iter(batch_size): in a loader worker iter() would give this worker some of the shards only.
        for batch in shard.iter(batch_size=_BATCH_OF_COLUMNS if self._as_tables else _BATCH):
            if self._as_tables:
                yield at, columns_of(batch, self._fill_null)[: batch.num_rows]
            elif isinstance(batch, dict):
                yield at, [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
            else:
                raise SourceError(
                    f"the dataset gives its examples as a {type(batch).__name__}, which has no single records: use "
                    'with_format("torch"), "numpy", "arrow" or None'
                )
            at = shard.state_dict()


def _steps_in(step: Any) -> Iterator[Any]:
    """A step of a dataset, and all steps before it."""
    yield step
    inner = vars(step)
    for before in [inner["ex_iterable"]] if "ex_iterable" in inner else inner.get("ex_iterables", ()):
        yield from _steps_in(before)
