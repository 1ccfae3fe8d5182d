"""bf16 weights and states: the rounding is unbiased, the update is AdamW's, and runs keep their promises."""

import math
import re
from collections.abc import Sequence

import pytest
import torch
from factories import MODES, ONLINE, UNMEASURED, TinyRun, assert_same_run, model_without_weights

from checkpoint.schema import Progress
from checkpoint.tensors import open_tensors, read_all
from config import Config
from extensions import rounding
from extensions.rounding import MOMENT, SQUARES, WEIGHTS, bits_of_lines, lines_of, random_bits, round_into
from learn.optim import Optimizer, clip_scale
from model_utils import build_model
from parallel.ranks import Ranks
from plan.make import make_plan

BF16 = {"WEIGHT_DTYPE": "bf16", "OPTIMIZER_DTYPE": "bf16"}
MUON, BACKWARD = {"OPTIMIZER": "muon"}, {"UPDATE_IN_BACKWARD": "true", "MAX_GRAD_NORM": 0, "MICRO_BATCH_SIZE": 8}
CLIPPED = BACKWARD | {"UPDATE_IN_BACKWARD": "clipped", "MAX_GRAD_NORM": 0.01}


def bits_at(update: int, shape=(64, 96), first_row: int = 0, name: str = "w") -> torch.Tensor:
    lines = torch.cat(lines_of(7, name, first_row, shape))
    bits = bits_of_lines(lines, torch.zeros(len(lines), dtype=torch.int64), torch.tensor([update], dtype=torch.int32))
    return random_bits(bits[:shape[0], None], bits[shape[0]:])


def test_rounding_is_unbiased_and_its_bits_are_independent():
    updates, values = 200, torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    below = (values.view(torch.int32) & -2**16).view(torch.float32)
    above = ((values.view(torch.int32) & -2**16) + 2**16).view(torch.float32)
    chance, errors = ((values - below) / (above - below)).double(), {}
    variance = chance * (1 - chance)
    for purpose in (WEIGHTS, MOMENT, SQUARES):
        rounded = torch.empty(updates, *values.shape, dtype=torch.bfloat16)
        for update in range(updates):
            round_into(rounded[update], values, bits_at(update), purpose)
        is_above = rounded.float() == above
        assert (is_above | (rounded.float() == below)).all()
        errors[purpose] = is_above.double() - chance
        z = errors[purpose].sum(0) / (updates * variance).sqrt().clamp(min=1e-6)
        # The sum over all elements is normal too: 5 standard errors have a chance of 6e-7.
        assert abs(float(z.mean())) * math.sqrt(z.numel()) < 5 and 0.9 < float(z.var()) < 1.1 and float(z.abs().max()) < 6
    squared = float(variance.square().sum())
    weights = errors[WEIGHTS]
    lagged = {"update": (weights[1:] * weights[:-1]).sum(), "row": (weights[:, 1:] * weights[:, :-1]).sum(),
              "column": (weights[:, :, 1:] * weights[:, :, :-1]).sum(), "moment": (weights * errors[MOMENT]).sum(),
              "squares": (weights * errors[SQUARES]).sum(), "each": (errors[MOMENT] * errors[SQUARES]).sum()}
    for name, product in lagged.items():
        assert abs(float(product)) < 5 * math.sqrt(updates * squared), name


def test_a_number_that_bf16_has_is_stored_as_it_is_and_nearest_rounding_would_lose_small_updates():
    weights = torch.randn(64, 96).bfloat16()
    stored, nearest = weights.clone(), weights.clone()
    for update in range(100):
        round_into(stored, stored.float(), bits_at(update), WEIGHTS)
    assert torch.equal(stored, weights)
    for update in range(300):  # a hundredth of the last bit's half each
        change = weights.float() * 2**-15
        round_into(stored, stored.float() + change, bits_at(update), WEIGHTS)
        nearest.copy_(nearest.float() + change)
    assert torch.equal(nearest, weights)
    assert float((stored.float() / weights.float() - 1).mean()) == pytest.approx(300 * 2**-15, rel=0.02)


