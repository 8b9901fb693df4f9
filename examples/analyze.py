"""Exact statistics of many files: each rank reads its own, and all get the same results, to the last bit.

    python examples/analyze.py
    torchrun --standalone --nproc-per-node 2 examples/analyze.py --plot lengths.png

The files are the sources of Python's standard library; the records are their lines. ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

import torchdistinput as tdi
from torchdistinput.statistics import Counts, Moments, Quantiles, Statistic

EDGES = list(range(0, 104, 4))


class Histogram(Statistic):
    """A statistic of one's own: the counts between ``EDGES``, and of what is beyond the last one."""

    def start(self) -> Any:
        """No counts."""
        return np.zeros(len(EDGES), np.int64)

    def update(self, state: Any, batch: Any) -> Any:
        """Counts the numbers of a batch."""
        return state + np.bincount(np.searchsorted(EDGES, batch, side="right") - 1, minlength=len(EDGES))

    def merge(self, state: Any, other: Any) -> Any:
        """The counts of both."""
        return state + other

    def result(self, state: Any) -> Any:
        """The counts."""
        return state


def lengths(lines: list[str]) -> Any:
    """The lengths of lines."""
    return np.array([len(line) for line in lines], np.int32)


def words(lines: list[str]) -> list[list[str]]:
    """The words of lines."""
    return [line.split() for line in lines]


def plot(path: Path, counts: Any, quantiles: Any) -> None:
    """Draws the histogram, with the quantiles as lines."""
    import matplotlib as mpl  # noqa: PLC0415 - only where a picture is wanted

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - as above

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.bar(EDGES[:-1], counts / 1000, width=np.diff(EDGES), align="edge", color="#7aa6c2", edgecolor="white")
    for value, name in zip(quantiles, ("1 %", "median", "99 %"), strict=True):
        axes.axvline(value, color="#b5493a", linewidth=1)
        axes.text(value, 1.02, f"{name}: {value:g}", transform=axes.get_xaxis_transform(), color="#b5493a")
    axes.set(xlabel="characters in a line", ylabel="lines, thousands", xlim=(0, EDGES[-1]))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Analyses, prints, and draws if asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", type=Path, help="where to write the picture of the histogram")
    arguments = parser.parse_args()
    strategy = tdi.Strategy(devices=["cpu"])
    library = Path(sysconfig.get_paths()["stdlib"])
    files = tdi.FileDataset([str(path) for path in sorted(library.glob("[a-d]*.py"))], tdi.readers.text_lines)
    found = tdi.analyze(
        files,
        {
            "length": (lengths, [Moments(), Quantiles([0.01, 0.5, 0.99]), Histogram()]),
            "words": (words, Counts(top=8)),
        },
        global_batch_size=4096,
        strategy=strategy,
    )
    moments, quantiles, histogram = found["length"]
    if strategy.input_pipeline_id == 0:
        print(f"{moments.count} lines, {moments.minimum} to {moments.maximum} characters long")
        print(f"mean {float(moments.mean)!r}, standard deviation {float(moments.std)!r}")
        print(f"quantiles of 1, 50 and 99 %: {quantiles.tolist()}; {histogram[-1]} lines of {EDGES[-1]} or more")
        frequent = zip(found["words"].values, found["words"].counts, strict=True)
        print("words: " + ", ".join(f"{word} {count}" for word, count in frequent))
        if arguments.plot is not None:
            plot(arguments.plot, histogram[:-1], quantiles)


if __name__ == "__main__":
    main()
