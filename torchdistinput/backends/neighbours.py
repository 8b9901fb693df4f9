"""The door to process groups, its short cut: messages between ranks of one host, through memory that they share.

Problem. A message over gloo costs system calls on both sides, and wakes threads of gloo's that must first be let in:
beside two processes that keep two processors busy, 0.1 ms where one is free and 1 to 4 ms where none is.

Decision. Each rank has *letterboxes* in memory of its own, one for each rank that it exchanges messages with
(``doubling.partners``, so their number grows with ``log2 W``). It writes, and the other one looks; no call to the
system is made unless somebody sleeps.

*Who is a neighbour* is found by trial, pair by pair: each opens what the other one offers under the number of its
process, and compares the secret in its name. What cannot be opened (another host, another container, another system
than Linux) stays on gloo. The files have no name in any folder, so nothing is left whoever is killed.

*A box has two places*, taken in turns. That is enough: a rank sends its next message but one only after the answer to
the next, for which the first one was read. In front of each lies one word, the number of the message and its checksum,
written last; a reader that sees the word before the rest, as some processors allow, finds the checksum wrong, and looks
again.

*A reader that waits* says so in its memory, and sleeps until it is rung: a byte in a pipe, which the neighbour writes
only then. The end of the neighbour's process wakes it too. Whether one fell asleep and the other one sent at the same
moment depends on the order in which processors see each other's memory; a lock between the two steps makes it certain
where that is a full barrier (x86), likely elsewhere (ARM), and nobody sleeps longer than 50 ms without looking.

References: Dekker's algorithm, in E. W. Dijkstra, "Cooperating sequential processes", 1965. Linux ``pidfd_open(2)``,
``memfd_create(2)``, ``proc_pid_fd(5)``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import numpy as np

from torchdistinput.backends.doubling import Messenger, Words
from torchdistinput.backends.exchanges import Pending

__all__ = ["MOST_BYTES", "Neighbours", "meet"]

MOST_BYTES: Final = 32768
"""Of one message. Longer ones are few, and stay on gloo."""

_PLACE: Final = 1 + MOST_BYTES // 8  # words
_LEFT, _ASLEEP, _HEAD = 0, 1, 8  # words in front of the boxes
# Python leaves out what the system did not have where it was built.
_SHARES: Final = sys.platform == "linux" and {"memfd_create", "pidfd_open"} <= set(dir(os))
_NAP_SECONDS: Final = 0.05
_TAG: Final = 3


class _Offer(NamedTuple):
    """What a rank tells of itself, so that another one finds its memory; process 0 where it has none to offer."""

    process: int
    file: int
    bell: int
    pipe: int  # the number of the pipe, which tells it from others
    secret: int

    @property
    def name(self) -> str:
        """Of the file, in ``/proc``."""
        return f"/memfd:{_name(self.secret)} (deleted)"


_NOTHING: Final = _Offer(0, 0, 0, 0, 0)


def _name(secret: int) -> str:
    return f"torchdistinput-{secret:x}"


@final
class _Desk:
    """What this rank has: letterboxes, and a bell. The descriptor of the file is closed once the others opened it.

    Args:
      num_boxes: one for each rank that it writes to.
    """

    def __init__(self, num_boxes: int) -> None:
        if os.readlink("/proc/self") != str(os.getpid()):
            raise FileNotFoundError("/proc shows the processes under other numbers")
        self.secret = int.from_bytes(os.urandom(8), sys.byteorder) >> 2
        self.bell, self._button = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, _close, [self.bell, self._button]).atexit = False
        size = _words_with(num_boxes) * 8
        self.file = os.memfd_create(_name(self.secret))
        try:
            os.ftruncate(self.file, size)
            self.words: Words = np.frombuffer(mmap.mmap(self.file, size), np.int64)
        except OSError:
            os.close(self.file)
            raise

    def offer(self) -> _Offer:
        """What others need to find it."""
        return _Offer(os.getpid(), self.file, self.bell, os.fstat(self.bell).st_ino, self.secret)

    def leave(self) -> None:
        """Says that this rank left, and wakes it if it sleeps. Any thread, idempotent."""
        self.words[_LEFT] = 1
        _ring(self._button)


@final
class _Neighbour:
    """What this rank has of another one.

    Args:
      desk: this rank's.
      outgoing: where this rank writes for the other one: two places.
      theirs: the other one's memory.
      incoming: where it writes for this rank.
      button: of its bell.
      process: a descriptor of its process.
    """

    def __init__(self, desk: _Desk, outgoing: Words, theirs: Words, incoming: Words, button: int, process: int) -> None:
        self._desk = desk
        self._outgoing = outgoing
        self._theirs = theirs
        self._incoming = incoming
        self._button = button
        self._sent = self._expected = 0
        self._fence = threading.Lock()
        self._poll = select.poll()
        self._poll.register(desk.bell, select.POLLIN)
        self._poll.register(process, select.POLLIN)
        self._process = process
        weakref.finalize(self, _close, [button, process]).atexit = False

    def send(self, message: Words) -> None:
        """Writes a message. Local; never waits."""
        self._sent += 1
        place = self._outgoing[self._sent & 1]
        place[1 : 1 + len(message)] = message
        place[0] = _stamp(self._sent, message)
        with self._fence:
            pass
        if self._theirs[_ASLEEP]:
            _ring(self._button)

    def expect(self, into: Words) -> _Letter:
        """The next message. Local."""
        self._expected += 1
        return _Letter(self, self._incoming[self._expected & 1][: 1 + len(into)], self._expected, into)

    def ring(self) -> None:
        """Wakes it, whether or not it sleeps. Any thread."""
        _ring(self._button)

    @property
    def is_over(self) -> bool:
        """Whether this rank or the other one left."""
        return bool(self._theirs[_LEFT]) or bool(self._desk.words[_LEFT])

    def sleep(self, letter: _Letter) -> None:
        """Until the letter may have come. Raises ``RuntimeError`` if the neighbour's process has ended. Local."""
        flags = self._desk.words
        flags[_ASLEEP] = 1
        try:
            with self._fence:
                pass
            if letter.has_come():
                return
            events = [descriptor for descriptor, _ in self._poll.poll(_NAP_SECONDS * 1e3)]
        finally:
            flags[_ASLEEP] = 0
        if self._desk.bell in events:
            with contextlib.suppress(BlockingIOError):
                os.read(self._desk.bell, 4096)
        if self._process in events and not letter.has_come():
            raise RuntimeError("the process of a neighbour ended")


