"""The table of strings against a dict: every form of input, keys that meet, and strings that padding cannot tell."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.support.packages import package
from torchdistinput.preprocessing import StringLookup
from torchdistinput.preprocessing.string_table import NOWHERE, StringTable

pa = package("pyarrow")

ALPHABETS = ["ab", "abcdefghij", "aé中😀", "a\0", "\ud800a"]  # the last one: half of a surrogate pair
LENGTHS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 70]


def word(dice: random.Random) -> str:
    return "".join(dice.choices(dice.choice(ALPHABETS), k=dice.choice(LENGTHS)))


def forms(texts: list[str]) -> dict[str, tuple[Any, list[str]]]:
    """The texts as arrays, each beside the texts that it holds: fixed width has no NULs at the end."""
    stripped = [text.rstrip("\0") for text in texts]
    whole = [text for text in texts if "\ud800" not in text]  # UTF-8 has no halves
    units = np.array([text.encode() for text in whole] + [b"."])
    twice = np.array([each for text in texts for each in (text, "?")] + ["."])
    arrow = pa.array(["before", *whole, "after"])
    return {
        "list": (texts, texts),
        "U": (np.array([*texts, "."]), [*stripped, "."]),
        "U, every second one": (twice[:-1:2], stripped),
        "U of another byte order": (np.array([*texts, "."]).astype(twice.dtype.newbyteorder(">")), [*stripped, "."]),
        "S": (units, [*(text.rstrip("\0") for text in whole), "."]),
        "object": (np.array([*texts, "."], object).tolist(), [*texts, "."]),
        "Arrow": (pa.array(whole), whole),
        "Arrow, large, a part": (arrow.cast(pa.large_string())[1:-1], whole),
        "Arrow, a part": (arrow[1:-1], whole),
        "Arrow, a dictionary": (arrow.dictionary_encode()[1:-1], whole),
    }


@pytest.mark.parametrize("room", [1, 4])
def test_every_form_gives_the_places_of_a_dict(monkeypatch: pytest.MonkeyPatch, all_cells: bool, room: int) -> None:
    for seed in range(1000 if all_cells else 40):
        dice = random.Random(seed)
        terms = {word(dice) for _ in range(dice.choice([0, 1, 3, 40, 200]))}
        if dice.random() < 0.5:  # all of them fit into the tables
            terms = {term for term in terms if "\0" not in term and len(term.encode("utf-8", "surrogatepass")) <= 32}
        places = {term: dice.randrange(10**12) for term in terms}
        texts = [dice.choice([*sorted(terms), word(dice)]) for _ in range(dice.choice([0, 1, 5, 90]))]
        if dice.random() < 0.5:
            texts = [text for text in texts if text.isascii() and "\0" not in text]
        monkeypatch.setattr("torchdistinput.preprocessing.string_table._BLOCK", dice.choice([1, 7, 1000]))
        table = StringTable(places, room=room, few=dice.choice([0, 20]))
        for form, (given, held) in forms(texts).items():
            assert table.find(given).tolist() == [places.get(text, NOWHERE) for text in held], (seed, form)


def test_keys_of_one_slot_are_told_apart() -> None:
    """With one slot for each key nearly all keys meet others; also keys that differ in one bit, or in their length."""
    terms = [f"{number:03}"[:1] * size + f"{number}" for number in range(1000) for size in (0, 4, 12)]
    terms += ["\x01" * size for size in range(40)] + ["\x02" * size for size in range(1, 40)]
    places = {term: place for place, term in enumerate(dict.fromkeys(terms))}
    table = StringTable(places, room=1, few=0)
    asked = [*places, *(term + "x" for term in places), *("x" + term for term in places)]
    for given, held in forms(asked).values():
        assert table.find(given).tolist() == [places.get(text, NOWHERE) for text in held]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["a"] * 1000 + [1], "StringLookup: sequence item 1000: expected str instance, int found"),
        (["a", None], "StringLookup: sequence item 1: expected str instance, NoneType found"),
        ([b"a"], "strings are needed"),
        (lambda: pa.array(["a", None]), "with 1 nulls; strings without nulls are needed"),
        (lambda: pa.array(["a", None]).dictionary_encode("encode"), "with 1 nulls"),
        (lambda: pa.chunked_array([["a"], [None]]), "with 1 nulls"),
        (lambda: pa.array([1]), "the input is Arrow's int64"),
        (lambda: pa.array([[["a"]]]), "the input is Arrow's list"),
    ],
)
def test_other_values_are_refused(given: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        StringLookup(vocabulary=["a"])(given() if callable(given) else given)


def test_an_unknown_string_of_an_array_is_named_and_bytes_that_are_no_text_are_told() -> None:
    layer = StringLookup(vocabulary=["a"], num_oov_indices=0)
    for given in (["a"] * 900 + ["zebra"], np.array(["a", "zebra"]), np.array([b"a", b"zebra"]), pa.array(["zebra"])):
        with pytest.raises(ValueError, match="'zebra' is not in the vocabulary"):
            layer(given)
    with pytest.raises(ValueError, match="utf-8"):
        layer(np.array([b"\xff"]))
