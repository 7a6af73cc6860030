# SPDX-License-Identifier: Apache-2.0
"""`qlorapp merge` and qlorapp.merge beside PEFT's merge_and_unload, and beside the four-bit model with its adapter."""

import json
import re
import shutil

import peer
import pytest
import torch

pytest.importorskip("bitsandbytes")
import peft
import qlorapp
import transformers
from safetensors.torch import load_file, save_file
from test_peft_variants import VARIANTS, their_model

IDS = torch.arange(3, 99).view(4, 24)
TABLES = {name for name, options in VARIANTS.items() if "modules_to_save" in options}
# Every variant over a head of its own, and those in which a tied one matters.
CASES = [(name, False) for name in VARIANTS] + [(name, True) for name in VARIANTS if name in TABLES or name == "plain"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Float folders, and bitsandbytes' folders of them."""
    root = tmp_path_factory.mktemp("merge")
    for tied in (False, True):
        peer.write_llama(root / f"float {tied}", tie_word_embeddings=tied)
        peer.load_4bit(root / f"float {tied}").save_pretrained(root / f"codes {tied}")
    peer.write_llama(root / "bfloat16", dtype=torch.bfloat16)
    return root


def plain(folder, dtype=torch.float32):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)


def trained(model, **options):
    """PEFT's adapter on a plain model, with every value away from its start."""
    return peer.shaken(peer.add_adapters(model, **{"r": 4, "lora_alpha": 10, **options}))


def tensors_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


@pytest.mark.parametrize("name, tied", CASES, ids=[f"{name}{' (tied)' * tied}" for name, tied in CASES])
def test_the_original_weights_get_what_pefts_merge_gives_them(root, tmp_path, name, tied):
    folder = root / f"float {tied}"
    theirs = trained(plain(folder), **VARIANTS[name])
    theirs.save_pretrained(tmp_path / "adapter")
    expected = logits(theirs)
    qlorapp.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    merged = theirs.merge_and_unload()
    ours = tensors_of(tmp_path / "merged")
    state = merged.state_dict()
    parted = not torch.equal(state["model.embed_tokens.weight"], state["lm_head.weight"])
    assert set(ours) == set(state) - (set() if parted else {"lm_head.weight"})
    for tensor, value in ours.items():
        assert value.dtype == torch.float32
        assert torch.allclose(value, state[tensor], rtol=0, atol=1e-6 * state[tensor].abs().max().item()), tensor
    loaded = plain(tmp_path / "merged")
    assert loaded.config.tie_word_embeddings is (tied and not parted)
    assert (logits(loaded) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["plain", "DoRA", "both tables, DoRA"])
def test_sixteen_bits_are_rounded_once(root, tmp_path, name):
    theirs = trained(plain(root / "bfloat16"), **VARIANTS[name])  # the 16-bit values in float32
    theirs.save_pretrained(tmp_path / "adapter")
    qlorapp.merge(root / "bfloat16", tmp_path / "adapter", tmp_path / "merged", base="original")
    exact = theirs.merge_and_unload().state_dict()
    ours = tensors_of(tmp_path / "merged")
    in_16_bits = peft.PeftModel.from_pretrained(plain(root / "bfloat16", torch.bfloat16), tmp_path / "adapter")
    peers = in_16_bits.merge_and_unload().state_dict()
    for tensor, value in ours.items():
        assert value.dtype == torch.bfloat16, tensor
        truth = exact[tensor].double()
        step = torch.finfo(torch.bfloat16).eps * 2.0 ** torch.floor(torch.log2(truth.abs().clamp_min(1e-30)))
        # Half a step, and what sums in float32 differ by.
        assert ((value.double() - truth).abs() <= 0.5 * step + 1e-6 * truth.abs().max()).all(), tensor
        apart = (value.double() - peers[tensor].double()).abs()
        assert (apart <= 2 * step + 1e-6 * truth.abs().max()).all(), tensor
        if name == "plain":
            assert (apart > 0).float().mean() <= 1e-3, tensor
    assert transformers.AutoConfig.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


