"""Each command that a document, a page, a help text or a printed line shows has flags that exist."""

import pytest
from typed import check_flags, typed


@pytest.mark.parametrize("shown", typed(), ids=lambda shown: f"{shown.where} {shown.line[:60]}")
def test_its_flags_exist(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_flags(shown.words)


@pytest.mark.parametrize("line", ["./paddock train --depht 2", "./paddock prepare chats a.jsonl --learning-rate 1", "./paddock eval a --every 2",
                                  "./paddock export a --to gguf --outptu b", "./paddock sweep --vary SEED=1,2 --nmae a", "python train.py --deep 2",
                                  "./paddock prepare tokenizer a --vocabulary 2", "./paddock runs --delete", "./paddock without a --fnid b"])
def test_a_flag_that_does_not_exist_is_found(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        check_flags(line.split())
