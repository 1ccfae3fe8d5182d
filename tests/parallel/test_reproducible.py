"""REPRODUCIBLE: the bits of a run do not depend on its ranks, their sharding, or restarts."""

import math
import os
import signal
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import (
    MODES,
    Stages,
    TinyRun,
    a_step,
    assert_same_run,
    do_in_step,
    furthest,
    in_transformers,
    new_model,
    uneven_batches,
)
from torch import nn
from torch.nn import functional as F

from checkpoint.huggingface import to_huggingface
from checkpoint.schema import Progress
from checkpoint.tensors import read_all
from config import Config
from dataloaders import first_micro_batch
from extensions.reproducible import HEADROOM_BITS, ReproducibleReducer, row_sums
from learn.objectives import LossSum, NextToken
from model import Dropout, choose_masks
from model_kernels.head import IGNORE_INDEX
from model_utils import make_deterministic
from parallel.ranks import Ranks
from train import accumulate_gradients

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
    run.ends([0] * world_size, expect_one_thread, **settings)
    assert_same_run(one, run, step=4)


def expect_one_thread() -> None:
    """On every rank, although it begins with two: some kernels divide their sums by the number of threads."""
    def check() -> None:
        assert torch.get_num_threads() == 1

    torch.set_num_threads(2)
    do_in_step(4, check)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


GRADIENTS = torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0)) * 10.0**torch.arange(-3, 3)[:, None, None]
UNITS = torch.tensor(37.0, dtype=torch.float64)


def summed(gradients, exponent: int = 13) -> tuple[torch.Tensor, float]:
    model = nn.Linear(7, 5, bias=False)
    exact = ReproducibleReducer(model, Ranks(), SimpleNamespace(seed=0, reproducible_micro_batches=len(gradients)))
    exact.begin(UNITS, Progress(0, gradient_exponent=exponent))
    for gradient in gradients:
        with exact.add(step=0, is_last=False):
            (model.weight * gradient).sum().backward()
    misfit = exact.reduce(UNITS)
    return model.weight.grad, float(misfit)


def exponent_for(largest: float) -> int:
    progress = Progress(0)
    ReproducibleReducer.rescale(None, progress, largest)
    return progress.gradient_exponent


@pytest.mark.parametrize("small", [0, 2**22])
def test_a_sum_of_micro_batches_has_the_same_bits_in_any_order(small, monkeypatch):
    monkeypatch.setattr("extensions.reproducible.SMALL", small)
    expected, misfit = summed(GRADIENTS)
    assert misfit == 0
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(GRADIENTS))
        assert torch.equal(summed(GRADIENTS[order])[0], expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dropout_of_a_micro_batch_depends_on_its_place_in_the_step_and_not_on_the_rank(ranks):
    """Of four micro-batches, so that three ranks have unequal numbers of them."""
    config, drawn = Config(reproducible=True, micro_batch_size=2, max_seq_len=8, total_batch_size=64), []
    model, batch = nn.Sequential(nn.Linear(7, 5), Dropout(0.5)), SimpleNamespace(tokens_BT=torch.zeros(2, 8))

    def loss_sum(model, batch):
        drawn.append(model[1](torch.ones(2, 8, 16)))
        return LossSum(model[0](torch.zeros(7)).sum(), {})

    for rank in range(ranks):
        run = SimpleNamespace(config=config, model=model, ranks=Ranks(rank=rank, world_size=ranks), scaler=None, progress=SimpleNamespace(step=3),
                              objective=SimpleNamespace(loss_sum=loss_sum), optimizer=SimpleNamespace(zero_grad=lambda **_: None), phase=lambda name: nullcontext())
        reducer = ReproducibleReducer(model, run.ranks, config)
        reducer.begin(UNITS, Progress(0))
        count = first_micro_batch(4, rank + 1, ranks) - first_micro_batch(4, rank, ranks)
        accumulate_gradients(run, reducer, [batch] * count)
    choose_masks(model, config.seed, 3, 0, 8)
    assert torch.equal(torch.cat(drawn), model[1](torch.ones(8, 8, 16)))


def test_a_rank_computes_with_one_thread():
    """A kernel may divide its sums by the number of threads, as bf16 matmuls do on CPUs with AMX."""
    before = torch.get_num_threads()
    try:
        for reproducible, threads in ((False, 2), (True, 1)):
            torch.set_num_threads(2)
            make_deterministic(Config(reproducible=reproducible, world_size=1), "cpu")
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_sum_is_the_exact_one_rounded_once():
    found = summed(GRADIENTS)[0]
    for value, terms in zip(found.flatten().tolist(), GRADIENTS.flatten(1).T.tolist()):
        exact = sum(map(Fraction, terms)) / 37
        assert abs(Fraction(value) - exact) <= Fraction(math.ulp(value)) * 2**28 + Fraction(1, 2**45)


@pytest.mark.parametrize("factor", [2.0**(HEADROOM_BITS + 5), 2.0**-(HEADROOM_BITS + 5)])
def test_gradients_beyond_the_scale_are_reported(factor):
    largest = float(GRADIENTS.abs().max())
    _, misfit = summed(GRADIENTS * factor, exponent_for(largest))
    assert misfit == largest * factor and summed(GRADIENTS * factor, exponent_for(misfit))[1] == 0


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_makes_its_tensor_nan(bad):
    gradients = GRADIENTS.clone()
    gradients[3, 2, 1] = bad
    found, misfit = summed(gradients)
    assert found.isnan().all() and misfit == 0


@pytest.mark.parametrize("shape", [(9, 1), (9, 2), (9, 7), (1, 64), (9, 96)])
def test_sums_of_rows_do_not_depend_on_the_other_rows(shape):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = row_sums(rows.clone())
    torch.testing.assert_close(expected, rows.sum(dim=1))
    for row in range(shape[0]):
        assert torch.equal(row_sums(rows[row:row + 2].clone())[0], expected[row])


def test_a_step_is_repeated_with_a_scale_that_fits():
    batches, settings = uneven_batches(2), {"REPRODUCIBLE": "true", "MICRO_BATCH_SIZE": 2}
    steps = [a_step(batches, exponent=exponent, **settings) for exponent in (-40, 40)]
    expected = steps[0][2].state_dict()
    for result, _, model in steps:
        assert result.updated and result == steps[0][0]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    ordinary = a_step(batches, MICRO_BATCH_SIZE=2)
    assert furthest(steps[0][1], ordinary[1]) < 1e-6 and steps[0][0].grad_norm == pytest.approx(ordinary[0].grad_norm, rel=1e-6)
    assert steps[0][0].loss == pytest.approx(ordinary[0].loss, rel=1e-6)


@pytest.mark.parametrize("row", [0, 7])
def test_a_gradient_that_is_not_finite_stops_a_reproducible_step(row):
    batches = uneven_batches(2)

    def poison(model):
        model.tok_embeddings.register_forward_hook(
            lambda module, inputs, output: output * math.nan if torch.equal(inputs[0], batches[row // 2].tokens_BT) else None)

    result, gradients, model = a_step(batches, plant=poison, REPRODUCIBLE="true", MICRO_BATCH_SIZE=2)
    assert not result.finite and not result.updated and math.isnan(result.grad_norm)
    assert all(gradient.isnan().all() for gradient in gradients.values())
    assert torch.equal(model.norm.weight, torch.ones(32))


def test_a_step_equals_one_of_transformers_whose_gradients_are_added_as_fractions():
    """Theirs in float64, summed without any rounding; ours in float32, summed as integers."""
    model, batches = new_model(Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, multiple_of=16), 512), uneven_batches(2)
    reference = in_transformers(model).double()
    exact = ReproducibleReducer(model, Ranks(), SimpleNamespace(seed=0, reproducible_micro_batches=len(batches)))
    exact.begin(UNITS, Progress(0, gradient_exponent=8))
    sums = {name: [Fraction(0)] * weight.numel() for name, weight in reference.named_parameters()}
    for batch in batches:
        with exact.add(step=0, is_last=False):
            NextToken().loss_sum(model, batch).total.backward()
        logits_BTV = reference(batch.tokens_BT).logits
        reference.zero_grad()
        F.cross_entropy(logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum").backward()
        for name, weight in reference.named_parameters():
            sums[name] = [total + Fraction(value) for total, value in zip(sums[name], weight.grad.flatten().tolist())]
    units = sum(int((batch.targets_BT != IGNORE_INDEX).sum()) for batch in batches)
    assert exact.reduce(torch.tensor(float(units), dtype=torch.float64)) == 0
    actual = read_all(to_huggingface({name: weight.grad for name, weight in model.named_parameters()}, model.config, 512))
    for name, total in sums.items():
        expected = torch.tensor([float(each / units) for each in total]).view_as(actual[name])
        assert float((actual[name] - expected).abs().max()) <= 1e-6 * float(expected.abs().max()), name
