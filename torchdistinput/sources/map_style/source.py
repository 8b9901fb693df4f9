"""The source for a torch ``DataLoader`` over a map-style dataset: builds a ``DataLoader`` that reads a worker's share.

The user's sampler objects, collate function, loader worker settings and generator are kept; only the indices that are
read from the dataset change. The loader of a worker is a torch ``DataLoader`` again, so random draws, loader workers,
their seeds, and the handling of their death are torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from torchdistinput.errors import ShardingError, StateMismatch
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.seed_schedule import SeedSchedule
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.base import Source, length_of, own_shard
from torchdistinput.sources.iterable.divided_sources import part_of
from torchdistinput.sources.iterable.user_state import tell_unused
from torchdistinput.sources.kernel.cut import as_is
from torchdistinput.sources.kernel.read_failures import ENDS
from torchdistinput.sources.kernel.ready_batches import ReadyFns
from torchdistinput.sources.kernel.sample_costs import Balance, balance_by_index
from torchdistinput.sources.kernel.sample_index import SampleNumbers
from torchdistinput.sources.map_style.index_batches import IndexFeed, SamplerDraws
from torchdistinput.sources.map_style.piece_dataset import PieceDataset
from torchdistinput.sources.map_style.rows import MapStream
from torchdistinput.sources.map_style.sampler_batches import batches_of
from torchdistinput.sources.map_style.shuffle_sampler import ShuffleSampler
from torchdistinput.sources.order_advice import order_advice
from torchdistinput.sources.rng import Draw, generators_of, packed, unpacked
from torchdistinput.sources.sample_seed import epoch_key
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.base_seeds import BaseSeeds
from torchdistinput.sources.torch_loader.run import LoaderRuns
from torchdistinput.sources.torch_loader.settings import (
    TORCH_SAMPLERS,
    RebuiltLoader,
    check_loader,
    failing_like_torch,
    generator_digest,
    is_read_here,
    keeps_order,
    let_torch_warn,
    sampler_in,
    settings_of,
)
from torchdistinput.step_types import Start, Stream

_WITHOUT_DRAWS = (SequentialSampler, ShuffleSampler, DistributedSampler)
"""Samplers whose order does not depend on a random state."""


def _draws_by_default(batches: Any) -> bool:
    """Whether the order may depend on torch's default random state: true unless the sampler is known not to use it."""
    inner = sampler_in(batches)
    return type(inner) not in _WITHOUT_DRAWS and not generators_of(inner)


