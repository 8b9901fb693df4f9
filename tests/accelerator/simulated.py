"""Builds the simulated accelerator of ``simulated.cpp`` and makes it torch's, under the name ``simulated``.

    register()
    configure(seed=3, most_microseconds=200)
    torch.ones(3, device="simulated:1")

What it proves: the order of streams, events and allocators, through torch's real dispatcher. Not speed, and not CUDA.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

__all__ = ["NAME", "configure", "register"]

NAME = "simulated"
_DEVICES = 2
_SOURCE = Path(__file__).with_name("simulated.cpp")


def register() -> None:
    """Builds it, unless that was done before, and registers it in this process. A second call does nothing.

    Raises:
      RuntimeError: it cannot be compiled; a compiler, ninja and setuptools are needed.
    """
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    torch.ops.load_library(_built())  # type: ignore[no-untyped-call]
    torch.utils.backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())  # type: ignore[no-untyped-call]


def configure(seed: int, most_microseconds: int = 0, *, careful_host: bool = False, poison: bool = True) -> None:
    """How it behaves from now on, once all that is queued is done.

    Args:
      seed: draws the pace of each stream, and its pauses.
      most_microseconds: a queued task is preceded by a pause of up to so long on a fast stream, 16 times that on a slow
        one.
      careful_host: whether freed pinned memory waits for the queued copies that read it, as CUDA's does; else it is
        overwritten and handed on at once.
      poison: whether memory that is handed on is overwritten first; on the device in the order of its stream.
    """
    torch.ops.simulated.configure(seed, most_microseconds, careful_host, poison)


def _built() -> Path:
    """The library, in a folder of its own for each source and release of torch."""
    content = _SOURCE.read_bytes() + torch.__version__.encode()
    caches = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir()))
    folder = caches / f"torchdistinput_{NAME}" / hashlib.sha256(content).hexdigest()[:16]
    library = folder / f"{NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Elsewhere first: several processes may build at once, and one that is killed leaves a lock behind.
        with tempfile.TemporaryDirectory(dir=folder) as building:
            _compile(Path(building)).replace(library)
    return library


def _compile(folder: Path) -> Path:
    from torch.utils import cpp_extension  # noqa: PLC0415 - takes long, and needs setuptools

    cpp_extension.load(
        NAME, str(_SOURCE), extra_cflags=["-O1"], build_directory=str(folder), is_python_module=False, with_cuda=False
    )
    return folder / f"{NAME}.so"


def _module() -> types.ModuleType:
    """What torch looks for in ``torch.<name>``."""
    module = types.ModuleType(f"torch.{NAME}")
    knobs = torch.ops.simulated

    def index(device: Any) -> int:
        if isinstance(device, int):
            return device
        named = torch.device(device)
        return torch.accelerator.current_device_index() if named == torch.device(NAME) else named.index

    def manual_seed_all(seed: int) -> None:
        for device in range(_DEVICES):
            knobs.manual_seed(seed, device)

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: _DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "_is_in_bad_fork": knobs.in_fork,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=NAME: knobs.get_rng_state(index(device)),
        "set_rng_state": lambda state, device=NAME: knobs.set_rng_state(state, index(device)),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
