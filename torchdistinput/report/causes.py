"""What a rank did while others waited for it, and what its own training loop waited for.

Each such time is a window, which belongs to a step. In it the stages of that step come first, the one that reads before
the others; then the rank's training code, for a loop that does not ask for the next step cannot get it; then stages of
other steps; what is left are votes, in which a rank that holds its step waits for other ranks or the network.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, final

from torchdistinput.report.verdict import TRAINING, VOTE

_ORDER: Final = {"fetch": 0, "draw": 1, "copy": 2, "step": 3}
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
    """UnexplainedTimes of one rank that do not overlap, and the spans in them.

    Args:
      windows: in any order.
    """

    def __init__(self, windows: Sequence[UnexplainedTime]) -> None:
        self._windows = sorted(windows, key=lambda window: window.start)
        self._ends = [window.end for window in self._windows]

    def add(self, span: Mapping[str, Any], step: int, start: int, end: int) -> None:
        """Takes a span of a stage, of a step, on the common clock."""
        order = _ORDER.get(span["k"])
        if order is None:
            return
        for place in range(bisect_right(self._ends, start), len(self._windows)):
            window = self._windows[place]
            if window.start >= end:
                break
            # The training code is that of an earlier step than the one that it keeps from coming.
            priority = order if window.step == step or order == _ORDER["step"] else order + len(_ORDER)
            window.spans.append((priority, max(start, window.start), min(end, window.end), span))

    def causes(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds by stage (``verdict.STAGES``), and those of reading by file or index."""
        stages: dict[str, float] = {}
        files: dict[str, float] = {}
        for window in self._windows:
            for span, length in _explained(window):
                seconds = length / 1e9
                for stage, part in _stages(span).items():
                    stages[stage] = stages.get(stage, 0.0) + part * seconds
                name = None if span is None or span["k"] != "fetch" else name_of(span)
                if name is not None:
                    files[name] = files.get(name, 0.0) + seconds
        return stages, files


def name_of(span: Mapping[str, Any]) -> str | None:
    """The file that a fetch read, or its first index; ``None`` where the trace has neither."""
    if "file" in span:
        return str(span["file"])
    return f"index {span['index']}" if "index" in span else None


def _explained(window: UnexplainedTime) -> Iterator[tuple[Mapping[str, Any] | None, int]]:
    """The span that explains each piece of a window, with the length of the piece; ``None``: a vote."""
    cuts = sorted({window.start, window.end, *(time for _, start, end, _ in window.spans for time in (start, end))})
    for start, end in pairwise(cuts):
        inside = [each for each in window.spans if each[1] <= start and end <= each[2]]
        yield (min(inside, key=lambda each: each[0])[3] if inside else None), end - start


def _stages(span: Mapping[str, Any] | None) -> Mapping[str, float]:
    """How a span is divided among stages; the parts of a fetch or draw by their own times."""
    if span is None:
        return {VOTE: 1.0}
    if span["k"] == "step":
        return {TRAINING: 1.0}
    parts = {name: time for name, time in span.get("parts", {}).items() if name in _PARTS}
    whole = max(span["d"], sum(parts.values()), 1)
    shares = {name: time / whole for name, time in parts.items()}
    return {**shares, span["k"]: 1.0 - sum(shares.values())}
