# SPDX-License-Identifier: Apache-2.0
"""Talks to tests/data/data_probe: the C++ tokenizer, templates and rows behind JSON lines."""

import json
import pathlib
import subprocess


class ProbeError(Exception):
    """What the C++ side threw."""


class DataProbe:
    def __init__(self, build_dir: pathlib.Path):
        self.process = subprocess.Popen(
            [build_dir / "tests" / "data" / "data_probe"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, command: str, **arguments):
        self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        reply = json.loads(self.process.stdout.readline())
        if "error" in reply:
            raise ProbeError(reply["error"])
        return reply["ok"]

    def encode(self, texts, special=True):
        return self.ask("encode", texts=[t.encode().hex() for t in texts], special=special)

    def decode(self, ids, skip=False):
        return [bytes.fromhex(h).decode() for h in self.ask("decode", ids=ids, skip=skip)]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
