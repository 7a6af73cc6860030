# SPDX-License-Identifier: Apache-2.0
# Made by scripts/make_stubs.py from the compiled module. Do not edit.
import collections.abc
import typing

import torch

class Accumulator:
    """The denominator of a window of micro-batches.

    The mean loss over a big batch is the sum of its targets' losses divided by the number of its targets. Count the targets of the whole
    window first and weigh each micro-batch's summed loss by 1 / tokens: k micro-batches then give the loss and the gradients of one big
    batch, on rows of any length and on a last, partial window. A window without a target weighs 0. An Accumulator lives for one window:

        window = Accumulator([count_of(batch) for batch in batches])
        for batch in batches:
            loss_sum = torch.nn.functional.cross_entropy(logits_of(batch), batch.targets, reduction="sum")
            window.share_of(loss_sum).backward()
        print(window.mean_loss().item())

    target_counts: the number of targets of each micro-batch, integers >= 0.
    sum_over_ranks: a function that turns this process's count into the count of all processes; it is called once. None: one process.

    Raises ValueError if a count is negative, or the count of all processes is below this one's.
        """
    def __init__(self, target_counts: collections.abc.Sequence[typing.SupportsInt], *, sum_over_ranks: collections.abc.Callable[[typing.SupportsInt], int] | None=None) -> None: ...
    @property
    def weight(self) -> float:
        """1 / tokens as a float, or 0.0 without targets."""
    @property
    def tokens(self) -> int:
        """Targets in the window, over all processes."""
    def share_of(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Returns loss_sum / tokens, on the same graph and device, and counts the loss in mean_loss().

        loss_sum: (), floating: a micro-batch's loss, summed over its targets. Does not synchronize.

        Raises ValueError if the loss of every micro-batch of the window is counted already.
                """
    def add(self, loss_sum: torch.Tensor) -> None:
        """Counts a micro-batch's summed loss in mean_loss(), for a model that scales its gradients by weight itself.

        loss_sum: (), floating, detached here; summed in float64 on its device. Does not synchronize.
                """
    def mean_loss(self) -> torch.Tensor:
        """Returns the losses / tokens: () float64, 0 without targets.

        This process's share: sum it over all processes. Does not synchronize. Raises ValueError if the loss of a micro-batch of the window is missing.
                """

class AnswerFile:
    """eval_answers.jsonl; src/train/answer_file.hpp."""
    def __init__(self, folder: str, resumed_at: typing.SupportsInt | None) -> None: ...
    def add(self, step: typing.SupportsInt, lines: str, data: str='') -> None: ...

class BackgroundCommit:
    """src/io/background_commit.hpp: one checkpoint at a time, on a thread."""
    def __init__(self) -> None: ...
    def start(self, run: RunFolder, checkpoint: CheckpointWriter, limit: typing.SupportsInt | None=None, keep: collections.abc.Sequence[str]=[]) -> None:
        """Waits for the one before, whose error it raises."""
    def poll(self) -> str | None:
        """Its path, if it has become whole since the last call."""
    def wait(self) -> str | None:
        """Its path, or None if there is none since the last call."""
    def settle(self) -> str | None:
        """Waits; an error is logged."""

class CausalLM:
    """include/qlorapp/nn/causal_lm.hpp"""
    def unpad(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None=None, labels: torch.Tensor | None=None, position_ids: torch.Tensor | None=None, on_host: bool=False) -> UnpaddedBatch: ...
    def add_adapters(self, lora_config_json: str, seed: typing.SupportsInt, name: str='default', weights: str | None=None) -> None:
        """`weights` names a folder with the weights as they were before quantization."""
    @property
    def has_adapters(self) -> bool: ...
    @property
    def base_was_changed(self) -> bool: ...
    @property
    def active_adapter(self) -> str: ...
    @active_adapter.setter
    def active_adapter(self, value: str) -> None: ...
    def delete_adapters(self, name: str) -> None: ...
    def enable_adapters(self, enabled: bool) -> None: ...
    def adapter_names(self, name: str='') -> list[str]:
        """Names of an adapter's parameters, as PEFT stores them."""
    def parameters(self, name: str='') -> list[torch.Tensor]: ...
    def adopt_parameter(self, i: typing.SupportsInt, parameter: torch.Tensor, name: str='') -> None: ...
    def gradient(self, i: typing.SupportsInt) -> torch.Tensor: ...
    def zero_grad(self) -> None: ...
    def bind_gradients(self) -> None: ...
    def set_keep(self, keep: str) -> None: ...
    def set_memory(self, *, loss_chunk_rows: typing.SupportsInt=0, mlp_tile_rows: typing.SupportsInt=0, weight_workspace: str='layer', embedding_on_host: bool=False, base_on_host: bool=False) -> None:
        """include/qlorapp/nn/memory_settings.hpp"""
    def gathered_head(self) -> torch.Tensor:
        """(vocabulary, hidden). Of a sharded base: an exchange."""
    @property
    def embedding_on_host(self) -> bool: ...
    def leave_ranks(self) -> None:
        """Before Python ends: threads of a process group must not outlive it. The model computes no more."""
    @property
    def is_sharded(self) -> bool:
        """Each of several processes has a shard of the base: they make the same calls in the same order."""
    def move_embedding(self, to_host: bool) -> None:
        """The table alone, between GPU and pinned host memory; the other settings of memory stay."""
    def move_blocks(self, to_host: bool) -> None:
        """The blocks' frozen weights, between the device and host memory."""
    @property
    def segments(self) -> list[tuple[int, int, str]]:
        """[(begin, end, what is kept)]"""
    def forward_backward(self, batch: UnpaddedBatch, grad_scale: torch.Tensor, seed: typing.SupportsInt=0, micro_step: typing.SupportsInt=0) -> tuple[torch.Tensor, int]:
        """(summed loss, number of targets); gradients are added to the parameters' .grad."""
    def hidden_states(self, batch: UnpaddedBatch, training: bool, seed: typing.SupportsInt=0, micro_step: typing.SupportsInt=0) -> torch.Tensor:
        """(tokens, hidden) after the last norm, on the autograd graph."""
    def loss_of(self, hidden: torch.Tensor, batch: UnpaddedBatch) -> torch.Tensor:
        """The summed loss, on the graph of `hidden`."""
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def weight_bytes(self) -> int: ...
    def linear_names(self) -> list[str]:
        """Paths of the linear layers in the module tree, in the order of the model."""
    def named_weights(self) -> list[typing.Any]:
        """[(name in a checkpoint, tensor or QuantizedTensor)] of the frozen base."""
    @property
    def body(self) -> str:
        """Path of the decoder: "model", or "model.language_model" of a wrapper."""
    @property
    def tied(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def position_limit(self) -> int: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def lora_dropout(self) -> float: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def save_adapter(self, folder: str, base_model: str, name: str='') -> None: ...
    def adapter_base_text(self, folder: str) -> str:
        """What stands in qlorapp_base.json beside an adapter of this base in this folder; src/io/adapter_base.hpp."""
    def load_adapter(self, folder: str, name: str='default') -> None: ...
    def save(self, source: str, output: str, *, storage: str='uint8', skip_modules: collections.abc.Sequence[str] | None=None, compute_dtype: torch.dtype | None=None) -> None:
        """Writes the frozen base as a Hugging Face folder; include/qlorapp/io/save_model.hpp."""

class ChatTemplate:
    """include/qlorapp/text/chat_template.hpp."""
    def __init__(self, jinja: str, tokens: collections.abc.Mapping[str, str], special_tokens: collections.abc.Sequence[str]) -> None: ...
    def trained_texts(self, messages: str, wanted: collections.abc.Sequence[bool], tools: str, variables: str, today: str) -> list[tuple[str, list[tuple[int, int]]]]:
        """[(text, trained ranges of its bytes)]; messages, tools and variables are JSON, "" for none; src/data/answers.hpp."""

class CheckpointWriter:
    """A checkpoint under construction; it vanishes unless commit() is called."""
    def __init__(self, run: RunFolder, step: typing.SupportsInt) -> None: ...
    @property
    def folder(self) -> str: ...
    def commit(self) -> str:
        """Its path."""
    def discard(self) -> None: ...

class Comparison:
    """include/qlorapp/train/comparison.hpp"""
    def __init__(self, *, eval_rows: typing.SupportsInt, answers: typing.SupportsInt, neutral_tokens: typing.SupportsInt, base: collections.abc.Mapping[str, typing.SupportsFloat | None] | None, adapter: collections.abc.Mapping[str, typing.SupportsFloat | None]) -> None:
        """base and adapter: {"eval_loss", "neutral_loss", "exact_matches", "stopped"}, the last two counts; None: not measured."""
    @property
    def is_empty(self) -> bool: ...
    def json(self) -> str: ...
    def table(self) -> list[str]: ...
    def write_svg(self, folder: str) -> None: ...

class FolderUpdate:
    """src/files/folder_update.hpp: files that are replaced together."""
    def __init__(self, folder: str, guard: str) -> None: ...
    @property
    def staging(self) -> str: ...
    def retire(self, name: str) -> None: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...

class FormatError(ValueError): ...

class GenerationCache:
    """Keys and values per row; src/nn/generation_cache.hpp."""
    @property
    def lengths(self) -> list[int]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def adapters_are_constant(self) -> bool: ...
    @adapters_are_constant.setter
    def adapters_are_constant(self, arg0: bool) -> None: ...
    def select_rows(self, rows: collections.abc.Sequence[typing.SupportsInt]) -> None: ...
    def remove_last(self, count: typing.SupportsInt) -> None: ...
    def blocks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[(keys, values)] per block, each (rows * capacity, key-value heads, head_dim)."""

class GenerationPlan:
    """include/qlorapp/memory/generation_plan.hpp"""
    @property
    def peak_allocated(self) -> int: ...
    @property
    def peak_reserved(self) -> int: ...
    @property
    def fits(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    @property
    def most_rows(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def cache_memory(self) -> int: ...
    @property
    def phases(self) -> dict[typing.Any, typing.Any]: ...
    @property
    def summary(self) -> str: ...

class GradScaler:
    """The state machine of qlorapp.GradScaler, over gradients instead of an optimizer."""
    def __init__(self, device: torch.device, init_scale: typing.SupportsFloat, growth_factor: typing.SupportsFloat, backoff_factor: typing.SupportsFloat, growth_interval: typing.SupportsInt, enabled: bool, min_scale: typing.SupportsFloat, max_consecutive_skips: typing.SupportsInt) -> None: ...
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    def unscale_(self, grads: collections.abc.Sequence[torch.Tensor | None], optimizer: typing.SupportsInt, allow_fp16: bool) -> None: ...
    def step(self, take_step: collections.abc.Callable[[], None], grads: collections.abc.Sequence[torch.Tensor | None], optimizer: typing.SupportsInt) -> bool: ...
    def update(self, new_scale: typing.SupportsFloat | None=None) -> None: ...
    def update_from(self, new_scale: torch.Tensor) -> None: ...
    def get_scale(self) -> float: ...
    def get_growth_factor(self) -> float: ...
    def get_backoff_factor(self) -> float: ...
    def get_growth_interval(self) -> int: ...
    def set_growth_factor(self, new_factor: typing.SupportsFloat) -> None: ...
    def set_backoff_factor(self, new_factor: typing.SupportsFloat) -> None: ...
    def set_growth_interval(self, new_interval: typing.SupportsInt) -> None: ...
    def is_enabled(self) -> bool: ...
    def abandon_step(self) -> None: ...
    def state_dict(self) -> dict[typing.Any, typing.Any]: ...
    def load_state_dict(self, state_dict: dict[typing.Any, typing.Any]) -> None: ...
    def __getstate__(self, /) -> tuple[typing.Any, ...]: ...
    def __setstate__(self, arg0: tuple[typing.Any, ...]) -> None: ...

class HeldOutQuestion:
    """include/qlorapp/train/answer_rows.hpp"""
    @property
    def row(self) -> int: ...
    @property
    def prompt(self) -> list[int]: ...
    @property
    def expected(self) -> list[int]: ...

class JudgedAnswers:
    """include/qlorapp/train/answer_rows.hpp"""
    @property
    def exact_matches(self) -> int: ...
    @property
    def stopped(self) -> int: ...
    def lines(self, step: typing.SupportsInt, data: str='') -> str: ...

class LoraLinear:
    """include/qlorapp/nn/lora_linear.hpp"""
    def __init__(self, base: QuantizedTensor | torch.Tensor, r: typing.SupportsInt, lora_alpha: typing.SupportsFloat, lora_dropout: typing.SupportsFloat, use_rslora: bool, gaussian_init: bool, seed: typing.SupportsInt, bias: torch.Tensor | None=None) -> None: ...
    def forward(self, x: torch.Tensor, training: bool) -> torch.Tensor: ...
    def adopt_parameters(self, a: torch.Tensor, b: torch.Tensor) -> None: ...
    def to(self, device: torch.device) -> None: ...
    def merge(self, into: str) -> None: ...
    def unmerge(self) -> None: ...
    @property
    def a(self) -> torch.Tensor: ...
    @property
    def b(self) -> torch.Tensor: ...
    @property
    def scaling(self) -> float: ...
    @property
    def merged(self) -> bool: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...

class MemoryPlan:
    """include/qlorapp/memory/planner.hpp"""
    @property
    def peak_allocated(self) -> int: ...
    @property
    def peak_reserved(self) -> int: ...
    @property
    def fits(self) -> bool: ...
    @property
    def batch(self) -> int: ...
    @property
    def pinned_host(self) -> int: ...
    @property
    def phases(self) -> dict[typing.Any, typing.Any]: ...
    @property
    def summary(self) -> str: ...
    @property
    def checklist(self) -> str: ...
    @property
    def measured(self) -> int | None: ...
    def measure(self, model: CausalLM) -> None: ...
    def svg(self, model: str='', budget: typing.SupportsInt | None=None) -> str: ...

class PagedState:
    """Moments of `elements` parameters that leave a full GPU for the host: src/train/paged_state.hpp"""
    def __init__(self, moments: collections.abc.Sequence[torch.Tensor], elements: typing.SupportsInt) -> None: ...
    def step(self, update: collections.abc.Callable[..., typing.Any]) -> None:
        """Calls update(moments, begin, count) with moments on the GPU, which it changes in place."""
    def tensors(self) -> list[torch.Tensor]: ...
    def move_to_host(self) -> bool: ...
    @property
    def on_host(self) -> bool: ...

class QuantizedTensor:
    """A weight in four bits, as Quantizer.quantize returns it: bitsandbytes' bytes.

    With n elements in blocks of block_size, and b = ceil(n / block_size) blocks:

        packed         (ceil(n / 2), 1) uint8; two codes a byte, the even element in the high nibble
        absmax         (b) float32 scales; with double quantization (b) uint8 codes of them
        nested_absmax  (ceil(b / nested_block_size)) float32, or None without double quantization
        nested_offset  () float32, the mean of the scales, or None without double quantization

    Its tensors are on one device. A block is a run of the weight flattened row by row.
        """
    @property
    def packed(self) -> torch.Tensor: ...
    @property
    def absmax(self) -> torch.Tensor: ...
    @property
    def nested_absmax(self) -> torch.Tensor | None: ...
    @property
    def nested_offset(self) -> torch.Tensor | None: ...
    @property
    def shape(self) -> tuple[typing.Any, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def block_size(self) -> int: ...
    @property
    def nested_block_size(self) -> int: ...
    @property
    def quant_type(self) -> str: ...
    @property
    def double_quant(self) -> bool: ...
    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
    def numel(self) -> int: ...
    def to(self, device: torch.device) -> QuantizedTensor: ...
    def clone(self) -> QuantizedTensor:
        """The same weight in memory of its own."""
    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x · Wᵀ, differentiable in x."""
    def named_tensors(self, name: str) -> list[tuple[str, torch.Tensor]]:
        """[(key, tensor)] that bitsandbytes stores for this weight."""
    @staticmethod
    def of_tensors(tensors: collections.abc.Mapping[str, torch.Tensor], name: str, where: str) -> QuantizedTensor:
        """The weight whose named_tensors(name) these are, in memory of its own. where: for messages.

        Raises FormatError where they do not fit together.
                """
    def __repr__(self) -> str: ...

class Quantizer:
    """Quantizes weights to four bits, and back.

        q = Quantizer().quantize(weight)      # NF4, blocks of 64, double quantization: 4.127 bits per element
        back = Quantizer().dequantize(q)

    quant_type: "nf4" or "fp4".
    block_size: elements per scale: 32, 64, 128, 256, 512, 1024, 2048 or 4096.
    double_quant: store the scales in eight bits, too.
    nested_block_size: scales per second-level scale, > 0.
    compat: "none": nested codes are exactly nearest, a block of zeros has code 7, and a weight that is not finite is refused.
        "bnb": bitsandbytes' nested codes, and its course with such weights.

    Codes and scales equal those of bitsandbytes on the same kind of device. A Quantizer has no state: threads may share one.
    Raises ValueError for an option outside its range.
        """
    def __init__(self, quant_type: str='nf4', block_size: typing.SupportsInt=64, double_quant: bool=True, nested_block_size: typing.SupportsInt=256, compat: str='none') -> None: ...
    def quantize(self, weight: torch.Tensor) -> QuantizedTensor:
        """Returns the codes and scales of a weight, on its device.

        weight: any shape and strides; float32, float16 or bfloat16; not changed.
        Raises ValueError that names the first element that is not finite (compat="none"); synchronizes for that check.
                """
    def dequantize(self, q: QuantizedTensor, dtype: torch.dtype | None=None) -> torch.Tensor:
        """Returns a dense tensor of q.shape on q's device. Looks at q alone, not at this Quantizer's options.

        dtype: float32, float16, bfloat16 or float64; None: the dtype of the weight. Does not synchronize.
                """

class RunFolder:
    """src/io/checkpoint_folder.hpp. Locked until close()."""
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def run_id(self) -> str: ...
    @property
    def is_new(self) -> bool: ...
    def owns(self, checkpoint: str) -> bool:
        """Whether a checkpoint is there and of this run."""
    def begin(self) -> None: ...
    def go_on_from(self, checkpoint: str, changed: bool=False) -> None: ...
    def prune(self, limit: typing.SupportsInt, keep: collections.abc.Sequence[str]) -> None: ...
    def close(self) -> None:
        """Releases the lock. The folder cannot be used afterwards."""

class SamplingOptions:
    """include/qlorapp/nn/sampling.hpp"""
    def __init__(self, *, do_sample: bool=False, temperature: typing.SupportsFloat=1.0, top_k: typing.SupportsInt=0, top_p: typing.SupportsFloat=1.0, min_p: typing.SupportsFloat=0.0, repetition_penalty: typing.SupportsFloat=1.0, seed: typing.SupportsInt=0, torch_draws: bool=False) -> None: ...

class StepRunner:
    """src/train/step_runner.hpp"""
    def __init__(self, model: CausalLM, arguments_json: str, token_statistics: bool=False, group: str='', longest_row: typing.SupportsInt=0) -> None:
        """group: the name of a process group of torch.distributed whose ranks train together. longest_row: in tokens, for a memory_budget; 0: max_length."""
    def arguments(self) -> str:
        """As JSON: those that were given, with what a memory_budget chose."""
    def run_worst_case(self, largest: UnpaddedBatch) -> None:
        """Forward and backward without an update: memory runs out here if it ever does."""
    def gradients(self, window: collections.abc.Sequence[UnpaddedBatch], stop_now: collections.abc.Callable[[], bool]) -> bool:
        """Forward and backward of a step's micro-batches. False if stop_now() was true on a rank between two of them: then nothing has changed."""
    def sum(self, values: collections.abc.Sequence[typing.SupportsInt]) -> list[int]:
        """Over the ranks. Synchronizes."""
    def check_same(self, what: str, value: str) -> None:
        """Raises ValueError on all ranks if the value differs between them."""
    def report_failure(self, why: str) -> None:
        """Ends the other ranks with the same message."""
    def take_gradients(self, mean_loss: torch.Tensor, micro_batches: typing.SupportsInt) -> None:
        """The same for gradients, times scale(), that a backward pass has left in the parameters' .grad."""
    def update(self, rate: typing.SupportsFloat) -> bool:
        """False if float16 overflowed: then nothing has changed."""
    def read(self) -> None:
        """Raises TrainingDiverged if gradients were not finite. Synchronizes."""
    @property
    def must_read(self) -> bool:
        """read() is due. Only with on_non_finite=rollback: else update() reads."""
    @property
    def skipped_steps(self) -> int: ...
    def scale(self) -> torch.Tensor: ...
    def load_state(self, folder: str) -> bool:
        """Moments, loss scale and counters of a checkpoint that the C++ Trainer wrote. Raises FormatError if base or options differ."""
    def clear_graphs(self) -> None: ...
    @property
    def global_step(self) -> int:
        """Steps of the run so far, skipped ones too."""
    @global_step.setter
    def global_step(self, value: typing.SupportsInt) -> None: ...
    @property
    def is_open(self) -> bool:
        """The last window had no update so far."""
    @property
    def mean_loss(self) -> torch.Tensor:
        """() of the last window, on the device."""
    @property
    def input_tokens(self) -> int:
        """Of the last window."""
    @property
    def token_statistics(self) -> torch.Tensor:
        """(micro-batches, 3) float32 of the last window, on the device: the summed entropy of the predictions, how many targets are the most probable token, and how many there are. None unless they were asked for."""
    @property
    def grad_norm(self) -> torch.Tensor:
        """() before clipping, on the device."""
    @property
    def scaler(self) -> GradScaler: ...
    @property
    def steps(self) -> int:
        """Updates so far."""
    @steps.setter
    def steps(self, value: typing.SupportsInt) -> None: ...
    @property
    def micro_step(self) -> int:
        """Micro-batches so far: a part of the key of dropout masks."""
    @micro_step.setter
    def micro_step(self, value: typing.SupportsInt) -> None: ...
    def moments(self) -> list[tuple[str, torch.Tensor]]:
        """[(name, tensor)] flat over the arena, in the optimizer's memory: exp_avg and exp_avg_sq, or state1, state2, absmax1, absmax2."""

class StopStrings:
    """include/qlorapp/text/stop_strings.hpp; decode(ids) returns the text of tokens."""
    def __init__(self, strings: collections.abc.Sequence[str], decode: collections.abc.Callable[..., typing.Any]) -> None: ...
    def begin(self, row: typing.SupportsInt, prompt: collections.abc.Sequence[typing.SupportsInt]) -> None: ...
    def add(self, row: typing.SupportsInt, token: typing.SupportsInt) -> bool:
        """Whether the row ends with the token."""
    def ended(self, row: typing.SupportsInt) -> bool: ...
    def unmatched(self) -> list[str]: ...

class TrainingDiverged(RuntimeError): ...

class UnpaddedBatch:
    """A padded batch without its padding; include/qlorapp/data/collate.hpp."""
    @property
    def row_count(self) -> int: ...
    @property
    def target_count(self) -> int: ...
    @property
    def first_token(self) -> int:
        """Of a batch that is a part of another."""
    @first_token.setter
    def first_token(self, value: typing.SupportsInt) -> None: ...
    @property
    def ignored_padding_labels(self) -> int: ...
    @property
    def ignored_first_labels(self) -> int: ...
    def pad(self, values: torch.Tensor, fill: typing.SupportsFloat=0.0) -> torch.Tensor: ...

def advice_for_one_row(model: CausalLM, length: typing.SupportsInt, *, optimizer_is_8bit: bool, room: typing.SupportsInt, evaluates: bool=True) -> str: ...

def base_inputs(model: CausalLM) -> str:
    """JSON: fingerprints of the frozen weights, and the fields of config.json that enter the computation. Reads all weights."""

def best_fit_decreasing(lengths: collections.abc.Sequence[typing.SupportsInt], capacity: typing.SupportsInt) -> list[list[int]]:
    """Which of the lengths go together; include/qlorapp/data/packing.hpp."""

def bits_and_bytes_config_aliases() -> dict[str, tuple[str, bool]]: ...

def bits_and_bytes_config_fields() -> list[typing.Any]:
    """[(name, type, default as JSON, doc)]"""

def check_base(folder: str, saved: str, now: str) -> None:
    """Compares results of base_inputs(). Raises FormatError if a checkpoint belongs to another base."""

def check_checkpoint(checkpoint: str) -> None:
    """Raises FormatError if a file is missing or was changed."""

def check_training_arguments(json: str) -> None: ...

def checkpoint(run: collections.abc.Callable[..., typing.Any], inputs: collections.abc.Sequence[torch.Tensor | None], keep_linear_outputs: bool=False) -> list[torch.Tensor]:
    """Outputs of run(*inputs), of which backward keeps the inputs only; include/qlorapp/nn/checkpointed_block.hpp."""

def choose_questions(rows: collections.abc.Sequence[tuple[collections.abc.Sequence[typing.SupportsInt], collections.abc.Sequence[typing.SupportsInt]]], count: typing.SupportsInt, eos_token_ids: collections.abc.Sequence[typing.SupportsInt], positions: typing.SupportsInt) -> list[HeldOutQuestion]:
    """Of rows [(input_ids, labels)]; include/qlorapp/train/answer_rows.hpp."""

def choose_tokens(logits: torch.Tensor, rows: collections.abc.Sequence[typing.SupportsInt], position: typing.SupportsInt, sampling: SamplingOptions) -> list[int]: ...

def command_defaults() -> str:
    """JSON: the defaults of the command that differ from these tables"""

def config_fields() -> list[tuple[str, str, float, float, bool, str]]:
    """[(key of config.json, type, least, most, whether it is required, doc)]"""

def config_keys() -> list[str]:
    """The keys of config.json that determine a native family's results."""

def count_parameters(config_json: str, lora_config_json: str) -> tuple[typing.Any, ...]:
    """(trainable, all), from the configs alone."""

def dtype_on(device: str, wanted: torch.dtype) -> torch.dtype: ...

def export_model(model: str, adapter: str, *, gguf: str='', gguf_adapter: str='', ollama: str='', ollama_base: str='', merged: str='', adapter_for: str='', output: str='', type: str='', chat_template: str='', importance: str='', base: str | None=None, quant_type: str='nf4', block_size: typing.SupportsInt=64, double_quant: bool=True, nested_block_size: typing.SupportsInt=256, compat: str='none', skip_modules: collections.abc.Sequence[str]=[], verify: bool=False, progress: collections.abc.Callable[[typing.SupportsInt, typing.SupportsInt], None] | None=None) -> str:
    """Writes a model or adapter for other programs; include/qlorapp/io/export.hpp."""

def forward_cached(model: CausalLM, cache: GenerationCache, tokens: torch.Tensor, counts: collections.abc.Sequence[typing.SupportsInt], every_token: bool=False) -> torch.Tensor:
    """A forward pass over all rows that appends to the cache, which grows as needed."""

def generate(model: CausalLM, prompts: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt]], *, max_new_tokens: typing.SupportsInt, min_new_tokens: typing.SupportsInt=0, eos_token_ids: collections.abc.Sequence[typing.SupportsInt]=[], sampling: SamplingOptions=..., on_token: collections.abc.Callable[..., typing.Any] | None=None, on_end: collections.abc.Callable[..., typing.Any] | None=None, max_rows: typing.SupportsInt=128, cache_bytes: typing.SupportsInt=0, deterministic: bool=False, fits_positions: bool=False) -> list[list[int]]:
    """The new tokens of each prompt; on_token(row, token) returning False ends a row, on_end(row, tokens) gets it when it has ended. include/qlorapp/nn/generate.hpp."""

