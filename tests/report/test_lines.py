"""A log is read as it grows, and again from its beginning when a resumed run has shortened it."""

import json
import os

import pytest

from checkpoint.schema import Line
from common.errors import CheckpointError
from report.data import GrowingFile


@pytest.fixture
def log(tmp_path):
    """A log, with the lines that were read of it since the last (re)start in `seen`."""
    seen: list[bytes] = []
    file = GrowingFile(tmp_path / "metrics.jsonl", seen.clear, seen.append)
    file.seen = seen
    return file


def lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step, "time": 1.5 * step}).encode() + b"\n" for step in steps)


def test_only_what_is_new_is_read_and_an_incomplete_line_waits(log):
    log.read()
    assert log.seen == []
    with open(log.path, "ab", buffering=0) as file:
        file.write(lines(1, 2) + b'{"step": 3, "ti')
        log.read()
        assert b"".join(log.seen) == lines(1, 2)
        log.seen.clear()
        file.write(b'me": 4.5}\n')
        log.read()
    assert b"".join(log.seen) == lines(3)


@pytest.mark.parametrize("after", [lines(1), lines(1, 5, 6, 7, 8, 9, 10, 11), b""])
def test_a_file_that_a_resume_has_replaced_is_read_again(log, after):
    log.path.write_bytes(lines(1, 2, 3, 4))
    log.read()
    beside = log.path.with_suffix(".tmp")
    beside.write_bytes(after)
    os.replace(beside, log.path)
    log.read()
    assert b"".join(log.seen) == after
    log.path.unlink()
    log.read()
    assert log.seen == []


def test_a_file_that_was_rewritten_with_the_same_lines_goes_on(log):
    log.path.write_bytes(lines(1, 2))
    log.read()
    log.path.write_bytes(lines(1, 2, 3))
    log.seen.clear()
    log.read()
    assert b"".join(log.seen) == lines(3)


def test_what_cannot_be_read_is_told(log):
    os.mkfifo(log.path)
    with pytest.raises(CheckpointError, match="metrics.jsonl cannot be read"):
        log.read()


@pytest.mark.parametrize("line", [b"", b"nonsense", b"[1]", b"{}", b'{"step": -1}', b'{"step": true}',
                                  b'{"step": 1.5}', b"[" * 100_000, b"\xff\xfe", b"\0\0\0", b'{"step": 1, "x": "\\ud800"}'])
def test_a_line_that_is_not_valid_is_set_aside_and_counted(log, line):
    log.add = lambda each: log.seen.append(Line.model_validate_json(each))
    log.path.write_bytes(lines(1) + line + b"\n" + lines(2))
    log.read()
    assert [entry.step for entry in log.seen] == [1, 2] and log.set_aside == 1
