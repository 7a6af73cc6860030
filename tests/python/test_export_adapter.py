# SPDX-License-Identifier: Apache-2.0
"""Adapters as GGUF files over bases of others, and folders for Ollama."""

import json
import re
import shutil

import gguf
import go_template
import numpy
import peer
import peft
import pytest
import qlorapp
import torch
import transformers
from llama_cpp import LlamaCpp
from test_export_gguf import CASES, IDS, TINY, VOCABULARY, export, write

ROUNDS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Then?"},
]


def adapted(folder, seed=2, **options):
    """PEFT's model over the folder; its adapter is in `folder`-adapter."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peer.add_adapters(base, seed, **options).eval()
    path = folder.with_name(folder.name + "-adapter")
    model.save_pretrained(path)
    return model, path


def distance(theirs, model, counts=(5, 14, 31)):
    """Largest difference of log-probabilities behind some rows, and how many were compared."""
    worst, compared = 0.0, 0
    for count in counts:
        found = theirs.next_token(IDS[:count], VOCABULARY)
        if found is None:
            continue
        found = torch.from_numpy(found)
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([IDS[:count]])).logits[0, -1].log_softmax(-1)
        worst = max(worst, (expected - found)[~found.isnan()].abs().max().item())
        compared += 1
    return worst, compared


@pytest.mark.parametrize("case", ["Llama", "Qwen3", "Gemma 3", "Phi-3 without windows", "GLM-4", "Granite", "Llama 3"])
def test_llama_cpp_runs_the_adapter_over_the_base(case, tmp_path):
    """Whose file another program may have made; equal to PEFT, and to the merged file."""
    folder = write(tmp_path / "model", **CASES[case])
    model, adapter = adapted(folder)
    export(folder, gguf=tmp_path / "base.gguf", type="F32")
    assert export(folder, adapter=adapter, gguf_adapter=tmp_path / "a.gguf") == str(tmp_path / "a.gguf")
    export(folder, adapter=adapter, gguf=tmp_path / "merged.gguf", type="F32")
    bound = 2e-2 if "Gemma" in case else 1e-4
    for theirs in (LlamaCpp(tmp_path / "base.gguf", adapter=tmp_path / "a.gguf"), LlamaCpp(tmp_path / "merged.gguf")):
        worst, compared = distance(theirs, model)
        assert worst <= bound and compared >= 1
    with model.disable_adapter():
        changed, _ = distance(LlamaCpp(tmp_path / "base.gguf", adapter=tmp_path / "a.gguf"), model)
    assert changed > 10 * bound


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True, "lora_alpha": 3},
        {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5}, "alpha_pattern": {"o_proj": 40}},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ],
    ids=["rslora", "patterns", "tables"],
)
def test_scales_are_in_the_file(options, tmp_path):
    folder = write(tmp_path / "model", num_key_value_heads=2)
    model, adapter = adapted(folder, **options)
    for parameter in (p for name, p in model.named_parameters() if "lora_embedding_B" in name):
        assert parameter.abs().max() > 0
    export(folder, adapter=adapter, gguf_adapter=tmp_path / "a.gguf")
    (tmp_path / "config").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "config")  # is enough
    if "embed_tokens" in options.get("target_modules", ()):  # but to compare the table that PEFT saves beside its adapter
        with pytest.raises(qlorapp.FormatError, match="low-rank matrices alone.*base_layer"):
            export(tmp_path / "config", adapter=adapter, gguf_adapter=tmp_path / "b.gguf")
    else:
        export(tmp_path / "config", adapter=adapter, gguf_adapter=tmp_path / "b.gguf")
        data = [gguf.GGUFReader(tmp_path / name).tensors for name in ("a.gguf", "b.gguf")]
        assert all(a.name == b.name and numpy.array_equal(a.data, b.data) for a, b in zip(*data, strict=True))
    export(folder, gguf=tmp_path / "base.gguf", type="F32")
    worst, compared = distance(LlamaCpp(tmp_path / "base.gguf", adapter=tmp_path / "a.gguf"), model)
    assert worst <= 1e-4 and compared >= 1


def test_a_smaller_file_and_its_command(tmp_path):
    folder = write(tmp_path / "model")
    _, adapter = adapted(folder)
    command = ("export", "--verify", "false", "--model", folder, "--adapter", adapter, "--gguf_adapter")
    peer.run_cli(*command, tmp_path / "a.gguf")
    peer.run_cli(*command, tmp_path / "b.gguf", "--type", "F16")
    wide, half = ({t.name: t.data for t in gguf.GGUFReader(tmp_path / name).tensors} for name in ("a.gguf", "b.gguf"))
    assert wide.keys() == half.keys() and all(numpy.array_equal(half[name], wide[name].astype(numpy.float16)) for name in wide)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "low-rank matrices alone.*lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "low-rank matrices alone.*lm_head"),
        ({"lora_bias": True, "biases": True}, r"low-rank matrices alone.*lora_B\.bias"),
        ({"tie": True, "target_modules": ["q_proj", "embed_tokens"]}, "tables that embedding and head share"),
    ],
)
def test_what_such_a_file_does_not_hold_is_refused(options, reason, tmp_path):
    biases = options.pop("biases", False)
    folder = write(tmp_path / "model", tie_word_embeddings=options.pop("tie", False), attention_bias=biases, mlp_bias=biases)
    _, adapter = adapted(folder, **options)
    with pytest.raises(qlorapp.FormatError, match=reason):
        export(folder, adapter=adapter, gguf_adapter=tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()
    export(folder, adapter=adapter, gguf=tmp_path / "merged.gguf", type="F32")  # the way out that it names
    assert (
        distance(LlamaCpp(tmp_path / "merged.gguf"), peft.AutoPeftModelForCausalLM.from_pretrained(adapter).eval())[0] <= 1e-4
    )


def settings(folder):
    """The template of a Modelfile, and its other lines."""
    text = (folder / "Modelfile").read_text()
    template = re.search(r'^TEMPLATE """(.*?)"""$', text, re.M | re.S)[1]
    return template, text


def test_ollama_gets_template_and_stops(tmp_path):
    peer.run_cli("export", "--verify", "false", "--model", TINY, "--ollama", tmp_path / "o", "--type", "Q8_0")
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["MANIFEST.json", "Modelfile", "model.gguf"]
    template, text = settings(tmp_path / "o")
    assert "FROM ./model.gguf\n" in text and 'PARAMETER stop "<|eot_id|>"' in text
    theirs, tokenizer = LlamaCpp(tmp_path / "o" / "model.gguf"), transformers.AutoTokenizer.from_pretrained(TINY)
    for first in (0, 1):
        for count in (2, 4, 6):
            messages = ROUNDS[first:count]
            # Ollama tokenizes with the special token in front that the file asks for.
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert theirs.tokenize(go_template.render(template, messages)) == expected


#: Named templates whose conversations have no form in Ollama's language.
NO_FORM = set()


def test_every_named_template_has_its_form(tmp_path):
    with pytest.raises(ValueError, match="must be one of") as error:
        export(TINY, ollama=tmp_path / "o", chat_template="none")
    names = re.search(r"one of \[(.*?)\]", str(error.value))[1].split(", ")
    tokenizer, refused, with_system = transformers.AutoTokenizer.from_pretrained(TINY), set(), 0
    for name in names:
        folder = tmp_path / name
        try:
            export(TINY, ollama=folder, type="F16", chat_template=name)
        except qlorapp.FormatError as reason:
            assert "cannot be written in Ollama's language" in str(reason) and not folder.exists()
            refused.add(name)
            continue
        template, text = settings(folder)
        source = gguf.GGUFReader(folder / "model.gguf").fields["tokenizer.chat_template"].contents()
        for messages in (ROUNDS[first:count] for first in (0, 1) for count in (2, 4, 6)):
            if messages[0]["role"] == "system" and "SYSTEM changes nothing" in text:
                continue
            expected = tokenizer.apply_chat_template(messages, chat_template=source, add_generation_prompt=True, tokenize=False)
            assert go_template.render(template, messages) == expected.removeprefix(tokenizer.bos_token), name
            with_system += messages[0]["role"] == "system"
    assert refused == NO_FORM and with_system > 60


def test_an_adapter_over_a_model_of_ollama(tmp_path):
    folder = write(tmp_path / "model")
    _, adapter = adapted(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}))
    export(folder, adapter=adapter, ollama=tmp_path / "o", ollama_base="llama3.2:1b")
    text = (tmp_path / "o" / "Modelfile").read_text()
    assert "FROM llama3.2:1b\nADAPTER ./adapter.gguf\n" in text
    assert {"PARAMETER temperature 0.6", "PARAMETER top_p 0.9", "PARAMETER repeat_penalty 1.05"} <= set(text.splitlines())
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == ["MANIFEST.json", "Modelfile", "adapter.gguf"]


def test_bad_input(tmp_path):
    folder = write(tmp_path / "model")
    _, adapter = adapted(folder)
    with pytest.raises(ValueError, match="needs one of .gguf, gguf_adapter, ollama, merged, adapter_for.; got none"):
        export(folder)
    with pytest.raises(ValueError, match="needs one of .*got .gguf, merged."):
        export(folder, adapter=adapter, gguf=tmp_path / "a", merged=tmp_path / "b")
    with pytest.raises(ValueError, match="gguf_adapter needs an adapter"):
        export(folder, gguf_adapter=tmp_path / "a")
    with pytest.raises(ValueError, match="ollama_base has a use with ollama alone; got gguf"):
        export(folder, gguf=tmp_path / "a", ollama_base="x")
    with pytest.raises(ValueError, match="type of an adapter must be F32, F16 or BF16; got 'Q8_0'"):
        export(folder, adapter=adapter, gguf_adapter=tmp_path / "a", type="Q8_0")
    other = write(tmp_path / "other", hidden_size=128)
    with pytest.raises(qlorapp.FormatError, match="must be of a weight of shape"):
        export(other, adapter=adapter, gguf_adapter=tmp_path / "a")
    silent = shutil.copytree(folder, tmp_path / "silent")
    (silent / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}{{ messages | length }}"
    )
    with pytest.raises(qlorapp.FormatError, match="cannot be written in Ollama's language: what it writes around"):
        export(silent, ollama=tmp_path / "o")
    assert not {"a", "b", "o"} & {path.name for path in tmp_path.iterdir()}
