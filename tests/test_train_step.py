"""A step clips its gradients and skips bad updates on the device, and waits for the device once."""

import math

import pytest
import torch
from factories import TINY, a_step, furthest, new_model, run_ranks, uneven_batches
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import train
from config import Config, OptimConfig
from dataloaders import Batch
from learn import objectives
from learn.objectives import DPO, NextToken
from learn.optim import Optimizer, clip_scale, gradient_norm, newton_schulz
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import start_ranks, stop_ranks


class Functions(TorchFunctionMode):
    """Logs each read of a tensor that is no torch operation, and each update."""

    def __init__(self, log: list[str]):
        super().__init__()
        self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu):
            self.log.append("read")
        if func is torch._fused_adamw_:
            self.log.append("update")
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Logs each number that is read from a tensor; except int32, because the document ids stay on the CPU."""

    def __init__(self, log: list[str]):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.int32:
            self.log.append("read")
        return func(*args, **(kwargs or {}))


def pairs(rows_per_micro_batch: int) -> list[Batch]:
    """Eight rows with one pair each; each answer has four tokens."""
    tokens_BT, targets_BT = torch.randint(0, 512, (2, 8, 32), generator=torch.Generator().manual_seed(0))
    document_ids_BT = (torch.arange(32).expand(8, 32) // 16 + 1).int()
    targets_BT[:, torch.arange(32) % 16 < 12] = IGNORE_INDEX
    wholes = (tokens_BT, targets_BT, document_ids_BT)
    return [Batch(*parts) for parts in zip(*(whole.split(rows_per_micro_batch) for whole in wholes))]


OBJECTIVES = {"next token": (uneven_batches, lambda config: NextToken()),
              "dpo": (pairs, lambda config: DPO(config, lambda batch: torch.zeros(len(batch.tokens_BT), 1, 2)))}


@pytest.fixture
def log(monkeypatch) -> list[str]:
    """The reads and updates of the next `a_step`, in order."""
    log, step = [], train.train_step
    monkeypatch.setattr(objectives, "share_prompts", lambda batch: batch)  # on a CPU alone, where no read waits

    def logged(*arguments):
        with Functions(log), Operations(log):
            return step(*arguments)

    monkeypatch.setattr(train, "train_step", logged)
    return log


@pytest.mark.parametrize("policy", ["warn", "skip"])
@pytest.mark.parametrize("rows", [8, 2])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_waits_for_the_device_once_when_its_update_is_enqueued(objective, rows, policy, log):
    batches_of, choose = OBJECTIVES[objective]
    result, _, _ = a_step(batches_of(rows), choose=choose, LOSS_SPIKE_POLICY=policy)
    assert result.updated and log == ["update", "update", "read"], "of what decays, of what does not, and what came of it"


@pytest.mark.parametrize(("scale", "read"), [(2.0**16, ["read"]), (math.inf, ["read", "read"])])
def test_a_loss_scaler_is_read_only_where_something_overflowed(scale, read, log):
    result, _, _ = a_step(uneven_batches(2), torch.amp.GradScaler("cpu", init_scale=scale))
    assert result.finite and result.updated == (len(read) == 1) and log == ["update", "update", *read]


def muon_in_plain_words(parameters, gradients, buffers, rate: float, decay: float, momentum: float) -> None:
    for parameter, gradient, buffer in zip(parameters, gradients, buffers):
        buffer.lerp_(gradient, 1 - momentum)
        update = newton_schulz(gradient.lerp(buffer, momentum)[None])[0]
        parameter.mul_(1 - rate * decay).add_(update, alpha=-rate * 0.2 * math.sqrt(max(parameter.shape)))


@torch.no_grad()
@pytest.mark.parametrize("max_norm", [0.0, 0.05, 1e9])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_update_is_that_of_clipped_gradients(kind, max_norm):
    """Compared with clipping the gradients first, and then an update without grad_scale."""
    config = Config(**{name.lower(): value for name, value in TINY.items()}, optimizer=kind, adam_beta1=0.8,
                    adam_beta2=0.9, adam_eps=1e-6, muon_momentum=0.7)
    actual, reference = (new_model(config, 512, seed=1) for _ in range(2))
    optimizer = Optimizer(actual, config)
    others = {name: p for name, p in reference.named_parameters() if kind == "muon" and name.startswith("layers.") and p.ndim == 2}
    buffers = [torch.zeros_like(p) for p in others.values()]
    rest = [p for name, p in reference.named_parameters() if name not in others]
    adamw = torch.optim.AdamW([{"params": [p for p in rest if p.ndim == decays + 1], "weight_decay": config.weight_decay * decays}
                               for decays in (1, 0)], betas=(0.8, 0.9), eps=1e-6, lr=0.01, fused=True)
    rng = torch.Generator().manual_seed(2)
    for _ in range(3):
        for p, q in zip(actual.parameters(), reference.parameters()):
            p.grad = torch.randn(p.shape, generator=rng)
            q.grad = p.grad.clone()
        norm = gradient_norm(actual)
        optimizer.step(0.01, clip_scale(norm, max_norm), torch.zeros(()))
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(reference.parameters(), max_norm, norm)
        muon_in_plain_words(others.values(), [p.grad for p in others.values()], buffers, 0.01, config.weight_decay, 0.7)
        adamw.step()
        for p, q in zip(actual.parameters(), reference.parameters()):
            assert float((p.grad - q.grad).abs().max() / q.grad.abs().max()) <= 1.2e-7
    for (name, p), q in zip(actual.named_parameters(), reference.parameters()):
        assert float((p - q).abs().max() / q.abs().max()) <= 6e-7, name


def bits(tensors) -> list[torch.Tensor]:
    return [tensor.detach().clone().view(torch.int32) for tensor in tensors]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_an_update_that_is_left_out_changes_no_bit(kind, bad):
    """Not even of -0.0, NaN, or the optimizer's step counters."""
    config = OptimConfig(optimizer=kind)
    model = new_model(Config(**{name.lower(): value for name, value in TINY.items()}), 512, seed=1)
    optimizer = Optimizer(model, config)

    def step(value: float, found_inf: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
            parameter.grad.view(-1)[3] *= value
        optimizer.step(0.01, clip_scale(gradient_norm(model), 1.0), torch.tensor(found_inf))

    step(1.0, 0.0)
    for tensor in (*model.parameters(), *optimizer.state_tensors().values()):
        if tensor.ndim:
            tensor.data.view(-1)[:3] = torch.tensor([-0.0, 0.0, math.nan])
    everything = [*model.parameters(), *optimizer.state_tensors().values()]
    before = bits(everything)
    step(bad, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(everything)))
    step(1.0, 0.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, bits(everything)))


