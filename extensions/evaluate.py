"""Evaluations that generate text (ROUGE, BLEU, samples), and those of a saved model, by lm-eval too."""

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from checkpoint import peft, schema, store
from checkpoint.model_json import context_length, read_model_json
from common.activity import foreign_call, phase
from common.errors import DataError, PaddockError, SettingsError, requires_package
from common.files import json_sha256, read_json
from common.text import command, pip_install, printable
from config import STAGE_OF_KIND, START_FROM, Config, path_rules
from data_pipeline.examples import LENGTH_SHIFT, TARGET
from data_pipeline.filters import words_of
from data_pipeline.mixture import is_mixture, read_mixture
from data_pipeline.shards import (
    MANIFEST,
    prepared_folder,
    read_data_manifest,
    sets_beside,
    source_of,
    split_to_validate,
)
from data_pipeline.source_files import format_of
from data_pipeline.templates import load_chat_format
from dataloaders import Rows, open_rows
from evaluation.during_run import RECORDED_TEXTS, Evaluation, Result, Row, due
from extensions.dclm_core import evaluate_core
from extensions.decide import standard_error
from extensions.inference.engine import Sampling, generate, never_sample
from extensions.inference.weights import base_of_adapters, load_for_use, merge, packed_weights
from extensions.online import Rewards
from extensions.report.numbers import number_text, without_control_tokens
from extensions.rewards import final_answer
from extensions.settings import evaluate_rules, prompts_to_answer
from learn.objectives import reference_is_live, reference_is_stored
from model import Transformer
from model_kernels.head import IGNORE_INDEX
from model_utils import choose_dtype, compile_where_possible, forced_eager
from parallel.fsdp import is_sharded
from parallel.ranks import RunContext, collective
from plan.layers import Layer
from plan.make import Plan
from plan.names import validate
from plan.starts import Start
from run.build import Base, choose_objective, with_stored_reference
from run.extensions import Extension, find, load_extensions
from run.facts import adapters_of_start, find_base, open_evaluation_inputs
from run.folder import RunFolder
from run.log import RunLog
from run.run import Inputs, Run
from tokenizer import SUPPRESSED, load_tokenizer

GENERATION_BATCH = 16  # fixed, because rounding depends on the batch size
HELD_OUT_SAMPLES = 3
ROUGE = {"rouge_1": "rouge1", "rouge_2": "rouge2", "rouge_l": "rougeL", "rouge_lsum": "rougeLsum"}
# Letters of scripts without spaces: Chinese, and Thai to Burmese, Khmer and Japanese.
HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff]")
LATIN, LETTER = re.compile("[A-Za-z]"), re.compile(r"[^\W\d_]")


class HeldOut(NamedTuple):
    """Token ids of a prompt and its answer: the last answer of a chat, or the chosen one of a pair."""

    prompt: list[int]  # with the answer's header
    answer: list[int]  # without the end of turn


class Evaluate(Extension):
    """Logs samples with SAMPLE_EVERY, and compares answers with GENERATION_EVAL_EVERY."""

    held_out: Sequence[HeldOut] = ()  # chats or pairs to answer

    @collective
    def inputs(self, config: Config, inputs: Inputs, verify: str) -> Inputs:
        if prompts_to_answer(config):
            self.held_out = read_held_out(config, inputs.tokenizer, verify)
        return inputs

    @collective
    def run_start(self, run: Run) -> None:
        if self.held_out and run.config.metric:  # refuse a bad METRIC before the first step
            run.ranks.on_rank0(lambda: check_metric(run.config, run.inputs.tokenizer, self.held_out))

    def further_evaluations(self, run: Run) -> Iterator[Evaluation]:
        if self.held_out:
            yield Evaluation("Generation", "generation", run.config.generation_eval_every, "generation_n",
                             partial(generation, run, self.held_out))

    @collective
    def evaluate(self, run: Run) -> dict[str, Any]:
        config, inputs, step = run.config, run.inputs, run.progress.step
        # Before the first step, the answers of the base, which the report shows beside the run's.
        has_base = config.training_stage != "pretrain" and any(getattr(config, name) for name in START_FROM)
        if (step > 0 or has_base) and due(config.sample_every, step, run.finished):
            held_out = inputs.validation_rows
            if held_out is None and config.training_stage == "grpo":  # its prompts have no answers to learn
                held_out = inputs.rows
            with phase("samples"):
                for sample in samples(run.model, inputs.tokenizer, config, step, held_out):
                    log_sample(run.log, step, *sample)
        return {}


