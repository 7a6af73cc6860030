# SPDX-License-Identifier: Apache-2.0
"""run_report.json (docs/formats/run_report.md) of a run in Python."""

import json
import logging
import os
import sys
from typing import Any

import torch
import transformers

from .. import _C, __version__

_log = logging.getLogger("qlorapp")
FILE = "run_report.json"


def write(folder: Any, outcome: str, error: BaseException | None, of_loop: dict[str, Any], history: list[Any]) -> None:
    """Leaves the report and loss.svg in the run's folder. A run does not fail without them: an error is logged.

    folder: the RunFolder. of_loop: what the loop knows. history: transformers' log_history.
    """
    try:
        _C.write_loss_svg(folder.path, json.dumps(history, default=str))
    except (OSError, ValueError, _C.FormatError) as failed:
        _log.warning("[Trainer] loss.svg was not written: %s", failed)
    lines = str(error).splitlines() if error is not None and outcome == "failed" else []
    ending = {"outcome": outcome, "error": f"{type(error).__name__}: {lines[0]}" if lines else None}
    try:
        report = {**ending, "run_id": folder.run_id, **of_loop, **_of_process()}
        path = os.path.join(folder.path, FILE)
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            file.write(json.dumps(report, indent=2) + "\n")
        os.replace(file.name, path)
    except (OSError, ValueError, _C.FormatError) as failed:
        _log.warning("[Trainer] %s was not written: %s", FILE, failed)


def _of_process() -> dict[str, Any]:
    memory: dict[str, int] = {}
    if sys.platform != "win32":
        import resource

        memory["process_peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device = "cpu"
    if torch.cuda.is_available() and (peak := torch.cuda.max_memory_allocated()) > 0:
        device = torch.cuda.get_device_name()
        memory["device_peak_allocated_bytes"] = peak
        memory["device_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    versions = {"qlorapp": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {"memory": memory, "device": device, "versions": versions}
