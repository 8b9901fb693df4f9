"""A rank that leaves, dies or fails is told at once where another rank is in its training code, and not in `next`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.interpreters import Interpreters, own_output
from tests.support.platforms import linux_processes

pytestmark = linux_processes

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


@pytest.mark.parametrize("how", ["ends", "all leave"])
def test_nobody_is_told_where_all_ranks_leave_or_come_to_the_end(
    interpreters: Interpreters, how: str, tmp_path: Path
) -> None:
    assert told_by(interpreters, how, 2, 5, tmp_path) == [([], "")] * 2
