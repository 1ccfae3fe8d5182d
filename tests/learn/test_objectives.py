"""Every objective compared with a naive loop and with TRL, and the invariants of any objective."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import in_transformers, new_model
from torch.nn import functional as F

from checkpoint.huggingface import to_huggingface
from checkpoint.tensors import read_all
from config import Config, ModelConfig, PreferenceConfig
from dataloaders import Batch
from extensions.preferences import KTO, ORPO, SimPO, log1mexp
from learn.objectives import (
    DPO,
    NextToken,
    frozen_logprobs,
    pair_logprobs,
    share_prompts,
)
from model import Transformer
from model_kernels import head
from model_kernels.attention import SHARED_PREFIX
from model_kernels.head import IGNORE_INDEX

VOCAB, T = 61, 24
CONFIG = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, init_std=0.2, attention_backend="sdpa")  # rounds as theirs does


def model_of(seed: int) -> Transformer:
    return new_model(CONFIG, VOCAB, seed)


def model_that_knows(batch: Batch) -> Transformer:
    """A model that gives the targets of a batch probabilities far from 0, where odds differ from probabilities."""
    model, objective = model_of(0), NextToken()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(15):
        optimizer.zero_grad()
        (objective.loss_sum(model, batch).total / objective.count(batch)).backward()
        optimizer.step()
    return model


def chat_rows(seed: int, rows: int = 4) -> Batch:
    """Packed rows: documents of several lengths whose second halves are targets; the last row has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT, targets_BT = torch.randint(0, VOCAB, (2, rows, T), generator=generator)
    document_ids_BT = (torch.arange(T)[None] // torch.arange(5, 5 + rows)[:, None] + 1).int()
    for row in range(rows):
        targets_BT[row, :5 * row] = IGNORE_INDEX
    targets_BT[-1] = IGNORE_INDEX
    return with_positions(Batch(tokens_BT, targets_BT, document_ids_BT))


def pair_rows(seed: int, pairs_of_row=(2, 1, 1)) -> Batch:
    """Packed rows of pairs: prompt + chosen, prompt + rejected; the rest is padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(pairs_of_row)
    tokens_BT = torch.zeros(rows, T, dtype=torch.int64)
    targets_BT = torch.full((rows, T), IGNORE_INDEX)
    document_ids_BT = torch.zeros(rows, T, dtype=torch.int32)
    for row, pairs in enumerate(pairs_of_row):
        end = 0
        for pair in range(pairs):
            prompt = torch.randint(0, VOCAB, (2 + pair,), generator=generator)
            for answer in range(2):
                ids = torch.cat([prompt, torch.randint(0, VOCAB, (1 + answer + row,), generator=generator)])
                place = slice(end, end + len(ids) - 1)
                tokens_BT[row, place], document_ids_BT[row, place] = ids[:-1], 2 * pair + answer + 1
                targets_BT[row, place][len(prompt) - 1:] = ids[len(prompt):]
                end = place.stop
        document_ids_BT[row, end:] = 2 * pairs + 1
    return with_positions(Batch(tokens_BT, targets_BT, document_ids_BT))


def with_positions(batch: Batch) -> Batch:
    target_index_M = (batch.targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
    return replace(batch, target_index_M=target_index_M)


def unpaired_rows(seed: int, point: float | None = 0.2) -> Batch:
    """The same rows as unpaired answers, the first of which is good, with a reference point."""
    batch, labels = pair_rows(seed), torch.tensor([[1, -1], [-1, 0], [1, 0]], dtype=torch.int8)
    return replace(batch, stored={"label_BP": labels} | ({} if point is None else {"point_B1": torch.full((3, 1), point)}))


def kto(**settings) -> KTO:
    return KTO(PreferenceConfig(**settings), partial(frozen_logprobs, model_of(99)))


def dpo(**settings) -> DPO:
    return DPO(PreferenceConfig(**settings), partial(frozen_logprobs, model_of(99)))


MODES = {
    "next token": (lambda: NextToken(), chat_rows),
    "dpo": (dpo, pair_rows),
    "dpo, all options": (lambda: dpo(dpo_label_smoothing=0.2, dpo_length_normalised=True, dpo_sft_weight=0.3), pair_rows),
    "ipo": (lambda: dpo(dpo_loss="ipo"), pair_rows),
    "hinge": (lambda: dpo(dpo_loss="hinge"), pair_rows),
    "orpo": (lambda: ORPO(PreferenceConfig()), pair_rows),
    "simpo": (lambda: SimPO(PreferenceConfig()), pair_rows),
    "kto": (lambda: kto(kto_desirable_weight=0.7, kto_undesirable_weight=1.3), unpaired_rows),
}
modes = pytest.mark.parametrize("mode", MODES)


def gradients(objective, batches, seed=0):
    """Return the sums of loss and count over batches, and the gradients of the loss sum."""
    model = model_of(seed)
    total = count = 0
    for batch in batches:
        loss = objective.loss_sum(model, batch).total
        loss.backward()
        total, count = total + float(loss.detach()), count + int(objective.count(batch))
    return total, count, [parameter.grad for parameter in model.parameters()]


def rows_of(batch: Batch, rows) -> Batch:
    return with_positions(Batch(batch.tokens_BT[rows], batch.targets_BT[rows], batch.document_ids_BT[rows],
                                stored={name: value[rows] for name, value in batch.stored.items()}))


def check_same(one, other) -> None:
    """Compare two results of `gradients`."""
    assert one[0] == pytest.approx(other[0], rel=1e-5) and one[1] == other[1]
    for actual, reference in zip(one[2], other[2]):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-5)


@modes
def test_sums_are_additive_over_splits_and_neither_row_order_nor_padding_changes_them(mode):
    objective, batch = MODES[mode][0](), MODES[mode][1](0)
    whole = gradients(objective, [batch])
    check_same(whole, gradients(objective, [rows_of(batch, [row]) for row in reversed(range(len(batch.tokens_BT)))]))
    assert whole[1] > 0
    more = Batch(F.pad(batch.tokens_BT, (0, 7), value=3), F.pad(batch.targets_BT, (0, 7), value=IGNORE_INDEX),
                 torch.cat([batch.document_ids_BT, batch.document_ids_BT[:, -1:].expand(-1, 7)], dim=1), stored=batch.stored)
    check_same(whole, gradients(objective, [with_positions(more)]))


@modes
def test_rows_that_are_padding_add_nothing(mode):
    objective, batch = MODES[mode][0](), MODES[mode][1](2)
    check_same(gradients(objective, [rows_of(batch, slice(0, 2))]), gradients(objective, [batch.ignore_from(2)]))
    total, count, grads = gradients(objective, [batch.ignore_from(0)])
    assert (total, count) == (0, 0)
    assert all(grad is not None and not grad.any() for grad in grads)


@modes
def test_the_head_runs_on_target_positions_only_and_gives_the_same(mode, monkeypatch):
    objective, batch = MODES[mode][0](), MODES[mode][1](4)
    everywhere = replace(batch, target_index_M=None)
    check_same(gradients(objective, [batch]), gradients(objective, [everywhere]))
    model, seen, linear = model_of(0), [], head.linear

    def counting(x, weight):
        if len(weight) == len(model.head_matrix.weight):
            seen.append(len(x))
        return linear(x, weight)

    monkeypatch.setattr(head, "linear", counting)
    objective.loss_sum(model, batch)
    assert set(seen) == {len(batch.target_index_M)}


@torch.no_grad()
def naive_logprobs(model, batch) -> list[list[tuple[float, int]]]:
    """Return (log-probability, length) of each document with targets, computed separately, row by row."""
    found = []
    for row in range(len(batch.tokens_BT)):
        of_row = []
        for document in range(1, int(batch.document_ids_BT[row].max()) + 1):
            here = batch.document_ids_BT[row] == document
            targets = batch.targets_BT[row][here]
            logits = model(batch.tokens_BT[row][here][None], mode="logits")[0].log_softmax(-1)
            if (targets != IGNORE_INDEX).any():
                values = [float(logits[place, target]) for place, target in enumerate(targets.tolist()) if target >= 0]
                of_row.append((sum(values), len(values)))
        found.append(of_row)
    return found


def test_next_token_is_the_cross_entropy_of_each_document_alone():
    batch, model = chat_rows(6), model_of(0)
    expected = -sum(value for row in naive_logprobs(model, batch) for value, _ in row)
    assert float(NextToken().loss_sum(model, batch).total.detach()) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_the_sums_by_item_add_up_to_the_loss(mode):
    objective, rows = MODES[mode][0](), MODES[mode][1](8)
    model, kinds = model_of(0), ("rows", "chats") if isinstance(objective, NextToken) else ("pairs",)
    summed = objective.loss_sum(model, rows)
    for kind in kinds:
        by_item = objective.by_item(model, rows, kind)
        for found, expected in ((by_item.total, summed.total), *((by_item.metrics[name], summed.metrics[name]) for name in summed.metrics)):
            assert found.ndim == 2 and float(found.double().sum()) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
    if isinstance(objective, NextToken):
        single = replace(rows, **{name: getattr(rows, name)[1:2] for name in ("tokens_BT", "targets_BT", "document_ids_BT")}, target_index_M=None)
        of_row, = objective.by_item(model, single, "chats").total
        assert len(of_row) > 2
        for number, total in enumerate(of_row.tolist()):
            only = single.targets_BT.where(single.document_ids_BT == number, IGNORE_INDEX)
            assert total == pytest.approx(float(objective.loss_sum(model, replace(single, targets_BT=only)).total), rel=1e-4, abs=1e-5)


def padded_pairs(batch: Batch):
    """Return the pairs as TRL expects them: chosen rows, then rejected rows, right-padded, and completion masks."""
    chosen, rejected = [], []
    for row in range(len(batch.tokens_BT)):
        for document in range(1, int(batch.document_ids_BT[row].max()) + 1):
            here = batch.document_ids_BT[row] == document
            tokens, targets = batch.tokens_BT[row][here], batch.targets_BT[row][here]
            if (targets == IGNORE_INDEX).all():
                continue
            ids = torch.cat([tokens, targets[-1:]])
            mask = torch.cat([torch.zeros(1, dtype=torch.int64), (targets != IGNORE_INDEX).long()])
            (chosen if document % 2 else rejected).append((ids, mask))
    both = chosen + rejected
    longest = max(len(ids) for ids, _ in both)
    return {"input_ids": torch.stack([F.pad(ids, (0, longest - len(ids))) for ids, _ in both]),
            "attention_mask": torch.stack([F.pad(torch.ones_like(ids), (0, longest - len(ids))) for ids, _ in both]),
            "completion_mask": torch.stack([F.pad(mask, (0, longest - len(mask))) for _, mask in both])}


class Fused(torch.nn.Module):
    """A Hugging Face model that returns log-probabilities of its labels, as TRL's patched forward does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.is_gradient_checkpointing = inner, False

    def forward(self, input_ids, attention_mask, labels, **_):
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1].log_softmax(-1)
        labels = labels[:, 1:]
        picked = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        zeros = torch.zeros_like(picked)
        return SimpleNamespace(log_probs=picked, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), loss=None)


