"""Token files: llm.c's format and our manifest, verification at start, and reading any range of tokens across files."""

import glob
import hashlib
import json
import mmap
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
from tqdm import tqdm

from errors import DataError
from manifest import MANIFEST, Entry, Manifest, read_manifest
from plain_files import read_plain
from pulse import PULSE

HEADER_BYTES = 1024
# llm.c: 256 little-endian int32, of which the first three are magic, version and token count.
MAGIC_AND_VERSION = {"uint16": (20240520, 1), "uint32": (20240801, 7)}

VERIFIED = ".verified.json"
SPLIT_WORDS = {"train": ("train", "training"), "validation": ("val", "valid", "validation")}
PREPARED_NAME = re.compile(r"(train|validation)(-segments)?-\d{5}\.bin")  # as shard_writer names them
RAW_NAMES = {"train", "val", "validation"}
NPY_MAGIC = b"\x93NUMPY"
SCAN_BYTES = 1 << 22
# What a prepared set can hold: the setting that names it, and the script that makes it.
KINDS = {"documents": ("PRETRAIN_DATA_PATH", "scripts/load_pretrain_dataset.py"),
         "chats": ("SFT_DATA_PATH", "scripts/load_instruct_dataset.py"),
         "pairs": ("DPO_DATA_PATH", "scripts/load_dpo_dataset.py")}
FINGERPRINT_BYTES = 4096


def dtype_for(vocab_size: int) -> str:
    """Return the narrowest id type that a token file offers for the vocabulary: "uint16" or "uint32"."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def header_bytes(tokens: int, dtype: str) -> bytes:
    """Return the 1024 bytes that precede `tokens` little-endian ids of `dtype` in a token file.

    Source: llm.c, dev/data/data_common.py.
    """
    assert 0 <= tokens < 1 << 31, "llm.c counts a file's tokens in an int32"
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = *MAGIC_AND_VERSION[dtype], tokens
    return header.tobytes()


@dataclass(frozen=True)
class Shard:
    """One token file, mapped into memory when it is first read."""

    path: Path
    dtype: str
    offset: int  # bytes before the first id
    tokens: int
    sha256: str | None = None  # of the whole file, as the manifest has it; files of others have none

    @cached_property
    def ids(self) -> np.ndarray:
        """All ids, read-only."""
        with open(self.path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Rows lie anywhere: reading ahead would fetch megabytes for each few kilobytes, 100 times slower when cold.
        mapping.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapping, np.dtype(self.dtype).newbyteorder("<"), self.tokens, self.offset)


@dataclass(frozen=True)
class TokenSet:
    """One split of a data set: its shards, one after the other, as a single sequence of tokens.

    `fingerprint` identifies the data and is the same on every rank. `document_start_id` begins each document.
    """

    shards: tuple[Shard, ...]
    fingerprint: str
    document_start_id: int | None = None

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((shard.tokens for shard in self.shards), initial=0))

    @property
    def tokens(self) -> int:
        """The number of tokens in all shards."""
        return self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens [start, start + count) as a read-only view, or as a copy where they span shards."""
        assert 0 <= start and start + count <= self.tokens, (start, count, self.tokens)
        index = bisect_right(self._starts, start) - 1
        begin = start - self._starts[index]
        if begin + count <= self.shards[index].tokens:
            return self.shards[index].ids[begin:begin + count]
        parts = []
        while count:
            parts.append(self.shards[index].ids[begin:begin + count])
            count -= len(parts[-1])
            index, begin = index + 1, 0
        return np.concatenate(parts)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all tokens in their order, a few megabytes at a time, the way that a disk likes to be read."""
        for shard in self.shards:
            size = SCAN_BYTES // np.dtype(shard.dtype).itemsize
            with open(shard.path, "rb") as file:
                file.seek(shard.offset)
                for start in range(0, shard.tokens, size):
                    yield np.fromfile(file, np.dtype(shard.dtype).newbyteorder("<"), min(size, shard.tokens - start))


def open_token_set(path: str | Path, split: str, *, vocab_size: int, tokenizer_sha256: str | None = None,
                   document_start_id: int | None = None, minimum_tokens: int = 2, verify: str = "auto",
                   kind: str = "documents") -> TokenSet:
    """Open one split of prepared data or of token files made by others, and refuse what cannot be trained on.

    Sizes, headers and the tokenizer's hash are always checked, at the cost of one small read a file. Contents (SHA-256
    against the manifest, every id against the vocabulary) need one pass over all bytes, so one rank does that for all:
    `verify=VERIFY_DATA if ranks.is_main else "never"`.

    Args:
        path: a prepared folder, a folder that holds exactly one, a token file (llm.c or nanoGPT `.bin`, `.npy`), a
            glob of such files, or a folder of them.
        split: "train" or "validation"; files of others are chosen by `train` or `val` in their names.
        tokenizer_sha256: must equal the manifest's; None leaves that unchecked.
        document_start_id: for files of others; a manifest brings its own.
        minimum_tokens: what the caller needs at least, for instance one batch and one token.
        verify: "auto" skips files whose size and times are those of their last verification, which is remembered
            beside them where the folder can be written; "always" reads everything; "never" no contents.
        kind: of KINDS, what the data must hold; files of others hold documents.
    Raises:
        DataError: the data is missing, damaged, too small, of another kind or made with another tokenizer.
    """
    assert split in SPLIT_WORDS and verify in ("auto", "always", "never")
    try:
        return _open(path, split, vocab_size, tokenizer_sha256, document_start_id, minimum_tokens, verify, kind)
    except OSError as error:
        raise DataError(f"{KINDS[kind][0]}={path}: {error.filename or path} cannot be read: {error.strerror}; check the path and "
                        "its permissions") from error


def _open(path: str | Path, split: str, vocab_size: int, tokenizer_sha256: str | None, document_start_id: int | None,
          minimum_tokens: int, verify: str, kind: str) -> TokenSet:
    folder = _prepared_folder(Path(path))
    if folder is None and kind != "documents":
        raise DataError(f"{path}: holds no prepared {kind} ({MANIFEST}); prepare them with {KINDS[kind][1]}")
    if folder is not None:
        manifest = read_manifest(folder)
        if manifest.kind != kind:
            raise DataError(f"{folder}: holds {manifest.kind}, but {KINDS[kind][0]} needs {kind}; prepare them with "
                            f"{KINDS[kind][1]}")
        if tokenizer_sha256 not in (None, manifest.tokenizer_sha256):
            raise DataError(f"{folder}: was made with another tokenizer ({manifest.tokenizer_sha256[:12]}) than the one given "
                            f"({tokenizer_sha256[:12]}); set TOKENIZER_PATH to the one it was made with, or prepare "
                            "the data again")
        if tokenizer_sha256 is not None and document_start_id not in (None, manifest.document_start_id):
            raise DataError(f"{folder / MANIFEST}: document_start_id is {manifest.document_start_id}, but its tokenizer begins a "
                            f"document with {document_start_id}; prepare the data again")
        shards = _prepared_shards(folder, manifest, split)
        document_start_id = manifest.document_start_id
        fingerprint = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
    else:
        shards = [_foreign_shard(file, vocab_size) for file in _foreign_files(Path(path), split)]
        fingerprint = _sampled_fingerprint(shards)
    token_set = TokenSet(tuple(shards), fingerprint, document_start_id)
    if token_set.tokens < minimum_tokens:
        raise DataError(f"{path}: the {split} split has {token_set.tokens:,} tokens, but {minimum_tokens:,} are "
                        f"needed; prepare more text, or lower {'TOTAL_BATCH_SIZE' if split == 'train' else 'MAX_SEQ_LEN'}")
    if verify != "never":
        _verify(shards, vocab_size, trust_earlier=verify == "auto")
    return token_set


def open_segments(path: str | Path, split: str, *, verify: str = "auto") -> TokenSet:
    """Open the second stream of prepared chats or pairs, uint32 segments, as `open_token_set` opens the first."""
    folder = _prepared_folder(Path(path))
    assert folder is not None, "open_token_set comes first"
    shards = _prepared_shards(folder, read_manifest(folder), split, segments=True)
    if verify != "never":
        _verify(shards, 1 << 32, trust_earlier=verify == "auto")
    return TokenSet(tuple(shards), hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest())


def _prepared_folder(path: Path) -> Path | None:
    """Return the one prepared folder that `path` is or holds, None where there is none."""
    if os.path.lexists(path / MANIFEST):
        return path
    inside = path.glob(f"*/{MANIFEST}") if path.is_dir() else []
    found = sorted(manifest.parent for manifest in inside if not manifest.parent.name.startswith(("tmp-", ".")))
    if len(found) > 1:
        raise DataError(f"{path}: holds {len(found)} prepared sets, name one of them: {', '.join(map(str, found))}")
    return found[0] if found else None


def _prepared_shards(folder: Path, manifest: Manifest, split: str, segments: bool = False) -> list[Shard]:
    stream = manifest.splits.get(split)
    if stream is None or not stream.shards:
        without = ", with a larger VALIDATION_FRACTION, or set VALIDATE_EVERY=0" if split == "validation" else ""
        raise DataError(f"{folder / MANIFEST}: lists no {split} shards; prepare more text{without}")
    dtype = manifest.dtype
    if segments:
        stream, dtype = stream.segments, "uint32"
        if stream is None:
            raise DataError(f"{folder / MANIFEST}: lists no segments of {split}; prepare the data again")
    return [_prepared_shard(folder / entry.file, dtype, entry) for entry in stream.shards]


def _prepared_shard(path: Path, dtype: str, entry: Entry) -> Shard:
    size, head = _size_and_head(path)
    shard = _llmc_shard(path, size, head, entry.sha256)
    if shard is None:
        raise _wrong_magic(path, head)
    if (shard.dtype, shard.tokens) != (dtype, entry.tokens):
        raise DataError(f"{path}: its header says {shard.tokens} tokens of {shard.dtype}, but {MANIFEST} says "
                        f"{entry.tokens} of {dtype}; prepare the data again")
    return shard


def _foreign_files(path: Path, split: str) -> list[Path]:
    """Return the token files of one split, in the order of their names."""
    chosen_by_hand = not path.is_dir()
    if path.is_file():
        files = [path]
    elif chosen_by_hand:
        files = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
    else:
        files = sorted(file for file in path.iterdir() if file.suffix in (".bin", ".npy") and file.is_file())
        if own := next((file.name for file in files if PREPARED_NAME.fullmatch(file.name)), None):
            raise DataError(f"{path}: {own} looks like a prepared set's, but there is no {MANIFEST}, without which nothing "
                            "can be verified; bring it back, or prepare again (files of another trainer: give them other names)")
    if not files:
        what = f"holds neither {MANIFEST} nor token files (.bin, .npy)" if path.is_dir() else "no such file or folder"
        raise DataError(f"{path}: {what}; prepare data with scripts/load_pretrain_dataset.py")
    # A file that somebody pointed at is training data unless its name says otherwise; in a folder it could be anything.
    of_split = [file for file in files if (_split_in_name(file) or ("train" if chosen_by_hand else None)) == split]
    if not of_split:
        word = SPLIT_WORDS[split][0]
        without = "; set VALIDATE_EVERY=0 where there is none" if split == "validation" else ""
        raise DataError(f"{path}: no token file for {split} (with '{word}' in its name) among "
                        f"{', '.join(file.name for file in files[:5])}{' ...' if len(files) > 5 else ''}{without}")
    kinds = {file.suffix for file in of_split}
    if len(kinds) > 1:
        raise DataError(f"{path}: the {split} files are of several kinds ({', '.join(sorted(kinds))}), perhaps the "
                        "same tokens twice; name one kind with a glob such as '*.bin'")
    return of_split


def _split_in_name(file: Path) -> str | None:
    words = re.split(r"[^a-z]+", file.stem.lower())
    return next((split for split, names in SPLIT_WORDS.items() if not set(names).isdisjoint(words)), None)


def _foreign_shard(path: Path, vocab_size: int) -> Shard:
    size, head = _size_and_head(path)
    if path.suffix == ".npy":
        shard = _npy_shard(path, size, head)
    else:
        shard = _llmc_shard(path, size, head, None) or _raw_shard(path, size, head)
    if shard.dtype != "uint32" and dtype_for(vocab_size) == "uint32":
        raise DataError(f"{path}: its ids are {shard.dtype}, too narrow for the vocabulary of {vocab_size:,}: it was "
                        "made with another tokenizer; set TOKENIZER_PATH to that one, or tokenize the text again")
    return shard


def _size_and_head(path: Path) -> tuple[int, bytes]:
    """Return a file's size and its first bytes, as many as a header has."""
    try:
        # A pipe or a device would be waited for.
        if not path.is_file() and path.exists():
            raise DataError(f"{path}: is no file; copy or prepare it again")
        with open(path, "rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(HEADER_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing, though {MANIFEST} lists it; copy or prepare the data again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; copy it again, or see who may read it") from error
    if not size:
        raise DataError(f"{path}: is empty; copy or prepare it again")
    return size, head


