# SPDX-License-Identifier: Apache-2.0
"""Answers beside each evaluation (--eval_generate, EvalGenerate), and the base against the adapter at the end of a run."""

import json
import math
import re
import shutil
import signal
import subprocess
import xml.etree.ElementTree as ET

import datasets
import peft
import pytest
import qlorapp
import torch
import transformers
from conftest import BUILD, ROOT
from peer import run_cli
from qlorapp.hf.rows import OfOneLength
from test_data_parallel import command, forked
from tiny_run import write_rows

TINY = ROOT / "examples" / "data" / "tiny-llama"
SAID = [json.loads(line) for line in (ROOT / "examples" / "data" / "train.jsonl").read_text().splitlines()[:6]]
STEPS, EVERY, ASKED = 30, 10, 3
FILE = "eval_answers.jsonl"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", SAID)


def words(data, out, **options):
    """Trains on the rows that it is asked about, until it knows them."""
    values = {
        "model": TINY, "data": data, "eval_data": data, "output": out, "max_steps": STEPS, "eval_strategy": "steps", "eval_steps": EVERY,
        "save_steps": EVERY, "per_device_train_batch_size": 6, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": EVERY,
        "load_in_4bit": "false", "dtype": "float32", "seed": 1, "eval_max_new_tokens": 24,
        "eval_on_start": "true", **options,
    }  # fmt: skip
    return ["train", *(str(word) for name, value in values.items() if value is not None for word in (f"--{name}", value))]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """The model with more positions than any answer has."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("endless") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**12}))
    return folder


def train(data, out, **options):
    done = run_cli(*words(data, out, **options), check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run with answers, and its output."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = train(data, out, eval_generate=ASKED)
    return out, done


def answers(out):
    text = (out / FILE).read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def comparison(out):
    return json.loads((out / "run_report.json").read_text())["comparison"]


def evaluations(out):
    return [e for e in json.loads((out / "trainer_state.json").read_text())["log_history"] if "eval_loss" in e]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


def tokens(tokenizer, row):
    """The prompt's, and the whole row's."""
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
    return prompt, tokenizer.apply_chat_template(row["messages"], return_dict=False)


def scores(tokenizer, adapter, asked):
    """transformers and PEFT: (held-out loss, loss on the neutral text, exact matches, answers that stop); adapter None: of the base."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    model.eval()

    def summed(ids, begin):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, begin - 1 : -1]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[begin:]), reduction="sum").item(), len(ids) - begin

    pairs = [tokens(tokenizer, row) for row in SAID]
    held_out = [summed(ids, len(prompt)) for prompt, ids in pairs]
    neutral = summed(tokenizer(qlorapp._C.neutral_text())["input_ids"], 1)
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    matches = stopped = 0
    for i in asked:
        prompt = torch.tensor([pairs[i][0]])
        out = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])[0]
        new = out[prompt.shape[1] :].tolist()
        stopped += new[-1] in ends
        text = tokenizer.decode(new, skip_special_tokens=True)
        matches += text.strip() == SAID[i]["messages"][-1]["content"].strip()
    return sum(a for a, _ in held_out) / sum(n for _, n in held_out), neutral[0] / neutral[1], matches, stopped


# --- the command


def test_answers_stand_beside_each_evaluation_and_show_what_was_learned(whole):
    out, _ = whole
    found = answers(out)
    assert [(one["step"], one["row"]) for one in found] == [(step, row) for step in (0, 10, 20, 30) for row in (0, 2, 4)]
    for entry in evaluations(out):
        of_step = [one for one in found if one["step"] == entry["step"]]
        assert entry["eval_exact_match"] == sum(one["exact_match"] for one in of_step) / ASKED
        assert entry["eval_stopped"] == sum(one["stopped"] for one in of_step) / ASKED
    for one in found:
        said = SAID[one["row"]]["messages"]
        assert one["expected"] == said[1]["content"] and said[0]["content"] in one["prompt"]
        assert one["exact_match"] == (one["answer"].strip() == one["expected"].strip())
    assert not any(one["exact_match"] for one in found[:ASKED])
    assert all(one["exact_match"] and one["stopped"] for one in found[-ASKED:])


