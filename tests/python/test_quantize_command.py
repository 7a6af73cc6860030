# SPDX-License-Identifier: Apache-2.0
"""`qlorapp quantize` beside what transformers writes of a model that bitsandbytes quantized."""

import json

import peer
import pytest
import torch
from safetensors import safe_open

pytest.importorskip("bitsandbytes")
import transformers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SOURCES = [("float32", False), ("bfloat16", True), ("float16", False)]


@pytest.fixture(scope="module", params=SOURCES, ids=lambda source: f"{source[0]}{' tied' * source[1]}")
def folders(request, tmp_path_factory):
    """A float folder, the peer's four-bit folder of it, ours, and the dtype."""
    dtype, tied = request.param
    root = tmp_path_factory.mktemp("quantize")
    peer.write_llama(root / "float", dtype=DTYPES[dtype], tie_word_embeddings=tied)
    peer.load_4bit(root / "float", DTYPES[dtype]).save_pretrained(root / "theirs")
    arguments = ["quantize", "--model", root / "float", "--output", root / "ours", "--compute_dtype", dtype, "--compat", "bnb"]
    peer.run_cli(*arguments)
    return root, DTYPES[dtype]


def tensors_of(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118  (keys() is all it has)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


IDS = torch.arange(3, 43).view(2, 20)


def test_tensors_have_the_peers_names_dtypes_shapes_and_bytes(folders):
    root, _ = folders
    (ours, metadata), (theirs, their_metadata) = tensors_of(root / "ours"), tensors_of(root / "theirs")
    assert set(ours) == set(theirs) and metadata == their_metadata
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_the_file_is_the_peers_to_the_byte(folders):
    root, _ = folders
    assert (root / "ours" / "model.safetensors").read_bytes() == (root / "theirs" / "model.safetensors").read_bytes()


def test_json_is_the_peers_to_the_byte(folders):
    root, _ = folders
    for name in ("config.json", "generation_config.json"):
        assert (root / "ours" / name).read_text() == (root / "theirs" / name).read_text(), name
    theirs = {file.name for file in (root / "theirs").iterdir()}
    assert {file.name for file in (root / "ours").iterdir()} == theirs | {"MANIFEST.json"}


def test_transformers_loads_it_and_computes_what_the_peers_folder_computes(folders):
    root, dtype = folders
    ours, theirs = (peer.load_4bit(root / name, dtype) for name in ("ours", "theirs"))
    assert type(ours.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert torch.equal(logits(ours, IDS), logits(theirs, IDS))


def test_we_load_the_peers_folder_with_its_codes(folders):
    import qlorapp

    root, dtype = folders
    ours = qlorapp.AutoModelForCausalLM.from_pretrained(root / "theirs", dtype=torch.float32)
    for name, weight in qlorapp.load_model(str(root / "theirs"), compute_dtype=torch.float32).named_weights():
        if isinstance(weight, qlorapp.QuantizedTensor):
            packed = tensors_of(root / "theirs")[0][name]
            assert torch.equal(weight.packed.flatten(), packed.flatten()), name
    if dtype == torch.float32:
        theirs = peer.load_4bit(root / "theirs", dtype)
        expected = logits(theirs, IDS)
        assert torch.allclose(ours(input_ids=IDS).logits, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


OTHER_OPTIONS = {"nearest": [], "plain scales": ["--double_quant", "false"], "fp4": ["--quant_type", "fp4"]}


@pytest.mark.parametrize("options", OTHER_OPTIONS.values(), ids=OTHER_OPTIONS)
def test_what_the_other_options_write_loads_too(tmp_path, options):
    peer.write_llama(tmp_path / "float")
    arguments = ["--model", tmp_path / "float", "--output", tmp_path / "ours", "--compute_dtype", "float32"]
    peer.run_cli("quantize", *arguments, *options)
    model = peer.load_4bit(tmp_path / "ours")
    quant_type = "fp4" if "fp4" in options else "nf4"
    wanted = {"bnb_4bit_use_double_quant": "--double_quant" not in options, "bnb_4bit_quant_type": quant_type}
    state = model.model.layers[1].self_attn.q_proj.weight.quant_state
    assert (state.nested, state.quant_type) == tuple(wanted.values())
    live = peer.load_4bit(tmp_path / "float", **wanted)
    expected = logits(live, IDS)
    # Nested codes may differ by one where the peer's are not the nearest; without them all codes are the same.
    tolerance = 2e-2 if wanted["bnb_4bit_use_double_quant"] else 0.0
    assert (logits(model, IDS) - expected).abs().max() <= tolerance * expected.abs().max()


def test_training_goes_on_from_a_quantized_folder_as_from_the_float_one(tmp_path):
    """The same codes either way: the same adapter, to the byte."""
    peer.write_llama(tmp_path / "float")
    peer.write_rows(tmp_path / "rows.jsonl", 8)
    peer.run_cli("quantize", "--model", tmp_path / "float", "--output", tmp_path / "four-bit")
    run = ["--data", tmp_path / "rows.jsonl", "--max_steps", 3, "--target_modules", "all-linear"]
    for name in ("float", "four-bit"):
        peer.run_cli("train", "--model", tmp_path / name, "--output", tmp_path / f"from {name}", *run)
    files = [(tmp_path / f"from {name}" / "adapter_model.safetensors").read_bytes() for name in ("float", "four-bit")]
    assert files[0] == files[1]


def test_a_quantized_folder_is_not_quantized_again_and_nothing_is_written_over(tmp_path):
    peer.write_llama(tmp_path / "float")
    peer.run_cli("quantize", "--model", tmp_path / "float", "--output", tmp_path / "ours")
    again = peer.run_cli("quantize", "--model", tmp_path / "ours", "--output", tmp_path / "again", check=False)
    assert again.returncode == 2 and "quantized already" in again.stderr and not (tmp_path / "again").exists()
    over = peer.run_cli("quantize", "--model", tmp_path / "float", "--output", tmp_path / "ours", check=False)
    assert over.returncode == 2 and "new or empty" in over.stderr
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]["load_in_4bit"] is True
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").quantization_config["quant_method"] == "bitsandbytes"


def test_python_writes_the_commands_bytes_with_the_commands_defaults(tmp_path):
    import qlorapp

    peer.write_llama(tmp_path / "float", dtype=torch.float32)
    peer.run_cli("quantize", "--model", tmp_path / "float", "--output", tmp_path / "command")
    qlorapp.quantize_checkpoint(str(tmp_path / "float"), str(tmp_path / "python"))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "command" / name).read_bytes(), name
