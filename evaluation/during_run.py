"""Evaluation by all ranks together: validation, multiple choice, generated answers and samples."""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, TypeVar

import numpy as np
import torch

from checkpoint.item_scores import GENERATION, VALIDATION, packed_bits, ratio_error
from common.heartbeat import HEARTBEAT
from common.text import duration
from config import Config
from data_pipeline.templates import load_chat_format
from dataloaders import HeldOut
from fused.head import IGNORE_INDEX
from hellaswag_utils import ChoiceSet, batches_of, evaluate_batches
from inference.engine import Sampling
from inference.generate import generate
from learn.objectives import Objective
from model import Transformer
from parallel.fsdp import is_sharded
from parallel.ranks import RunContext
from run.life import Run
from run.text_scores import score_texts

PROGRESS_SECONDS = 30  # between progress lines of a long evaluation
ANSWERS_AT_ONCE = 16  # in one batch, whatever the number of ranks: sums of other batches round otherwise
TEXTS_KEPT = 4  # in a line of evaluations.jsonl

T = TypeVar("T")


class Result(NamedTuple):
    """What an evaluation found."""

    metrics: dict[str, float]  # as in metrics.jsonl
    line: dict[str, Any]  # item by item, for evaluations.jsonl


def reporting(parts: Iterable[T], count: int, title: str, log: Any) -> Iterator[T]:
    """Yield the parts; log how far a long evaluation is."""
    started = reported = time.perf_counter()
    for done, part in enumerate(parts):
        now = time.perf_counter()
        if done and now - reported > PROGRESS_SECONDS:
            left = (now - started) * (count - done) / done
            log.info(f"{title}: {done / count:.0%} | ETA: {duration(left)}")
            reported = now
        yield part


