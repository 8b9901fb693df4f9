"""Resumes that once went wrong on real ranks, one scenario each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import Raised, lists, raised
from tests.support.resume import OTHER_SEED, SEED, Delivered, Run, Saved, iterables_may_be_skipped, record, steps
from torchdistinput import readers
from torchdistinput.testing import run_ranks

FILE, HINT, OFF = tdi.AutoShardPolicy.FILE, tdi.AutoShardPolicy.HINT, tdi.AutoShardPolicy.OFF
NUMBERS: Any = range(20)


def seed(number: int) -> None:
    """The default state of a process; every rank has another one."""
    torch.manual_seed(number + dist.get_rank())


def run_over(data: Any, *, replicas: int = 1, size: int | None = None, **options: Any) -> Run:
    """A run on a strategy of its own, as in a fresh process."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas, timeout_seconds=60)
    dataset = strategy.distribute_dataset(data, tdi.InputOptions(**options), global_batch_size=size)
    return Run(dataset, lambda element: [lists(piece) for piece in strategy.local_results(element)])


def place_of(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["step"]


# --------------------------------------------------------------------------------------- two loaders, no generator


def two_loaders(saved: tuple[Saved, Saved] | None, order: str) -> tuple[list[list[Any]], tuple[Saved, Saved] | None]:
    """Training and validation without generators; saved while training is in its third epoch, validation idle since.

    Returns:
      The rest of that epoch, the next one, and the next one of validation; the states, of the run that was not resumed.
    """
    seed(SEED if saved is None else OTHER_SEED)
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    runs = [
        Run(strategy.distribute_dataset(DataLoader(NUMBERS, 5, shuffle=True)), lambda batch: [lists(batch)])
        for _ in range(2)
    ]
    train, validation = runs
    if saved is None:
        for run, epochs in ((train, 1), (validation, 1), (train, 2)):
            list(steps(run, epochs=epochs))
        iterator = iter(train.loader)
        next(iterator)
        next(iterator)
        states = train.save(10), validation.save(4)
        rest = [[lists(batch)] for batch in iterator]
    else:
        states = None
        for which in order:
            runs[int(which)].load(saved[int(which)])
        rest = [parts for _, _, parts in steps(train, epochs=3)]
    later = [[parts for _, _, parts in steps(run, epochs=epochs)] for run, epochs in ((train, 4), (validation, 2))]
    return [rest, *later], states


class TwoLoaders(NamedTuple):
    whole: list[list[Any]]
    resumed: dict[str, list[list[Any]]]
    saved: Any


def both_orders() -> TwoLoaders:
    whole, saved = two_loaders(None, "")
    return TwoLoaders(whole, {order: two_loaders(saved, order)[0] for order in ("01", "10")}, saved)


# -------------------------------------------------------------------------------- what each worker draws for itself


class Resumed(NamedTuple):
    """A state, what came after it in the run that was saved, and in the one that took it up."""

    saved: Saved
    whole: list[Delivered]
    rest: list[Delivered]


def taken_up(make: Callable[[], Run]) -> list[Resumed]:
    """One rank: resumes in and between the first two epochs of three, as a process that is seeded differently."""
    seed(SEED)
    run = make()
    whole, states = record(run)
    run.loader.close()
    end = next(place for place, saved in enumerate(states) if saved.state["epoch"] == 1)
    found = []
    for saved in (states[1], states[end], states[end + 2]):
        seed(OTHER_SEED)
        resumed = make().load(saved)
        found.append(Resumed(saved, whole[saved.done :], list(steps(resumed))))
        resumed.loader.close()
    return found


def of_a_function(*, with_generator: bool) -> Run:
    """Each worker shuffles its own half, by a generator of its own or by the default state of its process."""

    def loader(context: tdi.InputContext) -> Any:
        worker = context.input_pipeline_id
        generator = torch.Generator().manual_seed(100 + worker) if with_generator else None
        return DataLoader(inputs.Table(range(worker, 20, 2)), 2, shuffle=True, generator=generator)

    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    return Run(strategy.distribute_datasets_from_function(loader), lambda batch: [lists(batch)])


def uneven_shards() -> Run:
    """Shards of 10 and 9 numbers: the workers' generators are alike when the first epoch begins, and not later."""
    loader = DataLoader(inputs.Table(range(19)), 4, shuffle=True, generator=inputs.generator())
    return run_over(loader, auto_shard_policy=HINT)


DRAWN_ALONE: dict[str, Callable[[], Run]] = {
    "function, generators of their own": partial(of_a_function, with_generator=True),
    "function, no generator": partial(of_a_function, with_generator=False),
    "uneven shards, one generator": uneven_shards,
}


# --------------------------------------------------------------------------------------- states for another number of


@final
@dataclasses.dataclass(frozen=True)
class Half(IterableDataset[int]):
    """A shard of some numbers, or all of them."""

    numbers: range

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def shard(self, num_shards: int, index: int) -> Half:
        return Half(self.numbers[index::num_shards])


BOUND: dict[str, Callable[..., Run]] = {
    "off, map-style": lambda folder, replicas: run_over(
        DataLoader(NUMBERS, 5), replicas=replicas, auto_shard_policy=OFF
    ),
    "off, iterable": lambda folder, replicas: run_over(
        Half(range(20)), size=5, replicas=replicas, auto_shard_policy=OFF
    ),
    "off, files": lambda folder, replicas: run_over(files(folder), size=5, replicas=replicas, auto_shard_policy=OFF),
    "off, ready batches": lambda folder, replicas: run_over(
        list(inputs.ready_batches()), replicas=replicas, auto_shard_policy=OFF
    ),
    "hint, map-style": lambda folder, replicas: run_over(
        DataLoader(inputs.Table(range(20)), 5), replicas=replicas, auto_shard_policy=HINT
    ),
    "hint, iterable": lambda folder, replicas: run_over(
        Half(range(20)), size=5, replicas=replicas, auto_shard_policy=HINT
    ),
}


class Refused(NamedTuple):
    """A state of one replica a worker; what was raised with three, and what with one; and for a state of one process.

    The last two are with ``strict=True`` and ``strict=False``.
    """

    saved: Saved
    others: Raised | None
    same: Raised | None
    of_one: list[Raised | None]


def other_replicas(folder: str, of_one: dict[str, Saved]) -> dict[str, Refused]:
    """One rank: each kind of input after a step."""
    found = {}
    for kind, make in BOUND.items():
        run = make(folder, 1)
        saved = first_steps(run, 1)[0][1]
        others, same = (raised(partial(make(folder, replicas).load, saved)) for replicas in (3, 1))
        load = make(folder, 1).loader.load_state_dict
        one = [raised(partial(load, of_one[kind].state, strict=strict)) for strict in (True, False)]
        found[kind] = Refused(saved, others, same, one)
    return found


# ------------------------------------------------------------------------------------------------------------ files


def files(folder: str) -> tdi.FileDataset:
    names = [f"{folder}/{file}.txt" for file in range(4)]
    return tdi.FileDataset(names, readers.text_lines, map_fn=int)


def three_of(number: str) -> torch.Tensor:
    """A record that is a ready batch."""
    return torch.full((3,), int(number))


def ready(folder: str) -> DataLoader[Any]:
    names = [f"{folder}/{file}.txt" for file in range(4)]
    return DataLoader(tdi.FileDataset(names, readers.text_lines, map_fn=three_of), batch_size=None)


def first_steps(run: Run, count: int) -> list[tuple[list[Any], Saved]]:
    """What the first steps of an epoch deliver, and the state after each."""
    iterator = iter(run.loader)
    found = [(run.parts(next(iterator)), run.save(number + 1)) for number in range(count)]
    iterator.close()
    return found


# ------------------------------------------------------------------------------------------------ what cannot begin


class Retried(NamedTuple):
    """What one rank met: errors, its places after them, and how it went on."""

    some_only: Raised | None
    place: tuple[int, int]
    rest: list[Delivered]
    other_epochs: Raised | None
    place_told: tuple[int, int]
    again: int


def retried() -> Retried:
    """A state is loaded on rank 0 only, an epoch told on rank 1 only; then on both."""
    run = numbers_run()
    saved = first_steps(run, 2)[-1][1]
    run = numbers_run()
    if dist.get_rank() == 0:
        run.load(saved)
    some_only, place = raised(lambda: iter(run.loader)), place_of(run.loader)
    if dist.get_rank() == 1:
        run.load(saved)
    rest = list(steps(run, epochs=1))
    if dist.get_rank() == 1:
        run.loader.set_epoch(3)
    other_epochs, place_told = raised(lambda: iter(run.loader)), place_of(run.loader)
    run.loader.set_epoch(3)
    next(iterator := iter(run.loader))
    iterator.close()
    return Retried(some_only, place, rest, other_epochs, place_told, run.loader.step.epoch)


def numbers_run() -> Run:
    return run_over(DataLoader(NUMBERS, 5, shuffle=True, generator=inputs.generator()))


# ------------------------------------------------------------------------------------- a group that comes, and goes


class WithoutGroup(NamedTuple):
    """States of the drop-in loader, before and after the group ended; what came in the group that was made then."""

    before: dict[str, Any]
    after: dict[str, Any]
    rest: list[Any]


def without_group(folder: str) -> WithoutGroup:
    """One rank: two steps; the end of the group, then a state; it is loaded, a group is made, and reading begins."""

    def make() -> tdi.DataLoader[Any]:
        return tdi.DataLoader(NUMBERS, 5, shuffle=True, generator=inputs.generator())

    rank = dist.get_rank()
    loader = make()
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    iterator.close()
    before = loader.state_dict()
    dist.barrier()
    dist.destroy_process_group()
    after = loader.state_dict()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # a script that torchrun did not start makes its group itself
    resumed = make()
    resumed.load_state_dict(before)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return WithoutGroup(before, after, [lists(batch) for batch in resumed])


# ------------------------------------------------------------------------------------------------------- the launch


class Found(NamedTuple):
    """What one rank of two found in every scenario: a launch takes longer than they do."""

    two_loaders: TwoLoaders
    drawn_alone: dict[str, list[Resumed]]
    other_replicas: dict[str, Refused]
    by_files: list[tuple[list[Any], Saved]]
    ready: list[tuple[list[Any], Saved]]
    retried: Retried
    without_group: WithoutGroup


def play(folder: str, of_one: dict[str, Saved]) -> Found:
    with iterables_may_be_skipped():
        return Found(
            both_orders(),
            {kind: taken_up(make) for kind, make in DRAWN_ALONE.items()},
            other_replicas(folder, of_one),
            first_steps(run_over(files(folder), size=4, auto_shard_policy=FILE), 3),
            first_steps(run_over(ready(folder), auto_shard_policy=FILE), 4),
            retried(),
            without_group(folder),
        )


def write(folder: str, file: int, count: int = 10, start: int | None = None) -> None:
    first = 100 * file if start is None else start
    Path(folder, f"{file}.txt").write_text("".join(f"{first + number}\n" for number in range(count)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("files"))
    for file in range(4):
        write(path, file)
    return path


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[Found]:
    of_one = {kind: first_steps(make(folder, 1), 1)[0][1] for kind, make in BOUND.items()}
    return run_ranks(2, play, folder, of_one)


# ------------------------------------------------------------------------------------------------------ what is law


def test_a_loader_that_was_idle_goes_on_from_where_the_others_left_the_random_state(ranks: list[Found]) -> None:
    """Training and validation without generators, loaded in either order; the other ranks draw what rank 0 draws."""
    for found in ranks:
        assert found.two_loaders.saved == ranks[0].two_loaders.saved
        rest, later, validation = found.two_loaders.whole
        assert [len(each) for each in (rest, later, validation)] == [2, 4, 4]
        for order, resumed in found.two_loaders.resumed.items():
            assert resumed == [rest, later, validation], order


@pytest.mark.parametrize("kind", DRAWN_ALONE)
def test_every_worker_that_draws_for_itself_goes_on_with_its_own_draws(kind: str, ranks: list[Found]) -> None:
    """In the first epoch, after it, and in the second: one state for all ranks, with the random state of each."""
    for found in ranks:
        assert [each.saved for each in found.drawn_alone[kind]] == [each.saved for each in ranks[0].drawn_alone[kind]]
        assert [each.saved.state["epoch"] for each in found.drawn_alone[kind]] == [0, 1, 1]
        for saved, whole, rest in found.drawn_alone[kind]:
            assert rest == whole, (kind, saved.done)
            assert {each[0] for each in rest} >= {1, 2}
    for first, second in zip(*(found.drawn_alone[kind] for found in ranks), strict=True):
        numbers = [number for of_rank in (first, second) for number in of_epoch(of_rank.whole, 2)]
        assert sorted(numbers) == list(range(20 if "function" in kind else 19))


def of_epoch(delivered: list[Delivered], number: int) -> Iterator[int]:
    return (sample for epoch, _, parts in delivered if epoch == number for part in parts for sample in part)


@pytest.mark.parametrize("kind", BOUND)
def test_a_state_of_data_cut_for_so_many_replicas_is_refused_for_others(
    kind: str, ranks: list[Found], folder: str
) -> None:
    """Under OFF and HINT each worker cuts its batches for all replicas: with three each, a row is another one."""
    for found in ranks:
        saved, others, same, of_one = found.other_replicas[kind]
        assert same is None
        for error in of_one:  # each rank would read all that is left of its files, or leave out those of the other
            assert error is not None
            assert error.kind == "StateMismatch"
            assert "number of ranks: one position for all in the state, 2 here" in error.message
            assert "strict=False" not in error.message
        assert others is not None
        assert others.kind == "StateMismatch"
        assert "number of replicas: 2 in the state, 6 here" in others.message
        with pytest.raises(tdi.StateMismatch, match="number of ranks: 2 in the state"):
            BOUND[kind](folder, 1).load(saved)


def test_files_opened_in_the_first_steps_are_known_to_the_state(ranks: list[Found], folder: str) -> None:
    """Under FILE each worker has its own file: one that grew, or vanished, is refused once a batch is over."""
    assert [saved for _, saved in ranks[0].by_files] == [saved for _, saved in ranks[1].by_files]
    for file, (_, saved) in enumerate(ranks[0].by_files[1:]):
        assert loaded(folder, saved) is None
        write(folder, file, 11)
        grown = loaded(folder, saved)
        Path(folder, f"{file}.txt").unlink()
        vanished = loaded(folder, saved)
        write(folder, file)
        for refused in (grown, vanished):
            assert refused is not None
            assert refused.kind == "StateMismatch"
            assert f"{file}.txt" in refused.message


def loaded(folder: str, saved: Saved) -> Raised | None:
    """In one process."""
    return raised(partial(run_over(files(folder), size=4, auto_shard_policy=FILE).load, saved))


def test_ready_batches_in_progress_are_refused_in_another_world_when_they_are_loaded(
    ranks: list[Found], folder: str
) -> None:
    """Two workers deliver such a batch in two steps: a state in between is refused at once, and nothing is begun."""
    every = sorted(3 * [100 * file + number for file in range(4) for number in range(10)])
    for number in range(4):
        saved = ranks[0].ready[number][1]
        run = run_over(ready(folder), auto_shard_policy=FILE)
        if number % 2 == 0:
            with pytest.raises(tdi.StateMismatch, match="in the middle of ready batches"):
                run.load(saved)
            assert place_of(run.loader) == (0, 0)
            continue
        run.load(saved)
        before = [parts for found in ranks for parts, _ in found.ready[: number + 1]]
        after = [parts for _, _, parts in steps(run, epochs=1)]
        assert sorted(chain.from_iterable(chain.from_iterable(before + after))) == every


def test_an_epoch_that_the_ranks_could_not_begin_is_still_to_come(ranks: list[Found]) -> None:
    for rank, found in enumerate(ranks):
        some_only, place, rest, other_epochs, place_told, again = found.retried
        assert some_only is not None
        assert other_epochs is not None
        assert (some_only.kind, other_epochs.kind) == ("RankDisagreement", "RankDisagreement")
        assert place == ((0, 2), (0, 0))[rank]
        assert [each[:2] for each in rest] == [(0, 2), (0, 3)]
        assert place_told == ((1, 0), (3, 0))[rank]
        assert again == 3


def test_the_place_of_a_loader_outlives_its_process_group_and_waits_for_one(ranks: list[Found]) -> None:
    whole = [lists(batch) for batch in DataLoader(NUMBERS, 5, shuffle=True, generator=inputs.generator())]
    for rank, found in enumerate(ranks):
        before, after, rest = found.without_group
        assert (before["epoch"], before["step"]) == (0, 2)
        assert after == before
        assert rest == [(batch[:3], batch[3:])[rank] for batch in whole[2:]]
