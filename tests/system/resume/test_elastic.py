"""A run continues on another number of ranks, and with another SHARDING."""

import errno
import os
from contextlib import nullcontext
from functools import cache, partial

import faults
import pytest
from factories import UNMEASURED, TinyRun, argv_of, assert_same_run, flip_bit, planned, prepare, run_ranks
from test_sharding import FEATURES, compare_alike, run_with

import train
from checkpoint import store
from parallel.ranks import start_ranks, stop_ranks
from run import build as run_build
from run.run import finish_saving, save_checkpoint

NONE, FULL, HYBRID = {"SHARDING": "none"}, {"SHARDING": "full"}, {"SHARDING": "hybrid", "SHARD_DEGREE": 2}
OFFLOADED = {**FULL, "CPU_OFFLOAD": "true"}

PARTS = [(1, NONE), (2, FULL), (4, HYBRID), (2, NONE)]  # a step each
QUICK = ("muon",)


@pytest.mark.parametrize("feature", [pytest.param(feature, marks=[] if feature in QUICK else pytest.mark.slow)
                                     for feature in FEATURES if feature not in ("bf16", "offloaded")])
def test_a_run_continues_on_1_2_4_and_2_ranks_and_none_full_hybrid_and_none(feature, stages, tmp_path):
    whole = run_with(stages, feature, tmp_path / "whole").trained()
    run = run_with(stages, feature, tmp_path / "parts")
    for step, (world_size, layout) in enumerate(PARTS, 1):
        last = step == len(PARTS)
        plant = None if last else partial(faults.stop_in_step, step, world_size - 1)
        text = run.ends([0 if last else train.EXIT_PREEMPTED] * world_size, plant, **layout)
    assert "warning: the number of ranks was 4, is 2" in text and "SHARDING was hybrid, is none" in text
    compare_alike(run, whole, last=4)


# 526 ids, so the vocabulary is padded; on 4 ranks the matrices of 2, 5 and 6 rows leave ranks with fewer rows, or none.
UNEVEN = {**UNMEASURED, "DIM": 6, "N_HEADS": 3, "N_KV_HEADS": 1, "FFN_DIM": 5, "MAX_STEPS": 2}
LORA = {"LORA_ENABLED": "true", "PRETRAIN_CHECKPOINT": "base"}
SAVED = {"base": {"OPTIMIZER": "muon", "TIE_EMBEDDINGS": "false"},
         "one-row": {**LORA, "TIE_EMBEDDINGS": "false", "LORA_RANK": 1, "LORA_TRAIN_TOKENS": "<|eot_id|>"},
         "adamw": {},
         "bf16": {"PRECISION": "bf16"},
         "tokens": {**LORA, "TIE_EMBEDDINGS": "false", "LORA_TRAIN_TOKENS": "<|eot_id|>,<|end_of_text|>"},
         "whole": {**LORA, "TIE_EMBEDDINGS": "false", "LORA_TRAIN_HEAD": "true", "LORA_TRAIN_EMBEDDINGS": "true"}}
