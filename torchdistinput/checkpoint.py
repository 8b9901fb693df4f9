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

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, final

import torch

from torchdistinput.coordination.fingerprints import agree
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.errors import InputError, StateMismatch
from torchdistinput.iterator import EpochPipeline, EpochProgress, LastStep
from torchdistinput.plan.checkpoint_format import OF_WORLD, Place, differences, from_state, to_state
from torchdistinput.sources.contract import Source
from torchdistinput.sources.epoch_rng import EpochRng
from torchdistinput.sources.rng import SharedRng, SharedRngState, WithRng
from torchdistinput.step_types import Start

T = TypeVar("T")

_LOG = logging.getLogger("torchdistinput")
_REMEMBERED_EPOCHS: Final = 64  # some KiB each


@final
class NextPlace(NamedTuple):
    """The place at which the next epoch begins.

    Args:
      epoch: the number of the epoch.
      place: the place in it that was loaded or sought; ``None`` for its start.
      random: the random states from which the order of this epoch is drawn; ``None`` where none is needed.
      restores: whether the random states are set again when the epoch begins, in case other code drew from them.
      is_sought: whether it was sought, so that the samples before it are still to be counted.
    """

    epoch: int
    place: Place | None = None
    random: EpochRng | None = None
    restores: bool = False
    is_sought: bool = False

    @property
    def mark(self) -> str:
        """A text that is equal on two ranks if and only if they begin at the same place."""
        return f"epoch {self.epoch}, step 0" if self.place is None else self.place.mark

    @property
    def default(self) -> torch.Tensor | None:
        """The value of torch's default random state to draw from; ``None`` for the present one."""
        return self.random.default if self.random is not None and self.restores else None


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
        self.next = NextPlace(0)
        """Where the next epoch begins; an epoch of which nothing was taken yet is still the next one."""
        self.unread: EpochPipeline | None = None
        """That epoch, once it has begun."""
        self._left: EpochProgress | None = None  # the epoch that was read last, if a state is not of it any more
        self._known: deque[tuple[int, EpochRng]] = deque(maxlen=_REMEMBERED_EPOCHS)

    def set_epoch(self, epoch: int, *, running: bool = False, asked: bool = True) -> None:
        """Sets the number of the next epoch. A place in this epoch that was loaded or sought is kept.

        Args:
          epoch: the number.
          running: whether the epoch that was read last is still read; ``state`` then returns its position.
          asked: whether the user gave it to the dataset; else one of the user's objects shows it.
        """
        if self.next.place is None or self.next.epoch != epoch:
            self.next = NextPlace(epoch)
            self._left = self._left if running else self.last.progress
        self._source.user_epoch.tell(epoch, asked=asked)

    def start(self) -> Start:
        """The start of the next epoch, which begins there: sets the generators for it."""
        place, random = self.next.place, self.next.random
        if place is None:
            return Start()
        start = Start(place.step, place.samples, place.drawn, self._own(place.position))
        if random is None:
            return start
        if self.next.restores:
            random.restore(self._source)
        return replace(start, replay=random.replay, seeds=random.seeds)

    def take(self, progress: EpochProgress) -> None:
        """Moves the place: this epoch is read from now on, and the next one is the one after it."""
        self._known.append((progress.epoch, progress.random))
        self.last.take(progress)  # before the next place moves: an interruption in between loses no epoch
        self.next = NextPlace(progress.epoch + 1)
        self.unread = None

    def record(self, with_rng: WithRng) -> EpochRng:
        """The random states right before the stream of the next epoch is opened."""
        default = with_rng.state if isinstance(with_rng, SharedRng) else None
        if default is None and self._ranks is None:
            default = torch.get_rng_state()
        random = EpochRng.of(self._source, default)
        if self.next.random is not None:
            random.replay, random.seeds = self.next.random.replay, self.next.random.seeds
        return random

    def begun(self, epoch: EpochPipeline) -> None:
        """Notes that the next epoch has begun."""
        epoch.progress.is_sought = self.next.is_sought
        epoch.progress.fingerprint = self._fingerprint()
        self.unread = epoch

    def _default_now(self) -> torch.Tensor | None:
        """The default state from which all ranks draw next; ``None`` where this rank does not know it."""
        return torch.get_rng_state() if self._ranks is None else self._shared_rng.state

    def _next_place(self) -> Place:
        """The place at which the next epoch begins, with its random states. Local."""
        if self.next.place is not None:
            return self.next.place
        return self._place(self.next.epoch, self._next_random().texts(), Start())

    def _next_random(self) -> EpochRng:
        """The random states of the next epoch, if it began now."""
        unread = self.unread
        return EpochRng.of(self._source, self._default_now()) if unread is None else unread.progress.random

    def state(self) -> dict[str, Any]:
        """The saved state for the steps delivered so far. Collective where the workers' positions differ."""
        progress = self.last.progress
        if progress is None or progress is self._left or progress.ended:
            return to_state(self._between_epochs(progress), self._fingerprint())
        if self._is_whole(progress):
            return to_state(self._after_last_step(progress), self._fingerprint())
        random, place = progress.random.texts(), None
        if progress.steps or self._source.facts.has_epoch_position:
            tell = partial(progress.stream.position, progress.rows)
            place, random = self._positions(progress, progress.epoch, progress.steps, random, tell)
        reached = Start(progress.steps, progress.samples, progress.draw_digest)
        return to_state(self._place(progress.epoch, random, reached, place), progress.fingerprint)

    def _between_epochs(self, progress: EpochProgress | None) -> Place:
        """The place where no epoch is read. Collective where the data has a position there."""
        source, place = self._source, self._next_place()
        if not source.facts.has_epoch_position or self.next.place is not None:
            return place
        unread = None if self.unread is None else self.unread.progress
        tell = source.next_epoch_position if unread is None else partial(unread.stream.position, 0)
        position, random = self._positions(unread or progress, place.epoch, 0, place.random, tell)
        return replace(place, position=position, random=random if source.facts.draws_alone else place.random)

    def _is_whole(self, progress: EpochProgress) -> bool:
        """Whether the last step of an epoch of known length was delivered. Data may keep a state of the end itself."""
        steps = self._source.num_steps(progress.start.position)
        return steps is not None and 0 < steps <= progress.steps and not self._source.facts.has_epoch_position

    def _after_last_step(self, progress: EpochProgress) -> Place:
        """The place for the beginning of the next epoch, where the end of this one was not asked for yet."""
        random = progress.random
        if not self._source.facts.draws_order:
            return self._next_place()
        # The sampler may draw once more at its end, so the draws of this epoch are made again.
        after = EpochRng(random.seeds, random.replay + 1, random.default, random.generators)
        return self._place(self.next.epoch, after.texts(), Start())

    def _place(self, epoch: int, random: tuple[str, ...], reached: Start, position: list[Any] | None = None) -> Place:
        return Place(
            epoch=epoch,
            step=reached.steps,
            samples=reached.samples,
            drawn=reached.draw_digest,
            sample_seed=self._source.random_state.sample_seed,
            random=random,
            position=position,
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
        joined = source.joined(positions)
        return (["each", *positions] if joined is None else ["all", joined]), common

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

        def read() -> tuple[Place, Mapping[str, Any], str]:
            place, fingerprint = from_state(state)
            return place, fingerprint, "; ".join(differences(fingerprint, self._fingerprint()))

        place, fingerprint, differing = _read(read)
        if differing:
            place = replace(place, drawn=0)  # the sampler may draw something else, too
            if strict:
                raise self._refused(place, fingerprint, differing)
        random = self._checked(place, fingerprint)
        if differing:
            _LOG.warning("dataset %s: loading a state in spite of differences: %s", self._name, differing)
        if isinstance(state, Mapping) and state.get("group"):
            _LOG.warning(
                "dataset %s: the state was saved between steps whose gradients were accumulated (accumulate= of 0.2), "
                "after step %d. The gradients of the first of them are not in it, and no update will have them.",
                self._name,
                place.step,
            )
        self._left = self.last.progress
        self._source.random_state.give_sample_seed(place.sample_seed)
        self.next = NextPlace(place.epoch, place, random, restores=place.step > 0 or random.replay > 0)
        self._known.append((place.epoch, random))
        random.restore(self._source)
        if random.default is not None and (self._ranks is None or self._ranks.rank == 0):
            torch.set_rng_state(random.default)
        own = self._own(place.position)
        if own is not None:
            self._source.random_state.restore(own)
        self._source.user_epoch.forget_calls()

    def _refused(self, place: Place, fingerprint: Mapping[str, Any], differing: str) -> StateMismatch:
        """The error for a state that differs. It proposes ``strict=False`` where the state could be loaded so."""
        try:
            self._checked(place, fingerprint)
        except StateMismatch as error:
            way_out = f"It cannot be taken in spite of that: {error}"
        else:
            way_out = (
                "If you changed that on purpose, load_state_dict(state, strict=False) goes on at the same position; "
                "seek(epoch, step) goes elsewhere."
            )
        return StateMismatch(
            f"the state of epoch {place.epoch}, step {place.step} does not fit this input: {differing}. "
            f"Load it as it was saved, into the input that it was saved from. {way_out}"
        )

    def _checked(self, place: Place, fingerprint: Mapping[str, Any]) -> EpochRng:
        """The random states of the saved epoch, if the state can be loaded here.

        Raises:
          StateMismatch: it cannot be loaded.
        """

        def check() -> EpochRng:
            random = EpochRng.from_texts(place.random, self._source, place.epoch)
            self._check_position(place, fingerprint)
            return random

        return _read(check)

    def _check_position(self, place: Place, fingerprint: Mapping[str, Any]) -> None:
        if place.position is not None:
            self._check_parts(place.position, fingerprint)
        own = self._own(place.position)
        if own is not None:
            self._source.check(own)
        steps = self._source.num_steps(own)
        if steps is not None and place.step > steps:
            raise StateMismatch(f"step: {place.step} in the state, but an epoch here has {steps} step(s).")

    def _check_parts(self, position: list[Any], fingerprint: Mapping[str, Any]) -> None:
        """Refuses a saved position that has no part for this worker, or one that another world has made."""
        workers = 1 if self._ranks is None else self._ranks.num_workers
        kind, *parts = position
        if kind not in {"all", "each"} or not parts:
            raise StateMismatch(f"position: found {position!r:.100}. Load the state as it was saved.")
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
        self._left = self.last.progress
        samples = step * size if isinstance(size, int) else 0
        if not self._source.facts.bound_to_world and (most := self._source.num_samples()) is not None:
            samples = min(samples, most)
        texts = EpochRng.of(self._source, None).texts() if random is None else random.texts()
        place = self._place(epoch, texts, Start(step, samples))
        self.next = NextPlace(epoch, place, random, restores=True, is_sought=True)
        self._source.user_epoch.tell(epoch, asked=True)

    def begun_at(self, epoch: int) -> Sequence[Any] | None:
        """This worker's position where an epoch was begun, or will be; ``None`` for its start. Local."""
        if self.next.place is not None and self.next.epoch == epoch:
            return self._own(self.next.place.position)
        progress = self.last.progress
        return progress.start.position if progress is not None and progress.epoch == epoch else None

    def random_of(self, epoch: int, *, running: bool = False) -> EpochRng | None:
        """The random states from which to draw an epoch, with the epochs to replay first; ``None`` for no draw. Local.

        Args:
          epoch: the number.
          running: whether an epoch is read now; its later draws then come before those of the next epoch.
        """
        after = self.next
        if self._source.facts.draws_alone and epoch != after.epoch:
            raise InputError(
                f"epoch {epoch} was sought, but each rank draws the order of its own data (policy HINT, or a dataset "
                f"function), which is known for the next epoch only, {after.epoch}. Load a state of that epoch."
            )
        if not self._source.facts.needs_default_state and not self._source.random_state.generators:
            return None
        known = list(self._known)
        if after.place is None and not (running and known):
            known.append((after.epoch, self._next_random()))
        elif after.random is not None:
            known.append((after.epoch, after.random))
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


def _read(read: Callable[[], T]) -> T:
    """What is read from a state. Where that fails, the state is damaged: no check stands for each thing in it."""
    try:
        return read()
    except InputError:
        raise
    except Exception as error:
        raise StateMismatch(f"the state is damaged ({error!r:.200}). Load it as it was saved.") from error
