"""The user's own state: what may be saved, and what is said of what may not; and the place of opaque iterables."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torchdistinput.errors import StateMismatch
from torchdistinput.sources.iterable.position import IterableTrack, Place, ReaderPosition, place_of
from torchdistinput.sources.iterable.state_packing import packed_state, unpacked_state
from torchdistinput.sources.iterable.user_state import Snapshot, StatefulObjects, entered, why_unused
from torchdistinput.sources.kernel.cut import TakenBatches
from torchdistinput.step_types import Start


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


def snapshot_of(state: Any) -> Snapshot:
    return StatefulObjects(Keeper(state), None, "use").snapshot()


STATES = [
    None,
    0,
    -(2**70),
    True,
    1.5,
    float("inf"),
    "",
    "a\ud800\u00e9",
    b"\x00\xff",
    [],
    {},
    {"": [None, {"a": [1, 2.5, "x", False]}]},
    [0.1, 1e308, -0.0],
    (1, (2, [3]), ()),
    {1: "a", None: 2, ("x", 3): {"$": "tuple"}},
    {"$": "tuple", "of": [1]},
    np.int64(7),
    np.float32(0.1),
    random.Random(3).getstate(),
    np.random.default_rng(3).bit_generator.state,
]


@pytest.mark.parametrize("state", STATES, ids=[f"{number}" for number in range(len(STATES))])
def test_a_plain_state_comes_back_as_it_was(state: Any) -> None:
    back = unpacked_state(packed_state(state, "state"))
    assert back == state
    assert repr(back) == repr(state)


TENSORS = [
    torch.arange(6).reshape(2, 3),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.arange(12).reshape(3, 4).T,
    torch.get_rng_state(),
    torch.tensor([1 + 2j]).conj(),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.zeros((0, 2)),
]


@pytest.mark.parametrize("value", TENSORS, ids=[f"{number}" for number in range(len(TENSORS))])
def test_tensors_and_arrays_come_back_as_they_were(value: Any) -> None:
    back = unpacked_state(packed_state({"x": [value]}, "state"))["x"][0]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert (back == value).all()


def test_a_state_that_is_too_long_is_refused() -> None:
    for state in ({"a": torch.zeros(2**18 + 1)}, ["x" * 2**20], [b"x" * (2**20 + 1)]):
        with pytest.raises(ValueError, match="at most 1,048,576"):
            packed_state(state, "state")


def test_a_text_that_grows_without_bound_is_refused() -> None:
    text = json.dumps({"$": "bytes", "of": base64.b64encode(zlib.compress(bytes(2**21))).decode()})
    with pytest.raises(ValueError, match="longer than"):
        unpacked_state(text)


def test_a_snapshot_does_not_change_with_the_state() -> None:
    state = {"shards": [1]}
    snapshot = snapshot_of(state)
    state["shards"].append(2)
    assert json.loads(snapshot.text or "") == {"dataset": {"shards": [1]}}


REFUSED = [
    ({"shards": [0, {"rng": {1}}]}, 'Keeper.state_dict()["shards"][1]["rng"] is of type set'),
    ({1: (object(),)}, "Keeper.state_dict()[1][0] is of type object"),
    (np.array(["x"]), "Keeper.state_dict() is of type numpy.ndarray"),
    (OSError("gone"), "Keeper.state_dict() failed: OSError: gone"),
]


@pytest.mark.parametrize(("state", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_anything_else_is_refused_by_the_path_of_its_key(state: Any, told: str) -> None:
    snapshot = snapshot_of(state)
    assert snapshot.refusal.startswith(told)
    assert snapshot.text == ""
    assert not snapshot.reads_again
    assert StatefulObjects(Keeper(state), None, "auto").snapshot().reads_again


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    assert "RecursionError" in snapshot_of(state).refusal


def test_the_state_of_the_dataset_is_restored_before_it_is_iterated() -> None:
    iterator, kept = entered(Numbers(0), '{"dataset":3}', "auto")
    assert [*iterator] == [3, 4]
    assert isinstance(kept.dataset, Numbers)
    assert kept.iterator is None


def test_the_state_of_an_iterator_is_restored_after_it_was_made() -> None:
    iterator, kept = entered(Iterated(), '{"iterator":3}', "auto")
    assert [*iterator] == [3, 4]
    assert isinstance(kept.iterator, Iterated.Counter)
    assert kept.dataset is None


def test_the_state_of_data_that_is_its_own_iterator_is_restored_after_iter() -> None:
    class Own(Keeper):
        def __iter__(self) -> Any:
            self.state = 0
            return self

        def __next__(self) -> int:
            if self.state == 5:
                raise StopIteration
            self.state += 1
            return int(self.state) - 1

    iterator, kept = entered(Own(0), None, "auto")
    assert [next(iterator), next(iterator)] == [0, 1]
    again, _ = entered(Own(0), kept.snapshot().text, "auto")
    assert [next(again) for _ in range(3)] == [2, 3, 4]


def test_what_has_no_state_has_no_keeper() -> None:
    iterator, kept = entered(range(3), None, "auto")
    assert [*iterator] == [0, 1, 2]
    assert not kept


def test_a_state_is_not_asked_for_where_it_is_to_be_ignored_or_takes_arguments() -> None:
    class Wants(Numbers):
        def state_dict(self, num_samples: int, batch_size: int = 1) -> Any:  # type: ignore[override]
            raise AssertionError

    for data, own_state in ((Numbers(0), "ignore"), (Iterated(), "ignore"), (Wants(0), "auto")):
        assert not entered(data, None, own_state)[1]  # type: ignore[arg-type]
    assert why_unused(Wants(0), "auto").startswith("Wants.state_dict() needs arguments (num_samples)")


def test_a_state_of_data_that_has_none_is_a_mismatch() -> None:
    for text in ('{"dataset":1}', '{"iterator":1}'):
        with pytest.raises(StateMismatch, match="range.* has no state_dict"):
            entered(range(3), text, "auto")


@pytest.mark.parametrize(
    "text", ['{"a": [', "[]", '{"other":1}', '{"dataset":{"$":"no","of":1}}', '{"dataset":{"$":1}}']
)
def test_a_state_that_was_cut_is_a_mismatch(text: str) -> None:
    with pytest.raises(StateMismatch, match="own state in the state is"):
        entered(Numbers(0), text, "auto")


MALFORMED: list[Any] = [
    [],
    ["iterable"],
    ["map", 0, 0, 0, [[0, 0, None, 0]]],
    ["iterable", -1, 0, 0, [[0, 0, None, 0]]],
    ["iterable", True, 0, 0, [[0, 0, None, 0]]],
    ["iterable", 0, 0.5, 0, [[0, 0, None, 0]]],
    ["iterable", 0, 0, 0, None],
    ["iterable", 0, 0, 0, [[0, 0]]],
    ["iterable", 0, 0, 0, [[0, 1, None, 0]]],
    ["iterable", 0, 0, 0, [[1, 0, 7, 0]]],
    ["iterable", 0, 0, 0, ["abc"]],
    ["iterable", 1, 0, 0, [[0, 0, None, 0]]],
    ["iterable", 0, 0, 0, [[0, 0, None, 0, 0], [0, 0, None, 0, 0]]],
]


@pytest.mark.parametrize("value", MALFORMED, ids=repr)
def test_a_malformed_place_is_a_mismatch(value: Any) -> None:
    with pytest.raises(StateMismatch, match="position: "):
        Place.from_json(value, 1)


def test_a_place_from_before_there_were_digests_is_read_up_to_again() -> None:
    assert Place.from_json(["iterable", 0, 0, 9, [[5, 2, "{}"]]], 1) == Place((ReaderPosition(5, 5),), samples=9)


def test_a_place_goes_through_json() -> None:
    place = Place((ReaderPosition(5, 2, '{"a":1}'), ReaderPosition(4, 4)), turn=1, rows=2, samples=17)
    assert Place.from_json(json.loads(json.dumps(place.to_json())), 2) == place
    assert place_of(Start(steps=9, position=place.to_json()), 2) == place


def log_of(read_ahead: int, rows: list[int], place: Place | None = None) -> IterableTrack:
    """A log of two readers that take turns; each batch lasts the given rows, each third has a snapshot."""
    log = IterableTrack(place or Place((ReaderPosition(), ReaderPosition())), read_ahead, owns_state=False)
    for number, count in enumerate(rows):
        snapshot = Snapshot(str(number)) if number % 3 == 2 else None
        log.log.add(count, (10, (TakenBatches(number % 2, 1, snapshot),)))
    return log


def test_a_position_counts_whole_batches_and_the_rows_after_them() -> None:
    rows = [1, 3, 2, 1, 4, 1]
    found = [Place.from_json(log_of(20, rows).position(row), 2) for row in range(sum(rows) + 1)]
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
        place = Place.from_json(log_of(20, rows).position(row), 2)
        done = sum(reader.batches for reader in place.readers)
        again = IterableTrack(place, 20, owns_state=False)
        for number in range(done, len(rows)):
            snapshot = Snapshot(str(number)) if number % 3 == 2 else None
            again.log.add(rows[number], (10, (TakenBatches(number % 2, 1, snapshot),)))
        for later in range(row, sum(rows) + 1):
            assert again.position(later - row) == log_of(20, rows).position(later)


@pytest.mark.parametrize("read_ahead", [0, 1, 5])
def test_the_log_stays_short_where_nobody_asks_and_right_where_somebody_does(read_ahead: int) -> None:
    total = 400
    log, asked = IterableTrack(Place((ReaderPosition(),)), read_ahead, owns_state=False), log_of(0, [])
    lengths = []
    for drawn in range(total):
        log.log.add(1, (1, (TakenBatches(0, 1, None),)))
        lengths.append(len(log.log._notes))
        delivered = drawn - read_ahead - 1
        if delivered >= 0 and drawn % 7 == 0:
            assert log.position(delivered) == ["iterable", 0, 0, delivered, [[delivered, delivered, None, 0, 0]]]
    assert max(lengths) <= read_ahead + 3 + 32
    assert asked.position(0) == ["iterable", 0, 0, 0, [[0, 0, None, 0, 0], [0, 0, None, 0, 0]]]


def test_rows_of_others_past_the_own_end_count_for_nothing() -> None:
    log = log_of(20, [1, 1, 1])
    log.log.has_ended = True
    assert log.position(3) == log.position(8)


def test_a_refused_state_is_told_when_it_is_asked_for() -> None:
    log = IterableTrack(Place((ReaderPosition(),)), 1, owns_state=False)
    log.log.add(1, (1, (TakenBatches(0, 1, Snapshot("", "Keeper.state_dict() is of type set")),)))
    assert log.position(0)
    with pytest.raises(StateMismatch, match="of type set"):
        log.position(1)
    assert log.owns_state