def gguf_of(folder: str) -> str:
    """src/format/gguf_folders.hpp."""

def is_gguf_file(path: str) -> bool:
    """include/qlorapp/io/gguf.hpp."""

def is_staging(folder: str) -> bool:
    """Whether a FolderUpdate or CheckpointWriter fills this folder and commits it as a whole."""

def judge_answers(questions: collections.abc.Sequence[HeldOutQuestion], generated: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt]], eos_token_ids: collections.abc.Sequence[typing.SupportsInt], decode: collections.abc.Callable[[collections.abc.Sequence[typing.SupportsInt], bool], str]) -> JudgedAnswers:
    """decode(ids, skip_special_tokens) → text; include/qlorapp/train/answer_rows.hpp."""

def largest_batch(model: CausalLM, length: typing.SupportsInt, room: typing.SupportsInt, most: typing.SupportsInt, *, optimizer_is_8bit: bool, evaluates: bool) -> int: ...

def load_model(folder: str, *, compute_dtype: torch.dtype, load_in_4bit: bool=True, quant_type: str='nf4', block_size: typing.SupportsInt=64, double_quant: bool=True, nested_block_size: typing.SupportsInt=256, compat: str='none', skip_modules: collections.abc.Sequence[str]=[], device: torch.device=..., keep_blocks: bool=True, base_on_host: bool=False, shard_over: str='', of_node: bool=False, progress: collections.abc.Callable[[typing.SupportsInt, typing.SupportsInt], None] | None=None) -> CausalLM:
    """A Hugging Face folder as a CausalLM; include/qlorapp/io/load_model.hpp. shard_over: the name of a process group of torch.distributed; of_node: over its processes on this machine."""

