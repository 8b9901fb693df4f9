"""The end of a real interpreter, as torchrun sees it; ``run_ranks`` ends its processes in another way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_examples import TORCHRUN, output_of

SCRIPT = """
import torch
import torchdistinput as tdi
strategy = tdi.Strategy(devices=["cpu"])
"""
LOOP_LEFT_EARLY = """
iterator = iter(strategy.distribute_dataset([torch.arange(3)] * 9))
next(iterator)
"""


@pytest.mark.parametrize("attempt", range(4))  # gloo's threads and the end of the interpreter race each other
def test_a_script_may_end_at_once(attempt: int, tmp_path: Path) -> None:
    script = tmp_path / f"script{attempt}.py"
    script.write_text(SCRIPT)
    output_of(*TORCHRUN, str(script))


def test_a_script_may_end_in_the_middle_of_a_loop(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + LOOP_LEFT_EARLY)
    output_of(*TORCHRUN, str(script))
