"""The soak, for a few seconds; ``python scripts/soak.py`` is the long form."""

from __future__ import annotations

import re

from tests.support.interpreters import Interpreters, printed

PROGRAMS = 12


def test_random_programs_one_after_the_other_are_exact_and_leave_nothing_behind(interpreters: Interpreters) -> None:
    """A wrong log, or a process that has grown, ends the script with 1, and its output says the seed."""
    told = printed(interpreters.run(["scripts/soak.py", "--programs", str(PROGRAMS), "--seed", "1"]))
    summary = re.search(rf"^{PROGRAMS} programs: (.*); each as the laws say", told, re.M)
    assert summary is not None, told
    happened = {what: int(number) for number, what in re.findall(r"(\d+) (\w[\w ]*)", summary[1])}
    assert happened["steps"] > happened["turns"] >= PROGRAMS
    assert 0 < happened["no error"] < happened["turns"]
