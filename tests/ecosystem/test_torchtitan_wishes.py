"""The six wishes that torchtitan's own data component has written down, at data-parallel degrees 4, then 3, then 5.

Each test has the name of a wish (``TODO(data-...)`` in torchtitan's source). The loaders have the interface of its
``BaseDataLoader``: they are iterated, and a checkpoint saves them as ``Stateful``. Each run makes two steps with 4
ranks, goes on from the checkpoint for two with 3, and to the end with 5. torchtitan itself is not needed here;
``test_torchtitan.py`` has it.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import torchdistinput as tdi
from tests.support.epochs import cut_by_s
from tests.support.packages import package
from torchdistinput.plan.packing import Overflow
from torchdistinput.testing import run_ranks

dcp = package("torch.distributed.checkpoint")

TURNS = [(4, 2), (3, 2), (5, 10_000)]
"""Ranks, and the steps that they make at most."""

GLOBAL_BATCH, LENGTH = 8, 32
LINES = [11, 3, 17, 1, 9, 5, 21]
"""Of each file."""


class Loader:
    """What torchtitan's trainer needs of a loader, over one epoch.

    Args:
      data: a ``tdi.DataLoader``, or what ``strategy.distribute_dataset`` returned.
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        yield from self.data

    def state_dict(self) -> dict[str, Any]:
        return dict(self.data.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.load_state_dict(state_dict)


# ------------------------------------------------------------------------------------------ the data


def texts(seed: int, count: int, longest: int) -> list[Tensor]:
    """Texts whose tokens are all different, also from those of other seeds."""
    lengths = torch.randint(1, longest + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [torch.arange(length) + 1_000_000 * seed + 1000 * number for number, length in enumerate(lengths)]


LONGEST = 30
SHORT, LONG = texts(1, 400, 12), texts(2, 150, LONGEST)
WANTED = {"short": 0.6, "long": 0.4}
"""Shares of the tokens."""


def mean_length(kind: list[Tensor]) -> float:
    return sum(map(len, kind)) / len(kind)


def mixture() -> tdi.Mixture:
    """By shares of tokens: the weight of a sample is the share over the mean length."""
    weights = {"short": WANTED["short"] / mean_length(SHORT), "long": WANTED["long"] / mean_length(LONG)}
    return tdi.Mixture({"short": SHORT, "long": LONG}, weights, seed=5)


def packs() -> tdi.Packed:
    return tdi.Packed(mixture(), LENGTH, window=128, pad=-1)


def mixture_by_tokens() -> Any:
    """The same shares, as the library counts them; a stream."""
    lengths = {"short": [len(text) for text in SHORT], "long": [len(text) for text in LONG]}
    return tdi.Mixture({"short": SHORT, "long": LONG}, WANTED, unit="tokens", lengths=lengths, seed=5)


def mixed_by_tokens(_: Path) -> Any:
    strategy = tdi.Strategy(["cpu"])
    return strategy.distribute_dataset(mixture_by_tokens(), global_batch_size=GLOBAL_BATCH, collate_fn=list)


class Processed(Dataset[dict[str, Tensor]]):
    """Packs, with the process that made each."""

    def __init__(self) -> None:
        self.packs = packs()

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, pack: int) -> dict[str, Tensor]:
        return {**self.packs[pack], "process": torch.tensor(os.getpid())}


def overflowing(overflow: Overflow) -> tdi.Packed:
    return tdi.Packed(LONG, 16, window=32, overflow=overflow, pad=-1)


def order() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def shuffled(cls: Any, data: Any, **more: Any) -> Any:
    return cls(data, GLOBAL_BATCH, shuffle=True, generator=order(), **more)


def is_kept(line: str) -> list[str]:
    """The line, unless its number can be divided by 5."""
    return [line] if int(line) % 5 else []


def stream(folder: Path) -> Any:
    """Files of many sizes, filtered; each rank reads its own."""
    files = tdi.FileDataset(f"{folder}/*.txt", tdi.readers.text_lines, flat_map_fn=is_kept, map_fn=int)
    options = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.FILE)
    return tdi.Strategy(["cpu"]).distribute_dataset(files, options, global_batch_size=GLOBAL_BATCH)


def number_of(row: dict[str, int]) -> int:
    return row["number"]


def rows_of(folder: Path) -> Any:
    files = tdi.FileDataset(
        f"{folder}/*.jsonl", tdi.readers.json_lines, map_fn=number_of, index_folder=f"{folder}/indices"
    )
    return tdi.DataLoader(files, GLOBAL_BATCH)


OVERFLOWS: tuple[Overflow, ...] = ("split", "truncate", "drop")

