"""The end of a real interpreter, as torchrun sees it; ``run_ranks`` ends its processes in another way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.interpreters import HANG_BOUND_SECONDS, Interpreters, printed
from tests.support.platforms import linux_processes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

SCRIPT = """
import torch
import torchdistinput as tdi
strategy = tdi.Strategy(devices=["cpu"])
"""
LOOP_LEFT_EARLY = """
iterator = iter(strategy.distribute_dataset([torch.arange(3)] * 9))
next(iterator)
"""
LOOP_OF_A_DAEMON = """
import threading, time
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, index): time.sleep(0.01); return index
begun = [threading.Event(), threading.Event()]
def read(loader, event):
    for _ in loader: event.set()
for event, workers in zip(begun, (0, 1)):
    threading.Thread(target=read, args=(tdi.DataLoader(Slow(), num_workers=workers), event), daemon=True).start()
for event in begun: event.wait()
"""
STOPPED_WORKER = """
import multiprocessing, os, signal
from torch.utils.data import DataLoader
loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
kept = strategy.distribute_dataset(loader)
assert len(list(kept)) == 4
(worker,) = multiprocessing.active_children()
os.kill(worker.pid, signal.SIGSTOP)
print(worker.pid)
"""


@pytest.mark.parametrize("loop", ["", LOOP_LEFT_EARLY], ids=["at once", "in the middle of a loop"])
def test_a_script_may_end(loop: str, interpreters: Interpreters, tmp_path: Path, all_cells: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + loop)
    for _ in range(5 if all_cells else 2):  # gloo's threads and the end of the interpreter race each other
        printed(interpreters.run_as_torchrun(2, str(script)))


def test_a_daemon_thread_that_reads_as_the_script_ends_says_nothing(interpreters: Interpreters, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + LOOP_OF_A_DAEMON)
    (ended,) = interpreters.run([str(script)])
    assert ended.code == 0
    assert "Traceback" not in ended.errors, ended.errors  # triton tells of leaks of its own where a thread still runs


@linux_processes
def test_a_loader_worker_that_is_stopped_does_not_keep_a_script_from_its_end(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    """At its end Python terminates its children, and waits for them without a bound; a stopped one hears of nothing."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + STOPPED_WORKER)
    worker = printed(interpreters.run([str(script)]))
    assert not Path(f"/proc/{worker.strip()}").exists()


def test_torchrun_itself_sees_a_good_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + LOOP_LEFT_EARLY)
    with subprocess.Popen(
        [*TORCHRUN, str(script)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        try:
            _, errors = launcher.communicate(timeout=HANG_BOUND_SECONDS)
        except BaseException:
            os.killpg(launcher.pid, signal.SIGKILL)
            raise
    assert launcher.returncode == 0, errors
