# SPDX-License-Identifier: Apache-2.0
"""What CMake says where the build cannot begin: each message's own advice works."""

import os
import pathlib
import shutil
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CMAKE = shutil.which("cmake", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ.get("PATH", "")]))
pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake here")
SMALL = [
    "-DQLORAPP_CUDA=OFF",
    *(f"-DQLORAPP_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "BENCHMARKS", "CLI", "PYTHON")),
]


def configure(folder, *options, source=ROOT, **env):
    """CMake's exit code and all that it printed, blanks as one each: it breaks its lines by itself."""
    result = subprocess.run(
        [CMAKE, "-S", source, "-B", folder, *options],
        env={**{k: v for k, v in os.environ.items() if k not in ("CXX", "CMAKE_CXX_COMPILER")}, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return result.returncode, " ".join((result.stdout + result.stderr).split())


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter without torch."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def test_an_interpreter_without_torch_is_named_with_both_ways_out(tmp_path, bare_python):
    code, said = configure(tmp_path, f"-DPython_EXECUTABLE={bare_python}", *SMALL)
    assert code != 0
    assert f"{bare_python} has none" in said and "looked in ''" not in said
    assert "-DPython_EXECUTABLE=<python that has torch>" in said and "-DTORCH_ROOT=<folder of torch>" in said
    import torch

    code, said = configure(tmp_path, f"-DTORCH_ROOT={torch.__path__[0]}", *SMALL)  # in the same folder
    assert code == 0, said


def test_pips_isolated_environment_is_told_the_option_that_it_lacks(tmp_path, bare_python):
    code, said = configure(tmp_path, f"-DPython_EXECUTABLE={bare_python}", "-DSKBUILD=2", *SMALL)
    assert code != 0 and "pip install --no-build-isolation ." in said


def test_another_compiler_in_an_old_folder_is_used(tmp_path):
    first, second = shutil.which("g++"), tmp_path / "other-g++"
    second.write_text(f'#!/bin/sh\nexec {first} "$@"\n')
    second.chmod(0o755)
    source = tmp_path / "source"  # what looks for the compiler, without the minute that the whole project takes
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        (ROOT / "CMakeLists.txt").read_text().split("project(")[0].replace("include(cmake/", f"include({ROOT}/cmake/")
        + f"project(sample LANGUAGES CXX)\ninclude({ROOT}/cmake/BuildDefaults.cmake)\n"
        + 'message(STATUS "built by ${CMAKE_CXX_COMPILER} of ${CMAKE_CXX_COMPILER_ID}")\n'
    )
    build = tmp_path / "build"
    for compiler in (first, first, str(second), str(second), first):
        code, said = configure(build, source=source, CXX=compiler)
        assert code == 0 and f"built by {compiler} of GNU" in said