def test_bits_are_those_of_the_row_of_the_whole_matrix_and_of_the_name():
    whole = bits_at(3)
    assert torch.equal(bits_at(3, (20, 96), first_row=40), whole[40:60])
    for other in (bits_at(4), bits_at(3, name="v"), bits_at(3, first_row=1)):
        assert float((other == whole).double().mean()) < 1e-3


def tiny_model(**settings) -> tuple[torch.nn.Module, Optimizer]:
    config = Config(**{"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 80, "compile": False,
                       "weight_decay": 0.1} | settings)
    model = build_model(config, 300, Ranks(), torch.float32)
    return model, Optimizer(model, config)


def oracle(start: torch.Tensor, gradients: Sequence[torch.Tensor], decay: float, rate: float) -> torch.Tensor:
    """AdamW's weights in float64. Source: Loshchilov & Hutter 2019, algorithm 2."""
    weights, m, v = start.double(), 0.0, 0.0
    for number, gradient in enumerate((each.double() for each in gradients), 1):
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        change = m / (1 - 0.9**number) / ((v / (1 - 0.95**number)).sqrt() + 1e-8)
        weights = weights - rate * (change + decay * weights)
    return weights


@pytest.mark.parametrize("weight_dtype, state_dtype, chunk", [("fp32", "fp32", 2**16), ("bf16", "fp32", 2**16), ("bf16", "bf16", 512)])
def test_the_update_is_adamws_in_float64_up_to_the_rounding(weight_dtype, state_dtype, chunk, monkeypatch):
    monkeypatch.setitem(rounding.CHUNK, "cpu", chunk)
    model, optimizer = tiny_model(weight_dtype=weight_dtype, optimizer_dtype=state_dtype, update_in_backward=True)
    starts, rng = {name: each.detach().float().clone() for name, each in model.named_parameters()}, torch.Generator().manual_seed(0)
    history: dict[str, list[torch.Tensor]] = {name: [] for name in starts}
    for _ in range(6):
        for name, parameter in model.named_parameters():
            # Scaled by 3, and by the position, so that all averages differ.
            parameter.grad = torch.randn(parameter.shape, generator=rng).mul_(0.01).to(parameter.dtype)
            history[name].append(parameter.grad.float() / 3)
        optimizer.step(0.01, torch.tensor(3.0), torch.tensor(0.0))
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        optimizer.step(0.01, torch.tensor(3.0), torch.tensor(1.0))  # skipped
        assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
    for name, parameter in model.named_parameters():
        expected = oracle(starts[name], history[name], 0.1 if parameter.ndim > 1 else 0.0, 0.01)
        error = parameter.detach().double() - expected
        if parameter.dtype == torch.float32:
            assert float((error / expected.abs().clamp(min=0.01)).abs().max()) < 2e-5, name
        else:
            # Six roundings of at most one unit each, and no bias: within 5 standard errors.
            largest = torch.maximum(expected.abs(), starts[name].double().abs()) + 0.01
            unit = 2.0 ** (largest.log2().floor() - 7)
            assert float((error / unit).abs().max()) < 6
            relative = error / unit
            assert abs(float(relative.mean())) < 5 * float(relative.std()) / math.sqrt(relative.numel()) + 2e-3, name
    state = optimizer.state_tensors()
    assert float(state["norm.weight.step"]) == 6
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[state_dtype]
    assert state["layers.0.attention.wq.weight.exp_avg"].dtype == dtype and state["norm.weight.exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_update_has_other_bits(optimizer):
    """Each update shrinks the weights by a tenth of their last bit: with the same bits, a tenth of them would shrink every time."""
    model, optimizer = tiny_model(weight_dtype="bf16", weight_decay=0.1 * 2**-7 / 1.5, optimizer=optimizer)
    matrix = model.layers[0].feed_forward.w1.weight
    matrix.data.fill_(1.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(30):
        optimizer.step(1.0)
    shrunk = (1.5 - matrix.detach().float()) * 2**7
    assert float(shrunk.mean()) == pytest.approx(3, abs=0.2) and float(shrunk.std()) == pytest.approx(math.sqrt(30 * 0.1 * 0.9), abs=0.2)


def test_every_sum_of_micro_batches_has_other_bits():
    """1 + 2**-10 is an eighth of the way to the next bf16 number, which an eighth of all sums become."""
    config = Config(weight_dtype="bf16", compile=False, max_seq_len=32, micro_batch_size=1, total_batch_size=64)
    model, progress, sums = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), Progress(0), []
    reducer = rounding.RoundingReducer(model, Ranks(), config, Optimizer(model, config))
    for progress.step in range(60):
        reducer.begin(torch.tensor(1), progress)
        for place, gradient in enumerate((1, 2**-10)):
            with reducer.add(progress.step, is_last=place == 1):
                (gradient * model.weight).sum().backward()
        sums.append(model.weight.grad.double())
        model.weight.grad = None
    became = (torch.stack(sums) > 1).double().sum(0)
    assert float(became.mean()) == pytest.approx(60 / 8, rel=0.02) and float(became.std()) == pytest.approx(math.sqrt(60 * 7) / 8, rel=0.1)


@pytest.mark.slow
@pytest.mark.compiler
def test_a_compiled_update_rounds_by_the_same_bits():
    results = []
    for is_compiled in (False, True):
        model, optimizer = tiny_model(weight_dtype="bf16", optimizer_dtype="bf16", compile=is_compiled, n_layers=1)
        rng = torch.Generator().manual_seed(0)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=rng).mul_(0.01).to(parameter.dtype)
            optimizer.step(0.01)
        assert (rounding.compiled.cache_info().currsize == 2) == is_compiled
        results.append(torch.cat([each.detach().float().flatten() for each in model.parameters()]))
    # The compiler fuses a product and a sum, which rarely crosses the threshold of a rounding.
    assert float((results[0] != results[1]).double().mean()) < 1e-3


