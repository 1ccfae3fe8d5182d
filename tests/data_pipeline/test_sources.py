"""Records arrive whole and in order, and what cannot be used is refused by file and line."""

import bz2
import csv
import gzip
import importlib
import json
import lzma
import os
import re
import shutil
import subprocess
from dataclasses import fields, replace
from functools import partial

import huggingface_hub
import pandas
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard

from common.errors import DataError, SettingsError
from data_pipeline import filters, sources
from data_pipeline.chats import read_examples
from data_pipeline.sources import (
    Reading,
    Source,
    identify,
    read_records,
    read_texts,
    source_of,
    validation_split,
)
from extensions.inference.text import read_prompts


def datasets():
    """The library; not imported with this file, which each worker of pytest does."""
    return pytest.importorskip("datasets")


@pytest.mark.parametrize("rows, size, refused", [(3, 2**20, False), (1, 1100 * 2**20, True)])
def test_a_parquet_file_that_unpacks_into_gigabytes_is_read_by_rows_or_refused(rows, size, refused, tmp_path, monkeypatch):
    """570 bytes stand for a megabyte in each row, as each refers to the same text."""
    monkeypatch.setattr(sources, "LARGEST_COLUMN", 2**30 if not refused else 2**20)
    text = (min(size, 2**22) // 2) * "a "
    pq.write_table(pa.table({"text": pa.DictionaryArray.from_arrays(pa.array(rows * [0], pa.int32()), pa.array([text]))}), tmp_path / "a.parquet", compression="zstd")
    file = sources.StoredFile(*source_file(tmp_path / "a.parquet"))
    with open(tmp_path / "a.parquet", "rb") as raw:
        if refused:
            with pytest.raises(DataError, match="unpacks into"):
                sources._rows_at_once(file, raw)
        else:
            assert 200 < sources._rows_at_once(file, raw) < 300


def source_file(path):
    import fsspec
    return fsspec.filesystem("file"), str(path), path.stat().st_size, "parquet", None


@pytest.mark.parametrize("name, expected", [("https://127.0.0.1/c/x.jsonl?X-Amz-Signature=1.zip", ("jsonl", None)), ("https://127.0.0.1/x.txt.gz?a#b", ("text", "gzip")),
                                            ("what?.jsonl", ("jsonl", None))])
def test_the_format_of_a_presigned_url_is_that_of_its_path(name, expected):
    assert sources.format_of(name) == expected


def texts_of(path, skip_bad=False, **fields):
    reading = Reading(skip_bad=skip_bad)
    return [document.text for document in read_texts(Source(path=str(path), **fields), reading)], reading


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
    """Case as Unicode folds it, ligatures, accents in two forms and any white space."""
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


@pytest.mark.parametrize("content, reason", [
    (b"text,id\nfirst,1\na,b,2\nlast,3\n", ":3: has 3 values for 2 columns; values with ',' or line ends must be in quotes"),
    (b"text,id\nfirst,1\nun tres bel \xe9t\xe9,2\nlast,3\n", ":3: has bytes that are not UTF-8; correct the data.* convert it with: iconv -f WINDOWS-1252"),
    (b'text,id\nfirst,1\n"a"b,2\n', ":3: not valid CSV: ',' expected after '\"'; correct the file"),
    (b"text,text\nfirst,1\n", ":1: two columns have one name: .*; rename one")])
def test_a_bad_row_of_csv_is_named_by_line(tmp_path, content, reason):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        rows_of(tmp_path / "x.csv")
    if b"last" in content:
        found, reading = rows_of(tmp_path / "x.csv", skip_bad=True)
        assert [record["text"] for _, record in found] == ["first", "last"] and reading.bad == 1


def test_the_same_rows_in_two_formats_are_read_once_as_by_datasets_and_other_mixtures_are_named(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(jsonl("one", "two"))
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    assert datasets().load_dataset(str(tmp_path), split="train", cache_dir=str(tmp_path.parent / "cache"))["text"] == ["one", "two"]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl("one", "two").encode()))
    capsys.readouterr()
    assert texts_of(tmp_path)[0] == ["one", "two"]
    assert capsys.readouterr().err == f"{tmp_path}: reading 1 file; not read: 2 also in another format (a.jsonl, a.jsonl.gz)\n"
    assert len(texts_of(tmp_path / "a.*")[0]) == 2
    # Other names are other records, but perhaps not; descriptions of texts are told by their columns.
    (tmp_path / "b.jsonl").write_text(jsonl("three"))
    sources.remote_data.say_once.cache_clear()
    assert texts_of(tmp_path)[0] == ["one", "two", "three"]
    assert "reading 2 files, 1 of jsonl (b.jsonl); 1 of parquet (a.parquet); not read" in capsys.readouterr().err


