# SPDX-License-Identifier: Apache-2.0
"""assistant_only_loss in Python for templates that TRL does not know: each answer is trained as a server would get and give it."""

import datetime
import random

import datasets
import pytest
import qlorapp
import torch
import transformers
import trl
from qlorapp.hf import assistant_turns
from test_chat_template import CALL, named
from test_data import data_with_tokens
from test_hf_trl import COMMON, TINY, adapted, in_cpp, losses
from test_trained_turns import SPECIAL, THINKING, assistant, user
from tiny_trainer import adapters
from trl import chat_template_utils

ENDS = ["<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|user|>"]
MARKS = [*SPECIAL, "<end_of_turn>", "<|end|>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|user|>", "<|assistant|>", "<|endoftext|>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]", "<|observation|>"]  # fmt: skip


#: Answers behind a header that opens a thought.
OPENED = [
    [user("q"), assistant(said, **more), user("r"), assistant("x", reasoning_content="why")]
    for said, more in [
        ("<think>\nhm\n</think>\n\nyes", {}), ("<think>hm</think> yes ", {}), ("hm\n</think>\n\nyes", {}), (" <think>\n\n</think>\n\nno", {}),
        ("yes", {"reasoning_content": "\nhm\n"}), ("yes", {}), ("a</think>b</think>c", {}),
    ]
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = data_with_tokens(tmp_path_factory.mktemp("turns"), MARKS)
    yield out
    out.probe.close()


@pytest.fixture(scope="module")
def sources(data):
    """Templates under their names; a comment in front of each hides those that TRL knows."""
    built_in = dict(named(data.probe))
    of_trl = {
        "DeepSeek R1 distill": "deepseek_r1_distill",
        "GLM 4 MoE": "glm4moe",
        "Qwen 3": "qwen3",
        "Gemma 3": "gemma3",
        "Qwen 3.6": "qwen3_6",
    }
    files = {name: (chat_template_utils._CHAT_TEMPLATES_DIR / f"{file}.jinja").read_text() for name, file in of_trl.items()}
    return {name: "{#- other -#}" + source for name, source in (built_in | files).items()}


def tokenizer_of(data, source):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=data.theirs, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>", chat_template=source
    )


class Config:
    assistant_only_loss, completion_only_loss, dataset_num_proc = True, None, None


def rows_of(tokenizer, rows, **options):
    config = type("Given", (Config,), options)
    return list(assistant_turns.prepared(datasets.Dataset.from_list(rows), config, tokenizer))


def pieces(tokenizer, row):
    """The text of a row, and its trained stretches."""
    stretches, before = [], 0
    for token, trained in zip(row["input_ids"], row["assistant_masks"], strict=True):
        if trained and not before:
            stretches.append([])
        if trained:
            stretches[-1].append(token)
        before = trained
    return tokenizer.decode(row["input_ids"]), [tokenizer.decode(ids) for ids in stretches]


def conversations(count, seed):
    rng = random.Random(seed)
    words = ["yes", "no way", "ok.", "漢字", "👩‍👧", "two\nlines", "x = 1;", "Größe"]
    for _ in range(count):
        turns = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.4 else []
        for i in range(rng.randint(1, 4)):
            turns += [user(f"{rng.choice(words)} {i}?"), assistant(f"{rng.choice(words)} {i}")]
        yield turns if rng.random() < 0.8 else [*turns, user("and?")]


BUILT_IN = "zephyr chatml phi4 phi4-mini llama3 qwen3 qwen3-instruct gemma3 granite cohere olmo2 mistral-v7 exaone3.5 deepseek-r1-distill"