@final
class _Letter:
    """A message that is to come; see ``exchanges.Pending``.

    Args:
      neighbour: who writes it.
      place: where: its word, and the message.
      number: of the message.
      into: where it is copied to.
    """

    def __init__(self, neighbour: _Neighbour, place: Words, number: int, into: Words) -> None:
        self._neighbour = neighbour
        self._place = place
        self._number = number & 0x7FFFFFFF
        self._into = into
        self._read = False

    def has_come(self) -> bool:
        """See ``Pending.has_come``."""
        return self._is_read() or self._neighbour.is_over

    def wait(self) -> None:
        """See ``Pending.wait``."""
        while not self.has_come():
            self._neighbour.sleep(self)
        if not self._is_read():  # looked at once more: it may have come just before the end
            raise RuntimeError("a neighbour left")

    def _is_read(self) -> bool:
        if self._read:
            return True
        word = int(self._place[0])
        if word >> 32 != self._number:
            return False
        self._into[:] = self._place[1:]
        self._read = word == _stamp(self._number, self._into)
        return self._read


def _stamp(number: int, message: Words) -> int:
    return (number & 0x7FFFFFFF) << 32 | zlib.crc32(message.data)


def _ring(button: int) -> None:
    with contextlib.suppress(BlockingIOError):  # it rings already
        os.write(button, b"\0")


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@final
class Neighbours:
    """The ranks of this host that this one exchanges messages with. One thread at a time, but where it says otherwise.

    Args:
      desk: what this rank has; ``None`` where there is nobody.
      by_rank: the others.
    """

    def __init__(self, desk: _Desk | None, by_rank: dict[int, _Neighbour]) -> None:
        self._desk = desk
        self._by_rank = by_rank

    def reaches(self, peer: int, message: Words) -> bool:
        """Whether a message to this rank, or from it, goes through memory; both of them say the same. Local."""
        return peer in self._by_rank and message.nbytes <= MOST_BYTES

    def send(self, message: Words, peer: int) -> None:
        """Writes a message. Local; never waits."""
        self._by_rank[peer].send(message)

    def recv(self, message: Words, peer: int) -> Pending:
        """The next message of a rank. Local."""
        return self._by_rank[peer].expect(message)

    def leave(self) -> None:
        """Ends all waits, here and with the neighbours. Any thread, idempotent."""
        if self._desk is None:
            return
        self._desk.leave()
        for neighbour in self._by_rank.values():
            neighbour.ring()


