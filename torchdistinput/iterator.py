"""``DistributedIterator``: the iterator over one epoch that ``iter(dataset)`` returns.

An epoch begins when something of it is asked for: at the first ``next``, ``has_next`` or ``element_spec``. Until
``next`` was called it is the *unread* epoch of its dataset, and moves nothing: not the state, not the user's random
states, not the epoch that the user's sampler was told. ``next`` takes it; another iterator begins it anew.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar, final

from torchdistinput.batches.element_spec import Elements
from torchdistinput.coordination.fingerprints import compare
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.errors import InputError, OutOfRangeError
from torchdistinput.pipeline.engine import Engine
from torchdistinput.pipeline.metrics import Metrics
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.plan.options import InputOptions, Step
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.epoch_rng import EpochRng
from torchdistinput.step_types import NOTHING_SKIPPED, LocalStep, Start, Stream

_LOG = logging.getLogger("torchdistinput")
_LEFT_HINT: Final = (
    "These ranks have trained different steps. Leave the loop at the same one: decide on a value that all ranks know, "
    "such as the step, or the sum of a flag over the ranks (strategy.reduce). To go on here, let every rank load the "
    "same state, or seek the same step."
)

T = TypeVar("T")


@final
class Optional(Generic[T]):
    """An element, or no element at the end of the data, as ``tf.experimental.Optional``."""

    def __init__(self, value: T | None, *, has_value: bool) -> None:
        self._value = value
        self._has_value = has_value

    def has_value(self) -> bool:
        """Whether there is an element."""
        return self._has_value

    def get_value(self) -> Any:
        """The element.

        Raises:
          ValueError: there is no element.
        """
        if not self._has_value:
            raise ValueError("this optional has no value: the data has ended. Ask has_value() first.")
        return self._value


@final
class LastStep:
    """The step that was delivered last by any iterator of a dataset."""

    def __init__(self) -> None:
        self.progress: EpochProgress | None = None
        """The progress of its epoch, or of one that was taken since and has delivered nothing yet."""
        self._before: Step | None = None  # the last step before that epoch

    def take(self, progress: EpochProgress) -> None:
        """Notes that an iterator has taken an epoch."""
        self._before, self.progress = self.step, progress

    @property
    def step(self) -> Step | None:
        """The step; ``None`` before the first. Made on request, not at every step."""
        return self._before if self.progress is None else self.progress.step or self._before


@final
class LeftEpoch(NamedTuple):
    """Where a loop over an epoch was left, as the ranks tell each other before the next one.

    Args:
      epoch: the number of the epoch; -1 where nothing was delivered since the dataset was made or its place was set.
      steps: how many steps were delivered.
      error: the class of the error that ended it, if one did.
      at_end: whether it was told the end of the data.
    """

    epoch: int = -1
    steps: int = 0
    error: str = ""
    at_end: bool = False

    def __str__(self) -> str:
        if self.epoch < 0:
            return "no step was taken"
        how = f"by {self.error}" if self.error else "at its end" if self.at_end else "where its loop was left"
        return f"epoch {self.epoch} after {self.steps} step(s), {how}"

    @staticmethod
    def compare(ranks: Ranks, told: Sequence[LeftEpoch]) -> None:
        """Refuses to begin an epoch after ranks took different steps of the last one. Local; the same on every rank.

        How each left it may differ: one rank may break after its last step, and another ask for the end. Where every
        rank left it by an error, each was told already.

        Raises:
          RankDisagreement: they took different steps, and not every rank had an error.
        """
        if len({(each.epoch, each.steps) for each in told}) > 1 and not all(each.error for each in told):
            compare(ranks, "where they left the last epoch", [*map(str, told)], _LEFT_HINT)


@final
class EpochProgress:
    """The steps and samples that were delivered in one epoch.

    Args:
      epoch: the number of the epoch.
      start: the place at which the iterator began.
      random: the random states of the epoch.
      stream: the rows of the epoch.
      metrics: collects the measurements of the epoch.
      topology: the number of workers and replicas, and which worker this is.
      dataset: its name in messages.
      knows_all: whether the sizes of all workers are known (not with ``coordination="off"``).
      options: the user's options.
    """

    def __init__(  # noqa: PLR0913 - made in one place
        self,
        epoch: int,
        start: Start,
        random: EpochRng,
        stream: Stream,
        metrics: Metrics,
        topology: Topology,
        *,
        dataset: str,
        knows_all: bool,
        options: InputOptions,
    ) -> None:
        self.epoch = epoch
        self.random = random
        self.stream = stream
        self.start = start
        self.fingerprint: Mapping[str, Any] = {}
        """The facts that identify the input, as they were when the epoch began."""
        self.elements: Elements | None = None
        """The facts about the elements; ``None`` until its pipeline is made."""
        self.metrics = metrics
        self.is_sought = False
        """Whether the start was sought, so that the samples before it are those that the stream counts."""
        self._delivered = 0
        self.ended = False
        self._taken: LocalStep | None = None  # the last one
        self._topology = topology
        self._knows_all = knows_all
        self.dataset = dataset
        self._log_every = options.log_every
        self._sum_names = options.sum_names
        self._failed = 0, ""  # after how many steps, and the class of the error

    @property
    def step(self) -> Step | None:
        """The last step; ``None`` before the first. Made on request, not at every step."""
        taken, topology = self._taken, self._topology
        if taken is None:
            return None
        size = taken.global_size if self._knows_all else None
        sums = self._by_name(taken.sums)
        return Step(
            *(self.epoch, self.steps - 1, size, taken.sizes),
            *(topology.num_replicas, topology.num_workers),
            costs=taken.costs,
            sums=sums,
            local_sums=self._by_name(taken.local_sums),
        )

    def _by_name(self, sums: Sequence[int]) -> dict[str, int]:
        """The values of the sums; those of a part without a sample are 0."""
        return dict(zip(self._sum_names, sums or [0] * len(self._sum_names), strict=True))

    @property
    def steps(self) -> int:
        """Steps of the epoch that were delivered, including the steps before ``start``."""
        return self.start.steps + self.metrics.steps

    @property
    def samples(self) -> int:
        """Samples of the epoch that were delivered, including those before ``start``."""
        passed = self.stream.samples_passed if self.is_sought else None
        return (self.start.samples if passed is None else passed) + self._delivered

    @property
    def rows(self) -> int:
        """Rows of the stream up to the last step."""
        return 0 if self._taken is None else self._taken.rows

    @property
    def draw_digest(self) -> int:
        """The digest of the sampler's draw for the last step; 0 where there is none to compare."""
        return self.start.draw_digest if self._taken is None else self._taken.digest

    def end(self, *, of_data: bool) -> None:
        """Notes the end of the iteration; ``of_data`` is false where it was closed before the end of the data."""
        if of_data and not self.ended and self._log_every and self.steps % self._log_every:
            self._log()
        self.ended = of_data
        taken = self._taken
        if taken is not None:  # the function that computes its digest would keep the order of the epoch in memory
            taken.draw_digest = taken.digest

    def failed(self, error: BaseException) -> None:
        """Notes that the step after these ended in an error."""
        self._failed = self.steps, type(error).__name__

    @property
    def left(self) -> LeftEpoch:
        """Where the iteration was left, or is now. Local."""
        steps, error = self._failed
        return LeftEpoch(self.epoch, self.steps, "" if self.ended or steps != self.steps else error, self.ended)

    def _log(self) -> None:
        line = self.metrics.line(self.epoch, self.steps, alone=self._topology.num_workers == 1)
        if line:
            _LOG.info("dataset %s, %s", self.dataset, line)

    def add(self, taken: LocalStep, local: int, num_bytes: int) -> None:
        """Counts a delivered step, with its samples and bytes on this worker, and drops its pieces."""
        metrics = self.metrics
        if taken.skipped is not NOTHING_SKIPPED:
            metrics.skipped += taken.skipped.samples
        taken.pieces = taken.transfers = ()
        metrics.samples += local
        metrics.bytes += num_bytes
        # In one line, with nothing called: an interruption finds the step counted, or not, in all of them.
        self._taken, self._delivered, metrics.steps = taken, self._delivered + taken.global_size, metrics.steps + 1
        if self._log_every and not self.steps % self._log_every:
            self._log()


