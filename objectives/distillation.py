"""Distillation: divergences from a teacher's distribution, mixed with cross-entropy.

Shapes: B rows, T tokens, M positions with a target, V vocabulary, K tokens that a stored teacher keeps,
C = K + 1 with all others as one class.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Optional, Protocol

import torch
from torch import Tensor, nn

from config import DistillationConfig
from fused.chunked_head import IGNORE_INDEX, LOWEST_LOGPROB, add_at, slices
from objectives.base import LossSum

CACHE_BYTES = 2**19  # of logits that a CPU, where memory is slower than arithmetic, computes on at a time


class Teacher(Protocol):
    """A teacher that runs in each step."""

    def logits(self, batch) -> Callable[[slice], Tensor]:
        """Run on a batch; return a function from a slice of its target positions to (M, V) float32 logits."""


def divergence(student_logits_MV: Tensor, teacher_logits_MV: Tensor, kind: str, temperature: float = 1.0,
               jsd_beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return the divergence of two softened distributions times temperature squared, and its gradient with
    respect to the student's logits.

    With teacher p and student q, "forward_kl" is KL(p || q), "reverse_kl" KL(q || p), and "jsd" is
    beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    Returns:
        (M,) and (M, V) float32, in nats.
    Source: Hinton et al. 2015 (arXiv:1503.02531), section 2; Agarwal et al. 2023 (arXiv:2306.13649), eq. 1.
    """
    student_MV = softened_logprobs(student_logits_MV, temperature)
    teacher_MV = softened_logprobs(teacher_logits_MV, temperature)
    if kind == "forward_kl":
        p_MV = teacher_MV.exp()
        value_M = teacher_MV.sub_(student_MV).mul_(p_MV).sum(dim=-1)
        gradient_MV = student_MV.exp_().sub_(p_MV)
    elif kind == "reverse_kl":
        value_M, gradient_MV = _expectation_under_student(student_MV, student_MV - teacher_MV)
    else:
        assert kind == "jsd", kind
        mixture_MV = torch.logaddexp(student_MV + math.log1p(-jsd_beta), teacher_MV + math.log(jsd_beta))
        value_M, gradient_MV = _expectation_under_student(student_MV, student_MV - mixture_MV)
        teacher_part_M = teacher_MV.sub(mixture_MV).mul_(teacher_MV.exp_()).sum(dim=-1)
        value_M = jsd_beta * teacher_part_M + (1 - jsd_beta) * value_M
        gradient_MV.mul_(1 - jsd_beta)  # the rest cancels: the mixture's part of the derivative sums to zero
    return value_M * temperature**2, gradient_MV.mul_(temperature)


def softened_logprobs(logits_MV: Tensor, temperature: float) -> Tensor:
    """Return new float32 log-probabilities at a temperature."""
    scaled_MV = logits_MV if temperature == 1 else logits_MV / temperature
    return torch.log_softmax(scaled_MV, dim=-1, dtype=torch.float32)


def _expectation_under_student(student_MV: Tensor, ratio_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of log-ratios under the student, and the gradient of KL(student || ...) with respect to
    its logits; overwrites `ratio_MV`.
    """
    q_MV = student_MV.exp()
    value_M = (q_MV * ratio_MV).sum(dim=-1)
    return value_M, ratio_MV.sub_(value_M[:, None]).mul_(q_MV)


def sparse_divergence(student_logits_MV: Tensor, teacher_ids_MK: Tensor, teacher_logprobs_MC: Tensor,
                      kind: str, temperature: float = 1.0, jsd_beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return the same as `divergence` over C = K + 1 classes: the teacher's K most likely tokens, and all
    others together.

    The student learns the total probability of the others exactly, and keeps its own proportions within them.
    Renormalizing the K tokens instead would teach that all others are impossible.

    Args:
        teacher_ids_MK: int64, different ids in each row.
        teacher_logprobs_MC: at this temperature, that of the others last; at least LOWEST_LOGPROB.
    Source: Anshumann et al. 2025 (arXiv:2503.16870).
    """
    scaled_MV = student_logits_MV / temperature
    kept_MK = scaled_MV.gather(1, teacher_ids_MK)
    # A log-sum-exp over the others, in place: the kept logits become -inf, and their exponentials 0.
    highest_M1 = scaled_MV.scatter_(1, teacher_ids_MK, -torch.inf).amax(dim=-1, keepdim=True)
    highest_M1 = highest_M1.clamp(min=LOWEST_LOGPROB)
    exp_MV = scaled_MV.sub_(highest_M1).exp_()
    sum_M1 = exp_MV.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)  # if there are none
    classes_MC = torch.cat([kept_MK, sum_M1.log() + highest_M1], dim=1)
    value_M, gradient_MC = divergence(classes_MC, teacher_logprobs_MC, kind, 1.0, jsd_beta)
    gradient_MV = exp_MV.mul_(temperature * gradient_MC[:, -1:] / sum_M1)
    gradient_MV.scatter_(1, teacher_ids_MK, temperature * gradient_MC[:, :-1])
    return value_M * temperature**2, gradient_MV


