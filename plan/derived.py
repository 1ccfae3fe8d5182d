"""Values for unset settings, in order of precedence: from the run to resume, DEPTH, the start checkpoint, the
stage, and finally the training data, once a run opens it.

DEPTH sets the size of a pretraining run. It counts only the parameters of the blocks' matrices, because the
vocabulary is unknown when settings are read. The batch does not depend on the number of ranks, so a run can
resume on a different number.
"""

import math
import os
import re
from collections.abc import Container, Iterator, Mapping, Set
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Optional

from common.files import read_json
from common.remote import is_hub_name
from config import MODEL_SETTINGS, START_FROM, Config, on_resume, rules
from plan.names import validate

PRESETS_DIR = Path(__file__).parent / "presets"
STATE = "trainer_state.json"  # in each checkpoint
UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError)  # missing or malformed file
# Settings that apply to one start only: names, paths, hardware and measurements. The model's shape, which can
# be set in several ways, comes with the checkpoint itself.
FOR_ONE_START = {
    "preset", "output_dir", "run_name", "resume", "random_init", "reset_optimizer", "start_step", "stop_step",
    "epochs", "allow_resume_mismatch", "cache_dir", "device", "world_size", "device_memory", "debug",
    "extensions", "profile_steps", "memory_snapshot", *MODEL_SETTINGS}
# Settings beside the fixed ones that the record of a resumed run decides, and not `.env`.
SIZES = {"depth", *START_FROM, *MODEL_SETTINGS}
OF_A_RUN = {"random_init", "tokenizer_path", "tokenizer_backend", "teacher_model", *SIZES}
HEAD_DIM = 64
RATES = {"pretrain": 6e-4, "sft": 2e-5, "dpo": 1e-6, "grpo": 1e-6}  # as in TRL's recipes
LORA_RATES = {"pretrain": 2e-4, "sft": 2e-4, "dpo": 1e-5, "grpo": 1e-5}
RECIPE_WIDTH = 2048  # the recipes' smallest DIM; muP scales the rate by 1 / width
EPOCHS = {"sft": 3.0, "dpo": 1.0, "grpo": 1.0}
# If data decides the batch.
BATCHES_PER_EPOCH, MOST_BATCH_ROWS = 32, {"pretrain": 512, "sft": 64, "dpo": 64, "grpo": 64}
HUGE_NUMEL = 2**24  # float32 numbers in 64 MiB; with fewer in the embedding, huge pages save no time
SMALL_MODEL = 50_000_000  # matrix weights; below this, compiling costs a CPU more than it saves
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv:2203.15556)
ROWS = 48  # batches are multiples of this, to suit 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48 ranks
ACTIVATIONS = 3e8  # most tokens x DIM x N_LAYERS in a micro-batch: 7 GiB in bf16, compiled
MOST_ROWS = 256  # in a micro-batch


def checkpoints_of(folder: Path) -> list[Path]:
    """Return a folder, followed by its checkpoints, newest first, if it belongs to a run."""
    with suppress(OSError):  # the name is too long
        return [folder, *sorted(folder.glob("checkpoints/step-*"), reverse=True)]
    return [folder]


def saved_settings(checkpoint: Path) -> dict[str, Any]:
    """Return the settings recorded in a checkpoint, without verifying it; empty if it cannot be read."""
    with suppress(*UNREADABLE):
        return {**read_json(checkpoint / STATE)["settings"]}
    return {}


def run_to_resume(config: Config) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint of the run to resume, and the settings recorded in it, if any."""
    if config.resume == "never" or config.resume == "auto" and config.run_name is None:
        return Path(), {}
    folder = Path(config.resume) if config.resume != "auto" else Path(config.output_dir) / config.run_name
    checkpoint = next(filter(saved_settings, checkpoints_of(folder)), folder)
    return checkpoint, saved_settings(checkpoint)


def yielding(config: Config, given: Mapping[str, tuple[Any, str]], in_env: Set[str],
             stage_in_env: Optional[str]) -> set[str]:
    """Return the given settings that yield to the record of the run to resume.

    From `.env`, these are the ones that make another run, and those that conflict with the record; from the
    preset that the run was started with, and from a `.env` of another stage, all that change the curve.
    """
    above_env, decided = given.keys() - in_env, set()
    _, saved = run_to_resume(own := config.model_copy(update={"resume": "auto"}))
    if "resume" in in_env and "run_name" in above_env and saved and (
            config.resume != "never" or stage_in_env not in (None, saved.get("TRAINING_STAGE"))):
        config, decided = own, {"resume"}
    elif config.resume != "auto":
        _, saved = run_to_resume(config)
        above_env = given.keys() if "resume" in in_env else above_env
    stage = saved.get("TRAINING_STAGE", config.training_stage)
    if stage != config.training_stage and "training_stage" in above_env:
        saved, stage = {}, config.training_stage  # another run, or a start from that checkpoint
    is_of_other_stage = stage_in_env not in (None, stage)
    if not saved and not is_of_other_stage:
        return decided
    record, _ = validate({name.lower(): (value, "") for name, value in saved.items()
                          if name.lower() in Config.model_fields})
    allowed = config.allow_resume_mismatch.upper().replace(" ", "").split(",")
    now = with_all_rows(config)  # as the record, where MICRO_BATCH_SIZE=0 is the number of rows
    changed = {name for name in given if name.upper() not in allowed
               and getattr(record, name) != getattr(now, name)}
    paths = {f"{stage}_data_path", "tokenizer_path", "teacher_model", *START_FROM}
    of_preset = {name for name, (_, where) in given.items() if saved.get("PRESET") == config.preset
                 and where.startswith(f"{PRESETS_DIR}{os.sep}")}

    def is_decided(name: str) -> bool:
        path, is_safe = getattr(record, name), on_resume(name) == "safe"
        if name in paths and path and not os.path.exists(path):
            is_there = os.path.exists(Path(config.output_dir) / path) or "/" in path and is_hub_name(path)
            if name == f"{stage}_data_path" or not is_there:
                return False  # it was moved; its content is compared later
        whole = name in of_preset or is_of_other_stage and name in in_env
        return whole and (not is_safe or name in ("epochs", "micro_batch_size", "stop_step")) or (
            name in in_env and (name in OF_A_RUN | paths or on_resume(name) == "fixed"))

    decided |= {name for name in changed if saved and is_decided(name)}
    decided |= {name for name, other in (("epochs", "max_steps"), ("max_steps", "epochs"))
                if name in in_env and other in above_env}
    remaining = {name: getattr(config, name) for name in given if name not in decided}
    conflicts = " ".join(rules(with_all_rows((record if saved else config).model_copy(update=remaining))))
    return decided | {name for name in changed & in_env - (FOR_ONE_START - OF_A_RUN)
                      if re.search(rf"\b{name.upper()}\b", conflicts)}


def recorded_settings(config: Config, given: Mapping[str, tuple[Any, str]],
                      ignored: Container[str] = ()) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint of the run to resume, and the settings that it keeps.

    New defaults do not apply, nor do the `ignored` settings, which yielded to its record.
    """
    checkpoint, saved = run_to_resume(config)
    if saved.get("TRAINING_STAGE") != config.training_stage and "training_stage" in given:
        return Path(), {}
    left_out = {*FOR_ONE_START, *({"max_steps"} if config.epochs else ())}
    if "depth" in given and config.depth != saved.get("DEPTH"):
        same_stage = config.model_copy(update={"training_stage": saved.get("TRAINING_STAGE")})
        left_out |= settings_of_depth(same_stage, ()).keys()
    if config.resume != "auto" or any(name in given for name in START_FROM):
        left_out |= {*START_FROM}
    if type(steps := saved.get("MAX_STEPS")) is int:  # what followed from it follows from the new number
        by_length = settings_of_length(steps, Config.model_fields)
        left_out |= {name for name, every in by_length.items() if every == saved.get(name.upper())}
    values = {name: saved.get(name.upper(), field.default) for name, field in Config.model_fields.items()
              if name in ignored and (name not in FOR_ONE_START or name in MODEL_SETTINGS)
              or name not in left_out and name not in given and name.upper() in saved}
    valid, invalid = validate({name: (value, str(checkpoint)) for name, value in values.items()})
    # Keep equal values unchanged, so that 600 is not recorded as 600.0.
    return checkpoint, {name: value if value == getattr(valid, name) else getattr(valid, name)
                        for name, value in values.items() if name not in invalid}


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
    row_groups = 0.58 * tokens**0.571 / (ROWS * config.max_seq_len)
    choose(total_batch_size=max(1, round(row_groups)) * ROWS * config.max_seq_len)
    rows = max(1, config.rows_per_step // config.planned_ranks)
    most = min(rows, MOST_ROWS, int(ACTIVATIONS / (config.dim * config.n_layers * config.max_seq_len)))
    choose(micro_batch_size=next(n for n in range(max(1, most), 0, -1) if rows % n == 0))
    steps = math.ceil(tokens / config.total_batch_size)
    choose(max_steps=steps)
    if not config.epochs:  # then the data decides the number of steps, and of these
        choose(warmup_steps=min(2000, steps // 10, config.max_steps // 10))
    choose(learning_rate=float(f"{0.64 / config.dim:.2g}"))
    return chosen


def settings_of_start(config: Config, decided: Container[str]) -> dict[str, Any]:
    """Return the tokenizer of the prepared data or the start, and the start's row length if it is shorter."""
    start, tokenizer, length = config.named_checkpoint, config.tokenizer_path, config.max_seq_len
    candidates = [] if start is None else [Path(start), Path(config.output_dir) / start]
    folders = [folder for place in candidates for folder in checkpoints_of(place)]
    if tokenizer is None:
        beside = (str(folder) for folder in folders
                  if any(os.path.isfile(folder / f"tokenizer.{form}") for form in ("json", "model")))
        on_hub = [] if start is None or any(map(os.path.exists, candidates)) else [start.partition("@")[0]]
        of_data = (name for name, _ in data_manifests(config.data_path)
                   if os.path.exists(name) or is_hub_name(name))
        tokenizer = next(chain(of_data, beside, on_hub), None)
    if config.training_stage in EPOCHS and "max_seq_len" not in decided:
        length = min(length, next(filter(None, map(trained_row_length, folders)), length))
    chosen = {"tokenizer_path": tokenizer, "max_seq_len": length}
    return {name: value for name, value in chosen.items() if value != getattr(config, name)}


def huge_pages_pay(config: Config) -> bool:
    """Return whether new memory for the vocabulary's gradients, which costs page faults, dominates a step.

    Other tensors reuse memory, which page alignment only fragments (docs/dev/log.md, 2026-11-26).
    """
    in_vocabulary = next((size for _, size in data_manifests(config.data_path)), 0) * config.dim
    return config.named_checkpoint is None and in_vocabulary > max(HUGE_NUMEL, config.matrix_count)


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


def trained_row_length(model: Path) -> Optional[int]:
    """Return the row length that a checkpoint or model was trained with, or None if it is not recorded."""
    length = saved_settings(model).get("MAX_SEQ_LEN")
    with suppress(*UNREADABLE):
        length = length or read_json(model / "config.json")["max_position_embeddings"]
    return length if type(length) is int and length > 0 else None


def settings_of_stage(config: Config, decided: Container[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that the stage implies, and the names of settings that depend on data or hardware.

    Both exclude settings in `decided`. A batch that depends on the data is one row per rank until it is read.
    """
    is_tuning = config.training_stage in EPOCHS and not (
        config.random_init or config.distillation_enabled and config.training_stage != "grpo")
    rates = LORA_RATES if config.lora_enabled else RATES
    chosen = {"learning_rate": rates[config.training_stage if is_tuning else "pretrain"]}
    deferred = ["compile"]
    if is_tuning or config.depth is None:
        deferred += ["total_batch_size", "micro_batch_size"]
    if is_tuning or config.epochs:
        deferred += ["warmup_steps"]
    deferred += ["learning_rate"] * is_tuning  # narrow models get a higher rate once the shape is known
    if is_tuning and "max_steps" not in decided:
        chosen["epochs"] = EPOCHS[config.training_stage]
    has_epochs = config.epochs or "epochs" in chosen
    deferred += [*settings_of_length(0, Config.model_fields)] if has_epochs else []
    deferred = [name for name in deferred if name not in decided] + ["max_steps"] * bool(has_epochs)
    if is_tuning and "total_batch_size" in deferred:
        rows = config.micro_batch_size
        if "micro_batch_size" in deferred or not rows:
            rows = config.answers_per_prompt
        chosen["micro_batch_size"] = rows
        chosen["total_batch_size"] = rows * config.world_size * config.max_seq_len
    return {name: value for name, value in chosen.items() if name not in decided}, deferred


def with_all_rows(config: Config) -> Config:
    """Return the settings with the rows of a rank as MICRO_BATCH_SIZE, if it is 0."""
    if config.micro_batch_size:
        return config
    rows = max(1, config.rows_per_step // config.planned_ranks)
    while config.reproducible and config.rows_per_step % rows:
        rows -= 1
    return config.model_copy(update={"micro_batch_size": rows})


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
    if "total_batch_size" in names and (stage != "pretrain" or rows < BATCHES_PER_EPOCH * batch_rows):
        answers = config.answers_per_prompt
        share = ranks * (answers if "micro_batch_size" in names else config.micro_batch_size)
        wanted = max(1, min(MOST_BATCH_ROWS[stage], rows * answers // BATCHES_PER_EPOCH))
        batch_rows = -(-2 ** int(math.log2(wanted)) // share) * share
        chosen["total_batch_size"] = batch_rows * config.max_seq_len
        if "micro_batch_size" in names:
            per_rank = batch_rows // ranks
            chosen["micro_batch_size"] = next(
                n for n in range(min(max(8, answers), per_rank), 0, -1) if per_rank % n == n % answers == 0)
    steps = config.max_steps
    if "max_steps" in names and config.epochs is not None:
        chosen["max_steps"] = steps = max(1, math.ceil(
                config.epochs * rows * config.answers_per_prompt / batch_rows))
    if "warmup_steps" in names and steps < 10 * config.warmup_steps:
        chosen["warmup_steps"] = steps // 10
    return chosen | settings_of_length(steps, names)
