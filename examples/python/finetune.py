# SPDX-License-Identifier: Apache-2.0
"""QLoRA fine-tuning with Hugging Face's names; only the imports differ.

python examples/python/finetune.py MODEL_FOLDER DATA.jsonl OUTPUT_FOLDER      rows: {"input_ids": [...], "labels": [...]}
"""

import json
import sys

from qlorapp import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorWithFlattening,
    LoraConfig,
    Trainer,
    TrainingArguments,
    get_peft_model,
)

folder, data, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    folder,
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    device_map="auto",
)
lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
model.print_trainable_parameters()

with open(data, encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        learning_rate=2e-4,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=rows,
    data_collator=DataCollatorWithFlattening(),  # rows lie one behind the other: no padding
)
trainer.train()
for entry in trainer.state.log_history:
    print(entry)
trainer.save_model()
