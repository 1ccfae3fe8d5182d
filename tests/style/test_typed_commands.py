"""Each command that a document, a page, a help text or a printed line shows has flags that exist."""

import pytest
from typed import Typed, check_flags, in_code, in_document, in_page, typed


@pytest.mark.parametrize("shown", typed(), ids=lambda shown: f"{shown.where} {shown.line[:60]}")
def test_its_flags_exist(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_flags(shown.words)


def test_commands_are_found_wherever_they_are_shown(tmp_path, monkeypatch):
    places = {each.where.partition("/")[0].partition(":")[0] for each in typed()}
    assert {"README.md", "docs", "extensions", "scripts"} <= places and len(typed()) > 150
    shown = [each.line for each in typed() if each.where == "extensions/serving/assets/chat.js"]
    assert shown == ["./paddock prepare chats ~/Downloads/chats.jsonl --pretrain-checkpoint 'runs/chat'",
                     "./paddock prepare pairs ~/Downloads/preferences.jsonl --instruct-checkpoint 'runs/chat'"]

    monkeypatch.setattr("typed.ROOT", tmp_path)
    (tmp_path / "a.md").write_text("Run `./paddock runs --clean` now.\n```bash\n./paddock train --depth 2 \\\n    --epochs 1   # twice\n```\n")
    (tmp_path / "b.py").write_text('text = f"merge it with {command(SCRIPT, folder)} --output FOLDER."\n'.replace("SCRIPT", "'scripts/merge_lora.py'"))
    assert [each.line for each in in_code(tmp_path / "b.py")] == ["./paddock export --to merged 1 --output FOLDER"]
    (tmp_path / "a.py").write_text('"""Do it.\n\n    ./paddock eval a --limit 1   one\n"""\nprint(command("scripts/report.py", folder, "--log"))\n'
                                   'print(f"see {PROGRAM} runs --clean")\n')
    assert [each.words for each in in_document(tmp_path / "a.md")] == [["./paddock", "train", "--depth", "2", "--epochs", "1"],
                                                                       ["./paddock", "runs", "--clean"]]
    assert [each.line for each in in_code(tmp_path / "a.py")] == ["./paddock eval a --limit 1", "./paddock report 1 --log", "./paddock runs --clean"]
    (tmp_path / "a.html").write_text("<p>Type ./paddock runs --clean</p>")
    assert [*in_page(tmp_path / "a.html")] == [Typed("a.html", "./paddock runs --clean")]


@pytest.mark.parametrize("line", ["./paddock train --depht 2", "./paddock prepare chats a.jsonl --learning-rate 1", "./paddock eval a --every 2",
                                  "./paddock export a --to gguf --outptu b", "./paddock sweep --vary SEED=1,2 --nmae a", "python train.py --deep 2",
                                  "./paddock prepare tokenizer a --vocabulary 2", "./paddock runs --delete", "./paddock without a --fnid b"])
def test_a_flag_that_does_not_exist_is_found(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError):
        check_flags(line.split())
