"""How long a run would take here, from a few real micro-batches; nothing is saved."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from tqdm import tqdm

import lora
from config import Config
from model import Transformer
from model_utils import build_model, clip_scale, compile_where_possible, gradient_norm
from objectives.base import NextToken, Objective
from objectives.preference import (
    PREFERENCE_OBJECTIVES,
    answer_lengths,
    frozen_logprobs,
    reference_is_stored,
)
from parallel.collectives import Ranks
from training.optim import Optimizer
from training.state import Inputs

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

    Raises:
        SettingsError: the adapters' settings are not possible here.
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
