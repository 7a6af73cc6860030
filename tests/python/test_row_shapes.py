# SPDX-License-Identifier: Apache-2.0
"""Rows as people have them: which columns are found, what they become, and which are refused."""

import gzip
import json
import re
import subprocess

import pytest
import test_data
from data_probe import ProbeError
from test_row_files import probe as probe
from tiny_run import qlorapp, write_model

llama = test_data.llama


@pytest.fixture
def canonical(probe, tmp_path):
    """canonical(rows, chat, options…) → (the rows as the encoder is given them, what they were found to be)."""

    def call(rows, chat=True, name="rows.jsonl", **options):
        path = tmp_path / name
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text)
        got = probe.ask("rows", path=str(path), chat=chat, **options)
        return [json.loads(row) for row in got["rows"]], got["shape"]

    return call


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


TURNS = "(a user's and an assistant's turn of the chat template)"
BELOW = "Below is an instruction that describes a task"
RESPOND = "Write a response that appropriately completes the request."

# --- what each shape becomes: (row, canonical row with a chat template, what is said)
SHAPES = {
    "text": ({"text": "a"}, {"text": "a"}, "text"),
    "prompt and completion": (
        {"prompt": "a", "completion": "b", "id": 3, "messages": None},
        {"prompt": "a", "completion": "b"},
        "prompt/completion",
    ),
    "prompt and completion as messages": (
        {"prompt": [user("a")], "completion": [assistant("b")], "tools": []},
        {"prompt": [user("a")], "completion": [assistant("b")]},
        "prompt/completion messages",
    ),
    "one message as completion": (
        {"prompt": [{"from": "human", "value": "a"}], "completion": {"from": "gpt", "value": "b"}, "system": "s"},
        {"prompt": [system("s"), user("a")], "completion": [assistant("b")]},
        "prompt/completion messages",
    ),
    "messages": ({"messages": [user("a"), assistant("b")], "system": "x"}, {"messages": [user("a"), assistant("b")]}, "messages"),
    "nulls in messages": (
        {"messages": [{**user("a"), "tool_calls": None, "name": None}, assistant("b")], "tools": None},
        {"messages": [user("a"), assistant("b")]},
        "messages",
    ),
    "tools and tool calls": (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}],
            "messages": [user("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
        },
        {
            "messages": [user("a"), {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}],
        },
        "messages",
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "", "tools": "[]"},
        {"messages": [user("a"), assistant("b")]},
        "'conversations' (ShareGPT's from and value, as messages)",
    ),
    "ShareGPT with a system column and all speakers": (
        {
            "system": "s",
            "tools": '[{"name": "f", "description": "d", "parameters": {}}]',
            "conversations": [
                {"from": "user", "value": "a"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"y": 1, "b": 2}}'},
                {"from": "observation", "value": "{}"},
                {"from": "assistant", "value": "b", "weight": 1},
                {"from": "tool", "value": "t"},
                {"from": "function_response", "value": "r"},
                {"from": "model", "value": "m"},
                {"from": "chatgpt", "value": "c"},
                {"from": "bing", "value": "d"},
            ],
        },
        {
            "messages": [
                system("s"),
                user("a"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"y": 1, "b": 2}}}],
                },
                {"role": "tool", "content": "{}"},
                {**assistant("b"), "weight": 1},
                {"role": "tool", "content": "t"},
                {"role": "tool", "content": "r"},
                assistant("m"),
                assistant("c"),
                assistant("d"),
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}],
        },
        "'conversations' (ShareGPT's from and value, as messages)",
    ),
    "a system message of its own stays alone": (
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}], "system": "other"},
        {"messages": [system("s"), user("a")]},
        "'conversations' (ShareGPT's from and value, as messages)",
    ),
    "conversations with role and content": (
        {"conversations": [user("a"), assistant("b")]},
        {"messages": [user("a"), assistant("b")]},
        "'conversations' (messages)",
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {"prompt": [user("Add.\n1, 2")], "completion": [assistant("3")]},
        f"'instruction' with 'input' and 'output' {TURNS}",
    ),
    "alpaca without input, with system and history": (
        {"instruction": "Add.", "input": "", "output": "3", "system": "s", "history": [["q", "r"]]},
        {"prompt": [system("s"), user("q"), assistant("r"), user("Add.")], "completion": [assistant("3")]},
        f"'instruction' with 'input' and 'output' {TURNS}",
    ),
    "dolly": (
        {"instruction": "Add.", "context": "1, 2", "response": "3", "category": "sums"},
        {"prompt": [user("Add.\n1, 2")], "completion": [assistant("3")]},
        f"'instruction' with 'context' and 'response' {TURNS}",
    ),
    "question and answer": (
        {"question": "1+2?", "answer": "3"},
        {"prompt": [user("1+2?")], "completion": [assistant("3")]},
        f"'question' and 'answer' {TURNS}",
    ),
    "query and response": (
        {"query": "1+2?", "response": "3", "type": "sums"},
        {"prompt": [user("1+2?")], "completion": [assistant("3")]},
        f"'query' and 'response' {TURNS}",
    ),
    "text beside what it was made of": (
        {"instruction": "a", "output": "b", "text": "c"},
        {"instruction": "a", "output": "b", "text": "c"},
        "text",
    ),
    "input_ids": ({"input_ids": [1, 2], "text": "a"}, {"input_ids": [1, 2], "text": "a"}, "input_ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_becomes_what_its_columns_say(canonical, name):
    row, want, said = SHAPES[name]
    got, shape = canonical([row, row])
    assert got == [want, want] and shape == said
    everywhere = {"text", "prompt", "completion", "messages", "conversations", "instruction", "input", "output", "question", "answer",
                  "input_ids", "chosen", "rejected", "label", "system", "tools", "images"}  # fmt: skip
    filled = row | {key: None for key in everywhere - set(row)}  # as datasets and pandas write columns that a row lacks
    ((again,), _) = canonical([filled])
    assert {key: value for key, value in again.items() if value is not None} == want


def test_without_a_chat_template_instructions_are_in_alpacas_prompt_text(canonical):
    """The text of stanford_alpaca's prompts, with a line end behind "Response:", as LLaMA-Factory, axolotl and unsloth have it."""
    got, shape = canonical(
        [
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            {"instruction": "Say hi.", "input": "", "output": "Hi."},
            {"instruction": "Say hi.", "input": None, "output": "Hi.", "system": "Be brief.", "history": []},
        ],
        chat=False,
    )
    assert got == [
        {
            "prompt": f"{BELOW}, paired with an input that provides further context. {RESPOND}\n\n### Instruction:\nAdd.\n\n"
            "### Input:\n1, 2\n\n### Response:\n",
            "completion": "3",
        },
        {"prompt": f"{BELOW}. {RESPOND}\n\n### Instruction:\nSay hi.\n\n### Response:\n", "completion": "Hi."},
        {"prompt": "Be brief.\n\n### Instruction:\nSay hi.\n\n### Response:\n", "completion": "Hi."},
    ]
    assert shape == "'instruction' with 'input' and 'output' (in Alpaca's prompt text, because the model has no chat template)"
    got, shape = canonical([{"question": "1+2?", "answer": "3"}], chat=False)
    assert got[0] == {"prompt": f"{BELOW}. {RESPOND}\n\n### Instruction:\n1+2?\n\n### Response:\n", "completion": "3"}
    with pytest.raises(ProbeError, match="'history' needs a chat template; the model has none"):
        canonical([{"instruction": "a", "output": "b", "history": [["q", "r"]]}], chat=False)


def test_columns_can_be_named(canonical):
    row = {"q": "a", "a": "b", "talk": [user("u"), assistant("v")], "body": "t", "text": "x", "prompt": "p"}
    turns = [{"prompt": [user("a")], "completion": [assistant("b")]}]
    assert canonical([row], prompt_field="q", completion_field="a") == (
        turns,
        "'q' and 'a' (a user's and an assistant's turn of the chat template)",
    )
    assert canonical([row], prompt_field="q", completion_field="a", chat=False) == (
        [{"prompt": "a", "completion": "b"}],
        "'q' and 'a' (prompt/completion)",
    )
    assert canonical([row], completion_field="a")[0] == [{"prompt": "p", "completion": "b"}]
    assert canonical([{**row, "completion": "c"}], prompt_field="q")[0] == [{"prompt": "a", "completion": "c"}]
    assert canonical([row], messages_field="talk") == ([{"messages": row["talk"]}], "'talk' (messages)")
    assert canonical([row], text_field="body") == ([row], "'body' (text)")
    preference = {"prompt": "p", "chosen": "b", "rejected": "c"}
    assert canonical([preference], completion_field="chosen")[0] == [{"prompt": "p", "completion": "b"}]
    wanted = {"conversations": [{"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"}, "rejected": {}}
    got = canonical([wanted], prompt_field="conversations", completion_field="chosen")[0]
    assert got == [{"prompt": [user("a")], "completion": [assistant("b")]}]
    with pytest.raises(ProbeError, match=r":1\] a row must have the column 'z' \(--completion_column\); got keys \[q, a, "):
        canonical([row], prompt_field="q", completion_field="z")
    with pytest.raises(ProbeError, match="the columns must be of one format"):
        canonical([row], prompt_field="q", messages_field="talk")


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Add.", "context": "1 2", "response": "3", "system": "Be brief."},
        {"question": "1+2?", "answer": "3"},
        {"query": "1+2?", "response": "3"},
        {"prompt": "1+2=", "completion": "3"},
        {"prompt": [user("1+2?")], "completion": [assistant("3")]},
    ],
)
def test_columns_named_by_option_are_those_that_are_detected(canonical, row, chat):
    prompt, completion = (next(n for n in names if n in row) for names in (
        ("instruction", "question", "query", "prompt"), ("output", "response", "answer", "completion")
    ))  # fmt: skip
    assert canonical([row], prompt_field=prompt, completion_field=completion, chat=chat) == canonical([row], chat=chat)


