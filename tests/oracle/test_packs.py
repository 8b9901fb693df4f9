"""Random packs against the law of packing: no token is lost or repeated, and positions begin at 0 in each part."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from typing import Any

import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import torchdistinput as tdi

Text = list[int]


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    strategy = draw(st.sampled_from(["best_fit", "first_fit", "concat"]))
    return {
        "max_length": draw(st.integers(1, 9)),
        "window": draw(st.integers(1, 8)),
        "strategy": strategy,
        "overflow": draw(st.sampled_from(["split", "truncate", "drop"])),
        "positions": draw(st.sampled_from(["segment", "sample"])),
    }


def kept(text: Text, how: dict[str, Any]) -> Text:
    """The tokens of a text that packs have: concatenation cuts a text anywhere, so none is too long."""
    if how["strategy"] == "concat" or len(text) <= how["max_length"] or how["overflow"] == "split":
        return text
    return text[: how["max_length"]] if how["overflow"] == "truncate" else []


def check(packs: list[dict[str, torch.Tensor]], texts: list[Text], how: dict[str, Any]) -> None:
    found: dict[int, Text] = {number: [] for number in range(len(texts))}
    for pack in packs:
        tokens, positions = pack["tokens"].tolist(), pack["positions"].tolist()
        ends = pack["cu_seqlens"].tolist()
        assert 0 < len(tokens) <= how["max_length"]
        assert (ends[0], ends[-1]) == (0, len(tokens))
        for segment, (start, end) in enumerate(pairwise(ends), 1):
            part = tokens[start:end]
            assert pack["segment_ids"].tolist()[start:end] == [segment] * len(part)
            number, place = divmod(part[0], 100)  # each token says of which text it is, and where
            assert part == list(range(part[0], part[0] + len(part)))
            begin = place if how["positions"] == "sample" else 0
            assert positions[start:end] == list(range(begin, begin + len(part)))
            found[number] += part
    assert [sorted(tokens) for tokens in found.values()] == [kept(text, how) for text in texts]


def test_packs_have_each_token_once_and_are_the_same_for_any_number_of_replicas(drawn_by: int) -> None:
    @seed(drawn_by)
    @settings(max_examples=40, database=None, deadline=None)
    @given(st.lists(st.integers(1, 20), min_size=1, max_size=12), arguments(), st.integers(1, 4))
    def compare(lengths: list[int], how: dict[str, Any], batch: int) -> None:
        texts = [[100 * number + place for place in range(length)] for number, length in enumerate(lengths)]
        packed = tdi.Packed(texts, **how)
        packs = [packed[number] for number in range(len(packed))]
        check(packs, texts, how)
        whole = [pack["tokens"].tolist() for pack in packs]
        state, done = "", 0
        for replicas in (1, 2, 3):  # each goes on a step after the one before
            strategy = tdi.Strategy(["cpu"] * replicas)
            loader = DataLoader(packed, batch, collate_fn=list)
            with strategy.distribute_dataset(loader, tdi.InputOptions(prefetch=0)) as distributed:
                if state:
                    distributed.load_state_dict(json.loads(state))
                steps, states = [], []
                for element in distributed:
                    parts = strategy.local_results(element)
                    steps.append([pack["tokens"].tolist() for part in parts for pack in part])
                    states.append(json.dumps(distributed.state_dict()))
            assert [*chain(*steps)] == whole[done:]
            if steps:  # after the last step the next epoch begins
                state, done = states[0], (done + len(steps[0])) % len(whole)

    compare()
