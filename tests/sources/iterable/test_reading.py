"""Reading an opaque iterable: what is marked of it."""

from __future__ import annotations

from typing import Any

import pytest

from torchdistinput.coordination.batch_digests import digest_of_element
from torchdistinput.sources.iterable.element_batches import ElementReader
from torchdistinput.sources.iterable.user_state import StatefulObjects
from torchdistinput.sources.kernel.batcher import MarkedBatch
from torchdistinput.sources.kernel.read_failures import Failure


class Counting:
    """Numbers up to 400, with a state; some cannot be read."""

    def __init__(self, bad: tuple[int, ...]) -> None:
        self.number, self.bad = -1, bad

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> int:
        self.number += 1
        if self.number == 400:
            raise StopIteration
        if self.number in self.bad:
            raise ValueError(self.number)
        return self.number

    def state_dict(self) -> int:
        return self.number

    def load_state_dict(self, state: int) -> None:
        self.number = state


@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_failure_after_elements_were_passed_over_names_its_element(size: int | None) -> None:
    data = Counting((7,))
    read = ElementReader(data, StatefulObjects(None, None, "auto"), size)
    assert read.skip(3, 3) is None
    (failure,) = [each for each in read.batches() if isinstance(each, Failure)]
    assert failure.where == "element 7"


@pytest.mark.parametrize(
    ("size", "passed", "compared"),
    [
        (None, 0, [0, 1, 3]),
        (1, 0, [[0], [1], [3]]),
        (2, 0, [[0, 1], [2, 3], [6, 7]]),
        (2, 4, [[8, 9], [10, 11], [14, 15]]),
    ],
)
def test_states_are_taken_and_batches_compared_side_by_side(size: int | None, passed: int, compared: list[Any]) -> None:
    data = Counting(())
    kept = StatefulObjects(None, data, "auto")
    read = ElementReader(data, kept, size, compares=True)
    assert read.skip(passed, 2 * passed) is None
    marked = [each for each in read.batches() if isinstance(each, MarkedBatch)]
    assert [each.batch for each in marked if each.compared][:3] == compared
    lasts = [each.batch if size is None else each.batch[-1] for each in marked]
    stated = [(last, each.mark) for last, each in zip(lasts, marked, strict=True) if each.mark is not None]
    assert [last for last, _ in stated][1:4] == [stated[0][0] + (size or 1) * batches for batches in (1, 3, 7)]
    assert all(mark.digest == digest_of_element(last) for last, mark in stated)
    texts = [(last, mark.text) for last, mark in stated if mark.text is not None]
    assert all(text == f'{{"iterator":{last - 1}}}' for last, text in texts)
