"""``DistributedDataset``: a dataset that is divided among the replicas, iterated once per epoch, and resumable."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, NoReturn, final

import torch

from torchdistinput.build_pipeline import OpenedEpoch, Setting, build_pipeline, open_stream
from torchdistinput.checkpoint import Checkpoint, NextPlace
from torchdistinput.coordination.failures import OF_RANKS, in_one_line
from torchdistinput.coordination.fingerprints import agree, agree_on
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.coordination.tree import FAILED
from torchdistinput.errors import BatchingError, InputError
from torchdistinput.frameworks import check_accelerate, check_trainer
from torchdistinput.inspection.explanation import explain
from torchdistinput.inspection.sample_lookup import (
    SampleStep,
    StepSamples,
    asked_topology,
    order_of,
    samples_of,
    steps_of,
)
from torchdistinput.iterator import (
    DistributedIterator,
    EpochPipeline,
    EpochProgress,
    LeftEpoch,
    NextEpoch,
    delivered,
    of_this_process,
)
from torchdistinput.pipeline.metrics import Metrics
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.plan.checkpoint_format import OF_WORLD
from torchdistinput.plan.options import InputOptions, Step
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.contract import Source
from torchdistinput.sources.epoch_rng import UncountedDraws
from torchdistinput.sources.iterable.divided_sources import PART_HINT, SAMPLES
from torchdistinput.sources.kernel.epoch_order import EpochOrder
from torchdistinput.sources.kernel.explanation import Explanation
from torchdistinput.sources.kernel.sample_costs import digest_of_costs
from torchdistinput.sources.rng import (
    SharedRng,
    WithRng,
    call_directly,
    packed,
    state_of_epoch,
    unpacked,
)
from torchdistinput.step_types import LocalStep, Start
from torchdistinput.tracing.trace_file import TraceFile

_SEED_ALIKE: Final = (
    "Seed the generator alike on every rank, not by the rank, and let no rank draw from it more often than the others."
)
LENGTH_HINT: Final = (
    "Look at len(dataset) on each rank, and at what it follows from: a part that each rank was given already, a split "
    "or filter without the same seed, samples that one rank added or removed, files that one machine lacks."
)
"""Advice for the user if the ranks have data of different lengths."""
_HINTS: Final = {
    "length": LENGTH_HINT,
    SAMPLES: PART_HINT,
    "generator state": _SEED_ALIKE,
    "sampler's generator state": _SEED_ALIKE,
}

_LOG = logging.getLogger("torchdistinput")


@final
class DistributedDataset:
    """A dataset divided among the replicas of a strategy. Made by ``Strategy.distribute_dataset`` and its siblings.

    Each loop over it reads the next epoch. That is collective: every rank of the strategy iterates, in the same order.

    Args:
      source: the data, as this worker reads it.
      setting: the topology, devices and ranks of the strategy.
      options: the user's options.
      name: identifies this dataset among those of the strategy; the same on every rank.
      policy: the name of the policy in force.
      seed: the same on every rank; ranks that do not meet before an epoch (``coordination="off"``) draw from it.
      trace_file: gets the times of each step; ``None`` for no trace.
    """

    def __init__(
        self,
        source: Source,
        setting: Setting,
        options: InputOptions,
        name: str,
        *,
        policy: str,
        seed: int,
        trace_file: TraceFile | None = None,
    ) -> None:
        self._trace_file = trace_file
        self._seed, self._policy = seed, policy
        self._source = source
        self._setting = setting
        self._options = options
        self._name = name
        self._checkpoint = Checkpoint(
            source,
            partial(_identity_of, source, policy, setting.topology),
            setting.ranks,
            setting.topology.worker,
            name,
            shared_rng=setting.shared_rng,
        )
        self._last = self._checkpoint.last
        self._unread_of: object = None  # for which iterator the unread epoch was begun; None: for any
        self._first_metrics = self._new_metrics()
        self._set_at: EpochProgress | None = None  # the epoch of the last step when the place was set
        self._draws = UncountedDraws(source, setting.shared_rng)  # of the epoch that was begun last
        self._iterators: weakref.WeakSet[DistributedIterator] = weakref.WeakSet()
        # Streams and their memory are kept for the life of the dataset, one set for each iterator alive at a time.
        self._idle_transfers: list[ToDevice] = []

    def __iter__(self) -> DistributedIterator:
        """An iterator over the next epoch. Local: the epoch begins when something of it is asked for, collectively.

        ``next``, ``has_next`` and ``element_spec`` of the iterator then raise:

        - ``RankDisagreement``: the ranks are at different epochs, left the last one after different steps, or have
          different generators, lengths or states;
        - ``CoordinationTimeout``: a rank did not come in time; it is named;
        - ``RankLost``: a rank died, or left the loop before the others;
        - ``SourceError``: the data of a rank failed, on every rank after the same number of steps;
        - ``BatchingError``: an element cannot be cut, or differs in structure from the elements before.

        Raises:
          InputError: accelerate accumulates gradients, or a Trainer of transformers may gather parts of unequal size,
            and does not know this loader.
        """
        check_trainer(equal=self._setting.ranks is None or self._source.facts.certain_piece_size is not None)
        return self._new_iterator()

    def _new_iterator(self) -> DistributedIterator:
        check_accelerate()
        owner = object()  # stands for the iterator, which would be a reference cycle
        begin, drop = partial(self._begin, owner), partial(self._drop_unread, owner)
        next_epoch = NextEpoch(begin, self._take, self._look, drop, self._last)
        iterator = DistributedIterator(next_epoch)
        self._iterators.add(iterator)
        return iterator

    def __len__(self) -> int:
        """The number of steps of an epoch, over all ranks. Local.

        For a ``FileDataset`` under DATA the steps are counted by the records of its files, if their format says how
        many they have; then the first call opens each file. A ready batch without a sample, which is no step, is
        counted.

        Raises:
          TypeError: the number is not known before the data is read.
          SourceError: naming a file that is missing or cannot be opened.
        """
        steps = self._source.num_steps(for_len=True)
        if steps is None:
            raise TypeError(
                "the number of steps is not known before the data is read. It is known of map-style data, and under "
                "DATA of files whose format says how many records they have, but not with on_error='skip', which may "
                "leave records out."
            )
        return steps

    @property
    def element_spec(self) -> Any:
        """See ``DistributedIterator.element_spec``. Local once an element was delivered: the structure of that one.

        Before that it begins the next epoch, and keeps its first element for whoever reads it.
        """
        progress = self._last.progress
        if progress is not None and progress.elements is not None and progress.metrics.steps:
            return progress.elements.spec()
        epoch = self._begin()
        self._look(epoch)
        return epoch.elements.spec()

    @property
    def epoch(self) -> int:
        """The number of the epoch that a loop reads now, or that the next loop reads. Local.

        >>> loader = tdi.Strategy().distribute_dataset(range(5), global_batch_size=3)
        >>> [loader.epoch for _ in range(loader.epoch, 2) for _ in loader], loader.epoch
        ([0, 0, 1, 1], 2)
        """
        if self._last.progress is not None and self._is_read:
            return self._last.progress.epoch
        self._heed_user()
        return self._checkpoint.next.epoch

    @property
    def step(self) -> Step:
        """The step of the last element that any iterator of this dataset delivered. Local.

        Raises:
          InputError: no element was delivered yet.
        """
        return delivered(self._last.step)

    def stats(self) -> dict[str, float]:
        """The measurements of this rank in the epoch that was read last, as plain numbers for loggers. Local.

        >>> loader = tdi.Strategy().distribute_dataset(range(5), global_batch_size=3)
        >>> len(list(loader)), loader.stats()["steps"], loader.stats()["samples"]
        (2, 2, 5)

        What is not known has no key.

        Returns:
          - ``epoch``; ``steps`` that were delivered here; ``samples`` of this rank's replicas, ``samples_per_second``,
            and ``bytes`` of their tensors and arrays (lists count nothing, nor does what the drop-in passes through in
            one process); ``skipped_samples``, which could not be read;
          - ``fresh_batches``: batches of loader workers that needed new shared memory, because all of the reusable
            memory was in use: by batches that you keep, or by very large ones;
          - ``seconds`` since the epoch began; ``wait_seconds`` that the training loop waited in ``next``;
          - by stage, which are no waits: ``read_seconds`` of reading and decoding in this process, or of waiting for
            its loader workers; ``copy_seconds`` of making empty and padded pieces and starting copies to the devices;
            ``vote_seconds`` in exchanges, where a rank mostly waits for slower ranks;
          - as of the last vote, the same on all ranks but for the votes that they have not heard of:
            ``exposed_wait_seconds``, how long the loop of the rank waited that waited longest, ``exposed_wait_rank``;
            ``latest_rank``, which came last to the votes, and for how long, ``latest_rank_made_wait_seconds``, others
            waited for it; ``made_others_wait_seconds``, the same of this rank;
          - of a ``Mixture`` that is read as a stream ``sources/NAME/samples`` and ``sources/NAME/tokens``: of each
            source, over all ranks, what was delivered in the epoch, from its start.
        """
        progress = self._last.progress
        epoch = 0 if progress is None else progress.epoch
        stats = self._metrics.stats(epoch, alone=self._setting.topology.num_workers == 1)
        counts = None if progress is None else progress.stream.counts(progress.rows)
        for name, of_source in (counts or {}).items():
            stats |= {f"sources/{name}/{unit}": number for unit, number in of_source.items()}
        return stats

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch, and tells the user's sampler and dataset. Local; the same on every rank.

        This call is optional: each loop reads the next epoch, whose number is set on the sampler and dataset, if they
        show it as the attribute ``epoch``. A ``set_epoch`` that the user calls on such an object, which changes what it
        shows, counts as a call of this method. Objects that do not show their epoch are told by this method alone.

        If a state of this epoch was loaded, or a step of it sought, the next loop still begins there.
        """
        check_number("epoch", epoch)
        self._drop_unread()
        self._checkpoint.set_epoch(epoch, running=self._is_read)

    @property
    def _is_read(self) -> bool:
        """Whether the iterator lives that was read last. Local."""
        return any(iterator.reads is self._last.progress for iterator in self._live())

    def _live(self) -> list[DistributedIterator]:
        """The iterators that read an epoch now."""
        return [iterator for iterator in self._iterators if iterator.reads is not None]

    def _heed_user(self) -> None:
        """Makes a ``set_epoch`` that the user called on the sampler or dataset count as one of this dataset."""
        epoch = self._source.user_epoch.set_by_user()
        if epoch is not None:
            self._drop_unread()
            self._checkpoint.set_epoch(epoch, running=self._is_read, asked=False)

    def state_dict(self) -> dict[str, Any]:
        """The position after the steps delivered so far, to resume there: in another process, at any number of ranks.

        Local and equal on every rank for map-style data, and under DATA for files, and for iterables without a state of
        their own. **Collective** (every rank calls it, also where only one saves) for files under FILE, for
        ``distribute_datasets_from_function``, for policy HINT, for policy OFF except for map-style data, and for
        datasets or iterators with a ``state_dict`` of their own. In doubt: call it on every rank, then save on one.

        While an epoch is read, and after a loop that was left early, the state holds the steps delivered in this epoch.
        After the last step of an epoch of known length, and after the end of any epoch, it holds the start of the next
        one. Before the first epoch of several ranks it lacks the state of torch's default generator: that of rank 0
        counts, when the next epoch begins.

        >>> loader = tdi.Strategy().distribute_dataset(range(5), global_batch_size=3)
        >>> first, state = next(iter(loader)), loader.state_dict()
        >>> loader.close()
        >>> again = tdi.Strategy(["cpu", "cpu"]).distribute_dataset(range(5), global_batch_size=3)
        >>> again.load_state_dict(state)
        >>> list(again)
        [PerReplica(0: tensor([3]), 1: tensor([4]))]

        Returns:
          Plain ints, strings and lists with the same keys always; see ``plan.checkpoint_format``. Under 8 KiB
          for map-style data, and under 64 bytes more for each file in progress.

        Raises:
          StateMismatch: a state of the user's own is not plain JSON; the key is named.
          InputError: ``coordination="off"`` with several workers, each of which is at a step of its own.
          CoordinationTimeout: it is collective, and some ranks did not call it within ``timeout_seconds``.
        """
        self._refuse_uncoordinated("state_dict()")
        if not self._live():  # else the running data may count epochs itself
            self._heed_user()
        try:
            with self._waiting():
                return self._checkpoint.state()
        except OF_RANKS as error:
            raise error.with_traceback(None) from error.__cause__

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002 - as in torch
        """Makes the next loop continue at the saved position. Local: every rank calls this with the same state.

        The number of ranks may differ from the saved run, as may ``prefetch`` and, except for opaque iterables, the
        number of loader workers. Delivered samples are not read again: map-style data skips their indices, and files
        are opened at the saved positions. Opaque iterables without a state of their own are read up to the position,
        with a warning.

        Without a generator, torch draws the order from its default random state: this call sets the default state on
        rank 0. Restore your own default state (for dropout) after this call.

        Args:
          state: the result of ``state_dict()``, also after JSON, ``torch.save`` or a distributed checkpoint. An empty
            dict stands for no state, as in torchdata's loaders: it changes nothing, which a warning says.
          strict: whether to refuse the state of an input that looks different; else the differences are logged.

        Raises:
          StateMismatch: the state is of a newer version, is incomplete or damaged, or is of another dataset, seed,
            batch size, policy or list of files; or a file in progress has changed. The message names the field and both
            values.
          InputError: an iterator of this dataset is alive.
        """
        self._refuse_uncoordinated("load_state_dict()")
        self._refuse_live("load_state_dict()")
        self._drop_unread()
        if state == {}:
            epoch, place = self._checkpoint.next.epoch, self._checkpoint.next.place
            _LOG.warning(
                "load_state_dict() was given an empty dict, which stands for no state, as in torchdata's loaders; "
                "state_dict() never returns one. Nothing is loaded: dataset %s goes on at epoch %d, step %d.",
                self._name,
                epoch,
                0 if place is None else place.step,
            )
            return
        self._checkpoint.load(state, strict=strict)
        self._set_at = self._last.progress

    def seek(self, epoch: int, step: int = 0) -> None:
        """Makes the next loop begin at a step of an epoch, to repeat the batches of that step.

        Local: every rank calls this with the same numbers. Skipped map-style samples are not read. Skipped parts of
        files are read, but not decoded; skipped elements of opaque iterables are read. Where the order depends on a
        random generator, the draws of the epochs in between are repeated, from an epoch whose random states this
        dataset knows. Without a generator this is right only if no other code draws from torch's default random state
        between these epochs.

        A batch without a sample on any rank is not delivered, but counts as a step here: the data before the step is
        not looked at. There are such batches where ``on_error="skip"`` left out all samples of one, where a ready batch
        is empty, and where each rank has batches of its own with fewer samples than replicas. A saved state does not
        count them.

        Args:
          epoch: the number of the epoch.
          step: the first step to deliver.

        Raises:
          ValueError: a negative number, or a step after the end.
          InputError: an iterator of this dataset is alive, or the epoch is before the earliest one known.
        """
        check_number("epoch", epoch)
        check_number("step", step)
        self._refuse_uncoordinated("seek()")
        self._refuse_live("seek()")
        self._drop_unread()
        self._checkpoint.seek(epoch, step)
        self._set_at = self._last.progress

    def explain(self, world_size: int | None = None) -> Explanation:
        """The plan of the next epoch, before anything is read: who reads what, in how many steps, and where. Local.

        ``print(loader.explain())`` shows it in at most 30 lines, for any number of files; ``to_json()`` for programs.
        No file is opened; what is not known without that is ``None``, and ``unknown`` says why.

        >>> loader = tdi.Strategy().distribute_dataset(range(10), global_batch_size=4)
        >>> print(loader.explain(world_size=3))  # doctest: +ELLIPSIS
        Data:        range, map-style, 10 samples, in order
        Ranks:       3, with 3 replicas in all
        ...
        Epoch 0:     3 steps, 10 samples
        ...

        Args:
          world_size: as if on so many ranks; by default those that run.

        Raises:
          ValueError: ``world_size`` is no int of 1 or more.
        """
        topology = asked_topology(self._setting.topology, world_size)
        epoch = self._checkpoint.next.epoch
        return explain(
            self._source.reading_plan(epoch, topology),
            self._source.facts,
            self._options,
            topology,
            self._policy,
            epoch=epoch,
            devices=[str(device) for device in self._setting.devices],
        )

    def samples_of(self, epoch: int, step: int, rank: int | None = None, world_size: int | None = None) -> StepSamples:
        """The samples of a step, of each replica: which they are, without reading any. Local; nothing is moved.

        >>> loader = tdi.Strategy().distribute_dataset(range(5), global_batch_size=3)
        >>> print(loader.samples_of(epoch=0, step=1, world_size=2))
        Epoch 0, step 1 of 2, on 2 rank(s): 2 samples.
          rank 0, replica 0: 3
          rank 1, replica 1: 4

        With ``ShuffleSampler`` and without shuffling a step is found at once. For files whose numbers of records are
        known (by their format, by their ``Fragment``) and mixtures of them the order is walked through up to the step,
        some seconds for ten million records, or on from the step that was asked for before; files may be opened, once.
        Other samplers of torch, and batches by length over them, are drawn again by a copy, which ``notes`` says. With
        ``on_error="skip"`` the samples that are left out are among them; a step of which all are left out is not
        delivered, so later numbers differ.

        Args:
          epoch: the number of the epoch.
          step: ``Step.index``.
          rank: only of this rank. Of ranks that share a data coordinate of a mesh, the number of the coordinate.
          world_size: as if on so many ranks; by default those that run.

        Returns:
          A ``StepSamples``: ``parts`` (``rank``, ``replica``, ``samples``), ``samples``, ``global_size``,
          ``num_steps``, ``notes``. Its ``str`` is for people; it is of named tuples, which ``json.dumps`` takes as
          lists. A sample is an index; or ``(file, record)`` of files, ``(source, sample)`` of a mixture, a pack with
          its items.

        Raises:
          ValueError: there is no such step or rank.
          InputError: it cannot be known without reading; the message says what would make it known.
          ShardingError: policy FILE, and fewer files than ranks.
        """
        return samples_of(self._order_of(epoch, world_size), epoch, step, rank)

    def steps_of(self, sample: Any, epoch: int, world_size: int | None = None) -> list[SampleStep]:
        """The steps of a sample in an epoch, each with ``step``, ``rank`` and ``replica``; see ``samples_of``. Local.

        The order of the epoch is walked through: some 50 ms for a million indices, a second for a million records.

        >>> tdi.Strategy().distribute_dataset(range(5), global_batch_size=3).steps_of(4, epoch=0)
        [SampleStep(step=1, rank=0, replica=0)]

        Args:
          sample: an index; ``(file, record)``, or the number that ``with_index=True`` gives it; of a mixture
            ``(source, sample)``; the number of a pack.
          epoch: the number of the epoch.
          world_size: as if on so many ranks.

        Returns:
          none where the sample comes in no step, and where a sampler of the user's own does not draw the index.

        Raises:
          ValueError: the data has no such sample.
          InputError: as ``samples_of``.
        """
        return steps_of(self._order_of(epoch, world_size), sample)

    def _order_of(self, epoch: int, world_size: int | None) -> EpochOrder:
        check_number("epoch", epoch)
        random_of = partial(self._checkpoint.random_of, running=bool(self._live()))
        return order_of(self._source, epoch, self._setting.topology, random_of, self._checkpoint.begun_at, world_size)

    def _refuse_live(self, what: str) -> None:
        if self._live():
            raise InputError(
                f"{what} was called while an iterator of this dataset is alive, which would go on elsewhere. Leave the "
                "loop, or close() the iterator, first."
            )

    def _refuse_uncoordinated(self, what: str) -> None:
        if self._options.coordination == "off" and self._setting.ranks is not None:
            raise InputError(
                f'{what} was called with coordination="off" and several ranks, each of which is at a step of its '
                'own. Use coordination="on", or save what each rank needs by yourself.'
            )

    def close(self) -> None:
        """Ends every iterator of this dataset. Local, idempotent."""
        self._drop_unread()
        for iterator in list(self._iterators):
            iterator.close()
        self._source.close()
        while self._idle_transfers:
            self._idle_transfers.pop().close()
        if self._trace_file is not None:
            self._trace_file.flush()

    def __getstate__(self) -> NoReturn:
        raise of_this_process(self)

    def __enter__(self) -> DistributedDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, owner: object = None) -> EpochPipeline:
        """See ``iterator.NextEpoch``. ``owner`` stands for the iterator; ``None``: the epoch may be read by any.

        The epoch that one iterator looked into is not read by another: when an iterator that was thrown away is freed
        is a matter of each rank alone, and all ranks must begin the same epochs.
        """
        self._heed_user()
        unread = self._checkpoint.unread
        if unread is not None and unread.is_open and (self._unread_of is None or self._unread_of is owner):
            return unread
        self._drop_unread()
        self._unread_of = owner
        self._draws = UncountedDraws(self._source, self._setting.shared_rng)
        try:
            with self._waiting():
                epoch = self._begin_together()
            self._checkpoint.begun(epoch)
        except BaseException as error:  # it has not begun
            self._draws.hide()
            if isinstance(error, OF_RANKS):
                raise error.with_traceback(None) from error.__cause__
            raise
        return epoch

    def _take(self, epoch: EpochPipeline) -> None:
        """See ``iterator.NextEpoch``."""
        self._draws.count()
        self._checkpoint.take(epoch.progress)

    def _look(self, epoch: EpochPipeline) -> LocalStep | None:
        """See ``iterator.NextEpoch``."""
        self._draws.count()
        try:
            step = epoch.engine.peek()
        except BaseException as error:
            if epoch.engine.closed:
                self._take(epoch)
            epoch.fails(error)
            raise
        self._draws.hide()
        return step

    def _drop_unread(self, owner: object = None) -> None:
        """See ``iterator.NextEpoch``. With an ``owner`` only the epoch that was begun for it."""
        if owner is not None and owner is not self._unread_of:
            return
        unread, self._checkpoint.unread = self._checkpoint.unread, None
        if unread is not None:
            unread.close()

    def _waiting(self) -> AbstractContextManager[None]:
        """Inside it, waits for other ranks have the bound of the options."""
        ranks, timeout_seconds = self._setting.ranks, self._options.timeout_seconds
        return nullcontext() if ranks is None or timeout_seconds is None else ranks.waiting(timeout_seconds)

    def _begin_together(self) -> EpochPipeline:
        """Begins the next epoch. Collective."""
        ranks, place = self._setting.ranks, self._checkpoint.next
        start = self._checkpoint.start()
        if ranks is None or self._options.coordination == "off":
            return self._begin_with(place, start, None)
        answers = self._agree_on_epoch(ranks, place)
        number = ranks.num_calls()
        try:
            return self._begin_with(place, start, number, answers)
        except BaseException as error:  # a device or the thread may fail to start; the other ranks wait for its votes
            ranks.open_channel(number).abort(f"could not begin epoch {place.epoch}: {in_one_line(error)}", FAILED)
            raise

    def _begin_with(
        self, place: NextPlace, start: Start, number: int | None, answers: Sequence[Any] = ()
    ) -> EpochPipeline:
        """Begins the epoch on which all ranks have agreed.

        Args:
          place: where it begins.
          start: the same, for the source.
          number: the number of its channel; ``None`` where the ranks do not vote.
          answers: what each rank said of itself; see ``_agree_on_epoch``.
        """
        ranks = self._setting.ranks
        if start.steps:
            start = self._source.resume(place.epoch, start, self._share_at_start)
        with_rng = self._with_rng_of(place, answers)
        random = self._checkpoint.record(with_rng)
        # Loader workers are forked before the channel starts its threads: a fork while the C library starts a thread
        # can leave the child with a lock that nobody will release, and a loader worker that never answers.
        stream = open_stream(self._source, place.epoch, with_rng, start, votes=number is not None)
        try:
            channel = None if ranks is None or number is None else ranks.open_channel(number)
            progress = EpochProgress(
                place.epoch,
                start,
                random,
                stream,
                self._new_metrics(),
                self._setting.topology,
                dataset=self._name,
                knows_all=ranks is None or channel is not None,
                options=self._options,
            )
            opened = OpenedEpoch(channel, stream, progress, self._trace_file)
            return build_pipeline(self._source, self._setting, self._options, opened, self._idle_transfers)
        except BaseException:
            stream.close()
            raise

    @property
    def _metrics(self) -> Metrics:
        """The measurements of the epoch that was read last."""
        return self._first_metrics if self._last.progress is None else self._last.progress.metrics

    def _new_metrics(self) -> Metrics:
        ranks, workers = self._setting.ranks, self._source.workers
        fresh = int if workers is None else workers.fresh_batches
        if ranks is None:
            return Metrics(fresh=fresh)
        names = [*map(ranks.name, range(ranks.num_ranks))]
        return Metrics(names[ranks.rank], fresh, names.__getitem__, is_first=ranks.rank == 0)

    def _agree_on_epoch(self, ranks: Ranks, place: NextPlace) -> list[Any]:
        own_facts, lists = self._source.epoch_facts()
        facts = {"dataset": self._name, "start": place.mark, **own_facts}
        tells = ranks.rank == 0 and self._source.facts.draws_from_default_generator
        default = packed(torch.get_rng_state() if place.default is None else place.default) if tells else None
        last = self._last.progress
        left = LeftEpoch() if last is None or last is self._set_at else last.left
        extra = {"random": default, "left": left}
        what = f"the beginning of an epoch of dataset {self._name}"
        answers = agree(ranks, what, facts, extra=extra, hints=_HINTS, lists=lists)
        LeftEpoch.compare(ranks, [LeftEpoch(*each["left"]) for each in answers])
        return answers

    def _share_at_start(self, make: Callable[[], Any]) -> list[Any]:
        """See ``contract.CallOnEachRank``. Collective: every rank calls this, as all agreed on the same start."""
        return agree_on(self._setting.ranks, f"the beginning of an epoch of dataset {self._name}", make)

    def _with_rng_of(self, place: NextPlace, answers: Sequence[Any]) -> WithRng:
        """The function that calls user code which may draw from the default random state: all ranks draw the same.

        The order of the epoch is drawn from the first rank's state, which came with the agreement on the epoch.
        """
        ranks = self._setting.ranks
        if not self._source.facts.draws_from_default_generator:
            return call_directly
        if ranks is None:
            return call_directly if place.default is None else SharedRng(place.default)
        if self._options.coordination == "off":  # each rank draws at another time, so there is no common state
            return SharedRng(state_of_epoch(self._seed, place.epoch))
        return SharedRng(unpacked(answers[0]["random"]), self._setting.shared_rng)


