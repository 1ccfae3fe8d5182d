"""What can be known before hours are spent (`--check`), what is announced at the start, and the last words."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from config import Config
from errors import PaddockError
from memory_estimate import estimate_memory, parameter_count
from model import attention_taken
from model_utils import choose_device, choose_dtype, why_not_compile
from ranks import Ranks
from run_log import duration
from run_state import Inputs, Run, find_checkpoint, read_inputs
from settings import Loaded

GIB = 2**30


def describe_model(config: Config, vocab_size: int) -> str:
    return (f"{parameter_count(config, vocab_size):,} parameters: {config.n_layers} layers, dim {config.dim}, heads {config.n_heads}/"
            f"{config.n_kv_heads}, feed-forward {config.hidden_dim}, vocabulary {vocab_size:,}{', tied' if config.tie_embeddings else ''}")


def describe_batch(config: Config) -> str:
    return (f"{config.total_batch_size:,} tokens a step = {config.micro_batch_size} rows x {config.max_seq_len} tokens x "
            f"{config.accumulation_steps} micro-batches x {config.world_size} rank{'s' if config.world_size > 1 else ''}; "
            f"{config.max_steps:,} steps")


def describe_data(config: Config, inputs: Inputs) -> str:
    tokens = inputs.rows.token_set.tokens
    epochs = config.max_steps * config.total_batch_size / tokens
    held_out = f", {inputs.validation_rows.token_set.tokens:,} held out" if inputs.validation_rows else ""
    return f"{tokens:,} tokens{held_out} from {config.pretrain_data_path}; the run reads them {epochs:.2f} times"


def describe_memory(config: Config, vocab_size: int, dtype: torch.dtype) -> str:
    forecast = estimate_memory(config, vocab_size, dtype.itemsize)
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in forecast._asdict().items())
    return f"about {forecast.total / GIB:.2f} GiB a device ({parts})"


def announce(run: Run, dtype: torch.dtype) -> None:
    """The first words of a run: what it will do, with what."""
    config, ranks, say = run.config, run.ranks, run.log.say
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    kernel = attention_taken(config, ranks.device, dtype, config.document_mask)
    say(f"Model: {describe_model(config, run.inputs.tokenizer.vocab_size)}")
    say(f"Data: {describe_data(config, run.inputs)}")
    say(f"Batch: {describe_batch(config)}")
    say(f"Hardware: {device}; {str(dtype).removeprefix('torch.')} over fp32 master weights; attention {kernel}"
        f"{', documents apart' if config.document_mask else ''}; {'torch.compile' if config.compile else 'eager'}")
    say(f"Run: {run.folder}" + (f", going on after step {run.progress.step}" if run.progress.step else ""))


def farewell(run: Run, folder: Path, seconds: float, baseline: dict, reached: dict) -> None:
    """The last words of a run: what was reached, where it is, and what could be next."""
    config, progress, say = run.config, run.progress, run.log.say
    say(f"Finished {progress.step:,} steps ({progress.tokens_seen:,} tokens) in {duration(seconds)}.")
    if "val_loss" in reached:
        best = "" if progress.best_val_loss is None else f", best {progress.best_val_loss:.4f} at step {progress.best_step}"
        say(f"Validation loss {reached['val_loss']:.4f}{best}.")
    if "hellaswag_acc" in reached:
        before = f"from {100 * baseline['hellaswag_acc']:.1f} % " if "hellaswag_acc" in baseline else ""
        say(f"Accuracy on {config.hellaswag_name}: {before}to {100 * reached['hellaswag_acc']:.1f} % "
            f"(+- {100 * reached['hellaswag_stderr']:.1f}; by length {100 * reached['hellaswag_acc_norm']:.1f} %; "
            f"n = {reached['hellaswag_n']}; chance is 25 %).")
    say(f"Checkpoint (a Hugging Face model folder): {folder}")
    say(f"Write with it:   python scripts/generate.py {folder}")
    say("Your own text:   python scripts/load_pretrain_dataset.py --help")
    say("On more GPUs:    torchrun --standalone --nproc_per_node N train.py")


def check(loaded: Loaded) -> int:
    """Print everything that can be known before the run, one line each; 0 if nothing stands in its way, else the first
    problem's exit code."""
    config = loaded.config
    failures: list[int] = []

    def line(name: str, make: Callable[[], str]):
        try:
            print(f"  ok    {name}: {make()}")
        except PaddockError as error:
            failures.append(error.exit_code)
            for part in str(error).splitlines():
                print(f"  FAIL  {name}: {part}")

    found: dict = {}

    def device() -> str:
        found["device"] = torch.device(choose_device(config))
        found["dtype"] = choose_dtype(config, found["device"].type)
        reason = why_not_compile(config, found["device"].type) if config.compile else None
        return (f"{found['device'].type}, {str(found['dtype']).removeprefix('torch.')}, " + (f"eager ({reason})" if reason else "compiled"
                if config.compile else "eager"))

    def data() -> str:
        found["inputs"] = read_inputs(config, verify=True)
        return describe_data(config, found["inputs"]) + "; every shard verified"

    def first_row() -> str:
        ids = found["inputs"].rows.token_set.read(0, min(64, config.max_seq_len))
        return repr(found["inputs"].tokenizer.decode(ids.tolist()))

    def evaluation_items() -> str:
        tasks = found["inputs"].tasks
        return f"{len(tasks)} {config.hellaswag_name} items every {config.hellaswag_every} steps" if tasks else "none"

    def memory() -> str:
        text = describe_memory(config, found["inputs"].tokenizer.vocab_size, found["dtype"])
        if found["device"].type == "cuda":
            text += f"; this GPU has {torch.cuda.get_device_properties(0).total_memory / GIB:.0f}"
        else:
            text += f"; this machine has {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.0f}"
        return text

    def start() -> str:
        run_dir = Path(config.output_dir) / (config.run_name or f"{config.training_stage}-<date-time>")
        folder, own, warnings = find_checkpoint(config, run_dir, Ranks())
        for warning in warnings:
            print(f"  warn  {warning}")
        return f"{folder}" if folder else f"from scratch into {run_dir}"

    def disk() -> str:
        size = 3 * 4 * parameter_count(config, found["inputs"].tokenizer.vocab_size)
        folder = next(path for path in (Path(config.output_dir).absolute(), *Path(config.output_dir).absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free
        kept = max(1, config.keep_last) + config.keep_best + 1
        return (f"a checkpoint takes {size / GIB:.2f} GiB, {kept} at a time {kept * size / GIB:.2f}; {free / GIB:.1f} are free"
                + (" - TOO LITTLE" if kept * size > free else ""))

    print(f"Settings: {len(loaded.sources)} given, all valid")
    for warning in loaded.warnings:
        print(f"  warn  {warning}")
    line("device", device)
    line("batch", lambda: describe_batch(config))
    line("data", data)
    if "inputs" in found:
        vocab_size = found["inputs"].tokenizer.vocab_size
        line("model", lambda: describe_model(config, vocab_size))
        line("first row", first_row)
        line("evaluation", evaluation_items)
        if "device" in found:
            line("attention", lambda: attention_taken(config, found["device"], found["dtype"], config.document_mask))
            line("memory", memory)
        line("disk", disk)
    line("start", start)
    print(f"{len(failures)} problem{'s' if len(failures) > 1 else ''} to mend." if failures else "Ready to train.", file=sys.stderr
          if failures else sys.stdout)
    return failures[0] if failures else 0
