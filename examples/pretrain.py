"""Pretrain a small transformer on several kinds of text: mixed, packed, balanced; goes on with any number of processes.

    python examples/pretrain.py --checkpoint runs/pretrain
    torchrun --standalone --nproc-per-node 4 examples/pretrain.py --checkpoint runs/pretrain --crash-after 9
    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --checkpoint runs/pretrain

The documents are files that every installation has: modules of the standard library, headers of torch, descriptions of
packages. Each kind is packed into rows of ``LENGTH`` tokens, before any split, and a mixture draws the packs in fixed
shares. The packs of each global batch are divided among the processes by their cost in attention. The attention of a
token sees its own document only.

Kill the processes at any time (``--crash-after`` does so), and start again with another number of them: the order, the
packs and, to rounding, the weights are those of one process that was never interrupted. At the end the script proves
that each token of each document was delivered exactly once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi

LENGTH = 256  # tokens of a pack at most; a token is a byte
GLOBAL_BATCH = 24  # packs in a step, over all processes
WEIGHTS = {"python": 0.5, "headers": 0.3, "descriptions": 0.2}
MOST_BYTES = 2000  # of a document, so that the run is short


class Documents(Dataset[Tensor]):
    """The first bytes of each file, (length,) each.

    Args:
      files: one document each.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self.lengths = [min(path.stat().st_size, MOST_BYTES) for path in self._files]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        with self._files[index].open("rb") as file:
            return torch.frombuffer(bytearray(file.read(MOST_BYTES)), dtype=torch.uint8)


def sources(most: int) -> dict[str, Documents]:
    """The kinds of text, at most so many documents of each, in one order for all processes."""
    paths = sysconfig.get_paths()
    found = {
        "python": Path(paths["stdlib"]).glob("*.py"),
        "headers": (Path(torch.__file__).parent / "include").rglob("*.h"),
        "descriptions": Path(paths["purelib"]).glob("*.dist-info/METADATA"),
    }
    return {
        name: Documents([path for path in sorted(files) if path.stat().st_size][:most]) for name, files in found.items()
    }


class Block(nn.Module):
    """Attention within a document, and a layer for each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.tokenwise = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The next activations, (batch, LENGTH, width), with a mask (batch, 1, LENGTH, LENGTH)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = x + self.tokenwise(self.between(x))
        return hidden


class Transformer(nn.Module):
    """Predicts the next byte of each document in a pack."""

    def __init__(self, width: int = 32, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, pack: dict[str, Tensor]) -> Tensor:
        """The logits of each next byte, (batch, LENGTH, 256)."""
        segments = pack["segment_ids"]
        length = segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
        own_document = (segments[:, :, None] == segments[:, None, :]) & causal
        x = self.token(pack["tokens"].long()) + self.place(pack["positions"])
        for block in self.blocks:
            x = block(x, own_document[:, None])
        logits: Tensor = self.head(x)
        return logits


def losses_of(model: nn.Module, pack: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean nats of each pack, (batch,), and the number of predicted bytes that each mean is over, (batch,)."""
    segments = pack["segment_ids"]
    is_next = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    nats = F.cross_entropy(model(pack)[:, :-1].transpose(1, 2), pack["tokens"][:, 1:].long(), reduction="none")
    count = is_next.sum(dim=1)
    return (nats * is_next).sum(dim=1) / count.clamp(min=1), count


def cost_of(packs: tdi.Packed, pack: int) -> float:
    """The work that a pack is: the squares of its documents' lengths for attention, and its tokens."""
    lengths = [item.stop - item.start for item in packs.items(pack)]
    return sum(length * length for length in lengths) / LENGTH + sum(lengths)


def write(folder: Path, content: dict[str, Any]) -> None:
    """Writes the checkpoint beside the old one, and then gives it its name: a half-written file has none."""
    torch.save(content, folder / "unfinished")
    (folder / "unfinished").replace(folder / "checkpoint.pt")


