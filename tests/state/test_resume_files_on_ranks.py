"""Resuming in the middle of files: batch by batch at the same world, each record once at another."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.support.epochs import Raised, raised
from tests.support.resume import Delivered, Run, Saved, steps
from torchdistinput import readers
from torchdistinput.testing import run_ranks

SIZES = (5, 0, 9, 3, 1, 7, 4, 12)
"""Records of each file; record r of file f says 100 f + r."""
ALL = Counter(100 * file + record for file, size in enumerate(SIZES) for record in range(size))
G, EPOCHS = 4, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to read the files.

    Args:
      order: arguments of the ``FileDataset``.
      through: arguments of a ``DataLoader``; ``None`` without one.
      policy: FILE or DATA.
      prefetch: steps ahead.
      replicas: of each process.
      assignment: how FILE divides the files.
      by_cost: whether batches are divided by the costs of their records.
    """

    order: dict[str, Any]
    through: dict[str, Any] | None
    policy: str = "FILE"
    prefetch: int = 2
    replicas: int = 1
    assignment: Literal["in_turn", "by_size"] = "in_turn"
    by_cost: bool = False

    @property
    def workers(self) -> Sequence[int]:
        """Numbers of loader workers with which it is taken up; none for a case without any."""
        if not self.through or not self.through.get("num_workers"):
            return ()
        return (2,) if self.through.get("persistent_workers") else (0, 2, 1)

    @property
    def drops(self) -> bool:
        return bool(self.through and self.through.get("drop_last"))


MIXED = {"shuffle_files": True, "shuffle_buffer": 4, "cycle_length": 3, "block_length": 2}
CASES = {
    "in order, bare": Case({}, None, prefetch=0),
    "mixed, bare": Case(MIXED, None),
    "mixed, loader": Case(MIXED, {}, prefetch=5),
    "mixed, 2 loader workers": Case(MIXED, {"num_workers": 2}, prefetch=1),
    "interleaved, 2 workers that persist": Case(
        {"cycle_length": 2}, {"num_workers": 2, "persistent_workers": True}, prefetch=0
    ),
    "windows, loader": Case({"shuffle_buffer": 3, "shuffle_files": True}, {}, prefetch=1, replicas=2),
    "mixed, drop last": Case(MIXED, {"drop_last": True}),
    "mixed, drop last, 2 loader workers": Case(MIXED, {"drop_last": True, "num_workers": 2}),
    "by size, mixed, loader": Case(MIXED, {}, assignment="by_size"),
    "by size, in order, 2 loader workers": Case({}, {"num_workers": 2}, assignment="by_size"),
    "DATA, mixed, bare": Case(MIXED, None, "DATA", replicas=2),
    "DATA, mixed, 2 loader workers": Case(MIXED, {"num_workers": 2}, "DATA", prefetch=0),
    "DATA, in order, drop last": Case({}, {"drop_last": True}, "DATA"),
    "by cost, mixed, bare": Case(MIXED, None, by_cost=True),
    "by cost, windows, loader": Case({"shuffle_buffer": 3}, {}, prefetch=1, replicas=2, by_cost=True),
    "by cost, mixed, 2 loader workers": Case(MIXED, {"num_workers": 2}, by_cost=True),
    "DATA, by cost, mixed, bare": Case(MIXED, None, "DATA", replicas=2, by_cost=True),
}


def write(folder: Path) -> None:
    for file, size in enumerate(SIZES):
        (folder / f"{file}.txt").write_text("".join(f"{100 * file + record}\n" for record in range(size)))


def cost_of(line: str) -> float:
    return int(line) % 7


def open_case(folder: str, name: str, num_workers: int | None = None, prefetch: int | None = None) -> Run:
    """One rank: a fresh run, read as the case says or otherwise."""
    case = CASES[name]
    files = tdi.FileDataset(folder + "/?.txt", readers.text_lines, map_fn=int, seed=9, **case.order)
    policy = tdi.AutoShardPolicy[case.policy]
    options = tdi.InputOptions(
        auto_shard_policy=policy,
        prefetch=case.prefetch if prefetch is None else prefetch,
        file_assignment=case.assignment,
        balance=cost_of if case.by_cost else None,
    )
    strategy = tdi.Strategy(devices=["cpu"] * case.replicas)
    if case.through is None:
        dataset = strategy.distribute_dataset(files, options, global_batch_size=G)
    else:
        more = {**case.through, **({} if num_workers is None else {"num_workers": num_workers})}
        dataset = strategy.distribute_dataset(DataLoader(files, batch_size=G, **more), options)
    return Run(dataset, lambda element: [each.tolist() for each in strategy.local_results(element)])


