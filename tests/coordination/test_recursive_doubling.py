"""Sums, texts, arrays and broadcasts in any mixture, at any number of ranks: ranks as threads, over real sockets."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support.socket_ranks import channels, end_all, on_threads
from torchdistinput.coordination.channel import ProcessGroupChannel
from torchdistinput.coordination.exchanges import StartedExchange
from torchdistinput.coordination.recursive_doubling import add_up, broadcast, combine, spread
from torchdistinput.errors import RankLost

CASES = 1
EXCHANGES = 15
WORLDS = range(2, 10)
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
            (dice.choice(["sum", "sum", "text", "rows", "total", "first", "merge"]), dice.choice(SIZES))
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

    def begin(self, channel: ProcessGroupChannel, rank: int, number: int) -> tuple[Any, Any]:
        """An exchange, and what it must come to."""
        kind, length = self.schedule[number]
        mine = self.words(rank, number, length)
        everyone = range(self.num_ranks)
        if kind == "text":
            return channel.gather(self.text(rank, number)), [self.text(each, number) for each in everyone]
        if kind == "merge":
            lines = [f"{each} {self.text(each, number)}".encode(errors="surrogatepass") for each in everyone]
            power = 1 << (self.num_ranks.bit_length() - 1)
            merged = b"\n".join(lines[each] for each in sorted(everyone, key=lambda each: (each % power, each)))
            return channel.collective(lambda group: combine(group, lines[rank], merge)), merged
        rows = [self.words(each, number, length) for each in everyone]
        with np.errstate(over="ignore"):
            total = np.sum(rows, axis=0)
        if kind == "sum":
            return channel.exchange(mine.tolist()), total.tolist()
        if kind == "rows":
            return channel.collective(lambda group: spread(group, mine)), np.array(rows).tolist()
        if kind == "total":
            return self.kept(channel, mine, lambda group: add_up(group, mine, add)), total.tolist()
        return self.kept(channel, mine, lambda group: broadcast(group, mine)), rows[0].tolist()

    def kept(self, channel: ProcessGroupChannel, mine: Any, rounds: Any) -> Any:
        yield from channel.collective(rounds)
        return mine

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
                assert np.array_equal(np.array(found), np.array(expected)), (self.seed, rank, number)
                time.sleep(dice.choice([0.0] * 20 + [1e-3, 1e-2]))
        except RankLost as error:
            return str(error)
        return "came to the end"


def merge(one: bytes, other: bytes) -> bytes:
    return one + b"\n" + other


def add(mine: Any, theirs: Any) -> None:
    mine += theirs


def played(play: Play) -> list[Any]:
    try:
        return on_threads([partial(play.rank, rank) for rank in range(play.num_ranks)])
    finally:
        end_all(play.channels)


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_exchanges_in_any_mixture_are_right(num_ranks: int) -> None:
    for seed in range(CASES):
        assert played(Play(seed, num_ranks)) == ["came to the end"] * num_ranks


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_all_hear_of_a_rank_that_leaves_at_any_moment(num_ranks: int) -> None:
    for seed in range(CASES):
        leaver = seed % num_ranks
        for rank, end in enumerate(played(Play(seed, num_ranks, leaver))):
            said = "cannot go on: had enough." if rank == leaver else "had enough. Every rank must"
            assert end == "came to the end" or end.startswith(f"rank {leaver} {said}"), (seed, rank, end)


@pytest.mark.parametrize("num_ranks", [3, 5, 6, 7])
def test_sums_of_floats_have_the_same_bits_on_all_ranks(num_ranks: int) -> None:
    rows = [np.random.default_rng(rank).normal(size=1000).astype(np.float32) for rank in range(num_ranks)]

    def total(rank: int) -> bytes:
        StartedExchange(found[rank].collective(lambda group: add_up(group, rows[rank], add))).conclude()
        return rows[rank].tobytes()

    found = channels(num_ranks)
    sums = on_threads([partial(total, rank) for rank in range(num_ranks)])
    end_all(found)
    assert len(set(sums)) == 1
