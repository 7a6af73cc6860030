# SPDX-License-Identifier: Apache-2.0
"""What is trained of a conversation is what its row says: flags on messages, thoughts, tool calls, contents in parts."""

import json
import re

import pytest
from data_probe import ProbeError
from test_chat_template import named, tokenizer_with
from test_data import data_with_tokens, messages

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<think>", "</think>"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = data_with_tokens(tmp_path_factory.mktemp("turns"), SPECIAL)
    yield out
    out.probe.close()


@pytest.fixture(scope="module")
def sources(data):
    """The Jinja of the templates that have names."""
    return dict(named(data.probe))


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def trained(got):
    """Of each example, the trained texts."""
    return [re.findall("«(.*?)»", example["sample"], re.S) for example in got["examples"]]


# --- flags

MASKING = [("weight", 0), ("weight", 0.0), ("train", False), ("training", 0), ("trainable", False), ("train_on_turn", False),
           ("loss", False), ("loss_mask", 0), ("step_loss_mask", 0), ("masked", True), ("masked", 1)]  # fmt: skip


@pytest.mark.parametrize("key, value", MASKING)
@pytest.mark.parametrize("options", [{}, {"assistant_only_loss": True}], ids=["all", "assistant only"])
def test_an_answer_that_is_marked_is_not_trained(data, key, value, options):
    row = {"messages": [user("one"), assistant("odd", **{key: value}), user("two"), assistant("even")]}
    got = data.read([row], chat="chatml", **options)
    assert trained(got) == [["even<|im_end|>"]]
    assert got["flagged_rows"] == 1 and "keys of messages not used" not in got["line"]
    assert any(w.startswith(f"In 1 rows flags of messages [{key}] decide what is trained") for w in got["warnings"])
    plain = [{k: v for k, v in m.items() if k != key} for m in row["messages"]]
    assert got["examples"][0]["input_ids"] == data.read([{"messages": plain}], chat="chatml")["examples"][0]["input_ids"]


def test_flags_that_mask_nothing_train_the_assistants_turns(data):
    for flags in ({"weight": 1}, {"train": True}, {"masked": False}, {"loss_mask": 1.0, "trainable": True}):
        row = {
            "messages": [
                {"role": "system", "content": "s", "weight": 0},
                user("one"),
                assistant("odd", **flags),
                user("two"),
                assistant("even"),
            ]
        }
        assert trained(data.read([row], chat="llama3")) == [["odd<|eot_id|>", "even<|eot_id|>"]], flags
    null = {"messages": [user("one"), assistant("odd", weight=None)]}
    got = data.read([null], chat="llama3")
    assert got["flagged_rows"] == 0 and len(trained(got)[0][0]) > len("odd<|eot_id|>")  # no flag: the whole conversation


def test_flags_hold_in_every_form_of_conversation(data):
    sharegpt = {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "odd", "weight": 0},
                                  {"from": "human", "value": "two"}, {"from": "gpt", "value": "even", "weight": 1}]}  # fmt: skip
    pair = {"prompt": [user("one")], "completion": [assistant("odd", train=False), user("two"), assistant("even")]}
    assert trained(data.read([sharegpt], chat="chatml")) == [["even<|im_end|>"]] == trained(data.read([pair], chat="chatml"))
    masked = {"messages": [user("one"), assistant("odd", train=False)]}
    got = data.read([masked, sharegpt | {"messages": sharegpt["conversations"]}], chat="chatml")
    assert got["dropped"] == 1 and len(got["examples"]) == 1 and got["examples"][0]["line"] == 2


@pytest.mark.parametrize(
    "flags, rule",
    [
        ({"weight": 0.5}, "'weight' of a message must be 0, 1, true or false; got 0.5"),
        ({"train": "no"}, "'train' of a message must be .*; got a string"),
        ({"loss_mask": [0, 1]}, "'loss_mask' of a message must be .*; got an array"),
        ({"weight": 0, "trainable": True}, "the flags of a message must agree; 'weight' and 'trainable' do not"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "trained as a whole or not at all; got 'train_detail'"),
        ({"content": [{"type": "text", "text": "a", "train": False}]}, "must be keys of a message; got 'train' in a part"),
    ],
)  # fmt: skip
def test_flags_that_say_something_else_are_refused(data, flags, rule):
    with pytest.raises(ProbeError, match=r"rows.jsonl:1\] .*" + rule):
        data.read([{"messages": [user("q"), assistant("a") | flags]}], chat="chatml")