def log_sample(log: RunLog, step: int, prompt: str, text: str) -> None:
    """Log generated text to samples.jsonl and the console."""
    log.append("samples", {"step": step, "prompt": prompt, "text": text})
    log.send("table", "samples", ("step", "prompt", "text"), [(step, prompt, text)], step)
    shown = without_control_tokens(prompt)
    between = " -> " if shown and log.config.training_stage != "pretrain" else ""
    line = f"Sample: {shown}{between}{text}" if text else f"Sample: {shown} (ends at once)"
    log.info(line, "\n  ".join(map(printable, line.split("\n"))))


EXTENSION = Evaluate


def read_held_out(config: Config, tokenizer, verify: str) -> list[HeldOut]:
    """Return the first held-out examples, without chats that exceed a row. One rank verifies and scores."""
    if verify != "never":
        packages = ("rouge-score", "sacrebleu")  # whose import takes seconds
        if missing := [each for each in packages if find_spec(each.replace("-", "_")) is None]:
            raise SettingsError(f"GENERATION_EVAL_EVERY needs {' and '.join(missing)}: "
                                f"{pip_install(*missing)}")
    rows, examples = open_rows(config, "validation", tokenizer, verify), []
    chat_format, prompts = load_chat_format(tokenizer), []
    with suppress(DataError):  # some templates require a system message
        prompts = [chat_format.encode_prompt([{"role": "user", "content": words}]) for words in ("Why?", "1")]
    # The tokens that prompts end in, after the end of the user's turn
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*map(reversed, prompts)))]
    header = [*takewhile(lambda token: token not in chat_format.stop_ids, shared)][::-1]
    for number, row in zip(*rows.locate(np.arange(len(rows)))):
        source = rows.sources[number]
        for example in source.examples_in(row).tolist():
            ids, segments = source.example_set.read(example)
            ends, targets = np.cumsum(segments >> LENGTH_SHIFT), np.flatnonzero(segments & TARGET)
            answer = targets[0 if source.example_set.kind == "pairs" else -1]
            start, end = ends[answer - 1:answer + 1].tolist()
            if end <= source.most:
                ids = ids[:end].tolist()
                # A template's {% generation %} may include the header, and what follows the end of the turn.
                places = range(start, min(start + len(header), end) + 1)
                start = next((place for place in places if ids[:place][-len(header):] == header), start)
                words = [*takewhile(lambda token: token not in chat_format.stop_ids, ids[start:])]
                examples.append(HeldOut(ids[:start], words))
            if len(examples) == prompts_to_answer(config):
                return examples
    if not examples:
        raise DataError("no held-out chat fits into a row; raise MAX_SEQ_LEN, or set GENERATION_EVAL_EVERY=0")
    return examples


