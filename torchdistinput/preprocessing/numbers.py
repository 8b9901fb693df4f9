"""Layers of numbers: ``Normalization`` and ``Discretization``."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from torchdistinput.analysis import chosen_strategy
from torchdistinput.preprocessing.inputs import numbers
from torchdistinput.preprocessing.layer import as_it_is, as_vectors, check_mode, learn_from
from torchdistinput.statistics import Counts, Moments, Quantiles
from torchdistinput.strategy import Strategy

_MIN_STD: Final = 1e-7  # Keras's epsilon


@final
class Normalization(nn.Module):
    """Shifts and scales numbers to mean 0 and variance 1, as ``keras.layers.Normalization``.

    >>> layer = tdi.preprocessing.Normalization(axis=None)
    >>> layer.adapt(torch.tensor([1.0, 3.0]))
    >>> layer(torch.tensor([1.0, 2.0, 3.0]))
    tensor([-1.,  0.,  1.])

    Args:
      axis: the dims whose features have a mean and a variance each; ``None`` for one mean and variance of all numbers.
      mean: the mean, instead of ``adapt``: a number, or one for each feature.
      variance: the variance.
      invert: whether the layer maps normalised numbers back.

    Raises:
      ValueError: only one of mean and variance is given, they differ in shape or have more dims than ``axis``, or a
        variance is negative.
    """

    mean: Tensor | None
    variance: Tensor | None

    def __init__(
        self, axis: int | Sequence[int] | None = -1, mean: Any = None, variance: Any = None, *, invert: bool = False
    ) -> None:
        super().__init__()
        self.axis: tuple[int, ...] = () if axis is None else (axis,) if isinstance(axis, int) else tuple(sorted(axis))
        self.invert = invert
        self._is_fixed = mean is not None
        self._dims = 0  # the number of dims of the data, once it was learned
        if (mean is None) != (variance is None):
            raise ValueError("Normalization: mean and variance are given both, or neither of them.")
        self._set(mean, variance)

    def _set(self, mean: Any, variance: Any) -> None:
        found = [None if each is None else torch.as_tensor(each, dtype=torch.float32) for each in (mean, variance)]
        for name, each in zip(("mean", "variance"), found, strict=True):
            if each is not None and each.dim() > len(self.axis):
                raise ValueError(
                    f"Normalization: {name} has shape {tuple(each.shape)}; axis={self.axis} has {len(self.axis)} dims."
                )
            self.register_buffer(name, each, persistent=False)  # the extra state holds it, whatever its shape
        if self.mean is not None and self.variance is not None and self.mean.shape != self.variance.shape:
            shapes = f"{tuple(self.mean.shape)} and {tuple(self.variance.shape)}"
            raise ValueError(f"Normalization: mean and variance have the shapes {shapes}; they must be the same.")
        if self.variance is not None and bool((self.variance < 0).any()):
            raise ValueError(f"Normalization: a variance is {float(self.variance.min())}; it must be 0 or more.")

    def adapt(self, data: Any, *, strategy: Strategy | None = None) -> None:
        """Learns mean and variance, exactly. Collective: every rank calls this with the same data.

        Args:
          data: see ``layer.learn_from``: a tensor or array of samples, or batches.
          strategy: the ranks; see ``analyze``.

        Raises:
          ValueError: mean and variance were given; there is no data; or the data has no such dim.
        """
        if self._is_fixed:
            raise ValueError("Normalization: mean and variance were given; there is nothing to learn.")
        used = chosen_strategy(strategy)
        # Where dim 0 tells features apart, an array is one sample, and so is each batch of an iterable.
        shifted = tuple(each + 1 if each >= 0 and 0 in self.axis else each for each in self.axis)
        added = 0
        if isinstance(data, Tensor | np.ndarray | list | tuple):
            data = numbers(data, "Normalization")
            added = int(self._keeps_first_dim(data))
            data = data.unsqueeze(0) if added else data

        def select(batch: Any) -> Any:
            array = numbers(batch, "Normalization")
            if isinstance(data, Tensor) or not self._keeps_first_dim(array):
                return array
            if used.num_replicas_in_sync > 1:
                raise ValueError(
                    f"Normalization: axis={self.axis} of batches of shape {tuple(array.shape)} has dim 0, along which "
                    "batches are divided among replicas. Give samples (n, features), or axis=None."
                )
            return array.unsqueeze(0)

        moments = Moments(axis=shifted or None, dtype="float32")
        spec = {"x": (select, moments), "dims": (lambda batch: [numbers(batch, "Normalization").dim()], Counts())}
        found = learn_from(data, spec, strategy=used)
        self._dims = max(found["dims"].values) - added
        self._set(found["x"].mean, found["x"].variance)

    def _keeps_first_dim(self, array: Tensor) -> bool:
        return any(each in (0, -array.dim()) for each in self.axis) and array.dim() > 0

    def forward(self, inputs: Any) -> Tensor:
        """The normalised numbers, float32; float64 for float64. Local.

        Raises:
          ValueError: the layer has learned nothing yet, or the input has another width.
        """
        if self.mean is None or self.variance is None:
            raise ValueError("Normalization: there is no mean yet; call adapt(data), or give mean and variance.")
        x = numbers(inputs, "Normalization")
        x = x if x.dtype is torch.float64 else x.to(torch.float32)
        x = x.reshape((1,) * (self._dims - x.dim()) + x.shape)
        mean, variance = self._along(self.mean, x), self._along(self.variance, x)
        scale = variance.sqrt().clamp_min(_MIN_STD)
        return mean + x * scale if self.invert else (x - mean) / scale

    def _along(self, features: Tensor, x: Tensor) -> Tensor:
        """The values of the features in a shape that broadcasts with ``x``."""
        if not features.dim():
            return features
        kept = [each + x.dim() if each < 0 else each for each in self.axis][-features.dim() :]
        shape = [1] * x.dim()
        wanted = [x.shape[each] if 0 <= each < x.dim() else -1 for each in kept]
        if wanted != list(features.shape) and features.numel() > 1:
            raise ValueError(
                f"Normalization: the input has shape {tuple(x.shape)}, so axis={self.axis} is {wanted} wide; the mean "
                f"has shape {list(features.shape)}."
            )
        for each, size in zip(kept, features.shape, strict=True):
            if 0 <= each < x.dim():
                shape[each] = size
        return features.reshape(shape)

    def get_extra_state(self) -> dict[str, Any]:
        """The learned values, for ``state_dict``."""
        return {"mean": self.mean, "variance": self.variance, "dims": self._dims}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes over learned values, from ``load_state_dict``."""
        self._dims = state["dims"]
        self._set(state["mean"], state["variance"])


