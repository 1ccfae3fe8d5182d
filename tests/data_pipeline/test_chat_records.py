"""Every shape of chat and preference comes to the same messages, and what is none is refused by file and line."""

import json

import numpy as np
import pytest
from factories import prepared_set, write_jsonl

from common.errors import DataError
from data_pipeline.chats import MARKS, read_examples
from data_pipeline.examples import decode_examples
from data_pipeline.shards import TokenizerInfo
from data_pipeline.source_files import Source
from data_pipeline.sources import Reading
from dataloaders import open_example_set
from tokenizer import load_tokenizer

ASK, SAY = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
SYSTEM = {"role": "system", "content": "Be kind."}
AGAIN = [{"role": "user", "content": "And now?"}, {"role": "assistant", "content": "No."}]


def share(*turns):
    return [{"from": speaker, "value": words} for speaker, words in turns]


def read(kind, tmp_path, *records, **options):
    reading = Reading(**options)
    return list(read_examples(kind, Source(path=write_jsonl(tmp_path / "x.jsonl", records)), reading)), reading


@pytest.mark.parametrize("record, messages", [
    ({"messages": [ASK, SAY]}, [ASK, SAY]), ([SYSTEM, ASK, SAY], [SYSTEM, ASK, SAY]),  # a line of nanochat's is the list
    ({"messages": [SYSTEM, ASK, SAY, *AGAIN], "id": 7}, [SYSTEM, ASK, SAY, *AGAIN]),
    ({"messages": [{"role": "system", "content": None}, ASK, SAY]}, [ASK, SAY]),
    ({"messages": [ASK, SAY], "system": "Be kind."}, [SYSTEM, ASK, SAY]),
    ({"conversations": share(("human", "Why?"), ("gpt", "So."))}, [ASK, SAY]),
    ({"instruction": "Why?", "input": "", "output": "So.", "text": "as one"}, [ASK, SAY]),
    ({"instruction": "Add.", "input": "1, 2", "output": "3"},
     [{"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}]),
    ({"prompt": "Why?", "completion": "So."}, [ASK, SAY]), ({"question": "Why?", "answer": "So."}, [ASK, SAY]),
    ({"prompt": [SYSTEM, ASK], "completion": [SAY]}, [SYSTEM, ASK, SAY]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "input_text", "text": "y?"}]},
                   {"role": "assistant", "content": [{"type": "output_text", "text": "So.", "annotations": []}]}]}, [{**ASK, "parts": ["Wh", "y?"]}, SAY]),
    # As `datasets` writes a sequence of objects: an object of lists.
    ({"messages": {"role": ["system", "user", "assistant"], "content": ["Be kind.", "Why?", "So."]}}, [SYSTEM, ASK, SAY]),
    ({"conversations": {"from": ["human", "gpt"], "value": ["Why?", "So."], "weight": [None, 1]}}, [ASK, {**SAY, "train": True}]),
    # Messages as their JSON, as in columns of tables.
    ({"messages": json.dumps([SYSTEM, ASK, SAY])}, [SYSTEM, ASK, SAY]),
    ({"prompt": json.dumps([ASK]), "completion": f" {json.dumps([SAY], indent=1)}\n"}, [ASK, SAY]),
    ({"prompt": "Why?", "completion": '{"from": 1, "to": 2, "value": 3}'}, [ASK, {**SAY, "content": '{"from": 1, "to": 2, "value": 3}'}]),
    ({"messages": [{"role": "user", "content": " Why?\n"}, SAY]}, [{"role": "user", "content": " Why?\n"}, SAY]),
])
def test_every_shape_of_a_chat_is_the_same_messages(tmp_path, record, messages):
    (chat,), _ = read("chats", tmp_path, record)
    assert chat.messages == messages and chat.where == f"{tmp_path}/x.jsonl:1"


