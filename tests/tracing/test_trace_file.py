"""The trace of each rank: what is in it, beside what the program itself saw; and that it never stands in the way."""

from __future__ import annotations

import gc
import gzip
import json
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Mapped, Together
from tests.support.interpreters import Interpreters
from tests.support.processes import in_fork
from tests.support.simulated_trace import MS, Simulation, Truth, simulate
from torchdistinput.__main__ import main
from torchdistinput.testing import run_ranks

SLEEP = 0.01
ROUNDING = 2e-6
"""Of a time in seconds to microseconds."""


def sleeping(index: int) -> torch.Tensor:
    """Sleeps at one index, and less at the others."""
    time.sleep(5 * SLEEP if index % 4 == 2 else SLEEP / 20)  # far longer than a busy machine takes
    return torch.tensor([index])


def lines_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The facts of each rank's file, and its slices and instants, by rank: all are whole, and of one run."""
    found = {}
    runs = set()
    for path in folder.glob("rank-*.json"):
        begin, *events = path.read_text().splitlines()
        assert begin == "["
        first, *lines = [json.loads(event.removesuffix(",")) for event in events]
        facts = first["args"]
        assert path.name == f"rank-{facts['rank']:05}-{facts['run']}.json"
        runs.add(facts["run"])
        assert {event["pid"] for event in lines} == {100_000 + facts["rank"]}
        found[facts["rank"]] = [facts, *(event for event in lines if event["ph"] != "M")]
    assert len(runs) == 1
    return found


