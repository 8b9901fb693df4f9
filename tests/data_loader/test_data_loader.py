"""The drop-in DataLoader in one process: it is torch's loader, with a few words more."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    dataloader,
)

import torchdistinput as tdi
from tests.data import Count, Mapped, Repeated, Stream
from tests.support import inputs
from tests.support.beside_torch import Look, Ours, Torchs, as_torch, epochs, plain
from tests.support.interpreters import ROOT
from tests.support.platforms import FORK_WARNING
from tests.support.waiting import wait_for_end
from torchdistinput.batches import pytree


def nothing(worker: int) -> None:
    pass


def note_the_worker(worker: int) -> None:
    os.environ["OF_A_TEST"] = f"worker {worker}"


def in_worker(rows: list[int]) -> tuple[list[int], str]:
    return rows, os.environ.get("OF_A_TEST", "none")


# ------------------------------------------------------------------------------------------------------------ the face


def test_the_arguments_are_torchs_in_torchs_order_and_then_our_own() -> None:
    ours, torchs = (list(inspect.signature(cls.__init__).parameters.values()) for cls in (Ours, Torchs))
    facts = [[(each.name, each.kind, each.default) for each in of] for of in (ours, torchs)]
    assert facts[0][: len(torchs)] == facts[1]
    assert [each.name for each in ours[len(torchs) :]] == [
        "device",
        "strategy",
        "options",
    ]
    assert {each.kind for each in ours[len(torchs) :]} == {inspect.Parameter.KEYWORD_ONLY}


def test_it_is_no_torch_loader_as_frameworks_divide_those() -> None:
    assert not issubclass(Ours, Torchs)


def unlike(rows: list[Any]) -> tuple[Any, ...]:
    """What detection models collate: one entry per image, each of its own size."""
    return tuple(zip(*rows, strict=True))


IMAGES = Mapped(5, lambda index: (torch.full((3, index + 1), float(index)), {"boxes": torch.zeros(index, 4)}))


class Opaque:
    """A batch that nobody can look into."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.rows == self.rows

    __hash__ = None  # type: ignore[assignment]


def changing() -> Iterator[Any]:
    """Ready batches of changing structure."""
    yield {"a": torch.ones(2)}
    yield [np.arange(3), "text"]
    yield None
    yield 5


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"batch_size": 4, "shuffle": True, "generator": torch.Generator()},
    {"sampler": SequentialSampler(range(3)), "drop_last": True},
    {"batch_sampler": BatchSampler(SequentialSampler(range(3)), 2, drop_last=False), "collate_fn": list},
    {"batch_size": None},
    {
        "num_workers": 2,
        "timeout": 3,
        "worker_init_fn": nothing,
        "multiprocessing_context": multiprocessing.get_context("fork"),
        "prefetch_factor": 5,
        "persistent_workers": True,
    },
]


SET: dict[str, Any] = {
    "batch_size": 3,
    "batch_sampler": [[1]],
    "collate_fn": list,
    "dataset": range(2),
    "drop_last": True,
    "generator": torch.Generator(),
    "in_order": True,
    "multiprocessing_context": "fork",
    "num_workers": 1,
    "persistent_workers": True,
    "pin_memory": True,
    "pin_memory_device": "cpu",
    "prefetch_factor": 3,
    "sampler": [1],
    "timeout": 4,
    "worker_init_fn": nothing,
}


def shown(arguments: dict[str, Any], cls: Any) -> list[Any]:
    """Each attribute of torch's; of a sampler that the loader made, its kind."""
    loader = cls(range(3), **arguments)
    found = [getattr(loader, name) for name in SET]
    return [type(each) if isinstance(each, Sampler) else each for each in found]


def set_one(name: str, cls: Any) -> Any:
    loader = cls(range(5), batch_size=2, num_workers=2)
    setattr(loader, name, SET[name])
    return getattr(loader, name)


def draw(_: int) -> float:
    """Draws from every global random state of this process."""
    return torch.rand(()).item() + random.random() + float(np.random.rand())


def drawn(cls: Any) -> Any:
    """The loop draws too."""
    loader = cls(Mapped(7, draw), batch_size=2, shuffle=True)
    return [(batch.tolist(), torch.rand(()).item()) for _ in range(2) for batch in loader]


