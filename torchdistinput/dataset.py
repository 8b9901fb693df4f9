"""Distributed datasets; ``_compose`` is the one place where the walk of the data is put together."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from torchdistinput.agreement import agree
from torchdistinput.backends.collectives import Channel, Ranks
from torchdistinput.backends.devices import make_copier
from torchdistinput.errors import BatchingError, InputError
from torchdistinput.flow import Drawn, Failed, Held, Share, Stream
from torchdistinput.iterator import DistributedIterator, Progress, delivered
from torchdistinput.mould import Mould
from torchdistinput.plan.options import InputOptions, Step
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.base import HasWorkers, Source
from torchdistinput.sources.random_state import BorrowedRandomState, plainly, state_of_epoch
from torchdistinput.stages.buffer import Buffer, Walk
from torchdistinput.stages.coordinate import Coordinate
from torchdistinput.stages.fetch import Fetch
from torchdistinput.stages.pad import Pad
from torchdistinput.stages.transfer import Transfer
from torchdistinput.tree import TensorSpec
from torchdistinput.values import PerReplica

__all__ = ["DistributedDataset", "Setting", "check_partial_batch", "facts_of"]


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a distributed dataset lives: what its strategy knows.

    Args:
      topology: where this worker stands.
      devices: one for each local replica.
      ranks: the ranks that must agree; ``None`` where there is one only.
      timeout_seconds: the strategy's bound of a wait for another rank.
    """

    topology: Topology
    devices: Sequence[torch.device]
    ranks: Ranks | None
    timeout_seconds: float


