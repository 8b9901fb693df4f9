"""How one rank's failure is described to the other ranks, and the error that all ranks raise for it.

A failure travels as plain values of bounded size, called its *story*. The exception itself does not travel: its class
may not be picklable, its ``__str__`` may fail, and its text may be as large as the data.
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, final

from torchdistinput import errors
from torchdistinput.batches.schema import PER_SAMPLE
from torchdistinput.errors import (
    BatchingError,
    CoordinationTimeout,
    InputError,
    RankDisagreement,
    RankLost,
    SourceError,
)
from torchdistinput.plan.step_agreement import DIFFERING_STRUCTURES, FAILURES, LOSSES, STOPS, STRUCTURE, StepDecision
from torchdistinput.step_types import Failed

_TEXT: Final = 4 << 10
_TRACEBACK: Final = 16 << 10
_NAME: Final = 200
_INDICES: Final = 1024

OF_RANKS: Final = (RankDisagreement, CoordinationTimeout, RankLost)
"""Errors that tell of other ranks: the sentence says all, and where in here it was raised says nothing to a user."""


def _clipped(text: str, limit: int) -> str:
    """The text; if it has more than ``limit`` characters, a note about their number replaces the middle."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def in_one_line(error: BaseException) -> str:
    """The class name and the text of an exception, in one line of at most 500 characters."""
    text = " ".join(words_of(error)[:500].split())
    text = text if text.isprintable() else repr(text)  # names of files may hold anything
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


def words_of(error: BaseException) -> str:
    """``str`` of an exception, or a note that its ``__str__`` failed."""
    try:
        return str(error)
    except Exception as failed:  # in its own __str__; the kind must do
        return f"(no text, as its __str__ raised {type(failed).__name__})"


