# SPDX-License-Identifier: Apache-2.0
"""Rows become the tokens and labels that they promise, bad rows are named with their line, and an epoch visits them as the Trainer does."""

import json
import re
import subprocess

import conftest
import pytest
import torch
from data_probe import DataProbe, ProbeError
from test_tokenizer import gpt2_like, llama3_like
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

IGNORED = -100


class Data:
    """One tokenizer on both sides and a file to write rows into."""

    def __init__(self, folder, make):
        self.theirs = make(folder / "tokenizer")
        self.probe = DataProbe(conftest.BUILD)
        self.eos = self.probe.ask("load", folder=str(folder / "tokenizer"))["eos"]
        self.path = folder / "rows.jsonl"

    def read(self, rows, **options):
        if not isinstance(rows, bytes):
            rows = "".join(json.dumps(row) + "\n" for row in rows).encode()
        self.path.write_bytes(rows)
        return self.probe.ask("dataset", path=str(self.path), **options)

    def ids(self, text, special=True):
        return self.theirs.encode(text, add_special_tokens=special).ids


def data_with_tokens(folder, tokens):
    """Over a tokenizer like Llama 3's that has these special tokens."""

    def make(folder):
        theirs = llama3_like(folder)
        theirs.add_special_tokens(tokens)
        theirs.save(str(folder / "tokenizer.json"))
        return theirs

    return Data(folder, make)


@pytest.fixture(scope="module", params=[llama3_like, gpt2_like], ids=["llama3", "gpt2"])
def data(request, tmp_path_factory):
    out = Data(tmp_path_factory.mktemp("data"), request.param)
    yield out
    out.probe.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    def make(folder):
        theirs = llama3_like(folder)
        theirs.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>"])
        theirs.save(str(folder / "tokenizer.json"))
        return theirs

    out = Data(tmp_path_factory.mktemp("llama"), make)
    yield out
    out.probe.close()


def test_text_is_trained_whole_and_ends_in_eos_once(data):
    eos_text = data.theirs.id_to_token(data.eos)
    got = data.read([{"text": "Hello wörld", "id": 3}, {"text": "bye" + eos_text}, {"text": ""}])
    want = [data.ids("Hello wörld") + [data.eos], data.ids("bye") + [data.eos]]
    empty = data.ids("") + [data.eos]
    want += [empty] if len(empty) > 1 else []
    assert [e["input_ids"] for e in got["examples"]] == want == [e["labels"] for e in got["examples"]]
    assert got["format"] == "text" and got["rows"] == 3 and got["dropped"] == 3 - len(want) and got["ends_in_eos"] == len(want)
    assert got["tokens"] == sum(map(len, want)) and got["target_tokens"] == sum(len(w) - 1 for w in want)
    assert "keys not used: [id]" in got["line"] and "100 % end in a trained EOS" in got["line"]
    assert got["empty_answers"] == len(want) - 2 == len(got["warnings"])


def test_text_field_and_eos_can_be_chosen(data):
    got = data.read([{"body": "ab cd"}], text_field="body", append_eos=False)
    assert got["examples"][0]["input_ids"] == data.ids("ab cd")
    assert "0 % of the rows end in a trained EOS" in got["warnings"][0]


@pytest.mark.parametrize("completion_only", [None, True, False])
def test_prompts_get_no_loss_unless_asked(data, completion_only):
    prompt, completion = "What is 12+30?\nAnswer:", " 42 of course."
    options = {} if completion_only is None else {"completion_only_loss": completion_only}
    got = data.read([{"prompt": prompt, "completion": completion}], **options)
    ids = data.ids(prompt + completion) + [data.eos]
    head = data.ids(prompt)
    assert ids[: len(head)] == head  # this boundary is clean
    example = got["examples"][0]
    assert example["input_ids"] == ids
    assert example["labels"] == (ids if completion_only is False else [IGNORED] * len(head) + ids[len(head) :])
    if completion_only is not False:
        assert example["sample"].endswith(f"«{completion}{data.theirs.id_to_token(data.eos)}»") and got["straddling"] == 0


