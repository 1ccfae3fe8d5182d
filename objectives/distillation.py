"""Learning from a teacher's distribution: divergences over logits, and the objective that mixes one with cross-entropy.

Shapes: B rows, T tokens, M positions with a target, V vocabulary, K tokens whose probability a stored teacher keeps.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Optional, Protocol

import torch
from torch import Tensor, nn

from config import DistillationConfig
from fused.chunked_head import IGNORE_INDEX, LOWEST_LOGPROB, add_at, slices
from objectives.base import LossSum

CACHE_BYTES = 2**19  # of logits that are worked on at a time on a CPU, where memory is slower than arithmetic


class Teacher(Protocol):
    """What the objective asks of a teacher that runs along."""

    def logits(self, batch) -> Callable[[slice], Tensor]:
        """Read a batch; a function from a slice of its target positions to their (M, V) float32 logits."""


def divergence(student_logits_MV: Tensor, teacher_logits_MV: Tensor, kind: str, temperature: float = 1.0,
               jsd_beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """The divergence of two softened distributions times temperature squared, and its gradient to the student's logits.

    With teacher p and student q, "forward_kl" is KL(p || q), "reverse_kl" KL(q || p), and "jsd" is
    beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    Returns:
        (M,) and (M, V) float32, in nats.
    Source: Hinton et al. 2015 (arXiv:1503.02531), section 2; Agarwal et al. 2023 (arXiv:2306.13649), equation 1.
    """
    student_MV, teacher_MV = (softened_logprobs(logits, temperature) for logits in (student_logits_MV, teacher_logits_MV))
    if kind == "forward_kl":
        p_MV = teacher_MV.exp()
        value_M = teacher_MV.sub_(student_MV).mul_(p_MV).sum(dim=-1)
        gradient_MV = student_MV.exp_().sub_(p_MV)
    elif kind == "reverse_kl":
        value_M, gradient_MV = _weighed_by_student(student_MV, student_MV - teacher_MV)
    else:
        assert kind == "jsd", kind
        mixture_MV = torch.logaddexp(student_MV + math.log1p(-jsd_beta), teacher_MV + math.log(jsd_beta))
        value_M, gradient_MV = _weighed_by_student(student_MV, student_MV - mixture_MV)
        teacher_part_M = teacher_MV.sub(mixture_MV).mul_(teacher_MV.exp_()).sum(dim=-1)
        value_M = jsd_beta * teacher_part_M + (1 - jsd_beta) * value_M
        gradient_MV.mul_(1 - jsd_beta)  # the rest cancels: a mixture's own part of the derivative sums to zero
    return value_M * temperature**2, gradient_MV.mul_(temperature)


def softened_logprobs(logits_MV: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at a temperature, float32, in memory of their own."""
    return torch.log_softmax(logits_MV if temperature == 1 else logits_MV / temperature, dim=-1, dtype=torch.float32)


