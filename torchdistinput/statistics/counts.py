"""``Counts``: how often each value occurs, and how many values there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np

from torchdistinput.statistics.base import State, Statistic


@final
@dataclass(frozen=True)
class CountsResult:
    """The result of ``Counts``.

    Args:
      values: the values, the most frequent first; of equally frequent ones the larger first (text by code points).
      counts: how often each occurs.
      total: how many values were counted, including values that are not in ``values``.
      distinct: how many different values there are.
    """

    values: list[Any]
    counts: list[int]
    total: int
    distinct: int


@final
@dataclass(frozen=True)
class Counts(Statistic):
    """How often each value occurs: of strings, ints or bools. A vocabulary, most frequent first.

    The state has an entry for each different value (about 100 bytes, and the text), on each rank.

    >>> tdi.analyze(["a", "b", "a"], tdi.statistics.Counts(), global_batch_size=3)
    CountsResult(values=['a', 'b'], counts=[2, 1], total=3, distinct=2)

    Args:
      top: the most values in the result.
      min_count: values that occur less often are not in the result.

    Raises:
      ValueError: an argument is less than 1.
    """

    top: int | None = None
    min_count: int = 1

    def __post_init__(self) -> None:
        for name in ("top", "min_count"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name}={number}; it must be 1 or more.")

    def start(self) -> State:
        """See ``Statistic.start``."""
        return {"kind": None, "counts": {}, "total": 0}

    def update(self, state: State, batch: Any) -> State:
        """See ``Statistic.update``; the batch is an array, or lists of values, nested to any depth.

        Raises:
          TypeError: the values are no strings, ints or bools, or of another kind than earlier values.
        """
        kind, counts = _counted(batch)
        if kind is None:
            return state
        _check_kinds(state["kind"], kind)
        state["kind"] = kind
        before = state["counts"]
        for value, number in counts.items():
            before[value] = before.get(value, 0) + number
        state["total"] += sum(counts.values())
        return state

    def merge(self, state: State, other: State) -> State:
        """See ``Statistic.merge``."""
        kind = _check_kinds(state["kind"], other["kind"])
        counts = dict(state["counts"])
        for value, number in other["counts"].items():
            counts[value] = counts.get(value, 0) + number
        return {"kind": kind, "counts": counts, "total": state["total"] + other["total"]}

    def result(self, state: State) -> CountsResult:
        """See ``Statistic.result``. Without data the vocabulary is empty."""
        counts = state["counts"]
        kept = [(number, value) for value, number in counts.items() if number >= self.min_count]
        kept.sort(reverse=True)
        kept = kept[: self.top]
        values = [value for _, value in kept]
        return CountsResult(values, [number for number, _ in kept], state["total"], len(counts))


def _check_kinds(first: str | None, second: str | None) -> str | None:
    if first is not None and second is not None and first != second:
        raise TypeError(f"the values are {first} in some batches and {second} in others; one type is needed.")
    return second if first is None else first


def _counted(batch: Any) -> tuple[str | None, Counter[Any]]:
    """The type of the values of a batch (``None`` if there are none), and how often each value occurs."""
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biu":
        if not batch.size:
            return None, Counter()
        values, counts = np.unique(batch, return_counts=True)
        return "int", Counter(dict(zip(map(int, values), counts.tolist(), strict=True)))
    found: Counter[Any] = Counter()
    _count_into(found, batch.tolist() if isinstance(batch, np.ndarray) else batch)
    kinds = {"int" if issubclass(each, int) else each.__name__ for each in {*map(type, found)}}
    if not kinds <= {"str", "int"} or len(kinds) > 1:
        raise TypeError(f"the leaf holds {' and '.join(sorted(kinds))}; strings, or ints and bools, can be counted.")
    return (kinds.pop() if kinds else None), found


def _count_into(found: Counter[Any], values: Any) -> None:
    if isinstance(values, str | int | float | bytes) or not isinstance(values, Iterable):
        found[values] += 1
        return
    values = list(values)
    while values and isinstance(values[0], list | tuple | np.ndarray):
        values = list(chain.from_iterable(values))
    found.update(values)
