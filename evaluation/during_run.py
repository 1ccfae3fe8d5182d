"""Evaluation by all ranks together: validation, multiple choice, generated answers and samples."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from checkpoint.item_scores import (
    GENERATION,
    VALIDATION,
    error_of_share,
    packed_bits,
    ratio_error,
    standard_error,
)
from common.heartbeat import HEARTBEAT
from config import Config
from data_pipeline.templates import load_chat_format
from fused.head import IGNORE_INDEX
from hellaswag_utils import ChoiceSet, batches_of, evaluate_batches
from inference.engine import Sampling
from inference.generate import generate
from learn.objectives import Objective
from model import Transformer
from parallel.fsdp import is_sharded
from parallel.ranks import RunContext, collective
from run.life import Run
from run.log import evaluation_columns

ANSWERS_AT_ONCE = 16  # in one batch, whatever the number of ranks: sums of other batches round otherwise
TEXTS_KEPT = 4  # in a line of evaluations.jsonl


class Row(NamedTuple):
    """A line of the table of results."""

    name: str
    metric: str
    value: float
    stderr: Optional[float] = None
    chance: Optional[float] = None
    n: Optional[int] = None


class Result(NamedTuple):
    """What an evaluation found."""

    metrics: dict[str, float]  # as in metrics.jsonl
    line: dict[str, Any]  # item by item, for evaluations.jsonl
    summary: str  # for the console
    table: list[Row]


class Evaluation(NamedTuple):
    """An evaluation that the settings name."""

    title: str
    phase: str  # of the heartbeat
    every: int  # steps
    metric: str  # that it always finds
    measure: Callable[[], Result]  # collective


def evaluations(run: Run) -> Iterator[Evaluation]:
    """Yield the evaluations of a run, or of a model that `standalone.open_model` opened."""
    config, inputs = run.config, run.inputs
    if inputs.validation_rows is not None:
        yield Evaluation("Validation", "validation", config.validate_every, "val_loss",
                         partial(validation, run))
    for choices in inputs.choice_sets:
        phase = "HellaSwag" if choices.name == "hellaswag" else choices.name
        yield Evaluation(choices.title, phase, config.hellaswag_every, f"{choices.name}_acc",
                         partial(multiple_choice, run, choices))
    if inputs.held_out:
        yield Evaluation("Generation", "generation", config.generation_eval_every, "generation_n",
                         partial(generation, run))


def due(every: int, step: int, last: bool = False) -> bool:
    """Whether something is due after this step that is done every so many steps and at the end; 0: never."""
    return every > 0 and (step % every == 0 or last)


@collective
def evaluate(run: Run) -> None:
    """Add what is due after the last step to `progress.pending_metrics`; nothing is evaluated twice."""
    config, progress, metrics = run.config, run.progress, run.progress.pending_metrics
    for title, phase, every, metric, measure in evaluations(run):
        # All but validation take long: before the first step only if the run will do them on its way.
        worthwhile = metric == "val_loss" or progress.step > 0 or run.finished or every < config.max_steps
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
        if not math.isfinite(result.metrics.get("val_loss", 0)):
            run.log.warn(f"the validation loss after step {progress.step} is not finite, and cannot be the "
                         "best")
    if progress.step > 0 and due(config.sample_every, progress.step, run.finished):
        HEARTBEAT.enter("samples", progress.step)
        for prompt, text in samples(run.model, run.inputs.tokenizer, config, progress.step):
            run.log.sample(progress.step, prompt, text)


# ------------------------------------------------------------------------------------------ validation


@torch.no_grad()
@collective
def validation_loss(model: Transformer, objective: Objective, batches: Iterable, context: RunContext,
                    byte_lengths: Optional[Sequence[int]] = None
                    ) -> tuple[float, dict[str, float], np.ndarray]:
    """The mean loss over the batches, equally many on each rank; perplexity, bits per byte and the
    objective's metrics; and (blocks, 2): the mean loss and the units of each batch, in the order of the rows.

    Bits per byte compares models of different tokenizers: the cross-entropy of all targets in bits, divided
    by the UTF-8 bytes of their text. A control token counts no bytes, but its cross-entropy counts.

    Args:
        byte_lengths: of each token id (`Tokenizer.byte_lengths`); None: no bits per byte.
    Source: Gao et al. 2020 (arXiv:2101.00027), section 3.1, as in lm-evaluation-harness.
    """
    model.eval()
    sums, blocks, names, ranks = 0, [], [], context.ranks
    lengths_V = None if byte_lengths is None else torch.tensor(byte_lengths, device=ranks.device)
    for batch in batches:
        summed = objective.loss_sum(model, batch)
        targets_BT, nats = objective.text_loss(batch, summed)
        is_target_BT, n_bytes = targets_BT != IGNORE_INDEX, torch.zeros_like(nats)
        if lengths_V is not None:
            n_bytes = (lengths_V[targets_BT.clamp(min=0)] * is_target_BT).sum()
        names = [*summed.metrics]
        values = (objective.count(batch), summed.total, nats, is_target_BT.sum(), n_bytes,
                  *summed.metrics.values())
        values = torch.stack([value.double() for value in values])
        sums += values
        blocks.append(values[:2])
    model.train()
    count, loss, nats, targets, n_bytes, *others = ranks.all_reduce_floats(sums.tolist())
    text = {"perplexity": torch.tensor(nats / targets, dtype=torch.float64).exp().item()}
    if n_bytes:
        text["bits_per_byte"] = nats / math.log(2) / n_bytes
    metrics = text | {name: total / count for name, total in zip(names, others)}

    # The units and sums of the blocks of all ranks, without padding
    own_B2 = torch.stack(blocks)
    every_RB2 = own_B2.new_zeros(ranks.world_size, *own_B2.shape)
    every_RB2[ranks.rank] = own_B2
    units, sums = ranks.all_reduce_sum(every_RB2).cpu().reshape(-1, 2).numpy().T
    return loss / count, metrics, np.stack([sums[units > 0] / units[units > 0], units[units > 0]], axis=1)


@collective
def validation(run: Run) -> Result:
    """The validation loss with its standard error, and what comes with it."""
    config, inputs = run.config, run.inputs
    rows = min(config.validation_rows, len(inputs.validation_rows))
    per_rank = -(-rows // (config.micro_batch_size * run.ranks.world_size))
    batches = run.context.progress(inputs.validation_batches(config, run.ranks), per_rank, "Validation")
    loss, others, blocks_B2 = validation_loss(run.model, run.objective, batches, run.context,
                                              inputs.tokenizer.byte_lengths)
    losses_B, units_B = blocks_B2.T
    metrics = {"val_loss": loss, **{f"val_{name}": value for name, value in others.items()}}
    table = [Row("validation", name, value) for name, value in {"loss": loss, **others}.items()]
    table[0] = table[0]._replace(stderr=ratio_error(losses_B, units_B), n=sum(map(int, units_B)))
    error = ""
    if table[0].stderr is not None:
        metrics["val_loss_stderr"] = table[0].stderr
        error = f" +- {table[0].stderr:.4f}"
    summary = [f"Loss: {loss:.4f}{error}", *(f"{name.replace('_', ' ').capitalize()}: {value:.4f}"
                                             for name, value in others.items())]
    items = sha256_of([inputs.validation_fingerprint, rows, config.micro_batch_size, config.max_seq_len,
                       config.document_mask, config.training_stage])
    # JSON has no NaN.
    line = {"name": VALIDATION, "items": items, "n": len(blocks_B2),
            "loss": [loss if math.isfinite(loss) else None for loss in losses_B.tolist()],
            "count": [int(units) for units in units_B]}
    return Result(metrics, line, " | ".join(summary), table)


def sha256_of(value: Any) -> str:
    """The hash of a JSON-like value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------- multiple choice, and generated text


