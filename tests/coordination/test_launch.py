"""How the default group is made: its backends, its store; and which devices' tensors a group takes as they are."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import torchdistinput as tdi
from torchdistinput.coordination import launch
from torchdistinput.coordination.launch import Members
from torchdistinput.errors import CoordinationTimeout, InputError
from torchdistinput.testing import run_ranks


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends for three kinds of accelerator, of which this torch lacks the second one's."""
    found = {"cpu": "gloo", "first": "firstccl", "second": "secondccl", "third": "gloo"}

    def backend_for(device: str) -> str:
        if device not in found:
            raise ValueError(f"Default backend not registered for device : {device}")
        return found[device]

    monkeypatch.setattr(dist, "get_default_backend_for_device", backend_for)
    monkeypatch.setattr(dist.Backend, "backend_capability", {"gloo": ["cpu", "cuda"], "firstccl": ["first"]})
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: backend in ("gloo", "firstccl"))


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("accelerator", "backends"),
    [
        (None, "gloo"),
        ("first", "cpu:gloo,first:firstccl"),
        ("second", "gloo"),  # torch was built without it
        ("third", "gloo"),
        ("unknown", "gloo"),
    ],
)
def test_an_accelerator_without_a_backend_leaves_the_group_to_the_cpu(accelerator: str | None, backends: str) -> None:
    assert launch.backends_for(accelerator) == backends


FULL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    def make(variables: dict[str, str]) -> None:
        for name in FULL:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.fixture
def group_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets the default group have these backends, and the ranks 0 to 3."""

    def make(backends: str) -> None:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
        monkeypatch.setattr(launch, "global_ranks", lambda group: (0, 1, 2, 3))

    return make


@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize(
    ("backends", "kind", "ranks", "carried"),
    [
        ("cpu:gloo,first:firstccl", "first", (0, 1, 2, 3), True),
        ("first:firstccl", "first", (0, 1, 2, 3), True),
        ("cpu:gloo,cuda:gloo", "cuda", (0, 1, 2, 3), True),  # what a plain "gloo" stands for
        ("cpu:gloo,cuda:gloo", "first", (0, 1, 2, 3), False),
        ("cpu:gloo,third:gloo", "third", (0, 1, 2, 3), False),  # gloo does not know that device
        ("cpu:gloo,first:firstccl", "first", (0, 1), False),  # a mesh of some ranks
        ("cpu:gloo,first:firstccl", "first", (0, 2, 1, 3), False),  # or in another order
    ],
)
def test_a_group_carries_what_its_backend_knows_for_its_own_ranks(
    group_of: Callable[[str], None], backends: str, kind: str, ranks: tuple[int, ...], *, carried: bool
) -> None:
    group_of(backends)
    members = Members(ranks=ranks, workers=tuple(range(len(ranks))), rank=0)
    assert launch.carries(None, members, kind) is carried


def test_a_store_that_is_not_there_leaves_no_thread_behind(
    environment: Callable[[dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A thread that comes back from torch's code while the interpreter ends would abort the process."""
    monkeypatch.setattr("torchdistinput.coordination.timeouts._WARN_SECONDS", 0.5)
    with socket.socket() as bound:  # nobody listens, and nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
        environment({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})

        def join(_: int) -> str:
            with pytest.raises(CoordinationTimeout) as raised:
                launch.join_default_group(None, 3.0)
            return str(raised.value)

        with ThreadPoolExecutor(8) as ranks:  # torch's own wait is longer at random
            told = list(ranks.map(join, range(8)))
        left = [thread for thread in threading.enumerate() if thread.name == "torchdistinput-store"]
        for thread in left:
            thread.join(60.0)
    assert not any(thread.is_alive() for thread in left)
    awaited = f"an answer of the store at 127.0.0.1:{port}"
    for text in told:
        assert text.startswith(f"Strategy(): {awaited} did not come within 3 seconds: the process that hosts it (rank")
    assert any(text.startswith(f"Strategy(): waiting for {awaited} for") for text in caplog.messages)


@pytest.mark.parametrize("nodes", [1, 2])
def test_where_agents_of_several_nodes_share_a_store_a_late_rank_may_not_know_it(
    nodes: int, environment: Callable[[dict[str, str]], None]
) -> None:
    store = cast(Any, dist).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": str(nodes)}
    environment({**told, **agents})
    with pytest.raises(CoordinationTimeout, match=r"rank 1 did not come within 3 seconds") as raised:
        launch.join_default_group(None, 3.0)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(raised.value)) == (nodes == 2)


