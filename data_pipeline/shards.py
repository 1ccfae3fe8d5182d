"""Open, verify, read and write token shards, in llm.c's format with a manifest.

Files are verified once, and monitored while they are read. They are never memory-mapped, because truncating a
mapped file kills the reading process (SIGBUS).
"""

import base64
import codecs
import glob
import hashlib
import os
import re
import resource
import sys
import threading
import time
import weakref
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator
from tqdm import tqdm

from common import remote
from common.activity import tick
from common.errors import DataError, SettingsError, unreadable
from common.files import TRANSIENT_ERRORS, plain, read_json, read_plain, sha256, why_not_writable, write_json
from common.text import command, counted, percent, print_safely
from config import KINDS, SAMPLE
from data_pipeline.remote_data import say_once
from data_pipeline.source_files import format_of

MANIFEST = "manifest.json"
MIXTURE = "mixture.json"  # in place of a manifest; data_pipeline/mixture.py has its schema
VERIFIED = ".verified.json"
HEADER_BYTES = 1024
# llm.c's header: 256 little-endian int32, starting with magic, version and token count.
MAGIC_AND_VERSION = {"uint16": (20240520, 1), "uint32": (20240801, 7)}
NPY_MAGIC = b"\x93NUMPY"
SPLIT_WORDS = {"train": ("train", "training"), "validation": ("val", "valid", "validation")}
PREPARED_NAME = re.compile(r"(train|validation)(-segments)?-\d{5}\.bin")  # as SplitWriter names them
RAW_NAMES = {"train", "val", "validation"}
PARQUET = b"PAR1"
# gzip, bzip2, xz, zstd, zip (of NumPy and torch), pickles, HDF5, Arrow, GGUF
PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\3\4", b"\x80\2}", b"\x80\2]", b"\x80\3",
          b"\x80\4\x95", b"\x80\5\x95", b"\x89HDF", b"ARROW1", b"GGUF")
WIDTH_PLACES, WIDTH_SAMPLE, MOST_HIGH_BITS, MOST_TEXTLIKE_BYTES = 8, 1 << 13, 4, 64
# So many tokens have most of their vocabulary. If all ids are below this share of it, perhaps it is another.
MANY_TOKENS, LOW_SHARE = 10_000, 0.25
SCAN_BYTES = 1 << 22
SHORT_HEADER = 64  # bytes of an unknown header that is found
FINGERPRINT_BYTES = 4096
NOT_IDS = 1 << 32  # in place of the size of a vocabulary
OTHER_OPEN_FILES = 64  # open files of this process besides shards

# ------------------------------------------------------------------------------------------- verified files


class Cache(NamedTuple):
    """Folders for results computed from data: `chosen` if set, else beside the data, else `fallback`."""

    chosen: Optional[Path] = None  # CACHE_DIR
    fallback: Optional[Path] = None

    def folders(self, data: Path, fingerprint: str) -> list[Path]:
        """Return the possible folders of results for a folder's data, preferred one first."""
        name = f"data-{fingerprint[:16]}"
        if self.chosen:
            return [self.chosen / name]
        return [data, *([self.fallback / name] if self.fallback else [])]

    def folder_to_write(self, data: Path, fingerprint: str, name: str = "") -> tuple[Path, str]:
        """Return the first folder in which `name` can be written, and why preferred ones cannot ("")."""
        refusals = []
        for folder in self.folders(data, fingerprint):
            checked = [folder, folder / name] if os.path.isdir(folder / name) else [folder]
            refused = [f"{each} cannot be written: {error.strerror}" for each in checked
                       if (error := why_not_writable(each))]
            if not refused:
                return folder, "; ".join(refusals)
            refusals.append(refused[0])
        raise DataError(f"{'; '.join(refusals)}; set CACHE_DIR to a writable folder")

    def check(self) -> None:
        if self.chosen and (error := why_not_writable(self.chosen)):
            raise SettingsError(f"CACHE_DIR={self.chosen} cannot be written to: {error.strerror}; set it to "
                                "a writable folder, or leave it unset")


def file_stamp(status: os.stat_result) -> dict[str, int]:
    """Return a JSON value that identifies an unchanged file in a later process."""
    # Including the change time: a copy with the same modification time may be damaged.
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


READ_RETRY_SECONDS = (1.0, 5.0)
# A folder that exists is not prepared again.
ANEW = "copy it again, or delete its folder and prepare the data again"


