"""Which policy is in force, and how files are dealt out."""

from __future__ import annotations

import itertools

import pytest

from torchdistinput.errors import ShardingError
from torchdistinput.plan.topology import AutoShardPolicy, parts_of, resolve_policy, shards_of

AUTO, FILE, DATA, HINT, OFF = (
    AutoShardPolicy.AUTO,
    AutoShardPolicy.FILE,
    AutoShardPolicy.DATA,
    AutoShardPolicy.HINT,
    AutoShardPolicy.OFF,
)


def resolve(
    policy: AutoShardPolicy, files: int | None, can_shard: bool, workers: int
) -> AutoShardPolicy | type[ShardingError]:
    try:
        return resolve_policy(policy, num_files=files, can_shard=can_shard, num_workers=workers)
    except ShardingError:
        return ShardingError


def expected(
    policy: AutoShardPolicy, files: int | None, can_shard: bool, workers: int
) -> AutoShardPolicy | type[ShardingError]:
    """The laws of the policies, one a line."""
    enough: AutoShardPolicy | type[ShardingError] = FILE if (files or 0) >= workers else ShardingError
    return {
        AUTO: DATA if files is None else enough,
        FILE: ShardingError if files is None else enough,
        DATA: DATA,
        OFF: OFF,
        HINT: HINT if can_shard else ShardingError,
    }[policy]


def test_every_policy_with_every_source_resolves_by_the_laws() -> None:
    for case in itertools.product(AutoShardPolicy, [None, 0, 1, 2, 3, 4, 9], [False, True], range(1, 6)):
        assert resolve(*case) == expected(*case), case


@pytest.mark.parametrize("policy", [AUTO, FILE])
def test_too_few_files_is_told_with_both_numbers_and_the_way_out(policy: AutoShardPolicy) -> None:
    with pytest.raises(ShardingError, match=r"2 file\(s\).*not enough for 3 ranks.*AutoShardPolicy\.DATA.*more files"):
        resolve_policy(policy, num_files=2, can_shard=False, num_workers=3)


def test_file_without_files_is_told_with_what_is_needed_even_in_one_process() -> None:
    with pytest.raises(
        ShardingError, match=r"no files to deal out; a FileDataset or a FragmentSource is needed.*AutoShardPolicy\.DATA"
    ):
        resolve_policy(FILE, num_files=None, can_shard=True, num_workers=1)


def test_hint_without_a_shard_method_is_told_with_its_signature() -> None:
    with pytest.raises(ShardingError, match=r"no method shard\(num_shards=, index=\)"):
        resolve_policy(HINT, num_files=4, can_shard=False, num_workers=2)


def test_files_by_size_go_to_the_least_loaded_worker_the_largest_first() -> None:
    for count, workers in itertools.product(range(6), range(1, 5)):
        for sizes in itertools.product(range(4), repeat=count):
            order = [number * 3 % count if count % 3 else number for number in range(count)]
            shares = shards_of(order, workers, sizes)
            loads = [0] * workers
            wanted: list[set[int]] = [set() for _ in range(workers)]
            for size in (3, 2, 1, 0):
                for file in (file for file in order if sizes[file] == size):
                    least = loads.index(min(loads))
                    wanted[least].add(file)
                    loads[least] += size
            assert list(map(set, shares)) == wanted
            assert sorted(file for share in shares for file in share) == list(range(count))
            assert all(share == [file for file in order if file in share] for share in shares)
            assert max(loads) - min(loads) <= max(sizes, default=0)


def test_files_of_one_size_are_dealt_as_without_sizes() -> None:
    for count, workers in itertools.product(range(9), range(1, 5)):
        order = list(range(count))[::-1]
        assert shards_of(order, workers, [5] * count) == shards_of(order, workers)
        assert shards_of(order, workers) == [order[worker::workers] for worker in range(workers)]


def test_the_parts_of_a_file_are_few_and_even_and_make_up_the_file() -> None:
    for size, largest in itertools.product(range(40), range(1, 45)):
        parts = parts_of(size, largest)
        assert [byte for start, end in parts for byte in range(start, end)] == list(range(size))
        sizes = [end - start for start, end in parts]
        assert max(sizes) <= largest
        assert max(sizes) - min(sizes) <= 1
        assert (len(parts) - 1) * largest < max(1, size)
