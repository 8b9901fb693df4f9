"""Options and fixtures of the whole suite."""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import _utils as data_utils

from tests.support import run_summary
from tests.support.interpreters import Interpreters
from torchdistinput.testing import ranks

GRACE_SECONDS = 30.0
END_SECONDS = 60.0
LONG_SECONDS = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cells",
        action="store_true",
        help="run the full product of the long matrices, instead of every cell once with its other settings rotated",
    )
    parser.addoption(
        "--drawn-by",
        type=int,
        default=date.today().toordinal(),
        help="the seed of random programs, by default that of the day: the number that a failed run has shown",
    )
    parser.addoption(
        "--not-tried",
        action="store_true",
        help="a green run tells what it did not try",
    )
    parser.addoption(
        "--idle",
        action="store_true",
        help=f"the machine is idle: a test of {LONG_SECONDS:g} s of processor time fails without the mark long",
    )
    parser.addoption(
        "--accelerator",
        action="store_true",
        help="collect tests/accelerator, and give it alone: it may register a simulated accelerator in the process",
    )


def pytest_configure() -> None:
    # torch's store asks for the name of each address that connects. Where a packet to a name server is lost, all ranks
    # would wait for it 5 seconds, which is longer than some tests let a strategy wait.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")
    if sys.platform == "linux":  # the default before Python 3.14; tests that are about the others name them
        multiprocessing.set_start_method("fork")
    # Whoever starts the fork server first: without it each of its processes would import torch by itself.
    ranks._PRELOADED.append("tests.support.preloaded")
    multiprocessing.set_forkserver_preload(ranks._PRELOADED)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so; tests send the signal
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How long torch waits for a loader worker that does not leave, before torch ends it: 5 seconds by default.
    data_utils.MP_STATUS_CHECK_INTERVAL = 0.5
    if sys.platform == "linux":  # asked for by late_end.py; whoever is forked here has it too
        faulthandler.register(signal.SIGUSR1, file=os.dup(2))


def pytest_report_header(config: pytest.Config) -> str:
    return f"random programs: --drawn-by={config.getoption('--drawn-by')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the ``long`` ones; the packages of others last: with them in memory, each fork takes much longer."""
    everything = config.getoption("--all-cells")
    items[:] = [each for each in items if everything or each.get_closest_marker("long") is None]
    items.sort(key=lambda item: "ecosystem" in item.path.parts)


_LOADED = [0]  # modules, when what is loaded was frozen


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What is loaded by now stays: each collection of garbage would look at all of torch again."""
    if len(sys.modules) > _LOADED[0]:  # also where a test loads a profiler, or a compiler
        gc.collect()
        gc.freeze()
        _LOADED[0] = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """With ``--idle`` a test fails that takes long without the mark; only there: a busy machine takes longer."""
    before = os.times()
    yield
    used = sum(os.times()[:4]) - sum(before[:4])  # of this process, and of its children that have ended
    if item.config.getoption("--idle") and used > LONG_SECONDS and item.get_closest_marker("long") is None:
        pytest.fail(f"it took {used:.1f} s of processor time; make it shorter, or give it the mark long", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """What a green run did not try, when all else is over."""
    yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")  # not in the processes of xdist
    if terminal is None or not session.config.option.not_tried or session.exitstatus != pytest.ExitCode.OK:
        return
    for line in run_summary.not_tried(terminal.stats.get("skipped", []), everything=session.config.option.all_cells):
        terminal.write_line(f"not tried: {line}")


def pytest_unconfigure() -> None:
    """A run has stood still at its end, and nobody knew where."""
    if sys.platform == "linux":
        watch = str(Path(__file__).parent / "support" / "late_end.py")
        command = [sys.executable, "-S", watch, str(os.getpid()), str(END_SECONDS)]
        os.posix_spawn(sys.executable, command, os.environ)  # nobody waits for its end, of which Popen would warn


@pytest.fixture(scope="session")
def all_cells(pytestconfig: pytest.Config) -> bool:
    """Whether the full product of a matrix is asked for; ``tests.support.cells.cells`` takes it."""
    return bool(pytestconfig.getoption("--all-cells"))


@pytest.fixture(scope="session")
def drawn_by(pytestconfig: pytest.Config) -> int:
    """The seed by which random programs are drawn."""
    return int(pytestconfig.getoption("--drawn-by"))


@pytest.fixture(scope="session")
def interpreters() -> Iterator[Interpreters]:
    """Starts scripts; importing torch takes longer than most of them."""
    with Interpreters() as started:
        yield started


@pytest.fixture(autouse=True)
def what_a_test_made_ends_with_it() -> Iterator[None]:
    """Whoever leaves something behind is named here, and no test after it, which would meet it.

    Garbage is collected, so that no iterator of one test ends amid another one.
    """
    threads, children, settings = set(threading.enumerate()), set(multiprocessing.active_children()), settings_now()
    yield
    gc.collect()
    changed = {name: value for name, value in settings_now().items() if value != settings[name]}
    assert not changed, f"changed and not set back: {changed}"
    until = time.monotonic() + GRACE_SECONDS
    while left := [
        *(each for each in threading.enumerate() if each not in threads and must_end(each)),
        *(each for each in multiprocessing.active_children() if each not in children),
    ]:
        assert time.monotonic() < until, f"left behind: {left}"
        gc.collect()  # a caught exception keeps the iterator alive that its traceback passes through
        time.sleep(0.02)


def must_end(thread: threading.Thread) -> bool:
    """Whether it delays the exit, or is this library's."""
    return not thread.daemon or "torchdistinput" in thread.name


def settings_now() -> dict[str, Any]:
    """What tests change in the whole process, and set back."""
    log = logging.getLogger("torchdistinput")
    return {
        "folder": os.getcwd(),
        "garbage collection": gc.isenabled(),
        "functions that trace and profile": (sys.gettrace(), sys.getprofile()),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "logging": (log.level, log.handlers[:], logging.root.manager.disable),
        "default process group": dist.is_initialized(),
        "modes of torch": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }
