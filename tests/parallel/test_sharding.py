"""A sharded model computes what a whole one does: every stage, on 1, 2 and 4 ranks by gloo."""

import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from factories import MODES, UNMEASURED, Stages, TinyRun, assert_same_run, drift, run_ranks, spike_in
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import model
import train
from config import OptimConfig
from learn.objectives import LossSum, NextToken
from model_kernels.head import ChunkedHead
from model_utils import build_model
from parallel.fsdp import is_divided, local_rows
from parallel.ranks import start_ranks, stop_ranks
from plan.make import make_plan

PRETRAIN = {"TRAINING_STAGE": "pretrain", "DROPOUT": 0.1}
FEATURES = {**MODES, "pretrain": PRETRAIN,
            "untied": {**PRETRAIN, "TIE_EMBEDDINGS": "false", "INIT_COPY": "true"},
            "muon": {**PRETRAIN, "OPTIMIZER": "muon", "TIE_EMBEDDINGS": "false", "INIT_COPY": "true"},
            "recomputed": {**PRETRAIN, "ACTIVATION_CHECKPOINTING": "block"},
            "offloaded": {**PRETRAIN, "CPU_OFFLOAD": "true"},
            # The gradient of a key's bias is nearly zero, of which AdamW would enlarge the rounding.
            "qwen2": {**PRETRAIN, "MODEL_TYPE": "qwen2", "ADAM_EPS": 1e-6},
            "qwen3": {**PRETRAIN, "MODEL_TYPE": "qwen3", "HEAD_WIDTH": 12, "SLIDING_WINDOW": 6, "SLIDING_EVERY": 2},
            "bf16": {**PRETRAIN, "PRECISION": "bf16"},
            "lora-whole": {**MODES["lora-dpo"], "LORA_TRAIN_HEAD": "true", "LORA_TRAIN_EMBEDDINGS": "true"},
            "lora-tokens": {**MODES["lora-dpo"], "LORA_TRAIN_TOKENS": "<|eot_id|>,<|end_of_text|>"}}
LAYOUTS = {"full-1": (1, {"SHARDING": "full"}), "full-2": (2, {"SHARDING": "full"}),
           "copies-2": (2, {"SHARDING": "hybrid", "SHARD_DEGREE": 1}),
           "full-4": (4, {"SHARDING": "full"}), "hybrid-4": (4, {"SHARDING": "hybrid", "SHARD_DEGREE": 2})}
QUICK = [("pretrain", "hybrid-4"), ("dpo-live", "full-2"), ("muon", "full-2")]


@pytest.fixture(scope="module")
def whole_run(stages, tmp_path_factory):
    runs: dict[str, TinyRun] = {}

    def run_of(feature: str) -> TinyRun:
        if feature not in runs:
            runs[feature] = run_with(stages, feature, tmp_path_factory.mktemp(feature))
            assert runs[feature].train(CPU_OFFLOAD="false") == 0
        return runs[feature]

    return run_of


def run_with(stages: Stages, feature: str, folder: Path) -> TinyRun:
    return TinyRun(stages.prepared, folder, **stages.settings(feature, FEATURES))


