"""Endpoints: the address and port of a rank, and how two ranks connect over TCP.

Each rank listens at one port for the life of its strategy, and writes its *address* to the store when the strategy is
made. To open a channel, a rank connects to its partners with lower numbers, and accepts connections from its partners
with higher numbers. A rank connects with ``log2 W`` others for each channel, never with all.

- Every wait is bounded, handles signals, and names the missing rank. A rank whose port refuses connections has ended.
- The first bytes of a connection are a *handshake*: a secret of the accepting rank, the channel, the sender. The
  handshake is read whole before the secret is compared, in constant time, so nothing tells how much of a guess is
  right. A connection with another secret is closed. No rank blocks for a handshake: the sender may hang before it
  sends one.
- The secret keeps strangers out: only processes that can read the store know it. It protects nothing else. Nothing is
  encrypted, the secret included: whoever sees the traffic between the hosts, or reaches the store's port, can read and
  write all. So the ranks, as torch's own process groups, belong on a network of their own.
- A rank that cannot open a channel that the others wait for tells them (``refuse``): it connects to all partners, and
  sends a handshake that is followed by an abort message.
- The interface is the first one in ``GLOO_SOCKET_IFNAME``, as for gloo. Without that variable a rank listens on all
  interfaces. Others try the address on the route to the store, the addresses of the host's name, and, on the same host,
  the loopback address.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from torchdistinput.coordination.connections import (
    AbortMessage,
    Connections,
    Departed,
    abort_connection,
    tell_waiting,
    wait_for_sockets,
)
from torchdistinput.coordination.fork_safety import register_for_forks
from torchdistinput.errors import InputError

_HANDSHAKE: Final = struct.Struct("<16sqqq")  # secret, channel, sender, length of the abort message that follows
_LOOK_SECONDS: Final = 0.5
_CONNECT_SECONDS: Final = 1.0
_REFUSE_SECONDS: Final = 1.0
_MAX_LOOK_SECONDS: Final = 8.0  # between two trials whether a rank that does not come has ended
_BACKLOG: Final = 128
_MAX_ABORT: Final = 1 << 16


class Address(NamedTuple):
    """The address of a rank.

    Args:
      host: identifies the host; ranks with the same value can use the loopback address.
      port: the port, the same for all addresses.
      addresses: host names or IP addresses, the best one first.
      secret: the first bytes of a connection to this rank.
    """

    host: str
    port: int
    addresses: tuple[str, ...]
    secret: bytes

    def to_text(self) -> str:
        """The address as a text for the store. Local."""
        return json.dumps([self.host, self.port, list(self.addresses), self.secret.hex()])

    @staticmethod
    def from_text(text: str | bytes) -> Address:
        """The address from the text that another rank wrote to the store. Local."""
        host, port, addresses, secret = json.loads(text)
        return Address(str(host), int(port), tuple(map(str, addresses)), bytes.fromhex(secret))


@final
class Late(Exception):
    """Ranks did not connect in time.

    Args:
      ranks: the missing ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(*ranks)
        self.ranks = list(ranks)


class _Opening(NamedTuple):
    """A channel that is being opened; see ``Endpoint.open``."""

    number: int
    began: float
    seconds: float
    found: dict[int, socket.socket]
    """The connections so far, by rank."""
    meanwhile: Callable[[list[int], float], None]


