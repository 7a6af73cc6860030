# SPDX-License-Identifier: Apache-2.0
"""tokenizer.json files with the pipelines that model families publish, trained here on a few sentences.

The patterns are those of the published files. Where transformers has a class that builds the pipeline in code, that class builds it.
"""

import json

from test_tokenizer import BYTE_ALPHABET, CORPUS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CL100K = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + ENDING
#: As tiktoken writes it.
CL100K_TIKTOKEN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def cased(contraction, digits):
    words = [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}{u}{LOWER}{l}{contraction}" for u, l in ("*+", "+*")]
    return "|".join([*words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", ENDING])


O200K = cased(CONTRACTION + "?", r"\p{N}{1,3}")
TEKKEN = cased("", r"\p{N}")
QWEN35 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + ENDING
SEED = CONTRACTION + "|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
KANA = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|"
    "\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPACED_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def matches(pattern):
    """How converters of tiktoken files write a split that keeps the matches."""
    return split(pattern, "removed", invert=True)


def digits(individual=True):
    return pre_tokenizers.Digits(individual_digits=individual)


#: Per family: the pre-tokenizers, the normalizer, whether a piece that is a token is that token, and the first token of a text.
BYTE_LEVEL = {
    "cl100k: Phi-4, Granite 4, OLMo 2 and 3": ([matches(CL100K), BYTES], None, False, None),
    "cl100k: GLM-4": ([split(CL100K), BYTES], None, False, "[gMASK]<sop>"),
    "cl100k as tiktoken writes it": ([split(CL100K_TIKTOKEN), BYTES], None, True, None),
    "o200k: Phi-4-mini, gpt-oss": ([matches(O200K), BYTES], None, False, None),
    "tekken: Mistral Nemo, Ministral 3": ([split(TEKKEN), BYTES], None, True, "<s>"),
    "Llama 3, SmolLM3": ([split(CL100K), BYTES], None, True, "<|begin_of_text|>"),
    "Qwen 3.5": ([split(QWEN35), BYTES], normalizers.NFC(), False, None),
    "Granite 3, StarCoder 2, SmolLM, EXAONE": ([digits(), SPACED_GPT2], None, False, None),
    "Command R": ([digits(), SPACED_GPT2], normalizers.NFC(), False, "<BOS>"),
    "Seed": ([split(SEED), BYTES], None, True, "<[begin▁of▁sentence]>"),
    "DeepSeek V3, R1 and Hunyuan": (
        [split(r"\p{N}{1,3}"), split(KANA), split(DEEPSEEK_V3), BYTES], normalizers.Sequence([]), False, "<｜begin▁of▁sentence｜>"
    ),
    "DeepSeek LLM": (
        [split("[\r\n]"), split(DEEPSEEK_LETTERS), split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"), split("\\s+$"), split(DEEPSEEK_CJK), digits(), BYTES],
        None, False, "<｜begin▁of▁sentence｜>",
    ),
    "DeepSeek Coder": (
        [split("[\r\n]"), split("\\s?\\p{L}+"), split("\\s?\\p{P}+"), split(DEEPSEEK_CJK), digits(), BYTES], normalizers.Sequence([]), False, None
    ),
    "MiniCPM 5": ([split(r"\p{N}{1,3}"), split(CL100K.replace("{1,3}", "+")), BYTES], None, False, None),
    "Youtu": ([split(YOUTU), split(cased(CONTRACTION + "?", r"\p{N}")), BYTES], None, False, None),
    "digits behind a pattern": ([split(CL100K), digits(False), BYTES], None, False, None),
}  # fmt: skip
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|x|>", "<|eot_id|>",
    AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False), AddedToken("<|end|>", rstrip=True, normalized=False),
]  # fmt: skip


def byte_level(folder, steps, normalizer, ignore_merges, bos):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=BYTE_ALPHABET, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([bos, *SPECIALS] if bos else SPECIALS)
    tokenizer.add_tokens(
        [
            AddedToken("extra", single_word=True),
            AddedToken("norm", normalized=True, lstrip=True),
            AddedToken("é", normalized=True),
        ]
    )
    byte_offsets = processors.ByteLevel(trim_offsets=False)
    if bos:
        single = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([byte_offsets, single])
    else:
        tokenizer.post_processor = byte_offsets
    return save(tokenizer, folder)


def save(tokenizer, folder, **config):
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def of_class(name, **options):
    """A tokenizer whose pipeline transformers builds in code, with a vocabulary that is learned through this pipeline."""

    def build(folder):
        import transformers

        empty = getattr(transformers, name)(**options)
        pipeline = Tokenizer.from_str(empty.backend_tokenizer.to_str())
        byte_fallback = pipeline.model.byte_fallback
        first = [token for token, _ in sorted(pipeline.get_vocab().items(), key=lambda item: item[1])]
        alphabet = [] if byte_fallback else BYTE_ALPHABET
        first += [f"<0x{byte:02X}>" for byte in range(256) if byte_fallback]
        learner = Tokenizer(models.BPE())
        learner.normalizer, learner.pre_tokenizer = pipeline.normalizer, pipeline.pre_tokenizer or pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=len(first) + 600,
            special_tokens=first,
            initial_alphabet=alphabet,
            limit_alphabet=300,
            show_progress=False,
        )
        learner.train_from_iterator(CORPUS, trainer)
        model = json.loads(learner.to_str())["model"]
        whole = getattr(transformers, name)(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]], **options)
        whole.add_special_tokens({"additional_special_tokens": ["<|x|>", "<|eot_id|>"]})
        whole.add_tokens([AddedToken("extra", single_word=True), AddedToken("norm", normalized=True, lstrip=True)])
        whole.save_pretrained(folder)
        return Tokenizer.from_file(str(folder / "tokenizer.json"))

    return build


