#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/families.md: which feature the tests have shown for which model family.

python scripts/make_families_page.py build/dev > docs/families.md
python scripts/make_families_page.py build/dev --keep-gpu    # after a run on a GPU: writes its results to tests/python/families_gpu.json

The tests with `@pytest.mark.feature` leave their results in family_features/ of the build folder.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
GPU_RESULTS = ROOT / "tests" / "python" / "families_gpu.json"

sys.path.insert(0, str(ROOT / "tests" / "python"))

from families import FEATURES, FIRST, MODELS, architecture  # noqa: E402

#: {feature: {test: {case: whether it passed; None: it did not run}}}
Results = dict[str, dict[str, dict[str, bool | None]]]

HEAD = """# Model families and features

`scripts/make_families_page.py` writes this page from the results of the tests. A test checks that it lists all of them.

A feature works for a family if each test of it passes for each case of the family. Cases are small models with random weights, and with the options
that the family's config has (`tests/python/families.py`). Python's `AutoModelForCausalLM` also loads other families. Then transformers computes them
([architecture](architecture.md#what-runs-in-c-and-what-does-not)).
"""


def read(build: pathlib.Path) -> dict[str, Any]:
    """{"cpu": results, "gpu": results, "gpu_name": the GPU of the last run on one}. Results of a GPU replace those of tests that were skipped."""
    merged: dict[str, Any] = {"cpu": {}, "gpu": {}, "gpu_name": None}
    for path in sorted(
        (build / "family_features").glob("*.json"), key=lambda path: (path.name.endswith(".gpu.json"), path.name)
    ):
        found = json.loads(path.read_text(encoding="utf-8"))
        merged["gpu_name"] = found.get("gpu_name", merged["gpu_name"])
        for device in ("cpu", "gpu"):
            for feature, tests in found.get(device, {}).items():
                for test, cases in tests.items():
                    merged[device].setdefault(feature, {}).setdefault(test, {}).update(cases)
    return merged


def outcome(results: Results, feature: str, first: str) -> str:
    """yes, no, "not run", or an empty cell if no test has the family."""
    cases = [
        passed
        for by_case in results.get(feature, {}).values()
        for case, passed in by_case.items()
        if architecture(case) == architecture(first)
    ]
    return "" if not cases else "no" if False in cases else "not run" if None in cases else "yes"


def table(results: Results) -> list[str]:
    features = [feature for feature in FEATURES if feature in results]
    lines = ["| | " + " | ".join(f"`{feature}`" for feature in features) + " |", "|---" * (len(features) + 1) + "|"]
    for first in FIRST:
        cells = [outcome(results, feature, first) for feature in features]
        lines.append(f"| `{architecture(first)}` | " + " | ".join(cells) + " |")
    return lines


def page(cpu: Results, gpu: Results, gpu_name: str | None) -> str:
    lines = [HEAD, "| models | `architectures` in config.json |", "|---|---|"]
    for models, families in MODELS.items():
        lines.append(f"| {models} | {', '.join(f'`{family}ForCausalLM`' for family in families)} |")
    lines += ["\n## On a CPU\n", *table(cpu)]
    lines += [
        f"\n## On a GPU\n\n{f'Last run on one {gpu_name}.' if gpu_name else 'These tests have not run on a GPU yet.'}\n",
        *table(gpu),
    ]
    lines += ["\n## What the tests compare\n", "| feature | compared | tests |", "|---|---|---|"]
    for feature, compared in FEATURES.items():
        tests = [f"`{test}`" for results in (cpu, gpu) for test in results.get(feature, {})]
        lines.append(f"| `{feature}` | {compared} | {', '.join(sorted(set(tests)))} |")
    return "\n".join(lines) + "\n"


def with_gpu(results: Results) -> tuple[Results, str | None]:
    """Results of tests that need a GPU, those of the committed file where there are any, and its GPU."""
    if not GPU_RESULTS.exists():
        return results, None
    kept = json.loads(GPU_RESULTS.read_text(encoding="utf-8"))
    filled: Results = {
        feature: {
            test: {case: kept["gpu"].get(feature, {}).get(test, {}).get(case) for case in cases}
            for test, cases in tests.items()
        }
        for feature, tests in results.items()
    }
    return filled, kept["gpu_name"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path, help="the build folder whose tests ran")
    parser.add_argument("--keep-gpu", action="store_true", help="write tests/python/families_gpu.json instead of the page")
    given = parser.parse_args()
    results = read(given.build)
    if given.keep_gpu:
        if results["gpu_name"] is None:
            parser.error(
                "no test has run on a GPU. Run: QLORAPP_TEST_GPU=1 python -m pytest tests/python/test_families_cuda.py"
            )
        text = json.dumps({"gpu_name": results["gpu_name"], "gpu": results["gpu"]}, indent=1)
        GPU_RESULTS.write_text(text + "\n", encoding="utf-8")
        return
    missing = [feature for feature, tests in results["cpu"].items() for cases in tests.values() if None in cases.values()]
    if missing or not results["cpu"]:
        parser.error(f"tests that need no GPU did not run: {', '.join(missing) or 'all'}. Run tests/python first.")
    sys.stdout.write(page(results["cpu"], *with_gpu(results["gpu"])))


if __name__ == "__main__":
    main()
