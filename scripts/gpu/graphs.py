"""``partial_batch="pad"`` gives one shape: losses under a CUDA graph are those of eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from gpu.accelerator import Figures, device, is_real

__all__ = ["run"]

_SAMPLES, _BATCH, _WIDTH = 1000, 64, 256
Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def _model(where: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1)).to(where)


def _step_of(model: nn.Module) -> Step:
    def step(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        losses = (model(x).squeeze(1) - y).square()
        loss: Tensor = (losses * mask).sum() / mask.sum()
        return loss

    return step


def _losses(step: Step, where: torch.device) -> list[float]:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(_SAMPLES, _WIDTH), torch.randn(_SAMPLES))
    options = tdi.InputOptions(partial_batch="pad")
    found = []
    with tdi.Strategy([where]).distribute_dataset(DataLoader(data, _BATCH), options) as dataset:
        for _ in range(2):
            found += [step(x, y, mask).clone() for (x, y), mask in dataset]
    return [float(loss) for loss in found]


def _captured(step: Step, where: torch.device) -> Step:
    """The step as a CUDA graph over memory of its own, into which each batch is copied."""
    places = (
        torch.zeros(_BATCH, _WIDTH, device=where),
        torch.zeros(_BATCH, device=where),
        torch.ones(_BATCH, dtype=torch.bool, device=where),
    )
    side = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*places)
    torch.cuda.current_stream(where).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*places)

    def replay(*batch: Tensor) -> Tensor:
        for place, leaf in zip(places, batch, strict=True):
            place.copy_(leaf)
        graph.replay()
        return loss

    return replay


def run(small: bool) -> Figures:  # noqa: FBT001 - as all parts
    """Two epochs whose last batches are padded."""
    where = device()
    model = _model(where)
    with torch.no_grad():
        eager = _losses(_step_of(model), where)
        if not is_real(where):
            return {"losses": len(eager), "ok": True, "left_out": "graphs and compilation need CUDA"}
        graph = _losses(_captured(_step_of(model), where), where)
        reduced = torch.compile(_step_of(model), mode="reduce-overhead")
        again = _losses(lambda *batch: _after_mark(reduced, batch), where)
        # Compiled kernels may round in another order than eager's: they are held against the same ones without a graph.
        plain = _losses(torch.compile(_step_of(model)), where)
    return {
        "losses": len(eager),
        "graph_equals_eager": graph == eager,
        "reduce_overhead_equals_compiled": again == plain,
        "reduce_overhead_equals_eager": again == eager,
        "largest_difference_to_eager": max(abs(a - b) for a, b in zip(again, eager, strict=True)),
        "ok": graph == eager and again == plain,
    }


def _after_mark(step: Step, batch: tuple[Tensor, ...]) -> Tensor:
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    return step(*batch).clone()
