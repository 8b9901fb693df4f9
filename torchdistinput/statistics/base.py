"""The contract of a statistic (``Statistic``), and the code shared by all statistics of numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[Any]

State: TypeAlias = Any
"""Dicts, lists, sets, strings, numbers, ``None`` and NumPy arrays, nested. A state is sent to other ranks and saved."""

NanPolicy: TypeAlias = Literal["propagate", "omit", "raise"]

_POLICIES: Final = ("propagate", "omit", "raise")


class Statistic(ABC):
    """A result that ``analyze`` computes of a leaf: four functions of a state, and more passes where one is not enough.

    The result must not depend on the order of the batches or on how the data is cut into batches. It does not if
    ``merge`` is exact, associative and commutative, and ``update`` merges the state of a batch.
    """

    @abstractmethod
    def start(self) -> State:
        """The state of no data. Merging it with another state gives the other state."""

    @abstractmethod
    def update(self, state: State, batch: Any) -> State:
        """The state with one more batch. It may change ``state`` and return it.

        Args:
          state: a state of ``start``, ``update`` or ``merge``.
          batch: an array of samples along dim 0, a list with one entry per sample, or the value that a function of the
            spec returned.
        """

    @abstractmethod
    def merge(self, state: State, other: State) -> State:
        """The state of the data of both states."""

    @abstractmethod
    def result(self, state: State) -> Any:
        """The result, from the state of all data after the last pass.

        Raises:
          ValueError: there is no data, and the statistic needs some.
        """

    def next_pass(self, state: State) -> Statistic | None:
        """The statistic for one more pass over the data, given the state of all data; ``None`` to end."""
        return None


def _by_feature(batch: Any, axis: int | Sequence[int] | None) -> tuple[Numbers, tuple[int, ...]]:
    """The numbers of a batch as ``(features, m)``, and the shape of the features.

    Args:
      batch: an array of real numbers, samples along dim 0.
      axis: the dims that tell features apart; ``None`` for one feature. For samples that are single numbers, -1 also
        means one feature.

    Raises:
      TypeError: the batch holds no real numbers.
      ValueError: ``axis`` is no dim of the samples.
    """
    values = np.asarray(batch)
    if values.dtype.kind not in "biuf":
        raise TypeError(f"the leaf holds {_described(batch, values)}; numbers are needed: bool, int or float.")
    if values.dtype.itemsize > 8:
        raise TypeError(f"the leaf holds {values.dtype}; float64 or a shorter type is needed.")
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


def _described(batch: Any, values: Numbers) -> str:
    if values.dtype.kind in "USO" and values.size:
        first = values.reshape(-1)[:1].tolist()[0]
        return f"{type(first).__name__} ({first!r:.40})"
    return f"{type(batch).__name__} of dtype {values.dtype}"


def no_data() -> dict[str, Any]:
    """The state of a statistic of numbers before its first batch."""
    return {"dtype": None, "shape": None}


def taken(state: Mapping[str, Any], batch: Any, axis: int | Sequence[int] | None) -> tuple[Numbers, dict[str, Any]]:
    """The numbers of a batch as ``(features, m)``, and their dtype and the shape of the features, as states have them.

    Raises:
      TypeError: the batch holds no numbers, or another dtype than the batches before.
      ValueError: ``axis`` is no dim of the samples, or the features have another shape than before.
    """
    values, shape = _by_feature(batch, axis)
    kind = {"dtype": values.dtype.name, "shape": list(shape)}
    if values.size:
        _check_kinds(state, kind)
    return values, kind


def joined(
    state: Mapping[str, Any],
    other: Mapping[str, Any],
    join: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]],
) -> State:
    """The state of the data of two states of numbers; ``join`` is called where both have data.

    Raises:
      TypeError: the states are of different dtypes.
      ValueError: the states are of features of different shapes.
    """
    if state["dtype"] is None or other["dtype"] is None:
        return other if state["dtype"] is None else state
    _check_kinds(state, other)
    return {"dtype": state["dtype"], "shape": state["shape"], **join(state, other)}


def _check_kinds(state: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuses numbers of another dtype, or features of another shape, than the state has, if it has data."""
    if state["dtype"] is None:
        return
    if state["dtype"] != other["dtype"]:
        raise TypeError(
            f"the leaf is {state['dtype']} in some batches and {other['dtype']} in others; one dtype is needed."
        )
    if state["shape"] != other["shape"]:
        raise ValueError(
            f"the features have shape {tuple(state['shape'])} in some batches and {tuple(other['shape'])} in others; "
            "one shape is needed. axis=None takes all numbers as one feature."
        )


def check_has_data(state: Mapping[str, Any]) -> None:
    """Refuses to make a result of no data.

    Raises:
      ValueError: no batch had a sample.
    """
    if state["dtype"] is None:
        raise ValueError("there is no data: no batch had a sample.")


def check_nan_policy(policy: object) -> None:
    """Refuses a word that is no NaN policy of ``scipy.stats``."""
    if policy not in _POLICIES:
        raise ValueError(f"nan_policy is {policy!r}; it must be {', '.join(map(repr, _POLICIES))}.")


def check_float_dtype(dtype: object) -> None:
    """Refuses a dtype of results other than float64 and float32."""
    if dtype not in ("float64", "float32"):
        raise ValueError(f"dtype is {dtype!r}; it must be 'float64' or 'float32'.")
