"""The page of a report: whole, without anything from outside, and seen in a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import Page
from tests.support.simulated_trace import MS, Simulation, Straggler, simulate
from torchdistinput.__main__ import main

FILE = "s3://bucket/<web>/web-0193.tar"
STRAGGLER = Straggler(2, "getitem", 50, range(5, 40, 6), FILE)
FACTS: dict[str, Any] = {"step_facts": {"cost": 1234.5}, "stop_facts": {"shares": {"web": 60, "code": 20}}}
TITLES = [
    *("Ranks and stages", "Waits over time", "The last steps", "Who made the others wait, and when"),
    *("What late ranks did while others waited", "Files that were waited for", "Sizes and costs of the parts"),
    "Shares of the mixture",
]
VOID = {"meta", "br", "rect", "path", "line", "polyline"}


class Structure(HTMLParser):
    """What a page is made of; fails on an element that is not closed where it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.heads: list[int] = []
        self.cells: list[int] = []
        self.untitled: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.open and self.open[-1] == "svg" and tag != "title" and self.tags[-1][0] == "svg":
            self.untitled.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            (self.heads if "thead" in self.open else self.cells).append(0)
        if tag in {"th", "td"}:
            counted = self.heads if "thead" in self.open else self.cells
            counted[-1] += 1
            assert tag == "td" or dict(attrs).get("scope") in {"col", "row"}

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def made(folder: Path, what: Simulation) -> str:
    simulate(folder, what)
    assert main(["report", str(folder), "--html", str(folder / "report.html")]) == 0
    return (folder / "report.html").read_text()


def structure(page: str) -> Structure:
    found = Structure()
    found.feed(page)
    found.close()
    assert not found.open
    return found


@pytest.mark.parametrize("world", [1, 4, 40])
def test_the_page_is_whole_and_has_nothing_from_outside(
    world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = min(2, world - 1)
    straggler = Straggler(rank, "getitem", 50, range(5, 40, 6), FILE)
    page = made(tmp_path, Simulation(world=world, steps=40, stragglers=[straggler], **FACTS))
    told = capsys.readouterr().out
    found = structure(page)
    who = "the training loop waited " if world == 1 else "rank 2 made the others wait "
    assert told.startswith(who)
    assert f"most of that in {FILE}" in told
    assert "s3://bucket/&lt;web&gt;/web-0193.tar" in page
    assert FILE not in page
    alone = [title for title in TITLES if not title.startswith("Who")]
    alone[alone.index("What late ranks did while others waited")] = "What the loop waited for"
    assert found.titles == (alone if world == 1 else TITLES)
    assert not found.untitled
    assert {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "object"} == set()
    for _, attributes in found.tags:
        assert not attributes.keys() & {"src", "href", "xlink:href", "onload"}
    assert not re.findall(r"url\((?!#hatch\))|@import|http://(?!www\.w3\.org/2000/svg)|https://", page)
    assert len(page) < 200_000
    rows = 1 if world == 1 else 4 if world == 4 else 16 + 3
    assert found.cells.count(found.heads[0]) >= rows
    assert ("16 of 40 ranks" in page) == (world == 40)
    assert "1.000" in page  # the cost beside the mean
    assert "75.0 %" in page  # the share of "web"


def test_the_numbers_as_json_are_those_that_were_planted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = simulate(tmp_path, Simulation(world=3, steps=40, stragglers=[STRAGGLER]))
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == {**told["verdict"], "rank": 2, "stage": "getitem", "file": FILE, "input_bound": True}
    for rank in told["ranks"]:
        assert rank["times"]["waiting"] == pytest.approx(truth.waits[rank["rank"]] / 1e9, rel=0.001)
        assert rank["steps"] == 40
        assert sum(rank["waiting"]) * told["seconds"] / 60 == pytest.approx(rank["times"]["waiting"], rel=0.001)
    late = told["ranks"][2]
    assert late["last"] >= len(STRAGGLER.steps)
    assert sum(late["times"]["late_in"].values()) == pytest.approx(late["times"]["made_wait"])
    # What is planted, less what two steps ahead and the one in training hide.
    hidden = 3 * 10 * MS
    assert late["times"]["made_wait"] <= len(STRAGGLER.steps) * 50 * MS / 1e9
    assert late["times"]["made_wait"] >= len(STRAGGLER.steps) * (50 * MS - hidden) / 1e9 - 0.01


@pytest.mark.parametrize("world", [4, 300])
def test_the_page_can_be_read_in_a_browser_on_a_desk_and_on_a_phone(
    world: int, tmp_path: Path, all_cells: bool
) -> None:
    if not all_cells:
        pytest.skip("opens a browser: run with --all")
    made(tmp_path, Simulation(world=world, steps=40, stragglers=[STRAGGLER], **FACTS))
    with Page(tmp_path / "browser") as page:
        for width in (1280, 375):
            page.open((tmp_path / "report.html").as_uri(), width)
            assert page.evaluate("document.documentElement.scrollWidth") <= width  # only tables and pictures scroll
            heights = page.evaluate("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().height)")
            assert len(heights) == 3
            assert min(heights) > 40
            size = "Math.min(...[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height))"
            assert page.evaluate(size) > 9
            assert page.evaluate("document.querySelector('.verdict').innerText").startswith("rank 2 made the others")
            assert page.evaluate("performance.getEntriesByType('resource').length") == 0
            page.picture(tmp_path / f"{width}.png")
            assert (tmp_path / f"{width}.png").stat().st_size > 20_000
