"""Over real ranks: who connects with whom, and over which interface."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchdistinput.backends.collectives import ProcessGroupRanks
from torchdistinput.backends.doubling import partners
from torchdistinput.backends.exchanges import conclude
from torchdistinput.backends.launch import find_members
from torchdistinput.errors import RankLost
from torchdistinput.testing import run_ranks

HANG_SECONDS = 20.0
WORLDS = [2, 7]
ESTABLISHED = "01"


def connections() -> int:
    """Of this process, those over TCP."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    established = {row[9] for row in rows if row[3] == ESTABLISHED}
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            target = os.readlink(descriptor)
            found += target.startswith("socket:[") and target[8:-1] in established
    return found


def settled(count: int) -> int:
    """The connections, once they are so many: the last bytes of one are on their way when its first message comes."""
    until = time.monotonic() + HANG_SECONDS
    while connections() != count and time.monotonic() < until:
        time.sleep(0.01)
    return connections()


@contextlib.contextmanager
def on_hosts_of_their_own() -> Iterator[None]:
    """As if no two ranks shared memory."""

    def not_found(process: int) -> int:
        raise ProcessLookupError(f"process {process} is on another host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pidfd_open", not_found)
        yield


def connecting() -> tuple[list[int], list[int]]:
    """The connections that are added by a strategy, its first agreement, and two channels; and how many may be."""
    with on_hosts_of_their_own():
        begun = connections()
        ranks = ProcessGroupRanks(None, find_members(None, None, None), 60.0)
        found = [settled(begun) - begun]
        ranks.gather_texts(f"{ranks.rank}", "a test")
        in_the_ring = min(2, ranks.num_ranks - 1)
        found.append(settled(begun + in_the_ring) - begun)
        in_a_channel = len(partners(ranks.rank, ranks.num_ranks))
        for number in (0, 1):
            channel = ranks.open_channel(number)
            conclude(channel.exchange([1, 2]))
            conclude(channel.gather("x" * 10_000))
            found.append(settled(begun + in_the_ring + (number + 1) * in_a_channel) - begun)
        dist.barrier()
        return found, [0, in_the_ring, in_the_ring + in_a_channel, in_the_ring + 2 * in_a_channel]


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_connects_with_those_that_it_has_messages_for_and_with_no_others(world: int) -> None:
    for found, expected in run_ranks(world, connecting, timeout_seconds=120):
        assert found == expected


def over(interfaces: str) -> tuple[list[int], str, list[float]]:
    """A sum, and how a wait ends that the last rank aborts; also that of a reduction."""
    with on_hosts_of_their_own(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", interfaces)
        ranks = ProcessGroupRanks(None, find_members(None, None, None), 60.0)
        channel = ranks.open_channel(0)
        found = conclude(channel.exchange([1, ranks.rank]))
        told: list[str] = []

        def wait() -> None:
            try:
                conclude(channel.exchange([1, 2]))
            except RankLost as error:
                told.append(str(error))

        waiting = threading.Thread(target=wait, daemon=True)
        if ranks.rank == ranks.num_ranks - 1:
            time.sleep(0.3)
            channel.abort("had enough")
        waiting.start()
        waiting.join(HANG_SECONDS)
        total = ranks.all_reduce_sum(torch.tensor([0.5])).tolist()
        dist.barrier()
        return found, "".join(told), total


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_waits_end_over_any_number_of_interfaces(interfaces: str) -> None:
    for found, told, total in run_ranks(3, over, interfaces, timeout_seconds=120):
        assert found == [3, 3]
        assert "had enough" in told
        assert total == [1.5]


def nowhere() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
        with pytest.raises(RuntimeError) as caught:
            ProcessGroupRanks(None, find_members(None, None, None), 60.0)
        return str(caught.value)


def test_an_interface_that_is_not_there_is_named() -> None:
    for told in run_ranks(2, nowhere):
        assert "no-such-interface" in told
