"""Divergences compared with torch's KL and TRL, and the objective compared with autograd on plain logits."""

import warnings
from dataclasses import replace

import pytest
import torch
from factories import new_model
from torch.nn import functional as F

from config import Config
from dataloaders import Batch
from learn import objectives
from learn.objectives import Distillation, divergence
from model import Transformer
from model_kernels.head import IGNORE_INDEX

KINDS = ("forward_kl", "reverse_kl", "jsd")
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 16, "init_std": 0.2}
VOCAB = 50  # not a multiple of 128, so that the model pads it


def random_logits(rows: int = 6, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def plain_divergence(student: torch.Tensor, teacher: torch.Tensor, kind: str, temperature: float, beta: float) -> torch.Tensor:
    """The definition times temperature squared, with torch's own KL."""
    log_q, log_p = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())

    def kl(log_one, log_other):
        return F.kl_div(log_other, log_one, reduction="none", log_target=True).sum(-1)

    value = {"forward_kl": lambda: kl(log_p, log_q), "reverse_kl": lambda: kl(log_q, log_p),
             "jsd": lambda: beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)}[kind]()
    return value * temperature**2


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("kind, trl_beta", [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3), ("jsd", 0.5)])
def test_divergence_is_trls_times_temperature_squared(kind, trl_beta, temperature):
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd import GKDTrainer
    student, teacher = random_logits(seed=1)[None], random_logits(seed=2)[None]
    labels = torch.tensor([[1, IGNORE_INDEX, 2, 3, IGNORE_INDEX, 4]])
    reference = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=trl_beta, temperature=temperature, reduction="sum")
    value, _ = divergence(student[0], teacher[0], kind, temperature, trl_beta)
    actual = value[labels[0] != IGNORE_INDEX].sum()
    torch.testing.assert_close(actual, reference * temperature**2, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite():
    for kind in KINDS:
        value, gradient = divergence(random_logits(scale=500.0, seed=1), random_logits(scale=500.0, seed=2), kind, 1.0)
        assert value.isfinite().all() and gradient.isfinite().all()


def llama(seed: int, **shape) -> Transformer:
    return new_model(Config(**(SHAPE | shape)), VOCAB, seed)


class Teacher:
    """A teacher that computes all logits with our model."""

    def __init__(self, model: Transformer):
        self.model = model.eval().requires_grad_(False)

    def logits(self, batch):
        logits_MV = self.model(batch.tokens_BT, document_ids_BT=batch.document_ids_BT, mode="logits").flatten(0, 1)
        logits_MV = logits_MV if batch.target_index_M is None else logits_MV[batch.target_index_M]
        return lambda part: logits_MV[part]


def a_batch(with_positions: bool, rows: int = 3, tokens: int = 16, seed: int = 0) -> Batch:
    """Rows of two documents each, with some targets ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT, targets_BT = torch.randint(0, VOCAB, (2, rows, tokens), generator=generator)
    targets_BT[torch.rand(rows, tokens, generator=generator) < 0.4] = IGNORE_INDEX
    document_ids_BT = torch.ones(rows, tokens, dtype=torch.int32)
    document_ids_BT[:, tokens // 3:] = 2
    target_index_M = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten() if with_positions else None
    return Batch(tokens_BT, targets_BT, document_ids_BT, target_index_M)


def settings(**changes) -> Config:
    return Config(**{f"distillation_{name}": value for name, value in changes.items()})


def gradients(model: Transformer, total: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_positions", [True, False])
@pytest.mark.parametrize("chunk, cache_bytes", [(0, 2**20), (7, 2**20), (0, 4 * VOCAB * 3), (7, 1)])
def test_loss_and_gradients_are_those_of_all_logits(kind, with_positions, chunk, cache_bytes, monkeypatch):
    monkeypatch.setattr(objectives, "CACHE_BYTES", cache_bytes)
    student, teacher, batch = llama(1, head_chunk_tokens=chunk), llama(2), a_batch(with_positions)
    objective = Distillation(settings(loss=kind, weight=0.3, temperature=2.0, jsd_beta=0.3), Teacher(teacher))
    summed = objective.loss_sum(student, batch)
    actual = gradients(student, summed.total)

    logits, teacher_logits = (model(batch.tokens_BT, document_ids_BT=batch.document_ids_BT, mode="logits") for model in (student, teacher))
    counted = batch.targets_BT != IGNORE_INDEX
    part = plain_divergence(logits[counted], teacher_logits[counted], kind, 2.0, 0.3).sum()
    cross_entropy = F.cross_entropy(logits[counted], batch.targets_BT[counted], reduction="sum")
    plain = gradients(student, 0.3 * part + 0.7 * cross_entropy)

    assert objective.count(batch) == counted.sum()
    torch.testing.assert_close(summed.total.detach(), (0.3 * part + 0.7 * cross_entropy).detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summed.metrics["divergence"], part.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(summed.metrics["cross_entropy"], cross_entropy.detach(), rtol=1e-5, atol=1e-5)
    assert not any(value.requires_grad for value in summed.metrics.values())
    with torch.no_grad():
        assert torch.equal(objective.loss_sum(student, batch).total, summed.total), "validation gives the same"
        by_item = objective.by_item(student, batch, "chats")
    assert by_item.total.shape == (3, 3) and not by_item.total[:, 0].any(), "two documents a row, and none with number 0"
    second, numbers = student(batch.tokens_BT, document_ids_BT=batch.document_ids_BT, mode="logits")[1], batch.document_ids_BT[1]
    here = counted[1] & (numbers == 2)
    expected = F.cross_entropy(second[here], batch.targets_BT[1, here], reduction="sum")
    torch.testing.assert_close(by_item.metrics["cross_entropy"][1, 2], expected.detach(), rtol=1e-5, atol=1e-5, check_dtype=False)
    for ours_B, total in ((by_item.total, summed.total), *((by_item.metrics[name], value) for name, value in summed.metrics.items())):
        torch.testing.assert_close(ours_B.sum(), total.detach(), rtol=1e-5, atol=1e-5, check_dtype=False)
    for name, gradient in plain.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_a_batch_without_any_target_gives_zero_and_gradients():
    student, batch = llama(1), a_batch(True)
    nothing = a_batch(True).ignore_from(0)
    nothing = replace(nothing, target_index_M=torch.zeros(0, dtype=torch.long))
    objective = Distillation(settings(), Teacher(llama(2)))
    with torch.no_grad():
        assert not objective.by_item(student, nothing, "rows").total.any()
    for positions in (torch.zeros(0, dtype=torch.long), None):
        empty = Batch(batch.tokens_BT, torch.full_like(batch.targets_BT, IGNORE_INDEX), batch.document_ids_BT, positions)
        summed = Distillation(settings(), Teacher(llama(2))).loss_sum(student, empty)
        assert summed.total.item() == 0 and all(float(value) == 0 for value in summed.metrics.values())
        assert all(gradient.abs().max() == 0 for gradient in gradients(student, summed.total).values())
