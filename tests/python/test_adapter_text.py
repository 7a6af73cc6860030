# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and chat template of training belong to the result: adapters, checkpoints and merged folders hold them, and the commands use them."""

import json
import os
import re
import shutil
import subprocess
import sys

import conftest
import pytest
import transformers
from tiny_run import ROWS, qlorapp, write_model, write_rows

CHAT = [
    {"messages": [{"role": "user", "content": f"{i} and one?"}, {"role": "assistant", "content": f"{i + 1}."}]}
    for i in range(4)
]
TRAIN = [
    "--max_steps", "2", "--save_steps", "1", "--logging_steps", "1", "--use_cpu", "--learning_rate", "5e-2",
    "--target_modules", "all-linear", "--per_device_train_batch_size", "2",
]  # fmt: skip
SHOUT = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model without a template, of one whose tokenizer_config.json names a list of them, and rows."""
    folder = tmp_path_factory.mktemp("adapter_text")
    plain = write_model(folder / "plain")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    (plain / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copytree(plain, folder / "listed")
    zephyr = "{% for message in messages %}{{ '<|' + message.role + '|>' }}{% endfor %}"
    config["chat_template"] = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": zephyr}]
    (folder / "listed" / "tokenizer_config.json").write_text(json.dumps(config))
    write_rows(folder / "chat.jsonl", CHAT)
    write_rows(folder / "raw.jsonl", ROWS)
    (folder / "shout.jinja").write_text(SHOUT)
    return folder


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train(root, out, *words, model="plain", data="chat.jsonl", run=qlorapp):
    result = run("train", "--model", root / model, "--data", root / data, "--output", out, *TRAIN, *words)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def chosen(root):
    train(root, root / "chosen", "--chat_template", "chatml")
    return root / "chosen"


def said(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


def through_python(*words):
    return subprocess.run(
        [*conftest.MODULE, *map(str, words)], capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": str(conftest.BUILD / "python"), "OMP_NUM_THREADS": "2"},
    )  # fmt: skip


def generate(root, *words, model="plain", run=qlorapp):
    return said(run("generate", "--model", root / model, "--prompt", "2 and one?", "--max_new_tokens", "6", *words))


def test_a_chosen_template_is_in_the_adapter_its_checkpoints_and_the_merged_folder(root, chosen, tmp_path):
    said(qlorapp("merge", "--model", root / "plain", "--adapter", chosen, "--output", tmp_path / "merged"))
    wanted = transformers.AutoTokenizer.from_pretrained(root / "plain")
    wanted.chat_template = CHATML
    for folder in (chosen, chosen / "checkpoint-1", tmp_path / "merged"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for prompt in (True, False):
            render = {"tokenize": True, "return_dict": False, "add_generation_prompt": prompt}
            assert tokenizer.apply_chat_template(CHAT[1]["messages"], **render) == wanted.apply_chat_template(
                CHAT[1]["messages"], **render
            )
    assert (chosen / "tokenizer.json").read_bytes() == (root / "plain" / "tokenizer.json").read_bytes()
    manifest = json.loads((chosen / "checkpoint-1" / "MANIFEST.json").read_text())
    assert {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"} <= set(manifest["files"])


def test_generate_and_eval_use_the_adapter_s_template(root, chosen, tmp_path):
    with_option = generate(root, "--adapter", chosen, "--chat_template", "chatml")
    assert generate(root, "--adapter", chosen) == with_option
    assert generate(root, "--adapter", chosen / "checkpoint-2") == with_option
    assert generate(root, "--adapter", chosen, "--raw") != with_option  # so that the first line means something
    losses = [
        re.search(r"^eval_loss (\S+)", said(qlorapp("eval", "--model", root / "plain", "--adapter", chosen, "--data", root / "chat.jsonl", *more)), re.M).group(1)
        for more in ([], ["--chat_template", "chatml"])
    ]  # fmt: skip
    assert losses[0] == losses[1]
    said(qlorapp("merge", "--model", root / "plain", "--adapter", chosen, "--output", tmp_path / "merged"))
    merged = said(qlorapp("eval", "--model", tmp_path / "merged", "--data", root / "chat.jsonl", "--load_in_4bit", "false"))
    assert "eval_loss" in merged


def test_the_first_adapter_s_text_goes_on_to_the_next(root, chosen, tmp_path):
    train(root, tmp_path / "next", "--init_adapter", chosen)
    assert (tmp_path / "next" / "chat_template.jinja").read_bytes() == (chosen / "chat_template.jinja").read_bytes()


def test_an_adapter_whose_folder_has_a_template_alone_uses_it(root, chosen, tmp_path):
    shutil.copytree(chosen, tmp_path / "a", ignore=shutil.ignore_patterns("tokenizer*", "checkpoint-*"))
    assert generate(root, "--adapter", tmp_path / "a") == generate(root, "--adapter", chosen)


def test_a_list_of_templates_stays_as_it_is_and_a_chosen_one_replaces_it(root, tmp_path):
    train(root, tmp_path / "own", model="listed")
    assert (tmp_path / "own" / "tokenizer_config.json").read_bytes() == (root / "listed" / "tokenizer_config.json").read_bytes()
    assert not (tmp_path / "own" / "chat_template.jinja").exists()
    assert generate(root, "--adapter", tmp_path / "own") == generate(root, "--adapter", tmp_path / "own", model="listed")
    train(root, tmp_path / "own", "--chat_template", "zephyr", "--overwrite_output_dir", model="listed")
    assert "chat_template" not in json.loads((tmp_path / "own" / "tokenizer_config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    assert tokenizer.apply_chat_template(CHAT[0]["messages"], tokenize=False).startswith("<|user|>\n0 and one?")
    train(root, tmp_path / "own", "--overwrite_output_dir", model="listed")  # and back
    assert not (tmp_path / "own" / "chat_template.jinja").exists()


def test_a_template_of_a_file_belongs_to_the_result_too(root, tmp_path):
    train(root, tmp_path / "a", "--chat_template", root / "shout.jinja")
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == SHOUT
    option = ["--chat_template", root / "shout.jinja"]
    ours, wanted = (generate(root, "--adapter", tmp_path / "a", *more) for more in ([], option))
    assert ours == wanted
    assert qlorapp("generate", "--model", root / "plain", "--adapter", tmp_path / "a", "--prompt", "x").returncode == 0


def test_a_resumed_run_is_compared_with_the_template_of_its_checkpoint(root, chosen, tmp_path):
    def resumed(*words, data="chat.jsonl", folder=chosen):
        options = ["--resume_from_checkpoint", folder / "checkpoint-1", *TRAIN, *words]
        return qlorapp("train", "--model", root / "plain", "--data", root / data, "--output", tmp_path / "out", *options)

    other = resumed("--chat_template", "zephyr")
    assert other.returncode == 2 and "the training data" in other.stderr and "chat_template.jinja" in other.stderr
    assert resumed("--chat_template", "chatml").returncode == 0
    train(root, tmp_path / "raw", data="raw.jsonl")
    same_rows = resumed("--chat_template", "zephyr", "--overwrite_output_dir", data="raw.jsonl", folder=tmp_path / "raw")
    assert "other than in the run that wrote" in said(same_rows) + same_rows.stderr
    assert "chat_template.jinja" in same_rows.stdout + same_rows.stderr


def test_a_changed_template_of_a_checkpoint_is_damage(root, chosen, tmp_path):
    shutil.copytree(chosen / "checkpoint-1", tmp_path / "c")
    (tmp_path / "c" / "chat_template.jinja").write_text("{{ 'other' }}")
    result = qlorapp("eval", "--model", root / "plain", "--adapter", tmp_path / "c", "--data", root / "raw.jsonl")
    assert result.returncode == 2 and "is damaged: [chat_template.jinja" in result.stderr


def test_rows_that_no_template_renders_say_once_that_generate_needs_raw(root, tmp_path):
    hint = "generate applies it unless --raw is given"
    with_template = train(root, tmp_path / "a", data="raw.jsonl", model="listed").stdout
    assert with_template.count(hint) == 1
    chosen = train(
        root, tmp_path / "b", "--chat_template", root / "shout.jinja", "--eval_data", root / "raw.jsonl", data="raw.jsonl"
    ).stdout
    assert chosen.count(hint) == 1
    assert hint not in train(root, tmp_path / "c", data="raw.jsonl").stdout
    assert hint not in train(root, tmp_path / "d", model="listed").stdout


def test_python_s_adapter_has_the_template_and_the_command_uses_it(root, tmp_path):
    script = """
