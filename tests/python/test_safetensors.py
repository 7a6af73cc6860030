# SPDX-License-Identifier: Apache-2.0
"""The safetensors reader and writer, and the JSON writer, against the packages that they must equal byte for byte."""

import ctypes
import json
import pathlib
import random
import resource
import struct
import subprocess
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
import differential

RELAXED = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def probe(build_dir, *args, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [build_dir / "tests" / "format" / "format_probe", *map(str, args)], capture_output=True, check=False, **kwargs
    )


def written(build_dir, tmp_path, data: bytes) -> bytes:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(data)
    result = probe(build_dir, "safetensors-copy", source, target)
    assert result.returncode == 0, result.stderr.decode()
    return target.read_bytes()


# What the package's serialize() calls each type.
PACKAGE_NAMES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32",
                 "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
                 "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
                 "F8_E5M2FNUZ": "float8_e5m2fnuz"}  # fmt: skip

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda name: name != "__metadata__")


@RELAXED
@given(
    st.dictionaries(
        names,
        st.tuples(st.sampled_from(sorted(PACKAGE_NAMES)), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 255)),
        max_size=8,
    ),
    st.one_of(st.none(), st.tuples(names, st.text(st.characters(exclude_categories=("Cs",)), max_size=12))),
)
def test_any_dict_of_tensors_is_written_to_the_bytes_of_the_package(build_dir, tmp_path, tensors, metadata):
    content, buffers = {}, []
    for name, (dtype, shape, fill) in tensors.items():
        count = torch.Size(shape).numel() * differential.DTYPES[dtype] // 8
        buffers.append(ctypes.create_string_buffer(bytes([fill]) * count, max(count, 1)))
        address = ctypes.addressof(buffers[-1])
        content[name] = safetensors.TensorSpec(dtype=PACKAGE_NAMES[dtype], shape=shape, data_ptr=address, data_len=count)
    reference = safetensors.serialize(content, dict([metadata]) if metadata else None)
    assert written(build_dir, tmp_path, reference) == reference


def test_every_torch_dtype_is_written_to_the_bytes_of_the_package(build_dir, tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32,
              torch.complex64, torch.float64, torch.int64, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]  # fmt: skip
    tensors = {f"t.{i}": torch.ones(3, 5).to(dtype) for i, dtype in enumerate(dtypes)}
    reference = safetensors.torch.save(tensors, {"format": "pt"})
    copy = written(build_dir, tmp_path, reference)
    assert copy == reference
    assert {name for name, _ in safetensors.deserialize(copy)} == set(tensors)


def test_several_metadata_keys_are_sorted_and_read_by_the_package(build_dir, tmp_path):
    copy = written(build_dir, tmp_path, safetensors.torch.save({"a": torch.zeros(1)}, {"z": "1", "format": "pt", "b": "é"}))
    header = copy[8 : 8 + struct.unpack("<Q", copy[:8])[0]]
    assert list(json.loads(header)["__metadata__"]) == ["b", "format", "z"]
    assert safetensors.torch.load(copy)["a"].shape == (1,)


def test_the_verdict_on_any_file_is_that_of_the_package_except_where_we_are_stricter(build_dir):
    accepted, different = differential.compare(str(build_dir / "tests/fuzz/judge"), 5000, seed=7)
    assert not different
    assert 500 < accepted < 4500


def test_a_header_of_ten_megabytes_is_judged_within_its_weight(build_dir, tmp_path):
    entries = ",".join(
        f'"model.layers.{i}.w":{{"dtype":"F32","shape":[200,200],"data_offsets":[0,160000]}}' for i in range(140_000)
    )
    text = ("{" + entries + "}").encode()
    path = tmp_path / "overlap.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(160_000))
    script = (
        "import resource, subprocess, sys, time; t = time.time(); r = subprocess.run(sys.argv[1:3], input=sys.argv[3].encode(), capture_output=True);"
        "print(time.time() - t, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024); print(r.stdout.decode())"
    )
    command = [sys.executable, "-c", script, str(build_dir / "tests/format/format_probe"), "safetensors-verdicts", f"{path}\n"]
    figures, verdict, *_ = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    seconds, memory = map(float, figures.split())
    assert "invalid offset" in verdict
    assert memory < 2 * path.stat().st_size + (64 << 20) + resource.getpagesize()
    assert seconds < 5  # a bound for a loaded machine; about 0.1 when idle


def test_no_space_leaves_nothing_behind(build_dir, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    source = tmp_path / "in.safetensors"
    source.write_bytes(safetensors.torch.save({"a": torch.zeros(1 << 18)}))
    mount = f'mount -t tmpfs -o size=128k none "{disk}" && "{build_dir}/tests/format/format_probe" safetensors-copy "{source}" "{disk}/out" ; echo $? ; ls -A "{disk}"'
    result = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if "mount:" in result.stderr or "unshare:" in result.stderr:
        pytest.skip("no mount namespaces here")
    assert result.stdout == "2\n"
    assert "No space left" in result.stderr and "Free some space" in result.stderr


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(st.characters(exclude_categories=("Cs",)), max_size=10),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=6), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(RELAXED, max_examples=40)
@given(st.lists(json_values, min_size=1, max_size=30))
def test_any_value_is_written_as_json_dumps_writes_it(build_dir, tmp_path, values):
    path: pathlib.Path = tmp_path / "values.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    result = probe(build_dir, "python-json", path)
    assert result.returncode == 0, result.stderr.decode()
    expected = [
        json.dumps(value, indent=indent, sort_keys=sort, ensure_ascii=ascii_only)
        for value in values
        for indent in (None, 2)
        for sort in (False, True)
        for ascii_only in (True, False)
    ]
    assert result.stdout.decode().split("\0")[:-1] == expected


def test_ten_thousand_floats_are_written_as_python_prints_them(build_dir, tmp_path):
    rng = random.Random(3)
    floats = [struct.unpack("<d", struct.pack("<Q", rng.getrandbits(64)))[0] for _ in range(5000)]
    floats += [rng.choice([1, -1]) * rng.random() * 10.0 ** rng.randint(-8, 20) for _ in range(4000)]
    floats += [struct.unpack("<f", struct.pack("<f", rng.random()))[0] for _ in range(1000)]
    path = tmp_path / "floats.jsonl"
    path.write_text(json.dumps(floats) + "\n")
    assert probe(build_dir, "python-json", path).stdout.decode().split("\0")[0] == json.dumps(floats)
