# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPOTrainer over a four-bit model: rollout and training pass have the same log-probabilities, so the first importance ratio is 1."""

import datasets
import peer
import pytest
import qlorapp
import torch
import transformers
import trl
from qlorapp.hf.forward import engine_of
from tiny_trainer import NF4, adapted, losses, tokenizer

NEW = 24
PROMPTS = [f"What is item {i}? " + "Think. " * (i % 3) for i in range(8)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    peer.write_llama(path, vocab_size=704, num_hidden_layers=2, bos_token_id=694, eos_token_id=695, max_position_embeddings=512)
    return path


def four_bit(folder, dtype=torch.float32):
    return qlorapp.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=qlorapp.BitsAndBytesConfig(**NF4)
    )


def dequantized(folder):
    """transformers' model and layers, with the values of the four-bit weights."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, layer in four_bit(folder).named_modules():
        if isinstance(layer, qlorapp.nn.Linear4bit):
            model.get_submodule(name).weight.data = layer.dequantize().float()
    return model.requires_grad_(False)


def reasons(model):
    """Why transformers' forward ran. TRL replaces model.forward."""
    return engine_of(model.get_base_model())._told


def trainer_of(model, out, reward, **options):
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 8, "max_completion_length": 12, "max_steps": 3,
                "learning_rate": 1e-3, "use_cpu": True, "bf16": False, "use_vllm": False, "logging_steps": 1, "save_strategy": "no",
                "report_to": "none", "disable_tqdm": True}  # fmt: skip
    args = trl.GRPOConfig(output_dir=str(out), **{**settings, **options})
    data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    return trl.GRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer())


def even_tokens(completion_ids, **columns):
    """Varies within a group."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def rollout_and_training_pass(model):
    """(rollout's logits (rows, NEW, V), those of the training pass, sampled ids, the whole rows): prompts with left padding, eight times each."""
    made = tokenizer()
    prompts = made([prompt for prompt in PROMPTS[:2] for _ in range(8)], return_tensors="pt", padding=True, padding_side="left")
    rollout = model.generate(
        **prompts, do_sample=True, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=made.pad_token_id,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    mask = torch.cat([prompts["attention_mask"], torch.ones(16, NEW, dtype=torch.long)], 1)
    row = {"input_ids": rollout.sequences, "attention_mask": mask}
    trained = model(**row).logits[:, -NEW - 1 : -1]
    assert trained.requires_grad and not reasons(model)
    return torch.stack(rollout.logits, 1), trained.detach().float(), rollout.sequences[:, -NEW:], row


def test_float32_log_probs_are_equal(folder):
    torch.manual_seed(4)
    rollout, trained, ids, _ = rollout_and_training_pass(adapted(four_bit(folder)).train())
    assert len(ids.unique(dim=0)) == 16
    torch.testing.assert_close(rollout.log_softmax(-1), trained.log_softmax(-1), rtol=0, atol=1e-5)


def test_bfloat16_differs_by_its_roundings(folder):
    """Attention sums in another order for one token than for a row. The difference is smaller than the error of bfloat16 itself."""
    torch.manual_seed(4)
    rollout, trained, ids, row = rollout_and_training_pass(adapted(four_bit(folder, torch.bfloat16)).train())
    with torch.no_grad():
        exact = adapted(four_bit(folder))(**row).logits[:, -NEW - 1 : -1]
    error = (trained - exact).square().mean()
    assert (rollout - trained).square().mean() < error / 2
    assert (rollout - exact).square().mean() < 1.1 * error
    sampled, learned = (logits.log_softmax(-1).gather(-1, ids[..., None]) for logits in (rollout, trained))
    spacing = torch.finfo(torch.bfloat16).eps * trained.abs().amax(-1, keepdim=True).log2().floor().exp2()
    assert ((sampled - learned).abs() <= 3 * spacing).all()


def test_the_first_ratio_is_1(folder, tmp_path):
    """In a run: logits of the rollout beside TRL's log-probabilities of the training pass, for the same tokens."""
    model = adapted(four_bit(folder))
    trainer = trainer_of(model, tmp_path, even_tokens, max_steps=1, generation_kwargs={"min_new_tokens": 12})
    rollouts, ratios = [], []

    def note(module, args, given, output):
        if not hasattr(output, "log_probs"):
            rollouts.append((given["input_ids"], output.logits[:, -1].log_softmax(-1)))
            return
        ids, found = given["input_ids"], output.log_probs[:, -12:]
        sampled = torch.cat([ids for ids, _ in rollouts], 1)  # all but the last token
        for row, log_probs in zip(ids, found, strict=True):
            (at,) = (sampled == row[:-1]).all(-1).nonzero()[0].tolist()
            expected = torch.stack([p[at, token] for (_, p), token in zip(rollouts, row[-12:], strict=True)])
            ratios.append((log_probs - expected).exp())

    model.get_base_model().register_forward_hook(note, with_kwargs=True)
    trainer.train()
    assert not reasons(model) and len(ratios) == 16
    torch.testing.assert_close(torch.stack(ratios), torch.ones(16, 12), rtol=0, atol=1e-5)
    (entry,) = logs_of(trainer)
    assert entry["clip_ratio/region_mean"] == 0 and entry["grad_norm"] > 0 and entry["reward_std"] > 0


@pytest.mark.parametrize("options", [{}, {"beta": 0.04, "num_iterations": 2, "temperature": 0.9, "top_k": 50}], ids=["", "kl"])
def test_rewards_and_losses_are_those_of_transformers(folder, tmp_path, options):
    """The same seed draws the same tokens: probabilities that differ in the last bits of float32 move a draw once in a million."""
    runs = []
    for model in (four_bit(folder), dequantized(folder)):
        model.is_loaded_in_4bit = False  # or TRL rounds the adapters of one of them to bfloat16
        runs.append(trainer_of(adapted(model), tmp_path, even_tokens, **options))
        runs[-1].train()
    mine, other = map(logs_of, runs)
    assert not reasons(runs[0].model)
    for name in ("reward", "reward_std", "num_tokens"):  # absent in a step that reuses a rollout
        assert [entry.get(name) for entry in mine] == [entry.get(name) for entry in other], name
    for name in ("loss", "entropy", "grad_norm", *(["kl"] if options else [])):
        found, expected = ([entry[name] for entry in entries] for entries in (mine, other))
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_adapters_that_trl_rounds_train_in_float32(folder, tmp_path):
    """TRL casts adapters of four-bit models to bfloat16. C++ computes the run, and small updates are not lost."""
    model = adapted(four_bit(folder))
    trainer = trainer_of(model, tmp_path, even_tokens, learning_rate=1e-6)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.bfloat16}
    before = [p.detach().clone() for p in trained]
    trainer.train()
    assert not reasons(model) and all(map(torch.isfinite, map(torch.tensor, losses(trainer))))
    assert {p.dtype for p in trained} == {torch.float32}
    assert all(not torch.equal(p, b.float()) for p, b in zip(trained, before, strict=True))
