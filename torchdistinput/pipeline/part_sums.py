"""The sums over this rank's parts of a step (``InputOptions.sums``), before the parts are padded or copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch

from torchdistinput.plan.step_agreement import SUMMAND_BITS
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
          ReadFailure: a function failed, or returned no int that can be summed.
        """
        step.local_sums = [self._sum_of(name, function, step, row) for name, function in self._functions]

    def _sum_of(self, name: str, function: Callable[[Any], Any], step: LocalStep, row: Row) -> int:
        found = 0
        try:
            for piece, size in zip(row, step.sizes, strict=True):
                if size:
                    batch = piece.content if type(piece) is OpaqueBatch else piece[1] if self._with_index else piece
                    value = function(batch)
                    found += value if type(value) is int else _int(value)
            if found.bit_length() > SUMMAND_BITS:
                raise ValueError(
                    f"a sum of {found.bit_length()} bits over this rank's part; an int of at most {SUMMAND_BITS} bits "
                    "is needed. Return a smaller one, such as value // 2**16"
                )
        except Exception as error:
            raise ReadFailure(f"sums[{name!r}]") from error
        return found


def _int(value: Any) -> int:
    """The value as a Python int."""
    number = value
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and not value.ndim and value.is_cpu):
        number = value.item()
    if isinstance(number, float):
        raise TypeError(
            f"returned the float {number}; an int is needed, whose sum is the same in any order. Return a multiple of "
            "it, such as round(value * 1000); or add floats up in the training loop by strategy.reduce('sum', value)"
        )
    if isinstance(number, bool) or not isinstance(number, int):
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            kind = f"tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
        raise TypeError(f"returned a {kind}; an int is needed, such as int(mask.sum())")
    return number
