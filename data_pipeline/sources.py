"""Sources of records: files of any kind and place, and datasets of the Hugging Face hub.

Records are streamed as (where, record); `where` is the file and line (or row) that error messages name. Every
reader gets a `Reading`, which decides what happens to unusable records and counts what has been read.
"""

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

from common.errors import DataError, PaddockError, SettingsError, requires_package
from common.files import sha256
from common.remote import HUB_NAME, downloaded, file_system, first_line, hub_revision, is_transient, retry
from common.text import without_passwords

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet",
         ".txt": "text", ".text": "text", ".raw": "text", ".tokens": "text"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
READABLE = f"{' '.join(KINDS)}, each also as {' '.join(COMPRESSIONS)}"
LISTED_BAD_RECORDS, LISTED_COLUMNS = 1000, 20
COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_LINE_BYTES = 1 << 30  # a line is held in memory, and compressed files can unpack to far more
SNIFF_BYTES = 8192  # of a file's beginning, to see whether it is text
SPLITTERS = ("whole", "line", "blank", "wikitext")  # of text into documents; else a separator line
WIKITEXT_TITLE = re.compile(r" = [^=].* = \s*")


@dataclass(frozen=True)
class Source:
    """One source of records: files (`path`) or a dataset on the hub (`name`)."""

    path: str = ""  # a file, folder or glob, on any URL that fsspec knows
    name: str = ""
    config: str = ""
    split: str = "train"
    revision: str = ""
    files: str = ""  # a pattern of the hub repository's files, where it has no config for them
    column: str = "text"
    documents: str = "whole"  # how text is split into documents: one of SPLITTERS, or a separator line


SHORTCUTS = {
    "fineweb-edu": Source(name="HuggingFaceFW/fineweb-edu", config="sample-10BT"),
    "c4": Source(name="allenai/c4", files="en/c4-train.*.json.gz"),
    "wikitext": Source(name="Salesforce/wikitext", config="wikitext-103-raw-v1", documents="wikitext"),
}


def source_of(text: str, shortcuts: Mapping[str, Source] = SHORTCUTS, **fields: str) -> Source:
    """Return the source that a shortcut, a path, a URL, a glob, or the name of a dataset on the hub means.

    Raises:
        SettingsError: the text is empty.
    """
    if not text:
        raise SettingsError("a source is empty; give a file, folder or glob, or the name of a hub dataset")
    if text in shortcuts:
        return replace(shortcuts[text], **fields)
    is_hub_name = HUB_NAME.fullmatch(text) and not os.path.exists(text) and not kind_of(text)[0]
    return Source(name=text, **fields) if is_hub_name else Source(path=text, **fields)


@dataclass
class Reading:
    """The state of reading one source: its policy for unusable records, and what was counted so far."""

    skip_bad: bool = False
    advice: str = "correct it, or skip such records: --on-bad-record skip"
    bad: int = 0
    bad_records: list[str] = field(default_factory=list)  # the first LISTED_BAD_RECORDS
    empty: int = 0
    separators: int = 0  # lines that separated documents
    bytes_done: int = 0
    bytes_total: int = 0  # 0 if it is not known

    @property
    def fraction(self) -> float | None:
        """The fraction of the source that has been read, or None if its size is not known."""
        return self.bytes_done / self.bytes_total if self.bytes_total else None

    def refuse(self, where: str, reason: str) -> None:
        """Count and list a record that cannot be used.

        Raises:
            DataError: bad records are not to be skipped.
        """
        if not self.skip_bad:
            raise DataError(f"{where}: {reason}; {self.advice}")
        self.bad += 1
        if len(self.bad_records) < LISTED_BAD_RECORDS:
            self.bad_records.append(f"{where}: {reason}")


@contextmanager
def reading_errors(name: str) -> Iterator[None]:
    """Turn any error of a storage or format library in the `with` block into a DataError about `name`."""
    try:
        yield
    except PaddockError:
        raise
    except Exception as error:  # those of fsspec, arrow, zlib and the hub's client have no common base class
        raise DataError(f"{name}: {first_line(error)}; check that it exists, whole and readable") from error


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
        """The name for messages, without a password."""
        return self.name if self.is_local else without_passwords(self.fs.unstrip_protocol(self.name))

    def open(self) -> Any:
        """Return a context manager that gives the file's bytes; a remote file is downloaded first."""
        return open(self.name, "rb") if self.is_local else downloaded(self.fs, self.name)

    def stamp(self) -> list:
        """Return values that change when the content does, without reading the content."""
        if not self.is_local:
            return [self.fs.ukey(self.name)]
        stat = os.stat(self.name)
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]

    def content_hash(self, known: dict[str, list], advance: Callable[[int], Any]) -> str:
        """Return a local file's SHA-256, from `known` ({name: [stamp, hash]}) if its stamp is the same."""
        stamp = self.stamp()
        if known.get(self.name, [None])[0] != stamp:
            with self.open() as file:
                known[self.name] = [stamp, sha256(file, advance)]
        return known[self.name][1]


