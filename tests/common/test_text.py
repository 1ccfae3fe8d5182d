"""Text for people, and files from elsewhere that are no text."""

import sys

import pytest

from checkpoint import model_json
from checkpoint.tensors import open_tensors
from common.command_line import CommandParser
from common.errors import PaddockError
from common.files import plain
from common.text import duration, show_part, wrapped
from data_pipeline.shards import TokenizerInfo, open_token_set
from hellaswag_utils import read_items
from tokenizer import load_tokenizer


@pytest.mark.parametrize("seconds, shown", [(0, "0 s"), (25, "25 s"), (59.4, "59 s"), (59.9, "1 min 00 s"), (330, "5 min 30 s"), (3599.6, "1 h 00 min"),
                                            (7530, "2 h 05 min"), (86_399, "23 h 59 min"), (86_400, "1 d 00 h"), (360_000, "4 d 04 h")])
def test_durations(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize("is_terminal, printed", [(True, "a\\x1b[2J\nb\\u202e\\udc80"), (False, "a\x1b[2J\nb\u202e?")])
def test_text_of_a_model_is_escaped_on_a_terminal_only(is_terminal, printed, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    show_part("a\x1b[2J\nb\u202e\udc80")
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("line, lines", [
    ("short", ["short"]),
    ("[CPU0] one two three four five", ["[CPU0] one two three", "       four five"]),
    ("  warn  data: one two three four", ["  warn  data: one two", "        three four"]),
    ("[CPU0] To go on:  ./paddock train --run-name a", ["[CPU0] To go on:", "       ./paddock train --run-name a"]),
    ("report   ./paddock report runs/a-long-name", ["report   ./paddock report runs/a-long-name"]),
    ("use it   '/a b/bin/python' '/a b/generate.py' run", ["use it   '/a b/bin/python' '/a b/generate.py' run"]),
    ("error: none; run .venv/bin/python x.py", ["error: none; run", ".venv/bin/python x.py"]),
    ("a-very-long-word-without-a-blank-in-it", ["a-very-long-word-without-a-blank-in-it"])])
def test_words_and_commands_stay_whole_on_a_narrow_terminal(line, lines):
    assert wrapped(line, 22).split("\n") == lines


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
READERS = {"any.bin": lambda path: open(path, "rb", opener=plain), "config.json": model_json.read_model_json,
           "tokenizer.model": lambda path: load_tokenizer(str(path)), "items.jsonl": read_items, "model.safetensors": open_tensors,
           "train_000.bin": lambda path: open_token_set(path, "train", TokenizerInfo(5))}


@pytest.mark.parametrize("name", READERS)
def test_a_git_lfs_pointer_is_an_error_that_advises_git_lfs_pull(name, tmp_path):
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / name).write_bytes(POINTER)
    with pytest.raises((PaddockError, OSError)) as raised:
        READERS[name](folder / name)
    text = str(raised.value)
    assert "it is a git-lfs pointer" in text and f"run git lfs pull in {folder}" in text
    assert "permissions" not in text, "what does not help is not advised"


def test_of_two_lists_for_a_flag_none_is_lost(capsys):
    parser = CommandParser("Does nothing.")
    parser.add_argument("--map", metavar="NAME=COLUMN,...")
    parser.add_argument("--output")
    assert parser.parse_args(["--map", "a=b", "--output", "x", "--output", "y"]).output == "y"
    with pytest.raises(SystemExit):
        parser.parse_args(["--map", "a=b", "--map=c=d"])
    assert "--map is given twice; join its values with commas" in capsys.readouterr().err
