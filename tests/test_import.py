"""What `import torchdistinput` loads, in an interpreter that has only torch.

A rule of the house, for one reason: each process of a job, and each loader worker that is not forked, pays for the
import. What only some programs use (files but for their description, dataset functions, ordered predictions) is
imported in the function that first needs it, on the thread of the caller, and nothing that torch itself did not load
comes from outside of the house.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.interpreters import ROOT

LATER = {
    "torchdistinput.coordination.gather_ordered",
    "torchdistinput.sources.from_function",
    "torchdistinput.sources.formats.npy",
    "torchdistinput.sources.formats.text",
    "torchdistinput.sources.formats.tfrecords",
    "torchdistinput.sources.formats.fixed_length",
    "torchdistinput.sources.formats.readers",
    "torchdistinput.sources.datasets.record_position",
    "torchdistinput.sources.datasets.record_rows",
    "torchdistinput.sources.datasets.record_source",
    "torchdistinput.preprocessing",
    "torchdistinput.testing",
}

SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import torchdistinput as tdi
loaded = sorted(set(sys.modules) - before)
shown, has_readers = dir(tdi), "readers" in vars(tdi)
from torchdistinput import readers
from torchdistinput import *
dataset = FileDataset("no such file", tdi.readers.text_lines, compression="gzip")
try:
    FileDataset("no such file", tdi.readers.text_lines, compression="no such method")
except ValueError as error:
    refused = str(error)
print(json.dumps({
    "loaded": loaded, "shown": shown, "has_readers": has_readers, "same": readers is tdi.readers is sys.modules[
        "torchdistinput.sources.formats.readers"], "refused": refused, "public": tdi.__all__,
}))
"""


@pytest.fixture(scope="module")
def told() -> Mapping[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def own(modules: Sequence[str]) -> set[str]:
    return {name for name in modules if name.split(".")[0] == "torchdistinput"}


def test_what_only_some_programs_use_is_loaded_when_they_use_it(told: Mapping[str, Any]) -> None:
    assert not own(told["loaded"]) & LATER
    assert {"torchdistinput.strategy", "torchdistinput.sources.datasets.fragment_dataset"} <= own(told["loaded"])


def test_nothing_from_outside_is_loaded_that_torch_had_not_loaded(told: Mapping[str, Any]) -> None:
    outside = {name.split(".")[0] for name in told["loaded"]} - {"torchdistinput"} - set(sys.stdlib_module_names)
    assert {name for name in outside if "cython" not in name} <= {"torch", "numpy"}  # numpy.random brings Cython's own


def test_a_bad_compression_is_refused_at_once_though_fsspec_comes_later(told: Mapping[str, Any]) -> None:
    assert told["refused"].startswith("compression must be 'infer', None or one of")
