"""Runs the tests of ``exchanged.py``, each in a process of its own, and prints how each ended, as JSON.

``python -m tests.data_loader.torch_suite.run [pattern ...]`` with the variables that ``exchanged.py`` needs. A test
that hangs, or that takes all memory, ends no other one.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import unittest
from collections.abc import Iterator
from multiprocessing.connection import Connection

SECONDS = 300.0  # for one test: some start dozens of processes, each of which imports torch
MEMORY = 6 << 30  # bytes of address space for one test


def main() -> None:
    """Prints one JSON object: the name of each test, and "passed", "skipped" or how it failed."""
    patterns = sys.argv[1:] or ["*"]
    outcomes = {}
    for name in names():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            outcomes[name] = outcome_of(name)
            sys.stderr.write(f"{name}: {outcomes[name].splitlines()[0]}\n")
    json.dump(outcomes, sys.stdout)


def names() -> Iterator[str]:
    """``Class.test`` for every test of the file."""
    module = importlib.import_module("tests.data_loader.torch_suite.exchanged")
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == module.__name__:
            for test in unittest.TestLoader().getTestCaseNames(value):
                yield f"{name}.{test}"


def outcome_of(name: str) -> str:
    """Runs one test in a fork."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(name, writer))
    process.start()
    writer.close()
    try:
        outcome = f"failed: it still ran after {SECONDS:.0f} s"
        if reader.poll(SECONDS):
            try:
                outcome = reader.recv()
            except EOFError:
                process.join()
                outcome = f"failed: its process ended with exit code {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        reader.close()
    return outcome


def _child(name: str, writer: Connection) -> None:
    os.setsid()  # its loader workers can be ended with it
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    suite = unittest.TestLoader().loadTestsFromName(f"tests.data_loader.torch_suite.exchanged.{name}")
    result = unittest.TestResult()
    suite.run(result)
    # Torch expects some to fail on its own machines: what counts is whether they do here.
    failures = [*result.errors, *result.failures, *result.expectedFailures]
    ended = "skipped" if result.skipped else "passed"
    writer.send(f"failed: {failures[0][1]}" if failures else ended)
    writer.close()


if __name__ == "__main__":
    main()
