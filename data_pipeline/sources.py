"""Read the records of a source: of files, local or behind a URL, or of a dataset on the Hugging Face hub.

Records are streamed as (where, record), where `where` is the file and line (or row) for error messages. A
`Reading` has the policy for unusable records, and counts what was read.
"""

import bz2
import csv
import glob
import gzip
import io
import json
import logging
import lzma
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

from common import remote
from common.errors import DataError, SettingsError, requires_package
from common.files import advice_on_encoding, check_start
from common.text import counted, without_passwords
from data_pipeline import remote_data, source_files
from data_pipeline.source_files import TABLES, UNDECODED, Source, StoredFile, list_files, reading_errors

STREAMS = {"bz2": bz2.BZ2Decompressor, "xz": partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)}
LISTED_BAD_RECORDS, SHOWN_BAD_RECORDS, SHOWN_COLUMNS = 1000, 20, 20
MAX_LINE_BYTES, MAX_ARRAY_BYTES = 1 << 30, 1 << 33  # in memory; compressed files may unpack to much more
START_BYTES = 8192  # read first, to distinguish JSON lines from an array, and text from other encodings
LARGEST_COLUMN = 2**30  # bytes of a column whose values repeat
TABLE_ROWS = 1000  # read from a table at once
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream, whose messages all begin with its first half
VARIABLE = re.compile(r"\d+|'[^']* [^']*'")  # differs in the reasons of bad records of one kind
INVISIBLE = re.compile(  # soft hyphens, joiners, marks of direction or byte order, variation selectors
    "[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
COMMIT = re.compile(r"[0-9a-f]{40}")
TYPE_NAMES = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text",
              list: "a list", dict: "an object"}
WIKITEXT_TITLE = re.compile(r" = [^=].* = \s*")


def identity_of(text: str) -> str:
    """Return what all writings of a text have in common, as Unicode's NFKC_Casefold, with single spaces.

    White space, letter case, Unicode forms and what nobody sees do not count: tokenizers and chat formats
    remove them.
    """
    visible = text if text.isascii() else INVISIBLE.sub("", text)
    return " ".join(unicodedata.normalize("NFKC", visible).casefold().split())


class Document(NamedTuple):
    """A text and where it starts."""

    where: str
    text: str
    split: str = ""  # "" = by a hash of the text

    @property
    def characters(self) -> int:
        return len(self.text)

    @property
    def split_key(self) -> str:
        """The text whose hash determines the split."""
        return identity_of(self.text)


class Position(NamedTuple):
    """Where a record of a source's files begins."""

    file: int = 0
    record: int = 0  # records, or lines, before it in the file
    offset: int = 0  # bytes before it in a file of lines that is not compressed
    state: dict | None = None  # of a table or dataset of the hub, before the rows around it