@final
class Discretization(nn.Module):
    """Puts numbers into bins, as ``keras.layers.Discretization``: bin ``i`` is ``[b[i-1], b[i])``; NaN is in the last.

    >>> tdi.preprocessing.Discretization([0.0, 1.0])(torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    tensor([0, 1, 1, 2], dtype=torch.int32)

    Args:
      bin_boundaries: the boundaries, rising.
      num_bins: how many bins ``adapt`` learns, with equally many values each, instead of boundaries.
      epsilon: has no effect: boundaries are exact.
      output_mode: "int" (int32), "one_hot", "multi_hot" or "count" (float32).

    Raises:
      ValueError: both boundaries and ``num_bins`` are given, or neither; ``num_bins`` is less than 1.
    """

    bin_boundaries: Tensor | None

    def __init__(
        self,
        bin_boundaries: Sequence[float] | None = None,
        num_bins: int | None = None,
        epsilon: float = 0.01,
        output_mode: str = "int",
    ) -> None:
        super().__init__()
        check_mode("Discretization", output_mode)
        if (bin_boundaries is None) == (num_bins is None):
            raise ValueError("Discretization: give bin_boundaries or num_bins, and not both.")
        if num_bins is not None and num_bins < 1:
            raise ValueError(f"Discretization: num_bins={num_bins}; it must be 1 or more.")
        self.num_bins, self.epsilon, self.output_mode = num_bins, epsilon, output_mode
        self._set(bin_boundaries)

    def _set(self, boundaries: Any) -> None:
        found = None if boundaries is None else torch.as_tensor(boundaries, dtype=torch.float32)
        if found is not None and not bool((found[1:] >= found[:-1]).all()):
            raise ValueError(f"Discretization: the boundaries {found.tolist()!r:.80} do not rise.")
        self.register_buffer("bin_boundaries", found, persistent=False)

    def adapt(self, data: Any, *, strategy: Strategy | None = None) -> None:
        """Learns the boundaries: exact quantiles ``k / num_bins``. Collective: every rank calls this.

        As in Keras, a quantile is interpolated between ranks counted from 1.

        Args:
          data: see ``layer.learn_from``.
          strategy: the ranks; see ``analyze``.

        Raises:
          ValueError: the boundaries were given, or there is no data.
        """
        if self.num_bins is None:
            raise ValueError("Discretization: bin_boundaries were given; there is nothing to learn.")
        q = [Fraction(each, self.num_bins) for each in range(1, self.num_bins)]
        quantiles = Quantiles(q, axis=None, method="interpolated_inverted_cdf", dtype="float32", nan_policy="omit")
        self._set(learn_from(data, {"x": (as_it_is, quantiles)}, strategy=strategy)["x"])

    def forward(self, inputs: Any) -> Tensor:
        """The bins, in the output mode. Local.

        Raises:
          ValueError: the layer has learned nothing yet.
        """
        if self.bin_boundaries is None:
            raise ValueError("Discretization: there are no boundaries yet; call adapt(data), or give them.")
        x = numbers(inputs, "Discretization")
        precise = torch.float32 if x.dtype.is_floating_point and x.dtype is not torch.float64 else torch.float64
        x = x.to(precise)
        bins = torch.bucketize(x, self.bin_boundaries.to(precise), right=True)
        bins = torch.where(x.isnan(), len(self.bin_boundaries), bins)
        if self.output_mode == "int":
            return bins.to(torch.int32)
        return as_vectors(bins, self.output_mode, len(self.bin_boundaries) + 1, dtype=torch.float32)

    def get_extra_state(self) -> dict[str, Any]:
        """The learned values, for ``state_dict``."""
        return {"bin_boundaries": self.bin_boundaries}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes over learned values, from ``load_state_dict``."""
        self._set(state["bin_boundaries"])
