"""What a terminal shows of a run; files and pipes get the lines that tools read."""

import io
import os
import re
import sys
import threading
import time

from commands import python
from factories import TINY, argv_of

from common import text
from common.text import print_safely

COLOR = re.compile(r"\x1b\[\d+m")


# The status line


def what_stays(shown: str) -> str:
    without_bars = re.sub(r"\n\r[^\n]*?\x1b\[A", "", shown)  # below the status line, on a slow machine
    return re.sub(r"[^\n]*\r(?! *$)", "", without_bars, flags=re.M)


def test_a_status_line_follows_and_makes_room_for_other_text(monkeypatch):
    screen = type("Screen", (io.StringIO,), {"encoding": "utf-8", "isatty": lambda self: True})()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen)
    monkeypatch.setattr(text, "STATUS_SECONDS", 0.001)
    steps, third = iter(range(100_000)), threading.Event()

    def describe() -> str:
        step = next(steps)
        if step > 2:
            third.set()
        return f"step {step}: \x1b"

    with text.status_line(describe):
        print_safely("one", screen)
        third.wait(60)
        text.show("two")
    assert "\r  step 0: \\x1b  00:00" in screen.getvalue() and "\r  step 2: \\x1b  00:0" in screen.getvalue()
    assert what_stays(screen.getvalue()).strip() == "one\ntwo"


def test_a_log_gets_a_line_after_each_longer_silence(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(text, "STATUS_SECONDS", 0.001)
    monkeypatch.setattr(text, "QUIET_SECONDS", 0.01)
    begun = time.monotonic()
    with text.status_line(lambda: "step 3: forward"):
        while log.getvalue().count("\n") < 4:
            time.sleep(0.001)
    assert set(log.getvalue().splitlines()) == {"  step 3: forward, 0 s since the start"} and time.monotonic() - begun > 0.15, "10, 20, 40, 80 ms"
    monkeypatch.setattr(text, "QUIET_SECONDS", 60)
    with text.status_line(lambda: "step 4: forward"):
        time.sleep(0.05)
    assert "step 4" not in log.getvalue()


# A run


def test_a_terminal_shows_the_figures_of_the_log_and_ends_with_commands_that_work(prepared, tmp_path):
    for path in (prepared.shards, prepared.tokenizer, prepared.items):
        (tmp_path / path.name).symlink_to(path)
    settings = {**TINY, "PRETRAIN_DATA_PATH": prepared.shards.name, "TOKENIZER_PATH": "tokenizer.model",
                "HELLASWAG_PATH": "items.jsonl", "OUTPUT_DIR": "runs", "MAX_STEPS": 4, "REPORT": "true", "SAMPLE_EVERY": 4}
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    done = python("train.py", *argv_of(settings), cwd=tmp_path, env=env, terminal=True)  # of 80 columns
    assert re.search("\r  (checking|step \\d+): [\\w -]+  \\d\\d:\\d\\d *\r", done.stdout), "its status line"
    colored = what_stays(done.stdout.replace("\r\n", "\n"))
    plain = COLOR.sub("", colored)
    assert done.returncode == 0 and "\x1b[2mloss\x1b[0m" in colored and "\x1b" not in plain and "[CPU0]" not in plain
    log = (tmp_path / "runs" / "run" / "log" / "rank-0.txt").read_text()
    steps = re.findall(r"^\[CPU0\] Step \[(\d)/4\] \| Loss: (\S+) \| LR: (\S)\.(\d)", log, re.M)
    steps = [(step, f"{float(loss):.3f}", *rate) for step, loss, *rate in steps]
    assert len(steps) == 4 and steps == re.findall(r"^  (\d)/4  loss (\S+) +lr (\S)\.(\d)e.* left$", plain, re.M)
    assert "[4/4] | Loss" in log and "Finished 4 steps" in log
    validations = re.findall(r"Validation \[\d/4\] \| Loss: (\S+) ± (\S+) \| Perplexity: (\S+)", log)
    assert len(validations) == 3 and validations == re.findall(r"  val  loss (\S+) ± (\S+)  ppl (\S+)  ", plain)

    assert plain.count("best, saving") == log.count("| best so far") > 0 and "Saved" not in plain, "the validation's line says so"

    # The end is four lines, there and in the log: the results, and commands.
    *_, result, report, use, resume = plain.strip().split("\n")
    assert log.strip().split("\n")[-4:] == [f"[CPU0] {line}" for line in (result, report, use, resume)]
    assert re.match(rf"result   loss {validations[0][0]} to {validations[-1][0]} \(n = 5\), HellaSwag [\d.]+ % to [\d.]+ ± [\d.]+ %, in \d+ (s|min)", result)
    assert "scripts/report.py" in report and "scripts/generate.py" in use
    assert re.search(r"scripts/run\.py'? --run-name run --max-steps 8$", resume), "the other settings are recorded"
