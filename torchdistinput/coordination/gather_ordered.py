"""``gather_ordered``: the outputs of all replicas in the order of the data, each once.

Problem. Replicas have parts of different sizes, and a replica without samples does not know the structure of the
outputs. A metric or a file of predictions needs all outputs in the order of the data.

Decision. As in ``reduce``, every worker first sends, as JSON, the number of its rows, their nesting, and its lists, or
the error that keeps it from taking part; nothing is pickled. All workers apply the same laws to these facts. Then they
exchange the indices, without rows of index -1 (padding), and find the same order and the same repeated indices. Last
they exchange the tensors, leaf by leaf, as bytes.

A replica without rows agrees with any structure: its outputs are left out, whatever they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from torchdistinput.batches import pytree
from torchdistinput.batches.containers import open_container
from torchdistinput.batches.per_replica import PerReplica, select, take_apart
from torchdistinput.batches.schema import Leaf, Structure, structure_of
from torchdistinput.coordination.fingerprints import agree_on
from torchdistinput.coordination.process_group import Ranks
from torchdistinput.coordination.reduce import by_worker, concatenate, values_of

_NAME: Final = "gather_ordered()"
_SHOWN: Final = 5
_PLAIN: Final = (str, int, float, bool, type(None))
_LIST: Final = Leaf("rows", object, cls=list)


def gather_ordered(index: Any, outputs: Any, *, num_local: int, workers: Ranks | None, device: torch.device) -> Any:
    """See ``Strategy.gather_ordered``. Collective if there are several workers.

    Args:
      index: ``(n,)`` ints for each local replica.
      outputs: nested containers of tensors and lists with ``n`` rows, for each local replica.
      num_local: the number of local replicas.
      workers: the other workers; ``None`` in one process.
      device: where the results live.
    """
    parts: list[_Contribution] = []

    def describe() -> list[tuple[int, Any, list[list[Any] | None]]]:
        parts.extend(_local_parts(index, outputs, num_local))
        return [_described(part) for part in parts]

    gathered = by_worker(workers, agree_on(workers, _NAME, describe))
    facts = [[_Facts(*one) for one in each] for each in gathered]  # [worker][local replica]
    structure = _agreed_structure(workers, parts, facts)
    order = _order(parts, facts, workers)
    if structure is None:
        return parts[0].outputs  # no replica has a row
    leaves, number = [], 0
    for leaf in structure.leaves:
        if leaf.kind == "constant":
            leaves.append(leaf.value)
            continue
        found = _sorted_tensor(number, leaf, parts, facts, workers, order.to(device)) if leaf.kind == "tensor" else None
        leaves.append(_sorted_rows(number, facts, order) if found is None else found)
        number += 1
    return pytree.unflatten(structure.nesting, leaves)


@final
@dataclass(frozen=True)
class _Contribution:
    """The contribution of one local replica, without the rows of index -1.

    Args:
      index: the indices.
      outputs: as they were given.
      leaves: tensors and lists of plain values; nothing if no row was given.
      structure: ``None`` if no row was given.
    """

    index: Tensor
    outputs: Any
    leaves: Sequence[Tensor | list[Any]]
    structure: Structure | None


@final
@dataclass(frozen=True)
class _Facts:
    """The facts about one replica that all workers know.

    Args:
      size: the number of its rows.
      structure: the structure of its outputs in words, and as JSON; ``None`` if it has no row.
      lists: the leaves that are lists; ``None`` in the place of a tensor.
    """

    size: int
    structure: Any
    lists: Sequence[list[Any] | None]


# --------------------------------------------------------------------------------------- the contribution of a replica


def _local_parts(index: Any, outputs: Any, num_local: int) -> list[_Contribution]:
    for name, value in (("index", index), ("outputs", outputs)):
        _, leaves, _ = take_apart(value)
        for leaf in [each for each in leaves if isinstance(each, PerReplica)] or [value]:
            values_of("gather_ordered", name, leaf, num_local)
    whose = [f" of local replica {replica}" if num_local > 1 else "" for replica in range(num_local)]
    return [_part(select(index, replica), select(outputs, replica), who) for replica, who in enumerate(whose)]


def _part(index: Any, outputs: Any, who: str) -> _Contribution:
    numbers = _checked_index(index, who)
    _refuse_records(outputs)
    leaves = []
    found, nesting = pytree.flatten(outputs)
    for path, leaf in zip(pytree.paths(nesting, "outputs"), map(pytree.as_tensor, found), strict=True):
        if not pytree.has_rows(leaf):
            continue
        if isinstance(leaf, Tensor) and leaf.dim() == 0:
            raise ValueError(f"{path}{who} is a scalar tensor; gather_ordered needs a row for each index.")
        if len(leaf) != len(numbers):
            raise ValueError(
                f"the index{who} has {len(numbers)} entries, and {path} has {len(leaf)} rows. gather_ordered needs a "
                "row for each index: collect both in the same loop."
            )
        leaves.append(leaf)
    if len(numbers) == 0:
        return _Contribution(numbers, outputs, [], None)
    if not leaves:
        raise ValueError(
            f"outputs{who} is a {type(outputs).__name__} without a tensor or list of rows in it; gather_ordered needs "
            f"a row for each of the {len(numbers)} indices."
        )
    kept = numbers != -1
    rows = [_kept_rows(leaf, kept) for leaf in leaves]
    return _Contribution(numbers[kept], outputs, rows, structure_of(outputs))


def _checked_index(index: Any, who: str) -> Tensor:
    if isinstance(index, np.ndarray):
        index = torch.as_tensor(index, device="cpu")
    if not isinstance(index, Tensor):
        raise TypeError(f"the index{who} is a {type(index).__name__}; an int64 tensor with an entry per row is needed.")
    if index.dim() != 1:
        raise ValueError(f"the index{who} has shape {list(index.shape)}; one dimension is needed, an entry per row.")
    if len(index) == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"the index{who} is of {index.dtype}; ints are needed, as with_index=True yields them.")
    numbers = index.detach().to("cpu", torch.int64)
    if int(numbers.min()) < -1:
        raise ValueError(
            f"the index{who} has the entry {int(numbers.min())}; indices are 0 and above, or -1 for a padded row."
        )
    return numbers


def _refuse_records(value: Any) -> None:
    """Raises for a list of dicts without tensors: the nesting of one would not tell whether they are its rows."""
    container = open_container(value)
    if container is None:
        return
    if container.kind == "list" and any(isinstance(item, Mapping) for item in value) and not _holds_tensors(value):
        raise TypeError(
            "gather_ordered found a list of dicts; a list has an entry for each row, which is a string, a number, a "
            "bool or None. Write each dict as a string (json.dumps(row)), or give a dict of lists."
        )
    for child in container.children:
        _refuse_records(child)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return True
    container = open_container(value)
    return container is not None and any(_holds_tensors(child) for child in container.children)


def _kept_rows(leaf: Any, kept: Tensor) -> Tensor | list[Any]:
    """The rows that are no padding.

    Raises:
      TypeError: an entry of a list is no plain value.
    """
    if isinstance(leaf, Tensor):
        rows = leaf.detach()
        return rows if bool(kept.all()) else rows[kept.to(rows.device)]
    kept_rows = [row for row, keep in zip(leaf, kept.tolist(), strict=True) if keep]
    for row in kept_rows:
        if type(row) not in _PLAIN:
            raise TypeError(
                f"gather_ordered found {row!r:.100} (a {type(row).__name__}) in a list. Lists travel as JSON, so an "
                "entry can be a string, a number, a bool or None. Put numbers in a tensor, or convert the entries: a "
                "dict by json.dumps(row)."
            )
    return kept_rows


# ----------------------------------------------------------------------------------------------------------- agreement


def _described(part: _Contribution) -> tuple[int, Any, list[list[Any] | None]]:
    structure = None
    if part.structure is not None:  # lists come back as lists, whatever their entries were
        as_lists = tuple(_LIST if leaf.kind == "rows" else leaf for leaf in part.structure.leaves)
        comparable = part.structure._replace(leaves=as_lists)
        structure = [str(comparable), comparable.to_json()]
    return len(part.index), structure, [leaf if isinstance(leaf, list) else None for leaf in part.leaves]


def _agreed_structure(
    workers: Ranks | None, parts: Sequence[_Contribution], facts: Sequence[Sequence[_Facts]]
) -> Structure | None:
    """The structure of the outputs of all replicas; ``None`` if no replica has a row. Raises alike on all workers."""
    found: dict[str, list[int]] = {}
    for replica, one in enumerate(one for each in facts for one in each):
        if one.structure is not None:
            found.setdefault(json.dumps(one.structure), []).append(replica)
    if len(found) > 1:
        variants = "; ".join(f"{_names(replicas)}: {json.loads(text)[0]}" for text, replicas in found.items())
        raise ValueError(
            f"gather_ordered needs the same nesting, names, dtypes, inner dims and constants on all replicas that have "
            f"rows; found {variants}."
        )
    if not found:
        return None
    own = next((part.structure for part in parts if part.structure is not None), None)
    if all(any(one.structure is not None for one in each) for each in facts):
        return own
    learned: list[Structure] = []

    def learn() -> None:
        learned.append(own or Structure.from_json(json.loads(next(iter(found)))[1]))  # it may lack the class

    agree_on(workers, _NAME, learn)
    return learned[0]


def _names(replicas: Sequence[int]) -> str:
    return f"replica {', '.join(map(str, replicas))}"


# ------------------------------------------------------------------------------------------- the exchange of the rows


def _sizes(facts: Sequence[Sequence[_Facts]]) -> list[int]:
    return [sum(one.size for one in each) for each in facts]


def _order(parts: Sequence[_Contribution], facts: Sequence[Sequence[_Facts]], workers: Ranks | None) -> Tensor:
    """The places of all rows, counted in replica order, sorted by the index of the row.

    Raises:
      ValueError: an index occurs twice. On all workers alike.
    """
    numbers = concatenate(torch.cat([part.index for part in parts]), 0, _sizes(facts), workers)
    in_order, order = torch.sort(numbers)
    repeated = in_order[1:][in_order[1:] == in_order[:-1]].unique()  # type: ignore[no-untyped-call] # torch's
    if len(repeated) == 0:
        return order
    replicas = [replica for replica, one in enumerate(one for each in facts for one in each) for _ in range(one.size)]
    shown = [
        f"{number} ({_names(sorted({replicas[place] for place in (numbers == number).nonzero().flatten().tolist()}))})"
        for number in repeated[:_SHOWN].tolist()
    ]
    raise ValueError(
        f"gather_ordered found {len(repeated)} index(es) more than once: {', '.join(shown)}"
        f"{', ...' if len(repeated) > _SHOWN else ''}. Each sample may count only once: gather after one epoch, not "
        "several; and take another policy than OFF (every rank reads everything there) and a sampler without "
        "replacement."
    )


def _sorted_tensor(
    number: int,
    leaf: Leaf,
    parts: Sequence[_Contribution],
    facts: Sequence[Sequence[_Facts]],
    workers: Ranks | None,
    order: Tensor,
) -> Tensor:
    """One leaf of all replicas, a tensor, on the device of the order."""
    own = [part.leaves[number] for part in parts if part.leaves]
    tensors = [each.to(order.device) for each in own if isinstance(each, Tensor)] or [leaf.empty("").to(order.device)]
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return concatenate(joined, 0, _sizes(facts), workers).index_select(0, order)


def _sorted_rows(number: int, facts: Sequence[Sequence[_Facts]], order: Tensor) -> list[Any]:
    """One leaf of all replicas, a list."""
    lists = [one.lists[number] or [] for each in facts for one in each if one.lists]
    rows = list(chain.from_iterable(lists))
    return [rows[place] for place in order.tolist()]