@final
class DistributedDataset:
    """A dataset divided among the replicas of a strategy. Made by ``Strategy.distribute_dataset`` and its siblings.

    Each ``iter()`` is the next epoch. Collective: every rank of the strategy iterates, in the same order.

    Args:
      source: the data, as this worker reads it.
      setting: where the dataset lives.
      options: what the user asked for.
      name: tells this dataset from the strategy's others, the same on every rank.
      seed: the same on every rank; for random draws of ranks that do not meet before an epoch.
    """

    def __init__(self, source: Source, setting: Setting, options: InputOptions, name: str, *, seed: int) -> None:
        self._seed = seed
        self._source = source
        self._setting = setting
        self._options = options
        self._name = name
        self._epoch = 0
        self._progress = Progress()
        self._opened: DistributedIterator | None = None
        self._iterators: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()
        # Streams and their memory are kept for the life of the dataset, one set for each iterator alive at a time.
        self._idle_transfers: list[Transfer] = []

    def __iter__(self) -> DistributedIterator:
        iterator, self._opened = self._opened, None
        return self._open() if iterator is None else iterator

    def __len__(self) -> int:
        steps = self._source.num_steps()
        if steps is None:
            raise TypeError("the number of steps is not known before the data is read.")
        return steps

    @property
    def element_spec(self) -> Any:
        """See ``DistributedIterator.element_spec``. Opens the iterator that the next ``iter()`` returns."""
        if self._opened is None:
            self._opened = self._open()
        return self._opened.element_spec

    @property
    def step(self) -> Step:
        """The step of the element delivered last by any iterator of this dataset. Local.

        Raises:
          InputError: none was delivered yet.
        """
        return delivered(self._progress.step)

    def stats(self) -> dict[str, float]:
        """What this worker got in the epoch begun last. Local.

        Returns:
          ``epoch``, ``steps``, ``samples`` of this worker's replicas, ``seconds`` since the epoch began,
          ``seconds_waiting`` for data in ``next``.
        """
        progress = self._progress
        return {
            "epoch": progress.epoch,
            "steps": progress.steps,
            "samples": progress.samples,
            "seconds": time.perf_counter() - progress.began,
            "seconds_waiting": progress.waited,
        }

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, and tells the user's sampler or dataset. Local; the same on every rank."""
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch is {epoch!r}; an int of 0 or more is needed.")
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        self._epoch = epoch
        self._source.set_epoch(epoch)

    def close(self) -> None:
        """Ends every iterator of this dataset. Local, idempotent."""
        for iterator in list(self._iterators):
            iterator.close()
        self._opened = None
        self._source.close()
        while self._idle_transfers:
            self._idle_transfers.pop().close()

    def __enter__(self) -> DistributedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> DistributedIterator:
        epoch, ranks = self._epoch, self._setting.ranks
        number: int | None = None
        draws: Callable[[Callable[[], Any]], Any] = plainly
        if ranks is not None and self._options.coordination == "on":
            told = self._agree_on_epoch(ranks, epoch)
            # The next unused number is the same everywhere, so there is always one that is free on all ranks.
            number = min(set.intersection(*(set(each["channels"]) for each in told)))
            if self._source.draws_from_default_generator:
                state = torch.get_rng_state()
                ranks.broadcast_from_first(state)
                draws = BorrowedRandomState(state)
        elif ranks is not None and self._source.draws_from_default_generator:
            draws = BorrowedRandomState(state_of_epoch(self._seed, epoch))
        self._epoch += 1
        self._progress.begin(epoch)
        # Loader workers are forked before the channel starts its threads: a fork while the C library starts a thread
        # can leave the child with a lock that nobody will release, and a loader worker that never answers.
        stream = self._source_stream(epoch, draws)
        try:
            channel = None if ranks is None or number is None else ranks.open_channel(number)
        except BaseException:
            stream.close()
            raise
        iterator = self._compose(channel, epoch, stream)
        self._iterators.add(iterator)
        return iterator

    def _agree_on_epoch(self, ranks: Ranks, epoch: int) -> list[Any]:
        extra = {"channels": ranks.free_channels()}
        facts = {"dataset": self._name, "epoch": epoch, **self._source.epoch_fingerprint()}
        return agree(ranks, f"iter() of dataset {self._name}", facts, extra=extra)

    def _source_stream(self, epoch: int, draws: Callable[[Callable[[], Any]], Any]) -> Stream:
        try:
            return self._source.open(epoch, draws)
        except Exception as error:  # raised by all ranks at the first step
            return _BrokenStream(error)

    @property
    def _timeout_seconds(self) -> float:
        own = self._options.timeout_seconds
        return self._setting.timeout_seconds if own is None else own

    def _compose(self, channel: Channel | None, epoch: int, stream: Stream) -> DistributedIterator:
        """The walk: fetch -> pad, if asked for -> transfer -> coordinate -> buffer."""
        source, setting, depth = self._source, self._setting, self._options.prefetch
        devices = setting.devices if self._options.fetch_to_device else [torch.device("cpu")] * len(setting.devices)
        copies = any(device.type != "cpu" for device in devices)
        idle = self._idle_transfers
        mould = Mould()
        fetch = Fetch(stream, mould)
        pad = _new_pad(source, self._options)
        transfer = idle.pop() if idle else Transfer([make_copier(device) for device in devices])

        def send(share: Share) -> None:
            share.parcels = transfer.send(share.pieces)
            share.pieces = []

        def complete(share: Share) -> None:
            if not share.parcels:
                _fill(share, mould, setting.topology.replicas_per_worker, pad)
                send(share)

        def produce(drawn: Drawn | Held) -> Held:
            held = fetch.finish(drawn)
            if isinstance(held, Share) and mould.structure is not None:
                try:
                    complete(held)
                except Exception as error:  # out of memory, say: a failed step like any other
                    return Failed(error, "" if isinstance(error, InputError) else "copying to the devices")
            return held

        def discard(shares: Sequence[Share]) -> None:
            for share in shares:
                if share.parcels:
                    transfer.discard(share.parcels)

        ranks = setting.ranks
        coordinate = Coordinate(
            channel,
            slots=max(1, depth),
            mould=mould,
            complete=complete,
            name=None if ranks is None else ranks.name(ranks.rank),
            epoch=epoch,
            counts=ranks is None or ranks.rank in ranks.firsts,
        )
        threaded = channel is not None or (depth > 0 and (stream.in_background or copies))
        buffer = Buffer(
            Walk(
                fetch.draw,
                produce,
                discard,
                transfer.enter_thread,
                fetch.close,
                lambda: idle.append(transfer),
                source.lost_workers if isinstance(source, HasWorkers) else str,
            ),
            coordinate,
            depth=depth if threaded else 0,
            threaded=threaded,
            timeout_seconds=self._timeout_seconds,
            names=_itself if ranks is None else ranks.name,
        )
        spec = _SpecMaker(mould, source.certain_piece_size, setting.topology.replicas_per_worker, pad)
        knows_all = channel is not None or ranks is None
        return DistributedIterator(buffer, transfer, setting.topology, epoch, spec, self._progress, knows_all=knows_all)


