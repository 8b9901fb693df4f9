"""How a rank connects to another one: at all its addresses side by side.

Problem. A host has several addresses, of which some lead nowhere, and some lead elsewhere: each host may have a
``172.17.0.1`` of its own. One after the other they cost the sum of their timeouts. And a network may be away for
seconds.

Decisions.
- "Happy eyeballs" (RFC 8305): an attempt begins when the one before it failed, at the latest 0.25 seconds after that
  one began. The attempt that the rank answers first wins; that it accepts the connection is not enough, as something
  between the hosts may do so, or another program.
- An attempt that failed begins again, until the caller gives up. Only a refusal at an address that is surely the
  rank's means that the rank has ended (``Dial.is_refused``).
- What fails for want of this process's own means (descriptors, memory, ports) is raised: no other rank is to blame.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket
import time
from collections.abc import Sequence
from typing import Final, final

from torchdistinput.coordination.connections import configure

_STAGGER_SECONDS: Final = 0.25
_AGAIN_SECONDS: Final = 0.5  # after a failure
_CONNECT_SECONDS: Final = 3.0  # the system itself would try again ever more rarely
_OWN: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_MAX_TOLD: Final = 3  # addresses in a message


def is_own_trouble(error: OSError, address: str = "") -> bool:
    """Whether a connection failed for want of means of this process. Local."""
    # There is no free port; for IPv6 it may also mean that this host has none.
    return error.errno in _OWN or (error.errno == errno.EADDRNOTAVAIL and "." in address)


@final
class _Attempt:
    """An attempt to connect at one address."""

    def __init__(self, connecting: socket.socket, handshake: bytes, proof: bytes, answer_size: int) -> None:
        self.socket = connecting
        self.is_connected = False
        self.answer = bytearray()
        self._proof = proof
        self._answer_size = answer_size
        self._unsent = memoryview(handshake)
        self._until = time.monotonic() + _CONNECT_SECONDS

    @property
    def is_sending(self) -> bool:
        """Whether the next event is that it can send."""
        return not self.is_connected or bool(self._unsent)

    def go_on(self) -> bool:
        """Continues without waiting. Whether the answer is complete. Raises ``OSError`` if it fails."""
        if not self.is_connected:
            failed = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            try:
                self.socket.getpeername()
            except OSError:  # not connected yet
                if time.monotonic() > self._until:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None
                return False
            self.is_connected = True
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            while missing := self._answer_size - len(self.answer):
                received = self.socket.recv(missing)
                if not received:
                    raise ConnectionResetError(errno.ECONNRESET, "closed without an answer")
                self.answer += received
            if not hmac.compare_digest(self.answer[: len(self._proof)], self._proof):
                raise ConnectionResetError(errno.ECONNRESET, "another program answered")
            return True
        return False


@final
class Dial:
    """The attempts to connect to one rank; see the module's text. One thread at a time.

    Args:
      addresses: IP addresses of the rank, the best one first.
      port: its port.
      handshake: what is sent first.
      proof: the first bytes that the rank answers, and no other program.
      answer_size: the number of bytes that the rank answers, with the proof.
      silence_seconds: see ``connections.configure``.
      is_sure: whether the best address is known to be the rank's own.

    Attributes:
      again_seconds: after how long a failed attempt begins again.
      failures: the last failure at each address.
      answer: the answer, once ``go_on`` returned a socket.
      address: the address at which it came.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        handshake: bytes,
        proof: bytes,
        answer_size: int,
        silence_seconds: float,
        *,
        is_sure: bool,
    ) -> None:
        self._port = port
        self._handshake = handshake
        self._proof = proof
        self._answer_size = answer_size
        self._is_sure = is_sure
        self._silence_seconds = silence_seconds
        self._best = addresses[0] if addresses else ""
        self._is_reached = False
        self._due: dict[str, float] = {}
        self._attempts: dict[str, _Attempt] = {}
        self.again_seconds = _AGAIN_SECONDS
        self.failures: dict[str, OSError] = {}
        self.answer = b""
        self.address = ""
        self.begin_in(0.0, addresses)

    def begin_in(self, seconds: float, addresses: Sequence[str] = ()) -> None:
        """Begins anew after so many seconds. Local."""
        now = time.monotonic()
        for place, address in enumerate(addresses or list(self._due)):
            self._due[address] = now + seconds + place * _STAGGER_SECONDS

    def go_on(self) -> socket.socket | None:
        """Continues without waiting. The connection, once the rank answered; the caller owns it. Local.

        Raises:
          OSError: this process has no descriptors, memory or ports left.
        """
        now = time.monotonic()
        for address in [each for each, due in self._due.items() if due <= now and each not in self._attempts]:
            self._begin(address)
        for address, attempt in list(self._attempts.items()):
            try:
                is_answered = attempt.go_on()
            except OSError as error:
                self._fail(address, error)
                continue
            if is_answered:
                del self._attempts[address]
                self.close()
                self.answer, self.address, self._is_reached = bytes(attempt.answer), address, True
                return attempt.socket
        return None

    def _begin(self, address: str) -> None:
        try:
            connecting = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            self._attempts[address] = _Attempt(connecting, self._handshake, self._proof, self._answer_size)
            configure(connecting, self._silence_seconds)
            with contextlib.suppress(BlockingIOError, InterruptedError):
                connecting.connect((address, self._port))
        except OSError as error:
            self._fail(address, error)
            if is_own_trouble(error, address):
                raise

    def _fail(self, address: str, error: OSError) -> None:
        attempt = self._attempts.pop(address, None)
        if attempt is not None:
            attempt.socket.close()
        self.failures[address] = error
        self._is_reached = False
        now = time.monotonic()
        self._due[address] = now + self.again_seconds
        for other in self._due:
            if other not in self._attempts and other not in self.failures:
                self._due[other] = now
                return

    @property
    def is_connected(self) -> bool:
        """Whether something at one of the addresses accepted a connection, and has not answered yet."""
        return any(attempt.is_connected for attempt in self._attempts.values())

    def is_refused(self) -> bool:
        """Whether the rank's port refuses connections: the rank has ended. Local.

        Where no address is known to be the rank's, the best one tells, once all others have failed too.
        """
        if not isinstance(self.failures.get(self._best), ConnectionRefusedError):
            return False
        return self._is_sure or (len(self.failures) == len(self._due) and not self.is_connected)

    @property
    def best(self) -> str:
        """The best address, with the port."""
        return self._with_port(self._best)

    def _with_port(self, address: str) -> str:
        return f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"

    def told_failures(self) -> str:
        """The addresses with the reasons why they do not answer, in words; empty once one was connected. Local."""
        if self.is_connected or self._is_reached:
            return ""
        told = [
            f"{self._with_port(address)} ({getattr(self.failures.get(address), 'strerror', None) or 'no answer'})"
            for address in self._due
            if not address.startswith("127.") and address != "::1"
        ]
        return ", ".join(told[:_MAX_TOLD]) or f"port {self._port} of this host"

    def sockets(self) -> tuple[list[socket.socket], list[socket.socket]]:
        """The sockets to be read from, and those to be written to. Local."""
        attempts = self._attempts.values()
        return [each.socket for each in attempts if not each.is_sending], [
            each.socket for each in attempts if each.is_sending
        ]

    def seconds_until_due(self) -> float:
        """How long until the next attempt is to begin or to be given up. Local."""
        waiting = [due for address, due in self._due.items() if address not in self._attempts]
        return max(0.0, min(waiting, default=time.monotonic() + 1.0) - time.monotonic())

    def close(self) -> None:
        """Ends all attempts. Idempotent."""
        while self._attempts:
            self._attempts.popitem()[1].socket.close()
