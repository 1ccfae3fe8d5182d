"""A job is started again after a crash or a hang, from its newest checkpoint, and says so."""

import json
import os
import signal
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import Command, launch
from factories import assert_same_run, do_in_step, free_port

from checkpoint.manifest import MANIFEST, manifest_bytes
from config import Config
from extensions.report.data import RunReader
from learn import optim
from parallel import process, ranks
from scripts.launch import Ending, Job, RankExit, agree

HANG, CRASH = 6, 1


class Played(Job):
    """A job whose starts are played: each is the exit code, the steps saved, and whether a signal stopped it."""

    def __init__(self, folder: Path, *starts: tuple, most: int = 3, **settings):
        args = Namespace(max_restarts=most, nnodes=1)
        super().__init__(args, ["--max-steps=9"], Config(output_dir=str(folder), **settings), ranks=2)
        self.starts, self.folder, self.written, self.flags_seen, self.told = iter(starts), folder / "named", 0, [], []

    def start(self, number: int, flags: list[str]) -> Ending:
        self.flags_seen.append(flags[1:])
        self.told.append(json.loads(os.environ[process.RESTART]))
        code, steps, *stopped = next(self.starts)
        for step in steps:
            self.written += 1
            checkpoint = self.folder / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / MANIFEST).write_bytes(manifest_bytes({"written": self.written, "step": step}))
        exits = [RankExit(False, float(number), 1, code, f"cause {number}")] if code else []
        return Ending(exits, bool(stopped), self.folder if self.folder.exists() else None)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize(("starts", "count", "code", "sentence", "words"), [
    ([(0, [9])], 1, 0, "", ""),
    ([(CRASH, [2]), (HANG, [4]), (0, [9])], 3, 0, "", "restarted 2 times"),
    *[([(code, [2])], 1, code, "cause 0", "") for code in (2, 3, 4, 5, 130, 143)],
    ([(CRASH, [2]), (3, [])], 2, 3, "cause 1", "restarted 1 time"),
    ([(CRASH, [2], "signal")], 1, CRASH, "cause 0", ""),
    ([(CRASH, [2]), (CRASH, [4]), (CRASH, [6]), (CRASH, [8])], 4, CRASH, "cause 3", "restarted 3 times"),
    # No step gained in two starts in a row: the first of their causes.
    ([(CRASH, []), (HANG, [])], 2, CRASH, "cause 0", "2 starts in a row saved no checkpoint"),
    ([(CRASH, [2]), (HANG, []), (CRASH, [])], 3, HANG, "cause 1", "2 starts in a row saved no checkpoint"),
    ([(CRASH, []), (CRASH, [2]), (CRASH, []), (0, [9])], 4, 0, "", "restarted 3 times")])
def test_the_launcher_restarts_crashes_and_hangs_and_reports_the_cause(starts, count, code, sentence, words, tmp_path):
    job = Played(tmp_path, *starts)
    ending, message = job.run()
    cause = ending.cause or RankExit(False, 0, 0, 0)
    assert (len(job.told), cause.code, cause.sentence, message) == (count, code, sentence, words)
    assert job.told == [{"restart": number, "cause": f"cause {number - 1}" if number else "", "settings": {}}
                        for number in range(count)]


@pytest.mark.parametrize(("settings", "added"), [
    ({}, ["--run-name=named"]), ({"run_name": "named", "resume": "never"}, ["--run-name=named", "--resume=auto"]),
    ({"run_name": "old"}, ["--run-name=named"]),
    ({"resume": "named/checkpoints/step-00000001"}, ["--run-name=named", "--resume=auto"]),
    ({"resume": "elsewhere/step-00000001"}, ["--run-name=named"])])
def test_the_next_start_resumes_the_run_that_this_one_has_written(settings, added, tmp_path, monkeypatch):
    # A run that has written nothing is repeated as it was: the earlier one may not have been moved aside yet.
    for number, (steps, most, flags) in enumerate((([2], 3, [[], added]), ([], 3, [[], []]), ([2], 0, [[]]))):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        job = Played(folder, (CRASH, steps), (0, [9]), most=most, **settings)
        job.run()
        assert job.flags_seen == flags


def test_checkpoints_that_were_there_before_are_no_gain(tmp_path):
    before = Played(tmp_path, (CRASH, [2, 4]), most=0)
    before.run()
    job = Played(tmp_path, (CRASH, []), (CRASH, []), run_name="named")
    assert job.run()[1] == "2 starts in a row saved no checkpoint"


