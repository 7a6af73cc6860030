# SPDX-License-Identifier: Apache-2.0
"""A usual QLoRA notebook, cell by cell: only the imports name another package, and model and data are the bundled ones.

Four bits in float16, layers found by their class, prepare_model_for_kbit_training, SFTTrainer with peft_config and TRL's options for a T4,
generate, save, and the adapter on a base of 16 bits.
"""

import json
import pathlib

import conftest
import peft
import pytest
import torch
import transformers
from tiny_trainer import in_cpp

MODEL = conftest.ROOT / "examples" / "data" / "tiny-llama"
DATA = conftest.ROOT / "examples" / "data" / "train.jsonl"

CELLS = [
    """
from datasets import load_dataset
train_dataset = load_dataset("json", data_files=data_path, split="train")
""",
    """
import torch
from qlorapp import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

tokenizer = AutoTokenizer.from_pretrained(model_id)
model = AutoModelForCausalLM.from_pretrained(
    model_id,
    attn_implementation="sdpa",
    dtype=torch.float16,
    use_cache=True,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.float16,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
    ),
)
""",
    """
import qlorapp as bnb

def find_all_linear_names(model):
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            parts = name.split(".")
            names.add(parts[0] if len(parts) == 1 else parts[-1])
    if "lm_head" in names:
        names.remove("lm_head")
    return list(names)
""",
    """
from qlorapp import LoraConfig, prepare_model_for_kbit_training

model = prepare_model_for_kbit_training(model)
peft_config = LoraConfig(
    r=32, lora_alpha=32, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM", target_modules=find_all_linear_names(model),
)
""",
    """
from qlorapp import SFTConfig

training_args = SFTConfig(
    per_device_train_batch_size=1,
    gradient_accumulation_steps=4,
    warmup_steps=5,
    max_steps=30,
    learning_rate=2e-4,
    optim="paged_adamw_8bit",
    logging_steps=1,
    report_to="none",
    output_dir=output_dir,
    fp16=True,
    max_length=1024,
    activation_offloading=torch.cuda.is_available(),
    gradient_checkpointing=True,
)
""",
    """
from qlorapp import SFTTrainer

trainer = SFTTrainer(
    model=model, args=training_args, train_dataset=train_dataset, processing_class=tokenizer, peft_config=peft_config
)
model.config.use_cache = False
trainer_stats = trainer.train()
trainer.save_model(output_dir)
""",
    """
from qlorapp import AutoTokenizer, PeftModel

base_model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto", device_map="auto")
fine_tuned_model = PeftModel.from_pretrained(base_model, output_dir)
tokenizer = AutoTokenizer.from_pretrained(output_dir)

messages = [{"role": "user", "content": "Fay, put the kite near the tower."}]
text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
model_inputs = tokenizer([text], return_tensors="pt", add_special_tokens=False).to(fine_tuned_model.device)

generated_ids = fine_tuned_model.generate(**model_inputs, max_new_tokens=24)
output_ids = generated_ids[0][len(model_inputs.input_ids[0]) :]
answer = tokenizer.decode(output_ids, skip_special_tokens=True)
""",
]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The variables after the last cell."""
    cells = {"model_id": str(MODEL), "data_path": str(DATA), "output_dir": str(tmp_path_factory.mktemp("t4"))}
    for source in CELLS:
        exec(source, cells)
    return cells


def test_thirty_steps_run_in_cpp_and_the_loss_falls(notebook):
    trainer = notebook["trainer"]
    assert in_cpp(trainer) and isinstance(trainer.model, peft.PeftModel)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in history] == list(range(1, 31))
    losses = [entry["loss"] for entry in history]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert notebook["trainer_stats"].global_step == 30


def test_the_adapter_has_all_seven_projections_and_answers_alike_under_transformers_and_peft(notebook):
    config = json.loads((pathlib.Path(notebook["output_dir"]) / "adapter_config.json").read_text())
    assert config["r"] == 32 and set(config["target_modules"]) == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=notebook["base_model"].dtype)
    model = peft.PeftModel.from_pretrained(base, notebook["output_dir"]).eval()
    ids = notebook["model_inputs"]["input_ids"].cpu()
    expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    text = notebook["tokenizer"].decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert notebook["answer"].split()[:4] == text.split()[:4]  # bfloat16: a tie may be broken another way further on


def test_the_four_bit_model_it_trained_still_generates(notebook):
    inputs = {name: value.cpu() for name, value in notebook["model_inputs"].items()}
    notebook["model"].eval()
    first, second = (
        model.generate(**inputs, max_new_tokens=8, do_sample=False) for model in (notebook["trainer"].model, notebook["model"])
    )
    assert torch.equal(first, second) and first.shape[1] > inputs["input_ids"].shape[1]
