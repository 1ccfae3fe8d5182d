"""Where text comes from: files of any kind and place, or the Hugging Face hub, as a stream of (where, record).

`where` says file and line (or row) in every complaint. Every reader takes a `Reading`, which knows what to do with a record
that cannot be used and how far the files have been read.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from common.errors import DataError, PaddockError, SettingsError, requires_package
from common.remote import HUB_NAME, RemoteFile, first_line, hub_revision, is_transient, retry
from common.text import without_passwords

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
         ".txt": "text", ".text": "text", ".raw": "text", ".tokens": "text"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
READABLE = f"{' '.join(KINDS)}, each also as {' '.join(COMPRESSIONS)}"
LISTED_BAD_RECORDS, NAMED_COLUMNS = 1000, 20
COMMIT = re.compile(r"[0-9a-f]{40}")
LINE_BYTES = 1 << 30  # that a line may have, which is held in memory; compressed files can unpack to far more
TRIED_BYTES = 8192  # by which a file is told to be text or not
WAYS_TO_CUT = ("whole", "line", "blank", "wikitext")  # text into documents; anything else is a line that lies between
WIKITEXT_TITLE = re.compile(r" = [^=].* = \s*")


@dataclass(frozen=True)
class Source:
    """One origin of records: files (`path`) or a dataset of the hub (`name`)."""

    path: str = ""  # a file, folder or glob, on any URL that fsspec knows
    name: str = ""
    config: str = ""
    split: str = "train"
    revision: str = ""
    files: str = ""  # pattern of the hub repository's files, where it has no config for them
    column: str = "text"
    documents: str = "whole"  # how text becomes documents: whole, line, blank, wikitext, or a separating line
    weight: float = 1.0


SHORTCUTS = {
    "fineweb-edu": Source(name="HuggingFaceFW/fineweb-edu", config="sample-10BT"),
    "c4": Source(name="allenai/c4", files="en/c4-train.*.json.gz"),
    "wikitext": Source(name="Salesforce/wikitext", config="wikitext-103-raw-v1", documents="wikitext"),
}


def source_of(text: str, shortcuts: Mapping[str, Source] = SHORTCUTS, **fields: str) -> Source:
    """The source that a user means by a shortcut, a path, a URL, a glob, or the name of a dataset on the hub.

    Raises: SettingsError where it is empty.
    """
    if not text:
        raise SettingsError("a source is empty; give a file, folder or glob, or the name of a dataset on the hub")
    if text in shortcuts:
        return replace(shortcuts[text], **fields)
    could_be_on_hub = HUB_NAME.fullmatch(text) and not os.path.exists(text) and not kind_of(text)[0]
    return Source(name=text, **fields) if could_be_on_hub else Source(path=text, **fields)


@dataclass
class Reading:
    """What reading one source has met so far."""

    skip_bad: bool = False
    way_out: str = "mend it, or go on without such records: --on-bad-record skip"
    bad: int = 0
    bad_records: list[str] = field(default_factory=list)  # the first LISTED_BAD_RECORDS
    empty: int = 0
    separators: int = 0  # lines that lay between documents
    bytes_done: int = 0
    bytes_total: int = 0  # 0 where it is not known

    def refuse(self, where: str, reason: str) -> None:
        """Count and list a record that cannot be used.

        Raises:
            DataError: bad records are not to be skipped.
        """
        if not self.skip_bad:
            raise DataError(f"{where}: {reason}; {self.way_out}")
        self.bad += 1
        if len(self.bad_records) < LISTED_BAD_RECORDS:
            self.bad_records.append(f"{where}: {reason}")


@contextmanager
def naming(what: str):
    """Turn whatever a storage or format library raises into one DataError that names `what`."""
    try:
        yield
    except PaddockError:
        raise
    except Exception as error:  # fsspec's back ends, arrow, zlib and the hub's client share no base class
        raise DataError(f"{what}: {first_line(error)}; see that it is there, whole and may be read") from error


@dataclass(frozen=True)
class StoredFile:
    """One file of a source, as it was when the source was listed."""

    fs: Any
    name: str
    size: int
    kind: str
    compression: str | None

    @property
    def is_local(self) -> bool:
        return "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))

    @property
    def url(self) -> str:
        """For people; without a password."""
        return self.name if self.is_local else without_passwords(self.fs.unstrip_protocol(self.name))

    def open(self) -> Any:
        """The bytes, from a connection that is made again where it is lost."""
        return open(self.name, "rb") if self.is_local else RemoteFile(self.fs, self.name, self.size)

    def stamp(self) -> list:
        """What changes when the content does, read without reading the content."""
        if not self.is_local:
            return [self.fs.ukey(self.name)]
        stat = os.stat(self.name)
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def kind_of(name: str) -> tuple[str | None, str | None]:
    """(kind, compression) by a file's suffixes; the kind is None where it is not one that can be read."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    return KINDS.get(suffix), compression


def list_files(path: str) -> list[StoredFile]:
    """The readable files behind a path, folder, glob or URL, in the order of their names.

    Raises:
        DataError: there are none, or the place cannot be reached.
    """
    with naming(path):
        files = retry(path, lambda: _look_for(path))
    if not files:
        raise DataError(f"{path}: no such file or folder, or nothing that matches; check the path")
    readable = [file for file in files if file.kind]
    if not readable:
        raise DataError(f"{path}: no file of a kind that can be read; give {READABLE}")
    for file in readable:
        if flaw_of(file.name):  # it could stand in no list
            raise DataError(f"{file.url}: the file's name is not UTF-8; rename it")
    return readable


def _look_for(path: str) -> list[StoredFile]:
    fs, root = url_to_fs(path)
    try:
        there = fs.info(root)["type"]
    except FileNotFoundError as error:  # which fsspec also says of a server that does not answer
        if is_transient(error):
            raise
        there = None
    if there == "directory" or (there is None and fs.isdir(root)):  # some stores have no entry for a folder
        names = [name for name, info in sorted(fs.find(root, detail=True).items())
                 if info["type"] == "file" and not os.path.basename(name).startswith((".", "_"))]
    elif there is None:
        names = [name for name in sorted(fs.glob(root)) if fs.isfile(name)] if any(sign in root for sign in "*?[") else []
    else:
        names = [root] if there == "file" else []  # a pipe would be waited for
    return [StoredFile(fs, name, fs.size(name) or 0 if kind_of(name)[0] else 0, *kind_of(name)) for name in names]


