# SPDX-License-Identifier: Apache-2.0
"""Worker processes of benchmarks/train_step_cuda.py: unsloth, transformers + peft + bitsandbytes, and bare products.

python benchmarks/train_step_peers.py checkpoint MODEL FOLDER      writes random weights, quantized by bitsandbytes
python benchmarks/train_step_peers.py unsloth | hf | products      answers lines of JSON on its input with lines of JSON
"""

import dataclasses
import gc
import importlib
import itertools
import json
import pathlib
import statistics
import sys
import time


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    head_dim: int
    tied: bool
    kv_heads: int = 8
    vocabulary: int = 128256
    family: str = "Llama"
    more: dict = dataclasses.field(default_factory=dict, hash=False)  #: Further options of the family's config.

    def linears(self) -> dict[str, tuple[int, int]]:
        """Of a Llama's block."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (wide, self.hidden), "self_attn.k_proj": (narrow, self.hidden), "self_attn.v_proj": (narrow, self.hidden),
            "self_attn.o_proj": (self.hidden, wide), "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden), "mlp.down_proj": (self.hidden, self.intermediate),
        }  # fmt: skip

    def stacked(self) -> list[tuple[int, int]]:
        """Shapes of the products of a layer: q, k and v in one, gate and up in one."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return [
            (wide + 2 * narrow, self.hidden),
            (self.hidden, wide),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        ]

    def operations(self, sequence: int) -> float:
        """Floating-point operations per token: products forward and for the input's gradient, causal attention 1 + 2.5."""
        products = self.layers * sum(out * inner for out, inner in self.stacked()) + self.vocabulary * self.hidden
        return 4 * products + 7 * self.layers * sequence * self.heads * self.head_dim


