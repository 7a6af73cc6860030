# SPDX-License-Identifier: Apache-2.0
"""The lesson that this library was made for: its code in its order, of which only the imports are changed.

The model's name stays too: it is found in a Hugging Face cache, here one with a tiny Llama in it.
"""

import json
import os
import shutil
import subprocess
import sys

import conftest
import pytest
from qlorapp import hub
from tiny_run import write_model

NAME = "meta-llama/Llama-3.2-1B-Instruct"

LOADING = """
from qlorapp import AutoModelForCausalLM, BitsAndBytesConfig
import torch
# Load quantized model
quantization_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_use_double_quant=True,
)
model = AutoModelForCausalLM.from_pretrained(
    "meta-llama/Llama-3.2-1B-Instruct",
    quantization_config=quantization_config,
    device_map="auto",
)
# Enable gradient checkpointing
model.gradient_checkpointing_enable()
print("Gradient checkpointing enabled!")
print(f"Model is training-ready: {model.is_gradient_checkpointing}")
"""

BATCH_SIZE = """
from qlorapp import TrainingArguments
# Target: effective batch size of 32 on single T4
training_args = TrainingArguments(
    output_dir="./output",
    # Batch size configuration
    per_device_train_batch_size=2, # What fits in VRAM
    gradient_accumulation_steps=16, # Accumulate to reach 32
    # Memory optimizations
    gradient_checkpointing=True,
    fp16=True, # or bf16=True if hardware supports
    # Training settings
    learning_rate=2e-4,
    num_train_epochs=3,
    logging_steps=10,
)
# Verify effective batch size
effective_batch = (
    training_args.per_device_train_batch_size
    * training_args.gradient_accumulation_steps
    * 1 # num_gpus
)
print(f"Effective batch size: {effective_batch}")
"""

FINDER = '''
def find_max_batch_size(model, tokenizer, max_seq_length=512):
    """Binary search for maximum batch size that fits in memory."""
    from torch.cuda import OutOfMemoryError
    low, high = 1, 32
    best = 1
    while low <= high:
        mid = (low + high) // 2
        try:
            # Try a forward + backward pass
            inputs = tokenizer(
                ["Test " * 100] * mid, # Create batch
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=max_seq_length,
            ).to(model.device)
            outputs = model(**inputs, labels=inputs["input_ids"])
            outputs.loss.backward()
            # Clear memory
            model.zero_grad()
            torch.cuda.empty_cache()
            best = mid
            low = mid + 1
            print(f"Batch size {mid}: OK")
        except OutOfMemoryError:
            high = mid - 1
            torch.cuda.empty_cache()
            print(f"Batch size {mid}: OOM")
    print(f"\\nMaximum batch size: {best}")
    return best
'''

RUN_FINDER = """
from qlorapp import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-1B-Instruct")
tokenizer.pad_token = tokenizer.eos_token # this checkpoint has none, and transformers asks for one
max_batch = find_max_batch_size(model, tokenizer)
"""

PRECISION = """
# Option 1: In TrainingArguments (recommended)
training_args = TrainingArguments(
    output_dir="./output",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=16,
    gradient_checkpointing=True,
    # Mixed precision
    bf16=True, # Use BF16 if GPU supports it (Ampere+)
    # OR
    # fp16=True, # Use FP16 for older GPUs (T4, V100)
    # FP16 requires loss scaling
    fp16_full_eval=False, # Use FP32 for evaluation
)
# Option 2: Check hardware support
def get_mixed_precision_dtype():
    '''Determine best mixed precision format for current hardware.'''
    if not torch.cuda.is_available():
        return "no" # CPU training
    capability = torch.cuda.get_device_capability()
    gpu_name = torch.cuda.get_device_name()
    if capability >= (8, 0): # Ampere or newer (A100, RTX 3090, etc.)
        print(f"{gpu_name}: Using BF16 (best)")
        return "bf16"
    else: # Volta, Turing (V100, T4)
        print(f"{gpu_name}: Using FP16 with loss scaling")
        return "fp16"
dtype = get_mixed_precision_dtype()
"""

OURS_AGREES = """
import qlorapp
assert qlorapp.get_mixed_precision_dtype() == dtype
from qlorapp import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))
inputs = tokenizer(["What is 2 + 2?", "What is the answer to everything?"], return_tensors="pt", padding=True).to(model.device)
labels = inputs["input_ids"]
"""

SCALING = """
# 1. Forward pass produces loss (FP32)
loss = model(**inputs, labels=labels).loss
# 2. Scale loss before backward (e.g., multiply by 1024)
scaled_loss = loss * 1024
scaled_loss.backward()
# 3. Unscale gradients before optimizer step
for param in model.parameters():
    if param.grad is not None:
        param.grad.data /= 1024
"""

UNSCALED = """
scaled = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
assert loss.dtype == torch.float32 and scaled
model.zero_grad()
torch.manual_seed(0)
model(**inputs, labels=labels).loss.backward()
for name, param in model.named_parameters():
    if name in scaled:
        assert torch.allclose(param.grad, scaled[name], rtol=2e-2, atol=1e-6), name
model.zero_grad()
"""

TOGETHER = """
from qlorapp import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    TrainingArguments,
)
from qlorapp import LoraConfig, get_peft_model
import torch
# 1. Quantization config
quantization_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
    bnb_4bit_use_double_quant=True,
)
# 2. Load model with quantization
model = AutoModelForCausalLM.from_pretrained(
    "meta-llama/Llama-3.2-1B-Instruct", # Use 8B in real training
    quantization_config=quantization_config,
    device_map="auto",
)
# 3. Enable gradient checkpointing
model.gradient_checkpointing_enable()
# 4. Add LoRA adapters
lora_config = LoraConfig(
    r=16, # Rank (affects quality vs. memory)
    lora_alpha=32, # Scaling factor
    target_modules=["q_proj", "v_proj", "k_proj", "o_proj"],
    lora_dropout=0.05,
    bias="none",
    task_type="CAUSAL_LM",
)
model = get_peft_model(model, lora_config)
# 5. Training arguments with all optimizations
training_args = TrainingArguments(
    output_dir="./qlora-output",
    # Batch configuration (effective batch = 32)
    per_device_train_batch_size=2,
    gradient_accumulation_steps=16,
    # Memory optimizations
    gradient_checkpointing=True,
    fp16=True, # T4 doesn't support bf16
    # Optimizer (8-bit Adam for memory savings)
    optim="paged_adamw_8bit",
    # Training hyperparameters
    learning_rate=2e-4,
    num_train_epochs=3,
    warmup_ratio=0.03,
    # Logging
    logging_steps=10,
    save_strategy="epoch",
)
# Memory check
if torch.cuda.is_available():
    allocated = torch.cuda.memory_allocated() / 1024**3
    print(f"Model loaded, VRAM used: {allocated:.2f} GB")
print(f"Trainable parameters: {model.print_trainable_parameters()}")
"""

TRAINING = """
from qlorapp import DataCollatorForLanguageModeling, Trainer
data = [dict(tokenizer(f"What is {i} + {i}? It is {2 * i}.")) for i in range(64)]
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model=model, args=training_args, train_dataset=data, data_collator=collator)
output = trainer.train()
print(f"steps {output.global_step}")
trainer.save_model()
"""

PARTS = [LOADING, BATCH_SIZE, FINDER, RUN_FINDER, PRECISION, OURS_AGREES, SCALING, UNSCALED, TOGETHER, TRAINING]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A hub cache, as huggingface_hub lays it out, with a tiny Llama whose tokenizer has no pad token."""
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("hub")
    repository = root / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.parent.mkdir(parents=True)
    write_model(snapshot)
    PreTrainedTokenizerFast(
        tokenizer_file=str(snapshot / "tokenizer.json"), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>"
    ).save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    return root


def run(code, cache, folder, **environment):
    env = {
        **os.environ,
        "PYTHONPATH": str(conftest.BUILD / "python"),
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )


def test_the_lesson_runs_from_its_first_line_to_its_last(cache, tmp_path):
    done = run("".join(PARTS), cache, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == ["Gradient checkpointing enabled!", "Model is training-ready: True", "Effective batch size: 32"]
    assert "Batch size 32: OK" in lines and "Maximum batch size: 32" in lines
    trainable = 16 * 2 * (2 * (64 + 64) + 2 * (64 + 32))  # r · layers · (q, o + k, v)
    (counts,) = [line for line in lines if line.startswith("trainable params: ")]
    assert counts.startswith(f"trainable params: {trainable:,} || all params: ")
    assert "Trainable parameters: None" in lines  # PEFT's function prints, and returns nothing
    assert "steps 6" in lines  # 64 rows, 32 a step, three epochs
    assert done.stderr.count("nothing of the model is trainable") == 1  # the finder runs before there are adapters
    out = tmp_path / "qlora-output"
    assert {"checkpoint-2", "checkpoint-4", "checkpoint-6", "adapter_model.safetensors"} <= {
        path.name for path in out.iterdir()
    }
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == NAME


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("nobody/nothing", None, "LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder"),
        (NAME, "model.safetensors.index.json", "{snapshot} has no model.safetensors"),
        (NAME, "config.json", "{snapshot} has no config.json"),
    ],
)
def test_a_name_that_cannot_be_found_says_what_is_missing_and_where(cache, tmp_path, monkeypatch, name, damage, says):
    copy = tmp_path / "hub"
    shutil.copytree(cache, copy)
    snapshot = copy / f"models--{NAME.replace('/', '--')}" / "snapshots" / "0123abcd"
    assert hub.folder_of(NAME, cache_dir=copy, local_files_only=True) == snapshot
    if damage:
        (snapshot / damage).unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(copy))
    with pytest.raises(FileNotFoundError) as error:
        hub.folder_of(name)
    assert says.format(snapshot=snapshot) in str(error.value) and f"(hf download {name})" in str(error.value)


def test_a_hub_that_cannot_be_reached_is_said(cache, tmp_path):
    code = "from qlorapp import hub\ntry: hub.folder_of('nobody/nothing')\nexcept FileNotFoundError as error: print(error)"
    done = run(code, cache, tmp_path, HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:1")
    assert "'nobody/nothing' must be a local folder or in the Hugging Face cache (" in done.stdout, done.stdout + done.stderr


def test_running_out_of_gpu_memory_is_torchs_own_error(cuda, tmp_path):
    """As the lesson's loop catches it: from a forward pass of the C++ model."""
    import qlorapp
    import torch

    write_model(tmp_path / "model")
    quantization = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = qlorapp.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=quantization, device_map="auto"
    )
    model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=4, task_type="CAUSAL_LM"))
    ids = torch.full((4096, 128), 5, device=cuda)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**25) / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            model(ids, labels=ids).loss.backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