SCENES: dict[str, Callable[[Path], Any]] = {
    "map": lambda _: shuffled(tdi.DataLoader, range(43)),
    "stream": stream,
    "sidecar": rows_of,
    "processes": lambda _: shuffled(tdi.DataLoader, Processed(), num_workers=1),
    "mix": lambda _: tdi.DataLoader(mixture(), GLOBAL_BATCH, sampler=mixture().sampler(), collate_fn=list),
    "mix by tokens": mixed_by_tokens,
    "packs": lambda _: shuffled(tdi.DataLoader, packs()),
    "split": lambda _: shuffled(tdi.DataLoader, overflowing("split")),
    "truncate": lambda _: shuffled(tdi.DataLoader, overflowing("truncate")),
    "drop": lambda _: shuffled(tdi.DataLoader, overflowing("drop")),
}


# ------------------------------------------------------------------------------------------ the runs


class Made(NamedTuple):
    """A step of one rank."""

    part: Any
    global_size: int
    process: int
    """The rank's own."""


class Played(NamedTuple):
    """A turn of one rank."""

    steps: dict[str, list[Made]]
    """By scene."""
    indices: list[tuple[str, int]]
    """The files of the indices, and when they were written."""


def play(folder: str, turn: int) -> Played:
    """One rank: each scene from the checkpoint of the turn before, with a checkpoint at the end."""
    steps = {}
    for name, make in SCENES.items():
        loader = Loader(make(Path(folder)))
        if turn:
            dcp.load({"dataloader": loader}, checkpoint_id=f"{folder}/{name}-{turn - 1}")
        steps[name] = [
            Made(listed(part), loader.data.step.global_size, os.getpid())
            for part in itertools.islice(loader, TURNS[turn][1])
        ]
        dcp.save({"dataloader": loader}, checkpoint_id=f"{folder}/{name}-{turn}")
        loader.data.close()
    return Played(steps, sorted((path.name, path.stat().st_mtime_ns) for path in Path(folder, "indices").iterdir()))


def listed(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: each.tolist() for name, each in part.items()}
    return [each.tolist() for each in part] if isinstance(part, list) else part.tolist()


Turns = list[list[Played]]
"""By turn and rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files: numbered lines, as texts and as JSON."""
    made = tmp_path_factory.mktemp("wishes")
    first = 0
    for file, count in enumerate(LINES):
        numbers = range(first, first + count)
        (made / f"{file}.txt").write_text("".join(f"{number}\n" for number in numbers))
        (made / f"{file}.jsonl").write_text("".join(json.dumps({"number": number}) + "\n" for number in numbers))
        first += count
    return made


@pytest.fixture(scope="module")
def turns(folder: Path) -> Turns:
    """All scenes at each degree."""
    return [run_ranks(ranks, play, str(folder), turn, timeout_seconds=120) for turn, (ranks, _) in enumerate(TURNS)]


def steps_of(turns: Turns, name: str) -> list[list[Made]]:
    """The steps of all turns, each as the parts of its ranks, which make the same number of steps."""
    return [list(row) for ranks in turns for row in zip(*(rank.steps[name] for rank in ranks), strict=True)]


def parts_of(row: list[Made], field: str | None = None) -> list[Any]:
    return [made.part if field is None else made.part[field] for made in row]


def check_global_batches(steps: list[list[Made]], batches: list[Any], field: str | None = None) -> None:
    """The parts of each step are those of a global batch of one process, by the law of the split."""
    assert len(steps) == len(batches)
    for row, batch in zip(steps, batches, strict=True):
        assert parts_of(row, field) == cut_by_s(batch, len(row))
        assert {made.global_size for made in row} == {len(batch)}


def tokens_in(steps: list[list[Made]]) -> list[int]:
    """Of all packs, without what fills them up."""
    rows = itertools.chain.from_iterable(pack for row in steps for pack in parts_of(row, "tokens"))
    return sorted(token for token in itertools.chain.from_iterable(rows) if token >= 0)


# ------------------------------------------------------------------------------------------ the wishes


def test_data_finite_dp(turns: Turns) -> None:
    """Finite data ends on all ranks at one step, with no sample lost or repeated: an order, and a filtered stream."""
    steps = steps_of(turns, "map")
    check_global_batches(steps, list(shuffled(DataLoader, range(43))))
    assert len(steps[-1]) == 5
    assert steps[-1][0].global_size == 43 % GLOBAL_BATCH  # the remainder, in parts of 1, 1, 1, 0, 0
    streamed = steps_of(turns, "stream")
    numbers = [number for row in streamed for part in parts_of(row) for number in part]
    assert sorted(numbers) == [number for number in range(sum(LINES)) if number % 5]
    for row in streamed:
        assert {made.global_size for made in row} == {sum(map(len, parts_of(row)))}
    assert any(not part for row in streamed for part in parts_of(row))  # a rank whose files ended waits for no one


