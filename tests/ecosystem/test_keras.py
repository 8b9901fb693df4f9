"""Keras 3 on torch: ``fit`` takes a loader of this library as a generator, and trains as with torch's loader.

On several ranks a model of Keras is trained by a plain loop, as other modules of torch are.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

SAMPLES, BATCH, EPOCHS = 11, 4, 2


def losses(data: Any, **more: Any) -> list[float]:
    import keras  # noqa: PLC0415 - seconds, and only here

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found: list[float] = model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0, **more).history["loss"]
    return found


def loader_of(cls: Any) -> Any:
    features = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES
    data = TensorDataset(features, features.sum(dim=1, keepdim=True))
    return cls(data, BATCH)  # in order: of a torch loader Keras begins one epoch more


def trained(cls: Any) -> list[Any]:
    """One rank, or one process: the parameters after a plain loop, in which DDP takes the model of several ranks."""
    warnings.simplefilter("ignore")  # Keras's own
    import keras  # noqa: PLC0415 - as above

    keras.utils.set_random_seed(0)
    net: Any = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model = DistributedDataParallel(net) if cls is tdi.DataLoader else net
    optimizer, loader = torch.optim.SGD(net.parameters(), lr=0.1), loader_of(cls)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            of_samples = (model(x) - y).square()
            (tdi.average_loss(of_samples, loader.step) if cls is tdi.DataLoader else of_samples.mean()).backward()
            optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")


def test_a_plain_loop_with_ddp_over_several_ranks_is_the_training_of_one_process() -> None:
    (expected,) = run_ranks(1, trained, DataLoader, timeout_seconds=120)
    for found in run_ranks(3, trained, tdi.DataLoader, timeout_seconds=120):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # Keras's own
def test_a_generator_over_the_loader_trains_as_torchs_loader() -> None:
    loader = loader_of(tdi.DataLoader)
    with pytest.raises(ValueError, match="Unrecognized data type"):
        losses(loader)

    def steps() -> Any:
        while True:
            yield from map(tuple, loader)

    assert losses(steps(), steps_per_epoch=len(loader)) == losses(loader_of(DataLoader))
