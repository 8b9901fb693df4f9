"""The pages of ``examples/``: their cells run, and print what the pages show."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchdistinput as tdi
from tests.support.interpreters import ROOT, Interpreters, printed

PAGES = [path for path in sorted((ROOT / "examples").rglob("*.md")) if "{code-cell}" in path.read_text()]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT / "examples").as_posix()


def head(page: Path, key: str) -> list[str]:
    """The words of a line between the first two rules of a page: ``packages`` that it needs, ``slow``."""
    found = re.search(rf"^{key}: (.*)$", page.read_text().split("---\n")[1], flags=re.MULTILINE)
    return found[1].strip("[]").replace(",", " ").split() if found else []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_cells_of_a_page_print_what_the_page_shows(page: Path, interpreters: Interpreters, all_cells: bool) -> None:
    missing = [name for name in head(page, "packages") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"could not import {', '.join(missing)}")
    if head(page, "slow") and not all_cells:
        pytest.skip("runs with --all")
    cells = page.read_text().count("\n```{code-cell}")
    assert printed(interpreters.run(["scripts/run_pages.py", str(page)])) == f"{page}: {cells} cells ran\n"


def test_python_that_is_no_cell_is_run_with_its_package() -> None:
    """By ``tests/ecosystem``, where the package is at hand."""
    for page in (ROOT / "examples").rglob("*.md"):
        for snippet in snippets(page.relative_to(ROOT).as_posix()):
            assert "torchdistinput.integrations.transformers" in snippet or "torchtitan." in snippet, snippet


def test_each_cell_of_tensorflows_guide_has_its_counterpart() -> None:
    """Fifteen code cells, and six pieces of code in its text."""
    page = (ROOT / "examples" / "guide.md").read_text()
    for number in [*range(1, 16), *"abcdef"]:
        assert re.search(rf"^\*\*Cell {number}[.:].*?^```{{code-cell}}", page, flags=re.DOTALL | re.MULTILINE), number
    cells = re.findall(r"^\*\*Cell (\w+)[.:]|^```{(code)-cell}", page, flags=re.MULTILINE)
    ours = "".join(first or "-" for first, _ in cells)
    assert not re.search(r"\w\w(?<!1\d)", ours), f"a cell without its counterpart: {ours}"


def test_every_public_name_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "examples").rglob("*.md")])
    assert [name for name in tdi.__all__ if not re.search(rf"\b{name}\b", pages)] == []


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


def test_the_main_job_learns_and_delivers_each_record_once_in_any_number_of_processes(
    interpreters: Interpreters,
) -> None:
    command = ("examples/train_text.py", "--files", "9", "--report-every", "2")
    for ended in (interpreters.run(command), interpreters.run_as_torchrun(2, *command)):
        output = printed(ended)
        losses = [float(loss) for loss in re.findall(r"loss (\S+) bits per byte", output)]
        assert len(losses) > 3, output
        assert losses[-1] < 0.7 * losses[0], output
        assert "each record was delivered exactly once" in output


def test_preprocessing_is_the_same_in_any_number_of_processes_and_goes_on_in_another(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    command = "examples/preprocessing.py"
    alone = printed(interpreters.run([command, "--folder", str(tmp_path / "alone")]))
    there = ("--folder", str(tmp_path / "moved"))
    before = printed(interpreters.run_as_torchrun(2, command, *there, "--stop-after", "2"))
    after = printed(interpreters.run([command, *there]))
    for pattern in (r"^\d+ modules; .*$", r"^packages .*$"):  # to the last bit
        assert re.findall(pattern, alone, re.M) == re.findall(pattern, before, re.M) == re.findall(pattern, after, re.M)
    figures = r"^(?:epoch \d: loss|accuracy|served without ranks:) (\S+)"
    expected = [float(each) for each in re.findall(figures, alone, re.M)]
    found = [float(each) for each in re.findall(figures, before, re.M)[:2] + re.findall(figures, after, re.M)]
    assert len(expected) == 7
    assert expected[4] < 0.9 * expected[0]
    assert found == pytest.approx(expected, abs=0.004)


def test_statistics_of_files_are_the_same_to_the_last_digit_in_one_process_and_in_two(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    command = ("examples/analyze.py", "--plot", str(tmp_path / "lengths.png"))
    alone = printed(interpreters.run(command))
    assert re.search(r"mean \d+\.\d{10,}, standard deviation", alone), alone
    assert printed(interpreters.run_as_torchrun(2, "examples/analyze.py")) == alone
    assert (tmp_path / "lengths.png").stat().st_size > 5_000


def test_the_evaluation_gives_exactly_the_metrics_of_one_process_in_any_number(interpreters: Interpreters) -> None:
    alone = printed(interpreters.run(["examples/evaluate.py"]))
    assert "1003 points, each once" in alone
    assert re.search(r"accuracy    9\d\d of 1003\nmedian loss 0\.\d+\nmean loss   0\.\d+\n", alone), alone
    for world in (2, 3):
        assert printed(interpreters.run_as_torchrun(world, "examples/evaluate.py")) == alone


def test_training_on_parquet_goes_on_in_an_epoch_and_is_the_same_in_one_process_and_in_two(
    interpreters: Interpreters,
) -> None:
    outputs = [
        printed(interpreters.run(["examples/train_parquet.py"])),
        printed(interpreters.run_as_torchrun(2, "examples/train_parquet.py")),
    ]
    alone, two = ([float(loss) for loss in re.findall(r"loss (\S+) over 8000 records", each)] for each in outputs)
    assert len(alone) == len(two) == 4
    assert alone[-1] < 0.5 * alone[0]
    assert all(abs(one - other) < 0.02 for one, other in zip(alone, two, strict=True))


def test_training_on_tar_archives_learns_in_any_number_of_processes(interpreters: Interpreters) -> None:
    command = "examples/train_tar.py"
    for ended in (interpreters.run([command]), interpreters.run_as_torchrun(2, command)):
        losses = [float(loss) for loss in re.findall(r"loss (\S+) over 720 samples, each once", printed(ended))]
        assert len(losses) == 3
        assert losses[-1] < 0.5 * losses[0]


def test_pretraining_killed_and_taken_up_by_other_numbers_of_processes_is_that_of_one_process(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    """The check of the example itself proves the order of the packs, and that each token came once."""
    command = ["examples/pretrain.py", "--documents", "8", "--every", "2"]
    end = r"(each token was delivered once: .*)\nnorm of the weights (\S+)"
    alone = re.search(end, printed(interpreters.run([*command, "--checkpoint", str(tmp_path / "alone")])))
    there = ("--checkpoint", str(tmp_path / "moved"))
    for world in (4, 2):
        killed = interpreters.run_as_torchrun(world, *command, *there, "--crash-after", "3")
        assert all(each.code for each in killed)
    moved = re.search(end, printed(interpreters.run_as_torchrun(3, *command, *there)))
    assert alone is not None
    assert moved is not None
    assert alone[1] == moved[1]
    assert float(alone[2]) == pytest.approx(float(moved[2]), abs=1e-6)


def test_the_report_of_a_run_with_a_slow_rank_names_the_rank_and_the_file(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    """A busy machine may hold another rank up for longer: then the run is made again."""
    words = r"rank 1 made the others wait \d.*most of that in \S+/images-0004\.bin; loader workers would help"
    told, place = "", tmp_path
    for place in (tmp_path / "look", tmp_path / "again", tmp_path / "at last"):
        told = printed(interpreters.run(["examples/look.py", "--folder", str(place)]))
        if re.match(words, told):
            break
    assert re.match(words, told), told
    assert "made the others wait" in (place / "report.html").read_text()
    assert (place / "trace.json.gz").stat().st_size > 10_000
