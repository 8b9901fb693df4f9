"""Resuming on real ranks: at other worlds, again and again, what comes is what one undisturbed process gets."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchdistinput as tdi
from tests.support import inputs
from tests.support.cells import cells
from tests.support.epochs import Raised, lists, raised
from tests.support.resume import (
    OTHER_SEED,
    SEED,
    Delivered,
    Run,
    Saved,
    Setting,
    cut,
    iterables_may_be_skipped,
    known,
    one_process,
    run_of,
    steps,
)
from torchdistinput.testing import run_ranks

WORLDS = (1, 2, 3)
EPOCHS = 2
NAMES = list(inputs.LOADERS)
OPAQUE = {"iterable", "iterable that shards itself"}
"""Their loader workers make the batches, so their number stays."""
BY_DEFAULT = "shuffled by torch.manual_seed only"
DRAWN_BY_DEFAULT = {BY_DEFAULT, "own collate function", "dicts with strings", "tensors"}
"""Their order is drawn from torch's default random state, which several ranks share from their first epoch on."""

# --------------------------------------------------------------------------------- from world to world to world


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a run.

    Args:
      name: of the input.
      setting: how it is read.
      until: how many steps; ``None``: to the end of the last epoch.
      saved: where it begins.
    """

    name: str
    setting: Setting
    until: int | None
    saved: Saved | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run in three parts, each in a world of its own: where it is left, how it is read there."""

    name: str
    worlds: Sequence[int]
    settings: Sequence[Setting]
    lengths: Sequence[int | None]


def play(folder: str, parts: list[Part]) -> list[tuple[list[Delivered], Saved]]:
    """One rank: what each part delivered, and its state then."""
    found = []
    with iterables_may_be_skipped():
        for part in parts:
            torch.manual_seed(SEED if part.saved is None else OTHER_SEED + dist.get_rank())
            run = run_of(known(part.name, Path(folder)), part.setting)
            done = 0
            if part.saved is not None:
                run.load(part.saved)
                done = part.saved.done
            delivered = list(steps(run, until=part.until, epochs=EPOCHS))
            found.append((delivered, run.save(done + len(delivered))))
            run.loader.close()
    return found


def plans(everything: bool) -> Iterator[Plan]:
    """Every input, with worlds, read-ahead, loader workers and places to stop that rotate."""
    orders = [(1, 2, 3), (2, 3, 1), (3, 1, 2), (2, 1, 2), (3, 2, 3), (2, 2, 2)]
    workers: list[Sequence[dict[str, Any]]] = [
        ({}, {}, {}),
        ({"num_workers": 2}, {}, {"num_workers": 1}),
        ({"num_workers": 2, "persistent_workers": True},) * 3,
    ]
    rotating: dict[str, Sequence[Any]] = {
        "worlds": orders,
        "workers": workers,
        "replicas": [(0, 1, 2), (2, 0, 1), (1, 2, 0)],
    }
    rng = random.Random(1)
    for name, chosen in cells(NAMES, rotating, everything=everything, seed=2):
        of_workers = [chosen["workers"][0]] * 3 if name in OPAQUE else chosen["workers"]
        settings = [Setting(rng.randrange(3), rng.choice((0, 1, 2, 5)), more) for more in of_workers]
        lengths = (rng.randrange(name in DRAWN_BY_DEFAULT, 7), rng.randrange(6), None)
        yield Plan(name, chosen["worlds"], settings, lengths)


def before_the_first_epoch(folder: str) -> list[list[int]]:
    """One rank: the parts of an epoch from a state that was saved before any was begun, by another seed."""
    run = run_of(known(BY_DEFAULT, Path(folder)), Setting(1, 0, {}))
    saved = run.save(0)
    torch.manual_seed(OTHER_SEED + dist.get_rank())
    run.load(saved)
    with run.loader:
        return [batch.tolist() for batch in run.loader]


def test_a_state_of_several_ranks_before_their_first_epoch_holds_no_default_random_state(tmp_path: Path) -> None:
    """No rank but the first knows from which state the epoch would be drawn: it is that of the next ``iter``."""
    inputs.write_numbers(tmp_path)
    parts = run_ranks(2, before_the_first_epoch, str(tmp_path))
    torch.manual_seed(OTHER_SEED)
    expected = [batch.tolist() for batch in known(BY_DEFAULT, tmp_path)(torch.utils.data.DataLoader)]
    assert [one + other for one, other in zip(*parts, strict=True)] == expected


