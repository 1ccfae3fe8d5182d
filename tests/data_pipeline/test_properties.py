"""What holds for any input: records, rows, shards and manifests. The examples are the same in every run."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from faults import flip_bit
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoint import store
from checkpoint.tensors import read_optimizer
from common.errors import CheckpointError, DataError
from common.files import BINARY_STARTS
from data_pipeline import shards
from data_pipeline.prepare import describe_split, name_set
from data_pipeline.source_files import Source
from data_pipeline.sources import Reading, flaw_of, read_texts
from dataloaders import Mixing, RowOrder, pack

fewer = settings(max_examples=40)
any_text = st.text(st.characters(), max_size=12)  # lone surrogates and NUL among it
no_newline = st.binary(max_size=20).map(lambda content: content.replace(b"\n", b""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("properties")


def read(path: Path, skip_bad: bool, **fields) -> tuple[list[str], Reading]:
    reading = Reading(skip_bad=skip_bad)
    return [document.text for document in read_texts(Source(path=str(path), **fields), reading)], reading


def check_reading(path: Path, records: int, sound: list[str], **fields) -> None:
    """Every record is given, empty or refused, and the sound ones among them come in their order; or the first that cannot be
    used ends it by its name."""
    texts, reading = read(path, True, **fields)
    assert len(texts) + reading.empty + reading.bad == records
    left = iter(texts)
    assert all(text in left for text in sound), (texts, sound)
    if not reading.bad:
        assert read(path, False, **fields)[0] == texts
        return
    with pytest.raises(DataError) as refused:
        read(path, False, **fields)
    assert reading.bad_records[0] in str(refused.value) and reading.bad_records[0].startswith(f"{path}:")


json_line = st.builds(lambda text, more: ({"text": text} | more), any_text, st.dictionaries(any_text, st.none() | st.integers()))


@given(st.lists(json_line | no_newline, max_size=8))
@example([b"[" * 5000, {"text": "after"}])
@example([b"\xef\xbb\xbf", {"text": "x\u2028y"}])
def test_any_lines_as_jsonl(folder, lines):
    path = folder / "any.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    assume(not b"".join(encoded).startswith((*BINARY_STARTS,)))
    path.write_bytes(b"".join(line + b"\n" for line in encoded))

    def counts(line: bytes, number: int) -> bool:
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
        return not (line + b"\n").decode(errors="replace").isspace()

    sound = [line["text"] for line in lines if isinstance(line, dict) and flaw_of(line["text"]) is None and line["text"].strip()]
    check_reading(path, sum(counts(line, number) for number, line in enumerate(encoded)), sound)


@given(st.lists(any_text.map(lambda text: text.encode(errors="surrogatepass")) | no_newline, max_size=8), st.booleans())
def test_any_lines_as_text(folder, lines, ended):
    path = folder / "any.txt"
    content = b"\n".join(lines) + b"\n" * ended
    # Otherwise it looks like UTF-16, or like a packed file.
    assume(content.count(0) < 2 and not content.startswith((*BINARY_STARTS,)))
    path.write_bytes(content)
    lines = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    lines = lines if lines[-1] else lines[:-1]
    # A byte-order mark alone in the last line still makes a line.
    lines = lines or [b""] * content.startswith(b"\xef\xbb\xbf")
    texts = [line.decode(errors="surrogateescape") for line in lines]
    if 2 * sum(flaw_of(text) is not None for text in texts) > len(texts):
        for skip_bad in (True, False):
            with pytest.raises(DataError, match="any.txt: is not UTF-8 text"):
                read(path, skip_bad, documents="line")
        return
    sound = [text for text in texts if text.strip() and flaw_of(text) is None and not text.endswith("\r")]
    texts, _ = read(path, True, documents="line")
    assert [text for text in (text.removesuffix("\n") for text in texts) if text in sound] == sound
    check_reading(path, len(lines), [], documents="line")


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda content: b"PAR1" + content + b"PAR1"),
       st.sampled_from([".parquet", ".jsonl.gz", ".txt.xz", ".jsonl.bz2", ".txt.zst", ".json", ".raw"]))
def test_any_bytes_are_records_or_an_error_that_names_the_file(folder, content, suffix):
    path = folder / f"bytes{suffix}"
    path.write_bytes(content)
    try:
        texts, _ = read(path, False)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert all(flaw_of(text) is None for text in texts)
    path.unlink()


# (lengths, capacity)
problems = st.integers(1, 40).flatmap(lambda most: st.tuples(st.lists(st.integers(1, most), max_size=80), st.just(most)))


def best_fit_decreasing(lengths, capacity):
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        room = min(fitting, default=capacity)
        if fitting:
            rooms.remove(room)
        rooms.append(room - length)
    return sorted(rooms)


@settings(max_examples=300)
@given(problems)
def test_every_item_is_packed_once_and_as_the_naive_way_packs_it(problem):
    lengths, capacity = np.array(problem[0], np.int64), problem[1]
    packing = pack(lengths, capacity)
    assert sorted(packing.items.tolist()) == list(range(len(lengths)))
    assert packing.offsets[0] == 0 and packing.offsets[-1] == len(lengths)
    assert all(len(packing.items_in(bin)) for bin in range(len(packing)))
    rooms = sorted(capacity - int(lengths[packing.items_in(bin)].sum()) for bin in range(len(packing)))
    assert rooms == best_fit_decreasing(lengths.tolist(), capacity)


@fewer
@given(n_rows=st.integers(1, 500), micro=st.integers(1, 5), accumulation=st.integers(1, 4), seed=st.integers(0, 2**40),
       step=st.integers(0, 10**6), world_sizes=st.permutations([1, 2, 3, 4, 8]))
def test_the_ranks_of_any_world_size_share_the_same_rows_of_a_step(n_rows, micro, accumulation, seed, step, world_sizes):
    rows_per_step = 24 * micro * accumulation
    expected = RowOrder(Mixing((n_rows,)), rows_per_step, 1, seed).all_rows(step)
    for world_size in world_sizes[:2]:
        shares = [RowOrder(Mixing((n_rows,)), rows_per_step, micro, seed, rank, world_size).micro_batches(step)
                  for rank in range(world_size)]
        assert all(share.shape == (24 * accumulation // world_size, micro) for share in shares)
        assert np.concatenate(shares).ravel().tolist() == expected.tolist()
    # Within an epoch no row comes twice, neither on one rank nor on two.
    positions = np.arange(step * rows_per_step, (step + 1) * rows_per_step)
    for epoch in np.unique(positions // n_rows):
        rows = expected[positions // n_rows == epoch]
        assert len(set(rows.tolist())) == len(rows) and rows.min() >= 0 and rows.max() < n_rows


def write_set(folder: Path, chunks: list[list[int]], shard_tokens: int, vocab_size: int) -> Path:
    for path in folder.glob("*"):
        path.unlink()
    dtype = shards.dtype_for(vocab_size)
    writer = shards.ShardWriter(folder, "train", shard_tokens, dtype)
    for chunk in chunks:
        writer.write(np.array(chunk, np.int64))
    stream = writer.sync(finish=True)
    manifest = {"format": 1, "dtype": dtype, "vocab_size": vocab_size, "tokenizer_sha256": "", "document_start_id": 0,
                "splits": {"train": stream}}
    (folder / shards.MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def set_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("set")


token_sets = st.sampled_from([300, 1 << 16, 128_256]).flatmap(lambda vocab_size: st.tuples(
    st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=20), min_size=1, max_size=6).filter(any), st.just(vocab_size)))


@fewer
@given(token_sets, st.integers(1, 30), st.data())
def test_any_ids_are_read_back_as_they_were_written(set_folder, token_set, shard_tokens, data):
    chunks, vocab_size = token_set
    ids = sum(chunks, [])
    folder = write_set(set_folder, chunks, shard_tokens, vocab_size)
    opened = shards.open_token_set(folder, "train", shards.TokenizerInfo(vocab_size), verify="always")
    assert [shard.tokens for shard in opened.shards[:-1]] == [shard_tokens] * (len(opened.shards) - 1)
    assert opened.document_start_id == 0 and opened.read(0, opened.tokens).tolist() == np.concatenate([*opened.blocks()]).tolist() == ids
    start = data.draw(st.integers(0, len(ids)))
    count = data.draw(st.integers(0, len(ids) - start))
    if count:
        assert opened.read(start, count).tolist() == ids[start:start + count]


@fewer
@given(token_sets, st.integers(1, 30), st.randoms(use_true_random=False))
def test_any_flipped_bit_of_any_shard_is_found(set_folder, token_set, shard_tokens, rng):
    folder = write_set(set_folder, token_set[0], shard_tokens, token_set[1])
    path = rng.choice(sorted(folder.glob("*.bin")))
    flip_bit(path, rng)
    with pytest.raises(DataError, match=path.name):
        shards.open_token_set(folder, "train", shards.TokenizerInfo(token_set[1]), verify="always")


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | any_text,
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3), max_leaves=6)


@fewer
@given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
def test_any_bytes_as_a_file_of_a_checkpoint_are_read_or_refused(folder, content):
    for name, read_it in ((store.STATE, store.read_state), (store.OPTIMIZER, read_optimizer)):
        (folder / name).write_bytes(content)
        try:
            assert isinstance(read_it(folder), dict)
        except CheckpointError as error:
            assert name in str(error)
    (folder / store.MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=store.MANIFEST):
        store.read_manifest(folder)


@fewer
@given(files=st.dictionaries(st.text("abc", min_size=1, max_size=4), st.binary(max_size=30), min_size=1, max_size=4),
       rng=st.randoms(use_true_random=False))
def test_any_flipped_bit_of_any_checkpoint_is_found(tmp_path_factory, files, rng):
    folder = tmp_path_factory.mktemp("published") / "step-00000001"

    def write(into: Path) -> None:
        for name, content in files.items():
            (into / name).write_bytes(content)
        save_file({}, into / store.OPTIMIZER)

    store.publish(folder, write, {"step": 1, "val_loss": None})
    listed = store.verify(folder)["files"]
    assert {name: listed[name]["sha256"] for name in files} == {name: hashlib.sha256(content).hexdigest()
                                                                for name, content in files.items()}
    path = rng.choice([path for path in sorted(folder.iterdir()) if path.stat().st_size])
    flip_bit(path, rng)
    with pytest.raises(CheckpointError, match=path.name):
        store.verify(folder)


@given(problems, st.randoms(use_true_random=False))
def test_the_bins_follow_from_the_lengths_alone(problem, random):
    lengths, capacity = np.array(problem[0], np.int64), problem[1]
    packing, again = pack(lengths, capacity), pack(lengths.astype(np.int32), capacity)
    assert packing.items.tolist() == again.items.tolist() and packing.offsets.tolist() == again.offsets.tolist()
    order = np.array(random.sample(range(len(lengths)), len(lengths)), np.int64)
    shuffled = pack(lengths[order], capacity)
    for bin in range(len(packing)):
        assert lengths[order][shuffled.items_in(bin)].tolist() == lengths[packing.items_in(bin)].tolist()
    assert len(shuffled) == len(packing)


@pytest.mark.parametrize("held_out, total, share", [(1, 40, "0.4 holds out about 16"), (9, 150, "0.1 holds out about 15"), (10, 200, ""), (2, 19, "")])
def test_too_few_held_out_examples_for_a_verdict_are_said_if_there_could_be_more(held_out, total, share):
    splits = {"train": {"documents": total - held_out}, "validation": {"documents": held_out}}
    manifest = {"kind": "chats", "rules": 2, "settings": {"validation_fraction": None}, "splits": splits, "source": {"sources": [{"path": "a"}]}}
    few = [line for line in describe_split(manifest) if line.startswith("Held out")]
    assert [line.partition("--validation-fraction ")[2] for line in few] == [share] * bool(share)


def test_a_name_that_moves_to_another_set_is_said(tmp_path, capsys):
    for number in (1, 2, 2):
        (tmp_path / f"set{number}").mkdir(exist_ok=True)
        assert name_set(tmp_path / f"set{number}", "chats.jsonl") == tmp_path / "chats"
    assert capsys.readouterr().out == (
        f"{tmp_path / 'chats'} now names this set. To resume a run of the earlier one, name its folder, {tmp_path / 'set1'}\n")
