"""Over real ranks: a failure says on every rank where it was and what it was, whatever kind of exception it is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Numbers, Stream
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


def fails_at(index: int, name: str) -> Numbers:
    """Numbers of which one cannot be read by one rank."""

    def fail() -> None:
        error = ERRORS[name]()
        if dist.get_rank() == FAILING:
            raise error

    return Numbers(24, {index: fail})


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
        data = DataLoader(fails_at(13, error), batch_size=8, num_workers=setting["workers"])
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


def elements() -> Iterator[int]:
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
        caught(DataLoader(Stream(elements), batch_size=4)),
        caught(DataLoader(range(16), batch_size=8, collate_fn=collate)),  # type: ignore[arg-type]
        caught(DataLoader(range(16), batch_size=8, collate_fn=collate, num_workers=1)),  # type: ignore[arg-type]
        caught(DataLoader(fails_at(5, "plain"), batch_size=8), on_error="skip", max_errors=0),
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


LATE_SECONDS = 60.0


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        raise OSError("the copy found no memory")


class Unreadable(Mapping[str, Any]):
    """A mapping whose values cannot be read."""

    def __getitem__(self, key: str) -> Any:
        raise OSError(f"nothing under {key}")

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def told(call: Callable[[], Any]) -> tuple[str, str, str, bool]:
    """What was raised: its class, its text, the class of its cause; and whether it took so long that a rank waited."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__, late_since(began)
    return "", "", "", late_since(began)


def late_since(began: float) -> bool:
    return time.monotonic() - began > LATE_SECONDS / 2


def with_repeats() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("repeated", torch.rand(2, 1).expand(2, 3))
    return module


def values_of(module: Any) -> list[list[Any]]:
    modules = module.values if isinstance(module, tdi.PerReplica) else [module]
    assert len({id(each) for each in modules}) == len(modules)
    return [[tensor.tolist() for tensor in each.state_dict().values()] for each in modules]


def failures_of_one_rank() -> dict[str, Any]:
    rank = dist.get_rank()
    bad = rank == 1
    strategy = tdi.Strategy(["cpu"], timeout_seconds=LATE_SECONDS)
    twins = tdi.Strategy(["cpu", "cpu"], timeout_seconds=LATE_SECONDS)
    step = tdi.Step(0, 0, 4, (2,), 2, 2)
    mean = torch.ones(3 if bad else 2)  # weights for losses of two samples

    def weighted(losses: Any = None) -> Any:
        with strategy.scope():
            return tdi.average_loss(torch.ones(2) if losses is None else losses, step, weights=mean)

    def all_reduced(losses: Tensor) -> Any:
        context = tdi.get_replica_context()
        assert context is not None
        odd = bad and context.replica_id_in_sync_group == 3
        return tdi.average_loss(losses, tdi.Step(0, 0, 4, (1, 1), 4, 2), weights=torch.ones(2 if odd else 1))

    def mute(context: tdi.InputContext) -> Any:
        raise Mute

    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]) if bad else torch.ones(2)
    calls: dict[str, Callable[[], Any]] = {
        "mirror of what cannot be moved": lambda: strategy.mirror(nn.Linear(2, 2, device="meta" if bad else "cpu")),
        "mirror of what cannot be copied": lambda: twins.mirror(Uncopied(2, 2) if bad else nn.Linear(2, 2)),
        "reduce of nested tensors": lambda: strategy.reduce("SUM", nested),
        "reduce of sparse tensors": lambda: strategy.reduce("SUM", torch.eye(2).to_sparse() if bad else torch.eye(2)),
        "reduce of what cannot be opened": lambda: strategy.reduce("SUM", Unreadable() if bad else {"a": 1.0}),
        "gather of what cannot be opened": lambda: strategy.gather(Unreadable() if bad else {"a": torch.ones(1)}, 0),
        "gather_ordered of what cannot be opened": lambda: strategy.gather_ordered(
            torch.tensor([rank]), Unreadable() if bad else {"a": torch.ones(1)}
        ),
        "weights that do not fit": weighted,
        "losses that are none": lambda: weighted("loss" if bad else torch.ones(2)),
        "weights that do not fit, in run": lambda: twins.run(
            all_reduced, (tdi.PerReplica([torch.ones(1), torch.ones(1)]),)
        ),
        "an error without a text": lambda: strategy.distribute_datasets_from_function(
            mute if bad else lambda context: [torch.ones(2)]
        ),
    }
    found: dict[str, Any] = {name: told(call) for name, call in calls.items()}
    torch.manual_seed(rank)
    found["afterwards"] = [values_of(each.mirror(with_repeats())) for each in (strategy, twins)]
    return found


