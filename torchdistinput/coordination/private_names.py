"""The lookup of private names of torch and CPython, and the private names that the ranks and the pipeline use.

Problem. A later release may lack a private name; an import of the name would then keep the whole library from loading.

Decision. Private names are used in two rooms only: here, and in ``sources/torch_loader``. Each
room has one table with a reason for each name. A name is looked up, never imported. Code that needs a name asks an
``OptionalFeature`` whether it is there. Where it is missing, the code takes the public way, which is slower, and logs
this once. ``tests/test_private_names.py`` reads the syntax tree of the package for private names elsewhere, and leaves
out each feature in turn.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, final

import torch

_LOG = logging.getLogger("torchdistinput")

PRIVATE_NAMES: Final = {
    "torch.distributed.distributed_c10d._get_default_store": (
        "the store of the default group, at which ranks find each other; torch's own FSDP gets it so. There is no "
        "public way to it. Without it: the ranks meet at the store at MASTER_ADDR and MASTER_PORT"
    ),
    "torch.distributed.Store.clone": (
        "a second connection to a store; public, new in torch 2.8. Without it: the ranks find each other over the "
        "training code's own connection to the store, and a request of it may wait"
    ),
    "torch.distributed.Backend.backend_capability": (
        "for which devices a backend is made: the default backend of a device need not take its tensors. Without it: "
        "tensors on accelerators travel over the CPU"
    ),
    "logging._lock": (
        "before Python 3.13, a Ctrl-C in what logging runs at a fork leaves its lock held for ever, and other threads "
        "wait for it. Without it: so it is, as with torch's own loader"
    ),
    "_thread.RLock._is_owned": "whether this thread holds that lock; the same",
    "torch.autograd.profiler._is_profiler_enabled": (
        "whether a profiler runs: the public record_function takes ten microseconds also where none does. Without it: "
        "each step is put into a range for the profiler, also where none runs, which takes some microseconds"
    ),
}
"""The private names of ranks and of the pipeline, each with the reason, and with the way without it."""


_MISSING: Final = object()


def look_up(name: str, missing: Any = None) -> Any:
    """The object with a dotted name, which may be private. Local.

    Args:
      name: the module, and the attributes in it.
      missing: the value that is returned where this release has no such name.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return missing


def _always() -> bool:
    return True


@final
class OptionalFeature:
    """Private names that a feature of the library needs together. It is left out where a name is missing.

    Args:
      without: the way without the names, for the log.
      names: dotted names, as in the table.
      attributes: names of attributes, as in the table, that the objects given to ``is_usable`` must have: attributes
        of instances, which a lookup in the class does not find.
      is_on: whether the feature is switched on.
    """

    def __init__(
        self, without: str, names: Sequence[str], attributes: Sequence[str] = (), is_on: Callable[[], bool] = _always
    ) -> None:
        self.attributes = attributes
        self._without = without
        self._missing = [name for name in names if look_up(name, _MISSING) is _MISSING]
        self._is_on = is_on
        self._was_logged = False

    def is_usable(self, *owners: object) -> bool:
        """Whether all names are there. The first time that a name is missing, this is logged. Local.

        Args:
          *owners: the objects that must have the attributes.
        """
        if not self._is_on():
            return False
        missing = self._missing
        if owners:
            missing = missing + [name for name in self.attributes if not _have(owners, name.rpartition(".")[2])]
        if missing and not self._was_logged:
            self._was_logged = True
            log_missing(missing, self._without)
        return not missing


def _have(owners: Sequence[object], name: str) -> bool:
    return all(hasattr(owner, name) for owner in owners)


def log_missing(names: Sequence[str], without: str) -> None:
    """Logs that this release lacks names, and the way without them. Local."""
    _LOG.warning(
        "torch %s on Python %s has no %s: %s. The batches are the same.",
        torch.__version__,
        sys.version.partition(" ")[0],
        ", ".join(names),
        without,
    )


def _part(name: str) -> OptionalFeature:
    """The part that needs only this name; the table has the way without it."""
    return OptionalFeature(PRIVATE_NAMES[name].partition("Without it: ")[2], [name])


_PROFILER: Final = _part("torch.autograd.profiler._is_profiler_enabled")
_DEFAULT_STORE: Final = _part("torch.distributed.distributed_c10d._get_default_store")
_CONNECTS_AGAIN: Final = _part("torch.distributed.Store.clone")
_LOGGING: Final = look_up("logging._lock")


def _look_at_profiler() -> Callable[[], bool]:
    if not _PROFILER.is_usable():
        return _always
    from torch.autograd import profiler  # noqa: PLC0415 - to look at its flag, which is set anew each time

    return partial(getattr, profiler, "_is_profiler_enabled")  # no frame of Python, as it is called for each step


profiler_runs: Final = _look_at_profiler()
"""Whether torch's profiler runs, the same for all threads."""


def default_store() -> Any:
    """The store of the default group; ``None`` where this torch gives no way to it. Local."""
    return look_up("torch.distributed.distributed_c10d._get_default_store")() if _DEFAULT_STORE.is_usable() else None


def another_connection(store: Any, seconds: float) -> Any:
    """The same store over a connection of its own; the store itself where this torch makes none. Local.

    Args:
      store: the store.
      seconds: how long to wait for it. Torch tries for twice the timeout of the store, in C++, where its host has just
        ended; a thread that comes back from there while Python exits aborts the process. Here torch is asked twice:
        where the process stood still the first time, torch has found its time over.
    """
    if not _CONNECTS_AGAIN.is_usable():
        return store
    usual = store.timeout
    store.set_timeout(min(usual, timedelta(seconds=seconds / 5)))
    try:
        try:
            found = store.clone()
        except RuntimeError:  # of the network
            found = store.clone()
    finally:
        store.set_timeout(usual)
    found.set_timeout(usual)
    return found


def holds_logging() -> bool:
    """Whether this thread holds the lock of ``logging``; false where this Python gives no way to it. Local."""
    is_owned = getattr(_LOGGING, "_is_owned", None)
    return is_owned is not None and bool(is_owned())


def give_back_logging() -> None:
    """This thread no longer holds the lock of ``logging``. Local."""
    while holds_logging():
        _LOGGING.release()


def devices_of_backend(backend: str) -> Sequence[str]:
    """The kinds of devices that a backend is made for; none where that is not known. Local."""
    capability = look_up("torch.distributed.Backend.backend_capability")
    return () if capability is None else capability.get(backend, ())
