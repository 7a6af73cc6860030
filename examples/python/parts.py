# SPDX-License-Identifier: Apache-2.0
"""The classes by themselves, in a plain torch program: four bits, an adapter, checkpointing, loss scaling.

python examples/python/parts.py
"""

import qlorapp
import torch

torch.manual_seed(0)
quantizer = qlorapp.Quantizer()  # NF4, blocks of 64, double quantization
weights = [quantizer.quantize(torch.randn(256, 256) / 16) for _ in range(4)]
print(weights[0], f"{8 * weights[0].nbytes / weights[0].numel():.3f} bits an element")

blocks = [
    qlorapp.CheckpointedBlock(torch.nn.Sequential(qlorapp.LoraLinear(weight, r=8, lora_alpha=16), torch.nn.Tanh()))
    for weight in weights
]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = qlorapp.GradScaler("cpu", init_scale=2.0**10)

x, target = torch.randn(64, 256), torch.randn(64, 256).tanh()
for step in range(20):
    optimizer.zero_grad()
    loss = (model(x) - target).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
