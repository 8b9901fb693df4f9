"""Preprocessing with state, in the input pipeline and in the model, on any number of processes.

    python examples/preprocessing.py
    torchrun --standalone --nproc-per-node 2 examples/preprocessing.py

A lookup module turns words into numbers. Its vocabulary comes from a file that all processes can read; it is made under
``strategy.scope()`` and mirrored, so that it is the same everywhere. The input pipeline calls it, and the model asks it
how frequent the words are.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchdistinput as tdi

VOCABULARY = Path(__file__).with_name("vocabulary.txt")
MAX_WORDS = 8
GLOBAL_BATCH = 12
REVIEWS = [
    ("a warm and funny film", 1.0),
    ("dull and far too long", 0.0),
    ("a funny story with a warm heart", 1.0),
    ("the story is dull", 0.0),
    ("great cast and great songs", 1.0),
    ("long and cold", 0.0),
    ("a great heart", 1.0),
    ("cold songs and a stiff cast", 0.0),
] * 10


class WordLookup(nn.Module):
    """Numbers for words, from a file with a word and its count in each line: 0 is no word, 1 a word not in the file."""

    frequency: Tensor

    def __init__(self, vocabulary: Path) -> None:
        super().__init__()
        entries = [line.split() for line in vocabulary.read_text().splitlines()]
        self.numbers = {word: number for number, (word, _) in enumerate(entries, start=2)}
        counts = torch.tensor([1.0, 1.0, *(float(count) for _, count in entries)])
        self.register_buffer("frequency", counts / counts.sum())

    def forward(self, text: str) -> Tensor:
        """The numbers of the words of a text, filled up with 0, (MAX_WORDS,)."""
        numbers = [self.numbers.get(word, 1) for word in text.split()][:MAX_WORDS]
        return torch.tensor(numbers + [0] * (MAX_WORDS - len(numbers)))


class Classifier(nn.Module):
    """Adds up the scores of a text's words; a rare word weighs more than a frequent one."""

    def __init__(self, lookup: WordLookup) -> None:
        super().__init__()
        self.lookup = lookup
        self.score = nn.Embedding(len(lookup.frequency), 1, padding_idx=0)
        nn.init.zeros_(self.score.weight)

    def forward(self, words: Tensor) -> Tensor:
        """The logits, (batch,), for words (batch, MAX_WORDS)."""
        weights = -self.lookup.frequency[words].log()
        logits: Tensor = (self.score(words).squeeze(-1) * weights).sum(dim=1)
        return logits


def make_lookup() -> WordLookup:
    """A lookup that is the same on all replicas of the strategy in whose scope this is called."""
    lookup: WordLookup = tdi.get_strategy().mirror(WordLookup(VOCABULARY))
    return lookup


def main() -> None:
    """Trains a classifier of short reviews for a few epochs."""
    strategy = tdi.Strategy(devices=["cpu"])
    with strategy.scope():
        lookup = make_lookup()

    def dataset_fn(context: tdi.InputContext) -> DataLoader[tuple[Tensor, float]]:
        mine = REVIEWS[context.input_pipeline_id :: context.num_input_pipelines]
        samples = [(lookup(text), label) for text, label in mine]
        return DataLoader(samples, batch_size=context.get_per_replica_batch_size(GLOBAL_BATCH))  # type: ignore[arg-type]

    model: nn.Module = Classifier(lookup)
    if strategy.num_input_pipelines > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = strategy.distribute_datasets_from_function(dataset_fn)
    for epoch in range(5):
        totals = torch.zeros(2)
        for words, label in loader:
            loss = F.binary_cross_entropy_with_logits(model(words), label.float(), reduction="none")
            optimizer.zero_grad()
            tdi.average_loss(loss, loader.step).backward()
            optimizer.step()
            totals += torch.stack([loss.detach().sum(), torch.tensor(float(len(loss)))])
        loss_sum, samples = strategy.reduce("SUM", totals).tolist()
        if strategy.input_pipeline_id == 0:
            print(f"epoch {epoch}: loss {loss_sum / samples:.3f} over {samples:.0f} reviews", flush=True)


if __name__ == "__main__":
    main()
