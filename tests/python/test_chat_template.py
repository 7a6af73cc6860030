# SPDX-License-Identifier: Apache-2.0
"""Chat templates write what transformers' apply_chat_template writes: those of checkpoints, and those that have names here."""

import datetime
import json
import random
import re
import unittest.mock

import conftest
import pytest
from chat_template_sources import CHATML, LLAMA3, TEMPLATES
from data_probe import DataProbe, ProbeError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

CONTENTS = [
    "Hi",
    "",
    "  spaces \n",
    "\n\nlines\n",
    "Größe 漢字 👩‍👩‍👧‍👦",
    "<|eot_id|> inside",
    "a\x1f",
    "\u00a0nbsp\u2003",
    "{{ bos_token }}",
    "{SYSTEM}",
]


@pytest.fixture(scope="module")
def probe():
    ours = DataProbe(conftest.BUILD)
    yield ours
    ours.close()


def conversations():
    rng = random.Random(5)
    for _ in range(60):
        turns = [{"role": r, "content": rng.choice(CONTENTS)} for _ in range(rng.randint(1, 3)) for r in ("user", "assistant")]
        if rng.random() < 0.5:
            turns.insert(0, {"role": "system", "content": rng.choice(CONTENTS)})
        if rng.random() < 0.3:
            turns.pop()
        if rng.random() < 0.1:
            turns.append({"role": "system", "content": "late"})
        yield turns


def tokenizer_with(template):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s!>", eos_token="</e!>", chat_template=template
    )


def compare(probe, source, messages, prompt, **options):
    """Both texts are one, or both sides refuse. @returns our answer."""
    keywords = {"date_string": options["date"]} if "date" in options else {}
    if "tools" in options:
        keywords["tools"] = options["tools"]
    day = datetime.datetime.strptime(options.get("date", "26 Jul 2024"), "%d %b %Y")

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return day

    try:
        with unittest.mock.patch.object(chat_template_utils, "datetime", Day):
            want = tokenizer_with(source).apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **keywords
            )
    except Exception:  # the template's own, or Python's of an expression
        want = None
    try:
        got = probe.ask("render", source=source, bos="<s!>", messages=messages, prompt=prompt, **options)
    except ProbeError as error:
        assert want is None or "are not known here; of ASCII they are" in str(error), (source, messages, str(error))
        return None
    assert want is not None and bytes.fromhex(got["text"]).decode() == want, (source, messages)
    return got


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_apply_chat_template(probe, name):
    for messages in conversations():
        for prompt in (False, True):
            for date in [{"date": "1 Jan 2030"}] if name == "llama3.2" else [{}, {"date": "1 Jan 2030"}]:
                compare(probe, TEMPLATES[name], messages, prompt, **date)


def named(probe):
    """(name, Jinja) of every template that --chat_template knows by a name."""
    return [(name, probe.ask("template_source", name=name)) for name in probe.ask("template_names")]


def test_a_template_with_a_name_is_rendered_as_transformers_renders_its_source(probe):
    rendered = dict.fromkeys((name for name, _ in named(probe)), 0)
    for name, source in named(probe):
        for messages in conversations():
            for prompt in (False, True):
                got = compare(probe, source, messages, prompt, date="1 Jan 2030")
                if not got:
                    continue
                ours = probe.ask("render", name=name, messages=messages, prompt=prompt, date="1 Jan 2030")
                text = (
                    bytes.fromhex(ours["text"])
                    .decode()
                    .replace("<|begin_of_text|>", "<s!>")
                    .replace("<|end_of_text|>", "</e!>")
                )
                want = bytes.fromhex(got["text"]).decode().replace("<|end_of_text|>", "</e!>")  # Granite writes it itself
                assert text == want
                rendered[name] += 1
    assert set(rendered) >= set(
        "llama2 llama3 llama3.1 chatml qwen2.5 qwen3 mistral mistral-v3 gemma gemma3 phi3 phi4 zephyr alpaca granite cohere olmo2 "
        "mistral-v7 exaone3.5 deepseek-r1-distill".split()
    )
    assert min(rendered.values()) > 20, rendered


ENDS = {"</e!>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]", "<｜end▁of▁sentence｜>"}  # fmt: skip


def test_an_answer_is_where_generation_would_begin_through_the_end_of_its_turn(probe):
    seen = set()
    for name, source in named(probe):
        for messages in conversations():
            messages = [{**m, "content": f"{m['content']} {i}"} for i, m in enumerate(messages)]
            last = len(messages) - 1
            if messages[last]["role"] != "assistant":
                continue
            try:
                got = probe.ask("render", source=source, bos="<s!>", messages=messages, served=True)
                head = probe.ask("render", source=source, bos="<s!>", messages=messages[:last], prompt=True)
            except ProbeError:
                continue
            text, ((begin, end),) = bytes.fromhex(got["text"]), got["turns"]
            assert text[:begin] == bytes.fromhex(head["text"])
            learned = text[begin:end].decode()
            assert got["end"] in ENDS and learned.endswith(got["end"]) and str(last) in learned
            if name not in (
                "mistral-v3",
                "mistral-v3-tekken",
                "deepseek-r1-distill",
            ):  # which write the rest in another way then
                assert probe.ask("render", source=source, bos="<s!>", messages=messages)["text"] == got["text"]
            seen.add(name)
    assert len(seen) == len(named(probe))


