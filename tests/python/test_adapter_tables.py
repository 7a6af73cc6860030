# SPDX-License-Identifier: Apache-2.0
"""Adapters with tables of their own (new tokens, saved along, changed by matrices): merged, evaluated and generated from, beside PEFT."""

import json
import pathlib

import peer
import pytest
import qlorapp
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_merge_families import check_equal, close, load, logits, reload, tensors_of, trained

TINY = pathlib.Path(__file__).parents[2] / "examples" / "data" / "tiny-llama"

TABLES = {
    "new tokens": (131, {}),
    "new tokens, both tables trained": (131, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "new tokens, embedding trained": (131, {"modules_to_save": ["embed_tokens"]}),
    "fewer tokens": (120, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "new tokens, matrices on both tables": (131, {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
    "matrices on the head": (None, {"target_modules": ["q_proj", "lm_head"], "use_rslora": True}),
    "matrices on the embedding": (None, {"target_modules": ["q_proj", "embed_tokens"]}),
    "matrices on both, as one": (None, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    "tables saved along": (None, {}),
    "norms": (None, {"modules_to_save": ["norm", "input_layernorm"]}),
}


def with_tables(folder, rows, options):
    model = load(folder)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return trained(model, **{"target_modules": ["q_proj", "down_proj"], **options})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_an_adapter_are_in_the_merged_model(tmp_path, name, tied):
    peer.write_llama(tmp_path / "base", tie_word_embeddings=tied)
    rows, options = TABLES[name]
    theirs = with_tables(tmp_path / "base", rows, options)
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=True if name == "tables saved along" else "auto")
    expected = logits(theirs)
    qlorapp.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = reload(tmp_path / "merged")
    assert merged.config.vocab_size == (rows or 128)
    # PEFT's merge changes a tied table twice; what base and adapter compute is the truth for both.
    assert close(logits(merged), expected)
    if not tied or "matrices" not in name:
        check_equal(tmp_path / "merged", theirs.merge_and_unload())
    stored = tensors_of(tmp_path / "merged")
    one = torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)
    assert merged.config.tie_word_embeddings is (tied and one) and ("lm_head.weight" in stored) is not (tied and one)


def test_dora_on_tables_is_pefts(tmp_path):
    peer.write_llama(tmp_path / "base")
    theirs = with_tables(
        tmp_path / "base", 131, {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "use_dora": True, "r": 3}
    )
    theirs.save_pretrained(tmp_path / "adapter")
    qlorapp.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    check_equal(tmp_path / "merged", theirs.merge_and_unload())


def test_a_head_that_the_flag_denies_is_used_and_kept(tmp_path):
    peer.write_llama(tmp_path / "base", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    head = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(4))
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    theirs = trained(load(tmp_path / "base"))
    theirs.save_pretrained(tmp_path / "adapter")
    expected = logits(theirs)
    said = peer.run_cli(
        "merge", "--model", tmp_path / "base", "--adapter", tmp_path / "adapter", "--output", tmp_path / "merged"
    )
    assert said.stderr.count("says tie_word_embeddings: true, but") == 1
    assert torch.equal(tensors_of(tmp_path / "merged")["lm_head.weight"], head)
    assert reload(tmp_path / "merged").config.tie_word_embeddings is False
    assert close(logits(reload(tmp_path / "merged")), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name", ["new tokens", "new tokens, both tables trained", "new tokens, embedding trained", "tables saved along"]
)
def test_the_command_evaluates_an_adapter_with_tables_of_its_own(tmp_path, name, tied):
    peer.write_llama(tmp_path / "base", tie_word_embeddings=tied)
    rows, options = TABLES[name]
    theirs = with_tables(tmp_path / "base", rows, options).eval()
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=True if name == "tables saved along" else "auto")
    ids = list(range(5, 25)) + [(rows or 128) - 1, (rows or 128) - 2, 7]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": ids, "labels": ids}) + "\n")
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    said = peer.run_cli("eval", "--model", tmp_path / "base", "--adapter", tmp_path / "adapter", "--data", tmp_path / "rows.jsonl",
                        "--load_in_4bit", "false", "--dtype", "float32")  # fmt: skip
    found = float((said.stdout + said.stderr).split("eval_loss ")[1].split()[0])
    assert found == pytest.approx(expected, rel=1e-5)
    train = ["train", "--model", tmp_path / "base", "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "out"]
    refused = peer.run_cli(*train, "--init_adapter", tmp_path / "adapter", check=False)
    assert refused.returncode == 2 and "holds tables of its own" in refused.stderr and "qlorapp merge" in refused.stderr


def test_the_command_generates_with_new_tokens(tmp_path):
    """The token that the new head prefers is one that the base does not have."""
    model = transformers.LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + 3, mean_resizing=False)
    theirs = trained(model, target_modules=["q_proj", "up_proj"]).eval()
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = theirs.generate(input_ids=ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    said = peer.run_cli("generate", "--model", TINY, "--adapter", tmp_path / "adapter", "--prompt", "Once upon a time", "--raw",
                        "--max_new_tokens", "12", "--load_in_4bit", "false", "--dtype", "float32").stdout  # fmt: skip
    known = [token for token in expected.tolist() if token < len(tokenizer)]
    assert said.strip() == tokenizer.decode(known, skip_special_tokens=True).strip()


def test_an_adapter_that_does_not_load_leaves_the_model_as_it_was(tmp_path):
    peer.write_llama(tmp_path / "base")
    with_tables(tmp_path / "base", 131, {}).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "lora_B" in name)
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, path)
    core = qlorapp._C.load_model(str(tmp_path / "base"), compute_dtype=torch.float32)
    head, rows = core.gathered_head().clone(), core.vocab_size
    with pytest.raises(ValueError, match="must have shape"):
        core.load_adapter(str(tmp_path / "adapter"))
    assert (core.vocab_size, core.has_adapters) == (rows, False) and torch.equal(core.gathered_head(), head)
