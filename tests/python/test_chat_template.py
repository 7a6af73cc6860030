# SPDX-License-Identifier: Apache-2.0
"""The built-in chat templates write what transformers' apply_chat_template writes, and nothing else passes for one of them."""

import json
import random

import conftest
import pytest
from data_probe import DataProbe, ProbeError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful "
    "assistant.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MULTILINE = """{%- if not add_generation_prompt is defined %}
    {%- set add_generation_prompt = false %}
{%- endif %}
{# ChatML in the spelling of a careful author #}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {{- message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
LLAMA31 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    DATE
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message goes into the header. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "Functions:" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("no user message") }}
{%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CONSTANT_DATE = '{%- set date_string = "26 Jul 2024" %}'
TODAY = (
    '{%- if strftime_now is defined %}\n{%- set date_string = strftime_now("%d %b %Y") %}\n{%- else %}\n'
    + CONSTANT_DATE
    + "\n{%- endif %}"
)
LLAMA32 = LLAMA31.replace("DATE\n", TODAY + "\n", 1)
LLAMA31 = LLAMA31.replace("DATE\n", CONSTANT_DATE + "\n", 1)
SMOLLM = QWEN.replace("You are a helpful assistant.", 'You say "hi\\\\" {x}.')
TEMPLATES = {
    "llama3": LLAMA3,
    "llama3.1": LLAMA31,
    "llama3.2": LLAMA32,
    "chatml": CHATML,
    "qwen": QWEN,
    "chatml_multiline": CHATML_MULTILINE,
    "smollm": SMOLLM,
}

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


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_apply_chat_template(probe, name):
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s!>", chat_template=TEMPLATES[name])
    for messages in conversations():
        for prompt in (False, True):
            dates = [{"date": "1 Jan 2030"}] if name == "llama3.2" else [{}, {"date": "1 Jan 2030"}]
            for date in dates:
                got = probe.ask("render", source=TEMPLATES[name], bos="<s!>", messages=messages, prompt=prompt, **date)
                keywords = {"date_string": date["date"]} if date else {}
                want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **keywords)
                assert bytes.fromhex(got["text"]).decode() == want


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_say_where_each_message_is(probe, name):
    for messages in conversations():
        got = probe.ask("render", source=TEMPLATES[name], bos="<s!>", messages=messages)
        text = bytes.fromhex(got["text"])
        assert len(got["turns"]) == len(messages)
        for message, (role, begin, end, turn_end) in zip(messages, got["turns"], strict=True):
            content = message["content"] if got["name"] == "chatml" else message["content"].strip()
            assert role == message["role"] and text[begin:end].decode() == content
            assert text[end:turn_end] == (b"<|im_end|>" if got["name"] == "chatml" else b"<|eot_id|>")


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
        ProbeError, match=r"^\[t.jinja\] the chat template must be .* choose one by name: \[llama3, llama3.1, chatml\]"
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
    [([], "must have a message"), ([{"role": "tool", "content": "x"}], "got 'tool'"), ([{"role": "asistant", "content": "x"}], "Did you mean 'assistant'")],
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