Recorded = tuple[list[Delivered], list[Saved]]


def read_with_states(folder: str, names: Sequence[str]) -> dict[str, Recorded]:
    """One rank: the epochs of each case, and every state."""
    found = {}
    for name in names:
        with (run := open_case(folder, name)).loader:
            delivered: list[Delivered] = []
            states = [run.save(0)]
            for _ in range(EPOCHS):
                for element in run.loader:
                    delivered.append((run.loader.step.epoch, run.loader.step.index, run.parts(element)))
                    states.append(run.save(len(delivered)))
                states.append(run.save(len(delivered)))
        found[name] = delivered, states
    return found


def go_on(
    folder: str, states: dict[str, list[Saved]], until: int | None
) -> dict[str, list[tuple[list[Delivered], Saved]]]:
    """One rank: what comes after each state, for so many steps or to the end, and the state then.

    Every fourth reads on to the end of the last epoch, the others to the end of the one that was left. A run without
    loader workers takes up all the states, one after the other; with them, each has a run of its own.
    """
    found: dict[str, list[tuple[list[Delivered], Saved]]] = {}
    for name, of_case in states.items():
        case, found[name] = CASES[name], []
        run = open_case(folder, name, prefetch=1)
        for number, saved in enumerate(of_case):
            if case.workers:
                run.loader.close()
                run = open_case(folder, name, case.workers[number % len(case.workers)], prefetch=number % 3)
            run.load(saved)
            after = list(steps(run, until, epochs=last_epoch(number, saved)))
            found[name].append((after, run.save(saved.done + len(after))))
        run.loader.close()
    return found


def last_epoch(number: int, saved: Saved) -> int:
    """Before which epoch the run from the state of that number ends."""
    return EPOCHS if number % 4 == 0 else min(EPOCHS, int(saved.state["epoch"]) + 1)


