"""Subclasses of torch's ``DataLoader`` that iterate in a way of their own come as they iterate, at any world size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

COUNT, SIZE = 22, 4
AT_ONCE = tdi.InputOptions(prefetch=0)  # a class may draw as it is read, so reading ahead would draw more


class Normalising(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch / 2


class Limited(DataLoader[Any]):
    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return islice(super().__iter__(), 2)


class OnlyLength(DataLoader[Any]):
    def __len__(self) -> int:
        return 2


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return (batch / 2 for batch in super()._get_iterator())


class Endless(DataLoader[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from super().__iter__()


class OwnIndices(DataLoader[Any]):
    @property
    def _index_sampler(self) -> Any:
        return [[3, 1, 2], [5, 6, 4]]


class Other(DataLoader[Any]):
    """What torch's loader yields."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.name = "other"


KINDS = [Normalising, Limited, OnlyLength, OwnIterator, Endless, OwnIndices, Other]


def made(kind: Any, **settings: Any) -> Any:
    data: Any = [torch.tensor([float(number)]) for number in range(COUNT)]
    return kind(data, batch_size=SIZE, shuffle=True, **settings)


def taken(loader: Any, steps: int | None = None) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in islice(loader, steps)]


def by_torch(kind: Any, **settings: Any) -> list[list[float]]:
    torch.manual_seed(3)
    loader = made(kind, **settings)
    return [*taken(loader, 9), *taken(loader, 9)]


def distributed(settings: dict[str, Any]) -> dict[str, Any]:
    """The parts of this rank in two epochs, and again after a resume in the second one; the last lengths."""
    found: dict[str, Any] = {}
    strategy = tdi.Strategy(["cpu"], timeout_seconds=60)
    for kind in KINDS:
        torch.manual_seed(3 + 10 * strategy.input_pipeline_id)
        loader = strategy.distribute_dataset(made(kind, **settings), AT_ONCE)
        parts = taken(loader, 9)
        iterator = iter(loader)
        parts += taken(iterator, 1)
        state = loader.state_dict()
        rest = taken(iterator, 8)
        iterator.close()
        resumed = strategy.distribute_dataset(made(kind, **settings), AT_ONCE)
        resumed.load_state_dict(state)
        found[kind.__name__] = parts, rest, taken(resumed, 8), len(resumed)
    return found


@pytest.mark.filterwarnings("ignore:.*read again from its front")
@pytest.mark.parametrize(("world", "settings"), [(1, {}), (2, {}), (2, {"num_workers": 1})], ids=str)
def test_what_a_subclass_yields_is_divided_as_it_comes(world: int, settings: dict[str, Any]) -> None:
    ranks = run_ranks(world, distributed, settings)
    for kind in KINDS:
        of_ranks = [found[kind.__name__] for found in ranks]
        first, rest, again = (
            [[*chain.from_iterable(step)] for step in zip(*(one[part] for one in of_ranks), strict=True)]
            for part in range(3)
        )
        assert first + rest == by_torch(kind, **settings)
        assert again == rest
        assert of_ranks[0][3] == len(made(kind))


class DropIn(tdi.DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter([batch / 2 for batch in super().__iter__()])


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "skip": (Normalising, {"on_error": "skip"}, "Normalising, whose class has its own __iter__"),
    "seeds": (OwnIterator, {"seed_samples": True}, "OwnIterator, whose class has its own _get_iterator"),
    "costs": (Normalising, {"balance": len}, "balance"),
    "padding": (Normalising, {"partial_batch": "pad"}, "known global batch size"),
    "files": (Normalising, {"auto_shard_policy": tdi.AutoShardPolicy.FILE}, "files"),
    "drop-in": (DropIn, {}, "DropIn, a subclass of the drop-in DataLoader with its own __iter__"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(name: str) -> None:
    kind, options, message = REFUSED[name]
    with pytest.raises(tdi.InputError, match=message):
        tdi.Strategy(["cpu"]).distribute_dataset(made(kind), tdi.InputOptions(**options))


def refused_on_ranks() -> list[str]:
    found = []
    data: Any = range(COUNT)
    different: list[dict[str, Any]] = [{"in_order": False, "num_workers": 2}, {"sampler": DistributedSampler(data)}]
    for settings in different:
        with pytest.raises(tdi.InputError) as caught:
            tdi.Strategy(["cpu"]).distribute_dataset(Normalising(data, SIZE, **settings))
        found.append(str(caught.value))
    return found


def test_a_subclass_in_any_order_or_of_one_rank_is_refused() -> None:
    for order, per_rank in run_ranks(2, refused_on_ranks):
        assert "in_order=False" in order
        assert "DistributedSampler" in per_rank
