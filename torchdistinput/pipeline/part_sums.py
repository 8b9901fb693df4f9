"""The sums over this rank's parts of a step (``InputOptions.sums``), before the parts are padded or copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch

from torchdistinput.plan.sums import ExactSum, exact
from torchdistinput.step_types import LocalStep, OpaqueBatch, ReadFailure, Row


@final
class PartSums:
    """Calls the user's functions on each part of a step that has a sample, and notes the sums in the step.

    Args:
      functions: by the names of the sums.
      with_index: whether pieces are ``(index, batch)``.
    """

    def __init__(self, functions: Mapping[str, Callable[[Any], Any]], *, with_index: bool) -> None:
        self._functions = [(name, functions[name]) for name in sorted(functions)]
        self._with_index = with_index

    def __call__(self, step: LocalStep, row: Row) -> None:
        """Notes the sums, by the names in order.

        Raises:
          ReadFailure: a function failed, or returned no number that can be summed.
        """
        step.local_sums = [self._sum_of(name, function, step, row) for name, function in self._functions]

    def _sum_of(self, name: str, function: Callable[[Any], Any], step: LocalStep, row: Row) -> ExactSum:
        found = ExactSum()
        try:
            for piece, size in zip(row, step.sizes, strict=True):
                if size:
                    batch = piece.content if type(piece) is OpaqueBatch else piece[1] if self._with_index else piece
                    value = function(batch)
                    summand = exact(value if type(value) is int else _number(value))
                    if found.kind not in (None, summand.kind):
                        raise TypeError("returned an int for one replica's part, and a float for another")
                    found = found.plus(summand)
        except Exception as error:
            raise ReadFailure(f"sums[{name!r}]") from error
        return found


def _number(value: Any) -> int | float:
    """The value as a Python number."""
    number = value
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and not value.ndim and value.is_cpu):
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, int | float):
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            kind = f"tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
        raise TypeError(f"returned a {kind}; an int or float is needed, such as int(mask.sum())")
    return number
