"""The lines of a trace file: each is an event of Chrome's trace event form, so that Perfetto opens the file as it is.

A file is a list without its end: a line ``[``, then an event a line, each with a comma behind it. The first event
names the process, and has the facts of the file. A process is a rank. A track is a stage of one dataset, or a loader
worker: slices of one track must not overlap. Times are microseconds since the start of the file's clock.

The slices, by ``cat``, with what is in ``args`` beside ``epoch``, ``step`` and ``iterator`` (its number among those of
the program). Times in ``args`` are microseconds, too.

- ``step``: the training code of a delivered step: ``samples`` of this rank, ``global`` of all, ``bytes``, ``cost``, and
  how many steps are ``ready``.
- ``wait``: in ``next``; ``in`` and ``files``: what for, see ``waits.explain_wait``.
- ``draw``, ``fetch``, ``copy``: ``sampler``, ``getitem``, ``collate``; ``samples``; ``worker``, ``file``, ``record``,
  ``index``.
- ``vote``: its number, ``vote``; ``steps`` that were agreed, ``held`` here, read ``ahead``; ``peers``: for each partner
  when this rank's message was sent and the partner's was received; who came ``last``, ``made_wait``: by how much, and
  ``late``: by how much later than this rank. On the rank that came last ``in`` and ``files``: what it did meanwhile.
- ``stop``, an instant: the iterator ended; ``dataset``, ``shares`` of the sources of a mixture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

FORM: Final = 2
"""The form of the files."""
FIRST_PID: Final = 100_000  # the process number of rank 0; 0 would be the idle process to Perfetto
STAGES: Final = ("step", "wait", "draw", "fetch", "copy", "vote")
"""The tracks of a dataset, from above."""
_TRACKS: Final = 1000
"""Numbers of tracks that a dataset may have, with those of its loader workers."""

_ENCODE: Final = json.JSONEncoder(separators=(",", ":")).encode


def line_of(event: Mapping[str, Any]) -> str:
    """An event as a line of a file."""
    return f"{_ENCODE(event)},\n"


def head(rank: int, host: str, pid: int, facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The first events of a rank's file."""
    yield _named("process_labels", rank, 0, {"labels": f"{host}, process {pid}", **facts})
    yield _named("process_name", rank, 0, {"name": f"rank {rank}"})
    yield _named("process_sort_index", rank, 0, {"sort_index": rank})


def track_of(dataset: int, stage: str, worker: int | None) -> int:
    """The number of a track."""
    place = STAGES.index(stage) if worker is None else len(STAGES) + worker % (_TRACKS - len(STAGES))
    return 1 + _TRACKS * dataset + place


def track_names(rank: int, track: int, name: str) -> Iterator[Mapping[str, Any]]:
    """The events that name a track, and put it in its place."""
    yield _named("thread_name", rank, track, {"name": name})
    yield _named("thread_sort_index", rank, track, {"sort_index": track})


def _named(what: str, rank: int, track: int, args: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"ph": "M", "name": what, "pid": FIRST_PID + rank, "tid": track, "args": args}