@pytest.mark.parametrize("name, tied", CASES, ids=[f"{name}{' (tied)' * tied}" for name, tied in CASES])
def test_four_bit_codes_with_their_adapter_become_one_float_model(root, tmp_path, name, tied):
    theirs = their_model(root / f"codes {tied}", **VARIANTS[name])
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits
    qlorapp.merge(root / f"codes {tied}", tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (logits(plain(tmp_path / "merged")) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("options", [{}, {"bnb_4bit_use_double_quant": False}, {"bnb_4bit_quant_type": "fp4"}], ids=str)
def test_what_training_saw_of_a_float_folder_is_merged_into_on_demand(root, tmp_path, options):
    trained(plain(root / "bfloat16"), target_modules=["q_proj", "up_proj"]).save_pretrained(tmp_path / "adapter")
    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, **options}
    config = qlorapp.BitsAndBytesConfig(**wanted, llm_int8_skip_modules=["down_proj", "lm_head"])
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(root / "bfloat16", quantization_config=config, dtype=torch.float32)
    ours = peft.PeftModel.from_pretrained(ours, tmp_path / "adapter")
    expected = ours(input_ids=IDS).logits
    qlorapp.merge(
        root / "bfloat16",
        tmp_path / "adapter",
        tmp_path / "merged",
        base="dequantized",
        dtype=torch.float32,
        quantization_config=config,
    )
    assert (logits(plain(tmp_path / "merged")) - expected).abs().max() <= 1e-5 * expected.abs().max()
    before, after = tensors_of(root / "bfloat16"), tensors_of(tmp_path / "merged")
    same = {name for name in after if torch.equal(before[name].float(), after[name])}
    assert {name.split(".")[-2] for name in set(after) - same} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
    }


def test_a_base_that_an_initialization_left_takes_its_adapter_and_another_does_not(root, tmp_path):
    """As the command's training from init_lora_weights='pissa' leaves it."""
    model = qlorapp.load_model(str(root / "float False"), compute_dtype=torch.float32)
    model.add_adapters(json.dumps({"r": 4, "target_modules": "all-linear", "init_lora_weights": "pissa"}), 1)
    batch = model.unpad(IDS)
    expected = batch.pad(model.logits(model.hidden_states(batch, False)))
    model.save_adapter(str(tmp_path / "adapter"), "rest")
    model.save(str(root / "float False"), str(tmp_path / "rest"))
    qlorapp.merge(tmp_path / "rest", tmp_path / "adapter", tmp_path / "merged")
    assert (logits(plain(tmp_path / "merged")) - expected).abs().max() <= 1e-5 * expected.abs().max()
    for other in ("float False", "codes False"):
        with pytest.raises(ValueError, match="trained on the base that its initialization changed"):
            qlorapp.merge(root / other, tmp_path / "adapter", tmp_path / "no")
    assert not (tmp_path / "no").exists()


# --- the folder


def test_shards_have_an_index_and_the_files_beside_the_weights_come_along(root, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(root / "bfloat16", source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text(f"{{}} of {name}")
    (source / "notes.txt").write_text("mine")
    trained(plain(source)).save_pretrained(tmp_path / "adapter")
    calls = []
    qlorapp.merge(source, tmp_path / "adapter", tmp_path / "one", progress=lambda done, total: calls.append((done, total)))
    qlorapp.merge(source, tmp_path / "adapter", tmp_path / "many", max_shard_size="40KB")
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert calls == [(i + 1, len(one)) for i in range(len(one))]
    assert set(one) == set(many) and all(torch.equal(one[name], many[name]) for name in one)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "many").glob("model-*-of-*.safetensors"))
    assert len(shards) > 2 and {shard.name for shard in shards} == set(index["weight_map"].values())
    assert all(tensor in load_file(tmp_path / "many" / shard) for tensor, shard in index["weight_map"].items())
    assert index["metadata"]["total_size"] == 2 * index["metadata"]["total_parameters"] == sum(t.nbytes for t in many.values())
    assert max(sum(t.nbytes for t in load_file(shard).values()) for shard in shards) <= 40_000
    plain(tmp_path / "many").save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    theirs = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    assert set(index) == set(theirs) and set(index["metadata"]) == set(theirs["metadata"])
    names = {file.name for file in source.iterdir()} - {"notes.txt"}
    assert {file.name for file in (tmp_path / "one").iterdir()} == names | {"MANIFEST.json"}
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "one" / name).read_bytes() == (source / name).read_bytes()


