# SPDX-License-Identifier: Apache-2.0
"""Serves transformers' tokenizer to the qlorapp program over a socket.

python text_service.py TOKENIZER_FOLDER MODEL_FOLDER, with the socket as standard input. One JSON object per line: a request {"do": …},
a reply {"ok": …} or {"error": "one line"}. Ranges count bytes of the text's UTF-8. It does not load the library.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules would hide others of the same name

import contextlib
import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

Range = tuple[int, int]


def special_tokens(tokenizer: Any) -> list[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    tokens = [*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)]
    return list(dict.fromkeys(tokens))


class Service:
    def __init__(self, folder: str, model: str) -> None:
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
            "special_tokens": special_tokens(tokenizer),
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


def serve(lines: Iterable[str], answer: Callable[[str], None], folder: str, model: str) -> None:
    service = None
    for line in lines:
        try:
            request = json.loads(line)
            service = service or Service(folder, model)
            reply = {"ok": getattr(service, request.pop("do"))(**request)}
        except Exception as error:  # the program reports every failure
            reply = {"error": one_line(error)}
        answer(json.dumps(reply, ensure_ascii=False) + "\n")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program handles Ctrl-C; this process ends with its input
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the program while it renders, too
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a library that asks a question finds no answer there
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers need none, and it takes most of the time
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # its absence is not worth a line
    with channel.makefile("r", encoding="utf-8", newline="\n") as lines:
        serve(lines, lambda text: channel.sendall(text.encode()), *sys.argv[1:3])


if __name__ == "__main__":
    main()
