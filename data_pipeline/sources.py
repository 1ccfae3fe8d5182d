"""Sources of records: files of any kind and place, and datasets of the Hugging Face hub.

Records are streamed as (where, record); `where` is the file and line (or row) that error messages name.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import exists
from typing import Any, NamedTuple

from common.errors import DataError, SettingsError, requires_package
from common.remote import HUB_NAME, cached_dataset, hub_revision, retry
from common.text import without_passwords
from data_pipeline.readers import (
    READERS,
    Reading,
    columns_of,
    contents_of,
    flaw_of,
    kind_of,
    list_files,
    reading_errors,
)

COMMIT = re.compile(r"[0-9a-f]{40}")
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
    map: str = ""  # "prompt=problem,completion=solution": other names for columns; then only these are read
    documents: str = "whole"  # how text is split into documents: one of SPLITTERS, or a separator line

    @property
    def renamed(self) -> dict[str, str]:
        """The columns that `map` names: {name that we expect: name in the data}.

        Raises:
            SettingsError: `map` is malformed.
        """
        pairs = [pair.partition("=") for pair in self.map.split(",")] if self.map else []
        columns = {new.strip(): (old if equals else new).strip() for new, equals, old in pairs}
        is_whole = len(columns) == len(pairs) and all([*columns, *columns.values()])
        if pairs and ("=" not in self.map or not is_whole):
            raise SettingsError(f"--map {self.map}: expected name=column, separated by commas, "
                                "each name once, such as prompt=problem,completion=solution")
        return columns


class Document(NamedTuple):
    """A text, and where it begins."""

    where: str
    text: str


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
    is_hub_name = HUB_NAME.fullmatch(text) and not exists(text) and not kind_of(text)[0]
    return Source(name=text, **fields) if is_hub_name else Source(path=text, **fields)


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
    if source.renamed:
        how["map"] = source.renamed
    if source.name:
        return {"name": source.name, "config": source.config, "split": source.split, "files": source.files,
                "revision": hub_revision(source.name, source.revision, source.config), **how}
    files = []
    for file in list_files(source.path, source.split):
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
    renamed = source.renamed
    columns = [*renamed.values()] or [source.column] * bool(source.column)
    if source.name:
        yield "hub", _rename_columns(read_hub(source, columns, reading), renamed, reading)
        return
    files = list_files(source.path, source.split)
    reading.bytes_total = sum(file.size for file in files)
    for file in files:
        before = reading.bytes_done
        yield file.kind, _rename_columns(READERS[file.kind](file, columns, reading), renamed, reading)
        reading.bytes_done = before + file.size


def _rename_columns(records: Iterator[tuple[str, dict]], renamed: Mapping[str, str],
                    reading: Reading) -> Iterator[tuple[str, dict]]:
    """Yield the records with the columns of --map alone, under their new names; unchanged without it."""
    if not renamed:
        yield from records
        return
    for where, record in records:
        if missing := [old for old in renamed.values() if old not in record]:
            reading.refuse(where, f"has no column {missing[0]!r}; it has {columns_of(record)} (--map)")
        else:
            yield where, {new: record[old] for new, old in renamed.items()}


def read_hub(source: Source, columns: Sequence[str], reading: Reading) -> Iterator[tuple[str, dict]]:
    """Stream the rows of a dataset on the hub at one fixed commit, from a local copy if there is one."""
    with requires_package("datasets", f"{source.name}, a dataset of the hub,"):
        import datasets
    revision = source.revision
    if not COMMIT.fullmatch(revision):
        revision = hub_revision(source.name, revision, source.config)
    copy = cached_dataset(source.name, source.config, revision)
    if copy and (copy / "dataset_info.json").is_file():  # Arrow files of all files of the config
        if not source.files:
            for file in list_files(str(copy), source.split):
                yield from READERS[file.kind](file, columns, reading)
            return
        copy = None
    with reading_errors(f"{source.name} ({source.config or 'default'}, {source.split})"):
        # Requests for the rows are retried by datasets and the hub's client.
        rows = retry(source.name, lambda: datasets.load_dataset(
            str(copy or source.name), source.config or None, split=source.split, streaming=True,
            revision=revision or None, data_files={source.split: source.files} if source.files else None))
        for number, record in enumerate(rows, 1):
            yield f"{source.name}[{source.split}] row {number}", record


def read_texts(source: Source, reading: Reading) -> Iterator[Document]:
    """Yield the documents of a source: the valid texts of its column, split into documents; none is empty."""
    for kind, records in _read_parts(source, reading):
        documents = _valid_texts(records, source.column, reading)
        if kind == "text" or source.documents != "whole":
            documents = _join_lines(documents, source.documents, reading)
        for document in documents:
            if document.text and not document.text.isspace():
                yield document
            else:
                reading.empty += 1
    if source.documents not in SPLITTERS and not reading.separators:
        raise DataError(f"{without_passwords(source.path) or source.name}: no line is {source.documents!r}, "
                        "the separator of its documents; set --documents to a line that is there, or to "
                        f"{', '.join(SPLITTERS)}")


def _join_lines(lines: Iterable[Document], documents: str, reading: Reading) -> Iterator[Document]:
    """Join lines (of a text file, or rows that are lines, as WikiText's on the hub) to documents.

    Args:
        documents: "whole" = one document, "line" = each line, "blank" = separated by blank lines,
            "wikitext" = each begins at a line like ` = Title = `, anything else = separated by such lines.
    """
    if documents == "line":
        yield from lines
        return
    begin, kept = "", []
    for where, line in lines:
        is_separator = documents == "blank" and line.isspace() or line.rstrip("\n") == documents
        reading.separators += is_separator
        if kept and (is_separator or documents == "wikitext" and WIKITEXT_TITLE.fullmatch(line)):
            yield Document(begin, "".join(kept))
            kept = []
        if not is_separator:
            begin = begin if kept else where
            kept.append(line)
    if kept:
        yield Document(begin, "".join(kept))


def _valid_texts(records: Iterable[tuple[str, dict]], column: str, reading: Reading) -> Iterator[Document]:
    """Yield the texts of a column; refuse records where it is missing, not text, or cannot be encoded."""
    for where, record in records:
        if column not in record:
            reading.refuse(where, f"has no column {column!r}; it has {contents_of(record)} (--column)")
        elif flaw := flaw_of(record[column]):
            reading.refuse(where, f"column {column!r} {flaw}")
        else:
            yield Document(where, record[column])
