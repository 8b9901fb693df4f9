"""Bad input in one process: the class of the error, and that its message has what was found."""

from __future__ import annotations

import enum
import gzip
import io
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support import inputs, structures
from torchdistinput import readers


def strategy(replicas: int = 1) -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"] * replicas)


def read_all(data: Any, global_batch_size: int | None = None, replicas: int = 1) -> list[Any]:
    return list(strategy(replicas).distribute_dataset(data, global_batch_size=global_batch_size))


class Sized:
    """Map-style data that is no ``Dataset``."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


# Files


@pytest.mark.parametrize(
    "data",
    [DataLoader(range(4), batch_size=2), inputs.PlainIterable(), inputs.ready_batches],  # type: ignore[arg-type]
)
def test_file_policy_on_a_source_without_files_is_refused_in_one_process_too(data: Any) -> None:
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE)
    with pytest.raises(tdi.ShardingError, match=r"(?s)FILE.*DATA"):
        strategy().distribute_dataset(data, options)


def test_hint_on_a_source_that_cannot_shard_itself_is_refused() -> None:
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.HINT)
    with pytest.raises(tdi.ShardingError, match=r"(?s)HINT.*shard"):
        strategy().distribute_dataset(inputs.PlainIterable(), options)


def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path) -> None:
    pattern = str(tmp_path / "nothing-*.txt")
    with pytest.raises(tdi.InputError, match=r"nothing-\*\.txt"):
        tdi.list_files(pattern)
    with pytest.raises(tdi.InputError, match=r"nothing-\*\.txt"):
        read_all(tdi.FileDataset(pattern, readers.text_lines), global_batch_size=2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n")
    missing = str(tmp_path / "b.txt")
    with pytest.raises(tdi.InputError, match=r"b\.txt"):
        read_all(tdi.FileDataset([str(tmp_path / "a.txt"), missing], readers.text_lines, map_fn=int), 2)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(tdi.InputError, match=r"folder\.txt"):
        read_all(tdi.FileDataset([str(tmp_path / "folder.txt")], readers.text_lines), 2)


def tf_record(payload: bytes) -> bytes:
    """A TFRecord: length, its masked CRC-32C, payload, its masked CRC-32C."""
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc(length)) + payload + struct.pack("<I", masked_crc(payload))


def masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


RECORDS = [tf_record(payload) for payload in (b"first", b"second", b"the third")]
THIRD = len(RECORDS[0]) + len(RECORDS[1])


def corrupt(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def npy(rows: int) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3 * rows, dtype=np.int64).reshape(rows, 3))
    return buffer.getvalue()


DAMAGED: dict[str, tuple[str, bytes, Callable[..., Any], int | None]] = {
    # name: file name, content, reader, offset of the record (None: any)
    "a corrupt TFRecord": ("x.tfrecord", corrupt(b"".join(RECORDS), THIRD + 13), readers.tfrecords, THIRD),
    "a corrupt TFRecord length": ("x.tfrecord", corrupt(b"".join(RECORDS), THIRD), readers.tfrecords, THIRD),
    "a truncated TFRecord": ("x.tfrecord", b"".join(RECORDS)[:-3], readers.tfrecords, THIRD),
    "a truncated TFRecord header": ("x.tfrecord", b"".join(RECORDS)[: THIRD + 5], readers.tfrecords, THIRD),
    "a broken JSON line": (
        "x.jsonl",
        b'{"a": 1}\n{"a": \n{"a": 3}\n',
        readers.json_lines,
        9,
    ),
    "a truncated array file": ("x.npy", npy(4)[:-10], readers.npy_rows, None),
    "an array file that is none": ("x.npy", b"not an array, but long enough to be read", readers.npy_rows, None),
    "a short last record": ("x.bin", bytes(10), readers.fixed_length_records(4), 8),
    "a short gzip file": ("x.txt.gz", gzip.compress(b"1\n" * 5000)[:-12], readers.text_lines, None),
    "a gzip file that is none": ("x.txt.gz", b"1\n2\n", readers.text_lines, None),
    "bytes that are no text": ("x.txt", b"good\n\xff\xfe\xfa\n", readers.text_lines, 5),
}


@pytest.mark.parametrize("name", list(DAMAGED))
def test_a_truncated_or_corrupt_record_is_named_by_file_and_offset(name: str, tmp_path: Path) -> None:
    file_name, content, reader, offset = DAMAGED[name]
    path = tmp_path / file_name
    path.write_bytes(content)
    with pytest.raises(tdi.SourceError) as caught:
        read_all(tdi.FileDataset([str(path)], reader), global_batch_size=2)
    assert caught.value.file is not None
    assert caught.value.file.endswith(file_name)
    assert file_name in str(caught.value)
    if offset is not None:
        assert caught.value.offset == offset
        assert str(offset) in str(caught.value)


def test_a_csv_row_of_another_width_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(tdi.SourceError, match=r"x\.csv") as caught:
        read_all(tdi.FileDataset([str(tmp_path / "x.csv")], readers.csv_rows), 2)
    assert caught.value.offset == 8


def test_a_map_fn_that_raises_is_named_by_file_and_record(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("1\n2\nthree\n")
    with pytest.raises(tdi.SourceError, match=r"x\.txt") as caught:
        read_all(tdi.FileDataset([str(tmp_path / "x.txt")], readers.text_lines, map_fn=int), 2)
    assert caught.value.file is not None
    assert "record 2" in str(caught.value)
    assert "three" in str(caught.value)


# Batches


@pytest.mark.parametrize("replicas", [1, 3])
def test_leaves_of_different_batch_sizes_are_named_by_path(replicas: int) -> None:
    batch = {"x": torch.zeros(4, 2), "y": torch.zeros(3)}
    with pytest.raises(tdi.BatchingError, match=r"(?s)'x'.*4.*'y'.*3"):
        read_all(lambda: [batch], replicas=replicas)


@pytest.mark.parametrize("element", [torch.tensor(3), 5, None, "text"])
def test_an_element_without_a_batch_dimension_is_refused(element: Any) -> None:
    with pytest.raises(tdi.BatchingError, match="batch"):
        read_all(lambda: iter([element]))


CHANGES: dict[str, tuple[Any, Any]] = {
    "another dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
    "another key": ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}),
    "one more key": ({"x": torch.zeros(2)}, {"x": torch.zeros(2), "y": torch.zeros(2)}),
    "a tuple for a list": ((torch.zeros(2), torch.zeros(2)), [torch.zeros(2), torch.zeros(2)]),
    "a tensor for a dict": ({"x": torch.zeros(2)}, torch.zeros(2)),
    "strings for a tensor": ({"x": torch.zeros(2)}, {"x": ["a", "b"]}),
    "one more dimension": (torch.zeros(2), torch.zeros(2, 1)),
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", list(CHANGES))
def test_elements_of_changing_structure_or_dtype_are_refused(name: str, replicas: int) -> None:
    with pytest.raises(tdi.BatchingError, match="structure|dtype"):
        read_all(lambda: list(CHANGES[name]), replicas=replicas)


def test_inner_dims_may_change() -> None:
    widths = [
        tuple(element.shape) for element in read_all(lambda: [torch.zeros(2, 3), torch.zeros(2, 5), torch.zeros(1, 0)])
    ]
    assert widths == [(2, 3), (2, 5), (1, 0)]


@pytest.mark.parametrize("size", [0, -4, 2.5, "4", True])
def test_a_batch_size_that_is_no_positive_int_is_refused(size: Any) -> None:
    for data in (range(8), inputs.samples):
        with pytest.raises(tdi.BatchingError) as caught:
            strategy().distribute_dataset(data, global_batch_size=size)
        assert repr(size) in str(caught.value)
        assert isinstance(caught.value, ValueError)


def test_a_map_style_dataset_needs_a_batch_size() -> None:
    with pytest.raises(tdi.BatchingError, match="global_batch_size"):
        strategy().distribute_dataset(inputs.Records())


def test_a_data_loader_has_a_batch_size_of_its_own() -> None:
    with pytest.raises(tdi.BatchingError, match=r"(?s)global_batch_size.*4|4.*global_batch_size"):
        strategy().distribute_dataset(DataLoader(inputs.Records(), batch_size=4), global_batch_size=8)


def test_a_data_loader_out_of_order_is_refused() -> None:
    data = DataLoader(inputs.Records(), batch_size=4, num_workers=1, in_order=False)
    with pytest.raises(tdi.InputError, match="in_order"):
        strategy().distribute_dataset(data)


# Sources


def test_an_exhausted_generator_given_twice_is_refused() -> None:
    data = inputs.ready_batches()
    dataset = strategy().distribute_dataset(data)
    assert len(list(dataset)) == 4
    with pytest.raises(tdi.InputError, match="generator"):
        list(dataset)
    with pytest.raises(tdi.InputError, match="generator"):
        list(strategy().distribute_dataset(data))


@pytest.mark.parametrize(
    "data",
    [5, 2.5, None, "a text", b"bytes", {"x": [1, 2]}, nn.Linear(2, 2), torch.float32],
    ids=["int", "float", "None", "str", "bytes", "dict of lists", "module", "dtype"],
)
def test_what_is_not_data_is_refused_by_its_type(data: Any) -> None:
    with pytest.raises(tdi.InputError) as caught:
        strategy().distribute_dataset(data)
    assert type(data).__name__ in str(caught.value)


@pytest.mark.parametrize("data", [inputs.Records, inputs.PlainIterable, tdi.FileDataset, list, int])
def test_a_class_in_place_of_its_instance_is_refused_before_anything_is_read(data: Any) -> None:
    needed = rf"found the class {data.__name__} as .*; an instance of it is needed\. Give {data.__name__}\(\.\.\.\)"
    for given, size in ((data, None), (data, 2), (lambda: data, 2), (DataLoader(data, 2), None)):
        with pytest.raises(tdi.InputError, match=needed):
            strategy().distribute_dataset(given, global_batch_size=size)
    for returned in (data, DataLoader(data, 2)):
        with pytest.raises(tdi.InputError, match=needed):
            strategy().distribute_datasets_from_function(partial(_given, returned))
    with pytest.raises(tdi.InputError, match=needed):
        tdi.DataLoader(data, 2)


class Squares(type):
    """Of classes that are data: what an Enum's is, with numbers in place of names."""

    def __len__(cls) -> int:
        return 5

    def __getitem__(cls, index: int) -> int:
        if index >= 5:
            raise IndexError(index)
        return index * index


