"""What others would get wrong with a loader of this library is refused on every rank, with the line to write instead.

One launch of two ranks for each library: what one of them leaves in a process is seen by the loaders after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.ecosystem import test_kinds as kinds
from tests.ecosystem.test_trainers import SEVENTEEN, data, shuffled
from torchdistinput.testing import run_ranks

BATCH = 4  # of 17 samples: the last part of the second rank is empty
PREPARE = "integrations.accelerate.prepare(accelerator, loader)"
RETURN = "return torchdistinput.integrations.transformers.prepare(self, loader)"
LOSS = "compute_loss_func(outputs, labels, num_items_in_batch)"
WHOLE = "every rank would read whole batches"
MEANT = "torchdistinput.DataLoader(dataset"


class Wrong(NamedTuple):
    """A row of the table.

    Args:
      does: what a rank does, given a folder.
      words: of the error.
      error: its class.
    """

    does: Callable[[str], object]
    words: tuple[str, ...]
    error: type[Exception] = tdi.InputError


def read(loader: Any) -> None:
    list(loader)


# --------------------------------------------------------------------------------------------------------- accelerate


def even(**options: Any) -> Any:
    """The number of ranks divides its batches."""
    return tdi.DataLoader(data(), BATCH, drop_last=True, options=tdi.InputOptions(**options))


def accelerator(steps: int = 1) -> Any:
    return import_module("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=steps)


def iterated(loader: Callable[[], Any], steps: int, _: str) -> None:
    accelerator(steps)
    read(loader())


def skipped(workers: int, _: str) -> None:
    accelerator()
    read(import_module("accelerate").skip_first_batches(shuffled(tdi.DataLoader, num_workers=workers), 2))


def made_by_accelerate(_: str) -> None:
    accelerator()
    read(import_module("accelerate.data_loader").prepare_data_loader(shuffled(tdi.DataLoader)))


def prepared(loader: Any) -> Any:
    return import_module("torchdistinput.integrations.accelerate").prepare(accelerator(), loader)


def skipped_in_an_unknown_order(_: str) -> None:
    loader = prepared(tdi.DataLoader(data(), BATCH, shuffle=True))
    read(import_module("accelerate").skip_first_batches(loader, 2))


# ------------------------------------------------------------------------------------------------------- transformers


def trainer_with(make: Callable[[Any, Any], Any], folder: str, **more: Any) -> Any:
    """A Trainer whose loaders are made by a function of it and the data."""
    module = import_module("tests.ecosystem.test_transformers")

    class Built(import_module("transformers").Trainer):  # type: ignore[misc] # of a package without its types here
        def get_train_dataloader(self) -> Any:
            return make(self, self.train_dataset)

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return make(self, test_dataset)

    return Built(module.language_model(), module.arguments(folder, **more), train_dataset=module.texts())


def drop_in(_: Any, given: Any, **more: Any) -> Any:
    return tdi.DataLoader(given, BATCH, **more)


def dataset(_: Any, given: Any) -> Any:
    return tdi.Strategy(["cpu"]).distribute_dataset(DataLoader(given, BATCH))


def trained(make: Callable[[Any, Any], Any], folder: str) -> None:
    trainer_with(make, folder).train()


def predicted(make: Callable[[Any, Any], Any], folder: str) -> None:
    trainer = trainer_with(make, folder)
    trainer.predict(trainer.train_dataset)


def prepared_for_a_loop(_: str) -> None:
    import_module("transformers.trainer")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "if this loader is for a Trainer")
        prepared(even())


def with_a_loss(kind: str, model: str, arguments: dict[str, Any], folder: str) -> None:
    module = import_module("tests.ecosystem.test_transformers")
    module.trained(kind, folder, model=getattr(module, model), **arguments)


def resumed_in_an_unknown_order(folder: str) -> None:
    def make(trainer: Any, given: Any) -> Any:
        prepare = import_module("torchdistinput.integrations.transformers").prepare
        return prepare(trainer, drop_in(trainer, given, shuffle=True))

    trainer_with(make, folder, max_steps=2, save_steps=2, save_strategy="steps").train()
    trainer_with(make, folder, max_steps=4).train(resume_from_checkpoint=f"{folder}/checkpoint-2")


# --------------------------------------------------------------------------------------------------------- the others


def overfitted(folder: str) -> None:
    module = import_module("tests.ecosystem.test_trainers")
    loader = module.lightning_loader(tdi.DataLoader)
    module.fitted(folder, loader, ours=True, overfit_batches=2)


def set_up_by_fabric(_: str) -> None:
    fabric = import_module("lightning").Fabric(accelerator="cpu", devices=dist.get_world_size())
    fabric.launch()
    fabric.setup_dataloaders(even())


def made_by_ray(_: str) -> None:
    numbers = {"get_world_size": 2, "get_world_rank": dist.get_rank(), "get_local_rank": dist.get_rank()}
    context = mock.Mock(**{f"{name}.return_value": number for name, number in numbers.items()})
    train = import_module("ray.train.torch")
    with mock.patch("ray.train.get_context", return_value=context):  # Ray's own needs a running trainer
        loader = train.prepare_data_loader(even(), move_to_device=False)
    read(loader)


def sampled_by_lhotse(_: str) -> None:
    """It asks for the rank by itself; ``kinds`` has one that is told of one rank."""
    read(tdi.DataLoader(kinds.Speech(), sampler=kinds.lhotse_sampler(), batch_size=None))


def stream() -> Any:
    whole = import_module("datasets").Dataset.from_dict({"n": [*range(20)]})
    return whole.to_iterable_dataset(num_shards=4).map(same)


def in_fragments(make: Callable[[Any], Any], _: str) -> None:
    import_module("torchdistinput.integrations.datasets").fragments(make(stream()))


def same(example: Any) -> Any:
    return example


def shuffled_over(most: int, data: Any) -> Any:
    return data.shuffle(seed=1, buffer_size=10, max_buffer_input_shards=most).map(same)


def beside(data: Any) -> Any:
    other = data.rename_column("n", "m")
    return import_module("datasets").concatenate_datasets([data, other], axis=1)


def interleaved(data: Any, **more: Any) -> Any:
    return import_module("datasets").interleave_datasets([data, data], **more)


def divided(data: Any) -> Any:
    return import_module("datasets.distributed").split_dataset_by_node(data, 0, 2)


def without(name: str, data: Any) -> Any:
    """As a release that has no such attribute."""
    del vars(data)[name]
    return data


ACROSS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    **{
        f"shuffled over {most}": (
            partial(shuffled_over, most),
            ("shuffle_fragments=True, shuffle_buffer=",),
        )
        for most in (1, 4)
    },
    "taken": (lambda data: data.take(10).map(same), ("take() counts across shards", MEANT)),
    "skipped": (lambda data: data.skip(10), ("skip() counts across shards",)),
    "repeated": (lambda data: data.repeat(2), ("repeat()",)),
    "interleaved": (interleaved, ("interleave_datasets()",)),
    "interleaved by chance": (partial(interleaved, probabilities=[0.5, 0.5], seed=1), ("interleave_datasets()",)),
    "side by side": (beside, ("HorizontallyConcatenated", "is not known to stay")),
    "divided": (divided, ("split_dataset_by_node(): leave that out",)),
    "with an index": (lambda _: import_module("datasets").Dataset.from_dict({"n": [1]}), ("found a Dataset; ",)),
    **{
        f"without {name}": (partial(without, name), ("does not show whether the dataset was divided", MEANT))
        for name in ("_distributed", "_ex_iterable", "_formatting")
    },
}
MAKES: dict[str, Callable[[Any, Any], Any]] = {"drop-in": drop_in, "dataset": dataset}
WRONG: dict[str, dict[str, Wrong]] = {
    "accelerate": {
        "accumulating": Wrong(partial(iterated, even, 2), ("accumulate() would never make the last update",)),
        "uneven parts": Wrong(partial(iterated, partial(shuffled, tdi.DataLoader), 1), ("of unequal size",)),
        # Though the number of ranks divides the batch.
        "parts by cost": Wrong(partial(iterated, partial(even, balance=[1.0] * SEVENTEEN), 1), ("of unequal size",)),
        "skipping": Wrong(partial(skipped, 0), (WHOLE, PREPARE)),
        "skipping with workers": Wrong(partial(skipped, 1), (WHOLE, PREPARE)),
        "its own loader": Wrong(made_by_accelerate, (WHOLE, PREPARE)),
        "skipping in an unknown order": Wrong(skipped_in_an_unknown_order, ("torch's default random state",)),
    },
    "transformers": {
        **{
            f"{kind}, {use.__name__}": Wrong(partial(use, make), (RETURN,))
            for kind, make in MAKES.items()
            for use in (trained, predicted)
        },
        "prepared for a loop": Wrong(prepared_for_a_loop, (RETURN,), UserWarning),
        "a loss of means": Wrong(partial(with_a_loss, "drop-in", "classifier", {}), (LOSS,)),
        "a loss that is not counted": Wrong(
            partial(with_a_loss, "dataset", "language_model", {"average_tokens_across_devices": False}), (LOSS,)
        ),
        "resumed in an unknown order": Wrong(
            resumed_in_an_unknown_order, ("generator=torch.Generator().manual_seed(seed)",)
        ),
    },
    "lightning": {
        # It would undo the shuffle.
        "overfitting": Wrong(overfitted, ("needs to subclass `torch.utils.data.DataLoader`",), ValueError),
        "Fabric's loader": Wrong(set_up_by_fabric, ("Only PyTorch DataLoader are currently supported",), TypeError),
    },
    "ray": {"its own loader": Wrong(made_by_ray, ("with Ray Train leave prepare_data_loader out",))},
    "lhotse": {
        "a sampler that divides": Wrong(sampled_by_lhotse, ("lhotse: rank=0, world_size=1",), tdi.RankDisagreement)
    },
    "datasets": {name: Wrong(partial(in_fragments, make), words) for name, (make, words) in ACROSS.items()},
}


def told(library: str, folder: str) -> dict[str, str]:
    """One rank: the text of each error."""
    warnings.simplefilter("ignore")
    found = {}
    for name, wrong in WRONG[library].items():
        try:
            wrong.does(folder)
        except wrong.error as error:
            found[name] = str(error)
        else:
            pytest.fail(f"{name} was not refused")
    return found


@pytest.mark.parametrize("library", WRONG)
def test_it_is_refused_on_every_rank_with_what_to_write(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    for found in run_ranks(2, told, library, str(tmp_path), timeout_seconds=240):
        for name, wrong in WRONG[library].items():
            assert all(words in found[name] for words in wrong.words), (name, found[name])
