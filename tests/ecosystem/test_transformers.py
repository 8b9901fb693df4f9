"""transformers' Trainer and a loader of this library: the weights, predictions and metrics are those of one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from torchdistinput.testing import run_ranks

pytest.importorskip("transformers")

SAMPLES, BATCH, EPOCHS = 17, 4, 3  # 5 steps in each epoch, the last of them of 1 sample
CUT = 7  # steps before the resume, in the middle of the second epoch of three
WORDS, LENGTH, KINDS = 11, 6, 3

Given = list[dict[str, Any]]


def texts() -> Given:
    """Of different lengths, so that a mean over tokens is not one over samples."""
    lengths = torch.randint(2, LENGTH + 1, (SAMPLES,), generator=torch.Generator().manual_seed(1)).tolist()
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))
    seen = torch.arange(LENGTH)
    return [
        {
            "input_ids": row,
            "attention_mask": (seen < length).long(),
            "labels": torch.where(seen < length, row, -100),
        }
        for row, length in zip(words, lengths, strict=True)
    ]


def kinds() -> Given:
    return [
        {
            "input_ids": each["input_ids"],
            "attention_mask": each["attention_mask"],
            "labels": torch.tensor(number % KINDS),
        }
        for number, each in enumerate(texts())
    ]


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - seconds, and only here

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=8,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def classifier() -> Any:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    config: Any = BertConfig
    return BertForSequenceClassification(
        config(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=LENGTH,
            num_labels=KINDS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def arguments(folder: str, **more: Any) -> Any:
    from transformers import TrainingArguments  # noqa: PLC0415 - as above

    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **more,
    }
    return TrainingArguments(**settings)


def on_ranks(kind: str) -> Any:
    """A Trainer as users write it: with a drop-in, with a ``DistributedDataset``, or with torch's loaders."""
    from transformers import Trainer  # noqa: PLC0415 - as above

    from torchdistinput.integrations.transformers import prepare  # noqa: PLC0415 - as above

    def loader_of(trainer: Any, data: Any, **more: Any) -> Any:
        more["collate_fn"] = trainer.data_collator
        if kind == "drop-in":
            return prepare(trainer, tdi.DataLoader(data, BATCH, **more))
        loader = DataLoader(data, BATCH, **more)
        if kind == "torch":
            return loader
        return prepare(trainer, tdi.Strategy([trainer.args.device]).distribute_dataset(loader))

    class OnRanks(Trainer):  # type: ignore[misc] # of a package without its types here
        def get_train_dataloader(self) -> Any:
            return loader_of(self, self.train_dataset, shuffle=True, generator=torch.Generator().manual_seed(3))

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            if kind == "torch":  # its own, which knows where it ends
                return super().get_eval_dataloader(eval_dataset)
            return loader_of(self, eval_dataset or self.eval_dataset)

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return self.get_eval_dataloader(test_dataset)

    return OnRanks


def weights(trainer: Any) -> list[float]:
    found: list[float] = torch.cat([each.detach().flatten() for each in trainer.model.parameters()]).tolist()
    return found


def counted(predicted: Any) -> dict[str, Any]:
    """A metric that shows how many samples it saw, and in which order."""
    return {"labels": [int(each) for each in predicted.label_ids]}


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> Any:
    """The loss of a classifier, divided by the items of all ranks."""
    return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def trained(kind: str, folder: str, *, model: Any = language_model, resume: str | None = None, **more: Any) -> Any:
    """The Trainer after the training."""
    ours = {name: more.pop(name) for name in ("compute_loss_func", "eval_dataset") if name in more}
    data = texts() if model is language_model else kinds()
    trainer = on_ranks(kind)(model(), arguments(folder, **more), train_dataset=data, **ours)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def judged(kind: str, folder: str, model: Any, data: Given) -> dict[str, Any]:
    metric = counted if model is classifier else None
    judge = on_ranks(kind)(model(), arguments(folder), eval_dataset=data, compute_metrics=metric)
    metrics = judge.evaluate()
    predicted = judge.predict(data)
    return {
        "loss": metrics["eval_loss"],
        "labels": metrics.get("eval_labels"),
        "predicted": predicted.predictions.tolist(),
        "loss of predicted": predicted.metrics["test_loss"],
    }


def everything(folder: str) -> dict[str, Any]:
    """One rank: what a Trainer makes of each kind of loader. 2 ranks save in the middle, 3 go on there."""
    warnings.simplefilter("ignore")
    world = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}
    for kind in ["torch"] if world == 1 else ["drop-in", "dataset"]:
        home = f"{folder}/{kind}"
        saving = {"save_strategy": "steps", "save_steps": CUT} if world == 2 else {}
        resume = f"{home}/checkpoint-{CUT}" if world == 3 else None
        trainer = trained(kind, home, resume=resume, **saving)
        accumulated = trained(kind, folder, gradient_accumulation_steps=2, eval_strategy="epoch", eval_dataset=texts())
        found[kind] = {
            "trained": weights(trainer),
            "accumulated": weights(accumulated),
            "updates": (trainer.state.global_step, accumulated.state.global_step),
            "classifier": weights(trained(kind, folder, model=classifier, compute_loss_func=summed)),
            "texts": judged(kind, folder, language_model, texts()),
            "kinds": judged(kind, folder, classifier, kinds()),
        }
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank found, at each world size."""
    pytest.importorskip("transformers")
    folder = str(tmp_path_factory.mktemp("trainers"))
    return {world: run_ranks(world, everything, folder, init_group=False, timeout_seconds=240) for world in (1, 2, 3)}


def each_of(worlds: dict[int, list[dict[str, Any]]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What was found with a loader of this library by one rank of several, and that of one process with torch's."""
    for world in (2, 3):
        for rank in worlds[world]:
            for kind in ("drop-in", "dataset"):
                yield rank[kind], worlds[1][0]["torch"]


