"""Every shape of chat and preference comes to the same messages, and what is none is refused by file and line."""

import numpy as np
import pytest
from factories import write_jsonl

from common.errors import DataError
from data_pipeline.chats import read_examples
from data_pipeline.shards import TokenizerInfo
from data_pipeline.sources import Reading, Source
from data_preparation_utils import PreparationOptions, prepare_set
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
    ({"messages": [ASK, SAY]}, [ASK, SAY]),
    ({"messages": [SYSTEM, ASK, SAY, *AGAIN], "id": 7}, [SYSTEM, ASK, SAY, *AGAIN]),
    ({"messages": [ASK, {**SAY, "tool_calls": None}], "prompt": "Why?"}, [ASK, SAY]),
    ({"messages": [{"role": "system", "content": None}, ASK, SAY]}, [ASK, SAY]),
    ({"messages": [ASK, SAY], "system": "Be kind."}, [SYSTEM, ASK, SAY]),
    ({"conversations": share(("human", "Why?"), ("gpt", "So."))}, [ASK, SAY]),
    ({"conversations": share(("system", "Be kind."), ("user", "Why?"), ("assistant", "So."))}, [SYSTEM, ASK, SAY]),
    ({"conversations": [ASK, SAY], "messages": None}, [ASK, SAY]),
    ({"instruction": "Why?", "output": "So."}, [ASK, SAY]),
    ({"instruction": "Why?", "input": "", "output": "So.", "text": "as one"}, [ASK, SAY]),
    ({"instruction": "Add.", "input": "1, 2", "output": "3"},
     [{"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}]),
    ({"prompt": "Why?", "completion": "So."}, [ASK, SAY]),
    ({"prompt": [SYSTEM, ASK], "completion": [SAY]}, [SYSTEM, ASK, SAY]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "input_text", "text": "y?"}]},
                   {"role": "assistant", "content": [{"type": "output_text", "text": "So.", "annotations": []}]}]}, [ASK, SAY]),
    ({"messages": [{"role": "user", "content": " Why?\n"}, SAY]}, [{"role": "user", "content": " Why?\n"}, SAY]),
])
def test_every_shape_of_a_chat_is_the_same_messages(tmp_path, record, messages):
    (chat,), _ = read("chats", tmp_path, record)
    assert chat.messages == messages and chat.where == f"{tmp_path}/x.jsonl:1"


def test_an_instruction_with_several_instances_is_as_many_chats(tmp_path):
    record = {"instruction": "Add.", "instances": [{"input": "1, 2", "output": "3"}, {"input": "", "output": "0"}]}
    chats, _ = read("chats", tmp_path, record)
    assert [[message["content"] for message in chat.messages] for chat in chats] == [["Add.\n\n1, 2", "3"], ["Add.", "0"]]


@pytest.mark.parametrize("record, reason", [
    ({"text": "x"}, "is not a chat: it has 'text'"),
    ({"messages": None}, r"is not a chat: it has 'messages' \(null\)"),
    ({"messages": "Why?"}, "messages is text, expected a list"),
    ({"messages": [ASK, "So."]}, r"messages\[1\] is text, expected a message"),
    ({"messages": [None]}, r"messages\[0\] is null, expected a message"),
    ({"messages": [SYSTEM]}, "only a system message"),
    ({"messages": [ASK]}, "has no assistant turn"),
    ({"messages": [SAY]}, "message 1 is the assistant's, expected the user's"),
    ({"messages": [ASK, SAY, SYSTEM]}, "message 3 is the system's"),
    ({"messages": [ASK, ASK, SAY]}, "message 2 is the user's, expected the assistant's"),
    ({"messages": [{**ASK, "role": "tool"}, SAY]}, "message 1 is the tool's, expected the user's"),
    ({"messages": [ASK, {"role": "assistant"}]}, r"messages\[1\] has no 'content'; it has 'role'"),
    ({"conversations": [{"from": "human", "text": "x"}]}, "has no 'value'"),
    ({"messages": [ASK, {**SAY, "content": None}]}, r"messages\[1\].content is null, expected text"),
    ({"messages": [ASK, {**SAY, "content": " \n"}]}, "content is empty"),
    ({"messages": [ASK, {**SAY, "content": "a\0"}]}, "contains a NUL at character 2"),
    ({"messages": [ASK, {**SAY, "tool_calls": [{"name": "f"}]}]}, "calls a tool"),
    ({"messages": [{**ASK, "content": [{"type": "text", "text": "Why?"}, {"type": "image_url", "image_url": {}}]}, SAY]},
     r"messages\[0\].content\[1\] is not text, its type is 'image_url'; only text can be trained on"),
    ({"messages": [{**ASK, "content": ["Why?"]}, SAY]}, r"content\[0\] is not text, its type is None"),
    ({"messages": [{**ASK, "content": [{"type": "text", "text": None}]}, SAY]}, r"content\[0\].text is null"),
    ({"data": [{"prompt": "Why?"}]}, "it has 'data' .if 'data' is the list of records"),
    ({"mesages": [ASK, SAY]}, "it has 'mesages', expected messages"),
    ({"instruction": "Why?", "output": None}, "is not a chat"),
    ({"instruction": "Why?", "output": ""}, "output is empty"),
    ({"instruction": "Why?", "input": 5, "output": "x"}, "input is a number"),
    ({"instruction": "Why?", "instances": []}, "instances is not a list"),
    ({"instruction": "Why?", "instances": [{"input": ""}]}, "output is null"),
    ({"prompt": "Why?", "completion": "So.", "label": True}, "is an answer with a label, not a chat"),
    *(({"messages": [ASK, {**SAY, **mark}]}, r"messages\[1\] is excluded from training") for mark in (
        {"weight": 0}, {"weight": 0.0}, {"train": False})),
    ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, "is a preference, not a chat"),
])
def test_what_is_no_chat_is_refused_by_file_and_line(tmp_path, record, reason):
    with pytest.raises(DataError, match=f"{tmp_path}/x.jsonl:2: .*{reason}"):
        read("chats", tmp_path, {"messages": [ASK, SAY]}, record)
    chats, reading = read("chats", tmp_path, {"messages": [ASK, SAY]}, record, {"messages": [ASK, SAY]}, skip_bad=True)
    assert len(chats) == 2 and reading.bad == 1 and f"{tmp_path}/x.jsonl:2: " in reading.bad_records[0]


