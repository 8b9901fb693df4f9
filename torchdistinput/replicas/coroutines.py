"""Coroutines made of threads: a function on a separate thread that runs only while its caller waits for it.

Problem: the replicas of a process must be able to pause in the middle of a user's function, also in a library that the
function calls or in its backward pass, where no ``yield`` is possible. Their work must come in one order in every run.

Decision: one thread per coroutine and two queues, so that only one side runs at any moment. Gradient, inference and
autocast modes, the default device and the context variables are those of the thread that made the coroutine.

Alternative refused: greenlets, which are a dependency and do not carry torch's thread-local state either.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, final

import torch

_log = logging.getLogger(__name__)
_LOOK_AGAIN_SECONDS = 0.1

Question = TypeVar("Question")
Answer = TypeVar("Answer")


@final
class Ended(NamedTuple):
    """The end of a coroutine's function: its result, or its error."""

    value: Any
    error: BaseException | None = None


class _Unwind(BaseException):
    """Raised in a pause to end the function. Not an ``Exception``: user code that catches those must not stop it."""


@final
class Coroutine(Generic[Question, Answer]):
    """A function that can pause.

    Args:
      body: the function; it gets the coroutine, to call ``pause`` on. It runs in a copy of the maker's context.
      name: the name of its thread, for messages and debuggers.
    """

    def __init__(self, body: Callable[[Coroutine[Question, Answer]], Any], name: str) -> None:
        self._body = body
        self._name = name
        self._context = contextvars.copy_context()
        self._thread: threading.Thread | None = None
        self._paused = False
        self._closing = False
        self._over = False
        self._answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
        self._questions: queue.SimpleQueue[Question | Ended] = queue.SimpleQueue()

    def start(self) -> Question | Ended:
        """Runs the function to its first pause or its end; raises what it raises."""
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()
        return self._listen()

    def resume(self, answer: Answer | BaseException) -> Question | Ended:
        """Lets the pause return the answer, or raise it if it is an exception; then as ``start``."""
        self._paused = False
        self._answers.put(answer)
        del answer  # an exception must not hold itself through its own traceback
        return self._listen()

    def pause(self, question: Question) -> Answer:
        """On the coroutine's side: stops until ``resume``.

        Raises:
          RuntimeError: after the end of the function; nobody is left to answer.
        """
        if self._over:
            raise RuntimeError(
                f"the function of {self._name} has returned already, and nobody is left to answer; what needs the "
                "others, a backward pass through all_reduce too, must happen before it returns"
            )
        if self._closing:
            raise _Unwind
        self._questions.put(question)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            try:
                raise answer
            finally:
                del answer
        return answer

    def close(self) -> None:
        """Ends the function, if it has begun: the pause in which it waits raises. Returns when its thread is gone."""
        self._closing = True
        while self._thread is not None and self._thread.is_alive():
            if self._paused:
                self._paused = False
                self._answers.put(_Unwind())
            # Bounded, as Ctrl-C may have come between the last message of the thread and its join.
            with contextlib.suppress(queue.Empty):
                said = self._questions.get(timeout=_LOOK_AGAIN_SECONDS)
                self._paused = not isinstance(said, Ended)
                if isinstance(said, Ended) and said.error is not None and not isinstance(said.error, _Unwind):
                    _log.warning("%s raised while it was being ended", self._name, exc_info=said.error)

    def _listen(self) -> Question | Ended:
        said = self._questions.get()
        if not isinstance(said, Ended):
            self._paused = True
            return said
        if self._thread is not None:
            self._thread.join()
        if said.error is not None:
            try:
                raise said.error
            finally:
                del said
        return said

    def _work(self) -> None:
        try:
            ended = Ended(self._context.run(self._body, self))
        except BaseException as error:  # the other side raises it
            self._over = True
            self._questions.put(Ended(None, error))
            return
        self._over = True
        self._questions.put(ended)


@final
class Modes(NamedTuple):
    """The modes that torch keeps per thread."""

    grad: bool
    inference: bool
    device: torch.device
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool

    @staticmethod
    def capture(devices: Sequence[torch.device]) -> Modes:
        """The modes of the calling thread; of autocast, the modes of the CPU and of the types of the given devices."""
        kinds = sorted({"cpu", *(device.type for device in devices)})
        return Modes(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            device=torch.get_default_device(),
            autocast=tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The same modes on another thread, until the end of the ``with``."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield
