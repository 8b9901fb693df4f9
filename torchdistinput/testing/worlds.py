"""Sources on real ranks: what ``check_source`` asks of them with ``worlds=``.

One launch of one process reads everything as a program without ranks does. Then each world is one launch: each source
is read to its end twice, and goes on from the state that the world before has left. Digests of samples are compared.
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


class _Alone(NamedTuple):
    """What one process has read: the steps of each way, and by which policy."""

    ways: dict[str, tuple[str, Steps]]
    names: tuple[str, ...] = ()
    """Of the fragments; none of a loader."""
    batch_size: int = 0
    records: int = 0
    bad: int = 0
    """The digest of the record that cannot be read when failures are looked at."""


class _Read(NamedTuple):
    """What a rank has read in one way: two epochs, and the rest of the one that the world before has left."""

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


def check_in_worlds(
    makes: Mapping[str, Make], worlds: Sequence[int], samples: SamplesOf | None, timeout_seconds: float
) -> None:
    """Checks each source at each world size; see ``check_source``."""
    (alone,) = run_ranks(1, _read_alone, makes, samples, timeout_seconds=timeout_seconds)
    for name, truth in alone.items():
        enough = truth.records >= _STEPS or not truth.names
        assert enough, f"{name}: found {truth.records} records; at least {_STEPS} are needed"
    states: dict[tuple[str, str], str] = {}
    delivered: dict[tuple[str, str], Steps] = {}
    for world in worlds:
        ranks = run_ranks(world, _play, makes, alone, samples, states, timeout_seconds=timeout_seconds)
        for name, way in ranks[0]:
            where = f"{name}, {way}, on {world} rank(s)"
            of_ranks = [rank[name, way] for rank in ranks]
            if isinstance(of_ranks[0], _Failed):
                _check_failed(where, of_ranks, alone[name])
            else:
                done = delivered.setdefault((name, way), [])
                _check_read(where, of_ranks, *alone[name].ways[way], done)
                states[name, way] = of_ranks[0].state


# ------------------------------------------------------------------------------------------------- in the processes


def _read_alone(makes: Mapping[str, Make], samples: SamplesOf | None) -> dict[str, _Alone]:
    """What each source gives in one process."""
    found = {}
    for name, make in makes.items():
        made = make()
        if isinstance(made, FragmentDataset):
            records = [digest_of_element(record) for record in made]
            size = max(1, len(records) // _STEPS)
            ways = {way: (each.policy, _whole(_opened(make, each, size), None)) for way, each in _WAYS.items()}
            found[name] = _Alone(ways, made.names, size, len(records), records[len(records) // 2])
        else:
            policy = made.explain(world_size=1).policy
            found[name] = _Alone({"as it is": (policy, _whole(made, samples))})
    return found


def _play(
    makes: Mapping[str, Make],
    alone: Mapping[str, _Alone],
    samples: SamplesOf | None,
    states: Mapping[tuple[str, str], str],
) -> dict[tuple[str, str], Any]:
    """One rank: each source in each way, and with a record that cannot be read. FILE needs a fragment for each rank."""
    found: dict[tuple[str, str], Any] = {}
    ranks = Strategy(["cpu"]).num_input_pipelines
    for name, make in makes.items():
        of_one = alone[name]
        if not of_one.names:
            found[name, "as it is"] = _read(make, states.get((name, "as it is")), samples)
            continue
        for key, way in _WAYS.items():
            if way.policy == "FILE" and len(of_one.names) < ranks:
                continue
            of_way = partial(_opened, make, way, of_one.batch_size)
            again = way.mixed and not way.workers
            found[name, key] = _read(of_way, states.get((name, key)), None, again=again)
            if not way.mixed:
                found[name, f"{key}, a bad record"] = _failed(make, way, of_one)
    return found


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


def _read(make: Callable[[], Any], state: str | None, samples: SamplesOf | None, *, again: bool = True) -> _Read:
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
    return _Read(epoch, next_one, rest, saved)


def _failed(make: Make, way: _Way, alone: _Alone) -> _Failed:
    left = _whole(_opened(make, way, alone.batch_size, alone.bad, on_error="skip"), None)
    steps = 0
    try:
        with _opened(make, way, alone.batch_size, alone.bad) as loader:
            for _ in loader:
                steps += 1
    except SourceError as error:
        return _Failed(steps, error.kind or "", error.file, left)
    return _Failed(steps, "", None, left)


def _whole(opened: Any, samples: SamplesOf | None) -> Steps:
    with opened as loader:
        return [_digests(batch, samples) for batch in loader]


def _digests(batch: Any, samples: SamplesOf | None) -> list[int]:
    if samples is None and not isinstance(batch, list):
        return [digest_of_element(pytree.cut(batch, at, at + 1)) for at in range(pytree.batch_size(batch))]
    return [digest_of_element(sample) for sample in (batch if samples is None else samples(batch))]


# ----------------------------------------------------------------------------------------------------- what is asked


def _check_read(where: str, ranks: Sequence[_Read], policy: str, truth: Steps, done: Steps) -> None:
    """Compares what the ranks have read with what one process reads; ``done``: steps of the worlds before."""
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


def _check_failed(where: str, ranks: Sequence[_Failed], alone: _Alone) -> None:
    for rank in ranks:
        assert rank.kind == "ValueError", f"{where}: found no SourceError of the record that cannot be read"
        assert rank.file in alone.names, f"{where}: the error names {rank.file!r}, which is no fragment"
    assert len({rank.steps for rank in ranks}) == 1, f"{where}: the error came after {[r.steps for r in ranks]} steps"
    _, truth = alone.ways["FILE"]
    left = [[each for each in step if each != alone.bad] for step in truth]
    _check_epoch(f'{where}, on_error="skip"', _together(where, [rank.left for rank in ranks]), "", left)
