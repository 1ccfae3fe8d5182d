"""A job is started again after a crash or a hang, from its newest checkpoint, and says so."""

import json
import os
import signal
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from commands import Command, launch
from factories import PATIENCE, assert_same_run, do_in_step, free_port

from checkpoint.manifest import MANIFEST, manifest_bytes
from config import Config
from extensions.report.data import RunReader
from learn import optim
from parallel import process, ranks
from scripts import launch as launch_script
from scripts import machines
from scripts.launch import Ending, Job, RankExit
from scripts.machines import Machines

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
    assert job.told == [{"restart": number, "cause": f"cause {number - 1}" if number else "", "settings": {},
                         "launcher": os.getpid() if number < 3 else None} for number in range(count)]


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


@pytest.fixture
def hosted():
    """The store on the first machine."""
    store = ranks.host_store(process.listen_at(process.LOOPBACK, 0))
    store.set("settings", "{}")
    return store


@pytest.fixture
def jobs(hosted):
    """The two machines of a job, whose launchers have met."""
    jobs = [Job(Namespace(max_restarts=3, nnodes=2, node_rank=node), [], Config(), ranks=1) for node in range(2)]
    for node, job in enumerate(jobs):
        job.machines = Machines(hosted.host, hosted.port, node, 2, None if node else hosted)
        job.machines.publish(ranks=1)
        job.machines.start()
    assert [job.machines.wait("ranks", "start", PATIENCE, True) for job in jobs] == [([], "")] * 2
    yield jobs
    for job in jobs:
        job.machines.stop()


def agree(job: Job, again: bool = True, number: int = 0, code: int = CRASH) -> tuple:
    node = job.args.node_rank
    exits = [RankExit(node == 0, 5.0 - node, node, code, f"rank {node}", "a trace")] if code else []
    ending, again, newest = job.agree(number, Ending(exits), again, [node, 7])
    return ending.cause and ending.cause.sentence, again, newest


def test_machines_agree_as_json_and_only_if_all_answer(jobs, monkeypatch, capsys):
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(agree, jobs)] == [("rank 1", True, [0, 7])] * 2
        assert [*pool.map(agree, jobs, [False, True], [1, 1])] == [("rank 1", False, [0, 7])] * 2
        assert [*pool.map(agree, jobs, [False, False], [2, 2], [0, 0])] == [(None, False, [0, 7]), (None, False, [1, 7])]
    monkeypatch.setattr(machines, "SILENT_SECONDS", 1)
    jobs[1].machines.stop()
    lost = "node 1 did not answer for 1 s (the launcher, machine or network failed)"
    assert agree(jobs[0], number=3) == (lost, False, [0, 7])
    assert f"warning: no restart, because {lost}" in capsys.readouterr().err


def test_without_the_first_machine_only_that_one_is_blamed(jobs, monkeypatch, capsys):
    def lost(beat):
        raise ConnectionResetError("Broken pipe")

    monkeypatch.setattr(machines, "SILENT_SECONDS", 1)
    jobs[1].machines._exchange = lost
    missing, problem = jobs[1].machines.wait("ended-0", "report how the ranks ended", PATIENCE)
    assert (missing, problem) == ([0], "node 0 did not answer for 1 s (the launcher, machine or network failed)")
    assert agree(jobs[1]) == ("rank 1", False, [1, 7]) and f"warning: no restart, because {problem}" in capsys.readouterr().err


def test_an_error_of_all_ranks_is_that_of_the_first():
    exits = [RankExit(False, at, rank, 3, "data: no such file") for rank, at in ((1, 1.0), (0, 2.0), (2, 1.5))]
    assert Ending(exits).cause.rank == 0
    assert Ending([*exits, RankExit(False, 0.5, 3, 1, "rank 3 was killed by SIGKILL")]).cause.rank == 3
    assert Ending([RankExit(True, 0.5, 0, 1, "lost"), *exits[:1]]).cause.rank == 1 and Ending([]).cause is None