def spans(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The args of the events of a kind, with when they began, ``t``, and how long they took, ``d``, in seconds."""
    events = [event for event in lines[1:] if event["cat"] == kind]
    return [{**event["args"], "t": event["ts"] / 1e6, "d": event.get("dur", 0.0) / 1e6} for event in events]


def run(folder: str, workers: int) -> list[tuple[float, float, int, int]]:
    """Each rank: when ``next`` was called and returned for each step, by ``perf_counter``, and its samples."""
    strategy = tdi.Strategy(devices=["cpu"])
    loader = DataLoader(Mapped(24, sleeping), batch_size=4, num_workers=workers)
    seen: list[tuple[float, float, int, int]] = []
    with strategy.distribute_dataset(loader, tdi.InputOptions(trace=folder)) as dataset:
        iterator = iter(dataset)
        while True:
            called = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return seen
            seen.append((called, time.perf_counter(), len(batch), dataset.step.global_size or 0))
            time.sleep(SLEEP / 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_spans_are_what_the_program_saw(workers: int, tmp_path: Path) -> None:
    before = time.time_ns()
    seen = run_ranks(2, run, str(tmp_path), workers)
    after = time.time_ns()
    found = lines_of(tmp_path)
    assert sorted(found) == [0, 1]
    for rank, lines in found.items():
        header = lines[0]
        assert header["form"] == 2
        assert (header["rank"], header["world_size"], header["replicas"]) == (rank, 2, 1)
        assert before <= header["base_ns"] <= after
        check_steps(lines, rank, workers, seen[rank])
        check_reads(lines, rank, workers)
        assert lines[-1]["name"] == "stop"
        assert lines[-1]["args"]["step"] == len(seen[rank]) == 6
    check_votes(found)


def check_steps(
    lines: list[dict[str, Any]], rank: int, workers: int, seen: list[tuple[float, float, int, int]]
) -> None:
    """Each span begins in the call that the program saw, and ends in it, by the one clock that both read."""
    steps = spans(lines, "step")
    assert [(line["step"], line["samples"], line["global"], line["bytes"]) for line in steps] == [
        (step, samples, size, 8 * samples) for step, (_, _, samples, size) in enumerate(seen)
    ]
    calls = [(called - ROUNDING, returned + ROUNDING) for called, returned, _, _ in seen]
    for step, (line, (called, returned)) in enumerate(zip(steps, calls, strict=True)):
        assert called - calls[0][1] <= line["t"] - steps[0]["t"] <= returned - calls[0][0]
        assert line["d"] >= SLEEP / 2
        if step + 1 < len(calls):
            assert calls[step + 1][0] - returned <= line["d"] <= calls[step + 1][1] - called
    waits = spans(lines, "wait")
    for line in waits:
        called, returned = calls[line["step"]]
        assert 0 < line["d"] <= returned - called
        assert sum(line["in"].values()) / 1e6 == pytest.approx(line["d"], abs=1e-5)
    if rank == 1 and not workers:  # ``next`` reads, and sleeps in one sample of each of its steps
        assert sum(line["d"] for line in waits) >= len(seen) * SLEEP


def costs_and_shares(folder: str) -> tuple[list[float], list[dict[str, int]]]:
    """The costs of this rank's samples in each step, and the samples of each source that it got in each iterator."""
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(trace=folder, balance=lambda index: float(index * index))
    with strategy.distribute_dataset(DataLoader(range(30), batch_size=8), options) as dataset:  # type: ignore[arg-type]
        costs = [float((batch**2).sum()) for batch in dataset]
    sources = {"web": range(100), "code": range(1000, 1100)}
    mixture = tdi.Mixture(sources, {"web": 0.7, "code": 0.3}, num_samples=60, with_source=True)
    shares = []
    options = tdi.InputOptions(trace=folder)
    with strategy.distribute_dataset(mixture, options, global_batch_size=8) as dataset:
        for until in (3, 99):  # left early; then the next epoch, whole
            counted: Counter[str] = Counter()
            for step, (names, _) in enumerate(dataset, 1):
                counted.update(names)
                if step == until:
                    break
            shares.append(dict(counted))
    return costs, shares


def test_costs_of_steps_and_shares_of_a_mixture(tmp_path: Path) -> None:
    seen = run_ranks(2, costs_and_shares, str(tmp_path))
    of_all = [dict(Counter(one) + Counter(other)) for one, other in zip(*(shares for _, shares in seen), strict=True)]
    for rank, lines in lines_of(tmp_path).items():
        assert [line["cost"] for line in spans(lines, "step") if "cost" in line] == seen[rank][0]
        assert [line["shares"] for line in spans(lines, "stop") if "shares" in line] == of_all


def check_reads(lines: list[dict[str, Any]], rank: int, workers: int) -> None:
    """Each step has one read; of its two samples, the one that sleeps is named, with the time that it slept."""
    draws, fetches = spans(lines, "draw"), spans(lines, "fetch")
    assert [line["step"] for line in draws] == [line["step"] for line in fetches] == list(range(6))
    for line in fetches:
        assert line["samples"] == 2
        assert 0 < line["getitem"] / 1e6 <= line["d"] + ROUNDING
        assert ("sampler" in line) == (workers == 0)
        if rank == 1:  # samples 2 and 3 of the batch
            assert line["getitem"] >= SLEEP * 1e6
        assert line.get("worker") == (line["step"] % workers if workers else None)
    if rank == 1:  # not in each step: on a busy machine other work may take longer
        assert any(line.get("index") == 4 * line["step"] + 2 for line in fetches)


def collate_slowly(samples: list[int]) -> torch.Tensor:
    time.sleep(5 * SLEEP)
    return torch.tensor(samples)


def taken_together(indices: list[int]) -> list[torch.Tensor]:
    """All samples of a batch at once: nobody sees which one is slow."""
    time.sleep(SLEEP)
    return [torch.tensor([index]) for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("loads", [(range(24), collate_slowly), (Together(24, taken_together), None)])
def test_no_sample_is_named_for_the_time_of_its_batch(loads: tuple[Any, Any], workers: int, tmp_path: Path) -> None:
    loader = DataLoader(loads[0], batch_size=4, num_workers=workers, collate_fn=loads[1])
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(loader, tdi.InputOptions(trace=str(tmp_path))) as data:
        assert sum(1 for _ in data) == 6
    (lines,) = lines_of(tmp_path).values()
    assert [line for line in spans(lines, "fetch") if "index" in line] == []


def check_votes(found: dict[int, list[dict[str, Any]]]) -> None:
    """Both ranks have the same votes, the votes cover each step once, and the two messages lie in between."""
    first, second = (spans(lines, "vote") for lines in (found[0], found[1]))
    assert [(line["vote"], line["step"], line["steps"]) for line in first] == [
        (line["vote"], line["step"], line["steps"]) for line in second
    ]
    assert sum(line["steps"] for line in first) == 6
    for rank, lines in ((0, first), (1, second)):
        for line in lines:
            ((peer, (sent, received)),) = line["peers"].items()
            assert peer == str(1 - rank)
            one, other = sorted((sent, received))  # rank 0 answers, with the sums
            assert (one, other) == ((received, sent) if rank == 0 else (sent, received))
            assert 1e6 * line["t"] <= one <= other <= 1e6 * (line["t"] + line["d"]) + 1
    assert "last" not in first[0]  # nobody is blamed for the first vote
    for a, b in zip(first[1:-1], second[1:-1], strict=True):
        assert (a["last"], a["made_wait"]) == (b["last"], b["made_wait"])
        assert sorted([a["late"], b["late"]]) == [0, a["made_wait"]]
        assert "in" not in (a, b)[1 - a["last"]]


def read_slowly(file: BinaryIO) -> Iterator[int]:
    for line in file:
        time.sleep(10 * SLEEP if line.startswith(b"slow") else 0)
        yield len(line)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_file_that_took_longest_is_named(workers: int, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(("slow\n" if number == 1 else "fast\n") * 3)
    dataset = tdi.FileDataset(f"{tmp_path}/*.txt", read_slowly)
    loader = DataLoader(dataset, batch_size=9, num_workers=workers)
    with tdi.Strategy(devices=["cpu"]).distribute_dataset(loader, tdi.InputOptions(trace=str(tmp_path / "t"))) as data:
        assert sum(1 for _ in data) == 1
    (lines,) = lines_of(tmp_path / "t").values()
    (line,) = spans(lines, "fetch")
    assert (line["file"], line["record"]) == (str(tmp_path / "1.txt"), 0)
    assert line["getitem"] >= 30 * SLEEP * 1e6


def test_two_loaders_and_two_epochs_are_told_apart_by_the_number_of_the_iterator(tmp_path: Path) -> None:
    strategy, options = tdi.Strategy(devices=["cpu"]), tdi.InputOptions(trace=str(tmp_path))
    train, valid = (strategy.distribute_dataset([torch.zeros(2)] * 3, options) for _ in range(2))
    for loader in (train, valid, train):
        assert sum(1 for _ in loader) == 3
    train.close()
    (lines,) = lines_of(tmp_path).values()
    stops = [(line["iterator"], line["epoch"], line["dataset"]) for line in spans(lines, "stop")]
    assert stops == [(0, 0, "1"), (1, 0, "2"), (2, 1, "1")]
    assert Counter(line["iterator"] for line in spans(lines, "step")) == {0: 3, 1: 3, 2: 3}
    assert len({event["tid"] for event in lines[1:] if event["cat"] == "step"}) == 2  # a dataset has its own tracks
    valid.close()


def test_the_environment_names_the_folder_and_options_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDISTINPUT_TRACE", str(tmp_path / "a"))
    data = [torch.zeros(2)] * 3
    for options in (None, tdi.InputOptions(trace=str(tmp_path / "b"))):
        with tdi.Strategy(devices=["cpu"]).distribute_dataset(data, options) as loader:
            assert sum(1 for _ in loader) == 3
    with tdi.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4)), batch_size=2) as drop_in:
        assert sum(1 for _ in drop_in) == 2
    assert [len(list((tmp_path / name).iterdir())) for name in "ab"] == [1, 1]
    assert len(spans(lines_of(tmp_path / "a")[0], "step")) == 3 + 2


