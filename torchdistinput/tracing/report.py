"""Who made the others wait, and on what, from the trace files of a run; as text, as JSON, as one HTML page.

A rank has explained its waits when it wrote them down (``waits``); here they are summed. Nothing needs one clock.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final, final

from torchdistinput.errors import InputError
from torchdistinput.tracing.events import FORM
from torchdistinput.tracing.verdict import RankTimes, Verdict, verdict
from torchdistinput.tracing.waits import ExplainedTime

_LATEST: Final = "latest"
_MOST_SHOWN: Final = 5  # runs, the last ones
_COLUMNS: Final = (
    *("rank", "host", "waited s", "made wait s", "training s", "sampler s", "getitem s", "collate s", "copy s"),
    *("steps", "samples", "MB"),
)


@final
@dataclass(frozen=True)
class RankFile:
    """The file of one rank: ``facts`` of its first event (``run``, ``rank``, ``world_size``, ``host``, ``base_ns``)."""

    path: Path
    facts: Mapping[str, Any]

    def events(self) -> Iterator[Mapping[str, Any]]:
        """The events in the order of the file; a last one that was cut is left out, which the caller may ask for.

        Raises:
          InputError: another line is no event.
        """
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                event = _event(line)
                if event is not None:
                    yield event
                elif number > 1 and line.endswith("\n"):
                    raise InputError(
                        f"{self.path}, line {number}: no event, and not the last line, which a killed rank may leave: "
                        "the file was changed or its disk was full; take it out of the folder to go on without it"
                    )

    def is_cut(self) -> bool:
        """Whether the last line is not whole."""
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"


def _event(line: str) -> Mapping[str, Any] | None:
    """The event of a line; ``None`` if it has none."""
    try:
        event = json.loads(line.rstrip("\n").removesuffix(","))
    except ValueError:
        return None
    return event if isinstance(event, dict) and "ph" in event else None


def find_files(folder: Path, run: str | None = None) -> tuple[dict[int, RankFile], list[str]]:
    """The files of a run, by rank, and what is missing, a sentence each.

    Args:
      folder: the one that ``InputOptions(trace=...)`` named.
      run: the run, where the folder has several; ``"latest"`` is the one that began last.

    Raises:
      InputError: no trace file there; files of several runs, of another form, or twice of a rank.
    """
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        old = " (rank-*.jsonl are those of version 0.2, which reads them)" if any(folder.glob("rank-*.jsonl")) else ""
        raise InputError(
            f"{folder} has no trace files, rank-*.json{old}: give the folder of InputOptions(trace=...) or of "
            "TORCHDISTINPUT_TRACE, on a machine that sees the files of all ranks"
        )
    notes: list[str] = []
    runs: dict[str, dict[int, RankFile]] = {}
    for path in paths:
        facts = _facts_of(path)
        if facts is None:
            notes.append(f"{path.name} ends in its first lines: its rank was killed at the start, and is left out")
            continue
        ranks = runs.setdefault(facts["run"], {})
        if facts["rank"] in ranks:
            other = ranks[facts["rank"]].path
            raise InputError(f"rank {facts['rank']} of run {facts['run']} has two files, {other} and {path}")
        ranks[facts["rank"]] = RankFile(path, facts)
    if not runs:
        raise InputError(f"{folder} has trace files, and none is whole: {'; '.join(notes)[:200]}")
    files = runs[_chosen(folder, runs, run)]
    world_size = max(file.facts["world_size"] for file in files.values())
    missing = [rank for rank in range(world_size) if rank not in files]
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        notes.append(f"{len(missing)} of {world_size} ranks have no file here: {listed}; the others are shown without")
    return files, notes


def _facts_of(path: Path) -> Mapping[str, Any] | None:
    """The facts of a file; ``None`` if it was cut before them."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        begin, line = next(lines, ""), next(lines, "")
    event = _event(line)
    if not line.endswith("\n") and begin in ("", "[", "[\n"):
        return None
    facts = {} if event is None else event["args"]
    if "form" not in facts:
        raise InputError(f"{path} is no trace file: its first event has no 'form'")
    if facts["form"] != FORM:
        version = facts.get("version", "unknown")
        raise InputError(
            f"{path} has form {facts['form']}, of torchdistinput {version}; this one reads form {FORM}: read it with "
            "that one"
        )
    return facts


