# SPDX-License-Identifier: Apache-2.0
"""python -m qlorapp and the wheel's qlorapp command: replace this process by the C++ program."""

import importlib.util
import os
import pathlib
import sys


def program() -> pathlib.Path:
    """The wheel's bin/qlorapp, or the qlorapp of the build folder that contains this package."""
    package = pathlib.Path(os.path.abspath(__file__)).parent
    for candidate in (package / "bin" / "qlorapp", package.parent.parent / "qlorapp"):
        if candidate.is_file():
            return candidate
    raise SystemExit(f"qlorapp: no bin/qlorapp in {package}. Install it again: pip install --no-build-isolation .")


def _find_torch() -> None:
    """Names the folder of torch's libraries to the loader. The program looks beside its package, and torch may be in another site-packages."""
    beside = pathlib.Path(os.path.abspath(__file__)).parents[1] / "torch" / "lib"
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None and not beside.is_dir():
        folders = [str(pathlib.Path(torch.origin).parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))


def main() -> None:
    path = program()
    # The program asks this interpreter's transformers for tokenizers and chat templates that C++ cannot read.
    os.environ.setdefault("QLORAPP_PYTHON", sys.executable)
    os.environ.setdefault("QLORAPP_HF_TEXT", str(pathlib.Path(os.path.abspath(__file__)).parent / "hf" / "text_service.py"))
    _find_torch()
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    main()
