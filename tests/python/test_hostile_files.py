# SPDX-License-Identifier: Apache-2.0
"""Files made to break a reader: each is refused with the error that it deserves, by its name, and nothing outside of its folder is opened."""

import gzip
import json
import os
import pathlib
import struct
import subprocess
import sys

import pytest
from conftest import BUILD, ROOT

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
import fuzz

MODEL = ROOT / "examples" / "data" / "tiny-llama"
DEEP = "[" * 10_000 + "]" * 10_000
#: Values that no number of a config may have.
NO_SIZE = {
    "negative": -1,
    "zero": 0,
    "huge": 2**62,
    "2^64": 2**64,
    "fraction": 1.5,
    "text": "64",
    "list": [64],
    "true": True,
    "1e400": 10**400,
}
FORMAT, IO, VALUE = "FormatError", "IoError", "ValueError"

CASES: list[tuple[str, str, str, object]] = []  # kind, name, class, what writes it


def case(kind, name, make, error=FORMAT):
    CASES.append((kind, name, error, make))


def content(file):
    """Writes one file."""
    return lambda into: into.write_bytes(file if isinstance(file, bytes) else file.encode())


def files(**contents):
    """Writes a folder of files; "__" in a name stands for a dot. None removes one of the model's."""

    def make(into):
        into.mkdir()
        for name, text in contents.items():
            if text is not None:
                content(text)(into / name.replace("__", "."))

    return make


