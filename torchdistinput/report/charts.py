"""The pictures of the page, as inline SVG: told apart by shape, hatching and words, not by colour.

Each function returns the title, a sentence on how to read it, and the SVG: empty where there is nothing to show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median
from typing import Final

from torchdistinput.report.summary import BUCKETS, RankNumbers, ShownSpan, Summary
from torchdistinput.report.tables import duration, percent, shown

_LEFT: Final = 76
_WIDTH: Final = 760
_PLOT: Final = _WIDTH - _LEFT - 12

_HATCH: Final = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="6" stroke="currentColor" stroke-width="2.5"/></pattern></defs>'
)
_LOOKS: Final = {
    "step": 'fill="none" stroke="currentColor"',
    "wait": 'fill="url(#hatch)" stroke="currentColor"',
    "fetch": 'fill="currentColor" fill-opacity="0.22" stroke="currentColor" stroke-width="0.7"',
    "copy": 'fill="currentColor"',
}
_LEGEND: Final = {"step": "training code", "wait": "the loop waits", "fetch": "reading", "copy": "copy to the device"}
_TALL: Final = {"step": (0, 15), "wait": (0, 15), "fetch": (17, 15), "copy": (17, 15)}
_ROW: Final = 42


def waits(summary: Summary) -> tuple[str, str, str]:
    """The share of the time in which loops waited, over the run."""
    title = "Waits over time"
    if not any(rank.times.waiting for rank in summary.ranks):
        return title, "", ""
    height, top, width = 150, 10, _PLOT / BUCKETS
    columns, line = [], []
    for bucket in range(BUCKETS):
        shares = [min(1.0, rank.waiting[bucket]) for rank in summary.ranks]
        longest, middle = height * max(shares), height * median(shares)
        x = _LEFT + bucket * width
        columns.append(_rect(x + 0.5, top + height - longest, width - 1, longest, _LOOKS["fetch"]))
        line.append(f"{x:.1f},{top + height - middle:.1f} {x + width:.1f},{top + height - middle:.1f}")
    axis = [_level(top + height * (1 - part), f"{part:.0%}") for part in (0, 0.5, 1)]
    several = len(summary.ranks) > 1
    curve = (
        f'<polyline points="{" ".join(line)}" fill="none" stroke="currentColor" stroke-width="2"/>' if several else ""
    )
    note = "The share of the time in which the training loop waited for its input"
    note += ": columns for the rank that waited longest, the line for the median of all ranks." if several else "."
    worst = max(summary.ranks, key=lambda rank: rank.times.waiting)
    told = f"Rank {worst.rank} waited longest, {percent(worst.times.waiting, summary.seconds)} of the time"
    body = "".join([*axis, *columns, curve, _time_axis(0, summary.seconds, top + height)])
    return title, note, _svg(title, told, top + height + 26, body)


def lateness(summary: Summary) -> tuple[str, str, str]:
    """When which rank made the others wait."""
    title = "Who made the others wait, and when"
    least = 0.01 * max((rank.times.made_wait for rank in summary.ranks), default=0.0)
    rows = [rank for rank in shown(summary) if rank.times.made_wait > least]
    if not rows:
        return title, "", ""
    width = _PLOT / BUCKETS
    body = []
    for place, rank in enumerate(rows):
        y = 6 + 22 * place
        body.append(_text(_LEFT - 6, y + 14, f"rank {rank.rank}", "end"))
        body.append(_rect(_LEFT, y, _PLOT, 18, 'fill="none" stroke="currentColor" stroke-opacity="0.3"'))
        for bucket, share in enumerate(rank.late):
            if share > 0.002:
                tall = max(1.0, 18 * min(1.0, share))
                body.append(_rect(_LEFT + bucket * width, y + 18 - tall, width, tall, 'fill="currentColor"'))
    end = 6 + 22 * len(rows)
    note = "A full box: the others waited for this rank all of the time."
    told = ", ".join(f"rank {rank.rank} for {duration(rank.times.made_wait)}" for rank in rows)
    return title, note, _svg(title, told, end + 26, "".join([*body, _time_axis(0, summary.seconds, end)]))


def timeline(summary: Summary) -> tuple[str, str, str]:
    """The last steps of all ranks that are shown, side by side."""
    title = "The last steps"
    rows = [rank for rank in shown(summary) if rank.spans]
    if not rows:
        return title, "", ""
    steps = [span for rank in rows for span in rank.spans if span.stage != "draw"]
    start, end = min(span.start for span in steps), max(span.end for span in steps)
    scale = _PLOT / max(1, end - start)
    body = [_HATCH, *_legend()]
    top = 46
    for time, number in _last_voters(rows, 8 / scale):
        x, under = _LEFT + (time - start) * scale, top + _ROW * len(rows)
        body.append(f'<path d="M{x:.1f} {top - 6}V{under}" stroke="currentColor" stroke-dasharray="3 3"/>')
        body.append(_text(x, top - 9, f"rank {number}", "middle"))
    for place, rank in enumerate(rows):
        y = top + _ROW * place
        body.append(_text(_LEFT - 6, y + 20, f"rank {rank.rank}", "end"))
        body += [_bar(span, y, start, scale) for span in rank.spans if span.stage in _LOOKS]
    under = top + _ROW * len(rows)
    several = len(rows) > 1
    note = "Above the training thread, below what reads." + (
        " A dashed line: the rank above it was the last to hold a step, for which others waited." if several else ""
    )
    if len(rows) < len(summary.ranks):
        note += f" {len(rows)} of {len(summary.ranks):,} ranks: those that made others wait, or waited, the longest."
    told = f"Stages of {len(rows)} ranks over {duration((end - start) / 1e9)}"
    return title, note, _svg(title, told, under + 26, "".join([*body, _time_axis(start / 1e9, end / 1e9, under)]))


def _last_voters(rows: Sequence[RankNumbers], shortest: float) -> Iterator[tuple[int, int]]:
    """When, and by which of the ranks, the last vote for a step was cast, where another one waited for it longer."""
    last: dict[tuple[int, int], tuple[int, int]] = {}
    waits: dict[tuple[int, int], int] = {}
    for rank in rows:
        for span in rank.spans:
            key = (span.epoch, span.step)
            if span.stage == "vote":
                last[key] = max(last.get(key, (0, 0)), (span.start, rank.rank))
            elif span.stage == "wait":
                waits[key] = min(waits.get(key, span.start), span.start)
    yield from (vote for key, vote in last.items() if len(rows) > 1 and vote[0] - waits.get(key, vote[0]) > shortest)


def _bar(span: ShownSpan, y: float, start: int, scale: float) -> str:
    offset, tall = _TALL[span.stage]
    x, width = _LEFT + (span.start - start) * scale, max(0.7, (span.end - span.start) * scale)
    label = span.name.rpartition("/")[2] if span.name else str(span.step)
    told = f"{_LEGEND[span.stage]}, step {span.step}, {duration((span.end - span.start) / 1e9)}"
    told += f", {span.name}" if span.name else ""
    bar = f"<g><title>{escape(told)}</title>{_rect(x, y + offset, width, tall, _LOOKS[span.stage])}</g>"
    if span.stage in {"step", "fetch"} and width > 9 * len(label):
        bar += _text(x + width / 2, y + offset + 12, label, "middle")
    return bar


def _legend() -> Iterator[str]:
    x = float(_LEFT)
    for stage, words in _LEGEND.items():
        yield _rect(x, 4, 26, 14, _LOOKS[stage])
        yield _text(x + 32, 16, words, "start")
        x += 60 + 7 * len(words)


def _time_axis(start: float, end: float, y: float) -> str:
    """Four times, in seconds since the start of the run."""
    digits = 1 if end - start > 4 else 3
    marks = [
        _text(_LEFT + _PLOT * part, y + 18, f"{start + part * (end - start):,.{digits}f} s", anchor)
        for part, anchor in ((0, "start"), (1 / 3, "middle"), (2 / 3, "middle"), (1, "end"))
    ]
    return f'<path d="M{_LEFT} {y}H{_LEFT + _PLOT}" stroke="currentColor"/>{"".join(marks)}'


def _level(y: float, words: str) -> str:
    """A horizontal line with its value."""
    line = f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _PLOT}" stroke="currentColor" stroke-opacity="0.3"/>'
    return line + _text(_LEFT - 6, y + 4, words, "end")


def _rect(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {look}/>'


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(title: str, told: str, height: float, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}: {escape(told)}</title>{body}</svg>"
    )