@pytest.mark.parametrize("record, reason", [
    ({"text": "x"}, "is not a chat: it has 'text'"),
    ({"prompt": "x", "completion": None}, "completion is null"),
    ({"messages": str([ASK, SAY])}, "messages is text, expected a list, or its JSON"),
    ({"messages": [ASK]}, "has no assistant turn"),
    ({"messages": [ASK, ASK, SAY]}, "message 2 is the user's, expected the assistant's"),
    ({"messages": [ASK, {"role": "assistant"}]}, r"messages\[1\] has no 'content'; it has 'role'"),
    ({"messages": [ASK, {**SAY, "content": "\u200b\ufeff"}]}, r"messages\[1\].content is empty"),
    ({"messages": [ASK, {**SAY, "tool_calls": [{"name": "f"}]}]}, "calls a tool"),
    ({"messages": [{**ASK, "content": [{"type": "text", "text": "Why?"}, {"type": "image_url", "image_url": {}}]}, SAY]},
     r"messages\[0\].content\[1\] is not text, its type is 'image_url'; only text is supported"),
    *(({"messages": [ASK, {**SAY, **mark}]}, "has no target: all its answers are excluded from training by their marks") for mark in (
        {"weight": 0}, {"weight": 0.0}, {"train": False})),
    # What would be lost, so that an answer is learned without what it answers.
    ({"messages": [{**ASK, "images": ["a.png"]}, SAY]}, r"messages\[0\] has images; only text is supported"),
    *(({"conversations": share(("human", f"{place}\nWhy?"), ("gpt", "So.")), "image": "a.png"}, "its text refers to its image; only text is supported")
      for place in ("<image>", "<image_1>", "<|image_pad|>", "[IMG]")),
    # JSON in a text.
    ({"messages": json.dumps([ASK, SAY])[:-2] + ', "content": "No."}]'}, "messages: an object has 'content' 2 times; keep one"),
])
def test_a_record_that_is_not_a_chat_is_refused_by_file_and_line(tmp_path, record, reason):
    with pytest.raises(DataError, match=f"{tmp_path}/x.jsonl:2: .*{reason}"):
        read("chats", tmp_path, {"messages": [ASK, SAY]}, record)
    chats, reading = read("chats", tmp_path, {"messages": [ASK, SAY]}, record, {"messages": [ASK, SAY]}, skip_bad=True)
    assert len(chats) == 2 and reading.bad == 1 and f"{tmp_path}/x.jsonl:2: " in reading.bad_records[0]


SO, NO = "So.", "No."


@pytest.mark.parametrize("record, prompt, answers", [
    ({"prompt": "Why?", "chosen": SO, "rejected": NO}, [ASK], (SO, NO)),
    ({"prompt": "Why?", "chosen": SO, "rejected": NO, "system": "Be kind."}, [SYSTEM, ASK], (SO, NO)),
    ({"prompt": [SYSTEM, ASK], "chosen": [SAY], "rejected": [{**SAY, "content": NO}]}, [SYSTEM, ASK], (SO, NO)),
    ({"prompt": [ASK], "chosen": SAY, "rejected": {"from": "gpt", "value": NO}}, [ASK], (SO, NO)),
    ({"chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": NO}]}, [ASK], (SO, NO)),
    ({"chosen": [ASK, SAY, *AGAIN], "rejected": [ASK, SAY, AGAIN[0], SAY]}, [ASK, SAY, AGAIN[0]], (NO, SO)),
    ({"prompt": "Why?", "chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": NO}], "messages": [ASK]}, [ASK], (SO, NO)),
    ({"chosen": json.dumps([ASK, SAY]), "rejected": json.dumps(share(("human", "Why?"), ("gpt", NO)))}, [ASK], (SO, NO)),
    ({"instruction": "Why", "input": "1", "chosen": "1", "rejected": "2"}, [{**ASK, "content": "Why\n\n1"}], ("1", "2")),
    ({"question": "Why?", "chosen": SO, "rejected": NO}, [ASK], (SO, NO)),
    # The prompt is what the texts share: up to a line's end, else a sentence's, else a word's.
    ({"chosen": "Why?\nIt is so.", "rejected": "Why?\nIt is not."}, [ASK], ("It is so.", "It is not.")),
    ({"chosen": "The sky is blue.", "rejected": "The sky is black."}, [{"role": "user", "content": "The sky is"}],
     ("blue.", "black.")),
    # Anthropic's way.
    ({"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "\n\nHuman: Why?\n\nAssistant: No.\n"}, [ASK], (SO, NO)),
    ({"chosen": "Human: Why?\n\nAssistant: So.\n\nHuman: And now?\n\nAssistant: a",
      "rejected": "Human: Why?\n\nAssistant: So.\n\nHuman: And now?\n\nAssistant: b"}, [ASK, SAY, AGAIN[0]], ("a", "b")),
    ({"prompt": "\n\nHuman: Why?\n\nAssistant:", "chosen": " So.", "rejected": " No."}, [ASK], (" So.", " No.")),
])
def test_every_shape_of_a_pair_is_a_prompt_and_two_answers(tmp_path, record, prompt, answers):
    (pair,), _ = read("pairs", tmp_path, record)
    assert (pair.messages, pair.answers) == (prompt, tuple({**SAY, "content": answer} for answer in answers))