def assert_same_gradients(model: Transformer, reference: torch.nn.Module, units: int = 1) -> None:
    """Compare the gradients of a sum over so many units with those of transformers' model of the mean."""
    actual = read_all(to_huggingface({name: each.grad / units for name, each in model.named_parameters()}, CONFIG, VOCAB))
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, rtol=1e-4, atol=1e-6)


TRL_LOSSES = {"sigmoid": {}, "hinge": {"dpo_loss": "hinge"}, "ipo": {"dpo_loss": "ipo"},
              "sigmoid_norm": {"dpo_length_normalised": True}}


def test_a_prompt_is_computed_once_for_both_answers():
    batch = pair_rows(9, (3, 1))
    shared = share_prompts(batch)
    prompts = (1 + 2 + 3, 1)  # without their last tokens
    counts = [(each.document_ids_BT < each.document_ids_BT.max(1, keepdim=True).values).sum(1) for each in (batch, shared)]
    assert (counts[0] - counts[1]).tolist() == [*prompts]
    assert (shared.document_ids_BT == SHARED_PREFIX).sum(1).tolist() == [*prompts]
    alone = replace(batch, tokens_BT=batch.tokens_BT[:, 1:], targets_BT=batch.targets_BT[:, 1:],
                    document_ids_BT=batch.document_ids_BT[:, 1:])
    assert share_prompts(alone) is alone, "the first prompt has one token, so that no prefix precedes its answers"


