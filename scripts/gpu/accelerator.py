"""The accelerator of this machine, or the simulated one; work of a known length on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Figures", "busy", "device", "is_real", "milliseconds_of"]

Figures = dict[str, Any]
"""What a part found: plain JSON, with ``ok``, whether it holds what it must."""

_CYCLES = 20_000_000


def device() -> torch.device:
    """The first accelerator; where there is none, the simulated one is built and registered."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        from tests.accelerator import simulated  # noqa: PLC0415 - needs a compiler, and only where nothing real is

        simulated.register()
        simulated.configure(0, 100)
        found = torch.accelerator.current_accelerator()
    if found is None:
        raise RuntimeError("there is no accelerator here, and the simulated one did not register")
    torch.zeros(1, device=torch.device(found.type, 0))  # `synchronize` does nothing before the device is initialised
    return torch.device(found.type, 0)


def is_real(where: torch.device) -> bool:
    """Whether figures mean something: the part knows CUDA's timed kernels only."""
    return where.type == "cuda"


def busy(where: torch.device) -> Callable[[float], None]:
    """A kernel that occupies the current stream for so many milliseconds. On a simulated accelerator: nothing."""
    if not is_real(where):
        return lambda milliseconds: None
    sleep: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001 - the only kernel of a known length
    sleep(_CYCLES)
    cycles_per_ms = _CYCLES / milliseconds_of(lambda: sleep(_CYCLES), where, 30)
    return lambda milliseconds: sleep(max(1, round(milliseconds * cycles_per_ms)))


def milliseconds_of(call: Callable[[], object], where: torch.device, calls: int) -> float:
    """A call, with the device at rest before and after."""
    call()
    torch.accelerator.synchronize(where)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.accelerator.synchronize(where)
    return 1e3 * (time.perf_counter() - start) / calls