def test_machines_agree_as_json_and_only_if_all_answer():
    hosted = ranks.host_store(process.listen_at(process.LOOPBACK, 0))

    def of(node: int, again: bool = True, key: str = "a", seconds: float = 20) -> dict:
        store = dist.TCPStore(hosted.host, hosted.port, is_master=False, timeout=timedelta(seconds=20))
        state = {"again": again, "cause": RankExit(node == 0, 5.0 - node, node, 1, f"rank {node}"), "newest": [node, 7]}
        return agree(store, [f"{key}-{other}" for other in range(2)], node, state, seconds)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(of, range(2))
        assert first == second == {"again": True, "cause": RankExit(False, 4.0, 1, 1, "rank 1"), "newest": [0, 7]}
        assert not any(state["again"] for state in pool.map(lambda node: of(node, node == 1, "b"), range(2)))
    assert not of(0, key="c", seconds=0.1)["again"], "nobody answers"
    hosted.set("d-1", b"\x80\x04")  # what a stranger wrote
    assert not of(0, key="d")["again"]


def signal_once(number: signal.Signals) -> None:
    """In a rank: a signal in step 4 of the first start only."""
    if not process.restart_info()["restart"]:
        do_in_step(4, lambda: os.kill(os.getpid(), number), optim)


die_once, stop_once = (partial(signal_once, number) for number in (signal.SIGKILL, signal.SIGSTOP))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_started_again_and_the_run_ends_identical(world, request, tiny_run):
    run, rank = tiny_run(ASYNC_SAVE="false"), world - 1
    with Command(run, "scripts/launch.py", f"--nproc-per-node={world}", "--max-restarts=3", *run.argv(), plant="test_restart:die_once",
                 planted_in=rank) as command:
        assert command.wait() == 0, command.text()
    assert_same_run(run, request.getfixturevalue("whole" if world == 1 else "whole_on_two_ranks"), 6)
    cause = f"rank {rank} was killed by SIGKILL (out of memory? see dmesg)"
    where = ". Each rank's output is in " * (world > 1)
    assert f"warning: {cause}{where}" in command.text() and ". Restart 1 of 3 from step 2\n" in command.text()
    assert command.last_line() == "Finished; restarted 1 time"
    first, second = [line for line in run.lines("events") if line["event"] == "start"]
    assert "restart" not in first and (second["restart"], second["cause"], second["step"]) == (1, cause, 2)
    reader = RunReader(run.folder, "run")
    reader.read()
    data = reader.data(100)
    assert [each["reason"] for each in data["goodput"]["interruptions"]] == [f"{cause} (restarted by the launcher)"]
    assert "1 interruption" in data["health"][-1][1] and "restarted by the launcher" in data["health"][-1][1]


@pytest.mark.parametrize(("name", "world"), [
    ("SIGTERM", 1), pytest.param("SIGINT", 2, marks=pytest.mark.slow), pytest.param("SIGTERM", 2, marks=pytest.mark.slow)])
def test_a_signal_between_two_starts_ends_the_job(name, world, tiny_run):
    run = tiny_run(ASYNC_SAVE="false")
    with Command(run, "scripts/launch.py", f"--nproc-per-node={world}", "--max-restarts=3", *run.argv(), plant="test_restart:die_once",
                 planted_in=0) as command:
        command.wait_for(lambda: "Restart 1 of 3" in command.text())
        command.process.send_signal(getattr(signal, name))
        assert command.wait() == 143, command.text()
    assert run.steps_saved() == [2]


@pytest.mark.slow
def test_two_machines_start_again_together(whole_on_two_ranks, tiny_run):
    """Two launchers, as on two machines, except for the network; the folder is shared."""
    run, port = tiny_run(), free_port()
    commands = [Command(run, "scripts/launch.py", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--max-restarts=3",
                        "--master-addr=127.0.0.1", f"--master-port={port}", *run.argv(), plant="test_restart:die_once") for node in (0, 1)]
    assert [command.wait() for command in commands] == [0, 0], commands[0].text() + commands[1].text()
    assert_same_run(run, whole_on_two_ranks, 6)
    second = [line for line in run.lines("events") if line["event"] == "start"][1]
    assert second["cause"].startswith("rank 1 was killed by SIGKILL"), "which the launcher of rank 0 has learnt from the other"


@pytest.mark.slow
def test_a_hang_is_started_again(whole_on_two_ranks, tiny_run):
    run = tiny_run()
    with launch(run, "--max-restarts=3", plant="test_restart:stop_once", DISTRIBUTED_TIMEOUT=10) as command:
        assert command.wait() == 0, command.text()
    assert_same_run(run, whole_on_two_ranks, 6)
    warning, = [line for line in command.text().splitlines() if "Restart 1 of 3" in line]
    assert warning.startswith("warning: hang: ") and "rank 1" in warning, warning
    assert command.last_line() == "Finished; restarted 1 time"
