"""``tdi.Packed``: how fast packs are planned from lengths, and the places that stay empty: Grain, torchtitan."""

from __future__ import annotations

import re
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benches.model import Column, Contender, Measured, Table, Target, largest, rate
from benches.peers import peer
from torchdistinput.plan.packing import PackingStrategy, pack_window

__all__ = ["tables"]

RATE, PADDING = "million samples a second of CPU time", "empty places, %"
MAX_LENGTH = 2048
LOGNORMAL, SOURCES = "lognormal", "sources"
GRAIN = ("grain",)
NOTE = (
    "Grain and torchtitan fill rows while they read: their time is that of the tokens' copies too. MMSamplePacker gets "
    "10,000 samples, as it searches all that wait for each row."
)


def lengths_of(law: str, count: int) -> npt.NDArray[np.int64]:
    """At most ``count`` lengths of a law, none above ``MAX_LENGTH``: longer samples are split before.

    Args:
      law: ``LOGNORMAL``, with a mean of about 400; or ``SOURCES``: the tokens of the files of Python's standard
        library, in a random order.
      count: how many.
    """
    rng = np.random.default_rng(0)
    if law == LOGNORMAL:
        return np.minimum(rng.lognormal(5.5, 1, count).astype(np.int64) + 1, MAX_LENGTH)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    files = [file for file in files if "site-packages" not in file.parts][:count]
    whole = [len(re.findall(r"\w+|[^\w\s]", file.read_text(errors="replace"))) for file in files]
    pieces = [min(MAX_LENGTH, length - start) for length in whole for start in range(0, length, MAX_LENGTH)]
    return rng.permutation(np.array(pieces, np.int64))[:count]


def found(lengths: npt.NDArray[np.int64], packs: int, seconds: float) -> Measured:
    """The figures of a plan."""
    empty = 100 * (1 - int(lengths.sum()) / (packs * MAX_LENGTH))
    return {"samples": len(lengths) / 1e6, "seconds": seconds, "empty": empty}


def planned(law: str, count: int, window: int, strategy: PackingStrategy) -> Measured:
    """Window by window."""
    lengths = lengths_of(law, count)
    before = time.process_time()
    packs = 0
    for start in range(0, len(lengths), window):
        packs += len(pack_window(lengths[start : start + window], start, MAX_LENGTH, strategy, "error"))
    return found(lengths, packs, time.process_time() - before)


def by_grain(law: str, count: int, window: int, name: str) -> Measured:
    """As many samples at once as in a window: so many bins as their tokens fill."""
    grain, experimental = peer("grain"), peer("grain.experimental")
    lengths = lengths_of(law, count)
    source: Any = [{"x": np.zeros(length, np.int32)} for length in lengths.tolist()]
    bins = max(1, round(min(window, len(lengths)) * lengths.mean() / MAX_LENGTH))
    parent = grain.MapDataset.source(source).to_iter_dataset(grain.ReadOptions(num_threads=0))
    packing = getattr(experimental, name)
    dataset = packing(parent, length_struct={"x": MAX_LENGTH}, num_packing_bins=bins, shuffle_bins=False)
    before = time.process_time()
    packs = sum(1 for _ in dataset)
    return found(lengths, packs, time.process_time() - before)


class Tokens:
    """A tokenizer of torchtitan whose texts are the numbers of their tokens."""

    eos_id = 0

    def apply_chat_template(self, messages: list[dict[str, str]], **_more: bool) -> str:
        """The text of the last message."""
        return messages[-1]["content"]

    def encode(self, text: str, **_more: bool) -> list[int]:
        """So many tokens."""
        return [1] * int(text)


def conversation(sample: dict[str, int]) -> list[dict[str, str]]:
    """An empty question, and an answer that has the length of the sample."""
    return [{"role": "user", "content": "0"}, {"role": "assistant", "content": str(sample["length"])}]


def by_torchtitan_chat(law: str, count: int) -> Measured:
    """``ChatDataset``: the next pack begins where a sample does not fit."""
    of, datasets = peer("torchtitan.hf_datasets.text_datasets"), peer("datasets")
    lengths = lengths_of(law, count)
    source = datasets.Dataset.from_dict({"length": lengths})
    dataset = of.ChatDataset(source, Tokens(), conversation, seq_len=MAX_LENGTH)
    before = time.process_time()
    packs = sum(1 for _ in dataset)
    return found(lengths, packs, time.process_time() - before)


def by_torchtitan_packer(law: str, count: int, window: int) -> Measured:
    """``MMSamplePacker``: fills a row by a search of all samples that wait, first fit."""
    packing, torch = peer("torchtitan.hf_datasets.multimodal.utils.packing"), peer("torch")
    lengths = lengths_of(law, count)
    samples = [dict.fromkeys(("input_ids", "labels", "positions"), torch.zeros(each)) for each in lengths.tolist()]
    packer = packing.MMSamplePacker(MAX_LENGTH, window)
    before = time.process_time()
    for sample in samples:
        packer.add_sample(sample)
    packer.flush()
    return found(lengths, len(packer.packed_samples), time.process_time() - before)


def table(title: str, law: str, count: int, windows: Sequence[int], rounds: int) -> Table:
    """All strategies with a law of lengths."""
    cases: list[tuple[PackingStrategy, int]] = [("concat", windows[0])]
    cases += [(strategy, window) for strategy in ("first_fit", "best_fit") for window in windows]
    ours = [
        Contender(f"{strategy}, window of {window:,}", "ours", planned, (law, count, window, strategy))
        for strategy, window in cases
    ]
    names = [("FirstFitPackIterDataset", windows[1]), *(("BestFitPackIterDataset", window) for window in windows)]
    peers = [
        Contender(f"Grain, {name}, {window:,}", "peer", by_grain, (law, count, window, name), GRAIN, True, True)
        for name, window in names
    ]
    titan = ("torchtitan",)
    peers += [
        Contender("torchtitan, ChatDataset", "peer", by_torchtitan_chat, (law, count), titan, once=True, apart=True),
        *(
            Contender(
                f"torchtitan, MMSamplePacker, {window:,}", "peer", by_torchtitan_packer,
                (law, min(count, 10_000), window), titan, once=True, apart=True,
            )
            for window in windows[:2]
        ),
    ]  # fmt: skip
    columns = (Column(RATE, "more", rate("samples", "seconds")), Column(PADDING, "less", largest("empty")))
    fast = [each for each in cases if each[0] == "best_fit" or (each[0] == "first_fit" and law == LOGNORMAL)]
    targets = [Target(RATE, f"{strategy}, window of {window:,}", 1.0) for strategy, window in fast]
    targets += [
        Target(PADDING, f"best_fit, window of {window:,}", 1.0, (f"Grain, BestFitPackIterDataset, {window:,}",))
        for window in windows
    ]
    return Table(title, columns, (*ours, *peers), 1, rounds, tuple(targets), NOTE)


def tables(*, small: bool, folder: Path) -> Sequence[Table]:
    """Lengths of a law, and real ones."""
    del folder
    count = 2_000 if small else 100_000
    rounds = 1 if small else 3
    windows = [512, 1024] if small else [1024, 4096, 65_536]
    return [
        table(f"Packs of {MAX_LENGTH:,} tokens, lengths of a lognormal law", LOGNORMAL, count, windows, rounds),
        table(f"Packs of {MAX_LENGTH:,} tokens, the standard library's files", SOURCES, count, windows[:2], rounds),
    ]
