"""The first stage: nothing is read beyond a failure, and what is left of a thinned piece is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.pipeline.fetch import Fetch
from torchdistinput.step_types import Counted, Failed, LocalStep, PartialPiece, PastEnd, Skipped


class Rows:
    """A stream over a list of rows and their sizes; an exception in the list is raised in its place."""

    in_background = True

    def __init__(self, *rows: Any) -> None:
        self.left = list(rows)

    def draw(self) -> Any:
        return True

    def digest_of(self, drawn: Any) -> int:
        return 0

    def fetch(self, drawn: Any) -> Counted | None:
        row = self.left.pop(0)
        if isinstance(row, Exception):
            raise row
        return Counted(*row, None)

    def close(self) -> None:
        """Has nothing to close."""


def test_what_was_drawn_beyond_a_failure_is_not_read() -> None:
    stream = Rows(ValueError("broken"), ([torch.zeros(1)], (1,)))
    fetch = Fetch(stream, SchemaChecker())
    drawn = [fetch.draw() for _ in range(3)]
    assert [type(fetch.finish(each)) for each in drawn] == [Failed, PastEnd, PastEnd]
    assert len(stream.left) == 1


def test_what_is_left_of_a_piece_is_the_piece_and_what_is_missing_is_counted_also_after_torch_has_pinned_it() -> None:
    row = [
        PartialPiece(torch.zeros(2), Skipped(3, ("a", "b")), (0, 1, 2)),
        torch.zeros(1),
        pin_memory(PartialPiece(None, Skipped(9, ("c",) * 9), (0,))),  # type: ignore[no-untyped-call] # torch's
        None,
    ]
    fetch = Fetch(Rows(([torch.zeros(1)] * 4, (1, 1, 1, 1)), (row, (5, 1, 1, 0))), SchemaChecker())
    whole, thin = [fetch.finish(fetch.draw()) for _ in range(2)]
    assert isinstance(whole, LocalStep)
    assert whole.skipped == Skipped(0, ())
    assert isinstance(thin, LocalStep)
    assert thin.sizes == (2, 1, 0, 0)
    assert [None if piece is None else len(piece) for piece in thin.pieces] == [2, 1, None, None]
    assert thin.skipped == Skipped(12, ("a", "b", *["c"] * 8))
