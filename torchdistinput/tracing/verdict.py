"""The verdict: one sentence that says whether the input is too slow, on which rank, at what, and what would help.

It is a function of a few numbers of each rank, wherever they come from: the running measurements, or the trace files.
Advice is given only where the numbers show that it helps; else there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final, final

from torchdistinput.plan.step_agreement import ALIKE

TRAINING: Final = "training"
"""The stage of a rank that is in the user's training code, outside of ``next``."""
VOTE: Final = "vote"
"""The stage of a rank whose own step is ready: it waits for the other ranks, or for the network."""
NAMED: Final = ("getitem", "fetch")
"""The stages whose time belongs to files or samples; that of ``collate`` belongs to whole batches."""
_READING: Final = ("getitem", "collate", "fetch")
STAGES: Final = ("draw", "sampler", *_READING, "copy", TRAINING, VOTE)
"""The keys of ``late_in`` and ``waited_in``: ``fetch`` and ``draw`` hold what their parts (``getitem`` and ``collate``,
``sampler``) do not explain."""

_BOUND: Final = 0.05
"""The smallest part of the time that the loop waits for its input, from which it is called input-bound."""
_MOST: Final = 0.5
_KNOWN: Final = 0.1
"""A stage is named if those of this part of a time are known: while a run goes on, only long waits are looked into."""
_BUSY, _IDLE = 0.8, 0.5

_WORDS: Final = {
    "draw": "draw",
    "sampler": "the sampler",
    "getitem": "__getitem__",
    "collate": "collate_fn",
    "fetch": "fetch",
    "copy": "the copy to the device",
    TRAINING: "its training code, not in its input",
    VOTE: "waits for other ranks, or for messages between them",
}


@final
@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank did in a span of time, which is the same for all ranks. In seconds.

    Args:
      rank: the rank, as users know it.
      seconds: the length of the span.
      waiting: how long its training loop waited in ``next``.
      made_wait: how long it made the others wait: over the votes that it cast last, the sum of the longest wait of
        another rank; no wait is longer than this rank was late.
      late_in: what it did in ``made_wait``, by stage (``STAGES``).
      waited_in: what its own loop waited for in ``waiting``, by stage.
      files: of the time in ``late_in`` that was spent in reading, by the name of the file, or ``"index 17"``. The
        empty name stands for further files.
      waited_files: the same of the time in ``waited_in``.
      num_workers: its loader workers; ``None`` where that is not known.
      busy: the part of the time, from 0 to 1, that a loader worker was reading, on average; ``None``: not known.
    """

    rank: int
    seconds: float
    waiting: float
    made_wait: float = 0.0
    late_in: Mapping[str, float] = field(default_factory=dict)
    waited_in: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, float] = field(default_factory=dict)
    waited_files: Mapping[str, float] = field(default_factory=dict)
    num_workers: int | None = None
    busy: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the numbers say. ``str`` of it is the sentence.

    Args:
      text: the sentence.
      input_bound: whether the loop of some rank waits for its input for a noticeable part of the time.
      rank: the rank that made the others wait, or that waited longest where none did; ``None`` where all wait alike.
      stage: at what, one of ``STAGES``; ``None`` where the numbers do not say.
      file: the file or index that took most of the time in reading; ``None`` where none did.
    """

    text: str
    input_bound: bool
    rank: int | None = None
    stage: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return self.text


