"""Several hosts on one machine: network namespaces, joined by a switch that is a namespace too.

A host is a process that holds namespaces for its network, its name and its ``/etc/hosts``. It reads from a pipe of the
test's process, so it ends with that process, however that ends; the system then removes all that belongs to it. Ranks
move into a host (``Host.enter``, ``run_on``), and commands start in one (``Host.popen``). A test changes the network
while they run: ``Lab.unplug``, ``Lab.plug_in``, and ``ip`` or ``nft`` by ``Host.run``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from torchdistinput.testing import run_ranks

T = TypeVar("T")

_NAMESPACES: Final = ("net", "uts", "mnt")
_HOLD: Final = "ip link set lo up && hostname {name} && mount --bind {hosts} /etc/hosts && echo ready && read end"
_END_SECONDS: Final = 10.0
_CLONE_FS: Final = 0x200
PORT: Final = 29500
"""The port of the store, where the test names no other."""


@dataclass(frozen=True)
class Host:
    """A host. It can be sent to other processes.

    Args:
      pid: the process that holds its namespaces.
      name: its name; ``hosta``, ``hostb``, ... for those that a ``Lab`` makes.
      address: its address on the interface ``d0``.
    """

    pid: int
    name: str
    address: str

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on this host, in a session of its own."""
        inside = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", *command]
        return subprocess.Popen(inside, start_new_session=True, **options)

    def run(self, command: str) -> str:
        """Runs a line of a shell on this host, and returns what it printed; raises if it fails."""
        process = self.popen("sh", "-c", command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = process.communicate(timeout=_END_SECONDS)
        assert process.returncode == 0, f"{command}: {output}"
        return str(output)

    def enter(self) -> None:
        """Moves this thread, and what it starts later, to this host; other threads stay where they are."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.unshare(_CLONE_FS)  # else a process of several threads may not change its mounts
        for name in _NAMESPACES:
            descriptor = os.open(f"/proc/{self.pid}/ns/{name}", os.O_RDONLY)
            try:
                if libc.setns(descriptor, 0):
                    raise OSError(ctypes.get_errno(), f"{self.name} cannot be entered ({name})")
            finally:
                os.close(descriptor)

    def pids(self) -> list[int]:
        """All processes on this host, without its holder."""
        found: list[int] = []
        try:
            own = os.stat(f"/proc/{self.pid}/ns/net").st_ino
        except FileNotFoundError:  # the host is gone
            return found
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "ns" / "net").stat().st_ino == own and int(folder.name) != self.pid:
                    found.append(int(folder.name))
        return found

    def kill(self) -> None:
        """Ends all processes on this host at once, as a loss of power does; the host itself stays."""
        until = time.monotonic() + _END_SECONDS
        while (pids := self.pids()) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


@dataclass(frozen=True)
class Lab:
    """Hosts at a switch, with the addresses 10.77.0.1, 10.77.0.2, ... It can be sent to other processes.

    Args:
      hosts: the hosts.
      switch: holds the bridge ``br0``, to which ``v0``, ``v1``, ... lead, the other ends of the hosts' ``d0``.
    """

    hosts: Sequence[Host]
    switch: Host

    def unplug(self, number: int) -> None:
        """Takes a host from the switch: nothing arrives any more, and neither side is told."""
        self.switch.run(f"ip link set v{number} nomaster")

    def plug_in(self, number: int) -> None:
        """Undoes ``unplug``."""
        self.switch.run(f"ip link set v{number} master br0")


def why_not() -> str | None:
    """Why hosts cannot be made here, or ``None``."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = [name for name in ("ip", "unshare", "nsenter", "mount", "hostname") if shutil.which(name) is None]
    if absent:
        return f"network namespaces need {', '.join(absent)}"
    with contextlib.ExitStack() as stack:
        try:
            _made(stack, [""])
        except (AssertionError, OSError) as error:
            return f"network namespaces cannot be made here: {error}"
    return None


@contextlib.contextmanager
def hosts(number: int, names: Sequence[str] = ()) -> Iterator[Lab]:
    """Makes hosts, and in the end kills what still runs on them and removes them, also after a failure.

    Args:
      number: how many.
      names: the content of ``/etc/hosts`` on each host; by default it has the names of all hosts.
    """
    lines = ["127.0.0.1 localhost", *(f"{_address(place)} {_name(place)}" for place in range(number))]
    names = names or ["\n".join(lines)] * number
    with contextlib.ExitStack() as stack:
        yield _made(stack, names)


def _address(place: int) -> str:
    return f"10.77.0.{place + 1}"


def _name(place: int) -> str:
    return f"host{chr(ord('a') + place)}"


def _made(stack: contextlib.ExitStack, names: Sequence[str]) -> Lab:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
    switch = stack.enter_context(_held("switch", "", Path("/etc/hosts")))
    switch.run("ip link add br0 type bridge && ip link set br0 up")
    found = []
    for place, content in enumerate(names):
        name = _name(place)
        (folder / name).write_text(content)
        host = stack.enter_context(_held(name, _address(place), folder / name))
        host.run(
            f"ip link add d0 type veth peer name v{place} netns {switch.pid} && ip addr add {host.address}/24 dev d0 "
            "&& ip link set d0 up"
        )
        switch.run(f"ip link set v{place} master br0 up")
        found.append(host)
    return Lab(found, switch)


@contextlib.contextmanager
def _held(name: str, address: str, names: Path) -> Iterator[Host]:
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _HOLD.format(name=name, hosts=names)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as holder:
        try:
            assert holder.stdout is not None
            said = holder.stdout.readline()
            assert said == b"ready\n", said.decode(errors="replace")
            host = Host(holder.pid, name, address)
            try:
                yield host
            finally:
                host.kill()
        finally:
            holder.kill()


def run_on(
    lab: Lab,
    fn: Callable[..., T],
    *args: object,
    places: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 90.0,
) -> list[T]:
    """Calls ``fn(*args)`` on each rank, of which each host has one, and returns the results; see ``run_ranks``.

    The ranks have torchrun's variables; the store is at the first host.

    Args:
      lab: the hosts.
      fn: the function.
      *args: what it gets.
      places: the number of the host of each rank; by default rank 0 is on the first host, and so on.
      environment: variables of all ranks.
      timeout_seconds: the bound on the whole run.
    """
    chosen = [lab.hosts[place] for place in (range(len(lab.hosts)) if places is None else places)]
    job = (lab.hosts[0].address, dict(environment or {}), fn, args)
    return run_ranks(len(chosen), _on_host, chosen, job, init_group=False, timeout_seconds=timeout_seconds)


def _on_host(chosen: Sequence[Host], job: tuple[str, Mapping[str, str], Callable[..., T], tuple[Any, ...]]) -> T:
    address, environment, fn, args = job
    host = chosen[int(os.environ["RANK"])]
    host.enter()
    os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": str(PORT), **environment})
    return fn(*args)
