"""Fakes of ``Ranks`` and ``Channel``: all ranks are threads of one process, and no process group is needed.

Failures and delays are method calls: ``FakeCollectives(3).fail_at(rank=1, step=3).delay(rank=0, step=2, seconds=0.1)``.

Each channel is a *room* in which the ranks *meet*. A rank that comes to its n-th meeting waits until all ranks have
come, or until the room is closed. So the result of a meeting depends on the messages of the ranks, never on which
thread comes first. If ranks bring messages of different kinds or lengths to one meeting, an ``AssertionError`` is
raised; real channels would deliver garbled messages.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeVar, cast, final

from torch import Tensor, zeros_like

from torchdistinput.coordination.exchanges import Exchange
from torchdistinput.errors import CoordinationTimeout, InputError, RankLost

__all__ = ["FakeChannel", "FakeCollectives", "FakeRanks", "Message"]

T = TypeVar("T")

_CallKind = Literal["exchange", "gather", "agreement", "tensor", "merge"]


@final
@dataclass(frozen=True)
class Message:
    """The message of one rank in one meeting.

    Args:
      channel: the channel's number; ``None`` for the calls of ``Ranks`` itself.
      meeting: the number of the meeting in that channel, from 0.
      rank: the rank that brought the message.
      kind: ``exchange`` or ``gather`` in a channel; ``agreement``, ``tensor`` or ``merge`` outside.
      content: the words, the text, the tensor, or the bytes.
    """

    channel: int | None
    meeting: int
    rank: int
    kind: _CallKind
    content: Any


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
        self.firsts = tuple(range(num_ranks)) if firsts is None else tuple(firsts)
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._failures: set[tuple[int, int]] = set()
        self._delays: dict[tuple[int, int], float] = {}
        self._rooms: dict[int | None, _Room] = {}
        self._ranks = [FakeRanks(self, rank) for rank in range(num_ranks)]

    def fail_at(self, *, rank: int, step: int) -> FakeCollectives:
        """Breaks the connection of ``rank`` at its exchange number ``step`` (from 0) of every channel."""
        self._failures.add((rank, step))
        return self

    def delay(self, *, rank: int, step: int, seconds: float) -> FakeCollectives:
        """Delays ``rank`` by ``seconds`` before its exchange number ``step`` (from 0) of every channel."""
        self._delays[rank, step] = seconds
        return self

    def ranks(self, rank: int) -> FakeRanks:
        """The ``Ranks`` of one rank."""
        return self._ranks[rank]

    def channel(self, rank: int, number: int = 0) -> FakeChannel:
        """One rank's end of a channel."""
        return FakeChannel(self._room(number), rank, self._failures, self._delays, lambda: None)

    @property
    def messages(self) -> list[Message]:
        """All messages so far, by channel, meeting and rank: the same whichever thread came first."""
        with self._lock:
            rooms = list(self._rooms.values())
        found = [message for room in rooms for message in room.messages()]
        return sorted(found, key=lambda each: (-1 if each.channel is None else each.channel, each.meeting, each.rank))

    def num_exchanges(self, number: int = 0) -> int:
        """How many exchanges a channel has seen."""
        return len({each.meeting for each in self.messages if each.channel == number and each.kind == "exchange"})

    def run(self, fn: Callable[[int], T], *, timeout_seconds: float = 30.0) -> list[T | BaseException]:
        """Calls ``fn(rank)`` for each rank, each in a thread of its own.

        Returns:
          By rank, the result of the call, or the exception that it raised.

        Raises:
          TimeoutError: a rank has not finished in time; its stack is shown.
        """
        results: dict[int, T | BaseException] = {}

        def call(rank: int) -> None:
            try:
                results[rank] = fn(rank)
            except BaseException as error:  # noqa: BLE001,RUF100 - it is the result of this rank
                results[rank] = error

        threads = [
            threading.Thread(target=call, args=(rank,), name=f"fake-rank-{rank}", daemon=True)
            for rank in range(self.num_ranks)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hanging = {rank: thread for rank, thread in enumerate(threads) if rank not in results and thread.is_alive()}
        if hanging:
            stacks = "\n".join(f"rank {rank}:\n{_stack(thread)}" for rank, thread in hanging.items())
            self._break_all()
            raise TimeoutError(f"rank {list(hanging)} did not finish within {timeout_seconds:g} seconds.\n{stacks}")
        return [results[rank] for rank in range(self.num_ranks)]

    def end(self, rank: int) -> None:
        """Ends a rank, as if its process did: nobody waits for it any more, outside of channels."""
        self._room(None).close(rank, "has ended")

    def _break_all(self) -> None:
        with self._lock:
            rooms = list(self._rooms.values())
        for room in rooms:
            room.close(None, "the fake world came to its end")

    def _room(self, number: int | None) -> _Room:
        with self._lock:
            if number not in self._rooms:
                self._rooms[number] = _Room(number, self.num_ranks, self.timeout_seconds)
            return self._rooms[number]


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(cast(int, thread.ident))
    return "" if frame is None else "".join(traceback.format_stack(frame))


@final
class _Room:
    """The shared side of one channel, in which its ranks meet again and again."""

    def __init__(self, number: int | None, num_ranks: int, timeout_seconds: float) -> None:
        self.number = number
        self.num_ranks = num_ranks
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._meetings: list[dict[int, tuple[_CallKind, Any]]] = []
        self._next = [0] * num_ranks
        self._reasons: dict[int | None, str] = {}

    def meet(self, rank: int, kind: _CallKind, content: Any) -> list[Any]:
        """Brings a message to this rank's next meeting; returns the messages of all ranks, by rank."""
        return self.wait(rank, self.bring(rank, kind, content))

    def bring(self, rank: int, kind: _CallKind, content: Any) -> int:
        """Brings a message to this rank's next meeting, and returns the number of the meeting."""
        with self._changed:
            self._refuse_if_closed(rank)
            number, self._next[rank] = self._next[rank], self._next[rank] + 1
            if number == len(self._meetings):
                self._meetings.append({})
            self._meetings[number][rank] = kind, content
            self._changed.notify_all()
            return number

    def is_decided(self, number: int) -> bool:
        """Whether all ranks came to the meeting, or the room was closed."""
        return len(self._meetings[number]) == self.num_ranks or bool(self._reasons)

    def rest(self, number: int, seconds: float) -> None:
        """Waits until the meeting is decided, for at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_decided(number), seconds)

    def wait(self, rank: int, number: int) -> list[Any]:
        """The messages of all ranks in a meeting to which this rank came, by rank."""
        with self._changed:
            meeting = self._meetings[number]
            self._changed.wait_for(lambda: len(meeting) == self.num_ranks or self._reasons, self._timeout_seconds)
            if len(meeting) == self.num_ranks:
                return self._all_alike(number, meeting)
            if not self._reasons:
                absent = ", ".join(str(each) for each in range(self.num_ranks) if each not in meeting)
                self._withdraw(rank, number)
                raise CoordinationTimeout(f"rank {absent} did not come within {self._timeout_seconds:g} seconds.")
            self._refuse_if_closed(rank)
            raise RankLost("the channel was closed.")

    def _withdraw(self, rank: int, number: int) -> None:
        """Takes the rank's message back, so that the rank may come to the meeting again."""
        del self._meetings[number][rank]
        self._next[rank] = number

    def _all_alike(self, number: int, meeting: dict[int, tuple[_CallKind, Any]]) -> list[Any]:
        shapes = {(kind, len(content) if kind == "exchange" else 0) for kind, content in meeting.values()}
        if len(shapes) > 1:
            found = {rank: meeting[rank] for rank in sorted(meeting)}
            raise AssertionError(f"meeting {number} of channel {self.number}: the ranks brought {found}")
        return [meeting[rank][1] for rank in range(self.num_ranks)]

    def close(self, rank: int | None, reason: str) -> None:
        """Closes the room: no further meeting completes."""
        with self._changed:
            self._reasons.setdefault(rank, reason)
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether the room was closed."""
        return bool(self._reasons)

    def pause(self, seconds: float) -> None:
        """Waits, unless the room is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._reasons, seconds)

    def absent(self, rank: int) -> list[int]:
        """The ranks that have not come to the meeting in which this rank waits."""
        with self._changed:
            mine = self._next[rank]
            return [each for each in range(self.num_ranks) if self._next[each] < mine]

    def messages(self) -> list[Message]:
        """All messages so far."""
        with self._changed:
            return [
                Message(self.number, number, rank, kind, content)
                for number, meeting in enumerate(self._meetings)
                for rank, (kind, content) in meeting.items()
            ]

    def _refuse_if_closed(self, rank: int) -> None:
        if rank in self._reasons:
            raise RankLost(f"rank {rank} cannot go on: {self._reasons[rank]}.")
        if self._reasons:
            reasons = "; ".join(why if who is None else f"rank {who} {why}" for who, why in self._reasons.items())
            raise RankLost(f"{reasons}. Every rank must read the same number of steps.")


