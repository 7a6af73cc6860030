# SPDX-License-Identifier: Apache-2.0
"""Makes examples/data: a tiny Llama checkpoint, trained from scratch, and a task that it cannot do yet.

The base model is trained on small stories about sixty people of one village, written by the grammar below. It can only continue
a story. The task is to follow an instruction in Llama 3's chat format, which the base has never seen: to state person, thing and place
in a new order. The held-out instructions pair things and places that no training instruction pairs, so answers cannot be memorized.
Everything is a function of the seed. The committed files are the output of

    python scripts/make_demo_assets.py              # a few minutes on two cores
    python scripts/make_demo_assets.py --data-only  # only the two .jsonl files
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import random
import time

SEED = 20
NAMES = (
    "Ada Abel Amy Anna Ben Bea Carl Cleo Cora Dan Dora Eli Emma Eva Finn Fay Gus Gina Hal Hope Ida Ivan Jack Jill Jon June "
    "Karl Kim Lara Leo Lily Luca Mary Max Mia Milo Ned Nina Nora Olga Otto Pam Paul Pia Ray Rita Ron Rosa Ruth Sam Sue Ted "
    "Tina Tom Una Vera Vic Walt Will Zoe"
).split()
COLORS = "red blue green black white yellow brown gray pink gold".split()
THINGS = "kite drum lamp boat book coat bell rope cup hat key ring map pen box ball bag clock flute sled".split()
PLACES = "lake mill forest bridge tower harbor market garden river school castle barn".split()
FOODS = "bread plums soup honey cheese nuts pears rice beans cake fish corn".split()
TRADES = "baker sailor teacher farmer painter miller weaver potter singer doctor hunter smith".split()
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
VOCABULARY = 768

# Llama 3's split into words (digits in groups of up to three), as a regular expression for the tokenizers package.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (  # as Llama 3 has it, to the letter
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


class Person:
    """A person of the village, with four facts."""

    def __init__(self, name: str, rng: random.Random):
        self.name = name
        self.thing = f"{rng.choice(COLORS)} {rng.choice(THINGS)}"
        self.place, self.food, self.trade = rng.choice(PLACES), rng.choice(FOODS), rng.choice(TRADES)

    def facts(self) -> list[str]:
        return [
            f"{self.name} has a {self.thing}.",
            f"{self.name} lives near the {self.place}.",
            f"{self.name} likes {self.food}.",
            f"{self.name} is a {self.trade}.",
        ]


def village() -> list[Person]:
    rng = random.Random(SEED)
    return [Person(name, rng) for name in NAMES]


def story(rng: random.Random, everybody: list[Person]) -> str:
    """Two people meet. Their facts are the same in every story."""
    sentences = []
    cast = rng.sample(everybody, 2)
    for _ in range(rng.randint(5, 8)):
        a, b = rng.sample(cast, 2)
        events = [
            f"One day {a.name} took the {a.thing} to the {b.place} to visit {b.name}.",
            f"{b.name} saw the {a.thing} of {a.name} near the {a.place}.",
            f"{a.name} walked from the {a.place} to the {b.place}.",
            f"{a.name} the {a.trade} met {b.name} the {b.trade}.",
            f"At noon {a.name} gave some {b.food} to {b.name}.",
        ]
        sentences.append(rng.choice(a.facts() + events))
    return " ".join(sentences)


def instruction(name: str, thing: str, place: str) -> dict:
    """One row: an instruction and its only correct answer."""
    question = f"{name}, put the {thing} near the {place}."
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"Near the {place} {name} has a {thing}."},
        ]
    }


def write_task(folder: pathlib.Path) -> None:
    rng = random.Random(SEED + 1)
    pairs = [(thing, place) for thing in THINGS for place in PLACES]
    rng.shuffle(pairs)
    held_out, trained = pairs[:96], pairs[96:]
    for name, part, copies in (("train.jsonl", trained, 6), ("eval.jsonl", held_out, 1)):
        rows = [instruction(rng.choice(NAMES), thing, place) for thing, place in part for _ in range(copies)]
        rng.shuffle(rows)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
    everybody = village()
    stream: list[int] = []
    began = time.perf_counter()
    for step in range(1, steps + 1):
        while len(stream) < rows * length:
            stream += tokenizer(story(rng, everybody))["input_ids"] + [tokenizer.eos_token_id]
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
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    write_task(args.output)
    if args.data_only:
        return

    import torch

    torch.set_num_threads(args.threads)
    rng = random.Random(SEED + 3)
    everybody = village()
    texts = [story(rng, everybody) for _ in range(2000)]
    texts += [
        message["content"]
        for row in (instruction(rng.choice(NAMES), t, p) for t in THINGS for p in PLACES)
        for message in row["messages"]
    ]
    texts += ["system\n\n", "user\n\n", "assistant\n\n"] * 200
    tokenizer = make_tokenizer(texts)
    model = train_base(tokenizer, args.steps, args.rows, args.length, args.lr)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    folder = args.output / "tiny-llama"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
