"""``build_pipeline`` builds the input pipeline of one epoch from its stages; no other module knows all the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch

from torchdistinput.batches.element_spec import Elements
from torchdistinput.batches.padding import Pad
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.coordination.batch_digests import BatchDigests, take_for_read
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.failures import traceback_as_text
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.coordination.step_sync import StepSync
from torchdistinput.coordination.timeouts import StragglerTimeout
from torchdistinput.devices.accelerators import make_copier
from torchdistinput.iterator import EpochPipeline, EpochProgress
from torchdistinput.pipeline.engine import Engine
from torchdistinput.pipeline.part_sums import PartSums
from torchdistinput.pipeline.step_maker import StepMaker
from torchdistinput.pipeline.to_device import ToDevice
from torchdistinput.plan.options import BYTES_AHEAD, InputOptions, steps_that_fit
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.contract import Source
from torchdistinput.sources.kernel.row_stream import RowStream
from torchdistinput.sources.rng import SharedRngState, WithRng
from torchdistinput.sources.torch_loader.open_runs import OpenRuns
from torchdistinput.step_types import LocalStep, Row, Start, Stream
from torchdistinput.tracing.epoch_trace import EpochTrace
from torchdistinput.tracing.trace_file import TraceFile

_NoteStep = Callable[[LocalStep, Row], None]


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """The facts that a strategy gives to its datasets.

    Args:
      topology: the number of workers and replicas, and which worker this is.
      devices: one for each local replica.
      ranks: the ranks that must agree; ``None`` where there is only one.
      timeout_seconds: how long a rank waits for another one, unless the options say otherwise.
      workers: the worker of each rank; the ranks of one worker read the same data.
      shared_rng: torch's default random state after the last draw that all ranks made together.
    """

    topology: Topology
    devices: Sequence[torch.device]
    ranks: Ranks | None
    timeout_seconds: float
    workers: Sequence[int] = ()
    shared_rng: SharedRngState = field(default_factory=SharedRngState)

    @property
    def has_peers(self) -> bool:
        """Whether ranks share a data coordinate; the same on every rank."""
        return len(set(self.workers)) < len(self.workers)


class OpenedEpoch(NamedTuple):
    """An epoch that has begun."""

    channel: Channel | None
    """The connection to the same iterator on the other ranks; ``None`` where no other rank votes."""
    stream: Stream
    progress: EpochProgress
    trace_file: TraceFile | None = None


def open_stream(source: Source, epoch: int, with_rng: WithRng, start: Start, *, votes: bool) -> Stream:
    """The rows of an epoch. If the source cannot be opened, all ranks raise its error at the first step.

    A kept traceback refers to the frames of all callers, and so keeps the iterator alive. Ranks that vote must all see
    at the same time that it was dropped: they keep the traceback as text.
    """
    try:
        return source.open(epoch, with_rng, start)
    except Exception as error:
        if votes:
            traceback_as_text(error)
        failure = error  # the name ends with this block
        rows = (_raise(each) for each in [failure])
        return RowStream(rows, in_background=False, position=lambda _: _raise(failure))


def build_pipeline(
    source: Source, setting: Setting, options: InputOptions, opened: OpenedEpoch, idle: list[ToDevice]
) -> EpochPipeline:
    """Builds the pipeline of an epoch; ``pipeline.engine`` has the walk of a step through it.

    Args:
      source: the data.
      setting: the facts about the strategy.
      options: the user's options.
      opened: the epoch that has begun.
      idle: unused ``ToDevice`` stages with their streams and memory, kept for the life of the dataset. One is taken
        here, and given back at the end.
    """
    channel, stream, progress, facts = opened.channel, opened.stream, opened.progress, source.facts
    depth = options.least_ahead
    devices = setting.devices if options.fetch_to_device else [torch.device("cpu")] * len(setting.devices)
    copies = any(device.type != "cpu" for device in devices)
    local = setting.topology.replicas_per_worker
    checker = SchemaChecker(
        structure=stream.structure,
        pads=options.needs_structure(local, may_lack=False),
        one_structure=stream.one_structure,
        may_lack=facts.may_lack_samples and (channel is not None or local > 1),
        tries=source.leaves_empty(),
        empty_fn=options.empty_fn,
        with_index=options.with_index,
    )
    rows = facts.largest_piece_size
    pad = None if options.partial_batch == "keep" or rows is None else Pad(rows, with_index=options.with_index)
    to_device = idle.pop() if idle else ToDevice([make_copier(device) for device in devices])
    hint = "" if channel is None else facts.read_by_all_hint
    compares = channel is not None and setting.has_peers
    notes = _notes(options, take_for_read if hint else BatchDigests() if compares else None)
    workers = OpenRuns() if source.workers is None else source.workers
    timeout_seconds = setting.timeout_seconds if options.timeout_seconds is None else options.timeout_seconds
    if channel is not None:
        workers.bound(timeout_seconds)
    ranks = setting.ranks
    maker = StepMaker(
        stream, checker, pad, to_device, local, progress.metrics, workers.consumers, notes=notes, give_back=idle.append
    )
    draw = _draw_of(maker, source, options, opened, ranks)

    def fits(step: LocalStep) -> int | None:
        return steps_that_fit(maker.weigh(step), BYTES_AHEAD)

    step_sync = StepSync(
        channel,
        slots=max(1, options.most_ahead),
        checker=checker,
        complete=maker.fill,
        name=None if ranks is None else ranks.name(ranks.rank),
        begins_at=(progress.epoch, progress.steps),
        counts=ranks is None or ranks.rank in ranks.firsts,
        workers=setting.workers,
        hint=hint,
        max_errors=options.max_errors if options.skips else None,
        least_ahead=depth,
        fits=fits if options.prefetch is None else None,
        sums=options.sum_names,
    )
    in_background = depth > 0 and (stream.in_background or copies)
    reads_ahead = channel is not None or in_background
    engine = Engine(
        draw,
        maker,
        step_sync,
        StragglerTimeout(channel, timeout_seconds, step_sync.give_up),
        progress.metrics,
        depth=depth if reads_ahead else 0,
        in_background=in_background,
        reads_together=setting.topology.num_workers > 1,  # a batch of a rank's own lasts several steps
        first_step=progress.steps,
    )
    try:
        engine.begin()
        # Parts that a function of the user's makes may have other constants: in some steps only, if each is compared.
        of_one_batch = facts.of_one_batch and options.empty_fn is None and options.split_fn is None
        elements = Elements(checker, facts.certain_piece_size, local, pad, of_one_batch=of_one_batch)
        return EpochPipeline(engine, to_device, elements, progress)
    except BaseException:  # no other code would end the thread
        engine.close()
        raise


def _draw_of(
    maker: StepMaker, source: Source, options: InputOptions, opened: OpenedEpoch, ranks: Ranks | None
) -> Callable[[], LocalStep]:
    """``maker.draw``; timed, where the steps are measured one by one."""
    draw, metrics = maker.draw, opened.progress.metrics
    if not options.measures:
        return draw
    trace = EpochTrace(
        opened.progress.epoch,
        opened.progress.steps,
        source.facts.times,
        opened.trace_file,
        dataset=opened.progress.dataset,
        rank=metrics.rank,
        rank_of=int if ranks is None else ranks.name,
        counts=lambda: opened.stream.counts(opened.progress.rows),
    )
    metrics.trace = trace
    if opened.channel is not None and opened.trace_file is not None:
        opened.channel.peer_times = trace.peers
    return trace.draws(draw)


def _notes(options: InputOptions, note_read: _NoteStep | None) -> list[_NoteStep]:
    """What is noted in each step about its data, when it is read."""
    found = [] if note_read is None else [note_read]
    return [*found, PartSums(options.sums, with_index=options.with_index)] if options.sums else found


def _raise(error: Exception) -> Any:
    raise error
