# SPDX-License-Identifier: Apache-2.0
"""Serves transformers' tokenizer and chat template to the qlorapp program over a socket.

python text_service.py TOKENIZER_FOLDER MODEL_FOLDER [CHAT_TEMPLATE_FILE], with the socket as standard input. One JSON object per line: a request {"do": …},
a reply {"ok": …} or {"error": "one line"}. Ranges count bytes of the text's UTF-8. It does not load the library.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules would hide others of the same name

import contextlib
import copy
import ctypes
import datetime
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Range = tuple[int, int]


# --- where the assistant speaks, for templates without {% generation %}


def assistant_range(
    render: Callable[..., str], messages: list[dict[str, Any]], i: int, text: str, specials: Iterable[str]
) -> tuple[Range, bool] | None:
    """The range of message `i` in `text`: from the start of generation through the end-of-turn token.

    None unless the conversation up to the message, with the header of an answer, is a prefix of the text.
    @returns the range in characters, and whether a special token ends it.
    """
    head = render(messages[:i], add_generation_prompt=True) if i else None
    if head is None or not text.startswith(head):
        return None
    message, specials = messages[i], list(specials)
    content = message.get("content")
    if message.get("tool_calls"):
        return _range_of_calls(render, messages, i, text, specials, len(head))
    end = len(head)
    for said in [content or ""] if not isinstance(content, list) else [part["text"] for part in content]:
        said = said.rpartition("</think>")[2].strip()  # a template may write thoughts in another way
        if (at := text.find(said, end)) < 0:
            return None
        end = at + len(said)
    rest = text[end:].lstrip()  # some templates keep trailing white space of the content
    special = max((token for token in specials if rest.startswith(token)), key=len, default=None)
    return ((len(head), end if special is None else len(text) - len(rest) + len(special)), special is not None)


def _range_of_calls(
    render: Callable[..., str], messages: list[dict[str, Any]], i: int, text: str, specials: list[str], begin: int
) -> tuple[Range, bool] | None:
    """The range of a message with tool calls. Changing the last call changes the text only up to the end of the turn."""
    other = copy.deepcopy(messages)
    call = other[i]["tool_calls"][-1]
    call = call.get("function") or call
    call["name"] = "\u241e"
    call["arguments"] = "\u241e" if isinstance(call.get("arguments"), str) else {"\u241e": "\u241e"}
    changed = render(other)
    if changed == text:
        return None  # the template does not write tool calls
    same = len(os.path.commonprefix([text[::-1], changed[::-1]]))
    found = [(at, token) for token in specials if (at := text.find(token, max(begin, len(text) - same))) >= 0]
    if not found:
        return ((begin, len(text)), False)
    at, special = min(found, key=lambda hit: (hit[0], -len(hit[1])))
    return ((begin, at + len(special)), True)


OPENING = re.compile(r"(<(?:\w+:)?think>|\[THINK\])\s*$")


def behind_the_opening(
    render: Callable[..., str], messages: list[dict[str, Any]], text: str, specials: Iterable[str]
) -> tuple[str, Range] | None:
    """The conversation as it is served, and where its last answer stands, for a template whose header of an answer opens a thought.

    DeepSeek's distills are asked behind "<think>", which their template writes in no answer: the answer is its thoughts, the end of them,
    and what the template writes. None for other templates.
    """
    message = messages[-1]
    head = render(messages[:-1], add_generation_prompt=True) if len(messages) > 1 else ""
    opening = OPENING.search(head)
    if opening is None or text.startswith(head) or not text.startswith(head[: opening.start()]) or message.get("tool_calls"):
        return None
    begin = opening.group(1)
    end = begin.replace("[", "[/").replace("<", "</")
    content = message.get("content") or ""
    content = content if isinstance(content, str) else "\n".join(texts_of(message))
    said = content.rpartition(end)[2]
    if text.startswith(begin, opening.start()):  # it writes thoughts, with other white space
        answer = text[opening.start() + len(begin) :].lstrip()
        at = answer.find(said.strip())
        answer, rest = answer[: at + len(said.strip())], answer[at + len(said.strip()) :]
    else:
        if end in content:
            answer = content.lstrip().removeprefix(begin).lstrip("\n")
        else:
            thoughts = thoughts_of(message)
            answer = f"{thoughts}\n{end}\n\n{said}" if thoughts else f"{end}\n\n{said}"
        at = text.find(said.strip(), opening.start())
        rest = text[at + len(said.strip()) :]
        if said.strip():
            answer = answer.rstrip()  # the rest begins with what the template keeps
        else:
            rest = rest.lstrip()
    if at < 0:
        return None
    special = max((token for token in specials if rest.lstrip().startswith(token)), key=len, default="")
    answer = head + answer
    stop = len(answer) + (len(rest) - len(rest.lstrip()) + len(special) if special else 0)
    return answer + rest, (len(head), stop)


def next_header(render: Callable[..., str], messages: list[dict[str, Any]], specials: Iterable[str]) -> str:
    """The special token that follows the last answer when the conversation goes on, for a template that writes no end of a turn.

    GLM's models stop by <|user|> or <|observation|>. Empty if there is none.
    """
    mark = "\u241e"
    role = "tool" if messages[-1].get("tool_calls") else "user"
    try:
        text = render([*messages[:-1], {"role": "assistant", "content": mark}, {"role": role, "content": ""}])
    except Exception:  # the template refuses what follows
        return ""
    rest = text.rpartition(mark)[2]
    return max((token for token in specials if rest.startswith(token)), key=len, default="")


NOW = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")


def on_the_day(template: Any, date: str) -> str | None:
    """The template with this day in place of the call's, or the same rows would give other tokens tomorrow. None if it asks for none."""
    if not isinstance(template, str) or not NOW.search(template):
        return None
    try:
        day = datetime.datetime.strptime(date, "%d %b %Y")
    except ValueError:
        return None
    return NOW.sub(lambda call: repr(day.strftime(call.group(2))), template)


