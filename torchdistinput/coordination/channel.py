"""A channel: the exchanges of all ranks for one live iterator, for the calls of one strategy, or for the meeting.

There is one collective, ``merge``: a value goes up the tree, joined at each parent, and the result comes down, the same
for all. Sums, texts, agreements and broadcasts are functions that join two values. A channel is a number in the frames
of the tree (``tree.py``); no connection is opened for it. A thread may begin an exchange, poll it, and wait for it in
naps (``exchanges.py``).
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from torchdistinput.coordination.exchanges import Exchange
from torchdistinput.coordination.tree import DIED, ENDED, FAILED, GAVE_UP, LEFT, Left, Tree
from torchdistinput.errors import InputError, RankLost

Join = Callable[[Sequence[bytes]], bytes]
"""Makes one value of the values of ranks that follow each other."""

_REST_SECONDS: Final = 0.5  # between two statuses
_TELL_SECONDS: Final = 2.0  # for those who wait for this rank, and read; others hear of it later
_SILENT_SECONDS: Final = 2.0  # a waiting rank sends a status twice a second, which each host acknowledges at once
_SIZE: Final = struct.Struct("<qq")  # for how many ranks, one after the other, a value stands, and its bytes
_SAME_LIBRARY: Final = "every rank must run the same version of torchdistinput, on a network that loses nothing"


def plain_message(text: str) -> dict[str, Any]:
    """The JSON object in a text that a rank sent. Local.

    Raises:
      InputError: the text is no JSON object.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"another rank sent {text!r:.100}, which is no message ({error}); {_SAME_LIBRARY}") from error
    if not isinstance(message, dict):
        raise InputError(f"another rank sent {text!r:.100}, which is no message; {_SAME_LIBRARY}")
    return message


def lost(left: Left, names: Sequence[int]) -> RankLost:
    """The error of a rank that cannot go on because another rank left. Local."""
    who = names[left.rank] if 0 <= left.rank < len(names) else "unknown"
    if left.kind == DIED:
        return RankLost(f"rank {who} {left.text}; see its own log for the reason.")
    if left.kind == ENDED:
        return RankLost(
            f"rank {who} ended before it came here. Every rank of the strategy makes the same calls; its own log tells "
            "why it ended."
        )
    if left.kind == GAVE_UP:
        return RankLost(
            f"rank {who} {left.text}. If the late rank is only slow, raise timeout_seconds; else look at what it does "
            "(py-spy dump --pid)."
        )
    if left.kind == FAILED:
        return RankLost(f"rank {who} {left.text}")
    return RankLost(f"rank {who} {left.text}. Every rank must read the same number of steps.")


