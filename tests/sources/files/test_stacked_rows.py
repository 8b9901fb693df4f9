"""Rows of arrays that are read as one array: bit for bit what ``default_collate`` makes of them one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from torchdistinput import FileDataset, readers
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.records.source import RecordSource
from torchdistinput.step_types import ReadFailure, Start

Array = npt.NDArray[Any]

DTYPES = ["f4", ">f4", "f2", "f8", "c8", ">c16", "i1", "i8", ">i4", "u1", "u2", "?", "g", "S3", "U2", "M8[s]", "i4,f4"]


def one_by_one(rows: list[Any]) -> Any:
    return default_collate(rows)


def pieces(
    files: Sequence[Path], collate: Callable[[Any], Any], topology: Topology, start: Start, **options: Any
) -> list[Any]:
    """The rows of an epoch, and the type of the exception in which it ends."""
    dataset = FileDataset([str(name) for name in files], readers.npy_rows, **options)
    loader = DataLoader(dataset, 7, collate_fn=collate)
    policy = AutoShardPolicy.DATA if topology.num_workers == 2 else AutoShardPolicy.FILE
    stream = RecordSource(loader, policy, topology, InputOptions()).open(0, lambda call: call(), start)
    found: list[Any] = []
    try:
        while (row := stream.draw()) is not None:
            found.append((row, stream.position(len(found) + 1)))
    except ReadFailure as failure:
        found.append((type(failure.__cause__), str(failure.__cause__)))
    stream.close()
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """The same rows, and the same failure. Places need not be told after the same rows."""
    assert len(found) == len(expected)
    for (row, place), (other_row, other_place) in zip(found, expected, strict=True):
        assert place[-1] == other_place[-1]
        if isinstance(row[0], type):
            assert row == other_row
            continue
        assert row[1].pieces == other_row[1].pieces
        for piece, other in zip(row[0], other_row[0], strict=True):
            assert type(piece) is type(other)
            if isinstance(piece, torch.Tensor):
                assert (piece.dtype, piece.shape, piece.stride()) == (other.dtype, other.shape, other.stride())
                assert piece.untyped_storage().resizable() == other.untyped_storage().resizable()
                assert torch.equal(piece.nan_to_num(), other.nan_to_num())
            else:
                assert piece == other


def array_of(dtype: str, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(len(shape)).integers(0, 99, shape).astype(dtype)


WORLDS = [Topology(num_workers=workers, replicas_per_worker=2 // workers, worker=workers - 1) for workers in (1, 2)]


@pytest.mark.parametrize("topology", WORLDS, ids=["one", "second of two"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_read_together_are_those_collated_one_by_one(dtype: str, topology: Topology, tmp_path: Path) -> None:
    names = [tmp_path / str(number) for number in range(3)]
    for inner in ((), (3,), (2, 0), (2, 1, 2)):
        for name, size in zip(names, (10, 1, 18), strict=True):
            with name.open("wb") as file:
                np.save(file, array_of(dtype, (size, *inner)))
        for map_fn in (None, torch.from_numpy) if inner else (None,):
            expected = pieces(names, one_by_one, topology, Start(), map_fn=map_fn)
            assert_same(pieces(names, default_collate, topology, Start(), map_fn=map_fn), expected)
            start = Start(steps=2, position=expected[1][1]) if len(expected) > 2 else Start()
            assert_same(pieces(names, default_collate, topology, start, map_fn=map_fn), expected[start.steps :])


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(10, 3), (9, 4)], {}),
        ([(10, 3), (9, 3)], {"cycle_length": 2}),
        ([(10, 3), (9, 3)], {"cycle_length": 2, "block_length": 5}),
        ([(10, 3), (9, 3)], {"shuffle_buffer": 4}),
        ([(10, 3), (0, 3), (9, 3)], {"compression": None}),
    ],
)
def test_other_walks_over_rows_give_the_same(
    shapes: list[tuple[int, ...]], options: dict[str, Any], tmp_path: Path
) -> None:
    names = [tmp_path / str(number) for number in range(len(shapes))]
    for name, shape in zip(names, shapes, strict=True):
        with name.open("wb") as file:
            np.save(file, array_of("f4", shape))
    for topology in WORLDS:
        expected = pieces(names, one_by_one, topology, Start(), **options)
        assert_same(pieces(names, default_collate, topology, Start(), **options), expected)


@pytest.mark.parametrize("topology", WORLDS, ids=["one", "second of two"])
@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (("f4", 2), ("f8", 2), "rows: float64 of 1 dimension(s) here, rows: float32 of 1 dimension(s) there"),
        (("f4", 2), ("f4", 3), "rows: float32 of 2 dimension(s) here, rows: float32 of 1 dimension(s) there"),
        (("M8[s]", 1), ("M8[ms]", 1), "rows: datetime64[ms] of 0 dimension(s) here"),
        (("i4,f4", 1), ("i4,f8", 1), "rows: [f0: int32, f1: float64] of 0 dimension(s) here"),
        (("f4", 1), (">f4", 1), ""),
        (("U2", 1), ("U7", 1), ""),
    ],
)
def test_files_of_different_dtypes_are_refused(
    first: tuple[str, int], second: tuple[str, int], told: str, topology: Topology, tmp_path: Path
) -> None:
    names = [tmp_path / str(number) for number in range(3)]
    for name, size, (dtype, dims) in zip(names, (0, 7, 7), (second, first, second), strict=True):
        with name.open("wb") as file:  # one without rows may be anything
            np.save(file, array_of(dtype, (size, *range(2, dims + 1))))
    *_, (_, problem) = pieces(names, list, topology, Start())
    assert (f"2: its columns differ from those of {names[1]}: {told}" in str(problem)) == bool(told)
