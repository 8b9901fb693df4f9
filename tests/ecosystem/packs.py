"""A mixture of texts in packs, divided by cost, and a small model that reads them: what tests of trainers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchdistinput as tdi

GLOBAL_BATCH, LENGTH, VOCABULARY, WIDTH = 4, 16, 13, 6
EPOCHS = 2


def texts(seed: int, count: int) -> list[Tensor]:
    """Texts of 1 to 12 tokens."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 13, (count,), generator=drawn).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=drawn) for length in lengths]


def packs(**more: Any) -> tdi.Packed:
    """Packs of a mixture of two kinds of texts; each text once."""
    sources = {"web": texts(1, 25), "code": texts(2, 12)}
    mixture = tdi.Mixture(sources, {"web": 0.7, "code": 0.3}, stop="all", seed=3)

    def length_of(position: int) -> int:
        name, index = mixture.locate(position)
        return len(sources[name][index])

    return tdi.Packed(mixture, LENGTH, **{"lengths": length_of, "window": 16, "pad": 0, **more})


def work_of(packed: tdi.Packed) -> list[float]:
    """The cost of each pack: attention within each of its texts."""
    return [float(sum((item.stop - item.start) ** 2 for item in packed.items(pack))) for pack in range(len(packed))]


def torchs() -> DataLoader[Any]:
    """Torch's loader of the packs: of global batches, in one process."""
    return DataLoader(packs(), GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(7))


def balanced() -> tdi.DataLoader[Any]:
    """The same batches, divided by cost."""
    packed = packs()
    order = torch.Generator().manual_seed(7)
    return tdi.DataLoader(packed, GLOBAL_BATCH, shuffle=True, generator=order, balance=work_of(packed))


class Reader(nn.Module):
    """Predicts the next token of each text; a text sees itself only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.to_heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, pack: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The loss of each token, (packs, LENGTH - 1), and which of them count."""
        segments, tokens = pack["segment_ids"], pack["tokens"]
        seen = (segments[:, :, None] == segments[:, None, :]).tril()
        vectors = self.words(tokens) + self.places(pack["positions"])
        query, key, value = self.to_heads(vectors).chunk(3, dim=-1)
        read = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        scores = self.out(vectors + read)[:, :-1]
        losses = F.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none")
        return losses, (segments[:, 1:] > 0) & (segments[:, 1:] == segments[:, :-1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def trained_alone(accumulate: int = 1) -> Tensor:
    """The weights after a plain loop over torch's loader; an update is made of the mean of so many steps."""
    model = Reader()
    optimizer, loader = optimizer_of(model), torchs()
    for _ in range(EPOCHS):
        for number, pack in enumerate(loader, 1):
            losses, counts = model(pack)
            (losses[counts].mean() / accumulate).backward()
            if number % accumulate == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return weights_of(model)


def check(found: Tensor, expected: Tensor) -> None:
    """The weights are equal to rounding, and were trained."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert float((expected - weights_of(Reader())).abs().max()) > 0.1


def loss_of(model: Callable[[Any], tuple[Tensor, Tensor]], pack: Any, step: tdi.Step) -> Tensor:
    """The mean over the tokens of the global batch, under ``strategy.scope()``."""
    losses, counts = model(pack)
    return tdi.average_loss(losses, step, weights=counts)