def test_a_boundary_inside_a_token_is_trained_and_said(data):
    got = data.read([{"prompt": "a:", "completion": "b"}, {"prompt": "said the ", "completion": "quick brown fox"}])
    ids, labels = got["examples"][1]["input_ids"], got["examples"][1]["labels"]
    assert any(
        t.startswith("Ġq") for t in data.theirs.encode("said the quick brown fox").tokens
    )  # holds the prompt's last space
    assert got["straddling"] == 1
    first = next(i for i, label in enumerate(labels) if label != IGNORED)
    assert data.theirs.decode(ids[first:-1]) == " quick brown fox"
    assert "first in line 2" in got["warnings"][-1]


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize("assistant_only", [False, True])
def test_conversations_train_whole_or_only_what_the_assistant_says(llama, assistant_only):
    row = messages(
        ("system", "Be brief."), ("user", "Hi!"), ("assistant", "  Hello, 漢字. "), ("user", "Bye"), ("assistant", "See you")
    )
    for options in [{"assistant_only_loss": True}, {"completion_only_loss": True}] if assistant_only else [{}]:
        got = llama.read([row], chat="llama3", **options)
        parts = [("<|begin_of_text|>", False)]
        for turn in row["messages"]:
            trained = turn["role"] == "assistant" or not assistant_only
            parts.append((f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n", not assistant_only))
            parts.append((turn["content"].strip() + "<|eot_id|>", trained))
        # Special tokens separate the parts, so they can be encoded one by one.
        pieces = [(llama.ids(text, special=False), trained) for text, trained in parts]
        ids = [i for piece, _ in pieces for i in piece]
        assert got["examples"][0]["input_ids"] == ids == llama.ids("".join(text for text, _ in parts), special=False)
        want = [i if trained else IGNORED for piece, trained in pieces for i in piece]
        assert got["examples"][0]["labels"][1:] == want[1:]
        assert got["ends_in_eos"] == 1 and got["straddling"] == 0 and got["warnings"] == []
    if assistant_only:
        assert got["examples"][0]["sample"].count("«") == 2
        assert got["examples"][0]["sample"].endswith("<|end_header_id|>\n\n«See you<|eot_id|>»")


def test_a_template_whose_end_of_turn_is_no_token_is_said(data):
    got = data.read([messages(("user", "Hi"), ("assistant", "Ho"))], chat="chatml")
    assert any("end-of-turn token of the chat template is not a token" in w for w in got["warnings"])
    assert any("0 % of the rows end in a trained EOS" in w for w in got["warnings"])


def test_input_ids_are_taken_as_they_are_with_or_without_a_tokenizer(data):
    rows = [
        {"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]},
        {"input_ids": [4, 5]},
        {"input_ids": [7, data.eos], "labels": None},
    ]
    for tokenizer in (True, False):
        got = data.read(rows, tokenizer=tokenizer)
        assert [e["input_ids"] for e in got["examples"]] == [r["input_ids"] for r in rows]
        assert [e["labels"] for e in got["examples"]] == [[IGNORED, 2, 3], [4, 5], [7, data.eos]]
        assert got["format"] == "input_ids" and got["ends_in_eos"] == (1 if tokenizer else 0)


def test_long_rows_lose_their_end_and_rows_without_labels_are_left_out(data):
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [IGNORED, IGNORED, IGNORED, 4, 5]},  # cut to its prompt: nothing left
        {"input_ids": [1, 2, 3, 4], "labels": [IGNORED, 2, 3, 4]},
        {"input_ids": [9], "labels": [9]},  # a label that nothing predicts
        {"input_ids": [], "labels": []},
        {"input_ids": [6, 7], "labels": [IGNORED, 7]},
    ]
    got = data.read(rows, max_length=3)
    assert [(e["input_ids"], e["labels"], e["line"]) for e in got["examples"]] == [
        ([1, 2, 3], [IGNORED, 2, 3], 2),
        ([6, 7], [IGNORED, 7], 5),
    ]
    assert (got["truncated"], got["dropped"], got["longest"], got["longest_line"]) == (2, 3, 3, 2)
    assert data.read(rows[:2], max_length=0)["truncated"] == 0


@pytest.mark.parametrize(
    "raw, lines",
    [
        (b'{"text": "a b"}\r\n\r\n  \r\n{"text": "c d"}\r\n', [1, 4]),
        (b'\xef\xbb\xbf{"text": "a b"}\n{"text": "c d"}', [1, 2]),
        (b'\n\n{"text": "a b"}\n{"text": "c d"}\n\n', [3, 4]),
        (b'[{"text": "a b"},\n {"text": "c d"}]\n', [1, 2]),
        (b'\xef\xbb\xbf [\n  {\n    "text": "a b"\n  },\n  {"text": "c d"}\n]', [2, 5]),
    ],
)
def test_line_ends_blank_lines_byte_order_marks_and_arrays_are_read(data, raw, lines):
    got = data.read(raw)
    assert [e["line"] for e in got["examples"]] == lines
    assert [e["input_ids"] for e in got["examples"]] == [data.ids(t) + [data.eos] for t in ("a b", "c d")]


def test_strings_with_brackets_quotes_and_nuls_stay_whole_in_arrays(data):
    texts = ['},{"]', 'quote " backslash \\', "nul \0 and \\u", "[[[", ""]
    raw = json.dumps([{"text": "x" + t} for t in texts]).encode()
    assert [e["input_ids"] for e in data.read(raw)["examples"]] == [data.ids("x" + t) + [data.eos] for t in texts]


GOOD = b'{"text": "fine"}\n'
BAD = {
    "empty file": (b"", r"\] the data must have a row; it is empty"),
    "blank lines only": (b"\n \r\n\n", "the data must have a row"),
    "empty array": (b"[ ]", "the data must have a row"),
    "no object": (b"[1, 2]", ":1] a row must be a JSON object; got a number"),
    "half an object": (GOOD + b'{"text": "x', ":2] must be valid JSON"),
    "array cut off": (b'[{"text": "x"},\n{"text"', ":2] the array of rows must end with"),
    "array with a hole": (b'[{"text": "x"},,{"text": "y"}]', "line 1, column 16: there is no row in front of the comma"),
    "array with a comma at its end": (b'[{"text": "x"},]', "line 1, column 15: there is no row behind the comma"),
    "text behind an array": (b'[{"text": "x"}]\n{"text": "y"}', ":2] nothing may follow"),
    "ill-formed UTF-8": (GOOD + b'{"text": "\xff\xfe"}', ":2] must be valid JSON in UTF-8"),
    "raw NUL": (GOOD * 2 + b'{"text": "\0"}', ":3] must be valid JSON"),
    "lone surrogate": (b'{"text": "\\ud800"}', ":1] must be valid JSON"),
    "NaN": (b'{"input_ids": [NaN]}', ":1] must be valid JSON"),
    "a key twice": (b'{"text": "a", "text": "b"}', "'text' appears twice"),
    "deep nesting": (b'{"text": ' + b"[" * 200 + b"]" * 200 + b"}", "nested at most 64 levels"),
    "other keys": (
        b'{"question": "x"}',
        r"'text', 'prompt' and 'completion', 'messages', .* or 'input_ids'; got keys \[question\]",
    ),
    "prompt alone": (b'{"prompt": "x"}', "Add the 'completion'"),
    "another format later": (GOOD + b'{"prompt": "a", "completion": "b"}', ":2] a row must have key 'text'"),
    "text of another kind": (GOOD + b'{"text": 5}', ":2] 'text' must be a string; got a number"),
    "null": (GOOD + b'{"text": null}', "got null"),
    "prompt as messages": (b'{"prompt": [{"role": "user"}], "completion": "x"}', "both be strings, or both lists of messages"),
    "ids of another kind": (b'{"input_ids": [1, "2"]}', "'input_ids' must be a list of token ids; got a string"),
    "negative id": (b'{"input_ids": [1, -1]}', "got -1"),
    "fractional id": (b'{"input_ids": [1, 2.5]}', "got 2.5"),
    "huge id": (b'{"input_ids": [1, 4294967296]}', "got 4294967296"),
    "id outside the vocabulary": (
        b'{"input_ids": [1, 2]}\n{"input_ids": [1, 99999]}',
        ":2] token ids must be below .* got 99999",
    ),
    "label outside the vocabulary": (b'{"input_ids": [1, 2], "labels": [1, 99999]}', "got 99999"),
    "labels too short": (b'{"input_ids": [1, 2], "labels": [1]}', "as long as 'input_ids'; got 1 and 2"),
    "labels of another sign": (b'{"input_ids": [1, 2], "labels": [1, -1]}', "token ids and -100; got -1"),
    "padded row": (b'{"input_ids": [1, 2], "attention_mask": [1, 0]}', "Write rows without padding"),
    "nothing to train": (b'{"input_ids": [1, 2], "labels": [-100, -100]}\n{"input_ids": [1]}', "none of 2 has a label"),
    "utf-16": ('{"text": "x"}'.encode("utf-16"), "got UTF-16"),
    "gzip": (b"\x1f\x8b\x08\x00", "must be an undamaged gzip file"),
    "parquet": (b"PAR1....", "got a Parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_one_clear_error_with_their_line(data, name):
    raw, message = BAD[name]
    with pytest.raises(ProbeError, match=message) as error:
        data.read(raw)
    assert str(error.value).startswith(f"[{data.path}")
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": "x"}, "'messages' must be a list; got a string"),
        ({"messages": []}, "must have a message"),
        ({"messages": ["x"]}, "must be a JSON object"),
        ({"messages": [{"role": "user"}]}, "a message must have a 'content' or 'tool_calls'"),
        ({"messages": [{"role": "user", "content": ["parts"]}]}, "a part of 'content' must be .*; got a string"),
        ({"messages": [{"role": "human", "content": "x"}]}, "a role must be one of"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]},
                ]
            },
            'leaves out tool call "f" of message 1',
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}, 'leaves out tool "f"'),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {}, "functions": [{}]}, "got 'functions'"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "[1"}, r"rows.jsonl:1, 'tools'\] must be valid JSON"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}, "'tools' must be a list of tools; got an object"),
        (
            {"messages": [{"role": "assistant", "content": None}]},
            r"a message must have a 'content' or 'tool_calls'; got keys \[role\]",
        ),
    ],
)
def test_bad_conversations_are_named(data, row, message):
    with pytest.raises(ProbeError, match=message) as error:
        data.read([row], chat="llama3")
    assert str(error.value).startswith(f"[{data.path}:1")


