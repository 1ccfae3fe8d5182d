"""Faults of the machine: full disks, read-only folders, limits on files and memory, a cable that is cut.

The faults are real: small mounted file systems, limits of the kernel, network namespaces.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Optional

import pytest
from commands import WORLD, Command
from factories import UNMEASURED, TinyRun, assert_same_run, do_in_step
from faults import act

from checkpoint import store
from common.errors import DataError
from common.files import write_json
from data_pipeline import prepare
from data_preparation_utils import PreparationOptions, prepare_set


def can_mount() -> bool:
    """Whether this process may mount file systems; in containers even root often may not."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0


without_mounts = pytest.mark.skipif(not can_mount(), reason="mounting needs root")


def needs_mounts(test):
    return pytest.mark.root(without_mounts(test))


@pytest.fixture
def mount(tmp_path):
    """A function that mounts a small file system on a new folder; it is unmounted after the test."""
    mounted = []

    def mount(folder: Path, size: int, *options: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", folder], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in reversed(mounted):
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(option: str, folder: Optional[Path] = None) -> None:
    # With the type and the source named, mount does not repeat the old options, whose uid may have no name in this user namespace.
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"remount,{option}", "tmpfs", folder or os.environ["SMALL_DISK"]], check=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Fill a disk except for some bytes, as another program would; returns the file."""
    hog = folder / "hog"
    with open(hog, "ab", buffering=0) as file, contextlib.suppress(OSError):
        file.write(bytes(max(0, shutil.disk_usage(folder).free - leave)))
        while leave == 0:
            file.write(bytes(4096))
    return hog


@pytest.fixture
def on_small_disk(tiny_run, mount):
    """A function that trains with the run's folder on a disk of 10 MB until these exit codes; returns the run and its output."""
    def train(codes: list[int], plant, **settings) -> tuple[TinyRun, str]:
        run = tiny_run(**settings)
        mount(run.folder, 10_000_000)
        return run, run.ends(codes, plant, env={"SMALL_DISK": str(run.folder)})

    return train


