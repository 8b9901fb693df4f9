"""The places of the workers' readers are known for as long as a periodic sync may ask for them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, final

import pytest

from torchdistinput.coordination.step_sync import _last_sync
from torchdistinput.plan.file_resharding import ReaderCursor
from torchdistinput.sources.kernel.cut import Cut
from torchdistinput.sources.kernel.row_stream import rows_of
from torchdistinput.sources.records.position import CommonPlaces, FilesPosition, cursor_log
from torchdistinput.step_types import PeriodicSync


@final
@dataclasses.dataclass
class Rule:
    """When periodic syncs are passed; nothing more of them."""

    every: int
    early: bool

    def mine(self, rows: int) -> str:
        return ""

    def learn(self, rows: int, texts: Sequence[str]) -> None:
        pass


RULES = [Rule(CommonPlaces.every, True), Rule(CommonPlaces.every, False), Rule(8, True), Rule(1, False)]
ROWS = 140


@dataclasses.dataclass
class Reader:
    """One worker's reader, whose place after a row is that row; told every so many batches.

    Args:
      workers: the rows of a batch.
      read_ahead: rows that may be read before they are delivered.
      begins_at: the first row, perhaps in the middle of a batch.
      told_every: batches from one place that is told to the next.
    """

    workers: int
    read_ahead: int
    begins_at: int
    told_every: int

    def __post_init__(self) -> None:
        front = self.begins_at - self.begins_at % self.workers
        self.told = [front]
        self.read = self.begins_at
        begun = FilesPosition(self.workers, [], [(front, place_after(front))] * self.workers, self.begins_at)
        self.places = cursor_log(begun.cursors[0], self.begins_at, self.read_ahead)
        self.common = CommonPlaces(self.places, begun, 0, self.read_ahead)
        self._rows = rows_of(self._cuts(front), self.places)

    def _cuts(self, front: int) -> Iterator[Cut]:
        for number, first in enumerate(range(front, 10**6, self.workers)):
            end = first + self.workers
            tells = number % self.told_every == 0
            if tells:
                self.told.append(end)
            place = place_after(end) if tells else None
            rows = end - max(first, self.begins_at)
            yield Cut([[None]] * rows, 1, [(0,)] * rows, None, place)

    def read_to(self, row: int) -> None:
        while self.read < row:
            next(self._rows)
            self.read += 1

    def last_told(self, row: int) -> list[Any]:
        """The latest place up to a row, as it is told."""
        found = max(told for told in self.told if told <= row)
        return [found, json.dumps(place_after(found).to_json())]


def place_after(row: int) -> ReaderCursor:
    return ReaderCursor(opened=row)


def test_the_place_at_each_landmark_is_still_known_when_it_is_asked_for() -> None:
    """Batches of W rows are read whole, ahead of the row that is agreed on; the sync may lie as far behind that.

    One that was forgotten once ended an epoch of four workers early, and without a word.
    """
    for workers, read_ahead in itertools.product((1, 2, 4, 7), (0, 1, 3, 5)):
        for number, rule in enumerate(RULES):
            for slots in {1, max(1, read_ahead)}:
                reader = Reader(workers, read_ahead, (0, 3, workers)[number % 3], 1 + number % 2)
                passed = pass_landmarks(reader, rule, slots)
                assert passed > 5 or rule.every == CommonPlaces.every
                with pytest.raises(AssertionError, match=f"after row {reader.begins_at - 10 * 8} "):
                    reader.places.at(reader.begins_at - 10 * 8)


def pass_landmarks(reader: Reader, rule: PeriodicSync, slots: int) -> int:
    """Agrees on rows, as many at a time as one message covers, with as much read ahead as ever may be."""
    agreed = passed = 0
    learned = [reader.begins_at]
    while agreed < ROWS:
        reader.read_to(reader.begins_at + agreed + reader.read_ahead + 2)
        before, agreed = agreed, agreed + slots
        sync = _last_sync(agreed, rule, 1)
        if sync > _last_sync(before, rule, 1):
            passed += 1
            learned.append(reader.begins_at + sync)
            place = reader.last_told(reader.begins_at + sync)
            said = json.loads(reader.common.mine(sync))
            assert place in [each[:2] for each in said["places"]] or reader.common.at(place[0])[0] == place
            everyone = [json.dumps({**said, "worker": worker}) for worker in range(reader.workers)]
            reader.common.learn(sync, everyone)
            known = reader.begins_at + sync
            for row in range(max(known, reader.read - reader.read_ahead - 2), known + 1):
                assert reader.common.at(row)[0] == reader.last_told(row)
        for row in range(reader.begins_at + before, reader.begins_at + agreed + 1):
            known, cursor = reader.places.at(row)
            assert [known, cursor.to_text()] == reader.last_told(row)
        delivered = max(0, agreed - reader.read_ahead - 1)  # at least
        for row in {
            reader.begins_at + delivered,
            reader.begins_at + (delivered + agreed) // 2,
            reader.begins_at + agreed,
        }:
            sync = max(each for each in learned if each <= row)
            assert reader.common.at(row) == [reader.common.at(row)[0]] * reader.workers
            assert reader.last_told(sync)[0] <= reader.common.at(row)[0][0] <= row
    return passed