SHAPES = {
    "70b": Shape(8192, 28672, 80, 64, 128, False),
    "8b": Shape(4096, 14336, 32, 32, 128, False),
    "3b": Shape(3072, 8192, 28, 24, 128, True),
    "1b": Shape(2048, 8192, 16, 32, 64, True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 128, False, 8, 151936, "Qwen3"),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 128, True, 8, 151936, "Qwen3"),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 128, False, 4, 152064, "Qwen2"),
    "mistral-7b": Shape(4096, 14336, 32, 32, 128, False, 8, 32768, "Mistral", {"sliding_window": None}),
    "gemma-3-4b": Shape(2560, 10240, 34, 8, 256, True, 4, 262208, "Gemma3", {"sliding_window": 1024}),
    "gemma-3-1b": Shape(1152, 6912, 26, 4, 256, True, 1, 262144, "Gemma3", {"sliding_window": 512}),
    "phi-4-mini": Shape(
        3072, 8192, 32, 24, 128, True, 8, 200064, "Phi3", {"partial_rotary_factor": 0.75, "pad_token_id": None}
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting: our checkpoint_keep, unsloth's use_gradient_checkpointing, and the HF stack's settings."""

    model: str
    batch: int
    sequence: int
    keep: str
    unsloth: bool | str
    hf: tuple[bool, ...] = ()
    mixed: bool = False  #: Rows of mixed lengths, of which `sequence` is the longest.

    def __str__(self) -> str:
        return f"{self.model}:{'mixed' if self.mixed else f'{self.batch}x{self.sequence}'}:{self.keep}"

    @property
    def lengths(self) -> list[int]:
        """Of the rows. Mixed ones fall by the same factor each, to a sixteenth of the longest."""
        if not self.mixed:
            return [self.sequence] * self.batch
        return [round(self.sequence * 16 ** (-i / (self.batch - 1))) for i in range(self.batch)]


def reply(**fields) -> None:
    print(json.dumps(fields), flush=True)


def words_of(shape: Shape) -> int:
    """Words of the tokenizer, behind which its special tokens begin: Llama 3's 128,000, or what the vocabulary has room for."""
    return min(128000, shape.vocabulary - 256)


def write_tokenizer(folder: pathlib.Path, shape: Shape) -> None:
    """Writes bytes, fillers, and special tokens, all within the vocabulary, so no embedding is resized."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"<filler {i}>" for i in range(len(letters), words_of(shape))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved 0|>", "<|reserved 1|>", "<|finetune_right_pad_id|>"]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[4], padding_side="right",
        model_max_length=131072,
    ).save_pretrained(folder)  # fmt: skip


def config_of(shape: Shape):
    import transformers

    architecture, words = f"{shape.family}ForCausalLM", words_of(shape)
    options = {
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "bos_token_id": words, "eos_token_id": words + 1, "dtype": "bfloat16", "architectures": [architecture],
    }  # fmt: skip
    if shape.family != "Gemma3":  # which has settings of its own for each type of layer
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    return getattr(transformers, architecture).config_class(**{**options, **shape.more})


def linears_of(model) -> dict:
    """The linear layers of the blocks."""
    import torch

    return {
        name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in name
    }


def write_checkpoint(folder: pathlib.Path, shape: Shape, device: str = "cuda") -> None:
    """Writes a checkpoint with random weights in bitsandbytes' four-bit format, quantized on the peers' device."""
    import torch
    import transformers
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import save_file
    from transformers import BitsAndBytesConfig

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    config = config_of(shape)
    config.quantization_config = quantization.to_dict()
    config.save_pretrained(folder)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16).mul_(0.02)

    index, total = {}, 0

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        index.update(dict.fromkeys(tensors, name))

    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    linears = linears_of(model)
    ends, layers = {}, {}
    for name, parameter in model.named_parameters():
        _, found, rest = name.partition(".layers.")
        tensors = layers.setdefault(int(rest.partition(".")[0]), {}) if found else ends
        owner = name.removesuffix(".weight")
        if owner in linears:
            packed, state = quantize_4bit(random(*parameter.shape), blocksize=64, compress_statistics=True, quant_type="nf4")
            tensors[name] = packed.cpu()
            tensors.update({f"{name}.{key}": value.cpu() for key, value in state.as_dict(packed=True).items()})
        else:
            tensors[name] = (
                torch.ones(parameter.shape, dtype=torch.bfloat16) if parameter.dim() == 1 else random(*parameter.shape)
            )
    if not shape.tied:
        ends["lm_head.weight"] = random(shape.vocabulary, shape.hidden)
    save("ends.safetensors", ends)
    for layer, tensors in layers.items():
        save(f"layer-{layer:02}.safetensors", tensors)
    contents = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(contents))
    write_tokenizer(folder, shape)


def load_hf(checkpoint: str, gpu: int = 0):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map={"": gpu}, dtype=torch.bfloat16)
    model.config.use_cache = False
    return get_peft_model(
        model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def load_unsloth(checkpoint: str, checkpointing: bool | str, sequence: int):
    import torch
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        checkpoint, max_seq_length=sequence, dtype=torch.bfloat16, load_in_4bit=True, device_map={"": 0}, local_files_only=True,
        use_gradient_checkpointing=checkpointing,
    )  # fmt: skip
    names = sorted({name.rpartition(".")[2] for name in linears_of(model)})
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, bias="none", target_modules=names, use_gradient_checkpointing=checkpointing,
        max_seq_length=sequence, random_state=1,
    )  # fmt: skip
    FastLanguageModel.for_training(model, use_gradient_checkpointing=checkpointing)
    return model


def launches_of(step) -> dict[str, float]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels, memory, intervals = 0, 0, []
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA or event.duration_ns() == 0:
            continue
        if event.name().startswith(("Memcpy", "Memset")):
            memory += 1
        else:
            kernels += 1
            intervals.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    busy, end = 0, 0
    for first, last in sorted(intervals):
        busy += max(0, last - max(first, end))
        end = max(end, last)
    return {"kernels": kernels, "memory_operations": memory, "busy_ms": busy * 1e-6}


def serve_peer(system: str) -> None:
    """Loads on request, then measures once per line of JSON."""
    modules = ["torch", "transformers", "peft", "bitsandbytes"]
    if system == "unsloth":
        modules = ["unsloth", *modules]  # before transformers, which it changes
    versions = {name: importlib.import_module(name).__version__ for name in modules}
    import bitsandbytes
    import torch

    setting = json.loads(sys.stdin.readline())
    row, checkpointing = Row(**setting["row"]), setting["row"]["unsloth"]
    if system == "unsloth":
        model = load_unsloth(setting["checkpoint"], checkpointing, row.sequence)
    else:
        model = load_hf(setting["checkpoint"])
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)
    inputs: dict = {}

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def rest() -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def measure(
        lengths: list[int],
        seconds: float,
        count: bool,
        checkpointing: bool | str,
        layers: int | None = None,
        packed: bool = False,
    ) -> dict:
        """layers: the number of first layers that are checkpointed, if not all (HF stack).
        packed: rows end to end, as unsloth's trainer gives them to its models; otherwise padded to the longest."""
        nonlocal inputs
        torch.manual_seed(1)
        rows = [torch.randint(0, words_of(SHAPES[row.model]), (length,), device="cuda") for length in lengths]
        if packed:
            labels = torch.cat([torch.nn.functional.pad(r[1:], (1, 0), value=-100) for r in rows])[None]
            positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])[None]
            inputs = {
                "input_ids": torch.cat(rows)[None],
                "labels": labels,
                "position_ids": positions,
                "packed_seq_lengths": torch.tensor(lengths, dtype=torch.int32),
            }
        else:
            pad = torch.nn.utils.rnn.pad_sequence
            inputs = {
                "input_ids": pad(rows, batch_first=True),
                "labels": pad(rows, batch_first=True, padding_value=-100),
            }
            if len(set(lengths)) > 1:
                inputs["attention_mask"] = pad([torch.ones_like(r) for r in rows], batch_first=True)
        if system == "hf":
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                if layers is not None:
                    for layer in model.get_base_model().model.layers[layers:]:
                        layer.gradient_checkpointing = False
            else:
                model.gradient_checkpointing_disable()
        step()  # compiles and allocates
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        timed = min(max(int(2 * seconds / (time.perf_counter() - begin)), 8), 60) if seconds else 1
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        result = {"steps_ms": times, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        if count:
            launches = launches_of(step)
            result |= {**launches, "busy": launches.pop("busy_ms") / statistics.median(times)}
        return result

    compiled = system != "unsloth"  # compiles now, while others load; the HF stack compiles nothing
    while not compiled:
        try:
            measure(row.lengths, 0, False, row.unsloth)
            compiled = True
        except torch.OutOfMemoryError:  # the others do the same at this moment, and then give their memory back
            print("waiting for memory", file=sys.stderr)
        rest()
        if not compiled:
            time.sleep(3)
    rest()
    reply(ready=True, versions=versions, device=torch.cuda.get_device_name())
    for line in sys.stdin:
        try:
            reply(**measure(**json.loads(line)))
        except torch.OutOfMemoryError as error:
            reply(error=f"out of memory: {str(error).split('.')[0]}")
        rest()


def serve_products() -> None:
    """TFLOP/s of torch.mm over the products of a layer, forward and backward, back to back."""
    import torch

    reply(ready=True)
    for line in sys.stdin:
        setting = json.loads(line)
        shape, tokens = SHAPES[setting["model"]], setting["tokens"]
        weights = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in shape.stacked()]
        inputs = [torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16) for _, inner in shape.stacked()]
        gradients = [torch.randn(tokens, out, device="cuda", dtype=torch.bfloat16) for out, _ in shape.stacked()]
        work = 4 * tokens * sum(weight.numel() for weight in weights)

        def layer(weights=weights, inputs=inputs, gradients=gradients) -> None:
            for weight, x, dy in zip(weights, inputs, gradients, strict=True):
                torch.mm(x, weight.t())
                torch.mm(dy, weight)

        layer()
        repeat = max(1, int(setting["seconds"] * 600e12 / work))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeat):
            layer()
        end.record()
        torch.cuda.synchronize()
        reply(tflops=repeat * work / begin.elapsed_time(end) * 1e-9)
        del weights, inputs, gradients, layer
        torch.cuda.empty_cache()


def main() -> None:
    match sys.argv[1:]:
        case ["checkpoint", model, folder]:
            write_checkpoint(pathlib.Path(folder), SHAPES[model])
        case ["products"]:
            serve_products()
        case ["unsloth" | "hf" as system]:
            serve_peer(system)
        case []:
            print("measures nothing by itself; train_step_cuda.py runs it")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
