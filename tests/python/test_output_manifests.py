# SPDX-License-Identifier: Apache-2.0
"""What `inspect` knows of an adapter, a four-bit and a merged folder, and whether an adapter lies over its base."""

import hashlib
import json
import shutil

import pytest
import qlorapp as package
import torch
from safetensors.torch import load_file, save_file
from tiny_run import qlorapp, write_model, write_rows
from transformers import LlamaForCausalLM

OURS = {"MANIFEST.json", "qlorapp_base.json"}
OTHER_BASE = "was trained on another base"
OTHER_BYTES = "of the same form with other bytes"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """model, rows.jsonl, adapter, four-bit, merged."""
    root = tmp_path_factory.mktemp("manifests")
    write_model(root / "model")
    write_rows(root / "rows.jsonl")
    run("train", root, "--output", root / "adapter", "--max_steps", 2, "--r", 4, "--learning_rate", 1e-2)
    run("quantize", root, "--output", root / "four-bit", data=False)
    run("merge", root, "--adapter", root / "adapter", "--output", root / "merged", data=False)
    return root


def run(command, root, *more, model="model", data=True, code=0):
    words = [command, "--model", root / model, *(["--data", root / "rows.jsonl"] if data else []), *more]
    if command in ("eval", "generate"):
        words += ["--device", "cpu"]
    result = qlorapp(*words)
    assert result.returncode == code, result.stderr
    return result


def inspected(folder, code):
    result = qlorapp("inspect", folder)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def copied(folder, to):
    return shutil.copytree(folder, to / folder.name)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # a low bit of a weight: finite
    path.write_bytes(content)


KINDS = {"adapter": "adapter_model.safetensors", "four-bit": "model.safetensors", "merged": "model.safetensors"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_is_that_of_the_files(made, kind):
    folder = made / kind
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert manifest["kind"] == "output" and KINDS[kind] in manifest["files"]
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"])
    assert {"README.md"} < set(manifest["files"]) if kind == "adapter" else "tokenizer.json" in manifest["files"]
    assert "whole" in inspected(folder, 0).splitlines()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_of_the_weights_is_damage(made, tmp_path, kind):
    folder = copied(made / kind, tmp_path)
    flip(folder / KINDS[kind])
    out = inspected(folder, 1)
    assert "DAMAGED" in out and f"{KINDS[kind]}: its bytes from 0 on were changed" in out


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_a_user_edits_or_adds_are_named_and_no_damage(made, tmp_path, kind):
    folder = copied(made / kind, tmp_path)
    config = folder / ("adapter_config.json" if kind == "adapter" else "config.json")
    config.write_text(json.dumps(json.loads(config.read_text())))
    (folder / "README.md").write_text("mine")
    (folder / "added.json").write_text("{}")
    out = inspected(folder, 0)
    edited = [config.name] if kind != "adapter" else ["README.md", config.name]
    assert f"[{', '.join(edited)}]" in next(line for line in out.splitlines() if "changed since" in line)
    assert "whole" in out.splitlines()[0]
    if kind == "adapter":
        assert not run("eval", made, "--adapter", folder).stderr
    else:
        assert not run("eval", made, model=folder).stderr


@pytest.mark.parametrize("harm", ["flip", "cut", "key"])
def test_a_damaged_manifest_is_damage_and_stops_no_reader(made, tmp_path, harm):
    folder = copied(made / "adapter", tmp_path)
    text = (folder / "MANIFEST.json").read_text()
    changed = {"flip": text.replace('"size": ', '"size": 1', 1), "cut": text[:-30], "key": text.replace('"kind"', '"kinb"')}
    (folder / "MANIFEST.json").write_text(changed[harm])
    assert "MANIFEST.json" in inspected(folder, 1)
    assert "MANIFEST.json" in run("eval", made, "--adapter", folder).stderr


def test_a_folder_without_checksums_is_not_called_whole(made, tmp_path):
    assert "no damage found, not verifiable" in inspected(made / "model", 0)
    folder = copied(made / "adapter", tmp_path)
    (folder / "MANIFEST.json").unlink()
    assert "not verifiable" in inspected(folder, 0) and not run("eval", made, "--adapter", folder).stderr


def test_weights_that_another_program_saved_are_read_with_a_warning(made, tmp_path):
    folder = copied(made / "adapter", tmp_path)
    tensors = load_file(folder / KINDS["adapter"])
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / KINDS["adapter"])
    warned = run("eval", made, "--adapter", folder).stderr
    assert warned.count("\n") == 1 and "another program saved it" in warned and "remove MANIFEST.json" in warned


def test_a_manifest_is_not_copied_into_another_model(made, tmp_path):
    run("quantize", made, "--output", tmp_path / "again", model="merged", data=False)
    assert (
        hashlib.sha256((tmp_path / "again/model.safetensors").read_bytes()).hexdigest()
        in (tmp_path / "again/MANIFEST.json").read_text()
    )
    assert not (tmp_path / "again/qlorapp_base.json").exists()


