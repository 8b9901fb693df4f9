"""A Ctrl-C, or what a handler of signals raises, at any line of the library, or of some of its files."""

from __future__ import annotations

import gc
import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torchdistinput

PACKAGE = str(Path(torchdistinput.__file__).parent)


_UNHEARD = re.compile(r"with |(return( None| True| False)?|continue|break|pass)\s*(#.*)?$")


def is_unheard(name: str, line: int) -> bool:
    """Whether Python hears no signal at a line: at the exit of a ``with`` block, or where a block is left.

    Where a trace function raises as an ``except`` block is left, the exception that was caught there is never freed
    (Python 3.11).
    """
    return _UNHEARD.match(linecache.getline(name, line).strip()) is not None


class Interruption:
    """A Ctrl-C, or an exception like this one, at the n-th line that is run of these modules, or of all; counts them.

    No garbage is collected meanwhile, which would run lines of another iterator.

    Among all, not at the lines where Python hears no signal.
    """

    def __init__(
        self, line: int, *modules: ModuleType, raises: Callable[[], BaseException] = KeyboardInterrupt
    ) -> None:
        self._line = line
        self._raises = raises
        self._files = {module.__file__ for module in modules}
        self.lines = 0
        self.at: tuple[str, int] | None = None  # where it came

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self._files if self._files else not name.startswith(PACKAGE):
            return None
        if event == "line" and (self._files or not is_unheard(name, frame.f_lineno)):
            self.lines += 1
            if self.lines == self._line:
                sys.settrace(None)
                self.at = frame.f_code.co_filename, frame.f_lineno
                raise self._raises()
        return self

    def press_in(self, call: Callable[[], Any]) -> bool:
        """Whether it came."""
        gc.collect()
        gc.disable()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            gc.enable()
        return self.at is not None
