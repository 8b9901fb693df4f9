"""What a source will read, told before it does: for ``loader.explain()``. A source that tells it is ``TellsPlan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, final, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from torchdistinput.plan.epoch_steps import EpochSteps
from torchdistinput.plan.topology import Topology

HERE: Final = "in the thread that calls next(), as in torch"
_NAMED: Final = 3


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
class ReadingPlan:
    """What a source will read.

    Args:
      data: the kind of data and its order, in words.
      whole: what there is in all, where it comes in files or fragments.
      shares: what each rank reads, where they are dealt out.
      samples: samples of an epoch that all ranks get together, where known.
      num_steps: steps of an epoch, where known.
      steps: the steps, where their sizes follow from G and the number of samples.
      unknown: why the number of steps is not known; empty if it is.
      twice: what is read by more than one rank, if there are several.
      twice_in_rank: what the loader workers of one rank may read more than once; empty for nothing.
      loader_workers: loader workers of a rank.
      batches_ahead: batches that they read ahead.
      user_code: each function of the user's, and where it runs.
      unchecked: what no rank can compare with the others.
      kind: ``"file"``, ``"fragment"`` or ``"record"``: what the data comes in; ``None`` for other data.
      bound_to_world: whether a state fits as many ranks only.
      collective_state: whether every rank must call ``state_dict``.
      state_has_random: whether a state holds torch's default random state; ``None``: as the facts of the source say.
    """

    data: str
    whole: ReadingShare | None = None
    shares: tuple[ReadingShare, ...] = ()
    samples: int | None = None
    num_steps: int | None = None
    steps: EpochSteps | None = None
    unknown: str = ""
    twice: str
    twice_in_rank: str = ""
    loader_workers: int = 0
    batches_ahead: int = 0
    user_code: tuple[tuple[str, str], ...] = ()
    unchecked: tuple[str, ...] = ()
    kind: str | None = None
    bound_to_world: bool
    collective_state: bool
    state_has_random: bool | None = None


@runtime_checkable
class TellsPlan(Protocol):
    """A source that tells what it will read."""

    def reading_plan(self, epoch: int, topology: Topology) -> ReadingPlan:
        """What will be read in an epoch on so many ranks. Local, opens nothing."""


def read_by_each_worker(loader: Any) -> str:
    """What may be read twice as torch gives each loader worker the whole of an iterable; empty for nothing."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset) or loader.num_workers <= 1:
        return ""
    return (
        f"cannot be known: an iterable is read whole by each of its {loader.num_workers} loader workers unless it "
        "divides itself (torch.utils.data.get_worker_info)"
    )


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
