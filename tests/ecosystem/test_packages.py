"""Packages with a loader of this library, each as its page shows it: Keras 3, torchmetrics, torchtitan, Ray, loggers.

A training on several ranks is a row of ``test_trainers``, what is refused one of ``test_wrong``.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.data import Stream
from tests.support.interpreters import Interpreters, printed
from tests.support.platforms import package
from tests.test_pages import snippets
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


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")


@pytest.mark.usefixtures("backend")
@pytest.mark.filterwarnings("ignore")  # Keras's own
def test_a_generator_over_the_loader_trains_as_torchs_loader() -> None:
    loader = loader_of(tdi.DataLoader)
    with pytest.raises(ValueError, match="Unrecognized data type"):
        losses(loader)

    def steps() -> Any:
        while True:
            yield from map(tuple, loader)

    assert losses(steps(), steps_per_epoch=len(loader)) == losses(loader_of(DataLoader))


needs_torchmetrics = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="could not import 'torchmetrics'")


@needs_torchmetrics
def test_torchmetrics_sees_each_sample_once() -> None:
    for value, own in run_ranks(2, with_torchmetrics, timeout_seconds=120):
        assert value == sum(range(SAMPLES)) / SAMPLES
        assert own is True


def with_torchmetrics() -> tuple[float, bool]:
    """The mean over all ranks; and whether this rank's part alone has another one."""
    from torchmetrics import MeanMetric  # noqa: PLC0415 - seconds, and only here

    metric, alone = MeanMetric(), MeanMetric(sync_on_compute=False)
    for (number,) in tdi.DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=4):
        metric.update(number)
        alone.update(number)
    return float(metric.compute()), float(alone.compute()) != float(metric.compute())


KEEPS_LISTS = ("AUROC", "SpearmanCorrCoef")
"""Metrics that keep what they get: on a rank that never had a sample they need the dtypes of an empty part."""


def metrics_of(parts: list[Any]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The values where most metrics pass over empty parts; and the metrics that fail on an empty part."""
    import torchmetrics  # noqa: PLC0415 - as above

    classes: Any = {"task": "multiclass", "num_classes": 3}
    values: dict[str, Any] = {}
    fail = set()
    for name in ("Accuracy", "F1Score", "AUROC", "ConfusionMatrix", "JaccardIndex"):
        metric = getattr(torchmetrics, name)(**classes)
        values[name] = (metric, lambda scores, labels: (scores, labels))
    for name in ("MeanSquaredError", "PearsonCorrCoef", "R2Score", "SpearmanCorrCoef"):
        values[name] = (getattr(torchmetrics, name)(), lambda scores, labels: (scores[:, 0], labels.float()))
    values["MeanMetric"] = (torchmetrics.MeanMetric(), lambda scores, _: (scores[:, 0],))
    found = {}
    for name, (metric, inputs) in values.items():
        for scores, labels in parts:
            if len(labels) or name in KEEPS_LISTS:
                metric.update(*inputs(scores, labels))
        found[name] = metric.compute()
        try:
            metric.update(*inputs(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)))
        except (RuntimeError, IndexError):
            fail.add(name)
    return found, fail


def scored() -> TensorDataset:
    made = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(21, 3, generator=made), torch.arange(21) % 3)


def metrics_with_empty_parts(batch: int) -> tuple[dict[str, torch.Tensor], set[str], int]:
    parts = [tuple(part) for part in tdi.DataLoader(scored(), batch_size=batch)]
    return *metrics_of(parts), sum(len(labels) for _, labels in parts)


@needs_torchmetrics
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
def test_metrics_that_pass_over_an_empty_part_have_the_values_of_one_process() -> None:
    """The last batch has one sample, so the second rank has none; with batches of one it never has any."""
    expected, _ = metrics_of([scored().tensors])
    for batch, samples in ((10, [11, 10]), (1, [21, 0])):
        ranks = run_ranks(2, metrics_with_empty_parts, batch, timeout_seconds=120)
        assert [count for *_, count in ranks] == samples
        for values, fail, _ in ranks:
            assert fail >= {"Accuracy", "F1Score", "PearsonCorrCoef"}
            for name, value in values.items():
                torch.testing.assert_close(value, expected[name], msg=name)


dcp = package("torch.distributed.checkpoint")

TITANS, OF_RANK = 22, 2


def samples() -> list[Any]:
    return [({"input": torch.full((3,), number)}, torch.full((3,), number + 1)) for number in range(TITANS)]


def made(world: int, rank: int) -> Any:
    """A loader, as the trainer makes it of its configuration."""
    (code,) = (each for each in snippets("examples/my_trainer/torchtitan.md") if "torchtitan." in each)
    names: dict[str, Any] = {"torch": torch, "tdi": tdi, "train": samples(), "__name__": __name__}
    exec(compile(code, "examples/my_trainer/torchtitan.md", "exec"), names)
    given = {"tokenizer": None, "seq_len": 3, "snapshot_every_n_steps": 2}
    return (
        names["OnRanks"]
        .Config()
        .build(dp_world_size=world, dp_rank=rank, local_batch_size=2 * OF_RANK // world, **given)
    )


def steps(loader: Any, number: int) -> list[list[int]]:
    """The samples of some steps, by the trainer's own generator of batches."""
    from torchtitan.trainer import Trainer  # type: ignore[import-not-found, unused-ignore] # noqa: PLC0415 - seconds

    metrics = SimpleNamespace(ntokens_since_last_log=0, data_loading_times=[])
    batches = Trainer.batch_generator(SimpleNamespace(metrics_processor=metrics), loader)
    return [next(batches)[0]["input"][:, 0].tolist() for _ in range(number)]


def play(folder: str) -> tuple[list[list[int]], list[list[int]]]:
    """One rank: seven steps, which begin the second epoch, and their continuation from a checkpoint after three."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = steps(made(world, rank), 7)
    loader = made(world, rank)
    begun = steps(loader, 3)
    assert begun == whole[:3]
    dcp.save({"dataloader": loader}, checkpoint_id=folder)
    loader = made(world, rank)
    dcp.load({"dataloader": loader}, checkpoint_id=folder)
    return whole, [*begun, *steps(loader, 4)]


def go_on(folder: str) -> list[list[int]]:
    """The only rank goes on from the checkpoint of two."""
    loader = made(1, 0)
    dcp.load({"dataloader": loader}, checkpoint_id=folder)
    return steps(loader, 4)


def alone() -> list[list[int]]:
    return steps(made(1, 0), 7)


def test_a_trainer_of_torchtitan_gets_the_global_batches_also_after_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan.trainer")
    (expected,) = run_ranks(1, alone)
    ranks = run_ranks(2, play, str(tmp_path))
    for epoch in zip(*ranks, strict=True):
        assert [sorted(one + other) for one, other in zip(*epoch, strict=True)] == [sorted(step) for step in expected]
    assert run_ranks(1, go_on, str(tmp_path)) == [expected[3:]]


def test_ray_trains_workers_read_each_row_once_and_make_the_same_steps(
    all_cells: bool, interpreters: Interpreters
) -> None:
    pytest.importorskip("ray.data")
    if not all_cells:
        pytest.skip("Ray takes half a minute to start: run with --all-cells")
    output = printed(interpreters.run(["examples/ray_train.py"]))
    for epoch in (0, 1):
        assert f"epoch {epoch}: " in output
    assert output.count("103 samples, each row once: True") == 2, output


# Where people look at a training: one line each takes the numbers of a loader, or shows its progress

STEPS = 8


def looked_at() -> tdi.DistributedDataset:
    strategy = tdi.Strategy(devices=["cpu"])
    return strategy.distribute_dataset(DataLoader(TensorDataset(torch.arange(2 * STEPS)), batch_size=2))


def test_tqdm_has_the_right_total_also_after_a_resume() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    with looked_at() as whole:
        batches = iter(tqdm(whole, file=io.StringIO()))
        for _ in range(3):
            next(batches)
        state = whole.state_dict()
    with looked_at() as resumed:
        resumed.load_state_dict(state)
        bar = tqdm(resumed, initial=resumed.state_dict()["step"], file=io.StringIO())
        assert (bar.n, bar.total) == (3, STEPS)
        for _ in bar:
            pass
        assert bar.n == STEPS


def test_tensorboard(tmp_path: Path) -> None:
    writer = pytest.importorskip("tensorboardX").SummaryWriter(str(tmp_path))
    with looked_at() as data:
        for step, _ in enumerate(data):
            for name, value in data.stats().items():
                writer.add_scalar(f"input/{name}", value, step)
    writer.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert content.count(b"input/exposed_wait_seconds") == STEPS


def test_wandb(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path)) as run, looked_at() as data:
        for _ in data:
            run.log({f"input/{name}": value for name, value in data.stats().items()})
        assert run.summary["input/steps"] == STEPS


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())  # makes its first experiment with the folder
    with mlflow.start_run() as run, looked_at() as data:
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
    with looked_at() as data:

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
    with looked_at() as data:
        for epoch in range(2):
            assert sum(len(batch[0]) for batch in traceml.wrap_dataloader_fetch(data)) == 2 * STEPS
            assert data.step.epoch == epoch


# The definitions, beside a clock outside


def slowly() -> Iterator[torch.Tensor]:
    """Ready batches, each of which takes a while."""
    for _ in range(40):
        time.sleep(0.005)
        yield torch.zeros(2)


def test_a_planted_wait_is_shown_and_nothing_else() -> None:
    """Sleeps may be longer than they were asked to be, so the upper bounds are those of a clock outside."""
    outside = 0.0
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(Stream(slowly), tdi.InputOptions(prefetch=0)) as data:
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
