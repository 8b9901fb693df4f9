"""Checks that refuse wrong uses of a loader by training frameworks (accelerate, transformers, Lightning).

No framework is imported here. Some frameworks build a torch loader of their own from the attributes of a loader; every
rank would then read whole batches. So the attributes of a divided loader refuse to work in a torch loader that this
library did not make. The nearest frame on the call stack tells the two apart: torch's loader, or one of this library.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, final

from torch.utils.data import Sampler

from torchdistinput.errors import InputError

_LOG = logging.getLogger("torchdistinput")

PRIVATE_NAMES: Final = {
    "datasets.IterableDataset._distributed": "whether split_dataset_by_node() gave each rank a part of its own",
    "datasets.IterableDataset._ex_iterable": "whether a shuffle buffer is inside, which the state does not hold",
    "lightning.pytorch.trainer.connectors.data_connector._resolve_overfit_batches": (
        "asks for the sampler where overfit_batches turns shuffling off; found by its name in the callers"
    ),
    "lightning.pytorch.trainer.connectors.data_connector._check_dataloader_iterable": (
        "asks for an iterator that it does not read; found by its name in the callers, with its variable trainer_fn "
        "and the variable trainer of its caller"
    ),
}
"""The private names of frameworks that are looked at, and why. Where one is missing, nothing is found. Those of
accelerate are in ``integrations/accelerate.py``."""

_TORCHS_READERS: Final = "torch.utils.data."
"""Where the modules of torch are in which a loader, or one of its workers, makes a batch."""

_SAMPLERS_INSIDE: Final = ("sampler", "batch_sampler")
"""Attributes of a sampler that hold another one, which need not be a subclass of torch's ``Sampler``."""

_LOADERS: Final = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")
"""Modules in which a loader draws from its sampler."""

_PREPARE: Final = "loader = torchdistinput.integrations.accelerate.prepare(accelerator, loader)"

_TAKEN_APART: Final = (
    "a torch DataLoader was made of the attributes of a torchdistinput.DataLoader (dataset, sampler, batch_sampler, "
    "collate_fn); nothing divides it, so every rank would read whole batches. Iterate over the loader itself, and skip "
    "with loader.skip_to(step). For accelerate (prepare_data_loader, skip_first_batches) write "
    f"{_PREPARE}; with Ray Train leave prepare_data_loader out. If a whole loader is what you want on each rank, make "
    "it of loader.torch_loader's attributes."
)


@final
class GivenCollate:
    """The ``collate_fn`` attribute of a divided loader: works for any caller except another torch loader.

    Args:
      collate: the loader's own collate function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """The result of the loader's own collate function.

        Raises:
          InputError: the caller is a torch loader that was made of the attributes of a divided loader.
        """
        if _module_of(_caller(2)).startswith(_TORCHS_READERS):
            raise InputError(_TAKEN_APART)
        return self.collate(samples)

    def __repr__(self) -> str:
        return repr(self.collate)


@final
class GivenSampler:
    """The sampler or batch sampler attribute of a divided loader, with the attributes and the class of the original.

    Args:
      given: the loader's own sampler.
    """

    def __init__(self, given: Any) -> None:
        object.__setattr__(self, "given", given)

    @property  # type: ignore[misc] # scripts and frameworks ask whether it is a RandomSampler
    def __class__(self) -> type:
        return type(object.__getattribute__(self, "given"))

    def __iter__(self) -> Iterator[Any]:
        """The iterator of the loader's own sampler.

        Raises:
          InputError: the caller is a torch loader that was made of the attributes of a divided loader.
        """
        frame = _caller(2)
        while frame is not None:
            name = _module_of(frame)
            if name in _LOADERS:
                raise InputError(_TAKEN_APART)
            frame = None if name.startswith("torchdistinput.") else frame.f_back  # a loader of this library draws
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the loader's own sampler; a sampler inside of it refuses the same callers."""
        value = getattr(object.__getattribute__(self, "given"), name)
        return GivenSampler(value) if isinstance(value, Sampler) or name in _SAMPLERS_INSIDE else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.given, name, value.given if type(value) is GivenSampler else value)

    def __reduce__(self) -> tuple[Any, ...]:
        return GivenSampler, (self.given,)

    def __repr__(self) -> str:
        return repr(self.given)


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
        "the parts of a step are of unequal size here (or of unknown size), and accelerate's gather and "
        "gather_for_metrics, which evaluate() and predict() of transformers' Trainer call, hang on unequal parts. "
        f"Write {_PREPARE}; or let the number of ranks divide the (global) batch size, with drop_last=True."
    )


