"""Queues to and from loader workers that need no thread.

Problem. A queue of ``multiprocessing`` hands each message to a thread, which pickles it and writes it to the pipe. So a
request for a batch waits until the main thread first stops, and a batch waits until the worker's decoding releases the
interpreter. Each message costs both processes two thread switches, and a loader of small samples sends many messages.

Decision. The sender writes the message to the pipe itself, as long as messages are so small that all messages that can
be on their way fit in the pipe together; so the sender never waits for the reader. From the first larger message on,
all messages go through torch's queue, in order. Torch's loader has at most ``prefetch_factor`` batches of each worker
on their way.

Messages are pickled as ``multiprocessing`` pickles them. But its pickler copies the whole table of registered reducers
for each message. After a batch was decoded, with the processor's caches full of other data, this copy takes as long as
all other work on the message together. So our pickler looks into the table in place, and only for objects whose types
are not built into every pickler.

This works on Linux, with forked workers; elsewhere torch's queues stay as they are.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import queue
import select
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, final

if sys.platform == "linux":
    import fcntl
    from multiprocessing.context import ForkContext

# ruff: noqa: SLF001 - the pipe of a queue has no public name, nor have the reducers that are registered

from torchdistinput.coordination.private_names import look_up
from torchdistinput.sources.torch_loader.private_names import PIPES

_PAGE: Final = 4096
_LARGE_PIPE: Final = 1 << 18


@final
class WorkerQueues:
    """A queue with one reader, as torch's loader uses it.

    Args:
      made: a queue of ``multiprocessing``, whose pipe is used.
      on_their_way: the largest number of messages in the pipe at a time.
    """

    def __init__(self, made: Any, on_their_way: int) -> None:
        self._queue = made
        self._reader = self._queue._reader
        self._writer = self._queue._writer
        self._wlock = self._queue._wlock
        self._on_their_way = on_their_way
        self._largest = largest(fcntl.fcntl(self._writer.fileno(), fcntl.F_GETPIPE_SZ) // _PAGE, on_their_way)
        self._by_thread = False
        self._poll = select.poll()
        self._poll.register(self._reader.fileno(), select.POLLIN)
        # A loader that is garbage asks its workers to leave through this queue. If the pipe were garbage with it, the
        # pipe might be closed by then, and its descriptor might belong to another file. This finalizer keeps the pipe.
        weakref.finalize(self, _nothing, self._reader, self._writer).atexit = False

    def put(self, item: Any) -> None:
        """Sends an item."""
        message = _pickled(item)
        if not self._by_thread and self._fits(len(message)):
            with self._wlock:
                self._writer.send_bytes(message)
        else:
            self._by_thread = True
            self._queue.put(_Pickled(message))

    def _fits(self, size: int) -> bool:
        """Whether ``on_their_way`` messages of this size fit in the pipe, which is enlarged where this helps."""
        if size <= self._largest:
            return True
        try:
            pages = fcntl.fcntl(self._writer.fileno(), fcntl.F_SETPIPE_SZ, _LARGE_PIPE) // _PAGE
        except OSError:  # the user has reached the system's limit on pipe memory
            return False
        self._largest = largest(pages, self._on_their_way)
        return size <= self._largest

    def get(self, timeout: float) -> Any:
        """The next item.

        Raises:
          queue.Empty: no item came within ``timeout`` seconds.
        """
        if not self._poll.poll(1e3 * timeout):
            raise queue.Empty
        return pickle.loads(self._reader.recv_bytes())

    def cancel_join_thread(self) -> None:
        """Lets the process end before everything is sent."""
        self._queue.cancel_join_thread()

    def close(self) -> None:
        """Declares that this process sends no more."""
        self._queue.close()


def _nothing(*_: object) -> None:
    pass


_REDUCERS: Final[dict[type[Any], Callable[[Any], Any]]] = (
    look_up("multiprocessing.reduction.ForkingPickler._extra_reducers") or {}
)
"""The reducers registered with ``ForkingPickler``: the live table, which grows with later registrations."""


def reduction_of(obj: Any) -> Any:
    """The result of an object's reducer, where ``ForkingPickler`` differs from ``pickle``; else ``NotImplemented``.

    It serves as a ``reducer_override``: a pickler asks it for each object whose type is not built into every pickler.
    """
    cls = type(obj)
    reduce = None if cls is type or cls is FunctionType else _REDUCERS.get(cls)  # handled before reducers
    return NotImplemented if reduce is None else reduce(obj)


@final
class _MessagePickler(pickle.Pickler):
    """Pickles as ``ForkingPickler`` does."""

    def reducer_override(self, obj: Any) -> Any:
        return reduction_of(obj)


def _pickled(item: Any) -> bytes:
    message = io.BytesIO()
    _MessagePickler(message).dump(item)
    return message.getvalue()


@final
class _Pickled:
    """An object that is pickled already: pickling it embeds its bytes, and unpickling it unpickles them."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._message,)


def largest(pages: int, messages: int) -> int:
    """The largest size of a message, in bytes, of which ``messages`` fit in a pipe of ``pages`` pages.

    No two messages share a page: a page without room for a whole further message stays partly empty.
    """
    header = 4
    if messages <= pages:
        return pages // messages * _PAGE - header
    return _PAGE // -(-messages // pages) - header


if sys.platform == "linux":

    @final
    class _Context(ForkContext):
        """Starts processes as the default context does; torch needs a subclass of ``multiprocessing``'s own class."""

        def __init__(self, on_their_way: int) -> None:
            super().__init__()
            self._on_their_way = on_their_way

        def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 - torch calls this name
            """A queue for a loader."""
            made = multiprocessing.get_context("fork").Queue()
            return WorkerQueues(made, self._on_their_way) if PIPES.is_usable(made) else made


def context_for(context: Any, num_workers: int, prefetch_factor: int | None) -> Any:
    """The context that starts loader workers, with faster queues where this is possible.

    Args:
      context: the user's context; ``None`` for the default.
      num_workers: how many loader workers there are.
      prefetch_factor: how many batches of each worker are on their way.
    """
    if sys.platform != "linux" or not num_workers:
        return context
    if not PIPES.is_usable():
        return context
    plain = type(context) is ForkContext or (context is None and multiprocessing.get_start_method() == "fork")
    # Besides batches, each worker sends a message when it begins an epoch; the last such message may still be unread.
    return _Context(num_workers * ((prefetch_factor or 2) + 1) + 1) if plain else context
