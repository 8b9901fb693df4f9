"""A loader of this library in a ``Trainer`` of transformers: parts of any size, also of none.

Problem. The Trainer counts the items of a step over all ranks, but takes the loss of each rank's part as one of
``per_device_eval_batch_size`` samples when it evaluates; and most of its models cannot read a batch without a row.

Decisions.
- ``prediction_step`` and ``compute_loss`` of that one Trainer are exchanged, as the user asked for by the call.
- For an empty part the model reads one row of zeros whose labels count nowhere, so that all ranks make the same
  collectives. What it predicts for that row is left out, and its loss adds nothing.
- The loss of a part, as the evaluation repeats it, is repeated as often as its weight asks for.
- Training with parts of unequal size needs the loss to be divided by the items of all ranks. Where the Trainer does not
  count them, the first step refuses.
- Where a sum of the loader is called ``num_items_in_batch``, it is the count of the items, which the Trainer would
  gather at each update.
- Some models take the count of the items, and ignore it. The Trainer multiplies their loss by the number of ranks, as
  if they had divided by it. So a model is asked once, with one row and two counts, and gets no count if it ignores it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import torch
from transformers import Trainer

from torchdistinput.data_loader import DataLoader
from torchdistinput.dataset import DistributedDataset
from torchdistinput.errors import InputError
from torchdistinput.integrations import accelerate
from torchdistinput.integrations.accelerate import PreparedLoader

__all__ = ["prepare"]

_COUNT: Final = "num_items_in_batch"
"""The sum that is taken for the count of the items."""

_IGNORED: Final = -100
"""The label that losses of transformers leave out."""


def prepare(trainer: Trainer, loader: DataLoader[Any] | DistributedDataset) -> PreparedLoader:
    """The loader for ``get_train_dataloader`` and its siblings to return. Collective: every rank calls this.

    Its batch size is the global one, whatever ``per_device_train_batch_size`` says. A resume in the middle of an epoch
    needs a loader whose order can be drawn again: a ``generator`` with a seed, or a ``ShuffleSampler``. From then on
    ``evaluate`` and ``predict`` of this Trainer take parts of any size, and ``eval_loss`` is the mean over the samples.
    With ``sums={"num_items_in_batch": function}`` that sum divides the loss, and is not gathered at each update.

    Args:
      trainer: the Trainer.
      loader: a ``torchdistinput.DataLoader``, or what ``strategy.distribute_dataset`` returned; its elements are dicts.

    Raises:
      InputError: it is another kind of loader; or, by the first training step, parts may be of unequal size and the
        loss is not divided by the items of all ranks.
    """
    prepared = accelerate.loader_for(trainer.accelerator, loader)
    if not isinstance(trainer.compute_loss, _ComputeLoss):
        losses = _ComputeLoss(trainer, trainer.compute_loss)
        trainer.compute_loss = losses  # of this Trainer only
        predict = _PredictionStep(trainer.prediction_step, losses)
        trainer.prediction_step = predict  # as above
        collect = _BatchSamples(trainer.get_batch_samples, losses)
        trainer.get_batch_samples = collect  # as above
    return prepared


@final
class _ComputeLoss:
    """``compute_loss`` that reads empty parts, and refuses a loss that is not the mean over all samples.

    Args:
      trainer: the Trainer.
      compute: the Trainer's own ``compute_loss``.
    """

    def __init__(self, trainer: Trainer, compute: Callable[..., Any]) -> None:
        self._trainer = trainer
        self._compute = compute
        self._heeds_count: bool | None = None
        self.is_over_all_ranks = False
        """Whether the loss computed last was divided by the items of all ranks."""

    def __call__(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,  # noqa: FBT001, FBT002 - as in transformers
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss; with ``return_outputs`` also the outputs of the model."""
        trainer, loader = self._trainer, self.loader
        if loader is None:
            return self._compute(model, inputs, return_outputs, num_items_in_batch)
        counts = trainer.args.average_tokens_across_devices and num_items_in_batch is not None
        if counts and trainer.accelerator.num_processes > 1:
            if self._heeds_count is None:
                self._heeds_count = self._find_out(model, inputs)
            if not self._heeds_count and trainer.compute_loss_func is None:
                num_items_in_batch = None
            counts = self._heeds_count
        self.is_over_all_ranks = counts
        if model.training and not counts and not loader.has_equal_parts:
            raise InputError(
                "the parts of a step are of unequal (or unknown) size, and the loss is the mean of each part. Give the "
                "Trainer average_tokens_across_devices=True and a compute_loss_func(outputs, labels, "
                "num_items_in_batch) that returns the sum of the losses / num_items_in_batch; or let the number of "
                "ranks divide the batch size, with drop_last=True."
            )
        read = inputs if _rows(inputs) else _one_row(inputs, label=_IGNORED)
        return self._compute(model, read, return_outputs, num_items_in_batch)

    def _find_out(self, model: Any, inputs: Any) -> bool:
        """Whether the loss is divided by the count of the items. Every rank asks the same: collectives may be in it."""
        training, device = model.training, self._trainer.args.device
        model.eval()  # which draws nothing, and keeps no statistics
        try:
            with torch.no_grad():
                one, two = (
                    self._compute(model, _one_row(inputs, label=0), False, torch.tensor(count, device=device))
                    for count in (1, 2)
                )
        finally:
            model.train(training)
        return not torch.equal(one, two)

    @property
    def loader(self) -> PreparedLoader | None:
        """The loader that is read now, if it is one of this library."""
        active = self._trainer.accelerator.gradient_state.active_dataloader
        return active if isinstance(active, PreparedLoader) else None


