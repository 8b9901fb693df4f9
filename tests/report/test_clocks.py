"""The clocks of simulated ranks, against what they are."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.simulated_trace import MS, Simulation, Straggler, simulate
from torchdistinput.errors import InputError
from torchdistinput.report.clocks import HOST_NS, set_clocks
from torchdistinput.report.read_trace import read_trace

SEEDS = range(200)


@pytest.mark.parametrize("seeds", [SEEDS[first::10] for first in range(10)])
def test_each_offset_is_within_its_bound_in_random_networks(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        chance = random.Random(seed)
        world = chance.randint(2, 9)
        what = Simulation(
            world=world,
            steps=chance.choice([3, 40, 150]),
            hosts=[f"node-{rank // chance.choice([1, 2, 4])}" for rank in range(world)],
            drift=chance.choice([0, 5e-6, 4.5e-5]),
            delay=chance.choice([20_000, 3 * MS]),
            asymmetry=chance.choice([1.0, 30.0]),
            stragglers=[Straggler(chance.randrange(world), ms=chance.choice([20, 400]), steps=range(0, 150, 3))],
            seed=seed,
        )
        truth = simulate(tmp_path / str(seed), what)
        trace = read_trace(tmp_path / str(seed))
        clocks = set_clocks(trace)
        for rank in range(world):
            own = np.array(trace.votes[rank].start) + trace.files[rank].base_ns
            there = np.array(trace.votes[0].start) + trace.files[0].base_ns
            votes = np.array(list(truth.votes.values()))
            error = clocks.common(rank, own) - there - (votes[:, rank] - votes[:, 0])
            # Between the two true times rank 0's own clock drifts, too.
            slack = np.abs(votes[:, rank] - votes[:, 0]) * what.drift + 2
            assert np.all(np.abs(error) <= clocks.bounds[rank] + slack), (seed, rank, error, clocks.bounds[rank])


def test_the_bound_is_of_the_size_of_the_delays(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=4, steps=60))
    assert max(set_clocks(read_trace(tmp_path)).bounds.values()) < 500_000


def without(folder: Path, key: str) -> None:
    """Takes a key out of all lines."""
    for path in folder.iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(f"{json.dumps({k: v for k, v in line.items() if k != key})}\n" for line in lines))


def test_clocks_of_several_hosts_are_not_compared_without_messages(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=3))
    without(tmp_path, "peers")
    with pytest.raises(InputError, match=r"the clock of rank 1 \(host node-1\) cannot be set"):
        set_clocks(read_trace(tmp_path))


def test_ranks_of_one_host_share_a_clock_and_its_bound_is_told(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=3, hosts=["here"] * 3))
    without(tmp_path, "peers")
    clocks = set_clocks(read_trace(tmp_path))
    assert dict(clocks.bounds) == {0: 0, 1: HOST_NS, 2: HOST_NS}
    assert all(not offsets.any() for offsets in clocks.offsets.values())
    assert "one host share a clock to within 1 ms" in clocks.assumes


def test_where_messages_show_that_a_name_is_that_of_several_hosts_they_win(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=2))
    for path in tmp_path.iterdir():
        path.write_text(re.sub(r"node-\d", "localhost", path.read_text()))
    clocks = set_clocks(read_trace(tmp_path))
    assert abs(clocks.offsets[1][0]) > 100 * MS
    assert "share" not in clocks.assumes


def test_messages_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=2, drift=0.01, steps=300))
    with pytest.raises(InputError, match="contradict each other"):
        set_clocks(read_trace(tmp_path))
