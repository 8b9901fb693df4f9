"""The first stage: rows become measured shares; the end and a failure come once, and then the end for ever."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import pytest
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from torchdistinput.batches.pytree import batch_size
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.errors import BatchingError
from torchdistinput.pipeline.fetch import Fetch
from torchdistinput.sources.kernel.ready_batches import AS_LEAVES, Measure
from torchdistinput.step_types import (
    Drawn,
    Failed,
    Held,
    LocalStep,
    OpaqueBatch,
    Origin,
    PartialPiece,
    PastEnd,
    ReadFailure,
    RowSizes,
    SizedRow,
    Skipped,
)


def size_of(piece: Any) -> int:
    """Samples that a piece was to have."""
    if piece is None or isinstance(piece, OpaqueBatch):
        return 0 if piece is None else piece.size
    if type(piece) is PartialPiece:
        return size_of(piece.piece) + len(piece.left_out)
    return batch_size(piece)


@final
class Rows:
    """A stream over a list of rows; an exception in the list is raised in its place."""

    def __init__(self, rows: list[Any], *, in_background: bool = False, drawing_fails_at: int | None = None) -> None:
        self.in_background = in_background
        self.log: list[str] = []
        self._rows = iter(rows)
        self._left = len(rows)
        self._drawing_fails_at = drawing_fails_at
        self._draws = 0
        self._measure = Measure(AS_LEAVES)

    def draw(self) -> Any:
        self.log.append("draw")
        self._draws += 1
        if self._draws - 1 == self._drawing_fails_at:
            raise KeyError("no such key")
        self._left -= 1
        return True if self._left >= 0 else None

    def fetch(self, drawn: Any) -> SizedRow | None:
        assert drawn is True
        self.log.append("fetch")
        row = next(self._rows)
        if isinstance(row, Exception):
            raise row
        if row is None:
            return None
        held = [each.piece if type(each) is PartialPiece else each for each in row]
        pieces, _, structure = self._measure.each([None if type(each) is OpaqueBatch else each for each in held])
        whole = [new if each is old else each for each, old, new in zip(row, held, pieces, strict=True)]
        return whole, RowSizes(0, tuple(map(size_of, row)), structure), 0

    def close(self) -> None:
        self.log.append("close")


def read(stream: Rows, times: int, checker: SchemaChecker | None = None) -> list[Held]:
    fetch = Fetch(stream, checker or SchemaChecker())
    return [fetch.finish(fetch.draw()) for _ in range(times)]


def failure(held: Held) -> Failed:
    assert isinstance(held, Failed)
    return held


def test_a_row_is_a_share_with_the_size_of_each_piece() -> None:
    (share,) = read(Rows([[torch.zeros(3), torch.zeros(2), None]]), 1)
    assert isinstance(share, LocalStep)
    assert share.sizes == (3, 2, 0)
    assert share.pieces[2] is None
    assert share.transfers == ()


def test_rows_of_this_process_are_fetched_where_they_are_drawn() -> None:
    stream = Rows([[torch.zeros(1)], [torch.zeros(1)]])
    fetch = Fetch(stream, SchemaChecker())
    assert isinstance(fetch.draw(), LocalStep)
    assert stream.log == ["draw", "fetch"]


def test_rows_of_the_background_are_fetched_by_whoever_finishes_them() -> None:
    stream = Rows([[torch.zeros(1)]], in_background=True)
    fetch = Fetch(stream, SchemaChecker())
    drawn = fetch.draw()
    assert isinstance(drawn, Drawn)
    assert stream.log == ["draw"]
    assert isinstance(fetch.finish(drawn), LocalStep)
    assert stream.log == ["draw", "fetch"]


@pytest.mark.parametrize("in_background", [False, True])
def test_past_the_end_comes_again_and_again_without_another_draw(in_background: bool) -> None:
    stream = Rows([[torch.zeros(1)]], in_background=in_background)
    assert [type(held) for held in read(stream, 5)] == [LocalStep, PastEnd, PastEnd, PastEnd, PastEnd]
    assert stream.log.count("draw") == 2


@pytest.mark.parametrize("in_background", [False, True])
def test_an_end_that_only_the_reading_finds_is_an_end_for_ever(in_background: bool) -> None:
    stream = Rows([[torch.zeros(1)], None, [torch.zeros(1)], [torch.zeros(1)]], in_background=in_background)
    assert [type(held) for held in read(stream, 4)] == [LocalStep, PastEnd, PastEnd, PastEnd]
    assert stream.log.count("fetch") == 2


def test_what_was_drawn_beyond_a_failure_is_not_read() -> None:
    stream = Rows([ValueError("broken"), [torch.zeros(1)], [torch.zeros(1)]], in_background=True)
    fetch = Fetch(stream, SchemaChecker())
    drawn = [fetch.draw() for _ in range(3)]
    assert [type(fetch.finish(each)) for each in drawn] == [Failed, PastEnd, PastEnd]
    assert stream.log.count("fetch") == 1


def test_a_failing_draw_is_a_failed_step() -> None:
    first, second, third = read(Rows([[torch.zeros(1)]] * 3, drawing_fails_at=1), 3)
    assert isinstance(first, LocalStep)
    assert isinstance(failure(second).error, KeyError)
    assert isinstance(third, PastEnd)


def test_a_failing_fetch_is_a_failed_step() -> None:
    error = ValueError("broken")
    found = failure(read(Rows([error]), 1)[0])
    assert found.error is error
    assert found.where == ""


def test_a_read_failure_is_unwrapped_and_its_place_kept() -> None:
    original = ValueError("bad record")
    wrapped = ReadFailure("file a.txt")
    wrapped.__cause__ = original
    found = failure(read(Rows([wrapped]), 1)[0])
    assert found.error is original
    assert found.where == "file a.txt"


def test_a_read_failure_keeps_what_is_known_of_its_place() -> None:
    wrapped = ReadFailure("sample 3", Origin(indices=(3,), worker=1))
    wrapped.__cause__ = ValueError("bad")
    assert failure(read(Rows([wrapped]), 1)[0]).origin == Origin(indices=(3,), worker=1)


def test_what_is_left_of_a_piece_is_the_piece_and_what_is_missing_is_counted() -> None:
    row = [
        PartialPiece(torch.zeros(2), Skipped(3, ("a", "b"))),
        torch.zeros(1),
        PartialPiece(None, Skipped(9, ("c",) * 9), (0,)),
        None,
    ]
    whole, thin = read(Rows([[torch.zeros(1)] * 4, row]), 2)
    assert isinstance(whole, LocalStep)
    assert whole.skipped == Skipped(0, ())
    assert isinstance(thin, LocalStep)
    assert thin.sizes == (2, 1, 0, 0)
    assert [None if piece is None else len(piece) for piece in thin.pieces] == [2, 1, None, None]
    assert thin.skipped == Skipped(12, ("a", "b", *["c"] * 8))


def test_a_thinned_piece_is_the_same_after_torch_has_pinned_what_is_in_it() -> None:
    pinned = pin_memory(PartialPiece(None, Skipped(2, ("a", "b")), (0, 1)))  # type: ignore[no-untyped-call] # torch's
    (share,) = read(Rows([[pinned, PartialPiece(None, Skipped(1, ("c",)), (0,))]]), 1)
    assert isinstance(share, LocalStep)
    assert share.skipped == Skipped(3, ("a", "b", "c"))


def test_an_interrupt_is_no_failed_step() -> None:
    class Interrupted:
        in_background = False

        def draw(self) -> Any:
            raise KeyboardInterrupt

        def fetch(self, drawn: Any) -> SizedRow | None:
            raise AssertionError

        def close(self) -> None:
            pass

    with pytest.raises(KeyboardInterrupt):
        Fetch(Interrupted(), SchemaChecker()).draw()


def test_arrays_become_tensors() -> None:
    shares = read(Rows([[{"x": np.arange(3), "s": np.array(["a", "b", "c"])}]] * 2), 2)
    for share in shares:
        assert isinstance(share, LocalStep)
        assert share.pieces[0]["x"].tolist() == [0, 1, 2]
        assert isinstance(share.pieces[0]["x"], torch.Tensor)
        assert share.pieces[0]["s"] == ["a", "b", "c"]


def test_another_structure_than_before_is_a_failed_step() -> None:
    rows = [[{"x": torch.zeros(2)}], [{"x": torch.zeros(2, dtype=torch.int32)}]]
    found = failure(read(Rows(rows), 2)[1])
    assert isinstance(found.error, BatchingError)
    assert "before dict(x: float32[batch]), now dict(x: int32[batch])" in str(found.error)


def test_the_pieces_of_one_row_must_be_alike_too() -> None:
    found = failure(read(Rows([[torch.zeros(2), torch.zeros(2, 1)]]), 1)[0])
    assert isinstance(found.error, BatchingError)


@pytest.mark.parametrize(
    ("piece", "told"),
    [
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, r"\['x'\] has 2, \['y'\] has 3"),
        ({"x": torch.tensor(1.0)}, r"\['x'\] is a scalar tensor"),
        (3, "an element of type int without a tensor"),
    ],
)
def test_a_piece_without_one_batch_size_is_a_failed_step(piece: Any, told: str) -> None:
    found = failure(read(Rows([[piece]]), 1)[0])
    assert isinstance(found.error, BatchingError)
    with pytest.raises(BatchingError, match=told):
        raise found.error


def test_inner_dims_may_change_and_the_latest_are_those_of_an_empty_batch() -> None:
    checker = SchemaChecker()
    sizes = [
        share.sizes
        for share in read(Rows([[torch.zeros(2, 5)], [torch.zeros(3, 7)]]), 2, checker)
        if isinstance(share, LocalStep)
    ]
    assert sizes == [(2,), (3,)]
    assert checker.structure is not None
    assert checker.structure.empty().shape == (0, 7)


def test_close_closes_the_stream() -> None:
    stream = Rows([])
    fetch = Fetch(stream, SchemaChecker())
    fetch.close()
    assert stream.log == ["close"]
