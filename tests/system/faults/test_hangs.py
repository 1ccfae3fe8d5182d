"""A rank without progress ends the job with exit code 6 and a report of all ranks; out of memory is no hang."""

import io
import os
import re
import resource
import signal
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from commands import WORLD
from factories import PATIENCE, UNMEASURED, do_in_step, is_rank, start
from faults import act

from checkpoint import tensors
from common.activity import ACTIVITY, foreign_call, waiting
from common.errors import DataError
from extensions import hang_report
from learn import objectives
from parallel import process
from parallel import ranks as collectives
from parallel.process import HangWatchdog

TIMEOUT = 2  # seconds


class Watch(HangWatchdog):
    """Counts from the beginning of the fault, before which all may take any time.

    `began` is a file that the fault makes.
    """

    began = None

    def _progress(self):
        return super()._progress() if self.began.exists() else object()


def patiently(began: Path, plant) -> None:
    """In a rank: plant a fault for a watchdog that makes allowance for a slow machine."""
    Watch.began, hang_report.RESPONSE_SECONDS, collectives.HangWatchdog = began, 10, Watch
    plant()


def stop_here() -> None:
    Watch.began.touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def stop(rank: int, when) -> None:
    hang_report.RESPONSE_SECONDS = 1.5
    act(rank, when, stop_here)


def stall() -> None:
    Watch.began.touch()
    time.sleep(600)


def on_such_a_disk(before_write) -> None:
    """Call a function before each write of rows in rank 0's saves."""
    class File(io.FileIO):
        def write(self, data):
            before_write()
            return super().write(data)

    if is_rank(0):
        tensors.open = lambda path, mode: File(path, mode) if mode == "r+b" else open(path, mode)


def write_slowly() -> None:
    Watch.began.touch()
    time.sleep(0.2)


def wait_for_each_other() -> None:
    def wait() -> None:
        with waiting():
            stall()

    do_in_step(3, wait)


def stall_in_a_forward() -> None:
    objectives.NextToken.loss_sum = lambda *_: stall()


HELLASWAG, SAVE = "HellaSwag (step 3)", "save (step 4)"
IN_HELLASWAG = ("evaluation.during_run", "evaluate_batches", 2)


@pytest.mark.parametrize(("plant", "culprit", "message", "stacks_of"), [
    pytest.param(partial(stop, 1, 3), 1, "rank 1 does not respond, rank 0 waits in forward (step 3); no rank made progress",
                 {0: "all_reduce"}, marks=pytest.mark.slow),
    (partial(stop, 0, IN_HELLASWAG), 0, f"rank 1 waits in {HELLASWAG}; nothing is known of the others, because the status store in "
                                        "rank 0 does not respond; no rank made progress", {1: "all_reduce"}),
    (partial(act, 1, 3, stall_in_a_forward), 1, "rank 0 is in backward (step 3), rank 1 is in forward (step 3); no rank made progress",
     {0: "backward", 1: "stall"}),
    (partial(on_such_a_disk, stall), 0, f"rank 0 is in {SAVE}, rank 1 waits in {SAVE}; no rank made progress",
     {0: "stall", 1: "gather_or_raise"})])
def test_a_rank_that_does_not_move_is_reported_and_all_leave(plant, culprit, message, stacks_of, tiny_run, tmp_path):
    run = tiny_run()
    job = run.start(WORLD, partial(patiently, tmp_path / "began", plant), DISTRIBUTED_TIMEOUT=TIMEOUT)
    job.processes[1 - culprit].join(PATIENCE)
    if job.processes[culprit].is_alive():  # if it was stopped, it finds no other rank, and exits too
        os.kill(job.processes[culprit].pid, signal.SIGCONT)
    codes = job.wait()
    assert codes[1 - culprit] == 6 and codes[culprit] in (1, 6), job.text()
    text = job.text()
    assert text.count("error: hang: ") == 1 and f"error: hang: {message}" in text, text
    assert f"DISTRIBUTED_TIMEOUT={TIMEOUT} s" in text and str(run.folder / "log" / "stacks-rank-*.txt") in text
    assert "Traceback" not in text
    for rank, place in stacks_of.items():
        stacks = (run.folder / "log" / f"stacks-rank-{rank}.txt").read_text()
        assert "in train_loop" in stacks and f"in {place}" in stacks


def test_the_core_alone_reports_the_hang_of_its_rank(monkeypatch, capfd):
    """Without the extension: the stacks, where this rank is, the remedy and the exit code."""
    left, may_return = SimpleQueue(), threading.Event()
    monkeypatch.setattr(process, "report_hang", None)
    monkeypatch.setattr(os, "_exit", lambda code: (left.put(code), may_return.wait()))
    watch = HangWatchdog(torch.distributed.HashStore(), 0, 1, 0.2, True)
    assert left.get(timeout=PATIENCE) == 6
    watch.stopped.set()
    may_return.set()
    watch.stop()
    error = capfd.readouterr().err
    assert "in test_the_core_alone_reports_the_hang_of_its_rank" in error, "the stacks"
    assert error.endswith(f"error: hang: rank 0 is in {ACTIVITY.phase} (step {ACTIVITY.step}); no rank made progress for "
                          f"DISTRIBUTED_TIMEOUT=0.2 s. {process.HANG_REMEDY}\n")


def start_stuck(in_group: bool) -> None:
    """In a rank: rank 1 never returns from its driver, or from the process group."""
    def watchdog(store, rank, count, _, *more):
        watch = HangWatchdog(store, rank, count, TIMEOUT, *more)
        if is_rank(1) and not in_group:  # the driver is next
            time.sleep(600)
        return watch

    collectives.HangWatchdog = watchdog
    if is_rank(1):
        torch.distributed.init_process_group = lambda *_, **__: time.sleep(600)
    collectives.start_ranks("cpu", TIMEOUT)