@pytest.mark.parametrize("loss_type", TRL_LOSSES)
def test_loss_and_gradient_equal_those_of_trl(loss_type, tmp_path):
    pytest.importorskip("trl")
    from trl import DPOTrainer

    batch, model, reference = pair_rows(9), model_of(0), model_of(99)
    other, their_reference = (in_transformers(each, attn_implementation="eager") for each in (model, reference))
    inputs = padded_pairs(batch)

    policy = Fused(other)
    trainer = DPOTrainer.__new__(DPOTrainer)
    trainer.__dict__.update(
        model=policy, ref_model=Fused(their_reference), accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda m: m),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=False, f_divergence_type="reverse_kl", loss_types=[loss_type], loss_weights=[1.0], beta=0.25,
        label_smoothing=0.0, use_weighting=False, _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0, _tp_size=1)
    policy.train()
    their_loss = trainer._compute_loss(policy, inputs, return_outputs=False)
    their_loss.backward()
    objective = DPO(PreferenceConfig(dpo_beta=0.25, **TRL_LOSSES[loss_type]), partial(frozen_logprobs, reference))
    summed, pairs = objective.loss_sum(model, batch), objective.count(batch)
    loss = summed.total / pairs
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), rel=1e-5)
    for name in ("chosen", "rejected"):
        (theirs_logged,) = trainer._metrics["train"][f"rewards/{name}"]
        assert float(summed.metrics[f"reward_{name}"] / pairs) == pytest.approx(float(theirs_logged), rel=1e-4)
    assert_same_gradients(model, other)


