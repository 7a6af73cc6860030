# SPDX-License-Identifier: Apache-2.0
"""The commands open a tokenizer and a template when a row needs them, and a tokenizer that C++ does not know is read through transformers."""

import json
import os
import re
import shutil
import subprocess
import sys

import conftest
import pytest
import torch
from test_cli import options_in
from tiny_run import qlorapp, write_model, write_rows
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: Nobody's template.
UNUSUAL = (
    "{{ bos_token }}{% for m in messages %}{{ '(' + m.role + ')' }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '!' + c.function.name + '=' + (c.function.arguments | tojson) }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{{ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '(assistant)' }}{% endif %}"
)
GENERATION = UNUSUAL.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
)
CHAT = {"messages": [{"role": "user", "content": "Größe 漢字?"}, {"role": "assistant", "content": "one two"}]}
TRAIN = ["--max_steps", "1", "--logging_steps", "1", "--use_cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A byte-level model with a template of its own."""
    folder = write_model(tmp_path_factory.mktemp("folder_text") / "model")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(UNUSUAL)
    return folder


@pytest.fixture(scope="module")
def unusual(tmp_path_factory):
    """A model whose tokenizer is a WordPiece in lower case, and the rows' vocabulary."""
    folder = tmp_path_factory.mktemp("folder_text") / "wordpiece"
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        ["größe 漢字? one two (user) (assistant) = ! weather zone"] * 3,
        trainers.WordPieceTrainer(vocab_size=160, special_tokens=["<unk>", "<s>", "</s>", "<end>"], show_progress=False),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=UNUSUAL,
        additional_special_tokens=["<end>"],
    )  # fmt: skip
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=fast.eos_token_id, bos_token_id=fast.bos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def through_python(*arguments, cwd=None, **env):
    """python -m qlorapp, as the wheel's command starts the program."""
    return subprocess.run(
        [*conftest.MODULE, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300, cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(conftest.BUILD / "python"), "OMP_NUM_THREADS": "2", **env},
    )  # fmt: skip


def train(run, model, rows, tmp_path, *options):
    data = write_rows(tmp_path / "rows.jsonl", rows)
    return run(
        "train", "--model", model, "--data", data, "--output", tmp_path / "out", "--overwrite_output_dir", *TRAIN, *options
    )


def sample_of(result):
    assert result.returncode == 0, result.stderr
    return result.stdout.split("first row, «trained»: ")[1].split("\ntrainable params: ")[0].split("\ndefaults (")[0]


def closed_up(text):
    """Without the spaces that a word-level tokenizer's decoder puts between all tokens."""
    return re.sub(r" *(«|»|<end>|</s>) *", r"\1", text)


# --- nothing is opened that no row needs


