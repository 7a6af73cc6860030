# SPDX-License-Identifier: Apache-2.0
"""Exported GGUF files, computed by llama.cpp and read by gguf."""

import functools
import json
import random
import shutil

import family_tokenizers
import gguf
import numpy
import peer
import pytest
import qlorapp
import torch
import transformers
from conftest import ROOT
from families import FAMILIES, FULL, SLIDING, YARN
from gguf.quants import dequantize
from llama_cpp import LlamaCpp, quantized
from safetensors.torch import load_file, save_file

#: Without the comparison, which test_verify_export.py is about.
export = functools.partial(qlorapp.export, verify=False)


TINY = ROOT / "examples" / "data" / "tiny-llama"
VOCABULARY = 704  # of 699 tokens: the embedding has rows without one
IDS = [(37 * i) % 690 for i in range(40)]
#: Options that llama.cpp computes where it does not compute those of FAMILIES.
OPTIONS = {
    "Llama, yarn": {"rope_parameters": YARN | {"beta_fast": 16.0, "attention_factor": 1.3}},
    "Llama 3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "Qwen3, tied": {"family": "Qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "Phi-3 without windows": {"family": "Phi3", "sliding_window": None},
    "SmolLM3": {"family": "SmolLM3", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "OLMo 2": {"family": "Olmo2"},
    "EXAONE 4 in its depth": {"family": "Exaone4", "num_hidden_layers": 64, "sliding_window": 6, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 16},
    "ERNIE 4.5": {"family": "Ernie4_5", "head_dim": 16},
    "Seed-OSS": {"family": "SeedOss", "head_dim": 32, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "Hunyuan": {**FAMILIES["Hunyuan"], "attention_bias": False},
    "Gemma 3 in 27B's depth": {"family": "Gemma3", "head_dim": 32, "num_hidden_layers": 62, "query_pre_attn_scalar": 16},
}  # fmt: skip
#: {case: a part of the reason}
REFUSED = {
    "Llama, yarn": "truncate=true alone",
    "Qwen3, tied, with biases": "no bias for self_attn.q_proj",
    "OLMo 2": "no bias for self_attn.q_proj",
    "SmolLM3": "does not turn the heads of layer 1",
    "EXAONE 4": "windows in models of 64 layers alone; this one has 3",
    "ERNIE 4.5": "no bias for self_attn.q_proj",
    "Seed-OSS": "no bias for self_attn.o_proj",
    "Hunyuan": "no bias for self_attn.q_proj",
}
CASES = {**{name: case for name, case in FAMILIES.items() if name not in REFUSED}, **OPTIONS}


def write(folder, **options):
    peer.write_llama(folder, **{**options, "vocab_size": VOCABULARY})
    if options.get("num_hidden_layers", 0) > 60:  # or rounding grows with the depth
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if "post_feedforward_layernorm" in name:
                tensor.fill_(-0.95 if options["family"] == "Gemma3" else 0.05)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (TINY / name).exists():
            shutil.copy(TINY / name, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_model(case, tmp_path, caplog):
    """Probabilities of the next token, behind rows longer and shorter than the windows."""
    model = write(tmp_path / "model", **CASES[case])
    with caplog.at_level("WARNING", logger="qlorapp"):
        export(model, gguf=tmp_path / "model.gguf", type="F32")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    length = next(field.contents() for key, field in fields.items() if key.endswith(".context_length"))
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert length == longest or f"context_length is {length} in the file" in caplog.text
    theirs = LlamaCpp(tmp_path / "model.gguf", length)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    original = CASES[case].get(
        "original_max_position_embeddings", 0
    )  # llama.cpp chooses longrope's factors by the context, not by the row
    worst, compared = 0.0, 0
    for count in (3, 4, 5, 9, 14, 20, 31, 40):
        if not original < count < max(length, 7):
            continue
        found = theirs.next_token(IDS[:count], VOCABULARY)
        if found is None:
            continue
        found = torch.from_numpy(found)
        with torch.no_grad():
            expected = reference(torch.tensor([IDS[:count]])).logits[0, -1].log_softmax(-1)
        known = ~found.isnan()
        assert known.sum() >= 690
        worst = max(worst, (expected - found)[known].abs().max().item())
        compared += 1
    assert compared >= 2
    # GELU of ggml is a table in float16.
    assert worst <= (2e-2 if "Gemma" in case else 5e-5)


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_does_not_compute_is_refused(case, tmp_path):
    model = write(tmp_path / "model", **FAMILIES[case])
    with pytest.raises(qlorapp.FormatError, match=REFUSED[case]):
        export(model, gguf=tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_are_closer_than_ggmls_own(kind, tmp_path):
    """Weights of several deviations, with outliers, constant blocks and zeros."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=768,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        gate = model.model.layers[0].mlp.gate_proj.weight
        gate *= torch.logspace(-3, 1, gate.shape[0])[:, None]
        gate[::7, ::61] *= 30
        gate[3], gate[5, :256], gate[9, :32] = 0, 0.25, -0.5
        gate[11].abs_()
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / "model")
    file_type = {"Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(kind, kind)
    export(tmp_path / "model", gguf=tmp_path / "model.gguf", type=file_type)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}["blk.0.ffn_gate.weight"]
    assert stored.tensor_type.name == kind
    values = gate.detach().numpy()
    own, theirs = (dequantize(blocks, stored.tensor_type) for blocks in (stored.data, quantized(values, stored.tensor_type)))
    errors = [((found - values) ** 2).sum(axis=1) for found in (own, theirs)]
    assert errors[0].sum() <= errors[1].sum()
    rounding = 3e-7 * (values**2).sum(axis=1)  # of a scale to float16
    assert (errors[0] <= errors[1] * 2 + rounding).all()  # of each row
    assert numpy.abs(own[3]).max() == 0
    LlamaCpp(tmp_path / "model.gguf")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, an adapter with matrices and a saved head, and their merged folder."""
    folder = tmp_path_factory.mktemp("export")
    write(folder / "model", num_key_value_heads=4)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = peer.add_adapters(model, modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    model.save_pretrained(folder / "adapter")
    qlorapp.merge(folder / "model", folder / "adapter", folder / "merged")
    return folder


@pytest.mark.parametrize("file_type", ["F32", "BF16", "Q8_0"])
def test_an_adapter_is_exported_merged(trained, tmp_path, file_type):
    export(trained / "model", adapter=trained / "adapter", gguf=tmp_path / "a.gguf", type=file_type)
    export(trained / "merged", gguf=tmp_path / "b.gguf", type=file_type)
    ours, merged = ({t.name: t for t in gguf.GGUFReader(tmp_path / name).tensors} for name in ("a.gguf", "b.gguf"))
    assert ours.keys() == merged.keys() and "output.weight" in ours
    assert all(numpy.array_equal(ours[name].data, merged[name].data) for name in merged)


def test_weights_that_training_used_are_exported(trained, tmp_path):
    """base=dequantized: the file computes what the four-bit engine with its adapter does."""
    four_bits = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    export(
        trained / "model",
        adapter=trained / "adapter",
        gguf=tmp_path / "a.gguf",
        type="F32",
        base="dequantized",
        quantization_config=four_bits,
    )
    base = qlorapp.AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32, quantization_config=four_bits)
    model = qlorapp.PeftModel.from_pretrained(base, trained / "adapter").eval()
    theirs, compared = LlamaCpp(tmp_path / "a.gguf"), 0
    for count in range(3, 40, 4):
        found = theirs.next_token(IDS[:count], VOCABULARY)
        if found is None:
            continue
        found = torch.from_numpy(found)
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([IDS[:count]])).logits[0, -1].log_softmax(-1)
        assert (expected - found)[~found.isnan()].abs().max() <= 1e-4
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("file_type", ["F16", "BF16", "Q8_0", "Q4_K_M"])
def test_the_bundled_model_answers_as_here(tmp_path, file_type):
    """Greedy texts behind 50 prompts; divergence from the model's own probabilities for the quantized types."""
    command = ("export", "--verify", "false", "--model", TINY, "--gguf", tmp_path / "tiny.gguf", "--type", file_type)
    assert f"written in {file_type}" in peer.run_cli(*command).stdout
    theirs, tokenizer = LlamaCpp(tmp_path / "tiny.gguf"), transformers.AutoTokenizer.from_pretrained(TINY)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    rows = [json.loads(line)["messages"] for line in (ROOT / "examples" / "data" / "train.jsonl").read_text().splitlines()[:50]]
    same = agree = 0
    divergence = []
    for messages in rows:
        ids = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            out = model.generate(
                torch.tensor([ids]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=tokenizer.convert_tokens_to_ids("<|eot_id|>"),
            )
        same += theirs.greedy(ids, 12).strip() == tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True).strip()
        found = theirs.next_token(ids, len(tokenizer))
        if found is not None:
            found = torch.from_numpy(found)
            known = ~found.isnan()
            divergence.append((expected.exp() * (expected - found))[known].sum().item())
            agree += int(expected.argmax()) == int(found.nan_to_num(-1e9).argmax())
    mean = sum(divergence) / len(divergence)
    print(f"{file_type}: {same} of {len(rows)} texts the same, first token {agree} of {len(divergence)}, KL {mean:.2e}")
    most, least = {"F16": (1e-5, 50), "BF16": (1e-3, 45), "Q8_0": (3e-3, 40), "Q4_K_M": (5e-2, 25)}[file_type]
    assert mean <= most and same >= least and agree >= 0.8 * len(divergence)


def test_tokens_and_template_are_those_of_training(tmp_path):
    export(TINY, gguf=tmp_path / "tiny.gguf", type="Q8_0")
    theirs, tokenizer = LlamaCpp(tmp_path / "tiny.gguf"), transformers.AutoTokenizer.from_pretrained(TINY)
    texts = [
        "",
        "The cat",
        "  two  spaces ",
        "line\r\nfeed\t!",
        "1234567 8,9",
        "don't WE'LL",
        "日本語 é ü 🙂",
        "a<|eot_id|>b",
        "x\u00a0y\u3000z",
    ]
    for text in texts:
        assert theirs.tokenize(text) == tokenizer(text)["input_ids"], text
        assert theirs.tokenize(text, special=False) == tokenizer(text, add_special_tokens=False)["input_ids"], text
    talk = [
        {"role": role, "content": text}
        for role, text in (("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes."), ("user", "Why?"))
    ]
    expected = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert theirs.tokenize(theirs.render(talk)) == tokenizer(expected, add_special_tokens=False)["input_ids"]
    fields = gguf.GGUFReader(tmp_path / "tiny.gguf").fields
    ends = {fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot")}
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") in ends


#: Splits that llama.cpp has no name for, and other models than BPE.
UNNAMED = ["cl100k as tiktoken writes it", "MiniCPM 5", "Youtu",
           "digits behind a pattern", "Helium", "Helium without tokens of bytes"]  # fmt: skip


def hostile(count=80):
    generator = random.Random(1)
    letters = "ab Zé1\n .,'日 tT'sr\r\t🙂"
    texts = [
        "The cat",
        "line\nfeed\r\n\n x",
        "1234567 8,9",
        "don't WE'LL I'm",
        "HTTPServer camelCase",
        "a.b;c  (d) {e}",
        "русский ǅ ǈ",
    ]
    return texts + ["".join(generator.choice(letters) for _ in range(generator.randint(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("kind", [name for name in family_tokenizers.kinds() if name not in UNNAMED])
def test_llama_cpp_has_the_tokens_of_each_kind(kind, tmp_path):
    theirs = family_tokenizers.kinds()[kind](tmp_path / "text")
    peer.write_llama(tmp_path / "model", vocab_size=-(-(max(theirs.get_vocab().values()) + 1) // 64) * 64)
    for path in (tmp_path / "text").iterdir():
        shutil.copy(path, tmp_path / "model")
    export(tmp_path / "model", gguf=tmp_path / "a.gguf", type="Q8_0")
    ours = LlamaCpp(tmp_path / "a.gguf")
    for text in hostile():
        if kind.startswith("LlamaTokenizer") and text[0].isspace():  # llama.cpp puts a space in front there, too
            continue
        assert ours.tokenize(text) == theirs.encode(text).ids, text


@pytest.mark.parametrize("kind", UNNAMED)
def test_splits_without_a_name_are_refused(kind, tmp_path):
    family_tokenizers.kinds()[kind](tmp_path / "text")
    peer.write_llama(tmp_path / "model", vocab_size=1536)
    for path in (tmp_path / "text").iterdir():
        shutil.copy(path, tmp_path / "model")
    with pytest.raises(qlorapp.FormatError, match="must be one that llama.cpp has a name for|must be BPE for a GGUF file"):
        export(tmp_path / "model", gguf=tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_bad_input(trained, tmp_path):
    with pytest.raises(ValueError, match=r"type must be one of \[F32, F16, BF16.*got 'Q4_K'.*Did you mean"):
        export(trained / "model", gguf=tmp_path / "a.gguf", type="Q4_K")
    with pytest.raises(OSError, match="missing"):
        export(trained / "model", gguf=tmp_path / "missing" / "a.gguf")
    without = shutil.copytree(trained / "model", tmp_path / "without")
    (without / "tokenizer.json").unlink()
    with pytest.raises(OSError, match="tokenizer.json"):
        export(without, gguf=tmp_path / "a.gguf")
    split = shutil.copytree(trained / "model", tmp_path / "split")
    tokenizer = json.loads((split / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (split / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(qlorapp.FormatError, match=r"pre_tokenizer must be one that llama.cpp has a name for.*got 'bytes'"):
        export(split, gguf=tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()
    (tmp_path / "kept.gguf").write_text("mine")
    with pytest.raises(ValueError, match="type must be"):
        export(trained / "model", gguf=tmp_path / "kept.gguf", type="Q9")
    assert (tmp_path / "kept.gguf").read_text() == "mine"
    result = peer.run_cli(
        "export",
        "--verify",
        "false",
        "--model",
        trained / "model",
        "--gguf",
        tmp_path / "a.gguf",
        "--quant_type",
        "fp4",
        check=False,
    )
    assert result.returncode == 2 and "needs --base dequantized" in result.stderr