def log_warning_once(line: str) -> None: ...

def lora_config_aliases() -> dict[str, tuple[str, bool]]:
    """{alias: (name, whether it is an older one)}"""

def lora_config_fields() -> list[typing.Any]:
    """[(name, type, default as JSON, doc)]"""

def make_cache(model: CausalLM, rows: typing.SupportsInt, capacity: typing.SupportsInt) -> GenerationCache: ...

def memory_for(device: str) -> int: ...

def merge(model: str, adapter: str, output: str, *, base: str | None=None, dtype: torch.dtype | None=None, quant_type: str='nf4', block_size: typing.SupportsInt=64, double_quant: bool=True, nested_block_size: typing.SupportsInt=256, compat: str='none', skip_modules: collections.abc.Sequence[str]=[], max_shard_size: typing.SupportsInt=5000000000, progress: collections.abc.Callable[[typing.SupportsInt, typing.SupportsInt], None] | None=None) -> None:
    """Writes base and adapter as one dense Hugging Face folder; include/qlorapp/io/merge.hpp."""

def mixed_precision(gpu: str, major: typing.SupportsInt, minor: typing.SupportsInt) -> tuple[typing.Any, ...]:
    """("bf16" or "fp16", the line that says so)"""

def model_folder(path: str) -> str:
    """include/qlorapp/io/gguf.hpp."""

