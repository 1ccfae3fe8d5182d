"""Files of prompts: what each line means, and which line is wrong."""

import io
import json
import sys

import pandas
import pytest

from common.errors import DataError
from extensions.inference.text import read_prompts

CHAT = [{"role": "user", "content": "Who are you?"}]


def write(path, *lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return str(path)


def contents(*arguments) -> list:
    return [prompt.content for prompt in read_prompts(*arguments)]


def test_a_line_of_text_is_a_prompt(tmp_path):
    name = write(tmp_path / "p.txt", "\ufeffOnce upon", "", "  two  ", '{"prompt": "text"}', "")
    assert contents(name) == ["Once upon", "  two  ", '{"prompt": "text"}']
    assert [prompt.line for prompt in read_prompts(name)] == [1, 3, 4]
    (tmp_path / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
    assert contents(str(tmp_path / "dos.txt")) == ["one", "two"]


@pytest.mark.parametrize("name", ["p.csv", "p.json", "p.parquet", "p.jsonl.gz"])
def test_other_formats_of_records_are_read_as_records(name, tmp_path):
    """Not as lines of text, of which a header would be the first prompt."""
    table = pandas.DataFrame([{"prompt": "Who, you?\nMe?", "id": 1}, {"prompt": "Why?", "id": 2}])
    if name == "p.parquet":
        table.to_parquet(tmp_path / name)
    elif name == "p.csv":
        table.to_csv(tmp_path / name, index=False)
    else:
        table.to_json(tmp_path / name, orient="records", lines=name == "p.jsonl.gz")
    assert contents(str(tmp_path / name)) == ["Who, you?\nMe?", "Why?"]
    (tmp_path / "bad.csv").write_text("question\nWhy?\n")
    with pytest.raises(DataError, match='bad.csv:1: expected an object with "prompt" or "messages"'):
        read_prompts(str(tmp_path / "bad.csv"))


@pytest.mark.parametrize("text, expected", [("a\nb\n", ["a", "b"]), ('\n{"prompt": "a"}\n', ["a"])])
def test_stdin_has_lines_of_either_kind(monkeypatch, text, expected):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert contents("-") == expected


@pytest.mark.parametrize("line, reason", [
    ("{", "not valid JSON"), ("[1]", 'an object with "prompt" or "messages"'), ("{}", 'with "prompt" or "messages"'),
    ({"prompt": "a", "messages": CHAT}, 'with "prompt" or "messages"'), ({"prompt": 3}, "prompt is a number, expected text"),
    ({"messages": "hello"}, "messages is text, expected a list"), ({"messages": []}, "has no messages"),
    ({"messages": [{"role": "user"}]}, "has no 'content'"),
    ({"messages": [*CHAT, {"role": "assistant", "content": "Me."}]}, "expected a user's"),
    ("[" * 100_000, "not valid JSON"),
])
def test_a_wrong_line_is_an_error_with_its_number(tmp_path, line, reason):
    name = write(tmp_path / "p.jsonl", {"prompt": "good"}, "", line)
    with pytest.raises(DataError) as caught:
        read_prompts(name)
    assert str(caught.value).startswith(f"{name}:3: ") and reason in str(caught.value)


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"latin\.txt:2: not valid UTF-8"):
        read_prompts(str(tmp_path / "latin.txt"))
    for name, reason in ((tmp_path, "is not a plain file"), (tmp_path / "gone", "No such file"),
                         (write(tmp_path / "empty.txt", "", " "), "has no prompts")):
        with pytest.raises(DataError, match=reason):
            read_prompts(str(name))
