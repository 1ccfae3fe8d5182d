"""The formula of FLOPs against what torch counts in eager steps, of every kind."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from factories import Config, new_model
from torch.utils.flop_counter import FlopCounterMode

import lora
from dataloaders import Batch
from extensions.cost import StepFlops, Work
from extensions.distillation import Distillation, LlamaTeacher
from extensions.hf_teacher import HFTeacher
from extensions.preferences import ORPO
from extensions.profile import Measurements, total_peak
from learn.objectives import (
    DPO,
    NextToken,
    frozen_logprobs,
    pair_logprobs,
    stored_reference,
)
from model import Transformer
from model_kernels.head import IGNORE_INDEX
from run.build import logprobs_without_adapters

VOCAB, ROWS, LENGTH, PADDING = 250, 2, 64, 11
# Attention is written out as matmuls, which torch counts in full; CPUs' fused kernel is not counted at all.
SHAPE = dict(dim=64, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=160, attention_backend="math", max_seq_len=LENGTH,
             micro_batch_size=ROWS, compile=False)
LORA = dict(lora_enabled=True, lora_rank=4)


def make(seed=0, token_ids=None, **settings) -> tuple[Config, Transformer]:
    config = Config(**SHAPE | settings)
    model = new_model(config, VOCAB, seed)
    if config.lora_enabled:
        lora.add_adapters(model, config, torch.Generator().manual_seed(0), token_ids)
    return config, model


def batch_of(stage: str) -> Batch:
    """Rows of text; of a chat with padding, whose answers are targets; or of a pair with padding."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    if stage == "pretrain":
        return Batch(tokens, targets)
    end = LENGTH - PADDING
    ids = torch.ones(ROWS, LENGTH, dtype=torch.int32)
    ids[:, end // 2:], ids[:, end:] = 2, 3
    targets[:, :9], targets[:, end // 2:end // 2 + 9], targets[:, end:] = IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX
    stored = {"reference_BP2": torch.zeros(ROWS, 1, 2)} if stage == "dpo" else {}
    return Batch(tokens, targets, ids, (targets.flatten() != IGNORE_INDEX).nonzero().flatten(), stored, ROWS * PADDING)


IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}  # which torch omits


def counted(model: Transformer, objective, batch: Batch) -> int:
    objective.loss_sum(model, batch).total.backward()  # the kernel of attention is tried at the first forward
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        objective.loss_sum(model, batch).total.backward()
    return counter.get_total_flops()


BLOCK = dict(activation_checkpointing="block")
TOKENS = {"tok_embeddings": [*range(3, 90)]}
CASES = {
    "pretrain": ({}, "pretrain"), "grouped": (dict(n_kv_heads=1), "pretrain"), "untied": (dict(tie_embeddings=False), "pretrain"),
    "recomputed": (BLOCK, "pretrain"), "sft": ({}, "sft"), "lora": (LORA, "sft"),
    "lora-head": ({**LORA, "lora_train_head": True, "tie_embeddings": False}, "sft"),
    "lora-embedding": ({**LORA, "lora_train_embeddings": True, "tie_embeddings": False}, "sft"),
    "lora-whole": ({**LORA, "lora_train_head": True}, "sft"), "lora-tokens": ({**LORA, "token_ids": TOKENS}, "sft"),
    "lora-mlp": ({**LORA, "lora_target_modules": "w1,w2"}, "sft"), "lora-attention": ({**LORA, "lora_target_modules": "wq,wk,wv"}, "sft"),
    "lora-recomputed": ({**LORA, **BLOCK}, "sft"), "lora-attention-recomputed": ({**LORA, **BLOCK, "lora_target_modules": "wq,wk,wv"}, "sft"),
    "dpo-stored": ({}, "dpo"), "dpo-chunks": (dict(head_chunk_tokens=16), "dpo"), "dpo-live": (dict(dpo_reference="live"), "dpo"),
    "orpo": (dict(preference_objective="orpo"), "dpo"), "lora-dpo": (LORA, "dpo"),
    "distilled": (dict(distillation_enabled=True), "pretrain"), "distilled-sft": (dict(distillation_enabled=True), "sft"),
    "distilled-foreign": (dict(distillation_enabled=True), "pretrain")}


def objective_of(name: str, config: Config, model: Transformer):
    if config.distillation_enabled:
        if not name.endswith("foreign"):
            return Distillation(config, LlamaTeacher(make(1, dim=32, n_layers=2, n_heads=2, n_kv_heads=2)[1], VOCAB))
        transformers = pytest.importorskip("transformers")
        shape = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, attn_implementation="eager")
        return Distillation(config, HFTeacher(transformers.GPT2LMHeadModel(shape), VOCAB))
    if config.training_stage != "dpo":
        return NextToken()
    if config.preference_objective == "orpo":
        return ORPO(config)
    reference = stored_reference
    if config.lora_enabled:
        reference = partial(logprobs_without_adapters, model, compute=pair_logprobs)
    elif config.dpo_reference == "live":
        reference = partial(frozen_logprobs, make(1)[1].requires_grad_(False).eval())
    return DPO(config, reference)


