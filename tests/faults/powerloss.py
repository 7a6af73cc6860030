# SPDX-License-Identifier: Apache-2.0
"""Replays the file calls of a training run up to a loss of power, with what was not flushed lost in part, and checks what is found.

    python tests/faults/powerloss.py [--states N] [--seed S] [--jobs J]

shim.cpp records the calls of two runs: one that saves at each step and removes old checkpoints, and a new one in the same folder. A state
is a prefix of the calls and a choice of what reached the disk. Flushed data and entries of flushed folders did. Of the rest any part may
have: each entry of a folder by itself, a file's data not at all, in full, as a prefix, or as zeros of the same length. In each state the
newest checkpoint must be whole and at least the last one that was committed, and weights and config of the final adapter must belong
together.

Source: Pillai et al. 2014 (OSDI), "All file systems are not created equal".
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile

import faults

sys.path.insert(0, str(faults.BUILD / "python"))

TRAIN = (
    "train --model {made}/model --data {made}/rows.jsonl --max_steps 4 --save_steps 1 --save_total_limit 2 --r {rank} "
    "--per_device_train_batch_size 2 --target_modules q_proj --output {out}"
)


@dataclasses.dataclass
class Node:
    """A file with its writes, or a folder."""

    is_folder: bool
    #: (number of the call, offset, bytes)
    writes: list[tuple[int, int, bytes]] = dataclasses.field(default_factory=list)
    flushed: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Trace:
    nodes: list[Node]
    #: (number of the call, entries that it sets together: (folder, name, node or None))
    entries: list[tuple[int, list[tuple[int, str, int | None]]]]
    calls: int
    #: (number of the call, step) of checkpoints whose commit was complete.
    commits: list[tuple[int, int]]


def read_trace(folder: pathlib.Path, root: pathlib.Path, before: pathlib.Path | None) -> Trace:
    nodes, tree = [Node(True)], {(): 0}
    entries: list = []
    if before is not None:
        for path in sorted(before.rglob("*")):
            name = path.relative_to(before).parts
            nodes.append(Node(path.is_dir(), [] if path.is_dir() else [(0, 0, path.read_bytes())], [0]))
            tree[name] = len(nodes) - 1
            entries.append((0, [(tree[name[:-1]], name[-1], tree[name])]))
    data = (folder / "data").read_bytes()

    def place(text: str) -> tuple[str, ...]:
        return pathlib.Path(text).relative_to(root).parts

    def move(old: tuple, new: tuple) -> None:
        for name in [name for name in tree if name[: len(old)] == old]:
            moved[(*new, *name[len(old) :])] = tree.pop(name)

    commits, renamed = [], {}
    lines = (folder / "calls.tsv").read_text().splitlines()
    for call, line in enumerate(lines, 1):
        what, path, other, offset, size = line.split("\t")
        name = place(path)
        if what in ("create", "open", "mkdir"):
            if name in tree:
                continue
            nodes.append(Node(what == "mkdir"))
            tree[name] = len(nodes) - 1
            entries.append((call, [(tree[name[:-1]], name[-1], tree[name])]))
        elif what == "write":
            begin = int(other)
            nodes[tree[name]].writes.append((call, int(offset), data[begin : begin + int(size)]))
        elif what == "fsync" and name in tree:
            nodes[tree[name]].flushed.append(call)
            if name == ():
                commits += [(call, step) for step in renamed.values()]
                renamed = {}
        elif what in ("unlink", "rmdir"):
            entries.append((call, [(tree[name[:-1]], name[-1], None)]))
            del tree[name]
        elif what in ("rename", "exchange"):
            new, moved = place(other), {}
            first, second = tree[name], tree.get(new)
            entries.append(
                (call, [(tree[name[:-1]], name[-1], second if what == "exchange" else None), (tree[new[:-1]], new[-1], first)])
            )
            if what == "exchange":
                move(new, name)
            else:
                for gone in [each for each in tree if each[: len(new)] == new]:
                    del tree[gone]
            move(name, new)
            tree.update(moved)
            if len(new) == 1 and new[0].startswith("checkpoint-"):
                renamed[new] = int(new[0].partition("-")[2])
    return Trace(nodes, entries, len(lines), commits)


def content(node: Node, end: int, chance: random.Random) -> bytes:
    """What a file holds after a loss of power behind call `end`."""
    durable = max((call for call in node.flushed if call <= end), default=0)
    pending = [write for write in node.writes if durable < write[0] <= end]
    kept = [write for write in node.writes if write[0] <= durable]
    fate = chance.choice(("none", "all", "some", "zeros")) if pending else "none"
    if fate == "all":
        kept += pending
    elif fate == "some":
        kept += pending[: chance.randrange(len(pending))]
    elif fate == "zeros":
        kept += [(call, offset, bytes(len(text))) for call, offset, text in pending]
    held = bytearray()
    for _, offset, text in kept:
        held.extend(bytes(max(0, offset + len(text) - len(held))))
        held[offset : offset + len(text)] = text
    return bytes(held)


def build(trace: Trace, end: int, chance: random.Random, into: pathlib.Path) -> None:
    share = chance.choice((0.0, 0.5, 0.9, 1.0))  # of what was not flushed
    folders: dict[int, dict[str, int]] = {}
    for call, changes in trace.entries:
        if call > end:
            break
        durable = any(call <= flush <= end for folder, _, _ in changes for flush in trace.nodes[folder].flushed) or call == 0
        if not durable and chance.random() >= share:
            continue
        for folder, name, node in changes:
            held = folders.setdefault(folder, {})
            held.pop(name, None)
            if node is not None:
                held[name] = node

    def write(node: int, path: pathlib.Path) -> None:
        if not trace.nodes[node].is_folder:
            path.write_bytes(content(trace.nodes[node], end, chance))
            written = max((call for call, _, _ in trace.nodes[node].writes if call <= end), default=0)
            os.utime(path, (written, written))  # an unfinished update compares the times of files
            return
        path.mkdir()
        for name, child in folders.get(node, {}).items():
            write(child, path / name)

    write(0, into)


def check(trace: Trace, end: int, out: pathlib.Path, adapters: list[dict[str, bytes]]) -> str:
    """What is wrong in a state; empty: nothing."""
    from qlorapp import _C

    run = _C.RunFolder(str(out))  # as the next run opens it
    run.close()
    _C.FolderUpdate(str(out), "adapter_config.json").discard()
    found, skipped = _C.newest_checkpoint(str(out))
    committed = max((step for call, step in trace.commits if call <= end), default=0)
    newest = int(pathlib.Path(found).name.partition("-")[2]) if found else 0
    if newest < committed:
        return f"checkpoint-{committed} was committed; found {found}, skipped {skipped}"
    names = ("adapter_config.json", "adapter_model.safetensors")
    pair = {name: (out / name).read_bytes() for name in names if (out / name).exists()}
    if len(pair) == 2 and pair not in adapters:
        return "weights and config of the adapter do not belong together"
    litter = [name for name in os.listdir(out) if name.startswith(".") and name != ".qlorapp.lock"]
    return f"litter: {litter}" if litter else ""


def record(line: str, made: pathlib.Path, out: pathlib.Path, log: pathlib.Path, rank: int) -> None:
    log.mkdir()
    done = faults.run(line.replace("{rank}", str(rank)), made, out, RECORD=str(log))
    assert done.returncode == 0, done.stderr


def replay(traces: list[Trace], states: range, seed: int, pairs: list[dict[str, bytes]], work: pathlib.Path) -> list[str]:
    """@returns what is wrong in the states of these numbers."""
    wrong = []
    disk = work / f"disk{states.start}"
    for state in states:
        chance = random.Random(f"{seed} {state}")
        trace = traces[state % 2]
        end = chance.randrange(trace.calls + 1)
        build(trace, end, chance, disk)
        if text := check(trace, end, disk, pairs):
            wrong.append(f"state {state}, after call {end} of {trace.calls} of run {state % 2 + 1}: {text}")
        shutil.rmtree(disk)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        made = work / "made"
        made.mkdir()
        faults.make_inputs(made)
        out, first = work / "out", work / "first"
        record(TRAIN, made, out, work / "log1", 2)
        shutil.copytree(out, first)
        # The second run has another rank, so that its adapter does not go with the config of the first.
        record(TRAIN + " --overwrite_output_dir true", made, out, work / "log2", 4)
        pairs = [
            {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
            for folder in (first, out)
        ]
        traces = [read_trace(work / "log1", out, None), read_trace(work / "log2", out, first)]
        assert all(trace.commits for trace in traces)
        wrong = 0
        parts = [range(start, min(start + 250, given.states)) for start in range(0, given.states, 250)]
        with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
            for found in pool.map(replay, *zip(*((traces, part, given.seed, pairs, work) for part in parts), strict=True)):
                wrong += len(found)
                for text in found:
                    print(text, flush=True)
    print(json.dumps({"states": given.states, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
