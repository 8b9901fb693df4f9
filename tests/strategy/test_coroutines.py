"""Functions on threads of their own that run only while somebody waits for them."""

from __future__ import annotations

import contextvars
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchdistinput.replicas.coroutines import Coroutine, Ended, Modes

Talk = Coroutine[str, str]
VARIABLE = contextvars.ContextVar("variable", default="unset")


def asks_twice(talk: Talk) -> str:
    return talk.pause("one?") + talk.pause("two?")


def talk_of(body: Callable[[Talk], Any]) -> Talk:
    return Coroutine(body, "torchdistinput talk")


def test_a_coroutine_runs_from_question_to_question_and_ends_with_its_value() -> None:
    talk = talk_of(asks_twice)
    assert [talk.start(), talk.resume("a"), talk.resume("b")] == ["one?", "two?", Ended("ab")]
    assert "torchdistinput talk" not in {thread.name for thread in threading.enumerate()}


def test_its_exception_is_raised_by_the_side_that_waits() -> None:
    def fails(talk: Talk) -> None:
        talk.pause("?")
        raise LookupError("gone")

    talk = talk_of(fails)
    talk.start()
    with pytest.raises(LookupError, match="gone"):
        talk.resume("")


def test_an_exception_as_answer_is_raised_in_the_pause() -> None:
    def catches(talk: Talk) -> str:
        try:
            return talk.pause("?")
        except LookupError as error:
            return f"caught {error}"

    talk = talk_of(catches)
    talk.start()
    assert talk.resume(LookupError("it")) == Ended("caught it")


def test_close_ends_a_paused_function_through_its_finally_blocks() -> None:
    steps: list[str] = []

    def waits(talk: Talk) -> None:
        try:
            talk.pause("?")
        except Exception:  # what user code catches must not stop the end
            steps.append("caught")
        finally:
            steps.append("cleaned up")

    talk = talk_of(waits)
    talk.start()
    talk.close()
    talk.close()
    assert steps == ["cleaned up"]


def test_close_also_ends_a_function_that_catches_everything_and_asks_again() -> None:
    def stubborn(talk: Talk) -> None:
        for _ in range(3):
            try:
                talk.pause("?")
            except BaseException:
                continue

    talk = talk_of(stubborn)
    talk.start()
    talk.close()


def test_close_before_the_start_does_nothing() -> None:
    talk_of(asks_twice).close()


def test_an_error_while_it_is_ended_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails_to_clean_up(talk: Talk) -> None:
        try:
            talk.pause("?")
        finally:
            raise LookupError("the broom is gone")

    talk = talk_of(fails_to_clean_up)
    talk.start()
    with caplog.at_level(logging.WARNING):
        talk.close()
    assert "talk raised while it was being ended" in caplog.text
    assert "the broom is gone" in caplog.text


def test_a_pause_after_the_end_is_an_error_not_a_hang() -> None:
    talk = talk_of(lambda talk: None)
    talk.start()
    with pytest.raises(RuntimeError, match="has returned already"):
        talk.pause("?")


def test_an_error_is_freed_without_the_garbage_collector() -> None:
    class Payload:
        pass

    def fails(talk: Talk) -> None:
        error = LookupError(talk.pause("?"))
        error.payload = Payload()  # type: ignore[attr-defined]
        kept.append(weakref.ref(error.payload))  # type: ignore[attr-defined]
        try:
            raise error
        finally:
            del error

    kept: list[weakref.ref[Payload]] = []
    gc.collect()
    gc.disable()
    try:
        talk = talk_of(fails)
        talk.start()
        with pytest.raises(LookupError):
            talk.resume("")
        del talk
        assert kept[0]() is None
    finally:
        gc.enable()


def test_context_variables_are_those_of_the_maker_and_changes_stay_inside() -> None:
    def changes(talk: Talk) -> str:
        seen = VARIABLE.get()
        VARIABLE.set("inner")
        return seen

    token = VARIABLE.set("outer")
    try:
        assert talk_of(changes).start() == Ended("outer")
        assert VARIABLE.get() == "outer"
    finally:
        VARIABLE.reset(token)


def modes_on_another_thread() -> Modes:
    modes = Modes.capture([torch.device("cpu")])

    def body(talk: Talk) -> Modes:
        with modes.entered():
            return Modes.capture([torch.device("cpu")])

    ended = talk_of(body).start()
    assert isinstance(ended, Ended)
    assert isinstance(ended.value, Modes)
    assert ended.value == modes
    return modes


def test_the_modes_of_torch_can_be_taken_to_another_thread() -> None:
    assert modes_on_another_thread().grad
    with torch.no_grad():
        assert not modes_on_another_thread().grad
    with torch.inference_mode():
        assert modes_on_another_thread().inference
        with torch.enable_grad():
            assert modes_on_another_thread().grad
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        modes = modes_on_another_thread()
        assert modes.autocast == (("cpu", torch.bfloat16),)
        assert not modes.autocast_cache
    with torch.device("meta"):
        assert modes_on_another_thread().device == torch.device("meta")
