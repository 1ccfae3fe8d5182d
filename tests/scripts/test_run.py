"""run.sh prepares what the settings name, once, and starts train.py or the launcher with it."""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT
from factories import model_without_weights, write_jsonl

from common.errors import PaddockError
from data_pipeline.shards import read_data_manifest
from extensions.preparation import is_source
from plan.make import make_plan

ALONE = ["scripts/launch.py", "--nproc-per-node", "1", "--max-restarts", "3"]  # one rank, which is started again


class Executed(Exception):
    """The process became another command."""


@pytest.fixture
def project(prepared, tmp_path, monkeypatch):
    """A user's folder with a text, and a function that gives the command that run.py becomes there."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script, made = importlib.import_module("scripts.run"), []
    monkeypatch.setattr(script.subprocess, "run", lambda command: made.append(command[1]) or SimpleNamespace(returncode=0))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("NPROC", "WORLD_SIZE", "PRETRAIN_DATA_PATH"):
        os.environ.pop(name, None)

    def become(program: str, command: list[str]) -> None:
        assert program == command[0] == sys.executable
        raise Executed(*command[1:])

    monkeypatch.setattr(os, "execv", become)

    def command(*flags: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["run.py", *flags])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        with pytest.raises(Executed) as executed:
            script.main()
        program, *others = executed.value.args
        return [str(Path(program).relative_to(ROOT)), *others]

    monkeypatch.chdir(tmp_path)
    settings = prepared.settings() | {"PREPARATION_WORKERS": 1, "VALIDATION_FRACTION": 0.1}
    Path(".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items() if name != "PRETRAIN_DATA_PATH"))
    Path("corpus").mkdir()
    Path("corpus/text.jsonl").write_bytes((prepared.shards.parents[1] / "text.jsonl").read_bytes())
    return SimpleNamespace(command=command, script=script, made=made)


def test_a_source_in_the_settings_is_prepared_once_and_trained_on(project, prepared, capsys):
    with open(".env", "a") as env:
        env.write("PRETRAIN_DATA_PATH=corpus\n")
    command = project.command("--max-steps", "2")
    assert command[:7] == [*ALONE, "--max-steps", "2"]
    config = make_plan(command[5:]).config
    folder = Path(config.pretrain_data_path)
    assert folder.parent == Path("data/pretrain") and config.max_steps == 2
    assert (folder / "train-00000.bin").read_bytes() == (prepared.shards / "train-00000.bin").read_bytes()
    assert "Example 1: " in capsys.readouterr().out
    assert project.command("--max-steps", "2") == command
    assert capsys.readouterr().out == f"Using data prepared earlier:\nPRETRAIN_DATA_PATH={folder}\n"
    assert project.command(f"--pretrain-data-path={folder}") == [*ALONE, f"--pretrain-data-path={folder}"]
    assert not project.made, "a user's own data is not the sample"


@pytest.mark.parametrize("alias", ["--validation-data-path", "--eval-dataset"])
def test_a_validation_set_is_prepared_as_a_whole_and_then_nothing_else_is_held_out(alias, project, prepared, capsys):
    write_jsonl(Path("own.jsonl"), [{"text": f"The cat saw dog {number}."} for number in range(60)])
    Path(".env").write_text(Path(".env").read_text().replace("VALIDATION_FRACTION=0.1\n", ""))
    command = project.command("--pretrain-data-path", "corpus", alias, "own.jsonl")
    config = make_plan(command[5:]).config
    train, own = (read_data_manifest(Path(path)).splits for path in (config.pretrain_data_path, config.validation_data_path))
    assert not own["validation"].documents and not train["validation"].documents and own["train"].documents == 60
    assert train["train"].documents == sum(split.documents for split in read_data_manifest(prepared.shards).splits.values())
    assert f"VALIDATION_DATA_PATH={config.validation_data_path}" in capsys.readouterr().out
    # A share that is set is held out of the training data all the same, and prepared sets stay as they are.
    explicit = make_plan(project.command("--pretrain-data-path", "corpus", alias, str(config.validation_data_path), "--validation-fraction", "0.2")[5:]).config
    assert read_data_manifest(Path(explicit.pretrain_data_path)).splits["validation"].documents
    assert explicit.validation_data_path == config.validation_data_path


@pytest.mark.parametrize(("flags", "reason"), [
    (["--lerning-rate", "1"], "did you mean --learning-rate"), (["--nproc-per-node", "3"], "must be a multiple")])
def test_mistakes_are_reported_before_the_preparation(flags, reason, project, capsys):
    with pytest.raises(SystemExit, match="2"):
        project.command("--pretrain-data-path", "corpus/*.jsonl", *flags)
    assert reason in capsys.readouterr().err and not Path("data").exists() and not project.made


def test_one_rank_or_several_are_launched_and_started_again(project, prepared, monkeypatch):
    data = ["--pretrain-data-path", str(prepared.shards)]
    assert project.command(*data) == [*ALONE, *data]
    assert project.command(*data, "--max-restarts=0")[-1] == "--max-restarts=0", "the last one counts"
    os.environ["NPROC"] = "2"
    assert project.command(*data) == ["scripts/launch.py", "--nproc-per-node", "2", "--max-restarts", "3", *data]
    command = project.command("--nproc-per-node=4", *data)
    assert command[2] == "4" and command[5] == "--nproc-per-node=4"
    assert project.command(*data, "--check") == ["train.py", *data, "--check"] and os.environ["WORLD_SIZE"] == "2"
    os.environ["WORLD_SIZE"] = "4"  # to plan for
    assert project.command(*data, "--check") == ["train.py", *data, "--check"] and os.environ["WORLD_SIZE"] == "4"
    del os.environ["WORLD_SIZE"]
    os.environ["NPROC"] = "two"
    with pytest.raises(PaddockError, match="NPROC=two must be a number"):
        project.command(*data)
    del os.environ["NPROC"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert project.command(*data) == [*ALONE, *data], "DEVICE=cpu"
    for build, ranks in (("2.13.0+cu130", "4"), ("2.13.0+cpu", "1")):
        monkeypatch.setattr(project.script, "version", lambda _, build=build: build)
        assert project.command(*data, "--device", "auto")[2] == ranks


def test_without_any_data_it_is_the_sample(project, prepared, capsys):
    Path(".env").unlink()
    assert project.command("--device", "cpu") == [*ALONE, "--device", "cpu", "--preset", "sample"]
    message = capsys.readouterr().out
    assert project.made == [str(ROOT / "scripts/make_sample.py")] and "short stories" in message and "There is no run" not in message
    project.command("--run-name", "frist", "--device=cpu")
    assert "There is no run runs/frist to resume, and no data is set" in capsys.readouterr().out, "a typo is reported"
    assert project.command("--preset", "debug", "--device=cpu")[-2:] == ["--preset", "sample,debug"]
    assert capsys.readouterr().out.startswith("No data is set, so a new run uses the sample data. To use other data, set PRETRAIN_")
    with pytest.raises(SystemExit, match="2"):
        project.command("--preset", "sample,sample-sft", "--device=cpu")
    assert "TRAINING_STAGE=sft needs a start checkpoint" in capsys.readouterr().err, "before the start of the ranks"
    flags = ["--run-name", "first", "--output-dir", "results"]
    assert "sample" in project.script.with_sample(flags, False)
    for named in (["--dataset_name", "a/b"], ["--model_size", "7B"]):
        assert project.script.with_sample(named, False) == named, "data, or a preset, under another trainer's name"
    assert project.script.with_sample(["--preset", "sample-sft"], False)[-1] == "sample,sample-sft", "its data is the sample's"
    model_without_weights(Path("base"))
    plan = ["--preset", "sft-1b", "--pretrain-checkpoint", "base", "--check", "--device-memory", "80"]
    assert project.script.with_sample(plan, False) == plan, "the preset names its own data"
    assert project.command(*plan) == ["train.py", *plan], "a plan downloads no data"
    plan = ["--preset", "llama3-8b", "--check", "--device-memory", "80"]
    assert project.command(*plan, "--nnodes", "2", "--nproc-per-node", "8") == ["train.py", *plan]
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("16", "8")
    Path("results/first/checkpoints").mkdir(parents=True)
    assert project.script.with_sample(flags, False) == flags, "a run that is resumed has its own data"
    os.environ |= {"PRETRAIN_DATA_PATH": str(prepared.shards), "TOKENIZER_PATH": str(prepared.tokenizer)}
    assert project.command("--device", "cpu") == [*ALONE, "--device", "cpu"]


NOT = {"a prepared set": "set", "a folder of them": "sets", "token files": "tokens", "nanoGPT's folder": "nano", "a file of tokens":
       "tokens/train.bin", "a glob of them": "tokens/*.bin", "a missing path": "corpos/x.txt", "a missing set": "sets/typo",
       "a word": "corpos", "an empty folder": "empty", "nothing": "*.jsonl", "no records": "set/train-00000.bin"}
IS = {"a folder": "text", "a file": "text/deep/a.txt", "packed": "z.jsonl.gz", "a glob": "text/*/*.txt", "a shortcut": "c4",
      "of the hub": "HuggingFaceFW/fineweb-edu", "a URL": "s3://bucket/x.parquet"}


@pytest.mark.parametrize(("name", "expected"), [*((name, False) for name in NOT), *((name, True) for name in IS)])
def test_sources_are_distinguished_from_prepared_data(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("set/manifest.json", "set/train-00000.bin", "sets/0123/manifest.json", "sets/4567/manifest.json", "tokens/train.bin",
                 "nano/input.txt", "nano/train.bin", "text/deep/a.txt", "z.jsonl.gz", "empty/.known-files.json", "text/.env"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    assert is_source("documents", {**NOT, **IS}[name]) is expected
