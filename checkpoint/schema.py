"""The manifest of a checkpoint: the size and SHA-256 of each file. Needs only the standard library.

The fields of a checkpoint's manifest and state, and of the lines of a run's logs.

A field that an older version did not write has a default; an unknown field means a newer version wrote it.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Optional, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import CheckpointError
from common.files import leads_outside, plain, read_plain, sha256
from common.text import command

MANIFEST = "MANIFEST.json"
FORMAT = 1
CARD = "README.md"  # which the user may edit, so it is not listed
GONE = "is gone: it was pruned or deleted in the meantime; start again, or choose another"
NEWER = "it was written by a newer Paddock; use that version"


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Return the only valid bytes of this manifest, its own hash included: any other byte is damage."""
    content = json.dumps(manifest, indent=1, sort_keys=True)
    seal = hashlib.sha256(content.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": seal}, indent=1, sort_keys=True) + "\n").encode()


def read_sealed(folder: Path) -> bytes:
    """Return the content of a checkpoint's manifest, verified by its own hash; its files are not."""
    path = Path(folder) / MANIFEST
    try:
        content = read_plain(path)
    except FileNotFoundError as error:
        problem = GONE if not os.path.isdir(folder) else (
            f"has no {MANIFEST}: it is no checkpoint of Paddock's, or an incomplete one; import a model from "
            f"elsewhere with {command('scripts/import_checkpoint.py')}")
        raise CheckpointError(f"{folder} {problem}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        manifest = json.loads(content)
        intact = sealed({key: value for key, value in manifest.items() if key != "sha256"}) == content
    except (ValueError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is damaged; use another checkpoint")
    if isinstance(number := manifest.get("format"), int) and number > FORMAT:
        raise CheckpointError(f"{path} has format {number}, and this version reads {FORMAT}: {NEWER}")
    return content


def fault_of(folder: Path, name: str, expected: Mapping[str, Any],
             advance: Callable[[int], object] = lambda count: None) -> Optional[str]:
    """Return what is wrong with a file that a manifest lists, in words; None if it is intact.

    Args:
        advance: called with the number of bytes of each block that was hashed.
    """
    path = folder / name
    if leads_outside(name, folder):
        return f"{folder / MANIFEST} lists a file outside its folder: {name!r} (put a copy of it there)"
    try:
        with open(path, "rb", opener=plain) as file:
            size = os.fstat(file.fileno()).st_size
            digest = sha256(file, advance) if size == expected["size"] else None
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if digest is None:
        return f"{path} is damaged: it has {size:,} bytes, and {expected['size']:,} were written"
    return None if digest == expected["sha256"] else f"{path} is damaged: its SHA-256 has changed"


MAX_LINE_BYTES = 1 << 24

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
WorldSize = Annotated[int, Field(ge=1, lt=1 << 31)]
MOST_SECONDS = 1e11  # of a time in a log, in Unix seconds: the year 5138
Number = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=-MOST_SECONDS, lt=MOST_SECONDS)]
PathText = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=4096)]
KNOWN_FIELDS = ConfigDict(strict=True, extra="forbid")
ANY_FIELDS = ConfigDict(strict=True, extra="allow")
Schema = TypeVar("Schema", bound=BaseModel)


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
    written: int = Field(ge=0)  # 1 + the highest number beside it: the order of writing
    files: dict[PathText, File] = Field(min_length=1)
    sha256: str  # of the manifest without this field


@dataclass
class SavedProgress:
    """What a checkpoint remembers of a run besides weights and optimizer."""

    __pydantic_config__: ClassVar[ConfigDict] = KNOWN_FIELDS

    step: Count  # finished steps
    tokens_seen: Count = 0
    skipped_steps: Count = 0  # steps without an update: fp16 overflows, loss spikes
    val_loss: Optional[float] = None  # of the current weights
    best_val_loss: Optional[float] = None
    best_step: Count = 0
    validations_without_best: Count = 0
    wandb_run_id: Optional[str] = None
    recent_losses: list[float] = field(default_factory=list)  # the window of the loss-spike test
    begun_from: Optional[PathText] = None  # the start checkpoint, as the settings named it when the run began
    base: Optional[PathText] = None  # its path: the base of adapters, the reference of preferences
    base_sha256: Optional[str] = None  # of its weights
    base_beside: Optional[PathText] = None  # its path relative to the run's folder, for a tree that is moved
    # The metrics of the last step, until all that is due after it is measured: a signal may come first.
    pending_metrics: Optional[dict[str, Union[int, float, None]]] = field(default_factory=dict)


