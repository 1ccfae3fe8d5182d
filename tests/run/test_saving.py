"""Checkpoints that a thread writes while training continues."""

import errno
import math
import os
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from factories import UNMEASURED, assert_same_run, at_step, do_in_step, planned, run_ranks, wait_until

from checkpoint import store
from checkpoint.manifest import block_rows
from checkpoint.tensors import TensorFile
from common.activity import tick
from extensions import guards
from learn.optim import Reducer
from parallel.ranks import start_ranks, stop_ranks
from run import build as run_build
from run import saving
from run.run import finish_saving, save_checkpoint

PATIENCE = 60


def before_writing(monkeypatch, act) -> None:
    """Let every thread that writes a checkpoint do something first."""
    original = TensorFile.write_rows

    def write_rows(*arguments):
        if threading.current_thread() is not threading.main_thread():
            act()
        return original(*arguments)

    monkeypatch.setattr(TensorFile, "write_rows", write_rows)


def fail_with(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_training_continues_while_a_thread_writes_what_the_state_was(tiny_run, whole, monkeypatch):
    """The steps taken meanwhile are not in the checkpoint, and the bits of the run are the same."""
    run, written, seen = tiny_run(), threading.Event(), []
    before_writing(monkeypatch, lambda: written.wait(PATIENCE))

    def look() -> None:
        seen.extend(run.steps_saved())
        written.set()

    with at_step(4, look):
        assert run.train() == 0
    assert seen == [], "the save of step 2 ends after step 4"
    assert run.steps_saved() == [2, 4, 6]
    for step in (2, 4, 6):
        assert run.hashes(step) == whole.hashes(step) and store.verify(run.checkpoint(step))
    assert_same_run(run, whole, 6)
    saves = [(event["event"], event["step"]) for event in run.lines("events") if event["event"].startswith("save")]
    assert [step for name, step in saves if name == "save"] == [step for name, step in saves if name == "saved"] == [2, 4, 6]
    assert saves.index(("save", 2)) < saves.index(("saved", 2)) < saves.index(("save", 4)), "the next save waits"
    assert "; training stopped for " in (run.folder / "log" / "rank-0.txt").read_text()


def test_an_error_of_the_writing_thread_ends_the_run_at_the_next_step(tiny_run, monkeypatch, capsys):
    run = tiny_run(**UNMEASURED, SAVE_EVERY=1)
    before_writing(monkeypatch, lambda: fail_with(errno.ENOSPC))
    with at_step(2, lambda: wait_until(lambda: "background" not in [thread.name for thread in threading.enumerate()])):
        assert run.train() == 5
    assert "step-00000001 cannot be written: No space left on device" in capsys.readouterr().err
    assert [line["step"] for line in run.lines("ledger")] == [1, 2]
    assert not [*(run.folder / "checkpoints").iterdir()]


def test_temporary_errors_are_retried_in_the_thread_and_reported(tiny_run, whole, monkeypatch, capsys):
    failures = iter([errno.ESTALE])
    before_writing(monkeypatch, lambda: any(map(fail_with, failures)))
    monkeypatch.setattr(store, "RETRY_SECONDS", (0.1,))
    run = tiny_run().trained()
    assert "step-00000002 cannot be written: Stale file handle" in capsys.readouterr().err
    assert_same_run(run, whole, 6)


@pytest.mark.parametrize("settings, plant", [({"ASYNC_SAVE": "false"}, None), ({}, "free_host_memory")])
def test_without_room_for_a_copy_training_stops_for_the_whole_save(tiny_run, whole, monkeypatch, capsys, settings, plant):
    run = tiny_run(**settings)
    if plant:
        monkeypatch.setattr(saving, plant, lambda: saving.SPARE_MEMORY)
    threads = []
    monkeypatch.setattr(saving, "Background", threads.append)
    assert run.train() == 0 and threads == []
    message = capsys.readouterr().err
    assert message.count("ASYNC_SAVE: training stops while checkpoints are written") == (1 if plant else 0), message
    assert_same_run(run, whole, 6)


def bad_gradient() -> None:
    Reducer.norm = lambda self: torch.tensor(math.nan)


def test_a_bad_step_does_not_lose_the_checkpoint_that_is_being_written(tiny_run, monkeypatch):
    run, written = tiny_run(), threading.Event()
    before_writing(monkeypatch, lambda: written.wait(PATIENCE))
    monkeypatch.setattr(Reducer, "norm", Reducer.norm)
    original = guards.stop_non_finite

    def stop_non_finite(*arguments):
        assert run.steps_saved() == []
        written.set()
        original(*arguments)

    monkeypatch.setattr(guards, "stop_non_finite", stop_non_finite)
    with at_step(3, bad_gradient):
        assert run.train() == 4
    assert run.steps_saved() == [2] and store.verify(run.checkpoint(2))


def test_an_exit_that_does_not_wait_stops_the_thread_and_nothing_is_left_of_its_folder(tiny_run, monkeypatch):
    run, halted = tiny_run(), threading.Event()

    def spin() -> None:
        while True:
            tick()
            halted.set()
            time.sleep(0.01)

    def fail() -> None:
        assert halted.wait(PATIENCE)
        raise KeyboardInterrupt

    before_writing(monkeypatch, spin)
    with at_step(3, fail), pytest.raises(KeyboardInterrupt):
        run.train()
    assert not [*(run.folder / "checkpoints").iterdir()]


def fill_the_disk() -> None:
    """In a rank: let its thread fail, and train on until the ranks have agreed on it."""
    before_writing(pytest.MonkeyPatch(), lambda: fail_with(errno.ENOSPC))
    do_in_step(3, lambda: time.sleep(0.5))


def test_all_ranks_end_with_the_error_of_the_rank_that_writes(tiny_run):
    text = tiny_run().ends([5, 5], fill_the_disk)
    assert text.count("error: ") == 1 and "No space left on device" in text, text


@pytest.mark.parametrize("shards, world_size", [(1, 3), (2, 4), (3, 6), (2, 2)])
def test_hashes_of_blocks_are_joined_in_the_order_of_rows_not_of_ranks(shards, world_size, tmp_path, monkeypatch):
    """With several copies of a sharded model, ranks that follow each other do not write rows that do."""
    state = {"a": torch.arange(96.0 * 4).reshape(96, 4), "b": torch.arange(70.0), "c": torch.tensor(3.0)}
    files = {"model.safetensors": TensorFile(state, block_multiple=2)}
    temporary, written = store.start_writing(tmp_path / "step-1", files, 0), []
    for rank in range(world_size):
        ranks = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), on_first_machine=world_size)
        share = saving.RankShard(ranks, shards, 2, print)
        save = saving.PendingSave(1, 0.0, share, files, lambda folder: None, {"step": 1}, tmp_path / "step-1", temporary, is_best=False)
        written.append(save.write())
    assert sorted(part for part, _ in written) == [*range(world_size)]
    ranks.gather_or_raise = lambda make: written
    store.finish_writing(temporary, tmp_path / "step-1", {"step": 1}, save.written(print), print)
    store.verify(tmp_path / "step-1")