@pytest.mark.parametrize("name", BUILT_IN.split())
def test_rows_are_those_of_the_command(data, sources, name):
    """Ids and masks, of one sample and of several."""
    tokenizer = tokenizer_of(data, sources[name])
    many = [
        *conversations(30, name),
        *OPENED[: 6 if name == "qwen3" else 7],
        *(turns for key, turns in THINKING.items() if key != "tools" or name == "qwen3"),
    ]
    if name not in ("qwen3", "deepseek-r1-distill"):
        many = many[:30]
    if name == "gemma3":
        many = [[m for m in turns if m["role"] != "system"] for turns in many]
    many.append([user("q"), assistant("\n\nyes"), user("r"), assistant("\n no")])
    for turns in many:
        want = data.read([{"messages": turns}], chat=name, assistant_only_loss=True)["examples"]
        got = rows_of(tokenizer, [{"messages": turns}])
        assert [row["input_ids"] for row in got] == [e["input_ids"] for e in want], turns
        masks = [[int(label != -100) for label in e["labels"]] for e in want]
        assert [row["assistant_masks"] for row in got] == masks, turns


@pytest.mark.parametrize(
    "name", ["zephyr", "Qwen 3", "Qwen 3.6", "GLM 4 MoE", "DeepSeek R1 distill", "Gemma 3", "mistral-v3-tekken"]
)
def test_each_answer_stands_behind_the_text_that_a_server_sends(data, sources, name):
    tokenizer = tokenizer_of(data, sources[name])
    many = [*conversations(12, name), *(THINKING[k] for k in ("thoughts in every answer", "thoughts once", "no thoughts"))]
    for turns in many:
        if name in ("Gemma 3", "mistral-v3-tekken"):
            turns = [m for m in turns if m["role"] != "system"]
        found = [pieces(tokenizer, row) for row in rows_of(tokenizer, [{"messages": turns}])]
        for i in (i for i, m in enumerate(turns) if m["role"] == "assistant"):
            head = tokenizer.apply_chat_template(turns[:i], tokenize=False, add_generation_prompt=True)
            hits = [
                trained for text, trained in found if text.startswith(head) and any(text.startswith(head + t) for t in trained)
            ]
            assert len(hits) == 1, (head, found)
            answer = next(t for t in hits[0] if any(text.startswith(head + t) for text, _ in found))
            said = turns[i]["content"].rpartition("</think>")[2].strip()
            assert said in answer and any(answer.endswith(end) for end in ENDS), answer
        assert sum(len(trained) for _, trained in found) == sum(m["role"] == "assistant" for m in turns)


@pytest.mark.parametrize(
    "message, answer",
    [
        (assistant("<think>\nhm\n</think>\n\nyes"), "hm\n</think>\n\nyes"),
        (assistant("<think>hm</think> yes "), "hm</think> yes "),
        (assistant("hm\n</think>\n\nyes"), "hm\n</think>\n\nyes"),
        (assistant("yes", reasoning_content="hm"), "hm\n</think>\n\nyes"),
        (assistant("yes", thinking="\nhm\n"), "hm\n</think>\n\nyes"),
        (assistant("yes"), "</think>\n\nyes"),
    ],
)
def test_a_thought_that_the_prompt_opens_is_trained_behind_it(data, sources, message, answer):
    """DeepSeek's template writes thoughts in no answer, and a server opens one."""
    tokenizer = tokenizer_of(data, sources["DeepSeek R1 distill"])
    (row,) = rows_of(tokenizer, [{"messages": [user("q"), message]}])
    text, trained = pieces(tokenizer, row)
    head = "<|begin_of_text|><｜User｜>q<｜Assistant｜><think>\n"
    assert text == head + answer + "<｜end▁of▁sentence｜>"
    assert "".join(trained) == text[len(head) :]
    rows = rows_of(tokenizer, [{"messages": [user("q"), message, user("r"), message]}])
    assert len(rows) == 2 and "hm" not in pieces(tokenizer, rows[1])[0].partition("<｜User｜>r")[0]


def test_the_header_has_the_tokens_that_a_server_sends(data, sources):
    """Behind "<think>\\n", an answer without thoughts begins with another line feed."""
    tokenizer = tokenizer_of(data, sources["Qwen 3.6"])
    (row,) = rows_of(tokenizer, [{"messages": [user("q"), assistant("yes")]}])
    head = tokenizer.apply_chat_template([user("q")], tokenize=False, add_generation_prompt=True)
    assert head.endswith("<think>\n") and data.theirs.encode("\n\n").ids != data.theirs.encode("\n").ids * 2
    ids = data.ids(head, special=False)
    assert row["input_ids"][: len(ids)] == ids and row["assistant_masks"].index(1) == len(ids)
    assert pieces(tokenizer, row)[1] == ["\n</think>\n\nyes<|im_end|>"]


def test_a_turn_without_an_end_of_its_own_ends_in_the_next_header(data, sources):
    """GLM's models stop by it."""
    tokenizer = tokenizer_of(data, sources["GLM 4 MoE"])
    turns = [user("q"), assistant("<think>hm</think>yes"), user("r"), assistant("", tool_calls=[CALL])]
    rows = [pieces(tokenizer, row)[1] for row in rows_of(tokenizer, [{"messages": turns}])]
    assert rows[0] == ["\n<think>hm</think>\nyes<|user|>"]
    assert rows[-1][-1].endswith("</tool_call><|observation|>")
    plain = rows_of(tokenizer, [{"messages": [user("q"), assistant("yes"), user("r"), assistant("no")]}])
    assert [pieces(tokenizer, row)[1] for row in plain] == [["\n<think></think>\nyes<|user|>", "\n<think></think>\nno<|user|>"]]


def test_prompts_and_other_names_of_roles_train_the_same_answers(data, sources):
    tokenizer = tokenizer_of(data, sources["zephyr"])
    turns = [user("one"), assistant("odd"), user("two"), assistant("even")]
    (whole,) = rows_of(tokenizer, [{"messages": turns}])
    (same,) = rows_of(tokenizer, [{"conversations": [{"from": m["role"], "value": m["content"]} for m in turns]}])
    assert same == whole
    pair = {"prompt": turns[:3], "completion": turns[3:]}
    (row,) = rows_of(tokenizer, [pair])
    assert row["input_ids"] == whole["input_ids"] and pieces(tokenizer, row)[1] == ["even<|end_of_text|>"]
    assert rows_of(tokenizer, [pair], completion_only_loss=False) == [whole]


def test_variables_of_the_template_and_tools_reach_it(data, sources):
    source = "{% if tools %}{{ tools[0].name }}{% endif %}{{ mood }}" + sources["zephyr"]
    tokenizer = tokenizer_of(data, source)
    row = {"messages": [user("q"), assistant("a")], "tools": '[{"name": "clock"}]', "chat_template_kwargs": {"mood": "glad"}}
    assert pieces(tokenizer, rows_of(tokenizer, [row])[0])[0].startswith("clockglad<|user|>")


