"""Endpoints: the address and port of a rank, and how two ranks connect over TCP.

Each rank listens at one port for the life of its strategy, and writes its *address* to the store when the strategy is
made. To open a channel, a rank connects to its partners with lower numbers, and accepts connections from its partners
with higher numbers. A rank connects with ``log2 W`` others for each channel, never with all.

- Every wait is bounded, handles signals, and names the missing rank. A rank whose port refuses connections has ended.
  Any other failure is tried again until the time is over, as a network may be away for seconds (``dial``). This rank's
  own troubles (no descriptor, no free port) are raised as its own.
- The first bytes of a connection are a *handshake*: a secret of the accepting rank, the channel, the sender. The
  handshake is read whole before the secret is compared, in constant time, so nothing tells how much of a guess is
  right. A connection with another secret is closed. No rank blocks for a handshake: the sender may hang before it
  sends one. The rank answers, and the sender confirms the one connection that it keeps of those that it tried.
- The secret keeps strangers out: only processes that can read the store know it. It protects nothing else. Nothing is
  encrypted, the secret included: whoever sees the traffic between the hosts, or reaches the store's port, can read and
  write all. So the ranks, as torch's own process groups, belong on a network of their own.
- A rank that cannot open a channel that the others wait for tells them (``refuse``): it connects to all partners, and
  sends a handshake that is followed by an abort message.
- The interface is the first one in ``GLOO_SOCKET_IFNAME``, as for gloo. Without that variable a rank listens on all
  interfaces, and others try all its addresses side by side; on the same host the loopback address first. The port is
  any free one, or the first free one in ``TORCHDISTINPUT_PORTS``, for firewalls.
- The connection of the strategy's own calls is silent for a whole epoch. Where it is lost meanwhile, although the rank
  is there, it is opened again (``rest``). Both ends say how many messages they received, and the rest is sent again.
  The higher rank dials, as ever. It may not have noticed, since it may wait for another rank: the lower one tells it.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, final

from torchdistinput.coordination.addresses import Address, address_of, host_identity
from torchdistinput.coordination.connections import (
    AbortMessage,
    Connection,
    Connections,
    Departed,
    abort_connection,
    configure,
    tell_waiting,
    wait_for_sockets,
)
from torchdistinput.coordination.dial import Dial, is_own_trouble
from torchdistinput.coordination.fork_safety import register_for_forks
from torchdistinput.errors import InputError

CONTROL: Final = -1
"""The number of the channel for the strategy's own calls. Lower ones renew a connection of it: first -2, then -3."""

_HANDSHAKE: Final = struct.Struct("<16sqqq")  # secret, channel, sender, length of the abort message that follows
_LOST: Final = -1  # in place of that length: the sender lost the connection, and waits until it is opened again
_ANSWER: Final = struct.Struct("<16sq")  # a proof that the rank knows its secret; the number of messages received
_CONFIRM: Final = struct.Struct("<q")  # the number of messages received
_LOOK_SECONDS: Final = 0.5
_SILENT_SECONDS: Final = 5.0  # without an acknowledgement by a host, until a connection counts as lost
_REFUSE_SECONDS: Final = 1.0
_MAX_LOOK_SECONDS: Final = 8.0  # between two trials whether a rank that does not come has ended
_BACKLOG: Final = 128
_MAX_ABORT: Final = 1 << 16


@final
class Late(Exception):
    """Ranks did not connect in time.

    Args:
      ranks: the missing ranks.
      unreached: those of them that do not answer, with addresses and reasons; empty where all do.
    """

    def __init__(self, ranks: Sequence[int], unreached: str) -> None:
        super().__init__(*ranks)
        self.ranks = list(ranks)
        self.unreached = unreached


