import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import struct

import numpy as np
import pytest
from factories import flip_bit

from common.errors import DataError
from data_pipeline import shards as shard_reader

TOKENIZER = hashlib.sha256(b"a tokenizer").hexdigest()
VOCABULARY = 1000


def write_llmc(path, ids, dtype="uint16"):
    path.write_bytes(shard_reader.header_bytes(len(ids), dtype) + np.asarray(ids, dtype).tobytes())


def prepare(folder, vocab_size=VOCABULARY, dtype="uint16", **splits):
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {"format": 1, "dtype": dtype, "vocab_size": vocab_size, "tokenizer_sha256": TOKENIZER,
                "document_start_id": 7, "splits": {}}
    for split, parts in splits.items():
        entries = []
        for number, ids in enumerate(parts):
            path = folder / f"{split}-{number:05d}.bin"
            write_llmc(path, ids, dtype)
            entries.append({"file": path.name, "tokens": len(ids),
                            "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
        manifest["splits"][split] = {"tokens": sum(map(len, parts)), "documents": 1, "shards": entries}
    (folder / shard_reader.MANIFEST).write_text(json.dumps(manifest))
    return folder


def open_train(path, verify="auto", **changes):
    tokenizer = shard_reader.TokenizerInfo(**{"vocab_size": VOCABULARY, "sha256": TOKENIZER} | changes)
    return shard_reader.open_token_set(path, "train", tokenizer, verify=verify)


@pytest.fixture
def prepared(tmp_path):
    train = np.arange(52)
    return prepare(tmp_path / "set", train=[train[:30], train[30:35], train[35:]], validation=[np.arange(100, 140)])


def test_fingerprint_identifies_the_data_and_not_its_place(prepared, tmp_path):
    same = prepare(tmp_path / "elsewhere", train=[np.arange(30), np.arange(30, 35), np.arange(35, 52)])
    other = prepare(tmp_path / "other", train=[np.arange(30), np.arange(30, 35), np.arange(36, 53)])
    assert open_train(prepared).fingerprint == open_train(same, verify="never").fingerprint
    assert open_train(prepared).fingerprint != open_train(other).fingerprint


@pytest.mark.parametrize("change, message", [
    (lambda data: bytes(data[:-1]), "is cut short: 1,033 bytes.*5 tokens.*1,034 bytes"),
    (lambda data: bytes(data[:-4]), "is cut short"),
    (lambda data: bytes(data[:500]), "is cut short inside its header, at 500 bytes"),
    (lambda data: bytes(data + b"x"), "is too long"),
    (lambda data: b"", "is empty"),
    (0, "wrong magic"), (4, "version 0"), (8, "is cut short|is too long"),  # a flipped bit
    (lambda data: shard_reader.header_bytes(0, "uint16"), "is empty, but its header gives 0 tokens"),
    (lambda data: shard_reader.header_bytes(4, "uint16") + bytes(8), "its header gives 4 tokens of uint16, but manifest.json lists 5"),
    (lambda data: shard_reader.header_bytes(5, "uint32") + bytes(20), "5 tokens of uint32, but manifest.json lists 5 of uint16"),
])
def test_a_damaged_shard_is_refused_by_every_rank(prepared, change, message):
    path = prepared / "train-00001.bin"
    flip_bit(path, change) if isinstance(change, int) else path.write_bytes(change(path.read_bytes()))
    for verify in ("auto", "never"):
        with pytest.raises(DataError, match=rf"train-00001\.bin: .*({message})"):
            open_train(prepared, verify=verify)


def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(prepared, monkeypatch):
    monkeypatch.setattr(shard_reader, "SCAN_BYTES", 8)  # several blocks
    assert open_train(prepared, vocab_size=52).tokens == 52
    with pytest.raises(DataError, match=r"train-00002\.bin: token 16 \(byte 1056\) has id 51, .*vocabulary of 51"):
        open_train(prepared, vocab_size=51)


def scanned_files(monkeypatch):
    names, scan = [], shard_reader._scan
    monkeypatch.setattr(shard_reader, "_scan", lambda shard, *more: names.append(shard.path.name) or scan(shard, *more))
    return names


def test_contents_are_read_once_and_again_where_a_file_changed(prepared, monkeypatch):
    names = scanned_files(monkeypatch)
    open_train(prepared, verify="never")
    assert not names and not (prepared / shard_reader.VERIFIED).exists()
    open_train(prepared)
    shard_reader.open_token_set(prepared, "validation", shard_reader.TokenizerInfo(VOCABULARY))
    assert sorted(names) == ["train-00000.bin", "train-00001.bin", "train-00002.bin", "validation-00000.bin"]
    names.clear()
    open_train(prepared)
    shard_reader.open_token_set(prepared, "validation", shard_reader.TokenizerInfo(VOCABULARY))
    assert names == []
    os.utime(prepared / "train-00001.bin", ns=(1, 1))
    open_train(prepared)
    assert names == ["train-00001.bin"]
    open_train(prepared, verify="always")
    shard_reader.open_token_set(prepared, "validation", shard_reader.TokenizerInfo(VOCABULARY))
    assert sorted(names[1:]) == ["train-00000.bin", "train-00001.bin", "train-00002.bin"]


@pytest.mark.parametrize("dtype, vocabulary", [("uint16", 70), ("uint32", 300_000)])
def test_the_ids_that_occur_are_counted_by_the_verification_which_a_later_start_does_not_repeat(tmp_path, monkeypatch, dtype, vocabulary):
    folder = prepare(tmp_path / "set", vocabulary, dtype, train=[[0, 9, 9], [vocabulary - 1, 7]])
    scanned, expected = scanned_files(monkeypatch), [0, 7, 9, vocabulary - 1]
    unverified = open_train(folder, "never", vocab_size=vocabulary)
    assert unverified.used is None and unverified.used_ids().tolist() == expected
    monkeypatch.setattr(shard_reader.TokenSet, "blocks", None)
    for _ in range(2):
        assert open_train(folder, vocab_size=vocabulary).used_ids().tolist() == expected and len(scanned) == 2
    # The results of an earlier version lack them.
    known = json.loads((folder / shard_reader.VERIFIED).read_text())
    del known["train-00001.bin"]["used"]
    (folder / shard_reader.VERIFIED).write_text(json.dumps(known))
    assert open_train(folder, vocab_size=vocabulary).used_ids().tolist() == expected
    assert scanned[2:] == ["train-00001.bin"]


def test_a_damaged_file_is_refused_at_every_start_also_if_its_modification_time_was_put_back(prepared):
    """As by a copy that keeps times."""
    open_train(prepared)
    path = prepared / "train-00001.bin"
    before = path.stat()
    flip_bit(path, 1030)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(DataError, match="is damaged"):
            open_train(prepared)


def test_a_record_of_verified_files_that_cannot_be_used_means_a_new_verification(prepared, monkeypatch, no_hang):
    names = scanned_files(monkeypatch)
    (prepared / shard_reader.VERIFIED).mkdir()  # like a read-only folder, which root could write to
    for _ in range(2):
        assert open_train(prepared).tokens == 52
    (prepared / shard_reader.VERIFIED).rmdir()
    (prepared / shard_reader.VERIFIED).write_text("{")
    open_train(prepared)
    (prepared / shard_reader.VERIFIED).unlink()
    os.mkfifo(prepared / shard_reader.VERIFIED)
    open_train(prepared)
    assert len(names) == 12
    assert not list(prepared.glob(f"{shard_reader.VERIFIED}.*"))


def swap(path):
    spoilt = path.with_name("spoilt")
    spoilt.write_bytes(path.read_bytes()[::-1])
    os.utime(spoilt, ns=(path.stat().st_mtime_ns,) * 2)
    spoilt.replace(path)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("change, how", [
    (lambda path: os.truncate(path, shard_reader.HEADER_BYTES + 6), r"it had 1,084 bytes and now has 1,030; restore the file"),
    (lambda path: flip_bit(path, shard_reader.HEADER_BYTES + 7), "it was written to; restore the file"),
    (swap, "another file has its name"),
    (lambda path: os.utime(path, ns=(1, 1)), None),
    (lambda path: shutil.copy(path, path.with_name("same")) and path.with_name("same").replace(path), None)])
def test_a_shard_that_changes_while_it_is_read_is_refused_and_one_that_is_touched_is_not(prepared, change, how, opened):
    path, tokens = prepared / "train-00000.bin", open_train(prepared)
    if opened:
        tokens.read(0, 3)
    change(path)
    if how is None or opened and change is swap:  # the open file is still the old one
        assert tokens.read(1, 40).tolist() == list(range(1, 41))
    else:
        for read in (lambda: tokens.read(0, 3), lambda: list(tokens.blocks())):
            with pytest.raises(DataError, match=rf"train-00000\.bin: was changed while it was read: {how}"):
                read()


def test_an_id_beyond_the_vocabulary_indexes_nothing_where_no_change_is_seen(prepared):
    path, tokens = prepared / "train-00000.bin", open_train(prepared, vocab_size=52)
    before = path.stat()
    flip_bit(path, shard_reader.HEADER_BYTES + 7)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for read in (lambda: tokens.read(2, 9), lambda: list(tokens.blocks())):
        with pytest.raises(DataError, match=r"train-00000\.bin: token 3 \(byte 1030\) has id 259, beyond the vocab"):
            read()
    assert tokens.read(0, 3).tolist() == [0, 1, 2]


def test_so_many_shards_as_may_be_open_are_opened_and_more_are_refused(prepared, monkeypatch):
    limits = []
    monkeypatch.setattr(shard_reader.resource, "setrlimit", lambda what, values: limits.append(values))
    for soft, hard, raised in ((1024, 4096, []), (66, 4096, [(134, 4096)]), (66, 100, [(100, 100)])):
        limits.clear()
        monkeypatch.setattr(shard_reader.resource, "getrlimit", lambda what, values=(soft, hard): values)
        open_train(prepared)
        assert limits == raised
    for shards, hard, advice in ((3, 66, "67, or prepare .* larger SHARD_TOKENS$"),
                                 (3, 64, "67$"), (1, 64, "65$")):
        monkeypatch.setattr(shard_reader.resource, "getrlimit", lambda what, hard=hard: (hard, hard))
        with pytest.raises(DataError, match=f"has {shards} shards?, but a process may open {hard} files; in a new shell or as root, ulimit -n {advice}"):
            shard_reader.allow_open_files(shards, prepared)
        monkeypatch.setattr(shard_reader.resource, "getrlimit", lambda what, least=shards + 64: (least, least))
        shard_reader.allow_open_files(shards, prepared)


def write_foreign(path, ids, kind):
    """Write ids as numpy, as nanoGPT, or in llm.c's format of that type."""
    if kind == "npy":
        np.save(path.with_suffix(".npy"), np.asarray(ids, np.uint16))
    elif kind == "nanogpt":
        path.write_bytes(np.asarray(ids, np.uint16).tobytes())
    else:
        write_llmc(path, ids, kind)


@pytest.mark.parametrize("kind", ["uint16", "uint32", "nanogpt", "npy"])
def test_foreign_files_are_read(tmp_path, kind, monkeypatch):
    parts = {"fineweb_train_000001": range(25), "fineweb_train_000002": range(25, 40), "fineweb_val_000000": range(10)}
    for name, ids in ({"train": range(40), "val": range(10)} if kind == "nanogpt" else parts).items():
        write_foreign(tmp_path / f"{name}.bin", ids, kind)
    (tmp_path / "meta.pkl").write_bytes(b"not tokens")
    train = open_train(tmp_path, document_start_id=3)
    assert train.read(0, 40).tolist() == list(range(40)) and train.tokens == 40 and train.document_start_id == 3
    assert shard_reader.open_token_set(tmp_path, "validation", shard_reader.TokenizerInfo(10)).read(0, 10).tolist() == list(range(10))
    assert open_train(tmp_path / "*train*.[bn]*").read(0, 40).tolist() == list(range(40))
    assert open_train(sorted(tmp_path.glob("*train*"))[0]).tokens == (40 if kind == "nanogpt" else 25)
    names = scanned_files(monkeypatch)
    assert train.fingerprint == open_train(tmp_path).fingerprint == open_train(tmp_path, verify="never").fingerprint
    assert names == [], "scanned once"
    with pytest.raises(DataError, match=r"train.*: token \d+ \(byte \d+\) has id 39, beyond the vocabulary of 39"):
        open_train(tmp_path, vocab_size=39)


def test_the_content_of_foreign_files_is_all_of_them(tmp_path):
    """The fingerprint, which every rank computes, is of samples; a prepared set has the hashes of its files."""
    ids = np.arange(20_000, dtype=np.uint16) % 100
    before, after = (ids.tofile(tmp_path / "train.bin") or open_train(tmp_path, vocab_size=100) for ids in (ids, np.where(np.arange(20_000) == 5000, 7, ids).astype(np.uint16)))
    assert before.fingerprint == after.fingerprint and len(before.content) == len(after.content) == 64 and before.content != after.content
    assert open_train(tmp_path, vocab_size=100).content == after.content and open_train(tmp_path, vocab_size=100, verify="never").content == ""


@pytest.mark.parametrize("vocabulary", [50_000, 128_256])
@pytest.mark.parametrize("has_header", [False, True], ids=["raw", "header"])
@pytest.mark.parametrize("dtype", ["<u4", "<i8", ">u2", ">u4", ">i8", "<f2", "<f4", "<f8", "<u1"])
def test_ids_that_are_not_uint16_are_refused_with_a_way_that_works(tmp_path, dtype, vocabulary, has_header, monkeypatch):
    ids = np.random.default_rng(1).integers(0, {">u2": 50_000, "<u1": 65, "<f2": 2000}.get(dtype, vocabulary), 3000)
    ids[:800] = 0  # left padding
    body = ids.astype(dtype).tobytes()
    (tmp_path / "train.bin").write_bytes(shard_reader.header_bytes(len(body) // 2, "uint16") * has_header + body)
    with pytest.raises(DataError, match=f"train.bin: its ids look like {np.dtype(dtype).name}") as error:
        open_train(tmp_path, vocab_size=50_000 if dtype == ">u2" else vocabulary)
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"run (numpy.save.*) in its folder", str(error.value))[1], {"numpy": np})
    (tmp_path / "train.bin").unlink()
    assert open_train(tmp_path, vocab_size=vocabulary).read(0, 3000).tolist() == ids.tolist()


def zipf(count, vocabulary=1 << 16):
    """Ids of which low ones are common, as those that BPE numbers by its merges."""
    return (vocabulary ** np.random.default_rng(2).random(count) - 1).astype("<u2")


@pytest.mark.parametrize("kind", ["uint16", "uint32", "npy", "nanogpt"])
@pytest.mark.parametrize("ids, doubt", [
    (np.arange(20_000) % 990, ""), (1 + np.arange(20_000) % 989, "none of 20,000 tokens is 0, the start of a document"),
    (np.arange(20_000) % 249, "the highest id is 248, of a vocabulary of 1,000"), (np.arange(9_000) % 249, ""),
    (np.arange(20_000) % 251, "")])
def test_what_is_odd_about_foreign_tokens_is_said(tmp_path, capfd, kind, ids, doubt):
    write_foreign(tmp_path / "train.bin", ids, kind)
    for _ in range(2):  # also with the stored result of the first time, which another start does not use
        shard_reader.say_once.cache_clear()
        open_train(tmp_path, document_start_id=0)
        told = capfd.readouterr().err
        assert doubt in told and bool(told) == bool(doubt)
    open_train(tmp_path, document_start_id=999)
    assert f"none of {len(ids):,} tokens is 999" in capfd.readouterr().err


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize("name, data, message", [
    ("train.bin", b"\1\0\2", "odd size \\(3 bytes\\)"),
    ("train.bin", b"", "is empty"),
    ("x_train.bin", np.arange(800, dtype="<u2").tobytes(), "wrong magic: starts with 00 00 01 00"),
    ("train.bin", b"\1\2\3\4\1\0\0\0\4\0\0\0" + bytes(1020), "wrong magic"),
    ("train.bin", struct.pack("<HQ", 1, 3000) + zipf(3000).tobytes(), "wrong magic: starts with .*, which is not a header of llm.c .* numpy.save"),
    ("train.bin", zipf(20_000).byteswap().tobytes(), r"its ids look like uint16 \(big-endian\), but are read as little-endian"),
    ("train.bin", zipf(20_000).tobytes() + zipf(3000).astype("<u4").tobytes(), r"its ids look like uint16 in one place and like u?int\d+ in another"),
    ("x_train.npy", b"\0" * 200, "wrong magic"),
    ("x_train.npy", b"\x93NUMPY\1\0\x10\0{'descr': ", "cannot be read"),
    *(("train.npy", npy(array), "(holds an array of shape .*; expected one row of uint16|cannot be read .*Python objects)")
      for array in (np.zeros((3, 4), np.uint16), np.zeros(5, np.int64), np.zeros(5, ">u2"), np.array([None]))),
    ("train.npy", npy(np.arange(50, dtype=np.uint16))[:-2], "cannot be read"),
    ("train.npy", npy(np.arange(50, dtype=np.uint16)) + b"xx", "is too long"),
    *((name, packed, "is compressed or packed, not plain ids; load them in Python, and save them with numpy.save")
      for packed in (gzip.compress(zipf(3000).tobytes()), pickle.dumps([*range(3000)], 2)) for name in ("train.bin", "x_train_1.bin", "train.npy")),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_foreign_file_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}: .*{message}"):
        open_train(tmp_path, vocab_size=1 << 16)


@pytest.mark.parametrize("padding", [0, 3, 705])  # 705 starts a document, and pads in GPT-2's tokenizer
@pytest.mark.parametrize("share", [60, 51, 50, 40])
def test_padding_in_foreign_tokens_is_said_if_it_is_most_of_them(tmp_path, capfd, share, padding):
    ids = np.r_[np.full(share, padding), np.setdiff1d(np.arange(200 - share) + 600, [padding])[:100 - share]]
    for number, part in enumerate(np.split(ids, [share // 2])):
        write_llmc(tmp_path / f"x_train_{number}.bin", part)
    open_train(tmp_path, document_start_id=705)
    assert (f"{share} % of the tokens are {padding}; if these are padding, leave them out" in capfd.readouterr().err) == (share > 50)


def test_what_is_odd_about_one_of_several_files_is_not_said(tmp_path, capfd):
    write_llmc(tmp_path / "x_train_0.bin", [0] * 10 + [700] * 10)
    write_llmc(tmp_path / "x_train_1.bin", [705] * 5 + [700] * 15)
    open_train(tmp_path, document_start_id=705)
    assert capfd.readouterr().err == ""
