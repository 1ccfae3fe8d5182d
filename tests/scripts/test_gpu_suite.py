"""The driver of the GPU suite with fake parts: a bad one stops nothing and is reported. Real parts run in .ci/tests and every night."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, python
from factories import wait_until

from scripts.gpu import parts
from scripts.gpu import suite as gpu_suite

PROGRAM = """
import json, subprocess, sys, time
part, folder = sys.argv[1], sys.argv[sys.argv.index("--output") + 1]
def note(**entry):
    with open(f"{folder}/{part}.notes.jsonl", "a") as file:
        file.write(json.dumps(entry) + "\\n")
note(figure={"speed": 1.5})
if part == "fails":
    raise SystemExit("it broke")
if part == "faulty":
    note(fault="speed is 1.5")
if part == "absent":
    note(skipped="no such device")
if part == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    note(figure={"child": child.pid})
    time.sleep(100)
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Run these fake parts; returns their results by name."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(gpu_suite, "PROGRAM", program)

    def run(*parts: gpu_suite.Part, **flags) -> dict[str, dict]:
        flags = {"output": "out"} | flags
        flags["output"] = tmp_path / flags["output"]
        options, _ = gpu_suite.parse_args(["--device", "cpu", *(f"--{name}={value}" for name, value in flags.items())])
        options.output.mkdir(exist_ok=True)
        records = gpu_suite.Suite(options, parts).run()
        lines = (options.output / "results.jsonl").read_text().splitlines()
        assert sorted(map(json.loads, lines), key=str) == sorted(records, key=str)
        return {record["part"]: record for record in records}

    return run


def part(name: str, seconds: float = 60, **more) -> gpu_suite.Part:
    return gpu_suite.Part(name, "correctness", seconds, "made up", **more)


def test_a_bad_part_stops_nothing_and_says_why(suite):
    found = suite(part("fails", alone=True), part("faulty"), part("absent"), part("good"))
    ended = {name: record["ok"] for name, record in found.items()}
    assert ended == {"fails": False, "faulty": False, "absent": None, "good": True}
    assert found["fails"]["error"] == "exit code 1: it broke"
    assert found["faulty"]["error"] == "speed is 1.5"
    assert found["absent"]["error"] == "skipped: no such device"
    assert all(record["figures"] == {"speed": 1.5} and record["seconds"] >= 0 for record in found.values())
    assert [*found["good"]] == ["part", "ok", "seconds", "figures", "error"]


