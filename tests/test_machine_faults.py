"""What the machine does to a run: full disks, read-only folders, limits on files and memory, a cable that is cut.

The faults are real: small file systems that are mounted and unmounted, limits that the kernel holds, network namespaces.
"""

import contextlib
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import TinyRun, do_in_step, without_clocks

import checkpoints
import run_state
import train

ROOT = Path(__file__).parent.parent
WORLD = 2


def can_mount() -> bool:
    """Whether this process may mount; containers often may not, even as root."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounting needs root")


@pytest.fixture
def mount(tmp_path):
    """Mount a small file system on a new folder; it is gone after the test."""
    mounted = []

    def mount(folder: Path, size: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in reversed(mounted):
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Another program that takes all the room but so many bytes; returns its file."""
    hog = folder / "hog"
    with open(hog, "ab", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(max(0, shutil.disk_usage(folder).free - leave)))
        while leave == 0:
            file.write(bytes(4096))
    return hog


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory) -> TinyRun:
    """A run to which nothing happened."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("whole"))
    assert run.train() == 0
    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_one_sentence(text: str, *words: str) -> None:
    """The last thing said is one error that has these words, and there is no traceback."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in text, text
    assert all(word in errors[0] for word in words), errors[0]


# ------------------------------------------------------------------------------------------------------------------ full disks


def fill_the_disk_in_step_3() -> None:
    if os.environ.get("RANK", "0") == "0":
        do_in_step(3, lambda: fill(Path(os.environ["SMALL_DISK"])))


@needs_mounts
def test_a_disk_too_small_for_a_checkpoint_is_told_before_the_first_step(tiny_run, mount, capsys):
    run = tiny_run()
    mount(run.folder, 100_000)
    assert run.train() == 5
    text = capsys.readouterr()
    assert "Step [" not in text.out and run.steps_saved() == []
    assert_one_sentence(text.err, str(run.folder / "checkpoints"), "bytes needed", "free")


@needs_mounts
def test_a_disk_with_no_byte_left_is_told_before_the_first_step(tiny_run, mount, capsys):
    run = tiny_run()
    fill(mount(run.folder, 100_000))
    assert run.train() == 5
    assert_one_sentence(capsys.readouterr().err, str(run.folder), "No space left", "0 bytes are free")


@needs_mounts
def test_a_finished_run_needs_no_room(tiny_run, mount):
    run = tiny_run()
    mount(run.folder, 10_000_000)
    assert run.train() == 0
    fill(run.folder, leave=20_000)
    assert run.train() == 0


@needs_mounts
@pytest.mark.parametrize("world_size", [1, WORLD])
def test_a_disk_that_fills_ends_the_run_at_the_next_save_and_with_room_it_goes_on(world_size, whole, tiny_run, mount):
    run = tiny_run()
    mount(run.folder, 10_000_000)
    job = run.start(world_size, fill_the_disk_in_step_3, env={"SMALL_DISK": str(run.folder)})
    assert job.wait() == [5] * world_size, job.text()
    assert_one_sentence(job.text(), str(run.folder / "checkpoints"), "bytes needed", ", 0 free")
    assert run.steps_saved() == [2] and checkpoints.verify(run.checkpoint(2))
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000002"]
    # One warning a file: of metrics, the ledger, and what rank 0 says.
    assert job.text().count("warning: ") == job.text().count("No space left on device; the run goes on") == 3
    (run.folder / "hog").unlink()
    job = run.start(world_size)
    assert job.wait() == [0] * world_size, job.text()
    assert [line["step"] for line in run.metrics()] == list(range(7))
    if world_size == 1:
        assert run.hashes(6) == whole.hashes(6)


def fill_the_disk_in_the_save_of_step_4() -> None:
    """Between the look at what is free and the last byte."""
    original, saves = run_state.convert.save_model_folder, iter(range(9))

    def save_model_folder(*arguments):
        if next(saves) == 1:
            fill(Path(os.environ["SMALL_DISK"]), leave=200_000)
        return original(*arguments)

    run_state.convert.save_model_folder = save_model_folder


@needs_mounts
def test_a_disk_that_fills_within_a_save_publishes_nothing(tiny_run, mount):
    run = tiny_run()
    mount(run.folder, 10_000_000)
    job = run.start(plant=fill_the_disk_in_the_save_of_step_4, env={"SMALL_DISK": str(run.folder)})
    assert job.wait() == [5], job.text()
    assert_one_sentence(job.text(), str(run.checkpoint(4)), "bytes needed", "free")
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000002"]
    assert checkpoints.verify(run.checkpoint(2))
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4], "there was room for these"


def free_the_disk_in_step_5() -> None:
    fill_the_disk_in_step_3()
    do_in_step(5, (Path(os.environ["SMALL_DISK"]) / "hog").unlink)


@needs_mounts
def test_a_disk_that_was_full_between_two_saves_costs_no_line(whole, tiny_run, mount):
    run = tiny_run(SAVE_EVERY=6, KEEP_BEST=0)
    mount(run.folder, 10_000_000)
    job = run.start(plant=free_the_disk_in_step_5, env={"SMALL_DISK": str(run.folder)})
    assert job.wait() == [0], job.text()
    assert run.hashes(6) == whole.hashes(6)
    assert without_clocks(run.metrics()) == without_clocks(whole.metrics())
    assert (run.folder / "ledger.jsonl").read_text() == (whole.folder / "ledger.jsonl").read_text()
    told = (run.folder / "log" / "rank-0.txt").read_text().splitlines()
    assert sum("Step [" in line for line in told) == 6 and all(line.startswith("[CPU0] ") for line in told)


def bad_gradient_on_a_full_disk() -> None:
    fill_the_disk_in_step_3()
    do_in_step(4, lambda: setattr(train, "gradient_norm", lambda model: torch.tensor(math.nan)))


@needs_mounts
def test_a_non_finite_step_on_a_full_disk_is_told_as_such(tiny_run, mount):
    run = tiny_run(SAVE_EVERY=0, KEEP_BEST=0)
    mount(run.folder, 10_000_000)
    job = run.start(plant=bad_gradient_on_a_full_disk, env={"SMALL_DISK": str(run.folder)})
    assert job.wait() == [4], job.text()
    assert_one_sentence(job.text(), "step 4 was not finite on rank 0", "could not be saved")
    assert "debug/step-00000004 cannot be written" in job.text()


def console_on_the_full_disk() -> None:
    fill_the_disk_in_step_3()
    file = os.open(f"{os.environ['SMALL_DISK']}/console.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)


@needs_mounts
def test_a_console_on_the_full_disk_changes_no_exit_code(tiny_run, mount):
    run = tiny_run()
    mount(run.folder, 10_000_000)
    job = run.start(plant=console_on_the_full_disk, env={"SMALL_DISK": str(run.folder)})
    assert job.wait() == [5]
    assert run.steps_saved() == [2] and "Step [2/6]" in (run.folder / "console.txt").read_text()


def console_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    for stream in (1, 2):
        os.dup2(writer, stream)
    do_in_step(3, lambda: os.close(reader))


def test_a_run_whose_console_is_gone_goes_on(whole, tiny_run):
    run = tiny_run()
    job = run.start(plant=console_that_nobody_reads)
    assert job.wait() == [0]
    assert run.hashes(6) == whole.hashes(6)
    told = (run.folder / "log" / "rank-0.txt").read_text()
    assert "the console cannot be written: Broken pipe" in told and "Step [6/6]" in told
