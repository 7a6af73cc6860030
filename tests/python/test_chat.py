# SPDX-License-Identifier: Apache-2.0
"""The conversation in the terminal, through a pipe and on a terminal of the test's own."""

import os
import pty
import select
import signal
import subprocess
import time

import peer
import pytest
import torch
import transformers
from conftest import BUILD, ROOT

TINY = ROOT / "examples" / "data" / "tiny-llama"
PLAIN = ("--model", TINY, "--dtype", "float32", "--load_in_4bit", "false", "--max_new_tokens", 12)


def chat(text, *options, **more):
    command = [BUILD / "qlorapp", "chat", *map(str, PLAIN), *map(str, options)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120, **more)


def answer_of(messages, adapter=None):
    """transformers' greedy answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    if adapter is not None:
        model.load_adapter(str(adapter))
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def adapter_at(folder):
    base = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    peer.add_adapters(base, r=4, lora_alpha=64).save_pretrained(folder)
    return folder


def test_a_conversation_is_that_of_the_template(tmp_path):
    first = [{"role": "user", "content": "Hello!"}]
    one = answer_of(first)
    second = [*first, {"role": "assistant", "content": one}, {"role": "user", "content": "Where is the kite?"}]
    two = answer_of(second)
    done = chat("Hello!\n\nWhere is the kite?\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{one}\n{two}\n"
    again = chat("Hello!\n/regenerate\n/reset\nHello!\n/quit\nnot read\n")
    assert again.stdout == f"{one}\n{one}\n{one}\n" and again.stderr.count("answers are greedy") == 1
    told = chat("Hello!\n", "--system", "Be brief.").stdout
    assert told == answer_of([{"role": "system", "content": "Be brief."}, *first]) + "\n"
    assert chat("/system Be brief.\nHello!\n").stdout == told


def test_adapters_are_chosen_by_name(tmp_path):
    adapters = [adapter_at(tmp_path / name) for name in ("one", "two")]
    asked = [{"role": "user", "content": "Hello!"}]
    base, with_one = answer_of(asked), answer_of(asked, adapters[0])
    text = "Hello!\n/adapter none\n/reset\nHello!\n/adapter two\n/reset\nHello!\n/adapter three\n"
    done = chat(text, "--adapter", f"{adapters[0]},{adapters[1]}")
    lines = done.stdout.splitlines()
    assert lines[0] == with_one and lines[1] == "adapters: [one, two]; answers: the base" and lines[2] == base
    assert lines[3] == "adapters: [one, two]; answers: two" and lines[-1] == "there is no adapter 'three'"
    again = chat("Hello!\n/adapter none\n/regenerate\n", "--adapter", adapters[0])
    assert again.stdout.splitlines()[::2] == [with_one, base] and "greedy" not in again.stderr


def test_adapters_whose_folders_have_one_name_are_told_apart(tmp_path):
    adapters = [adapter_at(tmp_path / run / "checkpoint-5") for run in ("a", "b.c")]
    text = "Hello!\n/adapter b_c-checkpoint-5\n/reset\nHello!\n"
    first, chosen, second = chat(text, "--adapter", f"{adapters[0]},{adapters[1]}").stdout.splitlines()
    assert chosen == "adapters: [b_c-checkpoint-5, checkpoint-5]; answers: b_c-checkpoint-5"
    asked = [{"role": "user", "content": "Hello!"}]
    assert (first, second) == tuple(answer_of(asked, adapter) for adapter in adapters)
    assert "answers: default" in chat("/adapter\n", "--adapter", ".", cwd=adapters[0]).stdout


def test_a_message_that_cannot_be_asked_leaves_the_session(tmp_path):
    """Bytes that are no text, a message that the template refuses, lines that end as on Windows."""
    one = answer_of([{"role": "user", "content": "Hello!"}])
    command = [str(part) for part in (BUILD / "qlorapp", "chat", *PLAIN)]
    told = b"a\xff\nHello!\r\n/system Be\xffbrief.\n/reset\r\nHello!\r\n"
    done = subprocess.run(command, input=told, capture_output=True, check=False, timeout=120)
    first, *rest = done.stdout.decode().splitlines()
    assert done.returncode == 0 and first.startswith("not answered: ") and "UTF-8" in first
    assert rest == [one, "not taken: byte 2 of the message is no UTF-8", one]
    template = tmp_path / "users_only.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    lines = chat("/system Be brief.\nHello!\n/system\nHello!\n", "--chat_template", template).stdout.splitlines()
    assert len(lines) == 2 and lines[0].startswith("not answered: ") and "no system" in lines[0] and lines[1]


def test_samples_differ_by_seed_and_repeat():
    options = ("--temperature", 1.5, "--seed", 3)
    one, two = (chat("Hello!\n/regenerate\n", *options).stdout for _ in range(2))
    assert one == two and len(set(one.splitlines())) > 1
    assert "greedy" not in chat("Hello!\n/regenerate\n", *options).stderr


def test_ctrl_c_stops_the_answer_and_the_session_stays():
    host, terminal = pty.openpty()
    command = [BUILD / "qlorapp", "chat", *map(str, PLAIN[:-1]), "400", "--min_new_tokens", "400"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    seen = b""

    def until(text, seconds=60):
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen and select.select([host], [], [], max(0, end - time.monotonic()))[0]:
            seen += os.read(host, 4096)
        assert text in seen, seen
        passed, seen = seen[: seen.index(text)], seen[seen.index(text) + len(text) :]
        return passed

    until(b"> ")
    for _ in range(10):  # a busy machine may end the answer before it delivers the signal
        os.write(host, b"Hello!\n")
        until(b"Hello!\r\n")
        while len(seen) < 4:
            seen += os.read(host, 4096)
        process.send_signal(signal.SIGINT)
        stopped = b", stopped" in until(b"]\r\n")
        until(b"> ")
        if stopped:
            break
        os.write(host, b"/reset\n")
        until(b"/reset\r\n")
        until(b"> ")
    assert stopped
    process.send_signal(signal.SIGINT)  # at an empty line
    until(b"> ")
    for _ in range(2):  # nor does a second one end the session
        process.send_signal(signal.SIGINT)
    until(b"> ")
    os.write(host, b"/quit\n")
    assert process.wait(timeout=30) == 0
    os.close(host)


def test_a_stop_string_ends_the_answer_and_stays_in_the_conversation():
    whole = answer_of([{"role": "user", "content": "Hello!"}])
    wanted = whole[4:7]
    first, second = chat("Hello!\nWhere is the kite?\n", "--stop_strings", wanted).stdout.splitlines()
    assert whole.startswith(first) and wanted in first and len(first) < len(whole)
    turns = [("user", "Hello!"), ("assistant", first), ("user", "Where is the kite?")]
    assert answer_of([{"role": role, "content": text} for role, text in turns]).startswith(second)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seed", "-1"), "must be an integer >= 0"),
        (("--adapter", "nowhere"), "nowhere"),
        (("--top_p", "2"), "top_p must be in"),
        (("--stop_strings", "a", "--stop_strings", ""), "[stop_strings] a stop string must have a character"),
    ],
)
def test_bad_input(options, message):
    done = chat("Hello!\n", *options)
    assert done.returncode in (1, 2) and message in done.stderr and not done.stdout


def test_a_conversation_that_the_model_cannot_hold_is_said():
    hello = answer_of([{"role": "user", "content": "Hello!"}])
    done = chat("x " * 3000 + "\nHello!\n" + "x " * 240 + "\n")
    assert done.returncode == 0
    alone, answer, together = done.stdout.splitlines()
    assert alone.startswith("the message alone has ") and alone.endswith(" tokens, and the model 512 positions: shorten it")
    assert answer == hello
    assert together.startswith("the conversation has ") and together.endswith("/reset begins a new one")
    system = chat("x " * 3000 + "\n", "--system", "Be brief.").stdout
    assert system.startswith("the message alone has ")


def test_an_answer_that_the_positions_cut_is_said():
    done = chat("x " * 249 + "\n", "--min_new_tokens", 12)
    assert done.stdout and done.stderr.count("the answer was cut: the model's 512 positions are full") == 1
    assert "cut" not in chat("Hello!\n").stderr


def test_a_stop_string_that_never_matched_is_named():
    done = chat("Hello!\nWhere is the kite?\n", "--stop_strings", "never")
    assert "stop string 'never' never matched in 2 answers" in done.stderr


def test_messages_may_begin_with_a_slash():
    done = chat("//etc/hosts\n/etc/hosts\n")
    first, told, *help_text = done.stdout.splitlines()
    assert first == answer_of([{"role": "user", "content": "/etc/hosts"}])
    assert told == "there is no word '/etc/hosts':" and any(line.startswith("//TEXT") for line in help_text)
    assert "there is no word" not in chat("/help\n").stdout


@pytest.mark.parametrize("size", [4094, 4095, 9000])
def test_a_line_that_a_terminal_cuts_is_not_answered(size):
    host, terminal = pty.openpty()
    options = ("--device", "cpu")
    command = [BUILD / "qlorapp", "chat", *map(str, PLAIN), *options]
    process = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    os.close(terminal)
    text = b"x " * (size // 2) + b"x" * (size % 2) + b"\n"
    for begin in range(0, len(text), 1000):
        os.write(host, text[begin : begin + 1000])
        time.sleep(0.05)
        while select.select([host], [], [], 0)[0]:  # its echo
            os.read(host, 4096)
    os.write(host, b"\n/quit\n")
    out, _ = process.communicate(timeout=60)
    os.close(host)
    told = out.decode().splitlines()[0]
    assert told.startswith(
        "not taken: a terminal passes on the first 4095 bytes" if size > 4094 else "the message alone has"
    ), told
