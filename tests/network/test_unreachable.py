"""Networks that are away for a while, or for good: what is waited for, and what an error names."""

from __future__ import annotations

import random
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdistinput as tdi
from tests.network.lab import PORT, Host, Lab, hosts, run_on
from torchdistinput.coordination.meeting import Meeting, Met

BATCHES = [torch.arange(first, first + 4) for first in range(0, 24, 4)]
ROUTE = "10.77.0.0/24"


def outcome(train: Any, *args: Any) -> Any:
    """What the rank returns, or the error with the seconds until it came."""
    began = time.monotonic()
    try:
        return train(*args)
    except tdi.InputError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began


def away_during_the_meeting(how: str) -> list[list[int]]:
    """Rank 0 waits in ``Strategy()`` for rank 1, which is late, and its network is away for 4 seconds."""
    wait_for_all = Meeting.wait_for_all

    def away(meeting: Meeting, *args: Any) -> Met:
        if meeting._tree.rank == 0:
            subprocess.run(f"ip {how} {ROUTE}", shell=True, check=True)
            undo = f"ip route replace {ROUTE} dev d0"
            threading.Timer(4.0, subprocess.run, [undo], {"shell": True, "check": True}).start()
        else:
            time.sleep(2.0)
        return wait_for_all(meeting, *args)

    Meeting.wait_for_all = away  # type: ignore[method-assign, assignment]
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    return [batch.tolist() for batch in strategy.distribute_dataset(BATCHES)]


WHOLE = [[[first, first + 1] for first in range(0, 24, 4)], [[first + 2, first + 3] for first in range(0, 24, 4)]]


@pytest.mark.parametrize("how", ["route del", "route replace unreachable", "route replace blackhole"])
def test_a_network_that_is_away_for_seconds(how: str, lab: Lab) -> None:
    assert run_on(lab, outcome, away_during_the_meeting, how) == WHOLE


def trained(epochs: int, folder: Path) -> list[list[list[int]]]:
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    loader = strategy.distribute_dataset(BATCHES)
    found: list[list[list[int]]] = []
    for _ in range(epochs):
        found.append([])
        for batch in loader:
            found[-1].append(batch.tolist())
            time.sleep(0.1)
    (folder / "ended").touch()
    return found


def test_a_network_that_comes_and_goes(lab: Lab, tmp_path: Path) -> None:
    dice = random.Random(1)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run_on, lab, trained, 12, tmp_path)
        while not (tmp_path / "ended").exists() and not result.done():
            time.sleep(dice.uniform(0.2, 2.0))
            lab.unplug(1)
            time.sleep(dice.uniform(0.2, 3.0))
            lab.plug_in(1)
        assert result.result() == [[rank] * 12 for rank in WHOLE]


def made(seconds: float) -> str:
    tdi.Strategy(devices=["cpu"], timeout_seconds=seconds)
    return "made"


def firewalled(host: Host, ports: str, others: str) -> None:
    """Lets a host take connections at some ports only."""
    host.run(
        "nft add table inet f && nft 'add chain inet f in { type filter hook input priority 0; policy accept; }' && "
        "nft add rule inet f in iifname lo accept && nft add rule inet f in ct state established,related accept && "
        f"nft 'add rule inet f in tcp dport {{ {ports} }} accept' && nft add rule inet f in meta l4proto tcp {others}"
    )


WAY_OUT = "TORCHDISTINPUT_PORTS=29600-29700, or name the interface in GLOO_SOCKET_IFNAME."
REJECTS = {
    "drop": "no answer",
    "reject with icmp type admin-prohibited": "No route to host",
    "reject with tcp reset": "Connection refused",
}


@pytest.mark.parametrize("others", REJECTS)
def test_a_firewall_is_named_with_the_way_out(others: str, lab: Lab, nft: None) -> None:
    """It lets in the port of the store only. The ranks dial those above them."""
    firewalled(lab.hosts[0], str(PORT), others)
    (first, _), (second, _) = run_on(lab, outcome, made, 10.0)
    late = r"CoordinationTimeout: Strategy\(\): rank {} did not come within 10 seconds"
    assert re.match(late.format(1), first)
    reason = rf": rank 0 was here, but does not answer at 10.77.0.1:\d+ \({REJECTS[others]}\). A firewall, "
    assert re.match(late.format(0) + reason, second)
    assert second.endswith(WAY_OUT)


def test_an_interface_of_a_dead_network_is_named(lab: Lab) -> None:
    """The network for administration is there on both hosts, and its packets go nowhere."""
    for host in lab.hosts:
        host.run(
            "ip link add m0 type veth peer name m1 && ip link set m1 up && "
            f"ip addr add 10.66.0.{host.address[-1]}/24 dev m0 && ip link set m0 up"
        )
    _, (told, _) = run_on(lab, outcome, made, 10.0, environment={"GLOO_SOCKET_IFNAME": "m0"})
    assert re.search(r"rank 0 was here, but does not answer at 10.66.0.1:\d+ \((No route|no answer)", told)
    assert run_on(lab, made, 20.0) == ["made"] * 2


def test_a_host_whose_own_name_is_a_loopback_address() -> None:
    """As on Debian. The store is given by its name, as torchrun does."""
    with hosts(2, ["127.0.1.1 hosta", "10.77.0.1 hosta"]) as lab:
        assert run_on(lab, made, 20.0, environment={"MASTER_ADDR": "hosta"}) == ["made"] * 2


def partitioned(lab: Lab) -> str:
    tdi.Strategy(devices=["cpu"])  # all meet with patience: they come at different times
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=8)
    loader = strategy.distribute_dataset(BATCHES, tdi.InputOptions(prefetch=0))
    for number, _ in enumerate(loader):
        if number == 2 and strategy.input_pipeline_id == 1:
            lab.unplug(1)
    return "not noticed"


def test_a_partition_inside_an_epoch_is_no_busy_rank(lab: Lab) -> None:
    for rank, (told, _) in enumerate(run_on(lab, outcome, partitioned, lab)):
        assert re.match(rf"CoordinationTimeout: rank {1 - rank} did not come to the exchange at step \d within 8", told)
        assert "its host has acknowledged nothing for" in told


def test_a_range_of_ports_passes_a_firewall(lab: Lab, nft: None) -> None:
    firewalled(lab.hosts[0], f"{PORT}, 29600-29601", "drop")
    ports = {"TORCHDISTINPUT_PORTS": "29600-29601"}
    assert run_on(lab, made, 20.0, environment=ports) == ["made"] * 2
