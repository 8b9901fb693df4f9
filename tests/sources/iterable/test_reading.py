"""Reading an opaque iterable: what is marked of it."""

from __future__ import annotations

import pytest

from torchdistinput.sources.iterable.cursor import Marked
from torchdistinput.sources.iterable.reading import CapturingIterator
from torchdistinput.sources.iterable.user_state import StatefulObjects
from torchdistinput.sources.kernel.read_failures import OnFailure


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


@pytest.mark.parametrize("by_next", [False, True])
@pytest.mark.parametrize(
    ("per_batch", "bad", "passed", "compared"),
    [(1, (), 0, [0, 1, 3]), (2, (), 0, [0, 2, 6]), (2, (7,), 8, [8, 10, 14]), (2, (0,), 0, [1, 5, 13])],
)
def test_states_are_taken_and_batches_compared_side_by_side(
    per_batch: int, bad: tuple[int, ...], passed: int, compared: list[int], by_next: bool
) -> None:
    data = Counting(bad)
    kept = StatefulObjects(None, data, "auto")
    read = CapturingIterator(data, kept, per_batch, 3, on_failure=OnFailure(True, Exception), compares=True)
    assert read.pass_over(passed, passed) is None
    marked = [each for each in (read if by_next else read.elements()) if isinstance(each, Marked)]
    assert [each.element for each in marked if each.compared][:3] == compared
    stated = [each for each in marked if each.snapshot is not None and each.snapshot.text is not None]
    assert [each.element for each in stated][1:4] == [stated[0].element + 3 * per_batch * turn for turn in (1, 2, 3)]
    assert all(each.snapshot.text == f'{{"iterator":{each.element - 1}}}' for each in stated if each.snapshot)
