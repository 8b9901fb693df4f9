"""An accelerator as torch's default device, on a machine without one.

What is made without saying where is on ``meta``, so that whoever reads it, or mixes it with what is on the CPU, fails.
As on an accelerator, seeds can be drawn there and read, and a generator of another device is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import pytest
import torch
from torch.utils._device import DeviceContext

from torchdistinput.sources import random_state

__all__ = ["Elsewhere", "lend_generators"]

_DRAWS: Final = (torch.randperm, torch.randint)


@final
class _OnDevice(torch.Tensor):
    """Numbers that are read as an accelerator's are."""

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert meta device type tensor to numpy. Use Tensor.cpu()")
        return self.as_subclass(torch.Tensor).numpy()


@final
class Elsewhere(DeviceContext):  # `torch.get_default_device` knows no other kind
    """``with torch.device(...)`` of such a device.

    Args:
      generators: those that are of this device.
    """

    def __init__(self, *generators: torch.Generator) -> None:
        super().__init__("meta")
        self._generators = generators

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        generator = given.get("generator")
        if func is torch.empty and tuple(args) == ((),):  # a seed
            return func(*args, **given)
        if func in _DRAWS and generator is not None and given.get("device") is None:
            if all(generator is not own for own in self._generators):
                raise RuntimeError("Expected a 'meta' device type for generator but found 'cpu'")
            return func(*args, **given).as_subclass(_OnDevice)
        if func is torch.stack and args[0][0].is_meta:  # by itself it would import all of torch's compiler
            return torch.empty((len(args[0]), *args[0][0].shape), dtype=args[0][0].dtype, device="meta")
        return super().__torch_function__(func, types, args, given)  # type: ignore[no-untyped-call] # torch's


def lend_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that are drawn there come from the CPU's default state, as ``meta`` has no generator."""
    monkeypatch.setattr(random_state, "default_state", lambda _device: torch.get_rng_state())
    monkeypatch.setattr(random_state, "new_generator", lambda _device: torch.Generator())