def broken_json(kind, good, wrap):
    """What is no JSON, or no object, for any kind of JSON file."""
    for name, text in {
        "empty": "", "blank": " \n", "cut": good[: len(good) // 2], "a NUL": good + "\0", "two values": good + "{}", "a list": "[]",
        "a number": "1", "text": '"x"', "null": "null", "deep": DEEP, "a deep object": '{"a":' * 10_000 + "1" + "}" * 10_000,
        "invalid UTF-8": good.encode()[:-1] + b', "x": "\xff"}', "a lone surrogate": good[:-1] + ', "x": "\\ud800"}',
        "a key twice": '{"a": 1, "a": 2}', "a comment": "/* */" + good, "a trailing comma": good[:-1] + ",}", "single quotes": "{'a': 1}",
        "NaN bare word": good[:-1] + ', "x": nan}', "UTF-16": good.encode("utf-16"), "gzip": gzip.compress(good.encode(), mtime=0),
        "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94.",
    }.items():  # fmt: skip
        case(kind, name, wrap(text))


# --- safetensors


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def header(entries, data=8, **more):
    text = json.dumps(entries)
    return fuzz.shard(text, bytes(data)) if not more else more["wrap"](text, bytes(data))


for name, entries in {
    "beyond the end": {"a": tensor(offsets=(0, 12), shape=(3,))}, "reversed": {"a": tensor(offsets=(8, 0))}, "negative": {"a": tensor(offsets=(-8, 0))},
    "a hole": {"a": tensor(shape=(1,), offsets=(4, 8))}, "overlap": {"a": tensor(), "b": tensor(offsets=(0, 8))},
    "too short": {"a": tensor(offsets=(0, 4), shape=(1,))}, "size and shape": {"a": tensor(shape=(3,))},
    "shape overflow": {"a": tensor(shape=(2**32, 2**32))}, "shape overflow to 2": {"a": tensor(shape=(2**63, 2, 2))},
    "negative shape": {"a": tensor(shape=(-2,))}, "fraction": {"a": tensor(shape=(2.0,))}, "shape of text": {"a": tensor(shape=("2",))},
    "unknown dtype": {"a": tensor(dtype="F33")}, "lower case": {"a": tensor(dtype="f32")}, "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "three offsets": {"a": tensor(offsets=(0, 8, 8))}, "one offset": {"a": tensor(offsets=(8,))}, "null": {"a": None}, "list": {"a": []},
    "an unknown field": {"a": {**tensor(), "url": "http://x"}}, "metadata of numbers": {"__metadata__": {"a": 1}, "a": tensor()},
    "metadata as text": {"__metadata__": "x", "a": tensor()}, "offsets beyond 2^63": {"a": tensor(offsets=(0, 2**63))},
    "offsets beyond 2^64": {"a": tensor(offsets=(2**64, 2**64 + 8))},
    "shape of null": {"a": {**tensor(), "shape": None}}, "dtype of number": {"a": {**tensor(), "dtype": 1}}, "offsets as object": {"a": {**tensor(), "data_offsets": {}}},
}.items():  # fmt: skip
    case("safetensors", name, content(header(entries)))
for name, file in {
    "empty": b"", "seven bytes": b"\0" * 7, "only a length": struct.pack("<Q", 0), "length beyond the file": struct.pack("<Q", 100) + b"{}",
    "length 2^63": struct.pack("<Q", 2**63) + b"{}", "length 2^64-1": struct.pack("<Q", 2**64 - 1) + b"{}", "length 2^40": struct.pack("<Q", 2**40) + b"{}",
    "no JSON": fuzz.shard("hello"), "a list as header": fuzz.shard("[]"), "deep": fuzz.shard(DEEP), "NUL in the header": fuzz.shard('{"a":1}\0'),
    "a pickle": b"\x80\x02}q\0.", "a zip (torch.save)": b"PK\x03\x04" + b"\0" * 60, "GGUF": b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + b"\0" * 40,
    "bytes behind the data": header({"a": tensor()}) + b"x", "a tensor twice": fuzz.shard('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)),
    "invalid UTF-8": fuzz.shard('{"a":1}').replace(b"a", b"\xff"), "a million brackets": struct.pack("<Q", 10**6) + b"[" * 10**6,
}.items():  # fmt: skip
    case("safetensors", name, content(file))
case("safetensors", "a folder", lambda into: into.mkdir())
case("safetensors", "a pipe", lambda into: os.mkfifo(into))
case("safetensors", "a device", lambda into: into.symlink_to("/dev/zero"))
case("safetensors", "nothing", lambda into: None, IO)
case("safetensors", "a link to itself", lambda into: into.symlink_to(into), IO)

# --- a folder of shards

SHARD = fuzz.shard('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8))


def index(weight_map, **more):
    shards = {"model-1__safetensors": SHARD, "model__safetensors__index__json": json.dumps({"weight_map": weight_map})}
    return files(**{**shards, **more})


for name, place in {
    "parent": "../model-1.safetensors", "absolute": "/etc/passwd", "a folder": "sub/model-1.safetensors", "dots": "..", "dot": ".", "empty": "",
    "a NUL": "model-1.safetensors\0", "missing": "model-2.safetensors", "a number": 1, "null": None, "list": ["model-1.safetensors"],
    "another ending": "model-1.bin", "a URL": "https://example.com/model-1.safetensors", "backslashes": "..\\model-1.safetensors",
}.items():  # fmt: skip
    case("model", f"shard {name}", index({"a": place}))
case("model", "tensor that its shard lacks", index({"a": "model-1.safetensors", "b": "model-1.safetensors"}))
case("model", "no weight_map", files(model__safetensors__index__json="{}", **{"model-1__safetensors": SHARD}))
case("model", "weight_map as list", index([]))
case("model", "empty weight_map", index({}))
case("model", "tensor in another shard", index({"a": "model-2.safetensors"}, **{"model-2__safetensors": fuzz.shard("{}")}))
case("model", "no safetensors", files(config__json="{}"))
case("model", "pickle only", files(**{"pytorch_model__bin": b"\x80\x02}q\0."}))
case("model", "damaged shard", index({"a": "model-1.safetensors"}, **{"model-1__safetensors": SHARD[:-1]}))
case("model", "no folder", lambda into: None, IO)
broken_json(
    "model",
    json.dumps({"weight_map": {"a": "model-1.safetensors"}}),
    lambda text: index({}, model__safetensors__index__json=text),
)


def linked(name, target, **more):
    def make(into):
        files(**more)(into)
        secret = into.parent / f"{into.name}-secret"
        secret.write_bytes(target)
        (into / name).symlink_to(f"../{secret.name}")

    return make


case("model", "a link out of the folder", linked("model.safetensors", SHARD))
case(
    "model",
    "a linked index",
    linked("model.safetensors.index.json", b'{"weight_map": {"a": "model-1.safetensors"}}', **{"model-1__safetensors": SHARD}),
)

# --- config.json

CONFIG = json.loads((MODEL / "config.json").read_text())


def config(**changes):
    kept = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    return files(config__json=json.dumps(kept))


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
for key in SIZES:
    for name, value in NO_SIZE.items():
        case("config", f"{key} {name}", config(**{key: value}))
for name, changes in {
    "no hidden_size": {"hidden_size": ...}, "unknown model_type": {"model_type": "gpt7"},
    "model_type number": {"model_type": 1}, "auto_map": {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}},
    "heads": {"num_attention_heads": 7, "head_dim": ...}, "kv heads": {"num_key_value_heads": 5}, "eps": {"rms_norm_eps": "1"},
    "eps negative": {"rms_norm_eps": -1}, "theta": {"rope_theta": 0, "rope_parameters": ...}, "rope type": {"rope_scaling": {"rope_type": "evil", "factor": 2.0}, "rope_parameters": ...},
    "rope list": {"rope_scaling": [], "rope_parameters": ...}, "factor": {"rope_scaling": {"rope_type": "linear", "factor": -2.0}, "rope_parameters": ...},
    "activation": {"hidden_act": "evil"}, "quantization": {"quantization_config": {"quant_method": "gptq"}}, "quantization list": {"quantization_config": []},
    "quant_type": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}},
    "8 bits": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "tied": {"tie_word_embeddings": "yes"},
    "dtype": {"dtype": "int8", "torch_dtype": ...}, "head_dim": {"head_dim": -8}, "head_dim odd": {"head_dim": 7}, "eos": {"eos_token_id": "x"},
}.items():  # fmt: skip
    case("config", name, config(**changes))
