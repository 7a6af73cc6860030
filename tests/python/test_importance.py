# SPDX-License-Identifier: Apache-2.0
"""Quantized types whose rounding errors are weighted by what the training rows use."""

import json

import gguf
import numpy
import peer
import pytest
import qlorapp
import torch
import transformers
from gguf.quants import dequantize
from llama_cpp import LlamaCpp, quantized
from test_export_adapter import adapted
from test_export_gguf import IDS, TINY, export, write

ROWS = TINY.parent / "train.jsonl"


def uneven(folder, **options):
    """A model whose channels carry unlike amounts, as those of trained models do; its norms say so."""
    write(folder, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.exp(1.5 * torch.randn_like(parameter)))
    model.save_pretrained(folder)
    return model.eval()


def inputs_of(model, tokenizer):
    """By module: the mean squares of its input channels over the rows."""
    sums = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: sums.setdefault(name, []).append(args[0][0].double().square())
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    for line in ROWS.read_text().splitlines()[::4]:
        ids = tokenizer.apply_chat_template(json.loads(line)["messages"], return_tensors="pt", return_dict=False)
        with torch.no_grad():
            model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(squares).mean(0) for name, squares in sums.items()}


def errors_of(file, model, importance):
    """Weighted squared errors of each linear layer, and of ggml's blocks for the same type and weights."""
    names = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}  # fmt: skip
    own, theirs = {}, {}
    for tensor in gguf.GGUFReader(file).tensors:
        _, block, layer, *_ = (*tensor.name.split("."), "", "", "")
        if not tensor.name.startswith("blk.") or layer not in names:
            continue
        module = f"model.layers.{block}.{names[layer]}"
        values = model.get_submodule(module).weight.detach().float().numpy()
        weights = importance[module].float().numpy()
        for into, blocks in ((own, tensor.data), (theirs, quantized(values, tensor.tensor_type, weights))):
            found = dequantize(blocks, tensor.tensor_type).astype(numpy.float64)
            into[tensor.name] = ((found - values) ** 2 @ weights.astype(numpy.float64)).sum()
    return own, theirs


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K"])
def test_what_the_rows_use_is_closer(kind, tmp_path):
    """Than without, and than ggml's own blocks under the same weights."""
    model = uneven(tmp_path / "model")
    importance = inputs_of(model, transformers.AutoTokenizer.from_pretrained(tmp_path / "model"))
    export(tmp_path / "model", gguf=tmp_path / "plain.gguf", type=kind)
    export(tmp_path / "model", gguf=tmp_path / "weighted.gguf", type=kind, importance=ROWS)
    plain, _ = errors_of(tmp_path / "plain.gguf", model, importance)
    weighted, ggml = errors_of(tmp_path / "weighted.gguf", model, importance)
    assert len(weighted) == 15 and all(weighted[name] < plain[name] for name in weighted)
    assert sum(weighted.values()) < 0.9 * sum(plain.values()) and sum(weighted.values()) <= sum(ggml.values())
    LlamaCpp(tmp_path / "weighted.gguf").next_token(IDS[:9], model.config.vocab_size)


def test_the_adapter_is_in_the_measure(tmp_path):
    uneven(tmp_path / "model")
    _, adapter = adapted(tmp_path / "model", r=8, lora_alpha=256)
    files = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
    options = {"adapter": adapter, "type": "Q4_K_M"}
    export(tmp_path / "model", gguf=files[0], **options)
    export(tmp_path / "model", gguf=files[1], importance=ROWS, **options)
    command = ("export", "--model", tmp_path / "model", "--adapter", adapter, "--verify", "false", "--gguf", files[2])
    peer.run_cli(*command, "--importance", ROWS)
    assert files[0].read_bytes() != files[1].read_bytes() == files[2].read_bytes()


def test_bad_input(tmp_path):
    uneven(tmp_path / "model")
    with pytest.raises(ValueError, match="importance has a use with gguf and ollama alone; got gguf_adapter"):
        _, adapter = adapted(tmp_path / "model")
        export(tmp_path / "model", adapter=adapter, gguf_adapter=tmp_path / "a.gguf", importance=ROWS)
    for kind in ("Q8_0", "F16"):
        with pytest.raises(ValueError, match=f"importance has a use with Q6_K and below; type is {kind}"):
            export(tmp_path / "model", gguf=tmp_path / "a.gguf", type=kind, importance=ROWS)
    (tmp_path / "none.jsonl").write_text("")
    for rows, error in (("none.jsonl", qlorapp.FormatError), ("absent.jsonl", OSError)):
        with pytest.raises(error, match=rows):
            export(tmp_path / "model", gguf=tmp_path / "a.gguf", importance=tmp_path / rows)
    assert not (tmp_path / "a.gguf").exists()
