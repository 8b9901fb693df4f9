"""What is known of training frameworks, without importing them: when they would get a loader wrong, and who asks.

A framework that takes a loader apart builds a torch loader of its own from its attributes, and every rank reads whole
batches. So what a divided loader gives out refuses to work for a torch loader that was not made here. The nearest frame
tells for whom: torch's, or one of this library's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, final

from torchdistinput.errors import InputError

__all__ = ["GivenCollate", "check_accelerate", "check_gathering"]

_TORCHS_READERS: Final = ("torch.utils.data._utils.fetch", "torch.utils.data.dataloader")
"""Modules of torch in which a loader, or one of its workers, makes a batch."""

_PREPARE: Final = "loader = torchdistinput.integrations.accelerate.prepare(accelerator, loader)"


@final
class GivenCollate:
    """The ``collate_fn`` of a divided loader, as others see it. Whoever calls it gets what it returns.

    Args:
      collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """What the loader's own returns.

        Raises:
          InputError: a torch loader calls it that was made of the attributes of a divided one.
        """
        if sys._getframe(1).f_globals.get("__name__") in _TORCHS_READERS:  # noqa: SLF001 - Python has no other way
            raise InputError(
                "a torch DataLoader was made of the attributes of a torchdistinput.DataLoader (dataset, batch_sampler, "
                "collate_fn); nothing divides it, so every rank would read whole batches. Iterate over the loader "
                "itself, and skip with loader.skip_to(step). For accelerate (prepare_data_loader, skip_first_batches) "
                f"write {_PREPARE}; with Ray Train leave prepare_data_loader out. If a whole loader is what you want "
                "on each rank, make it of loader.torch_loader's attributes."
            )
        return self.collate(samples)

    def __repr__(self) -> str:
        return repr(self.collate)


def check_accelerate() -> None:
    """Refuses an epoch whose end accelerate does not see while it accumulates gradients. Local, on every rank alike.

    Raises:
      InputError: it would leave out the last update, which is of fewer batches than the others.
    """
    gradients = _gradient_state()
    if gradients is None or gradients.in_dataloader or not gradients.sync_with_dataloader or gradients.num_steps == 1:
        return
    raise InputError(
        f"accelerate accumulates the gradients of {gradients.num_steps} batches, and does not see where this loader "
        f"ends: accumulate() would never make the last update, of the batches that are left. Write {_PREPARE}."
    )


def check_gathering(*, equal: bool) -> None:
    """Refuses parts of unequal size where accelerate may gather them. Local, on every rank alike.

    Args:
      equal: whether the parts of each step are known to be of one size.

    Raises:
      InputError: accelerate's gather, which takes them to be equal, would hang.
    """
    gradients = None if equal else _gradient_state()
    if gradients is None or getattr(gradients.active_dataloader, "tells_accelerate", False):
        return
    raise InputError(
        "the parts of a step are of unequal size here (or of unknown size), and accelerate's gather and "
        "gather_for_metrics, which evaluate() and predict() of transformers' Trainer call, hang on unequal parts. "
        f"Write {_PREPARE}; or let the number of ranks divide the (global) batch size, with drop_last=True."
    )


def _gradient_state() -> Any:
    """The ``GradientState`` of accelerate, if this process has an ``Accelerator``; else ``None``."""
    state: Any = sys.modules.get("accelerate.state")
    return state.GradientState() if state is not None and state.is_initialized() else None
