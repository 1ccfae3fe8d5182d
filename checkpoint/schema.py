"""Schemas of a checkpoint's manifest and state, and of the lines in a run's logs, with results per item.

An unknown field means that a newer version wrote the file.
"""

import base64
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Optional, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import CheckpointError
from common.files import plain

if TYPE_CHECKING:  # a start that fails needs neither this nor the time of its import
    import numpy as np

MAX_LINE_BYTES = 1 << 24  # in a log

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
WorldSize = Annotated[int, Field(ge=1, lt=1 << 31)]
MOST_SECONDS = 1e11  # largest Unix time in a log: the year 5138
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=-MOST_SECONDS, lt=MOST_SECONDS)]
PathText = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=4096)]
KNOWN_FIELDS = ConfigDict(strict=True, extra="forbid", defer_build=True)


class Known(BaseModel):
    """A schema without unknown fields."""

    model_config = KNOWN_FIELDS


class Open(BaseModel):
    """A schema that allows unknown fields."""

    model_config = ConfigDict(strict=True, extra="allow", defer_build=True)


class File(Known):
    """A file of a checkpoint, with a `sha256` or, if it contains tensors, the other fields."""

    size: Count
    sha256: str = ""
    header: str = ""
    tree: str = ""
    block_multiple: Annotated[int, Field(ge=1, lt=1 << 31)] = 1


class Manifest(Known):
    """A checkpoint's MANIFEST.json."""

    format: Literal[2]
    paddock: str
    step: Count
    world_size: WorldSize = 1
    val_loss: Optional[float] = None
    val_items: str = ""
    written: int = Field(ge=0)  # order of writing: 1 + the highest number in the folder
    files: dict[PathText, File] = Field(min_length=1)
    sha256: str  # of the manifest without this field


@dataclass
class Progress:
    """The progress of a run: its state in a checkpoint besides weights and optimizer."""

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS

    step: Count  # finished steps
    tokens_seen: Count = 0
    skipped_steps: Count = 0  # steps without an update: fp16 overflows, loss spikes
    val_loss: Optional[float] = None  # of the current weights
    val_items: str = ""  # hash of the items of the validation losses
    first_val_loss: Optional[float] = None  # on these items
    best_val_loss: Optional[float] = None
    best_step: Count = 0
    validations_without_best: Count = 0
    wandb_run_id: Optional[str] = None
    recent_losses: list[float] = field(default_factory=list)  # the window of the loss-spike test
    last_norm: Optional[Number] = None  # gradient norm of the last update, with UPDATE_IN_BACKWARD
    gradient_exponent: int = 14  # with REPRODUCIBLE: gradients are at most 2^this
    begun_from: Optional[PathText] = None  # the start checkpoint as named in the settings at the first start
    base: Optional[PathText] = None  # path of this checkpoint: base of adapters, reference for preferences
    base_sha256: Optional[str] = None  # hash of its weights
    base_beside: Optional[PathText] = None  # its path relative to the run's folder, in case both are moved
    # Metrics of the last step until its evaluations are complete, which a signal may interrupt.
    pending_metrics: Optional[dict[str, Union[int, float, None]]] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """Steps that changed the weights; the learning-rate schedule counts only these."""
        return self.step - self.skipped_steps

    def note_validation(self, loss: float, skip_steps: int, items: str = "") -> bool:
        """Record a validation loss; return whether it is a new best, not above the first on these items."""
        if self.val_items not in ("", items):
            self.first_val_loss, self.best_val_loss = None, None
            self.best_step = self.validations_without_best = 0
        self.val_items, known = items, loss if math.isfinite(loss) else None  # JSON has no NaN
        self.first_val_loss = known if self.first_val_loss is None else self.first_val_loss
        self.val_loss = known if self.step else None
        best = math.inf if self.best_val_loss is None else self.best_val_loss
        if self.step and known is not None and loss < best and not loss > self.first_val_loss:
            self.best_val_loss, self.best_step, self.validations_without_best = loss, self.step, 0
            return True
        if self.step > skip_steps:
            self.validations_without_best += 1
        return False


class Settings(Open):
    """Settings of a checkpoint that are read by name."""

    TRAINING_STAGE: str
    LORA_ENABLED: bool = False


class Scaler(Open):
    """The state of torch.amp.GradScaler."""

    scale: float = Field(gt=0)
    growth_factor: float = Field(gt=0)
    backoff_factor: float = Field(gt=0)
    growth_interval: Count
    growth_tracker: Count = Field(alias="_growth_tracker")


class State(Known):
    """A checkpoint's trainer_state.json."""

    progress: Progress
    identity: dict[str, Union[str, int]]
    world_size: WorldSize
    settings: Settings
    scaler: Optional[Scaler] = None
    val_loss: Optional[float] = None
    base_dtype: Optional[str] = None  # of the weights that training began with, unless it is float32
    extensions: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def check_steps(self) -> "State":
        if self.progress.skipped_steps > self.progress.step:
            raise ValueError("progress.skipped_steps is more than progress.step")
        return self


class Line(Open):
    """A line of a log; metrics.jsonl adds a field per metric."""

    step: Count


