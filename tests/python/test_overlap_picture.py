# SPDX-License-Identifier: Apache-2.0
"""scripts/make_overlap_picture.py: the printed share, the picture, and traces that it refuses."""

import json
import sys
import xml.etree.ElementTree

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import make_overlap_picture

GATHER, SUM = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)"


def write_trace(path, *events):
    """Each event: cat, name, stream, begin and end in µs."""
    entries = [
        {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}
        for cat, name, stream, begin, end in events
    ]
    entries.append({"ph": "X", "cat": "cuda_runtime", "name": "ncclLaunchKernel", "ts": 0, "dur": 5000})
    entries.append({"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 0, "id": 1})
    path.write_text(json.dumps({"traceEvents": entries}))
    return path


def drawn(path):
    root = xml.etree.ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_share_is_the_part_of_the_exchange_in_which_kernels_run(tmp_path, capsys):
    sharded = write_trace(
        tmp_path / "sharded.json",
        ("kernel", "gemm", 7, 1000, 1100),
        ("kernel", "norm<float>", 7, 1150, 1250),
        ("gpu_memset", "Memset (Device)", 7, 1240, 1260),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 1260, 1300),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 9, 1000, 2000),  # no computation
        ("kernel", GATHER, 20, 1080, 1180),  # 20 + 30 of 100 under kernels
        ("kernel", GATHER, 20, 1290, 1310),  # with the next: 10 of 30
        ("kernel", SUM, 21, 1300, 1320),
    )
    whole = write_trace(
        tmp_path / "whole.json",
        ("kernel", "gemm", 7, 0, 3000),
        ("kernel", SUM, 20, 1000, 1500),
        ("kernel", SUM, 20, 2750, 3250),
        ("kernel", "adamw_8bit_kernel(Arguments)", 7, 3250, 3400),
    )
    make_overlap_picture.main([str(sharded), str(whole), "-o", str(tmp_path / "overlap.svg")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{sharded}: 46.2 % ")  # 60 / 130
    assert lines[1].startswith(f"{whole}: 75.0 % ")  # 750 / 1000
    texts = drawn(tmp_path / "overlap.svg")
    titles = [text for text in texts if text.startswith("(")]
    assert [title.split(":")[0] for title in titles] == ["(a) Sharded base", "(b) Whole base"]
    assert any(text.endswith(" ms") for text in texts)


def test_the_panel_of_a_sharded_base_shows_four_blocks_of_the_last_backward_pass(tmp_path):
    # Two steps of 16 blocks, forward and backward: each block computes 100 µs, and the next one is gathered in its first 30 µs.
    events = []
    for i in range(64):
        events += [("kernel", "gemm", 7, 100 * i, 100 * i + 95), ("kernel", GATHER, 20, 100 * i, 100 * i + 30)]
    trace = make_overlap_picture.Trace(write_trace(tmp_path / "trace.json", *events))
    assert trace.marks() == pytest.approx([5.4, 5.5, 5.6, 5.7, 5.8])  # of 4.8 … 6.4 ms
    (tmp_path / "overlap.svg").write_text(make_overlap_picture.picture([trace]))
    assert {f"block {i}" for i in range(1, 5)} < set(drawn(tmp_path / "overlap.svg"))


def test_a_trace_without_nccl_is_refused(tmp_path):
    trace = write_trace(tmp_path / "alone.json", ("kernel", "gemm", 7, 0, 100))
    with pytest.raises(SystemExit, match=r"must have NCCL kernels; .*alone\.json has none"):
        make_overlap_picture.main([str(trace), "-o", str(tmp_path / "overlap.svg")])
    assert not (tmp_path / "overlap.svg").exists()
