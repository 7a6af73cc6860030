# SPDX-License-Identifier: Apache-2.0
"""Templates as families publish them, of which TRL installs 35: rendered byte for byte as transformers does, or refused by name."""

import re

import conftest
import pytest
from data_probe import DataProbe, ProbeError
from test_chat_template import CALL, WEATHER, compare, conversations
from trl import chat_template_utils

FILES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(chat_template_utils._CHAT_TEMPLATES_DIR.glob("*.jinja"))
    if not path.stem.endswith("_training")
}
#: Those that C++ renders; transformers renders the others.
KNOWN = {
    "cohere": "cohere", "deepseek_r1_distill": "deepseek-r1-distill", "gemma": "gemma", "gemma3": "gemma3", "llama3": "llama3", "phi3": "phi3",
    "llama3_1": "llama3.1", "llama3_2": "llama3.1", "phi3_5": "phi3", "qwen2_5": "qwen2.5", "qwen3": "qwen3", "qwen3_instruct_2507": "qwen3-instruct",
}  # fmt: skip
REFUSAL = r"^\[t.jinja\] the chat template must be one of .* --chat_template NAME or FILE, or install transformers \(pip install \"qlorapp\[hf\]\"\)"


@pytest.fixture(scope="module")
def probe():
    ours = DataProbe(conftest.BUILD)
    yield ours
    ours.close()


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_template_is_rendered_byte_for_byte(probe, name):
    rendered = 0
    for messages in conversations():
        for prompt in (False, True):
            got = compare(probe, FILES[name], messages, prompt, date="1 Jan 2030")
            if got:
                assert got["name"] == KNOWN[name]
                rendered += 1
    assert rendered > 20


@pytest.mark.parametrize("name", sorted(set(FILES) - set(KNOWN)))
def test_another_template_is_refused_by_name_with_the_way_out(probe, name):
    with pytest.raises(ProbeError, match=REFUSAL):
        probe.ask("render", source=FILES[name], bos="<s!>", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["deepseek_r1_distill"])
def test_tools_of_a_template_that_is_known_without_them_are_left_to_transformers(probe, name):
    called = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for messages, more in (called, {}), (called[:1], {"tools": [WEATHER]}), ([*called, {"role": "tool", "content": "3"}], {}):
        with pytest.raises(
            ProbeError, match="supports only conversations without tools; the row has tools. Install transformers"
        ):
            probe.ask("render", source=FILES[name], bos="<s!>", messages=messages, **more)


THOUGHTS = [
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}, {"role": "user", "content": "r"}]
    for content in ("<think>\nhm\n</think>\n\nyes", "a</think>b</think> c", "</think>", "<think>open", " \n")
]


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "qwen3"])
def test_thoughts_of_earlier_answers_are_removed_as_the_template_removes_them(probe, name):
    for messages in THOUGHTS:
        for end in range(1, 4):
            for prompt in (False, True):
                assert compare(probe, FILES[name], messages[:end], prompt) is not None


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("deepseek_r1_distill", "split('</think>')[-1]", "split('</think>')[0]"),
        ("deepseek_r1_distill", "<think>\\n", "<think>"),
        ("deepseek_r1_distill", "{{bos_token}}", ""),
        ("deepseek_r1_distill", "set ns.system_prompt = message['content']", "set ns.system_prompt = message['content'] + ' '"),
        ("cohere", "false == true", "true == true"),
        ("cohere", "<|USER_TOKEN|>", "<|USER|>"),
        ("cohere", "system_message != false", "system_message == false"),
    ],
)
def test_a_visible_difference_is_refused(probe, name, old, new):
    source = re.sub(re.escape(old), lambda _: new, FILES[name])
    assert source != FILES[name]
    with pytest.raises(ProbeError, match=REFUSAL):
        probe.ask("render", source=source, bos="<s!>", messages=[{"role": "user", "content": "x"}])
