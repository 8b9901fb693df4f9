"""The numbers of a run: of each rank, over time, and the last steps in full. One more pass over the files."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, final

from torchdistinput.report.causes import UnexplainedTime, UnexplainedTimes, name_of
from torchdistinput.report.clocks import Clocks
from torchdistinput.report.last_votes import LastVote, common, timed_spans
from torchdistinput.report.read_trace import RunTrace, vote_key
from torchdistinput.report.verdict import RankTimes, Verdict, verdict

BUCKETS: Final = 60
"""Into how many parts the time of the run is divided."""
SHOWN_RANKS: Final = 16
"""How many ranks are shown one by one where there are more: those that made others wait, or waited, the longest."""
SHOWN_STEPS: Final = 8
"""How many of the last steps are shown in full."""
_EARLY_NS: Final = 2_000_000_000
"""From which on a record that ends before the others is spoken of: a rank writes five times a second."""
_MOST_SPANS: Final = 4096
_MOST_FILES: Final = 10_000


@final
@dataclass(frozen=True)
class ShownSpan:
    """A span of the last steps, on the common clock, in nanoseconds since the start of the run."""

    stage: str
    epoch: int
    step: int
    start: int
    end: int
    name: str | None
    worker: int | None


@final
@dataclass
class RankNumbers:
    """What one rank did, in seconds where nothing else is said.

    Args:
      rank: the rank.
      host: its host.
      times: what the verdict is made of.
      steps: steps that it delivered.
      samples: samples of its parts.
      num_bytes: bytes of its parts.
      last: how often others waited for it.
      stages: the time in each stage: ``draw``, ``fetch``, ``copy``, ``vote``, ``wait``, ``step``.
      parts: the time of reading in ``sampler``, ``getitem`` and ``collate``.
      files: the time of reading each file, the longest ones first.
      waiting: of each part of the run's time, the share in which the training loop waited.
      late: the same for the time in which others waited for this rank.
      cost: the sum of its costs, with ``balance=``; ``None`` without.
      shares: samples or tokens of each source of a mixture, over all ranks.
      spans: the last steps, for the ranks that are shown.
    """

    rank: int
    host: str
    times: RankTimes
    steps: int = 0
    samples: int = 0
    num_bytes: int = 0
    last: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    files: dict[str, float] = field(default_factory=dict)
    waiting: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    late: list[float] = field(default_factory=lambda: [0.0] * BUCKETS)
    cost: float | None = None
    shares: dict[str, int] = field(default_factory=dict)
    spans: list[ShownSpan] = field(default_factory=list)


@final
@dataclass(frozen=True)
class Summary:
    """The numbers of a run.

    Args:
      run: its name.
      version: of torchdistinput, which wrote the trace.
      world_size: how many ranks it had; not all may have a file.
      seconds: from the first to the last span.
      began_ns: the start, nanoseconds since 1970 on the common clock.
      verdict: what the numbers say.
      ranks: of each rank with a file.
      notes: what is missing or was left out, a sentence each.
      clock_bound_ns: the largest error of a clock.
      assumes: what that rests on.
    """

    run: str
    version: str
    world_size: int
    seconds: float
    began_ns: int
    verdict: Verdict
    ranks: Sequence[RankNumbers]
    notes: Sequence[str]
    clock_bound_ns: int
    assumes: str

    def as_json(self) -> dict[str, Any]:
        """The numbers as a value of JSON, without the last steps."""
        told = {name: getattr(self, name) for name in ("run", "version", "world_size", "seconds", "began_ns")}
        told["verdict"] = asdict(self.verdict)
        told["clocks"] = {"bound_ns": self.clock_bound_ns, "assumes": self.assumes}
        told["notes"] = list(self.notes)
        told["ranks"] = [{name: each for name, each in asdict(rank).items() if name != "spans"} for rank in self.ranks]
        return told


def summarize(trace: RunTrace, clocks: Clocks, last: Mapping[int, LastVote]) -> Summary:
    """Reads the files once more."""
    bounds = [common(trace, clocks, rank, (votes.began or 0, votes.ended)) for rank, votes in trace.votes.items()]
    began, ended = min(start for start, _ in bounds), max(end for _, end in bounds)
    late = _late_times(trace, last)
    made_wait = {rank: sum(time.end - time.start for time in late[rank]) for rank in trace.files}
    waited = {rank: sum(votes.wait_end) - sum(votes.wait_start) for rank, votes in trace.votes.items()}
    shown = shown_ranks(made_wait, waited)
    covered = (
        (first + steps - 1 for first, steps in zip(votes.first_step, votes.steps, strict=True))
        for votes in trace.votes.values()
    )
    final_step = max((step for steps in covered for step in steps), default=0)
    ranks = []
    for rank in trace.files:
        reading = _RankReader(trace, clocks, rank, (began, ended), final_step if rank in shown else None)
        ranks.append(reading.numbers(late[rank]))
    any_file = next(iter(trace.files.values()))
    world_size = max(file.world_size for file in trace.files.values())
    return Summary(
        run=any_file.run,
        version=any_file.version,
        world_size=world_size,
        seconds=(ended - began) / 1e9,
        began_ns=began,
        verdict=_verdict(ranks, world_size),
        ranks=ranks,
        notes=[*trace.notes, *_early_ends(trace, clocks)],
        clock_bound_ns=max(clocks.bounds.values()),
        assumes=clocks.assumes,
    )


def _verdict(ranks: Sequence[RankNumbers], world_size: int) -> Verdict:
    found = verdict([rank.times for rank in ranks])
    if len(ranks) == world_size:
        return found
    return replace(found, text=f"of {len(ranks)} of {world_size} ranks only, as no more have spans here: {found.text}")


def _early_ends(trace: RunTrace, clocks: Clocks) -> list[str]:
    """Whose record ends before the others."""
    ends = {rank: common(trace, clocks, rank, (0, votes.ended))[1] for rank, votes in trace.votes.items()}
    last = max(ends.values())
    return [
        f"the record of rank {rank} ends {(last - end) / 1e9:.0f} s before the last one"
        for rank, end in ends.items()
        if last - end > _EARLY_NS
    ]


def shown_ranks(made_wait: Mapping[int, float], waited: Mapping[int, float]) -> set[int]:
    """The ranks that are shown one by one: all, where there are not too many."""
    half = SHOWN_RANKS // 2
    if len(made_wait) <= SHOWN_RANKS:
        return set(made_wait)
    chosen = sorted((rank for rank in made_wait if made_wait[rank]), key=lambda rank: -made_wait[rank])[:half]
    others = sorted(waited.keys() - set(chosen), key=lambda rank: -waited[rank])
    return {*chosen, *others[: SHOWN_RANKS - len(chosen)]}


def _late_times(trace: RunTrace, last: Mapping[int, LastVote]) -> dict[int, list[UnexplainedTime]]:
    """For each rank the times in which others waited for it."""
    times: dict[int, list[UnexplainedTime]] = {rank: [] for rank in trace.files}
    for vote in last.values():
        for rank, start, end in vote.times():
            times[rank].append(UnexplainedTime(start, end, vote.first_step))
    return times


@final
class _RankReader:
    """One pass over the file of a rank."""

    def __init__(
        self, trace: RunTrace, clocks: Clocks, rank: int, span_of_run: tuple[int, int], final_step: int | None
    ) -> None:
        self._trace, self._clocks, self._rank = trace, clocks, rank
        self._began, self._ended = span_of_run
        self._final_step = final_step
        self._spans: deque[ShownSpan] = deque(maxlen=_MOST_SPANS)
        self._workers: set[int] = set()
        self._reading = 0.0
        seconds = (self._ended - self._began) / 1e9
        none = RankTimes(rank=rank, seconds=seconds, waiting=0.0)
        self._numbers = RankNumbers(rank=rank, host=trace.files[rank].host, times=none)

    def numbers(self, late: Sequence[UnexplainedTime]) -> RankNumbers:
        """All numbers of the rank."""
        trace, numbers, votes = self._trace, self._numbers, self._trace.votes[self._rank]
        starts, ends = (common(trace, self._clocks, self._rank, times) for times in (votes.wait_start, votes.wait_end))
        waits = [UnexplainedTime(*each) for each in zip(starts, ends, votes.wait_step, strict=True)]
        for times, buckets in ((waits, numbers.waiting), (late, numbers.late)):
            for time in times:
                self._add_over_time(buckets, time.start, time.end)
        late_times, wait_times = UnexplainedTimes(late), UnexplainedTimes(waits)
        for span, start, end in timed_spans(trace, self._clocks, self._rank):
            step = vote_key(span, span["s"])
            late_times.add(span, step, start, end)
            wait_times.add(span, step, start, end)
            self._add(span, step, start, end)
        late_in, files = late_times.causes()
        waited_in, waited_files = wait_times.causes()
        numbers.last = len(late)
        numbers.shares = dict(votes.shares)
        numbers.files = dict(sorted(numbers.files.items(), key=lambda each: -each[1])[:SHOWN_RANKS])
        numbers.spans = list(self._spans)
        seconds = numbers.times.seconds
        workers = len(self._workers)
        fetched = "fetch" in numbers.stages
        numbers.times = RankTimes(
            rank=self._rank,
            seconds=seconds,
            waiting=numbers.stages.get("wait", 0.0),
            made_wait=sum(time.end - time.start for time in late) / 1e9,
            late_in=late_in,
            waited_in=waited_in,
            files=files,
            waited_files=waited_files,
            num_workers=workers if fetched else None,
            busy=self._reading / (workers * seconds) if workers and seconds else None,
        )
        return numbers

    def _add(self, span: Mapping[str, Any], step: int, start: int, end: int) -> None:
        kind, numbers = span["k"], self._numbers
        seconds = span["d"] / 1e9
        numbers.stages[kind] = numbers.stages.get(kind, 0.0) + seconds
        if kind == "fetch":
            if "worker" in span:
                self._workers.add(span["worker"])
                self._reading += seconds
            self._add_file(name_of(span), seconds)
        if kind in {"fetch", "draw"}:
            for name, part in span.get("parts", {}).items():
                numbers.parts[name] = numbers.parts.get(name, 0.0) + part / 1e9
        if kind == "step":
            self._add_step(span)
        if self._final_step is not None and step > self._final_step - SHOWN_STEPS:
            epoch, begin, name = span.get("e", 0), start - self._began, name_of(span) if kind == "fetch" else None
            self._spans.append(ShownSpan(kind, epoch, span["s"], begin, end - self._began, name, span.get("worker")))

    def _add_step(self, span: Mapping[str, Any]) -> None:
        numbers = self._numbers
        numbers.steps += 1
        numbers.samples += span.get("samples", 0)
        numbers.num_bytes += span.get("bytes", 0)
        if "cost" in span:
            numbers.cost = (numbers.cost or 0.0) + span["cost"]

    def _add_file(self, name: str | None, seconds: float) -> None:
        files = self._numbers.files
        if name is None:
            return
        files[name] = files.get(name, 0.0) + seconds
        if len(files) > _MOST_FILES:  # the half that took longest stays
            self._numbers.files = dict(sorted(files.items(), key=lambda each: -each[1])[: _MOST_FILES // 2])

    def _add_over_time(self, buckets: list[float], start: int, end: int) -> None:
        """Divides a time among the parts of the run's time."""
        width = max(1, self._ended - self._began) / BUCKETS
        for bucket in range(max(0, int((start - self._began) / width)), BUCKETS):
            low, high = self._began + bucket * width, self._began + (bucket + 1) * width
            if low >= end:
                break
            buckets[bucket] += max(0.0, min(end, high) - max(start, low)) / width