def test_the_end_compares_base_and_adapter_as_transformers_and_peft_do(whole, tokenizer):
    out, done = whole
    found = comparison(out)
    assert (found["eval_rows"], found["answers"]) == (6, ASKED)
    assert found["neutral_tokens"] == len(tokenizer(qlorapp._C.neutral_text())["input_ids"])
    for name, folder in (("base", None), ("adapter", out)):
        loss, neutral, matches, stopped = scores(tokenizer, folder, (0, 2, 4))
        assert found[name]["eval_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert found[name]["neutral_loss"] == pytest.approx(neutral, rel=1e-4)
        assert (found[name]["exact_match"], found[name]["stopped"]) == (matches / ASKED, stopped / ASKED)
    assert found["adapter"]["exact_match"] == 1 > found["base"]["exact_match"]
    assert found["adapter"]["eval_loss"] == pytest.approx(evaluations(out)[-1]["eval_loss"], rel=1e-12)
    assert found["adapter"]["neutral_loss"] != pytest.approx(found["base"]["neutral_loss"], rel=1e-2)
    # The table and the picture have the same numbers.
    lines = done.stdout[done.stdout.index("base against adapter") :].splitlines()
    assert lines[0].split()[-2:] == ["base", "adapter"]
    numbers = {line.strip().split(" (")[0]: line.split()[-2:] for line in lines[1:5]}
    picture = (out / "comparison.svg").read_text()
    assert ET.fromstring(picture).tag.endswith("svg")
    for label, key in (("held-out loss", "eval_loss"), ("loss on a neutral text", "neutral_loss")):
        assert numbers[label] == [f"{found[name][key]:.4g}" for name in ("base", "adapter")]
        assert all(f">{number}<" in picture for number in numbers[label])
    for label, key in (("exact match", "exact_match"), ("answers that stop", "stopped")):
        assert numbers[label] == [str(round(found[name][key] * ASKED)) for name in ("base", "adapter")]
    assert ">100 %<" in picture


def test_the_training_is_the_same_with_and_without_answers(whole, data, tmp_path):
    """Unset: answers at the end alone. 0: none."""
    out, _ = whole
    for name, given in (("unset", None), ("none", 0)):
        train(data, tmp_path / name, eval_generate=given)
        for file in ("adapter_model.safetensors", f"checkpoint-{STEPS}/optimizer.safetensors"):
            assert (tmp_path / name / file).read_bytes() == (out / file).read_bytes()
        assert not (tmp_path / name / FILE).exists()
        assert not any("eval_exact_match" in entry for entry in evaluations(tmp_path / name))
    unset, none = (comparison(tmp_path / name) for name in ("unset", "none"))
    assert unset["answers"] == 6 and unset["adapter"]["exact_match"] == 1  # eight, of six rows
    assert none["answers"] == 0 and none["adapter"]["exact_match"] is None and none["base"]["stopped"] is None
    assert none["adapter"]["eval_loss"] == unset["adapter"]["eval_loss"] and none["base"] | unset["base"] == unset["base"]


def test_a_resumed_run_has_each_answer_once(whole, data, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    with (out / FILE).open("a") as file:
        file.write('{"step": 30, "row": 0, "prom')  # the machine lost its power
    train(data, out, eval_generate=ASKED, resume_from_checkpoint=out / f"checkpoint-{EVERY}")
    assert (out / FILE).read_bytes() == (whole[0] / FILE).read_bytes()
    # A resumed run that is over compares all the same; a run that begins anew has none of the old answers.
    assert "base against adapter" in train(data, out, eval_generate=ASKED, resume_from_checkpoint="true").stdout
    assert (out / FILE).read_bytes() == (whole[0] / FILE).read_bytes()
    train(data, out, eval_generate=None, max_steps=1, overwrite_output_dir="true")
    assert not (out / FILE).exists()


def test_the_exact_match_chooses_the_best_model(data, tmp_path):
    options = {"load_best_model_at_end": "true", "metric_for_best_model": "exact_match", "save_total_limit": 1}
    train(data, tmp_path, eval_generate=6, **options)
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    shares = [entry["eval_exact_match"] for entry in evaluations(tmp_path)]
    assert state["best_metric"] == max(shares) and state["best_global_step"] == EVERY * shares.index(max(shares))


def test_without_held_out_rows_the_neutral_text_is_compared(data, tmp_path):
    options = {"eval_data": None, "eval_strategy": None, "eval_steps": None, "eval_on_start": None, "max_steps": 2}
    done = train(data, tmp_path / "out", **options)
    found = comparison(tmp_path / "out")
    assert (found["eval_rows"], found["answers"]) == (0, 0) and found["adapter"]["eval_loss"] is None
    assert found["base"]["neutral_loss"] != found["adapter"]["neutral_loss"]
    assert "no held-out rows: --val_size N" in done.stdout and "held-out loss" not in done.stdout
    refused = run_cli(*words(data, tmp_path / "other", eval_generate=2, **options), check=False)
    assert refused.returncode == 2 and "--eval_generate 2 needs rows to evaluate on" in refused.stderr


def test_rows_without_a_prompt_are_named_and_their_loss_compared(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "Mia has a kite."}, {"text": "Gus has a boat."}])
    done = train(rows, tmp_path / "out", max_steps=2, eval_steps=1, eval_generate=2)
    assert (done.stdout + done.stderr).count("the evaluation rows have no prompt") == 1
    found = comparison(tmp_path / "out")
    assert found["answers"] == 0 and found["eval_rows"] == 2 and found["base"]["eval_loss"] != found["adapter"]["eval_loss"]
    assert not (tmp_path / "out" / FILE).exists()


