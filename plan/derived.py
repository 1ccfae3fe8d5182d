"""Values for unset settings, in order of precedence: from DEPTH, the start, the stage, the number of steps,
and finally the training data, once its rows are counted.

DEPTH sets the size of a pretraining run. It counts only the parameters of the blocks' matrices, because the
vocabulary is unknown when settings are read. The batch is the same for any number of ranks, which may change.
"""

import math
import os
from collections.abc import Container, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Optional

from checkpoint import store
from common.files import read_json
from common.remote import is_hub_name
from config import Config
from plan.names import or_run
from plan.starts import Start

UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError)  # missing or malformed file
HEAD_DIM = 64
RATES = {"pretrain": 6e-4, "sft": 2e-5, "dpo": 1e-6, "grpo": 1e-6}  # as in TRL's recipes
LORA_RATES = {"pretrain": 2e-4, "sft": 2e-4, "dpo": 1e-5, "grpo": 1e-5}
RECIPE_WIDTH = 2048  # the recipes' smallest DIM; muP scales the rate by 1 / width
SFT_POWER = 1.4  # of RECIPE_WIDTH / DIM, as measured (docs/dev/log.md)
EPOCHS = {"sft": 3.0, "dpo": 1.0, "grpo": 1.0}
# If data decides the batch.
BATCHES_PER_EPOCH, MOST_BATCH_ROWS = 32, {"pretrain": 512, "sft": 64, "dpo": 64, "grpo": 64}
SMALL_MODEL = 50_000_000  # matrix weights; below this, compiling costs a CPU more than it saves
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv:2203.15556)
ROWS = 48  # batches are multiples of this, to suit 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 ranks
ACTIVATIONS = 3e8  # most tokens x DIM x N_LAYERS in a micro-batch: 7 GiB in bf16, compiled
MOST_ROWS = 256  # in a micro-batch


def saved_settings(checkpoint: Path) -> dict[str, Any]:
    """Return the settings recorded in a checkpoint, without verifying it; empty if it cannot be read."""
    with suppress(*UNREADABLE):
        return {**read_json(checkpoint / store.STATE)["settings"]}
    return {}


