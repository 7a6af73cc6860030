# SPDX-License-Identifier: Apache-2.0
"""Puts one small mistake at a time into the library and checks that a test finds it.

    python tests/mutants/mutants.py [--only NAME …] [--jobs J] [--list]

table.py lists the mistakes, each with the test that must find it. A mutant is compiled and linked in a temporary folder, with the commands and the
objects of a finished build (QLORAPP_BUILD_DIR, or build/dev). Sources and build are only read. A mutant is killed if its test fails, crashes or runs out
of time. The same test must pass first on a program that is linked in the same way, without the mistake. A mutant that does not compile is an
error of the table.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

from mutant import Killer, Mutant
from table import MUTANTS

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("QLORAPP_BUILD_DIR", ROOT / "build" / "dev")).resolve()
#: For one test. The slowest needs about 30 s.
SECONDS = 240


class Broken(Exception):
    """A mistake of the table or of the build. It says nothing about the tests."""


def run(words: list[str], folder: pathlib.Path, **environment: str) -> tuple[int, str]:
    """@returns the exit code and the output of a command; after SECONDS it and all that it started are killed."""
    with subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -1, f"not finished after {SECONDS} s"
        return process.returncode, output.decode(errors="replace")


class Program:
    """An executable or library of the build, with the commands that make it."""

    def __init__(self, name: str) -> None:
        path = BUILD / name
        if not path.exists():
            raise Broken(f"{path} must be built first: ./dev mutants")
        self.output = str(path.resolve().relative_to(BUILD))  # libqlorapp.so is a link
        cache = (BUILD / "CMakeCache.txt").read_text()
        ninja = re.search(r"^CMAKE_MAKE_PROGRAM:\w+=(.*)$", cache, re.MULTILINE)
        done = subprocess.run(
            [ninja[1] if ninja else "ninja", "-t", "commands", self.output],
            cwd=BUILD,
            capture_output=True,
            text=True,
            check=True,
        )
        self.compile: dict[str, str] = {}
        self.link = ""
        for line in done.stdout.splitlines():
            if found := re.search(r" -o (\S+) -c \S+$", line):
                self.compile[found[1]] = line
            elif f" -o {self.output} " in line:
                self.link = line
        if not self.link:
            raise Broken(f"no command links {self.output}")
        #: By object: the sources in it, relative to ROOT. CMake compiles several together.
        self.sources = {each: self._sources(line) for each, line in self.compile.items() if f" {each} " in self.link}

    @staticmethod
    def _sources(line: str) -> list[str]:
        source = pathlib.Path(BUILD, line.split()[-1])
        batch = re.findall(r'^#include "(.*)"$', source.read_text(), re.MULTILINE) if source.suffix == ".cxx" else [str(source)]
        return [os.path.relpath(each, ROOT) for each in batch]


def overlay(output: str, into: pathlib.Path, build: pathlib.Path = BUILD) -> pathlib.Path:
    """Makes `into` the build, by links, without the file `output`. @returns the place for it."""
    into.mkdir()
    first, _, rest = output.partition("/")
    for entry in os.scandir(build):
        target = os.readlink(entry.path) if entry.is_symlink() else entry.path
        if entry.name != first:
            (into / entry.name).symlink_to(target)
    return overlay(rest, into / first, build / first) if rest else into / first


@dataclasses.dataclass
class Cached:
    """Values by key, each computed once, whatever the number of threads."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    values: dict = dataclasses.field(default_factory=dict)

    def get(self, key, make):
        with self.lock:
            is_first = key not in self.values
            value = self.values.setdefault(key, concurrent.futures.Future())
        if is_first:
            try:
                value.set_result(make())
            except BaseException as error:
                value.set_exception(error)
        return value.result()


