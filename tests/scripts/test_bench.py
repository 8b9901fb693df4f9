"""``scripts/bench.py`` says what there is, runs, and writes figures that can be read again."""

from __future__ import annotations

import importlib
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CASES = {
    "analyze", "balance", "coordination", "decode", "files", "memory", "overhead", "packing", "parquet", "ranks",
    "resume", "rss", "shuffle", "start", "tar", "tracing",
}  # fmt: skip
SCRIPTS = Path(__file__).parents[2] / "scripts"

Main = Callable[[list[str]], int]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    called: Main = runpy.run_path(str(SCRIPTS / "bench.py"))["main"]
    return called


def test_the_cases_are_listed_with_a_sentence_each(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(listed) == CASES
    assert all(said.endswith(".") for said in listed.values())


def test_a_small_run_prints_tables_and_writes_the_same_figures(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert main(["shuffle", "--small", "--rounds", "2", "--only", "tdi", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["small"] is True
    assert found["machine"]["versions"].keys() >= {"torch", "numpy"}
    assert found["machine"]["cores"] >= 1
    (table,) = found["tables"]
    assert (table["case"], table["world"]) == ("shuffle", 1)
    names = ["tdi.ShuffleSampler", "tdi.ShuffleSampler, in blocks"]
    assert [(row["name"], row["kind"], row["failure"]) for row in table["rows"]] == [
        (name, "ours", "") for name in names
    ]
    row = table["rows"][0]
    for each in table["rows"]:
        assert set(each["rounds"]) == set(each["median"]) == set(table["columns"])
        assert all(len(rounds) == 2 for rounds in each["rounds"].values())
    target = table["targets"][0]
    assert target["value"] == row["median"][target["column"]]
    assert target["met"] is (target["value"] <= target["at_most"])
    assert f"### {table['title']}" in printed
    assert "| **tdi.ShuffleSampler** |" in printed


@pytest.mark.usefixtures("main")
def test_ratios_are_those_of_the_same_round() -> None:
    """The machine may be slow in one round; both are, then."""
    model, running = importlib.import_module("benches.model"), importlib.import_module("benches.running")
    figures = {"ours": [2.0, 20.0, 4.0], "near": [6.0, 60.0, 100.0], "far": [90.0, 90.0, 90.0]}
    rows = [running.Row(model.Contender(name, "peer", dict), {"us": rounds}) for name, rounds in figures.items()]
    table = model.Table("", (model.Column("us", "less", model.largest("us")),), ())

    def reached(*target: Any, better_by: bool = True) -> Any:
        return running.reached(model.Target("us", *target, better_by=better_by), table, rows)

    found = reached("ours", 3.0, ("far", "near", "absent"))
    assert (found.value, found.other, found.met) == (3.0, "near", True)
    assert reached("ours", 3.0).met is False
    assert reached("ours", 0.5, ("near",), better_by=False).met is True
    assert reached("absent", 3.0).met is None
