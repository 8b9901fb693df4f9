"""Files in a bucket: s3fs and gcsfs against local servers, which also fail, cut bodies, stall, and refuse.

gcsfs and its server are of the extra "heavy".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import torchdistinput as tdi
from tests.support.object_store import SECRET, Fault, ObjectStore, object_store
from tests.support.packages import package
from torchdistinput import readers
from torchdistinput.testing import check_source

pa, pq = package("pyarrow"), package("pyarrow.parquet")

SIZES, BATCH = (30, 11, 42), 10
LINES = sum(SIZES)
KINDS = ("text", "parquet")

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs does so


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    if request.param == "gs":
        pytest.importorskip("gcp_storage_emulator")
    with object_store(request.param) as store:
        files, first = store.filesystem(), 0
        for number, size in enumerate(SIZES):
            numbers = range(first, first + size)
            files.pipe(f"data/text/{number}.txt", "".join(f"{each}\n" for each in numbers).encode())
            with files.open(f"data/parquet/{number}.parquet", "wb") as file:
                pq.write_table(pa.table({"x": [*numbers], "other": ["text"] * size}), file, row_group_size=10)
            first += size
        wide = pa.table({name: np.random.default_rng(0).random(100_000) for name in "abcd"})
        with files.open("data/wide.parquet", "wb") as file:
            pq.write_table(wide, file, row_group_size=25_000, compression="none", use_dictionary=False)
        yield store


async def at_once(seconds: float) -> None:
    """The wait of a client before it asks again."""
    await asyncio.sleep(0)


@pytest.fixture
def store(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server without orders to fail. gcsfs asks six times, and waits for half a minute between."""
    if bucket.protocol == "gs":
        monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=at_once))
    bucket.requests.clear()
    bucket.faults.clear()
    return bucket


def number_of(line: str) -> int:
    return int(line)


def dataset(kind: str, store: ObjectStore, options: dict[str, Any] | None = None, **order: Any) -> tdi.FileDataset:
    options = options or store.options()
    folder = f"{store.protocol}://data/{kind}"
    if kind == "parquet":
        return tdi.FileDataset(f"{folder}/*.parquet", readers.parquet(["x"]), storage_options=options, **order)
    order = {"map_fn": number_of, **order}
    return tdi.FileDataset(f"{folder}/*.txt", readers.text_lines, storage_options=options, **order)


def steps(loader: tdi.DistributedDataset) -> list[list[int]]:
    return [(part["x"] if isinstance(part, dict) else part).tolist() for part in loader]


def loader_of(
    kind: str, policy: str, store: ObjectStore, options: dict[str, Any] | None = None
) -> tdi.DistributedDataset:
    chosen = tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy[policy])
    files = dataset(kind, store, options)
    return tdi.Strategy(["cpu"]).distribute_dataset(files, chosen, global_batch_size=BATCH)


def test_each_record_of_a_bucket_comes_once_and_a_resume_goes_on_at_another_world_size(
    store: ObjectStore, all_cells: bool
) -> None:
    kinds = KINDS if all_cells else KINDS[:1]
    check_source({kind: partial(dataset, kind, store) for kind in kinds}, worlds=(2, 1))
    for kind in KINDS:
        assert [*chain.from_iterable(steps(loader_of(kind, "FILE", store)))] == [*range(LINES)]


def test_only_the_wanted_columns_are_asked_for_in_few_requests(store: ObjectStore) -> None:
    name = f"{store.protocol}://data/wide.parquet"
    files = tdi.FileDataset(name, readers.parquet(["b"]), storage_options=store.options())
    loader = tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=1000)
    assert sum(len(batch["b"]) for batch in loader) == 100_000
    column = 100_000 * 8
    assert column <= store.bytes_got("wide.parquet") < 1.2 * column
    asked = [each for each in store.requests if each[:2] == ("GET", store.content_of("wide.parquet"))]
    assert len(asked) <= 4 * 2 + 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["500", "503", "cut", "stall"])
def test_what_passes_is_asked_again_and_nothing_is_lost(fault: str, kind: str, store: ObjectStore) -> None:
    store.faults.append(Fault(fault, path=store.content_of(f"{kind}/1"), times=2))
    loader = loader_of(kind, "FILE", store, store.impatient_options())
    assert [*chain.from_iterable(steps(loader))] == [*range(LINES)]
    assert store.faults[0].times == 0


def test_refused_credentials_are_told_at_once_without_the_secret(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    files = dataset("text", store)
    store.requests.clear()
    store.faults += [Fault("403", method, "text/0", times=100) for method in ("GET", "HEAD")]
    with pytest.raises(tdi.SourceError, match=r"://data/text/0\.txt: .*(PermissionError|Forbidden)") as caught:
        steps(tdi.Strategy(["cpu"]).distribute_dataset(files, global_batch_size=BATCH))
    assert SECRET not in f"{caught.value}{caplog.text}{caught.value.__cause__}"
    assert len(store.requests) == 1


def test_a_store_that_does_not_come_back_is_an_error_that_names_the_file(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    store.faults.append(Fault("cut", path=store.content_of("text/1"), times=10_000))
    with pytest.raises(tdi.SourceError, match=r"://data/text/1\.txt: .*tried 5 times"):
        steps(loader_of("text", "FILE", store, store.impatient_options()))


def test_a_pattern_that_matches_nothing_in_a_bucket_is_refused(store: ObjectStore) -> None:
    none = f"{store.protocol}://data/none/*.txt"
    with pytest.raises(tdi.SourceError, match=r"://data/none/\*\.txt: the pattern matches no file") as caught:
        tdi.FileDataset(none, readers.text_lines, storage_options=store.options())
    assert "seen from" not in str(caught.value)


def test_an_object_that_is_gone_is_told(store: ObjectStore) -> None:
    gone = tdi.FileDataset([f"{store.protocol}://data/text/9.txt"], readers.text_lines, storage_options=store.options())
    with pytest.raises(tdi.SourceError, match=r"://data/text/9\.txt: .*FileNotFoundError"):
        steps(tdi.Strategy(["cpu"]).distribute_dataset(gone, global_batch_size=BATCH))
