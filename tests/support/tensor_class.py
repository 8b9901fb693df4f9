"""A tensorclass, in a module of its own: to make it imports tensordict."""

from __future__ import annotations

import tensordict
import torch


@tensordict.tensorclass
class Sample:
    """An image with its label."""

    image: torch.Tensor
    label: torch.Tensor
