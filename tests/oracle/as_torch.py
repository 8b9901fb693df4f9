"""Plays a program with torch's own loader, and with the drop-in in one process: what a user sees must be the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.oracle.data import CannotRead, dataset_of, ids_in, loader_of, structure_of
from tests.oracle.program import Program


def seen(program: Program, cls: Any) -> list[Any]:
    """What a user of a loader class sees: lengths, batches, ends, errors and warnings, each with the draws after it."""
    torch.manual_seed(program.seed)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        viewer = _Viewer(program, loader_of(program, dataset_of(program, Path()), loader_workers=0, cls=cls))
        for action in program.turns[0].actions:
            if action.kind == "read":
                viewer.read(action.steps)
            else:
                viewer.live = None
    return [*viewer.seen, [str(each.message) for each in told]]


class _Viewer:
    def __init__(self, program: Program, loader: Any) -> None:
        self.program, self.loader = program, loader
        self.live: Any = None
        self.seen: list[Any] = []
        self.note(lambda: len(loader))

    def note(self, call: Callable[[], Any]) -> None:
        """Notes what a call returned or raised, and where the generators stand after it."""
        try:
            found = call()
        except (CannotRead, TypeError, StopIteration) as error:
            found = (type(error).__name__, str(error))
        own = self.loader.generator
        states = [torch.get_rng_state(), *([] if own is None else [own.get_state()])]
        self.seen.append((found, [hash(state.numpy().tobytes()) for state in states]))

    def read(self, count: int) -> None:
        if self.live is None:
            self.note(self.begin)
        for _ in islice(range(1000), count or None):
            self.note(self.step)
            if self.seen[-1][0] == ("StopIteration", ""):
                self.live = None
                return

    def begin(self) -> None:
        self.live = iter(self.loader)

    def step(self) -> Any:
        batch = next(self.live)
        return ids_in(self.program, batch), structure_of(batch)


def as_torch(program: Program) -> None:
    """Checks that the drop-in is torch's loader to its user, in one process."""
    right, found = (seen(program, cls) for cls in (DataLoader, tdi.DataLoader))
    for place, (one, two) in enumerate(zip(right, found, strict=False)):
        assert one == two, f"at {place}: {two}, not {one}"
    assert len(right) == len(found)
