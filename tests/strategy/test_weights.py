"""FSDP2 over CPU ranks, on every release of torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Protocol, TypeAlias

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support.cells import cells
from tests.support.platforms import package
from torchdistinput import PerReplica, Step, Strategy, average_loss
from torchdistinput.testing import run_ranks


def shard(module: nn.Module) -> Any:
    """``fully_shard`` over all ranks, with gradients that are averaged. Collective: every rank calls this.

    Where gloo adds (see ``gloo_averages``), FSDP2 is asked to add and to divide, as ``average_loss`` says.
    """
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - see tests/support/platforms.py

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


SAMPLES, GLOBAL_BATCH, EPOCHS = 49, 12, 2
STEPS_TOGETHER, PIECES = 3, 2
MICRO_COST = 30
VOCABULARY, LENGTH, WIDTH = 11, 5, 8
IGNORED = -100
BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}

Weights: TypeAlias = tuple[float, ...]


class Loader(Protocol):
    """What a loop needs of ``DistributedDataset`` and of the drop-in ``DataLoader``."""

    @property
    def step(self) -> tdi.Step: ...

    def __iter__(self) -> Iterator[Any]: ...

    def close(self) -> None: ...


Loop: TypeAlias = Callable[[Loader, nn.Module, torch.optim.Optimizer], None]


class Net(nn.Module):
    """Attention, LayerNorm and a nonlinearity over short sequences; no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        """The losses' logits, (batch, VOCABULARY, LENGTH), of text (batch, LENGTH)."""
        hidden = self.embedding(text)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])
        logits: Tensor = self.head(F.gelu(self.inner(hidden)))
        return logits.transpose(1, 2)


def new_net(dtype: torch.dtype) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net().to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)


def samples() -> TensorDataset:
    """Text, the targets, and which tokens count: between one and all of a sequence."""
    made = seeded(2)
    text, targets = torch.randint(0, VOCABULARY, (2, SAMPLES, LENGTH), generator=made)
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=made)
    return TensorDataset(text, targets, torch.arange(LENGTH) < lengths)


def plain_loader(batch_size: int, **more: Any) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(samples(), batch_size, shuffle=True, generator=seeded(3), **more)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def token_losses(model: nn.Module, text: Tensor, targets: Tensor) -> Tensor:
    """(batch, LENGTH)"""
    return F.cross_entropy(model(text), targets, reduction="none")


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)  # loss.backward(), which has no types


# ------------------------------------------------------------------------------------------------------ a user's loops


