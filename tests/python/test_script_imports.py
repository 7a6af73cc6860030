# SPDX-License-Identifier: Apache-2.0
"""Names that scripts import and that this library answers with classes of its own: Seq2SeqTrainer, one family's classes, LoraLayer."""

import dataclasses
from typing import Optional

import peft
import pytest
import qlorapp
import torch
import transformers
from conftest import ROOT

MODEL = ROOT / "examples" / "data" / "tiny-llama"
PHI = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
ROWS = [{"input_ids": [5 + i, 6, 7, 8], "labels": [5 + i, 6, 7, 8]} for i in range(8)]


def adapted(base):
    return qlorapp.get_peft_model(base, qlorapp.LoraConfig(r=2, target_modules=["q_proj"]))


@dataclasses.dataclass
class Arguments(qlorapp.Seq2SeqTrainingArguments):
    """As QLoRA's own script has them."""

    cache_dir: Optional[str] = dataclasses.field(default=None)  # noqa: UP045
    output_dir: str = dataclasses.field(default="./output")


@pytest.mark.parametrize("kind", ["Seq2SeqTrainer", "Trainer"])
def test_a_script_with_seq2seq_classes_trains_as_with_trainer(tmp_path, kind):
    words = [
        "--output_dir",
        str(tmp_path),
        "--max_steps",
        "2",
        "--cache_dir",
        "x",
        "--save_strategy",
        "no",
        "--learning_rate",
        "0.01",
    ]
    (args,) = qlorapp.HfArgumentParser(Arguments).parse_args_into_dataclasses(words)
    assert args.cache_dir == "x" and not args.predict_with_generate and isinstance(args, qlorapp.TrainingArguments)
    theirs = {field.name for field in dataclasses.fields(transformers.Seq2SeqTrainingArguments)} - {
        field.name for field in dataclasses.fields(transformers.TrainingArguments)
    }
    assert theirs <= {field.name for field in dataclasses.fields(args)}
    args.generation_config = qlorapp.GenerationConfig(max_new_tokens=3)
    losses = []
    for make, given in ((getattr(qlorapp, kind), args), (qlorapp.Trainer, qlorapp.TrainingArguments(**args.to_dict()))):
        torch.manual_seed(1)
        model = adapted(qlorapp.AutoModelForCausalLM.from_pretrained(MODEL))
        trainer = make(model=model, args=given, train_dataset=ROWS, eval_dataset=ROWS)
        losses.append((trainer.train().training_loss, trainer.evaluate()["eval_loss"]))
    assert losses[0] == losses[1] and isinstance(trainer, qlorapp.Trainer)


def test_evaluation_by_generation_is_refused_by_name(tmp_path):
    with pytest.raises(
        ValueError, match=r"\[Seq2SeqTrainingArguments\] predict_with_generate is not supported: .*model.generate"
    ):
        qlorapp.Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True)
    with pytest.raises(TypeError, match="unknown option 'predict_with_generat'.*'predict_with_generate'"):
        qlorapp.Seq2SeqTrainingArguments(str(tmp_path), predict_with_generat=True)


def test_a_familys_classes_load_and_know_their_own(tmp_path):
    from qlorapp import LlamaConfig, LlamaForCausalLM, LlamaTokenizer, LlamaTokenizerFast, MistralForCausalLM, PhiForCausalLM

    assert LlamaConfig is transformers.LlamaConfig and LlamaForCausalLM is qlorapp.LlamaForCausalLM
    model = LlamaForCausalLM.from_pretrained(MODEL)
    assert (
        isinstance(model, qlorapp.CausalLM)
        and isinstance(model, LlamaForCausalLM)
        and not isinstance(model, MistralForCausalLM)
    )
    transformers.PhiForCausalLM(transformers.PhiConfig(**PHI)).save_pretrained(tmp_path)
    foreign = PhiForCausalLM.from_pretrained(tmp_path)
    assert isinstance(foreign, PhiForCausalLM) and not isinstance(foreign, LlamaForCausalLM)
    for kind in (LlamaTokenizer, LlamaTokenizerFast):
        tokenizer = kind.from_pretrained(MODEL)
        assert tokenizer.pad_token is not None and tokenizer("hi")["input_ids"]
        assert isinstance(tokenizer, kind) == isinstance(tokenizer, transformers.LlamaTokenizer)


@pytest.mark.parametrize("name", ["LamaForCausalLM", "LlamaTokeniser", "NobodysTokenizer", "NobodysConfig"])
def test_a_family_that_transformers_does_not_know_is_no_attribute(name):
    assert not hasattr(qlorapp, name)


def test_layers_with_adapters_are_found_by_pefts_class(tmp_path):
    transformers.PhiForCausalLM(transformers.PhiConfig(**PHI)).save_pretrained(tmp_path)
    for place in (MODEL, tmp_path):
        base = qlorapp.AutoModelForCausalLM.from_pretrained(place)
        assert not any(isinstance(module, qlorapp.LoraLayer) for module in base.modules())
        model = adapted(base)
        found = {name for name, module in model.named_modules() if isinstance(module, qlorapp.LoraLayer)}
        assert found == {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name} != set()
    assert all(isinstance(model.get_submodule(name), peft.tuners.lora.LoraLayer) for name in found)


def test_names_of_modules_below_transformers_are_its_own():
    from qlorapp import PREFIX_CHECKPOINT_DIR, get_parameter_names, is_torch_bf16_gpu_available

    assert PREFIX_CHECKPOINT_DIR == transformers.trainer_utils.PREFIX_CHECKPOINT_DIR == "checkpoint"
    assert get_parameter_names is transformers.trainer_pt_utils.get_parameter_names
    assert is_torch_bf16_gpu_available is transformers.utils.is_torch_bf16_gpu_available


def test_bitsandbytes_functions_say_what_to_use():
    with pytest.raises(ImportError, match=r"qlorapp has no functional: .*Quantizer\(\).quantize\(weight\).*quant_state"):
        qlorapp.functional  # noqa: B018
    assert not any(
        isinstance(m, qlorapp.nn.Linear8bitLt) for m in qlorapp.AutoModelForCausalLM.from_pretrained(MODEL).modules()
    )
