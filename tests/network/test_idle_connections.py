"""Connections that are idle for longer than a firewall remembers them, and connections that are lost meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import torchdistinput as tdi
from tests.network.lab import Host, Lab, run_on
from torchdistinput.coordination import tree

REMEMBERED_SECONDS = 4
FORGETFUL = f"""
sysctl -q -w net.netfilter.nf_conntrack_tcp_timeout_established={REMEMBERED_SECONDS} &&
sysctl -q -w net.netfilter.nf_conntrack_tcp_loose=0 && nft add table inet f &&
nft 'add chain inet f in {{ type filter hook input priority 0; policy accept; }}' &&
nft add rule inet f in iifname lo accept && nft add rule inet f in ct state established,related accept &&
nft 'add rule inet f in tcp flags & (syn|ack) == syn accept' && nft add rule inet f in meta l4proto tcp drop
"""


def two_epochs(between: Callable[[Any], None]) -> list[int]:
    tree._KEEPALIVE_SECONDS = 1  # type: ignore[misc]
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=20)
    loader = strategy.distribute_dataset([torch.arange(4)] * 4)
    steps = [0, 0]
    for epoch in range(2):
        for _ in loader:
            steps[epoch] += 1
            if steps == [2, 0]:
                between(strategy)
    return steps


def idle(strategy: Any) -> None:
    time.sleep(2.5 * REMEMBERED_SECONDS)


def test_a_firewall_does_not_forget_idle_connections(lab: Lab, nft: None) -> None:
    for host in lab.hosts:
        host.run(FORGETFUL)
    assert run_on(lab, two_epochs, idle) == [[4, 4]] * 2


class Cut:
    """A firewall that has lost the connection, and resets it: no other one is made."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __call__(self, strategy: Any) -> None:
        if strategy.input_pipeline_id == 1:
            (link,) = strategy._ranks._tree.links()
            port = link.socket.getsockname()[1]
            others = "tcp flags & rst == 0 reject with tcp reset"  # its resets pass both chains, too
            self._host.run(
                "nft add table inet f && "
                "nft 'add chain inet f in { type filter hook input priority 0; policy accept; }' && "
                "nft 'add chain inet f out { type filter hook output priority 0; policy accept; }' && "
                f"nft 'add rule inet f in tcp dport {port} {others}' && "
                f"nft 'add rule inet f out tcp sport {port} {others}'"
            )


def ended(between: Callable[[Any], None]) -> str:
    try:
        two_epochs(between)
    except tdi.RankLost as error:
        return str(error)
    return "nothing was lost"


def test_a_connection_that_is_reset_ends_on_both_ranks(lab: Lab, nft: None) -> None:
    told = run_on(lab, ended, Cut(lab.hosts[1]))
    assert [f"rank {1 - rank} died or lost its connection" in text for rank, text in enumerate(told)] == [True] * 2


def away_for_longer_than_the_strategy_waits(hosts: Lab) -> int:
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=3)
    steps = 0
    for _ in strategy.distribute_dataset([torch.arange(4)] * 12, tdi.InputOptions(prefetch=0, timeout_seconds=40)):
        steps += 1
        if steps == 3 and strategy.rank == 1:
            hosts.unplug(1)
            threading.Timer(7.0, hosts.plug_in, (1,)).start()
    return steps


def test_a_network_that_is_away_for_less_than_the_timeout_of_the_input_ends_nothing(lab: Lab) -> None:
    assert run_on(lab, away_for_longer_than_the_strategy_waits, lab) == [12, 12]
