# SPDX-License-Identifier: Apache-2.0
"""Templates as families publish them, of which TRL installs 75: rendered byte for byte as transformers does."""

import conftest
import pytest
from data_probe import DataProbe
from test_chat_template import CALL, TOOL_CHATS, WEATHER, compare, conversations
from trl import chat_template_utils

FILES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted(chat_template_utils._CHAT_TEMPLATES_DIR.glob("*.jinja"))
}


#: Their contents are lists of parts, so few conversations of texts are rendered.
IMAGES = ("idefics", "llava", "smolvlm")


@pytest.fixture(scope="module")
def probe():
    ours = DataProbe(conftest.BUILD)
    yield ours
    ours.close()


@pytest.mark.parametrize("name", FILES)
def test_a_published_template_is_rendered_byte_for_byte(probe, name):
    rendered = 0
    for messages in conversations():
        for prompt in (False, True):
            rendered += compare(probe, FILES[name], messages, prompt, date="1 Jan 2030") is not None
    assert rendered > (3 if name.startswith(IMAGES) else 20)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, WEATHER["function"]]], ids=["no tools", "one", "two"])
def test_tools_and_their_calls_are_rendered_byte_for_byte(probe, name, tools):
    called = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for messages in [*TOOL_CHATS, called, called[:1], [*called, {"role": "tool", "content": "3"}]]:
        for prompt in (False, True):
            compare(probe, FILES[name], messages, prompt, **({"tools": tools} if tools else {}))


THOUGHTS = [
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}, {"role": "user", "content": "r"}]
    for content in ("<think>\nhm\n</think>\n\nyes", "a</think>b</think> c", "</think>", "<think>open", " \n")
]


@pytest.mark.parametrize("name", FILES)
def test_thoughts_are_kept_and_removed_as_the_template_does(probe, name):
    for messages in THOUGHTS:
        for end in range(1, 4):
            for prompt in (False, True):
                compare(probe, FILES[name], messages[:end], prompt)
