"""The lines of Python that a newcomer reads run as they stand; the first ones in one process and under torchrun."""

from __future__ import annotations

import gzip
import itertools
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support.interpreters import ROOT, Interpreters, printed

RELEASE = runpy.run_path(str(ROOT / "scripts" / "build_release.py"))
BEFORE, AFTER = RELEASE["BEFORE"], RELEASE["AFTER"]


def snippets(file: str) -> list[str]:
    found: list[str] = RELEASE["snippets"]((ROOT / file).read_text())
    return found


def first_snippet() -> str:
    return snippets("README.md")[0]


def test_the_first_snippet_gives_the_same_weights_in_one_process_in_two_and_resumed_by_two(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    whole = BEFORE + first_snippet() + AFTER
    short = whole.replace("range(loader.epoch, 3)", "range(loader.epoch, 1)")
    assert short != whole
    for name, text in {"train.py": whole, "short.py": short}.items():
        (tmp_path / name).write_text(text)

    def results(*names: str) -> list[str]:
        return [(tmp_path / f"{name}.txt").read_text() for name in names]

    def script(name: str) -> str:
        return str(tmp_path / name)

    printed(interpreters.run([script("train.py")], folder=tmp_path))
    (tmp_path / "checkpoint.pt").unlink()
    printed(interpreters.run_as_torchrun(2, script("train.py"), folder=tmp_path))
    (alone, *together) = results("1-0", "2-0", "2-1")
    assert alone.startswith("steps 3 accuracy 0.")
    assert together == [alone, alone]
    (tmp_path / "checkpoint.pt").unlink()
    printed(interpreters.run([script("short.py")], folder=tmp_path))
    printed(interpreters.run_as_torchrun(2, script("train.py"), folder=tmp_path))
    assert results("2-0", "2-1") == [alone, alone]
    assert results("1-0") != [alone]


# -------------------------------------------------------------------------------------------------- all others


def names() -> dict[str, Any]:
    """What the snippets take as given."""
    torch.manual_seed(0)
    strategy = tdi.Strategy(["cpu"])
    x, y = torch.randn(30, 4), torch.randint(0, 3, (30,))
    model = torch.nn.Linear(4, 3)
    train = TensorDataset(x, y)
    return {
        "torch": torch,
        "tdi": tdi,
        "F": F,
        "DataLoader": DataLoader,
        "TensorDataset": TensorDataset,
        "itertools": itertools,
        "strategy": strategy,
        "x": x,
        "y": y,
        "train": train,
        "model": model,
        "to_tensors": to_tensors,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "test_loader": DataLoader(train, batch_size=8),
        "loader": strategy.distribute_dataset(DataLoader(train, batch_size=8, shuffle=True)),
    }


def to_tensors(record: Any) -> torch.Tensor:
    return torch.tensor(record["number"])


def token_names() -> dict[str, Any]:
    """The same, where the samples are texts."""
    given = names()
    given["model"] = torch.nn.Sequential(torch.nn.Embedding(5, 6), torch.nn.Flatten(0, 1), torch.nn.Linear(6, 5))
    given["model"].append(torch.nn.Unflatten(0, (-1, 7)))
    given["model"].append(Last())
    words = torch.randint(0, 5, (30, 7))
    tokens = TensorDataset(words, words, torch.ones(30, 7))
    given["loader"] = given["strategy"].distribute_dataset(DataLoader(tokens, batch_size=8))
    return given


class Last(torch.nn.Module):
    """The classes where ``cross_entropy`` has them."""

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.transpose(1, 2)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_all_other_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    with gzip.open("logs/a.jsonl.gz", "wt") as log:
        log.writelines(json.dumps({"number": number}) + "\n" for number in range(20))
    for snippet in snippets("README.md")[1:]:
        given = token_names() if "text, targets, mask" in snippet else names()
        lines = snippet.rstrip()
        last = lines.splitlines()[-1].partition("#")[0].rstrip()
        exec(compile(lines + ("\n    pass" if last.endswith(":") else ""), "README.md", "exec"), given)
        assert next(iter(given["loader"])) is not None, snippet
