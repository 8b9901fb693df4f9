"""Conversations of two kinds, in packs divided by cost, in transformers' Trainer and trl's: the recipe of
examples/my_trainer/transformers.md.

The reference is a plain loop in one process that reads each text alone, without packs and without a Trainer.
"""

from __future__ import annotations

import json
import os
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import torchdistinput as tdi
from tests.test_readme import snippets
from torchdistinput.testing import run_ranks

pytest.importorskip("transformers")

GLOBAL_BATCH, EPOCHS, RATE = 3, 2, 0.3
CUT = 5  # steps before the resume, in the middle of the second epoch of two
WORDS = ["<pad>", "<user>", "<assistant>", "<end>", "how", "are", "you", "fine", "and", "hi", "bye"]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}> {% if turn.role == 'assistant' %}{% generation %}"
    "{{ turn.content }} <end>{% endgeneration %} {% else %}{{ turn.content }} <end> {% endif %}{% endfor %}"
)


def conversations(seed: int, count: int, turns: int) -> list[Any]:
    """Conversations of so many questions and answers at most, of 1 to 4 words each."""
    drawn = torch.Generator().manual_seed(seed)

    def said(role: str) -> dict[str, str]:
        words = torch.randint(4, len(WORDS), (int(torch.randint(1, 5, (), generator=drawn)),), generator=drawn)
        return {"role": role, "content": " ".join(WORDS[word] for word in words.tolist())}

    return [
        [said(role) for _ in range(1 + number % turns) for role in ("user", "assistant")] for number in range(count)
    ]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - comes with transformers
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - seconds, and only here

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=WORDS[0])
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


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    size = {"vocab_size": len(WORDS), "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=3, eos_token_id=3)).double()


def trained(folder: str, kind: str = "transformers") -> list[float]:
    """One rank: the weights of the recipe's Trainer. 2 ranks save in the middle, 3 go on there."""
    warnings.simplefilter("ignore")
    world, names = int(os.environ["WORLD_SIZE"]), recipe(kind)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": CUT} if world == 2 else {"save_strategy": "no"}
    more: dict[str, Any] = {}
    if kind == "trl":
        saving |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False, "bf16": False}
        more["processing_class"] = names["tokenizer"]
    package = import_module(kind)
    arguments = (package.SFTConfig if kind == "trl" else package.TrainingArguments)(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=EPOCHS,
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
    trainer = names["OnRanks"](language_model(), arguments, train_dataset=given, **more)
    trainer.train_dataset = names["packs"]
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{CUT}" if world == 3 else None)
    torch.distributed.destroy_process_group()
    return weights_of(trainer.model)


def weights_of(model: Any) -> list[float]:
    found: list[float] = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    return found


def float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def alone() -> tuple[list[float], float, int]:
    """A plain loop that reads each text of a pack alone: the weights, how far they moved, the steps of an epoch."""
    names, model = recipe(), language_model()
    packs, every = names["packs"], names["texts"]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    numbers: Any = range(len(packs))
    order: Any = DataLoader(numbers, GLOBAL_BATCH, shuffle=True, generator=torch.Generator().manual_seed(4))
    for _ in range(EPOCHS):
        for batch in order:
            texts = [every[item.sample] for pack in batch.tolist() for item in packs.items(pack)]
            loss: Any = torch.cat([answered(model, **text) for text in texts]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    moved = float64(weights_of(model)) - float64(weights_of(language_model()))
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
    assert steps < CUT < EPOCHS * steps
    return expected


def check(weights: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(float64(weights), float64(expected), rtol=0, atol=1e-7)  # the loss is in float32


def test_the_recipe_trains_the_weights_of_texts_read_alone_also_after_a_resume_at_another_world_size(
    tmp_path: Path, reference: list[float]
) -> None:
    two = run_ranks(2, trained, str(tmp_path), init_group=False, timeout_seconds=120)
    three = run_ranks(3, trained, str(tmp_path), init_group=False, timeout_seconds=120)
    state = json.loads((tmp_path / f"checkpoint-{CUT}" / "trainer_state.json").read_text())
    assert state["global_step"] == CUT
    for weights in (*two, *three):
        check(weights, reference)


def test_trls_trainer_takes_the_same_class_and_trains_the_same_weights(tmp_path: Path, reference: list[float]) -> None:
    pytest.importorskip("trl")
    for weights in run_ranks(2, trained, str(tmp_path), "trl", init_group=False, timeout_seconds=180):
        check(weights, reference)


def test_packs_are_what_transformers_own_padding_free_collator_makes_of_the_same_texts() -> None:
    run_ranks(1, compare_with_flattening)


def compare_with_flattening() -> None:
    from transformers import DataCollatorWithFlattening  # noqa: PLC0415 - as above

    names = recipe()
    fields = ["input_ids", "labels"]
    texts = [dict.fromkeys(fields, text["input_ids"]) for text in names["parts"]["chats"]]  # every token is learned
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
