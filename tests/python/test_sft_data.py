# SPDX-License-Identifier: Apache-2.0
"""What SFTTrainer makes of rows: tokens by transformers' tokenizer, labels by its masks, TRL's rules for the rest."""

import logging
import re

import conftest
import pytest
import qlorapp
import transformers
from data_probe import DataProbe
from qlorapp.sft_data import RowEncoder, as_rows, sample_parts, token_mask

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content "
    "%}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
LLAMA3_GENERATION = (
    "{% for message in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: As Qwen 3's: an empty thought stands before the last answer only, so an answer looks different once another follows it.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Answer in one line."},
    {"role": "user", "content": "Where is the kite?"},
    {"role": "assistant", "content": "  Near the tower, says Fay. "},
    {"role": "user", "content": "And the boat?"},
    {"role": "assistant", "content": "Near the tower Gus has a boat."},
]


@pytest.fixture
def tokenizer():
    tokenizer = transformers.AutoTokenizer.from_pretrained(conftest.ROOT / "examples" / "data" / "tiny-llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def encoder_of(tokenizer, completion_only=False, **options):
    config = qlorapp.SFTConfig("out", **options)
    stops = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|im_end|>"])}
    return RowEncoder(tokenizer, config, completion_only, stops)


def trained(tokenizer, row):
    return tokenizer.decode([label for label in row["labels"] if label != -100])


# --- formats


def test_text_ends_in_one_eos_and_all_of_it_is_trained(tokenizer):
    encoder = encoder_of(tokenizer)
    for text in ("Near the tower.", "Near the tower." + tokenizer.eos_token):
        row = encoder.encode({"text": text})
        assert row["input_ids"] == tokenizer("Near the tower." + tokenizer.eos_token)["input_ids"] == row["labels"]
    assert encoder_of(tokenizer, dataset_text_field="body").encode({"body": "a", "text": "b"}) == encoder.encode({"text": "a"})


@pytest.mark.parametrize("only", [True, False])
def test_of_prompt_and_completion_the_completion_is_trained(tokenizer, only):
    row = encoder_of(tokenizer, only).encode({"prompt": "Where is the kite?", "completion": " Near the tower."})
    whole = "Where is the kite? Near the tower." + tokenizer.eos_token
    assert row["input_ids"] == tokenizer(whole)["input_ids"]
    assert tokenizer.decode(row["input_ids"]).endswith(trained(tokenizer, row))
    expected = " Near the tower." + tokenizer.eos_token
    assert (trained(tokenizer, row) == expected) is only
    assert (row["labels"] == row["input_ids"]) is not only


def test_prompt_and_completion_may_be_conversations(tokenizer):
    row = encoder_of(tokenizer, True).encode({"prompt": CHAT[:2], "completion": CHAT[2:3]})
    assert row["input_ids"] == tokenizer.apply_chat_template(CHAT[:3], tokenize=True, return_dict=True)["input_ids"]
    assert trained(tokenizer, row) == "Near the tower, says Fay.<|eot_id|>"


def test_messages_and_sharegpt_conversations_are_the_same(tokenizer):
    encoder = encoder_of(tokenizer)
    row = encoder.encode({"messages": CHAT})
    assert (
        row["input_ids"] == row["labels"] == tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    )
    roles = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": roles[turn["role"]], "value": turn["content"]} for turn in CHAT]
    assert encoder.encode({"conversations": turns}) == row
    with_nones = [{**turn, "tool_calls": None} for turn in CHAT]  # as datasets fills columns up
    assert encoder.encode({"messages": with_nones}) == row


def test_masks_of_tokenized_rows_become_labels(tokenizer):
    row = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 0, 1, 1]}
    assert encoder_of(tokenizer, True).encode(row)["labels"] == [-100, -100, 7, 8]
    assert encoder_of(tokenizer, False).encode(row)["labels"] == [5, -100, 7, 8]
    assert encoder_of(tokenizer, True).encode({**row, "labels": [5, 6, -100, -100]})["labels"] == [5, 6, -100, -100]
    padded = {"input_ids": [5, 6, 0], "labels": [5, 6, 0], "attention_mask": [1, 1, 0]}
    assert encoder_of(tokenizer).encode(padded) == {"input_ids": [5, 6], "labels": [5, 6]}
    eos = tokenizer.eos_token_id  # which pads, too, and was masked where it ends the row
    masked = {"input_ids": [5, 6, eos, eos], "labels": [-100, 6, eos, -100], "attention_mask": [1, 1, 0, 0]}
    assert encoder_of(tokenizer).encode(masked) == {"input_ids": [5, 6, eos], "labels": [-100, 6, eos]}