def content_hash(file: StoredFile, known: dict[str, list], advance: Callable[[int], Any]) -> str:
    """SHA-256 of a local file, from `known` ({name: [stamp, hash]}, updated) where its stamp is unchanged."""
    stamp = file.stamp()
    if known.get(file.name, [None])[0] != stamp:
        digest = hashlib.sha256()
        with open(file.name, "rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
                advance(len(block))
        known[file.name] = [stamp, digest.hexdigest()]
    return known[file.name][1]


def identify(source: Source, known: dict[str, list], advance: Callable[[int], Any] = lambda count: None) -> dict:
    """What decides this source's records, as JSON-like values: the content of local files wherever they lie, the version that
    a remote store reports for each of its files, the commit of a dataset on the hub."""
    how = {"column": source.column, "documents": source.documents}
    if source.name:
        return {"name": source.name, "config": source.config, "split": source.split, "files": source.files,
                "revision": hub_revision(source.name, source.revision), **how}
    files = []
    for file in list_files(source.path):
        with naming(file.url):
            content = content_hash(file, known, advance) if file.is_local else file.stamp()[0]
        files.append([file.kind, file.compression, file.size, content])
    return {"files": files, **how}


def read_records(source: Source, reading: Reading) -> Iterator[tuple[str, dict]]:
    """Every record of a source as (where, record), in a fixed order. A line of a text file is a record with one column."""
    for _, records in read_parts(source, reading):
        yield from records


def read_parts(source: Source, reading: Reading) -> Iterator[tuple[str, Iterator[tuple[str, dict]]]]:
    """The records of a source file by file, each part with its kind; a dataset of the hub is one part."""
    if source.name:
        yield "hub", read_hub(source)
        return
    files = list_files(source.path)
    reading.bytes_total = sum(file.size for file in files)
    readers = {"jsonl": read_jsonl, "parquet": read_parquet, "text": read_text}
    for file in files:
        before = reading.bytes_done
        yield file.kind, readers[file.kind](file, source.column, reading)
        reading.bytes_done = before + file.size


def read_lines(file: StoredFile, reading: Reading) -> Iterator[tuple[str, str]]:
    """The lines of a file with their ends, as (file:line, text); UTF-8, with or without a BOM."""
    before = reading.bytes_done
    with naming(file.url), file.open() as raw:
        lines = raw if file.is_local else io.BufferedReader(raw, 1 << 20)
        if file.compression:
            if file.compression not in fsspec.compression.compr:
                raise DataError(f"{file.url}: {file.compression} needs a package: pip install zstandard")
            unpacked = fsspec.compression.compr[file.compression](lines, mode="rb")
            lines = io.BufferedReader(unpacked, 1 << 20)  # zstandard's has no lines
        lines = iter(partial(lines.readline, LINE_BYTES + 1), b"")
        if file.kind == "text":
            lines = chain(beginning_of_text(file.url, lines), lines)
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > LINE_BYTES:
                raise DataError(f"{file.url}:{number}: a line of more than {LINE_BYTES >> 20:,} MiB, which is no record; mend "
                                "it, or leave the file out")
            if number % 64 == 0 or len(line) > 1 << 16:
                reading.bytes_done = before + raw.tell()
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                reading.refuse(f"{file.url}:{number}", f"byte {error.start + 1} of the line is not UTF-8")
                continue
            yield f"{file.url}:{number}", text


def beginning_of_text(url: str, lines: Iterable[bytes]) -> list[bytes]:
    """The first lines of a file, which must be text for the most part, whatever is to be done with a bad line.

    Raises:
        DataError: more than half of them are none: it is a binary file, or text in another encoding.
    """
    first, size = [], 0
    for line in lines:
        first.append(line)
        size += len(line)
        if size >= TRIED_BYTES:
            break
    bad = sum(flaw_of(line.decode("utf-8", "surrogateescape")) is not None for line in first)
    if 2 * bad > len(first):
        raise DataError(f"{url}: is no text in UTF-8: {bad} of its first {len(first)} lines hold NULs, or bytes that UTF-8 has "
                        "not; convert it, or leave the file out")
    return first


def read_jsonl(file: StoredFile, column: str, reading: Reading) -> Iterator[tuple[str, dict]]:
    """The objects of a JSON-lines file, with all their columns. Blank lines are passed over."""
    for where, line in read_lines(file, reading):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reading.refuse(where, f"not valid JSON: {error}")
            continue
        if isinstance(record, dict):
            yield where, record
        else:
            reading.refuse(where, f"expected one JSON object in a line, got {type(record).__name__}")


def read_text(file: StoredFile, column: str, reading: Reading) -> Iterator[tuple[str, dict]]:
    """The lines of a text file, each ending in a plain newline where it had any end."""
    for where, line in read_lines(file, reading):
        yield where, {column: line[:-2] + "\n" if line.endswith("\r\n") else line}


def read_parquet(file: StoredFile, column: str, reading: Reading) -> Iterator[tuple[str, dict]]:
    """The rows of a Parquet file: the one column where the file has it, else (for the caller to complain of) all."""
    with requires_package("pyarrow", f"{file.url}, a Parquet file,"):
        import pyarrow.parquet as pq
    before = reading.bytes_done
    with naming(file.url), file.open() as raw:
        table = pq.ParquetFile(raw)
        columns = [column] if column in table.schema_arrow.names else None
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            for cells in zip(*batch.columns):
                row += 1
                try:
                    record = dict(zip(batch.schema.names, (cell.as_py() for cell in cells)))
                except UnicodeDecodeError as error:
                    reading.refuse(f"{file.url}: row {row}", f"byte {error.start + 1} of the text is not UTF-8")
                    continue
                yield f"{file.url}: row {row}", record
            reading.bytes_done = before + int(file.size * row / table.metadata.num_rows)


def read_hub(source: Source) -> Iterator[tuple[str, dict]]:
    """The rows of a dataset on the hub, streamed at one fixed commit."""
    with requires_package("datasets", f"{source.name}, a dataset of the hub,"):
        import datasets
    revision = source.revision if COMMIT.fullmatch(source.revision) else hub_revision(source.name, source.revision)
    with naming(f"{source.name} ({source.config or 'default'}, {source.split})"):
        # What comes later, datasets and the hub's client ask for again themselves.
        rows = retry(source.name, lambda: datasets.load_dataset(
            source.name, source.config or None, split=source.split, streaming=True, revision=revision or None,
            data_files={source.split: source.files} if source.files else None))
        for number, record in enumerate(rows, 1):
            yield f"{source.name}[{source.split}] row {number}", record


def read_texts(source: Source, reading: Reading) -> Iterator[str]:
    """The documents of a source: the texts of its column that are sound, cut as `source.documents` says, none of them empty."""
    for kind, records in read_parts(source, reading):
        texts = sound_texts(records, source.column, reading)
        if kind == "text" or source.documents != "whole":
            texts = join_lines(texts, source.documents, reading)
        for text in texts:
            if text and not text.isspace():
                yield text
            else:
                reading.empty += 1
    if source.documents not in WAYS_TO_CUT and not reading.separators:
        raise DataError(f"{without_passwords(source.path) or source.name}: no line is {source.documents!r}, which is to lie "
                        f"between documents; set --documents to such a line, or to {', '.join(WAYS_TO_CUT)}")


def join_lines(lines: Iterable[str], documents: str, reading: Reading) -> Iterator[str]:
    """Documents out of lines (of a text file, or rows that are lines, as WikiText's are on the hub).

    Args:
        documents: "whole" = one document, "line" = each line, "blank" = blank lines lie between, "wikitext" = each begins at a
            line like ` = Title = `, anything else = a line equal to it lies between.
    """
    if documents == "line":
        yield from lines
        return
    kept: list[str] = []
    for line in lines:
        between = documents == "blank" and line.isspace() or line.rstrip("\n") == documents
        reading.separators += between
        if kept and (between or documents == "wikitext" and WIKITEXT_TITLE.fullmatch(line)):
            yield "".join(kept)
            kept = []
        if not between:
            kept.append(line)
    if kept:
        yield "".join(kept)


def sound_texts(records: Iterable[tuple[str, dict]], column: str, reading: Reading) -> Iterator[str]:
    """The texts of a column; what is missing, no text, or cannot be encoded is refused."""
    for where, record in records:
        if column not in record:
            reading.refuse(where, f"has no column {column!r}; it has {name_some(record)} (--column)")
        elif flaw := flaw_of(record[column]):
            reading.refuse(where, f"column {column!r} {flaw}")
        else:
            yield record[column]


def name_some(record: Mapping[str, Any]) -> str:
    """A record's columns, of many the first."""
    names = [repr(name) for name in islice(record, NAMED_COLUMNS)] or ["none"]
    return ", ".join(names) + (f" and {len(record) - len(names):,} more" if len(record) > NAMED_COLUMNS else "")


def flaw_of(text: Any) -> str | None:
    """Why a value is no text that can be encoded; None where it is one."""
    if not isinstance(text, str):
        return f"is {'null' if text is None else type(text).__name__}, expected text"
    if "\0" in text:
        return f"holds a NUL at character {text.index(chr(0)) + 1}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds a lone surrogate at character {error.start + 1}"
    return None