def verdict(ranks: Sequence[RankTimes], *, alike: bool | None = None, of_all: bool = True) -> Verdict:
    """The verdict on the numbers of ranks, in any order. Local.

    Where all ranks wait alike, none is to blame: most of them wait for ``ALIKE`` of the longest wait, or longer.

    Args:
      ranks: all; or, with ``alike``, the one that waited longest, the one that made the others wait, and any others.
      alike: whether all ranks wait alike; by default that is told by their numbers.
      of_all: whether something is known of all ranks.

    >>> slow = RankTimes(rank=2, seconds=300, waiting=43, made_wait=41, late_in={"getitem": 38, "draw": 3},
    ...                  files={"web-0193.tar": 30, "web-0007.tar": 8}, num_workers=2, busy=0.95)
    >>> print(verdict([RankTimes(rank=0, seconds=300, waiting=42), slow]))
    rank 2 made the others wait 41 s of 300 s (14 %): 93 % of it in __getitem__, most of that in web-0193.tar; \
more loader workers would help, a larger prefetch would not
    """
    if not any(each.seconds > 0 for each in ranks):
        return Verdict(text="no step was measured yet", input_bound=False)
    longest = max(ranks, key=lambda each: each.waiting)
    latest = max(ranks, key=lambda each: each.made_wait)
    waits = _share(longest.waiting, longest.seconds) >= _BOUND
    blames_latest = latest.made_wait >= _MOST * longest.waiting > 0
    usual = [each.waiting for each in ranks if each.waiting >= ALIKE * longest.waiting]
    several = len(ranks) > 1 or alike is not None
    if alike is None:
        alike = of_all and several and 2 * len(usual) > len(ranks)
    if blames_latest:
        who, seconds, stages, files = latest, latest.made_wait, latest.late_in, latest.files
        text = f"rank {who.rank} made the others wait {_of(seconds, who.seconds)}"
    elif alike:
        who, seconds = longest, sum(each.waiting for each in ranks)
        stages, files = _sums(each.waited_in for each in ranks), _sums(each.waited_files for each in ranks)
        text = f"all ranks wait alike for their input, {_of(median_low(usual), who.seconds)}"
    else:
        who, seconds, stages, files = longest, longest.waiting, longest.waited_in, longest.waited_files
        loop = f"the training loop of rank {who.rank}" if several else "the training loop"
        text = f"{loop} waited {_of(seconds, who.seconds)} for its input"
    stage = max(stages, key=lambda name: stages[name]) if sum(stages.values()) >= _KNOWN * seconds > 0 else None
    file = _main_file(files, stages[stage]) if stage in NAMED else None
    if not waits and of_all:  # else another rank may wait for its input
        text = f"not input-bound: {text}"
    if stage is not None:
        text += f": {_percent(stages[stage], sum(stages.values()))} of it in {_WORDS[stage]}"
        text += f", most of that in {file}" if file else ""
        advice = _advice(who, stage) if waits else ""
        text += f"; {advice}" if advice else ""
        in_training = waits and of_all and several and not (blames_latest or alike) and stage != VOTE
        if in_training:  # where nobody sees the others wait
            text += "; if the ranks exchange gradients, the others wait for this rank there"
    blamed = None if alike and not blames_latest else who.rank
    return Verdict(text=text, input_bound=waits and stage != TRAINING, rank=blamed, stage=stage, file=file)


def _sums(of_ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in of_ranks:
        for name, seconds in each.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def _main_file(files: Mapping[str, float], seconds: float) -> str | None:
    """The file or sample that took more than half of the seconds of a stage, and of those that have a name."""
    name = max(files, key=lambda name: files[name], default="")
    return name if name and files[name] > _MOST * max(seconds, sum(files.values())) else None


def _advice(who: RankTimes, stage: str) -> str:
    if stage == "sampler":
        return "a sampler runs on the training thread, where neither loader workers nor a larger prefetch would help"
    if stage not in _READING or who.num_workers is None:
        return ""
    if who.num_workers == 0:
        return "loader workers would help: now the training thread reads"
    if who.busy is None or _IDLE < who.busy < _BUSY:
        return ""
    if who.busy >= _BUSY:
        return "more loader workers would help, a larger prefetch would not"
    return "a larger prefetch would help, more loader workers would not"


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _percent(part: float, whole: float) -> str:
    return f"{100 * _share(part, whole):.0f} %"


def _of(seconds: float, whole: float) -> str:
    return f"{_seconds(seconds)} of {_seconds(whole)} ({_percent(seconds, whole)})"


def _seconds(seconds: float) -> str:
    """Seconds with two digits or more."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
