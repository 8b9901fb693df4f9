"""In-memory datasets: each tensor of a batch is gathered in one call, instead of sample by sample.

Problem. ``DataLoader`` reads a ``TensorDataset`` one sample after the other and stacks the samples: 1.4 us a sample,
thirty times the cost of copying them.

Decision. Where nothing but torch and NumPy takes part (a ``TensorDataset``, tensors, arrays, memory-mapped ones, a
``Table`` of them, ``Subset`` of these, collated by torch's own function), each tensor of the
batch is gathered in one call. Types are compared by ``is``: a subclass may do anything. Before the gather is used, its
result for two samples is compared with torch's. If they are not equal to the last bit, the samples are read one by one
as torch does. So are indices that are out of range, so that errors are torch's, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from torchdistinput.batches import pytree
from torchdistinput.plan.permutation import Ints
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.map_style.table import Table, columns_in

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


NOT_THERE: Final = (IndexError, RuntimeError)
"""Exceptions of a gather if a row is out of range, or counted from the end: reading one by one then names the row.
All other exceptions come from elsewhere, for example from a signal handler, and must not be taken for this."""

# The exceptions of torch, NumPy and a faulty dataset in the trial that shows whether rows can be gathered.
_OF_A_TRIAL: Final = (
    *(ArithmeticError, AssertionError, AttributeError, BufferError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError),
)


class _RowReader(Protocol):
    """Reads rows of a few tensors at once."""

    def read(self, rows: IndexArray) -> list[torch.Tensor]:
        """A tensor for each column, in memory of its own.

        Raises:
          IndexError: a row is out of range, or negative, which torch would count from the end.
        """

    def is_current(self) -> bool:
        """Whether the dataset still has the same parts."""


@final
class InMemoryRows:
    """Makes the batches that a dataset and torch's collate function would make.

    Args:
      reader: reads the tensors.
      build: builds the batch from them.
    """

    def __init__(self, reader: _RowReader, build: Callable[[list[torch.Tensor]], Any]) -> None:
        self._reader = reader
        self._build = build
        self._default_device = torch.get_default_device()  # on which torch makes tensors from arrays

    def __call__(self, rows: IndexArray) -> Any:
        """The batch of these rows.

        Raises:
          IndexError: a row is out of range, or negative. Torch then raises its own error, or counts from the end.
        """
        return self._build(self._reader.read(rows))

    def is_current(self) -> bool:
        """Whether torch would still make the same batches. To be called when an epoch begins."""
        return torch.get_default_device() == self._default_device and self._reader.is_current()


def gather_of(dataset: Any, collate: Any, *, many: bool) -> InMemoryRows | None:
    """The gather for the batches of a dataset; ``None`` if it must be read sample by sample. Local.

    Args:
      dataset: any map-style dataset.
      collate: the loader's ``collate_fn``.
      many: whether batches are collated from samples; else the dataset is indexed with the list of their indices.
    """
    if collate is not (default_collate if many else default_convert):
        return None
    try:
        reader = _reader_of(dataset)
        if reader is None or not len(dataset):
            return None
        rows = [0, len(dataset) - 1]
        with warnings.catch_warnings():  # torch warns of read-only arrays, as it might share their memory
            warnings.simplefilter("ignore")
            expected = collate([dataset[row] for row in rows] if many else dataset[rows])
        build = _build_of(expected)
        if build is None or not _same(expected, build(reader.read(IndexArray(np.array(rows))))):
            return None
    except _OF_A_TRIAL:  # reading one by one will raise it again, where the samples are read
        return None
    return InMemoryRows(reader, build)


def gathers(loader: DataLoader[Any]) -> bool:
    """Whether the batches of a torch loader are tensors with a row for each sample, gathered at once. Local."""
    many = loader.batch_sampler is not None
    listed = many or type(loader.sampler) is BatchSampler
    return listed and gather_of(loader.dataset, loader.collate_fn, many=many) is not None


def index_array_of(indices: Any) -> IndexArray | None:
    """A list or tuple of plain ints; ``None`` for any other: ``True`` does not count as ``1``. Local."""
    if type(indices) not in {list, tuple} or not {*map(type, indices)} <= {int, np.int64}:
        return None
    try:
        return IndexArray(np.array(indices, dtype=np.int64))
    except OverflowError:
        return None


def _reader_of(dataset: Any) -> _RowReader | None:
    kind = type(dataset)
    if kind is TensorDataset:
        return _columns_of(lambda: dataset.tensors)
    if kind is Table:
        return _columns_of(lambda: dataset.columns)
    if kind is torch.Tensor or kind in ARRAYS:
        return _columns_of(lambda: dataset)
    if kind is Subset:
        inner, indices = _reader_of(dataset.dataset), _indices_of(dataset.indices)
        return None if inner is None or indices is None else _SubsetReader(dataset, inner, indices)
    return None


@final
class _ColumnReader:
    """Tensors and arrays side by side.

    Args:
      content: returns the tensors and arrays, nested or not.
      columns: the columns made from them.
    """

    def __init__(self, content: Callable[[], Any], columns: Sequence[Column]) -> None:
        self._content = content
        self._columns = columns
        self._length = len(columns[0])

    def read(self, rows: IndexArray) -> list[torch.Tensor]:
        content = rows.content
        if not isinstance(content, range):
            return [column.take(content) for column in self._columns]
        if content.stop > self._length:  # the gather checks an array
            raise IndexError(f"a place outside of [0, {self._length})")
        return [column.cut(content.start, content.stop) for column in self._columns]

    def is_current(self) -> bool:
        now = columns_in(self._content())
        same = len(now) == len(self._columns)
        return same and all(own.is_still(column) for own, column in zip(self._columns, now, strict=True))


def _columns_of(content: Callable[[], Any]) -> _ColumnReader | None:
    columns = [column_of(column) for column in columns_in(content())]
    found = [column for column in columns if column is not None]
    alike = len({len(column) for column in found}) == 1
    return _ColumnReader(content, found) if alike and len(found) == len(columns) else None


@final
class _SubsetReader:
    """A ``Subset``.

    Args:
      subset: the ``Subset``.
      inner: reads the dataset of the ``Subset``.
      indices: its rows in this dataset: an array, or a range with any step.
    """

    def __init__(self, subset: Subset[Any], inner: _RowReader, indices: Ints | range) -> None:
        self._subset = subset
        self._dataset, self._given = subset.dataset, subset.indices
        # Lists are compared by the identity of their entries first: much faster than making arrays of them.
        self._copy = list(subset.indices) if type(subset.indices) is list else None
        self._inner = inner
        self._indices = indices

    def read(self, rows: IndexArray) -> list[torch.Tensor]:
        indices, places = self._indices, rows.array()
        if not isinstance(indices, range):
            return self._inner.read(IndexArray(indices.take(places)))
        _refuse_outside(places, len(indices))
        return self._inner.read(IndexArray(indices.start + indices.step * places))

    def is_current(self) -> bool:
        subset = self._subset
        same = subset.dataset is self._dataset and subset.indices is self._given
        return same and (self._copy is None or self._copy == subset.indices) and self._inner.is_current()


def _indices_of(indices: Any) -> Ints | range | None:
    """The indices of a ``Subset``, if they are plain ints. A tensor or array is not copied."""
    if type(indices) is range:
        return indices
    if type(indices) is torch.Tensor and indices.dtype is torch.int64 and indices.device.type == "cpu":
        indices = indices.numpy()
    if type(indices) is np.ndarray:
        return indices if indices.dtype == np.int64 and indices.ndim == 1 else None
    found = index_array_of(indices)
    return None if found is None else found.array()


def _refuse_outside(places: Ints, length: int) -> None:
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < length:
        raise IndexError(f"a place outside of [0, {length})")


def _build_of(batch: Any) -> Callable[[list[torch.Tensor]], Any] | None:
    """The function that builds a batch like this one from tensors; ``None`` if the batch has other values too."""
    leaves, nesting = pytree.flatten(batch)
    if not leaves or not all(type(leaf) is torch.Tensor for leaf in leaves):
        return None
    if nesting is None:
        return lambda tensors: tensors[0]
    if nesting.cls is list and not any(nesting.children):
        return lambda tensors: tensors
    return lambda tensors: pytree.unflatten(nesting, tensors)


def _same(expected: Any, found: Any) -> bool:
    """Whether two batches are the same to the last bit, the types of their containers included."""
    if type(expected) is not type(found):
        return False
    if isinstance(expected, torch.Tensor):
        alike = expected.dtype is found.dtype and expected.shape == found.shape and expected.stride() == found.stride()
        alike = alike and expected.device == found.device
        return alike and torch.equal(expected.reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8))
    if isinstance(expected, Mapping):
        return list(expected) == list(found) and all(_same(expected[key], found[key]) for key in expected)
    if not isinstance(expected, Sequence):
        return False
    return len(expected) == len(found) and all(map(_same, expected, found))
