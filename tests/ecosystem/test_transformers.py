"""transformers' Trainer and a loader of this library: the weights, predictions and metrics are those of one process."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import torchdistinput as tdi
from tests.test_pages import snippets
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


GLOBAL_BATCH, PACK_EPOCHS, RATE = 3, 2, 0.3
CUT_AT = 5  # steps before the resume, in the middle of the second epoch of two
CHAT_WORDS = [
    "<pad>",
    "<user>",
    "<assistant>",
    "<end>",
    "how",
    "are",
    "you",
    "fine",
    "and",
    "hi",
    "bye",
]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}> {% if turn.role == 'assistant' %}{% generation %}"
    "{{ turn.content }} <end>{% endgeneration %} {% else %}{{ turn.content }} <end> {% endif %}{% endfor %}"
)


def conversations(seed: int, count: int, turns: int) -> list[Any]:
    """Conversations of so many questions and answers at most, of 1 to 4 words each."""
    drawn = torch.Generator().manual_seed(seed)

    def said(role: str) -> dict[str, str]:
        words = torch.randint(4, len(CHAT_WORDS), (int(torch.randint(1, 5, (), generator=drawn)),), generator=drawn)
        return {"role": role, "content": " ".join(CHAT_WORDS[word] for word in words.tolist())}

    return [
        [said(role) for _ in range(1 + number % turns) for role in ("user", "assistant")] for number in range(count)
    ]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - comes with transformers
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - seconds, and only here

    words = Tokenizer(
        models.WordLevel(
            {word: number for number, word in enumerate(CHAT_WORDS)},
            unk_token=CHAT_WORDS[0],
        )
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=CHAT_WORDS[0])
    made.chat_template = TEMPLATE
    return made


def recipe(trainer: str = "transformers") -> dict[str, Any]:
    """The names of the recipe's lines, with the Trainer of transformers or of trl."""
    package = import_module(trainer)
    (code,) = (each for each in snippets("examples/my_trainer/transformers.md") if "apply_chat_template" in each)
    names: dict[str, Any] = {
        "torch": torch,
        "tdi": tdi,
        "Trainer": package.SFTTrainer if trainer == "trl" else package.Trainer,
        "G": GLOBAL_BATCH,
        "tokenizer": tokenizer(),
        "chats": conversations(1, 12, 2),
        "questions": conversations(2, 7, 1),
    }
    exec(compile(code, "examples/my_trainer/transformers.md", "exec"), names)
    return names


def chat_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    size = {"vocab_size": len(CHAT_WORDS), "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=3, eos_token_id=3)).double()


def trained_on_packs(folder: str, kind: str = "transformers") -> list[float]:
    """One rank: the weights of the recipe's Trainer. 2 ranks save in the middle, 3 go on there."""
    warnings.simplefilter("ignore")
    world, names = int(os.environ["WORLD_SIZE"]), recipe(kind)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": CUT_AT} if world == 2 else {"save_strategy": "no"}
    more: dict[str, Any] = {}
    if kind == "trl":
        saving |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False, "bf16": False}
        more["processing_class"] = names["tokenizer"]
    package = import_module(kind)
    arguments = (package.SFTConfig if kind == "trl" else package.TrainingArguments)(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=PACK_EPOCHS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
        seed=4,
        **saving,
    )
    given = names["packs"]
    if kind == "trl":  # which takes no other class at first
        given = import_module("datasets").Dataset.from_dict({"input_ids": [[0]]})
    trainer = names["OnRanks"](chat_model(), arguments, train_dataset=given, **more)
    trainer.train_dataset = names["packs"]
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{CUT_AT}" if world == 3 else None)
    torch.distributed.destroy_process_group()
    return weights_of(trainer.model)


