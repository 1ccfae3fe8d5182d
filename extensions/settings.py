"""The settings of the extensions, and the rules on what they support; config.py finds both. Without torch.

SECTIONS has the settings that only an extension reads. RULES has the rules of an extension, which are checked
if EXTENSIONS names it.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

from common.errors import PaddockError, SettingsError, unreadable
from common.files import read_plain
from common.section import Section, curve, fixed, interval, safe

Config = Any  # config.Config, which has these sections
# Of the answers that a GPU generates together: their rows, and the bytes of their keys and values
MOST_ANSWERED_ROWS, MOST_CACHE_BYTES = 64, 2**31


class ExcludeConfig(Section):
    """Data that is left out."""

    exclude_data: Optional[str] = fixed(
        None, "file of documents, chats, pairs or prompts to leave out, with all else unchanged; see "
        "./paddock inspect DATA --find")


def exclude_rules(c: Config) -> Iterator[str]:
    """Check the file, and that other documents of a row do not attend to those that are left out."""
    if not c.exclude_data:
        return
    if not c.document_mask and c.training_stage in ("pretrain", "sft"):
        yield (f"EXCLUDE_DATA={c.exclude_data} needs DOCUMENT_MASK=true; without it, documents attend "
               "to earlier ones of their row")
    try:
        read_selectors(c.exclude_data)
    except PaddockError as error:
        yield f"EXCLUDE_DATA: {error}"


class Selector(NamedTuple):
    """A line of a file of EXCLUDE_DATA, such as "find dragons?"."""

    kind: Literal["find", "hash", "line", "source"]
    value: str


def read_selectors(path: str) -> list[Selector]:
    """Return the selectors in a file of EXCLUDE_DATA. A line that begins with # is a comment."""
    try:
        lines = read_plain(Path(path).expanduser()).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {unreadable(error, 'check the path')}") from error
    selectors = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            selectors.append(selector_of(line.strip(), f"{path}:{number}"))
    return [*dict.fromkeys(selectors)]


def selector_of(line: str, where: str) -> Selector:
    """Return the selector in a line, or raise SettingsError."""
    selector = Selector(*line.partition(" ")[::2])
    try:
        if selector.kind not in ("find", "hash", "line", "source") or not selector.value:
            raise ValueError("expected find PATTERN, hash HASH, line FILE:LINE or source NAME")
        if selector.kind == "find":
            re.compile(selector.value)
    except (ValueError, re.error) as error:
        raise SettingsError(f"{where}: {line[:80]!r}: {error}") from error
    return selector


def reward_terms(c: Config) -> list[tuple[str, float]]:
    """Return the names in REWARD with their weights. Raises ValueError."""
    terms = [term.strip().rpartition("*") for term in c.reward.split(",") if term.strip()]
    return [(name.strip(), float(weight)) if name else (weight, 1.0) for name, _, weight in terms]


def answers_per_row(c: Config) -> int:
    """Return how many answers of GRPO share a training row, in which their prompt is computed once."""
    fits = c.grpo_group * c.answer_tokens <= c.max_seq_len and not c.distillation_enabled
    return c.grpo_group if fits and c.training_stage == "grpo" else 1