@dataclass
class Reading:
    """The state of reading a source: the policy for unusable records, and counts so far."""

    skip_bad: bool = False
    advice: str = "correct the data, or skip such records: --on-bad-record skip"
    failed: bool = False  # a record was refused: read to the end of the file, for all of its bad records
    refused: int = 0  # bad records that were read here; others are from a journal
    bad: int = 0
    bad_records: list[str] = field(default_factory=list)  # the first LISTED_BAD_RECORDS
    bad_kinds: dict[str, Sequence] = field(default_factory=dict)  # number, the first, where the second is
    empty: int = 0
    separators: int = 0  # lines that separated documents
    bytes_done: int = 0
    bytes_total: int = 0  # 0 = unknown
    dropped: Counter[str] = field(default_factory=Counter)  # number of occurrences of unused fields
    literals: Counter[str] = field(default_factory=Counter)  # items by the first control token that they name
    lost: Counter[str] = field(default_factory=Counter)  # characters that the vocabulary lacks
    reserved: int = 0  # items that are neither trained on nor validated on
    unread: Sequence[str] = ()  # columns of the current table that are not read
    start: Position = Position()  # the first record to read
    position: Position = Position()  # the record that was read last
    item: Position | None = None  # where the last item begins, if it consists of several records

    @property
    def counts(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in
                ("bad", "bad_records", "bad_kinds", "empty", "separators", "dropped", "literals", "lost",
                 "reserved")}

    def refuse(self, where: str, reason: str) -> None:
        """Count and list an unusable record; without `skip_bad`, `settle` raises DataError."""
        self.failed = not self.skip_bad
        self.refused += 1
        self.bad += 1
        if len(self.bad_records) < LISTED_BAD_RECORDS:
            self.bad_records.append(f"{where}: {reason}")
        kind = VARIABLE.sub("#", reason)
        number, first, second = self.bad_kinds.get(kind, (0, f"{where}: {reason}", ""))
        if number or len(self.bad_kinds) < LISTED_BAD_RECORDS:
            self.bad_kinds[kind] = (number + 1, first, second or (where if number else ""))

    def settle(self) -> None:
        """Raise DataError with the unusable records so far, unless they are skipped."""
        if self.bad and not self.skip_bad:
            raise DataError(*([f"{self.bad_records[0]}; {self.advice}"] if self.bad == 1 else
                              [f"{self.bad:,} bad records; {self.advice}", *self.listing()]))

    def listing(self) -> list[str]:
        """Return the unusable records if there are few, else a line for each kind."""
        lines = self.bad_records
        if self.bad > SHOWN_BAD_RECORDS and self.bad_kinds:
            lines = [first + (f" (also {second}" + f" and {number - 2:,} more" * (number > 2) + ")"
                              if number > 1 else "") for number, first, second in self.bad_kinds.values()]
        hidden = len(lines) - SHOWN_BAD_RECORDS
        return lines[:SHOWN_BAD_RECORDS] + [f"... and {hidden:,} more"] * (hidden > 0)


Records = Iterator[tuple[str, Any]]


def _read_lines(file: StoredFile, raw: Any, stream: Any, reading: Reading) -> Iterator[tuple[str, str]]:
    """Yield the lines of a UTF-8 file as (file:line, text), with line ends but without a byte-order mark."""
    before, start = reading.bytes_done, reading.position
    advice, valid = reading.advice, b""  # a line of UTF-8 that is not ASCII
    offset, last = start.offset, b""  # the byte before it
    if offset and not file.compression:
        stream.seek(offset - 1)
        last = stream.read(1)
    first = stream.readline(MAX_LINE_BYTES + 1)
    lines = chain([first] * bool(first), iter(partial(stream.readline, MAX_LINE_BYTES + 1), b""))
    if b"\r" in last + first and b"\n" not in last + first and len(first) <= MAX_LINE_BYTES:
        # This is the whole file: its lines end in CR alone.
        lines = iter(first.replace(b"\r", b"\n").splitlines(keepends=True))
    if file.compression:
        lines = islice(lines, start.record, None)
    for number, line in enumerate(lines, start.record + 1):
        where, reading.position = f"{file.url}:{number}", Position(start.file, number - 1, offset)
        offset += len(line)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{where}: the line has more than {MAX_LINE_BYTES >> 20:,} MiB; correct it, or "
                            "remove the file")
        if number % 64 == 0 or len(line) > 1 << 16:
            reading.bytes_done = before + raw.tell()
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            way = advice_on_encoding(valid + line)
            reading.advice = f"{advice}; {way}" if way else advice
            reading.refuse(where, f"byte {error.start + 1} of the line is not UTF-8")
            continue
        if not (valid or line.isascii()):
            valid, reading.advice = line, advice
        yield where, text


class Unpacked(io.RawIOBase):
    """The content of a .bz2 or .xz file of one or more streams.

    The readers of the standard library ignore all that follows a stream and does not begin another.
    """

    def __init__(self, raw: Any, start: Callable[[], Any]):
        self.raw, self.start, self.stream = raw, start, start()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            packed = b""
            if self.stream.eof:  # zeros may follow
                blocks = chain([self.stream.unused_data], iter(partial(self.raw.read, 1 << 16), b""))
                packed = next(filter(None, (block.lstrip(b"\0") for block in blocks)), b"")
                if not packed:
                    return 0
                self.stream = self.start()
            elif self.stream.needs_input and not (packed := self.raw.read(1 << 16)):
                raise EOFError("the file ends within its compressed content")
            data = self.stream.decompress(packed, len(buffer))
        buffer[:len(data)] = data
        return len(data)


def is_json_object(line: bytes) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(line), dict)
    return False


