"""Over real ranks: sums, texts, aborts, deaths, late ranks, interruptions; who connects with whom."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.launched import at_once
from tests.support.processes import run_to_the_end
from torchdistinput.coordination import connections
from torchdistinput.coordination.channel import lost
from torchdistinput.coordination.connections import AbortMessage
from torchdistinput.coordination.endpoint import Endpoint
from torchdistinput.coordination.exchanges import StartedExchange, conclude
from torchdistinput.coordination.launch import find_members
from torchdistinput.coordination.process_group import Channel, ProcessGroupRanks
from torchdistinput.coordination.recursive_doubling import partners
from torchdistinput.errors import CoordinationTimeout, RankLost
from torchdistinput.testing import run_ranks

HANG_SECONDS = 20.0
RELEASE_SECONDS = 5.0
WORLDS = [2, 3, 5]
QUITTERS = {2: [0, 1], 3: [2], 5: [1, 4]}
LATECOMERS = {2: 1, 3: 0, 5: 4}

Played = dict[int, list[dict[str, Any]]]
"""By world, what each rank saw in each scene."""


def play() -> dict[str, Any]:
    """One rank: all scenes, one after the other."""
    world = dist.get_world_size()
    found: dict[str, Any] = {}
    found.update({"sums": sums(), "texts": texts(), "reused": reused(), "connecting": connecting()})
    found.update({f"aborted by {quitter}": aborted(quitter) for quitter in QUITTERS[world]})
    found.update({f"over {interfaces}": over(interfaces) for interfaces in ("lo", "lo,lo")})
    found["late"] = late(LATECOMERS[world])
    found["after an abort"] = after_abort()
    found["absent once"] = absent_once()
    found["forked"] = forked()
    found["silent"] = of_whom_a_silence_is_told()
    if world == 2:
        found["taking turns"] = taking_turns()
        found["crossing"] = crossing()
        found["interrupted twice"] = interrupted_twice()
    return found


@pytest.fixture(scope="module")
def played() -> Played:
    """A launch takes longer than a scene."""
    return at_once({world: partial(run_ranks, world, play, timeout_seconds=180) for world in WORLDS})


def make_ranks(timeout_seconds: float = 30.0) -> ProcessGroupRanks:
    """All meet with patience, also on a busy machine; what comes later has so long."""
    ranks = ProcessGroupRanks(None, find_members(None, None, None), 30.0)
    ranks._timeout_seconds = timeout_seconds
    dist.barrier()
    return ranks


def loses(channel: Channel) -> str:
    """The message with which an exchange ends."""
    try:
        conclude(channel.exchange([1]))
    except RankLost as error:
        return str(error)
    return "nothing was lost"


def words_of(rank: int, number: int, length: int) -> list[int]:
    return [(rank + 1) * 1000**k % 10**9 + number for k in range(length)]


def sums() -> bool:
    ranks = make_ranks()  # its end would be that of its channels
    channel = ranks.open_channel(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    good = (channel.rank, channel.num_ranks) == (rank, world)
    for number in range(20):
        for length in (4, 34, 1):
            expected = [
                sum(column) for column in zip(*(words_of(r, number, length) for r in range(world)), strict=True)
            ]
            good = good and conclude(channel.exchange(words_of(rank, number, length))) == expected
    largest = 2**62 // world
    good = good and conclude(channel.exchange([largest, 0])) == [largest * world, 0]
    channel.release()
    return good


@pytest.mark.parametrize("world", WORLDS)
def test_sums_are_right_at_every_world_size(world: int, played: Played) -> None:
    assert [rank["sums"] for rank in played[world]] == [True] * world


TEXTS = ["", "  two blanks, a line\n", "naïve ☃ 𝄞", "\udcff", "x" * 100_000]


def texts() -> tuple[list[list[str]], list[list[str]]]:
    """The ranks bring one of the texts each, by turns; on a channel, and outside."""
    ranks = make_ranks()
    channel = ranks.open_channel(0)
    mine = [TEXTS[(dist.get_rank() + turn) % len(TEXTS)] for turn in range(len(TEXTS))]
    inside = [conclude(channel.gather(text)) for text in mine] + [conclude(channel.gather(""))]
    outside = [ranks.gather_texts(text, "a test") for text in mine] + [ranks.gather_texts("", "a test")]
    channel.release()
    return inside, outside


@pytest.mark.parametrize("world", WORLDS)
def test_texts_of_any_length_come_through_untouched(world: int, played: Played) -> None:
    expected = [[TEXTS[(rank + turn) % len(TEXTS)] for rank in range(world)] for turn in range(len(TEXTS))]
    expected.append([""] * world)
    for inside, outside in (rank["texts"] for rank in played[world]):
        assert inside == expected
        assert outside == expected


def aborted(quitter: int) -> tuple[str, float]:
    """All but one rank wait in an exchange in the background; that one aborts from its main thread, after a while."""
    ranks = make_ranks()  # its end would be that of its channels
    channel = ranks.open_channel(0)
    conclude(channel.exchange([1]))
    told: list[str] = []
    if dist.get_rank() == quitter:
        time.sleep(0.3)
        began = time.time()
        channel.abort("stopped reading after 4 step(s)")
        told.append(loses(channel))
    else:
        waiting = threading.Thread(target=lambda: told.append(loses(channel)))
        waiting.start()
        waiting.join(HANG_SECONDS)
        began = 0.0
    ended = time.time()
    channel.abort("again")
    dist.barrier()
    return told[0], began if dist.get_rank() == quitter else ended


@pytest.mark.parametrize(
    ("world", "quitter"), [(world, quitter) for world, quitters in QUITTERS.items() for quitter in quitters]
)
def test_an_abort_releases_every_waiting_rank_and_tells_the_reason(world: int, quitter: int, played: Played) -> None:
    found = [rank[f"aborted by {quitter}"] for rank in played[world]]
    began = found[quitter][1]
    for rank, (message, ended) in enumerate(found):
        if rank == quitter:
            assert message == f"rank {quitter} cannot go on: stopped reading after 4 step(s)."
            continue
        assert f"rank {quitter} stopped reading after 4 step(s)" in message
        assert ended - began < RELEASE_SECONDS


def late(latecomer: int) -> list[int]:
    """One rank comes when the others have found out who is late."""
    ranks = make_ranks()  # its end would be that of its channels
    channel = ranks.open_channel(0)
    conclude(channel.exchange([1]))
    if dist.get_rank() == latecomer:
        dist.barrier()
        conclude(channel.exchange([1]))
        return [latecomer]
    waiting = threading.Thread(target=lambda: conclude(channel.exchange([1])))
    waiting.start()
    until = time.monotonic() + HANG_SECONDS
    while (found := channel.late()) != [latecomer] and time.monotonic() < until:
        time.sleep(0.05)
    since = channel.waiting_since()
    assert since is not None
    assert since < time.monotonic()
    dist.barrier()
    waiting.join(HANG_SECONDS)
    assert channel.waiting_since() is None
    return found


def test_the_error_of_a_rank_that_was_late_says_how_to_wait_longer() -> None:
    message = AbortMessage(0, "gave up waiting for rank 7 at step 3 after 8 seconds")
    assert str(lost(message, [5, 7])) == (
        "rank 5 gave up waiting for rank 7 at step 3 after 8 seconds. If the late rank is only slow, raise "
        "timeout_seconds; else look at what it does (py-spy dump --pid)."
    )


@pytest.mark.parametrize(("world", "latecomer"), LATECOMERS.items())
def test_a_late_rank_is_told_from_those_that_wait_with_us(world: int, latecomer: int, played: Played) -> None:
    assert [rank["late"] for rank in played[world]] == [[latecomer]] * world


def reused() -> list[tuple[list[int], list[int], int]]:
    """Three iterators, one after the other, with another one alive through the first two."""
    ranks = make_ranks()
    other = ranks.open_channel(ranks.free_channels()[0])
    found = []
    for turn in range(3):
        free = ranks.free_channels()
        channel = ranks.open_channel(free[0])
        total = conclude(channel.exchange([turn, dist.get_rank()]))
        found.append((free, total, conclude(other.exchange([10 * turn]))[0]))
        channel.release()
        channel.release()
        if turn == 1:
            other.release()
            other = ranks.open_channel(2)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_a_released_channel_is_used_again_and_keeps_in_step(world: int, played: Played) -> None:
    ids = sum(range(world))
    expected = [([1], [0, ids], 0), ([1, 2], [world, ids], 10 * world), ([0, 1, 3], [2 * world, ids], 20 * world)]
    assert [rank["reused"] for rank in played[world]] == [expected] * world


def after_abort() -> list[int]:
    ranks = make_ranks()
    dead = ranks.open_channel(0)
    conclude(dead.exchange([1]))
    dead.abort("had enough")
    dead.release()
    free = ranks.free_channels()
    ranks.gather_texts("", "a test")
    return [*free, *conclude(ranks.open_channel(free[-1]).exchange([5]))]


@pytest.mark.parametrize("world", WORLDS)
def test_an_aborted_channel_is_not_used_again(world: int, played: Played) -> None:
    assert [rank["after an abort"] for rank in played[world]] == [[1, 5 * world]] * world


def forked() -> int:
    """The exit status of a fork that collects garbage with a group in it, which it has, but not its threads."""
    ranks = make_ranks()
    channel = ranks.open_channel(0)
    conclude(channel.exchange([1]))
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
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


@pytest.mark.parametrize("world", WORLDS)
def test_a_fork_ends_no_group_of_its_parent(world: int, played: Played) -> None:
    assert [rank["forked"] for rank in played[world]] == [0] * world


def absent_once() -> tuple[str, list[str]]:
    """Rank 1 comes when the others have given up once; then all meet."""
    ranks = make_ranks(timeout_seconds=4.0)
    message = ""
    if dist.get_rank() == 1:
        dist.barrier()
    else:
        try:
            ranks.gather_texts("first", "a test")
        except CoordinationTimeout as error:
            message = str(error)
        dist.barrier()
    told = ranks.gather_texts(f"rank {dist.get_rank()}", "a test")
    assert ranks.gather_texts("once more", "a test") == ["once more"] * dist.get_world_size()
    return message, told


@pytest.mark.parametrize("world", WORLDS)
def test_an_absent_rank_is_named_and_the_agreement_can_be_repeated(world: int, played: Played) -> None:
    for rank, (message, told) in enumerate(each["absent once"] for each in played[world]):
        if rank != 1:
            assert "a test: rank 1 did not come within 4 seconds" in message
        assert told == [f"rank {each}" for each in range(world)]


def taking_turns() -> str:
    """Rank 1 comes when rank 0 has given up, and then waits in vain itself."""
    ranks = make_ranks(timeout_seconds=1.0)
    message = ""
    if dist.get_rank() == 1:
        dist.barrier()
    try:
        ranks.gather_texts("", "a test")
    except CoordinationTimeout as error:
        message = str(error)
    if dist.get_rank() == 0:
        dist.barrier()
    dist.barrier()
    return message


def test_a_rank_that_gave_up_counts_as_absent(played: Played) -> None:
    first, second = (rank["taking turns"] for rank in played[2])
    assert "rank 1 did not come" in first
    assert "rank 0 did not come" in second


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


def test_ranks_that_give_up_and_come_back_at_odd_times_meet_in_the_end(played: Played) -> None:
    assert [rank["crossing"] for rank in played[2]] == [3, 3]


def interrupted_twice() -> tuple[list[bool], str]:
    """Rank 0 is interrupted while it rests, and then where it may be in the middle of a message."""
    ranks = make_ranks()
    has_ended = []
    if dist.get_rank() == 0:
        for place, name in ((connections, "wait_for_sockets"), (StartedExchange, "poll")):
            with mock.patch.object(place, name, interrupt), pytest.raises(KeyboardInterrupt):
                ranks.gather_texts("", "a test")
            has_ended.append(ranks._control().is_dead)
    dist.barrier()
    try:
        ranks.gather_texts("", "a test")
    except RankLost as error:
        return has_ended, str(error)
    return has_ended, "nothing was lost"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_only_an_interruption_that_loses_nothing_can_be_continued(played: Played) -> None:
    (has_ended, first), (_, second) = (rank["interrupted twice"] for rank in played[2])
    assert has_ended == [False, True]
    assert first == "a test: rank 0 cannot go on: was interrupted by KeyboardInterrupt in a test."
    assert second.startswith("a test: rank 0 was interrupted by KeyboardInterrupt in a test.")


def of_whom_a_silence_is_told() -> list[str]:
    """What is told of the rank that was awaited last in an agreement, and of others, which ``iter`` waits for."""
    ranks = make_ranks()
    ranks.gather_texts("", "a test")
    awaited = ranks._control().late()
    others = sorted({*range(ranks.num_ranks)} - {ranks.rank, *awaited})
    with mock.patch.object(connections.Connections, "silent_seconds", return_value=60.0):
        return [ranks._unreached(each) for each in (awaited, others)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_silence_is_told_of_the_rank_that_is_silent(world: int, played: Played) -> None:
    silence = "its host has acknowledged nothing for 60 seconds, so the host or the network is down"
    assert [rank["silent"] for rank in played[world]] == [[silence, ""]] * world


BETWEEN_SUMS, BEFORE_IT_DIALS, IN_AN_AGREEMENT = "between sums", "before it dials", "in an agreement"


def dies(rank: int, world: int, folder: str, victim: int, moment: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ranks = make_ranks(30.0)  # its end would be that of its channels
    started = time.monotonic()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == victim and moment == BEFORE_IT_DIALS:
                patch.setattr(Endpoint, "open", killed)
            if rank == victim and moment == IN_AN_AGREEMENT:
                patch.setattr(ranks, "gather_texts", killed)
            ranks.gather_texts("", "a test")
            started = time.monotonic()
            channel = ranks.open_channel(0)
        if moment == BETWEEN_SUMS:
            conclude(channel.exchange([1]))
            if rank == victim:
                time.sleep(0.3)
                killed()
        started = time.monotonic()
        message = loses(channel)
    except RankLost as error:
        message = str(error)
    told: dict[str, Any] = {"message": message, "waited": time.monotonic() - started}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # the default group has lost a member: what its own teardown does is not the matter here


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("world", "victim", "moment"),
    [
        (2, 1, BETWEEN_SUMS),
        (2, 0, BETWEEN_SUMS),
        (3, 2, BETWEEN_SUMS),
        (5, 4, BETWEEN_SUMS),
        (2, 0, BEFORE_IT_DIALS),
        (5, 1, BEFORE_IT_DIALS),
        (5, 4, BEFORE_IT_DIALS),
        (2, 1, IN_AN_AGREEMENT),
        (5, 0, IN_AN_AGREEMENT),
    ],
)
def test_a_rank_that_is_killed_is_named_by_all_survivors(world: int, victim: int, moment: str, tmp_path: Path) -> None:
    run_to_the_end(dies, [(rank, world, str(tmp_path), victim, moment) for rank in range(world)])
    for rank in set(range(world)) - {victim}:
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert f"rank {victim} died or lost its connection" in found["message"]
        assert found["waited"] < HANG_SECONDS


# ------------------------------------------------------------------------------------------- who connects with whom

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


def connecting() -> tuple[list[int], list[int]]:
    """The connections that are added by a strategy, an agreement, a sum, two channels, an abort; how many may be."""
    begun = sockets()
    ranks = make_ranks()
    partner_count = len(partners(ranks.rank, ranks.num_ranks))
    expected = [begun + times * partner_count for times in (1, 1, 2, 3, 2, 0)]
    wanted = iter(expected)
    found = [settled(next(wanted))]
    ranks.gather_texts(f"{ranks.rank}", "a test")
    ranks.all_reduce_sum(torch.tensor([0.5]))
    found.append(settled(next(wanted)))
    channel = ranks.open_channel(0)
    for number in (0, 1):
        channel = ranks.open_channel(number) if number else channel
        conclude(channel.exchange([1, 2]))
        conclude(channel.gather("x" * 10_000))
        found.append(settled(next(wanted)))
    dist.barrier()
    channel.abort("left")
    dist.barrier()
    loses(channel)
    found.append(settled(next(wanted)))
    dist.barrier()
    del channel
    ranks._finalizer()
    found.append(settled(next(wanted)))
    dist.barrier()
    return found, expected


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_connects_with_its_partners_and_with_no_others(world: int, played: Played) -> None:
    for found, expected in (rank["connecting"] for rank in played[world]):
        assert found == expected


def over(interfaces: str) -> tuple[list[int], list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", interfaces)
        ranks = make_ranks()
        return conclude(ranks.open_channel(0).exchange([1, ranks.rank])), ranks.all_reduce_sum(
            torch.tensor([0.5], dtype=torch.bfloat16)
        ).tolist()


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_connect_over_the_interface_that_gloo_is_told(world: int, interfaces: str, played: Played) -> None:
    for found, total in (rank[f"over {interfaces}"] for rank in played[world]):
        assert found == [world, sum(range(world))]
        assert total == [0.5 * world]
