"""A log is read as it grows, and again from its beginning when a resumed run has shortened it."""

import json

import pytest

from checkpoint.schema import read_lines
from extensions.report.data import LogFile


@pytest.fixture
def log(tmp_path):
    return LogFile(tmp_path / "metrics.jsonl")


def new(log: LogFile) -> bytes:
    return b"".join(line for line, _ in log.new_lines())


def lines(*steps: int) -> bytes:
    return b"".join(json.dumps({"step": step, "time": 1.5 * step}).encode() + b"\n" for step in steps)


def test_only_what_is_new_is_read_and_an_incomplete_line_waits(log):
    assert new(log) == b""
    with open(log.path, "ab", buffering=0) as file:
        file.write(lines(1, 2) + b'{"step": 3, "ti')
        assert new(log) == lines(1, 2)
        file.write(b'me": 4.5}\n')
        assert new(log) == lines(3) and not log.is_replaced()


@pytest.mark.parametrize("after", [lines(1, 5, 6, 7, 8, 9, 10, 11), None])
def test_a_file_that_a_resume_has_replaced_is_noticed_but_not_one_that_begins_alike(log, after):
    log.path.write_bytes(lines(1, 2, 3, 4))
    assert new(log) == lines(1, 2, 3, 4)
    log.path.write_bytes(lines(1, 2, 3, 4, 5))
    assert not log.is_replaced() and new(log) == lines(5)
    log.path.unlink()
    if after is not None:
        log.path.write_bytes(after)
    assert log.is_replaced()


def test_a_last_line_that_lacks_only_its_end_is_read_when_nothing_is_appended_any_more(log):
    log.path.write_bytes(lines(1, 2)[:-1])
    assert new(log) == lines(1)
    assert [(line, entry.step) for line, entry in read_lines(log.path)] == [(lines(1), 1), (lines(2), 2)]
    log.path.write_bytes(lines(1, 2)[:-2])
    assert [line for line, _ in read_lines(log.path)] == [lines(1)]
