"""The settings of the extensions, without torch: config.py finds SECTIONS and adds them to the core's."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Optional, Union

from common.errors import PaddockError, SettingsError, unreadable
from common.files import read_plain
from common.section import Section, curve, fixed, interval, safe


class ExcludeConfig(Section):
    """Data that is left out."""

    exclude_data: Optional[str] = fixed(
        None, "file of documents, chats, pairs or prompts to leave out, with all else unchanged; see "
        "./paddock inspect DATA --find")

    def rules(self) -> Iterator[str]:
        """Check the file, and that other documents of a row do not attend to those that are left out."""
        if not self.exclude_data:
            return
        if not self.document_mask and self.training_stage in ("pretrain", "sft"):
            yield (f"EXCLUDE_DATA={self.exclude_data} needs DOCUMENT_MASK=true; without it, documents attend "
                   "to earlier ones of their row")
        try:
            read_selectors(self.exclude_data)
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


class OnlineConfig(Section):
    """Training on the model's own answers, which functions reward (GRPO)."""

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
    def reward_terms(self) -> list[tuple[str, float]]:
        """The names in REWARD with their weights. Raises ValueError."""
        terms = [term.strip().rpartition("*") for term in self.reward.split(",") if term.strip()]
        return [(name.strip(), float(weight)) if name else (weight, 1.0) for name, _, weight in terms]

    @property
    def answers_per_prompt(self) -> int:
        return self.grpo_group if self.training_stage == "grpo" else 1

    @property
    def updates_per_step(self) -> int:
        return self.grpo_updates if self.training_stage == "grpo" else 1

    @property
    def answer_tokens(self) -> int:
        """Maximum tokens of a generated answer."""
        return self.grpo_max_tokens or max(1, self.max_seq_len // 2)

    @property
    def answers_per_row(self) -> int:
        """Answers of GRPO that share a training row, in which their prompt is computed once."""
        fits = self.grpo_group * self.answer_tokens <= self.max_seq_len and not self.distillation_enabled
        return self.grpo_group if fits and self.training_stage == "grpo" else 1

    def is_used(self) -> bool:
        return self.training_stage == "grpo"

    def rules(self) -> Iterator[str]:
        """Check the groups and the reward, and that GRPO supports the features."""
        if self.training_stage != "grpo":
            return
        from extensions.rewards import BUILT_IN  # here: compiling its patterns takes time

        if self.micro_batch_size % self.grpo_group:
            groups = -(-self.micro_batch_size // self.grpo_group)
            yield (f"MICRO_BATCH_SIZE={self.micro_batch_size} must be a multiple of GRPO_GROUP="
                   f"{self.grpo_group}, as the answers to a prompt are generated together; try "
                   f"{groups * self.grpo_group}")
        if self.grpo_group == 1 and not self.distillation_enabled:
            yield "GRPO_GROUP=1 compares an answer with no other; set it to 2 or more"
        if self.answer_tokens >= self.max_seq_len:
            yield (f"GRPO_MAX_TOKENS={self.grpo_max_tokens} leaves no room for a prompt in MAX_SEQ_LEN="
                   f"{self.max_seq_len}; lower it")
        try:
            names = [name for name, _ in self.reward_terms]
            unknown = [name for name in names if name not in BUILT_IN and ":" not in name]
            if unknown or not names:
                yield (f"REWARD={self.reward}: {unknown[0] if unknown else 'it'} is not one of "
                       f"{', '.join(BUILT_IN)}, and does not have the form module:function")
        except ValueError:
            yield (f"REWARD={self.reward} does not have the form name*weight, ...; an example is "
                   "math*2,length*-0.01")
        refused = {f"SHARDING={self.sharding}": self.sharding != "none",
                   "PRECISION=fp16": self.precision == "fp16",
                   f"LOSS_SPIKE_POLICY={self.loss_spike_policy}": self.loss_spike_policy != "warn",
                   f"EARLY_STOPPING_PATIENCE={self.early_stopping_patience}":
                       self.early_stopping_patience > 0}
        if self.distillation_enabled:  # the teacher scores new answers
            refused[f"GRPO_BETA={self.grpo_beta}"] = self.grpo_beta > 0
        for feature in (feature for feature, is_used in refused.items() if is_used):
            yield (f"{feature} does not work with TRAINING_STAGE=grpo"
                   f"{' and DISTILLATION_ENABLED=true' * self.distillation_enabled}; remove it")


class PrepareAheadConfig(Section):
    """Training on data that is still being prepared."""

    prepare_ahead: bool = fixed(
        False, "start pretraining after the first shard, and prepare the others meanwhile")

    @property
    def data_grows(self) -> bool:
        return self.prepare_ahead

    def rules(self) -> Iterator[str]:
        """Check that nothing depends on the size of the data."""
        if not self.prepare_ahead:
            return
        if self.training_stage != "pretrain":
            yield (f"PREPARE_AHEAD=true works with TRAINING_STAGE=pretrain, not with {self.training_stage}, "
                   "whose examples are packed into rows together; remove it")
        if self.exclude_data:
            yield (f"EXCLUDE_DATA={self.exclude_data} searches all data before the first step, but with "
                   "PREPARE_AHEAD=true, it is not there yet; remove one of them")
        if self.epochs:
            yield (f"EPOCHS={self.epochs:g} needs the size of the data, which PREPARE_AHEAD=true does not "
                   "know; set MAX_STEPS instead")
        elif "max_steps" not in self.model_fields_set:
            yield ("PREPARE_AHEAD=true needs MAX_STEPS, the length of the run and of its learning-rate "
                   "schedule, because the size of the data is not known; set it")


class RoundingConfig(Section):
    """Weights and optimizer states in fewer bytes."""

    weight_dtype: Literal["fp32", "bf16"] = fixed(
        "fp32", "dtype of matrices; bf16 = stochastic rounding, no fp32 copy, 2 bytes a gradient; no LoRA")
    optimizer_dtype: Literal["fp32", "bf16"] = fixed(
        "fp32", "dtype of the optimizer's state of matrices; bf16 = stochastic rounding; no LoRA")
    update_in_backward: Union[bool, Literal["false", "true", "clipped"]] = curve(
        False, "update a matrix when its gradient is complete, and free that; a bad step is not undone; "
        "clipped = clip by the norm of the step before", union_mode="left_to_right")

    @property
    def bf16_weights(self) -> bool:
        return self.weight_dtype == "bf16"

    @property
    def special_update(self) -> bool:
        return self.bf16_weights or self.optimizer_dtype != "fp32" or bool(self.update_in_backward)

    @property
    def keeps_bad_steps(self) -> bool:
        return bool(self.update_in_backward)

    def rules(self) -> Iterator[str]:
        """Check that the optimizer and the step support the features."""
        in_backward = f"UPDATE_IN_BACKWARD={str(self.update_in_backward).lower()}"
        used = {"WEIGHT_DTYPE=bf16": self.bf16_weights,
                f"OPTIMIZER_DTYPE={self.optimizer_dtype}": self.optimizer_dtype != "fp32",
                in_backward: self.update_in_backward}
        for feature in (feature for feature, is_used in used.items() if is_used):
            if self.lora_enabled:
                yield (f"{feature} is for full training, and adapters are small; remove it, or set "
                       "LORA_ENABLED=false")
            if self.precision == "fp16":
                yield f"PRECISION=fp16 does not work with {feature}; use bf16, or fp32"
            if self.device == "mps":
                yield f"{feature} does not work on an Apple GPU; remove it, or set DEVICE=cpu"
        if not self.update_in_backward:
            return
        clips = self.update_in_backward == "clipped"
        refused = {
            "DEBUG=true": (self.debug, "set DEBUG=false"),
            f"LOSS_SPIKE_POLICY={self.loss_spike_policy}": (
                self.loss_spike_policy != "warn", "set LOSS_SPIKE_POLICY=warn"),
            "REPRODUCIBLE=true": (self.reproducible, "set REPRODUCIBLE=false"),
            f"MAX_GRAD_NORM={self.max_grad_norm:g}": (
                (self.max_grad_norm > 0) != clips, "set UPDATE_IN_BACKWARD=true" if clips else
                "set MAX_GRAD_NORM=0, or UPDATE_IN_BACKWARD=clipped"),
            f"OPTIMIZER={self.optimizer}": (self.optimizer != "adamw", "set OPTIMIZER=adamw"),
            f"{self.accumulation_steps} micro-batches a step": (
                self.accumulation_steps > 1, "set MICRO_BATCH_SIZE=0, or a smaller TOTAL_BATCH_SIZE"),
            f"{self.updates_per_step} updates a step": (self.updates_per_step > 1, "set GRPO_UPDATES=1"),
            "SHARDING=none on several ranks": (
                self.world_size > 1 and self.sharding == "none", "set SHARDING=full, or hybrid")}
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

    @property
    def prompts_to_answer(self) -> int:
        """Held-out chats or pairs to answer."""
        return self.generation_eval_examples if self.generation_eval_every else 0

    def rules(self) -> Iterator[str]:
        """Check that the stage has answers to evaluate, and the form of METRIC."""
        every, stage = self.generation_eval_every, self.training_stage
        if self.metric and not every and stage in ("sft", "dpo"):
            yield f"METRIC={self.metric} scores generated answers; set GENERATION_EVAL_EVERY too"
        if self.metric and not re.fullmatch(r"[\w.]+:\w+", self.metric):
            yield f"METRIC={self.metric} does not have the form module:function"
        if re.search(":(n|exact_match|rouge_.*|bleu|.*_stderr)$", self.metric):
            yield f"METRIC={self.metric} is the name of another metric of answers; rename the function"
        if every and stage == "dpo" and self.preference_objective == "kto":
            yield (f"GENERATION_EVAL_EVERY={every} compares with good answers, which "
                   "PREFERENCE_OBJECTIVE=kto may not have; set it to 0")
        if every and stage in ("pretrain", "grpo"):
            yield (f"GENERATION_EVAL_EVERY={every} compares answers, which only the stages sft "
                   f"and dpo have; set it to 0 with TRAINING_STAGE={stage}")


class ProfileConfig(Section):
    """Measurements of speed, memory and power."""

    peak_tflops: Optional[float] = safe(None, "GPU's dense bf16 TFLOP/s for MFU; none = built-in table", gt=0)
    power_hz: float = safe(
        1.0, "samples of a GPU's power, clock and temperature per second (NVML); 0 = none", ge=0, le=1000)
    profile_steps: Optional[str] = safe(
        None, "steps, such as 3:7, to record with torch.profiler in the run folder's profile/")
    memory_snapshot: Optional[int] = safe(
        None, "step whose CUDA allocations are recorded in the run folder's profile/", ge=1)

    def rules(self) -> Iterator[str]:
        """Check the steps to measure."""
        try:
            step_window(self.profile_steps)
        except ValueError:
            yield (f"PROFILE_STEPS={self.profile_steps} must be the first and the last step from 1, such as "
                   "3:7")
        if self.memory_snapshot and self.device == "cpu":
            yield (f"MEMORY_SNAPSHOT={self.memory_snapshot} records CUDA allocations, but DEVICE=cpu; remove "
                   "it")


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
SECTIONS = {"prepare_ahead": PrepareAheadConfig, "exclude": ExcludeConfig, "online": OnlineConfig,
            "rounding": RoundingConfig, "evaluate": EvaluateConfig, "report": ReportConfig,
            "card": CardConfig, "trackers": TrackersConfig, "guards": GuardsConfig, "profile": ProfileConfig}