def thoughts_of(message: dict[str, Any]) -> str:
    """Of a message that has them under a key; transformers passes each of these names to templates under all of them."""
    keys = ("reasoning_content", "reasoning", "thinking")
    return next((message[key] for key in keys if isinstance(message.get(key), str)), "").strip("\n")


def special_tokens(tokenizer: Any) -> list[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)]


# --- the service


class Service:
    def __init__(self, folder: str, model: str, template_file: str) -> None:
        try:
            import transformers
        except ImportError as error:
            raise ValueError(f'transformers is not installed ({error}): pip install "qlorapp[hf]"') from None
        quiet: Any = transformers.utils.logging  # it has no types
        quiet.set_verbosity_error()
        self.folder = model
        options: dict[str, Any] = {}
        if os.path.realpath(folder) != os.path.realpath(model):  # an adapter's: the model's config chooses the class
            with contextlib.suppress(AttributeError, KeyError, OSError, ValueError):
                options["config"] = transformers.AutoConfig.from_pretrained(
                    model, local_files_only=True, trust_remote_code=False
                )
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
        if template_file:
            with open(template_file, encoding="utf-8") as file:
                self.tokenizer.chat_template = file.read()

    @classmethod
    def over(cls, tokenizer: Any) -> "Service":
        """A service of a tokenizer that is loaded."""
        service = cls.__new__(cls)
        service.tokenizer = tokenizer
        return service

    def open(self) -> dict[str, Any]:
        tokenizer = self.tokenizer
        ends = [
            tokenizer.eos_token_id,
            *(id for name in ("generation_config.json", "config.json") for id in self._ends_in(name)),
        ]
        return {
            "template": str(tokenizer.chat_template) if tokenizer.chat_template else None,
            "eos_id": tokenizer.eos_token_id,
            "eos_ids": list(dict.fromkeys(id for id in ends if id is not None)),
            "id_limit": 1 + max(tokenizer.get_vocab().values()),
        }

    def _ends_in(self, name: str) -> list[int]:
        path = os.path.join(self.folder, name)
        if not os.path.exists(path):
            return []
        with open(path, encoding="utf-8") as file:
            ids = json.load(file).get("eos_token_id")
        return ids if isinstance(ids, list) else [] if ids is None else [ids]

    def encode(self, text: str, special: bool) -> dict[str, Any]:
        if not self.tokenizer.is_fast:
            return {"ids": self.tokenizer(text, add_special_tokens=special)["input_ids"], "ranges": []}
        encoded = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ranges = [tuple(pair) for pair in encoded["offset_mapping"]]
        for i in range(len(ranges) - 1, -1, -1):  # tokens appended to the text have its end as their range
            if ranges[i] != (0, 0) or (i == 0 and text):
                break
            ranges[i] = (len(text), len(text))
        return {"ids": encoded["input_ids"], "ranges": in_bytes(text, ranges)}

    def decode(self, ids: list[int], skip: bool) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip))

    def token(self, token: str) -> int | None:
        found: int | None = self.tokenizer.get_vocab().get(token)
        return found

    def render(
        self,
        messages: list[dict[str, Any]],
        prompt: bool,
        turns: bool,
        tools: list[Any] | None = None,
        served: bool = False,
        **variables: Any,
    ) -> dict[str, Any]:
        """The text, and with `turns` the ranges of the last message if the assistant says it.

        `served`: the last answer stands behind the text that generation begins with. `variables` are the template's.
        """
        if "date" in variables:
            variables["date_string"] = date = variables.pop("date")
            if (template := on_the_day(self.tokenizer.chat_template, date)) is not None:
                variables["chat_template"] = template

        def render(some: list[dict[str, Any]], **more: Any) -> str:
            return str(self.tokenizer.apply_chat_template(some, tools=tools, tokenize=False, **(variables | more)))

        if not writes_lists(render, messages):
            messages = [m | {"content": "\n".join(texts_of(m))} if isinstance(m.get("content"), list) else m for m in messages]
        text = render(messages, add_generation_prompt=prompt)
        answers = (turns or served) and messages[-1].get("role") == "assistant"
        if answers and served and (found := behind_the_opening(render, messages, text, special_tokens(self.tokenizer))):
            return {"text": found[0], "turns": in_bytes(found[0], [found[1]])}
        ranges, ended = self._answer(render, messages, text, tools, variables) if answers else ([], True)
        if served and not ended and ranges[-1][1] == len(text):
            text += next_header(render, messages, special_tokens(self.tokenizer))
            ranges[-1] = (ranges[-1][0], len(text))
        return {"text": text, "turns": in_bytes(text, ranges)}

    def _answer(
        self,
        render: Callable[..., str],
        messages: list[dict[str, Any]],
        text: str,
        tools: list[Any] | None,
        variables: dict[str, Any],
    ) -> tuple[list[Range], bool]:
        """The ranges of the last message, and whether the template writes an end of the turn."""
        template, last = self.tokenizer.chat_template, len(messages) - 1
        if isinstance(template, str) and GENERATION.search(template):
            head = render(messages[:last], add_generation_prompt=True) if last else ""
            begin = len(os.path.commonprefix([head, text]))
            ranges = [(max(left, begin), right) for left, right in self._generated(messages, tools, variables) if right > begin]
            ended = True
        else:
            found = assistant_range(render, messages, last, text, special_tokens(self.tokenizer))
            ranges, ended = ([found[0]], found[1]) if found else ([], True)
        if not ranges:
            raise ValueError(
                f"the assistant's message {last} cannot be located in this chat template's text. Put "
                "{% generation %} … {% endgeneration %} around the assistant's turn in the template."
            )
        return ranges, ended

    def _generated(self, messages: list[dict[str, Any]], tools: list[Any] | None, variables: dict[str, Any]) -> list[Range]:
        """The ranges of the template's {% generation %} blocks."""
        encoded = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True}, **variables,
        )  # fmt: skip
        ranges: list[Range] = []
        before = 0
        for (begin, end), trained in zip(encoded["offset_mapping"], encoded["assistant_masks"], strict=True):
            if trained and before:
                ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
            elif trained:
                ranges.append((begin, end))
            before = trained
        return ranges