def settings_of_depth(config: Config, given: Container[str]) -> dict[str, Any]:
    """Return the values that config.depth implies for settings not in `given`.

    The formulas use the settings in `given`: longer rows make the batch larger instead of invalid.
    Source: Li et al. 2025 (arXiv:2503.04715) for the batch. The rate was measured at depths 1 to 4
    (docs/dev/log.md) and decreases with width as in muP (Yang et al. 2022, arXiv:2203.03466).
    """
    if config.depth is None:
        return {}
    chosen: dict[str, Any] = {}

    def choose(**values) -> None:
        nonlocal config
        values = {name: value for name, value in values.items() if name not in given}
        chosen.update(values)
        config = config.model_copy(update=values)

    # The shape, with Llama 3's proportions.
    choose(n_layers=config.depth, dim=HEAD_DIM * config.depth)
    choose(n_heads=max(1, config.dim // HEAD_DIM), multiple_of=HEAD_DIM)
    choose(ffn_dim=config.hidden_dim)
    heads = config.n_heads
    choose(n_kv_heads=next(n for n in range(1, heads + 1) if heads % n == 0 and 4 * n >= heads))
    # A constant 0.02 slows down narrow models: 4.29 instead of 3.70 nats at depth 2.
    choose(init_std=round(0.02 * math.sqrt(768 / config.dim), 4))
    choose(max_seq_len=2 ** min(11, int(math.log2(128 * config.depth))))
    if config.training_stage != "pretrain":
        return chosen  # steps and rate of fine-tuning do not depend on the size

    # Batch, steps and rate. With these, rate x steps x WEIGHT_DECAY is 0.9 to 2 at every depth from 6 on, so
    # WEIGHT_DECAY need not depend on the depth (Wang & Aitchison 2024, arXiv:2405.13698).
    tokens = TOKENS_PER_PARAMETER * config.matrix_count
    rows = max(1, round(0.58 * tokens**0.571 / (ROWS * config.max_seq_len))) * ROWS
    if "micro_batch_size" in given and (together := config.micro_batch_size * config.planned_ranks):
        rows = max(1, round(rows / together)) * together
    choose(total_batch_size=rows * config.max_seq_len)
    rows = max(1, config.rows_per_step // config.planned_ranks)
    most = min(rows, MOST_ROWS, int(ACTIVATIONS / (config.dim * config.n_layers * config.max_seq_len)))
    row = config.max_seq_len * config.planned_ranks
    choose(micro_batch_size=next((n for n in range(max(1, most), 0, -1)
                                  if config.total_batch_size % (n * row) == 0), 1))
    steps = math.ceil(tokens / config.total_batch_size)
    choose(max_steps=steps)
    if not config.epochs:  # then the data decides the number of steps, and of these
        choose(warmup_steps=min(2000, steps // 10, config.max_steps // 10))
    choose(learning_rate=float(f"{0.64 / config.dim:.2g}"))
    return chosen


def settings_of_start(config: Config, decided: Container[str], start: Start) -> dict[str, Any]:
    """Return the tokenizer of the prepared data or the start, and the start's row length if it is shorter."""
    tokenizer, length = config.tokenizer_path, config.max_seq_len
    folder = start.folder and Path(start.folder)
    if tokenizer is None:
        of_data = (name for name, _ in data_manifests(config.data_path)
                   if os.path.exists(name) or is_hub_name(name))
        has_own = folder and any((folder / f"tokenizer.{form}").is_file() for form in ("json", "model"))
        named = start.download or start == Start() and config.named_checkpoint or ""  # or for a preparation
        named = named if os.path.exists(named) else named.partition("@")[0]
        of_start = [str(folder)] if has_own else [or_run(named, config.output_dir)] if named else []
        tokenizer = next(chain(of_data, of_start), None)
    if config.training_stage in EPOCHS and "max_seq_len" not in decided and folder:
        trained = saved_settings(folder).get("MAX_SEQ_LEN")
        with suppress(*UNREADABLE):
            trained = trained or read_json(folder / "config.json")["max_position_embeddings"]
        length = min(length, trained) if type(trained) is int and trained > 0 else length
    chosen = {"tokenizer_path": tokenizer, "max_seq_len": length}
    return {name: value for name, value in chosen.items() if value != getattr(config, name)}


def data_manifests(data_path: Optional[str]) -> Iterator[tuple[str, int]]:
    """Yield the tokenizer and the size of the vocabulary that are named in prepared data."""
    data = Path(data_path or "")
    sets = [data] if data_path else []
    with suppress(*UNREADABLE):
        sets += data.glob("*/") if data_path else ()
        sets.append(data / read_json(data / "mixture.json")["sources"][0]["set"])
    for folder in sets:
        with suppress(*UNREADABLE):
            manifest = read_json(folder / "manifest.json")
            yield str(manifest["tokenizer"]), int(manifest.get("vocab_size", 0))


def is_source_of(prepared: Optional[str], path: str) -> bool:
    """Return whether a prepared set was made from this path alone, which has not changed since."""
    with suppress(*UNREADABLE):
        manifest = Path(prepared or "") / "manifest.json"
        (source,) = read_json(manifest)["source"]["sources"]
        return os.path.samefile(source["path"], path) and os.stat(path).st_mtime < manifest.stat().st_mtime
    return False


def settings_of_stage(config: Config, decided: Container[str], start: Start
                      ) -> tuple[dict[str, Any], list[str]]:
    """Return the values that the stage implies, and the names of settings that depend on data or hardware.

    Both exclude settings in `decided`. A batch that depends on the data is one row per rank until it is read.
    """
    is_tuning = config.training_stage in EPOCHS and not (
        config.random_init or config.distillation_enabled and config.training_stage != "grpo")
    rates = LORA_RATES if config.lora_enabled else RATES
    rate = rates[config.training_stage if is_tuning else "pretrain"]
    if is_tuning and start.folder:  # narrow models get a higher rate
        power = SFT_POWER if config.training_stage == "sft" and not config.lora_enabled else 1
        rate = float(f"{rate * max(1, RECIPE_WIDTH / config.dim) ** power:.2g}")
    chosen: dict[str, Any] = {"learning_rate": rate}
    deferred = ["compile"]
    if is_tuning or config.depth is None:
        deferred += ["total_batch_size", "micro_batch_size"]
    if is_tuning or config.epochs:
        deferred += ["warmup_steps"]
    if is_tuning and "max_steps" not in decided:
        chosen["epochs"] = EPOCHS[config.training_stage]
    has_epochs = config.epochs or "epochs" in chosen
    deferred += [*settings_of_length(0, Config.model_fields)] if has_epochs else []
    deferred = [name for name in deferred if name not in decided] + ["max_steps"] * bool(has_epochs)
    if is_tuning and not {"total_batch_size", "micro_batch_size"}.isdisjoint(deferred):
        is_open = "micro_batch_size" in deferred or not config.micro_batch_size
        chosen["micro_batch_size"] = rows = config.answers_per_prompt if is_open else config.micro_batch_size
        chosen["total_batch_size"] = rows * config.world_size * config.max_seq_len
    return {name: value for name, value in chosen.items() if name not in decided}, deferred


def settings_of_length(steps: int, names: Container[str]) -> dict[str, int]:
    """Return the intervals of validations, samples, saves and lines among `names` for a run of `steps`."""
    fields = {name: (field.default, field.json_schema_extra["times"])
              for name, field in Config.model_fields.items() if name in names}
    return {name: max(1, min(most, -(-steps // times))) for name, (most, times) in fields.items() if times}


def settings_of_data(config: Config, rows: int, names: Container[str]) -> dict[str, Any]:
    """Return the settings among `names` that depend on the number of training rows.

    The batch is small enough for tens of steps per epoch, and a multiple of the number of ranks.
    """
    chosen: dict[str, Any] = {}
    stage, ranks, batch_rows = config.training_stage, config.planned_ranks, config.rows_per_step
    answers, is_tuning = config.answers_per_prompt, config.training_stage != "pretrain"
    if "total_batch_size" in names and (is_tuning or rows < BATCHES_PER_EPOCH * batch_rows):
        share = ranks * (answers if "micro_batch_size" in names else config.micro_batch_size)
        wanted = max(1, min(MOST_BATCH_ROWS[stage], rows * answers // BATCHES_PER_EPOCH))
        batch_rows = -(-2 ** int(math.log2(wanted)) // share) * share
        chosen["total_batch_size"] = batch_rows * config.max_seq_len
    if "micro_batch_size" in names and (is_tuning or chosen):
        per_rank = batch_rows // ranks
        divisors = (n for n in range(max(8, answers), 0, -1) if per_rank % n == n % answers == 0)
        chosen["micro_batch_size"] = next(divisors, config.micro_batch_size)
    steps = config.max_steps
    if "max_steps" in names and config.epochs is not None:
        chosen["max_steps"] = steps = max(1, math.ceil(
                config.epochs * rows * config.answers_per_prompt / batch_rows))
    if "warmup_steps" in names and steps < 10 * config.warmup_steps:
        chosen["warmup_steps"] = steps // 10
    return chosen | settings_of_length(steps, names)