@pytest.mark.parametrize("mode, settings", [
    ("pretrain", {}), ("pretrain", MUON), ("pretrain", BACKWARD),
    *(pytest.param(mode, {}, marks=pytest.mark.slow) for mode in MODES | ONLINE if "lora" not in mode)])
def test_a_resumed_run_has_the_same_bits(mode, settings, stages, tmp_path):
    if mode == "pretrain":
        whole, run = (TinyRun(stages.prepared, tmp_path / name, MAX_STEPS=4, **UNMEASURED | BF16 | settings) for name in ("whole", "run"))
    else:
        whole, run = (stages.run(mode, tmp_path / name, **BF16) for name in ("whole", "run"))
    assert whole.train() == 0
    assert run.train(STOP_STEP=2) == run.train() == 0
    assert_same_run(whole, run, step=4)


def test_updates_in_the_backward_pass_are_those_after_it(prepared, tmp_path):
    runs = [TinyRun(prepared, tmp_path / name, MAX_STEPS=3, **UNMEASURED | BF16 | BACKWARD | changes)
            for name, changes in (("backward", {}), ("after", {"UPDATE_IN_BACKWARD": "false"}))]
    assert [run.train() for run in runs] == [0, 0]
    assert_same_run(*runs, step=3, logs=("metrics", "ledger"))


