# SPDX-License-Identifier: Apache-2.0
"""Answers to many prompts: qlorapp generate over files and pipes, and qlorapp.generate."""

import gzip
import json
import signal
import subprocess
import time

import peer
import pytest
import qlorapp
import torch
import transformers
from conftest import BUILD, ROOT

TINY = ROOT / "examples" / "data" / "tiny-llama"
PLAIN = ("--model", TINY, "--dtype", "float32", "--load_in_4bit", "false", "--max_new_tokens", 12)
TEXTS = ["Hello!", "Where is the kite?", "Mia, put the kite near the mill.", "Hello!"]


def run(*options, text=None, **more):
    command = [BUILD / "qlorapp", "generate", *map(str, PLAIN), *map(str, options)]
    stdin = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    return subprocess.run(command, **stdin, capture_output=True, text=True, check=False, timeout=120, **more)


def lines(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def user(text):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def answer(tokenizer):
    """transformers' greedy answer to ids."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]

    def of(prompt, **options):
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        given = {"max_new_tokens": 12, **options}
        out = model.generate(ids, do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.eos_token_id, **given)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return of


def test_a_line_of_a_pipe_is_a_user_s_message(answer):
    found = lines(run(text="\n\n".join(TEXTS) + "\n"))
    assert [line["prompt"] for line in found] == TEXTS
    assert [line["text"] for line in found] == [answer(user(text)) for text in TEXTS]
    assert all(line["tokens"] <= 12 and line["finish_reason"] in ("stop", "length") for line in found)
    raw = lines(run("--raw", text="Hello!"))
    assert raw[0]["text"] == answer("Hello!")
    told = lines(run("--system", "Be brief.", "--max_rows", 1, text="Hello!"))
    assert told[0]["text"] == answer([{"role": "system", "content": "Be brief."}, *user("Hello!")])


ROWS = {
    "messages with an answer": ({"messages": [*user("Hello!"), {"role": "assistant", "content": "Hi"}]}, user("Hello!"), "Hi"),
    "messages": ({"messages": user("Hello!")}, user("Hello!"), None),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Hello!"}, {"from": "gpt", "value": "Hi"}], "system": "Be brief."},
        [{"role": "system", "content": "Be brief."}, *user("Hello!")],
        "Hi",
    ),
    "prompt and completion": ({"prompt": "Mia has", "completion": " a kite"}, "Mia has", " a kite"),
    "prompt messages and completion": (
        {"prompt": user("Hello!"), "completion": [{"role": "assistant", "content": "Hi"}]}, user("Hello!"), "Hi",
    ),
    "a prompt alone": ({"prompt": "Hello!"}, user("Hello!"), None),
    "a prompt and a system message": (
        {"prompt": "Hello!", "system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *user("Hello!")], None,
    ),
    "prompt messages": ({"prompt": user("Hello!")}, user("Hello!"), None),
    "instruction": ({"instruction": "Sum up.", "input": "A kite.", "output": "A"}, user("Sum up.\nA kite."), "A"),
    "instruction without an answer": ({"instruction": "Sum up.", "input": "A kite."}, user("Sum up.\nA kite."), None),
    "question": ({"question": "Who?"}, user("Who?"), None),
    "text": ({"text": "Mia has"}, "Mia has", None),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_shape_are_answered(name, answer, tmp_path):
    row, prompt, expected = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = lines(run("--data", tmp_path / "rows.jsonl"))
    assert found["text"] == answer(prompt)
    assert found.get("answer") == expected and found.get("exact_match") == (None if expected is None else False)


def test_token_ids_packed_files_and_several_files(answer, tokenizer, tmp_path):
    ids = tokenizer("Mia has")["input_ids"]
    row = {"input_ids": [*ids, 9, 9], "labels": [-100] * len(ids) + [9, 9]}
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as out:
        out.write(json.dumps(row) + "\n")
    (tmp_path / "b.csv").write_text('prompt,completion\nMia has,"' + answer("Mia has") + '"\n')
    found = lines(run("--data", f"{tmp_path / 'a.jsonl.gz'},{tmp_path / 'b.csv'}"))
    assert [line["text"] for line in found] == [answer("Mia has")] * 2
    assert found[1]["exact_match"] is True


def test_an_output_file_is_new_and_has_whole_lines_in_order(tmp_path):
    out = tmp_path / "answers.jsonl"
    text = "\n".join(f"{name}, where is the kite?" * (1 + i % 4) for i, name in enumerate(["Mia", "Olga", "Max"] * 7))
    done = run("--output_file", out, "--max_rows", 4, text=text)
    assert done.returncode == 0 and not done.stdout and "21 of 21 prompts" in done.stderr and "tokens/s" in done.stderr
    found = out.read_text()
    assert [json.loads(line)["prompt"] for line in found.splitlines()] == text.splitlines()
    again = run("--output_file", out, text="Hello!")
    assert again.returncode == 2 and "exists already" in again.stderr and out.read_text() == found
    failed = run("--output_file", tmp_path / "none.jsonl", "--cache_memory", "1KB", text="Hello!")
    assert failed.returncode != 0 and "give the cache more" in failed.stderr and not (tmp_path / "none.jsonl").exists()


def test_ctrl_c_keeps_whole_lines(tmp_path):
    out = tmp_path / "answers.jsonl"
    (tmp_path / "prompts.txt").write_text("Hello!\n" * 5000)
    command = [BUILD / "qlorapp", "generate", *map(str, PLAIN[:-1]), "100", "--min_new_tokens", "100", "--max_rows", "4"]
    process = subprocess.Popen(
        [*map(str, command), "--data", tmp_path / "prompts.txt", "--output_file", out], stderr=subprocess.PIPE
    )
    end = time.monotonic() + 60
    while (not out.exists() or out.stat().st_size == 0) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130 and "stopped: " in said and "of 5000 prompts" in said
    assert out.read_bytes().endswith(b"\n")
    assert all(json.loads(line)["tokens"] == 100 for line in out.read_text().splitlines())


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ((), None, "the file must hold a prompt"),
        (("--prompt", "x", "--data", "y"), None, "got both"),
        (("--prompt", "x", "--output_file", "y"), None, "[output_file] is for the prompts of --data"),
        (("--data", "nowhere.jsonl"), None, "nowhere.jsonl"),
        ((), '{"prompt": "a"}\n{"other": "b"}\n', "/dev/stdin:2"),
        ((), '{"messages": [{"role": "assistant", "content": "b"}]}\n', "a message before the answer"),
        ((), "x " * 3000, "fewer tokens than the model has positions"),
        (("--max_rows", 0), "x", "max_rows"),
        (("--cache_memory", "much"), "x", "cache_memory"),
        (("--system", "s", "--raw"), "x", "--system needs"),
    ],
)
def test_bad_input(options, text, message):
    done = run(*options, text=text)
    assert done.returncode in (1, 2) and message in done.stderr and not done.stdout, done.stderr


# --- from Python


@pytest.fixture(scope="module")
def model():
    return qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def test_python_answers_texts_conversations_and_ids(model, tokenizer, answer):
    found = qlorapp.generate(model, TEXTS, tokenizer, max_new_tokens=12)
    assert [one.text for one in found] == [answer(user(text)) for text in TEXTS]
    assert found.seconds > 0 and found.tokens_per_second > 0
    (one,) = qlorapp.generate(model, user("Hello!"), tokenizer, max_new_tokens=12)
    assert one == found[0] and one.finish_reason in ("stop", "length") and one.prompt_tokens > 0
    assert qlorapp.generate(model, ["Mia has"], max_new_tokens=12, raw=True)[0].text == answer("Mia has")
    ids = tokenizer("Mia has")["input_ids"]
    assert qlorapp.generate(model, ids, tokenizer, max_new_tokens=12)[0].text == answer("Mia has")
    told = qlorapp.generate(model, "Hello!", tokenizer, system="Be brief.", max_new_tokens=12)[0].text
    assert told == answer([{"role": "system", "content": "Be brief."}, *user("Hello!")])


def test_python_uses_the_active_adapter_and_transformers_where_c_does_not_compute(tokenizer):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    adapted = peer.add_adapters(model, r=4, lora_alpha=64)
    with_adapter = qlorapp.generate(adapted, TEXTS, tokenizer, max_new_tokens=12)
    engine = adapted.get_base_model().forward.engine
    with adapted.disable_adapter():
        without = qlorapp.generate(adapted, TEXTS, tokenizer, max_new_tokens=12)
    assert with_adapter != without
    engine.enabled = False
    assert qlorapp.generate(adapted, TEXTS, tokenizer, max_new_tokens=12) == with_adapter


def test_python_samples_by_seed_and_place(model, tokenizer):
    def draw(prompts, seed):
        return qlorapp.generate(model, prompts, tokenizer, max_new_tokens=12, temperature=1.5, seed=seed)

    first = draw(TEXTS, 1)
    assert first == draw(TEXTS, 1) and first != draw(TEXTS, 2) and first[0] != first[3]
    assert draw(TEXTS[:2], 1) == first[:2]


def test_python_names_the_option(model, tokenizer):
    with pytest.raises(ValueError, match="system needs"):
        qlorapp.generate(model, "x", tokenizer, raw=True, system="s")
    with pytest.raises(ValueError, match="top_p must be in"):
        qlorapp.generate(model, "x", tokenizer, top_p=2.0)
    with pytest.raises(ValueError, match="of keys and values"):
        qlorapp.generate(model, "x", tokenizer, cache_memory=10)
