# SPDX-License-Identifier: Apache-2.0
"""One small checkpoint of each kind that holds a native family's model beside what reads images, and a batch with an image for it."""

import torch
import transformers

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
IMAGE, START, END = 120, 121, 122
EYES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_EYES = {"depth": 1, "num_heads": 4, "patch_size": 14}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 119, "vision_start_token_id": START, "vision_end_token_id": END}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


def _pixtral(kind, text):
    eyes = {**EYES, "model_type": "pixtral", "head_dim": 16, "image_size": 56}
    return transformers.Mistral3Config(
        text_config={**SIZES, **text, "model_type": kind}, vision_config=eyes, image_token_index=IMAGE
    )


#: {name: its config}
WRAPPED = {
    "Gemma 3": lambda: transformers.Gemma3Config(
        text_config={
            **SIZES, "head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config=EYES, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
    ),
    "Mistral Small 3": lambda: _pixtral("mistral", {"head_dim": 16, "sliding_window": None}),
    "Ministral 3": lambda: _pixtral("ministral3", {"head_dim": 16}),
    "LLaVA": lambda: transformers.LlavaConfig(
        text_config={**SIZES, "model_type": "llama"}, vision_config={**EYES, "model_type": "clip_vision_model"},
        image_token_index=IMAGE, tie_word_embeddings=False,
    ),
    "Qwen2-VL": lambda: transformers.Qwen2VLConfig(
        text_config={**SIZES, "rope_parameters": AXES}, **QWEN_IDS,
        vision_config={**QWEN_EYES, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2},
    ),
    "Qwen2.5-VL": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": AXES}, **QWEN_IDS,
        vision_config={**QWEN_EYES, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    ),
    "Qwen3-VL": lambda: transformers.Qwen3VLConfig(
        text_config={**SIZES, "head_dim": 16, "rope_parameters": {**AXES, "mrope_interleaved": True}}, **QWEN_IDS,
        vision_config={
            **QWEN_EYES, "hidden_size": 64, "intermediate_size": 128, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
        },
    ),
}  # fmt: skip


def write(folder, name):
    """Writes the checkpoint and returns its model."""
    config = WRAPPED[name]()
    torch.manual_seed(1)
    kind = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.12)
    if getattr(config, "tie_word_embeddings", False):
        model.tie_weights()
    model.save_pretrained(folder)
    return model


def with_image(name):
    """Two tokens, an image, and text."""
    torch.manual_seed(4)
    tokens = 1 if name.startswith("Qwen") else 4
    ids = torch.tensor([[1, START, *[IMAGE] * tokens, END, *range(10, 30)]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids >= IMAGE, -100)}
    if name.startswith("Qwen"):
        batch |= {"pixel_values": torch.randn(4, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 2, 2]])}
        return batch | {"mm_token_type_ids": (ids == IMAGE).long()}
    batch["pixel_values"] = torch.randn(1, 3, 28, 28)
    if name == "Gemma 3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    elif name != "LLaVA":
        batch |= {"pixel_values": torch.randn(1, 3, 56, 56), "image_sizes": torch.tensor([[56, 56]])}
    return batch