def test_the_day_of_a_template_is_the_day_of_the_call(data):
    """SmolLM3, Granite 3.3 and Mistral Small write it. The command writes one day (docs/sft.md), or the one that it is given."""
    source = (
        "{{ strftime_now('%d %B %Y|%-d.%m.%y %a %A %b') }}{% if date_string is defined %}{{ date_string }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    turns = [user("q"), assistant("a")]
    text = pieces(tokenizer_of(data, source), rows_of(tokenizer_of(data, source), [{"messages": turns}])[0])[0]
    day = datetime.date.today()
    assert f"{day:%d %B %Y}|{day.day}.{day:%m.%y %a %A %b}qa" in text
    for date, want in (
        ("1 Feb 2028", "01 February 2028|1.02.28 Tue Tuesday Feb1 Feb 2028"),
        (None, "26 July 2024|26.07.24 Fri Friday Jul"),
    ):
        got = data.probe.ask("render", source=source, bos="", messages=turns, **({"date": date} if date else {}))
        assert bytes.fromhex(got["text"]).decode().startswith(want + "q")


@pytest.mark.parametrize(
    "source, rule",
    [
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", r"cannot be located in this chat template's text. Put \{% generation %\}"),
    ],
)  # fmt: skip
def test_a_template_whose_answers_cannot_be_found_is_refused(data, source, rule):
    with pytest.raises(ValueError, match=rule):
        rows_of(tokenizer_of(data, source), [{"messages": [user("one"), assistant("odd"), user("two"), assistant("even")]}])


def test_thoughts_that_the_template_leaves_out_are_refused(data, sources):
    turns = [user("q"), assistant("yes", reasoning_content="hm hm"), user("r"), assistant("no")]
    with pytest.raises(ValueError, match="it leaves out 'hm hm' of message 1. Put them into 'content'"):
        rows_of(tokenizer_of(data, sources["zephyr"]), [{"messages": turns}])


def test_a_conversation_without_an_answer_is_refused(data, sources):
    with pytest.raises(ValueError, match="must have a message of the assistant to train"):
        rows_of(tokenizer_of(data, sources["zephyr"]), [{"messages": [user("one")]}])


def test_the_end_of_turns_is_warned_about_if_it_is_never_trained(data, caplog):
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    rows_of(tokenizer_of(data, plain), [{"messages": [user("one"), assistant("odd")]}])
    assert "No answer ends in a special token" in caplog.text


# --- the trainer

PLAIN = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' + message['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>' }}{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' + message['content'] + '<|eot_id|>' }}",
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|eot_id|>' }}{% endif %}",
)
ROWS = [
    {"messages": [user(f"What is {i}?"), assistant(f"It is {i}."), user("And then?"), assistant(f"{i + 1}.")]} for i in range(8)
]


def trained_with(tmp_path, template, streamed=False, packing=False):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.chat_template = template
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=704, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    config.save_pretrained(tmp_path / "model")
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    model = adapted(qlorapp.AutoModelForCausalLM.from_pretrained(tmp_path / "model")).train()
    rows = datasets.Dataset.from_list(ROWS)
    options = {**COMMON, "eval_strategy": "steps", "eval_steps": 3, "packing": packing, "max_length": 64}
    trainer = qlorapp.SFTTrainer(
        model,
        qlorapp.SFTConfig(str(tmp_path / "out"), assistant_only_loss=True, **options),
        train_dataset=rows.to_iterable_dataset() if streamed else rows,
        eval_dataset={"one": rows},
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def test_the_trainer_trains_what_a_marked_template_trains(tmp_path):
    with pytest.raises(ValueError, match="patching is not supported for this template"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
        tokenizer.chat_template = PLAIN
        chat_template_utils.get_training_chat_template(tokenizer)
    plain, marked = (trained_with(tmp_path / name, template) for name, template in (("a", PLAIN), ("b", MARKED)))
    assert plain.args.assistant_only_loss and in_cpp(plain) and in_cpp(marked)
    for key in ("input_ids", "labels"):
        assert plain.train_dataset[key] == marked.train_dataset[key]
    assert losses(plain) == losses(marked) and len(losses(plain)) == 3
    for name, value in adapters(marked).items():
        assert torch.equal(adapters(plain)[name], value), name


@pytest.mark.parametrize("options", [{"streamed": True}, {"packing": True}], ids=["streamed", "packed"])
def test_streamed_and_packed_rows_train_the_same(tmp_path, options):
    plain, marked = (trained_with(tmp_path / name, template, **options) for name, template in (("a", PLAIN), ("b", MARKED)))
    assert losses(plain) == losses(marked)


def test_templates_that_trl_knows_are_trls(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    for template, needed in ((PLAIN, True), (MARKED, False), (chat_template_utils.qwen3_chat_template, False)):
        tokenizer.chat_template = template
        assert assistant_turns.is_needed(trl.SFTConfig("x", assistant_only_loss=True, bf16=False), tokenizer) is needed
        assert not assistant_turns.is_needed(trl.SFTConfig("x", bf16=False), tokenizer)
