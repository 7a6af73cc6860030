# SPDX-License-Identifier: Apache-2.0
"""Runs the parsers of files that strangers wrote over seeds, the corpus and random changes of both (targets.cpp).

    python tests/fuzz/fuzz.py PROGRAM [--seconds S] [--jobs J] [--keep] [TARGET …]

PROGRAM is what CMakeLists.txt of this folder makes: with clang a libFuzzer program with AddressSanitizer and UndefinedBehaviorSanitizer, otherwise one
that changes its inputs at random. Each target runs for S seconds on J / (number of targets) processes. An input that breaks a parser is
written to fuzz-<target>-* in the working folder. --keep adds inputs that reach new code to corpus.tar.xz.
"""

import argparse
import concurrent.futures
import contextlib
import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "examples" / "data" / "tiny-llama"
CORPUS = HERE / "corpus.tar.xz"
#: Bytes of an input of corpus.tar.xz, and of all that are kept of a target.
LARGEST, MOST = 2048, 16_000


def shard(header: str, data: bytes = b"") -> bytes:
    padded = header.encode() + b" " * (-len(header) % 8)
    return len(padded).to_bytes(8, "little") + padded + data


def gguf(block: int = 8) -> bytes:
    """A model of one layer, its matrices in Q8_0 (type 8) or Q4_0 (2)."""
    integer, real, text, truths, items = 4, 6, 8, 7, 9

    def string(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    def key(name: str, kind: int, value: bytes) -> bytes:
        return string(name) + kind.to_bytes(4, "little") + value

    counts = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32, "attention.head_count": 1,
              "attention.key_length": 32, "rope.dimension_count": 32}  # fmt: skip
    keys = [key("general.architecture", text, string("llama")), key("llama.vocab_size", integer, (4).to_bytes(4, "little"))]
    keys += [key(f"llama.{name}", integer, value.to_bytes(4, "little")) for name, value in counts.items()]
    keys.append(key("llama.attention.layer_norm_rms_epsilon", real, struct.pack("<f", 1e-5)))
    keys.append(key("tokenizer.ggml.tokens", items, text.to_bytes(4, "little") + (1).to_bytes(8, "little") + string("a")))
    keys.append(key("llama.some", items, truths.to_bytes(4, "little") + (2).to_bytes(8, "little") + b"\1\0"))
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    tensors = [("token_embd.weight", (32, 4), 0), ("output_norm.weight", (32,), 0)]
    tensors += [("blk.0.attn_norm.weight", (32,), 0), ("blk.0.ffn_norm.weight", (32,), 0)]
    tensors += [(f"blk.0.{name}.weight", (32, 32), block) for name in matrices]
    entries, offset = b"", 0
    for name, extents, kind in tensors:
        entries += (
            string(name) + len(extents).to_bytes(4, "little") + b"".join(extent.to_bytes(8, "little") for extent in extents)
        )
        entries += kind.to_bytes(4, "little") + offset.to_bytes(8, "little")
        rows = extents[1] if len(extents) > 1 else 1
        offset += -(-rows * {0: 128, 2: 18, 8: 34}[kind] // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys) + entries
    return head + bytes(-len(head) % 32 + offset)


def crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def seeds() -> dict[str, list[bytes]]:
    """Inputs by target, of which each is accepted."""
    config = (MODEL / "config.json").read_bytes()
    header = '{"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[],"data_offsets":[8,12]}}'
    adapter = {
        "peft_type": "LORA", "base_model_name_or_path": "m", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1,
        "target_modules": ["q_proj", "v_proj"], "bias": "none", "use_rslora": True, "use_dora": False, "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {}, "modules_to_save": ["lm_head"], "layers_to_transform": [0, 1], "init_lora_weights": "pissa", "fan_in_fan_out": False,
    }  # fmt: skip
    quantization = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": ["lm_head"],
    }  # fmt: skip
    four_bit = json.dumps(
        {**json.loads(config), "quantization_config": quantization, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    )
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64], "nested_blocksize": 256, "nested_dtype": "float32",
        "nested_offset": 0.05,
    }  # fmt: skip
    content = b"{}"
    file = {"size": 2, "sha256": hashlib.sha256(content).hexdigest(), "crc32c": [f"{crc32c(content):08x}"]}
    manifest = json.dumps(
        {"schema": 1, "kind": "checkpoint", "run_id": "0" * 32, "step": 4, "parent": "", "files": {"run_state.json": file}}
    ).encode()
    run = b'{"run_id": "' + b"0" * 32 + b'", "from": "checkpoint-4"}'
    counts = json.dumps(
        {
            "schema": 6, "epoch": 1, "batch": 3, "global_step": 40, "ranks": 1, "owes_save": 0, "micro_step": 80, "seed": "2a", "loss_sum": 61.25,
            "device": "cuda",
        }
    ).encode()  # fmt: skip
    chat = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    rows = b"\n".join(
        [
            b'{"text": "a \\u00e9 \\ud83d\\ude00"}',
            chat,
            b'{"input_ids": [1, 2], "labels": [-100, 2]}',
            b'{"prompt": "a", "completion": "b"}',
        ]
    )
    csv = b'text,other\n"a ""b""",1\r\nc,"d\ne"\n'
    templates = [(MODEL / "chat_template.jinja").read_bytes()]
    templates.append(b"{%- for m in messages if m['role'] != 'system' -%}{{ m['content'] | trim + eos_token }}{%- endfor -%}")
    return {
        "safetensors": [shard(header, bytes(12)), shard("{}")],
        "gguf": [gguf(), gguf(2)],
        "header": [header.encode(), b"{}"],
        "index": [b'{"metadata": {"total_size": 2}, "weight_map": {"w": "model-1.safetensors"}}'],
        "config": [config, four_bit.encode()],
        "adapter": [json.dumps(adapter).encode(), b'{"peft_type": "LORA", "target_modules": "all-linear"}'],
        "quant_state": [json.dumps(state).encode()],
        "manifest": [manifest],
        "run_folder": [b"\0".join([run, manifest, content])],
        "run_state": [counts],
        "json": [config, rows.splitlines()[0], b'[1, -2.5e-3, true, null, "\\n", [[]], {"a": {}}]'],
        "tokenizer": [(MODEL / "tokenizer.json").read_bytes()],
        "template": templates,
        "rows": [b"\0" + rows, b"\1" + csv, b"\2" + csv.replace(b",", b"\t"), b"\3a\nb\n", b"\4a\nb\n\nc", b'\0[{"text": "a"}, {"text": "b"}]'],
        "gzip": [gzip.compress(rows, 9, mtime=0), gzip.compress(b"", mtime=0) + gzip.compress(bytes(300), 1, mtime=0), gzip.compress(rows, 0, mtime=0)],
    }  # fmt: skip