def _weighed_by_student(student_MV: Tensor, ratio_MV: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of log-ratios under the student, and the gradient of KL(student || ...) to its logits; consumes both."""
    q_MV = student_MV.exp()
    value_M = (q_MV * ratio_MV).sum(dim=-1)
    return value_M, ratio_MV.sub_(value_M[:, None]).mul_(q_MV)


def sparse_divergence(student_logits_MV: Tensor, teacher_ids_MK: Tensor, teacher_logprobs_MC: Tensor, kind: str,
                      temperature: float = 1.0, jsd_beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """The same over C = K + 1 classes: the teacher's K likeliest tokens, and all others together as one.

    The others' share of probability is learned exactly, and within it nothing pulls: there the student's own
    proportions stand for the teacher's, which were not kept. Renormalising the K instead would teach that all others are
    impossible. Source: Anshumann et al. 2025 (arXiv:2503.16870).

    Args:
        teacher_ids_MK: int64, different ids in each row.
        teacher_logprobs_MC: the teacher's at this temperature, the others' sum last; LOWEST_LOGPROB or more.
    """
    scaled_MV = student_logits_MV / temperature
    kept_MK = scaled_MV.gather(1, teacher_ids_MK)
    highest_M1 = scaled_MV.scatter_(1, teacher_ids_MK, -torch.inf).amax(dim=-1, keepdim=True).clamp(min=LOWEST_LOGPROB)
    exp_MV = scaled_MV.sub_(highest_M1).exp_()
    sum_M1 = exp_MV.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)  # where none is left
    classes_MC = torch.cat([kept_MK, sum_M1.log() + highest_M1], dim=1)
    value_M, gradient_MC = divergence(classes_MC, teacher_logprobs_MC, kind, 1.0, jsd_beta)
    gradient_MV = exp_MV.mul_(temperature * gradient_MC[:, -1:] / sum_M1)
    gradient_MV.scatter_(1, teacher_ids_MK, temperature * gradient_MC[:, :-1])
    return value_M * temperature**2, gradient_MV


class MixedLoss(NamedTuple):
    """Sums over positions, and the gradient of the weighted sum to their logits."""

    gradient_MV: Tensor
    divergence: Tensor
    cross_entropy: Tensor


def mixed_loss(logits_MV: Tensor, targets_M: Tensor, teacher: tuple[Tensor, ...], weight: float, kind: str, temperature: float,
               jsd_beta: float) -> MixedLoss:
    """`weight` times the divergence and (1 - weight) times the cross-entropy, where there is a target.

    Args:
        teacher: its (M, V) logits; or of a stored one the ids (M, K) and the log-probabilities (M, K + 1).
    """
    compare = divergence if len(teacher) == 1 else sparse_divergence
    divergence_M, gradient_MV = compare(logits_MV, *teacher, kind, temperature, jsd_beta)
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


def block_rows(logits_MV: Tensor) -> int:
    """How many positions are worked on at a time."""
    rows = len(logits_MV) if logits_MV.device.type != "cpu" else CACHE_BYTES // (4 * logits_MV.shape[1])
    return max(1, rows)


class Distillation:
    """DISTILLATION_WEIGHT of the divergence from the teacher, and cross-entropy for the rest, in nats per target.

    Reported are both parts, unweighted; the divergence carries the factor temperature squared.

    Args:
        teacher: runs along; None where the batches bring `stored` what it said, as teachers.StoredTeacherRows gives them.
        compiled: compile what is computed over the vocabulary; on a GPU, a CPU gains nothing.
    """

    def __init__(self, config: DistillationConfig, teacher: Optional[Teacher] = None, compiled: bool = False):
        self.config, self.teacher = config, teacher
        self.mixed_loss = torch.compile(mixed_loss) if compiled else mixed_loss

    def count(self, batch) -> Tensor:
        """How many targets the batch holds."""
        return (batch.targets_BT != IGNORE_INDEX).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        """The mixed loss summed over the targets."""
        config, target_index_M = self.config, batch.target_index_M
        told = self.told(batch)
        targets_M = batch.targets_BT.flatten()
        targets_M = targets_M if target_index_M is None else targets_M[target_index_M]
        sums = {name: torch.zeros((), device=targets_M.device) for name in ("divergence", "cross_entropy")}

        def loss(logits_MV: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            chunk_targets_M, chunk_told = targets_M[part], told(part)
            total = torch.zeros_like(sums["divergence"])
            for block in slices(len(logits_MV), block_rows(logits_MV)):
                mixed = self.mixed_loss(logits_MV[block], chunk_targets_M[block], tuple(tensor[block] for tensor in chunk_told),
                                        config.distillation_weight, config.distillation_loss, config.distillation_temperature,
                                        config.distillation_jsd_beta)
                logits_MV[block] = mixed.gradient_MV  # nobody reads these logits again
                sums["divergence"] += mixed.divergence
                sums["cross_entropy"] += mixed.cross_entropy
                total += config.distillation_weight * mixed.divergence + (1 - config.distillation_weight) * mixed.cross_entropy
            return total, logits_MV

        total = model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT, target_index_M=target_index_M, reduction=loss)
        return LossSum(total, sums)

    def told(self, batch) -> Callable[[slice], tuple[Tensor, ...]]:
        """A function from a slice of the target positions to what `mixed_loss` takes of the teacher there."""
        if self.teacher is not None:
            logits = self.teacher.logits(batch)
            return lambda part: (logits(part),)
        ids_MK, logprobs_MC = (batch.stored[name].flatten(0, 1) for name in ("teacher_ids", "teacher_logprobs"))
        if batch.target_index_M is not None:
            ids_MK, logprobs_MC = ids_MK[batch.target_index_M], logprobs_MC[batch.target_index_M]
        return lambda part: (ids_MK[part].long(), logprobs_MC[part].float())
