"""What torch's conversion makes of a ready batch, made in less time."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_convert

from tests.support.structures import KINDS, Pair
from torchdistinput.sources.kernel.converting import fast_collate

TORCH: Callable[[Any], Any] = default_convert


class Rows(list[Any]):
    """A list of another class."""


class Marked(torch.Tensor):
    """A tensor of another class."""


def random_value(rng: random.Random, depth: int = 0) -> Any:
    leaves: list[Any] = [torch.zeros(2), torch.zeros(2), torch.nn.Parameter(torch.ones(1)), 3, 2.5, "text", b"x", None]
    leaves += [np.zeros(3), np.float32(1.5), np.array(["a"]), torch.zeros(1).as_subclass(Marked), range(3)]
    if depth > 2 or rng.random() < 0.4:
        return rng.choice(leaves)
    inner = [random_value(rng, depth + rng.choice([1, 3])) for _ in range(rng.randint(0, 3))]
    made: list[Any] = [tuple(inner), list(inner), dict(enumerate(inner)), Rows(inner), collections.deque(inner)]
    made += [[torch.zeros(1)] * 3, Pair(torch.zeros(1), torch.ones(1)), collections.OrderedDict(a=inner)]
    return rng.choice(made)


def same(found: Any, expected: Any, given: Any) -> None:
    """Equal in types and values; new where torch makes a new one, and the very leaves that torch hands on."""
    assert type(found) is type(expected)
    assert (found is given) == (expected is given)
    if isinstance(expected, torch.Tensor):
        assert found is expected or torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key], given[key])
    elif isinstance(expected, list | tuple | collections.deque):
        assert len(found) == len(expected)
        for pair in zip(found, expected, given, strict=True):
            same(*pair)
    else:
        assert np.array_equal(found, expected)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_batch_is_converted_as_torch_does_it() -> None:
    convert, torch_converted = fast_collate(TORCH), TORCH
    for seed in range(400):
        value = random_value(random.Random(seed))
        same(convert(value), torch_converted(value), value)
    for make in KINDS.values():
        assert type(convert(make(3))) is type(torch_converted(make(3)))
