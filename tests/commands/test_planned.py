"""``explain`` and ``samples`` from a shell: the loader of N ranks is made in one process, and nothing is read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import torchdistinput.commands.target
from torchdistinput.__main__ import main

TRAIN = """
import sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
import torchdistinput as tdi
from torchdistinput.testing import run_ranks

DATA = TensorDataset(torch.arange(100))

def make_loader():
    print("made")
    torch.manual_seed(3)
    strategy = tdi.Strategy()
    assert strategy.world_size == strategy.num_input_pipelines
    size = 4 * strategy.num_replicas_in_sync
    return strategy, strategy.distribute_dataset(DataLoader(DATA, batch_size=size, shuffle=True))

def drop_in():
    return {"train": tdi.DataLoader(DATA, batch_size=8), "more": 1}

def iterates():
    for batch in drop_in()["train"]:
        pass

def starts_ranks():
    return run_ranks(2, drop_in)

def joins_a_group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return drop_in()

def of_torch():
    return DataLoader(DATA)

def two():
    return [tdi.DataLoader(DATA), tdi.DataLoader(DATA)]

def wants(strategy):
    return None

async def later():
    return drop_in()

def ends():
    sys.exit("no data")

def hangs():
    until = time.monotonic() + 20
    while "hangs has not returned" not in sys.stderr.getvalue():
        assert time.monotonic() < until
    return drop_in()

number = 3
"""
RAISES = """import os
os.makedirs("/proc/nothing/here")
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("RANK", "5")  # of a launcher that started this shell: there is no rank here
    monkeypatch.setenv("WORLD_SIZE", "7")
    file = tmp_path / "train_here.py"
    file.write_text(TRAIN)
    (tmp_path / "raises_here.py").write_text(RAISES)
    (tmp_path / "wrong_here.py").write_text("def make(:")
    return file


def test_the_samples_of_a_step_on_ranks_that_are_not_started(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{train}:make_loader"
    for world in (1, 2, 8):
        arguments = ["samples", target, "--epoch", "3", "--step", "2", "--world-size", str(world), "--json"]
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert err == "made\n"
        told = json.loads(out)
        assert (told["world_size"], told["global_size"]) == (world, 4 * world)
        assert [part["rank"] for part in told["parts"]] == [*range(world)]
        assert len({index for part in told["parts"] for index in part["samples"]}) == 4 * world
    assert main(["samples", target, "--step", "0", "--world-size", "2", "--rank", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = int(lines[1].rpartition(", ")[2])
    assert main(["samples", target, "--sample", str(found), "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [{"step": 0, "rank": 1, "replica": 1}]
    assert main(["samples", target, "--sample", str(found), "--world-size", "2"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [f"Epoch 0, on 2 rank(s): sample {found} comes in 1 step(s).", "  step 0: rank 1"]
    assert told[2:] == lines[2:]
    assert main(["samples", target, "--sample", str(found), "--world-size", "2", "--rank", "0"]) == 0
    assert f"sample {found} comes in no step of rank 0." in capsys.readouterr().out
    assert lines[0] == "Epoch 0, step 0 of 13, on 2 rank(s): 8 samples."
    assert lines[1].startswith("  rank 1: ")
    assert "drawn again" in lines[2]


def test_the_plan_from_a_shell(
    train: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDISTINPUT_TRACE", str(train.parent / "traces"))  # a plan is no run, and leaves no trace
    assert main(["explain", f"{train}:drop_in", "--world-size", "4"]) == 0
    assert "Ranks:       4" in capsys.readouterr().out
    assert main(["explain", f"{train}:make_loader", "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 13
    command = [sys.executable, "-m", "torchdistinput", "explain", "train_here:drop_in"]
    done = subprocess.run(command, cwd=train.parent, capture_output=True, text=True, check=True, timeout=120)
    assert "13 steps, 100 samples" in done.stdout
    assert not (train.parent / "traces").exists()


BAD = {
    ":make_loader": "FILE.py:FUNCTION is needed",
    "nothing.py:make_loader": "there is no file nothing.py",
    "nothing_here:make_loader": "nothing_here is no .py file, and there is no module of that name",
    "data/part-00.txt:x": "part-00.txt is no .py file, and there is no module",
    "{train.parent}:x": "is no .py file, and there is no module",
    "no_package.here:x": "importing no_package.here raised ModuleNotFoundError: No module named 'no_package'. This",
    "{train.parent}/raises_here.py:x": r"^\S+ samples: importing \S+ raised FileNotF.* .line 2 of \S+raises_here.py.",
    "{train.parent}/wrong_here.py:x": r"importing \S+wrong_here.py raised SyntaxError: .*wrong_here.py, line 1.. This",
    "{train}:later": "returned no loader, but coroutine",
    "{train}:nothing": "has no nothing; it has drop_in,",
    "{train}:number": "returned no loader, but int",
    "{train}:of_torch": "Nothing divides torch's own DataLoader",
    "{train}:two": "returned 2 loaders",
    "{train}:wants": "raised TypeError: wants.. missing 1 required",
    "{train}:ends": "raised SystemExit: no data",
    "{train}:iterates": "only planned, for 2 rank",
    "{train}:starts_ranks": "run_ranks.2, .... was called, and the plan of a loader is made without ranks",
    "{train}:joins_a_group": "a process group was initialised, and the plan",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("target", BAD)
def test_a_target_without_a_loader_is_refused(target: str, train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["samples", target.format(train=train), "--step", "0", "--world-size", "2"])
    if dist.is_initialized():
        dist.destroy_process_group()
    err = capsys.readouterr().err
    assert status == 1
    assert re.search(BAD[target], err), err
    assert err.startswith("torchdistinput samples: ")


def test_a_target_that_hangs_is_spoken_of(
    train: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchdistinput.commands.target, "_NOTE_SECONDS", 0.01)
    assert main(["explain", f"{train}:hangs"]) == 0
    assert "it waits for ranks that are not started here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--step", "13", "--world-size", "2"], "step is 13, and epoch 0 has 13 step"),
        (["--step", "0", "--epoch", "-1"], "epoch is -1"),
        (["--step", "0", "--rank", "1"], "rank is 1, and there are 1"),
        (["--step", "0", "--world-size", "0"], "--world-size is 0"),
        (["--sample", "100"], "found the sample 100; an index from 0 to 99"),
        (["--sample", "part:3"], "found the sample ('part', 3)"),
        (["--sample", "part:x"], "'part:x' is neither an index nor NAME:NUMBER"),
    ],
)
def test_a_step_that_is_not_there_is_refused(
    more: list[str], message: str, train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["samples", f"{train}:{'drop_in' if '--sample' in more else 'make_loader'}", *more])
    except SystemExit:  # of argparse
        status = 1
    assert status == 1
    assert message in capsys.readouterr().err