def _chosen(folder: Path, runs: Mapping[str, Mapping[int, RankFile]], run: str | None) -> str:
    begun = {name: min(file.facts["base_ns"] for file in ranks.values()) for name, ranks in runs.items()}
    shown = sorted(runs, key=begun.__getitem__)[-_MOST_SHOWN:]
    told = ", ".join(f"{name} ({len(runs[name])} ranks, {_date(begun[name])})" for name in shown)
    if run is None and len(runs) > 1:
        raise InputError(
            f"{folder} has traces of {len(runs)} runs, {told}: say which with --run NAME, or --run {_LATEST}"
        )
    name = shown[-1] if run in {None, _LATEST} else run
    if name not in runs:
        raise InputError(f"{folder} has no trace of run {name}; it has {told}")
    return name


def _date(base_ns: int) -> str:
    return time.strftime("begun %Y-%m-%d %H:%M:%S", time.localtime(base_ns / 1e9))


@final
@dataclass
class RankNumbers:
    """What one rank did, in seconds: ``stages`` by ``cat`` of its slices and by the parts of its reads."""

    rank: int
    host: str
    times: RankTimes
    stages: dict[str, float]
    steps: int
    samples: int
    num_bytes: int
    shares: dict[str, int]


@final
@dataclass(frozen=True)
class Report:
    """The numbers of a run.

    Args:
      run: its name.
      world_size: how many ranks it had; not all may have a file.
      verdict: what the numbers say.
      ranks: of each rank that has slices.
      notes: what is missing or was left out, a sentence each.
    """

    run: str
    world_size: int
    verdict: Verdict
    ranks: Sequence[RankNumbers]
    notes: Sequence[str]

    @classmethod
    def of(cls, folder: Path, run: str | None = None) -> Report:
        """Reads the files of a run; for the arguments and errors see ``find_files``."""
        files, notes = find_files(folder, run)
        found = {rank: _Sums() for rank in sorted(files)}
        made_wait: dict[int, float] = {}
        for rank, sums in found.items():
            notes += sums.read(rank, files[rank])
            for last, seconds in sums.made_wait.items():  # as each rank knows it; a file may end early
                made_wait[last] = max(made_wait.get(last, 0.0), seconds)
        ranks = [
            sums.numbers(rank, files[rank], made_wait.get(rank, 0.0)) for rank, sums in found.items() if sums.began >= 0
        ]
        if not ranks:
            raise InputError(f"{folder} has no slices yet: no rank has delivered a step")
        facts = files[ranks[0].rank].facts
        told = verdict([each.times for each in ranks])
        return cls(facts["run"], max(facts["world_size"], len(ranks)), told, ranks, notes)

    def as_json(self) -> str:
        """The numbers as JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        rows = [_COLUMNS, *map(_row, self.ranks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([self._sentence(), "", *(f"note: {note}" for note in self.notes), *table])

    def _sentence(self) -> str:
        some = f"of {len(self.ranks)} of {self.world_size} ranks only, as no more have slices here: "
        return f"{some if len(self.ranks) < self.world_size else ''}{self.verdict}"

    def as_html(self) -> str:
        """One page: the verdict, a bar and a row for each rank."""
        longest = max(max(each.times.made_wait, each.times.waiting) for each in self.ranks) or 1.0
        heads = "".join(f"<th>{name}</th>" for name in (*_COLUMNS, "waited, made wait"))
        rows = ""
        for each in self.ranks:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in _row(each))
            lengths = [("#888", each.times.waiting), ("#c33", each.times.made_wait)]
            bars = "".join(_BAR.format(color=color, width=15 * length / longest) for color, length in lengths)
            rows += f"<tr>{cells}<td>{bars}</td></tr>\n"
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        title = f"<title>Input of run {escape(self.run)}</title>"
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">{title}\n<style>{_STYLE}</style>\n'
            f"<h1>{escape(self._sentence())}</h1>\n<ul>{notes}</ul>\n<table>\n<tr>{heads}</tr>\n{rows}</table>\n</html>\n"
        )


_STYLE: Final = "body { font: 16px sans-serif } h1 { font-size: 20px } td, th { padding: 2px 8px; text-align: right }"
_BAR: Final = '<div style="background: {color}; height: 6px; width: {width:.2f}em"></div>'


def _row(rank: RankNumbers) -> tuple[str, ...]:
    seconds = [rank.times.waiting, rank.times.made_wait]
    seconds += [rank.stages.get(name, 0.0) for name in ("step", "sampler", "getitem", "collate", "copy")]
    amounts = f"{rank.steps:,}", f"{rank.samples:,}", f"{rank.num_bytes / 1e6:,.1f}"
    return (str(rank.rank), rank.host, *(f"{each:,.2f}" for each in seconds), *amounts)


@dataclass
class _Sums:
    """Adds up the events of one rank."""

    began: float = -1.0
    ended: float = 0.0
    made_wait: dict[int, float] = field(default_factory=dict)
    stages: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    amounts: Counter[str] = field(default_factory=Counter)
    shares: Counter[str] = field(default_factory=Counter)
    workers: set[int] = field(default_factory=set)
    waited: ExplainedTime = field(default_factory=ExplainedTime)
    late: ExplainedTime = field(default_factory=ExplainedTime)

    def read(self, rank: int, file: RankFile) -> list[str]:
        """Reads the file; returns what is to be said of it."""
        stopped = True
        for event in file.events():
            stopped = event["ph"] == "M" or event["name"] == "stop"
            if event["ph"] == "X":
                self._add(rank, event, event["args"])
            elif event["name"] == "stop":
                self.shares.update(event["args"].get("shares", {}))
        notes = [f"the last line of rank {rank} was cut, and is left out"] if file.is_cut() else []
        if self.began < 0:
            return [*notes, f"rank {rank} wrote no slice, and is left out"]
        if stopped:
            return notes
        why = "it was killed (torchrun kills all when one died), or still runs"
        return [*notes, f"the file of rank {rank} ends within an epoch: {why}"]

    def _add(self, rank: int, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        stage, began, seconds = event["cat"], event["ts"] / 1e6, event["dur"] / 1e6
        self.began = began if self.began < 0 else min(self.began, began)
        self.ended = max(self.ended, began + seconds)
        self.stages[stage] += seconds
        explained = [{name: us / 1e6 for name, us in args.get(key, {}).items()} for key in ("in", "files")]
        if stage == "wait":
            self.waited.add(*explained)
        elif stage == "vote" and "last" in args:
            self.made_wait[args["last"]] = self.made_wait.get(args["last"], 0.0) + args["made_wait"] / 1e6
            self.late.add(*explained)
        elif stage == "step":
            self.amounts.update(steps=1, samples=args["samples"], bytes=args["bytes"])
        elif stage in {"fetch", "draw"}:
            for part in ("sampler", "getitem", "collate"):
                self.stages[part] += args.get(part, 0) / 1e6
            if "worker" in args:
                self.workers.add(args["worker"])

    def numbers(self, rank: int, file: RankFile, made_wait: float) -> RankNumbers:
        """The numbers of the rank."""
        seconds, workers = self.ended - self.began, len(self.workers)
        times = RankTimes(
            rank=rank,
            seconds=seconds,
            waiting=self.stages["wait"],
            made_wait=made_wait,
            late_in=self.late.stages,
            waited_in=self.waited.stages,
            files=self.late.files,
            waited_files=self.waited.files,
            num_workers=workers,
            busy=self.stages["fetch"] / (workers * seconds) if workers and seconds else None,
        )
        return RankNumbers(
            rank=rank,
            host=file.facts["host"],
            times=times,
            stages=dict(self.stages),
            steps=self.amounts["steps"],
            samples=self.amounts["samples"],
            num_bytes=self.amounts["bytes"],
            shares=dict(self.shares),
        )