def read_both_ways(folder: str) -> None:
    """The file stays one, also where the first strategy has ended before the second one comes."""
    os.environ["TORCHDISTINPUT_TRACE"] = folder
    data: Any = range(40)
    for _ in tdi.Strategy(devices=["cpu"]).distribute_dataset(DataLoader(data, 8)):
        pass
    gc.collect()
    options = tdi.InputOptions(trace=Path(folder))
    with (
        tdi.Strategy(devices=["cpu"]).distribute_dataset(DataLoader(data, 8), options) as train,
        tdi.DataLoader(data[:20], 4) as tests,
    ):
        for _ in range(2):
            assert sum(1 for _ in train) == sum(1 for _ in tests) == 5


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_program_of_a_strategy_and_a_drop_in_is_one_run(
    world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(world, read_both_ways, str(tmp_path))
    found = lines_of(tmp_path)
    assert sorted(found) == list(range(world))
    for lines in found.values():
        assert {line["iterator"] for line in spans(lines, "step")} == {0, 1, 2, 3, 4}
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [rank["steps"] for rank in told["ranks"]] == [25] * world
    assert sum(rank["samples"] for rank in told["ranks"]) == 3 * 40 + 2 * 20


def test_the_version_is_unknown_where_only_the_folder_of_the_package_is_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchdistinput.strategy.distributions", lambda *, name: iter(()))
    options = tdi.InputOptions(trace=str(tmp_path))
    with tdi.Strategy(devices=["cpu"]).distribute_dataset([torch.zeros(2)] * 3, options) as loader:
        assert sum(1 for _ in loader) == 3
    assert [lines[0]["version"] for lines in lines_of(tmp_path).values()] == ["unknown"]


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    strategy, options = tdi.Strategy(devices=["cpu"]), tdi.InputOptions(trace=str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.WARNING, logger="torchdistinput"):
        for _ in range(2):
            with strategy.distribute_dataset([torch.zeros(2)] * 3, options) as loader:
                assert sum(1 for _ in loader) == 3
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "torchdistinput"]
    assert warning.startswith("the trace of this rank ends here")
    assert str(tmp_path) in warning


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a full disk")
def test_a_full_disk_ends_the_trace_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: real("/dev/full" if "rank-" in str(path) else path, *more))
    options = tdi.InputOptions(trace=str(tmp_path))
    with (
        caplog.at_level(logging.WARNING, logger="torchdistinput"),
        tdi.Strategy(devices=["cpu"]).distribute_dataset([torch.zeros(2)] * 3, options) as loader,
    ):
        assert sum(1 for _ in loader) == 3
    assert [record.getMessage()[:32] for record in caplog.records] == ["the trace of this rank ends here"]


