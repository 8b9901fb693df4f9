"""Batches that are gathered from memory at once: to the last bit what torch makes sample by sample."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data._utils.collate import default_collate_fn_map

import torchdistinput as tdi
from torchdistinput.batches import pytree
from torchdistinput.sources.kernel.index_array import IndexArray, digest_of
from torchdistinput.sources.map_style.in_memory import column_of, gather_of, index_array_of
from torchdistinput.sources.map_style.map_stream import DrawnRow, MapStream
from torchdistinput.sources.map_style.piece_dataset import PieceDataset
from torchdistinput.sources.map_style.table import Table

# torch says so of a memory-mapped column, once in a process: in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

N = 11
DTYPES = ["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32)), "int64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def ints(n: int = N) -> torch.Tensor:
    return torch.arange(n) * 3


def array(dtype: str, *shape: int) -> Any:
    return (np.arange(np.prod(shape)).reshape(shape) * 7 % 5).astype(dtype)


def of_kind(dtype: str, *shape_and_folder: Any) -> Any:
    *shape, _ = shape_and_folder
    return array(dtype, *shape)


def mapped(folder: Path, mode: Any = "r") -> Any:
    file = folder / f"{mode}.bin"
    array("float32", N, 3).tofile(file)
    return np.memmap(file, np.float32, mode, shape=(N, 3))


def pairs(n: int = N) -> TensorDataset:
    return TensorDataset(floats(n, 4), ints(n))


FAST: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda _: pairs(),
    "one tensor": lambda _: TensorDataset(floats(N, 2, 3)),
    "kinds": lambda _: TensorDataset(*(floats(N, 3).to(getattr(torch, name)) for name in DTYPES if name[:4] != "uint")),
    "unsigned": lambda _: TensorDataset(*(ints().to(getattr(torch, f"uint{bits}")) for bits in (16, 32, 64))),
    "bfloat16": lambda _: TensorDataset(floats(N, 3).bfloat16()),
    "strides": lambda _: TensorDataset(floats(2 * N, 6)[::2, :4], floats(1, 3).expand(N, 3), floats(N, 0)),
    "rows of nothing": lambda _: TensorDataset(floats(N, 0), ints()),
    "images": lambda _: TensorDataset(floats(N, 1, 4, 4).to(memory_format=torch.channels_last)),
    "a tensor": lambda _: floats(N, 3),
    "scalars": lambda _: ints(),
    **{f"{name} scalars": partial(of_kind, name, N) for name in DTYPES},
    **{f"{name} rows": partial(of_kind, name, N, 2, 3) for name in [*DTYPES, "uint64"]},
    "mapped": mapped,
    "mapped, writable": lambda folder: mapped(folder, "r+"),
    "read only": lambda _: np.broadcast_to(array("int64", N), (N,)).copy().view(),
    "table": lambda folder: Table({"x": floats(N, 2), "y": array("int32", N), "m": mapped(folder)}),
    "ordered table": lambda _: Table(OrderedDict(z=ints(), a=floats(N, 2))),
    "subset by list": lambda _: Subset(pairs(30), [29, -1, *range(N - 2)]),
    "subset by range": lambda _: Subset(pairs(40), range(39, 39 - 3 * N, -3)),
    "subset by tensor": lambda _: Subset(pairs(30), torch.arange(30, 30 - N, -1) - 1),  # type: ignore[arg-type] # works
    "subset by array": lambda _: Subset(pairs(30), np.arange(N) * 2),  # type: ignore[arg-type] # works
    "subset of numpy ints": lambda _: Subset(pairs(30), list(np.arange(N))),
    "subset of a subset": lambda _: Subset(Subset(pairs(30), range(3, 30)), [*range(N, 0, -1)]),
    "subset of an array": lambda _: Subset(array("uint8", 30, 2), [*range(N)]),
}


class Doubled(TensorDataset):
    """A subclass may do anything."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor[index] * 2 for tensor in self.tensors)