@pytest.mark.parametrize("record, label", [({"prompt": "Why?", "completion": SO, "label": 0}, False),
                                           ({"prompt": [SYSTEM, ASK], "completion": [SAY], "label": True}, True),
                                           ({"messages": [SYSTEM, ASK, SAY], "kto_tag": False, "label": None}, False)])
def test_every_shape_of_an_unpaired_answer_is_a_prompt_an_answer_and_a_label(tmp_path, record, label):
    (answer,), _ = read("pairs", tmp_path, record)
    assert (answer.messages[-1], answer.answers, answer.label) == (ASK, (SAY,), label)


@pytest.mark.parametrize("count, prompt_of", [(30, lambda number: number // 3), (32, lambda number: number % 2)], ids=["groups", "alternating"])
def test_an_unpaired_answer_is_stored_beside_that_of_another_prompt_which_is_no_target(count, prompt_of, prepared, tmp_path, monkeypatch):
    records = [{"prompt": f"ask {prompt_of(number)}", "completion": f"say {number}", "label": number % 4 > 0} for number in range(count)]

    def prepare(records):
        return prepared_set("pairs", write_jsonl(tmp_path / "rated.jsonl", records), prepared.tokenizer, tmp_path, validation_fraction=0)

    folder = prepare(records)
    tokenizer = load_tokenizer(str(prepared.tokenizer))
    found, rows = open_example_set(folder, "train", "pairs", TokenizerInfo(512)), []
    assert found.labels.tolist() == [1 if record["label"] else -1 for record in records] and found.content == "rated answers"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    shown = "".join(decode_examples("pairs", folder, manifest["splits"], tokenizer, manifest["dtype"]))
    assert "of another prompt: say " in shown and "bad: ⟦say 0" in shown and "good: ⟦say 1" in shown and "rejected" not in shown
    for number, record in enumerate(records):
        ids, segments = found.read(number)
        prompt, *answers = (tokenizer.decode(each.tolist()) for each in np.split(ids, np.cumsum(segments >> 2)[:-1]))
        own, other = answers if record["label"] else answers[::-1]
        assert record["prompt"] in prompt and record["completion"] in own
        assert (segments & 1).tolist() == [0, int(record["label"]), int(not record["label"])]
        rows.append(int(other.split()[1].split("<")[0]))
        assert prompt_of(rows[-1]) != prompt_of(number)
    assert sorted(rows) == list(range(count)), "each answer is beside one other prompt"
    # However the source is cut into chunks, none has one record.
    monkeypatch.setattr("data_pipeline.prepare.CHUNK_CHARACTERS", 1)
    for number in (2, 3, count - 1):
        assert len(open_example_set(prepare(records[:number]), "train", "pairs", TokenizerInfo(512))) == number
    with pytest.raises(DataError, match="no record near it has another prompt"):
        prepare(records[:1])


@pytest.mark.parametrize("record, reason", [
    ({"prompt": "Why?", "completion": SO, "label": "bad"}, "has the label 'bad', expected true or false"),
    *(({"messages": messages, "label": True}, reason) for messages, reason in (([], "has no messages"), ([ASK], "has no assistant turn"))),
    ({"prompt": "Why?", "chosen": SO, "rejected": SO + " "}, "chosen and rejected are equal"),
    ({"prompt": [ASK], "chosen": [ASK], "rejected": [SAY]}, "must end in an assistant's message"),
    ({"prompt": [ASK], "chosen": [SAY, *AGAIN], "rejected": [SAY]}, "differ before the last message"),
    ({"prompt": "What?", "chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": NO}]}, "its prompt is not in the messages"),
    ({"chosen": SO, "rejected": NO}, "have no common beginning"),
    ({"chosen": "Human: a\n\nHuman: b\n\nAssistant: c", "rejected": "Human: a\n\nHuman: b\n\nAssistant: d"}, "2 is the user's"),
])
def test_a_record_that_is_not_a_pair_is_refused_by_file_and_line(tmp_path, record, reason):
    with pytest.raises(DataError, match=f"{tmp_path}/x.jsonl:1: .*{reason}"):
        read("pairs", tmp_path, record)


def targets_of(messages):
    return [message.get("train", True) for message in messages if message["role"] == "assistant"]


TWO = [ASK, SAY, *AGAIN]


@pytest.mark.parametrize("mark", [*({name: value} for name, others in MARKS.items() for value in (not others, int(not others))), {"weight": 0.0}],
                         ids=str)
def test_an_answer_that_is_marked_as_excluded_is_context_in_every_kind(tmp_path, mark):
    name, excluded = next(iter(mark.items()))
    included = {name: not excluded}
    marked = [{**ASK, name: None}, {**SAY, **mark}, AGAIN[0], {**AGAIN[1], **included}]
    (chat,), _ = read("chats", tmp_path, {"messages": marked})
    assert targets_of(chat.messages) == [False, True]
    shared = [{"from": {"user": "human", "assistant": "gpt"}[each.pop("role")], "value": each.pop("content"), **each} for each in map(dict, marked)]
    assert read("chats", tmp_path, {"conversations": shared})[0][0].messages == chat.messages
    (chat,), _ = read("chats", tmp_path, {"messages": TWO, name: [None, excluded, None, not excluded]})
    assert targets_of(chat.messages) == [False, True]
    (pair,), _ = read("pairs", tmp_path, {"chosen": marked, "rejected": [*marked[:3], SAY]})
    (prompt,), _ = read("prompts", tmp_path, {"messages": marked[:3]})
    assert pair.messages == prompt.messages == TWO[:3]
    (answer,), _ = read("pairs", tmp_path, {"messages": marked, "label": True})
    assert (answer.messages, answer.answers, answer.label) == (TWO[:3], (AGAIN[1],), True)
    for kind, record, reason in (
            ("chats", {"prompt": "Why?", "completion": "So.", **mark}, f"is excluded from training by {name} = "),
            ("prompts", {"prompt": "Why?", **mark}, f"is excluded from training by {name} = "),
            ("chats", {"messages": [ASK, {**SAY, **mark}]}, "has no target"),
            ("chats", {"messages": [{**ASK, **included}, SAY]}, rf"messages\[0\] is marked for training \({name}\), but is the user's"),
            ("chats", {"messages": [ASK, {**SAY, name: "no"}]}, rf"messages\[1\] has {name} = 'no', expected true or false"),
            ("chats", {"messages": TWO, name: [excluded]}, f"{name} has length 1 for 4 messages, expected one for each"),
            ("pairs", {"chosen": [ASK, {**SAY, **mark}], "rejected": [ASK, AGAIN[1]]}, "excluded from training by a mark")):
        with pytest.raises(DataError, match=reason):
            read(kind, tmp_path, record)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
CALLING = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}, SAY]


