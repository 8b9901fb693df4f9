"""Batches that are gathered from memory at once: to the last bit what torch makes sample by sample."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, seed
from hypothesis import strategies as st
from torch import nn
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
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data._utils.collate import default_collate_fn_map

import torchdistinput as tdi
from tests.oracle.drawing import settings_of
from torchdistinput.batches import pytree
from torchdistinput.sources.kernel.index_array import IndexArray, digest_of
from torchdistinput.sources.map_style.in_memory import column_of, gather_of, index_array_of
from torchdistinput.sources.map_style.map_stream import DrawnRow, MapStream
from torchdistinput.sources.map_style.piece_dataset import PieceDataset
from torchdistinput.sources.map_style.table import Table

# torch says so of a memory-mapped column, once in a process: in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

N = 11
OF_TORCH = [torch.bool, torch.uint8, torch.uint16, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16]
OF_TORCH += [torch.float32, torch.float64, torch.complex64]
OF_NUMPY = [
    "bool",
    "uint8",
    "uint16",
    "uint64",
    "int8",
    "int16",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "U3",
]
ROWS: list[tuple[int, ...]] = [(), (), (3,), (2, 3), (0,), (3, 4, 4)]


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def ints(n: int = N) -> torch.Tensor:
    return torch.arange(n) * 3


def array(dtype: str, *shape: int) -> Any:
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) * 7 % 5).astype(dtype)


def pairs(n: int = N) -> TensorDataset:
    return TensorDataset(floats(n, 4), ints(n))


class Doubled(TensorDataset):
    """A subclass may do anything."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(tensor[index] * 2 for tensor in self.tensors)


class Many(TensorDataset):
    """Gives many samples at once, other ones than by themselves."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.tensors[0][index], f"{type(indices)} {type(index)} {index}") for index in indices]


class Disabled(Many):
    """Without the method, as torch sees it."""

    __getitems__: Any = None


class Own(Sampler[int]):
    """A sampler of the user's: any order, also from the end."""

    def __init__(self, order: Sequence[Any]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        yield from self.order


@st.composite
def tensors(draw: st.DrawFn, n: int) -> torch.Tensor:
    """A column of ``n`` rows, however it lies in memory."""
    dtype, row = draw(st.sampled_from(OF_TORCH)), draw(st.sampled_from(ROWS))
    made = torch.from_numpy(array("int64", 2 * n, *row)).to(dtype)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "whole": made[:n].clone,
        "strides": lambda: made[::2],
        "one row": lambda: made[:1].expand(n, *row) if n else made,
        "rows transposed": lambda: made[:n].transpose(1, -1) if row else made[:n],
        "channels last": lambda: made[:n].to(memory_format=torch.channels_last) if len(row) == 3 else made[:n],
        "with gradient": lambda: made[:n].clone().requires_grad_(dtype.is_floating_point),
        "a parameter": lambda: nn.Parameter(made[:n].clone(), requires_grad=False),
        "conjugates": made[:n].conj,
    }
    return ways[draw(st.sampled_from(["whole", *ways]))]()


@st.composite
def arrays(draw: st.DrawFn, n: int) -> Any:
    """The same of NumPy."""
    made = array(draw(st.sampled_from(OF_NUMPY)), 2 * n, *draw(st.sampled_from(ROWS)))
    ways: dict[str, Callable[[], Any]] = {
        "whole": made[:n].copy,
        "strides": lambda: made[::2],
        "backwards": lambda: made[:n][::-1],
        "in columns": lambda: np.asfortranarray(made[:n]),
        "masked": lambda: np.ma.masked_array(made[:n]),
        "read only": lambda: np.broadcast_to(made[:n], made[:n].shape),
        "mapped": lambda: mapped(made[:n]) if made[:n].nbytes and made.dtype.kind != "U" else made[:n],
    }
    return ways[draw(st.sampled_from(["whole", *ways]))]()


def mapped(values: Any) -> Any:
    with tempfile.TemporaryFile() as file:  # which the array maps, also when it is closed
        values.tofile(file)
        return np.memmap(file, values.dtype, "r+", shape=values.shape)


def parts(n: int, kind: str) -> st.SearchStrategy[Any]:
    """Indices of samples of ``n``."""
    some = st.lists(st.integers(-n, n - 1), max_size=N) if n else st.just([])
    kinds: dict[str, Callable[[list[int]], Any]] = {
        "list": list,
        "range": lambda found: range(n - 1, -1, -1 - len(found) % 3),
        "tensor": torch.tensor,
        "array": lambda found: np.array(found, np.int64),
        "bools": lambda found: [*found, *[True] * (n > 1)],
    }
    return some.map(kinds[kind])


