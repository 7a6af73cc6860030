# SPDX-License-Identifier: Apache-2.0
"""CausalLM: the C++ model as a torch.nn.Module with Hugging Face's names and semantics. auto_model.py loads it."""

import contextlib
import functools
import inspect
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from . import _C, forward_options, generation, module_tree, precision, saving
from .base_parameters import BaseParameters, why_not_trained
from .edits import Fixed
from .layers import seed_from_torch
from .model_adapters import ModelAdapters, is_of_an_adapter
from .model_config import ModelConfig, TransformersMethods
from .model_output import CausalLMOutput
from .quantization import BitsAndBytesConfig

_log = logging.getLogger("qlorapp")


def refuse_unknown(where: str, options: dict[str, Any], known: dict[str, str], function: Any) -> None:
    """Options that change nothing here are said once in the log; any other is an error that names the nearest."""
    for name, value in options.items():
        if name not in known:
            nearest = _C.did_you_mean(name, [*known, *inspect.signature(function).parameters])
            raise TypeError(f"[{where}] unknown option {name!r}.{nearest}")
        if known[name] and value is not None and value is not False:  # a tensor has no truth
            _log.info("[%s] %s has no effect: %s", where, name, known[name])


class TrainableParameters(str):
    """The line of print_trainable_parameters(). A notebook whose cell ends in the call does not print it a second time."""

    def _ipython_display_(self) -> None:
        """Printed already."""


@functools.cache
def _class_of(architecture: str) -> type:
    """CausalLM by the name of what it computes: transformers' pipelines, and scripts, go by type(model).__name__."""
    return type(architecture, (CausalLM,), {"__module__": __name__, "__doc__": CausalLM.__doc__})


