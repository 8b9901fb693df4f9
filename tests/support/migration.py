"""The tables of ``examples/coming_from.md``: what a user has, and what to write instead, as code that the tests run.

The names in a cell are ``N`` ranks, ``B`` samples per rank, ``G`` per global batch, and what earlier rows made.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

PAGE = (Path(__file__).parents[2] / "examples" / "coming_from.md").read_text()


class Row(NamedTuple):
    """The code as it was, a line each, and the code that takes its place; none if there is nothing to do."""

    before: tuple[str, ...]
    after: tuple[str, ...]


def rows(library: str, *names: str) -> dict[str, Row]:
    """The rows of a table, by the names that the tests give them in turn."""
    table = PAGE.partition(f"\n## From {library}\n")[2].partition("\n## ")[0]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    cells = [[tuple(re.findall(r"`(.+?)`(?:<br>|$)", cell)) for cell in line[:2]] for line in lines]
    return {name: Row(*row) for name, row in zip(names, cells, strict=True)}


def run(code: tuple[str, ...], scope: dict[str, Any]) -> dict[str, Any]:
    """Executes a cell with the names it needs; what it assigns is added to them."""
    exec("\n".join(code), scope)
    return scope


def result(code: tuple[str, ...], scope: dict[str, Any]) -> Any:
    """The value of a cell's last line, an expression, after the others were executed."""
    return eval(code[-1], run(code[:-1], scope))


FROM_SAMPLER = rows(
    "`DistributedSampler`",
    *("world", "divide", "drop-in", "epochs", "same steps", "other samplers", "device", "loss", "metric"),
)
FROM_ACCELERATE = rows(
    "accelerate",
    *("world", "divide", "split_batches", "even_batches", "gather_for_metrics", "ordered", "pad", "reduce"),
    *("backward", "prepare"),
)
FROM_TENSORFLOW = rows(
    "`tf.distribute`",
    *("strategy", "dataset", "function", "policy", "step", "loss", "reduce", "gather", "local", "values", "context"),
    *("optional", "spec", "list_files", "records"),
)
FROM_WEBDATASET = rows("webdataset", "read", "decode", "decoder", "shuffle", "split")
FROM_TORCHDATA = rows("torchdata", "loader", "save", "load")
FROM_GRAIN = rows("Grain", "shard", "shuffle", "mix", "state")
FROM_MOSAICML = rows("MosaicML's streaming", "loader", "state", "nodes", "mix")
FROM_LITDATA = rows("LitData", "loader", "state", "tail")
TABLES = [
    *(FROM_SAMPLER, FROM_ACCELERATE, FROM_TENSORFLOW, FROM_WEBDATASET),
    *(FROM_TORCHDATA, FROM_GRAIN, FROM_MOSAICML, FROM_LITDATA),
]
