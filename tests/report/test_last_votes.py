"""Who was last in simulated runs, by how much, and on what: against what was planted."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.simulated_trace import Simulation, Straggler, simulate
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
            if last.waits:
                assert last.longest_wait <= latest - min(starts) + bound
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
        file = stall.file if stage in {"getitem", "collate"} else None
        if (found.rank, found.stage, found.file) != (stall.rank, stage, file):
            wrong.append((seed, what, found))
    assert len(wrong) <= 1, wrong
