"""``analyze``: exact statistics of a distributed dataset, the same to the last bit at any number of ranks.

The dataset is distributed as for training, so each sample is read once, on one rank. Each rank updates the states of
the statistics with its samples. At the end of a pass the states of all ranks are merged in ``log2 W`` rounds of
messages; some statistics then need another pass. An error on a rank is raised on all ranks, at the same step.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

from torchdistinput.batches.containers import open_container
from torchdistinput.batches.per_replica import local_results
from torchdistinput.coordination.fingerprints import agree
from torchdistinput.data_loader import shared_strategy
from torchdistinput.dataset import DistributedDataset, setting_of
from torchdistinput.errors import InputError
from torchdistinput.plan.options import InputOptions
from torchdistinput.sources.datasets.mixture import RecordDataset
from torchdistinput.sources.fragments import FragmentSource
from torchdistinput.sources.map_style.table import columns_in, is_table
from torchdistinput.sources.resolve import is_map_style
from torchdistinput.statistics.base import State, Statistic
from torchdistinput.statistics.encoding import decoded, encoded
from torchdistinput.strategy import Strategy, strategy_of_scope

_LOG = logging.getLogger("torchdistinput")

_AT_ONCE: Final = 2**20  # numbers of small batches that are put together before an update
# Of all ranks together, so that a state fits any number of ranks:
_ROWS: Final = 256  # samples in a step, if the caller does not say
_BYTES: Final = 8 << 20  # bytes in a step, if the data is in memory
_MEETING: Final = 64  # steps after which the ranks ask each other for errors
_LOG_SECONDS: Final = 30.0

_StatisticPlace: TypeAlias = tuple[str | int, int]
"""A statistic of the spec: the name of the leaf, and its place in the list under this name."""

_BARE: Final = "all"  # the name of statistics without one
_COLUMN: Final = "data"  # the name of a bare tensor or array, as a table


def analyze(
    data: Any,
    spec: Any,
    *,
    options: InputOptions | None = None,
    global_batch_size: int | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    strategy: Strategy | None = None,
) -> Any:
    """Computes exact statistics of a dataset, each sample once. Collective: every rank calls this with the same data.

    The result has the same bits for any number of ranks, policy, batch size, order and number of loader workers. The
    data must be the same in each pass: random augmentation is not.

    >>> images = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(2, 3, 2, 2), torch.tensor([0, 1]))
    >>> tdi.analyze(images, {0: tdi.statistics.Moments(axis=1)})[0].mean  # of each channel
    array([ 7.5, 11.5, 15.5])
    >>> split = lambda lines: [line.split() for line in lines]
    >>> tdi.analyze(["a b", "a"], {"words": (split, tdi.statistics.Counts(top=1))}, global_batch_size=2)["words"].values
    ['a']

    Args:
      data: as for ``Strategy.distribute_dataset``; also a tensor, an array, or a ``DistributedDataset``, whose step
        comes with the samples of this rank.
      spec: a dict of statistics by the name of a leaf: the key of a dict, the field of a named tuple or dataclass, or
        the place in a tuple or list. Instead of a statistic a list of several, or ``(function, statistic)`` (or a list
        of them): the function makes what is analysed of a batch, and the name is free. A single statistic, or list of
        them, is of elements that are one leaf.
      options: as for ``distribute_dataset``; batches stay on the CPU. Under policy OFF each rank's data counts.
      global_batch_size: samples of a step over all ranks; it has no effect on the result. Iterables of single samples
        need it. Without it a step has 256 samples of map-style data and files, and 8 MiB of data in memory.
      collate_fn: as for ``distribute_dataset``.
      strategy: the ranks; by default those of the ``scope``, else all ranks, as for ``torchdistinput.DataLoader``.

    Returns:
      The results in the structure of the spec.

    Raises:
      InputError: a leaf is not there, or options that change the samples; and what ``distribute_dataset`` raises.
      TypeError: the spec holds no statistic; a statistic does not take data of this type.
      ValueError: there is no data; or what a statistic refuses, for example NaN under ``nan_policy="raise"``.
        These three are raised on every rank, and name the rank.
    """
    problem: Exception | None = None
    facts: dict[str, Any] = {}
    structure: dict[str | int, int | None] | int | None = None
    owned: AbstractContextManager[Any]
    wanted: dict[_StatisticPlace, tuple[Callable[[Any], Any], Statistic]] = {}
    try:
        structure, wanted = _parsed(spec)
        facts["spec"] = _described(wanted)
        options = _checked(options)
    except Exception as error:  # every rank must hear of it, or the others would wait
        problem, options = error, _checked(None)
    is_bare = isinstance(data, torch.Tensor | np.ndarray)
    if isinstance(data, DistributedDataset):
        loader, owned = data, nullcontext()  # it stays open
    else:
        used = chosen_strategy(strategy)
        data = {_COLUMN: data} if is_bare else data
        size = global_batch_size or _default_batch_size(data)
        owned = loader = used.distribute_dataset(data, options, global_batch_size=size, collate_fn=collate_fn)
    with owned:
        agree(setting_of(loader).ranks, "analyze()", facts, error=problem)
        results = _Analysis(loader, wanted, is_bare=is_bare).results()
    if isinstance(structure, dict):
        return {name: _of(results, name, how) for name, how in structure.items()}
    return _of(results, _BARE, structure)


def _of(results: Mapping[_StatisticPlace, Any], name: str | int, how: int | None) -> Any:
    return results[name, 0] if how is None else [results[name, place] for place in range(how)]


@final
class _Analysis:
    """The passes over a distributed dataset.

    Args:
      loader: the data.
      wanted: the statistics, each with the function that takes its leaf from a batch.
      is_bare: whether the data is one tensor or array.
    """

    def __init__(
        self,
        loader: DistributedDataset,
        wanted: Mapping[_StatisticPlace, tuple[Callable[[Any], Any], Statistic]],
        *,
        is_bare: bool,
    ) -> None:
        self._loader, self._wanted, self._is_bare = loader, wanted, is_bare
        setting = setting_of(loader)
        self._ranks, self._num_local = setting.ranks, len(setting.devices)
        self._problem: Exception | None = None  # of this rank's data, until all ranks have heard of it
        self._begin({path: statistic for path, (_, statistic) in wanted.items()})

    def _begin(self, statistics: Mapping[_StatisticPlace, Statistic]) -> None:
        self._statistics = dict(statistics)
        self._states = {path: each.start() for path, each in statistics.items()}
        self._waiting: dict[_StatisticPlace, list[Any]] = {path: [] for path in statistics}

    def results(self) -> dict[_StatisticPlace, Any]:
        """The result of each statistic, after as many passes as they need. Collective: every rank calls this."""
        results: dict[_StatisticPlace, Any] = {}
        number = 0
        while self._statistics:
            number += 1
            self._pass(number)
            merged = self._merged()
            following = {}
            for path, statistic in self._statistics.items():
                after = statistic.next_pass(merged[path])
                if after is None:
                    results[path] = statistic.result(merged[path])
                else:
                    following[path] = after
            self._begin(following)
        return results

    def _pass(self, number: int) -> None:
        logged = time.monotonic()
        samples = 0
        for done, element in enumerate(self._loader):
            step = self._loader.step
            self._try(partial(self._update, element, step.local_sizes))
            if done % _MEETING == 0 or done & (done - 1) == 0:
                agree(self._ranks, "analyze()", {}, error=self._problem)
            samples += step.global_size or 0
            if time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                _LOG.info("analyze: pass %d, step %d, %d samples", number, step.index + 1, samples)

    def _try(self, call: Callable[[], None]) -> None:
        """Calls ``call`` unless an earlier call failed; keeps its error until all ranks exchange their errors."""
        if self._problem is None:
            try:
                call()
            except Exception as error:  # every rank must hear of it, at the same step
                self._problem = error

    def _update(self, element: Any, sizes: Sequence[int]) -> None:
        element = element[_COLUMN] if self._is_bare else element
        pieces = (element,) if self._num_local == 1 else local_results(element, self._num_local)
        for piece, size in zip(pieces, sizes, strict=True):
            leaves: dict[str | int, Any] = {}
            for path in self._statistics if size else ():
                name = path[0]
                if name not in leaves:  # once for all statistics of a name
                    leaves[name] = _plain(self._wanted[path][0](piece))
                self._put(path, leaves[name])

    def _put(self, path: _StatisticPlace, leaf: Any) -> None:
        """Updates a state, with several small arrays at once."""
        waiting = self._waiting[path]
        if not isinstance(leaf, np.ndarray) or leaf.ndim == 0:
            self._states[path] = self._statistics[path].update(self._states[path], leaf)
            return
        if waiting and (waiting[0].dtype != leaf.dtype or waiting[0].shape[1:] != leaf.shape[1:]):
            self._flush(path)
        waiting.append(leaf)
        if len(waiting) * leaf.size >= _AT_ONCE or leaf.size >= _AT_ONCE // 4:
            self._flush(path)

    def _flush(self, path: _StatisticPlace) -> None:
        waiting = self._waiting[path]
        if waiting:
            batch = waiting[0] if len(waiting) == 1 else np.concatenate(waiting)
            waiting.clear()
            self._states[path] = self._statistics[path].update(self._states[path], batch)

    def _merged(self) -> dict[_StatisticPlace, State]:
        """The states of all ranks as one. Collective.

        Raises:
          Exception: the error of a rank's data, on all ranks.
        """
        paths = list(self._statistics)
        for path in paths:
            self._try(partial(self._flush, path))
        agree(self._ranks, "analyze()", {}, error=self._problem)
        if self._ranks is None:
            return self._states
        counts = self._ranks.rank in self._ranks.firsts  # of ranks that get the same batches, the first one
        mine = [self._states[path] if counts else self._statistics[path].start() for path in paths]

        def merge(first: bytes, second: bytes) -> bytes:
            """Both states as one. An error travels to all ranks as a text, in the place of a state."""
            one, other = decoded(first), decoded(second)
            if isinstance(one, str) or isinstance(other, str):
                return first if isinstance(one, str) else second
            pairs = zip(paths, one, other, strict=True)
            return _encoded(lambda: [self._statistics[path].merge(mine, theirs) for path, mine, theirs in pairs])

        found = decoded(self._ranks.combine(_encoded(lambda: mine), merge))
        if isinstance(found, str):
            kind, _, text = found.partition(": ")
            raise (TypeError if kind == "TypeError" else ValueError)(f"analyze(): {text}")
        return dict(zip(paths, found, strict=True))


def chosen_strategy(strategy: Strategy | None) -> Strategy:
    """The given strategy, else the strategy of the ``scope``, else the strategy of all ranks. Collective."""
    return strategy or strategy_of_scope() or shared_strategy()


def _parsed(
    spec: Any,
) -> tuple[dict[str | int, int | None] | int | None, dict[_StatisticPlace, tuple[Callable[[Any], Any], Statistic]]]:
    """The structure of the results (the length of each list, or ``None``), and each statistic with its leaf."""
    if not isinstance(spec, Mapping):
        how, statistics = _listed(spec)
        return how, {(_BARE, place): (_whole, each) for place, each in enumerate(statistics)}
    if not spec:
        raise ValueError("the spec is empty; it needs a statistic for a leaf, such as {'x': Moments()}.")
    structure, wanted = {}, {}
    for name, entry in spec.items():
        select, what = entry if isinstance(entry, tuple) and len(entry) == 2 else (_leaf(name), entry)
        if not callable(select):
            raise TypeError(f"the spec of {name!r} is {entry!r:.100}; (function, statistic) is needed, or a statistic.")
        structure[name], statistics = _listed(what)
        wanted.update({(name, place): (select, each) for place, each in enumerate(statistics)})
    return structure, wanted


def _listed(what: Any) -> tuple[int | None, list[Statistic]]:
    statistics = list(what) if isinstance(what, list) else [what]
    for each in statistics:
        if not isinstance(each, Statistic):
            hint = (
                " Moments() makes one of the class." if isinstance(each, type) and issubclass(each, Statistic) else ""
            )
            raise TypeError(f"the spec holds {each!r:.100}; a torchdistinput.statistics.Statistic is needed.{hint}")
    if not statistics:
        raise ValueError("the spec holds an empty list; a statistic is needed.")
    return (len(statistics) if isinstance(what, list) else None), statistics


def _described(wanted: Mapping[_StatisticPlace, tuple[Any, Statistic]]) -> list[str]:
    lines = []
    for (name, _), (_, each) in wanted.items():
        plain = type(each).__repr__ is object.__repr__  # which tells an address, and so differs between ranks
        lines.append(f"{name!r}: {type(each).__qualname__ if plain else repr(each)}")
    return lines


def _whole(element: Any) -> Any:
    if isinstance(element, Mapping | tuple):
        raise InputError(
            f"the elements are of type {type(element).__name__}; a statistic without a name is of elements that are "
            "one leaf. Name the leaf: {'x': Moments()}, or {0: Moments()} in a tuple."
        )
    return element


def _leaf(name: str | int) -> Callable[[Any], Any]:
    def select(element: Any) -> Any:
        container = open_container(element)
        if container is not None and name in container.keys:
            return container.children[container.keys.index(name)]
        has = "they are one leaf without a name"
        if container is not None:
            has = f"the leaves are {', '.join(map(repr, container.keys))}"
        raise InputError(
            f"the spec names the leaf {name!r}; the elements are of type {type(element).__name__}, {has}. "
            "(function, statistic) takes anything else from a batch."
        )

    return select


def _encoded(make: Callable[[], list[State]]) -> bytes:
    """The states as bytes; or the text of the error, where they do not fit together or cannot be sent."""
    try:
        return encoded(make())
    except (TypeError, ValueError) as error:
        return encoded(f"{type(error).__name__}: {error}")


def _plain(leaf: Any) -> Any:
    """A tensor as a NumPy array on the host; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_nested or leaf.layout is not torch.strided:
        raise TypeError("the leaf is a nested or sparse tensor; a function of the spec can make a dense one of it.")
    host = leaf.detach().cpu()
    return (host.float() if host.dtype is torch.bfloat16 else host).numpy()


def _checked(options: InputOptions | None) -> InputOptions:
    options = options or InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(f"options is a {type(options).__name__}; InputOptions is needed.")
    if options.partial_batch != "keep" or options.with_index or options.coordination != "on":
        raise InputError(
            "analyze() reads without partial_batch='pad', with_index and coordination='off'; leave them out."
        )
    return dataclasses.replace(options, fetch_to_device=False)


def _default_batch_size(data: Any) -> int | None:
    """The batch size for data of which ``distribute_dataset`` needs one; else ``None``."""
    columns = columns_in(data) if is_table(data) else list(data.tensors) if isinstance(data, TensorDataset) else []
    if columns and all(len(each) for each in columns):
        row: int = sum(each.nbytes // len(each) for each in columns)
        return max(1, min(_AT_ONCE, _BYTES // max(1, row)))
    batched = isinstance(data, TorchDataLoader)
    has_samples = is_map_style(data) or isinstance(data, RecordDataset | FragmentSource)
    return _ROWS if has_samples and not batched else None