PROGRAM = """
import os, sys, torch, torchdistinput as tdi
loader = tdi.Strategy(devices=["cpu"]).distribute_dataset([torch.zeros(2)] * 5, tdi.InputOptions(trace=sys.argv[1]))
for step, _ in enumerate(loader):
    if step == 2:
        {end}
"""


@pytest.mark.parametrize(
    ("end", "steps"),
    [("raise ValueError", 3), ("sys.exit()", 3), ("break", 3), ("os.waitpid(os.fork(), 0)", 5), ("pass", 5)],
)
def test_the_file_is_whole_however_the_program_ends(
    end: str, steps: int, interpreters: Interpreters, tmp_path: Path
) -> None:
    """A fork, which goes on with its copy of the loop, writes nothing: not one line comes twice."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(end=end))
    (ended,) = interpreters.run([str(script), str(tmp_path / "trace")])
    assert ended.code == (end == "raise ValueError"), ended.errors
    (lines,) = lines_of(tmp_path / "trace").values()
    assert [line["step"] for line in spans(lines, "step")] == list(range(steps))
    assert [line["step"] for line in spans(lines, "stop")] == [steps]


def loop_in_fork(folder: str) -> None:
    with tdi.Strategy(devices=["cpu"]).distribute_dataset([torch.zeros(2)], tdi.InputOptions(trace=folder)) as loader:
        assert sum(1 for _ in loader) == 1


def test_a_fork_may_write_a_trace_of_its_own(tmp_path: Path) -> None:
    loop_in_fork(str(tmp_path / "parent"))
    in_fork(partial(loop_in_fork, str(tmp_path / "fork")))
    assert [
        len(spans(lines, "step")) for name in ("parent", "fork") for lines in lines_of(tmp_path / name).values()
    ] == [*(1, 1)]


Event = dict[str, Any]


def merged(folder: Path) -> Event:
    out = folder / "all.json.gz"
    assert main(["trace", str(folder), "-o", str(out)]) == 0
    found: Event = json.loads(gzip.decompress(out.read_bytes()))
    return found


def slices(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def check_form(events: list[Event]) -> None:
    """The rules of the form: keys, types, slices that nest on their track, arrows that start and end in slices."""
    for event in events:
        assert isinstance(event["pid"], int)
        assert event["pid"] > 0
        assert event["ph"] in {"X", "M", "i", "s", "f"}
        assert event["ph"] == "M" or isinstance(event["ts"], float | int)
    tracks = slices(events)
    for found in tracks.values():
        open_until: list[float] = []
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 2e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 2e-3, event
            open_until.append(end)
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in {"s", "f"}:
            arrows[event["id"]].append(event)
            around = [s for s in tracks[event["pid"], event["tid"]] if s["ts"] <= event["ts"] < s["ts"] + s["dur"]]
            assert around, event
    assert all(sorted(event["ph"] for event in ends) == ["f", "s"] for ends in arrows.values())
    named = {(event["pid"], event["tid"]) for event in events if event.get("name") == "thread_name"}
    assert named >= set(tracks)


def votes_of(events: list[Event], epoch: int, step: int) -> list[Event]:
    """The slices of a vote, by rank."""
    at = {"epoch": epoch, "step": step}.items()
    return [each for each in events if each.get("cat") == "vote" and at <= each["args"].items()]


def check_clocks(trace: Event, truth: Truth) -> None:
    """Of each two ranks, the times of their votes are apart as they were, to within the bounds of their clocks."""
    bound_of, votes = trace["otherData"]["bounds_ns"], defaultdict[tuple[int, int], list[Event]](list)
    for each in trace["traceEvents"]:
        if each.get("cat") == "vote":
            votes[each["args"]["epoch"], each["args"]["step"]].append(each)
    for (epoch, step), starts in truth.votes.items():
        first, *others = votes[epoch, step]
        for rank, vote in enumerate(others, 1):
            wrong = 1000 * (vote["ts"] - first["ts"]) - (starts[rank] - starts[0])
            assert abs(wrong) <= bound_of.get(f"node-{rank}", 0) + 10_000, (epoch, step, rank)


@pytest.mark.parametrize(("drift", "bound"), [(0.0, 0.2 * MS), (2e-5, 0.3 * MS), (-1e-4, 1.0 * MS)])
def test_clocks_that_are_wrong_and_drift_are_set_to_within_the_bound(
    drift: float, bound: float, tmp_path: Path
) -> None:
    truth = simulate(tmp_path, Simulation(world=6, steps=600, drift=drift, late=2, late_ns=5 * MS))
    trace = merged(tmp_path)
    assert 0 < max(trace["otherData"]["bounds_ns"].values()) < bound
    check_clocks(trace, truth)


def test_the_ranks_of_a_host_share_its_clock_and_a_host_without_messages_is_named(tmp_path: Path) -> None:
    truth = simulate(tmp_path, Simulation(world=4, hosts=["a", "a", "b", "b"]))
    trace = merged(tmp_path)
    assert trace["otherData"]["bounds_ns"].keys() == {"a", "b"}
    for starts, (_, one, two, three) in (
        (truth.votes[0, step], votes_of(trace["traceEvents"], 0, step)) for step in (0, 19)
    ):
        assert abs(1000 * (three["ts"] - two["ts"]) - (starts[3] - starts[2])) < 5_000
        assert abs(1000 * (two["ts"] - one["ts"]) - (starts[2] - starts[1])) < MS
    for path in tmp_path.glob("rank-*.json"):
        path.write_text(path.read_text().replace('"peers":{', '"peers":{},"were":{'))
    (note,) = merged(tmp_path)["otherData"]["notes"]
    assert note == "no messages tell how wrong the clocks of these hosts are: b"


def test_arrows_lead_from_who_came_last_to_all_who_waited(tmp_path: Path) -> None:
    what = Simulation(world=4, steps=20, epochs=2, late=2)
    simulate(tmp_path, what)
    trace = merged(tmp_path)
    events = trace["traceEvents"]
    check_form(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {100_000 + rank: f"rank {rank}" for rank in range(4)}
    for epoch, step in ((0, 5), (0, 11), (1, 5), (1, 11)):
        votes = votes_of(events, epoch, step)
        assert max(votes, key=lambda vote: vote["ts"])["pid"] == 100_002
        begins = {e["id"] for e in events if e["ph"] == "s" and e["pid"] == 100_002 and e["ts"] == votes[2]["ts"]}
        ends = [e for e in events if e["ph"] == "f" and e["id"] in begins]
        assert sorted(event["pid"] for event in ends) == [100_000, 100_001, 100_003]
        after = [e for e in events if e.get("cat") == "step" and e["args"]["step"] == step]
        assert {event["ts"] for event in ends} <= {event["ts"] for event in after}


def test_a_rank_that_was_killed_has_no_loose_arrows(tmp_path: Path) -> None:
    simulate(tmp_path, Simulation(world=3, late=2))
    path = tmp_path / "rank-00002-3fa9c2d1.json"
    path.write_text(path.read_text()[:6000])
    check_form(merged(tmp_path)["traceEvents"])
