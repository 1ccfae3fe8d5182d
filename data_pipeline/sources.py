"""Sources of records: files, local or behind a URL, and datasets on the Hugging Face hub.

Records are streamed as (where, record), where `where` is the file and line (or row) for error messages. A
`Reading` has the policy for unusable records, and counts what was read.
"""

import glob
import io
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import fsspec
from fsspec.utils import glob_translate

from common import remote
from common.errors import DataError, PaddockError, SettingsError, requires_package
from common.files import WrongContentError, advice_on_encoding, check_start, sha256
from common.text import counted, pip_install, without_passwords

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".arrow": "arrow",
         ".txt": "text", ".text": "text", ".raw": "text", ".tokens": "text"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
READABLE = f"{' '.join(KINDS)}, also compressed as {' '.join(COMPRESSIONS)}"
LISTED_BAD_RECORDS, SHOWN_BAD_RECORDS, LISTED_COLUMNS, LISTED_DROPPED = 1000, 20, 20, 1000
MAX_LINE_BYTES = 1 << 30  # lines are held in memory, and compressed files may unpack to much more
SNIFF_BYTES = 8192  # read first, to distinguish text from binary, and JSON lines from an array
BLOCK_CHARACTERS = 1 << 16  # read from a JSON array at once
BLANK = re.compile(r"[ \t\r\n]*")
UNDECODED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as decoded by surrogateescape
# Files that `datasets` writes beside the .arrow files of a saved or cached dataset.
DATASET_FILES = ("dataset_dict.json", "dataset_info.json", "state.json")
DATASET_CARD = "README.md"  # its header can list configs, with the files of each split
SHOWN_NAMES = 3
# Left out of folders, as by `datasets`: names that begin with a dot, folders that begin with __.
HIDDEN = re.compile(r"(^|.*/)(\.|__[^/]*/)")
ALL = ""  # the split of files without splits
# Each field of a source: on which sources it has an effect, and what to do on others. `hub` is a dataset, and
# `files` its --files; `splits` and `configs` are those of a folder; `text` and `records` are kinds of files.
EFFECTS = {
    "config": ("hub configs", "only datasets on the hub, and folders with configs in README.md, have any; "
               "remove it"),
    "split": ("hub splits", "it has no splits, and is read as a whole; remove it"),
    "revision": ("hub files", "only datasets on the hub have revisions; remove it"),
    "files": ("files", "it chooses files of a dataset on the hub; remove it, and give a glob as the source"),
    "column": ("hub files records", "plain text has no columns; remove it"),
    "map": ("hub files records", "plain text has no columns; remove it"),
    "documents": ("hub files text records", "each row is a document; remove it"),
}
COMMIT = re.compile(r"[0-9a-f]{40}")
SPLITTERS = ("whole", "line", "blank", "wikitext")  # ways to split text into documents
TYPE_NAMES = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "text",
              list: "a list", dict: "an object"}
WIKITEXT_TITLE = re.compile(r" = [^=].* = \s*")


@dataclass(frozen=True)
class Source:
    """One source of records: files (`path`) or a dataset on the hub (`name`)."""

    path: str = ""  # a file, folder or glob, on any URL that fsspec knows
    name: str = ""
    config: str = ""
    split: str | None = None  # None = train; "" = all files
    revision: str = ""
    files: str = ""  # a pattern for files of a hub repository without a config
    column: str | None = None  # None = text; "" = all columns
    map: str = ""  # new names of columns, "prompt=problem,completion=solution"; others keep their names
    documents: str = ""  # splits text into documents: one of SPLITTERS, or a separator line; "" = whole

    @property
    def text_column(self) -> str:
        return "text" if self.column is None else self.column

    @property
    def splitter(self) -> str:
        return self.documents or "whole"

    @property
    def renamed(self) -> dict[str, str]:
        """The columns in `map`: {expected name: name in the data}."""
        pairs = [pair.partition("=") for pair in self.map.split(",")] if self.map else []
        columns = {new.strip(): (old if equals else new).strip() for new, equals, old in pairs}
        is_whole = len(columns) == len(pairs) and all([*columns, *columns.values()])
        if pairs and ("=" not in self.map or not is_whole):
            raise SettingsError(f"--map {self.map}: expected name=column, separated by commas, "
                                "each name once, such as prompt=problem,completion=solution")
        return columns


SHORTCUTS = {
    "fineweb-edu": Source(name="HuggingFaceFW/fineweb-edu", config="sample-10BT"),
    "c4": Source(name="allenai/c4", files="en/c4-train.*.json.gz"),
    "wikitext": Source(name="Salesforce/wikitext", config="wikitext-103-raw-v1", documents="wikitext"),
}


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
        return self.text


class Place(NamedTuple):
    """Where a record of a source's files begins."""

    file: int = 0
    record: int = 0  # records, or lines, before it in the file
    offset: int = 0  # bytes before it in a file of lines that is not compressed
    state: dict | None = None  # before it, of a stream of `datasets`


@dataclass
class Reading:
    """The state of reading a source: the policy for unusable records, and counts so far."""

    skip_bad: bool = False
    advice: str = "correct the data, or skip such records: --on-bad-record skip"
    failed: bool = False  # a record was refused: read to the end of the file, for all of its bad records
    refused: int = 0  # bad records that were read here; others are from a journal
    bad: int = 0
    bad_records: list[str] = field(default_factory=list)  # the first LISTED_BAD_RECORDS
    empty: int = 0
    separators: int = 0  # lines that separated documents
    bytes_done: int = 0
    bytes_total: int = 0  # 0 = unknown
    dropped: Counter[str] = field(default_factory=Counter)  # number of occurrences of unused fields
    unread: Sequence[str] = ()  # columns of the current table that are not read
    advance: Callable[[], Any] = lambda: None  # called regularly while reading
    start: Place = Place()  # the first record to read
    place: Place = Place()  # the record that was read last
    item: Place | None = None  # where the item that was read last begins, if it consists of several records

    @property
    def counts(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in
                ("bad", "bad_records", "empty", "separators", "dropped")}

    @property
    def fraction(self) -> float | None:
        return self.bytes_done / self.bytes_total if self.bytes_total else None

    def drop(self, names: Iterable[str]) -> None:
        """Count unused fields."""
        for name in names:
            is_listed = name in self.dropped or len(self.dropped) < LISTED_DROPPED
            self.dropped[name if is_listed else "others"] += 1

    def refuse(self, where: str, reason: str) -> None:
        """Count and list an unusable record; without `skip_bad`, `settle` raises DataError."""
        self.failed = not self.skip_bad
        self.refused += 1
        self.bad += 1
        if len(self.bad_records) < LISTED_BAD_RECORDS:
            self.bad_records.append(f"{where}: {reason}")

    def settle(self) -> None:
        """Raise DataError with the unusable records so far, unless they are skipped."""
        if self.bad and not self.skip_bad:
            shown = self.bad_records[:SHOWN_BAD_RECORDS]
            first = f" (the first {len(shown)} below)" * (len(shown) < self.bad)
            raise DataError(*([f"{shown[0]}; {self.advice}"] if self.bad == 1 else
                              [f"{self.bad:,} bad records{first}; {self.advice}", *shown]))


Records = Iterator[tuple[str, Any]]


def is_local(fs: Any) -> bool:
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


@dataclass(frozen=True)
class StoredFile:
    """A file of a source, at the time of listing."""

    fs: Any
    name: str
    size: int
    kind: str
    compression: str | None

    @property
    def is_local(self) -> bool:
        return is_local(self.fs)

    @property
    def url(self) -> str:
        return self.name if self.is_local else without_passwords(self.fs.unstrip_protocol(self.name))

    def open(self) -> Any:
        """Return a context manager with the file's content; a remote file is downloaded first."""
        return open(self.name, "rb") if self.is_local else remote.downloaded(self.fs, self.name)

    def identity(self, known: dict[str, list], advance: Callable[[int], Any]) -> str:
        """Return a local file's SHA-256, or the version that a remote store reports."""
        if not self.is_local:
            return self.fs.ukey(self.name)
        stat = os.stat(self.name)
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        if known.get(self.name, [None])[0] != stamp:
            with self.open() as file:
                known[self.name] = [stamp, sha256(file, advance)]
        return known[self.name][1]


@contextmanager
def reading_errors(name: str) -> Iterator[None]:
    """Turn any error of a storage or format library in the `with` block into a DataError about `name`."""
    try:
        yield
    except PaddockError:
        raise
    except WrongContentError as error:
        raise DataError(f"{name}: {error}") from error
    except Exception as error:  # fsspec, arrow, zlib and the hub have no common base class
        raise DataError(f"{name}: {remote.first_line(error)}; check that it exists, is complete "
                        "and can be read") from error


