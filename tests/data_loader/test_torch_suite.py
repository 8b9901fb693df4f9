"""PyTorch's own tests of its DataLoader, with the class exchanged, where their file is at hand.

``TORCH_TEST_DATALOADER=test_dataloader.py pytest tests/data_loader/test_torch_suite.py``: the variable has the path of
the file ``test/test_dataloader.py`` of PyTorch's repository, which also needs ``expecttest``. Torch's own class is run
first: what fails with it says nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.data_loader.torch_suite.known import KNOWN

ROOT = Path(__file__).parents[2]


def outcomes(cls: str, *names: str) -> dict[str, str]:
    """How the tests of a file end with a class; all of them, if none is named."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TORCH_TEST_CLASS": cls, "PYTHONPATH": path}
    call = [sys.executable, "-m", "tests.data_loader.torch_suite.run", *names]
    run = subprocess.run(call, env=environment, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    found: dict[str, str] = json.loads(run.stdout)
    return found


def not_as_listed(torchs: Mapping[str, str], ours: Mapping[str, str], listed: Mapping[str, str]) -> dict[str, str]:
    """The tests that pass with torch's class, and fail though they are not listed, or pass though they are."""
    compared = {name: ours[name] for name, outcome in torchs.items() if outcome == "passed"}
    return {name: outcome for name, outcome in compared.items() if (outcome == "passed") is (name in listed)}


def test_torchs_own_tests_pass_but_for_those_listed() -> None:
    if "TORCH_TEST_DATALOADER" not in os.environ:
        pytest.skip("TORCH_TEST_DATALOADER is not set: the path of test/test_dataloader.py of PyTorch's repository")
    pytest.importorskip("expecttest", reason="torch.testing._internal imports expecttest")
    wrong = not_as_listed(outcomes("torch"), outcomes("torchdistinput"), KNOWN)
    if wrong:  # some of these tests measure time: both classes get a second chance
        wrong = not_as_listed(outcomes("torch", *wrong), outcomes("torchdistinput", *wrong), KNOWN)
    for name, outcome in wrong.items():
        sys.stderr.write(f"{name}, listed: {KNOWN.get(name, 'no')}\n{outcome}\n")
    assert not wrong, f"not as listed in tests/data_loader/torch_suite/known.py: {', '.join(wrong)}"
