"""Columns: the tensors and arrays of an in-memory dataset, of which many rows are gathered in one call."""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

from torchdistinput.plan.permutation import Ints

ARRAYS: Final = (np.ndarray, np.memmap)
"""Types of arrays with NumPy's own indexing, which a subclass could change."""
_SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""The dtypes of which torch gathers no single numbers, and those of the same size of which it does."""


@final
class Column:
    """A tensor or array with a row for each sample.

    Args:
      given: the user's tensor or array.
      array: the array without its subclass. NumPy can gather from read-only memory; torch cannot. ``None`` for a
        tensor.
    """

    def __init__(self, given: Any, array: npt.NDArray[Any] | None) -> None:
        self._given = given
        self._array = array
        self._shape = given.shape
        self.kind = array is None, given.dtype, tuple(given.shape[1:])
        """Whether it is a tensor, its dtype and its inner dimensions."""
        self._address = given.data_ptr() if array is None else None

    def __len__(self) -> int:
        return len(self._given)

    def take(self, places: Ints) -> torch.Tensor:
        """These rows, in memory of their own.

        Raises:
          IndexError: a row is out of range, or, of a tensor, negative. (``RuntimeError`` if the rows have no elements.)
        """
        if self._array is not None:
            return torch.from_numpy(self._array.take(places, 0))
        given: torch.Tensor = self._given
        signed = _SIGNED.get(given.dtype)
        if signed is not None:
            return given.view(signed).index_select(0, torch.from_numpy(places)).view(given.dtype)
        return given.index_select(0, torch.from_numpy(places))

    def cut(self, lo: int, hi: int) -> torch.Tensor:
        """The rows from ``lo`` to ``hi - 1``, in memory of their own. The column has all of them."""
        if self._array is not None:
            return torch.from_numpy(self._array[lo:hi].copy())
        rows: torch.Tensor = self._given[lo:hi].clone(memory_format=torch.contiguous_format)
        return rows

    def is_still(self, column: Any) -> bool:
        """Whether this object was made for ``column``, and for the memory that ``column`` has now."""
        if column is not self._given:
            return False
        return self._address is None or (column.data_ptr() == self._address and column.shape == self._shape)


def column_of(column: Any) -> Column | None:
    """The column; ``None`` if reading single rows with torch might give other results. Local."""
    if type(column) is torch.Tensor:
        plain = (
            column.layout is torch.strided
            and column.device.type == "cpu"
            and not (column.requires_grad or column.is_nested or column.is_quantized)
            and not (column.is_conj() or column.is_neg())
            and column.dim() > 0
            and (not len(column) or column[0].is_contiguous())  # else torch's stacking may keep another order
        )
        return Column(column, None) if plain else None
    if type(column) not in ARRAYS:
        return None
    array: npt.NDArray[Any] = np.asarray(column)  # drops a subclass
    plain = array.dtype.kind in "biufc" and array.dtype.isnative and array.ndim > 0 and array.flags.c_contiguous
    return Column(column, array) if plain else None