def check_partial_batch(source: Source, options: InputOptions) -> None:
    """Refuses padding where the size is not known to which it would pad. Local.

    Raises:
      BatchingError: it is not.
    """
    if options.partial_batch == "pad" and source.largest_piece_size is None:
        raise BatchingError(
            "partial_batch='pad' needs a known global batch size G, to pad every piece to ceil(G / N) rows, and this "
            "source yields batches of any size (ready batches, a batch sampler of your own, a dataset function). Give "
            "a DataLoader with batch_size=, or single samples with global_batch_size=."
        )


def _new_pad(source: Source, options: InputOptions) -> Pad | None:
    rows = source.largest_piece_size
    return None if options.partial_batch == "keep" or rows is None else Pad(rows, with_index=options.with_index)


def _fill(share: Share, mould: Mould, replicas_per_worker: int, pad: Pad | None) -> None:
    """Puts empty batches where a replica has no sample, and pads."""
    if mould.structure is None:
        return
    pieces = share.pieces or [None] * replicas_per_worker
    share.pieces = [mould.structure.empty() if piece is None else piece for piece in pieces]
    share.sizes = share.sizes or (0,) * replicas_per_worker
    if pad is not None:
        pad(share, mould.structure)


@final
class _SpecMaker:
    """Makes the element spec from the structure that the mould knows."""

    def __init__(self, mould: Mould, piece_size: int | None, replicas_per_worker: int, pad: Pad | None) -> None:
        self._mould = mould
        self._piece_size = piece_size
        self._local = replicas_per_worker
        self._pad = pad

    def __call__(self) -> Any:
        structure = self._mould.structure
        if structure is None:
            raise InputError("the data ended before the first element, so there is no element spec.")
        if self._pad is not None:
            return self._pad.structure(structure).spec(self._pad.rows, self._for_each_replica)
        return structure.spec(self._piece_size, self._for_each_replica)

    def _for_each_replica(self, spec: TensorSpec) -> Any:
        return spec if self._local == 1 else PerReplica([spec] * self._local)


@final
class _BrokenStream:
    """The stream of a source that could not be opened: its first step fails."""

    in_background = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def draw(self) -> Any:
        """See ``Stream.draw``."""
        raise self._error

    def fetch(self, drawn: Any) -> None:
        """See ``Stream.fetch``."""

    def digest_of(self, drawn: Any) -> int:
        """See ``Stream.digest_of``."""
        return 0

    def close(self) -> None:
        """See ``Stream.close``."""


def _itself(rank: int) -> int:
    return rank


def facts_of(source: Source, policy: str, options: InputOptions) -> Mapping[str, Any]:
    """What the ranks must have in common when a dataset is distributed."""
    alone = source.epoch_fingerprint() if options.coordination == "off" else {}  # ranks do not meet at each epoch
    return {
        **source.fingerprint(),
        **alone,
        "policy": policy,
        "prefetch": options.prefetch,
        "coordination": options.coordination,
        "timeout_seconds": options.timeout_seconds,
        "with_index": options.with_index,
        "partial_batch": options.partial_batch,
    }
