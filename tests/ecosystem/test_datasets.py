"""Hugging Face's streaming datasets: as fragments, each example once at any number of ranks; shuffled, and resumed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import lists
from tests.support.platforms import package
from torchdistinput.testing import check_source, run_ranks

datasets, pa, streams = package("datasets"), package("pyarrow"), package("torchdistinput.integrations.datasets")

SIZES = (83, 40, 100, 27)  # more than a batch of the adapter, and less
BATCH, BAD = 20, 50
FILE, DATA, HINT = tdi.AutoShardPolicy.FILE, tdi.AutoShardPolicy.DATA, tdi.AutoShardPolicy.HINT

pytestmark = pytest.mark.filterwarnings(  # of datasets, and of torch on a machine of few cores
    "ignore:To copy construct from a tensor:UserWarning", "ignore:This DataLoader will create:UserWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pq: Any = pytest.importorskip("pyarrow.parquet")
    made, first = tmp_path_factory.mktemp("streams"), 0
    for number, size in enumerate(SIZES):
        numbers = range(first, first + size)
        columns = {"n": [*numbers], "text": [f"t{each}" for each in numbers], "l": [[each] * 2 for each in numbers]}
        pq.write_table(pa.table(columns), made / f"{number}.parquet", row_group_size=16)
        (made / f"{number}.txt").write_text("".join(f"{each}\n" for each in numbers))
        (made / f"{number}.json").write_text("".join(json.dumps({"n": each}) + "\n" for each in numbers))
        first += size
    return str(made)


def stream(folder: str, kind: str = "parquet", most: int = len(SIZES)) -> Any:
    end = "txt" if kind == "text" else kind
    files = [f"{folder}/{number}.{end}" for number in range(most)]
    return datasets.load_dataset(kind, data_files=files, split="train", streaming=True)


def more(example: dict[str, Any]) -> dict[str, Any]:
    return {"n": example["n"] + 1000}


def more_of_batch(batch: dict[str, list[int]]) -> dict[str, Any]:
    return {"n": [number + 1000 for number in batch["n"]]}


def several(batch: dict[str, list[int]]) -> dict[str, Any]:
    """As many examples as the number mod 3 says."""
    return {"n": [number for number in batch["n"] for _ in range(number % 3)]}


def is_even(example: dict[str, Any]) -> bool:
    return bool(example["n"] % 2 == 0)


def are_no_threes(batch: dict[str, list[int]]) -> list[bool]:
    return [number % 3 != 0 for number in batch["n"]]


def same(table: Any) -> Any:
    return table


def keep_odd(table: Any) -> list[bool]:
    return [number % 2 == 1 for number in table["n"].to_pylist()]


STEPS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda data: data,
    "map": lambda data: data.map(more),
    "map in batches": lambda data: data.map(more_of_batch, batched=True, batch_size=7),
    "map to several": lambda data: data.select_columns(["n"]).map(several, batched=True, batch_size=7),
    "filter": lambda data: data.filter(is_even),
    "filter in batches": lambda data: data.filter(are_no_threes, batched=True, batch_size=7),
    "all of them": lambda data: (
        data.map(more)
        .filter(is_even)
        .map(more_of_batch, batched=True, batch_size=3)
        .filter(are_no_threes, batched=True)
    ),
    "torch": lambda data: data.with_format("torch"),
    "mapped in torch": lambda data: data.with_format("torch").map(more_of_batch, batched=True, batch_size=7),
    "arrow inside": lambda data: data.with_format("arrow").map(same, batched=True, batch_size=7).with_format("torch"),
    "row groups": lambda data: data.reshard(),
    "concatenated": lambda data: datasets.concatenate_datasets([data, data.map(more)]),
    "in tables": lambda data: data.with_format("arrow"),
    "cast": lambda data: data.cast_column("n", datasets.Value("float32")),
}


def plain(value: Any) -> Any:
    """The value, with the types of its tensors beside their numbers."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("steps", [steps for steps in STEPS if steps != "in tables"])
