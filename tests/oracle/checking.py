"""Compares what the ranks saw with what the laws say."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.oracle.data import COLLATES, OneProcess, structure_of, whole_batch
from tests.oracle.expected import Delivered, Log, log_of
from tests.oracle.laws import dealt, reader_batches, steps_of, steps_of_own, sums_of
from tests.oracle.playing import Played, Targets, place_in
from tests.oracle.program import Odd, Program, Turn

FROM_A_STEP_ON = {"draws", "weighs", "breaks", "ends"}
"""How a rank is odd only from a step on."""


class Checker:
    """Follows a program from turn to turn.

    Args:
      program: the program.
      folder: of its files.
      state: the state with which it begins, as JSON; empty for none.
      orders: see ``log_of``.
      grown: how many samples more its data has.
      counts_sought: whether the samples in states count also where a step was sought: they are told wrongly.
    """

    def __init__(
        self,
        program: Program,
        folder: Path,
        state: str = "",
        orders: OneProcess | None = None,
        *,
        counts_sought: bool = False,
        grown: int = 0,
    ) -> None:
        self.program, self._orders = program, orders or OneProcess(program, folder)
        self._folder, self._grown = folder, grown
        self._turns = list(program.turns)
        self._at, self._has_read = (place_in(state)[:2] if state else (0, 0)), False
        self.state = state
        """The state with which the next turn begins, as JSON."""
        sought = any(each.kind in {"seek", "skip"} for turn in program.turns for each in turn.actions)
        self._counts = counts_sought or not sought
        self.branches: list[Checker] = []
        """Those that follow what goes on from a state in the middle of a turn."""
        self._structures = set[str]()
        """Of the elements, without ``PerReplica``; the first is that of what the collate function returns."""
        if program.extras == "plain" and not program.is_ready and not program.is_in_memory:
            self._structures.add(json.dumps(structure_of(whole_batch(program)), sort_keys=True))
        self._epochs: dict[int, list[list[Delivered]]] = defaultdict(list)
        self._drawn: dict[tuple[int, int], int] = {}
        self._last: Turn | None = None
        self._begin()

    def _begin(self) -> None:
        before = self._last
        self.turn = self._turns.pop(0) if self._turns else None
        """The turn to be played next; ``None`` after the last."""
        if self.turn is not None and self.turn.changes and not self._is_in_the_middle(self.turn):
            self.turn = None  # an epoch of which nothing was read may read what is there; one read whole reads nothing
        self._is_elsewhere = self._begins_elsewhere(before)
        if self.turn is not None and self.turn.beyond:
            self.state = self._beyond(self.turn)
        if self.turn is not None and [shares_of(self.turn.weights)] == [
            shares_of(weights) for _, weights in self.program.mixed.weights
        ]:
            self.turn = replace(self.turn, weights=())  # the same shares change nothing
        if self.turn is not None and self.turn.weights:
            self._reweigh(self.turn)
        if self.turn is not None:
            self.turn = replace(self.turn, grown=self._grown)
            self._length = len(steps_of(self.program, self.turn, self._orders(self._at[0], self._grown)))
            self._expected, self._targets, self._grown = log_of(self.program, self.turn, self._orders, self._at)

    def _begins_elsewhere(self, before: Turn | None) -> bool:
        """Whether the turn begins with a state of ranks that read for themselves, with other ranks than there were."""
        turn, program = self.turn, self.program
        if turn is None or before is None or program.data == "files" or program.policy in {"DATA", "FILE"}:
            return False
        counts = turn.world > 1 or program.data == "function"  # in one process each policy is DATA
        is_other = turn.world != before.world or (counts and turn.replicas != before.replicas)
        if is_other and self._at == (0, 0):  # in which nobody has read anything
            self.turn = None
        return is_other

    def _reweigh(self, turn: Turn) -> None:
        """See ``Turn.weights``."""
        epoch, step = self._at
        done = steps_of(self.program, turn, self._orders(epoch))[:step]
        samples = sum(len(piece) for each in done for row in each for piece in row)
        self.program = replace(self.program, mixed=replace(self.program.mixed, weights=((0, turn.weights),)))
        self._orders = self._orders.reweighed(self.program, epoch, samples)

    def _beyond(self, turn: Turn) -> str:
        """See ``Turn.beyond``."""
        state = json.loads(self.state)
        return json.dumps(
            {**state, "step": 1 + len(steps_of(self.program, turn, self._orders(state["epoch"], self._grown)))}
        )

    def _is_in_the_middle(self, turn: Turn) -> bool:
        """Whether a part of the epoch in which the turn begins was read, and a part was not."""
        epoch, step = self._at
        return self._has_read and step < len(steps_of(self.program, turn, self._orders(epoch, self._grown)))

    @property
    def targets(self) -> Targets:
        """The steps to which the turn goes."""
        return self._targets

    def check(self, played: Sequence[Played]) -> None:
        """Checks the turn, as each rank played it."""
        turn = self.turn
        assert turn is not None
        shown = [dataclasses.asdict(each.log) for each in played], [each.message for each in played]
        self._last, self.turn = turn, None
        odd = turn.odd
        if self._is_elsewhere:
            errors = {each.log.error for each in played}
            assert errors == {"StateMismatch"} or (odd is not None and "" not in errors), shown
            return
        if odd is not None and odd.does == "forgets" and self._at == (0, 0):
            return  # that state holds the random states, or nothing that is not known without it
        if self._is_refused(turn, played):
            return
        if odd is not None and self._is_apart(odd, turn):
            self._check_refused(odd, turn, played)
            return
        if turn.changes or turn.beyond:
            assert {each.log.error for each in played} == {"StateMismatch"}, shown
            assert not any(each.log.steps for each in played), shown
            return
        assert len({len(each.log.steps) for each in played}) == 1, shown
        self._check_length(turn, played)
        if self.program.is_exact:
            for rank, (each, expected) in enumerate(zip(played, self._expected, strict=True)):
                self._compare(turn, rank, each, expected)
            self._check_bad(turn, played)
        else:
            self._check_loosely(played)
        self._check_structure(played)
        self._check_drawn(played)
        self._check_states(turn, played)
        assert self.state or played[0].log.error, shown
        if self.state:
            self._go_on(turn, played[0].log)

    def _check_length(self, turn: Turn, played: Sequence[Played]) -> None:
        """Checks that the steps that are told of an epoch are those that it has, where none is passed over."""
        program = self.program
        passes_over = 0 in program.sizes and program.is_ready
        if program.skips or passes_over or program.data == "mixture" or turn.loader_workers > 1:
            return
        is_known = (program.is_map_style and not program.has_batches) or (
            bool(program.shows) and program.given in {"", "bare"}
        )
        for each in played:
            if each.length is not None or (is_known and program.policy == "DATA"):
                assert each.length == self._length, f"the length is {each.length}, not {self._length}"

    def _check_states(self, turn: Turn, played: Sequence[Played]) -> None:
        """Checks that the states are the same on all ranks, and that of the begin where no step came."""
        kinds = {each.kind for each in turn.actions} - {"look"} | ({"weights"} if turn.weights else set())
        for each in played:
            for one, first in zip([each.state, *each.saves], [played[0].state, *played[0].saves], strict=True):
                assert one == first, f"the ranks' states differ: {_difference(one, first)}"
            found = each.state if not kinds else each.after_error if kinds == {"read"} and not each.log.steps else ""
            if found and self.state:
                moved = _difference(self.state, found)
                if json.loads(self.state)["sample_seed"] is None:  # it is drawn when the first epoch begins
                    moved = [each for each in moved if not each.startswith("sample_seed:")]
                assert not moved, f"the state has moved: {moved}"
        self.state = played[0].state
        saves = list(zip(played[0].saves, self._expected[0].grown, strict=False))  # an error may come early
        for state, grown in Random(self.program.seed).sample(saves, min(2, len(saves))):
            orders = self._orders.as_it_was(place_in(state)[0], grown) if self._grown else self._orders
            follow = partial(Checker, self.program.after(turn), self._folder, state, orders)
            self.branches.append(follow(counts_sought=self._counts, grown=grown))
            self.branches[-1]._drawn = self._drawn

    def _go_on(self, turn: Turn, log: Log) -> None:
        """Begins the next turn."""
        self._at = log.states[0][:2]
        last = log.steps[-1:]
        went = [each.kind for each in turn.actions if each.kind not in {"break", "look", "tell"}][-1:]
        if went:
            self._has_read = went == ["read"] and bool(last) and (last[0].epoch, last[0].index + 1) == self._at
        self._begin()

    def _is_apart(self, odd: Odd, turn: Turn) -> bool:
        """Whether all ranks are to be told of the odd one; not where it leaves behind the last step and has the end."""
        end = self._expected[0].ends[0] if odd.does == "leaves" else 0
        if odd.does == "leaves" and odd.at >= end:
            if odd.at == end and self.program.prefetch(turn) != 0:
                del self._expected[odd.rank].ends[0]
                return False
            return odd.at == end
        if odd.does in FROM_A_STEP_ON and odd.at >= self._expected[0].ends[0]:
            return False
        return odd.does not in {"slow", "fails", "keys"}

    def _check_bad(self, turn: Turn, played: Sequence[Played]) -> None:
        """Checks that an error names a sample that cannot be read, and how many were left out."""
        program = self.program
        for each in played:
            if each.log.error == "SourceError" and not program.skips:
                name = (
                    "sample "
                    if program.data == "items" and program.order == "in order" and program.policy == "DATA"
                    else ""
                )
                named = [f"CannotRead: {number}" in each.message for number in program.bad]
                assert any(named), each.message
                assert any(f"{name}{number}" in each.message for number in program.bad), each.message
                if program.data == "together" and program.policy == "DATA":  # of those that were read together all
                    self._check_block(turn, each)
                alone = turn.odd.rank if turn.odd is not None and turn.odd.does == "fails" else None
                told = alone is None or played.index(each) == alone or "in sample_of" in each.message
                assert told, f"there is no traceback of rank {alone}: {each.message}"
        if program.skips and program.is_shared(turn):
            counts = [sum(ranks) for ranks in zip(*(each.log.skipped for each in played), strict=True)]
            assert counts == self._expected[0].skipped, (counts, self._expected[0].skipped)

    def _check_block(self, turn: Turn, played: Played) -> None:
        """Checks that an error names the samples of a part."""
        named = re.search(r"samples? (\d+(?:, \d+)*) cannot", played.message) or re.search(
            r"samples? ([\d, ]+)", played.message
        )
        assert named, played.message
        epoch = re.search(r"of epoch (\d+)", played.message)
        assert epoch, played.message
        steps = steps_of(self.program, turn, self._orders(int(epoch[1]), self._grown))
        pieces = [piece for step in steps for row in step for piece in row]
        assert [*map(int, named[1].strip(", ").split(","))] in pieces, played.message

    def _check_refused(self, odd: Odd, turn: Turn, played: Sequence[Played]) -> None:
        """Checks that all ranks have an error, which names the odd one, after the same steps, and right ones."""
        shown = [(each.log.error, len(each.log.steps), each.message[:600]) for each in played]
        leaves = odd.does == "leaves"
        errors = {"leaves": {"RankLost", "RankDisagreement"}, "wrong": {"BatchingError"}}
        errors |= {"opens": {"SourceError"}, "breaks": {"SourceError"}}
        assert {each.log.error for each in played} <= errors.get(odd.does, {"RankDisagreement"}), shown
        others = [each for rank, each in enumerate(played) if not leaves or rank != odd.rank]
        named = re.compile(rf"ranks? {odd.rank * turn.sharing}\b")
        assert all(named.search(each.message) for each in others), shown
        assert leaves or len({len(each.log.steps) for each in played}) == 1, shown
        assert odd.does != "ends" or all(re.search(rf"rank {odd.rank}\b[^;]*: ended", each.message) for each in others)
        for each, expected in zip(played, self._expected, strict=True):
            assert each.log.steps == expected.steps[: len(each.log.steps)], shown
            assert not leaves or len(each.log.steps) >= odd.at, shown
        count = len(played[0].log.steps)
        if odd.does == "grows":
            assert count <= (self._expected[0].ends or [0])[0], shown
        elif odd.does != "leaves":
            assert count == (odd.at if odd.does in FROM_A_STEP_ON else 0), shown

    def _compare(self, turn: Turn, rank: int, played: Played, expected: Log) -> None:
        program, found, message = self.program, played.log, played.message
        fails_early = program.bad and not program.skips and not program.is_shared(turn)
        if found.error == "SourceError" and fails_early:
            # A rank's own batch, which lasts several steps, is read at once.
            count = len(found.steps)
            assert 0 <= len(expected.steps) - count < turn.world, f"rank {rank}: {count} steps. {message[:500]}"
            ends = [end for end in expected.ends if end <= count]
            expected = Log(expected.steps[:count], ends, "SourceError", saves=expected.saves[:count])
        for what in ("steps", "ends", "error", "lost", "states", "saves"):
            got, right = getattr(found, what), getattr(expected, what)
            if what == "lost" and message and not COLLATES[self.program.collate].certain:  # refused at the first step
                continue
            if what == "lost" and message and fails_early:
                right = right[: len(got)]
            if what in ("states", "saves") and not self._counts:
                got, right = _without_samples(what, got), _without_samples(what, right)
            is_right = got == right or (what == "states" and set(got) <= set(right) != set())
            if what == "saves":
                is_right = len(got) == len(right) and all(
                    set(one) <= set(two) for one, two in zip(got, right, strict=True)
                )
            assert is_right, f"rank {rank} of {turn}: {what} are\n{got}, not\n{right}. {message[:500]}"

    def _is_refused(self, turn: Turn, played: Sequence[Played]) -> bool:
        """Whether all ranks refused, at the first step, a kind of batch of which no rule makes an empty part."""
        errors = {each.log.error for each in played}
        if (
            self.program.collate == "noted" and not self.program.fills
        ):  # a cut batch keeps its own numbers; where a rank has none, they are another's
            lacks = any(not any(each.pieces) for log in self._expected for each in log.steps)
            is_refused = "BatchingError" in errors
            shared = self.program.is_shared(turn)
            read_all = errors == {""}  # else another error came first
            assert not (is_refused if shared else lacks and read_all), [each.message for each in played]
        kind = COLLATES[self.program.collate]
        if self.program.fills:
            return False
        if kind.certain or "BatchingError" not in errors:
            lacks = any(not all(each.pieces) for log in self._expected for each in log.steps)
            lacks = lacks and not self.program.is_ready  # of one that is cut the numbers stay
            assert not (kind.refused and lacks and errors == {""}), "an empty part was made, of which nothing is known"
            return False
        assert turn.num_replicas > 1, [each.message for each in played]
        assert errors == {"BatchingError"}
        assert not any(each.log.steps for each in played), [each.message for each in played]
        return True

    def _check_structure(self, played: Sequence[Played]) -> None:
        if self.program.collate == "noted" and self.program.data != "function" and not self.program.fills:
            # What no row has a part of stays outside of PerReplica.
            assert all("PerReplica of str" not in structure for each in played for structure in each.structures)
        if self.program.collate == "columns":  # tuples of as many entries as there are samples
            return
        structures = {structure for each in played for structure in each.structures}
        assert len(structures) < 2, f"the structure of an element differs between steps or ranks: {structures}"
        self._structures |= {structure.replace("PerReplica of ", "") for structure in structures}
        assert len(self._structures) < 2, f"the structure of an element differs between worlds: {self._structures}"

    def _check_drawn(self, played: Sequence[Played]) -> None:
        """Checks that the sample of an epoch draws the same whoever reads it, and no two the same."""
        for each in played:
            for sample, drawn in each.drawn.items():
                assert self._drawn.setdefault(sample, drawn) == drawn, f"sample {sample} drew {drawn}"
        assert len(set(self._drawn.values())) == len(self._drawn)

    def _check_loosely(self, played: Sequence[Played]) -> None:
        """Checks that the steps are the same on all ranks, and that each sample comes once in an epoch that ended."""
        errors = {each.log.error for each in played}
        broken = bool(self.program.bad) and not self.program.skips
        assert errors == {""} or (broken and errors == {"SourceError"}), [each.message for each in played]
        for together in zip(*(each.log.steps for each in played), strict=True):
            first = together[0]
            size = sum(len(piece) for each in together for piece in each.pieces)
            assert size
            done = self._epochs[first.epoch]
            for each in together:
                assert (each.epoch, each.index, each.global_size) == (first.epoch, len(done), size)
            done.append(list(together))
        ends = {tuple(each.log.ends) for each in played}
        assert len(ends) == 1
        for end in ends.pop():
            self._check_whole(played[0].log.steps[end - 1].epoch if end else self._at[0])

    def _check_whole(self, epoch: int) -> None:
        program, steps = self.program, self._epochs[epoch]
        found = Counter(number for step in steps for each in step for piece in each.pieces for number in piece)
        right = Counter(number for number in program.numbers if number not in program.bad or not program.skips)
        world = max((turn.world for turn in program.turns), default=1)
        if program.policy == "OFF" and world > 1:
            right = Counter(dict.fromkeys(right, world))
        assert found <= right, f"epoch {epoch}: twice: {found - right}"
        missing = right - found
        most = (program.batch - 1) * sum(turn.world for turn in program.turns) if program.drop_last else 0
        assert missing.total() <= most, f"epoch {epoch}: missing: {missing}"
        if program.sums:
            for step in steps:
                pieces = [each.pieces for each in step]
                assert [each.sums for each in step] == [sums_of(pieces, rank) for rank in range(len(step))]
        if len({(turn.world, turn.replicas) for turn in program.turns}) == 1:
            self._check_sizes(steps)

    def _check_sizes(self, steps: Sequence[Sequence[Delivered]]) -> None:
        """Checks the sizes of all parts in an epoch of one world; its ranks read files in an order of the library."""
        program, turn = self.program, self.program.turns[0]
        counts = [len(program.numbers)] * turn.world
        if program.policy == "FILE" and program.files.shuffle_files:  # which are dealt to a rank, nothing here tells
            counts = [sum(len(piece) for step in steps for piece in step[rank].pieces) for rank in range(turn.world)]
        elif program.policy == "FILE":
            counts = [sum(map(len, own)) for own in dealt(program, turn.world)]
        batches = [reader_batches(program, turn, list(range(count))) for count in counts]
        right = steps_of(program, turn, batches[0]) if turn.world == 1 else steps_of_own(program, turn, batches)
        found = [[list(map(len, each.pieces)) for each in step] for step in steps]
        assert found == [[list(map(len, row)) for row in step] for step in right]


def _without_samples(what: str, places: Any) -> Any:
    if what == "saves":
        return [_without_samples("states", each) for each in places]
    return tuple(place[:2] for place in places)


def shares_of(weights: Sequence[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


def _difference(state: str, other: str) -> list[str]:
    """The fields in which two states differ."""
    one, two = json.loads(state or "{}"), json.loads(other or "{}")
    return [f"{key}: {one.get(key)!r:.100} and {two.get(key)!r:.100}" for key in one if one[key] != two.get(key)]
