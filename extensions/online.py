"""Training on a model's own answers: GRPO, and distillation at them; their validation is the reward."""

import numpy as np

from checkpoint import item_scores
from common.files import json_sha256
from evaluation.during_run import RECORDED_TEXTS, VALIDATIONS, Result, Row, Validation
from extensions.grpo import GRPO
from extensions.rollouts import Answer, Rollouts
from learn import objectives
from parallel.ranks import collective
from run.life import Run


@collective
def validation_reward(run: Run) -> Result:
    """Return the mean reward of greedy answers to the first held-out prompts."""
    config, ranks, rollouts = run.config, run.ranks, run.objective.rollouts
    held_out = run.inputs.validation_rows
    rows, size = min(config.validation_rows, len(held_out)), config.micro_batch_size
    batches = [np.arange(first, min(first + size, rows)) for first in range(0, rows, size)]
    answers, rounds = [], -(-len(batches) // ranks.world_size)
    for number in run.context.progress(range(rounds), rounds, "Reward"):
        for indices in batches[number * ranks.world_size + ranks.rank:][:1]:
            prompts = held_out(indices)
            answers += zip(indices.tolist(), rollouts.reward(prompts, rollouts.generate(prompts, 1)))
    gathered = dict(pair for pairs in ranks.all_gather_json(answers) for pair in pairs)
    every = [Answer(*gathered[row]) for row in range(rows)]
    rollouts.check_any(every, "validation")
    rewards_N = np.array([answer.reward for answer in every if not answer.failure])
    reward, error = float(rewards_N.mean()), item_scores.standard_error(rewards_N)
    metrics = {"val_reward": reward, "val_reward_stderr": error}
    unread = rollouts.count_misunderstood(every, "validation")
    metrics |= {f"val_{name}": share for name, share in unread.items()}
    texts = [{"prompt": each.prompt, "answer": each.text, "reward": each.reward} for each in every]
    items = json_sha256([run.inputs.validation_fingerprint, rows, config.reward, config.answer_tokens])
    line = {"name": item_scores.REWARD, "items": items, "kind": "prompts", "n": len(every),
            "texts": texts[:RECORDED_TEXTS]}
    if len(rewards_N) == rows:
        line["reward"] = rewards_N.tolist()
    summary = f"Reward: {reward:.4f} +- {error:.4f} | N: {len(rewards_N)}"
    return Result(metrics, line, summary, [Row("validation", "reward", reward, error, None, len(rewards_N))])


VALIDATIONS["grpo"] = Validation("Reward", "val_reward", validation_reward)
objectives.ONLINE["rollouts"], objectives.ONLINE["grpo"] = Rollouts, GRPO
