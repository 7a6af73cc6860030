# SPDX-License-Identifier: Apache-2.0
"""The mutants follow the lines that they change."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/mutants"))

from table import MUTANTS  # noqa: E402


def test_the_line_of_each_mutant_stands_once_in_its_file():
    counts = {mutant.name: (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) for mutant in MUTANTS}
    assert len(counts) == len(MUTANTS) and {name for name, count in counts.items() if count != 1} == set()
