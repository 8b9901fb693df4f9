"""Columns: the tensors and arrays of an in-memory dataset, of which many rows are gathered in one call.

Problem. Torch's own gather sets up an iterator for each row, and divides the work among its threads, which must all
start. For a batch of a few hundred kilobytes this takes longer than the copying: NumPy's gather on one thread takes
half to two thirds of the time.

Decision. Small gathers, and all gathers if torch has one thread, are done by NumPy from the tensor's own memory. Larger
gathers are done by torch on all its threads. The rows are the same to the last bit, in memory of their own.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

ARRAYS: Final = (np.ndarray, np.memmap)
"""Types of arrays with NumPy's own indexing, which a subclass could change."""
_SMALL: Final = 65_536
"""The most elements of a small gather: torch would divide them among two threads at most."""
_BARELY_KNOWN: Final = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes for which torch gathers rows, but not single numbers."""


@final
class Column:
    """A tensor or array with a row for each sample.

    Args:
      given: the user's tensor or array.
      view: its memory as an array: NumPy can gather from read-only memory; torch cannot. ``None`` for a tensor whose
        dtype NumPy does not know, or all of which NumPy would copy for a gather.
    """

    def __init__(self, given: Any, view: npt.NDArray[Any] | None) -> None:
        self._given = given
        self._view = view
        self._shape = given.shape
        inner = tuple(given.shape[1:])
        self.kind = isinstance(given, torch.Tensor), given.dtype, inner
        """Whether it is a tensor, its dtype and its inner dimensions."""
        self._address = given.data_ptr() if isinstance(given, torch.Tensor) else None
        alone = self._address is not None and not inner and given.dtype in _BARELY_KNOWN
        self._most_rows = sys.maxsize if alone else _SMALL // max(1, math.prod(inner))  # of a small gather

    def __len__(self) -> int:
        return len(self._given)

    def take(self, places: Ints) -> torch.Tensor:
        """These rows, in memory of their own.

        Raises:
          IndexError: a row is out of range, or negative, which torch would count from the end. (``RuntimeError`` if the
            rows have no elements.)
        """
        if self._view is not None and self._is_for_one_thread(len(places)):
            return torch.from_numpy(self._view.take(places, 0))
        rows: torch.Tensor = self._given.index_select(0, torch.from_numpy(places))
        return rows

    def cut(self, lo: int, hi: int) -> torch.Tensor:
        """The rows from ``lo`` to ``hi - 1``, in memory of their own. The column has all of them."""
        if self._view is not None and self._is_for_one_thread(hi - lo):
            return torch.from_numpy(self._view[lo:hi].copy())
        rows: torch.Tensor = self._given[lo:hi].clone(memory_format=torch.contiguous_format)
        return rows

    def _is_for_one_thread(self, rows: int) -> bool:
        if self._address is None:
            return True
        # A tensor can be given other memory; the view would still refer to the old memory, which may be freed.
        small = rows <= self._most_rows or torch.get_num_threads() == 1
        return small and bool(self._given.data_ptr() == self._address)

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
        return Column(column, _view_of(column)) if plain else None
    if type(column) not in ARRAYS:
        return None
    array: npt.NDArray[Any] = np.asarray(column)  # drops a subclass
    plain = array.dtype.kind in "biufc" and array.dtype.isnative and array.ndim > 0 and array.flags.c_contiguous
    return Column(column, array) if plain else None


def _view_of(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    if not tensor.is_contiguous() or not tensor.numel():  # without elements, NumPy's strides differ from torch's
        return None
    try:
        return np.from_dlpack(tensor)  # ``numpy()`` would make the user's tensor not resizable
    except (BufferError, RuntimeError, TypeError):
        return None