@pytest.mark.parametrize(("in_group", "message"), [
    (True, "ranks 0-1 wait in start-up (step 0); no rank"),  # as in ncclCommInitRank
    (False, "rank 1 is in start-up (step 0), rank 0 waits in start-up (step 0); no rank")])
def test_ranks_that_never_become_a_group_end_too(in_group, message, tmp_path):
    job = start(start_stuck, in_group, world_size=2, folder=tmp_path)
    assert job.wait() == [6, 6], job.text()
    assert f"error: hang: {message} made progress for DISTRIBUTED_TIMEOUT={TIMEOUT} s" in job.text()
    assert "in start_stuck" in job.text(), "the stacks"


def stall_and_listen_slowly() -> None:
    """Rank 1 looks for the report once a second, as on a busy machine."""
    on_such_a_disk(stall)
    if is_rank(1):
        hang_report.ALARM_SECONDS = 1


def test_the_host_of_the_statuses_waits_until_the_others_know_of_its_report(tiny_run, tmp_path):
    plant = partial(patiently, tmp_path / "began", stall_and_listen_slowly)
    text = tiny_run().ends([6, 6], plant, DISTRIBUTED_TIMEOUT=TIMEOUT + 1)
    assert text.count("error: hang: ") == 1, text


def test_ranks_that_all_wait_are_a_hang(tiny_run, tmp_path):
    text = tiny_run().ends([6, 6], partial(patiently, tmp_path / "began", wait_for_each_other), DISTRIBUTED_TIMEOUT=TIMEOUT)
    assert "error: hang: ranks 0-1 wait in data (step 3); no rank made progress" in text


def test_a_save_that_is_slower_than_the_time_out_is_no_hang(tiny_run, tmp_path):
    run, timeout = tiny_run(MAX_STEPS=2, SAVE_EVERY=0, **UNMEASURED), 2 * TIMEOUT  # because the disk of this machine may be busy
    plant = partial(on_such_a_disk, write_slowly)
    text = run.ends([0, 0], partial(patiently, tmp_path / "began", plant), DISTRIBUTED_TIMEOUT=timeout)
    assert float(re.search(r"Saved .* in ([\d.]+) s", text)[1]) > 1.5 * timeout
    assert run.steps_saved() == [2]


def pause() -> None:
    do_in_step(3, lambda: (print("here", flush=True), time.sleep(0.5)))


@pytest.mark.slow
def test_a_job_that_was_suspended_for_longer_goes_on(tiny_run):
    job = tiny_run().start(WORLD, pause, DISTRIBUTED_TIMEOUT=TIMEOUT)
    job.wait_for("here")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for each in job.processes:
            os.kill(each.pid, number)
        time.sleep(TIMEOUT + 1)
    assert job.wait() == [0, 0], job.text()


def test_a_call_with_its_own_time_out_is_no_hang(monkeypatch):
    monkeypatch.setattr(HangWatchdog, "_end_process", lambda *_: pytest.fail("a hang was reported"))
    watch = HangWatchdog(torch.distributed.HashStore(), 0, 1, 0.2, True)
    with foreign_call():
        time.sleep(0.5)
    watch.stop()


def out_of_gpu_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def under_a_limit(allocate) -> None:
    """With a memory limit, as in a container or batch system."""
    used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    allocate()


TENSOR, OBJECT = (partial(under_a_limit, partial(*beyond)) for beyond in ((torch.zeros, 2**30), (bytearray, 2**32)))


@pytest.mark.parametrize(("plant", "ranks", "message"), [
    ((1, 3, out_of_gpu_memory), 2, "error: rank 1 is out of memory ("), ((1, 3, TENSOR), 2, "error: rank 1 is out of memory ("),
    ((0, IN_HELLASWAG, OBJECT), 2, "error: rank 0 is out of memory ("), ((0, IN_HELLASWAG, OBJECT), 1, "out of memory (")])
def test_when_memory_runs_out_there_is_advice_and_no_hang(plant, ranks, message, tiny_run):
    text = tiny_run().ends([1] * ranks, partial(act, *plant))
    assert message in text and "Traceback" not in text
    places = [text.index(name) for name in ("ACTIVATION_CHECKPOINTING=selective", "MICRO_BATCH_SIZE", "MAX_SEQ_LEN", "--check")]
    assert places == sorted(places), "what costs least comes first"


CudaError = getattr(torch, "AcceleratorError", RuntimeError)  # since torch 2.8


@pytest.mark.parametrize(("error", "code", "victim"), [
    (DataError("line 3"), 3, False), (MemoryError(), 1, False), (OSError(12, "Cannot allocate memory"), 1, False),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), 1, False),
    (RuntimeError("Timed out waiting 2000ms for recv operation to complete"), 6, False),
    (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 1, True),
    (RuntimeError("x.cu:9: nll_loss2d does not have a deterministic implementation, but you set"), 2, False),
    (CudaError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors"), 1, False),
    (RuntimeError("[1] NCCL error: unhandled cuda error\nLast error:\nCuda failure 719 'unspecified launch failure'"), 1, False),
    (CudaError("CUDA error: device-side assert triggered"), None, None),
    (RuntimeError("shapes do not fit"), None, None), (OSError(28, "No space left"), None, None), (KeyError("x"), None, None)])
def test_one_place_explains_every_end(error, code, victim):
    ending = collectives.classify_exception(error)
    assert (ending and ending.code, ending and ending.is_secondary) == (code, victim)
