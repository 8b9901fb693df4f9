"""Taking a torch ``DataLoader`` apart and building the one that reads a worker's share.

The user's sampler objects, collate function, worker settings and generator are kept; only what is asked of the dataset
changes. The loader of a worker is a torch ``DataLoader`` again, so random draws, loader workers, their seeds and their
death are torch's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, cast, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from torchdistinput.errors import InputError, ShardingError
from torchdistinput.flow import Row, Stream
from torchdistinput.plan.batching import Cutter, check_batch_size
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.base import RowStream, Shards, tell_epoch
from torchdistinput.sources.files import FileDataset
from torchdistinput.sources.index import SampleNumbers, labelled, labelled_batch
from torchdistinput.sources.random_state import plainly
from torchdistinput.sources.runs import LoaderRun, LoaderRuns
from torchdistinput.sources.samplers import DistributedBatchSampler, DrawnRow, Draws, Feed
from torchdistinput.sources.seeds import epoch_key
from torchdistinput.sources.worker_side import (
    Cut,
    CutReady,
    CutSamples,
    Failure,
    Guarded,
    PieceDataset,
    RecordRows,
    as_is,
    labels_by_position,
    rows_of,
)

__all__ = ["IterableLoaderSource", "MapLoaderSource", "check_loader", "generator_digest"]

_TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw from the default random state at their first index only, or never."""

Draw = Callable[[Callable[[], Any]], Any]


def check_loader(loader: DataLoader[Any], policy: AutoShardPolicy) -> None:
    """Refuses a ``DataLoader`` that cannot be divided.

    Raises:
      InputError: ``in_order=False``: batches would pair up with the wrong steps.
      ShardingError: a per-rank sampler is inside; its part would be divided again. Policy OFF divides nothing.
    """
    if not getattr(loader, "in_order", True):  # an attribute since torch 2.7
        raise InputError(
            "the DataLoader has in_order=False, so its batches come in any order and the ranks' parts of a step would "
            "belong to different batches. Build it with in_order=True."
        )
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for inner in (sampler, loader.sampler):
        per_rank = isinstance(inner, DistributedSampler | DistributedBatchSampler)
        if per_rank and policy is not AutoShardPolicy.OFF:
            raise ShardingError(
                f"the DataLoader has a {type(inner).__name__}, which already takes one rank's part; it would be "
                "divided twice. Give the sampler of one process (or shuffle=True) and the global batch size; or "
                "AutoShardPolicy.OFF, which takes each rank's part as it is."
            )


def generator_digest(generator: torch.Generator | None) -> str | None:
    """A short text that is equal for equal generator states."""
    if generator is None:
        return None
    return hashlib.sha256(bytes(generator.get_state().numpy())).hexdigest()[:16]


def _generator_of(sampler: Any) -> torch.Generator | None:
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        return cast("torch.Generator | None", sampler.generator)
    return None


@final
class _WorkerInit:
    """The user's ``worker_init_fn``, which finds the user's dataset in ``get_worker_info()``, not the wrapped one."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None:
            # WorkerInfo refuses a plain assignment.
            object.__setattr__(info, "dataset", cast(Any, info.dataset).dataset)
        if self._init is not None:
            self._init(worker)


def _settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of a ``DataLoader`` that stay as they are."""
    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": _WorkerInit(loader.worker_init_fn) if loader.num_workers else loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
        **workers,
    }