def weights_of(model: Any) -> list[float]:
    found: list[float] = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    return found


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def alone() -> tuple[list[float], float, int]:
    """A plain loop that reads each text of a pack alone: the weights, how far they moved, the steps of an epoch."""
    names, model = recipe(), chat_model()
    packs, every = names["packs"], names["texts"]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    numbers: Any = range(len(packs))
    order: Any = DataLoader(numbers, GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(4))
    for _ in range(PACK_EPOCHS):
        for batch in order:
            texts = [every[item.sample] for pack in batch.tolist() for item in packs.items(pack)]
            loss: Any = torch.cat([answered(model, **text) for text in texts]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    moved = float64(weights_of(model)) - float64(weights_of(chat_model()))
    return weights_of(model), float(moved.abs().max()), len(order)


def answered(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    """The losses of the tokens of a text that are to be learned."""
    scores = model(input_ids=input_ids[None]).logits[0, :-1]
    return F.cross_entropy(scores, labels[1:], reduction="none")[labels[1:] != -100]


@pytest.fixture(scope="module")
def reference() -> list[float]:
    """The weights of texts read alone."""
    ((expected, moved, steps),) = run_ranks(1, alone, timeout_seconds=120)
    assert moved > 0.1
    assert steps < CUT_AT < PACK_EPOCHS * steps
    return expected


def check(weights: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(float64(weights), float64(expected), rtol=0, atol=1e-7)  # the loss is in float32


def test_the_recipe_trains_the_weights_of_texts_read_alone_also_after_a_resume_at_another_world_size(
    tmp_path: Path, reference: list[float]
) -> None:
    two = run_ranks(2, trained_on_packs, str(tmp_path), init_group=False, timeout_seconds=120)
    three = run_ranks(3, trained_on_packs, str(tmp_path), init_group=False, timeout_seconds=120)
    state = json.loads((tmp_path / f"checkpoint-{CUT_AT}" / "trainer_state.json").read_text())
    assert state["global_step"] == CUT_AT
    for weights in (*two, *three):
        check(weights, reference)


def test_trls_trainer_takes_the_same_class_and_trains_the_same_weights(tmp_path: Path, reference: list[float]) -> None:
    pytest.importorskip("trl")
    for weights in run_ranks(2, trained_on_packs, str(tmp_path), "trl", init_group=False, timeout_seconds=180):
        check(weights, reference)


def test_packs_are_what_transformers_own_padding_free_collator_makes_of_the_same_texts() -> None:
    run_ranks(1, compare_with_flattening)


def compare_with_flattening() -> None:
    from transformers import DataCollatorWithFlattening  # noqa: PLC0415 - as above

    names = recipe()
    fields = ["input_ids", "labels"]
    texts = [dict.fromkeys(fields, text["input_ids"]) for text in names["texts"].datasets[0]]  # every token is learned
    packs = [
        tdi.Packed(texts, 32, fields=fields),
        tdi.Packed(texts, 7, fields=fields, overflow="split"),
        tdi.Packed(texts, 7, fields=fields, strategy="concat"),
    ]
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    for ragged, number in [(each, number) for each in packs for number in range(len(each))]:
        pack = ragged[number]
        flat = flatten(
            [
                {name: column[item.start : item.stop] for name, column in texts[item.sample].items()}
                for item in ragged.items(number)
            ]
        )
        assert torch.equal(pack["cu_seqlens"], flat["cu_seq_lens_q"])
        assert torch.equal(pack["segment_ids"] - 1, flat["seq_idx"][0])
        row = names["rows"]([{name: pack[name] for name in (*fields, "segment_ids", "positions")}])
        assert torch.equal(row["input_ids"], flat["input_ids"])
        assert torch.equal(row["position_ids"], flat["position_ids"])
        assert torch.equal(row["labels"][:, 1:], flat["labels"][:, 1:])  # the first one of a row is never foretold


def test_only_the_answers_are_learned() -> None:
    run_ranks(1, check_labels)


def check_labels() -> None:
    names = recipe()
    (pack,) = [names["rows"]([names["packs"][0]])]
    learned = pack["input_ids"][pack["labels"] != -100]
    said = names["tokenizer"].decode(learned.tolist()).split("<end>")[:-1]
    items = names["packs"].items(0)
    texts = []
    for item in items:
        chats = [chat for part in names["texts"].datasets for chat in part.chats]
        texts += [turn["content"] for turn in chats[item.sample] if turn["role"] == "assistant"]
    assert [words.strip() for words in said] == texts
    assert len(items) > 1
