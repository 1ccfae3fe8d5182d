"""A sharded model computes what a whole one does: every stage, on 1, 2 and 4 ranks by gloo."""

from pathlib import Path

import pytest
from factories import MODES, STAGE, Stages, TinyRun, assert_same_run, prepare_stages
from safetensors.torch import load_file

PRETRAIN = {"TRAINING_STAGE": "pretrain"}
FEATURES = {**MODES, "pretrain": PRETRAIN,
            "untied": {**PRETRAIN, "TIE_EMBEDDINGS": "false"},
            "muon": {**PRETRAIN, "OPTIMIZER": "muon"},
            "recomputed": {**PRETRAIN, "ACTIVATION_CHECKPOINTING": "block"},
            "offloaded": {**PRETRAIN, "CPU_OFFLOAD": "true"},
            "bf16": {**PRETRAIN, "PRECISION": "bf16"},
            "lora-whole": {**MODES["lora-dpo"], "LORA_TRAIN_HEAD": "true", "LORA_TRAIN_EMBEDDINGS": "true"},
            "lora-tokens": {**MODES["lora-dpo"], "LORA_TRAIN_TOKENS": "<|eot_id|>,<|end_of_text|>"}}
LAYOUTS = {"full-1": (1, {"SHARDING": "full"}), "full-2": (2, {"SHARDING": "full"}),
           "copies-2": (2, {"SHARDING": "hybrid", "SHARD_DEGREE": 1}),
           "full-4": (4, {"SHARDING": "full"}), "hybrid-4": (4, {"SHARDING": "hybrid", "SHARD_DEGREE": 2})}
QUICK = [("pretrain", "full-1"), ("pretrain", "hybrid-4"), ("dpo-live", "full-2"), ("lora-whole", "hybrid-4"),
         ("muon", "full-2"), ("distilled", "full-2"), ("untied", "full-4")]


@pytest.fixture(scope="module")
def stages(prepared, tmp_path_factory) -> Stages:
    return prepare_stages(prepared, tmp_path_factory.mktemp("stages"))


@pytest.fixture(scope="module")
def whole_run(stages, tmp_path_factory):
    """A function that returns the run of one process with a feature, which is trained once."""
    runs: dict[str, TinyRun] = {}

    def run_of(feature: str) -> TinyRun:
        if feature not in runs:
            runs[feature] = run_with(stages, feature, tmp_path_factory.mktemp(feature))
            assert runs[feature].train(CPU_OFFLOAD="false") == 0
        return runs[feature]

    return run_of


def run_with(stages: Stages, feature: str, folder: Path) -> TinyRun:
    settings = {**stages.prepared.settings(), **STAGE, "TRAINING_STAGE": "sft", "SFT_DATA_PATH": stages.chats,
                "DPO_DATA_PATH": stages.pairs}
    named = {"base": stages.base, "teacher": stages.teacher}
    settings |= {name: named.get(value, value) for name, value in FEATURES[feature].items()}
    # Dropout draws other numbers on each rank.
    return TinyRun(stages.prepared, folder, **settings | {"LORA_DROPOUT": 0.0})


def furthest(run: TinyRun, other: TinyRun, step: int) -> float:
    """The largest difference between two tensors of a checkpoint, relative to the largest number in the tensor."""
    distance = 0.0
    for file in run.checkpoint(step).glob("*.safetensors"):
        mine, theirs = (load_file(each.checkpoint(step) / file.name) for each in (run, other))
        assert mine.keys() == theirs.keys()
        distance = max(distance, *(float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(min=1e-12))
                                   for name in mine))
    return distance


def compare_alike(run: TinyRun, whole: TinyRun, last: int) -> tuple[float, float]:
    """The largest difference of a loss, and of a tensor's number in the last checkpoint; asserts that both are small.

    A part that ended early evaluated at its end, where the whole run did not.
    """
    rows, expected = ([line["rows_crc32"] for line in each.lines("ledger")] for each in (run, whole))
    assert rows == expected, f"rows:\n{rows}\nexpected: {expected}"
    difference = 0.0
    for name in ("train_loss", "val_loss", "hellaswag_acc", "hellaswag_acc_norm"):
        found, expected = run.column(name), whole.column(name)
        difference = max(difference, *(abs(found[step] - value) / max(1, abs(value)) for step, value in expected.items()))
        assert difference <= 1e-5, f"{name}:\n{found}\nexpected: {expected}"
    samples = [line for line in run.lines("samples") if line in whole.lines("samples")]
    assert samples == whole.lines("samples"), f"samples:\n{run.lines('samples')}\nexpected: {whole.lines('samples')}"
    distance = furthest(run, whole, last)
    assert distance <= 1e-3, f"weights or optimizer state differ by {distance} of the largest number"
    return difference, distance


@pytest.mark.parametrize("feature, layout", [
    pytest.param(feature, layout, marks=[] if (feature, layout) in QUICK else pytest.mark.slow)
    for feature in FEATURES for layout in LAYOUTS])
def test_a_sharded_run_equals_that_of_one_process(feature, layout, stages, whole_run, tmp_path):
    whole, run, (world_size, settings) = whole_run(feature), run_with(stages, feature, tmp_path), LAYOUTS[layout]
    job = run.start(world_size, **settings)
    assert job.wait() == [0] * world_size, job.text()
    assert [line["rows_crc32"] for line in run.lines("ledger")] == [line["rows_crc32"] for line in whole.lines("ledger")]
    # Rounding in another order moves a weight by at most a few of bf16's last bits, and then by more.
    coarse = 1000 if feature == "bf16" else 1
    assert run.metrics()[0].keys() == whole.metrics()[0].keys()
    for name in ("train_loss", "val_loss", "hellaswag_acc", "hellaswag_acc_norm"):
        assert run.column(name) == pytest.approx(whole.column(name), rel=1e-6 * coarse, abs=1e-6 * coarse), name
    assert run.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=1e-5 * coarse)
    if feature != "bf16":
        assert run.lines("samples") == whole.lines("samples")
        assert furthest(run, whole, 2) < 3e-5, "weights and optimizer state"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_on_single_ranks_compute_the_bits_of_ddp(precision, stages, tmp_path):
    runs = []
    for settings in ({}, {"SHARDING": "hybrid", "SHARD_DEGREE": 1}):
        runs.append(run_with(stages, "untied", tmp_path / str(len(runs))))
        job = runs[-1].start(2, PRECISION=precision, **settings)
        assert job.wait() == [0, 0], job.text()
    assert_same_run(*runs, step=4)