def _llmc_shard(path: Path, size: int, head: bytes, sha256: str | None) -> Shard | None:
    """Return the shard that an llm.c header describes, None where the file does not begin with llm.c's magic."""
    magic = int.from_bytes(head[:4], "little")
    dtype = next((name for name, (known, _) in MAGIC_AND_VERSION.items() if known == magic), None)
    if dtype is None:
        return None
    if len(head) < HEADER_BYTES:
        raise DataError(f"{path}: is cut short inside its header, after {size} bytes; copy or prepare it again")
    _, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
    if version != MAGIC_AND_VERSION[dtype][1]:
        raise DataError(f"{path}: has version {version} of the format with magic {magic}, "
                        f"only {MAGIC_AND_VERSION[dtype][1]} is known; copy or prepare it again")
    shard = Shard(path, dtype, HEADER_BYTES, tokens, sha256)
    _check_size(shard, size)
    return shard


def _raw_shard(path: Path, size: int, head: bytes) -> Shard:
    """Return nanoGPT's headerless file of uint16, which only its name tells from a damaged one."""
    looks_like_header = len(head) == HEADER_BYTES and not any(head[12:])
    if path.stem.lower() not in RAW_NAMES or looks_like_header:
        raise _wrong_magic(path, head)
    if size % 2:
        raise DataError(f"{path}: has an odd size ({size} bytes), but its ids take two bytes each; copy it again")
    return Shard(path, "uint16", 0, size // 2)


def _npy_shard(path: Path, size: int, head: bytes) -> Shard:
    if not head.startswith(NPY_MAGIC):
        raise _wrong_magic(path, head)
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            read_header = (np.lib.format.read_array_header_1_0 if version == (1, 0) else
                           np.lib.format.read_array_header_2_0)
            shape, _, dtype = read_header(file)
            offset = file.tell()
    except Exception as error:  # numpy takes the header for Python's, and raises whatever its parsers do
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: its header cannot be read ({what:.100}); copy it again") from error
    if len(shape) != 1 or dtype.str not in ("<u2", "<u4"):
        raise DataError(f"{path}: holds an array of shape {shape} and type {dtype}; expected one row of uint16 or "
                        "uint32, so save it as that")
    shard = Shard(path, dtype.name, offset, shape[0])
    _check_size(shard, size)
    return shard


def _wrong_magic(path: Path, head: bytes) -> DataError:
    if b"\0" not in head or head.startswith((b"PAR1", b"\x1f\x8b")):  # Parquet, gzip
        name = "" if path.suffix else "call it .txt or .jsonl, and "
        return DataError(f"{path}: holds text or records, not tokens; {name}prepare it with "
                         f"{KINDS['documents'][1]} --source {path}")
    return DataError(f"{path}: wrong magic: begins with {head[:4].hex(' ')}, which is no header of llm.c "
                     f"({' or '.join(str(magic) for magic, _ in MAGIC_AND_VERSION.values())}) or .npy; files without a "
                     "header are read where they are called train.bin or val.bin")


def _check_size(shard: Shard, size: int) -> None:
    expected = shard.offset + shard.tokens * np.dtype(shard.dtype).itemsize
    if size != expected:
        what = "is cut short" if size < expected else "is too long"
        raise DataError(f"{shard.path}: {what}: {size:,} bytes, but its header promises {shard.tokens:,} tokens of "
                        f"{shard.dtype}, {expected:,} bytes; copy or prepare it again")
    if shard.tokens <= 0:
        raise DataError(f"{shard.path}: is empty, its header says {shard.tokens} tokens; prepare it again")


def _sampled_fingerprint(shards: Sequence[Shard]) -> str:
    """Hash the counts and the beginning, middle and end of each file: every rank can do that without reading it all."""
    hasher = hashlib.sha256()
    for shard in shards:
        sampled = FINGERPRINT_BYTES // np.dtype(shard.dtype).itemsize
        hasher.update(f"{shard.dtype} {shard.tokens}\n".encode())
        for start in (0, shard.tokens // 2, max(0, shard.tokens - sampled)):
            hasher.update(shard.ids[start:start + sampled].tobytes())
    return hasher.hexdigest()


def _verify(shards: Sequence[Shard], vocab_size: int, trust_earlier: bool) -> None:
    """Hold every shard's contents against its hash and the vocabulary; remember what was found for the next start."""
    stamps = {shard: _stamp(shard.path) for shard in shards}
    earlier = {folder: _load_verified(folder) for folder in {shard.path.parent for shard in shards}}
    facts = {shard: earlier[shard.path.parent].get(shard.path.name, {}) for shard in shards}
    due = [shard for shard in shards if not (trust_earlier and _still_holds(facts[shard], shard, stamps[shard]))]
    for shard, found in zip(due, _scan_all(due)):
        facts[shard] = earlier[shard.path.parent][shard.path.name] = stamps[shard] | found
    for folder in {shard.path.parent for shard in due}:
        _save_verified(folder, earlier[folder])
    for shard, found in facts.items():
        if shard.sha256 is not None and found["sha256"] != shard.sha256:
            raise DataError(f"{shard.path}: is damaged: its SHA-256 begins {found['sha256'][:12]}, {MANIFEST} says "
                            f"{shard.sha256[:12]}; copy or prepare it again")
        if found["max_id"] >= vocab_size:
            raise _beyond_vocabulary(shard, vocab_size)


def _scan_all(shards: Sequence[Shard]) -> list[dict]:
    """Scan the files side by side (hashing releases Python's lock), with a progress bar where it takes seconds."""
    size = sum(shard.offset + shard.tokens * np.dtype(shard.dtype).itemsize for shard in shards)
    lock = threading.Lock()
    with (tqdm(total=size, unit="B", unit_scale=True, desc="Verifying token files", delay=2, leave=False) as bar,
          ThreadPoolExecutor(os.cpu_count() or 1) as pool):

        def advance(read: int) -> None:
            PULSE.move()
            with lock:
                bar.update(read)

        return list(pool.map(lambda shard: _scan(shard, advance), shards))


def _stamp(path: Path) -> dict:
    # The change time as well: a copy that keeps the modification time may still be a bad copy.
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}


def _still_holds(found: dict, shard: Shard, stamp: dict) -> bool:
    return found.items() >= stamp.items() and (shard.sha256 is None or found["sha256"] is not None)


def _scan(shard: Shard, advance: Callable[[int], None]) -> dict:
    """Read the whole file once: its SHA-256, where there is one to compare with, and its largest id."""
    hasher = hashlib.sha256() if shard.sha256 is not None else None
    max_id = 0
    with open(shard.path, "rb") as file:
        head = file.read(shard.offset)
        if hasher is not None:
            hasher.update(head)
        while block := file.read(SCAN_BYTES):
            if hasher is not None:
                hasher.update(block)
            max_id = max(max_id, int(np.frombuffer(block, shard.ids.dtype).max()))
            advance(len(block))
    return {"sha256": hasher and hasher.hexdigest(), "max_id": max_id}


def _beyond_vocabulary(shard: Shard, vocab_size: int) -> DataError:
    for start in range(0, shard.tokens, SCAN_BYTES):
        beyond = np.flatnonzero(shard.ids[start:start + SCAN_BYTES] >= vocab_size)
        if len(beyond):
            token = start + int(beyond[0])
            return DataError(f"{shard.path}: token {token} (byte {shard.offset + token * shard.ids.itemsize}) has id "
                             f"{shard.ids[token]}, beyond the vocabulary of {vocab_size}; set TOKENIZER_PATH to the "
                             "tokenizer it was made with, or prepare the data again")
    raise AssertionError(f"{shard.path} changed while it was verified")


def _load_verified(folder: Path) -> dict:
    try:
        known = json.loads(read_plain(folder / VERIFIED))
    except (OSError, ValueError, RecursionError):
        known = None
    # Nothing remembered, or not legibly: everything is read again.
    return known if isinstance(known, dict) and all(isinstance(found, dict) for found in known.values()) else {}


def _save_verified(folder: Path, known: dict) -> None:
    temporary = folder / f"{VERIFIED}.{os.getpid()}"
    try:
        temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
        temporary.replace(folder / VERIFIED)
    except OSError:
        return  # a folder that cannot be written: it is verified again at the next start