@pytest.mark.parametrize(
    "row",
    [{"input_ids": [1, 2, 3, 4]}, {"text": "Hi there"}, {"prompt": "a b", "completion": " c"}],
    ids=lambda row: next(iter(row)),
)
def test_rows_that_need_no_template_train_beside_an_unknown_one(model, tmp_path, row):
    result = train(qlorapp, model, [row] * 2, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "first row, «trained»" in result.stdout and "trained EOS" in result.stdout
    evaluated = qlorapp("eval", "--model", model, "--data", tmp_path / "rows.jsonl", "--device", "cpu")
    assert evaluated.returncode == 0 and "eval_loss" in evaluated.stdout, evaluated.stderr


def test_rows_of_tokens_train_beside_an_unknown_tokenizer_without_facts_that_need_it(unusual, tmp_path):
    for run in (qlorapp, through_python):
        result = train(run, unusual, [{"input_ids": [1, 2, 3, 4]}] * 2, tmp_path, "--defaults", "trainer")
        assert result.returncode == 0, result.stderr
        assert "«trained»" not in result.stdout and "EOS" not in result.stdout
        assert "through transformers" not in result.stdout


def test_generate_raw_needs_no_template(model):
    raw = ["generate", "--model", model, "--prompt", "hi", "--max_new_tokens", 2, "--device", "cpu"]
    assert qlorapp(*raw, "--raw").returncode == 0
    assert qlorapp(*raw).returncode == 0


def test_a_template_that_is_not_computed_here_is_refused_with_its_way_out_where_a_row_needs_it(model, tmp_path):
    own = shutil.copytree(model, tmp_path / "own")
    (own / "chat_template.jinja").write_text("\n{% include 'x' %}")
    result = train(qlorapp, own, [CHAT], tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "chat_template.jinja] line 2: the chat template uses {% include %}, which is not computed here" in result.stderr
    assert "--chat_template NAME or FILE" in result.stderr
    assert train(qlorapp, own, [{"text": "Hi"}], tmp_path).returncode == 0


# --- --chat_template


@pytest.mark.parametrize("command", ["train", "eval", "generate"])
def test_the_option_that_messages_name_is_there(command):
    assert "chat_template" in options_in(qlorapp(command, "--help").stdout)


def test_a_template_is_chosen_by_name_or_by_file(model, tmp_path):
    by_name = sample_of(train(qlorapp, model, [CHAT] * 2, tmp_path, "--chat_template", "zephyr", "--assistant_only_loss"))
    file = tmp_path / "zephyr.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% end %}")
    damaged = train(qlorapp, model, [CHAT] * 2, tmp_path, "--chat_template", file)
    assert damaged.returncode == 2 and f"{file}] line 1: the chat template must be Jinja" in damaged.stderr
    file.write_text("".join(part for part in zephyr()))
    assert sample_of(train(qlorapp, model, [CHAT] * 2, tmp_path, "--chat_template", file, "--assistant_only_loss")) == by_name
    assert "<|assistant|>\n«one two<|eot_id|>»" in by_name


def zephyr():
    for role in ("user", "system", "assistant"):
        yield ("{% for message in messages %}{% if" if role == "user" else "{% elif") + f" message['role'] == '{role}' %}}"
        yield f"{{{{ '<|{role}|>\\n' + message['content'] + eos_token + '\\n' }}}}"
    yield "{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"


def test_an_unknown_name_lists_the_names(model, tmp_path):
    result = train(qlorapp, model, [CHAT], tmp_path, "--chat_template", "zefyr")
    assert (
        result.returncode == 2
        and "must be one of [llama2, llama3," in result.stderr
        and "Did you mean 'zephyr'" in result.stderr
    )
    missing = train(qlorapp, model, [CHAT], tmp_path, "--chat_template", "no/such.jinja")
    assert missing.returncode == 2 and "no/such.jinja" in missing.stderr


# --- through transformers


def test_any_template_is_rendered_here_and_any_tokenizer_is_read_through_transformers(model, unusual, tmp_path):
    for folder, run in (model, qlorapp), (unusual, through_python):
        result = train(run, folder, [CHAT] * 3, tmp_path, "--assistant_only_loss")
        assert result.stdout.count("read through transformers: ") == (folder == unusual)
        theirs = AutoTokenizer.from_pretrained(folder)
        assert "«one two<end>»" in closed_up(sample_of(result))
        ids = theirs.apply_chat_template(CHAT["messages"], tokenize=True, return_dict=True)["input_ids"]
        assert f": {3 * len(ids)} tokens, " in result.stdout
        evaluated = run("eval", "--model", folder, "--data", tmp_path / "rows.jsonl", "--device", "cpu")
        assert evaluated.returncode == 0 and "eval_loss" in evaluated.stdout, evaluated.stderr
        prompt = ["generate", "--model", folder, "--prompt", "one", "--max_new_tokens", 2, "--device", "cpu"]
        assert run(*prompt).returncode == 0
    assert qlorapp(*prompt, "--raw").returncode == 2 and through_python(*prompt, "--raw").returncode == 0


def test_text_and_completions_get_the_labels_that_this_library_gives(unusual, tmp_path):
    result = train(through_python, unusual, [{"prompt": "one ", "completion": "two weather"}], tmp_path)
    assert closed_up(sample_of(result)) == "one«two weather</s>»"
    assert "100 % end in a trained EOS" in result.stdout


def test_generation_blocks_say_what_is_trained(unusual, tmp_path):
    file = tmp_path / "marked.jinja"
    file.write_text(GENERATION)
    result = train(through_python, unusual, [CHAT], tmp_path, "--assistant_only_loss", "--chat_template", file)
    assert "«one two»" in closed_up(sample_of(result))


def test_tool_calls_are_trained_with_a_tokenizer_of_transformers_too(unusual, tmp_path):
    call = {"function": {"name": "weather", "arguments": {"zone": "one"}}}
    row = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    result = train(through_python, unusual, [row], tmp_path, "--assistant_only_loss")
    assert "weather" in sample_of(result).split("«")[1]


#: Thoughts stand in the last answer alone, as in Qwen3.
FORGETFUL = UNUSUAL.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content and loop.last %}{{ ' ! ' + m.reasoning_content + ' = ' }}{% endif %}{{ m.content }}",
)


