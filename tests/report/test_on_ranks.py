"""The report and the merged trace of real ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import final

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.report.test_chrome import check_form, merged
from torchdistinput.__main__ import main
from torchdistinput.testing import run_ranks

WORLD, STEPS, SLOW = 3, 40, 2


@final
class Samples:
    """Two samples a step and rank; one of eight steps is slow on a rank."""

    def __len__(self) -> int:
        return 2 * WORLD * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        step, place = divmod(index, 2 * WORLD)
        if place == 2 * SLOW and step >= STEPS - 8:
            time.sleep(0.05)
        return torch.tensor([index])


def run(folder: str, workers: int) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    loader: DataLoader[torch.Tensor] = DataLoader(Samples(), 2 * WORLD, num_workers=workers)  # type: ignore[arg-type]
    for _ in strategy.distribute_dataset(loader, tdi.InputOptions(trace=folder, prefetch=2)):
        time.sleep(0.002)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_report_names_the_rank_and_the_stage_that_made_others_wait(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(WORLD, run, str(tmp_path), workers)
    assert main(["report", str(tmp_path), "--json", "--html", str(tmp_path / "report.html")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["notes"] == []
    late = told["ranks"][SLOW]["times"]
    assert max(late["late_in"], key=lambda stage: late["late_in"][stage]) == "getitem"
    assert late["made_wait"] == max(rank["times"]["made_wait"] for rank in told["ranks"])
    assert late["made_wait"] > 0.1
    assert max(late["files"], key=lambda name: late["files"][name]).startswith("index ")
    assert [rank["steps"] for rank in told["ranks"]] == [STEPS] * WORLD
    assert sum(rank["samples"] for rank in told["ranks"]) == 2 * WORLD * STEPS
    trace = merged(tmp_path)
    check_form(trace)
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert any(event["pid"] == 100_000 + SLOW for event in arrows)
