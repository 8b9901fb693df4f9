"""A channel: the messages that the ranks exchange for one live iterator, or for the calls of one strategy.

Problem. Ranks exchange a few numbers for every step, in ``next``. The collectives of the training loop beside it must
not be disturbed. Every wait has a bound, and its error names the late rank.

Decisions.
- Each live iterator has connections of its own (a *channel*), so its exchanges need no order with those of other
  iterators. A strategy has one more channel, for the calls that all ranks make together (``process_group.py``).
- An exchange takes ``log2 W`` rounds of messages of one fixed size (``recursive_doubling.py``). A thread may begin an
  exchange, poll it, and wait for it in naps (``exchanges.py``).
- Texts travel in the same way, in rows of 256 bytes to 2 KiB. The row size is the next power of two above the longest
  text of the last exchange. Only where a text is longer, it is sent a second time, in rows of its length.
- ``abort``, from any thread, sends an abort message to all partners of this rank. A partner that then misses a message
  of this rank passes the abort message on, and so on. So every rank that cannot go on learns which rank left first, and
  why. No store is needed: any rank that is alive can pass the abort message on.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import numpy as np

from torchdistinput.coordination.connections import AbortMessage, Array, Connections, Departed
from torchdistinput.coordination.exchanges import Exchange
from torchdistinput.coordination.recursive_doubling import spread, sum_up
from torchdistinput.coordination.store import ended_before
from torchdistinput.errors import InputError, RankLost

T = TypeVar("T")

_MAX_TEXT = 1 << 30  # of one rank in one exchange, in bytes
_MIN_ROW, _MAX_ROW = 256, 2048  # bytes that a rank sends at first in an exchange of texts
_SILENT_SECONDS = 2.0  # a waiting rank sends a status twice a second, which each host acknowledges at once
_WORD = 8  # bytes; the first word of a row is the length of the text
_SAME_LIBRARY = "every rank must run the same version of torchdistinput, on a network that loses nothing"


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


def _checked(size: int, rank: int) -> int:
    if not 0 <= size <= _MAX_TEXT:
        raise InputError(f"rank {rank} of the group wants to send {size} bytes; {_SAME_LIBRARY}")
    return size


def _text_of(data: bytes, rank: int) -> str:
    try:
        return data.decode(errors="surrogatepass")
    except UnicodeDecodeError as error:
        raise InputError(f"rank {rank} of the group sent no text ({error.reason}); {_SAME_LIBRARY}") from error


def lost(message: AbortMessage, names: Sequence[int]) -> RankLost:
    """The error of a rank that cannot go on because another rank left. Local."""
    who = names[message.rank] if 0 <= message.rank < len(names) else "unknown"
    # The words stand in each error, not only in the message, so that the list of errors has them.
    if message.why.startswith(AbortMessage.DIED):
        how = message.why.removeprefix(AbortMessage.DIED)
        return RankLost(f"rank {who} {AbortMessage.DIED}{how}; see its own log for the reason.")
    if message.why == AbortMessage.ENDED:
        return ended_before(f"rank {who}")
    if message.why.startswith(AbortMessage.GAVE_UP):
        on_whom = message.why.removeprefix(AbortMessage.GAVE_UP)
        return RankLost(
            f"rank {who} {AbortMessage.GAVE_UP}{on_whom}. If the late rank is only slow, raise timeout_seconds; else "
            "look at what it does (py-spy dump --pid)."
        )
    if message.why.startswith(AbortMessage.FAILED):
        return RankLost(f"rank {who} {AbortMessage.FAILED}{message.why.removeprefix(AbortMessage.FAILED)}")
    return RankLost(f"rank {who} {message.why}. Every rank must read the same number of steps.")


@final
class ProcessGroupChannel:
    """A ``Channel`` over connections that no other channel uses. Made by ``ProcessGroupRanks.open_channel``.

    Args:
      connections: the connections; this object owns them from now on.
      give_back: is called when the channel was released, and may be used again.
      names: the ranks as users know them, by rank.
    """

    def __init__(self, connections: Connections, give_back: Callable[[], object], names: Sequence[int]) -> None:
        self.connections = connections
        self.rank: int = connections.rank
        self.num_ranks: int = connections.num_ranks
        self._give_back = give_back
        self._names = names
        self._lock = threading.RLock()  # garbage collection may close a dropped iterator on a thread that holds it
        self._row = _MIN_ROW  # the same on all ranks: it follows from texts that all ranks received
        self._since: float | None = None
        self._cause: AbortMessage | None = None  # why the channel ended
        self._released = False
        self._is_told = False  # whether this rank has told its partners that a rank left
        self.use = 0
        self.peer_times: dict[int, list[float]] | None = None
        self.num_exchanges = 0
        self.gave_up: str | None = None
        """Why this rank stopped waiting for the others, in an exchange that it may continue later."""

    def exchange(self, words: Sequence[int], *, by_max: int = 0) -> Exchange[list[int]]:
        """See ``Channel.exchange``."""
        self.connections.times = self.peer_times
        try:
            return (yield from self.collective(lambda group: sum_up(group, words, by_max=by_max)))
        finally:
            self.connections.times = None

    def gather(self, text: str) -> Exchange[list[str]]:
        """See ``Channel.gather``."""
        data = text.encode(errors="surrogatepass")  # file names may hold bytes that are no valid unicode
        rows = yield from self._spread(data, self._row)
        sizes = [_checked(int(row[0]), rank) for rank, row in enumerate(rows)]
        needed = _WORD * (1 - -max(sizes) // _WORD)
        if needed > self._row:
            rows = yield from self._spread(data, needed)
        self._row = min(max(1 << (needed - 1).bit_length(), _MIN_ROW), _MAX_ROW)
        return [
            _text_of(row[1:].tobytes()[:size], rank) for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
        ]

    def _spread(self, data: bytes, length: int) -> Exchange[list[Array]]:
        """One row of ``length`` bytes from every rank: the size of its data, then the first bytes of it. Collective."""
        content = len(data).to_bytes(_WORD, sys.byteorder) + data[: length - _WORD]
        own = np.frombuffer(content.ljust(length), np.int64)
        return (yield from self.collective(lambda group: spread(group, own)))

    def waiting_since(self) -> float | None:
        """See ``Channel.waiting_since``."""
        return self._since

    def late(self) -> list[int]:
        """See ``Channel.late``."""
        return self.connections.late()

    def unreached(self) -> str:
        """See ``Channel.unreached``."""
        late = self.late()
        silent = self.connections.silent_seconds(late[0]) if len(late) == 1 else 0.0
        if silent < _SILENT_SECONDS:
            return ""
        return f"its host has acknowledged nothing for {silent:.0f} seconds, so the host or the network is down"

    def abort(self, reason: str) -> None:
        """See ``Channel.abort``."""
        self.abort_by(AbortMessage(self.rank, reason))

    def abort_by(self, message: AbortMessage) -> None:
        """Ends the channel on all ranks, because some rank left. Local, idempotent."""
        with self._lock:
            if self.is_dead or self._released:
                return
            self._cause = message
        self.connections.send_abort(message)
        with self._lock:
            if self._since is None:  # else the exchange in progress closes them
                self.connections.close()

    def notify(self, use: int, why: str) -> None:
        """See ``Channel.notify``."""
        if use == self.use and not self.is_dead:
            self._is_told = True
            self.connections.notify(AbortMessage(self.rank, why, use))

    def departed(self, use: int) -> str:
        """See ``Channel.departed``."""
        if use != self.use:
            return ""
        message = self._cause or self.connections.departed(use)
        if message is None or message.rank == self.rank:
            return ""
        if not self._is_told:  # the partners of this rank are not all partners of that one
            self._is_told = True
            self.connections.notify(AbortMessage(message.rank, message.why, use))
        return f"rank {self._name(message.rank)} {message.why}"

    def _name(self, rank: int) -> int | str:
        return self._names[rank] if 0 <= rank < len(self._names) else "unknown"

    def release(self) -> None:
        """See ``Channel.release``."""
        with self._lock:
            if self.is_dead or self._released:
                return
            self._released = True
        self._give_back()

    @property
    def is_dead(self) -> bool:
        """Whether the channel was aborted, here or by another rank."""
        return self._cause is not None

    def end(self) -> None:
        """This rank never uses the channel again: the interpreter exits, or the strategy is gone. Local, idempotent."""
        with self._lock:
            self._released = False
        self.abort_by(AbortMessage(self.rank, self.gave_up or AbortMessage.ENDED))

    def reopen(self) -> None:
        """Makes a released channel ready for another iterator."""
        self.peer_times = None
        self.use += 1
        self._is_told = False
        self._released = False

    def collective(self, rounds: Callable[[Connections], Exchange[T]]) -> Exchange[T]:
        """One exchange made of rounds of messages. Collective: every rank calls this.

        Raises:
          RankLost: another rank left, or this rank left before.
        """
        with self._lock:
            if self._cause is not None:
                raise self._lost(self._cause)
            self._since = time.monotonic()
            self.num_exchanges += 1
        self.connections.begin()
        try:
            return (yield from rounds(self.connections))
        except Departed as departed:
            raise self._ended_by(departed.message) from None  # the cause is ours, and its text is in the message
        finally:
            with self._lock:
                self._since = None
                if self.is_dead:
                    self.connections.close()

    def _ended_by(self, message: AbortMessage) -> RankLost:
        """Ends the channel, unless this rank had aborted it: the abort also ends the wait with ``Departed``."""
        self.abort_by(message)
        return self._lost(self._cause or message)

    def _lost(self, cause: AbortMessage) -> RankLost:
        if cause.rank == self.rank:
            return RankLost(f"rank {self._names[self.rank]} cannot go on: {cause.why}.")
        return lost(cause, self._names)

    def __repr__(self) -> str:
        return f"ProcessGroupChannel(rank={self.rank} of {self.num_ranks}, exchange {self.num_exchanges})"
