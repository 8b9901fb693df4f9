"""The laws of the statistics: the exact values, and the same bits for any cut and any order of the data."""

from __future__ import annotations

import random
import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from torchdistinput.statistics import Counts, Moments, Quantiles, Statistic
from torchdistinput.statistics.encoding import decoded, encoded
from torchdistinput.statistics.exact_sums import Limbs, add, merged, rounded, total


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
