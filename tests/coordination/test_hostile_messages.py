"""What a rank sends may be garbage: a clear error, no code, no memory for what it only claims."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.socket_ranks import kept, wired
from torchdistinput.batches.pytree import structure_of
from torchdistinput.batches.schema import Structure
from torchdistinput.coordination.channel import ProcessGroupChannel, plain_message
from torchdistinput.coordination.connections import Departed
from torchdistinput.coordination.exchanges import conclude
from torchdistinput.coordination.fingerprints import agree
from torchdistinput.coordination.recursive_doubling import combine
from torchdistinput.errors import BatchingError, InputError

GARBAGE = ["", "x", "{", "[" * 10**5, '{"a":' * 10**5, "9" * 10**5, "null", "[]", "3", '"x"', "\0", "NaN", "\ud800"]


def heard_from(content: bytes) -> Any:
    """What a rank hears in an exchange of texts from another one that sends what it likes, in a row of 256 bytes,
    beside that of a third one that is not there."""
    mine, theirs = wired(2)
    (row,) = np.frombuffer(content.ljust(512, b" "), np.int64)[None]
    theirs.send(row, 0, 2)
    channel = ProcessGroupChannel(mine, kept, range(2))
    try:
        return conclude(channel.gather("mine"))
    finally:
        channel.end()
        theirs.close()


@pytest.mark.parametrize("size", [-1, 1 << 40, (1 << 63) - 1])
def test_a_size_that_nobody_can_mean_is_not_allocated(size: int) -> None:
    with pytest.raises(InputError, match=f"rank 1 of the group wants to send {size} bytes"):
        heard_from(size.to_bytes(8, sys.byteorder, signed=True))


@pytest.mark.parametrize("size", [-1, 0, 1 << 40, (1 << 63) - 1])
def test_a_value_of_such_a_size_is_not_allocated_either(size: int) -> None:
    mine, theirs = wired(2)
    theirs.send(np.array([size]), 0, 4)
    with pytest.raises(Departed, match=f"rank 1 wants to send a value of {size} bytes"):
        conclude(combine(mine, b"mine", lambda one, other: one + other))
    mine.close()
    theirs.close()


def test_bytes_that_are_no_text_are_named() -> None:
    with pytest.raises(InputError, match="rank 1 of the group sent no text"):
        heard_from((4).to_bytes(8, sys.byteorder) + b"\xff\xfe\xff\xfe")
    assert heard_from((3).to_bytes(8, sys.byteorder) + "ü!".encode()) == ["mine", "ü!"]


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_no_message(text: str) -> None:
    with pytest.raises(InputError, match="which is no message") as caught:
        plain_message(text)
    assert len(str(caught.value)) < 1000


class Others:
    """Ranks, one of which sends what it likes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def gather_texts(self, text: str, what: str) -> list[str]:
        return [text, self._text]

    def name(self, rank: int) -> int:
        return rank


@pytest.mark.parametrize(
    "text",
    [
        *GARBAGE,
        "{}",
        '{"what": "iter"}',
        '{"what": 1, "facts": {}, "problem": null, "extra": 0}',
        '{"what": "iter", "facts": [], "problem": null, "extra": 0}',
        '{"what": "iter", "facts": {}, "problem": ["os.system"], "extra": 0}',
        '{"what": "iter", "facts": {}, "problem": [1, 2], "extra": 0}',
        '{"what": "iter", "facts": {}, "problem": ["SystemExit", "x"], "extra": 0}',
        '{"what": "iter", "facts": {}, "problem": ["__name__", "x"], "extra": 0}',
    ],
)
def test_ranks_that_send_garbage_agree_on_nothing(text: str) -> None:
    ranks: Any = Others(text)
    with pytest.raises(InputError):
        agree(ranks, "iter", {})


def test_a_structure_that_another_rank_described_is_one_or_is_refused() -> None:
    batch = {"x": torch.zeros(2, 3), "y": [torch.zeros(2), (torch.zeros(2, 1), 3)], "z": ["a", "b"]}
    good = structure_of(batch).to_json()
    assert Structure.from_json(json.loads(json.dumps(good))).signature() == structure_of(batch).signature()
    odd: list[Any] = [
        None,
        -1,
        1 << 70,
        "x",
        "os:system",
        "__class__",
        [],
        {},
        [[]],
        [1 << 62] * 3,
        1.5,
        True,
        "tensor",
    ]
    rng, told = random.Random(0), list[str]()
    for _ in range(2000):
        bad = json.loads(json.dumps(good))
        node = bad
        while rng.random() < 0.6 and node.get("children"):
            node = rng.choice(node["children"])
        node[rng.choice(list(node))] = rng.choice(odd)
        try:
            Structure.from_json(bad).empty()
        except BatchingError as error:
            told.append(str(error))
    assert 500 < len(told) < 2000
    assert max(map(len, told)) < 1000
    nested: Any = {"kind": "tensor", "dtype": "float32", "dims": []}
    for _ in range(100_000):
        nested = {"kind": "list", "keys": [0], "class": None, "children": [nested]}
    with pytest.raises(BatchingError, match="RecursionError"):
        Structure.from_json(nested)