class Five(metaclass=Squares):
    pass


class Colour(enum.Enum):
    RED = 0
    BLUE = 1


def test_a_class_that_is_data_itself_is_read_as_torch_does() -> None:
    five: Any = Five
    batches = [batch.tolist() for batch in DataLoader(five, 2)]
    assert batches == [[0, 1], [4, 9], [16]]
    assert [batch.tolist() for batch in tdi.DataLoader(five, 2)] == batches
    assert [batch.tolist() for batch in read_all(DataLoader(five, 2))] == batches
    assert [batch.tolist() for batch in read_all(five, 2)] == batches
    colour: Any = Colour
    by_name: dict[str, Any] = {"batch_size": 2, "sampler": ["BLUE", "RED"], "collate_fn": tuple}
    assert [*tdi.DataLoader(colour, **by_name)] == [*DataLoader(colour, **by_name)] == [(Colour.BLUE, Colour.RED)]
    with pytest.raises(KeyError) as ours, closing(tdi.DataLoader(colour, 2)) as loader:
        next(iter(loader))
    with pytest.raises(KeyError) as torchs:
        next(iter(DataLoader(colour, 2)))
    assert ours.value.args == torchs.value.args
    with pytest.raises(tdi.InputError, match="returned a Squares; a DataLoader or another iterable of batches"):
        strategy().distribute_datasets_from_function(partial(_given, five))