class Many(TensorDataset):
    """Gives many samples at once, other ones than by themselves."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        assert {*map(type, indices)} == {int}
        return [(self.tensors[0][index] + 1, str(index)) for index in indices]


class Disabled(Many):
    """Without the method, as torch sees it."""

    __getitems__: Any = None


SLOW: dict[str, Callable[[], Any]] = {
    "subclass": lambda: Doubled(floats(N, 2), ints()),
    "many at once": lambda: Many(floats(N, 2)),
    "many at once, disabled": lambda: Disabled(floats(N, 2)),
    "stack": lambda: StackDataset(pairs(), pairs()),
    "a subset of a subclass": lambda: Subset(Doubled(ints()), range(N)),
    "a subset of many at once": lambda: Subset(Many(ints()), range(N)),
    "a subset by bools": lambda: Subset(pairs(), [True, 0] * 5 + [3]),
    "a concat": lambda: ConcatDataset([pairs(5), pairs(1), pairs(0), pairs(N - 6)]),
    "a subset of a concat": lambda: Subset(ConcatDataset([pairs(9), pairs(9)]), [17, 0, 8, 9, -1, *range(N - 5)]),
    "other rows": lambda: TensorDataset(floats(N, 3, 2).transpose(1, 2)),
    "images of channels last": lambda: TensorDataset(floats(N, 3, 4, 4).to(memory_format=torch.channels_last)),
    "with gradient": lambda: TensorDataset(floats(N, 2).requires_grad_()),
    "a parameter": lambda: TensorDataset(torch.nn.Parameter(floats(N, 2), requires_grad=False)),
    "conjugates": lambda: TensorDataset(torch.complex(floats(N, 2), floats(N, 2)).conj()),
    "strings": lambda: np.array([f"sample {number}" for number in range(N)]),
    "columns of a matrix": lambda: np.asfortranarray(array("float32", N, 3)),
    "backwards": lambda: array("float32", N, 3)[::-1],
    "masked": lambda: np.ma.masked_array(array("float32", N, 3)),
    "a range": lambda: range(N),
    "a list": lambda: [floats(2) for _ in range(N)],
    "nothing": lambda: TensorDataset(floats(0, 3)),
}

try:
    default_collate([np.bool_(True)])
except TypeError:  # of torch 2.8, beside NumPy 2, which then is this loader's too
    SLOW["bool scalars"] = partial(array, "bool", N)
    del FAST["bool scalars"]


class Own(Sampler[int]):
    """A sampler of the user's: any order, also from the end."""

    def __init__(self, order: Sequence[Any]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        yield from self.order


def samplers(dataset: Any) -> dict[str, Callable[[torch.Generator], Any]]:
    return {
        "in order": lambda _: SequentialSampler(dataset),
        "shuffled": lambda generator: RandomSampler(dataset, generator=generator),
        "drawn": lambda generator: RandomSampler(dataset, True, 40, generator),
        "more than once": lambda generator: RandomSampler(dataset, False, 2 * N + 3, generator),
        "own": lambda _: Own([*range(N - 1, -1, -1), 0, 0]),
        "from the end": lambda _: Own([-1, 3, -N, 2, np.int64(-2), np.int64(4)]),
        "odd ints": lambda _: Own([np.int32(3), np.uint8(1), torch.tensor(2)]),
    }


def bits(batch: Any) -> Any:
    """Everything that shows of a batch."""
    if isinstance(batch, torch.Tensor):
        content = batch.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()
        return type(batch), batch.dtype, tuple(batch.shape), batch.stride(), batch.requires_grad, content
    if isinstance(batch, dict):
        return type(batch), [(key, bits(value)) for key, value in batch.items()]
    if isinstance(batch, list | tuple):
        return type(batch), [bits(value) for value in batch]
    return batch


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def state_of(own: torch.Generator) -> list[bytes]:
    return [torch.get_rng_state().numpy().tobytes(), own.get_state().numpy().tobytes()]


def epoch_of(cls: Any, dataset: Any, sampler: Callable[[torch.Generator], Any], **more: Any) -> Any:
    """The batches of an epoch, or what they raise, and the random states before and after each."""
    torch.manual_seed(3)
    own = generator()
    found: list[Any] = []
    arguments = {"sampler": sampler(own), "generator": own, **more}
    try:
        for batch in cls(dataset, **arguments):
            found.append((bits(batch), state_of(own)))
    except Exception as error:
        found.append((type(error), str(error)))
    return [*found, state_of(own)]


def check(dataset: Any, sampler: Callable[[torch.Generator], Any], **more: Any) -> None:
    expected = epoch_of(DataLoader, dataset, sampler, **more)
    assert epoch_of(tdi.DataLoader, dataset, sampler, **more) == expected


@pytest.mark.parametrize("kind", FAST)
def test_batches_and_random_states_are_torchs_with_every_sampler(kind: str, tmp_path: Path) -> None:
    dataset = FAST[kind](tmp_path)
    assert gather_of(dataset, default_collate, many=True) is not None
    for sampler in samplers(dataset).values():
        check(dataset, sampler, batch_size=4)
    check(dataset, samplers(dataset)["shuffled"], batch_size=5, drop_last=True)


@pytest.mark.parametrize("kind", SLOW)
def test_what_may_be_anything_goes_torchs_way(kind: str) -> None:
    dataset = SLOW[kind]()
    assert gather_of(dataset, default_collate, many=True) is None
    if len(dataset):
        for name in ("in order", "shuffled", "own"):
            check(dataset, samplers(dataset)[name], batch_size=4)


def batches_in_a_list(cls: Any, dataset: Any, order: Sequence[int]) -> Any:
    """What torch gives with ``batch_size=None`` and a sampler of lists."""
    sampler = (
        BatchSampler(Own(order), 4, drop_last=False) if order else BatchSampler(SequentialSampler(dataset), 4, False)
    )
    try:
        return [bits(batch) for batch in cls(dataset, sampler=sampler, batch_size=None)]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("order", [[], [3, 1, 2, 0, -1], [1, N, 2]], ids=["in order", "own", "out of range"])
def test_lists_of_indices_that_are_asked_for_at_once_are_gathered_as_torch_indexes(
    order: list[int], tmp_path: Path
) -> None:
    for kind in (
        "tensors",
        "strides",
        "int32 rows",
        "float64 scalars",
        "mapped",
        "table",
        "subset by list",
    ):
        dataset = FAST[kind](tmp_path)
        assert gather_of(dataset, default_convert, many=False) is not None
        assert batches_in_a_list(tdi.DataLoader, dataset, order) == batches_in_a_list(DataLoader, dataset, order)


@pytest.mark.parametrize("wrong", [N, 10**6, -N - 1, 2**70, None, "3", 1.0])
@pytest.mark.parametrize(
    "kind",
    ["tensors", "rows of nothing", "int32 rows", "table", "subset by range", "subset by list"],
)
def test_an_index_that_is_wrong_raises_what_torch_raises(kind: str, wrong: Any, tmp_path: Path) -> None:
    check(FAST[kind](tmp_path), lambda _: Own([2, 0, 1, 3, wrong, 2]), batch_size=3)


def test_what_the_user_taught_default_collate_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(batch: Any, **_: Any) -> torch.Tensor:
        return torch.stack(batch) * 2

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, doubled)
    check(pairs(), samplers(pairs())["shuffled"], batch_size=4)