def source_of(text: str, shortcuts: Mapping[str, Source] = SHORTCUTS, **fields: str) -> Source:
    """Return the source for a shortcut, a path, a URL, a glob, or the name of a dataset on the hub."""
    if not text:
        raise SettingsError("a source is empty; set it to a file, folder, glob or hub dataset")
    if text in shortcuts:
        return replace(shortcuts[text], **fields)
    is_hub_name = remote.HUB_NAME.fullmatch(text) and not os.path.exists(text) and not kind_of(text)[0]
    return Source(name=text, **fields) if is_hub_name else Source(path=text, **fields)


def identify(source: Source, known: dict[str, list],
             advance: Callable[[int], Any] = lambda count: None) -> dict:
    """Return everything that affects a source's records as JSON values, for the key of a prepared set.

    Local files are identified by content, independent of their location, and hub datasets by commit. `known`
    has the hashes of local files, {name: [stamp, hash]}; `advance` gets the number of bytes just hashed.
    """
    reading = {"column": source.text_column, "documents": source.splitter}
    if source.renamed:
        reading["map"] = source.renamed
    if source.name:
        check_flags(source, {"files" if source.files else "hub"})
        return {"name": source.name, "config": source.config, "split": source.split or "train",
                "files": source.files,
                "revision": remote.hub_revision(source.name, source.revision, source.config), **reading}
    files = []
    for file in list_files(source):
        with reading_errors(file.url):
            files.append([file.kind, file.compression, file.size, file.identity(known, advance)])
    return {"files": files, **reading}


