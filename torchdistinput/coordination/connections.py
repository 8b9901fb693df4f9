"""Point-to-point messages between two ranks, over TCP sockets that this library opens itself.

Problem. A message must never wait longer than its bound, block Ctrl-C, leave the late rank unnamed, or end the process.
The point-to-point messages of a gloo group do all four. A receive cannot be cancelled, and its wait stays in C++. The
death of a rank while two ranks connect is noticed only after five timeouts. Only a receive that expires closes a group.
If it expires while a connection is being made, an event arrives for a closed pair, and gloo's thread ends the process
(``terminate called ... EnforceNotMet``). In addition, gloo answers a message from a thread of its own.

Decisions.
- Plain non-blocking sockets. A wait is a ``poll`` of at most half a second in Python, so signals are seen, and any
  thread can end it (``close``). No thread is started, and no group of gloo is made.
- A *frame* is a header of two words (kind and length) and its content. Frames of one connection are read in the order
  in which they were sent, and only by a rank that waits for one: recursive doubling needs nothing else.
- A waiting rank sends a *status* twice a second: the ranks that it waits for. So each rank can tell late ranks from
  ranks that wait themselves, at any number of ranks, without further requests.
- A rank that leaves sends an *abort message* before it closes: the rank that ended the exchange, and the reason. The
  message is read in its order: an exchange whose messages were all sent before it is completed.
- A rank that leaves its loop sends a *notice* first, as an abort message may come late, or never: where the ranks have
  agreed on all steps, nobody waits for it. A notice ends nothing. It is read also by a rank that waits for no message
  and stays away for long (``departed``), which finds there that another one died, too.
- The system keeps idle connections alive, and bounds how long a network may be away (``configure``). What the other
  host's system acknowledged tells a busy rank from one that cannot be reached (``silent_seconds``).
- When a process dies, the system closes its sockets. A fork closes its copies (``fork_safety.py``), so that they do not
  keep the connection open.

References: RFC 9293 (TCP); gloo ``transport/tcp/pair.cc`` (``connectCallback`` looks at no closed state,
``handleEvents`` enforces one).
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from torchdistinput.coordination.exchanges import Pending
from torchdistinput.coordination.fork_safety import register_for_forks

Array = npt.NDArray[Any]
"""A contiguous array of one dimension, of any type of numbers."""

_HEAD: Final = struct.Struct("<qq")  # kind and length in bytes; the kind of a message of words is its tag
_STATUS: Final = -1
_ABORT: Final = -2
_NOTICE: Final = -3
_MAX_CONTENT: Final = 1 << 16  # bytes of a status or an abort message
_MAX_UNREAD: Final = 1 << 22  # bytes; about what the system holds
_BUFFER: Final = 1 << 14
_SMALL: Final = 1 << 12  # a message up to this size is copied, and sent in one piece with its header

_REST_SECONDS: Final = 0.5
_STATUS_SECONDS: Final = 0.5
_FRESH_SECONDS: Final = 2.5  # how long a status counts as true
_MAX_BLAMED: Final = 64
_CLOSING_SECONDS: Final = 0.5
_RECENT: Final = 64  # messages of a connection that can be renewed; its two ends are never that far apart

_KEEPALIVE_SECONDS: Final = 15
_MAX_PROBES: Final = 127  # what Linux takes
_TCP_RTO_MAX_MS: Final = 44  # since Linux 6.15; Python has no name for it
_MAX_BACKOFF_MS: Final = 2000  # between two trials to send: a network that comes back is used at once
_MAX_SILENCE_SECONDS: Final = 86_400.0  # the system takes no more than some weeks
_TCP_INFO: Final = struct.Struct("=24xI28xI84xI")  # unacked, last_ack_recv (in milliseconds), notsent_bytes


@final
class AbortMessage:
    """The reason why an exchange cannot go on, from the rank that ended it.

    Args:
      rank: the rank that ended the exchange.
      why: what this rank did, for ``"rank 3 <why>"``.
      use: of a notice, the use of the channel: an old one, which nobody read, is of no interest.
    """

    def __init__(self, rank: int, why: str, use: int = 0) -> None:
        self.rank = rank
        self.why = why
        self.use = use

    DIED: Final = "died or lost its connection"  # the beginning of the reason
    ENDED: Final = "ended"
    GAVE_UP: Final = "gave up waiting"  # the beginning of the reason
    FAILED: Final = "could not take part"  # the beginning of the reason

    def to_bytes(self) -> bytes:
        """The abort message as bytes for another rank. Local."""
        told = {"rank": self.rank, "why": self.why[: _MAX_CONTENT // 16], "use": self.use}
        return json.dumps(told).encode(errors="replace")

    @staticmethod
    def from_bytes(data: bytes, sender: int) -> AbortMessage:
        """The abort message from bytes; malformed bytes count as a broken connection to the sender. Local."""
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(data):
                case {"rank": int(rank), "why": str(why), "use": int(use)}:
                    return AbortMessage(rank, why, use)
                case _:
                    pass
        return AbortMessage(sender, AbortMessage.DIED)


@final
class Departed(RuntimeError):
    """A message cannot come any more.

    Args:
      message: the rank that ended the exchange, and the reason.
    """

    def __init__(self, message: AbortMessage) -> None:
        super().__init__(f"rank {message.rank} {message.why}")
        self.message = message


@final
class Connection:
    """The connection to one other rank.

    Args:
      peer: the other rank.
      connected: a socket that is connected to it.
      is_renewable: whether another socket may take its place (``disconnect``, ``renew``, ``give_up``).
    """

    def __init__(self, peer: int, connected: socket.socket, *, is_renewable: bool = False) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.socket = connected
        self.is_disconnected = False
        """Whether it waits for another socket."""
        self.renewals = 0
        """How many times another socket took the place."""
        self.received = 0
        """How many messages were received."""
        self.blamed: Sequence[int] = ()
        """The ranks for which the other rank waited, by its last status."""
        self.blamed_at = -_FRESH_SECONDS
        self._notice: AbortMessage | None = None  # the last one that was read
        # A thread that only looks must find whole frames; a garbage collection may close an iterator meanwhile.
        self._reading = threading.RLock()
        self._is_renewable = is_renewable
        self._given_up: AbortMessage | None = None
        self._sent = 0  # messages
        self._recent: deque[bytes | None] = deque(maxlen=_RECENT)  # sent messages, ``None`` for a large one
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # the range of bytes that were received and not used yet
        self._head: tuple[int, int] | None = None
        self._filled = 0
        self._content = bytearray()
        self._outgoing: deque[memoryview] = deque()
        self._lock = threading.Lock()  # of the outgoing frames: any thread may send an abort message

    @property
    def is_sent(self) -> bool:
        """Whether nothing waits to be sent."""
        return not self._outgoing

    def send(self, kind: int, content: memoryview | bytes) -> None:
        """Sends a frame without waiting; do not change the content of a large one before ``is_sent``. Local."""
        size = len(content)
        head = _HEAD.pack(kind, size)
        with self._lock:
            small = b"".join((head, content)) if size <= _SMALL else None
            if self._is_renewable and kind >= 0:
                self._sent += 1
                self._recent.append(small)
            if self.is_disconnected:
                return
            if small is not None:
                self._outgoing.append(memoryview(small))
            else:
                self._outgoing += (memoryview(head), memoryview(content))
            self._send_on()

    def send_on(self) -> None:
        """Sends the rest of earlier frames without waiting. Local."""
        with self._lock:
            self._send_on()

    def _send_on(self) -> None:
        outgoing = self._outgoing
        while outgoing:
            try:
                sent = self.socket.send(outgoing[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # the other rank has gone: the next receive from it raises
                outgoing.clear()
                return
            rest = outgoing[0][sent:]
            if rest:
                outgoing[0] = rest
            else:
                outgoing.popleft()

    def receive(self, kind: int, into: memoryview) -> bool:
        """Continues to read without waiting. Whether the next message is complete. One thread at a time.

        Args:
          kind: the kind of the message.
          into: the buffer for its content, of exactly its size.

        Raises:
          Departed: the message cannot come any more.
        """
        if self._given_up is not None:
            raise Departed(self._given_up)
        with self._reading:
            return self._receive(kind, into)

    def _receive(self, kind: int, into: memoryview) -> bool:
        while not self.is_disconnected:
            if self._head is None:
                if self._end - self._start < _HEAD.size:
                    if not self._read():
                        return False
                    continue
                self._begin_frame(kind, len(into))
            found, length = self._head or (kind, 0)
            target = into if found >= 0 else memoryview(self._content)
            if not self._fill(target, length):
                return False
            self._head = None
            if found >= 0:
                self.blamed = ()  # the other rank does not wait any more
                self.received += 1
                return True
            self._hear(found, bytes(self._content))
        return False

    def _begin_frame(self, kind: int, size: int) -> None:
        found, length = _HEAD.unpack_from(self._buffer, self._start)
        is_for_us = found in (_STATUS, _ABORT, _NOTICE) and 0 <= length <= _MAX_CONTENT
        if (found, length) != (kind, size) and not is_for_us:
            raise Departed(
                AbortMessage(
                    self.peer,
                    f"sent a message of kind {found} and {length} bytes, where one of kind {kind} and {size} bytes was "
                    "expected (every rank must run the same version of torchdistinput)",
                )
            )
        self._start += _HEAD.size
        self._filled = 0
        if found < 0:
            self._content = bytearray(length)
        self._head = found, length

    def _fill(self, target: memoryview, length: int) -> bool:
        while self._filled < length:
            held = min(self._end - self._start, length - self._filled)
            if held:
                target[self._filled : self._filled + held] = self._view[self._start : self._start + held]
                self._start += held
                self._filled += held
            elif length - self._filled < _BUFFER:
                if not self._read():
                    return False
            else:  # a large content is received into its target directly
                received = self._receive_into(target[self._filled : length])
                if not received:
                    return False
                self._filled += received
        return True

    def _read(self) -> bool:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            held = self._end - self._start
            self._view[:held] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, held
        received = self._receive_into(self._view[self._end :])
        self._end += received
        return received > 0

    def _receive_into(self, target: memoryview) -> int:
        try:
            received = self.socket.recv_into(target)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            received = 0
        if received:
            return received
        if not self._is_renewable:
            raise Departed(AbortMessage(self.peer, AbortMessage.DIED))
        self.disconnect()
        return 0

    def disconnect(self) -> int:
        """Closes the socket, for which another one will come. Returns the number of messages received. Local."""
        if not self.is_disconnected:
            with self._lock:
                self.is_disconnected = True
                self._outgoing.clear()
                self.socket.close()
            self._start = self._end = self._filled = 0
            self._head = None
        return self.received

    def renew(self, connected: socket.socket, renewals: int, received: int) -> None:
        """Goes on with another socket, and sends again what is missing.

        Args:
          connected: the socket.
          renewals: how many times this connection was renewed, with this one.
          received: how many messages the other rank received so far.
        """
        self.renewals = renewals
        with self._lock:
            missing = self._sent - received
            again = list(self._recent)[len(self._recent) - missing :] if 0 <= missing <= len(self._recent) else [None]
            frames = [memoryview(each) for each in again if each is not None]
            if len(frames) < len(again):
                self._given_up = AbortMessage(self.peer, f"{AbortMessage.DIED} in the middle of a large message")
                connected.close()
                return
            self.socket, self.is_disconnected = connected, False
            self._outgoing += frames
            self._send_on()

    def give_up(self, message: AbortMessage) -> None:
        """No other socket will come. Local."""
        self._given_up = message

    def _hear(self, kind: int, content: bytes) -> None:
        if kind == _ABORT:
            raise Departed(AbortMessage.from_bytes(content, self.peer))
        if kind == _NOTICE:
            self._notice = AbortMessage.from_bytes(content, self.peer)
            return
        self.blamed = np.frombuffer(content[: len(content) // 8 * 8], np.int64)[:_MAX_BLAMED].tolist()
        self.blamed_at = time.monotonic()

    def departed(self, use: int) -> AbortMessage | None:
        """Who left, by a notice in this use or an abort message, or the end of the connection. Any thread.

        Reads nothing that another thread will want to read.
        """
        if not self._reading.acquire(blocking=False):  # a thread reads, which is told itself
            return None
        try:
            if self._notice is not None and self._notice.use == use:
                return self._notice
            unread, has_ended = _look_into(self.socket)
            data = self._buffer[self._start : self._end] + unread
            begin = 0 if self._head is None else self._head[1] - self._filled
        finally:
            self._reading.release()
        while begin + _HEAD.size <= len(data):
            found, length = _HEAD.unpack_from(data, begin)
            if length < 0:  # no frame of this library: who reads it says so
                return None
            begin += _HEAD.size + length
            if found in (_NOTICE, _ABORT) and begin <= len(data):
                message = AbortMessage.from_bytes(bytes(data[begin - length : begin]), self.peer)
                if found == _ABORT:  # who has ended was not awaited any more: all messages of the iteration were sent
                    return None if message.why == AbortMessage.ENDED else message
                if message.use == use:
                    return message
        return AbortMessage(self.peer, AbortMessage.DIED) if has_ended else None

    def tell(self, kind: int, message: AbortMessage) -> None:
        """Sends a notice or an abort message without waiting. Any thread, also in a garbage collection."""
        if self._lock.acquire(timeout=_CLOSING_SECONDS):  # else a thread was interrupted in there: nothing is sent
            try:
                content = message.to_bytes()
                self._outgoing.append(memoryview(_HEAD.pack(kind, len(content)) + content))
                self._send_on()
            finally:
                self._lock.release()

    def send_abort(self, message: AbortMessage) -> None:
        """Sends the message, then ends the waits of both ranks. Any thread, but only once."""
        self.tell(_ABORT, message)
        with contextlib.suppress(OSError):  # the other rank has gone
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket, once no thread waits on it. Idempotent."""
        self.socket.close()


