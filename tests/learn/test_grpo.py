"""GRPO compared with TRL, the invariants of its loss and advantages, and the built-in rewards."""

import json
import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import in_transformers
from test_objectives import VOCAB, Fused, T, assert_same_gradients, model_of

from config import Config
from dataloaders import Batch
from extensions.distillation import LlamaTeacher, OnPolicyDistillation
from extensions.online import (
    GRPO,
    STD_EPSILON,
    Answer,
    Rewards,
    Rollouts,
    advantages,
    validation_reward,
)
from extensions.rewards import BUILT_IN, Misunderstood, final_answer, final_value, load, text_of
from learn.objectives import frozen_logprobs, token_logprobs
from model_kernels.head import IGNORE_INDEX
from parallel.ranks import Ranks

PROMPT, LONGEST = 5, 9  # tokens
LOSSES = ("grpo", "dr_grpo", "dapo")
losses = pytest.mark.parametrize("loss", LOSSES)


def objective_of(loss: str, **settings) -> GRPO:
    config = Config(grpo_loss=loss, max_seq_len=T, grpo_max_tokens=LONGEST, **settings)
    reference = partial(frozen_logprobs, model_of(99), compute=token_logprobs) if config.grpo_beta else None
    return GRPO(config, reference=reference)


def answers(seed: int = 0) -> Batch:
    """Two groups of four answers of 1 to 9 tokens to prompts of five, with advantages of random rewards."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT, targets_BT = torch.randint(0, VOCAB, (8, T), generator=generator), torch.full((8, T), IGNORE_INDEX)
    for row, length in enumerate((3, 1, LONGEST, 4, 2, 7, 7, 1)):
        targets_BT[row, PROMPT - 1:PROMPT - 1 + length] = tokens_BT[row, PROMPT:PROMPT + length]
    advantages_PG = advantages(torch.rand(2, 4, generator=generator, dtype=torch.float64), scaled=True)
    is_target_BT = targets_BT != IGNORE_INDEX
    length_BT = is_target_BT.sum(dim=1, keepdim=True).expand_as(tokens_BT)
    advantage_BT = advantages_PG.float().view(-1, 1) * is_target_BT
    return Batch(tokens_BT, targets_BT, stored={"advantage_BT": advantage_BT, "length_BT": length_BT})


def off_policy(batch: Batch) -> Batch:
    """The batch in a later update: the model that answered was another one, so that some ratios leave the clip range."""
    now_BT = frozen_logprobs(model_of(0), batch, token_logprobs)
    noise_BT = 0.3 * torch.randn(now_BT.shape, generator=torch.Generator().manual_seed(3))
    return replace(batch, stored={**batch.stored, "sampled_BT": now_BT + noise_BT})


def learned(objective: GRPO, batch: Batch):
    """Return the loss, the metrics and the model with its gradients."""
    model = model_of(0)
    summed = objective.loss_sum(model, batch)
    summed.total.backward()
    return float(summed.total.detach()), summed.metrics, model


@losses
@pytest.mark.parametrize("update, beta", [("first", 0.0), ("later", 0.0), ("later", 0.3)])
def test_loss_and_gradient_equal_those_of_trl(loss, update, beta):
    """GRPOTrainer._compute_loss of the same loss_type, epsilons 0.2 and 0.28, with its own normalizer."""
    pytest.importorskip("trl")
    from trl import GRPOTrainer

    batch = answers() if update == "first" else off_policy(answers())
    policy = Fused(in_transformers(model_of(0), attn_implementation="eager")).train()
    mask = (batch.targets_BT[:, PROMPT - 1:PROMPT - 1 + LONGEST] != IGNORE_INDEX).long()

    def of_answers(values_BT):
        return values_BT[:, PROMPT - 1:PROMPT - 1 + LONGEST]

    inputs = {"prompt_ids": batch.tokens_BT[:, :PROMPT], "prompt_mask": torch.ones(8, PROMPT, dtype=torch.int64),
              "completion_ids": batch.tokens_BT[:, PROMPT:PROMPT + LONGEST], "completion_mask": mask,
              "advantages": batch.stored["advantage_BT"][:, PROMPT - 1], "num_items_in_batch": mask.sum()}
    if update == "later":
        inputs["old_per_token_logps"] = of_answers(batch.stored["sampled_BT"])
    objective = objective_of(loss, grpo_beta=beta, grpo_clip_high=0.28)
    if beta:
        inputs["ref_per_token_logps"] = of_answers(objective.reference(batch))
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.__dict__.update(
        model=policy, accelerator=SimpleNamespace(
            is_main_process=True, autocast=nullcontext,
            gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1), aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=beta, loss_type=loss,
        epsilon_low=0.2, epsilon_high=0.28, use_vllm=False, max_completion_length=LONGEST, _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1, _metrics={"train": defaultdict(list), "eval": defaultdict(list)})
    their_loss = trainer._compute_loss(policy, inputs)
    their_loss.backward()

    units = int(objective.count(batch))
    assert units == (int(mask.sum()) if loss == "dapo" else 8)
    total, metrics, model = learned(objective, batch)
    assert total / units == pytest.approx(float(their_loss.detach()), abs=1e-6)
    entropies = [-row[mask_row.bool()] for row, mask_row in zip(of_answers(token_logprobs(model_of(0), batch).detach()), mask)]
    expected = sum(each.sum() if loss == "dapo" else each.mean() for each in entropies)
    assert float(metrics["entropy"]) == pytest.approx(float(expected), rel=1e-5), "by token, or of each answer's mean"
    if loss == "dapo":  # TRL's are means over all tokens
        for name, theirs in {"clipped": "clip_ratio/region_mean", **({"kl": "kl"} if beta else {})}.items():
            assert float(metrics[name]) / units == pytest.approx(trainer._metrics["train"][theirs][0], abs=1e-6)
        assert (float(metrics["clipped"]) > 0) == (update == "later")
    assert_same_gradients(model, policy.inner, units)


@pytest.mark.parametrize("kind, beta", [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
@pytest.mark.parametrize("trainer_name", ["DistillationTrainer", "GKDTrainer"])
def test_on_policy_distillation_equals_that_of_trl(trainer_name, kind, beta):
    """compute_loss of GKDTrainer and _compute_loss of DistillationTrainer, temperature 1, num_items_in_batch."""
    pytest.importorskip("trl")
    from trl import DistillationTrainer
    from trl.experimental.gkd import GKDTrainer

    batch, teacher = answers(), model_of(99)
    student, their_teacher = (in_transformers(each, attn_implementation="eager") for each in (model_of(0), teacher))
    mask = (batch.targets_BT[:, PROMPT - 1:PROMPT - 1 + LONGEST] != IGNORE_INDEX).long()
    ids, units = batch.tokens_BT[:, :PROMPT + LONGEST], mask.sum()
    shown = torch.cat([torch.ones(8, PROMPT, dtype=torch.int64), mask], dim=1)
    if trainer_name == "GKDTrainer":
        trainer = GKDTrainer.__new__(GKDTrainer)
        trainer.__dict__.update(teacher_model=their_teacher, beta=beta)
        inputs = {"input_ids": ids, "attention_mask": shown, "labels": ids.where(shown.bool(), -100)}
        inputs["labels"][:, :PROMPT] = -100
        their_loss = trainer.compute_loss(student, inputs, num_items_in_batch=units)
    else:
        trainer = DistillationTrainer.__new__(DistillationTrainer)
        trainer.__dict__.update(
            teacher_model=their_teacher, beta=beta, temperature=1.0, model_kwarg_keys=[], _is_vlm=False,
            accelerator=SimpleNamespace(unwrap_model=lambda model: model, is_main_process=False),
            _forward_redirection=lambda wrapper, model, method, *arguments, **more: method(*arguments, **more))
        inputs = {"prompt_ids": ids[:, :PROMPT], "prompt_mask": shown[:, :PROMPT], "completion_ids": ids[:, PROMPT:],
                  "completion_mask": mask}
        their_loss = trainer._compute_loss(student, inputs, units)[0]
    their_loss.backward()

    config = Config(training_stage="grpo", distillation_loss=kind, distillation_jsd_beta=0.3, distillation_temperature=1.0)
    objective = OnPolicyDistillation(config, LlamaTeacher(teacher, VOCAB), None)
    total, metrics, model = learned(objective, batch)
    assert objective.count(batch) == units and total == pytest.approx(float(metrics["divergence"]))
    assert total / units == pytest.approx(float(their_loss.detach()), abs=1e-6)
    assert_same_gradients(model, student, units)


@pytest.mark.parametrize("scaled", [True, False])
def test_advantages_are_those_of_trl_and_sum_to_zero(scaled):
    """TRL's scale_rewards "group" and "none": the deviation is that of a sample, plus 1e-4."""
    rewards_PG = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = advantages(rewards_PG, scaled)
    expected = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if scaled:
        expected = expected / (rewards_PG.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(found, expected)
    assert found.sum(1).abs().max() < 1e-12 and STD_EPSILON == 1e-4


@losses
def test_the_ratio_of_the_first_update_is_exactly_one(loss):
    batch, objective, model = answers(), objective_of(loss), model_of(0)
    objective.loss_sum(model, batch)
    first_BT = batch.stored["sampled_BT"]
    assert torch.equal((token_logprobs(model, batch).detach() - first_BT).exp(), torch.ones(8, T))
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    objective.loss_sum(model, batch)
    assert batch.stored["sampled_BT"] is first_BT  # also in later updates
    assert not torch.equal(token_logprobs(model, batch).detach(), first_BT)


VALUES = {  # what answers are worth, by their text; None: it is not understood
    r"\boxed{\frac{7}{2}}": "7/2", r"\boxed{\text{42}}, from step 3": 42, r"\boxed{42\text{ cm}^2}": 42, "The answer is \u22125.": -5,
    "The range is 5-10": 10, "5\u201310": 10, "1.5e3": 1500, "It is 1,000.": 1000, r"\boxed{12} or 13": 12, "So it is 2.": 2, r"$\boxed{12}$": 12,
    "The answer is 3.0": 3, "50%": "1/2", r"\boxed{50\%}": "1/2", "5 percent": "1/20", r"$-\frac{1}{2}$": "-1/2", r"\frac12": "1/2", ".5": "1/2",
    r"\boxed{1{,}234}": 1234, "1 234": 1234, r"\boxed{12\,345}": 12345, r"\boxed{1,\!234}": 1234, "1,234,567": 1234567, "(3,400)": 3400, "1 1/2": "3/2",
    r"-1\frac12": "-3/2", "½": "1/2", "2½ cups": "5/2", r"1.5 \times 10^3": 1500, r"\boxed{3 \cdot 10^{-2}}": "3/100", "10⁻²": "1/100", r"\boxed{2^{10}}": 1024,
    r"\boxed 5": 5, r"$\boxed5$": 5, r"\boxed{\boxed{3}}": 3, "so 5\n#### 72": 72, "#### Step 2\nIt is 9": 9, r"\boxed{x=-5}": -5, r"\boxed{f(2) = 5}": 5,
    r"\boxed{90^{\circ}}": 90, "5 m²": 5, r"-\$12.50": "-25/2", "7 / 2": "7/2", r"\boxed{\frac{\frac{1}{2}}{3}}": "1/6", r"\boxed{\dfrac{3}{-4}}": "-3/4",
    "The answer is 2 + 2 = 4.": 4, "The answer is 42. I checked it in 3 ways.": 42, "The answer is 5? No, the answer is 7, not 5.": 7, "The answer is not 5. It must be 6.": 6, "ANSWER: 5 of 9": 5,
    "**Answer:** 42": 42, "**42**": 42, "x-5": 5, "it is -5": -5, "5 - 10": 10,
    **{f"The answer is {each}": 15 for each in ("20 - 5 = 15.", "20-5=15", "$20 - $5 = $15", "(30 - 10) - 5 = 15", "20 − 5 eggs = 15 eggs", "30 ÷ 2 = 15", "3 x 5 = 15")},
    **dict.fromkeys(["#### 18\n\nQuestion: Tom has 5 eggs.\n#### 5", "#### $18.00\nLet me know if you have 2 more."], 18), "#### 1. Add\n#### 2. Sum\nIt is 9": 9,
    "The answer is 5 - 2, which is 3": None, "The answer is 5 apples\n- 6 pears": 5, "- 5 apples\n- 6 pears": 6, "Therefore, $x = 3 - 5 = -2$.": -2, r"<think>\boxed{3}</think> It is 4": 4, "<answer>7</answer> of 9": 7, "<answer>5</answer> No: <answer>7</answer>": 7, r"\boxed{5}? No: \boxed{7}": 7, "5 million": 5000000, "2 hundred": 200, "3 thousand": 3000, "1.5 billion": 1500000000, "2 trillion": 2 * 10**12,
    "It costs 5 (10 before).": 10, "total 5\n* 6 pears": 6, "１２": 12,
    "答案是72": 72, "答案是-72。": -72, "共3人，每人24元，总共72元": 72, "72个": 72, "3千克": 3, "¥3,500万": 35000000, "72개": 72, "72г": 72, "答案：１，２３４": 1234, "７２％": "18/25",
    "\u0663\u066b\u0665": "7/2", "\u0661\u066c\u0662\u0663\u0664": 1234, "\u0667\u0662\u066a": "18/25", "From 192.168.0.1: 7": 7,
    "It costs 1'000.50 francs": "2001/2", "x = 1_000": 1000, "The answer is 5!": 5, r"\boxed{x_1 = 5}": 5,
    **dict.fromkeys(["none", "1,5", "1.000.000", "-1.2.3", "5/10.5.1", "2 million 500 thousand", "3万5千", "(1, 2)", r"2\pi", r"\boxed{\sqrt{2}}", r"\boxed{\{1, 2\}}", r"\frac{\sqrt{3}}{2}", r"\boxed{\frac{a}{2}}", "2x", "3 + 4i",
                     r"\boxed{2x+3}", "2 + 3", "1/0", "3/4/5", "3:30", r"\boxed{5-10}", r"\boxed{5 \text{ or } 6}", r"\boxed{\pm 5}", r"\boxed{x > 5}", r"\boxed{0.\overline{3}}",
                     r"\boxed{10!}", r"\boxed{|-5|}", r"\boxed{101_2}", r"\boxed{5_{8}}", "x != 5\n#### != 5", r"\boxed{\frac{1}{2}, \frac{1}{3}}", r"\boxed{", r"\boxed{7", "10^99999999", "9" * 5000])}


@pytest.mark.parametrize("answer, value", VALUES.items(), ids=ascii)
def test_numbers_are_compared_exactly_however_they_are_written(answer, value):
    for other in (value, "17/19") if value is not None else (0, 7):
        reward = BUILT_IN["math"]("prompt", answer, {"answer": other})
        assert reward == (other == value) and isinstance(reward, Misunderstood) == (value is None)
    if value is not None and final_value(answer, is_reference=True) is not None:
        assert BUILT_IN["math"]("prompt", rf"\boxed{{{value}}}", {"answer": answer}) == 1, "the reference is read alike"


@pytest.mark.parametrize("value, text", [(np.float32(0.1).item(), "0.1"), (0.1, "0.1"), (1 / 3, str(1 / 3)), (1e22, "1" + 22 * "0"),
    (np.float32(-2.56e-5).item(), "-2.56e-05"), (math.nan, "")])
def test_a_number_of_a_table_has_the_text_that_was_written_there(value, text):
    assert text_of(value) == text


@pytest.mark.parametrize("answer, right", [
    ("<think>72? No.</think>It is 9.", ""), ("<think>So 72.</think>72", "exact contains math"), ("It is 72.", "contains math"), ("72", "exact contains math"),
    ("<think>9</think><think>It is 72", ""), ("[THINK]9[/THINK]\n72\n", "exact contains math"), ("9</think>\n\n72", "exact contains math"),
    ("<thinking>9</thinking>72", "exact contains math"), ("<think>9</think>8<think>5</think>72", "exact contains math"), ("72<think>Or 9?", "exact contains math")])
@pytest.mark.parametrize("reference", ["72", 72, 72.0, "<think>9</think> 72"])
def test_all_rewards_and_exact_match_see_the_answer_after_the_thoughts(answer, right, reference):
    for name in ("exact", "contains", "math"):
        assert BUILT_IN[name]("prompt", answer, {"answer": reference}) == (name in right.split()), name
        assert BUILT_IN[name]("user: 1?\nassistant:\n<think>\n", answer.replace("<think>", "", 1), {"answer": reference}) == (
            name in right.split() and "</think>" in answer or "[/THINK]" in answer or "</thinking>" in answer), "the prompt begins the thoughts"
    assert (final_answer(answer) == final_answer(text_of(reference))) == ("exact" in right)


@pytest.mark.parametrize("name, answer, words", [
    *((name, answer, "the record's answer is .*, expected text or a number; correct the record") for name in ("exact", "contains", "math")
      for answer in (None, math.nan, " \n", ["5"], {"value": 5})),
    *(("math", answer, "is not one number; correct the record, or use REWARD=math_verify") for answer in ("no number", "5-10", "2x", "1,5"))])
def test_a_reference_that_is_no_text_or_number_is_an_error_and_no_reward(name, answer, words):
    with pytest.raises(ValueError, match=words):
        BUILT_IN[name]("prompt", "None 5", {"answer": answer})


@pytest.mark.parametrize("name, words", [("os:sep", "not a callable"), ("operator:neg", "too many positional"), ("os:", "attribute"),
                                         ("os:absent", "absent")])
def test_what_is_not_a_reward_function_is_an_error_when_it_is_loaded(name, words):
    with pytest.raises((TypeError, AttributeError), match=words):
        load(name)
    assert load("math") and load("operator:setitem"), "three arguments"


def test_unparsed_answers_are_counted_and_reported_once():
    told: list[str] = []
    rollouts = SimpleNamespace(config=Config(reward="math"), rewards=SimpleNamespace(names=("math",)), is_reported=False,
                               context=SimpleNamespace(log=SimpleNamespace(warn=told.append)))
    answers = [Answer(1, True, 0.0, [0.0], "", "", misunderstood=number < 3) for number in range(4)]
    for step in (1, 2):
        assert Rollouts.count_misunderstood(rollouts, answers, f"step {step}") == {"answers_misunderstood": 0.75}
    assert len(told) == 1 and told[0].startswith("step 1: REWARD=math finds no single value in 3 of 4 answers")


def test_a_validation_is_the_mean_reward_of_the_answers_that_have_one_with_its_error(monkeypatch):
    """Of five held-out prompts, of which the first four are answered; the reward failed for one."""
    monkeypatch.setattr("extensions.online.prompt_ids", lambda prompts: prompts)
    rewards = [0.0, 1.0, None, 4.0, 100.0]

    class HeldOut(list):
        fingerprint = ""

        def __call__(self, indices):
            return indices.tolist()

    rollouts = SimpleNamespace(
        generate=lambda prompts, group: prompts, check_any=lambda *_: None, count_misunderstood=lambda answers, _: {"answers_misunderstood": 0.25},
        reward=lambda prompts, _: [Answer(1, True, rewards[each], [], "failed" * (rewards[each] is None), "", f"prompt {each}") for each in prompts])
    run = SimpleNamespace(
        config=Config(training_stage="grpo", validation_rows=4, micro_batch_size=3), ranks=Ranks(), objective=SimpleNamespace(rollouts=rollouts),
        inputs=SimpleNamespace(validation_rows=HeldOut(rewards)), context=SimpleNamespace(progress=lambda parts, *_: parts))
    result = validation_reward(run)
    assert result.metrics == pytest.approx({"val_reward": 5 / 3, "val_reward_stderr": np.std([0, 1, 4], ddof=1) / 3**0.5, "val_answers_misunderstood": 0.25})
    assert [each["prompt"] for each in result.line["texts"]] == [f"prompt {number}" for number in range(4)] and "reward" not in result.line


@pytest.mark.parametrize("name, answer, record, expected", [
    ("math_verify", "The answer is \u22125", {"answer": "-5"}, 1), ("math_verify", "1.5e3", {"answer": "1500"}, 1),
    ("math_verify", r"$\frac{\sqrt{2}}{2}$", {"answer": r"\frac{1}{\sqrt{2}}"}, 1), ("math_verify", "4", {"answer": "5"}, 0),
    ("math_verify", r"\boxed{\frac{1}{2}}", {"answer": 0.5}, 1), ("exact", " 42\n", {"answer": 42}, 1), ("exact", "42.", {"answer": "42"}, 0),
    ("contains", "It is Paris.", {"answer": "Paris"}, 1), ("contains", "Rome", {"answer": "Paris"}, 0),
    ("regex", "a1b", {"pattern": r"^a\d"}, 1), ("regex", "ba1", {"pattern": r"^a\d"}, 0), ("regex", "so a1b", {"pattern": r"a\d"}, 1),
    ("math", "2 + 2 = 4", {"answer": "so 5\n#### 4"}, 1), ("exact", "true", {"answer": True}, 1), ("exact", "caf\u00e9", {"answer": "cafe\u0301"}, 1),
    *((name, answer, {"answer": reference}, right) for name in ("math", "math_verify") for answer, reference, right in (
        ("It is 60%.", "#### 60", 1), (r"\boxed{60\%}", "60", 1), ("0.6", "60%", 1), ("60", "60 percent", 1), ("60%", "60%", 1), ("0.6", "60", 0), ("6000%", "60%", 0))), ("length", "four", {}, 4)])
def test_built_in_rewards(name, answer, record, expected):
    if name == "math_verify":
        pytest.importorskip("math_verify")
    assert BUILT_IN[name]("prompt", answer, record) == expected


@pytest.mark.parametrize("name, is_said", [("exact", True), ("contains", True), ("math", False)])
def test_a_reward_that_compares_whole_answers_says_so_where_they_mark_a_number(name, is_said):
    notes = Rewards(f"REWARD={name}", [(name, 1.0)]).check([("1+2?", json.dumps({"answer": "1+2=3\n#### 3"}))], "")
    assert notes == [f"REWARD={name} compares the whole of answers such as '1+2=3\\n#### 3'; REWARD=math compares the number after ####"] * is_said


@pytest.mark.parametrize("name, is_said", [("exact", True), ("contains", True), ("math", False)])
def test_an_answer_that_the_tokenizer_writes_otherwise_is_named(name, is_said):
    rollouts = SimpleNamespace(rewards=SimpleNamespace(names=(name,), setting=f"REWARD={name}"), tokenizer=SimpleNamespace(encode=str.lower, decode=str))
    notes = [*Rollouts.unsayable(rollouts, [("", json.dumps({"answer": answer})) for answer in ("rome", "Paris", "Oslo")])]
    assert ["'Paris'" in note and "'paris'" in note for note in notes] == [True] * is_said
