"""FSDP2 over CPU ranks, on every release of torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def shard(module: nn.Module) -> Any:
    """``fully_shard`` over all ranks, with gradients that are averaged. Collective: every rank calls this.

    Where gloo adds (see ``gloo_averages``), FSDP2 is asked to add and to divide, as ``average_loss`` says.
    """
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - see tests/support/packages.py

    sharded: Any = fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if not gloo_averages():
        sharded.set_force_sum_reduction_for_comms(True)
    return sharded


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which the ranks hold shards. Collective for such a one: every rank calls this."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - as above

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@cache
def gloo_averages() -> bool:
    """Whether gloo's reduce-scatter knows AVG. In torch 2.8 it adds instead, as FSDP2 does then in float32.

    Collective: every rank calls this.
    """
    found = torch.zeros(1)
    dist.reduce_scatter(found, [torch.ones(1)] * dist.get_world_size(), dist.ReduceOp.AVG)
    return found.item() == 1
