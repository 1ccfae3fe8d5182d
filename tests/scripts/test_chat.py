"""A conversation in a terminal, which is a real one here, and between stdin and stdout."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from factories import PATIENCE, tiny_model_folder

from data_preparation_utils import PreparationOptions, prepare_set
from scripts import chat as script

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """It writes no control token but the end of the turn: transformers would read their names in answers as control tokens."""
    silenced = [token for token in tokenizer.special_ids.values() if token != tokenizer.eot_id]
    return tiny_model_folder(tmp_path_factory.mktemp("folder"), tokenizer, silenced, 4096)


@pytest.fixture
def chat(monkeypatch, capsys):
    """A function that gives main some stdin; returns its exit code, stdout and stderr."""
    def chat(stdin: str, *argv) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["chat.py", *map(str, argv)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        try:
            script.run_script(script.main)
        except SystemExit as ended:
            return ended.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return chat


def test_commands_in_a_pipe(chat, folder, tmp_path, prepared):
    """What a seed gives it gives again; a saved chat can be trained on, and is never written over."""
    file = tmp_path / "chat.jsonl"
    code, out, err = chat(f"/temperature 1\n/seed 7\nHi\n/retry\n/reset\n/seed 7\nHi\n/undo\n/seed 8\nHi\n/save {file}\n/quit\nHi\n",
                          folder, "--max-new-tokens", 5, "--stop", "\n", "--repetition-penalty", 1.1)
    first, second, again, undone = out.removesuffix("\n").split("\n\n")
    assert code == 0 and first == again != second == undone
    assert "next answer: 7." in err and f"Saved to {file}" in err and "\x1b" not in err
    assert chat(f"Hi\n/save {file.with_suffix('')}\n", folder, "--max-new-tokens", 5)[::2] == (
        2, f"error: {file} already exists; name another file\n")
    record = json.loads(file.read_text())
    assert [message["content"] for message in record["messages"]][0] == "Hi"
    file.write_text(file.read_text() * 30)
    prepare_set("chats", str(file), tmp_path / "chats", PreparationOptions(str(prepared.tokenizer), "auto", 10_000, 0, workers=1))


class Terminal:
    """The script in a terminal of its own."""

    def __init__(self, *argv, **env: str):
        self.ours, self.theirs = pty.openpty()
        # The first terminal that a new session opens is its own, and Ctrl-C reaches it.
        command = ["sh", "-c", 'exec "$@" <>"$0" >&0 2>&0', os.ttyname(self.theirs), sys.executable, script.__file__, *map(str, argv)]
        self.process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "TERM": "xterm", **env})
        self.pieces: list[str] = []

    def read(self, until: str, nudge: bytes = b"") -> str:
        """What was written since the last call, up to a pattern; without escapes.

        Args:
            nudge: written again in each second without an answer: Python does not see a Ctrl-C that comes
                between a prompt and its wait for a key.
        """
        self.pieces = []
        deadline = time.monotonic() + PATIENCE
        while not re.search(until, text := ESCAPES.sub("", "".join(self.pieces)), re.DOTALL):
            assert time.monotonic() < deadline and self.process.poll() is None, text
            if nudge and not select.select([self.ours], [], [], 1)[0]:
                os.write(self.ours, nudge)
            if select.select([self.ours], [], [], 0.1)[0]:
                self.pieces.append(os.read(self.ours, 1 << 16).decode(errors="replace"))
        return text

    def send(self, keys: str, until: str = "\n> $", nudge: bytes = b"") -> str:
        os.write(self.ours, keys.encode())
        return self.read(until, nudge)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def test_a_conversation_in_a_terminal(folder, tmp_path):
    with Terminal(folder, "--temperature", 0, "--max-new-tokens", 4000) as terminal:
        start = terminal.read("\n> $")
        assert start.startswith(f"Loading {folder} ...\n") and "/help lists the commands" in start
        assert "\x1b[2m" in "".join(terminal.pieces)

        # The answer is still being written when its beginning is there.
        begun = terminal.send("The cat saw\r", "saw\n.{40}")
        stopped = terminal.send("\x03")
        count = int(re.search(r"\n\(([\d,]+) tokens, [\d.,]+ tokens/s\)\n> $", stopped)[1].replace(",", ""))
        assert 0 < count < 4000 and "tokens" not in begun
        # What was written stays.
        saved = terminal.send(f"/save {tmp_path / 'chat'}\r")
        assert f"Saved to {tmp_path / 'chat.jsonl'}" in saved
        words = [message["content"] for message in json.loads((tmp_path / "chat.jsonl").read_text())["messages"]]
        assert words[0] == "The cat saw" and len(words) == 2 and words[1]

        terminal.send("\x1b[200~two\nlines\x1b[201~\r", "two\nlines\n.{40}")
        terminal.send("\x03")
        assert "Removed: two lines\n" in terminal.send("/undo\r")
        assert "/rest; the commands are /retry" in terminal.send("/rest\r")
        assert "Ctrl-D or type /quit" in terminal.send("half a line\x03", nudge=b"\x03")
        os.write(terminal.ours, b"\x04")
        assert terminal.process.wait(PATIENCE) == 0
