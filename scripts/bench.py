#!/usr/bin/env python
"""The library beside its peers and beside what no loader can beat.

    python scripts/bench.py                     every case, at full size (minutes)
    python scripts/bench.py memory files        these
    python scripts/bench.py --list              the cases, and what each of them measures
    python scripts/bench.py --json found.json --plot found.png

Each contender is measured in processes of its own, round after round in turns; medians count, and ratios are medians of
the rounds' ratios. Peers are measured where they are installed (``pip install -e '.[bench]'``). The machine should be
quiet. Prints Markdown; exits with 1 if something of ours could not be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benches import (
    analyze,
    balance,
    coordination,
    decode,
    files,
    memory,
    overhead,
    packing,
    parquet,
    ranks,
    resume,
    rss,
    shuffle,
    start,
    tar,
    tracing,
)
from benches.model import Case, Table
from benches.peers import missing
from benches.report import as_json, machine, markdown, plot, summary
from benches.running import Result, run_table

CASES: dict[str, tuple[Case, str]] = {
    "memory": (memory.tables, memory.__doc__ or ""),
    "overhead": (overhead.tables, overhead.__doc__ or ""),
    "coordination": (coordination.tables, coordination.__doc__ or ""),
    "shuffle": (shuffle.tables, shuffle.__doc__ or ""),
    "files": (files.tables, files.__doc__ or ""),
    "balance": (balance.tables, balance.__doc__ or ""),
    "packing": (packing.tables, packing.__doc__ or ""),
    "parquet": (parquet.tables, parquet.__doc__ or ""),
    "tar": (tar.tables, tar.__doc__ or ""),
    "tracing": (tracing.tables, tracing.__doc__ or ""),
    "analyze": (analyze.tables, analyze.__doc__ or ""),
    "decode": (decode.tables, decode.__doc__ or ""),
    "resume": (resume.tables, resume.__doc__ or ""),
    "ranks": (ranks.tables, ranks.__doc__ or ""),
    "start": (start.tables, start.__doc__ or ""),
    "rss": (rss.tables, rss.__doc__ or ""),
}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of: {', '.join(CASES)}; all, if none is named")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument("--small", action="store_true", help="sizes that only show that it works")
    parser.add_argument("--rounds", type=int, help="how often each contender is measured at most")
    parser.add_argument("--only", default="", help="contenders with this text in their names, and the limits")
    parser.add_argument("--world", type=int, help="only tables of so many ranks")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE.png", help="draw them; takes matplotlib")
    found = parser.parse_args(arguments)
    unknown = [case for case in found.cases if case not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if found.plot and missing(("matplotlib",)):
        parser.error("--plot takes matplotlib, which is not installed: pip install -e '.[bench]'")
    return found


def narrowed(tables: Sequence[Table], asked: argparse.Namespace) -> Iterator[Table]:
    """The tables with what was asked for; where there is none, that is said."""
    if not tables:
        print("Nothing of this case can be measured on this machine.\n")
    for table in tables:
        if asked.world in {None, table.world}:
            contenders = tuple(each for each in table.contenders if each.kind == "limit" or asked.only in each.name)
            names = {contender.name for contender in contenders}
            targets = tuple(target for target in table.targets if target.ours in names)
            rounds = asked.rounds or table.rounds
            yield dataclasses.replace(table, contenders=contenders, targets=targets, rounds=rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code."""
    asked = parsed(arguments)
    if asked.list:
        print("\n".join(f"{name:13} {said.splitlines()[0]}" for name, (_, said) in CASES.items()))
        return 0
    where = machine()
    results: list[Result] = []
    print(", ".join(f"{name}: {value}" for name, value in where.items()) + "\n", flush=True)
    for name in asked.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            for table in narrowed(CASES[name][0](small=asked.small, folder=Path(folder)), asked):
                results.append(run_table(name, table, _say))
                print(markdown(results[-1]), flush=True)
    print(summary(results))
    if asked.json:
        Path(asked.json).write_text(json.dumps(as_json(results, where, small=asked.small), indent=2) + "\n")
    if asked.plot:
        plot(results, asked.plot)
    return int(any(row.failure and row.contender.kind == "ours" for result in results for row in result.rows))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each rank has one thread
    sys.exit(main())
