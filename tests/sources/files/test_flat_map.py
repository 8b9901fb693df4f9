"""``flat_map_fn``: samples of one record or several, resumed at each, with failures; rows of ``kinds.py`` on ranks."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

import torchdistinput as tdi
from tests.ecosystem.kinds import lines_of_three, plain_lines
from torchdistinput import readers

SIZES, BATCH = (13, 40, 9), 10


def words(line: str) -> list[str]:
    """A line with a number n has n mod 4 samples."""
    return [f"{line}-{each}" for each in range(int(line) % 4)]


SAMPLES = [sample for number in range(sum(SIZES)) for sample in words(str(number))]


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, first = tmp_path_factory.mktemp("lines"), 0
    for number, size in enumerate(SIZES):
        (folder / f"{number}.txt").write_text("".join(f"{each}\n" for each in range(first, first + size)))
        first += size
    return str(folder / "*.txt")


@pytest.mark.parametrize("read", [lines_of_three, plain_lines, readers.text_lines])
@pytest.mark.parametrize("window", [0, 3])
def test_a_state_at_each_sample_goes_on_there(pattern: str, read: Any, window: int) -> None:
    def made() -> Any:
        settings = {"shuffle_buffer": window, "cycle_length": 2}
        files = tdi.FileDataset(pattern, read, flat_map_fn=words, **settings)  # type: ignore[arg-type]
        return tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=1)

    loader = made()
    whole, states = [], []
    for (sample,) in loader:
        whole.append(sample)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert sorted(whole) == sorted(SAMPLES)
    for number, state in [*enumerate(states, 1)][::3]:
        rest = made()
        rest.load_state_dict(state)
        assert [sample for (sample,) in rest] == whole[number:]


@pytest.mark.parametrize("read", [readers.text_lines, plain_lines])
def test_a_failure_names_the_file_and_the_record_and_comes_after_the_samples_in_front(pattern: str, read: Any) -> None:
    def fn(line: str) -> list[str]:
        if int(line) == 30:
            raise ValueError("a bad line")
        return words(line)

    files = tdi.FileDataset(pattern, read, flat_map_fn=fn, map_fn=str.upper)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=BATCH)
    found: list[str] = []
    with pytest.raises(tdi.SourceError, match=r"1\.txt: .*flat_map_fn failed: ValueError: a bad line; .*'30'"):
        found.extend(chain.from_iterable(loader))
    assert found == SAMPLES[: len(found)]
    assert len(SAMPLES[: len(found)]) > 25
