"""The tables of a report, for the terminal and for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, final

from torchdistinput.report.summary import RankNumbers, Summary, shown_ranks
from torchdistinput.report.verdict import TRAINING, VOTE

_MOST_FILES: Final = 8
_LEAST_SHARE: Final = 0.01  # of all waits, that a file has to be named


@final
@dataclass(frozen=True)
class ReportTable:
    """A table of texts.

    Args:
      title: what it shows.
      note: how to read it, a sentence or more.
      columns: the heads.
      rows: the cells; the first one names the row.
    """

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_text(self) -> str:
        """Columns of equal width."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.columns))]
        texts = [
            "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in each)
            for each in (enumerate(zip(line, widths, strict=True)) for line in lines)
        ]
        return "\n".join([self.title, *(text.rstrip() for text in texts)])


def tables(summary: Summary) -> list[ReportTable]:
    """The tables for which the trace has numbers."""
    found = [_ranks(summary), _causes(summary), _files(summary), _parts(summary), _shares(summary)]
    return [table for table in found if table.rows]


def head(summary: Summary) -> str:
    """The run in a line."""
    hosts = len({rank.host for rank in summary.ranks})
    steps = max((rank.steps for rank in summary.ranks), default=0)
    return (
        f"run {summary.run}: {_counted(len(summary.ranks), 'rank')} on {_counted(hosts, 'host')}, "
        f"{_counted(steps, 'step')}, {duration(summary.seconds)}; clocks right to within "
        f"{duration(summary.clock_bound_ns / 1e9)}"
    )


def duration(seconds: float) -> str:
    """A length of time in the unit in which it has a few digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            digits = 0 if seconds * scale >= 100 else 1 if seconds * scale >= 10 else 2
            return f"{seconds * scale:,.{digits}f} {unit}"
    return f"{seconds * 1e6:.0f} us" if seconds else "0"


def percent(part: float, whole: float) -> str:
    """A share."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def shown(summary: Summary) -> list[RankNumbers]:
    """The ranks that are shown one by one."""
    made_wait = {rank.rank: rank.times.made_wait for rank in summary.ranks}
    waited = {rank.rank: rank.times.waiting for rank in summary.ranks}
    chosen = shown_ranks(made_wait, waited)
    return [rank for rank in summary.ranks if rank.rank in chosen]


def _with_all(
    summary: Summary, columns: Sequence[tuple[str, Callable[[RankNumbers], float], Callable[[float], str]]]
) -> Iterator[list[str]]:
    """A row for each rank that is shown, and of more ranks the least, the median and the most of all."""
    for rank in shown(summary):
        yield [str(rank.rank), *(write(value(rank)) for _, value, write in columns)]
    if len(summary.ranks) > len(shown(summary)):
        for name, of_all in (("least of all", min), ("median of all", median), ("most of all", max)):
            yield [name, *(write(of_all([value(rank) for rank in summary.ranks])) for _, value, write in columns)]


def _ranks(summary: Summary) -> ReportTable:
    seconds = summary.seconds
    columns: list[tuple[str, Callable[[RankNumbers], float], Callable[[float], str]]] = [
        ("waited", lambda rank: rank.times.waiting, duration),
        ("of the time", lambda rank: rank.times.waiting, lambda value: percent(value, seconds)),
        ("made others wait", lambda rank: rank.times.made_wait, duration),
        ("waits for it", lambda rank: rank.last, lambda value: f"{value:,.0f}"),
        ("sampler", lambda rank: rank.parts.get("sampler", 0.0), duration),
        ("reading", lambda rank: rank.stages.get("fetch", 0.0), duration),
        ("getitem", lambda rank: rank.parts.get("getitem", 0.0), duration),
        ("collate", lambda rank: rank.parts.get("collate", 0.0), duration),
        ("copy", lambda rank: rank.stages.get("copy", 0.0), duration),
        ("training", lambda rank: rank.stages.get("step", 0.0), duration),
    ]
    hosts = {str(rank.rank): rank.host for rank in summary.ranks}
    rows = [[name, hosts.get(name, ""), *cells] for name, *cells in _with_all(summary, columns)]
    note = (
        "Waited: the training loop stood in next(). Made others wait: the time in which some other rank had all but "
        "this one's vote or answer. Reading is summed over loader workers, so it may exceed the time."
    )
    return ReportTable("Ranks and stages", note, ["rank", "host", *(name for name, _, _ in columns)], rows)