@pytest.mark.parametrize("tools", [[{"b": 1, "a": 2}], '[{"b": 1, "a": 2}]'], ids=["list", "text"])
def test_tool_calls_are_what_the_assistant_says(data, tools):
    row = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "w", "arguments": {"z": 1, "at": [None]}}}],
            },
            {"role": "tool", "content": "3", "tool_call_id": None},
            {"role": "assistant", "content": "Three.", "tool_calls": None},
        ],
        "tools": tools,
    }
    got = data.read([row], chat="qwen2.5", assistant_only_loss=True)
    sample = got["examples"][0]["sample"]
    call = '<tool_call>\n{"name": "w", "arguments": {"z": 1, "at": [null]}}\n</tool_call><|im_end|>'
    assert re.findall("«(.*?)»", sample, re.S) == [call, "Three.<|im_end|>"]
    assert '<tools>\n{"b": 1, "a": 2}\n</tools>' in sample and "keys not used" not in got["line"]


def test_options_that_do_not_fit_the_rows_are_refused(data):
    text, chat = [{"text": "x"}], [messages(("user", "x"))]
    for rows, options, message in [
        (text, {"assistant_only_loss": True}, "needs rows with 'messages'"),
        (text, {"completion_only_loss": True}, "needs rows with 'prompt' and 'completion'"),
        (text, {"tokenizer": False}, "rows of text need a tokenizer"),
        (chat, {}, "need a chat template; the model has none"),
        (text, {"max_length": -1}, "max_length"),
        (text, {"model_vocab_size": 5}, "must be below the size of the vocabulary, 5"),
        (chat, {"chat": "llama3", "assistant_only_loss": True}, "none of 1 has a label"),
    ]:
        with pytest.raises(ProbeError, match=message):
            data.read(rows, **options)
    with pytest.raises(ProbeError, match="cannot be read"):
        data.probe.ask("dataset", path=str(data.path.parent / "absent.jsonl"))
    with pytest.raises(ProbeError, match="Is a directory"):
        data.probe.ask("dataset", path=str(data.path.parent))


