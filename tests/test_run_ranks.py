"""``run_ranks`` itself: results in order, failures at once and by name, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from tests.data import Numbers
from tests.support.launched import at_once
from tests.support.platforms import linux_processes
from tests.support.waiting import wait_for
from torchdistinput.testing import RankFailed, run_ranks

HANG_BOUND_SECONDS = 100.0


def sum_over_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total


def rank_one_raises_while_the_other_waits() -> None:
    if dist.get_rank() == 1:
        raise LookupError("the shelf is empty")
    dist.all_reduce(torch.zeros(1))


def rank_one_hangs_in_its_sleep() -> None:
    if dist.get_rank() == 1:
        time.sleep(HANG_BOUND_SECONDS)


def a_loader_worker_hangs_in_its_sleep() -> None:
    next(iter(DataLoader(Numbers(1, each=lambda _: time.sleep(HANG_BOUND_SECONDS)), num_workers=1)))


def rank_one_is_killed_while_the_others_wait() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def an_exception_that_cannot_be_pickled() -> None:
    class Local(Exception):
        pass

    raise Local("made in a function")


def rank_one_fails_while_the_other_has_a_worker(folder: str) -> None:
    note = Path(folder, "pids")
    if dist.get_rank() == 0:
        iterator = iter(DataLoader(TensorDataset(torch.arange(1000)), num_workers=1))
        next(iterator)
        write_at_once(note, [os.getpid(), *(child.pid for child in multiprocessing.active_children())])
        time.sleep(HANG_BOUND_SECONDS)
    wait_for(note.exists)
    raise ValueError("enough")


def wait_to_be_interrupted(folder: str) -> None:
    write_at_once(Path(folder, os.environ["RANK"]), [os.getpid()])
    time.sleep(4 * HANG_BOUND_SECONDS)


def write_at_once(note: Path, pids: Sequence[int | None]) -> None:
    draft = note.with_suffix(".draft")
    draft.write_text(" ".join(map(str, pids)))
    draft.rename(note)


def process_is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")  # a dead process stays in the table until its parent has looked
    return state.exists() and ") Z " in state.read_text()


def test_results_come_back_in_the_order_of_the_ranks() -> None:
    results = run_ranks(3, sum_over_ranks, 1)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(total.item() == 6 for _, total in results)


def test_a_failing_rank_is_reported_while_its_peer_still_waits() -> None:
    with pytest.raises(RankFailed, match="(?s)rank 1 failed.*rank_one_raises.*the shelf is empty") as failure:
        run_ranks(2, rank_one_raises_while_the_other_waits, timeout_seconds=HANG_BOUND_SECONDS)
    assert failure.value.rank == 1
    assert isinstance(failure.value.__cause__, LookupError)


def test_an_exception_that_cannot_be_pickled_arrives_as_text() -> None:
    with pytest.raises(RankFailed, match="made in a function"):
        run_ranks(1, an_exception_that_cannot_be_pickled)


def failed(ranks: int, hangs: Callable[[], object]) -> RankFailed:
    with pytest.raises(RankFailed) as failure:
        run_ranks(ranks, hangs, timeout_seconds=12.0)
    return failure.value


@pytest.fixture(scope="module")
def hanging() -> dict[str, RankFailed]:
    return at_once(
        {
            "rank": partial(failed, 2, rank_one_hangs_in_its_sleep),
            "loader worker": partial(failed, 1, a_loader_worker_hangs_in_its_sleep),
        }
    )


@linux_processes
def test_a_hanging_loader_worker_shows_its_stack_too(hanging: dict[str, RankFailed]) -> None:
    told = str(hanging["loader worker"])
    assert re.search(r"(?s)in a_loader_worker_hangs.*process \d+:.*line \d+ in __getitem__", told), told


def test_a_hanging_rank_is_named_with_its_stack(hanging: dict[str, RankFailed]) -> None:
    told = str(hanging["rank"])
    assert re.search("(?s)rank.s. 1 had not finished.*in rank_one_hangs_in_its_sleep", told), told
    assert hanging["rank"].ranks == (1,)


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL before it gave a result") as failure:
        run_ranks(3, rank_one_is_killed_while_the_others_wait, timeout_seconds=HANG_BOUND_SECONDS)
    assert failure.value.ranks == (1,)


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(2, lambda: None)


def test_a_failure_takes_the_loader_workers_of_the_other_ranks_along(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="enough"):
        run_ranks(2, rank_one_fails_while_the_other_has_a_worker, str(tmp_path), timeout_seconds=HANG_BOUND_SECONDS)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: all(map(process_is_gone, pids)))


def test_an_interrupt_leaves_no_rank_behind(tmp_path: Path) -> None:
    command = f"from tests.test_run_ranks import *; run_ranks(2, wait_to_be_interrupted, {str(tmp_path)!r})"
    root = Path(__file__).parents[1]
    parent = subprocess.Popen([sys.executable, "-c", command], cwd=root, stderr=subprocess.PIPE, text=True)
    notes = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_for(lambda: all(note.exists() for note in notes))
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=HANG_BOUND_SECONDS)
        assert "KeyboardInterrupt" in errors
        pids = [int(note.read_text()) for note in notes]
        wait_for(lambda: all(map(process_is_gone, pids)))
    except BaseException:
        end_all(parent, notes)
        raise


def end_all(parent: subprocess.Popen[str], notes: Sequence[Path]) -> None:
    """Ends a parent and its ranks, also those that have not noted their number yet: a parent that may ends these."""
    parent.send_signal(signal.SIGINT)
    try:
        parent.communicate(timeout=HANG_BOUND_SECONDS)
    except subprocess.TimeoutExpired:
        parent.kill()
        parent.communicate()
    for note in notes:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(note.read_text()), signal.SIGKILL)


NOTEBOOK = """
from functools import partial
from torchdistinput.testing import run_ranks
def fn(*_): pass
class Kept: pass
for call in ((fn,), (partial(fn, 1),), (print, Kept)):
    try:
        run_ranks(2, *call)
    except TypeError as error:
        print(error)
"""


def test_what_was_written_in_a_notebook_is_refused_with_the_way_out() -> None:
    """As in a notebook, ``__main__`` is no file here."""
    found = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.count("Put it into a module") == 3
