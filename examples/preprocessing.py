"""Preprocessing that is learned from a distributed dataset: analyse, train, save, go on elsewhere, serve.

    python examples/preprocessing.py
    torchrun --standalone --nproc-per-node 2 examples/preprocessing.py

The table has a row for each module of Python's standard library: its package, its size, the first line of its
documentation, and whether it defines a class, which the model learns to tell. The layers learn from the files of the
table, each rank from its own (policy FILE), and are the same to the last bit in any number of processes. The input
pipeline calls some of them, the model others. With ``--stop-after 2 --folder F`` the run stops after two epochs; the
same command without ``--stop-after``, in another number of processes, goes on as if it had not stopped.
"""

from __future__ import annotations

import argparse
import ast
import csv
import math
import re
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchdistinput as tdi
from torchdistinput import preprocessing
from torchdistinput.statistics import Counts, Moments, Quantiles

FILES = 8
EPOCHS = 5
GLOBAL_BATCH = 32


def write_table(folder: Path) -> None:
    """The table as CSV files."""
    library = Path(sysconfig.get_paths()["stdlib"])
    rows = []
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")])[:300]:
        if "site-packages" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # sources that test the parser
        line = (ast.get_docstring(tree) or "").partition("\n")[0]
        has_class = any(isinstance(node, ast.ClassDef) for node in tree.body)
        rows.append([path.parent.name, path.stat().st_size, len(tree.body), line, int(has_class)])
    for number in range(FILES):
        with (folder / f"{number}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["package", "bytes", "statements", "line", "label"], *rows[number::FILES]])


def table(folder: Path, column: str | None = None) -> tdi.FileDataset:
    """The rows of the table, or one of their columns."""

    def decode(row: dict[str, str]) -> Any:
        values = {**features(row), "label": float(row["label"])}
        return values if column is None else values[column]

    return tdi.FileDataset(str(folder / "*.csv"), tdi.readers.csv_rows, map_fn=decode)


def features(row: dict[str, str]) -> dict[str, Any]:
    """What the model reads of a row: the logarithms of the sizes, (2,), the package, and the line."""
    sizes = torch.tensor([math.log1p(float(row[name])) for name in ("bytes", "statements")])
    return {"sizes": sizes, "package": row["package"], "line": row["line"]}


def words_in(lines: list[str]) -> list[list[str]]:
    """The words of each line."""
    return [re.findall(r"\w+", line.lower()) for line in lines]


class Classifier(nn.Module):
    """The probability of a class; it holds the layers that it needs, so its state is all that a server needs.

    Args:
      folder: the files to learn the layers from; ``None`` where a state will be loaded.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.normalize = preprocessing.Normalization()
        self.package = preprocessing.StringLookup(max_tokens=20, output_mode="one_hot", pad_to_max_tokens=True)
        self.words = preprocessing.StringLookup(max_tokens=300, output_mode="multi_hot", pad_to_max_tokens=True)
        if folder is not None:
            self.normalize.adapt(table(folder, "sizes"))
            self.package.adapt(table(folder, "package"))
            self.words.adapt(DataLoader(table(folder, "line"), GLOBAL_BATCH, collate_fn=words_in))
        self.score = nn.Linear(2 + 20 + 300, 1)
        for parameter in self.score.parameters():
            nn.init.zeros_(parameter)  # equal in every run

    def encode(self, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor, Tensor]:
        """The strings of rows as numbers: sizes, other features, labels. Runs in the input pipeline."""
        package = self.package([row["package"] for row in rows]).float()
        words = torch.stack([self.words(each) for each in words_in([row["line"] for row in rows])]).float()
        labels = torch.tensor([row["label"] for row in rows])
        return torch.stack([row["sizes"] for row in rows]), torch.cat([package, words], dim=1), labels

    def forward(self, numbers: Tensor, features: Tensor) -> Tensor:
        """The logits, (batch,)."""
        logits: Tensor = self.score(torch.cat([self.normalize(numbers), features], dim=1)).squeeze(1)
        return logits


def serve(path: Path, row: dict[str, str]) -> float:
    """The probability for one row, from a saved state: no process group, no data, no table."""
    model = Classifier(None)
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    numbers, others, _ = model.encode([{**features(row), "label": 0.0}])
    probability: float = model(numbers, others).sigmoid().item()
    return probability


def train(strategy: tdi.Strategy, folder: Path, stop_after: int) -> None:
    """Trains, from a saved state if there is one."""
    is_first = strategy.input_pipeline_id == 0
    with strategy.scope():
        model = Classifier(folder)
        found = tdi.analyze(
            table(folder),
            {
                "package": Counts(top=3),
                "sizes": [Moments(), Quantiles(0.5)],
                "words": (lambda batch: words_in(batch["line"]), Counts(top=3)),
            },
        )
    if is_first:
        moments, median = found["sizes"]
        print(f"{moments.count[0]} modules; mean {moments.mean}, std {moments.std}, median {median} of the log sizes")
        print(f"packages {found['package'].values}; words {found['words'].values}")
    saved = folder / "saved.pt"
    loader = strategy.distribute_dataset(
        DataLoader(table(folder), GLOBAL_BATCH, collate_fn=model.encode),
        tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA),
    )
    first = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        first = state["epoch"]
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
    trained: nn.Module = model
    if strategy.num_input_pipelines > 1:
        trained = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(first, min(EPOCHS, stop_after)):
        totals = torch.zeros(2, dtype=torch.float64)
        for numbers, features, labels in loader:
            loss = F.binary_cross_entropy_with_logits(trained(numbers, features), labels, reduction="none")
            optimizer.zero_grad()
            tdi.average_loss(loss, loader.step).backward()
            optimizer.step()
            totals += torch.stack([loss.detach().double().sum(), torch.tensor(float(len(loss)))])
        loss_sum, samples = strategy.reduce("SUM", totals).tolist()
        if is_first:
            print(f"epoch {epoch}: loss {loss_sum / samples:.3f} over {samples:.0f} modules", flush=True)
            torch.save({"model": model.state_dict(), "loader": loader.state_dict(), "epoch": epoch + 1}, saved)
    evaluate(strategy, model, folder)
    if is_first:
        row = {"package": "json", "bytes": "20000", "statements": "40", "line": "Implementation of a decoder class"}
        print(f"served without ranks: {serve(saved, row):.3f}", flush=True)


def evaluate(strategy: tdi.Strategy, model: Classifier, folder: Path) -> None:
    """The accuracy; each worker makes its own pipeline, as in the guide, and calls the layers in it."""

    def dataset_fn(context: tdi.InputContext) -> DataLoader[Any]:
        rows = list(table(folder))[context.input_pipeline_id :: context.num_input_pipelines]
        return DataLoader(rows, batch_size=50, collate_fn=model.encode)  # type: ignore[arg-type] # a list is a dataset

    right = torch.zeros(2)
    for numbers, features, labels in strategy.distribute_datasets_from_function(dataset_fn):
        hits = (model(numbers, features) > 0) == (labels > 0.5)
        right += torch.tensor([float(hits.sum()), float(len(hits))])
    hits, count = strategy.reduce("SUM", right).tolist()
    if strategy.input_pipeline_id == 0:
        print(f"accuracy {hits / count:.3f} of {count:.0f}", flush=True)


def main() -> None:
    """Writes the table and trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="where the table and the state are; the same for all ranks")
    parser.add_argument("--stop-after", type=int, default=EPOCHS, help="epochs in all, before this run stops")
    arguments = parser.parse_args()
    strategy = tdi.Strategy(devices=["cpu"])
    with tempfile.TemporaryDirectory() as own:
        folder = arguments.folder or Path(own)
        if arguments.folder is None and strategy.num_input_pipelines > 1:
            # The first rank's folder for all, told as bytes.
            name = torch.zeros(256, dtype=torch.uint8)
            if strategy.input_pipeline_id == 0:
                name[: len(own.encode())] = torch.tensor(list(own.encode()), dtype=torch.uint8)
            folder = Path(bytes(strategy.reduce("SUM", name).tolist()).rstrip(b"\0").decode())
        folder.mkdir(parents=True, exist_ok=True)
        if strategy.input_pipeline_id == 0 and not (folder / "0.csv").exists():
            write_table(folder)
        strategy.reduce("SUM", torch.zeros(1))  # all ranks wait until the table is there
        train(strategy, folder, arguments.stop_after)
        strategy.reduce("SUM", torch.zeros(1))  # the first rank's folder stays until all ranks are done


if __name__ == "__main__":
    main()
