"""Epochs of files with enough steps for every kind of bookkeeping that is not done at each of them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.oracle.test_in_process import fake_strategy
from tests.support.collectives import FakeCollectives
from tests.support.resume import Delivered, Run, Saved, steps
from torchdistinput import readers
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import Exchange
from torchdistinput.testing import run_ranks

SMALL = (5, 0, 9, 3, 1, 7, 4, 2, 6, 1, 1, 8)
SIZES = (110, 5, 17, 0, 9, 3, 150, 1, 7, 4, 96, 12, 133, 2, 40, 5)
MIXED: dict[str, Any] = {"shuffle_files": True, "shuffle_buffer": 50, "cycle_length": 2, "block_length": 3}


def all_of(sizes: Sequence[int]) -> Counter[int]:
    return Counter(1000 * file + record for file, size in enumerate(sizes) for record in range(size))


ALL = all_of(SIZES)


def write(folder: Path, sizes: Sequence[int]) -> None:
    for file, size in enumerate(sizes):
        (folder / f"{file:02}.txt").write_text("".join(f"{1000 * file + record}\n" for record in range(size)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("files")
    write(path, SIZES)
    return str(path)


def files(folder: str, order: dict[str, Any]) -> tdi.FileDataset:
    return tdi.FileDataset(folder + "/*.txt", readers.text_lines, map_fn=int, seed=2, **order)


Recorded = tuple[list[Delivered], list[Saved]]


def read_on(
    strategy: tdi.Strategy, data: Any, saved: Saved | None, until: int | None, size: int | None = 4, **options: Any
) -> Recorded:
    """One rank: a part of the first epoch, and the state after each step."""
    dataset = strategy.distribute_dataset(data, tdi.InputOptions(**options), global_batch_size=size)
    run = Run(dataset, lambda batch: [batch.tolist()])
    with dataset:
        if saved is not None:
            run.load(saved)
        delivered, states = list[Delivered](), list[Saved]()
        for each in steps(run, until, epochs=1):
            delivered.append(each)
            states.append(run.save(len(delivered) + (saved.done if saved else 0)))
    return delivered, states


def among_threads(
    world: int, folder: str, order: dict[str, Any], saved: Saved | None = None, **options: Any
) -> list[Recorded]:
    ranks = FakeCollectives(world, timeout_seconds=20)
    found = ranks.run(lambda rank: read_on(fake_strategy(ranks, rank, 1), files(folder, order), saved, None, **options))
    assert not [each for each in found if isinstance(each, BaseException)], found
    return [each for each in found if not isinstance(each, BaseException)]


@pytest.mark.parametrize("world", [2, 4])
def test_the_state_after_each_step_of_a_long_epoch_is_the_same_on_all_ranks_and_right(world: int, folder: str) -> None:
    """A place that was forgotten once ended an epoch of four ranks early, and without a word."""
    kinds: list[tuple[str, int, dict[str, Any]]] = [
        *(("FILE", 0, {}), ("FILE", 1, MIXED), ("FILE", 5, {"cycle_length": 3}), ("DATA", 5, MIXED))
    ]
    for policy, prefetch, order in kinds:
        options: dict[str, Any] = {"auto_shard_policy": tdi.AutoShardPolicy[policy]}
        ranks = among_threads(world, folder, order, prefetch=prefetch, **options)
        for _, states in ranks:
            assert states == ranks[0][1]
        assert sum((records_of(delivered) for delivered, _ in ranks), Counter()) == ALL
        states = ranks[0][1]
        assert len(states) > 140
        for saved in (*states[62:66], states[-2]):
            again = among_threads(world, folder, order, saved, prefetch=2, **options)
            assert [delivered for delivered, _ in again] == [delivered[saved.done :] for delivered, _ in ranks]


def test_nothing_but_votes_is_exchanged_inside_an_epoch_of_files(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, gather = list[str](), Channel.gather

    def gathers(self: Channel, mine: str) -> Exchange[list[str]]:
        texts.append(mine)
        return (yield from gather(self, mine))

    def reads(rank: int) -> int:
        data = fake_strategy(ranks, rank, 1).distribute_dataset(
            files(folder, MIXED), tdi.InputOptions(prefetch=2), global_batch_size=4
        )
        next(iterator := iter(data))
        if rank == 0:
            monkeypatch.setattr(Channel, "gather", gathers)
        return 1 + sum(1 for _ in iterator)

    ranks = FakeCollectives(2, timeout_seconds=20)
    first, second = ranks.run(reads)
    assert (first == second, texts) == (True, [])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("order", [{}, MIXED], ids=["in order", "mixed"])
def test_from_each_step_of_many_small_files_each_record_comes_once_at_another_world(
    order: dict[str, Any], world: int, tmp_path: Path
) -> None:
    """Most batches open a file, and most states are of the middle of a batch."""
    write(tmp_path, SMALL)
    ranks = among_threads(world, str(tmp_path), order, prefetch=2)
    for saved in ranks[0][1]:
        parts = [delivered[: saved.done] for delivered, _ in ranks]
        parts += [delivered for delivered, _ in among_threads(5 - world, str(tmp_path), order, saved, prefetch=1)]
        assert sum(map(records_of, parts), Counter()) == all_of(SMALL), saved


def records_of(delivered: Sequence[Delivered]) -> Counter[int]:
    return Counter(itertools.chain(*(part for _, _, parts in delivered for part in parts)))


# ------------------------------------------------------------------------- what the oracle does not draw, on real ranks


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to read the files.

    Args:
      order: arguments of the ``FileDataset``.
      loader: arguments of a ``DataLoader``; ``None`` without one.
      options: further options.
    """

    order: dict[str, Any]
    loader: dict[str, Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def cost_of(line: str) -> float:
    return int(line) % 7


LASTING = {"num_workers": 2, "persistent_workers": True}
CASES = {
    "workers that persist": Case({"cycle_length": 2}, LASTING, {"prefetch": 0}),
    "by size": Case(MIXED, None, {"file_assignment": "by_size"}),
    "by size, in order, workers": Case({}, {"num_workers": 2}, {"file_assignment": "by_size"}),
    "by cost": Case(MIXED, None, {"balance": cost_of, "auto_shard_policy": tdi.AutoShardPolicy.DATA}),
    "by cost, workers": Case(
        MIXED, {"num_workers": 2}, {"balance": cost_of, "auto_shard_policy": tdi.AutoShardPolicy.DATA}
    ),
}


def play(folder: str, states: dict[str, Saved | None], until: int | None) -> dict[str, Recorded]:
    """One rank: each case for so many steps, or to the end, and then without loader workers."""
    strategy, found = tdi.Strategy(["cpu"]), {}
    for name, saved in states.items():
        case = CASES[name]
        data: Any = files(folder, case.order)
        if case.loader is not None:
            keeps = until is not None or "persist" in name
            data = DataLoader(data, batch_size=4, **(case.loader if keeps else {}))
        found[name] = read_on(strategy, data, saved, until, 4 if case.loader is None else None, **case.options)
    return found


def test_each_record_comes_once_from_world_to_world(folder: str) -> None:
    """Two ranks, and again from a state in the middle; from there three, then one."""
    first = run_ranks(2, play, folder, dict.fromkeys(CASES), 70)
    states = {name: first[0][name][1] for name in CASES}
    for rank in first:
        assert {name: rank[name][1] for name in CASES} == states
    middle: dict[str, Saved | None] = {name: states[name][30] for name in CASES}
    for rank, again in zip(first, run_ranks(2, play, folder, middle, 39), strict=True):
        assert {name: again[name][0] for name in CASES} == {name: rank[name][0][31:] for name in CASES}
    three = run_ranks(3, play, folder, middle, 20)
    (last,) = run_ranks(1, play, folder, {name: three[0][name][1][-1] for name in CASES}, None)
    for name in CASES:
        parts = [rank[name][0][:31] for rank in first] + [rank[name][0] for rank in (*three, last)]
        assert sum(map(records_of, parts), Counter()) == ALL, name


def test_a_state_grows_little_with_the_files_in_progress(folder: str) -> None:
    for order in ({}, MIXED, {"cycle_length": 5}):
        ((_, states), _) = among_threads(2, folder, order)
        most = 4 * order.get("cycle_length", 1)  # of two workers, each of which may have opened the next ones
        for saved in states:
            in_progress = len(re.findall(r'"[0-9a-f]{8}\\?"', saved.text))  # each has a mark
            assert in_progress <= most
            assert len(saved.text) - len(states[-1].text) < 64 * in_progress + 64, saved
