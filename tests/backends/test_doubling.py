"""Sums and texts in any mixture, with any ranks sharing memory: ranks as threads, over a network that is no help."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from torchdistinput.backends.channels import ProcessGroupChannel
from torchdistinput.backends.exchanges import Begun
from torchdistinput.backends.mail import Mail
from torchdistinput.backends.neighbours import MOST_BYTES
from torchdistinput.errors import RankLost

HANG_SECONDS = 20.0
CASES = 2
EXCHANGES = 20
WORLDS = range(2, 8)


class Network:
    """Between ranks that are threads. As with gloo, a message travels once it is awaited, and both sides wait for that.

    The last word of a message is seen before the rest of it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[Any, deque[Work]] = defaultdict(deque)
        self.awaited: dict[Any, deque[Work]] = defaultdict(deque)
        self.closed: set[int] = set()

    def post(self, key: Any, work: Work, mine: dict[Any, deque[Work]], others: dict[Any, deque[Work]]) -> Work:
        with self.changed:
            if self.closed & set(work.ends):
                raise RuntimeError("the connection is closed")
            if not others[key]:
                mine[key].append(work)
                return work
            other = others[key].popleft()
            source, target = (work, other) if mine is self.sent else (other, work)
            target.words[-1] = source.words[-1]
        os.sched_yield()
        with self.changed:
            target.words[:] = source.words
            work.done = other.done = True
            self.changed.notify_all()
        return work


class Work:
    def __init__(self, network: Network, words: Any, ends: tuple[int, int], rank: int) -> None:
        self.words, self.ends, self.done = words, ends, False
        self._network, self._rank = network, rank

    def wait(self, patience: Any) -> None:
        network = self._network
        with network.changed:
            seconds = min(patience.total_seconds(), HANG_SECONDS)
            came = network.changed.wait_for(lambda: self.done or network.closed & set(self.ends), seconds)
            if not came:  # an expired wait closes all connections
                network.closed.add(self._rank)
                network.changed.notify_all()
            if not self.done:
                raise RuntimeError("the connection is closed")


class Group:
    """One rank's end of the network; see ``mail.Gloo``."""

    def __init__(self, network: Network, number: int, size: int) -> None:
        self._network, self._number, self._size = network, number, size

    def rank(self) -> int:
        return self._number

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        ends = (self._number, peer)
        work = Work(self._network, tensors[0].numpy(), ends, self._number)
        return self._network.post((*ends, tag), work, self._network.sent, self._network.awaited)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        ends = (peer, self._number)
        work = Work(self._network, tensors[0].numpy(), ends, self._number)
        return self._network.post((*ends, tag), work, self._network.awaited, self._network.sent)


class Paper:
    """A store in one process."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._said[key] = value

    def get(self, key: str) -> bytes:
        return self._said[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._said.get(key, "0")) + amount
            self._said[key] = str(total)
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._said for key in keys)


class Nobody:
    """Watches nothing."""

    def add(self, channel: Any) -> None: ...

    def remove(self, channel: Any) -> None: ...


def kept(*, reusable: bool) -> None:
    """The channel is this test's."""


class Play:
    """A drawn schedule that all ranks follow, each at its own pace, some of them on hosts of their own.

    Args:
      seed: what is drawn depends on it.
      num_ranks: how many.
      num_exchanges: one after the other.
      leaver: who aborts at some moment, if anybody does.
    """

    def __init__(self, seed: int, num_ranks: int, num_exchanges: int, leaver: int | None = None) -> None:
        dice = random.Random(seed)
        self.seed, self.num_ranks, self.leaver = seed, num_ranks, leaver
        self.hosts = [dice.randrange(dice.choice([1, 2, 3])) for _ in range(num_ranks)]
        self.lengths = [dice.choice([1, 1, 34, 34, 34, MOST_BYTES // 8 - 1, MOST_BYTES // 8]) for _ in range(3)]
        self.schedule = [dice.choice([*self.lengths, None]) for _ in range(num_exchanges)]  # None for a text
        self.until = dice.randrange(num_exchanges)
        self.network, self.store = Network(), Paper()
        self.wrong: list[str] = []
        self.ends: list[Any] = [None] * num_ranks

    def words(self, rank: int, number: int, length: int) -> Any:
        return np.random.default_rng([self.seed, rank, number]).integers(-(2**60), 2**60, length)

    def text(self, rank: int, number: int) -> str:
        dice = random.Random(f"{self.seed} {rank} {number}")
        return dice.choice("abc") * dice.choice([0, 7, 2031, 2032, 2033, dice.randrange(10_000), 40_000])

    def run(self) -> None:
        """All ranks, to their ends."""
        threads = [threading.Thread(target=self.rank, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert not any(thread.is_alive() for thread in threads), f"a rank hangs, seed {self.seed}"
        assert not self.wrong

    def rank(self, rank: int) -> None:
        group: Any = Group(self.network, rank, self.num_ranks)
        mail = Mail(group, HANG_SECONDS)
        for peer, host in enumerate(self.hosts):
            if host != self.hosts[rank]:
                mail._neighbours._by_rank.pop(peer, None)
        channel = ProcessGroupChannel(mail, self.store, Nobody(), kept, range(self.num_ranks))  # type: ignore[arg-type]
        try:
            self.follow(channel)
            self.ends[rank] = "came to the end"
        except RankLost as error:
            self.ends[rank] = str(error)

    def follow(self, channel: ProcessGroupChannel) -> None:
        rank, dice = channel.rank, random.Random(f"{self.seed} {channel.rank}")
        for number, length in enumerate(self.schedule):
            if rank == self.leaver and number == self.until:
                threading.Timer(dice.choice([0.0, 1e-3]), channel.abort, ["had enough"]).start()
            if length is None:
                begun: Begun[Any] = Begun(channel.gather(self.text(rank, number)))
                expected: Any = [self.text(each, number) for each in range(self.num_ranks)]
            else:
                begun = Begun(channel.exchange(self.words(rank, number, length)))
                expected = sum(self.words(each, number, length) for each in range(self.num_ranks)).tolist()
            for _ in range(dice.choice([0, 0, 3, 30])):  # one who looks, and goes on elsewhere
                if begun.look():
                    break
                os.sched_yield()
            if begun.conclude() != expected:
                self.wrong.append(f"rank {rank}, exchange {number}, seed {self.seed}")
            if length is not None and self.schedule[number + 1 : number + 2] == [length] and dice.random() < 0.8:
                channel.expect()
            time.sleep(dice.choice([0.0] * 20 + [1e-3, 1e-2]))


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_sums_and_texts_in_any_mixture_are_right_whoever_shares_memory(num_ranks: int) -> None:
    for seed in range(CASES):
        play = Play(seed, num_ranks, EXCHANGES)
        play.run()
        assert play.ends == ["came to the end"] * num_ranks


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_all_hear_of_a_rank_that_leaves_at_any_moment(num_ranks: int) -> None:
    for seed in range(CASES):
        leaver = seed % num_ranks
        play = Play(seed, num_ranks, EXCHANGES, leaver)
        play.run()
        for rank, end in enumerate(play.ends):
            said = "cannot go on: had enough." if rank == leaver else "had enough. Every rank must"
            assert end == "came to the end" or end.startswith(f"rank {leaver} {said}"), (seed, rank)