def save_and_look(argv: list[str]) -> None:
    """In a rank: what it keeps for a save, reads, and syncs, with and without memory for all."""
    ranks, synced, read = start_ranks("cpu", PATIENCE), [], []
    run_build.meeting = lambda decide: nullcontext((ranks, ranks.on_rank0(decide)))
    sync, send_rows = saving.sync, saving.send_rows

    def sent(*arguments):
        rows = send_rows(*arguments)
        read.append(weakref.ref(rows))
        return rows

    saving.sync, saving.send_rows = lambda path: (synced.append(path.name), sync(path)), sent
    with run_build.open_run(*planned(argv)) as run:
        save_checkpoint(run)
        finish_saving(run)
        share = run.shard
        shapes = dict(run.model.named_parameters())
        for name, kept in share.kept.items():
            if kept.ndim:
                rows = len(shapes[name if name in shapes else name.rpartition(".")[0]])
                assert len(kept) < -(-rows // ranks.world_size) + block_rows(rows, share.block_multiple), "more than a share and a block"
        assert {*synced} - {"MANIFEST.json"} == {"model.safetensors", "optimizer.safetensors"}
        assert read and not any(rows() is not None for rows in read), "it is kept once, in `kept`"
        share.kept.clear()
        one_at_a_time, write_rows = [], TensorFile.write_rows
        TensorFile.write_rows = lambda *arguments: (one_at_a_time.append(sum(rows() is not None for rows in read)), write_rows(*arguments))[1]
        save_checkpoint(run, wait=True)
        assert not share.kept and {*one_at_a_time} == {0, 1}
    stop_ranks()


def test_every_rank_keeps_its_share_and_a_block_and_syncs_what_it_wrote(tiny_run):
    run = tiny_run(**UNMEASURED, MAX_STEPS=2, TOTAL_BATCH_SIZE=384, SHARDING="full")
    assert run.train(SHARDING="none") == 0
    before = run.hashes(2)
    run_ranks(save_and_look, run.argv(), world_size=3, folder=run.output_dir / "outputs")
    assert run.hashes(2) == before