def test_map_style_data_that_can_be_called_is_data_and_no_function() -> None:
    class Called(Sized):
        def __call__(self) -> None:
            raise AssertionError("called for the data")

    assert [batch.tolist() for batch in read_all(Called(), 2)] == [[0, 1], [2]]


def test_a_function_that_returns_no_data_is_refused() -> None:
    with pytest.raises(tdi.InputError, match="NoneType|None"):
        list(strategy().distribute_dataset(lambda: None))
    with pytest.raises(tdi.InputError, match="NoneType|None"):
        list(strategy().distribute_datasets_from_function(lambda context: None))


def _given(data: Any, _: tdi.InputContext | None) -> Any:
    return data


def test_data_that_was_divided_is_not_divided_again() -> None:
    divided = strategy().distribute_dataset([torch.zeros(4)])
    drop_in = tdi.DataLoader(TensorDataset(torch.zeros(4)), 2, strategy=tdi.Strategy(["cpu"] * 2))
    for data in (divided, iter(divided), iter(drop_in)):
        with pytest.raises(tdi.InputError, match=f"found a {type(data).__name__} .*is divided among the ranks already"):
            strategy().distribute_dataset(data)
        with pytest.raises(tdi.InputError, match=f"found a {type(data).__name__} .*is divided among the ranks already"):
            strategy().distribute_dataset(partial(_given, data, None))
        with pytest.raises(tdi.InputError, match=f"found a {type(data).__name__} .*is divided among the ranks already"):
            strategy().distribute_datasets_from_function(partial(_given, data))