import sys, datasets, transformers, qlorapp
root, out, template = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(root + "/plain")
tokenizer.chat_template = template
rows = datasets.load_dataset("json", data_files=root + "/chat.jsonl", split="train")
model = qlorapp.AutoModelForCausalLM.from_pretrained(root + "/plain", load_in_4bit=True)
args = qlorapp.SFTConfig(out, max_steps=1, save_steps=1, report_to=[], use_cpu=True)
trainer = qlorapp.SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, peft_config=qlorapp.LoraConfig(task_type="CAUSAL_LM"))
trainer.train()
trainer.save_model(out)
qlorapp.merge(root + "/plain", out, out + "-merged")
"""
    peer_env = {**os.environ, "PYTHONPATH": str(conftest.BUILD / "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(root), str(tmp_path / "a"), CHATML], capture_output=True, text=True, env=peer_env
    )
    assert done.returncode == 0, done.stderr
    for folder in (tmp_path / "a", tmp_path / "a" / "checkpoint-1", tmp_path / "a-merged"):
        assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == CHATML
    assert generate(root, "--adapter", tmp_path / "a") == generate(
        root, "--adapter", tmp_path / "a", "--chat_template", "chatml"
    )
    assert not (tmp_path / "a-merged" / "adapter_config.json").exists()


def test_what_ends_an_answer_is_still_what_the_base_says(root, chosen, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(root / "plain", base)
    other = 45  # a token that no other file names
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [other]}))
    rows = write_rows(tmp_path / "ids.jsonl", [{"input_ids": [30, 31, 32, other]}])
    for words in ([], ["--adapter", chosen]):
        assert "100 % end in a trained EOS" in said(qlorapp("eval", "--model", base, "--data", rows, *words))


# --- what is not the run's


def test_a_link_for_an_adapters_template_is_refused(root, chosen, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(chosen / name, adapter)
    (tmp_path / "secret.txt").write_text("S3CRET {{ messages }}")
    (adapter / "chat_template.jinja").symlink_to("../secret.txt")
    common = ["--model", root / "plain", "--data", root / "chat.jsonl"]
    for words in (
        ["train", *common, "--output", tmp_path / "out", *TRAIN[:-4], "--init_adapter", adapter],
        ["eval", *common, "--adapter", adapter],
    ):
        for run in (qlorapp, through_python):
            result = run(*words)
            assert result.returncode == 2 and "a link in a model folder" in result.stderr, result.stderr
            assert "S3CRET" not in result.stdout + result.stderr
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_files_that_a_user_keeps_in_the_output_folder_stay(root, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    kept = {"vocab.txt": "a", "merges.txt": "b c", "spiece.model": "d", "added_tokens.json": "{}"}
    for name, text in kept.items():
        (out / name).write_text(text)
    train(root, out, "--chat_template", "chatml")
    assert (out / "chat_template.jinja").exists()
    train(root, out, "--overwrite_output_dir", data="raw.jsonl")  # without a template: that of the earlier run goes
    assert not (out / "chat_template.jinja").exists() and {name: (out / name).read_text() for name in kept} == kept
    inspected = qlorapp("inspect", out)
    assert inspected.returncode == 0 and "changed since" not in inspected.stdout and "DAMAGED" not in inspected.stdout


def test_a_model_that_is_the_output_folder_keeps_its_tokenizer(root, tmp_path):
    other = shutil.copytree(root / "listed", tmp_path / "other")
    before = {path.name: path.read_bytes() for path in other.iterdir()}
    train(root, other, "--chat_template", "chatml")
    assert {name: (other / name).read_bytes() for name in before} == before and (other / "adapter_model.safetensors").exists()
