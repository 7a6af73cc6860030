# SPDX-License-Identifier: Apache-2.0
"""Measures loading onto a GPU, and the time from process start to the first optimizer step: qlorapp, the HF stack, unsloth.

    python benchmarks/load_cuda.py [--build build/dev] [--model 8b] [--folder /dev/shm/qlorapp-load] [--rounds 3] [--cold]

Makes a checkpoint of random bf16 weights at the shape of Llama 3.1 8B or Llama 3.2 1B, in shards of at most 5 GB, and a four-bit one with
`qlorapp quantize`. --folder keeps both. Every measurement runs in its own process, interleaved:

    bench_load            the C++ library: load_model, adapters, one step of random tokens
    qlorapp train         the command, --max_steps 1, until it logs the step
    import qlorapp        the same in Python, if this interpreter has the package
    HF stack              AutoModelForCausalLM.from_pretrained(quantization_config=…, device_map={"": 0}), get_peft_model, AdamW8bit
    unsloth               FastLanguageModel.from_pretrained(load_in_4bit=True), get_peft_model, AdamW8bit; compiles at the start

"trainable" is the time from the load call to a model with adapters, after imports and CUDA context.
"first step" is the time from the start of the process to the end of the first optimizer step: 1 × 2048 tokens, r = 16 on all seven
linear layers, 8-bit AdamW, bf16, no gradient checkpointing. GPU memory is the caching allocator's, host memory VmHWM and VmRSS after
loading. Files are in the page cache; --cold asks the kernel to drop them before each process (on a disk, not /dev/shm).
"""