def test_flags_of_others_and_rows_without_flags_are_said(data):
    rows = [{"messages": [user("one") | {"weight": 1}, assistant("a", weight=1)]}, {"messages": [user("two"), assistant("b")]}]
    warned = data.read(rows, chat="chatml")["warnings"]
    assert any(w.startswith("1 messages of other roles than the assistant have a flag that calls them trained") for w in warned)
    assert any(w.startswith("1 of 2 rows have flags") and "--assistant_only_loss" in w for w in warned)
    assert not any("rows have flags" in w for w in data.read(rows, chat="chatml", assistant_only_loss=True)["warnings"])


def test_keys_of_messages_that_no_template_reads_are_named(data):
    rows = [
        {"messages": [user("q"), assistant("a", id=7, meta={"x": 1}, note=None)]},
        {"messages": [user("q") | {"when": "now"}, assistant("a")]},
    ]
    assert "keys of messages not used: [id, meta, when]" in data.read(rows, chat="qwen3")["line"]
    calls = [{"function": {"name": "f", "arguments": {"a": "b"}}}]
    row = {
        "messages": [
            user("q"),
            assistant("", tool_calls=calls),
            {"role": "tool", "content": "3", "tool_call_id": "c"},
            assistant("a", reasoning_content="r"),
        ]
    }
    assert "keys of messages not used: [tool_call_id]" in data.read([row], chat="qwen3")["line"]


# --- thoughts, and other text that a template leaves out


def served(source, some, i, tools=None):
    """Message `i` as transformers' template writes it when it is the last, and the text that generation begins with."""
    theirs = tokenizer_with(source)
    text = theirs.apply_chat_template(some[: i + 1], tools=tools, tokenize=False)
    head = theirs.apply_chat_template(some[:i], tools=tools, tokenize=False, add_generation_prompt=True)
    assert text.startswith(head)
    return head, text[len(head) :]


