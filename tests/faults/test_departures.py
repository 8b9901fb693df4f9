"""A rank that leaves, dies or fails is told at once where another rank is in its training code, and not in `next`."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

import torchdistinput as tdi
from tests.data import Numbers
from tests.support.interpreters import HANG_BOUND_SECONDS, Interpreters, own_output, printed
from tests.support.platforms import linux_processes
from tests.support.processes import run_to_the_end
from torchdistinput.coordination import launch
from torchdistinput.testing import run_ranks
from torchdistinput.testing.ranks import free_port

SCRIPT = """
import json, logging, os, pathlib, signal, sys, time, torch, torch.distributed as dist, torchdistinput as tdi
from torchdistinput.pipeline import engine
engine.GRACE_SECONDS = 0.5  # how long a rank is in its training code before it is told
how, steps, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
lines, warnings = [], []

def note(record):
    if "training code" in record.getMessage():
        lines.append(record.getMessage())
        warnings.append(record.levelname == "WARNING")
        (folder / f"{rank} was told").touch()

handler = logging.Handler()
handler.emit = note
logging.getLogger("torchdistinput").addHandler(handler)
others = [folder / f"{each} was told" for each in range(world - 1)]

def wait(enough, seconds=60.0):
    until = time.monotonic() + seconds
    while not enough() and time.monotonic() < until:
        time.sleep(0.02)

def leave():
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise ArithmeticError("of the training code")

strategy = tdi.Strategy(["cpu"])
loader = strategy.distribute_dataset([torch.ones(6, 1)] * steps)
model = torch.nn.Linear(1, 1)
model = torch.nn.parallel.DistributedDataParallel(model) if how == "ddp" else model
left = rank == world - 1 and how not in ("ends", "all leave")
ended = ""
try:
    for number, x in enumerate(loader):
        if number == 2 and left:
            leave()
            break
        if number == 2 and how == "all leave":
            break
        loss = model(x).sum()
        if number < 2:
            loss.backward()
        elif how == "ddp":
            loss.backward()  # until the other rank's process ends
        elif how == "ends":
            wait(lambda: lines, 1.5 if rank == 0 and number == steps - 1 else 0.0)
        else:
            wait(lambda: lines)
            wait(bool, 1.2)  # it is told once
    if how == "all leave" and rank == 0:
        wait(lambda: lines, 1.5)
except (ArithmeticError, RuntimeError, tdi.InputError) as error:
    ended = f"{type(error).__name__}: {error}"
if left:
    wait(lambda: all(each.exists() for each in others))
print(json.dumps([lines, all(warnings), ended]), flush=True)
if left and how == "ddp":
    os._exit(0)
"""


def told_by(interpreters: Interpreters, how: str, world: int, steps: int, folder: Path) -> list[tuple[list[str], str]]:
    """What each rank logs that lives, and how its loop ends; the last rank leaves at step 2."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    ended = interpreters.run_as_torchrun(world, str(script), how, str(steps), str(folder))
    found = []
    for each in ended[: world - 1 if how == "dies" else world]:
        assert each.code == 0, each.errors
        lines, warn, end = json.loads(own_output(each).splitlines()[-1])
        assert warn
        found.append((lines, end))
    return found


@linux_processes
@pytest.mark.parametrize(
    ("how", "world", "steps"),
    [
        ("leaves", 2, 100),
        ("leaves", 3, 100),
        ("leaves", 2, 5),  # all steps are agreed: no vote will tell of it
        ("ddp", 2, 100),
        ("fails", 2, 100),
        ("dies", 3, 100),
    ],
)
def test_who_is_in_the_training_code_is_told_who_left(
    interpreters: Interpreters, how: str, world: int, steps: int, tmp_path: Path
) -> None:
    what = "died or lost its connection" if how == "dies" else "stopped reading after step 2 of epoch 0"
    found = told_by(interpreters, how, world, steps, tmp_path)
    for lines, _ in found[: world - 1]:
        assert lines == [f"rank {world - 1} {what}; this rank is in its training code"]
    if steps == 100 and how != "ddp":
        assert all(f"rank {world - 1} {what}" in ended for _, ended in found[: world - 1])


@linux_processes
@pytest.mark.parametrize("how", ["ends", "all leave"])
def test_nobody_is_told_where_all_ranks_leave_or_come_to_the_end(
    interpreters: Interpreters, how: str, tmp_path: Path
) -> None:
    assert told_by(interpreters, how, 2, 5, tmp_path) == [([], "")] * 2


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

