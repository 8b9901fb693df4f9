"""The launcher's environment variables, the default process group, and the ranks that take part in a strategy."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.spawn import get_preparation_data
from typing import Any, Final, NamedTuple, cast, final

import numpy as np
import torch
import torch.distributed as dist

from torchdistinput.coordination.meeting import Meeting, Met
from torchdistinput.coordination.private_names import another_connection, default_store, devices_of_backend
from torchdistinput.coordination.store import Store, prefixed, within
from torchdistinput.coordination.tree import ALL, DIED, ENDED
from torchdistinput.errors import CoordinationTimeout, InputError, ShardingError

_GLOO_LAZY_INIT: Final = "TORCH_GLOO_LAZY_INIT"
_LOOK_SECONDS: Final = 1.0  # between two trials to reach the store, and for each of them
_CONNECT_SECONDS: Final = 5.0  # to a store that is there


@final
class Members(NamedTuple):
    """The ranks that take part in a strategy, and their workers.

    Args:
      ranks: the ranks, as the default group numbers them.
      workers: the worker of each rank; the ranks of one worker read the same data.
      rank: the place of this process in ``ranks``.
    """

    ranks: tuple[int, ...]
    workers: tuple[int, ...]
    rank: int

    @property
    def num_workers(self) -> int:
        """The number of workers, W."""
        return max(self.workers) + 1

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first rank (as a place in ``ranks``) of each worker, which represents the worker."""
        return tuple(self.workers.index(worker) for worker in range(self.num_workers))


_DATA_DIMS: Final = ("dp", "ddp", "fsdp", "hsdp", "dp_replicate", "dp_shard", "data", "batch")
"""The usual names of mesh dims along which each rank reads samples of its own."""


def is_group(value: object) -> bool:
    """Whether a value is a process group, or the value that ``new_group`` returns to ranks outside of it. Local."""
    return isinstance(value, dist.ProcessGroup) or value is dist.GroupMember.NON_GROUP_MEMBER


def is_mesh(value: object) -> bool:
    """Whether a value is a ``DeviceMesh``. Local."""
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - its import takes long, and few have one

    return isinstance(value, DeviceMesh)


def find_members(group: Any, mesh: Any, data_dims: Sequence[str] | None) -> Members:
    """The ranks of a group or mesh that take part. Local.

    Raises:
      ValueError: this process is not in it, or the mesh has no such dims.
      ShardingError: the names of the mesh's dims do not tell which are data-parallel.
    """
    if mesh is not None:
        return _members_of_mesh(mesh, data_dims)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the process group that was given; only its members make the strategy."
        )
    ranks = global_ranks(group)
    return Members(ranks=ranks, workers=tuple(range(len(ranks))), rank=dist.get_rank(group))


def _members_of_mesh(mesh: Any, data_dims: Sequence[str] | None) -> Members:
    names = tuple(mesh.mesh_dim_names or ())
    if data_dims is None:
        data_dims = _usual_data_dims(names, len(mesh.mesh.shape))
    unknown = [name for name in data_dims if name not in names]
    if unknown:
        raise ValueError(f"data_dims names {unknown}, but the mesh has the dims {names}.")
    grid = mesh.mesh
    ranks = tuple(int(rank) for rank in grid.flatten())
    if dist.get_rank() not in ranks:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {ranks}; only its members make the strategy.")
    axes = list(range(grid.dim())) if not names else [names.index(name) for name in data_dims]
    coordinates = np.indices(grid.shape).reshape(grid.dim(), -1)[axes]
    sizes = [grid.shape[axis] for axis in axes]
    workers = np.ravel_multi_index(tuple(coordinates), sizes) if axes else np.zeros(len(ranks), np.int64)
    return Members(ranks=ranks, workers=tuple(workers.tolist()), rank=ranks.index(dist.get_rank()))


