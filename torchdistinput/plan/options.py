"""The options of a distributed input (``InputOptions``), and the facts about a delivered step (``Step``).

The prefetch depth, how many steps are read ahead, is a function of the number of the step alone. It begins small and
grows by one with each step, up to a bound on which all ranks agree once (law A8). So user code is called ahead in the
same way in every run, and by the same amount on every rank.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

from torchdistinput.plan.balancing import StepCosts
from torchdistinput.plan.topology import AutoShardPolicy

_FIRST_AHEAD: Final = 2
_MAX_AHEAD: Final = 32
_LAZY_FROM: Final = 4  # the least depth at which votes are delayed; with a smaller one they would come too late
_MAX_AT_ONCE: Final = 8
BYTES_AHEAD: Final = 64 << 20
"""Bytes of steps ahead, on each rank, within which the read-ahead grows."""


@enum.unique
class InputReplicationMode(enum.Enum):
    """How often a dataset function is called, as ``tf.distribute.InputReplicationMode``.

    Attributes:
      PER_WORKER: once per worker; its dataset feeds all local replicas in turn.
      PER_REPLICA: once per replica; each replica has a dataset of its own.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
@dataclass(frozen=True, eq=False)
class Balance:
    """How samples are divided by cost: a value of ``InputOptions.balance``, which has more of it.

    >>> two, numbers = tdi.Strategy(["cpu", "cpu"]), range(5, 8)
    >>> even = tdi.InputOptions(balance=tdi.Balance([1, 1, 5], equal_counts=True))
    >>> list(two.distribute_dataset(numbers, even, global_batch_size=3))
    [PerReplica(0: tensor([5, 6]), 1: tensor([7]))]

    Args:
      costs: an array with a cost for each sample, or a function.
      equal_counts: whether the parts of a step also differ by one sample at most, for batch norm and padding.

    Raises:
      TypeError: the costs are neither an array nor a function, or ``equal_counts`` is no bool.
    """

    costs: Any = field(repr=False)
    equal_counts: bool = False

    def __post_init__(self) -> None:
        if not callable(self.costs) and not isinstance(self.costs, Sized):
            raise TypeError(
                f"balance is {self.costs!r:.100}; an array with a cost for each sample, or a function, is needed."
            )
        _check_type("equal_counts", self.equal_counts, *_BOOL)