def helium(byte_fallback):
    """SentencePiece's Unigram as transformers converts Helium's, whose line feed is a token of its own."""

    def build(folder):
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "contiguous")])
        first = ["<unk>", "<s>", "</s>", "<pad>"] + [f"<0x{byte:02X}>" for byte in range(256) if byte_fallback]
        trainer = trainers.UnigramTrainer(vocab_size=700, special_tokens=first, unk_token="<unk>", show_progress=False)
        tokenizer.train_from_iterator(CORPUS, trainer)
        file = json.loads(tokenizer.to_str())
        file["model"]["byte_fallback"] = byte_fallback
        known = {token for token, _ in file["model"]["vocab"]}
        equal = [["zz", -3.5], ["zzz", -5.25], ["z", -1.75], ["▁▁", -4.0], ["a▁a", -2.0]]  # sums that are equal
        file["model"]["vocab"] += [entry for entry in equal if entry[0] not in known]
        tokenizer = Tokenizer.from_str(json.dumps(file))
        tokenizer.add_special_tokens(["<|x|>", "<|eot_id|>"])
        tokenizer.add_tokens([AddedToken("\n", normalized=False), AddedToken("extra", single_word=True, normalized=False)])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        return save(tokenizer, folder)

    return build


CLASSES = {
    "Helium": helium(True),
    "Helium without tokens of bytes": helium(False),
    "Qwen2Tokenizer": of_class("Qwen2Tokenizer"),
    "Qwen3_5Tokenizer": of_class("Qwen3_5Tokenizer"),
    "GPT2Tokenizer": of_class("GPT2Tokenizer"),
    "GPTNeoXTokenizer": of_class("GPTNeoXTokenizer"),
    "CohereTokenizer": of_class("CohereTokenizer"),
    "GemmaTokenizer": of_class("GemmaTokenizer"),
    "LlamaTokenizer": of_class("LlamaTokenizer"),
    "LlamaTokenizer, legacy": of_class("LlamaTokenizer", legacy=True),
    "LlamaTokenizer without a space in front": of_class("LlamaTokenizer", add_prefix_space=False),
}


def kinds():
    """Name and builder of each; a builder writes a folder and returns what the tokenizers package reads from it."""
    out = {name: (lambda folder, parts=parts: byte_level(folder, *parts)) for name, parts in BYTE_LEVEL.items()}
    return out | CLASSES