@st.composite
def data(draw: st.DrawFn) -> Any:
    """A dataset that lies in memory, or nearly: what looks like one, and may be anything."""
    n = draw(st.integers(0, N))
    column = st.one_of(tensors(n), arrays(n))
    made: Any = draw(
        st.one_of(
            column,
            st.lists(tensors(n), min_size=1, max_size=3).map(lambda found: TensorDataset(*found)),
            st.lists(column, min_size=1, max_size=3).map(lambda found: Table(dict(zip("xyz", found, strict=False)))),
            st.builds(draw(st.sampled_from([Doubled, Many, Disabled])), tensors(n)),
            st.just(StackDataset(pairs(n), pairs(n))),
            st.just(ConcatDataset([pairs(n), pairs(1), pairs(0)])),
            st.sampled_from([range(n), [floats(2)] * n]),
        )
    )
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        made = Subset(
            made, draw(parts(len(made), draw(st.sampled_from(["list", "range", "tensor", "array", "bools"]))))
        )
    return made


WRONG = [N, 10**6, -N - 1, 2**70, None, "3", 1.0]


class Drifting(Sampler[int]):
    """Draws from the default random state for each index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            yield int(torch.randint(self.n, ()))


class Reversed(SequentialSampler):
    """A subclass, of which nothing is known."""

    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self.data_source)))


class Uneven(Sampler[list[int]]):
    """A batch sampler of the user's: batches of many sizes."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __iter__(self) -> Iterator[list[int]]:
        order, sizes = iter(self.order), cycle((1, 3, 2))
        return iter(lambda: [*islice(order, next(sizes))], [])


Order = Callable[[torch.Generator | None], Any]