def furthest(run: TinyRun, other: TinyRun, step: int, files: str = "*") -> float:
    """The largest difference between two tensors of a checkpoint, relative to the largest number in the tensor."""
    distance = 0.0
    for file in run.checkpoint(step).glob(f"{files}.safetensors"):
        actual, reference = (load_file(each.checkpoint(step) / file.name) for each in (run, other))
        assert actual.keys() == reference.keys()
        distance = max(distance, *(float((actual[name] - reference[name]).abs().max() / reference[name].abs().max().clamp(min=1e-12))
                                   for name in actual))
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
    run.ends([0] * world_size, **settings)
    assert [line["rows_crc32"] for line in run.lines("ledger")] == [line["rows_crc32"] for line in whole.lines("ledger")]
    # Rounding in another order moves a weight by at most a few of bf16's last bits, and then by more.
    coarse = 1000 if feature == "bf16" else 1
    assert run.metrics()[0].keys() == whole.metrics()[0].keys()
    for name in ("train_loss", "val_loss", "hellaswag_acc", "hellaswag_acc_norm"):
        assert run.column(name) == pytest.approx(whole.column(name), rel=1e-6 * coarse, abs=1e-6 * coarse), name
    assert run.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=1e-5 * coarse)
    if feature != "bf16":
        assert run.lines("samples") == whole.lines("samples")
        assert furthest(run, whole, 2, "optimizer*") < 3e-5, "optimizer state"
        # AdamW divides a gradient by its size, so the rounding of a tiny one, as of adapters that begin at 0, counts.
        assert furthest(run, whole, 2) < (3e-4 if "lora" in feature else 3e-5), "weights"


@pytest.mark.parametrize("feature, precision", [
    ("untied", "bf16"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("pretrain", "fp32"), ("pretrain", "bf16"), ("untied", "fp32")))])
def test_copies_on_single_ranks_compute_the_bits_of_ddp(feature, precision, stages, tmp_path):
    runs = []
    for settings in ({}, {"SHARDING": "hybrid", "SHARD_DEGREE": 1}):
        runs.append(run_with(stages, feature, tmp_path / str(len(runs))))
        job = runs[-1].start(2, PRECISION=precision, **settings)
        assert job.wait() == [0, 0], job.text()
    if feature == "pretrain" and torch.__version__ >= (2, 15):  # differs by rounding
        ddp, sharded = (load_file(run.checkpoint(4) / "model.safetensors") for run in runs)
        torch.testing.assert_close(sharded, ddp, rtol=0, atol=1e-6)
        return
    assert_same_run(*runs, step=4)


