"""The merged trace, against the rules of Chrome's form and what was planted."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.simulated_trace import BASE_NS, MS, Simulation, Straggler, simulate
from torchdistinput.__main__ import main
from torchdistinput.errors import InputError
from torchdistinput.report.chrome import write_chrome
from torchdistinput.report.clocks import set_clocks
from torchdistinput.report.last_votes import last_votes
from torchdistinput.report.read_trace import read_trace

Event = dict[str, Any]
STRAGGLER = Straggler(2, "getitem", 50, (5, 11), "web-0193.tar")


def merged(folder: Path, *more: str) -> Event:
    out = folder / "all.json.gz"
    assert main(["trace", str(folder), "-o", str(out), *more]) == 0
    found: Event = json.loads(gzip.decompress(out.read_bytes()))
    return found


def slices(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def check_form(trace: Event) -> None:
    """The rules of the form: keys, types, slices that nest on their track, arrows that start and end in slices."""
    events = trace["traceEvents"]
    for event in events:
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert event["ph"] in {"X", "M", "C", "s", "f"}
        assert event["ph"] == "M" or isinstance(event["ts"], float | int)
        assert event["ph"] != "C" or all(isinstance(each, int) for each in event["args"].values())
    tracks = slices(events)
    for found in tracks.values():
        open_until: list[float] = []
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, event
            open_until.append(end)
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in {"s", "f"}:
            arrows[event["id"]].append(event)
            around = [s for s in tracks[event["pid"], event["tid"]] if s["ts"] <= event["ts"] < s["ts"] + s["dur"]]
            assert around, event
    assert all(sorted(event["ph"] for event in ends) == ["f", "s"] for ends in arrows.values())
    named = {(event["pid"], event["tid"]) for event in events if event.get("name") == "thread_name"}
    assert named == set(tracks)


def test_the_last_voter_is_found_in_the_merged_trace_with_arrows_to_all_who_waited(tmp_path: Path) -> None:
    what = Simulation(world=4, steps=20, epochs=2, stragglers=[STRAGGLER])
    truth = simulate(tmp_path, what)
    trace = merged(tmp_path)
    check_form(trace)
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {100_000 + rank: f"rank {rank}" for rank in range(4)}
    bound = trace["otherData"]["clocks"]["bound_ns"]
    assert 0 < bound < MS
    for epoch, step in ((0, 5), (0, 11), (1, 5), (1, 11)):
        votes = [
            e for e in events if e.get("cat") == "vote" and (e["args"]["epoch"], e["args"]["step"]) == (epoch, step)
        ]
        assert max(votes, key=lambda vote: vote["ts"])["pid"] == 100_002
        *_, before, latest = sorted(truth.votes[epoch, step])
        for vote in votes:
            assert vote["args"]["last_voter"] == 2
            assert abs(vote["args"]["last_by_ns"] - (latest - before)) < 2 * bound + 50_000
        starts = {e["id"] for e in events if e["ph"] == "s" and e["pid"] == 100_002 and e["ts"] == votes[2]["ts"]}
        ends = [e for e in events if e["ph"] == "f" and e["id"] in starts]
        assert sorted(event["pid"] for event in ends) == [100_000, 100_001, 100_003]
    # Both clocks are the reference's, whose own time is true.
    first = min(event["ts"] for event in events if event["ph"] == "X")
    assert trace["baseTimeNanoseconds"] > BASE_NS - what.clock_error
    assert 0 < first < 200_000


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_slices_nest_on_each_track(workers: int, tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=3, workers=workers, prefetch=8, fetch=30 * MS))
    check_form(merged(tmp_path))


def test_spans_that_overlap_on_a_stage_get_tracks_of_their_own(tmp_path: Path) -> None:
    header = {"trace": 1, "run": "a", "rank": 0, "world_size": 1, "base_ns": BASE_NS}
    spans = [{"k": "copy", "t": 10 * step, "d": 25, "e": 0, "s": step} for step in range(5)]
    lines = [header, *spans, {"k": "stop", "t": 99, "e": 0, "s": 5}]
    (tmp_path / "rank-00000-a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    trace = merged(tmp_path)
    check_form(trace)
    tracks = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert tracks == ["copy", "copy (2)", "copy (3)"]


def test_a_profile_of_torch_is_laid_on_the_same_clock(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=2))
    path = tmp_path / "rank-00001-3fa9c2d1.jsonl"
    header, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps({**json.loads(header), "pid": os.getpid()}) + "\n", *lines]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        before = time.time_ns()
        with torch.profiler.record_function("planted"):
            torch.ones(3).sum()
        after = time.time_ns()
    profile = tmp_path / "profile.json"
    profiler.export_chrome_trace(str(profile))
    trace = merged(tmp_path, "--with", str(profile))
    planted = [event for event in trace["traceEvents"] if event.get("name") == "planted"]
    read = read_trace(tmp_path)
    clocks = set_clocks(read)
    low, high = ((int(each) - trace["baseTimeNanoseconds"]) / 1000 for each in clocks.common(1, [before, after]))
    assert all(low - 50 <= event["ts"] and event["ts"] + event["dur"] <= high + 50 for event in planted)
    assert len(planted) == 1
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert any(name.startswith("rank 1, torch.profiler: ") for name in names)
    profile.write_text(json.dumps({"traceEvents": []}))
    for given, words in ((str(profile), "no baseTimeNanoseconds"), (f"7={profile}", "no baseTimeNanoseconds")):
        with pytest.raises(InputError, match=words):
            write_chrome(read, clocks, last_votes(read, clocks), tmp_path / "out.json", [given])
    profile.write_text(json.dumps({"traceEvents": [], "baseTimeNanoseconds": 0}))
    for given, words in ((str(profile), "say it with --with RANK="), (f"7={profile}", "is of rank 7, which has no")):
        with pytest.raises(InputError, match=words):
            write_chrome(read, clocks, last_votes(read, clocks), tmp_path / "out.json", [given])
