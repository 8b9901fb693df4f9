"""``tdi.Packed``: how fast packs are planned from lengths, and how many places stay empty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benches.model import Column, Contender, Measured, Table, Target, largest, rate
from benches.timing import seconds_of
from torchdistinput.plan.packing import PackingStrategy, pack_window

__all__ = ["tables"]

RATE, PADDING = "million samples a second", "empty places, %"
MAX_LENGTH = 2048


def planned(count: int, window: int, strategy: PackingStrategy) -> Measured:
    """Lengths of a lognormal law, window by window."""
    drawn = np.random.default_rng(0).lognormal(5.5, 1, count).astype(np.int64) + 1
    lengths = np.minimum(drawn, MAX_LENGTH)
    packs = 0

    def plan() -> None:
        nonlocal packs
        for start in range(0, count, window):
            packs += len(pack_window(lengths[start : start + window], start, MAX_LENGTH, strategy, "error").packs)

    seconds = seconds_of(plan)
    empty = 100 * (1 - int(lengths.sum()) / (packs * MAX_LENGTH))
    return {"samples": count / 1e6, "seconds": seconds, "empty": empty}


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Each strategy with a small window, and best fit with larger ones."""
    del folder
    count = 5_000 if small else 200_000
    cases: list[tuple[PackingStrategy, int]] = [("first_fit", 1024), ("concat", 1024)]
    cases += [("best_fit", window) for window in (1024, 4096, 65_536)]
    contenders = tuple(
        Contender(f"{strategy}, window of {window:,}", "ours", planned, (count, window, strategy))
        for strategy, window in cases
    )
    columns = (Column(RATE, "more", rate("samples", "seconds")), Column(PADDING, "less", largest("empty")))
    target = Target(RATE, "best_fit, window of 4,096", 1.0)
    return [Table(f"Packs of {MAX_LENGTH:,} tokens", columns, contenders, 1, 1 if small else 3, (target,))]
