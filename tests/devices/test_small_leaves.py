"""Small leaves travel together, and nobody can tell by looking at one: only the number of copies is smaller."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch

from torchdistinput.devices.copy_ahead import StreamCopier
from torchdistinput.devices.small_leaves import BUFFER_BYTES, SMALL_BYTES, Bundle, bundled
from torchdistinput.testing.streams import FakeDevice

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def random_bytes(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Any bit pattern, NaNs with a payload among them."""
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype)


LEAVES = {
    **{str(dtype): random_bytes(5, 3, dtype=dtype) for dtype in DTYPES},
    "a column": random_bytes(7, 5)[:, 1],
    "transposed": random_bytes(4, 6).t(),
    "channels last": random_bytes(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other row": random_bytes(8, 3)[::2],
    "permuted and cut": random_bytes(3, 4, 5).permute(2, 0, 1)[1:],
    "expanded": random_bytes(1, 3).expand(4, 3),
    "a dimension of 1 with a stride of its own": torch.rand(6).as_strided((1, 3), (77, 1)),
    "a scalar": torch.tensor(3.5),
    "of size 0": torch.zeros(0, 3),
    "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    "negated": torch.randn(4, dtype=torch.complex64).conj().imag,
    "with a gradient": torch.rand(3).requires_grad_() * 2,
    "large": random_bytes(SMALL_BYTES // 4, 3),
    "twice": (twice := random_bytes(2, 2)),
    "twice again": twice,
}


def delivered(batch: Any, small: int) -> tuple[FakeDevice, Any]:
    device = FakeDevice(random.Random(0))
    copier = StreamCopier(device, small)
    moved = copier.hand_over(copier.send(batch))
    device.finish()
    assert device.violations == []
    return device, moved


def in_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()


def test_together_a_leaf_arrives_as_it_does_alone() -> None:
    _, together = delivered(LEAVES, SMALL_BYTES)
    _, alone = delivered(LEAVES, 0)
    assert list(together) == list(alone) == list(LEAVES)
    for name, leaf in together.items():
        other = alone[name]
        assert (leaf.dtype, leaf.shape, leaf.stride()) == (other.dtype, other.shape, other.stride()), name
        assert leaf.stride() == torch.empty_like(LEAVES[name]).stride(), name
        assert in_bytes(leaf) == in_bytes(other) == in_bytes(LEAVES[name]), name
        assert type(leaf) is torch.Tensor
        assert (leaf.requires_grad, leaf.is_conj(), leaf.is_neg()) == (False, False, False), name


def test_leaves_that_travelled_together_share_nothing_that_shows() -> None:
    _, (x, y) = delivered([torch.ones(3), torch.ones(3)], SMALL_BYTES)
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert x._base is y._base is None
    loss = (y.requires_grad_() ** 2).sum()
    x.mul_(5)  # with a version counter in common, autograd would take y for changed
    loss.backward()
    assert y.grad is not None
    assert y.grad.tolist() == [2, 2, 2]
    assert y.tolist() == [1, 1, 1]


def test_each_leaf_of_a_buffer_begins_where_an_allocation_could() -> None:
    leaves = [random_bytes(size, dtype=dtype) for size in (1, 3, 40) for dtype in DTYPES]
    (bundle,) = bundled(leaves, SMALL_BYTES)
    assert [offset % 256 for offset in bundle.offsets] == [0] * len(leaves)
    ends = [offset + leaf.numel() * leaf.element_size() for offset, leaf in zip(bundle.offsets, leaves, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, bundle.offsets[1:], strict=False))
    assert bundle.num_bytes == ends[-1]


def test_many_small_leaves_are_one_copy() -> None:
    batch = [torch.full((2, 3), number) for number in range(300)]
    device, moved = delivered(batch, SMALL_BYTES)
    assert device.num_blocks("pinned") == 1
    assert device.num_blocks(device.current_stream().name) == 1
    assert [leaf.tolist() for leaf in moved] == [leaf.tolist() for leaf in batch]


@pytest.mark.parametrize("size", [SMALL_BYTES, SMALL_BYTES - 1])
def test_a_leaf_travels_alone_from_the_bound_on(size: int) -> None:
    leaves = [torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)]
    assert len(list(bundled(leaves, SMALL_BYTES))) == (2 if size == SMALL_BYTES else 1)


def test_the_only_small_leaf_of_a_batch_takes_no_buffer() -> None:
    large, little, none = torch.zeros(SMALL_BYTES), torch.zeros(3), torch.zeros(0)
    bundles = list(bundled([large, little, none], SMALL_BYTES))
    assert bundles == [Bundle((large,), (0,)), Bundle((none,), (2,)), Bundle((little,), (1,))]


def test_a_leaf_that_is_kept_keeps_no_more_than_a_bounded_buffer() -> None:
    leaves = [torch.zeros(SMALL_BYTES - 1, dtype=torch.uint8)] * 200
    bundles = list(bundled(leaves, SMALL_BYTES))
    assert [place for bundle in bundles for place in bundle.places] == list(range(200))
    assert len(bundles) == 4
    assert max(bundle.num_bytes for bundle in bundles) <= BUFFER_BYTES


def test_memory_does_not_grow_over_a_thousand_steps() -> None:
    rng = random.Random(1)
    device = FakeDevice(rng)
    copier = StreamCopier(device, small=100)
    sizes: list[list[tuple[int, ...]]] = [[(2, 3)] * 5 + [(40,)], [(4,)] * 9, [(64,), (3,)]]
    coming: deque[Any] = deque()
    kept: deque[Any] = deque(maxlen=2)
    blocks: list[tuple[int, int]] = []
    for step in range(1000):
        coming.append(copier.send([torch.full(size, step) for size in sizes[step % 3]]))
        if len(coming) > 2:
            batch = copier.hand_over(coming.popleft())
            for leaf in batch:
                device.read(leaf, torch.full_like(leaf, step - 2))
            kept.append(batch)
        if step % 20 == 19:
            device.finish()  # the host runs ahead of the device, but not for ever
        blocks.append((device.num_blocks("pinned"), device.num_blocks(device.current_stream().name)))
    assert device.violations == []
    assert blocks[-1] == blocks[99]
