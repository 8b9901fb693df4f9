"""The state itself: what it is made of, how large it is, that no talk is for it, and what is refused at its load."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import torchdistinput as tdi
from tests.data import Mapped
from tests.oracle.test_in_process import fake_strategy
from tests.support import inputs
from tests.support.collectives import FakeCollectives
from tests.support.resume import Run, Saved, Setting, iterables_may_be_skipped, known, record, run_of, steps
from torchdistinput import readers
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import Exchange

KEYS = {
    "version",
    "epoch",
    "step",
    "samples",
    "drawn",
    "sample_seed",
    "random",
    "position",
    "fingerprint",
}
KIB = 1024


def is_plain(value: Any) -> bool:
    """Whether this is made of ints, bools, strings and lists only: what any format can hold."""
    if isinstance(value, list):
        return all(is_plain(each) for each in value)
    return value is None or type(value) in (int, bool, str)


# --------------------------------------------------------------------------------------------- what it is made of


@pytest.mark.parametrize("name", inputs.LOADERS)
def test_a_state_has_the_same_keys_at_any_time_and_plain_values(name: str, tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    for setting in (Setting(), Setting(2, 2)):
        with iterables_may_be_skipped():
            run = run_of(known(name, tmp_path), setting)
            fresh = run.loader.state_dict()
            _, states = record(run, epochs=1)
        for state in (fresh, *(saved.state for saved in states)):
            assert set(state) == KEYS
            assert all(is_plain(value) for value in state.values()), state
            assert json.loads(json.dumps(state)) == state
        assert states[0].state == fresh


def test_a_state_whose_texts_and_numbers_are_of_subclasses_is_the_same_state() -> None:
    class Text(str):
        """As some formats hand out their strings."""

    class Number(int):
        """As some formats hand out their numbers."""

    def handed_on(value: Any) -> Any:
        if isinstance(value, list):
            return [handed_on(each) for each in value]
        return Text(value) if isinstance(value, str) else Number(value) if type(value) is int else value

    run = run_of(known("sequential", Path()), Setting())
    state = run.loader.state_dict()
    run.loader.load_state_dict({key: value if key == "version" else handed_on(value) for key, value in state.items()})
    assert run.loader.state_dict() == state


def test_a_state_is_that_of_its_time_whatever_comes_later() -> None:
    kept, written = [], []
    for _ in (run := run_of(shuffled, Setting(2, 2))).loader:
        kept.append(run.loader.state_dict())
        written.append(json.dumps(kept[-1]))
    assert [json.dumps(state) for state in kept] == written


def test_the_state_of_any_map_style_input_is_small() -> None:
    data = TensorDataset(torch.arange(1_000_000))
    weights = torch.ones(1_000_000)
    loaders: list[Callable[[], dict[str, Any]]] = [
        lambda: {"shuffle": True, "generator": inputs.generator()},
        lambda: {"shuffle": True},
        lambda: {"generator": inputs.generator(), "sampler": weighted(weights, inputs.generator(3))},
        lambda: {"sampler": weighted(weights, inputs.generator(3))},
        lambda: {"sampler": weighted(weights, None)},
    ]
    for arguments in loaders:
        for setting in (Setting(), Setting(2, 2)):
            run = run_of(lambda cls, **more: cls(data, batch_size=8, **arguments(), **more), setting)  # noqa: B023
            sizes = [len(run.save(0).text)]
            sizes += [len(run.save(0).text) for _ in steps(run, until=3)]
            run.loader.close()
            assert max(sizes) < 8 * KIB, sizes


def weighted(weights: torch.Tensor, generator: torch.Generator | None) -> WeightedRandomSampler:
    return WeightedRandomSampler(weights, 1000, generator=generator)  # type: ignore[arg-type]


def test_the_state_of_files_is_small_and_grows_little_with_the_files_in_progress(tmp_path: Path) -> None:
    for file in range(64):
        (tmp_path / f"{file:02}.txt").write_text(100_000 * "a line of text, as there are many\n"[: 30 + file % 3])

    def size_with(open_files: int) -> int:
        files = tdi.FileDataset(
            str(tmp_path / "*.txt"), readers.text_lines, shuffle_files=True, shuffle_buffer=256, cycle_length=open_files
        )
        run = run_of(lambda cls, **more: cls(files, batch_size=500, **more), Setting(1, 2))
        sizes = [len(run.save(0).text) for _ in steps(run, until=2 * open_files)]
        run.loader.close()
        return max(sizes)

    one, many = size_with(1), size_with(41)
    assert one < 1 * KIB
    assert many - one < 40 * 64


# ------------------------------------------------------------------------------------------------------ bad states


def shuffled(cls: Any = DataLoader, **more: Any) -> Any:
    return cls(range(23), batch_size=4, shuffle=True, generator=inputs.generator(), **more)


def resumed(state: Any, make: Callable[..., Any] = shuffled, setting: Setting | None = None, **how: Any) -> list[Any]:
    """Loads a state, and reads to the end of the second epoch."""
    run = run_of(make, setting or Setting(2, 2))
    try:
        run.loader.load_state_dict(state, **how)
        return list(steps(run, epochs=2))
    finally:
        run.loader.close()


def saved_after(step: int, make: Callable[..., Any] = shuffled, setting: Setting | None = None) -> dict[str, Any]:
    run = run_of(make, setting or Setting(2, 2))
    list(steps(run, until=step))
    state = run.save(step).state
    run.loader.close()
    return state


def test_a_state_of_a_newer_version_is_refused() -> None:
    state = saved_after(2)
    newer = {**state, "version": state["version"] + 1}
    with pytest.raises(tdi.StateMismatch, match=rf"(?s)version.*{state['version'] + 1}"):
        resumed(newer)
    with pytest.raises(tdi.StateMismatch, match="version"):
        resumed(newer, strict=False)


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_truncated_state_is_refused_naming_what_is_missing(key: str) -> None:
    state = saved_after(2)
    del state[key]
    for strict in (True, False):
        with pytest.raises(tdi.StateMismatch, match=rf"\b{key}\b"):
            resumed(state, strict=strict)


WRONG: dict[str, list[Any]] = {
    "version": ["1", None, 1.0, True, 0, -1, []],
    "epoch": ["0", None, 1.5, True, -1, [0]],
    "step": ["2", None, 2.0, True, -1, [2]],
    "samples": ["8", None, 8.0, False, -8],
    "drawn": ["a", None, 1.5, -1, []],
    "sample_seed": ["a", 1.5, True, []],
    "random": [None, "", {"a": 1}, ["not a state"], [7], [None], ["", ""], []],
    "fingerprint": [None, 5, "x", [5], [["one"]], [["length", 23, 7]], {"length": 23}],
    "position": [5, [], ["all"], ["every", []], ["all", ["map"]], ["all", 3], ["all", ["map", "2"]]],
}


@pytest.mark.parametrize("key", WRONG)
def test_a_damaged_state_is_refused(key: str) -> None:
    state = saved_after(2)
    for value in WRONG[key]:
        for strict in (True, False):
            damaged = {**state, key: value}
            if (key, strict) == ("fingerprint", False) and isinstance(value, dict):  # a difference that is accepted
                continue
            with pytest.raises(tdi.StateMismatch, match=r"as it was saved|the input|\bversion\b|\bposition\b"):
                resumed(damaged, strict=strict)


@pytest.mark.parametrize("setting", [Setting(), Setting(2, 2)])
def test_a_step_beyond_the_end_is_refused_naming_it_and_the_length(setting: Setting) -> None:
    state = saved_after(2)
    with pytest.raises(tdi.StateMismatch, match=r"(?s)\b7\b.*\b6\b"):
        resumed({**state, "step": 7}, setting=setting, strict=False)


def test_the_state_after_a_resume_whose_first_step_failed_is_the_one_that_was_loaded() -> None:
    failing: set[int] = set()

    def read(number: int) -> int:
        if number in failing:
            raise OSError("no disk")
        return number

    with tdi.Strategy(devices=["cpu"]).distribute_dataset(DataLoader(Mapped(8, read), batch_size=2)) as loader:
        next(iter(loader))
        state = loader.state_dict()
        assert state["drawn"]
        failing.add(2)
        loader.load_state_dict(state)
        with pytest.raises(tdi.SourceError, match="no disk"):
            next(iter(loader))
        assert loader.state_dict() == state


def numbers(n: int, **arguments: Any) -> Callable[..., Any]:
    return lambda cls, **more: cls(range(n), **{"batch_size": 4, **arguments}, **more)


def shuffled_list(cls: Any, **more: Any) -> Any:
    return cls(list(range(23)), batch_size=4, **more)


OTHER_INPUTS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "length": (numbers(24), {}, r"(?s)length.*\b2[34]\b.*\b2[34]\b"),
    "batch size": (numbers(23, batch_size=5), {}, r"(?s)batch size.*\b[45]\b.*\b[45]\b"),
    "drop_last": (numbers(23, drop_last=True), {}, r"(?s)drop_last.*(True|False).*(True|False)"),
    "sampler": (numbers(23, shuffle=True), {}, r"(?s)sampler.*(Sequential|Random)Sampler.*(Sequential|Random)Sampler"),
    "kind": (shuffled_list, {}, r"(?s)kind.*(range|list).*(range|list)"),
    "policy": (numbers(23), {"auto_shard_policy": tdi.AutoShardPolicy.OFF}, r"(?s)policy.*(OFF|DATA).*(OFF|DATA)"),
}


@pytest.mark.parametrize("field", OTHER_INPUTS)
def test_the_state_of_another_input_is_refused_naming_the_field_and_both_values(field: str) -> None:
    make, options, words = OTHER_INPUTS[field]
    run = run_of(make, Setting(2, 2), options)
    with pytest.raises(tdi.StateMismatch, match=words):
        run.loader.load_state_dict(saved_after(2, numbers(23)))


def files(folder: Path, pattern: str = "?.txt", **arguments: Any) -> Callable[..., Any]:
    dataset = tdi.FileDataset(str(folder / pattern), readers.text_lines, **{"seed": 1, **arguments})
    return lambda cls, **more: cls(dataset, batch_size=3, **more)


def test_the_state_of_other_files_or_another_order_is_refused(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    order: dict[str, Any] = {"shuffle_files": True, "shuffle_buffer": 3, "cycle_length": 2}
    state = saved_after(1, files(tmp_path, **order))
    others = {
        "seed": files(tmp_path, **order, seed=2),
        "number of files": files(tmp_path, "[abc].txt", **order),
        "shuffle_files": files(tmp_path, **{**order, "shuffle_files": False}),
        "shuffle_buffer": files(tmp_path, **{**order, "shuffle_buffer": 4}),
        "cycle_length": files(tmp_path, **{**order, "cycle_length": 3}),
        "block_length": files(tmp_path, **order, block_length=2),
    }
    for field, make in others.items():
        with pytest.raises(tdi.StateMismatch, match=field):
            resumed(state, make)
    (tmp_path / "b.txt").rename(tmp_path / "e.txt")
    with pytest.raises(tdi.StateMismatch, match="file list"):
        resumed(state, files(tmp_path, **order))


def test_a_file_that_changed_or_vanished_since_is_named_with_both_sizes(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    make = files(tmp_path)
    state = saved_after(1, make)  # three of the five numbers in a.txt
    (tmp_path / "a.txt").write_text("0\n1\n2\n3\n4\n5\n")
    with pytest.raises(tdi.StateMismatch, match=r"(?s)a\.txt.*\b1[02]\b.*\b1[02]\b"):
        resumed(state, make)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(tdi.StateMismatch, match=r"a\.txt"):
        resumed(state, make)
    (tmp_path / "a.txt").write_text("0\n1\n2\n3\n4\n")
    assert sum(len(part) for _, _, parts in resumed(state, make) for part in parts) == 9 + 12


@pytest.mark.parametrize("setting", [Setting(), Setting(2, 2)])
def test_loading_and_seeking_while_an_iterator_is_alive_are_refused(setting: Setting) -> None:
    run = run_of(shuffled, setting)
    state = run.loader.state_dict()
    iterator = iter(run.loader)
    next(iterator)
    go = partial(run.loader.seek, 0, 3)
    for call in (partial(run.loader.load_state_dict, state), go):
        with pytest.raises(tdi.InputError, match=r"(?i)iterator"):
            call()
    assert len(list(iterator)) == 5  # undisturbed
    run.loader.load_state_dict(state)
    assert len(list(steps(run, epochs=1))) == 6


@pytest.mark.parametrize(("epoch", "step"), [(0, 7), (-1, 0), (0, -1), (0, 1.5), ("0", 0), (True, 0)])
def test_seeking_to_what_is_no_step_is_refused(epoch: Any, step: Any) -> None:
    run = run_of(shuffled, Setting(2))

    def seek_and_read() -> None:
        run.loader.seek(epoch, step)
        list(steps(run, epochs=1))

    with pytest.raises((ValueError, TypeError, tdi.StateMismatch)):
        seek_and_read()
    run.loader.close()


# --------------------------------------------------------------------------------------------------- strict=False


def test_a_known_difference_is_accepted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    state = saved_after(2, numbers(23))
    with caplog.at_level(logging.WARNING, logger="torchdistinput"):
        rest = resumed(state, numbers(27), strict=False)
    first = [sample for epoch, _, parts in rest if epoch == 0 for part in parts for sample in part]
    assert first == list(range(8, 27))
    told = "\n".join(caplog.messages)
    assert re.search(r"(?s)length.*\b2[37]\b.*\b2[37]\b", told), told


def test_strict_false_is_proposed_only_where_the_state_can_be_taken_so(tmp_path: Path) -> None:
    inputs.write_numbers(tmp_path)
    generator = numbers(23, shuffle=True, generator=inputs.generator())
    taken = {
        "length": (numbers(23), numbers(27)),
        "kind": (numbers(23), shuffled_list),
        "seed": (files(tmp_path, shuffle_files=True), files(tmp_path, shuffle_files=True, seed=2)),
    }
    for field, (saved, here) in taken.items():
        state = saved_after(2, saved)
        with pytest.raises(tdi.StateMismatch, match=rf"(?s){field}: .*strict=False"):
            resumed(state, here)
        resumed(state, here, strict=False)
    refused = {
        "has 7 step": ({**saved_after(2, numbers(27)), "step": 7}, numbers(23)),
        "not one of files": (saved_after(2, numbers(23)), files(tmp_path)),
        "not one of map-style data": (saved_after(2, files(tmp_path)), numbers(23)),
        "generator": (saved_after(2, numbers(23)), generator),
        "the file has": (saved_after(2, files(tmp_path)), files(tmp_path, "b.txt")),
    }
    for words, (state, here) in refused.items():
        with pytest.raises(tdi.StateMismatch) as strictly:
            resumed(state, here)
        assert "strict=False" not in str(strictly.value)
        with pytest.raises(tdi.StateMismatch) as leniently:
            resumed(state, here, strict=False)
        assert str(leniently.value) in str(strictly.value), words  # so the way out of that is told at once


def test_what_is_asked_ahead_of_time_may_differ_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """Prefetch, devices, timeouts and loader workers are no part of what was delivered."""
    state = saved_after(2, numbers(23), Setting(1, 0))
    run = run_of(numbers(23), Setting(3, 5, {"num_workers": 1}), {"timeout_seconds": 7.0})
    with caplog.at_level(logging.WARNING, logger="torchdistinput"):
        run.load(Saved(2, json.dumps(state)))
        rest = list(steps(run, epochs=1))
    assert [sample for _, _, parts in rest for part in parts for sample in part] == list(range(8, 23))
    assert not caplog.messages
    run.loader.close()


def test_the_drop_in_loader_takes_a_state_before_it_knows_its_ranks() -> None:
    loader: Any = tdi.DataLoader(range(23), batch_size=4, shuffle=True, generator=inputs.generator())  # type: ignore[arg-type]
    run = Run(loader, lambda batch: [batch.tolist()])
    assert set(loader.state_dict()) == KEYS
    state = saved_after(3)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    whole = [batch.tolist() for batch in shuffled()]
    assert [parts[0] for _, _, parts in steps(run, epochs=1)] == whole[3:]


# -------------------------------------------------- epochs of files long enough for what is not noted at each step


SIZES = (110, 5, 17, 0, 9, 3, 150, 1, 7, 4, 96, 12, 133, 2, 40, 5)
MIXED: dict[str, Any] = {"shuffle_files": True, "shuffle_buffer": 50, "cycle_length": 2, "block_length": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("files")
    for file, size in enumerate(SIZES):
        (path / f"{file:02}.txt").write_text("".join(f"{1000 * file + record}\n" for record in range(size)))
    return str(path)


def many_files(folder: str, order: dict[str, Any]) -> tdi.FileDataset:
    return tdi.FileDataset(folder + "/*.txt", readers.text_lines, map_fn=int, seed=2, **order)


def test_nothing_but_votes_is_exchanged_inside_an_epoch_of_files(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, gather = list[str](), Channel.gather

    def gathers(self: Channel, mine: str) -> Exchange[list[str]]:
        texts.append(mine)
        return (yield from gather(self, mine))

    def reads(rank: int) -> int:
        data = fake_strategy(ranks, rank, 1).distribute_dataset(
            many_files(folder, MIXED), tdi.InputOptions(prefetch=2), global_batch_size=4
        )
        next(iterator := iter(data))
        if rank == 0:
            monkeypatch.setattr(Channel, "gather", gathers)
        return 1 + sum(1 for _ in iterator)

    ranks = FakeCollectives(2, timeout_seconds=20)
    first, second = ranks.run(reads)
    assert (first == second, texts) == (True, [])


def states_of_a_rank(ranks: FakeCollectives, folder: str, order: dict[str, Any], rank: int) -> list[str]:
    data = fake_strategy(ranks, rank, 1).distribute_dataset(many_files(folder, order), global_batch_size=4)
    return [json.dumps(data.state_dict()) for _ in data]


def test_a_state_grows_little_with_the_files_in_progress(folder: str) -> None:
    for order in ({}, MIXED, {"cycle_length": 5}):
        ranks = FakeCollectives(2, timeout_seconds=20)
        found = ranks.run(partial(states_of_a_rank, ranks, folder, order))[0]
        assert isinstance(found, list), found
        most = 4 * order.get("cycle_length", 1)  # of two workers, each of which may have opened the next ones
        for text in found:
            in_progress = len(re.findall(r'"[0-9a-f]{8}\\?"', text))  # each has a mark
            assert in_progress <= most
            assert len(text) - len(found[-1]) < 64 * in_progress + 64, text
