"""``DistributedDataset``: data that is divided among replicas, epoch after epoch, and can be left and resumed."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, final

import torch

from torchdistinput.build_pipeline import Opened, Setting, build_pipeline, open_stream
from torchdistinput.checkpoint import Checkpoint, Entry
from torchdistinput.coordination.failures import in_one_line
from torchdistinput.coordination.fingerprints import agree
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.errors import BatchingError, InputError
from torchdistinput.frameworks import check_accelerate, check_trainer, only_tries
from torchdistinput.iterator import DistributedIterator, LastStep, Progress, delivered, of_this_process
from torchdistinput.pipeline.metrics import Metrics
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.plan.options import InputOptions, Step
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.base import Source, TellsPart
from torchdistinput.sources.rng import (
    CoordinateStates,
    Draw,
    EqualRngStates,
    SharedRng,
    plainly,
    state_of_epoch,
)

__all__ = ["SAMPLES", "DistributedDataset", "check_partial_batch", "facts_of"]

SAMPLES: Final = "the samples"
"""The name of the fact that tells which samples map-style data has."""

_LOG = logging.getLogger("torchdistinput")


@final
class DistributedDataset:
    """A dataset divided among the replicas of a strategy. Made by ``Strategy.distribute_dataset`` and its siblings.

    Each ``iter()`` is the next epoch. Collective: every rank of the strategy iterates, in the same order.

    Args:
      source: the data, as this worker reads it.
      setting: what the strategy tells.
      options: what the user asked for.
      name: tells this dataset from the strategy's others, the same on every rank.
      policy: the name of the policy in force.
      seed: the same on every rank; ranks that do not meet before an epoch draw from it.
    """

    def __init__(
        self, source: Source, setting: Setting, options: InputOptions, name: str, *, policy: str, seed: int
    ) -> None:
        self._seed = seed
        self._source = source
        self._setting = setting
        self._options = options
        self._name = name
        self._checkpoint = Checkpoint(
            source,
            _identity_of(source, policy, setting.topology),
            setting.ranks,
            setting.topology.worker,
            name,
            lent=setting.lent,
        )
        self._alike = EqualRngStates()
        self._progress: Progress | None = None
        self._meter = self._new_meter()
        self._last = LastStep()
        self._opened: DistributedIterator | None = None
        self._iterators: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()
        # Streams and their memory are kept for the life of the dataset, one set for each iterator alive at a time.
        self._idle_transfers: list[ToDevice] = []

    def __iter__(self) -> DistributedIterator:
        """The next epoch. Collective.

        Raises:
          InputError: accelerate accumulates gradients, and does not know this loader; transformers' Trainer asks;
            or Lightning's data module does, to print itself.
          RankDisagreement: the ranks are at different epochs, or have different generators or states.
          CoordinationTimeout: a rank did not come in time; it is named.
          RankLost: by ``next`` (as the two below), if a rank died, or left the loop before the others.
          SourceError: the data of a rank failed, on every rank after the same number of steps.
          BatchingError: an element cannot be cut, or is unlike those before.
        """
        only_tried = only_tries()
        check_accelerate()
        if self._setting.ranks is not None:
            check_trainer()
        self._heed_user()
        iterator, self._opened = self._opened, None
        iterator = self._open() if iterator is None else iterator
        if only_tried:
            self._opened = iterator
        return iterator

    def __len__(self) -> int:
        """The steps of an epoch, over all ranks. Local. Of a ``FileDataset`` under DATA by the indices of its files.

        Raises:
          TypeError: they are not known before the data is read.
        """
        steps = self._source.num_steps()
        if steps is None:
            raise TypeError("the number of steps is not known before the data is read.")
        return steps

    @property
    def element_spec(self) -> Any:
        """See ``DistributedIterator.element_spec``. Opens the iterator that the next ``iter()`` returns."""
        if self._opened is None:
            self._heed_user()
            self._opened = self._open()
        return self._opened.element_spec

    @property
    def has_begun(self) -> bool:
        """Whether an epoch was begun here. Local."""
        return self._progress is not None

    @property
    def step(self) -> Step:
        """The step of the element delivered last by any iterator of this dataset. Local.

        Raises:
          InputError: none was delivered yet.
        """
        return delivered(self._last.step)

    def stats(self) -> dict[str, Any]:
        """What this worker got in the epoch begun last, and where the time went. Local.

        Returns:
          - ``epoch``; ``steps`` that were delivered here, ``samples`` of this worker's replicas, ``bytes`` of their
            tensors and arrays (lists count nothing, nor does what the drop-in passes through in one process), and
            samples ``skipped`` as they could not be read;
          - ``fresh_batches``: batches of loader workers that came in fresh shared memory, as all that is used again was
            in use: batches that you keep, or very large ones;
          - ``seconds`` since the epoch began; ``seconds_waiting`` in ``next``; ``seconds_reading`` and decoding in
            this process, or waiting for its loader workers; ``seconds_copying``: making empty and padded pieces and
            starting copies to the devices; ``seconds_coordinating``: in exchanges, where a rank mostly waits for
            those that are not yet there. What is done ahead takes seconds too, without any waiting for it;
          - ``window``: the same for the last 64 to 71 steps, with ``seconds`` up to the last one;
          - ``ranks``: the window of each rank, by rank, with its ``rank``. They tell each other every 64 steps, and in
            ``gather_stats``; until then the list is empty. An epoch of less than 64 steps leaves it as it was.
        """
        return self._meter.stats(0 if self._progress is None else self._progress.epoch)

    def gather_stats(self) -> dict[str, Any]:
        """Lets the ranks tell each other their windows now. Collective: every rank calls this, at any step.

        Returns:
          What ``metrics`` returns then.

        Raises:
          CoordinationTimeout: a rank did not call it in time; it is named.
          RankDisagreement: a rank made another call.
        """
        meter, what = self._meter, f"gather_stats() of dataset {self._name}"
        meter.ranks = agree(self._setting.ranks, what, {}, extra=meter.own())
        return self.stats()

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, and tells the user's sampler and dataset. Local; the same on every rank.

        Nothing needs this: each ``iter()`` is the next epoch, and tells them. Where the user's own ``set_epoch`` of the
        sampler or dataset was called, and shows in its attribute ``epoch``, that counts as this.

        If a state of that epoch was loaded, or a step of it sought, the next ``iter()`` still begins there.
        """
        _check_number("epoch", epoch)
        self._drop_opened()
        running = any(iterator.is_live and iterator.reads(self._progress) for iterator in self._iterators)
        self._checkpoint.set_epoch(epoch, running=running)

    def _heed_user(self) -> None:
        """A ``set_epoch`` that the user called on the sampler or dataset itself counts as one on this."""
        epoch = self._checkpoint.set_by_user()
        if epoch is not None:
            self.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """What was delivered so far, to go on from there: in another process, at any number of ranks.

        Local and equal on every rank for map-style data, for files, and for iterables under DATA without a state of
        their own. **Collective**, so that every rank calls it, also where only one saves: for
        ``distribute_datasets_from_function``, for policy HINT (and OFF, but for map-style data), and for datasets or
        iterators with ``state_dict`` of their own. In doubt: call it on every rank, then save on one.

        While an epoch is read, and after a loop that was left: the steps delivered in that epoch. After its end: the
        start of the next one.

        Returns:
          Plain ints, strings and lists with the same keys always; see ``plan.checkpoint_format``. Under 8 KiB
          for map-style data, and under 64 bytes more for each file in progress.

        Raises:
          StateMismatch: a state of the user's own is not plain JSON; the key is named.
          InputError: with ``coordination="off"`` each of several workers is at a step of its own.
        """
        self._refuse_uncoordinated("state_dict()")
        if not any(iterator.is_live for iterator in self._iterators):  # else what is read may count its epochs itself
            self._heed_user()
        return self._checkpoint.state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002 - as in torch
        """Lets the next ``iter()`` go on where the state was taken. Local, on every rank, with the same state.

        The number of ranks may be another one, as may be ``prefetch`` and, but for opaque iterables, the number of
        loader workers. What was delivered is not read again: map-style data is passed over by its indices, files are
        entered where they were left. Opaque iterables without a state of their own are read up to there, with a
        warning.

        Without a generator, torch draws the order from its default random state: loading sets that one on rank 0.
        Restore it yourself (for dropout) after this call.

        Args:
          state: what ``state_dict()`` returned, perhaps through JSON, ``torch.save`` or a distributed checkpoint. An
            empty dict changes nothing.
          strict: whether the state of an input that looks different is refused; else the differences are logged.

        Raises:
          StateMismatch: the state is of a newer version, was cut or changed, or is of another dataset, seed, batch
            size, policy or list of files; or a file in progress has changed. The field and both values are named.
          InputError: an iterator of this dataset is alive.
        """
        self._refuse_uncoordinated("load_state_dict()")
        self._refuse_live("load_state_dict()")
        self._drop_opened()
        if state == {}:
            _LOG.warning("load_state_dict() was given an empty state: the next epoch begins as without it.")
            return
        self._checkpoint.load(state, strict=strict)

    def go_on_from(self, before: DistributedDataset) -> None:
        """The next ``iter()`` begins where that of another one would, of the same data, which was divided anew. Local.

        Iterators of the other one that are read go on; they count as iterators of this one from now on.

        Raises:
          StateMismatch: the data cannot be entered there any more.
        """
        checkpoint, live = before.leave()
        self._checkpoint.go_on_from(checkpoint)
        self._iterators.update(live)

    def leave(self) -> tuple[Checkpoint, list[DistributedIterator]]:
        """What ``go_on_from`` takes over: where this stands, and the iterators that are read. Local.

        Without such iterators it is closed.
        """
        self._drop_opened()  # that one's epoch is the next one
        live = [iterator for iterator in self._iterators if iterator.is_live]
        if not live:
            self.close()
        return self._checkpoint, live

    def seek(self, epoch: int, step: int = 0) -> None:
        """Lets the next ``iter()`` begin at a step of an epoch, to see again what was trained on there.

        Local, on every rank, with the same numbers. Map-style data that is passed over is not read. Files are read up
        to there, but not decoded; opaque iterables are read. Where the order follows from a random generator, the
        draws of the epochs between are made again, from the earliest epoch that this dataset knows; without a
        generator that is right only if nothing else draws from torch's default random state between them.

        Args:
          epoch: its number.
          step: the first step to deliver.

        Raises:
          ValueError: a negative number, or a step after the end.
          InputError: an iterator of this dataset is alive, or the epoch is before the earliest one known.
        """
        _check_number("epoch", epoch)
        _check_number("step", step)
        self._refuse_uncoordinated("seek()")
        self._refuse_live("seek()")
        self._drop_opened()
        self._checkpoint.seek(epoch, step)

    def skip_to(self, step: int) -> None:
        """Lets the next ``iter()`` begin at a step of its epoch; see ``seek``. Local, on every rank alike."""
        self._heed_user()
        self._drop_opened()  # that one's epoch is the next one
        self.seek(self._checkpoint.next_epoch, step)

    def put_back(self, iterator: DistributedIterator) -> None:
        """Takes back an iterator that nobody asked for an element: the next ``iter()`` returns it. Local.

        A second one is closed: the epochs of both were begun, and neither can be begun anew without drawing from where
        the other one drew.
        """
        if self._opened is not None:
            iterator.close()
        elif iterator.is_live:
            self._opened = iterator

    def _drop_opened(self) -> None:
        """Closes the iterator that the next ``iter()`` would return: that one begins the same epoch again."""
        if self._opened is not None:
            self._opened.close()
            if self._opened.reads(self._progress):
                self._checkpoint.reenter()
            self._opened = None

    def _refuse_live(self, what: str) -> None:
        if any(iterator.is_live and iterator is not self._opened for iterator in self._iterators):
            raise InputError(
                f"{what} was called while an iterator of this dataset is alive, which would go on elsewhere. Leave the "
                "loop, or close() the iterator, first."
            )

    def _refuse_uncoordinated(self, what: str) -> None:
        if self._options.coordination == "off" and self._setting.ranks is not None:
            raise InputError(
                f'{what} was called with coordination="off" and several workers, each of which is at a step of its '
                'own. Use coordination="on", or save what each worker needs by yourself.'
            )

    def close(self) -> None:
        """Ends every iterator of this dataset. Local, idempotent."""
        self._drop_opened()
        for iterator in list(self._iterators):
            iterator.close()
        self._source.close()
        while self._idle_transfers:
            self._idle_transfers.pop().close()

    def __getstate__(self) -> NoReturn:
        raise of_this_process(self)

    def __enter__(self) -> DistributedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> DistributedIterator:
        entry = self._checkpoint.enter()
        try:
            return self._begin(entry)
        except BaseException:
            self._checkpoint.leave(entry)  # the epoch was not begun
            raise

    def _begin(self, entry: Entry) -> DistributedIterator:
        ranks = self._setting.ranks
        if ranks is None or self._options.coordination == "off":
            return self._begin_with(entry, None)
        told = self._agree_on_epoch(ranks, entry)
        # The next unused number differs where a rank was interrupted before it opened one.
        common = set.intersection(*(set(each["channels"]) for each in told))
        number = min(common) if common else max(each["channels"][-1] for each in told)
        # Not the same where the epoch before was left at different steps; and what the ranks tell hangs on it.
        self._last.ahead = min(each["ahead"] for each in told) or None
        try:
            return self._begin_with(entry, number, [each["peers"] for each in told])
        except BaseException as error:  # the others wait for this rank to open the channel
            ranks.refuse_channel(number, f"could not begin epoch {entry.epoch}: {in_one_line(error)}")
            raise

    def _begin_with(self, entry: Entry, number: int | None, digests: Sequence[str] = ()) -> DistributedIterator:
        """The epoch, once all ranks have agreed on it, with the channel of that number.

        Args:
          entry: where it begins.
          number: the channel's; none where the ranks do not meet.
          digests: of the random states of all ranks, where some share a data coordinate.
        """
        ranks = self._setting.ranks
        start = entry.start
        if start.steps:
            start = self._source.resume(entry.epoch, start, self._share_at_start)
        draws = self._draws_of(entry)
        random = self._checkpoint.record(draws)
        # Loader workers are forked before the channel starts its threads: a fork while the C library starts a thread
        # can leave the child with a lock that nobody will release, and a loader worker that never answers.
        stream = open_stream(self._source, entry.epoch, self._checkpoint.followed(draws), start)
        if isinstance(draws, SharedRng):
            draws.lend()
        try:
            channel, lent = None, None
            if ranks is not None and number is not None:
                lent = self._states_of_coordinate(ranks, digests) if self._setting.has_peers else None
                channel = ranks.open_channel(number)
        except BaseException:
            stream.close()
            raise
        self._meter = self._new_meter(self._meter.ranks)
        log_every = self._options.log_every if ranks is None or ranks.rank == 0 else 0
        self._progress = Progress(
            entry.epoch,
            start,
            random,
            self._meter,
            self._setting.topology,
            knows_all=ranks is None or channel is not None,
            log_every=log_every,
        )
        self._checkpoint.begun(entry, self._progress, stream)
        iterator = self._build_pipelined(Opened(channel, stream, self._progress, self._last, lent))
        self._iterators.add(iterator)
        return iterator

    def _build_pipelined(self, opened: Opened) -> DistributedIterator:
        """The walk. If a device cannot be prepared, or no thread started, the other ranks hear of it at once."""
        try:
            return build_pipeline(self._source, self._setting, self._options, opened, self._idle_transfers)
        except BaseException as error:
            opened.stream.close()
            if opened.channel is not None:
                opened.channel.abort(f"failed: {type(error).__name__}: {error}")
            raise

    def _new_meter(self, told: Sequence[dict[str, Any]] = ()) -> Metrics:
        ranks, workers = self._setting.ranks, self._source.workers
        fresh = int if workers is None else workers.fresh_batches
        return Metrics(0 if ranks is None else ranks.name(ranks.rank), told, fresh)

    def _agree_on_epoch(self, ranks: Ranks, entry: Entry) -> list[Any]:
        facts = {"dataset": self._name, "start": entry.mark, **self._source.epoch_fingerprint()}
        # Not where the data is to be brought to a step first, which may draw.
        asks = self._source.draws_from_default_generator and not entry.start.steps
        digest = self._alike.digest_of(_default_of(entry)) if asks else None
        peers = CoordinateStates().digest if self._setting.has_peers else ""
        channels = ranks.free_channels()
        extra = {"channels": channels, "random": digest, "ahead": self._last.ahead or 0, "peers": peers}
        told = agree(ranks, f"iter() of dataset {self._name}", facts, extra=extra)
        self._alike.compare([each["random"] for each in told])
        return told

    def _states_of_coordinate(self, ranks: Ranks, digests: Sequence[str]) -> CoordinateStates:
        """The random states with which ranks that share a data coordinate read: those of the first of them.

        Collective, where some differ from their first. Called when the epoch is open, which draws.
        """
        workers, own = self._setting.workers, CoordinateStates()
        if len(set(zip(workers, digests, strict=True))) == len(set(workers)):
            return own
        is_first = ranks.rank in ranks.firsts
        told = self._share_at_start(lambda: own.to_json() if is_first else None)
        return own if is_first else CoordinateStates.from_json(told[workers.index(workers[ranks.rank])])

    def _share_at_start(self, make: Callable[[], Any]) -> list[Any]:
        """See ``sources.base.Exchange``. Collective: every rank comes here, as all agreed on where to start."""
        made, problem = None, None
        try:
            made = make()
        except Exception as error:  # every rank must hear of it, or the others would wait
            problem = error
        return agree(self._setting.ranks, f"iter() of dataset {self._name}", {}, error=problem, extra=made)

    def _draws_of(self, entry: Entry) -> Draw:
        """What calls user code that may draw from the default random state: all ranks must draw the same."""
        ranks = self._setting.ranks
        if not self._source.draws_from_default_generator:
            return plainly
        if ranks is None:
            return plainly if entry.default is None else SharedRng(entry.default)
        if self._options.coordination == "off":  # each rank draws when it comes there: nothing to go on from
            return SharedRng(state_of_epoch(self._seed, entry.epoch))
        state = self._alike.common
        if state is None:
            state = _default_of(entry)
            ranks.broadcast_from_first(state)
        return SharedRng(state, self._setting.lent)


