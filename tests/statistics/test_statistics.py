"""The laws of the statistics: the exact values, and the same bits for any cut and any order of the data."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.data import Mapped
from tests.support.epochs import raised
from torchdistinput.statistics import Counts, Moments, Quantiles, State, Statistic
from torchdistinput.statistics.encoding import decoded, encoded
from torchdistinput.statistics.exact_sums import Limbs, add, merged, rounded, total
from torchdistinput.testing import run_ranks


def passes(statistic: Statistic, parts: list[list[Any]]) -> Any:
    """The result over parts, as ranks find it: each part updates a state; the states are merged in any order."""
    while True:
        states = []
        for batches in parts:
            state = statistic.start()
            for batch in batches:
                state = statistic.update(state, batch)
            states.append(decoded(encoded(state)))
        random.shuffle(states)
        merged = statistic.start()
        for state in states:
            merged = statistic.merge(merged, state)
        following = statistic.next_pass(merged)
        if following is None:
            return statistic.result(merged)
        statistic = following


def cuts(data: Any, rng: np.random.Generator) -> list[list[Any]]:
    """The samples in a random order, cut at random into parts of batches; some are empty."""
    order = rng.permutation(len(data))
    pieces: list[list[Any]] = [[] for _ in range(rng.integers(1, 5))]
    start = 0
    while start < len(data):
        size = int(rng.integers(0, len(data) // 3 + 2))
        chosen = order[start : start + size]
        batch = data[chosen] if isinstance(data, np.ndarray) else [data[each] for each in chosen]
        pieces[rng.integers(len(pieces))].append(batch)
        start += size
    return pieces


def bits(result: Any) -> Any:
    if isinstance(result, np.ndarray):
        return result.dtype.str, result.shape, result.tobytes()
    fields = getattr(result, "__dict__", None)
    return {name: bits(value) for name, value in fields.items()} if fields else result


def wild(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Numbers of all magnitudes that the dtype has, also subnormal ones, and zeros of both signs."""
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    mantissa = rng.standard_normal(shape)
    low, high = {2: (-24, 15), 4: (-149, 126), 8: (-1074, 1022)}[np.dtype(dtype).itemsize]
    exponent = rng.integers(low, high, shape)
    with np.errstate(all="ignore"):
        found = np.ldexp(mantissa, exponent).astype(dtype)
    found[~np.isfinite(found)] = 1
    found[rng.random(shape) < 0.05] = -0.0
    return found


DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "uint64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_are_exact_and_independent_of_the_cut(dtype: str) -> None:
    rng = np.random.default_rng(4)
    data = wild(rng, (90, 3), dtype)
    found = passes(Moments(), [[data]])
    for feature in range(3):
        column = [Fraction(each) for each in data[:, feature].tolist()]
        mean = sum(column, Fraction()) / len(column)
        variance = sum(((each - mean) ** 2 for each in column), Fraction()) / len(column)
        assert found.mean[feature] == rounded(mean.numerator, mean.denominator)
        assert found.variance[feature] == rounded(variance.numerator, variance.denominator)
        assert (found.minimum[feature], found.maximum[feature]) == (min(data[:, feature]), max(data[:, feature]))
    assert found.count.tolist() == [90] * 3
    for _ in range(5):
        assert bits(passes(Moments(), cuts(data, rng))) == bits(found)


def test_moments_keep_the_dims_of_axis() -> None:
    images = np.random.default_rng(6).integers(0, 256, (7, 3, 5, 4), np.uint8)
    channels = passes(Moments(axis=1), [[images[:3]], [images[3:]]])
    assert np.allclose(channels.mean, images.mean(axis=(0, 2, 3)), rtol=1e-15)
    pixels = passes(Moments(axis=(1, -1)), [[images]])
    assert pixels.mean.shape == (3, 4)
    assert np.allclose(pixels.variance, images.var(axis=(0, 2)))
    assert passes(Moments(axis=None), [[images]]).count == images.size
    wide = np.random.default_rng(7).standard_normal((9, 500)).astype(np.float32)
    assert np.allclose(passes(Moments(), [[wide]]).mean, wide.mean(axis=0, dtype=np.float64), rtol=1e-13)


@pytest.mark.parametrize("axis", [0, 2, (1, 1), -2])
def test_an_axis_that_is_no_dim_of_the_samples_is_refused(axis: Any) -> None:
    with pytest.raises(ValueError, match="dim 0 is that of the samples"):
        Moments(axis=axis).update(Moments().start(), np.zeros((4, 2)))


