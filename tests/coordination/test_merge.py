"""Sums, texts, bytes and broadcasts in any mixture, at any number of ranks: ranks as threads, over real sockets."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.socket_ranks import channels, end_all, on_threads, summed
from torchdistinput.coordination import channel as channel_module
from torchdistinput.coordination import tree
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import StartedExchange
from torchdistinput.errors import RankLost

CASES = 1
EXCHANGES = 15
WORLDS = [*range(2, 10), 12]
SIZES = [1, 1, 34, 34, 509, 511, 2_000, 70_000]  # words: below, at and above what is sent in one piece


class Play:
    """A drawn schedule that all ranks follow, each at its own pace.

    Args:
      seed: what is drawn depends on it.
      num_ranks: how many.
      leaver: who aborts at some moment, if anybody does.
    """

    def __init__(self, seed: int, num_ranks: int, leaver: int | None = None) -> None:
        dice = random.Random(seed)
        self.seed, self.num_ranks, self.leaver = seed, num_ranks, leaver
        self.schedule = [
            (dice.choice(["sum", "sum", "text", "rows", "first", "merge"]), dice.choice(SIZES))
            for _ in range(EXCHANGES)
        ]
        self.until = dice.randrange(EXCHANGES)
        self.channels = channels(num_ranks)

    def words(self, rank: int, number: int, length: int) -> Any:
        return np.random.default_rng([self.seed, rank, number]).integers(-(2**60), 2**60, length)

    def text(self, rank: int, number: int) -> str:
        dice = random.Random(f"{self.seed} {rank} {number}")
        letter = dice.choice(["a", "b", "ü", "\udcff"])
        return letter * dice.choice([0, 7, 2039, 2040, 2041, dice.randrange(10_000), 40_000])

    def begin(self, channel: Channel, rank: int, number: int) -> tuple[Any, Any]:
        """An exchange, and what it must come to."""
        kind, length = self.schedule[number]
        everyone = range(self.num_ranks)
        if kind == "text":
            return channel.gather(self.text(rank, number)), [self.text(each, number) for each in everyone]
        if kind == "merge":
            lines = [f"{each} {self.text(each, number)}".encode(errors="surrogatepass") for each in everyone]
            return channel.merge(lines[rank], b"\n".join), b"\n".join(lines)
        rows = [self.words(each, number, length) for each in everyone]
        if kind == "rows":
            return channel.gather_bytes(rows[rank].tobytes()), [row.tobytes() for row in rows]
        if kind == "first":
            return channel.first(rows[rank].tobytes()), rows[0].tobytes()
        with np.errstate(over="ignore"):
            total = np.sum(rows, axis=0)
        return summed(channel, rows[rank].tolist()), total.tolist()

    def rank(self, rank: int) -> str:
        channel = self.channels[rank]
        dice = random.Random(f"{self.seed} {rank}")
        try:
            for number in range(EXCHANGES):
                if self.leaver == rank and number == self.until:
                    channel.abort("had enough")
                exchange, expected = self.begin(channel, rank, number)
                begun = StartedExchange(exchange)
                for _ in range(dice.choice([0, 0, 3, 30])):
                    if begun.poll():
                        break
                    os.sched_yield()
                found = begun.conclude()
                assert found == expected, (self.seed, rank, number)
                time.sleep(dice.choice([0.0] * 20 + [1e-3, 1e-2]))
        except RankLost as error:
            return str(error)
        return "came to the end"


def played(play: Play) -> list[Any]:
    try:
        return on_threads([partial(play.rank, rank) for rank in range(play.num_ranks)])
    finally:
        end_all(play.channels)


@pytest.fixture(params=[8, 2], ids=["a star", "levels"])
def fan_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tree of many levels, too."""
    monkeypatch.setattr(tree, "FAN_OUT", request.param)


@pytest.mark.usefixtures("fan_out")
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_exchanges_in_any_mixture_are_right(num_ranks: int) -> None:
    for seed in range(CASES):
        assert played(Play(seed, num_ranks)) == ["came to the end"] * num_ranks


