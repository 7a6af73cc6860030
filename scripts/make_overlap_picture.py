#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws when a GPU computes and when it exchanges bytes with others, from Chrome traces of a training step.

    python benchmarks/ranks_cuda.py --runs 8b:4:1 --low-memory --trace build/overlap.json
    python scripts/make_overlap_picture.py build/overlap.sharded.json build/overlap.whole.json -o docs/overlap.svg

One panel per trace. A trace that mostly gathers (a sharded base) shows four blocks in the middle of the last backward pass. Any other trace
shows the last sums of gradients and the optimizer. Prints for each trace the share of the exchange's time in which the GPU also computes:
the intersection of both unions of intervals. NCCL's kernels are the exchange. All other kernels, fills and copies within the device are
computation; copies from and to the host are neither.
"""

import argparse
import dataclasses
import html
import itertools
import json
import math
import pathlib

Interval = tuple[float, float]
WIDTH, LEFT, RIGHT, PANEL, LANE = 960, 110, 930, 180, 36
COMPUTATION, LIGHTER, OPTIMIZER, EXCHANGE = "#4e79a7", "#86a9cf", "#59a14f", "#f28e2b"


@dataclasses.dataclass(frozen=True)
class Event:
    name: str
    begin: float  # ms
    end: float

    @property
    def is_exchange(self) -> bool:
        return "nccl" in self.name.lower()

    @property
    def is_optimizer(self) -> bool:
        return "adamw" in self.name.lower()


def union(events: list[Event], gap: float = 0) -> list[Interval]:
    """Disjoint intervals in order. Joins those that are at most `gap` apart."""
    joined: list[Interval] = []
    for event in sorted(events, key=lambda event: event.begin):
        if joined and event.begin <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], event.end))
        else:
            joined.append((event.begin, event.end))
    return joined


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def common(some: list[Interval], others: list[Interval]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        total += max(0.0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


class Trace:
    def __init__(self, path: pathlib.Path):
        events = []
        for entry in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            if entry.get("ph") != "X" or entry.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            if entry["cat"] == "gpu_memcpy" and "DtoD" not in entry["name"]:
                continue
            begin = float(entry["ts"]) / 1000
            events.append(Event(entry["name"], begin, begin + float(entry["dur"]) / 1000))
        events.sort(key=lambda event: event.begin)
        self.exchange = [event for event in events if event.is_exchange]
        self.computation = [event for event in events if not event.is_exchange]
        if not self.exchange:
            raise SystemExit(
                f"[make_overlap_picture] a trace must have NCCL kernels; {path} has none of them among {len(events)} events. "
                "Record it with benchmarks/ranks_cuda.py --trace on a machine with several GPUs."
            )
        if not self.computation:
            raise SystemExit(f"[make_overlap_picture] a trace must have kernels beside NCCL's; {path} has none.")
        self.gathers = [event for event in self.exchange if "AllGather" in event.name]
        self.sums = [event for event in self.exchange if "AllReduce" in event.name]
        self.is_sharded = sum(e.end - e.begin for e in self.gathers) > sum(e.end - e.begin for e in self.sums)
        both = union(self.exchange), union(self.computation)
        self.exchange_ms, self.computation_ms = map(length, both)
        self.share = 100 * common(*both) / self.exchange_ms

    def marks(self) -> list[float]:
        """Moments that bound the panel; of a sharded base also those between blocks."""
        if self.is_sharded:
            # A trace has whole steps, each half forward and half backward: 7/8 is the middle of the last backward pass.
            first = max(0, min(len(self.gathers) * 7 // 8 - 2, len(self.gathers) - 5))
            marks = [event.begin for event in self.gathers[first : first + 5]]
            return marks if len(marks) > 1 else [marks[0], self.computation[-1].end]
        begin = (self.sums or self.exchange)[-5:][0].begin
        end = max(event.end for event in (*self.exchange, *self.computation))
        return [begin - 0.05 * (end - begin), end]


def panel(trace: Trace, letter: str, top: float) -> list[str]:
    marks = trace.marks()
    begin, end = marks[0], marks[-1]
    scale = (RIGHT - LEFT) / (end - begin)
    lanes = {"computation": top + 44, "exchange": top + 44 + LANE + 8}
    bottom = lanes["exchange"] + LANE + 8
    lines: list[str] = []

    def x(moment: float) -> float:
        return LEFT + (min(max(moment, begin), end) - begin) * scale

    def text(at: float, y: float, words: str, anchor: str = "start", more: str = "") -> None:
        lines.append(f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(words)}</text>')

    def bars(events: list[Event], lane: str, color: str, narrowest: float = 0.4) -> None:
        for first, last in union([e for e in events if e.end > begin and e.begin < end], gap=0.3 / scale):
            lines.append(
                f'<rect x="{x(first):.1f}" y="{lanes[lane]:.1f}" width="{max(x(last) - x(first), narrowest):.1f}" height="{LANE}" '
                f'fill="{color}"/>'
            )

    if trace.is_sharded:
        title = "Sharded base: while a block computes, the next block is gathered"
    else:
        title = "Whole base: gradients are summed while earlier blocks compute, then the optimizer runs"
    text(16, top + 18, f"({letter}) {title}", more=' font-size="15" font-weight="bold"')
    step = 10 ** math.floor(math.log10((end - begin) / 4))
    step *= max(factor for factor in (1, 2, 5) if factor * step <= (end - begin) / 4)
    for i in range(math.floor((end - begin) / step) + 1):
        at = x(begin + i * step)
        lines.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top + 38:.1f}" y2="{bottom:.1f}" stroke="#dddddd"/>')
        text(at, bottom + 15, f"{i * step:g} ms", "middle")
    for lane, y in lanes.items():
        text(LEFT - 10, y + LANE / 2 + 4, lane, "end")
    model = [event for event in trace.computation if not event.is_optimizer]
    if trace.is_sharded:
        for i, (mark, next_mark) in enumerate(itertools.pairwise(marks)):
            own = [event for event in model if mark <= event.begin < next_mark]
            bars(own, "computation", LIGHTER if i % 2 else COMPUTATION)
            text(x(mark) + 4, top + 38, f"block {i + 1}")
    else:
        bars(model, "computation", COMPUTATION)
    bars([event for event in trace.computation if event.is_optimizer], "computation", OPTIMIZER, narrowest=2)
    bars(trace.exchange, "exchange", EXCHANGE, narrowest=1)
    if trace.is_sharded:
        for i, gather in enumerate(event for event in trace.gathers if event.begin in marks[:-1]):
            text(x(gather.end) + 4, lanes["exchange"] + LANE / 2 + 4, f"gathers block {i + 2}")
    text(RIGHT, bottom + 32, f"{trace.share:.0f} % of the exchange's time in the recorded steps lies under computation", "end")
    return lines


def picture(traces: list[Trace]) -> str:
    height = 40 + PANEL * len(traces)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, trace in enumerate(traces):
        lines += panel(trace, "abcdefgh"[i], 10 + i * PANEL)
    at = LEFT
    for color, words in [
        (COMPUTATION, "kernels of the model"),
        (OPTIMIZER, "optimizer"),
        (EXCHANGE, "NCCL's kernels, waiting for the other rank included"),
    ]:
        lines.append(f'<rect x="{at}" y="{height - 24}" width="12" height="12" fill="{color}"/>')
        lines.append(f'<text x="{at + 18}" y="{height - 14}">{html.escape(words)}</text>')
        at += 50 + 7 * len(words)
    return "\n".join([*lines, "</svg>"]) + "\n"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=pathlib.Path, metavar="TRACE")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    given = parser.parse_args(words)
    traces = [Trace(path) for path in given.traces]
    for path, trace in zip(given.traces, traces, strict=True):
        print(
            f"{path}: {trace.share:.1f} % of the exchange's time lies under computation "
            f"(exchange {trace.exchange_ms:.2f} ms, computation {trace.computation_ms:.2f} ms)"
        )
    given.output.write_text(picture(traces), encoding="utf-8")


if __name__ == "__main__":
    main()