CALL = [{"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}]
THINKING = {
    "thoughts in every answer": [user("one"), assistant("<think>\nhm\n</think>\n\nyes"), user("two"), assistant("<think>\nok\n</think>\n\nno")],
    "thoughts under a key": [user("one"), assistant("yes", reasoning_content="e"), user("two"), assistant("no", reasoning_content="a")],
    "no thoughts": [user("one"), assistant("yes"), user("two"), assistant("no")],
    "thoughts once": [{"role": "system", "content": "s"}, user("one"), assistant("<think>hm</think>yes"), user("two"), assistant("no"), user("three"), assistant("so")],
    "tools": [user("one"), assistant("x", reasoning_content="hm", tool_calls=CALL), {"role": "tool", "content": "3"},
              assistant("yes", reasoning_content="so"), user("two"), assistant("no", reasoning_content="then")],
    "the user speaks last": [user("one"), assistant("<think>\nhm\n</think>\n\nyes"), user("two")],
}  # fmt: skip


@pytest.mark.parametrize("name", THINKING)
def test_a_template_that_rewrites_earlier_turns_trains_each_answer_as_it_is_served(data, sources, name):
    row = THINKING[name]
    got = data.read([{"messages": row}], chat="qwen3", assistant_only_loss=True)
    answers = [i for i, m in enumerate(row) if m["role"] == "assistant"]
    want = [served(sources["qwen3"], row, i) for i in answers]
    found = [(example["sample"], i) for i, example in enumerate(got["examples"])]
    for head, answer in want:
        said = f"«{answer.removesuffix(chr(10))}»"
        hits = [sample for sample, _ in found if head in (plain := sample.replace("«", "").replace("»", "")) and said in sample
                and plain.startswith(head + answer.removesuffix(chr(10)))]  # fmt: skip
        assert len(hits) == 1, (head, answer, found)
    assert sum(len(t) for t in trained(got)) == len(answers)
    assert [e["line"] for e in got["examples"]] == [1] * len(got["examples"])
    lengths = [len(e["input_ids"]) for e in got["examples"]]
    assert lengths == sorted(lengths)  # in the order of the answers
    if len(got["examples"]) > 1:
        assert got["split_rows"] == 1 and got["rows"] == 1
        assert f"1 rows became {len(got['examples'])} samples" in got["line"]


def test_answers_that_agree_share_a_sample(data):
    got = data.read([{"messages": THINKING["tools"]}], chat="qwen3", assistant_only_loss=True)
    assert [len(t) for t in trained(got)] == [2, 1]
    assert "<think>\nhm\n</think>" in trained(got)[0][0] and '{"name": "f", "arguments": {"a": "b"}}' in trained(got)[0][0]
    plain = messages(("user", "one"), ("assistant", "yes"), ("user", "two"), ("assistant", "no"))
    for template in ("chatml", "llama3", "qwen2.5", "qwen3-instruct", "gemma3", "phi4"):
        got = data.read([plain], chat=template, assistant_only_loss=True)
        assert len(got["examples"]) == 1 and len(trained(got)[0]) == 2 and got["split_rows"] == 0, template


def test_a_masked_answer_is_context_and_no_sample(data):
    row = THINKING["thoughts in every answer"]
    got = data.read([{"messages": [row[0], row[1] | {"weight": 0}, *row[2:]]}], chat="qwen3")
    assert trained(got) == [["<think>\nok\n</think>\n\nno<|im_end|>"]] and "hm" not in got["examples"][0]["sample"]
    assert got["rewritten_rows"] == 0


def test_of_a_row_that_became_several_samples_each_is_cut_and_left_out_alone(data):
    row = {"messages": THINKING["thoughts in every answer"]}
    whole = data.read([row, row], chat="qwen3", assistant_only_loss=True)
    assert [e["line"] for e in whole["examples"]] == [1, 1, 2, 2] and "4 samples" in whole["line"]
    limit = len(whole["examples"][0]["input_ids"]) + 3  # ends in front of the second answer
    cut = data.read([row, row], chat="qwen3", assistant_only_loss=True, max_length=limit)
    assert [e["line"] for e in cut["examples"]] == [1, 2] and cut["dropped"] == 0 and cut["truncated"] == 2
    assert cut["examples"][0] == whole["examples"][0] and "2 rows of messages" in cut["line"]


def test_whole_conversations_that_lose_earlier_thoughts_are_counted(data):
    rows = [
        {"messages": THINKING["no thoughts"]},
        {"messages": THINKING["thoughts under a key"]},
        {"messages": THINKING["thoughts in every answer"]},
    ]
    got = data.read(rows, chat="qwen3")
    assert got["rewritten_rows"] == 2 and len(got["examples"]) == 3
    assert any(
        w.startswith("2 of 3 rows lose text (first in line 2)") and "--assistant_only_loss" in w for w in got["warnings"]
    )
    # In a prompt they are what a server sends.
    got = data.read([{"prompt": rows[2]["messages"][:3], "completion": rows[2]["messages"][3:]}], chat="qwen3")
    assert got["rewritten_rows"] == 0 and trained(got)[0][0].startswith("<think>\nok\n</think>\n\nno<|im_end|>")


LOST = {
    "a key of thoughts": ("llama3", [user("q"), assistant("yes", reasoning_content="hm")], "leaves out reasoning_content \"hm\" of message 1. Put it into 'content'"),
    "a thought of one letter": ("chatml", [user("q"), assistant("assistant", thinking="a")], 'leaves out thinking "a" of message 1'),
    "reasoning": ("phi4", [user("q"), assistant("yes", reasoning="h\nm")], r'leaves out reasoning "h\\nm" of message 1'),
    "text beside a call": ("llama3.1", [user("q"), assistant("Let me look.", tool_calls=CALL)], 'leaves out content "Let me look." of message 1'),
    "thoughts of a masked answer": ("chatml", [user("q"), assistant("a", weight=0, thought="t"), user("q"), assistant("b")], "leaves out thought"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("options", [{}, {"assistant_only_loss": True}], ids=["all", "assistant only"])
def test_text_that_a_template_never_writes_is_refused_with_its_place(data, name, options):
    template, row, rule = LOST[name]
    with pytest.raises(
        ProbeError, match=r"rows.jsonl:2\] the chat template must write all text of a conversation; it " + rule
    ) as error:
        data.read([messages(("user", "a"), ("assistant", "b")), {"messages": row}], chat=template, **options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_system_message_that_stands_in_the_last_question_is_served_there(data, sources):
    row = [{"role": "system", "content": "Be kind."}, user("one"), assistant("odd"), user("two"), assistant("even")]
    got = data.read([{"messages": row}], chat="mistral-v3", assistant_only_loss=True)
    theirs = tokenizer_with(sources["mistral-v3"])
    for example, i in zip(got["examples"], (2, 4), strict=True):
        head = (
            theirs.apply_chat_template(row[:i], tokenize=False)
            .replace("<s!>", "<|begin_of_text|>")
            .replace("</e!>", "<|end_of_text|>")
        )
        assert "Be kind." in head and example["sample"] == head + f"« {row[i]['content']}<|end_of_text|>»"
    assert data.read([{"messages": row}], chat="mistral-v3")["rewritten_rows"] == 1
    pair = data.read([{"instruction": "q", "system": "Be kind.", "output": "a"}], chat="mistral-v3")
    assert "Be kind." in pair["examples"][0]["sample"] and pair["rewritten_rows"] == 0


# --- tool calls


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "llama3.1"])
@pytest.mark.parametrize("arguments", [{"city": "Bern", "n": 1.0, "deep": {"b": [1, None, "ü"], "a": "x\ny"}}, {}])
def test_arguments_that_are_json_text_are_trained_as_the_object(data, template, arguments):
    def row(form):
        call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": form}}
        return {"messages": [user("w?"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "3"}, assistant("ok")]}

    want = data.read([row(arguments)], chat=template)["examples"][0]
    forms = [json.dumps(arguments), json.dumps(arguments, indent=1, ensure_ascii=False)] + ([] if arguments else ["", " "])
    for form in forms:
        assert data.read([row(form)], chat=template)["examples"][0] == want, form
    sharegpt = {"conversations": [{"from": "human", "value": "w?"}, {"from": "function_call", "value": json.dumps({"name": "get", "arguments": json.dumps(arguments)})},
                                  {"from": "observation", "value": "3"}, {"from": "gpt", "value": "ok"}]}  # fmt: skip
    assert data.read([sharegpt], chat=template)["examples"][0] == want


@pytest.mark.parametrize(
    "text, rule",
    [
        ("{'city': 1}", r":1, 'arguments'\] must be valid JSON"),
        ("[1]", "must be a JSON object, or the text of one; got the text of an array"),
    ],
)
def test_arguments_that_are_no_object_are_refused(data, text, rule):
    row = {"messages": [user("w?"), assistant("", tool_calls=[{"function": {"name": "get", "arguments": text}}])]}
    with pytest.raises(ProbeError, match=rule):
        data.read([row], chat="qwen2.5")


# --- contents in parts


def parts(*texts, kind="text"):
    return [{"type": kind, "text": text} for text in texts]


def test_contents_in_parts_are_read_as_the_template_writes_them(data, sources):
    one = [user("hi\nyou"), assistant("yes")]
    for template in ("chatml", "llama3", "qwen3", "phi4", "gemma3"):
        for kind in ("text", "input_text", "output_text"):
            row = [user(parts("hi\nyou", kind=kind)), assistant(parts("yes", kind=kind))]
            assert (
                data.read([{"messages": row}], chat=template)["examples"]
                == data.read([{"messages": one}], chat=template)["examples"]
            )
    several = [user(parts("hi", "you")), assistant(parts("yes", "no"))]
    joined = [user("hi\nyou"), assistant("yes\nno")]  # as vLLM and llama.cpp pass them to a template that accepts strings
    assert (
        data.read([{"messages": several}], chat="llama3")["examples"]
        == data.read([{"messages": joined}], chat="llama3")["examples"]
    )
    spaced = [{"role": "system", "content": parts(" s ")}, user(parts(" hi ", "you\n")), assistant(parts("yes ", " no"))]
    text = tokenizer_with(sources["gemma3"]).apply_chat_template(spaced, tokenize=False)
    got = data.read([{"messages": spaced}], chat_source=sources["gemma3"])["examples"][0]
    assert got["input_ids"] == data.ids(text, special=False)


@pytest.mark.parametrize(
    "part, rule",
    [
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "got 'image_url'. Only text is trained"),
        ({"type": "image"}, "got 'image'"),
        ({"type": "thinking", "thinking": "hm"}, "got 'thinking'"),
        ({"type": "text", "text": 5}, "'text' must be a string; got a number"),
        ({"type": "text"}, "must have key 'text'"),
        ("bare", "got a string"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(data, part, rule):
    with pytest.raises(ProbeError, match=r"rows.jsonl:1\] .*" + rule):
        data.read([{"messages": [user([*parts("see"), part]), assistant("a")]}], chat="chatml")


@pytest.mark.parametrize(
    "template, rule",
    [
        ("gemma3", "user and assistant must alternate"),
        ("mistral-v3", "must alternate"),
        ("phi4", 'leaves out content "3" of message 1'),
    ],
)
def test_a_role_of_another_template_is_refused_and_a_misspelled_one_corrected(data, template, rule):
    with pytest.raises(ProbeError, match=rule):
        data.read([{"messages": [user("q"), {"role": "tool", "content": "3"}, assistant("a")]}], chat=template)
    with pytest.raises(ProbeError, match="Did you mean 'user'"):
        data.read([{"messages": [{"role": "User", "content": "q"}, assistant("a")]}], chat=template)


def test_thoughts_under_any_name_reach_the_template_under_each_as_transformers_gives_them(data, sources):
    for key in ("reasoning_content", "reasoning", "thinking"):
        row = {"messages": [user("q"), assistant("yes", **{key: "hm"})]}
        assert trained(data.read([row], chat="qwen3", assistant_only_loss=True)) == [["<think>\nhm\n</think>\n\nyes<|im_end|>"]]
