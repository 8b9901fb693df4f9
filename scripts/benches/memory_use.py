"""How much memory this process takes, as the kernel says."""

from __future__ import annotations

from pathlib import Path

__all__ = ["peak_mib", "reset_peak"]

_STATUS = Path("/proc/self/status")


def peak_mib() -> float:
    """The largest resident size since the start, or since ``reset_peak``, in MiB.

    Raises:
      OSError: there is no /proc here.
    """
    return _kib("VmHWM") / 1024


def reset_peak() -> float:
    """Forgets the peak so far; the resident size now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _kib("VmRSS") / 1024


def _kib(name: str) -> int:
    lines = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(lines[0].split()[1])
