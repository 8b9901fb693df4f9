"""A program: what is read, by how many ranks, and what happens meanwhile. Plain values, which travel and shrink."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

ActionKind = Literal["read", "break", "seek", "skip", "look", "tell", "reload", "grow", "picture", "infer", "draw"]

Stop = Literal["first", "all", "repeat"]
LOOKS = ("element_spec", "iter", "zip", "has_next")
"""The ways to look: the spec; an iterator that is thrown away, also in a ``zip``; whether there is more."""


@dataclass(frozen=True)
class Action:
    """What all ranks do.

    Args:
      kind: ``read`` steps of the epoch, ``break`` out of the loop, ``seek`` a step of a later epoch (or of this one),
        ``skip`` to a step of the next epoch to be read, ``look`` without taking anything, ``tell`` the number of the
        next epoch, ``reload`` the state, or ``grow``: between two epochs the data gets more samples; or in a loop take
        a ``picture`` from another iterator, and read on; or read one step in inference mode: ``infer``; or ``draw``
        from generators between ``iter`` and the first ``next`` of the next epoch.
      steps: how many are read, 0 for all to the end of the epoch; or the step that is gone to, cut to those there are;
        or which of ``LOOKS``; or whether the state of the turn's begin is loaded, not that of now; or how many samples
        come; or how many numbers are drawn; or whether the user's own object is told.
      epochs: how many epochs ``seek`` goes ahead, and ``tell``; whether another loader is made for ``reload``; or in
        groups of how many steps all are read.
    """

    kind: ActionKind
    steps: int = 0
    epochs: int = 0


OddKind = Literal[
    "slow",
    "fails",
    "leaves",
    "differs",
    "forgets",
    "tells",
    "grows",
    "draws",
    "weighs",
    "opens",
    "part",
    "wrong",
    "keys",
    "breaks",
    "ends",
]


@dataclass(frozen=True)
class Odd:
    """A rank that does not do as the others do.

    Args:
      rank: which, of more than one.
      does: it is ``slow``; ``fails``: the bad samples are bad on this rank only; ``leaves`` its loop alone;
        ``differs``: it is given other data or options; ``forgets`` to load the state; ``tells`` another epoch; or its
        data ``grows`` alone, between two epochs; its sampler ``draws`` another sample, or its cost function ``weighs``
        one otherwise; its batch sampler ``breaks``, or its sampler ``ends``; its data cannot be opened: ``opens``; it
        has a ``part`` of the data; it is given a batch size twice, which is ``wrong``; or the ``keys`` of its samples
        come in another order, which is not.
      at: after how many steps it leaves, draws, weighs, breaks or ends.
      gives: the fields of its program that are others.
    """

    rank: int
    does: OddKind
    at: int = 0
    gives: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Turn:
    """Part of a run, from the state of the turn before.

    Args:
      world: ranks.
      replicas: of each rank.
      prefetch: steps ahead.
      loader_workers: of each rank.
      actions: one after the other.
      lost: steps that are read after the state was taken, as before a crash.
      changes: how each file has changed since the turn before: not at all, it is longer, or of the same size; or
        whether the sampler yields another order.
      grown: how many samples more the data has at its begin.
      odd: a rank that does otherwise.
      beyond: whether the step of the state with which it begins was changed by hand, to one beyond the end.
      save_each: whether a state is taken after each step, and some of them are gone on from, in a world of its own.
      persistent: whether loader workers outlive an epoch.
      sharing: ranks that read the same, as in a mesh; each rank is then so many processes.
      weights: of a mixture, from its begin on.
    """

    world: int = 1
    replicas: int = 1
    prefetch: int | None = 0
    loader_workers: int = 0
    actions: tuple[Action, ...] = (Action("read"),)
    lost: int = 0
    changes: Literal["", "longer", "same size", "order"] = ""
    grown: int = 0
    odd: Odd | None = None
    beyond: bool = False
    save_each: bool = False
    persistent: bool = False
    sharing: int = 1
    weights: tuple[int, ...] = ()

    @property
    def has_groups(self) -> bool:
        """Whether steps are read in groups, so that more than one was read when the first is seen."""
        return any(each.kind == "read" and each.epochs for each in self.actions)

    @property
    def num_replicas(self) -> int:
        return self.world * self.replicas


@dataclass(frozen=True)
class Files:
    """How files are read.

    Args:
      format: of the files; ``fragments`` are those of a ``FragmentSource``.
      cycle_length: see ``FileDataset``, as for all below.
      block_length: see there.
      shuffle_files: see there.
      shuffle_buffer: see there.
      marked: whether the store tells when a file changed.
      by_size: whether they are dealt by their size.
      part_bytes: how large a part of a file may be that is read as a file of its own; 0 for whole files.
    """

    format: Literal["txt", "txt.gz", "fragments"] = "txt"
    cycle_length: int = 1
    block_length: int = 1
    shuffle_files: bool = False
    shuffle_buffer: int = 0
    marked: bool = True
    by_size: bool = False
    part_bytes: int = 0

    @property
    def is_shuffled(self) -> bool:
        return self.shuffle_files or self.shuffle_buffer > 1


@dataclass(frozen=True)
class Mixed:
    """How sources are mixed; see ``Mixture`` for all but the kinds.

    Args:
      kinds: of each source: ``file``, ``list`` or ``fragments``.
      weights: of each source, from positions on.
      stop: when it ends.
      num_samples: how many there are at most.
      tokens: whether tokens are shared, not samples.
      is_shuffled: whether its lists and files are in orders of the library.
    """

    kinds: tuple[str, ...] = ()
    weights: tuple[tuple[int, tuple[int, ...]], ...] = ()
    stop: Stop = "all"
    num_samples: int | None = None
    tokens: bool = False
    is_shuffled: bool = False


@dataclass(frozen=True)
class Program:
    """What every rank runs.

    Args:
      data: ``items`` (map-style), ``together`` (map-style with ``__getitems__``), ``wrapped`` (map-style, with a
        ``Subset`` inside), ``lists`` (map-style; each index is a list, and gives a batch), ``table`` (tensors in
        memory), ``joined`` (one for each size), ``subset`` (of such a table), ``stream`` (iterable of samples),
        ``kept`` (the same, with a state of its own), ``ready`` (iterable of batches), ``function`` (a dataset
        function), ``files`` or ``mixture``.
      sizes: samples of each file, source, ready batch, or worker's batch; of other data only their sum counts.
      policy: how the data is divided.
      batch: the global batch size.
      drop_last: of the loader.
      order: of map-style data: ``in order``, ``shuffled`` (by torch's sampler and a generator), ``permuted`` (by a
        ``ShuffleSampler``), ``repeated`` (a sampler that draws samples more than once), ``weighted`` and ``subset`` (by
        torch's samplers), ``drawn`` (a sampler that draws at each sample), ``listed`` (a sampler of the user's with a
        list), ``batches`` (a batch sampler of uneven batches), ``tokens`` (batches of at most so many tokens),
        ``buckets`` (batches of similar lengths), ``told`` (a sampler that is told its epoch; see ``shows``).
      collate: what a batch is; a key of ``data.COLLATES``.
      files: how files are read.
      mixed: how sources are mixed.
      extras: ``plain``, or with ``index``, ``pad`` or both: ``index and pad``.
      bad: samples that cannot be read.
      skips: whether these are left out; else they are an error.
      max_errors: how many may be left out of an epoch; ``None`` for any number.
      odd_batch: which ready batch is unlike the ones before, and how: by its ``dtype``, a ``missing`` or an ``uneven``
        leaf, or, which is no error, by the order of its ``keys``.
      given: how it is given: in a loader, except for ready batches; or without one, ``bare``; or as what yields the
        same: a ``list``, a ``function``, an iterable that torch does not know (``plain``); ready batches in a
        ``loader``.
      drop_in: whether it is read by the drop-in ``DataLoader``.
      shows: what the user's iterable or dataset, or its sampler, shows of itself: its ``length``; or its ``epoch``, by
        which it is turned, and which it is told; or ``counts``: the same, and it counts on by itself as it is read; or
        is told by its owner, and shows ``nothing``. All iterables of these have a length.
      draws: whether each sample draws from torch's default generator as it is read.
      own_generator: whether the loader has a generator of its own; else it draws from torch's default one.
      balance: whether a batch is divided by the costs of its samples.
      equal_counts: whether the parts then have equally many, too.
      sums: whether sums are asked for.
      fills: whether the user's own function makes parts without a sample.
      seed: of all generators.
      flaw: what is odd about what a rank is given, and from which step on; see ``Odd``.
      turns: one after the other.
    """

    data: str = "items"
    sizes: tuple[int, ...] = (4,)
    policy: str = "DATA"
    batch: int = 2
    drop_last: bool = False
    order: str = "in order"
    collate: str = "default"
    files: Files = Files()
    mixed: Mixed = Mixed()
    extras: str = "plain"
    bad: frozenset[int] = frozenset()
    skips: bool = False
    max_errors: int | None = None
    odd_batch: tuple[int, str] = (0, "")
    given: str = ""
    drop_in: bool = False
    shows: str = ""
    draws: bool = False
    own_generator: bool = True
    balance: bool = False
    equal_counts: bool = False
    sums: bool = False
    fills: bool = False
    seed: int = 0
    flaw: tuple[str, int] = ("", 0)
    turns: tuple[Turn, ...] = (Turn(),)

    def after(self, turn: Turn) -> Program:
        """What follows a state of a turn: the rest of the epoch and more, in another world where that is free."""
        actions = (Action("read"), Action("read", 1))
        there = replace(turn, actions=actions, lost=0, changes="", odd=None, save_each=False, weights=())
        if self.policy == "DATA":
            there = replace(there, world=turn.world % 3 + 1, replicas=turn.replicas % 2 + 1)
        return replace(self, turns=(there,))

    def turned_by(self, epoch: int) -> int:
        """By how many samples an epoch is turned, whose number is told; an owner has numbers of his own."""
        return {"epoch": epoch, "counts": epoch, "nothing": 3 * epoch + 1}.get(self.shows, 0)

    @property
    def shows_epoch(self) -> bool:
        """Whether the user can tell an object of his own its epoch, which counts."""
        shows = self.shows in {"epoch", "counts"} and self.given != "function"  # whose data is a new object
        return shows or self.order == "permuted" or self.has_files

    @property
    def is_map_style(self) -> bool:
        return self.data in {"items", "together", "wrapped"} or self.is_in_memory

    @property
    def is_in_memory(self) -> bool:
        return self.data in {"table", "joined", "subset"}

    @property
    def has_files(self) -> bool:
        """Whether its samples are in files, or in sources."""
        return self.data in {"files", "mixture"}

    @property
    def tells_costs(self) -> bool:
        """Whether the costs of all samples of a step are told."""
        return self.balance and not self.bad and self.flaw[0] != "weighs"

    @property
    def draws_numbers(self) -> bool:
        """Whether each sample draws numbers of its own: asks for its seed, or is seeded."""
        return self.collate in {"seeded", "augmented"}

    @property
    def has_batches(self) -> bool:
        """Whether a batch sampler makes the batches."""
        return self.order in {"batches", "tokens", "buckets"}

    @property
    def is_ready(self) -> bool:
        """Whether the source makes the batches."""
        return self.data in {"ready", "function"}

    @property
    def numbers(self) -> list[int]:
        """All samples. Those of two files, or of the batches of two workers, are 1000 apart."""
        if self.has_files:
            return [1000 * file + record for file, size in enumerate(self.sizes) for record in range(size)]
        return list(range(sum(self.sizes)))

    def is_shared(self, turn: Turn) -> bool:
        """Whether all ranks take their parts of the same batches."""
        return self.data != "function" and (self.policy == "DATA" or turn.world == 1)

    def depth(self, turn: Turn) -> int | None:
        """How many steps ahead samples are read, where their reads are seen; nothing is read ahead in one process."""
        is_seen = self.is_map_style and not self.is_in_memory and not turn.loader_workers and self.is_shared(turn)
        if turn.odd is not None and turn.odd.does in {"draws", "breaks", "ends"}:  # it reads others, or fewer
            return None
        if not is_seen or self.bad or turn.has_groups or any(each.kind in {"look", "picture"} for each in turn.actions):
            return None
        return 0 if turn.world * turn.sharing == 1 else self.prefetch(turn)

    def prefetch(self, turn: Turn) -> int | None:
        """How many steps ahead are asked for; the drop-in reads none ahead by itself where user code reads them."""
        return 0 if turn.prefetch is None and self.drop_in and not self.is_in_memory else turn.prefetch

    def tells_failures(self, turn: Turn) -> bool:
        """Whether the state after a failure is the same on every rank."""
        is_told = self.is_map_style and self.policy == "DATA" and turn.odd is None
        return is_told and not (self.drop_in or self.skips)

    def is_told(self, turn: Turn) -> bool:
        """Whether the samples of a step can be told without reading."""
        if self.data == "files":
            return self.files.format == "fragments" and not self.balance
        if self.data == "mixture":
            return not (self.mixed.tokens or self.balance or "file" in self.mixed.kinds)
        of_the_user = self.order in {"listed", "drawn", "repeated", "batches", "told"}
        is_known = self.is_map_style and not of_the_user and (self.policy != "HINT" or turn.world == 1)
        return self.data == "lists" or is_known

    @property
    def is_exact(self) -> bool:
        """Whether the laws tell each sample of each step.

        Not where each rank reads files in an order that a keyed permutation gives, or in a world that changes: there
        each sample must come once.
        """
        if self.data != "files" or self.policy == "DATA":
            return True
        return not self.files.is_shuffled and len({(turn.world, turn.replicas) for turn in self.turns}) == 1
