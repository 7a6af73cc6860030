# SPDX-License-Identifier: Apache-2.0
"""GenerationConfig and model.generate under transformers' names; tokens are chosen in C++ (include/qlorapp/nn/sampling.hpp).

An option that is None is unset: then the model's own generation_config.json decides, and without that transformers' default.
"""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from . import _C
from .generation_output import GenerateDecoderOnlyOutput, logits_of, scores_of
from .hub import folder_of
from .layers import seed_from_torch
from .stopping import StopCheck, criteria_of

_log = logging.getLogger("qlorapp")

#: transformers' values for what nobody has set.
_DEFAULTS = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "num_return_sequences": 1,
}
#: Options of transformers that are not built: (values that mean nothing, reason). Any other value is refused.
_BEAMS = ((None, 1, False, 1.0, 0.0), "there is no beam search. Leave it out, or sample with do_sample=True.")
_PROCESSOR = ((None, 0, 1.0, False), "this processor is not built. Use repetition_penalty, temperature, top_k, top_p or min_p.")
_OWN_PROCESSOR: tuple[tuple[Any, ...], str] = (
    (None, []),
    "tokens are chosen in C++, which calls no function on the logits. Choose them in a loop of your own, from model(input_ids).logits[:, -1], or load "
    "the model by transformers.",
)
_OUTPUT = ((None, False), "all blocks are computed in one call of C++. Load the model by transformers for it.")
_ASSISTED = ((None, False), "there is no assisted generation. Leave it out.")
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids"), _BEAMS),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "low_memory", "use_mtp", "guidance_scale"), _BEAMS),
    **dict.fromkeys(
        ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "no_repeat_ngram_size", "bad_words_ids"), _PROCESSOR
    ),
    **dict.fromkeys(
        ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"), _PROCESSOR
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "token_healing"), _PROCESSOR),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config", "renormalize_logits"), _PROCESSOR),
    **dict.fromkeys(("logits_processor", "prefix_allowed_tokens_fn"), _OWN_PROCESSOR),
    "inputs_embeds": ((None,), "the model looks tokens up itself. Give input_ids."),
    "stopping_criteria": ((None, []), "it is no part of a config. Give it to generate() itself."),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), _OUTPUT),
    **dict.fromkeys(("assistant_model", "prompt_lookup_num_tokens", "decoder_start_token_id"), _ASSISTED),
}
#: Options that change nothing here.
_IGNORED = {
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "disable_compile", "compile_config", "early_stopping",
    "length_penalty", "remove_invalid_values", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
    "target_lookbehind", "assistant_ensemble_weight", "speculation_type", "continuous_batching_config", "prefill_chunk_size",
    "transformers_version", "token_type_ids", "synced_gpus",
}  # fmt: skip


@dataclasses.dataclass
class GenerationConfig:
    """How generate() chooses tokens: transformers' names and meanings."""

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_return_sequences: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    stop_strings: str | list[str] | None = None
    max_time: float | None = None
    return_dict_in_generate: bool | None = None
    output_scores: bool | None = None
    output_logits: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """What is set."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    to_diff_dict = to_dict  # what transformers' pipelines call

    def __setattr__(self, name: str, value: Any) -> None:
        """@raises ValueError and TypeError as the constructor does: set silently, it would do nothing."""
        _known({name: value}, type(self).__name__)
        super().__setattr__(name, value)

    def update(self, **options: Any) -> dict[str, Any]:
        """Sets these, as transformers' does; returns those that are no options of generation.  @raises ValueError for one that is refused."""
        names = _FIELDS | set(_REFUSED) | _IGNORED
        for name in options:
            if name in names:
                setattr(self, name, options[name])
        return {name: value for name, value in options.items() if name not in names}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GenerationConfig":
        return cls(**_known(values, "GenerationConfig"))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: Any = None,
        local_files_only: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> "GenerationConfig":
        """Of generation_config.json in a model's folder or hub repository; options change it."""
        file_name = "generation_config.json"
        folder = folder_of(
            os.fspath(pretrained_model_name), revision=revision, token=token, local_files_only=local_files_only, cache_dir=cache_dir,
            wanted=(file_name,),
        )  # fmt: skip
        with open(folder / file_name, encoding="utf-8") as file:
            return cls.from_dict({**json.load(file), **options})

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / "generation_config.json").write_text(
            json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


_FIELDS = {field.name for field in dataclasses.fields(GenerationConfig)}
_plain_init = GenerationConfig.__init__


def _init(self: GenerationConfig, **options: Any) -> None:
    _plain_init(self, **_known(options, "GenerationConfig"))


GenerationConfig.__init__ = _init  # type: ignore[method-assign, assignment]


def _known(options: dict[str, Any], where: str) -> dict[str, Any]:
    """The options that are built; others are passed over where they mean nothing, else refused by name."""
    kept = {}
    for name, value in options.items():
        if name in _FIELDS:
            kept[name] = value
        elif name in _REFUSED:
            neutral, reason = _REFUSED[name]
            if value not in neutral:
                raise ValueError(f"[{where}] {name}={value!r} is not supported: {reason}")
        elif name not in _IGNORED and not name.startswith("_"):
            raise TypeError(f"[{where}] unknown option {name!r}.{_C.did_you_mean(name, sorted(_FIELDS | set(_REFUSED)))}")
    return kept


def config_of_folder(folder: pathlib.Path) -> GenerationConfig:
    """Of a checkpoint; what it names that is not built is left to transformers' default, and said."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return GenerationConfig()
    with open(path, encoding="utf-8") as file:
        values = json.load(file)
    for name in sorted(set(values) & set(_REFUSED)):
        neutral, reason = _REFUSED[name]
        if values[name] not in neutral:
            _log.warning("[generate] %s asks for %s=%r, which is passed over: %s", path, name, values[name], reason)
    return GenerationConfig(**{name: value for name, value in values.items() if name in _FIELDS})


def _merged(model_config: Any, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options of the call, before those of the config that was passed, before the model's own, before the defaults."""
    of_model = (
        model_config.to_dict() if isinstance(model_config, GenerationConfig) else _known(model_config.to_dict(), "generate")
    )
    merged = {**_DEFAULTS, **{name: value for name, value in of_model.items() if value is not None}}
    if config is not None:  # transformers' own class is as good
        given = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        merged.update({name: value for name, value in _known(given, "generate").items() if value is not None})
    merged.update({name: value for name, value in _known(options, "generate").items() if value is not None})
    return merged


def _real_tokens(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad: int | None, eos: list[int]
) -> list[list[int]]:
    """The prompts without padding: what the mask says, or without one, as transformers, all that is not the pad token."""
    if attention_mask is None and pad is not None and pad not in eos and bool((input_ids == pad).any()):
        attention_mask = input_ids != pad
    if attention_mask is None:
        return input_ids.tolist()
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"[generate] attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}; got "
            f"{tuple(attention_mask.shape)}. Pass both as the tokenizer returns them."
        )
    return [row[mask != 0].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]


