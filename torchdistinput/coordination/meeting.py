"""How the ranks meet: they connect, as a tree, while ``Strategy()`` is made, and at no other time.

- A parent listens at a port, and writes its address to the store. Its children read it there, and connect. The port is
  closed once all ranks have met. So the ranks ask for one key each, and the meeting is also the barrier: each parent
  knows which child is missing. A rank that waits for children serves them while it still dials its own parent.
- A child dials, at each address in turn, until the time is over: a network may be away for seconds, and a store may
  have the address of a parent before a restart, which a new parent writes over.
- The first bytes of a connection are a *handshake*: a secret of the parent, the version of the protocol, the sender.
  The handshake is read whole before the secret is compared, in constant time, so nothing tells how much of a guess is
  right. The parent answers with a proof that it knows the secret: what listens at a port may be another program.
- The secret keeps strangers out: only processes that can read the store know it. It protects nothing else. Nothing is
  encrypted, the secret included: whoever sees the traffic between the hosts, or reaches the store's port, can read and
  write all. So the ranks, as torch's own process groups, belong on a network of their own.
- The interface is the first one in ``GLOO_SOCKET_IFNAME``, as for gloo. Without that variable a parent listens on all
  interfaces, and its children try all its addresses; on the same host the loopback address first. The port is any free
  one, or the first free one in ``TORCHDISTINPUT_PORTS``, for firewalls.
- This rank's own troubles (no descriptor, no free port) are raised as its own, and told to the others.

What asks the store and dials may stay in C++ or in a resolver, and runs on a thread (``store.Asked``), which ends with
the meeting. The caller's thread does the rest, sees signals, and looks at the clock.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, final

from torchdistinput.coordination.addresses import Address, address_of, host_identity, own_addresses
from torchdistinput.coordination.calls import Calls
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import StartedExchange
from torchdistinput.coordination.failures import in_one_line
from torchdistinput.coordination.store import Asked, Store
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.coordination.tree import FAILED, GAVE_UP, Link, Tree
from torchdistinput.errors import CoordinationTimeout, InputError, RankLost

MEETING: Final = 0
"""The number of the channel in which ranks meet."""
VERSION: Final = 4
"""Of the handshake, the frames, and what they hold."""

_HANDSHAKE: Final = struct.Struct("<16sqqq")  # secret, version, sender, number of the attempt
_ANSWER: Final = struct.Struct("<16sq")  # a proof that the parent knows its secret; its version
_CONNECT_SECONDS: Final = 1.0  # at an address, the first time; later three times as long
_ANSWER_SECONDS: Final = 3.0
_WHAT: Final = "Strategy()"
_OPEN_THE_NETWORK: Final = (
    ". A firewall, or a network that is down or not the one meant, keeps the hosts apart: open a range of ports for "
    "TORCHDISTINPUT_PORTS=29600-29700, or name the interface in GLOO_SOCKET_IFNAME"
)
_NAP_SECONDS: Final = 0.01
_MAX_NAP_SECONDS: Final = 0.1
_OLD_SECONDS: Final = 3.0  # for a new parent, to write over what one before a restart has left
_BACKLOG: Final = 128
_MAX_TOLD: Final = 3  # addresses in a message
_MAX_TROUBLE: Final = 1000  # characters
_OWN: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@final
class Listener:
    """The port at which a parent awaits its children, while they meet.

    Args:
      name: this rank, as users know it.
      children: the ranks that may come.
      interface: the network interface to listen at; empty for all.
      ports: the ports to choose from, as ``29600-29700``; empty for any free one.

    Raises:
      InputError: there is no such interface, or no free port, or no descriptor left.
    """

    def __init__(self, name: int, children: Sequence[int], interface: str, ports: str) -> None:
        self._name = name
        self._children = children
        here = address_of(interface) if interface else ""
        self.socket = _listen(here, ports)
        self.socket.setblocking(False)
        self.address = Address(
            host_identity(), self.socket.getsockname()[1], (here,) if here else (), secrets.token_bytes(16)
        )
        self._arriving: list[tuple[socket.socket, bytearray]] = []
        self._attempts: dict[int, int] = {}

    def arrivals(self, is_here: Callable[[int], bool]) -> Iterator[Link]:
        """The children whose handshakes are complete. Never waits: a rank may stand still before its handshake.

        Args:
          is_here: whether a child is connected: an earlier attempt of it may come late, and must not end that one.

        Raises:
          InputError: this rank has no descriptors left, or a child runs another version.
        """
        while True:
            try:
                connected, _ = self.socket.accept()
            except OSError as error:
                if error.errno in _OWN:
                    raise _own_trouble(self._name, error) from error
                break  # there is none, or an error of the network
            connected.setblocking(False)
            self._arriving.append((connected, bytearray()))
        for each in list(self._arriving):
            connected, received = each
            try:
                part = connected.recv(_HANDSHAKE.size - len(received))
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                part = b""
            received += part
            if part and len(received) < _HANDSHAKE.size:
                continue
            self._arriving.remove(each)
            child = self._admitted(connected, received, is_here) if part else None
            if child is None:
                connected.close()
            else:
                yield Link(child, connected)
        while len(self._arriving) > _BACKLOG:  # connections that send nothing
            self._arriving.pop(0)[0].close()

    def _admitted(self, connected: socket.socket, received: bytearray, is_here: Callable[[int], bool]) -> int | None:
        secret, version, child, attempt = _HANDSHAKE.unpack(received)
        if not hmac.compare_digest(secret, self.address.secret) or child not in self._children:
            return None
        if is_here(child) and attempt < self._attempts[child]:
            return None
        with contextlib.suppress(OSError):  # it has gone, which the next read tells
            connected.send(_ANSWER.pack(_proof_of(secret), VERSION))
        if version != VERSION:
            connected.close()
            raise _other_version(self._name, child)
        self._attempts[child] = attempt
        return int(child)

    def close(self) -> None:
        """Closes the port. Idempotent."""
        self.socket.close()
        while self._arriving:
            self._arriving.pop()[0].close()


@final
class _Dial:
    """How a child finds its parent, and connects. On a thread.

    Args:
      rank: this rank.
      parent: its parent.
      names: the ranks as users know them, by rank.
      seconds: how long it takes at most.
    """

    def __init__(self, rank: int, parent: int, names: Sequence[int], seconds: float) -> None:
        self._rank = rank
        self._parent = parent
        self._names = names
        self._until = time.monotonic() + seconds
        self._attempts = 0
        self.told = ""
        """Why the parent cannot be reached, in words; empty where it has not come."""

    def connect(self, read: Callable[[], str | None], given_up: threading.Event) -> socket.socket | None:
        """The connection to the parent; ``None`` if the time is over.

        Args:
          read: reads the text of the parent from the store.
          given_up: is set when nobody waits any more.

        Raises:
          RankLost: the parent said that it cannot take part.
          InputError: this rank has no descriptors left, or the parent runs another version.
        """
        pause, failed_at = 0.005, None
        while not given_up.is_set() and time.monotonic() < self._until:
            text = read()
            found: Any = None if text is None else json.loads(text)
            if isinstance(found, list):
                connected = self._try_all(Address.of(found), given_up)
                if connected is not None:
                    return connected
            elif isinstance(found, str):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > _OLD_SECONDS:
                    raise RankLost(f"{_WHAT}: rank {self._names[self._parent]} {FAILED}: {found}")
            given_up.wait(pause)
            pause = min(2 * pause, 0.25)
        return None

    def _try_all(self, there: Address, given_up: threading.Event) -> socket.socket | None:
        local = ("127.0.0.1", "::1") if there.host == host_identity() else ()
        failures = []
        seconds = _CONNECT_SECONDS if not self.told else 3 * _CONNECT_SECONDS
        for address in dict.fromkeys((*local, *there.addresses)):
            if given_up.is_set():
                return None
            try:
                return self._try(address, there, seconds)
            except OSError as error:
                if error.errno in _OWN or (error.errno == errno.EADDRNOTAVAIL and "." in address):
                    raise _own_trouble(self._names[self._rank], error) from error
                place = f"[{address}]:{there.port}" if ":" in address else f"{address}:{there.port}"
                if address not in local:
                    failures.append(f"{place} ({error.strerror or 'no answer'})")
        where = ", ".join(failures[:_MAX_TOLD]) or f"port {there.port} of this host"
        self.told = f"rank {self._names[self._parent]} was here, but does not answer at {where}"
        return None

    def _try(self, address: str, there: Address, seconds: float) -> socket.socket:
        self._attempts += 1
        connected = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)  # no resolver is asked
        try:
            connected.settimeout(seconds)
            connected.connect((address, there.port))
            connected.settimeout(_ANSWER_SECONDS)
            connected.sendall(_HANDSHAKE.pack(there.secret, VERSION, self._rank, self._attempts))
            answer = bytearray()
            while len(answer) < _ANSWER.size:
                part = connected.recv(_ANSWER.size - len(answer))
                if not part:
                    raise ConnectionResetError(errno.ECONNRESET, "closed without an answer")
                answer += part
            proof, version = _ANSWER.unpack(answer)
            if not hmac.compare_digest(proof, _proof_of(there.secret)):
                raise ConnectionResetError(errno.ECONNRESET, "another program answered")
            if version != VERSION:
                raise _other_version(self._names[self._rank], self._names[self._parent])
        except BaseException:
            connected.close()
            raise
        return connected


@final
class Met(NamedTuple):
    """The ranks that have met.

    Args:
      tree: their connections.
      token: a text that no other meeting has, the same on all ranks.
      calls: what they do together at each further ``Strategy()``.
    """

    tree: Tree
    token: str
    calls: Calls


@final
class Meeting:
    """The meeting of one rank with all others.

    Args:
      rank: this rank.
      names: the ranks as users know them, by rank.
      seconds: how long to wait for the others.
      host: the name or address of the store's host, if it is known.
      interface: see ``Listener``.
      ports: see ``Listener``.
    """

    def __init__(
        self, rank: int, names: Sequence[int], seconds: float, *, host: str | None, interface: str, ports: str
    ) -> None:
        self._names = names
        self._seconds = seconds
        self._host = host
        self._tree = tree = Tree(rank, len(names))
        self._channel = Channel(tree, MEETING, names)
        self._dial = None if tree.parent is None else _Dial(rank, tree.parent, names, seconds)
        self._listener: Listener | None = None
        self._trouble: Exception | None = None  # the others wait for this rank: they are told first
        self._has_store = False
        try:
            self._listener = Listener(names[rank], tree.children, interface, ports) if tree.children else None
        except (InputError, OSError) as error:
            self._trouble = error

    def waiting_since(self) -> float | None:
        """See ``timeouts.Awaited``."""
        return self._channel.waiting_since()

    def missing(self) -> str:
        """See ``timeouts.Awaited``."""
        late, parent = self._channel.late(), self._unreached_parent()
        late += [] if parent is None or parent in late else [parent]
        return f"rank {', '.join(str(self._names[rank]) for rank in late)}"

    def unreached(self) -> str:
        """See ``timeouts.Awaited``."""
        told = self._dial.told if self._dial is not None and self._unreached_parent() is not None else ""
        told = told or self._channel.unreached()
        return told and told + _OPEN_THE_NETWORK

    def _unreached_parent(self) -> int | None:
        parent = self._tree.parent
        return None if parent is None or self._tree.link(parent) is not None else parent

    def wait_for_all(self, store_of: Callable[[threading.Event], Store], where: str) -> Met:
        """All ranks connect. Collective: every rank calls this, once.

        Args:
          store_of: finds the part of a store that is used for these ranks only; its event is set when nobody waits any
            more. Runs on a thread.
          where: the store's host, for messages.

        Raises:
          CoordinationTimeout: a rank did not come, and is named; or the store does not answer.
          RankLost: a rank, or the store, went away meanwhile, or a rank cannot take part.
          InputError: this rank cannot listen for the others: there is no such interface, or no free port or descriptor.
        """
        tree, channel, listener = self._tree, self._channel, self._listener
        tree.is_meeting = True
        asked = Asked(_WHAT, where, partial(self._join, store_of))
        try:
            if listener is not None:
                tree.watch(listener.socket)
            token = self._wait(asked)
        except BaseException as error:
            if isinstance(error, RankLost):
                channel.abort(f"gave up in {_WHAT}: {in_one_line(error)}")
            elif not isinstance(error, Exception):
                channel.abort(f"was interrupted by {type(error).__name__} in {_WHAT}")
            elif not isinstance(error, CoordinationTimeout):  # which has told the others
                channel.abort(f"{FAILED}: {error}", FAILED)
            tree.end()
            raise
        finally:
            asked.leave()
            if listener is not None:
                tree.unwatch(listener.socket)
                listener.close()
            tree.is_meeting = False
        return Met(tree, token, Calls(channel))

    def _join(self, store_of: Callable[[threading.Event], Store], given_up: threading.Event) -> socket.socket | None:
        """Writes the address of this rank to the store, and connects with the parent. On a thread."""
        store, key = store_of(given_up), str(self._tree.parent)
        if self._trouble is not None:
            store.set(str(self._tree.rank), json.dumps(str(self._trouble)[:_MAX_TROUBLE]))
        elif self._listener is not None:
            address = self._listener.address
            found = address.addresses or own_addresses(self._host)
            store.set(str(self._tree.rank), address._replace(addresses=found).to_text())

        def read() -> str | None:
            found = store.get(key).decode() if store.check([key]) else None
            self._has_store = True
            return found

        self._has_store = self._listener is not None
        return None if self._dial is None else self._dial.connect(read, given_up)

    def _wait(self, asked: Asked[socket.socket | None]) -> str:
        meeting = StartedExchange(self._channel.first(secrets.token_hex(8).encode()))
        give_up = partial(self._channel.abort, kind=GAVE_UP)
        for_ranks, for_store = (StragglerTimeout(each, self._seconds, give_up, _WHAT) for each in (self, asked))
        began, nap = time.monotonic(), _NAP_SECONDS
        while True:
            is_over = asked.poll()
            if is_over:
                self._add_parent(asked)
            self._add_children()
            try:
                if meeting.poll() and is_over:
                    return meeting.conclude().decode()
            except RankLost as error:
                raise RankLost(f"{_WHAT}: {error}") from None
            late = (for_ranks if self._has_store else for_store).check(began)
            if late is not None:
                raise self._trouble or late
            if self._tree.links() or self._listener is not None:
                meeting.rest(nap)
            else:
                asked.wait(nap)
            nap = min(1.5 * nap, _MAX_NAP_SECONDS)

    def _add_parent(self, asked: Asked[socket.socket | None]) -> None:
        connected, parent = asked.take(), self._tree.parent
        if connected is not None and parent is not None:
            self._tree.add(Link(parent, connected))
        if self._trouble is not None:
            raise self._trouble

    def _add_children(self) -> None:
        if self._listener is not None:
            for link in self._listener.arrivals(lambda child: self._tree.link(child) is not None):
                self._tree.add(link)


def _proof_of(secret: bytes) -> bytes:
    """What only a rank with this secret can answer; the sender's handshake has the secret itself."""
    return hmac.digest(secret, b"torchdistinput", "sha256")[:16]


