"""Folders of trace files that are not whole: what is said, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.simulated_trace import BASE_NS, MS, Simulation, simulate
from torchdistinput.__main__ import main
from torchdistinput.errors import InputError
from torchdistinput.report.read_trace import read_trace

FIRST = "rank-00000-3fa9c2d1.jsonl"
SECOND = "rank-00001-3fa9c2d1.jsonl"


def with_header(name: str, **changed: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        header, *lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join([json.dumps({**json.loads(header), **changed}) + "\n", *lines]))

    return change


def cut(name: str, length: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def only_header(*names: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for name in names or [path.name for path in folder.iterdir()]:
            (folder / name).write_text((folder / name).read_text().splitlines(keepends=True)[0])

    return change


def damage(folder: Path) -> None:
    lines = (folder / SECOND).read_text().splitlines(keepends=True)
    (folder / SECOND).write_text("".join([*lines[:3], '{"k": "vo\n', *lines[3:]]))


REFUSED = [
    (
        lambda folder: [path.unlink() for path in folder.iterdir()],
        r"no trace files \(rank-\*\.jsonl\): give the folder",
    ),
    (
        with_header(SECOND, run="other"),
        r"traces of 2 runs, (\w+ \([12] ranks, begun 20[-\d]* [:\d]*\)(, |: )){2}say which with --run NAME, or --run l",
    ),
    (with_header(SECOND, trace=2, version="0.9"), r"has form 2, of torchdistinput 0\.9; this one reads form 1"),
    (with_header(SECOND, trace=None), r"rank-00001-3fa9c2d1\.jsonl is no trace file: its first line has no 'trace'"),
    (with_header(SECOND, rank=0), r"rank 0 of run 3fa9c2d1 has two files"),
    (damage, r"rank-00001-3fa9c2d1\.jsonl, line 4: no JSON"),
    (only_header(), r"has no spans yet: no rank has delivered a step"),
    (lambda folder: (folder / SECOND).write_text("words\nmore\n"), r"is no trace file: its first line is no JSON"),
    (
        lambda folder: [path.write_text("") for path in folder.iterdir()],
        r"has trace files, and the first line of each is incomplete: rank-00000-\w+\.jsonl ends in its first line",
    ),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_is_no_trace_of_one_run_is_refused(
    change: Callable[[Path], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, Simulation(world=3, steps=4))
    change(tmp_path)
    with pytest.raises(InputError, match=words):
        read_trace(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("torchdistinput report: ")


TOLD = [
    (cut(SECOND, 900), ["the last line of rank 1 was cut", "the file of rank 1 ends within an epoch: it was killed"]),
    (lambda folder: (folder / SECOND).unlink(), ["1 of 3 ranks have no file here: 1; the others are shown without"]),
    (cut(SECOND, 30), [f"{SECOND} ends in its first line", "1 of 3 ranks have no file here: 1"]),
    (only_header(SECOND), ["rank 1 wrote no span, and is left out"]),
    (cut(SECOND, 0), [f"{SECOND} ends in its first line", "1 of 3 ranks have no file here: 1"]),
]


@pytest.mark.parametrize(("change", "words"), TOLD)
def test_a_trace_is_shown_as_far_as_it_goes_and_what_is_missing_is_said(
    change: Callable[[Path], object], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, Simulation(world=3, steps=9))
    change(tmp_path)
    notes = read_trace(tmp_path).notes
    assert len(notes) == len(words)
    assert all(note.startswith(told) for note, told in zip(notes, words, strict=True))
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "all.json")]) == 0
    assert words[0] in capsys.readouterr().err
    assert json.loads((tmp_path / "all.json").read_text())["otherData"]["notes"] == notes
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert words[0] in out
    assert out.startswith("of 2 of 3 ranks only, as no more have spans here: ") is (len(read_trace(tmp_path).files) < 3)


def test_the_record_of_a_killed_rank_that_ends_before_the_others_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, Simulation(world=3, steps=9, train=1_500 * MS))
    lines = (tmp_path / SECOND).read_text().splitlines(keepends=True)
    (tmp_path / SECOND).write_text("".join(lines[: len(lines) // 2]))
    assert main(["report", str(tmp_path)]) == 0
    assert re.findall(r"record of rank (\d) ends [1-9]\d* s before", capsys.readouterr().out) == ["1"]


def test_of_several_runs_one_is_chosen(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=2, steps=3))
    simulate(tmp_path, Simulation(world=3, steps=4, run="0a"))
    assert len(read_trace(tmp_path, "0a").files) == 3
    for path in tmp_path.glob("*-0a.jsonl"):
        with_header(path.name, base_ns=BASE_NS + 10**12)(tmp_path)
    assert len(read_trace(tmp_path, "latest").files) == 3
    with pytest.raises(InputError, match=r"no trace of run 7; it has 3fa9c2d1 \(2 ranks, .*\), 0a \(3 ranks, "):
        read_trace(tmp_path, "7")


def test_of_many_votes_the_messages_of_some_set_the_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(tmp_path, Simulation(world=4, steps=300))
    monkeypatch.setattr("torchdistinput.report.read_trace._MOST_MESSAGES", 0)
    votes = read_trace(tmp_path).votes
    assert all(128 <= kept.num_messages <= 256 and len(kept.key) == 300 for kept in votes.values())
    assert votes[0].messages[1].keys() == votes[1].messages[0].keys()
    shutil.rmtree(tmp_path)
