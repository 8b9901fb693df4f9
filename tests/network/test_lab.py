"""The hosts of these tests: ranks train over them, and nothing of them stays."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

import torchdistinput as tdi
from tests.network.lab import Lab, hosts, run_on


def trained() -> tuple[str, list[list[int]]]:
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=30)
    loader = strategy.distribute_dataset([torch.arange(first, min(first + 4, 10)) for first in (0, 4, 8)])
    return socket.gethostname(), [batch.tolist() for batch in loader]


def test_ranks_on_several_hosts(lab: Lab) -> None:
    assert run_on(lab, trained) == [("hosta", [[0, 1], [4, 5], [8]]), ("hostb", [[2, 3], [6, 7], [9]])]


def failed(made: list[Lab]) -> None:
    with hosts(2) as lab:
        made.append(lab)
        lab.hosts[1].run("sleep 1000 >/dev/null 2>&1 &")
        assert lab.hosts[1].run("getent hosts hosta").split() == ["10.77.0.1", "hosta"]
        assert len(lab.hosts[1].pids()) == 1
        raise ZeroDivisionError


def test_hosts_are_removed_after_a_failure() -> None:
    made: list[Lab] = []
    with pytest.raises(ZeroDivisionError):
        failed(made)
    assert not any(Path(f"/proc/{each.pid}").exists() for each in (*made[0].hosts, made[0].switch))
    assert made[0].hosts[1].pids() == []