def test_an_epoch_of_the_drop_in_in_one_process_is_whole_and_may_be_divided() -> None:
    loader = tdi.DataLoader(TensorDataset(torch.arange(4)), 2)
    two = tdi.Strategy(["cpu"] * 2)
    whole = list(two.distribute_dataset(iter(loader)))
    assert [[part.tolist() for part in batch.values] for (batch,) in whole] == [[[0], [1]], [[2], [3]]]
    kept = list(strategy().distribute_datasets_from_function(partial(_given, iter(loader))))
    assert [batch.tolist() for (batch,) in kept] == [[0, 1], [2, 3]]


def test_data_in_place_of_a_dataset_function_is_refused() -> None:
    function: Any = [torch.zeros(4)]
    with pytest.raises(TypeError, match="dataset_fn is a list; a function of an InputContext is needed"):
        strategy().distribute_datasets_from_function(function)


def test_what_the_users_data_raises_is_the_cause_of_the_error() -> None:
    def data() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        raise KeyError("lost")

    seen = 0
    with pytest.raises(tdi.SourceError, match=r"KeyError.*lost") as caught:  # noqa: PT012 - steps are counted
        for _ in strategy().distribute_dataset(data):
            seen += 1
    assert seen == 1
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_stop_iteration_from_the_users_code_is_not_the_end() -> None:
    def collate(rows: list[int]) -> torch.Tensor:
        if 4 in rows:
            next(iter(()))
        return torch.tensor(rows)

    with pytest.raises(tdi.SourceError, match="StopIteration"):
        read_all(DataLoader(range(8), batch_size=2, collate_fn=collate))  # type: ignore[arg-type]


# Places and options


@pytest.mark.parametrize("device", ["cuda:97", "nonsense", "cpu:3"])
def test_a_device_that_does_not_exist_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=device):
        tdi.Strategy(devices=[device])


@pytest.mark.parametrize("prefetch", [-1, 1.5, "2"])
def test_a_prefetch_that_is_no_count_is_refused(prefetch: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="prefetch"):
        tdi.InputOptions(prefetch=prefetch)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("coordination", "sometimes"),
        ("timeout_seconds", 0),
        ("timeout_seconds", -3),
        ("timeout_seconds", float("nan")),
        ("auto_shard_policy", "FILES"),
    ],
)
def test_an_option_of_no_meaning_is_refused(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        tdi.InputOptions(**{name: value})


def test_per_replica_functions_are_for_from_function_only() -> None:
    options = tdi.InputOptions(replication_mode=tdi.InputReplicationMode.PER_REPLICA)
    with pytest.raises((tdi.InputError, ValueError), match="PER_REPLICA"):
        strategy(2).distribute_dataset(DataLoader(range(4), batch_size=2), options)  # type: ignore[arg-type]


def test_messages_of_damaged_json_show_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join([json.dumps({"a": 1}), "{broken", json.dumps({"a": 2})]) + "\n")
    with pytest.raises(tdi.SourceError) as caught:
        read_all(tdi.FileDataset([str(path)], readers.json_lines), 1)
    assert caught.value.offset == 9


