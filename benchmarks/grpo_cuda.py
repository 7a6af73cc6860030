# SPDX-License-Identifier: Apache-2.0
"""Measures TRL's unmodified GRPOTrainer over a four-bit model with LoRA: seconds per step, and the rollout's log-probabilities.

    python benchmarks/grpo_cuda.py [--build build/dev] [--model 1b] [--prompts 8] [--generations 8] [--new 256] [--steps 4] [--peer]
        [--reference] [--no-checkpointing] [--profile]
    python benchmarks/grpo_cuda.py --device cpu --dtype float32 --model tiny --new 32 --prompt 24 --peer

NF4 with double quantization, random weights at the model's shape, r = 16 on all linear layers, use_vllm=False. One optimizer step per
rollout; a micro-batch holds one prompt's generations. Completions have all their tokens (min_new_tokens), so every run does the same work.
--peer runs the same script with transformers' AutoModelForCausalLM over bitsandbytes. Each runs in its own process. Medians leave out the first
step. In that step hooks read the logits of the rollout and the log-probabilities of the training pass. --reference compares both with a pass of
transformers' model in float32 whose weights and adapter have the same values.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from load_cuda import ROOT, write_checkpoint
from train_step_peers import SHAPES, Shape

MODELS = {**SHAPES, "tiny": Shape(64, 192, 2, 4, 16, True, 2, 768)}
NAMES = {"qlorapp": "qlorapp", "transformers": "transformers + bitsandbytes"}


class FirstStep:
    """Log-probabilities of the sampled tokens, from the rollout's logits and from the training pass."""

    def __init__(self, model, reference):
        self.differences, self.in_roundings = [], []
        self.rollout_errors, self.training_errors = [], []
        self._reference = reference
        self._columns, self._log_probs, self._largest, self._logits = [], [], [], None
        self._hook = model.get_base_model().register_forward_hook(self._on_pass, with_kwargs=True)

    def end(self):
        self._hook.remove()

    def _on_pass(self, module, args, given, output):
        if hasattr(output, "log_probs"):
            self._on_training_pass(given, output)
        else:
            self._on_token(given, output)

    def _on_token(self, given, output):
        ids = given["input_ids"]
        if self._logits is None:
            self._columns = list(self._without_padding(given).unbind(1))
        else:
            log_probs, largest = self._of(self._logits, ids[:, -1])
            self._columns.append(ids[:, -1])
            self._log_probs.append(log_probs)
            self._largest.append(largest)
        self._logits = output.logits[:, -1].float()

    @staticmethod
    def _without_padding(given):
        ids, mask = given["input_ids"], given.get("attention_mask")
        return ids if mask is None else ids.masked_fill(mask == 0, -1)

    @staticmethod
    def _of(logits, tokens):
        return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0], logits.abs().amax(-1)

    def _on_training_pass(self, given, output):
        import torch

        ids = self._without_padding(given)
        rollout = torch.stack(self._columns, 1)
        same = (ids[:, None, :-1] == rollout).all(-1)  # TRL shuffles rows; the last token was in no pass of the rollout
        assert same.any(-1).all(), "a row of the training pass is no row of the rollout"
        row = same.int().argmax(-1)
        last, largest = self._of(self._logits[row], ids[:, -1])
        sampled = torch.cat([torch.stack(self._log_probs, 1)[row], last[:, None]], 1)
        size = torch.cat([torch.stack(self._largest, 1)[row], largest[:, None]], 1)
        trained = output.log_probs[:, -sampled.shape[1] :].detach().float()
        self.differences.append((trained - sampled).flatten())
        spacing = torch.finfo(torch.bfloat16).eps * size.log2().floor().exp2()
        self.in_roundings.append(((trained - sampled).abs() / spacing).flatten())
        if self._reference is None:
            return
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):  # the trainer's would compute it in 16 bits
            exact = self._reference(
                input_ids=given["input_ids"], attention_mask=given.get("attention_mask"), logits_to_keep=sampled.shape[1] + 1
            )
        exact = exact.logits[:, :-1].log_softmax(-1).gather(-1, given["input_ids"][:, -sampled.shape[1] :, None])[..., 0]
        self.rollout_errors.append((sampled - exact).flatten())
        self.training_errors.append((trained - exact).flatten())

    def results(self):
        import torch

        found, roundings = torch.cat(self.differences), torch.cat(self.in_roundings)
        errors = {}
        if self._reference is not None:
            for who, parts in {"rollout": self.rollout_errors, "training": self.training_errors}.items():
                error = torch.cat(parts).abs()
                errors |= {f"max_{who}_error": float(error.max()), f"mean_{who}_error": float(error.mean())}
        return errors | {
            "max_log_prob_difference": float(found.abs().max()),
            "mean_log_prob_difference": float(found.abs().mean()),
            "max_in_bf16_spacings_of_largest_logit": round(float(roundings.max()), 3),
            "max_ratio_less_1": float((found.exp() - 1).abs().max()),
            "mean_ratio_less_1": float((found.exp() - 1).mean()),
        }