@final
class MapLoaderSource(Source):
    """A ``DataLoader`` over a map-style dataset: batches are cut before they are read.

    Args:
      loader: the user's loader.
      policy: the policy in force.
      topology: the position of this worker among all workers.
      options: the user's options.
      like_torch: see ``settings.LikeTorch``.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        policy: AutoShardPolicy,
        topology: Topology,
        options: InputOptions,
        *,
        like_torch: bool = False,
    ) -> None:
        check_loader(loader, policy, alone=like_torch)
        self._on_failure = failing_like_torch(loader, options) if like_torch else ENDS
        self._loader = loader
        self._policy = policy
        self._options = options
        self._collates = loader.batch_sampler is not None
        self._dataset: Any = loader.dataset
        tell_unused(loader.dataset, options.own_state)
        self._batches: Any = loader.batch_sampler if self._collates else loader.sampler
        if policy is AutoShardPolicy.HINT and topology.num_workers > 1:
            self._shard(topology)
        size = self._batches.batch_size if type(self._batches) is BatchSampler else None
        shared = policy is AutoShardPolicy.DATA or topology.num_workers == 1
        self.draws_alone = self.collective_state = policy is AutoShardPolicy.HINT and not shared
        self._cutter = Cutter(topology, shared, size)
        self._balance = self._new_balance()
        self._drop_last = bool(self._collates and getattr(self._batches, "drop_last", False))
        self._feed = IndexFeed()
        twice = loader.num_workers > 0 and type(self._batches) not in (BatchSampler, *TORCH_SAMPLERS)
        lasting = loader.persistent_workers and loader.num_workers > 0
        schedule = SeedSchedule.of(persistent=lasting, sampler_twice=twice)
        self._base_seeds = BaseSeeds(loader.generator, schedule, topology.worker)
        self._reads_here = is_read_here(loader)
        collate = cast(Callable[[Any], Any], loader.collate_fn)
        self.epoch_setter = EpochSetter(
            *(loader.sampler, loader.batch_sampler, loader.dataset, self._dataset), lasting=lasting
        )
        self._pieces = PieceDataset(
            self._dataset,
            collate,
            asks=options.needs_structure(topology.replicas_per_worker, may_lack=self.may_lack_samples()),
            skip=options.skips,
            seeds=options.seed_samples,
            on_failure=self._on_failure,
            shared_epoch=self.epoch_setter.shared_epoch,
        )
        build = partial(_build, loader, self._feed, self._base_seeds)  # a method would make a cycle and keep workers
        self.workers = self._runs = LoaderRuns(build, lasting=lasting)
        self.given_seed: int | None = None
        """The base seed of ``sample_seed`` from a state that was loaded."""
        self._used_seed: int | None = None
        self.needs_default_state = _draws_by_default(self._batches)
        self.draws_order = not self.draws_alone
        self.draws_from_default_generator = loader.generator is None or self.needs_default_state
        self.bound_to_world = not shared
        by_place = options.balance is None or options.equal_counts
        certain = shared and not options.skips and by_place
        self.certain_piece_size = self._cutter.certain_piece_size(drop_last=self._drop_last) if certain else None
        self.largest_piece_size = self._cutter.largest_piece_size

    def _start(self, drawn: SamplerDraws) -> tuple[Callable[[], Any], Callable[[], None]]:
        """Two functions: the first reads the next piece of an epoch, the second ends the reading.

        Without loader workers this process reads by itself: torch's loader would do nothing else.
        """
        self._pieces.begin()
        self._feed.draws = drawn
        if self._reads_here:
            let_torch_warn(self._loader, self._base_seeds.generator)
            read, next_request = self._pieces.__getitem__, drawn.take_request
            return lambda: read(next_request()), _nothing
        run = self._runs.start(self._pieces)
        return run.__next__, lambda: self._runs.finish(run)

    def _shard(self, topology: Topology) -> None:
        """Policy HINT: the dataset's own shard, with the user's kind of sampling over it."""
        self._dataset = own_shard(self._dataset, topology.num_workers, topology.worker)
        sampler: Any = self._loader.sampler
        if type(sampler) is RandomSampler and not sampler.replacement:
            sampler = RandomSampler(self._dataset, generator=sampler.generator)
        elif type(sampler) is SequentialSampler:
            sampler = SequentialSampler(self._dataset)
        else:
            raise ShardingError(
                f"policy HINT shards the dataset, and a {type(sampler).__name__} over the whole of it does not fit the "
                "shard. Use shuffle=True or shuffle=False, or AutoShardPolicy.DATA."
            )
        batches = self._batches
        if not self._collates:
            self._batches = sampler
        elif type(batches) is BatchSampler:
            self._batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        else:
            raise ShardingError("policy HINT does not fit a batch sampler of your own. Use AutoShardPolicy.DATA.")

    def _new_balance(self) -> Balance | None:
        """Divides batches by cost, as the options say."""
        if self._options.balance is not None and self.draws_alone:
            raise ShardingError(
                "balance was given with policy HINT, where an index counts in a rank's own shard, and means another "
                "sample than in the dataset. Use AutoShardPolicy.DATA."
            )
        return balance_by_index(self._options, self._cutter, length_of(self._dataset))

    def may_lack_samples(self) -> bool:
        """See ``Source.may_lack_samples``."""
        batches = self._batches
        samples = length_of(batches.sampler) if type(batches) is BatchSampler else None
        lacks = self._cutter.may_lack_samples(drop_last=self._drop_last, num_samples=samples)
        return lacks or (self._options.skips and self._cutter.topology.num_replicas > 1)

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        inner = sampler_in(self._batches)
        return {
            "kind": f"map-style {type(self._loader.dataset).__name__}",
            "length": None if self._policy is AutoShardPolicy.HINT else length_of(self._dataset),
            "batch size": self._cutter.global_batch_size,
            "drop_last": self._drop_last,
            "sampler": type(self._loader.sampler).__name__,
            "sampler's seed": inner.key if type(inner) is ShuffleSampler else None,
        }

    @property
    def order_advice(self) -> str | None:
        """See ``Source.order_advice``."""
        return order_advice(self._loader)

    @property
    def part(self) -> str:
        """See ``Source.part``."""
        return part_of(self._dataset) if self._cutter.read_by_all else ""

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.epoch_fingerprint``."""
        if self.draws_alone:  # shards of different lengths take the generators to different states
            return {}
        inner = [generator_digest(each) for each in self.generators() if each is not self._loader.generator]
        return {"generator state": generator_digest(self._loader.generator), "sampler's generator state": inner}

    def num_steps(self) -> int | None:
        """See ``Source.num_steps``."""
        return length_of(self._batches) if self._cutter.shared else None

    def go_on_from(self, before: Source) -> None:
        """See ``Source.go_on_from``."""
        super().go_on_from(before)
        if isinstance(before, MapLoaderSource):
            self.given_seed = before.given_seed

    def close(self) -> None:
        """See ``Source.close``."""
        self._runs.close()

    @property
    def seeds(self) -> SeedSchedule:
        """See ``Source.seeds``."""
        return self._base_seeds.schedule

    def generators(self) -> Sequence[torch.Generator]:
        """See ``Source.generators``. Under HINT each worker has its own, see ``Source.draws_alone``."""
        return () if self.draws_alone else self._own_generators()

    def first_position(self) -> list[Any]:
        """See ``Source.first_position``."""
        return ["map", 0, *(packed(each.get_state()) for each in self._own_generators())]

    def restore(self, position: Sequence[Any]) -> None:
        """See ``Source.restore``."""
        for generator, text in zip(self._own_generators(), position[2:], strict=False):
            generator.set_state(unpacked(text))

    def _own_generators(self) -> Sequence[torch.Generator]:
        return generators_of(self._loader, self._loader.sampler, self._loader.batch_sampler)

    def check(self, position: Sequence[Any]) -> None:
        """See ``Source.check``."""
        states = len(self._own_generators()) if self.draws_alone else 0
        if len(position) != 2 + states or position[0] != "map" or type(position[1]) is not int:
            raise StateMismatch(f"position: found {position!r:.100} in the state, not one of map-style data.")

    def open(self, epoch: int, draws: Draw, start: Start) -> Stream:
        """See ``Source.open``."""
        self._base_seeds.schedule = start.seeds or self._base_seeds.schedule
        rows = start.steps
        if start.position is not None:
            rows = start.position[1]
            if start.steps and self.draws_alone:
                self.restore(start.position)
        states = [each.get_state() for each in self._own_generators()] if self.draws_alone else []

        def begin() -> tuple[SamplerDraws, Callable[[], Any], Callable[[], None]]:
            for before in range(start.replay, 0, -1):
                self.epoch_setter.tell(epoch - before)
                self._replay()
            self.epoch_setter.tell(epoch)
            drawn = self._new_draws(draws)
            if self._base_seeds.draw():
                drawn = self._new_draws(draws)
            drawn.key = epoch_key(self._seed_of_samples(), epoch)
            drawn.skip(rows, start.drawn)
            return drawn, *self._start(drawn)

        drawn, read, end = draws(begin)

        def close() -> None:
            end()
            self.epoch_setter.forget_calls()

        return MapStream(
            drawn,
            read,
            self._cutter,
            pieces=self._pieces if self._reads_here else None,
            in_background=self._loader.num_workers > 0,
            first_row=rows,
            states=states,
            close=close,
            goes_on=self._on_failure.goes_on,
            in_order=keeps_order(self._loader),
            draws_ahead=bool(self._own_generators()),
            collates=self._collates or type(self._batches) is BatchSampler,
            ready=ReadyFns(self._options.count_fn, self._options.split_fn),
        )

    @property
    def sample_seed(self) -> int | None:
        """See ``Source.sample_seed``."""
        return self._used_seed if self.given_seed is None else self.given_seed

    def give_sample_seed(self, seed: int | None) -> None:
        """See ``Source.give_sample_seed``."""
        self.given_seed = seed

    def _seed_of_samples(self) -> int:
        """The base seed of ``sample_seed``."""
        generator = self._loader.generator
        # Without a generator the sampler draws from the default state, here that of rank 0: it gives the base seed.
        own = torch.initial_seed() if generator is None else generator.initial_seed()
        self._used_seed = own if self.given_seed is None else self.given_seed
        return self._used_seed

    def _new_draws(self, draws: Draw) -> SamplerDraws:
        lead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        inner = sampler_in(self._batches)
        plain = type(inner) in TORCH_SAMPLERS and type(self._batches) in (BatchSampler, *TORCH_SAMPLERS)
        numbers = SampleNumbers(self._cutter.topology, sharded=self.draws_alone, shared=self._cutter.shared)
        return SamplerDraws(
            self._batches,
            self._cutter,
            collate=self._collates,
            lead=lead,
            draw=draws,
            once=plain,
            numbers=numbers if self._options.with_index else None,
            balance=self._balance,
            on_failure=self._on_failure,
        )

    def _replay(self) -> None:
        """Makes the random draws of a whole epoch without reading samples."""
        batches = batches_of(self._batches)
        if self._base_seeds.draw():
            batches = batches_of(self._batches)
        batches.skip(sys.maxsize)


def _build(loader: DataLoader[Any], feed: IndexFeed, seeds: BaseSeeds, dataset: PieceDataset) -> DataLoader[Any]:
    """The loader that reads the pieces."""
    settings = {**settings_of(loader), "generator": seeds.generator}
    return RebuiltLoader(dataset, batch_size=None, sampler=feed, collate_fn=as_is, **settings)


def _nothing() -> None:
    pass