def test_runs_go_on_from_world_to_world_as_in_one_process(all_cells: bool, tmp_path: Path) -> None:
    """Every input of ``inputs.LOADERS``; each rank of a fresh group has another default seed."""
    inputs.write_numbers(tmp_path)
    todo = list(plans(all_cells))
    whole = [undisturbed(plan, tmp_path) for plan in todo]
    delivered: list[list[Delivered]] = [[] for _ in todo]
    expected: list[list[Delivered]] = [[] for _ in todo]
    states: list[Saved | None] = [None] * len(todo)
    for number in range(3):
        by_world: dict[int, list[int]] = defaultdict(list)
        for place, plan in enumerate(todo):
            by_world[plan.worlds[number]].append(place)
        for world, places in by_world.items():
            parts = [
                Part(plan.name, plan.settings[number], plan.lengths[number], states[place])
                for place in places
                for plan in [todo[place]]
            ]
            ranks = run_ranks(world, play, str(tmp_path), parts, timeout_seconds=120 if not all_cells else 900)
            for place, *found in zip(places, *ranks, strict=True):
                before = len(delivered[place])
                delivered[place] += together([each for each, _ in found])
                saved = {each for _, each in found}
                assert len(saved) == 1, (todo[place], "the ranks' states differ", saved)
                states[place] = saved.pop()
                batches = whole[place][before : len(delivered[place])]
                expected[place] += cut(batches, world * max(1, todo[place].settings[number].replicas))
    for place, plan in enumerate(todo):
        assert delivered[place] == expected[place], plan
        assert len(delivered[place]) == len(whole[place]), plan


def together(ranks: Sequence[list[Delivered]]) -> list[Delivered]:
    """The parts of all replicas of all ranks, in order."""
    return [
        (epoch, step, [part for _, _, parts in of_ranks for part in parts])
        for of_ranks in zip(*ranks, strict=True)
        for epoch, step, _ in of_ranks[:1]
    ]


def undisturbed(plan: Plan, folder: Path) -> list[tuple[int, int, Any]]:
    """The batches of torch's loader in this process, read as the first part is."""
    torch.manual_seed(SEED)
    more = {} if plan.name == "files" else plan.settings[0].more  # torch deals their records out to its workers
    return one_process(known(plan.name, folder), more, EPOCHS)


class Augmented(Dataset[tuple[int, int]]):
    """Each sample with its seed for random augmentation."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, tdi.sample_seed()


def augmented(saved: Saved | None, until: int | None) -> tuple[list[list[list[int]]], Saved]:
    """One rank, seeded differently in each process: a part of the run, and its state then."""
    torch.manual_seed((SEED if saved is None else OTHER_SEED) + dist.get_rank())
    run = run_of(lambda cls, **more: cls(Augmented(), batch_size=4, shuffle=True, **more), Setting(1, 2))
    if saved is not None:
        run.load(saved)
    found = [parts[0] for _, _, parts in steps(run, until=until)]
    return found, run.save(len(found))


def test_the_seeds_of_the_samples_are_those_of_the_run_that_was_left() -> None:
    def joined(ranks: Any) -> list[list[list[int]]]:
        rows = zip(*(found for found, _ in ranks), strict=True)
        return [[[*chain(*(part[leaf] for part in row))] for leaf in range(2)] for row in rows]

    whole = joined(run_ranks(2, augmented, None, None))
    start = run_ranks(3, augmented, None, 6)
    assert len({saved for _, saved in start}) == 1
    assert joined(start) + joined(run_ranks(2, augmented, start[0][1], None)) == whole


# ------------------------------------------------------------------------- states of one world, loaded in another


@dataclasses.dataclass(frozen=True)
class Half(IterableDataset[int]):
    """A shard of the numbers 0 .. n-1, or all of them; ``shard`` as in Hugging Face datasets."""

    n: int
    index: int = 0
    of: int = 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.index, self.n, self.of))

    def shard(self, num_shards: int, index: int) -> Half:
        return Half(self.n, index, num_shards)


class Counting(IterableDataset[int]):
    """The numbers of one worker, with a state of its own."""

    def __init__(self, worker: int = 0, of: int = 1) -> None:
        self.worker, self.of, self.next = worker, of, 0
        self.made = 0

    def __iter__(self) -> Iterator[int]:
        while (number := self.worker + self.of * self.next) < 19:
            self.next += 1
            self.made += 1
            yield number
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "worker": self.worker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]
        assert state["worker"] == self.worker

    def shard(self, num_shards: int, index: int) -> Counting:
        return Counting(index, num_shards)


def run_from(kind: str, **options: Any) -> Run:
    """One rank: a run over data that is this worker's own, or over a state that is."""
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=options.pop("timeout_seconds", 60))
    hint, data = tdi.AutoShardPolicy.HINT, tdi.AutoShardPolicy.DATA

    def plain(context: tdi.InputContext) -> Any:
        return DataLoader(Half(19, context.input_pipeline_id, context.num_input_pipelines), batch_size=2)

    def own(context: tdi.InputContext) -> Any:
        return DataLoader(Counting(context.input_pipeline_id, context.num_input_pipelines), batch_size=2)

    if kind.startswith("function"):
        dataset = strategy.distribute_datasets_from_function(
            own if "own" in kind else plain, tdi.InputOptions(**options)
        )
    elif "map" in kind:
        loader = DataLoader(inputs.Table(range(20)), batch_size=4, shuffle=True, generator=inputs.generator())
        off = tdi.AutoShardPolicy.OFF
        chosen = tdi.InputOptions(auto_shard_policy=hint if "hint" in kind else off, **options)
        dataset = strategy.distribute_dataset(loader, chosen)
    else:
        source: Any = Counting() if "own" in kind else Half(19)
        chosen = tdi.InputOptions(auto_shard_policy=hint if "hint" in kind else data, **options)
        dataset = strategy.distribute_dataset(source, chosen, global_batch_size=4)
    return Run(dataset, lambda batch: [lists(batch)])


