"""Messages between ranks over real sockets: order, pieces, ends; who is blamed; and what nobody understands."""

from __future__ import annotations

import json
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.socket_ranks import HANG_SECONDS, channels, end_all, on_threads, summed, tcp_pair
from tests.support.waiting import wait_for
from torchdistinput.batches.schema import Structure, structure_of
from torchdistinput.coordination import channel as channel_module
from torchdistinput.coordination import tree as tree_module
from torchdistinput.coordination.channel import Channel, plain_message
from torchdistinput.coordination.exchanges import StartedExchange, conclude
from torchdistinput.coordination.fingerprints import agree
from torchdistinput.coordination.tree import Link, Tree, configure
from torchdistinput.errors import BatchingError, InputError, RankLost


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = channels(2)
    yield one, other
    end_all((one, other))


def test_a_look_never_waits_and_takes_what_has_come(pair: tuple[Channel, Channel]) -> None:
    root, leaf = pair
    begun = StartedExchange(summed(root, [0, 1, 2]))
    assert not begun.poll()
    link = leaf.tree.link(0)
    assert link is not None
    whole = HEAD.pack(0, 1, 24) + np.arange(3).tobytes()
    for byte in whole[:-1]:
        link.socket.send(bytes([byte]))
        assert not begun.poll()
    link.socket.send(whole[-1:])
    wait_for(begun.poll)
    assert begun.conclude() == [0, 2, 4]


def test_what_was_sent_before_an_abort_is_still_received(pair: tuple[Channel, Channel]) -> None:
    root, leaf = pair
    begun = StartedExchange(summed(root, [7]))
    StartedExchange(summed(leaf, [1]))
    leaf.abort("had enough")
    wait_for(root.departed)
    assert root.is_dead
    assert begun.conclude() == [8]
    for _ in range(2):
        with pytest.raises(RankLost, match=r"^rank 1 had enough\. Every rank must"):
            conclude(summed(root, [1]))
    with pytest.raises(RankLost, match=r"^rank 1 cannot go on: had enough\."):
        conclude(summed(leaf, [1]))


def test_another_thread_ends_a_wait(pair: tuple[Channel, Channel]) -> None:
    root, leaf = pair

    def wait(channel: Channel) -> str:
        with pytest.raises(RankLost) as caught:
            conclude(summed(channel, [1]))
        return str(caught.value)

    threading.Timer(0.2, root.abort, ["closed"]).start()
    told = on_threads([lambda: wait(root), lambda: time.sleep(0.3), lambda: leaf.tree.rest(1.0, lambda: False)])
    assert told[0] == "rank 0 cannot go on: closed."


@pytest.mark.parametrize("ends", [0, 1])
def test_who_still_waits_when_its_own_rank_ends_blames_no_other_rank(ends: int, pair: tuple[Channel, Channel]) -> None:
    begun = StartedExchange(summed(pair[ends], [1]))
    pair[ends].tree.end()
    with pytest.raises(RankLost, match=f"^rank {ends} cannot go on: ended."):
        begun.poll()


HEAD = struct.Struct("<qqq")


@pytest.mark.parametrize(
    "garbage",
    [
        HEAD.pack(4, 1, 8),  # of no kind
        HEAD.pack(-1, 1, 8),
        HEAD.pack(0, -2, 8),  # of no channel
        HEAD.pack(0, 1, 1 << 60),
        HEAD.pack(0, 1, -8),
        HEAD.pack(1, 1, 1 << 40),  # a status that would take all memory
        HEAD.pack(2, 1, -1),
        HEAD.pack(3, 1, 1 << 40),  # a notice, too
        b"GET / HTTP/1.1\r\nHost: localhost\r\n",
    ],
)
def test_garbage_ends_the_connection_and_takes_no_memory(garbage: bytes, pair: tuple[Channel, Channel]) -> None:
    root, leaf = pair
    link = leaf.tree.link(0)
    assert link is not None
    link.socket.send(garbage)
    with pytest.raises(RankLost, match=r"rank 1 sent a frame of kind .* the same version"):
        conclude(summed(root, [1]))