@final
@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Options of a distributed input, as ``tf.distribute.InputOptions``.

    >>> two = tdi.Strategy(["cpu", "cpu"])
    >>> def read(**options):
    ...     return list(two.distribute_dataset(range(5, 8), tdi.InputOptions(**options), global_batch_size=3))
    >>> read()
    [PerReplica(0: tensor([5, 6]), 1: tensor([7]))]
    >>> read(with_index=True)
    [(PerReplica(0: tensor([0, 1]), 1: tensor([2])), PerReplica(0: tensor([5, 6]), 1: tensor([7])))]
    >>> read(partial_batch="pad")
    [(PerReplica(0: tensor([5, 6]), 1: tensor([7, 0])), PerReplica(0: tensor([True, True]), 1: tensor([ True, False])))]
    >>> read(balance=[1, 1, 5])  # the costs of the three samples
    [PerReplica(0: tensor([7]), 1: tensor([5, 6]))]

    Args:
      auto_shard_policy: how the input is divided among workers. ``None``: AUTO; for the drop-in ``DataLoader`` DATA,
        also for files, so that its batches are those of one process.
      prefetch: steps made ready ahead of the one in use; 0 for none. ``None``: 2, and one more with each step, up to
        32, and to what fits into 64 MiB on every rank by the size of the first step. One process alone
        keeps to 2. The drop-in ``DataLoader`` begins with 0, as torch's, where the batch is made by user code in this
        process (``num_workers=0``), or by torch's own loader workers in a single process.
      fetch_to_device: whether elements are copied to the replicas' devices; else they stay where the source made them.
        An object that is no tensor is copied if it has a method ``to(device)``; the tensors in an object without this
        method stay on the host, and so do the NumPy arrays that a collate function returned. Those of ready batches
        become tensors.
      coordination: ``"on"``: all ranks make the same steps. ``"off"``: each worker has its own end of data and sees
        only its own non-empty steps (TensorFlow's asynchronous workers).
      timeout_seconds: how long a rank waits for another one; ``None`` takes the strategy's.
      replication_mode: for ``distribute_datasets_from_function`` only.
      with_index: yields ``(index, element)``. The index is int64, ``(b,)``, one number of 0 or more for each sample,
        whichever replica gets the sample, as ``Strategy.gather_ordered`` takes it:

        - map-style datasets: the index that the sampler drew (or the position in the epoch, if the index is no int);
        - ``FileDataset``: ``file * 2**40 + record``, by the places in the list of files (or of their parts, with
          ``fragment_bytes``) and in the file, whatever the shuffling;
        - other iterables: the position in the epoch's order. Where workers have data of their own (OFF, HINT, a
          dataset function), ``worker * 2**48`` plus the position in the worker's order; for map-style datasets under
          HINT, plus the index in the shard.

        Where an item or record of these is a whole batch, its samples have no numbers: a ``BatchingError``.
      partial_batch: ``"keep"``: pieces have as many rows as they have samples. ``"pad"``: every piece is filled up to
        ``ceil(G / N)`` rows with zeros (lists with empty strings, or ``None``), and ``(element, mask)`` or
        ``(index, element, mask)`` is yielded; the index of a padded row is -1. Padded rows are samples in no count;
        ``average_loss(..., weights=mask)`` leaves them out. Needs a known global batch size.
      on_error: ``"raise"``: a sample that cannot be read is an error on every rank. ``"skip"``: it is left out of its
        step, counted and logged; nothing takes its place. For map-style data and files.
      max_errors: samples that may be left out in an epoch, over all ranks; one more is an error on every rank.
      file_assignment: how policy FILE divides files or fragments. ``"in_turn"``: worker ``i`` reads files
        ``i, i + W, ...``, as TensorFlow. ``"by_size"``: the largest file first to the worker with the fewest bytes so
        far, so that all workers end at about the same time; the order of a worker's files stays that of the epoch. The
        sizes come from the listing of folders, or are asked of the filesystem; no file is opened for them. See
        ``FileDataset(fragment_bytes=)`` for files that are too large for one worker.
      own_state: whether a ``state_dict`` of an iterable, or of its iterator, is used to resume it. ``"auto"``: where it
        takes no arguments and can be saved (plain values, tensors and arrays, 1 MiB in all), unless it is known not to
        restore exactly (a Hugging Face shuffle buffer); else the data is read again, which a warning says. After a
        resume the next element must be the one that came then, or a ``StateMismatch`` is raised. ``"use"``: always, and
        unchecked; what cannot be saved is an error. ``"ignore"``: never. That of map-style data is never used, which a
        warning says; ``"use"`` is an error there. It is asked for in batch 1, and then 1, 2, 4, 8 and always 16
        batches later: a resume reads again what came since.
      log_every: after how many steps each, and at the end of an epoch, the first rank logs whether the loop waits for
        its input, and on which rank; that rank logs the same, with what it did. 0 for never. The level is INFO:
        ``logging.basicConfig(level=logging.INFO)`` shows the lines.
      trace: a folder in which each rank writes when each stage of its steps began and ended, one file a rank. ``None``:
        the one that the environment variable ``TORCHDISTINPUT_TRACE`` names, if it is set. ``python -m torchdistinput
        trace`` and ``report`` read it. It may differ from rank to rank. One that cannot be written is a warning.
      seed_samples: seeds torch's (CPU), NumPy's and ``random``'s global generators by ``sample_seed()`` before each
        ``__getitem__`` or ``map_fn``, and puts them back after it. So augmentation that draws from them is the same at
        any world size and number of loader workers, and after a resume. For map-style data, which is then read sample
        by sample also where it has ``__getitems__``, and files. It takes some 9 us a sample, 7 in the seed functions.
      count_fn: ``count_fn(batch)`` returns the number of samples in a batch that the source yields ready, an int of 0
        or more. ``None``: the samples are counted by the batch's tensors and lists. With ``len`` itself the entries
        of a list or tuple are the samples, and cut. Samples that this library batches are counted as they are drawn.
      split_fn: ``split_fn(batch, sizes)`` cuts a ready batch: it returns a list or tuple with one piece for each size.
        The sizes are 1 or more, in the order of the replicas, and sum to the number of samples. Each rank calls it
        where the batch has to be cut, and once for pieces of one and of two samples. ``None``: the tensors and lists of
        the batch are cut.
      empty_fn: ``empty_fn()`` makes the batch of a replica without a sample, on the CPU, a new one at each call.
        ``None``: a ready batch is cut to 0 rows; where a rank has none at that step (FILE, OFF, dataset functions), it
        gets tensors and lists like those of its others. For samples that are batched here the collate function is asked
        once, with copies of one sample and of the same sample twice: tensors and arrays of which one dim follows the
        number get 0 there, and lists are empty. Where anything else is in the batch (numbers, strings, packed tensors,
        objects), which would be that of another step, and a replica may be left without a sample, the first step is an
        error on all ranks.
      balance: divides the samples of each global batch among the replicas by cost instead of by place, so that no
        replica waits long for a slower one: the largest first, to the replica with the least cost so far. The batches,
        their means, the end and the state stay the same; the parts differ in size, as ``average_loss`` takes them. The
        costs are 0 or more, in any unit: for map-style data an array with one for each index (``lengths ** 2``), or a
        function of the index; for files and iterables whose samples are batched here a function of the record, before
        ``map_fn``; for a mixture a function of ``(number of the source, record)``, or index in place of the record.
        All ranks must find the same costs. It needs policy DATA where there are several ranks: with batches of each
        rank's own (FILE, OFF) it is a ``ShardingError``. ``Balance(costs, equal_counts=True)``: the parts of a step
        also differ by one sample at most, which ``partial_batch="pad"`` needs.
      sums: functions by name, such as ``{"tokens": lambda batch: int(batch["mask"].sum())}``. ``function(batch)``
        returns an int for one replica's part of a step. The ints of all replicas are added in the vote of the
        step, without a collective: ``step.sums["tokens"]``. Anything but an int (a float, a tensor on a device), or a
        sum of a rank's part of more than 48 bits, is an error on all ranks; for floats there is ``strategy.reduce``.
        The batch is what the collate function made, on the CPU, without the index and without padded rows. A part
        without a sample adds 0. A 0-dim CPU tensor or a NumPy scalar is taken as its number. A function is called where
        the batch is read, ahead of the training loop, maybe on a background thread.

    Raises:
      TypeError: a value of another type.
      ValueError: ``prefetch``, ``max_errors`` or ``log_every`` is negative, ``timeout_seconds`` is not positive, or
        ``coordination``, ``partial_batch``, ``on_error``, ``own_state`` or ``file_assignment`` is another word;
        ``partial_batch="pad"`` with ``balance`` and without ``equal_counts``; ``sums`` with ``coordination="off"``.
    """

    auto_shard_policy: AutoShardPolicy | None = None
    prefetch: int | None = None
    fetch_to_device: bool = True
    coordination: Literal["on", "off"] = "on"
    timeout_seconds: float | None = None
    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    with_index: bool = False
    partial_batch: Literal["keep", "pad"] = "keep"
    on_error: Literal["raise", "skip"] = "raise"
    max_errors: int = 100
    log_every: int = 0
    trace: str | os.PathLike[str] | None = None
    seed_samples: bool = False
    count_fn: Callable[[Any], int] | None = None
    split_fn: Callable[[Any, list[int]], Sequence[Any]] | None = None
    empty_fn: Callable[[], Any] | None = None
    own_state: Literal["auto", "use", "ignore"] = "auto"
    file_assignment: Literal["in_turn", "by_size"] = "in_turn"
    balance: Any = field(default=None, compare=False, repr=False)
    sums: Mapping[str, Callable[[Any], int]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, needed in _NEEDED.items():
            value = getattr(self, name)
            if isinstance(needed, int):
                _check_count(name, 0 if name == "prefetch" and value is None else value, needed)
            elif isinstance(needed[0], str):
                _check_word(name, value, needed)
            else:
                _check_type(name, value, *needed)
        if self.timeout_seconds is not None:
            check_seconds("timeout_seconds", self.timeout_seconds)
        self._check_balance()
        self._check_sums()

    def _check_sums(self) -> None:
        for name, function in self.sums.items():
            _check_type("a name in sums", name, str, "a text is needed")
            _check_type(f"sums[{name!r}]", function, Callable, "a function is needed, which returns an int")
        if self.coordination == "off" and self.sums:
            raise ValueError("sums need coordination='on'; with 'off' no rank knows the steps of others.")

    def _check_balance(self) -> None:
        if self.balance is not None and not isinstance(self.balance, Balance):
            Balance(self.balance)
        if self.balance is not None and self.partial_batch == "pad" and not self.equal_counts:
            raise ValueError(
                "partial_batch='pad' pads every part to ceil(G / N) rows, and parts that are balanced by cost alone "
                "may have more samples. Give balance=Balance(costs, equal_counts=True)."
            )

    @property
    def costs(self) -> Any:
        """The costs of the samples: an array or a function; ``None`` where a batch is divided by place."""
        return self.balance.costs if isinstance(self.balance, Balance) else self.balance

    @property
    def equal_counts(self) -> bool:
        """Whether the parts of a step differ by one sample at most where it is divided by cost."""
        return isinstance(self.balance, Balance) and self.balance.equal_counts

    @property
    def looks_inside(self) -> bool:
        """Whether something is asked of each batch that only its tensors and lists tell, or its samples one by one."""
        return self.with_index or self.partial_batch == "pad" or self.count_fn is not None

    @property
    def skips(self) -> bool:
        """Whether samples that cannot be read are left out."""
        return self.on_error == "skip"

    @property
    def measures(self) -> bool:
        """Whether the parts of a step are timed one by one."""
        return self.trace is not None or self.log_every > 0

    @property
    def cuts_empty(self) -> bool:
        """Whether the empty pieces of a ready batch are cut out of it, as the others are."""
        return not self.skips and self.split_fn is None and self.empty_fn is None

    def needs_structure(self, replicas_per_worker: int, *, may_lack: bool) -> bool:
        """Whether it must be known what in a batch has an entry for each sample: to pad, regroup, or make it empty."""
        return self.partial_batch == "pad" or replicas_per_worker > 1 or (may_lack and self.empty_fn is None)

    @property
    def sum_names(self) -> list[str]:
        """The names of the sums, in the order in which they are exchanged."""
        return sorted(self.sums)

    @property
    def least_ahead(self) -> int:
        """Steps that are made ready ahead at first."""
        return _FIRST_AHEAD if self.prefetch is None else self.prefetch

    @property
    def most_ahead(self) -> int:
        """Steps that are made ready ahead at most."""
        return max(_MAX_AHEAD if self.prefetch is None else 0, self.least_ahead)


_BOOL: Final = bool, "True or False is needed"
_FUNCTION: Final = Callable | None, "a function is needed, or None"
_NEEDED: Final[dict[str, Any]] = {
    "auto_shard_policy": (AutoShardPolicy | None, "a member of AutoShardPolicy is needed, or None"),
    "replication_mode": (InputReplicationMode, "an InputReplicationMode is needed"),
    "prefetch": 0,
    "max_errors": 0,
    "log_every": 0,
    "trace": (str | os.PathLike | None, "the name of a folder is needed, or None"),
    "coordination": ("on", "off"),
    "partial_batch": ("keep", "pad"),
    "on_error": ("raise", "skip"),
    "own_state": ("auto", "use", "ignore"),
    "file_assignment": ("in_turn", "by_size"),
    "count_fn": _FUNCTION,
    "split_fn": _FUNCTION,
    "empty_fn": _FUNCTION,
    "with_index": _BOOL,
    "seed_samples": _BOOL,
    "fetch_to_device": _BOOL,
    "sums": (Mapping, "a dict of functions by name is needed"),
}
"""What each option needs: the least number of steps; one of these words; or a type, in words."""


def check_options(options: object) -> None:
    """Refuses what is no ``InputOptions``, and not ``None``.

    Raises:
      TypeError: it is something else.
    """
    _check_type("options", options, InputOptions | None, "an InputOptions is needed")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; an int is needed, a number of steps.")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be {least} or more.")


def check_seconds(name: str, value: object) -> None:
    """Refuses a value that is no positive number of seconds.

    Raises:
      TypeError: it is no int or float.
      ValueError: it is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r:.100}; an int or float is needed, a number of seconds.")
    if not value > 0:
        raise ValueError(f"{name} is {value}; it must be positive.")