# --- tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Größe & <wind>",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}, "at": {"type": "number"}},
            "required": ["zone"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"zone": "Köln", "at": 1e-05, "all": [True, None]}}}
TEXT_CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"zone": "x"}'}}
TOOL_CHATS = [
    [{"role": "user", "content": " hi "}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": '{"t": 3}'},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [TEXT_CALL]},
        {"role": "tool", "content": "4"},
    ],
    [
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Both.", "tool_calls": [CALL, CALL["function"]]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\nDone", "tool_calls": [TEXT_CALL]},
        {"role": "assistant", "content": "x", "reasoning_content": "\nwhy\n"},
    ],
]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "<think>\nIt is 4, sure.\n</think>\n\n4"}, {"content": "4", "reasoning_content": "It is 4"}, {"content": "</s!> 4 </e!>"},
        {"content": "<think>\n4\n</think>\n\n"}, {"content": "", "reasoning_content": "why"}, {"content": "assistant"}, {"content": "user\n"},
    ],
)  # fmt: skip
def test_an_answer_that_says_what_stands_around_it_is_trained_to_its_end(probe, answer):
    compared = 0
    for name, source in named(probe):
        turns = [{"role": "user", "content": "2+2? <think>"}, {"role": "assistant", **answer}]
        got = probe.ask("render", source=source, bos="<s!>", messages=turns, served=True)
        text, ((begin, end),) = bytes.fromhex(got["text"]), got["turns"]
        assert text[begin:end].decode().endswith(got["end"]), name
        assert text[end:].strip() in (b"", b"</e!>"), name  # Phi-3 ends a conversation in EOS
        compared += 1
    assert compared == len(named(probe))


def test_the_end_of_a_turn_is_all_tokens_that_end_it(probe):
    source = "{% for m in messages %}({{ m.role }}){{ m.content }}{{ eos_token }}{{ bos_token }} {% endfor %}"
    got = probe.ask(
        "render",
        source=source,
        bos="<s!>",
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        served=True,
    )
    ((begin, end),) = got["turns"]
    assert bytes.fromhex(got["text"])[begin:end] == b"(assistant)a</e!><s!>"


def test_a_call_is_what_the_assistant_has_to_produce(probe):
    for name, source in named(probe):
        if not re.match(r"qwen|llama3\.1", name):
            continue
        for count in (2, 4):
            got = probe.ask("render", source=source, bos="", messages=TOOL_CHATS[2][:count], tools=[WEATHER], served=True)
            ((begin, end),) = got["turns"]
            learned = bytes.fromhex(got["text"])[begin:end].decode()
            assert ('{"name": "weather"' if count == 2 else "Three.") in learned


@pytest.mark.parametrize(
    "name, messages, options, rule",
    [
        ("llama3.1", TOOL_CHATS[3], {}, r"refuses the conversation: one tool call at a time"),
        ("qwen2.5", [{"role": "assistant", "content": "", "tool_calls": [{"name": "x"}]}], {}, r"Object of type Undefined is not JSON serializable"),
        ("gemma", [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}], {}, r"a system message is not supported"),
        ("mistral", [{"role": "user", "content": "x"}] * 2, {}, r"must alternate, the user first"),
        ("llama3", [], {}, "must have a message"),
        ("llama3", [{"role": "asistant", "content": "x"}], {}, "Did you mean 'assistant'"),  # codespell:ignore asistant
    ],
)  # fmt: skip
def test_what_a_template_raises_for_is_refused_with_its_words(probe, name, messages, options, rule):
    with pytest.raises(ProbeError, match=rule):
        probe.ask("render", name=name, messages=messages, **options)


def test_the_template_is_found_where_transformers_looks(probe, tmp_path):
    message = [{"role": "user", "content": "x"}]
    assert probe.ask("render", folder=str(tmp_path), messages=message) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": LLAMA3}]}))
    assert bytes.fromhex(probe.ask("render", folder=str(tmp_path), messages=message)["text"]).startswith(
        b"<s><|start_header_id|>user"
    )
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert probe.ask("render", folder=str(tmp_path), messages=message)["text"] == b"<|im_start|>user\nx<|im_end|>\n".hex()
    with pytest.raises(ProbeError, match="Did you mean 'llama3'"):
        probe.ask("render", name="lama3", messages=message)
