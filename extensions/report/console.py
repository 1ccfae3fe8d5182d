"""What a run prints at its start and at its end, and its columns on a terminal."""

import math
import os
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from os.path import commonprefix
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

import lora
import model_utils
from checkpoint import store
from checkpoint.huggingface import is_vocabulary
from checkpoint.schema import REWARD, VALIDATION, read_entries
from common.activity import tick
from common.errors import DataError
from common.text import DIM, GREEN, command, counted, duration, paint, printable
from config import Config
from data_pipeline.mixture import describe_sources
from data_pipeline.prepare import read_own_json
from data_pipeline.shards import MANIFEST
from data_pipeline.templates import ChatFormat, load_chat_format
from dataloaders import Rows
from extensions.cost import parameter_count
from extensions.decide import FEWEST
from extensions.report.numbers import number_text
from learn.optim import learning_rate
from model import Transformer
from model_kernels.attention import choose_kernel
from parallel import process
from run.log import ranks_differ
from run.run import Inputs, Run

# What a terminal shows of a logged step: label, decimals (None: a share) and width of a metric.
COLUMNS = {"train_loss": ("loss", 3, 6), "reward": ("reward", 3, 6), "reward_accuracy": ("acc", None, 7),
           "reward_margin": ("margin", 2, 6), "cross_entropy": ("ce", 3, 6), "divergence": ("div", 3, 6),
           "learning_rate": ("lr", 9, 7), "grad_norm": ("|g|", 2, 5), "mfu": ("MFU", None, 7)}
SHORT = {"Validation": "val", "Perplexity": "ppl", "Bits per byte": "bits/byte",
         "Accuracy (per character)": "per character"}
COMPARED, SCANNED = 32, 1 << 26  # tokens: of the start of a document, and of a source, to compare documents
AT_ONCE = 256  # examples
MOST_PASSES = {"pretrain": 4, "sft": 5, "dpo": 5, "grpo": 100}  # over the data


def describe_model(config: Config, vocab_size: int) -> str:
    """Return the model's size, shape and sharding."""
    sharded = ""
    if config.sharding != "none":
        is_guess = config.sharding == "hybrid" and not config.shard_degree and (
            "LOCAL_WORLD_SIZE" not in os.environ)
        sharded = (f"; sharded over {config.ranks_per_copy} of "
                   f"{counted(config.world_size, 'rank')} (SHARDING={config.sharding}"
                   f"{', with 8 ranks per machine' * is_guess})"
                   f"{', in host memory' if config.cpu_offload else ''}")
    family = f"{config.model_type}, " if config.model_type != "llama" else ""
    return (f"{parameter_count(config, vocab_size):,} parameters: {family}"
            f"{counted(config.n_layers, 'layer')}, dim {config.dim}, heads {config.n_heads}/"
            f"{config.n_kv_heads}, feed-forward {config.hidden_dim}, vocabulary {vocab_size:,}"
            f"{', tied' if config.tie_embeddings else ''}{sharded}")


def trained_count(model: Transformer, vocab_size: int) -> int:
    """Return the number of trained parameters, without vocabulary padding."""
    shapes = [(min(len(weight), vocab_size), *weight.shape[1:]) if is_vocabulary(name) else weight.shape
              for name, weight in lora.adapter_state_dict(model).items()]
    return sum(map(math.prod, shapes))