def assert_one_sentence(text: str, *words: str) -> None:
    """Assert that a text has one line with an error, which contains these words, and no traceback."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in text, text
    assert all(word in errors[0] for word in words), errors[0]


def fill_the_disk_in_step_3() -> None:
    def fill_it() -> None:
        disk = Path(os.environ["SMALL_DISK"])
        while any(not (folder / "MANIFEST.json").exists() for folder in disk.rglob("tmp-*")):
            time.sleep(0.01)  # a thread still writes the checkpoint of step 2
        fill(disk)

    act(0, 3, fill_it)


@needs_mounts
@pytest.mark.parametrize("fault, words", [
    ("small", ("run/checkpoints", "bytes needed", "free")),
    ("read-only", ("/run cannot be written: Read-only file system", "OUTPUT_DIR"))])
def test_a_disk_without_room_for_a_checkpoint_is_an_error_before_the_first_step(fault, words, tiny_run, mount, capsys):
    run = tiny_run()
    mount(run.output_dir, 1_000_000, "ro") if fault == "read-only" else mount(run.folder, 100_000)
    assert run.train() == 5
    text = capsys.readouterr()
    assert "Step [" not in text.out and run.steps_saved() == []
    assert_one_sentence(text.err, *words)


@needs_mounts
@pytest.mark.parametrize("world_size", [1, WORLD])
def test_a_disk_that_fills_ends_the_run_at_the_next_save_and_with_room_it_goes_on(world_size, whole, on_small_disk):
    run, text = on_small_disk([5] * world_size, fill_the_disk_in_step_3)
    assert_one_sentence(text, str(run.folder / "checkpoints"), "bytes needed", ", 0 bytes free")
    assert store.verify(run.checkpoint(2))
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-00000002"]
    (run.folder / "hog").unlink()
    run.ends([0] * world_size)
    assert [line["step"] for line in run.metrics()] == list(range(7))
    if world_size == 1:
        assert_same_run(run, whole, 6)


def console_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    for stream in (1, 2):
        os.dup2(writer, stream)
    do_in_step(3, lambda: os.close(reader))


def test_a_run_whose_console_is_gone_goes_on(whole, tiny_run):
    run = tiny_run()
    run.ends([0], console_that_nobody_reads)
    assert_same_run(run, whole, 6)
    log = (run.folder / "log" / "rank-0.txt").read_text()
    assert "the console cannot be written: Broken pipe" in log and "Step [6/6]" in log


@needs_mounts
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_preparation_on_a_full_disk_is_an_error_and_resumes_where_there_is_room(
        workers, prepared, mount, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "CHUNK_CHARACTERS", 20_000)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"The cat number {number} saw the dog. " * 40}) + "\n" for number in range(300)))

    def shards_in(folder: Path) -> Path:
        return prepare_set("documents", str(text), folder, PreparationOptions(
            str(prepared.tokenizer), "auto", 50_000, 0.1, workers=workers, journal_seconds=0))

    small = mount(tmp_path / "small", 500_000)
    hog = fill(small, leave=250_000)
    with pytest.raises(DataError, match=rf"{small}.* cannot be written: No space left on device; [\d,]+ bytes free"):
        shards_in(small)
    assert not list(small.glob("*/manifest.json"))
    hog.unlink()
    remount("size=9000000", small)
    there, elsewhere = shards_in(small), shards_in(tmp_path / "elsewhere")
    assert [path.read_bytes() for path in sorted(there.iterdir())] == [path.read_bytes() for path in sorted(elsewhere.iterdir())]


@pytest.fixture
def synced(monkeypatch) -> list[tuple[str, int, int]]:
    """Path, number and size of each file as it is synced."""
    synced, fsync = [], os.fsync

    def noted_fsync(descriptor):
        state = os.fstat(descriptor)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), state.st_ino, state.st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    return synced


def test_every_file_of_a_checkpoint_is_on_the_disk_before_it_gets_its_name(synced, tiny_run, monkeypatch):
    """A power cut cannot be tested here, but the order of the calls shows what would be left."""
    missing, rename = [], os.rename

    def checked_rename(old, new):
        if Path(new).name.startswith("step-"):
            missing.append({str(path) for path in (Path(old), *Path(old).rglob("*"))} - {path for path, _, _ in synced})
        rename(old, new)

    monkeypatch.setattr(os, "rename", checked_rename)
    run = tiny_run(MAX_STEPS=1, **UNMEASURED).trained()
    assert missing == [set()] and synced[-1][0] == str(run.folder / "checkpoints"), "and then the name itself"


def test_a_file_that_replaces_another_is_on_the_disk_first_and_its_name_then(synced, tmp_path, monkeypatch):
    replace, before = os.replace, []
    monkeypatch.setattr(os, "replace", lambda old, new: (before.extend(synced), replace(old, new)))
    write_json(tmp_path / "facts.json", {})
    assert [path for path, _, _ in before] == [f"{tmp_path}/facts.json.tmp-{os.getpid()}"]
    assert [path for path, _, _ in synced[1:]] == [str(tmp_path)]


def test_finished_parts_of_a_preparation_are_synced_to_disk(synced, prepared, tmp_path, monkeypatch):
    """Everything in its folder before the journal counts it, and before the folder gets its name; and then the name itself."""
    unsynced, rename, replace = [], os.rename, os.replace

    def check(folder: Path) -> None:
        states = {path.name: (path.stat().st_ino, path.stat().st_size) for path in folder.iterdir()}
        unsynced.append([name for name, state in states.items() if state not in [noted[1:] for noted in synced]])

    def checked_replace(old, new):
        if Path(new).name == prepare.JOURNAL:
            check(Path(new).parent)
        replace(old, new)

    def checked_rename(old, new):
        check(Path(old))
        rename(old, new)
        synced.clear()

    monkeypatch.setattr(prepare, "CHUNK_CHARACTERS", 1000)
    monkeypatch.setattr(os, "rename", checked_rename)
    monkeypatch.setattr(os, "replace", checked_replace)
    options = PreparationOptions(str(prepared.tokenizer), "auto", 2000, 0.1, workers=1, journal_seconds=0)
    prepare_set("documents", str(prepared.shards.parents[1] / "text.jsonl"), tmp_path / "out", options)
    assert len(unsynced) > 3 and not any(unsynced), unsynced
    assert {number for _, number, _ in synced} == {(tmp_path / "out").stat().st_ino}


def test_a_limit_on_file_sizes_is_an_error_that_names_it(tiny_run):
    run, (small, tiny) = tiny_run(ASYNC_SAVE="false"), (partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, -1)) for size in (100_000, 1000))
    assert_one_sentence(run.ends([5], small), "100,000", "ulimit -f unlimited")
    assert run.steps_saved() == []
    run.ends([5], partial(act, 0, 3, tiny))
    assert run.steps_saved() == [2]


@pytest.fixture
def two_nodes():
    """Two network namespaces joined by a veth pair: [(name, its end of the cable, its address)]."""
    nodes = [(f"cut{number}-{os.getpid()}", f"cut{number}x{os.getpid()}", f"10.213.78.{number + 1}") for number in range(2)]
    (first, link, _), (second, other, _) = nodes

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name, _, _ in nodes:
            ip("netns", "add", name)
        ip("link", "add", link, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
        for name, end, address in nodes:
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield nodes
    finally:
        for name, _, _ in nodes:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_a_cable_that_is_cut_between_two_nodes_ends_both(tiny_run, two_nodes):
    run = tiny_run(MAX_STEPS=1_000_000, SAVE_EVERY=20, KEEP_LAST=2, DISTRIBUTED_TIMEOUT=10, **UNMEASURED)
    commands = []
    for number, (name, link, _) in enumerate(two_nodes):
        inside = f"import os, sys; os.execvp('ip', ['ip', 'netns', 'exec', '{name}', sys.executable, *sys.argv[1:]])"
        commands.append(Command(run, "-c", inside, "scripts/launch.py", "--nnodes=2", f"--node-rank={number}",
                                f"--master-addr={two_nodes[0][2]}", "--master-port=29500", "--nproc-per-node=1", "--",
                                *run.argv(), env={"GLOO_SOCKET_IFNAME": link}))
    with commands[0], commands[1]:
        commands[0].wait_for(lambda: bool(run.steps_saved()))
        subprocess.run(["ip", "-n", two_nodes[0][0], "link", "set", two_nodes[0][1], "down"], check=True)
        codes = [command.wait() for command in commands]
        text = "".join(command.text() for command in commands)
    assert set(codes) <= {1, 6}, text
    assert all("error: " in command.last_line() and "rank 1" in command.last_line() for command in commands), text
    assert store.verify(run.checkpoint(run.steps_saved()[-1]))
