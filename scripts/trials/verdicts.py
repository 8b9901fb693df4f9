"""What must hold after an event: who ended how, when, with which words; what was delivered; what is left."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trials.events import Event
from trials.playing import HOST
from trials.trial import AFTER_TIMEOUT_SECONDS, Found, RankEnd, Trial

__all__ = ["Verdict", "names_rank", "names_store", "verdict_on"]

OUTCOMES: Final = ("all named", "by the signal", "no harm", "too late", "FAILED")


@dataclass(frozen=True)
class Verdict:
    """What is said of a trial.

    Args:
      outcome: one of ``OUTCOMES``: the survivors named who was lost; all were ended by the signal; nobody was harmed;
        the event found nobody any more; or something that must hold did not.
      problems: what did not hold.
      ends: how each rank ended, in words.
      seconds: from the event until the last rank had ended that did not end normally.
    """

    outcome: str
    problems: tuple[str, ...]
    ends: tuple[str, ...]
    seconds: float


def names_rank(text: str, rank: int) -> bool:
    """Whether an error names a rank."""
    lists = re.findall(r"\branks?(?:\(s\))?[ :]+(\d+(?:(?:,| and|, and) \d+)*)", text)
    return any(str(rank) in re.findall(r"\d+", each) for each in lists)


def names_store(text: str) -> bool:
    """Whether an error says of the store where it is, or was."""
    return "store" in text and (HOST in text or names_rank(text, 0))


def verdict_on(trial: Trial, found: Found) -> Verdict:
    """Judges a trial."""
    problems = [*_of_ends(trial, found), *_of_deliveries(trial, found)]
    problems += [f"left behind: {each}" for each in found.left]
    harmed = [end for end in found.ranks if end.code != 0 and end.code is not None]
    at = found.event_at
    seconds = max((end.at - at for end in harmed), default=0.0) if at is not None else 0.0
    survivors = [end for rank, end in enumerate(found.ranks) if not _is_hit(trial.event, rank)]
    outcome = "all named"
    if problems:
        outcome = "FAILED"
    elif trial.event is None:
        outcome = "no harm"
    elif not found.hit:
        outcome = "too late"
    elif not survivors:
        outcome = "by the signal"
    elif all(end.code == 0 for end in survivors):
        outcome = "no harm"
    return Verdict(outcome, tuple(problems), tuple(_told(end, at) for end in found.ranks), seconds)


def _told(end: RankEnd, event_at: float | None) -> str:
    """How a rank ended, in words."""
    text = f", {end.raised[0]}: {end.raised[1].partition(chr(10))[0]}" if end.raised else ""
    if end.code is None:
        return f"did not end, {end.num_steps} steps{text}" + (f" ({end.words})" if end.words else "")
    after = "" if event_at is None else f" after {end.at - event_at:.1f} s"
    how = f"by {signal.Signals(-end.code).name}" if end.code < 0 else f"with {end.code}"
    words = f", {end.words}" if end.code != 0 and not end.raised and end.words else ""
    return f"{how}{after}, {end.num_steps} steps{text}{words}"


def _is_hit(event: Event | None, rank: int) -> bool:
    return event is not None and (event.target == "all ranks" or (event.target == "rank" and event.rank == rank))


# ---------------------------------------------------------------------------------------------------- their ends


def _of_ends(trial: Trial, found: Found) -> Iterator[str]:
    for rank, end in enumerate(found.ranks):
        if found.hit and _is_hit(trial.event, rank):
            problem = _of_hit(trial, found, rank, end)
        else:
            problem = _of_survivor(trial, found, rank, end)
        if problem:
            yield f"rank {rank} {problem}"


def _of_hit(trial: Trial, found: Found, rank: int, end: RankEnd) -> str:
    """What is wrong with the end of a rank that the event hit."""
    event = trial.event
    assert event is not None
    if event.action == "freeze for 3 s":
        return _of_survivor(trial, found, rank, end)
    if event.action == "freeze":
        return ""
    was_done = end.end_at is not None and found.event_at is not None and end.end_at <= found.event_at
    own = {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}[event.action]
    if end.code == -own:
        return _late(trial, found, end)
    if end.code == 0 and (was_done or event.target == "all ranks" or end.is_ignored):
        return ""
    if event.target == "all ranks" and not _unnamed(trial, found, rank, end):
        return _late(trial, found, end)
    return f"got {own.name}, and {_shortly(end)}"


def _of_survivor(trial: Trial, found: Found, rank: int, end: RankEnd) -> str:
    """What is wrong with the end of any other rank."""
    if end.code is None:
        return _shortly(end)
    if end.code == 0:
        return "" if end.end_at is not None else "ended with 0 before its program had"
    if end.code < 0 or end.raised is None:
        return f"ended by itself, {_shortly(end)}"
    event = trial.event
    if event is None or not found.hit:
        return f"failed though nothing happened: {end.raised[0]}"
    if event.action == "freeze for 3 s":
        return f"failed after a freeze that was shorter than its timeout: {end.raised[0]}"
    return _unnamed(trial, found, rank, end) or _late(trial, found, end)


def _unnamed(trial: Trial, found: Found, rank: int, end: RankEnd) -> str:
    """What its error leaves out: it names who was lost, or another rank whose own error does.

    That one may end later: it waits for a store that is frozen, say, or takes its time to exit after its last word.
    """
    if end.raised is None or trial.event is None:
        return _shortly(end)
    if _names_lost(trial, rank, end):
        return ""
    others = [(other, its) for other, its in enumerate(found.ranks) if other != rank]
    if any(names_rank(end.raised[1], other) and _names_lost(trial, other, its) for other, its in others):
        return ""
    return f"does not name who was lost: {end.raised[0]}"


def _names_lost(trial: Trial, rank: int, end: RankEnd) -> bool:
    """Whether its error names who was lost."""
    event = trial.event
    if end.raised is None or event is None:
        return False
    text = end.raised[1]
    lost = [event.rank]
    if event.target == "all ranks":
        lost = [other for other in range(trial.program.world) if other != rank]
    names = event.target != "store" and any(names_rank(text, each) for each in lost)
    if event.target == "store" or (not trial.program.own_store and 0 in lost):
        names = names or names_store(text)
    if event.target == "loader worker":
        names = names or "worker" in text
    return names


def _late(trial: Trial, found: Found, end: RankEnd) -> str:
    """How much too late it ended; steps that it held already are not counted."""
    if found.event_at is None:
        return ""
    program = trial.program
    ahead = program.think_seconds * (max(program.most_ahead) + 1)
    took = end.at - found.event_at
    bound = trial.bound_seconds + ahead
    limit = f"{program.timeout_seconds:g} + {AFTER_TIMEOUT_SECONDS:g} + {trial.slack_seconds:g} s"
    return f"ended {took:.1f} s after the event, which is later than {limit}" if took > bound else ""


def _shortly(end: RankEnd) -> str:
    if end.code is None:
        return f"did not end{f' after {end.raised[0]}' if end.raised else ''}: {end.words}"
    how = signal.Signals(-end.code).name if end.code < 0 else f"exit code {end.code}"
    return f"{how} {end.raised[0] if end.raised else end.words}"


# ---------------------------------------------------------------------------------------------- what they delivered


def _of_deliveries(trial: Trial, found: Found) -> Iterator[str]:
    """Every rank delivered a prefix of the right sequence, whole where it ended normally; none is far ahead."""
    program = trial.program
    if len(found.expected) != program.rounds * len(program.openings):
        yield "the right sequence could not be computed"
        return
    for rank, end in enumerate(found.ranks):
        for number, steps in enumerate(found.expected):
            right = steps[rank]
            given = end.steps.get(number, [])
            if given != right[: len(given)]:
                at = next(at for at in range(len(given)) if given[at : at + 1] != right[at : at + 1])
                yield f"rank {rank} got {given[at]} at step {at} of iterator {number}, not {right[at : at + 1]}"
            elif end.code == 0 and len(given) < len(right):
                yield f"rank {rank} ended normally after {len(given)} of {len(right)} steps of iterator {number}"
    counts = [end.num_steps for end in found.ranks]
    if max(counts) - min(counts) > program.steps_in_flight:
        yield f"the ranks delivered {counts} steps; {program.steps_in_flight} may be in flight"