def ranges(numbers: Sequence[int], most: int = 12) -> str:
    """Return ascending numbers with runs as first-last, and without all after the first `most` of these."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in runs[:most]]
    return (", ".join(shown) or "none") + f" and {len(runs) - most:,} more" * (len(runs) > most)


def describe_adapters(model: Transformer, tokenizer) -> str:
    """Return the number of trained parameters, and the tokens whose rows are trained."""
    trained = trained_count(model, tokenizer.vocab_size)
    ids = next(iter(lora.trained_token_ids(model).values()), [])
    control = {number: name for name, number in tokenizer.special_ids.items()}
    # The highest ids come first: control tokens, the most interesting ones.
    names = [control.get(number) or repr(tokenizer.decode([number])) for number in reversed(ids)]
    shown = " ".join(names[:5]) + (" ..." if len(ids) > 5 else "")
    rows = ""
    if ids:
        count = counted(len(ids), "token")
        rows = f"; LORA_TRAIN_TOKENS adds the rows of {count}: {shown} (ids {ranges(ids)})"
    if others := getattr(model, "unused_untrained_ids", []):
        rows += f"; other tokens that the base has not learned are not in the data (ids {ranges(others)})"
    # Like PEFT, count trained weights in addition to the base, even where they replace parts of it.
    whole = parameter_count(model.config, tokenizer.vocab_size) + trained
    return f"{trained:,} trainable parameters of {whole:,} ({100 * trained / whole:.2f} %){rows}"


def describe_batch(config: Config) -> str:
    """Return the composition of a step's batch."""
    return (f"{config.total_batch_size:,} tokens per step = {counted(config.micro_batch_size, 'row')} x "
            f"{counted(config.max_seq_len, 'token')} x "
            f"{counted(config.reproducible_micro_batches or config.accumulation_steps, 'micro-batch')} "
            f"{'over' if config.reproducible else 'x'} {counted(config.world_size, 'rank')}; "
            f"{counted(config.max_steps, 'step')}")


def describe_data(config: Config, inputs: Inputs) -> list[str]:
    """Return the training data and how often the run reads it, with a line for each source of a mixture.

    Further lines name what was set for the preparation of data that is prepared already, and how many
    examples of someone's own validation set are trained on, too.
    """
    asked, notes = config.validation_fraction, []
    for folder in {rows.token_set.folder: None for rows in inputs.rows.sources} if asked is not None else ():
        used = read_own_json(folder / MANIFEST).get("settings", {}).get("validation_fraction", asked)
        if used != asked:
            notes.append(f"VALIDATION_FRACTION={asked:g} has no effect on {folder}, which is prepared with "
                         f"{'its default' if used is None else f'{used:g}'}; prepare it again")
    if config.validation_data_path and inputs.validation_rows:
        count, total, noun, shared = trained_on_too(inputs)
        if count:
            notes.append(f"VALIDATION_DATA_PATH={config.validation_data_path}: {count:,} of "
                         f"{counted(total, noun)} have the {shared} of one that the run trains on, so their "
                         "loss says less about others; leave them out of one of the two sets")
    if table := inputs.rows.source_table(config.max_steps * config.rows_read):
        lines = describe_sources(inputs.rows.mixture, table)
        return [inputs.description, *(f"  {line}" for line in lines), *notes]
    is_whole = inputs.rows.mixing.is_complete  # otherwise more is being prepared
    return [inputs.description + f"; {times_read(config, inputs.rows)}" * is_whole, *notes]


def trained_on_too(inputs: Inputs) -> tuple[int, int, str, str]:
    """Return the number of held-out items that are also trained on, the number of all, their noun, and what
    they share. Documents match if one is the beginning of the other: the end of one may be held out."""
    if any(source.example_set for source in inputs.validation_rows.sources):
        header = user_header(load_chat_format(inputs.tokenizer))
        held_out = [*requests(inputs.validation_rows, header)]
        known = {*held_out}.intersection(requests(inputs.rows, header))
        return sum(request in known for request in held_out), len(held_out), "example", "prompt"
    documents, by_start = [*documents_in(inputs.validation_rows)], defaultdict(list)
    for number, ids in enumerate(documents):
        by_start[ids[:COMPARED].tobytes()].append(number)
    found = set[int]()
    for ids in documents_in(inputs.rows) if documents else ():
        for number in {*by_start.get(ids[:COMPARED].tobytes(), ())} - found:
            # Without the last token, which may be the end of a document.
            shorter, longer = sorted((len(ids), len(documents[number])))
            if longer <= 2 * shorter and np.array_equal(ids[:shorter - 1], documents[number][:shorter - 1]):
                found.add(number)
    return len(found), len(documents), "document", "text"


def documents_in(rows: Rows) -> Iterator[np.ndarray]:
    """Yield the documents among the first SCANNED tokens of each source, if these tell them apart."""
    for tokens in (source.token_set for source in rows.sources if source and not source.example_set):
        ids = tokens.read(0, min(tokens.tokens, SCANNED))
        for document in np.split(ids, np.flatnonzero(ids == tokens.document_start_id))[1:]:
            tick()
            yield document


def user_header(chat_format: ChatFormat) -> list[int]:
    """Return the tokens before a user's first words, with or without a system message before them.

    There are none if the template has no system message, or no control token there.
    """
    def prompt(user: str, **system: str) -> list[int]:
        messages = [{"role": role, "content": text} for role, text in (*system.items(), ("user", user))]
        return chat_format.encode_prompt(messages)

    try:
        chat, alone, other = prompt("b", system="a"), prompt("b"), prompt("c", system="a")
    except DataError:
        return []
    start = len(chat) - len(commonprefix([chat[::-1], alone[::-1]]))
    header = chat[start:len(commonprefix([chat, other]))]
    return header if {*header} & {*chat_format.tokenizer.special_ids.values()} else []


def requests(rows: Rows, header: list[int]) -> Iterator[bytes]:
    """Yield the tokens of each example before its first target, without its system message."""
    for examples in (source.example_set for source in rows.sources if source and source.example_set):
        begins = np.array(header, examples.tokens.shards[0].ids_dtype).tobytes()
        spans = [*zip(examples.starts.tolist(), examples.first_targets.tolist())]
        for block in (spans[first:first + AT_ONCE] for first in range(0, len(spans), AT_ONCE)):
            tick()
            origin, end = block[0][0], sum(block[-1])
            ids = examples.tokens.read(origin, end - origin)
            for opening in (ids[start - origin:][:count].tobytes() for start, count in block if count):
                yield opening[max(0, opening.find(begins)):]


def times_read(config: Config, rows: Rows) -> str:
    """Return how often a run reads its rows, and whether that is too often."""
    times, most = config.max_steps * config.rows_read / len(rows), MOST_PASSES[config.training_stage]
    if times < 0.01:
        return f"the run reads {100 * times:.1g} % of it"
    return f"the run reads it {times:,.2f} times" + f" (more than about {most} help little)" * (times > most)


def describe_hardware(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """Return the device, the dtypes, the attention kernel, and whether the model is compiled."""
    kernel, other = (choose_kernel(purpose, config, device, dtype)
                     for purpose in ("documents" if config.document_mask else "causal", "mask"))
    kernel += f" ({other} in evaluation)" if other != kernel else ""
    is_slow = dtype == torch.bfloat16 and device.type == "cpu" and not model_utils.bf16_is_fast("cpu")
    why_eager = model_utils.why_not_compile(config, device.type)
    return (f"{model_utils.device_name(device)}; {str(dtype).removeprefix('torch.')}"
            f"{', slower than fp32 on this CPU (PRECISION=auto takes fp32),' * is_slow} with "
            f"{'bf16 weights' if config.weight_dtype == 'bf16' else 'fp32 master weights'}; "
            f"attention kernel {kernel}{', document masking' if config.document_mask else ''}; "
            f"{f'eager ({why_eager})' if why_eager else 'compiled'}"
            f"{'; deterministic' if config.deterministic else ''}")


def print_overview(run: Run) -> None:
    """Print the model, data, batch, hardware and folder of a run."""
    config, info, device = run.config, run.log.info, run.ranks.device
    info(f"Model: {describe_model(config, run.inputs.tokenizer.vocab_size)}")
    if config.lora_enabled:
        info(f"LoRA: {describe_adapters(run.model, run.inputs.tokenizer)}")
    first, *table = describe_data(config, run.inputs)
    for line in (f"Data: {first}", *table):
        info(line)
    if config.validate_every and run.inputs.tokenizer.byte_lengths is None:
        info("Validation: bits per byte are not available, because the tokenizer is not byte-level")
    for note in chain.from_iterable(choices.notes for choices in run.inputs.choice_sets):
        info(f"Evaluation: {note}")
    info(f"Batch: {describe_batch(config)}")
    info(f"Hardware: {describe_hardware(config, device, model_utils.choose_dtype(config, device.type))}")
    info(f"Run: {run.folder}" + (f", resuming after step {run.progress.step}" if run.progress.step else ""))
    if run.inputs.validation_rows is not None or run.inputs.choice_sets:
        info("Results: ± is one standard error, over the evaluated items")


def result_line(run: Run, started: float, first: int) -> str:
    """Return the results of a process that `started` then, after `first` steps, on one line."""
    config, progress = run.config, run.progress
    latest = run.log.latest if run.log.latest.get("step") == progress.step else {}
    since = f" since step {first:,}" if first else ""
    results = [f"in {duration(time.perf_counter() - started)}{since}"]
    if skipped := progress.skipped_steps:
        reached, planned = (learning_rate(count - 1, config) for count in (progress.updates, progress.step))
        run.log.info(f"Skipped: {skipped:,} of {counted(progress.step, 'step')} changed no weights "
                     "(loss spikes or fp16 overflows; \"updated\": false in ledger.jsonl). They do not "
                     "advance the schedule: "
                     f"the last learning rate was {reached:.3g}; without them it would be {planned:.3g}.")

    # Compare the last evaluations with the first ones of the same items, perhaps by an earlier process.
    titles = {"val_loss": "loss", "val_reward": "reward", "val_reward_accuracy": "preference accuracy",
              **{f"{choices.name}_acc": choices.title for choices in run.inputs.choice_sets}}
    before, items, since_step, numbers = {}, {}, Counter[str](), {}
    for line in read_entries(run.folder / "evaluations.jsonl"):
        numbers[line["name"]] = line["n"]
        if items.setdefault(line["name"], line["items"]) != line["items"]:
            items[line["name"]], since_step[line["name"]] = line["items"], line["step"]
    evaluation_of = {"val_loss": VALIDATION, "val_reward": REWARD, "val_reward_accuracy": VALIDATION}
    for line in read_entries(run.folder / "metrics.jsonl"):
        if line["step"] >= progress.step or latest.keys() & titles.keys() <= before.keys():
            break
        before |= {name: line[name] for name in titles.keys() & line.keys() - before.keys()
                   if line[name] is not None
                   and line["step"] >= since_step[evaluation_of.get(name, name.removesuffix("_acc"))]}
    for name, title in titles.items():
        if name not in latest:
            continue
        is_share, error = name.endswith(("acc", "accuracy")), f"{name.removesuffix('_acc')}_stderr"
        number = numbers.get(evaluation_of.get(name, name.removesuffix("_acc")), FEWEST)
        few = f" (n = {number})" * (number < FEWEST)  # too few items for an error
        since = f"{number_text(before[name], None, is_share)} to " if name in before else ""
        if name == "val_reward_accuracy" and before.get(name) == 0:  # the reference, which prefers no answer
            since = "from chance (50.0 %) to "
        error_value = None if few else latest.get(error)
        results.append(f"{title} {since}{number_text(latest[name], error_value, is_share)}{few}")
        if name == "val_loss" and progress.best_val_loss and 0 < progress.best_step < progress.step:
            results[-1] += f", best {number_text(progress.best_val_loss)} at step {progress.best_step}"
    return ", ".join([*(results[1:] or [counted(progress.step, "step")]), results[0]])


def ending(run: Run, result: str) -> list[str]:
    """Return the last lines: the result, and commands for the report, use and resuming."""
    config, folder, progress, flags = run.config, run.folder, run.progress, ["--run-name", run.folder.name]
    if folder.absolute().parent != Path(Config.model_fields["output_dir"].default).absolute():
        flags += ["--output-dir", folder.parent]
    if config.resume != "auto":
        flags += ["--resume", "auto"]
    is_longer = True  # than the run, as long as more passes over the data help
    if progress.step >= config.max_steps:
        length, rows = "epochs" if config.epochs else "max_steps", run.inputs.rows
        longer = 2 * getattr(config, length)
        if longer and rows.mixing.is_complete:
            passes = 2 * config.max_steps * config.rows_read / len(rows)
            longer *= min(1, MOST_PASSES[config.training_stage] / passes)
        longer = longer if longer < 1 else int(longer)
        is_longer = longer > getattr(config, length)
        flags += [f"--{length.replace('_', '-')}", str(longer)]
    script = "scripts/generate.py" if config.training_stage == "pretrain" else "scripts/chat.py"
    # Past an optimum, commands use RUN:best, if it is kept.
    is_past = run.is_past_best or (run.finished and progress.step < config.max_steps)
    is_kept = config.keep_best > 0 < config.save_every and progress.best_step not in (0, progress.step)
    is_best = is_past and is_kept
    target = folder.with_name(f"{folder.name}{store.BEST}") if is_best else folder
    if config.max_steps and not (is_longer or is_past):
        result += f"; more than about {MOST_PASSES[config.training_stage]} passes over the data help little"
    lines = {"result": printable(result), "report": command("scripts/report.py", folder),
             "use it": command(script, target)}
    if is_longer and not (is_best and run.finished):  # past an optimum, more steps do not help
        lines["resume"] = how_to_start(run.ranks.world_size, flags)
    dtype = run.model.source.dtype if run.model.source else None
    if dtype not in (None, "float32") and not (config.lora_enabled or config.weight_dtype == "bf16"):
        lines["export"] = (command("scripts/export.py", folder, "--to", "hf", "--output", "FOLDER")
                           + f"  ({dtype}, as the base; checkpoints are float32, to resume exactly)")
    return [f"{name}   {line}" for name, line in lines.items()]


def how_to_start(world_size: int, flags: Sequence[str | Path]) -> str:
    """Return how this job is started again with flags: a command, or words if its other flags are unknown."""
    are_several, program = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size, ""
    if are_several and "SLURM_JOB_ID" in os.environ:
        is_named = "RUN_NAME" in os.environ  # by slurm.sh, after the job
        added = shlex.join(map(str, flags[2 * is_named:]))  # --run-name comes first
        return f"the same sbatch command{f', with {added}' * bool(added)}"
    if world_size > 1 and process.LAUNCHER_PID not in os.environ:
        program = "torchrun "
    elif not are_several:
        usual = torch.cuda.device_count() or 1
        return f"NPROC={world_size} " * (world_size != usual) + command("scripts/run.py", *flags)
    return f"the same {program}command{' on each machine' * are_several}, with {shlex.join(map(str, flags))}"


def fixed(value: float, decimals: Optional[int], width: int) -> str:
    """Return a number in a column, with an exponent if it has no place or only zeros otherwise."""
    if decimals is None:
        return f"{number_text(value, None, True):<{width}}"
    text = f"{value:.{decimals}f}"
    if len(text) > width or value and not float(text):
        text = f"{value:.{max(0, width - 6 - (value < 0))}e}"
    return f"{text:<{width}}"


def cells_line(cells: Mapping[str, str]) -> str:
    """Return cells by their labels as a line for a terminal."""
    painted = (cell.replace(label, paint(label, DIM, sys.stdout), 1) for label, cell in cells.items())
    return f"  {'  '.join(painted)}".rstrip()


def step_columns(step: int, max_steps: int, metrics: Mapping[str, Any], seconds_left: float, room: int
                 ) -> str:
    """Return a logged step as a line for a terminal: columns of fixed widths, as many as have room."""
    speed, left = metrics["tokens_per_second"], duration(seconds_left)
    unit, scale = ("", 1) if speed < 9_999.5 else ("k", 1e3) if speed < 999_500 else ("M", 1e6)
    size = f"{speed / scale:,.{int(unit != '' and speed < 99.95 * scale)}f}{unit}"
    cells = {"/": f"{step:>{len(str(max_steps))}}/{max_steps}"}
    cells |= {label: f"{label} {fixed(metrics[name], decimals, width)}"
              for name, (label, decimals, width) in COLUMNS.items() if name in metrics}
    cells |= {"tok/s": f"{size:>5} tok/s", "left": f"{left} left".ljust(len("59 min 59 s left"))}
    if ranks_differ(metrics):
        cells["slowest"] = (f"slowest rank {metrics['slowest_rank']}, "
                            f"{metrics['slowest_rank_seconds'] / metrics['fastest_rank_seconds']:.2f}x")
    for label in ("slowest", "lr", "MFU", "|g|", "ce", "margin"):  # least needed first
        if sum(2 + len(cell) for cell in cells.values()) > room:
            cells.pop(label, None)
    return cells_line(cells)


def evaluation_columns(step: int, max_steps: int, title: str, summary: str, best: str = "") -> str:
    """Return an evaluation as a line for a terminal, from its summary `Name: value | Name: value`."""
    cells = {"/": f"{step:>{len(str(max_steps))}}/{max_steps}"}
    for cell in (printable(title), *summary.split(" | ")):
        name, _, value = cell.partition(": ")
        label = SHORT.get(name, name.lower() if value else name)
        cells[label] = f"{label} {value}".rstrip()
    return cells_line(cells) + f"  {paint(best, GREEN, sys.stdout)}" * bool(best)
