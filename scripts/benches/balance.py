"""The balanced split: what planning takes, how even it is; a small transformer over texts of many lengths, with DDP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from benches.model import Column, Contender, Measured, Table, Target, largest
from benches.timing import meet, seconds_of
from torchdistinput.plan.balancing import balanced_split

__all__ = ["tables"]

PLANNED, OVER = "us for 1,024 samples", "slowest over least, worst"
STEP, BUSY, SLOWEST = "ms a step, mean", "processor ms of the slowest rank", "slowest over mean cost"
WIDTH, HEADS, LAYERS, VOCABULARY, LONGEST = 128, 4, 2, 512, 768


def plans(replicas: int, equal_counts: bool, batches: int) -> Measured:  # noqa: FBT001 - sent by place
    """Batches of 1,024 samples: the median time; and 8, 16 and 32 samples for each replica: how even they are."""
    drawn = np.random.default_rng(0)
    found = []
    for _ in range(batches):
        costs = drawn.lognormal(0, 1, 1024) ** 2
        found.append(seconds_of(lambda: balanced_split(costs, replicas, equal_counts=equal_counts)))  # noqa: B023
    over = [
        _over_least(drawn.lognormal(0, 1, replicas * each) ** power, replicas, equal_counts=equal_counts)
        for each in (8, 16, 32)
        for power in (1, 2)
        for _ in range(max(1, batches // 10))
    ]
    return {"us": 1e6 * statistics.median(found), "over": max(over)}


def _over_least(costs: Any, replicas: int, *, equal_counts: bool) -> float:
    """The slowest replica over the mean, or over the bound that the largest samples set."""
    order, sizes = balanced_split(costs, replicas, equal_counts=equal_counts)
    ends = np.cumsum(sizes)
    loads = [costs[order[end - size : end]].sum() for end, size in zip(ends, sizes, strict=True)]
    falling = np.sort(costs)[::-1]
    beside = len(costs) // replicas - 1 if equal_counts else 0  # the smallest, beside each of the largest
    parts = np.arange(1, replicas + 1)
    giants = (falling.cumsum()[:replicas] + np.append(0.0, falling[::-1].cumsum())[parts * beside]) / parts
    least = max(giants.max(), costs.sum() / replicas, sum(falling[replicas - 1 : replicas + 1]))
    return float(max(loads) / least)


def lengths_of(samples: int) -> Any:
    """Tokens of each text, of a lognormal law."""
    drawn = np.random.default_rng(1).lognormal(4.5, 0.9, samples)
    return np.clip(drawn, 8, LONGEST).astype(np.int64)


def costs_of(lengths: Any) -> Any:
    """About the multiplications of a layer: its matrices, and the attention of each token to all others."""
    return lengths * (12.0 * WIDTH**2) + lengths.astype(np.float64) ** 2 * (2.0 * WIDTH)


class Texts(Dataset[Tensor]):
    """Tokens."""

    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(int(self.lengths[index])) * (index + 1)) % VOCABULARY


def joined(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """All tokens in a row without padding, and the length of each text."""
    return torch.cat(texts), torch.tensor([len(text) for text in texts])


class Transformer(nn.Module):
    """A text attends to itself only; everything else is done for all tokens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attentions = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The loss of each text, (texts,)."""
        hidden = self.embedding(tokens)
        sizes = lengths.tolist()
        for attention, inner in zip(self.attentions, self.inner, strict=True):
            found = [_attended(part) for part in torch.split(attention(hidden), sizes)]
            hidden = hidden + torch.cat(found) if found else hidden
            hidden = hidden + inner(hidden)
        losses = F.cross_entropy(self.head(hidden), tokens, reduction="none")
        means = [part.mean() for part in torch.split(losses, sizes)]
        return torch.stack(means) if means else losses


def _attended(part: Tensor) -> Tensor:
    query, key, value = part.reshape(len(part), 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)[:, None].unbind()
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1).reshape(-1, WIDTH)


def training(samples: int, batch_size: int, by_cost: bool, equal_counts: bool) -> Measured:  # noqa: FBT001 - by place
    """An epoch of training; then the costs of each step are compared, untimed."""
    lengths = lengths_of(samples)
    options = tdi.InputOptions(balance=costs_of(lengths) if by_cost else None, equal_counts=equal_counts)
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters())
    made = torch.Generator().manual_seed(2)
    loader = DataLoader(Texts(lengths), batch_size, shuffle=True, generator=made, collate_fn=joined)
    seconds, busy, slowest, whole = [], [], 0.0, 0.0
    with tdi.Strategy(["cpu"]).distribute_dataset(loader, options) as data:
        meet()
        before, worked = time.perf_counter(), time.process_time()
        for tokens, sizes in data:
            loss = tdi.average_loss(model(tokens, sizes), data.step)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            now, work = time.perf_counter(), time.process_time()
            seconds.append(now - before)
            busy.append(work - worked)
            before, worked = now, work
        of_slowest = torch.tensor(busy[2:])
        dist.all_reduce(of_slowest, dist.ReduceOp.MAX)
        for _, sizes in data:
            own = torch.tensor(costs_of(sizes.numpy()).sum())
            total = own.clone()
            dist.all_reduce(own, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            slowest, whole = slowest + own.item(), whole + total.item() / dist.get_world_size()
    means = {"ms": 1e3 * statistics.mean(seconds[2:]), "busy": 1e3 * of_slowest.mean().item()}
    return {**means, "slowest": slowest / whole}


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Planning for 2 to 64 replicas; and a training on two ranks, by place and by cost."""
    del folder
    batches = 20 if small else 400
    planned = tuple(
        Contender(f"{replicas} replicas{', equal counts' * equal}", "ours", plans, (replicas, equal, batches))
        for replicas in (2, 4, 8, 16, 32, 64)
        for equal in (False, True)
    )
    sizes = (24, 8) if small else (640, 32)
    trained = (
        Contender("by place", "before", training, (*sizes, False, False)),
        Contender("by cost", "ours", training, (*sizes, True, False)),
        Contender("by cost, equal counts", "ours", training, (*sizes, True, True)),
    )
    return [
        Table(
            "A batch of 1,024 samples, divided by cost",
            (Column(PLANNED, "less", largest("us")), Column(OVER, "less", largest("over"))),
            planned,
            1,
            1 if small else 3,
            tuple(
                Target(column, f"{replicas} replicas{counts}", bound)
                for column, bound in ((PLANNED, 500.0), (OVER, 1.05))
                for counts in ("", ", equal counts")
                for replicas in (2, 16, 64)
            ),
            "Lognormal costs, squared. Evenness: 8, 16 and 32 samples for each replica, linear and squared, over the "
            "mean, or over the bound that the largest samples set.",
        ),
        Table(
            f"A transformer over {sizes[1]} texts of 8 to {LONGEST} tokens, DDP",
            (
                Column(STEP, "less", largest("ms")),
                Column(BUSY, "less", largest("busy")),
                Column(SLOWEST, "less", largest("slowest")),
            ),
            trained,
            2,
            1 if small else 3,
            (
                Target(STEP, "by cost", 1.0, ("by place",)),
                Target(BUSY, "by cost", 1.0, ("by place",)),
                Target(SLOWEST, "by cost", 1.05),
            ),
            "Processor time: what a step takes where no other program runs, as waiting for the other rank takes none.",
        ),
    ]