def sha256_of(value: Any) -> str:
    """The hash of a JSON-like value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------- validation


@torch.no_grad()
def validation_loss(model: Transformer, objective: Objective, batches: Iterable, context: RunContext,
                    byte_lengths: Optional[Sequence[int]] = None
                    ) -> tuple[float, dict[str, float], np.ndarray]:
    """The mean loss over the fixed validation rows; perplexity, bits per byte and the objective's metrics;
    and (blocks, 2): the mean loss and the units of each batch, in the order of the rows.

    Bits per byte compares models of different tokenizers: the cross-entropy of all targets in bits, divided
    by the UTF-8 bytes of their text. A control token counts no bytes, but its cross-entropy counts.
    Collective: every rank must call it, with equally many batches.

    Args:
        byte_lengths: of each token id (`Tokenizer.byte_lengths`); None: no bits per byte.
    Source: Gao et al. 2020 (arXiv:2101.00027), section 3.1, as in lm-evaluation-harness.
    """
    model.eval()
    sums, blocks, names = 0, [], []
    lengths_V = None if byte_lengths is None else torch.tensor(byte_lengths, device=context.ranks.device)
    for batch in batches:
        context.leave_if_stopped()
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
    count, loss, nats, targets, n_bytes, *others = context.ranks.all_reduce_floats(sums.tolist())
    text = {"perplexity": torch.tensor(nats / targets, dtype=torch.float64).exp().item()}
    if n_bytes:
        text["bits_per_byte"] = nats / math.log(2) / n_bytes
    metrics = text | {name: total / count for name, total in zip(names, others)}
    return loss / count, metrics, gather_blocks(torch.stack(blocks), context)


def gather_blocks(own_B2: torch.Tensor, context: RunContext) -> np.ndarray:
    """The mean loss and the units of every rank's blocks, given their units and sums; without padding.

    Collective: every rank must call it.
    """
    ranks = context.ranks
    every_RB2 = torch.zeros(ranks.world_size, *own_B2.shape, dtype=torch.float64, device=own_B2.device)
    every_RB2[ranks.rank] = own_B2
    units, sums = ranks.all_reduce_sum(every_RB2).cpu().reshape(-1, 2).numpy().T
    return np.stack([sums[units > 0] / units[units > 0], units[units > 0]], axis=1)


def validation(run: Run) -> Result:
    """The validation loss with its standard error, and what comes with it.

    Collective: every rank must call it.
    """
    config, inputs = run.config, run.inputs
    rows = min(config.validation_rows, len(inputs.validation_rows))
    per_rank = -(-rows // (config.micro_batch_size * run.ranks.world_size))
    batches = reporting(inputs.validation_batches(config, run.ranks), per_rank, "Validation", run.log)
    loss, others, blocks_B2 = validation_loss(run.model, run.objective, batches, run.context,
                                              inputs.tokenizer.byte_lengths)
    metrics = {"val_loss": loss, **{f"val_{name}": value for name, value in others.items()}}
    losses_B, units_B = blocks_B2.T
    if (error := ratio_error(losses_B, units_B)) is not None:
        metrics["val_loss_stderr"] = error
    items = sha256_of([inputs.validation_fingerprint, rows, config.micro_batch_size, config.max_seq_len,
                       config.document_mask, config.training_stage])
    # JSON has no NaN.
    return Result(metrics, {"name": VALIDATION, "items": items, "n": len(blocks_B2),
                            "loss": [loss if math.isfinite(loss) else None for loss in losses_B.tolist()],
                            "count": [int(units) for units in units_B]})


# -------------------------------------------------------------------- multiple choice, and generated text


def multiple_choice(run: Run, choices: ChoiceSet) -> Result:
    """acc, acc_norm, n, the standard error of acc, and chance. Collective: every rank must call it."""
    config, ranks, tasks = run.config, run.ranks, choices.tasks
    correct_N2 = np.zeros((len(tasks), 2), np.uint8)
    batches = evaluate_batches(run.model, tasks, rank=ranks.rank, world_size=ranks.world_size,
                               device=ranks.device, batch_tokens=config.hellaswag_batch_tokens)
    count = -(-len(batches_of(tasks, config.hellaswag_batch_tokens)) // ranks.world_size)
    with torch.compiler.set_stance("force_eager"):
        for indices, correct_B2 in reporting(batches, count, choices.title, run.log):
            run.context.leave_if_stopped()
            correct_N2[indices] = correct_B2
    correct_N2 = ranks.all_reduce_sum(torch.from_numpy(correct_N2)).numpy().astype(bool)
    return Result(choices.metrics(correct_N2),
                  {"name": choices.name, "items": choices.sha256, "n": len(tasks),
                   "correct": packed_bits(correct_N2[:, 0]), "correct_norm": packed_bits(correct_N2[:, 1])})


def generation(run: Run) -> Result:
    """How the answers to held-out prompts compare with those of the data.

    The scores are of the texts of all ranks together, so they do not depend on the number of ranks.
    Collective: every rank must call it.
    """
    config, ranks, held_out, tokenizer = run.config, run.ranks, run.inputs.held_out, run.inputs.tokenizer
    order = sorted(range(len(held_out)), key=lambda index: len(held_out[index].prompt))
    batches = [order[first:first + ANSWERS_AT_ONCE] for first in range(0, len(order), ANSWERS_AT_ONCE)]
    # The ranks of a sharded model generate everything together.
    rank, world_size = (0, 1) if is_sharded(run.model) else (ranks.rank, ranks.world_size)
    rounds = range(-(-len(batches) // world_size))
    stop_ids, written = load_chat_format(tokenizer).stop_ids, []
    with torch.compiler.set_stance("force_eager"):
        for number in reporting(rounds, len(rounds), "Generation", run.log):
            run.context.leave_if_stopped()
            own = [*batches, *[[]] * world_size][number * world_size + rank]
            prompts = [held_out[index].prompt for index in own]
            answers = generate(run.model, prompts, config.generation_eval_tokens, stop_ids=stop_ids)
            written += zip(own, map(tokenizer.decode, answers))
    gathered = dict(pair for pairs in ranks.all_gather_json(written) for pair in pairs)
    # By one rank, because the packages take seconds to import.
    return Result(*ranks.broadcast(ranks.on_rank0(lambda: compare(held_out, gathered, tokenizer))))


def compare(held_out: Sequence[HeldOut], written: dict[int, str], tokenizer: Any) -> Result:
    """The scores of the text that was written after each prompt."""
    prompts, references = ([tokenizer.decode(ids) for ids in column] for column in zip(*held_out))
    answers = [written[index] for index in range(len(held_out))]
    scores = score_texts(answers, references)
    texts = [{"prompt": prompt, "reference": reference, "answer": answer}
             for prompt, reference, answer in zip(prompts[:TEXTS_KEPT], references, answers)]
    return Result(scores.metrics(),
                  {"name": GENERATION, "items": sha256_of([prompts, references]), "n": len(answers),
                   "exact": packed_bits(scores.exact_N), "rouge_l": scores.rouge_l_N.round(4).tolist(),
                   "texts": texts})


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


# ------------------------------------------------------------------------------- when, and what is told


def due(every: int, step: int, last: bool = False) -> bool:
    """Whether something is due after this step that is done every so many steps and at the end; 0: never."""
    return every > 0 and (step % every == 0 or last)


def evaluate(run: Run) -> None:
    """Add what is due after the last step to `progress.pending_metrics`; nothing is evaluated twice.

    Collective: every rank must call it.

    Raises:
        Interrupted: a rank received a stop signal meanwhile.
    """
    config, progress, metrics = run.config, run.progress, run.progress.pending_metrics
    place = f"[{progress.step}/{config.max_steps}]"

    def keep(result: Result) -> dict[str, float]:
        metrics.update(result.metrics)
        run.log.evaluation(progress.step, result.line)
        return result.metrics

    if due(config.validate_every, progress.step, run.finished) and "val_loss" not in metrics:
        HEARTBEAT.enter("validation", progress.step)
        found = keep(validation(run))
        loss = found["val_loss"]
        is_best = progress.step > 0 and progress.note_validation(loss, config.early_stopping_skip_steps)
        first = run.log.history.first_val_loss
        best = " | best so far" if is_best and (first is None or loss <= first) else ""
        run.log.info(f"Validation {place} | {describe_validation(found)}{best}")
        if not math.isfinite(loss):
            run.log.warn(f"the validation loss after step {progress.step} is not finite, and cannot be a "
                         "best one")

    # The others take long: before the first step only if the run is going to do them on its way.
    def worthwhile(every: int) -> bool:
        on_its_way = progress.step > 0 or run.finished or every < config.max_steps
        return on_its_way and due(every, progress.step, run.finished)

    for choices in run.inputs.choice_sets:
        if worthwhile(config.hellaswag_every) and f"{choices.name}_acc" not in metrics:
            HEARTBEAT.enter("HellaSwag" if choices.name == "hellaswag" else choices.name, progress.step)
            found = keep(multiple_choice(run, choices))
            run.log.info(f"{choices.title} {place} | {describe_choices(choices.name, found)}")

    if worthwhile(config.generation_eval_every) and "generation_n" not in metrics:
        HEARTBEAT.enter("generation", progress.step)
        run.log.info(f"Generation {place} | {describe_generation(keep(generation(run)))}")

    if progress.step > 0 and due(config.sample_every, progress.step, run.finished):
        HEARTBEAT.enter("samples", progress.step)
        for prompt, text in samples(run.model, run.inputs.tokenizer, config, progress.step):
            run.log.sample(progress.step, prompt, text)


def describe_validation(found: dict[str, float]) -> str:
    """The result of a validation on the console."""
    error = f" +- {found['val_loss_stderr']:.4f}" if "val_loss_stderr" in found else ""
    others = "".join(f" | {name.removeprefix('val_').replace('_', ' ').capitalize()}: {value:.4f}"
                     for name, value in found.items() if name not in ("val_loss", "val_loss_stderr"))
    return f"Loss: {found['val_loss']:.4f}{error}{others}"


def describe_choices(name: str, found: dict[str, float]) -> str:
    """The result of a multiple-choice set on the console."""
    percent = {metric: 100 * found[f"{name}_{metric}"] for metric in ("acc", "acc_norm", "stderr", "chance")}
    return (f"Acc: {percent['acc']:.2f}% +- {percent['stderr']:.2f} | Acc norm: {percent['acc_norm']:.2f}% | "
            f"N: {found[f'{name}_n']} | Chance: {percent['chance']:.2f}%")


def describe_generation(found: dict[str, float]) -> str:
    """The scores of generated answers on the console."""
    percent = {name.removeprefix("generation_"): 100 * value for name, value in found.items()}
    return (f"Exact match: {percent['exact_match']:.2f}% +- {percent['exact_match_stderr']:.2f} | "
            f"ROUGE-L: {percent['rouge_l']:.2f} +- {percent['rouge_l_stderr']:.2f} | "
            f"BLEU: {percent['bleu']:.2f} | N: {found['generation_n']}")
