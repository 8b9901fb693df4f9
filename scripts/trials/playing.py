"""One rank of a program. It tells the trial how far it is, and every sample that it is given, through a pipe."""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import torchdistinput as tdi
from tests.oracle.data import dataset_of, ids_in
from tests.oracle.playing import distributed
from trials.programs import Opening, Program, inside, turn_of

__all__ = ["Tell", "be_rank", "be_store", "teller"]

Tell = Callable[..., None]
HOST = "127.0.0.1"
_MOST_CHARACTERS = 1500  # of an error: a message to the trial is written at once, as one piece


def teller(pipe: int) -> Tell:
    """A function that writes a line into a pipe: when, which process, what."""

    def tell(what: str, *facts: Any) -> None:
        os.write(pipe, (json.dumps([time.monotonic(), os.getpid(), what, *facts]) + "\n").encode())

    return tell


def be_store(port: int, tell: Tell) -> None:
    """Hosts the store, as the agent of torchrun does, until the process is killed."""
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    tell("store")
    while store is not None:
        time.sleep(60)


def be_rank(program: Program, rank: int, port: int, folder: Path, tell: Tell) -> None:
    """Runs the program as a script that was launched for this rank.

    Args:
      program: the program.
      rank: the rank.
      port: of the store.
      folder: of the trial.
      tell: tells the trial.
    """
    _prepare(program, rank, port, folder, tell)
    tell("start")
    if program.own_group:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=program.timeout_seconds))
        tell("group")
    for number in range(program.rounds):
        _Round(program, number, folder, tell).play()
    if program.own_group and program.closes:
        dist.destroy_process_group()
    tell("end")
    if not program.exits_fully:
        _quit(0)


def _quit(code: int) -> None:
    """Ends as an interpreter does, but leaves its memory to the system."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - what the interpreter calls first
    atexit._run_exitfuncs()  # noqa: SLF001 - what it calls then
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _prepare(program: Program, rank: int, port: int, folder: Path, tell: Tell) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(program.world),
        LOCAL_WORLD_SIZE=str(program.world),
        MASTER_ADDR=HOST,
        MASTER_PORT=str(port),
        TMPDIR=str(folder / "temporary"),
    )
    if program.own_store:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    tempfile.tempdir = None
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    os.register_at_fork(after_in_child=lambda: tell("fork"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(program.inputs[0].seed)

    def tell_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = str(error)
        half = _MOST_CHARACTERS // 2
        tell("raised", kind.__name__, text if len(text) < 2 * half else f"{text[:half]} ... {text[-half:]}")
        traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        if not program.exits_fully:
            _quit(-signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = tell_error


class _Round:
    """Strategy, inputs and iterators, made and read once."""

    def __init__(self, program: Program, number: int, folder: Path, tell: Tell) -> None:
        self.program, self.number, self.tell = program, number, tell
        tell("strategy", number)
        self.strategy = tdi.Strategy(timeout_seconds=program.timeout_seconds)
        self.loaders = []
        for place, source in enumerate(program.inputs):
            tell("distribute", number)
            data = None if source.data == "function" else dataset_of(source, inside(folder, place))
            self.loaders.append(distributed(self.strategy, source, turn_of(source), data))
        self.steps = 0

    def play(self) -> None:
        kept = []
        for place, opening in enumerate(self.program.openings):
            number = self.number * len(self.program.openings) + place
            iterators = self._read(number, opening)
            if opening.leaves == "close":
                for iterator in iterators:
                    iterator.close()
            if opening.leaves == "keep":
                kept.append(iterators)
            del iterators
            self.tell("left", number)
        if self.program.closes:
            for loader in self.loaders:
                if isinstance(loader, tdi.DistributedDataset):
                    loader.close()

    def _read(self, number: int, opening: Opening) -> list[Any]:
        """Opens the iterators and reads so many steps. Tells of each step."""
        self.tell("iter", number)
        sources = [self.program.inputs[each] for each in opening.inputs]
        chosen = [self.loaders[each] for each in opening.inputs]
        iterators = [iter(loader) for loader in chosen]
        self.tell("open", number)
        steps = 0
        while steps != opening.steps:
            try:
                elements = [next(iterator) for iterator in iterators]
            except StopIteration:
                break
            steps += 1
            self.tell("step", number, [ids_in(*each) for each in zip(sources, elements, strict=True)])
            self._between_steps(chosen[0])
        return iterators

    def _between_steps(self, loader: Any) -> None:
        self.steps += 1
        if self.program.think_seconds:
            time.sleep(self.program.think_seconds)
        calls, every = self.program.calls, self.program.calls_every
        if not calls or self.steps % every:
            return
        call = calls[self.steps // every % len(calls)]
        self.tell("call", call)
        rank, world = dist.get_rank(), self.program.world
        if call == "reduce":
            check(self.strategy.reduce("SUM", torch.tensor(rank + 1)).item(), world * (world + 1) // 2)
        elif call == "gather":
            wanted = [other for other in range(world) for _ in range(other)]
            check(self.strategy.gather(torch.full((rank,), rank), 0).tolist(), wanted)
        else:
            json.dumps(loader.state_dict())


def check(found: object, wanted: object) -> None:
    """Raises ``AssertionError`` where a call gave something else than it must."""
    if found != wanted:
        raise AssertionError(f"wrong: {found} instead of {wanted}")


def prepare_to_fork() -> None:
    """What many forks have in common is loaded before."""
    # torch's store asks for the name of each address that connects: a lost packet takes 5 s else, as long as a timeout.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    gc.collect()
    gc.freeze()