def texts_of(message: dict[str, Any]) -> list[str]:
    return [part["text"] for part in message["content"]]


def writes_lists(render: Callable[..., str], messages: list[dict[str, Any]]) -> bool:
    """Whether the template writes the texts of contents that are lists, and not the lists. True if there are none."""
    lists = [message for message in messages if isinstance(message.get("content"), list)]
    if not lists:
        return True
    try:
        text = render(messages)
    except Exception:  # it accepts strings only
        return False
    written = all(said.strip() in text for message in lists for said in texts_of(message))
    return written and "'type': 'text'" not in text and '"type": "text"' not in text


def in_bytes(text: str, ranges: list[Range]) -> list[Range]:
    """Converts ranges of characters to ranges of UTF-8 bytes."""
    if text.isascii():
        return ranges
    at = [0]
    for character in text:
        at.append(at[-1] + len(character.encode()))
    return [(at[begin], at[end]) for begin, end in ranges]


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"[transformers] {text[:500] or type(error).__name__}"


def serve(lines: Iterable[str], answer: Callable[[str], None], folder: str, model: str, template_file: str) -> None:
    service = None
    for line in lines:
        try:
            request = json.loads(line)
            service = service or Service(folder, model, template_file)
            reply = {"ok": getattr(service, request.pop("do"))(**request)}
        except Exception as error:  # the program reports every failure
            reply = {"error": one_line(error)}
        answer(json.dumps(reply, ensure_ascii=False) + "\n")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C; this process ends with its input
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the program while it renders, too
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a library that asks a question finds no answer there
    with channel.makefile("r", encoding="utf-8", newline="\n") as lines:
        serve(lines, lambda text: channel.sendall(text.encode()), *(sys.argv[1:] + [""])[:3])


if __name__ == "__main__":
    main()