def test_a_row_of_ten_megabytes_is_read_and_one_above_the_limit_is_named(data):
    got = data.read(json.dumps({"text": "ab " * 3_500_000}).encode(), max_length=16)
    assert got["truncated"] == 1 and got["tokens"] == 16
    with pytest.raises(ProbeError, match=":2] a row may have at most 67108864 bytes"):
        data.read(GOOD + b'{"text": "' + b"a" * (65 << 20) + b'"}')


# --- the order of an epoch ---------------------------------------------------------------------------------------------------


def our_order(batch, **request):
    done = subprocess.run(
        [conftest.BUILD / "tests/data/order_probe"], input=json.dumps(request).encode(), capture_output=True, check=True
    )
    return [order[i : i + batch] for order in json.loads(done.stdout) for i in range(0, len(order), batch)]


class Rows(torch.utils.data.Dataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return {"input_ids": torch.full((self.lengths[i],), i), "labels": torch.full((self.lengths[i],), i)}


def their_order(tmp_path, rows, epochs, batch, strategy="random", resume=None, **seeds):
    """The rows of each batch that a real Trainer trains on; a row's tokens say which it is."""
    seen = []

    def collate(examples):
        seen.append([int(e["input_ids"][0]) for e in examples])
        return {
            "input_ids": torch.stack([e["input_ids"] for e in examples]),
            "labels": torch.stack([e["labels"] for e in examples]),
        }

    class StopEarly(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_save = state.global_step == 3

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    args = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=batch,
        num_train_epochs=epochs,
        train_sampling_strategy=strategy,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **seeds,
    )
    trainer = Trainer(
        LlamaForCausalLM(config), args, train_dataset=Rows([3] * rows), data_collator=collate, callbacks=[StopEarly()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return seen


@pytest.mark.parametrize(
    "strategy, seeds, seed",
    [
        ("random", {}, 42),
        ("random", {"seed": 7}, 7),
        ("random", {"seed": 7, "data_seed": 123}, 123),
        ("random", {"data_seed": 0}, 0),
        ("sequential", {}, 42),
    ],
)
def test_three_epochs_visit_the_rows_as_a_real_trainer_does(tmp_path, strategy, seeds, seed):
    theirs = their_order(tmp_path, 23, 3, 4, strategy, **seeds)
    assert our_order(rows=23, epochs=3, batch=4, strategy=strategy, seed=seed) == theirs
    assert len(theirs) == 18 and len(theirs[5]) == 3


def test_a_resumed_trainer_goes_on_where_our_order_stands_after_three_batches(tmp_path):
    their_order(tmp_path, 23, 2, 4)
    resumed = their_order(tmp_path, 23, 2, 4, resume=str(tmp_path / "out" / "checkpoint-3"))
    ours = our_order(rows=23, epochs=2, batch=4, strategy="random", seed=42)[3:]
    assert resumed[-len(ours) :] == ours and len(ours) == 9


@pytest.mark.parametrize("rows, group", [(1, 4), (7, 2), (50, 4), (1000, 3), (1000, 64)])
def test_group_by_length_is_transformers_order_of_the_same_generator(rows, group):
    lengths = [(i * 7919) % 31 for i in range(rows)]
    for epoch in range(2):
        want = get_length_grouped_indices(lengths, group, generator=torch.Generator().manual_seed(5 + epoch))
        got = our_order(rows=rows, epochs=2, batch=rows, strategy="group_by_length", seed=5, group=group, lengths=lengths)
        assert got[epoch] == want


@pytest.mark.parametrize("rows", [1, 2, 100_003])
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_random_orders_are_torchs_permutations(rows, seed):
    want = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    assert our_order(rows=rows, epochs=1, batch=rows, strategy="random", seed=seed) == [want]
