"""The positions of opaque iterables: as many are kept as may be asked for."""

from __future__ import annotations

import pytest

from torchdistinput.sources.iterable.cursor import Place, ReaderPosition, ReadLog, TakenBatches


@pytest.mark.parametrize("read_ahead", [0, 1, 5])
def test_the_log_stays_short_where_nobody_asks_and_right_where_somebody_does(read_ahead: int) -> None:
    total = 400
    log = ReadLog(Place((ReaderPosition(),)), read_ahead, owns_state=False)
    lengths = []
    for drawn in range(total):
        log.add(1, 1, (TakenBatches(0, 1, None),))
        lengths.append(len(log._read))
        delivered = drawn - read_ahead - 1
        if delivered >= 0 and drawn % 7 == 0:
            assert log.position(delivered) == ["iterable", 0, 0, delivered, [[delivered, delivered, None, 0, 0]]]
    assert max(lengths) <= read_ahead + 3 + 32


def test_a_place_from_before_there_were_digests_is_read_up_to_again() -> None:
    assert Place.from_json(["iterable", 0, 0, 9, [[5, 2, "{}"]]], 1) == Place((ReaderPosition(5, 5),), samples=9)
