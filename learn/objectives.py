"""Training objectives: cross-entropy, losses over preference pairs, and distillation.

Objectives know nothing of ranks, files or clocks. Shapes: B rows, T tokens, P pairs of a row (padded),
2 = chosen and rejected; M positions with a target, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Optional, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.activity import tick
from config import Config, DistillationConfig, PreferenceConfig
from model_kernels.attention import SHARED_PREFIX
from model_kernels.head import IGNORE_INDEX, add_at, slices, with_any_rows
from parallel.ranks import widened

CACHE_BYTES = 2**19  # block of logits on a CPU, where memory is slower than arithmetic
# From a batch to the (B, P, 2) log-probabilities of the reference model, without a graph.
Reference = Callable[..., Tensor]
# (B, P) losses, and (B, P) metrics by name; their means are logged.
PairLoss = tuple[Tensor, dict[str, Tensor]]


class LossSum(NamedTuple):
    """A sum of losses with its autograd graph, and sums of metrics without one."""

    total: Tensor
    metrics: dict[str, Tensor]


class Prepared(NamedTuple):
    """The batches to train on in a step, instead of those that were read."""

    batches: list
    count: int  # units in them
    metrics: dict[str, float]  # over all ranks


class Objective(Protocol):
    """Interface of objectives: the mean of a loss over units (targets, preference pairs or answers).

    An objective returns sums, which must be additive over rows. The training loop divides them by the number
    of units in all micro-batches of all ranks. It may also have `prepare_step(batches, step) -> Prepared`,
    which the loop then calls before each step, and `take_step` in place of that of train.py.
    """

    def count(self, batch) -> Tensor:
        """Return the number of units in a batch as an integer tensor; the batch may be on the CPU."""

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        """Return the loss summed over these units."""

    def by_item(self, model: nn.Module, batch, items: str) -> LossSum:
        """Return the sums of `loss_sum` for each item of `sums_by_item`: (B, I), without a graph."""

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        """Return the (B, T) targets on which models are compared, and their summed cross-entropy in nats,
        given the result of `loss_sum` or `by_item`."""


def sums_by_item(values_BT: Tensor, batch, items: str) -> Tensor:
    """Return the (B, I) sums over the tokens of each "rows", "chats" (documents of a row) or "pairs".

    Rows with fewer items are filled with sums of no targets.
    """
    if items == "rows":
        return widened(values_BT).sum(dim=1, keepdim=True)
    if items == "pairs":
        return sums_by_pair(values_BT, batch.document_ids_BT).sum(dim=-1)
    return sums_by_document(widened(values_BT), batch.document_ids_BT)


def sums_by_document(values_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    """Return the (B, 1 + documents) sums over the tokens of each document of a row; none has number 0.

    The document ids are on the CPU, so that their number is known without a GPU sync.
    """
    # Move first, then widen: the copy of pinned memory is asynchronous.
    index_BT = document_ids_BT.to(values_BT.device, non_blocking=values_BT.is_cuda).long()
    sums = values_BT.new_zeros(len(values_BT), int(document_ids_BT.max()) + 1)
    return sums.scatter_add(1, index_BT, values_BT)


class NextToken:
    """Cross-entropy of the next token in nats; in SFT, only the assistant's tokens are targets."""

    def count(self, batch) -> Tensor:
        return (batch.targets_BT != IGNORE_INDEX).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        return LossSum(-token_logprobs(model, batch, "sum"), {})

    def by_item(self, model: nn.Module, batch, items: str) -> LossSum:
        return LossSum(-sums_by_item(token_logprobs(model, batch, "each"), batch, items), {})

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        return batch.targets_BT, summed.total


# -------------------------------------------------------------------------------------- preference pairs


