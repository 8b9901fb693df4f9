"""Tells where a test run stands that does not end: ``late_end.py PID SECONDS``, started when its last test is over.

If that process lives on for so long, each process of the run is listed, with what it waits for in the kernel. Those
that have the handler of ``tests/conftest.py`` write down their stacks.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The process, and whatever it started that lives."""
    parents = {}
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it ended meanwhile
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each and child != os.getpid()]
    return found


def tell(pid: int) -> None:
    place = Path(f"/proc/{pid}")
    with suppress(OSError):
        command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
        fields = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines() if ":\t" in line)
        waits = (place / "wchan").read_text()
        sys.stderr.write(f"process {pid}, {fields['State']}, in {waits}: {command}\n")
        sys.stderr.flush()
        if int(fields["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(1.0)  # so that one writes after the other


def main() -> None:
    pid, seconds = int(sys.argv[1]), float(sys.argv[2])
    with suppress(ProcessLookupError):  # it ended at once
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        if not ended.poll(1000 * seconds):
            sys.stderr.write(f"the test run {pid} did not end within {seconds:g} seconds after its last test:\n")
            for each in descendants(pid):
                tell(each)


if __name__ == "__main__":
    main()
