# SPDX-License-Identifier: Apache-2.0
"""Blocks of a GGUF file on a GPU, beside the CPU: the same bits, products, losses and gradients."""

import os

import numpy
import peer
import pytest
import qlorapp
import torch
from conftest import ROOT

pytestmark = pytest.mark.skipif("QLORAPP_TEST_GPU" not in os.environ, reason="needs a GPU: set QLORAPP_TEST_GPU=1")
#: Elements and bytes of a block.
KINDS = {"q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210)}  # fmt: skip


def weight(kind, rows, columns):
    """Random bytes, but for scales that are finite."""
    elements, size = KINDS[kind]
    data = numpy.random.default_rng(1).integers(0, 256, (rows, columns // elements, size), numpy.uint8)
    scales = {"q6_k": [208]}.get(kind, [0, 2] if kind in ("q4_1", "q5_1", "q4_k", "q5_k") else [0])
    for at in scales:
        data[..., at + 1] &= 0xBB  # below 2
    return torch.from_numpy(data.reshape(-1, 1)), elements


@pytest.mark.parametrize("columns", [256, 2304])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_products(kind, columns):
    packed, elements = weight(kind, 70, columns)
    none, shape = torch.empty(0), [70, columns]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        here = torch.ops.qlorapp.dequantize_4bit(packed, none, shape, elements, kind, dtype)
        there = torch.ops.qlorapp.dequantize_4bit(packed.cuda(), none.cuda(), shape, elements, kind, dtype)
        assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))
    for rows in (1, 40):
        x = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
        y = torch.ops.qlorapp.linear_4bit(x, packed.cuda(), none.cuda(), None, None, shape, elements, 256, kind)
        dense = torch.ops.qlorapp.dequantize_4bit(packed.cuda(), none.cuda(), shape, elements, kind, torch.float64)
        expected = x.double() @ dense.T
        assert (y.double() - expected).norm() <= 5e-3 * expected.norm()


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q6_K", "Q8_0", "Q4_0"])
def test_training(kind, tmp_path):
    """With the adapters beside the weights, and base_on_host."""
    peer.write_llama(
        tmp_path / "model", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, vocab_size=704
    )
    for path in (ROOT / "examples" / "data" / "tiny-llama").glob("tokenizer*"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    qlorapp.export(tmp_path / "model", gguf=tmp_path / "a.gguf", type=kind, verify=False)
    ids, results = torch.tensor([list(range(3, 40)), list(range(40, 77))]), []
    maps = ["cpu", "cuda", {"": 0, "model.layers": "cpu"}]
    for device_map in maps:
        model = qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "a.gguf", dtype=torch.float32, device_map=device_map)
        model = peer.add_adapters(model)
        generator = torch.Generator().manual_seed(3)  # of one device: the same adapter everywhere
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        loss = model(input_ids=ids.to(model.device), labels=ids.to(model.device)).loss
        loss.backward()
        results.append([loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
    for other in results[1:]:
        for here, there in zip(results[0], other, strict=True):
            assert (here - there).norm() <= 1e-3 * here.norm() + 1e-6
