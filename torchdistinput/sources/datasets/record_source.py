"""The source for datasets of files, fragments and mixtures; resumes them, also in another world.

In another world, the new ranks together bring the cursors of the old workers forward to the last delivered row. Then
partly read files and unopened files are dealt anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from typing import Any, Final, cast, final

from torch.utils.data import DataLoader, default_collate

from torchdistinput.batches.schema import Structure
from torchdistinput.errors import BatchingError, ShardingError, StateMismatch
from torchdistinput.plan.batching import Cutter, check_batch_size, num_steps
from torchdistinput.plan.file_resharding import ReaderCursor, fresh_files, redeal
from torchdistinput.plan.mixing import Cursor
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.topology import AutoShardPolicy, Topology, is_shared, resolve_policy, shards_of
from torchdistinput.sources.contract import CallOnEachRank, Collate, EpochFacts, Source, SourceFacts
from torchdistinput.sources.datasets.fragment_dataset import FragmentDataset
from torchdistinput.sources.datasets.mixture import LENGTHS_WAY_OUT, Mixture, RecordDataset
from torchdistinput.sources.datasets.record_position import FilesPosition, cursor_at, cursor_log, joined
from torchdistinput.sources.datasets.record_rows import (
    RecordRows,
    RecordStart,
    label,
    pass_over,
)
from torchdistinput.sources.kernel.batcher import Cut, as_is
from torchdistinput.sources.kernel.epoch_order import EpochOrder, SampleSequence, cannot_know
from torchdistinput.sources.kernel.explanation import PASSED_OVER, Explanation, ReadingShare, workers_of
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.ready_batches import ReadyFns
from torchdistinput.sources.kernel.row_stream import RowStream, rows_of
from torchdistinput.sources.kernel.sample_costs import balance_by_record
from torchdistinput.sources.kernel.sample_index import no_numbers
from torchdistinput.sources.random_state import RandomState
from torchdistinput.sources.rng import WithRng
from torchdistinput.sources.set_epoch import EpochSetter
from torchdistinput.sources.torch_loader.loader_runs import LoaderRuns
from torchdistinput.sources.torch_loader.settings import (
    check_loader,
    generator_digest,
    is_read_here,
)
from torchdistinput.step_types import SourceCounts, Start, Stream
from torchdistinput.tracing.read_times import ReadTimes

_FILES_HINT: Final = (
    "Under policy DATA each rank reads all files, so all must see the same content, and it may not change meanwhile: "
    "copy the files anew, or read them from one place."
)


@final
class RecordSource(Source):
    """A ``FragmentDataset`` or ``Mixture``: its records are batched here, or are ready batches.

    Args:
      data: the files or mixture, or a ``DataLoader`` over them.
      policy: the policy in force.
      topology: the position of this worker among all workers.
      options: the user's options.
      global_batch_size: G, if records are to be batched; a ``DataLoader`` has its own.
      collate: makes a batch of samples; torch's ``default_collate`` if not given.
    """

    _last_order: tuple[tuple[int, Topology], EpochOrder] | None = None  # of a million files it takes a second

    def __init__(
        self,
        data: RecordDataset | DataLoader[Any],
        policy: AutoShardPolicy,
        topology: Topology,
        options: InputOptions,
        global_batch_size: int | None = None,
        collate: Collate | None = None,
    ) -> None:
        self._policy = policy
        shared = is_shared(policy, topology)
        self._loader = data if isinstance(data, DataLoader) else None
        self._drop_last = False
        if self._loader is not None:
            check_loader(self._loader, policy)
            size = self._loader.batch_size
            global_batch_size = None if size is None else check_batch_size(size, "batch_size")
            collate = cast(Collate, self._loader.collate_fn)
            self._drop_last = self._loader.drop_last
        elif collate is None:
            collate = as_is if global_batch_size is None else default_collate
        dataset: Any = data.dataset if isinstance(data, DataLoader) else data
        self._dataset: RecordDataset = dataset
        self._mixture = _checked_mixture(dataset, global_batch_size)
        self._lists_strings = self._dataset.yields_strings and collate is default_collate  # which returns the list
        self._cutter = Cutter(topology, shared, global_batch_size)
        if options.with_index and global_batch_size is None:
            raise no_numbers("records that are whole batches")
        self._balance = balance_by_record(options, self._cutter, "a mixture" if self._mixture else "a dataset of files")
        self._options, self._times = options, ReadTimes() if options.measures else None
        self.user_epoch = EpochSetter(data, dataset)
        self.random_state = RandomState()
        self._reads_here = self._loader is None or is_read_here(self._loader)
        # If several workers read the same batches, each reads only its own part of them, if the files allow it.
        num_readers = 1 if self._loader is None else max(1, self._loader.num_workers)
        in_ranges = num_readers > 1 or (shared and topology.num_workers > 1)
        self._sizes = sizes_of(dataset) if self._by_file and options.file_assignment == "by_size" else None
        compares = self._cutter.read_by_all and options.coordination != "off"
        lacks = self._cutter.may_lack_samples(
            drop_last=self._drop_last,
            num_samples=None,
            cuts_empty=self._cutter.global_batch_size is None and options.cuts_empty,
        )
        lacks = lacks or (options.skips and topology.num_replicas > 1)
        self._rows = RecordRows(
            self._dataset,
            self._cutter,
            collate,
            by_file=self._by_file,
            sizes=self._sizes,
            drop_last=self._drop_last,
            with_index=options.with_index,
            ready=ReadyFns(options.count_fn, options.split_fn),
            skip=options.skips,
            seeds=options.seed_samples,
            in_ranges=in_ranges,
            asks=options.needs_structure(topology.replicas_per_worker, may_lack=lacks),
            balance=self._balance,
            compares=compares,
            times=self._times,
        )
        self._runs = self.workers = None if self._loader is None else LoaderRuns(self._loader, times=self._times)
        certain = shared and not options.skips and self._balance is None
        hint = _FILES_HINT if self._mixture is None else LENGTHS_WAY_OUT
        self.facts = SourceFacts(
            times=self._times,
            fingerprint=self._fingerprint(by_cost=self._by_file and self._balance is not None),
            lists={f"{dataset.kind} list": dataset.names} if isinstance(dataset, FragmentDataset) else {},
            read_by_all_hint=hint if compares else "",
            may_lack_samples=lacks,
            certain_piece_size=self._cutter.certain_piece_size(drop_last=self._drop_last) if certain else None,
            largest_piece_size=self._cutter.largest_piece_size,
            bound_to_world=not shared and not self._by_file,  # under OFF all workers read all files
            collective_state=not shared,
            needs_default_state=False,
            draws_from_default_generator=self._loader is not None and self._loader.generator is None,
        )

    @property
    def _by_file(self) -> bool:
        return self._policy is AutoShardPolicy.FILE

    def _fingerprint(self, *, by_cost: bool) -> Mapping[str, Any]:
        facts = {"kind": "files", "batch size": self._cutter.global_batch_size, "drop_last": self._drop_last}
        if self._sizes is not None:  # a file of another size would be dealt otherwise
            sizes = sha256(json.dumps(self._sizes).encode()).hexdigest()[:16]
            facts |= {"file_assignment": "by_size", "sizes of files": sizes}
        if by_cost:  # a position in the middle of a batch depends on the steps that it is cut into
            facts["balance"] = "by cost"
        return {**facts, **self._dataset.fingerprint()}

    def epoch_facts(self) -> EpochFacts:
        """See ``Source.epoch_facts``: also the marks of all files, if all workers read all of them."""
        state = None if self._loader is None else generator_digest(self._loader.generator)
        marks = {"the content of the files": self._dataset.marks()} if self.facts.read_by_all_hint else {}
        return EpochFacts({"generator state": state, **self._dataset.schema_facts()}, marks)

    def num_steps(self, position: Sequence[Any] | None = None, *, for_len: bool = False) -> int | None:
        """See ``Source.num_steps``. Under FILE another number of workers makes other steps of the same files."""
        size = self._cutter.global_batch_size
        if size is None or not self._cutter.shared:
            return None
        if position is not None:
            found = FilesPosition.from_json(position)
            if found.deals or not self._is_of_this_world(found):
                return None
        by_opening = for_len and not self._options.skips  # records that may be left out are not counted
        records = self._dataset.num_records(opens=by_opening)
        return num_steps(records, size, drop_last=self._drop_last)

    def num_samples(self) -> int | None:
        """See ``Source.num_samples``."""
        records = self._dataset.num_records()
        return None if records is None else sum(records)

    def reading_plan(self, epoch: int, topology: Topology) -> Explanation:
        """See ``Source.reading_plan``: by sizes and numbers of records that are known without opening a file."""
        data, size = self._dataset, self._cutter.global_batch_size
        workers, ahead, where = workers_of(self._loader)
        records, shares, whole = data.num_records(), list[ReadingShare](), None
        shared = is_shared(self._policy, topology)
        counts = [] if records is None else [sum(records)]
        twice = "everything: each rank reads all (policy OFF)"
        if shared:
            twice = "all records, undecoded; each rank decodes those of its own parts only"
            if isinstance(data, FragmentDataset) and data.reads_ranges:
                twice = "nothing of uncompressed files: each rank reads the records of its own parts only"
        kind = "record"
        if isinstance(data, FragmentDataset):
            kind, sizes = data.kind, data.num_bytes()
            whole = ReadingShare.of(range(len(data.names)), data.names, sizes, records)
            if self._by_file and not shared:
                twice = "nothing; after a resume the records of a few steps, undecoded"
                dealt = self._dealt(data, epoch, topology)
                shares = [ReadingShare.of(each, data.names, sizes, records) for each in dealt]
                counts = [0 if each.records is None else each.records for each in shares] if records else []
        counts *= 1 if shared or shares else topology.num_workers
        num_steps, samples, unknown = None, sum(counts) if counts else None, "each record is a batch"
        if size is not None:
            unknown = f"the number of records of each {kind} is not known before it is opened or read"
            if counts:
                num_steps, samples = Cutter(topology, shared, size).epoch(counts, drop_last=self._drop_last)
                unknown = PASSED_OVER if num_steps is None else ""
        code = [("reader, map_fn and collate_fn", where)]
        if self._balance is not None:
            code.append(("balance", where))
        unmarked = "whether map_fn and collate_fn are the same on each rank"
        return Explanation(
            data=data.order_in_words,
            whole=whole,
            shares=tuple(shares),
            num_steps=num_steps,
            samples=samples,
            unknown=unknown,
            read_twice="nothing" if topology.num_workers == 1 else twice,
            loader_workers=workers,
            batches_ahead=ahead,
            user_code=tuple(code),
            unchecked=(unmarked,) if topology.num_workers > 1 else (),
            kind=kind,
            bound_to_world=not shared and not self._by_file,
            state_is_collective=not shared,
        )

    def _dealt(self, data: FragmentDataset, epoch: int, topology: Topology) -> list[list[int]]:
        """The files of each rank under policy FILE, if there are enough."""
        ranks = topology.num_workers
        resolve_policy(AutoShardPolicy.FILE, num_files=len(data.names), can_shard=False, num_workers=ranks)
        return shards_of(data.file_order(epoch), ranks, self._sizes)

    def order_of(
        self, epoch: int, topology: Topology, random_of: Callable[[int], Any], begun_at: Sequence[Any] | None
    ) -> EpochOrder:
        """See ``Source.order_of``."""
        size, data = self._cutter.global_batch_size, self._dataset
        if size is None:
            raise cannot_know("each record is a batch, whose size is not known", "Let the files yield single samples.")
        if self._balance is not None:
            raise cannot_know(
                "balance= is a function of the record, which is not read",
                "Use map-style data (also Packed, with lengths=), whose costs are told by index.",
            )
        found = None if begun_at is None else FilesPosition.from_json(begun_at)
        if found is not None and (found.deals or not self._is_of_this_world(found)) and self._by_file:
            raise cannot_know(
                f"epoch {epoch} was resumed at another number of ranks, and what was left of its files was dealt anew",
                "Ask for a later epoch, or give world_size= for the plan of a whole epoch.",
            )
        wanted = epoch, topology
        if self._last_order is not None and self._last_order[0] == wanted:
            return self._last_order[1]
        shared = is_shared(self._policy, topology)
        sequences: list[SampleSequence] = []
        if isinstance(data, FragmentDataset) and self._by_file and not shared:
            sequences += data.record_orders(self._dealt(data, epoch, topology), epoch)
        else:
            sequences.append(data.epoch_order(epoch))
        order = EpochOrder(topology, sequences, size, shared=shared, drop_last=self._drop_last)
        if self._mixture is None:  # of a mixture the weights of an epoch may be those of a state
            self._last_order = wanted, order
        return order

    def close(self) -> None:
        """See ``Source.close``."""
        if self._runs is not None:
            self._runs.close()

    def check(self, position: Sequence[Any]) -> None:
        """See ``Source.check``."""
        found = FilesPosition.from_json(position)
        workers, rows = len(found.cursors), {(found.rows - row) % len(found.cursors) for row, _ in found.cursors}
        if self._cutter.global_batch_size is None and rows != {0} and not self._is_of_this_world(found):
            raise StateMismatch(
                f"step: the state was saved in the middle of ready batches, each of which {workers} ranks deliver in "
                f"{workers} steps. Save after a multiple of {workers} steps, or resume with {workers} ranks."
            )
        if self._by_file and self._balance is not None and workers > 1:
            raise StateMismatch(
                "balance: the state is of ranks with batches of their own, which an older version divided by cost. "
                "Resume it with that version up to the end of the epoch."
            )
        self._dataset.check_places([*(place for _, place in found.cursors), *found.begun])
        if self._mixture is not None and found.weights is None:
            raise StateMismatch("position: the state is that of files, and the data is a mixture of sources.")
        if self._mixture is not None:
            self._mixture.weights.parsed(found.weights)

    def resume(self, epoch: int, start: Start, call_on_each_rank: CallOnEachRank) -> Start:
        """See ``Source.resume``. In another world, deals the files anew."""
        data, topology = self._dataset, self._cutter.topology
        if start.position is None or isinstance(data, Mixture):
            return start
        found = FilesPosition.from_json(start.position)
        num_readers_then = 1 if self._cutter.shared else topology.num_workers
        if self._is_of_this_world(found):
            return start
        mine = range(topology.worker, len(found.cursors), topology.num_workers)
        gathered = call_on_each_rank(
            lambda: [[worker, self._forward(data, epoch, found, worker).to_json()] for worker in mine]
        )
        places = {worker: ReaderCursor.from_json(place) for each in gathered for worker, place in each}
        dealt, deals = redeal([places[worker] for worker in range(len(found.cursors))], found.deals, num_readers_then)
        position = FilesPosition(topology.num_replicas, deals, [(0, place) for place in dealt], 0)
        return replace(start, position=position.to_json())

    def _is_of_this_world(self, found: FilesPosition) -> bool:
        """Whether the position has the same number of workers and replicas as this world."""
        topology = self._cutter.topology
        if self._cutter.shared:
            return len(found.cursors) == 1
        return len(found.cursors) == topology.num_workers and found.num_replicas == topology.num_replicas

    def _forward(self, data: FragmentDataset, epoch: int, found: FilesPosition, worker: int) -> Cursor:
        """The cursor of a worker of the other world after the last row that was delivered there."""
        workers, (row, place) = len(found.cursors), found.cursors[worker]
        there = Topology(num_workers=workers, replicas_per_worker=found.num_replicas // workers, worker=worker)
        cutter = Cutter(there, workers == 1, self._cutter.global_batch_size)
        fresh = fresh_files(data.file_order(epoch), found.deals, self._sizes)
        files = shards_of(fresh, workers, self._sizes)[worker]
        with closing(data.reader(files, epoch, place, skip=self._options.skips)) as reader:
            passed = pass_over(reader, cutter, found.rows - row, drop_last=self._drop_last)
            if not passed.rows_left:
                return reader.position()
        with closing(data.reader(files, epoch, passed.place, skip=self._options.skips)) as reader:
            reader.take(cutter.rows(len(passed.records))[passed.rows_left - 1][-1][1])
            return reader.position()

    def open(self, epoch: int, with_rng: WithRng, start: Start) -> Stream:
        """See ``Source.open``."""
        self.user_epoch.tell(epoch)  # a number that the user sets later is seen by its difference from this one
        position = self._position_of(start)
        mixture, size = self._mixture, self._cutter.global_batch_size or 1
        if mixture is not None and start.position is not None:
            mixture.weights.resume(position.weights, epoch, position.rows * size)
        elif mixture is not None:
            mixture.weights.begin(epoch)
        worker = 0 if self._cutter.shared else self._cutter.topology.worker
        row, place = begun = position.cursors[worker]
        rows = self._rows
        if position.rows or start.position is not None:
            rows = rows.of_epoch(epoch, RecordStart(position.deals, place, position.rows - row, self._cutter.shared))
        elif self._runs is None or not self._runs.can_persist():
            rows = rows.of_epoch(epoch)
        else:
            rows.set_epoch(epoch)
        cuts: Iterator[Cut | Failure] = iter(())
        close: Callable[[], None] | None = None
        runs = self._runs
        if runs is None:
            cuts = iter(rows)
        else:
            run = with_rng(lambda: runs.start(rows, once=rows is not self._rows))
            # Without loader workers and pinning, torch's loader would hand on each batch unchanged. Only its start is
            # needed, for the random seed that it draws.
            cuts, close = iter(rows) if self._reads_here else run, lambda: runs.finish(run)
        own = cursor_log(begun, position.rows, self._options.most_ahead)

        def position_at(rows: int) -> list[Any]:
            weights = None if mixture is None else mixture.weights.to_json(epoch)
            return position.json_at(position.rows + rows, [cursor_at(own, position.rows + rows)], weights)

        def counts(rows: int) -> SourceCounts | None:
            return None if mixture is None else mixture.counts(own.at(position.rows + rows)[1])

        return RowStream(
            rows_of(cuts, own, label=label if self._options.with_index else None),
            in_background=self._loader is not None and self._loader.num_workers > 0,
            position=position_at,
            counts=counts,
            close=close,
            structure=Structure.of_leaf("rows", str, cls=list) if self._lists_strings else None,
            one_structure=self._cutter.global_batch_size is None and self._options.split_fn is None,
        )

    def joined(self, positions: Sequence[list[Any]]) -> list[Any] | None:
        """See ``Source.joined``."""
        return joined(positions)

    def _position_of(self, start: Start) -> FilesPosition:
        if start.position is not None:
            return FilesPosition.from_json(start.position)
        topology = self._cutter.topology
        cursors = 1 if self._cutter.shared else topology.num_workers
        return FilesPosition(topology.num_replicas, [], [(0, ReaderCursor())] * cursors, start.steps)


def sizes_of(dataset: FragmentDataset) -> list[int]:
    """The sizes of all files, to deal them by size. Local.

    Raises:
      ShardingError: a size is not known.
      SourceError: naming a file whose size cannot be asked.
    """
    sizes = dataset.num_bytes(asks=True)
    if sizes is None:
        raise ShardingError(
            f'file_assignment="by_size" needs the size of each {dataset.kind}, and one of them is not known. Give each '
            'Fragment its num_bytes, or use file_assignment="in_turn".'
        )
    return sizes


def _checked_mixture(mixture: object, batch_size: int | None) -> Mixture | None:
    """The dataset, if it is a mixture.

    Raises:
      BatchingError: the starts of its weights are steps of another size.
    """
    if not isinstance(mixture, Mixture):
        return None
    if mixture.batch_size not in {None, batch_size}:
        raise BatchingError(
            f"the mixture counts its steps by batch_size={mixture.batch_size}, but the global batch size is "
            f"{batch_size}; give both the same."
        )
    return mixture
