"""Prepares a loader of this library for accelerate, which then sees its end, skips steps in it, and gathers its parts.

Problem. ``accumulate`` makes the last update where ``GradientState`` says that the loader ends; ``gather`` takes the
parts of all ranks to be equal; ``skip_first_batches`` builds a torch loader out of a loader's attributes.

Decisions.
- The attributes of a prepared loader describe a torch loader over *steps*: its batch sampler yields their numbers, its
  dataset is asked for a step by number, and seeks. So what accelerate builds of it is still divided.
- The next step is asked for before a step is handed out, as in accelerate's own loaders, but stays the next one.
- ``gather`` of that one accelerator is exchanged, as the user asked for by the call; no module of accelerate's is.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sized
from typing import Any, Final, final

import torch
from accelerate import Accelerator

from torchdistinput.batches.per_replica import take_apart
from torchdistinput.data_loader import DataLoader, dataset_of
from torchdistinput.dataset import DistributedDataset, draws_from_default_state
from torchdistinput.errors import InputError
from torchdistinput.frameworks import may_have_trainer
from torchdistinput.plan.options import Step
from torchdistinput.sources.checks import length_of
from torchdistinput.strategy import Strategy

__all__ = ["PRIVATE_NAMES", "PreparedLoader", "prepare"]

PRIVATE_NAMES: Final = {
    "accelerate.state.GradientState._add_dataloader": "tells accelerate which loader is read, and so where it ends",
    "accelerate.state.GradientState._remove_dataloader": "for the same",
    "accelerate.data_loader.DataLoaderShard._is_accelerate_prepared": (
        "lets prepare_data_loader() return the loader as it is; an attribute of ours that it looks at"
    ),
}
"""The private names of accelerate that are used here, and why."""


def prepare(accelerator: Accelerator, loader: DataLoader[Any] | DistributedDataset) -> PreparedLoader:
    """The loader with the interface of accelerate's own loaders. Collective: every rank calls this, in the same order.

    From then on ``accelerator.gather`` and ``gather_for_metrics`` take parts of any size, and cut nothing off.

    Args:
      accelerator: the accelerator of the training.
      loader: a ``torchdistinput.DataLoader``, or what ``strategy.distribute_dataset`` returned.

    Raises:
      InputError: it is another kind of loader.
    """
    if may_have_trainer():
        warnings.warn(
            "if this loader is for a Trainer of transformers, write in its get_train_dataloader, get_eval_dataloader "
            "and get_test_dataloader: return torchdistinput.integrations.transformers.prepare(self, loader). A Trainer "
            "takes the parts of all ranks to be of one size, and to have a row each. A loop of your own needs no more.",
            stacklevel=2,
        )
    return loader_for(accelerator, loader)


def loader_for(accelerator: Accelerator, loader: DataLoader[Any] | DistributedDataset) -> PreparedLoader:
    """See ``prepare``; also for a Trainer, whose own calls ``integrations.transformers`` exchanges. Collective."""
    if not isinstance(loader, DataLoader | DistributedDataset):
        raise InputError(
            f"found a {type(loader).__name__} to prepare; a torchdistinput.DataLoader is needed, or what "
            "strategy.distribute_dataset() returned. accelerator.prepare() takes loaders of torch."
        )
    if not isinstance(accelerator.gather, _Gather):
        accelerator.gather = _Gather(Strategy([accelerator.device]))
    found = PreparedLoader(loader, accelerator)
    accelerator.prepare_data_loader(found)  # which notes it, so that save_state() saves its state
    return found


@final
class PreparedLoader:
    """A loader of this library with the interface of accelerate's own loaders. Made by ``prepare``.

    Iterating it is an epoch of the loader. ``step``, ``set_epoch``, ``state_dict`` and ``load_state_dict`` are the
    loader's.

    Args:
      loader: the loader.
      accelerator: the accelerator.
    """

    tells_accelerate = True
    _is_accelerate_prepared = True  # accelerator.prepare_data_loader() returns it as it is
    use_stateful_dataloader = True  # so accelerator.save_state() asks for its state

    # A torch loader over steps, as accelerate.skip_first_batches builds it.
    batch_size = 1
    num_workers = 0
    prefetch_factor = None
    drop_last = False

    def __init__(self, loader: DataLoader[Any] | DistributedDataset, accelerator: Accelerator) -> None:
        self.loader = loader
        self.end_of_dataloader = False
        self.remainder = 0  # rows that gather_for_metrics leaves out at the end; there are no repeats
        self.generator = torch.Generator()  # torch draws a seed from it, and not from the default one
        self.dataset = _Steps(self)
        self.batch_sampler = self.sampler = _StepNumbers(self)
        self._is_alone = accelerator.num_processes == 1
        self._gradients = accelerator.gradient_state
        self._next_epoch = 0
        self._passed_epochs = 0  # epochs that ``skipping`` read to their end, which the caller does not count

    @staticmethod
    def collate_fn(steps: list[Any]) -> Any:
        """The one step in the list."""
        return steps[0]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._next_epoch += 1
        return self._read()

    def _read(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        self._gradients._add_dataloader(self)  # noqa: SLF001 - accelerate has no other way
        iterator: Any = None
        try:
            iterator = iter(self.loader)
            more = iterator.has_next()
            while more:
                element, failure = next(iterator), None
                try:
                    more = iterator.has_next()
                except Exception as error:  # of the next step: this one comes first
                    failure = error
                self.end_of_dataloader = not more
                yield element
                if failure is not None:
                    raise failure
            next(iterator, None)  # the end: from here on the state is that of the next epoch
        finally:
            self._gradients._remove_dataloader(self)  # noqa: SLF001 - as above
            if iterator is not None:
                iterator.close()

    @property
    def has_equal_parts(self) -> bool:
        """Whether the parts of each step are known to be of one size. Local."""
        return self._is_alone or (isinstance(self.loader, DataLoader) and self.loader.has_equal_parts)

    @property
    def step(self) -> Step:
        """The step of the batch delivered last."""
        return self.loader.step

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch. A later epoch is drawn as if the epochs before it had been read.

        Raises:
          InputError: its order cannot be drawn again.
        """
        epoch += self._passed_epochs
        if epoch != self._next_epoch:
            self.seek(epoch, 0)
        self.loader.set_epoch(epoch)
        self._next_epoch = epoch

    def seek(self, epoch: int, step: int) -> None:
        """Lets the next ``iter()`` begin at a step of an epoch. On every rank alike.

        Raises:
          InputError: the order follows from torch's default random state, which is another one after a restart.
        """
        self._refuse_default_state(epoch, step)
        self.loader.seek(epoch, step)
        self.loader.set_epoch(epoch)
        self._next_epoch = epoch

    def _refuse_default_state(self, epoch: int, step: int) -> None:
        if not ((epoch or step) and draws_from_default_state(dataset_of(self.loader))):
            return
        kind = dict(self.loader.state_dict()["fingerprint"])["kind"]
        advice = "Give the DataLoader generator=torch.Generator().manual_seed(seed)"
        if kind.startswith("iterable"):
            advice += ", which seeds its loader workers, and let the order of the data follow from set_epoch(epoch)."
        else:
            advice += ", or sampler=torchdistinput.ShuffleSampler(len(dataset), seed)."
        raise InputError(
            f"step {step} of epoch {epoch} was sought, but the order of this loader may follow from torch's default "
            f"random state, which is another one after a restart. {advice}"
        )

    def skipping(self, step: int) -> Iterator[Any]:
        """The next epoch from a step on. Where its length is not known, the step may lie in an epoch after it.

        Raises:
          InputError: as ``seek``; or an epoch has no step.
        """
        if not step:
            return iter(self)
        if length_of(self.loader) is not None:
            self.seek(self._next_epoch, step)
            return iter(self)
        self._refuse_default_state(self._next_epoch, step)
        while True:
            steps = iter(self)
            passed = sum(1 for _ in itertools.islice(steps, step))
            step -= passed
            if not step:
                return steps
            if not passed:
                raise InputError(f"{step} step(s) were to be skipped, but an epoch has none.")
            self._passed_epochs += 1

    def state_dict(self) -> dict[str, Any]:
        """See ``DistributedDataset.state_dict``, also for when it is collective."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See ``DistributedDataset.load_state_dict``."""
        self.loader.load_state_dict(state)
        self._next_epoch = state["epoch"]


@final
class _Steps(torch.utils.data.Dataset[Any]):
    """The steps of an epoch by their numbers, in turn. Its length is that of the data, which frameworks ask for."""

    def __init__(self, prepared: PreparedLoader) -> None:
        self._prepared = prepared
        self._reads: Iterator[Any] = iter(())
        self._next = -1
        self.has_ended = False
        """Whether the data has ended, where the numbers of the steps end too."""

    def __getitem__(self, step: int) -> Any:
        if step != self._next:
            self._reads = self._prepared.skipping(step)
        self._next = step + 1
        try:
            return next(self._reads)
        except BaseException:  # StopIteration too, after which Trainers ask the torch loader again
            self._next, self.has_ended = -1, True
            raise

    def __len__(self) -> int:
        data = getattr(self._prepared.loader, "dataset", None)
        if not isinstance(data, Sized):
            raise TypeError("the number of samples is not known")
        return len(data)


@final
class _StepNumbers:
    """The batches of a torch loader over steps: one number in each. The steps end where the data ends."""

    def __init__(self, prepared: PreparedLoader) -> None:
        self._prepared = prepared

    def __iter__(self) -> Iterator[list[int]]:
        steps = self._prepared.dataset
        steps.has_ended = False
        for step in itertools.count():
            if steps.has_ended:
                return
            yield [step]

    def __len__(self) -> int:
        return len(self._prepared)

    def set_epoch(self, epoch: int) -> None:
        """Sets the number of the next epoch."""
        self._prepared.set_epoch(epoch)


@final
class _Gather:
    """``accelerator.gather`` for parts of any size.

    Args:
      strategy: all ranks of the accelerator.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __call__(self, tensor: Any) -> Any:
        """The tensors of all ranks, concatenated along dim 0 in the order of the ranks. Collective."""
        return self._strategy.gather(_with_rows(tensor), axis=0)


def _with_rows(value: Any) -> Any:
    """Scalars as tensors of one row, as accelerate gathers them."""
    _, leaves, rebuild = take_apart(value)
    tensors = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return rebuild(leaf[None] if isinstance(leaf, torch.Tensor) and not leaf.ndim else leaf for leaf in tensors)
