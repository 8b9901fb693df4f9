"""What the library logs in a rank, where no fixture of pytest can be."""

from __future__ import annotations

import logging


def lines_logged() -> list[str]:
    """The lines that the library logs in this rank from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchdistinput")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines
