"""How long a run would take here, from a few real micro-batches; nothing is saved.

What can be checked before hours are spent (`--check`), and what a run prints at its start and end."""

import glob
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional, TypeVar

import numpy as np
import torch
from tqdm import tqdm

import lora
from checkpoint.huggingface import read_json
from checkpoint.schema import read_entries
from common.errors import CheckpointError, DataError, PaddockError, SettingsError
from common.files import existing_parent, free_bytes
from common.text import command, duration, print_safely, show
from config import PREPARED_BY, SAMPLE, Config, EvalTask, names_start, rules
from data_pipeline.mixture import describe_sources
from dataloaders import MixedRows, cache_of, parts_of
from fused.attention import choose_kernel
from hellaswag_utils import read_choice_set, read_items
from learn.cost import FLOAT32, MemoryEstimate, StepFlops, Work, estimate_memory, parameter_count
from learn.objectives import (
    PREFERENCE_OBJECTIVES,
    NextToken,
    Objective,
    answer_lengths,
    frozen_logprobs,
    reference_is_stored,
)
from learn.optim import Optimizer
from learn.teacher import find_teacher, teacher_on_meta
from lora import adapter_state_dict, add_adapters, trained_token_ids
from model import Transformer
from model_utils import (
    DTYPES,
    build_model,
    check_model,
    choose_dtype,
    clip_scale,
    compile_where_possible,
    gradient_norm,
    is_vocabulary,
    model_on_meta,
    read_model_config,
    why_not_compile,
)
from observe.phases import Phases
from parallel.ranks import Ranks
from run.diagnostics import device_name
from run.folder import has_run
from run.life import Inputs, Run, adapted_on_meta, find_start, prepare_device, read_inputs, trained_bytes
from run.start import Start
from settings.depth import TOKENS_PER_PARAMETER
from settings.load import Loaded
from tokenizer import load_tokenizer

PROBE_SECONDS = 2.0  # of micro-batches


def free_memory(device: torch.device) -> int:
    """Return the bytes that other processes leave free: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError):  # Linux only
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        return int(found[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def matmul_flops(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Return the FLOP/s of square matmuls, which a model's do not exceed by much."""
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds = [timed(device, lambda: matrix @ matrix) for _ in range(5)]
    return 2 * size**3 / min(seconds)


def timed(device: torch.device, work: Callable) -> float:
    """Call a function; return the seconds until the device has done what it asks for."""
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def seconds_per_step(config: Config, inputs: Inputs, device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of one rank's part of a step: its micro-batches and the update, with random weights.

    A teacher, and what ranks exchange, are not part of it.
    """
    ranks, config = Ranks(device=device), config.model_copy(update={"sharding": "none", "cpu_offload": False})
    model = build_model(config, inputs.tokenizer.vocab_size, ranks, dtype)
    if config.lora_enabled:
        lora.add_adapters(model, config, torch.Generator().manual_seed(config.seed))
        lora.cast_base(model, dtype)
    optimizer, objective = Optimizer(model, config), probe_objective(config, model)
    is_eager = not config.compile or compile_where_possible(model, config, device.type) is not None
    model.train()
    rows = inputs.order(config, ranks).micro_batches(0)[:8]
    batches = cycle([inputs.rows(micro_batch).to(device) for micro_batch in rows])

    def micro_batch() -> None:
        objective.loss_sum(model, next(batches)).total.backward()

    def update() -> None:
        scale = clip_scale(gradient_norm(model), config.max_grad_norm)
        optimizer.step(config.learning_rate, scale, torch.zeros((), device=device))

    with tqdm(desc="Measuring the speed", unit="micro-batch", delay=1, leave=False, disable=None) as bar:
        seconds, done = timed(device, micro_batch), 1
        if not (is_eager and seconds > PROBE_SECONDS):  # the first one compiles, and allocates memory
            timed(device, update)
            seconds, done = 0.0, 0
        while seconds < PROBE_SECONDS and done < 8:
            seconds, done = seconds + timed(device, micro_batch), done + 1
            bar.update()
        return config.accumulation_steps * seconds / done + timed(device, update)


def probe_objective(config: Config, model: Transformer) -> Objective:
    """Return an objective that costs what the run's does, apart from a teacher."""
    if config.training_stage != "dpo":
        return NextToken()
    reference = partial(frozen_logprobs, model)
    if reference_is_stored(config):
        reference = lambda batch: torch.zeros_like(answer_lengths(batch))
    return PREFERENCE_OBJECTIVES[config.preference_objective](config, reference)


T = TypeVar("T")

GIB = 2**30
TOO_LONG_SECONDS = 10  # of a micro-batch in --check
LLAMA_3_IDS = 128_256  # of the tokenizer that the presets are made for
PLANNED_ROWS = 64  # of the first step, whose padding and targets stand for all
TRIAL_STEPS = 100  # a shorter run is not meant to learn
UNDERTRAINED = 2  # tokens for each weight of the blocks' matrices, a tenth of TOKENS_PER_PARAMETER
MOST_PASSES = {"pretrain": 4, "sft": 5, "dpo": 5}  # over the data; fine-tuning usually takes one to five
# The share of a GPU's memory that a forecast may fill; the rest is for CUDA's context, nccl's buffers and
# what torch reserves beyond the forecast. It is assumed; the part `memory` of gpu_suite.py measures it.
USABLE = 0.94


def describe_model(config: Config, vocab_size: int) -> str:
    """The model's size and shape, and how it is divided."""
    divided = ""
    if config.sharding != "none":
        divided = (f"; divided over {config.ranks_per_copy} of {config.world_size} "
                   f"rank{'s' if config.world_size > 1 else ''} (SHARDING={config.sharding})"
                   f"{', in the memory of the host' if config.cpu_offload else ''}")
    return (f"{parameter_count(config, vocab_size):,} parameters: {config.n_layers} layers, dim "
            f"{config.dim}, heads {config.n_heads}/{config.n_kv_heads}, feed-forward {config.hidden_dim}, "
            f"vocabulary {vocab_size:,}{', tied' if config.tie_embeddings else ''}{divided}")


def describe_adapters(model: Transformer, tokenizer) -> str:
    """How many parameters are trained, and the rows of which tokens."""
    vocab_size, trained = tokenizer.vocab_size, adapter_state_dict(model)
    learned = sum((weight[:vocab_size] if is_vocabulary(name) else weight).numel()
                  for name, weight in trained.items())
    ids = next(iter(trained_token_ids(model).values()), [])
    control = {number: name for name, number in tokenizer.special_ids.items()}
    # Control tokens have the highest ids, and are the most interesting.
    names = [control.get(number) or repr(tokenizer.decode([number])) for number in reversed(ids)]
    shown = " ".join(names[:5]) + (" ..." if len(ids) > 5 else "")
    rows = f", including the rows of {len(ids)} tokens: {shown} (LORA_TRAIN_TOKENS)" if ids else ""
    # As PEFT counts them: what is trained is beside the base, also where it replaces rows or matrices of it.
    whole = parameter_count(model.config, vocab_size) + learned
    return f"{learned:,} trainable parameters of {whole:,} ({100 * learned / whole:.2f} %){rows}"


def describe_batch(config: Config) -> str:
    """How the global batch of a step is composed."""
    return (f"{config.total_batch_size:,} tokens a step = {config.micro_batch_size} rows x "
            f"{config.max_seq_len} tokens x {config.accumulation_steps} "
            f"micro-batch{'es' if config.accumulation_steps > 1 else ''} x {config.world_size} "
            f"rank{'s' if config.world_size > 1 else ''}; {config.max_steps:,} steps")


def describe_data(config: Config, inputs: Inputs) -> str:
    """The training data, and how often the run reads it: of a mixture as a table, a line for each source."""
    if isinstance(inputs.rows, MixedRows):
        table = describe_sources(inputs.rows.mixture, inputs.sources(config))
        return "\n".join([inputs.description, *(f"  {line}" for line in table)])
    epochs = config.max_steps * config.rows_per_step / len(inputs.rows)
    return f"{inputs.description}; the run reads them {epochs:.2f} times"


def describe_memory(forecast: MemoryEstimate) -> str:
    """The memory forecast."""
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in forecast._asdict().items()
                      if name != "host" and (value or name != "frozen"))
    host = f" and {forecast.host / GIB:.2f} of the host's memory a rank" if forecast.host else ""
    return f"about {forecast.total / GIB:.2f} GiB a device ({parts}){host}"


