"""The index beside each element, where the oracle does not ask for it; and ``gather_ordered``, also over real ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Count, Mapped
from tests.support import inputs
from tests.support.epochs import Raised, epoch, lists, raised
from torchdistinput import PerReplica
from torchdistinput.testing import run_ranks


def indexed(data: Any, *, replicas: int = 2, size: int | None = None, **options: Any) -> list[list[Any]]:
    """Steps of pieces ``(index, element)``, as lists."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    dataset = strategy.distribute_dataset(data, tdi.InputOptions(with_index=True, **options), global_batch_size=size)
    return epoch(strategy, dataset)


def flat(steps: list[list[Any]]) -> list[tuple[int, Any]]:
    return [pair for step in steps for index, rows in step for pair in zip(index, rows, strict=True)]


# What the index is


def test_where_the_sampler_gives_no_ints_the_index_is_the_position_in_the_epoch() -> None:
    data = DataLoader(Mapped(4, lambda name: torch.tensor(ord(name))), batch_size=3, sampler=list("badc"))
    assert flat(indexed(data)) == [(0, 98), (1, 97), (2, 100), (3, 99)]


# Bad input of the index


def test_the_index_has_an_entry_for_each_sample_whatever_the_collate_function_makes_of_them() -> None:
    data: Any = DataLoader(range(6), batch_size=3, collate_fn=lambda rows: torch.tensor(rows[1:]))  # type: ignore[arg-type]
    strategy = tdi.Strategy(devices=["cpu"])
    steps = list(strategy.distribute_dataset(data, tdi.InputOptions(with_index=True)))
    assert [(index.tolist(), rows.tolist()) for index, rows in steps] == [([0, 1, 2], [1, 2]), ([3, 4, 5], [4, 5])]
    with pytest.raises(ValueError, match="the index has 6 entries"):
        strategy.gather_ordered(*map(torch.cat, zip(*steps, strict=True)))


def test_negative_indices_are_refused_as_minus_one_means_padding() -> None:
    data: Any = DataLoader(range(6), batch_size=3, sampler=[0, -1, 2])  # type: ignore[arg-type]
    with pytest.raises(tdi.BatchingError, match="the sampler gave the index -1"):
        indexed(data, replicas=1)


# gather_ordered


class Pair(NamedTuple):
    score: torch.Tensor
    text: list[str]


@dataclasses.dataclass
class Found:
    pair: Pair
    past: None = None


def test_outputs_come_back_in_the_order_of_the_index_without_padded_rows_whatever_their_nesting() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    index = PerReplica([torch.tensor([7, 2, 4]), torch.tensor([9, -1, 0])])
    outputs = Found(
        Pair(
            PerReplica([torch.tensor([[7.0], [2.0], [4.0]]), torch.tensor([[9.0], [5.0], [0.0]])]),  # type: ignore[arg-type]
            PerReplica([["7", "2", "4"], ["9", "", "0"]]),  # type: ignore[arg-type]
        )
    )
    found = strategy.gather_ordered(index, outputs)
    assert isinstance(found, Found)
    assert isinstance(found.pair, Pair)
    assert lists(found) == {"pair": ([[0.0], [2.0], [4.0], [7.0], [9.0]], ["0", "2", "4", "7", "9"]), "past": None}


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_tensors_of_any_dtype_keep_their_bits_and_lose_their_graph(dtype: torch.dtype) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    rows = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)
    if dtype == torch.float64:
        rows.requires_grad_()
    found = strategy.gather_ordered(torch.tensor([2, 0, 1]), rows)
    assert found.dtype == dtype
    assert not found.requires_grad
    assert torch.equal(found, rows.detach()[[1, 2, 0]])


