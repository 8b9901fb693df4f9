"""``readers.parquet`` with files that pyarrow writes: on several ranks, in one process, and with damage."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import torchdistinput as tdi
from tests.data import Fragments
from tests.support.epochs import Raised, steps_until_raised
from tests.support.platforms import package
from torchdistinput import readers
from torchdistinput.sources.formats.reader_api import facts_of
from torchdistinput.testing import check_source, run_ranks

pa, pc, pq = package("pyarrow"), package("pyarrow.compute"), package("pyarrow.parquet")

SIZES, GROUP, BATCH = (41, 7, 55), 12, 10
ROWS = sum(SIZES)
FILE, DATA = tdi.AutoShardPolicy.FILE, tdi.AutoShardPolicy.DATA


def table(first: int, count: int) -> Any:
    """Records ``first`` to ``first + count - 1``: each value follows from the number of the record."""
    numbers = np.arange(first, first + count)
    vectors = pa.array(np.repeat(numbers, 2).astype("float32"))
    return pa.table(
        {
            "x": numbers,
            "half": (numbers / 2).astype("float32"),
            "text": [f"r{number}" for number in numbers],
            "list": [[*range(number % 4)] for number in numbers],
            "vector": pa.FixedSizeListArray.from_arrays(vectors, 2),
            "inner": [{"odd": bool(number % 2), "name": str(number)} for number in numbers],
            "kind": pa.array([str(number % 3) for number in numbers]).dictionary_encode(),
            "day": pa.array(numbers, pa.int32()).cast(pa.date32()),
        }
    )


def batch_of(numbers: Sequence[int]) -> dict[str, Any]:
    """What the columns of ``table`` make of these records."""
    x = torch.tensor(numbers, dtype=torch.int64)
    return {
        "x": x,
        "half": (x / 2).float(),
        "text": [f"r{number}" for number in numbers],
        "list": [torch.arange(number % 4) for number in numbers],
        "vector": x.float()[:, None].repeat(1, 2),
        "inner": {"odd": x % 2 == 1, "name": [str(number) for number in numbers]},
        "kind": [str(number % 3) for number in numbers],
        "day": x,
    }


def write(folder: Path, sizes: Sequence[int] = SIZES) -> str:
    first = 0
    for number, size in enumerate(sizes):
        pq.write_table(table(first, size), folder / f"{number}.parquet", row_group_size=GROUP)
        first += size
    return str(folder / "*.parquet")


def assert_equal(batch: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(batch) == list(expected)
        for name, value in expected.items():
            assert_equal(batch[name], value)
    elif isinstance(expected, torch.Tensor):
        assert batch.dtype == expected.dtype
        assert torch.equal(batch, expected)
    elif expected and isinstance(expected[0], torch.Tensor):
        assert len(batch) == len(expected)
        for one, other in zip(batch, expected, strict=True):
            assert_equal(one, other)
    else:
        assert batch == expected


# -------------------------------------------------------------------------------------------------- in one process


def only(source: Any, **options: Any) -> list[dict[str, Any]]:
    return [*tdi.Strategy(["cpu"]).distribute_dataset(source, tdi.InputOptions(**options), global_batch_size=BATCH)]


def test_a_record_is_a_dict_and_default_collate_of_records_is_the_batch_of_columns(tmp_path: Path) -> None:
    plain = ["x", "half", "text", "vector", "inner", "kind", "day"]
    dataset = tdi.FileDataset(write(tmp_path, [25]), readers.parquet(plain))
    records = [*dataset]
    assert records[3]["text"] == "r3"
    assert (type(records[3]["half"]), type(records[3]["x"])) == (np.float32, int)
    batches = only(dataset)
    assert len(batches) == 3
    for lo, batch in zip(range(0, 25, BATCH), batches, strict=True):
        assert_equal(batch, default_collate(records[lo : lo + BATCH]))
    batches[0]["x"].fill_(7)
    records[0]["vector"][:] = 7
    assert_equal(only(dataset)[0], default_collate([*dataset][:BATCH]))


def test_every_kind_of_column_is_read_in_batches(tmp_path: Path) -> None:
    files = tdi.FileDataset(write(tmp_path), readers.parquet(), cycle_length=2, block_length=3)
    batches = only(files)
    for batch in batches:
        assert_equal(batch, batch_of(batch["x"].tolist()))
    assert sorted(number for batch in batches for number in batch["x"].tolist()) == [*range(ROWS)]


def test_missing_values_are_filled_or_refused_with_the_column(tmp_path: Path) -> None:
    holes = pa.table({"n": [1, None, 3], "s": ["a", None, None], "v": [[1, None], [], [2]]})
    path = tmp_path / "holes.parquet"
    pq.write_table(holes, path)
    for column, missing in (("n", "column n: 1 of 3"), ("s", "column s: 2 of 3"), ("v", "column v: 1 of 3")):
        told = rf"row group 0 .*{missing} values (in lists )?are missing .*fill_null=.'{column}': value"
        with pytest.raises(tdi.SourceError, match=told):
            only(tdi.FileDataset(str(path), readers.parquet([column])))
    (batch,) = only(tdi.FileDataset(str(path), readers.parquet(fill_null={"n": -1, "s": "", "v": 9})))
    assert_equal(batch["n"], torch.tensor([1, -1, 3]))
    assert batch["s"] == ["a", "", ""]
    assert_equal(batch["v"], [torch.tensor([1, 9]), torch.tensor([], dtype=torch.int64), torch.tensor([2])])
    with pytest.raises(tdi.SourceError, match="column n: .*fill_null='no' is no int64"):
        only(tdi.FileDataset(str(path), readers.parquet(["n"], fill_null="no")))


def with_another_column(path: Path) -> None:
    first = path.with_name("0.parquet")
    pq.write_table(table(0, SIZES[0]).append_column("zz", pa.array([0] * SIZES[0])), first)


def times(*units: str) -> list[Any]:
    return [pa.table({"t": pa.array([1_700_000_000_000], pa.timestamp(unit))}) for unit in units]


TWICE = pa.Table.from_arrays([pa.array([0, 1]), pa.array([9, 9])], names=["x", "x"])
DIFFERENT: dict[str, tuple[Sequence[Any], str]] = {
    "units": (times("ms", "ns"), r"t: timestamp\[ns\] here, t: timestamp\[ms\] there"),
    "zones": ([*times("us"), times("us")[0].cast(pa.schema({"t": pa.timestamp("us", "UTC")}))], "tz=UTC.* here"),
    "dates": ([pa.table({"t": pa.array([1], pa.date32())}), *times("us")], r"t: timestamp\[us\] here, t: date32"),
    "dtypes": ([pa.table({"x": [0, 1]}), pa.table({"x": [2.5, 3.0]})], "x: double here, x: int64 there"),
    "fields": ([pa.table({"x": [{"a": 1}]}), pa.table({"x": [{"a": 1.5}]})], "x: struct<a: double> here"),
    "more": ([pa.table({"x": [0, 1]}), pa.table({"id": [7], "x": [2]})], "id: int64 here, no such column there"),
    "fewer": ([pa.table({"x": [0, 1], "y": [5, 6]}), pa.table({"x": [2, 3]})], "no such column here, y: int64 there"),
    "one name": ([TWICE, TWICE], "two columns have the name 'x'"),
}
Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, list[str], str]] = {
    "no such column": (with_another_column, ["x", "zz"], r"there is no column 'zz'; the file has \['x', '"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-3]), ["x"], "this is not a Parquet file"),
    "another type": (
        lambda path: pq.write_table(pa.table({"x": [1.5], "half": [1]}), path),
        ["x"],
        r"its columns differ from those of .*0\.parquet: x: double here, x: int64 there",
    ),
}


def write_each(folder: Path, tables: Iterable[Any]) -> str:
    folder.mkdir()
    for number, each in enumerate(tables):
        pq.write_table(each, folder / f"{number}.parquet")
    return str(folder / "*.parquet")


def error_of_each(folder: str) -> dict[tuple[str, str, str], tuple[int, Raised | None]]:
    """One rank: each dataset of files that differ or are damaged, as batches of columns and as lists of records."""
    found = {}
    for name in (*DIFFERENT, *DAMAGES):
        read = readers.parquet(DAMAGES[name][1] if name in DAMAGES else None)
        for policy, collate in product((FILE, DATA), (None, list)):
            files = tdi.FileDataset(f"{folder}/{name}/*.parquet", read)
            chosen = tdi.InputOptions(auto_shard_policy=policy)
            size = 2 if name in DIFFERENT else BATCH
            loader = tdi.Strategy(["cpu"]).distribute_dataset(files, chosen, global_batch_size=size, collate_fn=collate)
            found[name, policy.name, str(collate)] = steps_until_raised(loader)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_files_that_differ_or_are_damaged_are_named_on_all_ranks_at_the_same_step(tmp_path: Path, world: int) -> None:
    for name, (tables, _) in DIFFERENT.items():
        write_each(tmp_path / name, tables)
    for name, (damage, _, _) in DAMAGES.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, (*SIZES, SIZES[0]))
        damage(tmp_path / name / "1.parquet")
    ranks = run_ranks(world, error_of_each, str(tmp_path))
    for case, (steps, _) in ranks[0].items():
        name, policy, _ = case
        message = DIFFERENT[name][1] if name in DIFFERENT else rf"1\.parquet: {DAMAGES[name][2]}"
        for there, error in (rank[case] for rank in ranks):
            assert there == steps, case
            assert error is not None, case
            assert error.kind == "SourceError" or name in DIFFERENT, error
            assert re.search(message, error.message), error.message
            assert name in DAMAGES or "0.parquet" in error.message
        assert not (name in DIFFERENT and steps and world == 2 and policy == "FILE"), case  # each compares its first


def test_columns_are_found_by_name_whatever_their_order_and_storage(tmp_path: Path) -> None:
    text = pa.array(["a", "b"])
    first = pa.table({"x": [0, 1], "text": text, "s": [{"a": 1, "b": 2.0}] * 2})
    empty = pa.table({"x": pa.array([], pa.null())})  # has no record, so its types do not matter
    second = pa.table({"s": [{"b": 2.0, "a": 1}] * 2, "text": text.dictionary_encode(), "x": [2, 3]})
    third = pa.table({"text": text.cast(pa.large_string()), "s": [{"a": 1, "b": 2.0}] * 2, "x": [4, 5]})
    pattern = write_each(tmp_path / "order", [empty, first, second, third])
    found = [*tdi.FileDataset(pattern, readers.parquet())]
    assert found == [{"x": number, "text": "ab"[number % 2], "s": {"a": 1, "b": 2.0}} for number in range(6)]
    (batch,) = only(tdi.FileDataset(pattern, readers.parquet(), cycle_length=2))
    assert list(batch) == ["x", "text", "s"]
    assert sorted(batch["x"].tolist()) == [*range(6)]
    assert batch["text"] == ["ab"[number % 2] for number in batch["x"].tolist()]


def test_missing_values_of_fields_are_filled_by_the_name_that_is_told(tmp_path: Path) -> None:
    path = tmp_path / "fields.parquet"
    pq.write_table(pa.table({"s": [{"a": 1, "b": {"c": None}}, None, {"a": None, "b": {"c": 3}}]}), path)
    for fill in (None, {"s.a": 0}, {"s.b": 0}):
        with pytest.raises(tdi.SourceError) as caught:
            only(tdi.FileDataset(str(path), readers.parquet(fill_null=fill)))
        told = re.search(r"fill_null=(\{.*\})", str(caught.value))
        assert told is not None
        assert told[1] == ("{'s.b.c': value}" if fill and "s.a" in fill else "{'s.a': value}")
    for filled in (7, {"s.a": 7, "s.b.c": 7}, {"s": 7}, {"s": {"a": 7, "b": {"c": 7}}}, {"s": {"a": 7}, "s.b": 7}):
        (batch,) = only(tdi.FileDataset(str(path), readers.parquet(fill_null=filled)))
        assert batch["s"]["a"].tolist() == [1, 7, 7]
        assert batch["s"]["b"]["c"].tolist() == [7, 7, 3]


def test_files_without_records_are_passed_over(tmp_path: Path) -> None:
    pattern = write(tmp_path)
    empty = table(0, 0)
    pq.write_table(empty, tmp_path / "1.parquet")
    with pq.ParquetWriter(tmp_path / "3.parquet", empty.schema):
        pass  # without any row group
    loader = tdi.Strategy(["cpu"]).distribute_dataset(
        tdi.FileDataset(pattern, readers.parquet(["x"])),
        tdi.InputOptions(auto_shard_policy=DATA),
        global_batch_size=BATCH,
    )
    assert len(loader) == len([*loader]) == 10


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"columns": "x"}, TypeError), ({"columns": [3]}, TypeError), ({"columns": []}, ValueError),
     ({"columns": ["x", "x"]}, ValueError)],
)  # fmt: skip
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        readers.parquet(**arguments)


# ----------------------------------------------------------------------------------------------------- bytes read


class Counted(io.BytesIO):
    """A file that notes which bytes are read."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.ranges: list[tuple[int, int]] = []

    def read(self, count: int | None = -1) -> bytes:
        start = self.tell()
        data = super().read(count)
        self.ranges.append((start, start + len(data)))
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def touched(self) -> int:
        return len(set(chain.from_iterable(range(lo, hi) for lo, hi in self.ranges)))


