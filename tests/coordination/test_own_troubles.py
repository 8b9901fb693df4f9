"""A rank that cannot connect for want of its own means says so, and the others are told whose trouble it is."""

from __future__ import annotations

import os
import resource
import socket
import time
from typing import Any

import pytest
import torch

import torchdistinput as tdi
from tests.support.platforms import linux_processes
from torchdistinput.testing import run_ranks


def without_descriptors(troubled: int) -> str:
    """One rank has none left."""
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=30)
    loader = strategy.distribute_dataset([torch.arange(4)])
    held: list[int] = []
    if strategy.input_pipeline_id == troubled:
        number = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
    try:
        assert len(list(loader)) == 1
    finally:
        for descriptor in held:
            os.close(descriptor)
    return "iterates"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc")
@pytest.mark.parametrize("troubled", [0, 1])
def test_an_epoch_begins_without_a_descriptor(troubled: int) -> None:
    assert run_ranks(2, without_descriptors, troubled) == ["iterates"] * 2


def within_ports(ports: str) -> str:
    os.environ["TORCHDISTINPUT_PORTS"] = ports
    try:
        tdi.Strategy(devices=["cpu"], timeout_seconds=20)
    except tdi.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def test_no_port_is_left() -> None:
    """Of two ranks only the first one listens."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        first, second = run_ranks(2, within_ports, f"{port}")
    trouble = f"this rank cannot listen for the others: TORCHDISTINPUT_PORTS={port} gave no"
    assert first.startswith(f"InputError: {trouble}")
    assert second.startswith(f"RankLost: Strategy(): rank 0 could not take part: {trouble}")


@pytest.mark.parametrize("ports", ["x", "1-", "5-4", "0-3", "65535-65536", "-3"])
def test_what_is_no_range_of_ports(ports: str) -> None:
    trouble = f"TORCHDISTINPUT_PORTS={ports!r} is no range of ports; write for example"
    first, second = run_ranks(2, within_ports, ports)
    assert first.startswith(f"InputError: {trouble}")
    assert second.startswith(f"RankLost: Strategy(): rank 0 could not take part: {trouble}")


def resolved_slowly(name: str, seconds: float) -> str:
    """The resolver answers after a minute, which is the bound on the launch."""
    os.environ["MASTER_ADDR"] = name

    def answer(*args: Any, **options: Any) -> Any:
        time.sleep(60)

    socket.getaddrinfo = answer
    try:
        tdi.Strategy(devices=["cpu"], timeout_seconds=seconds)
    except tdi.CoordinationTimeout as error:
        return str(error)
    return "made"


def test_a_slow_resolver_is_inside_the_bound() -> None:
    """And it is asked only for the name of the store's host, if that is no address."""
    first, second = run_ranks(2, resolved_slowly, "a-name.invalid", 1)
    assert first.startswith("Strategy(): an answer of the store at a-name.invalid did not come within")
    assert second.startswith("Strategy(): rank 0 did not come within 1 seconds")
    assert run_ranks(2, resolved_slowly, "", 30) == ["made"] * 2


def allowed_silence() -> list[float]:
    """For how many seconds the hosts of an iterator's connections may be silent, by the system."""
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=20)
    iterator = iter(strategy.distribute_dataset([torch.arange(4)] * 3, tdi.InputOptions(timeout_seconds=40)))
    next(iterator)
    peers = [name for name in os.listdir("/proc/self/fd") if "socket" in linked_to(name)]
    found = []
    for name in peers:
        with socket.socket(fileno=os.dup(int(name))) as each:
            if each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6):
                found.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1e3)
    iterator.close()
    return [seconds for seconds in found if seconds]  # those of torch have no bound


def linked_to(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the listing itself
        return ""


@linux_processes
def test_no_connection_is_given_up_before_the_timeout_of_the_input() -> None:
    assert all(seconds >= 40 for found in run_ranks(2, allowed_silence) for seconds in found)