def meet(group: Messenger, peers: Sequence[int]) -> Neighbours:
    """Finds out which of these ranks share memory. Collective: every rank of the group calls this with its partners.

    Args:
      group: a group on which nothing else is under way.
      peers: the ranks that this rank exchanges messages with; they name this one, too.

    Raises:
      RuntimeError: a rank went away meanwhile.
    """
    try:
        desk = _Desk(len(peers)) if _SHARES else None
    except OSError:  # not allowed here: all messages go over gloo
        desk = None
    try:
        return _meet(group, peers, desk)
    except BaseException:
        if desk is not None:
            desk.leave()  # some may have met us, and wait
        raise
    finally:
        if desk is not None:
            os.close(desk.file)


def _meet(group: Messenger, peers: Sequence[int], desk: _Desk | None) -> Neighbours:
    offer = _NOTHING if desk is None else desk.offer()
    theirs = _told(group, peers, [(*offer, peers.index(peer), len(peers)) for peer in peers])
    found: dict[int, _Neighbour] = {}
    for box, (peer, (*words, their_box, their_boxes)) in enumerate(zip(peers, theirs, strict=True)):
        if desk is not None and words[0]:
            with contextlib.suppress(OSError):  # that is the trial
                found[peer] = _visit(desk, box, _Offer(*words), their_box, their_boxes)
    agreed = _told(group, peers, [(int(peer in found),) for peer in peers])
    for peer, (also_found_us, *_) in zip(peers, agreed, strict=True):
        if not also_found_us:
            found.pop(peer, None)
    return Neighbours(desk if found else None, found)


def _told(group: Messenger, peers: Sequence[int], said: Sequence[Sequence[int]]) -> list[list[int]]:
    """What each of these ranks tells this one, for what it tells them: as many words."""
    outgoing = [np.array(words, np.int64) for words in said]
    rows = [np.zeros_like(words) for words in outgoing]
    waits = []
    broken: list[RuntimeError] = []
    for row, peer in zip(rows, peers, strict=True):
        try:
            waits.append(group.recv(row, peer, _TAG))
        except RuntimeError as error:  # noqa: PERF203 - it died before it connected; the others wait for us to connect
            broken.append(error)
    if broken:
        raise broken[0]
    waits += [group.send(words, peer, _TAG) for words, peer in zip(outgoing, peers, strict=True)]
    for each in waits:
        each.wait()
    return [row.tolist() for row in rows]


def _visit(desk: _Desk, box: int, offer: _Offer, their_box: int, their_boxes: int) -> _Neighbour:
    """Opens what another rank offers; raises ``OSError`` if it is not to be found here."""
    folder = f"/proc/{offer.process}/fd"
    with contextlib.ExitStack() as opened:
        process = os.pidfd_open(offer.process)
        opened.callback(os.close, process)
        pipe = f"pipe:[{offer.pipe}]"
        if [os.readlink(f"{folder}/{offer.file}"), os.readlink(f"{folder}/{offer.bell}")] != [offer.name, pipe]:
            raise FileNotFoundError(f"process {offer.process} is another one here")
        # For reading too: a write to a pipe that nobody reads any more would raise SIGPIPE.
        button = os.open(f"{folder}/{offer.bell}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        opened.callback(os.close, button)
        file = os.open(f"{folder}/{offer.file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            words = np.frombuffer(mmap.mmap(file, _words_with(their_boxes) * 8), np.int64)
        finally:
            os.close(file)
        opened.pop_all()  # the neighbour closes them
    return _Neighbour(desk, _box(desk.words, box), words, _box(words, their_box), button, process)


def _words_with(num_boxes: int) -> int:
    return _HEAD + num_boxes * 2 * _PLACE


def _box(words: Words, number: int) -> Words:
    """Two places."""
    return words[_words_with(number) : _words_with(number + 1)].reshape(2, _PLACE)