def model_path(folder: str) -> str:
    """include/qlorapp/io/gguf.hpp."""

def native_architectures() -> list[str]: ...

def neutral_text() -> str: ...

def newest_checkpoint(output_dir: str) -> tuple[str | None, list[str]]:
    """(path or None, newer ones that were skipped, each with the reason)"""

def pack(rows: collections.abc.Sequence[tuple[collections.abc.Sequence[typing.SupportsInt], collections.abc.Sequence[typing.SupportsInt]]], max_length: typing.SupportsInt, strategy: str='bfd') -> list[tuple[list[int], list[int], list[int]]]:
    """[(input_ids, labels)] → [(input_ids, labels, row_lengths)]; include/qlorapp/data/packing.hpp."""

def parse_bytes(what: str, text: str) -> int: ...

def plan_generation(model: str, lora_config_json: str, *, prompt_tokens: typing.SupportsInt | None, max_new_tokens: typing.SupportsInt, max_rows: typing.SupportsInt, cache_memory: typing.SupportsInt, do_sample: bool, gpu: str, memory_budget: typing.SupportsInt | None, requested_dtype: torch.dtype | None, load_in_4bit: bool, quant_type: str, double_quant: bool, skip_modules: collections.abc.Sequence[str]) -> GenerationPlan: ...

