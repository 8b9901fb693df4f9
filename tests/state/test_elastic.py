"""torchrun's elasticity: processes are killed, restarted, and started again in another number; nothing is lost."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.interpreters import ROOT, Interpreters

NUM_POINTS, GLOBAL_BATCH, EPOCHS, EVERY = 203, 12, 3, 5
STEPS = 17

Logs = dict[int, list[dict[tuple[int, int], list[int]]]]
"""By attempt, in their order: what each process was given at each (epoch, step)."""


def expected() -> dict[tuple[int, int], list[int]]:
    """The batches of one process that nobody disturbs."""
    generator = torch.Generator().manual_seed(7)
    loader: DataLoader[int] = DataLoader(range(NUM_POINTS), GLOBAL_BATCH, shuffle=True, generator=generator)  # type: ignore[arg-type]
    return {(epoch, step): batch.tolist() for epoch in range(EPOCHS) for step, batch in enumerate(loader)}


def example() -> Any:
    spec = importlib.util.spec_from_file_location("elastic", ROOT / "examples" / "elastic.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch(interpreters: Interpreters, folder: Path, plan: Path, world: int, restarts: int) -> tuple[int, str]:
    """Runs the example under torchrun until it ends or has died too often: the exit code, and what was printed."""
    command = ["tests/support/killed_processes.py", str(world), str(restarts)]
    command += ["--checkpoint", str(folder), "--every", str(EVERY), "--epochs", str(EPOCHS)]
    environment = {"PYTHONPATH": str(ROOT / "examples"), "DEATHS": str(plan)}
    (ended,) = interpreters.run(command, places=[environment])
    return ended.code, ended.output + ended.errors


def read_logs(folder: Path) -> Logs:
    logs: Logs = defaultdict(list)
    for path in sorted(folder.glob("log-*.jsonl"), key=lambda path: [int(n) for n in path.stem.split("-")[1:]]):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        logs[int(path.stem.split("-")[1])].append({(line["epoch"], line["step"]): line["samples"] for line in lines})
    return logs


def random_deaths(seed: int) -> dict[int, list[list[object]]]:
    """By world: deaths at random; the last one of a launch is one too many for it."""
    rng = random.Random(seed)
    return {
        2: [["logged", rng.randrange(7, 14), rng.randrange(2)], ["saving", 2, 0]],
        3: [["reading", rng.randrange(NUM_POINTS), None]],
        1: [],
    }


def test_killed_processes_in_other_numbers_train_on_each_sample_once_and_reach_the_same_weights(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    worlds: list[int] = []
    output = ""
    for world, deaths in random_deaths(seed=3).items():
        plan = tmp_path / f"{world}.json"
        plan.write_text(json.dumps(deaths))
        code, output = launch(interpreters, folder, plan, world, restarts=max(0, len(deaths) - 1))
        assert all(plan.with_suffix(f".{number}").exists() for number in range(len(deaths))), output
        assert (code != 0) == bool(deaths), output
        worlds += [world] * max(1, len(deaths))

    logs = read_logs(folder)
    assert [len(of_attempt) for of_attempt in logs.values()] == worlds
    last: dict[tuple[int, int], list[int]] = {}
    before: tuple[int, int] | None = None
    for of_attempt in logs.values():
        logged = sorted(set().union(*of_attempt))
        assert logged, "an attempt did nothing: choose another seed"
        first = logged[0][0] * STEPS + logged[0][1]
        assert first % EVERY == 0
        if before is not None:  # steps since the last checkpoint, and the one that was begun
            assert 0 < before[0] * STEPS + before[1] + 1 - first <= EVERY + 1
        before = logged[-1]
        last |= {place: [sample for given in of_attempt for sample in given.get(place, [])] for place in logged}
    assert last == expected()

    torch.manual_seed(0)
    elastic = example()
    arguments = argparse.Namespace(checkpoint=tmp_path / "whole", every=EVERY, epochs=EPOCHS)
    model, steps = elastic.train(tdi.Strategy(devices=["cpu"]), arguments)
    assert steps == EPOCHS * STEPS
    assert f"{steps} steps in {EPOCHS} epochs, loss {elastic.loss_of(model):.9f}\n" in output
