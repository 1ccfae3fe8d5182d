"""The settings that others decide where nothing sets them: by DEPTH, by the stage, by the size of the data.

DEPTH is one dial for the size of a pretraining run. Parameters are those of the blocks' matrices: the
vocabulary is not known when settings are read. A resumed run keeps what it recorded. The batch does not
depend on the number of ranks, so that a run can continue on another number.
"""

import math
from collections.abc import Container
from typing import Any

from config import Config

HEAD_DIM = 64
RATES = {"pretrain": 6e-4, "sft": 2e-5, "dpo": 1e-6}  # of full fine-tuning, as in TRL's and axolotl's recipes
LORA_RATES = {"pretrain": 2e-4, "sft": 2e-4, "dpo": 1e-5}
EPOCHS = {"sft": 3.0, "dpo": 1.0}
BATCHES_PER_EPOCH, MOST_BATCH_ROWS = 32, {"pretrain": 512, "sft": 64, "dpo": 64}  # of a batch chosen by data
SMALL_MODEL = 50_000_000  # weights in matrices, below which a CPU computes sooner without a compiler
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv:2203.15556)
ROWS = 48  # a batch is a multiple of so many rows, which 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 ranks can share
ACTIVATIONS = 3e8  # tokens x DIM x N_LAYERS of a micro-batch: about 7 GiB in bf16, compiled
MOST_ROWS = 256  # of a micro-batch


