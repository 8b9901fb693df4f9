"""Sources on real ranks: what ``check_source`` asks of them with ``worlds=``.

Each world is one launch, and one of them is a single process, as a program without ranks: each source is read to its
end twice, and goes on from the state that the world before has left. Then digests of samples are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import Any, Final, NamedTuple, final

from torch.utils.data import DataLoader

from torchdistinput.batches import pytree
from torchdistinput.coordination.batch_digests import digest_of_element
from torchdistinput.errors import SourceError
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.topology import AutoShardPolicy
from torchdistinput.sources.datasets.fragment_dataset import FileDataset, FragmentDataset
from torchdistinput.sources.fragments import FragmentSource
from torchdistinput.strategy import Strategy
from torchdistinput.testing.ranks import run_ranks

Make = Callable[..., Any]
"""Makes a dataset of fragments, of arguments for its order; or, without arguments, a loader."""
SamplesOf = Callable[[Any], Sequence[Any]]
"""The samples of a batch."""
Steps = list[list[int]]
"""The samples of each step, as digests."""

_STEPS: Final = 10  # of an epoch of fragments, at least
_LEFT_AFTER: Final = 3  # the step after which a state is saved
_MIXED: Final[Mapping[str, Any]] = {"shuffle_buffer": 8, "cycle_length": 2, "block_length": 3, "seed": 5}


class _Way(NamedTuple):
    """How fragments are read."""

    policy: str
    mixed: bool = False
    workers: int = 0


_WAYS: Final = {
    "DATA": _Way("DATA"),
    "FILE": _Way("FILE"),
    "DATA, mixed, 2 loader workers": _Way("DATA", mixed=True, workers=2),
    "FILE, mixed": _Way("FILE", mixed=True),
}
"""Of the last one the next epoch is read too: it has another order."""


class _Facts(NamedTuple):
    """What is known of fragments before they are read on ranks."""

    names: tuple[str, ...]
    records: int
    bad: int
    """The digest of the record that cannot be read when failures are looked at."""

    @property
    def batch_size(self) -> int:
        """Of batches of which there are enough."""
        return max(1, self.records // _STEPS)


class _Read(NamedTuple):
    """What a rank has read in one way: two epochs, and the rest of the one that the world before has left."""

    policy: str
    epoch: Steps
    again: Steps
    rest: Steps
    state: str
    """After three steps, or after the first one of the rest."""


class _Failed(NamedTuple):
    """What became of a record that cannot be read: the steps in front, the error, and what ``skip`` leaves."""

    steps: int
    kind: str
    file: str | None
    left: Steps


class _Played(NamedTuple):
    """What a rank has found: of each source of fragments what it is, and of each source in each way what came."""

    facts: dict[str, _Facts]
    read: dict[tuple[str, str], _Read]
    failed: dict[tuple[str, str], _Failed]


def check_in_worlds(
    makes: Mapping[str, Make], worlds: Sequence[int], samples: SamplesOf | None, timeout_seconds: float
) -> None:
    """Checks each source at each world size; see ``check_source``."""
    states: dict[tuple[str, str], str] = {}

    def launched(world: int) -> list[_Played]:
        ranks = run_ranks(world, _play, makes, samples, states, timeout_seconds=timeout_seconds)
        for name, facts in ranks[0].facts.items():
            assert facts.records >= _STEPS, f"{name}: found {facts.records} records; at least {_STEPS} are needed"
        states.update({key: each.state for key, each in ranks[0].read.items()})
        return ranks

    played = [launched(world) for world in worlds]
    states.clear()
    (alone,) = next((ranks for ranks in played if len(ranks) == 1), None) or launched(1)
    delivered: dict[tuple[str, str], Steps] = {}
    for ranks in played:
        there = f"on {len(ranks)} rank(s)"
        for key in ranks[0].read:
            read = [rank.read[key] for rank in ranks]
            _check_read(f"{', '.join(key)}, {there}", read, alone.read[key], delivered.setdefault(key, []))
        for name, way in ranks[0].failed:
            failed = [rank.failed[name, way] for rank in ranks]
            where = f"{name}, {way}, a bad record, {there}"
            _check_failed(where, failed, alone.facts[name], alone.read[name, "FILE"])


# ------------------------------------------------------------------------------------------------- in the processes


def _play(makes: Mapping[str, Make], samples: SamplesOf | None, states: Mapping[tuple[str, str], str]) -> _Played:
    """One rank: each source in each way, and with a record that cannot be read. FILE needs a fragment for each rank."""
    played = _Played({}, {}, {})
    ranks = Strategy(["cpu"]).num_input_pipelines
    for name, make in makes.items():
        made = make()
        if not isinstance(made, FragmentDataset):
            assert not isinstance(made, FragmentSource), f"{name}: the function makes a source; give the source itself"
            policy, state = made.explain(world_size=1).policy, states.get((name, "as it is"))
            made.close()
            played.read[name, "as it is"] = _read(make, policy, state, samples)
            continue
        records = [digest_of_element(record) for record in made]
        facts = played.facts[name] = _Facts(made.names, len(records), records[len(records) // 2] if records else 0)
        for key, way in _WAYS.items():
            if way.policy == "FILE" and len(facts.names) < ranks:
                continue
            of_way = partial(_opened, make, way, facts.batch_size)
            again = way.mixed and not way.workers
            played.read[name, key] = _read(of_way, way.policy, states.get((name, key)), None, again=again)
            if not way.mixed:
                played.failed[name, key] = _failed(make, way, facts)
    return played


def _opened(make: Make, way: _Way, size: int, bad: int | None = None, **options: Any) -> Any:
    data = make()
    if way.mixed:
        shuffle = "shuffle_files" if isinstance(data, FileDataset) else "shuffle_fragments"
        data = make(**_MIXED, **{shuffle: True})
    if bad is not None:
        data.map_fn = _Failing(data.map_fn, bad)
    chosen = InputOptions(auto_shard_policy=AutoShardPolicy[way.policy], **options)
    loader: Any = DataLoader(data, size, num_workers=way.workers, collate_fn=list)
    return Strategy(["cpu"]).distribute_dataset(loader, chosen)


@final
class _Failing:
    """A ``map_fn`` that fails at one sample."""

    def __init__(self, inner: Callable[[Any], Any] | None, bad: int) -> None:
        self._inner, self._bad = inner, bad

    def __call__(self, record: Any) -> Any:
        made = record if self._inner is None else self._inner(record)
        if digest_of_element(made) == self._bad:
            raise ValueError("this record cannot be read")
        return made


def _read(
    make: Callable[[], Any], policy: str, state: str | None, samples: SamplesOf | None, *, again: bool = True
) -> _Read:
    with make() as loader, closing(iter(loader)) as iterator:
        epoch = [_digests(batch, samples) for batch in islice(iterator, _LEFT_AFTER)]
        saved = json.dumps(loader.state_dict())
        epoch += [_digests(batch, samples) for batch in iterator]
        next_one = [_digests(batch, samples) for batch in loader] if again else epoch
    rest: Steps = []
    if state is not None:
        with make() as loader:
            loader.load_state_dict(json.loads(state))
            with closing(iter(loader)) as iterator:
                rest = [_digests(batch, samples) for batch in islice(iterator, 1)]
                saved = json.dumps(loader.state_dict())
                rest += [_digests(batch, samples) for batch in iterator]
    return _Read(policy, epoch, next_one, rest, saved)


def _failed(make: Make, way: _Way, facts: _Facts) -> _Failed:
    with _opened(make, way, facts.batch_size, facts.bad, on_error="skip") as loader:
        left = [_digests(batch, None) for batch in loader]
    steps = 0
    try:
        with _opened(make, way, facts.batch_size, facts.bad) as loader:
            for _ in loader:
                steps += 1
    except SourceError as error:
        return _Failed(steps, error.kind or "", error.file, left)
    return _Failed(steps, "", None, left)


def _digests(batch: Any, samples: SamplesOf | None) -> list[int]:
    if samples is None and not isinstance(batch, list):
        return [digest_of_element(pytree.cut(batch, at, at + 1)) for at in range(pytree.batch_size(batch))]
    return [digest_of_element(sample) for sample in (batch if samples is None else samples(batch))]


# ----------------------------------------------------------------------------------------------------- what is asked


def _check_read(where: str, ranks: Sequence[_Read], alone: _Read, done: Steps) -> None:
    """Compares what the ranks have read with what one process reads; ``done``: steps of the worlds before."""
    policy, truth = alone.policy, alone.epoch
    assert len({rank.state for rank in ranks}) == 1, f"{where}: the ranks' states differ after the same step"
    epoch = _together(where, [rank.epoch for rank in ranks])
    _check_epoch(f"{where}, first epoch", epoch, policy, truth)
    _check_epoch(f"{where}, next epoch", _together(where, [rank.again for rank in ranks]), "", truth)
    if done:
        rest = _together(where, [rank.rest for rank in ranks])
        _check_epoch(f"{where}, going on from a state", [*done, *rest], policy, truth)
        done += rest[:1]
    else:
        done += epoch[:_LEFT_AFTER]


def _together(where: str, ranks: Sequence[Steps]) -> Steps:
    steps = [len(each) for each in ranks]
    assert len(set(steps)) == 1, f"{where}: the ranks made {steps} steps"
    return [[*chain.from_iterable(parts)] for parts in zip(*ranks, strict=True)]


def _check_epoch(where: str, found: Steps, policy: str, truth: Steps) -> None:
    """The samples of one process, each as often; under DATA also in its batches."""
    got, wanted = Counter(chain.from_iterable(found)), Counter(chain.from_iterable(truth))
    assert got == wanted, (
        f"{where}: {(wanted - got).total()} samples are missing and {(got - wanted).total()} too many, of "
        f"{wanted.total()} in one process"
    )
    if policy == "DATA":
        other = next((step for step, pair in enumerate(zip(found, truth, strict=True)) if pair[0] != pair[1]), None)
        assert other is None, f"{where}: step {other} has other samples than in one process"


def _check_failed(where: str, ranks: Sequence[_Failed], facts: _Facts, alone: _Read) -> None:
    for rank in ranks:
        assert rank.kind == "ValueError", f"{where}: found no SourceError of the record that cannot be read"
        assert rank.file in facts.names, f"{where}: the error names {rank.file!r}, which is no fragment"
    assert len({rank.steps for rank in ranks}) == 1, f"{where}: the error came after {[r.steps for r in ranks]} steps"
    left = [[each for each in step if each != facts.bad] for step in alone.epoch]
    _check_epoch(f'{where}, on_error="skip"', _together(where, [rank.left for rank in ranks]), "", left)
