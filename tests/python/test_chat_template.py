# SPDX-License-Identifier: Apache-2.0
"""The built-in chat templates write what transformers' apply_chat_template writes, and nothing else passes for one of them."""

import json
import random
import re

import conftest
import jinja2
import pytest
from chat_template_sources import CHATML, LLAMA3, LLAMA31, QWEN, TEMPLATES
from data_probe import DataProbe, ProbeError
from qlorapp.hf.text_service import assistant_range
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

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


#: What apply_chat_template would leave out of its text is refused here.
LOST = r"does not support a system message|writes the system message into the first user message|a role must be one of|only the first message may be"


def compare(probe, source, messages, prompt, **options):
    """Both texts are one, or both sides refuse; what is only refused here would have been lost. @returns our answer."""
    keywords = {"date_string": options["date"]} if "date" in options else {}
    if "tools" in options:
        keywords["tools"] = options["tools"]
    try:
        want = tokenizer_with(source).apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **keywords)
    except (jinja2.exceptions.TemplateError, TypeError):
        want = None
    try:
        got = probe.ask("render", source=source, bos="<s!>", messages=messages, prompt=prompt, **options)
    except ProbeError as error:
        assert want is None or re.search(LOST, str(error)), (source, messages, str(error))
        return None
    assert bytes.fromhex(got["text"]).decode() == want, (source, messages)
    return got


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_apply_chat_template(probe, name):
    for messages in conversations():
        for prompt in (False, True):
            for date in [{"date": "1 Jan 2030"}] if name == "llama3.2" else [{}, {"date": "1 Jan 2030"}]:
                compare(probe, TEMPLATES[name], messages, prompt, **date)


def built_in(probe):
    """(name, Jinja) of every source that the library has, with a text where a system message may stand."""
    return [(name, source.replace("{SYSTEM}", 'You are a "bot" {x}.')) for name, source in probe.ask("templates")]


def test_every_built_in_template_writes_what_its_own_source_writes(probe):
    rendered = dict.fromkeys((name for name, _ in built_in(probe)), 0)
    for name, source in built_in(probe):
        for messages in conversations():
            for prompt in (False, True):
                got = compare(probe, source, messages, prompt, date="1 Jan 2030")
                if got:
                    assert got["name"] == name and got["knows_tools"]
                    rendered[name] += 1
    assert set(rendered) >= set(
        "llama2 llama3 llama3.1 chatml qwen2.5 qwen3 mistral mistral-v3 gemma gemma3 phi3 phi4 zephyr alpaca granite cohere olmo2 "
        "mistral-v7 exaone3.5 deepseek-r1-distill".split()
    )
    assert min(rendered.values()) > 20, rendered


def test_the_source_of_a_name_is_rendered_by_transformers_as_the_name_is_here(probe):
    for name in probe.ask("template_names"):
        source, compared = probe.ask("template_source", name=name), 0
        assert "{SYSTEM}" not in source
        for messages in conversations():
            got = compare(probe, source, messages, True, date="1 Jan 2030")
            if not got:
                continue
            ours = probe.ask("render", name=name, messages=messages, prompt=True, date="1 Jan 2030")
            text = bytes.fromhex(ours["text"]).decode().replace("<|begin_of_text|>", "<s!>").replace("<|end_of_text|>", "</e!>")
            want = bytes.fromhex(got["text"]).decode().replace("<|end_of_text|>", "</e!>")  # Granite writes it itself
            assert text == want and got["name"] == name
            compared += 1
        assert compared > 5, name


