"""A source of records, and its files: those of a path, folder, glob or URL, by format and split."""

import glob
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from common import remote
from common.errors import DataError, PaddockError, SettingsError, requires_package
from common.files import WrongContentError, sha256
from common.text import counted, without_passwords
from data_pipeline import remote_data

# In the order of preference for the same records. Tables are read by `datasets`, whose builders have these
# names. Text, JSON and CSV are read here: `datasets` reads them in blocks, so errors would not name the line,
# one bad record would end the file, and all records would get the columns and types of the first ones.
FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
           ".csv": "csv", ".tsv": "csv", ".txt": "text", ".text": "text", ".raw": "text", ".tokens": "text"}
TABLES = ("parquet", "arrow")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
READABLE = f"{' '.join(FORMATS)}, also compressed as {' '.join(COMPRESSIONS)}"
SHOWN_NAMES = 3  # of files that are not read
UNDECODED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as decoded by surrogateescape
SAVED_FILES = ("dataset_dict.json", "state.json")  # one is in each folder that `datasets` saved
DATASET_CARD = "README.md"  # its header can list configs, with the files of each split
# Left out of folders, as by `datasets`: names that begin with a dot, folders that begin with __.
HIDDEN = re.compile(r"(^|.*/)(\.|__[^/]*/)")
ALL = ""  # the split of files without splits
# Each field of a source: on which sources it has an effect, and what to do on others. `hub` is a dataset, and
# `files` its --files; `splits` and `configs` are those of a folder; `text` and `records` are formats.
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
SHARD = re.compile(r"(.*)(\d{5})(-of-(\d{5})\D.*)", re.DOTALL)  # the name of one of several files
SPLITTERS = ("whole", "line", "blank", "wikitext")  # ways to split text into documents


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


@dataclass(frozen=True)
class StoredFile:
    """A file of a source, at the time of listing."""

    fs: Any  # of fsspec; None = this machine's
    name: str
    size: int
    format: str
    compression: str | None

    @property
    def is_local(self) -> bool:
        return self.fs is None

    @property
    def url(self) -> str:
        return self.name if self.is_local else without_passwords(self.fs.unstrip_protocol(self.name))

    def open(self) -> Any:
        """Return a context manager with the file's content; a remote file is downloaded first."""
        return open(self.name, "rb") if self.is_local else remote_data.downloaded(self.fs, self.name)

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
        reason, advice = remote.first_line(error), "check that it exists, is complete and can be read"
        if "too much memory for decoding" in reason:
            advice = f"unpack it with: zstd -d --long=31 {name}"
        raise DataError(f"{name}: {reason}; {advice}") from error


def source_of(text: str, shortcuts: Mapping[str, Source] = SHORTCUTS, **fields: str) -> Source:
    """Return the source for a shortcut, a path, a URL, a glob, or the name of a dataset on the hub."""
    if not text:
        raise SettingsError("a source is empty; set it to a file, folder, glob or hub dataset")
    if text in shortcuts:
        return replace(shortcuts[text], **fields)
    is_hub_name = remote.HUB_NAME.fullmatch(text) and not os.path.exists(text) and not format_of(text)[0]
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
                "revision": remote_data.hub_revision(source.name, source.revision, source.config), **reading}
    files, first = [], {}
    for file in list_files(source):
        with reading_errors(file.url):
            content = file.identity(known, advance)
        if file.size and first.setdefault(content, file) is not file:
            remote_data.say_once(f"{file.url} has the content of {first[content].url}, and is read too")
        files.append([file.format, file.compression, file.size, content])
    return {"files": files, **reading}


def format_of(name: str) -> tuple[str | None, str | None]:
    """Return (format, compression) by a file's suffixes; the format is None if unsupported."""
    name = re.sub(r"^(https?:.*?)[?#].*", r"\1", name)  # without a presigned URL's query
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    return FORMATS.get(suffix), compression


def _twins(names: Sequence[str]) -> dict[str, str]:
    """Return {file: other} for files of records that the same folder has in another, preferred format."""
    groups = defaultdict(list)
    for name in names:
        format, compression = format_of(name)
        stem = os.path.splitext(name[:len(name) - len(os.path.splitext(name)[1]) * bool(compression)])[0]
        if format not in (None, "text"):  # a text may have its description beside it
            groups[stem].append(([*FORMATS.values()].index(format), compression or "", name))
    return {name: first for (*_, first), *more in map(sorted, groups.values()) for *_, name in more}