@collective
def multiple_choice(run: Run, choices: ChoiceSet) -> Result:
    """acc, acc_norm, n, the standard error of acc, and chance."""
    config, ranks, tasks, n = run.config, run.ranks, choices.tasks, len(choices.tasks)
    correct_N2 = np.zeros((n, 2), np.uint8)
    batches = evaluate_batches(run.model, tasks, rank=ranks.rank, world_size=ranks.world_size,
                               device=ranks.device, batch_tokens=config.hellaswag_batch_tokens)
    count = -(-len(batches_of(tasks, config.hellaswag_batch_tokens)) // ranks.world_size)
    with torch.compiler.set_stance("force_eager"):
        for indices, correct_B2 in run.context.progress(batches, count, choices.title):
            correct_N2[indices] = correct_B2
    correct_N2 = ranks.all_reduce_sum(torch.from_numpy(correct_N2)).numpy().astype(bool)
    metrics = choices.metrics(correct_N2)
    acc, acc_norm, stderr = (metrics[f"{choices.name}_{name}"] for name in ("acc", "acc_norm", "stderr"))
    return Result(
        metrics,
        {"name": choices.name, "items": choices.sha256, "n": n, "correct": packed_bits(correct_N2[:, 0]),
         "correct_norm": packed_bits(correct_N2[:, 1])},
        f"Acc: {100 * acc:.2f}% +- {100 * stderr:.2f} | Acc norm: {100 * acc_norm:.2f}% | N: {n} | "
        f"Chance: {100 * choices.chance:.2f}%",
        [Row(choices.title, name, share, error_of_share(share, n), choices.chance, n)
         for name, share in (("acc", acc), ("acc_norm", acc_norm))])


@collective
def generation(run: Run) -> Result:
    """How the answers to held-out prompts compare with those of the data.

    The scores are of the texts of all ranks together, so they do not depend on the number of ranks.
    """
    config, ranks, held_out, tokenizer = run.config, run.ranks, run.inputs.held_out, run.inputs.tokenizer
    order = sorted(range(len(held_out)), key=lambda index: len(held_out[index].prompt))
    batches = [order[first:first + ANSWERS_AT_ONCE] for first in range(0, len(order), ANSWERS_AT_ONCE)]
    # The ranks of a sharded model generate everything together.
    rank, world_size = (0, 1) if is_sharded(run.model) else (ranks.rank, ranks.world_size)
    rounds = -(-len(batches) // world_size)
    stop_ids, written = load_chat_format(tokenizer).stop_ids, []
    with torch.compiler.set_stance("force_eager"):
        for number in run.context.progress(range(rounds), rounds, "Generation"):
            own = [*batches, *[[]] * world_size][number * world_size + rank]
            prompts = [held_out[index].prompt for index in own]
            answers = generate(run.model, prompts, config.generation_eval_tokens, stop_ids=stop_ids)
            written += zip(own, map(tokenizer.decode, answers))
    gathered = dict(pair for pairs in ranks.all_gather_json(written) for pair in pairs)
    prompts, references = ([tokenizer.decode(ids) for ids in column] for column in zip(*held_out))
    answers = [gathered[index] for index in range(len(held_out))]
    # By one rank, because the packages take seconds to import.
    metrics, scores = ranks.broadcast(ranks.on_rank0(lambda: score_texts(answers, references)))
    texts = [{"prompt": prompt, "reference": reference, "answer": answer}
             for prompt, reference, answer in zip(prompts[:TEXTS_KEPT], references, answers)]
    line = {"name": GENERATION, "items": sha256_of([prompts, references]), "n": len(answers), **scores,
            "texts": texts}
    percent = {name.removeprefix("generation_"): 100 * value for name, value in metrics.items()}
    summary = (f"Exact match: {percent['exact_match']:.2f}% +- {percent['exact_match_stderr']:.2f} | "
               f"ROUGE-L: {percent['rouge_l']:.2f} +- {percent['rouge_l_stderr']:.2f} | "
               f"BLEU: {percent['bleu']:.2f} | N: {len(answers)}")
    table = [Row("generation", name, metrics[f"generation_{name}"],
                 metrics.get(f"generation_{name}_stderr"), None, len(answers))
             for name in ("exact_match", "rouge_l", "bleu")]
    return Result(metrics, line, summary, table)


def score_texts(answers: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of answers with one reference each, and the scores of each answer for
    evaluations.jsonl: whether it is equal but for white space at the ends, and ROUGE-L, 0 to 1.

    By rouge-score and sacrebleu with their defaults. ROUGE-L compares lower-case Latin letters and digits
    only, so in other scripts it is 0. BLEU is of all answers together, so it has no standard error.
    Source: Lin 2004 (ROUGE); Papineni et al. 2002 (BLEU), as in Post 2018 (arXiv:1804.08771).
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    rouge = RougeScorer(["rougeL"])
    exact_N = np.array([answer.strip() == wanted.strip() for answer, wanted in zip(answers, references)])
    rouge_l_N = np.array([rouge.score(wanted, answer)["rougeL"].fmeasure
                          for answer, wanted in zip(answers, references)])
    values = {"n": len(answers), "exact_match": float(exact_N.mean()),
              "exact_match_stderr": standard_error(exact_N.astype(float)), "rouge_l": float(rouge_l_N.mean()),
              "rouge_l_stderr": standard_error(rouge_l_N),
              "bleu": corpus_bleu(answers, [references]).score / 100}
    return ({f"generation_{name}": value for name, value in values.items()},
            {"exact": packed_bits(exact_N), "rouge_l": rouge_l_N.round(4).tolist()})


def samples(model: Transformer, tokenizer, config: Config, step: int) -> list[tuple[str, str]]:
    """(prompt, continuation) pairs, the same on every rank and at every call for the same step."""
    prompts = config.sample_prompts.split("|")
    if config.training_stage == "pretrain":
        prompt_ids = [[tokenizer.document_start_id, *tokenizer.encode(prompt)] for prompt in prompts]
        stop_ids = {tokenizer.eos_id, tokenizer.document_start_id}
    else:
        chat_format = load_chat_format(tokenizer)
        prompt_ids = [chat_format.encode_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        stop_ids = chat_format.stop_ids
    with torch.compiler.set_stance("force_eager"):
        sampling = Sampling(config.sample_temperature, config.sample_top_p, seed=config.seed + step)
        written = generate(model, prompt_ids, config.sample_tokens, sampling, stop_ids)
    return [(prompt, tokenizer.decode(ids)) for prompt, ids in zip(prompts, written)]
