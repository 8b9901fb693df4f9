"""The clocks of all ranks, set to that of the lowest one, with a bound of the error.

A message tells an inequality: it was received after it was sent. With ``x`` for what is added to the clock of a rank,
``sent + x[a] <= received + x[b]``. Such differences are the lengths of a graph's edges, and the tightest bounds of
``x[a]`` that follow from all of them are the shortest paths from and to the reference, over any number of partners.
The ranks of a vote exchange messages both ways, which bounds ``x`` from above and from below; the middle is taken, and
half of the distance is the bound of its error. (NTP and Cristian's algorithm take one exchange between two clocks.)

Clocks drift: each inequality is moved to the middle of its window of time, and widened by what two clocks may differ
in speed. Between the middles of windows offsets are interpolated. The ranks of one host share a clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from torchdistinput.errors import InputError
from torchdistinput.report.read_trace import RunTrace, hosts

HOST_NS: Final = 1_000_000
"""By how much the clocks of two ranks of one host may differ: each reads its host's clock once, at its header."""
DRIFTS: Final = (1e-4, 1e-3)
"""By how much two clocks may differ in speed: quartz stays below the first, one that is being set below the second."""

_WINDOW_NS: Final = 1_000_000_000
_MOST_WINDOWS: Final = 1024
_FAR: Final = 1 << 60
_Times: TypeAlias = npt.NDArray[np.int64]
_Edges: TypeAlias = dict[tuple[int, int], _Times]  # (to, from): the bound of x[to] - x[from] in each window


