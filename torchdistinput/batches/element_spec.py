"""The ``element_spec`` of an iterator's elements, and how many bytes the elements take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from torchdistinput.batches.padding import Pad
from torchdistinput.batches.per_replica import PerReplica
from torchdistinput.batches.pytree import flatten, holds_tensors
from torchdistinput.batches.schema import TensorSpec
from torchdistinput.batches.schema_check import SchemaChecker
from torchdistinput.errors import InputError


@final
class Elements:
    """The facts about the elements, once one element was seen.

    Args:
      checker: knows the structure of the elements.
      piece_size: the size of every piece, where all pieces have one size.
      replicas_per_worker: pieces of an element.
      pad: pads the pieces to one size; ``None`` for no padding.
    """

    def __init__(
        self, checker: SchemaChecker, piece_size: int | None, replicas_per_worker: int, pad: Pad | None
    ) -> None:
        self._checker = checker
        self._piece_size = piece_size
        self._local = replicas_per_worker
        self._pad = pad

    def spec(self) -> Any:
        """The element spec.

        Raises:
          InputError: the data ended before the first element.
        """
        structure = self._checker.looks
        if structure is None:
            raise InputError("the data ended before the first element, so there is no element spec.")
        if self._pad is not None:
            return self._pad.structure(structure).spec(self._pad.rows, self._for_each_replica)
        if not structure.leaves():
            raise InputError(f"the elements are of type {structure}, of which no tensor is known: there is no spec.")
        size = None if self._checker.row_bytes is None else self._piece_size  # else its rows need not be samples
        return structure.spec(size, self._for_each_replica)

    def _for_each_replica(self, spec: TensorSpec) -> Any:
        return spec if self._local == 1 else PerReplica([spec] * self._local)

    def num_bytes(self, samples: int, pieces: Sequence[Any]) -> int:
        """Bytes of the tensors in the pieces of a step with ``samples`` samples in all. Called at every step.

        The tensors are added up one by one only if their shapes differ from element to element.
        """
        of_row = self._checker.row_bytes
        if of_row is not None and self._pad is None:
            return of_row * samples
        if self._checker.looks is None:  # opaque batches
            return 0
        if of_row is None or self._pad is None:
            held = (flatten(piece)[0] for piece in pieces if holds_tensors(piece))
            leaves = (leaf for each in held for leaf in each if isinstance(leaf, torch.Tensor))
            return sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        return self._local * self._pad.rows * (of_row + 1)  # a mask has a byte for each row
