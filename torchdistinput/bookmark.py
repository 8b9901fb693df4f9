"""Where a dataset stands in its epochs: what a state saves, and what loading one or seeking sets.

The steps that were *delivered* count, never what was read ahead. The order of an epoch is not saved: it is drawn again,
by the user's own sampler, from the random state as it was when the epoch began; what was delivered is passed over.

**Torch's default random state.** Where no generator was given, torch draws from the default state, and rank 0's counts
for all ranks. Loading a state sets it back there at once, on rank 0 only (others may be seeded differently on purpose),
to what it was when the epoch began; the draws of the epoch then take it as far as they did before. Whoever restores the
default state too, for dropout say, does so after loading: that one is then kept, and the epoch's draws are borrowed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from torchdistinput.agreement import agree
from torchdistinput.backends.collectives import Ranks
from torchdistinput.errors import InputError, StateMismatch
from torchdistinput.flow import Start, Stream
from torchdistinput.iterator import Progress
from torchdistinput.plan.state import SavedState, differences
from torchdistinput.sources.base import Source
from torchdistinput.sources.random_state import BorrowedRandomState, packed, plainly, unpacked

__all__ = ["Bookmark", "Entry"]

_LOG = logging.getLogger("torchdistinput")


@final
class _Random:
    """How the order of an epoch is drawn: random states, packed when somebody asks.

    Args:
      base_seed: when torch's loader draws the seed of its workers.
      replay: whole epochs whose draws come first.
      default: torch's default state; ``None`` where it does not matter, or is not known on this rank.
      generators: the states of the input's generators.
    """

    def __init__(
        self, base_seed: str, replay: int, default: torch.Tensor | None, generators: Sequence[torch.Tensor]
    ) -> None:
        self.base_seed = base_seed
        self.replay = replay
        self.default = default
        self.generators = generators
        self._texts: tuple[str, ...] | None = None

    @classmethod
    def of(cls, source: Source, default: torch.Tensor | None) -> _Random:
        """As it is now."""
        wanted = default if source.needs_default_state else None
        return cls(source.base_seed, 0, wanted, [generator.get_state() for generator in source.generators()])

    @classmethod
    def from_texts(cls, texts: Sequence[str], source: Source) -> _Random:
        """As a state has it.

        Raises:
          StateMismatch: the texts are none of a state, or of an input with other generators.
        """
        expected = len(source.generators())
        if len(texts) != 2 + expected:
            raise StateMismatch(
                f"random: the state has {max(len(texts) - 2, 0)} generator(s), the input here has {expected}. Give "
                "the input the generators that it had (generator= of the DataLoader and of its sampler)."
            )
        base_seed, _, replay = texts[0].partition(" ")
        if base_seed not in ("every", "first", "never") or not replay.isdecimal():
            raise StateMismatch(f"random: found {texts[0]!r:.60} as its first entry. Load the state as it was saved.")
        default = unpacked(texts[1]) if texts[1] else None
        return cls(base_seed, int(replay), default, [unpacked(text) for text in texts[2:]])

    def texts(self) -> tuple[str, ...]:
        """As a state has it."""
        if self._texts is None:
            default = "" if self.default is None else packed(self.default)
            self._texts = (f"{self.base_seed} {self.replay}", default, *map(packed, self.generators))
        return self._texts


@final
@dataclass(frozen=True)
class Entry:
    """How the next epoch begins.

    Args:
      epoch: its number.
      start: where in it.
      mark: equal on two ranks if and only if they begin at the same place.
      default: torch's default random state to draw from; ``None``: as it is.
    """

    epoch: int
    start: Start
    mark: str
    default: torch.Tensor | None


@final
@dataclass(frozen=True)
class _Pending:
    """A place to begin at that was loaded or sought, and not entered yet."""

    saved: SavedState
    random: _Random | None
    enters_default: bool


@final
class Bookmark:
    """Where one dataset stands.

    Args:
      source: the data.
      fingerprint: what tells this input from others, also in another world.
      ranks: the ranks that must agree; ``None`` where there is one only.
      worker: which worker this is.
      name: the dataset's, for messages.
    """

    def __init__(
        self, source: Source, fingerprint: Mapping[str, Any], ranks: Ranks | None, worker: int, name: str
    ) -> None:
        self._source = source
        self._fingerprint = fingerprint
        self._ranks = ranks
        self._worker = worker
        self._name = name
        self._epoch = 0
        self._told: int | None = None
        self._pending: _Pending | None = None
        self._entered: _Pending | None = None
        self._progress: Progress | None = None
        self._stream: Stream | None = None
        self._random: _Random | None = None
        self._first: tuple[int, _Random] | None = None
        self._draws: Callable[[Callable[[], Any]], Any] = plainly

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch. A place in that epoch that was loaded or sought stays."""
        self._told = epoch
        if self._pending is None or self._pending.saved.epoch != epoch:
            self._leave()
        self._epoch = epoch
        self._source.set_epoch(epoch)

    def _leave(self) -> None:
        """Whatever was begun or loaded does not count any more."""
        self._pending = self._progress = self._stream = None

    def enter(self) -> Entry:
        """How the next epoch begins; the generators are set for it. The epoch after it is the next one then."""
        pending, self._pending = self._pending, None
        self._entered = pending
        epoch = self._epoch
        self._epoch += 1
        if pending is None:
            return Entry(epoch, Start(), f"epoch {epoch}, step 0", None)
        saved, random = pending.saved, pending.random
        start = Start(saved.step, saved.samples, saved.drawn, self._own(saved.position))
        if random is None:
            return Entry(epoch, start, saved.mark, None)
        for generator, state in zip(self._source.generators(), random.generators, strict=True):
            generator.set_state(state)
        start = replace(start, replay=random.replay, base_seed=random.base_seed)
        return Entry(epoch, start, saved.mark, random.default if pending.enters_default else None)

    def record(self, draws: Callable[[Callable[[], Any]], Any]) -> Callable[[], tuple[str, ...]]:
        """Takes down the random states, right before the stream of the epoch is opened."""
        self._draws = draws
        self._random = _Random.of(self._source, self._default_now())
        return self._random.texts

    def begun(self, entry: Entry, progress: Progress, stream: Stream) -> None:
        """The epoch has begun."""
        random = self._random
        if random is not None:
            random.replay = entry.start.replay
            random.base_seed = entry.start.base_seed or random.base_seed
            if self._first is None:
                self._first = (entry.epoch, random)
        self._progress, self._stream = progress, stream

    def reenter(self) -> None:
        """The epoch that was begun last was not read: the next one is the same again, drawn from the same states."""
        progress, random = self._progress, self._random
        if progress is None or random is None or progress.steps_here:
            return
        self._epoch = progress.epoch
        begun = self._saved(progress.epoch, random.texts(), Start(), None)
        self._pending = self._entered or _Pending(begun, random, enters_default=True)

    def _default_now(self) -> torch.Tensor | None:
        """The default state from which the next draws of all ranks come, as far as it is known here."""
        if self._ranks is None and not isinstance(self._draws, BorrowedRandomState):
            return torch.get_rng_state()
        return self._draws.state if isinstance(self._draws, BorrowedRandomState) else None

    def state(self) -> SavedState:
        """What was delivered, as it is saved. Collective where the workers' positions differ."""
        if self._pending is not None:
            return replace(self._pending.saved, fingerprint=self._fingerprint)
        progress = self._progress
        if progress is None or progress.ended:
            random = _Random.of(self._source, torch.get_rng_state() if self._ranks is None else self._default_now())
            return self._saved(self._epoch, random.texts(), Start(), None)
        reached = Start(progress.steps, progress.samples, progress.drawn)
        position = self._gathered(progress) if progress.steps else None
        return self._saved(progress.epoch, progress.random(), reached, position)

    def _saved(self, epoch: int, random: tuple[str, ...], reached: Start, position: list[Any] | None) -> SavedState:
        return SavedState(
            epoch=epoch,
            step=reached.steps,
            samples=reached.samples,
            drawn=reached.drawn,
            told_epoch=self._told,
            random=random,
            position=position,
            fingerprint=self._fingerprint,
        )

    def _gathered(self, progress: Progress) -> list[Any]:
        """The position of all workers: one if they have the same, else each one's."""
        stream, source, ranks = self._stream, self._source, self._ranks
        if stream is None:
            raise AssertionError("steps were delivered without a stream")
        own, problem = None, None
        try:
            own = stream.position(progress.rows)
        except Exception as error:  # where all ranks meet, each must hear of it, or the others would wait
            problem = error
        if ranks is None or not (source.collective_state or stream.owns_state):
            if problem is not None:
                raise problem
            return ["all", own]
        facts = {"dataset": self._name, "epoch": progress.epoch, "step": progress.steps}
        told = agree(ranks, f"state_dict() of dataset {self._name}", facts, error=problem, extra=own)
        positions = [told[first] for first in ranks.firsts]
        alike = all(position == positions[0] for position in positions)
        return ["all", positions[0]] if alike and not source.bound_to_world else ["each", *positions]

    def _own(self, position: list[Any] | None) -> list[Any] | None:
        """This worker's part of a saved position."""
        if position is None:
            return None
        own: list[Any] = position[1] if position[0] == "all" else position[1 + self._worker]
        return own

    def load(self, state: object, *, strict: bool) -> None:
        """Begins the next epoch where a state was saved. Local.

        Raises:
          StateMismatch: the state does not fit.
        """
        saved = SavedState.from_dict(state, strict=strict)
        self._compare(saved, strict=strict)
        random = _Random.from_texts(saved.random, self._source)
        self._check_position(saved)
        self._leave()
        self._epoch = saved.epoch
        self._told = saved.told_epoch
        if saved.told_epoch is not None:
            self._source.set_epoch(saved.told_epoch)
        self._pending = _Pending(saved, random, enters_default=saved.step > 0 or random.replay > 0)
        self._first = (saved.epoch, random)
        if random.default is not None and (self._ranks is None or self._ranks.rank == 0):
            torch.set_rng_state(random.default)

    def _compare(self, saved: SavedState, *, strict: bool) -> None:
        found = differences(saved.fingerprint, self._fingerprint)
        if found and strict:
            raise StateMismatch(
                f"the state is of another input: {'; '.join(found)}. Load it into the input that it was saved from; if "
                "you changed that on purpose, load_state_dict(state, strict=False) goes on at the same position."
            )
        if found:
            _LOG.warning("dataset %s: loading a state in spite of differences: %s", self._name, "; ".join(found))

    def _check_position(self, saved: SavedState) -> None:
        steps, position = self._source.num_steps(), saved.position
        if steps is not None and saved.step > steps:
            raise StateMismatch(f"step: {saved.step} in the state, but an epoch here has {steps} step(s).")
        if position is None:
            return
        workers = 1 if self._ranks is None else self._ranks.num_workers
        kind, parts = position[0] if position else None, position[1:]
        if not ((kind == "all" and len(parts) == 1) or (kind == "each" and parts)):
            raise StateMismatch(f"position: found {json.dumps(position)[:100]}. Load the state as it was saved.")
        if kind == "each" and len(parts) != workers:
            raise StateMismatch(
                f"number of workers: {len(parts)} in the state, {workers} here, and each worker has a position of its "
                "own (a dataset function, policy HINT or OFF, or a dataset whose own state differs from rank to rank). "
                "Resume with as many ranks."
            )
        self._source.check(parts[0] if kind == "all" else parts[self._worker])

    def seek(self, epoch: int, step: int) -> None:
        """Begins the next epoch at a step, without a state. Local.

        Raises:
          ValueError: there is no such step.
          InputError: the order of that epoch follows from random draws that are past.
        """
        steps, size = self._source.num_steps(), self._fingerprint.get("batch size")
        if steps is not None and step > steps:
            raise ValueError(f"step is {step}, but an epoch has {steps} step(s).")
        random = self._random_of(epoch)
        pending = self._pending
        self._leave()
        if pending is not None and self._told is None:
            self._told = pending.saved.told_epoch
        if self._told is not None:
            self._told = epoch
            self._source.set_epoch(epoch)
        self._epoch = epoch
        samples = step * size if isinstance(size, int) else 0
        texts = _Random.of(self._source, None).texts() if random is None else random.texts()
        saved = self._saved(epoch, texts, Start(step, samples), None)
        self._pending = _Pending(saved, random, enters_default=True)

    def _random_of(self, epoch: int) -> _Random | None:
        """From which random states to draw for an epoch, with how many epochs before it; ``None`` for none."""
        if not self._source.needs_default_state and not self._source.generators():
            return None
        known = [] if self._first is None else [self._first]
        if self._pending is not None and self._pending.random is not None:
            known.append((self._pending.saved.epoch, self._pending.random))
        elif self._pending is None:
            default = torch.get_rng_state() if self._ranks is None else self._default_now()
            known.append((self._epoch, _Random.of(self._source, default)))
            if self._progress is not None and self._random is not None:
                known.append((self._progress.epoch, self._random))
        by_base = {base - random.replay: random for base, random in known}
        before = [base for base in by_base if base <= epoch]
        if not before:
            raise InputError(
                f"epoch {epoch} was sought, but the random states are known from epoch {min(by_base)} on only, and the "
                "order of each epoch follows from the one before. Make the loader anew, seek from there, or use a "
                "ShuffleSampler(n, seed), whose epochs follow from the seed."
            )
        random = by_base[max(before)]
        return _Random(random.base_seed, epoch - max(before), random.default, random.generators)
