"""What ranks were given differs in one thing: every rank is told the field, the values and the ranks, and none hangs.

Elsewhere are damaged states (``test_hostile_states.py``), states that only some ranks load
(``test_resume_on_ranks.py``), ranks that do not come at all (``test_absent_ranks.py``), and samplers that come to
differ in the middle of an epoch (``tests/oracle``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import torchdistinput as tdi
from tests.data import Mapped
from tests.support import inputs
from tests.support.epochs import Raised, raised
from torchdistinput import readers
from torchdistinput.testing import run_ranks

WORLD = 3
ODD = 1  # the rank that differs


@final
@dataclass(frozen=True)
class Differs:
    """One difference.

    Args:
      call: what a rank does; it is told whether it is the odd one, and a folder.
      field: how the message calls it.
      odd: the odd rank's value, as the message shows it; nothing where only digests can be shown.
      others: the others'.
      kind: what is raised.
    """

    call: Callable[[bool, Path], object]
    field: str
    odd: str = ""
    others: str = ""
    kind: str = "RankDisagreement"


def strategy() -> tdi.Strategy:
    return tdi.Strategy(devices=["cpu"], timeout_seconds=60)


def numbers(length: int = 23, batch_size: int = 4, **arguments: Any) -> Any:
    return DataLoader(range(length), batch_size=batch_size, **arguments)  # type: ignore[arg-type]


def distribute(data: Any, global_batch_size: int | None = None, **options: Any) -> tdi.DistributedDataset:
    return strategy().distribute_dataset(data, tdi.InputOptions(**options), global_batch_size=global_batch_size)


def enter(data: Any, **options: Any) -> object:
    """As far as the first step."""
    return next(iter(distribute(data, **options)))


def option(name: str, odd: Any, others: Any, shown: tuple[str, str] | None = None) -> Differs:
    """An option of the input."""
    texts = shown or (repr(odd), repr(others))
    call = lambda is_odd, _: distribute(numbers(), **{name: odd if is_odd else others})  # noqa: E731
    return Differs(call, name, *texts)


def files(folder: Path, names: list[int], **arguments: Any) -> object:
    """A dataset of files, under DATA."""
    data = tdi.FileDataset([str(folder / f"{name}.txt") for name in names], readers.text_lines, **arguments)
    return distribute(data, 4, auto_shard_policy=tdi.AutoShardPolicy.DATA)


def file_setting(name: str, odd: Any, others: Any) -> Differs:
    """An argument of ``FileDataset``."""
    call = lambda is_odd, folder: files(folder, [0, 1, 2], **{name: odd if is_odd else others})  # noqa: E731
    texts = [str(value).lower() for value in (odd, others)]
    return Differs(call, name, *texts)


def seeded(seed: int, draws: int = 0) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(draws, generator=generator)
    return generator


def shuffled(generator: torch.Generator) -> object:
    return enter(numbers(shuffle=True, generator=generator))


def begun(prepare: Callable[[tdi.DistributedDataset], object]) -> object:
    """As far as the first step of a dataset that is prepared before."""
    dataset = distribute(numbers())
    prepare(dataset)
    return next(iter(dataset))


def on_two(call: Callable[[list[tdi.DistributedDataset], tdi.Strategy], object]) -> object:
    """Two datasets alike."""
    common = strategy()
    return call([common.distribute_dataset(numbers()) for _ in range(2)], common)


def loaded(is_odd: bool, _: Path) -> object:
    dataset = distribute(numbers())
    iterator = iter(dataset)
    next(iterator)
    early = dataset.state_dict()
    next(iterator)
    late = dataset.state_dict()
    iterator.close()
    dataset.load_state_dict(late if is_odd else early)
    return next(iter(dataset))


DIFFERENCES: dict[str, Differs] = {
    "kind": Differs(lambda odd, _: distribute(inputs.PlainIterable(), 4) if odd else distribute(numbers()), "kind"),
    "length": Differs(lambda odd, _: distribute(numbers(17 if odd else 23)), "length", "17", "23"),
    "length of a dataset that holds nothing to compare": Differs(
        lambda odd, _: distribute(DataLoader(Mapped(17 if odd else 23, int), 4)), "length", "17", "23"
    ),
    "batch size": Differs(lambda odd, _: distribute(numbers(23, 6 if odd else 4)), "batch size", "6", "4"),
    "batch size of a batch sampler": Differs(
        lambda odd, _: distribute(DataLoader(range(23), batch_sampler=BatchSampler(range(23), 4 + 2 * odd, False))),  # type: ignore[arg-type]
        *("batch size", "6", "4"),
    ),
    "global batch size": Differs(
        lambda odd, _: distribute(inputs.PlainIterable(), 6 if odd else 4), "batch size", "6", "4"
    ),
    "drop_last": Differs(lambda odd, _: distribute(numbers(drop_last=odd)), "drop_last", "true", "false"),
    "policy": Differs(
        lambda odd, _: distribute(numbers(), auto_shard_policy=tdi.AutoShardPolicy["OFF" if odd else "DATA"]),
        *("policy", "OFF", "DATA"),
    ),
    "sampler": Differs(
        lambda odd, _: distribute(numbers(shuffle=odd)), "sampler", "RandomSampler", "SequentialSampler"
    ),
    "seed of a ShuffleSampler": Differs(
        lambda odd, _: distribute(numbers(sampler=tdi.ShuffleSampler(23, seed=40 + odd))), "seed", "41", "40"
    ),
    "number of files": Differs(lambda odd, at: files(at, [0, 1] if odd else [0, 1, 2]), "file list, first in entry 2"),
    "file list": Differs(
        lambda odd, at: files(at, [0, 1, 3] if odd else [0, 1, 2]), "first in entry 2", "3.txt", "2.txt"
    ),
    "order of files": Differs(
        lambda odd, at: files(at, [0, 2, 1] if odd else [0, 1, 2]), "first in entry 1", "2.txt", "1.txt"
    ),
    "seed of files": file_setting("seed", 41, 40),
    "shuffle_files": file_setting("shuffle_files", odd=True, others=False),
    "shuffle_buffer": file_setting("shuffle_buffer", 8, 16),
    "cycle_length": file_setting("cycle_length", 2, 1),
    "block_length": file_setting("block_length", 2, 1),
    "generator": Differs(lambda odd, _: shuffled(seeded(int(odd))), "generator state"),
    "generator that has drawn": Differs(lambda odd, _: shuffled(seeded(3, draws=int(odd))), "generator state"),
    "the sampler's own generator": Differs(
        lambda odd, _: enter(numbers(sampler=RandomSampler(range(23), generator=seeded(int(odd))))), "generator state"
    ),
    "epoch, forgotten": Differs(
        lambda odd, _: begun(lambda _: None) if odd else begun(lambda data: data.set_epoch(5)),
        *("start", "epoch 0", "epoch 5"),
    ),
    "epoch": Differs(lambda odd, _: begun(lambda data: data.set_epoch(3 - odd)), "start", "epoch 2", "epoch 3"),
    "step sought": Differs(lambda odd, _: begun(lambda data: data.seek(0, 1 + odd)), "start", "step 2", "step 1"),
    "state loaded": Differs(loaded, "start", "step 2", "step 1"),
    "prefetch": option("prefetch", 3, 2),
    "timeout_seconds": option("timeout_seconds", 50.0, 40.0),
    "coordination": option("coordination", "off", "on", ("off", "on")),
    "with_index": option("with_index", odd=True, others=False, shown=("true", "false")),
    "partial_batch": option("partial_batch", "pad", "keep", ("pad", "keep")),
    "on_error": option("on_error", "skip", "raise", ("skip", "raise")),
    "max_errors": option("max_errors", 7, 100),
    "log_every": option("log_every", 10, 0),
    "another call": Differs(
        lambda odd, _: on_two(lambda both, common: common.reduce("SUM", 1) if odd else next(iter(both[0]))),
        "calls",
        "reduce",
        "beginning of an epoch",
    ),
    "another dataset": Differs(
        lambda odd, _: on_two(lambda both, _: next(iter(both[odd]))), "calls", "dataset 2", "dataset 1"
    ),
    "another order of calls": Differs(
        lambda odd, _: strategy().distribute_datasets_from_function(lambda _: []) if odd else distribute(numbers()),
        *("calls", "distribute_datasets_from_function", "distribute_dataset"),
    ),
}

Told = dict[str, Raised | None]


def all_differences(folder: str) -> Told:
    """One rank: each call in turn. Were one rank not to raise, the next call would tell."""
    odd = dist.get_rank() == ODD
    return {name: raised(partial(differs.call, odd, Path(folder))) for name, differs in DIFFERENCES.items()}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """One launch for all."""
    folder = tmp_path_factory.mktemp("desync")
    for number in range(4):
        (folder / f"{number}.txt").write_text("1\n2\n3\n")
    return run_ranks(WORLD, all_differences, str(folder), timeout_seconds=120)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_rank_is_told_the_field_the_values_and_the_ranks(told: list[Told], name: str) -> None:
    differs = DIFFERENCES[name]
    messages = set()
    for rank, found in enumerate(told):
        error = found[name]
        assert error is not None, f"rank {rank} saw no difference"
        assert error.kind == differs.kind, error.message
        assert differs.field in error.message
        messages.add(error.message)
    assert len(messages) == 1, "the ranks tell different stories"
    told_by_rank = dict(re.findall(r"rank ([0-9, ]+): (.*?)(?=; rank |\. Every rank)", messages.pop()))
    assert set(told_by_rank) == {"0, 2", str(ODD)}
    assert told_by_rank["0, 2"] != told_by_rank[str(ODD)]
    assert differs.odd in told_by_rank[str(ODD)]
    assert differs.others in told_by_rank["0, 2"]


ADVICE = {
    "generator": "Seed the generator alike on every rank",
    "generator that has drawn": "let no rank draw from it more often",
    "the sampler's own generator": "Seed the generator alike on every rank",
    "length": "If each rank was given a part of the data already",
    "length of a dataset that holds nothing to compare": "Look at len(dataset) on each rank",
}


@pytest.mark.parametrize("name", ADVICE)
def test_every_rank_is_told_what_to_look_at(told: list[Told], name: str) -> None:
    for found in told:
        error = found[name]
        assert error is not None
        assert ADVICE[name] in error.message


ALIKE_OR_NOT = [(5, 5), (6, 6), (7, 8), (9, 9)]  # the seeds of the ranks before each epoch


def default_states_now_alike_now_not() -> list[tuple[list[list[int]], list[int]]]:
    """The epochs, and what the rank draws after each; rank 0's state need not be sent where it is everyone's."""
    data = distribute(numbers(12, 4, shuffle=True))
    found = []
    for seeds in ALIKE_OR_NOT:
        torch.manual_seed(seeds[dist.get_rank()])
        found.append(([element.tolist() for element in data], torch.randint(1000, (3,)).tolist()))
    return found


def test_the_order_is_rank_0s_whether_the_default_states_are_alike_or_not() -> None:
    ranks = run_ranks(2, default_states_now_alike_now_not)
    for epoch, seeds in enumerate(ALIKE_OR_NOT):
        torch.manual_seed(seeds[0])
        wanted = torch.cat(list(numbers(12, 4, shuffle=True))).tolist()
        after = torch.randint(1000, (3,)).tolist()
        steps = zip(ranks[0][epoch][0], ranks[1][epoch][0], strict=True)
        assert [index for pieces in steps for piece in pieces for index in piece] == wanted
        torch.manual_seed(seeds[1])
        afters = [after, after if seeds[0] == seeds[1] else torch.randint(1000, (3,)).tolist()]
        assert [rank[epoch][1] for rank in ranks] == afters