@pytest.mark.parametrize("told", [b"", b"{", b"{}", b'["x", "died", "y"]', b"[" * 60_000, b"\xff\xfe"])
def test_an_abort_that_nobody_understands_counts_as_a_lost_connection(
    told: bytes, pair: tuple[Channel, Channel]
) -> None:
    root, leaf = pair
    link = leaf.tree.link(0)
    assert link is not None
    link.send(2, 1, told)
    with pytest.raises(RankLost, match="rank 1 died or lost its connection"):
        conclude(summed(root, [1]))


def test_a_parent_names_all_that_are_missing() -> None:
    found = channels(4)
    begun = StartedExchange(summed(found[0], [1]))
    StartedExchange(summed(found[2], [1]))
    wait_for(lambda: not begun.poll() and found[0].late() == [1, 3])
    end_all(found)


def test_a_status_is_believed_for_some_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that said for whom it waits, and then stands still, is late itself."""
    tree = Tree(1, 9)
    here, there = tcp_pair()
    tree.add(Link(0, here))
    channel = Channel(tree, 1, range(9))
    above = Link(0, there)
    above.send(1, 1, np.array([5], np.int64).tobytes())
    begun = StartedExchange(summed(channel, [1]))
    wait_for(lambda: not begun.poll() and channel.late() == [5])
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 2 * tree_module._FRESH_SECONDS)
    assert channel.late() == [0]
    tree.end()
    above.close()


def test_a_rank_that_reads_nothing_is_told_no_more_than_the_system_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_REST_SECONDS", 0.0)
    found = channels(3)
    root = found[0]
    link = root.tree.link(1)
    assert link is not None
    link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    begun = StartedExchange(summed(root, [1]))
    StartedExchange(summed(found[1], [1]))  # it waits for the result, and reads nothing
    assert not begun.poll()
    for _ in range(200_000):
        root.tree.go_on()
        if link.unsent:
            break
    assert link.unsent
    for _ in range(1000):
        root.tree.go_on()
        assert len(link.unsent) <= 1  # the system may take some more meanwhile
    end_all(found)


def test_a_rank_in_its_training_code_learns_who_left_its_loop_or_died(pair: tuple[Channel, Channel]) -> None:
    root, leaf = pair
    assert root.departed() == ""
    leaf.notify("stopped reading after step 2 of epoch 0")
    wait_for(root.departed)
    assert root.departed() == "rank 1 stopped reading after step 2 of epoch 0"
    assert not root.is_dead
    beside = Channel(root.tree, 2, range(2))
    assert beside.departed() == ""
    link = leaf.tree.link(0)
    assert link is not None
    link.close()
    wait_for(beside.departed)
    assert beside.departed() == "rank 1 died or lost its connection"


def test_an_interruption_while_a_frame_is_read_ends_all_on_all_ranks(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, leaf = pair
    begun = StartedExchange(summed(root, [1]))
    StartedExchange(summed(leaf, [1]))
    link = root.tree.link(1)
    assert link is not None
    assert select.select([link.socket], [], [], HANG_SECONDS)[0]

    def interrupt(link: Link) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Link, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            begun.poll()
    with pytest.raises(RankLost, match="rank 0 was interrupted by KeyboardInterrupt while it read"):
        conclude(summed(Channel(leaf.tree, 5, range(2)), [1]))


def test_a_timeout_may_be_longer_than_the_system_can_count_and_idle_connections_are_kept_alive() -> None:
    """Firewalls forget a connection that was idle for some minutes; and no wait ends by the system."""
    for each in tcp_pair():
        configure(each)
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 30
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) >= 3600_000
        each.close()


GARBAGE = ["", "x", "{", "[" * 10**5, '{"a":' * 10**5, "9" * 10**5, "null", "[]", "3", '"x"', "\0", "NaN", "\ud800"]


def heard_from(content: bytes) -> Any:
    """What a rank hears in an exchange of texts from another one that sends what it likes."""
    root, leaf = channels(2)
    link = leaf.tree.link(0)
    assert link is not None
    link.send(0, 1, content)
    try:
        return conclude(root.gather("mine"))
    finally:
        end_all((root, leaf))


SIZE = struct.Struct("<qq")


@pytest.mark.parametrize("size", [-1, 5, 1 << 40, (1 << 63) - 1])
def test_a_size_that_nobody_can_mean_is_refused(size: int) -> None:
    with pytest.raises(InputError, match=f"rank 1 of the group wants to send {size} bytes"):
        heard_from(SIZE.pack(1, size) + b"four")


@pytest.mark.parametrize("count", [-1, 0, 2, 1 << 62])
def test_a_number_of_ranks_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(InputError, match="every rank must run the same version"):
        heard_from(SIZE.pack(count, 4) + b"four")


def test_bytes_that_are_no_text_are_named() -> None:
    with pytest.raises(InputError, match="rank 1 of the group sent no text"):
        heard_from(SIZE.pack(1, 4) + b"\xff\xfe\xff\xfe")
    assert heard_from(SIZE.pack(1, 3) + "ü!".encode()) == ["mine", "ü!"]


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_no_message(text: str) -> None:
    with pytest.raises(InputError, match="which is no message") as caught:
        plain_message(text)
    assert len(str(caught.value)) < 1000


class Others:
    """Ranks, one of which sends what it likes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def gather_texts(self, text: str, what: str) -> list[str]:
        return [text, self._text]

    def name(self, rank: int) -> int:
        return rank


