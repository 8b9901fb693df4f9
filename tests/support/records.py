"""The records that a reader still has."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torchdistinput.sources.readers.interleave import Interleave


def records_of(reader: Interleave) -> list[Any]:
    """All records up to the end, as they become ready."""
    return [*chain.from_iterable(iter(reader.take_ready, []))]