AT_THE_END = """
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
TERMINATED = "terminate called without an active exception\n"
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
    script.write_text(AT_THE_END + loop)
    for _ in range(5 if all_cells else 2):  # gloo's threads and the end of the interpreter race each other
        printed(interpreters.run_as_torchrun(2, str(script)))


def test_a_daemon_thread_that_reads_as_the_script_ends_says_nothing(interpreters: Interpreters, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(AT_THE_END + LOOP_OF_A_DAEMON)
    (ended,) = interpreters.run([str(script)])
    assert "Traceback" not in ended.errors, ended.errors  # triton tells of leaks of its own where a thread still runs
    # Who frees a tensor waits for the GIL inside of torch, and Python aborts where it ends a thread there: a plain
    # torch loader in such a thread does that, too.
    assert ended.code == 0 or (ended.code, ended.errors) == (-signal.SIGABRT, TERMINATED)


@linux_processes
def test_a_loader_worker_that_is_stopped_does_not_keep_a_script_from_its_end(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    """At its end Python terminates its children, and waits for them without a bound; a stopped one hears of nothing."""
    script = tmp_path / "script.py"
    script.write_text(AT_THE_END + STOPPED_WORKER)
    worker = printed(interpreters.run([str(script)]))
    assert not Path(f"/proc/{worker.strip()}").exists()


def test_torchrun_itself_sees_a_good_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(AT_THE_END + LOOP_LEFT_EARLY)
    with subprocess.Popen(
        [*TORCHRUN, str(script)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        try:
            _, errors = launcher.communicate(timeout=HANG_BOUND_SECONDS)
        except BaseException:
            os.killpg(launcher.pid, signal.SIGKILL)
            raise
    assert launcher.returncode == 0, errors


TIMEOUT_SECONDS = 4.0
SLACK_SECONDS = 60.0  # generous: a machine may be busy
LONG_SECONDS = 180.0


MANY = Numbers(10**6, each=lambda _: time.sleep(0.002))  # nobody comes to the end


# ---------------------------------------------------------------------------------------- a process that stands still

Moment = Callable[[int, "Stage"], None]


class Stage:
    """What a rank knows: a folder in which it tells the others where it is.

    Args:
      folder: of all ranks.
      rank: this one.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = Path(folder)
        self.rank = rank

    def stand_still(self) -> None:
        """For good: the test ends it."""
        self.tell("still", "")
        os.kill(os.getpid(), signal.SIGSTOP)

    def tell(self, name: str, text: str) -> None:
        partial = self.folder / f"{name}.part"
        partial.write_text(text)
        partial.rename(self.folder / name)

    def wait_for(self, name: str) -> None:
        until = time.monotonic() + LONG_SECONDS
        while not (self.folder / name).exists():
            assert time.monotonic() < until, f"{name!r} was never told; of the ranks {self.ends()}"
            time.sleep(0.02)

    def ends(self) -> dict[str, str]:
        """What the ranks told at their end."""
        return {each.name: each.read_text() for each in sorted(self.folder.glob("ended-?"))}


def in_the_middle(still: int, stage: Stage) -> None:
    strategy = tdi.Strategy(timeout_seconds=TIMEOUT_SECONDS)
    for number, _ in enumerate(strategy.distribute_dataset(DataLoader(MANY, batch_size=4))):
        if stage.rank == still and number == 20:
            stage.stand_still()


def before_iter(still: int, stage: Stage) -> None:
    strategy = tdi.Strategy(timeout_seconds=TIMEOUT_SECONDS)
    dataset = strategy.distribute_dataset(DataLoader(MANY, batch_size=4))
    if stage.rank == still:
        stage.stand_still()
    next(iter(dataset))


class StandsStill(Sampler[int]):
    """Where the ranks have agreed on an epoch, and are about to connect."""

    def __init__(self, stage: Stage, still: int) -> None:
        self._stage, self._still = stage, still

    def __iter__(self) -> Iterator[int]:
        if self._stage.rank == self._still:
            self._stage.stand_still()
        return iter(range(100))

    def __len__(self) -> int:
        return 100


