"""Long matrices of cases: every cell in each run, every combination when asked for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

Cell = TypeVar("Cell")


def cells(
    of: Sequence[Cell], settings: Mapping[str, Sequence[Any]], *, everything: bool, seed: int = 0
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yields each cell with settings: with all combinations of them, or with one that rotates from cell to cell.

    Args:
      of: the cells, each of which every run has to see.
      settings: the values of each other setting, by name.
      everything: True for the full product (``scripts/test --all``).
      seed: fixes the order in which the combinations rotate.
    """
    combinations = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    if everything:
        yield from itertools.product(of, combinations)
        return
    random.Random(seed).shuffle(combinations)
    yield from zip(of, itertools.cycle(combinations), strict=False)