def test_tensors_that_no_layer_needs_are_copied(root, tmp_path):
    trained(plain(root / "float False")).save_pretrained(tmp_path / "adapter")
    shutil.copytree(root / "float False", tmp_path / "more")
    more = {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(64),
        "counts": torch.arange(3),
        "vision.patch": torch.ones(2, 3, 4),
    }
    save_file(
        {**load_file(root / "float False" / "model.safetensors"), **more},
        tmp_path / "more" / "model.safetensors",
        {"format": "pt"},
    )
    qlorapp.merge(tmp_path / "more", tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16")
    merged = tensors_of(tmp_path / "merged")
    for name, value in more.items():
        assert torch.equal(merged[name].to(value.dtype), value)
        assert merged[name].dtype == (torch.bfloat16 if value.is_floating_point() else value.dtype)


def refused(message, folder, adapter, output, **options):
    with pytest.raises((ValueError, OSError), match=message):
        qlorapp.merge(folder, adapter, output, **options)
    assert not output.exists()


def test_what_cannot_be_merged_is_refused_by_name_and_leaves_nothing(root, tmp_path):
    adapter = tmp_path / "adapter"
    trained(plain(root / "float False")).save_pretrained(adapter)
    out = tmp_path / "out"
    refused(r"base=original .*stored in four bits \(model\.layers\.0", root / "codes False", adapter, out, base="original")
    refused("original or dequantized; got 'both'", root / "float False", adapter, out, base="both")
    refused("float32, bfloat16, float16", root / "float False", adapter, out, dtype="int8")
    refused("max_shard_size must be above 0", root / "float False", adapter, out, max_shard_size=0)
    refused(
        "needs base='dequantized'",
        root / "float False",
        adapter,
        out,
        quantization_config=qlorapp.BitsAndBytesConfig(load_in_4bit=True),
    )
    refused("the model folder must exist", tmp_path / "nowhere", adapter, out)
    refused("adapter_config.json", root / "float False", tmp_path / "nowhere", out)

    wide = tmp_path / "wide"
    peer.write_llama(wide, hidden_size=128)
    refused("must have shape .* for this base model; got", wide, adapter, out)

    config = json.loads((adapter / "adapter_config.json").read_text())
    for key, value in {"lora_bias": True, "trainable_token_indices": [3], "peft_type": "LOHA"}.items():
        changed = tmp_path / key
        shutil.copytree(adapter, changed)
        (changed / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        refused(key, root / "float False", changed, out)

    extra = tmp_path / "extra"
    shutil.copytree(root / "float False", extra)
    tensors = load_file(extra / "model.safetensors")
    for name, tensor in {"model.layers.1.mlp.up_proj.weight": 1e6, "model.norm.weight": float("nan")}.items():
        save_file({**tensors, name: torch.full_like(tensors[name], tensor)}, extra / "model.safetensors", {"format": "pt"})
        refused(f"'{re.escape(name)}' must be finite in float16", extra, adapter, out, dtype="float16")

    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("mine")
    with pytest.raises(ValueError, match="new or empty"):
        qlorapp.merge(root / "float False", adapter, full)
    assert [file.name for file in full.iterdir()] == ["mine"]


# --- the command


def test_the_command_writes_the_same_and_says_what_it_took(root, tmp_path):
    trained(plain(root / "bfloat16")).save_pretrained(tmp_path / "adapter")
    arguments = ["merge", "--model", root / "bfloat16", "--adapter", tmp_path / "adapter", "--output"]
    said = peer.run_cli(*arguments, tmp_path / "one", "--max_shard_size", "40KB").stdout
    assert f"merged checkpoint written to {tmp_path / 'one'}" in said and "drift" not in said
    qlorapp.merge(root / "bfloat16", tmp_path / "adapter", tmp_path / "two", max_shard_size="40KB")
    for file in (tmp_path / "two").iterdir():
        assert (tmp_path / "one" / file.name).read_bytes() == file.read_bytes()
    amount, unit = re.search(r"peak memory of tensors: ([\d.]+) (KiB|MiB)", said).groups()
    assert (
        float(amount) * {"KiB": 1 / 1024, "MiB": 1}[unit] < 1.5
    )  # a buffer of 1 MiB; the model has 0.5 MiB and float32 copies


@pytest.mark.parametrize("base, most", [("original", None), ("dequantized", 2e-5)])
def test_the_drift_is_that_of_the_logits(root, tmp_path, base, most):
    trained(plain(root / "float False")).save_pretrained(tmp_path / "adapter")
    arguments = [
        "--model",
        root / "float False",
        "--adapter",
        tmp_path / "adapter",
        "--output",
        tmp_path / "out",
        "--base",
        base,
    ]
    said = peer.run_cli("merge", *arguments, "--drift", "--device", "cpu").stdout
    change, largest, same = map(
        float, re.search(r"at most (\S+) .*largest logit: ([\d.e+-]+)\).* after (\d+) of 32", said).groups()
    )
    config = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    before = qlorapp.AutoModelForCausalLM.from_pretrained(root / "float False", quantization_config=config, dtype=torch.float32)
    before = peft.PeftModel.from_pretrained(before, tmp_path / "adapter")
    ids = (torch.arange(32) * 7919 + 1).remainder(peer.VOCAB).view(1, -1)
    with torch.no_grad():
        wanted, found = before(input_ids=ids).logits, plain(tmp_path / "out")(input_ids=ids).logits
    assert largest == pytest.approx(wanted.abs().max().item(), rel=0.01)
    assert same == (wanted.argmax(-1) == found.argmax(-1)).sum()
    if most is None:
        assert change == pytest.approx((wanted - found).abs().max().item(), rel=0.01) and change > 1e-3 * largest
    else:
        assert change <= most * largest


def test_an_option_without_effect_is_refused(root, tmp_path):
    arguments = ["merge", "--model", root / "float False", "--adapter", tmp_path, "--output", tmp_path / "out"]
    for option, message in {
        "--device cpu": "--device needs --drift",
        "--block_size 128": "--block_size needs --base dequantized",
    }.items():
        refusal = peer.run_cli(*arguments, *option.split(), check=False)
        assert refusal.returncode == 2 and message in refusal.stderr


def test_a_base_without_its_head_is_quantized_first_too(root, tmp_path):
    adapter = tmp_path / "adapter"
    trained(plain(root / "float True"), target_modules=["q_proj", "up_proj"]).save_pretrained(adapter)
    headless = tmp_path / "headless"
    headless.mkdir()
    shutil.copy(root / "float True" / "config.json", headless)
    save_file(
        {name.removeprefix("model."): t for name, t in tensors_of(root / "float True").items()}, headless / "model.safetensors"
    )
    for base in ("original", "dequantized"):
        qlorapp.merge(root / "float True", adapter, tmp_path / base, base=base)
        qlorapp.merge(headless, adapter, tmp_path / f"{base} headless", base=base)
        expected = {name.removeprefix("model."): t for name, t in tensors_of(tmp_path / base).items()}
        found = tensors_of(tmp_path / f"{base} headless")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())
    assert any(
        not torch.equal(a, tensors_of(tmp_path / "original")[n]) for n, a in tensors_of(tmp_path / "dequantized").items()
    )


def test_a_buffer_in_float64_gets_the_dtype_that_is_asked_for(root, tmp_path):
    adapter = tmp_path / "adapter"
    trained(plain(root / "float True"), target_modules=["q_proj"]).save_pretrained(adapter)
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(root / "float True" / "config.json", base)
    tensors = tensors_of(root / "float True")
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].double()}, base / "model.safetensors")
    qlorapp.merge(base, adapter, tmp_path / "merged", dtype="bfloat16")
    merged = tensors_of(tmp_path / "merged")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert torch.equal(merged["model.norm.weight"], tensors["model.norm.weight"].bfloat16())


def test_stored_transposes_in_four_bits_are_refused(root, tmp_path):
    adapter = tmp_path / "adapter"
    trained(plain(root / "float True"), target_modules=["q_proj"]).save_pretrained(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": True}))
    with pytest.raises(ValueError, match=r"fan_in_fan_out.*merge_and_unload"):
        qlorapp.merge(root / "codes True", adapter, tmp_path / "merged")
