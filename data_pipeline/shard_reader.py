"""Token files: llm.c's format and our manifest, verification at start, and reading any range of tokens across files."""

import glob
import hashlib
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.cache import Cache
from common.errors import DataError
from common.heartbeat import HEARTBEAT
from common.watched_files import WatchedFile, let_open, load_seals, save_seals, seal
from data_pipeline.manifest import MANIFEST, Entry, Manifest, read_manifest

HEADER_BYTES = 1024
# llm.c: 256 little-endian int32, of which the first three are magic, version and token count.
MAGIC_AND_VERSION = {"uint16": (20240520, 1), "uint32": (20240801, 7)}

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
    """One token file, opened when it is first read."""

    path: Path
    dtype: str
    offset: int  # bytes before the first id
    tokens: int
    sha256: str | None = None  # of the whole file, as the manifest has it; files of others have none
    status: os.stat_result | None = None  # when its header was read

    @cached_property
    def ids_dtype(self) -> np.dtype:
        """Of the ids in the file."""
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def file(self) -> WatchedFile:
        """What rows are read from. A file that was only touched is hashed again, and the run goes on."""
        def unharmed(now: os.stat_result) -> bool:
            same_size = self.sha256 is not None and now.st_size == self.status.st_size
            return same_size and _scan(replace(self, status=now), lambda read: HEARTBEAT.beat())["sha256"] == self.sha256

        return WatchedFile(self.path, self.status, scattered=True, unharmed=unharmed)

    def read(self, start: int, count: int, file: WatchedFile | None = None) -> np.ndarray:
        """The ids [start, start + count), read-only. Raises DataError where the file is not what it was verified as."""
        size = self.ids_dtype.itemsize
        return np.frombuffer((file or self.file).read(self.offset + start * size, count * size), self.ids_dtype)

    def blocks(self, file: WatchedFile) -> Iterator[tuple[int, np.ndarray]]:
        """All ids, a few megabytes at a time, and where each block begins."""
        size = SCAN_BYTES // self.ids_dtype.itemsize
        for start in range(0, self.tokens, size):
            yield start, self.read(start, min(size, self.tokens - start), file)


@dataclass(frozen=True)
class TokenSet:
    """One split of a data set: its shards, one after the other, as a single sequence of tokens.

    `fingerprint` identifies the data and is the same on every rank. `document_start_id` begins each document. What is read is
    held against the vocabulary, beyond which a kernel would index: files change.
    """

    shards: tuple[Shard, ...]
    fingerprint: str
    document_start_id: int | None = None
    vocab_size: int = 1 << 32

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((shard.tokens for shard in self.shards), initial=0))

    @property
    def tokens(self) -> int:
        """The number of tokens in all shards."""
        return self._starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the tokens [start, start + count), read-only where they lie in one shard.

        Raises:
            DataError: a file was changed since it was verified.
        """
        assert 0 <= start and start + count <= self.tokens, (start, count, self.tokens)
        index = bisect_right(self._starts, start) - 1
        begin = start - self._starts[index]
        parts = []
        while count:
            shard = self.shards[index]
            parts.append(shard.read(begin, min(count, shard.tokens - begin)))
            refuse_beyond(shard, begin, parts[-1], self.vocab_size)
            count -= len(parts[-1])
            index, begin = index + 1, 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all tokens in their order, a few megabytes at a time, the way that a disk likes to be read."""
        for shard in self.shards:
            for start, ids in shard.blocks(WatchedFile(shard.path, shard.status)):
                refuse_beyond(shard, start, ids, self.vocab_size)
                yield ids


def refuse_beyond(shard: Shard, start: int, ids: np.ndarray, vocab_size: int) -> None:
    """See that a shard's ids from `start` on are of the vocabulary. Raises DataError with the place of the first that is not."""
    if len(ids) and int(ids.max()) >= vocab_size:
        token = int(np.flatnonzero(ids >= vocab_size)[0])
        place = start + token
        raise DataError(f"{shard.path}: token {place} (byte {shard.offset + place * ids.itemsize}) has id {ids[token]}, "
                        f"beyond the vocabulary of {vocab_size}; set TOKENIZER_PATH to the tokenizer it was made with, or "
                        "prepare the data again")