def in_iter(still: int, stage: Stage) -> None:
    strategy = tdi.Strategy(timeout_seconds=TIMEOUT_SECONDS)
    loader = DataLoader(MANY, batch_size=4, sampler=StandsStill(stage, still), num_workers=1)
    for _ in strategy.distribute_dataset(loader):
        pass


def before_the_strategy(still: int, stage: Stage) -> None:
    if stage.rank == still:
        stage.stand_still()
    stage.wait_for("still")
    tdi.Strategy(timeout_seconds=TIMEOUT_SECONDS)


def at_the_end(still: int, stage: Stage) -> None:
    strategy = tdi.Strategy(timeout_seconds=TIMEOUT_SECONDS)
    iterator = iter(strategy.distribute_dataset(DataLoader(MANY, batch_size=4)))
    next(iterator)
    if stage.rank == still:
        stage.stand_still()
    stage.wait_for("still")
    iterator.close()
    strategy.gather(torch.zeros(2), axis=0)


MOMENTS: dict[str, Moment] = {
    "in the middle": in_the_middle,
    "before iter": before_iter,
    "in iter": in_iter,
    "before the strategy": before_the_strategy,
    "at the end": at_the_end,
}


def play(rank: int, world: int, port: int, folder: str, still: int, moment: str) -> None:
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    stage = Stage(folder, rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    stage.tell(f"joined-{rank}", "")  # torch's own rendezvous would wait for a rank that stands still
    for other in range(world):
        stage.wait_for(f"joined-{other}")
    try:
        MOMENTS[moment](still, stage)
        told = ["nothing", ""]
    except Exception as error:
        told = [type(error).__name__, str(error)]
    stage.tell(f"ended-{rank}", json.dumps(told))
    for other in {*range(world)} - {still}:  # with the first rank the store ends, which they need to tell who is late
        stage.wait_for(f"ended-{other}")
    os._exit(0)


WORLD = 3
CELLS = [(moment, still) for still in range(2) for moment in MOMENTS]
USUAL = [(moment, (number + 1) % 2) for number, moment in enumerate(MOMENTS)]
AT_ONCE = 5  # groups of ranks: they wait for the most part


class Group:
    """The ranks of one moment, of which one stands still.

    Args:
      folder: where they tell each other where they are.
      moment: the name of the moment.
      still: the rank that stands still.
    """

    def __init__(self, folder: Path, moment: str, still: int) -> None:
        context, port = multiprocessing.get_context("forkserver"), free_port()
        self.folder, self.still = folder, still
        self.ranks = [
            context.Process(target=play, args=(rank, WORLD, port, str(folder), still, moment)) for rank in range(WORLD)
        ]
        for process in self.ranks:
            process.start()

    def told(self) -> dict[int, list[Any]]:
        """What each of the others was told in time; nothing from a rank that hangs."""
        Stage(str(self.folder), -1).wait_for("still")
        began = time.time()
        found = {}
        for rank in set(range(WORLD)) - {self.still}:
            self.ranks[rank].join(max(0.0, began + TIMEOUT_SECONDS + SLACK_SECONDS - time.time()))
            if not self.ranks[rank].is_alive():
                found[rank] = json.loads((self.folder / f"ended-{rank}").read_text())
        return found

    def end(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, all_cells: bool) -> dict[tuple[str, int], dict[int, list[Any]]]:
    found, asked = {}, CELLS if all_cells else USUAL
    for first in range(0, len(asked), AT_ONCE):
        groups = {cell: Group(tmp_path_factory.mktemp("group"), *cell) for cell in asked[first : first + AT_ONCE]}
        try:
            found.update({cell: group.told() for cell, group in groups.items()})
        finally:
            for group in groups.values():
                group.end()
    return found


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system has no signal that stops a process")
@pytest.mark.parametrize(
    ("moment", "still"), [pytest.param(*cell, marks=[] if cell in USUAL else pytest.mark.long) for cell in CELLS]
)
def test_a_rank_that_stands_still_is_named_in_time(
    moment: str, still: int, told: dict[tuple[str, int], dict[int, list[Any]]]
) -> None:
    of_ranks = told[moment, still]
    assert set(of_ranks) == set(range(WORLD)) - {still}, "a rank hangs"
    for kind, text in of_ranks.values():
        assert kind in ("CoordinationTimeout", "RankLost"), (kind, text)
        if (moment, still) == ("before the strategy", 0):
            assert "the store at 127.0.0.1 did not answer" in text or f"rank {still}" in text
        else:
            assert f"rank {still}" in text, text


# ------------------------------------------------------------------------------- between the agreement and the channel


class Ends(Sampler[int]):
    """On one rank the epoch cannot begin."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __iter__(self) -> Iterator[int]:
        if dist.get_rank() == 1:
            if self._how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt
        return iter(range(100))

    def __len__(self) -> int:
        return 100


def interrupted(rank: int, world: int, folder: str, how: str) -> None:
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    strategy = tdi.Strategy(timeout_seconds=LONG_SECONDS)
    loader = strategy.distribute_dataset(DataLoader(Numbers(100), batch_size=4, sampler=Ends(how), num_workers=1))
    told = ["nothing", ""]
    try:
        for _ in loader:
            pass
    except BaseException as error:
        told = [type(error).__name__, str(error)]
    Stage(folder, rank).tell(f"{rank}.json", json.dumps(told))
    if rank == 1:  # it is still alive when the others hear of it
        for other in {*range(world)} - {1}:
            Stage(folder, rank).wait_for(f"{other}.json")
    os._exit(0)


@pytest.mark.parametrize("how", ["SIGKILL", "KeyboardInterrupt"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_ends_inside_iter_releases_the_others_at_once(how: str, world: int, tmp_path: Path) -> None:
    run_to_the_end(interrupted, [(rank, world, str(tmp_path), how) for rank in range(world)], LONG_SECONDS / 2)
    for rank in set(range(world)) - {1}:
        kind, text = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kind == "RankLost"
        assert "rank 1 " in text
        assert ("died or lost" if how == "SIGKILL" else "KeyboardInterrupt") in text


def again_after_an_interrupt() -> list[Any]:
    """An interruption inside ``iter`` ends that epoch, not the strategy."""
    strategy = tdi.Strategy(timeout_seconds=60)
    sampler = Ends("KeyboardInterrupt")
    loader = strategy.distribute_dataset(DataLoader(Numbers(100), batch_size=10, sampler=sampler))
    found: list[Any] = []
    try:
        found += [int(x[0]) for x in loader]
    except BaseException as error:
        found.append(type(error).__name__)
    other = strategy.distribute_dataset(DataLoader(Numbers(20), batch_size=10))
    return [*found, [x.tolist() for x in other]]


def test_after_an_interruption_inside_iter_the_ranks_can_go_on() -> None:
    for rank, (error, batches) in enumerate(run_ranks(3, again_after_an_interrupt)):
        assert error == ("KeyboardInterrupt" if rank == 1 else "RankLost")
        assert sum(len(batch) for batch in batches) in (8, 4)


# -------------------------------------------------------------------------------------------------- the store is gone


def host_a_store(port: int) -> None:
    store = cast(Any, dist).TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    time.sleep(LONG_SECONDS)
    del store


def without_a_store(port: int, host: int) -> tuple[list[int], str, str]:
    """Iterators are opened, tensors gathered, and another strategy made after the store has ended.

    Where another default group is made, its ranks have to meet.
    """
    store = cast(Any, dist).TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    strategy = tdi.Strategy(timeout_seconds=30)
    strategy.reduce("SUM", torch.tensor(1.0))
    if rank == 0:
        os.kill(host, signal.SIGKILL)
    strategy.reduce("SUM", torch.tensor(1.0))
    loaders = [strategy.distribute_dataset(DataLoader(Numbers(40), batch_size=4)) for _ in range(3)]
    alive = [iter(loader) for loader in loaders]
    found = [int(strategy.reduce("SUM", float(sum(len(x) for x in each)))) for each in alive]
    assert tdi.Strategy(timeout_seconds=30).world_size == world
    began = time.monotonic()
    told = ""
    try:
        launch._MET.clear()
        tdi.Strategy(timeout_seconds=2)
    except tdi.InputError as error:
        told = str(error)
    return found, told, "in time" if time.monotonic() - began < 2 + SLACK_SECONDS else "late"


def test_a_strategy_lives_on_without_its_store() -> None:
    port = free_port()
    host = multiprocessing.get_context("forkserver").Process(target=host_a_store, args=(port,))
    host.start()
    try:
        for found, told, when in run_ranks(3, without_a_store, port, host.pid, init_group=False, timeout_seconds=80):
            assert found == [40, 40, 40]
            assert "the store" in told
            assert "is gone" in told
            assert when == "in time"
    finally:
        host.kill()
        host.join()
