"""The soak, for a few seconds; ``python scripts/soak.py`` is the long form."""

from __future__ import annotations

import re

from tests.support.interpreters import Interpreters, printed

EPOCHS = 40


def test_short_epochs_with_breaks_faults_and_resumes_are_exact_and_leave_nothing_behind(
    interpreters: Interpreters,
) -> None:
    """A wrong count, or a process that has grown, ends the script with 1, and its output says the seed."""
    told = printed(interpreters.run(["scripts/soak.py", "--epochs", str(EPOCHS), "--seed", "1"]))
    summary = re.search(rf"^{EPOCHS} epochs \((.*)\), (\d+) steps, (\d+) samples, each as it should be", told, re.M)
    assert summary is not None, told
    happened = {kind for _, kind in re.findall(r"(\d+) (fault, resume|\w+)", summary[1])}
    assert happened == {"whole", "break", "resume", "fault", "fault, resume"}
    assert int(summary[3]) > int(summary[2]) > EPOCHS
