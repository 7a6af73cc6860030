# SPDX-License-Identifier: Apache-2.0
"""Where from_pretrained puts a model: device_map and base_sharding."""

import logging
import os
import re
from typing import Any

import torch

_log = logging.getLogger("qlorapp")


def layers_on_host(device_map: Any, config: Any) -> tuple[Any, bool]:
    """device_map without the entries of the decoder's layers, and whether these are to be on the CPU while the rest is not."""
    if not isinstance(device_map, dict):
        return device_map, False
    layers = {name: str(place) for name, place in device_map.items() if re.match(r"model\.(\w+\.)?layers\b", name)}
    rest = {name: place for name, place in device_map.items() if name not in layers}
    if "cpu" not in layers.values() or not rest or "cpu" in map(str, rest.values()):
        return device_map, False
    count = config.get_text_config().num_hidden_layers
    every = {str(i) for i in range(count)}
    if set(layers.values()) != {"cpu"} or (
        not any(name.endswith("layers") for name in layers) and {name.rpartition(".")[2] for name in layers} != every
    ):
        raise ValueError(
            f"[from_pretrained] device_map must leave all layers on the CPU, or none; got {len(layers)} entries of layers for the "
            f'{count} of the model. Use {{"": 0, "model.layers": "cpu"}}.'
        )
    return rest, True


def group_to_shard_over(base_sharding: str, device: torch.device) -> str:
    """Returns the name of the default process group, after initializing the group if necessary. Returns "" for "no".

    @raises ValueError if base_sharding is unknown or this process is alone.
    """
    if base_sharding == "no":
        return ""
    if base_sharding not in ("full", "node"):
        raise ValueError(f'[from_pretrained] base_sharding must be "no", "full" or "node"; got {base_sharding!r}.')
    if not torch.distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        raise ValueError(
            f"[from_pretrained] base_sharding={base_sharding!r} divides the base over several processes; this is one. Start the script with "
            "torchrun --nproc-per-node N, or leave the option out."
        )
    world: Any = torch.distributed.group.WORLD
    return str(world.group_name)


def device_of(device_map: Any, quantized: bool) -> torch.device:
    """The one device of device_map. "auto" is the GPU of LOCAL_RANK, or the current one, if this build has kernels for it.

    Default: "auto" for a four-bit model, as in transformers, and the CPU for any other.
    """
    if isinstance(device_map, dict):
        places = set(map(str, device_map.values()))
        if len(places) != 1:
            raise ValueError(f"[from_pretrained] device_map must put the model on one device; got {sorted(places)}.")
        device_map = next(iter(device_map.values()))
    if device_map is None:
        device_map = "auto" if quantized else "cpu"
    usable = torch._C._dispatch_has_kernel_for_dispatch_key("qlorapp::dequantize_4bit", "CUDA") and torch.cuda.is_available()
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        if not usable:
            return torch.device("cpu")
        current, local = torch.cuda.current_device(), os.environ.get("LOCAL_RANK", "")
        if (
            current == 0 and local.isdigit() and int(local) < torch.cuda.device_count()
        ):  # torchrun, and nothing has chosen a GPU yet
            current = int(local)
        return torch.device("cuda", current)
    device = torch.device("cuda", device_map) if isinstance(device_map, int) else torch.device(device_map)
    if device.type == "cuda" and not usable:
        why = "this build has no kernels for it" if torch.cuda.is_available() else "there is no GPU here"
        _log.warning("[from_pretrained] device_map asks for %s, but %s: the model is on the CPU.", device, why)
        return torch.device("cpu")
    if device.index is not None and 0 < torch.cuda.device_count() <= device.index:
        raise ValueError(
            f"[from_pretrained] device_map asks for {device}; this machine has {torch.cuda.device_count()} GPU(s)."
        )
    return device
