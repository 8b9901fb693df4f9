"""The verdict is a sentence that says what the numbers say, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from torchdistinput.tracing.verdict import RankTimes, verdict


def rank(number: int, waiting: float, made_wait: float = 0.0, **more: Any) -> RankTimes:
    return RankTimes(rank=number, seconds=300.0, waiting=waiting, made_wait=made_wait, **more)


def late(stages: Mapping[str, float], **more: Any) -> list[RankTimes]:
    return [rank(0, 42.0), rank(1, 40.0), rank(2, 43.0, 41.0, late_in=stages, **more)]


LATE = "rank 2 made the others wait 41 s of 300 s (14 %): "
FILES = {"web-0193.tar": 30.0, "web-0007.tar": 8.0}
ALL = "the training loop of rank 1 waited 90 s of 300 s (30 %) for its input: "
GRADIENTS = "; if the ranks exchange gradients, the others wait for this rank there"

CASES = [
    (
        late({"fetch": 38.0, "draw": 3.0}, files=FILES, num_workers=2, busy=0.95),
        f"{LATE}93 % of it in fetch, most of that in web-0193.tar; more loader workers would help, a larger prefetch "
        "would not",
        (True, 2, "fetch", "web-0193.tar"),
    ),
    (
        late({"getitem": 41.0}, files={"a": 20.0, "b": 21.0, "c": 5.0}, num_workers=4, busy=0.2),
        f"{LATE}100 % of it in __getitem__; a larger prefetch would help, more loader workers would not",
        (True, 2, "getitem", None),
    ),
    (late({"collate": 41.0}, num_workers=4, busy=0.6), f"{LATE}100 % of it in collate_fn", (True, 2, "collate", None)),
    (
        late({"getitem": 41.0}, num_workers=0, busy=1.0),
        f"{LATE}100 % of it in __getitem__; loader workers would help: now the training thread reads",
        (True, 2, "getitem", None),
    ),
    (
        late({"sampler": 40.0, "getitem": 1.0}, files=FILES, num_workers=0),
        f"{LATE}98 % of it in the sampler; a sampler runs on the training thread, where neither loader workers nor a "
        "larger prefetch would help",
        (True, 2, "sampler", None),
    ),
    (
        late({"training": 40.0, "fetch": 1.0}, files=FILES, num_workers=2, busy=0.95),
        f"{LATE}98 % of it in its training code, not in its input",
        (False, 2, "training", None),
    ),
    (late({}), LATE[:-2], (True, 2, None, None)),
    (
        [rank(0, 60.0, 9.0), rank(1, 90.0, 8.0, waited_in={"copy": 60.0, "vote": 30.0})],
        f"{ALL}67 % of it in the copy to the device{GRADIENTS}",
        (True, 1, "copy", None),
    ),
    (
        [
            rank(0, 85.0, 2.0, waited_in={"getitem": 80.0}, num_workers=0),
            rank(1, 90.0, 3.0, waited_in={"getitem": 81.0, "vote": 9.0}, waited_files={"a": 81.0}, num_workers=0),
            rank(2, 3.0),  # the median counts
        ],
        "all ranks wait alike for their input, 85 s of 300 s (28 %): 95 % of it in __getitem__, most of that in a; "
        "loader workers would help: now the training thread reads",
        (True, None, "getitem", "a"),
    ),
    (
        [rank(0, 2.0, waited_in={"getitem": 2.0}), rank(1, 2.0, waited_in={"getitem": 2.0}, waited_files={"a": 1.0})],
        "not input-bound: all ranks wait alike for their input, 2.0 s of 300 s (1 %): 100 % of it in __getitem__",
        (False, None, "getitem", None),
    ),
    (
        late({"collate": 41.0}, files=FILES, num_workers=4, busy=0.6),  # a batch's, no file's
        f"{LATE}100 % of it in collate_fn",
        (True, 2, "collate", None),
    ),
    (  # others wait in an all-reduce, unseen
        [rank(0, 4.0), rank(1, 90.0, 4.0, late_in={"fetch": 4.0}, waited_in={"getitem": 89.0, "vote": 1.0})],
        f"{ALL}99 % of it in __getitem__{GRADIENTS}",
        (True, 1, "getitem", None),
    ),
    (  # for several ranks in turn
        [rank(0, 9.0, 40.0), rank(1, 90.0, 40.0, waited_in={"vote": 90.0})],
        f"{ALL}100 % of it in waits for other ranks, or for messages between them",
        (True, 1, "vote", None),
    ),
    (  # what it did is known of a small part yet
        [rank(0, 90.0), rank(1, 1.0, 80.0, late_in={"training": 5.0})],
        "rank 1 made the others wait 80 s of 300 s (27 %)",
        (True, 1, None, None),
    ),
    (
        [rank(0, 3.0, 1.0), rank(1, 2.0, 2.5, late_in={"getitem": 2.5}, files={"index 17": 2.0}, num_workers=0)],
        "not input-bound: rank 1 made the others wait 2.5 s of 300 s (1 %): 100 % of it in __getitem__, most of that "
        "in index 17",
        (False, 1, "getitem", "index 17"),
    ),
    (
        [rank(0, 0.0312)],
        "not input-bound: the training loop waited 31 ms of 300 s (0 %) for its input",
        (False, 0, None, None),
    ),
    (
        [rank(0, 30.0, waited_in={"fetch": 29.0, "draw": 1.0}, num_workers=0)],
        "the training loop waited 30 s of 300 s (10 %) for its input: 97 % of it in fetch; loader workers would help: "
        "now the training thread reads",
        (True, 0, "fetch", None),
    ),
    ([], "no step was measured yet", (False, None, None, None)),
    ([RankTimes(rank=0, seconds=0.0, waiting=0.0)], "no step was measured yet", (False, None, None, None)),
]


@pytest.mark.parametrize(("ranks", "text", "facts"), CASES)
def test_the_sentence_says_what_the_numbers_say(ranks: list[RankTimes], text: str, facts: tuple[Any, ...]) -> None:
    for order in (ranks, ranks[::-1]):
        found = verdict(order)
        assert str(found) == text
        assert (found.input_bound, found.rank, found.stage, found.file) == facts