@final
class Channel:
    """The exchanges of one live iterator, or of the calls of one strategy.

    What is collective, every rank begins and completes in the same order; it raises ``RankLost`` if a rank went away.
    One thread at a time, except where a method says otherwise.

    Args:
      tree: the connections.
      number: the channel's number, the same on all ranks; no other channel has it, or had it.
      names: the ranks as users know them, by rank.
    """

    def __init__(self, tree: Tree, number: int, names: Sequence[int]) -> None:
        self.tree = tree
        self.number = number
        self.rank: int = tree.rank
        self.num_ranks: int = tree.num_ranks
        self.peer_times: dict[int, list[float]] | None = None
        """Gets, for the parent and each child, when the last message to it was sent and its own was received, by
        ``perf_counter``."""
        self.num_exchanges = 0
        """Exchanges that this rank has completed."""
        self.gave_up = ""
        """Why this rank stopped waiting for the others, in an exchange that it may continue later."""
        self._names = names
        self._is_released = False
        self._since: float | None = None
        self._awaited: list[int] = []
        self._told = 0.0
        self._is_sending = False

    def merge(self, mine: bytes, join: Join) -> Exchange[bytes]:
        """One value from those of all ranks, joined in their order; the same on all. Collective.

        Args:
          mine: this rank's value.
          join: the value of some ranks, from those of the first ones, of those that follow them, and so on.
        """
        self._raise_if_left()
        self._since = self._told = time.monotonic()
        self.tree.tellers[self.number] = self._tell
        try:
            mine = yield from self._up_and_down(mine, join)
            yield from self._send_all(self.tree.children)
        except RankLost:
            yield from self._send_all([link.peer for link in self.tree.links()])
            raise
        finally:
            self._since, self._awaited, self._is_sending = None, [], False
            self.tree.tellers.pop(self.number, None)
        self.num_exchanges += 1
        return mine

    def _up_and_down(self, mine: bytes, join: Join) -> Exchange[bytes]:
        tree = self.tree
        self._awaited = list(tree.children)
        if tree.children or tree.parent is None:
            yield self  # what begins an exchange does not complete it
        values = [mine]
        for child in tree.children:
            values.append((yield from self._message_of(child)))  # noqa: PERF401 - it waits for each
        if tree.children:
            mine = join(values)
        if tree.parent is not None:
            self._awaited = [tree.parent]
            while tree.is_meeting and tree.link(tree.parent) is None:
                self._raise_if_left()
                yield self
            self._send(tree.parent, mine)
            if not tree.children:
                yield self
            mine = yield from self._message_of(tree.parent)
        for child in tree.children:
            self._send(child, mine)
        tree.tell_left()
        return mine

    def _send_all(self, peers: Sequence[int]) -> Exchange[None]:
        """Sends what waits to be sent to some ranks; after the end of the channel, only for some seconds."""
        until = math.inf
        while (unsent := self._unsent(peers)) and time.monotonic() < until:
            if self.is_dead:
                until = min(until, time.monotonic() + _TELL_SECONDS)
            self._awaited, self._is_sending = unsent, True
            yield self  # a rank that stays away from here sends no more
            self.tree.go_on()

    def _unsent(self, peers: Sequence[int]) -> list[int]:
        return [link.peer for link in self.tree.links() if link.unsent and link.peer in peers]

    def _send(self, peer: int, content: bytes) -> None:
        if self.peer_times is not None:
            self.peer_times.setdefault(peer, [0.0, 0.0])[0] = time.perf_counter()
        self.tree.send(peer, self.number, content)

    def _message_of(self, peer: int) -> Exchange[bytes]:
        while True:
            left = self.tree.left_of(self.number)  # asked first: what came before it is still taken
            link = self.tree.link(peer)
            message = None if link is None else link.takes(self.number)
            if message is not None:
                break
            if left is not None:
                self.tree.tell_left()
                raise self._lost(left)
            self.tree.go_on()
            if not self._has_news():
                yield self
        if self.peer_times is not None:
            self.peer_times.setdefault(peer, [0.0, 0.0])[1] = time.perf_counter()
        self._awaited = [each for each in self._awaited if each != peer]
        return message

    def _has_news(self) -> bool:
        """Whether the exchange can go on: a parent can do nothing before all of its children have spoken."""
        if self._is_sending:
            return not self._unsent(self._awaited)
        return self.tree.left_of(self.number) is not None or not self._missing()

    def _missing(self) -> list[int]:
        """Those of the awaited ranks whose messages have not come."""
        links = [(peer, self.tree.link(peer)) for peer in self._awaited]
        return [peer for peer, link in links if link is None or not link.inbox.get(self.number)]

    def rest(self, seconds: float) -> None:
        """See ``exchanges.Awaits``."""
        self.tree.rest(seconds, self._has_news)

    def _tell(self, now: float) -> None:
        """Tells the ranks that may wait for this one for whom it waits itself, twice a second."""
        if now - self._told >= _REST_SECONDS:
            self._told, missing = now, self._missing()
            late = self.late()
            for link in self.tree.links():
                if link.peer not in missing:
                    link.tell_waiting(self.number, late)

    def gather(self, text: str) -> Exchange[list[str]]:
        """Every rank's text, by rank. Collective."""
        # File names may hold bytes that are no valid unicode.
        rows = yield from self.gather_bytes(text.encode(errors="surrogatepass"))
        try:
            read = {row: row.decode(errors="surrogatepass") for row in dict.fromkeys(rows)}
        except UnicodeDecodeError as error:
            rank = rows.index(error.object)
            raise InputError(f"rank {rank} of the group sent no text ({error.reason}); {_SAME_LIBRARY}") from error
        return [read[row] for row in rows]

    def gather_bytes(self, content: bytes) -> Exchange[list[bytes]]:
        """Every rank's bytes, by rank; where all below a parent bring the same, they travel as one. Collective."""
        return _rows_of((yield from self.merge(_SIZE.pack(1, len(content)) + content, _rows_joined)), self.num_ranks)

    def first(self, content: bytes) -> Exchange[bytes]:
        """The first rank's bytes; what the others bring is not sent. Collective."""
        return (yield from self.merge(content if self.rank == 0 else b"", _first))

    def waiting_since(self) -> float | None:
        """See ``timeouts.Awaited``: when the exchange in progress began."""
        return self._since

    def late(self) -> list[int]:
        """The ranks that have not yet joined the exchange in progress. Local: any thread."""
        return self.tree.late_of(self.number, self._missing())

    def missing(self) -> str:
        """See ``timeouts.Awaited``."""
        return f"rank {', '.join(str(self._names[rank]) for rank in self.late()) or 'unknown'}"

    def unreached(self) -> str:
        """See ``timeouts.Awaited``."""
        late = self.late()
        silent = self.tree.silent_seconds(late[0]) if len(late) == 1 else 0.0
        if silent < _SILENT_SECONDS:
            return ""
        return f"its host has acknowledged nothing for {silent:.0f} seconds, so the host or the network is down"

    def give_up(self, reason: str) -> None:
        """Notes why this rank does not wait any more, in an exchange that it may continue. Local: any thread."""
        self.gave_up = reason

    def abort(self, reason: str, kind: str = LEFT) -> None:
        """Ends the channel on all ranks and tells them the reason. Local: any thread. Idempotent.

        Args:
          reason: what this rank did, for ``"rank 3 <reason>"``.
          kind: see ``tree.Left``.
        """
        if not self._is_released:
            self.tree.abort(self.number, Left(self.rank, kind, reason))

    def notify(self, why: str) -> None:
        """Tells the other ranks that this one leaves its loop. Local: any thread."""
        if not self.is_dead:
            self.tree.notify(self.number, Left(self.rank, LEFT, why))

    def departed(self) -> str:
        """Which rank left its loop or died, and why; empty if none. Local: any thread."""
        self.tree.go_on()
        left = self.tree.left_of(self.number) or self.tree.notices.get(self.number)
        # Who has ended was not awaited any more: all messages of the iteration were sent.
        if left is None or left.rank == self.rank or left.kind == ENDED or self._is_released:
            return ""
        return f"rank {self._names[left.rank] if 0 <= left.rank < self.num_ranks else 'unknown'} {left.text}"

    def release(self) -> None:
        """Ends the channel here, after the exchange that ended it on all ranks. Local, idempotent."""
        if not (self.is_dead or self._is_released):
            self._is_released = True
            self.tree.release(self.number)

    @property
    def is_dead(self) -> bool:
        """Whether the channel was aborted, here or by another rank."""
        return self.tree.left_of(self.number) is not None

    def end(self) -> None:
        """This rank makes no further call: the strategy is gone. Local, idempotent."""
        self.abort(self.gave_up or ENDED, GAVE_UP if self.gave_up else ENDED)

    def _raise_if_left(self) -> None:
        left = self.tree.left_of(self.number)
        if left is not None:
            raise self._lost(left)

    def _lost(self, left: Left) -> RankLost:
        if left.rank == self.rank:
            return RankLost(f"rank {self._names[self.rank]} cannot go on: {left.text}.")
        return lost(left, self._names)

    def __repr__(self) -> str:
        return f"Channel({self.number}, rank={self.rank} of {self.num_ranks}, exchange {self.num_exchanges})"


