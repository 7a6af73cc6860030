# SPDX-License-Identifier: Apache-2.0
"""Kills and fails the commands that write, at each of their file calls, and checks what the next run finds.

    python tests/faults/faults.py [--points N] [--skip N] [--kills N] [--seconds T] [--seed S] [--jobs J] [SCENARIO …]

Scenarios are the command's, and those of Python's Trainer and save_pretrained (python_server.py). A point is a scenario, the number
of a file call below its output folder, and what happens there (shim.cpp). After each point a run without faults follows in the same folder.
It must succeed, end in the bytes of a run that nothing disturbed, and leave no litter; every checkpoint that the disturbed run said it had
saved must have been there, and whole. Trainer.save_model and save_pretrained never leave a mixture of two adapters. Without --points all points are tried. A kill hits Python's trainer, and the runs that resume
it, at random moments.
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
import threading
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
        Scenario(*["export", *["export --model {made}/text --ollama {out} --type Q8_0 --verify false"] * 3]),
        Scenario(*["merge", *["merge --model {made}/model --adapter {made}/trained --output {out}"] * 3]),
    )
}


@dataclasses.dataclass(frozen=True)
class PythonScenario:
    name: str
    #: For python_server.py.
    what: str
    begins_as: str | None = None


PYTHON_SCENARIOS = {
    each.name: each
    for each in (
        PythonScenario("trainer.train", "trainer.train"),
        PythonScenario("trainer.retrain", "trainer.train", begins_as="python-trained"),
        PythonScenario("trainer.save_model", "trainer.save_model"),
        PythonScenario("trainer.save_model over another", "trainer.save_model", begins_as="python-old"),
        PythonScenario("save_pretrained", "save_pretrained"),
        PythonScenario("save_pretrained over another", "save_pretrained", begins_as="python-old"),
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
    """All files and folders, without what a clock or a generator of ids wrote."""
    timed = ("trainer_state.json", "MANIFEST.json", "run.json", "training_args.json", "training_args.bin", "run_report.json")
    return {
        str(path.relative_to(folder)): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.name not in timed
    }


@dataclasses.dataclass(frozen=True)
class Ended:
    """What became of a disturbed run."""

    code: int
    error: str
    #: Names of the checkpoints that it said it had saved.
    saved: list[str]


class Tried:
    """A scenario with its undisturbed result."""

    harmless = HARMLESS

    def __init__(self, scenario: Scenario, made: pathlib.Path, work: pathlib.Path) -> None:
        self.scenario, self.made, self.work = scenario, made, work
        out = self._begin("whole")
        self.calls = self.count(out)
        self.wanted = contents(out)

    def count(self, out: pathlib.Path) -> int:
        """The file calls of an undisturbed run."""
        count = self.work / f"{self.scenario.name}.count"
        done = run(self.scenario.command, self.made, out, COUNT=str(count), **dict(self.scenario.more))
        assert done.returncode == 0, done.stderr
        return int(count.read_text())

    def disturbed(self, out: pathlib.Path, call: int, action: str) -> Ended:
        done = run(self.scenario.command, self.made, out, AT=str(call), DO=action, **dict(self.scenario.more))
        return Ended(done.returncode, done.stderr, re.findall(r"^saved .*/(.*)$", done.stdout, re.MULTILINE))

    def again(self, out: pathlib.Path, has_checkpoint: bool) -> str:
        """The next run. @returns why it failed."""
        done = run(self.scenario.resumed if has_checkpoint else self.scenario.anew, self.made, out)
        is_refused = (
            self.scenario.name in ("quantize", "merge", "export") and contents(out) == self.wanted
        )  # a finished folder is not written over
        return "" if done.returncode == 0 or is_refused else done.stderr or "no message"

    def mixture(self, out: pathlib.Path) -> str:
        """What a reader would find of two saves at once."""
        return ""

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
        first = self.disturbed(out, call, action)
        at = f"{self.scenario.name}, call {call} of {self.calls}, {action}"
        if action in self.harmless and first.code != 0:
            raise Wrong(f"{at}: exit code {first.code}: {first.error}")
        if first.code not in (0, 1, 2, 4, -9):
            raise Wrong(f"{at}: exit code {first.code}: {first.error}")
        if (first.code == 2 and first.saved) or (first.code == 4 and not list(out.glob("checkpoint-*"))):
            raise Wrong(f"{at}: exit code {first.code} with {first.saved} saved: {first.error}")
        if first.code > 0 and not first.error.strip():
            raise Wrong(f"{at}: failed without a word")
        if first.code == 0 and contents(out) != self.wanted and action in self.harmless:
            raise Wrong(f"{at}: another result")
        if mixed := self.mixture(out):
            raise Wrong(f"{at}: {mixed}")
        self._check_next(out, at, first.saved)

    def _check_next(self, out: pathlib.Path, at: str, saved: list[str]) -> None:
        has_checkpoint = self._check_saved(out, at, saved)
        if error := self.again(out, has_checkpoint):
            raise Wrong(f"{at}: the next run failed: {error}\n{sorted(os.listdir(out))}")
        end = contents(out)
        if end != self.wanted:
            names = sorted(name for name in end.keys() | self.wanted.keys() if end.get(name) != self.wanted.get(name))
            raise Wrong(f"{at}: the next run ends with other {names}")
        shutil.rmtree(out)

    def _check_saved(self, out: pathlib.Path, at: str, saved: list[str]) -> bool:
        """Whether there is a checkpoint to resume from."""
        found = run("inspect {out}", self.made, out).stdout if any(out.glob("checkpoint-*")) else ""
        for name in saved:
            if not re.search(rf"^  {name} +whole$", found, re.MULTILINE):
                raise Wrong(f"{at}: {name} was saved and is not whole:\n{found}")
        if self.scenario.begins_as:
            self._check_old_ones(out, found, at)
        return bool(found) and "no checkpoint to resume" not in found

    def _check_old_ones(self, out: pathlib.Path, found: str, at: str) -> None:
        """@raises Wrong unless each checkpoint of the beginning is there, old or new, or waits to be put back."""
        for before in sorted((self.made / self.scenario.begins_as).glob("checkpoint-*")):
            waits = getattr(self.scenario, "more", ()) and (out / f".replaced-{before.name}" / "MANIFEST.json").is_file()
            if not waits and not re.search(rf"^  {before.name} +whole$", found, re.MULTILINE):
                raise Wrong(f"{at}: {before.name} was there and is not whole:\n{found}")


class PythonServer:
    """python_server.py, which runs one request at a time."""

    def __init__(self, made: pathlib.Path) -> None:
        environment = os.environ | {
            "LD_PRELOAD": str(shim()), "PYTHONPATH": str(BUILD / "python"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, str(pathlib.Path(__file__).with_name("python_server.py")), str(made)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process, self.lock = subprocess.Popen(command, env=environment, **pipes), threading.Lock()

    def ask(self, **request: object) -> dict:
        with self.lock:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class PythonTried(Tried):
    """The same for a scenario of Python, which does not retry every call that a signal interrupts."""

    harmless = ("short",)

    def __init__(self, scenario: PythonScenario, made: pathlib.Path, work: pathlib.Path, server: PythonServer) -> None:
        self.server = server
        self.trains = scenario.what == "trainer.train"
        super().__init__(scenario, made, work)

    def _ask(self, out: pathlib.Path, **more: object) -> dict:
        if self.scenario.begins_as == "python-trained":
            more = {"resume": str(out / "checkpoint-2")} | more
        return self.server.ask(what=self.scenario.what, out=str(out), **more)

    def count(self, out: pathlib.Path) -> int:
        done = self._ask(out)
        assert done["code"] == 0, done["error"]
        self.seconds = done["seconds"]
        return done["calls"]

    def disturbed(self, out: pathlib.Path, call: int, action: str) -> Ended:
        done = self._ask(out, at=call, do=action)
        return Ended(done["code"], done["error"], done["saved"])

    def again(self, out: pathlib.Path, has_checkpoint: bool) -> str:
        done = self._ask(out, **({"resume": has_checkpoint or None} if self.trains else {}))
        return "" if done["code"] == 0 else done["error"] or "no message"

    def mixture(self, out: pathlib.Path) -> str:
        files = ("adapter_config.json", "adapter_model.safetensors")
        if self.trains or not (out / files[0]).exists():
            return ""
        there = [(out / name).read_bytes() if (out / name).exists() else None for name in files]
        whole = [[self.wanted.get(name) for name in files]]
        if self.scenario.begins_as:
            whole.append([(self.made / self.scenario.begins_as / name).read_bytes() for name in files])
        return "" if there in whole else f"a mixture of two adapters: {sorted(os.listdir(out))}"

    def kill(self, moments: random.Random) -> None:
        """@raises Wrong."""
        out, saved = self._begin(f"killed {moments.random()}"), []
        kills = moments.randint(1, 3)
        for kill in range(1, kills + 1):
            at = f"{self.scenario.name}, kill {kill} of {kills}"
            has_checkpoint = self._check_saved(out, at, saved)
            after = moments.random() * self.seconds
            done = self._ask(out, kill_after=after, **({"resume": True} if has_checkpoint else {}))
            if done["code"] not in (0, -9):
                raise Wrong(f"{at} after {after:.3f} s: exit code {done['code']}: {done['error']}")
            saved = sorted({*saved, *done["saved"]})
        self._check_next(out, at, saved)


def make_inputs(made: pathlib.Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    import peer

    peer.write_llama(made / "model", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    peer.write_rows(made / "rows.jsonl", 8)
    peer.write_llama(made / "text", num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=704)
    for file in (ROOT / "examples" / "data" / "tiny-llama").glob("*token*.json"):
        shutil.copy(file, made / "text")
    done = run(TRAIN, made, made / "trained")
    assert done.returncode == 0, done.stderr


def tried(names: list[str], made: pathlib.Path, work: pathlib.Path) -> tuple[list[Tried], PythonServer | None]:
    found = [Tried(SCENARIOS[name], made, work) for name in names if name in SCENARIOS]
    pythons = [PYTHON_SCENARIOS[name] for name in names if name in PYTHON_SCENARIOS]
    if not pythons:
        return found, None
    server = PythonServer(made)
    for what, name, old in (("trainer.train", "python-trained", False), ("trainer.save_model", "python-old", True)):
        done = server.ask(what=what, out=str(made / name), old=old)
        assert done["code"] == 0, done["error"]
    return found + [PythonTried(scenario, made, work, server) for scenario in pythons], server


def try_points(given: argparse.Namespace, work: pathlib.Path) -> tuple[int, int, dict[str, int]]:
    """Prints what goes wrong. @returns the number of points, of those that went wrong, and of points in each scenario."""
    end = time.monotonic() + given.seconds
    made = work / "made"
    made.mkdir()
    make_inputs(made)
    scenarios, server = tried(given.scenarios, made, work)
    moments = random.Random(given.seed)
    chosen = [point for each in scenarios for point in each.points()]
    chosen = moments.sample(chosen, len(chosen))[given.skip :][: given.points]
    trains = [each for each in scenarios if isinstance(each, PythonTried) and each.trains]
    chosen += [(trains[i % len(trains)], 0, f"kill {moments.random()}") for i in range(given.kills if trains else 0)]

    def one(point: tuple[Tried, int, str]) -> str | None:
        if time.monotonic() > end:
            return None
        each, call, action = point
        try:
            each.check(call, action) if call else each.kill(random.Random(action))
        except Wrong as wrong:
            return str(wrong)
        except subprocess.TimeoutExpired:
            return f"{each.scenario.name}, call {call}, {action}: it hangs"
        return ""

    wrong, counts = 0, dict.fromkeys(given.scenarios, 0)
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for point, text in zip(chosen, pool.map(one, chosen), strict=True):
            counts[point[0].scenario.name] += text is not None
            if text:
                wrong += 1
                print(text, flush=True)
    if server is not None:
        server.close()
    return sum(counts.values()), wrong, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SCENARIOS, *PYTHON_SCENARIOS]
    parser.add_argument("scenarios", nargs="*", default=names, metavar="SCENARIO", help=", ".join(names))
    parser.add_argument("--points", type=int, help="how many, at random; all unless given")
    parser.add_argument("--kills", type=int, default=60, help="how many of Python's trainer, at random moments")
    parser.add_argument("--skip", type=int, default=0, help="so many of the points first; another run has tried them")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no point after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        count, wrong, counts = try_points(given, pathlib.Path(work))
    print(json.dumps({"points": count, "wrong": wrong, "of": counts}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
