"""How long a consumer waits for others, and what it says meanwhile."""

from __future__ import annotations

import logging
import time

import pytest

from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.errors import CoordinationTimeout


class Votes:
    """An exchange to which rank 2 does not come."""

    def __init__(self, since: float) -> None:
        self.since, self.asked = since, 0

    def waiting_since(self) -> float | None:
        return self.since

    def missing(self) -> str:
        self.asked += 1
        return "rank 12"

    def unreached(self) -> str:
        return ""


@pytest.mark.parametrize(("began", "since"), [(0.0, 0.0), (100.0, 0.0), (0.0, 100.0)])
@pytest.mark.parametrize(("timeout_seconds", "warnings"), [(60.0, 1), (5.0, 0), (0.5, 0)])
def test_who_is_late_is_asked_once_for_a_warning_and_once_for_the_error(
    timeout_seconds: float,
    warnings: int,
    began: float,
    since: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wait is one for others from when this rank waits, and its own message is under way."""
    votes, reasons = Votes(since), list[str]()
    straggler_timeout = StragglerTimeout(votes, timeout_seconds, reasons.append)
    clock = begins = max(began, since)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    error: CoordinationTimeout | None = None
    with caplog.at_level(logging.WARNING, "torchdistinput"):
        while error is None:
            assert not reasons
            clock += straggler_timeout.nap_seconds
            error = straggler_timeout.check(began, 7)
    assert timeout_seconds <= clock - begins <= timeout_seconds + straggler_timeout.nap_seconds
    assert f"rank 12 did not come to the exchange at step 7 within {timeout_seconds:g} seconds" in str(error)
    assert reasons == [f"gave up waiting for rank 12 at step 7 after {timeout_seconds:g} seconds"]
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for rank 12 at step 7 for 5 seconds"
    ] * warnings
    assert votes.asked == warnings + 1