def test_the_same_rows_come_out_of_csv_and_json(canonical, tmp_path):
    rows = [
        {"instruction": "Add, quickly.", "input": "", "output": 'Say "3"'},
        {"instruction": "a\nb", "input": "1", "output": "c"},
    ]
    as_csv = 'instruction,input,output\r\n"Add, quickly.",,"Say ""3"""\r\n"a\nb",1,c\r\n'
    want = canonical(rows)
    assert canonical(as_csv, name="rows.csv") == want
    assert canonical(as_csv.replace("Add, ", "Add; ").replace(",", "\t").replace("Add; ", "Add, "), name="rows.tsv") == want
    assert canonical(json.dumps(rows, indent=1), name="rows.json") == want


CHOSEN = "'chosen' and 'rejected' are preference data: train with TRL's DPOTrainer"
LABEL = "as preference data does: train with TRL's KTOTrainer"
PREFERENCES = {
    "TRL": ({"prompt": "a", "chosen": "b", "rejected": "c"}, CHOSEN),
    "TRL, implicit prompt": ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, CHOSEN),
    "ShareGPT": (
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        },
        CHOSEN,
    ),
    "alpaca": ({"instruction": "a", "input": "", "chosen": "b", "rejected": "c"}, CHOSEN),
    "with messages": ({"messages": [user("a")], "chosen": "b", "rejected": "c"}, CHOSEN),
    "KTO": ({"prompt": "a", "completion": "b", "label": True}, LABEL),
    "KTO as messages": ({"messages": [user("a"), assistant("b")], "label": False}, LABEL),
    "a number": ({"prompt": "a", "completion": "b", "label": 0}, LABEL),
    "a fraction of whole value": ({"messages": [user("a"), assistant("b")], "label": 1.0}, LABEL),
    "minus one": ({"instruction": "a", "output": "b", "label": -1}, LABEL),
    "a word": ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "label": "Bad"}, LABEL),
    "a digit as text": ({"question": "a", "answer": "b", "label": "1"}, LABEL),
    "a thumb": ({"query": "a", "response": "b", "label": "thumbs_down"}, LABEL),
    "LLaMA-Factory's KTO": ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "kto_tag": True}, LABEL),
}  # fmt: skip


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_data_is_refused_by_that_name(canonical, name):
    row, message = PREFERENCES[name]
    with pytest.raises(ProbeError, match=r"rows.jsonl:1\] .*" + message):
        canonical([row])