def test_nan_policies() -> None:
    data = np.array([[1.0, np.nan, np.inf], [3.0, 2.0, 5.0]], np.float32)
    spread = passes(Moments(), [[data[:1]], [data[1:]]])
    assert spread.mean.tolist()[0] == 2.0
    assert np.isnan([spread.mean[1], spread.variance[1], spread.minimum[1], spread.variance[2]]).all()
    assert (spread.mean[2], spread.maximum[2], spread.minimum[2]) == (np.inf, np.inf, 5.0)
    omitted = passes(Moments(nan_policy="omit"), [[data[:1]], [data[1:]]])
    assert omitted.count.tolist() == [2, 1, 2]
    assert (omitted.mean[1], omitted.variance[1], omitted.minimum[1]) == (2.0, 0.0, 2.0)
    with pytest.raises(ValueError, match="1 NaN and 1 infinite among 6 numbers"):
        Moments(nan_policy="raise").update(Moments().start(), data)
    both = passes(Moments(axis=None), [[np.array([np.inf, -np.inf])]])
    assert np.isnan(both.mean)
    assert np.isnan(passes(Quantiles(0.5), [[data]])[1])
    assert passes(Quantiles(0.5, nan_policy="omit"), [[data]])[1] == 2.0
    assert passes(Quantiles([0.0, 1.0]), [[data]])[:, 2].tolist() == [5.0, np.inf]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "int32", "int64"])
def test_quantiles_are_those_of_the_sorted_data(dtype: str) -> None:
    rng = np.random.default_rng(8)
    data = wild(rng, (61, 2), dtype)
    q: list[float | Fraction] = [0, 0.1, Fraction(1, 3), 0.5, 0.95, 1]
    for method in ("linear", "lower", "higher", "inverted_cdf", "interpolated_inverted_cdf"):
        statistic = Quantiles(q, method=method)
        found = passes(statistic, [[data]])
        for feature in range(2):
            ordered = sorted(Fraction(each) for each in data[:, feature].tolist())
            exact = [ordered[low] + (ordered[high] - ordered[low]) * share for low, high, share in statistic.places(61)]
            assert found[:, feature].tolist() == [rounded(each.numerator, each.denominator) for each in exact]
        assert bits(passes(statistic, cuts(data, rng))) == bits(found)


def test_places_of_quantiles_are_numpys() -> None:
    data = np.arange(10, 33) ** 2 * 1.0
    for method in ("linear", "lower", "higher", "inverted_cdf", "interpolated_inverted_cdf"):
        for q in (0, 0.03125, 0.25, 0.5, 0.625, 1):
            assert passes(Quantiles(q, method=method), [[data]]) == np.quantile(data, q, method=method)


def test_quantiles_notice_data_that_changes_between_passes() -> None:
    second = Quantiles(0.5).next_pass(Quantiles(0.5).update(Quantiles(0.5).start(), np.zeros(9, np.float32)))
    assert second is not None
    state = second.update(second.start(), np.zeros(8, np.float32))
    with pytest.raises(ValueError, match="the data changed between two passes"):
        second.result(state)


def test_quantiles_of_too_many_features_are_refused() -> None:
    with pytest.raises(ValueError, match="1,500 MiB in a pass; 1,024 MiB is the most"):
        Quantiles(0.5).update(Quantiles(0.5).start(), np.zeros((2, 3000), np.float32))


def test_counts_are_ordered_by_count_then_by_value() -> None:
    words = ["b", "a", "b", "c", "a", "d\0", "é", "é"]
    found = passes(Counts(), [[words[:3], []], [words[3:]], []])
    assert found.values == ["é", "b", "a", "d\0", "c"]
    assert (found.counts, found.total, found.distinct) == ([2, 2, 2, 1, 1], 8, 5)
    assert passes(Counts(top=2, min_count=2), [[words]]).values == ["é", "b"]
    assert passes(Counts(), [[np.array([[3, 1], [3, -7]])]]).values == [3, 1, -7]
    assert passes(Counts(), [[[["x", "y"], ["x"]]], [["x"]]]).values == ["x", "y"]
    assert passes(Counts(), []).values == []
    many = {"kind": "str", "counts": {"a": 2**40}, "total": 2**40}
    twice = Counts().merge(decoded(encoded(many)), decoded(encoded(many)))
    assert Counts().result(twice).counts == [2**41]


def test_a_batch_is_added_to_the_counts_without_a_copy_of_them() -> None:
    state = Counts().update(Counts().start(), np.arange(200_000))
    tracemalloc.start()
    try:
        state = Counts().update(state, np.arange(200_000, 200_010))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000  # a copy takes millions of bytes
    assert Counts().result(state).distinct == 200_010


