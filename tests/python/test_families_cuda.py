# SPDX-License-Identifier: Apache-2.0
"""Each family on a GPU, beside the CPU: logits, tokens, gradients with every way to keep activations, float16; features of a GPU."""

import logging
import re

import peer
import pytest
import qlorapp
import torch
import transformers
from engine_checks import base, losses_and_gradients, with_lora
from families import FAMILIES, FIRST, batch, relative
from family_runs import engine, options_json, rows, same_bits, train
from qlorapp import _C
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


@pytest.mark.feature("generate")
def test_logits_and_tokens_are_those_of_the_cpu(folder, cuda):
    gpu, cpu = load(folder, "cuda"), load(folder, "cpu")
    present = batch()["attention_mask"] == 1
    with torch.no_grad():
        assert relative(gpu(**on("cuda")).logits.cpu()[present], cpu(**batch()).logits[present]) <= 1e-5
    wanted = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = torch.arange(3, 19).view(2, 8)
    assert gpu.generate(prompts.cuda(), **wanted).tolist() == cpu.generate(prompts, **wanted).tolist()


@pytest.mark.feature("train")
def test_loss_and_gradients_are_those_of_the_cpu(folder, cuda):
    model, _ = trained(folder, "cuda")
    cpu, _ = trained(folder, "cpu")
    cpu.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items() if "lora_" in name}, strict=False)
    (loss, _, ours), (expected, _, theirs) = losses_and_gradients(model, on("cuda")), losses_and_gradients(cpu, batch())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, tensor in theirs.items():
        assert relative(ours[name].cpu(), tensor) <= 2e-4, name


@pytest.mark.feature("checkpoint_keep")
def test_every_way_to_keep_activations_gives_the_same_bits(folder, cuda):
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


@pytest.mark.feature("float16")
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


# --- runs of the engine: one case of each architecture

each = pytest.mark.parametrize("folder", FIRST, indirect=True)


@pytest.fixture
def data(tmp_path):
    return rows(tmp_path)


def run(folder, data, out, **options):
    return train(folder, data, out, device="cuda", full_determinism=True, **options)


@each
@pytest.mark.feature("full_determinism")
@pytest.mark.usefixtures("cuda")
def test_a_run_with_dropout_repeats_its_bits(folder, data, tmp_path):
    first = run(folder, data, tmp_path, dropout=0.1)
    assert same_bits(first, run(folder, data, tmp_path, dropout=0.1))
    assert not same_bits(first, run(folder, data, tmp_path, dropout=0.2))


@each
@pytest.mark.feature("resume")
@pytest.mark.usefixtures("cuda")
def test_a_run_that_continues_ends_in_the_same_bits(folder, data, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "dropout": 0.1}
    whole = run(folder, data, tmp_path / "whole", **options)
    again = run(folder, data, tmp_path / "again", resume_from=str(tmp_path / "whole/checkpoint-2"), **options)
    assert all(torch.equal(again[2][name], tensor) for name, tensor in whole[2].items())


@each
@pytest.mark.feature("base_on_host")
@pytest.mark.usefixtures("cuda")
def test_a_base_in_host_memory_trains_the_same_bits(folder, data, tmp_path):
    host = run(folder, data, tmp_path, base_on_host=True)
    assert same_bits(host, run(folder, data, tmp_path))
    model = engine(folder, device="cuda", base_on_host=True)
    assert {weight.device.type for _, weight in model.named_weights() if isinstance(weight, _C.QuantizedTensor)} == {"cpu"}


@each
@pytest.mark.feature("cuda_graphs")
@pytest.mark.usefixtures("cuda")
def test_recorded_steps_have_the_same_bits(folder, data, tmp_path, caplog):
    """Rows of one length: steps repeat."""
    same = [{"input_ids": row["input_ids"][:5], "labels": row["input_ids"][:5]} for row in data]
    with caplog.at_level(logging.INFO, logger="qlorapp"):
        plain, recorded = (
            run(folder, same, tmp_path, max_steps=6, cuda_graphs=on, dtype=torch.bfloat16) for on in (False, True)
        )
    assert same_bits(recorded, plain)
    assert int(re.search(r"cuda_graphs: (\d+) micro-steps", caplog.text)[1]) > 0


@each
@pytest.mark.feature("fp8")
@pytest.mark.usefixtures("cuda")
def test_products_in_eight_bits_are_near_to_the_cpus(folder, request, tmp_path):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU multiplies no eight bits")
    peer.write_llama(tmp_path / "wide", **{**FAMILIES[request.node.callspec.params["folder"]], "num_key_value_heads": 4})
    given = {name: tensor.repeat(2, 1) for name, tensor in batch().items()}

    def gradient(device, fp8):
        model = engine(tmp_path / "wide", device=device, dtype=torch.bfloat16)
        _C.StepRunner(model, options_json(tmp_path, fp8=fp8))  # sets the model up
        unpadded = model.unpad(*(given[name].to(device) for name in ("input_ids", "attention_mask", "labels")))
        model.zero_grad()
        model.forward_backward(unpadded, torch.ones((), device=device))
        return torch.cat([model.gradient(i).flatten().cpu() for i in range(len(model.parameters()))])

    gpu, cpu, plain = gradient("cuda", True), gradient("cpu", True), gradient("cpu", False)
    assert relative(gpu, cpu) <= relative(cpu, plain)
