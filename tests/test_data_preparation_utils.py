"""Prepared shards are a pure function of text, tokenizer and settings, whatever stops or hurries their making."""

import gzip
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from factories import PATIENCE, prepare_under_fire, prepared_set, start_preparation, write_jsonl

from common.errors import DataError, PaddockError, SettingsError
from data_pipeline import prepare as preparation
from data_pipeline import sources
from data_pipeline.prepare import DOCUMENTS
from data_pipeline.shards import HEADER_BYTES, MANIFEST, TokenizerInfo, open_token_set
from data_pipeline.source_files import Source
from data_pipeline.sources import identity_of
from data_pipeline.vocabulary import write_tiktoken
from data_pipeline.workers import split_of
from extensions.preparation_flags import describe, flag_parser, prepare_from_flags, used_settings
from scripts.prepare import train_command
from tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def stories(count, seed=0):
    draw = random.Random(seed)
    return [f"Story {number}: " + " ".join(draw.choice(["cat", "naïve", "the", "🦙", "<|eot_id|>"]) for _ in range(40))
            for number in range(count)]


def write_texts(path, texts):
    return write_jsonl(path, ({"text": text} for text in texts))


def prepare(source, tokenizer_path, output, **options):
    return prepared_set("documents", source, tokenizer_path, output, **{"tokenizer_backend": "tiktoken", "shard_tokens": 5000} | options)


def tokenize_by(monkeypatch, tokenize):
    monkeypatch.setattr("data_preparation_utils.DOCUMENTS", DOCUMENTS._replace(tokenize=tokenize))


def shards_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def tokens_of(folder, split, tokenizer):
    token_set = open_token_set(folder, split, TokenizerInfo(tokenizer.vocab_size, tokenizer.sha256))
    return token_set.read(0, token_set.tokens).tolist()


def documents_of(folder, split, tokenizer):
    ids = np.array(tokens_of(folder, split, tokenizer))
    return [tokenizer.decode(document[1:-1]) for document in np.split(ids, np.flatnonzero(ids == tokenizer.bos_id)[1:])]


def read_manifest(folder):
    return json.loads((folder / MANIFEST).read_text())