def list_files(source: Source) -> list[StoredFile]:
    """Return the readable files of a path, folder, glob or URL, sorted by name; of a folder, one split's.

    A printed line counts the files that are not read.
    """
    path, unread = source.path, defaultdict(list)
    with reading_errors(path):
        local = remote_data.local_name(path)
        fs, root, names = remote.retry(path, lambda: _find_remote_names(path, unread)) if not local else (
            None, local if os.path.isdir(local) else "", local_files(local, unread))
        if not names:
            found = f"no file to read, only {_counts_of(unread, root)}" if unread else (
                "the folder is empty" if root else "no such file or folder, or nothing matches")
            raise DataError(f"{path}: {found}; check the path")
        splits, has_configs = _find_splits(fs, root, names, source) if root else ({ALL: names}, False)
        chosen, of_split = [*chain(*splits.values())], ""
        if ALL not in splits and source.split != "":
            split = source.split or "train"
            if not splits.get(split):
                everything = os.path.join(glob.escape(path.rstrip("/")), "**")
                others = ", ".join(filter(splits.get, splits)) or "empty ones"
                raise DataError(f"{path} has no split {split!r}, only {others}; choose one with --split, or "
                                f"read all files with a glob: {everything!r}")
            chosen, of_split = splits.pop(split), f" of split {split}"
        files, twins = [], _twins(chosen)
        for name in (name for name in chosen if format_of(name)[0] and name not in twins):
            if UNDECODED.search(name):  # JSON files could not contain it
                raise DataError(f"{name}: the file's name is not UTF-8; rename it")
            if fs is None and not os.path.exists(name):
                raise DataError(f"{name}: is a link to {os.readlink(name)}, which does not exist; restore "
                                "the file, or remove the link")
            if fs is None and not os.path.isfile(name):  # a pipe would block
                raise DataError(f"{name}: is not a plain file; give another")
            size = os.path.getsize(name) if fs is None else fs.size(name) or 0
            files.append(StoredFile(fs, name, size, *format_of(name)))
            if fs is None and not size:
                unread["empty"].append(name)
        if not files:
            raise DataError(f"{path}: no file of a supported format; use {READABLE}")
    others = {name: f"of split {split}" for split, those in splits.items() for name in those}
    others |= dict.fromkeys(twins, "also in another format")
    for name in {*names}.difference(file.name for file in files):
        if os.path.basename(name) not in (*SAVED_FILES, "dataset_info.json"):
            reason = others.get(name, "in no split") if format_of(name)[0] else "of other formats"
            unread[reason].append(name)
    if root and (missing := _missing(names)):
        unread["missing"] = missing
    check_flags(source, {"text" if file.format == "text" else "records" for file in files}
                | ({"splits"} if of_split else set()) | ({"configs"} if has_configs else set()))
    formats = defaultdict(list)  # a license may be among them
    for file in (file for file in files if file.name not in unread.get("empty", ())):
        formats["of plain text" if file.format == "text" else f"of {file.format}"].append(file.name)
    if unread or len(formats) > 1:
        read = counted(sum(map(len, formats.values())), "file") + of_split
        read += f", {_counts_of(formats, root)}" * (len(formats) > 1)
        remote_data.say_once(f"{without_passwords(path)}: reading {read}"
                             + f"; not read: {_counts_of(unread, root)}" * bool(unread))
    return files


def _missing(names: Sequence[str]) -> list[str]:
    """Return the missing names of sets such as train-00000-of-00002.jsonl and train-00001-of-00002.jsonl."""
    numbers = defaultdict(set)
    for match in filter(None, map(SHARD.fullmatch, names)):
        numbers[match.group(1, 3, 4)].add(int(match[2]))
    missing = []
    for (before, after, count), present in numbers.items():
        first = int(max(present) >= int(count))  # some sets begin with 00001
        missing += [f"{before}{number:05}{after}" for number in {*range(first, first + int(count))} - present]
    return missing


def _counts_of(unread: Mapping[str, list[str]], root: str) -> str:
    """Return the number and the first names of the files that are not read, by reason."""
    listed = []
    for reason, those in sorted(unread.items()):
        shown = [os.path.relpath(name, root) if root else name for name in sorted(those)[:SHOWN_NAMES]]
        listed.append(f"{len(those):,} {reason} ({', '.join(shown)}{', ...' * (len(those) > SHOWN_NAMES)})")
    return "; ".join(listed)


