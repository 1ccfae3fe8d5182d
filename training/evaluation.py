"""Evaluation during training, by all ranks together: validation, HellaSwag, generated samples."""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Optional

import torch

from common.heartbeat import HEARTBEAT
from common.text import duration
from config import Config
from data_pipeline.chat_templates import load_chat_format
from fused.chunked_head import IGNORE_INDEX
from hellaswag_utils import Counts, evaluate_batches
from model import Transformer
from objectives.base import Objective
from parallel.collectives import RunContext
from training.generate import Sampling, generate
from training.state import Run

PROGRESS_SECONDS = 30  # between progress lines of a long evaluation


@torch.no_grad()
def validation_loss(model: Transformer, objective: Objective, batches: Iterable, context: RunContext,
                    byte_lengths: Optional[Sequence[int]] = None) -> tuple[float, dict[str, float]]:
    """The mean loss over the fixed validation rows; perplexity, bits per byte and the objective's metrics.

    Bits per byte compares models of different tokenizers: the cross-entropy of all targets in bits, divided
    by the UTF-8 bytes of their text. A control token counts no bytes, but its cross-entropy counts.
    Collective: every rank must call it, with equally many batches.

    Args:
        byte_lengths: of each token id (`Tokenizer.byte_lengths`); None: no bits per byte.
    Source: Gao et al. 2020 (arXiv:2101.00027), section 3.1, as in lm-evaluation-harness.
    """
    model.eval()
    sums, names = 0, []
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
        sums += torch.stack([value.double() for value in values])
    model.train()
    count, loss, nats, targets, n_bytes, *others = context.ranks.all_reduce_floats(sums.tolist())
    text = {"perplexity": torch.tensor(nats / targets, dtype=torch.float64).exp().item()}
    if n_bytes:
        text["bits_per_byte"] = nats / math.log(2) / n_bytes
    return loss / count, text | {name: total / count for name, total in zip(names, others)}


def hellaswag(run: Run) -> dict[str, float]:
    """acc, acc_norm, n and the standard error of acc. Collective: every rank must call it."""
    config, ranks, tasks, counts = run.config, run.ranks, run.inputs.tasks, Counts()
    started = reported = time.perf_counter()
    with torch.compiler.set_stance("force_eager"):
        for part in evaluate_batches(run.model, tasks, rank=ranks.rank, world_size=ranks.world_size,
                                     device=ranks.device, batch_tokens=config.hellaswag_batch_tokens):
            run.context.leave_if_stopped()
            counts += part
            now, share = time.perf_counter(), counts.n * ranks.world_size / len(tasks)
            if now - reported > PROGRESS_SECONDS and 0 < share < 1:
                run.log.info(f"{config.hellaswag_name}: {share:.0%} of {len(tasks):,} items | "
                             f"ETA: {duration((now - started) * (1 - share) / share)}")
                reported = now
    counts = Counts(*(int(value) for value in ranks.all_reduce_floats(list(counts))))
    return {"hellaswag_acc": counts.accuracy, "hellaswag_acc_norm": counts.accuracy_norm,
            "hellaswag_n": counts.n, "hellaswag_stderr": counts.standard_error}


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
    if due(config.validate_every, progress.step, run.finished) and "val_loss" not in metrics:
        HEARTBEAT.enter("validation", progress.step)
        batches = run.inputs.validation_batches(config, run.ranks)
        loss, others = validation_loss(run.model, run.objective, batches, run.context,
                                       run.inputs.tokenizer.byte_lengths)
        metrics |= {"val_loss": loss, **{f"val_{name}": value for name, value in others.items()}}
        is_best = progress.step > 0 and progress.note_validation(loss, config.early_stopping_skip_steps)
        shown = "".join(f" | {name.replace('_', ' ').capitalize()}: {value:.4f}"
                        for name, value in others.items())
        run.log.info(f"Validation {place} | Loss: {loss:.4f}{shown}{' | best so far' if is_best else ''}")
        if not math.isfinite(loss):
            run.log.warn(f"the validation loss after step {progress.step} is not finite, and cannot be a "
                         "best one")

    # HellaSwag takes long: before the first step only if the run is going to evaluate it on its way.
    worthwhile = progress.step > 0 or run.finished or config.hellaswag_every < config.max_steps
    if run.inputs.tasks and worthwhile and due(config.hellaswag_every, progress.step, run.finished):
        HEARTBEAT.enter("HellaSwag", progress.step)
        metrics |= hellaswag(run)
        run.log.info(f"{config.hellaswag_name} {place} | Acc: {100 * metrics['hellaswag_acc']:.2f}% +- "
                     f"{100 * metrics['hellaswag_stderr']:.2f} | Acc norm: "
                     f"{100 * metrics['hellaswag_acc_norm']:.2f}% | N: {metrics['hellaswag_n']}")

    if progress.step > 0 and due(config.sample_every, progress.step, run.finished):
        HEARTBEAT.enter("samples", progress.step)
        for prompt, text in samples(run.model, run.inputs.tokenizer, config, progress.step):
            run.log.sample(progress.step, prompt, text)
