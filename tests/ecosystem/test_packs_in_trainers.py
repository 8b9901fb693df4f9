"""Mixtures in packs, divided by cost, in Lightning and accelerate: the weights are those of a plain loop, to rounding.

Two ranks train two epochs and save the framework's own checkpoint in the middle of the second; one process goes on
there. Both are compared with a loop over torch's loader in one process.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchdistinput as tdi
from tests.ecosystem import packs
from torchdistinput.plan.balancing import balanced_split
from torchdistinput.testing import run_ranks

EPOCH, STEP = 1, 1  # of the checkpoint; an epoch has 4 steps
ACCUMULATED = 2


def with_lightning(world: int, folder: str, *, resume: bool) -> tuple[Tensor, list[float]]:
    """One rank: the weights, and the cost of its part of each step."""
    import lightning  # noqa: PLC0415 - seconds, and only here
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415 - as above

    warnings.simplefilter("ignore")
    strategy = tdi.Strategy(["cpu"])
    loader, costs = packs.balanced(), []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.reader = packs.Reader()

        def training_step(self, pack: Any, _: int) -> Tensor:
            costs.append(cost_of(pack))
            return packs.loss_of(self.reader, pack, loader.step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return packs.optimizer_of(self)

    done = EPOCH * len(loader) + STEP + 1
    saves = ModelCheckpoint(dirpath=folder, filename="saved", every_n_train_steps=done)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=packs.EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[saves],
    )
    module = Module()
    with strategy.scope():  # for the sum of the tokens over the ranks
        trainer.fit(module, loader, ckpt_path=f"{folder}/saved.ckpt" if resume else None)
    return packs.weights_of(module.reader), costs


def with_accelerate(world: int, folder: str, *, resume: bool) -> tuple[Tensor, list[float]]:
    """The same."""
    from accelerate import Accelerator  # noqa: PLC0415 - as above

    from torchdistinput.integrations.accelerate import prepare  # noqa: PLC0415 - as above

    accelerator = Accelerator(cpu=True)
    if world > 1:
        packed = packs.packs()
        by_cost = tdi.DataLoader(packed, 4, drop_last=True, balance=packs.work_of(packed))
        with pytest.raises(tdi.InputError, match="of unequal size"):  # though the number of ranks divides 4
            iter(by_cost)
    accelerator.gradient_accumulation_steps = ACCUMULATED
    reader = packs.Reader()
    model, optimizer = accelerator.prepare(reader, packs.optimizer_of(reader))
    loader, costs = prepare(accelerator, packs.balanced()), []
    if resume:
        accelerator.load_state(folder)
    with tdi.Strategy(["cpu"]).scope():
        while loader.state_dict()["epoch"] < packs.EPOCHS:
            for pack in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(packs.loss_of(model, pack, loader.step))
                    optimizer.step()
                    optimizer.zero_grad()
                costs.append(cost_of(pack))
                if (loader.step.epoch, loader.step.index) == (EPOCH, STEP) and not resume:
                    accelerator.save_state(folder)
    found = packs.weights_of(reader)
    accelerator.end_training()
    return found, costs


def cost_of(part: dict[str, Tensor]) -> float:
    """Of attention in a part: the square of the length of each text."""
    rows = part["segment_ids"]
    return float(sum(int((row == segment).sum()) ** 2 for row in rows for segment in row[row > 0].unique()))


def divided_by_law() -> list[list[float]]:
    """For each step the costs of the parts of two ranks."""
    loader, found = packs.torchs(), []
    for pack in itertools.chain.from_iterable(itertools.repeat(loader, packs.EPOCHS)):
        costs = np.array([cost_of({"segment_ids": row[None]}) for row in pack["segment_ids"]])
        order, sizes = balanced_split(costs, 2)
        found.append([float(costs[order[: sizes[0]]].sum()), float(costs[order[sizes[0] :]].sum())])
    return found


TRAINERS = {"lightning": (with_lightning, 1), "accelerate": (with_accelerate, ACCUMULATED)}


def train(trainer: str, world: int, folder: str, resume: bool) -> tuple[list[float], list[float]]:
    """One rank."""
    play, _ = TRAINERS[trainer]
    weights, costs = play(world, folder, resume=resume)
    if dist.is_initialized():
        dist.destroy_process_group()
    return weights.tolist(), costs


@pytest.mark.parametrize("trainer", TRAINERS)
def test_packs_divided_by_cost_train_the_weights_of_one_process_also_after_its_own_checkpoint(
    trainer: str, tmp_path: Path
) -> None:
    pytest.importorskip(trainer)
    _, accumulate = TRAINERS[trainer]
    expected = packs.trained_alone(accumulate)
    ranks = run_ranks(2, train, trainer, 2, str(tmp_path), False, init_group=False, timeout_seconds=120)
    (resumed,) = run_ranks(1, train, trainer, 1, str(tmp_path), True, init_group=False, timeout_seconds=120)
    for weights, _ in (*ranks, resumed):
        packs.check(torch.tensor(weights, dtype=torch.float64), expected)
    parts = divided_by_law()
    assert [list(costs) for costs in zip(*(costs for _, costs in ranks), strict=True)] == parts
    assert resumed[1] == [own + other for own, other in parts][-len(resumed[1]) :]
    assert len(resumed[1]) == len(packs.torchs()) - STEP - 1
