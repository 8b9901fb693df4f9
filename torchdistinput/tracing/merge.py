"""The trace files of all ranks as one, on one clock, with arrows from who came last to who waited.

Each host has a clock of its own. The ranks of a vote exchange messages both ways: the fastest one each way bounds by
how much two clocks differ, from above and from below; the middle is taken, and half of the distance is the bound of the
error. Clocks drift, so this is done for the first votes and for the last ones, and interpolated in between. Hosts that
exchanged no message are set along the partners of their ranks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from torchdistinput.tracing.events import FIRST_PID, line_of
from torchdistinput.tracing.report import RankFile

_MESSAGES: Final = 64
"""Messages of two ranks, at each end of the run, from which the difference of their clocks is taken."""
_SHORT_WAIT_US: Final = 20

_Event = Mapping[str, Any]
_Key = tuple[int, int]  # the iterator, and the number of a vote or step


class Clock(NamedTuple):
    """What is added to the clock of a host: at two times, by its own clock. All in nanoseconds."""

    at: tuple[float, float]
    offsets: tuple[float, float]
    bound: float

    def offset(self, time: float) -> float:
        """At a time of the host's clock."""
        begin, end = self.at
        part = min(1.0, max(0.0, (time - begin) / (end - begin))) if end > begin else 0.0
        return self.offsets[0] + part * (self.offsets[1] - self.offsets[0])


def merge(files: Mapping[int, RankFile], out: Path, notes: list[str]) -> tuple[int, float]:
    """Writes the merged trace.

    Args:
      files: of each rank.
      out: the file; compressed if its name ends in ``.gz``.
      notes: what is missing, for whoever reads the file; gets what is said of the clocks.

    Returns:
      The number of events, and the largest error of a clock, in seconds.
    """
    messages = {rank: _messages(file) for rank, file in files.items()}
    clocks = set_clocks(files, messages)
    lost = sorted({file.facts["host"] for file in files.values()} - set(clocks))
    if lost:
        notes.append(f"no messages tell how wrong the clocks of these hosts are: {', '.join(lost)[:200]}")
    base = min(file.facts["base_ns"] for file in files.values())
    arrows = _arrows(files)
    bounds = {host: round(clock.bound) for host, clock in clocks.items()}
    about = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "otherData": {"bounds_ns": bounds, "notes": notes}}
    number = 0
    with gzip.open(out, "wt", compresslevel=5) if out.suffix == ".gz" else out.open("w") as text:
        text.write(f'{json.dumps(about)[:-1]}, "traceEvents": [\n')
        for rank, file in files.items():
            own_base, clock = file.facts["base_ns"], clocks.get(file.facts["host"], _RIGHT)
            for event in _with_arrows(rank, file, arrows):
                moved = dict(event)
                if "ts" in event:
                    shift = own_base - base + clock.offset(own_base + 1000 * event["ts"])
                    moved["ts"] = round(event["ts"] + shift / 1000, 3)
                text.write((",\n" if number else "") + line_of(moved)[:-2])
                number += 1
        text.write("\n]}\n")
    return number, max(bounds.values()) / 1e9


_RIGHT: Final = Clock((0, 0), (0, 0), 0)


def _messages(file: RankFile) -> dict[int, dict[_Key, tuple[int, int]]]:
    """For each partner and vote: when this rank's message was sent and the partner's received, by this rank's clock."""
    found: dict[int, dict[_Key, tuple[int, int]]] = {}
    base = file.facts["base_ns"]
    for event in file.events():
        args = event.get("args", {})
        for peer, (sent, received) in args.get("peers", {}).items():
            key = args["iterator"], args["vote"]
            found.setdefault(int(peer), {})[key] = base + round(1000 * sent), base + round(1000 * received)
    return found


def set_clocks(
    files: Mapping[int, RankFile], messages: Mapping[int, Mapping[int, Mapping[_Key, tuple[int, int]]]]
) -> dict[str, Clock]:
    """The clock of each host, by the clock of the host of the first rank; none for a host that no message reached."""
    host = {rank: str(file.facts["host"]) for rank, file in files.items()}
    clocks = {host[min(files)]: _RIGHT}
    known = [min(files)]
    known += [rank for rank in files if host[rank] in clocks and rank not in known]
    for one in known:  # grows as it is read
        for other in messages[one]:
            if other not in files or host[other] in clocks:
                continue
            both = sorted(messages[one][other].keys() & messages[other].get(one, {}).keys())
            if both:
                pairs = [(*messages[one][other][key], *messages[other][one][key]) for key in both]
                clocks[host[other]] = _difference(pairs, clocks[host[one]])
                known += [rank for rank in files if host[rank] == host[other]]
    return clocks


def _difference(pairs: list[tuple[int, int, int, int]], clock: Clock) -> Clock:
    """The clock of a host by messages with one whose clock is set."""
    ends = []
    for some in (pairs[:_MESSAGES], pairs[-_MESSAGES:]):
        # What is added to the other clock is at least (sent here - received there), and at most (received here - sent
        # there), for each message; here by the common clock.
        low = max(sent + round(clock.offset(sent)) - got for sent, _, _, got in some)
        high = min(got + round(clock.offset(got)) - sent for _, got, sent, _ in some)
        ends.append((some[len(some) // 2][2], (low + high) / 2, abs(high - low) / 2))
    at, offsets, bounds = zip(*ends, strict=True)
    return Clock((at[0], at[1]), (offsets[0], offsets[1]), max(bounds) + clock.bound)


class _Arrows(NamedTuple):
    begins: dict[int, dict[_Key, list[int]]]  # by rank and vote: the numbers of the arrows from it
    ends: dict[int, dict[_Key, int]]  # by rank and step


def _arrows(files: Mapping[int, RankFile]) -> _Arrows:
    """The arrows from the vote of the rank that came last to the step, of each other rank, that had waited for it."""
    found = _Arrows({rank: {} for rank in files}, {rank: {} for rank in files})
    votes = {rank: set[_Key]() for rank in files}
    steps = {rank: set[_Key]() for rank in files}
    late: list[tuple[int, _Key, int, _Key]] = []
    for rank, file in files.items():
        for event in file.events():
            stage, args = event.get("cat"), event.get("args", {})
            if stage == "vote":
                vote, step = (args["iterator"], args["vote"]), (args["iterator"], args["step"])
                votes[rank].add(vote)
                if args.get("late", 0) >= _SHORT_WAIT_US and args["last"] in files and args["steps"]:
                    late.append((args["last"], vote, rank, step))
            elif stage == "step":
                steps[rank].add((args["iterator"], args["step"]))
    for number, (last, vote, rank, step) in enumerate(late, 1):
        if vote in votes[last] and step in steps[rank]:  # the file of a killed rank ends before
            found.begins[last].setdefault(vote, []).append(number)
            found.ends[rank][step] = number
    return found


def _with_arrows(rank: int, file: RankFile, arrows: _Arrows) -> Iterator[_Event]:
    begins, ends = arrows.begins[rank], arrows.ends[rank]
    for event in file.events():
        yield event
        stage, args = event.get("cat"), event.get("args", {})
        at = {"cat": "last voter", "name": "waited for", "pid": FIRST_PID + rank, "tid": event["tid"]}
        if stage == "vote":
            for number in begins.get((args["iterator"], args["vote"]), ()):
                yield {"ph": "s", "id": number, "ts": event["ts"], **at}
        if stage == "step" and (number := ends.get((args["iterator"], args["step"]), 0)):
            yield {"ph": "f", "bp": "e", "id": number, "ts": event["ts"], **at}
