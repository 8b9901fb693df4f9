"""A Ctrl-C, or what a handler of signals raises, at any line of some files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


class Interruption:
    """A Ctrl-C, or an exception like this one, at the n-th line that is run of these modules; counts them."""

    def __init__(
        self, line: int, *modules: ModuleType, raises: Callable[[], BaseException] = KeyboardInterrupt
    ) -> None:
        self._line = line
        self._raises = raises
        self._files = {module.__file__ for module in modules}
        self.lines = 0
        self.at: tuple[str, int] | None = None  # where it came

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                sys.settrace(None)
                self.at = frame.f_code.co_filename, frame.f_lineno
                raise self._raises()
        return self

    def press_in(self, call: Callable[[], Any]) -> bool:
        """Whether it came."""
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        return self.at is not None
