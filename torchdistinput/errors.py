"""The exceptions of this library.

    InputError
    ├── ShardingError (ValueError)        the data cannot be divided among the workers as asked
    ├── BatchingError (ValueError)        a batch has no size, two sizes, or another structure than before
    ├── RankDisagreement                  ranks were given different inputs, options or states
    ├── CoordinationTimeout (TimeoutError)  a rank is late; it is named
    ├── RankLost                          a rank died, or stopped reading while others go on
    ├── SourceError                       the data of a rank failed: its dataset, file, reader or collate function
    └── StateMismatch                     a saved state does not fit the input that it is loaded into

    OutOfRangeError (StopIteration)       the end of the data, from ``DistributedIterator.get_next``

A message has three parts: what was found (with the rank, file or index), what was needed, and the way out.
Plain misuse of an argument (a wrong type, an unknown name) raises Python's own ``TypeError`` or ``ValueError``.
"""

from __future__ import annotations

__all__ = [
    "BatchingError",
    "CoordinationTimeout",
    "InputError",
    "OutOfRangeError",
    "RankDisagreement",
    "RankLost",
    "ShardingError",
    "SourceError",
    "StateMismatch",
]


class InputError(Exception):
    """Base class of the errors of distributed input. Raised itself where none of its subclasses fits."""


class ShardingError(InputError, ValueError):
    """Raised when the input cannot be divided among the workers under the policy."""


class BatchingError(InputError, ValueError):
    """Raised when a batch cannot be cut: no batch size, unequal batch sizes, or a changed structure."""


class RankDisagreement(InputError):
    """Raised on every rank when the ranks were given different inputs, options or states."""


class CoordinationTimeout(InputError, TimeoutError):
    """Raised when a rank did not join an exchange or a collective call in time. The message names the late ranks."""


class RankLost(InputError):
    """Raised when another rank died, or stopped reading before the data ended. The message names the rank."""


class SourceError(InputError):
    """Raised on every rank when the data of one rank failed; the failing rank has the original as ``__cause__``.

    All arguments are attributes, too. An unknown value is ``None``. Where several ranks failed at the same step, the
    values are those of the first rank.

    Args:
      message: the full text, as printed.
      file: the file that was read, if the data came from one.
      offset: the start of the record in the file, in bytes of the uncompressed content; or the position of the record
        in a fragment.
      resume_at: the start of the next record, in bytes. A reader gives it only if it is certain of it, and can start
        reading there and at ``offset``. With ``on_error="skip"`` reading continues there.
      rank: the rank that failed; ``None`` in a program of one process.
      epoch: the number of the epoch.
      step: the number of the step that failed.
      indices: the indices of the samples, as the sampler drew them; the first 1024 at most. An index that is neither an
        int nor text is given as its ``repr``.
      worker: the number of the loader worker that read the samples.
      kind: the class name of the original exception.
      traceback: the original's traceback, as text; the middle of a long one is left out.
    """

    def __init__(  # noqa: PLR0913 - a failure has many attributes, each optional
        self,
        message: str,
        *,
        file: str | None = None,
        offset: int | None = None,
        resume_at: int | None = None,
        rank: int | None = None,
        epoch: int | None = None,
        step: int | None = None,
        indices: tuple[int | str, ...] | None = None,
        worker: int | None = None,
        kind: str | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset
        self.resume_at = resume_at
        self.rank = rank
        self.epoch = epoch
        self.step = step
        self.indices = indices
        self.worker = worker
        self.kind = kind
        self.traceback = traceback


class StateMismatch(InputError):
    """Raised when a saved state does not fit the input that it is loaded into."""


class OutOfRangeError(StopIteration):
    """Raised by ``get_next`` at the end of the data, as in TensorFlow; it is a ``StopIteration``."""