def sums_by_pair(values_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    """Return (B, P, 2) float32 sums over the tokens of each answer; pair j is the documents 2j - 1 and 2j."""
    sums = sums_by_document(values_BT.float(), document_ids_BT)
    # The id of padding is the odd number after the last pair.
    return sums[:, 1:(sums.shape[1] - 1) // 2 * 2 + 1].unflatten(1, (-1, 2))


def pair_logprobs(model: nn.Module, batch) -> Tensor:
    """Return the (B, P, 2) log-probabilities of each pair's answers in nats, from one forward.

    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290).
    """
    # A compiler wants rows of one length, no kernel of a GPU is fast with shared prefixes, and one side of
    # KTO's pairs is missing. A traced step has no values.
    has_values_here = type(batch.tokens_BT) is Tensor and batch.tokens_BT.device.type == "cpu"
    is_compiled = any(each._compiled_call_impl for each in model.modules())
    if has_values_here and "label_BP" not in batch.stored and not is_compiled:
        batch = share_prompts(batch)
    return sums_by_pair(token_logprobs(model, batch), batch.document_ids_BT)


def share_prompts(batch):
    """Return rows with each prompt once, as a SHARED_PREFIX of both answers, which begin with its last token.

    If a prompt has no other token, return the batch.
    """
    document_BT, is_target_BT = batch.document_ids_BT, batch.targets_BT != IGNORE_INDEX
    if (F.pad(document_BT.diff(dim=1) != 0, (1, 0), value=True) & is_target_BT).any():
        return batch
    last_B1, padding = document_BT.amax(dim=1, keepdim=True), int(document_BT.max()) | 1
    is_second_BT = document_BT % 2 == 0  # the last document is padding unless its number is even
    is_left_out_BT = ~is_target_BT & (is_second_BT | (document_BT == last_B1))
    document_BT = document_BT.where(is_target_BT, SHARED_PREFIX)
    document_BT[is_left_out_BT] = padding
    length = -(-int((~is_left_out_BT).sum(dim=1).max()) // 64) * 64
    order_BT = is_left_out_BT.byte().argsort(dim=1, stable=True)[:, :length]
    tokens_BT, targets_BT, document_BT = (
        each.gather(1, order_BT) for each in (batch.tokens_BT, batch.targets_BT, document_BT))
    return replace(batch, tokens_BT=tokens_BT, targets_BT=targets_BT, document_ids_BT=document_BT,
                   target_index_M=(targets_BT != IGNORE_INDEX).flatten().nonzero().flatten())


def token_logprobs(model: nn.Module, batch, mode: str = "logprobs") -> Tensor:
    """Return the (B, T) log-probabilities of the targets in nats."""
    return model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT,
                 target_index_M=batch.target_index_M, mode=mode)


@torch.no_grad()
def frozen_logprobs(model: nn.Module, batch, compute: Callable = pair_logprobs) -> Tensor:
    return compute(model, batch)


def stored_reference(batch) -> Tensor:
    """Return the reference's log-probabilities, computed before the run (`ReferencedRows`)."""
    return batch.stored["reference_BP2"]


def answer_lengths(batch) -> Tensor:
    """Return the (B, P, 2) number of targets of each pair's answers; 0 for padding, and what is left out."""
    lengths_BP2 = sums_by_pair(batch.targets_BT != IGNORE_INDEX, batch.document_ids_BT)
    kept_BP = batch.stored.get("kept_BP")
    return lengths_BP2 if kept_BP is None else lengths_BP2 * kept_BP[:, :lengths_BP2.shape[1], None]


def is_pair(length_BP2: Tensor) -> Tensor:
    return (length_BP2 > 0).all(dim=-1)


@dataclass(frozen=True)
class PairwiseObjective:
    """Base class of objectives that sum a loss over independent pairs.

    Subclasses define `pair_loss`, and set `needs_reference` if it compares with a reference model.

    Args:
        model: the trained model, for `prepare_step`.
        gather: returns the JSON-like values of all ranks, for `prepare_step`.
    """

    config: PreferenceConfig
    reference: Optional[Reference] = None
    model: Optional[nn.Module] = None
    gather: Callable[[list], list] = lambda values: [values]
    needs_reference: ClassVar[bool] = False

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        """Return the loss of each pair, and metrics. Padding has ordinary values; its results are ignored.

        Args:
            logprob_BP2: float32 log-probabilities of the answers in nats, summed over tokens.
            length_BP2: float32 token counts of the answers, at least 1.
            reference_BP2: the reference model's log-probabilities; None without `needs_reference`.
        """
        raise NotImplementedError

    def count(self, batch) -> Tensor:
        return is_pair(answer_lengths(batch)).sum()

    def loss_sum(self, model: nn.Module, batch) -> LossSum:
        loss_BP, metrics_BP = self.by_item(model, batch)
        return LossSum(loss_BP.sum(), {name: value_BP.sum() for name, value_BP in metrics_BP.items()})

    def by_item(self, model: nn.Module, batch, items: str = "pairs") -> LossSum:
        length_BP2 = answer_lengths(batch)
        is_pair_BP = is_pair(length_BP2)
        # Some losses have infinite gradients at log-probability 0, the value of padding.
        logprob_BP2 = torch.where(is_pair_BP[..., None], pair_logprobs(model, batch), -1)
        reference_BP2 = self.reference(batch)[:, :logprob_BP2.shape[1]] if self.needs_reference else None
        loss_BP, metrics_BP = self.pair_loss(logprob_BP2, length_BP2.clamp(min=1), reference_BP2)
        metrics_BP |= {"logprob_chosen": logprob_BP2[..., 0], "logprob_rejected": logprob_BP2[..., 1]}
        return LossSum(torch.where(is_pair_BP, loss_BP, 0), {
            name: torch.where(is_pair_BP, value.detach(), 0) for name, value in metrics_BP.items()})

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        is_chosen_BT = (batch.document_ids_BT % 2 == 1).to(batch.targets_BT.device)
        return batch.targets_BT.where(is_chosen_BT, IGNORE_INDEX), -summed.metrics["logprob_chosen"]


def reward_metrics(reward_BP2: Tensor, margin_BP: Tensor) -> dict[str, Tensor]:
    """Return the metrics of implicit rewards; the chosen answer wins if the margin is positive."""
    chosen_BP, rejected_BP = reward_BP2.unbind(dim=-1)
    return {"reward_margin": chosen_BP - rejected_BP, "reward_accuracy": (margin_BP > 0).float(),
            "reward_chosen": chosen_BP, "reward_rejected": rejected_BP}


class DPO(PairwiseObjective):
    """Direct preference optimization.

    The loss is DPO_LOSS of the margin between chosen and rejected answer relative to a reference, plus
    DPO_SFT_WEIGHT times the chosen answer's cross-entropy.
    Source: Rafailov et al. 2023, eq. 7 (arXiv:2305.18290); Azar et al. 2023, eq. 17 (arXiv:2310.12036) for
    ipo, which uses log-probabilities per token; Zhao et al. 2023 (arXiv:2305.10425) for hinge;
    Mitchell 2023 for smoothed labels.
    """

    needs_reference = True

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        c, ratio_BP2 = self.config, logprob_BP2 - reference_BP2
        score_BP2 = ratio_BP2 / length_BP2 if c.dpo_length_normalised or c.dpo_loss == "ipo" else ratio_BP2
        margin_BP = score_BP2[..., 0] - score_BP2[..., 1]
        scaled_BP = c.dpo_beta * margin_BP
        if c.dpo_loss == "ipo":
            loss_BP = (margin_BP - 1 / (2 * c.dpo_beta)).square()
        elif c.dpo_loss == "hinge":
            loss_BP = F.relu(1 - scaled_BP)
        else:
            smoothing = c.dpo_label_smoothing
            loss_BP = -(1 - smoothing) * F.logsigmoid(scaled_BP) - smoothing * F.logsigmoid(-scaled_BP)
        if c.dpo_sft_weight:
            loss_BP = loss_BP - c.dpo_sft_weight * logprob_BP2[..., 0] / length_BP2[..., 0]
        return loss_BP, reward_metrics(c.dpo_beta * ratio_BP2, margin_BP)


class ORPO(PairwiseObjective):
    """Cross-entropy of the chosen answer, plus ORPO_LAMBDA times a loss of both answers' odds ratio.

    Probabilities are per token. Source: Hong et al. 2024, eq. 6 and 7 (arXiv:2403.07691).
    """

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        mean_BP2 = logprob_BP2 / length_BP2
        log_odds_BP2 = mean_BP2 - log1mexp(mean_BP2)
        ratio_BP = log_odds_BP2[..., 0] - log_odds_BP2[..., 1]
        nll_BP = -mean_BP2[..., 0]
        return nll_BP - self.config.orpo_lambda * F.logsigmoid(ratio_BP), {
            "log_odds_ratio": ratio_BP, "reward_accuracy": (ratio_BP > 0).float(), "nll_chosen": nll_BP}


class SimPO(PairwiseObjective):
    """Simple preference optimization: mean log-probabilities per token should differ by SIMPO_GAMMA.

    Source: Meng et al. 2024, eq. 6 (arXiv:2405.14734).
    """

    def pair_loss(self, logprob_BP2: Tensor, length_BP2: Tensor, reference_BP2: Optional[Tensor]) -> PairLoss:
        reward_BP2 = self.config.simpo_beta * logprob_BP2 / length_BP2
        margin_BP = reward_BP2[..., 0] - reward_BP2[..., 1]
        return -F.logsigmoid(margin_BP - self.config.simpo_gamma), reward_metrics(reward_BP2, margin_BP)


class KTO(PairwiseObjective):
    """Kahneman-Tversky optimization: each answer is good or bad, compared with a reference point.

    The reference point is the divergence from the reference, at least 0, estimated from the answers of other
    records in the rows: of all ranks' micro-batches of a step, and elsewhere of the batch.
    `batch.stored["label_BP"]` is described in `ExampleRows`.
    Source: Ethayarajh et al. 2024, eq. 7 and 8 (arXiv:2402.01306).
    """

    needs_reference = True

    @torch.no_grad()
    def prepare_step(self, batches: list, step: int) -> Prepared:
        sums = []
        for batch in batches:
            tick()
            batch.stored["reference_BP2"] = self.reference(batch)
            # The point needs only the other answers, and the loss only the own ones.
            _, gain_BP2 = self.gains(self.model.eval(), self.only(batch, -1))
            is_pair_BP = is_pair(answer_lengths(batch))
            sums.append(torch.stack([widened(gain_BP2[..., 1] * is_pair_BP).sum(), is_pair_BP.sum()]))
        sums = torch.stack(sums).tolist()
        # Summed exactly, so that the point does not depend on the ranks.
        total, count = map(math.fsum, zip(*(each for rank in self.gather(sums) for each in rank)))
        for batch in batches:
            point = max(total / max(count, 1), 0.0)  # NaN stays
            batch.stored["point_B1"] = torch.full_like(batch.stored["reference_BP2"][:, :1, 0], point)
        trained = [self.only(batch, 1) for batch in batches]
        return Prepared(trained, round(sum(pairs for _, pairs in sums)), {})

    def side(self, batch) -> Tensor:
        """Return (B, T), on the CPU: 1 for tokens of a record's own answer, -1 of the other, 0 of padding."""
        document_BT, label_BP = batch.document_ids_BT.long() - 1, (batch.host or batch).stored["label_BP"]
        label_BT = F.pad(label_BP, (0, 1)).gather(1, document_BT // 2)
        return torch.where(document_BT % 2 == 0, label_BT, -label_BT)

    def only(self, batch, side: int):
        """Return a batch of the tokens of one side, in shorter rows unless a compiler wants equal shapes."""
        host = batch.host or batch  # the device is not asked, which would wait for it
        is_kept_BT, last = self.side(host) == side, int(host.document_ids_BT.max())
        length = is_kept_BT.shape[1] if self.config.compile else int(is_kept_BT.sum(dim=1).max()) + 1
        order_BT = (~is_kept_BT).int().argsort(dim=1, stable=True)[:, :length]
        is_kept_BT = is_kept_BT.gather(1, order_BT)
        # The odd number after the last pair is that of padding.
        document_ids_BT = host.document_ids_BT.gather(1, order_BT).where(is_kept_BT, last // 2 * 2 + 1)
        targets_BT = host.targets_BT.gather(1, order_BT).where(is_kept_BT, IGNORE_INDEX)
        one_side = replace(
            host, tokens_BT=host.tokens_BT.gather(1, order_BT) * is_kept_BT, targets_BT=targets_BT,
            document_ids_BT=document_ids_BT, padding=int((~is_kept_BT).sum()),
            target_index_M=(targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten())
        if host is not batch:
            one_side = one_side.to(batch.tokens_BT.device)
        return replace(one_side, stored=batch.stored)

    def gains(self, model: nn.Module, batch) -> tuple[Tensor, Tensor]:
        """Return the (B, P, 2) log-probabilities of the own and the other answer, and their gains over the
        reference."""
        logprob_BP2, reference_BP2 = pair_logprobs(model, batch), batch.stored.get("reference_BP2")
        reference_BP2 = self.reference(batch) if reference_BP2 is None else reference_BP2
        gain_BP2 = logprob_BP2 - reference_BP2[:, :logprob_BP2.shape[1]]
        return self.own_first(batch, logprob_BP2), self.own_first(batch, gain_BP2)

    def own_first(self, batch, values_BP2: Tensor) -> Tensor:
        is_good_BP1 = batch.stored["label_BP"][:, :values_BP2.shape[1], None] > 0
        return torch.where(is_good_BP1, values_BP2, values_BP2.flip(-1))

    def by_item(self, model: nn.Module, batch, items: str = "pairs") -> LossSum:
        c, (logprob_BP2, gain_BP2) = self.config, self.gains(model, batch)
        gain_BP, other_BP = gain_BP2.unbind(dim=-1)
        is_pair_BP = self.own_first(batch, answer_lengths(batch))[..., 0] > 0
        label_BP = batch.stored["label_BP"][:, :gain_BP.shape[1]]
        point_B1 = batch.stored.get("point_B1")
        if point_B1 is None:
            mean = (other_BP.detach() * is_pair_BP).sum() / is_pair_BP.sum().clamp(min=1)
            point_B1 = mean.clamp(min=0).expand(len(label_BP), 1)
        weight_BP = torch.where(label_BP > 0, c.kto_desirable_weight, c.kto_undesirable_weight)
        above_BP = label_BP * (gain_BP - point_B1)
        metrics = {"kl": point_B1, "reward_accuracy": above_BP > 0, "logprob_answer": logprob_BP2[..., 0],
                   "reward_margin": c.dpo_beta * label_BP * gain_BP}
        return LossSum(weight_BP * torch.sigmoid(-c.dpo_beta * above_BP) * is_pair_BP, {
            name: value.detach() * is_pair_BP for name, value in metrics.items()})

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        is_own_BT = (self.side(batch) > 0).to(batch.targets_BT.device)
        return batch.targets_BT.where(is_own_BT, IGNORE_INDEX), -summed.metrics["logprob_answer"]


def log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, accurate at both ends.

    Source: Mächler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    x = x.clamp(max=-1e-7)  # a certain answer has infinite odds
    small = x > -math.log(2)
    return torch.where(small, (-torch.expm1(torch.where(small, x, -1))).log(),
                       torch.log1p(-torch.where(small, -1, x).exp()))


# By PREFERENCE_OBJECTIVE.
PREFERENCE_OBJECTIVES: dict[str, type[PairwiseObjective]] = {
    "dpo": DPO, "orpo": ORPO, "simpo": SimPO, "kto": KTO}
ONLINE: dict[str, Callable] = {}  # of an extension: "rollouts", which answers prompts, and the objectives


def reference_is_live(config: Config) -> bool:
    """Return whether a reference model, or the base under the adapters, runs in each step."""
    if config.training_stage == "grpo":
        return config.grpo_beta > 0 and not config.distillation_enabled
    return (config.training_stage == "dpo" and config.preference_objective in ("dpo", "kto")
            and config.dpo_reference in (("live", "auto") if config.lora_enabled else ("live",)))


def reference_is_stored(config: Config) -> bool:
    """Return whether the run needs reference log-probabilities that are computed before it."""
    objective = PREFERENCE_OBJECTIVES[config.preference_objective]
    return config.training_stage == "dpo" and objective.needs_reference and not reference_is_live(config)


# ------------------------------------------------------------------------------------------ distillation


class Teacher(Protocol):
    """Interface of a teacher that runs in each step."""

    def logits(self, batch) -> Callable[[slice], Tensor]:
        """Run on a batch; return a function from a slice of its target positions to (M, V) float32 logits."""


def divergence(student_logits_MV: Tensor, teacher_logits_MV: Tensor, kind: str, temperature: float = 1.0,
               jsd_beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return the divergence of two softened distributions and its gradient to the student's logits.

    With teacher p and student q, "forward_kl" is KL(p || q), "reverse_kl" KL(q || p), and "jsd" is
    beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. Both results, (M,) and (M, V)
    float32 in nats, are multiplied by temperature squared.
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
        gradient_MV.mul_(1 - jsd_beta)  # the mixture's derivatives sum to zero
    return value_M * temperature**2, gradient_MV.mul_(temperature)


def softened_logprobs(logits_MV: Tensor, temperature: float) -> Tensor:
    """Return float32 log-probabilities at a temperature, in new memory."""
    scaled_MV = logits_MV if temperature == 1 else logits_MV / temperature
    return torch.log_softmax(scaled_MV, dim=-1, dtype=torch.float32)


def _expectation_under_student(student_MV: Tensor, ratio_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean log-ratio under the student, and KL's gradient to its logits, in `ratio_MV`."""
    q_MV = student_MV.exp()
    value_M = (q_MV * ratio_MV).sum(dim=-1)
    return value_M, ratio_MV.sub_(value_M[:, None]).mul_(q_MV)


class MixedLoss(NamedTuple):
    """The losses of positions, and the gradient of their weighted sum with respect to the logits."""

    gradient_MV: Tensor
    divergence_M: Tensor
    cross_entropy_M: Tensor


def mixed_loss(logits_MV: Tensor, targets_M: Tensor, teacher_logits_MV: Tensor, weight: float,
               settings: tuple[str, float, float]) -> MixedLoss:
    """Return `weight` times the divergence plus (1 - weight) times the cross-entropy, over all targets.

    `settings` are kind, temperature and jsd_beta of `divergence`.
    """
    divergence_M, gradient_MV = divergence(logits_MV, teacher_logits_MV, *settings)
    # Written out, so that value and gradient of the cross-entropy share its exponentials.
    counted_M = (targets_M != IGNORE_INDEX).float()
    index_M1 = targets_M.clamp(min=0)[:, None]
    highest_M1 = logits_MV.amax(dim=-1, keepdim=True)
    exp_MV = (logits_MV - highest_M1).exp_()
    sum_M1 = exp_MV.sum(dim=-1, keepdim=True)
    cross_entropy_M = (sum_M1.log() + highest_M1 - logits_MV.gather(1, index_M1))[:, 0]
    share_M1 = ((1 - weight) * counted_M)[:, None]
    gradient_MV.mul_((weight * counted_M)[:, None]).addcmul_(exp_MV, share_M1 / sum_M1)
    gradient_MV = add_at(gradient_MV, index_M1, -share_M1)
    return MixedLoss(gradient_MV, divergence_M * counted_M, cross_entropy_M * counted_M)


class Distillation(NextToken):
    """DISTILLATION_WEIGHT times the divergence from the teacher, plus the remaining share of cross-entropy.

    Both, in nats per target and without weights, are also metrics. `compiled` compiles the
    computation over the vocabulary, which is faster only on a GPU.
    """

    def __init__(self, config: DistillationConfig, teacher: Teacher, compiled: bool = False):
        self.config, self.teacher = config, teacher
        self.mixed_loss = torch.compile(mixed_loss) if compiled else mixed_loss

    def loss_sum(self, model: nn.Module, batch, blocks: Optional[list[MixedLoss]] = None) -> LossSum:
        """Return the sums, and append the losses of positions to `blocks`."""
        config, target_index_M = self.config, batch.target_index_M
        settings = config.distillation_loss, config.distillation_temperature, config.distillation_jsd_beta
        weight, targets_M = config.distillation_weight, batch.targets_BT.flatten()
        targets_M = targets_M if target_index_M is None else targets_M[target_index_M]
        logits_of = self.teacher.logits(batch)
        sums = {name: torch.zeros((), device=targets_M.device) for name in ("divergence", "cross_entropy")}

        def loss(logits_MV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
            """Return a chunk's loss, and its gradient, which on a CPU overwrites the logits."""
            teacher_MV, chunk_targets_M, rows = logits_of(chunk), targets_M[chunk], len(logits_MV)
            total = torch.zeros_like(sums["divergence"])
            if logits_MV.device.type == "cpu":
                rows = CACHE_BYTES // (4 * logits_MV.shape[1])
            gradient_MV = logits_MV
            for block in slices(len(logits_MV), max(1, rows)):
                inputs = with_any_rows(target_index_M is not None, logits_MV[block], chunk_targets_M[block],
                                       teacher_MV[block])
                mixed = self.mixed_loss(*inputs, weight, settings)
                if rows < len(logits_MV):
                    logits_MV[block] = mixed.gradient_MV
                else:
                    gradient_MV = mixed.gradient_MV  # a copy would take time
                each, entropy = mixed.divergence_M.sum(), mixed.cross_entropy_M.sum()
                sums["divergence"] += each
                sums["cross_entropy"] += entropy
                total += weight * each + (1 - weight) * entropy
                if blocks is not None:
                    blocks.append(mixed._replace(gradient_MV=None))
            return total, gradient_MV

        total = model(batch.tokens_BT, batch.targets_BT, batch.document_ids_BT, target_index_M=target_index_M,
                      mode=loss)
        return LossSum(total, sums)

    def by_item(self, model: nn.Module, batch, items: str) -> LossSum:
        weight, sums, blocks = self.config.distillation_weight, {}, []
        zeros = torch.zeros(batch.targets_BT.numel(), device=batch.targets_BT.device)
        for index, name in enumerate(self.loss_sum(model, batch, blocks).metrics, 1):
            values = torch.cat([zeros[:0], *(block[index] for block in blocks)])
            if batch.target_index_M is not None:
                values = zeros.index_put((batch.target_index_M,), values)
            sums[name] = sums_by_item(values.view_as(batch.targets_BT), batch, items)
        return LossSum(weight * sums["divergence"] + (1 - weight) * sums["cross_entropy"], sums)

    def text_loss(self, batch, summed: LossSum) -> tuple[Tensor, Tensor]:
        return batch.targets_BT, summed.metrics["cross_entropy"]