def test_a_part_that_takes_too_long_is_killed_with_its_children_and_keeps_its_figures(suite):
    found = suite(part("hangs", seconds=1), part("good"))
    assert found["hangs"]["ok"] is False and found["hangs"]["error"] == "it exceeded its limit of 1 s" and found["good"]["ok"]
    assert found["hangs"]["figures"]["speed"] == 1.5
    stat = Path(f"/proc/{found['hangs']['figures']['child']}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_part_that_needs_a_failed_one_or_has_no_time_left_is_skipped(suite):
    found = suite(part("fails"), part("good", needs=("fails",)), part("faulty", needs=("good",)),
                  part("absent", needs=("fails",), alone=True), jobs=2)
    for name, needed in (("good", "fails"), ("faulty", "good"), ("absent", "fails")):
        assert found[name]["error"].startswith(f"skipped: it needs {needed}"), name
    assert suite(part("good"), minutes=0.001, output="late")["good"]["error"] == "skipped: no time left"


def test_parts_are_chosen_by_group_and_name_with_what_they_need():
    names = [part.name for part in gpu_suite.select_parts("stage-sft")]
    assert names == ["header", "sample", "stage-pretrain", "stage-sft"]
    assert {part.group for part in gpu_suite.select_parts("speed")} == {"both", "speed"}
    assert gpu_suite.select_parts("all") == gpu_suite.select_parts("correctness,speed") == list(gpu_suite.PARTS)
    with pytest.raises(ValueError, match="--parts sped: choose from all, correctness"):
        gpu_suite.select_parts("sped")
    # A part comes after those that it needs: otherwise a thread would wait for one that no other thread is free to run.
    names = [part.name for part in gpu_suite.PARTS]
    assert all(names.index(needed) < names.index(part.name) for part in gpu_suite.PARTS for needed in part.needs)


@pytest.mark.slow
def test_parts_that_only_run_scripts_pass_at_toy_size(tmp_path, monkeypatch):
    """In forked processes."""
    def run(task, script, *arguments, env=None, stdin=""):
        done = python(script, *arguments, env=os.environ | (env or {}), stdin=stdin)
        return done.returncode, done.stderr + done.stdout

    monkeypatch.setattr(parts.Task, "run", run)
    names = ("use", "fsdp", "power", "stage-grpo", *(name for name in parts.STAGES if name != "stage-pretrain"))
    for part in gpu_suite.select_parts(",".join(names))[1:]:
        task = parts.Task("cpu", True, tmp_path, part.seconds, tmp_path / f"{part.name}.jsonl")
        parts.PARTS[part.name](task)
        assert task.figures() and gpu_suite.read_notes(task.notes)[1:] == ([], None), part.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resume", "resume-deterministic", "stage-stops", "parity-faults"])
def test_parts_that_start_processes_pass_at_toy_size(name, tmp_path):
    """Their truths are those of test_verify_resume.py, test_faults.py and test_gpu.py."""
    command = ["bash", ROOT / "scripts" / "gpu_suite.sh", "--device", "cpu", "--tiny", "--parts", name, "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and " 0 FAILED, 0 skipped" in done.stdout, done.stdout + done.stderr


def test_every_part_has_its_code_and_its_tests():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "gpu" / "parts.py", "--help"], capture_output=True, text=True)
    assert all(part.name in done.stdout for part in gpu_suite.PARTS)
    tests = (ROOT / "tests" / "system" / "gpu" / "test_gpu.py").read_text()
    kinds = {"values", "attention", "compiled", "faults", "ranks"}
    assert kinds == {name.split("_")[0] for name in tests.split("\ndef test_")[1:]}


def test_the_driver_needs_the_standard_library_only():
    """It must report it if pydantic or torch is missing."""
    code = "import sys; import scripts.gpu.suite, scripts.gpu.parts; " \
           "assert not {'torch', 'pydantic', 'numpy', 'config'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_failed_check_is_a_fault_and_an_error_in_an_attempt_stops_nothing(tmp_path):
    task = parts.Task("cpu", True, tmp_path, 10, tmp_path / "notes.jsonl")
    task.check("loss", False, 3.5)
    with task.attempt("a kernel"):
        raise RuntimeError("no such kernel\nand a long story")
    task.figure("after", 1)
    with open(task.notes, "a") as file:
        file.write('{"figure": {"half')
    figures, faults, skipped = gpu_suite.read_notes(task.notes)
    assert (figures, skipped) == ({"loss": 3.5, "after": 1}, None)
    assert faults == ["loss is 3.5", "a kernel: RuntimeError: no such kernel"]


def test_a_machine_without_git_and_nvidia_smi_is_recorded_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for commit in ("", "abc"):
        monkeypatch.setenv("PADDOCK_COMMIT", commit)
        task = parts.Task("cpu", True, tmp_path, 60, tmp_path / f"notes{commit}")
        parts.header(task)
        assert task.figures()["commit"] == (commit or "unknown") and "CPU" in task.figures()["device"]


def test_the_host_waits_for_no_gpu_before_the_backward_of_any_objective():
    """KTO waits once, in `prepare_step`. The counts are in the script."""
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is a CPU build; fake tensors of a GPU need a CUDA build, which nightly.yml installs")
    done = subprocess.run([sys.executable, ROOT / "scripts" / "gpu" / "host_waits.py"], capture_output=True, text=True)
    assert done.returncode == 0 and "kto: " in done.stdout, done.stdout + done.stderr
