"""Messages through memory: two ranks as two threads of this process, who find each other as two processes would."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.systems import linux_memory
from torchdistinput.backends import neighbours
from torchdistinput.backends.doubling import Words
from torchdistinput.backends.neighbours import MOST_BYTES, Neighbours, meet

pytestmark = linux_memory

HANG_SECONDS = 20.0


class Post:
    """A messenger between threads."""

    def __init__(self, number: int, boxes: dict[tuple[int, int], queue.Queue[Words]], size: int) -> None:
        self._rank, self._boxes, self._size = number, boxes, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, words: Words, peer: int, tag: int) -> Any:
        self._boxes[self._rank, peer].put(words.copy())
        return Got(lambda: None)

    def recv(self, words: Words, peer: int, tag: int) -> Any:
        def take() -> None:
            words[:] = self._boxes[peer, self._rank].get(timeout=HANG_SECONDS)

        return Got(take)


class Got:
    def __init__(self, take: Callable[[], None]) -> None:
        self.wait = take


def together(size: int, call: Callable[[Post], Any]) -> list[Any]:
    """What each rank returns."""
    boxes: dict[tuple[int, int], queue.Queue[Words]] = {
        (a, b): queue.Queue() for a in range(size) for b in range(size) if a != b
    }
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        results[rank] = call(Post(rank, boxes, size))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def pair() -> tuple[Neighbours, Neighbours]:
    first, second = together(2, lambda post: meet(post, [1 - post.rank()]))
    assert first.reaches(1, np.zeros(1, np.int64))
    assert second.reaches(0, np.zeros(1, np.int64))
    return first, second


def test_messages_of_all_lengths_arrive_in_order_as_they_were_sent() -> None:
    first, second = pair()
    rng = np.random.default_rng(0)
    for length in (1, 2, 67, 68, 1024, MOST_BYTES // 8, 1, 5):
        sent = [rng.integers(-(2**63), 2**63, length) for _ in range(2)]
        got = [np.zeros(length, np.int64) for _ in range(2)]
        first.send(sent[0], 1)
        awaited = [second.recv(got[0], 0), first.recv(got[1], 1)]
        assert awaited[0].has_come()
        assert not awaited[1].has_come()
        second.send(sent[1], 0)
        for each in awaited:
            each.wait()
            assert each.has_come()
        assert all(np.array_equal(a, b) for a, b in zip(sent, got, strict=True))


def test_what_is_too_long_is_not_for_memory() -> None:
    first, _ = pair()
    fits, too_long = np.zeros(MOST_BYTES // 8, np.int64), np.zeros(MOST_BYTES // 8 + 1, np.int64)
    assert (first.reaches(1, fits), first.reaches(1, too_long), first.reaches(2, fits)) == (True, False, False)


def test_a_message_of_which_a_part_is_seen_has_not_come() -> None:
    """The word in front may be seen before what follows it."""
    first, second = pair()
    into = np.zeros(8, np.int64)
    awaited = second.recv(into, 0)
    place = awaited._place  # type: ignore[attr-defined]  # as the reader sees it
    first.send(np.arange(8), 1)
    last, place[8] = int(place[8]), 0
    assert not awaited.has_come()
    place[8] = last
    assert awaited.has_come()
    assert into.tolist() == list(range(8))


def test_a_sleeper_is_woken_by_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bell it would sleep for as long as the test bounds a hang."""
    monkeypatch.setattr(neighbours, "_NAP_SECONDS", 10 * HANG_SECONDS)
    first, second = pair()
    into = np.zeros(3, np.int64)
    for number in range(50):
        awaited = second.recv(into, 0)
        waiting = threading.Thread(target=awaited.wait, daemon=True)
        waiting.start()
        if number % 2:
            while not first._by_rank[1]._theirs[neighbours._ASLEEP]:
                os.sched_yield()
        first.send(np.full(3, number), 1)
        waiting.join(HANG_SECONDS)
        assert not waiting.is_alive()
        assert into.tolist() == [number] * 3


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_wait_ends_when_either_leaves_and_what_came_before_counts(leaver: int) -> None:
    both = pair()
    came, missing = np.zeros(2, np.int64), np.zeros(2, np.int64)
    both[0].send(np.array([4, 5]), 1)
    told: list[str] = []

    def reads() -> None:
        first, second = both[1].recv(came, 0), both[1].recv(missing, 0)
        first.wait()
        try:
            second.wait()
        except RuntimeError as error:
            told.append(str(error))

    reading = threading.Thread(target=reads, daemon=True)
    reading.start()
    while not both[1]._desk.words[neighbours._ASLEEP]:  # type: ignore[union-attr]
        os.sched_yield()
    both[leaver].leave()
    reading.join(HANG_SECONDS)
    assert (came.tolist(), told) == ([4, 5], ["a neighbour left"])