@pytest.mark.parametrize("kind", FAST)
def test_batches_have_memory_of_their_own_and_no_more_than_they_need(kind: str, tmp_path: Path) -> None:
    dataset = FAST[kind](tmp_path)
    gather = gather_of(dataset, default_collate, many=True)
    assert gather is not None
    for rows in (range(5, 9), np.array([5, 6, 7, 8])):
        expected = bits(gather(IndexArray(rows)))
        batch = gather(IndexArray(rows))
        for leaf in pytree.flatten(batch)[0]:
            assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
            leaf.zero_()
        assert bits(gather(IndexArray(rows))) == expected


def first_of(loader: Any) -> Any:
    return bits(next(iter(loader)))


def test_what_the_user_changes_between_epochs_counts_in_the_next_one() -> None:
    tensors, subset = pairs(), Subset(pairs(), [*range(N)])
    joined: ConcatDataset[Any] = ConcatDataset([pairs(), pairs()])
    table = Table({"x": ints()})

    def change() -> None:
        tensors.tensors = (tensors.tensors[0] + 1, ints() * 2)
        subset.indices[1] = 7  # type: ignore[index] # a list
        joined.datasets[0] = TensorDataset(floats(N, 4) * 2, ints())
        table.columns["x"] = floats(N)

    loaders = [
        [cls(dataset, batch_size=4) for dataset in (tensors, subset, joined, table)]
        for cls in (DataLoader, tdi.DataLoader)
    ]
    before = [[first_of(loader) for loader in each] for each in loaders]
    change()
    after = [[first_of(loader) for loader in each] for each in loaders]
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert all(old != new for old, new in zip(before[0], after[0], strict=True))


def test_what_is_changed_in_place_counts_at_once() -> None:
    tensor, numbers = ints().clone(), array("int64", N)
    batches = iter(tdi.DataLoader(Table({"x": tensor, "y": numbers}), batch_size=4))
    next(batches)
    tensor += 1
    numbers += 2
    assert bits(next(batches)) == bits({"x": tensor[4:8], "y": torch.from_numpy(numbers[4:8])})


