"""The laws of the oracle are those of ``conformance``, most of whose cases TensorFlow has confirmed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import torchdistinput as tdi
from tests.oracle.laws import batched, steps_of
from tests.oracle.program import Program, Turn

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "conformance" / "many_workers.json").read_text())


def renumbered(files: list[list[int]]) -> dict[int, int]:
    """The samples of a case's files by the numbers that a program gives them."""
    return {1000 * file + place: record for file, records in enumerate(files) for place, record in enumerate(records)}


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES if "workers" in case["want"]])
def test_the_steps_are_those_of_the_case(case: dict[str, Any]) -> None:
    files = case.get("files", [list(range(case.get("n", 0)))])
    policy = case["policy"]
    if policy == "AUTO":
        policy = "FILE" if "files" in case else "DATA"
    turn = Turn(case["workers"], case["replicas_per_worker"])
    size, drop_last = case["global_batch_size"], case["drop_last"]
    program = Program("files", tuple(map(len, files)), policy, size, drop_last, turns=(turn,))
    order = batched(program.numbers, size, drop_last=drop_last)
    records = renumbered(files)
    found = [
        [[[records[number] for number in piece] for piece in step[rank]] for step in steps_of(program, turn, order)]
        for rank in range(turn.world)
    ]
    assert found == case["want"]["workers"]


@pytest.mark.parametrize("block", [None, 3, 64])
@pytest.mark.parametrize("length", [0, 1, 5, 130, 4097, 5000])
def test_a_keyed_order_has_each_number_once_and_is_another_one_in_another_epoch(length: int, block: int | None) -> None:
    sampler = tdi.ShuffleSampler(length, 3, block=block)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([*sampler])
        assert sorted(orders[-1]) == [*range(length)]
    assert length < 130 or orders[0] != orders[1]