def kind_of(name: str) -> tuple[str | None, str | None]:
    """Return (kind, compression) by a file's suffixes; the kind is None if it cannot be read."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    return KINDS.get(suffix), compression


def list_files(path: str) -> list[StoredFile]:
    """Return the readable files of a path, folder, glob or URL, sorted by name.

    Raises:
        DataError: there are none, or the place cannot be reached.
    """
    with reading_errors(path):
        files = retry(path, lambda: _find_files(path))
    if not files:
        raise DataError(f"{path}: no such file or folder, or nothing that matches; check the path")
    readable = [file for file in files if file.kind]
    if not readable:
        raise DataError(f"{path}: no file of a kind that can be read; give {READABLE}")
    for file in readable:
        if flaw_of(file.name):  # JSON files could not hold its name
            raise DataError(f"{file.url}: the file's name is not UTF-8; rename it")
    return readable


def _find_files(path: str) -> list[StoredFile]:
    fs, root = file_system(path)
    try:
        found = fs.info(root)["type"]
    except FileNotFoundError as error:  # fsspec raises it also for a server that does not answer
        if is_transient(error):
            raise
        found = None
    if found == "directory" or (found is None and fs.isdir(root)):  # some stores have no entry for a folder
        names = [name for name, info in sorted(fs.find(root, detail=True).items())
                 if info["type"] == "file" and not os.path.basename(name).startswith((".", "_"))]
    elif found is None:
        is_glob = any(sign in root for sign in "*?[")
        names = [name for name in sorted(fs.glob(root)) if fs.isfile(name)] if is_glob else []
    else:
        names = [root] if found == "file" else []  # opening a pipe would block
    return [StoredFile(fs, name, fs.size(name) or 0 if kind_of(name)[0] else 0, *kind_of(name))
            for name in names]


def identify(source: Source, known: dict[str, list],
             advance: Callable[[int], Any] = lambda count: None) -> dict:
    """Return all that decides a source's records as JSON values, for the key of a prepared set.

    For local files it is their content, wherever they are; for remote files what their store reports as their
    version; for a dataset on the hub its commit.

    Args:
        known: hashes of local files that are known already, as `StoredFile.content_hash` takes them.
        advance: called with the number of bytes that have just been hashed.
    """
    how = {"column": source.column, "documents": source.documents}
    if source.name:
        return {"name": source.name, "config": source.config, "split": source.split, "files": source.files,
                "revision": hub_revision(source.name, source.revision), **how}
    files = []
    for file in list_files(source.path):
        with reading_errors(file.url):
            content = file.content_hash(known, advance) if file.is_local else file.stamp()[0]
        files.append([file.kind, file.compression, file.size, content])
    return {"files": files, **how}


def read_records(source: Source, reading: Reading) -> Iterator[tuple[str, dict]]:
    """Yield every record of a source as (where, record), in a fixed order. Each line of text is one."""
    for _, records in _read_parts(source, reading):
        yield from records


def _read_parts(source: Source, reading: Reading) -> Iterator[tuple[str, Iterator[tuple[str, dict]]]]:
    """Yield (kind, records) of each file of a source; a dataset on the hub is one part."""
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
    """Yield the lines of a UTF-8 file as (file:line, text), with line ends, without a byte-order mark."""
    before = reading.bytes_done
    with reading_errors(file.url), file.open() as raw:
        # The lines as bytes, of which none can fill the memory, whatever the file unpacks to.
        lines = raw
        if file.compression:
            if file.compression not in fsspec.compression.compr:
                raise DataError(f"{file.url}: {file.compression} needs a package: pip install zstandard")
            unpacked = fsspec.compression.compr[file.compression](raw, mode="rb")
            lines = io.BufferedReader(unpacked, 1 << 20)  # zstandard's reader has no lines
        lines = iter(partial(lines.readline, MAX_LINE_BYTES + 1), b"")
        if file.kind == "text":
            lines = chain(_first_lines_of_text(file.url, lines), lines)
        # The lines as text.
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{file.url}:{number}: a line of more than {MAX_LINE_BYTES >> 20:,} MiB "
                                "cannot be a record; correct it, or leave the file out")
            if number % 64 == 0 or len(line) > 1 << 16:
                reading.bytes_done = before + raw.tell()
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                reading.refuse(f"{file.url}:{number}", f"byte {error.start + 1} of the line is not UTF-8")
                continue
            yield f"{file.url}:{number}", text


def _first_lines_of_text(url: str, lines: Iterable[bytes]) -> list[bytes]:
    """Return the first lines of a file that is mostly text; bad records are skipped only in such a file.

    Raises:
        DataError: more than half of the lines are bad: it is a binary file, or text in another encoding.
    """
    first, size = [], 0
    for line in lines:
        first.append(line)
        size += len(line)
        if size >= SNIFF_BYTES:
            break
    bad = sum(flaw_of(line.decode("utf-8", "surrogateescape")) is not None for line in first)
    if 2 * bad > len(first):
        raise DataError(f"{url}: is not UTF-8 text: {bad} of its first {len(first)} lines contain NULs or "
                        "bytes that are not UTF-8; convert it, or leave the file out")
    return first


def read_jsonl(file: StoredFile, column: str, reading: Reading) -> Iterator[tuple[str, dict]]:
    """Yield the objects of a JSON-lines file with all their columns; blank lines are skipped."""
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
    """Yield the lines of a text file; a line end becomes a newline."""
    for where, line in read_lines(file, reading):
        yield where, {column: line[:-2] + "\n" if line.endswith("\r\n") else line}


def read_parquet(file: StoredFile, column: str, reading: Reading) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a Parquet file: only the column if the file has it, else all, for the message."""
    with requires_package("pyarrow", f"{file.url}, a Parquet file,"):
        import pyarrow.parquet as pq
    before = reading.bytes_done
    with reading_errors(file.url), file.open() as raw:
        table = pq.ParquetFile(raw)
        columns = [column] if column in table.schema_arrow.names else None
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            for cells in zip(*batch.columns):
                row += 1
                try:
                    record = dict(zip(batch.schema.names, (cell.as_py() for cell in cells)))
                except UnicodeDecodeError as error:
                    reading.refuse(f"{file.url}: row {row}",
                                   f"byte {error.start + 1} of the text is not UTF-8")
                    continue
                yield f"{file.url}: row {row}", record
            reading.bytes_done = before + int(file.size * row / table.metadata.num_rows)


