"""Keras 3 on torch: ``fit`` takes a loader of this library as a generator, and trains as with torch's loader.

On several ranks a model of Keras is trained by a plain loop: a row of ``test_trainers``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi

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


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")


@pytest.mark.filterwarnings("ignore")  # Keras's own
def test_a_generator_over_the_loader_trains_as_torchs_loader() -> None:
    loader = loader_of(tdi.DataLoader)
    with pytest.raises(ValueError, match="Unrecognized data type"):
        losses(loader)

    def steps() -> Any:
        while True:
            yield from map(tuple, loader)

    assert losses(steps(), steps_per_epoch=len(loader)) == losses(loader_of(DataLoader))
