"""Sums without a rounding error, which therefore do not depend on the order of their terms.

A sum is a set of *limbs*: for some exponents ``g`` an int64 array with one number for each feature. The value of the
sum is the sum of ``limb * 2**g``. Terms are float64 numbers. For each feature and exponent, the terms are cut at a grid
of ``2**g``. The upper parts are multiples of ``2**g``, small enough for their floating-point sum to be exact. The rests
are smaller, and are cut again. The result is rounded once, from the exact fraction.

References: the cut is the extraction of Rump, Ogita, Oishi, "Accurate floating-point summation part I", 2008; the
parts of a product are those of Veltkamp and Dekker, 1971; limbs by exponent are Kulisch's accumulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Limbs: TypeAlias = dict[int, npt.NDArray[np.int64]]
"""By exponent: one number for each feature."""

Parts: TypeAlias = list[tuple[npt.NDArray[np.float64], int]]
"""Arrays and exponents: the values are the sum of ``array * 2**exponent``. No number has more than 26 bits."""

_ALIGNED: Final = 16  # exponents of limbs are multiples of this number, so that a sum has few limbs
_LOWEST: Final = -1074  # the exponent of the smallest positive float64
_ROOM: Final = 2**62 - 2**53  # a limb stays below this number, so that one more addition fits int64
_CARRIED: Final = 32  # bits that stay in a limb when the rest is carried to a higher one
_HUGE, _TINY, _SCALE = 2.0**500, 2.0**-480, 600  # products of values in between neither overflow nor lose bits


def parts_of(values: npt.NDArray[Any]) -> Parts:
    """Finite numbers of any real type as a sum of float64 numbers. Mantissas are short: products of two are exact."""
    if values.dtype.kind in "biu":
        return list(_parts_of_ints(values))
    plain = values.astype(np.float64)
    if values.dtype.itemsize <= 4:
        return [(plain, 0)]
    size = np.abs(plain)
    if size.size == 0 or (size.max() < _HUGE and size.min() >= _TINY):
        return [(part, 0) for part in _halves(plain)]
    found: Parts = []
    for inside, exponent in ((size >= _HUGE, _SCALE), ((size < _HUGE) & (size >= _TINY), 0), (size < _TINY, -_SCALE)):
        if inside.any():
            scaled = np.ldexp(np.where(inside, plain, 0.0), -exponent)
            found += [(part, exponent) for part in _halves(scaled)]
    return found


def _halves(values: npt.NDArray[np.float64]) -> Iterator[npt.NDArray[np.float64]]:
    """The values rounded to 26 bits, and the rest, which has at most 26 bits too."""
    upper = ((values.view(np.int64) + (1 << 26)) & ~((1 << 27) - 1)).view(np.float64)
    yield upper
    rest = values - upper
    if rest.any():
        yield rest


def _parts_of_ints(values: npt.NDArray[Any]) -> Iterator[tuple[npt.NDArray[np.float64], int]]:
    if values.dtype.itemsize <= 2 or values.size == 0 or (values.max() < 2**26 and values.min() > -(2**26)):
        yield values.astype(np.float64), 0
        return
    wide = values if values.dtype == np.uint64 else values.astype(np.int64)
    bits = wide.dtype.type(22)
    low = wide.dtype.type(2**22 - 1)
    yield (wide & low).astype(np.float64), 0
    yield ((wide >> bits) & low).astype(np.float64), 22
    yield (wide >> bits >> bits).astype(np.float64), 44


def add(limbs: Limbs, values: npt.NDArray[np.float64], exponent: int = 0) -> None:
    """Adds ``values * 2**exponent``, of shape ``(features, m)``, to the limbs: over ``m``, for each feature."""
    while values.size:
        largest = max(float(values.max()), -float(values.min()))
        if largest == 0.0:
            return
        top = math.frexp(largest)[1] + values.shape[1].bit_length()  # no partial sum reaches 2**top
        grid = max(-(-(top - 52) // _ALIGNED) * _ALIGNED, _LOWEST)
        if grid == _LOWEST:
            upper, rest = values, values[:, :0]
        else:
            shift = 1.5 * 2.0 ** (grid + 52)
            upper = (values + shift) - shift
            rest = values - upper
        sums = np.ldexp(upper.sum(axis=1), -grid if grid > -1000 else 1000)
        if grid <= -1000:
            sums = np.ldexp(sums, -grid - 1000)  # 2**-grid itself is beyond float64
        _put(limbs, grid + exponent, sums.astype(np.int64))
        values = rest


def add_products(limbs: Limbs, left: Parts, right: Parts) -> None:
    """Adds the products of two arrays, element by element, of shape ``(features, m)`` together."""
    for first, power in left:
        for second, other in right:
            add(limbs, first * second, power + other)


def _put(limbs: Limbs, grid: int, numbers: npt.NDArray[np.int64]) -> None:
    while True:
        there = limbs.get(grid)
        if there is None:
            limbs[grid] = numbers.copy()
            return
        if max(int(there.max()), -int(there.min())) + max(int(numbers.max()), -int(numbers.min())) < _ROOM:
            there += numbers
            return
        carried = there >> _CARRIED
        there -= carried << _CARRIED
        there += numbers
        grid, numbers = grid + _CARRIED, carried


def merged(limbs: Limbs, other: Limbs) -> Limbs:
    """The sum of two sums, as new limbs."""
    found = {grid: numbers.copy() for grid, numbers in limbs.items()}
    for grid, numbers in other.items():
        _put(found, grid, numbers)
    return found


def total(limbs: Limbs, feature: int) -> tuple[int, int]:
    """The sum of a feature as ``(number, power)``: it is ``number * 2**-power``, with ``power`` at least 0."""
    power = max(0, -min(limbs, default=0))
    return sum(int(numbers[feature]) << (grid + power) for grid, numbers in limbs.items()), power


def rounded(numerator: int, denominator: int, dtype: npt.DTypeLike = np.float64) -> float:
    """The float64 or float32 number nearest to a fraction with a positive denominator; ties to even."""
    try:
        nearest = numerator / denominator  # Python rounds the quotient of ints correctly
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf
    if np.dtype(dtype) == np.float64:
        return nearest
    # First round to the float64 number with an odd last bit, if need be: the second rounding is then right too.
    number, power = nearest.as_integer_ratio()
    error = numerator * power - number * denominator
    if error and not np.float64(nearest).view(np.int64) & 1:
        nearest = math.nextafter(nearest, math.inf if error > 0 else -math.inf)
    with np.errstate(over="ignore"):
        return float(np.float32(nearest))
