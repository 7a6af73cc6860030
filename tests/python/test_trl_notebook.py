# SPDX-License-Identifier: Apache-2.0
"""TRL's QLoRA notebook for a T4, cell by cell: only the imports name another package, model and data are the bundled ones, and thirty steps
stand for its epoch. Nothing is uploaded, and push_to_hub=True and trainer.push_to_hub() say so.

Batch 1, accumulation 4, length 1024, rank 32 on all seven projections, paged_adamw_8bit, liger, sdpa, float16, conversations.
"""

import json
import subprocess
import sys

import conftest
import pytest
import qlorapp
import torch
import transformers

MODEL = conftest.ROOT / "examples" / "data" / "tiny-llama"
DATA = conftest.ROOT / "examples" / "data" / "train.jsonl"

CELLS = [
    """
import json
import subprocess
import sys
train_dataset = [json.loads(line) for line in open(data_path)]
""",
    """
import torch
from qlorapp import AutoModelForCausalLM, BitsAndBytesConfig

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
from qlorapp import LoraConfig

peft_config = LoraConfig(
    r=32,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
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
    report_to="trackio",
    output_dir=output_dir,
    push_to_hub=True,
    max_length=1024,
    use_liger_kernel=True,
    activation_offloading=True,
    gradient_checkpointing=True,
)
""",
    """
from qlorapp import SFTTrainer

trainer = SFTTrainer(model=model, args=training_args, train_dataset=train_dataset, peft_config=peft_config)
""",
    """
trainer_stats = trainer.train()
print(f"{trainer_stats.metrics['train_runtime']} seconds used for training.")
""",
    """
trainer.save_model(output_dir)
trainer.push_to_hub(dataset_name=data_path)
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
print(answer)
""",
]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The variables after the last cell."""
    cells = {"model_id": str(MODEL), "data_path": str(DATA), "output_dir": str(tmp_path_factory.mktemp("t4"))}
    for source in CELLS:
        exec(source, cells)
    return cells


def reference(notebook):
    """transformers' model over the very weights that were trained, in float32, without adapters."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    weights = dict(notebook["model"].core.named_weights())
    with torch.no_grad():
        for name, module in model.named_modules():
            if name in weights:
                known = weights[name]
                dense = (
                    qlorapp.Quantizer().dequantize(known, torch.float32)
                    if isinstance(known, qlorapp.QuantizedTensor)
                    else known
                )
                module.weight.copy_(dense)
    return model


def test_thirty_steps_are_logged_and_the_loss_falls(notebook):
    history = [entry for entry in notebook["trainer"].state.log_history if "loss" in entry]
    assert [entry["step"] for entry in history] == list(range(1, 31))
    assert {"loss", "grad_norm", "learning_rate", "num_tokens", "epoch", "step"} <= set(history[0])
    assert history[0]["learning_rate"] == 0 and history[5]["learning_rate"] == pytest.approx(2e-4)  # warm-up, then the top
    losses = [entry["loss"] for entry in history]
    assert sum(losses[-5:]) < sum(losses[:5])
    assert notebook["trainer_stats"].global_step == 30
    assert notebook["trainer_stats"].metrics["train_runtime"] > 0


def test_the_first_two_losses_are_transformers_of_the_same_rows(notebook):
    """B is 0 and the first rate is 0, so steps 1 and 2 are the base's: rows in the Trainer's seeded order, whole conversations."""
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(MODEL), reference(notebook)
    rows = [json.loads(line)["messages"] for line in DATA.read_text().splitlines()]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42)).tolist()
    for step, entry in enumerate(notebook["trainer"].state.log_history[:2]):
        total, count = 0.0, 0
        for row in order[4 * step : 4 * step + 4]:
            ids = torch.tensor([tokenizer.apply_chat_template(rows[row], tokenize=True, return_dict=True)["input_ids"]])
            with torch.no_grad():
                loss = model(input_ids=ids, labels=ids).loss.item()
            total, count = total + loss * (ids.shape[1] - 1), count + ids.shape[1] - 1
        assert entry["loss"] == pytest.approx(total / count, rel=5e-3)  # float16 against float32


def test_its_upload_saves_and_says_where(notebook, tmp_path, caplog):
    trainer = notebook["trainer"]
    trainer.args.output_dir = str(tmp_path / "here")
    assert trainer.push_to_hub(dataset_name="some/thing") is None
    assert {"adapter_model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "here").iterdir()}
    assert f"nothing here uploads. The adapter is saved in {tmp_path / 'here'}; push that folder with: hf upload" in caplog.text
    trainer.args.output_dir = notebook["output_dir"]


def test_the_tokens_are_counted(notebook):
    history = [entry["num_tokens"] for entry in notebook["trainer"].state.log_history if "loss" in entry]
    lengths = [len(row["input_ids"]) for row in notebook["trainer"].train_dataset]
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(42)).tolist()
    assert history == [sum(lengths[i] for i in order[: 4 * step]) for step in range(1, 31)]


def test_the_adapter_has_all_seven_projections_of_rank_32_and_peft_reads_it(notebook):
    peft = pytest.importorskip("peft")
    config = json.loads((conftest.pathlib.Path(notebook["output_dir"]) / "adapter_config.json").read_text())
    assert config["r"] == 32 and len(config["target_modules"]) == 7
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(MODEL), notebook["output_dir"])
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 7 * 4


def test_the_answer_is_what_transformers_and_peft_generate(notebook):
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=notebook["base_model"].dtype)
    model = peft.PeftModel.from_pretrained(base, notebook["output_dir"]).eval()
    ids = notebook["model_inputs"]["input_ids"].cpu()
    expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    text = notebook["tokenizer"].decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert notebook["answer"].split()[:4] == text.split()[:4]  # bfloat16: a tie may be broken another way further on


def test_importing_the_package_imports_neither_transformers_nor_peft():
    code = "import sys, qlorapp; qlorapp.SFTConfig('out'); print([m for m in ('transformers', 'peft', 'trl', 'datasets') if m in sys.modules])"
    env = {**conftest.os.environ, "PYTHONPATH": str(conftest.BUILD / "python")}
    out = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"
