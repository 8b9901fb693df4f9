"""Options and fixtures of the whole suite."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from datetime import date
from pathlib import Path

import pytest
from torch.utils.data import _utils as data_utils

from tests.support import run_summary
from tests.support.interpreters import Interpreters
from torchdistinput.testing import ranks

THREAD_GRACE_SECONDS = 10.0
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
def no_thread_is_left_behind() -> Iterator[None]:
    """Every test ends with the threads it began with: none that delays the exit, none of this library's."""
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + THREAD_GRACE_SECONDS
    while leaked := [thread for thread in threading.enumerate() if thread not in before and must_end(thread)]:
        assert time.monotonic() < until, f"threads left behind: {leaked}"
        gc.collect()  # a caught exception keeps the iterator alive that its traceback passes through
        time.sleep(0.02)


def must_end(thread: threading.Thread) -> bool:
    return not thread.daemon or "torchdistinput" in thread.name