@collective
def generation(run: Run, held_out: Sequence[HeldOut]) -> Result:
    """Compare generated answers to held-out prompts, gathered from all ranks, with the reference answers."""
    config, ranks, tokenizer = run.config, run.ranks, run.inputs.tokenizer
    order = sorted(range(len(held_out)), key=lambda index: len(held_out[index].prompt))
    batches = [order[first:first + GENERATION_BATCH] for first in range(0, len(order), GENERATION_BATCH)]
    # With a sharded model, all ranks generate every batch together.
    rank, world_size = (0, 1) if is_sharded(run.model) else (ranks.rank, ranks.world_size)
    rounds = -(-len(batches) // world_size)
    stop_ids, completions = load_chat_format(tokenizer).stop_ids, []
    never_sample(run.model, tokenizer.generation.get(SUPPRESSED, ()))
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
    final = [*map(final_answer, answers, prompts)], [*map(final_answer, references, prompts)]
    metrics, scores = ranks.on_rank0(lambda: score_texts(*final))
    user_metrics, own = [config.metric.rpartition(":")[2]] if config.metric else [], {}
    if config.metric:
        own = {"own": ranks.on_rank0(lambda: own_scores(config.metric, prompts, answers, references))}
        metrics |= {f"generation_{user_metrics[0]}": sum(own["own"]) / len(answers),
                    f"generation_{user_metrics[0]}_stderr": standard_error(np.array(own["own"]))}
    texts = [{"prompt": prompt, "reference": reference, "answer": answer}
             for prompt, reference, answer in zip(prompts[:RECORDED_TEXTS], references, answers)]
    line = {"name": schema.GENERATION, "items": json_sha256([prompts, references]), "n": len(answers),
            **scores, **own, "texts": texts}
    kind = "" if (words := bleu_tokenizer(references)) == "13a" else f" ({words})"
    shown = {"Exact match": "exact_match", "ROUGE-L": "rouge_l", f"BLEU{kind}": "bleu",
             **{name: name for name in user_metrics}}
    cells = []
    for title, name in shown.items():
        value, error = (metrics.get(f"generation_{name}{end}") for end in ("", "_stderr"))
        cells.append(f"{title}: {number_text(value, error, name not in user_metrics)}")
    summary = " | ".join([*cells[:3], f"N: {len(answers)}", *cells[3:]])
    table = [Row("generation", name, metrics[f"generation_{name}"],
                 metrics.get(f"generation_{name}_stderr"), None, len(answers))
             for name in ("exact_match", *ROUGE, "bleu", *user_metrics)]
    return Result(metrics, line, summary, table)


def score_texts(answers: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the metrics of the answers, and the scores of each answer for evaluations.jsonl.

    Both are without thoughts. Exact match ignores surrounding white space. ROUGE (0 to 1) and BLEU come from
    rouge-score and sacrebleu with their defaults, or with words of other scripts: by default, ROUGE compares
    only Latin letters and digits, and BLEU what spaces separate. ROUGE-Lsum compares line by line. BLEU is
    computed over the whole corpus, so it has no standard error.
    Source: Lin 2004 (ROUGE); Papineni et al. 2002 (BLEU), as in Post 2018 (arXiv:1804.08771).
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    tokenizers = None, SimpleNamespace(tokenize=words_of)  # of words of any script, Chinese characters as one
    rouge, pairs = [RougeScorer([*ROUGE.values()], tokenizer=words) for words in tokenizers], [
        *zip(answers, references)]
    exact_N = np.array([answer.strip() == reference.strip() for answer, reference in pairs])
    scores = [rouge[2 * count(LATIN, reference) < count(LETTER, reference)].score(reference, answer)
              for answer, reference in pairs]
    rouge_N = {name: np.array([score[kind].fmeasure for score in scores]) for name, kind in ROUGE.items()}
    values = {"n": len(answers), "exact_match": float(exact_N.mean()),
              "exact_match_stderr": standard_error(exact_N.astype(float)),
              **{name: float(each_N.mean()) for name, each_N in rouge_N.items()},
              "rouge_l_stderr": standard_error(rouge_N["rouge_l"]),
              "bleu": corpus_bleu(answers, [references], tokenize=bleu_tokenizer(references)).score / 100}
    return ({f"generation_{name}": value for name, value in values.items()},
            {"exact": schema.packed_bits(exact_N), "rouge_l": rouge_N["rouge_l"].round(4).tolist()})


def count(pattern: re.Pattern, *texts: str) -> int:
    return sum(len(pattern.findall(text)) for text in texts)


def bleu_tokenizer(references: Sequence[str]) -> str:
    """Return the name of sacrebleu's tokenizer for the script of most letters."""
    han, other = count(HAN, *references), count(UNSPACED, *references)
    if 2 * (han + other) <= count(LETTER, *references):
        return "13a"
    return "char" if 10 * other > han else "zh"


@cache
def function_of(metric: str) -> Rewards:
    """Return the function of METRIC, in a process that all evaluations share."""
    return Rewards(f"METRIC={metric}", [(metric, 1.0)])


def check_metric(config: Config, tokenizer, held_out: Sequence[HeldOut]) -> None:
    """Raise an error if METRIC cannot be imported, or reads more of a record than the reference answer."""
    prompt, record = tokenizer.decode(held_out[0].prompt), {"answer": tokenizer.decode(held_out[0].answer)}
    function_of(config.metric).check([(prompt, json.dumps(record))], "change the function")


def own_scores(metric: str, prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]
               ) -> list[float]:
    """Return the score that METRIC's function gives to each answer."""
    values = []
    for prompt, answer, reference in zip(prompts, answers, references):
        reply = function_of(metric)(prompt, answer, json.dumps({"answer": reference}))
        if isinstance(reply, str):
            raise SettingsError(f"METRIC={metric} has no score for the answer {answer[:200]!r}: {reply}; the "
                                "function gets prompt, answer and record, whose \"answer\" is the reference, "
                                "and must return a finite number")
        values.append(reply[0])
    return values


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
            prompt_ids = []
            for row in range(min(HELD_OUT_SAMPLES, len(held_out))):
                batch = held_out(np.array([row]))
                length = (batch.targets_BT[0] != IGNORE_INDEX).int().argmax() + 1  # without the first target
                prompt_ids.append(batch.tokens_BT[0, :batch.stored.get("prompt_B1", length)].tolist())
            prompts = [tokenizer.decode(ids) for ids in prompt_ids]
        stop_ids = chat_format.stop_ids
    never_sample(model, tokenizer.generation.get(SUPPRESSED, ()))
    # The packed layout of a CPU rounds in another order, and sharded models have none.
    with forced_eager(), nullcontext() if config.reproducible else packed_weights(model):
        sampling = Sampling(config.sample_temperature, config.sample_top_p, seed=config.seed + step)
        completions = generate(model, prompt_ids, config.sample_tokens, sampling, stop_ids)
    return [(prompt, tokenizer.decode(ids)) for prompt, ids in zip(prompts, completions)]


# ------------------------------------------------------------------------------------------ a saved model


def context_of(folder: Path) -> Optional[int]:
    """Return the number of tokens that a model, or the base of adapters, was made for; None if unknown."""
    with suppress(PaddockError):
        folder = folder if (folder / "config.json").is_file() else base_of_adapters(folder)
        return context_length(read_model_json(folder / "config.json"))
    return None


def settings_for(folder: Path, flags: Layer, data: Optional[str]) -> Config:
    """Return a checkpoint's settings, or the defaults for other models, changed by flags and other data."""
    saved = store.read_state(folder).get("settings", {})
    merged = {name.lower(): (value, str(folder)) for name, value in saved.items()
              if name.lower() in Config.model_fields}
    # A run's model is compiled here too, because compiled kernels round less often than eager ones.
    merged |= {"device": ("auto", ""), "activation_checkpointing": ("none", ""), "sharding": ("none", ""),
               "cpu_offload": (False, ""), "world_size": (os.environ.get("WORLD_SIZE", "1"), "environment")}
    if not saved:
        data = data or flags.values.get("validation_data_path", (None, ""))[0]
        usual = Config.model_fields["max_seq_len"].default
        merged |= {"tokenizer_path": (str(folder), ""), "compile": (False, "")}
        merged["max_seq_len"] = (min(context_of(folder) or usual, usual if data else math.inf), str(folder))
    if data is not None:
        mixed = is_mixture(data)
        first_set = read_mixture(Path(data)).sources[0].set if mixed else data
        prepared = prepared_folder(Path(first_set))
        if not prepared and format_of(data)[0]:
            raise SettingsError(f"--data {data} is not prepared; run {command('scripts/prepare.py')} with "
                                f"text, chats or pairs and {data}, and name the folder that it prints")
        stage = STAGE_OF_KIND[read_data_manifest(prepared).kind] if prepared else "pretrain"
        saved_stage = saved.get("TRAINING_STAGE")
        if stage == "dpo" != saved_stage:
            raise SettingsError(f"--data {data} contains preference pairs, whose loss depends on the "
                                "settings of a DPO run; use a DPO checkpoint, alone or after the model to "
                                f"compare it with ({command('scripts/evaluate.py')} MODEL RUN --data ...), "
                                "or text or chats")
        merged |= {"training_stage": (stage, ""), f"{stage}_data_path": (data, "--data"),
                   "validate_every": (1, ""), "validation_data_path": (None if mixed else data, "--data")}
        if stage != saved_stage:  # cross-entropy on text or chats
            merged |= {"distillation_enabled": (False, ""), "generation_eval_every": (0, ""),
                       "metric": ("", "")}
    # A set that is named is evaluated, even if the run did not.
    if merged.get("validation_data_path", (None, ""))[0]:
        merged["validate_every"] = (1, "")
    if {"hellaswag_path", "eval_tasks"} & flags.values.keys():
        merged["hellaswag_every"] = (1, "")
    if "hellaswag_path" in flags.values:  # the recorded name is that of other items
        merged["hellaswag_name"] = (Config.model_fields["hellaswag_name"].default, "")
    if "metric" in flags.values:
        merged["generation_eval_every"] = (1, "")
    config, invalid = validate(merged | flags.values)
    if problems := [*invalid.values()] or [*path_rules(config), *evaluate_rules(config)]:
        raise SettingsError(*problems)
    return config.model_copy(update={"micro_batch_size": config.micro_batch_size or config.rows_per_step})


def with_set_of_run(config: Config, folder: Path, tokenizer: Any, say: Callable[[str], None]) -> Config:
    """Return the settings with the set that a checkpoint's run read, if its path names another one now."""
    state, setting = store.read_state(folder), f"{config.training_stage}_data_path"
    saved, path = state.get("settings", {}), config.data_path
    wanted = state.get("identity", {}).get(setting.upper())
    # Flags may change the rows, and with them their identity.
    of_rows = {name: saved[name.upper()] for name in ("max_seq_len", "total_batch_size", "micro_batch_size",
                                                      "pair_truncation") if name.upper() in saved}

    def with_set(place: str) -> Optional[Config]:
        there = config.model_copy(update=of_rows | {setting: place})
        with suppress(PaddockError):  # of another tokenizer, or gone
            if open_rows(there, "train", tokenizer, "never").fingerprint == wanted:
                return config.model_copy(update={setting: place})
        return None

    is_recorded = wanted and path and saved.get(setting.upper()) == path and not config.prepare_ahead
    if not is_recorded or not source_of(Path(path)) or with_set(path):
        return config
    for place in sets_beside(path, state["identity"]["TOKENIZER_PATH"]):
        if there := with_set(place):
            say(f"{path} is another set now than the one that the run read, which is used: {place}")
            return there
    say(f"warning: {path} is not the set that the run read, which was not found in {Path(path).parent}")
    return config


def other_split(folder: Path, config: Config, tokenizer: Any) -> Optional[str]:
    """Return the set that a checkpoint's run read, if it is the evaluated one with another held-out part."""
    if config.validation_data_path or not config.data_path or not store.read_state(folder):
        return None
    try:
        own = with_set_of_run(settings_for(folder, Layer(), None), folder, tokenizer, lambda text: None)
    except PaddockError:  # of settings that are not needed here, such as a file that is gone
        return None
    if own.training_stage != config.training_stage or not own.data_path:
        return None
    theirs, ours = (read_json(Path(place) / MANIFEST) if source_of(Path(place)) else None
                    for place in (own.data_path, config.data_path))
    if theirs is None or ours is None or theirs["source"] != ours["source"]:
        return None
    fractions = [each["settings"].get("validation_fraction") for each in (theirs, ours)]
    return own.data_path if fractions[0] != fractions[1] else None


@collective
def open_model(folder: Path, config: Config, base: Optional[str], context: RunContext,
               objective_of: Optional[Path] = None) -> Run:
    """Return a model with its evaluation data, and the objective of a checkpoint, as a run without steps."""
    ranks = context.ranks
    dtype = choose_dtype(config, ranks.device.type)
    tokenizer = ranks.raise_on_all(lambda: load_tokenizer(config.tokenizer_path, config.tokenizer_backend))
    config = ranks.raise_on_all(
        lambda: with_set_of_run(config, objective_of or folder, tokenizer, context.log.info))
    if objective_of and (other := ranks.raise_on_all(lambda: other_split(folder, config, tokenizer))):
        context.log.warn(f"warning: {folder} was trained on {other}, of which another part is held out: it "
                         f"may have learned items of {config.data_path} that are evaluated here. Name a set "
                         "that neither was trained on with --data")
    model, _ = ranks.raise_on_all(
        lambda: load_for_use(folder, base, ranks.device, dtype, tokenizer, config.compile))
    if config.max_seq_len > (context_of(folder) or config.max_seq_len):
        context.log.warn(f"warning: {folder} was made for {context_of(folder):,} tokens, and is evaluated on "
                         f"up to MAX_SEQ_LEN={config.max_seq_len:,}")
    if config.data_path is None:
        config = config.model_copy(update={"validate_every": 0, "generation_eval_every": 0})
    load_extensions(config, context.log.info)  # some open rows of their own
    read = partial(open_evaluation_inputs, config, tokenizer)
    verified: list[dict[str, Any]] = []  # on rank 0, for all
    ranks.on_rank0(lambda: verified.append(read(config.verify_data)))
    measured = ranks.raise_on_all(lambda: verified[0] if verified else read("never"))
    inputs, extension = Inputs(tokenizer, None, **measured, description=""), Evaluate()
    inputs = ranks.raise_on_all(lambda: extension.inputs(
        config, inputs, config.verify_data if ranks.is_rank0 else "never"))
    for note in chain.from_iterable(choices.notes for choices in inputs.choice_sets):
        context.log.info(note)
    rows = inputs.validation_rows
    if (data := config.validation_data_path) and split_to_validate(Path(data)) == "train":
        context.log.info(f"{data} holds nothing out, so all of it is evaluated")
    if rows is not None and tokenizer.byte_lengths is None:
        context.log.info("Bits per byte are not available, because the tokenizer is not byte-level")
    if any(getattr(source, "truncated", 0) for source in (rows.sources if rows else ())):
        context.log.info(f"Held-out data: {rows.describe()}. What is cut off is not scored, and a prompt "
                         "whose answer is cut off is not answered; raise MAX_SEQ_LEN to change that")
    progress = schema.Progress(**store.read_state(folder).get("progress", {"step": 0}))
    run = Run(config, context, inputs, RunFolder(folder.resolve().parents[1]), model.eval(), None, None,
              progress, None, folder, extensions=[extension])
    origin = objective_of or folder
    if rows is not None:
        compile_where_possible(model, config, ranks.device.type)
        known = store.read_state(origin).get("progress", {})
        run_dir, adapters = origin.resolve().parents[1], {}
        if store.read_state(origin):
            adapters = adapters_of_start(Start("continue", str(origin)), config, run_dir)
        base_folder = partial(find_base, config, known, run_dir, context.log.warn)
        if reference_is_live(config):
            place = Path(ranks.on_rank0(lambda: str(base_folder())))
            base_folder = lambda: place
        if config.distillation_enabled:
            distillation = find("distillation", "TEACHER_MODEL")
            teacher = ranks.on_rank0(lambda: str(distillation.find_teacher(config, tokenizer)))
            run.plan = Plan(config, {}, identities={"teacher": {"folder": teacher}})
        base = Base(base_folder, known.get("base_sha256"), config.n_layers, adapters)
        run.objective = ranks.raise_on_all(lambda: choose_objective(run, base))
        if reference_is_stored(config):
            run.inputs = with_stored_reference(run, base)
    return run


@dataclass
class Harness:
    """Tasks of lm-evaluation-harness, or CORE, and their options, for a single process."""

    tasks: Sequence[str]
    include_path: Optional[str] = None  # folder of additional tasks
    num_fewshot: Optional[int] = None  # None: the task's default
    limit: Optional[int] = None  # items per task; None: all
    use_model_tokenizer: bool = True  # False: TOKENIZER_PATH
    core: Optional[list[dict]] = None  # tasks of CORE, evaluated instead of `tasks`

    def evaluate(self, folder: Path, base: Optional[str], config: Config,
                 device: torch.device) -> tuple[dict[str, float], list[Row]]:
        """Return the metrics `<task>_<metric>` and table rows. Adapters are merged into their base."""
        manager, simple_evaluate, model_class = self.task_classes
        from transformers import AutoModelForCausalLM
        is_checkpoint = bool(store.read_state(folder))
        with tempfile.TemporaryDirectory() as temporary:
            if (folder / peft.CONFIG_FILE).exists():
                merge(folder, Path(temporary) / "merged", base)
                folder = Path(temporary) / "merged"
            tokenizer = None
            if not self.use_model_tokenizer:
                tokenizer = tempfile.mkdtemp(dir=temporary)
                load_tokenizer(config.tokenizer_path, config.tokenizer_backend).save_huggingface(tokenizer)
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=choose_dtype(config, device.type), use_safetensors=True)
            model = model_class(loaded.to(device), tokenizer=tokenizer or str(folder),
                                batch_size=config.micro_batch_size,
                                max_length=config.max_seq_len if is_checkpoint else None)
            try:
                with foreign_call():  # the harness does not tick
                    if self.core:
                        return evaluate_core(model, self.core)
                    output = simple_evaluate(model, tasks=[*self.tasks], num_fewshot=self.num_fewshot,
                                             limit=self.limit, task_manager=manager, log_samples=False)
            except (OSError, ValueError) as error:  # what `datasets` raises
                raise DataError(f"--tasks {','.join(self.tasks)}: {error}; the first use downloads "
                                "their data from the hub") from error
        metrics, rows = {}, []
        for task, results in output["results"].items():
            for key, value in results.items():
                metric, _, filter_name = key.partition(",")
                if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                    continue
                name = metric if filter_name == "none" else f"{metric} ({filter_name})"
                stderr = results.get(f"{metric}_stderr,{filter_name}")
                stderr = stderr if isinstance(stderr, (int, float)) else None
                n = output["n-samples"].get(task, {}).get("effective")
                metrics |= {f"{task}_{name}": value, f"{task}_{name}_stderr": stderr, f"{task}_n": n}
                rows.append(Row(task, name, value, stderr, None, n))
        return metrics, rows

    @cached_property
    def task_classes(self) -> tuple[Any, Any, Any]:
        """lm_eval's task manager, evaluation function and model class. Unknown tasks raise SettingsError."""
        with requires_package("lm_eval", "--tasks"):
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        if self.core:
            return None, simple_evaluate, HFLM
        # Scanning the thousands of built-in tasks is slow.
        for include_defaults in (False, True) if self.include_path else (True,):
            manager = TaskManager(include_path=self.include_path, include_defaults=include_defaults)
            unknown = [task for task in self.tasks if not manager.match_tasks([task])]
            if not unknown:
                return manager, simple_evaluate, HFLM
        raise SettingsError(f"--tasks: lm-evaluation-harness has no task {', '.join(unknown)}; `lm_eval ls "
                            "tasks` lists its tasks, and --include-path adds a folder of tasks")
