"""Who was last in simulated runs, by how much, and on what: against what was planted."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.simulated_trace import BASE_NS, MS, Simulation, Straggler, simulate
from torchdistinput.report.clocks import set_clocks
from torchdistinput.report.last_votes import last_votes
from torchdistinput.report.read_trace import read_trace
from torchdistinput.report.summary import summarize


def test_the_last_voter_and_its_lateness_are_those_that_were_within_the_error(tmp_path: Path) -> None:
    certain = 0
    for seed in range(30):
        chance = random.Random(seed)
        what = Simulation(
            world=chance.randint(2, 7),
            workers=chance.choice([0, 1, 3]),
            prefetch=chance.choice([0, 2, 5]),
            epochs=2,
            steps=15,
            stragglers=[Straggler(1, chance.choice(["getitem", "copy", "training"]))],
            seed=seed,
        )
        truth = simulate(tmp_path / str(seed), what)
        trace = read_trace(tmp_path / str(seed))
        clocks = set_clocks(trace)
        found = last_votes(trace, clocks)
        assert len(found) == len(truth.votes)
        for (epoch, step), starts in truth.votes.items():
            last = found[(epoch << 32) + step]
            *_, before, latest = sorted(starts)
            bound = 2 * max(clocks.bounds.values()) + 50_000  # and what the clocks drift in a vote
            assert abs(last.late - (latest - before)) <= bound
            if latest - before > bound:
                certain += 1
                assert last.rank == starts.index(latest)
            waited = [(rank, end - start) for rank, start, end in last.times() if rank == last.rank]
            assert sum(length for _, length in waited) <= latest - min(starts) + bound
    assert certain > 200


def test_a_stall_is_named_by_its_rank_stage_and_file_in_99_of_100_runs(tmp_path: Path) -> None:
    wrong = []
    for seed in range(100):
        chance = random.Random(seed)
        world = chance.randint(2, 4)
        stage = chance.choice(["sampler", "getitem", "collate", "copy", "training"])
        stall = Straggler(chance.randrange(world), stage, 50, [chance.randrange(6, 25)], "web-0193.tar")
        what = Simulation(
            world=world,
            workers=chance.randint(0, 3),
            prefetch=chance.randint(0, 3),
            steps=30,
            stragglers=[stall],
            seed=seed,
        )
        simulate(tmp_path / str(seed), what)
        trace = read_trace(tmp_path / str(seed))
        clocks = set_clocks(trace)
        found = summarize(trace, clocks, last_votes(trace, clocks)).verdict
        file = stall.file if stage == "getitem" else None
        if (found.rank, found.stage, found.file) != (stall.rank, stage, file):
            wrong.append((seed, what, found))
    assert len(wrong) <= 1, wrong


@pytest.mark.parametrize("world", [2, 3])
def test_none_is_blamed_where_all_wait_alike(world: int, tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=world, workers=0, prefetch=0, fetch=40 * MS, train=MS))
    trace = read_trace(tmp_path)
    clocks = set_clocks(trace)
    found = summarize(trace, clocks, last_votes(trace, clocks)).verdict
    assert str(found).startswith("all ranks wait alike for their input, ")
    assert (found.input_bound, found.rank, found.stage) == (True, None, "getitem")


def test_a_run_may_have_a_hundred_thousand_epochs(tmp_path: Path) -> None:
    """Each is an iterator of its own."""
    simulate(tmp_path / "a", Simulation(stragglers=[Straggler(1)]))
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a").iterdir():
        head, *lines = map(json.loads, path.read_text().splitlines())
        later = [head, *({**line, "i": 200_000, "e": 100_000} for line in lines)]
        (tmp_path / "b" / path.name).write_text("".join(f"{json.dumps(line)}\n" for line in later))
    traces = [read_trace(tmp_path / name) for name in "ab"]
    first, second = (
        str(summarize(each, set_clocks(each), last_votes(each, set_clocks(each))).verdict) for each in traces
    )
    assert first == second


@pytest.mark.parametrize(("stage", "named"), [("collate", set()), ("getitem", {"slow.tar"})])
def test_files_are_named_for_their_reading_and_not_for_a_slow_collate_fn(
    stage: str, named: set[str], tmp_path: Path
) -> None:
    steps = range(5, 15)
    simulate(tmp_path, Simulation(world=3, workers=0, stragglers=[Straggler(1, stage, 50, steps, "slow.tar")]))
    trace = read_trace(tmp_path)
    clocks = set_clocks(trace)
    late = summarize(trace, clocks, last_votes(trace, clocks)).ranks[1].times
    assert max(late.late_in, key=lambda stage: late.late_in[stage]) == stage
    assert late.files.keys() & {"slow.tar"} == named


@pytest.mark.parametrize(("kind", "stage", "file"), [("fetch", "fetch", "slow.tar"), ("step", "training", None)])
def test_a_rank_that_is_busy_before_it_answers_made_the_others_wait(
    kind: str, stage: str, file: str | None, tmp_path: Path
) -> None:
    """Both have voted at 2 ms; the vote takes a second message, and rank 1 is busy from 3 to 43 and 50 to 70 ms."""
    busy = [(kind, 3, 43, 1), (kind, 50, 70, 2)]
    for rank, spans in enumerate(([("wait", 1, 80, 0), ("vote", 1, 81, 0)], [("vote", 2, 81, 0), *busy])):
        header = {"trace": 1, "run": "a", "rank": rank, "world_size": 2, "host": "here", "base_ns": BASE_NS}
        lines: list[object] = [header]
        for name, start, end, step in spans:
            more = {"v": 0, "n": 1} if name == "vote" else {"file": "slow.tar"} if name == "fetch" else {}
            lines.append({"k": name, "t": start * MS, "d": (end - start) * MS, "e": 0, "s": step, **more})
        (tmp_path / f"rank-{rank:05}-a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    trace = read_trace(tmp_path)
    clocks = set_clocks(trace)
    found = summarize(trace, clocks, last_votes(trace, clocks))
    assert (found.verdict.rank, found.verdict.stage, found.verdict.file) == (1, stage, file)
    assert found.ranks[1].times.made_wait == pytest.approx(0.061)  # with the 1 ms that it was last
    assert found.ranks[1].times.late_in[stage] >= 0.06
