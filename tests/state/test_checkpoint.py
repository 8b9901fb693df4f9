"""The state in ``torch.distributed.checkpoint``: saved and loaded with the model, at worlds 2, 3 and 1."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import torchdistinput as tdi
from tests.data import Numbers, Sized
from tests.support import inputs
from tests.support.epochs import lists
from tests.support.interpreters import ROOT, Interpreters
from tests.support.launched import Scenes, launched
from tests.support.platforms import package
from tests.support.resume import Run, one_process, steps
from torchdistinput import readers
from torchdistinput.testing import run_ranks

dcp = package("torch.distributed.checkpoint")

LENGTHS = (4, 5, None)
WORLDS = (2, 3, 1)


def shuffled(cls: Any = DataLoader, **more: Any) -> Any:
    return cls(range(23), batch_size=4, shuffle=True, generator=inputs.generator(), **more)


def by_default_state(cls: Any = DataLoader, **more: Any) -> Any:
    return cls(range(23), batch_size=4, shuffle=True, **more)


def runs(folder: str) -> dict[str, Run]:
    """One rank: a run of each kind whose state knows no world."""
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)
    files = tdi.FileDataset(folder + "/?.txt", readers.text_lines, map_fn=int, shuffle_buffer=3, cycle_length=2)
    return {
        "dataset": Run(strategy.distribute_dataset(shuffled(), options), lambda batch: [batch.tolist()]),
        "drop-in": Run(shuffled(tdi.DataLoader), lambda batch: [batch.tolist()]),
        "default state": Run(strategy.distribute_dataset(by_default_state(), options), lambda batch: [batch.tolist()]),
        "files": Run(strategy.distribute_dataset(files, options, global_batch_size=4), lambda batch: [batch.tolist()]),
    }


def segment(folder: str, number: int) -> dict[str, Any]:
    """One rank: loads the checkpoint of the segment before, reads on, and writes the next one."""
    torch.manual_seed(5 + number)
    found = runs(folder)
    weights = torch.full((3,), float(number))
    content: dict[str, Any] = {"model": {"weights": weights}, **{name: run.loader for name, run in found.items()}}
    for run in found.values():
        assert isinstance(run.loader, dcp.stateful.Stateful)
    if number:
        dcp.load(content, checkpoint_id=f"{folder}/checkpoint-{number - 1}")
        assert content["model"]["weights"].tolist() == [number - 1.0] * 3
    delivered = {name: list(steps(run, until=LENGTHS[number])) for name, run in found.items()}
    content["model"]["weights"] = torch.full((3,), float(number))
    dcp.save(content, checkpoint_id=f"{folder}/checkpoint-{number}")
    dist.barrier()
    return delivered


@pytest.mark.filterwarnings("ignore")  # torch's own, of a checkpoint without a process group
def test_a_checkpoint_of_two_ranks_is_loaded_by_three_and_theirs_by_one(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    whole: dict[str, list[list[int]]] = {}
    for name, make in (("dataset", shuffled), ("drop-in", shuffled), ("default state", by_default_state)):
        torch.manual_seed(5)
        whole[name] = [batch.tolist() for _, _, batch in one_process(make, {})]
    found: dict[str, list[list[int]]] = {name: [] for name in (*whole, "files")}
    for number, world in enumerate(WORLDS):
        ranks = run_ranks(world, segment, str(tmp_path), number)
        for name, batches in found.items():
            for row in zip(*(rank[name] for rank in ranks), strict=True):
                batches.append([sample for _, _, parts in row for part in parts for sample in part])
    assert {name: batches for name, batches in found.items() if name != "files"} == whole
    epoch = list(range(12))
    assert sorted(sample for batch in found["files"] for sample in batch) == sorted(epoch * 3)


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


NUMBERS: Any = torch.arange(7.0)


def test_a_state_is_that_after_the_last_step_of_the_group() -> None:
    loader, state = tdi.DataLoader(NUMBERS, 2), {}
    for _, step in next(tdi.groups(loader, 3)):
        state = json.loads(json.dumps(loader.state_dict()))
        assert (step.epoch, state["step"]) == (0, 3)
    resumed = tdi.DataLoader(NUMBERS, 2)
    resumed.load_state_dict(state)
    (group,) = tdi.groups(resumed, 3)
    assert [(batch.tolist(), step.index) for batch, step in group] == [([6.0], 3)]
    assert (group.global_size, group.sums) == (1, {})


def test_an_error_comes_before_the_first_step_of_its_group() -> None:
    bad: Any = [*NUMBERS[:3], None]
    groups = tdi.groups(tdi.DataLoader(bad, 1), 2)
    assert len(next(groups)) == 2
    with pytest.raises(TypeError, match="found <class 'NoneType'>"):
        next(groups)
    with pytest.raises(ValueError, match="count=0; a group has 1 step or more"):
        tdi.groups(tdi.DataLoader(bad, 1), 0)


def state_of_0_2(group: list[Any]) -> dict[str, Any]:
    """A state that 0.2 took with ``accumulate=2``: after 1 step, in a group, or after the group."""
    loader = tdi.DataLoader(NUMBERS, 2)
    batches = iter(loader)
    for _ in range(1 if group else 2):
        next(batches)
    return {**loader.state_dict(), "group": group}


def test_a_state_of_0_2_that_was_taken_in_a_group_says_whose_gradients_are_not_in_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for group, rest in (([2, 2, []], 3), ([], 2)):
        loader = tdi.DataLoader(NUMBERS, 2)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="torchdistinput"):
            loader.load_state_dict(state_of_0_2(group))
        assert ("The gradients of the first of them are not in it" in caplog.text) == bool(group)
        assert len(list(loader)) == rest


def gradients_of_groups() -> list[float]:
    """The gradient of each group at a weight that multiplies the samples: the mean of its samples, over all ranks."""
    loader = tdi.DataLoader(NUMBERS, 2)
    weight = torch.ones((), requires_grad=True)
    found = []
    for group in tdi.groups(loader, 2):
        for samples, _ in group:
            tdi.average_loss(samples * weight, group).backward()  # type: ignore[no-untyped-call] # of torch
        assert weight.grad is not None
        found.append(tdi.Strategy().reduce("SUM", weight.grad, axis=None).item() / loader.step.num_workers)
        weight.grad = None
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_of_an_accumulated_step_is_divided_by_its_group(world_size: int, scenes: Scenes) -> None:
    for found in [gradients_of_groups()] if world_size == 1 else scenes(world_size, "gradients"):
        assert found == pytest.approx([NUMBERS[:4].mean().item(), NUMBERS[4:].mean().item()])


def of_a_loader(data: Any) -> Any:
    return tdi.Strategy().distribute_dataset(DataLoader(data, 4))


def of_samples(data: Any) -> Any:
    return tdi.Strategy().distribute_dataset(data, global_batch_size=4)


DOORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "drop-in": (Numbers, lambda data: tdi.DataLoader(data, 4)),
    "a loader": (Numbers, of_a_loader),
    "samples": (Numbers, of_samples),
    "elements": (Sized, of_samples),
}


def length_in(state: dict[str, Any]) -> Any:
    return dict(state["fingerprint"])["length"]


def grown(door: str) -> list[Any]:
    """Data that grows from 8 to 15 before its first epoch, or after it; then the state of each is loaded."""
    found: list[Any] = []
    make, divide = DOORS[door]
    for epochs in (0, 1):
        data = make(8)
        loader = divide(data)
        for _ in range(epochs):
            assert len(list(loader)) == 2
        data.n = 15
        state = loader.state_dict()
        same, shorter = divide(make(15)), divide(make(8))
        same.load_state_dict(state)
        with pytest.raises(tdi.StateMismatch, match="length: 15 in the state, 8 here"):
            shorter.load_state_dict(state)
        found.append((length_in(state), list(map(lists, same)) == list(map(lists, loader))))
    return found


@pytest.mark.parametrize("door", DOORS)
def test_a_state_between_two_epochs_has_the_length_of_now(door: str) -> None:
    assert grown(door) == [(15, True)] * 2


def grown_on_ranks() -> dict[str, list[Any]]:
    return {door: grown(door) for door in DOORS if door != "elements"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_so_it_is_on_every_rank(world_size: int, scenes: Scenes) -> None:
    for found in scenes(world_size, "grown"):
        assert found == {door: [(15, True)] * 2 for door in DOORS if door != "elements"}


@pytest.mark.parametrize("door", ["drop-in", "a loader", "samples"])
def test_a_state_in_an_epoch_has_the_length_with_which_the_epoch_began(door: str) -> None:
    make, divide = DOORS[door]
    data = make(8)
    loader = divide(data)
    iterator = iter(loader)
    next(iterator)
    data.n = 15
    state = loader.state_dict()
    assert length_in(state) == 8
    with pytest.raises(tdi.StateMismatch, match="length: 8 in the state, 15 here"):
        divide(data).load_state_dict(state)
    assert len(list(iterator)) == 1
    assert length_in(loader.state_dict()) == 15
    assert len(list(loader)) == 4


@pytest.mark.parametrize("door", ["drop-in", "a loader", "samples"])
def test_a_state_is_compared_with_the_length_of_now(door: str) -> None:
    make, divide = DOORS[door]
    whole = divide(make(15))
    next(iter(whole))
    data = make(8)
    loader = divide(data)
    data.n = 15
    loader.load_state_dict(whole.state_dict())
    assert len(list(loader)) == 3


ELEVEN: Any = range(11)
SIZES = (3, 1, 5, 2)
"""Of ``inputs.uneven_batches``."""


def samples_in(loader: Any) -> int:
    found: int = loader.state_dict()["samples"]
    return found


LOADERS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[int, ...]]] = {
    "a batch size": (lambda: {"batch_size": 4}, (4, 4, 3)),
    "a batch size, the rest dropped": (lambda: {"batch_size": 4, "drop_last": True}, (4, 4)),
    "shuffled": (lambda: {"batch_size": 4, "shuffle": True, "generator": inputs.generator()}, (4, 4, 3)),
    "a batch sampler": (lambda: {"batch_sampler": inputs.uneven_batches()}, SIZES),
    "lists of a sampler": (
        lambda: {"batch_size": None, "sampler": BatchSampler(SequentialSampler(ELEVEN), 4, drop_last=False)},
        (4, 4, 3),
    ),
}
SOUGHT_DOORS: dict[str, Callable[..., Any]] = {
    "drop-in": tdi.DataLoader,
    "strategy": lambda *given, **named: tdi.Strategy().distribute_dataset(DataLoader(*given, **named)),
}


def counted(door: str, name: str) -> list[tuple[int, int]]:
    """From each step on: the samples of the state after the next one, and those that should be there."""
    arguments, sizes = LOADERS[name]
    found = []
    data = inputs.BatchesByList() if name == "lists of a sampler" else ELEVEN
    loader: Any = SOUGHT_DOORS[door](data, **arguments())
    for step in range(len(sizes)):
        loader.seek(0, step)
        iterator = iter(loader)
        next(iterator)
        if step + 1 < len(sizes):  # else the state is of the next epoch
            found.append((samples_in(loader), sum(sizes[: step + 1])))
        iterator.close()
    return found


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("door", SOUGHT_DOORS)
def test_the_samples_before_the_sought_step_count(door: str, name: str) -> None:
    for found, right in counted(door, name):
        assert found == right


def counted_everywhere() -> dict[tuple[str, str], list[tuple[int, int]]]:
    return {(door, name): counted(door, name) for door in SOUGHT_DOORS for name in LOADERS}


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_samples_before_the_sought_step_count_on_every_rank(world_size: int, scenes: Scenes) -> None:
    for found in scenes(world_size, "counted"):
        for key, counts in found.items():
            assert [each for each, _ in counts] == [right for _, right in counts], key


@pytest.mark.parametrize("kind", ["loader", "samples", "elements"])
def test_the_end_of_an_epoch_has_as_many_samples_as_the_data(kind: str) -> None:
    data: Any = {
        "loader": DataLoader(ELEVEN, 4),
        "samples": ELEVEN,
        "elements": Sized(11),
    }[kind]
    dataset = tdi.Strategy().distribute_dataset(data, global_batch_size=None if kind == "loader" else 4)
    for step, samples in ((0, 0), (2, 8), (3, 11)):
        dataset.seek(0, step)
        assert (dataset.state_dict()["step"], samples_in(dataset)) == (step, samples)


def scenes_of(_: int, __: Path) -> dict[str, Callable[[], Any]]:
    return {"gradients": gradients_of_groups, "grown": grown_on_ranks, "counted": counted_everywhere}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return launched((2, 3), scenes_of, tmp_path_factory.mktemp("nothing"))
