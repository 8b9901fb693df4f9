"""Over real ranks: iterators that follow each other, deaths, interruptions, late agreements; who connects with whom."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.launched import at_once
from tests.support.processes import run_to_the_end
from tests.support.socket_ranks import summed
from torchdistinput.coordination import launch, process_group
from torchdistinput.coordination.channel import Channel, lost
from torchdistinput.coordination.exchanges import StartedExchange, conclude
from torchdistinput.coordination.launch import find_members
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.coordination.tree import GAVE_UP, Left, Tree
from torchdistinput.errors import CoordinationTimeout, RankLost
from torchdistinput.testing import run_ranks

HANG_SECONDS = 20.0
WORLDS = [2, 3, 5, 10]


def make_ranks(timeout_seconds: float = 30.0) -> Ranks:
    """All meet with patience, also on a busy machine; what comes later has so long."""
    ranks = process_group.meet(None, find_members(None, None, None), 30.0)
    ranks._timeout_seconds = timeout_seconds
    dist.barrier()
    return ranks


def loses(channel: Channel) -> str:
    """The message with which an exchange ends."""
    try:
        conclude(summed(channel, [1]))
    except RankLost as error:
        return str(error)
    return "nothing was lost"


def agreed(ranks: Ranks) -> Channel:
    """The channel of an iterator."""
    ranks.gather_texts("", "a test")
    return ranks.open_channel(ranks.num_calls())


def one_after_the_other() -> list[tuple[list[int], int]]:
    """Three iterators, one after the other, beside another one."""
    ranks = make_ranks()
    other = agreed(ranks)
    found = []
    for turn in range(3):
        channel = agreed(ranks)
        total = conclude(summed(channel, [turn, dist.get_rank()]))
        found.append((total, conclude(summed(other, [10 * turn]))[0]))
        assert channel.waiting_since() is None
        channel.release()
        channel.release()
    return found


def after_abort() -> list[int]:
    ranks = make_ranks()
    dead = agreed(ranks)
    conclude(summed(dead, [1]))
    dead.abort("had enough")
    dead.release()
    return conclude(summed(agreed(ranks), [5]))


def forked() -> int:
    """The exit status of a fork that collects garbage with a group in it, which it has, but not its threads."""
    ranks = make_ranks()
    channel = agreed(ranks)
    conclude(summed(channel, [1]))
    channel.abort("left")
    dist.barrier()
    garbage: list[Any] = [ranks, channel]
    garbage.append(garbage)
    gc.disable()
    try:
        del ranks, channel, garbage
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
    finally:
        gc.enable()
    until = time.monotonic() + HANG_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            again = conclude(summed(agreed(make_ranks()), [1]))  # the fork has ended nothing
            return os.waitstatus_to_exitcode(status) + sum(again) - dist.get_world_size()
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def crossing() -> int:
    """Ranks 0 and 1 come again and again, each with little patience and at odd times, until they have met thrice."""
    ranks = make_ranks(timeout_seconds=0.3)
    met = 0
    for turn in range(60):
        time.sleep(0.02 * ((7 * turn + 5 * dist.get_rank() * turn) % 11))
        try:
            met += ranks.gather_texts(str(met), "a test") == [str(met)] * 2
        except CoordinationTimeout:
            continue
        if met == 3:
            break
    return met


def interrupted_twice() -> list[Any]:
    """Rank 0 is interrupted while it rests, and then where it may be in the middle of an exchange."""
    ranks = make_ranks()
    has_ended = []
    if dist.get_rank() == 0:
        for place, name in ((Tree, "rest"), (StartedExchange, "poll")):
            with mock.patch.object(place, name, interrupt), pytest.raises(KeyboardInterrupt):
                ranks.gather_texts("", "a test")
            has_ended.append(ranks._calls.channel.is_dead)
    dist.barrier()
    try:
        ranks.gather_texts("", "a test")
    except RankLost as error:
        return [has_ended, str(error)]
    return [has_ended, "nothing was lost"]


def another_call_after_one_was_given_up() -> str:
    """Rank 1 joins the call that rank 0 gave up, which another one of rank 0 cannot take the place of."""
    ranks = make_ranks(timeout_seconds=0.3)
    if ranks.rank == 0:
        with pytest.raises(CoordinationTimeout):
            ranks.gather_texts("facts", "a test")
    dist.barrier()
    ranks._timeout_seconds = HANG_SECONDS
    try:
        assert ranks.gather_texts("facts" if ranks.rank else "others", "a test") == ["facts", "facts"]
        ranks.gather_texts("more", "a test")
    except RankLost as error:
        return str(error)
    return "nothing was lost"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


ESTABLISHED = "01"


def sockets() -> int:
    """The connections of this process over TCP."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    established = {row[9] for row in rows if row[3] == ESTABLISHED}
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            target = os.readlink(descriptor)
            found += target.startswith("socket:[") and target[8:-1] in established
    return found