def kind_of(name: str) -> tuple[str | None, str | None]:
    """Return (kind, compression) by a file's suffixes; the kind is None if unsupported."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    return KINDS.get(suffix), compression


def list_files(source: Source) -> list[StoredFile]:
    """Return the readable files of a path, folder, glob or URL, sorted by name; of a folder, one split's.

    A printed line counts the files that are not read.
    """
    path, unread = source.path, defaultdict(list)
    with reading_errors(path):
        fs, root, names = remote.retry(path, lambda: _find_names(path, unread))
        if not names:
            raise DataError(f"{path}: no such file or folder, or nothing matches; check the path")
        splits, has_configs = remote.retry(path, lambda: _find_splits(fs, root, names, source))
        chosen, of_split = [*chain(*splits.values())], ""
        if ALL not in splits and source.split != "":
            split = source.split or "train"
            if not splits.get(split):
                everything = os.path.join(glob.escape(path.rstrip("/")), "**")
                raise DataError(f"{path} has no split {split!r}, only {', '.join(splits)}; choose one with "
                                f"--split, or read all files with a glob: {everything!r}")
            chosen, of_split = splits.pop(split), f" of split {split}"
        files = [_stored_file(fs, name) for name in chosen if kind_of(name)[0]]
        if not files:
            raise DataError(f"{path}: no file of a supported kind; use {READABLE}")
    others = {name: f"of split {split}" for split, those in splits.items() for name in those}
    for name in {*names}.difference(file.name for file in files):
        if os.path.basename(name) not in DATASET_FILES:
            reason = others.get(name, "in no split") if kind_of(name)[0] else "of other kinds"
            unread[reason].append(name)
    check_flags(source, {"text" if file.kind == "text" else "records" for file in files}
                | ({"splits"} if of_split else set()) | ({"configs"} if has_configs else set()))
    if unread:
        listed = "; ".join(f"{len(those):,} {reason} ({_names(root, those)})"
                           for reason, those in sorted(unread.items()))
        remote.say_once(f"{without_passwords(path)}: reading {counted(len(files), 'file')}{of_split}; "
                        f"not read: {listed}")
    return files


def _names(root: str, names: list[str]) -> str:
    shown = [os.path.relpath(name, root) if root else name for name in sorted(names)[:SHOWN_NAMES]]
    return ", ".join([*shown, "..."] if len(names) > SHOWN_NAMES else shown)


def _stored_file(fs: Any, name: str) -> StoredFile:
    if flaw_of(name):  # JSON files could not contain it
        raise DataError(f"{name}: the file's name is not UTF-8; rename it")
    if is_local(fs) and not os.path.isfile(name):
        raise DataError(f"{name}: " + ("is not a plain file; give another" if os.path.exists(name) else
                                       f"is a link to {os.readlink(name)}, which does not exist; restore the "
                                       "file, or remove the link"))
    return StoredFile(fs, name, fs.size(name) or 0, *kind_of(name))


def local_files(path: str, unread: dict[str, list[str]]) -> list[str]:
    """Return the files of a local path, folder or glob, sorted; add the others to `unread`, by reason."""
    if os.path.lexists(path):  # even if its name contains the signs of a glob
        return _walk(path, unread) if os.path.isdir(path) else [path]
    if "**" in path.split("/"):
        base = path[:re.search(r"[*?[]", path).start()].rpartition("/")
        matches = re.compile(glob_translate(path)).match
        names = filter(matches, _walk("".join(base[:2]) or ".", unread))
    else:
        names = glob.glob(path)
    names = sorted(names)
    if folders := [*filter(os.path.isdir, names)]:
        unread["folders that match"] += folders
    return [name for name in names if name not in folders]


def _walk(root: str, unread: dict[str, list[str]]) -> list[str]:
    """Return the files below a local folder, also behind links, sorted; add what is skipped to `unread`."""
    def fail(error: OSError) -> None:
        raise error

    files, above = [], {root: {os.path.realpath(root)}}  # above: the real folders that contain each folder
    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        for name in [*folders]:
            inner = os.path.join(folder, name)
            real = os.path.realpath(inner)
            above[inner] = above[folder] | {real}
            reason = "hidden" if HIDDEN.match(f"{name}/") else "links back to a folder above" * (
                real in above[folder])
            if reason:
                unread[reason].append(inner)
                folders.remove(name)
        for name in names:
            file = os.path.join(folder, name)
            if HIDDEN.match(name):
                unread["hidden"].append(file)
            elif os.path.exists(file) and not os.path.isfile(file):  # opening a pipe would block
                unread["not plain files"].append(file)
            else:
                files.append(file)
    return sorted(files)


def _find_names(path: str, unread: dict[str, list[str]]) -> tuple[Any, str, list[str]]:
    """Return the file system, the root if the path is a folder, and the names of the files."""
    fs, root = remote.file_system(path)
    if is_local(fs):
        return fs, root if os.path.isdir(root) else "", local_files(root, unread)
    try:
        file_type = fs.info(root)["type"]
    except FileNotFoundError as error:  # fsspec also raises it if a server does not respond
        if remote.is_transient(error):
            raise
        file_type = None
    if file_type == "directory" or (file_type is None and fs.isdir(root)):  # some stores lack folders
        root = root.rstrip("/")
        names = sorted(fs.find(root))
        if hidden := [name for name in names if HIDDEN.match(name[len(root) + 1:])]:
            unread["hidden"] = hidden
        return fs, root, [name for name in names if name not in hidden]
    if file_type is None:
        is_glob = any(sign in root for sign in "*?[")
        return fs, "", [name for name in sorted(fs.glob(root)) if fs.isfile(name)] if is_glob else []
    return fs, "", [root] if file_type == "file" else []


def _find_splits(fs: Any, root: str, names: list[str], source: Source) -> tuple[dict[str, list[str]], bool]:
    """Return the files of each split in a folder, or all as the split ALL; and whether it has configs."""
    if not root:
        return {ALL: names}, False
    if any(os.path.basename(name) in DATASET_FILES for name in names) and any(
            name.endswith(".arrow") for name in names):
        return _splits_of_saved(fs, root, names), False
    if source.split == "":
        return {ALL: names}, False
    return _splits_of_folder(fs, root, names, source.config)


def _splits_of_folder(fs: Any, root: str, names: list[str], config: str) -> tuple[dict[str, list[str]], bool]:
    """Return the splits as `datasets` finds them, by the configs in README.md or by the names of files."""
    with requires_package("datasets", f"{root}, a folder,"):
        from datasets import data_files as finder
        from datasets.utils.metadata import MetadataConfigs
        from huggingface_hub import DatasetCard
    card, params, configs = f"{root}/{DATASET_CARD}", {}, {}
    if card in names:
        with reading_errors(card):
            content = fs.cat_file(card).decode("utf-8-sig")
            if content.startswith("---"):
                configs = MetadataConfigs.from_dataset_card_data(DatasetCard(content).data)
                chosen = config or configs and configs.get_default_config_name()
    if configs:
        if chosen not in configs:
            raise DataError(f"{root} has {f'no config {config!r}' if config else 'several configs'}; choose "
                            f"one with --config-name: {', '.join(configs)}")
        params = configs[chosen]
    base = os.path.join(root, params.get("data_dir") or "", "").replace("/./", "/")
    inside = {name.removeprefix(base): name for name in names if name.startswith(base) and kind_of(name)[0]
              and os.path.basename(name) not in finder.FILES_TO_IGNORE}

    def resolve(pattern: str) -> list[str]:
        return [*filter(re.compile(glob_translate(pattern.removeprefix("./"))).match, inside)]

    files = params.get("data_files")
    patterns = finder.DEFAULT_PATTERNS_ALL if not inside else finder.sanitize_patterns(
        files) if files is not None else finder._get_data_files_patterns(resolve)
    if patterns == finder.DEFAULT_PATTERNS_ALL:
        return {ALL: [*inside.values()]}, bool(configs)
    return {str(split): sorted({inside[name] for pattern in those for name in resolve(pattern)})
            for split, those in patterns.items()}, bool(configs)


def _splits_of_saved(fs: Any, root: str, names: list[str]) -> dict[str, list[str]]:
    """Return the .arrow files of each split in a folder saved or cached by `datasets`, or of ALL.

    Not by datasets.load_from_disk, which maps the files and ignores that other caches are in the same folder.
    """
    def content_of(name: str) -> dict:
        return json.loads(fs.cat_file(f"{root}/{name}")) if f"{root}/{name}" in names else {}

    def saved_in(folder: str) -> list[str] | None:
        files = content_of(f"{folder}state.json").get("_data_files")
        return files and [f"{root}/{folder}{os.path.basename(file['filename'])}" for file in files]

    arrow = [name for name in names if name.endswith(".arrow")]
    if not any(f"{root}/{name}" in names for name in DATASET_FILES):
        raise DataError(f"{root} has folders of `datasets`; use one, such as {os.path.dirname(arrow[0])}")
    if splits := content_of("dataset_dict.json").get("splits"):
        return {split: saved_in(f"{split}/") or [] for split in splits}
    if saved := saved_in(""):
        return {ALL: saved}
    # A folder of the cache: name-split.arrow or name-split-00000-of-00002.arrow
    splits = content_of("dataset_info.json").get("splits")
    return {split: [name for name in arrow if re.search(rf"-{re.escape(split)}(-\d+-of-\d+)?\.arrow$", name)]
            for split in splits} if splits else {ALL: arrow}


def check_flags(source: Source, traits: set[str]) -> None:
    """Raise SettingsError for a field of a source that has no effect on one with these traits."""
    for name, (needs, remedy) in EFFECTS.items():
        value = getattr(source, name)
        if name == "documents" and value in ("whole", "line"):
            needs = needs.removesuffix(" records")
        if value and traits.isdisjoint(needs.split()):
            if source.name and source.files:
                remedy = f"the files are chosen by --files {source.files}; remove one of the two"
            flag = "config-name" if name == "config" else name
            raise SettingsError(f"--{flag} {value} has no effect on {without_passwords(source.path)}"
                                f"{source.name}: {remedy}")


def _read_lines(file: StoredFile, raw: Any, stream: Any, reading: Reading) -> Iterator[tuple[str, str]]:
    """Yield the lines of a UTF-8 file as (file:line, text), with line ends but without a byte-order mark."""
    before, place = reading.bytes_done, reading.place
    # Read lines as bytes, of limited length to protect memory.
    lines = iter(partial(stream.readline, MAX_LINE_BYTES + 1), b"")
    if file.compression:
        lines = islice(lines, place.record, None)
    else:
        stream.seek(place.offset)
    if file.kind == "text" and not place.record:  # --on-bad-record skip must not accept a binary file
        first, size = [], 0
        while size < SNIFF_BYTES and (line := next(lines, b"")):
            first.append(line)
            size += len(line)
        bad = [line for line in first if flaw_of(line.decode("utf-8", "surrogateescape"))]
        if 2 * len(bad) > len(first):
            sample = b"".join(bad)
            way = "" if b"\0" in sample else advice_on_encoding(file.url, sample)
            raise DataError(f"{file.url}: is not UTF-8 text: {len(bad)} of its first {len(first)} lines have "
                            f"NULs or bytes that are not UTF-8; remove the file{way and f', or {way}'}")
        lines = chain(first, lines)
    # Decode the lines.
    offset, advice, valid = place.offset, reading.advice, b""  # a line of UTF-8 that is not ASCII
    for number, line in enumerate(lines, place.record + 1):
        where, reading.place = f"{file.url}:{number}", Place(place.file, number - 1, offset)
        offset += len(line)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{where}: the line has more than {MAX_LINE_BYTES >> 20:,} MiB; correct it, or "
                            "remove the file")
        if number % 64 == 0 or len(line) > 1 << 16:
            reading.bytes_done = before + raw.tell()
            reading.advance()
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            way = advice_on_encoding(file.url, valid + line)
            reading.advice = f"{advice}; {way}" if way else advice
            reading.refuse(where, f"byte {error.start + 1} of the line is not UTF-8")
            continue
        if not (valid or line.isascii()):
            valid, reading.advice = line, advice
        yield where, text


def _read_file(file: StoredFile, columns: Sequence[str], reading: Reading) -> Records:
    """Yield the lines of a text file, or the objects of JSON lines or of an array in a .json file."""
    with reading_errors(file.url), file.open() as raw:
        stream, stem = raw, file.name
        if file.compression:
            if file.compression not in fsspec.compression.compr:
                raise DataError(f"{file.url}: {file.compression} needs a package: {pip_install('zstandard')}")
            unpacked = fsspec.compression.compr[file.compression](raw, mode="rb")
            stream = io.BufferedReader(unpacked, 1 << 20)  # zstandard's reader has no lines
            stem = os.path.splitext(file.name)[0]
        check_start(file.url, stream.peek(SNIFF_BYTES), is_text=True)
        if file.kind == "text":
            column = columns[0] if columns else ""
            for where, line in _read_lines(file, raw, stream, reading):
                yield where, {column: line[:-2] + "\n" if line.endswith("\r\n") else line}
            return
        start = stream.peek(SNIFF_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        is_array = stem.lower().endswith(".json") and start.startswith(b"[")
        values = _read_array if is_array else _read_json_lines
        for where, record in values(file, raw, stream, reading):
            if isinstance(record, dict):
                yield where, record
            else:
                expected = "an object as each item" if is_array else "one JSON object per line"
                reading.refuse(where, f"expected {expected}, got {type_name(record)}")


def _read_json_lines(file: StoredFile, raw: Any, stream: Any, reading: Reading) -> Records:
    for where, line in _read_lines(file, raw, stream, reading):
        if not line.strip():
            continue
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            hint = ""
            if where == f"{file.url}:1" and line.lstrip()[:1] in ("{", "["):
                hint = (". Each line must be a record; a .json file can also be an array of records, but not "
                        "inside an object")
            is_syntax = isinstance(error, json.JSONDecodeError)
            reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}" if is_syntax else error
            reading.refuse(where, f"not valid JSON: {reason}{hint}")


def _read_array(file: StoredFile, raw: Any, stream: Any, reading: Reading) -> Records:
    """Yield the items of a JSON array file, with one item and a block of text in memory."""
    text, at, line, advice = "", 0, 1, reading.advice  # text in memory, and the current position
    before, place = reading.bytes_done, reading.place
    number, expected = 0, "["  # next character; "item", or "" for the end

    def fault(reason: str) -> DataError:
        return DataError(f"{file.url}:{line}: {reason}; correct it, or remove the file")

    def fill() -> bool:
        """Read more text, doubling the amount, so that a long item is not decoded too often."""
        nonlocal text, at
        more = decoded.read(max(BLOCK_CHARACTERS, len(text) - at))
        if UNDECODED.search(more):
            way = advice_on_encoding(file.url, more.encode("utf-8", "surrogateescape"))
            reading.advice = f"{advice}; {way}" if way else advice
        if more:
            text, at = text[at:] + more, 0
        return bool(more)

    # Invalid UTF-8 becomes a lone surrogate, so that only its record is rejected.
    with io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="") as decoded:
        while True:
            # Skip white space.
            end = BLANK.match(text, at).end()
            line, at = line + text.count("\n", at, end), end
            if at == len(text) and fill():
                continue
            sign = text[at:at + 1]
            if not expected:
                if sign:
                    raise fault("there is text after the end of the array")
                return
            if expected == "item" and (number or sign != "]"):
                try:
                    value, end = json.JSONDecoder().raw_decode(text, at)
                except json.JSONDecodeError as error:
                    # At the end of the text in memory, an error may only mean that the item continues.
                    is_torn = error.pos > len(text) - 16 or error.msg.startswith("Unterminated string")
                    if is_torn and len(text) - at < MAX_LINE_BYTES and fill():
                        continue
                    line += text.count("\n", at, error.pos)
                    raise fault(f"not valid JSON: {error.msg}") from error
                except (ValueError, RecursionError) as error:  # an endless number; nested too deeply
                    raise fault(f"not valid JSON: {error}") from error
                if end == len(text) and fill():  # a number may continue
                    continue
                number += 1
                if number > place.record:
                    reading.place = Place(place.file, number - 1)
                    yield f"{file.url}:{line} (item {number})", value
                line, at, expected = line + text.count("\n", at, end), end, ",]"
                if number % 64 == 0:
                    reading.bytes_done = before + raw.tell()
                    reading.advance()
                continue
            # A bracket or a comma.
            if not sign:
                raise fault("the array has no end: the file is truncated")
            if sign not in expected and expected != "item":
                raise fault(f"not valid JSON: expected {' or '.join(expected)}, got {sign!r}")
            at, expected = at + 1, "" if sign == "]" else "item"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _cell_reader(arrow_type: Any, is_parsed: bool = False) -> Callable[[Any], Any] | None:
    """Return a function that corrects values of a type from Arrow; None if there is nothing to correct.

    Parses JSON, as `datasets` stores its type Json, and removes the nulls with which Arrow gives the structs
    of a column the same keys.
    """
    import pyarrow as pa

    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return None if is_parsed else lambda value: json.loads(value) if isinstance(value, str) else value
    if pa.types.is_struct(arrow_type):
        readers = {arrow_type.field(place).name: _cell_reader(arrow_type.field(place).type, is_parsed)
                   for place in range(arrow_type.num_fields)}
        return lambda value: value and {
            name: readers[name](each) if readers[name] else each
            for name, each in value.items() if each is not None}
    read = _cell_reader(arrow_type.value_type, is_parsed) if hasattr(arrow_type, "value_type") else None
    return read and (lambda value: [*map(read, value)] if isinstance(value, list) else read(value))


def _cell(value: Any, read: Callable[[Any], Any] | None) -> Any:
    """Return a cell's value. It may be an error, so that only a record that uses it is refused."""
    try:
        return read(value.as_py()) if read else value.as_py()
    except Exception as error:  # text that is not UTF-8, a date before year 1, a missing time zone, ...
        return error


