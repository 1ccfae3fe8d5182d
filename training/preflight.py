"""What can be known before hours are spent (`--check`), what is announced at the start, and the last words."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, TypeVar

import numpy as np
import torch

from common.errors import CheckpointError, PaddockError, SettingsError
from common.text import duration, print_safely, show
from config import PREPARED_BY, Config
from dataloaders import cache_of
from fused.attention import choose_kernel
from hellaswag_utils import prepare_tasks, read_items
from lora import trained_token_ids
from model import Transformer
from model_utils import check_model, choose_device, choose_dtype, make_deterministic, why_not_compile
from objectives.preference import reference_is_stored
from objectives.teacher import find_teacher
from parallel.collectives import Ranks
from settings.load import Loaded
from tokenizer import load_tokenizer
from training.memory_estimate import FLOAT32, MemoryEstimate, estimate_memory, parameter_count
from training.run_folder import has_run
from training.start import find_checkpoint, start_at
from training.state import Inputs, Run, read_inputs

T = TypeVar("T")

GIB = 2**30


def describe_model(config: Config, vocab_size: int) -> str:
    """The model's size and shape in words."""
    return (f"{parameter_count(config, vocab_size):,} parameters: {config.n_layers} layers, dim {config.dim}, "
            f"heads {config.n_heads}/{config.n_kv_heads}, feed-forward {config.hidden_dim}, vocabulary {vocab_size:,}"
            f"{', tied' if config.tie_embeddings else ''}")


def describe_adapters(model: Transformer, tokenizer) -> str:
    """How much of a model learns, and the rows of which tokens, in words."""
    learned = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    ids = next(iter(trained_token_ids(model).values()), [])
    control = {number: name for name, number in tokenizer.special_ids.items()}
    names = [control.get(number) or repr(tokenizer.decode([number])) for number in reversed(ids)]  # control tokens stand last
    shown = " ".join(names[:5]) + (" ..." if len(ids) > 5 else "")
    rows = f", the rows of {len(ids)} tokens among them: {shown} (LORA_TRAIN_TOKENS)" if ids else ""
    return f"{learned:,} parameters learn beside the frozen base{rows}"


def describe_batch(config: Config) -> str:
    """How a step is put together, in words."""
    return (f"{config.total_batch_size:,} tokens a step = {config.micro_batch_size} rows x {config.max_seq_len} tokens x "
            f"{config.accumulation_steps} micro-batch{'es' if config.accumulation_steps > 1 else ''} x "
            f"{config.world_size} rank{'s' if config.world_size > 1 else ''}; "
            f"{config.max_steps:,} steps")


def describe_data(config: Config, inputs: Inputs) -> str:
    """What is learned from, and how often, in words."""
    epochs = config.max_steps * config.rows_per_step / len(inputs.rows)
    return f"{inputs.description}; the run reads them {epochs:.2f} times"


def describe_memory(forecast: MemoryEstimate) -> str:
    """The forecast of memory in words."""
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in forecast._asdict().items())
    return f"about {forecast.total / GIB:.2f} GiB a device ({parts})"


def describe_hardware(config: Config, device: torch.device, dtype: torch.dtype) -> str:
    """What computes, and how, in words. Raises SettingsError where ATTENTION_BACKEND, or selective
    checkpointing, is not to be had."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    kernel, other = (choose_kernel(purpose, config, device, dtype)
                     for purpose in ("documents" if config.document_mask else "causal", "mask"))
    kernel += f" ({other} in evaluation)" if other != kernel else ""
    why_eager = why_not_compile(config, device.type) if config.compile else "COMPILE=false"
    if why_eager and config.activation_checkpointing == "selective":
        raise SettingsError(f"ACTIVATION_CHECKPOINTING=selective is done by the compiler, but {why_eager}; use block, or none")
    return (f"{name}; {str(dtype).removeprefix('torch.')} over fp32 master weights; attention {kernel}"
            f"{', documents apart' if config.document_mask else ''}; {f'eager ({why_eager})' if why_eager else 'compiled'}"
            f"{'; deterministic' if config.deterministic else ''}")


def announce(run: Run, dtype: torch.dtype) -> None:
    """The first words of a run: what it will do, with what."""
    config, info = run.config, run.log.info
    info(f"Model: {describe_model(config, run.inputs.tokenizer.vocab_size)}")
    if config.lora_enabled:
        info(f"LoRA: {describe_adapters(run.model, run.inputs.tokenizer)}")
    info(f"Data: {describe_data(config, run.inputs)}")
    info(f"Batch: {describe_batch(config)}")
    info(f"Hardware: {describe_hardware(config, run.ranks.device, dtype)}")
    info(f"Run: {run.folder}" + (f", going on after step {run.progress.step}" if run.progress.step else ""))


def print_summary(run: Run, folder: Path, seconds: float, baseline: dict, reached: dict) -> None:
    """The last words of a run: what was reached, where it is, and what could be next."""
    config, progress, info = run.config, run.progress, run.log.info
    info(f"Finished {progress.step:,} steps ({progress.tokens_seen:,} tokens) in {duration(seconds)}.")
    if "val_loss" in reached:
        best = "" if progress.best_val_loss is None else f", best {progress.best_val_loss:.4f} at step {progress.best_step}"
        info(f"Validation loss {reached['val_loss']:.4f}{best}.")
    if "hellaswag_acc" in reached:
        before = f"from {100 * baseline['hellaswag_acc']:.1f} % " if "hellaswag_acc" in baseline else ""
        info(f"Accuracy on {config.hellaswag_name}: {before}to {100 * reached['hellaswag_acc']:.1f} % "
            f"(+- {100 * reached['hellaswag_stderr']:.1f}; by length {100 * reached['hellaswag_acc_norm']:.1f} %; "
            f"n = {reached['hellaswag_n']}; chance is 25 %).")
    info(f"Checkpoint ({'adapters, as PEFT loads them' if config.lora_enabled else 'a Hugging Face model folder'}): {folder}")
    if config.lora_enabled:
        info(f"Merge into base: python scripts/merge_lora.py {folder} --output FOLDER")
    else:
        talk = "Write" if config.training_stage == "pretrain" else "Talk "
        chat = "" if config.training_stage == "pretrain" else ' --chat --prompt "..."'
        info(f"{talk} with it:   python scripts/generate.py {folder}{chat}")
    info(f"Your own data:   python scripts/load_{PREPARED_BY[config.training_stage]}_dataset.py --help")
    info("On more GPUs:    python scripts/launch.py --nproc-per-node N")


class Report:
    """The list that --check prints while it grows, and the exit codes of what failed."""

    def __init__(self) -> None:
        self.exit_codes: list[int] = []

    def tell(self, mark: str, name: str, text: str) -> None:
        """One line, or several of one name."""
        for part in text.splitlines():
            show(f"  {mark:<4}  {name}: {part}")

    def ask(self, name: str, question: Callable[[], tuple[T, str]]) -> Optional[T]:
        """The answer to a question, whose second half is told; None where a PaddockError came instead."""
        try:
            answer, text = question()
        except PaddockError as error:
            self.exit_codes.append(error.exit_code)
            self.tell("FAIL", name, str(error))
            return None
        self.tell("ok", name, text)
        return answer


def check(loaded: Loaded) -> int:
    """Print everything that can be known before the run, and whether it can start; nothing is written.

    Returns:
        0, or the exit code of the first thing that stands in the way.
    """
    if os.environ.get("RANK", "0") != "0":  # one of torchrun's processes speaks for all
        return 0
    config, report = loaded.config, Report()
    report.tell("ok", "settings", f"{len(loaded.sources)} given, all valid")
    for note in loaded.notes:
        report.tell("ok", "settings", note)
    for warning in loaded.warnings:
        report.tell("warn", "settings", warning)
    hardware = report.ask("hardware", lambda: check_hardware(config))
    report.tell("ok", "batch", describe_batch(config))
    tokenizer = report.ask("tokenizer", lambda: check_tokenizer(config))
    inputs = None
    if tokenizer:
        report.tell("ok", "model", describe_model(config, tokenizer.vocab_size))
        inputs = report.ask("data", lambda: check_data(config))
    if inputs:
        report.tell("ok", "first row", repr(first_row(config, inputs)))
    if config.hellaswag_path:
        report.ask("evaluation", lambda: check_evaluation(config, tokenizer))
    if inputs and (reference_is_stored(config) or config.distillation_enabled and config.distillation_top_k):
        report.ask("cache", lambda: check_cache(config, inputs))
    if config.distillation_enabled and tokenizer:
        report.ask("teacher", lambda: check_teacher(config, tokenizer))
    report.ask("start", lambda: check_start(config, inputs, report))
    if tokenizer:
        if hardware:
            tell_memory(config, tokenizer.vocab_size, *hardware, report)
        report.ask("disk", lambda: check_disk(config, tokenizer.vocab_size))
    failures = len(report.exit_codes)
    if failures:
        print_safely(f"{failures} problem{'s' if failures > 1 else ''} to mend.", sys.stderr)
    else:
        show("Ready to train.")
    return report.exit_codes[0] if failures else 0


def check_hardware(config: Config) -> tuple[tuple[torch.device, torch.dtype], str]:
    """Device and compute dtype. Raises SettingsError where they, or the attention kernel, are not to be had here."""
    device = torch.device(choose_device(config))
    make_deterministic(config, device.type)
    dtype = choose_dtype(config, device.type)
    return (device, dtype), describe_hardware(config, device, dtype)


def check_tokenizer(config: Config) -> tuple[Any, str]:
    """The tokenizer. Raises DataError."""
    tokenizer = load_tokenizer(config.tokenizer_path, config.tokenizer_backend)
    return tokenizer, f"{tokenizer.vocab_size:,} ids from {config.tokenizer_path}"


def check_data(config: Config) -> tuple[Inputs, str]:
    """The rows to learn from and those held out. Raises DataError."""
    inputs = read_inputs(config.model_copy(update={"hellaswag_path": None}), verify=True)
    return inputs, f"{describe_data(config, inputs)}; every shard verified, all ids within the vocabulary"


def first_row(config: Config, inputs: Inputs, characters: int = 300) -> str:
    """How the first row of the data begins, as text."""
    text = inputs.tokenizer.decode(inputs.rows(np.array([0])).tokens_BT[0].tolist())
    return text if len(text) <= characters else text[:characters] + "..."


def check_evaluation(config: Config, tokenizer) -> tuple[int, str]:
    """The number of items. Raises DataError."""
    items = read_items(config.hellaswag_path)[:config.hellaswag_examples or None]
    if tokenizer:
        prepare_tasks(items, tokenizer, config.max_seq_len)
    when = f"every {config.hellaswag_every} steps" if config.hellaswag_every else "never asked (HELLASWAG_EVERY=0)"
    return len(items), f"{len(items):,} questions ({config.hellaswag_name}) from {config.hellaswag_path}, {when}"


def check_cache(config: Config, inputs: Inputs) -> tuple[Path, str]:
    """Where what is computed before the first step will lie. Raises DataError where there is no place for it."""
    place, why = cache_of(config).place_to_write(inputs.rows.token_set.folder, inputs.rows.fingerprint)
    what = "reference's log-probabilities" if config.training_stage == "dpo" else "teacher's likeliest tokens"
    return place, f"the {what} are computed once and kept in {place}{f' ({why})' if why else ''}"


def check_teacher(config: Config, tokenizer) -> tuple[Path, str]:
    """The teacher's folder. Raises CheckpointError and SettingsError where it is missing or speaks another vocabulary."""
    folder = find_teacher(config, tokenizer)
    how = f"its {config.distillation_top_k} likeliest tokens are stored" if config.distillation_top_k else "it runs along"
    return folder, f"{folder}, of the student's vocabulary; {how}"


def check_start(config: Config, inputs: Optional[Inputs], report: Report) -> tuple[Optional[Path], str]:
    """The checkpoint that the run would start from, if any. Raises CheckpointError where it cannot be used."""
    run_dir = Path(config.output_dir) / (config.run_name or f"{config.training_stage}-<date-time>")
    identity = inputs.identity(config) if inputs else None
    start = start_at(*find_checkpoint(config, run_dir, Ranks()), config, identity, run_dir, Ranks())
    if start.state:
        start.warnings.extend(check_model(start.base if config.lora_enabled else start.folder, config))
    if config.resume == "never" and has_run(run_dir):
        start.warnings.append(f"RESUME=never moves the run in {run_dir} aside")
    for mark, messages in (("ok", start.notes), ("warn", start.warnings)):
        for message in messages:
            report.tell(mark, "start", message)
    if start.folder is None:
        return None, f"from initial weights, into {run_dir}"
    if not start.state:
        return start.folder, f"from the weights of {start.folder}, into {run_dir}"
    step = start.state["progress"]["step"] if start.own or config.start_step is None else config.start_step
    return start.folder, f"from {start.folder}, {max(0, config.max_steps - step):,} of {config.max_steps:,} steps are left"


def tell_memory(config: Config, vocab_size: int, device: torch.device, dtype: torch.dtype, report: Report) -> None:
    """The forecast, and what to set where it exceeds what the device has."""
    if device.type == "cuda":
        room, owner = torch.cuda.get_device_properties(device).total_memory, "this GPU"
    else:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // config.world_size
        owner = "this machine" + (f" for each of {config.world_size} ranks" if config.world_size > 1 else "")
    forecast = estimate_memory(config, vocab_size, dtype.itemsize, device.type)
    text = f"{describe_memory(forecast)}; {owner} has {room / GIB:.1f}"
    if forecast.total <= room:
        report.tell("ok", "memory", text)
    else:
        report.tell("warn", "memory", f"{text}. {memory_advice(config, room, vocab_size, dtype.itemsize, device.type)}")


def memory_advice(config: Config, room: int, *device) -> str:
    """The least change of settings with which the forecast fits into so many bytes; the step stays what it is.

    Args:
        device: what else estimate_memory needs to know.
    """
    rows_per_rank = config.rows_per_step // config.world_size
    smaller = [rows for rows in range(config.micro_batch_size, 0, -1) if rows_per_rank % rows == 0]
    recomputing = (config.activation_checkpointing, *(["selective"] if config.compile and not config.debug else []), "block")
    for recompute in dict.fromkeys(recomputing):
        for rows in smaller:
            changed = config.model_copy(update={"micro_batch_size": rows, "activation_checkpointing": recompute})
            needed = estimate_memory(changed, *device).total
            if needed <= room:
                changes = [f"{name.upper()}={getattr(changed, name)}" for name in ("micro_batch_size", "activation_checkpointing")
                           if getattr(changed, name) != getattr(config, name)]
                return f"It would fit with {' '.join(changes)} (about {needed / GIB:.2f} GiB; each step learns the same)"
    return "It would not fit with MICRO_BATCH_SIZE=1 and ACTIVATION_CHECKPOINTING=block either: take a smaller model"


def check_disk(config: Config, vocab_size: int) -> tuple[int, str]:
    """The bytes of one checkpoint. Raises CheckpointError where those that are kept have no room."""
    size = 3 * FLOAT32 * parameter_count(config, vocab_size)
    place = (Path(config.output_dir) / (config.run_name or "") / "checkpoints").absolute()
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CheckpointError(f"OUTPUT_DIR={config.output_dir} cannot be written to ({there}); set it to a folder that can")
    free = shutil.disk_usage(there).free
    saved = max(1, config.max_steps // config.save_every) if config.save_every else 1
    kept = min(saved, config.keep_last + config.keep_best + 1) if config.keep_last else saved
    text = (f"a checkpoint takes {size / GIB:.2f} GiB; {kept} at a time take {kept * size / GIB:.2f}, "
            f"and {free / GIB:.1f} are free")
    if 2 * size > free:
        raise CheckpointError(f"OUTPUT_DIR={config.output_dir}: {text}; free some, or set OUTPUT_DIR to another disk")
    return size, text + (". KEEP_LAST should be smaller" if kept * size > free else "")
