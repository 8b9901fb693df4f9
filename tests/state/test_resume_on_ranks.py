"""Resuming on real ranks: what each rank keeps for itself, states of other worlds, and ranks that disagree."""

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
from tests.data import Kept
from tests.support import inputs
from tests.support.epochs import Raised, lists, pieces, raised
from tests.support.resume import (
    OTHER_SEED,
    SEED,
    Delivered,
    Run,
    Saved,
    iterables_may_be_skipped,
    steps,
)
from torchdistinput import readers
from torchdistinput.testing import run_ranks

DATA, FILE = tdi.AutoShardPolicy.DATA, tdi.AutoShardPolicy.FILE
HINT, OFF = tdi.AutoShardPolicy.HINT, tdi.AutoShardPolicy.OFF
NUMBERS: Any = range(20)


def seed(number: int) -> None:
    """The default state of a process; every rank has another one."""
    torch.manual_seed(number + dist.get_rank())


def run_over(data: Any, *, replicas: int = 1, size: int | None = None, **options: Any) -> Run:
    """A run on a strategy of its own, as in a fresh process."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas, timeout_seconds=60)
    dataset = strategy.distribute_dataset(data, tdi.InputOptions(**options), global_batch_size=size)
    return Run(dataset, lambda element: pieces(strategy, element))


def of_a_function(make: Callable[[int, int], Any], replicas: int, seconds: float = 60) -> Run:
    """A run over what a dataset function makes for a worker of so many."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas, timeout_seconds=seconds)
    dataset = strategy.distribute_datasets_from_function(
        lambda context: make(context.input_pipeline_id, context.num_input_pipelines)
    )
    return Run(dataset, lambda element: pieces(strategy, element))


