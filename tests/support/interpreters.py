"""Scripts in interpreters of their own, which share the seconds that it takes to import torch.

``run_ranks`` ends its processes in a way of its own; these end as a user's do, which is where a library fails that
started threads. Beside that, a script notices only that torch was there at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, final

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
HANG_BOUND_SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """How a script ended, and what it printed; ``pid`` is also the number of its process group."""

    pid: int
    code: int
    output: str
    errors: str


@final
class Interpreters:
    """A process that has imported torch, and forks for each script."""

    def __enter__(self) -> Interpreters:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "interpreter.py")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process as process:
            # The end of its input would not be enough: whoever was forked here, and lives, has that open too.
            print(file=pipe(process.stdin), flush=True)
            try:
                process.wait(HANG_BOUND_SECONDS / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                raise

    def run(
        self, *commands: Sequence[str], places: Sequence[Mapping[str, str]] = (), folder: Path = ROOT
    ) -> list[Ended]:
        """Starts scripts at once, and waits for their ends; a hang takes down whatever they started.

        Args:
          *commands: the path of a script, with its arguments.
          places: the environment of each, beside that of this process.
          folder: where they start.
        """
        with tempfile.TemporaryDirectory(prefix="scripts-") as place:
            jobs = [
                {
                    "command": [str(ROOT / command[0]), *command[1:]],
                    "environment": dict(places[number]) if places else {},
                    "folder": str(folder),
                    "outputs": [f"{place}/{number}.{stream}" for stream in ("out", "err")],
                }
                for number, command in enumerate(commands)
            ]
            print(json.dumps(jobs), file=pipe(self._process.stdin), flush=True)
            pids = json.loads(pipe(self._process.stdout).readline())
            too_late = threading.Timer(HANG_BOUND_SECONDS, kill_groups, [pids])
            too_late.start()
            codes = json.loads(pipe(self._process.stdout).readline())
            too_late.cancel()
            too_late.join()
            texts = [[Path(path).read_text() for path in job["outputs"]] for job in jobs]
            return [Ended(pid, code, *text) for pid, code, text in zip(pids, codes, texts, strict=True)]

    def run_as_torchrun(self, world: int, *command: str, folder: Path = ROOT) -> list[Ended]:
        """The ranks of a script, told what torchrun tells them; the store is not theirs, as under torchrun."""
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs leave it out
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        told = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        places = [{**told, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
        return self.run(*[command] * world, places=places, folder=folder)


def printed(ended: Sequence[Ended]) -> str:
    """All that scripts printed which have to end well."""
    for rank, each in enumerate(ended):
        assert each.code == 0, f"process {rank} ended with {each.code}:\n{each.output}\n{each.errors}"
    return "".join(own_output(each) for each in ended)


def own_output(ended: Ended) -> str:
    """What a script printed itself. Gloo of torch 2.8 and older prints its connections too, also amid a line."""
    return re.sub(r"\[Gloo\] Rank \d+ is connected to [^\n]*\n", "", ended.output)


def kill_groups(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def pipe(end: IO[str] | None) -> Any:
    assert end is not None
    return end
