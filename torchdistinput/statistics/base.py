"""The contract of a statistic (``Statistic``), and what all statistics of numbers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["NanPolicy", "State", "Statistic", "by_feature", "check_float_dtype", "check_nan_policy", "same_kind"]

State: TypeAlias = Any
"""Dicts, lists, sets, strings, numbers, ``None`` and NumPy arrays, nested: it is sent to other ranks and saved."""

NanPolicy: TypeAlias = Literal["propagate", "omit", "raise"]

_POLICIES: Final = ("propagate", "omit", "raise")


class Statistic(ABC):
    """What ``analyze`` computes of a leaf: four functions of a state, and more passes where one does not suffice.

    The result must not depend on the order and the cut of the batches. It does not if ``merge`` is exact, associative
    and commutative, and ``update`` merges the state of a batch.
    """

    @abstractmethod
    def start(self) -> State:
        """The state of no data. Merged with another state it gives that state."""

    @abstractmethod
    def update(self, state: State, batch: Any) -> State:
        """The state with one batch more. It may change ``state`` and return it.

        Args:
          state: a state of ``start``, ``update`` or ``merge``.
          batch: an array of samples along dim 0, a list with one entry per sample, or what the function of the spec
            returned.
        """

    @abstractmethod
    def merge(self, state: State, other: State) -> State:
        """The state of the data of both states."""

    @abstractmethod
    def result(self, state: State) -> Any:
        """The result, from the state of all data after the last pass.

        Raises:
          ValueError: there is no data, where the statistic needs some.
        """

    def next_pass(self, state: State) -> Statistic | None:
        """The statistic of one more pass over the data, given the state of all data; ``None`` if there is a result."""
        return None


def by_feature(batch: Any, axis: int | Sequence[int] | None) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """The numbers of a batch as ``(features, m)``, and the shape of the features.

    Args:
      batch: an array of real numbers, samples along dim 0.
      axis: the dims that tell features apart; ``None`` for one feature. Of samples that are single numbers, -1 too is
        one feature.

    Raises:
      TypeError: the batch holds no real numbers.
      ValueError: ``axis`` is no dim of the samples.
    """
    values = np.asarray(batch)
    if values.dtype.kind not in "biuf":
        raise TypeError(f"the leaf holds {_described(batch, values)}; numbers are needed: bool, int or float.")
    if values.dtype == np.longdouble and values.dtype.itemsize > 8:
        raise TypeError("the leaf holds numpy.longdouble; float64 or a shorter type is needed.")
    if axis is None or (axis == -1 and values.ndim == 1):
        return values.reshape(1, -1), ()
    given = [axis] if isinstance(axis, int) else list(axis)
    kept = [each + values.ndim if each < 0 else each for each in given]
    if len(set(kept)) != len(kept) or not all(0 < each < values.ndim for each in kept):
        raise ValueError(
            f"axis={axis} of a batch of shape {values.shape}: each must be another dim from 1 to {values.ndim - 1}; "
            "dim 0 is that of the samples."
        )
    shape = tuple(values.shape[each] for each in kept)
    moved = np.moveaxis(values, kept, range(len(kept))).reshape(int(np.prod(shape)), -1)
    return (np.ascontiguousarray(moved) if len(moved) < 64 else moved), shape


def _described(batch: Any, values: npt.NDArray[Any]) -> str:
    if values.dtype.kind in "USO" and values.size:
        first = values.reshape(-1)[0]
        return f"{type(first).__name__} ({first!r:.40})"
    return f"{type(batch).__name__} of dtype {values.dtype}"


def same_kind(state: Mapping[str, Any], dtype: str | None, shape: Sequence[int] | None) -> tuple[str, list[int]]:
    """The dtype and the shape of the features, which no batch may change.

    Raises:
      TypeError: the dtype is another one than before.
      ValueError: the shape is another one.
    """
    old_dtype, old_shape = state["dtype"], state["shape"]
    if old_dtype is not None and dtype is not None and old_dtype != dtype:
        raise TypeError(f"the leaf is {old_dtype} in some batches and {dtype} in others; one dtype is needed.")
    if old_shape is not None and shape is not None and list(old_shape) != list(shape):
        raise ValueError(
            f"the features have shape {tuple(old_shape)} in some batches and {tuple(shape)} in others; one shape is "
            "needed. axis=None takes all numbers as one feature."
        )
    return old_dtype if dtype is None else dtype, old_shape if shape is None else list(shape)


def check_nan_policy(policy: object) -> None:
    """Refuses another word than those of ``scipy.stats``."""
    if policy not in _POLICIES:
        raise ValueError(f"nan_policy is {policy!r}; it must be {', '.join(map(repr, _POLICIES))}.")


def check_float_dtype(dtype: object) -> None:
    """Refuses another dtype of results than float64 and float32."""
    if dtype not in ("float64", "float32"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'.")
