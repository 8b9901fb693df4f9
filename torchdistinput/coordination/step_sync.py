"""Step agreement: the pipeline stage in which all ranks vote, so that all deliver the same steps.

Problem. Ranks have different amounts of data, fail at different times and stop at different steps. A training loop with
collectives in it hangs unless all ranks run the same number of steps.

Decision. A rank votes for a step when it holds the step: fetched, padded, the copy to the device begun. So every rank
holds a step that is agreed. A vote is one report of up to K steps, with flags that tell of a failure, of the end of the
data and of a stop. The reports of all ranks are joined (``step_agreement``). All ranks see the same joined report, so
all decide the same. Where they need more than that, each sends an account: why its epoch ended, or the structure of the
batches, for ranks that must make an empty batch and have seen no sample. One exchange of accounts, one verdict
(``failures.error_of_accounts``), the same on all ranks.
A process without other ranks decides by its own report.

Alternatives refused. Count the steps from lengths, without votes: errors and stops would need a second mechanism. Let
one leader decide: the leader's death would be a special case, and its load grows with the number of ranks. Send pickled
objects: data from another rank must not run code on this one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import takewhile
from time import perf_counter
from typing import Any, Final, NamedTuple, final

from torchdistinput.batches.schema import Structure
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.coordination.batch_digests import words_of
from torchdistinput.coordination.channel import Channel, plain_message
from torchdistinput.coordination.exchanges import Exchange, conclude
from torchdistinput.coordination.failures import EpochEnd, error_of, error_of_accounts, stopped_in, story_of
from torchdistinput.coordination.tree import GAVE_UP, levels_of
from torchdistinput.errors import InputError, RankLost
from torchdistinput.plan.options import agreed_bound
from torchdistinput.plan.step_agreement import (
    ALIKE,
    ANY_NUMBER,
    DIFFERING_STRUCTURES,
    FAILED,
    FAILURES,
    LACKS,
    LOSSES,
    MASK,
    STOPPED,
    STOPS,
    STRUCTURE,
    AgreedWaits,
    Report,
    StepDecision,
    decide,
    join_messages,
    peer_weight_of,
)
from torchdistinput.step_types import (
    MAX_DESCRIBED,
    Failed,
    LocalStep,
    OpaqueBatch,
)

_LOG = logging.getLogger("torchdistinput")
_READ: Final = 0x9E3779B97F4A7C15  # the factor of what was read: its digest must not make up for that of the draw


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
        self._structure: int | None = None  # the digest of the structure, once that is known
        self._complete = complete
        self._name = name
        self._counts = counts
        self._worker = workers[channel.rank] if channel is not None and workers else 0
        self._hint = "" if channel is None else hint
        self._has_peers = len(set(workers)) < len(workers) and channel is not None and not hint
        self._peer_weight = peer_weight_of(channel.rank, workers) if channel is not None and self._has_peers else 0
        self._problem: Failed | None = None  # what keeps this rank from taking over the structure
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

        A step that has samples and lost none is agreed by law A1; this is decided here without forming a report.
        """
        if self._agrees_at_once and step.failure is None and not step.is_past_end:
            sizes = step.sizes
            size = sizes[0] if len(sizes) == 1 else sum(sizes)
            if size or (step.transfers and type(step.transfers[0]) is OpaqueBatch):  # torch delivers empty batches, too
                self._rows += 1
                if not step.transfers:
                    self._complete(step)
                step.global_size, step.rows, step.sums = size, self._rows, step.local_sums
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
        failure = self._problem or (steps[0].failure if steps else None)
        held = [] if failure is not None else [*takewhile(lambda step: step.failure is None, steps)]
        try:
            return (yield from self._vote(held, failure))
        except RankLost:  # the other ranks gave up waiting for the step that failed here, and hear of no failure now
            if failure is None:
                raise
            raise error_of([story_of(failure, self._name, self._epoch, self._steps)], failure) from failure.error

    def _vote(self, steps: Sequence[LocalStep], failure: Failed | None) -> Exchange[Agreement]:
        decision = yield from self._decision(steps, failed=failure is not None)
        count = len(decision.steps)
        for step, size, sums in zip(steps, decision.steps, decision.sums, strict=False):
            self._agree(step, size, sums)
        bound = None
        if decision.fits is not None:
            known = None if decision.fits == ANY_NUMBER else decision.fits
            self._bound = bound = agreed_bound(known, self._least_ahead, self._slots)
        if not decision.asks:
            return self._end(count, None, bound) if decision.end else Agreement(count, bound=bound)
        accounts = yield from self._accounts(decision.asks, [*steps, None][count], failure)
        if decision.asks == STRUCTURE and (told := [each["structure"] for each in accounts if "structure" in each]):
            self._learn(told[0])
            return Agreement(count, bound=bound)
        end = EpochEnd(self._epoch, self._steps, self._name, self._hint)
        error = error_of_accounts(decision, accounts, end, max_errors=self._max_errors or 0, own=failure)
        if decision.asks == STOPS and not self._stopped:
            self._departed = stopped_in(accounts)
        return self._end(count, error, bound)

    def _learn(self, structure: Any) -> None:
        """Takes over the structure that another rank told. If this rank cannot, its next vote tells that it failed."""
        if self._checker.structure is None:
            try:
                self._checker.learn(Structure.from_json(structure))
            except Exception as error:
                self._problem = Failed(error, "")

    def _accounts(
        self, of: str, following: LocalStep | None, failure: Failed | None
    ) -> Exchange[Sequence[dict[str, Any]]]:
        """What all ranks tell of themselves, besides their reports, by rank. Collective: every rank decided the same.

        Args:
          of: of what; see ``StepDecision.asks``.
          following: the first of this rank's steps that is not agreed.
          failure: its failure.
        """
        mine = {"rank": self._name, **self._account(of, following, failure)}
        if self._channel is None:
            return [mine]
        return [plain_message(text) for text in (yield from self._channel.gather(json.dumps(mine)))]

    def _account(self, of: str, following: LocalStep | None, failure: Failed | None) -> dict[str, Any]:
        """What this rank tells; see ``_accounts``."""
        if of in (STRUCTURE, DIFFERING_STRUCTURES):
            return self._structure_account(in_words=of == DIFFERING_STRUCTURES)
        if of == FAILURES:
            return {} if failure is None else story_of(failure, self._name, self._epoch, self._steps)
        if of == LOSSES:
            counted = self._skipped_until(following) if self._counts else 0
            return {"first": self._left_out} if counted else {}
        if of == STOPS:
            return {"stopped": self.why_stopped(self._delivered)} if self._stopped else {}
        return self._data_account(following)

    def _structure_account(self, *, in_words: bool) -> dict[str, Any]:
        structure = self._checker.structure
        if structure is None:
            return {} if in_words or self._checker.digest else {"unknown": str(self._checker.unknown())}
        try:
            return {"structure": str(structure) if in_words else structure.to_json()}
        except InputError as error:
            return {"problem": str(error)}

    def _data_account(self, following: LocalStep | None) -> dict[str, Any]:
        found: dict[str, Any] = {"worker": self._worker, "draw": "ended", "read": "ended", "costs": "ended"}
        if following is not None and not following.is_past_end:
            found["draw"], found["read"], found["ends"] = f"{following.digest:x}", f"{following.read:x}", following.ends
            if self._hint:
                found["read"] = words_of(following.read)  # a digest of pieces uses all bits: it is shown whole
            if following.costs is not None:
                found["costs"] = f"{following.costs.digest:x}"
        return found

    def _end(self, count: int, error: BaseException | None, bound: int | None = None) -> Agreement:
        if self._channel is not None:
            self._channel.release()
        return Agreement(count, is_last=True, error=error, bound=bound)

    def _decision(self, steps: Sequence[LocalStep], *, failed: bool) -> Exchange[StepDecision]:
        channel, report = self._channel, self._report(steps, failed=failed)
        if channel is None:
            return decide(report, self._max_errors)
        began = perf_counter()
        found = Report.from_bytes((yield from channel.merge(report.to_bytes(), join_messages)))
        ended = perf_counter()
        decision = decide(found, self._max_errors)
        self.num_votes += 1
        self.waits = decision.waits
        if decision.waits is not None and self.waited_us is not None:
            self.late_us = self.waited_us - decision.waits.least
        self.waited_us = int(1e6 * (ended - began))
        return decision

    def _report(self, steps: Sequence[LocalStep], *, failed: bool) -> Report:
        """What this rank says of the steps that it holds. Local."""
        channel, counts, skipped = self._channel, self._counts, 0
        steps = steps[: self._slots]
        if self._max_errors is not None:
            skipped = self._skipped_until(steps[0] if steps else None) if counts else 0
            steps = _until_a_loss(steps)
        structure = self._structure
        if structure is None:
            structure = self._checker.digest
            self._structure = None if self._checker.structure is None else structure
        lacks = structure is None and self._problem is None  # one that it cannot take over is asked for once
        flags = FAILED * failed | STOPPED * self._stopped | LACKS * lacks
        num_live = sum(not step.is_past_end for step in steps)
        draws = [step.compared & MASK for step in steps]
        peers: Sequence[int] = ()
        if self._hint:
            draws = [draw + _READ * step.read & MASK for draw, step in zip(draws, steps, strict=True)]
        elif self._has_peers:
            peers = [step.read * self._peer_weight & MASK for step in steps]
        fits: Sequence[int] = ()
        if self._bound is None and channel is not None and self._fits is not None:
            known = [None if step.is_past_end else self._fits(step) for step in steps]
            fits = [ANY_NUMBER if each is None else each for each in known]
        sums: list[int] = []
        if self._sum_names:
            for step in steps:
                sums += (step.local_sums if counts else ()) or self._no_sums
        report = Report(
            flags=flags,
            structure=structure,
            skipped=skipped,
            live=num_live,
            same=len(steps),
            sizes=[sum(step.sizes) if counts else 0 for step in steps],
            draws=draws,
            peers=peers,
            fits=fits,
            sums=sums,
        )
        if channel is None:
            return report
        waited = self.waited_us
        return report._replace(
            last=None if waited is None else channel.rank,
            least=waited or 0,
            most=waited or 0,
            waiter=channel.rank,
            waited=self.waiting_us,
            alike=int(self.waits is not None and self.waiting_us >= ALIKE * self.waits.waited),
        )

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

    def give_up(self, reason: str) -> None:
        """This rank waits no longer, and tells the others for whom it did. Any thread, idempotent."""
        if self._channel is not None:
            self._channel.abort(reason, GAVE_UP)

    def abort(self, reason: str) -> None:
        """Ends the exchange on all ranks and tells them the reason. Any thread, idempotent."""
        if self._channel is not None:
            self._channel.abort(reason)


def _until_a_loss(steps: Sequence[LocalStep]) -> Sequence[LocalStep]:
    """The steps before the first one, other than ``steps[0]``, that lost samples; law A7."""
    return [*steps[:1], *takewhile(lambda step: not step.skipped.samples, steps[1:])]
