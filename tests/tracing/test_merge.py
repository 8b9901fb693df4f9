"""The merged trace, against the rules of Chrome's form, what was planted, and true time."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulated_trace import MS, Simulation, Truth, simulate
from torchdistinput.__main__ import main

Event = dict[str, Any]


def merged(folder: Path) -> Event:
    out = folder / "all.json.gz"
    assert main(["trace", str(folder), "-o", str(out)]) == 0
    found: Event = json.loads(gzip.decompress(out.read_bytes()))
    return found


def slices(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def check_form(events: list[Event]) -> None:
    """The rules of the form: keys, types, slices that nest on their track, arrows that start and end in slices."""
    for event in events:
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert event["ph"] in {"X", "M", "i", "s", "f"}
        assert event["ph"] == "M" or isinstance(event["ts"], float | int)
    tracks = slices(events)
    for found in tracks.values():
        open_until: list[float] = []
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 2e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 2e-3, event
            open_until.append(end)
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in {"s", "f"}:
            arrows[event["id"]].append(event)
            around = [s for s in tracks[event["pid"], event["tid"]] if s["ts"] <= event["ts"] < s["ts"] + s["dur"]]
            assert around, event
    assert all(sorted(event["ph"] for event in ends) == ["f", "s"] for ends in arrows.values())
    named = {(event["pid"], event["tid"]) for event in events if event.get("name") == "thread_name"}
    assert named >= set(tracks)


def votes_of(events: list[Event], epoch: int, step: int) -> list[Event]:
    """The slices of a vote, by rank."""
    at = {"epoch": epoch, "step": step}.items()
    return [each for each in events if each.get("cat") == "vote" and at <= each["args"].items()]


def check_clocks(trace: Event, truth: Truth) -> None:
    """Of each two ranks, the times of their votes are apart as they were, to within the bounds of their clocks."""
    bound_of = trace["otherData"]["bounds_ns"]
    for (epoch, step), starts in truth.votes.items():
        first, *others = votes_of(trace["traceEvents"], epoch, step)
        for rank, vote in enumerate(others, 1):
            wrong = 1000 * (vote["ts"] - first["ts"]) - (starts[rank] - starts[0])
            assert abs(wrong) <= bound_of.get(f"node-{rank}", 0) + 10_000, (epoch, step, rank)


@pytest.mark.parametrize(("drift", "bound"), [(0.0, 0.2 * MS), (2e-5, 0.3 * MS), (-1e-4, 1.0 * MS)])
def test_clocks_that_are_wrong_and_drift_are_set_to_within_the_bound(
    drift: float, bound: float, tmp_path: Path
) -> None:
    truth = simulate(tmp_path, Simulation(world=6, steps=600, drift=drift, late=2, late_ns=5 * MS))
    trace = merged(tmp_path)
    assert 0 < max(trace["otherData"]["bounds_ns"].values()) < bound
    check_clocks(trace, truth)


def test_the_ranks_of_a_host_share_its_clock_and_a_host_without_messages_is_named(tmp_path: Path) -> None:
    truth = simulate(tmp_path, Simulation(world=4, hosts=["a", "a", "b", "b"]))
    trace = merged(tmp_path)
    assert trace["otherData"]["bounds_ns"].keys() == {"a", "b"}
    for starts, (_, one, two, three) in (
        (truth.votes[0, step], votes_of(trace["traceEvents"], 0, step)) for step in (0, 19)
    ):
        assert abs(1000 * (three["ts"] - two["ts"]) - (starts[3] - starts[2])) < 5_000
        assert abs(1000 * (two["ts"] - one["ts"]) - (starts[2] - starts[1])) < MS
    for path in tmp_path.glob("rank-*.json"):
        path.write_text(path.read_text().replace('"peers":{', '"peers":{},"were":{'))
    (note,) = merged(tmp_path)["otherData"]["notes"]
    assert note == "no messages tell how wrong the clocks of these hosts are: b"


def test_arrows_lead_from_who_came_last_to_all_who_waited(tmp_path: Path) -> None:
    what = Simulation(world=4, steps=20, epochs=2, late=2)
    simulate(tmp_path, what)
    trace = merged(tmp_path)
    events = trace["traceEvents"]
    check_form(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {100_000 + rank: f"rank {rank}" for rank in range(4)}
    for epoch, step in ((0, 5), (0, 11), (1, 5), (1, 11)):
        votes = votes_of(events, epoch, step)
        assert max(votes, key=lambda vote: vote["ts"])["pid"] == 100_002
        begins = {e["id"] for e in events if e["ph"] == "s" and e["pid"] == 100_002 and e["ts"] == votes[2]["ts"]}
        ends = [e for e in events if e["ph"] == "f" and e["id"] in begins]
        assert sorted(event["pid"] for event in ends) == [100_000, 100_001, 100_003]
        after = [e for e in events if e.get("cat") == "step" and e["args"]["step"] == step]
        assert {event["ts"] for event in ends} <= {event["ts"] for event in after}


def test_a_rank_that_was_killed_has_no_loose_arrows(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=3, late=2))
    path = tmp_path / "rank-00002-3fa9c2d1.json"
    path.write_text(path.read_text()[:6000])
    check_form(merged(tmp_path)["traceEvents"])