class NoHostTensors(TorchDispatchMode):
    """Forbids tensors made of numbers of the host, which a GPU waits for, and numbers read from tensors.

    The document ids, the only int32, stay on the host.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_read = func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.int32
        assert not is_read and func is not torch.ops.aten.lift_fresh.default, func
        return func(*args, **(kwargs or {}))


def forbid_waiting() -> None:
    """Watch each step; from the second on, fully_shard takes the model to be on a GPU that is not there."""
    from torch.distributed.fsdp import fully_shard  # takes seconds, and only these processes need it

    original = train.train_step

    def train_step(run, *arguments):
        with NoHostTensors():
            result = original(run, *arguments)
        fully_shard.state(run.model)._device = torch.device("cuda")
        return result

    train.train_step = train_step


def test_a_sharded_step_does_not_wait_for_the_device_before_its_end(tiny_run):
    run = tiny_run(OPTIMIZER="muon", DOCUMENT_MASK="true", TIE_EMBEDDINGS="false", SHARDING="full", MAX_STEPS=3)
    run.ends([0, 0], forbid_waiting)


def poison_rank_1() -> None:
    if os.environ["RANK"] != "1":
        return
    original = NextToken.loss_sum

    def loss_sum(self, model, batch):
        total, metrics = original(self, model, batch)
        if model.training and train.ACTIVITY.step == 3:
            total = total * 1.0
            total.register_hook(lambda gradient: gradient * math.inf)
        return LossSum(total, metrics)

    NextToken.loss_sum = loss_sum


@pytest.mark.parametrize("layout, keepers", [pytest.param("copies-2", [0], marks=pytest.mark.slow), ("full-2", [0, 1])])
def test_the_error_names_the_rank_with_non_finite_gradients(layout, keepers, tiny_run):
    """The ranks of one copy keep the gradients, which are the same in each."""
    run = tiny_run(**UNMEASURED, SAVE_EVERY=0, **LAYOUTS[layout][1])
    text = run.ends([4, 4], poison_rank_1)
    assert "the gradient became NaN in step 3 on rank 1. Step 2 is saved. Try a lower LEARNING_RATE (now 0.01)" in text
    assert run.steps_saved() == [2]
    dumps = [load_file(run.folder / "debug" / "step-00000003" / f"rank-{rank}.safetensors") for rank in (0, 1)]
    assert [rank for rank in (0, 1) if any(name.startswith("gradient.layers.") for name in dumps[rank])] == keepers
    assert run.train() == 0, "the state before it is good"


def spike_in_a_short_window() -> None:
    OptimConfig.loss_spike_window = 16
    spike_in(15)


def test_the_update_of_a_spike_is_left_out_on_every_rank(tiny_run):
    run = tiny_run(**UNMEASURED, SAVE_EVERY=1, MAX_STEPS=16, LOSS_SPIKE_POLICY="skip", SHARDING="full")
    run.ends([0, 0], spike_in_a_short_window)
    assert [line["updated"] for line in run.lines("ledger")] == [True] * 14 + [False, True]
    assert run.hashes(15) == run.hashes(14) != run.hashes(16)


def test_the_error_names_the_replica_that_drifts(tiny_run):
    run = tiny_run(**UNMEASURED, SAVE_EVERY=1, DRIFT_CHECK_EVERY=3, MICRO_BATCH_SIZE=1, SHARDING="hybrid", SHARD_DEGREE=2)
    text = run.ends([1] * 4, partial(drift, 3, "layers.1.attention.wq.weight"))  # of the second copy
    assert "layers.1.attention.wq.weight differs between rank 1 and rank 3." in text
    assert run.steps_saved() == [1, 2], "the drifted state is not saved"


def check_dtypes(argv: list[str]) -> None:
    """Sines, cosines and norms are computed in float32, all matrices gathered in bf16, and no longer than they are used."""
    ranks, seen, rotate, normalise = start_ranks("cpu", 60), set(), model.rotate, model.RMSNorm.forward
    config, logprobs = make_plan(argv).config, ChunkedHead.logprobs

    def rotary(x_BTNH, plan):
        seen.add((x_BTNH.dtype, plan.cos_BT1H.dtype, plan.sin_BT1H.dtype, plan.rotation_BT1H.dtype))
        return rotate(x_BTNH, plan)

    def norm(self, x):
        seen.add((x.dtype, self.weight.dtype, type(self.weight.data)))
        return normalise(self, x)

    def projection(self, x):
        seen.add((x.dtype, self.weight.dtype))
        assert is_divided(sharded.tok_embeddings.weight) and is_divided(sharded.output.weight)
        return torch.nn.functional.linear(x, self.weight)

    def head(self, weight, *arguments, **options):
        seen.add(weight.values_VD.dtype)
        assert is_divided(sharded.tok_embeddings.weight)
        return logprobs(self, weight, *arguments, **options)

    model.rotate, model.RMSNorm.forward, model.Linear.forward = rotary, norm, projection
    ChunkedHead.logprobs = head
    sharded = build_model(config, 300, ranks, torch.bfloat16)
    sharded.tok_embeddings.register_forward_pre_hook(lambda module, _: seen.add(module.weight.dtype))
    tokens_BT = torch.arange(20).view(2, 10)
    sharded(tokens_BT, tokens_BT, mode="sum").backward()
    bf16, fp32 = torch.bfloat16, torch.float32
    assert seen == {(bf16, fp32, fp32, torch.complex64), (bf16, fp32, torch.Tensor), (bf16, bf16), bf16}, seen
    assert all(map(is_divided, (sharded.tok_embeddings.weight, sharded.output.weight)))
    assert all(local_rows(parameter).dtype == local_rows(parameter.grad).dtype == fp32 for parameter in sharded.parameters())
    stop_ranks()


def test_sines_and_norms_are_float32_over_bf16_matrices(tiny_run, tmp_path):
    run_ranks(check_dtypes, tiny_run(SHARDING="full", WORLD_SIZE=2, TIE_EMBEDDINGS="false").argv(), world_size=2, folder=tmp_path)
