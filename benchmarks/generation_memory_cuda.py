# SPDX-License-Identifier: Apache-2.0
"""Compares the plan of a generation with torch's peaks on a GPU, over real shapes.

    python benchmarks/generation_memory_cuda.py [--build build/dev] [--model 8b] [--points 8x512+64 ...]

NF4 with double quantization, bf16, random weights; without and with an adapter of r = 16 on all linear layers. A point is rows x tokens of a prompt
+ new tokens of each. Prompts are random, so rows share nothing. Every point begins with an empty allocator; its cache is the planned one.
"""

import argparse
import gc
import json
import pathlib
import re
import sys
import tempfile

from load_cuda import ROOT, write_checkpoint
from train_step_peers import SHAPES

GIB = 1 << 30


def point(text):
    found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"a point is rows x prompt + new, as 8x512+64; got {text!r}")
    return tuple(map(int, found.groups()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--model", default="8b", choices=SHAPES)
    parser.add_argument(
        "--points", nargs="+", type=point, default=list(map(point, ["1x2000+32", "8x512+32", "32x1500+32", "128x128+32"]))
    )
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT / given.build / "python"))
    import peft
    import qlorapp
    import torch
    from qlorapp import _C

    print(torch.cuda.get_device_name(), given.model, flush=True)
    four_bits = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    lora = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        write_checkpoint(folder, SHAPES[given.model])
        model = qlorapp.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, device_map="cuda", quantization_config=four_bits
        )
        for adapter in (None, lora):
            if adapter is not None:
                model = peft.get_peft_model(model, adapter)
            model.eval()
            base = model.get_base_model() if adapter is not None else model
            with torch.no_grad():
                model(input_ids=torch.tensor([[5]], device="cuda"))
            for rows, prompt, new in given.points:
                for sampled in (False, True):
                    plan = qlorapp.plan_generation(
                        folder, prompt_tokens=prompt, max_new_tokens=new, max_rows=rows, lora_config=adapter, do_sample=sampled,
                        quantization_config=four_bits, dtype=torch.bfloat16,
                    )  # fmt: skip
                    ids = torch.randint(
                        3, SHAPES[given.model].vocabulary - 3, (rows, prompt), generator=torch.Generator().manual_seed(rows)
                    )
                    sampling = _C.SamplingOptions(do_sample=sampled, top_p=0.9 if sampled else 1.0)
                    gc.collect()
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                    made = _C.generate(
                        base.forward.engine.core, ids.tolist(), max_new_tokens=new, max_rows=plan.rows, cache_bytes=plan.cache_memory,
                        sampling=sampling,
                    )  # fmt: skip
                    assert all(len(row) == new for row in made)
                    phases = [phase for name, phase in plan.phases.items() if name != "load"]
                    allocated, reserved = (max(phase[what] for phase in phases) for what in ("allocated", "reserved"))
                    measured, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                    line = {
                        "rows": rows, "prompt": prompt, "new": new, "adapter": adapter is not None, "sampled": sampled,
                        "together": plan.rows,
                        "planned_gib": round(allocated / GIB, 3), "measured_gib": round(measured / GIB, 3),
                        "off": f"{allocated / measured - 1:+.2%}",
                        "reserved_planned_gib": round(reserved / GIB, 3), "reserved_gib": round(held / GIB, 3),
                    }  # fmt: skip
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