def prompts_of(count, length):
    """Letters, which are a token each: three quarters of the length to all of it, so that shorter ones are padded."""
    return [{"prompt": "".join(chr(97 + (i + k) % 26) for k in range(length - i % (length // 4 + 1)))} for i in range(count)]


def even_tokens(completion_ids, **columns):
    """A reward that needs no text: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def float32_model(given, place, dtype):
    """transformers' model whose linear layers hold what four bits in `dtype` hold, which is the same in both systems."""
    import torch
    import transformers
    from qlorapp import _C

    model = transformers.AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32, device_map=place)
    quantizer = _C.Quantizer()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = quantizer.dequantize(quantizer.quantize(module.weight.data.to(dtype)), dtype).float()
    return model


def run(given):
    """One system. Prints a line of JSON, which begins with a brace."""
    import datasets
    import torch
    import transformers
    import trl

    on_gpu = given.device == "cuda"
    library = transformers
    sys.path.insert(0, str(ROOT / given.build / "python"))
    if given.who == "qlorapp":
        import qlorapp as library

    # --- the script
    dtype = getattr(torch, given.dtype)
    four_bits = library.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    place = {"": 0 if on_gpu else "cpu"}
    model = library.AutoModelForCausalLM.from_pretrained(
        given.folder, dtype=dtype, device_map=place, quantization_config=four_bits
    )
    import peft

    torch.manual_seed(1)
    lora = peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(model, lora)
    args = trl.GRPOConfig(
        output_dir=given.out, use_vllm=False, num_generations=given.generations, max_completion_length=given.new,
        per_device_train_batch_size=given.generations, gradient_accumulation_steps=given.prompts, learning_rate=1e-4, max_steps=given.steps,
        generation_kwargs={"min_new_tokens": given.new}, gradient_checkpointing=not given.no_checkpointing, bf16=given.dtype == "bfloat16",
        use_cpu=not on_gpu, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model, reward_funcs=even_tokens, args=args,
        train_dataset=datasets.Dataset.from_list(prompts_of(given.prompts * given.steps, given.prompt)),
        processing_class=transformers.AutoTokenizer.from_pretrained(given.folder),
    )  # fmt: skip

    # --- what is measured
    def now():
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    reference = None
    if given.reference:
        reference = peft.get_peft_model(float32_model(given, place, dtype), lora).eval()
        peft.set_peft_model_state_dict(reference, peft.get_peft_model_state_dict(model))
    steps, rollouts, first = [], [], FirstStep(model, reference)
    profile = None
    if given.profile:
        import cProfile

        profile = cProfile.Profile()
    base = model.get_base_model()
    generate = base.generate

    def timed(*args, **options):
        began = now()
        made = generate(*args, **options)
        rollouts.append(now() - began)
        return made

    base.generate = timed

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            self.began = now()
            if profile and state.global_step > 0:
                profile.enable()

        def on_step_end(self, args, state, control, **_):
            if profile:
                profile.disable()
            steps.append(now() - self.began)
            if state.global_step == 1:
                first.end()
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()

    trainer.add_callback(Clock())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["completions/mean_length"] == given.new for entry in logs)
    seconds, rollout = statistics.median(steps[1:]), statistics.median(rollouts[1:])
    tokens = given.prompts * given.generations * given.new
    line = {
        "who": NAMES[given.who],
        "seconds_per_step": round(seconds, 4),
        "rollout_seconds": round(rollout, 4),
        "rollout_share": round(rollout / seconds, 3),
        "rollout_tokens_s": round(tokens / rollout),
        "rollout_ms_per_token": round(1e3 * rollout / given.new, 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        **first.results(),
        "clip_ratio": logs[0]["clip_ratio/region_mean"],
        "rewards": [round(entry["reward"], 4) for entry in logs],
    }
    if given.who == "qlorapp":
        line["not_in_cpp"] = sorted(library.hf.forward.engine_of(base)._told)
    print(json.dumps(line), flush=True)
    if profile:
        import pstats

        for order in ("tottime", "cumulative"):
            pstats.Stats(profile, stream=sys.stderr).sort_stats(order).print_stats(45)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build/dev")
    parser.add_argument("--model", default="1b", choices=MODELS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--prompts", type=int, default=8, help="per step")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the longest prompt")
    parser.add_argument("--generations", type=int, default=8, help="per prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens per completion")
    parser.add_argument("--steps", type=int, default=4, help="of which the first is not timed")
    parser.add_argument("--reference", action="store_true", help="errors of log-probabilities, beside a pass in float32")
    parser.add_argument("--no-checkpointing", action="store_true", help="TRL checkpoints activations by default")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--profile", action="store_true", help="Python's time in the timed steps, which are slower then")
    parser.add_argument("--who", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.who:
        run(given)
        return
    lines = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        write_checkpoint(folder, MODELS[given.model])
        for who in NAMES if given.peer else ["qlorapp"]:
            command = [sys.executable, __file__, *sys.argv[1:], "--who", who, "--folder", str(folder), "--out", scratch]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            lines[who] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"who"')))
            print(json.dumps(lines[who]), flush=True)
    if given.peer:
        ours, peer = lines["qlorapp"], lines["transformers"]
        rest = [line["seconds_per_step"] - line["rollout_seconds"] for line in (peer, ours)]
        ratios = {
            "peer_seconds_over_ours": round(peer["seconds_per_step"] / ours["seconds_per_step"], 2),
            "rollout": round(peer["rollout_seconds"] / ours["rollout_seconds"], 2),
            "rest_of_the_step": round(rest[0] / rest[1], 2),
        }
        print(json.dumps(ratios), flush=True)


if __name__ == "__main__":
    main()
