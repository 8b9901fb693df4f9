"""What was found: Markdown, JSON, a picture."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benches.model import Column
from benches.peers import peer, versions
from benches.running import Reached, Result, Row

__all__ = ["as_json", "machine", "markdown", "plot", "summary"]

_PACKAGES = (
    "torch", "numpy", "accelerate", "torchdata", "datasets", "grain", "mosaicml-streaming", "webdataset", "spdl",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Where and when."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "accelerator": None if accelerator is None else accelerator.type,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": versions(_PACKAGES),
    }


def _cpu() -> str:
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def as_json(results: Sequence[Result], where: dict[str, Any], *, small: bool) -> dict[str, Any]:
    """All of it."""
    return {"machine": where, "small": small, "tables": [_table(result) for result in results]}


def _table(result: Result) -> dict[str, Any]:
    table = result.table
    return {
        "case": result.case,
        "title": table.title,
        "world": table.world,
        "columns": {column.name: column.better for column in table.columns},
        "rows": [_row(row, table.columns) for row in result.rows],
        "absent": result.absent,
        "targets": [_target(reached) for reached in result.reached],
    }


def _row(row: Row, columns: Sequence[Column]) -> dict[str, Any]:
    return {
        "name": row.contender.name,
        "kind": row.contender.kind,
        "median": {column.name: row.median(column.name) for column in columns},
        "rounds": row.rounds,
        "failure": row.failure,
    }


def _target(reached: Reached) -> dict[str, Any]:
    return {
        "column": reached.target.column,
        "ours": reached.target.ours,
        "against": reached.other,
        "at_least" if reached.at_least else "at_most": reached.target.bound,
        "value": reached.value,
        "met": reached.met,
    }


def markdown(result: Result) -> str:
    """One table, and what became of its targets."""
    table = result.table
    world = "1 process" if table.world == 1 else f"{table.world} processes"
    head = ["", *(column.name for column in table.columns)]
    lines = [f"### {table.title}, {world}", "", _line(head), _line(["---", *["---:"] * len(table.columns)])]
    limits = [row for row in result.rows if row.contender.kind == "limit"]
    for row in result.rows:
        name = f"**{row.contender.name}**" if row.contender.kind == "ours" else row.contender.name
        name = f"limit: {name}" if row.contender.kind == "limit" else name
        cells = [_cell(row, column, limits) for column in table.columns]
        lines.append(_line([name, *cells]))
    lines += [""] + [_sentence(reached) for reached in result.reached]
    lines += [f"Not installed: {', '.join(result.absent)}."] if result.absent else []
    lines += [table.note] if table.note else []
    return "\n".join(lines) + "\n"


def _cell(row: Row, column: Column, limits: Sequence[Row]) -> str:
    median = row.median(column.name)
    if median is None:
        return "failed" if row.failure else ""
    limit = limits[0].median(column.name) if limits else None
    if not limit or not median or column.better == "less":
        return shown(median)
    return f"{shown(median)} ({median / limit:.2g})"


def _sentence(reached: Reached) -> str:
    return "- " + " · ".join(part for part in _parts(reached) if part)


def _parts(reached: Reached) -> tuple[str, str, str]:
    target = reached.target
    against = f" against {reached.other}" if reached.other else ""
    value = "open" if reached.value is None else shown(reached.value) + (" x" if target.against else "")
    wanted = f"{'at least' if reached.at_least else 'at most'} {target.bound:g}"
    mark = {True: "met", False: "**missed**", None: "open"}[reached.met]
    return f"{target.ours}, {target.column}{against}: {value}", wanted, mark


def summary(results: Sequence[Result]) -> str:
    """One line for each target, for the README."""
    lines = [_line(["case", "what", "measured", "wanted", ""]), _line(["---"] * 5)]
    for result in results:
        for reached in result.reached:
            what, wanted, mark = _parts(reached)
            said, _, value = what.rpartition(": ")
            title = result.table.title + (f", world {result.table.world}" if result.table.world > 1 else "")
            lines.append(_line([title, said, value, wanted, mark]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown(value: float) -> str:
    """A figure with three digits that count."""
    for size, unit in ((1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            return f"{value / (1e6 if unit == ' M' else 1e3):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def plot(results: Sequence[Result], path: str) -> None:
    """Bars of the first column of every table. Takes matplotlib (the extra ``bench``).

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    peer("matplotlib").use("Agg")
    pyplot = peer("matplotlib.pyplot")
    drawn = [result for result in results if any(row.rounds for row in result.rows)]
    heights = [1.0 + 0.3 * len(result.rows) for result in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(9, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    colors = {"limit": "0.75", "ours": "tab:blue", "peer": "tab:orange", "before": "tab:brown"}
    for axis, result in zip(axes[:, 0], drawn, strict=True):
        column = result.table.columns[0]
        rows = [row for row in reversed(result.rows) if row.median(column.name) is not None]
        figures = [row.median(column.name) or 0.0 for row in rows]
        names, kinds = [row.contender.name for row in rows], [row.contender.kind for row in rows]
        axis.barh(names, figures, color=[colors[kind] for kind in kinds])
        if min(figures) * 30 < max(figures):
            axis.set_xscale("log")
        axis.set_title(f"{result.case}: {result.table.title}, world {result.table.world}: {column.name}", fontsize=9)
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=120)