SO, NO = "So.", "No."


@pytest.mark.parametrize("record, prompt, answers", [
    ({"prompt": "Why?", "chosen": SO, "rejected": NO}, [ASK], (SO, NO)),
    ({"prompt": "Why?", "chosen": SO, "rejected": NO, "system": "Be kind."}, [SYSTEM, ASK], (SO, NO)),
    ({"prompt": [SYSTEM, ASK], "chosen": [SAY], "rejected": [{**SAY, "content": NO}]}, [SYSTEM, ASK], (SO, NO)),
    ({"prompt": [ASK], "chosen": SO, "rejected": NO}, [ASK], (SO, NO)),
    ({"prompt": [ASK], "chosen": SAY, "rejected": {"from": "gpt", "value": NO}}, [ASK], (SO, NO)),
    ({"chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": NO}]}, [ASK], (SO, NO)),
    ({"chosen": [ASK, SAY, *AGAIN], "rejected": [ASK, SAY, AGAIN[0], SAY]}, [ASK, SAY, AGAIN[0]], (NO, SO)),
    ({"prompt": "Why?", "chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": NO}], "messages": [ASK]}, [ASK], (SO, NO)),
    ({"instruction": "Why", "input": "1", "chosen": "1", "rejected": "2"}, [{**ASK, "content": "Why\n\n1"}], ("1", "2")),
    ({"question": "Why?", "chosen": SO, "rejected": NO}, [ASK], (SO, NO)),
    # The prompt is what the texts share: up to a line's end, else a sentence's, else a word's.
    ({"chosen": "Why?\nIt is so.", "rejected": "Why?\nIt is not."}, [ASK], ("It is so.", "It is not.")),
    ({"chosen": "Why? It is so.", "rejected": "Why? It is not."}, [ASK], ("It is so.", "It is not.")),
    ({"chosen": "The sky is blue.", "rejected": "The sky is black."}, [{"role": "user", "content": "The sky is"}],
     ("blue.", "black.")),
    ({"chosen": "Why?\nSo.\n", "rejected": "Why?\nSo.\nNo"}, [ASK], ("So.", "So.\nNo")),
    # Anthropic's way.
    ({"chosen": "\n\nHuman: Why?\n\nAssistant: So.", "rejected": "\n\nHuman: Why?\n\nAssistant: No.\n"}, [ASK], (SO, NO)),
    ({"chosen": "Human: Why?\n\nAssistant: So.\n\nHuman: And now?\n\nAssistant: a",
      "rejected": "Human: Why?\n\nAssistant: So.\n\nHuman: And now?\n\nAssistant: b"}, [ASK, SAY, AGAIN[0]], ("a", "b")),
    ({"prompt": "\n\nHuman: Why?\n\nAssistant:", "chosen": " So.", "rejected": " No."}, [ASK], (" So.", " No.")),
])
def test_every_shape_of_a_pair_is_a_prompt_and_two_answers(tmp_path, record, prompt, answers):
    (pair,), _ = read("pairs", tmp_path, record)
    assert (pair.messages, pair.answers) == (prompt, answers)


@pytest.mark.parametrize("record, label", [({"prompt": "Why?", "completion": SO, "label": 0}, False),
                                           ({"prompt": [SYSTEM, ASK], "completion": [SAY], "label": True}, True)])