# --- assistant_only_loss


@pytest.mark.parametrize(("template", "marked"), [(LLAMA3, LLAMA3_GENERATION), (CHATML, CHATML_GENERATION)])
@pytest.mark.parametrize("turns", [slice(0, 3), slice(1, 5), slice(0, 5), slice(1, 3)])
def test_assistant_turns_are_found_where_generation_markers_put_them(tokenizer, template, marked, turns):
    """The oracle is transformers' own mask, of the same template with {% generation %} in it."""
    tokenizer.chat_template = marked
    encoder = encoder_of(tokenizer, assistant_only_loss=True)
    oracle = tokenizer.apply_chat_template(CHAT[turns], tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    expected = [token if bit else -100 for token, bit in zip(oracle["input_ids"], oracle["assistant_masks"], strict=True)]
    assert encoder.encode({"messages": CHAT[turns]}) == {"input_ids": list(oracle["input_ids"]), "labels": expected}
    tokenizer.chat_template = template
    assert encoder.encode({"messages": CHAT[turns]}) == {"input_ids": list(oracle["input_ids"]), "labels": expected}


def test_an_answer_that_is_rendered_differently_in_the_middle_is_still_found(tokenizer):
    tokenizer.chat_template = THINKING
    row = encoder_of(tokenizer, assistant_only_loss=True).encode(
        {"messages": [*CHAT[:2], {**CHAT[2], "content": "Yes."}, *CHAT[3:]]}
    )
    assert trained(tokenizer, row) == "Yes.<|im_end|><think>\n\n</think>\n\nNear the tower Gus has a boat.<|im_end|>"


def test_the_bundled_model_s_template_needs_no_markers(tokenizer):
    assert "generation %}" not in tokenizer.chat_template
    row = encoder_of(tokenizer, assistant_only_loss=True).encode({"messages": CHAT})
    assert trained(tokenizer, row) == "Near the tower, says Fay.<|eot_id|>Near the tower Gus has a boat.<|eot_id|>"


def tool_templates():
    """(name, Jinja, what is written of the call of CALLS) of the templates that have tools."""
    probe = DataProbe(conftest.BUILD)
    for name, source in probe.ask("templates"):
        if name.startswith("qwen"):
            yield name, source, '<tool_call>\n{"name": "find", "arguments": {"who": "Fay"}}\n</tool_call><|im_end|>'
        if name == "llama3.1":
            yield name, source, '{"name": "find", "parameters": {"who": "Fay"}}<|eot_id|>'
    probe.close()


CALLS = [
    {"role": "user", "content": "Where is the kite?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {"who": "Fay"}}}]},
    {"role": "tool", "content": "tower"},
    {"role": "assistant", "content": "Near the tower."},
]


@pytest.mark.parametrize(
    "tools", [None, [{"type": "function", "function": {"name": "find"}}]], ids=["calls", "calls and tools"]
)
def test_tool_calls_are_what_the_assistant_says(tokenizer, tools):
    """Without them a model would never learn to call, and nothing would say so."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot_id|>"]})
    seen = 0
    for name, template, call in tool_templates():
        tokenizer.chat_template = template
        row = encoder_of(tokenizer, assistant_only_loss=True).encode({"messages": CALLS, "tools": tools})
        trained = [text for text, learned in sample_parts(row, tokenizer) if learned]
        answer = "<think>\n\n</think>\n\nNear the tower." if name == "qwen3" else "Near the tower."
        assert trained == [call, answer + call[call.rindex("<|") :]], name
        seen += 1
    assert seen == 5


def test_a_template_that_does_not_write_tool_calls_is_refused(tokenizer):
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match=r"cannot tell turn 1 in what this chat template renders"):
        encoder_of(tokenizer, assistant_only_loss=True).encode({"messages": CALLS})


def test_a_template_whose_turns_cannot_be_told_is_refused(tokenizer):
    tokenizer.chat_template = "{{ messages | length }} turns{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    with pytest.raises(ValueError, match=r"row 0: assistant_only_loss cannot tell turn 1 .* Put \{% generation %\}"):
        encoder_of(tokenizer, assistant_only_loss=True).encode({"messages": CHAT[1:3]}, "[SFTTrainer] train_dataset, row 0: ")
    tokenizer.chat_template = LLAMA3
    with pytest.raises(ValueError, match="needs a turn of the assistant; there is none"):
        encoder_of(tokenizer, assistant_only_loss=True).encode({"messages": CHAT[:2]})


def test_a_token_is_trained_if_it_holds_a_character_of_a_range():
    offsets = [(0, 0), (0, 3), (3, 5), (5, 9), (9, 9), (9, 12)]
    assert token_mask(offsets, [(4, 6), (9, 12)]) == [0, 0, 1, 1, 0, 1]
    assert token_mask(offsets, []) == [0] * 6


# --- cutting, leaving out, looking


def test_rows_are_cut_on_the_side_that_is_asked_for_and_left_out_when_nothing_is_trained(tokenizer):
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100, -100, 3, -100, -100]}, {"input_ids": [6, 7]}]
    start = encoder_of(tokenizer, max_length=3).prepare(rows, "rows", False, None)
    assert start[0] == {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}
    end = encoder_of(tokenizer, max_length=3, truncation_mode="keep_end").prepare(rows, "rows", False, None)
    assert end == [{"input_ids": [6, 7], "labels": [6, 7]}]  # 3 stands first then, and nothing predicts it
    assert encoder_of(tokenizer, max_length=None).prepare(rows, "rows", False, None)[0]["input_ids"] == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="none of 1 has a label behind its first token"):
        encoder_of(tokenizer, max_length=2).prepare(rows[:1], "rows", False, None)


def test_the_log_says_how_many_rows_end_in_a_trained_eos(tokenizer, caplog):
    caplog.set_level(logging.INFO, "qlorapp")
    encoder_of(tokenizer, max_length=30).prepare([{"text": "a"}, {"text": "Near the tower. " * 9}], "data", False, None)
    assert re.search(
        r"data: 2 rows, \d+ tokens, \d+ trained; longest 30; 1 cut at max_length; 50.0 % end in a trained EOS", caplog.text
    )
    caplog.clear()
    encoder_of(tokenizer).prepare([{"input_ids": [5, 6, 7]}], "data", False, None)
    assert "0 % of the rows end in a trained EOS: the model will not learn to stop" in caplog.text
    caplog.clear()
    tokenizer.chat_template = CHATML  # a newline stands behind the end of the turn
    encoder_of(tokenizer).prepare([{"messages": CHAT}], "data", False, None)
    assert "100.0 % end in a trained EOS" in caplog.text


def test_a_prompt_that_flows_into_its_completion_is_said(tokenizer, caplog):
    encoder_of(tokenizer, True).encode({"prompt": "Near the tow", "completion": "er."})
    assert "a prompt alone ends in other tokens" in caplog.text


def test_a_formatting_function_makes_the_text(tokenizer):
    rows = encoder_of(tokenizer).prepare([{"q": "Where?", "a": "There."}], "rows", False, lambda row: f"{row['q']} {row['a']}")
    assert tokenizer.decode(rows[0]["input_ids"], skip_special_tokens=True) == "Where? There."
    with pytest.raises(TypeError, match="row 0: formatting_func must return a string; got int"):
        encoder_of(tokenizer).prepare([{"q": "Where?"}], "rows", False, lambda row: 3)


def test_a_formatting_function_of_older_trl_may_return_its_text_in_a_list(tokenizer):
    rows = [
        encoder_of(tokenizer).prepare([{"q": "Where?"}], "rows", False, make)
        for make in (lambda row: row["q"], lambda row: [row["q"]])
    ]
    assert rows[0] == rows[1]
    with pytest.raises(TypeError, match="got a list of 6. It is given one row, not a batch as in older TRL") as told:
        encoder_of(tokenizer).prepare(
            [{"q": "Where?"}], "rows", False, lambda rows: [rows["q"][i] for i in range(len(rows["q"]))]
        )
    assert "\n" not in str(told.value)


def test_shuffling_is_that_of_datasets(tokenizer):
    import numpy

    rows = [{"input_ids": [i + 3, i + 4]} for i in range(20)]
    found = encoder_of(tokenizer, shuffle_dataset=True, seed=7).prepare(rows, "rows", False, None)
    assert [row["input_ids"][0] - 3 for row in found] == numpy.random.default_rng(7).permutation(20).tolist()


def test_a_sample_shows_what_is_trained(tokenizer):
    row = encoder_of(tokenizer, True).encode({"prompt": "Where is the kite?", "completion": " Near the tower."})
    parts = sample_parts(row, tokenizer)
    assert [flag for _, flag in parts] == [False, True]
    assert parts[1][0] == " Near the tower." + tokenizer.eos_token


# --- refusals


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"txt": "a"}, ValueError, r"must have 'text' .* it has \['txt'\]"),
        ({"text": 3}, TypeError, "text must be a string; got int"),
        ({"messages": []}, ValueError, "'messages' must have a message; it is empty"),
        ({"conversations": []}, ValueError, "'messages' must have a message; it is empty"),
        ({"prompt": [], "completion": CHAT}, ValueError, "'prompt' must have a message; it is empty"),
        ({"messages": "hello"}, TypeError, "'messages' must be a list"),
        ({"prompt": "a", "completion": CHAT}, TypeError, "both be strings, or both lists of messages"),
        ({"text": "a", "image": b""}, ValueError, "rows with images need a vision model"),
        ({"input_ids": [1, 2], "labels": [1]}, ValueError, "labels must be as long as input_ids; got 1 and 2"),
        ({"input_ids": [1, 2], "assistant_masks": [1]}, ValueError, "a mask must be as long as input_ids"),
        (
            {"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]},
            ValueError,
            r"position_ids must count .* got 0 at 2\. .*packing=True",
        ),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, ValueError, "attention_mask must be 1 .* got 0 at 1"),
        ({"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}, ValueError, "seq_lengths must be the length of one row"),
        ({"input_ids": [[1, 2, 3]]}, ValueError, "input_ids must be one row of numbers; got a list of list"),
    ],
)
def test_a_row_that_cannot_be_read_says_why(tokenizer, row, error, message):
    with pytest.raises(error, match=message):
        encoder_of(tokenizer).encode(row)


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": CHAT, "completion": CHAT}])
def test_conversations_without_a_template_say_how_to_get_one(tokenizer, row, monkeypatch):
    template = tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"train_dataset, row 0: a conversation needs a chat template.*chat_template_path"):
        encoder_of(tokenizer).prepare([row], "train_dataset", False, None)
    assert encoder_of(tokenizer).encode({**row, "chat_template_kwargs": {"chat_template": template}})["input_ids"]


def test_streams_and_dictionaries_of_data_sets_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"is a stream \(generator\).*list\(dataset.take\(n\)\)"):
        as_rows(({"text": str(i)} for i in range(3)), "train_dataset")
    with pytest.raises(TypeError, match=r"holds several data sets: \['train', 'test'\]"):
        as_rows({"train": [], "test": []}, "train_dataset")
    with pytest.raises(ValueError, match="must have a row"):
        as_rows([], "train_dataset")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: only lists are read here")
    assert as_rows(datasets.Dataset.from_list([{"text": "a"}]), "train_dataset") == [{"text": "a"}]
    with pytest.raises(TypeError, match="is a stream"):
        as_rows(datasets.Dataset.from_list([{"text": "a"}]).to_iterable_dataset(), "train_dataset")


def test_a_trainer_takes_rows_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install -r requirements/test.txt")
    model = conftest.ROOT / "examples" / "data" / "tiny-llama"
    rows = [{"text": f"Mia, put the kite near tower {i}."} for i in range(8)]
    losses = []
    for data in (rows, datasets.Dataset.from_list(rows)):
        config = qlorapp.SFTConfig(
            str(tmp_path), max_steps=2, logging_steps=1, save_strategy="no", disable_tqdm=True, bf16=False
        )
        trainer = qlorapp.SFTTrainer(
            str(model), config, train_dataset=data, eval_dataset=data, peft_config=qlorapp.LoraConfig(r=4)
        )
        trainer.train()
        losses.append(
            [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + [trainer.evaluate()["eval_loss"]]
        )
    assert losses[0] == losses[1] and len(losses[0]) == 3
