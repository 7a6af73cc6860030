# SPDX-License-Identifier: Apache-2.0
"""Loads the demo's base and an adapter through the installed package, for `./dev wheel`: python try_wheel.py ADAPTER"""

import sys

import qlorapp

model = qlorapp.AutoModelForCausalLM.from_pretrained(
    "examples/data/tiny-llama", quantization_config=qlorapp.BitsAndBytesConfig(load_in_4bit=True)
)
qlorapp.PeftModel.from_pretrained(model, sys.argv[1]).print_trainable_parameters()