def test_only_the_wanted_columns_and_row_groups_are_read() -> None:
    whole, size = io.BytesIO(), 80_000
    wide = pa.table({name: np.random.default_rng(0).random(size) for name in ("a", "b", "c", "d")})
    pq.write_table(wide, whole, row_group_size=size // 4, compression="none", use_dictionary=False)
    content = whole.getvalue()
    column = size * 8

    def bytes_of(offset: int, count: int | None, **arguments: Any) -> int:
        file = Counted(content)
        entered = facts_of(readers.parquet(**arguments)).blocks
        assert entered is not None
        found = sum(len(records) for _, records in entered(file, offset))
        assert count is None or found == count
        return file.touched()

    everything = bytes_of(0, size)
    assert everything > 4 * column
    assert column <= bytes_of(0, size, columns=["b"]) < 1.25 * column
    assert bytes_of(size * 9 // 10, size // 10, columns=["b"]) < 0.5 * column


# --------------------------------------------------------------------------- columns from a source of the user's own


def columns(numbers: list[int]) -> dict[str, Any]:
    return {"x": numbers, "y": torch.tensor([[n, n] for n in numbers]), "s": [str(n) for n in numbers]}


def test_a_source_may_yield_columns() -> None:
    source = Fragments({0: 20, 20: 13}, block=6, of=columns)
    check_source(source)
    mixed: tuple[dict[str, Any], ...] = ({}, {"cycle_length": 2}, {"shuffle_buffer": 5, "shuffle_fragments": True})
    for settings in mixed:
        dataset = tdi.FragmentDataset(source, **settings)
        batches = only(dataset)
        for batch in batches:
            numbers = batch["x"].tolist()
            assert_equal(batch, {**columns(numbers), "x": torch.tensor(numbers)})
        assert sorted(number for batch in batches for number in batch["x"].tolist()) == list(range(33))


@pytest.mark.parametrize(
    ("block", "message"), [({"x": [1, 2], "y": [1]}, "one length, got .*'x': 2, 'y': 1"), ({"x": 3}, "'x' is a int")]
)
def test_columns_that_do_not_fit_are_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(tdi.SourceError, match=message):
        only(Fragments({0: 1}, of=lambda _: block))