@pytest.mark.parametrize("point", ["above 0", "clamped"])
def test_kto_equals_trl(point):
    """KTOTrainer._compute_loss, loss_type kto: the mean over all answers, with one micro-batch in the step."""
    pytest.importorskip("trl")
    from trl import KTOTrainer

    batch, weights = unpaired_rows(9, point=None), {"kto_desirable_weight": 0.7, "kto_undesirable_weight": 1.3}
    model, reference = model_of(0), model_of(99)
    if point == "above 0":  # with the models exchanged, the divergence has the other sign
        model, reference = reference, model
    both = padded_pairs(batch)
    both = {name: torch.stack(value.chunk(2), 1).flatten(0, 1) for name, value in both.items()}  # by document
    labels = [label for label in batch.stored["label_BP"].flatten().tolist() if label]
    own = [2 * pair + (label < 0) for pair, label in enumerate(labels)]
    inputs = {name: value[own] for name, value in both.items()} | {"label": torch.tensor(labels) > 0}
    inputs |= {f"KL_{name}": value[[place ^ 1 for place in own]] for name, value in both.items()}
    policy = Fused(in_transformers(model, attn_implementation="eager")).train()
    trainer = KTOTrainer.__new__(KTOTrainer)
    trainer.__dict__.update(
        model=policy, ref_model=Fused(in_transformers(reference, attn_implementation="eager")), accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather_for_metrics=lambda x: x, unwrap_model=lambda m: m),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), aux_loss_enabled=False, calculate_KL=True, loss_type="kto",
        precompute_ref_logps=False, beta=0.25, desirable_weight=0.7, undesirable_weight=1.3,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)}, _total_train_tokens=0, _tp_size=1)
    their_loss = trainer._compute_loss(policy, inputs, return_outputs=False)
    their_loss.backward()
    (their_point,) = trainer._metrics["train"]["kl"]
    assert (their_point > 0.1) == (point == "above 0")

    objective = KTO(Config(compile=False, dpo_beta=0.25, **weights), partial(frozen_logprobs, reference), model)
    prepared = objective.prepare_step([batch], 0)
    assert prepared.count == objective.count(batch) == 4
    (own,) = prepared.batches  # the other answers, which the loss does not need, are left out
    assert own.targets == (batch.targets_BT != IGNORE_INDEX)[objective.side(batch) == 1].sum() < batch.targets
    assert own.tokens_BT.shape[1] < batch.tokens_BT.shape[1]
    loss = objective.loss_sum(model, own).total / 4
    loss.backward()
    assert float(batch.stored["point_B1"][0]) == pytest.approx(their_point, rel=1e-6)
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), abs=1e-6)
    assert_same_gradients(model, policy.inner)
    # A good answer should gain over the reference, and a bad one lose.
    gain_BP2 = pair_logprobs(model, batch).detach() - frozen_logprobs(reference, batch)
    margins = [0.25 * (gain_BP2[row, place, 0] if label > 0 else -gain_BP2[row, place, 1])
               for (row, place), label in np.ndenumerate(batch.stored["label_BP"].numpy()) if label]
    metrics = {name: float(value) for name, value in objective.loss_sum(model, own).metrics.items()}
    assert metrics["reward_margin"] == pytest.approx(float(sum(margins)), rel=1e-5) and metrics["kl"] == pytest.approx(4 * their_point, rel=1e-5)
    above = [float(margin) > 0.25 * their_point if label > 0 else float(margin) > -0.25 * their_point
             for margin, label in zip(margins, labels)]
    assert metrics["reward_accuracy"] == sum(above)
    # Elsewhere the batch has its own reference point.
    alone = replace(batch, stored={"label_BP": batch.stored["label_BP"]})
    assert float(objective.loss_sum(model, alone).total.detach()) == pytest.approx(4 * float(loss.detach()), abs=1e-6)


