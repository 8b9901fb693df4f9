"""What is said at the end of a run: what it did not try."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import pytest

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
