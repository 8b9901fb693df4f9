"""Files in a bucket of Google's: gcsfs against a local emulator. The packages are of the extra "heavy"."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from typing import Any

import fsspec
import pytest

import torchdistinput as tdi
from torchdistinput import readers
from torchdistinput.testing import run_ranks

SIZES, BATCH = (30, 11, 42), 10
LINES = sum(SIZES)
WAYS = [(kind, policy) for kind in ("text", "parquet") for policy in ("FILE", "DATA")]


def options(url: str) -> dict[str, Any]:
    """The storage options of a client. Called in each process before it imports gcsfs."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else it asks Google for the kind of the bucket
    return {"token": "anon", "endpoint_url": url, "project": "test"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    emulator: Any = pytest.importorskip("gcp_storage_emulator.server")
    pa: Any = pytest.importorskip("pyarrow")
    pq: Any = pytest.importorskip("pyarrow.parquet")
    logging.getLogger("gcp_storage_emulator").setLevel("ERROR")
    with emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="data") as server:
        made, first = f"http://127.0.0.1:{server._api._httpd.server_port}", 0
        files = fsspec.filesystem("gs", **options(made))
        for number, size in enumerate(SIZES):
            numbers = range(first, first + size)
            files.pipe(f"data/text/{number}.txt", "".join(f"{each}\n" for each in numbers).encode())
            with files.open(f"data/parquet/{number}.parquet", "wb") as file:
                pq.write_table(pa.table({"x": [*numbers], "other": ["text"] * size}), file, row_group_size=10)
            first += size
        yield made


def loader_of(kind: str, policy: str, url: str) -> tdi.DistributedDataset:
    if kind == "text":
        files = tdi.FileDataset("gs://data/text/*.txt", readers.text_lines, map_fn=int, storage_options=options(url))
    else:
        files = tdi.FileDataset("gs://data/parquet/*", readers.parquet(["x"]), storage_options=options(url))
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    return tdi.Strategy(["cpu"]).distribute_dataset(files, chosen, global_batch_size=BATCH)


def steps(loader: tdi.DistributedDataset, most: int | None = None) -> list[list[int]]:
    made: list[list[int]] = []
    with closing(iter(loader)) as iterator:
        for part in iterator:
            made.append((part["x"] if isinstance(part, dict) else part).tolist())
            if len(made) == most:
                break
    return made


def read(url: str, states: dict[Any, Any]) -> dict[Any, Any]:
    """One rank: whole epochs, and an epoch that goes on from a state and is left."""
    found: dict[Any, Any] = {}
    for way in WAYS:
        found[way] = steps(loader_of(*way, url))
        loader = loader_of(*way, url)
        if way in states:
            loader.load_state_dict(states[way])
        found["left", way] = steps(loader, 2), loader.state_dict()
    return found


def numbers(ranks: list[Any], what: Any) -> list[int]:
    """The records of all ranks, in the order of the global batches."""
    parts = [rank[what] if isinstance(rank[what], list) else rank[what][0] for rank in ranks]
    return [number for step in zip(*parts, strict=True) for number in chain.from_iterable(step)]


def test_each_record_of_a_bucket_comes_once_and_a_resume_goes_on_at_another_world_size(url: str) -> None:
    two = run_ranks(2, read, url, {})
    three = run_ranks(3, read, url, {way: two[0]["left", way][1] for way in WAYS})
    for way in WAYS:
        for ranks in (two, three):
            found = numbers(ranks, way)
            assert sorted(found) == [*range(LINES)]
            assert way[1] == "FILE" or found == [*range(LINES)]
        rest = loader_of(*way, url)
        rest.load_state_dict(three[0]["left", way][1])
        parts = [numbers(two, ("left", way)), numbers(three, ("left", way)), [*chain.from_iterable(steps(rest))]]
        assert sorted(chain.from_iterable(parts)) == [*range(LINES)]


def test_a_pattern_that_matches_nothing_and_an_object_that_is_gone_are_told(url: str) -> None:
    with pytest.raises(tdi.SourceError, match=r"gs://data/none/\*\.txt: the pattern matches no file"):
        tdi.FileDataset("gs://data/none/*.txt", readers.text_lines, storage_options=options(url))
    gone = tdi.FileDataset(["gs://data/text/9.txt"], readers.text_lines, storage_options=options(url))
    with pytest.raises(tdi.SourceError, match=r"gs://data/text/9\.txt: .*FileNotFoundError"):
        steps(tdi.Strategy(["cpu"]).distribute_dataset(gone, global_batch_size=BATCH))
