"""A run continues on another number of ranks, and with another SHARDING."""

from contextlib import nullcontext

import pytest
from factories import UNMEASURED, TinyRun, argv_of, prepare, run_ranks

from checkpoint import store
from parallel.collectives import start_ranks, stop_ranks
from settings.load import load_config
from training import setup
from training.state import write_checkpoint

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
NONE, FULL = {"SHARDING": "none"}, {"SHARDING": "full"}
OFFLOADED = {**FULL, "CPU_OFFLOAD": "true"}
LAYOUTS = {1: [FULL, NONE, OFFLOADED], 2: [FULL, NONE, OFFLOADED, {"SHARDING": "hybrid", "SHARD_DEGREE": 1}],
           4: [FULL, NONE, {"SHARDING": "hybrid", "SHARD_DEGREE": 2}, OFFLOADED]}


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
    setup.joined_ranks = lambda *_: nullcontext(ranks)
    for argv in commands:
        for layout in layouts:
            with setup.open_run(load_config([*argv, *argv_of(layout)])) as run:
                write_checkpoint(run)
    stop_ranks()


@pytest.mark.parametrize("world_size, names", [
    (2, ["base", "one-row"]), (4, ["base", "one-row"]),
    *(pytest.param(world_size, [*SAVED], marks=pytest.mark.slow) for world_size in LAYOUTS)])
def test_a_checkpoint_that_is_loaded_and_saved_has_the_same_bytes(world_size, names, saved, tmp_path):
    runs = [saved[name].copy(tmp_path / name, RUN_NAME=name) for name in names]
    run_ranks(save_again, [run.argv() for run in runs], LAYOUTS[world_size], world_size=world_size, folder=tmp_path / "outputs")
    for run in runs:
        assert run.hashes(2) == saved[run.settings["RUN_NAME"]].hashes(2), run.settings["RUN_NAME"]
        times = [store.read_manifest(each.checkpoint(2))["written"] for each in (saved[run.settings["RUN_NAME"]], run)]
        assert times[1] == times[0] + len(LAYOUTS[world_size])