def test_a_label_that_is_no_preference_is_no_obstacle(canonical):
    assert canonical([{"text": "a", "label": 1}])[0] == [{"text": "a", "label": 1}]
    for label in (2, 0.5, "sports", "", [1], None):
        assert canonical([{"prompt": "a", "completion": "b", "label": label}])[0] == [{"prompt": "a", "completion": "b"}]
    with pytest.raises(ProbeError, match=LABEL):
        canonical("prompt,completion,label\na,b,True\n", name="rows.csv")


BAD = {
    "no known column": (
        {"foo": "x", "bar": "y"},
        r":1\] a row must have 'text', 'prompt' and 'completion', 'messages', .*; got keys \[foo, bar\]. .*--prompt_column",
    ),
    "a question alone": ({"question": "x"}, "Name the column of the answers: --prompt_column and --completion_column"),
    "a prompt alone": ({"prompt": "x", "completion": None}, r"got keys \[prompt\]. Add the 'completion'"),
    "rows inside a key": ({"version": 2, "data": [{"text": "a"}]}, "If the rows are inside 'data', write that array alone"),
    "images": ({"messages": [user("<image>")], "images": ["a.png"]}, "rows must be text; got 'images'"),
    "a string and messages": ({"prompt": "a", "completion": [assistant("b")]}, "must both be strings, or both lists of messages; got a string"),
    "no completion": ({"prompt": [user("a")], "completion": []}, "must both be strings, or both lists"),
    "messages as text": ({"messages": "x"}, "'messages' must be a list; got a string"),
    "a message as text": ({"messages": [user("a"), "x"]}, "a message in 'messages' must be a JSON object; got a string"),
    "an unknown speaker": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        r":1\] 'from' must be one of human, user, gpt, .*; got 'narrator'",
    ),
    "no value": ({"conversations": [{"from": "human"}]}, "must have key 'value'"),
    "a call that is no JSON": ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, r":1, 'function_call'\] must be valid JSON"),
    "a call without a name": ({"conversations": [{"from": "function_call", "value": "{}"}]}, "a call must be .*; got no name"),
    "tools that are no JSON": ({"conversations": [user("a")], "tools": "none"}, r":1, 'tools'\] must be valid JSON"),
    "tools that are no list": ({"messages": [user("a")], "tools": 3}, "'tools' must be a list of tools; got a number"),
    "a number as an answer": ({"question": "1+2?", "answer": 3}, "'answer' must be a string; got a number"),
    "history of strings": ({"instruction": "a", "output": "b", "history": ["q"]}, "'history' must be a list of .question, answer."),
    "a list": ([1], "a row must be a JSON object; got an array"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_columns_are_one_clear_error(canonical, name):
    row, message = BAD[name]
    with pytest.raises(ProbeError, match=message) as error:
        canonical(json.dumps([row]), name="rows.json")
    assert "rows.json:1" in str(error.value) and len(str(error.value)) < 700 and "\n" not in str(error.value)


def test_every_row_is_held_to_the_first(canonical):
    first = {"question": "a", "answer": "b"}
    for row, message in [
        ({"question": "a"}, r":2\] a row must have key 'answer', as the first row has; got keys \[question\]"),
        ({"question": None, "answer": "b"}, r":2\] 'question' must be a string; got null"),
        ({"text": "x"}, r":2\] a row must have key 'question'"),
        ([], r":2\] a row must be a JSON object"),
    ]:
        with pytest.raises(ProbeError, match=message):
            canonical([first, row])
    with pytest.raises(ProbeError, match=r":2\] 'messages' must be a list; got null"):
        canonical([{"messages": [user("a")]}, {"messages": None, "text": "b"}])


# --- tokens and labels


@pytest.mark.parametrize("template", ["llama3", "chatml"])
@pytest.mark.parametrize("options", [{}, {"assistant_only_loss": True}, {"completion_only_loss": False}])
def test_of_conversational_prompts_what_follows_them_is_trained(llama, template, options):
    """TRL's rule: the prompt ends where generation would begin; all behind it is trained, or the assistant's turns in it."""
    prompt = [system("Be brief."), user("Hi!")]
    completion = [assistant("Hello."), user("Bye"), assistant("See you")]

    def render(turns, begin=False):
        if template == "llama3":
            head, close = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
        else:
            head, close = "<|im_start|>{}\n", "<|im_end|>\n"
        text = "<|begin_of_text|>" if template == "llama3" else ""
        return text + "".join(head.format(t["role"]) + t["content"] + close for t in turns) + head.format("assistant") * begin

    got = llama.read([{"prompt": prompt, "completion": completion}], chat=template, **options)["examples"][0]
    whole, start = render(prompt + completion), render(prompt, begin=True)
    assert whole.startswith(start) and got["input_ids"] == llama.ids(whole, special=False)
    sample = got["sample"].replace("«", "").replace("»", "")
    assert sample == whole
    if "completion_only_loss" in options:
        assert got["labels"] == got["input_ids"]
    elif "assistant_only_loss" in options:
        close = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
        assert f"«Hello.{close}»" in got["sample"] and got["sample"].rstrip().endswith(f"«See you{close}»")
        assert got["sample"].count("«") == 2
    else:
        assert got["sample"] == start + "«" + whole.removeprefix(start) + "»"


def test_alpaca_questions_and_conversations_give_the_same_tokens(llama):
    want = llama.read([{"prompt": [user("1+2?\nQuick.")], "completion": [assistant("3")]}], chat="llama3")
    for row in [
        {"instruction": "1+2?", "input": "Quick.", "output": "3"},
        {"question": "1+2?\nQuick.", "answer": "3"},
    ]:
        got = llama.read([row], chat="llama3")
        assert got["examples"] == want["examples"] and got["format"] == "prompt/completion messages"
        assert got["line"].startswith("1 rows of '") and TURNS in got["line"] and got["ends_in_eos"] == 1
    whole = llama.read(
        [{"conversations": [{"from": "human", "value": "1+2?\nQuick."}, {"from": "gpt", "value": "3"}]}], chat="llama3"
    )
    assert whole["examples"][0]["input_ids"] == want["examples"][0]["input_ids"]
    assert whole["examples"][0]["labels"] == whole["examples"][0]["input_ids"]
    with pytest.raises(ProbeError, match="rows of messages need a chat template; the model has none"):
        llama.read([{"prompt": [user("a")], "completion": [assistant("b")]}])


def test_columns_that_are_not_used_are_named_and_null_ones_are_not(llama):
    line = llama.read([{"text": "a b", "id": 3, "label": None}])["line"]
    assert "keys not used: [id]" in line
    line = llama.read([{"question": "a", "answer": "b", "context": "c", "system": "d", "source": "e"}], chat="llama3")["line"]
    assert "keys not used: [source]" in line and "'question' with 'context' and 'answer'" in line


# --- the commands


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_model(folder / "model")
    return folder


def dry_run(here, data, *more):
    return qlorapp("train", "--model", "model", "--data", data, "--output", "out", "--dry_run", *more, cwd=here)


def said(result: subprocess.CompletedProcess) -> list[str]:
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if re.match(r"\S+: \d+ rows of ", line)]


