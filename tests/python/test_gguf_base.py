# SPDX-License-Identifier: Apache-2.0
"""GGUF files as models: their values, their tokenizers, training on their very blocks."""

import json
import re
import shutil
import struct

import family_tokenizers
import gguf
import numpy
import peer
import peft
import pytest
import qlorapp
import tokenizers
import torch
import transformers
from gguf.quants import dequantize
from llama_cpp import LlamaCpp, quantized
from qlorapp import _C
from test_at_the_door import cached
from test_export_adapter import ROUNDS
from test_export_gguf import CASES, IDS, TINY, UNNAMED, VOCABULARY, export, hostile, write

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def exported(folder, kind="F32"):
    export(folder, gguf=folder.with_suffix(".gguf"), type=kind)
    return folder.with_suffix(".gguf")


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_its_model(case, tmp_path):
    """Of every family that is exported: the logits of the folder that it was made of."""
    folder = write(tmp_path / "model", **CASES[case])
    file = exported(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(file, dtype=torch.float32)
    length = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    longest = min(40, ours.config.max_position_embeddings, CASES[case].get("original_max_position_embeddings", length))
    ids = torch.tensor([IDS[:longest]])
    with torch.no_grad():
        bound = 2e-3 if "27B" in case else 2e-4  # its queries' norms were scaled
        torch.testing.assert_close(ours(input_ids=ids).logits, theirs(ids).logits, atol=bound, rtol=1e-4)


def blocks(path, kind, rows=6, columns=512, seed=1):
    """A file with one tensor of this kind, in ggml's own blocks, some of which have other bytes than a quantizer writes."""
    generator = numpy.random.default_rng(seed)
    values = (generator.standard_normal((rows, columns)) * numpy.logspace(-3, 1, rows)[:, None]).astype(numpy.float32)
    values[1, :64] = 0
    return quantized(values, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_have_the_values_of_gguf(kind, tmp_path):
    """Bit by bit, in each dtype, and whatever the bytes say."""
    data = blocks(tmp_path, kind)
    generator = numpy.random.default_rng(2)
    data[3:] = generator.integers(0, 256, data[3:].shape, numpy.uint8)
    expected = dequantize(data, gguf.GGMLQuantizationType[kind])
    data[~numpy.isfinite(expected).all(axis=1)] = 0
    expected = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[kind]))
    packed, none, shape = torch.from_numpy(data).reshape(-1, 1), torch.empty(0), list(expected.shape)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        found = torch.ops.qlorapp.dequantize_4bit(packed, none, shape, size, kind.lower(), dtype)
        torch.testing.assert_close(found, expected.to(dtype), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_values(kind, tmp_path):
    data = blocks(tmp_path, kind)
    weight = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[kind]))
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    arguments = (torch.from_numpy(data).reshape(-1, 1), torch.empty(0), None, None, list(weight.shape), size, 256, kind.lower())
    x = torch.randn(5, 512, dtype=torch.float64, requires_grad=True)
    y = torch.ops.qlorapp.linear_4bit(x, *arguments)
    torch.testing.assert_close(y, x @ weight.double().T)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, torch.ones_like(y) @ weight.double())
    with pytest.raises(ValueError, match="quant_type must be nf4 or fp4"):  # blocks are written by export
        torch.ops.qlorapp.quantize_4bit(weight, 32, kind.lower())