def test_a_port_that_is_taken_is_told_where_the_store_should_be(environment: Callable[[dict[str, str]], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        with pytest.raises(InputError, match=rf"rank 0 cannot host a store at 127\.0\.0\.1:{port} .*MASTER_PORT"):
            launch.join_default_group(None, 60.0)


def below_those_of_connections() -> socket.socket:
    """Listens at a port that the system gives to no connection of another test while nobody listens there."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))
    raise AssertionError("no port is free")


def test_a_store_is_waited_for_on_where_the_first_to_listen_at_its_port_goes_away(
    environment: Callable[[dict[str, str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "default_store", lambda: None)
    first = below_those_of_connections()
    port = first.getsockname()[1]

    def host() -> Any:
        first.accept()[0].close()
        first.close()
        time.sleep(4.0)  # longer than one trial to connect
        return cast(Any, dist).TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with ThreadPoolExecutor(1) as other:
        hosted = other.submit(host)
        store = launch.store_of_default_group(30.0, threading.Event())
        store.set("name", "value")
        assert hosted.result().num_keys() == 1


def strategy_or_error() -> tuple[int, str]:
    """The ranks for which a strategy and a drop-in are made, and what both of them say if they are refused."""
    try:
        strategy = tdi.Strategy(["cpu"])
    except tdi.InputError as error:
        with pytest.raises(tdi.InputError, match=re.escape(str(error))):
            next(iter(tdi.DataLoader(TensorDataset(torch.arange(4)))))
        return 0, str(error)
    assert len(list(tdi.DataLoader(TensorDataset(torch.arange(4))))) == 4
    return strategy.world_size, ""


@pytest.mark.parametrize("names", [each for n in (1, 2, 3) for each in itertools.combinations(FULL, n)], ids="-".join)
def test_an_environment_with_a_part_of_the_ranks_variables_is_refused(
    names: tuple[str, ...], environment: Callable[[dict[str, str]], None]
) -> None:
    """What torch's own rendezvous would refuse, where the rest tells of other ranks: each would train on all data."""
    environment({name: FULL[name] for name in names})
    ranks, told = strategy_or_error()
    if not {"RANK", "WORLD_SIZE"} & set(names):
        assert ranks == 1  # an address alone tells of no other rank
        return
    have, lacking = told.split(" but not ")
    assert [name for name in FULL if f"{name}=" in have] == list(names)
    assert [name for name in FULL if name in lacking.partition(".")[0]] == [n for n in FULL if n not in names]
    assert "torchrun" in lacking
    assert "init_process_group" in lacking


@pytest.mark.parametrize("others", [{}, {"WORLD_SIZE": "2"}], ids=["RANK", "RANK-WORLD_SIZE"])
def test_the_first_rank_is_refused_as_the_others_are(
    others: dict[str, str], environment: Callable[[dict[str, str]], None]
) -> None:
    environment({"RANK": "0", **others})
    ranks, told = strategy_or_error()
    assert (ranks, "RANK=0" in told) == (0, True)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"},
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ],
    ids=lambda found: "-".join(found) or "none",
)
def test_an_environment_that_tells_of_no_other_rank_is_one_process(
    variables: dict[str, str], environment: Callable[[dict[str, str]], None]
) -> None:
    environment(variables)
    assert strategy_or_error() == (1, "")


def _in_a_group_of_the_callers() -> int:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        os.environ.pop(name, None)
    return tdi.Strategy(["cpu"]).world_size


def test_a_group_that_the_program_made_needs_no_environment() -> None:
    assert run_ranks(2, _in_a_group_of_the_callers) == [2, 2]


UNGUARDED = """
import sys, torch, torchdistinput as tdi
method, which = sys.argv[1:]
data, settings = torch.arange(4), dict(batch_size=2, num_workers=1, multiprocessing_context=method)
if which == "Strategy":
    loader = tdi.Strategy(["cpu"]).distribute_dataset(torch.utils.data.DataLoader([*data], **settings))
else:
    loader = tdi.DataLoader(data, **settings)
list(loader)
"""


def test_a_script_without_a_guard_is_refused_in_the_children_that_import_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = {**os.environ, **launched, "OMP_NUM_THREADS": "1"}

    def errors(arguments: tuple[str, str]) -> str:
        command = [sys.executable, str(script), *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 1
        return ended.stderr

    with ThreadPoolExecutor(4) as pool:
        found = pool.map(errors, [("spawn", "Strategy"), ("forkserver", "DataLoader")])
    for text in found:
        assert "InputError: Strategy(): this process is not started yet" in text
        assert "\nUse the proper idiom in the main module" in text
