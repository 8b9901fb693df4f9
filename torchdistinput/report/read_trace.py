"""The trace files of a run: found, checked, and read line by line.

A folder holds one file for each rank, JSON lines: a header, then a line for each span (``tracing/`` writes them). The
files are streamed, more than once where that saves memory; what stays is a few numbers for each vote and each wait.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from torchdistinput.errors import InputError

FORM: Final = 1
"""The form of the files that is read here: the value of ``trace`` in their headers."""
LATEST: Final = "latest"
"""In place of the name of a run: the one that began last."""
LONG_NS: Final = 1_000_000
"""From which length on a time in which the training thread was busy is kept."""
_MOST_SHOWN: Final = 5  # runs, the last ones
_MOST_MESSAGES: Final = 1_000_000  # of all ranks, that are kept to set the clocks: about 200 MB


@final
@dataclass(frozen=True, kw_only=True)
class RankFile:
    """The file of one rank.

    Args:
      path: where it is.
      run: the name of the run, the same on all of its ranks.
      rank: the rank that wrote it.
      world_size: how many ranks the run had.
      host: the name of the rank's host.
      pid: its process.
      base_ns: what its times count from, nanoseconds since 1970 on its own clock.
      version: of torchdistinput, which wrote it.
    """

    path: Path
    run: str
    rank: int
    world_size: int
    host: str
    pid: int
    base_ns: int
    version: str

    def spans(self) -> Iterator[Mapping[str, Any]]:
        """The lines after the header, in the order of their ends; a last one that was cut is left out.

        Raises:
          InputError: another line is no JSON.
        """
        for number, (line, is_last) in enumerate(_lines(self.path), 1):
            if number == 1:
                continue
            try:
                span = json.loads(line)
            except ValueError:
                if is_last:
                    return
                raise InputError(
                    f"{self.path}, line {number}: no JSON, and not the last line, which a killed rank may leave: the "
                    "file was changed or its disk was full; take it out of the folder to go on without this rank"
                ) from None
            yield span


@final
@dataclass
class RankVotes:
    """What is kept of a rank: parallel columns, an entry for each vote, wait and message, times in its own clock.

    ``key`` holds (iterator, epoch, number of the vote) in one int, see ``vote_key``; ``step`` of a wait likewise.
    Without loader workers the training thread answers messages, in ``next``: where it was busy for long is kept, too.
    """

    key: array[int] = field(default_factory=lambda: array("q"))
    first_step: array[int] = field(default_factory=lambda: array("q"))
    steps: array[int] = field(default_factory=lambda: array("q"))
    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    busy_start: array[int] = field(default_factory=lambda: array("q"))
    busy_end: array[int] = field(default_factory=lambda: array("q"))
    has_workers: bool = False
    wait_step: array[int] = field(default_factory=lambda: array("q"))
    wait_start: array[int] = field(default_factory=lambda: array("q"))
    wait_end: array[int] = field(default_factory=lambda: array("q"))
    messages: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # peer: {key: (sent, received)}
    stride: int = 1  # of the votes whose messages are kept
    num_messages: int = 0
    shares: Counter[str] = field(default_factory=Counter)
    datasets: set[str] = field(default_factory=set)
    began: int | None = None
    ended: int = 0


@final
@dataclass(frozen=True)
class RunTrace:
    """The trace of one run.

    Args:
      files: one for each rank that has one, by rank.
      votes: what is kept of each rank, by rank.
      notes: what is missing or was left out, a sentence each.
    """

    files: Mapping[int, RankFile]
    votes: Mapping[int, RankVotes]
    notes: Sequence[str]


def vote_key(span: Mapping[str, Any], number: int) -> int:
    """(iterator, epoch, ``number``) in one int, which orders votes or steps of a run as they happened."""
    iterator: int = span.get("i", 0)
    epoch: int = span.get("e", 0)
    return (iterator << 42) + (epoch % 1024 << 32) + number  # each epoch has an iterator: below 2**21 of them in all


def read_trace(folder: Path, run: str | None = None) -> RunTrace:
    """Reads all files of a run once.

    Args:
      folder: the one that ``InputOptions(trace=...)`` named.
      run: the run, where the folder has several; ``"latest"`` is the one that began last.

    Raises:
      InputError: no trace file there, or none with a span; files of several runs, of a newer form, or twice of a rank;
        a damaged file.
    """
    files, notes = _find(folder, run)
    limit = max(256, _MOST_MESSAGES // len(files))
    votes = {rank: RankVotes() for rank in sorted(files)}
    for rank, kept in votes.items():
        notes += _read(files[rank], kept, limit)
    whole = [rank for rank, kept in votes.items() if kept.began is not None]
    if not whole:
        raise InputError(f"{folder} has no spans yet: no rank has delivered a step")
    notes += [f"rank {rank} wrote no span, and is left out" for rank in votes if rank not in whole]
    datasets = sorted({name for kept in votes.values() for name in kept.datasets})
    if len(datasets) > 1:
        notes.append(f"the datasets {', '.join(datasets)} were read; the numbers are of all of them together")
    return RunTrace({rank: files[rank] for rank in whole}, {rank: votes[rank] for rank in whole}, notes)


def _find(folder: Path, run: str | None) -> tuple[dict[int, RankFile], list[str]]:
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise InputError(
            f"{folder} has no trace files (rank-*.jsonl): give the folder of InputOptions(trace=...) or of "
            "TORCHDISTINPUT_TRACE, on a machine that sees the files of all ranks"
        )
    notes = []
    runs: dict[str, dict[int, RankFile]] = {}
    for path in paths:
        file = _header(path)
        if file is None:
            notes.append(f"{path.name} ends in its first line: its rank was killed at the start, and is left out")
            continue
        ranks = runs.setdefault(file.run, {})
        if file.rank in ranks:
            raise InputError(f"rank {file.rank} of run {file.run} has two files, {ranks[file.rank].path} and {path}")
        ranks[file.rank] = file
    return _chosen(folder, runs, run, notes), notes


def _chosen(
    folder: Path, runs: Mapping[str, dict[int, RankFile]], run: str | None, notes: list[str]
) -> dict[int, RankFile]:
    if not runs:
        raise InputError(
            f"{folder} has trace files, and the first line of each is incomplete: {'; '.join(notes)[:200]}"
        )
    begun = {name: min(file.base_ns for file in ranks.values()) for name, ranks in runs.items()}
    shown = sorted(runs, key=begun.__getitem__)[-_MOST_SHOWN:]
    told = ", ".join(f"{name} ({len(runs[name])} ranks, {_date(begun[name])})" for name in shown)
    if run is None and len(runs) > 1:
        raise InputError(
            f"{folder} has traces of {len(runs)} runs, {told}: say which with --run NAME, or --run {LATEST}"
        )
    name = max(runs, key=lambda each: begun[each]) if run in {None, LATEST} else run
    if name not in runs:
        raise InputError(f"{folder} has no trace of run {name}; it has {told}")
    files = runs[name]
    world_size = max(file.world_size for file in files.values())
    missing = [rank for rank in range(world_size) if rank not in files]
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        notes.append(f"{len(missing)} of {world_size} ranks have no file here: {listed}; the others are shown without")
    return files


def _date(base_ns: int) -> str:
    return time.strftime("begun %Y-%m-%d %H:%M:%S", time.localtime(base_ns / 1e9))


def _header(path: Path) -> RankFile | None:
    """The file by its first line; ``None`` if that was cut."""
    line, is_last = next(_lines(path), ("", True))
    try:
        header = json.loads(line)
    except ValueError:
        if is_last:
            return None
        raise InputError(f"{path} is no trace file: its first line is no JSON") from None
    form = header.get("trace") if isinstance(header, dict) else None
    if not isinstance(form, int):
        raise InputError(f"{path} is no trace file: its first line has no 'trace'")
    version = header.get("version", "unknown")
    if form > FORM:
        raise InputError(
            f"{path} has form {form}, of torchdistinput {version}; this one reads form {FORM}: read it with that one"
        )
    return RankFile(
        path=path,
        run=str(header["run"]),
        rank=header["rank"],
        world_size=header["world_size"],
        host=header.get("host", ""),
        pid=header.get("pid", 0),
        base_ns=header["base_ns"],
        version=version,
    )


def _lines(path: Path) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is the last one."""
    with path.open(encoding="utf-8", errors="replace") as file:
        before = file.readline()
        for line in file:
            yield before, False
            before = line
        if before:
            yield before, True


