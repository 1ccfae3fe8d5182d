"""Training objectives: cross-entropy, and DPO for preference pairs.

Objectives know nothing of ranks, files or clocks. Shapes: B rows, T tokens, P pairs of a row (padded),
2 = chosen and rejected.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Optional, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from config import Config, PreferenceConfig
from model_kernels.attention import SHARED_PREFIX
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import widened

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


# By PREFERENCE_OBJECTIVE; extensions/preferences.py adds others.
PREFERENCE_OBJECTIVES: dict[str, type[PairwiseObjective]] = {"dpo": DPO}


def reference_is_live(config: Config) -> bool:
    """Return whether a reference model, or the base under the adapters, runs in each step."""
    if config.training_stage == "grpo":
        return config.grpo_beta > 0 and not config.distillation_enabled
    return (config.training_stage == "dpo" and config.preference_objective in ("dpo", "kto")
            and config.dpo_reference in (("live", "auto") if config.lora_enabled else ("live",)))


def reference_is_stored(config: Config) -> bool:
    """Return whether the run needs reference log-probabilities that are computed before it."""
    return (config.training_stage == "dpo" and config.preference_objective in ("dpo", "kto")
            and not reference_is_live(config))
