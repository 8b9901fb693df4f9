"""Computes the steps of an epoch of files without reading their records, and warns of uneven files under FILE.

Under FILE the steps go on until the worker with the most data is done; meanwhile the others have empty batches. The
warning compares the numbers of records if all fragments tell them. Otherwise it compares the sizes of the files if they
were listed (as for a pattern), or else the numbers of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torchdistinput.errors import ShardingError
from torchdistinput.plan.batching import Cutter, num_batches
from torchdistinput.plan.sharding import shards_of
from torchdistinput.sources.datasets.fragment_dataset import FragmentDataset

_WARNED_FROM: Final = 1.25  # times as many steps


def steps_of(records: list[int] | None, global_batch_size: int, *, drop_last: bool) -> int | None:
    """The steps of an epoch whose batches all workers share, from the records of each file; ``None`` for ``None``."""
    if records is None:
        return None
    return sum(records) // global_batch_size if drop_last else num_batches(sum(records), global_batch_size)


def sizes_of(dataset: FragmentDataset) -> list[int]:
    """The sizes of all files, to deal them by size. Local.

    Raises:
      ShardingError: a size is not known.
      SourceError: naming a file whose size cannot be asked.
    """
    sizes = dataset.ask_num_bytes()
    if sizes is None:
        raise ShardingError(
            f'file_assignment="by_size" needs the size of each {dataset.kind}, and one of them is not known. Give each '
            'Fragment its num_bytes, or use file_assignment="in_turn".'
        )
    return sizes


def skew_warning(
    dataset: FragmentDataset, cutter: Cutter, by_size: Sequence[int] | None = None, *, drop_last: bool
) -> str:
    """The warning for uneven files in the first epoch under FILE; empty if they are even. Local.

    Args:
      dataset: the files.
      cutter: how the batches of a worker are cut.
      by_size: the sizes of the files, if they are dealt by size.
      drop_last: whether a short last batch is dropped.
    """
    order, records, sizes = dataset.file_order(0), dataset.num_records(), dataset.num_bytes()
    known, what = (records, "records") if records is not None else (sizes, "bytes")
    if known is None:
        known, what = [1] * len(order), "files"
    workers = range(cutter.topology.num_workers)
    shares = [sum(known[file] for file in share) for share in shards_of(order, len(workers), by_size)]
    most, total = max(shares), sum(shares)
    if not total:
        return ""
    more = most * len(workers) / total
    steps = f"about {more:.1f} times as many steps as"
    size = cutter.global_batch_size
    if records is not None and size is not None:
        under_file = max(_steps(share, cutter, size, drop_last=drop_last) for share in shares)
        under_data = steps_of(records, size, drop_last=drop_last) or 0
        more, steps = under_file / max(1, under_data), f"{under_file} steps instead of the {under_data}"
    if more < _WARNED_FROM:
        return ""
    first = "the files are of one size, an" if what == "files" else "An"
    return (
        f"policy FILE deals {len(order)} file(s) out to {len(workers)} data-parallel ranks: rank {shares.index(most)} "
        f"reads {most / total:.0%} of the {what}, rank {shares.index(min(shares))} {min(shares) / total:.0%}. "
        f"{'If ' * (what == 'files')}{first} epoch takes {steps} under policy DATA, as it lasts until the rank with "
        "the most is done, and the others have empty batches meanwhile. Use auto_shard_policy=AutoShardPolicy.DATA, "
        'file_assignment="by_size" (with fragment_bytes= for large files), or more files of about one size.'
    )


def _steps(records: int, cutter: Cutter, size: int, *, drop_last: bool) -> int:
    """The steps of a worker that has ``records`` records of its own."""
    full, last = divmod(records, size)
    return full * len(cutter.rows(size)) + (len(cutter.rows(last)) if last and not drop_last else 0)