@pytest.mark.parametrize("suffix, packed", [("gz", gzip), ("bz2", bz2), ("xz", lzma), ("zst", zstandard)])
def test_packed_files_are_read_and_one_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch, suffix, packed):
    path = tmp_path / f"x.jsonl.{suffix}"
    path.write_bytes(packed.compress(jsonl("one", "two").encode()))
    assert texts_of(path)[0] == ["one", "two"]
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(sources, "MAX_ARRAY_BYTES", 1 << 20)
    for name, start, reason in (("x.jsonl", jsonl("one"), ":2: the line"), ("x.json", "[", ": the array")):
        path = tmp_path / f"{name}.{suffix}"
        path.write_bytes(packed.compress((start + "0" * (1 << 21)).encode()))
        with pytest.raises(DataError, match=f"{path.name}{reason} has more than 1 MiB"):
            texts_of(path)


@pytest.mark.parametrize("suffix, packed", [("gz", gzip), ("bz2", bz2), ("xz", lzma), ("zst", zstandard)])
def test_a_packed_file_that_was_cut_off_or_goes_on_otherwise_is_an_error(tmp_path, suffix, packed):
    path, whole = tmp_path / f"x.txt.{suffix}", packed.compress(b"".join(b"line %d\n" % number for number in range(500)))
    for content in (whole[:-1], whole[:len(whole) // 2], whole[:12], whole + whole[:-3],
                    whole + b"\n", whole + b"junk" * 30_000, 2 * whole + b"{}\n" * 9):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{path.name}: .*; check that it exists, is complete and can be read"):
            texts_of(path)
    for between in (b"", packed.compress(b""), *([b"\0" * 100_000] if suffix != "zst" else [])):  # zeros as from a tape
        path.write_bytes(whole + between + whole + between)
        assert len(texts_of(path, documents="line")[0]) == 1000


def test_an_arrow_stream_without_its_end_is_named(tmp_path, capsys):
    table = pa.table({"text": ["a", "b", "c", "d"]})
    with pa.ipc.new_stream(tmp_path / "x.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=2)
    assert texts_of(tmp_path / "x.arrow")[0] == ["a", "b", "c", "d"] and not capsys.readouterr().err
    end = len(sources.ARROW_END)
    assert (tmp_path / "x.arrow").read_bytes()[-end:] == sources.ARROW_END
    os.truncate(tmp_path / "x.arrow", os.path.getsize(tmp_path / "x.arrow") - end)
    texts_of(tmp_path / "x.arrow")
    assert "x.arrow: has no end mark; if its writer was stopped between two batches, rows are missing" in capsys.readouterr().err


def test_a_column_of_a_type_that_cannot_be_read_is_named(tmp_path):
    table = pa.table({"text": ["a"], "tags": pa.array([[("x", "y")]], pa.map_(pa.string(), pa.string()))})
    pq.write_table(table, tmp_path / "x.parquet")
    for open_file, name in ((pa.ipc.new_stream, "stream.arrow"), (pa.ipc.new_file, "file.arrow")):
        with open_file(tmp_path / name, table.schema) as file:
            file.write_table(table)
    for name in ("x.parquet", "stream.arrow", "file.arrow"):
        with pytest.raises(DataError, match=rf"{name}: column 'tags' has the type map<string, string.*drop the column"):
            texts_of(tmp_path / name)


def test_what_is_empty_is_named(tmp_path, capsys):
    with pytest.raises(DataError, match=f"{tmp_path}: the folder is empty; check the path"):
        texts_of(tmp_path)
    write_tree(tmp_path, ".a.jsonl", "sub/b.jsonl")
    (tmp_path / "sub" / "c.jsonl").touch()
    with pytest.raises(DataError, match=r"sub\*: no file to read, only 1 folders that match \(.*sub\); check the path"):
        texts_of(f"{tmp_path}/sub*")
    assert texts_of(tmp_path)[0] == ["sub/b.jsonl"]
    assert "reading 1 file; not read: 1 empty (sub/c.jsonl); 1 hidden (.a.jsonl)" in capsys.readouterr().err


def test_missing_files_of_a_set_and_plain_text_among_records_are_named(tmp_path, capsys):
    write_tree(tmp_path, "x-00000-of-00003.jsonl", "x-00002-of-00003.jsonl", "y-00001-of-00002.jsonl", "y-00002-of-00002.jsonl", "LICENSE.txt")
    assert len(texts_of(tmp_path)[0]) == 5
    assert capsys.readouterr().err == (
        f"{tmp_path}: reading 5 files, 4 of jsonl (x-00000-of-00003.jsonl, x-00002-of-00003.jsonl, "
        "y-00001-of-00002.jsonl, ...); 1 of plain text (LICENSE.txt); not read: 1 missing (x-00001-of-00003.jsonl)\n")
    with pytest.raises(DataError, match="LICENSE.txt:1: is not a chat: it has a line of plain text, expected messages"):
        [*read_examples("chats", Source(path=str(tmp_path / "LICENSE.txt")), Reading())]


def test_the_names_of_splits_may_have_capitals(tmp_path):
    write_tree(tmp_path, "Train.jsonl", "TEST.jsonl", "Dev.JSONL")
    assert [texts_of(tmp_path, split=split)[0] for split in (None, "test", "validation")] == [["Train.jsonl"], ["TEST.jsonl"], ["Dev.JSONL"]]


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
    import fsspec

    with fsspec.open("memory://corpus/x.jsonl", "wb") as file:
        file.write(jsonl("far", "away").encode())
    assert texts_of("memory://corpus/*.jsonl")[0] == ["far", "away"]
    with pytest.raises(DataError, match="memory://corpus/none"):
        texts_of("memory://corpus/none.jsonl")


def array_of(path, content, skip_bad=False):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    reading = Reading(skip_bad=skip_bad)
    return list(read_records(Source(path=str(path), column=""), reading)), reading


RECORDS = [{"text": "one, ] \" \\u00e9 é 👩‍👧 \u2028"}, {"text": "", "n": [1.5, {"a": [None, True]}]}, {}, {"text": "x" * 300}]


@pytest.mark.parametrize("how", [{}, {"indent": 4}, {"ensure_ascii": False, "separators": (",", ":")}])
def test_an_array_is_what_json_reads_in_it_however_it_is_written(tmp_path, how):
    for around in (" \r\n\t{}\n", "\ufeff{}"):
        written = around.format(json.dumps(RECORDS, **how))
        found, reading = array_of(tmp_path / "x.json", written)
        assert [record for _, record in found] == RECORDS and reading.bytes_done == reading.bytes_total
        for number, (where, record) in enumerate(found, 1):
            line, item = re.fullmatch(rf"{tmp_path}/x.json:(\d+) \(item (\d+)\)", where).groups()
            assert int(item) == number and (not record or written.split("\n")[int(line) - 1].lstrip("[ \t\ufeff")[0] == "{")
    assert array_of(tmp_path / "x.json", " [ ]\n")[0] == []
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(written.encode()))
    assert [record for _, record in read_records(Source(path=str(tmp_path / "x.json.gz"), column=""), Reading())] == RECORDS


@pytest.mark.parametrize("content, reason", [
    ('[{"a": 1},\n {"b": tru}]\n\n', ":2: not valid JSON: Expecting value"),
    ('[{"a": 1},\n {"b": 2}', ":2: not valid JSON: expected , or ]"),
    ('[{"a": 1},\n {"b": "2', ":2: not valid JSON: Unterminated string"),
    ('[{"a": 1}\n {"b": 2}]', ":1: not valid JSON: expected , or ]"),
    ('[{"a": 1},\n]', ":2: not valid JSON: Expecting value"),
    ('[{"a": 1}]\n[]', ":1: not valid JSON: expected , or ]"),
    ("[" * 100_000, ":1: not valid JSON: "),
    ('[\n{"a": ' + "1" * 5000 + "}]", ":2: not valid JSON: "),
], ids=["value", "cut off", "string", "comma", "last comma", "two", "deep", "digits"])
def test_an_array_that_is_not_valid_json_is_refused_by_line(tmp_path, content, reason):
    for skip_bad in (False, True):
        with pytest.raises(DataError, match=re.escape(f"x.json{reason}")):
            array_of(tmp_path / "x.json", content, skip_bad)


@pytest.mark.parametrize("how", [{}, {"indent": 1}])
def test_an_object_around_the_array_is_refused_and_the_advice_works(tmp_path, how):
    (tmp_path / "x.json").write_text(json.dumps({"version": 1, "data": [{"text": "a"}]}, **how))
    with pytest.raises(DataError, match="x.json:1: .*(write only it into a .json file|but not inside an object)"):
        texts_of(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps(json.loads((tmp_path / "x.json").read_text())["data"], **how))
    assert texts_of(tmp_path / "x.json")[0] == ["a"]


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


def test_an_arrow_file_with_an_index_is_read_and_a_damaged_one_is_an_error(saved, tmp_path):
    pyarrow.feather.write_feather(pa.table({"text": ["one", "two"]}), tmp_path / "x.arrow")
    assert texts_of(tmp_path / "x.arrow")[0] == ["one", "two"]
    whole = next((saved / "one").glob("data-*.arrow")).read_bytes()
    (tmp_path / "x.arrow").write_bytes(whole[:-len(whole) // 3])
    with pytest.raises(DataError, match="x.arrow: "):
        texts_of(tmp_path / "x.arrow")


@pytest.mark.parametrize("record, names, expected", [
    ({"id": "1", "dialogue": "A: hi\nB: ho", "summary": "They greet."}, "prompt=dialogue,completion=summary",
     ["A: hi\nB: ho", "They greet."]),
    ({"problem": "1+1?", "generated_solution": "2", "expected_answer": "2", "messages": [{"role": "user", "content": "no"}]},
     " prompt=problem, completion=generated_solution", ["1+1?", "2"]),
    ({"instruction": "Say it.", "response": "It.", "label": 0}, "instruction,output=response", ["Say it.", "It."]),
], ids=["samsum", "OpenMath", "own"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_columns_of_other_names_are_chats(tmp_path, record, names, expected, suffix):
    path = tmp_path / f"x.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        path.write_text(json.dumps([record] if suffix == "json" else record))
    source = Source(path=str(path), map=names)
    assert [message["content"] for chat in read_examples("chats", source, Reading()) for message in chat.messages] == expected
    with pytest.raises(DataError, match=f"x.{suffix}: ?.*1.*: has no column 'solution'; it has '{next(iter(record))}', .*--map"):
        list(read_examples("chats", replace(source, map="prompt=solution"), Reading()))


def test_a_text_of_another_name_is_read_and_names_count_in_the_identity_only_if_given(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "a", "text": "b"}\n')
    (tmp_path / "x.txt").write_text("a")
    assert texts_of(tmp_path / "x.jsonl", map="text=body")[0] == ["a"] and texts_of(tmp_path, map="text=body")[0] == ["a", "a"]
    plain, named = (identify(Source(path=str(tmp_path / "x.jsonl"), map=names), {}) for names in ("", "text=body"))
    assert "map" not in plain and {**plain, "map": {"text": "body"}} == named
    for wrong in ("=", "text", "text,body", "=body", "text=", "text=a,text=b", "text=a,", ","):
        with pytest.raises(SettingsError, match="--map .*: expected name=column"):
            texts_of(tmp_path / "x.jsonl", map=wrong)


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
    assert [document.text for document in read_texts(source, Reading())] == [" = A = \none\n", " = B = \n"]
    with pytest.raises(DataError, match="row 1: has no column 'body'"):
        list(read_texts(Source(name=str(tmp_path), column="body"), Reading()))


@pytest.mark.parametrize("files, split", [(["train", "validation"], "validation"), (["train", "dev"], "dev"), (["train", "test"], None)])
def test_validation_data_of_the_hub_is_the_split_of_that_name(files, split, tmp_path, capsys):
    for name in files:
        (tmp_path / f"{name}.jsonl").write_text(jsonl(name))
    configs = "".join(f"\n  - split: {name}\n    path: {name}.jsonl" for name in files)
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:{configs}\n---\n")
    source = Source(name=str(tmp_path))
    assert validation_split(source) == replace(source, split=split)
    assert f"for validation, its {split or 'train'} split is read" in capsys.readouterr().err
    assert validation_split(replace(source, split="test")).split == "test"


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
    """An empty cache of the hub and of `datasets`, and no network."""
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
    assert texts_in(source) == texts_in(replace(source, revision=COMMIT)) == ["a1", "a2"]
    assert texts_in(replace(source, config="", files="data/b.jsonl")) == ["b"]
    (snapshot / "data" / "b.jsonl").unlink()
    with pytest.raises(DataError, match="request to the hub failed"):
        identify(source, {})


def test_the_arrow_files_in_the_cache_of_datasets_are_read_offline(offline):
    folder = offline / "datasets" / "my___my_texts" / "default" / "0.0.0" / COMMIT
    for split in ("train", "test"):
        data = datasets().Dataset.from_dict({"text": [f"{split} {number}" for number in range(9)]})
        data.save_to_disk(offline / split)
        folder.mkdir(parents=True, exist_ok=True)
        next((offline / split).glob("*.arrow")).rename(folder / f"my_texts-{split}.arrow")
    splits = {split: {"name": split, "num_bytes": 1, "num_examples": 9, "dataset_name": "my_texts"} for split in ("train", "test")}
    (folder / "dataset_info.json").write_text(json.dumps({"config_name": "default", "splits": splits, "builder_name": "json",
                                                          "dataset_name": "my_texts", "version": {"version_str": "0.0.0"}}))
    # The library itself finds its cache there.
    assert [row["text"] for row in datasets().load_dataset("my/MyTexts", split="test")] == [f"test {number}" for number in range(9)]
    for split in ("train", "test"):
        source = Source(name="my/MyTexts", split=split)
        assert identify(source, {})["revision"] == COMMIT
        assert texts_in(source) == [f"{split} {number}" for number in range(9)]
    with pytest.raises(DataError, match="has no split 'val'"):
        texts_in(replace(source, split="val"))
    for other in (replace(source, config="big"), replace(source, revision="v2")):
        with pytest.raises(DataError, match="request to the hub failed"):
            identify(other, {})


def texts_in(source):
    return [document.text for document in read_texts(source, Reading())]


def write_tree(root, *names):
    """Write a file of one record, its own name, at each of these places below a folder."""
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
    write_tree(tmp_path, "a/x.jsonl", "b/one.jsonl", "b/two.jsonl", "c/train.jsonl", "c/test.jsonl", "d.jsonl", "image.png")
    (tmp_path / "README.md").write_text(README)
    with pytest.raises(DataError, match="has several configs; choose one with --config-name: easy, hard"):
        texts_of(tmp_path)
    with pytest.raises(DataError, match="has no config 'odd'; choose one with --config-name: easy, hard"):
        texts_of(tmp_path, config="odd")
    assert texts_of(tmp_path, config="easy")[0] == ["a/x.jsonl"]
    assert capsys.readouterr().err == (
        f"{tmp_path}: reading 1 file of split train; not read: 3 in no split (c/test.jsonl, c/train.jsonl, d.jsonl); "
        "2 of other formats (README.md, image.png); 2 of split quiz (b/one.jsonl, b/two.jsonl)\n")
    assert texts_of(tmp_path, config="easy", split="quiz")[0] == ["b/one.jsonl", "b/two.jsonl"]
    assert texts_of(tmp_path, config="hard", split="test")[0] == ["c/test.jsonl"]
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: default, data_files: moved/*}]\n---\n")
    with pytest.raises(DataError, match="has no split 'train', only empty ones; choose one with --split, or read all files"):
        texts_of(tmp_path)
    (tmp_path / "README.md").write_text("---\nconfigs: 3\n---\n")
    with pytest.raises(DataError, match="README.md: Expected configs to be a list"):
        texts_of(tmp_path)


def test_evaluation_items_of_all_splits_are_compared(tmp_path):
    for split in ("train", "test"):
        words = " ".join(f"{split}{number}" for number in range(13))
        (tmp_path / f"{split}.jsonl").write_text(jsonl(words))
    assert len(filters.EvaluationItems(str(tmp_path)).texts) == 2


def test_links_are_followed_and_a_loop_ends(tmp_path, capsys):
    write_tree(tmp_path / "far", "a.jsonl", "deep/b.jsonl")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own.jsonl").write_text(jsonl("own"))
    (folder / "blob.jsonl").symlink_to(tmp_path / "far" / "a.jsonl")
    (folder / "linked").symlink_to("../far")
    (folder / "linked too").symlink_to("../far")
    (tmp_path / "far" / "deep" / "up").symlink_to("../../folder")
    (tmp_path / "far" / "self").symlink_to(".")
    expected = ["a.jsonl", "a.jsonl", "deep/b.jsonl", "a.jsonl", "deep/b.jsonl", "own"]
    assert texts_of(folder)[0] == texts_of(f"{folder}/**")[0] == expected
    assert "reading 6 files; not read: 4 links back to a folder above (linked too/deep/up, linked too/self, " in capsys.readouterr().err
    assert texts_of(f"{folder}/*/*.jsonl")[0] == ["a.jsonl", "a.jsonl"] and texts_of(f"{folder}/*.jsonl")[0] == ["a.jsonl", "own"]
    (folder / "gone.jsonl").symlink_to("missing")
    with pytest.raises(DataError, match="gone.jsonl: is a link to missing, which does not exist; restore the file, or remove"):
        texts_of(folder)


@pytest.mark.parametrize("name", ["a[1].jsonl", "[x]/a*.jsonl", "what?.jsonl", "a::b.jsonl", "memory:/x.jsonl", "50% #1 ü .jsonl"])
def test_a_name_that_exists_is_that_file_whatever_it_contains(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path, name, "a1.jsonl", "x/ab.jsonl", "whats.jsonl")
    assert texts_of(name)[0] == texts_of(tmp_path / name)[0] == [name]
    folder = os.path.dirname(name)
    assert not folder or texts_of(folder)[0] == [name]
    assert texts_of("a[1].jsonl" if name != "a[1].jsonl" else "a[12].jsonl")[0] == ["a1.jsonl"]


# The fields of a source, and on which sources each has an effect.
TRAITS = {"text": {"text"}, "records": {"records"}, "folder": {"text", "records"}, "splits": {"records", "splits"},
          "configs": {"records", "splits", "configs"}, "hub": {"hub"}, "hub files": {"files"}}
USED = {"config": {"configs", "hub"}, "split": {"splits", "configs", "hub"}, "revision": {"hub", "hub files"}, "files": {"hub files"},
        "column": {*TRAITS} - {"text"}, "map": {*TRAITS} - {"text"}, "documents": {*TRAITS}}


@pytest.mark.parametrize("flag", sources.EFFECTS)
@pytest.mark.parametrize("kind", TRAITS)
def test_a_flag_has_an_effect_or_is_refused(flag, kind):
    place = {"name": "my/texts", "files": "*.gz" if kind == "hub files" else ""} if kind.startswith("hub") else {"path": "x"}
    values = {"documents": "blank", "map": "text=body"}
    source = Source(**{**place, flag: values.get(flag, "x")})
    if flag == "files" and kind == "hub":
        return  # that is the other kind
    if kind in USED[flag]:
        return sources.check_flags(source, TRAITS[kind])
    with pytest.raises(SettingsError, match=f"--{'config-name' if flag == 'config' else flag} .* has no effect on .*: .*remove"):
        sources.check_flags(source, TRAITS[kind])


def test_every_field_of_a_source_is_in_the_table():
    assert {*sources.EFFECTS} == {field.name for field in fields(Source)} - {"path", "name"}
    for documents in ("whole", "line"):
        with pytest.raises(SettingsError, match=f"--documents {documents} has no effect .*each row is a document"):
            sources.check_flags(Source(path="x", documents=documents), {"records"})


def test_a_file_whose_name_is_not_utf8_is_an_error(tmp_path):
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("one")
    with pytest.raises(DataError, match=r"\\udcff.txt: the file's name is not UTF-8; rename it"):
        texts_of(tmp_path)


def test_of_many_columns_the_error_lists_the_first(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({f"k{number}": 1 for number in range(100_000)}) + "\n")
    with pytest.raises(DataError, match="has no column 'text'; it has 'k0', .*'k19' and 99,980 more"):
        texts_of(tmp_path / "x.jsonl")


@pytest.mark.parametrize("count", [20, 50])
def test_all_bad_records_of_a_file_are_reported_at_once_and_later_files_are_not_read(tmp_path, count):
    lines = [('{"text": "good"}', '{"text": 1}', f'{{"text": "{"x" * number}\\u0000"}}', '{"body": ""}')[number % 4] for number in range(count)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError) as refused:
        texts_of(tmp_path)
    first, *places = str(refused.value).split("\n")
    number, file = sum(each % 4 > 0 for each in range(count)), f"{tmp_path}/a.jsonl"
    assert first == f"{number} bad records; correct the data, or skip such records: --on-bad-record skip"
    if count == 20:  # few are listed one by one
        assert [place.partition(": ")[0] for place in places] == [f"{file}:{each + 1}" for each in range(count) if each % 4]
    else:
        assert places == [f"{file}:2: column 'text' is a number, expected text (also {file}:6 and 11 more)",
                          f"{file}:3: column 'text' contains a NUL at character 3 (also {file}:7 and 10 more)",
                          f"{file}:4: has no column 'text'; it has 'body' (--column) (also {file}:8 and 10 more)"]


@pytest.mark.parametrize("splitter, kept", [
    ("whole", []), ("blank", ["first\n", "third\n"]), ("wikitext", [" = C = \nthird\n"]), ("---", ["first\n"])])
def test_a_document_with_a_bad_line_is_left_out_as_a_whole(tmp_path, splitter, kept):
    texts = {"blank": b"first\n\nsec\xff\nond\n\n\xff\n\nthird\n", "---": b"first\n---\nsecond\n\xff\n",
             "wikitext": b" = A = \nfirst\n\xff\n = B = \n\xff\n = C = \nthird\n"}
    path = tmp_path / "x.txt"
    path.write_bytes(texts.get(splitter, b"first\nsecond\nthird\n\xff\nfourth\n"))
    reading = Reading(skip_bad=True)
    assert [document.text for document in read_texts(Source(path=str(path), documents=splitter), reading)] == kept
    assert any("the document that begins here is left out" in record for record in reading.bad_records)
    with pytest.raises(DataError, match="byte . of the line is not UTF-8"):
        [*read_texts(Source(path=str(path), documents=splitter), Reading())]


@pytest.mark.skipif(not shutil.which("iconv"), reason="needs iconv")
@pytest.mark.parametrize("name, encoding", [
    ("my texts.txt", "cp1252"), ("x.jsonl", "cp1252"), ("x.json", "cp1252"), ("x.jsonl.gz", "cp1252"), ("x.txt.gz", "utf-16"), ("x.txt", "cp1251")])
def test_the_command_for_text_that_is_not_utf8_converts_it(tmp_path, name, encoding):
    text = "Однажды в студёную пору" if encoding == "cp1251" else "Il était une fois un café près de la forêt"
    record = json.dumps({"text": text}, ensure_ascii=False)
    content = f"{text}\n" if ".txt" in name else f"[{record}]" if name == "x.json" else f"{record}\n"
    path, data = tmp_path / name, content.encode(encoding)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(DataError) as refused:
        texts_of(path)
    assert ("WINDOWS-1252, as it seems" in str(refused.value)) == (encoding == "cp1252")
    command = str(refused.value).partition("with: ")[2].partition("\n")[0].replace("ENCODING", "WINDOWS-1251")
    subprocess.run(["bash", "-c", command], check=True)
    assert [found.strip() for found in texts_of(path)[0]] == [text] and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
def test_the_new_name_for_a_packed_file_that_is_named_like_text_works(tmp_path, module):
    for name, content in (("x.jsonl", b'{"text": "So."}'), ("x.txt", b"So.")):
        (tmp_path / name).write_bytes(importlib.import_module(module).compress(content))
        with pytest.raises(DataError, match=f"{name}: it is not text but a .* file; rename it to ") as refused:
            texts_of(tmp_path / name)
        (tmp_path / name).rename(tmp_path / str(refused.value).rpartition(" ")[2])
        assert texts_of(tmp_path / str(refused.value).rpartition(" ")[2])[0] == ["So."]


def test_a_packed_file_gets_advice_that_passes_the_same_check(tmp_path):
    """A name that is right already, and readers that do not go by the suffix."""
    for name, read in (("x.jsonl.gz", texts_of), ("prompts.txt", lambda path: read_prompts(str(path))), ("prompts.jsonl", lambda path: read_prompts(str(path)))):
        path = tmp_path / name
        path.write_bytes(gzip.compress(gzip.compress(jsonl("So.").encode())) if name[0] == "x" else gzip.compress(b'{"prompt": "So."}'))
        with pytest.raises(DataError, match="it is not text but a .gz file; write its content as text"):
            read(path)
        path.write_bytes(gzip.compress(jsonl("So.").encode()) if name[0] == "x" else b'{"prompt": "So."}')
        assert read(path)


def test_a_file_in_which_most_is_utf8_gets_no_command_that_would_spoil_it(tmp_path):
    for name in ("x.txt", "x.json"):
        text = "Größe\n" * 9 + "caf\udce9\n"
        text = text if name == "x.txt" else json.dumps([{"text": line} for line in text.split("\n") if line], ensure_ascii=False)
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(DataError, match=f"{name}:.* not UTF-8") as refused:
            texts_of(tmp_path / name)
        assert "iconv" not in str(refused.value)
