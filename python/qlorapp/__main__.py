# SPDX-License-Identifier: Apache-2.0
"""python -m qlorapp and the wheel's qlorapp command: replace this process by the C++ program."""

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


def main() -> None:
    path = program()
    # The program asks this interpreter's transformers for tokenizers and chat templates that C++ cannot read.
    os.environ.setdefault("QLORAPP_PYTHON", sys.executable)
    os.environ.setdefault("QLORAPP_HF_TEXT", str(pathlib.Path(os.path.abspath(__file__)).parent / "hf" / "text_service.py"))
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    main()
