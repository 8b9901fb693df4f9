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
from typing import Any, Final, Protocol, final

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


class Column(Protocol):
    """A tensor or array with a row for each sample."""

    kind: tuple[bool, Any, tuple[int, ...]]
    """Whether it is a tensor, its dtype and its inner dimensions."""

    def __len__(self) -> int: ...

    def take(self, places: Ints) -> torch.Tensor:
        """These rows, in memory of their own.

        Raises:
          IndexError: a row is out of range, or negative, which torch would count from the end. (``RuntimeError`` if the
            rows have no elements.)
        """

    def cut(self, lo: int, hi: int) -> torch.Tensor:
        """The rows from ``lo`` to ``hi - 1``, in memory of their own. The column has all of them."""

    def is_still(self, column: Any) -> bool:
        """Whether this object was made for ``column``, and for the memory that ``column`` has now."""


def column_of(column: Any) -> Column | None:
    """The column; ``None`` if reading single rows with torch might give other results. Local."""
    if type(column) is torch.Tensor:
        plain = (
            column.layout is torch.strided
            and column.device.type == "cpu"
            and not (column.requires_grad or column.is_nested or column.is_quantized)
            and not (column.is_conj() or column.is_neg())
        )
        return _OfTensor(column) if plain and column.dim() and _has_plain_rows(column) else None
    if type(column) not in ARRAYS:
        return None
    array: npt.NDArray[Any] = np.asarray(column)  # drops a subclass
    plain = array.dtype.kind in "biufc" and array.dtype.isnative and array.ndim > 0 and array.flags.c_contiguous
    return _OfArray(column, array) if plain else None


def _has_plain_rows(column: torch.Tensor) -> bool:
    """Whether each row is contiguous: otherwise torch's stacking may keep another order of the dimensions."""
    return not len(column) or column[0].is_contiguous()


@final
class _OfTensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.kind = (True, tensor.dtype, tuple(tensor.shape[1:]))
        self._tensor = tensor
        self._shape = tensor.shape
        self._address = tensor.data_ptr()
        self._view = _view_of(tensor)
        alone = tensor.dim() == 1 and tensor.dtype in _BARELY_KNOWN
        self._few = sys.maxsize if alone else _SMALL // max(1, math.prod(tensor.shape[1:]))

    def __len__(self) -> int:
        return len(self._tensor)

    def take(self, places: Ints) -> torch.Tensor:
        if self._view is not None and self._is_for_one_thread(len(places)):
            return torch.from_numpy(self._view.take(places, 0))
        return self._tensor.index_select(0, torch.from_numpy(places))

    def cut(self, lo: int, hi: int) -> torch.Tensor:
        if self._view is not None and self._is_for_one_thread(hi - lo):
            return torch.from_numpy(self._view[lo:hi].copy())
        return self._tensor[lo:hi].clone(memory_format=torch.contiguous_format)

    def _is_for_one_thread(self, rows: int) -> bool:
        # A tensor can be given other memory; the view would still refer to the old memory, which may be freed.
        return (rows <= self._few or torch.get_num_threads() == 1) and self._tensor.data_ptr() == self._address

    def is_still(self, column: Any) -> bool:
        return column is self._tensor and column.data_ptr() == self._address and column.shape == self._shape


def _view_of(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """The same memory as an array; ``None`` if NumPy does not know the dtype, or would copy all of it for a gather."""
    if not tensor.is_contiguous() or not tensor.numel():  # without elements, NumPy's strides differ from torch's
        return None
    try:
        return np.from_dlpack(tensor)  # ``numpy()`` would make the user's tensor not resizable
    except (BufferError, RuntimeError, TypeError):
        return None


@final
class _OfArray:
    """An array, or a memory-mapped one. NumPy can gather from read-only memory; torch cannot.

    Args:
      given: the user's array.
      array: the same array without its subclass.
    """

    def __init__(self, given: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
        self.kind = (False, array.dtype, tuple(array.shape[1:]))
        self._given = given
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def take(self, places: Ints) -> torch.Tensor:
        return torch.from_numpy(self._array.take(places, 0))

    def cut(self, lo: int, hi: int) -> torch.Tensor:
        return torch.from_numpy(self._array[lo:hi].copy())

    def is_still(self, column: Any) -> bool:
        return column is self._given
