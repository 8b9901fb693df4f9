"""The code shared by the layers: ``adapt``, and the output modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchdistinput.analysis import analyze
from torchdistinput.dataset import DistributedDataset
from torchdistinput.preprocessing.inputs import listed
from torchdistinput.strategy import Strategy

_TEXTS: Final = 1024  # the number of texts in a step

_KNOWN: Final = (Tensor, np.ndarray, DataLoader, Dataset, DistributedDataset)
"""The types that ``analyze`` takes as they are, besides iterables."""

_OUTPUT_MODES: Final = ("int", "one_hot", "multi_hot", "count")


def check_mode(layer: str, mode: object) -> None:
    """Refuses an unknown output mode.

    Raises:
      ValueError: the mode is another word.
    """
    if mode not in _OUTPUT_MODES:
        raise ValueError(f"{layer}: output_mode is {mode!r}; it must be {', '.join(map(repr, _OUTPUT_MODES))}.")


def as_it_is(batch: Any) -> Any:
    """The whole batch, for a spec of ``analyze``."""
    return batch


def learn_from(
    data: Any, spec: Mapping[str, Any], *, of_texts: bool = False, strategy: Strategy | None = None
) -> dict[str, Any]:
    """The results of ``analyze`` for a layer. Collective: every rank calls this.

    Args:
      data: a tensor, an array or a list: its rows are samples. A ``DataLoader``, dataset or iterable: its elements are
        batches, which are one leaf. A ``DistributedDataset`` as it is.
      spec: names, functions of a batch and statistics.
      of_texts: whether the batches of an iterable are texts: their rows are then read one by one.
      strategy: the ranks; see ``analyze``.

    Raises:
      ValueError: there is no batch, or a statistic refuses the data.
    """
    collate, size = None, None
    if isinstance(data, np.ndarray) and data.dtype.kind not in "biuf":
        data = listed(data)
    if isinstance(data, list | tuple):
        data = DataLoader(data, _TEXTS, collate_fn=list)  # type: ignore[arg-type] # a list is a dataset
    elif of_texts and isinstance(data, Iterable) and not isinstance(data, _KNOWN):
        data, collate, size = partial(chain.from_iterable, data), list, _TEXTS
    found: dict[str, Any] = analyze(data, spec, collate_fn=collate, global_batch_size=size, strategy=strategy)
    return found


def as_vectors(ids: Tensor, mode: str, depth: int, *, dtype: torch.dtype) -> Tensor:
    """Ids in an output mode other than "int"; negative ids are ignored.

    Args:
      ids: int64, of any shape.
      mode: ``"one_hot"`` gives each id a row of ``depth`` numbers, in place of a last dim of 1. The other modes give
        one row for the last dim: ``"multi_hot"`` has 1 for each id that occurs, ``"count"`` how often the id occurs.
      depth: how many ids there are.
      dtype: the dtype of the result.
    """
    if mode == "one_hot":
        if ids.dim() > 1 and ids.shape[-1] == 1:
            ids = ids.squeeze(-1)
        ids = ids.unsqueeze(-1)
    if not ids.dim():
        ids = ids.unsqueeze(0)
    # Negative ids go to a last column, which is cut off.
    columns = torch.where(ids < 0, depth, ids)
    ones = torch.ones_like(ids, dtype=dtype)
    found = ids.new_zeros((*ids.shape[:-1], depth + 1), dtype=dtype).scatter_add_(-1, columns, ones)[..., :depth]
    return (found > 0).to(dtype) if mode == "multi_hot" else found.contiguous()
