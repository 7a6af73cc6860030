# SPDX-License-Identifier: Apache-2.0
"""Compares an adapter's held-out loss in PEFT, on the same 4-bit base (bitsandbytes), with ours.

--report is the output of `qlorapp eval`; PEFT's loss must equal its eval_loss. Without PEFT or bitsandbytes it prints that and exits 0.
"""

import argparse
import importlib.util
import json
import logging
import pathlib
import re
import sys
import warnings

TOLERANCE = 5e-4  # relative; 0.2 % of the codes of the scales differ by one (docs/adr/0005)


def held_out_loss(model, tokenizer, rows: list[list[dict]]) -> float:
    """The mean loss over the answers' tokens."""
    import torch

    total, count = 0.0, 0
    for messages in rows:
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        tokens = tokenizer.apply_chat_template(messages, return_dict=False)
        labels = torch.tensor([[-100] * len(prompt) + tokens[len(prompt) :]])
        answers = len(tokens) - len(prompt)
        with torch.no_grad():
            total += model(input_ids=torch.tensor([tokens]), labels=labels).loss.item() * answers
        count += answers
    return total / count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--report", required=True, type=pathlib.Path)
    args = parser.parse_args()
    lacking = [name for name in ("transformers", "peft", "bitsandbytes") if not importlib.util.find_spec(name)]
    if lacking:
        print(f"not checked: {', '.join(lacking)} not installed in {sys.executable}")
        return 0
    ours = re.search(r"eval_loss\D*([0-9.]+(?:e-?\d+)?)", args.report.read_text())
    if not ours:
        print(f"no eval_loss in {args.report}", file=sys.stderr)
        return 1

    # The others' notes are not about this check: a kernel that bitsandbytes could download, a name that PEFT still uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, message="`is_gradient_checkpointing` is deprecated")
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=config, dtype=torch.float32, device_map="cpu")
    # Not eval(): then bitsandbytes multiplies in bfloat16 on CPUs that can, whatever the compute dtype is. Dropout is 0 either way.
    model = PeftModel.from_pretrained(base, args.adapter).train()
    rows = [json.loads(line)["messages"] for line in args.data.read_text().splitlines()]
    theirs, mine = held_out_loss(model, AutoTokenizer.from_pretrained(args.model), rows), float(ours.group(1))
    difference = abs(theirs - mine) / max(theirs, 1e-3)
    print(f"held-out loss: PEFT {theirs:.6f}, qlorapp {mine:.6f}, relative difference {difference:.1e}")
    if difference > TOLERANCE:
        print(f"more than {TOLERANCE}: the adapter does not mean the same in PEFT", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