@final
class _Delay:
    """A delay of one rank; see ``exchanges.Pending``."""

    def __init__(self, room: _Room, seconds: float) -> None:
        self._room = room
        self._until = time.monotonic() + seconds

    def has_come(self) -> bool:
        return self._room.is_closed or time.monotonic() >= self._until

    def rest(self, seconds: float) -> None:
        self._room.pause(min(seconds, self._until - time.monotonic()))

    def wait(self) -> None:
        self.rest(self._until - time.monotonic())


@final
class _Meeting:
    """A message that a rank brought to a meeting, and the messages that it gets there; see ``exchanges.Pending``."""

    def __init__(self, room: _Room, rank: int, kind: _CallKind, content: Any) -> None:
        self._room = room
        self._rank = rank
        self._number = room.bring(rank, kind, content)
        self.received: list[Any] = []

    def has_come(self) -> bool:
        return self._room.is_decided(self._number)

    def rest(self, seconds: float) -> None:
        self._room.rest(self._number, seconds)

    def wait(self) -> None:
        self.received = self._room.wait(self._rank, self._number)


@final
class FakeChannel:
    """One rank's end of a channel; see ``process_group.Channel``."""

    def __init__(
        self,
        room: _Room,
        rank: int,
        failures: set[tuple[int, int]],
        delays: dict[tuple[int, int], float],
        give_back: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.num_ranks = room.num_ranks
        self.peer_times: dict[int, list[float]] | None = None
        self.released = False
        self.use = 0
        self._room = room
        self._failures = failures
        self._delays = delays
        self._give_back = give_back
        self._exchanges = 0
        self._since: float | None = None

    def exchange(self, words: Sequence[int], *, by_max: int = 0) -> Exchange[list[int]]:
        """See ``Channel.exchange``."""
        step, self._exchanges = self._exchanges, self._exchanges + 1
        if (self.rank, step) in self._failures:
            self._room.close(self.rank, "died or lost its connection")
        received = yield from self._meet("exchange", tuple(words), self._delays.get((self.rank, step), 0.0))
        columns = list(zip(*received, strict=True))
        sums = [_wrapped(sum(column)) for column in columns]
        first = len(sums) - by_max
        return [*sums[:first], *map(max, columns[first:])]

    def gather(self, text: str) -> Exchange[list[str]]:
        """See ``Channel.gather``."""
        return (yield from self._meet("gather", text, 0.0))

    def _meet(self, kind: _CallKind, content: Any, delay: float) -> Exchange[list[Any]]:
        try:
            if delay:
                yield _Delay(self._room, delay)
            self._since = time.monotonic()
            meeting = _Meeting(self._room, self.rank, kind, content)
            yield meeting
            return meeting.received
        finally:
            self._since = None

    def waiting_since(self) -> float | None:
        """See ``Channel.waiting_since``."""
        return self._since

    def late(self) -> list[int]:
        """See ``Channel.late``."""
        return self._room.absent(self.rank)

    def unreached(self) -> str:
        """See ``Channel.unreached``."""
        return ""

    def notify(self, use: int, why: str) -> None:
        """See ``Channel.notify``. Nobody is away here: each rank comes to its next meeting."""

    def departed(self, use: int) -> str:
        """See ``Channel.departed``."""
        return ""

    def abort(self, reason: str) -> None:
        """See ``Channel.abort``."""
        if not self.released:
            self._room.close(self.rank, reason)

    def release(self) -> None:
        """See ``Channel.release``."""
        if not self.released and not self._room.is_closed:
            self.released = True
            self._give_back()

    @property
    def is_dead(self) -> bool:
        """Whether a rank aborted it, or its connection broke."""
        return self._room.is_closed


def _wrapped(number: int) -> int:
    """A sum that wraps around, as sums of int64 tensors do."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@final
class FakeRanks:
    """The ``Ranks`` of one rank; see ``process_group.Ranks``."""

    def __init__(self, world: FakeCollectives, rank: int) -> None:
        self.rank = rank
        self.num_ranks = world.num_ranks
        self.num_workers = len(world.firsts)
        self.firsts = world.firsts
        self._world = world
        self._free: set[int] = set()
        self._next_channel = 0

    def waiting(self, timeout_seconds: float) -> AbstractContextManager[None]:
        """See ``Ranks.waiting``. The bound of the world stays."""
        return nullcontext()

    def gather_texts(self, text: str, what: str) -> list[str]:
        """See ``Ranks.gather_texts``."""
        try:
            return self._room().meet(self.rank, "agreement", text)
        except InputError as error:
            raise type(error)(f"{what}: {error}") from error

    def combine(self, mine: bytes, merge: Callable[[bytes, bytes], bytes]) -> bytes:
        """See ``Ranks.combine``."""
        found: bytes = reduce(merge, self._room().meet(self.rank, "merge", mine))
        return found

    def free_channels(self) -> list[int]:
        """See ``Ranks.free_channels``."""
        return [*sorted(self._free), self._next_channel]

    def open_channel(self, number: int) -> FakeChannel:
        """See ``Ranks.open_channel``."""
        self._next_channel = max(self._next_channel, number + 1)
        self._free.discard(number)
        world = self._world
        return FakeChannel(
            world._room(number),
            self.rank,
            world._failures,
            world._delays,
            lambda: self._free.add(number),
        )

    def refuse_channel(self, number: int, why: str) -> None:
        """See ``Ranks.refuse_channel``."""
        self.open_channel(number).abort(why)

    def name(self, rank: int) -> int:
        """See ``Ranks.name``."""
        return rank

    def broadcast_from_first(self, tensor: Tensor) -> None:
        """See ``Ranks.broadcast_from_first``."""
        tensor.copy_(self._room().meet(self.rank, "tensor", tensor.clone())[0])

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """See ``Ranks.all_reduce_sum``."""
        received = self._room().meet(self.rank, "tensor", tensor.clone())
        total = zeros_like(tensor)
        for first in self.firsts:
            total += received[first]
        return total

    def all_gather_uneven(self, tensor: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
        """See ``Ranks.all_gather_uneven``."""
        received = self._room().meet(self.rank, "tensor", tensor.clone())
        return [received[first].narrow(axis, 0, size) for first, size in zip(self.firsts, sizes, strict=True)]

    def _room(self) -> _Room:
        return self._world._room(None)
