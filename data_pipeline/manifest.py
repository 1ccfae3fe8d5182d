"""The schema of manifest.json, as far as readers of a prepared set need it; docs/architecture.md has one."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from common.errors import DataError

MANIFEST = "manifest.json"
MIXTURE = "mixture.json"  # in place of a manifest; data_pipeline/mixture.py has its schema


class Entry(BaseModel, strict=True):
    """One token file, in the manifest's own folder."""

    file: str = Field(pattern=r"^[\w-][\w.-]*$")
    tokens: int
    sha256: str


class Stream(BaseModel, strict=True):
    """Token files that form one sequence."""

    tokens: int
    shards: list[Entry]

    @model_validator(mode="after")
    def check_sum(self) -> "Stream":
        """Refuse a list that lacks a shard, or contains one twice."""
        if len({entry.file for entry in self.shards}) < len(self.shards):
            raise ValueError("a shard is listed twice")
        if (listed := sum(entry.tokens for entry in self.shards)) != self.tokens:
            raise ValueError(f"the listed shards have {listed} tokens, and there should be {self.tokens}")
        return self


class Split(Stream):
    """The tokens of one split and, for chats and pairs, the segments that they are cut into."""

    documents: int = 0  # or examples
    segments: Stream | None = None


class Manifest(BaseModel, strict=True):
    """The manifest of a prepared set."""

    format: Literal[1]
    kind: str = "documents"
    dtype: Literal["uint16", "uint32"]
    tokenizer_sha256: str
    document_start_id: int = Field(ge=0)
    splits: dict[str, Split]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a prepared folder.

    Raises:
        DataError: it is not a file, or violates the schema.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{path}: is no file; prepare the data again")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path}: {first_fault(error)}; copy or prepare the data again") from error


def first_fault(error: ValidationError) -> str:
    """Return the first fault of a file that violates its schema, for a message: where it is, and what."""
    fault = error.errors()[0]
    what = fault["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, fault['loc'])) or 'its content'}: {what[0].lower()}{what[1:]}"