BAD: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "an index that comes twice": (torch.tensor([3, 5, 3]), torch.ones(3), ValueError, r"1 index.* 3 \(replica 0\)"),
    "other lengths": (
        torch.tensor([0, 1]),
        {"a": {"b": torch.ones(3)}},
        ValueError,
        r"2 entries, and outputs\['a'\]\['b'\] has 3",
    ),
    "rows without an index": (
        torch.tensor([], dtype=torch.int64),
        torch.ones(3),
        ValueError,
        "0 entries, and outputs has 3",
    ),
    "a list of another length": (torch.tensor([0, 1]), ["a"], ValueError, "2 entries, and outputs has 1"),
    "a scalar": (torch.tensor([0]), torch.tensor(1.0), ValueError, "outputs is a scalar"),
    "nothing with rows": (torch.tensor([0]), 3.0, ValueError, "outputs is a float"),
    "an index of floats": (torch.tensor([0.0]), torch.ones(1), TypeError, "float32; ints are needed"),
    "an index with two dims": (torch.tensor([[0]]), torch.ones(1), ValueError, r"has shape \[1, 1\]"),
    "a list as index": ([0], torch.ones(1), TypeError, "the index is a list"),
    "an index below -1": (torch.tensor([-2]), torch.ones(1), ValueError, "has the entry -2"),
    "objects in a list": (torch.tensor([0]), [object()], TypeError, "travel as JSON"),
    "dicts in a list": (torch.tensor([0]), {"x": torch.ones(1), "past": [{"a": 2}]}, TypeError, r"json.dumps\(row\)"),
    "too many replicas": (PerReplica([torch.tensor([0])] * 2), torch.ones(1), ValueError, r"2 value\(s\) at index"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_gathered_in_order_is_refused(name: str) -> None:
    index, outputs, error, words = BAD[name]
    with pytest.raises(error, match=words):
        tdi.Strategy(devices=["cpu"]).gather_ordered(index, outputs)


def test_replicas_must_bring_the_same_structure_and_their_own_values() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    index = PerReplica([torch.tensor([0]), torch.tensor([1])])
    with pytest.raises(ValueError, match=r"replica 0: float32\[batch, 2\]; replica 1: float32\[batch, 3\]"):
        strategy.gather_ordered(index, PerReplica([torch.ones(1, 2), torch.ones(1, 3)]))
    scores: Any = PerReplica([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    texts: Any = PerReplica([["a"], ["b"]])
    with pytest.raises(ValueError, match=r"replica 1: namedtuple\(score: int64\[batch\], text: list of rows\)"):
        strategy.gather_ordered(index, Pair(scores, texts))
    with pytest.raises(ValueError, match="a bare Tensor at outputs, and this process has 2 replicas"):
        strategy.gather_ordered(index, torch.ones(1))
    with pytest.raises(ValueError, match=r"the index of local replica 1 has 1 entries, and outputs has 2"):
        strategy.gather_ordered(index, PerReplica([torch.ones(1), torch.ones(2)]))


# Over real ranks


class Scored(NamedTuple):
    score: torch.Tensor
    name: list[str]


def outputs_of(numbers: torch.Tensor) -> dict[str, Any]:
    """Predictions for some samples: nested, with strings, numbers and None."""
    return {
        "scored": Scored(numbers[:, None] * torch.ones(1, 2, dtype=torch.float64), [f"s{n}" for n in numbers.tolist()]),
        "halves": [n / 2 if n else None for n in numbers.tolist()],
    }


def uneven(replicas: int) -> list[Any]:
    """One rank: only the second rank has rows, the others do not know what they look like; then none has any."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    numbers = torch.tensor([4, 0, 3])
    full = (numbers, outputs_of(numbers))
    empty = (torch.zeros(0, dtype=torch.int64), None)
    mine = [full if dist.get_rank() == 1 and replica == 0 else empty for replica in range(replicas)]
    index = PerReplica([pair[0] for pair in mine]) if replicas > 1 else mine[0][0]
    outputs = PerReplica([pair[1] for pair in mine]) if replicas > 1 else mine[0][1]
    found = strategy.gather_ordered(index, outputs)
    assert isinstance(found["scored"], Scored)
    none = strategy.gather_ordered(PerReplica([empty[0]] * replicas), PerReplica([None] * replicas))
    return [lists(found), none]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rank_without_rows_learns_from_the_others_what_they_look_like(replicas: int) -> None:
    for found in run_ranks(3, uneven, replicas):
        assert found == [lists(outputs_of(torch.tensor([0, 3, 4]))), None]


@dataclasses.dataclass
class Sharded:
    """Shards itself, as Hugging Face datasets do."""

    numbers: range

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.numbers[index::num_shards])


def pairs_of(data: Any, policy: str, size: int | None) -> list[tuple[int, int]]:
    """Each sample with its index, under a policy that gives ranks data of their own."""
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    options = tdi.InputOptions(with_index=True, auto_shard_policy=tdi.AutoShardPolicy[policy])
    dataset = strategy.distribute_dataset(data, options, global_batch_size=size)
    parts = [part for element in dataset for part in strategy.local_results(element)]
    return sorted(pair for index, part in parts for pair in zip(index.tolist(), part.tolist(), strict=True))


@dataclasses.dataclass
class Local:
    """An output class; on some ranks it is unknown."""

    x: torch.Tensor


def wrong_calls() -> list[Raised | None]:
    """One rank of two: what each wrong call raises here."""
    strategy, rank = tdi.Strategy(devices=["cpu"]), dist.get_rank()
    gather = strategy.gather_ordered
    index = torch.arange(2) + 2 * rank
    hidden = type("Hidden", (Local,), {})
    return [
        raised(lambda: gather(index - rank, torch.ones(2))),
        raised(lambda: gather(index, torch.ones(2 + rank))),
        raised(lambda: gather(index, torch.ones(2, 1 + rank))),
        raised(lambda: gather(index, torch.ones(2) if rank else {"x": torch.ones(2)})),
        raised(lambda: gather(index, ["a", object() if rank else "b"])),
        raised(lambda: gather(index if rank else index.float(), torch.ones(2))),
        raised(lambda: gather(index[:0] if rank else index, hidden(torch.ones(2)) if not rank else None)),
        raised(lambda: gather(index, torch.ones(2)) if rank else strategy.gather(torch.ones(2), 0)),
        raised(lambda: gather(index, torch.ones(2))),
    ]


def on_two_ranks() -> tuple[list[Raised | None], list[list[tuple[int, int]]]]:
    table = DataLoader(inputs.Table(range(9)), batch_size=2, shuffle=True, generator=inputs.generator())
    pairs = [
        pairs_of(Sharded(range(7)), "HINT", 3),
        pairs_of(Count(17), "OFF", 3),
        pairs_of(table, "HINT", None),
    ]
    return wrong_calls(), pairs


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    return run_ranks(2, on_two_ranks)


def test_where_ranks_have_data_of_their_own_the_index_names_the_rank(two_ranks: list[Any]) -> None:
    for rank, (_, found) in enumerate(two_ranks):
        numbers = [range(rank, 7, 2), range(17), range(rank, 9, 2)]
        assert found == [[(2**48 * rank + k, number) for k, number in enumerate(own)] for own in numbers]


def test_what_is_wrong_on_one_rank_is_raised_on_all_and_the_next_call_works(two_ranks: list[Any]) -> None:
    expected = [
        ("ValueError", r"found 1 index(es) more than once: 1 (replica 0, 1)"),
        ("ValueError", "rank 1: the index has 2 entries, and outputs has 3 rows"),
        ("ValueError", "replica 0: float32[batch, 1]; replica 1: float32[batch, 2]"),
        ("ValueError", "replica 0: dict(x: float32[batch]); replica 1: float32[batch]"),
        ("TypeError", "rank 1: gather_ordered found <object object"),
        ("TypeError", "rank 0: the index is of torch.float32"),
        ("BatchingError", "rank 1: this rank has seen no sample and cannot build the batch's dataclass"),
        ("RankDisagreement", "the ranks differ in calls"),
    ]
    for found, _ in two_ranks:
        assert [None if each is None else each.kind for each in found] == [*(kind for kind, _ in expected), None]
        for each, (_, words) in zip(found, expected, strict=False):
            assert each is not None
            assert words in each.message