def settled(count: int) -> int:
    """The connections, once they are so many: the ends of one open and close at different moments."""
    until = time.monotonic() + HANG_SECONDS
    while sockets() != count and time.monotonic() < until:
        time.sleep(0.01)
    return sockets()


def connecting() -> list[int]:
    """The connections that are there with a strategy, a second one, a sum, two iterators; and once all has ended."""
    begun = sockets()
    launch._MET.clear()
    with mock.patch.object(launch, "_keep"):
        ranks = make_ranks()
    of_tree = len(ranks._tree.children) + (ranks.rank > 0)
    found = [settled(begun + of_tree)]
    ranks.gather_texts(f"{ranks.rank}", "a test")
    ranks.all_reduce_sum(torch.tensor([0.5]))
    channels = [agreed(ranks) for _ in range(2)]
    for channel in channels:
        conclude(summed(channel, [1, 2]))
        conclude(channel.gather("x" * 10_000))
    found.append(settled(begun + of_tree))
    dist.barrier()
    tree = ranks._tree
    del ranks, channel, channels
    tree.end()
    found.append(settled(begun))
    dist.barrier()
    return [found[0] - begun - of_tree, found[1] - begun - of_tree, found[2] - begun]


def a_second_strategy_asks_no_store() -> list[int]:
    """And it has channels of its own."""
    first = make_ranks()
    with mock.patch.object(process_group, "store_of_default_group", interrupt):
        second = make_ranks()
    assert first._tree is second._tree
    found = [agreed(each) for each in (second, first, second)]
    return [conclude(summed(each, [number]))[0] for number, each in enumerate(found)]


def over_an_interface() -> tuple[list[int], list[float]]:
    launch._MET.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
        ranks = make_ranks()
        total = ranks.all_reduce_sum(torch.tensor([0.5], dtype=torch.bfloat16))
        return conclude(summed(agreed(ranks), [1, ranks.rank])), total.tolist()


ONE_BY_ONE = "iterators follow each other beside another one"
ABORTED = "an aborted channel ends no other one"
FORKED = "a fork ends no connection of its parent"
CONNECTED = "a rank connects with its parent and its children, once, and with no others"
SECOND = "a second strategy has the same connections"
INTERFACE = "ranks connect over the interface that gloo is told"
CROSSING = "ranks that give up and come back at odd times meet in the end"
ANOTHER = "a call that was given up is continued by the same call only"
INTERRUPTED = "only an interruption that loses nothing can be continued"
SCENES: dict[str, Callable[[], Any]] = {
    CONNECTED: connecting,
    ONE_BY_ONE: one_after_the_other,
    SECOND: a_second_strategy_asks_no_store,
    INTERFACE: over_an_interface,
    ABORTED: after_abort,
    FORKED: forked,
}
OF_TWO: dict[str, Callable[[], Any]] = {
    CROSSING: crossing,
    INTERRUPTED: interrupted_twice,
    ANOTHER: another_call_after_one_was_given_up,
}