class Drawn(IterableDataset[Any]):
    """Draws from the default random state for each element, and notes how far it was read."""

    def __init__(self, length: int, fails: bool) -> None:
        self.length, self.fails = length, fails
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        self.read = 0
        for number in range(1, self.length + 1):
            self.read = number
            yield {"x": torch.rand(3), "n": number}
        if self.fails:
            raise KeyError("the end")


def step_by_step(length: int, fails: bool, arguments: dict[str, Any], cls: Any) -> list[Any]:
    """The batches of two epochs with the elements read and the random state at each step, and how each epoch ended."""
    found: list[Any] = []
    dataset = Drawn(length, fails)
    loader = cls(dataset, **arguments)
    for _ in range(2):
        batches = iter(loader)
        for _ in range(length + 2):
            try:
                found.append(plain(next(batches)))
            except (StopIteration, KeyError) as error:
                found.append((type(error), error.args))
            found.append((dataset.read, torch.get_rng_state().tolist()))
            if isinstance(found[-2][0], type) and issubclass(found[-2][0], Exception):
                break
    return found


def read(data: Any, arguments: dict[str, Any], cls: Any) -> Any:
    return epochs(cls(data, **arguments))


def refused(data: Any, arguments: dict[str, Any], cls: Any) -> None:
    """It is not made at all."""
    cls(data, **arguments)


def copied(copy_of: Callable[[Any], Any], cls: Any) -> Any:
    """A copy of a loader that is being read, and both once more."""
    loader = cls(range(5), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))
    running = iter(loader)
    next(running)
    other = copy_of(loader)
    return [epochs(each) for each in (other, running, loader, other)]


