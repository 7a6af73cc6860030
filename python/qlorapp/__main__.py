# SPDX-License-Identifier: Apache-2.0
"""python -m qlorapp, and the qlorapp command of the wheel: becomes the C++ program of the same name."""

import os
import pathlib
import sys


def program() -> pathlib.Path:
    """bin/qlorapp of the wheel, or qlorapp of the build folder that this package stands in."""
    package = pathlib.Path(os.path.abspath(__file__)).parent
    for candidate in (package / "bin" / "qlorapp", package.parent.parent / "qlorapp"):
        if candidate.is_file():
            return candidate
    raise SystemExit(f"qlorapp: no bin/qlorapp in {package}. Install it again: pip install --no-build-isolation .")


def main() -> None:
    path = program()
    # What C++ cannot read (a tokenizer, a chat template) it asks this interpreter's transformers for.
    os.environ.setdefault("QLORAPP_PYTHON", sys.executable)
    os.environ.setdefault("QLORAPP_HF_TEXT", str(pathlib.Path(os.path.abspath(__file__)).parent / "hf" / "text_service.py"))
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    main()