def expected(scene: str, world: int, rank: int) -> Any:
    """What a rank saw."""
    ids = sum(range(world))
    lost = "a test: rank 0 {} interrupted by KeyboardInterrupt in a test."
    return {
        ONE_BY_ONE: [([turn * world, ids], 10 * turn * world) for turn in range(3)],
        ABORTED: [5 * world],
        FORKED: 0,
        CONNECTED: [0, 0, 0],
        SECOND: [0, world, 2 * world],
        INTERFACE: ([world, ids], [0.5 * world]),
        CROSSING: 3,
        ANOTHER: (
            "a test: rank 0 cannot go on: made another call (a test) after it had given up waiting in the middle of "
            "one.",
            "a test: rank 0 made another call (a test) after it had given up waiting in the middle of one. Every rank "
            "must read the same number of steps.",
        )[rank > 0],
        INTERRUPTED: (
            [[False, True], lost.format("cannot go on: was")],
            [[], lost.format("was") + " Every rank must read the same number of steps."],
        )[rank > 0],
    }[scene]


def play() -> dict[str, Any]:
    """One rank: all scenes, one after the other."""
    scenes = {**SCENES, **(OF_TWO if dist.get_world_size() == 2 else {})}
    return {name: scene() for name, scene in scenes.items()}


@pytest.fixture(scope="module")
def played() -> dict[int, list[dict[str, Any]]]:
    """By world, what each rank saw. A launch takes longer than a scene."""
    return at_once({world: partial(run_ranks, world, play, timeout_seconds=180) for world in WORLDS})


@pytest.mark.parametrize(("world", "scene"), [(2, scene) for scene in OF_TWO] + [*itertools.product(WORLDS, SCENES)])
def test_over_real_ranks(world: int, scene: str, played: dict[int, list[dict[str, Any]]]) -> None:
    assert [rank[scene] for rank in played[world]] == [expected(scene, world, rank) for rank in range(world)]


def test_the_error_of_a_rank_that_was_late_says_how_to_wait_longer() -> None:
    left = Left(0, GAVE_UP, "gave up waiting for rank 7 at step 3 after 8 seconds")
    assert str(lost(left, [5, 7])) == (
        "rank 5 gave up waiting for rank 7 at step 3 after 8 seconds. If the late rank is only slow, raise "
        "timeout_seconds; else look at what it does (py-spy dump --pid)."
    )


BETWEEN_SUMS, IN_AN_AGREEMENT = "between sums", "in an agreement"


def dies(rank: int, world: int, folder: str, victim: int, moment: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ranks = make_ranks(30.0)  # its end would be that of its channels
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim and moment == IN_AN_AGREEMENT:
                patch.setattr(ranks, "gather_texts", killed)
            ranks.gather_texts("", "a test")
        channel = ranks.open_channel(ranks.num_calls())
        conclude(summed(channel, [1]))
        if rank == victim:
            time.sleep(0.3)
            killed()
        message = loses(channel)
    except RankLost as error:
        message = str(error)
    Path(folder, f"{rank}.txt").write_text(message)
    os._exit(0)  # the default group has lost a member: what its own teardown does is not the matter here


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("world", "victim", "moment"),
    [(5, 4, BETWEEN_SUMS), (2, 0, BETWEEN_SUMS), (10, 8, BETWEEN_SUMS), (5, 0, IN_AN_AGREEMENT)],
)
def test_a_rank_that_is_killed_is_named_by_all_survivors(world: int, victim: int, moment: str, tmp_path: Path) -> None:
    run_to_the_end(dies, [(rank, world, str(tmp_path), victim, moment) for rank in range(world)])
    for rank in set(range(world)) - {victim}:
        assert f"rank {victim} died or lost its connection" in (tmp_path / f"{rank}.txt").read_text()