def test_the_commands_read_every_kind_of_file_and_say_how(here):
    rows = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(20)]
    table = "question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows)
    files = {
        "a.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
        "a.json": json.dumps(rows).encode(),
        "a.csv": table.encode(),
        "a.tsv": table.replace(",", "\t").encode(),
    }
    files |= {name + ".gz": gzip.compress(content) for name, content in files.items()}
    counts = set()
    for name, content in files.items():
        (here / name).write_bytes(content)
        (line,) = said(dry_run(here, name))
        assert (
            f"{name}: 20 rows of 'question' and 'answer' (in Alpaca's prompt text, because the model has no chat template)"
            in line
        )
        counts.add(re.search(r"\d+ tokens, \d+ trained", line)[0])
    assert len(counts) == 1  # the same tokens from each
    (evaluated,) = said(qlorapp("eval", "--model", "model", "--data", "a.csv.gz", cwd=here))
    assert "'question' and 'answer'" in evaluated and "from CSV" in evaluated
    (here / "t.txt").write_text("one\ntwo\n\nthree\n")
    assert "3 rows of text, one row per line: " in said(dry_run(here, "t.txt"))[0]
    assert "2 rows of text, paragraphs between blank lines: " in said(dry_run(here, "t.txt", "--data_format", "paragraphs"))[0]