def _usual_data_dims(names: Sequence[str], num_dims: int) -> Sequence[str]:
    """The data-parallel dims of a mesh, by their names.

    Raises:
      ShardingError: the names do not tell which ones they are.
    """
    found = [name for name in names if name.lower() in _DATA_DIMS]
    # A dim such as dp_cp may join ranks that read the same samples with others.
    unclear = [name for name in names if name not in found and set(name.lower().split("_")) & set(_DATA_DIMS)]
    if unclear or not (found or (num_dims == 1 and not names)):
        told = f"{unclear[0]} is none" if unclear else "none of them is one"
        raise ShardingError(
            f"the mesh has the dims {tuple(names)}; the usual names of data-parallel dims are {', '.join(_DATA_DIMS)}, "
            f"and {told}. Ranks that differ in another dim only read the same samples. Give the mesh that has the "
            "data-parallel dims too, and apart, such as mesh['dp', 'tp'], of which dp is meant then; or name its "
            "data-parallel dims with data_dims=, which is [] if all its ranks read the same samples."
        )
    return found or names


def carries(group: dist.ProcessGroup | None, members: Members, kind: str) -> bool:
    """Whether a group can send tensors of a kind of device, and has exactly these ranks in their order. Local.

    The default backend of a kind of device may not be able to: mps has gloo, which supports only the CPU and CUDA.

    Args:
      group: the group; ``None`` for the default one, which may have more ranks than a mesh.
      members: the ranks that take part.
      kind: the kind of device, for example ``"cuda"``.
    """
    if global_ranks(group) != members.ranks:
        return False
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backend = {device: name for device, _, name in pairs}.get(kind)
    return backend is not None and kind in devices_of_backend(backend)


def global_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of a group, as the default group numbers them. Local."""
    return tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))


_OF_A_RANK: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether the environment has all that ``init_process_group`` takes from it. Local."""
    return all(name in os.environ for name in _OF_A_RANK)


def refuse_half() -> None:
    """Refuses to go on as one process where the environment tells of other ranks, and not how to meet them. Local.

    Raises:
      InputError: a variable is missing. Each rank would train by itself, on all of the data.
    """
    told = {name: os.environ[name] for name in _OF_A_RANK if name in os.environ}
    alone = world_size() == 1 and int(told.get("RANK", "0")) == 0 and ("WORLD_SIZE" in told or "RANK" not in told)
    if alone or is_launched():
        return
    have = ", ".join(f"{name}={value}" for name, value in told.items())
    lacking = ", ".join(name for name in _OF_A_RANK if name not in told)
    raise InputError(
        f"Strategy(): the environment tells of several ranks: it has {have}, but not {lacking}. Start the ranks "
        "with torchrun, which sets all four variables; or set those that are missing; or make the process group "
        "before this (torch.distributed.init_process_group). To train in this process alone, unset RANK and "
        "WORLD_SIZE."
    )


def world_size() -> int:
    """The number of ranks, by the environment. Local."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """The number of this process on its host, by the environment. Local."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def node() -> int:
    """The number of this host, by the environment. Local."""
    return int(os.environ.get("GROUP_RANK", "0"))


def address() -> str | None:
    """The host of the store, by the environment. Local."""
    return os.environ.get("MASTER_ADDR")


def refuse_while_starting() -> None:
    """Raises where this process runs the main script a second time, as a child that multiprocessing starts does. Local.

    Under spawn and forkserver a loader worker imports the main script first. Such a child has the variables of its
    rank, and would take the rank's place.

    Raises:
      InputError: this process is not started yet.
    """
    try:
        # Public: it is in ``__all__``. It asks first whether this process may start others.
        get_preparation_data("")
    except RuntimeError:
        raise InputError(
            "Strategy(): this process is not started yet: as a child of a rank (a loader worker under spawn or "
            "forkserver) it imports the main script, which makes a Strategy or iterates a DataLoader again.\n"
            "Use the proper idiom in the main module: put what the script does under  if __name__ == '__main__':"
        ) from None


def backends_for(accelerator: str | None) -> str:
    """The backends of a default group: gloo, and torch's default backend for the accelerator if it is there. Local.

    Args:
      accelerator: the kind of accelerator that this machine has, if any.
    """
    try:
        backend = dist.get_default_backend_for_device(accelerator or "cpu")
    except ValueError:  # this torch has none for it
        return "gloo"
    if backend == "gloo" or not dist.is_backend_available(backend):
        return "gloo"
    return f"cpu:gloo,{accelerator}:{backend}"


