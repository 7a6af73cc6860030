# SPDX-License-Identifier: Apache-2.0
"""Finds the build under test: QLORAPP_BUILD_DIR, or build/dev of this checkout.

Peers move to a GPU by themselves where they see one, so the tests see none, unless QLORAPP_TEST_GPU=1 asks for those that need one,
and for no others. `./dev test` runs both where there is a GPU.
"""

import gc
import json
import os
import pathlib
import signal
import sys

GPU = os.environ.get("QLORAPP_TEST_GPU") == "1"
if not GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks

import pytest  # noqa: E402
import shards  # noqa: E402
import torch  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("QLORAPP_BUILD_DIR", ROOT / "build" / "dev"))
#: `python -m qlorapp` without importing the package, which the program does not need.
MODULE = [sys.executable, str(BUILD / "python" / "qlorapp" / "__main__.py")]

sys.path.insert(0, str(BUILD / "python"))
torch.ops.load_library(str(BUILD / "libqlorapp.so"))


# A shell that starts the tests in the background ignores these, and so would the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module")
def one_thread():
    """More threads would only wait for each other at the sizes of these tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def process_as_it_was():
    """`full_determinism` sets variables and torch's switches for the whole process, and a later test of the same process would compute
    otherwise, and plan otherwise: CUBLAS_WORKSPACE_CONFIG says how large cuBLAS's workspace is."""
    variables = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    for name in (os.environ.keys() | variables.keys()) - {"PYTEST_CURRENT_TEST"}:
        if name not in variables:
            del os.environ[name]
        elif os.environ.get(name) != variables[name]:
            os.environ[name] = variables[name]
    torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@pytest.fixture
def build_dir() -> pathlib.Path:
    return BUILD


@pytest.fixture
def thorough(request) -> bool:
    return request.config.getoption("--thorough")


def pytest_addoption(parser):
    parser.addoption("--shard", help="I/N: the I-th of N parts of the files, which take about as long (shards.py)")
    parser.addoption("--thorough", action="store_true", help="all random cases, for which ./dev test has no time")


def pytest_ignore_collect(collection_path, config):
    """ctest runs shards beside each other."""
    shard = config.getoption("--shard")
    if not shard or not collection_path.name.startswith("test_"):
        return None
    i, n = map(int, shard.split("/"))
    return None if collection_path.name in shards.shards(n)[i - 1] else True


def needs_gpu(item) -> bool:
    on_gpu = getattr(item, "callspec", None) is not None and item.callspec.params.get("device") == "cuda"
    return on_gpu or "cuda" in item.fixturenames or "cuda" in item.path.name


def pytest_collection_modifyitems(config, items):
    if not GPU:
        return
    chosen = [item for item in items if needs_gpu(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_collection_finish():
    """Collections leave out what is imported by now: transformers' trainers ask for one in each run, which took half of a short one."""
    gc.collect()
    gc.freeze()


def has_cuda():
    return torch.cuda.is_available() and torch._C._dispatch_has_kernel_for_dispatch_key("qlorapp::rms_norm", "CUDA")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Every device that an operator exists for; tensors made in the test are made there. Skipped aloud without a GPU."""
    if request.param == "cuda" and not has_cuda():
        pytest.skip("no GPU, or a build without CUDA")
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def cuda():
    if not has_cuda():
        pytest.skip("no GPU, or a build without CUDA")
    return torch.device("cuda")


# --- which features the tests have shown for which family: scripts/make_families_page.py makes a page of it


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "feature(name): one of families.FEATURES, shown for the case of families.FAMILIES it is parametrized by"
    )


def feature_of(item) -> tuple[str, str, str] | None:
    """(device, feature, case) of a test with the marker."""
    marker = item.get_closest_marker("feature")
    if marker is None:
        return None
    from families import FAMILIES

    (case,) = {value for value in item.callspec.params.values() if isinstance(value, str) and value in FAMILIES}
    return "gpu" if needs_gpu(item) else "cpu", marker.args[0], case


_shown: dict[str, dict] = {}
_seconds: dict[str, float] = {}


def pytest_runtest_logreport(report):
    name = pathlib.Path(report.nodeid.partition("::")[0]).name
    _seconds[name] = _seconds.get(name, 0.0) + report.duration


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Collects {module: {device: {feature: {test: {case: whether it passed; None: it was skipped}}}}}."""
    report = (yield).get_result()
    found = feature_of(item)
    if found is None or (report.when != "call" and report.passed):
        return
    device, feature, case = found
    passed = report.passed if not report.skipped else False if hasattr(report, "wasxfail") else None
    cases = (
        _shown.setdefault(item.path.stem, {}).setdefault(device, {}).setdefault(feature, {}).setdefault(item.originalname, {})
    )
    cases[case] = passed if cases.get(case, True) else cases[case]


def pytest_sessionfinish(session):
    """A file per module, since shards run beside each other. Tests that did not run keep their results."""
    if session.config.getoption("--shard"):
        shards.note(BUILD, _seconds)
    for module, devices in _shown.items():
        path = BUILD / "family_features" / f"{module}{'.gpu' if GPU else ''}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        for device, features in devices.items():
            for feature, tests in features.items():
                for test, cases in tests.items():
                    kept.setdefault(device, {}).setdefault(feature, {}).setdefault(test, {}).update(cases)
        if GPU and torch.cuda.is_available():
            kept["gpu_name"] = torch.cuda.get_device_name()
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1))