def test_each_answer_is_trained_as_it_is_served_and_flags_mask(unusual, tmp_path):
    file = tmp_path / "forgetful.jinja"
    file.write_text(FORGETFUL)
    user, part = {"role": "user", "content": "one"}, [{"type": "text", "text": "two"}]
    chat = [user, {"role": "assistant", "content": part, "reasoning_content": "weather", "id": 3}, user,
            {"role": "assistant", "content": "one", "reasoning_content": "zone"}]  # fmt: skip
    masked = [user, chat[1] | {"weight": 0}, user, chat[3]]
    more = ["--assistant_only_loss", "--dry_run", "--chat_template", file]
    result = train(through_python, unusual, [{"messages": chat}, {"messages": masked}], tmp_path, *more)
    said = result.stdout + result.stderr
    assert (
        "1 rows became 2 samples" in said
        and "In 1 rows flags of messages [weight] decide" in said
        and "keys of messages not used: [id]" in said
    )
    assert re.search(r"« ?! weather = two<end>»", closed_up(said)), said
    whole = train(
        through_python, unusual, [{"messages": chat}], tmp_path, "--dry_run", "--defaults", "trainer", "--chat_template", file
    )
    assert "1 of 1 rows lose text (first in line 1)" in whole.stdout + whole.stderr


def test_a_thought_that_the_header_opens_is_trained_behind_it(model, tmp_path):
    """DeepSeek's distills: no written answer has its thoughts."""
    file = tmp_path / "opened.jinja"
    file.write_text(
        UNUSUAL.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}").replace(
            "'(assistant)'", "'(assistant)<think>\\n'"
        )
    )
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    by_key = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    more = ["--assistant_only_loss", "--dry_run", "--chat_template", file]
    result = train(through_python, model, [{"messages": [user, answer, user, by_key]}], tmp_path, *more)
    said = result.stdout + result.stderr
    assert "1 rows became 2 samples" in said and "keys of messages not used" not in said, said
    assert "(assistant)<think>\n«hm\n</think>\n\nyes<end>»" in said, said


@pytest.mark.parametrize(
    "message, lost",
    [
        ({"content": "two", "tool_calls": [{"function": {"name": "weather", "arguments": {"zone": "one"}}}]}, 'content "two"'),
        ({"content": "two", "reasoning_content": "one"}, 'reasoning_content "one"'),
    ],
    ids=["beside a call", "thoughts"],
)
def test_text_that_any_template_leaves_out_is_refused(unusual, tmp_path, message, lost):
    row = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant"} | message]}
    result = train(through_python, unusual, [CHAT, row], tmp_path, "--assistant_only_loss")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert (
        f"rows.jsonl:2] the chat template must write all text of a conversation; it leaves out {lost} of message 1."
        in result.stderr
    )


def test_what_a_template_refuses_is_one_line_with_the_row(unusual, tmp_path):
    bad = UNUSUAL.replace("{% else %}", "{% elif m.content == 'no' %}{{ raise_exception('no is no answer') }}{% else %}")
    file = tmp_path / "raises.jinja"
    file.write_text(bad)
    rows = [CHAT, {"messages": [{"role": "user", "content": "no"}]}]
    result = train(through_python, unusual, rows, tmp_path, "--chat_template", file)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert (
        "rows.jsonl:2] the conversation must fit the template: [chat_template] the template refuses the conversation: no is no answer"
        in result.stderr
    )


def test_without_transformers_the_refusal_says_how_to_get_it(unusual, tmp_path):
    hidden = tmp_path / "hidden" / "transformers"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not here')")
    script = conftest.ROOT / "python" / "qlorapp" / "hf" / "text_service.py"
    env = {**os.environ, "PYTHONPATH": str(hidden.parent), "QLORAPP_PYTHON": sys.executable, "QLORAPP_HF_TEXT": str(script)}
    data = write_rows(tmp_path / "rows.jsonl", [CHAT])
    result = subprocess.run(
        [conftest.BUILD / "qlorapp", "train", "--model", unusual, "--data", data, "--output", tmp_path / "o", *TRAIN],
        capture_output=True, text=True, check=False, timeout=120, env=env,
    )  # fmt: skip
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "transformers is not installed" in result.stderr and 'pip install "qlorapp[hf]"' in result.stderr


def test_a_python_that_ends_at_once_is_named(unusual, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [CHAT])
    env = {**os.environ, "QLORAPP_PYTHON": shutil.which("false"), "QLORAPP_HF_TEXT": "x"}
    result = subprocess.run(
        [conftest.BUILD / "qlorapp", "train", "--model", unusual, "--data", data, "--output", tmp_path / "o", *TRAIN],
        capture_output=True, text=True, check=False, timeout=120, env=env,
    )  # fmt: skip
    assert result.returncode == 2 and "the Python process has ended" in result.stderr and "QLORAPP_PYTHON" in result.stderr
    assert result.stderr.count("\n") == 1
