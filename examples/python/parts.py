# SPDX-License-Identifier: Apache-2.0
"""The five classes by themselves, in a plain torch program: four bits, adapters, checkpointing, loss scaling, ragged micro-batches.

python examples/python/parts.py    (its twin in C++: examples/cpp/07_five_classes.cpp)
"""

import qlorapp
import torch

torch.manual_seed(0)
quantizer = qlorapp.Quantizer()  # NF4, blocks of 64, double quantization
weights = [quantizer.quantize(torch.randn(256, 256) / 16) for _ in range(4)]
print(weights[0], f"{8 * weights[0].nbytes / weights[0].numel():.3f} bits per element")

# Adapters are ordinary parameters: any torch optimizer trains them. Move the model to its device before making the optimizer.
blocks = [
    qlorapp.CheckpointedBlock(torch.nn.Sequential(qlorapp.LoraLinear(weight, r=8, lora_alpha=16), torch.nn.Tanh()))
    for weight in weights
]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = qlorapp.GradScaler("cpu", init_scale=2.0**10)

x, target = torch.randn(64, 256), torch.randn(64, 256).tanh()
sizes = [32, 27, 5]  # ragged micro-batches: weighed by their rows, they give the gradient of one batch of 64
for step in range(20):
    optimizer.zero_grad()
    accumulator = qlorapp.Accumulator(sizes)
    for rows, wanted in zip(x.split(sizes), target.split(sizes), strict=True):
        loss_sum = (model(rows) - wanted).square().mean(-1).sum()
        scaler.scale(accumulator.share_of(loss_sum)).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step}: loss {accumulator.mean_loss().item():.4f}")