broken_json("config", json.dumps(CONFIG), lambda text: files(config__json=text))
case("config", "a link out of the folder", linked("config.json", json.dumps(CONFIG).encode()))
case("config", "no file", files(), IO)
case("config", "a folder", lambda into: (into / "config.json").mkdir(parents=True))
case("config", "a pipe", lambda into: (into.mkdir(), os.mkfifo(into / "config.json")))

# --- adapter_config.json

ADAPTER = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
    "lora_dropout": 0.0,
    "bias": "none",
    "task_type": "CAUSAL_LM",
}


def adapter(**changes):
    kept = {key: value for key, value in {**ADAPTER, **changes}.items() if value is not ...}
    return files(adapter_config__json=json.dumps(kept))


for name, value in NO_SIZE.items():
    case("adapter", f"r {name}", adapter(r=value))
for name, changes in {
    "no peft_type": {"peft_type": ...}, "LoHa": {"peft_type": "LOHA"}, "peft_type list": {"peft_type": []},
    "dropout": {"lora_dropout": 1.5}, "dropout negative": {"lora_dropout": -0.1}, "dropout text": {"lora_dropout": "0"}, "alpha text": {"lora_alpha": "16"},
    "alpha huge": {"lora_alpha": 1e400}, "target number": {"target_modules": 3}, "target list of numbers": {"target_modules": [1]},
    "misspelled": {"lora_alhpa": 32}, "rank_pattern list": {"rank_pattern": [1]}, "rank_pattern negative": {"rank_pattern": {"q_proj": -4}},
    "alpha_pattern text": {"alpha_pattern": {"q_proj": "x"}},
    "rslora": {"use_rslora": "yes"}, "trainable tokens": {"trainable_token_indices": [1]},
    "aLoRA": {"alora_invocation_tokens": [1]},
    "megatron": {"megatron_config": {"a": 1}}, "layer_replication": {"layer_replication": [[0, 4]]},
}.items():  # fmt: skip
    case("adapter", name, adapter(**changes))
