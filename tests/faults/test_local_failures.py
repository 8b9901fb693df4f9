"""What fails on one rank only, in the work that comes before a collective call: every rank hears of it, none waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

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