class RunSettings(BaseModel):
    """The settings in a run's config.json that its report reads; each version has others besides."""

    model_config = ANY_FIELDS

    TRAINING_STAGE: str = ""
    MAX_STEPS: Count = 0
    WORLD_SIZE: Optional[WorldSize] = None
    HELLASWAG_NAME: str = "HellaSwag"
    LORA_ENABLED: bool = False
    DISTILLATION_ENABLED: bool = False


class Tensor(BaseModel):
    """A tensor in the header of a safetensors file."""

    model_config = ANY_FIELDS

    shape: list[Count] = []


class Source(BaseModel):
    """An entry of `sources` in a run's data.json."""

    model_config = ANY_FIELDS

    source: str
    share: Optional[Number] = None
    tokens: Optional[Number] = None
    documents: Optional[Number] = None
    passes: Optional[Number] = None


class RunData(BaseModel):
    """A run's data.json."""

    model_config = ANY_FIELDS

    sources: Optional[list[Source]] = None


class Settings(BaseModel):
    """The settings that a checkpoint was written with; each version has its own."""

    model_config = ANY_FIELDS

    TRAINING_STAGE: str
    LORA_ENABLED: bool = False


class Scaler(BaseModel):
    """The state of torch.amp.GradScaler."""

    model_config = ANY_FIELDS

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
    def check_steps(self) -> "State":
        """Refuse more skipped steps than steps."""
        if self.progress.skipped_steps > self.progress.step:
            raise ValueError("progress.skipped_steps is more than progress.step")
        return self


class Line(BaseModel):
    """One line of a log; in metrics.jsonl with a field for each metric."""

    model_config = ANY_FIELDS

    step: Count


class LedgerLine(Line):
    """One line of ledger.jsonl."""

    rows_crc32: str
    loss: Optional[float]
    grad_norm: Optional[float]
    updated: bool


class EventLine(Line):
    """One line of events.jsonl: what happened after a step, and when."""

    time: Seconds
    event: str
    seconds: Optional[Seconds] = None  # that it took
    reason: Optional[str] = None  # of an end
    previous_step: Optional[Count] = None  # at a start: the newest step that was logged before, and its time
    previous_time: Optional[Seconds] = None
    ratio: Optional[Number] = None  # of a slow rank, to the others


class SampleLine(Line):
    """One line of samples.jsonl."""

    prompt: str = ""
    text: str = ""


class EvaluationLine(Line):
    """One line of evaluations.jsonl, apart from its scores (`item_scores`)."""

    name: str
    items: str
    n: Count


SCHEMAS = {"metrics.jsonl": Line, "ledger.jsonl": LedgerLine, "events.jsonl": EventLine,
           "samples.jsonl": SampleLine, "evaluations.jsonl": EvaluationLine}


def number(value: Any, most: float = sys.float_info.max) -> Optional[float]:
    """The value if it is a number between -most and most, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= most else None


def parse(content: bytes, schema: type[Schema], path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's JSON file, with defaults for missing fields."""
    try:
        return schema.model_validate_json(content).model_dump(by_alias=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        unknown = [fault for fault in faults
                   if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument")]
        fault = (unknown or faults)[0]
        where = ".".join(map(str, fault["loc"]))[:100] or "its content"
        what = fault["msg"][0].lower() + fault["msg"][1:]
        problem = (f"{where} is not known to this version: {NEWER}" if unknown
                   else f"{where}: {what}; copy it again")
        raise CheckpointError(f"{path}: {problem}, or move this checkpoint away and use another") from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the checkpoint's manifest, verified by its own hash; the files that it lists are not."""
    return parse(read_sealed(folder), Manifest, Path(folder) / MANIFEST)


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files all have their listed size and SHA-256.

    Unlisted files are ignored. The folder may be a link, but no file in it may lead out of it.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        if fault := fault_of(folder, name, expected):
            raise CheckpointError(f"{fault}; use another checkpoint")
    return manifest


def read_state_file(path: Path) -> dict[str, Any]:
    """Return trainer_state.json in the form of `State`. Raises CheckpointError if it is invalid."""
    try:
        return parse(read_plain(path), State, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; use another checkpoint") from error


def read_lines(path: Path) -> Iterator[tuple[bytes, Optional[Line]]]:
    """Yield each line of a log, raw and parsed; None for one that does not match the schema.

    An incomplete last line is left out: it is being written, or a crash cut it short.
    Raises:
        OSError: the file cannot be read, or is no regular file.
    """
    schema = SCHEMAS.get(path.name, Line)
    with open(path, "rb", opener=plain) as file:
        while line := file.readline(MAX_LINE_BYTES):
            try:
                entry = schema.model_validate_json(line)
            except ValidationError:
                entry = None
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    return
            yield line.rstrip(b"\n"), entry


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid lines of a log, if there is one. Raises CheckpointError if it cannot be read."""
    try:
        yield from (entry.model_dump() for _, entry in read_lines(path) if entry)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check what is at this path") from error