def wide(folder, **options):
    """A model whose rows are whole blocks of 256."""
    return write(folder, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, **options)


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0"])
def test_training_on_the_blocks(kind, tmp_path):
    """The gradient and the loss are those of PEFT over the dequantized weights; the adapter fits the very file in llama.cpp."""
    folder = wide(tmp_path / "model")
    file = exported(folder, kind)
    model = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    weight = model.model.layers[0].mlp.down_proj.quant_state
    assert weight.quant_type == {"Q4_K_M": "q4_k", "Q5_K_M": "q5_k"}.get(kind, kind.lower()) or weight.quant_type == "q6_k"
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}["blk.0.ffn_down.weight"]
    assert weight.packed.numel() == stored.n_bytes and numpy.array_equal(weight.packed.numpy().ravel(), stored.data.ravel())
    reference = dense(file, folder)
    ours, theirs = (peer.add_adapters(m) for m in (model, reference))
    ids = torch.tensor([IDS[:24], IDS[5:29]])
    losses = [m(input_ids=ids, labels=ids).loss for m in (ours, theirs)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)
    for loss in losses:
        loss.backward()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (ours, theirs)]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, atol=1e-5, rtol=1e-4)
    ours.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(file)
    export(file, adapter=tmp_path / "adapter", gguf_adapter=tmp_path / "a.gguf")
    # llama.cpp quantizes activations to eight bits for these products.
    without, with_adapter = LlamaCpp(file), LlamaCpp(file, adapter=tmp_path / "a.gguf")
    for count in (5, 14, 31):
        found = [server.next_token(IDS[:count], VOCABULARY) for server in (without, with_adapter)]
        if any(one is None for one in found):
            continue
        ids = torch.tensor([IDS[:count]])
        with torch.no_grad():
            changed = ours.eval()(input_ids=ids).logits[0, -1].log_softmax(-1)
            with ours.disable_adapter():
                changed = changed - ours(input_ids=ids).logits[0, -1].log_softmax(-1)
        there = torch.from_numpy(found[1] - found[0])
        known = ~there.isnan()
        assert torch.corrcoef(torch.stack([changed[known], there[known]]))[0, 1] > 0.9