def test_every_shape_of_an_unpaired_answer_is_a_prompt_an_answer_and_a_label(tmp_path, record, label):
    (answer,), _ = read("pairs", tmp_path, record)
    assert (answer.messages[-1], answer.answers, answer.label) == (ASK, (SO,), label)


def test_an_unpaired_answer_is_stored_beside_that_of_another_prompt_which_is_no_target(prepared, tmp_path):
    records = [{"prompt": f"ask {number // 3}", "completion": f"say {number}", "label": number % 4 > 0} for number in range(30)]
    options = PreparationOptions(str(prepared.tokenizer), "auto", 100_000, 0.0, workers=1)
    folder = prepare_set("pairs", write_jsonl(tmp_path / "rated.jsonl", records), tmp_path, options)
    tokenizer = load_tokenizer(str(prepared.tokenizer))
    found, rows = open_example_set(folder, "train", "pairs", TokenizerInfo(512)), []
    assert found.labels.tolist() == [1 if record["label"] else -1 for record in records]
    for number, record in enumerate(records):
        ids, segments = found.read(number)
        prompt, *answers = (tokenizer.decode(each.tolist()) for each in np.split(ids, np.cumsum(segments >> 2)[:-1]))
        own, other = answers if record["label"] else answers[::-1]
        assert record["prompt"] in prompt and record["completion"] in own
        assert (segments & 1).tolist() == [0, int(record["label"]), int(not record["label"])]
        rows.append(int(other.split()[1].split("<")[0]))
        assert rows[-1] // 3 != number // 3
    assert sorted(rows) == list(range(30)), "each answer is beside one other prompt"
    alone = write_jsonl(tmp_path / "alone.jsonl", records[:2])
    with pytest.raises(DataError, match="no record near it has another prompt"):
        prepare_set("pairs", alone, tmp_path, options)


@pytest.mark.parametrize("record, reason", [
    ({}, "has no chosen and no rejected: it has no columns"),
    ({"prompt": "Why?", "completion": SO, "label": "bad"}, "has the label 'bad', expected true or false"),
    ({"completion": SO, "label": True}, "message 1 is the assistant's"),
    ({"prompt": [ASK, SAY], "completion": SO, "label": True}, "expected the user's"),
    ({"prompt": "Why?", "chosen": SO, "rejected": SO + " "}, "chosen and rejected are equal"),
    ({"prompt": "Why?", "chosen": "", "rejected": NO}, "chosen is empty"),
    ({"prompt": "", "chosen": SO, "rejected": NO}, "prompt is empty"),
    ({"prompt": 5, "chosen": SO, "rejected": NO}, "prompt is a number, expected a list of messages or text"),
    ({"prompt": "Why?", "chosen": 5, "rejected": 6}, "chosen is a number"),
    ({"prompt": "Why?", "chosen": SO, "rejected": "\ud800"}, "rejected contains a lone surrogate"),
    ({"prompt": [ASK, SAY], "chosen": SO, "rejected": NO}, "prompt ends in an assistant's message"),
    ({"prompt": [ASK], "chosen": [], "rejected": [SAY]}, "chosen has no messages"),
    ({"prompt": [ASK], "chosen": [ASK], "rejected": [SAY]}, "must end in an assistant's message"),
    ({"prompt": [ASK], "chosen": [SAY, *AGAIN], "rejected": [SAY]}, "differ before the last message"),
    ({"chosen": [SAY], "rejected": [{**SAY, "content": NO}]}, "has no messages"),
    ({"prompt": "What?", "chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": NO}]}, "its prompt is not in the messages"),
    ({"chosen": SO, "rejected": NO}, "have no common beginning"),
    ({"chosen": "Human: a\n\nHuman: b\n\nAssistant: c", "rejected": "Human: a\n\nHuman: b\n\nAssistant: d"}, "2 is the user's"),
    ({"chosen": "Human: a\n\nAssistant:", "rejected": "Human: a\n\nAssistant: d"}, r"chosen\[1\].content is empty"),
])
def test_what_is_no_pair_is_refused_by_file_and_line(tmp_path, record, reason):
    with pytest.raises(DataError, match=f"{tmp_path}/x.jsonl:1: .*{reason}"):
        read("pairs", tmp_path, record)


def test_a_parquet_file_is_read_with_all_its_columns(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    # Alpaca's file has a column text besides, which is what is read for pretraining.
    table = pyarrow.table({"instruction": ["Why?"], "input": [""], "output": ["So."], "text": ["all of it"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    chat, = read_examples("chats", Source(path=str(tmp_path / "x.parquet")), Reading())
    assert chat.messages == [ASK, SAY] and chat.where.endswith("x.parquet: row 1")


def test_lines_of_text_are_no_chats(tmp_path):
    (tmp_path / "x.txt").write_text("Why?\n")
    with pytest.raises(DataError, match="x.txt:1: is not a chat"):
        list(read_examples("chats", Source(path=str(tmp_path / "x.txt")), Reading()))