def another_process(offer: Any) -> Any:
    return offer._replace(process=os.getppid() or 1)


def another_secret(offer: Any) -> Any:
    return offer._replace(secret=offer.secret ^ 1)


def another_pipe(offer: Any) -> Any:
    return offer._replace(pipe=offer.pipe + 1)


def no_file(offer: Any) -> Any:
    return offer._replace(file=1 << 20)


@pytest.mark.parametrize("stranger", [another_process, another_secret, another_pipe, no_file])
def test_who_is_not_what_it_says_is_no_neighbour_of_anybody(
    stranger: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two cannot be found by the other, which it does find itself: neither uses memory."""
    offer = neighbours._Desk.offer
    first_desk: list[Any] = []

    def told(desk: Any) -> Any:
        first_desk.append(desk)
        return stranger(offer(desk)) if desk is first_desk[0] else offer(desk)

    monkeypatch.setattr(neighbours._Desk, "offer", told)
    both = together(2, lambda post: meet(post, [1 - post.rank()]))
    assert not any(each.reaches(1 - rank, np.zeros(1, np.int64)) for rank, each in enumerate(both))


def test_only_who_finds_each_other_uses_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three ranks, one may make no memory: the other two share theirs."""
    desk = neighbours._Desk

    def made(num_boxes: int) -> Any:
        if threading.current_thread().name == "poor":
            raise PermissionError("not here")
        return desk(num_boxes)

    def join(post: Post) -> Neighbours:
        threading.current_thread().name = "poor" if post.rank() == 1 else "rich"
        return meet(post, [peer for peer in range(3) if peer != post.rank()])

    monkeypatch.setattr(neighbours, "_Desk", made)
    found = together(3, join)
    word = np.zeros(1, np.int64)
    reached = [[each.reaches(peer, word) for peer in range(3)] for each in found]
    assert reached == [[False, False, True], [False] * 3, [True, False, False]]


def test_who_met_one_that_then_failed_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells rank 1 that they have found each other, and fails over another partner."""
    told, desks = neighbours._told, neighbours._Desk
    kept: list[Any] = []

    def fails(group: Any, peers: Any, said: Any) -> list[list[int]]:
        answers = told(group, peers, said)
        if len(said[0]) == 1 and group.rank() == 0:
            raise RuntimeError("another one went away")
        return answers

    def made(num_boxes: int) -> Any:
        kept.append(desks(num_boxes))
        return kept[-1]

    def join(post: Post) -> str:
        try:
            found = meet(post, [1 - post.rank()])
            assert found.reaches(0, np.zeros(1, np.int64))
            found.recv(np.zeros(1, np.int64), 0).wait()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    monkeypatch.setattr(neighbours, "_told", fails)
    monkeypatch.setattr(neighbours, "_Desk", made)  # and kept, as the error may be
    assert together(2, join) == ["another one went away", "a neighbour left"]


def test_to_ring_where_nobody_is_any_more_is_no_error() -> None:
    """Nor a signal, which is fatal to scripts that have set SIGPIPE so."""
    first, second = pair()
    desk = second._desk
    assert desk is not None
    desk.words[neighbours._ASLEEP] = 1
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), desk.bell, inheritable=False)  # as if its process had ended
    for _ in range(70_000):  # more than a pipe takes
        first._by_rank[1].ring()
    first.send(np.zeros(1, np.int64), 1)


def descriptors() -> set[str]:
    return {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()}


def test_nothing_stays_open_and_nothing_has_a_name() -> None:
    before, named = descriptors(), set(os.listdir("/dev/shm"))
    both = pair()
    assert set(os.listdir("/dev/shm")) <= named
    del both
    gc.collect()
    assert descriptors() <= before
