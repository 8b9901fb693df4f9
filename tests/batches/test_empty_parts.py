"""What users must mind with empty parts, and with parts of one row: each trap beside its way out.

The parts come from real splits of short batches. ``test_empty_parts_on_ranks.py`` has what only shows on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi


def parts_of(images: Tensor, replicas: int) -> tuple[Tensor, ...]:
    """What the replicas get of one global batch."""
    strategy = tdi.Strategy(devices=["cpu"] * replicas)
    loader = strategy.distribute_dataset(DataLoader(TensorDataset(images), batch_size=len(images)))
    ((element,),) = loader
    return tuple(piece for piece in strategy.local_results(element))


def images(rows: int) -> Tensor:
    return torch.randn(rows, 2, 4, 4, generator=torch.Generator().manual_seed(1))


def empty_part() -> Tensor:
    _, part = parts_of(images(1), 2)
    assert part.shape == (0, 2, 4, 4)
    return part


def one_row() -> Tensor:
    _, part = parts_of(images(3), 2)
    assert part.shape == (1, 2, 4, 4)
    return part


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda out: F.cross_entropy(out, torch.zeros(len(out), dtype=torch.int64)),
    "mse_loss": lambda out: F.mse_loss(out, torch.ones_like(out)),
    "mean": lambda out: out.mean(),
}


@pytest.mark.parametrize("loss", MEANS)
def test_a_mean_loss_of_an_empty_part_is_nan_but_its_gradients_are_zero(loss: str) -> None:
    model = nn.Linear(16, 3)
    value = MEANS[loss](model(empty_part()[:, 0].flatten(1)))
    torch.autograd.backward(value)
    assert math.isnan(value.item())
    assert [p.grad is not None and p.grad.eq(0).all().item() for p in model.parameters()] == [True, True]


def test_the_mean_of_the_parts_means_is_not_the_mean_but_average_loss_is() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    loader = strategy.distribute_dataset(
        DataLoader(TensorDataset(torch.tensor([1.0, 1.0, 4.0]).double()), batch_size=3)
    )
    ((losses,),) = loader
    parts = strategy.local_results(losses)
    assert [part.tolist() for part in parts] == [[1.0, 1.0], [4.0]]
    assert [part.mean().item() for part in parts] == [1.0, 4.0]
    assert sum(tdi.average_loss(part, loader.step).item() for part in parts) == pytest.approx(2.0)
    assert strategy.reduce("MEAN", losses, axis=0) == 2.0  # for logs and metrics


def test_the_sum_of_an_empty_part_is_zero_and_its_gradients_too() -> None:
    model = nn.Linear(16, 3)
    value = F.mse_loss(model(empty_part()[:, 0].flatten(1)), torch.zeros(0, 3), reduction="sum")
    torch.autograd.backward(value)
    assert value == 0
    assert [p.grad is not None and p.grad.eq(0).all().item() for p in model.parameters()] == [True, True]


def test_view_with_an_inferred_size_fails_on_an_empty_batch_but_flatten_works() -> None:
    part = empty_part()
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        part.view(len(part), -1)
    with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
        part.reshape(len(part), -1)
    assert part.flatten(1).shape == (0, 32)
    assert part.view(len(part), 32).shape == part.view(-1, 32).shape == (0, 32)


def test_reductions_without_a_neutral_element_fail_on_an_empty_batch() -> None:
    part = empty_part()
    for reduce in (torch.amax, torch.amin, torch.argmax):
        with pytest.raises((RuntimeError, IndexError)):
            reduce(part, dim=0)
    with pytest.raises(IndexError):
        part[0]
    assert part.sum(dim=0).eq(0).all()
    assert part.flatten(1).argmax(dim=1).shape == (0,)


def test_batch_norm_in_training_refuses_one_row_and_passes_an_empty_batch() -> None:
    norm = nn.BatchNorm1d(32)
    norm(images(3).flatten(1))
    before = norm.state_dict()["running_mean"].tolist()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        norm(one_row().flatten(1))
    assert norm(empty_part().flatten(1)).shape == (0, 32)
    assert norm.state_dict()["running_mean"].tolist() == before
    assert norm.eval()(one_row().flatten(1)).shape == (1, 32)


def test_group_norm_and_layer_norm_take_any_number_of_rows() -> None:
    for norm in (nn.GroupNorm(1, 2), nn.LayerNorm([2, 4, 4])):
        for part in (empty_part(), one_row()):
            assert norm(part).shape == part.shape


def test_batch_norm_knows_only_its_part() -> None:
    """With statistics of the batch, the outputs depend on how it is cut: no loader can make them equal."""
    rows, norm = images(4).flatten(1), nn.BatchNorm1d(32)
    assert not torch.allclose(norm(rows)[:2], norm(rows[:2]), atol=0.1)


def test_drop_last_and_a_multiple_of_the_replicas_give_every_part_the_same_rows() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 3)
    loader = strategy.distribute_dataset(DataLoader(TensorDataset(images(20)), batch_size=6, drop_last=True))
    assert [loader.step.local_sizes for _ in loader] == [(2, 2, 2)] * 3


def test_affine_instance_norm_refuses_an_empty_batch() -> None:
    with pytest.raises(IndexError):
        nn.InstanceNorm2d(2, affine=True)(empty_part())
    assert nn.GroupNorm(2, 2)(empty_part()).shape == (0, 2, 4, 4)  # the same function, a group for each channel
    torch.testing.assert_close(nn.GroupNorm(2, 2)(images(3)), nn.InstanceNorm2d(2, affine=True)(images(3)))


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "Linear": (nn.Linear(4, 3), (2, 4)),
    "Conv2d": (nn.Conv2d(2, 3, 3), (2, 4, 4)),
    "MaxPool2d": (nn.MaxPool2d(2), (2, 4, 4)),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(1), (2, 4, 4)),
    "BatchNorm2d": (nn.BatchNorm2d(2), (2, 4, 4)),
    "LSTM": (nn.LSTM(4, 3, batch_first=True), (5, 4)),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (5, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_on_an_empty_batch_and_get_gradients_of_zero(name: str) -> None:
    layer, shape = LAYERS[name]
    out = layer(torch.zeros(0, *shape, requires_grad=True))
    out = out[0] if isinstance(out, tuple) else out
    assert len(out) == 0
    torch.autograd.backward(out.sum())
    assert all(p.grad is not None and p.grad.eq(0).all() for p in layer.parameters())
