# SPDX-License-Identifier: Apache-2.0
"""Kills one of two processes that train one run on the CPU, at random moments, and checks how the other ends and what the next run finds.

    python tests/faults/rank_kills.py [--kills 200] [--seed S] [--jobs J]

A chain has one to three kills, of a rank that is chosen at random or of both, each followed by two new processes that resume. After a kill the other rank
must end by itself within --limit seconds; unless it had finished, it fails with a message that names the rank. Every checkpoint that the run said it had
saved must be there, and whole. The last two processes of a chain run undisturbed and must end in the bytes of a run that was never killed, with no litter.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time

from faults import BUILD, Wrong, contents, make_inputs

TRAIN = (
    "train --model {made}/model --data {made}/rows.jsonl --output {out} --max_steps 6 --save_steps 1 --save_total_limit 3 --r 2 --device cpu "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 1 --target_modules q_proj --ddp_timeout 3 --resume_from_checkpoint {resume}"
)


def free_port() -> int:
    with contextlib.closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


class Pair:
    """Two ranks of a run."""

    def __init__(self, made: pathlib.Path, out: pathlib.Path) -> None:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        has_checkpoint = any(out.glob("checkpoint-*"))
        line = TRAIN.format(made=made, out=out, resume="true" if has_checkpoint else "false").split()
        line += [] if has_checkpoint else ["--overwrite_output_dir", "true"]
        self.ranks = [
            subprocess.Popen(
                [BUILD / "qlorapp", *line],
                env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        self.said: list[tuple[str, str]] = [("", "")] * 2
        self.readers = [threading.Thread(target=self._read, args=(rank,)) for rank in range(2)]
        for reader in self.readers:
            reader.start()

    def _read(self, rank: int) -> None:
        self.said[rank] = self.ranks[rank].communicate()

    def end(self, limit: float) -> list[int]:
        """@returns the exit codes. @raises Wrong if a rank runs on; it is killed."""
        until = time.monotonic() + limit
        for reader in self.readers:
            reader.join(max(0.0, until - time.monotonic()))
        late = [rank for rank, reader in enumerate(self.readers) if reader.is_alive()]
        for rank in late:
            self.ranks[rank].kill()
            self.readers[rank].join()
        if late:
            raise Wrong(f"rank {late} still ran after {limit} s: {self.said}")
        return [rank.returncode for rank in self.ranks]

    def saved(self) -> list[str]:
        return re.findall(r"^saved .*/(checkpoint-\d+)\n", self.said[0][0], re.MULTILINE)


class Chain:
    def __init__(self, number: int, given: argparse.Namespace, work: pathlib.Path, wanted: dict[str, bytes]) -> None:
        self.moments, self.given, self.wanted = random.Random(f"{given.seed} {number}"), given, wanted
        self.made, self.out = work / "made", work / f"chain-{number}"
        self.kills = 0

    def run(self, seconds: float) -> None:
        """@raises Wrong."""
        newest = 0
        for _ in range(self.moments.randint(1, 3)):
            newest = max(newest, self._killed(seconds))
            self._check(newest)
        codes = (last := Pair(self.made, self.out)).end(self.given.limit)
        if codes != [0, 0]:
            raise Wrong(f"the undisturbed run after the kills ended with {codes}: {last.said}")
        if (found := contents(self.out)) != self.wanted:
            names = sorted(name for name in found.keys() | self.wanted.keys() if found.get(name) != self.wanted.get(name))
            raise Wrong(f"the run after the kills ends with other {names}")
        shutil.rmtree(self.out)

    def _killed(self, seconds: float) -> int:
        """@returns the newest step that the run said it had saved."""
        pair = Pair(self.made, self.out)
        victims = self.moments.choice(([0], [1], [0, 1]))
        time.sleep(self.moments.random() * seconds)
        for rank in victims:
            pair.ranks[rank].kill()
        self.kills += 1
        codes = pair.end(self.given.limit)
        for rank, code in enumerate(codes):
            killed, said = victims[0], pair.said[rank][1]
            if rank in victims or code == 0:
                continue
            goes_on = code == 4 and "--resume_from_checkpoint true" in said
            if not (code in (1, 2) or goes_on) or not re.search(rf"rank \[?{killed}\b", said):
                raise Wrong(f"rank {rank} ended with {code} after rank {killed} was killed, and said: {said or 'nothing'}")
        return max((int(name.rpartition("-")[2]) for name in pair.saved()), default=0)

    def _check(self, newest: int) -> None:
        if not any(self.out.glob("checkpoint-*")):
            if newest:
                raise Wrong(f"checkpoint-{newest} was saved and is gone")
            return
        shown = subprocess.run([BUILD / "qlorapp", "inspect", self.out], capture_output=True, text=True, check=False).stdout
        states = dict(re.findall(r"^  (checkpoint-\d+) +(.*)$", shown, re.MULTILINE))
        torn = {name: state for name, state in states.items() if state != "whole"}
        if torn or (newest and f"checkpoint-{newest}" not in states):
            raise Wrong(f"checkpoint-{newest} was the newest; found {states}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="at least so many")
    parser.add_argument("--limit", type=float, default=60, help="seconds in which the other rank must end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    kills = wrong = chains = 0
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        work = pathlib.Path(folder)
        (work / "made").mkdir()
        make_inputs(work / "made")
        begin = time.monotonic()
        whole = Pair(work / "made", work / "whole")
        if (codes := whole.end(300)) != [0, 0]:
            print(f"the undisturbed run ended with {codes}: {whole.said}")
            return 1
        seconds, wanted = time.monotonic() - begin, contents(work / "whole")

        def one(number: int) -> tuple[int, str]:
            chain = Chain(number, given, work, wanted)
            try:
                chain.run(seconds)
            except Wrong as error:
                return chain.kills, f"chain {number}: {error}"
            return chain.kills, ""

        while kills < given.kills:
            for killed, text in pool.map(one, range(chains, chains + given.jobs)):
                kills, wrong = kills + killed, wrong + bool(text)
                if text:
                    print(text, flush=True)
            chains += given.jobs
    print(json.dumps({"kills": kills, "chains": chains, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