def answered_together(c: Config, compute_bytes: int, device_type: str) -> int:
    """Return how many micro-batches of prompts GRPO answers together: a GPU decodes many rows as fast as few.

    It depends neither on the ranks nor on the GPU's memory, so that the answers do not.
    """
    if device_type != "cuda":
        return 1
    row_bytes = 2 * c.n_layers * c.max_seq_len * c.n_kv_heads * c.head_dim * compute_bytes
    return max(1, min(MOST_ANSWERED_ROWS, MOST_CACHE_BYTES // row_bytes) // c.micro_batch_size)


class OnlineConfig(Section):
    """Training on the model's own answers, which functions reward (GRPO)."""

    used_if = ("training_stage", "grpo")
    reward: str = fixed(
        "exact", "sum of functions: exact, contains, regex, math, math_verify, length, module:function; "
        "comma-separated, perhaps with weights: math*2,rewards:polite*-0.5")
    grpo_group: int = fixed(8, "answers to each prompt, which are compared with each other", ge=1, le=4096)
    grpo_max_tokens: Optional[int] = fixed(
        None, "maximum tokens per answer, with its end; none = half of MAX_SEQ_LEN", ge=1)
    grpo_loss: Literal["grpo", "dr_grpo", "dapo"] = fixed(
        "dapo", "mean over: each answer's tokens (grpo), GRPO_MAX_TOKENS (dr_grpo), or all tokens (dapo)")
    grpo_clip_low: float = fixed(0.2, "clip the probability ratio below 1 minus this", gt=0, lt=1)
    grpo_clip_high: float = fixed(0.2, "clip the probability ratio above 1 plus this; DAPO: 0.28", gt=0)
    grpo_beta: float = fixed(0.0, "weight of the KL divergence from the start model; 0 = no reference", ge=0)
    grpo_updates: int = fixed(1, "updates on the answers of a step; the ratio is clipped from the second on",
                              ge=1, le=1000)

    @property
    def answer_tokens(self) -> int:
        return self.grpo_max_tokens or max(1, self.max_seq_len // 2)


def online_rules(c: Config) -> Iterator[str]:
    """Check the groups and the reward, and that GRPO supports the features."""
    if c.training_stage != "grpo":
        return
    from extensions.rewards import BUILT_IN  # here: compiling its patterns takes time

    if c.micro_batch_size % c.grpo_group:
        groups = -(-c.micro_batch_size // c.grpo_group)
        yield (f"MICRO_BATCH_SIZE={c.micro_batch_size} must be a multiple of GRPO_GROUP="
               f"{c.grpo_group}, as the answers to a prompt are generated together; try "
               f"{groups * c.grpo_group}")
    if c.grpo_group == 1 and not c.distillation_enabled:
        yield "GRPO_GROUP=1 compares an answer with no other; set it to 2 or more"
    if c.answer_tokens >= c.max_seq_len:
        yield (f"GRPO_MAX_TOKENS={c.grpo_max_tokens} leaves no room for a prompt in MAX_SEQ_LEN="
               f"{c.max_seq_len}; lower it")
    names = []
    with suppress(ValueError):
        names = [name for name, _ in reward_terms(c)]
    unknown = [name for name in names if name not in BUILT_IN and ":" not in name]
    if unknown or not names:
        what = f"{unknown[0]} is not" if unknown else "expected name*weight, such as math*2,length*-0.01:"
        yield (f"REWARD={c.reward}: {what} one of {', '.join(BUILT_IN)}, or of the form module:function")
    refused = {f"SHARDING={c.sharding}": c.sharding != "none",
               f"LOSS_SPIKE_POLICY={c.loss_spike_policy}": c.loss_spike_policy != "warn",
               f"EARLY_STOPPING_PATIENCE={c.early_stopping_patience}":
                   c.early_stopping_patience > 0}
    if c.distillation_enabled:  # the teacher scores new answers
        refused[f"GRPO_BETA={c.grpo_beta}"] = c.grpo_beta > 0
    for feature in (feature for feature, is_used in refused.items() if is_used):
        yield (f"{feature} does not work with TRAINING_STAGE=grpo"
               f"{' and DISTILLATION_ENABLED=true' * c.distillation_enabled}; remove it")


def prepare_ahead_rules(c: Config) -> Iterator[str]:
    """Check that nothing depends on the size of the data."""
    if not c.prepare_ahead:
        return
    if c.training_stage not in ("pretrain", "sft"):
        yield (f"PREPARE_AHEAD=true works with TRAINING_STAGE=pretrain and sft, not with {c.training_stage}, "
               "which needs all its examples at the start; remove it")
    if c.lora_enabled and c.lora_train_tokens == "auto":
        yield ("LORA_TRAIN_TOKENS=auto looks for new tokens in all data before the first step, but with "
               "PREPARE_AHEAD=true, it is not there yet; set it to none, or to the new control tokens")
    if c.exclude_data:
        yield (f"EXCLUDE_DATA={c.exclude_data} searches all data before the first step, but with "
               "PREPARE_AHEAD=true, it is not there yet; remove one of them")
    if c.epochs or "max_steps" not in c.model_fields_set:
        instead = f" instead of EPOCHS={c.epochs:g}" if c.epochs else ""
        yield (f"PREPARE_AHEAD=true needs MAX_STEPS, the length of the run and of its learning-rate "
               f"schedule, because the size of the data is not known; set it{instead}")


def rounding_rules(c: Config) -> Iterator[str]:
    """Check that the optimizer and the step support the features."""
    in_backward = f"UPDATE_IN_BACKWARD={str(c.update_in_backward).lower()}"
    used = {"WEIGHT_DTYPE=bf16": c.weight_dtype == "bf16",
            f"OPTIMIZER_DTYPE={c.optimizer_dtype}": c.optimizer_dtype != "fp32",
            in_backward: c.update_in_backward}
    for feature in (feature for feature, is_used in used.items() if is_used):
        if c.lora_enabled:
            yield (f"{feature} is for full training, and adapters are small; remove it, or set "
                   "LORA_ENABLED=false")
    if not c.update_in_backward:
        return
    clips = c.update_in_backward == "clipped"
    refused = {
        "DEBUG=true": (c.debug, "set DEBUG=false"),
        f"LOSS_SPIKE_POLICY={c.loss_spike_policy}": (
            c.loss_spike_policy != "warn", "set LOSS_SPIKE_POLICY=warn"),
        "REPRODUCIBLE=true": (c.reproducible, "set REPRODUCIBLE=false"),
        f"MAX_GRAD_NORM={c.max_grad_norm:g}": (
            (c.max_grad_norm > 0) != clips, "set UPDATE_IN_BACKWARD=true" if clips else
            "set MAX_GRAD_NORM=0, or UPDATE_IN_BACKWARD=clipped"),
        f"OPTIMIZER={c.optimizer}": (c.optimizer != "adamw", "set OPTIMIZER=adamw"),
        f"{c.accumulation_steps} micro-batches a step": (
            c.accumulation_steps > 1, "set MICRO_BATCH_SIZE=0, or a smaller TOTAL_BATCH_SIZE"),
        f"{c.grpo_updates} updates a step": (
            c.training_stage == "grpo" and c.grpo_updates > 1, "set GRPO_UPDATES=1"),
        "SHARDING=none on several ranks": (
            c.world_size > 1 and c.sharding == "none", "set SHARDING=full, or hybrid")}
    for feature, (is_used, remedy) in refused.items():
        if is_used:
            yield f"{in_backward} does not work with {feature}; {remedy}, or remove it"


class ReportConfig(Section):
    """The report."""

    report: bool = safe(True, "write report.html into the run folder at each save and at the end")


class CardConfig(Section):
    """The model card."""

    model_license: str = safe("", "license in the model card, such as apache-2.0; empty = the base model's")


class TrackersConfig(Section):
    """Logs for other programs."""

    wandb_enabled: bool = safe(False, "also log to Weights & Biases; offline unless WANDB_API_KEY is set")
    tensorboard_enabled: bool = safe(False, "also write TensorBoard files")
    trackio_enabled: bool = safe(False, "also log to trackio (pip install trackio)")
    mlflow_enabled: bool = safe(False, "also log to mlflow (pip install mlflow)")


class GuardsConfig(Section):
    """Explanations of bad steps."""

    drift_check_every: int = safe(
        500, "steps between comparisons of the ranks' weights and optimizer states; 0 = never", ge=0)


class EvaluateConfig(Section):
    """Evaluations that generate text."""

    generation_eval_every: int = safe(
        0, "steps between evaluations of generated answers (sft and dpo); 0 = never", ge=0)
    generation_eval_examples: int = curve(64, "number of held-out chats or pairs to answer", ge=1)
    generation_eval_tokens: int = curve(128, "maximum tokens per answer", ge=1)
    metric: str = safe("", "module:function(prompt, answer, record) that scores generated answers")
    sample_every: int = interval(3, 500, "generated samples; 0 = never")
    sample_prompts: str = safe(
        "", "prompts for samples, separated by |; none = for chats, held-out prompts", separator="|")
    sample_tokens: int = safe(96, "maximum tokens per sample", ge=1)
    sample_temperature: float = safe(0.8, "sampling temperature; 0 = greedy", ge=0)
    sample_top_p: float = safe(0.95, "probability mass for nucleus sampling", gt=0, le=1)


def prompts_to_answer(c: Config) -> int:
    """Return the number of held-out chats or pairs to answer."""
    return c.generation_eval_examples if c.generation_eval_every else 0


def evaluate_rules(c: Config) -> Iterator[str]:
    """Check that the stage has answers to evaluate, and the form of METRIC."""
    every, stage = c.generation_eval_every, c.training_stage
    if c.metric and not every and stage in ("sft", "dpo"):
        yield (f"METRIC={c.metric} scores generated answers; set GENERATION_EVAL_EVERY too, or METRIC= for "
               "none")
    if c.metric and not re.fullmatch(r"[\w.]+:\w+", c.metric):
        yield f"METRIC={c.metric} does not have the form module:function; it is one function"
    if re.search(":(n|exact_match|rouge_.*|bleu|.*_stderr)$", c.metric):
        yield f"METRIC={c.metric} is the name of another metric of answers; rename the function"
    is_kto = stage == "dpo" and c.preference_objective == "kto"
    if every and (stage in ("pretrain", "grpo") or is_kto):
        data = "PREFERENCE_OBJECTIVE=kto" if is_kto else f"TRAINING_STAGE={stage}"
        yield (f"GENERATION_EVAL_EVERY={every} compares with good answers, which the data of {data} may not "
               "have; set it to 0")


class ProfileConfig(Section):
    """Measurements of speed, memory and power."""

    peak_tflops: Optional[float] = safe(None, "GPU's dense bf16 TFLOP/s for MFU; none = built-in table", gt=0)
    power_hz: float = safe(
        1.0, "samples of a GPU's power, clock and temperature per second (NVML); 0 = none", ge=0, le=1000)
    profile_steps: Optional[str] = safe(
        None, "steps, such as 3:7, to record with torch.profiler in the run folder's profile/")
    memory_snapshot: Optional[int] = safe(
        None, "step whose CUDA allocations are recorded in the run folder's profile/", ge=1)


def profile_rules(c: Config) -> Iterator[str]:
    """Check the steps to measure."""
    try:
        step_window(c.profile_steps)
    except ValueError:
        yield (f"PROFILE_STEPS={c.profile_steps} must be the first and the last step from 1, such as "
               "3:7")
    if c.memory_snapshot and c.device == "cpu":
        yield (f"MEMORY_SNAPSHOT={c.memory_snapshot} records CUDA allocations, but DEVICE=cpu; remove "
               "it")


def distillation_rules(c: Config) -> Iterator[str]:
    """Check the stage, and that a teacher is named."""
    if c.training_stage == "dpo" and c.distillation_enabled:
        yield "DISTILLATION_ENABLED works in the stages pretrain, sft and grpo, not in dpo"
    if c.distillation_enabled and c.teacher_model is None:
        yield "DISTILLATION_ENABLED=true needs TEACHER_MODEL: a checkpoint, a model folder or a hub name"


def step_window(text: Optional[str]) -> Optional[range]:
    """Parse "FIRST:LAST" (inclusive) into a range of steps; None stays None. Raises ValueError."""
    if text is None:
        return None
    numbers = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text.strip())
    first, last = map(int, numbers.groups()) if numbers else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(text)
    return range(first, last + 1)


# By extension, in the order of the documents.
SECTIONS = {"online": OnlineConfig, "exclude": ExcludeConfig, "evaluate": EvaluateConfig,
            "report": ReportConfig, "card": CardConfig, "trackers": TrackersConfig, "guards": GuardsConfig,
            "profile": ProfileConfig}
RULES = {"exclude": exclude_rules, "online": online_rules, "prepare_ahead": prepare_ahead_rules,
         "rounding": rounding_rules, "distillation": distillation_rules, "evaluate": evaluate_rules,
         "profile": profile_rules}
