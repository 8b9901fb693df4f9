"""``scripts/simulate.py``: its schedule sums what all ranks say, waits for whom it must, and its tables can be read."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "simulate.py"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 12, 31, 64])
def test_every_rank_gets_the_sums_in_logarithmically_many_rounds(ranks: int) -> None:
    words = np.random.default_rng(ranks).integers(-(2**62), 2**62, (ranks, 5))
    came = np.zeros(ranks)
    came[ranks // 2] = 7.0
    sums, now, rounds = SCRIPT["doubling"](words, came, np.ones)
    assert (sums == words.sum(axis=0)).all()
    whole = ranks & (ranks - 1) == 0
    assert rounds == ranks.bit_length() - 1 + (0 if whole else 2)
    assert ((now >= 7.0) & (now <= 7.0 + rounds)).all()  # everyone waits for the late one, and for no more than rounds


def test_the_tables_come_for_the_worlds_that_are_asked_for(tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "found.json"
    found = SCRIPT["main"](["--worlds", "8", "12", "--json", str(place)])
    assert json.loads(place.read_text()) == found
    exchange, plan = found.values()
    assert [(row["W"], row["rounds"]) for row in exchange] == [(8, 3), (12, 5)]
    assert {row["W"] for row in plan} == {8, 12}
    told = capsys.readouterr().out
    assert all(policy in told for policy in ("DATA", "FILE", "HINT", "OFF"))
