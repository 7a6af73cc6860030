# SPDX-License-Identifier: Apache-2.0
"""Kills and fails the commands that write, at each of their file calls, and checks what the next run finds.

    python tests/faults/faults.py [--points N] [--seconds T] [--seed S] [--jobs J] [SCENARIO …]

A point is a scenario, the number of a file call below its output folder, and what happens there (shim.cpp). After each point a run
without faults follows in the same folder. It must succeed, end in the bytes of a run that nothing disturbed, and leave no litter; every checkpoint that
the disturbed run said it had saved must have been there, and whole. Without --points all points are tried.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("QLORAPP_BUILD_DIR", ROOT / "build" / "dev"))
ACTIONS = ("kill", "EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "EMFILE", "EINTR", "short")
#: What a call may do to a program without its noticing.
HARMLESS = ("EINTR", "short")
TRAIN = (
    "train --model {made}/model --data {made}/rows.jsonl --max_steps 4 --save_steps 2 --save_total_limit 2 --r 2 --per_device_train_batch_size 2 "
    "--target_modules q_proj --output {out}"
)


@dataclasses.dataclass(frozen=True)
class Scenario:
    name: str
    #: The disturbed command.
    command: str
    #: The one after it, if a checkpoint of the run is there, and if none is.
    resumed: str
    anew: str
    #: A folder under `made` that `out` is a copy of in the beginning. Its checkpoints must never be missing.
    begins_as: str | None = None
    #: More of the shim's settings, for the disturbed command.
    more: tuple[tuple[str, str], ...] = ()


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("train", TRAIN, TRAIN + " --resume_from_checkpoint true", TRAIN + " --overwrite_output_dir true"),
        # Steps 3 and 4 again, over the checkpoints and the adapter that are there.
        Scenario(
            "retrain",
            TRAIN + " --resume_from_checkpoint {out}/checkpoint-2",
            TRAIN + " --resume_from_checkpoint true",
            TRAIN + " --resume_from_checkpoint true",
            begins_as="trained",
        ),
        # The same where the file system cannot exchange two folders.
        Scenario(
            "retrain without exchange",
            TRAIN + " --resume_from_checkpoint {out}/checkpoint-2",
            TRAIN + " --resume_from_checkpoint true",
            TRAIN + " --resume_from_checkpoint true",
            begins_as="trained",
            more=(("NOEXCHANGE", "1"),),
        ),
        Scenario(*["quantize", *["quantize --model {made}/model --output {out}"] * 3]),
        Scenario(*["merge", *["merge --model {made}/model --adapter {made}/trained --output {out}"] * 3]),
    )
}


class Wrong(Exception):
    """A promise that was not kept."""


def shim() -> pathlib.Path:
    return BUILD / "tests" / "faults" / "libfault_shim.so"


def run(line: str, made: pathlib.Path, out: pathlib.Path, **fault: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if fault:
        environment |= {"LD_PRELOAD": str(shim()), "FAULT_ROOT": str(out)} | {
            f"FAULT_{key}": value for key, value in fault.items()
        }
    words = line.format(made=made, out=out).split()
    return subprocess.run(
        [BUILD / "qlorapp", *words], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """All files, without what a clock or a generator of ids wrote."""
    timed = ("trainer_state.json", "MANIFEST.json", "run.json", "training_args.json", "run_report.json")
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in timed
    }


class Tried:
    """A scenario with its undisturbed result."""

    def __init__(self, scenario: Scenario, made: pathlib.Path, work: pathlib.Path) -> None:
        self.scenario, self.made, self.work = scenario, made, work
        out = self._begin("whole")
        count = work / f"{scenario.name}.count"
        done = run(scenario.command, made, out, COUNT=str(count), **dict(scenario.more))
        assert done.returncode == 0, done.stderr
        self.calls = int(count.read_text())
        self.wanted = contents(out)

    def _begin(self, name: str) -> pathlib.Path:
        out = self.work / f"{self.scenario.name} {name}".replace(" ", "-")
        shutil.rmtree(out, ignore_errors=True)
        if self.scenario.begins_as:
            shutil.copytree(self.made / self.scenario.begins_as, out)
        return out

    def points(self) -> list[tuple["Tried", int, str]]:
        return [(self, call, action) for call in range(1, self.calls + 1) for action in ACTIONS]

    def check(self, call: int, action: str) -> None:
        """@raises Wrong."""
        out = self._begin(f"{call}-{action}")
        first = run(self.scenario.command, self.made, out, AT=str(call), DO=action, **dict(self.scenario.more))
        at = f"{self.scenario.name}, call {call} of {self.calls}, {action}"
        if action in HARMLESS and first.returncode != 0:
            raise Wrong(f"{at}: exit code {first.returncode}: {first.stderr}")
        if first.returncode not in (0, 1, 2, -9):
            raise Wrong(f"{at}: exit code {first.returncode}: {first.stderr}")
        if first.returncode > 0 and len(first.stderr.strip().splitlines()) < 1:
            raise Wrong(f"{at}: failed without a word")
        if first.returncode == 0 and contents(out) != self.wanted and action in HARMLESS:
            raise Wrong(f"{at}: another result")
        found = run("inspect {out}", self.made, out).stdout if any(out.glob("checkpoint-*")) else ""
        for saved in re.findall(r"^saved .*/(.*)$", first.stdout, re.MULTILINE):
            if not re.search(rf"^  {saved} +whole$", found, re.MULTILINE):
                raise Wrong(f"{at}: {saved} was saved and is not whole:\n{found}")
        if self.scenario.begins_as:
            self._check_old_ones(out, found, at)
        has_checkpoint = bool(found) and "no checkpoint to resume" not in found
        line = self.scenario.resumed if has_checkpoint else self.scenario.anew
        if contents(out) == self.wanted and self.scenario.name in ("quantize", "merge"):
            line = ""  # a folder that is finished is not written over
        if line:
            second = run(line, self.made, out)
            if second.returncode != 0:
                raise Wrong(f"{at}: the next run failed: {second.stderr}\n{sorted(os.listdir(out))}")
        end = contents(out)
        if end != self.wanted:
            names = sorted(name for name in end.keys() | self.wanted.keys() if end.get(name) != self.wanted.get(name))
            raise Wrong(f"{at}: the next run ends with other {names}")
        shutil.rmtree(out)


    def _check_old_ones(self, out: pathlib.Path, found: str, at: str) -> None:
        """@raises Wrong unless each checkpoint of the beginning is there, old or new, or waits to be put back."""
        for before in sorted((self.made / self.scenario.begins_as).glob("checkpoint-*")):
            waits = self.scenario.more and (out / f".replaced-{before.name}" / "MANIFEST.json").is_file()
            if not waits and not re.search(rf"^  {before.name} +whole$", found, re.MULTILINE):
                raise Wrong(f"{at}: {before.name} was there and is not whole:\n{found}")


def make_inputs(made: pathlib.Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    import peer

    peer.write_llama(made / "model", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    peer.write_rows(made / "rows.jsonl", 8)
    done = run(TRAIN, made, made / "trained")
    assert done.returncode == 0, done.stderr


def try_points(given: argparse.Namespace, work: pathlib.Path) -> tuple[int, int]:
    """Prints what goes wrong. @returns the number of points, and of those that went wrong."""
    end = time.monotonic() + given.seconds
    made = work / "made"
    made.mkdir()
    make_inputs(made)
    tried = [Tried(SCENARIOS[name], made, work) for name in given.scenarios]
    chosen = [point for each in tried for point in each.points()]
    chosen = random.Random(given.seed).sample(chosen, min(len(chosen), given.points or len(chosen)))

    def one(point: tuple[Tried, int, str]) -> str | None:
        if time.monotonic() > end:
            return None
        try:
            point[0].check(*point[1:])
        except Wrong as wrong:
            return str(wrong)
        except subprocess.TimeoutExpired:
            return f"{point[0].scenario.name}, call {point[1]}, {point[2]}: it hangs"
        return ""

    count = wrong = 0
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for text in pool.map(one, chosen):
            count += text is not None
            if text:
                wrong += 1
                print(text, flush=True)
    return count, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--points", type=int, help="how many, at random; all unless given")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no point after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        count, wrong = try_points(given, pathlib.Path(work))
    print(json.dumps({"points": count, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
