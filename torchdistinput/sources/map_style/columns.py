"""One tensor or array of a dataset, of which many rows are read at once.

Problem. Torch's own gather sets up an iterator for each row, and shares the work among its threads, who must all come.
For a batch of a few hundred kilobytes that takes longer than the copying: NumPy's takes half to two thirds of it on one
thread.

Decision. What is small, or is to be done by one thread anyway, is gathered by NumPy, out of the tensor's own memory;
more than that by torch, on as many threads as it has. The rows are the same to the last bit, in memory of their own.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["ARRAYS", "Column", "column_of"]

Ints = npt.NDArray[np.int64]

ARRAYS: Final = (np.ndarray, np.memmap)
"""Types of arrays whose rows are known to be what they seem."""
_SMALL: Final = 65_536
"""Elements that torch would divide among two threads at most."""
_BARELY_KNOWN: Final = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes of which torch gathers rows, but no single numbers."""


class Column(Protocol):
    """A tensor or array with a row for each sample."""

    kind: tuple[bool, Any, tuple[int, ...]]
    """Whether it is a tensor, its dtype and its inner dimensions."""

    def __len__(self) -> int: ...

    def take(self, places: Ints) -> torch.Tensor:
        """These rows, in memory of their own.

        Raises:
          IndexError: a row is out of range; also where torch would count it from the end. (``RuntimeError``: of rows
            that have nothing in them.)
        """

    def cut(self, lo: int, hi: int) -> torch.Tensor:
        """The rows from ``lo`` to ``hi - 1``, which are there, in memory of their own."""

    def is_still(self, column: Any) -> bool:
        """Whether this is of that one, and of the memory that it has now."""


def column_of(column: Any) -> Column | None:
    """The column; ``None`` if torch's way of reading single rows might make something else of them. Local."""
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
    array: npt.NDArray[Any] = np.asarray(column)  # without a subclass
    plain = array.dtype.kind in "biufc" and array.dtype.isnative and array.ndim > 0 and array.flags.c_contiguous
    return _OfArray(column, array) if plain else None


def _has_plain_rows(column: torch.Tensor) -> bool:
    """Whether each row lies in one piece: torch's stacking may keep another order of the dimensions."""
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
        """See ``Column.take``."""
        if self._view is not None and self._is_for_one_thread(len(places)):
            return torch.from_numpy(self._view.take(places, 0))
        return self._tensor.index_select(0, torch.from_numpy(places))

    def cut(self, lo: int, hi: int) -> torch.Tensor:
        """See ``Column.cut``."""
        if self._view is not None and self._is_for_one_thread(hi - lo):
            return torch.from_numpy(self._view[lo:hi].copy())
        return self._tensor[lo:hi].clone(memory_format=torch.contiguous_format)

    def _is_for_one_thread(self, rows: int) -> bool:
        # A tensor can be given other memory; the view would still be of the one before, which may be gone.
        return (rows <= self._few or torch.get_num_threads() == 1) and self._tensor.data_ptr() == self._address

    def is_still(self, column: Any) -> bool:
        """See ``Column.is_still``."""
        return column is self._tensor and column.data_ptr() == self._address and column.shape == self._shape


def _view_of(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """The same memory as an array; ``None`` if NumPy does not know the dtype, or would copy all of it for a gather."""
    if not tensor.is_contiguous() or not tensor.numel():  # of nothing, NumPy's strides differ from torch's
        return None
    try:
        return np.from_dlpack(tensor)  # after ``numpy()`` the user's tensor could not be resized any more
    except (BufferError, RuntimeError, TypeError):
        return None


@final
class _OfArray:
    """An array, or a memory-mapped one. NumPy needs no writable memory for a gather, as torch does.

    Args:
      given: the user's.
      array: the same without a subclass.
    """

    def __init__(self, given: npt.NDArray[Any], array: npt.NDArray[Any]) -> None:
        self.kind = (False, array.dtype, tuple(array.shape[1:]))
        self._given = given
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def take(self, places: Ints) -> torch.Tensor:
        """See ``Column.take``."""
        return torch.from_numpy(self._array.take(places, 0))

    def cut(self, lo: int, hi: int) -> torch.Tensor:
        """See ``Column.cut``."""
        return torch.from_numpy(self._array[lo:hi].copy())

    def is_still(self, column: Any) -> bool:
        """See ``Column.is_still``."""
        return column is self._given
