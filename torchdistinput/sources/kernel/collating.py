"""Collate functions: they are asked for the structure of their batches, and wrapped so that a batch stays whole.

A function is asked with one sample, and with the same sample twice: ``batches.collated`` reads the answers. In one
process a collated batch is handed on whole, and its contents are not inspected.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, final

from torch.utils.data import get_worker_info

from torchdistinput.batches import pytree
from torchdistinput.batches.collated import structure_of_collated
from torchdistinput.batches.schema import Structure
from torchdistinput.coordination.failures import in_one_line
from torchdistinput.errors import BatchingError
from torchdistinput.sources.rng import global_states, set_global_states
from torchdistinput.step_types import OpaqueBatch


def ask_collate(collate: Callable[[list[Any]], Any], sample: Any) -> Structure:
    """The structure of the batches of a collate function, which gets copies of the sample: it may change them."""
    return ask(lambda count: collate([copy.deepcopy(sample) for _ in range(count)]))


def for_this_process(structure: Structure) -> Structure | bytes:
    """The structure; pickled in a loader worker, where it goes to the training process with every batch."""
    return structure if get_worker_info() is None else pickle.dumps(structure)


def ask(make: Callable[[int], Any]) -> Structure:
    """The structure of the batches that a function makes. The global random states stay as they are.

    Args:
      make: makes a batch of the same sample, so many times over.
    """
    states = global_states()
    try:
        one, two = make(1), make(2)
    except Exception as error:
        return Structure.of_leaf("unknown", value=("", f"its function failed when it was asked: {in_one_line(error)}"))
    finally:
        set_global_states(states)
    return structure_of_collated(one, two)


@final
class OpaqueCollate:
    """A collate function that wraps the result of another one as an ``OpaqueBatch``.

    Args:
      collate: makes the batch.
      counts: whether ``collate`` gets a list of samples, which are counted; else it converts a ready batch, whose size
        is then measured.
    """

    def __init__(self, collate: Callable[[Any], Any], *, counts: bool) -> None:
        self.collate = collate
        self._counts = counts
        self._known = pytree.KnownShapes()

    def __call__(self, samples: Any) -> OpaqueBatch:
        """The batch, with the number of its samples."""
        batch = self.collate(samples)
        size = len(samples) if self._counts else self._size_of(batch)
        return tuple.__new__(OpaqueBatch, (batch, size))  # half the time of OpaqueBatch(batch, size)

    def _size_of(self, batch: Any) -> int:
        if self._known.leaves_of(batch) is None:
            self._known.remember(batch, _size(batch))
        return self._known.size


def _size(batch: Any) -> int:
    try:
        return pytree.batch_size(batch)
    except BatchingError:  # a single sample (torch's batch_size=None), or a value without a size: it counts as one
        return 1