def _read_file(file: StoredFile, columns: Sequence[str], reading: Reading) -> Records:
    """Yield the lines of a text file, or the objects of JSON lines or of an array in a .json file."""
    with reading_errors(file.url), file.open() as raw:
        stream, stem = raw, file.name
        if file.compression:
            if file.compression == "zstd":  # fsspec's reader takes a file that was cut off as complete
                import pyarrow as pa
                unpacked = pa.CompressedInputStream(raw, "zstd")
            elif file.compression == "gzip":
                unpacked = gzip.GzipFile(fileobj=raw)
            else:
                unpacked = Unpacked(raw, STREAMS[file.compression])
            stream = io.BufferedReader(unpacked, 1 << 20)  # Arrow's reader has no lines
            stem = os.path.splitext(file.name)[0]
        start = stream.peek(START_BYTES)
        check_start(file.url, start, is_text=True, by_suffix=True)
        if file.format == "text":
            if not reading.position.record:  # --on-bad-record skip must not accept a binary file
                first = start.removesuffix(b"\n").split(b"\n")
                first = first[:-1] if len(first) > 1 and len(start) >= START_BYTES else first  # perhaps cut
                bad = [line for line in first if flaw_of(line.decode("utf-8", "surrogateescape"))]
                if 2 * len(bad) > len(first):
                    sample = b"".join(bad)
                    way = "" if b"\0" in sample else advice_on_encoding(sample)
                    raise DataError(f"{file.url}: is not UTF-8 text: {len(bad)} of its first {len(first)} "
                                    "lines have NULs or bytes that are not UTF-8; remove the "
                                    f"file{way and f', or {way}'}")
                if stem.lower().endswith((".txt", ".text")) and all(map(is_json_object, first)):
                    raise DataError(f"{file.url}: its first lines are JSON objects; rename it to .jsonl, or "
                                    "to .raw to train on the JSON itself")
            column = columns[0] if columns else ""
            for where, line in _read_lines(file, raw, stream, reading):
                yield where, {column: line[:-2] + "\n" if line.endswith("\r\n") else line}
            return
        if file.format == "csv":
            yield from _read_csv(file, raw, stream, reading)
            return
        is_array = stem.lower().endswith(".json") and start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
        values = _read_array if is_array else _read_json_lines
        for where, record in values(file, raw, stream, reading):
            if isinstance(record, list) and record and all(
                    isinstance(each, dict) and {"role", "content"} <= each.keys() for each in record):
                record = {"messages": record}  # nanochat's
            if isinstance(record, dict):
                yield where, record
            else:
                expected = "an object as each item" if is_array else "one JSON object per line"
                reading.refuse(where, f"expected {expected}, got {type_name(record)}"
                               + " (an array of records belongs in a .json file)"
                               * (isinstance(record, list) and not is_array))


def _read_csv(file: StoredFile, raw: Any, stream: Any, reading: Reading) -> Records:
    """Yield the rows of a file whose first row names the columns. Values are text; empty ones are null."""
    before, start, advice, line = reading.bytes_done, reading.position, reading.advice, 0
    csv.field_size_limit(MAX_LINE_BYTES)
    with io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as text:
        first = text.readline()
        # Spreadsheets write semicolons where the comma is decimal.
        is_tsv, names = ".tsv" in os.path.basename(file.name), re.sub('"[^"]*"', "", first)
        mark = "\t" if is_tsv else max(",\t;", key=names.count)
        rows = csv.reader(chain([first], text), delimiter=mark, strict=True)
        try:
            columns = next(rows, [])
            if len({*columns}) < len(columns):
                raise DataError(f"{file.url}:1: two columns have one name: {columns!r:.80}; rename one")
            line = rows.line_num
            for number, values in enumerate(rows):
                where, line = f"{file.url}:{line + 1}", rows.line_num
                if number % 64 == 0:
                    reading.bytes_done = before + raw.tell()
                if number < start.record or not values:
                    continue
                reading.position = Position(start.file, number)
                if bad := next(filter(UNDECODED.search, values), None):
                    way = advice_on_encoding(bad.encode("utf-8", "surrogateescape"))
                    reading.advice = f"{advice}; {way}" if way else advice
                    reading.refuse(where, "has bytes that are not UTF-8")
                elif len(values) != len(columns):
                    reading.refuse(where, f"has {counted(len(values), 'value')} for {len(columns)} columns; "
                                   f"values with {mark!r} or line ends must be in quotes, without a blank "
                                   "before the quote")
                else:
                    yield where, {name: value or None for name, value in zip(columns, values)}
        except csv.Error as error:
            place = f" in line {rows.line_num}" * (rows.line_num > line + 1)
            raise DataError(f"{file.url}:{line + 1}: this row is not valid CSV: {error}{place}; "
                            "correct it") from error