broken_json("adapter", json.dumps(ADAPTER), lambda text: files(adapter_config__json=text))
case("adapter", "a link out of the folder", linked("adapter_config.json", json.dumps(ADAPTER).encode()))
case("adapter", "no file", files(), IO)

# --- quant_state

STATE = json.loads(fuzz.seeds()["quant_state"][0])


def state(**changes):
    return content(json.dumps({key: value for key, value in {**STATE, **changes}.items() if value is not ...}))


for name, value in NO_SIZE.items():
    case("quant_state", f"blocksize {name}", state(blocksize=value))
    case("quant_state", f"shape {name}", state(shape=[64, value]))
for name, changes in {
    "no quant_type": {"quant_type": ...}, "quant_type": {"quant_type": "int4"}, "dtype": {"dtype": "int8"}, "no shape": {"shape": ...}, "shape as text": {"shape": "64"},
    "shape overflow": {"shape": [2**32, 2**32]}, "nested offset text": {"nested_offset": "0"}, "nested dtype": {"nested_dtype": "float64"},
    "nested blocksize 0": {"nested_blocksize": 0},
}.items():  # fmt: skip
    case("quant_state", name, state(**changes))
broken_json("quant_state", json.dumps(STATE), content)

# --- checkpoints

MANIFEST = json.loads(fuzz.seeds()["manifest"][0])


def sealed(manifest):
    import hashlib

    body = json.dumps(manifest, indent=1, ensure_ascii=True)
    return json.dumps({**manifest, "sha256": hashlib.sha256(body.encode()).hexdigest()}, indent=1) + "\n"


def checkpoint(manifest=None, **more):
    return files(MANIFEST__json=sealed(manifest or MANIFEST), **{"run_state__json": "{}", **more})


def described(**changes):
    name = changes.pop("name", "run_state.json")
    return {**MANIFEST, "files": {name: {**MANIFEST["files"]["run_state.json"], **changes}}}


for name, manifest in {
    "outside": described(name="../run_state.json"), "absolute": described(name="/etc/passwd"), "dots": described(name="a/../../b"), "itself": described(name="MANIFEST.json"),
    "another size": described(size=3), "negative size": described(size=-1), "huge size": described(size=2**62), "another sum": described(sha256="0" * 64),
    "a short sum": described(sha256="0"), "no crc": described(crc32c=[]), "two crcs": described(crc32c=["00000000"] * 2),
    "crc of number": described(crc32c=[1]), "newer schema": {**MANIFEST, "schema": 99}, "no schema": {k: v for k, v in MANIFEST.items() if k != "schema"},
    "no run": {**MANIFEST, "run_id": ""}, "a run in capitals": {**MANIFEST, "run_id": "A" * 32}, "negative step": {**MANIFEST, "step": -1}, "files list": {**MANIFEST, "files": []},
    "unknown key": {**MANIFEST, "x": 1},
}.items():  # fmt: skip
    case("checkpoint", name, checkpoint(manifest))
case("checkpoint", "unsealed", files(MANIFEST__json=json.dumps(MANIFEST), run_state__json="{}"))
case(
    "checkpoint",
    "a changed step",
    files(MANIFEST__json=sealed(MANIFEST).replace('"step": 4', '"step": 5'), run_state__json="{}"),
)
case("checkpoint", "a listed file that is gone", checkpoint(run_state__json=None))
case("checkpoint", "a changed file", checkpoint(run_state__json="[]"))
case(
    "checkpoint",
    "a linked file",
    lambda into: (checkpoint(run_state__json=None)(into), (into / "run_state.json").symlink_to("/etc/hostname")),
)
case("checkpoint", "no manifest", files(run_state__json="{}"))
broken_json("checkpoint", json.dumps(MANIFEST), lambda text: files(MANIFEST__json=text, run_state__json="{}"))


def output(run, step=4):
    def make(into):
        into.mkdir()
        content(run)(into / "run.json")
        checkpoint()(into / f"checkpoint-{step}")

    return make


