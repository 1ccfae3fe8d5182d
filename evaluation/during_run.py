"""Distributed evaluation: validation, multiple choice, generated answers and samples."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from checkpoint import item_scores
from checkpoint.store import BEST
from common.files import json_sha256
from common.heartbeat import HEARTBEAT
from config import Config
from data_pipeline.templates import load_chat_format
from dataloaders import Rows, first_prompts
from fused.head import IGNORE_INDEX
from hellaswag_utils import ChoiceSet, batches_of, evaluate_batches
from inference.engine import Sampling
from inference.generate import generate
from inference.weights import packed_weights
from learn.objectives import Objective, sums_by_item
from model import Transformer
from model_utils import forced_eager
from parallel.fsdp import is_sharded
from parallel.ranks import RunContext, collective, widened
from run.life import Run
from run.log import evaluation_columns
from run.paired import difference_text
from run.rollouts import Answer

GENERATION_BATCH = 16  # fixed, because rounding depends on the batch size
MEASURED_WITH_ERROR = ("loss", "reward_accuracy")  # validation metrics that are logged with one
RECORDED_TEXTS = 4  # texts per line of evaluations.jsonl
HELD_OUT_SAMPLES = 2
ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "rouge_lsum": "rougeLsum"}


class Row(NamedTuple):
    """A row of the results table."""

    name: str
    metric: str
    value: float
    stderr: Optional[float] = None
    chance: Optional[float] = None
    n: Optional[int] = None


class Result(NamedTuple):
    """The results of an evaluation."""

    metrics: dict[str, float]  # for metrics.jsonl
    line: dict[str, Any]  # per-item results for evaluations.jsonl
    summary: str  # console output
    table: list[Row]


class Evaluation(NamedTuple):
    """A configured evaluation."""

    title: str
    phase: str  # name in the heartbeat
    every: int  # interval in steps
    metric: str  # a metric that is always present
    measure: Callable[[], Result]  # collective


def evaluations(run: Run) -> Iterator[Evaluation]:
    """Yield the evaluations of a run, or of a model from `standalone.open_model`."""
    config, inputs = run.config, run.inputs
    if inputs.validation_rows is not None:
        title, metric, measure = "Validation", "val_loss", validation
        if config.training_stage == "grpo":
            title, metric, measure = "Reward", "val_reward", validation_reward
        yield Evaluation(title, "validation", config.validate_every, metric, partial(measure, run))
    for choices in inputs.choice_sets:
        phase = "HellaSwag" if choices.name == "hellaswag" else choices.name
        yield Evaluation(choices.title, phase, config.hellaswag_every, f"{choices.name}_acc",
                         partial(multiple_choice, run, choices))
    if inputs.held_out:
        yield Evaluation("Generation", "generation", config.generation_eval_every, "generation_n",
                         partial(generation, run))


def due(every: int, step: int, last: bool = False) -> bool:
    return every > 0 and (step % every == 0 or last)


@collective
def evaluate(run: Run) -> None:
    """Run the evaluations that are due, once each, and add them to `progress.pending_metrics`."""
    config, progress, metrics = run.config, run.progress, run.progress.pending_metrics
    for title, phase, every, metric, measure in evaluations(run):
        # Only validation is fast: run others before the first step only if the run repeats them.
        worthwhile = phase == "validation" or progress.step > 0 or run.finished or every < config.max_steps
        if metric in metrics or not (worthwhile and due(every, progress.step, run.finished)):
            continue
        HEARTBEAT.enter(phase, progress.step)
        result = measure()
        metrics.update(result.metrics)
        run.log.append("evaluations", {"step": progress.step, **result.line})
        best = ""
        if metric == "val_loss" and progress.step > 0:
            loss = result.metrics["val_loss"]
            _, first = run.log.history.first.get("val_loss", (0, loss))
            is_best = progress.note_validation(loss, config.early_stopping_skip_steps)
            best = " | best so far" if is_best and loss <= first else ""
        run.log.info(f"{title} [{progress.step}/{config.max_steps}] | {result.summary}{best}",
                     evaluation_columns(progress.step, config.max_steps, title, result.summary, best != ""))
        warn_of_a_rise(run)
        if not math.isfinite(result.metrics.get("val_loss", 0)):
            run.log.warn(f"validation loss after step {progress.step} is not finite, so never the best")
    if progress.step > 0 and due(config.sample_every, progress.step, run.finished):
        HEARTBEAT.enter("samples", progress.step)
        for prompt, text in samples(run.model, run.inputs.tokenizer, config, progress.step,
                                    run.inputs.validation_rows):
            run.log.sample(progress.step, prompt, text)
    for extension in run.extensions:
        metrics.update(extension.evaluate(run))


def warn_of_a_rise(run: Run) -> None:
    """Warn once, on rank 0, if the validation loss is now significantly above its best."""
    history = run.log.history
    best, rise = history.losses.best, history.losses.rise()
    if rise and history.risen_from != best.step:
        history.risen_from = best.step
        advice = f"use {run.folder}{BEST}" if best.step else "the start model is better"
        run.log.warn(f"the validation loss is above its best, {rise.a:.4f} at step {best.step}"
                     f"{difference_text(rise, best.kind)}. If it keeps rising, the run overfits: {advice}")


# ------------------------------------------------------------------------------------------ validation


@torch.no_grad()
@collective
def validation_loss(model: Transformer, objective: Objective, batches: Iterable, context: RunContext,
                    byte_lengths: Optional[Sequence[int]] = None, kind: str = "rows"
                    ) -> tuple[float, dict[str, float], dict[str, np.ndarray]]:
    """Return the mean loss, further metrics, and by item, in row order: "count", mean "loss" and metrics.

    The items are the rows, chats or pairs (`kind`) with targets. So the results depend on the ranks not at
    all, and on the batches only by rounding.
    The further metrics are perplexity, bits per byte and those of the objective. Bits per byte is the
    cross-entropy of all targets in bits, divided by the UTF-8 bytes of their text (None: unknown), so it is
    comparable across tokenizers. Control tokens have no bytes, but their cross-entropy counts.
    Source: Gao et al. 2020 (arXiv:2101.00027), section 3.1, as in lm-evaluation-harness.
    """
    model.eval()
    blocks, names, ranks = [], [], context.ranks
    lengths_V = None if byte_lengths is None else torch.tensor(byte_lengths, device=ranks.device)
    for batch in batches:
        summed = objective.by_item(model, batch, kind)
        targets_BT, nats_BI = objective.text_loss(batch, summed)
        is_target_BT, bytes_BI = targets_BT != IGNORE_INDEX, torch.zeros_like(nats_BI)
        if lengths_V is not None:
            bytes_BI = sums_by_item(lengths_V[targets_BT.clamp(min=0)] * is_target_BT, batch, kind)
        targets_BI, names = sums_by_item(is_target_BT, batch, kind), [*summed.metrics]
        count_BI = targets_BI.clamp(max=1) if kind == "pairs" else targets_BI
        values = count_BI, summed.total, nats_BI, targets_BI, bytes_BI, *summed.metrics.values()
        blocks.append(torch.stack([widened(value).flatten() for value in values], dim=1))
    model.train()

    # The items of all ranks, without padding: their order does not depend on the ranks.
    every = ranks.all_gather_json(ranks.tolist(torch.cat(blocks)))
    every_NK = np.array([values for each in every for values in each if values[0] > 0])
    count, loss, nats, targets, n_bytes, *others = every_NK.sum(axis=0).tolist()
    text = {"perplexity": torch.tensor(nats / targets, dtype=torch.float64).exp().item()}
    if n_bytes:
        text["bits_per_byte"] = nats / math.log(2) / n_bytes
    metrics = text | {name: total / count for name, total in zip(names, others)}
    count_N, loss_N, _, _, _, *others_N = every_NK.T
    means = {name: sums_N / count_N for name, sums_N in zip(["loss", *names], [loss_N, *others_N])}
    return loss / count, metrics, {"count": count_N, **means}


@collective
def validation(run: Run) -> Result:
    """Return the validation loss with its standard error, and further metrics."""
    config, inputs, ranks, prepare = run.config, run.inputs, run.ranks, None
    rows, kind = min(config.validation_rows, len(inputs.validation_rows)), "rows"
    if config.training_stage == "dpo":
        kind, prepare = "pairs", getattr(run.objective, "prepare_step", None)
    elif config.training_stage == "sft" and config.document_mask:
        kind = "chats"
    per_rank = -(-rows // (config.micro_batch_size * ranks.world_size))
    batches = inputs.validation_batches(config, ranks)
    if prepare:  # KTO's reference point is that of all rows
        batches = prepare([*batches], run.progress.step).batches
    loss, others, by_item = validation_loss(
        run.model, run.objective, run.context.progress(batches, per_rank, "Validation"), run.context,
        inputs.tokenizer.byte_lengths, kind)
    count_N = by_item["count"]
    errors = {name: item_scores.ratio_error(each_N, count_N) for name, each_N in by_item.items()}
    metrics = {"val_loss": loss, **{f"val_{name}": value for name, value in others.items()}}
    logged = {name: errors[name] for name in MEASURED_WITH_ERROR if errors.get(name) is not None}
    metrics |= {f"val_{name}_stderr": error for name, error in logged.items()}
    table = [Row("validation", name, value, errors.get(name)) for name, value in
             {"loss": loss, **others}.items()]
    table[0] = table[0]._replace(n=round(count_N.sum()))
    error_of = {name: f" +- {error:.4f}" for name, error in logged.items()}
    summary = [f"{name.replace('_', ' ').capitalize()}: {value:.4f}{error_of.get(name, '')}"
               for _, name, value, *_ in table]
    items = json_sha256([inputs.validation_fingerprint, rows, kind, config.max_seq_len,
                         config.document_mask, config.training_stage])
    # JSON has no NaN; seven digits are those of float32.
    line = {"name": item_scores.VALIDATION, "items": items, "kind": kind, "n": len(count_N),
            "loss": [float(f"{each:.7g}") if math.isfinite(each) else None for each in by_item["loss"]],
            "count": [round(each) for each in count_N]}
    if "reward_accuracy" in by_item:
        line["preferred"] = item_scores.packed_bits(by_item["reward_accuracy"] > 0)
    return Result(metrics, line, " | ".join(summary), table)


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


# -------------------------------------------------------------------- multiple choice, and generated text


@collective
def multiple_choice(run: Run, choices: ChoiceSet) -> Result:
    """Return acc, acc_norm, n, the standard error of acc, and chance."""
    config, ranks, tasks, n = run.config, run.ranks, choices.tasks, len(choices.tasks)
    correct_N2 = np.zeros((n, 2), np.uint8)
    batches = evaluate_batches(run.model, tasks, rank=ranks.rank, world_size=ranks.world_size,
                               device=ranks.device, batch_tokens=config.hellaswag_batch_tokens)
    count = -(-len(batches_of(tasks, config.hellaswag_batch_tokens)) // ranks.world_size)
    with forced_eager():
        for indices, correct_B2 in run.context.progress(batches, count, choices.title):
            correct_N2[indices] = correct_B2
    correct_N2 = ranks.all_reduce_sum(torch.from_numpy(correct_N2)).numpy().astype(bool)
    metrics = choices.metrics(correct_N2)
    acc, acc_norm, stderr = (metrics[f"{choices.name}_{name}"] for name in ("acc", "acc_norm", "stderr"))
    correct, correct_norm = map(item_scores.packed_bits, correct_N2.T)
    return Result(
        metrics,
        {"name": choices.name, "items": choices.sha256, "n": n, "correct": correct,
         "correct_norm": correct_norm},
        f"Acc: {100 * acc:.2f}% +- {100 * stderr:.2f} | Acc norm: {100 * acc_norm:.2f}% | N: {n} | "
        f"Chance: {100 * choices.chance:.2f}%",
        [Row(choices.title, name, share, item_scores.error_of_share(share, n), choices.chance, n)
         for name, share in (("acc", acc), ("acc_norm", acc_norm))])


@collective
def generation(run: Run) -> Result:
    """Compare generated answers to held-out prompts, gathered from all ranks, with the reference answers."""
    config, ranks, held_out, tokenizer = run.config, run.ranks, run.inputs.held_out, run.inputs.tokenizer
    order = sorted(range(len(held_out)), key=lambda index: len(held_out[index].prompt))
    batches = [order[first:first + GENERATION_BATCH] for first in range(0, len(order), GENERATION_BATCH)]
    # With a sharded model, all ranks generate every batch together.
    rank, world_size = (0, 1) if is_sharded(run.model) else (ranks.rank, ranks.world_size)
    rounds = -(-len(batches) // world_size)
    stop_ids, completions = load_chat_format(tokenizer).stop_ids, []
    with forced_eager(), packed_weights(run.model):
        for number in run.context.progress(range(rounds), rounds, "Generation"):
            local = [*batches, *[[]] * world_size][number * world_size + rank]
            prompts = [held_out[index].prompt for index in local]
            answers = generate(run.model, prompts, config.generation_eval_tokens, stop_ids=stop_ids)
            completions += zip(local, map(tokenizer.decode, answers))
    gathered = dict(pair for pairs in ranks.all_gather_json(completions) for pair in pairs)
    prompts, references = ([tokenizer.decode(ids) for ids in column] for column in zip(*held_out))
    answers = [gathered[index] for index in range(len(held_out))]
    # Score on one rank, because importing the packages takes seconds.
    metrics, scores = ranks.broadcast(ranks.on_rank0(lambda: score_texts(answers, references)))
    texts = [{"prompt": prompt, "reference": reference, "answer": answer}
             for prompt, reference, answer in zip(prompts[:RECORDED_TEXTS], references, answers)]
    line = {"name": item_scores.GENERATION, "items": json_sha256([prompts, references]), "n": len(answers),
            **scores, "texts": texts}
    percent = {name.removeprefix("generation_"): 100 * value for name, value in metrics.items()}
    summary = (f"Exact match: {percent['exact_match']:.2f}% +- {percent['exact_match_stderr']:.2f} | "
               f"ROUGE-L: {percent['rouge_l']:.2f} +- {percent['rouge_l_stderr']:.2f} | "
               f"BLEU: {percent['bleu']:.2f} | N: {len(answers)}")
    table = [Row("generation", name, metrics[f"generation_{name}"],
                 metrics.get(f"generation_{name}_stderr"), None, len(answers))
             for name in ("exact_match", *ROUGE, "bleu")]
    return Result(metrics, line, summary, table)


def score_texts(answers: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of the answers, and the scores of each answer for evaluations.jsonl.

    Exact match ignores surrounding white space. ROUGE (0 to 1) and BLEU come from rouge-score and sacrebleu
    with their defaults. ROUGE compares only lower-case Latin letters and digits, so it is 0 in other scripts;
    ROUGE-Lsum compares line by line. BLEU is computed over the whole corpus, so it has no standard error.
    Source: Lin 2004 (ROUGE); Papineni et al. 2002 (BLEU), as in Post 2018 (arXiv:1804.08771).
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    rouge, pairs = RougeScorer([*ROUGE.values()]), [*zip(answers, references)]
    exact_N = np.array([answer.strip() == reference.strip() for answer, reference in pairs])
    scores = [rouge.score(reference, answer) for answer, reference in pairs]
    rouge_N = {name: np.array([score[theirs].fmeasure for score in scores]) for name, theirs in ROUGE.items()}
    values = {"n": len(answers), "exact_match": float(exact_N.mean()),
              "exact_match_stderr": item_scores.standard_error(exact_N.astype(float)),
              **{name: float(each_N.mean()) for name, each_N in rouge_N.items()},
              "rouge_l_stderr": item_scores.standard_error(rouge_N["rouge_l"]),
              "bleu": corpus_bleu(answers, [references]).score / 100}
    return ({f"generation_{name}": value for name, value in values.items()},
            {"exact": item_scores.packed_bits(exact_N), "rouge_l": rouge_N["rouge_l"].round(4).tolist()})


def samples(model: Transformer, tokenizer, config: Config, step: int, held_out: Optional[Rows] = None
            ) -> list[tuple[str, str]]:
    """Return (prompt, completion) pairs; they depend on the step, but not on the rank.

    Without SAMPLE_PROMPTS, chats answer the first held-out prompts, if there are any.
    """
    prompts = config.sample_prompts.split("|")
    if config.training_stage == "pretrain":
        prompt_ids = [[tokenizer.document_start_id, *tokenizer.encode(prompt)] for prompt in prompts]
        stop_ids = tokenizer.stop_ids | {tokenizer.document_start_id}
    else:
        chat_format = load_chat_format(tokenizer)
        prompt_ids = [chat_format.encode_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        if held_out is not None and not config.sample_prompts:
            prompt_ids = first_prompts(held_out, HELD_OUT_SAMPLES)
            prompts = [tokenizer.decode(ids) for ids in prompt_ids]
        stop_ids = chat_format.stop_ids
    with forced_eager(), packed_weights(model):
        sampling = Sampling(config.sample_temperature, config.sample_top_p, seed=config.seed + step)
        completions = generate(model, prompt_ids, config.sample_tokens, sampling, stop_ids)
    return [(prompt, tokenizer.decode(ids)) for prompt, ids in zip(prompts, completions)]
