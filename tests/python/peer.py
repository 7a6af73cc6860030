# SPDX-License-Identifier: Apache-2.0
"""The peer of the end-to-end tests: tiny Llama by transformers, four bits by bitsandbytes, adapters by PEFT; on the CPU unless asked."""

import json
import os
import pathlib
import subprocess

import command_server
import peft
import torch
import transformers

VOCAB = 128


def write_llama(
    folder: pathlib.Path, *, dtype: torch.dtype = torch.float32, seed: int = 1, family: str = "Llama", **config
) -> None:
    """A float checkpoint. Widths are multiples of 64, where bitsandbytes' CPU kernels are right. Another family has lively norms and biases."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256,
             "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(seed)
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind(kind.config_class(**{**sizes, **config}))
    for parameter in model.parameters():  # transformers' deviation of 0.02 gives logits that are all alike
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.12)
        elif family != "Llama" or config.get("attention_bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(dtype).save_pretrained(folder)


def load_4bit(
    folder: pathlib.Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **options
) -> transformers.PreTrainedModel:
    """A checkpoint in four bits: quantized now, or with the codes that it holds already.

    In training mode, and to be left there: in evaluation mode bitsandbytes multiplies in bfloat16 on CPUs that can.
    """
    stored = json.loads((folder / "config.json").read_text())
    holds_codes, kind = "quantization_config" in stored, getattr(transformers, stored["architectures"][0])
    wanted = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
              "bnb_4bit_compute_dtype": dtype}  # fmt: skip
    config = None if holds_codes and not options else transformers.BitsAndBytesConfig(**{**wanted, **options})
    place = {} if device == "cpu" else {"device_map": {"": device}}
    model = kind.from_pretrained(folder, dtype=dtype, quantization_config=config, **place)
    if config is None:  # the dtype that the codes are multiplied in is a matter of the run, not of the file
        for module in model.modules():
            if hasattr(module, "compute_dtype"):
                module.compute_dtype, module.compute_type_is_set = dtype, True
    return model.train()


def add_adapters(model: torch.nn.Module, seed: int = 2, **config) -> peft.PeftModel:
    """LoRA on all linear layers, in training mode. B is random too: with PEFT's zeros A would have no gradient at first."""
    torch.manual_seed(seed)
    options = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(**{**options, **config}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def write_rows(path: pathlib.Path, count: int, seed: int = 3) -> list[dict[str, list[int]]]:
    """Rows of 5 to 24 tokens that count up from a random start: something to learn. Three of four begin with a prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = int(torch.randint(5, 25, (), generator=generator))
        start = int(torch.randint(3, VOCAB - 30, (), generator=generator))
        ids = list(range(start, start + length))
        prompt = i % 4
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Padded on the right to the longest row."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(key: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in rows])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def run_cli(*words, check: bool = True, threads: int = 1) -> subprocess.CompletedProcess:
    """The qlorapp command with its output as text; a failure shows what it said.

    One thread unless asked: at these sizes more of them only wait for each other.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    result = command_server.run(*words, env=environment)
    assert not check or result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
    return result


def history(folder: pathlib.Path) -> list[dict[str, float]]:
    """The entries of trainer_state.json that optimizer steps wrote."""
    return [entry for entry in json.loads((folder / "trainer_state.json").read_text())["log_history"] if "loss" in entry]


def shaken(model):
    """The model with every value of its adapters away from its start."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if "modules_to_save" in name:
                parameter.add_(0.03 * noise)
            elif "magnitude" in name:
                parameter.mul_(1 + 0.2 * noise.clamp(-2, 2))
            elif "lora_B" in name:
                parameter.copy_(0.1 * noise)
    return model
