"""The costs of samples (``InputOptions.balance``), by which a batch is divided: of indices, or of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import BatchingError, ShardingError
from torchdistinput.plan.balancing import Costs, Division, check_costs, divide
from torchdistinput.plan.batching import Cutter
from torchdistinput.plan.options import InputOptions
from torchdistinput.plan.topology import Topology
from torchdistinput.sources.kernel.index_array import IndexArray
from torchdistinput.sources.kernel.read_failures import CorruptRecord


@final
@dataclass(frozen=True)
class CostDivider:
    """Divides batches, which all workers share, by cost.

    Args:
      costs: the costs of a list of indices, or of records.
      topology: where this worker stands.
      equal_counts: see ``options.Balance``.
    """

    costs: Callable[[Any], Costs]
    topology: Topology
    equal_counts: bool

    def divide(self, samples: Any) -> Division:
        """How a batch is divided; it has at least one sample.

        Raises:
          BatchingError: a cost is no cost, or cannot be found; the sample is named.
        """
        return divide(self.costs(samples), self.topology, equal_counts=self.equal_counts)


def balance_by_index(options: InputOptions, cutter: Cutter, num_samples: int | None) -> CostDivider | None:
    """For map-style data: the option is an array, or a function of the index. ``None`` without the option. Local.

    Args:
      options: the user's options.
      cutter: where this worker stands.
      num_samples: samples of the dataset, if they are known.

    Raises:
      TypeError: the option is neither an array of numbers nor a function.
      BatchingError: the array has another length than the dataset, or a number in it is no cost.
      ShardingError: the workers do not share their batches.
    """
    if options.balance is None:
        return None
    if callable(options.costs):
        return _balance(partial(_costs_of_indices, options.costs), options, cutter)
    costs = _CostsByIndex(options.costs)
    if num_samples not in (None, len(costs.array)):
        raise BatchingError(
            f"balance has {len(costs.array)} costs, and the dataset {num_samples} samples; give one cost for each "
            "index, in order."
        )
    return _balance(costs, options, cutter)


def balance_by_record(options: InputOptions, cutter: Cutter, what: str) -> CostDivider | None:
    """For data without indices: the option is a function of the record. ``None`` without the option. Local.

    Args:
      options: the user's options.
      cutter: where this worker stands.
      what: the data, for messages.

    Raises:
      TypeError: the option is an array.
      BatchingError: the source yields ready batches.
      ShardingError: the workers do not share their batches.
    """
    if options.balance is None:
        return None
    if not callable(options.costs):
        raise TypeError(
            f"balance is a {type(options.costs).__name__}, and {what} has no samples by index; give a function that "
            "returns the cost of a record, or of (number of the source, record) of a mixture."
        )
    if cutter.global_batch_size is None:
        raise BatchingError(
            f"balance was given with {what} that yields ready batches. Give single samples, with global_batch_size= or "
            "the batch_size of a DataLoader."
        )
    return _balance(partial(_costs_of_records, options.costs), options, cutter)


def _balance(costs: Callable[[Any], Costs], options: InputOptions, cutter: Cutter) -> CostDivider:
    if not cutter.shared:
        raise ShardingError(
            "balance was given, and each rank has batches of its own (policy FILE or OFF): the parts of a step come "
            "from different batches, which differ in cost however they are cut. Give "
            "InputOptions(auto_shard_policy=AutoShardPolicy.DATA), by which all ranks share each batch, or no balance."
        )
    return CostDivider(costs, cutter.topology, options.equal_counts)


def digest_of_costs(balance: Any) -> str | None:
    """A text for the option ``balance``, for ranks to compare; two functions cannot be compared. Local."""
    if balance is None or callable(balance):
        return None if balance is None else "a function"
    array = np.ascontiguousarray(_as_array(balance), np.float64)
    return f"{len(array)} costs, checksum {blake2b(array.data, digest_size=8).hexdigest()}"


def taken_at(samples: Any, places: npt.NDArray[np.int64]) -> Any:
    """The samples of some places in a list, in columns, or of an ``IndexArray``. Local."""
    take = getattr(samples, "take", None)  # of columns, and of an ``IndexArray``
    return [samples[place] for place in places.tolist()] if take is None else take(places)


def _as_array(balance: Any) -> npt.NDArray[Any]:
    if isinstance(balance, torch.Tensor):
        balance = balance.detach().to("cpu", torch.float64).numpy()
    array = np.asarray(balance)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise TypeError(
            f"balance is a {type(balance).__name__} of shape {array.shape} and dtype {array.dtype}; an array with one "
            "number for each sample is needed, (n,), or a function that returns the cost of a sample."
        )
    return array


@final
class _CostsByIndex:
    def __init__(self, balance: Any) -> None:
        self.array = _as_array(balance)
        wrong = check_costs(self.array)
        if wrong is not None:
            raise _no_cost(f"balance[{wrong}]", self.array[wrong])

    def __call__(self, indices: IndexArray | Sequence[Any]) -> Costs:
        try:
            found = self.array[indices.array() if isinstance(indices, IndexArray) else indices]
        except (IndexError, ValueError) as error:
            raise BatchingError(
                f"balance has {len(self.array)} costs, one for each index, and the sampler drew an index without one: "
                f"{in_one_line(error)}. Give a cost for each index, or a function of the index."
            ) from error
        return _checked(found.astype(np.float64, copy=False), indices, "sample")


def _costs_of_indices(balance: Callable[[Any], Any], indices: IndexArray | Sequence[Any]) -> Costs:
    listed = indices.tolist() if isinstance(indices, IndexArray) else indices
    advice = "For map-style data the function gets the index of a sample, not the sample, which other ranks read"
    return _checked(_costs_of(balance, listed, listed, advice), listed, "sample")


def _costs_of_records(balance: Callable[[Any], Any], records: Sequence[Any]) -> Costs:
    advice = "The function gets a record as it was read, before map_fn; of a mixture (number of the source, record)"
    return _checked(_costs_of(balance, records, range(len(records)), advice), range(len(records)), "record")


def _costs_of(balance: Callable[[Any], Any], samples: Sequence[Any], names: Sequence[Any], advice: str) -> Costs:
    costs = np.empty(len(samples))
    place = 0
    try:
        for place, sample in enumerate(samples):
            costs[place] = 0 if isinstance(sample, CorruptRecord) else balance(sample)
    except Exception as error:
        raise BatchingError(
            f"the cost of sample {names[place]!r:.100} could not be found: {in_one_line(error)}. {advice}; it returns "
            "a number of 0 or more."
        ) from error
    return costs


def _checked(costs: Costs, names: Any, what: str) -> Costs:
    wrong = check_costs(costs)
    if wrong is not None:
        name = names.tolist()[wrong] if isinstance(names, IndexArray) else names[wrong]
        raise _no_cost(f"the cost of {what} {name!r:.100}", costs[wrong])
    return costs


def _no_cost(what: str, found: Any) -> BatchingError:
    return BatchingError(f"{what} is {found}; a finite number of 0 or more is needed (balance=).")