def test_the_weights_are_those_of_one_process_also_after_a_resume_at_another_world_size(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    for found, alone in each_of(worlds):
        assert found["updates"] == alone["updates"] == (15, 9)
        for name in ("trained", "accumulated", "classifier"):
            torch.testing.assert_close(
                torch.tensor(found[name]), torch.tensor(alone[name]), rtol=0, atol=1e-6, msg=name
            )


def test_evaluate_and_predict_see_each_sample_once_in_order_and_the_loss_is_that_of_one_process(
    worlds: dict[int, list[dict[str, Any]]],
) -> None:
    for found, alone in each_of(worlds):
        assert found["kinds"]["labels"] == [number % KINDS for number in range(SAMPLES)]
        for data in ("texts", "kinds"):
            assert len(found[data]["predicted"]) == SAMPLES
            for name in ("predicted", "loss", "loss of predicted"):
                torch.testing.assert_close(
                    torch.tensor(found[data][name]), torch.tensor(alone[data][name]), rtol=0, atol=2e-6
                )


# ------------------------------------------------------------------------------------------ what is refused


def refusal(call: Any) -> str:
    with pytest.raises(tdi.InputError) as caught:
        call()
    return str(caught.value)


def refusals(folder: str) -> dict[str, str]:
    """One of two ranks."""
    warnings.simplefilter("ignore")
    from transformers import Trainer  # noqa: PLC0415 - as above

    from torchdistinput.integrations import accelerate, transformers  # noqa: PLC0415 - as above

    class Built(Trainer):  # type: ignore[misc] # as above
        make: Any

        def get_train_dataloader(self) -> Any:
            return self.make(self, self.train_dataset)

        def get_test_dataloader(self, test_dataset: Any) -> Any:
            return self.make(self, test_dataset)

    def given(make: Any, **more: Any) -> Any:
        trainer = Built(language_model(), arguments(folder, **more), train_dataset=texts())
        trainer.make = make
        return trainer

    made: dict[str, Any] = {
        "drop-in": lambda _, data: tdi.DataLoader(data, BATCH),
        "dataset": lambda _, data: tdi.Strategy(["cpu"]).distribute_dataset(DataLoader[Any](data, BATCH)),
    }
    found = {}
    for name, make in made.items():
        trainer = given(make)
        found[f"{name}, trained"] = refusal(trainer.train)
        found[f"{name}, predicted"] = refusal(lambda trainer=trainer: trainer.predict(texts()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerate.prepare(given(None).accelerator, made["drop-in"](None, texts()))
    found["accelerate's"] = " ".join(str(each.message) for each in said)
    found["means"] = refusal(lambda: trained("drop-in", folder, model=classifier))
    found["uncounted"] = refusal(lambda: trained("dataset", folder, average_tokens_across_devices=False))

    def random_order(trainer: Any, data: Any) -> Any:
        return transformers.prepare(trainer, tdi.DataLoader(data, BATCH, shuffle=True))

    given(random_order, max_steps=2, save_steps=2, save_strategy="steps").train()
    resumed = given(random_order, max_steps=4)
    found["unknown order"] = refusal(lambda: resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2"))
    torch.distributed.destroy_process_group()
    return found


def test_a_trainer_is_refused_what_it_would_get_wrong(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(2, refusals, str(tmp_path), init_group=False, timeout_seconds=240):
        uses = [f"{name}, {use}" for name in ("drop-in", "dataset") for use in ("trained", "predicted")]
        for name in (*uses, "accelerate's"):
            assert "return torchdistinput.integrations.transformers.prepare(self, loader)" in found[name]
        for name in ("means", "uncounted"):
            assert "compute_loss_func(outputs, labels, num_items_in_batch)" in found[name]
        assert "generator=torch.Generator().manual_seed(seed)" in found["unknown order"]


class Stream(IterableDataset[Any]):
    """Texts in an order that follows from the epoch, in three steps an epoch, which nobody knows before."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter([texts()[number] for number in order[: 3 * BATCH]])


def streamed(folder: str, seeded: bool, resume: str | None = None) -> list[Any]:
    """The words of each step."""
    from transformers import Trainer  # noqa: PLC0415 - as above

    from torchdistinput.integrations.transformers import prepare  # noqa: PLC0415 - as above

    seen = []

    class OfStream(Trainer):  # type: ignore[misc] # as above
        def get_train_dataloader(self) -> Any:
            generator = torch.Generator().manual_seed(3) if seeded else None
            return prepare(self, tdi.DataLoader(Stream(), BATCH, generator=generator))

        def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
            seen.append(inputs["input_ids"].tolist())
            return super().training_step(model, inputs, *more)

    given = arguments(folder, max_steps=11, save_strategy="steps", save_steps=4, num_train_epochs=1)
    OfStream(language_model(), given, train_dataset=Stream()).train(resume_from_checkpoint=resume)
    return seen


@pytest.mark.parametrize("step", [4, 8])
def test_a_stream_shorter_than_the_training_goes_on_in_a_later_epoch(step: int, tmp_path: Path) -> None:
    whole = streamed(str(tmp_path), seeded=True)
    assert len(whole) == 11
    assert streamed(str(tmp_path / "again"), seeded=True, resume=f"{tmp_path}/checkpoint-{step}") == whole[step:]
    with pytest.raises(tdi.InputError, match=r"set_epoch\(epoch\)"):
        streamed(str(tmp_path / "again"), seeded=False, resume=f"{tmp_path}/checkpoint-{step}")