class MixedLoss(NamedTuple):
    """Sums over positions, and the gradient of the weighted sum with respect to the logits."""

    gradient_MV: Tensor
    divergence: Tensor
    cross_entropy: Tensor


def mixed_loss(logits_MV: Tensor, targets_M: Tensor, teacher: tuple[Tensor, ...], weight: float,
               settings: tuple[str, float, float]) -> MixedLoss:
    """Return `weight` times the divergence plus (1 - weight) times the cross-entropy, over all targets.

    Args:
        teacher: its (M, V) logits; or, of a stored one, ids (M, K) and log-probabilities (M, C).
        settings: kind, temperature and jsd_beta of `divergence`.
    """
    compare = divergence if len(teacher) == 1 else sparse_divergence
    divergence_M, gradient_MV = compare(logits_MV, *teacher, *settings)
    # Cross-entropy by hand, so that its exponentials are computed once for value and gradient.
    counted_M = (targets_M != IGNORE_INDEX).float()
    index_M1 = targets_M.clamp(min=0)[:, None]
    highest_M1 = logits_MV.amax(dim=-1, keepdim=True)
    exp_MV = (logits_MV - highest_M1).exp_()
    sum_M1 = exp_MV.sum(dim=-1, keepdim=True)
    cross_entropy_M = (sum_M1.log() + highest_M1 - logits_MV.gather(1, index_M1))[:, 0]
    share_M1 = ((1 - weight) * counted_M)[:, None]
    gradient_MV.mul_((weight * counted_M)[:, None]).addcmul_(exp_MV, share_M1 / sum_M1)
    gradient_MV = add_at(gradient_MV, index_M1, -share_M1)
    return MixedLoss(gradient_MV, (divergence_M * counted_M).sum(), (cross_entropy_M * counted_M).sum())


class Distillation:
    """DISTILLATION_WEIGHT times the divergence from the teacher, and cross-entropy with the remaining weight.

    Both are in nats per target, and are the metrics too, without their weights.

    Args:
        teacher: runs in each step; None if the batches contain its stored outputs (`StoredTeacherRows`).
        compiled: compile the computation over the vocabulary, which is faster on a GPU only.
    """

    def __init__(self, config: DistillationConfig, teacher: Optional[Teacher] = None, compiled: bool = False):
        self.config, self.teacher = config, teacher
        self.mixed_loss = torch.compile(mixed_loss) if compiled else mixed_loss

    def count(self, batch) -> Tensor:
        """Return the number of targets."""
        return (batch.targets_BT != IGNORE_INDEX).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        """Return the mixed loss summed over the targets."""
        config, target_index_M = self.config, batch.target_index_M
        settings = config.distillation_loss, config.distillation_temperature, config.distillation_jsd_beta
        weight, teacher_of = config.distillation_weight, self._teacher_outputs(batch)
        targets_M = batch.targets_BT.flatten()
        targets_M = targets_M if target_index_M is None else targets_M[target_index_M]
        sums = {name: torch.zeros((), device=targets_M.device) for name in ("divergence", "cross_entropy")}

        # For each chunk of the head: the loss, and its gradient written over the logits, block by block.
        def loss(logits_MV: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            chunk_targets_M, chunk_teacher = targets_M[part], teacher_of(part)
            total, rows = torch.zeros_like(sums["divergence"]), len(logits_MV)
            if logits_MV.device.type == "cpu":
                rows = CACHE_BYTES // (4 * logits_MV.shape[1])
            for block in slices(len(logits_MV), max(1, rows)):
                mixed = self.mixed_loss(logits_MV[block], chunk_targets_M[block],
                                        tuple(tensor[block] for tensor in chunk_teacher), weight, settings)
                logits_MV[block] = mixed.gradient_MV
                sums["divergence"] += mixed.divergence
                sums["cross_entropy"] += mixed.cross_entropy
                total += weight * mixed.divergence + (1 - weight) * mixed.cross_entropy
            return total, logits_MV

        total = model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT, target_index_M=target_index_M,
                      reduction=loss)
        return LossSum(total, sums)

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        """Return all targets and the cross-entropy."""
        return batch.targets_BT, summed.metrics["cross_entropy"]

    def _teacher_outputs(self, batch) -> Callable[[slice], tuple[Tensor, ...]]:
        """Return a function from a slice of the target positions to the `teacher` of `mixed_loss` there."""
        if self.teacher is not None:
            logits = self.teacher.logits(batch)
            return lambda part: (logits(part),)
        ids_MK = batch.stored["teacher_ids"].flatten(0, 1)
        logprobs_MC = batch.stored["teacher_logprobs"].flatten(0, 1)
        if batch.target_index_M is not None:
            ids_MK, logprobs_MC = ids_MK[batch.target_index_M], logprobs_MC[batch.target_index_M]
        return lambda part: (ids_MK[part].long(), logprobs_MC[part].float())