def local_files(path: str, unread: dict[str, list[str]]) -> list[str]:
    """Return the files of a local path, folder or glob, sorted; add the others to `unread`, by reason."""
    if os.path.lexists(path):  # even if its name contains the signs of a glob
        return _walk(path, unread) if os.path.isdir(path) else [path]
    if "**" in path.split("/"):
        base = path[:re.search(r"[*?[]", path).start()].rpartition("/")
        matches = _glob_pattern(path).match
        names = filter(matches, _walk("".join(base[:2]) or ".", unread))
    else:
        names = glob.glob(path)
    names = sorted(names)
    if folders := [*filter(os.path.isdir, names)]:
        unread["folders that match"] += folders
    return [name for name in names if name not in folders]


def _glob_pattern(glob: str, flags: int = 0) -> re.Pattern:
    from fsspec.utils import glob_translate  # here, because fsspec takes 0.13 s, and a run does not need it

    return re.compile(glob_translate(glob), flags)


def _walk(root: str, unread: dict[str, list[str]]) -> list[str]:
    """Return the files below a local folder, sorted; add what is skipped to `unread`.

    Unlike fsspec and `datasets`, it follows links to folders.
    """
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


def _find_remote_names(path: str, unread: dict[str, list[str]]) -> tuple[Any, str, list[str]]:
    """Return the file system, the root if the path is a folder, and the names of the files."""
    fs, root = remote_data.file_system(path)
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
    """Return the files of each split in a folder, or all as the split ALL; and whether it has configs.

    The splits are those of `datasets`: of a folder that it saved, else by the configs in README.md or by the
    names of the files.
    """
    with requires_package("datasets", f"{root}, a folder,"):
        import datasets
        from datasets import data_files as finder
        from datasets.utils.metadata import MetadataConfigs
        from huggingface_hub import DatasetCard
    saved = {name for name in names if os.path.basename(name) in SAVED_FILES}
    if saved and any(name.endswith(".arrow") for name in names):
        if saved.isdisjoint(f"{root}/{name}" for name in SAVED_FILES):
            raise DataError(f"{root} has folders saved by `datasets`; use one, such as "
                            f"{os.path.dirname(min(saved))}")
        if fs is not None:
            raise DataError(f"{root} was saved by `datasets`; copy it to a local folder")
        loaded = datasets.load_from_disk(root)
        loaded = loaded if isinstance(loaded, dict) else {ALL: loaded}
        return {split: [file["filename"] for file in rows.cache_files]
                for split, rows in loaded.items()}, False
    if source.split == "":
        return {ALL: names}, False
    card, params, configs = f"{root}/{DATASET_CARD}", {}, {}
    if card in names:
        with reading_errors(card):
            content = Path(card).read_bytes() if fs is None else remote.retry(card, lambda: fs.cat_file(card))
            content = content.decode("utf-8-sig")
            if content.startswith("---"):
                configs = MetadataConfigs.from_dataset_card_data(DatasetCard(content).data)
                chosen = source.config or configs and configs.get_default_config_name()
    if configs:
        if chosen not in configs:
            raise DataError(f"{root} has {f'no config {chosen!r}' if chosen else 'several configs'}; choose "
                            f"one with --config-name: {', '.join(configs)}")
        params = configs[chosen]
    base = os.path.join(root, params.get("data_dir") or "", "").replace("/./", "/")
    inside = {name.removeprefix(base): name for name in names if name.startswith(base) and format_of(name)[0]
              and os.path.basename(name) not in finder.FILES_TO_IGNORE}

    def resolve(pattern: str) -> list[str]:
        return [*filter(_glob_pattern(pattern.removeprefix("./"), case).match, inside)]

    files = params.get("data_files")
    case = 0 if files is not None else re.IGNORECASE  # Test.jsonl is a test split
    patterns = finder.DEFAULT_PATTERNS_ALL if not inside else finder.sanitize_patterns(
        files) if files is not None else finder._get_data_files_patterns(resolve)
    if patterns == finder.DEFAULT_PATTERNS_ALL:
        return {ALL: [*inside.values()]}, bool(configs)
    return {str(split): sorted({inside[name] for pattern in those for name in resolve(pattern)})
            for split, those in patterns.items()}, bool(configs)


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