def of_mapping(
    inputs: Mapping[str, Any], input_ids: Any, attention_mask: Any, options: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """(input_ids, attention_mask, options) where generate() is given what a tokenizer or a chat template returns as it is."""
    if "input_ids" not in inputs:
        raise ValueError(f"[generate] inputs must have input_ids; got {sorted(inputs)}. Tokenize with return_tensors='pt'.")
    if input_ids is not None or (attention_mask is not None and inputs.get("attention_mask") is not None):
        raise ValueError("[generate] input_ids and attention_mask are in inputs already. Give them once: generate(**inputs).")
    mask = inputs.get("attention_mask") if attention_mask is None else attention_mask
    rest = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    return inputs["input_ids"], mask, {**rest, **options}


@torch.no_grad()
def generate(
    model: Any,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    generation_config: Any,
    streamer: Any,
    options: dict[str, Any],
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """(B, T + new tokens); see CausalLM.generate."""
    if options.get("inputs_embeds") is not None:
        raise ValueError("[generate] inputs_embeds is not supported: the model looks tokens up itself. Give input_ids.")
    stopping_criteria, tokenizer = options.pop("stopping_criteria", None), options.pop("tokenizer", None)
    chosen = _merged(model.generation_config, generation_config, options)
    bos = chosen.get("bos_token_id", model.config.get("bos_token_id"))
    if input_ids is None and isinstance(bos, int):
        input_ids = torch.tensor([[bos]], device=model.device)
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        raise ValueError("[generate] input_ids must be (B, T). Tokenize with return_tensors='pt'.")
    criteria = criteria_of(stopping_criteria, chosen.get("stop_strings"), chosen.get("max_time"), tokenizer)
    eos = chosen.get("eos_token_id", model.core.eos_token_ids)
    eos = [eos] if isinstance(eos, int) else list(eos)
    pad = chosen.get("pad_token_id")
    fill = pad if pad is not None else (eos[0] if eos else 0)
    width = input_ids.shape[1]
    longest = chosen.get("max_new_tokens")
    if longest is None:
        longest = chosen["max_length"] - width if "max_length" in chosen else 20
    if longest < 1:
        raise ValueError(
            f"[generate] max_length is {chosen['max_length']} and the prompt has {width} tokens. Set max_new_tokens."
        )
    shortest = chosen.get("min_new_tokens", max(0, chosen.get("min_length", 0) - width))
    copies = int(chosen["num_return_sequences"])
    if copies > 1 and not chosen["do_sample"]:
        raise ValueError("[generate] num_return_sequences > 1 would give equal texts. Sample with do_sample=True.")
    prompts = [row for row in _real_tokens(input_ids, attention_mask, pad, eos) for _ in range(copies)]
    if streamer is not None and len(prompts) != 1:
        raise ValueError(f"[generate] a streamer shows one text; got {len(prompts)}. Generate them one by one.")
    names = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    sampling = {name: chosen[name] for name in names}
    if not chosen["do_sample"]:  # warpers are not run then, whatever they are
        sampling = {"repetition_penalty": sampling["repetition_penalty"]}
    seed = seed_from_torch() if chosen["do_sample"] else 0
    shown = input_ids.repeat_interleave(copies, dim=0)
    check = StopCheck(criteria, shown, eos, fill) if criteria else None

    def on_token(row: int, token: int) -> bool:
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        return check is None or check(row, token)

    if streamer is not None:
        streamer.put(input_ids.cpu())
    how = _C.SamplingOptions(seed=seed, **sampling)
    rows = _C.generate(
        model.core,
        prompts,
        max_new_tokens=longest,
        min_new_tokens=shortest,
        eos_token_ids=eos,
        sampling=how,
        on_token=on_token if streamer is not None or check is not None else None,
    )
    if check is not None:
        rows = check.trim(rows)
    if streamer is not None:
        streamer.end()
    most = max(len(row) for row in rows)
    new = torch.tensor([row + [fill] * (most - len(row)) for row in rows], dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([shown, new], dim=1)
    if not chosen.get("return_dict_in_generate"):
        return sequences
    told: dict[str, Any] = {"sequences": sequences}
    if chosen.get("output_scores") or chosen.get("output_logits"):
        logits = logits_of(model.core, prompts, new)
        if chosen.get("output_scores"):
            blocked = [eos if step < shortest else [] for step in range(most)]
            told["scores"] = scores_of(logits, prompts, new, blocked, how)
        if chosen.get("output_logits"):
            told["logits"] = logits
    return GenerateDecoderOnlyOutput(told)
