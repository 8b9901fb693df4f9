"""The user's own state: what may be saved, and what is said of what may not; and the place of opaque iterables."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torchdistinput.errors import StateMismatch
from torchdistinput.flow import Start
from torchdistinput.sources.opaque import Place, Reader, ReadLog, Taken, place_of
from torchdistinput.sources.own_state import Snapshot, entered, snapshot_of


class Keeper:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Numbers(Keeper):
    """Counts from its state on."""

    def __iter__(self) -> Iterator[int]:
        while self.state < 5:
            self.state += 1
            yield self.state - 1


class Iterated:
    """An iterable whose iterator has the state."""

    class Counter(Keeper, Iterator[int]):
        def __next__(self) -> int:
            if self.state == 5:
                raise StopIteration
            self.state += 1
            return int(self.state) - 1

    def __iter__(self) -> Iterator[int]:
        return self.Counter(0)


PLAIN = [
    None,
    0,
    -(2**70),
    True,
    1.5,
    "",
    "a\ud800\u00e9",
    [],
    {},
    {"": [None, {"a": [1, 2.5, "x", False]}]},
    [0.1, 1e308, -0.0],
]


@pytest.mark.parametrize("state", PLAIN, ids=repr)
def test_a_plain_state_comes_back_as_it_was(state: Any) -> None:
    snapshot = snapshot_of(Keeper(state))
    assert not snapshot.refusal
    back = json.loads(snapshot.text)
    assert back == state
    assert repr(back) == repr(state)


def test_a_snapshot_does_not_change_with_the_state() -> None:
    keeper = Keeper({"shards": [1]})
    snapshot = snapshot_of(keeper)
    keeper.state["shards"].append(2)
    assert json.loads(snapshot.text) == {"shards": [1]}


REFUSED = [
    ({"shards": [0, 1, {"rng": torch.zeros(2)}]}, 'Keeper.state_dict()["shards"][2]["rng"] is of type torch.Tensor'),
    ((1, 2), "Keeper.state_dict() is of type tuple"),
    ({"a": {1, 2}}, 'Keeper.state_dict()["a"] is of type set'),
    ({"a": {1: 2}}, 'Keeper.state_dict()["a"] has the key 1, of type int'),
    ([float("nan")], "Keeper.state_dict()[0] is nan"),
    ([float("inf")], "Keeper.state_dict()[0] is inf"),
    ([np.float64(1.0)], "Keeper.state_dict()[0] is of type numpy.float64"),
    ({"n": np.int64(1)}, 'Keeper.state_dict()["n"] is of type numpy.int64'),
    (collections.OrderedDict(a=1), "Keeper.state_dict() is of type collections.OrderedDict"),
    (b"x", "Keeper.state_dict() is of type bytes"),
    (OSError("gone"), "Keeper.state_dict() failed: OSError: gone"),
]


@pytest.mark.parametrize(("state", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_anything_else_is_refused_by_the_path_of_its_key(state: Any, told: str) -> None:
    snapshot = snapshot_of(Keeper(state))
    assert snapshot.refusal.startswith(told)
    assert snapshot.text == ""


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    assert "RecursionError" in snapshot_of(Keeper(state)).refusal


def test_the_state_of_the_dataset_is_restored_before_it_is_iterated() -> None:
    iterator, keeper = entered(Numbers(0), "3")
    assert [*iterator] == [3, 4]
    assert isinstance(keeper, Numbers)


def test_the_state_of_an_iterator_is_restored_after_it_was_made() -> None:
    iterator, keeper = entered(Iterated(), "3")
    assert [*iterator] == [3, 4]
    assert isinstance(keeper, Iterated.Counter)


def test_what_has_no_state_has_no_keeper() -> None:
    iterator, keeper = entered(range(3), None)
    assert [*iterator] == [0, 1, 2]
    assert keeper is None


def test_a_state_of_data_that_has_none_is_a_mismatch() -> None:
    with pytest.raises(StateMismatch, match="neither range nor its iterator range_iterator has state_dict"):
        entered(range(3), "1")


def test_a_state_that_was_cut_is_a_mismatch() -> None:
    with pytest.raises(StateMismatch, match="which is no JSON"):
        entered(Numbers(0), '{"a": [')


MALFORMED: list[Any] = [
    [],
    ["iterable"],
    ["map", 0, 0, 0, [[0, 0, None]]],
    ["iterable", -1, 0, 0, [[0, 0, None]]],
    ["iterable", True, 0, 0, [[0, 0, None]]],
    ["iterable", 0, 0.5, 0, [[0, 0, None]]],
    ["iterable", 0, 0, 0, None],
    ["iterable", 0, 0, 0, [[0, 0]]],
    ["iterable", 0, 0, 0, [[0, 1, None]]],
    ["iterable", 0, 0, 0, [[1, 0, 7]]],
    ["iterable", 0, 0, 0, ["abc"]],
    ["iterable", 1, 0, 0, [[0, 0, None]]],
    ["iterable", 0, 0, 0, [[0, 0, None], [0, 0, None]]],
]


@pytest.mark.parametrize("value", MALFORMED, ids=repr)
def test_a_malformed_place_is_a_mismatch(value: Any) -> None:
    with pytest.raises(StateMismatch, match="position: "):
        Place.from_json(value, 1)


def test_a_place_goes_through_json() -> None:
    place = Place((Reader(5, 2, '{"a":1}'), Reader(4, 4)), turn=1, rows=2, samples=17)
    assert Place.from_json(json.loads(json.dumps(place.to_json())), 2) == place
    assert place_of(Start(steps=9, position=place.to_json()), 2) == place


def log_of(read_ahead: int, rows: list[int], place: Place | None = None) -> ReadLog:
    """A log of two readers that take turns; each batch lasts the given rows, each third has a snapshot."""
    log = ReadLog(place or Place((Reader(), Reader())), read_ahead, owns_state=False)
    for number, count in enumerate(rows):
        snapshot = Snapshot(str(number)) if number % 3 == 2 else None
        log.add(count, 10, (Taken(number % 2, 1, snapshot),))
    return log


def test_a_position_counts_whole_batches_and_the_rows_after_them() -> None:
    rows = [1, 3, 2, 1, 4, 1]
    found = [Place.from_json(log_of(0, rows).position(row), 2) for row in range(sum(rows) + 1)]
    for row, place in enumerate(found):
        done = max(count for count in range(len(rows) + 1) if sum(rows[:count]) <= row)
        assert place.rows == row - sum(rows[:done])
        assert place.turn == done % 2
        assert place.samples == 10 * done
        assert sum(reader.batches for reader in place.readers) == done
        texts = [text for text in range(done) if text % 3 == 2]
        for number, reader in enumerate(place.readers):
            own = [text for text in texts if text % 2 == number]
            assert reader.text == (str(own[-1]) if own else None)
            assert reader.since == len([n for n in range(done) if n % 2 == number and n > (own[-1] if own else -1)])


def test_positions_go_on_from_where_a_log_began() -> None:
    rows = [1, 3, 2, 1, 4, 1]
    for row in range(sum(rows) + 1):
        place = Place.from_json(log_of(0, rows).position(row), 2)
        done = sum(reader.batches for reader in place.readers)
        again = ReadLog(place, 0, owns_state=False)
        for number in range(done, len(rows)):
            snapshot = Snapshot(str(number)) if number % 3 == 2 else None
            again.add(rows[number], 10, (Taken(number % 2, 1, snapshot),))
        for later in range(row, sum(rows) + 1):
            assert again.position(later - row) == log_of(0, rows).position(later)


@pytest.mark.parametrize("read_ahead", [0, 1, 5])
def test_the_log_stays_short_where_nobody_asks_and_right_where_somebody_does(read_ahead: int) -> None:
    total = 400
    log, asked = ReadLog(Place((Reader(),)), read_ahead, owns_state=False), log_of(0, [])
    lengths = []
    for drawn in range(total):
        log.drawn()
        log.add(1, 1, (Taken(0, 1, None),))
        lengths.append(len(log._read))
        delivered = drawn - read_ahead - 1
        if delivered >= 0 and drawn % 7 == 0:
            assert log.position(delivered) == ["iterable", 0, 0, delivered, [[delivered, delivered, None]]]
    assert max(lengths) <= read_ahead + 3 + 16
    assert asked.position(0) == ["iterable", 0, 0, 0, [[0, 0, None], [0, 0, None]]]


def test_rows_of_others_past_the_own_end_count_for_nothing() -> None:
    log = log_of(0, [1, 1, 1])
    log.end()
    assert log.position(3) == log.position(8)


def test_a_refused_state_is_told_when_it_is_asked_for() -> None:
    log = ReadLog(Place((Reader(),)), 0, owns_state=False)
    log.add(1, 1, (Taken(0, 1, Snapshot("", "Keeper.state_dict() is of type set")),))
    assert log.position(0)
    with pytest.raises(StateMismatch, match="of type set"):
        log.position(1)
    assert log.owns_state
