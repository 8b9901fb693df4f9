"""The position of a dataset in its epochs: saves it as a state, and sets it by loading a state or by seeking.

A position counts the steps that were *delivered*, never the steps that were read ahead. The order of an epoch is not
saved. On a resume, the user's own sampler draws it again, from the random state at the beginning of the epoch, and the
delivered steps are skipped.

**Torch's default random state.** Where no generator was given, torch draws from the default state, and rank 0's default
state counts for all ranks. Loading a state sets the default state on rank 0 at once (other ranks may be seeded
differently on purpose) to its value at the beginning of the saved epoch. The draws of the epoch then advance it as they
did before. Users who restore the default state themselves, for example for dropout, do so after loading: their state is
kept, and the epoch draws from the saved one.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch

from torchdistinput.coordination.fingerprints import agree
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.errors import InputError, StateMismatch
from torchdistinput.iterator import EpochProgress, LastStep
from torchdistinput.plan.checkpoint_format import OF_WORLD, SavedState, differences
from torchdistinput.sources.contract import Source
from torchdistinput.sources.epoch_rng import EpochRng, RngSnapshot, UnreadDraws
from torchdistinput.sources.rng import SharedRng, SharedRngState, WithRng
from torchdistinput.step_types import Start

_LOG = logging.getLogger("torchdistinput")
_REMEMBERED_EPOCHS: Final = 64  # some KiB each


@final
class Entry(NamedTuple):
    """The place at which the next epoch begins.

    Args:
      epoch: the number of the epoch.
      start: the place in the epoch.
      mark: a text that is equal on two ranks if and only if they begin at the same place.
      default: the value of torch's default random state to draw from; ``None`` for the present one.
      draws: the random draws that are made from now on.
      told_epoch: the last argument of the user's ``set_epoch``.
    """

    epoch: int
    start: Start
    mark: str
    default: torch.Tensor | None
    draws: UnreadDraws
    told_epoch: int | None


@final
@dataclass
class _Unread:
    """An epoch that was begun, and of which nothing was taken yet.

    Args:
      epoch: the number of the epoch.
      before: the place that was loaded or sought, and at which it began.
      told: the epoch that the user's sampler and dataset were told before.
      draws: its random draws.
      progress: counts its steps; ``None`` while it is begun.
      is_gone: whether its iterator is.
    """

    epoch: int
    before: _NextPlace | None
    told: int
    draws: UnreadDraws
    progress: EpochProgress | None = None
    is_gone: bool = False


@final
class _NextPlace(NamedTuple):
    """A place that was loaded or sought, and at which the next epoch begins.

    Args:
      saved: the place.
      random: the random states from which the order of its epoch is drawn; ``None`` where none is needed.
      restores: whether the random states are set again when the epoch begins, in case other code drew from them.
      is_sought: whether it was sought, so that the samples before it are still to be counted.
    """

    saved: SavedState
    random: EpochRng | None
    restores: bool
    is_sought: bool = False


@final
class Checkpoint:
    """The position of one dataset.

    Args:
      source: the data.
      fingerprint: tells the facts that identify this input as it is now; the same in a world of another size.
      ranks: the ranks that must agree; ``None`` where there is only one.
      worker: the index of this worker.
      name: the name of the dataset, for messages.
      shared_rng: the default random state from which all ranks draw together.
    """

    def __init__(
        self,
        source: Source,
        fingerprint: Callable[[], Mapping[str, Any]],
        ranks: Ranks | None,
        worker: int,
        name: str,
        *,
        shared_rng: SharedRngState,
    ) -> None:
        self._source = source
        self._fingerprint = fingerprint
        self._ranks = ranks
        self._worker = worker
        self._name = name
        self.last = LastStep()
        """What its iterators delivered."""
        self._shared_rng = shared_rng
        self.next_epoch = 0
        """The number of the next epoch."""
        self._user_epoch: int | None = None
        self._pending: _NextPlace | None = None
        self._unread: list[_Unread] = []  # the epochs that were begun after the one that was read last
        self._left: EpochProgress | None = None  # the epoch that was read last, if a state is not of it any more
        self._known: deque[tuple[int, EpochRng]] = deque(maxlen=_REMEMBERED_EPOCHS)

    def set_epoch(self, epoch: int, *, running: bool = False) -> None:
        """Sets the number of the next epoch. A place in this epoch that was loaded or sought is kept.

        Args:
          epoch: the number.
          running: whether the epoch that was read last is still read; ``state`` then returns its position.
        """
        self._user_epoch = epoch
        self._keep(len(self._unread))
        if self._pending is None or self._pending.saved.epoch != epoch:
            self._pending = None
            self._left = self._left if running else self.last.taken
        self.next_epoch = epoch
        self._source.user_epoch.tell(epoch)

    def _leave(self) -> None:
        """Forgets the epoch that was read last, and the place that was loaded or sought."""
        self._pending, self._left = None, self.last.taken
        self._keep(len(self._unread))

    def enter(self) -> Entry:
        """Begins the next epoch: sets the generators for it, advances the number, and returns the place."""
        self._settle()
        pending, self._pending = self._pending, None
        epoch = self.next_epoch
        draws = UnreadDraws(self._source, self._shared_rng)
        self._unread.append(_Unread(epoch, pending, self._source.user_epoch.epoch, draws))
        self.next_epoch += 1
        if pending is None:
            return Entry(epoch, Start(), f"epoch {epoch}, step 0", None, draws, self._user_epoch)
        saved, random = pending.saved, pending.random
        start = Start(saved.step, saved.samples, saved.drawn, self._own(saved.position))
        if random is not None:
            start = replace(start, replay=random.replay, seeds=random.seeds)
        if random is None or not pending.restores:
            return Entry(epoch, start, saved.mark, None, draws, self._user_epoch)
        random.restore(self._source)
        return Entry(epoch, start, saved.mark, random.default, draws, self._user_epoch)

    def put_back(self, draws: UnreadDraws) -> None:
        """Makes an epoch the next one again, as if it had not been begun: its iterator is gone, and was not read.

        Its number, the place at which it began, its random draws and what it told the user's sampler go back. If a
        later epoch was read or begun, that one keeps them.

        Args:
          draws: the draws of the epoch, by which it is known.
        """
        self._settle()
        for each in self._unread:
            each.is_gone = each.is_gone or each.draws is draws
        while self._unread and self._unread[-1].is_gone:
            unread = self._unread.pop()
            self.next_epoch, self._pending = unread.epoch, unread.before
            if unread.progress is None:
                unread.draws.made()
            unread.draws.take_back()
            if self._source.user_epoch.epoch != unread.told:
                self._source.user_epoch.tell(unread.told)

    def _settle(self) -> None:
        """Keeps the numbers of the epochs up to the last one that is read: they are not put back any more."""
        read = [place for place, each in enumerate(self._unread, 1) if each.progress and each.progress.is_read]
        if read:
            self._keep(read[-1])

    def _keep(self, count: int) -> None:
        """Keeps the numbers of this many of the unread epochs, the oldest ones."""
        begun = (each.progress for each in self._unread[:count])
        self._known.extend((progress.epoch, progress.random) for progress in begun if progress is not None)
        del self._unread[:count]

    def record(self, with_rng: WithRng) -> tuple[WithRng, EpochRng]:
        """Records the random states, right before the stream of the epoch is opened.

        Returns:
          ``with_rng``, wrapped to record the states of the first batch where they may have changed by then; and the
          states.
        """
        source, default = self._source, with_rng.state if isinstance(with_rng, SharedRng) else None
        if default is None and self._ranks is None:
            default = torch.get_rng_state()
        random = EpochRng.of(source, default)
        if source.facts.draws_order and (source.facts.needs_default_state or source.random_state.generators):
            with_rng = RngSnapshot(with_rng, random, source)
        return with_rng, random

    def begun(self, progress: EpochProgress) -> None:
        """Notes that the epoch that was entered last has begun, and where its progress is counted."""
        progress.random.replay = progress.start.replay
        progress.random.seeds = progress.start.seeds or progress.random.seeds
        before, passed = self._unread[-1].before, progress.stream.samples_passed
        if before is not None and before.is_sought and passed is not None:
            progress.samples = passed
        progress.fingerprint = self._fingerprint()
        self._unread[-1].progress = progress
        progress.draws.made()

    def go_on_from(self, before: Checkpoint) -> None:
        """Takes over the position from the checkpoint of the same data, which was divided anew. Local.

        Raises:
          StateMismatch: the data cannot be resumed at that position any more.
        """
        old, new = before._source, self._source
        own, others = new.random_state.generators, old.random_state.generators

        def drawn_here(random: EpochRng) -> EpochRng:
            states = dict(zip(map(id, others), random.generators, strict=True))  # a new generator keeps its state
            generators = [states.get(id(each), each.get_state()) for each in own]
            return EpochRng(random.seeds, random.replay, random.default, generators)

        before._settle()
        epoch, pending, _ = before._next()
        if pending is not None:
            if pending.random is not None:
                random = drawn_here(pending.random)
                pending = pending._replace(saved=replace(pending.saved, random=random.texts()), random=random)
            saved = pending.saved
            if saved.step and (found := differences(before._fingerprint(), self._fingerprint())):
                raise StateMismatch(
                    f"epoch {saved.epoch} cannot be gone on with at step {saved.step}: {'; '.join(found)}. Set it "
                    "back, or begin the epoch anew: seek(epoch)."
                )
            self._check_position(saved)
        self._pending = pending
        if before._ranks is self._ranks:  # other ranks may not have these states
            self._known.extend((epoch, drawn_here(random)) for epoch, random in before._known)
        self.next_epoch, self._user_epoch = epoch, before._user_epoch
        new.user_epoch.go_on_from(old.user_epoch)
        new.random_state.go_on_from(old.random_state)

    def _default_now(self) -> torch.Tensor | None:
        """The default state from which all ranks draw next; ``None`` where this rank does not know it."""
        return torch.get_rng_state() if self._ranks is None else self._shared_rng.state

    def next_state(self) -> SavedState:
        """The saved state for the beginning of the next epoch. Local."""
        epoch, pending, random = self._next()
        if pending is not None:
            return replace(pending.saved, told_epoch=self._user_epoch, fingerprint=self._fingerprint())
        random = random or EpochRng.of(self._source, self._default_now())
        return self._saved(epoch, random.texts(), Start(), user_epoch=self._user_epoch)

    @property
    def epoch(self) -> int:
        """The number of the next epoch, as if the epochs of which nothing was taken yet had not been begun. Local."""
        self._settle()
        return self._next()[0]

    def _next(self) -> tuple[int, _NextPlace | None, EpochRng | None]:
        """The number of the next epoch; the place in it that was loaded or sought; and its random states, if drawn.

        As if the epochs of which nothing was taken yet had not been begun.
        """
        first = self._unread[0] if self._unread else None
        if first is None or first.progress is None:
            return self.next_epoch, self._pending, None
        return first.epoch, first.before, first.progress.random

    def state(self) -> SavedState:
        """The saved state for the steps delivered so far. Collective where the workers' positions differ."""
        self._settle()
        source, progress = self._source, self.last.taken
        if progress is None or progress is self._left or progress.ended:
            saved = self.next_state()
            if not source.facts.has_epoch_position or self._next()[1] is not None:
                return saved
            unread = self._unread[0].progress if self._unread else None
            tell = source.next_epoch_position if unread is None else partial(unread.stream.position, 0)
            position, random = self._positions(unread or progress, saved.epoch, 0, saved.random, tell)
            return replace(saved, position=position, random=random if source.facts.draws_alone else saved.random)
        if self._is_whole(progress):
            return self._after_last_step(progress)
        reached = Start(progress.steps, progress.samples, progress.draw_digest)
        random, place = progress.random.texts(), None
        if progress.steps or source.facts.has_epoch_position:
            tell = partial(progress.stream.position, progress.rows)
            place, random = self._positions(progress, progress.epoch, progress.steps, random, tell)
        told, facts = progress.told_epoch, progress.fingerprint
        return self._saved(progress.epoch, random, reached, place, user_epoch=told, fingerprint=facts)

    def _is_whole(self, progress: EpochProgress) -> bool:
        """Whether the last step of an epoch of known length was delivered. Data may keep a state of the end itself."""
        steps = self._source.num_steps(progress.start.position)
        return steps is not None and 0 < steps <= progress.steps and not self._source.facts.has_epoch_position

    def _after_last_step(self, progress: EpochProgress) -> SavedState:
        """The state for the beginning of the next epoch, where the end of this one was not asked for yet."""
        random = progress.random
        if not self._source.facts.draws_order:
            return self.next_state()
        # The sampler may draw once more at its end, so the draws of this epoch are made again.
        after = EpochRng(random.seeds, random.replay + 1, random.default, random.generators)
        return self._saved(self.epoch, after.texts(), Start(), user_epoch=self._user_epoch)

    def _saved(
        self,
        epoch: int,
        random: tuple[str, ...],
        reached: Start,
        position: list[Any] | None = None,
        *,
        user_epoch: int | None,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> SavedState:
        return SavedState(
            epoch=epoch,
            step=reached.steps,
            samples=reached.samples,
            drawn=reached.draw_digest,
            told_epoch=user_epoch,
            sample_seed=self._source.random_state.sample_seed,
            random=random,
            position=position,
            fingerprint=fingerprint or self._fingerprint(),
        )

    def _positions(
        self,
        progress: EpochProgress | None,
        epoch: int,
        step: int,
        random: tuple[str, ...],
        tell: Callable[[], list[Any] | None],
    ) -> tuple[list[Any], tuple[str, ...]]:
        """The positions of all workers, as one if they are equal; and the random states that count for all ranks."""
        source, ranks = self._source, self._ranks
        own, problem = None, None
        try:
            own = tell()
        except Exception as error:  # in a collective call every rank must hear of it, or the others would wait
            problem = error
        owns_state = progress is not None and progress.stream.owns_state  # known once a position was asked for
        if ranks is None or not (source.facts.collective_state or owns_state):
            if problem is not None:
                raise problem
            return ["all", own], random
        facts = {"dataset": self._name, "epoch": epoch, "step": step}
        what = f"state_dict() of dataset {self._name}"
        answers = agree(ranks, what, facts, error=problem, extra=[own, random])
        positions = [answers[first][0] for first in ranks.firsts]
        common = tuple(answers[0][1])  # the first rank's count
        if all(position == positions[0] for position in positions) and not source.facts.bound_to_world:
            return ["all", positions[0]], common
        return ["each", *positions], common

    def _own(self, position: list[Any] | None) -> list[Any] | None:
        """This worker's part of a saved position."""
        if position is None:
            return None
        own: list[Any] = position[1] if position[0] == "all" else position[1 + self._worker]
        return own

    def load(self, state: object, *, strict: bool) -> None:
        """Makes the place in a saved state the next one. Local.

        Raises:
          StateMismatch: the state does not fit this input.
        """
        saved, differing = self._compared(SavedState.from_dict(state))
        if differing and strict:
            raise self._refused(saved, differing)
        random = self._checked(saved)
        if differing:
            _LOG.warning("dataset %s: loading a state in spite of differences: %s", self._name, differing)
        if saved.in_group:
            _LOG.warning(
                "dataset %s: the state was saved between steps whose gradients were accumulated (accumulate= of 0.2), "
                "after step %d. The gradients of the first of them are not in it, and no update will have them.",
                self._name,
                saved.step,
            )
        self._leave()
        self.next_epoch = saved.epoch
        self._user_epoch = saved.told_epoch
        self._source.random_state.give_sample_seed(saved.sample_seed)
        if saved.told_epoch is not None:
            self._source.user_epoch.tell(saved.told_epoch)
        self._pending = _NextPlace(saved, random, restores=saved.step > 0 or random.replay > 0)
        self._known.append((saved.epoch, random))
        random.restore(self._source)
        if random.default is not None and (self._ranks is None or self._ranks.rank == 0):
            torch.set_rng_state(random.default)
        own = self._own(saved.position)
        if own is not None:
            self._source.random_state.restore(own)
        self._source.user_epoch.forget_calls()

    def _compared(self, saved: SavedState) -> tuple[SavedState, str]:
        """The state, and its differences from this input, in words.

        Where there are differences, the digest of the sampler's draw is removed, so that it is not compared either.
        """
        found = differences(saved.fingerprint, self._fingerprint())
        if saved.was_changed:
            found.append("checksum: the state was changed since it was saved")
        return (replace(saved, drawn=0) if found else saved), "; ".join(found)

    def _refused(self, saved: SavedState, differing: str) -> StateMismatch:
        """The error for a state that differs. It proposes ``strict=False`` where the state could be loaded so."""
        try:
            self._checked(saved)
        except StateMismatch as error:
            way_out = f"It cannot be taken in spite of that: {error}"
        else:
            way_out = (
                "If you changed that on purpose, load_state_dict(state, strict=False) goes on at the same position; "
                "seek(epoch, step) goes elsewhere."
            )
        return StateMismatch(
            f"the state of epoch {saved.epoch}, step {saved.step} does not fit this input: {differing}. "
            f"Load it as it was saved, into the input that it was saved from. {way_out}"
        )

    def _checked(self, saved: SavedState) -> EpochRng:
        """The random states of the saved epoch, if the state can be loaded here.

        Raises:
          StateMismatch: it cannot be loaded.
        """
        random = EpochRng.from_texts(saved.random, self._source, saved.epoch)
        self._check_position(saved)
        return random

    def _check_position(self, saved: SavedState) -> None:
        if saved.position is not None:
            self._check_parts(saved.position, saved.fingerprint)
        own = self._own(saved.position)
        if own is not None:
            self._source.check(own)
        steps = self._source.num_steps(own)
        if steps is not None and saved.step > steps:
            raise StateMismatch(f"step: {saved.step} in the state, but an epoch here has {steps} step(s).")

    def _check_parts(self, position: list[Any], fingerprint: Mapping[str, Any]) -> None:
        """Refuses a saved position that has no part for this worker, or one that another world has made."""
        workers = 1 if self._ranks is None else self._ranks.num_workers
        kind, parts = position[0] if position else None, position[1:]
        are_parts = all(isinstance(part, list | tuple) for part in parts)
        if not are_parts or not ((kind == "all" and len(parts) == 1) or (kind == "each" and parts)):
            raise StateMismatch(f"position: found {json.dumps(position)[:100]}. Load the state as it was saved.")
        then, now = ([facts.get(name) for name in OF_WORLD] for facts in (fingerprint, self._fingerprint()))
        if (kind == "each" and len(parts) != workers) or (self._source.facts.bound_to_world and then != now):
            told = then[0] or (len(parts) if kind == "each" else "one position for all")
            raise StateMismatch(
                f"number of ranks: {told!s:.200} in the state, {workers} here, and each rank has a position of its own "
                "(a dataset function, policy HINT or OFF, or a dataset whose own state differs from rank to rank). "
                "Resume with as many ranks and replicas, under the same policy."
            )

    def seek(self, epoch: int, step: int) -> None:
        """Makes a step of an epoch the next place, without a saved state. Local.

        Raises:
          ValueError: there is no such step.
          InputError: the order of the epoch follows from random states that are no longer known.
        """
        steps, size = self._source.num_steps(), self._fingerprint().get("batch size")
        if steps is not None and step > steps:
            raise ValueError(f"step is {step}, but an epoch has {steps} step(s).")
        random = self.random_of(epoch)
        self._leave()
        if self._user_epoch is not None:
            self._user_epoch = epoch
            self._source.user_epoch.tell(epoch)
        self.next_epoch = epoch
        samples, most = step * size if isinstance(size, int) else 0, self._source.num_samples()
        samples = samples if most is None else min(samples, most)
        texts = EpochRng.of(self._source, None).texts() if random is None else random.texts()
        saved = self._saved(epoch, texts, Start(step, samples), user_epoch=self._user_epoch)
        self._pending = _NextPlace(saved, random, restores=True, is_sought=True)
        self._source.user_epoch.forget_calls()

    def begun_at(self, epoch: int) -> Sequence[Any] | None:
        """This worker's position where an epoch was begun, or will be; ``None`` for its start. Local."""
        self._settle()
        _, pending, _ = self._next()
        if pending is not None and pending.saved.epoch == epoch:
            return self._own(pending.saved.position)
        progress = self.last.taken
        return progress.start.position if progress is not None and progress.epoch == epoch else None

    def random_of(self, epoch: int, *, running: bool = False) -> EpochRng | None:
        """The random states from which to draw an epoch, with the epochs to replay first; ``None`` for no draw. Local.

        Args:
          epoch: the number.
          running: whether an epoch is read now; its later draws then come before those of the next epoch.
        """
        self._settle()
        next_epoch, pending, begun = self._next()
        if self._source.facts.draws_alone and epoch != next_epoch:
            raise InputError(
                f"epoch {epoch} was sought, but each rank draws the order of its own data (policy HINT, or a dataset "
                f"function), which is known for the next epoch only, {next_epoch}. Load a state of that epoch."
            )
        if not self._source.facts.needs_default_state and not self._source.random_state.generators:
            return None
        known = list(self._known)
        if pending is None and not (running and known):
            known.append((next_epoch, begun or EpochRng.of(self._source, self._default_now())))
        elif pending is not None and pending.random is not None:
            known.append((pending.saved.epoch, pending.random))
        by_base = {base - random.replay: random for base, random in known}
        before = [base for base in by_base if base <= epoch]
        if not before:
            raise InputError(
                f"epoch {epoch} was sought, but the random states are known from epoch {min(by_base)} on only, and the "
                "order of each epoch follows from the one before. Make the loader anew, seek from there, or use a "
                "ShuffleSampler(n, seed), whose epochs follow from the seed."
            )
        random = by_base[max(before)]
        return EpochRng(random.seeds, epoch - max(before), random.default, random.generators)
