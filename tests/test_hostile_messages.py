"""What a rank sends may be garbage: a clear error, no code, no memory for what it only claims."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from torchdistinput.agreement import agree
from torchdistinput.backends.channels import gather_texts, plain_message
from torchdistinput.errors import BatchingError, InputError
from torchdistinput.structure import Structure
from torchdistinput.tree import structure_of

GARBAGE = ["", "x", "{", "[" * 10**5, '{"a":' * 10**5, "9" * 10**5, "null", "[]", "3", '"x"', "\0", "NaN", "\ud800"]


class Work:
    def wait(self) -> None: ...


class Peer:
    """A gloo group of two in which the other rank sends what it likes."""

    def __init__(self, size: int, content: bytes) -> None:
        self._answers = [torch.tensor([size]), torch.frombuffer(bytearray(content), dtype=torch.uint8)]

    def size(self) -> int:
        return 2

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Work:
        answer = self._answers.pop(0)
        outputs[0][0].copy_(inputs[0])
        outputs[0][1][: len(answer)] = answer[: len(outputs[0][1])]
        return Work()


@pytest.mark.parametrize("size", [-1, 1 << 40, (1 << 63) - 1])
def test_a_size_that_nobody_can_mean_is_not_allocated(size: int) -> None:
    group: Any = Peer(size, b"x")
    with pytest.raises(InputError, match=f"rank 1 of the group wants to send {size} bytes"):
        gather_texts(group, "mine")


def test_bytes_that_are_no_text_are_named() -> None:
    group: Any = Peer(4, b"\xff\xfe\xff\xfe")
    with pytest.raises(InputError, match="rank 1 of the group sent no text"):
        gather_texts(group, "mine")
    good: Any = Peer(3, "ü!".encode())
    assert gather_texts(good, "mine") == ["mine", "ü!"]


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