@pytest.mark.usefixtures("fan_out")
@pytest.mark.parametrize("num_ranks", WORLDS)
def test_all_hear_of_a_rank_that_leaves_at_any_moment(num_ranks: int) -> None:
    for seed in range(CASES):
        leaver = seed % num_ranks
        for rank, end in enumerate(played(Play(seed, num_ranks, leaver))):
            said = "cannot go on: had enough." if rank == leaver else "had enough. Every rank must"
            assert end == "came to the end" or end.startswith(f"rank {leaver} {said}"), (seed, rank, end)


@pytest.mark.usefixtures("fan_out")
@pytest.mark.parametrize("num_ranks", [3, 5, 9])
def test_what_all_ranks_have_sent_is_completed_though_one_has_ended_since(num_ranks: int) -> None:
    """Each rank ends as soon as it has the result, of which those below it may not have heard yet."""
    found = channels(num_ranks)

    def rank(channel: Channel) -> list[int]:
        sums: list[int] = StartedExchange(summed(channel, [channel.rank])).conclude()
        channel.tree.end()
        return sums

    assert on_threads([partial(rank, each) for each in found]) == [[sum(range(num_ranks))]] * num_ranks


def test_a_result_that_was_not_passed_on_yet_comes_before_an_end_that_was_heard_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 of four has rank 3 below it, and is in its training code when the result comes, and rank 1 ends."""
    monkeypatch.setattr(tree, "FAN_OUT", 2)
    found = channels(4)
    begun = [StartedExchange(summed(each, [1])) for each in found]
    for rank in (3, 2, 1, 0, 1):
        begun[rank].poll()
        time.sleep(0.1)
        begun[rank].poll()
    assert begun[1].conclude() == [4]
    found[1].tree.end()
    time.sleep(0.1)
    for rank in (0, 2, 3):
        found[rank].tree.go_on()
        time.sleep(0.1)
    assert found[2].is_dead
    assert [begun[rank].conclude() for rank in (0, 2, 3)] == [[4]] * 3
    with pytest.raises(RankLost, match="rank 1 ended before it came here"):
        StartedExchange(summed(found[3], [1])).conclude()
    end_all(found)


def test_a_result_that_nobody_takes_keeps_no_rank_from_hearing_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of four left its loop before the result came, which it would have passed on to rank 3."""
    monkeypatch.setattr(tree, "FAN_OUT", 2)
    found = channels(4)
    begun = [StartedExchange(summed(each, [1])) for each in found]
    for rank in (3, 2, 1, 0):
        begun[rank].poll()
        time.sleep(0.1)
        begun[rank].poll()
    time.sleep(0.1)
    found[2].abort("stopped reading")
    for rank in (2, 1, 0, 2, 3):
        if rank == 1:
            found[1].tree.end()
        else:
            found[rank].tree.go_on()
        time.sleep(0.1)
    assert Channel(found[3].tree, 9, range(4)).is_dead
    end_all(found)


@pytest.mark.parametrize(
    ("rows", "expected"), [("aaaa", [(4, "a")]), ("abbb", [(1, "a"), (1, "b"), (1, "b"), (1, "b")])]
)
def test_equal_texts_of_ranks_that_follow_each_other_travel_as_one(rows: str, expected: Any) -> None:
    sent: list[bytes] = []
    found = channels(4)

    def rank(channel: Channel) -> list[str]:
        merged = channel.merge

        def seen(mine: bytes, join: Any) -> Any:
            content = yield from merged(mine, join)
            sent.append(content)
            return content

        channel.merge = seen  # type: ignore[method-assign]
        texts: list[str] = StartedExchange(channel.gather(rows[channel.rank])).conclude()
        return texts

    assert on_threads([partial(rank, each) for each in found]) == [list(rows)] * 4
    assert sent[0] == b"".join(channel_module._SIZE.pack(count, 1) + text.encode() for count, text in expected)
    end_all(found)