@final
class MapLoaderSource:
    """A ``DataLoader`` over a map-style dataset: batches are cut before they are read.

    Args:
      loader: the user's.
      policy: the policy in force.
      topology: where this worker stands.
    """

    def __init__(
        self, loader: DataLoader[Any], policy: AutoShardPolicy, topology: Topology, *, with_index: bool = False
    ) -> None:
        check_loader(loader, policy)
        self._loader = loader
        self._policy = policy
        self._with_index = with_index
        self._collates = loader.batch_sampler is not None
        self._dataset: Any = loader.dataset
        self._batches: Any = loader.batch_sampler if self._collates else loader.sampler
        if policy is AutoShardPolicy.HINT and topology.num_workers > 1:
            self._shard(topology)
        size = self._batches.batch_size if type(self._batches) is BatchSampler else None
        shared = policy is AutoShardPolicy.DATA or topology.num_workers == 1
        self._cutter = Cutter(topology, shared, size)
        self._drop_last = bool(self._collates and getattr(self._batches, "drop_last", False))
        self._feed = Feed()
        pieces = PieceDataset(self._dataset, cast(Callable[[Any], Any], loader.collate_fn))
        arguments = {"batch_size": None, "sampler": self._feed, "collate_fn": as_is, **_settings(loader)}
        self._pieces = pieces
        self._runs = LoaderRuns(
            lambda dataset: DataLoader(dataset, **arguments), lasting=loader.persistent_workers
        )
        self.draws_from_default_generator = loader.generator is None
        self.certain_piece_size = self._cutter.certain_piece_size(drop_last=self._drop_last) if shared else None
        self.largest_piece_size = self._cutter.largest_piece_size

    def _shard(self, topology: Topology) -> None:
        """Policy HINT: the dataset's own shard, with the user's kind of sampling over it."""
        self._dataset = cast(Shards, self._dataset).shard(num_shards=topology.num_workers, index=topology.worker)
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

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        length = len(self._dataset) if isinstance(self._dataset, Sized) else None
        return {
            "kind": f"map-style {type(self._loader.dataset).__name__}",
            "length": None if self._policy is AutoShardPolicy.HINT else length,
            "batch size": self._cutter.global_batch_size,
            "drop_last": self._drop_last,
            "sampler": type(self._loader.sampler).__name__,
        }

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.epoch_fingerprint``."""
        return {
            "generator state": generator_digest(self._loader.generator),
            "sampler's generator state": generator_digest(_generator_of(self._loader.sampler)),
        }

    def num_steps(self) -> int | None:
        """See ``Source.num_steps``."""
        if not self._cutter.shared or not isinstance(self._batches, Sized):
            return None
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """See ``Source.set_epoch``."""
        tell_epoch(self._loader, epoch)

    def close(self) -> None:
        """See ``Source.close``."""
        self._runs.close()

    def lost_workers(self) -> str:
        """See ``HasWorkers.lost_workers``."""
        return self._runs.lost_workers()

    def open(self, epoch: int, draws: Draw) -> Stream:
        """See ``Source.open``."""
        lead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        inner = getattr(self._batches, "sampler", self._batches)
        plain = type(inner) in _TORCH_SAMPLERS and type(self._batches) in (BatchSampler, *_TORCH_SAMPLERS)
        drawn = Draws(
            self._batches,
            self._cutter,
            collate=self._collates,
            lead=lead,
            draw=_once(draws) if plain else draws,
            numbers=self._new_numbers() if self._with_index else None,
        )
        self._feed.draws = drawn

        def start() -> LoaderRun:
            generator = self._loader.generator
            # Without a generator the default state counts that the sampler draws from: rank 0's, which is lent here.
            seed = torch.initial_seed() if generator is None else generator.initial_seed()
            drawn.key = epoch_key(seed, epoch)
            return self._runs.start(self._pieces)

        run = draws(start)
        in_background = self._loader.num_workers > 0
        return _MapStream(
            drawn,
            run,
            self._cutter,
            in_background=in_background,
            close=lambda: self._runs.finish(run),
        )

    def _new_numbers(self) -> SampleNumbers:
        sharded = self._policy is AutoShardPolicy.HINT and self._cutter.topology.num_workers > 1
        shared = self._cutter.shared
        return SampleNumbers(self._cutter.topology, sharded=sharded, shared=shared)


def _once(draw: Draw) -> Draw:
    """Draws as told the first time, and plainly from then on."""
    drawers = iter([draw])

    def drawing(call: Callable[[], Any]) -> Any:
        return next(drawers, plainly)(call)

    return drawing


@final
class _MapStream:
    """The rows of a map-style loader: indices are drawn on the caller's thread, pieces fetched where torch does."""

    def __init__(
        self,
        draws: Draws,
        run: LoaderRun,
        cutter: Cutter,
        *,
        in_background: bool,
        close: Callable[[], None],
    ) -> None:
        self.in_background = in_background
        self._draws = draws
        self._run = run
        self._close = close
        self._cutter = cutter
        self._whole = CutReady(as_is, cutter)
        self._rows_of_whole: list[Row] = []

    def draw(self) -> DrawnRow | None:
        """See ``Stream.draw``."""
        return self._draws.take_row()

    def fetch(self, drawn: DrawnRow) -> Row:
        """See ``Stream.fetch``."""
        pieces = [self._next() if wanted else None for wanted in drawn.pieces]
        if drawn.row_of_whole is None:
            return pieces if drawn.numbers is None else _labelled(pieces, drawn.numbers)
        if drawn.row_of_whole == 0:
            cut = self._whole.cut(pieces[0])
            self._rows_of_whole = cut.rows
            if drawn.numbers is not None:
                self._rows_of_whole = labelled_batch(drawn.numbers[0], cut.rows, cut.size, self._cutter)
        return self._rows_of_whole[drawn.row_of_whole]

    def _next(self) -> Any:
        piece = next(self._run)
        if isinstance(piece, Failure):
            piece.reraise()
        return piece

    def digest_of(self, drawn: DrawnRow) -> int:
        """See ``Stream.digest_of``."""
        return drawn.digest

    def close(self) -> None:
        """See ``Stream.close``."""
        self._close()


