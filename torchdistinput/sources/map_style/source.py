"""The source for a torch ``DataLoader`` over a map-style dataset: builds a ``DataLoader`` that reads a worker's share.

The user's sampler objects, collate function, loader worker settings and generator are kept; only the indices that are
read from the dataset change. The loader of a worker is a torch ``DataLoader`` again, so random draws, loader workers,
their seeds, and the handling of their death are torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast, final

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
from torchdistinput.plan.permutation import Ints
from torchdistinput.plan.topology import AutoShardPolicy, Topology, is_shared
from torchdistinput.sources.checks import length_of, own_shard
from torchdistinput.sources.contract import EpochFacts, Source, SourceFacts
from torchdistinput.sources.iterable.divided_sources import SAMPLES, SamplesSeen, part_of
from torchdistinput.sources.iterable.user_state import tell_unused
from torchdistinput.sources.kernel.epoch_order import EpochOrder, IndexSequence, SampleSequence, TellsParts, cannot_know
from torchdistinput.sources.kernel.explanation import HERE, PASSED_OVER, Explanation, workers_of
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.kernel.ready_batches import ReadyFns
from torchdistinput.sources.kernel.sample_costs import CostDivider, balance_by_index
from torchdistinput.sources.kernel.sample_index import SampleNumbers
from torchdistinput.sources.map_style.drawn_again import DrawnIndices, draw_again
from torchdistinput.sources.map_style.map_stream import IndexFeed, MapStream, SamplerDraws
from torchdistinput.sources.map_style.piece_dataset import PieceDataset
from torchdistinput.sources.map_style.sampler_batches import batches_of
from torchdistinput.sources.map_style.samplers import ShuffleSampler
from torchdistinput.sources.random_state import BaseSeeds, RandomState
from torchdistinput.sources.rng import WithRng, generators_of, packed
from torchdistinput.sources.sample_seed import epoch_key
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.loader_runs import LoaderRuns
from torchdistinput.sources.torch_loader.settings import (
    TORCH_SAMPLERS,
    check_loader,
    generator_digest,
    is_read_here,
    keeps_order,
    let_torch_warn,
    sampler_in,
)
from torchdistinput.step_types import Start, Stream
from torchdistinput.tracing.read_times import ReadTimes

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
        alone = policy is AutoShardPolicy.OFF and topology.num_replicas == 1
        check_loader(loader, policy, alone=like_torch or alone)
        self._like_torch = like_torch
        self._loader = loader
        self._options = options
        self._times = ReadTimes() if options.measures else None
        self._policy = policy
        self._collates = loader.batch_sampler is not None
        self._dataset: Any = loader.dataset
        tell_unused(loader.dataset, options.own_state)
        self._batches: Any = loader.batch_sampler if self._collates else loader.sampler
        if policy is AutoShardPolicy.HINT and topology.num_workers > 1:
            self._shard(topology)
        size = self._batches.batch_size if type(self._batches) is BatchSampler else None
        shared = is_shared(policy, topology)
        self._draws_alone = policy is AutoShardPolicy.HINT and not shared
        self._cutter = Cutter(topology, shared, size)
        self._seen = SamplesSeen.of(self._dataset)
        self._balance = self._new_balance()
        self._drop_last = bool((self._collates or size is not None) and getattr(self._batches, "drop_last", False))
        self._feed = IndexFeed()
        persistent = loader.persistent_workers and loader.num_workers > 0
        self._base_seeds = BaseSeeds(loader.generator, topology.worker, persistent=persistent)
        self._reads_here = is_read_here(loader)
        collate = cast(Callable[[Any], Any], loader.collate_fn)
        samplers = loader.sampler, loader.batch_sampler
        self.user_epoch = EpochSetter(*samplers, loader.dataset, self._dataset, persistent=persistent)
        self.random_state = RandomState(
            *(loader, *samplers),
            own_texts=itemgetter(slice(2, None)) if self._draws_alone else None,
            seeds=self._base_seeds,
            seeds_samples=True,
        )
        lacks = self._lacks(None)  # a list may grow between epochs, and the length of a sampler may be wrong
        self._pieces = PieceDataset(
            self._dataset,
            collate,
            asks=options.needs_structure(topology.replicas_per_worker, may_lack=lacks),
            skip=options.skips,
            seeds=options.seed_samples,
            shared_epoch=self.user_epoch.shared_epoch,
            times=self._times,
        )
        self.workers = self._runs = LoaderRuns(loader, self._base_seeds, sampler=self._feed, times=self._times)
        by_place = options.balance is None or options.equal_counts
        certain = shared and not options.skips and by_place
        needs_default = _draws_by_default(self._batches)
        self.facts = SourceFacts(
            times=self._times,
            fingerprint=self.fingerprint(),
            sample_identity=part_of(self._dataset) if self._cutter.read_by_all else "",
            may_lack_samples=lacks,
            certain_piece_size=self._cutter.certain_piece_size(drop_last=self._drop_last) if certain else None,
            largest_piece_size=self._cutter.largest_piece_size,
            bound_to_world=not shared,
            collective_state=self._draws_alone,
            has_epoch_position=self._draws_alone,
            draws_order=not self._draws_alone,
            draws_alone=self._draws_alone,
            needs_default_state=needs_default,
            draws_from_default_generator=loader.generator is None or needs_default,
        )

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

    def _new_balance(self) -> CostDivider | None:
        """Divides batches by cost, as the options say."""
        if self._options.balance is not None and self._draws_alone:
            raise ShardingError(
                "balance was given with policy HINT, where an index counts in a rank's own shard, and means another "
                "sample than in the dataset. Use AutoShardPolicy.DATA."
            )
        return balance_by_index(self._options, self._cutter, length_of(self._dataset))

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        inner = sampler_in(self._batches)
        return {
            "kind": f"map-style {type(self._loader.dataset).__name__}",
            "length": None if self._policy is AutoShardPolicy.HINT else length_of(self._dataset),
            "batch size": self._cutter.global_batch_size,
            "drop_last": self._collates and self._drop_last,
            "sampler": type(self._loader.sampler).__name__,
            "sampler's seed": inner.key if type(inner) is ShuffleSampler else None,
        }

    def _lacks(self, num_samples: int | None) -> bool:
        """Whether some replica may be left without a sample in an epoch of so many samples; ``None``: not known."""
        is_ready = not self._collates and type(self._batches) is not BatchSampler
        lacks = self._cutter.may_lack_samples(
            drop_last=self._drop_last, num_samples=num_samples, cuts_empty=is_ready and self._options.cuts_empty
        )
        return lacks or (self._options.skips and self._cutter.topology.num_replicas > 1)

    def leaves_empty(self) -> bool:
        """See ``Source.leaves_empty``."""
        return self._lacks(self.num_samples())

    def epoch_facts(self) -> EpochFacts:
        """See ``Source.epoch_facts``."""
        if self._draws_alone:  # shards of different lengths take the generators to different states
            return EpochFacts()
        samples: dict[str, Any] = {"length": length_of(self._dataset)}
        if self._cutter.read_by_all:
            samples |= {SAMPLES: self._seen.now(self._dataset)}
        own = self._loader.generator
        inner = [generator_digest(each) for each in self.random_state.generators if each is not own]
        return EpochFacts({**samples, "generator state": generator_digest(own), "sampler's generator state": inner})

    def num_steps(self, position: Sequence[Any] | None = None, *, for_len: bool = False) -> int | None:
        """See ``Source.num_steps``."""
        return length_of(self._batches) if self._cutter.shared else None

    def num_samples(self) -> int | None:
        """See ``Source.num_samples``."""
        return length_of(self._batches.sampler) if type(self._batches) is BatchSampler else None

    def reading_plan(self, epoch: int, topology: Topology) -> Explanation:
        """See ``Source.reading_plan``."""
        workers, ahead, where = workers_of(self._loader)
        inner, size = sampler_in(self._batches), self._cutter.global_batch_size
        shared = is_shared(self._policy, topology)
        hints = self._policy is AutoShardPolicy.HINT and topology.num_workers > 1
        num_steps, samples, unknown = length_of(self._batches) if shared else None, None, "no len()"
        if size is not None and not hints and (count := length_of(self._batches.sampler)) is not None:
            cutter = Cutter(topology, shared, size)
            counts = [count] * (1 if shared else topology.num_workers)
            num_steps, samples = cutter.epoch(counts, drop_last=self._drop_last)
            unknown = PASSED_OVER
        order = {SequentialSampler: "in order", RandomSampler: "shuffled by torch's RandomSampler"}.get(
            type(inner), f"in the order of a {type(inner).__name__}"
        )
        code = [(f"{type(inner).__name__} (the order)", HERE)] if type(inner) not in TORCH_SAMPLERS else []
        code += [(f"{type(self._dataset).__name__}.__getitem__ and collate_fn", where)]
        if callable(self._options.costs):
            code.append(("balance", HERE))
        twice, unchecked = "nothing: each rank reads the samples of its own parts only", ""
        if hints:
            twice, unchecked = "nothing, if shard() of the dataset divides it", "whether shard() leaves nothing out"
        elif not shared:
            twice = "everything: each rank reads all samples (policy OFF)"
        elif topology.num_workers > 1 and not part_of(self._dataset):
            unchecked = "whether an index is the same sample on each rank (lengths and drawn indices are compared)"
        total = length_of(self._dataset)
        kind = f"{type(self._dataset).__name__}, map-style"
        return Explanation(
            data=f"{kind}, {order}" if total is None else f"{kind}, {total:,} samples, {order}",
            num_steps=num_steps,
            samples=samples,
            unknown="" if num_steps is not None else "each rank has a shard of its own" if hints else unknown,
            read_twice="nothing" if topology.num_workers == 1 else twice,
            loader_workers=workers,
            batches_ahead=ahead,
            user_code=tuple(code),
            unchecked=(unchecked,) if unchecked else (),
            bound_to_world=not shared,
            state_is_collective=hints,
        )

    def order_of(
        self, epoch: int, topology: Topology, random_of: Callable[[int], Any], begun_at: Sequence[Any] | None
    ) -> EpochOrder:
        """See ``Source.order_of``: a ``ShuffleSampler`` is asked, as are indices in order; others draw again."""
        inner = sampler_in(self._batches)
        if self._draws_alone or (topology.num_workers > 1 and self._policy is AutoShardPolicy.HINT):
            raise cannot_know("each rank draws the order of its own shard (policy HINT)", "Use AutoShardPolicy.DATA.")
        if isinstance(inner, DistributedSampler):
            raise cannot_know(
                "each rank has a sampler of its own (DistributedSampler)",
                "Use AutoShardPolicy.DATA with the sampler of one process.",
            )
        shared = is_shared(self._policy, topology)
        sequence, ends, notes = self._sequence_of(epoch, inner, random_of)
        cutter = Cutter(topology, shared, self._cutter.global_batch_size)
        return EpochOrder(
            topology,
            [sequence],
            cutter.global_batch_size,
            shared=shared,
            drop_last=self._drop_last,
            ends=ends,
            balance=balance_by_index(self._options, cutter, length_of(self._dataset)),
            composed=self._dataset if isinstance(self._dataset, TellsParts) else None,
            notes=notes,
        )

    def _sequence_of(
        self, epoch: int, inner: Any, random_of: Callable[[int], Any]
    ) -> tuple[SampleSequence, Ints | None, tuple[str, ...]]:
        """The samples of an epoch; where their batches end, if they have sizes of their own; and notes."""
        even = type(self._batches) is BatchSampler
        if even and type(inner) in (SequentialSampler, ShuffleSampler):
            order = inner.order(epoch) if isinstance(inner, ShuffleSampler) else range(len(inner.data_source))
            return IndexSequence(order), None, ()
        random = random_of(epoch)
        holders = self._loader, self._loader.sampler, self._loader.batch_sampler
        batches = draw_again(self._batches, holders, self._loader.generator, random, epoch)
        if not self._collates and any(not isinstance(each, list | tuple | IndexArray) for each in batches):
            raise cannot_know(
                "each index of the sampler is a batch that the dataset makes (batch_size=None)",
                "Give the DataLoader a batch_size, or a sampler that draws lists of indices.",
            )
        drawn = DrawnIndices(batches)
        note = f"The order was drawn again by a copy of the {type(inner).__name__}."
        if random is not None and random.default is not None:
            note += (
                " It draws from torch's default random state, which other code may move before an epoch begins. With a "
                "generator= or a ShuffleSampler the answer is certain."
            )
        return drawn, None if even else drawn.ends, (note,)

    def close(self) -> None:
        """See ``Source.close``."""
        self._runs.close()

    def next_epoch_position(self) -> list[Any] | None:
        """See ``Source.next_epoch_position``."""
        return ["map", 0, *map(packed, self.random_state.own())] if self._draws_alone else None

    def check(self, position: Sequence[Any]) -> None:
        """See ``Source.check``."""
        states = len(self.random_state.own_generators) if self._draws_alone else 0
        if len(position) != 2 + states or position[0] != "map" or type(position[1]) is not int:
            raise StateMismatch(f"position: found {position!r:.100} in the state, not one of map-style data.")

    def open(self, epoch: int, with_rng: WithRng, start: Start) -> Stream:
        """See ``Source.open``."""
        self._base_seeds.schedule = start.seeds or self._base_seeds.schedule
        rows = start.steps
        if start.position is not None:
            rows = start.position[1]
            if rows < start.steps:
                raise StateMismatch(
                    f"step: {start.steps} in the state, whose position is behind batch {rows}. Load the state as it "
                    "was saved."
                )
            if start.steps:
                self.random_state.restore(start.position)
        states = self.random_state.own() if self._draws_alone else []

        def begin() -> tuple[SamplerDraws, Callable[[], Any], Callable[[], None]]:
            for before in range(start.replay, 0, -1):
                self.user_epoch.tell(epoch - before)
                self._replay()
            self.user_epoch.tell(epoch)
            drawn = self._new_draws(with_rng)
            self._base_seeds.draw()
            drawn.key = epoch_key(self.random_state.begin_samples(self._loader), epoch)
            drawn.skip(rows, start.draw_digest)
            return drawn, *self._start(drawn)

        drawn, read, end = with_rng(begin)

        def close() -> None:
            end()
            self.user_epoch.forget_calls()

        return MapStream(
            drawn,
            read,
            self._cutter,
            pieces=self._pieces if self._reads_here else None,
            in_background=self._loader.num_workers > 0,
            first_row=rows,
            states=states,
            close=close,
            in_order=keeps_order(self._loader),
            collates=self._collates or type(self._batches) is BatchSampler,
            ready=ReadyFns(self._options.count_fn, self._options.split_fn),
        )

    def _new_draws(self, with_rng: WithRng) -> SamplerDraws:
        lead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        inner = sampler_in(self._batches)
        plain = type(inner) in TORCH_SAMPLERS and type(self._batches) in (BatchSampler, *TORCH_SAMPLERS)
        numbers = SampleNumbers(self._cutter.topology, sharded=self._draws_alone, shared=self._cutter.shared)
        return SamplerDraws(
            self._batches,
            self._cutter,
            collate=self._collates,
            lead=lead,
            draw=with_rng,
            once=plain,
            numbers=numbers if self._options.with_index else None,
            balance=self._balance,
            like_torch=self._like_torch,
            times=self._times,
        )

    def _replay(self) -> None:
        """Makes the random draws of a whole epoch without reading samples."""
        batches = batches_of(self._batches)
        self._base_seeds.draw()
        batches.skip(sys.maxsize)


def _nothing() -> None:
    pass
