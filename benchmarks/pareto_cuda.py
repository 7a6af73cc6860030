# SPDX-License-Identifier: Apache-2.0
"""Measures the best speed below a memory cap: qlorapp, unsloth, and transformers + peft + bitsandbytes, 8B at sequence 2048.

    python benchmarks/pareto_cuda.py [--build build/dev] [--caps 7 8 10 12 16 20 24] [--peers unsloth hf] [--seconds 1] [--limit 600] [--svg FILE]

Model, adapters, optimizer and peers are those of benchmarks/train_step_cuda.py. Every system runs batches of 1, 2 and 4 (--batches) with its own switches. For each cap the table has the fastest setting whose peak (torch's
max_memory_allocated over the timed steps) is below it:

- qlorapp: mixtures of keep policies, more at the end (input_on_host,everything:K), loss chunks, tiles of the MLP, one workspace at a time,
  embedding on the host. Each of a few settings is measured once without blocks that keep everything, and one with as many as the largest cap
  allows. Speed is linear in their number, and the peak is planned (bench_train_step's "plan"), so the best setting for a cap is known in advance.
  It is then measured in a process with a capped allocator, and must finish.
- memory_budget: that option's choice for the cap, by plan alone.
- unsloth: "unsloth", the same without the last layers (UNSLOTH_GC_KEEP_LAYERS), no checkpointing, checkpointing, each once.
- HF stack: with and without checkpointing, and with checkpointing of only the first layers, each once.

Needs about ten minutes on an H200, mostly for unsloth's compilations. After --limit seconds the remaining peer settings are only listed.
Prints a table; --svg draws it.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from train_step_cuda import ROOT, Bench, Side, say
from train_step_peers import SHAPES, Row

SEQUENCE = 2048
VARIANTS = [
    {"loss_chunk_rows": 2048, "embedding_on_host": 0},
    {"loss_chunk_rows": 2048, "embedding_on_host": 1},
    {"loss_chunk_rows": 1024, "embedding_on_host": 1},
    {"loss_chunk_rows": 1024, "embedding_on_host": 1, "weight_workspace": "stack"},
    {"loss_chunk_rows": 512, "embedding_on_host": 1, "weight_workspace": "stack", "mlp_tile_rows": 2048},
]
PLAIN = {"weight_workspace": "layer", "mlp_tile_rows": 0}
MARGIN = 0.12  # GiB between the computed peak and the cap: the allocator's unsplit blocks


@dataclasses.dataclass
class Point:
    """A measured setting of one system."""

    system: str
    setting: str
    rate: float
    peak: float


def rate_of(answer: dict, batch: int) -> float:
    return batch * SEQUENCE / statistics.median(answer["steps_ms"]) * 1e3


class Ours:
    def __init__(self, side: Side, layers: int, seconds: float, batches: list[int]):
        self.side, self.layers, self.seconds, self.batches = side, layers, seconds, batches
        self.measured: dict[tuple[int, int], float] = {}  # (batch, variant) → seconds a step that keeps inputs only
        self.peaks: dict[tuple[int, int, int], float] = {}  # (batch, variant, kept) → GiB, computed
        self.saved: dict[int, float] = {}  # batch → seconds that a block saves which keeps everything

    def words(self, batch: int, variant: int, kept: int) -> str:
        keep = "everything" if kept == self.layers else f"input_on_host,everything:{kept}" if kept else "input_on_host"
        values = {"batch": batch, "sequence": SEQUENCE, "keep": keep, **PLAIN, **VARIANTS[variant]}
        return " ".join(f"{name}={value}" for name, value in values.items())

    def computed(self, batch: int, variant: int, kept: int) -> float:
        key = (batch, variant, kept)
        if key not in self.peaks:
            answer = self.side.ask(f"plan {self.words(batch, variant, kept)}")
            self.peaks[key] = answer.get("planned_gib", float("inf"))
        return self.peaks[key]

    def most_kept(self, batch: int, variant: int, cap: float) -> int:
        """The largest number of blocks that can keep everything below the cap; -1 if even input_on_host does not fit."""
        low, high = -1, self.layers
        while low < high:
            middle = (low + high + 1) // 2
            if self.computed(batch, variant, middle) <= cap - MARGIN:
                low = middle
            else:
                high = middle - 1
        return low

    def ask(self, batch: int, variant: int, kept: int, cap: float) -> dict:
        answer = self.side.ask(f"{self.seconds} {self.words(batch, variant, kept)} cap={cap}")
        if "error" in answer:
            say(f"  qlorapp {self.words(batch, variant, kept)} cap={cap}: {answer['error']}")
        else:
            peaks = f"{answer['peak_gib']:.2f} GiB ({answer['planned_gib']:.2f} planned)"
            say(f"  qlorapp {self.words(batch, variant, kept)} cap={cap}: {rate_of(answer, batch):.0f} tok/s, {peaks}")
        return answer

    def measure_ends(self, largest: float) -> None:
        for batch in self.batches:
            for variant in range(len(VARIANTS)):
                if self.computed(batch, variant, 0) > largest:
                    continue
                answer = self.ask(batch, variant, 0, 0)
                if "error" not in answer:
                    self.measured[batch, variant] = statistics.median(answer["steps_ms"])
            most = self.most_kept(batch, 0, largest)
            if most > 0 and (batch, 0) in self.measured:
                answer = self.ask(batch, 0, most, 0)
                if "error" not in answer:
                    self.saved[batch] = (self.measured[batch, 0] - statistics.median(answer["steps_ms"])) / most

    def by_budget(self, cap: float) -> Point | None:
        """memory_budget's choice for this cap and the same effective batch, measured below it."""
        words = self.side.ask(f"budget budget={cap}GiB effective_batch={max(self.batches)}").get("setting")
        if words is None:
            return None
        answer = self.side.ask(f"{self.seconds} {words} cap={cap}")
        if "error" in answer:
            say(f"  memory_budget {words} cap={cap}: {answer['error']}")
            return None
        batch = int(words.split()[0].removeprefix("batch="))
        point = Point("qlorapp", words.replace(f" sequence={SEQUENCE}", ""), rate_of(answer, batch), answer["peak_gib"])
        say(f"  memory_budget {words} cap={cap}: {point.rate:.0f} tok/s, {point.peak:.2f} GiB")
        return point

    def best(self, cap: float) -> Point | None:
        candidates = []
        for (batch, variant), seconds in self.measured.items():
            kept = self.most_kept(batch, variant, cap)
            if kept >= 0:
                candidates.append((batch / (seconds - kept * self.saved.get(batch, 0.0)), batch, variant, kept))
        tries = 0
        for _, batch, variant, kept in sorted(candidates, reverse=True):
            while kept >= 0 and tries < 4:
                tries += 1
                answer = self.ask(batch, variant, kept, cap)
                if "error" not in answer and answer["peak_gib"] <= cap:
                    setting = self.words(batch, variant, kept).replace(f" sequence={SEQUENCE}", "")
                    return Point("qlorapp", setting, rate_of(answer, batch), answer["peak_gib"])
                kept -= 1
        return None


