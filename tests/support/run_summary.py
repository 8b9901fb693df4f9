"""What is said at the end of a run: what it did not try, and which tests take too long."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

MOST_SECONDS = 5.0
"""That a test without the mark ``long`` may take alone on an idle machine."""

Report = pytest.TestReport | pytest.CollectReport


def not_tried(skipped: Iterable[Report], *, everything: bool) -> list[str]:
    """One line for each reason to skip; one for all packages that are not there."""
    reasons, packages = Counter[str](), Counter[str]()
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        absent = re.search(r"could not import '(\w+)", reason)
        (packages if absent else reasons)[absent[1] if absent else reason.removeprefix("Skipped: ")] += 1
    lines = ["a device: scripts/test_accelerator and scripts/test_gpu run tests/accelerator"]
    if not everything:
        lines.append("the tests with the mark long: scripts/test --all runs them")
    if packages:
        lines.append(f"packages that are not there ({packages.total()} skipped): {', '.join(sorted(packages))}")
    return [*lines, *(f"{reason} ({count} skipped)" for reason, count in reasons.items())]


def took_long(reports: Iterable[Report]) -> list[str]:
    """The tests that did in this run. What a module prepares for many of them does not count."""
    return [
        report.nodeid
        for report in reports
        if report.when == "call" and report.duration > MOST_SECONDS and "long" not in report.keywords
    ]


def take_long_alone(tests: list[str]) -> list[str] | None:
    """Those that do so again, twice; ``None`` where the machine does other work meanwhile."""
    limit = f"--durations-min={MOST_SECONDS}"
    for _ in range(2):
        if tests:
            was_idle = is_idle()
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0", limit, *tests]
            told = subprocess.run(command, capture_output=True, text=True, check=False).stdout if was_idle else ""
            tests = [test for test in tests if re.search(rf"^[\d.]+s call +{re.escape(test)}$", told, re.M)]
            if not (was_idle and is_idle()):
                return None
    return tests


def is_idle() -> bool:
    """Whether the processors had little to do for a second; where nobody tells, they are busy."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return False
    before = [int(number) for number in stat.read_text().split("\n", 1)[0].split()[1:]]
    time.sleep(1)
    after = [int(number) for number in stat.read_text().split("\n", 1)[0].split()[1:]]
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return spent[3] + spent[4] > 0.9 * sum(spent)  # idle, or waiting for a disk