def test_shards_hold_every_document_of_their_split_in_order(tmp_path, tokenizer_path):
    texts = stories(200)
    folder = prepare(write_texts(tmp_path / "x.jsonl", texts), tokenizer_path, tmp_path / "out")
    tokenizer, manifest = load_tokenizer(tokenizer_path, "tiktoken"), read_manifest(folder)
    for split in ("train", "validation"):
        kept = [text for text in texts if split_of(identity_of(text), 0.1) == split]
        assert tokens_of(folder, split, tokenizer) == [i for text in kept for i in tokenizer.encode_document(text)]
        assert manifest["splits"][split]["documents"] == len(kept) > 5
    train = manifest["splits"]["train"]["shards"]
    assert len(train) > 3 and {shard["tokens"] for shard in train[:-1]} == {5000} and 0 < train[-1]["tokens"] <= 5000
    for shard in train:
        content = (folder / shard["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard["sha256"]
        assert np.frombuffer(content[:12], "<i4").tolist() == [20240520, 1, shard["tokens"]]
        assert len(content) == HEADER_BYTES + 2 * shard["tokens"]
    assert len(manifest["examples"]) == 3 and "Story 0: " in manifest["examples"][0]
    assert {path.name for path in folder.glob("[!.]*")} == {MANIFEST, *shards_of(folder)}


def test_odd_texts_come_back_from_the_shards_and_hold_no_control_token(tmp_path, tokenizer_path):
    texts = ["👩‍👩‍👧‍👦 \u200d", "e\u0301 is no \u00e9", "<|eot_id|><|begin_of_text|>", "\u200b", "a\r\nb\x85 \ufeff", "日本語\U0010ffff"]
    source = write_texts(tmp_path / "x.jsonl", [*texts, "", " \n"])
    folder, tokenizer = prepare(source, tokenizer_path, tmp_path / "out", validation_fraction=0), load_tokenizer(tokenizer_path, "tiktoken")
    assert documents_of(folder, "train", tokenizer) == texts
    assert np.isin(tokens_of(folder, "train", tokenizer), list(tokenizer.special_ids.values())).sum() == 2 * len(texts)
    assert read_manifest(folder)["skipped"]["empty"] == 2


def test_whatever_changes_a_token_changes_the_folder(tmp_path, tokenizer_path, monkeypatch):
    """test_tokenize_chats.py has the settings that chats have, too."""
    path, other_tokenizer = tmp_path / "x.jsonl", tmp_path / "other.model"
    write_jsonl(path, ({"text": text, "body": text} for text in stories(60)))
    lines = Path(tokenizer_path).read_bytes().splitlines()
    other_tokenizer.write_bytes(b"\n".join([lines[1].split()[0] + b" 0", lines[0].split()[0] + b" 1", *lines[2:]]) + b"\n")

    def name(tokenizer=tokenizer_path, **fields):
        return prepare(Source(path=str(path), **fields), tokenizer, tmp_path / "out").name

    names = [name(), name(column="body"), name(documents="blank"), name(other_tokenizer)]
    path.write_text(path.read_text().replace("Story 7", "Story 8"))
    names.append(name())
    monkeypatch.setattr(preparation, "CODE_VERSION", preparation.CODE_VERSION + 1)
    names.append(name())
    assert len(set(names)) == len(names)


def test_a_text_of_few_documents_gives_its_last_tenth_for_validation(tmp_path, tokenizer_path):
    acts = [f"Act {number}\n" + "\n\n".join(stories(40, seed=number)) for number in range(5)]
    acts = [act for act in acts if split_of(identity_of(act), 0.05) == "train"][:3]
    for number, act in enumerate(acts):
        (tmp_path / f"act-{number}.txt").write_text(act)
    folder = prepare(str(tmp_path / "*.txt"), tokenizer_path, tmp_path / "out", validation_fraction=None)
    heads, tails = (documents_of(folder, split, load_tokenizer(tokenizer_path, "tiktoken")) for split in ("train", "validation"))
    assert [head + tail for head, tail in zip(heads, tails, strict=True)] == acts
    assert all(head.endswith("\n\n") and 0.1 <= len(tail) / len(head + tail) <= 0.2 for head, tail in zip(heads, tails))
    assert "10 % of each document" in "\n".join(describe(folder))


@pytest.mark.parametrize("documents, fraction", [(19, None), (20, 0.05), (1000, 0.05), (3999, 0.05), (4000, 0.005)])
def test_a_set_holds_out_enough_to_measure(tmp_path, tokenizer_path, documents, fraction):
    texts = [f"Tale {number}" for number in range(documents)]
    source = write_texts(tmp_path / "x.jsonl", texts)
    folder = prepare(source, tokenizer_path, tmp_path / "out", validation_fraction=None)
    manifest = read_manifest(folder)
    if fraction is None:  # the end of each
        assert manifest["cut_from_each"] == 0.1 and manifest["splits"]["validation"]["documents"] == documents
        return
    by_hash = sum(int(hashlib.sha256(text.lower().encode()).hexdigest()[:16], 16) < fraction * 2**64 for text in texts)
    assert manifest["splits"]["validation"]["documents"] == max(1, by_hash)


def test_no_set_trains_on_what_another_one_holds_out(tmp_path, tokenizer_path):
    """A small set and a large one with the same texts, written in other ways; the large one leaves out what the small one holds out."""
    tokenizer, small = load_tokenizer(tokenizer_path), [f"Plank {number} is caf\u00e9-brown." for number in range(200)]
    ways = [str.upper, lambda text: text + " ", lambda text: text.replace(" ", "\r\n\t"), lambda text: text.replace("\u00e9", "e\u0301")]
    large = [*(ways[number % 4](text) for number, text in enumerate(small)), *(f"Beam {number}" for number in range(4300))]
    one, other = (prepare(write_texts(tmp_path / f"{len(texts)}.jsonl", texts), tokenizer_path, tmp_path / "out", validation_fraction=None)
                  for texts in (small, large))
    held_out = {*map(identity_of, documents_of(one, "validation", tokenizer))}
    trained, measured = ({*map(identity_of, documents_of(other, split, tokenizer))} for split in ("train", "validation"))
    assert held_out == {text for text in map(identity_of, small) if split_of(text, 0.05) == "validation"}
    assert len(held_out) > 5 and not held_out & trained and held_out & measured < held_out
    manifest = read_manifest(other)
    assert manifest["reserved"] == sum(split_of(identity_of(text), 0.05) == "validation" for text in large) - len(measured)
    assert len(trained) + len(measured) + manifest["reserved"] == len(large)
    assert f"Split: {manifest['reserved']} documents left out" in "\n".join(describe(other))


def unigram(folder, **fields):
    folder.mkdir()
    document = {"version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "Lowercase"}, "post_processor": None,
                "added_tokens": [{"id": 0, "content": "</s>", "special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}],
                "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
                "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
                "model": {"type": "BPE", "vocab": {name: number for number, name in enumerate(["</s>", "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"])},
                          "merges": [], **fields}}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return str(folder)


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_characters_that_a_vocabulary_lacks_are_counted(tmp_path, tokenizer_path, unknown):
    source = write_texts(tmp_path / "x.jsonl", ["Er s\u00e4gt \u6a4b", "\u00e4\u00c4", "plain\nwords", "Fine"])
    folder = prepare(source, unigram(tmp_path / "letters", unk_token=unknown), tmp_path / "out", validation_fraction=0, tokenizer_backend="auto")
    assert read_manifest(folder)["skipped"]["lost"] == {"\u00e4": 3, "\u6a4b": 1, "\n": 1}
    assert "Warning: 5 characters not in the vocabulary ('\u00e4' 3, '\u6a4b' 1, '\\n' 1)" in "\n".join(describe(folder))
    whole = prepare(source, tokenizer_path, tmp_path / "out", validation_fraction=0)
    assert "lost" not in read_manifest(whole)["skipped"]


OPTIONS = {"tokenizer_backend": "tiktoken", "shard_tokens": 50_000, "workers": 2}


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_killed_and_started_again_it_ends_with_the_same_bytes(tmp_path, tokenizer_path, kills):
    texts = stories(1000 * kills)
    source = write_texts(tmp_path / "x.jsonl", [text for number in range(len(texts)) for text in texts[number::-700][:2]])
    undisturbed = prepare(source, tokenizer_path, tmp_path / "calm", shard_tokens=50_000)
    prepare_under_fire(kills, 0.15, "documents", source, tokenizer_path, tmp_path / "out", 4000, **OPTIONS)
    folder = tmp_path / "out" / undisturbed.name
    assert shards_of(folder) == shards_of(undisturbed) and len(shards_of(folder)) > 4
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *shards_of(folder)}
    assert read_manifest(folder) == json.loads((undisturbed / MANIFEST).read_text())
    assert not list((tmp_path / "out").glob("tmp-*"))


def write_source(folder: Path, kind: str) -> str:
    """600 documents in two files of a kind, with empty ones, a bad one and a line that is not UTF-8 among them."""
    texts = stories(600)
    texts[17], texts[400] = " ", ""
    folder.mkdir()
    for number, part in enumerate((texts[:100], texts[100:])):
        path = folder / f"{number}{kind.partition(' ')[0]}"
        if kind == "hub":
            write_texts(folder / f"train-{number}.jsonl", part)
            continue
        if path.suffix == ".txt":
            end = b"\r" if kind.endswith(" cr") else b"\n"
            path.write_bytes("".join(f" = {text[6:9]} = \n{text}\n\nand more\n\n" for text in part).encode().replace(b"\n", end) + b"\xff\nend\n".replace(b"\n", end))
        elif path.suffix == ".parquet":
            rows = pyarrow.table({"number": range(len(part) + 1), "text": [*part, None]})
            pyarrow.parquet.write_table(rows, path, row_group_size=50)
        else:
            lines = [json.dumps({"text": text}) for text in [*part, 5]]
            content = f"[{','.join(lines)}]" if path.suffix == ".json" else "\n".join(lines)
            path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return str(folder)


@pytest.mark.parametrize("kind", [".jsonl", ".txt blank", ".txt blank cr", ".txt line", ".txt wikitext", ".parquet", ".jsonl.gz", ".json", "hub"])
def test_a_resumed_preparation_reads_on_where_it_stopped(tmp_path, tokenizer_path, monkeypatch, kind):
    path, rows = write_source(tmp_path / "source", kind), sources._read_hub
    source = Source(name=path) if kind == "hub" else Source(path=path, documents=kind.split()[1] if " " in kind else "")
    monkeypatch.setattr("data_pipeline.sources.remote_data.hub_revision", lambda *named: "c0ffee")
    options = {"on_bad_record": "skip", "max_documents": 550, "validation_fraction": None, "journal_seconds": 0.0}
    monkeypatch.setattr(preparation, "CHUNK_CHARACTERS", 4000)
    monkeypatch.setattr(sources, "TABLE_ROWS", 100)
    chunks, read = [], []

    def counting(spec, documents, fail_at=0):
        chunks.append(documents)
        if len(chunks) == fail_at:
            raise DataError("planted")
        return DOCUMENTS.tokenize(spec, documents)

    with monkeypatch.context() as patch:
        tokenize_by(patch, counting)
        calm = prepare(source, tokenizer_path, tmp_path / "calm", **options)
        tokenize_by(patch, partial(counting, fail_at=2 * len(chunks) - len(chunks) // 4))
        with pytest.raises(DataError, match="planted"):
            prepare(source, tokenizer_path, tmp_path / "out", **options)

    class Counting(io.FileIO):
        def readinto(self, buffer):
            read.append(super().readinto(buffer))
            return read[-1]

    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.source_files.open", lambda *path: io.BufferedReader(Counting(*path), 512), raising=False)
        patch.setattr(sources, "_read_hub", lambda *arguments: (read.append(1) or row for row in rows(*arguments)))
        resumed = prepare(source, tokenizer_path, tmp_path / "out", **options)
    assert shards_of(resumed) == shards_of(calm)
    assert (resumed / MANIFEST).read_text() == (calm / MANIFEST).read_text()
    size = 500 if kind == "hub" else sum(file.stat().st_size for file in Path(path).iterdir())
    # A Parquet file of this size, and the rest of one with CR, are read at once, and the first file, a sixth of the source, never again.
    assert 0 < sum(read) < size * (0.7 if kind == ".jsonl" or ".txt" in kind else 1.2)


def test_a_source_that_changes_meanwhile_is_refused(tmp_path, tokenizer_path, monkeypatch):
    source = write_texts(tmp_path / "x.jsonl", stories(20))

    def meddling(spec, texts):
        write_texts(tmp_path / "x.jsonl", stories(21))
        return DOCUMENTS.tokenize(spec, texts)

    tokenize_by(monkeypatch, meddling)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare(source, tokenizer_path, tmp_path / "out")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_preparation_that_is_stopped_leaves_no_process(number, tmp_path, tokenizer_path):
    write_texts(tmp_path / "x.jsonl", stories(100) * 500)
    flags = ["--source", "x.jsonl", "--tokenizer-path", tokenizer_path, "--output", "out", "--preparation-workers", "2"]
    process = subprocess.Popen([sys.executable, str(ROOT / "scripts" / "load_pretrain_dataset.py"), *flags], text=True, cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    while process.poll() is None and not list(tmp_path.glob("out/tmp-*/train-*.bin")):
        time.sleep(0.02)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    _, error = process.communicate(timeout=PATIENCE)
    if number == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in error
        assert error.splitlines()[-1] == "Stopped. Run the same command again to continue."
    deadline = time.monotonic() + PATIENCE
    with pytest.raises(ProcessLookupError):  # none is left in its group
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def die(spec, texts):
    os._exit(9)


def test_a_worker_that_dies_ends_it_with_advice(tmp_path, tokenizer_path, monkeypatch):
    tokenize_by(monkeypatch, die)
    with pytest.raises(PaddockError, match="set PREPARATION_WORKERS=1 and start again"):
        prepare(write_texts(tmp_path / "x.jsonl", ["a"]), tokenizer_path, tmp_path / "out", workers=2,
                decontaminate=write_texts(tmp_path / "items.jsonl", ["a b c d e f g h i j k l m"]))  # by processes, not threads


def test_two_at_once_make_one_set(tmp_path, tokenizer_path):
    source, output = write_texts(tmp_path / "x.jsonl", stories(1000)), tmp_path / "out"
    both = [start_preparation("documents", source, tokenizer_path, output, 4000, **OPTIONS) for _ in range(2)]
    for process in both:
        _, error = process.communicate()
        assert process.returncode == 0, error
    undisturbed = prepare(source, tokenizer_path, tmp_path / "calm", shard_tokens=50_000)
    assert shards_of(output / undisturbed.name) == shards_of(undisturbed)
    assert [path.name for path in output.glob("[!.]*")] == [undisturbed.name]


def test_examples_are_encoded_by_the_tokenizer_of_the_start(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chats = write_jsonl(tmp_path / "chats.jsonl", ({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]} for n in range(20)))
    for start, output_dir in ((str(whole.folder), "runs"), (whole.folder.name, str(whole.output_dir))):
        flags = ["--source", chats, "--pretrain-checkpoint", start, "--output-dir", output_dir, "--output", str(tmp_path / "set" / start[-3:])]
        flag_parser("chats", "").refuse_unused(flags, *used_settings("chats"))
        folder = prepare_from_flags("chats", flags)
        used = flag_parser("chats", "").parse(flags)[1]
        assert read_manifest(folder)["tokenizer_sha256"] == load_tokenizer(used.tokenizer_path).sha256
        assert f"--pretrain-checkpoint {start}" in train_command("chats", folder, used)
    other = tmp_path / "other.model"
    write_tiktoken({bytes([id]): 255 - id for id in range(256)}, other)
    with pytest.raises(SettingsError, match=rf"TOKENIZER_PATH={other} is not the tokenizer of .*: id \d+ is .* there and .* here; remove it"):
        prepare_from_flags("chats", [*flags, "--tokenizer-path", str(other)])
    with pytest.raises(SettingsError, match="without effect here, remove --pretrain-checkpoint"):
        flag_parser("documents", "").refuse_unused(flags, *used_settings("documents"))