GOOD_RUN = json.dumps({"run_id": "0" * 32, "from": ""})
case("output", "another run", output(json.dumps({"run_id": "1" * 32, "from": ""})))
case("output", "another step", output(GOOD_RUN, step=5))
for name, text in {
    "run_id number": '{"run_id": 1}',
    "from list": json.dumps({"run_id": "0" * 32, "from": []}),
    "cut": GOOD_RUN[:10],
    "list": "[]",
}.items():
    case("output", name, output(text))

# --- tokenizer.json

TOKENIZER = json.loads((MODEL / "tokenizer.json").read_text())


def tokenizer(**changes):
    kept = {key: value for key, value in {**TOKENIZER, **changes}.items() if value is not ...}
    return files(tokenizer__json=json.dumps(kept), tokenizer_config__json=(MODEL / "tokenizer_config.json").read_text())


BPE = TOKENIZER["model"]
for name, changes in {
    "no model": {"model": ...}, "model list": {"model": []}, "model type": {"model": {**BPE, "type": "Evil"}}, "no vocab": {"model": {k: v for k, v in BPE.items() if k != "vocab"}},
    "vocab list": {"model": {**BPE, "vocab": []}}, "negative id": {"model": {**BPE, "vocab": {**BPE["vocab"], "zz": -1}}}, "huge id": {"model": {**BPE, "vocab": {**BPE["vocab"], "zz": 2**40}}},
    "an id twice": {"model": {**BPE, "vocab": {**BPE["vocab"], "zz": 5}}}, "id as text": {"model": {**BPE, "vocab": {**BPE["vocab"], "zz": "5"}}},
    "merges of numbers": {"model": {**BPE, "merges": [1]}}, "merges of three": {"model": {**BPE, "merges": [["a", "b", "c"]]}}, "unknown merge": {"model": {**BPE, "merges": [["qqqq", "zzzz"]]}},
    "normalizer": {"normalizer": {"type": "Evil"}}, "pre_tokenizer": {"pre_tokenizer": {"type": "Evil"}}, "decoder": {"decoder": {"type": "Evil"}},
    "regex": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
    "post_processor": {"post_processor": {"type": "Evil"}}, "added list": {"added_tokens": {}}, "added number": {"added_tokens": [1]},
    "added id": {"added_tokens": [{"id": -1, "content": "x", "special": True}]}, "added huge": {"added_tokens": [{"id": 2**40, "content": "x", "special": True}]},
    "added empty": {"added_tokens": [{"id": 3, "content": "", "special": True}]},
}.items():  # fmt: skip
    case("tokenizer", name, tokenizer(**changes))
broken_json("tokenizer", "{}", lambda text: files(tokenizer__json=text))
case("tokenizer", "no file", files(), IO)
case("tokenizer", "a link out of the folder", linked("tokenizer.json", json.dumps(TOKENIZER).encode()))

# --- rows


def rows(suffix, file):
    def make(into):
        content(file)(into.with_suffix(suffix))
        return into.with_suffix(suffix)

    return make


GOOD_ROW = '{"text": "a"}\n'
for name, line in {
    "list": "[1]", "number": "1", "empty object": "{}", "unknown columns": '{"foo": 1}', "text number": '{"text": 1}', "messages text": '{"messages": "x"}',
    "message without role": '{"messages": [{"content": "a"}]}', "message number": '{"messages": [1]}', "content number": '{"messages": [{"role": "user", "content": 1}]}',
    "ids text": '{"input_ids": ["a"]}', "ids negative": '{"input_ids": [-1], "labels": [1]}', "ids fraction": '{"input_ids": [1.5], "labels": [1]}',
    "labels shorter": '{"input_ids": [1, 2], "labels": [1]}', "ids 2^70": '{"input_ids": [1180591620717411303424], "labels": [1]}', "prompt alone": '{"prompt": "a"}',
    "prompt number": '{"prompt": 1, "completion": "b"}', "cut": '{"text": "a', "two values": '{"text": "a"} {"text": "b"}', "deep": DEEP, "surrogate": '{"text": "\\ud800"}',
    "nan": '{"text": nan}', "key twice": '{"text": "a", "text": "b"}',
}.items():  # fmt: skip
    case("rows", f"jsonl {name}", rows(".jsonl", GOOD_ROW + line + "\n"))
