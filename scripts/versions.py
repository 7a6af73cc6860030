# SPDX-License-Identifier: Apache-2.0
"""Runs Python tests with the oldest and the newest releases that qlorapp[hf] accepts: python scripts/versions.py BUILD [oldest] [newest].

Each end gets a venv in build/versions over this interpreter's packages. pip installs only what differs, once. Needs pip's index.
"""

import argparse
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Loading, forward and generation; trainers, resume and saving; TRL's and PEFT's own code over this library's models.
TESTS = (
    "test_engine", "test_engine_adapters", "test_hf_trainer", "test_hf_trl", "test_trainer_loop", "test_nothing_lost_python",
    "test_peft_roundtrip", "test_foreign_models", "test_load_options", "test_generate_by_libraries",
)  # fmt: skip
#: Of these, what ./dev test has time for.
SMOKE = (
    "test_generate_by_libraries", "test_engine.py::TestGenerate", "test_hf_trainer.py::TestResume",
    "test_hf_trl.py::TestSFT::test_four_bits_a_peft_config_and_evaluation",
)  # fmt: skip
SKIPPED = 77


def python_of(end: str) -> pathlib.Path:
    """The interpreter of an end, after its packages were installed."""
    pins = ROOT / "requirements" / f"{end}.txt"
    folder = ROOT / "build" / "versions" / end
    python, stamp = folder / "bin" / "python", folder / "pins"
    torch = f"torch=={importlib.metadata.version('torch')}"  # the one that the build was made for
    wanted = f"{sys.executable} {torch}\n{pins.read_text(encoding='utf-8')}"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        site = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (site / "neighbors.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
        subprocess.run([*pip, "-r", pins, torch], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("ends", nargs="*", help="oldest, newest (default: both)")
    parser.add_argument(
        "--smoke", action="store_true", help=f"few tests; exits with {SKIPPED} if pip cannot install the releases"
    )
    given = parser.parse_args()
    env = {**os.environ, "QLORAPP_BUILD_DIR": str(given.build.resolve())}
    tests = [f"tests/python/{name if '::' in name else name + '.py'}" for name in (SMOKE if given.smoke else TESTS)]
    failed = []
    for end in given.ends or ["oldest", "newest"]:
        try:
            python = python_of(end)
        except subprocess.CalledProcessError as error:
            sys.exit(SKIPPED if given.smoke else f"versions: pip cannot install requirements/{end}.txt: {error}")
        print(f"== {end}: {' '.join((ROOT / 'requirements' / f'{end}.txt').read_text(encoding='utf-8').split())}", flush=True)
        done = subprocess.run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], cwd=ROOT, env=env, check=False)
        failed += [end] if done.returncode else []
    if failed:
        sys.exit(f"versions: tests fail with the {' and the '.join(failed)} releases")


if __name__ == "__main__":
    main()
