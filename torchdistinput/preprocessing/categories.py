"""Layers of categories, which learn nothing: ``CategoryEncoding`` and ``Hashing``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from torchdistinput.preprocessing.hashes import buckets
from torchdistinput.preprocessing.inputs import holds_strings, ints, strings
from torchdistinput.preprocessing.layer import as_vectors, check_mode

_MODES: Final = ("one_hot", "multi_hot", "count")


@final
class CategoryEncoding(nn.Module):
    """Turns ids from 0 to ``num_tokens - 1`` into vectors, as ``keras.layers.CategoryEncoding``.

    >>> tdi.preprocessing.CategoryEncoding(3)(torch.tensor([[0, 2]]))
    tensor([[1., 0., 1.]])

    Args:
      num_tokens: how many ids there are.
      output_mode: "one_hot", "multi_hot" (also "binary") or "count".
      sparse: must be false.
      dtype: the dtype of the output.

    Raises:
      ValueError: ``num_tokens`` is missing or less than 1, or an unknown mode.
    """

    def __init__(
        self,
        num_tokens: int | None = None,
        output_mode: str = "multi_hot",
        *,
        sparse: bool = False,
        dtype: str | torch.dtype = "float32",
    ) -> None:
        super().__init__()
        output_mode = "multi_hot" if output_mode == "binary" else output_mode  # the older word in Keras
        check_mode("CategoryEncoding", output_mode, allowed=_MODES, sparse=sparse)
        if num_tokens is None or num_tokens < 1:
            raise ValueError(f"CategoryEncoding: num_tokens={num_tokens}; it must be 1 or more.")
        self.num_tokens, self.output_mode, self.dtype = num_tokens, output_mode, dtype_of(dtype)

    def forward(self, inputs: Any, count_weights: Any = None) -> Tensor:
        """The vectors. Local.

        Args:
          inputs: ids, of any shape.
          count_weights: with ``"count"``, the weight of each id.

        Raises:
          ValueError: an id is out of range (the error names it), or weights are given in another mode or shape.
          TypeError: the ids are no ints.
        """
        ids = ints(inputs, "CategoryEncoding")
        if ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.num_tokens:
                wrong = low if low < 0 else high
                raise ValueError(f"CategoryEncoding: the id {wrong} is not from 0 to {self.num_tokens - 1}.")
        if count_weights is not None and self.output_mode != "count":
            raise ValueError(f'CategoryEncoding: count_weights need output_mode="count", not {self.output_mode!r}.')
        weights = None if count_weights is None else torch.as_tensor(count_weights, device=ids.device)
        if weights is not None and weights.shape != ids.shape:
            raise ValueError(
                f"CategoryEncoding: count_weights has shape {tuple(weights.shape)}; the ids have {tuple(ids.shape)}: "
                "each needs a weight."
            )
        return as_vectors(ids, self.output_mode, self.num_tokens, weights=weights, dtype=self.dtype)


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; a torch dtype or its name is needed.")
    return found


def salt_of(layer: str, salt: int | Sequence[int] | None) -> tuple[int, int] | None:
    """The key of SipHash: two ints; one int stands for both.

    Raises:
      ValueError: the salt is not one or two ints.
    """
    if salt is None:
        return None
    given = (salt, salt) if isinstance(salt, int) else tuple(salt)
    if len(given) != 2 or not all(-(2**63) <= each < 2**64 for each in given):
        raise ValueError(f"{layer}: salt={salt!r}; an int of 64 bits or two of them are needed.")
    return given[0], given[1]


@final
class Hashing(nn.Module):
    """Puts strings or ints into buckets by a hash, as ``keras.layers.Hashing``: FarmHash, or SipHash with a salt.

    >>> tdi.preprocessing.Hashing(4, salt=1)(["cat", "dog", "cat"])
    tensor([3, 2, 3])

    Args:
      num_bins: how many buckets.
      mask_value: the value that gets bucket 0; other values then get buckets from 1 on.
      salt: the key of SipHash. Without a salt FarmHash is used, which needs the extra ``farmhash``.
      output_mode: "int", "one_hot", "multi_hot" or "count".
      sparse: must be false.
      dtype: the dtype of the output; an int type for "int". By default int64 for "int", else float32.

    Raises:
      ValueError: an argument does not fit.
    """

    def __init__(
        self,
        num_bins: int,
        mask_value: Any = None,
        salt: int | Sequence[int] | None = None,
        output_mode: str = "int",
        *,
        sparse: bool = False,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_mode("Hashing", output_mode, allowed=("int", *_MODES), sparse=sparse)
        if num_bins < 1:
            raise ValueError(f"Hashing: num_bins={num_bins}; it must be 1 or more.")
        self.dtype = dtype_of(dtype or ("int64" if output_mode == "int" else "float32"))
        if output_mode == "int" and self.dtype.is_floating_point:
            raise ValueError(f'Hashing: dtype={dtype!r}; output_mode="int" needs an int type.')
        self.num_bins, self.mask_value, self.output_mode = num_bins, mask_value, output_mode
        self.salt = salt_of("Hashing", salt)

    def forward(self, inputs: Any) -> Tensor:
        """The buckets, in the output mode. Local.

        Raises:
          TypeError: the input holds neither strings nor ints, or the mask value is of the other kind.
          ImportError: FarmHash is needed and not installed.
        """
        device = inputs.device if isinstance(inputs, Tensor) else None
        if holds_strings(inputs):
            flat, shape = strings(inputs, "Hashing")
        else:
            ids = ints(inputs, "Hashing")
            flat, shape = [str(each) for each in ids.reshape(-1).tolist()], tuple(ids.shape)
        mask = self.mask_value
        if flat and mask is not None and isinstance(mask, str) is not holds_strings(inputs):
            raise TypeError(f"Hashing: mask_value={mask!r}; the input holds values of another type.")
        masked = None if mask is None else str(mask)
        others = self.num_bins if masked is None else max(1, self.num_bins - 1)
        found = buckets(flat, others, self.salt)
        if masked is not None:
            found = np.where([each == masked for each in flat], 0, found + min(1, self.num_bins - 1))
        bins = torch.from_numpy(found).reshape(shape).to(device)
        if self.output_mode == "int":
            return bins.to(self.dtype)
        return as_vectors(bins, self.output_mode, self.num_bins, dtype=self.dtype)
