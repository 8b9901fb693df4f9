"""What a loop over a distributed dataset delivered, as plain lists that compare and travel between processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import torchdistinput as tdi
from torchdistinput.batches import pytree


def lists(batch: Any) -> Any:
    """The batch with every tensor as nested lists of numbers; the nesting stays, named tuples become tuples."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, Mapping):
        return {key: lists(value) for key, value in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: lists(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    if isinstance(batch, tuple):
        return tuple(lists(value) for value in batch)
    if isinstance(batch, list):
        return [lists(value) for value in batch]
    return batch


def pieces(strategy: tdi.Strategy, element: Any) -> list[Any]:
    """One plain batch per local replica."""
    found = strategy.local_results(element)
    assert len(found) == len(strategy.devices)
    return [lists(piece) for piece in found]


def epoch(strategy: tdi.Strategy, dataset: Iterable[Any]) -> list[list[Any]]:
    """One whole epoch: steps, each with one piece per local replica."""
    return [pieces(strategy, element) for element in dataset]


def cut_by_s(batch: Any, replicas: int) -> list[Any]:
    """A global batch cut by law B1, written from the law's text: the first replicas get ``ceil(b / N)`` samples."""
    size = pytree.batch_size(batch)
    share = -(-size // replicas)
    bounds = [(min(k * share, size), min((k + 1) * share, size)) for k in range(replicas)]
    return [lists(pytree.cut(batch, lo, hi)) for lo, hi in bounds]


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception as plain values: they can be sent to the parent process."""

    kind: str
    message: str
    is_input_error: bool
    is_value_error: bool
    cause: str | None
    file: str | None
    offset: int | None


def raised(call: Callable[[], object]) -> Raised | None:
    """What the call raised, or ``None``."""
    try:
        call()
    except Exception as error:
        return Raised(
            kind=type(error).__name__,
            message=str(error),
            is_input_error=isinstance(error, tdi.InputError),
            is_value_error=isinstance(error, ValueError),
            cause=None if error.__cause__ is None else type(error.__cause__).__name__,
            file=error.file if isinstance(error, tdi.SourceError) else None,
            offset=error.offset if isinstance(error, tdi.SourceError) else None,
        )
    return None


def steps_until_raised(data: Iterable[Any]) -> tuple[int, Raised | None]:
    """How many steps a loop makes, and what ends it, if that is an error."""
    steps = 0

    def loop() -> None:
        nonlocal steps
        for _ in data:
            steps += 1

    error = raised(loop)
    return steps, error
