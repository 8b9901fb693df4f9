"""The connections between the ranks: one tree over TCP, for the life of the process.

Problem. Ranks exchange a few numbers for every step, in ``next``, beside the collectives of the training loop, which
must not be disturbed. No wait may be without a bound, block Ctrl-C, or leave the late rank unnamed; and a message
between two ranks must not depend on what other iterators, threads and strategies of theirs do.

Decisions.
- Each rank has one connection to its parent, and one to each child. Up to 8 ranks the tree is a star around the first
  one. A value of all ranks goes up the tree, joined at each parent, and comes down, the same for all
  (``channel.Channel.merge``).
- Messages of all iterators and strategies travel on these connections, in *frames* with the number of their *channel*.
- No thread. Whoever polls or waits reads for all channels. A wait is a ``select`` of at most half a second in Python,
  so signals are seen.
- A rank that waits says so twice a second, and for which ranks (a *status*). So each rank can tell late ranks from
  ranks that wait themselves, without further requests.
- A rank that leaves a channel says so in an *abort*, with its reason; a closed connection says so for the dead. Each
  rank passes it on, but never past a result that came from above and that it has not passed on yet. The first rank,
  where results are made, passes an abort on at once, also where it has all messages and will still make the result:
  it may be in its training code for long, and the others are to hear at once of a rank that died.
- A rank that leaves its loop also sends a *notice*, which ends nothing. It is for ranks in their training code.
- Nothing is given up for silence alone (``configure``): only a wait has a bound. What the other host's system
  acknowledged tells a busy rank from one that cannot be reached (``silent_seconds``).
- When a process dies, the system closes its sockets. A fork closes its copies (``fork_safety.py``).

Alternatives refused. A group of gloo: its waits are in C++ and cannot be ended, an expired one kills the group, and who
died is unknown beyond two ranks. Recursive doubling: all ranks are equal, so each has to dial and to accept, and nobody
knows who is missing. The tree costs the first rank more (about 20 us a child and vote), and all others less.

References: RFC 9293 (TCP).
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

import numpy as np

from torchdistinput.coordination.fork_safety import register_for_forks

ALL: Final = -1
"""In place of the number of a channel: all channels."""
FAN_OUT: Final = 8

_HEAD: Final = struct.Struct("<qqq")  # kind, channel, length in bytes
_MESSAGE, _STATUS, _ABORT, _NOTICE = range(4)
_MAX_MESSAGE: Final = 1 << 40  # bytes; memory is taken only for what has come
_MAX_OTHER: Final = 1 << 16
_MAX_REASON: Final = 4000  # characters
_SMALL: Final = 1 << 12  # a message up to this size is sent in one piece with its head
_BUFFER: Final = 1 << 15
_LARGE: Final = 1 << 20

_REST_SECONDS: Final = 0.5
_FRESH_SECONDS: Final = 2.5  # how long a status counts as true
_MAX_BLAMED: Final = 64

_KEEPALIVE_SECONDS: Final = 15
_MAX_PROBES: Final = 127  # what Linux takes
_TCP_RTO_MAX_MS: Final = 44  # since Linux 6.15; Python has no name for it
_MAX_BACKOFF_MS: Final = 2000  # between two trials to send: a network that comes back is used at once
_SILENCE_SECONDS: Final = 86_400  # beyond any wait: no connection ends before a wait does
_TCP_INFO: Final = struct.Struct("=24xI28xI84xI")  # unacked, last_ack_recv (in milliseconds), notsent_bytes

DIED: Final = "died or lost its connection"
ENDED: Final = "ended"
GAVE_UP: Final = "gave up waiting"
FAILED: Final = "could not take part"
LEFT: Final = "left"


class Left(NamedTuple):
    """Which rank ended a channel, and why.

    Args:
      rank: the rank.
      kind: ``DIED``, ``ENDED``, ``GAVE_UP``, ``FAILED`` or ``LEFT``.
      text: what the rank did, for ``"rank 3 <text>"``.
    """

    rank: int
    kind: str
    text: str

    def to_bytes(self) -> bytes:
        """For another rank. Local."""
        return json.dumps(self._replace(text=self.text[:_MAX_REASON])).encode(errors="replace")

    @staticmethod
    def from_bytes(data: bytes, sender: int) -> Left:
        """What another rank sent; bytes that nobody understands count as a broken connection to the sender. Local."""
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(data):
                case [int(rank), str(kind), str(text)]:
                    return Left(rank, kind, text)
                case _:
                    pass
        return Left(sender, DIED, DIED)


def parent_of(rank: int) -> int | None:
    """The rank above one in the tree; ``None`` for the first.

    The ranks below a parent follow it, one by one. So what is joined in the order of the children is in the order of
    the ranks.

    >>> [parent_of(rank) for rank in (0, 1, 7, 8, 9, 16, 64, 65, 72)]
    [None, 0, 0, 0, 8, 0, 0, 64, 64]
    """
    power = FAN_OUT
    while rank and rank % power == 0:
        power *= FAN_OUT
    return rank - rank % power if rank else None


def levels_of(num_ranks: int) -> int:
    """How many connections lie between the first rank and the last one, at most.

    >>> [levels_of(num_ranks) for num_ranks in (1, 2, 8, 9, 64, 65)]
    [0, 1, 1, 2, 2, 3]
    """
    levels = 0
    while FAN_OUT**levels < num_ranks:
        levels += 1
    return levels


def children_of(rank: int, num_ranks: int) -> list[int]:
    """The ranks below one in the tree.

    >>> children_of(0, 20), children_of(8, 20), children_of(7, 20)
    ([1, 2, 3, 4, 5, 6, 7, 8, 16], [9, 10, 11, 12, 13, 14, 15], [])
    """
    return [each for each in range(rank + 1, num_ranks) if parent_of(each) == rank]


@final
class Link:
    """The connection to the parent, or to a child.

    Args:
      peer: the other rank.
      connected: a socket that is connected to it.

    Attributes:
      inbox: by channel, the messages that were read and not taken.
      awaits: by channel, when the other rank last said for which ranks it waits, and for which.
      has_spoken: whether the other rank has sent a frame.
      unsent: what the system does not take yet.
    """

    def __init__(self, peer: int, connected: socket.socket) -> None:
        configure(connected)
        self.peer = peer
        self.socket = connected
        self.inbox: dict[int, deque[bytes]] = {}
        self.awaits: dict[int, tuple[float, list[int]]] = {}
        self.has_spoken = False
        self.unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._sending = threading.Lock()

    def send(self, kind: int, channel: int, content: bytes) -> None:
        """Sends a frame, now or later, without waiting. Any thread, also in a garbage collection."""
        head = _HEAD.pack(kind, channel, len(content))
        if len(content) <= _SMALL:
            self.unsent.append(memoryview(head + content))
        else:
            self.unsent.extend((memoryview(head), memoryview(content)))
        self.flush()

    def tell_waiting(self, channel: int, late: list[int]) -> None:
        """Tells the other rank for which ranks this one waits, if all else was sent to it. Any thread."""
        if not self.unsent:  # a rank that reads nothing for hours gets no more than that
            self.send(_STATUS, channel, np.array(late[:_MAX_BLAMED], np.int64).tobytes())

    def flush(self) -> None:
        """Sends the rest of earlier frames without waiting. Any thread."""
        # Whoever holds the lock looks again after it: a thread that finds it taken need not wait.
        while self.unsent and self._sending.acquire(blocking=False):
            try:
                if not self._flush():
                    return
            finally:
                self._sending.release()

    def _flush(self) -> bool:
        """Whether the system took all."""
        try:
            while self.unsent:
                first = self.unsent[0]
                sent = self.socket.send(first)
                if sent < len(first):
                    self.unsent[0] = first[sent:]
                else:
                    self.unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:  # the other rank has gone, which the next read tells
            self.unsent.clear()
        except BaseException:  # interrupted in the middle of a frame: what would follow is none
            self.close()
            raise
        return True

    def read(self) -> Iterator[tuple[int, int, bytes]]:
        """The frames that have come. One thread at a time.

        Raises:
          OSError: the connection has ended.
          ValueError: the other rank sent what is no frame.
        """
        received, start, expected = self._received, 0, _BUFFER
        try:
            while True:
                try:
                    part = self.socket.recv(expected)
                except (BlockingIOError, InterruptedError):
                    return
                if not part:
                    raise ConnectionResetError
                received += part
                is_all = len(part) < expected
                while len(received) - start >= _HEAD.size:
                    kind, channel, length = _HEAD.unpack_from(received, start)
                    limit = _MAX_MESSAGE if kind == _MESSAGE else _MAX_OTHER
                    if not (_MESSAGE <= kind <= _NOTICE and channel >= ALL and 0 <= length <= limit):
                        raise ValueError(
                            f"sent a frame of kind {kind} and {length} bytes for channel {channel}, which is none "
                            "(every rank must run the same version of torchdistinput)"
                        )
                    missing = length - (len(received) - start - _HEAD.size)
                    if missing > 0:
                        expected = min(max(_BUFFER, missing), _LARGE)
                        break
                    start += _HEAD.size + length
                    self.has_spoken, expected = True, _BUFFER
                    yield kind, channel, bytes(memoryview(received)[start - length : start])
                if is_all:
                    return
        finally:
            del received[:start]

    def takes(self, channel: int) -> bytes | None:
        """The next message of a channel, if it has come. One thread a channel."""
        waiting = self.inbox.get(channel)
        return waiting.popleft() if waiting else None

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@final
class Tree:
    """The connections of this rank to its parent and its children. Any thread.

    Args:
      rank: this rank.
      num_ranks: how many ranks there are.

    Attributes:
      parent: the rank above; ``None`` for the first.
      children: the ranks below.
      is_meeting: whether ranks still connect: a child that has said nothing may come again.
      left: by channel, who ended it; ``ALL`` for who ended all.
      notices: by channel, who left its loop.
      tellers: by channel, what tells the others for whom this rank waits.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.parent = parent_of(rank)
        self.children = children_of(rank, num_ranks)
        self.is_meeting = False
        self.left: dict[int, Left] = {}
        self.notices: dict[int, Left] = {}
        self.tellers: dict[int, Callable[[float], None]] = {}
        self._links: dict[int, Link] = {}
        self._selector = selectors.DefaultSelector()
        self._untold: deque[tuple[int, Left, int | None]] = deque()
        self._reading = threading.Lock()
        self._has_read = threading.Condition()
        self.end: Final = weakref.finalize(self, _end, rank, self.left, self._links, self._selector)
        """Tells the other ranks that this one has ended, and closes the connections; also at exit. Idempotent."""
        register_for_forks(self)

    def add(self, link: Link) -> None:
        """Takes a connection, in place of an earlier one to the same rank."""
        if link.peer in self._links:
            self._forget(self._links[link.peer])
        self._links[link.peer] = link
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def watch(self, listener: socket.socket) -> None:
        """A connection to be accepted ends a ``rest``, too."""
        self._selector.register(listener, selectors.EVENT_READ)

    def unwatch(self, listener: socket.socket) -> None:
        """The end of ``watch``."""
        with contextlib.suppress(KeyError, ValueError):  # the tree has ended
            self._selector.unregister(listener)

    def _forget(self, link: Link) -> None:
        del self._links[link.peer]
        with contextlib.suppress(KeyError, ValueError):  # its socket is closed
            self._selector.unregister(link.socket)
        link.close()

    def link(self, peer: int) -> Link | None:
        """The connection to the parent or a child, if it is there."""
        return self._links.get(peer)

    def links(self) -> list[Link]:
        """All connections."""
        return list(self._links.values())

    def send(self, peer: int, channel: int, content: bytes) -> None:
        """Sends a message to the parent or a child, without waiting."""
        link = self._links.get(peer)
        if link is not None:  # else it has gone, which the next wait tells
            link.send(_MESSAGE, channel, content)

    def notify(self, channel: int, left: Left, heard_of: int | None = None) -> None:
        """Tells all ranks that one leaves its loop."""
        if channel not in self.notices:
            self.notices[channel] = left
            self._pass_on(_NOTICE, channel, left, heard_of)

    def abort(self, channel: int, left: Left, heard_of: int | None = None) -> None:
        """Ends a channel, or all, on all ranks. Idempotent.

        Args:
          channel: its number, or ``ALL``.
          left: who ended it.
          heard_of: the rank that said so, if it is another one.
        """
        if self.left_of(channel) is None:
            self.left[channel] = left
            if heard_of is None:  # nobody here takes its messages any more
                for link in self.links():
                    link.inbox.pop(channel, None)
            self._untold.append((channel, left, heard_of))
            self.tell_left()

    def tell_left(self) -> None:
        """Passes on who ended a channel, once the results that came before it were passed on."""
        for _ in range(len(self._untold)):
            with contextlib.suppress(IndexError):  # another thread took it
                channel, left, heard_of = self._untold.popleft()
                if heard_of is not None and self._holds_results(channel):
                    self._untold.append((channel, left, heard_of))
                else:
                    self._pass_on(_ABORT, channel, left, heard_of)

    def _holds_results(self, channel: int) -> bool:
        up = None if self.parent is None else self._links.get(self.parent)
        if up is None or not self.children:
            return False
        return any(up.inbox.values()) if channel == ALL else bool(up.inbox.get(channel))

    def _pass_on(self, kind: int, channel: int, left: Left, heard_of: int | None) -> None:
        for link in self.links():
            if link.peer != heard_of:
                link.send(kind, channel, left.to_bytes())

    def left_of(self, channel: int) -> Left | None:
        """Who ended a channel, or all of them."""
        return self.left.get(channel) or self.left.get(ALL)

    def release(self, channel: int) -> None:
        """Forgets a channel that this rank will not use any more."""
        for link in self.links():
            link.inbox.pop(channel, None)
            link.awaits.pop(channel, None)
        self.notices.pop(channel, None)
        self.tell_left()

    def go_on(self) -> None:
        """Reads what has come, and sends what could not be sent before, for all channels. Never waits."""
        if self._reading.acquire(blocking=False):
            try:
                self._read(0.0)
            finally:
                self._reading.release()

    def rest(self, seconds: float, is_ready: Callable[[], bool]) -> None:
        """Waits until what is awaited has come, for at most ``seconds`` and never long. An interruption loses nothing.

        While ranks meet, anything that comes ends it.

        Args:
          seconds: how long.
          is_ready: whether there is nothing to wait for any more.
        """
        seconds = max(0.0, min(seconds, _REST_SECONDS))
        until = time.monotonic() + seconds
        if self._reading.acquire(blocking=False):
            try:
                while not is_ready():
                    self._read(max(0.0, until - time.monotonic()))
                    if self.is_meeting or time.monotonic() >= until:
                        break
            finally:
                self._reading.release()
        else:
            with self._has_read:
                if not is_ready():
                    self._has_read.wait(seconds)

    def _read(self, seconds: float) -> None:
        try:
            sending = [link for link in self.links() if link.unsent]
            for link in sending:
                self._selector.modify(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
            found = self._selector.select(seconds)
            for link in sending:
                link.flush()
                self._selector.modify(link.socket, selectors.EVENT_READ, link)
        except (OSError, ValueError, KeyError):  # closed at exit, in a fork, or by a thread that takes another one
            if seconds:
                time.sleep(min(seconds, 0.05))
            return
        for key, events in found:
            if isinstance(key.data, Link) and events & selectors.EVENT_READ:
                self._hear(key.data)
        if found:
            with self._has_read:
                self._has_read.notify_all()
        now = time.monotonic()
        for tell in list(self.tellers.values()):
            tell(now)

    def _hear(self, link: Link) -> None:
        try:
            for kind, channel, content in link.read():
                if kind == _MESSAGE:
                    left = self.left.get(channel)
                    if left is None or left.rank != self.rank:
                        link.inbox.setdefault(channel, deque()).append(content)
                    link.awaits.pop(channel, None)
                elif kind == _STATUS:
                    blamed = np.frombuffer(content[: len(content) // 8 * 8], np.int64)[:_MAX_BLAMED].tolist()
                    link.awaits[channel] = time.monotonic(), blamed
                elif kind == _NOTICE:
                    self.notify(channel, Left.from_bytes(content, link.peer), link.peer)
                else:
                    self.abort(channel, Left.from_bytes(content, link.peer), link.peer)
        except OSError:
            self._lose(link, Left(link.peer, DIED, DIED))
        except ValueError as garbage:
            self._lose(link, Left(link.peer, FAILED, str(garbage)))
        except BaseException as error:  # an interruption in the middle of a frame
            self.abort(ALL, Left(self.rank, LEFT, f"was interrupted by {type(error).__name__} while it read"))
            raise

    def _lose(self, link: Link, left: Left) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.socket)
        link.close()
        if self.is_meeting and not link.has_spoken and link.peer != self.parent:
            self._links.pop(link.peer, None)
        else:
            self.abort(ALL, left, link.peer)

    def late_of(self, channel: int, awaited: list[int]) -> list[int]:
        """The late ranks: those that this one waits for, or the ranks for which they wait themselves."""
        found: dict[int, None] = {}
        for peer in awaited:
            link = self._links.get(peer)
            at, blamed = (0.0, []) if link is None else link.awaits.get(channel, (0.0, []))
            # One that waited for this rank does not any more: what this rank had to send was sent.
            is_true = time.monotonic() - at < _FRESH_SECONDS and self.rank not in blamed
            found.update(dict.fromkeys([each for each in blamed if 0 <= each < self.num_ranks] if is_true else []))
            if not (blamed and is_true):
                found[peer] = None
        return list(found)[:_MAX_BLAMED]

    def silent_seconds(self, peer: int) -> float:
        """For how long the host of the parent or a child has acknowledged nothing; 0 where nothing tells so."""
        link = self._links.get(peer)
        return 0.0 if link is None else _silent_seconds(link.socket)

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: a copy of a socket in a fork would outlive the rank."""
        self.end.detach()
        self._selector.close()
        for link in self.links():
            link.socket.close()


def _end(rank: int, left: dict[int, Left], links: dict[int, Link], selector: selectors.BaseSelector) -> None:
    left.setdefault(ALL, Left(rank, ENDED, ENDED))  # a thread of this rank that still waits blames no other one
    for link in list(links.values()):
        link.send(_ABORT, ALL, Left(rank, ENDED, ENDED).to_bytes())
        link.close()
    selector.close()


def configure(connected: socket.socket) -> None:
    """Sets the options of a socket: it never blocks, and does not go idle. Local.

    The system asks the other host from time to time whether it is there (keepalive), so that a firewall does not forget
    an idle connection; firewalls do so after some minutes. A connection is not given up while the network is away.
    """
    connected.setblocking(False)
    if connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = [
        (getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None)), _KEEPALIVE_SECONDS),
        (getattr(socket, "TCP_KEEPINTVL", None), _KEEPALIVE_SECONDS),
        (getattr(socket, "TCP_KEEPCNT", None), _MAX_PROBES),
        (getattr(socket, "TCP_USER_TIMEOUT", None), 1000 * _SILENCE_SECONDS),
        (_TCP_RTO_MAX_MS if sys.platform == "linux" else None, _MAX_BACKOFF_MS),
    ]
    for option, value in options:
        if option is not None:
            with contextlib.suppress(OSError):  # an older system
                connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _silent_seconds(connected: socket.socket) -> float:
    if sys.platform != "linux":
        return 0.0
    try:
        info: Any = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # closed meanwhile
        return 0.0
    if len(info) < _TCP_INFO.size:  # an older system
        return 0.0
    unacknowledged, silent, unsent = _TCP_INFO.unpack(info)
    return float(silent) / 1e3 if unacknowledged or unsent else 0.0