LAYOUTS = {1: [FULL, NONE, OFFLOADED], 2: [FULL, NONE, OFFLOADED, {"SHARDING": "hybrid", "SHARD_DEGREE": 1}],
           4: [FULL, NONE, HYBRID, OFFLOADED]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that returns a run of two steps of one process, which is trained once."""
    folder = tmp_path_factory.mktemp("saved")
    prepared = prepare(folder / "data", vocab_size=270)

    @cache
    def run_of(name: str) -> TinyRun:
        named = {key: run_of("base").checkpoint(2) if value == "base" else value for key, value in SAVED[name].items()}
        return TinyRun(prepared, folder, RUN_NAME=name, **UNEVEN | named).trained()

    return run_of


def save_again(commands: list[list[str]], layouts: list[dict]) -> None:
    """Load the checkpoint of each run with one layout after the other, and save it without a step, with and without threads."""
    ranks = start_ranks("cpu", 60)
    run_build.meeting = lambda decide: nullcontext((ranks, ranks.on_rank0(decide)))
    for argv in commands:
        for layout in layouts:
            with run_build.open_run(*planned([*argv, *argv_of(layout)])) as run:
                save_checkpoint(run, wait=True)
                save_checkpoint(run)
                finish_saving(run)
    stop_ranks()


@pytest.mark.parametrize("world_size, machines, names, layouts", [
    (4, 2, ["base", "one-row"], [FULL, HYBRID]),
    *(pytest.param(world_size, machines, [*SAVED], LAYOUTS[world_size], marks=pytest.mark.slow)
      for world_size in LAYOUTS for machines in (1, 2, 4) if machines <= world_size)])
def test_a_checkpoint_that_is_loaded_and_saved_has_the_same_bytes(world_size, machines, names, layouts, saved, tmp_path):
    """However many ranks write it, and also where rows come from other machines."""
    runs = [saved(name).copy(tmp_path / name, RUN_NAME=name) for name in names]
    run_ranks(save_again, [run.argv() for run in runs], layouts, world_size=world_size, folder=tmp_path / "outputs",
              env={"LOCAL_WORLD_SIZE": str(world_size // machines)})
    for run in runs:
        before = saved(run.settings["RUN_NAME"])
        assert run.hashes(2) == before.hashes(2), run.settings["RUN_NAME"]
        manifests = [store.read_manifest(each.checkpoint(2)) for each in (before, run)]
        for name in before.hashes(2):
            assert manifests[0]["files"][name] == manifests[1]["files"][name]
        assert manifests[1]["written"] == manifests[0]["written"] + 2 * len(layouts)
        store.verify(run.checkpoint(2))


@pytest.fixture(scope="module")
def whole_sharded(prepared, tmp_path_factory):
    """A run on two ranks that hold one copy of the model together, which nothing interrupted."""
    run = TinyRun(prepared, tmp_path_factory.mktemp("whole-sharded"), **FULL)
    run.ends([0, 0])
    return run


IN_THE_SECOND_SAVE = ("checkpoint.tensors", "block_rows", 100)  # in the middle of its tensors: each of two saves writes more than 60


def fail_to_write(number: int) -> None:
    raise OSError(number, os.strerror(number))


def die_while_rank_0_writes() -> None:
    faults.act(0, IN_THE_SECOND_SAVE, faults.die)


def die_while_rank_1_writes() -> None:
    faults.act(1, IN_THE_SECOND_SAVE, faults.die)


def test_a_signal_in_an_evaluation_which_gathers_embedding_and_head_saves_the_own_rows(whole_sharded, tiny_run):
    run = tiny_run(**FULL)
    evaluation = ("evaluation.during_run", "evaluate_batches", 2)
    run.ends([train.EXIT_PREEMPTED] * 2, partial(faults.act, 1, evaluation, faults.terminate))
    assert run.steps_saved() == [2, 3] and "hellaswag_acc" not in run.metrics()[-1]
    run.ends([0, 0])
    assert_same_run(run, whole_sharded, 6)


def test_a_disk_that_is_away_for_a_moment_is_written_again_by_all_ranks(whole_sharded, tiny_run):
    run = tiny_run(**FULL)
    text = run.ends([0, 0], partial(faults.act, 0, IN_THE_SECOND_SAVE, partial(fail_to_write, errno.ESTALE)))
    assert text.count("cannot be written: Stale file handle") == 1 and "retrying in 1 s" in text
    assert_same_run(run, whole_sharded, 6)


@pytest.mark.parametrize("plant, codes", [
    (partial(faults.act, 0, IN_THE_SECOND_SAVE, partial(fail_to_write, errno.ENOSPC)), [5, 5]),
    pytest.param(die_while_rank_0_writes, [-9, 1], marks=pytest.mark.slow), (die_while_rank_1_writes, [1, -9])])
def test_a_save_that_fails_leaves_the_earlier_checkpoint_from_which_one_process_goes_on(plant, codes, whole_sharded, tiny_run):
    run = tiny_run(**FULL)
    text = run.ends(codes, plant)
    assert "Traceback" not in text
    if codes == [5, 5]:
        assert text.count("error: ") == 1 and "cannot be written: No space left on device" in text
    assert run.steps_saved() == [2] and store.newest_verified(run.folder / "checkpoints") == (run.checkpoint(2), [])
    assert run.train(SHARDING="none") == 0
    assert [line["rows_crc32"] for line in run.lines("ledger")] == [line["rows_crc32"] for line in whole_sharded.lines("ledger")]
    assert run.column("train_loss") == pytest.approx(whole_sharded.column("train_loss"), abs=1e-5)


def test_a_damaged_checkpoint_is_skipped_by_all_ranks(whole_sharded, tmp_path):
    run = whole_sharded.copy(tmp_path / "runs")
    for step in (6, 4):
        path = run.checkpoint(step) / store.OPTIMIZER
        flip_bit(path, {6: path.stat().st_size - 8, 4: path.stat().st_size // 2}[step])
    text = run.ends([0, 0])
    for step in (6, 4):
        assert text.count(f"skipping a checkpoint: {run.checkpoint(step) / store.OPTIMIZER} is damaged: its SHA-256") == 1, text
    assert_same_run(run, whole_sharded, 6)