def test_clipping_in_the_backward_pass_divides_matrices_by_the_norm_of_the_step_before():
    """An own loop in float64 has the gradients of a loss that is linear in all parameters; vectors have this step's norm."""
    config = Config(update_in_backward="clipped", max_grad_norm=0.5, learning_rate=0.01, warmup_steps=0, lr_schedule="constant",
                    weight_decay=0.1, compile=False)
    model, progress, generator = torch.nn.Linear(6, 5), Progress(0), torch.Generator().manual_seed(0)
    optimizer, starts = Optimizer(model, config), {name: each.detach().clone() for name, each in model.named_parameters()}
    reducer, clipped, norms = rounding.RoundingReducer(model, Ranks(), config, optimizer), {name: [] for name in starts}, []
    for size in (1.0, 9.0, None, 0.01, 2.0):
        if size is None:  # a step without targets, which is no update
            reducer.begin(torch.tensor(0), progress)
            with reducer.add(progress.step, is_last=True):
                sum((0 * each).sum() for each in model.parameters()).backward()
            optimizer.step(0.01, clip_scale(reducer.norm(), 0.5), torch.tensor(1.0))
            progress.step += 1
            continue
        gradients = {name: torch.randn(each.shape, generator=generator) * size for name, each in starts.items()}
        norms.append(math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values())))
        for name, norm in (("weight", norms[-2] if norms[1:] else 0), ("bias", norms[-1])):
            clipped[name].append(gradients[name].double() / max(1, norm / 0.5))
        optimizer.zero_grad()
        reducer.begin(torch.tensor(1), progress)
        with reducer.add(progress.step, is_last=True):
            sum((gradients[name] * each).sum() for name, each in model.named_parameters()).backward()
        optimizer.step(0.01, clip_scale(norm := reducer.norm(), 0.5), torch.tensor(0.0))
        progress.step, progress.last_norm = progress.step + 1, float(norm)
        assert float(norm) == pytest.approx(norms[-1]) and model.weight.grad is None
    for name, parameter in model.named_parameters():
        expected = oracle(starts[name], clipped[name], 0.1 * (name == "weight"), 0.01)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout, settings", [
    ((2, {"SHARDING": "full"}), {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ((2, {"SHARDING": "full"}), MUON | {"PRECISION": "bf16"}), ((2, {"SHARDING": "full"}), {"TIE_EMBEDDINGS": "false"}),
        ((2, {}), {}), ((3, {}), MUON), ((4, {"SHARDING": "hybrid", "SHARD_DEGREE": 2}), {"PRECISION": "bf16"})))])
def test_reproducible_ranks_compute_the_bits_of_one_process(layout, settings, prepared, tmp_path):
    """Tied, in float32: look-up and head add to the gradient of one bf16 matrix, which may be rounded only once."""
    (world_size, sharding), exact = layout, BF16 | {"REPRODUCIBLE": "true", "MICRO_BATCH_SIZE": 1, "MAX_STEPS": 3, **UNMEASURED}
    one, run = (TinyRun(prepared, tmp_path / name, CACHE_DIR=tmp_path / name, **exact | settings) for name in ("one", "run"))
    assert one.train() == run.train(STOP_STEP=1) == 0
    run.ends([0] * world_size, **sharding)
    assert_same_run(one, run, step=3, logs=("ledger",))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, MUON, BACKWARD | {"MICRO_BATCH_SIZE": 4}], ids=["adamw", "muon", "backward"])