def test_what_an_assistant_has_to_produce_is_where_generation_would_begin_and_its_turn_ends(probe):
    ends = {
        "</e!>",
        "<|eot_id|>",
        "<|im_end|>",
        "<end_of_turn>",
        "<|end|>",
        "<|end_of_text|>",
        "<|END_OF_TURN_TOKEN|>",
        "[|endofturn|]",
    }
    ends.add("<｜end▁of▁sentence｜>")
    seen = set()
    for name, source in built_in(probe):
        theirs = tokenizer_with(source)

        def render(some, theirs=theirs, **more):
            return theirs.apply_chat_template(some, tokenize=False, date_string="1 Jan 2030", **more)

        for messages in conversations():
            messages = [{**m, "content": f"{m['content']} {i}"} for i, m in enumerate(messages)]
            try:
                got = probe.ask("render", source=source, bos="<s!>", messages=messages, date="1 Jan 2030")
            except ProbeError:
                continue
            text = bytes.fromhex(got["text"])
            assert got["end"] in ends
            for i, (_, _, _, end, begin) in zip(
                [i for i, m in enumerate(messages) if m["role"] == "assistant"],
                [turn for turn in got["turns"] if turn[0] == "assistant"],
                strict=True,
            ):
                want = assistant_range(render, messages, i, text.decode(), sorted(ends))
                if want is None:
                    # The system message moves, or the header opens a thought, so no beginning can be compared.
                    assert name in ("mistral-v3", "mistral-v3-tekken", "deepseek-r1-distill")
                    continue
                (left, right), ended = want
                assert ended and (text[begin:end].decode(), len(text[:begin].decode())) == (text.decode()[left:right], left)
                seen.add(name)
    assert len(seen) > 12


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_say_where_each_message_is(probe, name):
    for messages in conversations():
        try:
            got = probe.ask("render", source=TEMPLATES[name], bos="<s!>", messages=messages)
        except ProbeError:
            assert name in ("llama2", "mistral-v3")
            continue
        text = bytes.fromhex(got["text"])
        if name == "mistral-v3":
            messages = [m for m in messages if m["role"] != "system" or messages[-1]["role"] == "user"]
        assert {turn[0] for turn in got["turns"]} == {m["role"] for m in messages}
        contents = {turn[0]: [] for turn in got["turns"]}
        for role, begin, end, *_ in got["turns"]:
            contents[role].append(text[begin:end].decode().strip())
        for role, found in contents.items():
            assert found == [m["content"].strip() for m in messages if m["role"] == role]


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


@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, WEATHER["function"]]], ids=["no tools", "one", "two"])
def test_tools_and_their_calls_are_written_as_apply_chat_template_writes_them(probe, tools):
    count = 0
    for name, source in built_in(probe):
        if not re.match(r"qwen|llama3\.1", name):
            continue
        for messages in TOOL_CHATS:
            for prompt in (False, True):
                options = {"tools": tools} if tools else {}
                count += compare(probe, source, messages, prompt, date="1 Jan 2030", **options) is not None
    assert count >= 36


def test_a_call_is_what_the_assistant_has_to_produce(probe):
    for name, source in built_in(probe):
        if not re.match(r"qwen|llama3\.1", name):
            continue
        got = probe.ask("render", source=source, bos="", messages=TOOL_CHATS[2], tools=[WEATHER])
        text = bytes.fromhex(got["text"])
        calls = [text[turn[4] : turn[3]].decode() for turn in got["turns"] if turn[0] == "assistant"]
        assert '{"name": "weather"' in calls[0] and calls[0].endswith(got["end"]) and "Three." in calls[1]


@pytest.mark.parametrize(
    "name, messages, options, rule",
    [
        ("chatml", TOOL_CHATS[2], {}, r"does not write tool calls, so they would be lost"),
        ("gemma", [{"role": "user", "content": "x"}], {"tools": [WEATHER]}, r"gemma does not write tools, so they would be lost"),
        ("llama3.1", TOOL_CHATS[3], {}, r"llama3.1 writes one tool call per message; got 2"),
        ("llama3.1", [{"role": "assistant", "content": "x"}], {"tools": [WEATHER]}, r"into the first user message"),
        ("qwen2.5", [{"role": "assistant", "content": "", "tool_calls": [{"name": "x"}]}], {}, r"must have 'name' and 'arguments'"),
        ("qwen2.5", [{"role": "assistant", "content": "", "function_call": {"name": "x"}}], {}, r"must be in 'tool_calls'"),
        ("qwen2.5", [{"role": "user", "content": "", "tool_calls": [CALL]}], {}, r"only the assistant may call tools"),
        ("qwen2.5", [{"role": "ipython", "content": "x"}], {}, r"must be one of \[system, user, assistant, tool\] in qwen2.5"),
        ("gemma", [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}], {}, r"gemma does not support a system message"),
        ("llama2", [{"role": "system", "content": "x"}], {}, r"the conversation has no user message"),
        ("mistral", [{"role": "user", "content": "x"}] * 2, {}, r"must alternate, the user first; message 1 has role 'user'"),
    ],
)  # fmt: skip
def test_what_a_template_would_lose_or_raise_for_is_refused_by_rule(probe, name, messages, options, rule):
    with pytest.raises(ProbeError, match=rule):
        probe.ask("render", name=name, messages=messages, **options)


