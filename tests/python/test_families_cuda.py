# SPDX-License-Identifier: Apache-2.0
"""Each family on a GPU, beside the CPU: logits, tokens, gradients with every way to keep activations, a base on the host, float16."""

import peer
import pytest
import qlorapp
import torch
import transformers
from engine_checks import base, losses_and_gradients, with_lora
from families import FAMILIES, batch, relative
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("family")
    peer.write_llama(path, **FAMILIES[request.param])
    return path


def load(folder, device, dtype=torch.float32):
    options = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device, quantization_config=options)


def on(device):
    return {name: tensor.to(device) for name, tensor in batch().items()}


def trained(folder, device, dtype=torch.float32):
    model = with_lora(load(folder, device, dtype)).train()
    engine = base(model).forward.engine
    engine.keep = lambda keep: None  # which transformers' flags choose otherwise
    return model, engine.core


def test_logits_and_tokens_are_those_of_the_cpu(folder, cuda):
    gpu, cpu = load(folder, "cuda"), load(folder, "cpu")
    present = batch()["attention_mask"] == 1
    with torch.no_grad():
        assert relative(gpu(**on("cuda")).logits.cpu()[present], cpu(**batch()).logits[present]) <= 1e-5
    wanted = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = torch.arange(3, 19).view(2, 8)
    assert gpu.generate(prompts.cuda(), **wanted).tolist() == cpu.generate(prompts, **wanted).tolist()


def test_every_way_to_keep_activations_gives_the_same_bits_and_the_cpus_gradients(folder, cuda):
    model, core = trained(folder, "cuda")

    def gradients(keep, **memory):
        core.set_memory(**memory)
        core.set_keep(keep)
        return losses_and_gradients(model, on("cuda"))[2]

    everything = gradients("everything")
    for keep in ("attention_only", "input_only", "input_on_host", "every:2"):
        assert all(torch.equal(everything[name], tensor) for name, tensor in gradients(keep).items()), keep
    on_host = gradients("input_on_host", base_on_host=True)
    assert all(torch.equal(everything[name], tensor) for name, tensor in on_host.items())
    cpu, _ = trained(folder, "cpu")
    cpu.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items() if "lora_" in name}, strict=False)
    for name, tensor in losses_and_gradients(cpu, batch())[2].items():
        assert relative(everything[name].cpu(), tensor) <= 2e-4, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_near_to_32(folder, cuda, dtype):
    half, _ = trained(folder, "cuda", dtype)
    whole, _ = trained(folder, "cuda")
    whole.load_state_dict({name: tensor for name, tensor in half.state_dict().items() if "lora_" in name}, strict=False)
    bound = 0.02 if dtype == torch.float16 else 0.1
    loss, _, gradients = losses_and_gradients(half, on("cuda"))
    expected, _, exact = losses_and_gradients(whole, on("cuda"))
    assert abs(loss.item() - expected.item()) <= bound * abs(expected.item())
    flat, wanted = (torch.cat([g[name].float().flatten() for name in exact]) for g in (gradients, exact))
    assert relative(flat, wanted) <= 5 * bound


@pytest.fixture(scope="module")
def beyond_float16(tmp_path_factory):
    """Gemma 3 with norms that add more to the residual stream than float16 holds, as published ones do."""
    path = tmp_path_factory.mktemp("large")
    peer.write_llama(path, **FAMILIES["Gemma 3"])
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "post_feedforward_layernorm" in name or "post_attention_layernorm" in name:
            tensor.add_(4e4)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_a_stream_beyond_float16_is_trained_in_float16(beyond_float16, cuda, tmp_path):
    plain = transformers.AutoModelForCausalLM.from_pretrained(beyond_float16, dtype=torch.float16).cuda().eval()
    with torch.no_grad():
        assert not plain(**on("cuda")).logits.isfinite().all()
    half, _ = trained(beyond_float16, "cuda", torch.float16)
    whole, _ = trained(beyond_float16, "cuda")
    whole.load_state_dict({name: tensor for name, tensor in half.state_dict().items() if "lora_" in name}, strict=False)
    (loss, _, gradients), (expected, _, exact) = (losses_and_gradients(model, on("cuda")) for model in (half, whole))
    assert abs(loss.item() - expected.item()) <= 0.02 * expected.item()
    flat, wanted = (torch.cat([g[name].float().flatten() for name in exact]) for g in (gradients, exact))
    assert relative(flat, wanted) <= 0.1
    peer.write_rows(tmp_path / "rows.jsonl", 32)
    peer.run_cli(
        "train", "--model", beyond_float16, "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "run", "--max_steps", 40, "--fp16",
        "true", "--learning_rate", 2e-3, "--logging_steps", 1, "--save_strategy", "no",
    )  # fmt: skip
    losses = [entry["loss"] for entry in peer.history(tmp_path / "run")]
    assert all(torch.tensor(losses).isfinite()) and sum(losses[-5:]) < 0.8 * sum(losses[:5])