class CausalLM(TransformersMethods, ModelAdapters, Fixed):
    """What AutoModelForCausalLM.from_pretrained returns.

    Its parameters are the tensors that the C++ model computes with: torch optimizers, zero_grad, hooks on parameters and
    torch.autograd work on them. One call computes the whole pass, so hooks on submodules do not run.
    """

    #: Hugging Face's tree (module_tree.build).
    model: Any
    lm_head: Any
    _tokens_before = 0

    def __new__(cls, core: Any, config: ModelConfig, *args: Any, **kwargs: Any) -> "CausalLM":
        """Of a class by the architecture's name."""
        names = getattr(config, "architectures", None) or []
        return cast("CausalLM", super().__new__(_class_of(names[0]) if cls is CausalLM and len(names) == 1 else cls))

    def __init__(
        self,
        core: _C.CausalLM,
        config: ModelConfig,
        name_or_path: str,
        folder: pathlib.Path | None = None,
        quantization: BitsAndBytesConfig | None = None,
    ) -> None:
        """folder: where the weights were read from. quantization: how they were quantized while they were read, if they were."""
        super().__init__()
        self._core = core
        self.config = config
        config.describe(name_or_path, core.dtype)
        self.name_or_path = name_or_path
        self.generation_config = generation.GenerationConfig()
        self.peft_config = {}
        self._adapters = {}
        self._folder = folder
        self._quantization = quantization
        self._keep = ""
        self.warnings_issued: dict[str, bool] = {}  # scripts for transformers set "estimate_tokens" in it
        module_tree.build(self, core, getattr(config, "rms_norm_eps", 1e-6))
        self._base_parameters = BaseParameters(self)
        self.eval()

    # --- what it is

    @property
    def device(self) -> torch.device:
        return self._core.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, norms, embeddings and head."""
        return self._core.dtype

    @property
    def core(self) -> _C.CausalLM:
        """The C++ model: forward_backward and generate without autograd."""
        return self._core

    @property
    def is_loaded_in_4bit(self) -> bool:
        """Are its linear layers stored in four bits?"""
        return any(isinstance(module, module_tree.Linear4bit) for module in self.modules())

    is_quantized = is_loaded_in_4bit

    @property
    def is_loaded_in_8bit(self) -> bool:
        return False

    @property
    def quantization_method(self) -> str:
        """Whose format the four-bit weights are in.  @raises AttributeError for a model without any, as in transformers."""
        if not self.is_loaded_in_4bit:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'quantization_method'")
        return "bitsandbytes"

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """Everything on one device."""
        return {"": self.device}

    def can_generate(self) -> bool:
        return True

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of all weights, four-bit ones as they are stored, and of the adapters."""
        return self._core.weight_bytes() + 4 * self._core.adapter_parameter_count()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """A four-bit weight counts its elements, a tied head counts once."""
        if only_trainable:
            return sum(p.numel() for held in self._adapters.values() for _, p in held if p.requires_grad)
        tables = 0
        if exclude_embeddings:
            tables = self.model.embed_tokens.weight.numel()
        return self._core.base_parameter_count() + self._core.adapter_parameter_count() - tables

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        return self.num_parameters(only_trainable=True), self.num_parameters()

    def print_trainable_parameters(self) -> TrainableParameters:
        """Prints PEFT's line, and returns it as well."""
        line = TrainableParameters(_C.trainable_parameters_line(*self.get_nb_trainable_parameters()))
        print(line)
        return line

    def get_input_embeddings(self) -> torch.nn.Module:
        table: torch.nn.Module = self.model.embed_tokens
        return table

    def get_output_embeddings(self) -> torch.nn.Module:
        head: torch.nn.Module = self.lm_head
        return head

    # --- computing

    @contextlib.contextmanager
    def tokens_before(self, count: int) -> Iterator[None]:
        """What is computed inside is the part of a batch behind so many tokens: dropout drops what it would drop in the whole."""
        self._tokens_before = count
        try:
            yield
        finally:
            self._tokens_before = 0

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **ignored: Any,
    ) -> CausalLMOutput | tuple[torch.Tensor, ...]:
        """input_ids (B, T), attention_mask 1 for tokens, 0 for padding on one side, labels with -100 where nothing is learnt.

        The loss is the mean over the targets, or their sum over num_items_in_batch. Labels are shifted inside, and padding is
        never a target. Dropout is active in training mode; torch.manual_seed governs it. return_dict=False gives a tuple.
        logits_to_keep: of the last so many positions (0: of all), or of those of an index. use_cache=False gives past_key_values=None;
        without it they are a NoCache, which a further call refuses.
        torch.autocast changes nothing: the model computes in the dtype that it was loaded in.
        """
        ids = forward_options.settled(input_ids, attention_mask, ignored)
        refuse_unknown("forward", ignored, forward_options.IGNORES, self.forward)
        with precision.own_dtypes(self.device):
            loss, logits = self._compute(ids, attention_mask, labels, num_items_in_batch, logits_to_keep)
        output = CausalLMOutput(loss, logits, use_cache=self.config.get("use_cache", True) if use_cache is None else use_cache)
        return output if return_dict in (None, True) else output.to_tuple()

    def _compute(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: int | torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
    ) -> tuple[torch.Tensor | None, Callable[[], torch.Tensor]]:
        """The loss, and what computes the logits: forward() with its options settled."""
        core = self._core
        self._rebind()
        if torch.is_grad_enabled() and (name := self._base_parameters.trainable()) is not None:
            _C.log_warning_once(f"[forward] {why_not_trained(name)}")
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask != 0
        batch = core.unpad(input_ids, attention_mask, labels)
        if batch.ignored_padding_labels:
            _C.log_warning_once(
                "[forward] labels on padding are left out of the loss, as -100 is; transformers would learn to predict padding from them."
            )
        batch.first_token = self._tokens_before
        drops = core.lora_dropout > 0
        if drops and any(m.training != self.training for m in self.modules() if isinstance(m, module_tree.Dropout)):
            _C.log_warning_once(
                "[forward] train() or eval() of a single Dropout has no effect: that of the model decides for all of them."
            )
        seed = seed_from_torch() if self.training and drops else 0
        hidden = core.hidden_states(batch, self.training, seed)
        loss = None
        if labels is not None:
            count = batch.target_count if num_items_in_batch is None else num_items_in_batch
            total = core.loss_of(hidden, batch)
            loss = total / count if count != 0 else total * 0.0
            if torch.is_grad_enabled() and not loss.requires_grad:
                _C.log_warning_once(
                    "[forward] nothing of the model is trainable: loss.backward() will do nothing. Add adapters first."
                )
                loss.requires_grad_()

        def logits() -> torch.Tensor:
            with precision.own_dtypes(self.device):
                if isinstance(logits_to_keep, int) and logits_to_keep == 0:
                    return batch.pad(core.logits(hidden))
                kept = forward_options.kept_hidden(batch.pad(hidden), logits_to_keep)
                logits = core.logits(kept.flatten(0, -2))
                return logits.view(*kept.shape[:-1], logits.shape[-1])

        return loss, logits

    def generate(
        self,
        inputs: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
        generation_config: Any = None,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> Any:
        """Continuation of every row: (B, T + new tokens), short ones filled with pad_token_id or the first EOS.

        With return_dict_in_generate=True as the `sequences` of an output, which has `scores` with output_scores=True and `logits` with
        output_logits=True. Without input_ids one text from BOS on.

        Options are those of GenerationConfig: max_new_tokens, do_sample, temperature, top_k, top_p, repetition_penalty …, which go
        before `generation_config`, and this before the checkpoint's own; stopping_criteria; and the tokenizer, for stop_strings.
        Rows may be padded on the left, marked by attention_mask. inputs may be what the tokenizer returns. Sampling follows torch.manual_seed.
        """
        if isinstance(inputs, Mapping):
            ids, attention_mask, options = generation.of_mapping(inputs, input_ids, attention_mask, options)
        else:
            ids = inputs if input_ids is None else input_ids
        self._rebind()
        with precision.own_dtypes(self.device):
            return generation.generate(self, ids, attention_mask, generation_config, streamer, options)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """The embedding table as it is. @raises ValueError where another number of rows is asked for than it has."""
        rows: int = self.model.embed_tokens.weight.shape[0]
        if new_num_tokens not in (None, rows):
            raise ValueError(
                f"[resize_token_embeddings] the model's tables have {rows} rows and keep them; {new_num_tokens} were asked for. Use tokens that "
                "the tokenizer has (tokenizer.pad_token = tokenizer.eos_token), or resize the float checkpoint with transformers first."
            )
        return self.get_input_embeddings()

    # --- files and copies

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "[push_to_hub] nothing here uploads. save_pretrained() writes the folder; huggingface_hub's upload_folder() takes it from there."
        )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        safe_serialization: bool = True,
        push_to_hub: bool = False,
        state_dict: Mapping[str, Any] | None = None,
        **ignored: Any,
    ) -> None:
        """The frozen base as a folder that transformers loads: four-bit weights with their very codes, config.json,
        generation_config.json. Adapters are saved by PeftModel.save_pretrained."""
        if not safe_serialization or push_to_hub:
            raise ValueError("[save_pretrained] models are written as safetensors into a folder. Leave out the option.")
        known = {
            **saving.IGNORES,
            "max_shard_size": "the weights go into one file, or into the shards that they came in",
            "variant": "",
            "save_peft_format": "",
        }
        refuse_unknown("save_pretrained", ignored, known, self.save_pretrained)
        if self._folder is None:
            raise ValueError("[save_pretrained] the model was not loaded from a folder: there is no config.json to write.")
        options = self._quantization
        storage = str(getattr(options, "bnb_4bit_quant_storage", None) or "uint8").removeprefix("torch.")
        if is_main_process:
            if state_dict is not None:
                base = {name: tensor for name, tensor in self.state_dict().items() if not is_of_an_adapter(name)}
                saving.refuse_other_values(state_dict, (((name,), tensor) for name, tensor in base.items()))
            self._core.save(
                os.fspath(self._folder),
                os.fspath(save_directory),
                storage=storage,
                skip_modules=options.llm_int8_skip_modules if options else None,
                compute_dtype=options.bnb_4bit_compute_dtype if options else None,
            )

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Copies values into the tensors that C++ computes with. Names and shapes must be those of state_dict()."""
        if assign:
            raise ValueError(
                "[load_state_dict] assign=True is not supported: C++ holds the tensors. Values are copied into them."
            )
        self._rebind()
        return super().load_state_dict(state_dict, strict)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CausalLM":
        raise TypeError(
            "[CausalLM] a model is not copied: its weights live in C++. Load it again with from_pretrained; adapters travel by "
            "save_pretrained and load_adapter, their values by get_peft_model_state_dict."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "[CausalLM] a model is not pickled: pickle files can run code. Use save_pretrained and from_pretrained, or save "
            "get_peft_model_state_dict(model) with safetensors."
        )

    # --- memory

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        *,
        keep: str | Sequence[str] = "input_only",
        every: int | str | None = None,
    ) -> None:
        """Recompute in backward what is not kept.

        keep: "input_only", "attention_only" or "input_on_host" (on a GPU the input waits in pinned host memory; on a CPU the
        same as "input_only"), for each block; or a mixture, from the first block on: "input_only:20,everything:12", one of the
        numbers may be left out, or a list of one name a block. Keep more at the end: the last blocks' memory is freed first.
        every: k keeps the input of every k-th block only, "sqrt" that of about every
        √N-th; with keep="input_on_host" on the host. keep="every:4" and keep="sqrt" say the same. gradient_checkpointing_kwargs (use_reentrant …) change nothing: there is one kind here.
        """
        keep = keep if isinstance(keep, str) else ",".join(keep)
        if every == "sqrt":
            self._core.checkpoint_sqrt(keep)
        elif every is not None:
            if not isinstance(every, int):
                raise ValueError(f"[gradient_checkpointing_enable] every must be a number or 'sqrt'; got {every!r}.")
            self._core.checkpoint_every(every, keep)
        else:
            self._core.set_keep(keep)
        self._keep = f"every {every}" if every is not None else keep

    def gradient_checkpointing_disable(self) -> None:
        self._core.set_keep("everything")
        self._keep = ""

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self._keep not in ("", "everything")

    def set_memory(
        self,
        *,
        loss_chunk_rows: int = 0,
        mlp_tile_rows: int = 0,
        weight_workspace: str = "layer",
        embedding_on_host: bool = False,
    ) -> None:
        """Buys memory of a training step with time; the options of TrainingArguments, for a loop of your own."""
        self._core.set_memory(
            loss_chunk_rows=loss_chunk_rows,
            mlp_tile_rows=mlp_tile_rows,
            weight_workspace=weight_workspace,
            embedding_on_host=embedding_on_host,
        )
        self._memory_changed()

    def _memory_changed(self) -> None:
        """The tree shows the table where it is now, or it would hold the memory that was given up."""
        table, shown = self._core.embed_tokens, self.model.embed_tokens
        shown = getattr(shown, "original_module", shown)  # beside a trained copy (modules_to_save)
        if table.data_ptr() != shown.weight.data_ptr():
            shown._parameters["weight"] = torch.nn.Parameter(table, requires_grad=False)  # which a script may not replace
            self._base_parameters = BaseParameters(self)

    def enable_input_require_grads(self) -> None:
        """Nothing to do: a checkpointed block's adapters are inputs of its graph node, whatever its input is."""

    def _apply(self, fn: Any, recurse: bool = True) -> "CausalLM":
        """to(), half(), cuda() …: a loaded model keeps its device and dtype."""
        kept = all(
            (probe.device, probe.dtype) == (self.device, dtype)
            for dtype in (torch.float32, self.dtype)
            for probe in [fn(torch.empty(0, dtype=dtype, device=self.device))]
        )
        if not kept:
            raise ValueError(
                "[CausalLM] a loaded model keeps its device and dtype. Give dtype= and device_map= to from_pretrained."
            )
        return self