def test_the_examples_are_those_of_the_stream_and_each_position_can_be_entered(folder: str, steps: str) -> None:
    data = STEPS[steps](stream(folder))
    source = streams.fragments(data)
    assert len(source.fragments()) == data.num_shards
    assert [*map(plain, tdi.FragmentDataset(source))] == [*map(plain, data)]
    check_source(source)


def test_tables_of_arrow_become_columns(folder: str) -> None:
    source = streams.fragments(stream(folder).with_format("arrow").filter(keep_odd, batched=True, batch_size=7))
    check_source(source)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(source, global_batch_size=BATCH)
    odd = [*range(1, sum(SIZES), 2)]
    batches = [*loader]
    assert [number for batch in batches for number in batch["n"].tolist()] == odd
    assert [text for batch in batches for text in batch["text"]] == [f"t{number}" for number in odd]
    assert [each.tolist() for batch in batches for each in batch["l"]] == [[number] * 2 for number in odd]
    nulls = datasets.Dataset.from_dict({"n": [1, None]}).to_iterable_dataset().with_format("arrow")
    strategy = tdi.Strategy(["cpu"])
    with pytest.raises(tdi.SourceError, match=r"shard 0 of 1: column n: 1 of 2 values are missing .*fill_null="):
        [*strategy.distribute_dataset(streams.fragments(nulls), global_batch_size=2)]
    (filled,) = strategy.distribute_dataset(streams.fragments(nulls, fill_null=7), global_batch_size=2)
    assert filled["n"].tolist() == [1, 7]


@pytest.mark.parametrize("kind", ["text", "json"])
def test_files_of_text_and_json_are_fragments_too(folder: str, kind: str) -> None:
    data = stream(folder, kind)
    source = streams.fragments(data)
    assert [each.name for each in source.fragments()] == [f"shard {number} of 4" for number in range(4)]
    assert [*tdi.FragmentDataset(source)] == [*data]
    check_source(source)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(source, global_batch_size=BATCH)
    kinds = {type(value) for batch in loader for value in batch.values()}
    assert kinds == ({list} if kind == "text" else {torch.Tensor})


