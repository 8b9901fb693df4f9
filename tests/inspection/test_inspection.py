"""``samples_of`` and ``steps_of`` of mixtures, packs, costs and own samplers (the rest: ``oracle``); ``explain()``."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import torchdistinput as tdi
from tests.data import Fragments, Mapped, Order, Repeated, Stream
from tests.oracle.laws import interleaved
from tests.oracle.test_in_process import fake_strategy
from tests.support.collectives import FakeCollectives
from torchdistinput.sources.kernel.epoch_order import FileRecord, PackOf, SourceSample
from torchdistinput.sources.kernel.explanation import Explanation
from torchdistinput.testing import run_ranks


def numbers(length: int, first: int = 0) -> Mapped:
    """Map-style: sample ``i`` is ``first + i``."""
    return Mapped(length, first.__add__)


def fragments(sizes: Sequence[int], first: int = 0) -> Fragments:
    """Record ``r`` of fragment ``f`` is ``first + 100 * f + r``."""
    return Fragments({first + 100 * number: size for number, size in enumerate(sizes)})


def number_of(sample: Any) -> int:
    """What the datasets above make of a sample."""
    if isinstance(sample, SourceSample):
        return number_of(sample.sample) + (1000 * int(sample.source) if isinstance(sample.sample, int) else 0)
    return int(sample.file) + sample.record if isinstance(sample, FileRecord) else int(sample)


def check_delivered(world: int, replicas: int, make: Any, epochs: int = 2) -> None:
    """Checks that what is told is what is delivered, at a world size, and that both directions agree."""
    collectives = FakeCollectives(world, timeout_seconds=20.0)

    def play(rank: int) -> None:
        strategy = fake_strategy(collectives, rank, replicas)
        with make(strategy) as loader:
            for epoch in range(epochs):
                for element in loader:
                    told = loader.samples_of(epoch, loader.step.index, rank)
                    pieces = [piece.tolist() for piece in strategy.local_results(element)]
                    assert [[number_of(each) for each in part.samples] for part in told.parts] == pieces
                    for part in told.parts:
                        for sample in part.samples:
                            assert (told.step, rank, part.replica) in loader.steps_of(sample, epoch)
                with pytest.raises(ValueError, match="step is"):
                    loader.samples_of(epoch, loader.step.index + 1)

    for each in collectives.run(play, timeout_seconds=40.0):
        if isinstance(each, BaseException):
            raise each


def random_mixture(draw: random.Random) -> Any:
    sources: dict[str, Any] = {}
    for number in range(1, draw.randint(2, 4) + 1):
        if draw.random() < 0.5:
            sources[str(number)] = numbers(draw.randint(1, 40), 1000 * number)
            continue
        sources[str(number)] = tdi.FragmentDataset(
            fragments([draw.randint(1, 9) for _ in range(draw.randint(1, 4))], 1000 * number),
            shuffle_fragments=draw.random() < 0.5,
            shuffle_buffer=draw.choice([0, 3]),
            cycle_length=draw.choice([1, 2]),
        )
    weights = {name: draw.choice([0.1, 0.5, 1, 2]) for name in sources}
    stop: Any = draw.choice(["first", "all", "repeat"])
    return tdi.Mixture(
        sources,
        weights,
        stop=stop,
        seed=draw.randint(0, 99),
        num_samples=77 if stop == "repeat" else None,
    )


def test_what_is_told_of_mixtures_is_what_is_delivered(all_cells: bool) -> None:
    for seed in range(200 if all_cells else 9):
        draw = random.Random(seed)
        state = draw.getstate()

        def make(strategy: tdi.Strategy, draw: random.Random = draw, state: Any = state) -> Any:
            own = random.Random()
            own.setstate(state)
            mixture, batch = random_mixture(own), own.randint(1, 9)
            return strategy.distribute_dataset(mixture, global_batch_size=batch)

        check_delivered(1 + seed % 3, 1 + seed % 2, make)


@pytest.mark.parametrize("equal_counts", [False, True])
def test_who_gets_which_sample_of_a_batch_divided_by_cost(equal_counts: bool) -> None:
    costs = np.random.default_rng(1).integers(1, 50, 41)

    def make(strategy: tdi.Strategy) -> Any:
        options = tdi.InputOptions(balance=tdi.Balance(costs, equal_counts=equal_counts))
        sampler = tdi.ShuffleSampler(41, 3, block=4, window=2)
        return strategy.distribute_dataset(DataLoader(numbers(41), batch_size=9, sampler=sampler), options)

    for world, replicas in ((1, 2), (2, 1), (3, 2)):
        check_delivered(world, replicas, make)


def test_packs_are_told_with_their_samples() -> None:
    lengths = [random.Random(0).randint(1, 9) for _ in range(60)]
    texts = [torch.full((length,), number) for number, length in enumerate(lengths)]
    packs = tdi.Packed(texts, 16, lengths=lengths, pad=-1)
    loader = tdi.DataLoader(packs, batch_size=4, shuffle=True)
    for batch in loader:
        told = loader.samples_of(0, loader.step.index)
        for tokens, pack in zip(batch["tokens"], told.samples, strict=True):
            assert isinstance(pack, PackOf)
            inside = [item.sample for item in pack.items for _ in range(item.start, item.stop)]
            assert tokens[tokens >= 0].tolist() == inside
            assert loader.steps_of(pack, 0) == loader.steps_of(pack.pack, 0) == [(told.step, 0, 0)]


@pytest.mark.parametrize("kind", ["shuffle", "generator", "token batches", "drop-in"])
def test_looking_up_draws_again_and_moves_nothing(kind: str) -> None:
    """Steps of this epoch and of the next are looked up at each step; what is delivered does not change by it."""

    def deliver(*, look: bool) -> list[list[int]]:
        torch.manual_seed(5)
        data, generator = numbers(30), torch.Generator().manual_seed(1) if kind == "generator" else None
        own = torch.Generator().manual_seed(3)
        batches = tdi.TokenBatchSampler(RandomSampler(data, generator=own), list(range(30)), 50, padded=True)
        more: dict[str, Any] = {"batch_size": 4, "shuffle": True, "generator": generator}
        if kind == "token batches":
            more = {"batch_sampler": batches}
        loader: Any = tdi.DataLoader(data, **more)
        if kind != "drop-in":
            loader = tdi.Strategy().distribute_dataset(DataLoader(data, **more))
        found: list[list[int]] = []
        next_epoch: list[list[int]] = []
        coming: list[list[int]] = []
        for epoch in range(3):
            for batch in loader:
                found.append(batch.tolist())
                if look:
                    before = torch.get_rng_state(), own.get_state()
                    told = loader.samples_of(epoch, loader.step.index)
                    assert list(told.samples) == batch.tolist()
                    assert loader.steps_of(told.samples[0], epoch) == [(loader.step.index, 0, 0)]
                    assert epoch == 0 or next_epoch[loader.step.index] == batch.tolist()
                    if loader.step.index == told.num_steps - 2:
                        steps = range(loader.samples_of(epoch + 1, 0).num_steps)
                        coming = [list(loader.samples_of(epoch + 1, step).samples) for step in steps]
                    assert "drawn again by a copy" in told.notes[0]
                    assert torch.equal(before[0], torch.get_rng_state())
                    assert torch.equal(before[1], own.get_state())
            next_epoch = coming if look else []
        return found

    assert deliver(look=True) == deliver(look=False)


def lines_in(folder: Path, **more: Any) -> tdi.FileDataset:
    for number in range(3):
        (folder / f"{number}.txt").write_text("".join(f"{number}{line}\n" for line in range(4)))
    return tdi.FileDataset(str(folder / "*.txt"), tdi.readers.text_lines, **more)


UNKNOWN: dict[str, tuple[Any, str]] = {
    "an iterable": (lambda _: tdi.DataLoader(Repeated(9), batch_size=2), "only it knows.*FragmentSource"),
    "a dataset function": (
        lambda _: tdi.Strategy().distribute_datasets_from_function(lambda _: [torch.arange(3)]),
        "a dataset function",
    ),
    "files that do not tell their records": (lambda folder: tdi.DataLoader(lines_in(folder), batch_size=2), "npy_rows"),
    "flat_map_fn": (
        lambda folder: tdi.DataLoader(lines_in(folder, flat_map_fn=lambda line: [line] * 2), batch_size=2),
        "flat_map_fn makes any number",
    ),
    "records that are batches": (
        lambda folder: tdi.DataLoader(lines_in(folder), batch_size=None),
        "each record is a batch",
    ),
    "costs of records": (
        lambda folder: tdi.DataLoader(lines_in(folder), batch_size=2, options=tdi.InputOptions(balance=len)),
        "balance= is",
    ),
    "shares of tokens": (
        lambda _: tdi.DataLoader(
            tdi.Mixture({"a": numbers(9)}, {"a": 1}, unit="tokens", lengths={"a": [1] * 9}), batch_size=2
        ),
        "shares of the mixture are of tokens",
    ),
    "a sampler of the user's": (
        lambda _: tdi.DataLoader(numbers(9), batch_size=2, sampler=Order(9, lambda _: range(9))),
        "a Order draws the order.*ShuffleSampler",
    ),
    "items that are batches": (lambda _: tdi.DataLoader(numbers(9), batch_size=None), "batch_size=None"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_cannot_be_told_is_a_named_error_with_the_way_out(case: str, tmp_path: Path) -> None:
    make, message = UNKNOWN[case]
    with make(tmp_path) as loader:
        for ask in (loader.samples_of, loader.steps_of):
            with pytest.raises(tdi.InputError, match=message) as caught:
                ask(0, 0)
            assert len(str(caught.value)) < 400


BAD: dict[str, tuple[Any, str]] = {
    "a step beyond the end": (lambda loader: loader.samples_of(0, 3), r"step is 3, and epoch 0 has 3 step\(s\)"),
    "a negative step": (lambda loader: loader.samples_of(0, -1), "step is -1"),
    "an epoch": (lambda loader: loader.samples_of(-1, 0), "epoch is -1"),
    "a rank": (lambda loader: loader.samples_of(0, 0, rank=2, world_size=2), "rank is 2, and there are 2"),
    "a world size": (lambda loader: loader.samples_of(0, 0, world_size=0), "world_size is 0"),
    "a sample": (lambda loader: loader.steps_of(9, 0), "found the sample 9; an index from 0 to 8"),
    "a plan": (lambda loader: loader.explain(world_size=True), "world_size is True"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_questions_are_refused(case: str) -> None:
    ask, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        ask(tdi.DataLoader(numbers(9), batch_size=4, sampler=tdi.ShuffleSampler(9, 0)))


def test_files_that_know_their_records_are_told_by_name_and_record(tmp_path: Path) -> None:
    lines_in(tmp_path)
    two = tdi.readers.fixed_length_records(3)  # each line, with its end
    files = tdi.FileDataset(str(tmp_path / "*.txt"), two, map_fn=lambda line: line.decode().strip(), shuffle_files=True)
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE)
    loader = tdi.DataLoader(files, batch_size=5, options=options)
    for batch in loader:
        told = loader.samples_of(0, loader.step.index)
        assert [f"{Path(each.file).stem}{each.record}" for each in told.samples] == batch
        for file, record in told.samples:
            number = files.names.index(file) * 2**40 + record  # as with_index=True
            assert [each.step for each in loader.steps_of(number, 0)] == [told.step]
    with pytest.raises(tdi.ShardingError, match="4 ranks"):
        loader.samples_of(0, 0, world_size=4)
    with pytest.raises(ValueError, match="found the sample"):
        loader.steps_of((files.names[0], 4), 0)


def test_an_epoch_of_files_that_were_dealt_anew_is_refused() -> None:
    def make(strategy: tdi.Strategy) -> Any:
        return strategy.distribute_dataset(tdi.FragmentDataset(fragments([3, 5, 4])), global_batch_size=4)

    states: list[Any] = []
    collectives = FakeCollectives(2, timeout_seconds=20.0)

    def play(rank: int) -> None:
        with make(fake_strategy(collectives, rank, 1)) as loader:
            next(iter(loader))
            states.append(loader.state_dict())

    collectives.run(play, timeout_seconds=40.0)
    with make(tdi.Strategy(devices=["cpu"])) as loader:
        loader.load_state_dict(states[0])
        for _ in range(2):
            with pytest.raises(tdi.InputError, match="resumed at another number of ranks"):
                loader.samples_of(0, 0)
            assert loader.samples_of(0, 0, world_size=2).num_steps
            assert loader.samples_of(1, 0).num_steps == 3
            next(iter(loader))


def test_any_step_of_a_trillion_samples_is_found() -> None:
    count = 10**12
    for sampler in (tdi.ShuffleSampler(count, 1), tdi.ShuffleSampler(count, 1, block=1000, window=10), None):
        loader = tdi.DataLoader(numbers(count), batch_size=256, sampler=sampler)
        told = loader.samples_of(7, 3 * 10**9, rank=5, world_size=8)
        assert len(told.samples) == 32


def test_interleaved_records_are_found_from_either_end() -> None:
    draw = random.Random(0)
    for _ in range(200):
        counts = [draw.randrange(7) for _ in range(draw.randrange(1, 8))]
        cycle, block = draw.randrange(1, 5), draw.randrange(1, 4)
        files = [[100 * file + record for record in range(count)] for file, count in enumerate(counts)]
        right = interleaved(files, cycle, block)
        if min(cycle, len(counts)) == 1:  # one slot has one turn without end
            right = [number for file in files for number in file]
        data = tdi.FragmentDataset(fragments(counts), cycle_length=cycle, block_length=block)
        order = data.epoch_order(0)
        assert len(order) == len(right)
        for _ in range(4):  # some go on where the last one stopped
            lo = draw.randrange(len(order) + 1)
            middle, hi = sorted(draw.randrange(lo, len(order) + 1) for _ in range(2))
            assert [*map(number_of, [*order.between(lo, middle), *order.between(middle, hi)])] == right[lo:hi]


def test_a_mixture_without_an_end_is_told_by_steps_only() -> None:
    endless = tdi.Mixture({"1": numbers(3, 1000), "2": numbers(2, 2000)}, {"1": 2, "2": 1}, stop="repeat")
    with tdi.DataLoader(endless, batch_size=4) as loader:
        assert [[number_of(each) for each in loader.samples_of(0, step).samples] for step in (0, 1)] == [
            batch.tolist() for batch in islice(loader, 2)
        ]
        with pytest.raises(tdi.InputError, match="has no end.*num_samples"):
            loader.steps_of(("1", 1), 0)


@pytest.mark.parametrize("more", [{}, {"block": 7, "window": 3}])
@pytest.mark.parametrize("length", [1, 4097, 100_000])
def test_a_sample_far_away_in_a_shuffle_is_found(length: int, more: dict[str, int]) -> None:
    with tdi.DataLoader(numbers(length), batch_size=10, sampler=tdi.ShuffleSampler(length, 3, **more)) as loader:
        for step in {0, -(-length // 10) // 2, -(-length // 10) - 1}:
            for sample in loader.samples_of(1, step).samples[::9]:
                assert [each.step for each in loader.steps_of(sample, 1)] == [step]


def tell_and_read() -> None:
    """One rank: a loader that draws from torch's default state, which rank 0 knows."""
    loader = tdi.DataLoader(numbers(23), batch_size=6, shuffle=True)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    for epoch in range(2):
        for batch in loader:
            told = loader.samples_of(epoch, loader.step.index)
            assert list(told.parts[rank].samples) == batch.tolist()
            assert told.global_size == loader.step.global_size


