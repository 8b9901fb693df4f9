"""The plan of a loader before the first read: a value that is JSON, and its text of at most 30 lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final, final

from torchdistinput.plan.epoch_steps import EpochSteps
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.prefetch_depth import BYTES_AHEAD
from torchdistinput.plan.sharding import AutoShardPolicy
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.contract import SourceFacts
from torchdistinput.sources.kernel.reading_plan import HERE, ReadingPlan, ReadingShare

_MOST_RANKS: Final = 8  # with a line of their own in the text
_MOST_UNITS: Final = 1024


@final
@dataclass(frozen=True)
class Explanation:
    """What a loader will do in its next epoch. ``str`` of it is for people.

    Args:
      epoch: the number of the epoch.
      world_size: ranks that read different data.
      num_replicas: replicas on all ranks.
      policy: the policy in force.
      policy_reason: why it is.
      data: the kind of data and its order.
      batch_size: samples of a step on all ranks; ``None``: batches of the source's own sizes.
      whole: files, bytes and records in all, for files and fragments; else ``None``.
      shares: the same for each rank, where files are dealt out.
      kind: ``"file"``, ``"fragment"`` or ``"record"``: what the data comes in; ``None`` for other data.
      num_steps: steps of the epoch; ``None`` if that is not known before it is read.
      samples: samples of the epoch that all ranks get together; ``None`` likewise.
      unknown: why; empty if known.
      first_sizes: samples of each replica in the first step, where known.
      last_sizes: the same in the last step.
      steps_of_ranks: in how many steps each rank has samples, where ranks have batches of their own.
      read_twice: what is read by more than one rank, or by more than one loader worker of a rank.
      read_ahead: how far is read ahead.
      read_ahead_bytes: the bound of the bytes of steps that are ready; ``None`` where only their number is bounded.
      loader_workers: loader workers of each rank.
      user_code: each function of the user's, and where it runs.
      state: what a state holds, and where it can be loaded.
      state_is_collective: whether every rank must call ``state_dict``.
      unchecked: what the ranks cannot compare.
    """

    epoch: int
    world_size: int
    num_replicas: int
    policy: str
    policy_reason: str
    data: str
    batch_size: int | None
    whole: ReadingShare | None
    shares: tuple[ReadingShare, ...]
    kind: str | None
    num_steps: int | None
    samples: int | None
    unknown: str
    first_sizes: tuple[int, ...] | None
    last_sizes: tuple[int, ...] | None
    steps_of_ranks: tuple[int, ...] | None
    read_twice: str
    read_ahead: str
    read_ahead_bytes: int | None
    loader_workers: int
    user_code: tuple[tuple[str, str], ...]
    state: str
    state_is_collective: bool
    unchecked: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, ints and strings, with the same keys always."""
        code = [{"what": what, "where": where} for what, where in self.user_code]
        found: dict[str, Any] = json.loads(json.dumps({**asdict(self), "user_code": code}))
        return found

    def __str__(self) -> str:
        """The plan in at most 30 lines."""
        return "\n".join(f"{name + ':' if name else '':<13}{line}" for name, line in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        whole = "" if self.whole is None else _told(self.whole)
        lines = [
            ("Data", f"{self.data}; {whole} in all" if whole else self.data),
            ("Ranks", f"{self.world_size}, with {_count(self.num_replicas, 'replica')} in all"),
            ("Policy", f"{self.policy}: {self.policy_reason}"),
            (
                "Batch",
                "as the source makes it" if self.batch_size is None else f"{self.batch_size} samples over all ranks",
            ),
            (f"Epoch {self.epoch}", self._epoch()),
        ]
        for name, sizes in (("First step", self.first_sizes), ("Last step", self.last_sizes)):
            if sizes is not None:
                lines.append((name, _told_sizes(sizes)))
        lines += self._ranks()
        lines += [("Read twice", self.read_twice), ("Read ahead", self.read_ahead)]
        lines += [
            ("Your code" if not place else "", f"{what}: {where}") for place, (what, where) in enumerate(self.user_code)
        ]
        lines.append(("State", self.state))
        lines += [("Not checked" if not place else "", each) for place, each in enumerate(self.unchecked)]
        return lines

    def _epoch(self) -> str:
        samples = "" if self.samples is None else f", {_count(self.samples, 'sample')}"
        if self.num_steps is not None:
            return f"{_count(self.num_steps, 'step')}{samples}"
        return f"the number of steps is not known{samples}: {self.unknown}"

    def _ranks(self) -> list[tuple[str, str]]:
        """What each rank reads; of many ranks the least and the most."""
        if not self.shares:
            return []
        steps: Sequence[int | None] = self.steps_of_ranks or [None] * len(self.shares)
        told = [
            f"{_told(share, self.kind)}{'' if number is None else ', in ' + _count(number, 'step')}: "
            + ", ".join(name.rsplit("/", 1)[-1] for name in share.first)
            + (", ..." if share.fragments > len(share.first) else "")
            for share, number in zip(self.shares, steps, strict=True)
        ]
        if len(told) <= _MOST_RANKS:
            return [(f"Rank {rank}", line) for rank, line in enumerate(told)]

        def weight(rank: int) -> tuple[int, int]:
            share = self.shares[rank]
            return share.num_bytes or share.records or 0, share.fragments

        least, most = min(range(len(told)), key=weight), max(range(len(told)), key=weight)
        return [("Least reads", f"rank {least}, {told[least]}"), ("Most reads", f"rank {most}, {told[most]}")]


def explain(
    plan: ReadingPlan,
    facts: SourceFacts,
    options: InputOptions,
    topology: Topology,
    policy: str,
    *,
    epoch: int,
    devices: Sequence[str],
) -> Explanation:
    """The plan of a loader. Local.

    Args:
      plan: of its source.
      facts: of its source.
      options: the user's.
      topology: the ranks that are asked for.
      policy: the name of the policy in force.
      epoch: the number of the epoch.
      devices: of this rank.
    """
    ranks, size = topology.num_workers, facts.fingerprint.get("batch size")
    steps = plan.steps if plan.steps is not None and len(plan.steps) else None
    copies = options.fetch_to_device and any(device != "cpu" for device in devices)
    code = list(plan.user_code)
    if options.sums:
        in_thread = options.least_ahead and (plan.loader_workers or copies)
        code.append((f"sums ({', '.join(options.sum_names)})", "in a thread of this library" if in_thread else HERE))
    unchecked, is_off = list(plan.unchecked), ranks > 1 and options.coordination == "off"
    if is_off:
        unchecked.append("anything, as coordination is off")
    rows = None if plan.steps is None or not plan.shares else tuple(map(plan.steps.num_rows, range(ranks)))
    ahead, ahead_bytes = _read_ahead(options, plan, ranks)
    if copies:
        ahead += f"; copied to {', '.join(sorted(set(devices)))} ahead"
    return Explanation(
        epoch=epoch,
        world_size=ranks,
        num_replicas=topology.num_replicas,
        policy=policy,
        policy_reason=_reason(options.auto_shard_policy, policy, facts, ranks),
        data=plan.data,
        batch_size=size if isinstance(size, int) else None,
        whole=plan.whole,
        shares=plan.shares,
        kind=plan.kind,
        num_steps=plan.num_steps,
        samples=plan.samples,
        unknown=plan.unknown,
        first_sizes=None if steps is None else _sizes_at(steps, 0),
        last_sizes=None if steps is None else _sizes_at(steps, len(steps) - 1),
        steps_of_ranks=rows,
        read_twice=_twice(plan, ranks),
        read_ahead=ahead,
        read_ahead_bytes=ahead_bytes,
        loader_workers=plan.loader_workers,
        user_code=tuple(code),
        state=_state(facts, plan, is_off=is_off),
        state_is_collective=plan.collective_state and not is_off,
        unchecked=tuple(unchecked),
    )


def _sizes_at(steps: EpochSteps, step: int) -> tuple[int, ...]:
    rows = {row.worker: row for row in steps.at(step)}
    found: list[int] = []
    for worker in range(steps.num_workers):
        cutter, row = steps.cutter_of(worker), rows.get(worker)
        if row is None:
            found += [0] * cutter.topology.replicas_per_worker
            continue
        lo, hi = steps.limits(worker, row.batch)
        found += [end - start for start, end in cutter.row(hi - lo, row.row)]
    return tuple(found)


def _reason(asked: AutoShardPolicy | None, policy: str, facts: SourceFacts, ranks: int) -> str:
    what = {
        "DATA": "each rank takes its parts of the same global batches",
        "FILE": "each rank reads files of its own",
        "OFF": "each rank reads everything",
        "HINT": "the data divides itself",
    }[policy]
    if facts.fingerprint.get("kind") == "from function":
        return "the dataset function has divided the data"
    if ranks == 1:
        what = "one rank reads everything"
    if asked in {None, AutoShardPolicy.AUTO}:
        return f"{what}. AUTO chose it, as the data has {'' if policy == 'FILE' else 'no '}files to deal out"
    return what


def _twice(plan: ReadingPlan, ranks: int) -> str:
    if ranks == 1:
        return plan.twice_in_rank or "nothing"
    return f"{plan.twice}. Within a rank it {plan.twice_in_rank}" if plan.twice_in_rank else plan.twice


def _read_ahead(options: InputOptions, plan: ReadingPlan, ranks: int) -> tuple[str, int | None]:
    workers = ""
    if plan.loader_workers:
        workers = f"; {plan.batches_ahead} more in {_count(plan.loader_workers, 'loader worker')} of each rank"
    if not options.least_ahead:
        return f"no step: each is made where next() asks for it{workers}", None
    if options.prefetch is not None:
        return f"{_count(options.least_ahead, 'step')} of any size (prefetch={options.prefetch}){workers}", None
    if ranks == 1:
        return f"{options.least_ahead} steps of any size{workers}", None
    most = f"growing to {options.most_ahead} while they fit into {_in_bytes(BYTES_AHEAD)}"
    return f"{options.least_ahead} steps ready, {most}{workers}", BYTES_AHEAD


def _state(facts: SourceFacts, plan: ReadingPlan, *, is_off: bool) -> str:
    if is_off:
        return 'none: state_dict() and load_state_dict() are refused with coordination="off"'
    holds = (
        "epoch, step and the place in each open file" if facts.fingerprint.get("kind") == "files" else "epoch and step"
    )
    if plan.state_has_random is False:
        holds += "; no random states, as its code draws from those of each rank"
    elif plan.state_has_random or facts.needs_default_state or facts.draws_alone:
        holds += (
            f", and the random states that {'the order is' if facts.draws_order else 'its code may have'} drawn from"
        )
    where = "of as many ranks only" if plan.bound_to_world else "of any number of ranks"
    call = "is collective: every rank calls it" if plan.collective_state else "is local"
    return f"{holds}. For a run {where}. state_dict() {call}"


def _told(share: ReadingShare, kind: str | None = None) -> str:
    parts = [_count(share.fragments, kind)] if kind else []
    parts += [] if share.num_bytes is None else [_in_bytes(share.num_bytes)]
    parts += [] if share.records is None else [_count(share.records, "record")]
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _told_sizes(sizes: Sequence[int]) -> str:
    """Samples of each replica; long runs of equal ones by their number."""
    runs = [(size, len([*same])) for size, same in groupby(sizes)]
    shown = " + ".join(str(size) if count == 1 else f"{count} x {size}" for size, count in runs[:_MOST_RANKS])
    empty = sum(not size for size in sizes)
    more = " + ..." if len(runs) > _MOST_RANKS else ""
    return f"{sum(sizes)} = {shown}{more}" + (f"; {_count(empty, 'replica')} without a sample" if empty else "")


def _in_bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < _MOST_UNITS or unit == "TiB":
            break
        count /= _MOST_UNITS
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"
