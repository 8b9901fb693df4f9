"""``partial_batch="pad"``: pieces of one size with a mask, and gradients that are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support import inputs
from tests.support.epochs import Raised, lists, pieces, raised
from tests.support.structures import EMPTIABLE, described
from torchdistinput.batches.padding import Pad
from torchdistinput.batches.pytree import batch_size, structure_of
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


def test_elements_have_one_size_a_mask_and_the_index_and_steps_count_samples_only() -> None:
    strategy = tdi.Strategy(devices=["cpu"] * 3)
    data: Any = DataLoader(range(7), batch_size=5)  # type: ignore[arg-type]
    dataset = strategy.distribute_dataset(data, tdi.InputOptions(partial_batch="pad", with_index=True))
    spec = [strategy.local_results(part)[0] for part in dataset.element_spec]
    assert [(each.shape, each.dtype) for each in spec] == [((2,), torch.int64), ((2,), torch.int64), ((2,), torch.bool)]
    found = [(pieces(strategy, element), dataset.step.local_sizes, dataset.step.global_size) for element in dataset]
    yes, no, half = [True, True], [False, False], [True, False]
    assert found == [
        ([([0, 1], [0, 1], yes), ([2, 3], [2, 3], yes), ([4, -1], [4, 0], half)], (2, 2, 1), 5),
        ([([5, -1], [5, 0], half), ([6, -1], [6, 0], half), ([-1, -1], [0, 0], no)], (1, 1, 0), 2),
    ]
    assert dataset.stats()["samples"] == 7


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


# Over real ranks


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    out = model(batch["x"] / 50)
    return nn.functional.cross_entropy(out, batch["y"] % 3, reduction="none")


def gradients_under_ddp() -> list[tuple[list[int], float, list[torch.Tensor]]]:
    """One rank: the shape of every step, the global loss, and the gradients."""
    strategy = tdi.Strategy(devices=["cpu"])
    model: nn.Module = net()
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    loader = DataLoader(inputs.Records(), batch_size=5, shuffle=True, generator=inputs.generator())
    dataset = strategy.distribute_dataset(loader, PAD)
    found = []
    with strategy.scope():
        for batch, mask in dataset:
            model.zero_grad()
            loss = tdi.average_loss(loss_of(model, batch), dataset.step, mask)
            torch.autograd.backward(loss)
            total = strategy.reduce("SUM", loss.detach()).item() / strategy.num_input_pipelines
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append((list(batch["x"].shape), total, grads))
    return found


def test_padded_gradients_are_those_of_one_process(all_cells: bool) -> None:
    for world in (1, 2, 3, 5) if all_cells else (1, 3):
        check_padded_gradients(world)


def check_padded_gradients(world: int) -> None:
    loader = DataLoader(inputs.Records(), batch_size=5, shuffle=True, generator=inputs.generator())
    reference = net()
    steps = [(loss_of(reference, batch).mean(), batch) for batch in loader]
    for rank in run_ranks(world, gradients_under_ddp):
        assert len(rank) == len(steps)
        for (shape, total, found), (mean, _) in zip(rank, steps, strict=True):
            assert shape == [-(-5 // world), 2]
            assert abs(total - mean.item()) < 1e-12
            want = torch.autograd.grad(mean, list(reference.parameters()), retain_graph=True)
            assert len(found) == len(want)
            assert max((one - other).abs().max().item() for one, other in zip(found, want, strict=True)) < 1e-12


def padded_files(folder: str, policy: str) -> list[Any]:
    """One rank: all row counts of the pieces, whether step sizes fit the masks, and the numbers that were samples."""
    strategy = tdi.Strategy(devices=["cpu"] * 2)
    options = tdi.InputOptions(partial_batch="pad", auto_shard_policy=tdi.AutoShardPolicy[policy])
    loader = DataLoader(inputs.numbers_of(Path(folder)), batch_size=7, num_workers=2 if policy == "FILE" else 0)
    dataset = strategy.distribute_dataset(loader, options)
    rows, fits, numbers = set(), True, []
    for element in dataset:
        parts = strategy.local_results(element)
        fits &= dataset.step.local_sizes == tuple(int(mask.sum()) for _, mask in parts)
        for part, mask in parts:
            rows.add((len(part), len(mask)))
            numbers += part[mask].tolist()
    return [rows, fits, numbers]


@pytest.mark.parametrize("policy", ["FILE", "DATA", "OFF"])
def test_pieces_have_one_size_under_every_policy(policy: str, tmp_path: Path) -> None:
    """Also of a rank that has come to its end, under FILE: 8 numbers and 4."""
    inputs.write_numbers(tmp_path)
    ranks = run_ranks(2, padded_files, str(tmp_path), policy)
    assert [(rank[0], rank[1]) for rank in ranks] == [({(2, 2)}, True)] * 2
    delivered = sorted(number for rank in ranks for number in rank[2])
    assert delivered == sorted([*range(12)] * (2 if policy == "OFF" else 1))


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
