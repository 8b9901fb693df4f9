"""Asks a collate function with one sample, and with the same sample twice: ``batches.collated`` reads the answers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from torchdistinput.batches.collated import structure_of_collated
from torchdistinput.batches.schema import Structure
from torchdistinput.coordination.failures import in_one_line
from torchdistinput.sources.rng import global_states, set_global_states


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
