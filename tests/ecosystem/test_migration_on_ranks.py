"""The migration tables, row by row: what the old code gives, and what the new code gives, over three ranks.

The data are the numbers 0 to 9, which neither 3 ranks nor batches of 6 divide.
"""

from __future__ import annotations

import importlib
import itertools
import math
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import torchdistinput as tdi
from tests.support.migration import FROM_ACCELERATE, FROM_SAMPLER, Row, result, run
from torchdistinput.testing import run_ranks

NUMBERS = range(10)
N, B, G = 3, 2, 6


def names(**more: Any) -> dict[str, Any]:
    """What a cell may use."""
    from_torch = {each.__name__: each for each in (DataLoader, DistributedSampler, WeightedRandomSampler)}
    sizes = {"dataset": NUMBERS, "N": N, "B": B, "G": G}
    return {**from_torch, **sizes, "dist": dist, "tdi": tdi, "strategy": tdi.Strategy(devices=["cpu"]), **more}


def steps(loader: Iterable[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def both(row: Row, **scope: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The names after the old code, and after the new."""
    return run(row.before, dict(scope)), run(row.after, dict(scope))


def both_results(row: Row, **scope: Any) -> tuple[Any, Any]:
    """The values of the old and the new code."""
    return result(row.before, dict(scope)), result(row.after, dict(scope))


def in_step(ranks: list[list[list[int]]]) -> list[list[int]]:
    """What the ranks had together at each step."""
    return [[*itertools.chain(*parts)] for parts in zip(*ranks, strict=True)]


# ------------------------------------------------------------------------------------------------ DistributedSampler


def sampler_rows() -> dict[str, Any]:
    rows, scope = FROM_SAMPLER, names()
    strategy = scope["strategy"]
    found: dict[str, Any] = {"world": both_results(rows["world"], **scope)}
    for name in ("divide", "drop-in", "same steps"):
        before, after = both(rows[name], **scope)
        found[name] = steps(before["loader"]), steps(after["loader"])
        found[f"{name}, again"] = steps(before["loader"]), steps(after["loader"])
        run(rows["epochs"].before, {**before, "epoch": 1})
        found[f"{name}, set_epoch"] = steps(before["loader"])
    before, after = both(rows["other samplers"], **scope, weights=[1.0] * 5 + [0.0] * 5)
    found["other samplers"] = steps(before["loader"]), steps(after["loader"])
    loader = strategy.distribute_dataset(NUMBERS, global_batch_size=G)
    found["device"] = [x.device == strategy.device for x in loader]
    for x in loader:
        made = both(rows["loss"], **scope, losses=x.double(), loader=loader)
        found["loss"] = tuple(strategy.reduce("MEAN", side["loss"]).item() for side in made)
    found["metric"] = metrics(rows["metric"], scope, loader)
    return found


def metrics(row: Row, scope: dict[str, Any], loader: Iterable[torch.Tensor]) -> tuple[float, float]:
    """The share of the numbers that are 0."""
    sampler: DistributedSampler[int] = DistributedSampler(NUMBERS, shuffle=False)  # type: ignore[arg-type]
    old = torch.cat(list(DataLoader(NUMBERS, batch_size=B, sampler=sampler)))  # type: ignore[arg-type]
    before = result(row.before, {**scope, "sampler": sampler, "hits": old == 0})
    after = result(row.after, {**scope, "hits": (torch.cat(list(loader)) == 0).double()})
    return before.item(), after.item()


def test_from_the_distributed_sampler() -> None:
    ranks = run_ranks(N, sampler_rows)

    def column(name: str, side: int) -> list[Any]:
        return [found[name][side] for found in ranks]

    def epoch(name: str, side: int) -> list[int]:
        return sorted(itertools.chain(*in_step(column(name, side))))

    assert [found["world"] for found in ranks] == [((rank, N), (rank, N)) for rank in range(N)]
    for name in ("divide", "drop-in"):
        assert len(epoch(name, 0)) == 12  # two of the numbers came twice
        assert epoch(name, 1) == [*NUMBERS]
        assert [len(step) for step in in_step(column(name, 1))] == [6, 4]
    assert column("divide, again", 0) == column("divide", 0) != [found["divide, set_epoch"] for found in ranks]
    assert column("divide, again", 1) != column("divide", 1)  # with nothing called
    assert len(epoch("same steps", 0)) == 9  # one was left out
    assert epoch("same steps", 1) == [*NUMBERS]
    assert len(epoch("other samplers", 0)) == 8 * N
    assert len(epoch("other samplers", 1)) == 8
    assert set(epoch("other samplers", 1)) <= {0, 1, 2, 3, 4}
    assert [found["device"] for found in ranks] == [[True, True]] * N
    for before, after in (found["loss"] for found in ranks):  # the last step has 6, 7; 8, 9; nothing
        assert math.isnan(before)
        assert after == pytest.approx(7.5)
    for before, after in (found["metric"] for found in ranks):
        assert before == pytest.approx(2 / 12)  # the number 0 is one of those that came twice
        assert after == pytest.approx(1 / 10)


# --------------------------------------------------------------------------------------------------------- accelerate


def accelerate_rows() -> dict[str, Any]:
    with warnings.catch_warnings():  # about the environment variables of its own launcher
        warnings.simplefilter("ignore")
        accelerate = importlib.import_module("accelerate")  # it is in an extra of its own, and has no types
        accelerator = accelerate.Accelerator(cpu=True)
    rows, scope = FROM_ACCELERATE, names(accelerator=accelerator, Accelerator=accelerate.Accelerator)
    scope["DataLoaderConfiguration"] = importlib.import_module("accelerate.utils").DataLoaderConfiguration
    found: dict[str, Any] = {"world": both_results(rows["world"], **scope)}
    for name in ("divide", "split_batches", "even_batches"):
        before, after = both(rows[name], **scope)
        found[name] = steps(before["loader"]), steps(after["loader"])
    found["any size"] = any_size(rows["split_batches"], scope)
    for name in ("gather_for_metrics", "ordered"):
        found[name] = gathered(rows[name], scope)
    uneven = torch.arange(accelerator.process_index + 1)
    found["pad"] = tuple(x.tolist() for x in both_results(rows["pad"], **scope, scores=uneven))
    found["reduce"] = tuple(x.item() for x in both_results(rows["reduce"], **scope, losses=uneven.double()))
    found["backward"], found["prepare"] = trained(scope)
    return found


def any_size(row: Row, scope: dict[str, Any]) -> tuple[str, list[list[int]]]:
    """Global batches of 4, which 3 does not divide."""
    message = ""
    try:
        run(row.before, {**scope, "G": 4})
    except ValueError as error:
        message = str(error)
    return message, steps(run(row.after, {**scope, "G": 4})["loader"])


def gathered(row: Row, scope: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """What all ranks get of each step."""
    before, after = both(FROM_ACCELERATE["divide"], **scope)
    return (
        [result(row.before, {**before, "x": x, "index": x, "scores": 10 * x}).tolist() for x in before["loader"]],
        [result(row.after, {**after, "x": x, "index": x, "scores": 10 * x}).tolist() for x in after["loader"]],
    )


def trained(scope: dict[str, Any]) -> tuple[tuple[float, float], tuple[bool, bool]]:
    """A weight that is moved to the numbers' mean, by the old code and by the new."""
    weights, types = [], []
    for side in ("before", "after"):
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        known = {**scope, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
        known = run(FROM_ACCELERATE["divide"].after, known)
        if side == "before":
            known = run(("loader = DataLoader(dataset, batch_size=B)",), known)
        known = run(getattr(FROM_ACCELERATE["prepare"], side), known)
        for x in known["loader"]:
            known["losses"] = (known["model"](torch.ones(len(x), 1).double()).squeeze(1) - x) ** 2
            run(getattr(FROM_ACCELERATE["backward"], side), known)
            known["optimizer"].step()
            known["optimizer"].zero_grad()
        weights.append(model.weight.item())
        types.append(isinstance(known["loader"], tdi.DistributedDataset))
    return (weights[0], weights[1]), (types[0], types[1])


def test_from_accelerate() -> None:
    ranks = run_ranks(N, accelerate_rows)

    def column(name: str, side: int) -> list[Any]:
        return [found[name][side] for found in ranks]

    for rank, found in enumerate(ranks):
        assert found["world"] == ((rank, N, rank == 0),) * 2
    assert in_step(column("divide", 0)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 0, 1]]
    assert in_step(column("divide", 1)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert column("split_batches", 0) == column("divide", 0)
    assert column("split_batches", 1) == column("divide", 1)
    assert [len(rank) for rank in column("even_batches", 0)] == [2, 2, 1]
    assert [len(rank) for rank in column("even_batches", 1)] == [2, 2, 2]
    assert "round multiple of the number of processes" in column("any size", 0)[0]
    assert in_step(column("any size", 1)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for before, after in (found["gather_for_metrics"] for found in ranks):
        assert before == after == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    for before, after in (found["ordered"] for found in ranks):
        assert before == after == [[0, 10, 20, 30, 40, 50], [60, 70, 80, 90]]
    for before, after in (found["pad"] for found in ranks):
        assert before == [0, 0, 0, 0, 1, 0, 0, 1, 2]
        assert after == [0, 0, 1, 0, 1, 2]
    for before, after in (found["reduce"] for found in ranks):
        assert before == 0.5
        assert after == 4 / 6
    for before, after in (found["backward"] for found in ranks):
        assert before == pytest.approx((6 + 7 + 8 + 9 + 0 + 1) / 6)  # with what was filled up
        assert after == pytest.approx((6 + 7 + 8 + 9) / 4)
    assert [found["prepare"] for found in ranks] == [(False, True)] * N
