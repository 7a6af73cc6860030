# SPDX-License-Identifier: Apache-2.0
"""Rows become the same tokens and labels in Python, where TRL makes them, and in C++, where `qlorapp train` does."""

import json
import random

import conftest
import datasets
import pytest
import qlorapp
import transformers
import trl
from data_probe import DataProbe
from tiny_trainer import TINY

COUNT = 100
WORDS = ["Mia", "put", "the", "kite", "near", "tower", "boat,", "Größe", "漢字", "3.14", "12+30", "a", "I'm", "don't", "<|eot_id|>", "👩‍👩‍👧"]  # fmt: skip
SPACES = [" ", " ", " ", " ", "  ", "\n", "\n\n", "\t"]


def text(rng, most=12):
    return "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randint(1, most))) + rng.choice(["", "", "end."])


def turn(rng, role):
    return {"role": role, "content": rng.choice(["", " ", "\n"]) + text(rng)}


def chat(rng):
    turns = [turn(rng, role) for _ in range(rng.randint(1, 3)) for role in ("user", "assistant")]
    return [turn(rng, "system")] * rng.randint(0, 1) + turns


def completion(rng):
    whole = text(rng, 20)
    cut = rng.randint(1, len(whole))
    return {"prompt": whole[:cut], "completion": whole[cut:]}


def messages(rng):
    return {"messages": chat(rng) + [turn(rng, "user")] * (rng.random() < 0.2)}


def prompt_messages(rng):
    turns = chat(rng)
    cut = 2 * rng.randint(1, len(turns) // 2) - 1 + (turns[0]["role"] == "system")
    return {"prompt": turns[:cut], "completion": turns[cut:]}


def conversations(rng):
    return {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in chat(rng)]}


KINDS = {
    "text": (lambda rng: {"text": text(rng)}, {}),
    "prompt and completion": (completion, {}),
    "prompt and completion, all of it": (completion, {"completion_only_loss": False}),
    "prompt and completion, cut": (completion, {"max_length": 14}),
    "messages": (messages, {}),
    "messages, what the assistant says": (messages, {"assistant_only_loss": True}),
    "messages, what the assistant says, cut": (messages, {"assistant_only_loss": True, "max_length": 40}),
    "prompts of messages": (prompt_messages, {}),
    "prompts of messages, what the assistant says": (prompt_messages, {"assistant_only_loss": True}),
    "conversations": (conversations, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=704, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=694, eos_token_id=695,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def probe():
    made = DataProbe(conftest.BUILD)
    yield made
    made.close()


def in_python(model, tokenizer, data, folder, **options):
    """What C++ is given by SFTTrainer."""
    config = qlorapp.SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, **{"max_length": None, **options}
    )
    trainer = qlorapp.SFTTrainer(model, config, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer)
    batches = (trainer.data_collator([row]) for row in trainer.train_dataset)
    return [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]


def in_cpp(probe, tokenizer, data, folder, template, **options):
    tokenizer.save_pretrained(folder / "tokenizer")
    probe.ask("load", folder=str(folder / "tokenizer"))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    found = probe.ask("dataset", path=str(path), chat=template, **{"max_length": 0, **options})
    return [(row["input_ids"], row["labels"]) for row in found["examples"]]


def learned(some):
    """Nothing predicts a first token; rows without anything else to learn are left out."""
    shown = [(ids, [-100, *labels[1:]]) for ids, labels in some]
    return [row for row in shown if any(label != -100 for label in row[1])]


@pytest.mark.parametrize("kind", KINDS)
def test_both_languages_make_the_same_rows(model, probe, tmp_path, kind):
    make, options = KINDS[kind]
    rng = random.Random(kind)
    data = [make(rng) for _ in range(COUNT)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    theirs = learned(in_python(model, tokenizer, data, tmp_path, **options))
    ours = learned(in_cpp(probe, tokenizer, data, tmp_path, "llama3", **options))
    assert len(ours) == len(theirs) >= COUNT // 4  # of the others nothing is left to learn
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other, tokenizer.decode(mine[0])


CALL = {"type": "function", "function": {"name": "find", "arguments": {"who": "Fay", "at": [1, None]}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}},
    }
]
WITH_CALLS = {
    "messages": [
        {"role": "user", "content": "Where is the kite?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "tower"},
        {"role": "assistant", "content": "Near the tower."},
    ],
    "tools": json.dumps(TOOLS),
}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_tool_calls_are_what_the_assistant_says_in_both_languages(model, probe, tmp_path, name):
    """Without them a model would never learn to call, and nothing would say so. TRL's template marks a line end around a turn as well."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = getattr(trl.chat_template_utils, f"{name}_chat_template")
    call = '<tool_call>\n{"name": "find", "arguments": {"who": "Fay", "at": [1, null]}}\n</tool_call><|im_end|>'
    for options in ({}, {"assistant_only_loss": True}):
        theirs = in_python(model, tokenizer, [WITH_CALLS], tmp_path, **options)
        ours = in_cpp(probe, tokenizer, [WITH_CALLS], tmp_path, name.replace("_", "."), **options)
        assert options or learned(ours) == learned(theirs)
        for encoded in (
            ours,
            theirs,
        ):  # Qwen3 begins an answer that is the last with thoughts: each is a sample of its own here
            said = "".join(tokenizer.decode([label for label in labels if label != -100]) for _, labels in encoded)
            assert call in said and said.rstrip().endswith("Near the tower.<|im_end|>")
            assert not options or "Where is the kite?" not in said