@pytest.mark.parametrize("kind, record, messages, dropped", [
    ("chats", {"messages": [ASK, SAY], "conversations": [], "weight": 0.5, "input": ""}, [ASK, SAY], {"conversations", "weight", "input"}),
    ("chats", {"messages": [{**ASK, "name": "Ann", "id": 1, "reasoning": "x"}, {**SAY, "refusal": "n", "audio": {}, "function_call": None}]}, [ASK, SAY],
     {f"messages[].{name}" for name in ("name", "id", "reasoning", "refusal", "audio")}),
    ("chats", {"messages": [ASK, {**SAY, "content": None, "tool_calls": [{**CALL, "index": 0, "function": {**CALL["function"], "strict": True}}]},
                            *CALLING[2:]]}, CALLING, {"messages[].tool_calls[].index", "messages[].tool_calls[].function.strict"}),
    ("chats", {"instruction": "Why?", "instances": [{"input": "", "output": "So.", "constraints": "None"}], "output": "x", "input": "y", "name": "z"},
     [ASK, SAY], {"instances[].constraints", "output", "input", "name"}),
    ("pairs", {"prompt": "Why?", "chosen": [ASK, SAY], "rejected": [ASK, AGAIN[1]], "messages": [ASK, SAY], "score_chosen": 8.5, "margin": 1}, [ASK],
     {"messages", "score_chosen", "margin"}),
    ("pairs", {"prompt": [SYSTEM, *TWO[:3]], "chosen": [AGAIN[0], SAY], "rejected": [AGAIN[0], AGAIN[1]]}, [SYSTEM, *TWO[:3]], set()),
    ("prompts", {"instruction": "And now?", "history": [["Why?", "So."]], "system": "Be kind."}, [SYSTEM, *TWO[:3]], set()),
    ("chats", {"instruction": "Why?", "input": float("nan"), "output": "So.", "score": float("nan")}, [ASK, SAY], set()),
])
def test_every_field_is_used_or_counted_by_name(tmp_path, kind, record, messages, dropped):
    fields = {"tool_calls"} if messages is CALLING else ()
    path = write_jsonl(tmp_path / "x.jsonl", [record])
    reading = Reading()
    (example,) = read_examples(kind, Source(path=path), reading, fields)
    assert example.messages == messages and reading.dropped == dict.fromkeys(dropped, 1)
    if kind == "prompts":
        assert json.loads(example.record) == record