@final
class EpochPipeline:
    """An epoch that has begun: what delivers its steps. It is closed when it is dropped (a loop that was left).

    Args:
      engine: delivers the agreed steps.
      to_device: hands over the pieces of a step on their devices.
      elements: the facts about the elements.
      progress: counts the delivered steps.
    """

    def __init__(self, engine: Engine, to_device: ToDevice, elements: Elements, progress: EpochProgress) -> None:
        self.engine = engine
        self.take = engine.take
        self.to_device = to_device
        self.elements = elements
        self.progress = progress
        progress.elements = elements
        # Runs when this is dropped, and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, engine.close)

    @property
    def is_open(self) -> bool:
        """Whether it was not closed, and did not fail. Local."""
        return self._finalizer.alive

    @property
    def is_live(self) -> bool:
        """Whether it has not ended, failed or been closed. Local."""
        return self.is_open and not self.engine.closed

    def fails(self, error: BaseException) -> None:
        """Notes an error, and breaks a reference cycle: finalizer -> engine -> error -> traceback -> this."""
        self.progress.failed(error)
        if self.engine.closed:
            self._finalizer.detach()

    def close(self) -> None:
        """See ``DistributedIterator.close``."""
        self.engine.close()
        self._finalizer.detach()


@final
class NextEpoch(NamedTuple):
    """What an iterator asks its dataset for.

    Args:
      begin: returns the unread epoch that this iterator or the dataset began; else begins it anew. Collective.
      take: makes the unread epoch one that is read: the place of the dataset and the user's random states move.
      look: reads the first step of the unread epoch, and keeps it. Its error is taken by that. Collective.
      drop: closes the unread epoch that this iterator began; the next one begins at the same place. Local.
      last: the step that was delivered last.
    """

    begin: Callable[[], EpochPipeline]
    take: Callable[[EpochPipeline], None]
    look: Callable[[EpochPipeline], LocalStep | None]
    drop: Callable[[], None]
    last: LastStep


