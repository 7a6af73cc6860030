# SPDX-License-Identifier: Apache-2.0
"""Whether an exported form is the trained model, and what is said where it is not."""

import json
import math
import shutil

import peer
import pytest
import qlorapp
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_at_the_door import cached, through_python
from test_export_adapter import adapted
from test_export_gguf import CASES, TINY, export, write


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The bundled model, an adapter that changes it, and every form of both."""
    folder = tmp_path_factory.mktemp("verify")
    shutil.copytree(TINY, folder / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    peer.add_adapters(base, r=4, lora_alpha=64).save_pretrained(folder / "adapter")
    options = {"adapter": folder / "adapter"}
    export(folder / "model", **options, gguf=folder / "f32.gguf", type="F32")
    export(folder / "model", **options, gguf=folder / "q8.gguf", type="Q8_0")
    export(folder / "model", **options, gguf_adapter=folder / "adapter.gguf")
    export(folder / "model", **options, merged=folder / "merged")
    export(folder / "model", **options, adapter_for="vllm", output=folder / "served")
    export(folder / "model", gguf=folder / "base.gguf", type="F32")
    return folder


def verified(trained, *forms, **options):
    found = qlorapp.verify_export(trained / "adapter", *forms, base=trained / "model", **{"load_in_4bit": False, **options})
    return found, [one["causes"] for one in found["forms"]]


def test_every_form_is_the_trained_model(trained):
    forms = [trained / name for name in ("f32.gguf", "q8.gguf", "adapter.gguf", "merged", "served")]
    found, causes = verified(trained, *forms, data=TINY.parent / "eval.jsonl")
    assert found["holds"] and not any(causes)
    exact, rounded, *others = found["forms"][1:]
    for one in (exact, *others):
        merged = one["path"].endswith("merged")  # into bfloat16
        assert (
            one["kl_divergence"] < (1e-3 if merged else 1e-5)
            and one["same_first_token"] == one["prompts"] == one["same_ids"] == 8
        )
        assert one["same_greedy_tokens"] > 0.95
        assert abs(one["loss"] - found["forms"][0]["loss"]) < (0.02 if merged else 1e-4)
        assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))
    assert 0 < rounded["kl_divergence"] < 0.1 and "q8_0" in rounded["kind"]


def test_numbers_are_those_of_transformers_and_peft(trained):
    """The divergence of the four-bit model from the merged one, over the greedy answers of the former."""
    found, _ = verified(trained, trained / "merged", load_in_4bit=True, prompts=["Hello!"], max_new_tokens=8)
    four_bits = qlorapp.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    base = qlorapp.AutoModelForCausalLM.from_pretrained(trained / "model", dtype=torch.float32, quantization_config=four_bits)
    own = qlorapp.PeftModel.from_pretrained(base, trained / "adapter").eval()
    other = transformers.AutoModelForCausalLM.from_pretrained(trained / "merged", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot_id|>")]
    with torch.no_grad():
        answer = own.generate(input_ids=ids, max_new_tokens=8, do_sample=False, eos_token_id=ends)
        p, q = (m(input_ids=answer).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1) for m in (own, other))
    expected = (p.exp() * (p - q)).sum(-1).mean().item()
    assert abs(found["forms"][1]["kl_divergence"] - expected) <= 1e-3 * expected + 1e-6


def test_what_is_off_is_named(trained, tmp_path):
    def changed(name, text):
        folder = shutil.copytree(trained / "merged", tmp_path / name)
        text(folder)
        return folder

    def rewrite(file, old, new):
        def change(folder):
            text = (folder / file).read_text()
            assert old in text
            (folder / file).write_text(text.replace(old, new))

        return change

    def noise(folder):
        tensors = load_file(folder / "model.safetensors")
        torch.manual_seed(1)
        save_file(
            {name: tensor + torch.randn_like(tensor) for name, tensor in tensors.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )

    template = changed(
        "template",
        lambda folder: (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}"),
    )

    def other_ends(folder):
        rewrite("chat_template.jinja", "<|eot_id|>", "<|end_of_text|>")(folder)
        end = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|end_of_text|>")
        for name in ("config.json", "generation_config.json"):
            fields = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**fields, "eos_token_id": end}))

    ends = changed("ends", other_ends)
    other = changed("noise", noise)
    half = shutil.copytree(trained / "adapter", tmp_path / "half")
    tensors = load_file(half / "adapter_model.safetensors")
    save_file(
        {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in tensors.items()},
        half / "adapter_model.safetensors",
        {"format": "pt"},
    )
    found, causes = verified(trained, template, other, trained / "base.gguf", half, ends)
    assert not found["holds"] and not causes[0]
    assert causes[1][0].startswith("template: prompt 1 is rendered otherwise from character")
    assert causes[2][0].startswith("weights: the divergence is")
    assert causes[3][0].startswith("adapter: answers are those of the base")
    assert causes[4][0].startswith("adapter: answers are those of the base")
    assert [cause.split(":")[0] for cause in causes[5]] == ["template", "EOS"]
    nothing = qlorapp.verify_export(half, trained / "base.gguf", base=trained / "model", load_in_4bit=False)
    assert nothing["forms"][0]["causes"][0].startswith("the adapter changes nothing") and not nothing["holds"]


def test_the_precision_of_the_base_is_named(tmp_path):
    """Where rounding to four bits makes another model: its logits are large."""
    folder = write(tmp_path / "model", hidden_size=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(400)
    model.save_pretrained(folder)
    _, adapter = adapted(folder)
    for base in ("original", "dequantized"):
        export(folder, adapter=adapter, merged=tmp_path / base, base=base)
    options = {"base": folder, "prompts": ["Hello!", "Hi", "Why?"]}
    for load_in_4bit, other, right in ((True, "original", "dequantized"), (False, "dequantized", "original")):
        found = qlorapp.verify_export(adapter, tmp_path / other, tmp_path / right, load_in_4bit=load_in_4bit, **options)
        off, good = found["forms"][1:]
        assert not good["causes"] and off["kl_divergence"] > 0.5
        assert len(off["causes"]) == 1 and off["causes"][0].startswith("base precision: the divergence is")
        assert f"base {right}" in off["causes"][0]


def test_tensors_that_a_form_lacks_are_named(trained, tmp_path):
    folder = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    layers = [name for name in config["target_modules"] if name != "o_proj"]
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": layers}))
    tensors = load_file(folder / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "o_proj" not in name}
    save_file(kept, folder / "adapter_model.safetensors", {"format": "pt"})
    found, causes = verified(trained, folder, prompts=["Hi"])
    missing = len(tensors) - len(kept)
    assert not found["holds"] and missing > 0
    assert causes[1][0].startswith(f"adapter: {missing} of the reference's {len(tensors)} tensors are missing: base_model")
    assert "o_proj" in causes[1][0]


def test_answers_that_memory_cannot_hold_are_refused(trained):
    with pytest.raises(ValueError, match="prompts of 1000000000 new tokens need .* Take fewer prompts"):
        verified(trained, trained / "f32.gguf", max_new_tokens=10**9)


@pytest.mark.parametrize("case", ["Llama", "Granite 4", "Phi-3 without windows", "GLM-4"])
def test_an_adapter_as_a_file_is_read_back(case, tmp_path):
    """Also where the file holds a layer in halves, or its rows in another order."""
    folder = write(tmp_path / "model", **CASES[case])
    _, adapter = adapted(folder)
    export(folder, adapter=adapter, gguf_adapter=tmp_path / "a.gguf")
    found = qlorapp.verify_export(adapter, tmp_path / "a.gguf", base=folder, load_in_4bit=False, prompts=["Hi"])
    assert found["holds"] and found["forms"][1]["kl_divergence"] < 1e-6 and found["forms"][1]["same_greedy_tokens"] == 1


def test_a_form_that_cannot_be_read_is_named_beside_the_others(trained, tmp_path):
    (tmp_path / "cut.gguf").write_bytes((trained / "f32.gguf").read_bytes()[:1000])
    found, causes = verified(trained, tmp_path / "cut.gguf", trained / "f32.gguf", prompts=["Hi"])
    assert not found["holds"] and causes[1][0].startswith("cannot be read: [") and "cut.gguf" in causes[1][0]
    assert found["forms"][2]["same_ids"] == 1 and not causes[2]


@pytest.mark.parametrize("target", [{"gguf": "a.gguf"}, {"ollama": "o"}, {"ollama": "p", "ollama_base": "some:model"}])
def test_the_template_that_was_asked_for_is_the_right_one(trained, tmp_path, target):
    template = tmp_path / "other.jinja"
    template.write_text((trained / "model" / "chat_template.jinja").read_text().replace("<|eot_id|>", "<|eot_id|>\n"))
    path = tmp_path / next(iter(target.values()))
    options = {**target, next(iter(target)): path, "chat_template": str(template)}
    if "ollama_base" not in options:
        options["type"] = "Q8_0"
    qlorapp.export(trained / "model", adapter=trained / "adapter", **options)
    receipt = json.loads(path.with_name(path.name + ".verify.json").read_text())
    assert receipt["holds"] and receipt["forms"][1]["same_texts"] == 8


def hub(trained, tmp_path):
    """The same folders under names."""
    for name in ("adapter", "model"):
        cached(tmp_path / "hub", "models", f"some/{name}", (trained / name).iterdir())
    cached(tmp_path / "hub", "datasets", "some/rows", [TINY.parent / "eval.jsonl"])
    return tmp_path / "hub"


def test_the_command_prints_writes_and_fails(trained, tmp_path):
    good = ("verify-export", trained / "adapter", trained / "f32.gguf", "--model", trained / "model", "--load_in_4bit", "false")
    shown = peer.run_cli(*good, "--receipt", tmp_path / "r.json").stdout
    assert "every form is the trained model" in shown and "f32.gguf" in shown
    receipt = json.loads((tmp_path / "r.json").read_text())
    assert receipt["holds"] and receipt["reference"] == str(trained / "adapter") and len(receipt["forms"]) == 2
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"prompt": "Why?"}\nplain text\n')
    bad = peer.run_cli(
        "verify-export",
        trained / "adapter",
        trained / "base.gguf",
        "--model",
        trained / "model",
        "--prompts",
        rows,
        check=False,
    )
    assert bad.returncode == 1 and "off: adapter:" in bad.stdout and "NOT the trained model" in bad.stdout
    assert json.loads((trained / "base.gguf.verify.json").read_text())["forms"][1]["prompts"] == 3
    named = through_python(
        *("verify-export", "some/adapter", trained / "f32.gguf", "--model", "some/model", "--load_in_4bit", "false"),
        *("--data", "some/rows", "--receipt", tmp_path / "n.json"),
        HF_HUB_CACHE=str(hub(trained, tmp_path)),
    )
    assert named.returncode == 0 and "perplexity" in named.stdout, named.stderr
    assert json.loads((tmp_path / "n.json").read_text())["forms"][1]["perplexity"] > 1
    few = peer.run_cli("verify-export", trained / "adapter", check=False)
    assert few.returncode == 2 and "needs the trained model and what was exported" in few.stderr


@pytest.mark.parametrize("target", [{"gguf": "a.gguf"}, {"ollama": "o"}, {"merged": "m"}, {"gguf_adapter": "l.gguf"}])
def test_export_verifies_what_it_wrote(trained, tmp_path, target, caplog):
    (name, path), *_ = target.items()
    written = qlorapp.export(trained / "model", adapter=trained / "adapter", **{name: tmp_path / path})
    receipt = json.loads((tmp_path / f"{path}.verify.json").read_text())
    assert receipt["holds"] and receipt["forms"][1]["prompts"] == 8 and written == str(tmp_path / path)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    command = ("export", "--model", trained / "model", "--adapter", trained / "adapter", f"--{name}", tmp_path / f"c-{path}")
    assert "every form is the trained model" in peer.run_cli(*command).stdout
