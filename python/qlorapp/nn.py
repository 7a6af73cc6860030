# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' names of layers, so that scripts find ours: `import qlorapp as bnb` and `isinstance(module, bnb.nn.Linear4bit)`."""


class Linear4bit:
    """What every linear layer in four bits is an instance of, in native models and in those of transformers.

    Made by AutoModelForCausalLM.from_pretrained alone; has in_features, out_features and quant_state.
    """


class Linear8bitLt:
    """What scripts look for beside Linear4bit. No layer is one: weights are stored in four bits or not quantized."""


__all__ = ["Linear4bit", "Linear8bitLt"]