@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_what_torch_counts(name):
    settings, stage = CASES[name]
    config, model = make(training_stage=stage, **settings)
    batch, objective = batch_of(stage), objective_of(name, config, model)
    flops = StepFlops(config, model, objective, VOCAB, "cpu")
    needed, computed = flops.of(flops.read([batch]))
    assert sum(computed) == pytest.approx(counted(model, objective, batch), rel=0.002)
    if name == "pretrain":  # PaLM's figure, 6 N + 12 L H Q T a token, of which H Q is the width here
        weights = 3 * (4 * 64 * 64 + 3 * 64 * 160) + VOCAB * 64
        assert sum(needed) == (6 * weights + 12 * 3 * 64 * LENGTH) * ROWS * LENGTH


@pytest.mark.parametrize("name", ["sft", "lora", "dpo-live", "distilled-sft"])
def test_what_was_needed_is_what_a_row_without_padding_computes(name):
    settings, stage = CASES[name]
    batch = batch_of(stage)
    real = torch.arange(LENGTH) < LENGTH - PADDING
    targets = batch.targets_BT[:, real]
    dense = Batch(batch.tokens_BT[:, real], targets, batch.document_ids_BT[:, real],
                  (targets.flatten() != IGNORE_INDEX).nonzero().flatten(), batch.stored)
    config, model = make(training_stage=stage, **settings)
    objective = objective_of(name, config, model)
    needed, _ = StepFlops(config, model, objective, VOCAB, "cpu").of(Work(batch.tokens_BT.numel(), ROWS * PADDING, batch.targets))
    # The formula has a token attend to MAX_SEQ_LEN tokens, here there are fewer; and no padded ids.
    found = counted(model, objective, dense) + sum(needed[1:2]) * (1 - (LENGTH - PADDING) / LENGTH)
    assert sum(needed) == pytest.approx(found, rel=0.02)


def test_mfu_is_of_the_work_and_the_peak_of_all_ranks():
    """Two ranks, of which the second has padding: 16 real tokens of 20, at 50 tokens/s, 100 FLOPs each, and twice 1,000 FLOP/s."""
    own, other = Work(10, 0, 5, steps=1), Work(10, 4, 5, steps=1)
    ranks = SimpleNamespace(world_size=2, all_gather_json=lambda numbers: [[*own], [*other]])
    flops = SimpleNamespace(of=lambda work: ((100 * (work.tokens - work.padding),), (100 * work.tokens,)))
    measured = SimpleNamespace(work=own, peak=2000, sampler=None, is_sampled=False, flops=flops, run=SimpleNamespace(ranks=ranks, config=Config(total_batch_size=20)))
    assert Measurements.read_utilization(measured, 50) == {"mfu": 2.0, "hfu": 2.5}
    assert measured.work == Work(), "what was read is not counted again"


def test_the_peak_is_the_sum_of_different_cards_and_unknown_if_one_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    lines = []
    for other, expected in (([100e12, "B"], 412e12), ([None, "Card of 2030"], None)):
        ranks = SimpleNamespace(device=torch.device("cuda"), all_gather_json=lambda own, other=other: [own, other])
        run = SimpleNamespace(ranks=ranks, config=SimpleNamespace(peak_tflops=None), log=SimpleNamespace(info=lines.append))
        assert total_peak(run) == expected
    (line,) = lines
    assert "MFU is not measured: the peak of Card of 2030 is not in our table" in line
