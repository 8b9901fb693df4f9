"""Where the ranks left an epoch is compared as the next one begins: none trains on after other steps in silence.

A rank that leaves its loop while the others still wait for it is told to them at once, see ``test_step_sync.py``. Near
the end of an epoch the others have all steps already, and hear of it at the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Repeated
from tests.support.epochs import Raised, raised
from tests.support.launched import Scenes, launched
from torchdistinput.testing import run_ranks

STEPS, WORLDS = 6, (2, 3)
FORMS = ["map-style", "opaque, every rank reads all", "each rank reads its own", "dataset function", "drop-in"]


def loader_of(form: str, **options: Any) -> Any:
    """A loader of ``STEPS`` steps."""
    ranks = dist.get_world_size()
    if form == "drop-in":
        return tdi.DataLoader(range(STEPS * ranks), batch_size=ranks)  # type: ignore[arg-type]
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=20)
    if form == "dataset function":
        batches = [torch.ones(2)] * STEPS
        return strategy.distribute_datasets_from_function(lambda _: batches, tdi.InputOptions(**options))
    if form == "map-style":
        data: Any = DataLoader(range(STEPS * ranks), ranks)  # type: ignore[arg-type]
    else:
        data = DataLoader(Repeated(STEPS * ranks), ranks)
        if form == "each rank reads its own":
            data = DataLoader(Repeated(STEPS), ranks)
            options["auto_shard_policy"] = tdi.AutoShardPolicy.OFF
    return strategy.distribute_dataset(data, tdi.InputOptions(**options))


def leave_after(loader: Any, steps: int) -> int:
    """Leaves the loop over an epoch by ``break`` after so many steps."""
    taken = 0
    for _ in loader:
        taken += 1
        if taken == steps:
            break
    return taken


def left_alone(form: str, odd: int, steps: int) -> tuple[int, Raised | None]:
    """One rank leaves the first epoch alone, others than it read on, and all begin the next one."""
    loader = loader_of(form)
    taken = leave_after(loader, steps if dist.get_rank() == odd else STEPS + 1)
    dist.barrier()
    return taken, raised(lambda: list(loader))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_that_left_alone_is_told_on_every_rank_at_the_next_epoch(form: str, world: int, scenes: Scenes) -> None:
    ranks = scenes(world, f"{form}, alone")
    assert [taken for taken, _ in ranks] == [STEPS] * (world - 1) + [STEPS - 2]
    errors = {error for _, error in ranks}
    assert len(errors) == 1, "the ranks tell different stories"
    (error,) = errors
    assert error is not None
    assert error.kind == "RankDisagreement"
    others = ", ".join(map(str, range(world - 1)))
    assert f'rank {others}: "epoch 0 after {STEPS} step(s), at its end"' in error.message
    assert f'rank {world - 1}: "epoch 0 after {STEPS - 2} step(s), where its loop was left"' in error.message
    assert "load the same state" in error.message


def gone_on(after: str) -> list[Raised | int | None]:
    """One rank leaves alone; then all try twice, and once more after they agreed on a place."""
    loader = loader_of("map-style")
    state = loader.state_dict()
    leave_after(loader, 4 if dist.get_rank() else STEPS + 1)
    dist.barrier()
    found: list[Raised | int | None] = [raised(lambda: list(loader)) for _ in range(2)]
    if after == "load":
        loader.load_state_dict(state)
    else:
        loader.seek(0, 2)
    found += [len(list(loader)), len(list(loader))]
    return found


@pytest.mark.parametrize(("after", "steps"), [("load", STEPS), ("seek", STEPS - 2)])
def test_ranks_that_left_apart_go_on_once_all_are_set_to_one_place(after: str, steps: int, scenes: Scenes) -> None:
    for first, again, *epochs in scenes(2, after):
        assert isinstance(first, Raised)
        assert first == again  # until the place is set
        assert epochs == [steps, STEPS]


def peeks(loader: Any, odd: bool) -> None:
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    if odd:
        iterator.has_next()
    dist.barrier()
    iterator.close()


def breaks_at_the_last_step(loader: Any, odd: bool) -> None:
    leave_after(loader, STEPS if odd else STEPS + 1)


def ends_by_has_next(loader: Any, odd: bool) -> None:
    iterator = iter(loader)
    while iterator.has_next():
        next(iterator)
    if odd:
        assert next(iterator, None) is None


def looks(loader: Any, odd: bool) -> None:
    """A look at the next epoch, of which nothing is taken; then the rest of this one."""
    iterator = iter(loader)
    next(iterator)
    look = iter(loader)
    if odd:
        look.close()
    leave_after(iterator, 2)
    iterator.close()


def two_alive(loader: Any, _: bool) -> None:
    """The iterator that delivered last counts: both ranks took its first step last."""
    first, second = iter(loader), iter(loader)
    for each in (first, first, second):
        next(each)
    for each in (first, second):
        each.close()


def fails_in_its_loop(loader: Any, odd: bool) -> None:
    """All leave after the same step, one by an error of its own."""
    try:
        for _ in islice(loader, 3):
            pass
        if odd:
            raise ValueError
    except ValueError:
        pass


FREE: dict[str, Callable[[Any, bool], object]] = {
    "break at the same step": lambda loader, _: leave_after(loader, 3),
    "one has peeked": peeks,
    "one breaks after the last step": breaks_at_the_last_step,
    "one asks for the end": ends_by_has_next,
    "a look at the next epoch": looks,
    "two iterators": two_alive,
    "an error of the loop": fails_in_its_loop,
}


def left_alike(form: str) -> list[str]:
    """The ways of leaving after which a rank could not go on, each on a loader of its own."""
    wrong = []
    for name, leave in FREE.items():
        for prefetch in (0, STEPS):
            if leave in (peeks, breaks_at_the_last_step) and prefetch < STEPS:  # the others would have to come, too
                continue
            loader = loader_of(form, prefetch=prefetch)
            leave(loader, dist.get_rank() == 1)
            error = raised(lambda loader=loader: list(loader))  # type: ignore[misc]
            if error is not None:
                wrong.append(f"{name}, prefetch={prefetch}: {error.message}")
    return wrong


@pytest.mark.parametrize("form", FORMS[:-1])
def test_ranks_that_left_at_the_same_step_go_on(form: str, scenes: Scenes) -> None:
    assert scenes(2, f"{form}, alike") == [[], []]


def reads_apart(odd: bool) -> tuple[int, int]:
    loader = loader_of("map-style", coordination="off")
    taken = leave_after(loader, 2 if odd else STEPS + 1)
    return taken, len(list(loader))


def each_by_itself() -> tuple[int, int]:
    return reads_apart(dist.get_rank() == 1)


def test_ranks_that_do_not_meet_leave_where_they_like(scenes: Scenes) -> None:
    assert scenes(2, "by itself") == [(STEPS, STEPS), (2, STEPS)]


def late_to_the_epoch(bound: float) -> tuple[Raised | None, int]:
    """Rank 0 comes later than the bound of the options allows; the strategy would wait for a minute."""
    strategy = tdi.Strategy(devices=["cpu"], timeout_seconds=60)
    options = tdi.InputOptions(timeout_seconds=bound)
    loader = strategy.distribute_dataset(DataLoader(range(8), 4), options)  # type: ignore[arg-type]
    error = None
    if dist.get_rank():
        error = raised(lambda: next(iter(loader)))
        dist.barrier()
    else:
        dist.barrier()
    return error, len(list(loader))


@pytest.mark.parametrize("world", WORLDS)
def test_the_begin_of_an_epoch_waits_as_long_as_the_options_say(world: int) -> None:
    ranks = run_ranks(world, late_to_the_epoch, 3.0, timeout_seconds=50)
    assert [steps for _, steps in ranks] == [2] * world
    assert ranks[0][0] is None
    for error, _ in ranks[1:]:
        assert error is not None
        assert error.kind == "CoordinationTimeout"
        assert "rank 0 did not come within 3 seconds" in error.message


def scenes_of(world: int, _: Path) -> dict[str, Callable[[], Any]]:
    """What is played by so many ranks."""
    found: dict[str, Callable[[], Any]] = {
        f"{form}, alone": partial(left_alone, form, world - 1, STEPS - 2) for form in FORMS
    }
    if world == 3:
        return found
    found |= {f"{form}, alike": partial(left_alike, form) for form in FORMS[:-1]}
    return found | {after: partial(gone_on, after) for after in ("load", "seek")} | {"by itself": each_by_itself}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return launched(WORLDS, scenes_of, tmp_path_factory.mktemp("nothing"))
