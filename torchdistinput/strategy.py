"""``Strategy``: the replicas that train in sync; distributes datasets to them, and runs functions and collectives."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import copy
import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from torchdistinput.batches.per_replica import PerReplica, ReduceOp, local_results
from torchdistinput.build_pipeline import Setting
from torchdistinput.coordination import launch as launcher
from torchdistinput.coordination import reduce as reductions
from torchdistinput.coordination.fingerprints import agree
from torchdistinput.coordination.process_group import meet, without_repeats
from torchdistinput.dataset import LENGTH_HINT, DistributedDataset, check_sizes, facts_of
from torchdistinput.devices.accelerators import Accelerators, resolve_devices, set_current, streams_here
from torchdistinput.errors import ShardingError
from torchdistinput.loader_iterator import refuse_divided
from torchdistinput.plan.batching import told_batch
from torchdistinput.plan.options import InputOptions, InputReplicationMode, check_options, check_seconds
from torchdistinput.plan.topology import AutoShardPolicy, InputContext, Topology, ValueContext
from torchdistinput.replicas.run import require_no_replica, run_replicas
from torchdistinput.sources.contract import Source
from torchdistinput.sources.iterable.divided_sources import PART_HINT, SAMPLES
from torchdistinput.sources.resolve import resolve_source
from torchdistinput.sources.rng import shared_state_of
from torchdistinput.sources.torch_loader.settings import not_pinning
from torchdistinput.tracing.trace_file import TracedRun, TraceFile, run_of, with_folder_of_environment

_LOG = logging.getLogger("torchdistinput")
_MAX_SECONDS = 10**9  # the longest timeout that torch's groups and stores take, with room to spare

T = TypeVar("T")


@final
@dataclass(frozen=True)
class ClusterResolver:
    """The rank and node of this process in its cluster, as ``tf.distribute.cluster_resolver``.

    Args:
      rank: the number of this process among all.
      world_size: how many processes there are.
      local_rank: the number of this process on its node.
      node: the number of the node.
      address: the address at which the processes met.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    address: str | None