def _causes(summary: Summary) -> ReportTable:
    """What the ranks that made others wait did; with one rank, what its loop waited for."""
    alone = len(summary.ranks) == 1
    late: Counter[str] = Counter()
    for rank in summary.ranks:
        late.update(rank.times.waited_in if alone else rank.times.late_in)
    words = {TRAINING: "training code", VOTE: "votes, network", "getitem": "__getitem__"}
    words |= {"collate": "collate_fn (whole batches)", "fetch": "reading, other", "draw": "drawing, other"}
    rows = [
        [words.get(stage, stage), duration(seconds), percent(seconds, late.total())]
        for stage, seconds in late.most_common()
        if seconds > 1e-3 * late.total()
    ]
    title = "What the loop waited for" if alone else "What late ranks did while others waited"
    return ReportTable(title, "Of all ranks together.", ["stage", "time", "share"], rows)


def _files(summary: Summary) -> ReportTable:
    times: Counter[tuple[str, int]] = Counter()
    for rank in summary.ranks:
        for files in (rank.times.files, rank.times.waited_files):
            times |= Counter({(name, rank.rank): seconds for name, seconds in files.items()})
    least = _LEAST_SHARE * sum(max(rank.times.waiting, rank.times.made_wait) for rank in summary.ranks)
    longest = [each for each in times.most_common(_MOST_FILES) if each[1] >= least]
    rows = [[name, str(rank), duration(seconds)] for (name, rank), seconds in longest]
    note = (
        "The time in which the rank's own loop, or another rank, waited while it was read; the longest ones, from 1 % "
        "of all waits on. It is named if it took more than half of the time of its batch."
    )
    return ReportTable("Files that were waited for", note, ["file, or index of the sample", "rank", "time"], rows)


def _parts(summary: Summary) -> ReportTable:
    columns: list[tuple[str, Callable[[RankNumbers], float], Callable[[float], str]]] = [
        ("samples", lambda rank: rank.samples, lambda value: f"{value:,.0f}"),
        ("samples a step", lambda rank: rank.samples / max(1, rank.steps), lambda value: f"{value:,.1f}"),
        ("MB", lambda rank: rank.num_bytes / 1e6, lambda value: f"{value:,.1f}"),
    ]
    mean = sum(rank.cost or 0.0 for rank in summary.ranks) / max(1, len(summary.ranks))
    if mean:
        columns.append(("cost", lambda rank: rank.cost or 0.0, lambda value: f"{value:,.0f}"))
        columns.append(("cost / mean", lambda rank: (rank.cost or 0.0) / mean, lambda value: f"{value:.3f}"))
    rows = list(_with_all(summary, columns)) if any(rank.samples for rank in summary.ranks) else []
    note = "Of the steps that were delivered. The rank with the largest part sets the pace of all."
    return ReportTable("Sizes and costs of the parts", note, ["rank", *(name for name, _, _ in columns)], rows)


def _shares(summary: Summary) -> ReportTable:
    shares: Counter[str] = Counter()
    for rank in summary.ranks:
        shares |= Counter(rank.shares)  # the larger numbers: one that was killed may not have told its own
    rows = [[name, f"{value:,.0f}", percent(value, shares.total())] for name, value in shares.most_common()]
    note = "Samples or tokens of all ranks together."
    return ReportTable("Shares of the mixture", note, ["source", "amount", "share"], rows)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
