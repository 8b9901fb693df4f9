"""What a loader will do in an epoch, told before it does it: for ``loader.explain()``.

One value: the source fills in what it knows, ``inspection.explanation`` what the options, the policy and the devices
say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from torch.utils.data import DataLoader, IterableDataset

PASSED_OVER: Final = "a batch has fewer samples than there are replicas, and steps without any are passed over"
HERE: Final = "in the thread that calls next(), as in torch"
_NAMED: Final = 3
_MOST_RANKS: Final = 8  # with a line of their own in the text
_MOST_UNITS: Final = 1024


@final
@dataclass(frozen=True)
class ReadingShare:
    """What one rank reads in an epoch; ``None`` for a number that is not known before it is read.

    Args:
      fragments: files or fragments.
      num_bytes: their size.
      records: their records.
      first: the names of the first of them.
    """

    fragments: int
    num_bytes: int | None
    records: int | None
    first: tuple[str, ...]

    @classmethod
    def of(
        cls, files: Sequence[int], names: Sequence[str], num_bytes: Sequence[int] | None, records: Sequence[int] | None
    ) -> ReadingShare:
        """The share of some files, by their place in the lists."""
        size, count = (None if each is None else sum(each[file] for file in files) for each in (num_bytes, records))
        return cls(len(files), size, count, tuple(names[file] for file in files[:_NAMED]))


@final
@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a loader will do in its next epoch. ``str`` of it is for people.

    Args:
      data: the kind of data and its order.
      whole: files, bytes and records in all, for files and fragments; else ``None``.
      shares: the same for each rank, where files are dealt out.
      kind: ``"file"``, ``"fragment"`` or ``"record"``: what the data comes in; ``None`` for other data.
      num_steps: steps of the epoch; ``None`` if that is not known before it is read.
      samples: samples of the epoch that all ranks get together; ``None`` likewise.
      unknown: why; empty if known.
      read_twice: what is read by more than one rank, or by more than one loader worker of a rank.
      loader_workers: loader workers of each rank.
      batches_ahead: batches that they read ahead.
      user_code: each function of the user's, and where it runs.
      unchecked: what the ranks cannot compare.
      state_is_collective: whether every rank must call ``state_dict``.
      bound_to_world: whether a state fits as many ranks only.
      state_has_random: whether a state holds random states that user code draws from; ``None``: those of the order.
      epoch: the number of the epoch.
      world_size: ranks that read different data.
      num_replicas: replicas on all ranks.
      policy: the policy in force.
      policy_reason: why it is.
      batch_size: samples of a step on all ranks; ``None``: batches of the source's own sizes.
      read_ahead: how far is read ahead.
      state: what a state holds, and where it can be loaded.
    """

    data: str
    whole: ReadingShare | None = None
    shares: tuple[ReadingShare, ...] = ()
    kind: str | None = None
    num_steps: int | None = None
    samples: int | None = None
    unknown: str = ""
    read_twice: str
    loader_workers: int = 0
    batches_ahead: int = 0
    user_code: tuple[tuple[str, str], ...] = ()
    unchecked: tuple[str, ...] = ()
    state_is_collective: bool
    bound_to_world: bool
    state_has_random: bool | None = None
    epoch: int = 0
    world_size: int = 1
    num_replicas: int = 1
    policy: str = ""
    policy_reason: str = ""
    batch_size: int | None = None
    read_ahead: str = ""
    state: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, ints and strings, with the same keys always."""
        code = [{"what": what, "where": where} for what, where in self.user_code]
        found: dict[str, Any] = json.loads(json.dumps({**asdict(self), "user_code": code}))
        return found

    def __str__(self) -> str:
        """The plan in at most 30 lines."""
        return "\n".join(f"{name + ':' if name else '':<13}{line}" for name, line in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        whole = "" if self.whole is None else _told(self.whole)
        lines = [
            ("Data", f"{self.data}; {whole} in all" if whole else self.data),
            ("Ranks", f"{self.world_size}, with {counted(self.num_replicas, 'replica')} in all"),
            ("Policy", f"{self.policy}: {self.policy_reason}"),
            (
                "Batch",
                "as the source makes it" if self.batch_size is None else f"{self.batch_size} samples over all ranks",
            ),
            (f"Epoch {self.epoch}", self._epoch()),
        ]
        lines += self._ranks()
        lines += [("Read twice", self.read_twice), ("Read ahead", self.read_ahead)]
        lines += [
            ("Your code" if not place else "", f"{what}: {where}") for place, (what, where) in enumerate(self.user_code)
        ]
        lines.append(("State", self.state))
        lines += [("Not checked" if not place else "", each) for place, each in enumerate(self.unchecked)]
        return lines

    def _epoch(self) -> str:
        samples = "" if self.samples is None else f", {counted(self.samples, 'sample')}"
        if self.num_steps is not None:
            return f"{counted(self.num_steps, 'step')}{samples}"
        return f"the number of steps is not known{samples}: {self.unknown}"

    def _ranks(self) -> list[tuple[str, str]]:
        """What each rank reads; of many ranks the least and the most."""
        if not self.shares:
            return []
        told = [
            f"{_told(share, self.kind)}: "
            + ", ".join(name.rsplit("/", 1)[-1] for name in share.first)
            + (", ..." if share.fragments > len(share.first) else "")
            for share in self.shares
        ]
        if len(told) <= _MOST_RANKS:
            return [(f"Rank {rank}", line) for rank, line in enumerate(told)]

        def weight(rank: int) -> tuple[int, int]:
            share = self.shares[rank]
            return share.num_bytes or share.records or 0, share.fragments

        least, most = min(range(len(told)), key=weight), max(range(len(told)), key=weight)
        return [("Least reads", f"rank {least}, {told[least]}"), ("Most reads", f"rank {most}, {told[most]}")]


def read_by_each_worker(loader: Any, by_ranks: str) -> str:
    """What of an iterable is read twice: by more than one rank, and by the loader workers of each.

    Args:
      loader: that reads it; ``None`` for none.
      by_ranks: what several ranks read; empty for one rank.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset) or loader.num_workers <= 1:
        return by_ranks or "nothing"
    found = (
        f"cannot be known: an iterable is read whole by each of its {loader.num_workers} loader workers unless it "
        "divides itself (torch.utils.data.get_worker_info)"
    )
    return f"{by_ranks}. Within a rank it {found}" if by_ranks else found


def workers_of(loader: Any) -> tuple[int, int, str]:
    """The loader workers of a loader, the batches that they read ahead, and where the code runs that reads."""
    count = 0 if loader is None else loader.num_workers
    if not count:
        return 0, 0, HERE
    return (
        count,
        count * (loader.prefetch_factor or 0),
        f"in the loader worker{'' if count == 1 else 's'} of each rank ({count})",
    )


def _told(share: ReadingShare, kind: str | None = None) -> str:
    parts = [counted(share.fragments, kind)] if kind else []
    parts += [] if share.num_bytes is None else [in_bytes(share.num_bytes)]
    parts += [] if share.records is None else [counted(share.records, "record")]
    return ", ".join(parts)


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def in_bytes(count: float) -> str:
    """A number of bytes, in words."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < _MOST_UNITS or unit == "TiB":
            break
        count /= _MOST_UNITS
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
