# SPDX-License-Identifier: Apache-2.0
"""examples/data: small, made by its script, and a task that memory of the training questions cannot solve."""

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


def test_held_out_people_never_occur_in_the_training_questions():
    def people(name):
        return {re.match(r"(\w+) ", answer).group(1) for _, answer in rows(name)}

    assert people("train.jsonl").isdisjoint(people("eval.jsonl"))
    train_text = " ".join(" ".join(row) for row in rows("train.jsonl"))
    assert not any(re.search(rf"\b{name}\b", train_text) for name in people("eval.jsonl"))
    assert len(rows("eval.jsonl")) == 96


def test_answers_are_facts_of_the_stories_that_the_base_model_read():
    import random

    script = load_script()
    rng, everybody = random.Random(0), script.village()
    told = {sentence for _ in range(3000) for sentence in re.findall(r"[^.]+\.", script.story(rng, everybody))}
    told = {sentence.strip() for sentence in told}
    assert {answer for _, answer in rows("train.jsonl") + rows("eval.jsonl")} <= told


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


def test_the_base_model_knows_what_its_stories_told():
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / "tiny-llama", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(DATA / "tiny-llama")
    known, facts = 0, [fact for person in load_script().village() for fact in person.facts()]
    for fact in facts:
        beginning, last = fact.rstrip(".").rsplit(" ", 1)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokenizer(beginning)["input_ids"]])).logits
        known += tokenizer.decode(logits[0, -1].argmax()).strip() == last
    assert known >= 0.99 * len(facts)
