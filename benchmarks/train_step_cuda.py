# SPDX-License-Identifier: Apache-2.0
"""Measures training steps on a GPU at real shapes of several families: qlorapp, unsloth, and transformers + peft + bitsandbytes.

    python benchmarks/train_step_cuda.py [--build build/dev] [--rows 8b:2x2048 1b] [--peers unsloth hf] [--rounds 2] [--seconds 3] [--memory_first]

Random weights in NF4 with double quantization, r = 16 on all seven linear layers, dropout 0, 8-bit AdamW, gradients clipped at norm 1, one
optimizer step per micro-batch, bf16. The peers run under autocast without `prepare_model_for_kbit_training`, which is faster for them. Their
checkpoint is written once, already quantized by bitsandbytes, into a temporary folder.

Every row of every system has its own process, which stays alive while the others of its model are measured. They run interleaved on the GPU:
A B C A B C.
Each turn is a few warm-up steps and then steps for about --seconds (8 to 60 of them), timed by GPU events without synchronization in between.

- Rows of mixed lengths are eight, from the longest to a sixteenth of it; tokens are those of the rows. unsloth is measured with the rows padded,
  and laid end to end as its own trainer does it.
- Steps of all rounds are pooled: median, 10th and 90th percentile.
- Peak memory is torch's max_memory_allocated over the timed steps.
- MFU is the model's arithmetic (forward, and backward for inputs only; without LoRA's products and recomputing) over the rate of torch.mm at the
  layers' shapes in the same rounds.
- Kernels per step, and the share of a step in which at least one ran, come from torch's profiler in the last round.
- --memory_first measures every row of ours again with smaller loss chunks, one workspace at a time and the embedding on the host
  (docs/memory.md); short rows with their MLP in tiles and one weight's workspace.
- The peer unsloth_graphs is unsloth with its opt-in CUDA graphs (UNSLOTH_BLOCK_CUDAGRAPHS=1).
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import torch
from train_step_peers import SHAPES, Row

ROOT = pathlib.Path(__file__).resolve().parents[1]

ROWS = [
    Row("8b", 1, 2048, "everything", False, (True, False)),
    Row("8b", 2, 2048, "everything", False, (True, False)),
    Row("8b", 4, 2048, "everything", False),
    Row("8b", 2, 2048, "input_only", True, (True,)),
    Row("8b", 1, 2048, "input_on_host", "unsloth", (True,)),
    Row("8b", 2, 2048, "input_on_host", "unsloth", (True,)),
    Row("8b", 4, 2048, "input_on_host", "unsloth"),
    Row("1b", 2, 2048, "everything", False, (True, False)),
    Row("1b", 2, 2048, "input_on_host", "unsloth", (True,)),
    Row("1b", 8, 2048, "input_on_host", "unsloth", (True,)),
    Row("1b", 2, 512, "input_only", "unsloth", (True,)),
    *(
        row
        for model in ("qwen3-8b", "qwen3-0.6b", "qwen2.5-7b", "mistral-7b", "gemma-3-4b", "gemma-3-1b", "phi-4-mini")
        for row in (Row(model, 2, 2048, "everything", False), Row(model, 2, 2048, "input_on_host", "unsloth"))
    ),
    *(
        Row(model, 8, 2048, "input_on_host", "unsloth", mixed=True)
        for model in ("8b", "qwen3-8b", "qwen3-0.6b", "qwen2.5-7b", "mistral-7b", "gemma-3-4b", "gemma-3-1b", "phi-4-mini")
    ),
]


#: Of bench_train_step: its own defaults, said because a setting holds until the next one, and those of --memory_first.
DEFAULTS = "loss_chunk_rows=0 weight_workspace=layer mlp_tile_rows=0 embedding_on_host=0 base_on_host=0"
MEMORY_FIRST = "loss_chunk_rows=512 weight_workspace=stack embedding_on_host=1"
MEMORY_FIRST_SHORT = "loss_chunk_rows=256 weight_workspace=projection mlp_tile_rows=512 embedding_on_host=1"


#: Ways to run unsloth, with what their environment has beside.
UNSLOTH = {"unsloth": {}, "unsloth_graphs": {"UNSLOTH_BLOCK_CUDAGRAPHS": "1"}}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Side:
    """A process that measures on request. The constructor starts it; ready() waits for it."""

    def __init__(self, command: list[str], name: str, folder: pathlib.Path, environment: dict[str, str], limit: float):
        own = folder / name.replace(":", "-")
        own.mkdir()
        self.name, self.limit, self.log = name, limit, own / "stderr"
        self.error, self.first, self.lines = "", {}, queue.Queue()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=own, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.put(line)
        self.lines.put("")

    def tell(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError, OSError):
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict:
        if self.error:
            return {"error": self.error}
        try:
            line = self.lines.get(timeout=self.limit)
        except queue.Empty:
            line = ""
            self.error = f"no answer in {self.limit:.0f} s"
        if not line:
            said = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()]
            self.error = self.error or (said[-1].strip() if said else "ended without a word")
            self.process.kill()
            return {"error": self.error}
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            self.error = f"no answer but {line.strip()[:80]}"
            return {"error": self.error}

    def ready(self) -> bool:
        if not self.first:
            self.first = self.answer()
            if self.error:
                say(f"{self.name}: {self.error}")
        return not self.error

    def ask(self, text: str) -> dict:
        self.tell(text)
        return self.answer()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()


class Result:
    """The results of one system on one row, over all rounds."""

    def __init__(self, system: str, setting: str):
        self.system, self.setting = system, setting
        self.steps, self.peak, self.launches, self.error = [], 0.0, {}, ""

    def add(self, answer: dict) -> None:
        if "error" in answer:
            self.error = answer["error"]
            return
        self.steps += answer["steps_ms"]
        self.peak = max(self.peak, answer["peak_gib"])
        if "kernels" in answer:
            self.launches = answer

    def rate(self, tokens: int, share: float = 0.5) -> float:
        """The quantile of tokens per second: this share of the steps was slower."""
        ordered = sorted(self.steps, reverse=True)
        return tokens / ordered[round(share * (len(ordered) - 1))] * 1e3


class Bench:
    def __init__(self, args: argparse.Namespace, folder: pathlib.Path):
        self.args, self.folder, self.begun = args, folder, time.monotonic()
        self.rows = [row for row in ROWS if not args.rows or any(str(row).startswith(wanted) for wanted in args.rows)]
        self.peers = [peer for peer in args.peers if self.installed(peer)]
        self.environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "TOKENIZERS_PARALLELISM": "0",
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            "PYTHONPATH": os.pathsep.join(str(pathlib.Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path),
        }  # fmt: skip
        self.sides: dict[tuple, Side] = {}
        self.results: dict[Row, dict[tuple, Result]] = {}
        self.products: dict[Row, list[float]] = {}
        self.versions: dict[str, str] = {}
        self.device = "the GPU"

    def installed(self, peer: str) -> bool:
        needed = ["bitsandbytes", "transformers", "peft"] + (["unsloth"] if peer in UNSLOTH else [])
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            say(f"{peer} is left out: {', '.join(missing)} not installed")
        return not missing

    def side(self, key: tuple, name: str, command: list[str], **environment: str) -> None:
        self.sides[key] = Side(command, name, self.folder, self.environment | environment, self.args.patience)

    def start(self, rows: list[Row]) -> list[Row]:
        """Starts the processes of one model. @returns the rows that can be measured."""
        peers = [sys.executable, str(pathlib.Path(__file__).resolve().with_name("train_step_peers.py"))]
        program = str((self.args.build / "benchmarks" / "bench_train_step").resolve())
        model = rows[0].model
        for row in rows:
            shape = [row.model, str(row.batch), str(row.sequence), row.keep]
            mixed = [f"lengths={','.join(map(str, row.lengths))}"] if row.mixed else []
            self.side(("ours", row), f"qlorapp:{row}", [program, *shape, *mixed, "--serve"])
        if self.peers:
            command = [*peers, "checkpoint", model, str(self.folder / model)]
            if subprocess.run(command, env=self.environment, check=False, stdout=sys.stderr).returncode:
                say(f"the peers' checkpoint of {model} could not be written; they are not measured")
        # Only rows that we can run are worth a peer's time.
        for row in rows:
            if not self.sides["ours", row].ready():
                say(f"SKIPPED {row}: {self.sides['ours', row].error}")
        rows = [row for row in rows if not self.sides["ours", row].error]
        for row in rows:
            setting = json.dumps({"row": dataclasses.asdict(row), "checkpoint": str(self.folder / model)})
            for peer, environment in UNSLOTH.items():
                if peer in self.peers:
                    self.side((peer, row), f"{peer}:{row}", [*peers, "unsloth"], **environment)
                    self.sides[peer, row].tell(setting)
            if "hf" in self.peers and row.hf and ("hf", model) not in self.sides:
                self.side(("hf", model), f"hf:{model}", [*peers, "hf"])
                self.sides["hf", model].tell(setting)
        self.side(("products",), f"products:{model}", [*peers, "products"])
        for side in self.sides.values():
            side.ready()
        say(f"{model}: ready after {time.monotonic() - self.begun:.0f} s")
        return rows

    def turn(self, row: Row, last: bool) -> None:
        seconds, results = self.args.seconds, self.results.setdefault(row, {})

        def put(system: str, setting: str, answer: dict) -> None:
            result = results.setdefault((system, setting), Result(system, setting))
            result.add(answer)
            if "steps_ms" in answer:
                low = sum(row.lengths) / statistics.median(answer["steps_ms"]) * 1e3
                say(
                    f"  {row} {system} {setting}: {low:.0f} tok/s, {answer['peak_gib']:.2f} GiB, {len(answer['steps_ms'])} steps"
                )
            else:
                say(f"  {row} {system} {setting}: {answer['error']}")

        question = json.dumps({"model": row.model, "tokens": sum(row.lengths), "seconds": 0.5})
        rate = self.sides["products",].ask(question)
        if "tflops" in rate:
            self.products.setdefault(row, []).append(rate["tflops"])
        put("qlorapp", row.keep, self.sides["ours", row].ask(f"{seconds} {DEFAULTS} {'count' if last else ''}"))
        if self.args.memory_first:
            small = MEMORY_FIRST if sum(row.lengths) > 1024 else MEMORY_FIRST_SHORT
            put("qlorapp", f"{row.keep}, memory first", self.sides["ours", row].ask(f"{seconds} {small}"))
        plain = {"lengths": row.lengths, "seconds": seconds, "count": last}
        for peer in UNSLOTH:
            if (peer, row) in self.sides:
                setting = {False: "no checkpointing", True: "checkpointing", "unsloth": '"unsloth"'}[row.unsloth]
                setting += ", CUDA graphs" if UNSLOTH[peer] else ""
                for form in ("padded", "packed") if row.mixed else ("",):
                    question = json.dumps({**plain, "checkpointing": row.unsloth, "packed": form == "packed"})
                    put("unsloth", f"{setting}{form and ', '}{form}", self.sides[peer, row].ask(question))
        for checkpointing in row.hf if ("hf", row.model) in self.sides else ():
            question = json.dumps({**plain, "checkpointing": checkpointing})
            put("HF stack", "checkpointing" if checkpointing else "no checkpointing", self.sides["hf", row.model].ask(question))

    def run(self) -> None:
        """One model after the other: the processes of several would fill the GPU."""
        for model in dict.fromkeys(row.model for row in self.rows):
            try:
                for row in self.start([row for row in self.rows if row.model == model]):
                    for i in range(self.args.rounds):
                        if time.monotonic() - self.begun > self.args.limit:
                            say(f"out of time: {row}, round {i + 1} not measured")
                            continue
                        self.turn(row, last=i == self.args.rounds - 1)
            finally:
                self.stop()
        say(f"measured after {time.monotonic() - self.begun:.0f} s")

    def table(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"{self.device}; {versions}; {self.args.rounds} rounds, in turn.",
            "",
            "| model, batch × sequence | system | setting | tok/s, median (10th … 90th percentile) | ours ÷ this | peak GiB | MFU, of TFLOP/s | kernels + memory operations a step | GPU busy |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row, results in self.results.items():
            tokens = sum(row.lengths)
            ours = results["qlorapp", row.keep]
            gemm = statistics.median(self.products[row]) if row in self.products else float("nan")
            for result in results.values():
                rows = f"{row.batch} × {'≤ ' if row.mixed else ''}{row.sequence}"
                where = f"{row.model}, {rows}" if result is ours else ""
                if not result.steps:
                    lines.append(f"| {where} | {result.system} | {result.setting} | {result.error} | | | | | |")
                    continue
                rate = result.rate(tokens)
                ratio = "" if result is ours or not ours.steps else f"{ours.rate(tokens) / rate:.2f}"
                work = sum(n * SHAPES[row.model].operations(n) for n in row.lengths) / tokens
                mfu = f"{rate * work / gemm * 1e-12:.0%}" + (f" of {gemm:.0f}" if result is ours else "")
                counted = result.launches
                launches = f"{counted['kernels']} + {counted['memory_operations']}" if counted else ""
                busy = f"{min(counted['busy'], 1.0):.0%}" if counted else ""
                spread = f"{rate:,.0f} ({result.rate(tokens, 0.1):,.0f} … {result.rate(tokens, 0.9):,.0f})"
                cells = [where, result.system, result.setting, spread, ratio, f"{result.peak:.2f}", mfu, launches, busy]
                lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def stop(self) -> None:
        for side in self.sides.values():
            side.stop()
            self.versions |= side.first.get("versions", {})
            self.device = side.first.get("device", self.device)
        if self.args.logs:
            self.args.logs.mkdir(parents=True, exist_ok=True)
            text = "".join(f"== {s.name}\n{s.log.read_text(errors='replace')[-6000:]}\n" for s in self.sides.values())
            with (self.args.logs / "stderr.txt").open("a") as file:
                file.write(text)
        self.sides.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev", help="holds benchmarks/bench_train_step")
    parser.add_argument(
        "--rows", nargs="+", metavar="START", help=f"rows with this prefix; default: all of {' '.join(map(str, ROWS))}"
    )
    parser.add_argument("--peers", nargs="*", choices=[*UNSLOTH, "hf"], default=["unsloth", "hf"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3, help="timed seconds per turn")
    parser.add_argument(
        "--memory_first", action="store_true", help="also measure each row of ours with the memory-first settings"
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no new turn starts")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for an answer")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="folder of the peers' checkpoints and logs; default: a temporary folder"
    )
    parser.add_argument("--logs", type=pathlib.Path, help="folder for the processes' stderr")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here; nothing measured")
        return
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(args, pathlib.Path(args.folder or temporary).resolve())
        bench.run()
        print(bench.table())


if __name__ == "__main__":
    main()