def open_token_set(path: str | Path, split: str, *, vocab_size: int, tokenizer_sha256: str | None = None,
                   document_start_id: int | None = None, minimum_tokens: int = 2, verify: str = "auto",
                   kind: str = "documents", cache: Cache = Cache()) -> TokenSet:
    """Open one split of prepared data or of token files made by others, and refuse what cannot be trained on.

    Sizes, headers and the tokenizer's hash are always checked, at the cost of one small read a file. Contents (SHA-256
    against the manifest, every id against the vocabulary) need one pass over all bytes, so one rank does that for all:
    `verify=VERIFY_DATA if ranks.is_rank0 else "never"`.

    Args:
        path: a prepared folder, a folder that holds exactly one, a token file (llm.c or nanoGPT `.bin`, `.npy`), a
            glob of such files, or a folder of them.
        split: "train" or "validation"; files of others are chosen by `train` or `val` in their names.
        tokenizer_sha256: must equal the manifest's; None leaves that unchecked.
        document_start_id: for files of others; a manifest brings its own.
        minimum_tokens: what the caller needs at least, for instance one batch and one token.
        verify: "auto" skips files whose size and times are those of their last verification, which is remembered
            in the cache; "always" reads everything; "never" no contents.
        kind: of KINDS, what the data must hold; files of others hold documents.
    Raises:
        DataError: the data is missing, damaged, too small, of another kind or made with another tokenizer.
    """
    assert split in SPLIT_WORDS and verify in ("auto", "always", "never")
    try:
        return _open(path, split, vocab_size, tokenizer_sha256, document_start_id, minimum_tokens, verify, kind, cache)
    except OSError as error:
        raise DataError(f"{KINDS[kind][0]}={path}: {error.filename or path} cannot be read: {error.strerror}; check the path and "
                        "its permissions") from error


def _open(path: str | Path, split: str, vocab_size: int, tokenizer_sha256: str | None, document_start_id: int | None,
          minimum_tokens: int, verify: str, kind: str, cache: Cache) -> TokenSet:
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
    let_open(len(shards), shards[0].path.parent)
    token_set = TokenSet(tuple(shards), fingerprint, document_start_id, vocab_size)
    if token_set.tokens < minimum_tokens:
        raise DataError(f"{path}: the {split} split has {token_set.tokens:,} tokens, but {minimum_tokens:,} are "
                        f"needed; prepare more text, or lower {'TOTAL_BATCH_SIZE' if split == 'train' else 'MAX_SEQ_LEN'}")
    if verify != "never":
        _verify(token_set, cache, trust_earlier=verify == "auto")
    return token_set


def open_segments(path: str | Path, split: str, *, verify: str = "auto", cache: Cache = Cache()) -> TokenSet:
    """Open the second stream of prepared chats or pairs, uint32 segments, as `open_token_set` opens the first."""
    folder = _prepared_folder(Path(path))
    assert folder is not None, "open_token_set comes first"
    shards = _prepared_shards(folder, read_manifest(folder), split, segments=True)
    token_set = TokenSet(tuple(shards), hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest())
    if verify != "never":
        _verify(token_set, cache, trust_earlier=verify == "auto")
    return token_set


def _prepared_folder(path: Path) -> Path | None:
    """Return the one prepared folder that `path` is or holds, None where there is none."""
    if os.path.lexists(path / MANIFEST):
        return path
    # listdir, as a glob keeps to itself what it may not see.
    inside = path.glob(f"*/{MANIFEST}") if path.is_dir() and os.listdir(path) else []
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
    status, head = _status_and_head(path)
    shard = _llmc_shard(path, status, head, entry.sha256)
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
    status, head = _status_and_head(path)
    if path.suffix == ".npy":
        shard = _npy_shard(path, status, head)
    else:
        shard = _llmc_shard(path, status, head, None) or _raw_shard(path, status, head)
    if shard.dtype != "uint32" and dtype_for(vocab_size) == "uint32":
        raise DataError(f"{path}: its ids are {shard.dtype}, too narrow for the vocabulary of {vocab_size:,}: it was "
                        "made with another tokenizer; set TOKENIZER_PATH to that one, or tokenize the text again")
    return shard


