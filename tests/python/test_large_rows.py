# SPDX-License-Identifier: Apache-2.0
"""What a line of 50 MB takes in memory, and what happens if there is not that much."""

import json
import pathlib
import resource
import subprocess
import zlib

import pytest
from conftest import BUILD

MODEL = pathlib.Path(__file__).resolve().parents[2] / "examples" / "data" / "tiny-llama"
MB = 1 << 20
SIZE = 50 * MB
SMALL = '{"text": "a b"}'


def filled(begin: str, each: str, end: str) -> str:
    return begin + each * ((SIZE - len(begin) - len(end)) // len(each.encode()) - 1) + each.rstrip(" ,") + end


#: (line, a part of the error; empty: it is accepted). Ids of a large vocabulary have five digits and a comma; spaces make up for small ones.
LINES = {
    "ids": (lambda: filled('{"input_ids": [', "101,   ", "]}"), ""),
    "ids and labels": (
        lambda: (
            '{"input_ids": ['
            + ("101,   " * (SIZE // 14)).rstrip(" ,")
            + '], "labels": [-100,  '
            + ("101,   " * (SIZE // 14 - 1)).rstrip(" ,")
            + "]}"
        ),
        "",
    ),
    "short ids": (lambda: filled('{"input_ids": [', "1,", "]}"), "at most 8388608 token ids"),
    "ids and a text": (
        lambda: '{"input_ids": [' + "101,   " * (SIZE // 8) + '"a"]}',
        "at most 1048576 values",
    ),
    "numbers": (lambda: filled('{"text": "a", "other": [', "1,", "]}"), "at most 1048576 values"),
    "lists": (lambda: filled('{"text": "a", "other": [', "[],", "]}"), "at most 1048576 values"),
    "objects": (lambda: filled('{"messages": [', '{"role":{}},', "]}"), "at most 1048576 values"),
    "keys": (
        lambda: '{"text": "a"' + "".join(f', "{i}": 1' for i in range(SIZE // 13)) + "}",
        "at most 1024 keys",
    ),
    "a long text that is not used": (lambda: filled('{"text": "a", "other": "', "word ", '"}'), ""),
}


def judge(path: pathlib.Path, address_space: int | None = None) -> tuple[int, dict]:
    """@returns the exit code and the answer of tests/fuzz/judge.cpp."""

    def limit() -> None:
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    done = subprocess.run(
        [BUILD / "tests/fuzz/judge", MODEL],
        input=f"rows\t{path}\n",
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_50_mb_takes_at_most_200_mb(tmp_path, name):
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    make, refusal = LINES[name]
    small.write_text(SMALL + "\n")
    large.write_text(make() + "\n")
    assert abs(large.stat().st_size - SIZE) < SIZE // 4
    code, answer = judge(large)
    assert code == 0
    assert refusal in answer["text"] and bool(refusal) == bool(answer["error"]), answer["text"][:300]
    assert answer["peak"] - judge(small)[1]["peak"] <= 200 << 10


#: Texts of 50 MB, which are tokenized up to max_length.
TEXTS = {
    "words": (lambda: filled('{"text": "', "several words of text, 12 ", '"}'), ""),
    "digits": (lambda: filled('{"text": "', "0123456789", '"}'), ""),
    "no spaces": (lambda: filled('{"text": "', "\u6f22\u5b57\u3002", '"}'), ""),
    "line ends": (lambda: filled('{"text": "a', "\\n", '"}'), "at most 2097152 bytes"),
    "one word": (lambda: filled('{"text": "', "word", '"}'), "at most 2097152 bytes"),
    "special tokens": (lambda: filled('{"text": "', "<|eot_id|>", '"}'), ""),
    "a completion": (lambda: filled('{"prompt": "a", "completion": "', "several words of text, 12 ", '"}'), ""),
    "a message": (
        lambda: filled('{"messages": [{"role": "user", "content": "', "words ", '"}, {"role": "assistant", "content": "b"}]}'),
        "",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_of_50_mb_takes_at_most_500_mb(tmp_path, name):
    path = tmp_path / "rows.jsonl"
    make, refusal = TEXTS[name]
    path.write_text(make() + "\n" + SMALL + "\n" if name in ("words", "digits") else make() + "\n")
    code, answer = judge(path)
    assert code == 0
    assert refusal in answer["text"] and bool(refusal) == bool(answer["error"]), answer["text"][:300]
    assert answer["peak"] <= 500 << 10


def packed(line, rows, level):
    deflate = zlib.compressobj(level, zlib.DEFLATED, 31)
    return b"".join(deflate.compress(line * 100_000) for _ in range(rows // 100_000)) + deflate.flush()


def test_tiny_rows_by_the_million_are_refused_early(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(packed(b'{"text": "a"}\n', 70_000_000, 9))
    assert path.stat().st_size < 3 * MB
    code, answer = judge(path)
    assert code == 0 and answer["error"] == "FormatError" and "200 times its bytes" in answer["text"], answer["text"][:300]
    assert answer["peak"] <= 500 << 10


def test_a_file_of_equal_rows_is_no_bomb(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(packed(b'{"input_ids": [1, 2]}\n', 600_000, 9))
    assert judge(path)[1]["error"] == ""


@pytest.mark.parametrize("name", ["ids and labels", "objects"])
def test_too_little_memory_is_an_error_of_ours_that_names_the_file(tmp_path, name):
    path = tmp_path / "rows.jsonl"
    make, refusal = LINES[name]
    path.write_text(make() + "\n")
    errors = set()
    for address_space in range(20 * MB, 300 * MB, 11 * MB):
        code, answer = judge(path, address_space)
        if not answer and code == 127:
            continue  # the program itself does not fit
        assert code == 0, address_space
        errors.add(answer["error"])
        assert answer["error"] in ("OutOfMemoryError", "FormatError" if refusal else ""), answer["text"][:300]
        assert answer["error"] == "" or str(path) in answer["text"]
    assert "OutOfMemoryError" in errors and len(errors) == 2
