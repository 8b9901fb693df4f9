"""What a rank did while others waited for it, and what its own training loop waited for.

Each such time belongs to a step, and is explained by the spans of the rank in it. The stages of that step come first,
the one that reads before the others; then the rank's training code, for a loop that does not ask for the next step
cannot get it; then stages of other steps, then a vote. In what is left, a loop that waits does so for what is between
the stages of reading (loader workers that start, a batch on its way from one); and one that does not wait is in the
user's code, before the first step or after the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, final

from torchdistinput.report.verdict import NAMED, TRAINING, VOTE

_OF_STEP: Final = {"fetch": 0, "draw": 1, "copy": 2}
_OF_ANY: Final = {"step": 3, "fetch": 4, "draw": 5, "copy": 6, "vote": 7, "wait": 8}
_PARTS: Final = ("sampler", "getitem", "collate")


@final
@dataclass(slots=True)
class UnexplainedTime:
    """A time on the common clock that is to be explained, of one rank and step."""

    start: int
    end: int
    step: int
    spans: list[tuple[int, int, int, Mapping[str, Any]]] = field(default_factory=list)  # priority, start, end, span


@final
class UnexplainedTimes:
    """Times of one rank that do not overlap, and the spans in them.

    Args:
      times: in any order.
    """

    def __init__(self, times: Sequence[UnexplainedTime]) -> None:
        self._times = sorted(times, key=lambda time: time.start)
        self._ends = [time.end for time in self._times]

    def add(self, span: Mapping[str, Any], step: int, start: int, end: int) -> None:
        """Takes a span of a stage, of a step, on the common clock."""
        of_any = _OF_ANY.get(span["k"])
        if of_any is None:
            return
        of_step = _OF_STEP.get(span["k"], of_any)
        for place in range(bisect_right(self._ends, start), len(self._times)):
            time = self._times[place]
            if time.start >= end:
                break
            order = of_step if time.step == step else of_any
            time.spans.append((order, max(start, time.start), min(end, time.end), span))

    def causes(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by stage (``verdict.STAGES``), and those of reading by file or index."""
        stages: dict[str, float] = {}
        files: dict[str, float] = {}
        for time in self._times:
            for span, length in _explained(time):
                seconds = length / 1e9
                parts = _stages(span)
                for stage, part in parts.items():
                    stages[stage] = stages.get(stage, 0.0) + part * seconds
                name = None if span is None or span["k"] != "fetch" else name_of(span)
                reading = sum(parts.get(stage, 0.0) for stage in NAMED)
                if name is not None and reading > 0.5:  # else what took the time, such as a collate_fn, is no file's
                    files[name] = files.get(name, 0.0) + reading * seconds
        return stages, files


def name_of(span: Mapping[str, Any]) -> str | None:
    """The file that a fetch read, or the index that took most of it; ``None`` where the trace has neither."""
    if "file" in span:
        return str(span["file"])
    return f"index {span['index']}" if "index" in span else None


def _explained(time: UnexplainedTime) -> Iterator[tuple[Mapping[str, Any] | None, int]]:
    """The span that explains each piece of a time, with the length of the piece; ``None``: none does."""
    cuts = sorted({time.start, time.end, *(each for _, start, end, _ in time.spans for each in (start, end))})
    for start, end in pairwise(cuts):
        inside = [each for each in time.spans if each[1] <= start and end <= each[2]]
        yield (min(inside, key=lambda each: each[0])[3] if inside else None), end - start


def _stages(span: Mapping[str, Any] | None) -> Mapping[str, float]:
    """How a span is divided among stages; the parts of a fetch or draw by their own times."""
    if span is None or span["k"] == "step":
        return {TRAINING: 1.0}
    if span["k"] in {"vote", "wait"}:
        return {VOTE if span["k"] == "vote" else "fetch": 1.0}
    parts = {name: time for name, time in span.get("parts", {}).items() if name in _PARTS}
    whole = max(span["d"], sum(parts.values()), 1)
    shares = {name: time / whole for name, time in parts.items()}
    return {**shares, span["k"]: 1.0 - sum(shares.values())}