def test_pythons_saves_have_manifests_that_fit(made, tmp_path):
    model = package.AutoModelForCausalLM.from_pretrained(made / "model", load_in_4bit=True)
    model.save_pretrained(tmp_path / "base")
    peft = package.get_peft_model(model, package.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for _ in range(2):  # the second replaces the first
        peft.save_pretrained(tmp_path / "adapter")
        assert "whole" in inspected(tmp_path / "adapter", 0).splitlines()[0]
        with torch.no_grad():
            next(p for name, p in peft.named_parameters() if "lora_B" in name).fill_(0.1)
    assert set(OURS) <= {path.name for path in (tmp_path / "adapter").iterdir()}
    assert not run("eval", made, "--adapter", tmp_path / "adapter").stderr
    assert "DAMAGED" not in inspected(tmp_path / "base", 0)
    package.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


# --- the base of an adapter


@pytest.fixture(scope="module")
def bases(made):
    """The same base in other forms, and others of its shape."""
    model = LlamaForCausalLM.from_pretrained(made / "model")
    for name, dtype in {"half": torch.float16, "brain": torch.bfloat16, "single": torch.float32}.items():
        shutil.copytree(made / "model", made / name, ignore=shutil.ignore_patterns("*.safetensors*"))
        model.to(dtype).save_pretrained(made / name)
        model = LlamaForCausalLM.from_pretrained(made / "model")
    torch.manual_seed(9)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(torch.randn_like(model.model.layers[0].mlp.up_proj.weight) * 0.02)
        shutil.copytree(made / "model", made / "merged-over", ignore=shutil.ignore_patterns("*.safetensors*"))
        model.save_pretrained(made / "merged-over", max_shard_size="200KB")
        model.model.embed_tokens.weight.mul_(1.05)
        shutil.copytree(made / "model", made / "sibling", ignore=shutil.ignore_patterns("*.safetensors*"))
        model.save_pretrained(made / "sibling")
    return made


@pytest.mark.parametrize("base", ["model", "four-bit", "half", "brain", "single"])
def test_the_same_base_in_any_form_is_not_named(bases, base, tmp_path):
    for more in ([], ["--dtype", "bfloat16"], ["--load_in_4bit", "false"]):
        if base == "four-bit" and more[:1] == ["--load_in_4bit"]:
            continue
        assert "base" not in run("eval", bases, "--adapter", bases / "adapter", *more, model=base).stderr
    merged = run("merge", bases, "--adapter", bases / "adapter", "--output", tmp_path / "m", model=base, data=False)
    assert "base" not in merged.stderr


def test_another_base_is_named_by_every_command(bases, tmp_path):
    more = ["--adapter", bases / "adapter"]
    checkpoint = ["--adapter", bases / "with checkpoints/checkpoint-1"]
    run("train", bases, "--output", bases / "with checkpoints", "--max_steps", 1, "--save_steps", 1, "--r", 4)
    for said in (
        run("eval", bases, *more, model="sibling"),
        run("eval", bases, *checkpoint, model="sibling"),
        run("generate", bases, *more, "--prompt", "a", "--max_new_tokens", 1, model="sibling", data=False),
        run("merge", bases, *more, "--output", tmp_path / "m", model="sibling", data=False),
    ):
        assert said.stderr.count("\n") == 1 and OTHER_BASE in said.stderr and "model.embed_tokens.weight[" in said.stderr


def test_a_base_whose_linear_layers_changed_is_named_where_it_is_stored_alike(bases):
    assert OTHER_BYTES in run("eval", bases, "--adapter", bases / "adapter", model="merged-over").stderr


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": 2, "sample": []}', '{"schema": 1, "sample": [["a", -1, 0, 1]]}', "x"])
def test_a_broken_name_of_the_base_is_refused_by_file(made, tmp_path, text):
    folder = copied(made / "adapter", tmp_path)
    (folder / "qlorapp_base.json").write_text(text)
    assert f"{folder}/qlorapp_base.json]" in run("eval", made, "--adapter", folder, code=2).stderr


def test_an_adapter_in_the_hugging_face_cache_is_whole_and_knows_its_base(bases, tmp_path):
    snapshot, blobs = tmp_path / "hub/snapshots/1", tmp_path / "hub/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted((bases / "adapter").iterdir())):
        if file.is_file():
            shutil.copy(file, blobs / f"{i:040x}")
            (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    assert "whole" in inspected(snapshot, 0).splitlines()[0]
    assert not run("eval", bases, "--adapter", snapshot).stderr
    assert OTHER_BASE in run("eval", bases, "--adapter", snapshot, model="sibling").stderr
    (snapshot / "adapter_model.safetensors").unlink()
    (tmp_path / "elsewhere").write_bytes((bases / "adapter" / "adapter_model.safetensors").read_bytes())
    (snapshot / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "a link" in inspected(snapshot, 1)


def test_a_damaged_checkpoint_is_not_read_under_another_name_either(made, tmp_path):
    run("train", made, "--output", tmp_path / "out", "--max_steps", 2, "--save_steps", 1, "--r", 4)
    best = shutil.copytree(tmp_path / "out/checkpoint-2", tmp_path / "best")
    assert not run("eval", made, "--adapter", best).stderr
    flip(best / "adapter_model.safetensors")
    assert "is damaged" in run("eval", made, "--adapter", best, code=2).stderr
    manifest = best / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"size": ', '"size": 1', 1))
    assert "was changed after it was written" in run("eval", made, "--adapter", best, code=2).stderr


def test_what_transformers_trainer_writes_in_an_adapter_again_has_no_old_base(made, tmp_path):
    """A folder that had a described base and gets an adapter without one."""
    folder = copied(made / "adapter", tmp_path)
    plain = LlamaForCausalLM.from_pretrained(made / "model")
    config = package.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = package.get_peft_model(plain, config)
    model.save_pretrained(folder)
    assert not (folder / "qlorapp_base.json").exists()
    out = inspected(folder, 0)
    assert "whole" in out.splitlines()[0] and "qlorapp_base.json" not in out
