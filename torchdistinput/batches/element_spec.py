"""The ``element_spec`` of an iterator's elements, and how many bytes the elements take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torchdistinput.batches.padding import Pad
from torchdistinput.batches.per_replica import PerReplica, regroup_batches
from torchdistinput.batches.pytree import flatten, is_list_of_samples, leaves_like, num_bytes
from torchdistinput.batches.schema import Structure, TensorSpec
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
      of_one_batch: whether the pieces of a step are cut out of one batch, and not each a batch of a dataset function.
    """

    def __init__(
        self,
        checker: SchemaChecker,
        piece_size: int | None,
        replicas_per_worker: int,
        pad: Pad | None,
        *,
        of_one_batch: bool = True,
    ) -> None:
        self._checker = checker
        self._piece_size = piece_size
        self._local = replicas_per_worker
        self._pad = pad
        self._of_one_batch = of_one_batch
        self._padded: tuple[Structure | None, Structure | None] = (None, None)  # a structure, and with padding

    def spec(self) -> Any:
        """The element spec.

        Raises:
          InputError: the data ended before the first element.
        """
        structure = self._checker.leaf_structure
        if structure is None:
            raise InputError("the data ended before the first element, so there is no element spec.")
        if self._pad is not None:
            return self._pad.structure(self._checker.structure or structure).spec(
                self._pad.rows, self._for_each_replica
            )
        if all(leaf.kind == "constant" for leaf in structure.leaves):
            raise InputError(f"the elements are of type {structure}, of which no tensor is known: there is no spec.")
        size = self._piece_size if self._checker.has_rows else None
        return structure.spec(size, self._for_each_replica)

    def _for_each_replica(self, spec: TensorSpec) -> Any:
        return spec if self._local == 1 else PerReplica([spec] * self._local)

    def regroup(self, pieces: Sequence[Any]) -> Any:
        """The element that is made of the pieces of the local replicas."""
        structure = self._checker.structure
        if self._pad is not None and structure is not None:
            known = self._padded  # read once: another thread may complete a step
            if structure is not known[0]:
                self._padded = known = structure, self._pad.structure(structure)
            structure = known[1]
        return regroup_batches(pieces, structure, of_one_batch=self._of_one_batch)

    def num_bytes(self, samples: int, pieces: Sequence[Any]) -> int:
        """Bytes of the tensors in the pieces of a step with ``samples`` samples in all. Called at every step.

        The tensors are added up one by one unless it is known that all samples are alike.
        """
        of_row = self._checker.row_bytes
        if of_row is not None and self._pad is None:
            return of_row * samples
        structure = self._checker.leaf_structure
        if structure is None:  # opaque batches
            return 0
        found = 0
        for piece in pieces:
            if is_list_of_samples(piece):  # such as records of files, which count nothing
                continue
            leaves = None if structure.nesting is None else leaves_like(structure.nesting, piece)
            found += sum(map(num_bytes, flatten(piece)[0] if leaves is None else leaves))
        return found
