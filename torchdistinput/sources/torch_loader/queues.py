"""What goes to loader workers and comes back from them, without a thread in between.

Problem. A queue of ``multiprocessing`` hands what is put to a thread, which pickles it and writes it to the pipe. A
request for a batch then waits until the main thread stops for the first time, and so does a batch until the worker's
decoding lets go of the interpreter; and each of them costs both processes two changes of threads, of which a loader of
small samples makes as many as batches.

Decision. Whoever puts a message writes it to the pipe, as long as messages are so small that all which can be on their
way fit in it together, so that nobody ever waits for the reader. From the first larger one on, all go the ordinary way,
in order: torch's loader has at most ``prefetch_factor`` batches of each worker on their way.

Messages are pickled as ``multiprocessing`` pickles them. But its pickler copies all reducers that anybody registered,
for each message: after a batch was decoded, in caches that know nothing of it, that takes as long as all other work on
the message together. Plain tuples, as most messages are, concern no reducer, and are pickled without any.

Linux, and workers that are forked; elsewhere torch's queues are as they were.
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

from torchdistinput.batches.containers import PLAIN_TYPES
from torchdistinput.coordination.private_names import look_up
from torchdistinput.sources.torch_loader.private_names import PIPES

__all__ = ["WorkerQueues", "context_for", "largest", "reduction_of"]

_PAGE: Final = 4096
_LARGE_PIPE: Final = 1 << 18


@final
class WorkerQueues:
    """A queue with one reader, as torch's loader uses it.

    Args:
      made: a queue of ``multiprocessing``, of which the pipe is used.
      on_their_way: messages that can be in the pipe at a time, at most.
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
        # A loader that is garbage takes leave of its workers through this queue. If the pipe were garbage, too, it
        # might be closed by then, and its number be another file's; but the finalizer refers to it.
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
        """Whether as many messages of this size as may come fit in the pipe, which is made larger where that helps."""
        if size <= self._largest:
            return True
        try:
            pages = fcntl.fcntl(self._writer.fileno(), fcntl.F_SETPIPE_SZ, _LARGE_PIPE) // _PAGE
        except OSError:  # this user has too many of them
            return False
        self._largest = largest(pages, self._on_their_way)
        return size <= self._largest

    def get(self, timeout: float) -> Any:
        """The next item.

        Raises:
          queue.Empty: none came in so many seconds.
        """
        if not self._poll.poll(1e3 * timeout):
            raise queue.Empty
        return pickle.loads(self._reader.recv_bytes())

    def cancel_join_thread(self) -> None:
        """The process does not wait at its end until everything is sent."""
        self._queue.cancel_join_thread()

    def close(self) -> None:
        """This process sends no more."""
        self._queue.close()


def _nothing(*_: object) -> None:
    pass


_REDUCERS: Final[dict[type[Any], Callable[[Any], Any]]] = (
    look_up("multiprocessing.reduction.ForkingPickler._extra_reducers") or {}
)
"""What was registered with ``ForkingPickler`` so far, and will be."""


def reduction_of(obj: Any) -> Any:
    """What ``ForkingPickler`` makes of an object, where ``pickle`` alone would do otherwise; else ``NotImplemented``.

    To be asked for each object that is none of the types that every pickler knows: a ``reducer_override``.
    """
    cls = type(obj)
    reduce = None if cls is type or cls is FunctionType else _REDUCERS.get(cls)  # these two are looked at before
    return NotImplemented if reduce is None else reduce(obj)


@final
class _Pickler(pickle.Pickler):
    """Pickles as ``ForkingPickler`` does."""

    def reducer_override(self, obj: Any) -> Any:
        """See ``reduction_of``."""
        return reduction_of(obj)


def _pickled(item: Any) -> bytes:
    if type(item) is tuple and _are_plain(item):
        return pickle.dumps(item)
    message = io.BytesIO()
    _Pickler(message).dump(item)
    return message.getvalue()


def _are_plain(items: tuple[Any, ...]) -> bool:
    """Whether all of them are such, or tuples of such, that no reducer is asked for them."""
    for item in items:
        cls = type(item)
        if cls not in PLAIN_TYPES and not (cls is tuple and _are_plain(item)):
            return False
    return True


@final
class _Pickled:
    """Something that was pickled, and is unpickled by unpickling it."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._message,)


def largest(pages: int, messages: int) -> int:
    """The bytes of a message of which so many fit in a pipe: a page that has no room for a whole one stays so."""
    header = 4
    if messages <= pages:
        return pages // messages * _PAGE - header
    return _PAGE // -(-messages // pages) - header


if sys.platform == "linux":

    @final
    class _Context(ForkContext):
        """Starts processes as the default one does; torch wants a descendant of ``multiprocessing``'s own."""

        def __init__(self, on_their_way: int) -> None:
            super().__init__()
            self._on_their_way = on_their_way

        def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 - that is its name
            """A queue for a loader."""
            made = multiprocessing.get_context("fork").Queue()
            return WorkerQueues(made, self._on_their_way) if PIPES.is_usable(made) else made


def context_for(context: Any, num_workers: int, prefetch_factor: int | None) -> Any:
    """What starts loader workers, with its queues replaced where that can be.

    Args:
      context: the user's; ``None`` for the default.
      num_workers: loader workers.
      prefetch_factor: batches on their way from each.
    """
    if sys.platform != "linux" or not num_workers:
        return context
    if not PIPES.is_usable():
        return context
    plain = type(context) is ForkContext or (context is None and multiprocessing.get_start_method() == "fork")
    # Beside batches, each worker says that it begins an epoch, and the last word may be on its way.
    return _Context(num_workers * ((prefetch_factor or 2) + 1) + 1) if plain else context