def test_other_words_about_tools_are_known_for_conversations_without_them(probe):
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    source = LLAMA31.replace("one tool call at a time", "one, please").replace("Environment: ipython", "Environment: python")
    got = probe.ask("render", source=source, bos="", messages=plain)
    assert got["name"] == "llama3.1" and not got["knows_tools"]
    with pytest.raises(
        ProbeError,
        match=r"this variant of llama3.1 supports only conversations without tools; the row has tools.*qlorapp\[hf\]",
    ):
        probe.ask("render", source=source, bos="", messages=plain, tools=[WEATHER])


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("llama3", " | trim", ""),
        ("llama3", "\n\n'+ message", "\n'+ message"),
        ("llama3", "loop.index0 == 0", "loop.index0 == 1"),
        ("llama3.1", "December 2023", "December 2024"),
        ("llama3.1", 'set system_message = ""', 'set system_message = "Be nice"'),
        ("llama3.1", "set tools = none", "set tools = []"),
        ("llama3.1", "{{- bos_token }}", ""),
        ("llama3.1", "{{- system_message }}\n", "{{- system_message }}\nx"),
        ("chatml", "'<|im_end|>' + '\n'", "'<|im_end|>'"),
        ("chatml", "<|im_start|>assistant", "<|im_start|>model"),
        ("chatml", "{% endfor %}", "{% endfor %}\n\n"),
        ("chatml", "message['content']", "message['content'] | upper"),
        ("qwen", "!= 'system'", "== 'system'"),
        ("qwen", "assistant.<|im_end|>\n'", "assistant.' + bos_token + '<|im_end|>\n'"),
        ("chatml_multiline", "= false", "= true"),
        ("chatml", "{% endfor %}", "{% endfor %}{% include 'x' %}"),
        ("chatml", "{% endfor %}", "{% endfor %}{{ ''.__class__ }}"),
        ("chatml", "{% endif %}", ""),
    ],
)
def test_a_template_that_differs_visibly_is_refused_with_a_way_out(probe, name, old, new):
    assert old in TEMPLATES[name]
    with pytest.raises(
        ProbeError,
        match=r"^\[t.jinja\] the chat template must be .* got another one. .* --chat_template NAME or FILE.*qlorapp\[hf\]",
    ):
        probe.ask("render", source=TEMPLATES[name].replace(old, new), bos="", messages=[{"role": "user", "content": "x"}])


def test_every_prefix_and_random_damage_of_a_template_is_refused_or_harmless(probe):
    rng = random.Random(9)
    message = [{"role": "user", "content": "x"}]
    damaged = [LLAMA31[:i] for i in range(0, len(LLAMA31) - 2, 7)]
    for _ in range(300):
        i = rng.randrange(len(QWEN))
        damaged.append(QWEN[:i] + rng.choice("{}%#'\"\\-x") + QWEN[i + rng.randint(0, 2) :])
    for source in damaged:
        try:
            probe.ask("render", source=source, bos="", messages=message)
        except ProbeError as error:
            assert str(error).startswith("[t.jinja] the chat template must be")


@pytest.mark.parametrize(
    "messages, rule",
    [([], "must have a message"), ([{"role": "function", "content": "x"}], "got 'function'"), ([{"role": "asistant", "content": "x"}], "Did you mean 'assistant'")],  # codespell:ignore asistant
)  # fmt: skip
def test_conversations_that_cannot_be_rendered_are_named(probe, messages, rule):
    with pytest.raises(ProbeError, match=rule):
        probe.ask("render", name="llama3", messages=messages)


def test_the_template_is_found_where_transformers_looks(probe, tmp_path):
    message = [{"role": "user", "content": "x"}]
    assert probe.ask("render", folder=str(tmp_path), messages=message) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": LLAMA3}]}))
    assert bytes.fromhex(probe.ask("render", folder=str(tmp_path), messages=message)["text"]).startswith(
        b"<s><|start_header_id|>user"
    )
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert probe.ask("render", folder=str(tmp_path), messages=message)["name"] == "chatml"
    with pytest.raises(ProbeError, match="Did you mean 'llama3'"):
        probe.ask("render", name="lama3", messages=message)
