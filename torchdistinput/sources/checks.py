"""Checks of what users give, whatever the annotations promise."""

from __future__ import annotations

__all__ = ["as_object", "check_callable", "checked_int"]


def checked_int(name: str, value: object, at_least: int | None = None) -> int:
    """The value, if it is an int. Local.

    Raises:
      TypeError: it is none.
      ValueError: it is less than ``at_least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value


def as_object(value: object) -> object:
    """Forgets what the annotation promised: callers may break it. Local."""
    return value


def check_callable(name: str, value: object) -> None:
    """Refuses what cannot be called. Local.

    Raises:
      TypeError: it cannot.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {type(value).__name__}: {value!r:.100}")
