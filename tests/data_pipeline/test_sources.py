"""Records arrive whole and in order, and what cannot be used is refused by file and line."""

import bz2
import csv
import gzip
import json
import lzma
import os
import re
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import fsspec
import huggingface_hub
import pandas
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard

from common.errors import DataError, SettingsError
from data_pipeline import source_files, sources
from data_pipeline.source_files import Source, identify, source_of
from data_pipeline.sources import Reading, read_records, read_texts


def datasets():
    """The library; not imported with this file, which each worker of pytest does."""
    return pytest.importorskip("datasets")


def test_a_parquet_file_that_unpacks_into_gigabytes_is_read_by_rows_or_refused(tmp_path, monkeypatch):
    """570 bytes stand for a megabyte in each row, as each refers to the same text."""
    path = tmp_path / "a.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array(3 * [0], pa.int32()), pa.array([2**19 * "a "]))
    pq.write_table(pa.table({"text": texts}), path, compression="zstd")
    file = source_files.StoredFile(fsspec.filesystem("file"), str(path), path.stat().st_size, "parquet", None)
    with open(path, "rb") as raw:
        assert 200 < sources._rows_at_once(file, raw) < 300
        monkeypatch.setattr(sources, "LARGEST_COLUMN", 2**20 - 1)
        with pytest.raises(DataError, match="unpacks into"):
            sources._rows_at_once(file, raw)


def texts_of(path, skip_bad=False, **fields):
    reading, source = Reading(skip_bad=skip_bad), path if isinstance(path, Source) else Source(path=str(path), **fields)
    return [document.text for document in read_texts(source, reading)], reading


def jsonl(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.mark.parametrize("line, reason", [
    (b'["a", "list"]', "expected one JSON object per line, got a list (an array of records belongs in a .json file)"),
    (b'{"body": "x"}', "has no column 'text'; it has 'body'"),
    (b'{"text": null}', "column 'text' is null"),
    (b'{"text": "a\\u0000b"}', "contains a NUL at character 2"),
    (b'{"text": "a\x00b"}', "not valid JSON: Invalid control character at character 12"),
    (b'{"text": "a"', "not valid JSON: Expecting ',' delimiter at character 14"),
    (b'{"text": "ab\\ud800"}', "contains a lone surrogate at character 3"),
    (b'{"text": "\xff"}', "byte 11 of the line is not UTF-8"),
    (b'{"text": "a", "meta": {"id": 1, "id": 2}}', "not valid JSON: an object has 'id' 2 times; keep one"),
], ids=lambda value: "" if isinstance(value, bytes) else value)
def test_a_bad_record_is_refused_by_line_or_skipped_and_listed(tmp_path, line, reason):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "last"}\n')
    with pytest.raises(DataError) as refused:
        texts_of(path)
    assert f"{path}:2: " in str(refused.value) and reason in str(refused.value)
    texts, reading = texts_of(path, skip_bad=True)
    assert texts == ["first", "last"] and reading.bad == 1
    assert len(reading.bad_records) == 1 and f"{path}:2" in reading.bad_records[0] and reason in reading.bad_records[0]


def test_bom_crlf_blank_lines_long_lines_and_odd_unicode_are_read(tmp_path):
    texts = ["plain", "x" * 10_000_000, "👩‍👩‍👧 e\u0301 \u200d", "<|eot_id|>\r\n"]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + jsonl(*texts, "", " \n\t").replace("\n", "\r\n\r\n").encode())
    found, reading = texts_of(path)
    assert found == texts and reading.empty == 2


def test_lines_that_end_in_cr_alone_are_lines_however_long_the_first_one_is(tmp_path):
    """The first line is longer than what is read at once. CR within lines is text, also where a preparation goes on with the last line."""
    lines, path = ["x" * (2 * sources.START_BYTES), "two", "three"], tmp_path / "x.txt"
    for end in ("", "\r"):
        path.write_text("\r".join(lines) + end, newline="")
        assert [text.strip() for text in texts_of(path, documents="line")[0]] == lines
        (tmp_path / "x.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
        assert [text.strip() for text in texts_of(tmp_path / "x.txt.gz", documents="line")[0]] == lines
    path.write_text("one\nt\rw\ro", newline="")
    for start, expected in ((sources.Position(), ["one\n", "t\rw\ro"]), (sources.Position(record=1, offset=4), ["t\rw\ro"])):
        assert [record[""] for _, record in rows_of(path, start=start)[0]] == expected
    path.write_text("one\rtwo\rthree", newline="")
    assert [record[""] for _, record in rows_of(path, start=sources.Position(record=1, offset=4))[0]] == ["two\n", "three"]


@pytest.mark.parametrize("name", ["a.txt", "a.TXT.gz"])
def test_json_lines_in_a_text_file_are_refused_and_both_ways_out_work(tmp_path, name):
    pack = gzip.compress if name.endswith(".gz") else bytes
    path = tmp_path / name
    path.write_bytes(pack(jsonl("one", "two").encode()))
    with pytest.raises(DataError, match=r": its first lines are JSON objects; rename it to \.jsonl, or to \.raw to train"):
        texts_of(path)
    assert texts_of(path.rename(tmp_path / name.lower().replace("txt", "jsonl")))[0] == ["one", "two"]
    path.write_bytes(pack(jsonl("one").encode()))
    assert texts_of(path.rename(tmp_path / name.lower().replace("txt", "raw")))[0] == [jsonl("one")]
    path.write_bytes(pack(b"{a}\n" + jsonl("one").encode()))
    assert texts_of(path)[0] == ["{a}\n" + jsonl("one")]


def rows_of(path, skip_bad=False, start=sources.Position()):
    reading = Reading(skip_bad=skip_bad, start=start)
    return [*read_records(Source(path=str(path), split="", column=""), reading)], reading


@pytest.mark.parametrize("style", [{}, {"sep": ";"}, {"sep": "\t"}, {"quoting": csv.QUOTE_ALL}, {"lineterminator": "\r\n"},
                                   {"encoding": "utf-8-sig"}, {"compression": "gzip"}])
def test_csv_is_read_as_datasets_reads_it_with_the_lines_of_its_rows(tmp_path, style):
    records = [{"prompt": prompt, "answer": answer} for prompt, answer in (
        ("a, b; c\td", "007"), ("two\nlines", "1"), ('says "no"', "72.0"), ("é\u2028 👩‍👩‍👧", "NA"), (" x ", None), ("last", "null"))]
    path = tmp_path / ("x.tsv" if style.get("sep") == "\t" else "x.csv.gz" if "compression" in style else "x.csv")
    pandas.DataFrame(records).to_csv(path, index=False, **style)
    found, _ = rows_of(path)
    assert [record for _, record in found] == records
    assert [where.rpartition(":")[2] for where, _ in found] == ["2", "3", "5", "6", "7", "8"]
    library = datasets()
    texts = library.Features({name: library.Value("string") for name in records[0]})
    table = library.load_dataset("csv", data_files=str(path), split="train", features=texts, keep_default_na=False, cache_dir=str(tmp_path / "cache"),
                                 **({"sep": style["sep"]} if "sep" in style else {}))
    assert [{name: value or None for name, value in row.items()} for row in table] == records
    # An interrupted preparation continues at a row.
    assert [*rows_of(path, start=sources.Position(record=3))[0]] == found[3:]


def test_all_writings_of_a_text_are_held_out_together():
    """Case as Unicode folds it, ligatures, accents in two forms, any white space, and what nobody sees."""
    assert {*map(sources.identity_of, ["\ufeffa zebra", "a\u200b ze\u00adbra", "a zebra\ufe0f", "a\r\nzebra\u200e"])} == {"a zebra"}
    assert sources.identity_of("e\u0301") != sources.identity_of("e"), "an accent is seen"
    assert sources.identity_of(" STRASSE\u00a0\n\ufb01ne e\u0301") == sources.identity_of("straße fine \u00e9") == "strasse fine \u00e9"


@pytest.mark.parametrize("name", ["x.csv", "x.csv.gz", "x.jsonl", "x.jsonl.gz", "x.json", "x.parquet"])
def test_reading_goes_on_with_the_record_at_whose_position_it_stopped(tmp_path, name):
    """In either of two files, and also on the lines of values with line ends and of blank lines."""
    for number in range(2):
        table, path = pandas.DataFrame({"text": [f"{number} {row}\nword" for row in range(5)]}), tmp_path / f"{number}-{name}"
        {".csv": partial(table.to_csv, index=False), ".json": partial(table.to_json, orient="records"), ".parquet": table.to_parquet}.get(
            path.name.replace(".gz", "").removeprefix(f"{number}-x"), partial(table.to_json, orient="records", lines=True))(path)
    reading = Reading()
    found = [(record, reading.item or reading.position) for record in read_records(Source(path=str(tmp_path)), reading)]
    assert len(found) == 10
    for index, (_, position) in enumerate(found):
        after = [*read_records(Source(path=str(tmp_path)), Reading(start=position))]
        assert after == [record for record, _ in found[index:]]


@pytest.mark.parametrize("suffix, packed", [("gz", gzip), ("bz2", bz2), ("xz", lzma), ("zst", zstandard)])
def test_packed_files_are_read_and_one_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch, suffix, packed):
    """So is one that was cut off, or goes on otherwise."""
    path, whole = tmp_path / f"x.txt.{suffix}", packed.compress(b"".join(b"line %d\n" % number for number in range(500)))
    for content in (whole[:-1], whole[:len(whole) // 2], whole[:12], whole + whole[:-3],
                    whole + b"\n", whole + b"junk" * 30_000, 2 * whole + b"{}\n" * 9):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{path.name}: .*; check that it exists, is complete and can be read"):
            texts_of(path)
    for between in (b"", packed.compress(b""), *([b"\0" * 100_000] if suffix != "zst" else [])):  # zeros as from a tape
        path.write_bytes(whole + between + whole + between)
        assert len(texts_of(path, documents="line")[0]) == 1000
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(sources, "MAX_ARRAY_BYTES", 1 << 20)
    for name, start, reason in (("x.jsonl", jsonl("one"), ":2: the line"), ("x.json", "[", ": the array")):
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(packed.compress((start + "0" * (1 << 21)).encode()))
        with pytest.raises(DataError, match=f"{path.name}{reason} has more than 1 MiB"):
            texts_of(path)


@pytest.mark.parametrize("documents, expected", [
    ("whole", [" = A = \n\none\ntwo\n\n = = sub = = \n---\n = B = \nthree"]),
    ("line", [" = A = \n", "one\n", "two\n", " = = sub = = \n", "---\n", " = B = \n", "three"]),
    ("blank", [" = A = \n", "one\ntwo\n", " = = sub = = \n---\n = B = \nthree"]),
    ("wikitext", [" = A = \n\none\ntwo\n\n = = sub = = \n---\n", " = B = \nthree"]),
    ("---", [" = A = \n\none\ntwo\n\n = = sub = = \n", " = B = \nthree"]),
])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_text_is_cut_into_documents_as_asked(tmp_path, documents, expected, newline):
    path = tmp_path / "x.txt"
    text = " = A = \n\none\ntwo\n\n = = sub = = \n---\n = B = \nthree"
    for end in ("\n", ""):
        path.write_text(text + end, newline=newline)
        assert texts_of(path, documents=documents)[0] == [*expected[:-1], expected[-1] + end]
    with pytest.raises(DataError, match="no line equals 'paragraphs'.* whole, line, blank, wikitext"):
        texts_of(path, documents="paragraphs")


def test_every_kind_of_file_in_a_folder_or_glob_is_read_in_the_order_of_names(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl("one", "two").encode()))
    pq.write_table(pa.table({"text": ["three", "four"], "other": [1, 2]}), tmp_path / "b.parquet")
    (tmp_path / "deep" / "c.txt").write_text("five")
    (tmp_path / "README.md").write_text("no data")
    (tmp_path / ".hidden.txt").write_text("no data")
    os.mkfifo(tmp_path / "pipe.jsonl")  # which would be waited for
    assert texts_of(tmp_path)[0] == ["one", "two", "three", "four", "five"]
    assert texts_of(f"{tmp_path}/*.parquet")[0] == ["three", "four"]
    reading = Reading()
    records_read = list(read_records(Source(path=str(tmp_path)), reading))
    assert records_read[2] == (f"{tmp_path}/b.parquet: row 1", {"text": "three"})
    assert reading.bytes_done == reading.bytes_total > 0


def test_any_fsspec_url_is_read():
    with fsspec.open("memory://corpus/x.jsonl", "wb") as file:
        file.write(jsonl("far", "away").encode())
    assert texts_of("memory://corpus/*.jsonl")[0] == ["far", "away"]
    with pytest.raises(DataError, match="memory://corpus/none"):
        texts_of("memory://corpus/none.jsonl")


RECORDS = [{"text": "one, ] \" \\u00e9 é 👩‍👧 \u2028"}, {"text": "", "n": [1.5, {"a": [None, True]}]}, {}, {"text": "x" * 300}]


@pytest.mark.parametrize("how", [{}, {"indent": 4}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_an_array_is_what_json_reads_in_it_however_it_is_written(tmp_path, how):
    path = tmp_path / "x.json"
    for around in (" \r\n\t{}\n", "\ufeff{}"):
        written = around.format(json.dumps(RECORDS, **how))
        path.write_text(written, newline="")
        found, reading = rows_of(path)
        assert [record for _, record in found] == RECORDS and reading.bytes_done == reading.bytes_total
        for number, (where, record) in enumerate(found, 1):
            line, item = re.fullmatch(rf"{path}:(\d+) \(item (\d+)\)", where).groups()
            assert int(item) == number and (not record or written.split("\n")[int(line) - 1].lstrip("[ \t\ufeff")[0] == "{")
    path.write_text(" [ ]\n")
    assert rows_of(path)[0] == []
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(written.encode()))
    assert [record for _, record in rows_of(tmp_path / "x.json.gz")[0]] == RECORDS


@pytest.mark.parametrize("content, reason", [
    ('[{"a": 1},\n {"b": tru}]\n\n', ":2: not valid JSON: Expecting value"),
    ('[{"a": 1},\n {"b": 2}', ":2: not valid JSON: expected , or ]"),
    ('[{"a": 1},\n {"b": "2', ":2: not valid JSON: Unterminated string"),
    ('[{"a": 1}\n {"b": 2}]', ":1: not valid JSON: expected , or ]"),
    ('[{"a": 1},\n]', ":2: not valid JSON: Expecting value"),
    ('[{"a": 1}]\n[]', ":1: not valid JSON: expected , or ]"),
    ("[" * 100_000, ":1: not valid JSON: "), ('[\n{"a": ' + "1" * 5000 + "}]", ":2: not valid JSON: ")], ids=range(8))
def test_an_array_that_is_not_valid_json_is_refused_by_line(tmp_path, content, reason):
    (tmp_path / "x.json").write_text(content)
    for skip_bad in (False, True):
        with pytest.raises(DataError, match=re.escape(f"x.json{reason}")):
            rows_of(tmp_path / "x.json", skip_bad)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two splits, saved as one data set, as a dictionary, and with a cache of `datasets` beside them."""
    folder = tmp_path_factory.mktemp("saved")
    train = datasets().Dataset.from_dict({"text": [f"train {number}" for number in range(2300)], "n": range(2300)})
    test = datasets().Dataset.from_dict({"text": ["test"]})
    train.save_to_disk(folder / "one", num_shards=3)
    datasets().DatasetDict(train=train, test=test).save_to_disk(folder / "both")
    datasets().load_from_disk(folder / "one").map(lambda row: {"text": row["text"].upper()})
    assert list((folder / "one").glob("cache-*.arrow"))
    return folder


def test_a_folder_that_datasets_saved_is_read_by_split(saved):
    texts = [f"train {number}" for number in range(2300)]
    for source in ("one", "both", "both/train", "one/data-*.arrow"):
        assert texts_of(saved / source)[0] == texts, source
    assert texts_of(saved / "both", split="test")[0] == ["test"]
    reading = Reading()
    where, record = list(read_records(Source(path=str(saved / "one"), column=""), reading))[1000]
    assert (where, record) == (f"{saved}/one/data-00001-of-00003.arrow: row 234", {"text": "train 1000", "n": 1000})
    assert reading.bytes_done == reading.bytes_total
    with pytest.raises(DataError, match="both has no split 'val', only train, test; choose one with --split"):
        texts_of(saved / "both", split="val")
    with pytest.raises(DataError, match="has folders saved by `datasets`; use one, such as"):
        texts_of(saved)


def test_a_local_source_is_its_content_wherever_it_lies(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    for place in ("here/x.jsonl", "there/renamed.jsonl"):
        (tmp_path / place).write_text(jsonl("same"))
    known = {}
    here = identify(Source(path=str(tmp_path / "here")), known)
    assert here == identify(Source(path=str(tmp_path / "there")), {})
    assert here != identify(Source(path=str(tmp_path / "here"), column="body"), known)
    hashed = []
    assert here == identify(Source(path=str(tmp_path / "here")), known, hashed.append) and not hashed
    (tmp_path / "here" / "x.jsonl").write_text(jsonl("Same"))
    assert here != identify(Source(path=str(tmp_path / "here")), known, hashed.append) and hashed


def test_what_a_user_types_is_a_shortcut_a_path_or_a_hub_name(tmp_path):
    assert source_of("fineweb-edu").name == "HuggingFaceFW/fineweb-edu"
    assert source_of("wikitext", config="wikitext-2-raw-v1") == Source(
        name="Salesforce/wikitext", config="wikitext-2-raw-v1", documents="wikitext")
    assert source_of(str(tmp_path)).path and source_of("s3://bucket/x").path and source_of("x/*.gz").path
    assert source_of("missing.jsonl").path and source_of("owner/dataset").name


def test_a_hub_dataset_is_streamed_at_the_commit_of_its_identity(tmp_path, monkeypatch):
    (tmp_path / "train.jsonl").write_text(jsonl(" = A = \n", "one\n", "", " = B = \n"))
    monkeypatch.setattr(sources.remote_data, "hub_revision", lambda *named: "c0ffee")
    source = Source(name=str(tmp_path), documents="wikitext")
    assert identify(source, {})["revision"] == "c0ffee"
    assert texts_of(source)[0] == [" = A = \none\n", " = B = \n"]
    with pytest.raises(DataError, match="row 1: has no column 'body'"):
        texts_of(Source(name=str(tmp_path), column="body"))


def test_all_that_decides_the_rows_of_a_hub_dataset_is_in_its_identity(monkeypatch):
    monkeypatch.setattr(sources.remote_data, "hub_revision", lambda name, revision, config: revision or COMMIT)
    changes = {"name": "other/texts", "config": "small", "split": "test", "revision": "v1", "files": "en/*.gz", "column": "body",
               "map": "text=body", "documents": "line"}
    assert {field.name for field in fields(Source)} == {*changes, "path"}
    source = Source(name="my/texts")
    identities = [json.dumps(identify(replace(source, **{name: value}), {})) for name, value in changes.items()]
    assert len({json.dumps(identify(source, {})), *identities}) == 1 + len(changes)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets().config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets().config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


def test_a_snapshot_in_the_hub_s_cache_is_read_offline_if_it_is_whole(offline):
    repository = offline / "hub" / "datasets--my--Texts"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "refs", repository / "trees", repository / "blobs", snapshot / "data"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "README.md").write_text("---\nconfigs:\n- config_name: small\n  data_files: data/a*.jsonl\n---\n")
    for name in ("a1", "a2", "b"):
        (repository / "blobs" / name).write_text(jsonl(name))
        (snapshot / "data" / f"{name}.jsonl").symlink_to(repository / "blobs" / name)
    source = Source(name="my/Texts", config="small")
    with pytest.raises(DataError, match="request to the hub failed: .*no local copy has its config 'small'"):
        identify(source, {})  # nobody knows whether the snapshot is whole
    files = {str(path.relative_to(snapshot)): {"size": 1, "blob_id": "0"} for path in snapshot.rglob("*.*")}
    (repository / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    assert identify(source, {})["revision"] == COMMIT
    assert texts_of(source)[0] == texts_of(replace(source, revision=COMMIT))[0] == ["a1", "a2"]
    assert texts_of(replace(source, config="", files="data/b.jsonl"))[0] == ["b"]
    (snapshot / "data" / "b.jsonl").unlink()
    with pytest.raises(DataError, match="request to the hub failed"):
        identify(source, {})


def write_tree(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = jsonl(name).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


README = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: a/*.jsonl}
  - {split: quiz, path: ["b/one.jsonl", "b/two.jsonl"]}
- config_name: hard
  data_dir: c
---
"""


@pytest.mark.parametrize("names, splits", [
    (["train.jsonl", "validation.jsonl", "test.jsonl"], {"train": [0], "validation": [1], "test": [2]}),
    (["train.jsonl.gz", "dev.jsonl.gz"], {"train": [0], "validation": [1]}),
    (["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/quiz-00000-of-00001.jsonl", "x.jsonl"],
     {"train": [0, 1], "quiz": [2]}),
    (["data/train/a.jsonl", "data/test/a.jsonl", "data/more.jsonl"], {"train": [0], "test": [1]}),
    (["my_train_1.jsonl", "my-train.2.jsonl", "eval.jsonl", "training.txt.jsonl"], {"train": [0, 1, 3], "test": [2]}),
    (["deep/a/train.jsonl", "deep/b/train.jsonl", "deep/b/val 1.jsonl"], {"train": [0, 1], "validation": [2]}),
    (["trainer.jsonl", "latest.jsonl", "contest.jsonl"], {}),
])
def test_a_folder_is_split_as_datasets_splits_it(tmp_path, names, splits):
    folder = tmp_path / "my [corpus] #1 50%"
    write_tree(folder, *names)
    write_tree(folder, ".hidden/train.jsonl", ".test.jsonl", "__pycache__/train.jsonl")
    for split in [None, *splits]:
        expected = splits.get(split or "train", [*range(len(names))])
        assert texts_of(folder, split=split)[0] == sorted(names[place] for place in expected), split
    if splits:
        # The library itself, in a folder whose name it does not take for a glob.
        plain = folder.rename(tmp_path / "plain")
        loaded = datasets().load_dataset(str(plain), cache_dir=str(tmp_path / "cache"))
        assert {split: sorted(rows["text"]) for split, rows in loaded.items()} == {
            split: sorted(names[place] for place in places) for split, places in splits.items()}
        with pytest.raises(DataError, match=f"has no split 'nonsense', only {', '.join(splits)}; choose one with --split"):
            texts_of(plain, split="nonsense")
    else:
        with pytest.raises(SettingsError, match="--split train has no effect on .*no splits.*; remove it"):
            texts_of(folder, split="train")


def test_the_configs_in_a_readme_say_which_files_are_read(tmp_path, capsys):
    write_tree(tmp_path, "a/x.jsonl", "b/one.jsonl", "b/two.jsonl", "c/train.jsonl", "c/test.jsonl", "d.jsonl")
    (tmp_path / "README.md").write_text(README)
    for config, reason in (("", "has several configs"), ("odd", "has no config 'odd'")):
        with pytest.raises(DataError, match=f"{reason}; choose one with --config-name: easy, hard"):
            texts_of(tmp_path, config=config)
    assert texts_of(tmp_path, config="easy")[0] == ["a/x.jsonl"]
    assert "reading 1 file of split train; not read: 3 in no split (c/test.jsonl, c/train" in capsys.readouterr().err
    assert texts_of(tmp_path, config="easy", split="quiz")[0] == ["b/one.jsonl", "b/two.jsonl"]
    assert texts_of(tmp_path, config="hard", split="test")[0] == ["c/test.jsonl"]


@pytest.mark.parametrize("source, traits, refused", [
    ({"name": "my/texts", "config": "x"}, {"hub"}, ""), ({"path": "x", "config": "x"}, {"records", "splits"}, "--config-name"),
    ({"path": "x", "split": "x"}, {"records", "splits"}, ""), ({"path": "x", "split": "x"}, {"text", "records"}, "--split"),
    ({"path": "x", "column": "x"}, {"text", "records"}, ""), ({"path": "x", "column": "x"}, {"text"}, "--column"),
    ({"path": "x", "map": "text=body"}, {"text"}, "--map"), ({"path": "x", "revision": "x"}, {"records"}, "--revision"),
    ({"name": "my/texts", "files": "*.gz"}, {"files"}, ""), ({"path": "x", "files": "*.gz"}, {"records"}, "--files"),
    ({"path": "x", "documents": "blank"}, {"records"}, ""), ({"path": "x", "documents": "line"}, {"records"}, "--documents line")])
def test_a_flag_has_an_effect_or_is_refused(source, traits, refused):
    with pytest.raises(SettingsError, match=f"{refused} .*has no effect") if refused else nullcontext():
        source_files.check_flags(Source(**source), traits)


def test_all_bad_records_of_a_file_are_reported_at_once_and_later_files_are_not_read(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(13 * '{"text": "good"}\n{"text": 1}\n{"body": ""}\n')
    with pytest.raises(DataError) as refused:
        texts_of(tmp_path)
    file = f"{tmp_path}/a.jsonl"
    assert str(refused.value).split("\n") == [
        "26 bad records; correct the data, or skip such records: --on-bad-record skip",
        f"{file}:2: column 'text' is a number, expected text (also {file}:5 and 11 more)",
        f"{file}:3: has no column 'text'; it has 'body' (--column) (also {file}:6 and 11 more)"]


@pytest.mark.parametrize("packed, unpacked, rows", [(10_000, 1_000_000, 1000), (10_000, 1_000_001, 268), (1, 2**28 // 999, 999), (1, 2**30, 1)])
def test_a_column_counts_as_repeated_above_a_hundred_times_its_size_and_its_rows_fill_a_quarter_of_a_gigabyte(packed, unpacked, rows, monkeypatch):
    column = SimpleNamespace(total_uncompressed_size=unpacked, total_compressed_size=packed)
    table = SimpleNamespace(num_row_groups=1, num_columns=1, row_group=lambda group: SimpleNamespace(column=lambda number: column))
    monkeypatch.setattr("pyarrow.parquet.read_metadata", lambda raw: table)
    assert sources._rows_at_once(SimpleNamespace(url="x.parquet"), None) == rows


@pytest.mark.parametrize("content, reason", [
    (b"text,id\nfirst,1\na,b,2\nlast,3\n", ":3: has 3 values for 2 columns; values with ',' or line ends must be in quotes"),
    (b"text,id\nfirst,1\nun tres bel \xe9t\xe9,2\nlast,3\n", ":3: has bytes that are not UTF-8; correct the data.* save it as UTF-8, for example with: iconv -f WINDOWS-1252"),
    (b'text,id\nfirst,1\n"a"b,2\n', ":3: this row is not valid CSV: ',' expected after '\"'; correct it"),
    (b'text,id\nfirst,1\n"a,2\nb,3\n"c",4\n', ":3: this row is not valid CSV: ',' expected after '\"' in line 5; correct"),
    (b"text,text\nfirst,1\n", ":1: two columns have one name: .*; rename one")])
def test_a_bad_row_of_csv_is_named_by_line(tmp_path, content, reason):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        rows_of(tmp_path / "x.csv")
    if b"last" in content:
        found, reading = rows_of(tmp_path / "x.csv", skip_bad=True)
        assert [record["text"] for _, record in found] == ["first", "last"] and reading.bad == 1


def test_files_that_are_missing_empty_hidden_or_of_another_kind_are_named(tmp_path, capsys):
    write_tree(tmp_path, "x-00000-of-00003.jsonl", "x-00002-of-00003.jsonl", ".a.jsonl", "LICENSE.txt")
    (tmp_path / "LICENSE.txt").write_text("Permission is granted")
    (tmp_path / "c.jsonl").touch()
    assert len(texts_of(tmp_path)[0]) == 3
    assert ("reading 3 files, 2 of jsonl (x-00000-of-00003.jsonl, x-00002-of-00003.jsonl); 1 of plain text (LICENSE.txt); not read: "
            "1 empty (c.jsonl); 1 hidden (.a.jsonl); 1 missing (x-00001-of-00003.jsonl)") in capsys.readouterr().err


def test_a_file_with_the_content_of_another_one_is_named(tmp_path, capsys):
    for name, text in (("a", "one"), ("a (1)", "one"), ("b", "two"), ("empty", ""), ("empty too", "")):
        (tmp_path / f"{name}.jsonl").write_text(jsonl(text) if text else "")
    identify(Source(path=str(tmp_path)), {})
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [f"{tmp_path}/a.jsonl has the content of {tmp_path}/a (1).jsonl, and is read too"]
