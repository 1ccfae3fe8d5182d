"""The driver of the GPU suite with fake parts: a bad one stops nothing and is reported.

Real parts run in .ci/tests and every night.
"""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from commands import ROOT
from factories import wait_until

from scripts.gpu import suite as gpu_suite

PROGRAM = """
import json, os, signal, subprocess, sys, time
part, figures = sys.argv[1], sys.argv[sys.argv.index("--figures") + 1]
def note(**entry):
    with open(figures, "a") as file:
        file.write(json.dumps({"part": part, **entry}) + "\\n")
note(figure={"speed": 1.5})
if part == "fails":
    raise SystemExit("it broke")
if part == "raises":
    raise ValueError("no such kernel")
if part == "killed":  # as by the kernel if memory runs out
    os.kill(os.getpid(), signal.SIGKILL)
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
        flags = {"output": "out", "device": "cpu"} | flags
        output = flags["output"] = tmp_path / flags["output"]
        options, _ = gpu_suite.parse_args([f"--{name}={value}" for name, value in flags.items()])
        output.mkdir(exist_ok=True)
        suite = gpu_suite.Suite(options, (part("header"), *parts))
        run.suite = suite
        records = suite.run()
        suite.finish(records)
        lines = (output / "results.jsonl").read_text().splitlines()
        assert sorted(map(json.loads, lines), key=str) == sorted(records, key=str)
        assert not suite.folder.exists() and len([*output.iterdir()]) <= 8
        return {record["part"]: record for record in records[1:]}

    return run


def part(name: str, seconds: float = 60, **more) -> gpu_suite.Part:
    return gpu_suite.Part(name, "first", seconds, "made up", **more)


def test_a_failed_part_stops_no_other_and_reports_its_reason(suite, tmp_path):
    found = suite(part("fails", alone=True), part("raises"), part("killed"), part("faulty"), part("absent"), part("good", alone=True))
    ended = {name: record["ok"] for name, record in found.items()}
    assert ended == {"fails": False, "raises": False, "killed": False, "faulty": False, "absent": None, "good": True}
    assert found["fails"]["error"] == "exit code 1: it broke"
    assert found["raises"]["error"] == "exit code 1: ValueError: no such kernel"
    assert found["killed"]["error"] == "it was killed (SIGKILL), as is done when memory runs out"
    assert found["faulty"]["error"] == "speed is 1.5"
    assert found["absent"]["error"] == "skipped: no such device"
    assert all(record["figures"] == {"speed": 1.5} and record["seconds"] >= 0 for record in found.values())
    assert [*found["good"]] == ["part", "ok", "seconds", "figures", "error"]
    # The console output of the parts is in the archive.
    with tarfile.open(tmp_path / "out" / "suite.tar.gz") as archive:
        assert b"ValueError: no such kernel" in archive.extractfile("raises.txt").read()
    assert "| good | ok |" in (tmp_path / "out" / "suite.md").read_text()


def test_a_part_that_takes_too_long_is_killed_with_its_children_and_keeps_its_figures(suite):
    found = suite(part("hangs", seconds=1), part("good"))
    assert found["hangs"]["ok"] is False and found["hangs"]["error"] == "it exceeded its limit of 1 s" and found["good"]["ok"]
    assert found["hangs"]["figures"]["speed"] == 1.5
    stat = Path(f"/proc/{found['hangs']['figures']['child']}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_the_driver_needs_the_standard_library_only():
    """It must report it if pydantic or torch is missing."""
    code = "import sys; import scripts.gpu.suite, scripts.gpu.parts; " \
           "assert not {'torch', 'pydantic', 'numpy', 'config'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