def describe_hardware(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """The device, and how it computes."""
    kernel, other = (choose_kernel(purpose, config, device, dtype)
                     for purpose in ("documents" if config.document_mask else "causal", "mask"))
    kernel += f" ({other} in evaluation)" if other != kernel else ""
    why_eager = why_not_compile(config, device.type) if config.compile else "COMPILE=false"
    if why_eager and config.activation_checkpointing == "selective":
        raise SettingsError("ACTIVATION_CHECKPOINTING=selective is done by the compiler, but "
                            f"{why_eager}; use block, or none")
    return (f"{device_name(device)}; {str(dtype).removeprefix('torch.')} over fp32 master weights; attention "
            f"{kernel}{', documents apart' if config.document_mask else ''}; "
            f"{f'eager ({why_eager})' if why_eager else 'compiled'}"
            f"{'; deterministic' if config.deterministic else ''}")


def print_overview(run: Run) -> None:
    """Print what a run is going to do, and with what."""
    config, info = run.config, run.log.info
    info(f"Model: {describe_model(config, run.inputs.tokenizer.vocab_size)}")
    if config.lora_enabled:
        info(f"LoRA: {describe_adapters(run.model, run.inputs.tokenizer)}")
    for line in f"Data: {describe_data(config, run.inputs)}".splitlines():
        info(line)
    if config.validate_every and run.inputs.tokenizer.byte_lengths is None:
        info("Validation: no bits per byte, because the tokenizer is not byte-level")
    info(f"Batch: {describe_batch(config)}")
    info("Hardware: "
         f"{describe_hardware(config, run.ranks.device, choose_dtype(config, run.ranks.device.type))}")
    info(f"Run: {run.folder}" + (f", resuming after step {run.progress.step}" if run.progress.step else ""))


def first_metrics(run: Run) -> dict[str, float]:
    """What the run's first evaluations found, before its last step; perhaps in an earlier process."""
    found: dict[str, float] = {}
    for name in ("val_loss", *(f"{choices.name}_acc" for choices in run.inputs.choice_sets)):
        with suppress(CheckpointError):
            entries = read_entries(run.folder / "metrics.jsonl")
            found |= next(({name: entry[name]} for entry in entries
                           if isinstance(entry.get(name), float) and entry["step"] < run.progress.step), {})
    return found


def print_summary(run: Run, phases: Phases, first_step: int, latest: dict) -> None:
    """Print the results of a finished run, where they are, and what to do next.

    Collective: every rank must call it.

    Args:
        phases: those since this process began with the step after `first_step`.
        latest: the metrics after the last step.
    """
    config, progress, info = run.config, run.progress, run.log.info
    took = f" in {duration(time.perf_counter() - phases.started)}"
    if first_step:
        took = f"; this start took {progress.step - first_step:,} of them{took}"
    info(f"Finished {progress.step:,} steps ({progress.tokens_seen:,} tokens){took}.")
    info(f"Time: {phases.describe()}.")
    before = run.ranks.broadcast(first_metrics(run) if run.ranks.is_rank0 else None)
    if "val_loss" in latest:
        since = f"from {before['val_loss']:.4f} to " if "val_loss" in before else ""
        others = "".join(f", {name} {latest[key]:.4f}" for name, key in
                         (("perplexity", "val_perplexity"), ("bits per byte", "val_bits_per_byte"))
                         if key in latest)
        if progress.best_val_loss is not None and progress.best_val_loss <= before.get("val_loss", math.inf):
            others += f"; best loss {progress.best_val_loss:.4f} at step {progress.best_step}"
        info(f"Validation loss {since}{latest['val_loss']:.4f}{others}.")
    for name, title, _, chance, _ in run.inputs.choice_sets:
        if f"{name}_acc" in latest:
            acc, acc_norm, n, stderr = (
                latest[f"{name}_{metric}"] for metric in ("acc", "acc_norm", "n", "stderr"))
            since = f"from {100 * before[f'{name}_acc']:.1f} % to " if f"{name}_acc" in before else ""
            info(f"Accuracy on {title}: {since}{100 * acc:.1f} % (+- {100 * stderr:.1f}; by length "
                 f"{100 * acc_norm:.1f} %; n = {n}; chance is {100 * chance:.3g} %).")
    form = "adapters in PEFT's format" if config.lora_enabled else "a Hugging Face model folder"
    info(f"Checkpoint ({form}): {run.saved}")
    if config.lora_enabled:
        merged = run.folder / "merged"
        info(f"Merge into base: {command('scripts/merge_lora.py', run.saved, '--output', merged)}")
    if config.training_stage == "pretrain":
        info(f"Generate text:   {command('scripts/generate.py', run.saved)}")
    else:
        info(f"Chat with it:    {command('scripts/chat.py', run.saved)}")
    if run.inputs.validation_rows or run.inputs.choice_sets or run.inputs.held_out:
        info(f"Evaluate it:     {command('scripts/evaluate.py', run.saved)}")
    script = f"scripts/load_{PREPARED_BY[config.training_stage]}_dataset.py"
    info(f"Your own data:   {command(script, '--help')}")


def provide_sample(config: Config, may_write: bool) -> None:
    """Make the sample if the settings name its files and it does not exist. Only local rank 0 does so; the
    others wait at the next collective.
    """
    named = (config.tokenizer_path, config.hellaswag_path,
             getattr(config, f"{config.training_stage}_data_path"))
    if os.path.exists(SAMPLE) or not any(path and Path(path).is_relative_to(SAMPLE) for path in named):
        return
    if not may_write:
        raise DataError(f"the embedded sample is not in {SAMPLE} yet; make it with "
                        f"{command('scripts/make_sample.py', '--folder', SAMPLE)}, as the run itself does")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        script = Path(__file__).resolve().parents[1] / "scripts" / "make_sample.py"
        if subprocess.run([sys.executable, str(script), "--folder", SAMPLE]).returncode:
            raise DataError(f"the embedded sample could not be made in {SAMPLE}; see above why")


# ----------------------------------------------------------------------------------------------- --check


class Report:
    """The list that --check prints, and the exit codes of what failed."""

    def __init__(self) -> None:
        self.exit_codes: list[int] = []

    def line(self, mark: str, name: str, text: str) -> None:
        """Print an entry."""
        for part in text.splitlines():
            show(f"  {mark:<4}  {name}: {part}")

    def run(self, name: str, check: Callable[[], tuple[T, str]], optional: bool = False) -> Optional[T]:
        """Run a check, which returns its result and the text to print; None if it raised a PaddockError.

        Args:
            optional: an error is a warning.
        """
        try:
            result, text = check()
        except PaddockError as error:
            self.exit_codes += [] if optional else [error.exit_code]
            self.line("warn" if optional else "FAIL", name, str(error))
            return None
        self.line("ok", name, text)
        return result


def check(loaded: Loaded) -> int:
    """Check everything that can be checked before the run, and print it; nothing is written.

    Returns:
        0, or the exit code of the first problem.
    """
    if os.environ.get("RANK", "0") != "0":  # one process reports for all
        return 0
    config, report = loaded.config, Report()
    report.line("ok", "settings", f"{len(loaded.sources)} given, all valid")
    for note in loaded.notes:
        report.line("ok", "settings", note)
    for warning in loaded.warnings:
        report.line("warn", "settings", warning)
    hardware = report.run("hardware", lambda: check_hardware(config))
    report.line("ok", "batch", describe_batch(config))
    tokenizer, inputs = check_inputs(loaded, report)
    if inputs:
        report.line("ok", "first row", repr(first_row(config, inputs)))
    for named in config.choice_sets:
        report.run("evaluation", lambda named=named: check_evaluation(named, config, tokenizer))
    if inputs and (reference_is_stored(config) or config.distillation_enabled and config.distillation_top_k):
        report.run("cache", lambda: check_cache(config, inputs))
    teacher = None
    if config.distillation_enabled and tokenizer:
        teacher = report.run("teacher", lambda: check_teacher(config, tokenizer))
    if start := report.run("start", lambda: check_start(loaded, inputs, report)):
        config = start.config
    vocab_size = tokenizer.vocab_size if tokenizer else loaded.is_plan and planned_vocabulary(start)
    if vocab_size and (start or not names_start(config)):  # else the model's shape is not known
        plan = report.run("model", lambda: plan_steps(config, start, inputs, vocab_size, teacher))
        if plan:
            report_length(config, plan, inputs, start, report)
        if hardware:
            report_memory(config, vocab_size, *hardware, teacher, report)
        if plan and not config.device_memory:  # of another machine, whose disk is not here either
            report.run("disk", lambda: check_disk(config, plan.checkpoint_bytes))
        if plan and inputs and hardware:
            report_speed(config, inputs, *hardware, plan, report)
    failures = len(report.exit_codes)
    if failures:
        print_safely(f"{failures} problem{'s' if failures > 1 else ''} found.", sys.stderr)
    else:
        show("Ready to train." if inputs else "The plan is complete; data or a tokenizer is missing here.")
    return report.exit_codes[0] if failures else 0


def check_hardware(config: Config) -> tuple[tuple[torch.device, torch.dtype], str]:
    """Device and compute dtype. Raises SettingsError if they, or the attention kernel, are not available.

    With DEVICE_MEMORY they are a GPU's that need not be here.
    """
    if config.device_memory:
        dtype = DTYPES.get(config.precision, torch.bfloat16)
        eager = not config.compile or config.debug
        return (torch.device("cuda"), dtype), (
            f"planned for {config.world_size} GPU{'s' if config.world_size > 1 else ''} of "
            f"{config.device_memory:g} GB (DEVICE_MEMORY), whatever is here: "
            f"{str(dtype).removeprefix('torch.')} over fp32 master weights, "
            f"{'eager' if eager else 'compiled'}")
    device = prepare_device(config)
    dtype = choose_dtype(config, device.type)
    return (device, dtype), describe_hardware(config, device, dtype)


def check_inputs(loaded: Loaded, report: Report) -> tuple[Any, Optional[Inputs]]:
    """The tokenizer and the rows, if they can be used; a plan may do without them."""
    config = loaded.config

    def is_missing(path: Optional[str]) -> bool:
        return loaded.is_plan and not (path and (os.path.exists(path) or glob.glob(path, recursive=True)))

    data_path = getattr(config, f"{config.training_stage}_data_path")
    tokenizer = inputs = None
    if config.tokenizer_path:
        optional = is_missing(config.tokenizer_path)
        tokenizer = report.run("tokenizer", lambda: check_tokenizer(config), optional)
    if tokenizer and data_path:
        inputs = report.run("data", lambda: check_data(config), is_missing(data_path))
    return tokenizer, inputs


def planned_vocabulary(start: Optional[Start]) -> int:
    """The ids of the model that a plan without a tokenizer starts from, or else of Llama 3's tokenizer."""
    if start is None or start.folder is None:
        return LLAMA_3_IDS
    return int(read_json((start.base or start.folder) / "config.json").get("vocab_size", LLAMA_3_IDS))


def check_tokenizer(config: Config) -> tuple[Any, str]:
    """The tokenizer. Raises DataError."""
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
    note = "; not byte-level, so no bits per byte are measured" if tokenizer.byte_lengths is None else ""
    return tokenizer, f"{tokenizer.vocab_size:,} ids from {config.tokenizer_path}{note}"


def check_data(config: Config) -> tuple[Inputs, str]:
    """The training and validation rows. Raises DataError."""
    inputs = read_inputs(config.model_copy(update={"hellaswag_every": 0}), verify=True)
    described, *table = describe_data(config, inputs).splitlines()
    described += "; every shard verified, all ids within the vocabulary"
    return inputs, "\n".join([described, *table])


def first_row(config: Config, inputs: Inputs, characters: int = 300) -> str:
    """The beginning of the first row, as text."""
    text = inputs.tokenizer.decode(inputs.rows(np.array([0])).tokens_BT[0].tolist())
    return text if len(text) <= characters else text[:characters] + "..."


def check_evaluation(named: EvalTask, config: Config, tokenizer) -> tuple[int, str]:
    """The number of items of a multiple-choice set. Raises DataError."""
    items = (read_choice_set(named, tokenizer, config).tasks if tokenizer
             else read_items(named.path, named.setting))
    when = f"every {config.hellaswag_every} steps"
    if not config.hellaswag_every:
        when = "never evaluated (HELLASWAG_EVERY=0)"
    return len(items), f"{len(items):,} questions ({named.title}) from {named.path}, {when}"


def check_cache(config: Config, inputs: Inputs) -> tuple[Path, str]:
    """Where results that are computed before the first step are stored. Raises DataError if nowhere."""
    for rows in parts_of(inputs.rows):
        place, why = cache_of(config).place_to_write(rows.token_set.folder, rows.fingerprint)
    of_reference = config.training_stage == "dpo"
    what = "reference's log-probabilities" if of_reference else "teacher's most likely tokens"
    return place, f"the {what} are computed once and stored in {place}{f' ({why})' if why else ''}"


def check_teacher(config: Config, tokenizer) -> tuple[Path, str]:
    """The teacher's folder. Raises CheckpointError or SettingsError if it cannot be used."""
    folder = find_teacher(config, tokenizer)
    how = "it runs beside the student"
    if config.distillation_top_k:
        how = f"its {config.distillation_top_k} most likely tokens are stored"
    return folder, f"{folder}, with the student's vocabulary; {how}"


def check_start(loaded: Loaded, inputs: Optional[Inputs], report: Report) -> tuple[Start, str]:
    """How the run would start. Raises CheckpointError if its checkpoint cannot be used."""
    config = loaded.config
    run_dir = Path(config.output_dir) / (config.run_name or f"{config.training_stage}-<date-time>")
    start = find_start(loaded, inputs, run_dir, Ranks())
    if start.state:
        start.warnings.extend(check_model(start.base if config.lora_enabled else start.folder, start.config))
    if config.resume == "never" and has_run(run_dir):
        start.warnings.append(f"RESUME=never moves the run in {run_dir} aside")
    for mark, messages in (("ok", start.notes), ("warn", start.warnings)):
        for message in messages:
            report.line(mark, "start", message)
    if start.folder is None:
        return start, f"from initial weights, into {run_dir}"
    if not start.state:
        return start, f"from the weights of {start.folder}, into {run_dir}"
    step = start.state["progress"]["step"] if start.own or config.start_step is None else config.start_step
    left = f"{max(0, config.max_steps - step):,} of {config.max_steps:,} steps are left"
    return start, f"from {start.folder}, {left}"


class StepPlan(NamedTuple):
    """What a step of all ranks computes, and what a checkpoint takes."""

    parameters: int
    needed: float  # FLOPs, without padding and recomputation
    computed: float  # FLOPs
    checkpoint_bytes: int  # weights or adapters, and their optimizer's state


def plan_steps(config: Config, start: Optional[Start], inputs: Optional[Inputs], vocab_size: int,
               teacher: Optional[Path]) -> tuple[StepPlan, str]:
    """The plan of a step, from a model without memory and the rows of the first step."""
    described, generator = describe_model(config, vocab_size), torch.Generator()
    config = config.model_copy(update={"lora_base_quantization": "none"})  # which changes neither
    model = model_on_meta(config, vocab_size, torch.float32)
    if config.lora_enabled and inputs:
        model, _ = adapted_on_meta(config, start, inputs, torch.float32, generator, Ranks())
        described += f"\nLoRA: {describe_adapters(model, inputs.tokenizer)}"
    elif config.lora_enabled:
        add_adapters(model, config, generator)  # without LORA_TRAIN_TOKENS, which depends on the data

    # The FLOPs: with the padding and targets of a few real rows.
    objective = probe_objective(config, model)
    if teacher and not config.distillation_top_k:
        objective = SimpleNamespace(teacher=teacher_on_meta(teacher, vocab_size))
    flops, size = StepFlops(config, model, objective, vocab_size, "cpu"), config.micro_batch_size
    tokens = size * config.max_seq_len
    work, rows = Work(tokens, 0, tokens, tokens if tokens > flops.chunk else 0), size
    if inputs:
        indices = inputs.order(config, Ranks()).all_rows(0)[:max(PLANNED_ROWS // size, 1) * size]
        work, rows = flops.read(map(inputs.rows, indices.reshape(-1, size))), len(indices)
    needed, computed = (sum(each) * config.rows_per_step / rows for each in flops.of(work))

    # AdamW keeps two more numbers of each weight, Muon one.
    moments = 2 * trained_bytes(model)
    if config.optimizer == "muon" and not config.lora_enabled:
        moments -= FLOAT32 * config.matrix_count
    count = parameter_count(config, vocab_size)
    return StepPlan(count, needed, computed, trained_bytes(model) + moments), described


def report_length(config: Config, plan: StepPlan, inputs: Optional[Inputs], start: Optional[Start],
                  report: Report) -> None:
    """Print the tokens and FLOPs of the run, and warn if the tokens are few or repeated too often.

    Sources: Hoffmann et al. 2022 (arXiv:2203.15556) for the tokens per parameter; Muennighoff et al. 2023
    (arXiv:2305.16264) for repeated text, of which four passes are worth nearly as much as new text.
    """
    tokens, optimal, ratio = config.max_steps * config.total_batch_size, 0, ""
    has_weights = start is not None and start.folder is not None and not (
        start.own and start.state["progress"].get("begun_from") is None)
    if config.training_stage == "pretrain" and not (config.lora_enabled or has_weights):
        ratio = (f", {tokens / plan.parameters:,.2f} per parameter (about {TOKENS_PER_PARAMETER} is "
                 "compute-optimal by Chinchilla)")
        optimal = math.ceil(TOKENS_PER_PARAMETER * plan.parameters / config.total_batch_size)
    flops = config.max_steps * plan.needed
    report.line("ok", "length", f"{tokens:,} tokens in all{ratio}; {flops:.2e} FLOPs")
    if config.max_steps < TRIAL_STEPS:  # a test of the machinery, as of the preset debug
        return
    most_passes, passes, source = MOST_PASSES[config.training_stage], 0.0, ""
    if inputs and isinstance(inputs.rows, MixedRows):
        passes, source = max((fact["passes"], f" of {fact['source']}") for fact in inputs.sources(config))
    elif inputs:
        passes = config.max_steps * config.rows_per_step / len(inputs.rows)
    most_steps = int(config.max_steps * most_passes / passes) if passes else optimal
    if optimal and tokens < UNDERTRAINED * config.matrix_count:
        advice = f"{TOKENS_PER_PARAMETER} per parameter take MAX_STEPS={optimal}"
        if optimal > most_steps:
            advice = "take more data, or a smaller model (DEPTH)"
        report.line("warn", "length", f"few tokens for a model of this size: {advice}")
    if passes > most_passes:
        report.line("warn", "length", f"the run reads the data{source} {passes:,.0f} times, and more than "
                                      f"about {most_passes} passes add little: take more data, or set "
                                      f"MAX_STEPS={max(1, most_steps)} or a smaller TOTAL_BATCH_SIZE")


def report_speed(config: Config, inputs: Inputs, device: torch.device, dtype: torch.dtype,
                 plan: StepPlan, report: Report) -> None:
    """Measure the speed, and print how long the run takes, if this machine can say so within seconds."""
    if config.device_memory or report.exit_codes:
        if config.device_memory:
            report.line("ok", "speed", "not measured, because the device of DEVICE_MEMORY is not here")
        return

    def how_long(step_seconds: float) -> str:
        minutes = config.max_steps * step_seconds / 60
        return f"about {minutes / 60:.1f} hours" if minutes >= 60 else f"about {minutes:.1f} minutes"

    vocab_size = inputs.tokenizer.vocab_size
    alone = as_computed(config, device).model_copy(update={"sharding": "none", "cpu_offload": False})
    forecast = estimate_memory(alone, vocab_size, dtype.itemsize, device.type).total
    if forecast > (free := free_memory(device)):
        report.line("warn", "speed", f"not measured: {free / GIB:.1f} GiB are free here, and the model needs "
                                     f"about {forecast / GIB:.1f}")
        return
    at_best = plan.computed / config.world_size / matmul_flops(device, dtype)
    if at_best / config.accumulation_steps > TOO_LONG_SECONDS:
        report.line("warn", "speed", "not measured: a micro-batch takes about "
                                     f"{at_best / config.accumulation_steps:.0f} s here; the whole run at "
                                     f"least {how_long(at_best)}")
        return

    def measure() -> tuple[float, str]:
        seconds = seconds_per_step(config, inputs, device, dtype)
        ranks = f", if {config.world_size} ranks scale linearly" if config.world_size > 1 else ""
        teacher = ", and without the teacher" if config.distillation_enabled else ""
        return seconds, (f"{config.total_batch_size / seconds:,.0f} tokens/s{ranks}: {how_long(seconds)} for "
                         f"{config.max_steps:,} steps, without evaluating and saving{teacher}")

    report.run("speed", measure)


def as_computed(config: Config, device: torch.device) -> Config:
    """The settings with COMPILE as it will be: off where there is no compiler, unless only planned for."""
    planned = config.device_memory and not config.debug
    if config.compile and not planned and why_not_compile(config, device.type):
        return config.model_copy(update={"compile": False})
    return config


def teacher_bytes(config: Config, folder: Optional[Path]) -> int:
    """The bytes of the weights of a teacher that runs in each step."""
    if folder is None or config.distillation_top_k:
        return 0
    described = read_json(folder / "config.json")
    stored = "fp32" if "32" in str(described.get("dtype", described.get("torch_dtype"))) else "bf16"
    precision = stored if config.teacher_precision == "auto" else config.teacher_precision
    with suppress(CheckpointError):  # it is not a Llama
        count = parameter_count(read_model_config(folder), described["vocab_size"])
        return count * DTYPES[precision].itemsize
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def report_memory(config: Config, vocab_size: int, device: torch.device, dtype: torch.dtype,
                  teacher: Optional[Path], report: Report) -> None:
    """Print the memory forecast, and what to change if it exceeds the device's memory."""
    config = as_computed(config, device)
    if config.device_memory:
        room, owner = int(config.device_memory * 1e9), f"a GPU of {config.device_memory:g} GB"
    elif device.type == "cuda":
        room, owner = int(USABLE * torch.cuda.get_device_properties(device).total_memory), "this GPU"
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // config.world_size
        owner = "this machine" + (f" for each of {config.world_size} ranks" if config.world_size > 1 else "")
    known = (vocab_size, dtype.itemsize, device.type, teacher_bytes(config, teacher))
    forecast = estimate_memory(config, *known)
    text = f"{describe_memory(forecast)}; {owner} has {room / GIB:.1f}"
    if forecast.total <= room:
        report.line("ok", "memory", text)
    else:
        report.line("warn", "memory", f"{text}. {memory_advice(config, room, *known)}")


def cheaper_in_memory(config: Config) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that need less memory for the same global batch, those that cost least first:
    smaller micro-batches, recomputation, sharding within a machine, over all ranks, and offloading.
    """
    rows_per_rank = config.rows_per_step // config.world_size
    smaller = [rows for rows in range(config.micro_batch_size, 0, -1) if rows_per_rank % rows == 0]
    recompute = dict.fromkeys((config.activation_checkpointing, "selective", "block"))
    machine = min(8, config.world_size)
    layouts = [{"sharding": config.sharding}]
    if config.sharding == "none" and machine < config.world_size:
        layouts.append({"sharding": "hybrid", "shard_degree": machine})
    if config.world_size > 1:
        layouts.append({"sharding": "full"})
    offloaded = [{**layout, "cpu_offload": True} for layout in (*layouts, {"sharding": "full"})]
    for layout, how, rows in product((*layouts, *offloaded), recompute, smaller):
        changes = {**layout, "micro_batch_size": rows, "activation_checkpointing": how}
        yield {name: value for name, value in changes.items() if value != getattr(config, name)}


def cheapest_that_fits(config: Config, room: int, *known) -> Optional[dict[str, Any]]:
    """The first of these with which the forecast fits `room` bytes, and the settings go together; or None.

    Args:
        known: the other arguments of estimate_memory.
    """
    broken = {*rules(config, start_is_read=True)}
    for changes in cheaper_in_memory(config):
        changed = config.model_copy(update=changes)
        fits = estimate_memory(changed, *known).total <= room
        if fits and {*rules(changed, start_is_read=True)} <= broken:
            return changes
    return None


def memory_advice(config: Config, room: int, *known) -> str:
    """What to change, as a sentence; the arguments are those of `cheapest_that_fits`."""
    changes = cheapest_that_fits(config, room, *known)
    if changes is None:
        return ("It would not fit with MICRO_BATCH_SIZE=1, ACTIVATION_CHECKPOINTING=block, SHARDING=full and "
                "CPU_OFFLOAD=true either: use more ranks, shorter rows (MAX_SEQ_LEN) or a smaller model")
    needed = estimate_memory(config.model_copy(update=changes), *known)
    named = " ".join(f"{name.upper()}={str(value).lower()}" for name, value in changes.items())
    host = f", and {needed.host / GIB:.2f} of the host's memory a rank" if needed.host else ""
    return (f"It would fit with {named} (about {needed.total / GIB:.2f} GiB{host}; the global batch stays "
            "the same)")


def check_disk(config: Config, size: int) -> tuple[int, str]:
    """The bytes of one checkpoint. Raises CheckpointError if there is no room for two."""
    place = (Path(config.output_dir) / (config.run_name or "") / "checkpoints").absolute()
    there = existing_parent(place)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CheckpointError(f"OUTPUT_DIR={config.output_dir} cannot be written to ({there}); set it to a "
                              "folder that can")
    free = free_bytes(there)
    saved = max(1, config.max_steps // config.save_every) if config.save_every else 1
    kept = min(saved, config.keep_last + config.keep_best + 1) if config.keep_last else saved
    text = (f"a checkpoint takes {size / GIB:.2f} GiB; {kept} at a time take {kept * size / GIB:.2f}, "
            f"and {free / GIB:.1f} are free")
    if 2 * size > free:
        raise CheckpointError(f"OUTPUT_DIR={config.output_dir}: {text}; free some, or set OUTPUT_DIR to "
                              "another disk")
    return size, text + (". KEEP_LAST should be smaller" if kept * size > free else "")
