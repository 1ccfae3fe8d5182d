"""The driver of the GPU suite with fake parts: a bad one stops nothing and is reported. .ci/run runs the real parts."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from factories import wait_until

from common.errors import DataError
from scripts.dev import write_docs
from scripts.gpu import parts, probe
from scripts.gpu import suite as gpu_suite

ROOT = Path(__file__).resolve().parents[2]

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
    assert found["hangs"]["ok"] is False and found["hangs"]["error"] == "it took longer than its 1 s" and found["good"]["ok"]
    assert found["hangs"]["figures"]["speed"] == 1.5
    stat = Path(f"/proc/{found['hangs']['figures']['child']}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", timeout=10)


def test_a_part_that_needs_a_failed_one_or_has_no_time_left_is_skipped(suite):
    found = suite(part("fails"), part("good", needs=("fails",)), part("faulty", needs=("good",)),
                  part("absent", needs=("fails",), alone=True), jobs=2)
    for name, needed in (("good", "fails"), ("faulty", "good"), ("absent", "fails")):
        assert found[name]["error"].startswith(f"skipped: it needs {needed}"), name
    assert suite(part("good"), minutes=0.001, output="late")["good"]["error"] == "skipped: no time was left"


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


def test_every_part_has_its_code_and_its_tests():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "gpu" / "parts.py", "--help"], capture_output=True, text=True)
    assert all(part.name in done.stdout for part in gpu_suite.PARTS)
    tests = (ROOT / "tests" / "system" / "gpu" / "test_gpu.py").read_text()
    kinds = {"values", "attention", "compiled", "faults", "ranks"}
    assert kinds == {name.split("_")[0] for name in tests.split("\ndef test_")[1:]}


def test_the_driver_needs_the_standard_library_only(tmp_path):
    """It must report it if pydantic or torch is missing."""
    code = "import sys; import scripts.gpu.suite, scripts.gpu.parts; " \
           "assert not {'torch', 'pydantic', 'numpy', 'config'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    command = ["bash", ROOT / "scripts" / "gpu_suite.sh", "--device", "cpu", "--parts", "header",
               "--output", tmp_path / "out", "--commit", "abc123"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("1 ok, 0 FAILED, 0 skipped") and "| header | ok |" in done.stdout
    [record] = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert record["figures"]["torch"] and record["figures"]["commit"] == "abc123" and record["figures"]["device"].startswith("CPU")


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


@pytest.fixture
def task(tmp_path):
    return parts.Task("cpu", False, tmp_path, 10, tmp_path / "memory.notes.jsonl")


def test_each_layout_is_measured_in_a_process_and_the_least_share_counts(task, monkeypatch):
    started = []

    def run_part(self, part: str, *flags: str) -> tuple[int, str]:
        assert (part, flags[0]) == ("memory", "--layout") and not self.layout
        started.append(flags[1])
        self.figure(flags[1], {"forecast GiB": 10.0, "USABLE": 0.9 if flags[1] == "selective" else 0.95})
        return 0, ""

    monkeypatch.setattr(parts.Task, "run_part", run_part)
    probe.memory(task)
    assert started == [*probe.FORECAST] and len({*started}) == 8
    assert task.figures()["USABLE"] == 0.9


def test_a_process_of_the_memory_part_measures_one_layout(tmp_path):
    task = parts.Task("cpu", True, tmp_path, 60, tmp_path / "memory.notes.jsonl")
    code, output = task.run_part("memory", "--layout", "sharded")
    assert code == 0, output
    assert [*task.figures()] == ["sharded"] and [*task.figures()["sharded"]] == ["forecast GiB"]  # torch measures a GPU only


def test_nvml_is_read_before_cuda_starts_and_after_the_steps(task, monkeypatch):
    gib, events = probe.GIB, []
    used = iter([{"GPU-a": 1 * gib, "GPU-b": 70 * gib}, {"GPU-a": 14 * gib, "GPU-b": 75 * gib}])
    monkeypatch.setattr(probe, "used_memory", lambda: events.append("NVML") or next(used))
    monkeypatch.setattr(probe, "peak_of_a_step", lambda *_: events.append("steps") or 10 * gib)
    monkeypatch.setattr("model_utils.choose_dtype", lambda *_: events.append("CUDA") or torch.bfloat16)
    monkeypatch.setattr("learn.cost.estimate_memory", lambda *_: SimpleNamespace(total=10.4 * gib))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a", total_memory=80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 12 * gib)
    task.device, task.layout = "cuda", "as it is"
    probe.memory(task)
    assert events == ["NVML", "CUDA", "steps", "NVML"]
    figures = task.figures()["as it is"]
    assert figures == {"forecast GiB": 10.4, "allocated GiB": 10, "reserved GiB": 12, "context GiB": 1,
                       "USABLE": round((80 - 1) / 80 * 10.4 / 12, 3)}


def test_a_forecast_of_the_usable_share_just_fits():
    for forecast, reserved, context in ((10, 12, 1), (10, 10, 0), (10, 9, 2)):
        largest = 80 * probe.usable_share(forecast, reserved, context, 80)
        assert largest * reserved / forecast + context == pytest.approx(80)


HEADER = {"part": "header", "ok": True, "seconds": 3.0, "error": None,
          "figures": {"device": "NVIDIA H200", "capability": "9.0", "commit": "abc", "torch": "2.11.0+cu130"}}
SPEED = {"part": "speed-1b", "ok": True, "seconds": 100.0, "error": None,
         "figures": {"paddock": {"tokens_per_second": 54321.4, "mfu": 0.5, "profile": [{"name": "mm", "ms": 1.5, "share": 0.25, "calls": 3}]},
                     "hf": "skipped: not | installed",
                     "hf-liger": {"tokens_per_second": 40000.0, "mfu": 0.4}, "exit code": 0}}
BAD = {"part": "fsdp", "ok": False, "seconds": 2.0, "figures": {}, "error": "it broke"}


def test_the_page_has_the_machine_the_verdicts_and_all_figures():
    page = write_docs.gpu_page([HEADER, SPEED | {"seconds": 1.0}, BAD, SPEED])
    for line in ("| device | NVIDIA H200 |", "| fsdp | FAILED | 2 | it broke |", "| speed-1b | ok | 100 |  |",
                 "| | tokens_per_second | mfu |", "| paddock | 54,321 | 0.5 |", "| 1.500 | 25.0 % | 3 | `mm` |", "| hf-liger | 40,000 | 0.4 |",
                 "| hf | skipped: not \\| installed |"):
        assert line in page.splitlines(), line
    assert "Nothing of Paddock has been run" not in page


def test_the_page_does_not_mix_commits_or_machines_and_is_about_gpus():
    other = HEADER | {"figures": HEADER["figures"] | {"commit": "def"}}
    page = write_docs.gpu_page([HEADER, SPEED, other, BAD])
    assert "54,321" not in page and "| fsdp | FAILED" in page
    assert "54,321" in write_docs.gpu_page([HEADER, SPEED, HEADER, BAD])  # two calls, of both groups
    for records in ([SPEED], [HEADER | {"figures": {"device": "CPU (2 threads)"}}, BAD]):
        with pytest.raises(DataError, match="docs/gpu.md is about a GPU"):
            write_docs.gpu_page(records)
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert page.partition("## How to run it")[2] == write_docs.gpu_page([]).partition("## How to run it")[2]
