"""The pipeline stage that pads every piece to the same number of rows, for programs that are compiled for one shape.

Padded rows do not count as samples: the sizes of a step stay the same, and a mask beside the piece tells samples from
padded rows. Padded rows are zeros in tensors. In lists they are empty strings where the list holds strings, else
``None``.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch

from torchdistinput.batches.containers import PLAIN_TYPES
from torchdistinput.batches.pytree import flatten_like, unflatten
from torchdistinput.batches.schema import Leaf, Structure
from torchdistinput.errors import BatchingError
from torchdistinput.step_types import LocalStep


@final
class Pad:
    """Pads the pieces of a step to one size and puts the mask beside them.

    Local: no communication. A piece becomes ``(element, mask)``, with an index ``(index, element, mask)``; the mask is
    bool, ``(rows,)``, and true for samples; the index of a padded row is -1.

    Args:
      rows: the rows of each piece: ``ceil(G / N)``, the largest size of a piece.
      with_index: whether the pieces are ``(index, element)``.
    """

    def __init__(self, rows: int, *, with_index: bool) -> None:
        self._rows = rows
        self._with_index = with_index

    @property
    def rows(self) -> int:
        """The rows of each piece."""
        return self._rows

    def __call__(self, step: LocalStep, structure: Structure | None) -> None:
        """Pads in place.

        Args:
          step: a step without missing pieces.
          structure: of the pieces; it says what in them has an entry for each sample.

        Raises:
          BatchingError: a piece does not have one row for each sample, or has more than ``rows`` samples.
        """
        step.pieces = [self._padded(*each, structure) for each in zip(step.pieces, step.sizes, strict=True)]

    def _padded(self, piece: Any, size: int, structure: Structure | None) -> tuple[Any, ...]:
        if size > self._rows:
            raise BatchingError(f"a piece has {size} samples, and partial_batch='pad' makes pieces of {self._rows}.")
        if structure is None:
            raise _cannot_be_padded(size, "nothing is known of its structure")
        mask = torch.arange(self._rows, device="cpu") < size
        if self._with_index:
            index, element = piece
            filled = index.new_full((self._rows,), -1)
            filled[:size] = index
            return filled, self._filled(element, size, structure.parts[1]), mask
        return self._filled(piece, size, structure), mask

    def _filled(self, part: Any, size: int, structure: Structure) -> Any:
        found = flatten_like(structure.nesting, part)
        if found is None:
            raise _cannot_be_padded(size, f"{structure} was expected")
        leaves = [self._filled_leaf(each, size, leaf) for each, leaf in zip(found, structure.leaves, strict=True)]
        return unflatten(structure.nesting, leaves)

    def _filled_leaf(self, part: Any, size: int, leaf: Leaf) -> Any:
        if leaf.kind in ("tensor", "array"):
            return self._filled_tensor(part, size, leaf)
        if leaf.kind == "rows" and isinstance(part, list | tuple) and len(part) == size:
            blank = "" if leaf.dtype is str and all(isinstance(item, str) for item in part) else None
            return part if size == self._rows else type(part)([*part, *[blank] * (self._rows - size)])
        if leaf.kind == "constant" or (leaf.kind == "unknown" and type(part) in PLAIN_TYPES):
            return part
        raise _cannot_be_padded(size, leaf.value[1] if leaf.kind == "unknown" else f"{leaf} was expected")

    def _filled_tensor(self, part: Any, size: int, leaf: Leaf) -> Any:
        dim = leaf.dim
        fits = isinstance(part, np.ndarray | torch.Tensor) and len(part.shape) > dim and part.shape[dim] == size
        if not fits:
            raise _cannot_be_padded(size, f"dim {dim} of a {type(part).__name__} is not their number")
        if size == self._rows:
            return part
        shape = (*part.shape[:dim], self._rows, *part.shape[dim + 1 :])
        filled = np.zeros(shape, part.dtype) if isinstance(part, np.ndarray) else part.new_zeros(shape)
        filled[(slice(None),) * dim + (slice(size),)] = part
        return filled

    def structure(self, structure: Structure) -> Structure:
        """The structure of the padded pieces, from the structure of the pieces."""
        parts = structure.parts if self._with_index else [structure]
        return Structure.together(*parts, Structure.of_leaf("tensor", torch.bool))


def _cannot_be_padded(size: int, why: str) -> BatchingError:
    return BatchingError(
        f"a piece of {size} sample(s) has not one row for each ({why}), and partial_batch='pad' can fill up nothing "
        "else. Let the collate function make one row for each sample, or do without padding."
    )
