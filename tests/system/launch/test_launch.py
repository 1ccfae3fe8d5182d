"""The launcher reports the cause and exit code of every failure, leaves no process, and loses no step at a signal.

sitecustomize plants faults in the ranks of the real command; the functions that do so are below.
"""

import base64
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from commands import ROOT, Command, during, launch, listening, torchrun
from factories import TinyRun, assert_same_run, free_port
from test_pickles import Bomb

from checkpoint import huggingface
from common import errors
from common.errors import CheckpointError, SettingsError
from config import Config
from evaluation import during_run
from learn import optim
from parallel import ranks
from parallel.process import LAUNCHER_PID, LOOPBACK, listen_at, stop_signals
from plan import layers
from run import facts as run_facts
from run import run as run_module
from scripts import launch as launcher
from scripts import machines

RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
ENDLESS = {"MAX_STEPS": 100_000, "SAVE_EVERY": 0, "VALIDATE_EVERY": 0, "HELLASWAG_EVERY": 0}

# Where faults are injected: module, function, number of the call; and the last step finished by then.
MOMENTS = {"start-up": (run_facts, "load_tokenizer", 1, 0), "step": (optim, "learning_rate", 3, 3),
           "validation": (during_run, "validation_loss", 3, 4), "HellaSwag": (during_run, "evaluate_batches", 2, 3),
           "save": (run_module, "tensors_to_save", 1, 3)}
OF_RANK_0 = {"write": (huggingface, "save_settings", 1, 3)}


def plant() -> None:
    """In a rank, at the moment given in the environment: raise an exception, or signal it or its launcher."""
    what, moment = os.environ["PLANTED"].split(":")
    if moment == "import":
        act(what)
    else:
        module, name, turn, _ = {**MOMENTS, **OF_RANK_0}[moment]
        during(module, name, lambda: act(what), turn)


def act(what: str) -> None:
    receiver, _, name = what.rpartition(" ")
    if name == "exception":
        raise ZeroDivisionError("planted")
    os.kill(int(os.environ[LAUNCHER_PID]) if receiver == "launcher" else os.getpid(), getattr(signal, name))
    time.sleep(0.3)


def planted(run: TinyRun, what: str, moment: str, rank: int = 1, **changes) -> Command:
    return launch(run, plant="test_launch:plant", planted_in=rank, **changes, env={"PLANTED": f"{what}:{moment}"})


@pytest.mark.parametrize(("changes", "message"), [
    ({"TOTAL_BATCH_SIZE": 64}, "TOTAL_BATCH_SIZE=64 must be a multiple"),  # one micro-batch, but two ranks need two
    ({"WORLD_SIZE": 3}, "WORLD_SIZE=3, but the launcher started 2 processes")])
def test_a_mistake_in_the_settings_is_printed_once_before_ranks_start(changes, message, tiny_run):
    run = tiny_run()
    with launch(run, **changes) as command:
        assert command.wait() == 2
    assert command.text().count(message) == 1 and not (run.output_dir / "launch").exists()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_are_no_file_that_is_opened_later(closed, tmp_path):
    code = ("import os, sys; from parallel import process; process.open_missing_streams(); file = open(sys.argv[1], 'w'); "
            "os.write(1, b'lost'); print('lost', flush=True); print('lost', file=sys.stderr); "
            "file.write(f'{file.fileno() > 2} {[os.get_inheritable(stream) for stream in range(3)]}')")
    command = ["bash", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, tmp_path / "file"]
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "file").read_text() == "True [True, True, True]"


def parsed(monkeypatch, *flags: str, **environ: str) -> tuple[Namespace, list[str]]:
    monkeypatch.setattr(sys, "argv", ["launch.py", *flags])
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return launcher.parse_args()


def test_several_machines_may_be_named_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    environ = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}

    def place(*flags: str, **environ: str) -> tuple:
        args, _ = parsed(monkeypatch, *flags, **environ)
        return args.node_rank, args.master_addr, args.master_port

    assert place("--nnodes=2", **environ) == (1, "10.0.0.1", 29500)
    assert place("--nnodes=2", "--node-rank=0", "--master-port=7", **environ) == (0, "10.0.0.1", 7)
    assert place(**environ) == (0, None, 0), "a single machine listens at loopback, whatever a cluster exports"
    Path(".env").write_text("MASTER_ADDR=10.0.0.2\nMASTER_PORT=5\n")
    assert place("--nnodes=2", NODE_RANK="0") == (0, "10.0.0.2", 5)
    assert place("--nnodes=2", **environ) == (1, "10.0.0.1", 29500)


