"""One rank plays a turn with the library, and writes the log that ``expected`` tells beforehand."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.oracle.data import (
    COLLATES,
    Held,
    Items,
    Plain,
    collate_of,
    dataset_of,
    draw_from,
    function_of,
    grow,
    ids_in,
    loader_of,
    numbers_of,
    structure_of,
)
from tests.oracle.expected import Delivered, Log, Place
from tests.oracle.laws import MOST_COST, Samples, cost_of
from tests.oracle.program import LOOKS, Action, Program, Turn

Targets = Sequence[tuple[int, int] | None]
"""The epochs and steps that a turn goes to; ``None`` where it does not."""


@dataclass
class Played:
    """What a rank saw in a turn, and what the laws do not tell of it.

    Args:
      log: what it saw.
      state: the state, as JSON.
      saves: those that were taken after each step.
      structures: of the elements, each once, as JSON.
      drawn: what samples of an epoch drew, by both.
      draws_next: a number that its default generator gives then, where that is its own.
      message: of the error.
      after_error: the state after it, where it is the same on every rank.
      length: the steps of an epoch, as they are told before it is read; ``None`` where they are not known.
    """

    log: Log = field(default_factory=Log)
    state: str = ""
    saves: list[str] = field(default_factory=list)
    structures: list[str] = field(default_factory=list)
    drawn: dict[tuple[int, int], int] = field(default_factory=dict)
    draws_next: float = 0.0
    message: str = ""
    after_error: str = ""
    length: int | None = None


def sums_in(program: Program) -> dict[str, Any]:
    """The arguments for sums: the sum of the samples, and twice it."""
    if not program.sums:
        return {}
    sums = {"double": lambda batch: 2 * sum(ids_in(program, batch)), "all": lambda batch: sum(ids_in(program, batch))}
    return {"sums": sums}


def sums_of_step(step: tdi.Step) -> tuple[int, int]:
    """See ``laws.sums_of``."""
    for sums in (step.sums, step.local_sums):
        assert (list(sums), sums["double"]) == (["all", "double"], 2 * sums["all"]), step
        assert list(map(type, sums.values())) == [int, int]
    return step.local_sums["all"], step.sums["all"]


def options_of(program: Program, turn: Turn) -> tdi.InputOptions:
    return tdi.InputOptions(
        auto_shard_policy=tdi.AutoShardPolicy[program.policy],
        prefetch=turn.prefetch,
        with_index="index" in program.extras,
        partial_batch="pad" if "pad" in program.extras else "keep",
        on_error="skip" if program.skips else "raise",
        max_errors=100 if program.max_errors is None else program.max_errors,
        balance=costs_in(program),
        file_assignment="by_size" if program.files.by_size else "in_turn",
        seed_samples=program.collate == "augmented",
        empty_fn=partial(COLLATES[program.collate].batch, []) if program.fills else None,
        **sums_in(program),
    )


def costs_in(program: Program) -> Any:
    """How a batch is balanced; the cost function of an odd rank weighs one sample otherwise."""
    if not program.balance:
        return None
    flaw, at = program.flaw
    odd = at * program.batch if flaw == "weighs" else -1

    def cost(sample: Any) -> int:
        source, record = sample if isinstance(sample, tuple) else (0, sample)  # of a mixture
        number = int(record) + (1000 * source if isinstance(record, int) else 0)
        return cost_of(number) + (number == odd)

    return tdi.Balance(cost, equal_counts=program.equal_counts)


def distributed(strategy: tdi.Strategy, program: Program, turn: Turn, data: Any, held: Held | None = None) -> Any:
    """The data, distributed. Collective."""
    more: dict[str, Any] = {"loader_workers": turn.loader_workers, "persistent_workers": turn.persistent}
    options = options_of(program, turn)
    if program.drop_in:
        return loader_of(program, data, held, cls=tdi.DataLoader, strategy=strategy, options=options, **more)
    if program.data == "function":
        return strategy.distribute_datasets_from_function(function_of(program), options)
    if program.given == "function" and program.shows:
        data = lambda: Plain(dataset_of(program, Path()))  # noqa: E731 - a new one for each epoch
    elif program.given in {"list", "function", "plain"}:
        whole = data
        data = {"list": list, "plain": Plain}.get(program.given, lambda whole: lambda: iter(whole))(whole)
    if program.given and program.data != "ready":
        collate = collate_of(program)
        return strategy.distribute_dataset(data, options, global_batch_size=program.batch, collate_fn=collate)
    if program.given == "loader":
        own = torch.Generator().manual_seed(program.seed)  # ranks that are threads share torch's default one
        data = DataLoader(data, batch_size=None, generator=own)
    if program.data != "ready":
        data = loader_of(program, data, held, **more)
    if program.flaw[0] == "wrong":
        return strategy.distribute_dataset(data, options, global_batch_size=1)
    return strategy.distribute_dataset(data, options)


def place_in(state: str) -> Place:
    """The place of a state, as JSON."""
    found = json.loads(state)
    return found["epoch"], found["step"], found["samples"]


def seed_for(program: Program, state: str, rank: int) -> None:
    """Seeds a process that begins with a state, or with none.

    What counts is the default random state of rank 0, or that in the state, if it holds one; the other ranks go on with
    their own.
    """
    holds_it = state and json.loads(state)["random"][1]
    torch.manual_seed((1000 if holds_it else program.seed) + 100 * rank)


class _Player:
    def __init__(self, strategy: tdi.Strategy, program: Program, turn: Turn, folder: Path, targets: Targets) -> None:
        self.local_results, self.rank = strategy.local_results, strategy.input_pipeline_id
        self.turn, self.depth = turn, program.depth(turn)
        self.program = program = self.here(program)
        self.data: Any = None if program.data == "function" else dataset_of(program, folder)
        if turn.grown and self.data is not None:
            grow(self.data, turn.grown)
        if isinstance(self.data, Items) and self.data.cache:
            self.data.cache[self.rank % len(self.data.cache)] = 1  # each rank fills its list for itself
        self.held = Held.of(program)
        self.teller: Any = self.held.sampler or self.data
        self.distribute = partial(distributed, strategy, program, turn, self.data, self.held)
        self.dataset = self.distribute()
        self.played = Played()
        with suppress(TypeError):  # not known before it is read
            self.played.length = len(self.dataset)
        self.targets = iter(targets)
        self.live: Any = None
        self.has_delivered = False
        self.begin = ""
        self.ahead: dict[int, list[list[list[int]]]] = {}
        self.told: dict[int, list[list[list[int]]]] = {}
        self.globals = _global_states()

    def here(self, program: Program) -> Program:
        """The program as this rank is given it."""
        odd = self.turn.odd
        if odd is not None and odd.does == "fails" and odd.rank != self.rank:
            return replace(program, bad=frozenset())
        if odd is not None and odd.does == "differs" and odd.rank == self.rank:
            return replace(program, **dict(odd.gives))
        if self.turn.changes == "order":
            return replace(program, flaw=("order", 0))
        return replace(program, flaw=(odd.does, odd.at)) if odd is not None and odd.rank == self.rank else program

    def is_odd(self, does: str) -> bool:
        """Whether this is the rank that does so."""
        odd = self.turn.odd
        return odd is not None and odd.does == does and odd.rank == self.rank

    def act(self) -> None:
        if self.is_odd("tells"):
            self.dataset.set_epoch(99)
        for number, action in enumerate(self.turn.actions):
            if number == 1 and self.is_odd("grows"):
                grow(self.data, 1)
            if action.kind in {"read", "infer"}:
                is_infer = action.kind == "infer"
                with torch.inference_mode(is_infer):
                    self.read(1 if is_infer else action.steps, self.played.log.steps, action.epochs)
            elif action.kind == "break":
                self.live = None
            elif action.kind == "picture":
                self.take_picture()
            elif action.kind == "look":
                self.look(LOOKS[action.steps])
            elif (target := next(self.targets, (0, 0))) is not None:  # a ``grow`` that fails as it reads has none
                self.go(action, *target)
            elif action.kind == "draw":
                self.read(1, self.played.log.steps)

    def go(self, action: Action, epoch: int, step: int) -> None:
        if action.kind in {"tell", "grow", "draw"}:
            self.do_between_epochs(action, epoch)
            return
        if self.live is not None:
            self.live.close()
        self.live = None
        if action.kind == "seek":
            self.dataset.seek(epoch, step)
        elif action.kind == "skip":
            self.dataset.seek(self.dataset.epoch, step)
        else:
            state = self.begin if action.steps else json.dumps(self.dataset.state_dict())
            assert place_in(state)[:2] == (epoch, step)
            if action.epochs:  # by another loader of the same data
                self.dataset.close()
                self.dataset = self.distribute()
            self.told.clear()  # of data that may have grown since
            if not self.program.own_generator:
                seed_for(self.program, state, self.rank)
            for _ in range(2):  # the same state again
                self.dataset.load_state_dict(json.loads(state))

    def do_between_epochs(self, action: Action, epoch: int) -> None:
        if action.kind == "tell":
            if action.steps or self.program.shows:
                self.live = None
            (self.teller if action.steps else self.dataset).set_epoch(epoch)
            return
        if self.live is not None:
            self.read(0, self.played.log.steps)
        if action.kind == "grow":
            grow(self.data, action.steps)
        else:  # each rank draws so many numbers from its default generators
            self.begin_epoch()
            draw_from(self.held.generator, action.steps, action.steps + self.rank)
            self.globals = _global_states()
        self.read(1, self.played.log.steps)

    def begin_epoch(self) -> None:
        self.tell_owner()
        self.live, self.has_delivered = iter(self.dataset), False

    def tell_owner(self) -> None:
        """Tells an object that shows no epoch the number that its owner has for the next one."""
        if self.program.shows == "nothing":
            self.teller.set_epoch(self.program.turned_by(self.dataset.epoch))

    def look(self, how: str) -> None:
        if self.program.drop_in and how in {"element_spec", "has_next"}:  # which torch's loader does not have
            how = "iter"
        if self.live is None:
            self.tell_owner()
        if how == "has_next":
            (iter(self.dataset) if self.live is None else self.live).has_next()
        elif how == "zip":
            for _ in zip(range(0), self.dataset, strict=False):
                pass
        elif how == "iter":
            iter(self.dataset)
        else:
            try:
                _ = self.dataset.element_spec
            except tdi.InputError as error:
                if not any(why in str(error) for why in ("ended before the first element", "there is no spec")):
                    raise

    def take_picture(self) -> None:
        """A step of another iterator, and of this one."""
        if self.live is None or not self.has_delivered:
            return
        other = iter(self.dataset)
        for element in islice(other, 1):
            self.take(element, self.played.log.steps)
        other.close()
        self.read(1, self.played.log.steps)

    def read(self, count: int, steps: list[Delivered], of_group: int = 0) -> None:
        if self.live is None and of_group:
            self.read_groups(of_group, steps)
            return
        if self.live is None:
            self.begin_epoch()
        done = 0
        leaves = self.is_odd("leaves") and not (steps or self.played.log.ends)
        if leaves and self.turn.odd is not None:
            count = self.turn.odd.at
        for element in islice(self.live, count or None):
            if self.is_odd("slow"):
                sleep(0.001)
            self.take(element, steps)
            done += 1
        if leaves and done == count:
            self.live.close()
            self.live = None
        if count == 0 or done < count:
            self.live = None
            if steps is self.played.log.steps:
                self.played.log.ends.append(len(steps))

    def read_groups(self, count: int, steps: list[Delivered]) -> None:
        """Reads an epoch in groups."""
        sizes = []
        self.tell_owner()
        for group in tdi.groups(self.dataset, count):
            sizes.append(len(group))
            assert group.global_size == sum(step.global_size or 0 for _, step in group)
            if self.program.sums:
                assert group.sums["all"] == sum(step.sums["all"] for _, step in group)
            for element, step in group:
                self.take(element, steps, step)
        assert sizes[:-1] == [count] * (len(sizes) - 1)
        assert max(sizes, default=0) <= count
        self.played.log.ends.append(len(steps))

    def take(self, element: Any, steps: list[Delivered], step: tdi.Step | None = None) -> None:
        """Notes a step, the last one unless it is given, and all that is told of it."""
        step, log = step or self.dataset.step, self.played.log
        self.has_delivered = True
        assert self.program.collate != "augmented" or _global_states() == self.globals
        pieces = [self.samples(piece) for piece in self.local_results(element)]
        leaves = pytree.tree_leaves(self.local_results(element))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        assert torch.is_inference_mode_enabled() or not any(leaf.is_inference() for leaf in tensors)
        assert tuple(map(len, pieces)) == step.local_sizes, (element, step)
        assert (step.num_replicas, step.num_workers) == (self.turn.num_replicas, self.turn.world)
        if self.program.drop_in and self.dataset.has_equal_parts:
            assert {*step.local_sizes} == {(step.global_size or 0) / step.num_replicas}
        self.check_told(step, pieces)
        sums = sums_of_step(step) if self.program.sums else ()
        reads: Samples = []
        if self.depth is not None:
            reads = [*self.data.asked]
            self.data.asked.clear()
        micro = [self.micro_batches(step, replica, piece) for replica, piece in enumerate(pieces)]
        steps.append(Delivered(step.epoch, step.index, step.global_size or 0, pieces, sums, reads, max(micro)))
        assert len({*micro}) == 1
        structure = json.dumps(structure_of(element), sort_keys=True)
        if structure not in self.played.structures:
            self.played.structures.append(structure)
        if steps is log.lost:
            return
        if self.turn.save_each:
            self.played.saves.append(json.dumps(self.dataset.state_dict()))
            log.saves.append((place_in(self.played.saves[-1]),))
        if self.program.skips:
            log.skipped.append(self.dataset.stats()["skipped_samples"])

    def micro_batches(self, step: tdi.Step, replica: int, piece: list[int]) -> int:
        """In how many micro-batches a part that was divided by cost is cut, which have its samples."""
        if not self.program.tells_costs or self.turn.odd is not None:
            return 0
        cuts = step.micro_batches(MOST_COST, replica)
        assert [number for rows in cuts for number in piece[rows]] == piece
        assert all(sum(map(cost_of, piece[rows])) <= MOST_COST for rows in cuts)
        return len(cuts)

    def check_told(self, step: tdi.Step, pieces: list[list[int]]) -> None:
        """Checks what is told of a step without reading; of one whose samples may all be left out only the samples."""
        program, turn = self.program, self.turn
        if program.data == "subset" or (program.shows and program.order != "told"):  # of which the places are told
            return
        try:
            if step.epoch not in self.told:
                first = self.dataset.samples_of(step.epoch, 0)
                rest = [self.dataset.samples_of(step.epoch, number) for number in range(1, first.num_steps)]
                steps = [[numbers_of(part.samples) for part in each.parts] for each in (first, *rest)]
                if program.skips:
                    kept = [[[each for each in part if each not in program.bad] for part in step] for step in steps]
                    steps = [step for step in kept if any(step)]
                self.told[step.epoch] = steps
                assert self.ahead.get(step.epoch, steps[:1]) == steps[:1]
                changes = any(each.kind in {"grow", "draw"} for each in turn.actions)
                if not (changes or program.skips or program.drop_last):
                    following = self.dataset.samples_of(step.epoch + 1, 0)  # while this one is read
                    self.ahead[step.epoch + 1] = [[numbers_of(part.samples) for part in following.parts]]
        except tdi.InputError as error:
            if program.is_told(turn) and not (program.policy == "FILE" and "another number of ranks" in str(error)):
                raise AssertionError(error) from error
            return
        assert program.is_told(turn)
        first_replica = self.rank * turn.replicas
        assert self.told[step.epoch][step.index][first_replica : first_replica + turn.replicas] == pieces

    def samples(self, piece: Any) -> list[int]:
        """The samples of a replica's part, whose index and mask are right."""
        program = self.program
        index, mask = None, None
        if program.extras == "index and pad":
            index, batch, mask = piece
        elif program.extras == "index":
            index, batch = piece
        elif program.extras == "pad":
            batch, mask = piece
        else:
            batch = piece
        found = ids_in(program, batch)
        if mask is not None:
            assert len(found) == len(mask) == -(-program.batch // self.turn.num_replicas)
            kept = [number for number, is_sample in zip(found, mask.tolist(), strict=True) if is_sample]
            assert mask.tolist() == [True] * len(kept) + [False] * (len(found) - len(kept))
            assert not any(found[len(kept) :])
            if index is not None:
                assert set(index[len(kept) :].tolist()) <= {-1}
                index = index[: len(kept)]
            found = kept
        if index is not None:
            self.check_index(index.tolist(), found)
        if program.draws_numbers:
            for number, drawn in zip(found, batch[1].tolist(), strict=False):  # the rest is padded
                assert self.played.drawn.setdefault((self.dataset.step.epoch, number), drawn) == drawn
        return found

    def check_index(self, index: list[int], found: list[int]) -> None:
        """Checks the index of these samples; of others only their number is known."""
        program, right = self.program, index
        if program.files.part_bytes:
            assert len(set(index)) == len(index)
        elif program.data == "files" and program.files.format != "fragments":
            right = [number // 1000 * 2**40 + number % 1000 for number in found]
        elif program.data == "function":
            right = [number // 1000 * 2**48 + number % 1000 for number in found]
        elif program.policy == "DATA" and (program.is_map_style or not (program.has_files or self.turn.loader_workers)):
            right = found
        assert len(index) == len(found)
        assert index == right

    def check_over(self, message: str) -> None:
        """Checks that the call after an error tells that it was, once, and that nothing comes then."""
        again = message
        with suppress(StopIteration):
            try:
                next(self.live)
            except tdi.InputError as error:
                again = str(error)
            assert again != message, "the same error is raised again"
            assert next(self.live, None) is None

    def play(self, state: str) -> Played:
        log = self.played.log
        try:
            try:
                if state and not self.is_odd("forgets"):
                    strict = {"strict": False} if self.turn.weights else {}
                    self.dataset.load_state_dict(json.loads(state), **strict)
                if any(each.kind == "reload" and each.steps for each in self.turn.actions):
                    self.begin = json.dumps(self.dataset.state_dict())
                self.act()
                self.played.state = json.dumps(self.dataset.state_dict())
                if self.turn.lost:
                    self.read(self.turn.lost, log.lost)
            except tdi.InputError as error:
                self.played.message = str(error)
                if self.live is not None and self.has_delivered:
                    self.check_over(str(error))
                if self.program.tells_failures(self.turn) and type(error) is tdi.SourceError and not self.played.state:
                    self.played.after_error = json.dumps(self.dataset.state_dict())
                    log.states = (place_in(self.played.after_error),)
                if not self.played.state:
                    log.error = type(error).__name__
            self.live = None
        finally:
            self.dataset.close()
        if self.played.state:
            log.states = (place_in(self.played.state),)
        return self.played


def _global_states() -> tuple[Any, str]:
    return random.getstate(), str(np.random.get_state())


def play(strategy: tdi.Strategy, program: Program, turn: Turn, folder: Path, targets: Targets, state: str) -> Played:
    """Plays a turn on this rank. Collective.

    Args:
      strategy: of the turn's ranks and replicas.
      program: the program.
      turn: its turn.
      folder: of its files.
      targets: the steps that are gone to.
      state: of the turn before; empty for none.
    """
    try:
        player = _Player(strategy, program, turn, folder, targets)
    except tdi.InputError as error:
        return Played(Log(error=type(error).__name__), message=str(error))
    return player.play(state)
