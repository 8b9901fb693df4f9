"""Rows of files are batched as one, of arrays and of strings: bit for bit what ``default_collate`` makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import torchdistinput as tdi
from tests.support.epochs import pieces, steps_until_raised
from tests.support.formats import npy
from torchdistinput import FileDataset, readers

DTYPES = ["f4", ">f4", "f2", "f8", "c8", ">c16", "i1", "i8", ">i4", "u1", "u2", "?", "g", "S3", "U2", "M8[s]", "i4,f4"]


def one_by_one(rows: list[Any]) -> Any:
    return default_collate(rows)


def batches(names: Sequence[Path], collate: Callable[[Any], Any], replicas: int, **options: Any) -> list[Any]:
    """The parts of each batch, and the exception in which the epoch ends."""
    dataset = FileDataset([str(name) for name in names], readers.npy_rows, **options)
    strategy = tdi.Strategy(["cpu"] * replicas)
    found: list[Any] = []
    try:
        for batch in strategy.distribute_dataset(DataLoader(dataset, 7, collate_fn=collate)):
            found.append(pieces(strategy, batch))
    except Exception as error:
        found.append((type(error), str(error)))
    return found


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for parts, others in zip(found, expected, strict=True):
        for part, other in zip(parts, others, strict=True):
            assert type(part) is type(other)
            if isinstance(part, torch.Tensor):
                assert (part.dtype, part.shape, part.stride()) == (other.dtype, other.shape, other.stride())
                assert part.untyped_storage().resizable() == other.untyped_storage().resizable()
                assert torch.equal(part.nan_to_num(), other.nan_to_num())
            else:
                assert part == other


def array_of(dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.random.default_rng(len(shape)).integers(0, 99, shape).astype(dtype)


def written(folder: Path, arrays: Sequence[npt.NDArray[Any]]) -> list[Path]:
    for number, array in enumerate(arrays):
        (folder / str(number)).write_bytes(npy(array))
    return [folder / str(number) for number in range(len(arrays))]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_read_together_are_those_collated_one_by_one(dtype: str, replicas: int, tmp_path: Path) -> None:
    for inner in ((), (3,), (2, 0), (2, 1, 2)):
        names = written(tmp_path, [array_of(dtype, (size, *inner)) for size in (10, 1, 18)])
        for map_fn in (None, torch.from_numpy) if inner else (None,):
            expected = batches(names, one_by_one, replicas, map_fn=map_fn)
            assert_same(batches(names, default_collate, replicas, map_fn=map_fn), expected)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(10, 3), (9, 4)], {}),
        ([(10, 3), (9, 3)], {"cycle_length": 2, "block_length": 5}),
        ([(10, 3), (9, 3)], {"shuffle_buffer": 4}),
    ],
)
def test_other_walks_over_rows_give_the_same(
    shapes: list[tuple[int, ...]], options: dict[str, Any], tmp_path: Path
) -> None:
    names = written(tmp_path, [array_of("f4", shape) for shape in shapes])
    expected = batches(names, one_by_one, 2, **options)
    assert_same(batches(names, default_collate, 2, **options), expected)
    assert ("expects each tensor to be equal size" in str(expected[-1])) == (len({inner for _, inner in shapes}) > 1)


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
    first: tuple[str, int], second: tuple[str, int], told: str, tmp_path: Path
) -> None:
    kinds = zip((0, 7, 7), (second, first, second), strict=True)  # one without rows may be anything
    names = written(tmp_path, [array_of(dtype, (size, *range(2, dims + 1))) for size, (dtype, dims) in kinds])
    data = DataLoader(FileDataset([*map(str, names)], readers.npy_rows), 7, collate_fn=list)
    _, error = steps_until_raised(tdi.Strategy(["cpu"]).distribute_dataset(data))
    assert (error is not None) == bool(told)
    if error is not None:
        assert f"2: its columns differ from those of {names[1]}: {told}" in error.message


def files(folder: Path, sizes: tuple[int, ...] = (7, 0, 12, 5), bad: tuple[int, int] | None = None) -> list[str]:
    for number, size in enumerate(sizes):
        lines = [f"{number}.{line} \u00e4".encode() for line in range(size)]
        if bad is not None and bad[0] == number:
            lines[bad[1]] = b"\xff"
        (folder / f"{number}").write_bytes(b"".join(line + b"\n" for line in lines))
    return [str(folder / f"{number}") for number in range(len(sizes))]


def as_it_is(samples: list[str]) -> list[str]:
    return samples


@pytest.mark.parametrize("partial_batch", ["keep", "pad"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_delivered_is_the_same(tmp_path: Path, partial_batch: Any, replicas: int) -> None:
    names = files(tmp_path, (7, 3, 12, 6))  # 28: the last batch of 4 leaves nothing for the third replica
    found = []
    for collate in (default_collate, as_it_is):  # the second one is no collate function that the library knows
        loader = DataLoader(tdi.FileDataset(names, tdi.readers.text_lines), 6, collate_fn=collate)
        options = tdi.InputOptions(partial_batch=partial_batch)
        with tdi.Strategy(["cpu"] * replicas).distribute_dataset(loader, options) as dataset:
            steps, states = [], []
            for element in dataset:
                parts = [element] if partial_batch == "keep" else element
                pieces = [[part] if replicas == 1 else list(part.values) for part in parts]
                steps.append(([list(piece) for piece in pieces[0]], [mask.tolist() for mask in chain(*pieces[1:])]))
                states.append(dataset.state_dict())
                pieces[0][0].append("more")  # it is the loop's own, and no other batch has a part of it
            found.append((steps, states, str(dataset.element_spec)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 5