@final
class _Receipt(Pending):
    """A message that is to come."""

    def __init__(self, connections: Connections, connection: Connection, kind: int, words: Array) -> None:
        self._connections = connections
        self._connection = connection
        self._kind = kind
        self._into = words.data.cast("B")
        self._complete = False
        self._departed: Departed | None = None

    def has_come(self) -> bool:
        if not self._complete and self._departed is None:
            self._connections.awaited = self._connection
            try:
                self._complete = self._connection.receive(self._kind, self._into)
            except Departed as departed:
                self._departed = departed
            if not self._complete:
                self._connections.go_on()
            elif self._connections.times is not None:
                self._connections.times.setdefault(self._connection.peer, [0.0, 0.0])[1] = time.perf_counter()
        return self._complete or self._departed is not None

    def rest(self, seconds: float) -> None:
        self._connections.rest(min(seconds, _REST_SECONDS))

    def wait(self) -> None:
        while not self.has_come():
            self.rest(_REST_SECONDS)
        if self._departed is not None:
            raise self._departed


@final
class _Sent(Pending):
    """A message on its way."""

    def __init__(self, connections: Connections, connection: Connection) -> None:
        self._connections = connections
        self._connection = connection

    def has_come(self) -> bool:
        if not self._connection.is_sent:
            self._connection.send_on()
        return self._connection.is_sent

    def rest(self, seconds: float) -> None:
        self._connections.awaited = None
        self._connections.rest(min(seconds, _REST_SECONDS))

    def wait(self) -> None:
        while not self.has_come():
            self.rest(_REST_SECONDS)


