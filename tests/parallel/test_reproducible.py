"""REPRODUCIBLE: the bits of a run do not depend on its ranks, their sharding, or restarts."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from factories import MODES, Stages, TinyRun, assert_same_run, do_in_step

PRETRAIN = {"TRAINING_STAGE": "pretrain", "DROPOUT": 0.2}
FEATURES = {**MODES, "pretrain": PRETRAIN, "muon": {**PRETRAIN, "OPTIMIZER": "muon"},
            "untied": {**PRETRAIN, "TIE_EMBEDDINGS": "false"},
            "recomputed": {**PRETRAIN, "ACTIVATION_CHECKPOINTING": "block"},
            "lora-tokens": {**MODES["lora-dpo"], "LORA_TRAIN_TOKENS": "<|eot_id|>,<|end_of_text|>"}}
FULL, HYBRID = {"SHARDING": "full"}, {"SHARDING": "hybrid", "SHARD_DEGREE": 2}
LAYOUTS = {"2": (2, {}), "3": (3, {}), "4": (4, {}), "full-1": (1, FULL), "full-2": (2, FULL), "full-4": (4, FULL),
           "hybrid-4": (4, HYBRID)}
QUICK = [("pretrain", "fp32", "3"), ("lora-dpo", "fp32", "full-2"), ("muon", "bf16", "hybrid-4")]


def reproducible_run(stages: Stages, feature: str, precision: str, folder: Path) -> TinyRun:
    return TinyRun(stages.prepared, folder, **stages.settings(feature, FEATURES) | {
        "REPRODUCIBLE": "true", "PRECISION": precision, "MICRO_BATCH_SIZE": 1, "CACHE_DIR": folder / "cache"})


@pytest.mark.parametrize("feature, precision, layout", [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in ((feature, precision, layout) for feature in FEATURES for precision in ("fp32", "bf16") for layout in LAYOUTS)])
def test_ranks_compute_the_bits_of_one_process(feature, precision, layout, stages, tmp_path):
    one, run = (reproducible_run(stages, feature, precision, tmp_path / name) for name in ("one", "run"))
    one.ends([0])
    # Killed on one rank, and resumed on several.
    world_size, settings = LAYOUTS[layout]
    run.ends([-signal.SIGKILL], partial(do_in_step, 4, die))
    run.ends([0] * world_size, **settings)
    assert_same_run(one, run, step=4)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