@pytest.mark.parametrize(("policy", "above", "updated"), [("warn", -1e-12, True), ("skip", -1e-12, False), ("skip", 1e-12, True),
                                                          ("stop", -1e-12, False)])
def test_the_device_and_the_host_agree_on_a_spike_to_the_last_digit(policy, above, updated):
    """The recent losses are chosen so that the limit is as close to the loss of the step as they can bring it."""
    loss = a_step(uneven_batches(2))[0].loss
    recent = [(loss + above) / 1.5] * 64  # flat: a deviation of 1 % of the median
    result, _, model = a_step(uneven_batches(2), recent_losses=recent, LOSS_SPIKE_POLICY=policy, LOSS_SPIKE_THRESHOLD=50)
    fresh = new_model(model.config, 512, seed=1)
    assert result.updated == updated != all(map(torch.equal, model.parameters(), fresh.parameters()))
    assert (result.spike > 0) == (above < 0) and result.finite


def check_bf16() -> None:
    """Both ranks round their gradients to bf16, and the sums are rounded too."""
    ranks = start_ranks("cpu", 60)
    own = uneven_batches(2)[ranks.rank * 2:ranks.rank * 2 + 2]
    whole, gradients, _ = a_step(own, ranks=ranks, MAX_GRAD_NORM=0)
    result, rounded, model = a_step(own, ranks=ranks, MAX_GRAD_NORM=0, GRADIENT_DTYPE="bf16")
    assert result.loss == whole.loss and result.updated
    assert result.grad_norm == pytest.approx(whole.grad_norm, rel=2**-8)
    assert 0 < furthest(gradients, rounded) < 2**-7
    assert all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in rounded.values())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert len(set(ranks.all_gather_json(weights.numpy().tobytes().hex()))) == 1, "the replicas drift apart"
    stop_ranks()


def hold_in_bf16(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data, parameter.is_held = parameter.data.bfloat16(), True


def check_bf16_weights() -> None:
    """The mean of all rows' gradients, which one process without ranks computes."""
    ranks, batches = start_ranks("cpu", 60), uneven_batches(2)
    settings = {"MAX_GRAD_NORM": 0, "WEIGHT_DTYPE": "bf16", "plant": hold_in_bf16}
    whole, expected, _ = a_step(batches, **settings)
    result, gradients, _ = a_step(batches[ranks.rank * 2:ranks.rank * 2 + 2], ranks=ranks, **settings)
    assert result.grad_norm == pytest.approx(whole.grad_norm, rel=0.02) and furthest(expected, gradients) < 0.02
    stop_ranks()


class Placed(NextToken):
    """Records the address of each gradient before each micro-batch."""

    def __init__(self):
        self.places = []

    def loss_sum(self, model, batch):
        self.places.append([parameter.grad is not None and parameter.grad.data_ptr() for parameter in model.parameters()])
        return super().loss_sum(model, batch)


def check_buckets() -> None:
    """The gradients stay in the buckets of their exchange."""
    ranks, objective, step = start_ranks("cpu", 60), Placed(), train.train_step

    def thrice(*arguments):
        return [step(*arguments) for _ in range(3)][-1]

    train.train_step = thrice
    a_step(uneven_batches(2)[ranks.rank * 2:ranks.rank * 2 + 2], ranks=ranks, choose=lambda config: objective)
    first, second = objective.places[-2:]
    assert first == second and all(first), "of the third step: DDP orders its buckets anew in the second"
    stop_ranks()


@pytest.mark.parametrize("check", [check_bf16, check_bf16_weights, check_buckets])
def test_two_ranks_exchange_gradients(check, tmp_path):
    run_ranks(check, world_size=2, folder=tmp_path)