def _status_and_head(path: Path) -> tuple[os.stat_result, bytes]:
    """Return what the system knows of a file and its first bytes, as many as a header has."""
    try:
        # A pipe or a device would be waited for.
        if not path.is_file() and path.exists():
            raise DataError(f"{path}: is no file; copy or prepare it again")
        with open(path, "rb") as file:
            status, head = os.fstat(file.fileno()), file.read(HEADER_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing, though {MANIFEST} lists it; copy or prepare the data again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; copy it again, or see who may read it") from error
    if not status.st_size:
        raise DataError(f"{path}: is empty; copy or prepare it again")
    return status, head


def _llmc_shard(path: Path, status: os.stat_result, head: bytes, sha256: str | None) -> Shard | None:
    """Return the shard that an llm.c header describes, None where the file does not begin with llm.c's magic."""
    magic = int.from_bytes(head[:4], "little")
    dtype = next((name for name, (known, _) in MAGIC_AND_VERSION.items() if known == magic), None)
    if dtype is None:
        return None
    if len(head) < HEADER_BYTES:
        raise DataError(f"{path}: is cut short inside its header, after {status.st_size} bytes; copy or prepare it again")
    _, version, tokens = np.frombuffer(head, "<i4", 3).tolist()
    if version != MAGIC_AND_VERSION[dtype][1]:
        raise DataError(f"{path}: has version {version} of the format with magic {magic}, "
                        f"only {MAGIC_AND_VERSION[dtype][1]} is known; copy or prepare it again")
    shard = Shard(path, dtype, HEADER_BYTES, tokens, sha256, status)
    _check_size(shard)
    return shard


def _raw_shard(path: Path, status: os.stat_result, head: bytes) -> Shard:
    """Return nanoGPT's headerless file of uint16, which only its name tells from a damaged one."""
    looks_like_header = len(head) == HEADER_BYTES and not any(head[12:])
    if path.stem.lower() not in RAW_NAMES or looks_like_header:
        raise _wrong_magic(path, head)
    if status.st_size % 2:
        raise DataError(f"{path}: has an odd size ({status.st_size} bytes), but its ids take two bytes each; copy it again")
    return Shard(path, "uint16", 0, status.st_size // 2, None, status)


def _npy_shard(path: Path, status: os.stat_result, head: bytes) -> Shard:
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
    shard = Shard(path, dtype.name, offset, shape[0], None, status)
    _check_size(shard)
    return shard


def _wrong_magic(path: Path, head: bytes) -> DataError:
    if b"\0" not in head or head.startswith((b"PAR1", b"\x1f\x8b")):  # Parquet, gzip
        name = "" if path.suffix else "call it .txt or .jsonl, and "
        return DataError(f"{path}: holds text or records, not tokens; {name}prepare it with "
                         f"{KINDS['documents'][1]} --source {path}")
    return DataError(f"{path}: wrong magic: begins with {head[:4].hex(' ')}, which is no header of llm.c "
                     f"({' or '.join(str(magic) for magic, _ in MAGIC_AND_VERSION.values())}) or .npy; files without a "
                     "header are read where they are called train.bin or val.bin")


def _check_size(shard: Shard) -> None:
    size, expected = shard.status.st_size, shard.offset + shard.tokens * shard.ids_dtype.itemsize
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
        sampled = min(shard.tokens, FINGERPRINT_BYTES // shard.ids_dtype.itemsize)
        hasher.update(f"{shard.dtype} {shard.tokens}\n".encode())
        for start in (0, shard.tokens // 2, shard.tokens - sampled):
            hasher.update(shard.read(start, min(sampled, shard.tokens - start)).tobytes())
    return hasher.hexdigest()


def _verify(token_set: TokenSet, cache: Cache, trust_earlier: bool) -> None:
    """Hold every shard's contents against its hash and the vocabulary; remember what was found for the next start."""
    shards, vocab_size = token_set.shards, token_set.vocab_size
    places = {folder: cache.places(folder, token_set.fingerprint) for folder in {shard.path.parent for shard in shards}}
    earlier = {folder: {name: found for place in reversed(beside) for name, found in load_seals(place).items()}
               for folder, beside in places.items()}
    facts = {shard: earlier[shard.path.parent].get(shard.path.name, {}) for shard in shards}
    due = [shard for shard in shards if not (trust_earlier and _still_holds(facts[shard], shard))]
    for shard, found in zip(due, _scan_all(due)):
        facts[shard] = earlier[shard.path.parent][shard.path.name] = seal(shard.status) | found
    for folder in {shard.path.parent for shard in due}:
        any(save_seals(place, earlier[folder]) for place in places[folder])  # the first that can be written
    for shard, found in facts.items():
        if shard.sha256 is not None and found["sha256"] != shard.sha256:
            raise DataError(f"{shard.path}: is damaged: its SHA-256 begins {found['sha256'][:12]}, {MANIFEST} says "
                            f"{shard.sha256[:12]}; copy or prepare it again")
        if found["max_id"] >= vocab_size:
            for _ in TokenSet((shard,), "", vocab_size=vocab_size).blocks():
                continue  # it names the place


def _scan_all(shards: Sequence[Shard]) -> list[dict]:
    """Scan the files side by side (hashing releases Python's lock), with a progress bar where it takes seconds."""
    size = sum(shard.status.st_size for shard in shards)
    lock = threading.Lock()
    with (tqdm(total=size, unit="B", unit_scale=True, desc="Verifying token files", delay=2, leave=False) as bar,
          ThreadPoolExecutor(os.cpu_count() or 1) as pool):

        def advance(read: int) -> None:
            HEARTBEAT.beat()
            with lock:
                bar.update(read)

        return list(pool.map(lambda shard: _scan(shard, advance), shards))


def _still_holds(found: dict, shard: Shard) -> bool:
    return (found.items() >= seal(shard.status).items() and isinstance(found.get("max_id"), int)
            and (shard.sha256 is None or isinstance(found.get("sha256"), str)))


def _scan(shard: Shard, advance: Callable[[int], None]) -> dict:
    """Read the whole file once: its SHA-256, where there is one to compare with, and its largest id."""
    hasher = hashlib.sha256() if shard.sha256 is not None else None
    max_id, file = 0, WatchedFile(shard.path, shard.status)
    if hasher is not None:
        hasher.update(file.read(0, shard.offset))
    for _, ids in shard.blocks(file):
        if hasher is not None:
            hasher.update(ids)
        max_id = max(max_id, int(ids.max()))
        advance(ids.nbytes)
    return {"sha256": hasher and hasher.hexdigest(), "max_id": max_id}