@pytest.mark.parametrize("bad", [[1.5], [None], ["a", 1], np.array([0.5])])
def test_values_that_cannot_be_counted_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="strings, or ints and bools"):
        Counts().update(Counts().start(), bad)
    with pytest.raises(TypeError, match="one type is needed"):
        Counts().update(Counts().update(Counts().start(), ["a"]), [1])


@pytest.mark.parametrize("statistic", [Moments(), Quantiles(0.5)])
def test_other_dtypes_and_shapes_than_before_are_refused(statistic: Statistic) -> None:
    state = statistic.update(statistic.start(), np.ones((4, 2), np.float32))
    with pytest.raises(TypeError, match="float32 in some batches and float64 in others"):
        statistic.update(state, np.ones((4, 2)))
    other = statistic.update(statistic.start(), np.ones((4, 3), np.float32))
    with pytest.raises(ValueError, match="one shape is needed"):
        statistic.merge(state, other)
    with pytest.raises(TypeError, match="numbers are needed"):
        statistic.update(statistic.start(), ["a", "b"])
    with pytest.raises(ValueError, match="there is no data"):
        passes(statistic, [])


def test_a_fraction_is_rounded_once() -> None:
    rng = random.Random(1)
    for _ in range(300):
        exact = Fraction(rng.getrandbits(80) - 2**79, rng.getrandbits(rng.randint(1, 60)) + 1)
        assert rounded(exact.numerator, exact.denominator) == float(exact)
        near = rounded(exact.numerator, exact.denominator, np.float32)
        neighbours = [near, *(float(np.nextafter(np.float32(near), np.float32(end))) for end in (-np.inf, np.inf))]
        assert min(neighbours, key=lambda each: abs(Fraction(each) - exact)) == near
    # Just above the middle of two float32 numbers, by less than a float64 can tell.
    exact = Fraction(2**24 * 2**60 + 2**60 + 1, 2**84)
    assert rounded(exact.numerator, exact.denominator, np.float32) == float(np.nextafter(np.float32(1), np.float32(2)))
    assert rounded(10**400, 1) == np.inf


def test_a_state_of_another_kind_of_object_is_refused() -> None:
    with pytest.raises(TypeError, match="a state holds a complex"):
        encoded({"a": 1j})


def test_sums_that_are_merged_stay_exact_beyond_the_size_of_a_limb() -> None:
    limbs: Limbs = {}
    terms = [1.5, -0.25, 2.0**40, -3.0]
    add(limbs, np.array([terms, [-term for term in terms]]))
    for _ in range(80):
        limbs = merged(limbs, limbs)
    for feature, sign in enumerate((1, -1)):
        number, power = total(limbs, feature)
        assert Fraction(number, 2**power) == sign * sum(map(Fraction, terms)) * 2**80


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


def bits_in(result: Any) -> Any:
    """The result as plain values; arrays as their bytes."""
    match result:
        case dict():
            return {name: bits_in(value) for name, value in result.items()}
        case list() | tuple():
            return [bits_in(value) for value in result]
        case np.ndarray():
            return result.dtype.str, result.shape, result.tobytes()
        case str() | int() | float() | np.generic():
            return result
        case _:
            return bits_in(vars(result))


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


def broken(kind: str) -> Mapped:
    """Data of which one sample is odd."""

    def sample(index: int) -> torch.Tensor:
        if index == 13 and kind == "nan":
            return torch.tensor([float("nan")])
        if index == 13 and kind == "raises":
            raise ValueError("no sample 13")
        return torch.tensor([index], dtype=torch.float64 if kind == "dtype" and index > 9 else torch.float32)

    return Mapped(20, sample)


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
        assert tdi.analyze(broken("raises"), Moments(), options=skip, global_batch_size=4).count.tolist() == [19]
        found.append(raised(lambda: tdi.analyze(broken("nan"), Moments(nan_policy="raise"), global_batch_size=4)))
        found.append(raised(lambda: tdi.analyze(broken("dtype"), Moments(), global_batch_size=20)))
        found.append(raised(lambda: tdi.analyze(broken("raises"), Moments(), global_batch_size=4)))
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
    return bits_in([of_table, tdi.analyze(files(Path(folder)), FILE_SPEC, strategy=strategy)])


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
        results.append(list(bits_in(tdi.analyze(data, spec, strategy=strategy, **arguments)).values()))
    return results


def test_random_programs_have_the_same_bits_at_every_world_size(all_cells: bool) -> None:
    seeds = list(range(250 if all_cells else 12))
    alone = run_drawn(seeds)
    for world_size in (2, 3, 5, 7) if all_cells else (3,):
        for found in run_ranks(world_size, run_drawn, seeds, timeout_seconds=400.0):
            assert found == alone
