"""Step agreement: the pipeline stage in which all ranks vote, so that all deliver the same steps.

Problem. Ranks have different amounts of data, fail at different times and stop at different steps. A training loop with
collectives in it hangs unless all ranks run the same number of steps.

Decision. A rank votes for a step when it holds the step: fetched, padded, the copy to the device begun. So every rank
holds a step that is agreed. A vote is one message of fixed size and covers up to K steps. The messages of all ranks are
summed (``step_agreement``). Flags in the message tell of a failure, of the end of the data and of a stop.

Texts follow only where the sums call for them. All ranks see the same sums, so all ranks send their texts at the same
point. A text holds the reason why a rank's epoch ended, or the structure of the batches, for ranks that must make an
empty batch and have seen no sample. A process without other ranks forms the same sums
without a message.

Alternatives refused. Count the steps from lengths, without votes: errors and stops would need a second mechanism. Let
one leader decide: the leader's death would be a special case, and its load grows with the number of ranks. Send pickled
objects: data from another rank must not run code on this one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat, takewhile
from time import perf_counter
from typing import Any, Final, NamedTuple, final

from torchdistinput import errors
from torchdistinput.batches.schema import PER_SAMPLE, Structure
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.coordination.batch_digests import words_of
from torchdistinput.coordination.channel import Channel, plain_message
from torchdistinput.coordination.exchanges import Exchange, conclude
from torchdistinput.coordination.failures import error_of, story_of, too_many
from torchdistinput.coordination.tree import GAVE_UP, levels_of
from torchdistinput.errors import InputError, RankLost
from torchdistinput.plan.prefetch_depth import agreed_bound
from torchdistinput.plan.step_agreement import (
    ALIKE,
    BY_MAX,
    AgreedWaits,
    RankWaits,
    StepDecision,
    StepReport,
    decide,
    peer_weight_of,
    weight_of,
)
from torchdistinput.step_types import (
    MAX_DESCRIBED,
    Failed,
    LocalStep,
    OpaqueBatch,
)

_LOG = logging.getLogger("torchdistinput")


@final
class Agreement(NamedTuple):
    """What the ranks agreed on in a vote.

    Args:
      steps: how many of the steps, from the first one; which of them are passed over is marked in them.
      is_last: whether nothing follows them but the end of the data, or ``error``.
      error: the error that every rank raises after these steps.
      bound: that of the prefetch depth, if the ranks agreed on it now.
    """

    steps: int
    is_last: bool = False
    error: BaseException | None = None
    bound: int | None = None


_ONE_STEP: Final = Agreement(1)


@final
class StepSync:
    """Votes for the steps that this rank holds. Used by one thread at a time, except where a method says otherwise.

    Args:
      channel: the connection to the same iterator on the other ranks; ``None`` where no other rank votes.
      slots: how many steps one message covers, K.
      checker: knows the structure of the elements.
      complete: makes the empty pieces of a step, once the structure is known.
      name: this rank, as users know it; ``None`` where there is only one.
      begins_at: the epoch, and the number of the first step that this iterator delivers; for messages.
      counts: whether this rank's samples count. Of several ranks that read the same samples, only one counts.
      workers: the worker of each rank; the ranks of one worker read the same samples. Empty: each rank is a worker.
      hint: the advice of the error for ranks that read different data, if all must read the same; else empty.
      max_errors: samples that all ranks together may leave out; ``None`` where none is ever left out.
      least_ahead: the prefetch depth at first.
      fits: returns how many steps like this one fit ahead into the memory of this rank, if that is known: by the first
        step the ranks agree on a bound of the prefetch depth, up to ``slots``. ``None`` for a fixed depth.
      sums: the names of the sums in each step.
    """

    def __init__(  # noqa: PLR0913 - one stage is one call
        self,
        channel: Channel | None,
        *,
        slots: int,
        checker: SchemaChecker,
        complete: Callable[[LocalStep], None],
        name: int | None,
        begins_at: tuple[int, int],
        counts: bool = True,
        workers: Sequence[int] = (),
        hint: str = "",
        max_errors: int | None = None,
        least_ahead: int = 0,
        fits: Callable[[LocalStep], int | None] | None = None,
        sums: Sequence[str] = (),
    ) -> None:
        self.num_votes = 0
        """Exchanges of reports in which this rank took part to their end."""
        self.waits: AgreedWaits | None = None
        """What all ranks told of their waits in the last vote: who came last in the vote before, number
        ``num_votes - 2``."""
        self.late_us = self.waiting_us = 0
        """By how many microseconds that rank was later than this one, 0 on the rank itself; and for how many the loop
        of this rank has waited in the epoch, which is set before each vote."""
        self.waited_us: int | None = None
        """For how many microseconds this rank waited in the last vote; ``None`` before the first. Whoever knows for how
        long it did nothing else sets it before the next vote."""
        self._channel = channel
        self._departed = ""
        self._slots = slots
        self._checker = checker
        self._complete = complete
        self._name = name
        self._weight = 0 if channel is None else weight_of(channel.rank, channel.num_ranks)
        self._counts = counts
        self._worker = workers[channel.rank] if channel is not None and workers else 0
        self._hint = hint
        alike = [0] * channel.num_ranks if channel is not None and hint else workers
        self._peer_weight = peer_weight_of(channel.rank, alike) if channel is not None and alike else 0
        self._stopped = False
        self._delivered = 0
        self._epoch, self._first_step = begins_at
        self._rows = self._passed_over = 0
        self._max_errors = max_errors
        self._skipped = 0  # samples that are missing in the agreed steps
        self._least_ahead, self._fits = least_ahead, fits
        self._bound = least_ahead if fits is None else None  # of the prefetch depth
        self._agrees_at_once = max_errors is None and counts
        self._left_out: list[str] = []
        self._sum_names = sums
        self._no_sums = [0] * len(sums)

    @property
    def _steps(self) -> int:
        """How many steps of the epoch are agreed, for messages."""
        return self._first_step + self._rows - self._passed_over

    @property
    def alone(self) -> bool:
        """Whether no other rank votes."""
        return self._channel is None

    @property
    def rounds(self) -> int:
        """About how many messages of other ranks a vote waits for, one after the other."""
        return 0 if self._channel is None else 2 * levels_of(self._channel.num_ranks)

    def note_left_out(self, left_out: Sequence[str]) -> None:
        """Logs the first samples that are left out of this epoch. Local; once for each step that this rank holds."""
        for text in left_out[: MAX_DESCRIBED - len(self._left_out)]:
            self._left_out.append(text)
            _LOG.warning("left out of epoch %d, as it could not be read: %s", self._epoch, text)
            if len(self._left_out) == MAX_DESCRIBED:
                _LOG.warning("further skipped samples of epoch %d are counted but not logged on this rank", self._epoch)

    def settle(self, step: LocalStep) -> Agreement:
        """Where no other rank votes: what ``vote`` would return for this one step.

        A step that has samples and lost none is agreed by law A1; this is decided here without forming a report. A step
        that failed gets its error if the data goes on: there is no other rank that would count the steps differently.
        """
        failure = step.failure
        if self._agrees_at_once and failure is None and not step.is_past_end:
            sizes = step.sizes
            size = sizes[0] if len(sizes) == 1 else sum(sizes)
            if size or (step.transfers and type(step.transfers[0]) is OpaqueBatch):  # torch delivers empty batches, too
                self._rows += 1
                if not step.transfers:
                    self._complete(step)
                step.global_size, step.rows, step.sums = size, self._rows, step.local_sums
                return _ONE_STEP
        if failure is not None and failure.goes_on:
            self._rows += 1
            step.error = error_of([story_of(failure, self._name, self._epoch, self._steps)], failure)
            return _ONE_STEP
        return conclude(self.vote([step]))

    def vote(self, steps: Sequence[LocalStep], *, stops_after: int | None = None) -> Exchange[Agreement]:
        """One exchange about the steps that this rank holds. Marks those that are agreed. Collective.

        Args:
          steps: those that are made and not agreed, oldest first. Those behind one that failed do not count.
          stops_after: the consumer stopped after so many steps, and takes no further one; ``None`` while it goes on.
        """
        if stops_after is not None:
            self._stopped, self._delivered = True, stops_after
            steps = [step for step in steps[:1] if step.is_past_end]
        failure = steps[0].failure if steps else None
        try:
            return (yield from self._vote([*takewhile(lambda step: step.failure is None, steps)], failure))
        except RankLost:  # the other ranks gave up waiting for the step that failed here, and hear of no failure now
            if failure is None:
                raise
            raise error_of([story_of(failure, self._name, self._epoch, self._steps)], failure) from failure.error

    def _vote(self, steps: Sequence[LocalStep], failure: Failed | None) -> Exchange[Agreement]:
        decision = yield from self._decision(steps, failed=failure is not None)
        if decision.structures_differ:
            return self._end(0, (yield from self._difference()))
        if decision.structure_wanted:
            problem = yield from self._share_structure()
            if problem is not None:
                return self._end(0, problem)
        count = len(decision.steps)
        bound = yield from self._agree_ahead(steps, decision)
        sums = decision.sums or repeat((), count)
        for step, size, summed in zip(steps, decision.steps, sums, strict=False):
            self._agree(step, size, summed)
        goes_on = not (decision.num_failed or decision.num_stopped or decision.too_many_skipped)
        if goes_on and not (decision.draws_differ or decision.end):
            return Agreement(count, bound=bound)
        following = steps[count] if count < len(steps) else None
        return self._end(count, (yield from self._error_after(decision, failure, following)), bound)

    def _error_after(
        self, decision: StepDecision, failure: Failed | None, following: LocalStep | None
    ) -> Exchange[BaseException | None]:
        """The error after the agreed steps; ``None``: the data ends. Collective: every rank saw the same sums.

        Args:
          decision: that of all ranks.
          failure: this rank's, if it is the next one.
          following: the first of this rank's steps that is not agreed.
        """
        if decision.draws_differ:
            return (yield from self._difference_of_draws(following))
        if decision.end:
            return None
        if decision.num_failed:
            return (yield from self._failure_of_all(failure))
        if decision.too_many_skipped:
            return (yield from self._too_many_skipped(decision.skipped, following))
        return (yield from self._stop_of_some())

    def _end(self, count: int, error: BaseException | None, bound: int | None = None) -> Agreement:
        if self._channel is not None:
            self._channel.release()
        return Agreement(count, is_last=True, error=error, bound=bound)

    def _agree_ahead(self, steps: Sequence[LocalStep], decision: StepDecision) -> Exchange[int | None]:
        """The bound of the prefetch depth, if it is agreed now; law A8. Collective: every rank saw the same steps."""
        first = next((step for step, size in zip(steps, decision.steps, strict=False) if size), None)
        if self._bound is not None or self._fits is None or self._channel is None or first is None:
            return None
        fits = self._fits(first)
        texts = yield from self._texts_of_all("" if fits is None else str(fits))
        fitting = [int(text) if text else None for text in texts]
        self._bound = agreed_bound(fitting, self._least_ahead, self._slots)
        return self._bound

    def _decision(self, steps: Sequence[LocalStep], *, failed: bool) -> Exchange[StepDecision]:
        next_steps, skipped, counts = steps[: self._slots], 0, self._counts
        if self._max_errors is not None:
            next_steps = _until_a_loss(next_steps)
            skipped = self._skipped_until(steps[0] if steps else None) if counts else 0
        sizes = tuple([None if step.is_past_end else sum(step.sizes) if counts else 0 for step in next_steps])
        drawn = tuple([step.compared for step in next_steps])
        read: tuple[int, ...] = ()
        if self._peer_weight:
            read = tuple([step.read for step in next_steps])
        sums: tuple[Sequence[int], ...] = ()
        if self._sum_names and counts:
            sums = tuple([step.local_sums or self._no_sums for step in next_steps])
        channel, waits = self._channel, None
        if channel is not None:
            alike = self.waits is not None and self.waiting_us >= ALIKE * self.waits.waited
            waits = RankWaits(channel.rank, self.waited_us, self.waiting_us, alike)
        report = StepReport(sizes, failed, self._stopped, self._checker.digest, drawn, skipped, read, sums, waits)
        words = report.words(self._slots, self._weight, self._peer_weight, len(self._sum_names))
        if channel is None:
            return decide(words, 1, self._max_errors, num_sums=len(self._sum_names))
        began = perf_counter()
        words = yield from channel.exchange(words, by_max=BY_MAX)
        ended = perf_counter()
        decision = decide(words, channel.num_ranks, self._max_errors, num_sums=len(self._sum_names))
        self.num_votes += 1
        self.waits = decision.waits
        if decision.waits is not None and self.waited_us is not None:
            self.late_us = self.waited_us - decision.waits.least
        self.waited_us = int(1e6 * (ended - began))
        return decision

    def _skipped_until(self, step: LocalStep | None) -> int:
        """Samples of this rank that are missing up to and including a step, the next one."""
        return self._skipped + (0 if step is None else step.skipped.samples)

    def _agree(self, step: LocalStep, global_size: int, sums: Sequence[int]) -> None:
        self._rows += 1
        self._skipped += step.skipped.samples
        if global_size == 0:
            self._passed_over += 1
            step.is_passed = True
            return
        if not step.transfers:
            self._complete(step)
        step.global_size, step.rows, step.sums = global_size, self._rows, sums

    def _share_structure(self) -> Exchange[BaseException | None]:
        """A rank lacks the structure: ranks that know it send it, and all ranks tell whether they can use it.

        Collective: every rank saw the same flag.
        """
        if self._channel is None:
            return None
        texts = yield from self._channel.gather(self._describe_structure())
        problem = self._learn_structure(texts)
        problems = dict.fromkeys(text for text in (yield from self._channel.gather(problem)) if text)
        return errors.BatchingError("\n".join(problems)) if problems else None

    def _describe_structure(self) -> str:
        structure = self._checker.structure
        try:
            return "" if structure is None else json.dumps({"structure": structure.to_json()})
        except InputError as error:
            return json.dumps({"problem": f"rank {self._name}: {error}"})

    def _learn_structure(self, texts: list[str]) -> str:
        """Learns the structure from the rank that knows it, where this rank does not; the problem, if any."""
        if self._checker.structure is not None:
            return ""
        answers = [plain_message(text) for text in texts if text]
        known = [each["structure"] for each in answers if "structure" in each]
        if not known:
            return str(next((each["problem"] for each in answers), self._checker.unknown()))
        try:
            self._checker.learn(Structure.from_json(known[0]))
        except InputError as error:
            return f"rank {self._name}: {error}"
        return ""

    def _difference(self) -> Exchange[BaseException]:
        """The error for ranks whose elements differ in structure. Collective: every rank saw the same sums."""
        structure = self._checker.structure
        mine = "" if structure is None else f"rank {self._name}: {structure}"
        texts = yield from self._texts_of_all(mine)
        structures = "; ".join(text for text in texts if text)
        return errors.BatchingError(
            f"the elements of the ranks differ in structure after step {self._steps}: {structures}. Nesting, names and "
            f"dtypes must be the same on every rank. {PER_SAMPLE}"
        )

    def _difference_of_draws(self, step: LocalStep | None) -> Exchange[BaseException]:
        """The error for samplers that drew differently, or for ranks that read different data and must not.

        Collective: every rank saw the same sums.

        Args:
          step: the one that differs.
        """
        draw_digest = read = cost = "ended"
        ends: Sequence[tuple[int, str, int]] | None = None
        if step is not None and not step.is_past_end:  # a digest of pieces uses all bits: show the whole number
            draw_digest, read = f"{step.digest:x}", words_of(step.read) if self._hint else f"{step.read:x}"
            cost = cost if step.costs is None else f"{step.costs.digest:x}"
            ends = step.ends
        mine = json.dumps(
            {"rank": self._name, "worker": self._worker, "draw": draw_digest, "read": read, "costs": cost, "ends": ends}
        )
        answers = [plain_message(text) for text in (yield from self._texts_of_all(mine))]
        at = f"at step {self._steps} of epoch {self._epoch}"
        same = {(each["draw"], self._hint and each["read"]) for each in answers}
        if len(same) == 1 < len({each["costs"] for each in answers}):
            costs = "; ".join(f"rank {each['rank']}: {each['costs']}" for each in answers)
            return errors.RankDisagreement(
                f"the ranks differ in the costs of the samples {at}; checksums of the costs: {costs}. Every rank must "
                "find the same cost for a sample (balance=), as the costs say which rank gets the sample."
            )
        if self._hint and (files := _first_file_that_differs(answers)):
            return errors.RankDisagreement(f"the ranks read files of different content {at}: {files}. {self._hint}")
        if self._hint:
            read = "; ".join(f"rank {each['rank']}: {each['read']}" for each in answers)
            return errors.RankDisagreement(
                f"the ranks read different data {at} (a checksum of the batch, its size, or the end of the data): "
                f"{read}. Under policy DATA each rank reads all of the data and keeps its part of each batch, so every "
                f"rank must read the same batches. {self._hint}"
            )
        if len({each["draw"] for each in answers}) > 1:
            drawn = "; ".join(f"rank {each['rank']}: {each['draw']}" for each in answers)
            return errors.RankDisagreement(
                f"the samplers of the ranks differ {at}; checksums of the batch that each drew: {drawn}. Every "
                "rank's sampler must draw the same: seed it alike on all ranks, and let it not divide by the rank "
                "itself (lhotse: rank=0, world_size=1); the library takes each rank's part."
            )
        return errors.RankDisagreement(
            f"ranks that share a data-parallel coordinate of the mesh read different data {at}; checksums of what "
            f"each read: {_peers_that_differ(answers)}. They must read the same samples: give them the same dataset, "
            "and seed what is random in it alike on them, not by the rank; or name the dims along which each rank is "
            "to read samples of its own with data_dims=."
        )

    def _failure_of_all(self, failure: Failed | None) -> Exchange[BaseException]:
        mine = "" if failure is None else json.dumps(story_of(failure, self._name, self._epoch, self._steps))
        return error_of([plain_message(text) for text in (yield from self._texts_of_all(mine)) if text], failure)

    def _too_many_skipped(self, samples: int, step: LocalStep | None) -> Exchange[BaseException]:
        """The error for more than ``max_errors`` samples left out. Collective: every rank saw the same sums."""
        counted = self._skipped_until(step) if self._counts else 0
        mine = json.dumps({"rank": self._name, "first": self._left_out}) if counted else ""
        answers = [plain_message(text) for text in (yield from self._texts_of_all(mine)) if text]
        return too_many(answers, samples, self._max_errors or 0, self._epoch, self._steps)

    def _texts_of_all(self, mine: str) -> Exchange[list[str]]:
        return [mine] if self._channel is None else (yield from self._channel.gather(mine))

    def _stop_of_some(self) -> Exchange[BaseException]:
        mine = f"rank {self._name} {self.why_stopped(self._delivered)}" if self._stopped else ""
        texts = yield from self._texts_of_all(mine)
        stopped = "; ".join(text for text in texts if text)
        self._departed = "" if self._stopped else stopped
        return RankLost(
            f"{stopped}, while rank {self._name} goes on. Every rank must leave "
            "its loop at the same step: decide on a value that all ranks know, such as the step, or the sum of a flag "
            "over the ranks (strategy.reduce)."
        )

    def why_stopped(self, delivered: int) -> str:
        """What this rank did that left its loop, in words for the others. Local."""
        place = f"after step {delivered - 1}" if delivered else "before step 0"
        return f"stopped reading {place} of epoch {self._epoch}"

    def notify(self, why: str) -> None:
        """Tells the other ranks that this one leaves its loop. Any thread."""
        if self._channel is not None:
            self._channel.notify(why)

    def departed(self) -> str:
        """Which rank left its loop or died, and why; empty if none is known to have. Any thread."""
        return self._departed or ("" if self._channel is None else self._channel.departed())

    def waiting_since(self) -> float | None:
        """When the exchange in progress began (``time.monotonic``), or ``None``. Any thread."""
        return None if self._channel is None else self._channel.waiting_since()

    def late(self) -> list[int]:
        """The ranks that have not yet joined the exchange in progress. Any thread."""
        return [] if self._channel is None else self._channel.late()

    def unreached(self) -> str:
        """Why the awaited rank cannot be reached, in words; empty where nothing tells so. Any thread."""
        return "" if self._channel is None else self._channel.unreached()

    def give_up(self, reason: str) -> None:
        """This rank waits no longer, and tells the others for whom it did. Any thread, idempotent."""
        if self._channel is not None:
            self._channel.abort(reason, GAVE_UP)

    def abort(self, reason: str) -> None:
        """Ends the exchange on all ranks and tells them the reason. Any thread, idempotent."""
        if self._channel is not None:
            self._channel.abort(reason)


def _peers_that_differ(answers: Sequence[Mapping[str, Any]]) -> str:
    """For each worker whose ranks read different data: the digest of each of these ranks."""
    by_worker: dict[int, list[Mapping[str, Any]]] = {}
    for each in answers:
        by_worker.setdefault(each["worker"], []).append(each)
    differ = [peers for peers in by_worker.values() if len({each["read"] for each in peers}) > 1]
    return "; ".join(f"rank {each['rank']}: {each['read']}" for peers in differ for each in peers)


def _first_file_that_differs(answers: Sequence[Mapping[str, Any]]) -> str:
    """How the first file ended on each rank, where that differs; empty where no file that ended in the step does."""
    for number in sorted({number for each in answers for number, _, _ in each["ends"] or ()}):
        told = [_end_of_file(number, each["ends"]) for each in answers]
        if len(set(told)) > 1:
            return "; ".join(f"rank {each['rank']}: {text}" for each, text in zip(answers, told, strict=True))
    return ""


def _end_of_file(number: int, ends: Sequence[tuple[int, str, int]] | None) -> str:
    """How a file ended in the step on one rank, in words; ``None``: the epoch is over there."""
    if ends is None:
        return "no more records"
    return next((f"{name} has {records} records" for other, name, records in ends if other == number), "more records")


def _until_a_loss(steps: Sequence[LocalStep]) -> Sequence[LocalStep]:
    """The steps before the first one, other than ``steps[0]``, that lost samples; law A7."""
    return [*steps[:1], *takewhile(lambda step: not step.skipped.samples, steps[1:])]
