"""Ranks that are threads of one process, connected by sockets: no process group is needed.

Failures and delays are method calls: ``FakeCollectives(3).fail_at(rank=1, step=3).delay(rank=0, step=2, seconds=0.1)``.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar, cast, final

from tests.support.socket_ranks import trees
from torchdistinput.coordination.channel import Channel, Join
from torchdistinput.coordination.exchanges import Awaits, Exchange
from torchdistinput.coordination.launch import Members
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.coordination.tree import ALL, DIED, Left
from torchdistinput.plan.step_agreement import join_messages

T = TypeVar("T")

_OF_CALLS = 1


@final
class FakeCollectives:
    """The ranks of one fake world.

    Args:
      num_ranks: how many ranks there are.
      firsts: the first rank of each worker; by default every rank is a worker.
      timeout_seconds: the bound of every wait.
    """

    def __init__(self, num_ranks: int, *, firsts: Sequence[int] | None = None, timeout_seconds: float = 10.0) -> None:
        self.num_ranks = num_ranks
        self.sent: list[tuple[int, int]] = []
        """Of each vote: the channel, and the rank."""
        self._failures: set[tuple[int, int]] = set()
        self._delays: dict[tuple[int, int], float] = {}
        self._trees = trees(num_ranks)
        chosen = range(num_ranks) if firsts is None else firsts
        workers = tuple(sum(first <= rank for first in chosen) - 1 for rank in range(num_ranks))
        self._ranks = []
        for tree in self._trees:
            members = Members(tuple(range(num_ranks)), workers, tree.rank)
            ranks = Ranks(None, members, timeout_seconds, tree, _OF_CALLS)
            ranks.open_channel = self._opener(tree.rank)  # type: ignore[method-assign, assignment]
            self._ranks.append(ranks)

    def fail_at(self, *, rank: int, step: int) -> FakeCollectives:
        """Breaks the connections of ``rank`` at its vote number ``step`` (from 0) of every channel."""
        self._failures.add((rank, step))
        return self

    def delay(self, *, rank: int, step: int, seconds: float) -> FakeCollectives:
        """Delays ``rank`` by ``seconds`` before its vote number ``step`` (from 0) of every channel."""
        self._delays[rank, step] = seconds
        return self

    def ranks(self, rank: int) -> Ranks:
        """The ranks as one of them sees them."""
        return self._ranks[rank]

    def num_exchanges(self) -> int:
        """How many votes the channel with the most has seen."""
        return max((self.sent.count(each) for each in set(self.sent)), default=0)

    def _opener(self, rank: int) -> Callable[[int], Channel]:
        tree = self._trees[rank]

        def open_channel(number: int) -> Channel:
            channel = Channel(tree, _OF_CALLS + 1 + number, range(self.num_ranks))
            merge, votes = channel.merge, 0

            def merge_or_vote(mine: bytes, join: Join) -> Exchange[bytes]:
                nonlocal votes
                if join is not join_messages:
                    return (yield from merge(mine, join))
                step, votes = votes, votes + 1
                if (rank, step) in self._failures:
                    tree.left[ALL] = Left(rank, DIED, DIED)  # the others see that the connections end
                    for link in tree.links():
                        link.close()
                if (rank, step) in self._delays:
                    yield from _waited(channel, self._delays[rank, step])
                self.sent.append((channel.number, rank))
                return (yield from merge(mine, join))

            channel.merge = merge_or_vote  # type: ignore[method-assign]
            return channel

        return open_channel

    def run(self, fn: Callable[[int], T], *, timeout_seconds: float = 30.0) -> list[T | BaseException]:
        """Calls ``fn(rank)`` for each rank, each in a thread of its own.

        No garbage is collected meanwhile. torch reads a random state with its lock held, and the interpreter's: where a
        collection runs there, what it frees may let another thread run, which waits for that lock for ever.

        Returns:
          By rank, the result of the call, or the exception that it raised.

        Raises:
          TimeoutError: a rank has not finished in time; its stack is shown.
        """
        results: dict[int, T | BaseException] = {}

        def call(rank: int) -> None:
            try:
                results[rank] = fn(rank)
            except BaseException as error:
                results[rank] = error

        threads = [
            threading.Thread(target=call, args=(rank,), name=f"fake-rank-{rank}", daemon=True)
            for rank in range(self.num_ranks)
        ]
        gc.disable()
        try:
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + timeout_seconds
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        finally:
            gc.enable()
        hanging = {rank: thread for rank, thread in enumerate(threads) if rank not in results and thread.is_alive()}
        if hanging:
            stacks = "\n".join(f"rank {rank}:\n{_stack(thread)}" for rank, thread in hanging.items())
            for rank in range(self.num_ranks):
                self.end(rank)
            raise TimeoutError(f"rank {list(hanging)} did not finish within {timeout_seconds:g} seconds.\n{stacks}")
        return [results[rank] for rank in range(self.num_ranks)]

    def end(self, rank: int) -> None:
        """Ends a rank, as if its process did."""
        self._trees[rank].end()


@final
class _Clock:
    """What a delayed rank waits for; see ``exchanges.Awaits``."""

    def __init__(self, channel: Channel, seconds: float) -> None:
        self._channel = channel
        self._until = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        self._channel.tree.go_on()
        return self._channel.is_dead or time.monotonic() >= self._until

    def rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < until:
            time.sleep(0.001)


def _waited(channel: Channel, seconds: float) -> Exchange[None]:
    clock = _Clock(channel, seconds)
    while not clock.is_over:
        awaits: Awaits = clock
        yield awaits


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(cast(int, thread.ident))
    return "" if frame is None else "".join(traceback.format_stack(frame))
