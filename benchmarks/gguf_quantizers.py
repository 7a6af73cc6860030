# SPDX-License-Identifier: Apache-2.0
"""Measures the quantizers of `qlorapp export` beside ggml's own: MB of float32 a second on one core, and squared errors.

    python benchmarks/gguf_quantizers.py [--build build/dev] [--megabytes 256] [--types Q8_0 Q4_0 Q4_K_M Q5_K_M Q6_K]

A model of one wide layer is exported to each type and, beside it, to F32, whose time (reading, writing) is taken off. ggml's code
(ggml_quantize_chunk of the prebuilt llama.cpp in xllamacpp) gets the same rows in memory. Both on one thread, three times in turn; medians.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = pathlib.Path(__file__).resolve().parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K"])
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT / given.build / "python"), str(ROOT / "tests" / "python")]
    import gguf
    import qlorapp
    import torch
    import transformers
    from gguf.quants import dequantize
    from llama_cpp import quantized

    torch.manual_seed(1)
    width = 2048
    wide = given.megabytes * 2**20 // 4 // width // 3 // 256 * 256
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=1,
        vocab_size=704,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((ROOT / "examples" / "data" / "tiny-llama" / name).read_bytes())
        values = model.model.layers[0].mlp.gate_proj.weight.detach().numpy()
        megabytes = sum(p.numel() for name, p in model.named_parameters() if "proj" in name) * 4 / 1e6

        def export(kind):
            began = time.perf_counter()
            qlorapp.export(folder, gguf=pathlib.Path(scratch) / "m.gguf", type=kind, verify=False)
            return time.perf_counter() - began

        for kind in given.types:
            block = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}.get(kind, kind)
            number = gguf.GGMLQuantizationType[block]
            times = {"ours": [], "plain": [], "ggml": []}
            for _ in range(3):
                times["plain"].append(export("F32"))
                times["ours"].append(export(kind))
                began = time.perf_counter()
                theirs = quantized(values, number)
                times["ggml"].append((time.perf_counter() - began) / (values.nbytes / 1e6))
            tensors = {t.name: t for t in gguf.GGUFReader(pathlib.Path(scratch) / "m.gguf").tensors}
            errors = [
                float(((dequantize(data, number) - values) ** 2).sum())
                for data in (tensors["blk.0.ffn_gate.weight"].data, theirs)
            ]
            ours = megabytes / max(statistics.median(times["ours"]) - statistics.median(times["plain"]), 1e-9)
            peer = 1 / statistics.median(times["ggml"])
            print(
                json.dumps(
                    {
                        "type": block,
                        "ours_MB_s": round(ours),
                        "ggml_MB_s": round(peer),
                        "speed_of_ggml": round(ours / peer, 2),
                        "error_of_ggml": round(errors[0] / errors[1], 4),
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