def dense(file, folder):
    """transformers' model of the folder with the file's values."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    values = qlorapp.AutoModelForCausalLM.from_pretrained(file, dtype=torch.float32)
    state = {}
    for name, tensor in model.state_dict().items():
        module = values.get_submodule(name.rpartition(".")[0])
        quantized = getattr(module, "quant_state", None)
        state[name] = (
            _C.Quantizer().dequantize(quantized, torch.float32) if quantized is not None else module.get_parameter("weight")
        )
        assert state[name].shape == tensor.shape
    model.load_state_dict(state)
    return model


def eval_loss(*options):
    return float(re.search(r"eval_loss ([\d.]+)", peer.run_cli("eval", "--dtype", "float32", *options).stdout)[1])


def test_the_command_trains_evaluates_merges_and_plans(tmp_path):
    file = tmp_path / "tiny.gguf"
    export(TINY, gguf=file, type="Q8_0")
    data = TINY.parent / "train.jsonl"
    common = ("--model", file, "--data", data)
    plan = peer.run_cli("train", *common, "--output", tmp_path / "o", "--max_steps", 2, "--dry_run").stdout
    assert "blocks as the GGUF file stores them" in plan
    done = peer.run_cli("train", *common, "--output", tmp_path / "o", "--max_steps", 2, "--logging_steps", 1)
    assert "blocks as the GGUF file stores them" in done.stdout + done.stderr
    assert json.loads((tmp_path / "o" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(file)
    options = ("--adapter", tmp_path / "o", "--data", data)
    losses = [eval_loss("--model", file, *options), eval_loss("--model", TINY, *options, "--load_in_4bit", "false")]
    assert abs(losses[0] - losses[1]) < 0.05
    assert eval_loss("--model", file, "--data", data, "--requantize", "nf4") > 0
    peer.run_cli("merge", "--model", file, "--adapter", tmp_path / "o", "--output", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size >= len(tokenizer) and tokenizer.chat_template
    shown = peer.run_cli("generate", "--model", file, "--prompt", "The cat", "--max_new_tokens", 4).stdout
    assert shown


def test_the_plan_counts_the_blocks(tmp_path):
    folder = wide(tmp_path / "model", num_hidden_layers=2)
    sizes = {}
    for kind in ("Q4_0", "Q8_0"):
        file = folder.with_name(f"{kind}.gguf")
        export(folder, gguf=file, type=kind)
        sizes[kind] = peer.run_cli("plan", "--model", file, "--gpu", "T4", "--batch", 1, "--seq", 64).stdout
        sizes[kind, "anew"] = peer.run_cli(
            "plan", "--model", file, "--requantize", "nf4", "--gpu", "T4", "--batch", 1, "--seq", 64
        ).stdout
    assert sizes["Q4_0"] != sizes["Q8_0"] != sizes["Q8_0", "anew"] == sizes["Q4_0", "anew"].replace("Q4_0", "Q8_0")


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "Q8_0"])
@pytest.mark.parametrize("more", [(), ("--requantize", "nf4")])
def test_the_plan_is_what_loading_takes(kind, more, tmp_path):
    file = exported(wide(tmp_path / "model"), kind)
    shown = peer.run_cli("plan", "--model", file, "--gpu", "cpu", "--batch", 1, "--seq", 32, "--measure", *more).stdout
    assert all(abs(float(error)) < 1 for error in re.findall(r"planned .*, ([-+][\d.]+) %", shown)), shown


@pytest.mark.parametrize("kind", [name for name in family_tokenizers.kinds() if name not in UNNAMED])
def test_tokenizers_come_back(kind, tmp_path):
    theirs = family_tokenizers.kinds()[kind](tmp_path / "text")
    peer.write_llama(tmp_path / "model", vocab_size=-(-(max(theirs.get_vocab().values()) + 1) // 64) * 64)
    for path in (tmp_path / "text").iterdir():
        shutil.copy(path, tmp_path / "model")
    folder = _C.model_folder(str(exported(tmp_path / "model", "F16")))
    ours = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    for text in hostile():
        if kind.startswith("LlamaTokenizer") and text[0].isspace():
            continue
        found = ours.encode(text).ids
        assert found == theirs.encode(text).ids, text
        assert ours.decode(found) == theirs.decode(found)


@pytest.mark.parametrize("name", ["exaone", "exaone4", "glm4", "chatglm-bpe"])
def test_other_names_of_a_split_are_llama_cpps(name, tmp_path):
    export(TINY, gguf=tmp_path / "tiny.gguf", type="F16")
    file = rewritten(tmp_path / "tiny.gguf", tokenizer_ggml_pre=name)
    ours = tokenizers.Tokenizer.from_file(f"{_C.model_folder(str(file))}/tokenizer.json")
    theirs = LlamaCpp(file)
    for text in hostile():
        assert ours.encode(text).ids == theirs.tokenize(text), text


def test_a_factor_alone_stretches_positions(tmp_path):
    """Of older files, which name no type of scaling."""
    file = rewritten(exported(write(tmp_path / "model", num_hidden_layers=1)), llama__rope__scaling__factor=4.0)
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(file, dtype=torch.float32)
    assert ours.config.rope_parameters["rope_type"] == "linear" and ours.config.rope_parameters["factor"] == 4
    with torch.no_grad():
        own = ours(input_ids=torch.tensor([IDS[:31]])).logits[0, -1].log_softmax(-1)
    there = torch.from_numpy(LlamaCpp(file).next_token(IDS[:31], VOCABULARY))
    known = ~there.isnan()
    torch.testing.assert_close(own[known].double(), there[known].double(), atol=2e-3, rtol=1e-3)


def test_conversations_and_ends_come_back(tmp_path):
    export(TINY, gguf=tmp_path / "tiny.gguf", type="Q8_0")
    folder = _C.model_folder(str(tmp_path / "tiny.gguf"))
    assert folder == _C.model_folder(str(tmp_path / "tiny.gguf")) and _C.model_path(folder) == str(tmp_path / "tiny.gguf")
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, TINY))
    options = {"add_generation_prompt": True, "return_dict": False}
    assert ours.apply_chat_template(ROUNDS, **options) == theirs.apply_chat_template(ROUNDS, **options)
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert theirs.convert_tokens_to_ids("<|eot_id|>") in (ends if isinstance(ends, list) else [ends])
    assert ours.bos_token == theirs.bos_token and ours.eos_token in theirs.all_special_tokens


def parts(path):
    return bytearray(path.read_bytes())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b[:3], "byte 0: 4 bytes are wanted here; the file ends after 3"),
        (lambda b: b"GGML" + b[4:], "byte 0: a GGUF file must begin with GGUF"),
        (lambda b: b[:4] + struct.pack("<I", 7) + b[8:], "byte 4: the version must be 2 or 3; got 7"),
        (lambda b: b[:8] + struct.pack("<Q", 1 << 40) + b[16:], "byte 8: the number of tensors must be at most 65536"),
        (
            lambda b: b[:8] + struct.pack("<Q", 60000) + b[16:],
            "the number of tensors is 60000, for which the file is too short|byte",
        ),
        (lambda b: b[:24] + struct.pack("<Q", 1 << 62) + b[32:], "byte 24: the length of a string must be at most 255"),
        (lambda b: b[:-100], r"byte \d+: tensor .* has \d+ bytes; the file ends after"),
        (lambda b: b.replace(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight"), "must hold tensor blk.0.attn_q.weight"),
        (lambda b: b.replace(b"blk.0.attn_norm.weight", b"blk.0.attn_norm.w\xff\xfeght"), "the name of a tensor must be UTF-8"),
        (lambda b: b.replace(b"llama.block_count", b"llama.block_coun_"), "must have the key 'llama.block_count'"),
        (
            lambda b: b.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 5) + b"mamba"),
            "'mamba', of a family that is not computed",
        ),
        (
            lambda b: b.replace(b"ggml.tokens" + struct.pack("<II", 9, 8), b"ggml.tokens" + struct.pack("<IIQ", 9, 0, 1 << 25)),
            "the length of an array must be at most 16777216; got 33554432",
        ),
        (lambda b: b.replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.prx"), "tokenizer.ggml.pre must be a split that is known"),
    ],
)
def test_hostile_files_are_refused_by_byte_and_rule(change, reason, tmp_path):
    folder = write(tmp_path / "model")
    good = parts(exported(folder, "Q8_0"))
    (tmp_path / "bad.gguf").write_bytes(change(good))
    with pytest.raises(qlorapp.FormatError, match=reason):
        qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "bad.gguf")
    failed = peer.run_cli("generate", "--model", tmp_path / "bad.gguf", "--prompt", "x", check=False)
    assert failed.returncode == 1 or failed.returncode == 2
    assert "bad.gguf" in failed.stderr


def rewritten(path, change=lambda name, tensor: None, **fields):
    """The file with other values in some of its tensors, change(name, data) returns them with their kind, or None; and in its fields, _ for dots;
    a new one, of float32, has __ for dots."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("changed.gguf"), "llama")
    for key, field in reader.fields.items():
        value = fields.pop(key.replace(".", "_"), None)
        if value is not None:
            writer.add_key_value(key, value, field.types[0])
        elif not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, value in fields.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.FLOAT32)
    for tensor in reader.tensors:
        data, kind = change(tensor.name, tensor) or (tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("changed.gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "Q6_K", "Q4_0"])
def test_damaged_scales_are_refused(kind, tmp_path):
    """Half of a scale is all ones: not a number in float16, which would make the loss NaN thousands of steps later."""
    file = exported(wide(tmp_path / "model"), kind)

    def damage(name, tensor):
        if name != "blk.1.ffn_down.weight":
            return None
        data, size = tensor.data.copy(), gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        place = size - 2 if tensor.tensor_type == gguf.GGMLQuantizationType.Q6_K else 0
        data[3, size + place : size + place + 2] = (0, 0x7E)
        return data, tensor.tensor_type

    with pytest.raises(qlorapp.FormatError, match=r"blk\.1\.ffn_down\.weight has a scale that is not finite"):
        qlorapp.AutoModelForCausalLM.from_pretrained(rewritten(file, damage))


def test_norms_in_blocks_are_refused(tmp_path):
    folder = write(tmp_path / "model", hidden_size=64)
    zeros = numpy.zeros((1, 68), numpy.uint8)

    def change(name, tensor):
        return (zeros[0], gguf.GGMLQuantizationType.Q8_0) if name == "blk.0.attn_norm.weight" else None

    with pytest.raises(qlorapp.FormatError, match=r"blk\.0\.attn_norm\.weight must be whole blocks"):
        qlorapp.AutoModelForCausalLM.from_pretrained(rewritten(exported(folder, "F32"), change))


def test_a_file_is_known_by_its_first_bytes_and_from_any_folder(tmp_path, monkeypatch):
    """As Ollama and huggingface_hub keep files: under the name of their digest."""
    folder = write(tmp_path / "model")
    file = exported(folder, "Q8_0")
    file.rename(tmp_path / "sha256-0123")
    monkeypatch.chdir(tmp_path)
    model = qlorapp.AutoModelForCausalLM.from_pretrained("./sha256-0123", dtype=torch.float32)
    ids = torch.tensor([IDS[:9]])
    (tmp_path / "sha256-0123").rename(file)
    expected = qlorapp.AutoModelForCausalLM.from_pretrained(file, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, expected(input_ids=ids).logits, atol=0, rtol=0)


def test_a_file_of_a_repository(tmp_path, monkeypatch):
    file = exported(write(tmp_path / "model"), "Q8_0")
    hub = tmp_path / "hub"
    cached(hub, "models", "some/model-GGUF", [file])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    model = qlorapp.AutoModelForCausalLM.from_pretrained("some/model-GGUF", gguf_file=file.name, local_files_only=True)
    assert model.model.layers[0].mlp.down_proj.quant_state.quant_type == "q8_0"
    with pytest.raises(
        FileNotFoundError, match=r"'none.gguf' must be .* in the repository 'some/model-GGUF'.*hf download some/model"
    ):
        qlorapp.AutoModelForCausalLM.from_pretrained("some/model-GGUF", gguf_file="none.gguf", local_files_only=True)


def test_bad_input(tmp_path):
    folder = write(tmp_path / "model")
    file = exported(folder, "Q8_0")
    with pytest.raises(FileNotFoundError, match="gguf_file must be a file of the folder"):
        qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="none.gguf")
    with pytest.raises(ValueError, match="the GGUF file .* is for AutoModelForCausalLM, with its own config"):
        qlorapp.AutoModelForCausalLM.from_pretrained(file, num_hidden_layers=1)
    with pytest.raises(ValueError, match="is for AutoModelForCausalLM.*got AutoModelForSequenceClassification"):
        qlorapp.AutoModelForSequenceClassification.from_pretrained(file)
    planned = peer.run_cli("plan", "--model", folder, "--requantize", "nf4", "--gpu", "T4", check=False)
    assert planned.returncode == 2 and "is for a GGUF file" in planned.stderr
    failed = peer.run_cli("eval", "--model", folder, "--data", "x", "--requantize", "nf4", check=False)
    assert failed.returncode == 2 and "is for a GGUF file" in failed.stderr
    model = qlorapp.AutoModelForCausalLM.from_pretrained(file)
    with pytest.raises(ValueError, match="blocks of a GGUF file have no form"):
        model.save_pretrained(tmp_path / "saved")
    anew = qlorapp.AutoModelForCausalLM.from_pretrained(
        file, quantization_config=qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    assert anew.model.layers[0].mlp.down_proj.quant_state.quant_type == "nf4"
    assert isinstance(peft.PeftModel(anew, peft.LoraConfig(target_modules="all-linear")), peft.PeftModel)
