"""Checks that refuse wrong uses of a loader by training frameworks (accelerate, transformers, Lightning).

No framework is imported here. Some frameworks build a torch loader of their own from the attributes of a loader; every
rank would then read whole batches. So on several ranks the sampler of a loader, as an attribute, can be asked for all
but its indices, and its ``collate_fn`` makes no batch. A loader of this library takes the originals out of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, final

from torch.utils.data import Sampler

from torchdistinput.errors import InputError

PRIVATE_NAMES: Final = {
    "datasets.IterableDataset._ex_iterable": "whether a shuffle buffer is inside, which the state does not hold",
}
"""The private names of frameworks that are looked at, and why. Where one is missing, nothing is found. Those of
accelerate are in ``integrations/accelerate.py``."""

_SAMPLERS_INSIDE: Final = ("sampler", "batch_sampler")
"""Attributes of a sampler that hold another one, which need not be a subclass of torch's ``Sampler``."""

_PREPARE: Final = "loader = torchdistinput.integrations.accelerate.prepare(accelerator, loader)"

_TAKEN_APART: Final = (
    "the sampler, batch_sampler or collate_fn of a torchdistinput.DataLoader was used by others; with it every rank "
    "would read whole batches. Iterate over the loader itself, and skip with loader.seek(epoch, step). For accelerate "
    f"write {_PREPARE}; with Ray Train leave prepare_data_loader out. To read all on each rank use loader.torch_loader."
)


@final
class GivenCollate:
    """The ``collate_fn`` attribute of a divided loader. Only a loader of this library takes it and calls its original.

    Args:
      given: the loader's own collate function.
    """

    def __init__(self, given: Callable[[Any], Any]) -> None:
        self.given = given

    def __call__(self, _: Any) -> Any:
        """Nothing.

        Raises:
          InputError: always, with the way out.
        """
        raise InputError(_TAKEN_APART)

    def __repr__(self) -> str:
        return repr(self.given)


@final
class GivenSampler:
    """The sampler or batch sampler attribute of a divided loader: all that the original has, except that it draws.

    Args:
      given: the loader's own sampler.
    """

    def __init__(self, given: Any) -> None:
        object.__setattr__(self, "given", given)

    @property  # type: ignore[misc] # scripts and frameworks ask whether it is a RandomSampler
    def __class__(self) -> type:
        return type(object.__getattribute__(self, "given"))

    def __iter__(self) -> Iterator[Any]:
        """Nothing.

        Raises:
          InputError: always, with the way out.
        """
        raise InputError(_TAKEN_APART)

    def __len__(self) -> int:
        return len(self.given)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the loader's own sampler; a sampler inside of it does not draw either."""
        value = getattr(object.__getattribute__(self, "given"), name)
        return GivenSampler(value) if isinstance(value, Sampler) or name in _SAMPLERS_INSIDE else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.given, name, own(value))

    def __reduce__(self) -> tuple[Any, ...]:
        return GivenSampler, (self.given,)

    def __repr__(self) -> str:
        return repr(self.given)


def own(given: Any) -> Any:
    """What a loader of this library is given, with the originals of such attributes, also inside of a sampler."""
    if type(given) in {GivenSampler, GivenCollate}:
        return given.given
    for name, value in [*getattr(given, "__dict__", {}).items()]:
        if type(value) is GivenSampler:
            setattr(given, name, value.given)
    return given


def check_accelerate() -> None:
    """Refuses an epoch whose end accelerate does not see while it accumulates gradients. Local, on every rank alike.

    Raises:
      InputError: accelerate would leave out the last update, which has fewer batches than the others.
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
      InputError: accelerate's gather, which assumes equal parts, would hang.
    """
    gradients = None if equal else _gradient_state()
    if gradients is None or getattr(gradients.active_dataloader, "tells_accelerate", False):
        return
    raise InputError(
        "the parts of a step may be of unequal size here. accelerate's gather and gather_for_metrics, which a Trainer "
        f"calls, hang on unequal parts. Write {_PREPARE}; in the methods of a Trainer that return loaders: "
        "return torchdistinput.integrations.transformers.prepare(self, loader). Or let the number of ranks divide the "
        "batch size, with drop_last=True."
    )


def check_trainer(*, equal: bool) -> None:
    """Refuses parts of unequal size where a Trainer of transformers may gather them. Local, on every rank alike.

    In a loop of one's own, accelerate may keep the model and the optimizer of a loader that it does not know.

    Args:
      equal: see ``check_gathering``, as for the error.
    """
    if may_have_trainer():
        check_gathering(equal=equal)


def may_have_trainer() -> bool:
    """Whether this program has imported the ``Trainer`` of transformers. Local."""
    return "transformers.trainer" in sys.modules


def _gradient_state() -> Any:
    """The ``GradientState`` of accelerate, if this process has an ``Accelerator``; else ``None``."""
    state: Any = sys.modules.get("accelerate.state")
    return state.GradientState() if state is not None and state.is_initialized() else None
