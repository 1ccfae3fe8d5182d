"""Distributed evaluation during a run: validation and multiple choice."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from checkpoint import schema
from common.activity import phase
from common.files import json_sha256
from dataloaders import validation_batches
from hellaswag_utils import ChoiceSet, batches_of, evaluate_batches
from learn.objectives import Objective, sums_by_item
from model import Transformer
from model_kernels.head import IGNORE_INDEX
from model_utils import forced_eager
from parallel.ranks import RunContext, collective, widened
from run.run import Run, due

CHOICE_TOKENS = 16_384  # per forward pass for multiple choice
RECORDED_TEXTS = 4  # texts per line of evaluations.jsonl
MEASURED_WITH_ERROR = ("loss", "reward_accuracy")  # validation metrics that are logged with one


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
    phase: str  # its name for the watchdog and the measurements
    every: int  # interval in steps
    metric: str  # a metric that is always present
    measure: Callable[[], Result]  # collective


# Of extensions: title, metric and collective with which another stage is validated.
VALIDATIONS: dict[str, tuple[str, str, Callable[[Run], Result]]] = {}


def evaluations(run: Run) -> Iterator[Evaluation]:
    """Yield the evaluations of a run, or of a model that `extensions.evaluate` opened."""
    config, inputs = run.config, run.inputs
    if inputs.validation_rows is not None:
        title, metric, measure = VALIDATIONS.get(config.training_stage,
                                                 ("Validation", "val_loss", validation))
        yield Evaluation(title, "validation", config.validate_every, metric, partial(measure, run))
    for choices in inputs.choice_sets:
        yield Evaluation(choices.title, choices.title, config.hellaswag_every, f"{choices.name}_acc",
                         partial(multiple_choice, run, choices))
    for extension in run.extensions:
        yield from extension.further_evaluations(run)


@collective
def evaluate(run: Run) -> None:
    """Run the evaluations that are due, once each, and add them to `progress.pending_metrics`."""
    config, progress, metrics = run.config, run.progress, run.progress.pending_metrics
    for title, name, every, metric, measure in evaluations(run):
        # Only validation is fast: run others before the first step only if the run repeats them.
        worthwhile = name == "validation" or progress.step > 0 or run.finished or every < config.max_steps
        if metric in metrics or not (worthwhile and due(every, progress.step, run.finished)):
            continue
        with phase(name):
            result = measure()
        metrics.update(result.metrics)
        run.log.append("evaluations", {"step": progress.step, **result.line})
        best = ""
        if metric == "val_loss":
            loss, items = result.metrics["val_loss"], result.line["items"]
            if progress.val_items not in ("", items):
                run.log.warn("validation is on other items than before, so its best loss starts again")
            if progress.note_validation(loss, config.early_stopping_skip_steps, items):
                best = "best, saving" if run.saves_best else "best"
        run.log.evaluation(progress.step, title, result.summary, best)
        if not math.isfinite(result.metrics.get("val_loss", 0)):
            run.log.warn(f"validation loss after step {progress.step} is not finite, so never the best")
    for extension in run.extensions:
        metrics.update(extension.evaluate(run))


@torch.no_grad()
@collective
def validation_loss(model: Transformer, objective: Objective, batches: Iterable, context: RunContext,
                    byte_lengths: Optional[Sequence[int]] = None, kind: str = "rows"
                    ) -> tuple[float, dict[str, float], dict[str, np.ndarray]]:
    """Return the mean loss, further metrics, and by item, in row order: "count", mean "loss" and metrics.

    The items are the rows, chats or pairs (`kind`) with targets. Results do not depend on the number of
    ranks; the batch size changes them only by rounding. Further metrics are perplexity, bits per byte and
    those of the objective. Bits per byte, comparable across tokenizers, is the cross-entropy of all targets
    in bits, divided by the UTF-8 bytes of their text (None: unknown). Control tokens count, with 0 bytes.
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
    batches = validation_batches(inputs.validation_rows, rows, config.micro_batch_size, ranks.device,
                                 ranks.rank, ranks.world_size)
    if prepare:  # KTO's reference point is that of all rows
        batches = prepare([*batches], run.progress.step).batches
    loss, others, by_item = validation_loss(
        run.model, run.objective, run.context.progress(batches, per_rank, "Validation"), run.context,
        inputs.tokenizer.byte_lengths, kind)
    count_N = by_item["count"]
    errors = {name: schema.ratio_error(each_N, count_N) for name, each_N in by_item.items()}
    metrics = {"val_loss": loss, **{f"val_{name}": value for name, value in others.items()}}
    logged = {name: errors[name] for name in MEASURED_WITH_ERROR if errors.get(name) is not None}
    metrics |= {f"val_{name}_stderr": error for name, error in logged.items()}
    table = [Row("validation", name, value, errors.get(name)) for name, value in
             {"loss": loss, **others}.items()]
    table[0] = table[0]._replace(n=len(count_N))
    error_of = {name: f" ± {error:.3f}" for name, error in logged.items()}
    summary = [f"{name.replace('_', ' ').capitalize()}: {value:.3f}{error_of.get(name, '')}"
               for _, name, value, *_ in table]
    items = json_sha256([inputs.validation_rows.fingerprint, rows, kind, config.max_seq_len,
                         config.document_mask, config.training_stage])
    # JSON has no NaN; seven digits are those of float32.
    shown = "answers" if kind == "pairs" and config.preference_objective == "kto" else kind
    line = {"name": schema.VALIDATION, "items": items, "kind": shown, "n": len(count_N),
            "loss": [float(f"{each:.7g}") if math.isfinite(each) else None for each in by_item["loss"]],
            "count": [round(each) for each in count_N]}
    if "reward_accuracy" in by_item:
        line["preferred"] = schema.packed_bits(by_item["reward_accuracy"] > 0)
    return Result(metrics, line, " | ".join(summary), table)


@collective
def multiple_choice(run: Run, choices: ChoiceSet) -> Result:
    """Return acc, acc_norm, n, the standard error of acc, and chance."""
    ranks, tasks, n = run.ranks, choices.tasks, len(choices.tasks)
    correct_N2 = np.zeros((n, 2), np.uint8)
    batches = evaluate_batches(run.model, tasks, rank=ranks.rank, world_size=ranks.world_size,
                               device=ranks.device, batch_tokens=CHOICE_TOKENS)
    count = -(-len(batches_of(tasks, CHOICE_TOKENS)) // ranks.world_size)
    with forced_eager():
        for indices, correct_B2 in run.context.progress(batches, count, choices.title):
            correct_N2[indices] = correct_B2
    correct_N2 = ranks.all_reduce_sum(torch.from_numpy(correct_N2)).numpy().astype(bool)
    metrics = choices.metrics(correct_N2)
    acc, acc_norm, stderr = (metrics[f"{choices.name}_{name}"] for name in ("acc", "acc_norm", "stderr"))
    correct, correct_norm = map(schema.packed_bits, correct_N2.T)
    return Result(
        metrics,
        {"name": choices.name, "items": choices.sha256, "n": n, "correct": correct,
         "correct_norm": correct_norm},
        f"Accuracy: {100 * acc:.1f} ± {100 * stderr:.1f} % | Accuracy (per character): "
        f"{100 * acc_norm:.1f} % | N: {n} | Chance: {100 * choices.chance:.1f} %",
        [Row(choices.title, name, share, schema.error_of_share(share, n), choices.chance, n)
         for name, share in (("acc", acc), ("acc_norm", acc_norm))])