for name, (suffix, file) in {
    "empty jsonl": (".jsonl", ""), "blank jsonl": (".jsonl", "\n\n"), "invalid UTF-8": (".jsonl", b'{"text": "\xff"}\n'), "NUL": (".jsonl", b'{"text": "a\0"}\n'),
    "UTF-16": (".jsonl", GOOD_ROW.encode("utf-16")), "json cut": (".json", '[{"text": "a"}, {"te'), "json number": (".json", "1"), "json list of numbers": (".json", "[1]"),
    "csv open quote": (".csv", 'text\n"a\n'), "csv more fields": (".csv", "text\na,b\n"), "csv no rows": (".csv", "text\n"), "csv empty": (".csv", ""),
    "csv two columns of one name": (".csv", "text,text\na,b\n"), "csv text behind a quote": (".csv", 'text\n"a"b\n'), "tsv more": (".tsv", "text\na\tb\n"), "txt UTF-8": (".txt", b"\xff\n"), "txt empty": (".txt", ""),
    "gzip cut": (".jsonl.gz", gzip.compress(GOOD_ROW.encode() * 50, mtime=0)[:-9]), "gzip crc": (".jsonl.gz", gzip.compress(GOOD_ROW.encode(), mtime=0)[:-8] + bytes(8)),
    "gzip of nothing": (".jsonl.gz", b"\x1f\x8b"), "gzip method": (".jsonl.gz", b"\x1f\x8b\x07" + bytes(20)), "gzip junk behind": (".jsonl.gz", gzip.compress(GOOD_ROW.encode(), mtime=0) + b"junk"),
    "parquet": (".parquet", b"PAR1" + bytes(20)), "unknown ending": (".exe", b"MZ"),
}.items():  # fmt: skip
    case("rows", name, rows(suffix, file))
case("rows", "a pipe that never writes", lambda into: os.mkfifo(into.with_suffix(".jsonl")) or into.with_suffix(".jsonl"), IO)
case("rows", "no file", lambda into: into.with_suffix(".jsonl"), IO)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """By case: the answer of the program that reads the files (tests/fuzz/judge.cpp), and the path."""
    root = tmp_path_factory.mktemp("hostile")
    lines, paths = [], []
    for number, (kind, _, _, make) in enumerate(CASES):
        path = root / f"{kind}{number}"
        made = make(path)
        paths.append(made if isinstance(made, pathlib.Path) else path)
        lines.append(f"{kind}\t{paths[-1]}\n")
    done = subprocess.run(
        [BUILD / "tests/fuzz/judge", MODEL], input="".join(lines), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers[-1]["peak"] < 64 << 10
    assert len(answers) == len(CASES)
    return list(zip(answers, paths, strict=True))


def test_there_are_enough_and_no_two_have_one_name():
    assert len(CASES) >= 300
    assert len({case[:2] for case in CASES}) == len(CASES)


@pytest.mark.parametrize("kind", sorted({case[0] for case in CASES}))
def test_each_file_gets_its_error_by_name_and_leads_nowhere(verdicts, kind):
    wrong = []
    for (answer, path), (of, name, error, _) in zip(verdicts, CASES, strict=True):
        if of != kind:
            continue
        if answer["error"] != error:
            wrong.append(f"{kind}, {name}: {answer['error'] or 'accepted'} instead of {error}: {answer['text'][:200]}")
        elif str(path) not in answer["text"]:
            wrong.append(f"{kind}, {name}: not by name: {answer['text'][:200]}")
        real = os.path.realpath(path)
        near = (real, os.path.dirname(real))  # a file is opened in its folder, which is opened first
        outside = [opened for opened in answer["opened"] if opened not in near and not opened.startswith(f"{real}/")]
        if outside and name not in ("a device",):
            wrong.append(f"{kind}, {name}: opened {outside}")
    assert not wrong, "\n".join(wrong)
