# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel as `pip install --no-build-isolation .` does, unpacks it beside torch, and uses it from there.

    python tests/consumer_wheel.py FOLDER [--command]    # --command: the wheel must hold the qlorapp program, too

Exit code 77: skipped, because this interpreter lacks the build backend.
"""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(*command: object, **keywords) -> str:
    print("$", *command, flush=True)
    return subprocess.run([str(part) for part in command], check=True, text=True, **keywords).stdout


def main() -> int:
    if not importlib.util.find_spec("scikit_build_core"):
        print("skipped: scikit-build-core is not installed in", sys.executable)
        return 77
    folder = pathlib.Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    site = folder / "site-packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, ROOT)
    (wheel,) = folder.glob("qlorapp-*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel)
    torch = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    (site / "torch").symlink_to(torch)  # the neighbor that it has in a real site-packages

    env = {**os.environ, "PYTHONPATH": str(site)}
    code = "import qlorapp, torch; print(qlorapp.__file__, qlorapp.__version__); torch.ops.qlorapp.quantize_4bit"
    printed = run(sys.executable, "-c", code, env=env, cwd=folder, stdout=subprocess.PIPE)
    assert printed.startswith(str(site)), printed
    for needed in ("include/qlorapp/qlorapp.hpp", "lib/libqlorapp.so", "lib/cmake/qlorapp/qlorappConfig.cmake", "py.typed"):
        assert (site / "qlorapp" / needed).exists(), f"the wheel lacks {needed}"
    if "--command" in sys.argv:
        usage = run(site / "bin" / "qlorapp", "--help", env=env, cwd=folder, stdout=subprocess.PIPE)
        assert "train" in usage, usage
    return 0


if __name__ == "__main__":
    sys.exit(main())