@pytest.mark.parametrize(("other", "words"), [
    ("signalled", "Stopped by a signal to node 1."), ("lost", "Stopped because node 1 is gone: the launcher was killed"), ("saves", "")])
def test_the_machine_that_stopped_the_job_is_named(other, words, jobs, monkeypatch, capsys):
    saved = [RankExit(False, 5.0, 0, process.EXIT_PREEMPTED)]
    monkeypatch.setattr(launch_script, "SEND_SECONDS", 1)
    if other == "lost":
        jobs[1].machines.stop()
    with ThreadPoolExecutor() as pool:
        if other == "signalled":
            pool.submit(jobs[1].agree, 0, Ending(saved, stopped=True), False, [0, 7])
        assert jobs[0].agree(0, Ending(saved), False, [0, 7])[1:] == (False, [0, 7])
    shown = capsys.readouterr().out
    assert words in shown and ("Stopped" in shown) == bool(words), "one that still saves is not lost"


def test_another_number_of_machines_is_named_at_once_by_both(hosted):
    sides = [Machines(hosted.host, hosted.port, node, count, None if node else hosted) for node, count in ((0, 2), (1, 3))]
    for each in sides:
        each.publish(ranks=1, nnodes=len(each.keys))
        each.start()
    with ThreadPoolExecutor() as pool:
        problems = [*pool.map(lambda each: each.wait("ranks", "start", PATIENCE, True)[1], sides)]
    for each in sides:
        each.stop()
    assert problems == ["node 1 was started with --nnodes 3, this one with --nnodes 2", "node 0 was started with --nnodes 2, this one with --nnodes 3"]


def test_a_node_rank_that_is_used_twice_is_refused_and_a_launcher_that_ended_is_replaced(hosted):
    first, twice, again = (Machines(hosted.host, hosted.port, 1, 3) for _ in range(3))

    def start(launcher: Machines) -> str:
        launcher.publish(ranks=1)
        launcher.start()
        return launcher.wait("ranks", "start", PATIENCE, True, nodes=[1])[1]

    assert [start(first), start(twice)] == ["", "node 1 is here already"]
    first.stop(), twice.stop()
    assert start(again) == ""
    again.stop()


@pytest.mark.parametrize(("text", "problem"), [
    (b"\x80\x04", "node 1 did not answer"), (b"5", "node 1 did not answer"),
    (b'[0, {"ended-0": {"again": true, "cause": [5], "newest": [0, 7]}}]', "a machine's report is not valid"),
    (b'[0, {"ended-0": 5}]', "a machine's report is not valid")])
def test_what_a_stranger_writes_restarts_nothing(text, problem, jobs, monkeypatch):
    monkeypatch.setattr(machines, "SILENT_SECONDS", 1)
    jobs[1].machines.stop()
    jobs[0].machines.store.set("machine-1", text)
    sentence, again, _ = agree(jobs[0])
    assert sentence.startswith(problem) and not again


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
    assert "SIGTERM: saving" not in command.text() and "Stopped." not in command.text(), "the user has sent no signal"
    assert world == 1 or f"warning: {cause}; the other ranks of this machine stop\n" in command.text()
    assert f"warning: {cause}{where}" in command.text() and ". Restart 1 of 3 from step 2\n" in command.text()
    assert command.last_line() == "Finished; restarted 1 time"
    first, second = [line for line in run.lines("events") if line["event"] == "start"]
    assert "restart" not in first and first["launcher"] == second["launcher"] == command.pid and (second["restart"], second["cause"], second["step"]) == (1, cause, 2)
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
def test_each_machine_names_the_rank_that_failed_on_another(tiny_run):
    run, port = tiny_run(), free_port()
    commands = [Command(run, "scripts/launch.py", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1",
                        f"--master-port={port}", *run.argv(), plant="test_restart:die_once") for node in (0, 1)]
    assert [command.wait() for command in commands] == [1, 1]
    cause = "rank 1 was killed by SIGKILL (out of memory? see dmesg)"
    assert f"error: {cause}" in commands[1].last_line() and commands[0].last_line().startswith(f"error: {cause}")
    assert commands[0].last_line().endswith(". Its output is on node 1") and run.lines("events")[-1]["reason"] == cause