@pytest.mark.parametrize(
    "text",
    [
        *GARBAGE,
        "{}",
        '{"what": "iter"}',
        '{"what": 1, "facts": {}, "problem": null, "extra": 0}',
        '{"what": "iter", "facts": [], "problem": null, "extra": 0}',
        '{"what": "iter", "facts": {}, "problem": ["os.system"], "extra": 0}',
        '{"what": "iter", "facts": {}, "problem": [1, 2], "extra": 0}',
        '{"what": "iter", "facts": {}, "problem": ["SystemExit", "x"], "extra": 0}',
        '{"what": "iter", "facts": {}, "problem": ["__name__", "x"], "extra": 0}',
    ],
)
def test_ranks_that_send_garbage_agree_on_nothing(text: str) -> None:
    ranks: Any = Others(text)
    with pytest.raises(InputError):
        agree(ranks, "iter", {})


def test_a_structure_that_another_rank_described_is_one_or_is_refused() -> None:
    batch = {"x": torch.zeros(2, 3), "y": [torch.zeros(2), (torch.zeros(2, 1), 3)], "z": ["a", "b"]}
    good = structure_of(batch).to_json()
    assert Structure.from_json(json.loads(json.dumps(good))).signature() == structure_of(batch).signature()
    odd: list[Any] = [
        None,
        -1,
        1 << 70,
        "x",
        "os:system",
        "__class__",
        [],
        {},
        [[]],
        [1 << 62] * 3,
        1.5,
        True,
        "tensor",
    ]
    rng, told = random.Random(0), list[str]()
    for _ in range(2000):
        bad = json.loads(json.dumps(good))
        node = bad
        while rng.random() < 0.8 and (inner := [each for each in node if isinstance(each, list) and each]):
            node = rng.choice(inner)
        node[rng.randrange(len(node))] = rng.choice(odd)
        try:
            Structure.from_json(bad).empty()
        except BatchingError as error:
            told.append(str(error))
    assert 500 < len(told) < 2000
    assert max(map(len, told)) < 1000
    nested: Any = None
    for _ in range(100_000):
        nested = ["list", "", [0], [nested]]
    with pytest.raises(BatchingError, match="RecursionError"):
        Structure.from_json([nested, good[1][:1]])