class LedgerLine(Line):
    """One line of ledger.jsonl."""

    rows_crc32: str
    loss: Optional[float]
    grad_norm: Optional[float]
    updated: bool
    weights: Optional[str] = None  # with LEDGER_CHECKSUM: 64 bits in hex,
    tensors: Optional[str] = None  # and 32 bits of each trained tensor, by name


class EventLine(Line):
    """A line of events.jsonl: an event after a step."""

    time: Seconds
    event: str
    seconds: Optional[Seconds] = None  # duration
    reason: Optional[str] = None  # for the end of a process
    previous_step: Optional[Count] = None  # for a start: the last step taken before, and its time
    previous_time: Optional[Seconds] = None
    cause: Optional[str] = None  # for the start of a process that the launcher restarted
    launcher: Optional[Count] = None  # for a start: the process that may start it again
    ratio: Optional[Number] = None  # for a slow rank: its time relative to the others


class SampleLine(Line):
    """One line of samples.jsonl."""

    prompt: str = ""
    text: str = ""


class RolloutLine(Line):
    """A line of rollouts.jsonl: an answer of a logged step."""

    group: Count
    prompt: str
    answer: str
    reward: Optional[float]  # None if a function failed
    advantage: float
    tokens: Count
    rewards: dict[str, float] = {}  # by function, without weights


class AnswerText(Open):
    """An answer to a held-out prompt, in a line of evaluations.jsonl."""

    prompt: str
    answer: str
    reference: str = ""
    reward: Optional[Number] = None


class EvaluationLine(Line):
    """A line of evaluations.jsonl, without its scores, one per item."""

    name: str
    items: str
    n: Count
    texts: list[AnswerText] = []


# Names of evaluations; others are multiple-choice sets.
VALIDATION, GENERATION, REWARD = "validation", "generation", "val_reward"
SCHEMAS = {"metrics.jsonl": Line, "ledger.jsonl": LedgerLine, "events.jsonl": EventLine,
           "samples.jsonl": SampleLine, "evaluations.jsonl": EvaluationLine, "rollouts.jsonl": RolloutLine}


def number(value: Any, most: float = sys.float_info.max) -> Optional[float]:
    """Return the value if it is a number between -most and most, else None."""
    return float(value) if type(value) in (float, int) and -most <= value <= most else None


def parse(content: bytes, schema: type[BaseModel], path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's JSON file, with defaults for missing fields."""
    try:
        return schema.model_validate_json(content).model_dump(by_alias=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        unknown = [fault for fault in faults
                   if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument")]
        fault = (unknown or faults)[0]
        where = ".".join(map(str, fault["loc"]))[:100] or "its content"
        problem = f"{where}: {fault['msg'][0].lower()}{fault['msg'][1:]}; copy it again"
        if unknown:
            problem = (f"{where} is not known to this version: it was written by a newer Paddock; use that "
                       "version")
        raise CheckpointError(f"{path}: {problem}, or move this checkpoint away and use another") from error


def parse_line(line: bytes, file_name: str) -> Optional[Line]:
    with suppress(ValidationError):
        return SCHEMAS.get(file_name, Line).model_validate_json(line)
    return None


def read_lines(path: Path) -> Iterator[tuple[bytes, Optional[Line]]]:
    """Yield each line of a log, raw and parsed; a missing file has none. Raises OSError.

    An incomplete last line is skipped, unless only its line end is missing.
    """
    with suppress(FileNotFoundError), open(path, "rb", opener=plain) as file:
        for line in iter(partial(file.readline, MAX_LINE_BYTES), b""):
            entry = parse_line(line, path.name)
            if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                yield line, entry
            elif entry:
                yield line + b"\n", entry


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a log, if it exists."""
    try:
        yield from (entry.model_dump() for _, entry in read_lines(path) if entry)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check this path") from error


def packed_bits(values: Iterable[bool]) -> str:
    """Return booleans as base64 text, eight per byte, most significant bit first."""
    digits = "".join("1" if value else "0" for value in values)
    size = -(-len(digits) // 8)
    return base64.b64encode(int(digits.ljust(8 * size, "0") or "0", 2).to_bytes(size, "big")).decode()


def error_of_share(share: float, n: int) -> float:
    """Return the standard error of a share: sample standard deviation / sqrt(n)."""
    return math.sqrt(share * (1 - share) / max(1, n - 1))


def ratio_error(losses: "np.ndarray", counts: "np.ndarray") -> Optional[float]:
    """Return the standard error of the mean loss over all units, from blocks' mean losses and counts.

    Units of a block are correlated, and blocks differ in size; one block gives None. The mean R is the ratio
    of the sums of loss sums L and counts C over B blocks; its variance is B / (B - 1) * sum((L - R C)^2) /
    sum(C)^2. Source: Cochran 1977, Sampling Techniques, chapter 6, ratio estimate without finite correction.
    """
    blocks, total = len(losses), counts.sum()
    if blocks < 2 or not total:
        return None
    deviations = counts * (losses - (losses * counts).sum() / total)
    return math.sqrt(blocks / (blocks - 1) * float((deviations**2).sum())) / float(total)
