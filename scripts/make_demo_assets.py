# SPDX-License-Identifier: Apache-2.0
"""Makes examples/data: a tiny Llama checkpoint, trained from scratch here, and a task that it cannot do yet.

The base model reads small stories about people, their things and their homes, written by the grammar below. The task asks
questions about such a story in Llama 3's chat format, which the base model has never seen; held-out stories measure whether
the fine-tuned model reads or memorises. Everything is a function of the seed; the committed files are the output of

    python scripts/make_demo_assets.py            # about ten minutes on two cores
    python scripts/make_demo_assets.py --data-only  # the two .jsonl files, at once
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import time

SEED = 20
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Ida Jon Kim Leo Mia Ned Ola Pia Ron Sue Tom Una Vic Wes Zoe".split()
COLORS = "red blue green black white yellow brown gray pink gold".split()
THINGS = "kite drum lamp boat book coat bell rope cup hat key ring map pen box ball bag clock flute sled".split()
PLACES = "lake mill forest bridge tower harbor market garden river school castle barn".split()
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
VOCABULARY = 768

# Llama 3's split into words (digits in groups of up to three), as a regular expression for the tokenizers package.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


class Person:
    """A name, a thing of some color, a home."""

    def __init__(self, name: str, color: str, thing: str, place: str):
        self.name, self.color, self.thing, self.place = name, color, thing, place

    def introduction(self, rng: random.Random) -> str:
        return rng.choice(
            [
                f"{self.name} has a {self.color} {self.thing} and lives near the {self.place}.",
                f"{self.name} lives near the {self.place} and has a {self.color} {self.thing}.",
            ]
        )


def people(rng: random.Random, count: int) -> list[Person]:
    columns = [rng.sample(words, count) for words in (NAMES, COLORS, THINGS, PLACES)]
    return [Person(*row) for row in zip(*columns, strict=True)]


def story(rng: random.Random) -> str:
    """Introductions, then events that only make sense to somebody who remembers who has what and lives where."""
    cast = people(rng, rng.choice([2, 2, 3]))
    sentences = [person.introduction(rng) for person in cast]
    for _ in range(rng.randint(4, 6)):
        a, b = rng.sample(cast, 2)
        sentences.append(
            rng.choice(
                [
                    f"One day {a.name} took the {a.color} {a.thing} to the {b.place} to visit {b.name}.",
                    f"The {a.thing} belongs to {a.name}, and the {b.thing} belongs to {b.name}.",
                    f"{b.name} liked the {a.color} {a.thing} of {a.name}.",
                    f"{a.name} walked from the {a.place} to the {b.place}.",
                    f"{a.name} lost the {a.thing}, but {b.name} found the {a.color} {a.thing} near the {b.place}.",
                    f"At night {a.name} dreamed of the {b.color} {b.thing} near the {b.place}.",
                    f"{a.name} and {b.name} looked at the {a.color} {a.thing} and the {b.color} {b.thing}.",
                    f"The {a.thing} is {a.color} and the {b.thing} is {b.color}.",
                    f"The home of {a.name} is near the {a.place}, and the home of {b.name} is near the {b.place}.",
                ]
            )
        )
    return " ".join(sentences)


def question(rng: random.Random) -> dict:
    """One row of the task: a story of two introductions, a question, and the one right answer."""
    cast = people(rng, 2)
    text = " ".join(person.introduction(rng) for person in cast)
    asked = rng.choice(cast)
    query, answer = rng.choice(
        [
            (f"Who has the {asked.thing}?", f"{asked.name} has the {asked.thing}."),
            (f"What does {asked.name} have?", f"{asked.name} has a {asked.color} {asked.thing}."),
            (f"Where does {asked.name} live?", f"{asked.name} lives near the {asked.place}."),
            (f"What color is the {asked.thing}?", f"The {asked.thing} is {asked.color}."),
        ]
    )
    return {"messages": [{"role": "user", "content": f"{text} {query}"}, {"role": "assistant", "content": answer}]}


def write_task(folder: pathlib.Path, train_rows: int, eval_rows: int) -> None:
    rng = random.Random(SEED + 1)
    rows, seen = [], set()
    while len(rows) < train_rows + eval_rows:
        row = question(rng)
        key = row["messages"][0]["content"]
        if key not in seen:
            seen.add(key)
            rows.append(row)
    for name, part in (("train.jsonl", rows[:train_rows]), ("eval.jsonl", rows[train_rows:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def make_tokenizer(texts: list[str]):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    begin = SPECIAL[0]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{begin} $A",
                pair=f"{begin} $A {begin}:1 $B:1",
                special_tokens=[(begin, tokenizer.token_to_id(begin))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def train_base(tokenizer, steps: int, rows: int, length: int, peak_lr: float):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}", flush=True)
    decay = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=peak_lr, betas=(0.9, 0.98)
    )
    rng = random.Random(SEED + 2)
    stream: list[int] = []
    began = time.perf_counter()
    for step in range(1, steps + 1):
        while len(stream) < rows * length:
            stream += tokenizer(story(rng))["input_ids"] + [tokenizer.eos_token_id]
        batch = torch.tensor(stream[: rows * length]).view(rows, length)
        stream = stream[rows * length :]
        share = step / steps
        scale = min(step / 50, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * scale
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    return model.to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = pathlib.Path(__file__).resolve().parents[1] / "examples" / "data"
    parser.add_argument("--output", type=pathlib.Path, default=default)
    parser.add_argument("--data-only", action="store_true")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    write_task(args.output, train_rows=1600, eval_rows=100)
    if args.data_only:
        return

    import torch

    torch.set_num_threads(args.threads)
    rng = random.Random(SEED + 3)
    texts = [story(rng) for _ in range(2000)] + [question(rng)["messages"][0]["content"] for _ in range(500)]
    texts += ["system\n\n", "user\n\n", "assistant\n\n"] * 200
    tokenizer = make_tokenizer(texts)
    model = train_base(tokenizer, args.steps, args.rows, args.length, args.lr)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    folder = args.output / "tiny-llama"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
