"""``analyze``: the same bits at every world size, under every policy; its errors; its state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchdistinput as tdi
from tests.support.epochs import raised
from torchdistinput.statistics import Counts, Moments, Quantiles, State, Statistic
from torchdistinput.testing import run_ranks

N = 211
LINES = ["the of and"] * 9
WORDS = ["the", "of", "and", "é", "x\0"]


def table() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(N, 3) * torch.tensor([1e-3, 1.0, 1e6])
    return {"x": x, "n": torch.randint(-(2**62), 2**62, (N,)), "label": torch.arange(N) % 7}


SPEC = {
    "x": [Moments(), Quantiles([0.1, 0.5])],
    "n": [Moments(), Quantiles(0.25, method="lower")],
    "label": Counts(),
    "ratio": (lambda batch: batch["x"][:, 0] / 3, Moments(dtype="float32")),
}


class Longest(Statistic):
    """A user's own statistic: the longest text."""

    def start(self) -> State:
        return ""

    def update(self, state: State, batch: Any) -> State:
        return self.merge(state, max(batch, key=lambda text: (len(text), text)))

    def merge(self, state: State, other: State) -> State:
        return max(state, other, key=lambda text: (len(text), text))

    def result(self, state: State) -> str:
        return str(state)


def bits(result: Any) -> Any:
    """The result as plain values; arrays as their bytes."""
    match result:
        case dict():
            return {name: bits(value) for name, value in result.items()}
        case list() | tuple():
            return [bits(value) for value in result]
        case np.ndarray():
            return result.dtype.str, result.shape, result.tobytes()
        case str() | int() | float() | np.generic():
            return result
        case _:
            return bits(vars(result))


def files(folder: Path) -> tdi.FileDataset:
    return tdi.FileDataset(str(folder / "*.txt"), tdi.readers.text_lines)


def write_files(folder: Path) -> None:
    for number in range(7):
        lines = [f"{WORDS[(number * each) % 5].strip(chr(0))} {each % 3}" for each in range(5 * number + 1)]
        (folder / f"{number}.txt").write_text("".join(f"{line}\n" for line in lines))


FILE_SPEC = {
    "words": (lambda lines: [line.split() for line in lines], Counts()),
    "lengths": (lambda lines: np.array([len(line) for line in lines]), Quantiles([0, 0.5, 1])),
    "longest": (lambda lines: lines, Longest()),
}


def test_bare_tensors_and_arrays() -> None:
    unsigned = np.array([0, 2**64 - 1], np.uint64)
    for data in (unsigned, unsigned.reshape(1, 2)):
        assert tdi.analyze(data, Counts()).values == [2**64 - 1, 0]
        assert tdi.analyze(data, Moments(axis=None)).maximum == 2**64 - 1
    x = table()["x"]
    assert tdi.analyze(x, Moments()).mean.tolist() == tdi.analyze(table(), {"x": Moments()})["x"].mean.tolist()
    assert tdi.analyze(x.numpy(), [Moments(axis=None), Quantiles(0.5)])[0].count == 3 * N
    assert tdi.analyze([torch.ones(2), torch.ones(3)], Moments()).count == 5
    assert tdi.analyze(x.bfloat16(), Moments()).maximum.dtype == np.float32


