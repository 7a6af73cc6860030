# SPDX-License-Identifier: Apache-2.0
"""examples/data: small, made by its script, and a task that memory of the training rows cannot solve."""

import importlib.util
import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "examples" / "data"


def load_script():
    spec = importlib.util.spec_from_file_location("make_demo_assets", ROOT / "scripts" / "make_demo_assets.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[tuple[str, str]]:
    messages = [json.loads(line)["messages"] for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    assert all([m["role"] for m in row] == ["user", "assistant"] for row in messages)
    return [(row[0]["content"], row[1]["content"]) for row in messages]


def test_the_bundle_is_small():
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 6_000_000


def test_the_script_makes_the_committed_rows_byte_for_byte(tmp_path):
    load_script().write_task(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def asked(question: str) -> tuple[str, str, str]:
    return re.fullmatch(r"(\w+), put the (\w+) near the (\w+)\.", question).groups()


def test_answers_follow_from_the_instructions():
    for question, answer in rows("train.jsonl") + rows("eval.jsonl"):
        name, thing, place = asked(question)
        assert answer == f"Near the {place} {name} has a {thing}."


def test_held_out_instructions_cannot_be_remembered():
    def pairs(name):
        return {asked(question)[1:] for question, _ in rows(name)}

    def words(name):
        return {word for question, _ in rows(name) for word in asked(question)}

    assert pairs("train.jsonl").isdisjoint(pairs("eval.jsonl"))
    assert len(pairs("eval.jsonl")) == len(rows("eval.jsonl")) == 96
    assert words("eval.jsonl") <= words("train.jsonl")  # nothing new but the combination


def test_chat_format_is_that_of_llama_3():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DATA / "tiny-llama")
    messages = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Who?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    hostile = "naïve 東京 \U0001f9ea\t\r\n  I'll pay 12345€ — ok?"
    assert tokenizer.decode(tokenizer(hostile)["input_ids"], skip_special_tokens=True) == hostile


def test_the_base_model_goes_on_with_a_story_and_gives_no_answer():
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / "tiny-llama", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DATA / "tiny-llama")

    def continued(tokens: list[int]) -> str:
        out = model.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        return tokenizer.decode(out[0, len(tokens) :], skip_special_tokens=True).strip()

    known = {word for name in ("train.jsonl", "eval.jsonl") for question, _ in rows(name) for word in asked(question)}
    story = continued(tokenizer("Mia lives near the")["input_ids"])
    assert story.split(" ")[0].rstrip(".,") in known  # a place, not noise
    for question, answer in rows("eval.jsonl")[:8]:
        chat = [{"role": "user", "content": question}]
        assert continued(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) != answer