def check_trainer() -> None:
    """Refuses an epoch that transformers' ``Trainer`` begins itself. Called by an ``__iter__`` on several ranks. Local.

    Raises:
      InputError: the Trainer assumes parts of equal size, and cannot read a part without a row.
    """
    if _module_of(_caller(3)) == "transformers.trainer":
        raise InputError(
            "transformers' Trainer takes the parts of all ranks to be of one size, and to have a row each. In its "
            "get_train_dataloader, get_eval_dataloader and get_test_dataloader write: "
            "return torchdistinput.integrations.transformers.prepare(self, loader)."
        )


def lightning_replaces_sampler() -> bool:
    """Whether Lightning asks, to put another sampler in. Called by a function that an attribute calls. Local."""
    asker = _caller(4)
    in_turn = () if asker is None else (asker, asker.f_back)  # it may ask in a loop that is a frame of its own
    return any(each is not None and each.f_code.co_name == "_resolve_overfit_batches" for each in in_turn)


def only_tries(order_advice: Callable[[], str | None]) -> bool:
    """Whether Lightning asks for an epoch that it does not read. Called by an ``__iter__``. Local, on every rank alike.

    Args:
      order_advice: returns the advice by which each epoch has the same order; an empty text if each epoch has it
        already; ``None`` if this is not known.

    Returns:
      True: Lightning only checks whether the loader has an ``__iter__``.

    Raises:
      InputError: Lightning takes the batches for a list of loaders, to print how many samples each has; or it is to
        repeat the first batches of each epoch, and the epochs have different orders.
    """
    asker = _caller(3)
    name = "" if asker is None else asker.f_code.co_name
    if _module_of(asker).endswith(".core.datamodule") and name == "format_loader_info":
        raise InputError(
            "str() of Lightning's data module reads the batches of a loader that is not torch's, as if they were "
            "loaders. In the data module write: __str__ = object.__repr__; len(loader.dataset) tells the samples."
        )
    if asker is None or name != "_check_dataloader_iterable":
        return False
    if _overfits(asker):
        _check_order(order_advice())
    return True


def _overfits(asker: FrameType) -> bool:
    """Whether Lightning's ``Trainer`` fits with ``overfit_batches``, as the frames show that check a loader."""
    setup = asker.f_back
    trainer = None if setup is None else setup.f_locals.get("trainer")
    return asker.f_locals.get("trainer_fn") == "fit" and getattr(trainer, "overfit_batches", 0) > 0


def _check_order(advice: str | None) -> None:
    if advice is None:
        _LOG.warning(
            "Lightning's overfit_batches repeats the first batches of each epoch. This data decides its order itself: "
            "these batches are the same ones only if it does not shuffle."
        )
    elif advice:
        raise InputError(
            "Lightning's overfit_batches wants the same first batches in each epoch, and this data is shuffled; "
            f"Lightning turns shuffling off for torch's own DataLoader only. {advice}"
        )


def _caller(levels: int) -> FrameType | None:
    """The frame so many levels up; ``None`` where there is none."""
    frame = inspect.currentframe()
    for _ in range(levels):
        frame = None if frame is None else frame.f_back
    return frame


def _module_of(frame: FrameType | None) -> str:
    name = "" if frame is None else frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def _gradient_state() -> Any:
    """The ``GradientState`` of accelerate, if this process has an ``Accelerator``; else ``None``."""
    state: Any = sys.modules.get("accelerate.state")
    return state.GradientState() if state is not None and state.is_initialized() else None