@st.composite
def orders(draw: st.DrawFn, n: int) -> Order:
    """A sampler, given its generator; by ``None`` it draws from the default one."""
    any_order = st.lists(st.integers(-n, n - 1), max_size=2 * N) if n else st.just([])
    found = draw(any_order)
    odd: Any = draw(st.sampled_from([int, np.int64, np.int32, torch.tensor]))
    block: Any = draw(st.sampled_from([None, 3]))
    ways: dict[str, Order] = {
        "in order": lambda _: SequentialSampler(range(n)),
        "shuffled": lambda generator: RandomSampler(range(n), generator=generator),
        "drawn": lambda generator: RandomSampler(range(n), True, 40, generator),
        "more than once": lambda generator: RandomSampler(range(n), False, 2 * N + 3, generator),
        "weighted": lambda generator: WeightedRandomSampler(range(1, n + 1), 13, generator=generator),
        "some": lambda generator: SubsetRandomSampler(range(n // 2, n), generator),
        "keyed": lambda _: tdi.ShuffleSampler(n, 5, block=block),
        "drifting": lambda _: Drifting(n),
        "backwards": lambda _: Reversed(range(n)),
        "own": lambda _: Own(found),
        "odd": lambda _: Own([*map(odd, found)]),
        "wrong": lambda _: Own([*found, wrong, 0]),
    }
    wrong = draw(st.sampled_from(WRONG))
    return ways[draw(st.sampled_from([*ways] if n else ["in order", "own", "wrong"]))]


def bits(batch: Any) -> Any:
    """Everything that shows of a batch."""
    if isinstance(batch, torch.Tensor):
        content = batch.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()
        return type(batch), batch.dtype, tuple(batch.shape), batch.stride(), batch.requires_grad, content
    if isinstance(batch, np.ndarray | np.generic):
        return type(batch), batch.dtype, np.asarray(batch).tolist()
    if isinstance(batch, dict):
        return type(batch), [(key, bits(value)) for key, value in batch.items()]
    if isinstance(batch, list | tuple):
        return type(batch), [bits(value) for value in batch]
    return batch


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def state_of(own: torch.Generator | None) -> list[bytes]:
    return [each.get_state().numpy().tobytes() for each in (torch.default_generator, own) if each is not None]


def in_batches(order: Any, batch_size: Any, *, drop_last: bool) -> dict[str, Any]:
    """The arguments for an order in batches: of one size, whole ones, of a batch sampler, or of the user's own."""
    if batch_size is None:
        return {"batch_size": None, "sampler": BatchSampler(order, 4, drop_last=False)}
    if batch_size in ("given", "uneven"):
        return {"batch_sampler": Uneven(order) if batch_size == "uneven" else BatchSampler(order, 3, drop_last)}
    return {"batch_size": batch_size, "drop_last": drop_last, "sampler": order}


def epoch_of(cls: Any, dataset: Any, sampler: Order, step: int = 0, *, own: bool = True, **more: Any) -> list[Any]:
    """The batches of an epoch from a step on, or what they raise, and the random states after each.

    Of this loader's, each that is put together has memory of its own, and no more than it needs.
    """
    torch.manual_seed(3)
    drawn_from = generator() if own else None
    found: list[Any] = []
    is_collated = more["batch_size"] is not None
    try:
        loader = cls(dataset, generator=drawn_from, **in_batches(sampler(drawn_from), **more))
        if step:
            loader.seek(0, step)
        for batch in loader:
            found.append((bits(batch), state_of(drawn_from)))
            for leaf in pytree.flatten(batch)[0] if is_collated and cls is tdi.DataLoader else ():
                if isinstance(leaf, torch.Tensor) and not leaf.requires_grad:
                    assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
                    leaf.zero_()
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError, OverflowError) as error:
        found.append((type(error), str(error)))
    return [*found, state_of(drawn_from)]


def is_as_torchs(drawn: Any) -> None:
    dataset = drawn.draw(data())
    sampler = drawn.draw(orders(len(dataset)))
    sizes: list[Any] = [None, 1, 3, 4, 50, "given", "uneven"]
    more: dict[str, Any] = {"batch_size": drawn.draw(st.sampled_from(sizes)), "own": drawn.draw(st.booleans())}
    more["drop_last"] = drawn.draw(st.booleans())
    expected = epoch_of(DataLoader, dataset, sampler, **more)
    for _ in range(2):
        assert epoch_of(tdi.DataLoader, dataset, sampler, **more) == expected
    if len(expected) > 1 and not isinstance(expected[-2][0], type):  # it did not fail
        step = drawn.draw(st.integers(1, len(expected) - 1))
        assert epoch_of(tdi.DataLoader, dataset, sampler, step, **more) == expected[step:]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # of torch, for lists of indices
def test_data_in_memory_comes_bit_for_bit_and_draw_for_draw_as_from_torchs_loader_from_any_step(
    all_cells: bool, drawn_by: int
) -> None:
    seed(drawn_by)(settings_of(all_cells=all_cells)(given(st.data())(is_as_torchs)))()


def test_a_column_that_runs_backwards_is_read_whatever_torch_knows_of_it() -> None:
    column = np.arange(3, dtype=np.uint64)[::-1]  # torch collates no scalar of this type, and knows no such stride
    (batch,) = tdi.Strategy(devices=["cpu"]).distribute_dataset({"x": column}, global_batch_size=3)
    assert batch["x"].tolist() == [2, 1, 0]


def test_tables_arrays_and_parts_of_them_are_gathered_and_what_may_be_anything_is_not() -> None:
    table = Table({"x": floats(N, 2), "y": array("int32", N)})
    for dataset in (
        pairs(),
        floats(N, 3),
        array("uint8", N, 2),
        table,
        Subset(pairs(30), [29, -1, 3]),
        Subset(table, [1]),
    ):
        assert gather_of(dataset, default_collate, many=True) is not None
        assert gather_of(dataset, default_convert, many=False) is not None
    for anything in (Doubled(ints()), Many(floats(N, 2)), Subset(Many(ints()), range(N)), range(N), [floats(2)] * N):
        assert gather_of(anything, default_collate, many=True) is None


def test_what_the_user_taught_default_collate_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(batch: Any, **_: Any) -> torch.Tensor:
        return torch.stack(batch) * 2

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, doubled)
    theirs, ours = (
        epoch_of(cls, pairs(), lambda _: Own(range(N)), batch_size=4, drop_last=False)
        for cls in (DataLoader, tdi.DataLoader)
    )
    assert ours == theirs


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


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_rows_that_are_gathered_as_they_are_drawn_are_those_that_are_read_and_looked_at(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types, sizes, digests, positions and errors."""
    ways: list[dict[str, Any]] = [{}, {"partial_batch": "pad"}, {"on_error": "skip"}]
    table = Table({"x": floats(N, 2), "y": array("int32", N)})
    # Of the last two, torch has to count indices from the end, or to complain of some.
    datasets = [pairs(), table, Subset(table, [*range(N)]), Subset(pairs(30), [29, -1, *range(N - 2)]), pairs(9)]
    fetched: list[Any] = []
    fetch = MapStream.fetch

    def noted(stream: MapStream, drawn: DrawnRow) -> Any:
        fetched.append(drawn)
        return fetch(stream, drawn)

    monkeypatch.setattr(MapStream, "fetch", noted)
    gathered = [[steps_of(data, replicas, **way) for way in ways] for data in datasets[:3]]
    assert len(fetched) == 3 * len(ways)  # the first row of each, to be learned
    gathered += [[steps_of(data, replicas, **way) for way in ways] for data in datasets[3:]]
    monkeypatch.setattr(PieceDataset, "gather", None)
    assert [[steps_of(data, replicas, **way) for way in ways] for data in datasets] == gathered


def test_samples_that_cannot_be_read_are_left_out_of_a_gathered_batch() -> None:
    loader = DataLoader(pairs(), batch_sampler=[[0, 1, 99, 3], [4, 5, 6, 7]])
    elements = tdi.Strategy(["cpu"]).distribute_dataset(loader, tdi.InputOptions(on_error="skip", with_index=True))
    assert [(numbers.tolist(), y.tolist()) for numbers, (_, y) in elements] == [
        ([0, 1, 3], [0, 3, 9]),
        ([4, 5, 6, 7], [12, 15, 18, 21]),
    ]
    assert elements.stats()["skipped_samples"] == 1


def test_a_dict_of_tensors_and_arrays_is_a_dataset() -> None:
    columns: dict[str, Any] = {"x": floats(N, 2), "y": array("int32", N), "m": mapped(array("float32", N, 3))}
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