def test_data_jsonl_sidecar(turns: Turns, folder: Path) -> None:
    """One index of each file, made once, used by all ranks of all runs, and refused when the file has changed."""
    batches = list(DataLoader(range(sum(LINES)), GLOBAL_BATCH))  # type: ignore[arg-type]
    check_global_batches(steps_of(turns, "sidecar"), batches)
    first, *others = [rank.indices for ranks in turns for rank in ranks]
    assert len(first) == len(LINES)
    assert all(other == first for other in others)
    (folder / "6.jsonl").write_text('{"number": 1}\n')
    for told in run_ranks(2, refused_rows, str(folder)):
        assert "not the one of which the index" in told


def refused_rows(folder: str) -> str:
    """One rank: what is said of a file that has changed."""
    with pytest.raises(tdi.InputError) as caught:
        list(rows_of(Path(folder)))
    return str(caught.value)


def test_data_multiprocessing(turns: Turns) -> None:
    """A mixture in packs is made in other processes, and the batches are those of none."""
    steps = steps_of(turns, "processes")
    check_global_batches(steps, [batch["tokens"] for batch in shuffled(DataLoader, packs())], "tokens")
    made_in = [(made.process, set(made.part["process"])) for row in steps for made in row if made.part["process"]]
    assert all(len(processes) == 1 and rank not in processes for rank, processes in made_in)


def shares_of(steps: list[list[Made]]) -> list[float]:
    """After each step, the share of the short texts in all tokens so far."""
    short = whole = 0
    shares = []
    for row in steps:
        for text in itertools.chain.from_iterable(parts_of(row)):
            whole += len(text)
            short += len(text) if text[0] < 2_000_000 else 0
        shares.append(short / whole)
    return shares


def test_data_token_weighted_mix(turns: Turns) -> None:
    """Shares of the tokens: at each step, with ``unit="tokens"``; and in the long run, by weights over mean lengths."""
    counted, weighted = steps_of(turns, "mix by tokens"), steps_of(turns, "mix")
    samples = mixture()
    for steps, texts_of_one in (
        (counted, list(mixture_by_tokens())),
        (weighted, [samples[position] for position in range(len(samples))]),
    ):
        delivered = [text for row in steps for part in parts_of(row) for text in part]
        assert delivered == [text.tolist() for text in texts_of_one]
    whole = 0
    for share, row in zip(shares_of(counted), counted, strict=True):
        whole += sum(len(text) for part in parts_of(row) for text in part)
        assert abs(share - WANTED["short"]) * whole <= LONGEST  # less than one text
    shares = shares_of(weighted)
    assert shares[-1] == pytest.approx(WANTED["short"], abs=0.01)
    assert shares[24:] == pytest.approx([WANTED["short"]] * len(shares[24:]), abs=0.03)


def test_data_global_pack_plan(turns: Turns) -> None:
    """The packs are planned before the split: the same at any degree, and the rows of all ranks are filled alike."""
    steps = steps_of(turns, "packs")
    batches = list(shuffled(DataLoader, packs()))
    for field in ("tokens", "segment_ids", "positions"):
        check_global_batches(steps, [batch[field] for batch in batches], field)
    assert tokens_in(steps) == sorted(torch.cat([mixture()[position] for position in range(len(mixture()))]).tolist())
    rows = [pack for row in steps for part in parts_of(row, "segment_ids") for pack in part]
    filled = [sum(segment > 0 for segment in pack) / LENGTH for pack in rows]
    assert sum(filled) / len(filled) > 0.95
    assert sum(each < 0.9 for each in filled) <= len(mixture()) // 128 + 1  # the last pack of a window


@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_data_overflow_policy(turns: Turns, overflow: Overflow) -> None:
    """Texts that are too long are split, cut or left out, as asked, and each token is delivered or counted."""
    kept = {
        "split": LONG,
        "truncate": [text[:16] for text in LONG],
        "drop": [text for text in LONG if len(text) <= 16],
    }[overflow]
    steps, packed = steps_of(turns, overflow), overflowing(overflow)
    check_global_batches(steps, [batch["tokens"] for batch in shuffled(DataLoader, packed)], "tokens")
    assert tokens_in(steps) == sorted(torch.cat(kept).tolist())
    missing = packed.dropped_tokens + packed.truncated_tokens
    assert len(tokens_in(steps)) + missing == sum(map(len, LONG))
    assert bool(missing) == (overflow != "split")
    with pytest.raises(ValueError, match=r"sample \d+ has \d+ tokens"):
        overflowing("error")