def _own_trouble(name: int, error: OSError) -> InputError:
    return InputError(
        f"rank {name} can open no connection: {error.strerror or error}. Its process needs one descriptor for each "
        "connection: close files, or raise its limit (ulimit -n)."
    )


def _other_version(name: int, other: int) -> InputError:
    return InputError(
        f"rank {name} runs another version of torchdistinput than rank {other}. Install the same on every rank."
    )


def _listen(address: str, ports: str) -> socket.socket:
    first, dash, last = ports.partition("-")
    try:
        chosen = range(int(first), int(last if dash else first) + 1) if ports else range(1)
    except ValueError:
        chosen = range(0)
    if not chosen or chosen[-1] > 0xFFFF or (ports and chosen[0] < 1):
        raise InputError(f"TORCHDISTINPUT_PORTS={ports!r} is no range of ports; write for example 29600-29700.")
    failed: OSError | None = None
    for port in chosen:
        try:
            return _listen_at(address, port)
        except OSError as error:  # noqa: PERF203 - a trial for each
            failed = error
            if error.errno in _OWN:
                break
    where = f"TORCHDISTINPUT_PORTS={ports}" if ports else "the system"
    raise InputError(
        f"this rank cannot listen for the others: {where} gave no port ({failed}). Each rank with others below it "
        "needs one of its own on its host while Strategy() is made, and a descriptor."
    ) from failed


def _listen_at(address: str, port: int) -> socket.socket:
    if not address:
        with contextlib.suppress(OSError):  # a system without IPv6
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG, reuse_port=False
                )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)
