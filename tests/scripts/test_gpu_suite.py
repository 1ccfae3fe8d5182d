"""The driver of the GPU suite with fake parts: a bad one stops nothing and is reported. Real parts run in .ci/tests and every night."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import ROOT
from factories import wait_until

from model_kernels import attention
from scripts.gpu import parts
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
if part == "header" and "cuda" in sys.argv:
    note(figure={"device": "none"}, fault="torch finds no GPU")
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


@pytest.mark.parametrize(("device", "outcome"), [("cpu", True), ("cuda", None)])
def test_only_a_missing_device_skips_the_other_parts(device, outcome, suite):
    """Not a header that fails, is killed or takes too long."""
    found = suite(part("good"), part("absent", alone=True), device=device)
    assert found["good"]["ok"] is outcome
    if outcome is None:
        assert found["good"]["error"] == found["absent"]["error"] == "skipped: torch finds no cuda device"


def test_a_process_that_cannot_start_is_a_fault(suite, monkeypatch):
    def no_process(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(gpu_suite.subprocess, "Popen", no_process)
        assert suite(part("good"))["good"]["error"] == "OSError: [Errno 12] Cannot allocate memory"
    assert suite(part("good"), output="after")["good"]["ok"]


def test_a_figure_is_written_at_once_and_a_stop_ends_all_parts(suite, tmp_path):
    """SIGTERM: the parts that run are stopped and reported, the others are skipped."""
    def stop() -> None:
        figures = tmp_path / "out" / "figures.jsonl"
        wait_until(lambda: figures.exists() and "child" in figures.read_text())
        suite.suite.stop()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(stop)
        found = suite(part("hangs"), part("good", needs=("hangs",)), part("faulty", alone=True))
    assert found["hangs"]["error"].startswith("exit code -15") and found["hangs"]["figures"]["speed"] == 1.5
    assert found["good"]["error"].startswith("skipped: ") and found["faulty"]["error"] == "skipped: no time left"


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


def null_output(steps: int, waits: int = 1, grows: int = 0, recompiles_in: int = 0) -> str:
    """What a run on the null GPU prints: the line of a step comes at the end of its train_step."""
    lines = []
    for step in range(steps):
        lines += ["UserWarning: called a synchronizing CUDA operation"] * (waits if step else 50)
        lines += ["Recompiling function forward in model.py"] * (step == recompiles_in)
        lines.append(f"NULL peak {10 * 2**20} reserved {2**20 * (20 + grows * step)}")
    return "\n".join(lines)


@pytest.mark.parametrize("name, code, changes, faults", [
    ("SFT", 0, {}, []), ("SFT", 3, {}, ["exit code 3"]), ("SFT", 0, {"waits": 2}, ["2 waits"]), ("KTO", 0, {"waits": 2}, []),
    ("SFT", 0, {"grows": 1}, []), ("SFT", 0, {"grows": 6}, ["18 MiB more reserved"]), ("SFT", 0, {"recompiles_in": 1}, []),
    ("SFT", 0, {"recompiles_in": 4}, ["1 recompilations"]), ("SFT", 1, {"steps": 0}, ["exit code 1", "inf waits"])])
def test_the_nightly_run_without_a_gpu_finds_what_it_looks_for(name, code, changes, faults):
    from scripts.gpu.null.nightly import outcome_of

    assert outcome_of(code, null_output(**{"steps": 6} | changes)).faults(name) == faults


def test_every_part_has_its_code():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "gpu" / "parts.py", "--help"], capture_output=True, text=True)
    assert all(part.name in done.stdout for part in gpu_suite.PARTS)
    assert {part.name for part in gpu_suite.PARTS} == set(parts.PARTS)


def test_the_driver_needs_the_standard_library_only():
    """It must report it if pydantic or torch is missing."""
    code = "import sys; import scripts.gpu.suite, scripts.gpu.parts; " \
           "assert not {'torch', 'pydantic', 'numpy', 'config'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_failed_check_is_a_fault_and_an_error_in_an_attempt_stops_nothing(tmp_path):
    task = parts.Task("parity", "cpu", True, tmp_path, 10, tmp_path / "figures.jsonl")
    task.check("loss", False, 3.5)
    with task.attempt("a kernel"):
        raise RuntimeError("no such kernel\nand a long story")
    parts.Task("other", "cpu", True, tmp_path, 10, task.notes).figure("loss", 7)
    task.figure("after", 1)
    with open(task.notes, "a") as file:
        file.write('{"part": "parity", "figure": {"half')
    figures, faults, skipped = gpu_suite.read_figures(task.notes, "parity")
    assert (figures, skipped) == ({"loss": 3.5, "after": 1}, None)
    assert faults == ["loss is 3.5", "a kernel: RuntimeError: no such kernel"]
    assert gpu_suite.read_figures(task.notes, "parity", task.notes.stat().st_size) == ({}, [], None)  # of a later call


def test_a_machine_without_git_and_nvidia_smi_is_recorded_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    for commit in ("", "abc"):
        monkeypatch.setenv("PADDOCK_COMMIT", commit)
        task = parts.Task("header", "cpu", True, tmp_path, 60, tmp_path / f"figures{commit}")
        parts.header(task)
        assert task.figures()["commit"] == (commit or "unknown") and "CPU" in task.figures()["device"]
        kernels = " ".join(name for name, value in task.figures().items() if value == "chosen")
        assert all(f" for {purpose} in " in kernels for purpose in attention.ORDERS)


# What torch, numpy and safetensors need, and what can be carried to a machine without a network.
CARRIED = ("torch", "torchgen", "functorch", "numpy", "numpy.libs", "safetensors", "filelock", "fsspec", "jinja2", "markupsafe",
           "networkx", "sympy", "mpmath", "typing_extensions.py", "setuptools", "pydantic", "pydantic_core", "annotated_types",
           "typing_inspection", "dotenv", "tiktoken", "tiktoken_ext", "tokenizers", "regex", "yaml", "_yaml", "tqdm")


@pytest.mark.slow
def test_the_first_group_yields_its_figures_with_few_packages_and_an_empty_path(tmp_path):
    """No git, nvidia-smi, compiler, litgpt, Liger, flash-attn, transformers, datasets, wandb, pytest or NVML."""
    venv.create(tmp_path / "bare", with_pip=False)
    [packages] = (tmp_path / "bare").glob("lib/python*/site-packages")
    for name in CARRIED:
        if (source := Path(sysconfig.get_path("purelib")) / name).exists():
            (packages / name).symlink_to(source)
    (tmp_path / "tmp").mkdir()
    environment = {"PATH": "", "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path), "VIRTUAL_ENV": str(tmp_path / "bare")}
    command = [shutil.which("bash"), ROOT / "scripts" / "gpu_suite.sh", "--device", "cpu", "--tiny", "--parts", "first",
               "--commit", "abc", "--minutes", "60", "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and f"{len(gpu_suite.select_parts('first'))} ok, 0 FAILED, 0 skipped" in done.stdout, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["figures.jsonl", "first.md", "first.tar.gz", "results.jsonl"]
    records = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert all(record["figures"] for record in records)
    assert records[0]["figures"]["commit"] == "abc" and records[0]["figures"]["transformers"] == "not installed"
    assert not [*(tmp_path / "tmp").glob("gpu_suite-[!c]*")]
