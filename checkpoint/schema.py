"""What a run's folder says, as far as a reader must be able to trust it: a checkpoint's manifest and state, and lines of logs.

What an older version did not write has its default here; what this version does not know was written by a newer one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Optional, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import CheckpointError
from common.files import plain, read_plain

FORMAT = 1
LONGEST_LINE = 1 << 24  # bytes
GONE = "is gone: it was pruned or deleted meanwhile; start again, or take another"
NEWER = "it was written by a newer Paddock; go on with that"

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
WorldSize = Annotated[int, Field(ge=1, lt=1 << 31)]
Place = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=4096)]
KNOWN_FIELDS = ConfigDict(strict=True, extra="forbid")
Kind = TypeVar("Kind", bound=BaseModel)


# ------------------------------------------------------------------------------------------------------------------ checkpoints


class File(BaseModel):
    """A file of a checkpoint."""

    model_config = KNOWN_FIELDS

    size: Count
    sha256: str


class Manifest(BaseModel):
    """A checkpoint's MANIFEST.json."""

    model_config = KNOWN_FIELDS

    format: Literal[1]
    paddock: str
    step: Count
    world_size: WorldSize = 1
    val_loss: Optional[float] = None
    written: int = Field(ge=0)  # after how many others
    files: dict[Place, File] = Field(min_length=1)
    sha256: str  # of all of this, but for itself


@dataclass
class SavedProgress:
    """How far a run is: what a checkpoint remembers besides weights and optimizer."""

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS

    step: Count  # finished steps
    tokens_seen: Count = 0
    skipped_steps: Count = 0  # whose update was left out: fp16 overflows, loss spikes
    val_loss: Optional[float] = None  # of the weights as they are now
    best_val_loss: Optional[float] = None
    best_step: Count = 0
    validations_without_best: Count = 0
    wandb_run_id: Optional[str] = None
    recent_losses: list[float] = field(default_factory=list)  # that a loss spike stands out from
    begun_from: Optional[Place] = None  # the checkpoint that the settings named when this run began
    base: Optional[Place] = None  # where that was: what adapters stand on, and preferences are held against
    base_sha256: Optional[str] = None  # of its weights
    base_beside: Optional[Place] = None  # where it was from the run's folder on, for a tree that is moved as a whole
    # The metrics of the last step, while what is due after it is still to be measured: a signal may come in between.
    pending_metrics: Optional[dict[str, Union[int, float, None]]] = field(default_factory=dict)


class Settings(BaseModel):
    """The settings that a checkpoint was written with, of which any version may have its own."""

    model_config = ConfigDict(strict=True, extra="allow")

    TRAINING_STAGE: str
    LORA_ENABLED: bool = False


class Scaler(BaseModel):
    """The loss scale of fp16, as torch keeps it."""

    model_config = ConfigDict(strict=True, extra="allow")

    scale: float = Field(gt=0)
    growth_factor: float = Field(gt=0)
    backoff_factor: float = Field(gt=0)
    growth_interval: Count
    growth_tracker: Count = Field(alias="_growth_tracker")


class State(BaseModel):
    """A checkpoint's trainer_state.json."""

    model_config = KNOWN_FIELDS

    progress: SavedProgress
    identity: dict[str, Union[str, int]]
    world_size: WorldSize
    settings: Settings
    scaler: Optional[Scaler] = None
    val_loss: Optional[float] = None

    @model_validator(mode="after")
    def adds_up(self) -> "State":
        """Refuse more updates left out than there were."""
        if self.progress.skipped_steps > self.progress.step:
            raise ValueError("progress.skipped_steps is more than progress.step")
        return self


def parsed(content: bytes, kind: type[Kind], path: Path) -> dict[str, Any]:
    """What a file of a checkpoint says, with all that its kind has.

    Raises:
        CheckpointError: it does not say what it must; names the field.
    """
    try:
        return kind.model_validate_json(content).model_dump(by_alias=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        unknown = [fault for fault in faults if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument")]
        fault = (unknown or faults)[0]
        where, what = ".".join(map(str, fault["loc"]))[:100] or "its content", fault["msg"][0].lower() + fault["msg"][1:]
        said = f"{where} is not known to this version: {NEWER}" if unknown else f"{where}: {what}; get it anew"
        raise CheckpointError(f"{path}: {said}, or move this checkpoint away and take another") from error


def read_state_file(path: Path) -> dict[str, Any]:
    """What trainer_state.json says, a `State`.

    Raises:
        CheckpointError: it cannot be read, or does not say what it must.
    """
    try:
        return parsed(read_plain(path), State, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; move this checkpoint away and take another") from error


# ------------------------------------------------------------------------------------------------------------------------- logs


class Line(BaseModel):
    """One line of metrics.jsonl or samples.jsonl."""

    model_config = ConfigDict(strict=True, extra="allow")

    step: Count


class LedgerLine(Line):
    """One line of ledger.jsonl."""

    rows_crc32: str
    loss: Optional[float]
    grad_norm: Optional[float]
    updated: bool


KINDS = {"ledger.jsonl": LedgerLine}


def read_lines(path: Path) -> Iterator[tuple[bytes, Optional[Line]]]:
    """The lines of a log, one by one, each with what it says: None where it is not what a line of this file must be.

    The last one is left out while it is being written, or where a crash has torn it.
    Raises:
        OSError: it cannot be read, or is no file.
    """
    kind = KINDS.get(path.name, Line)
    with open(path, "rb", opener=plain) as file:
        while line := file.readline(LONGEST_LINE):
            try:
                entry = kind.model_validate_json(line)
            except ValidationError:
                entry = None
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    return
            yield line.rstrip(b"\n"), entry


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """What the lines of a log say that can be read; nothing where there is no log.

    Raises:
        CheckpointError: it cannot be read, or is no file.
    """
    try:
        yield from (entry.model_dump() for _, entry in read_lines(path) if entry)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; look at what stands there") from error