def each_step(loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The mean over the samples of each global batch."""
    for text, targets, _ in loader:
        per_sample = token_losses(model, text, targets).mean(dim=1)
        backward(tdi.average_loss(per_sample, loader.step))
        optimizer.step()
        optimizer.zero_grad()


def each_step_by_tokens(loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The mean over the tokens that count in each global batch."""
    for text, targets, counts in loader:
        backward(tdi.average_loss(token_losses(model, text, targets), loader.step, weights=counts))
        optimizer.step()
        optimizer.zero_grad()


def accumulated(loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The mean over the samples of several global batches: each step counts by its share of their samples."""
    batches = iter(loader)
    while group := [(batch, loader.step) for batch in itertools.islice(batches, STEPS_TOGETHER)]:
        total = sum(size_of(step) for _, step in group)
        for number, ((text, targets, _), step) in enumerate(group, start=1):
            with exchanging_gradients(model, number == len(group)):
                per_sample = token_losses(model, text, targets).mean(dim=1)
                backward(tdi.average_loss(per_sample, step) * size_of(step) / total)
        optimizer.step()
        optimizer.zero_grad()


def accumulated_by_tokens(loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The mean over the tokens that count in several global batches: one sum over the ranks for all of them."""
    batches = iter(loader)
    while group := [(batch, loader.step) for batch in itertools.islice(batches, STEPS_TOGETHER)]:
        own = torch.stack([counts.sum() for (_, _, counts), _ in group]).sum()
        total = tdi.get_strategy().reduce("SUM", own)
        for number, ((text, targets, counts), step) in enumerate(group, start=1):
            with exchanging_gradients(model, number == len(group)):
                losses = token_losses(model, text, targets) * counts
                backward(tdi.average_loss(losses, step) * size_of(step) / total)
        optimizer.step()
        optimizer.zero_grad()


def grouped(loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer, total: str | None = None) -> None:
    """The mean over the samples, or over the tokens, of several global batches: their sum came with the votes."""
    for group in tdi.groups(loader, STEPS_TOGETHER):
        for number, ((text, targets, counts), _) in enumerate(group, start=1):
            with exchanging_gradients(model, number == len(group)):
                losses = token_losses(model, text, targets)
                if total is None:
                    backward(tdi.average_loss(losses.mean(dim=1), group))
                else:
                    backward(tdi.average_loss(losses, group, weights=counts, total=total))
        optimizer.step()
        optimizer.zero_grad()


def summed(loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The mean over the tokens of each global batch: their sum came with the votes."""
    for text, targets, counts in loader:
        backward(tdi.average_loss(token_losses(model, text, targets), loader.step, weights=counts, total="tokens"))
        optimizer.step()
        optimizer.zero_grad()


def in_pieces(loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The mean over each global batch, where a part of it is too much for one pass: the same pieces on every rank."""
    for text, targets, _ in loader:
        pieces = list(zip(text.tensor_split(PIECES), targets.tensor_split(PIECES), strict=True))
        for number, (some_text, some_targets) in enumerate(pieces, start=1):
            with exchanging_gradients(model, number == len(pieces)):
                per_sample = token_losses(model, some_text, some_targets).mean(dim=1)
                backward(per_sample.sum() * loader.step.num_workers / size_of(loader.step))
        optimizer.step()
        optimizer.zero_grad()


def in_micro_batches(loader: Loader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The mean over each global batch, in runs of samples of a bounded cost: as many on every rank."""
    for text, targets, _ in loader:
        micro_batches = loader.step.micro_batches(MICRO_COST)
        for number, rows in enumerate(micro_batches, start=1):
            with exchanging_gradients(model, number == len(micro_batches)):
                per_sample = token_losses(model, text[rows], targets[rows]).mean(dim=1)
                backward(tdi.average_loss(per_sample, loader.step, rows=rows))
        optimizer.step()
        optimizer.zero_grad()


def size_of(step: tdi.Step) -> int:
    assert step.global_size is not None  # it is None only with coordination="off"
    return step.global_size


@contextlib.contextmanager
def exchanging_gradients(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Gradients that are added up need to travel only once; with a static graph each time, by pytorch#143580."""
    if isinstance(model, package("torch.distributed.fsdp").FSDPModule):
        model.set_requires_gradient_sync(wanted)
        yield
    elif isinstance(model, DistributedDataParallel) and not model.static_graph and not wanted:
        with model.no_sync():
            yield
    else:
        yield


LOOPS: dict[str, Loop] = {
    "plain": each_step,
    "tokens": each_step_by_tokens,
    "accumulated": accumulated,
    "accumulated tokens": accumulated_by_tokens,
    "accumulated, grouped": grouped,
    "accumulated tokens, grouped": functools.partial(grouped, total="tokens"),
    "tokens, summed": summed,
    "in pieces": in_pieces,
}

# ------------------------------------------------------------------------------------------------------- one process


def train_alone(batch_size: int, dtype: torch.dtype, loss_of: Callable[[nn.Module, list[Tensor]], Tensor]) -> Weights:
    model = new_net(dtype)
    optimizer = optimizer_of(model)
    loader = plain_loader(batch_size)
    for _ in range(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            backward(loss_of(model, batch))
            optimizer.step()
    return weights_of(model)


def mean(model: nn.Module, batch: list[Tensor]) -> Tensor:
    text, targets, _ = batch
    return F.cross_entropy(model(text), targets)


def mean_of_tokens(model: nn.Module, batch: list[Tensor]) -> Tensor:
    text, targets, counts = batch
    return F.cross_entropy(model(text), targets.where(counts, IGNORED), ignore_index=IGNORED)


def mean_of_means(share: int, model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Each rank's own mean, averaged over the ranks that have something; or each step's, averaged over steps."""
    text, targets, _ = batch
    parts = zip(torch.split(text, share), torch.split(targets, share), strict=True)
    return torch.stack([F.cross_entropy(model(some_text), some_targets) for some_text, some_targets in parts]).mean()


@functools.cache
def weights_of_one_process(feature: str, dtype: torch.dtype) -> Weights:
    """torch alone: accumulated steps are one batch of that many times the size, and the loss is the plain mean."""
    together = STEPS_TOGETHER if "accumulated" in feature else 1
    return train_alone(GLOBAL_BATCH * together, dtype, mean_of_tokens if "tokens" in feature else mean)


def weights_of(model: nn.Module) -> Weights:
    parameters = [whole(each) for each in model.parameters()]
    return tuple(torch.cat([each.detach().double().flatten() for each in parameters]).tolist())


def largest_difference(one: Weights, other: Weights) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_means_of_means_would_train_something_else() -> None:
    """What the bounds are worth: they are far below what the training does, and what the usual loops get wrong."""
    plain, accumulated_steps = (weights_of_one_process(feature, torch.float64) for feature in ("plain", "accumulated"))
    of_ranks = train_alone(GLOBAL_BATCH, torch.float64, functools.partial(mean_of_means, 5))
    of_steps = train_alone(GLOBAL_BATCH * STEPS_TOGETHER, torch.float64, functools.partial(mean_of_means, GLOBAL_BATCH))
    assert largest_difference(weights_of(new_net(torch.float64)), plain) > 1e-2
    assert largest_difference(of_ranks, plain) > 1e-3
    assert largest_difference(of_steps, accumulated_steps) > 1e-3


# ------------------------------------------------------------------------------------------------------- many ranks


LoaderOf = Callable[..., Loader]
"""Takes the strategy, and options."""


def distributed(strategy: tdi.Strategy, num_workers: int = 0, **options: Any) -> Loader:
    return strategy.distribute_dataset(plain_loader(GLOBAL_BATCH, num_workers=num_workers), tdi.InputOptions(**options))


def drop_in(_: tdi.Strategy, **options: Any) -> Loader:
    given = tdi.InputOptions(**options)
    return tdi.DataLoader(samples(), GLOBAL_BATCH, shuffle=True, generator=seeded(3), options=given)


LOADERS: dict[str, LoaderOf] = {
    "distribute_dataset": distributed,
    "two loader workers": functools.partial(distributed, num_workers=2),
    "drop-in": drop_in,
}


def options_of(feature: str) -> dict[str, Any]:
    return {"sums": {"tokens": lambda batch: int(batch[2].sum())}} if feature.endswith(("grouped", "summed")) else {}


def wrap(net: Net, wrapper: str) -> nn.Module:
    if wrapper == "FSDP2":
        for part in (net.attention, net.inner, net):
            shard(part)
        return net
    return DistributedDataParallel(net, static_graph=wrapper == "DDP(static_graph=True)")


@dataclasses.dataclass(frozen=True)
class Cell:
    wrapper: str
    feature: str
    world: int
    dtype: torch.dtype
    loader: str


def by_cost(strategy: tdi.Strategy, *, equal_counts: bool, **options: Any) -> Loader:
    """The cost of a sample is the square of its tokens that count."""
    costs = samples().tensors[2].sum(dim=1).square()
    return distributed(strategy, balance=tdi.Balance(costs, equal_counts=equal_counts), **options)


LOADERS_BY_COST: dict[str, LoaderOf] = {
    "by cost": functools.partial(by_cost, equal_counts=False),
    "by cost, equal counts": functools.partial(by_cost, equal_counts=True),
}
LOOPS_BY_COST: dict[str, Loop] = {**LOOPS, "in micro-batches": in_micro_batches}


def train(cell: Cell) -> Weights:
    model = wrap(new_net(cell.dtype), cell.wrapper)
    optimizer = optimizer_of(model)
    loader_of = {**LOADERS, **LOADERS_BY_COST}[cell.loader]
    with contextlib.closing(loader_of(tdi.get_strategy(), **options_of(cell.feature))) as loader:
        for _ in range(EPOCHS):
            LOOPS_BY_COST[cell.feature](loader, model, optimizer)
    return weights_of(model)


def train_all(chosen: list[Cell]) -> list[Weights]:
    with tdi.Strategy(devices=["cpu"]).scope():
        return [train(cell) for cell in chosen]


CELLS = list(itertools.product(["DDP", "DDP(static_graph=True)", "FSDP2"], LOOPS))
SETTINGS: dict[str, list[Any]] = {
    "world": [2, 3, 4, 5],
    "dtype": [torch.float32, torch.float64],
    "loader": list(LOADERS),
}
CELLS_OF_A_LAUNCH = 12


def cells_of(world: int, all_cells: bool) -> Iterable[list[Cell]]:
    found = (Cell(*cell, **setting) for cell, setting in cells(CELLS, SETTINGS, everything=all_cells))
    mine = [cell for cell in found if cell.world == world]
    return (mine[at : at + CELLS_OF_A_LAUNCH] for at in range(0, len(mine), CELLS_OF_A_LAUNCH))


@pytest.mark.parametrize("world", SETTINGS["world"])
def test_the_trained_weights_are_those_of_one_process(world: int, all_cells: bool) -> None:
    for chosen in cells_of(world, all_cells):
        for rank, trained in enumerate(run_ranks(world, train_all, chosen, timeout_seconds=240.0)):
            for cell, found in zip(chosen, trained, strict=True):
                difference = largest_difference(found, weights_of_one_process(cell.feature, cell.dtype))
                assert difference <= BOUNDS[cell.dtype], f"{cell} on rank {rank}: {difference}"


def test_the_weights_are_the_same_where_batches_are_divided_by_cost(all_cells: bool) -> None:
    """The last batch of one sample leaves all parts but one empty; their micro-batches are empty too, and as many."""
    for world in (2, 3, 5) if all_cells else (3,):
        check_weights_by_cost(world, all_cells)


def check_weights_by_cost(world: int, all_cells: bool) -> None:
    features = ["plain", "tokens", "accumulated tokens, grouped", "in micro-batches"]
    of = list(itertools.product(["DDP", "FSDP2"], features))
    settings: dict[str, list[Any]] = {"loader": list(LOADERS_BY_COST)}
    chosen = [
        Cell(*cell, world=world, dtype=torch.float64, **setting)
        for cell, setting in cells(of, settings, everything=all_cells, seed=world)
    ]
    for rank, trained in enumerate(run_ranks(world, train_all, chosen, timeout_seconds=240.0)):
        for cell, found in zip(chosen, trained, strict=True):
            difference = largest_difference(found, weights_of_one_process(cell.feature, cell.dtype))
            assert difference <= BOUNDS[cell.dtype], f"{cell} on rank {rank}: {difference}"


def sized(global_size: int | None, local_sizes: tuple[int, ...], num_workers: int = 1, num_replicas: int = 1) -> Step:
    return Step(0, 0, global_size, local_sizes, num_replicas, num_workers)


def parts_of(rows: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    return list(torch.split(rows, list(sizes)))


def test_the_shares_of_all_workers_average_to_the_mean_for_every_cut() -> None:
    losses = torch.tensor([3.0, 1.0, 4.0, 1.5, 9.0], dtype=torch.float64)
    for first, second in itertools.combinations_with_replacement(range(6), 2):
        sizes = (first, second - first, 5 - second)
        shares = [
            average_loss(part, sized(5, (len(part),), num_workers=3, num_replicas=3))
            for part in parts_of(losses, sizes)
        ]
        torch.testing.assert_close(torch.stack(shares).mean(), losses.mean(), rtol=0, atol=1e-12)


def test_an_empty_part_gives_zero_and_keeps_its_graph() -> None:
    model = torch.nn.Linear(2, 1)
    loss = average_loss(model(torch.zeros(0, 2)).squeeze(1), sized(3, (0,), num_workers=2, num_replicas=2))
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_what_a_sample_has_in_further_dims_is_summed() -> None:
    losses = torch.arange(6.0).reshape(2, 3)
    assert average_loss(losses, sized(2, (2,))).item() == losses.sum(1).mean().item()


def test_the_weighted_loss_is_divided_by_the_sum_of_the_weights_of_all() -> None:
    losses = torch.arange(1.0, 7.0).reshape(2, 3)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    padded = losses.masked_fill(~mask, torch.nan)  # a padded row may well have such a loss
    assert average_loss(padded, sized(2, (2,)), mask).item() == losses[mask].mean().item()
    per_sample = torch.tensor([1.0, 3.0])
    assert average_loss(losses, sized(2, (2,)), per_sample).item() == (6 * 1 + 15 * 3) / 4
    ones = torch.ones(2, dtype=torch.int64)
    assert average_loss(losses, sized(2, (2,)), ones).item() == average_loss(losses, sized(2, (2,))).item()


def test_with_weights_flattened_tokens_need_not_be_samples() -> None:
    assert average_loss(torch.ones(12), sized(3, (3,)), torch.ones(12)).item() == 1


def test_weights_that_are_all_zero_give_zero() -> None:
    losses = torch.ones(2, requires_grad=True)
    loss = average_loss(losses, sized(2, (2,)), torch.zeros(2))
    torch.autograd.backward(loss)
    assert loss.item() == 0
    assert losses.grad is not None
    assert losses.grad.tolist() == [0, 0]


def test_the_dtype_is_that_of_the_loss_with_weights_of_any_dtype() -> None:
    for dtype in (torch.bool, torch.int64, torch.float64, torch.float16):
        loss = average_loss(torch.ones(2), sized(2, (2,)), torch.ones(2, dtype=dtype))
        assert loss.item() == 1
        assert loss.dtype == torch.float32


@pytest.mark.parametrize("weighted", [False, True])
def test_the_replicas_of_a_process_add_up_to_the_gradients_of_the_whole_batch(weighted: bool) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        per_sample = model(x).square().sum(1)
        loss = average_loss(per_sample, sizes, w if weighted else None)
        torch.autograd.backward(loss)
        return loss.detach()

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    rows, weights = torch.randn(7, 3, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    sizes = sized(7, (3, 3, 1, 0), num_replicas=4)
    whole = model(rows).square().sum(1)
    mean = (whole * weights).sum() / weights.sum() if weighted else whole.mean()
    want = torch.autograd.grad(mean, list(model.parameters()))
    args = (PerReplica(parts_of(rows, sizes.local_sizes)), PerReplica(parts_of(weights, sizes.local_sizes)))
    strategy = Strategy(["cpu"] * 4)
    found = strategy.local_results(strategy.run(step, args))
    torch.testing.assert_close(sum(found), mean.detach(), rtol=0, atol=1e-12)
    for parameter, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-12)


def errors_of_two_replicas_per_rank() -> list[float]:
    """Worker i has the replicas 2i and 2i+1 on one module; their gradients add up, then the workers' are averaged."""

    def step(x: Tensor, w: Tensor) -> None:
        losses = net(x).square().sum(1)
        torch.autograd.backward(average_loss(losses, sizes, w if weighted else None))

    cut, errors, strategy, rank = [4, 4, 1, 0], [], Strategy(devices=["cpu"] * 2), dist.get_rank()
    mine = slice(2 * rank, 2 * rank + 2)
    sizes = sized(9, tuple(cut[mine]), num_workers=2, num_replicas=4)
    torch.manual_seed(0)
    net, rows = torch.nn.Linear(3, 2).double(), torch.randn(9, 3, dtype=torch.float64)
    weights = torch.arange(9) % 4
    whole = net(rows).square().sum(1)
    for weighted in (False, True):
        mean = (whole * weights).sum() / weights.sum() if weighted else whole.mean()
        want = torch.autograd.grad(mean, list(net.parameters()), retain_graph=True)
        net.zero_grad()
        strategy.run(step, [PerReplica(torch.split(all_of, cut)[mine]) for all_of in (rows, weights)])
        for parameter, grad in zip(net.parameters(), want, strict=True):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            errors.append((parameter.grad / 2 - grad).abs().max().item())
    return errors


def test_several_replicas_on_each_of_several_ranks_do_as_well() -> None:
    for errors in run_ranks(2, errors_of_two_replicas_per_rank):
        assert max(errors) < 1e-12, errors


@pytest.mark.parametrize(
    ("loss", "step", "weights", "error", "message"),
    [
        (torch.tensor(1.0), sized(2, (2,)), None, ValueError, "scalar: this loss is reduced already.*reduction='none'"),
        (1.0, sized(2, (2,)), None, TypeError, "got float"),
        (torch.ones(2), sized(None, (2,)), None, RuntimeError, "step.global_size is None.*coordination='off'"),
        (torch.ones(2), sized(None, (2,)), torch.ones(2), RuntimeError, "step.global_size is None"),
        (torch.ones(6), sized(2, (2,)), None, ValueError, r"got 6 losses .* has 2 sample\(s\)"),
        (torch.ones(3), sized(4, (2, 2), num_replicas=2), None, ValueError, r"has 2 sample\(s\)"),
        (torch.ones(0), sized(0, (0,)), None, ValueError, "global_size=0"),
        (torch.ones(2), sized(2, (2,)), 1.0, TypeError, "weights as a tensor, got float"),
        (torch.ones(2), sized(2, (2,)), torch.tensor(1.0), ValueError, r"weights of shape \[\]"),
        (torch.ones(2, 3), sized(2, (2,)), torch.ones(3), ValueError, r"shape \[3\] for losses of shape \[2, 3\]"),
        (torch.ones(2, 3), sized(2, (2,)), torch.ones(2, 1), ValueError, r"shape \[2, 1\]"),
        (torch.ones(2), sized(2, (2,)), torch.ones(2, 1), ValueError, r"shape \[2, 1\]"),
        (
            torch.ones(2),
            sized(4, (2,), 2, 2),
            torch.ones(2),
            RuntimeError,
            "cannot sum the weights over the 2 replicas",
        ),
        (torch.ones(2), sized(4, (2, 2), 1, 2), torch.ones(2), RuntimeError, "given to strategy.run"),
    ],
)
def test_what_would_give_a_wrong_scale_is_refused(
    loss: Any, step: Step, weights: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        average_loss(loss, step, weights)