class Peers:
    """One process per setting that is fixed at load time; batches run in turn in it."""

    def __init__(self, bench: Bench, seconds: float):
        self.bench, self.seconds, self.batches = bench, seconds, bench.args.batches
        self.points: list[Point] = []
        self.left: list[str] = []  # for want of time
        script = str(pathlib.Path(__file__).resolve().with_name("train_step_peers.py"))
        self.command = [sys.executable, script]
        layers = SHAPES["8b"].layers
        self.settings: dict[tuple, tuple[Row, dict[str, str], list[dict]]] = {}
        if "unsloth" in bench.peers:
            for name, checkpointing, keep in [
                ('"unsloth"', "unsloth", 0),
                *((f'"unsloth", {kept} layers kept', "unsloth", kept) for kept in (layers // 4, layers // 2, 3 * layers // 4)),
                ("no checkpointing", False, 0),
                ("checkpointing", True, 0),
            ]:
                row = Row("8b", 1, SEQUENCE, "everything", checkpointing)
                self.settings["unsloth", name] = (
                    row,
                    {"UNSLOTH_GC_KEEP_LAYERS": str(keep)} if keep else {},
                    [{"checkpointing": checkpointing}],
                )
        if "hf" in bench.peers:
            row = Row("8b", 1, SEQUENCE, "everything", False)
            ways = [{"checkpointing": way, "layers": first} for way, first in [(False, 0), (True, layers), (True, layers // 2)]]
            self.settings["HF stack", ""] = (row, {}, ways)

    def start(self) -> None:
        bench = self.bench
        for i, ((system, _), (_, environment, _)) in enumerate(self.settings.items()):
            peer = "hf" if system == "HF stack" else "unsloth"
            side = Side(
                [*self.command, peer], f"{peer}-{i}", bench.folder, {**bench.environment, **environment}, bench.args.patience
            )
            bench.sides[system, i] = side
        if not self.settings:
            return
        checkpoint = str(bench.folder / "8b")
        subprocess.run([*self.command, "checkpoint", "8b", checkpoint], env=bench.environment, check=True, stdout=sys.stderr)
        for i, ((system, _), (row, _, _)) in enumerate(self.settings.items()):
            bench.sides[system, i].tell(json.dumps({"row": dataclasses.asdict(row), "checkpoint": checkpoint}))

    def measure(self, largest: float) -> None:
        """Measures batch by batch, so each setting has its first batches if time runs out."""
        too_large: dict[tuple[int, str], int] = {}
        for batch in self.batches:
            for i, ((system, name), (_, _, ways)) in enumerate(self.settings.items()):
                side = self.bench.sides[system, i]
                if not side.ready():
                    continue
                for way in ways:
                    label = name or (
                        "no checkpointing" if not way["checkpointing"] else f"checkpointing of {way['layers']} layers"
                    )
                    if batch >= too_large.get((i, label), batch + 1):
                        continue
                    if time.monotonic() - self.bench.begun > self.bench.args.limit:
                        self.left.append(f"{system} {label}, batch {batch}")
                        continue
                    question = {"lengths": [SEQUENCE] * batch, "seconds": self.seconds, "count": False, **way}
                    answer = side.ask(json.dumps(question))
                    if "error" in answer:
                        say(f"  {system} {label}, batch {batch}: {answer['error']}")
                        too_large[i, label] = batch
                        continue
                    point = Point(system, f"{label}, batch {batch}", rate_of(answer, batch), answer["peak_gib"])
                    say(f"  {system} {point.setting}: {point.rate:.0f} tok/s, {point.peak:.2f} GiB")
                    self.points.append(point)
                    if point.peak > largest:
                        too_large[i, label] = batch

    def best(self, system: str, cap: float) -> Point | None:
        return max((p for p in self.points if p.system == system and p.peak <= cap), key=lambda p: p.rate, default=None)


def table(caps: list[float], lines: dict[str, list[Point | None]], device: str) -> str:
    rows = [f"{device}; torch {torch.__version__}; 8B, sequence {SEQUENCE}.", ""]
    rows += ["| cap GiB | system | tok/s | ours ÷ this | peak GiB | setting |", "|---|---|---|---|---|---|"]
    for i, cap in enumerate(caps):
        ours = lines["qlorapp"][i]
        for system, points in lines.items():
            point, where = points[i], f"{cap:g}" if system == "qlorapp" else ""
            if point is None:
                rows.append(f"| {where} | {system} | does not fit | | | |")
                continue
            ratio = "" if system == "qlorapp" or ours is None else f"{ours.rate / point.rate:.2f}"
            rows.append(f"| {where} | {system} | {point.rate:,.0f} | {ratio} | {point.peak:.2f} | {point.setting} |")
    return "\n".join(rows)


def svg(caps: list[float], lines: dict[str, list[Point | None]]) -> str:
    width, height, left, bottom = 640, 360, 70, 50
    top = max((p.rate for points in lines.values() for p in points if p), default=1.0) * 1.1
    first, last = min(caps), max(max(caps), min(caps) + 1)

    def place(cap: float, rate: float) -> tuple[float, float]:
        x = left + (cap - first) / (last - first) * (width - left - 20)
        return x, height - bottom - rate / top * (height - bottom - 20)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for cap in caps:
        x, y = place(cap, 0)
        parts.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{cap:g}</text>')
    for step in range(5):
        rate = top * step / 5
        x, y = place(first, rate)
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">{rate:,.0f}</text>')
    parts.append(
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">memory cap, GiB (tokens a second above it)</text>'
    )
    for color, (system, points) in zip(["#0a6", "#8c8", "#c60", "#36c"], lines.items(), strict=False):
        spots = [(*place(cap, p.rate), p) for cap, p in zip(caps, points, strict=True) if p]
        if not spots:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y, _ in spots]
        parts.append(
            f'<text x="{spots[-1][0]:.0f}" y="{spots[-1][1] - 8:.0f}" text-anchor="end" fill="{color}">{system}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev", help="holds benchmarks/bench_train_step")
    parser.add_argument("--caps", nargs="+", type=float, default=[7, 8, 10, 12, 16, 20, 24], metavar="GIB")
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=[1, 2, 4],
        help="micro-batches of every system; the peers run them in this order",
    )
    parser.add_argument("--peers", nargs="*", choices=["unsloth", "hf"], default=["unsloth", "hf"])
    parser.add_argument("--seconds", type=float, default=1, help="timed seconds per setting; at least 8 steps")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait for an answer")
    parser.add_argument("--limit", type=float, default=1200, help="seconds after which no new peer setting starts")
    parser.add_argument(
        "--folder", type=pathlib.Path, help="folder of the peers' checkpoint and logs; default: a temporary folder"
    )
    parser.add_argument("--svg", type=pathlib.Path, help="file to draw the table into")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here; nothing measured")
        return
    args.rows, args.logs, caps = [], None, sorted(args.caps)
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(args, pathlib.Path(args.folder or temporary).resolve())
        try:
            peers = Peers(bench, args.seconds)
            peers.start()
            program = str((args.build / "benchmarks" / "bench_train_step").resolve())
            side = bench.sides["ours", 0] = Side(
                [program, "8b", "1", str(SEQUENCE), "input_on_host", "--serve"],
                "qlorapp",
                bench.folder,
                bench.environment,
                args.patience,
            )
            if not side.ready():
                sys.exit("bench_train_step did not start; build the target bench_train_step with CUDA first")
            for other in bench.sides.values():  # compile before any measurement
                other.ready()
            ours = Ours(side, SHAPES["8b"].layers, args.seconds, args.batches)
            ours.measure_ends(max(caps))
            lines: dict[str, list[Point | None]] = {"qlorapp": [], "memory_budget": []}
            for cap in caps:
                lines["qlorapp"].append(ours.best(cap))
                lines["memory_budget"].append(ours.by_budget(cap))
            peers.measure(max(caps))
            for system in dict.fromkeys(system for system, _ in peers.settings):
                lines[system] = [peers.best(system, cap) for cap in caps]
        finally:
            bench.stop()
    print(table(caps, lines, torch.cuda.get_device_name()))
    if peers.left:
        print(f"not measured within {args.limit:.0f} s: {'; '.join(peers.left)}")
    if args.svg:
        args.svg.write_text(svg(caps, lines))


if __name__ == "__main__":
    main()