class Workshop:
    def __init__(self, work: pathlib.Path, mutants: list[Mutant]) -> None:
        self.work = work
        self.programs = {name: Program(name) for name in sorted({each.killer.program for each in mutants})}
        self.objects, self.controls = Cached(), Cached()
        #: By object: the sources that some mutant changes. They are compiled one by one, the rest of a batch together and once.
        self.changed: dict[str, set[str]] = {}
        for mutant in mutants:
            program = self.programs[mutant.killer.program]
            for unit in mutant.units:
                self.changed.setdefault(self.object_of(program, unit), set()).add(unit)

    def object_of(self, program: Program, unit: str) -> str:
        for each, sources in program.sources.items():
            if unit in sources:
                return each
        raise Broken(f"{program.output} is not linked with {unit}")

    def compile(
        self, program: Program, each: str, source: pathlib.Path, folders: list[pathlib.Path], output: pathlib.Path
    ) -> str:
        line = re.sub(r" -MD| -M[TF] \S+| -o \S+ -c \S+$", "", program.compile[each])
        quoted = "".join(f" -iquote {shlex.quote(str(folder))}" for folder in folders)
        line += f" -w{quoted} -o {shlex.quote(str(output))} -c {shlex.quote(str(source))}"
        code, text = run(["/bin/sh", "-c", line], BUILD, CCACHE_DISABLE="1")
        if code != 0:
            raise Broken(f"{source} does not compile:\n{text[:3000]}")
        return str(output)

    def unchanged(self, program: Program, each: str, unit: str | None) -> str:
        """The object of one source as it is; of None: of all in the batch that no mutant changes."""

        def make() -> str:
            folder = self.work / "unchanged"
            folder.mkdir(exist_ok=True)
            name = re.sub(r"\W", "_", f"{each}_{unit}")
            if unit is not None:
                return self.compile(program, each, ROOT / unit, [], folder / f"{name}.o")
            rest = [ROOT / source for source in program.sources[each] if source not in self.changed[each]]
            (folder / f"{name}.cxx").write_text("".join(f'#include "{source}"\n' for source in rest))
            return self.compile(program, each, folder / f"{name}.cxx", [], folder / f"{name}.o")

        return self.objects.get((each, unit), make)

    def link(self, program: Program, units: tuple[str, ...], changed: dict[str, str], output: pathlib.Path) -> None:
        """@param changed  objects by source, in place of the unchanged ones."""
        line = program.link
        for each in {self.object_of(program, unit) for unit in units}:
            sources = program.sources[each]
            if len(sources) == 1 and sources[0] not in changed:
                continue
            objects = [changed.get(unit) or self.unchanged(program, each, unit) for unit in sorted(self.changed[each])]
            if any(source not in self.changed[each] for source in sources):
                objects.append(self.unchanged(program, each, None))
            line = line.replace(f" {each} ", f" {shlex.join(objects)} ")
        line = line.replace(f" -o {program.output} ", f" -o {shlex.quote(str(output))} ")
        code, text = run(["/bin/sh", "-c", line], BUILD)
        if code != 0:
            raise Broken(f"{program.output} does not link:\n{text[:3000]}")

    def test(self, killer: Killer, build: pathlib.Path) -> tuple[int, str]:
        scratch = build.with_name(f"{build.name}-scratch")
        scratch.mkdir(exist_ok=True)
        libraries = ":".join(filter(None, [str(build), os.environ.get("LD_LIBRARY_PATH")]))
        words = [word.format(build=build, root=ROOT, python=sys.executable) for word in killer.words]
        return run(
            words, scratch, QLORAPP_BUILD_DIR=str(build), LD_LIBRARY_PATH=libraries, TMPDIR=str(scratch), OMP_NUM_THREADS="1",
            PYTHONDONTWRITEBYTECODE="1",
        )  # fmt: skip

    def check(self, mutant: Mutant) -> None:
        """The test of a mutant must pass without it. @raises Broken."""
        program = self.programs[mutant.killer.program]

        def make_control() -> pathlib.Path:
            build = self.work / f"control{len(self.controls.values)}"
            self.link(program, mutant.units, {}, overlay(program.output, build))
            return build

        def make_verdict() -> None:
            code, text = self.test(mutant.killer, build)
            if code != 0:
                raise Broken(f"{mutant.killer.name} must pass without a mutant; it does not:\n{text[-3000:]}")

        build = self.controls.get((program.output, mutant.units), make_control)
        self.controls.get((program.output, mutant.units, mutant.killer), make_verdict)

    def is_killed(self, mutant: Mutant) -> bool:
        """@raises Broken."""
        self.check(mutant)
        tree = self.work / mutant.name
        try:
            return self.test(mutant.killer, self.make(mutant, tree))[0] != 0
        finally:
            shutil.rmtree(tree, ignore_errors=True)

    def make(self, mutant: Mutant, tree: pathlib.Path) -> pathlib.Path:
        """@returns a build with the mutant, by links."""
        for name in {mutant.file, *mutant.units}:
            text = (ROOT / name).read_text()
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text.replace(mutant.old, mutant.new) if name == mutant.file else text)
        program, changed = self.programs[mutant.killer.program], {}
        for unit in mutant.units:
            folders = [tree / "src", tree / "include", (ROOT / unit).parent]
            output = tree / f"{unit.replace('/', '_')}.o"
            changed[unit] = self.compile(program, self.object_of(program, unit), tree / unit, folders, output)
        self.link(program, mutant.units, changed, overlay(program.output, tree / "build"))
        return tree / "build"


def check_table(mutants: list[Mutant]) -> None:
    """@raises Broken."""
    if len({each.name for each in mutants}) != len(mutants):
        raise Broken("names must be unique")
    for each in mutants:
        times = (ROOT / each.file).read_text().count(each.old)
        if times != 1 or each.new == each.old:
            raise Broken(f"{each.name}: its text must be in {each.file} once; it is there {times} times")


def try_all(mutants: list[Mutant], jobs: int) -> tuple[int, int]:
    """Prints what is not killed. @returns the number of killed mutants, and of those that could not be tried."""
    killed = broken = 0
    with tempfile.TemporaryDirectory(prefix="qlorapp-mutants-") as work, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        workshop = Workshop(pathlib.Path(work), mutants)
        tries = {pool.submit(workshop.is_killed, each): each for each in mutants}
        try:
            for each in concurrent.futures.as_completed(tries):
                mutant = tries[each]
                try:
                    is_killed = each.result()
                except Broken as error:
                    broken += 1
                    print(f"broken    {mutant.name}: {error}", flush=True)
                    continue
                killed += is_killed
                print(
                    f"killed    {mutant.name}"
                    if is_killed
                    else f"SURVIVED  {mutant.name} in {mutant.file}: {mutant.killer.name} must find it",
                    flush=True,
                )
        finally:
            pool.shutdown(cancel_futures=True)
    return killed, broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, or all whose name begins so: --only scaler.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print names, files and tests only")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the temporary folder
    mutants = [each for each in MUTANTS if not given.only or each.name.startswith(tuple(given.only))]
    if not mutants:
        parser.error(f"no mutant is named {given.only}")
    if given.list:
        for each in mutants:
            print(f"{each.name:34} {each.file:36} {each.killer.name}")
        return 0
    try:
        check_table(mutants)
        killed, broken = try_all(mutants, given.jobs)
    except Broken as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"mutants": len(mutants), "killed": killed, **({"broken": broken} if broken else {})}))
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
