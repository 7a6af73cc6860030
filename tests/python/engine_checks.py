# SPDX-License-Identifier: Apache-2.0
"""Models of transformers' own class over the engine, and what the engine's pass and transformers' forward have in common."""

import peft
import pytest
import qlorapp
import torch
from tiny_llama import LLAMA3, write_checkpoint

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, num_key_value_heads=2, tie_word_embeddings=request.param == "tied", rope_parameters=LLAMA3)
    return path


def load(folder, four_bit=True, **options):
    config = qlorapp.BitsAndBytesConfig(**NF4) if four_bit else None
    return qlorapp.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def with_lora(model, seed=5, **lora):
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def base(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class transformers_alone:
    """Inside, transformers' forward computes."""

    def __init__(self, model):
        self.engine = base(model).forward.engine

    def __enter__(self):
        self.engine.enabled = False

    def __exit__(self, *error):
        self.engine.enabled = True


def reasons(model):
    return base(model).forward.engine._told


def losses_and_gradients(model, batch, **options):
    model.zero_grad()
    output = model(**batch, **options)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), output.logits.detach(), gradients


def graph_of(tensor):
    """Names of the nodes of its autograd graph."""
    seen, nodes = set(), [tensor.grad_fn]
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            nodes += [other for other, _ in node.next_functions if other is not None]
    return " ".join(node.name() for node in seen)


def assert_same_pass(model, batch, **options):
    """Engine and transformers' forward, loss, logits where there are tokens, and gradients; the engine has really computed."""
    known = set(reasons(model))
    loss, logits, gradients = losses_and_gradients(model, batch, **options)
    assert reasons(model) == known, "the engine did not compute"
    with transformers_alone(model):
        loss_2, logits_2, gradients_2 = losses_and_gradients(model, batch, **options)
    torch.testing.assert_close(loss, loss_2, rtol=1e-6, atol=1e-6)
    if "attention_mask" in batch and logits.shape == logits_2.shape and logits.shape[1] == batch["attention_mask"].shape[1]:
        here = batch["attention_mask"] != 0
        logits, logits_2 = logits[here], logits_2[here]
    torch.testing.assert_close(logits, logits_2, rtol=1e-4, atol=1e-4)
    assert set(gradients) == set(gradients_2) != set()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, gradients_2[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_pass_value(model, batch):
    with torch.no_grad():
        mine = model(**batch).loss
        with transformers_alone(model):
            torch.testing.assert_close(mine, model(**batch).loss, rtol=1e-5, atol=1e-5)