def _labelled(pieces: Row, index: Sequence[torch.Tensor]) -> Row:
    pairs = zip(pieces, index, strict=True)
    return [None if piece is None else labelled(numbers, piece) for piece, numbers in pairs]


@final
class IterableLoaderSource:
    """A ``DataLoader`` over an iterable dataset or files: batches are cut where they are read.

    Args:
      loader: the user's.
      policy: the policy in force.
      topology: where this worker stands.
    """

    def __init__(
        self, loader: DataLoader[Any], policy: AutoShardPolicy, topology: Topology, *, with_index: bool = False
    ) -> None:
        check_loader(loader, policy)
        self._loader = loader
        self._with_index = with_index
        dataset: Any = loader.dataset
        if policy is AutoShardPolicy.HINT and topology.num_workers > 1:
            dataset = cast(Shards, dataset).shard(num_shards=topology.num_workers, index=topology.worker)
        size = None if loader.batch_size is None else check_batch_size(loader.batch_size, "batch_size")
        shared = policy is AutoShardPolicy.DATA or topology.num_workers == 1
        cutter = Cutter(topology, shared, size)
        collate = cast(Callable[[Any], Any], loader.collate_fn)
        self._dataset: IterableDataset[Any]
        self._records: RecordRows | None = None
        if isinstance(dataset, FileDataset):
            self._records = self._dataset = RecordRows(
                dataset,
                cutter,
                collate,
                by_file=policy is AutoShardPolicy.FILE,
                drop_last=loader.drop_last,
                with_index=with_index,
            )
            arguments: dict[str, Any] = {"batch_size": None, "collate_fn": as_is}
        else:
            self._dataset = Guarded(dataset)
            cut = CutReady(collate, cutter) if size is None else CutSamples(collate, cutter)
            arguments = {"batch_size": size, "collate_fn": cut}
            if size is not None:
                arguments["drop_last"] = loader.drop_last
        self._cutter = cutter
        self._shared = shared
        self._runs = LoaderRuns(
            lambda dataset: DataLoader(dataset, **arguments, **_settings(loader)), lasting=loader.persistent_workers
        )
        self.draws_from_default_generator = loader.generator is None
        self.certain_piece_size = cutter.certain_piece_size(drop_last=loader.drop_last) if shared else None
        self.largest_piece_size = cutter.largest_piece_size

    def fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.fingerprint``."""
        facts: dict[str, Any] = {
            "kind": f"iterable {type(self._loader.dataset).__name__}",
            "batch size": self._cutter.global_batch_size,
            "drop_last": self._loader.drop_last,
        }
        if self._records is None:
            # torch repeats or divides an opaque iterable among its loader workers: their number is part of the data.
            return {**facts, "num_workers": self._loader.num_workers}
        return {**facts, **self._records.dataset.fingerprint()}

    def epoch_fingerprint(self) -> Mapping[str, Any]:
        """See ``Source.epoch_fingerprint``."""
        return {"generator state": generator_digest(self._loader.generator)}

    def num_steps(self) -> int | None:
        """See ``Source.num_steps``."""
        if not self._shared or not isinstance(self._loader.dataset, Sized):
            return None
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """See ``Source.set_epoch``."""
        tell_epoch(self._loader, epoch)

    def close(self) -> None:
        """See ``Source.close``."""
        self._runs.close()

    def lost_workers(self) -> str:
        """See ``HasWorkers.lost_workers``."""
        return self._runs.lost_workers()

    def open(self, epoch: int, draws: Draw) -> Stream:
        """See ``Source.open``."""
        dataset = self._dataset
        if self._records is not None:
            self._records.set_epoch(epoch)
            dataset = self._records if self._runs.can_last() else self._records.of_epoch(epoch)
        run = draws(lambda: self._runs.start(dataset))
        return RowStream(
            rows_of(run, self._new_label() if self._with_index else None),
            in_background=self._loader.num_workers > 0,
            close=lambda: self._runs.finish(run),
            # Every rank reads an opaque iterable under DATA: it must make the same of it everywhere.
            draws=draws if self._shared and self._records is None else None,
        )

    def _new_label(self) -> Callable[[Cut], list[Row]]:
        return labels_by_position(self._cutter) if self._records is None else self._records.label
