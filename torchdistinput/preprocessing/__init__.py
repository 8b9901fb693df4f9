"""Four of Keras's preprocessing layers for torch: those that learn, exactly, and alike on all ranks.

A layer is an ``nn.Module`` without parameters. It runs in a dataset's pipeline and in the model. ``adapt(data)`` is
collective and learns by ``torchdistinput.analyze``, so the result has the same bits at any world size. ``state_dict``
holds everything that was learned, vocabularies too. Arguments, order of vocabularies, masks and output modes are
Keras's.

Where these layers differ from Keras 3.15 (on TensorFlow 2.17):

| Keras | here |
| --- | --- |
| means, variances and boundaries depend on the batches | exact, rounded once to float32 |
| vectors of rank 3 and more sum over axis 1 | over the last axis, as documented |
| ``one_hot`` of a scalar is ``(1, depth)`` | ``(depth,)`` |
| ``max_tokens`` below the special tokens cuts from the end | an error in the constructor |
| no term left is an error when asked | an empty vocabulary |
| NULs at the end of a term are lost | kept |
| float ids become ints; ids out of range are dropped | an error |
| ``Normalization`` without ``adapt`` returns its input; inputs of another width are broadcast | an error |
| ``n`` values, fewer than bins, give ``n - 1`` boundaries | ``num_bins - 1`` boundaries |
| ``sparse=True``, ``output_mode="tf_idf"``, ``num_oov_indices`` above 1 | not offered |

- ``layer``: The code shared by all layers: learning, the state, output modes.
- ``inputs``: Inputs of a layer as flat values and a shape.
- ``numbers``: ``Normalization``, ``Discretization``.
- ``lookup``: ``StringLookup``, ``IntegerLookup``.
"""

from __future__ import annotations

from torchdistinput.preprocessing.lookup import IntegerLookup, StringLookup
from torchdistinput.preprocessing.numbers import Discretization, Normalization

__all__ = [
    "Discretization",
    "IntegerLookup",
    "Normalization",
    "StringLookup",
]
