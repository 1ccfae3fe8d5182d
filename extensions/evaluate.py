"""Evaluations that generate text: answers to held-out prompts, with ROUGE and BLEU, and samples."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Optional

import numpy as np

from checkpoint import item_scores
from common.files import json_sha256
from common.heartbeat import HEARTBEAT
from config import Config
from data_pipeline.templates import load_chat_format
from dataloaders import Rows, first_prompts
from evaluation.during_run import FURTHER, RECORDED_TEXTS, Evaluation, Result, Row, due
from extensions.inference.engine import Sampling
from extensions.inference.generate import generate
from extensions.inference.weights import packed_weights
from model import Transformer
from model_utils import forced_eager
from parallel.fsdp import is_sharded
from parallel.ranks import collective
from run.extensions import Extension
from run.life import Run

GENERATION_BATCH = 16  # fixed, because rounding depends on the batch size
HELD_OUT_SAMPLES = 2
ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "rouge_lsum": "rougeLsum"}


class Evaluate(Extension):
    """Logs samples with SAMPLE_EVERY, and compares answers with GENERATION_EVAL_EVERY."""

    @collective
    def evaluate(self, run: Run) -> dict[str, Any]:
        config, step = run.config, run.progress.step
        if step > 0 and due(config.sample_every, step, run.finished):
            HEARTBEAT.enter("samples", step)
            for prompt, text in samples(run.model, run.inputs.tokenizer, config, step,
                                        run.inputs.validation_rows):
                run.log.sample(step, prompt, text)
        return {}


def generations(run: Run) -> Iterator[Evaluation]:
    if run.inputs.held_out:
        yield Evaluation("Generation", "generation", run.config.generation_eval_every, "generation_n",
                         partial(generation, run))


EXTENSION = Evaluate
FURTHER.append(generations)


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
    with forced_eager(), nullcontext() if config.reproducible else packed_weights(run.model):
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
        # With the end of a turn: checkpoints name it as an end of texts, and a resumed run reads theirs.
        stop_ids = tokenizer.stop_ids | {tokenizer.document_start_id, tokenizer.eot_id}
    else:
        chat_format = load_chat_format(tokenizer)
        prompt_ids = [chat_format.encode_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        if held_out is not None and not config.sample_prompts:
            prompt_ids = first_prompts(held_out, HELD_OUT_SAMPLES)
            prompts = [tokenizer.decode(ids) for ids in prompt_ids]
        stop_ids = chat_format.stop_ids
    # The packed layout of a CPU rounds in another order, and sharded models have none.
    with forced_eager(), nullcontext() if config.reproducible else packed_weights(model):
        sampling = Sampling(config.sample_temperature, config.sample_top_p, seed=config.seed + step)
        completions = generate(model, prompt_ids, config.sample_tokens, sampling, stop_ids)
    return [(prompt, tokenizer.decode(ids)) for prompt, ids in zip(prompts, completions)]
