"""``partial_batch="pad"``: pieces of one size with a mask, and gradients that are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import Raised, lists, raised
from tests.support.structures import EMPTIABLE, described
from torchdistinput.batches.padding import Pad
from torchdistinput.batches.pytree import batch_size
from torchdistinput.batches.schema import structure_of
from torchdistinput.step_types import LocalStep
from torchdistinput.testing import run_ranks

PAD = tdi.InputOptions(partial_batch="pad")


def padded(batch: Any, size: int, rows: int) -> Any:
    share = LocalStep([batch], (size,))
    Pad(rows, with_index=False)(share, structure_of(batch))
    assert share.sizes == (size,)
    return share.pieces[0]


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize("name", EMPTIABLE)
def test_every_leaf_gets_the_rows_and_keeps_its_class_and_samples(name: str, size: int) -> None:
    batch = EMPTIABLE[name](size)
    element, mask = padded(batch, size, 3)
    assert described(element) == described(EMPTIABLE[name](3)) or "text" in name or size < 3
    assert batch_size(element) == 3
    assert mask.tolist() == [True] * size + [False] * (3 - size)
    assert structure_of(element).signature() == structure_of(batch).signature()


def test_padded_rows_are_zeros_empty_strings_and_none() -> None:
    batch = {"x": torch.ones(1, 2), "flag": torch.tensor([True]), "name": ["a"], "id": [7], "scale": 0.5}
    element, mask = padded(batch, 1, 3)
    assert lists(element) == {
        "x": [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
        "flag": [True, False, False],
        "name": ["a", "", ""],
        "id": [7, None, None],
        "scale": 0.5,
    }
    assert mask.dtype == torch.bool


def test_a_full_piece_is_not_copied() -> None:
    batch = torch.ones(3)
    assert padded(batch, 3, 3)[0] is batch


def test_a_piece_that_is_too_large_is_refused() -> None:
    with pytest.raises(tdi.BatchingError, match="a piece has 4 samples, and partial_batch='pad' makes pieces of 3"):
        padded(torch.ones(4), 4, 3)


def test_without_a_mask_the_loss_of_padded_rows_is_refused_and_with_it_may_be_nan() -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    dataset = strategy.distribute_dataset(DataLoader(range(1, 4), batch_size=2), PAD)  # type: ignore[arg-type]
    losses = torch.zeros(0)
    for numbers, mask in dataset:
        losses = numbers.double().log()  # of a padded row: -inf
        loss = tdi.average_loss(losses, dataset.step, mask)
        assert loss == pytest.approx(losses[mask].mean().item())
    with pytest.raises(ValueError, match=r"2 losses .* padded rows out, give weights"):
        tdi.average_loss(losses, dataset.step)


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"] / 50), batch["y"] % 3, reduction="none")


@pytest.mark.parametrize("replicas", [1, 3, 5])
def test_padded_gradients_are_those_of_one_process(replicas: int) -> None:
    def loaded() -> Any:
        return DataLoader(inputs.Records(), batch_size=5, shuffle=True, generator=inputs.generator())

    def step(batch: dict[str, Any], mask: torch.Tensor) -> None:
        assert batch["x"].shape == (-(-5 // replicas), 2)
        torch.autograd.backward(tdi.average_loss(loss_of(model, batch), dataset.step, mask))

    strategy, model, reference = tdi.Strategy(devices=["cpu"] * replicas), net(), net()
    dataset = strategy.distribute_dataset(loaded(), PAD)
    with strategy.scope():
        for element, batch in zip(dataset, loaded(), strict=True):
            model.zero_grad()
            strategy.run(step, args=element)
            want = torch.autograd.grad(loss_of(reference, batch).mean(), list(reference.parameters()))
            for parameter, gradient in zip(model.parameters(), want, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)


def sources_without_a_size() -> list[Raised | None]:
    strategy = tdi.Strategy(devices=["cpu"])
    own: Any = DataLoader(range(11), batch_sampler=inputs.UnevenBatches())  # type: ignore[arg-type]
    whole = DataLoader(inputs.ReadyBatches(), batch_size=None)
    return [
        raised(lambda: strategy.distribute_dataset(own, PAD)),
        raised(lambda: strategy.distribute_dataset(whole, PAD)),
        raised(lambda: strategy.distribute_dataset(inputs.ready_batches, PAD)),
        raised(lambda: strategy.distribute_datasets_from_function(lambda _: [torch.ones(2)], PAD)),
    ]


def test_without_a_known_batch_size_every_rank_is_refused_when_the_dataset_is_distributed() -> None:
    for rank in run_ranks(2, sources_without_a_size):
        for refusal in rank:
            assert refusal is not None
            assert refusal.kind == "BatchingError"
            assert "needs a known global batch size" in refusal.message