def kind_of(error: BaseException) -> str:
    """The class name of the original exception: for a ``SourceError``, the class of its cause."""
    while isinstance(error, SourceError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return _clipped(type(error).__name__, _NAME)


def text_of(error: BaseException) -> str:
    """The exception as Python prints it, clipped."""
    lines = traceback.TracebackException.from_exception(error, limit=0).format_exception_only()
    return _clipped("".join(lines).strip().removeprefix(f"{errors.__name__}."), _TEXT)


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception as Python prints it, clipped."""
    return _clipped("".join(traceback.format_exception(error)), _TRACEBACK)


def traceback_as_text(error: BaseException) -> None:
    """Takes the tracebacks, which refer to the frames of all callers, off an exception and its causes.

    Python prints their text before that of the first cause.
    """
    text, link = traceback_of(error), error
    while True:
        link.__traceback__ = link.__context__ = None
        if link.__cause__ is None or link.__cause__ is link:
            break
        link = link.__cause__
    link.__context__ = RuntimeError(f"the traceback, as text:\n{text}")
    link.__suppress_context__ = False


def plain_indices(indices: Iterable[Any]) -> tuple[int | str, ...]:
    """The indices of samples as plain values, of bounded number and size."""
    return tuple(_plain(index) for _, index in zip(range(_INDICES), indices, strict=False))


def _plain(index: Any) -> int | str:
    if isinstance(index, str):
        return _clipped(index, _NAME)
    try:
        return operator.index(index)
    except Exception:  # no number, or one that has more than one element
        return _words(index)


def _words(value: Any) -> str:
    try:
        return _clipped(repr(value), _NAME)
    except Exception:  # in its own __repr__; the kind must do
        return f"<{type(value).__name__}>"


def story_of(failed: Failed, rank: int | None, epoch: int, step: int) -> dict[str, Any]:
    """A failure as plain values, for JSON.

    Args:
      failed: the failure.
      rank: the rank that failed, as users know it; ``None`` where there is only one.
      epoch: the epoch in which it failed.
      step: the number of the step that failed.
    """
    error, origin = failed.error, failed.origin
    source = error if isinstance(error, SourceError) else SourceError("")
    kind = type(error).__name__
    ours = getattr(errors, kind, None) is type(error) and issubclass(type(error), InputError)
    return {
        "rank": rank,
        "epoch": epoch,
        "step": step,
        "where": _clipped(failed.where, _TEXT),
        "kind": origin.kind or kind_of(error),
        "class": kind if ours else "SourceError",
        "text": origin.text or text_of(error),
        "traceback": origin.traceback or traceback_of(error),
        "indices": origin.indices if source.indices is None else plain_indices(source.indices),
        "file": origin.file if source.file is None else str(source.file),
        "offset": source.offset if isinstance(source.offset, int) else origin.offset,
        "worker": origin.worker,
    }


def error_of(stories: Sequence[dict[str, Any]], own: Failed | None) -> InputError:
    """The error that every rank raises.

    Args:
      stories: the failures of all ranks that failed; at least one.
      own: this rank's failure, if this rank failed. Its exception becomes the cause of the error. On a rank without a
        failure of its own, the text holds the traceback of the first rank that failed.
    """
    message = _tell_all(stories, with_traceback=own is None)
    classes = {story["class"] for story in stories}
    cls = getattr(errors, classes.pop()) if len(classes) == 1 else SourceError
    first = stories[0]
    error: InputError
    if issubclass(cls, SourceError):
        indices = first["indices"]
        names = ("rank", "epoch", "step", "file", "offset", "worker", "kind", "traceback")
        known = {name: first[name] for name in names}
        error = SourceError(message, indices=None if indices is None else tuple(indices), **known)
    else:
        error = cls(message)
    if own is not None:
        error.__cause__ = own.error
    return error


def _tell_all(stories: Sequence[dict[str, Any]], *, with_traceback: bool) -> str:
    """The failures of all ranks in words; equal failures of several ranks appear once."""
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for story in stories:
        alike.setdefault((story["step"], story["epoch"], story["where"], story["text"]), []).append(story)
    return "\n".join(_tell(group, with_traceback=with_traceback) for group in alike.values())


def _tell(alike: Sequence[dict[str, Any]], *, with_traceback: bool) -> str:
    first = alike[0]
    ranks = ", ".join(str(story["rank"]) for story in alike)
    who = "the input" if first["rank"] is None else f"the input of rank{'s' * (len(alike) > 1)} {ranks}"
    where = f" ({first['where']})" if first["where"] else ""
    text = f"{who} failed at step {first['step']} of epoch {first['epoch']}{where}: {first['text']}"
    if with_traceback:
        text += f"\n\nThe traceback of rank {first['rank']}:\n{first['traceback']}"
    return text


@final
class EpochEnd(NamedTuple):
    """Where an epoch ended, for messages.

    Args:
      epoch: its number.
      step: the first step that is not agreed.
      rank: this rank, as users know it.
      hint: the advice of the error for ranks that read different data, if all must read the same; else empty.
    """

    epoch: int
    step: int
    rank: int | None
    hint: str = ""


def error_of_accounts(
    decision: StepDecision, accounts: Sequence[dict[str, Any]], end: EpochEnd, *, max_errors: int, own: Failed | None
) -> InputError:
    """The error that every rank raises, by the accounts of all ranks.

    Args:
      decision: what all ranks decided, and of what they give account.
      accounts: by rank, what it told: its ``rank``, and what ``StepSync`` says for ``decision.asks``.
      end: where the epoch ended.
      max_errors: how many samples may be left out of it.
      own: this rank's failure, if it failed.
    """
    if decision.asks == FAILURES:
        return error_of([each for each in accounts if "class" in each], own)
    if decision.asks == DIFFERING_STRUCTURES:
        structures = _by_rank(accounts, "structure")
        return BatchingError(
            f"the elements of the ranks differ in structure after step {end.step}: {structures}. Nesting, names and "
            f"dtypes must be the same on every rank. {PER_SAMPLE}"
        )
    if decision.asks == STRUCTURE:
        problems = [f"rank {each['rank']}: {each['problem']}" for each in accounts if "problem" in each]
        return BatchingError("\n".join(problems or {each["unknown"]: 0 for each in accounts if "unknown" in each}))
    if decision.asks == LOSSES:
        return _too_many([each for each in accounts if "first" in each], decision.skipped, max_errors, end)
    if decision.asks == STOPS:
        return RankLost(
            f"{stopped_in(accounts)}, while rank {end.rank} goes on. Every rank must leave "
            "its loop at the same step: decide on a value that all ranks know, such as the step, or the sum of a flag "
            "over the ranks (strategy.reduce)."
        )
    return RankDisagreement(_difference(accounts, end))


def stopped_in(accounts: Sequence[dict[str, Any]]) -> str:
    """Which ranks stopped reading, in words."""
    return "; ".join(f"rank {each['rank']} {each['stopped']}" for each in accounts if "stopped" in each)


def _by_rank(accounts: Sequence[dict[str, Any]], fact: str) -> str:
    return "; ".join(f"rank {each['rank']}: {each[fact]}" for each in accounts if fact in each)


def _difference(accounts: Sequence[dict[str, Any]], end: EpochEnd) -> str:
    """Which of the facts about a step the ranks differ in: costs, files, what they read or drew, or what peers read."""
    at, hint = f"at step {end.step} of epoch {end.epoch}", end.hint
    if len({(each["draw"], hint and each["read"]) for each in accounts}) == 1 < len({x["costs"] for x in accounts}):
        return (
            f"the ranks differ in the costs of the samples {at}; checksums of the costs: "
            f"{_by_rank(accounts, 'costs')}. Every rank must find the same cost for a sample (balance=), as the costs "
            "say which rank gets the sample."
        )
    if hint and (files := _first_file_that_differs(accounts)):
        return f"the ranks read files of different content {at}: {files}. {hint}"
    if hint:
        return (
            f"the ranks read different data {at} (a checksum of the batch, its size, or the end of the data): "
            f"{_by_rank(accounts, 'read')}. Under policy DATA each rank reads all of the data and keeps its part of "
            f"each batch, so every rank must read the same batches. {hint}"
        )
    if len({each["draw"] for each in accounts}) > 1:
        return (
            f"the samplers of the ranks differ {at}; checksums of the batch that each drew: "
            f"{_by_rank(accounts, 'draw')}. Every rank's sampler must draw the same: seed it alike on all ranks, and "
            "let it not divide by the rank itself (lhotse: rank=0, world_size=1); the library takes each rank's part."
        )
    by_worker: dict[int, list[dict[str, Any]]] = {}
    for each in accounts:
        by_worker.setdefault(each["worker"], []).append(each)
    differ = [peers for peers in by_worker.values() if len({each["read"] for each in peers}) > 1]
    return (
        f"ranks that share a data-parallel coordinate of the mesh read different data {at}; checksums of what each "
        f"read: {'; '.join(_by_rank(peers, 'read') for peers in differ)}. They must read the same samples: give them "
        "the same dataset, and seed what is random in it alike on them, not by the rank (augmentation in this process: "
        "seed_samples=True); or name the dims along which each rank is to read samples of its own with data_dims=."
    )


def _first_file_that_differs(accounts: Sequence[dict[str, Any]]) -> str:
    """How the first file ended on each rank, where that differs; empty where no file that ended in the step does."""
    for number in sorted({number for each in accounts for number, _, _ in each.get("ends", ())}):
        told = [_end_of_file(number, each.get("ends")) for each in accounts]
        if len(set(told)) > 1:
            return "; ".join(f"rank {each['rank']}: {text}" for each, text in zip(accounts, told, strict=True))
    return ""


def _end_of_file(number: int, ends: Sequence[tuple[int, str, int]] | None) -> str:
    """How a file ended in the step on one rank, in words; ``None``: the epoch is over there."""
    if ends is None:
        return "no more records"
    return next((f"{name} has {records} records" for other, name, records in ends if other == number), "more records")


def _too_many(reports: Sequence[dict[str, Any]], samples: int, max_errors: int, end: EpochEnd) -> SourceError:
    """The error for more samples left out than ``max_errors`` allows: the lines of those ranks that left some out."""
    ranks = [each["rank"] for each in reports]
    lines = [(each["rank"], text) for each in reports for text in each["first"]]
    first = [text if rank is None else f"rank {rank}: {text}" for rank, text in lines]
    return SourceError(
        f"{samples} samples could not be read up to step {end.step} of epoch {end.epoch}, and "
        f"max_errors={max_errors} of an epoch may be left out. Mend the data, or allow more. The first of them:\n"
        + "\n".join(first),
        rank=ranks[0] if len(ranks) == 1 else None,
        epoch=end.epoch,
        step=end.step,
    )