def test_a_piece_dataset_travels_without_what_it_found_out() -> None:
    dataset = TensorDataset(floats(10_000, 4))
    pieces = PieceDataset(dataset, default_collate)
    before = len(pickle.dumps(pieces))
    request = (True, IndexArray(range(2, 5)), 0)
    piece = bits(pieces[request])
    assert len(pickle.dumps(pieces)) == before
    assert bits(copy.deepcopy(pieces)[request]) == piece


def steps_of(data: Any, replicas: int, **options: Any) -> list[Any]:
    """Each step to the last bit, with the state after it; and how it failed, if it did."""
    strategy, found = tdi.Strategy(["cpu"] * replicas), list[Any]()
    sampler = RandomSampler(range(N), generator=generator())
    settings = tdi.InputOptions(prefetch=0, **options)
    with strategy.distribute_dataset(DataLoader(data, 3, sampler=sampler), settings) as elements:
        try:
            for element in elements:
                parts = [bits(part) for part in strategy.local_results(element)]
                found.append((parts, elements.step, elements.state_dict()))
        except tdi.SourceError as error:
            found.append(str(error))
    return found


TROUBLED = ["subset by list", "subset of a concat", "too short"]
"""Those with indices that torch has to count from the end, or to complain of."""


@pytest.mark.parametrize(
    ("kind", "replicas"), [*((kind, 1) for kind in FAST), ("too short", 2), ("tensors", 2), ("tensors", 3)]
)
def test_rows_that_are_gathered_as_they_are_drawn_are_those_that_are_read_and_looked_at(
    kind: str, replicas: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Types, sizes, digests, positions and errors."""
    data = pairs(9) if kind == "too short" else FAST[kind](tmp_path)
    ways: list[dict[str, Any]] = [{}, {"partial_batch": "pad"}, {"on_error": "skip"}]
    fetched: list[Any] = []
    fetch = MapStream.fetch

    def noted(stream: MapStream, drawn: DrawnRow) -> Any:
        fetched.append(drawn)
        return fetch(stream, drawn)

    monkeypatch.setattr(MapStream, "fetch", noted)
    gathered = [steps_of(data, replicas, **way) for way in ways]
    assert len(fetched) == len(ways) or kind in TROUBLED  # the first row of each, to be learned
    monkeypatch.setattr(PieceDataset, "gather", None)
    assert [steps_of(data, replicas, **way) for way in ways] == gathered
    assert len(fetched) > 2 * len(ways)


def test_samples_that_cannot_be_read_are_left_out_of_a_gathered_batch() -> None:
    loader = DataLoader(pairs(), batch_sampler=[[0, 1, 99, 3], [4, 5, 6, 7]])
    elements = tdi.Strategy(["cpu"]).distribute_dataset(loader, tdi.InputOptions(on_error="skip", with_index=True))
    assert [(numbers.tolist(), y.tolist()) for numbers, (_, y) in elements] == [
        ([0, 1, 3], [0, 3, 9]),
        ([4, 5, 6, 7], [12, 15, 18, 21]),
    ]
    assert elements.stats()["skipped_samples"] == 1


def test_a_dict_of_tensors_and_arrays_is_a_dataset(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"x": floats(N, 2), "y": array("int32", N), "m": mapped(tmp_path)}
    strategy = tdi.Strategy(["cpu"])
    for data in (columns, lambda: columns):
        elements = strategy.distribute_dataset(data, global_batch_size=4)
        assert len(elements) == 3
        for place, element in enumerate(elements):
            rows = slice(4 * place, 4 * place + 4)
            arrays = {name: torch.from_numpy(columns[name][rows].copy()) for name in ("y", "m")}
            assert bits(element) == bits({"x": columns["x"][rows].clone(), **arrays})


def test_a_dict_or_dataset_that_is_shuffled_comes_as_torchs_loader_shuffles_it() -> None:
    strategy = tdi.Strategy(["cpu"])
    for data in ({"x": floats(N, 2), "y": array("int32", N)}, pairs(), pairs, Doubled(ints())):
        dataset: Any = Table(data) if isinstance(data, dict) else data if isinstance(data, Dataset) else data()
        torch.manual_seed(5)
        plain = DataLoader(dataset, 4, shuffle=True)
        expected = [[bits(batch) for batch in plain] for _ in range(2)]
        torch.manual_seed(5)
        ours = strategy.distribute_dataset(data, global_batch_size=4, shuffle=True)
        assert [[bits(batch) for batch in ours] for _ in range(2)] == expected


@pytest.mark.parametrize(
    ("data", "way"),
    [
        (DataLoader(ints()), "build the DataLoader with shuffle=True"),  # type: ignore[arg-type] # works
        (tdi.FileDataset(["a"], tdi.readers.text_lines), "shuffle_files=True"),
        ([ints()], "a map-style dataset"),
        (lambda: iter([ints()]), "a map-style dataset"),
    ],
)
def test_what_decides_about_its_order_itself_is_not_shuffled(data: Any, way: str) -> None:
    with pytest.raises(tdi.InputError, match=f"shuffle=True was given with .*{way}"):
        tdi.Strategy(["cpu"]).distribute_dataset(data, shuffle=True)


@pytest.mark.parametrize(
    ("columns", "size", "error", "match"),
    [
        ({"x": floats(4), "y": floats(3)}, 2, tdi.BatchingError, r"\['x'\] has 4, \['y'\] has 3"),
        ({"x": floats(4), "y": {"z": floats(4)}}, 2, tdi.InputError, "no dict"),
        ({"x": floats(4), "y": torch.tensor(1)}, 2, tdi.BatchingError, r"\['y'\] has None"),
        ({"x": floats(4)}, None, tdi.BatchingError, "no batch size was given"),
        ({"x": floats(4), "y": [1, 2, 3, 4]}, 2, tdi.InputError, "nothing but tensors and NumPy arrays"),
        ({}, 2, tdi.InputError, "nothing but tensors and NumPy arrays"),
    ],
)
def test_a_dict_that_is_no_dataset_is_refused(
    columns: Any, size: int | None, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        tdi.Strategy(["cpu"]).distribute_dataset(columns, global_batch_size=size)


def test_indices_of_the_users_that_are_plain_ints_become_arrays_and_others_do_not() -> None:
    for plain in ([3, 1, -2], (0, 5), [np.int64(4), 2], []):
        found = index_array_of(plain)
        assert found is not None
        assert found.tolist() == list(plain)
    for other in ([True, 2], [1.0], ["1"], [torch.tensor(1)], [2**63], [slice(1)], np.arange(3), 3, "12", range(3)):
        assert index_array_of(other) is None


def test_the_digest_of_indices_in_a_row_is_found_without_making_them() -> None:
    for start in (0, 1, 4095, 10**6, 2**40, 2**62):
        for count in (0, 1, 2, 511, 4095, 4096, 4097, 8192, 9000):
            assert IndexArray(range(start, start + count)).digest() == digest_of([*range(start, start + count)])
    assert IndexArray(range(10**12, 10**12 + 3)).digest() == digest_of([10**12, 10**12 + 1, 10**12 + 2])


def test_a_digest_is_that_of_the_values_however_they_are_kept() -> None:
    order = torch.randperm(5000, generator=generator()).tolist()
    same = (IndexArray(np.array(order)), order, tuple(order), [np.int64(number) for number in order])
    assert len({digest_of(indices) for indices in same}) == 1
    assert digest_of(IndexArray(range(7, 19))) == digest_of([*range(7, 19)])
    assert digest_of([3, 1, 2]) == 9_009_941_937_389_882_848  # in every process and version, as saved states have it
    other: Any = (
        [order[1], order[0], *order[2:]],
        order[:-1],
        [*order, 0],
        [0, *order],
        [],
        ["a"],
        ["b"],
        [2**64],
        [0.5],
    )
    assert len({digest_of(indices) for indices in other} | {digest_of(order)}) == 10
    assert all(digest_of(indices) > 0 for indices in other)


def test_rows_are_read_where_the_tensor_is_now() -> None:
    other = torch.arange(100.0).view(10, 10)
    moved, grown = torch.zeros(10, 10), torch.zeros(10, 10)
    made = [column_of(moved), column_of(grown)]
    moved.data = other
    grown.resize_(1_000, 10).copy_(torch.arange(10_000.0).view(1_000, 10))  # a view would have made that an error
    for column, tensor in zip(made, (moved, grown), strict=True):
        assert column is not None
        assert not column.is_still(tensor)
        assert torch.equal(column.take(np.array([7, 2])), other[[7, 2]])
        assert torch.equal(column.cut(4, 9), other[4:9])
