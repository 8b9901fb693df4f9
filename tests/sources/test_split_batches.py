"""Batches that come ready: what a reader knows to be alike is what the stages would find by looking."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.structures import KINDS
from torchdistinput.batches import pytree
from torchdistinput.batches.pytree import batch_size, flatten, structure_of
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.pipeline.fetch import Fetch
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.iterable.element_batches import ElementBatches
from torchdistinput.sources.iterable.position import IterableTrack, Place, ReaderPosition
from torchdistinput.sources.iterable.user_state import Snapshot
from torchdistinput.sources.kernel.cut import Cut, MarkedBatch, TakenBatches, as_is
from torchdistinput.sources.kernel.opaque_batches import OpaqueCollate
from torchdistinput.sources.kernel.read_failures import Failure
from torchdistinput.sources.kernel.ready_batches import CutReady, Measure, ReadyFns
from torchdistinput.sources.kernel.row_stream import rows_of
from torchdistinput.step_types import Drawn, Failed, Held, LocalStep, OpaqueBatch

OTHERS: list[Callable[[int], Any]] = [
    lambda n: {"y": torch.zeros(n, dtype=torch.int32), "x": torch.zeros(n, 5, dtype=torch.float64)},  # another order
    lambda n: {"x": torch.zeros(n, 6, dtype=torch.float64), "y": torch.zeros(n, dtype=torch.int32)},  # wider
    lambda n: {"x": np.zeros((n, 5)), "y": torch.zeros(n, dtype=torch.int32)},
    lambda n: (torch.zeros(n), torch.zeros(n + 1)),
    lambda _: torch.tensor(3),
]


class Rows:
    """A stream over what a reader gives; ``knows``: as it gives it, else as a loader worker sends it."""

    in_background = False

    def __init__(self, items: Iterable[Any], cut: Callable[[Any], Any], *, knows: bool) -> None:
        start = Place((ReaderPosition(),))
        self._rows = rows_of(map(cut, items), IterableTrack(start, 0, owns_state=False).log)
        self._knows = knows

    def draw(self) -> Any:
        row = next(self._rows, None)
        return row if row is None or self._knows else self.fetch(row)

    def fetch(self, drawn: Any) -> Any:
        if type(drawn) is not tuple:
            return drawn
        row, sizes, digest = drawn
        return row, sizes._replace(structure=sizes.structure and pickle.dumps(sizes.structure)), digest

    def close(self) -> None:
        self._rows.close()


def told(held: Held | Drawn) -> Any:
    """What a stage made of a row, to be compared."""
    if isinstance(held, LocalStep):
        return held.sizes, held.skipped, held.digest, [None if each is None else plain(each) for each in held.pieces]
    return (type(held), type(held.error), str(held.error), held.where) if isinstance(held, Failed) else type(held)


def plain(piece: Any) -> Any:
    leaves, structure = flatten(piece.content if isinstance(piece, OpaqueBatch) else piece)
    found = [(leaf.shape, leaf.numpy().tobytes()) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return type(piece), str(structure), repr(structure), found


def random_batches(rng: random.Random) -> list[Any]:
    kind = rng.choice(list(KINDS))
    batches: list[Any] = []
    for _ in range(rng.randint(1, 14)):
        make = KINDS[kind] if rng.random() < 0.9 else rng.choice([*KINDS.values(), *OTHERS])
        batches += [make(rng.choice([0, 1, 2, 3, 5, 5]))] * rng.choice([1, 1, 2, 4])
    if rng.random() < 0.2:
        batches.insert(rng.randrange(len(batches)), MarkedBatch(batches[0], Snapshot("1")))
    return [*batches, Failure(ValueError("bad"), "there")] if rng.random() < 0.2 else batches


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_row_that_the_reader_knows_becomes_the_share_that_a_look_at_it_makes(replicas: int) -> None:
    cutter = Cutter(Topology(num_workers=1, replicas_per_worker=replicas, worker=0), shared=True)
    known = 0
    for seed in range(60):
        rng = random.Random(seed)
        batches = random_batches(rng)
        if seed < len(OTHERS):  # an order of keys, say, that has to be put right every time
            batches = [KINDS["mapping"](2)] * 3 + [OTHERS[seed](2)] * 4 + [KINDS["mapping"](2)] * 3
        converts: list[Callable[[Any], Any]] = [as_is, as_is, lambda batch: batch]
        if replicas == 1:
            converts.append(OpaqueCollate(as_is, counts=False))
        convert = rng.choice(converts)
        checkers = [SchemaChecker(), SchemaChecker()]
        knowing, looking = (
            Fetch(Rows(batches, CutReady(convert, cutter), knows=knows), checker)
            for knows, checker in zip([True, False], checkers, strict=True)
        )
        for _ in range(len(batches) + 2):
            held = knowing.draw()
            assert told(held) == told(looking.draw()), seed
            assert checkers[0].structure == checkers[1].structure, seed
            assert checkers[0].row_bytes == checkers[1].row_bytes, seed
            known += isinstance(held, LocalStep)
    assert known > 40  # or nothing was tested


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_the_same_look_only_if_every_leaf_has_it(kind: str) -> None:
    cutter = Cutter(Topology(num_workers=1, replicas_per_worker=1, worker=0), shared=True)
    cut, rng = CutReady(as_is, cutter), random.Random(kind)
    before: Any = None
    for _ in range(200):
        batch = rng.choice([KINDS[kind], KINDS[kind], KINDS[kind], *KINDS.values(), *OTHERS[:3]])(rng.choice([2, 3]))
        item = cut(batch)
        assert not isinstance(item, Failure)
        if not isinstance(item, Cut):
            assert structure_of(item[0][0]) == structure_of(batch)
            assert item[0][0] is batch or pytree.holds_arrays(batch)
            assert item[1].pieces == (batch_size(batch),) == (item[1].samples,)
            if before is not None:
                same = structure_of(batch) == structure_of(before[0][0])
                assert (item[1].structure == before[1].structure) == same
        before = None if isinstance(item, Cut) else item


def test_batches_of_a_dataset_function_have_tensors_in_the_place_of_arrays_with_and_without_samples() -> None:
    measure = Measure(ReadyFns())
    for size in (2, 0, 2):
        (batch,), sizes, _ = measure.each([{"x": np.zeros((size, 3)), "n": 1}])
        assert (type(batch["x"]), batch["x"].shape, sizes) == (torch.Tensor, (size, 3), (size,))


def test_of_batches_that_last_several_steps_nothing_is_known() -> None:
    cutter = Cutter(Topology(num_workers=2, replicas_per_worker=1, worker=0), shared=False)
    cut = CutReady(as_is, cutter)
    for _ in range(3):
        item = cut(torch.arange(4))
        assert isinstance(item, Cut)
        assert [row[0].tolist() for row, *_ in item.sized()] == [[0, 1], [2, 3]]


def test_a_log_that_drops_old_positions_says_what_one_that_keeps_all_says() -> None:
    longest = 0
    for seed in range(200):
        rng = random.Random(seed)
        begun = Place((ReaderPosition(2, 1), ReaderPosition(5, 5)), rng.randrange(2), rng.choice([0, 0, 2]), 9)
        ahead = rng.choice([0, 2, 7])
        short = IterableTrack(begun, ahead, owns_state=False)
        whole = IterableTrack(begun, 10**9, owns_state=False)
        kinds = [
            (rng.choice([1, 1, 2]), rng.choice([4, 8]), (TakenBatches(rng.randrange(2), 1, None),)) for _ in range(3)
        ]
        rows = drawn = asked = 0
        while rows < 120:
            count, samples, taken = rng.choice(kinds)
            if rng.random() < 0.1:
                taken = (taken[0]._replace(snapshot=Snapshot(str(rows))),)
            for _ in range(rng.choice([1, 1, 3, 30])):
                short.log.add(count, (samples, taken))
                whole.log.add(count, (samples, taken))
                rows += count
                drawn = max(drawn, rows - begun.rows)
                longest = max(longest, len(short.log._notes))
                if rng.random() < 0.2:
                    asked = rng.randint(max(asked, drawn - ahead - 2), max(asked, drawn))
                    assert short.position(asked) == whole.position(asked), seed
        short.log.has_ended = True
        whole.log.has_ended = True
        for more in (drawn, drawn + 5):
            assert short.position(more) == whole.position(more), seed
    assert longest <= 7 + 2 + 32


class CountedCalls:
    """An iterator without ``__iter__``, which counts what it is asked for and fails where it is told to."""

    def __init__(self, count: int, fails: BaseException | None) -> None:
        self.asked, self._count, self._fails = 0, count, fails

    def __next__(self) -> int:
        self.asked += 1
        if self.asked > self._count:
            raise self._fails or StopIteration
        return self.asked


class Opened:
    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Any:
        return self.iterator


def batch_of(found: Any) -> Any:
    return found.batch if isinstance(found, MarkedBatch) else found


@pytest.mark.parametrize("fails", [None, KeyError("oh"), KeyboardInterrupt()])
@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_loop_over_guarded_data_gives_what_its_iterator_gives(fails: BaseException | None, size: int | None) -> None:
    iterator = CountedCalls(5, fails)
    found: list[Any] = []
    try:
        found.extend(ElementBatches(Opened(iterator), size, batch_of, 2))
    except KeyboardInterrupt:
        assert isinstance(fails, KeyboardInterrupt)
    whole: Any = {None: [1, 2, 3, 4, 5], 1: [[1], [2], [3], [4], [5]], 3: [[1, 2, 3], [4, 5]]}[size]
    if isinstance(fails, KeyError):
        assert [(each.error, each.where) for each in found[-1:]] == [(fails, "element 5")]
        assert found[:-1] == (whole[:1] if size == 3 else whole)
    elif fails is None:
        assert found == whole
    assert iterator.asked == 6


def test_guarded_data_is_entered_when_its_first_element_is_asked_for() -> None:
    entered: list[int] = []

    class Noted:
        def __iter__(self) -> Iterator[int]:
            entered.append(1)
            return iter([5, 6])

    elements: Iterator[Any] = iter(ElementBatches(Noted(), None, batch_of, 2))
    assert entered == []
    assert [next(elements), *elements] == [5, 6]
    assert entered == [1]


def test_a_known_row_is_numbered_and_passed_over_like_any_other() -> None:
    cutter = Cutter(Topology(num_workers=1, replicas_per_worker=1, worker=0), shared=True)
    batches = [torch.full((2,), number) for number in range(6)]
    place = Place((ReaderPosition(),), rows=2)
    log = IterableTrack(place, 0, owns_state=False)
    rows: list[Any] = list(rows_of(map(CutReady(as_is, cutter), batches), log.log, place.rows))
    assert [row[0][0].tolist() for row in rows] == [[n, n] for n in range(2, 6)]
    assert log.position(3) == Place((ReaderPosition(5, 5),), samples=10).to_json()
