# SPDX-License-Identifier: Apache-2.0
"""Loading streams: a checkpoint of more than a gigabyte costs little more memory than the four-bit model that comes of it,
on the host and on a GPU; there the codes are those of the CPU."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 2048, 8192, 9, 32, 8, 8000
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
MB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """bfloat16 in two files with an index, as large models come."""
    folder = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(1)
    layer = {name: torch.randn(shape, generator=generator).mul_(0.02).bfloat16() for name, shape in LINEAR.items()}
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for i in range(LAYERS):
        shard = shards[i * 2 // LAYERS]
        for name, weight in layer.items():
            shard[f"model.layers.{i}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            shard[f"model.layers.{i}.{name}.weight"] = norm
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    shards[1] |= {"model.embed_tokens.weight": embedding, "model.norm.weight": norm, "lm_head.weight": embedding}
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensor.clone() for name, tensor in shard.items()}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert total >= 10**9
    yield folder
    shutil.rmtree(folder)


def four_bit_bytes() -> int:
    """Codes, eight-bit scales, their scales and offset; embeddings, head and norms in two bytes."""
    total = 2 * (2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN)
    for rows, columns in LINEAR.values():
        blocks = rows * columns // 64
        total += LAYERS * (rows * columns // 2 + blocks + 4 * -(-blocks // 256) + 4)
    return total


MEASURE = """
import sys, torch
from qlorapp import _C
torch.set_num_threads(2)

def kilobytes(key):
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith(key)))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the high-water mark starts anew from here
before = kilobytes("VmHWM")
assert before - kilobytes("VmRSS") < 4096
model = _C.load_model(sys.argv[1], compute_dtype=torch.bfloat16)
print(kilobytes("VmHWM") - before, kilobytes("VmRSS") - before, model.weight_bytes())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the high-water mark is read from /proc")
def test_the_peak_while_loading_is_the_quantized_model_two_tensors_and_a_little(checkpoint, build_dir):
    environment = {**os.environ, "PYTHONPATH": str(build_dir / "python"), "OMP_NUM_THREADS": "2"}
    arguments = [sys.executable, "-c", MEASURE, str(checkpoint)]
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    peak, resident, weight_bytes = map(int, result.stdout.split())
    largest = max(rows * columns * 2 for rows, columns in LINEAR.values())
    assert weight_bytes == four_bit_bytes()
    assert resident * 1024 >= 0.9 * weight_bytes  # the measure sees what it is to see
    assert peak * 1024 <= weight_bytes + 2 * largest + 64 * MB, f"{peak // 1024} MB for a model of {weight_bytes // MB} MB"


MEASURE_ON_GPU = """
import sys, torch
from qlorapp import _C

torch.zeros(1, device="cuda")

def load(folder):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = _C.load_model(folder, compute_dtype=torch.bfloat16, device=torch.device("cuda", 0))
    return model, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

model, peak, kept = load(sys.argv[1])
on_cpu = _C.load_model(sys.argv[1], compute_dtype=torch.bfloat16)
again, stored_peak, stored_kept = load(sys.argv[2])
assert model.weight_bytes() == on_cpu.weight_bytes() == again.weight_bytes()
for (name, got), (_, cpu), (_, stored) in zip(model.named_weights(), on_cpu.named_weights(), again.named_weights(), strict=True):
    if isinstance(cpu, torch.Tensor):
        assert torch.equal(got.cpu(), cpu) and torch.equal(stored.cpu(), cpu), name
    else:
        assert torch.equal(got.packed.cpu(), cpu.packed) and torch.equal(stored.packed.cpu(), cpu.packed), name
        assert torch.equal(stored.absmax.cpu(), cpu.absmax), name
print(peak, kept, stored_peak, stored_kept, model.weight_bytes())
"""


def test_a_gpu_holds_little_more_than_the_model_while_it_loads(checkpoint, build_dir, tmp_path, cuda):
    """From bf16 and from four bits. The scales may differ from the CPU's in the last bit of their mean; the codes may not."""
    environment = {**os.environ, "PYTHONPATH": str(build_dir / "python")}
    quantize = [
        build_dir / "qlorapp",
        "quantize",
        "--model",
        checkpoint,
        "--output",
        tmp_path / "nf4",
        "--compute_dtype",
        "bfloat16",
    ]
    subprocess.run(quantize, check=True, capture_output=True)
    arguments = [sys.executable, "-c", MEASURE_ON_GPU, str(checkpoint), str(tmp_path / "nf4")]
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    peak, kept, stored_peak, stored_kept, weight_bytes = map(int, result.stdout.split())
    assert weight_bytes <= kept <= weight_bytes + 4 * MB and weight_bytes <= stored_kept <= weight_bytes + 4 * MB
    assert peak <= kept + 64 * MB, f"{(peak - kept) // MB} MB beyond the model"
    assert stored_peak <= stored_kept + 64 * MB, f"{(stored_peak - stored_kept) // MB} MB beyond the model"