def test_the_commands_take_names_of_columns_and_several_files(here):
    (here / "n.jsonl").write_text('{"q": "1+1?", "a": " 2", "body": "one two"}\n')
    both = ["--prompt-column", "q", "--completion_column", "a"]
    first, second = said(dry_run(here, "n.jsonl", *both, "--eval_data", "n.jsonl"))
    assert "'q' and 'a' (prompt/completion)" in first and first == second
    assert (
        "'q' and 'a' (prompt/completion)" in said(qlorapp("eval", "--model", "model", "--data", "n.jsonl", *both, cwd=here))[0]
    )
    assert "'body' (text)" in said(dry_run(here, "n.jsonl", "--dataset_text_field", "body"))[0]
    assert "'body' (text)" in said(dry_run(here, "n.jsonl", "--text-column", "body"))[0]
    (here / "m.csv").write_text("q,a\n2+2?, 4\n3+3?, 6\n")
    done = qlorapp(
        "train", "--model", "model", "--data", "n.jsonl,m.csv", "--output", "both", *both, "--per_device_train_batch_size", 1,
        "--num_train_epochs", 1, cwd=here,
    )  # fmt: skip
    assert [line.split(" rows of ")[0][-1] for line in said(done)] == ["1", "2"]
    assert json.loads((here / "both" / "trainer_state.json").read_text())["global_step"] == 3
    (here / "with,comma.csv").write_text("q,a\n2+2?, 4\n")
    assert len(said(dry_run(here, "with,comma.csv", *both))) == 1


def test_the_commands_refuse_preferences_folders_and_parquet(here):
    (here / "p.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    (here / "p.parquet").write_bytes(b"PAR1.......")
    for data, message in [
        ("p.jsonl", "[p.jsonl:1] rows must have completions to train on; 'chosen' and 'rejected' are preference data"),
        ("p.parquet", "got a Parquet file. In Python, pass datasets.load_dataset(…) to SFTTrainer"),
        ("model", "Is a directory. Name its files, separated by commas."),
    ]:
        result = dry_run(here, data)
        assert result.returncode == 2 and message in result.stderr and result.stderr.count("\n") == 1
        assert not (here / "out").exists()
