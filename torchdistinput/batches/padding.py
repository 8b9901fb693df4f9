"""The pipeline stage that pads every piece to the same number of rows, for programs that are compiled for one shape.

Padded rows do not count as samples: the sizes of a step stay the same, and a mask beside the piece tells samples from
padded rows. Padded rows are zeros in tensors. In lists they are empty strings where the list holds strings, else
``None``.
"""

from __future__ import annotations

from typing import Any, final

import torch

from torchdistinput.batches import pytree
from torchdistinput.batches.schema import Structure
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
          structure: the structure of earlier pieces, if it is known: an empty list does not show the type of its items.

        Raises:
          BatchingError: a piece does not have one row for each sample, or has more than ``rows`` samples.
        """
        step.pieces = [self._padded(*each, structure) for each in zip(step.pieces, step.sizes, strict=True)]

    def _padded(self, piece: Any, size: int, structure: Structure | None) -> tuple[Any, ...]:
        if size > self._rows:
            raise BatchingError(f"a piece has {size} samples, and partial_batch='pad' makes pieces of {self._rows}.")
        mask = torch.arange(self._rows, device="cpu") < size
        if self._with_index:
            index, element = piece
            filled = index.new_full((self._rows,), -1)
            filled[:size] = index
            return filled, self._filled(element, size, None if structure is None else structure.children[1]), mask
        return self._filled(piece, size, structure), mask

    def _filled(self, element: Any, size: int, structure: Structure | None) -> Any:
        found = pytree.read(element, size, structure)
        if found is None or not found.leaves:
            raise BatchingError(
                f"a piece of {size} sample(s) has not one row for each, and partial_batch='pad' can fill up nothing "
                "else. Let the collate function make one row for each sample, or do without padding."
            )
        if size == self._rows:
            return element
        kinds = found.structure.leaves() if structure is None else structure.leaves()
        if len(kinds) != len(found.leaves):
            kinds = found.structure.leaves()
        filled = [self._fill(leaf, size, kind) for leaf, kind in zip(found.leaves, kinds, strict=True)]
        return found.structure.build(iter(filled))

    def _fill(self, leaf: Any, size: int, structure: Structure) -> Any:
        if not isinstance(leaf, list | tuple):
            filled = leaf.new_zeros((self._rows, *leaf.shape[1:]))
            filled[:size] = leaf
            return filled
        blank = "" if all(isinstance(item, str) for item in leaf) and structure.dtype is str else None
        return type(leaf)([*leaf, *[blank] * (self._rows - size)])

    def structure(self, structure: Structure) -> Structure:
        """The structure of the padded pieces, from the structure of the pieces."""
        mask = Structure("tensor", dtype=torch.bool)
        children = (*structure.children, mask) if self._with_index else (structure, mask)
        return Structure("tuple", tuple(range(len(children))), children, cls=tuple)
