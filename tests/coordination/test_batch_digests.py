"""Digests of batches: equal for equal ones, of a few bytes, and whatever a batch holds."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from datetime import date
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from torchdistinput.coordination.batch_digests import (
    BatchDigests,
    _tell_unchecked,
    digest_of_batch,
    digest_of_draw,
    digest_of_element,
    digest_of_read,
    digest_of_samples,
    is_digest_of,
    number_of_size,
    words_of,
)
from torchdistinput.step_types import LocalStep

ROWS: dict[str, tuple[Any, Any]] = {
    "values": (torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 9])),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtype": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)),
    "bfloat16": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "bool": (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)),
    "conjugate": (torch.ones(3, dtype=torch.complex64) * 1j, (torch.ones(3, dtype=torch.complex64) * 1j).conj()),
    "columns": (torch.arange(40).reshape(4, 10).T, torch.arange(40, 80).reshape(4, 10).T),
    "size": (torch.zeros(0, 2), torch.zeros(0, 3)),
    "texts": (["a", "b"], ["a", "c"]),
    "odd texts": (["\udc80"], ["\udc81"]),
    "nested": ({"x": torch.zeros(2), "y": ["a", "b"]}, {"x": torch.ones(2), "y": ["a", "b"]}),
    "empty": (None, torch.zeros(1)),
    "a start of many": (torch.arange(100_000), torch.arange(1, 100_001)),
    "required gradient": (torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)),
}


@pytest.mark.parametrize(("one", "other"), ROWS.values(), ids=ROWS)
def test_equal_batches_have_equal_digests_and_others_have_others(one: Any, other: Any) -> None:
    copied = one.detach().clone() if isinstance(one, torch.Tensor) else one
    assert digest_of_batch([one]) == digest_of_batch([copied])
    assert digest_of_batch([one]) != digest_of_batch([other])
    assert digest_of_batch([one, other]) != digest_of_batch([other, one])
    assert 0 < digest_of_batch([one]) <= 2**63


def test_what_cannot_be_compared_counts_by_its_class_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    _tell_unchecked.cache_clear()
    assert digest_of_batch([torch.zeros(3, device="meta")]) == digest_of_batch([torch.zeros(2, device="meta")])
    assert digest_of_read([Lock(), 1]) == digest_of_read([Lock(), 1]) != digest_of_read([object(), 1])
    assert digest_of_draw([Lock()]) == digest_of_draw([Lock()])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "tensors on meta" in told[0]
    assert "objects of the class lock" in told[1]


def test_the_first_rows_have_digests_ever_more_rarely_and_then_each_64th() -> None:
    digests = BatchDigests()
    steps = [LocalStep([], ()) for _ in range(200)]
    for step in steps:
        digests(step, [torch.zeros(1)])
    found = [step.read for step in steps]
    assert [place for place, digest in enumerate(found) if digest > 1] == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    assert 0 not in found  # which stands for a rank that has ended


@dataclasses.dataclass
class Record:
    """A sample of a class of its own."""

    name: str
    values: Any


class Key:
    """An object whose ``repr`` is an address, or one text for all."""

    def __init__(self, *content: Any) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return Key, self.content


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def jagged(value: float) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((2,), value)], layout=torch.jagged)


OBJECTS: dict[str, tuple[Any, Any]] = {
    "objects": (Key("a", [1]), Key("a", [2])),
    "objects with slots": (Slots("a"), Slots("b")),
    "objects in objects": (Key([Slots(1)]), Key([Slots(2)])),
    "sets": ({"a", "b"}, {"a", "c"}),
    "dates": (date(2020, 1, 1), date(2020, 1, 2)),
    "paths": (Path("part-0/0001.jpg"), Path("part-1/0001.jpg")),
    "queues": (deque([1]), deque([2])),
    "texts of objects in arrays": (np.array(["a", None]), np.array(["b", None])),
    "sparse tensors": (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()),
    "jagged tensors": (jagged(1.0), jagged(2.0)),
    "keys that are objects": ({Slots: 1, (1, "a"): 2}, {Slots: 1, (1, "b"): 2}),
}
READ: dict[str, tuple[Any, Any]] = {
    **OBJECTS,
    "folders": ("part-0/0001.jpg", "part-1/0001.jpg"),
    "a field of many": ({f"{n}": n for n in range(20)}, {**{f"{n}": n for n in range(20)}, "7": 0}),
    "numbers": (7, 8),
    "texts": ("a" * 3000, "a" * 2000 + "b" + "a" * 999),
    "bytes that begin alike": (bytes(3000), bytes(2999) + b"x"),
    "samples": ([(torch.zeros(3), n) for n in range(9)], [(torch.zeros(3), n) for n in range(1, 10)]),
    "tensors": ({"x": torch.zeros(2)}, {"x": torch.ones(2)}),
    "arrays": ([np.zeros((2, 3), np.uint8)], [np.ones((2, 3), np.uint8)]),
    "texts in arrays": (np.array(["a", "b"]), np.array(["a", "c"])),
    "NumPy's numbers": (np.float32(1.5), np.float32(2.5)),
    "keys": ({"a": 1}, {"b": 1}),
    "dataclasses": (Record("a", np.zeros(2)), Record("a", np.ones(2))),
    "lengths": ([1, 2], [1, 2, 3]),
    "odd texts": ("\udc80", "\udc81"),
}


@pytest.mark.parametrize(("one", "other"), READ.values(), ids=READ)
def test_what_was_read_has_equal_digests_where_it_is_equal_and_others_elsewhere(one: Any, other: Any) -> None:
    assert digest_of_read(one) == digest_of_read(copy.deepcopy(one))
    assert digest_of_read(one) != digest_of_read(other)
    assert 0 < digest_of_read(one) < 2**64


@pytest.mark.parametrize(("one", "other"), OBJECTS.values(), ids=OBJECTS)
def test_items_of_a_sampler_are_compared_by_their_content(one: Any, other: Any) -> None:
    batch = [Key(number, one) for number in range(100)]
    assert digest_of_draw(batch) == digest_of_draw(copy.deepcopy(batch))
    assert digest_of_draw(batch) != digest_of_draw(batch[:-1])
    assert digest_of_draw(batch) != digest_of_draw([Key(number, other) for number in range(100)])
    assert 0 < digest_of_draw(batch) <= 2**63


def test_an_object_that_holds_itself_has_a_digest() -> None:
    one, other = Slots(None), Slots(None)
    one.value, other.value = [one], [other]
    assert digest_of_read(one) == digest_of_read(other)


def test_the_digest_of_an_element_of_version_0_2_is_not_compared() -> None:
    assert is_digest_of(digest_of_element("a/b"), "a/b")
    assert not is_digest_of(digest_of_element("a/b"), "c/b")
    assert is_digest_of(12345, "c/b")


def test_of_what_was_read_no_number_of_a_size_is_a_digest() -> None:
    assert number_of_size(0) != 0
    assert words_of(number_of_size(10)) == "10 sample(s)"
    assert words_of(digest_of_read(10)) == f"{digest_of_read(10):x}"


def test_a_digest_looks_at_a_bounded_part_of_what_was_read() -> None:
    found: list[int] = []

    class Row(tuple[int, ...]):
        """Notes that it was looked at."""

        def __iter__(self) -> Any:
            found.append(1)
            return super().__iter__()

    digest_of_read([[Row([1] * 50) for _ in range(1000)] for _ in range(50)])
    assert len(found) <= 24
    found.clear()
    samples = [Row([number]) for number in range(50)]
    assert digest_of_samples(samples) != digest_of_samples(samples[:-1])
    assert len(found) <= 12


def test_an_element_is_told_from_one_that_differs_in_one_of_many_values_but_not_in_the_order_of_its_keys() -> None:
    element = {str(place): place for place in range(40)}
    assert digest_of_element(element) == digest_of_element(dict(reversed(element.items())))
    for place in range(40):
        assert digest_of_element(element) != digest_of_element({**element, str(place): -1}), place
    assert 2**63 <= digest_of_element(element) < 2**64


def others() -> list[Any]:
    return [
        torch.zeros(0, 3),
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, 2).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(3, 4).t(),
        np.zeros((0, 3)),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["a", None], dtype=object),
        np.ma.array([1, 2], mask=[True, False]),
        np.float64("nan"),
        {1, 2},
        Slots(None),
        {"a": [Slots(None), {"b": None}], 3: ("x", b"y")},
        float("nan"),
        range(3),
        "\udcff",
    ]


@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
def test_any_element_has_a_digest() -> None:
    for one, other in zip(others(), others(), strict=True):
        assert digest_of_read((1, one)) == digest_of_read((1, other))