def _check_type(name: str, value: object, kind: Any, needed: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.100}; {needed}.")


def _check_word(name: str, value: object, words: Sequence[str]) -> None:
    if value not in words:
        raise ValueError(f"{name} is {value!r}; it must be {' or '.join(map(repr, words))}.")


def steps_that_fit(largest: int, max_bytes: int) -> int | None:
    """How many steps of the largest size fit beside the one in use; ``None`` where the size of no step is known.

    >>> steps_that_fit(10, 100), steps_that_fit(1000, 100), steps_that_fit(0, 100)
    (9, 0, None)
    """
    return max(0, max_bytes // largest - 1) if largest else None


def agreed_bound(fits: int | None, least: int, most: int) -> int:
    """Law A8: what fits on every rank, within ``least`` and ``most``; ``least`` where no rank knows the size of a step.

    >>> agreed_bound(9, 2, 32), agreed_bound(50, 2, 32), agreed_bound(None, 2, 32)
    (9, 32, 2)
    """
    return least if fits is None else max(least, min(most, fits))


def is_deep(steps: int) -> bool:
    """Whether the depth is large enough to delay votes, so that one vote covers several steps."""
    return steps >= _LAZY_FROM


def drawn_at_once(steps: int) -> int:
    """How many steps are drawn in a row at a prefetch depth: a quarter of the depth, at least 1 and at most 8.

    A training step evicts the loader's code from the processor's caches. The first draw after it costs ten times as
    much as the second. The number is the same on all ranks at each step, as the depth is.

    >>> [drawn_at_once(steps) for steps in (0, 2, 8, 32, 1000)]
    [1, 1, 2, 8, 8]
    """
    return min(max(1, steps // 4), _MAX_AT_ONCE)


def ready_at_a_vote(steps: int, rounds: int = 0) -> int:
    """A vote is due when at most this many steps are ready.

    With a deep read-ahead about a third of it, right after a row was drawn, so that a vote covers as many steps as
    possible; else at once.

    Args:
      steps: the prefetch depth.
      rounds: how many times a vote is polled, once at each step, until it is complete.

    >>> [ready_at_a_vote(steps) for steps in (2, 4, 8, 16, 32)]
    [3, 1, 3, 5, 9]
    """
    if not is_deep(steps):
        return steps + 1
    row = drawn_at_once(steps)
    return max(min(range(steps + 1 - row, 0, -row), key=lambda ready: (abs(3 * ready - steps), ready)), rounds)


@final
@dataclass(frozen=True)
class Step:
    """The step of the batch just delivered.

    Args:
      epoch: the number of the epoch.
      index: the step in it, from 0.
      global_size: samples over all replicas; ``None`` with ``coordination="off"``.
      local_sizes: samples of each local replica.
      num_replicas: replicas in sync.
      num_workers: processes that read.
      costs: with ``InputOptions.balance``: how the batch was divided.
      sums: by the names of ``InputOptions.sums``, over all replicas.
      local_sums: the same over the local replicas.
    """

    epoch: int
    index: int
    global_size: int | None
    local_sizes: tuple[int, ...]
    num_replicas: int
    num_workers: int
    costs: StepCosts | None = field(default=None, compare=False, repr=False)
    sums: Mapping[str, int] = field(default_factory=dict, hash=False)
    local_sums: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that read parts of their own: torch's word for ``num_workers``. Local.

        With a mesh, ranks that share a data-parallel coordinate count as one.
        """
        return self.num_workers

    def micro_batches(self, max_cost: float, local_replica: int = 0) -> list[slice]:
        """Cuts this replica's part into runs of samples of at most ``max_cost``, the same number on every rank. Local.

        The last ones may be empty. For gradient accumulation, give each slice to ``average_loss`` with its losses.

        >>> options = tdi.InputOptions(balance=[4, 2, 2, 2])
        >>> loader = tdi.Strategy().distribute_dataset(range(4), options, global_batch_size=4)
        >>> [loader.step.micro_batches(max_cost=4) for _ in loader]
        [[slice(0, 1, None), slice(1, 3, None), slice(3, 4, None)]]

        Args:
          max_cost: in the unit of ``InputOptions.balance``.
          local_replica: which of this process's replicas.

        Returns:
          Slices of dim 0, in order.

        Raises:
          ValueError: a sample of the global batch costs more; on every rank alike.
          RuntimeError: the costs of the global batch are not known, without ``balance``.
        """
        if self.costs is None:
            raise RuntimeError(
                "micro_batches needs the costs of all samples of the global batch. Give InputOptions(balance=...)."
            )
        return self.costs.micro_batches(max_cost, local_replica)