WANTED = {
    "mirror of what cannot be moved": ("InputError", "mirror(): rank 1: NotImplementedError: ", "NotImplementedError"),
    "mirror of what cannot be copied": ("InputError", "rank 1: OSError: the copy found no memory", "OSError"),
    "reduce of nested tensors": ("TypeError", "rank 1: reduce among several processes takes dense", "TypeError"),
    "reduce of sparse tensors": ("TypeError", "dense tensors, found a torch.sparse_coo one", "TypeError"),
    "reduce of what cannot be opened": ("InputError", "reduce: rank 1: OSError: nothing under a", "OSError"),
    "gather of what cannot be opened": ("InputError", "gather: rank 1: OSError: nothing under a", "OSError"),
    "gather_ordered of what cannot be opened": ("InputError", "rank 1: OSError: nothing under a", "OSError"),
    "weights that do not fit": ("ValueError", "rank 1: average_loss got weights of shape [3]", "ValueError"),
    "losses that are none": ("TypeError", "rank 1: average_loss needs the loss as a tensor", "TypeError"),
    "weights that do not fit, in run": ("ValueError", "rank 1: average_loss got weights of shape [2]", "ValueError"),
    "an error without a text": ("InputError", "rank 1: Mute", "Mute"),
}


def test_what_fails_on_one_rank_before_a_collective_is_raised_by_all_and_harms_nothing_later() -> None:
    ranks = run_ranks(2, failures_of_one_rank, timeout_seconds=300)
    for rank, found in enumerate(ranks):
        for name, (kind, text, cause) in WANTED.items():
            assert found[name][0] == kind, (name, found[name])
            assert text in found[name][1], (name, found[name])
            assert found[name][2] == (cause if rank == 1 else "NoneType"), (name, found[name])
            assert not found[name][3], f"a rank waited in {name}"
        assert found["afterwards"] == ranks[0]["afterwards"]
        alone, twins = found["afterwards"]
        assert len(alone) == 1
        assert len(twins) == 2
        assert twins[0] == twins[1]


def a_device_that_cannot_be_used() -> tuple[str, str, str, bool]:
    def refuse(device: torch.device) -> None:
        raise RuntimeError(f"{device} is busy")

    with mock.patch("torchdistinput.strategy.set_current", refuse) if dist.get_rank() else contextlib.nullcontext():
        return told(lambda: tdi.Strategy(["cpu"], timeout_seconds=LATE_SECONDS))


def test_a_device_that_cannot_be_used_on_one_rank_is_told_on_all() -> None:
    for kind, text, _, waited in run_ranks(2, a_device_that_cannot_be_used):
        assert kind == "InputError"
        assert "Strategy(): rank 1: RuntimeError: cpu is busy" in text
        assert not waited


DATA: Any = range(400)


def printed(call: Callable[[], object]) -> str:
    """The traceback of an error, as Python prints it if the user's program is one frame; empty if there is none."""
    try:
        call()
    except tdi.InputError as error:
        frames = error.__traceback__
        while frames and frames.tb_next and frames.tb_next.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        return "".join(traceback.format_exception(type(error), error, frames))
    return ""


def read(loader: Any, *, until: int | None = None) -> None:
    for step, _ in enumerate(loader):
        if step == until:
            break


def differ() -> Iterator[str]:
    """Each rank: what it is told where the last rank calls something else, leaves alone, or ends."""
    strategy, rank = tdi.Strategy(devices=["cpu"]), dist.get_rank()
    is_last = rank == dist.get_world_size() - 1
    yield printed(lambda: strategy.distribute_dataset(DataLoader(DATA, 8 + is_last)))
    for loader in (strategy.distribute_dataset(DataLoader(DATA, 8)), tdi.DataLoader(DATA, 8)):
        yield printed(lambda: read(loader, until=5 if is_last else None))  # noqa: B023 - runs at once
        if is_last:
            loader.seek(0, 3)
        yield printed(lambda: read(loader))  # noqa: B023
    yield printed(lambda: strategy.gather(1.0, axis=0) if is_last else strategy.reduce("SUM", 1.0))
    if is_last:
        return
    yield printed(lambda: strategy.reduce("SUM", 1.0))
    yield printed(lambda: read(loader))


def all_told() -> list[str]:
    return list(differ())


@pytest.mark.parametrize("world", [2, 3])
def test_the_sentence_is_the_last_of_15_lines(world: int) -> None:
    found = run_ranks(world, all_told)
    for rank, texts in enumerate(found):
        for number, text in enumerate(texts):
            if not text and number in {1, 3} and rank == world - 1:  # it left its loop itself
                continue
            lines = text.splitlines()
            assert lines[-1].startswith(("torchdistinput.errors.Rank", "torchdistinput.errors.Coord")), text
            assert len(lines) <= 15, text
            assert "Departed" not in text
    assert [len(texts) for texts in found] == [8] * (world - 1) + [6]
