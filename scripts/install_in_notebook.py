#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs qlorapp[hf] for the torch that is installed. The first cell of each notebook runs it.

    python scripts/install_in_notebook.py

If `import qlorapp` works, it does nothing. If QLORAPP_WHEELS (a folder, or the address of a page of links) has a wheel for this Python and
this minor version of torch, it installs that wheel. Otherwise it builds one from this checkout, and keeps it in QLORAPP_WHEELS if that is a
folder. QLORAPP_CUDA_ARCHITECTURES and QLORAPP_DEPS_DIR go to the build. torch stays as it is: pip gets its version as a constraint.

On failure it prints the last 40 lines of the output and a way out, and exits with 1.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile

SOURCE = pathlib.Path(__file__).resolve().parents[1]
CPYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
TOOLS = ["scikit-build-core>=0.10", "cmake>=3.28,<5", "ninja>=1.11"]
HEADERS = {"nlohmann/json.hpp": "nlohmann-json3-dev", "CLI/CLI.hpp": "libcli11-dev"}
NINJA = re.compile(r"\s*\[(\d+)/(\d+)\] ")
WHEEL = re.compile(rf"qlorapp-([0-9.]+)[^/]*-{CPYTHON}-{CPYTHON}-[^/]*linux[^/]*_{platform.machine()}\.whl$")


def run(command: list[str], way_out: str, progress: str = "") -> list[str]:
    """The output's lines. With `progress`, ninja's "[12/140]" lines rewrite one line that begins with it."""
    lines, started = [], time.monotonic()
    # One compiler per core: each needs about a gigabyte. The cmake and ninja of TOOLS lie beside the interpreter.
    env = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()), **os.environ}
    env["PATH"] = os.pathsep.join([str(pathlib.Path(sys.executable).parent), env.get("PATH", "")])
    print(progress, end="", flush=True)
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace"
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if progress and (step := NINJA.match(line)):
                minutes = int(time.monotonic() - started) // 60
                print(f"\r{progress}: {step[1]} of {step[2]} objects, {minutes} min ", end="", flush=True)
    if progress:
        print()
    if process.returncode:
        print("".join(lines[-40:]), end="")
        raise SystemExit(f"[install] {way_out}")
    return lines


def pip(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "pip", *map(str, arguments), "--disable-pip-version-check"]


def installed() -> str | None:
    """The version of the qlorapp that loads here."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec("qlorapp")
    if spec is None or spec.origin is None:  # without an origin: a clone in a folder of this name
        return None
    try:
        return importlib.import_module("qlorapp").__version__
    except ImportError as error:
        print(f"The installed qlorapp does not load: {error}")
        for name in [name for name in sys.modules if name.split(".")[0] == "qlorapp"]:
            del sys.modules[name]
        return None


def find_wheel(place: str, torch: str, folder: pathlib.Path) -> pathlib.Path | None:
    """The newest wheel for this Python and this minor version of torch. From an address, it is downloaded into `folder`."""
    remote = place.startswith(("http://", "https://"))
    try:
        if remote:
            page = urllib.request.urlopen(place).read().decode()
            found = [urllib.parse.urljoin(place, link) for link in re.findall(r'href="([^"#]+)', page)]
        else:
            found = [str(path) for path in pathlib.Path(place).rglob("*.whl")]
        fitting = [(tuple(map(int, name[1].strip(".").split("."))), wheel) for wheel in found if (name := WHEEL.search(wheel))]
        for _, wheel in sorted(fitting, reverse=True):
            folder_of_torch = re.search(r"torch(\d+\.\d+)\b", wheel)  # spares a download; the wheel itself decides
            if remote and folder_of_torch and folder_of_torch[1] != torch:
                continue
            path = pathlib.Path(wheel)
            if remote:
                path = folder / path.name
                urllib.request.urlretrieve(wheel, path)
            try:
                with zipfile.ZipFile(path) as file:
                    if f'TORCH_VERSION = "{torch}"' in file.read("qlorapp/_build_info.py").decode():
                        return path
            except (zipfile.BadZipFile, KeyError):
                print(f"{wheel} is damaged. It is left out.")
    except OSError as error:
        raise SystemExit(f"[install] QLORAPP_WHEELS={place} cannot be read: {error}. Correct or unset it.") from None
    return None


def build_wheel(torch: str, folder: pathlib.Path, fixed: list[str]) -> tuple[pathlib.Path, str]:
    """(the wheel, what CMake says about CUDA)"""
    headers = [os.environ.get("QLORAPP_DEPS_DIR") or "/usr/include", "/usr/include", "/usr/local/include"]
    missing = [package for name, package in HEADERS.items() if not any(pathlib.Path(each, name).exists() for each in headers)]
    if missing and shutil.which("apt-get") and os.geteuid() == 0:  # otherwise CMake names the package
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
        subprocess.run(["apt-get", "install", "-y", "-qq", *missing], capture_output=True, check=False)
    run(pip("install", "-q", *fixed, *TOOLS), "pip could not install the build tools. Check the network, and run this again.")
    settings = [f"build-dir={SOURCE}/build/notebook-torch{torch}-{CPYTHON}"]  # a build that was stopped goes on here
    for name in ("QLORAPP_CUDA_ARCHITECTURES", "QLORAPP_DEPS_DIR"):
        if os.environ.get(name):
            settings.append(f"cmake.define.{name}={os.environ[name]}")
    command = pip("wheel", "-v", "--no-build-isolation", "--no-deps", "-w", folder, *[f"-C{each}" for each in settings], SOURCE)
    way_out = f"The build failed. Correct what the lines above name, or set QLORAPP_WHEELS to a folder with a wheel for torch {torch} and {CPYTHON}."
    lines = run(command, way_out, f"Building qlorapp for torch {torch}")
    (wheel,) = folder.glob("qlorapp-*.whl")
    return wheel, next((line.split("-- ", 1)[1].strip() for line in lines if "-- CUDA: " in line), "")


def main() -> None:
    if version := installed():
        print(f"qlorapp {version} is installed already.")
        return
    try:
        full = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("[install] qlorapp needs torch 2.8 or newer, and there is none. pip install torch first.") from None
    torch, place = ".".join(full.split(".")[:2]), os.environ.get("QLORAPP_WHEELS", "")
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        (folder / "constraints.txt").write_text(f"torch=={full}\n")
        fixed = ["-c", str(folder / "constraints.txt")]
        wheel, origin = find_wheel(place, torch, folder) if place else None, ""
        if wheel:
            origin = f"from {place}"
        else:
            started = time.monotonic()
            wheel, cuda = build_wheel(torch, folder, fixed)
            origin = f"built in {(time.monotonic() - started) / 60:.0f} min; {cuda}".removesuffix("; ")
            if place and "://" not in place:
                kept = pathlib.Path(place, f"torch{torch}")
                kept.mkdir(parents=True, exist_ok=True)
                shutil.copy(wheel, kept)
        reason = "pip could not install it. Correct what the lines above name, and run this again."
        run(pip("install", "-q", "--force-reinstall", "--no-deps", wheel), reason)  # also over a build for another torch
        run(pip("install", "-q", *fixed, f"{wheel}[hf]"), reason)
    version = installed()
    if not version:
        raise SystemExit("[install] qlorapp is installed, but does not load here. Restart the runtime, and run this again.")
    print(f"qlorapp {version} is installed for torch {full}, {origin}.")


if __name__ == "__main__":
    main()
