"""The settings that DEPTH decides where nothing else sets them: one dial for the size of a pretraining run.

Parameters are those of the blocks' matrices: the vocabulary is not known when settings are read. A resumed
run computes all this again and compares it with its checkpoint, so a changed formula would refuse old runs.
The batch does not depend on the number of ranks, so that a run can continue on another number.
"""

import math
from collections.abc import Container
from typing import Any

from config import Config

HEAD_DIM = 64
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