@final
class _Arrival:
    """A connection that was accepted, and its bytes so far: a rank may stand still before its handshake."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.received = bytearray()
        self.is_answered = False

    def handshake(self) -> tuple[bytes, int, int, int]:
        """Secret, channel, sender and the length of the abort message."""
        found: tuple[bytes, int, int, int] = _HANDSHAKE.unpack_from(self.received)
        return found

    def read(self, size: int) -> bool:
        """Reads up to so many bytes without waiting. Whether they are there; raises ``OSError`` if they cannot come."""
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while len(self.received) < size:
                part = self.socket.recv(size - len(self.received))
                if not part:
                    raise ConnectionResetError
                self.received += part
        return len(self.received) >= size


@final
class Endpoint:
    """This rank's port. One thread at a time.

    Args:
      rank: this rank.
      names: the ranks as users know them, by rank.
      interface: the network interface to listen at; empty for all.
      ports: the ports to choose from, as ``29600-29700``; empty for any free one.
      silence_seconds: see ``connections.configure``.

    Raises:
      InputError: there is no such interface, or no free port, or no descriptor left.
    """

    def __init__(self, rank: int, names: Sequence[int], interface: str, ports: str, silence_seconds: float) -> None:
        self._rank = rank
        self._names = names
        self._silence_seconds = silence_seconds
        here = address_of(interface) if interface else ""
        self._listener = _listen(here, ports)
        self._listener.setblocking(False)
        self._spare = socket.socket()  # its descriptor serves to tell the others that there is none left
        self.address = Address(
            host_identity(), self._listener.getsockname()[1], (here,) if here else (), secrets.token_bytes(16)
        )
        self._by_rank: dict[int, Address] = {}
        self._known: dict[int, str] = {}  # the address by which a rank was reached
        self._dials: dict[int, Dial] = {}
        self._arriving: list[_Arrival] = []
        self._early: dict[tuple[int, int], socket.socket] = {}  # connections for channels that are not open here yet
        self._control: Connections | None = None
        self._refused: dict[int, AbortMessage] = {}  # by channel
        self._oldest = CONTROL  # the number of the oldest channel that may still be opened
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
          InputError: this rank has no descriptors, memory or ports left.
        """
        self._forget_before(number)
        self._end_dials()
        found: dict[int, socket.socket] = {}
        try:
            self._connect_all(number, seconds, meanwhile, found)
        except BaseException as error:
            self._abort_with(found, number, self._abort_message(error, seconds))
            raise
        finally:
            self._end_dials()
        connections = Connections(self._rank, len(self._names), found, are_renewable=number == CONTROL)
        if number == CONTROL:
            self._control = connections
        return connections

    def _connect_all(
        self,
        number: int,
        seconds: float,
        meanwhile: Callable[[list[int], float], None],
        found: dict[int, socket.socket],
    ) -> None:
        began = told = time.monotonic()
        while True:
            self._accept_all()
            missing = [peer for peer in self._by_rank if peer not in found]
            self._raise_if_refused(number, missing)
            for peer in self._by_rank:
                if (number, peer) in self._early:
                    found[peer] = self._early.pop((number, peer))
                elif peer not in found and (connected := self._reach(peer, number, 0)) is not None:
                    found[peer] = connected
            missing = [peer for peer in self._by_rank if peer not in found]
            if not missing:
                return
            now = time.monotonic()
            if now - began > seconds:
                raise Late(missing, self.told_unreached(missing))
            meanwhile(missing, now - began)
            if now - told > _LOOK_SECONDS:  # they may be at their first exchange already, and would name this rank
                told = now
                for connected in found.values():
                    tell_waiting(connected, missing)
            self._wait(min(_LOOK_SECONDS, max(0.01, seconds - (now - began))))

    def rest(self, control: Connections, seconds: float, waited: float) -> None:
        """Waits until the awaited message may have come; meanwhile opens lost connections again. Local, bounded.

        Args:
          control: the connections of the strategy's own calls.
          seconds: how long to wait, at most.
          waited: for how long this rank waits for the message already.

        Raises:
          InputError: this rank has no descriptors, memory or ports left.
        """
        with contextlib.suppress(InputError):  # without a descriptor for a connection that may be for another channel
            self._accept_all()
        if waited > _SILENT_SECONDS:
            for peer in self._by_rank:
                if peer < self._rank and control.silent_seconds(peer) > _SILENT_SECONDS:
                    control.connection(peer).disconnect()  # the other end is not told: the higher rank dials, as ever
        for lost in control.disconnected():
            try:
                self._reach(lost.peer, CONTROL - 1 - lost.renewals, lost.received)
            except Departed as departed:  # noqa: PERF203 - a trial for each
                lost.give_up(departed.message)
        reading, writing, due = self._sockets()
        control.rest(min(seconds, max(0.01, due)), reading, writing)

    def _wait(self, seconds: float) -> None:
        reading, writing, due = self._sockets()
        wait_for_sockets(reading, writing, min(seconds, max(0.01, due)))

    def _sockets(self) -> tuple[list[socket.socket], list[socket.socket], float]:
        """The sockets to be read from, those to be written to, and the seconds until there is more to do."""
        reading, writing = [each.socket for each in self._arriving], []
        if self._dials:
            reading.append(self._listener)
        for dial in self._dials.values():
            answers, sends = dial.sockets()
            reading += answers
            writing += sends
        return reading, writing, min((dial.seconds_until_due() for dial in self._dials.values()), default=_LOOK_SECONDS)

    def _reach(self, peer: int, number: int, received: int) -> socket.socket | None:
        """Continues to connect with a missing partner. A higher rank dials here: this one looks whether it is there.

        Raises:
          Departed: the rank has ended.
          InputError: this rank has no descriptors, memory or ports left.
        """
        is_lower = peer < self._rank
        dial = self._dials.get(peer)
        if dial is None:
            dial = self._dials[peer] = self._dial(peer, number if is_lower or number < CONTROL else None)
            if not is_lower:
                dial.begin_in(_LOOK_SECONDS)
        try:
            connected = dial.go_on()
        except OSError as error:
            raise _own_trouble(self._names[self._rank], error) from error
        if dial.is_refused():
            self._accept_all()  # it may have connected before it ended, or said why
            self._raise_if_refused(number)
            if (number, peer) not in self._early:
                raise Departed(AbortMessage(peer, f"{AbortMessage.DIED} (it refuses connections at {dial.best})"))
        if connected is None:
            return None
        if not is_lower:
            connected.close()
            dial.again_seconds = min(2 * dial.again_seconds, _MAX_LOOK_SECONDS)
            dial.begin_in(dial.again_seconds)
            return None
        return self._confirmed(peer, number, received, connected)

    def _confirmed(self, peer: int, number: int, received: int, connected: socket.socket) -> socket.socket | None:
        """Confirms the connection that a partner answered; ``None`` if it must be dialled again."""
        dial = self._dials[peer]
        _, theirs = _ANSWER.unpack(dial.answer)
        try:
            connected.send(_CONFIRM.pack(received))
        except OSError:  # it has gone since
            connected.close()
            dial.begin_in(_LOOK_SECONDS)
            return None
        self._known[peer] = dial.address
        self._dials.pop(peer)
        if self._control is not None and number < CONTROL:
            self._control.connection(peer).renew(connected, CONTROL - number, theirs)
        return connected

    def _dial(self, peer: int, number: int | None, abort: bytes = b"") -> Dial:
        """A dial for a channel, or for an abort message or a lost connection; without a number, it only looks."""
        there = self._by_rank[peer]
        local = ("127.0.0.1", "::1") if there.host == self.address.host else ()
        known = self._known.get(peer)
        best = () if known is None else (known,)
        length = len(abort) if abort or peer < self._rank else _LOST
        handshake = b"" if number is None else _HANDSHAKE.pack(there.secret, number, self._rank, length) + abort
        is_answered = number is not None and not length
        return Dial(
            list(dict.fromkeys((*best, *local, *there.addresses))),
            there.port,
            handshake,
            _proof_of(there.secret) if is_answered else b"",
            _ANSWER.size if is_answered else 0,
            self._silence_seconds,
            is_sure=known is not None,
        )

    def told_unreached(self, ranks: Iterable[int]) -> str:
        """Those of the missing ranks that do not answer, with addresses and reasons; empty where all do. Local."""
        told = [(self._names[rank], self._dials[rank].told_failures()) for rank in ranks if rank in self._dials]
        return "; ".join(
            f"rank {name} signed in, but does not answer at {failures}" for name, failures in told if failures
        )

    def _end_dials(self) -> None:
        while self._dials:
            self._dials.popitem()[1].close()

    def _abort_message(self, error: BaseException, seconds: float) -> AbortMessage:
        if isinstance(error, Departed):
            return error.message
        if isinstance(error, Late):
            late = ", ".join(str(self._names[rank]) for rank in error.ranks)
            why = f" ({error.unreached})" if error.unreached else ""
            return AbortMessage(self._rank, f"{AbortMessage.GAVE_UP} for rank {late} after {seconds:g} seconds{why}")
        if isinstance(error, InputError):
            return AbortMessage(self._rank, f"{AbortMessage.FAILED}: {error}")
        return AbortMessage(self._rank, f"was interrupted by {type(error).__name__}")

    def refuse(self, number: int, message: AbortMessage) -> None:
        """Tells all partners that this rank will not open the channel, for which they may wait. Local, bounded."""
        self._forget_before(number)
        self._abort_with({}, number, message)

    def _forget_before(self, number: int) -> None:
        self._oldest = number
        for key in [key for key in self._early if key[0] < number]:
            self._early.pop(key).close()
        for old in [old for old in self._refused if old < number]:
            del self._refused[old]

    def _abort_with(self, found: Mapping[int, socket.socket], number: int, message: AbortMessage) -> None:
        self._end_dials()
        self._spare.close()
        self._dials = {peer: self._dial(peer, number, message.to_bytes()) for peer in self._by_rank}
        until = time.monotonic() + _REFUSE_SECONDS
        while self._dials and time.monotonic() < until:
            for peer, dial in list(self._dials.items()):
                connected = None
                with contextlib.suppress(OSError):  # no descriptor: another dial ends soon
                    connected = dial.go_on()
                if connected is not None or dial.is_refused():  # it was told, or it has ended: no rank waits there
                    self._dials.pop(peer).close()
                if connected is not None:
                    connected.close()
            if self._dials:
                self._wait(0.1)
        self._end_dials()
        # After the dialling: a partner that dials later finds the refusal, and one that dialled before is found here.
        with contextlib.suppress(InputError):  # no descriptor
            self._accept_all()
        early = {peer: self._early.pop((number, peer)) for peer in self._by_rank if (number, peer) in self._early}
        for peer, connected in (*found.items(), *early.items()):
            abort_connection(peer, connected, message)
        while self._arriving:  # a partner that waits for the confirmed connection would wait here later
            arrival = self._arriving.pop()
            if arrival.is_answered:
                abort_connection(-1, arrival.socket, message)
            arrival.socket.close()
        with contextlib.suppress(OSError):
            self._spare = socket.socket()

    def _raise_if_refused(self, number: int, missing: Sequence[int] = ()) -> None:
        message = self._refused.get(number)
        if message is None:
            return
        if message.why.startswith(AbortMessage.GAVE_UP) and (unreached := self.told_unreached(missing)):
            raise Late(missing, unreached)  # the other rank gave up because this one cannot reach it
        raise Departed(message)

    def _accept_all(self) -> None:
        """Takes all connections that wait to be accepted, and those whose handshake is complete by now."""
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if is_own_trouble(error):
                    raise _own_trouble(self._names[self._rank], error) from error
                break  # there is none, or the port is closed, or an error of the network
            configure(connected, self._silence_seconds)
            self._arriving.append(_Arrival(connected))
        for arrival in list(self._arriving):
            try:
                is_complete = self._accept_on(arrival)
            except OSError:  # the other end has closed it, or it has another secret
                is_complete = True
                arrival.socket.close()
            if is_complete:
                self._arriving.remove(arrival)
        while len(self._arriving) > _BACKLOG:  # connections that send nothing: the oldest is closed
            oldest = next((each for each in self._arriving if not each.is_answered), self._arriving[0])
            self._arriving.remove(oldest)
            oldest.socket.close()

    def _accept_on(self, arrival: _Arrival) -> bool:
        """Continues a handshake without waiting. Whether it is complete; raises ``OSError`` if it is not valid."""
        if not arrival.read(_HANDSHAKE.size):
            return False
        secret, number, peer, length = arrival.handshake()
        if not hmac.compare_digest(secret, self.address.secret) or peer not in self._by_rank:
            raise ConnectionRefusedError
        renewed = self._control.connection(peer) if self._control is not None and number < CONTROL else None
        # A connection that the sender tried and did not keep may come late: it must not end the one that was kept.
        is_late = number < self._oldest if renewed is None else CONTROL - number <= renewed.renewals
        if is_late or not 0 <= length <= _MAX_ABORT:
            if not is_late and length == _LOST and renewed is not None:
                renewed.disconnect()
            raise ConnectionRefusedError
        if length:
            if not arrival.read(_HANDSHAKE.size + length):
                return False
            arrival.socket.close()
            message = AbortMessage.from_bytes(bytes(arrival.received[_HANDSHAKE.size :]), peer)
            self._refused.setdefault(number, message)
            return True
        if not arrival.is_answered:
            received = 0 if renewed is None else renewed.disconnect()
            arrival.socket.send(_ANSWER.pack(_proof_of(self.address.secret), received))
            arrival.is_answered = True
        if not arrival.read(_HANDSHAKE.size + _CONFIRM.size):
            return False
        self._keep(arrival, number, peer, renewed)
        return True

    def _keep(self, arrival: _Arrival, number: int, peer: int, renewed: Connection | None) -> None:
        """Keeps the connection that a partner confirmed, and closes an older one, and those that it did not choose."""
        here = arrival.socket.getpeername()[0].removeprefix("::ffff:")
        if here in self._by_rank[peer].addresses or here in ("127.0.0.1", "::1"):
            self._known[peer] = here
        if renewed is not None:
            dial = self._dials.pop(peer, None)
            if dial is not None:
                dial.close()
            (received,) = _CONFIRM.unpack_from(arrival.received, _HANDSHAKE.size)
            renewed.renew(arrival.socket, CONTROL - number, received)
            return
        before = self._early.pop((number, peer), None)
        if before is not None:
            before.close()
        self._early[number, peer] = arrival.socket

    def close(self) -> None:
        """Closes the port and all connections that belong to no channel. Idempotent."""
        self._listener.close()
        self._spare.close()
        self._end_dials()
        while self._early:
            self._early.popitem()[1].close()
        while self._arriving:
            self._arriving.pop().socket.close()

    def leave_to_parent(self) -> None:
        """See ``fork_safety.Inherited``: a port that a fork keeps would let a rank that ended look alive."""
        self.close()


def _proof_of(secret: bytes) -> bytes:
    """What only a rank with this secret can answer; the sender's handshake has the secret itself."""
    return hmac.digest(secret, b"torchdistinput", "sha256")[:16]


def _own_trouble(name: int, error: OSError) -> InputError:
    return InputError(
        f"rank {name} can open no connection: {error.strerror or error}. Its process needs one descriptor for each "
        "connection: close files, or raise its limit (ulimit -n)."
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
            if is_own_trouble(error):
                break
    where = f"TORCHDISTINPUT_PORTS={ports}" if ports else "the system"
    raise InputError(
        f"this rank cannot listen for the others: {where} gave no port ({failed}). Each rank of a host needs one of "
        "its own, and a descriptor."
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
