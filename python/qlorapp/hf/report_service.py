# SPDX-License-Identifier: Apache-2.0
"""Passes a run's log entries to a tracker: python report_service.py wandb|trackio PROJECT RUN.

Standard input: a line of JSON with the run's config, then {"step": …, "values": {tag: number}} a line, until its end. It does not load the library.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's modules would hide others of the same name

import importlib
import json
import signal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the run, which ends this
    kind, project, run = sys.argv[1:]
    try:
        tracker = importlib.import_module(kind)
    except ImportError as error:
        raise SystemExit(f"[report_to] {kind} is not installed ({error}): pip install {kind}") from None
    lines = iter(sys.stdin)
    tracker.init(project=project, name=run, config=json.loads(next(lines, "{}")))
    for line in lines:
        entry = json.loads(line)
        tracker.log(entry["values"], step=entry["step"])
    tracker.finish()


if __name__ == "__main__":
    main()
