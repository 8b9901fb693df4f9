"""The trace of all ranks as one file of Chrome's trace event form, which Perfetto and chrome://tracing open.

A process is a rank, a track is a stage: slices of one track must nest, so a span that would overlap another one gets a
track of its own, as each loader worker does. An arrow leads from the vote of the rank that voted last for a step to
the training code of each rank that had waited for it. Times are microseconds since ``baseTimeNanoseconds`` on the clock
of the lowest rank; the bounds of the errors are in ``otherData.clocks``. Events are written as the files are read, in
no order.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from torchdistinput.errors import InputError
from torchdistinput.report.causes import name_of
from torchdistinput.report.clocks import Clocks
from torchdistinput.report.last_votes import LastVote, timed_spans
from torchdistinput.report.read_trace import RunTrace, vote_key

STAGES: Final = ("step", "wait", "draw", "fetch", "copy", "vote")
"""The tracks of a rank, from above."""
_RANKS: Final = 100_000  # the process number of rank 0; 0 would be the idle process to Perfetto
_PROFILES: Final = 1_000_000  # the first process number of a profile's events
_ChromeEvent: TypeAlias = dict[str, Any]


def write_chrome(
    trace: RunTrace, clocks: Clocks, last: Mapping[int, LastVote], out: Path, profiles: Sequence[str] = ()
) -> int:
    """Writes the merged trace.

    Args:
      trace: the files.
      clocks: of the ranks.
      last: who voted last, by ``vote_key``.
      out: the file; compressed if its name ends in ``.gz``.
      profiles: files of ``torch.profiler``'s ``export_chrome_trace``, each of one rank, whose events are added; the
        rank is found by the process that wrote it, or given: ``"2=profile.json"``.

    Returns:
      The number of events.

    Raises:
      InputError: a profile without ``baseTimeNanoseconds``, or of an unknown rank.
    """
    chrome = _Chrome(trace, clocks, last)
    loaded = [chrome.profile(number, given) for number, given in enumerate(profiles)]
    about = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": chrome.base_ns,
        "otherData": {
            "run": next(iter(trace.files.values())).run,
            "clocks": chrome.about_clocks(),
            "notes": trace.notes,
        },
    }
    number = 0
    with gzip.open(out, "wt", compresslevel=5) if out.suffix == ".gz" else out.open("w") as file:
        file.write(f'{json.dumps(about)[:-1]}, "traceEvents": [\n')
        for events in (*(chrome.events(rank) for rank in trace.files), *loaded):
            for event in events:
                file.write(",\n" if number else "")
                file.write(json.dumps(event))
                number += 1
        file.write("\n]}\n")
    return number


@final
class _Tracks:
    """The tracks of a process: a name for each, and where its last slice ends."""

    def __init__(self) -> None:
        self._ends: dict[str, list[int]] = {}
        self.numbers: dict[str, int] = {}

    def track(self, name: str, start: int, end: int) -> int:
        """The track for a slice, which overlaps no other slice there."""
        ends = self._ends.setdefault(name, [])
        place = next((place for place, other in enumerate(ends) if other <= start), len(ends))
        ends[place : place + 1] = [end]
        full = name if place == 0 else f"{name} ({place + 1})"
        stage = name.partition(",")[0]
        first = (STAGES.index(stage) if stage in STAGES else len(STAGES)) * 100_000 + 1
        return self.numbers.setdefault(full, first + len(self.numbers))


@final
class _Chrome:
    """Makes the events. Times on the common clock are nanoseconds; those of events microseconds since ``base_ns``."""

    def __init__(self, trace: RunTrace, clocks: Clocks, last: Mapping[int, LastVote]) -> None:
        self._trace, self._clocks, self._last = trace, clocks, last
        self.base_ns = trace.files[clocks.reference].base_ns
        # The number of the arrow to a (rank, step): one that was waited for.
        self._arrows: dict[tuple[int, int], int] = {}
        for vote in last.values():
            for wait in vote.waits:
                self._arrows[wait.rank, wait.step] = len(self._arrows) + 1

    def about_clocks(self) -> Mapping[str, Any]:
        """What was done to the clocks, and the bounds of the errors."""
        ranks = {
            str(rank): {"offset_ns": int(offsets[0]), "drift_ns": int(offsets[-1] - offsets[0]), "bound_ns": bound}
            for (rank, offsets), bound in zip(self._clocks.offsets.items(), self._clocks.bounds.values(), strict=True)
        }
        return {
            "reference_rank": self._clocks.reference,
            "bound_ns": max(self._clocks.bounds.values()),
            "assumes": self._clocks.assumes,
            "ranks": ranks,
        }

    def _us(self, time: int) -> float:
        return (time - self.base_ns) / 1000

    def events(self, rank: int) -> Iterator[_ChromeEvent]:
        """All events of a rank."""
        pid, tracks = _RANKS + rank, _Tracks()
        file = self._trace.files[rank]
        yield _named("process_name", pid, 0, f"rank {rank}")
        yield _named("process_labels", pid, 0, f"{file.host}, process {file.pid}", "labels")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": rank}}
        for span, start, end in timed_spans(self._trace, self._clocks, rank):
            yield from self._span(rank, tracks, span, start, end)
        for name, tid in tracks.numbers.items():
            yield _named("thread_name", pid, tid, name)
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}

    def _span(
        self, rank: int, tracks: _Tracks, span: Mapping[str, Any], start: int, end: int
    ) -> Iterator[_ChromeEvent]:
        kind, pid, step = span["k"], _RANKS + rank, vote_key(span, span["s"])
        worker = f", loader worker {span['worker']}" if "worker" in span else ""
        tid = tracks.track(f"{kind}{worker}", start, end)
        at: _ChromeEvent = {"pid": pid, "tid": tid}
        names = {"e": "epoch", "s": "step", "v": "vote", "n": "steps" if kind == "vote" else "samples", "i": "iterator"}
        args = {names.get(key, key): each for key, each in span.items() if key not in {"k", "t", "d", "peers", "parts"}}
        vote = self._last.get(vote_key(span, span["v"])) if kind == "vote" else None
        if vote is not None:
            args |= {"last_voter": vote.rank, "last_by_ns": vote.late, "late_ns": start - vote.start}
        title = f"{kind} {name_of(span) or span['s']}" if kind == "fetch" else f"{kind} {span['s']}"
        yield {
            "ph": "X",
            "cat": kind,
            "name": title,
            "ts": self._us(start),
            "dur": (end - start) / 1000,
            **at,
            "args": args,
        }
        yield from self._parts(span, start, end, at)
        if kind == "vote":
            counts = {"held": span.get("held", 0), "agreed": span.get("n", 0)}
            yield {"ph": "C", "name": "steps held and agreed", "pid": pid, "ts": self._us(start), "args": counts}
        if kind == "step" and "ready" in span:
            counts = {"ready": span["ready"]}
            yield {"ph": "C", "name": "steps ready", "pid": pid, "ts": self._us(start), "args": counts}
        if vote is not None and vote.rank == rank:
            for wait in vote.waits:
                yield self._flow("s", self._arrows[wait.rank, wait.step], start, at)
        if kind == "step" and (rank, step) in self._arrows:  # not in the wait: Perfetto points at the starts of slices
            yield {**self._flow("f", self._arrows[rank, step], start, at), "bp": "e"}

    def _parts(self, span: Mapping[str, Any], start: int, end: int, at: _ChromeEvent) -> Iterator[_ChromeEvent]:
        """The parts of a span, one after the other, inside of it: their lengths are known, not their order."""
        for name, length in span.get("parts", {}).items():
            until = min(end, start + length)
            yield {"ph": "X", "cat": "part", "name": name, "ts": self._us(start), "dur": (until - start) / 1000, **at}
            start = until

    def _flow(self, phase: str, number: int, time: int, at: _ChromeEvent) -> _ChromeEvent:
        return {"ph": phase, "cat": "last voter", "name": "waited for", "id": number, "ts": self._us(time), **at}

    def profile(self, number: int, given: str) -> Iterator[_ChromeEvent]:
        """The events of a torch profile, on the common clock, as processes of their own."""
        name, _, path = given.rpartition("=") if given.partition("=")[0].isdigit() else ("", "", given)
        with gzip.open(path, "rt") if path.endswith(".gz") else Path(path).open() as file:
            profile = json.load(file)
        if "baseTimeNanoseconds" not in profile:
            raise InputError(
                f"{path} has no baseTimeNanoseconds, so its clock is unknown: export it with torch 2.4 or newer"
            )
        rank = int(name) if name else self._rank_of(profile, path)
        if rank not in self._trace.files:
            raise InputError(f"{path} is of rank {rank}, which has no trace file here")
        return self._moved(profile, rank, _PROFILES + number * 100_000)

    def _rank_of(self, profile: Mapping[str, Any], path: str) -> int:
        told = profile.get("distributedInfo", {}).get("rank")
        if told is not None:
            return int(told)
        pids = {event.get("pid") for event in profile["traceEvents"]}
        ranks = [rank for rank, file in self._trace.files.items() if file.pid in pids]
        if len(ranks) != 1:
            raise InputError(f"{path}: the rank of this profile is unknown; say it with --with RANK={path}")
        return ranks[0]

    def _moved(self, profile: Mapping[str, Any], rank: int, first_pid: int) -> Iterator[_ChromeEvent]:
        base = int(profile["baseTimeNanoseconds"])
        pids: dict[Any, int] = {}
        for event in profile["traceEvents"]:
            moved = dict(event)
            moved["pid"] = pids.setdefault(event.get("pid"), first_pid + len(pids))
            if "ts" in event:
                own = base + round(event["ts"] * 1000)
                moved["ts"] = self._us(int(self._clocks.common(rank, own)))
            if event.get("name") == "process_name":
                moved["args"] = {"name": f"rank {rank}, torch.profiler: {event['args'].get('name', '')}"}
            if "id" in event and isinstance(event["id"], int):
                moved["id"] = first_pid * 1_000_000 + event["id"]
            yield moved


def _named(what: str, pid: int, tid: int, name: str, key: str = "name") -> _ChromeEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: name}}