@final
class Endpoint:
    """This rank's port. One thread at a time.

    Args:
      rank: this rank.
      names: the ranks as users know them, by rank.
      interface: the network interface to listen at; empty for all.
      towards: the address of the store, if it is known: this rank's address on the route to it is the best one.

    Raises:
      InputError: there is no such interface.
    """

    def __init__(self, rank: int, names: Sequence[int], interface: str, towards: str | None) -> None:
        self._rank = rank
        self._names = names
        here = _address_of(interface) if interface else ""
        self._listener = _listen(here)
        self._listener.setblocking(False)
        self.address = Address(
            _host(),
            self._listener.getsockname()[1],
            (here,) if interface else tuple(_own_addresses(towards)),
            secrets.token_bytes(16),
        )
        self._by_rank: dict[int, Address] = {}
        self._arriving: dict[socket.socket, bytearray] = {}  # and the handshake so far: a rank may stand still
        self._early: dict[tuple[int, int], socket.socket] = {}  # connections for channels that are not open here yet
        self._refused: dict[int, AbortMessage] = {}  # by channel
        self._oldest = 0  # the number of the oldest channel that may still be opened
        register_for_forks(self)

    def meet(self, addresses: Mapping[int, Address]) -> None:
        """Sets the addresses of the partners of this rank. Local."""
        self._by_rank = dict(addresses)

    def open(self, number: int, seconds: float, meanwhile: Callable[[list[int], float], None]) -> Connections:
        """Connects with all partners. Collective: every rank calls this with the same number, a new one each time.

        Args:
          number: the number of the channel.
          seconds: how long to wait.
          meanwhile: is called now and then with the ranks that have not connected, and the seconds waited so far.

        Raises:
          Late: ranks did not connect in time.
          Departed: a rank ended, or said that it will not come.
        """
        self._forget_before(number)
        found: dict[int, socket.socket] = {}
        opening = _Opening(number, time.monotonic(), seconds, found, meanwhile)
        try:
            for peer in sorted(self._by_rank):
                if peer < self._rank:
                    self._dial_in_time(peer, opening)
            self._accept_in_time(opening)
        except BaseException as error:
            self._abort_with(found, number, self._abort_message(error, seconds))
            raise
        return Connections(self._rank, len(self._names), found)

    def _abort_message(self, error: BaseException, seconds: float) -> AbortMessage:
        if isinstance(error, Departed):
            return error.message
        if isinstance(error, Late):
            late = ", ".join(str(self._names[rank]) for rank in error.ranks)
            return AbortMessage(self._rank, f"{AbortMessage.GAVE_UP} for rank {late} after {seconds:g} seconds")
        return AbortMessage(self._rank, f"was interrupted by {type(error).__name__}")

    def refuse(self, number: int, why: str) -> None:
        """Tells all partners that this rank will not open the channel, for which they may wait. Local, bounded."""
        self._forget_before(number)
        self._abort_with({}, number, AbortMessage(self._rank, why))

    def _forget_before(self, number: int) -> None:
        self._oldest = number
        for key in [key for key in self._early if key[0] < number]:
            self._early.pop(key).close()
        for old in [old for old in self._refused if old < number]:
            del self._refused[old]

    def _abort_with(self, found: Mapping[int, socket.socket], number: int, message: AbortMessage) -> None:
        until = time.monotonic() + _REFUSE_SECONDS
        for peer in self._by_rank:
            with contextlib.suppress(OSError):  # it has ended, or cannot be reached: no rank waits there
                self._dial(peer, number, max(0.01, until - time.monotonic()), message.to_bytes()).close()
        # After the dialling: a partner that dials later finds the refusal, and one that dialled before is found here.
        self._accept_all()
        early = {peer: self._early.pop((number, peer)) for peer in self._by_rank if (number, peer) in self._early}
        for peer, connected in (*found.items(), *early.items()):
            abort_connection(peer, connected, message)
        while self._arriving:  # a partner that stands still before its handshake would wait here later
            abort_connection(-1, self._arriving.popitem()[0], message)

    def _dial_in_time(self, peer: int, opening: _Opening) -> None:
        number, began, seconds, found, meanwhile = opening
        while peer not in found:
            self._accept_all()
            self._raise_if_refused(number)
            passed = time.monotonic() - began
            if passed > seconds:
                raise Late([peer])
            try:
                found[peer] = self._dial(peer, number, min(_LOOK_SECONDS, max(0.01, seconds - passed)))
            except TimeoutError:
                meanwhile([peer], passed)
            except OSError as error:
                self._raise_ended(peer, number, error)

    def _raise_ended(self, peer: int, number: int, error: OSError) -> None:
        """Raises for a rank whose port refuses connections, unless it had connected before it ended."""
        self._accept_all()
        self._raise_if_refused(number)
        if (number, peer) not in self._early:
            raise Departed(AbortMessage(peer, AbortMessage.DIED)) from error

    def _raise_if_refused(self, number: int) -> None:
        if number in self._refused:
            raise Departed(self._refused[number])

    def _accept_in_time(self, opening: _Opening) -> None:
        number, began, seconds, found, meanwhile = opening
        look = _LOOK_SECONDS
        looked = time.monotonic()
        while True:
            self._accept_all()
            self._raise_if_refused(number)
            for peer in self._by_rank:
                if (number, peer) in self._early:
                    found[peer] = self._early.pop((number, peer))
            missing = [peer for peer in self._by_rank if peer not in found]
            if not missing:
                return
            now = time.monotonic()
            if now - began > seconds:
                raise Late(missing)
            if now - looked > look:
                looked, look = now, min(2 * look, _MAX_LOOK_SECONDS)
                self._look_for_ended(missing, number)
            meanwhile(missing, now - began)
            for connected in found.values():  # they may be at their first exchange already, and would name this rank
                tell_waiting(connected, missing)
            wait_for_sockets(
                [self._listener, *self._arriving], [], min(_LOOK_SECONDS, max(0.01, seconds - (now - began)))
            )

    def _look_for_ended(self, missing: Sequence[int], number: int) -> None:
        for peer in missing:
            try:
                self._connect(peer, _CONNECT_SECONDS / len(missing)).close()
            except TimeoutError:  # noqa: PERF203 - a trial for each
                continue
            except OSError as error:
                self._raise_ended(peer, number, error)

    def _accept_all(self) -> None:
        """Takes all connections that wait to be accepted, and those whose handshake is complete by now."""
        with contextlib.suppress(BlockingIOError, ConnectionError, InterruptedError):
            while True:
                connected, _ = self._listener.accept()
                connected.setblocking(False)
                self._arriving[connected] = bytearray()
        for connected, handshake in list(self._arriving.items()):
            if _receive_handshake(connected, handshake, self.address.secret):
                del self._arriving[connected]
                self._accept_one(connected, bytes(handshake))
        while len(self._arriving) > _BACKLOG:  # connections that send nothing: the oldest is closed
            oldest = next(iter(self._arriving))
            del self._arriving[oldest]
            oldest.close()

    def _accept_one(self, connected: socket.socket, handshake: bytes) -> None:
        """Keeps the connection of a partner, or the reason of a refusal; closes other connections, and late ones."""
        if not handshake:
            connected.close()
            return
        _, number, peer, _ = _HANDSHAKE.unpack_from(handshake)
        message = handshake[_HANDSHAKE.size :]
        if number < self._oldest or message or peer not in self._by_rank:
            connected.close()
            if message and number >= self._oldest:
                self._refused.setdefault(number, AbortMessage.from_bytes(message, peer))
            return
        before = self._early.pop((number, peer), None)
        if before is not None:
            before.close()
        self._early[number, peer] = connected

    def _dial(self, peer: int, number: int, seconds: float, message: bytes = b"") -> socket.socket:
        connected = self._connect(peer, seconds)
        connected.sendall(_HANDSHAKE.pack(self._by_rank[peer].secret, number, self._rank, len(message)) + message)
        return connected

    def _connect(self, peer: int, seconds: float) -> socket.socket:
        """Connects to a rank. Raises ``OSError`` if its port refuses, ``TimeoutError`` if it does not answer."""
        there = self._by_rank[peer]
        addresses = (*(("127.0.0.1", "::1") if there.host == self.address.host else ()), *there.addresses)
        last: OSError = ConnectionRefusedError(errno.ECONNREFUSED, "no address")
        for address in addresses:
            try:
                return socket.create_connection((address, there.port), max(0.01, seconds / len(addresses)))
            except TimeoutError as error:  # noqa: PERF203 - a trial for each
                last = error
            except OSError as error:
                last = last if isinstance(last, TimeoutError) else error
        raise last

    def close(self) -> None:
        """Closes the port and all connections that belong to no channel. Idempotent."""
        self._listener.close()
        while self._early:
            self._early.popitem()[1].close()
        while self._arriving:
            self._arriving.popitem()[0].close()

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: a port that a fork keeps would let a rank that ended look alive."""
        self.close()


def _receive_handshake(connected: socket.socket, handshake: bytearray, secret: bytes) -> bool:
    """Continues to read a handshake without waiting. Whether it is complete; it is left empty if it is not valid."""
    while True:
        missing = _HANDSHAKE.size - len(handshake)
        if missing <= 0:
            found, _, _, length = _HANDSHAKE.unpack_from(handshake)
            if not hmac.compare_digest(found, secret) or not 0 <= length <= _MAX_ABORT:
                handshake.clear()
                return True
            missing += length
            if missing <= 0:
                return True
        try:
            received = connected.recv(missing)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            received = b""
        if not received:
            handshake.clear()
            return True
        handshake += received


def _listen(address: str) -> socket.socket:
    if not address:
        with contextlib.suppress(OSError):  # a system without IPv6
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG, reuse_port=False
                )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def _host() -> str:
    """A text that is equal for ranks which reach each other by the loopback address: boot id and network namespace."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def _own_addresses(towards: str | None) -> Iterator[str]:
    """The addresses of this host that others may know it by, without the loopback ones."""
    found: dict[str, None] = {}
    if towards:
        with contextlib.suppress(OSError):
            for family, kind, _, _, place in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(place)  # of a datagram: nothing is sent
                    found[probe.getsockname()[0]] = None
    with contextlib.suppress(OSError):
        for *_, place in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            found[str(place[0])] = None
    return (each for each in found if not each.startswith("127.") and each != "::1")


def _address_of(interface: str) -> str:
    """The first address of a network interface."""
    names = [name for _, name in socket.if_nameindex()] if sys.platform != "win32" else []
    if interface in names:
        for found in (_ipv4_of(interface), _ipv6_of(interface)):
            if found:
                return found
    raise InputError(
        f"GLOO_SOCKET_IFNAME names the network interface {interface!r}, which has no address here; the interfaces are "
        f"{', '.join(names) or 'not known on this system'}. Name one of them, or unset it."
    )


def _ipv4_of(interface: str) -> str:
    if sys.platform == "win32":
        return ""
    import fcntl  # noqa: PLC0415 - there is none on Windows

    request = 0xC0206921 if sys.platform == "darwin" else 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer: Any = fcntl.ioctl(probe, request, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(interface: str) -> str:
    """The first IPv6 address of an interface on Linux, except link-local ones; empty where there is none."""
    table = Path("/proc/net/if_inet6")
    rows = [row.split() for row in table.read_text().splitlines()] if table.exists() else []
    for address, _, _, scope, _, name in rows:
        if name == interface and int(scope, 16) != 0x20:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return ""
