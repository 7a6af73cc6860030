# SPDX-License-Identifier: Apache-2.0
"""Measures an epoch over short rows, packed and unpacked, on the CPU or a GPU.

    python benchmarks/packing.py [--rows 128] [--median 16] [--max_length 1024] [--hidden 1024] [--layers 2] [--dtype float32]
                                 [--device cpu] [--batch 1] [--rounds 3]

Batches never contain padding, so packing saves none. It changes the number of rows in a micro-batch of a given batch size. With batch 1, the
largest that fits on a small GPU at max_length, that is one short row or one full pack. A CPU reaches its best rate near 60 tokens; a GPU gains up
to a thousand. Three interleaved settings over the same rows, medians of rounds:

    one by one   --batch rows per micro-batch
    packed       --batch packs per micro-batch
    as many      as many rows per micro-batch as the packs hold on average, unpacked: compares packing with a larger batch

The last may need more memory: the script prints its longest micro-batch, while a pack never exceeds max_length. Loading is not timed.
"""

import argparse
import json
import platform
import statistics
import tempfile

import datasets
import torch
import transformers
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


def make_model(folder: str, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=args.hidden, intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 256, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_rows(args: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Rows of log-normal lengths, as in instruction sets."""
    generator = torch.Generator().manual_seed(1)
    lengths = (args.median * torch.exp(0.6 * torch.randn(args.rows, generator=generator))).long().clamp(4, args.max_length)
    return [{"input_ids": torch.randint(3, 32000, (int(length),), generator=generator).tolist()} for length in lengths]


def epoch(folder: str, out: str, rows: datasets.Dataset, args: argparse.Namespace, batch: int) -> tuple[float, int, float]:
    """Seconds, micro-batches and first loss of one epoch, one step per micro-batch."""
    import qlorapp

    model = qlorapp.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=qlorapp.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        ),
        dtype=args.dtype,
        device_map=args.device,
    )
    torch.manual_seed(0)
    model = qlorapp.get_peft_model(model, qlorapp.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    arguments = qlorapp.TrainingArguments(
        output_dir=out,
        num_train_epochs=1,
        per_device_train_batch_size=batch,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free="seq_lengths" in rows.column_names)
    trainer = qlorapp.Trainer(model, arguments, train_dataset=rows, data_collator=collator)
    output = trainer.train()
    return output.metrics["train_runtime"], output.global_step, output.training_loss


def longest(rows: list, batch: int) -> int:
    """Tokens of the largest possible micro-batch."""
    return sum(sorted((len(row["input_ids"]) for row in rows), reverse=True)[:batch])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("rows", 128),
        ("median", 16),
        ("max_length", 1024),
        ("hidden", 1024),
        ("layers", 2),
        ("batch", 1),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = make_rows(args)
    tokens = sum(len(row["input_ids"]) for row in rows)
    unpacked = datasets.Dataset.from_list(rows)
    packs = pack_dataset(unpacked, args.max_length)
    many = max(1, round(args.batch * len(rows) / len(packs)))
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    print(f"{device}, {torch.get_num_threads()} threads; {args.layers} layers of width {args.hidden}, NF4, r=16, {args.dtype}")
    print(
        f"{len(rows)} rows, {tokens} tokens, median {statistics.median(len(r['input_ids']) for r in rows):.0f}; {len(packs)} packs of at most {args.max_length}"
    )
    ways = {
        "one by one": (unpacked, args.batch),
        "packed": (packs, args.batch),
        "as many": (unpacked, many),
    }
    limit = {"one by one": longest(rows, args.batch), "packed": args.batch * args.max_length, "as many": longest(rows, many)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    steps = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as out:
        make_model(folder, args)
        for _ in range(args.rounds):
            for name, (data, batch) in ways.items():
                seconds, steps[name], _ = epoch(folder, out, data, args, batch)
                times[name].append(seconds)
    base = statistics.median(times["one by one"])
    results = {}
    for name in ways:
        middle = statistics.median(times[name])
        spread = (max(times[name]) - min(times[name])) / middle
        results[name] = {
            "tokens_per_second": tokens / middle,
            "speed_up": base / middle,
            "micro_batches": steps[name],
            "largest": limit[name],
        }
        print(
            f"    {name:<12}{tokens / middle:>9.0f} tokens/s  {base / middle:>5.2f}x   {steps[name]:>4} micro-batches, "
            f"largest {limit[name]:>5} tokens   (spread {100 * spread:.0f} %)"
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": device, "rows": len(rows), "tokens": tokens, "ways": results}, file, indent=2)


if __name__ == "__main__":
    main()