@pytest.mark.parametrize("name, change", [
    ("tool_calls", lambda text: [ASK, {**SAY, "tool_calls": [{"name": "f", "arguments": {"x": [text]}}]}]),
    ("reasoning_content", lambda text: [ASK, {**SAY, "reasoning": text}]), ("name", lambda text: [{**ASK, "name": text}, SAY])])
def test_a_text_that_is_not_valid_is_refused_in_every_field(tmp_path, name, change):
    fields = ("tool_calls", "reasoning_content", "name", "tools")
    for text, flaw in (("a\0", "a NUL at character 2"), ("ab\ud83d", "a lone surrogate at character 3")):
        for record in ({"messages": change(text)}, {"messages": [ASK, SAY], "tools": [{"name": text}]}):
            with pytest.raises(DataError, match=f"x.jsonl:1: {'tools' if 'tools' in record else name} contains {flaw}"):
                [*read_examples("chats", Source(path=write_jsonl(tmp_path / "x.jsonl", [record])), Reading(), fields)]


@pytest.mark.parametrize("turn", [
    {"role": "assistant", "function_call": {"name": "f", "arguments": "{\"x\": null}"}},
    {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": null}}"},
    {"role": "tool_call", "content": [{"name": "f", "parameters": {"x": None}}]}, {**CALLING[1], "tool_calls": json.dumps([CALL])}], ids=str)
def test_calls_and_results_are_read_under_all_their_names(tmp_path, turn):
    for role in ("tool", "function", "observation", "ipython", "tool_response"):
        record = {"messages": [{"role": "developer", "content": "Be kind."}, ASK, turn, {"role": role, "content": "1"}, SAY]}
        (chat,) = read_examples("chats", Source(path=write_jsonl(tmp_path / "x.jsonl", [record])), Reading(), {"tool_calls"})
        assert chat.messages == [SYSTEM, *CALLING]


def test_nulls_that_a_table_invents_are_no_keys_and_its_json_is_read(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tools = [[{"name": "f", "parameters": {"properties": {"x": {"type": "string", "enum": ["a", None]}}}}], [{"name": "g", "parameters": {}}]]
    calls = [{"name": "f", "arguments": {"x": "a"}}, {"name": "g", "arguments": {"y": {"z": [{"v": 1}, {"w": 2}]}}}]
    chats = [[ASK, {"role": "assistant", "tool_calls": [{"function": call}]}] for call in calls]
    json_type = pyarrow.json_()
    as_json = pyarrow.ExtensionArray.from_storage(json_type, pyarrow.array([json.dumps({"x": None, "y": 1}), "5"]))
    nested = pyarrow.StructArray.from_arrays([as_json], ["deep"])
    table = pyarrow.table({"messages": chats, "tools": tools, "chat_template_kwargs": nested})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "x.arrow", table.schema) as stream:
        stream.write_table(table)
    for suffix in ("parquet", "arrow"):
        found = [*read_examples("chats", Source(path=str(tmp_path / f"x.{suffix}")), Reading(), {"tools", "tool_calls", "deep"})]
        assert [example.options for example in found] == [{"tools": tools[0], "deep": {"x": None, "y": 1}}, {"tools": tools[1], "deep": 5}]
        assert [example.messages[1]["tool_calls"][0]["function"] for example in found] == calls
    stated = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    (chat,) = read_examples("chats", Source(path=write_jsonl(tmp_path / "x.jsonl", [stated])), Reading(), {"tool_calls"})
    assert chat.messages[1]["tool_calls"] == [CALL]