def numbers_of(examples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([int(example["n"]) for example in examples])


def read(loader: Any, most: int | None = None) -> list[list[int]]:
    with closing(iter(loader)) as iterator:
        return [(part["n"] if isinstance(part, dict) else part).tolist() for part in islice(iterator, most)]


def test_a_format_without_records_is_an_error_that_says_so(folder: str) -> None:
    loader = tdi.Strategy(["cpu"]).distribute_dataset(
        streams.fragments(stream(folder).with_format("pandas")), global_batch_size=BATCH
    )
    with pytest.raises(tdi.SourceError, match=r'shard 0 of 4: .*examples as a DataFrame.*with_format\("torch"\)'):
        next(iter(loader))


def test_a_failure_of_the_stream_names_the_shard_also_where_bad_records_are_skipped(folder: str) -> None:
    def broken(example: dict[str, Any]) -> dict[str, Any]:
        if example["n"] == BAD + SIZES[0]:
            raise ValueError("a bad example")
        return example

    options = tdi.InputOptions(on_error="skip")
    source = streams.fragments(stream(folder).map(broken))
    loader = tdi.Strategy(["cpu"]).distribute_dataset(source, options, global_batch_size=BATCH)
    seen: list[int] = []
    with pytest.raises(tdi.SourceError, match=r"shard 2 of 4: .*ValueError: a bad example"):
        seen.extend(number for batch in loader for number in batch["n"].tolist())
    assert seen == [*range(len(seen))]
    assert len(seen) >= SIZES[0]


def resumed(loader: Any, state: Any) -> Any:
    loader.load_state_dict(state)
    yield from loader


def test_a_state_of_other_steps_is_refused(folder: str) -> None:
    loader = tdi.Strategy(["cpu"]).distribute_dataset(streams.fragments(stream(folder)), global_batch_size=BATCH)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    changed = streams.fragments(stream(folder).map(more))
    other = tdi.Strategy(["cpu"]).distribute_dataset(changed, global_batch_size=BATCH)
    with pytest.raises(tdi.StateMismatch, match="shard 0 of 4: the fragment has changed"):
        [*resumed(other, state)]


def divide(folder: str) -> dict[str, Any]:
    """One shard, read under each policy; and three shards under HINT, with a resume."""

    def made(policy: tdi.AutoShardPolicy, shards: int) -> Any:
        data = stream(folder, most=shards)
        options = tdi.InputOptions(auto_shard_policy=policy)
        strategy = tdi.Strategy(["cpu"])
        if policy is FILE:
            return strategy.distribute_dataset(streams.fragments(data), options, global_batch_size=BATCH)
        return strategy.distribute_dataset(DataLoader(data, BATCH, collate_fn=numbers_of), options)

    found: dict[str, Any] = {}
    for policy in (FILE, HINT, DATA):
        try:
            found[policy.name] = read(made(policy, 1))
        except tdi.ShardingError as error:
            found[policy.name] = str(error)
    with made(HINT, 3) as loader:
        found["first"], state = read(loader, 3), loader.state_dict()
    with made(HINT, 3) as loader:
        loader.load_state_dict(state)
        found["rest"] = read(loader)
    return found


def numbers(ranks: list[Any], what: str) -> list[int]:
    return [number for step in zip(*(rank[what] for rank in ranks), strict=True) for part in step for number in part]


def test_fewer_shards_than_ranks_are_refused_with_the_way_out_and_are_no_trouble_under_data(folder: str) -> None:
    ranks = run_ranks(2, divide, folder)
    assert numbers(ranks, "DATA") == [*range(SIZES[0])]
    assert sorted(numbers(ranks, "first") + numbers(ranks, "rest")) == [*range(sum(SIZES[:3]))]
    for rank in ranks:
        assert "Set auto_shard_policy to AutoShardPolicy.DATA, or split the input into more files" in rank["FILE"]
        assert "rank 1: policy HINT: shard(num_shards=2, index=1) of the IterableDataset failed" in rank["HINT"]
        assert "divide it into more, or use AutoShardPolicy.DATA" in rank["HINT"]


def streaming(*, buffer: int | None) -> Any:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"a": list(range(60))}).to_iterable_dataset(num_shards=4)
    return data if buffer is None else data.shuffle(seed=3, buffer_size=buffer)


def distributed(buffer: int | None, workers: int, options: tdi.InputOptions | None = None) -> Any:
    loader = DataLoader(
        streaming(buffer=buffer), 4, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    return tdi.Strategy(["cpu"]).distribute_dataset(loader, options)


def flat(epoch: Any) -> list[int]:
    return [number for batch in epoch for number in lists(batch["a"])]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_another_order(workers: int) -> None:
    with distributed(20, workers) as loader:
        epochs = [flat(loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(60)]] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer", [None, 20])
def test_a_resume_is_exact(buffer: int | None, workers: int) -> None:
    with distributed(buffer, workers) as loader:
        flat(loader)
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        state = loader.state_dict()
        rest = [flat(iterator), flat(loader)]
    with distributed(buffer, workers) as resumed:
        resumed.load_state_dict(state)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert [flat(resumed), flat(resumed)] == rest
    again = [str(each.message) for each in told if "read again" in str(each.message)]
    assert len(again) == (buffer is not None)
    assert all("does not hold its shuffle buffer" in each for each in again)


def test_a_state_that_does_not_restore_exactly_is_a_mismatch() -> None:
    use = tdi.InputOptions(own_state="use")
    with distributed(20, 0, use) as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        state = loader.state_dict()
        rest = flat(iterator)
        iterator.close()
    found = []
    for own_state in ("use", "ignore"):
        with distributed(20, 0, tdi.InputOptions(own_state=own_state)) as resumed:
            resumed.load_state_dict(state)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(flat(resumed) == rest)
    assert found == [False, True]
