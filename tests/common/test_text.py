"""Text for people."""

import sys

import pytest

from common.text import counted, duration, show_part, wrapped


@pytest.mark.parametrize("seconds, shown", [(0, "0 s"), (25, "25 s"), (59.4, "59 s"), (59.9, "1 min 00 s"), (330, "5 min 30 s"), (3599.6, "1 h 00 min"),
                                            (7530, "2 h 05 min"), (86_399, "23 h 59 min"), (86_400, "1 d 00 h"), (360_000, "4 d 04 h")])
def test_durations(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize("number, noun, shown", [(0, "row", "0 rows"), (1, "training row", "1 training row"), (1234, "row", "1,234 rows"),
                                                 (1, "micro-batch", "1 micro-batch"), (2, "micro-batch", "2 micro-batches"),
                                                 (1, "process", "1 process"), (2, "process", "2 processes")])
def test_counts(number, noun, shown):
    assert counted(number, noun) == shown


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