def never_join():
    """Called before anything else in a rank: it does not come to where the ranks meet."""
    time.sleep(10 * PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code", "words"), [
    (signal.SIGTERM, 143, "Stopped by a signal to node 1."), (signal.SIGKILL, 1, "error: node 1 did not answer for 30 s")])
def test_a_machine_that_ends_before_its_ranks_join_ends_the_others(sent, code, words, tiny_run):
    run, port = tiny_run(), free_port()
    here, other = [Command(run, "scripts/launch.py", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1",
                           f"--master-port={port}", *run.argv(), plant="test_restart:never_join") for node in (0, 1)]
    children = Path(f"/proc/{other.pid}/task/{other.pid}/children")
    other.wait_for(lambda: "All 2 machines are here" in other.text() and children.read_text())
    for pid in [other.pid, *map(int, children.read_text().split())] if sent == signal.SIGKILL else [other.pid]:
        os.kill(pid, sent)
    assert other.wait() == (143 if code == 143 else -signal.SIGKILL)
    assert here.wait() == code and here.last_line().startswith(words), here.text()


@pytest.mark.slow
def test_a_check_on_two_machines_ends_well(tiny_run):
    """The ranks do not meet, and the second machine ends long before the first."""
    run, port = tiny_run(), free_port()
    commands = [Command(run, "scripts/launch.py", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=127.0.0.1",
                        f"--master-port={port}", *run.argv(), "--check", plant="test_restart:check_slowly", planted_in=0) for node in (0, 1)]
    assert [command.wait() for command in commands] == [0, 0], commands[0].text() + commands[1].text()
    assert "Ready to train." in commands[0].text()


def check_slowly():
    time.sleep(5)


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [False, True])
def test_when_a_machine_is_lost_the_other_says_so_and_ends(signalled, tiny_run):
    run, port = tiny_run(MAX_STEPS=100_000, SAVE_EVERY=0, VALIDATE_EVERY=0, HELLASWAG_EVERY=0), free_port()
    here, lost = [Command(run, "scripts/launch.py", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--max-restarts=3",
                          "--master-addr=127.0.0.1", f"--master-port={port}", *run.argv()) for node in (0, 1)]
    here.wait_for_step(2)
    for pid in [lost.pid, *map(int, Path(f"/proc/{lost.pid}/task/{lost.pid}/children").read_text().split())]:
        os.kill(pid, signal.SIGKILL)
    lost.process.wait()
    here.wait_for(lambda: "Waiting for node 1 to report how the ranks ended (up to 11 min, or 30 s without a sign of life)" in here.text())
    if signalled:
        here.process.send_signal(signal.SIGTERM)
        assert here.wait(timeout=10) == 143 and here.last_line() == "Stopped."
    else:
        assert here.wait() == 1
        assert here.last_line().startswith("error: node 1 did not answer for 30 s (the launcher, machine or network failed)")
        assert run.lines("events")[-1]["reason"].startswith("node 1 did not answer")


@pytest.mark.slow
def test_a_hang_is_started_again(whole_on_two_ranks, tiny_run):
    run = tiny_run()
    with launch(run, "--max-restarts=3", plant="test_restart:stop_once", DISTRIBUTED_TIMEOUT=10) as command:
        assert command.wait() == 0, command.text()
    assert_same_run(run, whole_on_two_ranks, 6)
    warning, = [line for line in command.text().splitlines() if "Restart 1 of 3" in line]
    assert warning.startswith("warning: hang: ") and "rank 1" in warning, warning
    assert command.last_line() == "Finished; restarted 1 time"
