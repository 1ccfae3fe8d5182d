"""Secrets reach the libraries that need them, and never a file or a stream."""

import json
import math
import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from factories import TinyRun, argv_of, do_in_step
from test_faults import bad_gradient_in_step
from test_remote import Server

import train
from common import remote
from config import Config

ROOT = Path(__file__).resolve().parents[2]
IN_ENV_FILE, IN_ENVIRONMENT = "canary-5d1f0a77c2", "canary-90b3e64418"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with one secret in .env, and another in the environment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text(f"HF_TOKEN={IN_ENV_FILE}\nTENSORBOARD_ENABLED=true\n")
    monkeypatch.setenv("WANDB_API_KEY", IN_ENVIRONMENT)
    monkeypatch.setenv("HF_TOKEN", "")  # so that monkeypatch undoes the export
    monkeypatch.delenv("HF_TOKEN")
    return tmp_path


def run_script(name: str, *argv, monkeypatch) -> int:
    """Run a script in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
    try:
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    return 0


def assert_no_canary(folder: Path, *texts: str) -> None:
    """Assert that no secret is in the texts, or in a file of the folder except .env."""
    assert not any("canary" in text for text in texts), texts
    for path in folder.rglob("*"):
        if path.is_file() and path.name != ".env" and path.suffix != ".py":
            assert b"canary" not in path.read_bytes(), path


def test_no_secret_reaches_a_file_or_a_stream_of_any_command(place, prepared, monkeypatch, capfd):
    chats, pairs = place / "chats.jsonl", place / "pairs.jsonl"
    turns = [{"role": "user", "content": "cat?"}, {"role": "assistant", "content": "dog"}]
    chats.write_text(60 * f"{json.dumps({'messages': turns})}\n")
    pairs.write_text(60 * f"{json.dumps({'prompt': 'cat?', 'chosen': 'dog', 'rejected': 'ox'})}\n")
    text = prepared.items.parent / "text.jsonl"
    tokenizer = ("--tokenizer-path", prepared.tokenizer, "--preparation-workers", "1")

    def script(name: str, *argv) -> None:
        assert run_script(name, *argv, monkeypatch=monkeypatch) == 0, f"{name}\n{capfd.readouterr().err}"

    script("load_pretrain_dataset.py", "--source", text, "--output", "documents", *tokenizer)
    script("load_instruct_dataset.py", "--source", chats, "--output", "chats", *tokenizer)
    script("load_dpo_dataset.py", "--source", pairs, "--output", "pairs", *tokenizer)
    script("load_hellaswag_dataset.py", "--source", prepared.items, "--output", "items.jsonl")
    script("train_tokenizer.py", text, "--vocab-size", "260", "--output", "new.model")
    run = TinyRun(prepared, place / "runs", MAX_STEPS=2, VALIDATION_ROWS=2)
    assert run.train(CHECK="true") == 0
    assert run.train() == 0 and run.train(MAX_STEPS=4) == 0, capfd.readouterr().err
    assert os.environ["HF_TOKEN"] == IN_ENV_FILE
    assert list(run.folder.glob("tensorboard/*"))
    lora = TinyRun(prepared, place / "runs", RUN_NAME="adapted", PRETRAIN_CHECKPOINT=run.checkpoint(4), LORA_ENABLED="true",
                   MAX_STEPS=1)
    assert lora.train() == 0, capfd.readouterr().err
    script("generate.py", run.checkpoint(4), "--max-new-tokens", "2")
    script("merge_lora.py", lora.checkpoint(1), "--output", "merged")
    script("import_checkpoint.py", run.checkpoint(4), "imported")
    script("report.py", run.folder, "--plot", "curves.png")
    script("replay_step.py", run.folder, "--step", "3")
    launched = subprocess.run([sys.executable, ROOT / "scripts" / "launch.py", "train.py",  # as torchrun is called
                               *argv_of(run.settings | {"RUN_NAME": "launched"})], capture_output=True, text=True, timeout=300)
    assert launched.returncode == 0, launched.stderr
    assert all(line.startswith("[CPU0] ") for line in launched.stdout.splitlines()), "a line that is no rank's"
    assert_no_canary(place, *capfd.readouterr(), launched.stdout, launched.stderr)


def test_no_secret_is_in_what_a_run_and_its_trackers_leave_behind(tmp_path, prepared):
    """The real wandb, offline, and TensorBoard; a URL with secrets as a flag, which ./paddock train prepares, and wandb would copy from sys.argv; report and card."""
    pytest.importorskip("wandb", reason="wandb is not installed (requirements-dev.txt)")
    script = tmp_path / "start.py"  # as ./paddock train starts: main reads sys.argv
    script.write_text("import sys, train\nraise SystemExit(train.main(sys.argv[1:]))\n")
    run = TinyRun(prepared, tmp_path / "runs", MAX_STEPS=2, SAVE_EVERY=1, WANDB_ENABLED="true", TENSORBOARD_ENABLED="true", EXTENSIONS="default",
                  HELLASWAG_EVERY=0, REPORT="true")
    environ = {**os.environ, "WANDB_MODE": "offline", "WANDB_API_KEY": 4 * "canary-123", "HF_TOKEN": "hf_canary", "WANDB_SILENT": "true",
               "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, script, "--pretrain-data-path", URL.format("x.jsonl"), *argv_of(run.settings)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [*run.folder.glob("tensorboard/*")] and (run.folder / "report.html").exists() and [*run.folder.rglob("README.md")]
    (recorded,) = run.folder.glob("wandb/offline-run-*/*.wandb")
    assert b"https://***@127.0.0.1" in recorded.read_bytes()
    assert_no_canary(tmp_path, done.stdout, done.stderr)


COMMANDS = ["train.py", "load_pretrain_dataset.py", "load_hellaswag_dataset.py", "launch.py", "verify_resume.py", "replay_step.py"]


def refusal(command: str, argv: list, monkeypatch, capfd) -> str:
    """The output of a command that must refuse its settings."""
    if command == "train.py":
        code = pytest.raises(SystemExit, train.main, argv).value.code
    elif command == "launch.py":  # which lets signals end it, so not in this process
        done = subprocess.run([sys.executable, ROOT / "scripts" / command, *argv], capture_output=True, text=True, timeout=300)
        assert done.returncode == 2, done.stderr
        return done.stdout + done.stderr
    else:
        extra = ["runs", "--step", "1"] if command == "replay_step.py" else []
        code = run_script(command, *extra, *argv, monkeypatch=monkeypatch)
    out, err = capfd.readouterr()
    assert code == 2, err
    return out + err


SPELLINGS = [["--hf-token", "canary"], ["--hf-token=canary"], ["--HF_TOKEN=canary"], ["--hf_token", "canary"],
             ["-hf-token", "canary"], ["HF_TOKEN=canary"], ["--hf-tokn=canary"], ["--token", "canary"],
             ["--wandb-api-key", "canary"], ["--openai-api-key=canary"], ["--wandb_api-key=canary", "--max-steps", "1"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_secret_as_a_flag_is_refused_in_every_spelling_and_not_repeated(command, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.json").write_text(json.dumps(Config().public()))  # for a replay
    for argv in SPELLINGS if command != "launch.py" else [sum(SPELLINGS, [])]:
        text = refusal(command, argv, monkeypatch, capfd)
        assert "canary" not in text and re.search("token|tokn|key", text, re.IGNORECASE), text


LINES = {"OPENAI_API_KEY=canary": "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY='canary'": "AWS_SECRET_ACCESS_KEY",
         "HF_TOKN=canary": "HF_TOKEN in .env", "HF_TOKEN: canary": "not of the form NAME=value",
         "HF_TOKEN canary": "not of the form NAME=value", "HF_TOKEN='canary": "not of the form NAME=value",
         "HF_TOKEN=canary-1\nHF_TOKEN=canary-2": "set a second time",
         "export DATABASE_URL=postgres://me:canary@host/x": "DATABASE_URL"}


@pytest.mark.parametrize("command", ["train.py", "load_pretrain_dataset.py", "launch.py"])
def test_a_wrong_line_of_env_is_an_error_that_does_not_repeat_it(command, monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    for line, output in LINES.items() if command != "launch.py" else [("\n".join(LINES), "OPENAI_API_KEY")]:
        (tmp_path / ".env").write_text(f"MAX_STEPS=1\n{line}\n")
        text = refusal(command, [], monkeypatch, capfd)
        assert "canary" not in text and output in text and ".env:2" in text, text


URL = "https://user:canary@127.0.0.1:9/{}?token=canary"
PATHS = {"PRETRAIN_DATA_PATH": "shards", "TOKENIZER_PATH": "tokenizer.model", "HELLASWAG_PATH": "items.jsonl",
         "PRETRAIN_CHECKPOINT": "model", "RESUME": "model", "OUTPUT_DIR": "runs"}


@pytest.mark.parametrize("setting", PATHS)
def test_a_password_in_a_path_is_shown_nowhere(setting, tiny_run, tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    if setting == "OUTPUT_DIR":
        (tmp_path / "https:").touch()  # it is a local folder, which cannot be made
    run = tiny_run(**{setting: URL.format(PATHS[setting])})
    assert run.train(CHECK=str(setting.endswith("CHECKPOINT")).lower()) in (2, 3, 5)
    assert_no_canary(tmp_path, *capfd.readouterr())


def crash() -> None:
    """An unexpected exception, whose traceback includes the settings."""
    do_in_step(3, lambda: 1 / 0)


def dump() -> None:
    """A non-finite step, whose rows and tensors are written to files."""
    bad_gradient_in_step(5, math.nan)


@pytest.mark.parametrize(("plant", "code", "words"), [(crash, 1, "ZeroDivisionError"), (dump, 4, "NON-FINITE in step 5")])
def test_a_run_that_fails_shows_no_secret(plant, code, words, place, prepared):
    run = TinyRun(prepared, place / "runs", ENV_FILE=place / ".env")
    job = run.start(plant=plant, env={"WANDB_API_KEY": IN_ENVIRONMENT})
    assert job.wait() == [code] and words in job.text(), job.text()
    assert (run.folder / "debug").exists() == (plant is dump)
    assert_no_canary(place, job.text())


def test_a_password_in_a_source_is_in_no_manifest(prepared, tmp_path, monkeypatch, capfd):
    text = (prepared.items.parent / "text.jsonl").read_bytes()
    monkeypatch.chdir(tmp_path)
    with Server({"/text.jsonl": text}) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"{server.url.replace('://', '://user:canary@')}/text.jsonl"
        server.faults = [503, 503]  # after which it is asked again, and says so
        monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
        (tmp_path / ".env").write_text(f"TOKENIZER_PATH={prepared.tokenizer}\nPREPARATION_WORKERS=1\n")
        assert run_script("load_pretrain_dataset.py", "--source", url, "--output", "out", monkeypatch=monkeypatch) == 0
        server.files["/text.jsonl"] = b"{torn\n"
        for torn_or_missing in (f"{url}?token=canary", f"{url}.jsonl?token=canary"):
            assert run_script("load_pretrain_dataset.py", "--source", torn_or_missing, monkeypatch=monkeypatch) == 3
        server.shutdown()
    (manifest,) = {path.resolve() for path in tmp_path.glob("out/*/manifest.json")}
    assert "127.0.0.1" in manifest.read_text()
    assert_no_canary(tmp_path, *capfd.readouterr())
