# SPDX-License-Identifier: Apache-2.0
"""AutoTokenizer gives a pad token where a checkpoint has none: one that is not EOS, where there is one to spare."""

import pytest
import qlorapp
import tokenizers
import transformers

WORDS = ["<s>", "</s>", "a", "b", "c"]


def write_tokenizer(folder, more, **special):
    vocabulary = {word: i for i, word in enumerate([*WORDS, *more])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", **special)
    made.save_pretrained(folder)
    assert transformers.AutoTokenizer.from_pretrained(folder).pad_token == special.get("pad_token")


CASES = {
    "Llama 3.2": (["<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"], "<|finetune_right_pad_id|>"),
    "Llama 3": (["<|reserved_special_token_1|>", "<|reserved_special_token_0|>"], "<|reserved_special_token_1|>"),
    "Llama 2": (["<unk>"], "<unk>"),
    "Mistral 0.3": (["<unk>", "[control_8]"], "[control_8]"),
    "GPT-NeoX": (["<|padding|>"], "<|padding|>"),
    "nothing to spare": ([], "</s>"),
}


@pytest.mark.parametrize("kind", CASES)
def test_the_pad_token_is_not_eos_where_there_is_another(tmp_path, caplog, kind):
    more, expected = CASES[kind]
    write_tokenizer(tmp_path, more)
    tokenizer = qlorapp.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.pad_token == expected and len(tokenizer) == len(WORDS) + len(more)  # no rows of tables are asked for
    assert f"the checkpoint has no pad token; {expected} pads" in caplog.text
    assert ("DataCollatorForLanguageModeling leaves it out of the loss" in caplog.text) == (expected == tokenizer.eos_token)
    rows = [tokenizer(text) for text in ("a b </s>", "c </s>")]
    labels = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)["labels"]
    assert (labels == tokenizer.eos_token_id).any(1).all() == (expected != tokenizer.eos_token)  # EOS is learnt


def test_what_a_script_sets_afterwards_counts(tmp_path):
    write_tokenizer(tmp_path, ["<unk>"])
    tokenizer = qlorapp.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer(["a b", "c"], padding=True)["input_ids"][1][-1] == tokenizer.eos_token_id


def test_a_checkpoints_own_pad_token_stays(tmp_path, caplog):
    write_tokenizer(tmp_path, ["<unk>", "<pad>"], pad_token="b")
    assert qlorapp.AutoTokenizer.from_pretrained(tmp_path).pad_token == "b" and not caplog.text