@final
class Strategy:
    """The replicas that train in sync: one process for each worker, one replica for each of its devices.

    Collective: every rank makes its strategies in the same order. Inside an initialised process group each rank is a
    worker. Under torchrun without a group this sets the device, initialises the default group, and ends it at exit. In
    a single process, that process is the only worker.

    Args:
      devices: the devices of this process, one replica each; by default the accelerator of its local rank, or the CPU.
      process_group: the ranks that train together; by default all.
      mesh: a ``DeviceMesh`` instead of a group: ranks that differ only in other dims than ``data_dims`` are one worker
        and get identical batches.
      data_dims: the names of the mesh's data-parallel dims; by default those that are named ``dp``, ``ddp``,
        ``fsdp``, ``hsdp``, ``dp_replicate``, ``dp_shard``, ``data`` or ``batch``.
      timeout_seconds: how long a rank waits for another one.

    Raises:
      ValueError: a device does not exist, the process is not in the group, or the arguments contradict each other.
      TypeError: ``devices`` is a single device, not a sequence; or another argument is of another type.
      ShardingError: the names of the mesh's dims do not tell which of them are data-parallel, and there is no
        ``data_dims``. Every rank of the mesh raises it.
      CoordinationTimeout: a rank did not come in time; it is named. So do all collective methods.
      RankLost: a rank, or the store, went away meanwhile.
      InputError: this rank cannot listen for the others; the environment has only a part of the variables that
        torchrun sets for a rank; or this process is a child of a rank, and imports a main script that has no
        ``__main__`` guard.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        *,
        process_group: Any = None,
        mesh: Any = None,
        data_dims: Sequence[str] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        if launcher.is_launched() or launcher.default_group_exists():
            launcher.refuse_while_starting()
        problem = _misuse(timeout_seconds, process_group, mesh, data_dims)
        if problem is not None:
            # The other ranks must hear of the problem: go on with valid arguments until all ranks meet.
            timeout_seconds = 600.0
            process_group = process_group if launcher.is_group(process_group) else None
            mesh = mesh if launcher.is_mesh(mesh) else None
        found, no_devices = _try_devices(devices, launcher.local_rank())
        problem = problem or no_devices
        if launcher.is_launched() and not launcher.default_group_exists():
            launcher.join_default_group(Accelerators.detect().kind, timeout_seconds)
            atexit.register(launcher.leave_default_group)
        if not launcher.default_group_exists():
            if problem is not None:
                raise problem
            if process_group is not None or mesh is not None:
                raise ValueError("a process group or mesh was given, but no process group is initialised.")
            launcher.refuse_half()
            self._settle(_alone_on(found, timeout_seconds))
            return
        try:
            members = launcher.find_members(process_group, mesh, data_dims)
        except ShardingError as error:
            problem = problem or error
            members = launcher.find_members(None, mesh, [])  # the ranks that must hear of the problem
        ranks = None if len(members.ranks) == 1 else meet(process_group, members, timeout_seconds)
        facts = {"replicas in a process": len(found), "timeout_seconds": timeout_seconds}
        kind = found[0].type if found and launcher.carries(process_group, members, found[0].type) else None
        kinds = agree(ranks, "Strategy()", facts, error=problem, extra=kind)
        if ranks is not None and len(set(kinds)) == 1:
            ranks.direct = kind
        rank = members.ranks[members.rank]
        world_size = len(launcher.global_ranks(None))
        resolver = ClusterResolver(rank, world_size, launcher.local_rank(), launcher.node(), launcher.address())
        topology = Topology(
            num_workers=members.num_workers, replicas_per_worker=len(found), worker=members.workers[members.rank]
        )
        setting = Setting(
            topology=topology,
            devices=found,
            ranks=ranks,
            timeout_seconds=timeout_seconds,
            workers=members.workers,
            shared_rng=shared_state_of(members.ranks),
        )
        self._settle(setting, resolver)

    def _settle(self, setting: Setting, resolver: ClusterResolver | None = None) -> None:
        self._setting = setting
        self._topology = setting.topology
        self._ranks = setting.ranks
        self._workers = None if setting.topology.num_workers == 1 else setting.ranks
        self._resolver = resolver
        self._datasets = 0
        self._trace_files: dict[str | os.PathLike[str], TraceFile] = {}

    def __copy__(self) -> Strategy:
        """The strategy itself, as its connections cannot be copied. So objects that hold a strategy can be copied."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """See ``__copy__``."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Raises ``TypeError`` where there are other ranks, as Python does for objects that cannot be pickled."""
        if self._ranks is not None:
            raise TypeError(
                "cannot pickle a Strategy of several ranks, nor an object that holds one: its connections belong to "
                "this process. Make a Strategy() in the other process, and its loaders again; state_dict() of a loader "
                "carries its place in the data over."
            )
        return self.__dict__

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over all workers. Local."""
        return self._topology.num_replicas

    @property
    def num_input_pipelines(self) -> int:
        """The number of workers (input pipelines). Local."""
        return self._topology.num_workers

    @property
    def input_pipeline_id(self) -> int:
        """The index of this process's worker. Local."""
        return self._topology.worker

    @property
    def rank(self) -> int:
        """The rank of this process in the default group, as in messages; 0 in one process. Local.

        ``input_pipeline_id`` is another number with a mesh whose ranks share data, and in a part of the ranks.
        """
        return 0 if self._resolver is None else self._resolver.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the default group; 1 in one process. Local."""
        return 1 if self._resolver is None else self._resolver.world_size

    @property
    def replica_ids(self) -> tuple[int, ...]:
        """The numbers of this process's replicas among all replicas. Local."""
        return self._topology.replica_ids

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of this process, one per local replica. Local."""
        return tuple(self._setting.devices)

    @property
    def device(self) -> torch.device:
        """The device of the first local replica. Local."""
        return self._setting.devices[0]

    @property
    def _on_host(self) -> bool:
        """Whether batches stay in the memory of this process."""
        return all(device.type == "cpu" for device in self.devices)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The rank and node of this process; ``None`` in one process. Local."""
        return self._resolver

    def distribute_dataset(
        self,
        data: Any,
        options: InputOptions | None = None,
        *,
        global_batch_size: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        shuffle: bool = False,
    ) -> DistributedDataset:
        """Divides a dataset that was written for one process among all replicas.

        Collective: every rank calls this, with the same data.

        >>> strategy = tdi.Strategy(["cpu", "cpu"])  # two replicas in this process
        >>> for x in strategy.distribute_dataset(range(5), global_batch_size=3):
        ...     print(strategy.local_results(x))
        (tensor([0, 1]), tensor([2]))
        (tensor([3]), tensor([4]))

        Args:
          data: a torch ``DataLoader`` (its batch size is the global one), a map-style dataset, a dict of tensors and
            NumPy arrays with one entry per sample in each (nested ones and memory-mapped ones too), an iterable
            dataset, a ``FileDataset``, any iterable, or a function that returns one. Without a batch size an iterable
            yields global batches, which are cut along dim 0.
          options: how the input is divided and read ahead.
          global_batch_size: samples of a step over all replicas, where single samples are to be batched.
          collate_fn: makes a batch of samples; torch's ``default_collate`` if not given.
          shuffle: whether map-style data (a dict too) that comes with ``global_batch_size`` is in a new random order in
            each epoch: torch's ``RandomSampler``, which draws from the default random state.

        Raises:
          InputError: ``data`` is no data, was divided already, or cannot be shuffled here.
          BatchingError: a batch size is missing, given twice, or not a positive int; or ``partial_batch="pad"`` without
            a known global batch size.
          ShardingError: the policy does not fit the data or the number of workers.
          RankDisagreement: the ranks were given different data or options.
        """
        require_no_replica("distribute_dataset")
        chosen = with_folder_of_environment(options if isinstance(options, InputOptions) else InputOptions())

        def make() -> tuple[Source, AutoShardPolicy]:
            check_options(options)
            if chosen.replication_mode is not InputReplicationMode.PER_WORKER:
                raise ValueError(
                    "replication_mode PER_REPLICA belongs to distribute_datasets_from_function; distribute_dataset "
                    "cuts one dataset for all replicas."
                )
            return resolve_source(
                data,
                chosen,
                self._topology,
                refuse_divided,
                global_batch_size=global_batch_size,
                collate_fn=collate_fn,
                shuffle=shuffle,
                on_host=self._on_host,
            )

        return self._distribute("distribute_dataset()", make, chosen)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Lets a function make each worker's dataset, already divided and batched per replica.

        Collective: every rank calls this. The dataset is taken as it is; each local replica takes one of its batches a
        step. Workers may have different amounts of data.

        >>> def batches(context):
        ...     return [torch.ones(context.get_per_replica_batch_size(4))] * 3
        >>> list(tdi.Strategy(["cpu", "cpu"]).distribute_datasets_from_function(batches))
        [PerReplica(0: tensor([1., 1.]), 1: tensor([1., 1.])), PerReplica(0: tensor([1., 1.]), 1: tensor([]))]

        Args:
          dataset_fn: is called with an ``InputContext``, once per worker (or per replica, by ``replication_mode``).
          options: how the input is read ahead; the sharding policy has no effect.

        Raises:
          BatchingError: the function returned a dataset of single samples.
          InputError: the function returned an object that is no data.
          TypeError: ``dataset_fn`` is no function.
          RankDisagreement: the ranks were given different options.
        """
        from torchdistinput.sources.from_function import FunctionSource  # noqa: PLC0415 - few need it, and all would pay for it at the import

        require_no_replica("distribute_datasets_from_function")
        chosen = with_folder_of_environment(options if isinstance(options, InputOptions) else InputOptions())
        topology = self._topology

        def make() -> tuple[Source, AutoShardPolicy]:
            check_options(options)
            if not callable(dataset_fn):
                raise TypeError(
                    f"dataset_fn is a {type(dataset_fn).__name__}; a function of an InputContext is needed, which "
                    "returns this rank's dataset. distribute_dataset takes data as it is."
                )
            if chosen.replication_mode is InputReplicationMode.PER_REPLICA:
                pipelines, ids = topology.num_replicas, topology.replica_ids
            else:
                pipelines, ids = topology.num_workers, (topology.worker,)
            contexts = [InputContext(pipelines, each, topology.num_replicas) for each in ids]
            datasets = [dataset_fn(context) for context in contexts]
            for dataset in datasets:
                refuse_divided(dataset)
            if not self._on_host:
                datasets = [not_pinning(dataset) for dataset in datasets]
            return FunctionSource(datasets, topology, chosen), AutoShardPolicy.OFF

        return self._distribute("distribute_datasets_from_function()", make, chosen)

    def _distribute(
        self, what: str, make: Callable[[], tuple[Source, AutoShardPolicy]], options: InputOptions
    ) -> DistributedDataset:
        """Makes the source; then all ranks compare their arguments, or raise the error of the rank that failed."""
        facts: Mapping[str, Any] = {}
        lists: Mapping[str, Sequence[str]] = {}
        made, problem = None, None
        try:
            made = make()
            check_sizes(made[0], options)
            facts, lists = facts_of(made[0], made[1].name, options), made[0].facts.lists
        except Exception as error:  # every rank must hear of it, or the others would wait
            problem = error
        hints = dict.fromkeys(("length", SAMPLES), PART_HINT) if facts.get(SAMPLES) else {"length": LENGTH_HINT}
        run = run_of(launcher.default_group())
        extra = [torch.initial_seed(), run.name or secrets.token_hex(4)]
        answers = agree(self._ranks, what, facts, error=problem, extra=extra, hints=hints, lists=lists)
        if made is None:
            raise AssertionError("a source that was not made is an error that was raised")
        self._datasets += 1  # only now: after a failed call every rank still has the same number
        source, policy = made
        if self._ranks is None or self._ranks.rank == 0:
            self._tell(facts, policy, options)
        name, (seed, first_run) = str(self._datasets), answers[0]
        run.name = run.name or first_run
        file = self._trace_in(options.trace, run)
        return DistributedDataset(source, self._setting, options, name, policy=policy.name, seed=seed, trace_file=file)

    def _trace_in(self, folder: str | os.PathLike[str] | None, run: TracedRun) -> TraceFile | None:
        """The trace file of this rank, which all strategies share."""
        if folder is None:
            return None
        ranks = self._ranks
        facts = {
            "world_size": max(self.world_size, 1 if ranks is None else ranks.num_ranks),
            "replicas": self._topology.replicas_per_worker,
            "host": platform.node(),
            "version": next((each.version for each in distributions(name="torchdistinput")), "unknown"),
        }
        rank = self.rank if ranks is None else ranks.name(ranks.rank)
        file = self._trace_files[folder] = run.file(os.fspath(folder), rank, facts)  # open as long as the strategy is
        return file

    def _tell(self, facts: Mapping[str, Any], policy: AutoShardPolicy, options: InputOptions) -> None:
        """Logs what a dataset is divided by, and into which parts."""
        size, pipelines = facts.get("batch size"), self.num_input_pipelines
        batch = "batches of the source's own sizes"
        if size is not None:
            told = told_batch(size, self._topology, shared=policy is AutoShardPolicy.DATA)
            batch = f"global batch {told if options.balance is None else f'{size}, divided by cost,'}"
        reader = "pipeline" if self._setting.has_peers else "rank"  # ranks with the same data coordinate are one
        _LOG.info(
            "dataset %d (%s): policy %s, %s over %d %s%s",
            *(self._datasets, facts["kind"], policy.name, batch, pipelines, reader, "s" * (pipelines > 1)),
        )

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], T]) -> PerReplica[T]:
        """Calls a function once per local replica and collects the results. Local.

        >>> tdi.Strategy(["cpu", "cpu"]).distribute_values_from_function(lambda each: each.replica_id_in_sync_group)
        PerReplica(0: 0, 1: 1)

        Args:
          value_fn: is called with a ``ValueContext``.

        Returns:
          Always a ``PerReplica``, also for one replica.
        """
        count = self.num_replicas_in_sync
        return PerReplica([value_fn(ValueContext(replica, count)) for replica in self.replica_ids])

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls ``fn`` on each local replica with its part of every ``PerReplica``; see ``run_replicas``.

        Local, except for collectives that ``fn`` calls through ``get_replica_context()``.

        >>> tdi.Strategy(["cpu", "cpu"]).run(lambda x, factor: x * factor, args=(tdi.PerReplica([1, 2]), 10))
        PerReplica(0: 10, 1: 20)

        Args:
          fn: the function.
          args: its arguments.
          kwargs: its keyword arguments.

        Returns:
          The result of ``fn``; with several local replicas a ``PerReplica`` at each leaf.
        """
        return run_replicas(
            fn,
            args,
            kwargs,
            replica_ids=self.replica_ids,
            num_replicas_in_sync=self.num_replicas_in_sync,
            devices=self.devices,
            workers=self._workers,
            enter_thread=streams_here(self.devices),
        )

    def reduce(self, op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None = None) -> Any:
        """The values of all replicas reduced to one, the same everywhere. Collective: every rank calls this.

        MEAN over an axis divides by the number of samples of all replicas, so uneven and empty parts are exact; MEAN of
        ints is float64. With one replica and no axis the value is untouched.

        >>> parts = tdi.PerReplica([torch.tensor([1.0, 2.0]), torch.tensor([6.0])])
        >>> tdi.Strategy(["cpu", "cpu"]).reduce("MEAN", parts, axis=0)
        tensor(3.)

        Args:
          op: SUM or MEAN, or its name in any case.
          value: a ``PerReplica``; with one local replica also a bare tensor or number.
          axis: the axis or axes of each value to reduce over as well.

        Raises:
          ValueError: an unknown op, an axis out of range, a bare value with several local replicas, unequal shapes.
          RankDisagreement: the ranks call different things.
        """
        require_no_replica("reduce")
        return reductions.reduce(
            op, value, axis, num_local=len(self.devices), workers=self._workers, device=self.device
        )

    def gather(self, value: Any, axis: int) -> Any:
        """The values of all replicas concatenated in replica order; sizes along the axis may differ.

        Collective: every rank calls this.

        >>> tdi.Strategy(["cpu", "cpu"]).gather(tdi.PerReplica([torch.ones(2), torch.zeros(1)]), axis=0)
        tensor([1., 1., 0.])

        Args:
          value: a ``PerReplica`` of tensors; with one local replica also a bare tensor.
          axis: the axis to concatenate along, not negative.

        Raises:
          ValueError: a negative axis or one out of range, a scalar, or other dims or dtypes that differ.
          RankDisagreement: the ranks call different things.
        """
        require_no_replica("gather")
        return reductions.gather(value, axis, num_local=len(self.devices), workers=self._workers, device=self.device)

    def gather_ordered(self, index: Any, outputs: Any) -> Any:
        """The outputs of all replicas in the order of the data, each once, the same on every rank.

        Collective: every rank calls this. For exact evaluation and ordered predictions, with
        ``InputOptions(with_index=True)``:

        >>> index = tdi.PerReplica([torch.tensor([2, 0]), torch.tensor([1])])
        >>> tdi.Strategy(["cpu", "cpu"]).gather_ordered(index, tdi.PerReplica([["c", "a"], ["b"]]))
        ['a', 'b', 'c']

        Args:
          index: ``(n,)`` ints, one for each row of the outputs; ``n`` may differ between replicas and be 0. Rows of
            index -1 (padding) are left out. A ``PerReplica`` with several local replicas.
          outputs: any nesting of tensors with ``n`` rows, and of lists with ``n`` entries (strings, numbers, None; a
            dict by ``json.dumps``). A ``PerReplica`` at each leaf with several local replicas. Where ``n`` is 0 any
            value is accepted; the structure of the result comes from the other replicas.

        Returns:
          The outputs with the rows of all replicas by rising index; tensors on this process's first device, without a
          gradient; lists as lists. If no replica has a row, the outputs of this process.

        Raises:
          ValueError: an index comes twice (it is named, as the sample would count twice), lengths differ between index
            and outputs, nesting or dtypes differ between replicas, or a bare value with several local replicas.
          TypeError: the index holds no ints, or a list holds what is no plain value.
          RankDisagreement: the ranks call different things.
        """
        from torchdistinput.coordination.gather_ordered import gather_ordered  # noqa: PLC0415 - few need it, and all would pay for it at the import

        require_no_replica("gather_ordered")
        return gather_ordered(index, outputs, num_local=len(self.devices), workers=self._workers, device=self.device)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The value of each local replica, as a tuple; a value that is not per replica comes alone. Local."""
        return local_results(value, len(self.devices))

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the current strategy, as ``get_strategy()`` returns it. Local."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def mirror(self, module: nn.Module) -> Any:
        """Makes the module's parameters and buffers those of the first replica, on all replicas.

        Collective: every rank calls this with a module of the same shapes. The extra states of submodules
        (``get_extra_state``: the vocabulary of a lookup) are not sent; they are compared, and must be equal on all
        ranks.

        Args:
          module: is moved to this process's first device.

        Returns:
          The module; with several local replicas a ``PerReplica`` of it and copies, one on each device, that ``run``
          unpacks.

        Raises:
          RankDisagreement: names, shapes, dtypes, layouts or extra states differ between ranks.
          TypeError: ``module`` is no module; on every rank.
          Exception: the error of moving or copying the module; on the other ranks an error with its text.
        """
        modules: list[nn.Module] = []
        tensors: list[dict[str, Tensor]] = []
        facts: dict[str, Any] = {}
        problem: Exception | None = None
        try:
            if not isinstance(module, nn.Module):
                raise TypeError(f"module is a {type(module).__name__}; a torch.nn.Module is needed.")
            modules = [module.to(self.device)]
            modules += [copy.deepcopy(modules[0]).to(device) for device in self.devices[1:]]
            tensors = [dict([*each.named_parameters(), *each.named_buffers()]) for each in modules]
            facts["tensors"] = {name: _structure_of(tensor) for name, tensor in tensors[0].items()}
            facts["extra states"] = _extra_states(modules[0])
        except Exception as error:  # every rank must hear of it, or the others would wait
            problem = error
        hint = "A vocabulary that adapt() learns is the same on all ranks."
        agree(self._ranks, "mirror()", facts, error=problem, hints={"extra states": hint})
        if self._ranks is not None:
            for name, tensor in tensors[0].items():
                self._ranks.broadcast_from_first(tensor.data)
                for copies in tensors[1:]:
                    without_repeats(copies[name].data).copy_(without_repeats(tensor.data))
        return modules[0] if len(modules) == 1 else PerReplica(modules)

    def __repr__(self) -> str:
        return (
            f"Strategy(rank {self.rank} of {self.world_size}, on {', '.join(map(str, self.devices))}; "
            f"{self.num_replicas_in_sync} replicas in sync)"
        )


def _structure_of(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype), str(tensor.layout)]


def _extra_states(module: nn.Module) -> dict[str, str]:
    """A digest of the extra state of each submodule; of objects that are no plain values, only the type counts."""
    found = {}
    for name, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            text = json.dumps(each.get_extra_state(), default=lambda item: type(item).__name__, skipkeys=True)
            found[name or type(each).__name__] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _misuse(timeout_seconds: float, process_group: Any, mesh: Any, data_dims: Sequence[str] | None) -> Exception | None:
    """The error for wrong arguments, if any is wrong."""
    try:
        check_seconds("timeout_seconds", timeout_seconds)
    except (TypeError, ValueError) as error:
        return error
    if timeout_seconds > _MAX_SECONDS:
        return ValueError(f"timeout_seconds is {timeout_seconds}; it must be {_MAX_SECONDS} at most.")
    if process_group is not None and not launcher.is_group(process_group):
        found = type(process_group).__name__
        return TypeError(
            f"process_group is a {found}; a group of torch.distributed (new_group(...)) is needed, or None."
        )
    if mesh is not None and not launcher.is_mesh(mesh):
        return TypeError(f"mesh is a {type(mesh).__name__}; a DeviceMesh (init_device_mesh(...)) is needed, or None.")
    if process_group is not None and mesh is not None:
        return ValueError("both process_group and mesh were given; a mesh has its own groups. Give one of them.")
    if data_dims is not None and mesh is None:
        return ValueError("data_dims was given without a mesh; it names dims of one.")
    return None


def _try_devices(
    devices: Sequence[str | torch.device] | None, local_rank: int
) -> tuple[tuple[torch.device, ...], Exception | None]:
    """The devices, after making the first one current; or the error as a value, as all ranks must get it."""
    try:
        found = resolve_devices(devices, local_rank)
        set_current(found[0])
    except Exception as error:  # for example an error of a driver
        return (), error
    return found, None


def _alone_on(devices: Sequence[torch.device], timeout_seconds: float) -> Setting:
    """The setting of a process that is the only worker."""
    topology = Topology(num_workers=1, replicas_per_worker=len(devices), worker=0)
    return Setting(topology=topology, devices=devices, ranks=None, timeout_seconds=timeout_seconds)


_current: contextvars.ContextVar[Strategy | None] = contextvars.ContextVar("strategy", default=None)


def get_strategy() -> Strategy:
    """The strategy of the current ``scope``; outside of it a strategy of this process only, as in TensorFlow. Local.

    >>> with tdi.Strategy(["cpu", "cpu"]).scope():
    ...     tdi.get_strategy().num_replicas_in_sync
    2
    """
    return _current.get() or _alone()


def strategy_of_scope() -> Strategy | None:
    """The strategy of the current ``scope``, if any. Local."""
    return _current.get()


def _alone() -> Strategy:
    strategy = Strategy.__new__(Strategy)
    devices = resolve_devices(None, launcher.local_rank())
    set_current(devices[0])
    strategy._settle(_alone_on(devices, 600.0))  # noqa: SLF001 - a second constructor
    return strategy
