"""./paddock runs the right script with the same arguments, in an environment that it finds or makes."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ROOT

from common import interrupts

# A script of the copy: notes its name, arguments, folder and Python.
SCRIPT = '''"""What {name} does."""
import json, os, sys
with open(os.environ["LOG"], "a") as log:
    print(json.dumps([{name!r}, sys.argv[1:], os.getcwd(), sys.prefix]), file=log)
'''
# pip of the copy's environments: notes what it should install, and torch appears.
PIP = '''
import json, os, re, sys
lines = [line for word in sys.argv if word == "/dev/stdin" for line in open(word).read().splitlines()]
with open(os.environ["LOG"], "a") as log:
    print(json.dumps(["pip", sys.argv[1:] + lines, os.getcwd(), sys.prefix]), file=log)
for word in sys.argv:
    if word.startswith("torch=="):
        if word.endswith("+cpu") and "NO_CPU_BUILD" in os.environ:
            sys.exit(f"ERROR: {word} (from versions: {os.environ['NO_CPU_BUILD']})")
        info = os.path.join(os.path.dirname(os.path.dirname(__file__)), "torch.dist-info")
        os.makedirs(info)
        open(os.path.join(info, "METADATA"), "w").write("Name: torch\\nVersion: " + word[7:])
        for name in ("INSTALLER", "RECORD"):
            open(os.path.join(info, name), "w").close()
'''
ACTIVATE = 'export VIRTUAL_ENV="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"\nexport PATH="$VIRTUAL_ENV/bin:$PATH"\n'
# python3 on the PATH of the copy's user: makes an environment by copying one.
PYTHON3 = '''#!/bin/sh
if [ "$2" = venv ]; then
    echo "[\\"venv\\", \\"$*\\", \\"$PWD\\", null]" >> "$LOG"
    for last; do :; done
    mkdir -p "$last" && exec cp -R "{template}/." "$last"
fi
exec "{python}" "$@"
'''
RUNS = {"train": "run.py", "check": "run.py --check", "runs": "runs.py", "report": "report.py", "chat": "chat.py", "serve": "chat.py --serve",
        "prepare text": "load_pretrain_dataset.py", "prepare chats": "load_instruct_dataset.py", "prepare pairs": "load_dpo_dataset.py",
        "prepare prompts": "load_prompts_dataset.py", "prepare tokenizer": "train_tokenizer.py", "prepare sample": "make_sample.py",
        "export --to merged": "merge_lora.py", "export --to gguf": "convert_to_gguf.py"}


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """An environment without packages, whose pip is ours."""
    folder = tmp_path_factory.mktemp("template") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site, = folder.glob("lib/python*/site-packages")
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").write_text(PIP)
    (folder / "bin" / "activate").write_text(ACTIVATE)
    return folder


@pytest.fixture
def clone(template, tmp_path) -> SimpleNamespace:
    """A fresh clone in a folder with a space in its name, with scripts that note how they are called, and a way to call ./paddock."""
    root, log = tmp_path / "my clone", tmp_path / "log"
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("*.py", "sample", "__pycache__"))
    for name in ("common", "parallel"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("paddock", "requirements.txt", "requirements-extras.txt"):
        shutil.copy(ROOT / name, root)
    for command in RUNS.values():
        name = command.split()[0]
        (root / "scripts" / name).write_text(SCRIPT.format(name=name))
    for name in (*STARTERS, "environment.py"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts")
    (tmp_path / "bin").mkdir()
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "LOG": str(log)}

    def add(name: str, text: str) -> None:
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def give_torch(environment: Path, version: str = "2.99.0+mine") -> None:
        info = next(environment.glob("lib/python*/site-packages")) / "torch.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        for name in ("INSTALLER", "RECORD"):
            (info / name).touch()

    def with_environment() -> Path:
        shutil.copytree(template, root / ".venv", symlinks=True)
        give_torch(root / ".venv")
        return root / ".venv"

    def paddock(*arguments, cwd=None, code=0, program=(root / "paddock",), **environ) -> str:
        """Call it; returns what it printed."""
        log.unlink(missing_ok=True)
        done = subprocess.run([*program, *arguments], cwd=cwd or root, env=env | environ, text=True, capture_output=True)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def calls(*names: str) -> list[list]:
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if not names or line[0] in names]

    add("python3", PYTHON3.format(template=template, python=template / "bin" / "python"))
    return SimpleNamespace(root=root, paddock=paddock, calls=calls, add=add, with_environment=with_environment, give_torch=give_torch,
                           elsewhere=tmp_path)


STARTERS = ("main.py", "prepare.py", "export.py")  # which only start other scripts here
ODD = ["--prompt", "a b", 'say "x"', "no*such", "$HOME", "", "it's"]


def test_commands_run_in_the_environment_and_the_folder_of_the_caller(clone):
    environment = clone.with_environment()
    for words in ("train", "prepare text", "serve"):
        clone.paddock(*words.split(), *ODD, cwd=clone.elsewhere)
        name, *fixed = RUNS[words].split()
        assert clone.calls()[-1] == [name, [*fixed, *ODD], str(clone.elsewhere), str(environment)], words


def test_each_command_runs_its_script_with_the_arguments_passed_on(monkeypatch):
    """In this process, which becomes one script after the other."""
    class Becomes(Exception):
        pass

    def become(*command: str):
        raise Becomes(*command)

    monkeypatch.setattr(interrupts, "become", become)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PADDOCK_COMMAND", "")
    monkeypatch.setattr(os, "environ", os.environ | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
    for words, script in RUNS.items():
        command = [str(ROOT / "scripts" / "main.py"), *words.split(), *ODD]
        while Path(command[0]).name in STARTERS:
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(Becomes) as caught:
                runpy.run_path(command[0])["main"]()
            command = [*caught.value.args]
        name, *fixed = script.split()
        assert command == [str(ROOT / "scripts" / name), *fixed, *ODD], words
    assert {"RANK", "LOCAL_RANK", "WORLD_SIZE"}.isdisjoint(os.environ), "left by an earlier job: no command is its rank"


def test_prepare_takes_a_source_and_export_its_format_anywhere(clone):
    python = {"program": (clone.with_environment() / "bin" / "python", clone.root / "scripts" / "main.py")}
    (clone.root / "corpus").mkdir()
    for words, expected in (
            (["prepare", "text", "corpus", "--documents", "line"], ["--source", "corpus", "--documents", "line"]),
            (["prepare", "chats", "--mix", "m.json"], ["--mix", "m.json"]),
            (["prepare", "tokenizer", "a", "b"], ["a", "b"]),
            (["export", "first", "--to", "merged", "--output", "x"], ["first", "--output", "x"]),
            (["export", "--to=gguf", "first"], ["first"])):
        clone.paddock(*words, **python)
        assert clone.calls()[-1][1] == expected
    assert "invalid choice: 'txet'" in clone.paddock("prepare", "txet", "corpus", code=2, **python)
    assert "given twice, as corpus and by --source" in clone.paddock("prepare", "text", "corpus", "--source=other", code=2, **python)


def test_without_an_environment_one_is_made_once(clone):
    if os.path.exists("/proc/driver/nvidia"):
        pytest.skip("a GPU is here")
    output = clone.paddock("train", "--max-steps", "3")
    assert "Creating the environment .venv" in output and "no NVIDIA driver" in output and "Installing requirements.txt" in output
    [_, first, *_], [_, rest, *_] = clone.calls("pip")
    [made] = clone.calls("venv")
    assert made[1] == "-m venv .venv" and first[-1] == "torch==2.13.0+cpu"
    assert {"torch==2.13.0+cpu", "tiktoken~=0.14", "wandb~=0.31"} <= {*rest} and "starlette>=1.7,<2" not in rest
    assert clone.calls()[-1] == ["run.py", ["--max-steps", "3"], str(clone.root), str(clone.root / ".venv")]
    assert clone.paddock("train") == "" and [call[0] for call in clone.calls()] == ["run.py"]
    # What serving and plots need is installed when they are first used, and what changed when it has changed.
    clone.paddock("report", "first")
    assert not clone.calls("pip")
    clone.paddock("serve", "first")
    [[_, extras, *_]] = clone.calls("pip")
    assert [line for line in extras if re.match("[a-z]+[~>=]", line)] == ["starlette>=1.7,<2", "uvicorn~=0.54"]
    clone.paddock("chat", "first", "--serve")
    assert not clone.calls("pip")
    (clone.root / "requirements.txt").write_text("torch>=9,<10\nnew~=1.0\n")
    clone.paddock("train")
    [[_, again, *_]] = clone.calls("pip")
    assert again[-2:] == ["new~=1.0", "torch==2.13.0+cpu"], "torch is kept"


def test_a_torch_that_is_there_is_used_and_kept(clone, template):
    # In an active environment: into it. Beside the machine's: an environment that sees it.
    active = clone.elsewhere / "active"
    shutil.copytree(template, active, symlinks=True)
    clone.give_torch(active)
    environ = {"VIRTUAL_ENV": str(active), "PATH": f"{active / 'bin'}:/usr/bin:/bin"}
    clone.paddock("runs", **environ)
    [[_, rest, _, prefix]] = clone.calls("pip")
    assert prefix == str(active) and "torch==2.99.0+mine" in rest and clone.calls()[-1][3] == str(active)
    machine = clone.elsewhere / "machine"
    shutil.copytree(template, machine, symlinks=True)
    clone.give_torch(machine)
    clone.add("python3", PYTHON3.format(template=machine, python=machine / "bin" / "python"))
    clone.paddock("runs")
    assert clone.calls("venv")[0][1] == "-m venv --system-site-packages .venv"
    assert [call[1][-1] for call in clone.calls("pip")] == ["torch==2.99.0+mine"]
    # .venv before an active environment without torch.
    plain = clone.elsewhere / "plain"
    shutil.copytree(template, plain, symlinks=True)
    clone.paddock("runs", VIRTUAL_ENV=str(plain), PATH=f"{plain / 'bin'}:/usr/bin:/bin")
    assert clone.calls()[-1][3] == str(clone.root / ".venv")
