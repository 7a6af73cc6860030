# SPDX-License-Identifier: Apache-2.0
"""scripts/install_in_notebook.py with a pip that only writes down what it was asked, and with any torch and any wheels."""

import functools
import http.server
import json
import os
import platform
import re
import subprocess
import sys
import threading
import types
import zipfile

import notebook_runner
import pytest
from conftest import ROOT

SCRIPT = ROOT / "scripts" / "install_in_notebook.py"
CPYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
#: Logs its arguments and its constraints. `pip wheel` prints what PIP_PRINTS holds and leaves a wheel; `pip install WHEEL` unpacks it.
PIP = """
import json, os, pathlib, shutil, sys, zipfile
here = pathlib.Path(__file__).parents[1]
words = sys.argv[1:]
fixed = pathlib.Path(words[words.index("-c") + 1]).read_text() if "-c" in words else ""
with open(here / "log.jsonl", "a") as log:
    log.write(json.dumps({"words": words, "fixed": fixed, "path": os.environ["PATH"]}) + "\\n")
if words[0] == "wheel":
    print(os.environ["PIP_PRINTS"])
    if os.environ["PIP_PRINTS"].endswith("FAILED"):
        sys.exit(1)
    shutil.copy(next(here.glob("made/*.whl")), words[words.index("-w") + 1])
for word in words:
    if words[0] == "install" and word.endswith(".whl"):
        zipfile.ZipFile(word).extractall(here)
"""


def write_wheel(folder, torch, version="0.1.0", python=CPYTHON, loads=True):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"qlorapp-{version}-{python}-{python}-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(path, "w") as file:
        code = f'__version__ = "{version}"\n' if loads else 'raise ImportError("undefined symbol")\n'
        file.writestr("qlorapp/__init__.py", code)
        file.writestr("qlorapp/_build_info.py", f'VERSION = "{version}"\nTORCH_VERSION = "{torch}"\n')
    return path


