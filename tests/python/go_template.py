# SPDX-License-Identifier: Apache-2.0
"""Go's text/template, as far as our Modelfiles use it, over the variables that Ollama sets."""

import json
import re

TOKEN = re.compile(r"\{\{(-?)\s*((?:\"(?:\\.|[^\"\\])*\"|[^}])*?)\s*(-?)\}\}", re.S)


def _parts(source):
    """("text", …) and ("action", …); "{{-" takes blanks away in front of it."""
    at, parts = 0, []
    for match in TOKEN.finditer(source):
        text = source[at : match.start()]
        parts += [("text", text.rstrip() if match[1] else text), ("action", match[2])]
        assert not match[3], "no action of ours ends with -}}"
        at = match.end()
    return [part for part in [*parts, ("text", source[at:])] if part[1]]


def _tree(parts, ends=()):
    """Lists of nodes up to an action of `ends`, and that action."""
    nodes = []
    while parts:
        kind, value = parts.pop(0)
        word = value.split(" ")[0]
        if kind == "action" and word in ends:
            return nodes, value
        if kind == "text":
            nodes.append(("text", value))
        elif word == "range":
            nodes.append(("range", *_tree(parts, ["end"])))
        elif word == "if":
            branches, condition = [], value[3:]
            while condition is not None:
                body, end = _tree(parts, ["else", "end"])
                branches.append((condition, body))
                condition = None if end == "end" else end[8:] if end.startswith("else if ") else "true"
            nodes.append(("if", branches))
        else:
            nodes.append(("action", value))
    assert not ends, f"{ends} is missing"
    return nodes, None


def render(source, messages):
    """Ollama's text for messages of "role" and "content"."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    variables, out = {}, []

    def value(expression, index):
        message = messages[index] if index is not None else {}
        known = {
            "true": True,
            "false": False,
            ".System": system,
            "$.System": system,
            ".Content": message.get("content"),
            **variables,
        }
        if expression.startswith('"'):
            return json.loads(expression)
        if expression.startswith("eq .Role "):
            return message["role"] == json.loads(expression[9:])
        if expression.startswith("and "):
            return all(value(part, index) for part in expression[4:].split(" "))
        if expression == "eq (len (slice $.Messages $i)) 1":
            return index == len(messages) - 1
        return known[expression]

    def run(nodes, index):
        for kind, what, *_ in nodes:
            if kind == "text":
                out.append(what)
            elif kind == "range":
                for i in range(len(messages)):
                    run(what, i)
            elif kind == "if":
                run(next((body for condition, body in what if value(condition, index)), []), index)
            elif match := re.fullmatch(r"(\$\w+) :?= (.*)", what):
                variables[match[1]] = value(match[2], index)
            else:
                out.append(value(what, index))

    run(_tree(_parts(source))[0], None)
    return "".join(out)
