"""Random states: lent to user code, and as short texts."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import torchdistinput as tdi
from torchdistinput.sources.rng import SharedRng, generators_of, packed, unpacked


def used(seed: int, numbers: int, *, normal: bool = False) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    (torch.randn if normal else torch.rand)(numbers, generator=generator)
    return generator


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("numbers", [0, 1, 623, 624, 625, 10_000])
def test_a_state_comes_back_from_its_text_exactly_and_draws_the_same(seed: int, numbers: int) -> None:
    for normal in (False, True):
        generator = used(seed, numbers, normal=normal)
        text = json.loads(json.dumps(packed(generator.get_state())))
        assert len(text) <= 3500
        assert torch.equal(unpacked(text), generator.get_state())
        other = torch.Generator()
        other.set_state(unpacked(text))
        assert torch.equal(torch.randn(99, generator=other), torch.randn(99, generator=generator))


def test_a_damaged_text_is_refused_wherever_the_damage_is() -> None:
    text = packed(used(1, 5).get_state())
    content = base64.b64decode(text)
    for place in [*range(40), 1000, len(content) - 1]:
        changed = bytearray(content)
        changed[place] ^= 4
        with pytest.raises(tdi.StateMismatch, match="saved random state cannot be read"):
            unpacked(base64.b64encode(changed).decode())
    for length in (0, 1, 4, 11, 12, 20, 100, len(content) - 4, len(content) - 1):
        with pytest.raises(tdi.StateMismatch, match="cannot be read"):
            unpacked(base64.b64encode(content[:length]).decode())


@pytest.mark.parametrize("text", ["", "abc", "no base64 at all", "é" * 16, "A" * 16, None, 5, ["AAAA"]])
def test_what_is_no_text_of_a_state_is_refused(text: Any) -> None:
    with pytest.raises(tdi.StateMismatch, match="cannot be read"):
        unpacked(text)


def test_generators_are_found_once_each_in_order() -> None:
    first, second = torch.Generator(), torch.Generator()
    sampler = RandomSampler(range(9), generator=first)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(9)), sampler=sampler, generator=second)
    found = generators_of(loader, sampler, loader, loader.batch_sampler, SequentialSampler(range(9)), None, [first])
    assert [id(generator) for generator in found] == [id(second), id(first)]
    equal = generators_of(RandomSampler(range(9), generator=first), RandomSampler(range(9), generator=first))
    assert [id(generator) for generator in equal] == [id(first)]


def test_generators_of_samplers_within_are_found_at_any_depth() -> None:
    generator, outer = torch.Generator(), torch.Generator()
    inner: Any = BatchSampler(RandomSampler(range(9), generator=generator), 2, drop_last=False)
    batches = BatchSampler(inner, 2, drop_last=False)
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(9)), batch_sampler=batches, generator=outer)
    for holders in ((batches,), (loader.sampler, loader.batch_sampler)):
        assert [id(each) for each in generators_of(*holders)] == [id(generator)]
    assert [id(each) for each in generators_of(loader, batches)] == [id(outer), id(generator)]
    circle = SimpleNamespace(generator=outer)
    circle.sampler = circle
    assert [id(each) for each in generators_of(circle)] == [id(outer)]


def test_the_lent_state_is_told_as_the_calls_left_it() -> None:
    torch.manual_seed(1)
    lent = used(2, 0)
    borrowed = SharedRng(lent.get_state())
    assert torch.equal(borrowed.state, lent.get_state())
    borrowed.state.zero_()
    inside = borrowed(lambda: (torch.rand(3), borrowed.state))
    assert torch.equal(inside[0], torch.rand(3, generator=lent))
    assert torch.equal(inside[1], lent.get_state())
    assert torch.equal(borrowed.state, lent.get_state())
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(1).get_state())
