"""A network between ranks that are threads: it delays, tears messages into pieces, refuses, loses, and has strangers.

Ranks meet at a store of the network, which tells them a port of its own in place of a rank's. What they connect with is
a *wire*: the network passes on the bytes of both directions, as its dice say.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import socket
import threading
import time
from collections import deque
from typing import Any, final

from torchdistinput.coordination import meeting
from torchdistinput.coordination.addresses import Address

_LOOPBACK = "127.0.0.1"
_RECEIVED = 1 << 16
_LEAST_TORN = 3  # bytes
_HANDSHAKE = meeting._HANDSHAKE


@final
class Wire:
    """Two sockets, between which bytes travel in pieces and with delays.

    Attributes:
      port: that of the rank that dialled.

    Args:
      dice: draws the pieces and the delays.
      one: the socket of the rank that dialled.
      other: the socket of the rank that listens.
      torn_after: bytes of the first rank that pass before the wire is cut; ``None``: it is not.
    """

    def __init__(self, dice: random.Random, one: socket.socket, other: socket.socket, torn_after: int | None) -> None:
        self.ends = (one, other)
        self.port = one.getpeername()[1]
        for end in self.ends:
            end.setblocking(False)
        self._dice = dice
        self._piece = dice.choice([1, 7, 60, 1 << 16, 1 << 16])
        self._delay = dice.choice([0.0, 0.0, 0.0003, 0.001])
        self._waiting = (deque[bytes](), deque[bytes]())  # of each end, what it sent
        self._until = [0.0, 0.0]
        self.left: int | None = torn_after
        self.is_cut = self.stands_still = False

    def read(self, end: int) -> None:
        """Takes what an end has sent."""
        try:
            part = self.ends[end].recv(_RECEIVED)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            part = b""
        if not part:
            self.is_cut = True
            return
        piece = max(self._piece, len(part) // 50)
        self._waiting[end].extend(part[at : at + piece] for at in range(0, len(part), piece))

    def pass_on(self, now: float) -> bool:
        """Passes on what may pass now. Whether more waits."""
        for end, waiting in enumerate(self._waiting):
            while waiting and not (self.is_cut or self.stands_still) and now >= self._until[end]:
                part = waiting.popleft()
                if self.left is not None:
                    part, rest = part[: self.left], part[self.left :]
                    self.left -= len(part)
                else:
                    rest = b""
                self._pass(1 - end, part, waiting)
                if rest:
                    self.is_cut = True
                if self._delay:
                    self._until[end] = now + self._dice.random() * self._delay
        return any(self._waiting) and not (self.is_cut or self.stands_still)

    def _pass(self, end: int, part: bytes, waiting: deque[bytes]) -> None:
        try:
            sent = self.ends[end].send(part) if part else 0
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.is_cut = True
            return
        if sent < len(part):
            waiting.appendleft(part[sent:])
            self._until[1 - end] = time.monotonic() + 0.001


@final
class Network:
    """A store, and the network behind its addresses. Ends with ``close``.

    Args:
      seed: what is drawn follows from it.
      is_rough: whether dials are refused, handshakes are cut, and addresses are old at first.
    """

    def __init__(self, seed: object, *, is_rough: bool) -> None:
        self._dice = random.Random(f"network {seed}")
        self._is_rough = is_rough
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}
        self._old: dict[str, str] = {}
        self._gates: dict[socket.socket, int] = {}  # to the port of a rank
        self._strangers: list[socket.socket] = []
        self._wires: list[Wire] = []
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, key: str, value: str) -> None:
        """What a rank writes: of an address, the port becomes one of the network's."""
        told = json.loads(value)
        if isinstance(told, list):
            address = Address.of(told)
            gate = socket.create_server((_LOOPBACK, 0))
            gate.setblocking(False)
            with self._lock:
                self._gates[gate] = address.port
                self._selector.register(gate, selectors.EVENT_READ)
            if self._is_rough:
                self._visit(address.port)
                with socket.create_server((_LOOPBACK, 0)) as closed:
                    old = address._replace(port=closed.getsockname()[1], secret=os.urandom(16))
                self._old[key] = self._dice.choice(["", json.dumps("no port"), old.to_text()])
            value = address._replace(port=gate.getsockname()[1]).to_text()
        self._texts[key] = value

    def check(self, keys: list[str]) -> bool:
        """Whether all of them were written."""
        return all(key in self._texts for key in keys)

    def get(self, key: str) -> bytes:
        """What was written; the first time, it may be what is left of a rank before a restart."""
        return (self._old.pop(key, "") or self._texts[key]).encode()

    def _visit(self, port: int) -> None:
        """Strangers: who says nothing, speaks otherwise, has another secret, or leaves in the middle."""
        guess = _HANDSHAKE.pack(os.urandom(16), meeting.VERSION, 1, 1)
        for said in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: x\r\n\r\n", guess, guess[:20]):
            stranger = socket.create_connection((_LOOPBACK, port))
            stranger.sendall(said)
            if len(said) == 20:
                stranger.close()
            self._strangers.append(stranger)

    def strike(self, port: int, *, cuts: bool, after: int) -> None:
        """The wire of the rank that dialled from a port is cut, or passes nothing, after some more of its bytes."""
        with self._lock:
            for wire in self._wires:
                if not wire.is_cut and wire.port == port:
                    wire.left, wire.stands_still = (after, False) if cuts else (None, True)

    def _run(self) -> None:
        while not self._is_over:
            with self._lock:
                waits = [wire.pass_on(time.monotonic()) for wire in self._wires]
                for end in [end for wire in self._wires if wire.is_cut for end in wire.ends]:
                    self._selector.unregister(end)
                    end.close()
                self._wires = [wire for wire in self._wires if not wire.is_cut]
                found = self._selector.select(0.0)
                for key, _ in found:
                    if key.data is None:
                        self._accept(key.fileobj)
                    else:
                        key.data[0].read(key.data[1])
            if not found:
                time.sleep(0.0005 if any(waits) else 0.002)

    def _accept(self, gate: Any) -> None:
        with contextlib.suppress(OSError):
            one, _ = gate.accept()
            torn = None
            if self._is_rough:
                torn = self._dice.choice([None, None, 0, _LEAST_TORN, _HANDSHAKE.size - 1])
            try:
                other = socket.create_connection((_LOOPBACK, self._gates[gate]))
            except OSError:
                one.close()
                raise
            wire = Wire(self._dice, one, other, torn)
            self._wires.append(wire)
            for end, connected in enumerate(wire.ends):
                self._selector.register(connected, selectors.EVENT_READ, (wire, end))

    def open_ports(self) -> list[int]:
        """The ports of ranks that still listen."""
        found = []
        for port in self._gates.values():
            with contextlib.suppress(OSError), socket.create_connection((_LOOPBACK, port)) as made:
                if made.getsockname() != made.getpeername():  # where nobody listens, it may have met itself
                    found.append(port)
        return found

    def close(self) -> None:
        """Ends the network, and all that it has opened."""
        self._is_over = True
        self._thread.join()
        for each in (*self._gates, *self._strangers, *(end for wire in self._wires for end in wire.ends)):
            each.close()
        self._selector.close()
