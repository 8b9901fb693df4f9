"""Rows of strings that are sliced and known, against those that are collated and looked at."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, default_collate

import torchdistinput as tdi


def files(folder: Path, sizes: tuple[int, ...] = (7, 0, 12, 5), bad: tuple[int, int] | None = None) -> list[str]:
    for number, size in enumerate(sizes):
        lines = [f"{number}.{line} \u00e4".encode() for line in range(size)]
        if bad is not None and bad[0] == number:
            lines[bad[1]] = b"\xff"
        (folder / f"{number}").write_bytes(b"".join(line + b"\n" for line in lines))
    return [str(folder / f"{number}") for number in range(len(sizes))]


def as_it_is(samples: list[str]) -> list[str]:
    return samples


@pytest.mark.parametrize("partial_batch", ["keep", "pad"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_delivered_is_the_same(tmp_path: Path, partial_batch: Any, replicas: int) -> None:
    names = files(tmp_path, (7, 3, 12, 6))  # 28: the last batch of 4 leaves nothing for the third replica
    found = []
    for collate in (default_collate, as_it_is):  # the second one is no collate function that the library knows
        loader = DataLoader(tdi.FileDataset(names, tdi.readers.text_lines), 6, collate_fn=collate)
        options = tdi.InputOptions(partial_batch=partial_batch)
        with tdi.Strategy(["cpu"] * replicas).distribute_dataset(loader, options) as dataset:
            steps, states = [], []
            for element in dataset:
                parts = [element] if partial_batch == "keep" else element
                pieces = [[part] if replicas == 1 else list(part.values) for part in parts]
                steps.append(([list(piece) for piece in pieces[0]], [mask.tolist() for mask in chain(*pieces[1:])]))
                states.append(dataset.state_dict())
                pieces[0][0].append("more")  # it is the loop's own, and no other batch has a part of it
            found.append((steps, states, str(dataset.element_spec)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 5