class WatchedFile:
    """A file that is read in pieces, and must not change meanwhile.

    If only its times change, or an equal file replaces it, it is hashed again and reading continues.
    `scattered` disables read-ahead: random access is 100 times faster when not cached.
    """

    def __init__(self, path: Path, status: os.stat_result, scattered: bool = False,
                 digest: Optional[str] = None):
        self.path, self.status, self.digest = path, status, digest
        try:
            self.descriptor = plain(str(path), os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self.descriptor)
        if scattered:
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset`."""
        before = self.status
        try:
            # Read the status after the content, so that no change in between is missed.
            content, now = self._pread(offset, size), os.fstat(self.descriptor)
            # Ignore the change time, which backups with hard links change.
            is_same = (now.st_size, now.st_mtime_ns, now.st_ino) == (
                before.st_size, before.st_mtime_ns, before.st_ino)
            if is_same and len(content) == size:
                return content
            if not is_same and self.digest and now.st_size == before.st_size:
                with open(self.path, "rb", opener=plain) as file:
                    if sha256(file) == self.digest:
                        self.status = now
                        return self.read(offset, size)
        except OSError as error:
            raise self._unreadable(error) from error
        change = f"it had {before.st_size:,} bytes and now has {now.st_size:,}"
        if before.st_ino != now.st_ino:
            change = "another file has its name"
        elif before.st_size == now.st_size:
            change = "it was written to"
        raise DataError(f"{self.path}: was changed while it was read: {change}; restore the file and start "
                        "again, and the run resumes from its last checkpoint")

    def _pread(self, offset: int, size: int) -> bytes:
        """Return what is at `offset`; try again if the disk fails for a moment. Raises OSError."""
        for seconds in READ_RETRY_SECONDS:
            try:
                return os.pread(self.descriptor, size, offset)
            except OSError as error:
                if error.errno not in TRANSIENT_ERRORS:
                    raise
                print_safely(f"warning: {self.path}: {error.strerror}; reading it again in {seconds:g} s",
                             sys.stderr)
            time.sleep(seconds)
        return os.pread(self.descriptor, size, offset)

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: {unreadable(error, 'check the disk and permissions')}")


# ---------------------------------------------------------------------------------- manifests and token files


class Entry(BaseModel, strict=True):
    """A token file in the manifest's folder."""

    file: str = Field(pattern=r"^[\w-][\w.-]*$")
    tokens: int
    sha256: str


class Stream(BaseModel, strict=True):
    """Token files that form one sequence."""

    tokens: int
    shards: list[Entry]

    @model_validator(mode="after")
    def check_sum(self) -> "Stream":
        if len({entry.file for entry in self.shards}) < len(self.shards):
            raise ValueError("a shard is listed twice")
        if (listed := sum(entry.tokens for entry in self.shards)) != self.tokens:
            raise ValueError(f"the listed shards have {listed} tokens, expected {self.tokens}")
        return self


class Split(Stream):
    """The tokens of a split and, for chats and pairs, their segments."""

    documents: int = 0  # or examples
    segments: Stream | None = None


class Manifest(BaseModel, strict=True):
    """The manifest of a prepared set."""

    format: Literal[1]
    kind: Literal["documents", "chats", "pairs", "prompts"] = "documents"
    dtype: Literal["uint16", "uint32"]
    tokenizer_sha256: str
    document_start_id: int = Field(ge=0)
    splits: dict[str, Split]


def read_data_manifest(folder: Path) -> Manifest:
    return read_as(Manifest, folder / MANIFEST, "copy or prepare the data again")


def source_of(folder: Path) -> tuple[str, ...]:
    """Return the source of a prepared set and its tokenizer's hash; () for another folder."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # or of another program
        manifest = read_json(folder / MANIFEST)
        source = manifest["source"]["sources"][0]
        return (source.get("path") or source["name"], source.get("config", ""),
                source.get("split") or "train", manifest["tokenizer_sha256"])
    return ()


def sets_beside(path: str | Path, tokenizer_sha256: str = "") -> list[str]:
    """Return the other prepared sets in a set's folder with its source, and its tokenizer or this one."""
    folder, real = Path(path), Path(path).resolve()
    *source, its_tokenizer = source_of(folder) or ("",)
    others = sorted(real.parent.glob(f"*/{MANIFEST}")) if source else []
    return [str(folder.with_name(each.parent.name)) for each in others
            if each.parent != real and not each.parent.is_symlink()
            and source_of(each.parent) == (*source, tokenizer_sha256 or its_tokenizer)]


def read_as(schema: type[BaseModel], path: Path, advice: str) -> Any:
    """Return the JSON object in a file as an instance of a schema."""
    try:
        return schema.model_validate_json(read_plain(path))
    except OSError as error:
        raise DataError(f"{path}: {unreadable(error, f'check its permissions, or {advice}')}") from error
    except ValidationError as error:
        raise DataError(f"{path}: {first_fault(error)}; {advice}") from error


def first_fault(error: ValidationError) -> str:
    """Return the location and the message of the first violation of a schema."""
    fault = error.errors()[0]
    message = fault["msg"].removeprefix("Value error, ")
    location = ".".join(map(str, fault["loc"]))
    return ": ".join([*filter(None, [location]), f"{message[0].lower()}{message[1:]}"])


@dataclass(frozen=True)
class TokenizerInfo:
    """The properties of a tokenizer that data must match. A `Tokenizer` has the same attributes."""

    vocab_size: int
    sha256: str | None = None  # None = do not compare it with the manifest's
    document_start_id: int | None = None

    def is_same(self, sha256: str) -> bool:
        return sha256 == self.sha256


def dtype_for(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def header_bytes(tokens: int, dtype: str) -> bytes:
    """Return a token file's 1024-byte header. Source: llm.c, dev/data/data_common.py."""
    assert 0 <= tokens < 1 << 31, "llm.c counts a file's tokens in an int32"
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = *MAGIC_AND_VERSION[dtype], tokens
    return header.tobytes()


@dataclass(frozen=True)
class Shard:
    """A token file, opened when it is first read."""

    path: Path
    dtype: str
    offset: int  # bytes before the first id
    tokens: int
    sha256: str | None = None  # hash of the whole file from the manifest, if any
    status: os.stat_result | None = None  # when the header was read

    @cached_property
    def ids_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def file(self) -> WatchedFile:
        return WatchedFile(self.path, self.status, scattered=True, digest=self.sha256)

    def read(self, start: int, count: int, file: WatchedFile | None = None) -> np.ndarray:
        size = self.ids_dtype.itemsize
        content = (file or self.file).read(self.offset + start * size, count * size)
        return np.frombuffer(content, self.ids_dtype)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield all ids in blocks of SCAN_BYTES, each with the position of its first id."""
        size = SCAN_BYTES // self.ids_dtype.itemsize
        file = WatchedFile(self.path, self.status, digest=self.sha256)
        for start in range(0, self.tokens, size):
            yield start, self.read(start, min(size, self.tokens - start), file)

    def check_ids(self, start: int, ids: np.ndarray, vocab_size: int) -> None:
        """Raise DataError with the position of the first id beyond the vocabulary; `ids` start at `start`."""
        if len(ids) and int(ids.max()) >= vocab_size:
            token = int(np.flatnonzero(ids >= vocab_size)[0])
            index = start + token
            raise DataError(f"{self.path}: token {index} (byte {self.offset + index * ids.itemsize}) has id "
                            f"{ids[token]}, beyond the vocabulary of {vocab_size}; set TOKENIZER_PATH to the "
                            "tokenizer it was made with, or prepare the data again")


@dataclass(frozen=True)
class TokenSet:
    """A split of a data set: its shards as a single sequence of tokens; each document has a start id.

    The fingerprint is the same on every rank. Every id is compared with the vocabulary when read, because
    files may change after their verification, and embedding kernels do not check indices.
    """

    shards: tuple[Shard, ...]
    fingerprint: str
    document_start_id: int | None = None
    vocab_size: int = NOT_IDS
    used: np.ndarray | None = None  # bool (vocab_size,): whether each id occurs; None = not verified here
    content: str = ""  # hash of files without a manifest, of which the fingerprint has samples, if verified
    segments: Optional["TokenSet"] = None  # of examples, uint32; see data_pipeline/chats.py

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((shard.tokens for shard in self.shards), initial=0))

    @property
    def folder(self) -> Path:
        return self.shards[0].path.parent

    @property
    def tokens(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens [start, start + count); read-only if they are in one shard."""
        assert 0 <= start and start + count <= self.tokens, (start, count, self.tokens)
        index = bisect_right(self._starts, start) - 1
        begin = start - self._starts[index]
        pieces = []
        while count:
            shard = self.shards[index]
            pieces.append(shard.read(begin, min(count, shard.tokens - begin)))
            shard.check_ids(begin, pieces[-1], self.vocab_size)
            count -= len(pieces[-1])
            index, begin = index + 1, 0
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all tokens in order, in blocks of SCAN_BYTES, with sequential reads."""
        for shard in self.shards:
            for start, ids in shard.blocks():
                shard.check_ids(start, ids, self.vocab_size)
                yield ids

    def used_ids(self) -> np.ndarray:
        """Return the ids that occur, ascending; reads all tokens if the files were not verified here."""
        used = self.used
        if used is None:
            used = np.zeros(self.vocab_size, bool)
            for ids in self.blocks():
                tick()
                used[ids] = True
        return np.flatnonzero(used)


# -------------------------------------------------------------------------------------------------- opening


def open_token_set(path: str | Path, split: str, tokenizer: TokenizerInfo, *, kind: str = "documents",
                   verify: str = "auto", cache: Cache = Cache()) -> TokenSet:
    """Open the "train" or "validation" split of prepared data of a kind, or of foreign token files.

    Sizes, headers and the tokenizer's hash are always checked, with one small read per file. Contents are
    checked too, SHA-256 against the manifest and ids against the vocabulary, if `verify` is "always", or if
    it is "auto" and `cache` has no result for a file of this size and these times. With "never", another rank
    does this.

    `path` is a prepared folder, a folder that contains exactly one, a token file (`.bin` of llm.c or nanoGPT,
    `.npy`), a glob of such files, or a folder of them, whose names say `train` or `val`.
    """
    path, segments = Path(path), None
    if folder := prepared_folder(path):
        manifest = read_data_manifest(folder)
        check_manifest(folder, manifest, tokenizer, kind)
        document_start_id, shards = manifest.document_start_id, prepared_shards(folder, manifest, split)
        fingerprint = _fingerprint(shards)
        if kind != "documents":
            stored = prepared_shards(folder, manifest, split, segments=True)
            segments = TokenSet(tuple(stored), _fingerprint(stored))
            verify_files(segments, verify, cache)
    elif kind == "documents":
        shards = [_open_shard(file) for file in _foreign_files(path, split)]
        # Hash the size, start, middle and end of each file, a small read for every rank.
        hasher, document_start_id = hashlib.sha256(), tokenizer.document_start_id
        for shard in shards:
            if shard.dtype == "uint16" and shard.path.suffix != ".npy":
                check_width(shard, tokenizer.vocab_size)
            if shard.dtype < dtype_for(tokenizer.vocab_size):
                raise DataError(f"{shard.path}: its ids are {shard.dtype}, too narrow for the vocabulary "
                                f"of {tokenizer.vocab_size:,}; set TOKENIZER_PATH to their tokenizer")
            sampled = min(shard.tokens, FINGERPRINT_BYTES // shard.ids_dtype.itemsize)
            hasher.update(f"{shard.dtype} {shard.tokens}\n".encode())
            for start in (0, shard.tokens // 2, shard.tokens - sampled):
                hasher.update(shard.read(start, min(sampled, shard.tokens - start)))
        fingerprint = hasher.hexdigest()
    else:
        raise _unprepared(path, f"holds no {MANIFEST} of {kind}", kind)
    token_set = TokenSet(tuple(shards), fingerprint, document_start_id, tokenizer.vocab_size,
                         segments=segments)
    allow_open_files(len(shards), token_set.folder)
    used, content = verify_files(token_set, verify, cache)
    return replace(token_set, used=used, content=content)


def split_to_validate(path: Path) -> str:
    """Return the split of someone's validation data to read: what it holds out, or else all, its "train"."""
    if folder := prepared_folder(path):
        stream = read_data_manifest(folder).splits.get("validation")
        return "validation" if stream and stream.shards else "train"
    stems = [file.stem.lower() for file in (path.iterdir() if path.is_dir() else [path])]
    words = {word for stem in stems for word in re.split(r"[^a-z]+", stem)}
    return "train" if words.isdisjoint(SPLIT_WORDS["validation"]) else "validation"


def check_manifest(folder: Path, manifest: Manifest, tokenizer: TokenizerInfo, kind: str) -> None:
    """Raise DataError if a prepared set is not of this kind, or was not made with this tokenizer."""
    document_start_id, begins = manifest.document_start_id, tokenizer.document_start_id
    if manifest.kind != kind:
        setting, script = KINDS[kind]
        raise DataError(f"{folder}: holds {manifest.kind}, but {setting} needs {kind}; prepare them "
                        f"with {command(script)}")
    if tokenizer.sha256 is not None and not tokenizer.is_same(manifest.tokenizer_sha256):
        remedy = "set TOKENIZER_PATH to it, or prepare the data again"
        if others := sets_beside(folder, tokenizer.sha256):
            remedy = f"name {others[0]}, which was made with this one, or {remedy}"
        if folder.is_relative_to(SAMPLE):
            remedy = f"this is the sample; set {KINDS[kind][0]} to your own data, or remove TOKENIZER_PATH"
        raise DataError(f"{folder}: was made with another tokenizer ({manifest.tokenizer_sha256[:12]}, not "
                        f"{tokenizer.sha256[:12]}); {remedy}")
    if tokenizer.sha256 and kind == "documents" and begins not in (None, document_start_id):
        raise DataError(f"{folder / MANIFEST}: document_start_id is {document_start_id}, but its "
                        f"tokenizer starts a document with {begins}; prepare the data again")


def allow_open_files(files: int, folder: Path) -> None:
    """Raise this process's limit on open files; DataError if the system does not allow enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files + OTHER_OPEN_FILES > hard:
        fewer = files > 1 and hard > OTHER_OPEN_FILES
        other_way = ", or prepare the data again with a larger SHARD_TOKENS" if fewer else ""
        raise DataError(f"{folder}: has {counted(files, 'shard')}, but a process may open {hard:,} "
                        f"files; in a new shell or as root, ulimit -n {files + OTHER_OPEN_FILES}{other_way}")
    if soft < (wanted := min(hard, 2 * (files + OTHER_OPEN_FILES))):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def prepared_folder(path: Path) -> Path | None:
    """Return the one prepared folder that `path` is or contains; None if there is none."""
    if os.path.lexists(path / MANIFEST):
        return path
    try:
        inside = [*path.iterdir()] if path.is_dir() else []
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check the path and its permissions"
                        ) from error
    sets = sorted((folder for folder in inside if not folder.name.startswith(("tmp-", "."))
                   and (os.path.lexists(folder / MANIFEST) or os.path.lexists(folder / MIXTURE))),
                  key=lambda folder: (folder.is_symlink(), folder))
    sets = [*{folder.resolve(): folder for folder in sets}.values()]  # links take precedence over their sets
    if len(sets) > 1:
        raise DataError(f"{path}: holds several prepared sets, name one: {', '.join(map(str, sets))}")
    return sets[0] if sets else None


def prepared_shards(folder: Path, manifest: Manifest, split: str, segments: bool = False) -> list[Shard]:
    """Return the shards, or those with the segments, that a manifest lists."""
    stream, dtype = manifest.splits.get(split), manifest.dtype
    if stream is None or not stream.shards:
        more = "prepare more documents"
        if split == "validation":
            more += (" (see --documents), with a larger VALIDATION_FRACTION, or set VALIDATION_DATA_PATH, or "
                     "VALIDATE_EVERY=0")
        raise DataError(f"{folder / MANIFEST}: lists no {split} shards; {more}")
    if segments:
        stream, dtype = stream.segments, "uint32"
        if stream is None:
            raise DataError(f"{folder / MANIFEST}: lists no segments of {split}; prepare the data again")
    shards = [_open_shard(folder / entry.file, entry.sha256) for entry in stream.shards]
    for shard, entry in zip(shards, stream.shards):
        if (shard.dtype, shard.tokens) != (dtype, entry.tokens):
            raise DataError(f"{shard.path}: its header gives {shard.tokens} tokens of {shard.dtype}, but "
                            f"{MANIFEST} lists {entry.tokens} of {dtype}; prepare the data again")
    return shards


def _fingerprint(shards: Sequence[Shard]) -> str:
    return hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()


def _foreign_files(path: Path, split: str) -> list[Path]:
    in_folder = path.is_dir()
    matches = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
    files = sorted(filter(os.path.isfile, path.iterdir() if in_folder else matches))
    if in_folder:
        files = [file for file in files if file.suffix in (".bin", ".npy")]
        if shard := next((file.name for file in files if PREPARED_NAME.fullmatch(file.name)), None):
            raise DataError(f"{path}: {shard} looks like part of a prepared set, but there is no {MANIFEST}; "
                            "restore it, prepare the data again, or rename files of another trainer")
    if not files:
        raise _unprepared(path, f"holds neither {MANIFEST} nor token files (.bin, .npy)")
    # A file in the settings is training data unless its name says otherwise.
    default = None if in_folder else "train"
    chosen = []
    for file in files:
        words = {*re.split(r"[^a-z]+", file.stem.lower())}
        if split == next((name for name, those in SPLIT_WORDS.items() if words & {*those}), default):
            chosen.append(file)
    if not chosen:
        without = "; set VALIDATE_EVERY=0 if there is none" if split == "validation" else ""
        names = [file.name for file in files[:5]] + ["..."] * (len(files) > 5)
        raise DataError(f"{path}: no token file for {split} (with '{SPLIT_WORDS[split][0]}' in its name) "
                        f"among {', '.join(names)}{without}")
    if len(suffixes := {file.suffix for file in chosen}) > 1:
        raise DataError(f"{path}: the {split} files are of several kinds ({', '.join(sorted(suffixes))}), "
                        "perhaps the same tokens twice; name one kind with a glob such as '*.bin'")
    return chosen


def _unprepared(path: Path, problem: str, kind: str = "documents") -> DataError:
    """Return the error for a path that is not a prepared set."""
    setting, script = KINDS[kind]
    exists = any(map(os.path.exists, [path, *glob.glob(str(path), recursive=True)]))
    if not exists and not remote.is_hub_name(str(path)):
        return DataError(f"{path}: no such file or folder; check {setting}, or prepare data with "
                         f"{command(script)}")
    if path.is_file() and format_of(path.name)[0] is None:
        with open(path, "rb") as file:
            suffix = ".parquet" if file.read(len(PARQUET)) == PARQUET else ".txt or .jsonl"
        return DataError(f"{path}: {problem}; call it {suffix}, and prepare that with {command(script)}")
    return DataError(f"{path}: {problem}; prepare it with {command(script, '--source', str(path))}")


def _open_shard(path: Path, digest: str | None = None) -> Shard:
    """Return the shard described by a file's header.

    Without a digest from a manifest, it may also be NumPy's, or nanoGPT's without a header, by its name.
    """
    try:
        with open(path, "rb", opener=plain) as file:
            status, head = os.fstat(file.fileno()), file.read(HEADER_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing, though {MANIFEST} lists it; copy it again") from error
    except OSError as error:
        reason = unreadable(error, "copy it again, or check its permissions")
        raise DataError(f"{path}: {reason}") from error
    if not head:
        raise DataError(f"{path}: is empty; {ANEW}")
    is_npy = path.suffix == ".npy" or head.startswith(NPY_MAGIC)
    magic = int.from_bytes(head[:4], "little")
    known = {number: (dtype, version) for dtype, (number, version) in MAGIC_AND_VERSION.items()}
    is_raw = path.stem.lower() in RAW_NAMES and not (
        is_npy or is_other_content(head) or has_header(head, status.st_size)) and (
        len(head) < HEADER_BYTES or any(head[12:]) or not any(head))
    if magic in known:
        if len(head) < HEADER_BYTES:
            raise DataError(f"{path}: is cut short inside its header, at {len(head)} bytes; copy it again")
        dtype, expected = known[magic]
        offset, (_, version, tokens) = HEADER_BYTES, np.frombuffer(head, "<i4", 3).tolist()
        if version != expected:
            raise DataError(f"{path}: has version {version} of the format with magic {magic}, only "
                            f"{expected} is known; {ANEW}")
    elif digest is None and is_npy and head.startswith(NPY_MAGIC):
        dtype, offset, tokens = _npy_header(path)
    elif digest is None and is_raw:
        dtype, offset, tokens = "uint16", 0, status.st_size // 2
        if status.st_size % 2:
            raise DataError(f"{path}: has an odd size ({status.st_size} bytes) for 2-byte ids; copy it again")
    elif head.startswith(PACKED):
        raise DataError(f"{path}: is compressed or packed, not plain ids; load them in Python, and save them "
                        "with numpy.save, as uint16 or uint32")
    elif b"\0" not in head or is_other_content(head):
        raise _unprepared(path, "holds text or records, not tokens")
    else:
        other = "call it train.bin or val.bin, or " * (path.stem.lower() not in RAW_NAMES) + "save its ids"
        raise DataError(f"{path}: wrong magic: starts with {head[:4].hex(' ')}, which is not a header of "
                        f"llm.c ({' or '.join(map(str, known))}) or .npy; if it has no header, {other} with "
                        "numpy.save")
    shard = Shard(path, dtype, offset, tokens, digest, status)
    size, expected = status.st_size, offset + tokens * shard.ids_dtype.itemsize
    if size != expected:
        problem = "is cut short" if size < expected else "is too long"
        raise DataError(f"{path}: {problem}: {size:,} bytes, but its header gives {tokens:,} tokens of "
                        f"{dtype}, {expected:,} bytes; {ANEW}")
    if tokens <= 0:
        raise DataError(f"{path}: is empty, but its header gives {tokens} tokens; {ANEW}")
    return shard


def is_other_content(head: bytes) -> bool:
    """Return whether a file begins like text, or like a known format of other content than ids."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        is_text = b"\0" not in head and len(head) > MOST_TEXTLIKE_BYTES
    except UnicodeDecodeError:
        is_text = False
    return is_text or head.startswith((PARQUET, *PACKED))


def has_header(head: bytes, size: int) -> bool:
    """Return whether a file of uint16 begins with a word, or with the number of ids after its header."""
    fields = {int.from_bytes(head[at:at + width], "little") for at in range(SHORT_HEADER) for width in (4, 8)}
    counts = {(size - header) // 2 for header in range(4, SHORT_HEADER)}
    return size > HEADER_BYTES and (re.match(rb"[A-Za-z_]{4}", head) is not None or bool(fields & counts))


def check_width(shard: Shard, vocab_size: int) -> None:
    """Raise DataError if uint16 ids seem to have another type, in the whole file or from some place on."""
    count = min(max(shard.tokens // WIDTH_PLACES, 256), WIDTH_SAMPLE, shard.tokens) // 4 * 4
    places = np.linspace(0, shard.tokens - count, WIDTH_PLACES + 1).astype(int) // 4 * 4
    samples = [shard.read(start, count).reshape(-1, 4) for start in {*places.tolist()} if count >= 16]
    types = {type_of(numbers, vocab_size) for numbers in samples  # unless most of it is padding
             if np.ptp(numbers) and numbers.any(axis=1).mean() > 0.5}
    names = [np.dtype(each).name + " (big-endian)" * each.startswith(">") for each in sorted(types)]
    if len(types) > 1:
        raise DataError(f"{shard.path}: its ids look like {names[0]} in one place and like {names[1]} in "
                        "another; tokenize its texts again, into one type")
    if dtype := "".join(types - {"<u2"}):
        name = shard.path.name
        ids = f"numpy.fromfile({name!r}, {dtype!r}, offset={shard.offset}).astype('uint32')"
        raise DataError(f"{shard.path}: its ids look like {names[0]}, but are read as little-endian uint16, "
                        f"by its header or without one; run numpy.save({shard.path.stem + '.npy'!r}, {ids}) "
                        f"in its folder, and remove {name}")


def type_of(numbers: np.ndarray, vocab_size: int) -> str:
    """Return the type that ids seem to have which were read as uint16, in rows of eight bytes."""
    dtype = "<u2"
    for order, words in (("<", numbers), (">", numbers.byteswap())):
        low, high = (words[:, first::2] for first in ((0, 1) if order == "<" else (1, 0)))
        if high.max() <= MOST_HIGH_BITS < low.max():
            dtype = order + ("u4" if words[:, 2 if order == "<" else 1].any() else "i8")
    # The upper byte of an id varies less than the lower one. Of text in bytes, both are alike.
    low, high = (np.bincount(each.ravel(), minlength=256) / numbers.size
                 for each in (numbers & 255, numbers >> 8))
    entropies = [-(each * np.log2(np.maximum(each, 1e-9))).sum() for each in (low, high)]
    is_swapped = vocab_size <= numbers.max() or entropies[1] > entropies[0] + 1
    if dtype == "<u2" and is_swapped and numbers.byteswap().max() < vocab_size:
        dtype = ">u2"
    with np.errstate(invalid="ignore"):
        for floats in ("<f2", "<f4", "<f8"):
            values = numbers.view(floats)
            is_id = (values == np.floor(values)) & (values >= 0) & (values < np.float64(vocab_size))
            if values.any() and is_id.all():
                dtype = floats
    is_text = not (low + high)[128:].any() and np.minimum(low, high)[1:].sum() > low[1:].sum() / 2
    return "<u1" if is_text else dtype


def _npy_header(path: Path) -> tuple[str, int, int]:
    """Return the type, offset and number of the ids in a NumPy file."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy parses the header as Python, and raises errors of any class
        raise DataError(f"{path}: cannot be read ({remote.first_line(error):.100}); copy it again") from error
    if array.ndim != 1 or array.dtype.str not in ("<u2", "<u4"):
        raise DataError(f"{path}: holds an array of shape {array.shape} and type {array.dtype}; expected one "
                        "row of uint16 or uint32, so save it as that")
    return array.dtype.name, array.offset, len(array)


def verify_files(token_set: TokenSet, verify: str, cache: Cache) -> tuple[np.ndarray | None, str]:
    """Compare every shard with its hash and the vocabulary; return which ids occur, and a hash of shards
    without one.

    The results are stored for the next start. Verification "never" returns None and "".
    """
    if verify == "never":
        return None, ""
    foreign = hashlib.sha256()
    has_ids = token_set.vocab_size < NOT_IDS
    used = np.zeros(token_set.vocab_size * has_ids, bool)
    for folder in {shard.path.parent: None for shard in token_set.shards}:
        shards = [shard for shard in token_set.shards if shard.path.parent == folder]
        # Stored results of all possible folders; the preferred one takes precedence.
        caches, due = cache.folders(folder, token_set.fingerprint), []
        start_id = token_set.document_start_id
        known: dict[str, dict[str, Any]] = {}
        for cached in reversed(caches):
            with suppress(OSError, ValueError):
                known |= read_json(cached / VERIFIED)
        for shard in shards:
            result = known.get(shard.path.name)
            is_known = (isinstance(result, dict) and result.items() >= file_stamp(shard.status).items()
                        and isinstance(result.get("max_id"), int)
                        and (not has_ids or isinstance(result.get("used"), str))
                        and (shard.sha256 is not None
                             or "common" in result and result.get("start_id", -1) == start_id)
                        and isinstance(result.get("sha256"), str))
            if verify == "always" or not is_known:
                due.append(shard)
        # Scan the other files, and store the results in the first writable folder.
        for shard, result in zip(due, _scan_all(due, start_id, len(used))):
            known[shard.path.name] = file_stamp(shard.status) | result
        for cached in caches if due else ():
            with suppress(OSError):
                cached.mkdir(parents=True, exist_ok=True)
                write_json(cached / VERIFIED, known)
                break
        # Check all results: stored ones may be bad too.
        for shard in shards:
            result = known[shard.path.name]
            if shard.sha256 is not None and result["sha256"] != shard.sha256:
                raise DataError(f"{shard.path} is damaged: its SHA-256 starts with {result['sha256'][:12]}, "
                                f"{MANIFEST} lists {shard.sha256[:12]}; {ANEW}")
            if result["max_id"] >= token_set.vocab_size:
                for start, ids in shard.blocks():
                    shard.check_ids(start, ids, token_set.vocab_size)  # raises with the position of the id
            if has_ids:
                bits = np.frombuffer(zlib.decompress(base64.b64decode(result["used"])), np.uint8)
                used |= np.unpackbits(bits, count=len(used)).view(bool)
        if shards[0].sha256 is None:
            foreign.update("".join(known[shard.path.name]["sha256"] for shard in shards).encode())
            say_doubts(shards, [known[shard.path.name] for shard in shards], token_set)
    return used, "" if token_set.shards[0].sha256 else foreign.hexdigest()


def say_doubts(shards: Sequence[Shard], results: Sequence[dict], token_set: TokenSet) -> None:
    """Print what is odd about foreign tokens, of which nothing says how they were made."""
    name, tokens, vocabulary = shards[0].path, sum(each.tokens for each in shards), token_set.vocab_size
    starts, common = sum(result["starts"] for result in results), Counter()
    for result in results:
        common[result["common"][0]] += result["common"][1]
    [(most_common, number)] = common.most_common(1)
    highest, start_id = max(result["max_id"] for result in results), token_set.document_start_id
    if start_id is not None and not starts:
        say_once(f"{name}: none of {tokens:,} tokens is {start_id}, the start of a document, so documents "
                 "cannot be told apart: attention crosses their borders; if there are several, tokenize them "
                 "with it")
    if 2 * number > tokens:
        say_once(f"{name}: {percent(number / tokens, 0)} of the tokens are {most_common}; if these are "
                 "padding, leave them out")
    if tokens >= MANY_TOKENS and highest < LOW_SHARE * vocabulary:
        say_once(f"{name}: the highest id is {highest:,}, of a vocabulary of {vocabulary:,}; if they are "
                 "another tokenizer's, set TOKENIZER_PATH to it")


def _scan_all(shards: Sequence[Shard], start_id: Optional[int], vocab_size: int) -> list[dict]:
    """Scan the files in threads (hashing releases the GIL), with a progress bar if this takes seconds."""
    size, lock = sum(shard.status.st_size for shard in shards), threading.Lock()
    bar = tqdm(total=size, unit="B", unit_scale=True, desc="Verifying token files", delay=2, leave=False)

    def advance(read: int) -> None:
        tick()
        with lock:
            bar.update(read)

    with bar, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda shard: _scan(shard, start_id, vocab_size, advance), shards))


def _scan(shard: Shard, start_id: Optional[int], vocab_size: int, advance: Callable[[int], None]) -> dict:
    """Read a whole file; return its SHA-256, its largest id, which ids occur, and counts of them.

    A file of a manifest has no counts. Which ids occur is a bit each, compressed; None without a vocabulary
    or with ids beyond it.
    """
    hasher, max_id, starts = hashlib.sha256(), 0, 0
    counts = np.zeros(vocab_size, np.int64)
    hasher.update(WatchedFile(shard.path, shard.status).read(0, shard.offset))
    for _, ids in shard.blocks():
        hasher.update(ids)
        max_id = max(max_id, int(ids.max()))
        if max_id < vocab_size:
            counts += np.bincount(ids, minlength=vocab_size)
        if shard.sha256 is None:
            starts += int(np.count_nonzero(ids == start_id))
        advance(ids.nbytes)
    packed = zlib.compress(np.packbits(counts > 0))
    foreign = {} if shard.sha256 is not None else {
        "start_id": start_id, "starts": starts, "common": [int(counts.argmax()), int(counts.max())]}
    return {"sha256": hasher.hexdigest(), "max_id": max_id, **foreign,
            "used": base64.b64encode(packed).decode() if max_id < vocab_size else None}


# -------------------------------------------------------------------------------------------------- writing


class Tokens(NamedTuple):
    """Consecutive documents or examples of one split."""

    ids: np.ndarray
    documents: int
    segments: np.ndarray | None = None  # uint32 segments of examples, see data_pipeline/chats.py
    target_tokens: int = 0  # number of target tokens of examples


class ShardWriter:
    """Writes a stream of ids as full shards. Continues after the ids in `done`, a result of `sync()`."""

    def __init__(self, folder: Path, stream: str, shard_tokens: int, dtype: str, done: dict | None = None):
        self.folder, self.stream, self.shard_tokens = folder, stream, shard_tokens
        self.dtype = np.dtype(dtype)
        self.tokens, self.shards = (done["tokens"], done["shards"]) if done else (0, [])
        self.file = None
        if self.in_shard:
            self.file, size = open(self.path, "r+b"), HEADER_BYTES + self.in_shard * self.dtype.itemsize
            if os.fstat(self.file.fileno()).st_size < size:
                raise DataError(f"{self.path} is shorter than its journal records; delete {folder} and start "
                                "again")
            self.file.truncate(size)
            self.file.seek(0, os.SEEK_END)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.stream}-{len(self.shards):05d}.bin"

    @property
    def in_shard(self) -> int:
        return self.tokens - sum(shard["tokens"] for shard in self.shards)

    def write(self, ids: np.ndarray) -> None:
        ids = ids.astype(self.dtype.newbyteorder("<"), copy=False)
        while len(ids):
            if self.file is None:
                self.file = open(self.path, "wb")
                self.file.write(header_bytes(0, self.dtype.name))
            piece, ids = np.split(ids, [min(len(ids), self.shard_tokens - self.in_shard)])
            self.file.write(piece.data)
            self.tokens += len(piece)
            if self.in_shard == self.shard_tokens:
                self.sync(finish=True)

    def sync(self, finish: bool = False) -> dict:
        """Write everything to disk and, if `finish`, complete the current shard; return the new `done`."""
        if self.file is not None:
            count, path = self.in_shard, self.path
            if finish:
                self.file.seek(0)
                self.file.write(header_bytes(count, self.dtype.name))
            self.file.flush()
            os.fsync(self.file.fileno())
            if finish:
                self.close()
                with open(path, "rb") as file:
                    self.shards.append({"file": path.name, "tokens": count, "sha256": sha256(file)})
        return {"tokens": self.tokens, "shards": self.shards}

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class SplitWriter:
    """Writes a split: its tokens and the segments of its examples, continuing after `done` (see `sync`)."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, dtype: str, has_segments: bool,
                 done: dict | None = None):
        done = done or {}
        self.documents, self.target_tokens = done.get("documents", 0), done.get("target_tokens", 0)
        self.streams = [ShardWriter(folder, split, shard_tokens, dtype, done)]
        if has_segments:
            self.streams.append(ShardWriter(folder, f"{split}-segments", shard_tokens, "uint32",
                                            done.get("segments")))

    @property
    def tokens(self) -> int:
        return self.streams[0].tokens

    @property
    def shards(self) -> list[dict]:
        return self.streams[0].shards

    def write(self, tokens: Tokens) -> None:
        for stream, values in zip(self.streams, (tokens.ids, tokens.segments)):
            stream.write(values)
        self.documents += tokens.documents
        self.target_tokens += tokens.target_tokens

    def sync(self, finish: bool = False) -> dict:
        ids, *segments = (stream.sync(finish) for stream in self.streams)
        counts = {"tokens": ids["tokens"], "documents": self.documents, "shards": ids["shards"]}
        if segments:
            counts |= {"target_tokens": self.target_tokens, "segments": segments[0]}
        return counts

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