def test_the_reference_point_of_kto_is_that_of_all_micro_batches_of_all_ranks():
    batch = unpaired_rows(3, point=None)
    objective = KTO(Config(compile=False), partial(frozen_logprobs, model_of(99)), model_of(0))
    objective.prepare_step([batch], 0)
    point = batch.stored["point_B1"]
    first, second = (rows_of(unpaired_rows(3, point=None), rows) for rows in (slice(0, 1), slice(1, 3)))
    messages = []
    for part in (first, second):  # each on its own rank; the second pass knows what the other found
        replace(objective, gather=lambda sums: messages.append(sums) or [sums]).prepare_step([part], 0)
    for part in (first, second):
        replace(objective, gather=lambda _: messages).prepare_step([part], 0)
    torch.testing.assert_close(torch.cat([first.stored["point_B1"], second.stored["point_B1"]]), point)


def mean_logprobs(model, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The mean log-probability of a token of each chosen and each rejected answer."""
    means = [[torch.tensor([value / length]) for value, length in documents]
             for documents in naive_logprobs(model, batch)]
    return [pair for row in means for pair in zip(row[::2], row[1::2])]


def test_orpo_equals_trl_on_each_pair():
    trl_orpo = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    batch = pair_rows(10)
    model = model_that_knows(batch)
    trainer = SimpleNamespace(beta=0.1, accelerator=SimpleNamespace(device=torch.device("cpu")))
    expected = sum(float(-good - trl_orpo.ORPOTrainer.odds_ratio_loss(trainer, good, bad)[0])
                   for good, bad in mean_logprobs(model, batch))
    found = ORPO(PreferenceConfig(orpo_lambda=0.1)).loss_sum(model, batch)
    assert float(found.total.detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("beta, gamma", [(2.0, 1.0), (2.5, 0.0), (10.0, 3.0)])
def test_simpo_equals_trl_on_each_pair(beta, gamma):
    trl_cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    batch, model = pair_rows(11), model_of(0)
    trainer = SimpleNamespace(loss_type="simpo", simpo_gamma=gamma, beta=beta, label_smoothing=0.0, alpha=0.0,
                              accelerator=SimpleNamespace(device=torch.device("cpu")))
    losses, chosen, rejected = (torch.cat(each) for each in zip(*(
        trl_cpo.CPOTrainer.cpo_loss(trainer, *pair) for pair in mean_logprobs(model, batch))))
    found = SimPO(PreferenceConfig(simpo_beta=beta, simpo_gamma=gamma)).loss_sum(model, batch)
    assert float(found.total.detach()) == pytest.approx(float(losses.sum()), rel=1e-4)
    assert float(found.metrics["reward_margin"]) == pytest.approx(float((chosen - rejected).sum()), rel=1e-4)
    assert float(found.metrics["reward_accuracy"]) == int((chosen > rejected).sum())


def test_log1mexp_is_exact_at_both_ends():
    x = torch.tensor([-1e-6, -0.1, -0.69, -0.7, -5.0, -50.0])
    torch.testing.assert_close(log1mexp(x), torch.log1p(-x.double().exp()).float(), rtol=1e-5, atol=1e-7)
    assert torch.isfinite(log1mexp(torch.zeros(1)))