def place_of(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["step"]


def first_steps(run: Run, count: int) -> list[tuple[list[Any], Saved]]:
    """What the first steps of an epoch deliver, and the state after each."""
    iterator = iter(run.loader)
    found = [(run.parts(next(iterator)), run.save(number + 1)) for number in range(count)]
    iterator.close()
    return found


# -------------------------------------------------------------- what each rank reads or draws for itself, or may not


@final
@dataclasses.dataclass(frozen=True)
class Half(IterableDataset[int]):
    """A shard of some numbers, or all of them; ``shard`` as in Hugging Face datasets."""

    numbers: range

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def shard(self, num_shards: int, index: int) -> Half:
        return Half(self.numbers[index::num_shards])


def files(folder: str, decode: Callable[[str], Any] = int) -> tdi.FileDataset:
    return tdi.FileDataset([f"{folder}/{file}.txt" for file in range(4)], readers.text_lines, map_fn=decode)


def shuffled(data: Any, size: int = 5, generator: int | None = 7) -> DataLoader[Any]:
    return DataLoader(data, size, shuffle=True, generator=None if generator is None else inputs.generator(generator))


def half(worker: int, of: int) -> Any:
    return inputs.Table(range(worker, 20, of))


DIVIDED: dict[str, Callable[[str, int], Run]] = {
    "off, map-style": lambda _, n: run_over(shuffled(NUMBERS), replicas=n, auto_shard_policy=OFF),
    "off, iterable": lambda _, n: run_over(Half(range(20)), size=5, replicas=n, auto_shard_policy=OFF),
    "off, files": lambda folder, n: run_over(files(folder), size=5, replicas=n, auto_shard_policy=OFF),
    "off, ready batches": lambda _, n: run_over(list(inputs.ready_batches()), replicas=n, auto_shard_policy=OFF),
    # The ranks' generators are alike when the first epoch begins, and not later.
    "hint, shards of two sizes": lambda _, n: run_over(
        shuffled(inputs.Table(range(19)), 4), replicas=n, auto_shard_policy=HINT
    ),
    "hint, iterable": lambda _, n: run_over(Half(range(20)), size=5, replicas=n, auto_shard_policy=HINT),
    "hint, own state": lambda _, n: run_over(Kept(19), size=4, replicas=n, auto_shard_policy=HINT),
}


def other_replicas(folder: str, of_one: dict[str, Saved]) -> dict[str, list[Raised | None]]:
    """One rank: what refuses a state of one replica a rank for three, and one of one process, strictly or not."""
    found = {}
    for kind, make in DIVIDED.items():
        saved = first_steps(make(folder, 1), 1)[0][1]
        load = make(folder, 1).loader.load_state_dict
        one = [raised(partial(load, of_one[kind].state, strict=strict)) for strict in (True, False)]
        found[kind] = [raised(partial(make(folder, 3).load, saved)), *one]
    return found


# --------------------------------------------------------------------------------------- two loaders, no generator


def two_loaders(saved: tuple[Saved, Saved] | None, order: str) -> tuple[list[list[Any]], tuple[Saved, Saved] | None]:
    """Training and validation without generators; saved while training is in its third epoch, validation idle since.

    Returns:
      The rest of that epoch, the next one, and the next one of validation; the states, of the run that was not resumed.
    """
    seed(SEED if saved is None else OTHER_SEED)
    train, validation = runs = [run_over(shuffled(NUMBERS, generator=None)) for _ in range(2)]
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


# ----------------------------------------------------------------------------------- what some ranks do differently


class Retried(NamedTuple):
    """What one rank met: errors, its places after them, and how it went on."""

    errors: dict[str, Raised | None]
    place: tuple[int, int]
    rest: list[Delivered]
    place_told: tuple[int, int]
    again: int


def numbers_run(**options: Any) -> Run:
    return run_over(shuffled(NUMBERS), **options)


def retried(folder: str) -> Retried:
    """A state is loaded on rank 0 only, an epoch told on rank 1 only, then on both; other states, other steps."""
    rank, errors = dist.get_rank(), dict[str, Raised | None]()
    run = numbers_run()
    early, late = (saved for _, saved in first_steps(run, 2))
    run = numbers_run()
    if rank == 0:
        run.load(late)
    errors["some only"], place = raised(lambda: next(iter(run.loader))), place_of(run.loader)
    if rank == 1:
        run.load(late)
    rest = list(steps(run, epochs=1))
    if rank == 1:
        run.loader.set_epoch(3)
    errors["epochs"], place_told = raised(lambda: next(iter(run.loader))), place_of(run.loader)
    run.loader.set_epoch(3)
    next(iterator := iter(run.loader))
    iterator.close()
    again = run.loader.step.epoch
    run = numbers_run().load(early if rank == 0 else late)
    errors["states"] = raised(lambda: next(iter(run.loader)))
    run = numbers_run()
    run.loader.seek(0, 2 + rank)
    errors["steps"] = raised(lambda: next(iter(run.loader)))
    damaged = late.state
    if rank == 1:
        del damaged["random"]
    errors["damaged"] = raised(lambda: numbers_run().loader.load_state_dict(damaged))
    errors["uncoordinated"] = raised(numbers_run(coordination="off").loader.state_dict)
    places = {
        "alone": of_a_function(lambda i, of: DataLoader(half(i, of), 2), 1, seconds=5),
        "alone, files": run_over(files(folder), size=4, timeout_seconds=5),
    }
    for name, run in places.items():
        next(iterator := iter(run.loader))
        errors[name] = raised(run.loader.state_dict) if rank == 0 else None
        dist.barrier()
        iterator.close()
    return Retried(errors, place, rest, place_told, again)


# ------------------------------------------------------------------------------------- before an epoch, without group


def before_the_first_epoch() -> list[list[int]]:
    """One rank: the parts of an epoch from a state that was saved before any was begun, by another seed."""
    run = run_over(shuffled(NUMBERS, generator=None))
    saved = run.save(0)
    seed(OTHER_SEED)
    with run.load(saved).loader:
        return [batch.tolist() for batch in run.loader]


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


def three_of(number: str) -> torch.Tensor:
    """A record that is a ready batch."""
    return torch.full((3,), int(number))


def ready(folder: str) -> DataLoader[Any]:
    return DataLoader(files(folder, three_of), batch_size=None)


class Found(NamedTuple):
    """What one rank of two found in every scenario: a launch takes longer than they do."""

    other_replicas: dict[str, list[Raised | None]]
    two_loaders: TwoLoaders
    by_files: list[tuple[list[Any], Saved]]
    ready: list[tuple[list[Any], Saved]]
    retried: Retried
    before: list[list[int]]
    without_group: WithoutGroup


def play(folder: str, of_one: dict[str, Saved]) -> Found:
    with iterables_may_be_skipped():
        before = before_the_first_epoch()  # of this process
        return Found(
            other_replicas(folder, of_one),
            both_orders(),
            first_steps(run_over(files(folder), size=4, auto_shard_policy=FILE), 3),
            first_steps(run_over(ready(folder), auto_shard_policy=FILE), 4),
            retried(folder),
            before,
            without_group(folder),
        )


def write(folder: str, file: int, count: int = 10) -> None:
    Path(folder, f"{file}.txt").write_text("".join(f"{100 * file + number}\n" for number in range(count)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("files"))
    for file in range(4):
        write(path, file)
    return path


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[Found]:
    of_one = {kind: first_steps(make(folder, 1), 1)[0][1] for kind, make in DIVIDED.items()}
    return run_ranks(2, play, folder, of_one)


# ------------------------------------------------------------------------------------------------------ what is law


@pytest.mark.parametrize("kind", DIVIDED)
def test_a_state_of_data_cut_for_so_many_replicas_is_refused_for_others(
    kind: str, ranks: list[Found], folder: str
) -> None:
    """Under OFF and HINT each worker cuts its batches for all replicas: with three each, a row is another one."""
    for found in ranks:
        others, *of_one = found.other_replicas[kind]
        assert others is not None
        assert others.kind == "StateMismatch"
        assert "number of replicas: 2 in the state, 6 here" in others.message
        words = "number of ranks: one position for all in the state, 2 here"
        if "two sizes" in kind:  # the random state of each rank is in the state
            words = "random: the state has 1 generator(s), the input here has 0"
        for error in of_one:  # each rank would read all that is left of its files, or leave out those of the other
            assert error is not None
            assert error.kind == "StateMismatch"
            assert words in error.message
            assert "strict=False" not in error.message


def test_a_loader_that_was_idle_goes_on_from_where_the_others_left_the_random_state(ranks: list[Found]) -> None:
    """Training and validation without generators, loaded in either order; the other ranks draw what rank 0 draws."""
    for found in ranks:
        assert found.two_loaders.saved == ranks[0].two_loaders.saved
        rest, later, validation = found.two_loaders.whole
        assert [len(each) for each in (rest, later, validation)] == [2, 4, 4]
        for order, resumed in found.two_loaders.resumed.items():
            assert resumed == [rest, later, validation], order


def test_files_opened_in_the_first_steps_are_known_to_the_state(ranks: list[Found], folder: str) -> None:
    """Under FILE each worker has its own file: one that grew, or vanished, is refused once a batch is over."""
    assert [saved for _, saved in ranks[0].by_files] == [saved for _, saved in ranks[1].by_files]
    for file, (_, saved) in enumerate(ranks[0].by_files[1:]):
        load = run_over(files(folder), size=4, auto_shard_policy=FILE).load
        load(saved)
        write(folder, file, 11)
        grown = raised(partial(load, saved))
        Path(folder, f"{file}.txt").unlink()
        vanished = raised(partial(load, saved))
        write(folder, file)
        for refused in (grown, vanished):
            assert refused is not None
            assert refused.kind == "StateMismatch"
            assert f"{file}.txt" in refused.message


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


def test_ranks_that_load_other_states_or_none_hear_of_it_and_an_epoch_that_could_not_begin_is_still_to_come(
    ranks: list[Found],
) -> None:
    for rank, found in enumerate(ranks):
        errors, place, rest, place_told, again = found.retried
        for scene in ("some only", "epochs", "states", "steps"):
            error = errors[scene]
            assert error is not None, scene
            assert error.kind == "RankDisagreement", (scene, error)
            assert "rank 0" in error.message
            assert "rank 1" in error.message
        uncoordinated, damaged = errors["uncoordinated"], errors["damaged"]
        assert uncoordinated is not None
        assert uncoordinated.kind == "InputError"
        for alone in (errors["alone"], errors["alone, files"]):
            assert (alone and (alone.kind, "rank 1" in alone.message)) == (("CoordinationTimeout", True), None)[rank]
        assert (damaged and (damaged.kind, "random" in damaged.message)) == (None, ("StateMismatch", True))[rank]
        assert place == ((0, 2), (0, 0))[rank]
        assert [each[:2] for each in rest] == [(0, 2), (0, 3)]
        assert place_told == ((1, 0), (3, 0))[rank]
        assert again == 3


def test_a_state_of_several_ranks_before_their_first_epoch_holds_no_default_random_state(ranks: list[Found]) -> None:
    """No rank but the first knows from which state the epoch would be drawn: it is that of the next ``iter``."""
    torch.manual_seed(OTHER_SEED)
    expected = [batch.tolist() for batch in shuffled(NUMBERS, generator=None)]
    assert [one + other for one, other in zip(ranks[0].before, ranks[1].before, strict=True)] == expected


def test_the_place_of_a_loader_outlives_its_process_group_and_waits_for_one(ranks: list[Found]) -> None:
    whole = [lists(batch) for batch in shuffled(NUMBERS)]
    for rank, found in enumerate(ranks):
        before, after, rest = found.without_group
        assert (before["epoch"], before["step"]) == (0, 2)
        assert after == before
        assert rest == [(batch[:3], batch[3:])[rank] for batch in whole[2:]]