def _read(file: RankFile, kept: RankVotes, limit: int) -> list[str]:
    """Fills the columns of a rank; returns what is to be said of its file."""
    stopped = True
    for span in file.spans():
        kind = span["k"]
        stopped = kind == "stop"
        kept.shares.update(span.get("shares", {}))
        kept.datasets.update([span["dataset"]] if "dataset" in span else [])
        if kept.began is None:
            kept.began = span["t"]
        kept.began = min(kept.began, span["t"])
        kept.ended = max(kept.ended, span["t"] + span.get("d", 0))
        if kind == "vote":
            kept.key.append(vote_key(span, span["v"]))
            kept.first_step.append(vote_key(span, span["s"]))
            kept.steps.append(span.get("n", 0))
            kept.start.append(span["t"])
            kept.end.append(span["t"] + span["d"])
        elif kind == "wait":
            kept.wait_step.append(vote_key(span, span["s"]))
            kept.wait_start.append(span["t"])
            kept.wait_end.append(span["t"] + span["d"])
        elif kind in {"fetch", "step"} and not kept.has_workers and span["d"] > LONG_NS:
            kept.busy_start.append(span["t"])
            kept.busy_end.append(span["t"] + span["d"])
        if "worker" in span and not kept.has_workers:
            kept.has_workers = True
            del kept.busy_start[:], kept.busy_end[:]
        if "peers" in span:
            _keep_messages(kept, span, limit)
    notes = []
    if is_cut(file.path):
        notes.append(f"the last line of rank {file.rank} was cut, and is left out")
    if not stopped and kept.began is not None:
        notes.append(
            f"the file of rank {file.rank} ends within an epoch: it was killed (torchrun kills all when one died), "
            "or still runs"
        )
    return notes


def _keep_messages(kept: RankVotes, span: Mapping[str, Any], limit: int) -> None:
    """The messages of a vote; of every second, fourth, ... vote where there are too many."""
    number = span.get("v", 0)
    if number % kept.stride:
        return
    key = vote_key(span, number) if span["k"] == "vote" else -1 - vote_key(span, number)
    for peer, (sent, received) in span["peers"].items():
        kept.messages.setdefault(int(peer), {})[key] = (sent, received)
        kept.num_messages += 1
    if kept.num_messages > limit:
        kept.stride *= 2
        kept.messages = {
            peer: {key: pair for key, pair in pairs.items() if key < 0 or key % (1 << 32) % kept.stride == 0}
            for peer, pairs in kept.messages.items()
        }
        kept.num_messages = sum(map(len, kept.messages.values()))


def is_cut(path: Path) -> bool:
    """Whether the last line of a file is no JSON."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    try:
        json.loads(last)
    except ValueError:
        return True
    return False


def hosts(files: Iterable[RankFile]) -> dict[str, list[int]]:
    """The ranks of each host."""
    found: dict[str, list[int]] = {}
    for file in files:
        found.setdefault(file.host, []).append(file.rank)
    return found