def test_ranks_tell_what_they_read() -> None:
    run_ranks(2, tell_and_read)


# ------------------------------------- ``explain()``: the plan of each kind of data, at worlds that do not run

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
    assert all(line in str(plan) for line in ("Ranks:       5", "Epoch 0:     84 steps, 1,000 samples"))


@pytest.mark.parametrize(
    ("data", "world", "options", "fields"),
    [
        pytest.param(range(40), 3, {}, {"state_is_collective": False, "kind": None}, id="plain"),
        pytest.param(
            range(10), 3, {"auto_shard_policy": Policy.OFF}, {"num_steps": 10, "samples": 30, "policy": "OFF"}, id="off"
        ),
        pytest.param(
            range(10),
            3,
            {"coordination": "off"},
            {"state_is_collective": False, "unchecked": ["anything, as coordination is off"], "state": "none: "},
            id="alone",
        ),
        pytest.param(range(9), 1, {"prefetch": 0}, {"read_ahead": "no step"}, id="nothing ahead"),
        pytest.param(unread(), 1, {}, {"read_twice": "cannot be known", "loader_workers": 2}, id="2"),
        pytest.param(unread(), 3, {}, {"read_twice": "everything: each rank reads all. "}, id="2 of 3"),
    ],
)
def test_the_plan_tells_what_the_options_make_of_it(
    data: Any, world: int, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    loader = DataLoader(data, batch_size=3, num_workers=2 if isinstance(data, Stream) else 0)
    plan = explained(loader, world, tdi.InputOptions(**options)).to_json()
    for name, value in fields.items():
        assert plan[name].startswith(value) if isinstance(value, str) else plan[name] == value, (name, plan[name])


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
    assert "a batch has fewer samples than" in small.unknown
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