class Report:
    """What was delivered, as all processes know it; a part of the checkpoint."""

    def __init__(self, packs: dict[str, tdi.Packed], costs: list[list[float]]) -> None:
        self._packs, self._costs = packs, costs
        self.order: list[int] = []
        """The packs in the order of the global batches: ``source * 2**40 + pack``, as ``with_index=True`` tells."""
        self._tokens: Counter[str] = Counter()

    def add(self, strategy: tdi.Strategy, index: Tensor) -> str:
        """Counts a step, whose packs ``index`` this process was given. Every process calls this. Returns a line."""
        cost = sum(self._costs[number >> 40][number % 2**40] for number in index.tolist())
        own = strategy.gather(torch.tensor([cost], dtype=torch.float64), axis=0)
        delivered = strategy.gather(index, axis=0).sort().values.tolist()
        self.count(delivered)
        shares = "  ".join(f"{name} {self._tokens[name] / self._tokens.total():.3f}" for name in WEIGHTS)
        padding = 1 - self._tokens.total() / (len(self.order) * LENGTH)
        return f"shares of tokens: {shares}   padding {padding:.1%}   slowest over mean {own.max() / own.mean():.3f}"

    def count(self, delivered: list[int]) -> None:
        """Counts packs."""
        self.order += delivered
        names = list(self._packs)
        for number in delivered:
            name = names[number >> 40]
            self._tokens[name] += sum(item.stop - item.start for item in self._packs[name].items(number % 2**40))

    def check(self, documents: dict[str, Documents]) -> str:
        """Proves that each token was delivered once.

        Raises:
          RuntimeError: a pack or token is missing, or came twice.
        """
        expected = {name: sum(each.lengths) for name, each in documents.items()}
        whole = [(source << 40) + pack for source, each in enumerate(self._packs.values()) for pack in range(len(each))]
        if sorted(self.order) != whole or self._tokens != expected:
            raise RuntimeError(f"packs {self.order}, tokens {self._tokens}; expected {expected}")
        told = ", ".join(f"{name} {count}" for name, count in expected.items())
        return f"each token was delivered once: {told}, in {len(self.order)} packs"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help="where to go on, and to save")
    parser.add_argument("--every", type=int, default=4, metavar="STEPS", help="steps from checkpoint to checkpoint")
    parser.add_argument("--crash-after", type=int, default=0, metavar="STEPS", help="all processes are killed then")
    parser.add_argument("--documents", type=int, default=40, help="of each kind at most")
    return parser.parse_args()


def train(
    strategy: tdi.Strategy, loader: tdi.DistributedDataset, report: Report, arguments: argparse.Namespace
) -> nn.Module:
    """Trains from the checkpoint, if there is one, to the end of the epoch. Returns the model."""
    is_first, file = strategy.input_pipeline_id == 0, arguments.checkpoint / "checkpoint.pt"
    model = Transformer().double().to(strategy.device)
    parallel = DistributedDataParallel(model) if strategy.num_input_pipelines > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # the same for any number of processes
        report.count(saved["order"])

    for done, (index, pack) in enumerate(loader, 1):
        losses, counts = losses_of(parallel, pack)
        with strategy.scope():  # the mean over the bytes of the global batch, however many each process has
            loss = tdi.average_loss(losses, loader.step, counts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        line, step = report.add(strategy, index), loader.step.index + 1
        if is_first and step % arguments.every == 0:
            print(f"step {step:3}   {line}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "order": report.order}
            write(arguments.checkpoint, {**state, "loader": loader.state_dict()})
        if done == arguments.crash_after:
            os.kill(os.getpid(), signal.SIGKILL)
    return model


def main() -> None:
    """Packs, mixes, trains and checks."""
    arguments = parsed()
    arguments.checkpoint.mkdir(parents=True, exist_ok=True)
    strategy = tdi.Strategy(devices=["cpu"])
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same first weights everywhere

    documents = sources(arguments.documents)
    packs = {}
    for name, each in documents.items():
        packs[name] = tdi.Packed(each, LENGTH, lengths=each.lengths, overflow="split", pad=0)
    mixture = tdi.Mixture(packs, WEIGHTS, stop="all", seed=1)
    costs = [[cost_of(each, pack) for pack in range(len(each))] for each in packs.values()]
    options = tdi.InputOptions(balance=lambda pack: costs[pack[0]][pack[1]], with_index=True)
    loader = strategy.distribute_dataset(DataLoader(mixture, batch_size=GLOBAL_BATCH), options)

    report = Report(packs, costs)
    model = train(strategy, loader, report, arguments)
    if strategy.input_pipeline_id == 0:
        print(report.check(documents))
        print(f"norm of the weights {torch.cat([each.flatten() for each in model.parameters()]).norm():.9f}")


if __name__ == "__main__":
    main()
