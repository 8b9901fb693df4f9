"""The errors of an iterator that ended: why a later call, another thread or a forked process cannot go on with it."""

from __future__ import annotations

from torchdistinput.errors import InputError


def not_an_end(error: BaseException) -> BaseException:
    """The error; for a ``StopIteration``, which would end the user's loop as if the data had ended, another one."""
    if not isinstance(error, StopIteration):
        return error
    found = RuntimeError("an iterator inside torchdistinput ended too early; this is a defect of torchdistinput.")
    found.__cause__ = error
    return found


def after_the_error(error: BaseException, summary: str, delivered: int) -> InputError:
    """The error of the next call after an error that ended the epoch. Later calls return the end of the data.

    The original error is raised once. A loop that continues after errors would meet it for ever, each time with a
    longer traceback. The original is not kept either, as its traceback keeps batches in memory.

    Args:
      error: the original error.
      summary: the original error in one line.
      delivered: steps before the error.
    """
    if isinstance(error, Exception):
        return InputError(
            f"this epoch ended with the error above, after step {delivered}, and cannot go on. Begin another iterator, "
            f"or go on from a state that was saved before. The error was {summary}"
        )
    return InputError(
        f"the input was interrupted while it read, after step {delivered}, by {type(error).__name__}; what it was "
        "reading is lost, so it cannot go on. Begin another iterator, or go on from a state that was saved before."
    )


def closed_elsewhere(delivered: int) -> InputError:
    """The error of a thread that reads an iterator while another thread closes it."""
    return InputError(
        f"the iterator was closed by another thread after step {delivered}, while this one reads it. Let the thread "
        "that reads leave its loop first: set a flag that the loop looks at, and close afterwards."
    )


def left_to_parent() -> InputError:
    """The error of a forked process that reads an iterator of its parent."""
    return InputError(
        "this process was forked from the process that began the iterator, and the iterator goes on there: its loader "
        "workers, background thread and connections to other ranks are in that process. With one rank, begin another "
        "iterator here: iter(loader)."
    )