def test_an_error_in_a_step_comes_after_the_steps_before_it_at_any_prefetch() -> None:
    def data() -> Iterator[Any]:
        yield from (structures.mapping(2), structures.mapping(1))
        yield {"x": torch.zeros(2, 5), "y": torch.zeros(1)}

    for prefetch in (0, 1, 2, 5):
        dataset = strategy(2).distribute_dataset(data, tdi.InputOptions(prefetch=prefetch))
        seen = 0
        with pytest.raises(tdi.BatchingError):  # noqa: PT012 - steps are counted
            for _ in dataset:
                seen += 1
        assert seen == 2


# What is of another type than it should be


EIGHT: Any = range(8)
LOADER = partial(DataLoader[Any], EIGHT, 4)
STEP = tdi.Step(0, 0, 3, (3,), 1, 1)

WRONG_TYPES: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "timeout_seconds": (lambda value: tdi.InputOptions(timeout_seconds=value), ["60", [], True, torch.tensor(3)]),
    "fetch_to_device": (lambda value: tdi.InputOptions(fetch_to_device=value), ["no", 0, None]),
    "with_index": (lambda value: tdi.InputOptions(with_index=value), ["no", 0, None]),
    "global_batch_size": (tdi.InputContext(1, 0, 2).get_per_replica_batch_size, [None, "8", 8.0, True]),
    "generator": (lambda value: strategy(1).distribute_dataset(LOADER(generator=value)), ["x", 7, torch.tensor(3)]),
    "compression": (lambda value: tdi.FileDataset(["a"], readers.text_lines, compression=value), [[], 7]),
    "index_folder": (lambda value: tdi.FileDataset(["a"], readers.text_lines, index_folder=value), [7, [], b"a"]),
    "average_loss": (lambda value: tdi.average_loss(torch.ones(3), value), [None, 3, (0, 1)]),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_value_of_another_type_is_a_type_error_that_names_it(name: str) -> None:
    make, values = WRONG_TYPES[name]
    for value in values:
        with pytest.raises(TypeError, match=name):
            make(value)


def test_numbers_of_numpy_are_batch_sizes_of_replicas() -> None:
    assert tdi.InputContext(1, 0, 2).get_per_replica_batch_size(np.int64(8)) == 4


def test_a_generator_that_is_none_is_torchs_type_error_in_the_drop_in_too() -> None:
    wrong: Any = "x"
    for kind in (DataLoader, tdi.DataLoader):
        with pytest.raises(TypeError):
            iter(kind(EIGHT, 4, generator=wrong))


def test_columns_in_a_tuple_and_records_without_a_batch_size_are_refused_with_both_readings(tmp_path: Path) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    for columns in ((torch.zeros(8, 2), torch.zeros(8)), [np.zeros(8), torch.zeros(8)]):
        with pytest.raises(tdi.BatchingError, match=r"columns of 8 samples, give a dict.*2 samples, give a function"):
            strategy.distribute_dataset(columns, global_batch_size=4)
    assert len(list(strategy.distribute_dataset(lambda: [torch.zeros(8)] * 6, global_batch_size=4))) == 2
    (tmp_path / "f.txt").write_text("a\nb\nc\n")
    files = tdi.FileDataset(str(tmp_path / "f.txt"), tdi.readers.text_lines)
    with pytest.raises(tdi.BatchingError, match=r"global_batch_size=.*batch_size=None"):
        strategy.distribute_dataset(files)
