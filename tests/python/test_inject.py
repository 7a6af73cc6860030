# SPDX-License-Identifier: Apache-2.0
"""The adapters of a C++ program's own torch::nn model (examples/cpp/08_inject.cpp) are PEFT's, by name and by effect."""

import subprocess

import peft
import safetensors.torch
import torch
from conftest import BUILD


class Model(torch.nn.Module):
    """The model of the example."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64), torch.nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(x))))


def test_peft_loads_what_a_program_saved(tmp_path):
    folder = tmp_path / "adapter"
    subprocess.run([BUILD / "examples" / "cpp" / "example_08_inject", folder], check=True, stdout=subprocess.PIPE)
    base = Model()
    model = peft.PeftModel.from_pretrained(base, folder)
    saved = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    assert {key: value.shape for key, value in peft.get_peft_model_state_dict(model).items()} == {
        key: value.shape for key, value in saved.items()
    }
    for key, value in peft.get_peft_model_state_dict(model).items():
        assert torch.equal(value, saved[key]), key
    layer = model.base_model.model.up
    assert layer.scaling["default"] == 2.0
    x = torch.randn(3, 64)
    a, b = (saved[f"base_model.model.up.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 2.0 * x @ a.T @ b.T)
