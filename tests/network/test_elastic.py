"""Elastic jobs over several hosts: ranks that end are started again everywhere, and hosts may leave and come back."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import pytest

from tests.network.elastic_training import BATCH, EPOCHS, SAMPLES
from tests.network.lab import Host, Lab, hosts

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 90.0
NOTHING: Mapping[str, str] = {}
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
QUICKLY = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"


@final
class Job:
    """Agents of torchelastic, two ranks each, which meet at the host of that number."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        nodes: str,
        *arguments: str,
        meeting: int = 0,
        environment: Mapping[str, str] = NOTHING,
    ) -> None:
        self.lab = lab
        self.folder = folder
        self._meeting = lab.hosts[meeting]
        self._nodes = nodes
        self._arguments = arguments
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        self.agents: dict[Host, subprocess.Popen[Any]] = {}

    def start(self, host: Host) -> None:
        """Starts an agent; its output, and that of its ranks, goes to a file."""
        settings = [f"--nnodes={self._nodes}", "--nproc-per-node=2", "--max-restarts=5", "--monitor-interval=0.2"]
        settings += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self._meeting.address}:29400",
            "--rdzv-id=job",
            f"--rdzv-conf={QUICKLY}",
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *settings, f"--local-addr={host.address}"]
        script = [str(ROOT / "tests/network/elastic_training.py"), str(self.folder), *self._arguments]
        with (self.folder / f"{host.name}.log").open("a") as log:
            options = {"stdout": log, "stderr": log, "env": self._environment}
            self.agents[host] = host.popen(*command, *script, **options)

    def kill(self, host: Host) -> None:
        """Ends the agent of a host with all its ranks, as a loss of power does."""
        host.kill()
        self.agents.pop(host).wait()

    def rows(self) -> list[dict[str, Any]]:
        """What the ranks have read so far, in order."""
        lines = [line for file in self.folder.glob("rows-*") for line in file.read_text().splitlines(keepends=True)]
        return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda row: row["time"])

    def reads(self, world: int) -> None:
        """Waits until ranks of this world size read steps that begin now."""
        since, until = time.time(), time.monotonic() + HANG_SECONDS
        while not any(row["world"] == world and row["time"] > since for row in self.rows()):
            assert time.monotonic() < until, f"no step in a world of {world}\n{self.logs()}"
            assert self.agents[self._meeting].poll() is None, self.logs()
            time.sleep(0.2)

    def ends_well(self) -> None:
        """Waits for the ends of all agents, and looks whether each sample was read once."""
        until = time.monotonic() + HANG_SECONDS
        for agent in self.agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, until - time.monotonic()))
        assert [agent.returncode for agent in self.agents.values()] == [0] * len(self.agents), self.logs()
        found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        for row in self.rows():
            found[row["epoch"], row["step"]].append(row)
        for epoch in range(EPOCHS):
            ids = []
            for step in range(-(-SAMPLES // BATCH)):
                rows = found[epoch, step]
                last = rows[-rows[-1]["world"] :]  # the others lost what they did, and did it again
                assert sorted(row["rank"] for row in last) == list(range(rows[-1]["world"]))
                ids += [each for row in last for each in row["ids"]]
            assert sorted(ids) == list(range(SAMPLES))

    def logs(self) -> str:
        """The last lines of the output of each host."""
        return "\n".join(f"{file.name}:\n{file.read_text()[-6000:]}" for file in sorted(self.folder.glob("*.log")))


@pytest.fixture
def job(lab: Lab, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job; its agents are killed with their hosts in the end."""
    made: list[Job] = []

    def make(nodes: str, *arguments: str, environment: Mapping[str, str] = NOTHING) -> Job:
        made.append(Job(lab, tmp_path, nodes, *arguments, environment=environment))
        return made[-1]

    yield make
    for each in made:
        for host in list(each.agents):
            each.kill(host)


def test_an_elastic_job_comes_back_on_all_hosts_after_a_death(job: Callable[..., Job]) -> None:
    comes_back(job("2", "none", "0.05", "kill", "2", "5"))


# A group that the script makes in a store that agents share: torch itself does not come back (old addresses are there).
@pytest.mark.parametrize(
    ("group", "environment"),
    [("none", {}), ("none", OWN_STORE), ("own", OWN_STORE)],
    ids=["shared store", "own store", "own store and group"],
)
@pytest.mark.parametrize("rank", ["0", "1", "3"])
@pytest.mark.parametrize("how", ["kill", "raise", "exit"])
def test_an_elastic_job_comes_back_after_each_kind_of_end(
    job: Callable[..., Job], how: str, rank: str, environment: Mapping[str, str], group: str
) -> None:
    comes_back(job("2", group, "0.05", how, rank, "5", environment=environment))


def comes_back(made: Job) -> None:
    for host in made.lab.hosts:
        made.start(host)
    made.ends_well()
    assert (made.folder / "ended").exists()


@pytest.mark.parametrize("group", ["none", "own"])
def test_hosts_that_leave_and_come_back_take_part_again(job: Callable[..., Job], group: str) -> None:
    made = job("1:2", group, "0.5", environment=OWN_STORE)
    first, second = made.lab.hosts
    made.start(first)
    made.start(second)
    made.reads(4)
    made.kill(second)
    made.reads(2)
    made.start(second)
    made.reads(4)
    made.ends_well()


def test_where_agents_share_a_store_that_left_with_its_host_the_error_has_the_setting(tmp_path: Path) -> None:
    with hosts(3) as lab:
        made = Job(lab, tmp_path, "1:3", "none", "0.5", meeting=1)
        for host in lab.hosts:
            made.start(host)
        made.reads(6)
        made.kill(lab.hosts[0])
        until = time.monotonic() + HANG_SECONDS
        while "start each with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" not in made.logs():
            assert time.monotonic() < until, made.logs()
            time.sleep(0.5)
        for host in lab.hosts[1:]:
            made.kill(host)
