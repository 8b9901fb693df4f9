"""Over real ranks: a failure says on every rank where it was and what it was, whatever kind of exception it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchdistinput as tdi
from tests.data import Numbers
from tests.support.cells import cells
from tests.support.epochs import raised
from torchdistinput import build_pipeline
from torchdistinput.testing import run_ranks

FAILING = 1
"""The rank whose data fails."""


class BrokenError(Exception):
    """What the data raises."""


class UnpicklableError(Exception):
    """It cannot leave its process."""

    def __reduce__(self) -> Any:
        raise TypeError("not pickled")


class ChangesError(Exception):
    """It comes out of a pickle as something else."""

    def __reduce__(self) -> Any:
        return str, ("no exception",)


class WordlessError(Exception):
    """Nobody can print it."""

    def __str__(self) -> str:
        raise BrokenError("no words")

    __repr__ = __str__


class OutOfRangeError(StopIteration):
    """The name of one of the library's, which ends a loop in silence."""


def huge() -> Exception:
    return BrokenError("words " * 200_000)


ERRORS: dict[str, Callable[[], Exception]] = {
    "plain": lambda: BrokenError("broken"),
    "unpicklable": lambda: UnpicklableError("broken"),
    "another after pickling": lambda: ChangesError("broken"),
    "wordless": WordlessError,
    "huge": huge,
    "the end of something else": lambda: OutOfRangeError("over"),
    "the library's own end": lambda: tdi.OutOfRangeError("over"),
    "surrogates": lambda: BrokenError("\ud800 \x00 \n"),
}


class FailsAt(Dataset[int]):
    """Numbers of which one cannot be read by one rank."""

    def __init__(self, index: int, error: str) -> None:
        self.index, self.error = index, error

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == self.index and dist.get_rank() == FAILING:
            error = ERRORS[self.error]()
            raise error
        return index


@dataclasses.dataclass(frozen=True)
class Caught:
    """What a rank caught, as plain values."""

    steps: int
    kind: str
    message: str
    attributes: dict[str, Any]
    cause: str | None


NAMES = ("rank", "epoch", "step", "indices", "file", "offset", "worker", "kind", "traceback")


def caught(data: Any, *, epochs: int = 0, **options: Any) -> Caught:
    loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(data, tdi.InputOptions(**options))
    loader.set_epoch(epochs)
    steps = 0
    try:
        for _ in loader:
            steps += 1
    except tdi.InputError as error:
        attributes = {name: getattr(error, name) for name in NAMES} if isinstance(error, tdi.SourceError) else {}
        json.dumps(attributes)  # plain
        cause = None if error.__cause__ is None else type(error.__cause__).__name__
        return Caught(steps, type(error).__name__, str(error), attributes, cause)
    raise AssertionError("no error")


def of_all_kinds(everything: bool) -> list[Caught]:
    found = []
    for error, setting in cells([*ERRORS], {"workers": [0, 2], "prefetch": [0, 2]}, everything=everything):
        # Batches of 8: sample 13 is in step 1, in the part of rank 1; with two loader workers the second reads it.
        data = DataLoader(FailsAt(13, error), batch_size=8, num_workers=setting["workers"])
        found.append(caught(data, epochs=3, prefetch=setting["prefetch"]))
    return found


def test_an_exception_of_any_kind_is_told_in_full_on_every_rank(all_cells: bool) -> None:
    told, failing = run_ranks(2, of_all_kinds, all_cells)
    names = list(cells([*ERRORS], {"workers": [0, 2], "prefetch": [0, 2]}, everything=all_cells))
    for (name, setting), own, other in zip(names, failing, told, strict=True):
        kind = type(ERRORS[name]()).__name__
        where = "sample 13" + (", loader worker 1" if setting["workers"] else "")
        for each in (own, other):
            assert (each.steps, each.kind) == (1, "SourceError"), name
            assert f"the input of rank 1 failed at step 1 of epoch 3 ({where})" in each.message
            assert kind in each.message
            attributes = {key: value for key, value in each.attributes.items() if key != "traceback"}
            assert attributes == {
                "rank": 1,
                "epoch": 3,
                "step": 1,
                "indices": (13,),
                "file": None,
                "offset": None,
                "worker": 1 if setting["workers"] else None,
                "kind": kind,
            }
            traceback = each.attributes["traceback"]
            assert "in __getitem__" in traceback
            assert kind in traceback
            assert len(traceback) < 17_000
            assert len(each.message) < 25_000
        unchanged = setting["workers"] == 0 or name not in ("unpicklable", "another after pickling")
        assert own.cause == (kind if unchanged else "RuntimeError"), name
        assert other.cause is None
        assert "The traceback of rank 1" in other.message