class Broken(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 13 and self.kind == "nan":
            return torch.tensor([float("nan")])
        if index == 13 and self.kind == "raises":
            raise ValueError("no sample 13")
        return torch.tensor([index], dtype=torch.float64 if self.kind == "dtype" and index > 9 else torch.float32)


class Unsendable(Longest):
    """A statistic whose state is an object, which cannot be sent to another rank."""

    def update(self, state: State, batch: Any) -> State:
        return object()


def errors_on_ranks() -> list[Any]:
    strategy = tdi.Strategy(["cpu"])
    rank = strategy.input_pipeline_id
    found = []
    with strategy.scope():
        skip = tdi.InputOptions(on_error="skip")
        assert tdi.analyze(Broken("raises"), Moments(), options=skip, global_batch_size=4).count.tolist() == [19]
        found.append(raised(lambda: tdi.analyze(Broken("nan"), Moments(nan_policy="raise"), global_batch_size=4)))
        found.append(raised(lambda: tdi.analyze(Broken("dtype"), Moments(), global_batch_size=20)))
        found.append(raised(lambda: tdi.analyze(Broken("raises"), Moments(), global_batch_size=4)))
        found.append(raised(lambda: tdi.analyze(LINES, Moments(), global_batch_size=4)))
        found.append(raised(lambda: tdi.analyze(table(), {"y": Moments()})))
        found.append(raised(lambda: tdi.analyze(table(), Moments())))
        found.append(raised(lambda: tdi.analyze({"x": torch.zeros(0, 3)}, {"x": Moments()})))
        found.append(raised(lambda: tdi.analyze(table(), {"x": Moments() if rank else Moments})))
        found.append(raised(lambda: tdi.analyze(table(), {"x": Moments() if rank else Quantiles(0.5)})))
        if strategy.num_input_pipelines > 1:
            found.append(raised(lambda: tdi.analyze(table(), {"x": Unsendable()})))
        # One sample: rank 1 has no data.
        assert tdi.analyze({"x": torch.ones(1, 2)}, {"x": Moments()})["x"].count.tolist() == [1, 1]
    return found


def test_errors_are_raised_on_all_ranks() -> None:
    on_ranks = run_ranks(2, errors_on_ranks)
    told, on_the_other = ([f"{each.kind}: {each.message.splitlines()[0]}" for each in found] for found in on_ranks)
    assert told == on_the_other
    expected = [
        ("ValueError", ": 1 NaN and 0 infinite among 10 numbers"),
        ("TypeError", "the leaf is float32 in some batches and float64 in others"),
        ("SourceError", "no sample 13"),
        ("TypeError", "the leaf holds str ('the of and'); numbers are needed"),
        ("InputError", "the spec names the leaf 'y'; the elements are of type dict, the leaves are 'x', 'n', 'label'"),
        ("InputError", "Name the leaf"),
        ("ValueError", "there is no data"),
        ("TypeError", "rank 0: the spec holds <class"),
        ("RankDisagreement", "the ranks differ in spec"),
        ("TypeError", "a state holds a object"),
    ]
    for text, (kind, part) in zip(told, expected, strict=True):
        assert text.startswith(kind), text
        assert part in text


def found_in(folder: str) -> Any:
    """The statistics of a table, and of the files in a folder, each rank of its own."""
    strategy = tdi.Strategy(["cpu"])
    of_table = tdi.analyze(table(), SPEC, global_batch_size=10, strategy=strategy)
    return bits([of_table, tdi.analyze(files(Path(folder)), FILE_SPEC, strategy=strategy)])


def test_the_bits_are_the_same_at_every_world_size(tmp_path: Path) -> None:
    write_files(tmp_path)
    alone = found_in(str(tmp_path))
    for world_size in (2, 3):
        assert run_ranks(world_size, found_in, str(tmp_path)) == [alone] * world_size


def test_options_that_change_the_samples_are_refused() -> None:
    with pytest.raises(tdi.InputError, match="leave them out"):
        tdi.analyze(table(), {"x": Moments()}, options=tdi.InputOptions(partial_batch="pad"))
    with pytest.raises(ValueError, match="the spec is empty"):
        tdi.analyze(table(), {})
    with pytest.raises(tdi.InputError, match="cannot start again"):
        tdi.analyze(iter([torch.ones(2)]), Quantiles(0.5))


class Rows:
    """A source of fragments: the rows of arrays, some for each fragment."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.columns = columns

    def fragments(self) -> Sequence[tdi.Fragment]:
        return [tdi.Fragment(str(number)) for number in range(8)]

    def read(self, fragment: tdi.Fragment, position: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
        rows = range(int(fragment.name), len(self.columns[0]), 8)
        for place in range(position or 0, len(rows), 3):
            yield place, [tuple(column[row] for column in self.columns) for row in rows[place : place + 3]]


def drawn(seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """A random program: data, spec and arguments; the same on every rank."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 90))
    dtype = rng.choice(["float32", "float64", "float16", "int64", "uint8"])
    x = (rng.standard_normal((count, 2)) * 10.0 ** rng.integers(-3, 4)).astype(dtype)
    if dtype in ("float32", "float64"):
        x[rng.random(x.shape) < 0.02] = np.nan
    spec = {
        "x": [
            *(Moments(ddof=1), Moments(nan_policy="omit", axis=None), Quantiles([0.2, 0.5], nan_policy="omit")),
            Quantiles(0.25, method="lower", nan_policy="omit"),
        ],
        "id": Counts(top=5),
    }
    data: Any = {"x": torch.from_numpy(x), "id": torch.from_numpy(rng.integers(0, 9, count))}
    how = int(rng.integers(5))
    size = int(rng.integers(1, 40))
    if how == 0:
        return data, spec, {"global_batch_size": size}
    pairs = TensorDataset(data["x"], data["id"])
    tuples = {0: spec["x"], 1: spec["id"]}
    if how == 1:
        return DataLoader(pairs, batch_size=size, shuffle=True), tuples, {}
    if how == 2:
        return (lambda: ((x, y) for x, y in DataLoader(pairs, batch_size=size))), tuples, {}
    if how == 3:
        return pairs, tuples, {"global_batch_size": size, "options": tdi.InputOptions(prefetch=size % 3)}
    policy = tdi.AutoShardPolicy.FILE if rng.random() < 0.5 else tdi.AutoShardPolicy.DATA
    options = tdi.InputOptions(auto_shard_policy=policy)
    return Rows([x, data["id"].numpy()]), tuples, {"global_batch_size": size, "options": options}


def run_drawn(seeds: list[int]) -> list[Any]:
    strategy = tdi.Strategy(["cpu"])
    results = []
    for seed in seeds:
        data, spec, arguments = drawn(seed)
        results.append(list(bits(tdi.analyze(data, spec, strategy=strategy, **arguments)).values()))
    return results


def test_random_programs_have_the_same_bits_at_every_world_size(all_cells: bool) -> None:
    seeds = list(range(250 if all_cells else 12))
    alone = run_drawn(seeds)
    for world_size in (2, 3, 5, 7) if all_cells else (3,):
        for found in run_ranks(world_size, run_drawn, seeds, timeout_seconds=400.0):
            assert found == alone
