"""The report as one HTML page."""

from __future__ import annotations

from torchdistinput.report.summary import Summary


def page(summary: Summary) -> str:
    """The page."""
    return str(summary.verdict)