@final
class _BatchSamples:
    """``get_batch_samples``, which takes the count of the items from the votes, if they have a sum of that name.

    Args:
      collect: the Trainer's own ``get_batch_samples``, which counts and gathers.
      losses: knows the loader that is read now.
    """

    def __init__(self, collect: Callable[..., Any], losses: _ComputeLoss) -> None:
        self._collect = collect
        self._losses = losses

    def __call__(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of an update, and the count of the items in them."""
        batches, count = [], None
        for batch in itertools.islice(epoch_iterator, num_batches):
            batches.append(batch)
            loader = self._losses.loader
            if loader is not None and _COUNT in loader.step.sums:
                count = (count or 0) + loader.step.sums[_COUNT]
        if count is None:
            return self._collect(iter(batches), len(batches), device)
        return batches, torch.tensor(count, device=device)


@final
class _PredictionStep:
    """``prediction_step`` that reads empty parts, and whose loss is repeated as often as its weight asks for.

    Args:
      predict: the Trainer's own ``prediction_step``.
      losses: knows the loader that is read now, and how its loss was divided.
    """

    def __init__(self, predict: Callable[..., Any], losses: _ComputeLoss) -> None:
        self._predict = predict
        self._losses = losses

    def __call__(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        """The loss, the predictions, and the labels."""
        loader, rows = self._losses.loader, _rows(inputs)
        if loader is None or rows is None:
            return self._predict(model, inputs, *args, **more)
        self._losses.is_over_all_ranks = False
        loss, logits, labels = self._predict(model, inputs if rows else _one_row(inputs, label=_IGNORED), *args, **more)
        if loss is not None:
            # Divided by the items of all ranks, each rank's loss stands for the whole step; else for its own part.
            weight = loader.step.global_size if self._losses.is_over_all_ranks else rows
            loss = loss.as_subclass(_Loss)
            loss.weight = weight
        return (loss, logits, labels) if rows else (loss, _no_rows(logits), _no_rows(labels))


@final
class _Loss(torch.Tensor):
    """A loss that is repeated once for each sample that it stands for."""

    weight: int

    def repeat(self, *_: Any) -> torch.Tensor:
        """One entry for each sample, however many are asked for."""
        return self.as_subclass(torch.Tensor).repeat(self.weight)


def _rows(inputs: Any) -> int | None:
    """The rows of a batch, if there is a tensor in it."""
    values = inputs.values() if isinstance(inputs, Mapping) else ()
    return next((len(each) for each in values if isinstance(each, torch.Tensor) and each.ndim), None)


def _one_row(inputs: Mapping[str, Any], *, label: int) -> dict[str, Any]:
    """One row for each tensor: zeros, which masks let through."""
    return {name: _row(name, each, label) if isinstance(each, torch.Tensor) else each for name, each in inputs.items()}


def _row(name: str, like: torch.Tensor, label: int) -> torch.Tensor:
    is_whole = not (like.is_floating_point() or like.is_complex() or like.dtype == torch.bool)
    fill = 1 if name.endswith("mask") else label if is_whole and "label" in name else 0
    return like.new_full((1, *like.shape[1:]), fill)


def _no_rows(value: Any) -> Any:
    """The value without its row."""
    if isinstance(value, torch.Tensor):
        return value[:0]
    if isinstance(value, Mapping):
        return {name: _no_rows(each) for name, each in value.items()}
    return type(value)(map(_no_rows, value)) if isinstance(value, list | tuple) else value