BOUND = ("function", "function, own state", "hint", "hint, own state", "hint, map-style", "off, map-style")
FREE = ("data", "data, own state")
KINDS = (*BOUND, *FREE)


def read_with_states(kinds: Sequence[str]) -> dict[str, tuple[list[Delivered], list[Saved]]]:
    """One rank: two epochs of each kind, and the states; every rank takes them together."""
    found = {}
    for kind in kinds:
        run = run_from(kind)
        delivered: list[Delivered] = []
        states = [run.save(0)]
        for _ in range(2):
            for element in run.loader:
                delivered.append((run.loader.step.epoch, run.loader.step.index, run.parts(element)))
                states.append(run.save(len(delivered)))
            states.append(run.save(len(delivered)))
        found[kind] = delivered, states
        run.loader.close()
    return found


def go_on(states: dict[str, list[Saved]]) -> dict[str, list[list[Delivered] | Raised]]:
    """One rank: what comes after each state, or what is raised."""
    found: dict[str, list[list[Delivered] | Raised]] = {}
    with iterables_may_be_skipped():
        for kind, of_kind in states.items():
            found[kind] = []
            for saved in of_kind:
                run = run_from(kind)
                refused = raised(lambda: run.load(saved))  # noqa: B023
                found[kind].append(list(steps(run, epochs=2)) if refused is None else refused)
                run.loader.close()
    return found


def test_data_that_differs_from_worker_to_worker_goes_on_at_the_same_world_and_nowhere_else() -> None:
    """Dataset functions, HINT, and states of the user's own; plain iterables under DATA go on in any world."""
    recorded = run_ranks(2, read_with_states, KINDS)
    for kind in KINDS:
        assert recorded[1][kind][1] == recorded[0][kind][1], kind
    states = {kind: recorded[0][kind][1][number % 3 :: 3] for number, kind in enumerate(KINDS)}
    for rank, found in enumerate(run_ranks(2, go_on, states)):
        for kind in KINDS:
            delivered = recorded[rank][kind][0]
            assert found[kind] == [delivered[saved.done :] for saved in states[kind]], (kind, rank)
    middle = {kind: [of_kind[0], of_kind[2]] for kind, of_kind in states.items()}
    others = run_ranks(3, go_on, middle)
    for found in others:
        for kind in BOUND:
            for refused in found[kind]:
                assert isinstance(refused, Raised), (kind, refused)
                assert refused.kind == "StateMismatch"
                assert "2" in refused.message
                assert "3" in refused.message
    whole = [list(range(start, min(start + 4, 19))) for start in range(0, 19, 4)]
    for kind in FREE:
        for saved, *after in zip(middle[kind], *(found[kind] for found in others), strict=True):
            parts = [[*chain(*(part[0] for _, _, part in of_step))] for of_step in zip(*after, strict=True)]
            assert parts == (whole * 2)[saved.done :], kind


# ----------------------------------------------------------------------------------- what some ranks do differently


def number_run(replicas: int = 1) -> Run:
    return run_of(known("shuffled by a generator", Path()), Setting(replicas, 2))


def number_run_with(**options: Any) -> Run:
    return run_of(known("shuffled by a generator", Path()), Setting(1), options)