def samples_of(delivered: Sequence[Delivered], epoch: int) -> Counter[int]:
    return Counter(sample for each, _, parts in delivered if each == epoch for part in parts for sample in part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("files")
    write(made)
    return str(made)


@pytest.fixture(scope="module")
def recorded(folder: str) -> list[dict[str, Recorded]]:
    """What each of two ranks read undisturbed, with all states."""
    return run_ranks(2, read_with_states, folder, list(CASES))


def chosen(name: str, states: Sequence[Saved], *, everything: bool) -> list[Saved]:
    """All states of a case, or every fifth; a few where each costs the start of loader workers."""
    if CASES[name].workers:
        return list(states[:: 1 + len(states) // (6 if everything else 2)])
    return list(states if everything else states[list(CASES).index(name) % 5 :: 5])


def test_the_states_are_equal_on_every_rank_and_the_epochs_complete(recorded: list[dict[str, Recorded]]) -> None:
    first, second = recorded
    for name, case in CASES.items():
        assert first[name][1] == second[name][1], name
        for epoch in range(EPOCHS):
            together = samples_of(first[name][0], epoch) + samples_of(second[name][0], epoch)
            assert together == ALL or (case.drops and together <= ALL), name


def test_at_the_same_world_every_state_goes_on_batch_by_batch(
    folder: str, recorded: list[dict[str, Recorded]], all_cells: bool
) -> None:
    """Other read-ahead, other numbers of loader workers; the epochs after are equal too."""
    states = {name: chosen(name, of_case, everything=all_cells) for name, (_, of_case) in recorded[0].items()}
    for rank, found in enumerate(run_ranks(2, go_on, folder, states, None, timeout_seconds=180)):
        for name, (delivered, _) in recorded[rank].items():
            for number, (saved, (after, _)) in enumerate(zip(states[name], found[name], strict=True)):
                end = last_epoch(number, saved)
                assert after == [each for each in delivered[saved.done :] if each[0] < end], (name, rank, saved)


def test_at_other_worlds_each_record_comes_once_and_the_next_epoch_is_that_of_its_world(
    folder: str, recorded: list[dict[str, Recorded]], all_cells: bool
) -> None:
    """Two ranks, then three for two steps, then one, or four with ``--all-cells``; from every second state."""
    states = {}
    for place, (name, (_, of_case)) in enumerate(recorded[0].items()):
        first_epoch = [saved for saved in of_case if saved.state["epoch"] == 0]
        found = chosen(name, first_epoch, everything=all_cells)
        states[name] = found[place % 2 :: 1 if CASES[name].workers else 2]
    three = run_ranks(3, go_on, folder, states, 2, timeout_seconds=180)
    later = {name: [saved for _, saved in found] for name, found in three[0].items()}
    for rank in three[1:]:
        assert {name: [saved for _, saved in found] for name, found in rank.items()} == later
    worlds = (1, 4) if all_cells else (1,)
    for place, world in enumerate(worlds):
        names = list(CASES)[place :: len(worlds)]
        ranks = run_ranks(
            world, undisturbed_and_resumed, folder, {name: later[name] for name in names}, timeout_seconds=180
        )
        undisturbed, last = ([rank[part] for rank in ranks] for part in range(2))
        for name in names:
            check_records(name, states[name], later[name], [recorded, three, last], undisturbed)
            if CASES[name].policy == "DATA":
                check_data(name, states[name], [recorded, three, last], undisturbed)


def undisturbed_and_resumed(folder: str, states: dict[str, list[Saved]]) -> tuple[Any, Any]:
    """One rank: what each case gives in this world from the start, and from each state."""
    return read_with_states(folder, list(states)), go_on(folder, states, None)


def check_records(
    name: str, states: Sequence[Saved], later: Sequence[Saved], parts: Sequence[Any], undisturbed: Any
) -> None:
    """Each record of the first epoch came once; the next one is that of an undisturbed run in the last world."""
    first, three, last = parts
    for number, (saved, resumed_at) in enumerate(zip(states, later, strict=True)):
        total = sum((samples_of(rank[name][0][: saved.done], 0) for rank in first), Counter[int]())
        for rank in (*three, *last):
            total += samples_of(rank[name][number][0], 0)
        missing = ALL - total
        assert total <= ALL, (name, len(last), saved, total - ALL)
        short_batches = (2 + 3 + len(last)) * (G - 1)
        assert not missing or (CASES[name].drops and missing.total() <= short_batches), (name, saved, missing)
        for rank, alone in zip(last, undisturbed, strict=True):
            found = [each for each in rank[name][number][0] if each[0] == 1]
            end = last_epoch(number, resumed_at)
            whole = resumed_at.state["epoch"] == 0
            assert not whole or found == [each for each in alone[name][0] if each[0] == 1 < end], (name, saved)


def check_data(name: str, states: Sequence[Saved], parts: Sequence[Any], undisturbed: Any) -> None:
    """Under DATA the global batches are those of any other world, one by one."""

    def batches(ranks: Sequence[list[Delivered]]) -> list[list[int]]:
        rows = zip(*ranks, strict=True)
        found = [[sample for _, _, parts in row for part in parts for sample in part] for row in rows]
        return [sorted(batch) for batch in found] if CASES[name].by_cost else found

    first, three, last = parts
    whole = batches([rank[name][0] for rank in undisturbed])
    for number, saved in enumerate(states):
        found = batches([rank[name][0][: saved.done] for rank in first])
        found += batches([rank[name][number][0] for rank in three])
        found += batches([rank[name][number][0] for rank in last])
        assert found == whole[: len(found)], (name, saved)
        assert len(found) in (len(whole), len(whole) // EPOCHS)


def test_a_state_grows_little_with_the_files_in_progress(recorded: list[dict[str, Recorded]]) -> None:
    for name, case in CASES.items():
        texts = [saved.text for saved in recorded[0][name][1]]
        most = 4 * case.order.get("cycle_length", 1)  # of two workers, each of which may have opened the next ones
        for text in texts:
            in_progress = len(re.findall(r'"[0-9a-f]{8}\\?"', text))  # each has a mark
            assert in_progress <= most
            assert len(text) - len(texts[0]) < 64 * in_progress + 64, (name, text)


LONG_SIZES = (110, 17, 210, 0, 96, 133)


def open_long(folder: str, prefetch: int) -> Run:
    """One rank: enough steps for every kind of bookkeeping that is not done at each of them."""
    order = {"shuffle_files": True, "shuffle_buffer": 50, "cycle_length": 2, "block_length": 3}
    files = tdi.FileDataset(folder + "/?.txt", readers.text_lines, map_fn=int, seed=2, **order)  # type: ignore[arg-type]
    strategy = tdi.Strategy(devices=["cpu"])
    options = tdi.InputOptions(prefetch=prefetch, with_index=True)
    dataset = strategy.distribute_dataset(files, options, global_batch_size=4)
    return Run(dataset, lambda element: [[leaf.tolist() for leaf in element]])


def read_long(
    folder: str, saved: Saved | None, until: int | None, prefetch: int
) -> list[tuple[list[Delivered], Saved]]:
    """One rank: a part of the first epoch, and the state then; without a place to begin, also every 7th state."""
    with (run := open_long(folder, prefetch)).loader:
        if saved is not None:
            run.load(saved)
            found = list(steps(run, until, epochs=1))
            return [(found, run.save(saved.done + len(found)))]
        marks, delivered = [], []
        for step, element in enumerate(run.loader, 1):
            delivered.append((0, step - 1, run.parts(element)))
            if step % 7 == 0 or step in (63, 64, 65, 128, 129):
                marks.append((list(delivered), run.save(step)))
        return [*marks, (delivered, run.save(len(delivered)))]


def values_of(delivered: Sequence[Delivered]) -> Iterator[int]:
    """The records of one rank, whose indices tell their places."""
    for _, _, [(indices, values)] in delivered:
        for index, value in zip(indices, values, strict=True):
            assert index == value // 1000 * 2**40 + value % 1000
            yield value


def go_on_long(folder: str, states: Sequence[Saved], until: int | None) -> list[tuple[list[Delivered], Saved]]:
    """One rank: what comes after each state."""
    return [read_long(folder, saved, until, prefetch)[0] for prefetch, saved in zip(range(5), states, strict=False)]


def refused(folder: str, saved: Saved) -> tuple[Raised | None, Raised | None]:
    """One rank: what is raised when the state is loaded, and at the next ``iter``."""
    with (run := open_long(folder, 1)).loader:
        return raised(lambda: run.load(saved)), raised(lambda: next(iter(run.loader)))


def test_long_epochs_go_on_from_world_to_world(tmp_path: Path) -> None:
    for file, size in enumerate(LONG_SIZES):
        (tmp_path / f"{file}.txt").write_text("".join(f"{1000 * file + record}\n" for record in range(size)))
    everything = Counter(1000 * file + record for file, size in enumerate(LONG_SIZES) for record in range(size))
    folder = str(tmp_path)
    recorded = run_ranks(2, read_long, folder, None, None, 2)
    assert [saved for _, saved in recorded[0]] == [saved for _, saved in recorded[1]]
    wholes = [rank[-1][0] for rank in recorded]
    assert len(wholes[0]) > 150
    states = [recorded[0][place][1] for place in (8, 9, 10, 13, 22)]
    assert {63, 64} < {saved.done for saved in states}

    for whole, found in zip(wholes, run_ranks(2, go_on_long, folder, states, None), strict=True):
        assert [after for after, _ in found] == [whole[saved.done :] for saved in states]
    three = run_ranks(3, go_on_long, folder, states, 20)
    again = run_ranks(4, go_on_long, folder, [saved for _, saved in three[0]], None)
    for number, saved in enumerate(states):
        parts = [whole[: saved.done] for whole in wholes]
        parts += [rank[number][0] for rank in (*three, *again)]
        assert Counter(value for part in parts for value in values_of(part)) == everything, saved

    with (tmp_path / "2.txt").open("a") as grown:
        grown.write("7\n")
    for at_load, at_iter in run_ranks(2, refused, folder, states[3]):
        told = at_load or at_iter
        assert told is not None
        assert told.kind == "StateMismatch", told
        assert "2.txt" in told.message