def of_columns(cls: Any) -> Any:
    """A dict of columns, which torch's has as a dataset of tensors."""
    x, z = torch.arange(10), torch.arange(20.0).reshape(10, 2)
    data: Any = {"x": x, "z": z.numpy()} if cls is Ours else TensorDataset(x, z)
    loader = cls(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    flat = [pytree.flatten(batch)[0] for batch in loader]
    return len(loader), plain(flat)


class Unknown(IterableDataset[int]):
    """Its length cannot be told."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        raise ValueError("nobody knows")


def length_of(data: Any, arguments: dict[str, Any], cls: Any) -> int:
    return len(cls(data, **arguments))


MAP: Any = range(4)
ITERABLE = Count(4)
SAMPLER = SequentialSampler(range(4))
BATCHES = [[0, 1], [2]]
MORE = RandomSampler(range(11), replacement=True, num_samples=9)

ODD: list[tuple[Any, dict[str, Any]]] = [
    (IMAGES, {"batch_size": 2, "collate_fn": unlike}),
    (range(7), {"batch_size": 3, "collate_fn": Opaque}),
    (range(7), {"batch_size": 3, "collate_fn": np.array}),
    (range(3), {"batch_size": None}),
    (inputs.Records(), {"batch_size": None, "shuffle": True}),
    (Stream(changing), {"batch_size": None}),
    (["a", "b", "c"], {"batch_size": 2}),
    ([], {"batch_size": 2}),
    ({0: torch.arange(3), 1: torch.arange(3) + 3}, {"batch_size": 2}),
    (Unknown(), {"batch_size": 2}),
]
LENGTHS: list[tuple[Any, dict[str, Any]]] = [
    *((range(11), more) for more in ({"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None})),
    *((range(11), more) for more in ({"batch_sampler": BATCHES}, {"sampler": MORE})),
]
REFUSED_BY_TORCH: list[tuple[Any, dict[str, Any]]] = [
    (MAP, {"shuffle": True, "sampler": SAMPLER}),
    (MAP, {"batch_size": 2, "batch_sampler": BATCHES}),
    (MAP, {"shuffle": True, "batch_sampler": BATCHES}),
    (MAP, {"sampler": SAMPLER, "batch_sampler": BATCHES}),
    (MAP, {"drop_last": True, "batch_sampler": BATCHES}),
    (MAP, {"batch_size": None, "drop_last": True}),
    *((MAP, {"batch_size": wrong}) for wrong in (0, -2, 2.5, "4")),
    (MAP, {"drop_last": "yes"}),
    (MAP, {"num_workers": -1}),
    (MAP, {"timeout": -1}),
    (MAP, {"prefetch_factor": 2}),
    (MAP, {"num_workers": 1, "prefetch_factor": -1}),
    (MAP, {"persistent_workers": True}),
    (MAP, {"multiprocessing_context": "fork"}),
    *((MAP, {"num_workers": 1, "multiprocessing_context": wrong}) for wrong in ("teleport", 3)),
    *((ITERABLE, more) for more in ({"shuffle": True}, {"sampler": SAMPLER}, {"batch_sampler": BATCHES})),
]
READ: list[dict[str, Any]] = [{"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}]
LOOKS: dict[str, Look] = {
    **{f"attributes {place}": partial(shown, arguments) for place, arguments in enumerate(ARGUMENTS)},
    **{f"{name} is set": partial(set_one, name) for name in SET},
    **{
        f"odd {place}, {workers} workers": partial(read, data, {**arguments, "num_workers": workers})
        for place, (data, arguments) in enumerate(ODD)
        for workers in (0, 1)
    },
    "draws": drawn,
    **{
        f"stream of {length}, {'fails, ' * fails}{arguments}": partial(step_by_step, length, fails, arguments)
        for length, fails in itertools.product((0, 6, 7), (False, True))
        for arguments in READ
    },
    **{f"length {place}": partial(length_of, *case) for place, case in enumerate(LENGTHS)},
    **{f"refused {place}": partial(refused, *case) for place, case in enumerate(REFUSED_BY_TORCH)},
    "copy": partial(copied, copy.copy),
    "deepcopy": partial(copied, copy.deepcopy),
    "pickle": partial(copied, lambda loader: pickle.loads(pickle.dumps(loader))),
    "columns": of_columns,
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_is_seen_of_it_is_what_is_seen_of_torchs(name: str) -> None:
    found = as_torch(LOOKS[name])
    assert (isinstance(found, tuple) and found[0] in (TypeError, ValueError)) == (
        name.startswith("refused") or name in REFUSED_WHEN_SET
    )


REFUSED_WHEN_SET = {f"{name} is set" for name in ("batch_size", "batch_sampler", "dataset", "drop_last", "sampler")} | {
    "persistent_workers is set"
}


def test_what_torch_knows_otherwise_is_told_apart() -> None:
    with pytest.raises(TypeError):
        len(Ours(Unknown(), batch_size=2))
    samples: Any = {0: torch.arange(3), 1: torch.arange(3) + 3}
    with pytest.raises(tdi.InputError, match="for samples under the keys 0, 1, ... a DataLoader of them"):
        tdi.Strategy(["cpu"]).distribute_dataset(samples, global_batch_size=2)


def test_what_was_set_counts_from_the_first_iter_on() -> None:
    data: Any = range(4)
    loader = Ours(data, batch_size=2)
    loader.collate_fn, loader.num_workers, loader.worker_init_fn = in_worker, 1, note_the_worker
    assert [*loader] == [([0, 1], "worker 0"), ([2, 3], "worker 0")]
    with pytest.raises(ValueError, match="batch_size attribute should not be set after DataLoader is initialized"):
        loader.batch_size = 4
    assert (loader.num_workers, loader.batch_size) == (1, 2)
    again = copy.copy(loader)
    again.collate_fn, again.num_workers = list, 0
    assert [*again] == [[0, 1], [2, 3]]
    assert [*loader] == [([0, 1], "worker 0"), ([2, 3], "worker 0")]


def test_what_is_set_once_an_epoch_has_begun_is_refused_and_changes_nothing() -> None:
    loader = Ours(range(4), batch_size=2)
    assert len(list(loader)) == 2
    for name, value in {"collate_fn": list, "num_workers": 1, "generator": torch.Generator()}.items():
        with pytest.raises(tdi.InputError, match=f"{name} was set on a DataLoader .* make another DataLoader"):
            setattr(loader, name, value)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert loader.num_workers == 0


def test_what_is_no_attribute_of_torchs_is_not_set() -> None:
    with pytest.raises(AttributeError):
        Ours(range(4)).step = 3


# ------------------------------------------------------------------------------------------------------- one process


def test_in_one_process_the_step_counts_the_samples_of_any_batch() -> None:
    loader = Ours(IMAGES, batch_size=2, collate_fn=unlike)
    assert [(loader.step.index, loader.step.global_size) for _ in loader] == [(0, 2), (1, 2), (2, 1)]


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_batch_sampler_that_draws_as_soon_as_it_is_asked_is_asked_once_an_epoch_as_by_torch_without_workers(
    own_generator: bool,
) -> None:
    """With loader workers torch asks it twice, and takes the second answer."""
    found = []
    for cls, workers in ((Torchs, 0), (Ours, 0), (Ours, 1)):
        torch.manual_seed(1)
        generator = inputs.generator() if own_generator else None
        sampler = inputs.BatchesDrawnAtOnce(10, generator)
        loader = cls(range(10), batch_sampler=sampler, generator=generator, num_workers=workers)
        found.append([([batch.tolist() for batch in loader], torch.rand(()).item()) for _ in range(3)])
    assert found[1:] == [found[0]] * 2


def test_a_loop_that_was_left_leaves_no_loader_worker() -> None:
    loader = Ours(range(40), num_workers=2)
    for _ in loader:
        break
    wait_for_end(multiprocessing.active_children)


def test_close_and_with_end_the_loader_workers_that_persist() -> None:
    with Ours(range(8), num_workers=2, persistent_workers=True) as loader:
        first = [batch.item() for batch in loader]
        assert multiprocessing.active_children()
        assert [batch.item() for batch in loader] == first
    assert not multiprocessing.active_children()
    assert [batch.item() for batch in loader] == first  # it begins anew
    loader.close()


def birth(_: int) -> str:
    """How the loader worker came into being that reads a sample."""
    return type(multiprocessing.current_process()).__name__


@pytest.mark.parametrize(("context", "process"), [("fork", "ForkProcess"), ("forkserver", "ForkServerProcess")])
def test_loader_workers_are_started_as_the_multiprocessing_context_says(context: str, process: str) -> None:
    assert list(Ours(Mapped(2, birth), num_workers=1, multiprocessing_context=context)) == [[process]] * 2


# ------------------------------------------------------------------------------------------------ lengths and epochs


def test_under_other_policies_the_length_is_known_from_the_first_iter_on() -> None:
    loader = Ours(range(5), batch_size=2, options=tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.OFF))
    with pytest.raises(TypeError, match="OFF"):
        len(loader)
    assert len(list(loader)) == len(loader) == 3


def test_steps_count_within_the_epoch_and_set_epoch_chooses_the_next() -> None:
    loader = Ours(range(3), batch_size=2)
    with pytest.raises(tdi.InputError, match="no step"):
        _ = loader.step
    assert loader.stats()["steps"] == 0
    found = []
    for chosen in (None, None, 7, None):
        if chosen is not None:
            loader.set_epoch(chosen)
        found += [(loader.step.epoch, loader.step.index) for _ in loader]
    assert found == [(epoch, index) for epoch in (0, 1, 7, 8) for index in (0, 1)]
    assert (loader.stats()["epoch"], loader.stats()["samples"]) == (8, 3)
    for wrong in (-1, 1.0, True):
        with pytest.raises(ValueError, match="epoch"):
            loader.set_epoch(wrong)
    loader = Ours(range(3), batch_size=2)
    loader.set_epoch(7)  # before the data is divided
    assert [loader.step.epoch for _ in range(2) for _ in loader] == [7, 7, 8, 8]


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "cpu", "strategy": tdi.Strategy(devices=["cpu"])}, ValueError, "both device and strategy"),
        ({"sampler": DistributedSampler(MAP, 2, 0)}, tdi.ShardingError, "divided twice.*OFF"),
    ],
)
def test_our_own_arguments_are_checked_at_construction(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Ours(MAP, **arguments)


# ---------------------------------------------------------------------------------------------- strategies and words


def test_one_log_line_names_the_policy_and_the_global_batch_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchdistinput"):
        loader = Ours(MAP, batch_size=3)
        for _ in range(2):
            list(loader)
    (line,) = caplog.messages
    assert line == "dataset 1 (map-style range): policy DATA, global batch 3 = 3 over 1 rank"


def test_a_strategys_replicas_each_get_their_part() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 3)
    loader = Ours(range(5), batch_size=4, strategy=strategy)
    found = [[piece.tolist() for piece in strategy.local_results(batch)] for batch in loader]
    assert found == [[[0, 1], [2, 3], []], [[4], [], []]]
    assert found == [
        [piece.tolist() for piece in strategy.local_results(batch)] for batch in strategy.distribute_dataset(loader)
    ]


def distributed(*args: Any, **kwargs: Any) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(Torchs(*args, **kwargs))


def torch_pins_for(device: str) -> bool:
    """Torch 2.8 raises where later releases warn, and ends the process where its pinning thread does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return len(list(Torchs(range(2), pin_memory=True, pin_memory_device=device))) == 2
    except RuntimeError:
        return False


@pytest.mark.parametrize("device", ["", "cpu"])  # which torch warns of, too
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("data", [range(2), TensorDataset(torch.arange(2)), Repeated(3)])
def test_pinning_is_torchs_and_so_is_its_warning_without_an_accelerator(
    data: Any, workers: int, persistent: bool, device: str
) -> None:
    if device and not torch_pins_for(device):
        pytest.skip(f"this release of torch refuses pin_memory_device={device!r}")
    told = []
    for make in (Torchs, Ours, distributed):
        loader = make(
            data, pin_memory=True, num_workers=workers, persistent_workers=persistent, pin_memory_device=device
        )
        epochs = []
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.filterwarnings("ignore", FORK_WARNING)  # a thread may be at its end for a while
                batches = [batch if isinstance(batch, torch.Tensor) else batch[0] for batch in loader]
            found = [(each.category, str(each.message), each.filename, each.lineno) for each in caught]
            epochs.append(([(batch.item(), batch.is_pinned()) for batch in batches], found))
        told.append(epochs)
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("make", [Ours, distributed])
@pytest.mark.parametrize("kind", ["table", "map", "iterable", "files"])
def test_where_nothing_is_pinned_batches_are_made_without_torchs_loader_and_the_same(
    make: Callable[..., Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs.write_numbers(tmp_path)
    rows = TensorDataset(torch.arange(10), torch.rand(10, 3))
    data = {"table": rows, "map": range(10), "iterable": Repeated(3), "files": inputs.numbers_of(tmp_path)}[kind]
    shuffle = kind in ("table", "map")
    seen = []
    for cls in (Torchs, make):
        torch.manual_seed(5)
        loader = cls(data, batch_size=4, shuffle=shuffle, pin_memory=True)
        with warnings.catch_warnings(record=True), monkeypatch.context() as patch:
            if cls is not Torchs:
                patch.delattr(dataloader._SingleProcessDataLoaderIter, "_next_data")
            warnings.simplefilter("always")
            epochs = [[str(batch) for batch in loader] for _ in range(2)]
        seen.append((epochs, torch.rand(1).item()))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_iterator_is_not_copied_as_two_would_share_its_place(copied: Callable[[Any], Any]) -> None:
    for cls, kind in ((Torchs, NotImplementedError), (Ours, TypeError)):
        loader = cls(range(3), batch_size=2)
        running = iter(loader)
        with pytest.raises(kind, match="LoaderIter"):
            copied(running)
        assert [batch.tolist() for batch in running] == [[0, 1], [2]]


def test_a_copy_of_a_strategy_is_the_strategy() -> None:
    strategy = tdi.Strategy(["cpu"])
    assert copy.deepcopy({"of a trainer": strategy})["of a trainer"] is copy.copy(strategy) is strategy
    assert pickle.loads(pickle.dumps(strategy)).devices == strategy.devices


class HoldsALock(Exception):
    """It can be pickled without the lock."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raise_one_with_a_lock(samples: list[Any]) -> None:
    raise HoldsALock(f"no {samples[0]}")


def test_an_exception_of_a_loader_worker_comes_as_itself_without_what_cannot_be_sent() -> None:
    loader = Ours(range(3), collate_fn=raise_one_with_a_lock, num_workers=1)
    with pytest.raises(HoldsALock, match="^no 0$") as caught:
        next(iter(loader))
    assert not caught.value.lock.locked()


def module(name: str) -> Any:
    return pytest.importorskip(name)


def arrow_dataset(columns: Any) -> Any:
    return module("pyarrow.dataset").dataset(module("pyarrow").table(columns))


TABLES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a pandas DataFrame": ("pandas", lambda columns: module("pandas").DataFrame(columns)),
    "a pandas dict": ("pandas", lambda columns: dict(module("pandas").DataFrame(columns))),
    "a polars DataFrame": ("polars", lambda columns: module("polars").DataFrame(columns)),
    "a polars LazyFrame": ("polars", lambda columns: module("polars").LazyFrame(columns)),
    "a polars dict": ("polars", lambda columns: module("polars").DataFrame(columns).to_dict()),
    "a pyarrow Table": ("pyarrow", lambda columns: module("pyarrow").table(columns)),
    "a pyarrow dataset": ("pyarrow", arrow_dataset),
    "a pyarrow scanner": ("pyarrow", lambda columns: arrow_dataset(columns).scanner()),
}


@pytest.mark.parametrize(("library", "make"), TABLES.values(), ids=TABLES)
def test_tables_of_other_libraries_are_refused_with_what_to_write(library: str, make: Callable[[Any], Any]) -> None:
    columns = {"a": list(range(10)), "b": [0.5] * 10}
    table = make(columns)
    strategy = tdi.Strategy(devices=["cpu"])
    for use in (
        lambda: Ours(table, batch_size=4),
        lambda: Ours(table, batch_size=4, shuffle=True),
        lambda: strategy.distribute_dataset(table, global_batch_size=4),
        lambda: strategy.distribute_dataset(Torchs(table, batch_size=4)),
    ):
        with pytest.raises(tdi.InputError, match=f"found a {library} .*Give a dict of NumPy arrays"):
            use()


@pytest.mark.parametrize("kind", ["a pandas DataFrame", "a polars DataFrame", "a pyarrow Table"])
def test_the_line_of_the_page_for_tables_gives_their_columns(kind: str) -> None:
    line = "{name: table[name].to_numpy() for name in table.columns}"
    assert f"`{line}` (pyarrow: `table.column_names`)" in (ROOT / "examples" / "my_data" / "in_memory.md").read_text()
    library, make = TABLES[kind]
    columns = {"a": list(range(10)), "b": [0.5] * 10}
    written = line.replace("table.columns", "table.column_names") if library == "pyarrow" else line
    (batch,) = Ours(eval(written, {"table": make(columns)}), batch_size=10)
    assert {name: column.tolist() for name, column in batch.items()} == columns


@pytest.mark.parametrize("name", ["_duckdb.DuckDBPyRelation", "deltalake.table.DeltaTable", "pyiceberg.table.Table"])
def test_tables_that_are_not_read_yet_are_refused_with_what_to_write(name: str) -> None:
    library, _, kind = name.rpartition(".")
    table = type(kind, (), {"__module__": library, "__iter__": lambda _: iter(())})()
    for use in (lambda: Ours(table, 4), lambda: tdi.Strategy(["cpu"]).distribute_dataset(table, global_batch_size=4)):
        with pytest.raises(tdi.InputError, match="write Parquet files"):
            use()


def test_a_dict_of_samples_by_number_may_hold_any_samples() -> None:
    samples: Any = {number: module("pandas").Series([number]) for number in range(3)}
    assert [int(batch[0].sum()) for batch in Ours(samples, collate_fn=list)] == [0, 1, 2]


@pytest.mark.parametrize("library", ["h5py", "zarr"])
def test_stored_arrays_are_columns_and_a_group_of_them_is_refused_with_what_to_write(
    library: str, tmp_path: Path
) -> None:
    module: Any = pytest.importorskip(library)
    numbers = np.arange(30.0).reshape(10, 3)
    group = module.File(tmp_path / "a.h5", "w") if library == "h5py" else module.open_group(str(tmp_path), mode="w")
    group.create_dataset("a", data=numbers) if library == "h5py" else group.create_array("a", data=numbers)
    strategy = tdi.Strategy(devices=["cpu"])
    for data in (group["a"], {"a": group["a"]}, {"a": group["a"], "b": numbers}):
        for loader in (Ours(data, batch_size=4), strategy.distribute_dataset(data, global_batch_size=4)):
            found = torch.cat([pytree.flatten(batch)[0][0] for batch in loader])
            assert torch.equal(found, torch.from_numpy(numbers))
    for use in (lambda: Ours(group, batch_size=4), lambda: strategy.distribute_dataset(group, global_batch_size=4)):
        with pytest.raises(tdi.InputError, match="Give a dict .* of the arrays of h5py or zarr"):
            use()


def test_an_iterator_that_is_dropped_after_a_later_one_was_read_changes_nothing() -> None:
    """What keeps it for so long, such as a traceback, is let go of at another moment on each rank."""
    loader = tdi.DataLoader(range(8), batch_size=4)  # type: ignore[arg-type, var-annotated] # a dataset by its methods
    dropped = iter(loader)
    assert dropped.has_next()
    assert len(list(iter(loader))) == 2
    del dropped
    gc.collect()
    next(iter(loader))
    assert loader.step.epoch == 1
    loader.close()