def iterator_of(dataset: DistributedDataset) -> DistributedIterator:
    """``iter(dataset)``, for a loader that has looked by itself whether parts are of equal size. Local."""
    return dataset._new_iterator()  # noqa: SLF001 - as ``setting_of``


def setting_of(dataset: DistributedDataset) -> Setting:
    """The topology, devices and ranks that a dataset is divided among. Local."""
    return dataset._setting  # noqa: SLF001 - no attribute that users see


def draws_from_default_state(dataset: DistributedDataset) -> bool:
    """Whether the order of its epochs may follow from torch's default random state. Local."""
    return dataset._source.facts.needs_default_state  # noqa: SLF001 - as above


def check_sizes(source: Source, options: InputOptions) -> None:
    """Refuses options that need a size or number that is not known. Local.

    Raises:
      BatchingError: padding is asked for, and the size of a batch is not known.
    """
    if options.partial_batch == "pad" and source.facts.largest_piece_size is None:
        raise BatchingError(
            "partial_batch='pad' needs a known global batch size G, to pad every piece to ceil(G / N) rows, and this "
            "source yields batches of any size (ready batches, a batch sampler of your own, a dataset function). Give "
            "a DataLoader with batch_size=, or single samples with global_batch_size=."
        )


def check_number(name: str, value: object) -> None:
    """Refuses a value that is no int of 0 or more."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}; an int of 0 or more is needed.")


def _identity_of(source: Source, policy: str, topology: Topology) -> Mapping[str, Any]:
    """The facts that identify this input now, in a state; with its world size, if its states depend on it."""
    facts = {**source.fingerprint(), "policy": policy}
    if not source.facts.bound_to_world:
        return facts
    return {**facts, **dict(zip(OF_WORLD, (topology.num_workers, topology.num_replicas), strict=True))}


def facts_of(source: Source, policy: str, options: InputOptions) -> Mapping[str, Any]:
    """The facts that must be equal on all ranks when a dataset is distributed."""
    alone = source.epoch_facts().fingerprint if options.coordination == "off" else {}  # ranks do not meet at each epoch
    asked = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    del asked["auto_shard_policy"]  # the policy in force counts
    del asked["trace"]  # each rank writes where it can
    asked["replication_mode"] = options.replication_mode.name
    asked["balance"], asked["equal_counts"] = digest_of_costs(options.costs), options.equal_counts
    for name in ("count_fn", "split_fn", "empty_fn"):  # functions of two processes cannot be compared
        asked[name] = asked[name] is not None
    asked["sums"] = options.sum_names
    return {**source.fingerprint(), **alone, **asked, "policy": policy, SAMPLES: source.facts.sample_identity}