def disagree() -> dict[str, Any]:
    """One rank of two: states that are not loaded alike."""
    rank = dist.get_rank()
    run = number_run()
    list(steps(run, until=3))
    early = run.save(3)
    run.loader.close()
    run = number_run().load(early)
    list(steps(run, until=2))
    late = run.save(5)
    run.loader.close()
    found: dict[str, Any] = {}

    some = number_run()
    if rank == 0:
        some.load(early)
    found["some only"] = raised(lambda: next(iter(some.loader)))
    different = number_run()
    different.load(early if rank == 0 else late)
    found["different"] = raised(lambda: next(iter(different.loader)))
    sought = number_run()
    sought.loader.seek(0, 3 + rank)
    found["sought"] = raised(lambda: next(iter(sought.loader)))
    damaged = number_run()
    state = early.state
    if rank == 1:
        del state["random"]
    found["damaged on one"] = raised(lambda: damaged.loader.load_state_dict(state))
    found["then"] = None if rank == 0 else raised(lambda: damaged.load(early))

    again = number_run().load(early)
    found["again"] = list(steps(again, epochs=1))
    apart = number_run_with(coordination="off")
    found["uncoordinated"] = raised(apart.loader.state_dict)
    late_rank = run_from("function", timeout_seconds=5)
    next(iterator := iter(late_rank.loader))
    if rank == 0:
        found["nobody else"] = raised(late_rank.loader.state_dict)
    dist.barrier()
    iterator.close()
    return found


@pytest.fixture(scope="module")
def scenes() -> list[dict[str, Any]]:
    """A launch takes longer than a scene."""
    return run_ranks(2, disagree)


def test_ranks_that_load_other_states_or_none_hear_of_it_at_the_next_iter(scenes: list[dict[str, Any]]) -> None:
    first, second = scenes
    for found in scenes:
        for scene in ("some only", "different", "sought"):
            assert found[scene] is not None, scene
            assert found[scene].kind == "RankDisagreement", (scene, found[scene])
            assert "rank 0" in found[scene].message
            assert "rank 1" in found[scene].message
        assert [each[:2] for each in found["again"]] == [(0, 3), (0, 4), (0, 5)]
        assert found["uncoordinated"].kind == "InputError"
    assert first["damaged on one"] is None
    assert second["damaged on one"].kind == "StateMismatch"
    assert "random" in second["damaged on one"].message


def test_a_collective_state_that_one_rank_asks_for_alone_names_the_missing_rank(scenes: list[dict[str, Any]]) -> None:
    refused = scenes[0]["nobody else"]
    assert refused.kind == "CoordinationTimeout"
    assert "rank 1" in refused.message


@pytest.mark.parametrize("world", WORLDS)
def test_seeking_in_any_world_gives_the_batches_of_one_process(world: int) -> None:
    batches = one_process(known("shuffled by a generator", Path()), {})
    for places, *found in zip(PLACES, *run_ranks(world, seek_all), strict=True):
        epoch, step = places
        after = [each for each in batches if each[0] == epoch and each[1] >= step]
        assert together(found) == cut(after, world * 2)


PLACES = ((2, 3), (0, 5), (1, 0), (0, 6))


def seek_all() -> list[list[Delivered]]:
    found = []
    run = number_run(replicas=2)
    for epoch, step in PLACES:
        run.loader.seek(epoch, step)
        found.append(list(steps(run, epochs=epoch + 1)))
    return found


def on_a_mesh(saved: Saved | None, until: int | None) -> tuple[list[Delivered], Saved]:
    """One rank of four: two workers of two ranks each, which get the same batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    strategy = tdi.Strategy(devices=["cpu"], mesh=mesh)
    loader = inputs.LOADERS["shuffled by a generator"](Path())
    run = Run(strategy.distribute_dataset(loader), lambda batch: [batch.tolist()])
    if saved is not None:
        run.load(saved)
    found = list(steps(run, until=until))
    return found, run.save(len(found))


def plain_ranks(saved: Saved) -> list[Delivered]:
    return list(steps(number_run().load(saved)))


def test_ranks_that_share_a_worker_have_one_state_which_any_world_takes() -> None:
    batches = one_process(known("shuffled by a generator", Path()), {})
    started = run_ranks(4, on_a_mesh, None, 8)
    saved = {each for _, each in started}
    assert len(saved) == 1
    again = run_ranks(4, on_a_mesh, next(iter(saved)), None)
    for twins in ((0, 1), (2, 3)):
        assert started[twins[0]] == started[twins[1]]
        assert again[twins[0]][0] == again[twins[1]][0]
    for ranks, places in ((started, slice(8)), (again, slice(8, None))):
        assert together([ranks[0][0], ranks[2][0]]) == cut(batches[places], 2)
    assert together(run_ranks(3, plain_ranks, next(iter(saved)))) == cut(batches[8:], 3)