def join_default_group(accelerator: str | None, timeout_seconds: float) -> None:
    """Makes the default group from the launcher's environment. Collective: every rank calls this.

    The ranks meet first: torch's own rendezvous would wait half an hour for a rank that never comes, and not name it.
    The connections stay for ``Strategy()``. The store is asked on a separate thread, so that the wait for one that
    hangs has a bound. The timeout of the group is torch's default.

    Args:
      accelerator: the kind of accelerator that this machine has, if any; its tensors travel over torch's default
        backend for it, where there is one. Host tensors travel over gloo in any case.
      timeout_seconds: how long to wait for the other ranks.

    Raises:
      CoordinationTimeout: a rank did not come, and is named; or the store does not answer.
      RankLost: a rank, or the store, is gone.
      InputError: this rank cannot listen for the others.
    """
    rank, num_ranks, where = int(os.environ["RANK"]), world_size(), f" at {_place_of_store()}"
    found: list[Store] = []

    def store_of(given_up: threading.Event) -> Store:
        found.append(_store_of_launch(timeout_seconds, given_up))
        # The training code may use the group's connection at exit.
        return prefixed(f"torchdistinput/launch/{num_ranks}", another_connection(found[0], timeout_seconds))

    try:
        met = _meeting(rank, range(num_ranks), timeout_seconds).wait_for_all(store_of, where)
    except CoordinationTimeout as error:
        if not _agents_have_the_store() or os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            raise
        raise CoordinationTimeout(
            f"{error} If nodes left or joined this job: torchrun's agents share a store then that not all of them "
            "know; start each with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        ) from error

    def join(_: threading.Event) -> None:
        group_store = cast(Any, prefixed(f"torchdistinput/{met.token}/default_pg", found[0]))
        with _connected_when_used():
            dist.init_process_group(backends_for(accelerator), store=group_store, rank=rank, world_size=num_ranks)

    within(timeout_seconds, "Strategy()", where, join)
    _keep(range(num_ranks), met)


def _meeting(rank: int, names: Sequence[int], timeout_seconds: float) -> Meeting:
    return Meeting(
        *(rank, names, timeout_seconds),
        host=address(),
        interface=os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0],
        ports=os.environ.get("TORCHDISTINPUT_PORTS", ""),
    )


def meet_once(members: Members, timeout_seconds: float, store_of: Callable[[threading.Event], Store]) -> Met:
    """The ranks, which meet now where they have not yet. Collective: every rank calls this.

    Args:
      members: the ranks.
      timeout_seconds: how long to wait for the others.
      store_of: see ``Meeting.wait_for_all``, which tells of the errors, too.
    """
    met = _met_before(members.ranks)
    if met is None:
        where = f" at {address()}" if address() else ""
        met = _meeting(members.rank, members.ranks, timeout_seconds).wait_for_all(store_of, where)
        _keep(members.ranks, met)
    return met


_MET: Final[dict[tuple[int, ...], tuple[weakref.ref[Any], Met]]] = {}
"""Who has met, by the ranks in the default group, with that group."""


def _keep(names: Sequence[int], met: Met) -> None:
    _MET[tuple(names)] = weakref.ref(default_group()), met


def _met_before(names: Sequence[int]) -> Met | None:
    group, met = _MET.get(tuple(names), (None, None))
    if met is None or group is None or group() is not default_group():
        return None
    left = met.tree.left.get(ALL)
    return met if left is None or left.kind in (DIED, ENDED) else None


