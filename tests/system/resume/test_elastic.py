"""A run continues on another number of ranks, and with another SHARDING."""

import errno
import os
import shutil
import signal
from contextlib import nullcontext
from functools import partial

import faults
import pytest
from commands import during, launch
from factories import (
    UNMEASURED,
    Stages,
    TinyRun,
    argv_of,
    assert_same_run,
    prepare,
    prepare_stages,
    run_ranks,
)
from test_sharding import FEATURES, compare_alike, run_with

import train
from checkpoint import store, tensors
from evaluation import during_run
from parallel import fsdp
from parallel.ranks import start_ranks, stop_ranks
from run import start as run_start
from run.life import save_checkpoint
from settings.load import load_config

NONE, FULL, HYBRID = {"SHARDING": "none"}, {"SHARDING": "full"}, {"SHARDING": "hybrid", "SHARD_DEGREE": 2}
OFFLOADED = {**FULL, "CPU_OFFLOAD": "true"}

# ----------------------------------------------------------------------------- in the middle of a run

PARTS = [(1, NONE), (2, FULL), (4, HYBRID), (2, NONE)]  # a step each
QUICK = ("muon",)


@pytest.fixture(scope="module")
def stages(prepared, tmp_path_factory) -> Stages:
    return prepare_stages(prepared, tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("feature", [pytest.param(feature, marks=[] if feature in QUICK else pytest.mark.slow)
                                     for feature in FEATURES if feature not in ("bf16", "offloaded")])
def test_a_run_continues_on_1_2_4_and_2_ranks_and_none_full_hybrid_and_none(feature, stages, tmp_path):
    whole = run_with(stages, feature, tmp_path / "whole")
    assert whole.train() == 0
    run = run_with(stages, feature, tmp_path / "parts")
    for step, (world_size, layout) in enumerate(PARTS, 1):
        last = step == len(PARTS)
        job = run.start(world_size, None if last else partial(faults.stop_in_step, step, world_size - 1), **layout)
        assert job.wait() == [0 if last else train.EXIT_PREEMPTED] * world_size, job.text()
    assert "warning: the number of ranks was 4, is 2" in job.text() and "SHARDING was hybrid, is none" in job.text()
    compare_alike(run, whole, last=4)


@pytest.mark.parametrize("what, log, old, new", [
    ("rows", "ledger", '"rows_crc32": "', '"rows_crc32": "0'), ("train_loss", "metrics", "6.2", "6.2001"),
    ("hellaswag_acc", "metrics", '"hellaswag_acc": 0', '"hellaswag_acc": 1'), ("samples", "samples", '"step": 6', '"step": 5'),
    ("weights", None, None, None)])
def test_what_differs_is_found(what, log, old, new, whole, tmp_path):
    run = whole.copy(tmp_path / "runs")
    assert compare_alike(run, whole, 6) == (0, 0)
    if log is None:
        shutil.rmtree(run.checkpoint(6))
        run.checkpoint(4).rename(run.checkpoint(6))
    else:
        path = run.folder / f"{log}.jsonl"
        path.write_text(path.read_text().replace(old, new))
    with pytest.raises(AssertionError, match=what):
        compare_alike(run, whole, 6)


# --------------------------------------------------------------------------------- there and back

# 526 ids, so the vocabulary is padded; on 4 ranks the matrices of 2, 5 and 6 rows leave ranks with fewer rows, or none.
UNEVEN = {**UNMEASURED, "DIM": 6, "N_HEADS": 3, "N_KV_HEADS": 1, "FFN_DIM": 5, "MAX_STEPS": 2}
LORA = {"LORA_ENABLED": "true", "LORA_DROPOUT": 0.0, "PRETRAIN_CHECKPOINT": "base"}
SAVED = {"base": {"OPTIMIZER": "muon", "TIE_EMBEDDINGS": "false"},
         "one-row": {**LORA, "TIE_EMBEDDINGS": "false", "LORA_RANK": 1, "LORA_TRAIN_TOKENS": "<|eot_id|>"},
         "adamw": {},
         "bf16": {"PRECISION": "bf16"},
         "tokens": {**LORA, "TIE_EMBEDDINGS": "false", "LORA_TRAIN_TOKENS": "<|eot_id|>,<|end_of_text|>"},
         "whole": {**LORA, "TIE_EMBEDDINGS": "false", "LORA_TRAIN_HEAD": "true", "LORA_TRAIN_EMBEDDINGS": "true"}}
LAYOUTS = {1: [FULL, NONE, OFFLOADED], 2: [FULL, NONE, OFFLOADED, {"SHARDING": "hybrid", "SHARD_DEGREE": 1}],
           4: [FULL, NONE, HYBRID, OFFLOADED]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, TinyRun]:
    """Runs of two steps of one process."""
    folder = tmp_path_factory.mktemp("saved")
    prepared, runs = prepare(folder / "data", vocab_size=270), {}
    for name, settings in SAVED.items():
        named = {key: runs["base"].checkpoint(2) if value == "base" else value for key, value in settings.items()}
        runs[name] = TinyRun(prepared, folder, RUN_NAME=name, **UNEVEN | named)
        assert runs[name].train() == 0
    return runs


def save_again(commands: list[list[str]], layouts: list[dict]) -> None:
    """Load the checkpoint of each run with one layout after the other, and save it without a step."""
    ranks = start_ranks("cpu", 60)
    run_start.joined_ranks = lambda *_: nullcontext(ranks)
    for argv in commands:
        for layout in layouts:
            with run_start.open_run(load_config([*argv, *argv_of(layout)])) as run:
                save_checkpoint(run)
    stop_ranks()


@pytest.mark.parametrize("world_size, names", [
    (4, ["base", "one-row"]),
    *(pytest.param(world_size, [*SAVED], marks=pytest.mark.slow) for world_size in LAYOUTS)])
def test_a_checkpoint_that_is_loaded_and_saved_has_the_same_bytes(world_size, names, saved, tmp_path):
    runs = [saved[name].copy(tmp_path / name, RUN_NAME=name) for name in names]
    run_ranks(save_again, [run.argv() for run in runs], LAYOUTS[world_size], world_size=world_size, folder=tmp_path / "outputs")
    for run in runs:
        assert run.hashes(2) == saved[run.settings["RUN_NAME"]].hashes(2), run.settings["RUN_NAME"]
        times = [store.read_manifest(each.checkpoint(2))["written"] for each in (saved[run.settings["RUN_NAME"]], run)]
        assert times[1] == times[0] + len(LAYOUTS[world_size])


# ------------------------------------------------------- what goes wrong while rank 1 serves rows to rank 0


@pytest.fixture(scope="module")
def whole_sharded(prepared, tmp_path_factory):
    """A run on two ranks that hold one copy of the model together, which nothing interrupted."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("whole-sharded"), **FULL)
    job = run.start(2)
    assert job.wait() == [0, 0], job.text()
    return run


def is_rank(rank: int) -> bool:
    return os.environ["RANK"] == str(rank)


def stop_in_hellaswag_on_rank_1() -> None:
    if is_rank(1):
        during(during_run, "evaluate_batches", lambda: os.kill(os.getpid(), signal.SIGTERM), 2)


def fail_once_in_the_second_save(number: int) -> None:
    """In the middle of its tensors: each of two saves writes more than 40."""
    def fail():
        raise OSError(number, os.strerror(number))

    if is_rank(0):
        during(tensors, "lazy", fail, 100)


def lose_the_network_disk() -> None:
    fail_once_in_the_second_save(errno.ESTALE)


def fill_the_disk() -> None:
    fail_once_in_the_second_save(errno.ENOSPC)


def die_in_the_second_save() -> None:
    during(tensors, "lazy", lambda: os.kill(os.getpid(), signal.SIGKILL), 100)


def die_while_rank_0_writes() -> None:
    if is_rank(0):
        die_in_the_second_save()


def die_while_rank_1_serves() -> None:
    if is_rank(1):
        during(fsdp, "gather_rows", lambda: os.kill(os.getpid(), signal.SIGKILL), 70)


def test_a_signal_in_an_evaluation_which_gathers_embedding_and_head_saves_the_own_rows(whole_sharded, tiny_run):
    run = tiny_run(**FULL)
    job = run.start(2, stop_in_hellaswag_on_rank_1)
    assert job.wait() == [train.EXIT_PREEMPTED] * 2, job.text()
    assert run.steps_saved() == [2, 3] and "hellaswag_acc" not in run.metrics()[-1]
    job = run.start(2)
    assert job.wait() == [0, 0], job.text()
    assert_same_run(run, whole_sharded, 6)


def test_a_disk_that_is_away_for_a_moment_is_written_again_by_all_ranks(whole_sharded, tiny_run):
    run = tiny_run(**FULL)
    job = run.start(2, lose_the_network_disk)
    assert job.wait() == [0, 0], job.text()
    assert job.text().count("could not be written: [Errno 116] Stale file handle") == 1 and "trying again in 1 s" in job.text()
    assert_same_run(run, whole_sharded, 6)


@pytest.mark.parametrize("plant, codes", [
    (fill_the_disk, [5, 5]), (die_while_rank_0_writes, [-9, 1]), (die_while_rank_1_serves, [1, -9])])
def test_a_save_that_fails_leaves_the_earlier_checkpoint_from_which_one_process_goes_on(plant, codes, whole_sharded, tiny_run):
    run = tiny_run(**FULL)
    job = run.start(2, plant)
    assert job.wait() == codes, job.text()
    assert "Traceback" not in job.text()
    if plant is fill_the_disk:
        assert job.text().count("error: ") == 1 and "could not be written: [Errno 28] No space left on device" in job.text()
    assert run.steps_saved() == [2] and store.newest_verified(run.folder / "checkpoints") == (run.checkpoint(2), [])
    assert run.train(SHARDING="none") == 0
    assert [line["rows_crc32"] for line in run.lines("ledger")] == [line["rows_crc32"] for line in whole_sharded.lines("ledger")]
    assert run.column("train_loss") == pytest.approx(whole_sharded.column("train_loss"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plant, rank", [(die_while_rank_0_writes, 0), (die_while_rank_1_serves, 1)])
def test_the_launcher_names_the_rank_that_was_killed_in_a_save_and_leaves_no_process(plant, rank, tiny_run):
    with launch(tiny_run(**FULL), plant=f"test_elastic:{plant.__name__}", planted_in=rank) as command:
        assert command.wait() == 1
    assert command.last_line().startswith(f"error: rank {rank} was killed by SIGKILL"), command.text()
