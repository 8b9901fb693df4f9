"""``explain()``: what the plan says of each kind of data, at worlds that do not run; its text is short."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.data import Mapped, Stream
from tests.oracle.test_in_process import fake_strategy
from tests.support.collectives import FakeCollectives
from torchdistinput.sources.kernel.explanation import Explanation

Policy = tdi.AutoShardPolicy


class Sized:
    """Fragments that know their sizes, and cannot be read."""

    def __init__(self, records: Sequence[int | None]) -> None:
        self.records = records

    def fragments(self) -> list[tdi.Fragment]:
        return [
            tdi.Fragment(f"part-{number}", num_records=count, num_bytes=None if count is None else 10 * count)
            for number, count in enumerate(self.records)
        ]

    def read(self, fragment: tdi.Fragment, position: Any) -> Iterator[tuple[Any, Sequence[int]]]:
        raise AssertionError(f"{fragment.name} was read")


def unread() -> Stream:
    return Stream(lambda: pytest.fail("it was read"))


def explained(data: Any, world_size: int, options: tdi.InputOptions | None = None, **more: Any) -> Explanation:
    with tdi.Strategy().distribute_dataset(data, options, **more) as loader:
        plan = loader.explain(world_size=world_size)
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()
    assert len(str(plan).splitlines()) <= 30
    return plan


def test_the_plan_of_map_style_data() -> None:
    data = TensorDataset(torch.arange(1000))
    plan = explained(DataLoader(data, batch_size=12, shuffle=True, num_workers=2), 5)
    assert (plan.policy, plan.world_size, plan.num_steps, plan.samples) == ("DATA", 5, 84, 1000)
    assert "AUTO chose it" in plan.policy_reason
    assert plan.read_twice.startswith("nothing")
    assert plan.loader_workers == 2
    assert ("TensorDataset.__getitem__ and collate_fn", "in the loader workers of each rank (2)") in plan.user_code
    assert "random states" in plan.state
    summed = explained(DataLoader(data, batch_size=12), 1, tdi.InputOptions(sums={"n": len}))
    assert ("sums (n)", "in the thread that calls next(), as in torch") in summed.user_code
    assert not plan.state_is_collective
    text = str(plan)
    for line in ("Ranks:       5", "Epoch 0:     84 steps, 1,000 samples"):
        assert line in text


@pytest.mark.parametrize(
    ("data", "world", "options", "fields", "lines"),
    [
        pytest.param(range(40), 3, {}, {"state_is_collective": False, "kind": None}, [], id="plain"),
        pytest.param(
            range(10), 3, {"auto_shard_policy": Policy.OFF}, {"num_steps": 10, "samples": 30}, ["30 samples"], id="off"
        ),
        pytest.param(
            range(10),
            3,
            {"coordination": "off"},
            {"state_is_collective": False},
            ["anything, as coordination is off", "State:       none: "],
            id="alone",
        ),
        pytest.param(range(9), 1, {"prefetch": 0}, {}, ["Read ahead:  no step: each is made"], id="nothing ahead"),
        pytest.param(unread(), 1, {}, {}, ["Read twice:  cannot be known: an iterable is read whole by each"], id="2"),
        pytest.param(
            unread(), 3, {}, {}, ["everything: each rank reads all. Within a rank it cannot be known"], id="2 of 3"
        ),
    ],
)
def test_the_plan_tells_what_the_options_make_of_it(
    data: Any, world: int, options: dict[str, Any], fields: dict[str, Any], lines: list[str]
) -> None:
    loader = DataLoader(data, batch_size=3, num_workers=2 if isinstance(data, Stream) else 0)
    plan = explained(loader, world, tdi.InputOptions(**options))
    assert {name: getattr(plan, name) for name in fields} == fields
    for line in lines:
        assert line in str(plan)


def test_the_plan_of_ready_batches_counts_them_and_speaks_of_no_collate_function() -> None:
    plan = explained([torch.zeros(8)] * 10, 1)
    assert (plan.num_steps, plan.samples, plan.batch_size, plan.unknown) == (10, None, None, "")
    assert plan.user_code == (("list.__iter__", "in the thread that calls next(), as in torch"),)
    assert "an iterable of ready batches" in plan.data
    assert "that its code may have drawn from" in plan.state
    assert "no random states" in explained([torch.zeros(8)] * 10, 3).state


def test_what_the_ranks_compare_is_not_told_to_be_unchecked() -> None:
    assert explained(TensorDataset(torch.arange(9)), 2, global_batch_size=3).unchecked == ()
    (told,) = explained(Mapped(9, int), 2, global_batch_size=3).unchecked
    assert "whether an index is the same sample on each rank" in told


def test_a_policy_that_was_set_has_no_further_reason() -> None:
    none = tdi.InputOptions(prefetch=0)
    with tdi.DataLoader(TensorDataset(torch.arange(9)), batch_size=3, options=none) as loader:
        assert loader.explain().policy_reason == "one rank reads everything"
        assert "no step" in loader.explain().read_ahead


def test_the_plan_of_files_tells_who_reads_what() -> None:
    data = tdi.FragmentDataset(Sized([8, 3, 5, 1]))
    plan = explained(data, 2, tdi.InputOptions(prefetch=3), global_batch_size=4)
    assert plan.policy == "FILE"
    assert [(each.fragments, each.num_bytes, each.records) for each in plan.shares] == [(2, 130, 13), (2, 40, 4)]
    assert plan.shares[1].first == ("part-1", "part-3")
    assert (plan.num_steps, plan.samples) == (7, 17)
    assert plan.read_ahead == "3 steps of any size (prefetch=3)"
    assert "Rank 1:      2 fragments, 40 bytes, 4 records: part-1, part-3" in str(plan)
    small = explained(data, 2, global_batch_size=1)
    assert (small.num_steps, small.samples) == (None, 17)
    assert "the number of steps is not known, 17 samples: a batch has fewer samples than" in str(small)
    by_data = explained(data, 2, tdi.InputOptions(auto_shard_policy=Policy.DATA), global_batch_size=4)
    assert (by_data.num_steps, by_data.shares) == (5, ())
    assert by_data.policy_reason == "each rank takes its parts of the same global batches"
    assert "into 64.0 MiB" in by_data.read_ahead
    unknown = explained(tdi.FragmentDataset(Sized([8, None])), 2, global_batch_size=4)
    assert (unknown.num_steps, unknown.samples) == (None, None)
    assert "number of records of each fragment is not known" in unknown.unknown
    with pytest.raises(tdi.ShardingError, match="5 ranks"):
        explained(data, 5, global_batch_size=4)


def test_the_plan_of_many_files_is_short() -> None:
    plan = explained(tdi.FragmentDataset(Sized([7] * 30_000 + [9]), shuffle_fragments=True), 500, global_batch_size=512)
    text = str(plan)
    assert len(text.splitlines()) < 20
    assert "Most reads:" in text
    assert max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize(
    ("policy", "world", "twice", "collective", "any_world"),
    [
        (Policy.DATA, 1, "nothing", False, True),
        (Policy.DATA, 3, "everything", False, True),
        (Policy.OFF, 3, "everything", True, False),
    ],
)
def test_the_plan_of_an_iterable(policy: Policy, world: int, twice: str, collective: bool, any_world: bool) -> None:
    options = tdi.InputOptions(auto_shard_policy=policy)
    plan = explained(unread(), world, options, global_batch_size=4)
    assert plan.num_steps is None
    assert "no end that is known" in plan.unknown
    assert plan.read_twice.startswith(twice)
    assert plan.state_is_collective is collective
    assert ("any number of ranks" in plan.state) is any_world


def test_the_plan_of_a_dataset_function_says_that_nothing_is_checked() -> None:
    loader = tdi.Strategy().distribute_datasets_from_function(lambda _: [torch.arange(3)])
    plan = loader.explain(world_size=2)
    assert plan.policy == "OFF"
    assert "dataset function has divided" in plan.policy_reason
    assert plan.state_is_collective
    assert plan.unchecked
    assert list(plan.to_json()) == list(explained(unread(), 1, global_batch_size=2).to_json())


def test_a_plan_of_running_ranks_is_theirs_and_is_local() -> None:
    collectives = FakeCollectives(2, timeout_seconds=10.0)

    def play(rank: int) -> Explanation | None:
        strategy = fake_strategy(collectives, rank, 2)
        with strategy.distribute_dataset(DataLoader(TensorDataset(torch.arange(9)), batch_size=4)) as loader:
            return loader.explain() if rank else None  # one rank alone

    _, plan = collectives.run(play, timeout_seconds=20.0)
    assert isinstance(plan, Explanation)
    assert (plan.world_size, plan.num_replicas) == (2, 4)


def test_a_plan_opens_no_file(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.npy").write_bytes(b"no array")
    plan = explained(tdi.FileDataset(str(tmp_path / "*.npy"), tdi.readers.npy_rows), 3, global_batch_size=2)
    assert [each.num_bytes for each in plan.shares] == [8, 8, 8]