def read_corpus() -> dict[str, list[bytes]]:
    inputs: dict[str, list[bytes]] = {target: [] for target in seeds()}
    with contextlib.suppress(FileNotFoundError), tarfile.open(CORPUS) as corpus:
        for member in corpus:
            inputs[member.name.partition("/")[0]].append(corpus.extractfile(member).read())
    return inputs


def write_corpus(inputs: dict[str, list[bytes]]) -> None:
    with tarfile.open(CORPUS, "w:xz", preset=9) as corpus:
        for target, contents in inputs.items():
            for content in contents:
                member = tarfile.TarInfo(f"{target}/{hashlib.sha1(content).hexdigest()[:16]}")
                member.size = len(content)
                corpus.addfile(member, io.BytesIO(content))


def environment(target: str) -> dict[str, str]:
    return {**os.environ, "FUZZ_TARGET": target, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=0"}


def one(
    program: str, is_libfuzzer: bool, target: str, number: int, seconds: float, folder: pathlib.Path
) -> tuple[str, int, str]:
    """@returns the target, executions, and the end of the output of a process that failed."""
    if is_libfuzzer:
        options = [
            f"-max_total_time={int(seconds)}",
            f"-seed={number + 1}",
            "-timeout=10",
            "-rss_limit_mb=2048",
            "-malloc_limit_mb=512",
        ]
        options += ["-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={os.getcwd()}/fuzz-{target}-", "-reload=0"]
        line = [program, str(folder), *options]
    else:
        line = [program, str(folder), str(seconds)]
    done = subprocess.run(line, env=environment(target), capture_output=True, text=True, errors="replace")
    found = re.search(r"number_of_executed_units: *(\d+)", done.stderr) or re.search(r"(\d+) changes", done.stdout)
    return target, int(found[1]) if found else 0, "" if done.returncode == 0 else f"{done.stdout[-500:]}{done.stderr[-3000:]}"


def keep(program: str, target: str, folders: list[pathlib.Path], into: pathlib.Path) -> list[bytes]:
    """The smallest inputs that together reach what all of the folders reach."""
    into.mkdir()
    line = [program, "-merge=1", "-verbosity=0", f"-max_len={LARGEST}", str(into), *map(str, folders)]
    subprocess.run(line, env=environment(target), capture_output=True, check=True)
    kept, total = [], 0
    for content in sorted((path.read_bytes() for path in into.iterdir()), key=len):
        total += len(content)
        if total > MOST:
            break
        kept.append(content)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(seeds()))
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--keep", action="store_true")
    given = parser.parse_args()
    targets = given.targets or list(seeds())
    program = os.path.abspath(given.program)
    is_libfuzzer = b"libFuzzer" in pathlib.Path(program).read_bytes()
    processes = max(1, given.jobs // len(targets))
    corpus = read_corpus()
    wrong, counts = 0, dict.fromkeys(targets, 0)
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        folders = {
            (target, number): pathlib.Path(name) / f"{target}-{number}" for target in targets for number in range(processes)
        }
        for (target, _), folder in folders.items():
            folder.mkdir()
            for content in (*seeds()[target], *corpus[target]):
                (folder / hashlib.sha1(content).hexdigest()).write_bytes(content)
        runs = [pool.submit(one, program, is_libfuzzer, *key, given.seconds, folder) for key, folder in folders.items()]
        for run in concurrent.futures.as_completed(runs):
            target, count, text = run.result()
            counts[target] += count
            if text:
                wrong += 1
                print(f"{target}: {text}", flush=True)
        if given.keep:
            merged = {
                target: pool.submit(
                    keep,
                    program,
                    target,
                    [folder for (of, _), folder in folders.items() if of == target],
                    pathlib.Path(name) / target,
                )
                for target in targets
            }
            write_corpus({**corpus, **{target: run.result() for target, run in merged.items()}})
    print(json.dumps({"executions": sum(counts.values()), "broken": wrong, **counts}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
