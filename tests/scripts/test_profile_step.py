"""``scripts/profile_step.py`` measures every part that it names, in one process and over ranks."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

from torchdistinput.testing import run_ranks

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "profile_step.py"))


def test_the_parts_of_a_step_are_measured_and_printed(tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "found.json"
    found = SCRIPT["main"](["--steps", "100", "--ranks", "1", "--json", str(place)])
    assert json.loads(place.read_text()) == found
    told = capsys.readouterr().out
    assert len(found) == 2
    for parts in found.values():
        assert all(figure > 0 for figure in parts.values())
        assert all(name in told for name in parts)


def rank_sees(prefetch: int) -> dict[str, float]:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "profile_step.py"))
    found: dict[str, float] = script["one_rank"](40, 0.0001, prefetch)
    return found


def test_what_a_rank_sees_has_its_votes_and_its_read_ahead() -> None:
    for found in run_ranks(2, rank_sees, 3):
        assert found["steps read ahead at the end"] == 3
        assert 0 < found["votes a step"] <= 1.2
        assert found["next(), p50"] <= found["next(), p95"]