def test_rows_of_tokens_without_a_tokenizer_are_compared_by_tokens(data, tokenizer, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, model / name)
    pairs = [tokens(tokenizer, row) for row in SAID]
    rows = [{"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]} for prompt, ids in pairs]
    write_rows(tmp_path / "rows.jsonl", rows)
    train(tmp_path / "rows.jsonl", tmp_path / "out", model=model, max_steps=2, eval_steps=1, eval_generate=2)
    one = answers(tmp_path / "out")[0]
    assert json.loads(one["prompt"]) == pairs[0][0]
    assert (
        json.loads(one["expected"])
        == [token for token in pairs[0][1][len(pairs[0][0]) :] if token != tokenizer.eos_token_id][
            : len(json.loads(one["expected"]))
        ]
    )
    assert comparison(tmp_path / "out")["neutral_tokens"] == 0


def test_what_fails_there_costs_no_adapter(data, tmp_path):
    out = tmp_path / "out"
    (out / FILE).mkdir(parents=True)
    (out / "comparison.svg").mkdir()
    done = train(data, out, max_steps=2, eval_steps=1, eval_generate=2)
    assert "the answers are not written" in done.stderr and "base against adapter: not compared" in done.stderr
    assert (out / "adapter_model.safetensors").exists() and "eval_exact_match" in evaluations(out)[0]


def test_answers_that_do_not_fit_cost_no_run(endless, data, tmp_path):
    options = {
        "model": endless,
        "load_best_model_at_end": "true",
        "metric_for_best_model": "exact_match",
        "eval_max_new_tokens": 10**12,
    }
    done = train(data, tmp_path, max_steps=2, eval_steps=1, save_steps=1, eval_generate=2, **options)
    assert "the answers of step 1 are left out" in done.stderr and "base against adapter: not compared" in done.stderr
    assert all(math.isnan(entry["eval_exact_match"]) for entry in evaluations(tmp_path))


def test_a_signal_in_the_middle_of_an_answer_stops_the_run(endless, data, tmp_path):
    options = {
        "model": endless,
        "metric_for_best_model": "exact_match",
        "eval_generate": 6,
        "eval_max_new_tokens": 20_000,
        "eval_on_start": "false",
    }
    command = [BUILD / "qlorapp", *words(data, tmp_path, max_steps=2, eval_steps=1, **options)]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "'step': 1}" in line:
            break
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143 and "stopped by SIGTERM after step 1 of 2" in out + err
    assert json.loads((tmp_path / "run_report.json").read_text())["outcome"] == "stopped"


def test_an_adapter_that_changed_the_base_is_shown_alone(data, tmp_path):
    done = train(data, tmp_path, max_steps=1, eval_steps=1, init_lora_weights="pissa", load_in_4bit="true")
    found = comparison(tmp_path)
    assert found["base"] is None and found["adapter"]["eval_loss"] > 0
    assert re.search(r"held-out loss \(6 rows\) +- +\d", done.stdout) and "took a part out of the base" in done.stdout


@pytest.mark.parametrize(("option", "value"), [("eval_generate", -1), ("eval_max_new_tokens", 0)])
def test_numbers_out_of_range(data, tmp_path, option, value):
    done = run_cli(*words(data, tmp_path, **{option: value}), check=False)
    assert done.returncode == 2 and f"{option} must be" in done.stderr


def test_two_processes_leave_one_file_of_answers(data, tmp_path):
    options = {
        "eval_generate": ASKED,
        "max_steps": 4,
        "eval_steps": 2,
        "per_device_train_batch_size": 2,
        "device": "cpu",
        "ddp_timeout": 30,
    }
    done = command(2, *words(data, tmp_path / "two", gradient_accumulation_steps=1, **options))
    train(data, tmp_path / "one", gradient_accumulation_steps=2, **options)
    assert [(one["step"], one["row"]) for one in answers(tmp_path / "two")] == [(s, r) for s in (0, 2, 4) for r in (0, 2, 4)]
    assert done.stdout.count("base against adapter") == 1
    mine, other = (comparison(tmp_path / name) for name in ("two", "one"))
    assert mine["base"] == pytest.approx(other["base"]) and mine["adapter"] == pytest.approx(other["adapter"], rel=1e-4)


def test_a_base_in_shards_is_left_out_by_name(data, tmp_path):
    options = {
        "max_steps": 2,
        "eval_steps": 1,
        "per_device_train_batch_size": 2,
        "device": "cpu",
        "base_sharding": "full",
        "ddp_timeout": 30,
    }
    done = command(2, *words(data, tmp_path, gradient_accumulation_steps=1, eval_generate=2, **options))
    assert "eval_generate: no answers, as the base is divided" in done.stdout and not (tmp_path / FILE).exists()
    assert "comparison" not in json.loads((tmp_path / "run_report.json").read_text())


# --- Python


def adapted(seed=3):
    model = qlorapp.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    torch.manual_seed(seed)
    return qlorapp.get_peft_model(
        model, qlorapp.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def arguments(kind, out, **options):
    values = {
        "output_dir": str(out), "max_steps": STEPS, "eval_strategy": "steps", "eval_steps": EVERY, "save_strategy": "steps",
        "save_steps": EVERY, "per_device_train_batch_size": 6, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": EVERY,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "seed": 1, **options,
    }  # fmt: skip
    return kind(**values)


def labeled(tokenizer):
    pairs = [tokens(tokenizer, row) for row in SAID]
    return [{"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]} for prompt, ids in pairs]


def trained(kind, out, tokenizer, callbacks, resume=None, **options):
    rows, model = labeled(tokenizer), adapted()
    trainer = kind(
        model, arguments(qlorapp.TrainingArguments, out, **options), train_dataset=rows, eval_dataset=rows, processing_class=tokenizer,
        callbacks=callbacks, data_collator=OfOneLength(transformers.default_data_collator, 0),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, {name: value.clone() for name, value in model.named_parameters() if "lora_" in name}


def check_run(trainer, out, callback):
    found = answers(out)
    assert [(one["step"], one["row"]) for one in found] == [(step, row) for step in (10, 20, 30) for row in (0, 2, 4)]
    assert all(one["exact_match"] and one["stopped"] for one in found[-ASKED:])
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["eval_exact_match"] for entry in logged] == [
        sum(one["exact_match"] for one in found if one["step"] == entry["step"]) / ASKED for entry in logged
    ]
    assert callback.comparison["adapter"]["eval_loss"] == pytest.approx(logged[-1]["eval_loss"], rel=1e-5, abs=1e-6)
    assert callback.comparison["adapter"]["exact_match"] == 1 and callback.comparison["answers"] == ASKED


def test_the_callback_does_what_the_command_does(tokenizer, tmp_path, capsys):
    out, callback = tmp_path / "with", qlorapp.EvalGenerate(ASKED, max_new_tokens=24)
    trainer, values = trained(qlorapp.Trainer, out, tokenizer, [callback])
    check_run(trainer, out, callback)
    assert trainer._told == ""  # C++ computes the steps
    trainer.save_model(str(tmp_path / "adapter"))
    for name, folder in (("base", None), ("adapter", tmp_path / "adapter")):
        loss, neutral, matches, stopped = scores(tokenizer, folder, (0, 2, 4))
        of = callback.comparison[name]
        assert of["eval_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6) and of["neutral_loss"] == pytest.approx(
            neutral, rel=1e-4
        )
        assert (of["exact_match"], of["stopped"]) == (matches / ASKED, stopped / ASKED)
    assert comparison(out) == callback.comparison
    printed = capsys.readouterr().out
    assert f"{callback.comparison['base']['eval_loss']:.4g}" in printed[printed.index("base against adapter") :]
    assert ET.fromstring((out / "comparison.svg").read_text()).tag.endswith("svg")
    # The training is the same without it.
    _, plain = trained(qlorapp.Trainer, tmp_path / "without", tokenizer, [])
    assert all(torch.equal(values[name], plain[name]) for name in plain)
    assert not (tmp_path / "without" / FILE).exists() and "comparison" not in json.loads(
        (tmp_path / "without" / "run_report.json").read_text()
    )
    # Resumed, it has each answer once.
    before = (out / FILE).read_bytes()
    trained(
        qlorapp.Trainer, out, tokenizer, [qlorapp.EvalGenerate(ASKED, max_new_tokens=24)], resume=str(out / "checkpoint-10")
    )
    assert (out / FILE).read_bytes() == before


def test_the_callback_in_a_trainer_of_transformers(tokenizer, tmp_path):
    callback = qlorapp.EvalGenerate(ASKED, max_new_tokens=24)
    trainer, values = trained(transformers.Trainer, tmp_path / "with", tokenizer, [callback])
    check_run(trainer, tmp_path / "with", callback)
    _, plain = trained(transformers.Trainer, tmp_path / "without", tokenizer, [])
    assert all(torch.equal(values[name], plain[name]) for name in plain)


def test_the_callback_in_an_sft_trainer(tokenizer, tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in SAID])
    callback = qlorapp.EvalGenerate(ASKED, max_new_tokens=24)
    trainer = qlorapp.SFTTrainer(
        adapted(), arguments(qlorapp.SFTConfig, tmp_path, bf16=False), train_dataset=rows, eval_dataset=rows, processing_class=tokenizer,
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    check_run(trainer, tmp_path, callback)
    assert answers(tmp_path)[-1]["expected"] == SAID[4]["messages"][1]["content"]


def test_several_data_sets_are_asked_apart(tokenizer, tmp_path):
    rows, callback = labeled(tokenizer), qlorapp.EvalGenerate(2, max_new_tokens=4)
    trainer = qlorapp.Trainer(
        adapted(), arguments(qlorapp.TrainingArguments, tmp_path, max_steps=2, eval_steps=1), train_dataset=rows,
        eval_dataset={"a": rows, "b": rows[:3]}, processing_class=tokenizer, callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert [(one["step"], one["data"]) for one in answers(tmp_path)] == [(s, d) for s in (1, 2) for d in "aabb"]
    assert {"eval_a_exact_match", "eval_b_stopped"} <= {name for entry in trainer.state.log_history for name in entry}


def test_the_callback_says_what_it_leaves_out(tokenizer, tmp_path, caplog):
    whole = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in labeled(tokenizer)]
    options = {"max_steps": 1, "eval_steps": 1, "save_strategy": "no"}
    with caplog.at_level("INFO", logger="qlorapp"):
        for given, rows in ((tokenizer, whole), (None, labeled(tokenizer))):
            callback = qlorapp.EvalGenerate(2)
            trainer = qlorapp.Trainer(
                adapted(), arguments(qlorapp.TrainingArguments, tmp_path, **options), train_dataset=rows, eval_dataset=rows,
                processing_class=given, callbacks=[callback],
            )  # fmt: skip
            trainer.train()
            assert callback.comparison["answers"] == 0 and callback.comparison["adapter"]["eval_loss"] > 0
    assert "have no prompt" in caplog.text and "no processing_class" in caplog.text
    with pytest.raises(ValueError, match="answers must be >= 0"):
        qlorapp.EvalGenerate(-1)


SCRIPT = """
import gc, os, sys
sys.path.insert(0, {tests!r})
import qlorapp, torch
from tiny_trainer import TINY, adapted, base_model, made, rows, tokenizer
model = adapted(base_model(str(TINY), device_map="cpu", **({{"base_sharding": "full"}} if sys.argv[2] == "full" else {{}})))
more = {{"eval_dataset": rows(8, seed=4), "callbacks": [qlorapp.EvalGenerate(3, max_new_tokens=4)], "processing_class": tokenizer()}}
options = {{"max_steps": 4, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4}}
trainer = made(qlorapp.Trainer, str(TINY), sys.argv[1], more=more, model=model, ddp_backend="gloo", **options)
trainer.train()
del trainer
gc.collect()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("sharding", ["no", "full"])
def test_the_callback_in_two_processes(tmp_path, sharding):
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests/python")))
    done = forked(2, script, out, sharding)
    report = json.loads((out / "run_report.json").read_text())
    assert report["outcome"] == "finished"
    if sharding == "full":
        assert not (out / FILE).exists() and "comparison" not in report
        return
    assert done.stdout.count("base against adapter") == 1
    assert [one["step"] for one in answers(out)] == [2, 2, 2, 4, 4, 4]
    assert report["comparison"]["adapter"]["eval_loss"] == pytest.approx(
        [
            entry
            for entry in json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
            if "eval_loss" in entry
        ][-1]["eval_loss"],
        rel=1e-4,
    )