class Place:
    """A folder with a torch 2.11.0+cu130, headers, our pip, and a wheel that a build makes. Nothing else can be imported but Python's own."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "torch-2.11.0+cu130.dist-info").mkdir(parents=True)
        (folder / "torch-2.11.0+cu130.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0+cu130\n"
        )
        for file in ("pip/__init__.py", "headers/nlohmann/json.hpp", "headers/CLI/CLI.hpp"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
        (folder / "pip" / "__main__.py").write_text(PIP)
        write_wheel(folder / "made", "2.11")
        self.wheels = folder / "wheels"

    def run(self, prints="", **env):
        env = {
            "PATH": "/usr/bin:/bin", "PYTHONPATH": str(self.folder), "QLORAPP_DEPS_DIR": str(self.folder / "headers"), "PIP_PRINTS": prints,
            "PYTHONIOENCODING": "utf-8", **env,
        }  # fmt: skip
        # -S: no site-packages, so no torch and no qlorapp of this machine.
        done = subprocess.run([sys.executable, "-S", SCRIPT], env=env, capture_output=True, check=False, timeout=120)
        # text=True would make a line's end of the carriage returns
        return types.SimpleNamespace(returncode=done.returncode, stdout=done.stdout.decode(), stderr=done.stderr.decode())

    @property
    def pip_runs(self):
        log = self.folder / "log.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def installed_wheel(self):
        (word,) = {word.removesuffix("[hf]") for run in self.pip_runs for word in run["words"] if word.endswith("[hf]")}
        return word


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


BUILD = "  -- CUDA: nvcc 13.0 at /usr/bin/nvcc, architectures 75\n  [3/10] Building CXX object a.o\n  [10/10] Linking\n  Successfully built"


def test_an_installed_qlorapp_runs_no_pip(place):
    (place.folder / "qlorapp.py").write_text('__version__ = "7.8.9"\n')
    done = place.run(QLORAPP_WHEELS=str(write_wheel(place.wheels, "2.11").parent))
    assert done.returncode == 0 and done.stdout == "qlorapp 7.8.9 is installed already.\n"
    assert place.pip_runs == []


def test_the_wheel_for_this_torch_and_python_is_chosen_among_others(place):
    right = write_wheel(place.wheels / "b", "2.11", "0.10.0")
    for folder, torch, version, python in [
        ("a", "2.11", "0.9.1", CPYTHON), ("c", "2.12", "0.11.0", CPYTHON), ("d", "2.1", "0.11.0", CPYTHON), ("e", "2.11", "0.11.0", "cp39"),
    ]:  # fmt: skip
        write_wheel(place.wheels / folder, torch, version, python)
    (place.wheels / "f").mkdir()
    (place.wheels / "f" / right.name.replace("0.10.0", "0.12.0")).write_bytes(b"half a file")
    done = place.run(QLORAPP_WHEELS=str(place.wheels))
    assert done.returncode == 0, done.stdout + done.stderr
    assert place.installed_wheel() == str(right) and all(run["words"][0] == "install" for run in place.pip_runs)
    damaged, last = done.stdout.splitlines()
    assert "is damaged" in damaged and last == f"qlorapp 0.10.0 is installed for torch 2.11.0+cu130, from {place.wheels}."


def test_wheels_of_a_page_of_links_are_read_and_those_of_another_torch_are_not_fetched(place):
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    links = []
    for torch in ("2.10", "2.11"):
        path = write_wheel(place.wheels / f"torch{torch}", torch)
        links.append(f'<a href="torch{torch}/{path.name}#sha256=0">{path.name}</a>')
    (place.wheels / "index.html").write_text("\n".join(links))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=place.wheels)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = place.run(QLORAPP_WHEELS=f"http://127.0.0.1:{server.server_port}/", no_proxy="*")
        server.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    assert asked == ["/", f"/torch2.11/{path.name}"]
    assert place.installed_wheel().endswith(path.name)


def test_no_wheel_builds_from_the_checkout_with_one_progress_line(place):
    write_wheel(place.wheels, "2.10")
    done = place.run(BUILD, QLORAPP_WHEELS=str(place.wheels), QLORAPP_CUDA_ARCHITECTURES="75")
    assert done.returncode == 0, done.stdout + done.stderr
    progress, last, _ = done.stdout.split("\n")
    first, *versions = progress.split("\r")
    assert first == "Building qlorapp for torch 2.11"
    assert versions == [f"{first}: 3 of 10 objects, 0 min ", f"{first}: 10 of 10 objects, 0 min "]
    assert last == (
        "qlorapp 0.1.0 is installed for torch 2.11.0+cu130, built in 0 min; CUDA: nvcc 13.0 at /usr/bin/nvcc, architectures 75."
    )
    (build,) = [run["words"] for run in place.pip_runs if run["words"][0] == "wheel"]
    assert str(ROOT) in build and "--no-build-isolation" in build and "-Ccmake.define.QLORAPP_CUDA_ARCHITECTURES=75" in build
    assert f"-Ccmake.define.QLORAPP_DEPS_DIR={place.folder}/headers" in build
    assert f"-Cbuild-dir={ROOT}/build/notebook-torch2.11-{CPYTHON}" in build
    assert place.pip_runs[0]["path"].split(os.pathsep)[0] == os.path.dirname(sys.executable), "cmake and ninja lie there"


def test_a_built_wheel_is_kept_and_the_next_session_installs_it(place):
    assert place.run(BUILD, QLORAPP_WHEELS=str(place.wheels)).returncode == 0
    next_session = Place(place.folder / "next")
    done = next_session.run(QLORAPP_WHEELS=str(place.wheels))
    assert done.returncode == 0 and "built in" not in done.stdout
    assert next_session.installed_wheel().startswith(str(place.wheels / "torch2.11"))


def test_the_torch_that_is_there_is_fixed_in_each_pip_run_that_resolves_dependencies(place):
    assert place.run(BUILD).returncode == 0
    assert len(place.pip_runs) == 4
    for run in place.pip_runs:
        assert run["fixed"] == "torch==2.11.0+cu130\n" or "--no-deps" in run["words"], run["words"]
    assert place.pip_runs[-1]["words"][-2].endswith(".whl[hf]"), "the extras come last"


def test_a_failing_build_shows_its_last_lines_and_a_way_out(place):
    done = place.run("\n".join([f"line {i}" for i in range(60)] + ["error: no C++20", "FAILED"]))
    assert done.returncode == 1
    shown = done.stdout.splitlines()[1:]  # the first is the progress line
    assert len(shown) == 40 and shown[0] == "line 22" and shown[-2:] == ["error: no C++20", "FAILED"]
    assert done.stderr.startswith("[install] The build failed. Correct what") and done.stderr.count("\n") == 1
    assert f"QLORAPP_WHEELS to a folder with a wheel for torch 2.11 and {CPYTHON}." in done.stderr
    assert place.pip_runs[-1]["words"][0] == "wheel", "nothing is installed"


def test_a_package_for_another_torch_is_replaced(place):
    (place.folder / "qlorapp").mkdir()
    (place.folder / "qlorapp" / "__init__.py").write_text('raise ImportError("qlorapp was built for torch 2.9")\n')
    done = place.run(QLORAPP_WHEELS=str(write_wheel(place.wheels, "2.11", "0.2.0").parent))
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = done.stdout.splitlines()
    assert first == "The installed qlorapp does not load: qlorapp was built for torch 2.9"
    assert last.startswith("qlorapp 0.2.0 is installed") and "--force-reinstall" in place.pip_runs[0]["words"]


def test_a_clone_in_the_working_folder_is_no_package(place):
    (place.folder / "qlorapp" / "python").mkdir(parents=True)
    assert "is installed for torch" in place.run(BUILD).stdout


@pytest.mark.parametrize("why", ["no torch", "no page", "does not load"])
def test_other_failures_are_one_sentence_and_a_way_out(place, why):
    env = {}
    if why == "no torch":
        (place.folder / "torch-2.11.0+cu130.dist-info" / "METADATA").unlink()
        (place.folder / "torch-2.11.0+cu130.dist-info").rmdir()
    elif why == "no page":
        env = {"QLORAPP_WHEELS": "http://127.0.0.1:9/", "no_proxy": "*"}
    else:
        env = {"QLORAPP_WHEELS": str(write_wheel(place.wheels, "2.11", loads=False).parent)}
    done = place.run(**env)
    expected = {"no torch": "pip install torch first", "no page": "Correct or unset it", "does not load": "Restart the runtime"}
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("[install] ") and expected[why] in done.stderr


# --- the first cell


def first_cell(path):
    return "".join(next(cell["source"] for cell in notebook_runner.cells_of(path) if cell["cell_type"] == "code"))


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_the_notebooks_begin_with_the_same_cell_and_clone_the_address_of_the_project():
    (cell,) = {first_cell(path) for path in NOTEBOOKS}
    address = re.search(r'^(?i:repository) = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f'repository = "{address[1] if address else ""}"  #' in cell


@pytest.mark.parametrize("where", ["in", "beside", "nothing there"])
def test_the_first_cell_runs_the_script_of_the_clone_that_it_is_in_or_makes(tmp_path, where):
    """In: a notebook of a clone. Beside: Colab, with a clone in the folder qlorapp. Nothing there: the cell clones."""
    origin = tmp_path / "origin"
    (origin / "scripts").mkdir(parents=True)
    (origin / "scripts" / "install_in_notebook.py").write_text("if __name__ == '__main__': print('runs', __file__)\n")
    (origin / "examples" / "notebooks").mkdir(parents=True)
    here = tmp_path / "content"
    here.mkdir()
    cell = first_cell(NOTEBOOKS[0])
    if where == "in":
        here = origin / "examples" / "notebooks"
    elif where == "beside":
        origin = origin.rename(here / "qlorapp")
    else:
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(origin)]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "scripts"]):
            subprocess.run([*git, *words], check=True)
        said = subprocess.run([sys.executable, "-c", cell], cwd=here, capture_output=True, text=True, check=False)
        assert said.returncode == 1 and "Set repository, above" in said.stderr.splitlines()[-1]
        cell = cell.replace('repository = ""', f'repository = "file://{origin}"')
        origin = here / "qlorapp"
    done = subprocess.run([sys.executable, "-c", cell], cwd=here, capture_output=True, text=True, check=False)
    assert done.stdout == f"runs {origin / 'scripts' / 'install_in_notebook.py'}\n", done.stderr