def plan_memory(model: str, lora_config_json: str, args_json: str, *, gpu: str, requested_dtype: torch.dtype | None, load_in_4bit: bool, quant_type: str, double_quant: bool, skip_modules: collections.abc.Sequence[str]) -> MemoryPlan: ...

def plan_model(model: CausalLM, args_json: str) -> MemoryPlan: ...

def probe_step(model: CausalLM, batch: typing.SupportsInt, length: typing.SupportsInt, *, optimizer_is_8bit: bool) -> int: ...

def quantize_checkpoint(folder: str, output: str, *, compute_dtype: torch.dtype=..., quant_type: str='nf4', block_size: typing.SupportsInt=64, double_quant: bool=True, nested_block_size: typing.SupportsInt=256, compat: str='none', progress: collections.abc.Callable[[typing.SupportsInt, typing.SupportsInt], None] | None=None) -> None:
    """Writes a folder that transformers loads as a bitsandbytes checkpoint; include/qlorapp/io/load_model.hpp."""

def say_older_name(where: str, alias: str, name: str) -> None:
    """Once in a process."""

def set_log_sink(sink: collections.abc.Callable[[typing.SupportsInt, str], None] | None) -> None:
    """sink(level, line) receives every line, level being a number of logging's; None discards them."""

torch_version: str

def training_arguments_aliases() -> dict[str, tuple[str, bool]]: ...

def training_arguments_fields() -> list[typing.Any]:
    """[(name, type, default as JSON, doc)]"""

def verify_export(paths: collections.abc.Sequence[str], *, base: str='', load_in_4bit: bool=True, device: torch.device=..., prompts: collections.abc.Sequence[str]=[], data: str='', max_new_tokens: typing.SupportsInt=32) -> str:
    """The receipt of a comparison, a JSON text; include/qlorapp/train/verify_export.hpp."""

def warmup_steps(warmup_steps: typing.SupportsFloat, warmup_ratio: typing.SupportsFloat, training_steps: typing.SupportsInt) -> int: ...

def warped_logits(logits: torch.Tensor, seen: collections.abc.Sequence[torch.Tensor], sampling: SamplingOptions) -> torch.Tensor: ...

def why_unsupported(config_json: str) -> str:
    """The line that refuses a sound config that the engine does not compute; empty if there is none."""

def wrapped_architectures() -> list[str]:
    """Of checkpoints whose part for text is of a native family."""

def write_loss_svg(folder: str, log_history: str) -> None:
    """loss.svg of transformers' log_history, as JSON."""
