"""Where people look at a training: one line each takes the numbers of a loader, or shows its progress."""

from __future__ import annotations

import io
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi

STEPS = 8


def loader() -> tdi.DistributedDataset:
    strategy = tdi.Strategy(devices=["cpu"])
    return strategy.distribute_dataset(DataLoader(TensorDataset(torch.arange(2 * STEPS)), batch_size=2))


def test_tqdm_has_the_right_total_also_after_a_resume() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    with loader() as whole:
        batches = iter(tqdm(whole, file=io.StringIO()))
        for _ in range(3):
            next(batches)
        state = whole.state_dict()
    with loader() as resumed:
        resumed.load_state_dict(state)
        bar = tqdm(resumed, initial=resumed.state_dict()["step"], file=io.StringIO())
        assert (bar.n, bar.total) == (3, STEPS)
        for _ in bar:
            pass
        assert bar.n == STEPS


def test_tensorboard(tmp_path: Path) -> None:
    writer = pytest.importorskip("tensorboardX").SummaryWriter(str(tmp_path))
    with loader() as data:
        for step, _ in enumerate(data):
            for name, value in data.stats().items():
                writer.add_scalar(f"input/{name}", value, step)
    writer.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert content.count(b"input/exposed_wait_seconds") == STEPS


def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path)) as run, loader() as data:
        for _ in data:
            run.log({f"input/{name}": value for name, value in data.stats().items()})
        assert run.summary["input/steps"] == STEPS


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())  # makes its first experiment with the folder
    with mlflow.start_run() as run, loader() as data:
        for step, _ in enumerate(data):
            mlflow.log_metrics(data.stats(), step=step)
    assert mlflow.get_run(run.info.run_id).data.metrics["steps"] == STEPS


def test_opentelemetry() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import metrics  # noqa: PLC0415
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: PLC0415

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
    with loader() as data:

        def observed(name: str, _: metrics.CallbackOptions) -> list[metrics.Observation]:
            return [metrics.Observation(data.stats().get(name, 0))]

        meter = metrics.get_meter("input")
        for name in data.stats():
            meter.create_observable_gauge(f"input.{name}", callbacks=[partial(observed, name)])
        for step, _ in enumerate(data, 1):
            told: Any = reader.get_metrics_data()
            (resource,) = told.resource_metrics
            (scope,) = resource.scope_metrics
            found = {metric.name: metric.data.data_points[0].value for metric in scope.metrics}
            assert found["input.steps"] == step
            assert set(found) == {f"input.{name}" for name in data.stats()}


def test_traceml() -> None:
    traceml = pytest.importorskip("traceml_ai")
    traceml.init(mode="manual")
    with loader() as data:
        for epoch in range(2):
            assert sum(len(batch[0]) for batch in traceml.wrap_dataloader_fetch(data)) == 2 * STEPS
            assert data.step.epoch == epoch


# The definitions, beside a clock outside


class Waits:
    """Ready batches, each of which takes a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Any:
        for _ in range(40):
            time.sleep(self.seconds)
            yield torch.zeros(2)


def test_a_planted_wait_is_shown_and_nothing_else() -> None:
    """Sleeps may be longer than they were asked to be, so the upper bounds are those of a clock outside."""
    outside = 0.0
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(Waits(0.005), tdi.InputOptions(prefetch=0)) as data:
        began, iterator = time.perf_counter(), iter(data)
        for _ in range(40):
            called = time.perf_counter()
            next(iterator)
            outside += time.perf_counter() - called
            time.sleep(0.02)
        found, whole = data.stats(), time.perf_counter() - began
    assert found["exposed_wait_seconds"] == found["wait_seconds"]
    assert 40 * 0.005 <= found["wait_seconds"] <= outside
    assert 39 * 0.02 + found["wait_seconds"] <= found["seconds"] <= whole
