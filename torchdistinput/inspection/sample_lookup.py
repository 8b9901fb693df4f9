"""The samples of a step, and the steps of a sample, at any number of ranks, without reading.

A source tells its order (``Source.order_of``), if it can be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, final

from torchdistinput.plan.topology import Topology
from torchdistinput.sources.contract import Source
from torchdistinput.sources.epoch_rng import EpochRng
from torchdistinput.sources.kernel.epoch_order import EpochOrder, cannot_know

_MOST_SHOWN: Final = 12  # samples of a replica, in the text


@final
class ReplicaSamples(NamedTuple):
    """The samples of one replica in a step.

    Args:
      rank: the rank that reads them, among those that read different data.
      replica: its number among all replicas.
      samples: an index; or ``FileRecord``, ``SourceSample`` of a mixture, ``PackOf``; in the order of the batch.
    """

    rank: int
    replica: int
    samples: tuple[Any, ...]


@final
class StepSamples(NamedTuple):
    """The samples of a step.

    Args:
      epoch: the number of the epoch.
      step: the number of the step in it.
      num_steps: steps of the epoch.
      world_size: ranks that read different data.
      global_size: samples of the step on all ranks.
      parts: of each replica, or of those of one rank.
      notes: on what it depends.
    """

    epoch: int
    step: int
    num_steps: int
    world_size: int
    global_size: int
    parts: tuple[ReplicaSamples, ...]
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> tuple[Any, ...]:
        """The samples of all parts, one after the other."""
        return tuple(sample for part in self.parts for sample in part.samples)

    def __str__(self) -> str:
        """A line for each replica."""
        about = f"Epoch {self.epoch}, step {self.step} of {self.num_steps}, on {self.world_size} rank(s): "
        lines = [
            f"  rank {part.rank}, replica {part.replica}: "
            + (", ".join(map(str, part.samples[:_MOST_SHOWN])) or "no sample")
            + (f", and {len(part.samples) - _MOST_SHOWN} more" if len(part.samples) > _MOST_SHOWN else "")
            for part in self.parts
        ]
        return "\n".join([f"{about}{self.global_size} samples.", *lines, *self.notes])


@final
class SampleStep(NamedTuple):
    """A step of a sample, and the rank and replica that get it there."""

    step: int
    rank: int
    replica: int


def samples_of(order: EpochOrder, epoch: int, step: int, rank: int | None) -> StepSamples:
    """The samples of a step. Local.

    Raises:
      ValueError: there is no such step or rank.
    """
    world_size, local = order.topology.num_workers, order.topology.replicas_per_worker
    _check("step", step, len(order), f"epoch {epoch} has {len(order)} step(s) on {world_size} rank(s)")
    if rank is not None:
        _check("rank", rank, world_size, f"there are {world_size}")
    found = order.parts(step)
    parts = [ReplicaSamples(replica // local, replica, tuple(each)) for replica, each in enumerate(found)]
    own = tuple(part for part in parts if rank in {None, part.rank})
    return StepSamples(epoch, step, len(order), world_size, sum(map(len, found)), own, order.notes)


def steps_of(order: EpochOrder, sample: Any) -> list[SampleStep]:
    """The steps of a sample, in order. Local.

    Raises:
      ValueError: the data has no such sample.
    """
    local = order.topology.replicas_per_worker
    return [SampleStep(step, replica // local, replica) for step, replica in order.steps_of(sample)]


def asked_topology(topology: Topology, world_size: int | None) -> Topology:
    """The topology of as many ranks as are asked for; ``None`` for those that run. Local."""
    if world_size is None:
        return replace(topology, worker=0)
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; an int of 1 or more is needed.")
    return replace(topology, worker=0, num_workers=world_size)


def order_of(
    source: Source,
    epoch: int,
    topology: Topology,
    random_of: Callable[[int], EpochRng | None],
    begun_at: Callable[[int], Sequence[Any] | None],
    world_size: int | None,
) -> EpochOrder:
    """The order of an epoch, at the number of ranks that run or another one. Local.

    Args:
      source: the data.
      epoch: the number.
      topology: of the ranks that run.
      random_of: returns the random states of an epoch.
      begun_at: returns where in an epoch reading began.
      world_size: the number of ranks that are asked for; ``None`` for those that run.

    Raises:
      InputError: the order cannot be known without reading.
    """
    wanted = asked_topology(topology, world_size)
    return source.order_of(
        epoch, wanted, partial(_known, source, random_of), begun_at(epoch) if world_size is None else None
    )


def _known(source: Source, random_of: Callable[[int], EpochRng | None], epoch: int) -> EpochRng:
    random = random_of(epoch)
    if random is None:
        return EpochRng.of(source, None)
    if random.default is None and source.facts.needs_default_state:
        raise cannot_know(
            "the sampler draws from the default random state of rank 0, which others know from the first iter() on",
            "Give the DataLoader a generator=, or use a ShuffleSampler(n, seed).",
        )
    return random


def _check(name: str, value: object, count: int, why: str) -> None:
    if type(value) is not int or not 0 <= value < count:
        raise ValueError(f"{name} is {value!r}, and {why}; an int from 0 to {count - 1} is needed.")