def test_states_in_host_memory_get_the_same_bits(settings, prepared, tmp_path):
    """Resumed in the middle, where the states come from a checkpoint."""
    held, offloaded = (TinyRun(prepared, tmp_path / name, MAX_STEPS=3, SHARDING="full", **BF16 | settings) for name in ("held", "offloaded"))
    held.ends([0, 0])
    offloaded.ends([0, 0], CPU_OFFLOAD="true", STOP_STEP=1)
    offloaded.ends([0, 0], CPU_OFFLOAD="true")
    assert held.hashes(3) == offloaded.hashes(3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_is_converted_both_ways(optimizer, prepared, tmp_path):
    run = TinyRun(prepared, tmp_path, OPTIMIZER=optimizer, SAVE_EVERY=1, **UNMEASURED)
    allowed, fp32 = {"ALLOW_RESUME_MISMATCH": "WEIGHT_DTYPE,OPTIMIZER_DTYPE"}, dict.fromkeys(BF16, "fp32")
    assert run.train(STOP_STEP=1) == run.train(STOP_STEP=2, **BF16 | allowed) == run.train(STOP_STEP=3, **fp32 | allowed) == 0
    full, half, again = ({name: each for file in ("model", "optimizer")
                          for name, each in read_all(open_tensors(run.checkpoint(step) / f"{file}.safetensors")).items()}
                         for step in (1, 2, 3))
    matrices = [name for name in full if full[name].ndim > 1]
    assert {half[name].dtype for name in matrices} == {torch.bfloat16} and full.keys() == again.keys()
    assert {each.dtype for each in again.values()} == {torch.float32}
    assert float(half["norm.weight.step"]) == 2 and float(again["norm.weight.step"]) == 3
    assert run.train(STOP_STEP=4, **BF16) == 5  # fixed


def test_a_step_that_is_not_finite_is_not_saved_after_updates_in_the_backward_pass(prepared, tmp_path):
    run = TinyRun(prepared, tmp_path, **UNMEASURED | BF16 | BACKWARD)
    text = run.ends([4], spoil_a_gradient)
    assert "Its gradients have changed the weights, which are not saved." in text
    assert run.steps_saved() == [2]


def spoil_a_gradient() -> None:
    """Make a gradient of the third step infinite."""
    collect, steps = rounding.RoundingReducer.collect, set()

    def spoiled(self, parameter):
        steps.add(self.number)
        if self.number == 3:
            parameter.grad.view(-1)[0] = math.inf
        collect(self, parameter)

    rounding.RoundingReducer.collect = spoiled


REFUSED = [
    (BF16 | {"LORA_ENABLED": "true", "PRETRAIN_CHECKPOINT": "x"}, "WEIGHT_DTYPE=bf16 is for full training"),
    (BF16 | {"PRECISION": "fp16", "DEVICE": "auto"}, "PRECISION=fp16 and its loss scale do not work with WEIGHT_DTYPE=bf16"),
    *((BF16 | BACKWARD | changes, f"UPDATE_IN_BACKWARD=true does not work with {feature}") for changes, feature in (
        ({"DEBUG": "true"}, "DEBUG=true"), ({"LOSS_SPIKE_POLICY": "skip"}, "LOSS_SPIKE_POLICY=skip"),
        ({"REPRODUCIBLE": "true"}, "REPRODUCIBLE=true"),
        ({"MAX_GRAD_NORM": 1}, "MAX_GRAD_NORM=1; set MAX_GRAD_NORM=0, or UPDATE_IN_BACKWARD=clipped"),
        (MUON, "OPTIMIZER=muon"), ({"MICRO_BATCH_SIZE": 2}, "4 micro-batches a step"),
        ({"WORLD_SIZE": 2, "MICRO_BATCH_SIZE": 4}, "SHARDING=none on several ranks"))),
    (CLIPPED | {"MAX_GRAD_NORM": 0}, "UPDATE_IN_BACKWARD=clipped does not work with MAX_GRAD_NORM=0; set UPDATE_IN_BACKWARD=true"),
    (CLIPPED | {"UPDATE_IN_BACKWARD": "cliped"}, "expected 'false', 'true' or 'clipped'; did you mean clipped?")]


@pytest.mark.parametrize("settings, error", REFUSED, ids=[error for _, error in REFUSED])
def test_what_does_not_work_is_refused(settings, error, prepared, tmp_path):
    if "PRETRAIN_CHECKPOINT" in settings:
        settings = settings | {"PRETRAIN_CHECKPOINT": model_without_weights(tmp_path / "x")}
    flags = [f"--{name.lower().replace('_', '-')}={value}" for name, value in (prepared.settings() | settings).items()]
    with pytest.raises(Exception, match=re.escape(error)):
        make_plan(flags, {})
