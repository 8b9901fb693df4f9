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
from torchdistinput.testing.ranks import free_port


def without_descriptors(troubled: int) -> str:
    """One rank has none left when an epoch opens connections."""
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=30)
    loader = strategy.distribute_dataset([torch.arange(4)])
    held: list[int] = []
    if strategy.input_pipeline_id == troubled:
        number = len(os.listdir("/proc/self/fd")) + 3
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
        while True:
            try:
                held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
    began = time.monotonic()
    try:
        next(iter(loader))
    except tdi.InputError as error:
        assert time.monotonic() - began < 20
        return f"{type(error).__name__}: {error}"
    finally:
        for descriptor in held:
            os.close(descriptor)
    return "iterates"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc")
@pytest.mark.parametrize("troubled", [0, 1])
def test_no_descriptor_is_left(troubled: int) -> None:
    told = run_ranks(2, without_descriptors, troubled)
    trouble = f"rank {troubled} can open no connection: Too many open files."
    assert told[troubled].startswith(f"InputError: iter(): {trouble}"), told
    assert told[1 - troubled].startswith(f"RankLost: iter(): rank {troubled} could not take part: {trouble}"), told


def within_ports(ports: str) -> str:
    os.environ["TORCHDISTINPUT_PORTS"] = ports
    try:
        tdi.Strategy(devices=["cpu"], timeout_seconds=20)
    except tdi.InputError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def test_no_port_is_left() -> None:
    port = free_port()
    told = sorted(run_ranks(2, within_ports, f"{port}"))
    assert told[0].startswith(
        f"InputError: this rank cannot listen for the others: TORCHDISTINPUT_PORTS={port} gave no"
    )
    assert told[1].startswith("RankLost: Strategy(): rank ")
    assert f"could not take part: this rank cannot listen for the others: TORCHDISTINPUT_PORTS={port}" in told[1]


@pytest.mark.parametrize("ports", ["x", "1-", "5-4", "0-3", "65535-65536", "-3"])
def test_what_is_no_range_of_ports(ports: str) -> None:
    for told in run_ranks(2, within_ports, ports):
        assert told.startswith(f"InputError: TORCHDISTINPUT_PORTS={ports!r} is no range of ports; write for example")


def resolved_slowly(name: str) -> tuple[float, str]:
    """The resolver answers after a minute."""
    os.environ["MASTER_ADDR"] = name

    def answer(*args: Any, **options: Any) -> Any:
        time.sleep(60)

    socket.getaddrinfo = answer
    began = time.monotonic()
    try:
        tdi.Strategy(devices=["cpu"], timeout_seconds=1)
    except tdi.CoordinationTimeout as error:
        return time.monotonic() - began, str(error)
    return time.monotonic() - began, "made"


def test_a_slow_resolver_is_inside_the_bound() -> None:
    """And it is asked only for the name of the store's host, if that is no address."""
    for seconds, told in run_ranks(2, resolved_slowly, "a-name.invalid"):
        assert told.startswith("Strategy(): the store at a-name.invalid did not answer within")
        assert seconds < 20
    assert [told for _, told in run_ranks(2, resolved_slowly, "")] == ["made"] * 2


def allowed_silence() -> list[float]:
    """For how many seconds the hosts of an iterator's connections may be silent, by the system."""
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=3)
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
@pytest.mark.xfail(
    strict=True,
    reason="A socket has a bound of its own, by the timeout of the strategy: a network that is away for less than a "
    "longer InputOptions(timeout_seconds=) ends with a rank that died. Where only the wait has a bound, nothing ends.",
)
def test_no_connection_is_given_up_before_the_timeout_of_the_input() -> None:
    assert all(seconds >= 40 for found in run_ranks(2, allowed_silence) for seconds in found)