def _read_table(file: StoredFile, columns: Sequence[str], reading: Reading) -> Records:
    """Yield the rows of a Parquet or Arrow file, with these columns if the file has them, else with all."""
    is_parquet, before, place, row = file.kind == "parquet", reading.bytes_done, reading.place, 0
    with requires_package("pyarrow", f"{file.url}, {'a Parquet' if is_parquet else 'an Arrow'} file,"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    with reading_errors(file.url), file.open() as raw:
        check_start(file.url, raw.peek(SNIFF_BYTES))
        if is_parquet:
            table = pq.ParquetFile(raw)
            has_all = columns and {*columns} <= {*table.schema_arrow.names}
            groups = [*range(table.num_row_groups)]
            while groups and row + (rows := table.metadata.row_group(groups[0]).num_rows) <= place.record:
                row += rows
                del groups[0]
            batches = table.iter_batches(1024, groups, columns if has_all else None)
        elif raw.peek(6)[:6] == b"ARROW1":  # with an index (Feather), else a stream as written by `datasets`
            table = pa.ipc.open_file(raw)
            batches = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            batches = table = pa.ipc.open_stream(raw)
        all_names = (table.schema_arrow if is_parquet else table.schema).names
        for batch in batches:
            if columns and all(batch.schema.names.count(name) == 1 for name in columns):
                batch = batch.select(list(columns))
            reading.unread = [name for name in all_names if name not in batch.schema.names]
            read = [*map(_cell_reader, batch.schema.types)]
            names = batch.schema.names
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise DataError(f"{file.url}: has several columns {twice[0]!r:.40}; drop all but one")
            for number, cells in enumerate(zip(*batch.columns), row + 1):
                if number <= place.record:
                    continue
                where, reading.place = f"{file.url}: row {number}", Place(place.file, number - 1)
                yield where, dict(zip(names, map(_cell, cells, read)))
            row += batch.num_rows
            reading.bytes_done = before + (int(file.size * row / table.metadata.num_rows) if is_parquet else
                                           raw.tell())


READERS = {"jsonl": _read_file, "text": _read_file, "parquet": _read_table, "arrow": _read_table}


def columns_of(record: Mapping[str, Any]) -> str:
    """Return the names of a record's columns, for an error message."""
    names = [f"{name!r:.40}" + (" (null)" if value is None else "")
             for name, value in islice(record.items(), LISTED_COLUMNS)]
    more = f" and {len(record) - LISTED_COLUMNS:,} more" if len(record) > LISTED_COLUMNS else ""
    return ", ".join(names) + more or "no columns"


def contents_of(record: Mapping[str, Any]) -> str:
    """Return `columns_of`, with a hint if the records seem to be in a list inside this one."""
    lists = [name for name, value in record.items()
             if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
             and not {"role", "from"} & value[0].keys()]
    hint = f" (if {lists[0]!r:.40} is the list of records, write only it into a .json file)" if lists else ""
    return columns_of(record) + hint


def type_name(value: Any) -> str:
    if isinstance(value, Exception):  # see `_cell`
        return f"unreadable ({remote.first_line(value)})"
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


def _read_files(source: Source, reading: Reading) -> Iterator[tuple[str, Records]]:
    """Yield (kind, records) for each file of a source, or once for a hub dataset."""
    renamed = source.renamed
    # Only text has a column. Of its tables, no others are read.
    column = renamed.get(source.text_column, source.text_column)
    columns = [*dict.fromkeys([column, *renamed.values()])] if column else []
    if source.name:
        yield "hub", _rename_columns(_read_hub(source, columns, reading), renamed, reading)
        return reading.settle()
    files = list_files(source)
    reading.bytes_total = sum(file.size for file in files)
    for number, file in enumerate(files):
        before = reading.bytes_done
        if number >= reading.start.file:
            reading.unread = ()
            reading.place = reading.start if number == reading.start.file else Place(number)
            yield file.kind, _rename_columns(READERS[file.kind](file, columns, reading), renamed, reading)
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
            reading.drop(name for name in others if name in renamed and others[name] is not None)
            yield where, {**others, **{new: record[old] for new, old in renamed.items()}}


def _read_hub(source: Source, columns: Sequence[str], reading: Reading) -> Records:
    """Stream the rows of a hub dataset at a fixed commit, from a local copy if there is one."""
    with requires_package("datasets", f"{source.name}, a dataset of the hub,"):
        import datasets
    revision, split = source.revision, source.split or "train"
    if not COMMIT.fullmatch(revision):
        revision = remote.hub_revision(source.name, revision, source.config)
    copy = remote.cached_dataset(source.name, source.config, revision)
    if copy and (copy / "dataset_info.json").is_file():  # Arrow files of a whole config
        if not source.files and not reading.start.state:
            for file in list_files(Source(path=str(copy), split=split)):
                reading.place = Place()
                yield from READERS[file.kind](file, columns, reading)
            return
        copy = None
    with reading_errors(f"{source.name} ({source.config or 'default'}, {split})"):
        # datasets and the hub's client retry requests for rows.
        rows = remote.retry(source.name, lambda: datasets.load_dataset(
            str(copy or source.name), source.config or None, split=split, streaming=True,
            revision=revision or None, data_files={split: source.files} if source.files else None))
        state = reading.start.state
        if state:
            rows.load_state_dict(state)
        types = rows.features.arrow_schema if rows.features else ()
        read = {field.name: _cell_reader(field.type, is_parsed=True) for field in types}
        for number, record in enumerate(rows, reading.start.record + 1):
            # A null column counts as missing. Without types, all structs lose their nulls.
            record = {name: (read.get(name, _without_nulls) or (lambda value: value))(value)
                      for name, value in record.items()}
            reading.place = Place(record=number - 1, state=state)
            yield f"{source.name}[{split}] row {number}", record
            state = rows.state_dict()


def read_texts(source: Source, reading: Reading) -> Iterator[Document]:
    """Yield the non-empty documents of a source: the valid texts of its column, split into documents."""
    for kind, records in _read_files(source, reading):
        has_lines = kind == "text" or source.splitter != "whole"
        for document in _documents(records, source, has_lines and source.splitter != "line", reading):
            if document.text and not document.text.isspace():
                yield document
            else:
                reading.empty += 1
    if source.splitter not in SPLITTERS and not reading.separators:
        raise DataError(f"{without_passwords(source.path) or source.name}: no line equals "
                        f"{source.splitter!r}, the document separator; set --documents to a line that "
                        f"occurs, or to {', '.join(SPLITTERS)}")


def _documents(records: Records, source: Source, join: bool, reading: Reading) -> Iterator[Document]:
    """Yield the valid texts of a source's column, or if `join`, documents made of them as lines.

    Documents are whole files, are separated by blank lines or by the line in `source.splitter`, or start at
    a line like ` = Title = ` (wikitext). A document with an unusable line is left out as a whole.
    """
    column, begin, place, kept, reading.item = source.text_column, "", reading.place, [], None
    refused = reading.refused

    def end() -> Iterator[Document]:
        nonlocal kept, refused
        if kept and reading.refused == refused:
            reading.item = place
            yield Document(begin, "".join(kept))
        elif kept and reading.skip_bad:
            reading.refuse(begin, "the document that begins here is left out, because a line of it is bad")
        kept, refused = [], reading.refused

    for where, record in records:
        if column not in record:
            reading.refuse(where, f"has no column {column!r}; it has {contents_of(record)} (--column)")
            continue
        text = record[column]
        if len(record) > 1 or reading.unread:
            reading.drop([*(name for name in record if name != column and record[name] is not None),
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
            begin, place = (begin, place) if kept else (where, reading.place)
            kept.append(text)
    yield from end()
