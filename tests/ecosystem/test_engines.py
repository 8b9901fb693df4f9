"""The engines of ignite and DeepSpeed, which loop over the loader or scale gradients: the weights of one process.

Over three ranks a batch of four is cut into 2, 2 and 0 samples, so parts differ in size and some are empty.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

RANKS = 3
SAMPLES = 11
BATCH = 4
EPOCHS = 2

Epochs = list[list[list[int]]]
"""The samples of each step of each epoch."""
Weights = list[list[float]]


def data() -> TensorDataset:
    features = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES
    return TensorDataset(torch.arange(SAMPLES), features, features.sum(dim=1))


def loader_of(cls: Any) -> Any:
    return cls(data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))


def one_process() -> tuple[Epochs, Weights]:
    """The samples of each batch with torch's loader in one process, and the weights after training."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = loader_of(DataLoader)
    epochs: Epochs = []
    for _ in range(EPOCHS):
        epochs.append([])
        for number, x, y in loader:
            optimizer.zero_grad()
            (model(x).squeeze(1) - y).square().mean().backward()
            optimizer.step()
            epochs[-1].append(number.tolist())
    return epochs, model.weight.tolist()


def check(ranks: list[tuple[Epochs, Weights]], expected: tuple[Epochs, Weights]) -> None:
    """The ranks' samples put together are the batches of one process; the weights are its weights."""
    epochs, weight = expected
    assert [
        [[sample for part in parts for sample in part] for parts in zip(*steps, strict=True)]
        for steps in zip(*(seen for seen, _ in ranks), strict=True)
    ] == epochs
    for _, found in ranks:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(weight), rtol=0, atol=1e-6)


def with_ignite() -> tuple[Epochs, Weights]:
    """Taken up in the middle of the second epoch, from the states of engine and loader."""
    ignite: Any = import_module("ignite.engine")  # it is in an environment of its own

    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epochs: Epochs = [[] for _ in range(EPOCHS)]
    state: dict[str, Any] = {}
    for last in (4, 6):
        loader = loader_of(tdi.DataLoader)

        def step(engine: Any, batch: Any, loader: Any = loader) -> float:
            number, x, y = batch
            optimizer.zero_grad()
            loss = tdi.average_loss((model(x).squeeze(1) - y).square(), loader.step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            epochs[engine.state.epoch - 1].append(number.tolist())
            return loss.item()

        engine: Any = ignite.Engine(step)
        engine.add_event_handler(ignite.Events.ITERATION_COMPLETED(once=last), engine.terminate)
        held = {"engine": engine, "loader": loader}
        for name, part in state.items():
            held[name].load_state_dict(part)
        engine.run(loader, max_epochs=EPOCHS)
        state = {name: part.state_dict() for name, part in held.items()}
    return epochs, net.weight.tolist()


def test_an_engine_of_ignite_trains_as_one_process_also_after_a_resume() -> None:
    pytest.importorskip("ignite")
    check(run_ranks(RANKS, with_ignite, timeout_seconds=120), one_process())


def with_deepspeed(stage: int, accumulated: int) -> tuple[Epochs, Weights]:
    warnings.simplefilter("ignore")  # its own
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed: Any = import_module("deepspeed")

    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # of its own loader
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": 0.0,  # by default 1.0
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    loader = loader_of(tdi.DataLoader)
    epochs: Epochs = []
    for _ in range(EPOCHS):
        epochs.append([])
        for number, x, y in loader:
            losses = (engine(x).squeeze(1) - y).square()
            engine.backward(tdi.average_loss(losses, loader.step))
            engine.step()
            epochs[-1].append(number.tolist())
    return epochs, net.weight.tolist()


def accumulated_in_one_process(accumulated: int) -> tuple[Epochs, Weights]:
    """The mean of the steps' means; a group that an epoch ends in goes on in the next one."""
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = loader_of(DataLoader)
    epochs = [list(loader) for _ in range(EPOCHS)]
    for place, (_, x, y) in enumerate(batch for epoch in epochs for batch in epoch):
        ((net(x).squeeze(1) - y).square().mean() / accumulated).backward()
        if (place + 1) % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [[batch[0].tolist() for batch in epoch] for epoch in epochs], net.weight.tolist()


@pytest.mark.parametrize(("stage", "accumulated"), [(0, 1), (2, 1), (1, 2), (3, 2)])
def test_an_engine_of_deepspeed_trains_as_one_process(stage: int, accumulated: int) -> None:
    pytest.importorskip("deepspeed")
    ranks = run_ranks(RANKS, with_deepspeed, stage, accumulated, timeout_seconds=300)  # it compiles once
    check(ranks, accumulated_in_one_process(accumulated))