def check_partial_batch(source: Source, options: InputOptions) -> None:
    """Refuses padding where the size to pad to is not known. Local.

    Raises:
      BatchingError: padding is asked for, and the size is not known.
    """
    if options.partial_batch == "pad" and source.largest_piece_size is None:
        raise BatchingError(
            "partial_batch='pad' needs a known global batch size G, to pad every piece to ceil(G / N) rows, and this "
            "source yields batches of any size (ready batches, a batch sampler of your own, a dataset function). Give "
            "a DataLoader with batch_size=, or single samples with global_batch_size=."
        )


def _default_of(entry: Entry) -> torch.Tensor:
    return torch.get_rng_state() if entry.default is None else entry.default


def _check_number(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; an int of 0 or more is needed.")


def _identity_of(source: Source, policy: str, topology: Topology) -> Mapping[str, Any]:
    """What tells this input from others when a state is loaded; its world too, if its states fit that one only."""
    facts = {**source.fingerprint(), "policy": policy}
    if not source.bound_to_world:
        return facts
    return {**facts, "number of workers": topology.num_workers, "number of replicas": topology.num_replicas}


def facts_of(source: Source, policy: str, options: InputOptions) -> Mapping[str, Any]:
    """What must be equal on all ranks when a dataset is distributed."""
    alone = source.epoch_fingerprint() if options.coordination == "off" else {}  # ranks do not meet at each epoch
    asked = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    del asked["auto_shard_policy"]  # the policy in force counts
    asked["replication_mode"] = options.replication_mode.name
    for name in ("count_fn", "split_fn", "empty_fn"):  # functions of two processes cannot be compared
        asked[name] = asked[name] is not None
    parts = {SAMPLES: source.part} if isinstance(source, TellsPart) else {}
    return {**source.fingerprint(), **parts, **alone, **asked, "policy": policy}