@final
@dataclass(frozen=True, kw_only=True)
class Clocks:
    """What to add to the clock of each rank, over the time of the run.

    Args:
      reference: the rank whose clock is the common one.
      centers: times on the common clock, (windows,).
      offsets: for each rank, what is added to its clock at these times, (windows,).
      bounds: for each rank, the bound of the error of its offset, in nanoseconds at any time.
      assumes: what the bounds rest on, a sentence.
    """

    reference: int
    centers: npt.NDArray[np.int64]
    offsets: Mapping[int, npt.NDArray[np.int64]]
    bounds: Mapping[int, int]
    assumes: str

    def common(self, rank: int, times: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Times (nanoseconds since 1970) of a rank's clock on the common clock."""
        start, first = self.centers[0], self.offsets[rank][0]
        about = np.asarray(times, dtype=np.int64) + first
        more = np.interp(about - start, self.centers - start, self.offsets[rank] - first)
        shifted: npt.NDArray[np.int64] = about + np.rint(more).astype(np.int64)
        return shifted


@final
@dataclass(frozen=True)
class _Messages:
    """All messages from one rank to another: when sent, on the sender's clock, and when received, on the other's."""

    source: int
    target: int
    sent: _Times
    received: _Times


def set_clocks(trace: RunTrace) -> Clocks:
    """The clocks of the ranks of a run.

    Raises:
      InputError: ranks of several hosts that exchanged no messages, or whose messages contradict each other.
    """
    messages = list(_messages(trace))
    shared = [ranks for ranks in hosts(trace.files.values()).values() if len(ranks) > 1]
    for groups, drift in ((shared, DRIFTS[0]), ([], DRIFTS[0]), ([], DRIFTS[1])):
        clocks = _set(trace, messages, groups, drift)
        if clocks is not None:
            return clocks
    raise InputError(
        "the messages of the votes contradict each other, so the clocks cannot be set: a rank's clock ran more than "
        f"{DRIFTS[1]:.1%} faster than another, or files of different runs have one name"
    )


def _messages(trace: RunTrace) -> Iterator[_Messages]:
    """The messages of which both ranks told, for each pair of ranks and way."""
    for rank, votes in trace.votes.items():
        for peer, own in votes.messages.items():
            other = trace.votes[peer].messages.get(rank, {}) if peer in trace.votes else {}
            keys = own.keys() & other.keys()
            if keys:
                sent = np.array([own[key][0] for key in keys], dtype=np.int64) + trace.files[rank].base_ns
                received = np.array([other[key][1] for key in keys], dtype=np.int64) + trace.files[peer].base_ns
                yield _Messages(rank, peer, sent, received)


def _set(
    trace: RunTrace, messages: Sequence[_Messages], shared: Sequence[Sequence[int]], drift: float
) -> Clocks | None:
    """The clocks under assumptions; ``None`` if the messages contradict these."""
    ranks = list(trace.files)
    began = {rank: trace.files[rank].base_ns + (trace.votes[rank].began or 0) for rank in ranks}
    first = began[ranks[0]]
    length = max(votes.ended - (votes.began or 0) for votes in trace.votes.values())
    most = min(_MOST_WINDOWS, max(1, 4_000_000 // len(messages))) if messages else 1
    windows = max(1, min(most, -(-length // _WINDOW_NS)))
    width = max(1, -(-length // windows))
    centers = first + width // 2 + width * np.arange(windows, dtype=np.int64)
    high = low = np.zeros((len(ranks), windows), dtype=np.int64)
    # Where a message belongs in time is known on the common clock only; in the first round it is off by little.
    rough = {rank: np.full(windows, first - began[rank]) for rank in ranks}
    for _ in range(2):
        edges: _Edges = {}
        for each in messages:
            at = each.sent + rough[each.source][windows // 2]
            edges[each.source, each.target] = _bounds(each.received - each.sent, at, centers, drift)
        for group in shared:
            for pair in (pair for other in group[1:] for pair in ((group[0], other), (other, group[0]))):
                edges[pair] = np.minimum(edges.get(pair, np.int64(HOST_NS)), np.full(windows, HOST_NS))
        high = _paths(ranks, edges, windows)
        low = -_paths(ranks, {(target, source): bound for (source, target), bound in edges.items()}, windows)
        _check_connected(trace, high, low)
        rough = {rank: high[place] // 2 + low[place] // 2 for place, rank in enumerate(ranks)}
    if not np.all(low <= high) or not np.all((low[0] == 0) & (high[0] == 0)):
        return None
    offsets = {rank: low[place] + (high[place] - low[place]) // 2 for place, rank in enumerate(ranks)}
    for group in shared:  # of clocks that may be equal, none is moved
        for rank in group[1:]:
            offsets[rank] = np.clip(offsets[group[0]], low[ranks.index(rank)], high[ranks.index(rank)])
    between = int(drift * width / 2) if messages else 0
    bounds = {
        rank: between + int(np.maximum(high[place] - offsets[rank], offsets[rank] - low[place]).max())
        for place, rank in enumerate(ranks)
    }
    bounds[ranks[0]] = 0
    assumes = f"clocks differ in speed by at most {drift:.2%}"
    if shared:
        assumes += f", and ranks of one host share a clock to within {HOST_NS / 1e6:g} ms"
    return Clocks(reference=ranks[0], centers=centers, offsets=offsets, bounds=bounds, assumes=assumes)


def _bounds(bounds: _Times, at: _Times, centers: _Times, drift: float) -> _Times:
    """The least bound of a difference at each center, from bounds that held at other times."""
    width = int(centers[1] - centers[0]) if len(centers) > 1 else 1
    place = np.clip((at - centers[0] + width // 2) // width, 0, len(centers) - 1)
    widened = bounds + np.ceil(drift * np.abs(at - centers[place])).astype(np.int64)
    least = np.full(len(centers), _FAR, dtype=np.int64)
    np.minimum.at(least, place, widened)
    slope = int(np.ceil(drift * width)) * np.arange(len(centers), dtype=np.int64)
    forward = np.minimum.accumulate(least - slope) + slope
    backward = (np.minimum.accumulate((least + slope)[::-1]))[::-1] - slope
    return np.minimum(forward, backward)


def _paths(ranks: Sequence[int], edges: _Edges, windows: int) -> _Times:
    """The shortest paths from the first rank, (ranks, windows): Bellman and Ford's, in all windows at once."""
    place = {rank: number for number, rank in enumerate(ranks)}
    distance = np.full((len(ranks), windows), _FAR, dtype=np.int64)
    distance[0] = 0
    for _ in range(min(len(ranks), 100)):
        before = distance.copy()
        for (target, source), length in edges.items():
            far = distance[place[source]] >= _FAR // 2
            np.minimum(
                distance[place[target]],
                np.where(far, _FAR, distance[place[source]] + length),
                out=distance[place[target]],
            )
        if np.array_equal(before, distance):
            return distance
    if edges:
        distance[0] = -1  # a circle of negative length: no offsets meet all bounds
    return distance


def _check_connected(trace: RunTrace, high: _Times, low: _Times) -> None:
    for place, rank in enumerate(trace.files):
        if bool(np.any(high[place] >= _FAR // 2) or np.any(low[place] <= -_FAR // 2)):
            raise InputError(
                f"the clock of rank {rank} (host {trace.files[rank].host}) cannot be set: the files hold no "
                "messages of votes between it and the others, and times of several hosts cannot be compared without; "
                "take its file out of the folder to see the others"
            )
