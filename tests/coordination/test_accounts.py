"""What all ranks raise follows from their accounts alone: no rank is needed to read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from torchdistinput.coordination.failures import EpochEnd, error_of_accounts
from torchdistinput.errors import BatchingError, RankDisagreement, RankLost, SourceError
from torchdistinput.plan.step_agreement import (
    DATA,
    DIFFER,
    DIFFERING_STRUCTURES,
    FAILED,
    FAILURES,
    LACKS,
    LOSSES,
    STOPPED,
    STOPS,
    STRUCTURE,
    Report,
    decide,
)

DIFFERENT = Report(live=1, sizes=[1], draws=[1])
ENDS = [(0, "a", 3)]


def drew(draw: str, read: str = "", costs: str = "", **more: Any) -> dict[str, Any]:
    return {"worker": 0, "draw": draw, "read": read, "costs": costs, **more}


@pytest.mark.parametrize(
    ("report", "asks", "accounts", "hint", "cls", "words"),
    [
        (
            Report(flags=DIFFER),
            DIFFERING_STRUCTURES,
            [{"structure": "a"}, {}, {"structure": "b"}],
            "",
            BatchingError,
            "0: a; rank 2: b",
        ),
        (
            Report(flags=LACKS, structure=1),
            STRUCTURE,
            [{"problem": "odd"}, {"unknown": "?"}],
            "",
            BatchingError,
            "rank 0: odd",
        ),
        (Report(flags=LACKS, structure=1), STRUCTURE, [{}, {"unknown": "none knows"}], "", BatchingError, "none knows"),
        (Report(flags=STOPPED), STOPS, [{}, {"stopped": "left"}], "", RankLost, "rank 1 left, while rank 0 goes on"),
        (
            Report(skipped=9),
            LOSSES,
            [{"first": ["a"]}, {}],
            "",
            SourceError,
            "9 samples could not be read up to step 5",
        ),
        (
            DIFFERENT,
            DATA,
            [drew("1"), drew("2")],
            "",
            RankDisagreement,
            "samplers of the ranks differ at step 5 of epoch 2",
        ),
        (
            DIFFERENT,
            DATA,
            [drew("1", "r", "c"), drew("1", "r", "d")],
            "",
            RankDisagreement,
            "costs: rank 0: c; rank 1: d",
        ),
        (DIFFERENT, DATA, [drew("1", "r"), drew("1", "s")], "", RankDisagreement, "share a data-parallel coordinate"),
        (
            DIFFERENT,
            DATA,
            [drew("1", "r"), drew("1", "s")],
            "Mend it.",
            RankDisagreement,
            "or the end of the data): rank 0: r; rank 1: s",
        ),
        (
            DIFFERENT,
            DATA,
            [drew("1", "r", ends=ENDS), drew("1", "s", ends=[])],
            "Mend it.",
            RankDisagreement,
            "rank 0: a has 3 records; rank 1: more records. Mend it.",
        ),
    ],
)
def test_the_error_follows_from_what_was_asked_and_told(
    report: Report, asks: str, accounts: Sequence[dict[str, Any]], hint: str, cls: type[Exception], words: str
) -> None:
    decision = decide(report, 8)
    assert decision.asks == asks
    told = [{"rank": rank, **account} for rank, account in enumerate(accounts)]
    error = error_of_accounts(decision, told, EpochEnd(2, 5, 0, hint), max_errors=8, own=None)
    assert type(error) is cls
    assert words in str(error)


def test_a_failure_asks_for_no_more_than_failures() -> None:
    assert decide(Report(flags=FAILED | STOPPED, skipped=9), 8).asks == FAILURES