def _first(values: Sequence[bytes]) -> bytes:
    return values[0]


def _rows_joined(values: Sequence[bytes]) -> bytes:
    """Rows one after the other, or one for all where they are equal."""
    counts, sizes = zip(*map(_SIZE.unpack_from, values), strict=True)
    rows = [memoryview(value)[_SIZE.size :] for value in values]
    if sizes[0] == len(rows[0]) and all(row == rows[0] for row in rows):
        return _SIZE.pack(sum(counts), sizes[0]) + bytes(rows[0])
    return b"".join(values)


def _rows_of(rows: bytes, num_ranks: int) -> list[bytes]:
    """The row of each rank.

    Raises:
      InputError: this is nothing that ranks send.
    """
    found: list[bytes] = []
    start = 0
    while len(rows) - start >= _SIZE.size:
        count, size = _SIZE.unpack_from(rows, start)
        start += _SIZE.size
        if not (0 < count <= num_ranks - len(found) and 0 <= size <= len(rows) - start):
            raise InputError(f"rank {len(found)} of the group wants to send {size} bytes; {_SAME_LIBRARY}")
        found += [rows[start : start + size]] * count
        start += size
    if len(found) != num_ranks:
        raise InputError(f"{len(found)} ranks of {num_ranks} sent a value; {_SAME_LIBRARY}")
    return found