@final
class Connections:
    """The connections of one channel. One thread at a time, except where a method says otherwise.

    Args:
      rank: this rank.
      num_ranks: how many ranks there are.
      sockets: a connected socket for each partner of this rank; this object owns them from now on.
      are_renewable: whether a lost connection waits for another socket.

    Attributes:
      awaited: the connection whose message this rank waits for.
      resting: whether a thread is in ``rest``, where an interruption loses nothing; after one it stays true, until the
        caller resets it.
    """

    def __init__(
        self, rank: int, num_ranks: int, sockets: Mapping[int, socket.socket], *, are_renewable: bool = False
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._by_rank = {
            peer: Connection(peer, connected, is_renewable=are_renewable) for peer, connected in sockets.items()
        }
        self.awaited: Connection | None = None
        self.resting = False
        self.times: dict[int, list[float]] | None = None
        """For each partner, when the last message to it was sent and the last one of it was received, by
        ``perf_counter``; ``None`` while that is not asked for."""
        self._status_at = 0.0
        register_for_forks(self)

    def send(self, words: Array, peer: int, tag: int) -> Pending:
        """Sends an array to one rank, after earlier arrays. Do not write to the array until the result has come."""
        connection = self._by_rank[peer]
        if self.times is not None:
            self.times.setdefault(peer, [0.0, 0.0])[0] = time.perf_counter()
        connection.send(tag, words.data.cast("B"))
        return _Sent(self, connection)

    def recv(self, words: Array, peer: int, tag: int) -> Pending:
        """Receives into an array from one rank. The array is complete when the result has come."""
        return _Receipt(self, self._by_rank[peer], tag, words)

    def begin(self) -> None:
        """Notes that an exchange begins: the first status is due ``_STATUS_SECONDS`` later. Local."""
        self._status_at = time.monotonic()

    def rest(
        self, seconds: float, reading: Sequence[socket.socket] = (), writing: Sequence[socket.socket] = ()
    ) -> None:
        """Waits until the awaited message may have come, for at most ``seconds``. An interruption loses nothing.

        Args:
          seconds: the bound.
          reading: other sockets that end the wait when they can be read from.
          writing: other sockets that end the wait when they can be written to.
        """
        awaited = self.awaited
        sending = [each.socket for each in self._by_rank.values() if not each.is_sent]
        awaiting = [] if awaited is None or awaited.is_disconnected else [awaited.socket]
        self.resting = True
        wait_for_sockets([*awaiting, *reading], [*sending, *writing], seconds)
        self.resting = False

    def go_on(self) -> None:
        """Sends what could not be sent before and, where this rank waits, a status twice a second. Local."""
        for each in self._by_rank.values():
            if not each.is_sent:
                each.send_on()
        now = time.monotonic()
        if self.awaited is not None and now - self._status_at >= _STATUS_SECONDS:
            self._status_at = now
            status = _status(self.late())
            for each in self._by_rank.values():
                if each.is_sent:  # a rank that reads nothing for hours gets only as many as its buffers hold
                    each.send(_STATUS, status)

    def late(self) -> list[int]:
        """The late ranks: the awaited rank, or the ranks for which it waits itself. Any thread."""
        awaited = self.awaited
        if awaited is None:
            return []
        blamed = awaited.blamed
        # If the awaited rank waited for this rank, it does not any more: this rank's message was sent.
        if blamed and self.rank not in blamed and time.monotonic() - awaited.blamed_at < _FRESH_SECONDS:
            return [rank for rank in blamed if 0 <= rank < self.num_ranks][:_MAX_BLAMED]
        return [awaited.peer]

    def connection(self, peer: int) -> Connection:
        """The connection to a partner. Local."""
        return self._by_rank[peer]

    def disconnected(self) -> list[Connection]:
        """The connections that wait for another socket. Local."""
        return [each for each in self._by_rank.values() if each.is_disconnected]

    def silent_seconds(self, peer: int) -> float:
        """For how long a partner's host has acknowledged nothing; 0 where nothing tells so. Any thread."""
        connection = self._by_rank.get(peer)
        return 0.0 if connection is None or connection.is_disconnected else _silent_seconds(connection.socket)

    def notify(self, message: AbortMessage) -> None:
        """Tells all partners that a rank left, without waiting. Any thread."""
        for each in self._by_rank.values():
            each.tell(_NOTICE, message)

    def departed(self, use: int) -> AbortMessage | None:
        """Which rank left, and why, as far as a partner told or its connection shows; ``None`` if none. Any thread."""
        found = (each.departed(use) for each in self._by_rank.values())
        return next((message for message in found if message is not None), None)

    def send_abort(self, message: AbortMessage) -> None:
        """Sends the abort message to all partners, and ends all waits. Any thread, but only once."""
        for each in self._by_rank.values():
            each.send_abort(message)

    def close(self) -> None:
        """Closes the sockets; no thread is in ``rest`` any more. Idempotent."""
        for each in self._by_rank.values():
            each.close()

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: a copy of a socket in a fork would outlive the rank."""
        self.close()


def configure(connecting: socket.socket, silence_seconds: float) -> None:
    """Sets the options of a socket: it never blocks, and shows when the other host is gone. Local.

    The system asks the other host from time to time whether it is there (keepalive), so that a firewall does not forget
    an idle connection; firewalls do so after some minutes. No message of this library is sent for that.

    Args:
      connecting: the socket.
      silence_seconds: for how long the other host may acknowledge nothing, until the connection counts as lost.
    """
    connecting.setblocking(False)
    connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connecting.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence_seconds = min(silence_seconds, _MAX_SILENCE_SECONDS)
    count = min(_MAX_PROBES, int(silence_seconds / _KEEPALIVE_SECONDS) + 1)
    options = [
        (getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None)), _KEEPALIVE_SECONDS),
        (getattr(socket, "TCP_KEEPINTVL", None), _KEEPALIVE_SECONDS),
        (getattr(socket, "TCP_KEEPCNT", None), count),
        (getattr(socket, "TCP_USER_TIMEOUT", None), int(1e3 * silence_seconds)),
        (_TCP_RTO_MAX_MS if sys.platform == "linux" else None, _MAX_BACKOFF_MS),
    ]
    for option, value in options:
        if option is not None:
            with contextlib.suppress(OSError):  # an older system
                connecting.setsockopt(socket.IPPROTO_TCP, option, value)


def _look_into(connected: socket.socket) -> tuple[bytes, bool]:
    """What has come over a connection and was not read, which stays there; and whether nothing will come after it."""
    try:
        unread = connected.recv(_MAX_UNREAD, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return b"", False
    except OSError:  # it was reset; or this rank has closed it
        return b"", connected.fileno() >= 0
    if not unread or sys.platform != "linux":
        return unread, not unread
    poll = select.poll()
    poll.register(connected, select.POLLRDHUP)
    return unread, bool(poll.poll(0))


def _silent_seconds(connected: socket.socket) -> float:
    if sys.platform != "linux":
        return 0.0
    try:
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:  # closed meanwhile
        return 0.0
    if len(info) < _TCP_INFO.size:  # an older system
        return 0.0
    unacknowledged, silent, unsent = _TCP_INFO.unpack(info)
    return float(silent) / 1e3 if unacknowledged or unsent else 0.0


def _status(ranks: Sequence[int]) -> bytes:
    """The content of a status: the ranks that a rank waits for. Local."""
    return np.array(ranks[:_MAX_BLAMED], np.int64).tobytes()


def abort_connection(peer: int, connected: socket.socket, message: AbortMessage) -> None:
    """Sends an abort message to one rank, and closes the connection. Local; waits for a short time at most."""
    connection = Connection(peer, connected)
    connection.send_abort(message)
    connection.close()


def tell_waiting(connected: socket.socket, ranks: Sequence[int]) -> None:
    """Sends a status to one rank, as the first frame of its connection. Local."""
    content = _status(ranks)
    with contextlib.suppress(OSError):  # it has gone, which its next message would show
        connected.send(_HEAD.pack(_STATUS, len(content)) + content)


def wait_for_sockets(reading: Sequence[socket.socket], writing: Sequence[socket.socket], seconds: float) -> None:
    """Waits until one of the sockets is ready, for at most ``seconds``; a closed socket ends the wait. Local."""
    try:
        if sys.platform == "win32":
            if reading or writing:
                select.select(reading, writing, reading, seconds)
            else:
                time.sleep(seconds)
            return
        poll: Any = select.poll()
        for each in reading:
            poll.register(each, select.POLLIN)
        for each in writing:  # the same socket may be in both lists
            poll.register(each, select.POLLOUT | (select.POLLIN if each in reading else 0))
        poll.poll(seconds * 1e3)
    except (OSError, ValueError):  # closed by another thread: the next receive raises
        time.sleep(0)