# What else may fail


class Elements(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(10)
        if dist.get_rank() == FAILING:
            raise BrokenError("no more")
        yield from range(10, 20)


def collate(samples: list[int]) -> torch.Tensor:
    if 5 in samples and dist.get_rank() == FAILING:
        raise BrokenError("cannot collate")
    return torch.tensor(samples)


class NoOrder:
    def __iter__(self) -> Any:
        if dist.get_rank() == FAILING:
            raise BrokenError("no order")
        return iter([[0, 1]])


def of_others() -> list[Caught]:
    return [
        caught(DataLoader(range(16), batch_sampler=NoOrder())),  # type: ignore[arg-type]
        caught(DataLoader(Elements(), batch_size=4)),
        caught(DataLoader(range(16), batch_size=8, collate_fn=collate)),  # type: ignore[arg-type]
        caught(DataLoader(range(16), batch_size=8, collate_fn=collate, num_workers=1)),  # type: ignore[arg-type]
        caught(DataLoader(FailsAt(5, "plain"), batch_size=8), on_error="skip", max_errors=0),
    ]


def test_failures_outside_of_samples_tell_what_is_known() -> None:
    for rank, (opened, element, *collated, skipped) in enumerate(run_ranks(2, of_others)):
        assert [opened.attributes[name] for name in ("rank", "step", "kind")] == [1, 0, "BrokenError"]
        assert opened.cause == ("BrokenError" if rank == FAILING else None)
        assert element.attributes["indices"] is None
        assert "(element 10)" in element.message
        for each, worker in zip(collated, (None, 0), strict=True):
            assert each.attributes["indices"] == (4, 5, 6, 7)
            assert each.attributes["worker"] == worker
            assert each.cause == ("BrokenError" if rank == FAILING else None)
        assert (skipped.attributes["rank"], skipped.attributes["step"], skipped.steps) == (1, 0, 0)
        assert "rank 1: sample 5: BrokenError: broken" in skipped.message


def both_fail() -> Caught:
    def fail(_: int) -> None:
        raise BrokenError(f"broken on {dist.get_rank()}")

    return caught(DataLoader(Numbers(8, each=fail), batch_size=4))


def test_of_ranks_that_fail_together_all_are_named_and_the_first_has_the_attributes() -> None:
    for each in run_ranks(2, both_fail):
        assert (each.attributes["rank"], each.attributes["indices"]) == (0, (0,))
        assert "rank 0 failed at step 0 of epoch 0 (sample 0)" in each.message
        assert "rank 1 failed at step 0 of epoch 0 (sample 2)" in each.message
        assert each.cause == "BrokenError"


@pytest.mark.parametrize("error", ["plain", "unpicklable", "wordless", "the library's own end"])
def test_one_process_tells_the_same(error: str) -> None:
    def fail(_: int) -> None:
        made = ERRORS[error]()
        raise made

    for workers in (0, 1):
        data = DataLoader(Numbers(8, each=fail), num_workers=workers)
        loader = tdi.Strategy(devices=["cpu"]).distribute_dataset(data)
        with pytest.raises(tdi.SourceError) as caught:
            list(loader)
        found = caught.value
        assert (found.rank, found.epoch, found.step, found.indices) == (None, 0, 0, (0,))
        assert (found.worker, found.kind) == (0 if workers else None, type(ERRORS[error]()).__name__)
        assert found.__cause__ is not None


def a_device_fails() -> Any:
    """On one rank, after all agreed to begin an epoch."""

    def make_copier(device: torch.device) -> Any:
        raise BrokenError(f"{device} is out of order")

    dataset = tdi.Strategy(["cpu"]).distribute_dataset([torch.zeros(4)] * 3)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == FAILING:
            patch.setattr(build_pipeline, "make_copier", make_copier)
        return raised(lambda: list(dataset))


def test_a_rank_whose_device_cannot_be_prepared_is_named_on_the_others_at_once() -> None:
    other, failing = run_ranks(2, a_device_fails, timeout_seconds=60)
    assert (failing.kind, failing.message) == ("BrokenError", "cpu is out of order")
    assert other.kind == "RankLost"
    assert "rank 1 could not begin epoch 0: BrokenError: cpu is out of order" in other.message