@pytest.mark.parametrize(("flags", "message"), [
    ("--node-rank=0 --master-addr=10.0.0.1", "--nnodes 2 also needs --master-port, or MASTER_PORT in the environment"),
    ("--master-port=7", "--nnodes 2 also needs --node-rank and --master-addr, or NODE_RANK and MASTER_ADDR in the environment"),
    ("--node-rank=0 --master-addr=10.0.0.1 --master-prt=7", "unknown flag --master-prt; did you mean --master-port?"),
    ("--node-rnk=0 --master-addr=10.0.0.1 --master-port=7", "unknown flag --node-rnk; did you mean --node-rank?")])
def test_a_missing_flag_of_several_machines_is_named_or_its_misspelling(flags, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    data = ["--pretrain-data-path=book.txt", "--tokenizer-path=book.model"]
    with pytest.raises((SettingsError, SystemExit)) as error:
        parsed(monkeypatch, "--nnodes=2", *flags.split(), *data)
    assert message in str(error.value) + capsys.readouterr().err


def test_a_port_in_use_is_an_error(tiny_run):
    """With a launcher and without."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launch(tiny_run(), "--master-addr=127.0.0.1", f"--master-port={port}") as command:
            assert command.wait() == 2
        text = tiny_run().ends([2], env={**RANK_0, "MASTER_PORT": str(port)})
    assert f"127.0.0.1:{port}" in command.last_line() and f"MASTER_PORT={port}" in text
    assert "Traceback" not in command.text() + text


@pytest.mark.parametrize(("rank", "message"), [("0", "rank 0 of 2 could not join"), ("2", "RANK=2")])
def test_missing_ranks_are_reported(rank, message, tiny_run):
    text = tiny_run().ends([2], impatient, env={**RANK_0, "RANK": rank, "MASTER_PORT": str(free_port())})
    assert message in text and "Traceback" not in text


def test_a_rank_that_waits_for_a_stopped_one_is_reported(tiny_run):
    """The launcher's connection to the store does not count as the missing rank."""
    hosted = ranks.host_store(listen_at(LOOPBACK, 0))
    dist.TCPStore(hosted.host, hosted.port, world_size=1, is_master=False)
    place = {"MASTER_ADDR": hosted.host, "MASTER_PORT": str(hosted.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert "rank 0 of 2 could not join" in tiny_run().ends([2], impatient, env={**RANK_0, **place})


def impatient() -> None:
    assert ranks.JOIN_SECONDS < 30
    ranks.JOIN_SECONDS = 2


@pytest.mark.parametrize(("what", "moment", "rank"), [
    pytest.param(what, moment, rank, marks=() if (what, moment, rank) == ("exception", "step", 1) else pytest.mark.slow)
    for what in ("exception", "SIGKILL") for moment in (*MOMENTS, *OF_RANK_0) for rank in (0, 1)
    if rank == 0 or moment not in OF_RANK_0])
def test_when_one_rank_fails_all_exit_and_the_cause_is_printed(what, moment, rank, tiny_run):
    run = tiny_run(ASYNC_SAVE=what == "exception")
    with planted(run, what, moment, rank) as command:
        assert command.wait() == 1, command.text()
    text, saved = command.text(), re.search(r"; step \d is saved, and the same command resumes", command.last_line())
    assert saved and saved[0] == "; step 2 is saved, and the same command resumes" or (what, moment) != ("SIGKILL", "step")
    cause = command.last_line().replace(saved[0] if saved else "", "")
    if what == "exception":
        assert cause.startswith(f"error: rank {rank}: ZeroDivisionError: planted. Each rank's output ")
        assert text.count("Traceback") == 1 and "in act" in text
    else:
        assert cause.startswith(f"error: rank {rank} was killed by SIGKILL (out of memory? see dmesg). Each rank's output ")
        assert "Traceback" not in text
    assert "stops, because another" not in text and "elastic" not in text
    folder = next((run.output_dir / "launch").glob("*/*/attempt_0"))
    assert cause.endswith(f"is in {folder.parent.parent}")
    if what == "exception":
        assert json.loads((folder / str(rank) / "error.json").read_text())["message"]["errorCode"] == 1
        assert "ZeroDivisionError" in (folder / str(rank) / "stderr.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "changes", "message"), [
    (3, {"PRETRAIN_DATA_PATH": "nowhere"}, "nowhere"), (5, {"PRETRAIN_CHECKPOINT": "nowhere"}, "nowhere"),
    (2, {"DEVICE": "cuda"}, "DEVICE=cuda"), (4, {"LEARNING_RATE": 1e15, "MAX_GRAD_NORM": 0}, "LEARNING_RATE (now 1e15)")])
def test_the_exit_code_depends_on_the_cause(code, changes, message, tiny_run):
    with launch(tiny_run(), **changes) as command:
        assert command.wait() == code, command.text()
    assert message in command.last_line() and command.text().count(command.last_line().split(". The output")[0][-60:]) == 1
    assert "Traceback" not in command.text()


@pytest.fixture(scope="module")
def endless(prepared, tmp_path_factory):
    """A job that runs until the second of the two tests below."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("endless"), **ENDLESS | {"DISTRIBUTED_TIMEOUT": 600})
    with launch(run) as command:
        command.wait_for_step(2)
        yield run, command


def test_strangers_find_one_door_and_change_nothing(endless, tmp_path):
    run, command = endless
    pids = command.alive()
    places = {pid: listening(pid) for pid in pids}
    assert len(pids) == 3 and all(address.is_loopback for place in places.values() for address, _ in place), places
    [(address, port)] = places[command.pid]

    store, bomb = dist.TCPStore(str(address), port, is_master=False), base64.b64encode(pickle.dumps(Bomb(tmp_path / "pwned")))
    store.set("torch.rendezvous.paddock", bomb)
    with socket.create_connection((str(address), port)), socket.create_connection((str(address), port)) as loud:
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
        time.sleep(2)  # until the launcher has read its state again
    assert command.process.poll() is None and not (tmp_path / "pwned").exists(), command.text()


def test_when_the_launcher_is_killed_its_ranks_save_and_leave(endless):
    run, command = endless
    command.process.kill()
    assert command.wait() == -signal.SIGKILL
    assert run.steps_saved() == [run.metrics()[-1]["step"]]


def test_a_launcher_that_died_before_it_was_looked_for_is_noticed(tiny_run):
    """The recorded process id is not that of the parent."""
    with Command(tiny_run(), "train.py", *tiny_run().argv(), env={LAUNCHER_PID: "1", "RANK": "0", "WORLD_SIZE": "1"}) as command:
        assert command.wait() == 143 or command.process.returncode == -signal.SIGTERM
    assert "Model:" not in command.text() and "PADDOCK_LAUNCHER_PID=1, has ended" in command.text()


def test_a_launcher_is_not_the_rank_of_an_earlier_job(tiny_run, tmp_path):
    """Nor does it leave its error to a rank that reported long ago; the ranks that it starts get their own numbers."""
    (tmp_path / "reported").write_text("reported")
    left = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "1" / "error.json")}
    with launch(tiny_run(), "--typo=1", env=left) as command:
        assert command.wait() == 2
    assert "--typo" in command.text() and command.text().startswith("1 error in the settings")
    run = tiny_run(MAX_STEPS=1)
    with launch(run, "--nproc-per-node=1", env=left) as command:
        assert command.wait() == 0, command.text()
    assert run.steps_saved() == [1]


def test_folders_of_live_and_of_the_newest_launches_are_kept_and_no_two_share_one(tmp_path, monkeypatch):
    with ExitStack() as held:
        def begin(second: int = 0, node_rank: int = 0) -> Path:
            monkeypatch.setattr(time, "strftime", lambda form: f"20261121-0000{second:02}")
            logs = launcher.open_logs(Config(output_dir=str(tmp_path)), node_rank)
            held.enter_context(logs.lock)
            return logs.folder

        live = [begin() for _ in range(launcher.KEPT_FOLDERS + 3)]
        assert len({*live}) == len(live) and all(folder.is_dir() for folder in live)
        for second in range(1, launcher.KEPT_FOLDERS + 3):
            held.close()
            before = begin(second)
        held.close()
        assert {before, begin(59), begin(59, 1)} <= {*(tmp_path / "launch").iterdir()}
        assert len([*(tmp_path / "launch").iterdir()]) == launcher.KEPT_FOLDERS + 1
        shutil.rmtree(tmp_path / "launch")
        (tmp_path / "launch").symlink_to("nowhere")
        with pytest.raises(CheckpointError, match="launch cannot be written: File exists"):
            begin()


@pytest.mark.parametrize(("nnodes", "found", "message"), [
    (1, OSError(99, "not here"), "192.0.2.7:9 (EADDRNOTAVAIL); --master-addr must be an address of this machine"),
    (2, ("127.0.1.1", 9), "resolves to 127.0.1.1 on this machine, which other machines cannot reach"), (2, ("192.0.2.7", 9), "")])
def test_the_first_machine_listens_at_a_reachable_address_or_reports_why_not(nnodes, found, message, monkeypatch):
    def listen_at(hosts, port, seconds):
        if isinstance(found, OSError):
            raise found
        return SimpleNamespace(getsockname=lambda: found)

    monkeypatch.setattr(launcher, "listen_at", listen_at)
    args = Namespace(nnodes=nnodes, node_rank=0, master_addr="192.0.2.7", master_port=9)
    with pytest.raises(SettingsError, match=re.escape(message)) if message else nullcontext():
        assert launcher.meeting_point(args)[:2] == found


def test_a_killed_rank_is_reported_with_its_likely_cause():
    message = launcher.rank_exit(1, -signal.SIGBUS, 0, None, joined=True)
    assert message.code == 1 and message.sentence.startswith("rank 1 was killed by SIGBUS (a data file truncated")
    assert "SIGABRT (NCCL does this" in launcher.rank_exit(1, -signal.SIGABRT, 0, None, joined=True).sentence
    assert launcher.rank_exit(1, -signal.SIGTERM, 0, None, joined=False).code == 143
    assert launcher.rank_exit(1, None, 0, None, joined=False).code == 143
    # With something to save that it did not save, it is not preempted.
    for exit_code, words in ((-signal.SIGTERM, "was killed by SIGTERM"), (None, "was killed before it finished saving")):
        assert launcher.rank_exit(1, exit_code, 0, None, joined=True)[3:5] == (1, f"rank 1 {words}")
    assert launcher.rank_exit(1, -40, 0, None, joined=True).sentence == "rank 1 was killed by signal 40"


def test_the_cause_is_the_first_rank_that_did_not_only_lose_another():
    def ended(rank: int, at: int, is_secondary: bool):
        return launcher.rank_exit(rank, 1, 99, {"is_secondary": is_secondary, "at": at, "errorCode": 3, "message": f"rank {rank}",
                                                "extraInfo": {"py_callstack": ""}}, joined=True)

    first, lost, later = ended(2, at=5, is_secondary=False), ended(0, at=4, is_secondary=True), ended(1, at=6, is_secondary=False)
    killed = launcher.rank_exit(3, -signal.SIGKILL, 7, None, joined=True)
    assert min(lost, later, first, killed) == first and min(lost, killed) == killed and (first.code, first.sentence) == (3, "rank 2")


SIGNALLED = [("launcher SIGTERM", moment) for moment in ("import", *MOMENTS)]
SIGNALLED += [(f"launcher {name}", "step") for name in ("SIGINT", "SIGUSR1", "SIGHUP")]
SIGNALLED += [("rank SIGTERM", moment) for moment in MOMENTS] + [(f"rank {name}", "step") for name in ("SIGINT", "SIGUSR1")]


@pytest.mark.parametrize(("what", "moment"), [
    pytest.param(*case, marks=() if case == ("launcher SIGTERM", "step") else pytest.mark.slow) for case in SIGNALLED])
def test_a_signal_at_any_moment_is_a_save_and_143(what, moment, whole_on_two_ranks, tiny_run):
    run = tiny_run()
    with planted(run, what, moment) as command:
        assert command.wait() == 143, command.text()
    assert "Traceback" not in command.text() and "error:" not in command.text()
    if moment != "import":
        assert command.text().count("; repeat to exit ") == what.startswith("launcher"), command.text()
    if moment in ("import", "start-up"):
        assert not run.steps_saved(), "before the first step there is nothing to save"
    else:
        assert run.steps_saved()[-1] == MOMENTS[moment][3] and "is saved" in command.text()
    assert "[CPU1]" not in command.text()
    run.ends([0, 0])
    files = {path.name for path in (run.output_dir / "launch").rglob("*.*")}
    assert files - {"error.json"} == {"stdout.log", "stderr.log"} and ("error.json" in files) == (moment != "import")
    assert_same_run(run, whole_on_two_ranks, 6)


def test_the_launcher_stops_its_ranks_twice_and_no_more(monkeypatch):
    """A signal within a second of the first, and a third one, are ignored."""
    now, received = 0.0, []
    before = {number: signal.getsignal(number) for number in stop_signals()}
    monkeypatch.setattr(launcher.time, "monotonic", lambda: now)
    launcher.stop_twice(ValueError)
    try:
        for now in (0.0, 0.5, 0.9, 2.0, 2.1, 9.0):
            for number in (signal.SIGTERM, signal.SIGINT):
                try:
                    os.kill(os.getpid(), number)
                except ValueError as error:
                    received.append((now, error.args[1]))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert received == [(0.0, signal.SIGTERM), (2.0, signal.SIGTERM)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "flags"), [(signal.SIGTERM, ()), (signal.SIGINT, ()), (signal.SIGUSR1, ()),
                                               (signal.SIGUSR1, ("--signals-to-handle=SIGUSR1",)), (signal.SIGHUP, ()), (signal.SIGKILL, ())])
def test_whatever_ends_torchrun_every_rank_saves_and_leaves(number, flags, tiny_run):
    """When its launcher dies, a rank gets a TERM from the system."""
    run = tiny_run(**ENDLESS)
    with torchrun(run, *flags) as command:
        command.wait_for_step(2)
        command.process.send_signal(number)
        assert command.wait() == 1 or number != signal.SIGTERM, "torchrun knows no other code"
    assert run.steps_saved() == [run.metrics()[-1]["step"]]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [{"LERNING_RATE": 3}, {"PRETRAIN_DATA_PATH": "nowhere"}])
def test_under_torchrun_a_mistake_is_printed_once_however_slow_rank_0_is(mistake, tiny_run):
    run = tiny_run()
    with Command(run, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", ROOT / "train.py",
                 *run.argv(**mistake), plant="test_launch:dawdle", planted_in=0) as command:
        assert command.wait() == 1
    assert len(re.findall("did you mean --learning-rate|^error: .*nowhere", command.text(), re.MULTILINE)) == 1


def dawdle() -> None:
    """Delay what the rank says first, wherever that is."""
    for module in (errors, layers):
        during(module, "print_safely", lambda: time.sleep(3), 1)


@pytest.mark.parametrize(("node", "waits_for"), [(0, "node 1"), (1, "node 0")])
def test_a_machine_that_waits_for_another_says_so_and_a_signal_ends_it_at_once(node, waits_for, tiny_run):
    run, port = tiny_run(), free_port()
    with launch(run, "--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}") as command:
        command.wait_for(lambda: f"Waiting for {waits_for} to start at 127.0.0.1:{port} (up to 15 min)" in command.text())
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.wait(timeout=10) == 143
    assert command.last_line() == "Stopped."


def test_a_machine_that_never_starts_is_an_error_that_names_it(monkeypatch, tiny_run):
    monkeypatch.setattr(launcher, "START_SECONDS", 1)
    with pytest.raises(SettingsError, match="^nodes 1, 2 did not start at 127.0.0.1:.* within 1 s; check "):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            job = launcher.Job(Namespace(nnodes=3, node_rank=0), [], Config(), 1)
            job.endpoint, job.store = listening.getsockname(), ranks.host_store(listening)
            job.wait_for_machines()
    job.machines.stop()


def test_an_address_that_cannot_be_resolved_is_an_error(monkeypatch):
    for module in (launcher, machines):
        monkeypatch.setattr(module, "RESOLVE_SECONDS", 1)
    args = Namespace(nnodes=2, node_rank=1, master_addr="nowhere.invalid", master_port=29500)
    job = launcher.Job(args, [], Config(), 1)
    job.endpoint = launcher.meeting_point(args)[:2]
    with pytest.raises(SettingsError, match="^node 0 did not start at nowhere.invalid:29500 within 1 s .*[Nn]ame.*; check "):
        job.wait_for_machines()
    job.machines.stop()
    args.node_rank = 0
    with pytest.raises(SettingsError, match="^cannot listen on nowhere.invalid:29500 .*[Nn]ame"):
        launcher.meeting_point(args)