import argparse
import concurrent.futures
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from train_step_peers import SHAPES, Shape, load_unsloth, write_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARD_BYTES = 5 * 10**9
SEQUENCE = 2048
PEERS = ("HF stack", "unsloth")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- the checkpoint


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": size for name, size in shape.linears().items()}
        tensors |= {f"{prefix}{name}.weight": (shape.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return tensors


def nbytes(size: tuple[int, ...]) -> int:
    count = 2
    for extent in size:
        count *= extent
    return count


def write_shard(path: pathlib.Path, tensors: dict[str, tuple[int, ...]], noise: memoryview, ones: memoryview) -> None:
    """Writes the same bytes as safetensors, without holding a shard. Every weight is a part of one noise buffer."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + nbytes(tensors[name])
        header[name] = {"dtype": "BF16", "shape": list(tensors[name]), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    at = 0
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            left = nbytes(tensors[name])
            if len(tensors[name]) == 1:
                file.write(ones)
                continue
            while left:
                at %= len(noise)
                written = file.write(noise[at : at + min(left, 2**26)])
                at, left = at + written, left - written


def config_of(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": shape.tied, "bos_token_id": shape.vocabulary - 256, "eos_token_id": shape.vocabulary - 255,
    }  # fmt: skip


def write_checkpoint(folder: pathlib.Path, shape: Shape, *, with_tokenizer: bool = True) -> None:
    import torch

    folder.mkdir(parents=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    noise = torch.randn(2**27 + 2**11, device=device, dtype=torch.bfloat16).mul_(0.02).cpu().view(torch.uint8).numpy().data
    ones = torch.ones(shape.hidden, dtype=torch.bfloat16).view(torch.uint8).numpy().data
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, size in tensors_of(shape).items():
        if shards[-1] and sum(map(nbytes, shards[-1].values())) + nbytes(size) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = size
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(write_shard, [folder / name for name in names], shards, [noise] * len(shards), [ones] * len(shards)))
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(nbytes(size) for shard in shards for size in shard.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    if with_tokenizer:
        write_tokenizer(folder, shape)
    (folder / "config.json").write_text(json.dumps(config_of(shape)))


# --- what runs in processes of its own


def reply(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def host_memory() -> dict[str, float]:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmHWM", "VmRSS"))}
    return {"hwm_mib": values["VmHWM"], "rss_mib": values["VmRSS"]}


def timed_load(load, add_adapters):
    """Loads the model. Reports time and memory."""
    import torch

    torch.zeros(1, device="cuda")
    begin = time.perf_counter()
    model = load()
    torch.cuda.synchronize()
    loaded = time.perf_counter() - begin
    stats = torch.cuda.memory_stats()
    memory = {
        "peak_gib": stats["allocated_bytes.all.peak"] / 2**30, "final_gib": stats["allocated_bytes.all.current"] / 2**30,
        "reserved_gib": stats["reserved_bytes.all.peak"] / 2**30,
    } | host_memory()  # fmt: skip
    model = add_adapters(model)
    torch.cuda.synchronize()
    reply(event="trainable", seconds=time.perf_counter() - begin, load_s=loaded, **memory)
    return model


def run_peer(folder: str) -> None:
    import peft
    import torch
    import transformers

    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    if "quantization_config" in json.loads((pathlib.Path(folder) / "config.json").read_text()):
        options = {}  # the folder says it
    else:
        options = {"quantization_config": quantization}
    lora = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = timed_load(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, device_map={"": 0}, dtype=torch.bfloat16, **options),
        lambda model: peft.get_peft_model(model, lora),
    )
    model.train()
    take_a_step(model)


def run_unsloth(folder: str) -> None:
    import unsloth  # noqa: F401  first of all: it changes transformers

    take_a_step(timed_load(lambda: load_unsloth(folder, checkpointing=False, sequence=SEQUENCE), lambda model: model))


def take_a_step(model) -> None:
    import bitsandbytes
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)
    tokens = torch.randint(0, 128000, (1, SEQUENCE), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    reply(event="step", loss=loss.item())


def run_python(folder: str) -> None:
    import qlorapp

    quantization = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    if "quantization_config" in json.loads((pathlib.Path(folder) / "config.json").read_text()):
        quantization = None
    lora = qlorapp.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = timed_load(
        lambda: qlorapp.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, dtype="bfloat16", device_map={"": 0}
        ),
        lambda model: qlorapp.get_peft_model(model, lora),
    )

    class Told(qlorapp.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs) -> None:
            reply(event="step")

    with tempfile.TemporaryDirectory() as output:
        args = qlorapp.TrainingArguments(
            output_dir=output, max_steps=1, per_device_train_batch_size=1, bf16=True, optim="adamw_8bit", gradient_checkpointing=False,
            save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        qlorapp.Trainer(model=model, args=args, train_dataset=[row_of_tokens()], callbacks=[Told]).train()


def row_of_tokens() -> dict[str, list[int]]:
    tokens = [(7919 * i) % 128000 for i in range(SEQUENCE)]
    return {"input_ids": tokens, "labels": tokens}


# --- the bench


class Bench:
    def __init__(self, args: argparse.Namespace, folder: pathlib.Path):
        self.args, self.folder, self.begun = args, folder, time.monotonic()
        self.rows = folder / "rows.jsonl"
        self.rows.write_text(json.dumps(row_of_tokens()) + "\n")
        me = [sys.executable, str(pathlib.Path(__file__).resolve())]
        build = args.build.resolve()
        self.systems = {
            "bench_load": lambda model: [str(build / "benchmarks" / "bench_load"), model, str(SEQUENCE)],
            "qlorapp train": lambda model: [
                str(build / "qlorapp"), "train", "--defaults", "trainer", "--model", model, "--data", str(self.rows), "--output", str(folder / "adapter"),
                "--overwrite_output_dir", "true", "--max_steps", "1", "--per_device_train_batch_size", "1", "--max_length", str(SEQUENCE),
                "--logging_steps", "1", "--save_strategy", "no", "--target_modules", "all-linear", "--r", "16", "--lora_alpha", "32",
                "--lora_dropout", "0", "--optim", "adamw_8bit", "--bf16", "true", "--gradient_checkpointing", "false", "--device", "cuda",
            ],
            "import qlorapp": lambda model: [*me, "--run", "python", model],
            "HF stack": lambda model: [*me, "--run", "peer", model],
            "unsloth": lambda model: [*me, "--run", "unsloth", model],
        }  # fmt: skip
        if missing := [name for name in ("bitsandbytes", "transformers", "peft") if importlib.util.find_spec(name) is None]:
            say(f"HF stack is left out: {', '.join(missing)} not installed")
            del self.systems["HF stack"]
        if importlib.util.find_spec("unsloth") is None:
            say("unsloth is left out: it is not installed")
            del self.systems["unsloth"]
        if subprocess.run([sys.executable, "-c", "import qlorapp._C"], capture_output=True, check=False).returncode:
            say("import qlorapp is left out: the package is not there for this interpreter")
            del self.systems["import qlorapp"]
        self.results: dict[tuple[str, str], list[dict]] = {}

    def checkpoints(self) -> dict[str, pathlib.Path]:
        dense, quantized = self.folder / self.args.model, self.folder / f"{self.args.model}-nf4"
        if not (dense / "config.json").exists():
            write_checkpoint(dense, SHAPES[self.args.model])
            say(f"{dense} written after {time.monotonic() - self.begun:.0f} s")
        if not (quantized / "config.json").exists():
            shutil.rmtree(quantized, ignore_errors=True)
            command = [str(self.args.build / "qlorapp"), "quantize", "--model", str(dense), "--output", str(quantized)]
            subprocess.run([*command, "--compute_dtype", "bfloat16"], check=True, stdout=sys.stderr)
            say(f"{quantized} written after {time.monotonic() - self.begun:.0f} s")
        return {"bf16": dense, "nf4": quantized}

    def measure(self, command: list[str], model: pathlib.Path) -> dict:
        if self.args.cold:
            os.sync()  # what is not on the disk yet is not dropped
        for path in model.glob("*.safetensors"):
            with path.open("rb") as file:
                if self.args.cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        result: dict = {}
        begin = time.perf_counter()
        with (self.folder / "stderr").open("w+") as log:
            process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=log, cwd=self.folder)
            for line in process.stdout:
                now = time.perf_counter() - begin
                fields = {}
                if line.startswith("{"):
                    with contextlib.suppress(json.JSONDecodeError):
                        fields = json.loads(line)
                if fields.get("event") == "trainable":
                    result |= fields
                elif ("loss" in line and not line.startswith("plan:")) or fields.get("event") == "step":
                    result.setdefault("first_step", now)
            if process.wait():
                log.seek(0)
                result["error"] = (log.read().strip().splitlines() or ["ended without a word"])[-1]
        return result

    def run(self) -> None:
        checkpoints = self.checkpoints()
        for i in range(self.args.rounds):
            for form, model in checkpoints.items():
                if self.args.forms and form not in self.args.forms:
                    continue
                for system, command in self.systems.items():
                    if time.monotonic() - self.begun > self.args.limit:
                        say(f"out of time: {form} {system}, round {i + 1} not measured")
                        continue
                    result = self.measure(command(str(model)), model)
                    self.results.setdefault((form, system), []).append(result)
                    say(f"  {form} {system}: {json.dumps(result)}")
        if self.args.json:
            self.args.json.write_text(json.dumps([[*key, values] for key, values in self.results.items()]))

    def table(self) -> str:
        import torch

        peers = [name for name in ("transformers", "peft", "bitsandbytes") if importlib.util.find_spec(name)]
        versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ["torch", *peers])
        lines = [
            f"{torch.cuda.get_device_name()}; {self.args.model}; {versions}; {self.args.rounds} rounds, in turn; "
            f"files {'dropped from' if self.args.cold else 'in'} the page cache.",
            "",
            "| checkpoint | system | call → trainable, s (least … most) | × bench_load | start → first step, s (least … most) | × qlorapp train "
            "| GPU peak − final, GiB | final | reserved | host VmHWM, MiB | VmRSS |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]

        def values(form: str, system: str, key: str) -> list[float]:
            return sorted(result[key] for result in self.results.get((form, system), []) if key in result)

        def spread(found: list[float]) -> str:
            return f"{statistics.median(found):.2f} ({found[0]:.2f} … {found[-1]:.2f})" if found else ""

        def ratio(form: str, system: str, ours: str, key: str) -> str:
            mine, theirs = values(form, ours, key), values(form, system, key)
            return f"{statistics.median(theirs) / statistics.median(mine):.2f}" if mine and theirs and system in PEERS else ""

        for form, system in self.results:
            errors = [result["error"] for result in self.results[form, system] if "error" in result]
            if errors:
                lines.append(f"| {form} | {system} | {errors[0]} | | | | | | | | |")
                continue

            def middle(key: str, digits: int = 2, form: str = form, system: str = system) -> str:
                found = values(form, system, key)
                return f"{statistics.median(found):.{digits}f}" if found else ""

            extra = [r["peak_gib"] - r["final_gib"] for r in self.results[form, system] if "peak_gib" in r]
            cells = [
                form, system, spread(values(form, system, "seconds")), ratio(form, system, "bench_load", "seconds"),
                spread(values(form, system, "first_step")), ratio(form, system, "qlorapp train", "first_step"),
                f"{statistics.median(extra):.2f}" if extra else "", middle("final_gib"), middle("reserved_gib"), middle("hwm_mib", 0),
                middle("rss_mib", 0),
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build", type=pathlib.Path, default=ROOT / "build" / "dev", help="holds qlorapp and benchmarks/bench_load"
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="8b")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="folder of the checkpoints, which are kept; default: a temporary folder in /dev/shm"
    )
    parser.add_argument("--forms", nargs="+", choices=["bf16", "nf4"], help="checkpoints to load; default: both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each process")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no new process starts")
    parser.add_argument("--json", type=pathlib.Path, help="file for all measurements")
    parser.add_argument("--run", nargs=2, metavar=("SYSTEM", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        {"peer": run_peer, "python": run_python, "unsloth": run_unsloth}[args.run[0]](args.run[1])
        return
    import torch

    if not torch.cuda.is_available():
        print("SKIPPED: no GPU here")
        return
    with contextlib.ExitStack() as stack:
        folder = args.folder
        if folder is None:
            shared = pathlib.Path("/dev/shm")
            place = shared if shared.is_dir() and not args.cold else None
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qlorapp-load-", dir=place)))
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(args, folder.resolve())
        bench.run()
        print(bench.table())


if __name__ == "__main__":
    main()
