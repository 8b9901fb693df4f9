"""Each example, started as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HANG_BOUND_SECONDS = 120.0

PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

GUIDE = """
range(6) in global batches of 4 over 2 replicas
  step 0   replica 0: [0, 1]   replica 1: [2, 3]
  step 1   replica 0: [4]   replica 1: [5]

range(4) in global batches of 4 over 5 replicas
  step 0   replica 0: [0]   replica 1: [1]   replica 2: [2]   replica 3: [3]   replica 4: []

range(8) in global batches of 4 over 3 replicas
  step 0   replica 0: [0, 1]   replica 1: [2, 3]   replica 2: []
  step 1   replica 0: [4, 5]   replica 1: [6, 7]   replica 2: []

range(9) in global batches of 4 over 4 replicas
  step 0   replica 0: [0]   replica 1: [1]   replica 2: [2]   replica 3: [3]
  step 1   replica 0: [4]   replica 1: [5]   replica 2: [6]   replica 3: [7]
  step 2   replica 0: [8]   replica 1: []   replica 2: []   replica 3: []

range(9) in global batches of 4 over 2 replicas
  step 0   replica 0: [0, 1]   replica 1: [2, 3]
  step 1   replica 0: [4, 5]   replica 1: [6, 7]
  step 2   replica 0: [8]   replica 1: []

FILE: file(s) of 6 and 6 lines in global batches of 4 over 2 workers
  step 0   replica 0: [0, 1]   replica 1: [6, 7]
  step 1   replica 0: [2, 3]   replica 1: [8, 9]
  step 2   replica 0: [4]   replica 1: [10]
  step 3   replica 0: [5]   replica 1: [11]

DATA: file(s) of 12 lines in global batches of 4 over 2 workers
  step 0   replica 0: [0, 1]   replica 1: [2, 3]
  step 1   replica 0: [4, 5]   replica 1: [6, 7]
  step 2   replica 0: [8, 9]   replica 1: [10, 11]

OFF: file(s) of 12 lines in global batches of 4 over 2 workers
  step 0   replica 0: [0, 1]   replica 1: [0, 1]
  step 1   replica 0: [2, 3]   replica 1: [2, 3]
  step 2   replica 0: [4, 5]   replica 1: [4, 5]
  step 3   replica 0: [6, 7]   replica 1: [6, 7]
  step 4   replica 0: [8, 9]   replica 1: [8, 9]
  step 5   replica 0: [10, 11]   replica 1: [10, 11]

FILE: file(s) of 5 and 2 lines in global batches of 4 over 2 workers
  step 0   replica 0: [0, 1]   replica 1: [5]
  step 1   replica 0: [2, 3]   replica 1: [6]
  step 2   replica 0: [4]   replica 1: []

FILE: one file over 2 workers
  worker 0 raises ShardingError
  worker 1 raises ShardingError

list_files, shuffled by a seed: equal on both workers True, complete True

a dataset function: range(9), every second number, global batches of 4 over 2 workers
  step 0   replica 0: [0, 2]   replica 1: [1, 3]
  step 1   replica 0: [4, 6]   replica 1: [5, 7]
  step 2   replica 0: [8]   replica 1: []

predictions by index: [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101, 111, 121, 131, 141, 151, 161, 171, 181, 191, 201, \
211, 221, 231]

get_next_as_optional: at most 5 steps over range(9), doubled
  step 0   replica 0: [0, 2]   replica 1: [4, 6]
  step 1   replica 0: [8, 10]   replica 1: [12, 14]
  step 2   replica 0: [16]   replica 1: []

element_spec over 1 replica(s): TensorSpec(shape=(None,), dtype=torch.int64, name=None)

element_spec over 2 replica(s): PerReplica(
  0: TensorSpec(shape=(None,), dtype=torch.int64, name=None),
  1: TensorSpec(shape=(None,), dtype=torch.int64, name=None),
)

values from a function, plus one: [1, 11, 21]

three steps of an endless generator over 4 replicas
  step 0   replica 0: [0]   replica 1: [1]   replica 2: [2]   replica 3: [3]
  step 1   replica 0: [4]   replica 1: [5]   replica 2: [6]   replica 3: [7]
  step 2   replica 0: [8]   replica 1: [9]   replica 2: [10]   replica 3: [11]
"""


def output_of(*command: str) -> str:
    """Runs a command from the top folder; a hang takes every process that it started down with it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=HANG_BOUND_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}:\n{output}\n{errors}"
    return output


def test_the_guide_prints_the_tables_of_the_guide() -> None:
    assert output_of(*PYTHON, "examples/guide.py") == GUIDE


def test_the_main_job_learns_and_delivers_each_record_once_in_any_number_of_processes() -> None:
    for launcher in (PYTHON, TORCHRUN):
        output = output_of(*launcher, "examples/train_text.py", "--files", "45", "--report-every", "20")
        losses = [float(loss) for loss in re.findall(r"loss (\S+) bits per byte", output)]
        assert len(losses) > 3, output
        assert losses[-1] < 0.7 * losses[0], output
        assert "each record was delivered exactly once" in output


def test_preprocessing_is_the_same_in_one_process_and_in_two() -> None:
    alone = output_of(*PYTHON, "examples/preprocessing.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+) over 80 reviews", alone)]
    assert len(losses) == 5
    assert losses[-1] < 0.5 * losses[0]
    assert output_of(*TORCHRUN, "examples/preprocessing.py") == alone


def test_the_evaluation_gives_exactly_the_metrics_of_one_process_in_any_number() -> None:
    alone = output_of(*PYTHON, "examples/evaluate.py")
    assert "1003 points, each once" in alone
    assert re.search(r"accuracy    9\d\d of 1003\nmedian loss 0\.\d+\nmean loss   0\.\d+\n", alone), alone
    for count in ("2", "3"):
        assert output_of(*TORCHRUN[:-1], count, "examples/evaluate.py") == alone