@contextlib.contextmanager
def _connected_when_used() -> Iterator[None]:
    """Makes a gloo group that is made inside connect two ranks at their first message, not all ranks at once.

    Otherwise a rank has ``W - 1`` sockets at once, and reads as many addresses from the store; and where a rank has
    died since all met, torch waits for it in C++, and nobody names it. A transport that cannot do this (any but plain
    TCP on Linux) and the user's own setting are left unchanged.
    """
    transport = os.environ.get("GLOO_DEVICE_TRANSPORT", "")
    if _GLOO_LAZY_INIT in os.environ or transport not in ("", "TCP") or sys.platform != "linux":
        yield
        return
    os.environ[_GLOO_LAZY_INIT] = "1"  # torch has no other way for its default group
    try:
        yield
    finally:
        del os.environ[_GLOO_LAZY_INIT]


def _agents_have_the_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _place_of_store() -> str:
    return f"{address()}:{os.environ.get('MASTER_PORT', '0')}"


def _store_of_launch(timeout_seconds: float, given_up: threading.Event) -> Store:
    """The store at the launcher's address, hosted by the launcher or by rank 0.

    Its port is waited for here: torch's own wait cannot be ended, and may last more than twice its timeout.
    """
    hosts_it = os.environ.get("RANK", "0") == "0" and not _agents_have_the_store()
    place, began, pause = _place_of_store(), time.monotonic(), 0.02
    store = None
    while store is None:
        try:
            if hosts_it or _listens():
                # The host waits for its own server only; if it gave up, the server would end under the other ranks.
                waited = time.monotonic() - began
                seconds = timeout_seconds if hosts_it else min(max(waited, _LOOK_SECONDS), _CONNECT_SECONDS)
                store = _store_at(seconds, hosts_it=hosts_it)
        except dist.DistError as error:
            if hosts_it:
                raise InputError(
                    f"Strategy(): rank 0 cannot host a store at {place} ({str(error).partition(chr(10))[0]}). Choose "
                    "another MASTER_PORT, the same on every rank."
                ) from error
        if store is None and given_up.wait(pause):
            raise CoordinationTimeout(f"Strategy(): no store at {place}")  # which nobody awaits any more
        pause = min(1.5 * pause, _LOOK_SECONDS)
    if hosts_it:
        _HOSTED[place] = store
    store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
    return cast(Store, store)


_HOSTED: Final[dict[str, Any]] = {}
"""The store that this process hosts, by its address: other ranks need it also after ``destroy_process_group()``."""


def _store_at(seconds: float, *, hosts_it: bool) -> Any:
    """The store at the launcher's address. Local; torch waits for up to about three times the seconds."""
    return cast(Any, dist).TCPStore(
        address(),
        int(os.environ.get("MASTER_PORT", "0")),
        world_size(),
        hosts_it,
        datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _listens() -> bool:
    """Whether a process listens at the launcher's address. Local, bounded."""
    with contextlib.suppress(OSError):
        port = int(os.environ.get("MASTER_PORT", "0"))
        socket.create_connection((address() or "", port), _LOOK_SECONDS).close()
        return True
    return False


def store_of_default_group(timeout_seconds: float, given_up: threading.Event) -> Store:
    """The store at which the ranks of the default group met. Local.

    Args:
      timeout_seconds: how long a request may take, where there is no way to it but a second connection.
      given_up: is set when the caller no longer waits.

    Raises:
      InputError: this torch gives no way to the store.
    """
    store = default_store()
    if store is not None:
        return cast(Store, store)
    if address() is None:
        raise InputError(
            f"torch {torch.__version__} gives no way to the store of the default process group, and MASTER_ADDR and "
            "MASTER_PORT do not name another store; the ranks cannot find each other. Set both, and make the group "
            'with init_process_group(init_method="env://").'
        )
    return _store_of_launch(timeout_seconds, given_up)


def leave_default_group() -> None:
    """Ends the default group, if it is still there. Local."""
    if default_group_exists():
        dist.destroy_process_group()


def default_group() -> Any:
    """The default group, or ``None``. Local."""
    return dist.group.WORLD if default_group_exists() else None


def default_group_exists() -> bool:
    """Whether a default group was initialised. Local."""
    return dist.is_available() and dist.is_initialized()


def expected_ranks() -> int:
    """The number of ranks that there are, or will be by the launcher's environment. Local."""
    return dist.get_world_size() if default_group_exists() else world_size()
