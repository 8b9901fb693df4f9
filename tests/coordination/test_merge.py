"""What was sent comes before what ended since; an end is told to all; equal texts travel as one. Over real sockets."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from tests.support.socket_ranks import channels, end_all, on_threads, summed
from torchdistinput.coordination import channel as channel_module
from torchdistinput.coordination import tree
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import StartedExchange
from torchdistinput.errors import RankLost


@pytest.fixture(params=[8, 2], ids=["a star", "levels"])
def fan_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tree of many levels, too."""
    monkeypatch.setattr(tree, "FAN_OUT", request.param)


@pytest.mark.usefixtures("fan_out")
@pytest.mark.parametrize("num_ranks", [3, 5, 9])
def test_what_all_ranks_have_sent_is_completed_though_one_has_ended_since(num_ranks: int) -> None:
    """Each rank ends as soon as it has the result, of which those below it may not have heard yet."""
    found = channels(num_ranks)

    def rank(channel: Channel) -> list[int]:
        sums: list[int] = StartedExchange(summed(channel, [channel.rank])).conclude()
        channel.tree.end()
        return sums

    assert on_threads([partial(rank, each) for each in found]) == [[sum(range(num_ranks))]] * num_ranks


def test_a_result_that_was_not_passed_on_yet_comes_before_an_end_that_was_heard_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 of four has rank 3 below it, and is in its training code when the result comes, and rank 1 ends."""
    monkeypatch.setattr(tree, "FAN_OUT", 2)
    found = channels(4)
    begun = [StartedExchange(summed(each, [1])) for each in found]
    for rank in (3, 2, 1, 0, 1):
        begun[rank].poll()
        time.sleep(0.1)
        begun[rank].poll()
    assert begun[1].conclude() == [4]
    found[1].tree.end()
    time.sleep(0.1)
    for rank in (0, 2, 3):
        found[rank].tree.go_on()
        time.sleep(0.1)
    assert found[2].is_dead
    assert [begun[rank].conclude() for rank in (0, 2, 3)] == [[4]] * 3
    with pytest.raises(RankLost, match="rank 1 ended before it came here"):
        StartedExchange(summed(found[3], [1])).conclude()
    end_all(found)


def test_a_result_that_nobody_takes_keeps_no_rank_from_hearing_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of four left its loop before the result came, which it would have passed on to rank 3."""
    monkeypatch.setattr(tree, "FAN_OUT", 2)
    found = channels(4)
    begun = [StartedExchange(summed(each, [1])) for each in found]
    for rank in (3, 2, 1, 0):
        begun[rank].poll()
        time.sleep(0.1)
        begun[rank].poll()
    time.sleep(0.1)
    found[2].abort("stopped reading")
    for rank in (2, 1, 0, 2, 3):
        if rank == 1:
            found[1].tree.end()
        else:
            found[rank].tree.go_on()
        time.sleep(0.1)
    assert Channel(found[3].tree, 9, range(4)).is_dead
    end_all(found)


@pytest.mark.parametrize(
    ("rows", "expected"), [("aaaa", [(4, "a")]), ("abbb", [(1, "a"), (1, "b"), (1, "b"), (1, "b")])]
)
def test_equal_texts_of_ranks_that_follow_each_other_travel_as_one(rows: str, expected: Any) -> None:
    sent: list[bytes] = []
    found = channels(4)

    def rank(channel: Channel) -> list[str]:
        merged = channel.merge

        def seen(mine: bytes, join: Any) -> Any:
            content = yield from merged(mine, join)
            sent.append(content)
            return content

        channel.merge = seen  # type: ignore[method-assign]
        texts: list[str] = StartedExchange(channel.gather(rows[channel.rank])).conclude()
        return texts

    assert on_threads([partial(rank, each) for each in found]) == [list(rows)] * 4
    assert sent[0] == b"".join(channel_module._SIZE.pack(count, 1) + text.encode() for count, text in expected)
    end_all(found)
