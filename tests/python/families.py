# SPDX-License-Identifier: Apache-2.0
"""One small model of each family that C++ computes, and of each option of its row; a batch for it."""

import torch

SLIDING, FULL = "sliding_attention", "full_attention"
BY_TYPE = {"sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2, "logits_scaling": 8.0}
GRANITE4 = {"layer_types": [FULL] * 3, "num_local_experts": 0, "shared_intermediate_size": 192}

#: Rows are longer than the windows, and than the positions that rope types scale from.
FAMILIES = {
    "Llama": {},
    "Llama with biases": {"attention_bias": True, "mlp_bias": True},
    "Llama, linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "Llama, dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 48},
    "Llama, yarn": {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}},
    "Qwen3": {"family": "Qwen3", "head_dim": 32},
    "Qwen3, tied, with biases": {"family": "Qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "Qwen3 with windows": {
        "family": "Qwen3", "head_dim": 32, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    },
    "Qwen3 with windows by layer_types": {"family": "Qwen3", "head_dim": 32, "use_sliding_window": True, **BY_TYPE},
    "Qwen2": {"family": "Qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Mistral": {"family": "Mistral", "sliding_window": 6},
    "Mistral without windows": {"family": "Mistral", "sliding_window": None, "head_dim": 32},
    "Ministral": {"family": "Ministral", "head_dim": 16, **BY_TYPE},
    "Ministral 3": {
        "family": "Ministral3", "head_dim": 16,
        "rope_parameters": YARN | {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "Gemma": {"family": "Gemma", "head_dim": 32},
    "Gemma 3": {
        "family": "Gemma3", "head_dim": 32, "query_pre_attn_scalar": 24, **BY_TYPE,
        "rope_parameters": {FULL: {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    },
    "Gemma 3 with capped logits": {"family": "Gemma3", "head_dim": 16, "final_logit_softcapping": 5.0, **BY_TYPE},
    "Phi-3": {"family": "Phi3", "sliding_window": 6},
    "Phi-3, longrope, partial": {
        "family": "Phi3", "original_max_position_embeddings": 12,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.1, 1.2, 1.4], "long_factor": [1.0, 2.0, 3.0, 5.0],
        },
    },
    "Granite": {"family": "Granite", **GRANITE},
    "Granite 4": {"family": "GraniteMoeHybrid", "position_embedding_type": "rope", "attention_bias": True, **GRANITE, **GRANITE4},
    "Granite 4 without positions": {"family": "GraniteMoeHybrid", **GRANITE4},
    "SmolLM3": {"family": "SmolLM3", "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6},
    "OLMo 2": {"family": "Olmo2", "attention_bias": True},
    "OLMo 3": {
        "family": "Olmo3", **BY_TYPE, "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    },
    "GLM-4": {"family": "Glm4", "head_dim": 16},
    "EXAONE 4": {"family": "Exaone4", **BY_TYPE},
    "EXAONE 4 without windows": {"family": "Exaone4", "sliding_window": None, "layer_types": [FULL] * 3},
    "ERNIE 4.5": {"family": "Ernie4_5", "head_dim": 16, "use_bias": True},
    "Seed-OSS": {"family": "SeedOss", "head_dim": 32, "attention_out_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "Hunyuan": {
        "family": "HunYuanDenseV1", "head_dim": 16, "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    },
    "Helium": {"family": "Helium", "head_dim": 16, "attention_bias": True},
}  # fmt: skip
#: The first case of each architecture.
FIRST = list({case.get("family", "Llama"): name for name, case in reversed(FAMILIES.items())}.values())[::-1]

#: README's list of models that C++ computes, and the architectures of each item.
MODELS = {
    "Llama 2 to 3.3, and other models with `LlamaForCausalLM` in their config, such as SmolLM2": ["Llama"],
    "Qwen2, 2.5 and 3 (dense, also R1's distillations)": ["Qwen2", "Qwen3"],
    "Mistral 7B, Nemo, Small up to 2501, Ministral, Ministral 3": ["Mistral", "Ministral", "Ministral3"],
    "Gemma 1 and 3": ["Gemma", "Gemma3"],
    "Phi-3, 3.5, 4 and 4-mini": ["Phi3"],
    "Granite 3 and 4 (dense)": ["Granite", "GraniteMoeHybrid"],
    "SmolLM3": ["SmolLM3"],
    "OLMo 2 and 3": ["Olmo2", "Olmo3"],
    "GLM-4-0414": ["Glm4"],
    "EXAONE 4": ["Exaone4"],
    "ERNIE 4.5 (dense)": ["Ernie4_5"],
    "Seed-OSS": ["SeedOss"],
    "Hunyuan (dense)": ["HunYuanDenseV1"],
    "Helium": ["Helium"],
}
#: What `@pytest.mark.feature` names: the columns of docs/families.md, and what a test of each compares.
FEATURES = {
    "train": "loss and gradients; on a CPU also logits and the losses of 20 steps, beside transformers, PEFT and bitsandbytes; on a GPU, beside the CPU",
    "float16": "loss and gradients in float16 and bfloat16 are near those in float32",
    "checkpoint_keep": "every way to keep activations has the bits of keeping everything",
    "generate": "a cache gives the tokens of transformers, on a GPU those of the CPU",
    "quantize": "a folder in four bits has bitsandbytes' logits, whichever of the two wrote it",
    "merge": "the merged folder has PEFT's merged weights",
    "eval": "the command's loss over other rows is that of transformers, PEFT and bitsandbytes",
    "inspect": "the command verifies base and adapter and names the programs that load them",
    "plan": "the plan from the config is that of the loaded model, and a measured step agrees",
    "memory_budget": "a run in less memory stays within it and ends in the same bits",
    "find_max_batch_size": "the answer is the largest batch whose plan fits, and a step with it fits",
    "resume": "a run that continues from a checkpoint ends in the bits of one that was not stopped",
    "full_determinism": "a run with dropout repeats its bits",
    "fp8": "products in eight bits have the loss of a model whose operands torch has rounded",
    "ranks": "two processes train the adapter that one trains with twice the accumulation",
    "base_sharding": "a base divided over two processes trains the bits of a whole one",
    "base_on_host": "a base in host memory trains the bits of one on the GPU",
    "cuda_graphs": "recorded steps have the bits of those that are not",
    "inject": "transformers' own code over the same 4-bit layers and adapters has the engine's loss and gradients",
}


def architecture(case: str) -> str:
    """The class name in config.json."""
    return f"{FAMILIES[case].get('family', 'Llama')}ForCausalLM"


def batch():
    """Two rows, one of them padded."""
    ids = torch.arange(3, 51).view(2, 24)
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def relative(ours, theirs):
    return (torch.linalg.vector_norm(ours.double() - theirs.double()) / torch.linalg.vector_norm(theirs.double())).item()