@final
class DistributedIterator:
    """The iterator over one epoch. Made by ``iter(dataset)``.

    >>> iterator = iter(tdi.Strategy().distribute_dataset(range(3), global_batch_size=2))
    >>> iterator.get_next(), iterator.get_next(), iterator.get_next_as_optional().has_value()
    (tensor([0, 1]), tensor([2]), False)

    Its epoch is the dataset's next one at its first ``next``, which is collective, and raises the errors that
    ``DistributedDataset.__iter__`` lists. Its thread and loader workers end when the loop is left, or at
    ``close``.

    A Ctrl-C while ``next`` waits for other ranks, or for steps that loader workers read ahead, loses nothing. One in
    the middle of a read, or with ``prefetch=0`` in the wait for a loader worker, loses what was being read: this
    iterator refuses to go on, and the other ranks raise ``RankLost``, which names this one. A state that is taken
    afterwards describes the last step that was delivered. A Ctrl-C while an epoch begins ends it, on all ranks, and it
    is the next one again; in ``Strategy()`` the others name this rank after their timeout.

    Args:
      next_epoch: begins its epoch.
    """

    def __init__(self, next_epoch: NextEpoch) -> None:
        self._next = next_epoch
        self._last = next_epoch.last
        self._epoch: EpochPipeline | None = None
        self._is_closed = False
        self._looked: weakref.finalize[Any, Any] | None = None  # drops the unread epoch that was looked into here

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        epoch = self._epoch or self._take()
        to_device, take = epoch.to_device, epoch.take
        moves = to_device.moves
        if moves:
            to_device.begin_step()
        taken = None
        try:
            taken = take()
            if taken is not None:
                sizes = taken.sizes
                pieces = to_device.hand_over(taken.transfers) if moves else taken.transfers
                single, elements = len(sizes) == 1, epoch.elements
                element = pieces[0] if single else elements.regroup(pieces)
                local = sizes[0] if single else sum(sizes)
                progress, num_bytes = epoch.progress, elements.num_bytes(local, pieces)
                progress.add(taken, local, num_bytes)
                self._last.progress = progress
                return element
        except BaseException as error:
            if taken is not None:
                epoch.engine.end_by(error)
            epoch.fails(error)
            raise
        epoch.progress.end(of_data=epoch.is_open)  # else it was closed before its end
        raise StopIteration

    def _take(self) -> EpochPipeline:
        if self._is_closed:
            raise StopIteration
        epoch = self._next.begin()
        self._next.take(epoch)
        self._epoch = epoch
        if self._looked is not None:
            self._looked.detach()
        return epoch

    def has_next(self) -> bool:
        """Whether there is another element. Reads it, and keeps it for ``next``. Collective: every rank calls this.

        Raises:
          InputError: the error that ``next`` would raise.
        """
        return not (self._epoch is None and self._is_closed) and self._peek()[1] is not None

    def _peek(self) -> tuple[EpochPipeline, LocalStep | None]:
        """The epoch that is read here or is the next one, and its next step."""
        epoch = self._epoch or self._next.begin()
        if self._epoch is None and self._looked is None:
            self._looked = weakref.finalize(self, self._next.drop)
        try:
            return epoch, epoch.engine.peek() if self._epoch else self._next.look(epoch)
        except BaseException as error:
            if self._epoch:
                epoch.fails(error)
            elif epoch.engine.closed:
                self._epoch = epoch
            raise

    def get_next(self) -> Any:
        """The next element, as TensorFlow's ``get_next``.

        Raises:
          OutOfRangeError: at the end of the data, and again on each further call.
        """
        try:
            return self.__next__()
        except StopIteration:
            progress = None if self._epoch is None else self._epoch.progress
            reached = "" if progress is None else f" after step {progress.steps} of epoch {progress.epoch}"
            raise OutOfRangeError(f"no element{reached}: the data ended, or was closed.") from None

    def get_next_as_optional(self) -> Optional[Any]:
        """The next element, or an optional without value at the end, and again on each further call."""
        try:
            return Optional(self.__next__(), has_value=True)
        except StopIteration:
            return Optional(None, has_value=False)

    @property
    def element_spec(self) -> Any:
        """The structure of the elements with a ``TensorSpec`` at each leaf.

        Local once ``next`` has returned an element. Before that it reads the first one, and keeps it for ``next``; then
        it is collective: every rank reads this.

        Dim 0 is the size of a piece where every piece has it, else ``None``. The other dims are those of one element.

        Raises:
          InputError: the data ended before the first element.
        """
        epoch = self._epoch
        if epoch is None or not epoch.progress.metrics.steps:
            epoch, _ = self._peek()
        return epoch.elements.spec()

    @property
    def step(self) -> Step:
        """The step of the last element. Local.

        Raises:
          InputError: no element was delivered yet.
        """
        return delivered(None if self._epoch is None else self._epoch.progress.step)

    @property
    def reads(self) -> EpochProgress | None:
        """The progress of the epoch that is read here; ``None`` before it began and after its end. Local."""
        return self._epoch.progress if self._epoch is not None and self._epoch.is_live else None

    def __getstate__(self) -> NoReturn:
        raise of_this_process(self)

    def close(self) -> None:
        """Ends the iteration. Idempotent; every rank should leave its loop at the same step.

        After an interruption in here, the next call, or the end of this iterator, does the rest. A thread that reads
        meanwhile gets an ``InputError``: let it leave its loop first.
        """
        self._is_closed = True
        if self._epoch is not None:
            self._epoch.close()
        elif self._looked is not None:
            self._looked()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def of_this_process(what: object) -> TypeError:
    """The error for an attempt to copy or pickle ``what``: a ``TypeError``, as Python raises it."""
    return TypeError(
        f"cannot copy or pickle a {type(what).__name__}: its threads, loader workers and connections to other ranks "
        "belong to this process. Distribute the data again where it is needed; state_dict() and load_state_dict() "
        "carry the position over."
    )


def delivered(step: Step | None) -> Step:
    """The step, if an element was delivered. Local.

    Raises:
      InputError: no element was delivered yet.
    """
    if step is None:
        raise InputError("there is no step yet: no element was delivered. Ask for it inside the loop over the data.")
    return step
