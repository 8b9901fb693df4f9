"""What all ranks must have in common: facts are compared, one rank's error is everyone's, and all conclude alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.collectives import FakeCollectives
from torchdistinput.coordination.fingerprints import agree
from torchdistinput.errors import BatchingError, InputError, RankDisagreement, ShardingError


class LocalError(Exception):
    """A class that other ranks cannot know."""


def all_agree(facts: list[dict[str, Any]], errors: list[Exception | None] | None = None, **more: Any) -> list[Any]:
    """Every rank brings its facts, or its error."""
    world = FakeCollectives(len(facts))
    found = errors or [None] * len(facts)
    return world.run(lambda rank: agree(world.ranks(rank), "the call", facts[rank], error=found[rank], **more))


def test_a_fact_that_one_rank_lacks_is_a_difference() -> None:
    for error in all_agree([{"n": 4}, {}]):
        assert isinstance(error, RankDisagreement)
        assert "differ in n: rank 0: 4; rank 1: null" in str(error)


@pytest.mark.parametrize("kind", [ShardingError, BatchingError, ValueError, TypeError])
def test_one_ranks_error_is_raised_by_all_in_its_class(kind: Callable[[str], Exception]) -> None:
    original = kind("too few files")
    first, second, third = all_agree([{}] * 3, [None, original, None])
    for error in (first, second, third):
        assert type(error) is kind
        assert "the call: rank 1: too few files" in str(error)
    assert second.__cause__ is original
    assert first.__cause__ is None


def test_an_error_of_a_foreign_class_is_an_input_error_that_names_the_class() -> None:
    for error in all_agree([{}] * 2, [LocalError("no data here"), None]):
        assert type(error) is InputError
        assert "rank 0: LocalError: no data here" in str(error)


def test_several_errors_are_all_told() -> None:
    for error in all_agree([{}] * 3, [ValueError("a"), None, KeyError("b")]):
        assert type(error) is InputError
        assert "rank 0: ValueError: a" in str(error)
        assert "rank 2: KeyError: 'b'" in str(error)


def test_the_same_error_on_every_rank_is_raised_as_it_is() -> None:
    errors: list[Exception | None] = [LocalError("nobody can"), LocalError("nobody can")]
    found = all_agree([{}] * 2, errors)
    assert all(error is own for error, own in zip(found, errors, strict=True))


def test_an_error_comes_before_a_difference() -> None:
    for error in all_agree([{"n": 1}, {"n": 2}], [None, ShardingError("no")]):
        assert type(error) is ShardingError


def test_one_rank_alone_agrees_with_itself_or_raises_its_own_error() -> None:
    assert agree(None, "the call", {"n": 1}, extra="mine") == ["mine"]
    own = LocalError("no")
    with pytest.raises(LocalError) as raised:
        agree(None, "the call", {}, error=own)
    assert raised.value is own
