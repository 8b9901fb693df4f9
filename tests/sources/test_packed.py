"""``Packed``: the same packs at every world size and after every resume, what a pack holds, and what is refused."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.data import Mapped
from tests.support.epochs import raised
from torchdistinput.testing import run_ranks

LENGTHS = (np.random.default_rng(0).lognormal(2, 0.8, 300).astype(int) % 60 + 1).tolist()


def text(wrong: int | None, index: int) -> torch.Tensor:
    """Sample ``i`` has ``LENGTHS[i]`` tokens ``1000 i, 1000 i + 1, ...``."""
    return torch.arange(LENGTHS[index] + (index == wrong)) + 1000 * index


def texts(wrong: int | None = None) -> Mapped:
    return Mapped(len(LENGTHS), partial(text, wrong))


def packed(**more: Any) -> tdi.Packed:
    return tdi.Packed(texts(), 64, **{"lengths": LENGTHS, "window": 100, **more})


def test_a_pack_holds_tokens_segments_positions_and_ends() -> None:
    packs = packed()
    seen: list[int] = []
    for number in range(len(packs)):
        pack = packs[number]
        ends = pack["cu_seqlens"].tolist()
        assert ends[-1] == len(pack["tokens"]) <= 64
        for segment, (start, stop) in enumerate(itertools.pairwise(ends), 1):
            own = pack["tokens"][start:stop]
            assert set(pack["segment_ids"][start:stop].tolist()) == {segment}
            assert pack["positions"][start:stop].tolist() == (own % 1000).tolist()
            assert len(set((own // 1000).tolist())) == 1
        seen += pack["tokens"].tolist()
    assert sorted(seen) == [1000 * index + place for index, length in enumerate(LENGTHS) for place in range(length)]
    assert packs.efficiency > 0.95
    assert packed(strategy="concat").efficiency >= packs.efficiency


@pytest.mark.parametrize("more", [{"overflow": "split"}, {"overflow": "split", "pad": 0}, {"strategy": "concat"}])
def test_positions_begin_at_zero_in_each_part_of_a_text_or_are_those_in_the_text(more: Any) -> None:
    given = {"dataset": texts(), "max_length": 20, "lengths": LENGTHS, "window": 100, **more}
    own, whole = tdi.Packed(**given), tdi.Packed(**given, positions="sample")
    for number in range(len(own)):
        pack = own[number]
        filled = pack["segment_ids"] > 0
        sizes = torch.bincount(pack["segment_ids"][filled])[1:].tolist()
        assert pack["positions"][filled].tolist() == [place for size in sizes for place in range(size)]
        assert pack["positions"].max() < 20
        # What tells texts apart by positions alone, as models of transformers do, finds the segments.
        begins = torch.nn.functional.pad(pack["segment_ids"], (1, 0)).diff() != 0
        assert torch.equal((pack["positions"] == 0)[filled], begins[filled])
        told = whole[number]
        assert told["positions"][filled].tolist() == (told["tokens"][filled] % 1000).tolist()
        assert all(torch.equal(told[name], pack[name]) for name in pack if name != "positions")
    assert max(int(whole[number]["positions"].max()) for number in range(len(whole))) >= 20
    assert whole.checksum != own.checksum


def test_padded_packs_have_one_length_and_fields_of_their_own() -> None:
    def row(index: int) -> Any:
        tokens = text(None, index)
        return {"input_ids": tokens, "labels": tokens + 1, "name": f"row {index}"}

    packs = tdi.Packed(Mapped(len(LENGTHS), row), 64, fields=["input_ids", "labels"], pad={"labels": -100})
    assert set(packs[0]) == {"input_ids", "labels", "segment_ids", "positions"}
    for number in range(len(packs)):
        pack = packs[number]
        assert {len(column) for column in pack.values()} == {64}
        filled = pack["segment_ids"] > 0
        assert torch.equal(pack["labels"][filled], pack["input_ids"][filled] + 1)
        assert set(pack["labels"][~filled].tolist()) <= {-100}


def test_dropped_and_truncated_tokens_are_counted() -> None:
    over = [length for length in LENGTHS if length > 20]
    assert tdi.Packed(texts(), 20, lengths=LENGTHS, overflow="drop").dropped_tokens == sum(over)
    assert tdi.Packed(texts(), 20, overflow="truncate").truncated_tokens == sum(over) - 20 * len(over)
    overflows: list[Any] = ["drop", "truncate", "split"]
    for overflow in overflows:
        packs = tdi.Packed(texts(), 20, lengths=LENGTHS, overflow=overflow)
        delivered = sum(len(packs[number]["tokens"]) for number in range(len(packs)))
        assert delivered + packs.dropped_tokens + packs.truncated_tokens == sum(LENGTHS)
        assert packs.efficiency == delivered / (20 * len(packs))


def tokens(packs: list[Any]) -> torch.Tensor:
    return torch.stack([pack["tokens"] for pack in packs])


def packs_of_packs(**more: Any) -> tdi.Packed:
    """A pack of packs."""
    return tdi.Packed(
        tdi.Packed(texts(), 20, lengths=LENGTHS, overflow="split"), 64, fields=["tokens"], window=50, **more
    )


def test_packs_of_packs_have_each_token_once() -> None:
    packs = packs_of_packs()
    found = [packs[number] for number in range(len(packs))]
    seen = [token for pack in found for token in pack["tokens"].tolist()]
    assert sorted(seen) == [1000 * index + place for index, length in enumerate(LENGTHS) for place in range(length)]
    assert all(len(pack["tokens"]) == pack["cu_seqlens"][-1] <= 64 for pack in found)


def test_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(TypeError, match="found a FileDataset. Pack its records while they are read"):
        tdi.Packed(tdi.FileDataset(str(tmp_path / "a.bin"), tdi.readers.fixed_length_records(1)), 64)


def wrong_length() -> Any:
    packs = tdi.Packed(texts(wrong=77), 64, lengths=LENGTHS, window=100, pad=0)
    loader = tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(packs, 8))
    steps: list[Any] = []
    found = raised(lambda: steps.extend(loader))
    assert found is not None
    return len(steps), found.kind, found.message.splitlines()[0]


def test_a_length_that_is_wrong_is_named_on_all_ranks_at_the_same_step() -> None:
    first, second = run_ranks(2, wrong_length)
    assert first == second
    assert first[1] == "SourceError"
    assert "sample 77 has shape" in first[2]


def lengths_of_its_own() -> Any:
    lengths = [*LENGTHS[:-1], LENGTHS[-1] - torch.distributed.get_rank()]
    loader = DataLoader(tdi.Packed(texts(), 64, lengths=lengths), 8)
    return raised(lambda: tdi.Strategy(["cpu"]).distribute_dataset(loader))


def test_lengths_that_differ_between_ranks_are_refused_on_all() -> None:
    first, second = run_ranks(2, lengths_of_its_own)
    assert first == second
    assert first.kind == "RankDisagreement"
    assert 'rank 0: "a Packed (checksum' in first.message
    assert 'rank 1: "a Packed (checksum' in first.message


def test_bad_arguments_are_told() -> None:
    with pytest.raises(ValueError, match="more than max_length=8"):
        tdi.Packed(texts(), 8)
    with pytest.raises(ValueError, match=r"lengths has shape \(3,\)"):
        tdi.Packed(texts(), 64, lengths=[1, 2, 3])
    with pytest.raises(ValueError, match="positions is 'text'; it must be 'segment', 'sample'"):
        packed(positions="text")
    with pytest.raises(IndexError, match="pack 9999 is outside"):
        packed().items(9999)
