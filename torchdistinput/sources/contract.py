"""``Source``: what the pipeline asks of the data of one dataset, whatever its kind.

What never changes is a value, ``SourceFacts``, that a source makes once. What a user may change from epoch to epoch
has an object of its own: the epochs (``user_epoch``), the random states (``random_state``), the loader workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, final

from torchdistinput.plan.topology import Topology
from torchdistinput.sources.kernel.epoch_order import EpochOrder, cannot_know
from torchdistinput.sources.kernel.explanation import Explanation
from torchdistinput.sources.random_state import RandomState
from torchdistinput.sources.rng import WithRng
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.open_runs import OpenRuns
from torchdistinput.step_types import Start, Stream
from torchdistinput.tracing.read_times import ReadTimes

Collate = Callable[[Any], Any]
"""Makes a batch of samples."""

CallOnEachRank = Callable[[Callable[[], Any]], list[Any]]
"""Calls a function on every rank and returns the plain values of all ranks. If a call fails, all ranks raise alike."""


@final
@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """What is certain of a source when it is made. The defaults are for data without the feature.

    Args:
      fingerprint: plain facts that must be equal on all ranks, and in a saved state.
      lists: lists of the fingerprint, which has their digests under the same names.
      sample_identity: a text that identifies the samples of map-style data, if all workers must have the same samples;
        empty also where they cannot be identified without reading them.
      read_by_all_hint: advice for the user if the workers read different data, where every worker may have to read all
        of it; empty if they need not read the same data, or the data is divided before it is read.
      may_lack_samples: whether some replica may be left without a sample at some step, so that an empty piece is made.
      certain_piece_size: the size of every piece, if all pieces have the same size for certain.
      largest_piece_size: the largest possible size of a piece, if it is known.
      of_one_batch: whether the pieces of a step are cut out of one batch; else each local replica gets its own batch.
      bound_to_world: whether a saved position fits the same number of workers only.
      collective_state: whether each worker has a position of its own, so that ``state_dict`` is collective.
      has_epoch_position: whether the start of an epoch has a position too, see ``Source.next_epoch_position``.
      draws_order: whether ``open`` uses ``with_rng`` to begin an epoch, and to draw each batch of indices; the first
        batch is drawn at the first ``next`` at the latest.
      draws_alone: whether each worker draws from random states of its own, which its position has.
      needs_default_state: whether the order of an epoch may depend on torch's default random state.
      draws_from_default_generator: whether making a stream draws from torch's default random state (all ranks then use
        the state of rank 0).
      times: where the time of each batch goes; ``None`` where it is not measured.
    """

    fingerprint: Mapping[str, Any]
    lists: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sample_identity: str = ""
    read_by_all_hint: str = ""
    may_lack_samples: bool
    certain_piece_size: int | None = None
    largest_piece_size: int | None = None
    of_one_batch: bool = True
    bound_to_world: bool
    collective_state: bool
    has_epoch_position: bool = False
    draws_order: bool = False
    draws_alone: bool = False
    needs_default_state: bool
    draws_from_default_generator: bool
    times: ReadTimes | None = None


@final
class EpochFacts(NamedTuple):
    """Facts that must be equal on all ranks at the start of an epoch."""

    fingerprint: Mapping[str, Any] = MappingProxyType({})
    """Plain facts, such as a generator's state."""
    lists: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Lists of texts: what is read, entry by entry."""


class Source(ABC):
    """The data of one distributed dataset, as one worker reads it. Defaults are for data without the feature."""

    facts: SourceFacts
    """What is certain when the source is made."""
    user_epoch: EpochSetter
    """The epochs that the user's samplers and datasets were set to."""
    random_state: RandomState
    """The random states that an epoch depends on."""
    workers: OpenRuns | None = None
    """The loader workers of this process; ``None`` where it cannot have any."""

    def fingerprint(self) -> Mapping[str, Any]:
        """``SourceFacts.fingerprint``, with the length that the data has now. Local."""
        return self.facts.fingerprint

    def epoch_facts(self) -> EpochFacts:
        """What must be equal on all ranks at the start of the next epoch."""
        return EpochFacts()

    def leaves_empty(self) -> bool:
        """Whether some replica is left without a sample in the next epoch, as far as its lengths tell now."""
        return self.facts.may_lack_samples

    def num_steps(self, position: Sequence[Any] | None = None, *, for_len: bool = False) -> int | None:
        """The number of steps of an epoch, if it is known before the epoch is read.

        Args:
          position: a saved position in the epoch, which another number of workers may have begun.
          for_len: whether the number is for ``len``: files are then opened to find it, and torch's estimate counts.
        """
        return None

    def num_samples(self) -> int | None:
        """The number of samples of an epoch without ``drop_last``, if it is known before the epoch is read."""
        return None

    @abstractmethod
    def reading_plan(self, epoch: int, topology: Topology) -> Explanation:
        """What the source says of an epoch on so many ranks; ``explain`` adds the rest. Local, opens nothing."""

    @abstractmethod
    def check(self, position: Sequence[Any]) -> None:
        """Refuses a position from which the data cannot be read on. Local.

        Raises:
          StateMismatch: the position is malformed, or the data at the position has changed since.
        """

    def next_epoch_position(self) -> list[Any] | None:
        """The position at the start of the next epoch, where each worker draws alone or the data keeps a state.

        ``None`` for other data, see ``SourceFacts.has_epoch_position``. Caller's thread.
        """
        return None

    def joined(self, positions: Sequence[list[Any]]) -> list[Any] | None:
        """One position for those of all workers; ``None``: each worker keeps its own, for the same number of workers.

        Args:
          positions: of each worker, after the same row.
        """
        alike = all(position == positions[0] for position in positions)
        return positions[0] if alike and not self.facts.bound_to_world else None

    def resume(self, epoch: int, start: Start, call_on_each_rank: CallOnEachRank) -> Start:
        """Prepares an ``open`` that starts in the middle of an epoch. Caller's thread.

        Args:
          epoch: the number of the epoch.
          start: where the epoch is to begin.
          call_on_each_rank: see ``CallOnEachRank``.

        Returns:
          the start to pass to ``open``.

        Raises:
          StateMismatch: the data cannot be read on from the position.
        """
        return start

    @abstractmethod
    def open(self, epoch: int, with_rng: WithRng, start: Start) -> Stream:
        """Opens a stream of one epoch. Caller's thread.

        Args:
          epoch: the number of the epoch.
          with_rng: calls user code that may draw from the default random state.
          start: where in the epoch the stream begins.
        """

    def order_of(
        self, epoch: int, topology: Topology, random_of: Callable[[int], Any], begun_at: Sequence[Any] | None
    ) -> EpochOrder:
        """The order of the samples of an epoch, known without reading. Local.

        Args:
          epoch: its number.
          topology: how many workers and replicas there are; which worker this is does not matter.
          random_of: returns the random states of an epoch (``EpochRng``), for a sampler that draws.
          begun_at: where in the epoch reading began; ``None`` for its start, or if that does not matter.

        Raises:
          InputError: the order cannot be known; the message says what would make it known.
        """
        raise cannot_know(
            "the data is an iterable or a dataset function, whose order only it knows",
            "Give a map-style dataset, a FileDataset of parquet, npy_rows or fixed_length_records, or a FragmentSource "
            "whose fragments have num_records.",
        )

    def close(self) -> None:  # noqa: B027 - most have none
        """Ends persistent loader workers. Idempotent; the next ``open`` starts new ones."""
