"""``check_source``: checks that a source keeps its contract (see ``sources.fragments``), and what it gives on ranks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Final

from torchdistinput.coordination.batch_digests import digest_of_element
from torchdistinput.sources.datasets.fragment_dataset import FragmentDataset
from torchdistinput.sources.formats.columns import Columns, as_records
from torchdistinput.sources.fragments import Fragment, FragmentSource
from torchdistinput.testing.worlds import Make, SamplesOf, check_in_worlds

__all__ = ["check_source"]

_MAX_POSITIONS: Final = 20  # the most positions of a fragment at which reading begins


def check_source(
    source: FragmentSource | Make | Mapping[str, FragmentSource | Make],
    *,
    change: Callable[[], object] | None = None,
    worlds: Sequence[int] = (),
    samples: SamplesOf | None = None,
    timeout_seconds: float = 300.0,
) -> None:
    """Checks a source of your own, or several: in this process, and with ``worlds`` on real ranks too. Local.

    In this process it checks the contract of a ``FragmentSource``; it reads the whole source a few times. On ranks it
    checks what a program sees. Under DATA the ranks' parts of a step are together the batch of one process. Under FILE
    (where there is a fragment for each rank) each sample comes once, and all ranks make the same number of steps. The
    next epoch has the same samples. The ranks' states are equal, and one that is saved after some steps goes on in the
    next world. A record that cannot be read is an error on all ranks that names its fragment;
    ``on_error="skip"`` leaves out this record alone.

    Args:
      source: a source with a few fragments, at least one of which has several blocks. With ``worlds`` also a function
        that makes a dataset of its arguments, as ``partial(tdi.FileDataset, names, read)`` does; or one without
        arguments that makes a loader, which is read as it is; or a dict of such things by name, which share the
        processes. It must pickle, and with ``worlds`` have ten records or more.
      change: changes the content of the source; then a fragment must have another fingerprint, number of records or
        size. Called last.
      worlds: the numbers of ranks, such as ``(2, 3, 1)``; each is one launch of ``run_ranks``.
      samples: the samples of a batch of a loader, where they are not its rows.
      timeout_seconds: the bound on each launch.

    Raises:
      AssertionError: the source breaks the contract; the message names the fragment and the position, or the source,
        the policy and the number of ranks.
      RankFailed: a rank raised something else, or had not ended in time.
    """
    given = source if isinstance(source, Mapping) else {_name_of(source): source}
    makes: dict[str, Make] = {}
    for name, each in given.items():
        one: Any = each
        if isinstance(one, FragmentSource) and not isinstance(one, type):
            _check_contract(one)
            makes[name] = partial(FragmentDataset, one)
        else:
            is_made = bool(worlds) and callable(one)
            assert is_made, (
                f"found {one!r:.100}; an object with fragments() and read(fragment, position) is needed, or with "
                "worlds= a function that makes a dataset of fragments or a loader"
            )
            makes[name] = one
    if worlds:
        check_in_worlds(makes, worlds, samples, timeout_seconds)
    if change is not None:
        assert isinstance(source, FragmentSource), "change= is for one source with fragments()"
        before = [*source.fragments()]
        change()
        assert [*source.fragments()] != before, "the content was changed, but no Fragment shows it: give a fingerprint"


def _name_of(source: Any) -> str:
    return getattr(source, "__name__", type(source).__name__)


def _check_contract(source: FragmentSource) -> None:
    fragments = [*source.fragments()]
    assert fragments, "fragments() gave none; at least one is needed"
    assert all(isinstance(each, Fragment) for each in fragments), "fragments() must give Fragment objects"
    names = [each.name for each in fragments]
    assert len(set(names)) == len(names), f"two fragments have one name: {names!r:.200}"
    assert [*source.fragments()] == fragments, "fragments() gave something else when it was called again"
    copy: FragmentSource = pickle.loads(pickle.dumps(source))
    assert [*copy.fragments()] == fragments, "a pickled copy of the source has other fragments"
    first: tuple[str, dict[str, str]] | None = None
    for fragment in fragments:
        _check_fragment(source, copy, fragment)
        for position, records in source.read(fragment, None):
            types = _types_of(records)
            first = first or (fragment.name, types)
            assert types == first[1], (
                f"{fragment.name}, position {position!r:.100}: its columns are {types}, and those of {first[0]} "
                f"{first[1]}; give all blocks columns of the same names and types"
            )


def _check_fragment(source: FragmentSource, copy: FragmentSource, fragment: Fragment) -> None:
    name = fragment.name
    blocks = []
    for position, records in source.read(fragment, None):
        block: Any = records
        is_block = isinstance(block, Sequence | Mapping | Columns) and not isinstance(block, str | bytes)
        assert is_block, f"{name}: a block {records!r:.100}; a list of records, or a dict of columns, is needed"
        blocks.append((position, [*as_records(records)]))
    whole = _digests(blocks)
    assert all(records for _, records in blocks), f"{name}: a block has no record; leave it out"
    if fragment.num_records is not None:
        assert len(whole) == fragment.num_records, (
            f"{name}: {len(whole)} records, but num_records={fragment.num_records}"
        )
    # Readings at once: a source that keeps its position in itself, or one cursor, mixes them up.
    readings = (source.read(fragment, None), source.read(fragment, None), copy.read(fragment, None))
    for blocks_read in zip(*zip_longest(*readings, fillvalue=(None, ())), strict=True):
        assert _digests([(None, [*as_records(records)]) for _, records in blocks_read]) == whole, (
            f"{name}: other records came when it was read beside another reading; keep the position in read(), not in "
            "the source"
        )
    seen = 0
    starts = []
    for position, records in blocks:
        starts.append((position, seen))
        seen += len(records)
    for position, start in starts[:: max(1, len(starts) // _MAX_POSITIONS)]:
        _check_position(source, fragment, position, whole[start:])


def _check_position(source: FragmentSource, fragment: Fragment, position: Any, rest: Sequence[int]) -> None:
    name = f"{fragment.name}, position {position!r:.100}"
    assert position is not None, f"{fragment.name}: a block came with the position None, which is the front"
    stored = json.loads(json.dumps(position))
    assert stored == position, f"{name}: it is {stored!r:.100} after JSON; give a number, a text, or a list of them"
    found = _digests([(each, [*as_records(records)]) for each, records in source.read(fragment, stored)])
    assert found == [*rest], f"{name}: {len(found)} records came from there, not the same {len(rest)} as from the front"


def _types_of(records: Sequence[Any] | Mapping[str, Any]) -> dict[str, str]:
    """The type of each column; none where the records are no columns."""
    columns = records if isinstance(records, Mapping) else {}
    return {name: str(getattr(column, "dtype", type(column).__name__)) for name, column in columns.items()}


def _digests(blocks: Sequence[tuple[Any, Sequence[Any]]]) -> list[int]:
    return [digest_of_element(record) for record in chain.from_iterable(records for _, records in blocks)]