def read_hub(source: Source) -> Iterator[tuple[str, dict]]:
    """Stream the rows of a dataset on the hub, at one fixed commit."""
    with requires_package("datasets", f"{source.name}, a dataset of the hub,"):
        import datasets
    revision = source.revision
    if not COMMIT.fullmatch(revision):
        revision = hub_revision(source.name, revision)
    with reading_errors(f"{source.name} ({source.config or 'default'}, {source.split})"):
        # Requests for the rows are retried by datasets and the hub's client.
        rows = retry(source.name, lambda: datasets.load_dataset(
            source.name, source.config or None, split=source.split, streaming=True, revision=revision or None,
            data_files={source.split: source.files} if source.files else None))
        for number, record in enumerate(rows, 1):
            yield f"{source.name}[{source.split}] row {number}", record


def read_texts(source: Source, reading: Reading) -> Iterator[str]:
    """Yield the documents of a source: the valid texts of its column, split into documents; none is empty."""
    for kind, records in _read_parts(source, reading):
        texts = _valid_texts(records, source.column, reading)
        if kind == "text" or source.documents != "whole":
            texts = _join_lines(texts, source.documents, reading)
        for text in texts:
            if text and not text.isspace():
                yield text
            else:
                reading.empty += 1
    if source.documents not in SPLITTERS and not reading.separators:
        raise DataError(f"{without_passwords(source.path) or source.name}: no line is {source.documents!r}, "
                        "the separator of its documents; set --documents to a line that is there, or to "
                        f"{', '.join(SPLITTERS)}")


def _join_lines(lines: Iterable[str], documents: str, reading: Reading) -> Iterator[str]:
    """Join lines (of a text file, or rows that are lines, as WikiText's on the hub) to documents.

    Args:
        documents: "whole" = one document, "line" = each line, "blank" = separated by blank lines,
            "wikitext" = each begins at a line like ` = Title = `, anything else = separated by such lines.
    """
    if documents == "line":
        yield from lines
        return
    kept: list[str] = []
    for line in lines:
        is_separator = documents == "blank" and line.isspace() or line.rstrip("\n") == documents
        reading.separators += is_separator
        if kept and (is_separator or documents == "wikitext" and WIKITEXT_TITLE.fullmatch(line)):
            yield "".join(kept)
            kept = []
        if not is_separator:
            kept.append(line)
    if kept:
        yield "".join(kept)


def _valid_texts(records: Iterable[tuple[str, dict]], column: str, reading: Reading) -> Iterator[str]:
    """Yield the texts of a column; refuse records where it is missing, not text, or cannot be encoded."""
    for where, record in records:
        if column not in record:
            reading.refuse(where, f"has no column {column!r}; it has {columns_of(record)} (--column)")
        elif flaw := flaw_of(record[column]):
            reading.refuse(where, f"column {column!r} {flaw}")
        else:
            yield record[column]


def columns_of(record: Mapping[str, Any]) -> str:
    """Return the names of a record's columns, for an error message."""
    names = [f"{name!r:.40}" + (" (null)" if value is None else "")
             for name, value in islice(record.items(), LISTED_COLUMNS)]
    more = f" and {len(record) - LISTED_COLUMNS:,} more" if len(record) > LISTED_COLUMNS else ""
    return ", ".join(names) + more or "no columns"


def flaw_of(text: Any) -> str | None:
    """Return why a value is not text that can be encoded, or None if it is."""
    if not isinstance(text, str):
        return f"is {'null' if text is None else type(text).__name__}, expected text"
    if "\0" in text:
        return f"holds a NUL at character {text.index(chr(0)) + 1}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"holds a lone surrogate at character {error.start + 1}"
    return None