def settings_of_depth(config: Config, given: Container[str]) -> dict[str, Any]:
    """Return the settings that config.depth decides and their values, without those in `given`.

    What is given enters the formulas of the rest: a longer row makes the batch larger, not invalid.
    Source: Li et al. 2025 (arXiv:2503.04715) for the batch. The rate was measured at depths 1 to 4
    (docs/log.md), and falls with the width as muP has it (Yang et al. 2022, arXiv:2203.03466).
    """
    assert config.depth is not None
    chosen: dict[str, Any] = {}

    def choose(**values) -> None:
        nonlocal config
        values = {name: value for name, value in values.items() if name not in given}
        chosen.update(values)
        config = config.model_copy(update=values)

    # The shape; of Llama 3's proportions, at every depth.
    choose(n_layers=config.depth, dim=HEAD_DIM * config.depth)
    choose(n_heads=max(1, config.dim // HEAD_DIM), multiple_of=HEAD_DIM)
    choose(ffn_dim=config.hidden_dim)
    heads = config.n_heads
    choose(n_kv_heads=next(n for n in range(1, heads + 1) if heads % n == 0 and 4 * n >= heads))
    # With 0.02 at every width a narrow model learns more slowly: 4.29 against 3.70 nats at depth 2.
    choose(init_std=round(0.02 * math.sqrt(768 / config.dim), 4))
    choose(max_seq_len=2 ** min(11, int(math.log2(128 * config.depth))))
    if config.training_stage != "pretrain":
        return chosen  # how long and how fast to fine-tune does not follow from the size

    # How it is trained. With these rates and steps, a constant WEIGHT_DECAY forgets equally often at each
    # depth from 6 on: rate x steps x decay is 0.9 to 2 (Wang & Aitchison 2024, arXiv:2405.13698).
    tokens = TOKENS_PER_PARAMETER * config.matrix_count
    row_groups = 0.58 * tokens**0.571 / (ROWS * config.max_seq_len)
    choose(total_batch_size=max(1, round(row_groups)) * ROWS * config.max_seq_len)
    rows = max(1, config.rows_per_step // config.world_size)
    most = min(rows, MOST_ROWS, int(ACTIVATIONS / (config.dim * config.n_layers * config.max_seq_len)))
    choose(micro_batch_size=next(n for n in range(max(1, most), 0, -1) if rows % n == 0))
    steps = math.ceil(tokens / config.total_batch_size)
    choose(max_steps=steps)
    choose(warmup_steps=min(2000, steps // 10, config.max_steps // 10))
    choose(learning_rate=float(f"{0.64 / config.dim:.2g}"))
    return chosen


def settings_of_stage(config: Config, given: Container[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that the stage decides, and the names of settings that follow from data or hardware.

    Both without what is given. A batch that follows from the data is one row on each rank until that is read.
    """
    is_tuning = config.training_stage in EPOCHS and not (config.random_init or config.distillation_enabled)
    rates = LORA_RATES if config.lora_enabled else RATES
    chosen = {"learning_rate": rates[config.training_stage if is_tuning else "pretrain"]}
    undecided = ["compile"] if config.depth is not None and not is_tuning else [
        "compile", "total_batch_size", "micro_batch_size"]
    if is_tuning and "max_steps" not in given and config.epochs is None:
        chosen["epochs"] = EPOCHS[config.training_stage]
    if config.epochs or "epochs" in chosen:
        undecided.append("max_steps")
    if is_tuning or config.epochs:
        undecided.append("warmup_steps")
    undecided = [name for name in undecided if name not in given]
    if is_tuning and "total_batch_size" in undecided:
        rows = 1 if "micro_batch_size" in undecided else max(1, config.micro_batch_size)
        chosen["micro_batch_size"] = rows
        chosen["total_batch_size"] = rows * config.world_size * config.max_seq_len
    return {name: value for name, value in chosen.items() if name not in given}, undecided


def settings_of_data(config: Config, rows: int, names: Container[str]) -> dict[str, Any]:
    """Return the settings among `names` that follow from the training data.

    A batch is small enough for some tens of steps in an epoch, and all ranks share it equally.

    Args:
        rows: of the training data.
    """
    chosen: dict[str, Any] = {}
    stage, ranks, batch_rows = config.training_stage, config.world_size, config.rows_per_step
    if "total_batch_size" in names and (stage != "pretrain" or rows < BATCHES_PER_EPOCH * batch_rows):
        share = ranks * (1 if "micro_batch_size" in names else config.micro_batch_size)
        wanted = max(1, min(MOST_BATCH_ROWS[stage], rows // BATCHES_PER_EPOCH))
        batch_rows = -(-2 ** int(math.log2(wanted)) // share) * share
        chosen["total_batch_size"] = batch_rows * config.max_seq_len
        if "micro_batch_size" in names:
            own = batch_rows // ranks
            chosen["micro_batch_size"] = next(n for n in range(min(8, own), 0, -1) if own % n == 0)
    steps = config.max_steps
    if "max_steps" in names and config.epochs is not None:
        chosen["max_steps"] = steps = max(1, math.ceil(config.epochs * rows / batch_rows))
    if "warmup_steps" in names and steps < 10 * config.warmup_steps:
        chosen["warmup_steps"] = steps // 10
    return chosen


def unequal_shares(config: Config, given: Container[str]) -> str:
    """Return the message for a batch that config.depth chose and the ranks cannot share equally.

    Args:
        given: the settings that config.depth did not choose.
    """
    rows, ranks, size = config.rows_per_step, config.world_size, config.max_seq_len
    micro_batch = config.micro_batch_size if "micro_batch_size" in given else 1
    whole = f" in micro-batches of {micro_batch} rows" if micro_batch > 1 else ""
    at_once = ranks * micro_batch
    sizes = [f"TOTAL_BATCH_SIZE={count * at_once * size}" for count in (rows // at_once, -(-rows // at_once))
             if count]
    fewer = next((n for n in range(ranks, 0, -1) if rows % (n * micro_batch) == 0), 0)
    resumed = f"; to resume a run that has steps, use {fewer} ranks" if fewer else ""
    return (f"DEPTH={config.depth} chose TOTAL_BATCH_SIZE={config.total_batch_size}, {rows} rows of "
            f"MAX_SEQ_LEN={size}, which {ranks} rank{'s' * (ranks > 1)} cannot share equally{whole}; for a "
            f"new run, set {' or '.join(sizes)}{resumed}")
