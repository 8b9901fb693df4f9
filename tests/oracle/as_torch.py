"""Plays a program in one process with torch's own loader, the drop-in, and distributed: what is seen is the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.oracle.data import CannotRead, dataset_of, draw_from, ids_in, loader_of, structure_of
from tests.oracle.program import Program

OPTIONS = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA, prefetch=0)


def seen(program: Program, cls: Any, divide: Callable[[Any], Any] | None = None) -> list[Any]:
    """What a user of a loader class sees: lengths, batches, ends, errors and warnings, each with the draws after it.

    Args:
      program: the program, of one turn.
      cls: of the loader.
      divide: distributes it, if that is wanted.
    """
    torch.manual_seed(program.seed)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loader = loader_of(program, dataset_of(program, Path()), loader_workers=0, cls=cls)
        viewer = _Viewer(program, loader, loader.generator, divide)
        for action in program.turns[0].actions:
            if action.kind == "read":
                viewer.read(action.steps)
            elif action.kind == "draw":
                viewer.draw(action.steps, first=cls is DataLoader and divide is None)
            else:
                viewer.live = None
    return [*viewer.seen, [str(each.message) for each in told]]


class _Viewer:
    def __init__(self, program: Program, loader: Any, own: Any, divide: Callable[[Any], Any] | None) -> None:
        self.program, self.own = program, own
        self.loader = loader if divide is None else divide(loader)
        self.live: Any = None
        self.seen: list[Any] = []
        self.note(lambda: len(self.loader))

    def note(self, call: Callable[[], Any]) -> None:
        """Notes what a call returned or raised, and where the generators stand after it."""
        try:
            found = call()
        except (CannotRead, TypeError, StopIteration, tdi.InputError) as error:
            found = (type(error).__name__, str(error))
        states = [torch.get_rng_state(), *([] if self.own is None else [self.own.get_state()])]
        self.seen.append((found, [hash(state.numpy().tobytes()) for state in states]))

    def draw(self, numbers: int, *, first: bool) -> None:
        """Draws between ``iter`` and the first ``next``, where an epoch begins here; by torch it begins at ``iter``."""
        self.live = None
        if first:
            draw_from(self.own, numbers, numbers)
        self.live = iter(self.loader)
        if not first:
            draw_from(self.own, numbers, numbers)
        self.read(1)

    def read(self, count: int) -> None:
        for _ in islice(range(1000), count or None):
            self.note(self.step)
            if isinstance(self.seen[-1][0][0], str):  # the end, or an error, with which an epoch ends here
                self.live = None
                return

    def step(self) -> Any:
        if self.live is None:  # torch draws the seed of loader workers at ``iter``, this library at the first ``next``
            self.live = iter(self.loader)
        batch = next(self.live)
        return ids_in(self.program, batch), structure_of(batch)


def as_torch(program: Program) -> None:
    """Checks that the drop-in is torch's loader to its user, and so is a loader that is distributed, up to an error."""
    right, found = (seen(program, cls) for cls in (DataLoader, tdi.DataLoader))
    assert len(right) == len(found)
    for place, (one, two) in enumerate(zip(right, found, strict=True)):
        assert one == two, f"at {place}: {two}, not {one}"
    if program.turns[0].prefetch == 0:
        ours = seen(program, DataLoader, lambda loader: tdi.Strategy(["cpu"]).distribute_dataset(loader, OPTIONS))
        for place, (one, two) in enumerate(zip(right[1:-1], ours[1:-1], strict=False)):
            if one[0] is not None and one[0][0] == "CannotRead":
                assert two[0][0] == "SourceError", two
                return
            assert one == two, f"distributed, at {place}: {two}, not {one}"
