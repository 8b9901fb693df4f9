"""A Ctrl-C at any line of the library, in each call of each kind of loader: nothing is lost, and nothing is left."""

from __future__ import annotations

import contextvars
import gc
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import torchdistinput as tdi
from tests.data import Mapped, Repeated
from tests.support.interruptions import Interruption
from tests.support.platforms import linux_processes
from tests.support.scenes import Footprint, left_since
from torchdistinput import iterator, readers

pytestmark = [
    linux_processes,
    pytest.mark.filterwarnings("ignore:.*read again", "ignore:unclosed file"),  # of a file that nobody has yet
]

STEPS, SIZE = 5, 2


def rows(first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + STEPS * SIZE))


def divided(data: Any, prefetch: int, **settings: Any) -> Any:
    options = tdi.InputOptions(prefetch=prefetch)
    return tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(data, SIZE, **settings), options)


def of_function(prefetch: int, **settings: Any) -> Any:
    options = tdi.InputOptions(prefetch=prefetch)
    loader: Any = DataLoader(Repeated(STEPS * SIZE), SIZE, **settings)
    return tdi.Strategy(["cpu"]).distribute_datasets_from_function(lambda _: loader, options)


def drop_in(prefetch: int, **settings: Any) -> Any:
    return tdi.DataLoader(Mapped(STEPS * SIZE, int), SIZE, options=tdi.InputOptions(prefetch=prefetch), **settings)


def files(folder: Path, prefetch: int) -> Any:
    for number in range(2):
        (folder / f"{number}.txt").write_text("".join(f"{STEPS * number + line}\n" for line in range(STEPS)))
    return divided(tdi.FileDataset(f"{folder}/*.txt", readers.text_lines, map_fn=int), prefetch)


PARTS: Subset[Any] = Subset(ConcatDataset([rows(), rows(STEPS * SIZE)]), [*range(0, 4 * STEPS, 2)])
KINDS: dict[str, Callable[..., Any]] = {
    "tensors": lambda _, prefetch: divided(rows(), prefetch),
    "parts of tensors": lambda _, prefetch: divided(PARTS, prefetch),
    "samples": lambda _, prefetch: divided(Mapped(STEPS * SIZE, int), prefetch),
    "iterable": lambda _, prefetch: divided(Repeated(STEPS * SIZE), prefetch),
    "function": lambda _, prefetch: of_function(prefetch),
    "files": files,
    "drop-in": lambda _, prefetch: drop_in(prefetch),
    "mixture": lambda _, prefetch: divided(
        tdi.Mixture({"a": range(9), "b": range(100, 109)}, {"a": 1.0, "b": 2.0}, num_samples=STEPS * SIZE), prefetch
    ),
}
WITH_WORKERS: dict[str, Callable[..., Any]] = {
    "samples, a worker": lambda _, prefetch: divided(Mapped(STEPS * SIZE, int), prefetch, num_workers=1),
    "function, a worker": lambda _, prefetch: of_function(prefetch, num_workers=1, persistent_workers=True),
    "drop-in, a worker": lambda _, prefetch: drop_in(prefetch, num_workers=1, persistent_workers=True),
}


def plain(batch: Any) -> list[int]:
    return [int(each) for each in (batch[0] if isinstance(batch, list) else batch)]


def begin(data: Any, _: Any, found: list[Any]) -> None:
    iterator = iter(data)
    found.append(iterator)
    found.append(plain(next(iterator)))


def go_on(_: Any, iterator: Any, found: list[Any]) -> None:
    found.append(plain(next(iterator)))


CALLS: dict[str, tuple[int, Callable[[Any, Any, list[Any]], object]]] = {
    "iter": (0, begin),
    "next": (1, go_on),
    "close of the iterator": (2, lambda _, iterator, __: iterator.close()),
    "close": (2, lambda data, _, __: data.close()),
    "state_dict": (2, lambda data, _, __: data.state_dict()),
}
"""The steps in front, and the call."""


def press(line: int, call: Callable[[], object]) -> tuple[Interruption, list[type[BaseException]]]:
    """Interrupts a call, and what was raised; what is raised while an object is freed Python only prints."""
    interruption, heard = Interruption(line), list[Any]()

    def noted() -> None:
        try:
            call()
        except KeyboardInterrupt as error:
            heard.append(type(error))

    def pressed() -> None:
        hook, sys.unraisablehook = sys.unraisablehook, lambda unheard: heard.append(unheard.exc_type)
        try:
            interruption.press_in(noted)
        finally:
            sys.unraisablehook = hook

    contextvars.copy_context().run(pressed)  # between the end of a ``with`` and its exit, Python forgets what it set
    return interruption, heard


def check(make: Callable[[], Any], call: str, line: int, whole: list[list[int]]) -> int:
    """One interruption, and how many lines were run; none at line 0."""
    before = Footprint.now()
    data = make()
    steps, ask = CALLS[call]
    iterator = iter(data) if steps else None
    found: list[Any] = [plain(next(iterator)) for _ in range(steps)] if iterator is not None else []
    interruption, heard = press(line, partial(ask, data, iterator, found))
    at = f"{call} at {interruption.at}"
    assert heard.count(KeyboardInterrupt) == (interruption.at is not None), at
    delivered = [each for each in found if isinstance(each, list)]
    assert delivered == whole[: len(delivered)], at
    state = data.state_dict()
    data.close()
    data.close()
    again = make()
    again.load_state_dict(state)
    rest = [plain(batch) for batch in again]
    assert rest in (whole[len(delivered) :], whole[len(delivered) + 1 :]), at  # a step may be taken, and not yet told
    assert state["step"] + len(rest) == len(whole), at
    again.close()
    del data, iterator, again, found
    gc.collect()
    assert left_since(before, frozenset()) == [], at
    return interruption.lines


def check_lines(make: Callable[[], Any], call: str, most: int | None, draw: random.Random) -> None:
    with make() as data:
        whole = [plain(batch) for batch in data]
    assert len(whole) == STEPS
    lines = range(1, 1 + check(make, call, 0, whole))
    assert lines
    for line in lines if most is None else draw.sample(lines, min(most, len(lines))):
        check(make, call, line, whole)


def test_an_interruption_finds_a_step_counted_whole_or_not_at_all(tmp_path: Path) -> None:
    """At each line of the iterator's module, where a step is counted."""
    for line in range(1, 200):
        with files(tmp_path, 0) as data:
            delivered: list[Any] = []
            begin(data, None, delivered)
            loop = delivered.pop(0)
            was_interrupted = Interruption(line, iterator).press_in(partial(go_on, data, loop, delivered))
            state, counted = data.state_dict(), data.step
        with files(tmp_path, 0) as again:
            again.load_state_dict(state)
            rest = [plain(batch) for batch in again]
        assert (state["step"], state["samples"]) == (STEPS - len(rest), SIZE * (STEPS - len(rest)))
        assert counted.index == state["step"] - 1
        assert len(delivered) <= state["step"]
        if not was_interrupted:
            break
    assert line > 10


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [*KINDS, *WITH_WORKERS])
def test_an_interruption_at_any_line_loses_nothing_and_leaves_nothing(
    kind: str, call: str, tmp_path: Path, all_cells: bool
) -> None:
    """At each line with ``--all-cells``, else at some."""
    draw = random.Random(f"{kind} {call}")
    make = {**KINDS, **WITH_WORKERS}[kind]
    for prefetch in (0, 2) if all_cells else (draw.choice((0, 2)),):
        most = None if all_cells else 2 if kind in WITH_WORKERS else 10
        check_lines(partial(make, tmp_path, prefetch), call, most, draw)
