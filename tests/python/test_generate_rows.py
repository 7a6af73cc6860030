# SPDX-License-Identifier: Apache-2.0
"""Answers to many prompts: qlorapp generate over files and pipes, and qlorapp.generate."""

import gzip
import json
import signal
import subprocess
import tempfile
import time

import peer
import pytest
import qlorapp
import torch
import transformers
from conftest import BUILD, ROOT

TINY = ROOT / "examples" / "data" / "tiny-llama"
PLAIN = ("--model", TINY, "--dtype", "float32", "--load_in_4bit", "false", "--max_new_tokens", 12)
TEXTS = ["Hello!", "Where is the kite?", "Mia, put the kite near the mill.", "Hello!"]


def run(*options, text=None, **more):
    command = [BUILD / "qlorapp", "generate", *map(str, PLAIN), *map(str, options)]
    stdin = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    return subprocess.run(command, **stdin, capture_output=True, text=True, check=False, timeout=120, **more)


def lines(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def user(text):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def answer(tokenizer):
    """transformers' greedy answer to ids."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]

    def of(prompt, **options):
        if isinstance(prompt, str):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        given = {"max_new_tokens": 12, **options}
        out = model.generate(ids, do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.eos_token_id, **given)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    return of


def test_a_line_of_a_pipe_is_a_user_s_message(answer):
    found = lines(run(text="\n\n".join(TEXTS) + "\n"))
    assert [line["prompt"] for line in found] == TEXTS
    assert [line["text"] for line in found] == [answer(user(text)) for text in TEXTS]
    assert all(line["tokens"] <= 12 and line["finish_reason"] in ("stop", "length") for line in found)
    raw = lines(run("--raw", text="Hello!"))
    assert raw[0]["text"] == answer("Hello!")
    told = lines(run("--system", "Be brief.", "--max_rows", 1, text="Hello!"))
    assert told[0]["text"] == answer([{"role": "system", "content": "Be brief."}, *user("Hello!")])


ROWS = {
    "messages with an answer": ({"messages": [*user("Hello!"), {"role": "assistant", "content": "Hi"}]}, user("Hello!"), "Hi"),
    "messages": ({"messages": user("Hello!")}, user("Hello!"), None),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Hello!"}, {"from": "gpt", "value": "Hi"}], "system": "Be brief."},
        [{"role": "system", "content": "Be brief."}, *user("Hello!")],
        "Hi",
    ),
    "prompt and completion": ({"prompt": "Mia has", "completion": " a kite"}, "Mia has", " a kite"),
    "prompt messages and completion": (
        {"prompt": user("Hello!"), "completion": [{"role": "assistant", "content": "Hi"}]}, user("Hello!"), "Hi",
    ),
    "a prompt alone": ({"prompt": "Hello!"}, user("Hello!"), None),
    "a prompt and a system message": (
        {"prompt": "Hello!", "system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *user("Hello!")], None,
    ),
    "prompt messages": ({"prompt": user("Hello!")}, user("Hello!"), None),
    "instruction": ({"instruction": "Sum up.", "input": "A kite.", "output": "A"}, user("Sum up.\nA kite."), "A"),
    "instruction without an answer": ({"instruction": "Sum up.", "input": "A kite."}, user("Sum up.\nA kite."), None),
    "question": ({"question": "Who?"}, user("Who?"), None),
    "text": ({"text": "Mia has"}, "Mia has", None),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_shape_are_answered(name, answer, tmp_path):
    row, prompt, expected = ROWS[name]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = lines(run("--data", tmp_path / "rows.jsonl"))
    assert found["text"] == answer(prompt)
    assert found.get("answer") == expected and found.get("exact_match") == (None if expected is None else False)


def test_token_ids_packed_files_and_several_files(answer, tokenizer, tmp_path):
    ids = tokenizer("Mia has")["input_ids"]
    row = {"input_ids": [*ids, 9, 9], "labels": [-100] * len(ids) + [9, 9]}
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as out:
        out.write(json.dumps(row) + "\n")
    (tmp_path / "b.csv").write_text('prompt,completion\nMia has,"' + answer("Mia has") + '"\n')
    found = lines(run("--data", f"{tmp_path / 'a.jsonl.gz'},{tmp_path / 'b.csv'}"))
    assert [line["text"] for line in found] == [answer("Mia has")] * 2
    assert found[1]["exact_match"] is True


def test_an_output_file_is_new_and_has_whole_lines_in_order(tmp_path):
    out = tmp_path / "answers.jsonl"
    text = "\n".join(f"{name}, where is the kite?" * (1 + i % 4) for i, name in enumerate(["Mia", "Olga", "Max"] * 7))
    done = run("--output_file", out, "--max_rows", 4, text=text)
    assert done.returncode == 0 and not done.stdout and "21 of 21 prompts" in done.stderr and "tokens/s" in done.stderr
    found = out.read_text()
    assert [json.loads(line)["prompt"] for line in found.splitlines()] == text.splitlines()
    again = run("--output_file", out, text="Hello!")
    assert again.returncode == 2 and "exists already" in again.stderr and out.read_text() == found
    assert len(lines(run("--output_file", "-", text="Hello!", cwd=tmp_path))) == 1 and not (tmp_path / "-").exists()
    missing = run("--output_file", tmp_path / "none" / "a.jsonl", text="Hello!")
    assert missing.returncode == 2 and "cannot be made: No such file or directory" in missing.stderr
    failed = run("--output_file", tmp_path / "none.jsonl", "--cache_memory", "1KB", text="Hello!")
    assert failed.returncode != 0 and "give the cache more" in failed.stderr and not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_whole_lines(sent, tmp_path):
    out = tmp_path / "answers.jsonl"
    (tmp_path / "prompts.txt").write_text("Hello!\n" * 5000)
    command = [BUILD / "qlorapp", "generate", *map(str, PLAIN[:-1]), "100", "--min_new_tokens", "100", "--max_rows", "4"]
    process = subprocess.Popen(
        [*map(str, command), "--data", tmp_path / "prompts.txt", "--output_file", out], stderr=subprocess.PIPE
    )
    end = time.monotonic() + 60
    while (not out.exists() or out.stat().st_size == 0) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(sent)
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 128 + sent and "stopped: " in said and "of 5000 prompts" in said
    assert out.read_bytes().endswith(b"\n")
    assert all(json.loads(line)["tokens"] == 100 for line in out.read_text().splitlines())


def test_a_signal_before_the_first_answer_leaves_no_file(tmp_path):
    """A moment after the file is there: no row has its 400 tokens."""
    out = tmp_path / "answers.jsonl"
    command = [BUILD / "qlorapp", "generate", *map(str, PLAIN[:-1]), "400", "--min_new_tokens", "400", "--max_rows", "1"]
    process = subprocess.Popen([*map(str, command), "--output_file", out], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(b"Hello!\n")
    process.stdin.close()
    end = time.monotonic() + 60
    while not out.exists() and time.monotonic() < end:
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert "stopped: 0 of 1 prompts" in process.stderr.read().decode()
    assert process.wait(60) == 128 + signal.SIGTERM and not out.exists()


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        ((), None, "the file must hold a prompt"),
        (("--prompt", "x", "--data", "y"), None, "got both"),
        (("--prompt", "x", "--output_file", "y"), None, "[output_file] is for the prompts of --data"),
        (("--data", "nowhere.jsonl"), None, "nowhere.jsonl"),
        ((), '{"prompt": "a"}\n{"other": "b"}\n', "/dev/stdin:2"),
        ((), '{"messages": [{"role": "assistant", "content": "b"}]}\n', "a message before the answer"),
        ((), "Hello!\n\n" + "x " * 3000, "[/dev/stdin:3] the prompt of "),
        (("--prompt", "x " * 3000), None, "[generate] the prompt of "),
        (("--prompt", "--x"), None, "One that begins with -- is written --prompt=VALUE."),
        (("--output_file", ""), "x", "[output_file] must be the name of a new file; got ''."),
        (("--min_new_tokens", 13), "x", "--min_new_tokens (13) must be at most --max_new_tokens (12)"),
        (("--temperature", 0), "x", "For the most probable token leave out temperature"),
        (("--temperature", "inf"), "x", "temperature must be a finite number > 0; got inf"),
        (("--repetition_penalty", "inf"), "x", "repetition_penalty must be a finite number > 0; got inf"),
        ((), "x " * 3000, "must fit the model's 512 positions. Shorten the prompt to fewer than 512 tokens."),
        (
            (),
            "x " * 250,
            "and max_new_tokens (12) must fit the model's 512 positions. Lower max_new_tokens to 3, or shorten the prompt.",
        ),
        (("--stop_strings", ""), "x", "[stop_strings] a stop string must have a character; got ''."),
        (("--max_rows", 0), "x", "max_rows"),
        (("--cache_memory", "much"), "x", "cache_memory"),
        (("--system", "s", "--raw"), "x", "--system is part of the chat template, which --raw leaves out"),
    ],
)
def test_bad_input(options, text, message):
    done = run(*options, text=text)
    assert done.returncode in (1, 2) and message in done.stderr and not done.stdout, done.stderr


def test_a_cache_that_memory_cannot_hold_is_refused_before_the_weights_are_read(tmp_path):
    """A model of which only the config exists: it is refused by its plan, not by a missing file."""
    config = json.loads((TINY / "config.json").read_text())
    config.update(num_hidden_layers=64, num_attention_heads=512, num_key_value_heads=512, max_position_embeddings=1 << 30)
    config.pop("head_dim", None)
    config["head_dim"] = 128
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [
        BUILD / "qlorapp",
        "generate",
        "--model",
        tmp_path,
        "--dtype",
        "float32",
        "--prompt",
        "Hello!",
        "--max_new_tokens",
        1 << 28,
    ]
    done = subprocess.run(
        [*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode in (1, 2), done.stderr
    assert (
        "[generate] a row of up to 2684" in done.stderr
        and "may be used. Shorten the prompts, lower max_new_tokens" in done.stderr
    )


def plan_of(*options):
    command = [BUILD / "qlorapp", "plan", "--generate", "--model", TINY, *map(str, options)]
    return subprocess.run(
        [*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
    )


def test_plan_generate_prints_rows_keys_and_values_and_cache_memory():
    config = transformers.AutoConfig.from_pretrained(TINY)
    heads, width = config.num_key_value_heads, config.head_dim
    per_token = 2 * config.num_hidden_layers * heads * width * 4
    done = plan_of("--dtype", "float32", "--gpu", "cpu", "--prompt_tokens", 100, "--max_new_tokens", 28, "--max_rows", 4)
    assert done.returncode == 0, done.stderr
    assert "for 4 x 128 positions" in done.stdout and "prompts " in done.stdout and "decode " in done.stdout
    assert f"(2 x {config.num_hidden_layers} layers x {heads} heads x {width} elements x 4 bytes)" in done.stdout
    python = qlorapp.plan_generation(TINY, prompt_tokens=100, max_new_tokens=28, max_rows=4, dtype="float32", gpu="cpu")
    assert str(python) in done.stdout
    assert (python.bytes_per_token, python.rows, python.fits) == (per_token, 4, True)
    assert python.cache_memory == 4 * 128 * per_token
    assert set(python.phases) == {"load", "prompts", "decode"}
    assert python.phases["decode"]["parts"]["keys and values"] == python.cache_memory


@pytest.mark.parametrize(("max_new_tokens", "prompt"), [(128, 384), (511, 1)])
def test_a_plan_s_prompts_are_what_the_positions_leave(max_new_tokens, prompt):
    size = {"max_new_tokens": max_new_tokens, "max_rows": 2, "dtype": "float32", "gpu": "cpu"}
    assert str(qlorapp.plan_generation(TINY, **size)) == str(qlorapp.plan_generation(TINY, prompt_tokens=prompt, **size))
    done = plan_of("--dtype", "float32", "--gpu", "cpu", "--max_new_tokens", max_new_tokens, "--max_rows", 2)
    assert done.returncode == 0 and f"rows of {prompt} + {max_new_tokens} tokens" in done.stdout, done.stderr


@pytest.mark.parametrize("size", [{"prompt_tokens": 400, "max_new_tokens": 113}, {"max_new_tokens": 512}])
def test_a_plan_refuses_positions_that_the_model_has_not(size):
    with pytest.raises(ValueError, match=rf"max_new_tokens \({size['max_new_tokens']}\) must fit the model's 512 positions"):
        qlorapp.plan_generation(TINY, gpu="cpu", **size)
    done = plan_of("--gpu", "cpu", *(word for name, value in size.items() for word in (f"--{name}", value)))
    assert done.returncode in (1, 2) and "must fit the model's 512 positions" in done.stderr


def test_rows_of_a_plan_grow_with_its_memory():
    size = {"prompt_tokens": 200, "max_new_tokens": 200, "dtype": "float32", "gpu": "cpu"}
    small, large = (qlorapp.plan_generation(TINY, memory_budget=budget, **size) for budget in ("30MiB", "60MiB"))
    assert 0 < small.most_rows < large.most_rows < 128
    assert (small.rows, small.fits) == (small.most_rows, True)
    assert large.most_rows - small.most_rows <= 30 * 2**20 / (400 * small.bytes_per_token)
    none = qlorapp.plan_generation(TINY, memory_budget="1MiB", **size)
    assert (none.most_rows, none.fits) == (0, False)
    done = plan_of(
        "--dtype", "float32", "--gpu", "cpu", "--prompt_tokens", 200, "--max_new_tokens", 200, "--memory_budget", "1MiB"
    )
    assert done.returncode == 3 and "fit together are 0" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch", 2), "--batch has no effect on a generation"),
        (("--learning_rate", 1e-3), "--learning_rate has no effect on a generation"),
        (("--explain",), "exclude each other"),
        (("--prompt_tokens", 500), "must fit the model's 512 positions"),
        (("--max_rows", 0), "--max_rows must be from 1 to"),
        (("--r", 4, "--adapter", "x"), "got both"),
        (("--cache_memory", "1KB", "--prompt_tokens", 9), "give the cache more"),
    ],
)
def test_plan_generate_refuses(options, message):
    done = plan_of(*options)
    assert done.returncode in (1, 2) and message in done.stderr, done.stderr


def test_a_plan_s_rows_need_generate():
    command = [BUILD / "qlorapp", "plan", "--model", TINY, "--prompt_tokens", "100"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (1, 2) and "--prompt_tokens needs --generate" in done.stderr


def stopped_by_transformers(model, tokenizer, text, stop_strings, max_new_tokens=24):
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    out = model.generate(
        ids, do_sample=False, eos_token_id=ends, pad_token_id=ends[0], max_new_tokens=max_new_tokens,
        stop_strings=stop_strings, tokenizer=tokenizer,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def test_stop_strings_end_answers_where_transformers_does(model, tokenizer):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    texts = ["Mia has", "The kite", "Where is the"]
    whole = [one.text for one in qlorapp.generate(model, texts, tokenizer, raw=True, max_new_tokens=24)]
    cut = 0
    for number, text in enumerate(texts):
        for begin in range(0, len(whole[number]) - 3, 3):
            wanted = whole[number][begin : begin + 3]
            expected = stopped_by_transformers(theirs, tokenizer, text, [wanted])
            found = qlorapp.generate(model, [text], tokenizer, raw=True, max_new_tokens=24, stop_strings=wanted)[0]
            assert found.token_ids == expected, (text, wanted)
            assert found.finish_reason == "stop" and wanted in text + found.text
            cut += len(expected) < 24
    assert cut > 10
    both = qlorapp.generate(model, texts, tokenizer, raw=True, max_new_tokens=24, stop_strings=[whole[0][4:7], whole[1][5:9]])
    expected = [stopped_by_transformers(theirs, tokenizer, text, [whole[0][4:7], whole[1][5:9]]) for text in texts]
    assert [one.token_ids for one in both] == expected


def test_the_command_stops_at_stop_strings_and_names_those_that_never_matched(answer, tmp_path):
    whole = answer("Mia has")
    wanted = whole[6:9]
    (found,) = lines(run("--raw", "--stop_strings", wanted, "--stop_strings=never, ever", text="Mia has"))
    assert found["text"] == whole[: len(found["text"])] and len(found["text"]) < len(whole)
    assert found["text"].index(wanted) + len(wanted) <= len(found["text"]) and found["finish_reason"] == "stop"
    done = run("--raw", "--stop_strings", wanted, "--stop_strings=never, ever", text="Mia has\nMia has\n")
    assert "stop string 'never, ever' never matched in 2 answers" in done.stderr and wanted not in done.stderr
    listed = lines(run("--raw", "--stop_strings", json.dumps([wanted, "x, y"]), text="Mia has"))
    assert listed[0]["text"] == found["text"]
    (tmp_path / "options.json").write_text(json.dumps({"stop_strings": [wanted]}))
    assert lines(run("--raw", "--config", tmp_path / "options.json", text="Mia has"))[0]["text"] == found["text"]
    one = run("--raw", "--prompt", "Mia has", "--stop_strings", wanted)
    assert one.stdout == found["text"] + "\n" and "never matched" not in one.stderr
    never = run("--raw", "--prompt", "Mia has", "--stop_strings", "never")
    assert never.stdout == whole + "\n" and "stop string 'never' never matched in 1 answer\n" in never.stderr


# --- from Python


@pytest.fixture(scope="module")
def model():
    return qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def test_python_answers_texts_conversations_and_ids(model, tokenizer, answer):
    found = qlorapp.generate(model, TEXTS, tokenizer, max_new_tokens=12)
    assert [one.text for one in found] == [answer(user(text)) for text in TEXTS]
    assert found.seconds > 0 and found.tokens_per_second > 0
    (one,) = qlorapp.generate(model, user("Hello!"), tokenizer, max_new_tokens=12)
    assert one == found[0] and one.finish_reason in ("stop", "length") and one.prompt_tokens > 0
    assert qlorapp.generate(model, ["Mia has"], max_new_tokens=12, raw=True)[0].text == answer("Mia has")
    ids = tokenizer("Mia has")["input_ids"]
    assert qlorapp.generate(model, ids, tokenizer, max_new_tokens=12)[0].text == answer("Mia has")
    told = qlorapp.generate(model, "Hello!", tokenizer, system="Be brief.", max_new_tokens=12)[0].text
    assert told == answer([{"role": "system", "content": "Be brief."}, *user("Hello!")])


def test_python_uses_the_active_adapter_and_transformers_where_c_does_not_compute(tokenizer):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    adapted = peer.add_adapters(model, r=4, lora_alpha=64)
    with_adapter = qlorapp.generate(adapted, TEXTS, tokenizer, max_new_tokens=12)
    engine = adapted.get_base_model().forward.engine
    with adapted.disable_adapter():
        without = qlorapp.generate(adapted, TEXTS, tokenizer, max_new_tokens=12)
    assert with_adapter != without
    engine.enabled = False
    assert qlorapp.generate(adapted, TEXTS, tokenizer, max_new_tokens=12) == with_adapter


def test_python_samples_by_seed_and_place(model, tokenizer):
    def draw(prompts, seed):
        return qlorapp.generate(model, prompts, tokenizer, max_new_tokens=12, temperature=1.5, seed=seed)

    first = draw(TEXTS, 1)
    assert first == draw(TEXTS, 1) and first != draw(TEXTS, 2) and first[0] != first[3]
    assert draw(TEXTS[:2], 1) == first[:2]


def test_python_s_stop_strings_work_where_transformers_computes_and_are_logged_if_they_never_match(tokenizer, caplog):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    whole = qlorapp.generate(model, "Mia has", tokenizer, raw=True, max_new_tokens=12)[0]
    options = {"raw": True, "max_new_tokens": 12, "stop_strings": [whole.text[5:8], "never"]}
    with caplog.at_level("WARNING", logger="qlorapp"):
        found = qlorapp.generate(model, "Mia has", tokenizer, **options)
    assert "stop string 'never' never matched in 1 answer" in caplog.text
    assert len(found[0].token_ids) < len(whole.token_ids) and found[0].finish_reason == "stop"
    model.forward.engine.enabled = False
    assert qlorapp.generate(model, "Mia has", tokenizer, **options) == found


def test_python_s_deterministic_rows_are_those_of_each_prompt_alone(tokenizer):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    texts = [
        f"{name} puts the {what} near the mill." for name in ("Mia", "Olga", "Max") for what in ("kite", "boat", "lamp", "key")
    ]
    alone = [qlorapp.generate(model, text, tokenizer, raw=True, max_new_tokens=40)[0] for text in texts]
    together = qlorapp.generate(model, texts, tokenizer, raw=True, max_new_tokens=40, deterministic=True)
    assert list(together) == alone


def test_a_native_model_s_generate_goes_beyond_the_positions_as_transformers_does(model, tokenizer):
    """transformers warns there, and goes on. qlorapp.generate refuses."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for rope in ({"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0}):
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=24, eos_token_id=None, bos_token_id=None, pad_token_id=0,
            rope_parameters={"rope_theta": 10000.0, **rope},
        )  # fmt: skip
        theirs = LlamaForCausalLM(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours = qlorapp.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.arange(1, 11)[None]
        expected = theirs.generate(ids, max_new_tokens=40, do_sample=False)
        assert ours.generate(ids, max_new_tokens=40, do_sample=False).tolist() == expected.tolist()
        if rope["rope_type"] == "dynamic":  # for rows of any length
            assert (
                qlorapp.generate(ours, ids[0].tolist(), tokenizer, max_new_tokens=40)[0].token_ids == expected[0, 10:].tolist()
            )
        else:
            with pytest.raises(
                ValueError, match=r"prompts\[0\] of 10 tokens and max_new_tokens \(40\) must fit the model's 24 positions"
            ):
                qlorapp.generate(ours, ids[0].tolist(), tokenizer, max_new_tokens=40)
            rows = [ids[0].tolist(), [5], list(range(1, 24))]
            for one in (ours, theirs):  # a row's length does not depend on its neighbors
                found = qlorapp.generate(one, rows, tokenizer, max_new_tokens=18, fits_positions=True)
                assert [len(answer.token_ids) for answer in found] == [14, 18, 1]


def test_tokens_may_be_tensors_or_arrays(model, tokenizer):
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    wanted = qlorapp.generate(model, ids.tolist(), tokenizer, max_new_tokens=3)
    for same in (ids, list(ids), ids.numpy(), list(ids.numpy()), [list(row) for row in ids.numpy()]):
        assert qlorapp.generate(model, same, tokenizer, max_new_tokens=3) == wanted
