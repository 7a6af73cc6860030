# SPDX-License-Identifier: Apache-2.0
"""docs/families.md lists what tests show, README names no other family, and no family is without tests."""

import importlib.util

import pytest
from conftest import ROOT, feature_of
from families import FEATURES, FIRST, MODELS, architecture
from qlorapp import _C

spec = importlib.util.spec_from_file_location("families_page", ROOT / "scripts" / "make_families_page.py")
families_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(families_page)


@pytest.fixture(scope="module")
def collected():
    """{device: what the page has if every test with the marker passes on a CPU that must not fail; on a GPU: None}"""
    found = {"cpu": {}, "gpu": {}}

    class Collector:
        def pytest_collection_finish(self, session):
            for item in session.items:
                if (of := feature_of(item)) is not None:
                    device, feature, case = of
                    passes = None if device == "gpu" else item.get_closest_marker("xfail") is None
                    cases = found[device].setdefault(feature, {}).setdefault(item.originalname, {})
                    cases[case] = passes if cases.get(case, True) else cases[case]

    files = [path for path in sorted((ROOT / "tests/python").glob("test_*.py")) if "@pytest.mark.feature(" in path.read_text()]
    files.remove(ROOT / "tests/python/test_families_page.py")
    assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *map(str, files)], plugins=[Collector()]) == 0
    return found


def test_the_page_lists_the_families_and_features_that_tests_have(collected):
    expected = families_page.page(collected["cpu"], *families_page.with_gpu(collected["gpu"]))
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == expected


def test_every_feature_is_shown_for_every_family(collected):
    native = set(_C.native_architectures())
    for device, features in collected.items():
        for feature, tests in features.items():
            assert {architecture(case) for cases in tests.values() for case in cases} == native, (device, feature)
    assert collected["cpu"].keys() | collected["gpu"].keys() == FEATURES.keys()


def test_readme_names_the_families_that_are_tested():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if line.startswith("| computed by C++ |"))
    assert row.split("|")[2].strip().startswith("; ".join(MODELS) + ". ")
    named = [f"{family}ForCausalLM" for families in MODELS.values() for family in families]
    assert sorted(named) == sorted(architecture(case) for case in FIRST) == sorted(_C.native_architectures())
