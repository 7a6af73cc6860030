# SPDX-License-Identifier: Apache-2.0
"""A training loop of one's own: the model is a torch.nn.Module, the optimizer torch's, the denominator exact.

python examples/python/loop_by_hand.py MODEL_FOLDER
"""

import sys

import torch
from qlorapp import Accumulator, AutoModelForCausalLM, BitsAndBytesConfig, LoraConfig, get_peft_model

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
)
model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

torch.manual_seed(0)
window = [torch.randint(0, model.config.vocab_size, (2, 32)) for _ in range(4)]  # micro-batches of one optimizer step
for step in range(10):
    optimizer.zero_grad()
    accumulator = Accumulator([ids.shape[0] * (ids.shape[1] - 1) for ids in window])  # nothing predicts a row's first token
    for ids in window:
        loss_sum = model(ids, labels=ids, num_items_in_batch=1).loss
        accumulator.share_of(loss_sum).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step}: loss {accumulator.mean_loss():.4f}")