def _read_json_lines(file: StoredFile, raw: Any, stream: Any, reading: Reading) -> Records:
    for where, line in _read_lines(file, raw, stream, reading):
        if not line.strip():
            continue
        try:
            yield where, json.loads(line, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            hint, is_syntax = "", isinstance(error, json.JSONDecodeError)
            if is_syntax and where == f"{file.url}:1" and line.lstrip()[:1] in ("{", "["):
                hint = (". Each line must be a record; a .json file can also be an array of records, but not "
                        "inside an object")
            reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}" if is_syntax else error
            reading.refuse(where, f"not valid JSON: {reason}{hint}")


def _read_array(file: StoredFile, raw: Any, stream: Any, reading: Reading) -> Records:
    """Yield the items of a JSON array file, whose text is read into memory."""
    content, start = stream.read(MAX_ARRAY_BYTES + 1), reading.position
    if len(content) > MAX_ARRAY_BYTES:
        raise DataError(f"{file.url}: the array has more than {MAX_ARRAY_BYTES >> 20:,} MiB; write its items "
                        "as JSON lines")
    # Invalid UTF-8 becomes a lone surrogate, so that only its record is rejected.
    text = content.decode("utf-8-sig", "surrogateescape")
    if UNDECODED.search(text) and (way := advice_on_encoding(content)):
        reading.advice = f"{reading.advice}; {way}"
    line, at, number, fault = 1, 0, 0, "expected , or ]"
    decoder = json.JSONDecoder(object_pairs_hook=unique)
    try:
        # Each item follows a bracket or a comma.
        while border := re.compile(r"\s*,\s*" if number else r"\s*\[\s*").match(text, at):
            line, at = line + text.count("\n", at, border.end()), border.end()
            if text[at:at + 1] == "]" and not number:
                break
            item, end = decoder.raw_decode(text, at)
            number += 1
            if number > start.record:
                reading.position = Position(start.file, number - 1)
                yield f"{file.url}:{line} (item {number})", item
            line, at = line + text.count("\n", at, end), end
    except (ValueError, RecursionError) as error:  # also an endless number; nested too deeply
        is_syntax = isinstance(error, json.JSONDecodeError)
        line += text.count("\n", at, error.pos) if is_syntax else 0
        fault = error.msg if is_syntax else error
    if fault != "expected , or ]" or text[at:].strip() != "]":
        raise DataError(f"{file.url}:{line}: not valid JSON: {fault}; correct it, or remove the file")


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON text; a name that occurs twice would hide its first value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        [(name, count)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has {name!r:.40} {count} times; keep one")
    return values


def _import_datasets(source: str) -> Any:
    with requires_package("datasets", source):
        import datasets
    datasets.config.TORCH_AVAILABLE = False  # streams would import it for its DataLoader: 3 s and 200 MB
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # it logs what it raises
    return datasets


VALIDATION_SPLITS = ("validation", "valid", "val", "dev")  # on the hub; `datasets` maps a folder's names


def validation_split(source: Source) -> Source:
    """Return the validation split of a source if it has one, else the source as given."""
    if source.split is not None:
        return source
    if not source.name:
        with suppress(DataError, SettingsError):
            list_files(held_out := replace(source, split="validation"))
            return held_out
        return source
    datasets = _import_datasets(f"{source.name}, a dataset of the hub,")
    copy = remote_data.cached_dataset(source.name, source.config, source.revision)
    with reading_errors(source.name):
        if copy and (info := copy / "dataset_info.json").is_file():  # Arrow files of a whole config
            splits = json.loads(info.read_text(encoding="utf-8")).get("splits") or {}
        else:
            splits = remote.retry(source.name, lambda: datasets.get_dataset_split_names(
                str(copy or source.name), source.config or None, revision=source.revision or None))
    split = next((name for name in VALIDATION_SPLITS if name in splits), None)
    remote_data.say_once(f"{source.name}: for validation, its {split} split is read" if split else
                         f"{source.name} has no validation split; for validation, its train split is read")
    return replace(source, split=split)


def _read_table(file: StoredFile, columns: Sequence[str], reading: Reading) -> Records:
    datasets = _import_datasets(f"{file.url}, a table,")
    with reading_errors(file.url), file.open() as raw:
        check_start(file.url, start := raw.peek(START_BYTES))
        if is_stream := start.startswith(ARROW_END[:4]):
            raw.seek(-len(ARROW_END), os.SEEK_END)
            if raw.read() != ARROW_END:
                remote_data.say_once(f"{file.url}: has no end mark; if its writer was stopped between two "
                                     "batches, rows are missing: compare their number")
            raw.seek(0)
        name = glob.escape(file.name) if file.is_local else f"/dev/fd/{raw.fileno()}"  # of a downloaded file
        options = {"batch_size": _rows_at_once(file, raw)} if file.format == "parquet" else {}
        try:
            rows = datasets.load_dataset(file.format, data_files=[name], split="train", streaming=True,
                                         **options)
        except ValueError:
            _check_types(file, raw, is_stream)
            raise
        yield from _read_rows(rows, columns, f"{file.url}:", reading)


def _rows_at_once(file: StoredFile, raw: Any) -> int:
    """Return how many rows of a Parquet file fit into memory; DataError if a column unpacks to gigabytes."""
    from pyarrow.parquet import read_metadata

    table = read_metadata(raw)
    columns = [table.row_group(group).column(number)
               for group in range(table.num_row_groups) for number in range(table.num_columns)]
    # Text shrinks to a tenth or so; more of it repeats one value, which each row may have.
    largest = max((column.total_uncompressed_size for column in columns
                   if column.total_uncompressed_size > 100 * column.total_compressed_size), default=1)
    if largest > LARGEST_COLUMN:
        raise DataError(f"{file.url}: a column unpacks into {largest:,} bytes, more than a hundred times its "
                        "size in the file; check where the file is from, and write smaller row groups")
    return max(1, min(TABLE_ROWS, LARGEST_COLUMN // 4 // largest))


def _check_types(file: StoredFile, raw: Any, is_stream: bool) -> None:
    """Raise DataError for a column of a table with a type that `datasets` cannot read, such as a map."""
    import pyarrow as pa
    from datasets import Features
    from pyarrow.parquet import read_schema

    raw.seek(0)
    open_arrow = pa.ipc.open_stream if is_stream else pa.ipc.open_file
    for column in read_schema(raw) if file.format == "parquet" else open_arrow(raw).schema:
        try:
            Features.from_arrow_schema(pa.schema([column]))
        except ValueError as error:
            raise DataError(f"{file.url}: column {column.name!r} has the type {column.type}, which `datasets`"
                            " cannot read; drop the column, or write its values as JSON text") from error


def _read_rows(rows: Any, columns: Sequence[str], name: str, reading: Reading) -> Records:
    """Yield the rows of an `IterableDataset`, with these columns if it has them, else with all."""
    start, done = reading.position, 0
    if columns and rows.column_names and {*columns} <= {*rows.column_names}:
        reading.unread = [column for column in rows.column_names if column not in columns]
        rows = rows.select_columns(list(columns))
    if state := start.state:  # of the selected columns: `select_columns` would forget it
        rows.load_state_dict(state["dataset"])
        done = state["rows"]
    correct = {field.name: _without_added_nulls(field.type)
               for field in (rows.features.arrow_schema if rows.features else ())}
    try:
        for record in rows:
            done += 1
            if done > start.record:
                # Without types, all structs lose their nulls.
                record = {column: (correct.get(column, _without_nulls) or (lambda value: value))(value)
                          for column, value in record.items()}
                reading.position = Position(start.file, done - 1, state=state)
                yield f"{name} row {done}", record
            if done % TABLE_ROWS == 0:
                state = {"rows": done, "dataset": rows.state_dict()}
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date before year 1, ...
        raise DataError(f"{name} row {done + 1}: {remote.first_line(error)}; correct the table, or drop the "
                        "column") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _without_added_nulls(arrow_type: Any) -> Callable[[Any], Any] | None:
    """Return a function that removes the nulls with which Arrow gives the structs of a column the same keys.

    None if the type has no structs. Values of the type Json of `datasets` keep their nulls.
    """
    import pyarrow as pa

    if pa.types.is_struct(arrow_type):
        fields = {arrow_type.field(index).name: _without_added_nulls(arrow_type.field(index).type)
                  for index in range(arrow_type.num_fields)}
        return lambda value: value and {
            name: fields[name](each) if fields[name] else each
            for name, each in value.items() if each is not None}
    change = _without_added_nulls(arrow_type.value_type) if hasattr(arrow_type, "value_type") else None
    return change and (lambda value: [*map(change, value)] if isinstance(value, list) else change(value))


def columns_of(record: Mapping[str, Any]) -> str:
    """Return the names of a record's columns, for an error message."""
    if [*record] == [""]:
        return "a line of plain text"
    names = [f"{name!r:.40}" + (" (null)" if value is None else "")
             for name, value in islice(record.items(), SHOWN_COLUMNS)]
    more = f" and {len(record) - SHOWN_COLUMNS:,} more" if len(record) > SHOWN_COLUMNS else ""
    return ", ".join(names) + more or "no columns"


def contents_of(record: Mapping[str, Any]) -> str:
    """Return `columns_of`, with a hint if the records seem to be in a list inside this one."""
    lists = [name for name, value in record.items()
             if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
             and not {"role", "from"} & value[0].keys()]
    hint = f" (if {lists[0]!r:.40} is the list of records, write only it into a .json file)" if lists else ""
    return columns_of(record) + hint


def texts_in(value: Any) -> list[str]:
    """Return all texts in a JSON value, in order, without the names of fields."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for each in inner for text in texts_in(each)]


def type_name(value: Any) -> str:
    return TYPE_NAMES.get(type(value), type(value).__name__)


def flaw_of(text: Any) -> str | None:
    """Return why a value is not valid text, or None if it is."""
    if not isinstance(text, str):
        return f"is {type_name(text)}, expected text"
    if "\0" in text:
        return f"contains a NUL at character {text.index(chr(0)) + 1}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = "a byte that is not UTF-8" if UNDECODED.match(text[error.start]) else "a lone surrogate"
        return f"contains {what} at character {error.start + 1}"
    return None


def read_records(source: Source, reading: Reading) -> Records:
    """Yield all records of a source as (where, record), in a fixed order. A line of text is a record."""
    for _, records in _read_files(source, reading):
        yield from records


def read_file(path: str, reading: Reading) -> Records:
    """Yield all records of a local file as (where, record)."""
    format, compression = source_files.format_of(path)
    if format is None:
        raise DataError(f"{path}: no file of a supported format; use {source_files.READABLE}")
    file = StoredFile(None, os.path.abspath(path), os.path.getsize(path), format, compression)
    yield from (_read_table if format in TABLES else _read_file)(file, [], reading)
    reading.settle()


def _read_files(source: Source, reading: Reading) -> Iterator[tuple[str, Records]]:
    """Yield (format, records) for each file of a source, or once for a hub dataset."""
    renamed = source.renamed
    # Only text has a column. Of its tables, no others are read.
    column = renamed.get(source.text_column, source.text_column)
    columns = [*dict.fromkeys([column, *renamed.values()])] if column else []
    if source.name:
        reading.position = reading.start
        yield "hub", _rename_columns(_read_hub(source, columns, reading), renamed, reading)
        return reading.settle()
    files = list_files(source)
    reading.bytes_total = sum(file.size for file in files)
    for number, file in enumerate(files):
        before = reading.bytes_done
        if number >= reading.start.file:
            reading.unread = ()
            reading.position = reading.start if number == reading.start.file else Position(number)
            read = _read_table if file.format in TABLES else _read_file
            yield file.format, _rename_columns(read(file, columns, reading), renamed, reading)
        reading.bytes_done = before + file.size
        if reading.failed:
            break
    reading.settle()


def _rename_columns(records: Records, renamed: Mapping[str, str], reading: Reading) -> Records:
    """Yield the records with the columns of --map under their new names, in place of any of these names."""
    for where, record in records:
        if not renamed:
            yield where, record
        elif missing := [old for old in renamed.values() if old not in record]:
            reading.refuse(where, f"has no column {missing[0]!r}; it has {columns_of(record)} (--map)")
        else:
            others = {name: value for name, value in record.items() if name not in renamed.values()}
            reading.dropped.update(name for name in others if name in renamed and others[name] is not None)
            yield where, {**others, **{new: record[old] for new, old in renamed.items()}}


def _read_hub(source: Source, columns: Sequence[str], reading: Reading) -> Records:
    """Stream the rows of a hub dataset at a fixed commit, from a local copy if there is one."""
    datasets = _import_datasets(f"{source.name}, a dataset of the hub,")
    revision, split = source.revision, source.split or "train"
    if not COMMIT.fullmatch(revision):
        revision = remote_data.hub_revision(source.name, revision, source.config)
    copy = remote_data.cached_dataset(source.name, source.config, revision)
    path, config, files = str(copy or source.name), source.config or None, source.files
    with reading_errors(f"{source.name} ({source.config or 'default'}, {split})"):
        if copy and (copy / "dataset_info.json").is_file():  # Arrow files of a whole config
            path = source.name
            if not files:
                path, config = "arrow", None
                files = [glob.escape(str(file)) for file in sorted(copy.glob("*.arrow"))
                         if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$", file.name)]
                if not files:
                    raise DataError(f"{copy}, a local copy of {source.name}, has no split {split!r}; choose "
                                    "another --split")
        # datasets and the hub's client retry requests for rows.
        rows = remote.retry(source.name, lambda: datasets.load_dataset(
            path, config, split=split, streaming=True, revision=revision or None if path != "arrow" else None,
            data_files={split: files} if files else None))
        yield from _read_rows(rows, columns, f"{source.name}[{split}]", reading)


def read_texts(source: Source, reading: Reading) -> Iterator[Document]:
    """Yield the non-empty documents of a source: the valid texts of its column, split into documents."""
    for format, records in _read_files(source, reading):
        has_lines = format == "text" or source.splitter != "whole"
        for document in _documents(records, source, has_lines and source.splitter != "line", reading):
            if document.text and not document.text.isspace():
                yield document
            else:
                reading.empty += 1
    if source.splitter not in source_files.SPLITTERS and not reading.separators:
        raise DataError(f"{without_passwords(source.path) or source.name}: no line equals "
                        f"{source.splitter!r}, the document separator; set --documents to a line that "
                        f"occurs, or to {', '.join(source_files.SPLITTERS)}")


def _documents(records: Records, source: Source, join: bool, reading: Reading) -> Iterator[Document]:
    """Yield the valid texts of a source's column, or if `join`, documents made of them as lines.

    Documents are whole files, are separated by blank lines or by the line in `source.splitter`, or start at
    a line like ` = Title = ` (wikitext). A document with an unusable line is left out as a whole.
    """
    column, begin, position, lines, reading.item = source.text_column, "", reading.position, [], None
    refused = reading.refused

    def end() -> Iterator[Document]:
        nonlocal lines, refused
        if lines and reading.refused == refused:
            reading.item = position
            yield Document(begin, "".join(lines))
        elif lines and reading.skip_bad:
            reading.refuse(begin, "the document that begins here is left out, because a line of it is bad")
        lines, refused = [], reading.refused

    for where, record in records:
        if column not in record:
            reading.refuse(where, f"has no column {column!r}; it has {contents_of(record)} (--column)")
            continue
        text = record[column]
        if len(record) > 1 or reading.unread:
            reading.dropped.update([*(name for name in record if name != column and record[name] is not None),
                          *reading.unread])
        if flaw := flaw_of(text):
            reading.refuse(where, f"column {column!r} {flaw}")
            continue
        if not join:
            yield Document(where, text)
            continue
        is_separator = source.splitter == "blank" and text.isspace() or text.rstrip("\n") == source.splitter
        reading.separators += is_separator
        if is_separator or source.splitter == "wikitext" and WIKITEXT_TITLE.fullmatch(text):
            yield from end()
        if not is_separator:
            begin, position = (begin, position) if lines else (where, reading.position)
            lines.append(text)
    yield from end()
