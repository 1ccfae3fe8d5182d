"""Rows: their order, their documents, how examples are packed, and the thread that reads ahead."""

import hashlib
import json
import os
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from factories import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from data_pipeline.shards import (
    HEADER_BYTES,
    MANIFEST,
    Shard,
    TokenizerInfo,
    TokenSet,
    header_bytes,
    open_token_set,
)
from dataloaders import (
    Batch,
    ExampleRows,
    Mixing,
    RowOrder,
    TokenRows,
    load_steps,
    open_example_set,
    permute,
    validation_batches,
)
from extensions.preparation import rows_in
from model_kernels.head import IGNORE_INDEX

CPU = torch.device("cpu")


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@settings(max_examples=30)
@given(n=st.integers(10**10, 2**59), seed=st.integers(0, 2**31))
def test_permutation_of_ten_billion_rows_and_more_stays_inside_without_repeats_and_without_memory(n, seed):
    positions = np.concatenate([np.arange(1000), np.arange(n - 1000, n)])
    tracemalloc.start()
    rows = permute(positions, n, seed, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 and rows.dtype == np.int64
    assert len(set(rows.tolist())) == 2000 and rows.min() >= 0 and rows.max() < n


@pytest.mark.parametrize("n", [1000, 10**10])
def test_seeds_and_epochs_give_unrelated_orders(n):
    positions = np.arange(1000)
    orders = [permute(positions, n, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for index, one in enumerate(orders):
        assert (one == positions).sum() < 10
        for other in orders[:index]:
            assert (one == other).sum() < 10


def test_the_order_looks_random():
    n = 200_000
    rows = permute(np.arange(n), n, 5, 2)
    assert abs(np.corrcoef(np.arange(n), rows)[0, 1]) < 0.02
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02
    for part in rows.reshape(20, -1):  # every part of the epoch samples the whole set
        counts = np.bincount(part * 50 // n, minlength=50)
        assert ((counts - counts.mean()) ** 2).sum() / counts.mean() < 49 + 6 * np.sqrt(2 * 49), "chi-square"


@given(n=st.integers(1, 60), rows_per_step=st.integers(1, 150))
def test_each_row_comes_once_an_epoch(n, rows_per_step):
    order = RowOrder(Mixing((n,)), rows_per_step, 1, 9)
    read = np.concatenate([order.all_rows(step) for step in range(-(-3 * n // rows_per_step))])[:3 * n].reshape(3, n)
    assert (np.sort(read) == np.arange(n)).all()


def test_the_first_rows_of_each_step_stay_as_they_are():
    """Runs of older versions resume with the rows that they have not read yet: do not change the order."""
    assert RowOrder(Mixing((1000,)), 8, 1, 1337).all_rows(0).tolist() == [556, 552, 14, 70, 902, 759, 330, 958]
    assert RowOrder(Mixing((10**10,)), 4, 1, 1337).all_rows(10**6).tolist() == [4890105082, 5250760444, 7419930486, 2727345790]


def token_set(ids):
    shard, ids = Shard(None, "uint16", 0, len(ids)), np.asarray(ids, "uint16")
    shard.__dict__["read"] = lambda start, count: ids[start:start + count]
    return TokenSet((shard,), "")


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=5))
def test_document_numbers_equal_a_naive_count(ids):
    expected = [[1 + sum(token == 0 for token in row[1:end + 1]) for end in range(6)] for row in ids]
    rows = TokenRows(token_set(sum(ids, []) + [0]), 6, document_start_id=0)
    document_ids_BT = rows(np.arange(len(ids))).document_ids_BT
    assert document_ids_BT.tolist() == expected and document_ids_BT.dtype == torch.int32


@pytest.mark.parametrize("tokens, count", [(1, 0), (6, 0), (7, 1), (12, 1), (13, 2)])
def test_a_row_is_one_whose_last_target_is_there(tokens, count):
    rows = TokenRows(token_set(list(range(tokens))), 6)
    assert len(rows) == count == rows_in(tokens, 6), "of a whole set, and of one that is being prepared"
    if count:
        assert rows(np.arange(count)).targets_BT.flatten().tolist() == [*range(1, 6 * count + 1)]


def test_a_billion_tokens_are_opened_at_their_end_without_reading_them(tmp_path):
    tokens = 10**9
    with open(tmp_path / "x_train.bin", "wb") as file:
        file.write(header_bytes(tokens, "uint16"))
        file.truncate(HEADER_BYTES + 2 * tokens)  # a sparse file of zeros
        file.seek(-8, 2)
        file.write(np.array([1, 2, 3, 4], np.uint16).tobytes())
    tracemalloc.start()
    rows = TokenRows(open_token_set(tmp_path, "train", TokenizerInfo(5), verify="never"), 1024)
    order = RowOrder(Mixing((len(rows),)), 512, 8, 1, rank=3, world_size=4)
    with load_steps(rows, order, CPU, count_targets, first_step=len(rows) // 512) as loader:
        assert next(loader)[0][0].tokens_BT.shape == (8, 1024)
    assert rows.token_set.read(tokens - 4, 4).tolist() == [1, 2, 3, 4]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def identity_rows(indices):
    tokens_BT = torch.from_numpy(np.repeat(indices[:, None], 3, axis=1))
    return Batch(tokens_BT, tokens_BT + 1, tokens_BT.int())


def count_targets(batch):
    return (batch.targets_BT != IGNORE_INDEX).sum()


ORDER = RowOrder(Mixing((50,)), rows_per_step=12, micro_batch_size=3, seed=2, rank=1, world_size=2)


def first_steps(loader, count):
    return [[batch.tokens_BT[:, 0].tolist() for batch in next(loader)[0]] for _ in range(count)]


def test_loading_from_any_step_is_skipping_to_it():
    with load_steps(identity_rows, ORDER, CPU, count_targets) as loader:
        all_steps = first_steps(loader, 15)
    assert all_steps == [ORDER.micro_batches(step).tolist() for step in range(15)]
    for first in range(12):
        with load_steps(identity_rows, ORDER, CPU, count_targets, first_step=first) as loader:
            assert first_steps(loader, 3) == all_steps[first:first + 3]


def read_ahead_threads():
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_the_thread_reads_no_further_than_it_may_and_ends_on_closing():
    calls = []
    with load_steps(lambda rows: calls.append(rows) or identity_rows(rows), ORDER, CPU, count_targets, ahead=3) as loader:
        next(loader)
        wait_until(lambda: len(calls) >= 8)
        time.sleep(0.05)
        assert len(calls) == 8  # the returned step and three ahead, of two micro-batches each
        assert read_ahead_threads()
    assert not read_ahead_threads()


def test_an_error_in_the_thread_is_raised_in_the_main_thread():
    def fail_at_second_step(rows):
        if rows.tolist() in ORDER.micro_batches(1).tolist():
            raise OSError("the disk is gone")
        return identity_rows(rows)

    with load_steps(fail_at_second_step, ORDER, CPU, count_targets) as loader:
        next(loader)
        with pytest.raises(OSError, match="the disk is gone"):
            next(loader)
    assert not read_ahead_threads()


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 12, 13])
def test_validation_is_the_same_sum_at_any_number_of_ranks(rows):
    def of_rank(rank, world_size):
        return list(validation_batches(identity_rows, rows, 2, CPU, rank, world_size))

    for world_size in (1, 2, 3, 4):
        ranks = [of_rank(rank, world_size) for rank in range(world_size)]
        assert len({len(batches) for batches in ranks}) == 1
        batches = [batch for batches in ranks for batch in batches]
        assert all(batch.tokens_BT.shape == (2, 3) for batch in batches)
        targets = torch.cat([batch.targets_BT for batch in batches])
        padding = (targets == IGNORE_INDEX).all(dim=1)
        assert targets[~padding][:, 0].tolist() == list(range(1, rows + 1))
        assert (targets[~padding] != IGNORE_INDEX).all()


VOCABULARY = 100
PROMPT, WORDS = False, True  # whether a part of an example is a target


def write_stream(folder, name, values, dtype, cuts):
    entries = []
    for number, part in enumerate(np.split(np.asarray(values, dtype), cuts)):
        path = folder / f"{name}-{number:05d}.bin"
        path.write_bytes(header_bytes(len(part), dtype) + part.tobytes())
        entries.append({"file": path.name, "tokens": len(part), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    return {"tokens": len(values), "shards": entries}


def write(folder, kind, examples, cuts=((), ())):
    """Write a prepared folder with a train split, from examples that are lists of (target, ids)."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = [token for example in examples for _, part in example for token in part]
    segments = [len(part) << 2 | (number == len(example)) << 1 | target
                for example in examples for number, (target, part) in enumerate(example, 1)]
    split = write_stream(folder, "train", ids, "uint16", cuts[0]) | {"documents": len(examples)}
    split["segments"] = write_stream(folder, "train-segments", segments, "uint32", cuts[1])
    manifest = {"format": 1, "kind": kind, "dtype": "uint16", "vocab_size": VOCABULARY, "tokenizer_sha256": "abc",
                "document_start_id": 0, "splits": {"train": split}}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def opened(folder, kind, verify="auto", **changes):
    tokenizer = TokenizerInfo(**{"vocab_size": VOCABULARY, "sha256": "abc"} | changes)
    return open_example_set(folder, "train", kind, tokenizer, verify)


def draw_ids(rng, least, most):
    return rng.integers(1, VOCABULARY, rng.integers(least, most + 1)).tolist()


def draw_chats(count, seed=0, most=6):
    """Return chats of one to three turns; the first token is the chat's number modulo the vocabulary."""
    rng = np.random.default_rng(seed)
    chats = []
    for number in range(count):
        chat = [part for _ in range(rng.integers(1, 4)) for part in
                ((PROMPT, draw_ids(rng, 2, most)), (WORDS, draw_ids(rng, 1, most)))]
        chat[0][1][0] = number % VOCABULARY
        chats.append(chat + [(PROMPT, draw_ids(rng, 1, 2))] * int(rng.integers(0, 2)))
    return chats


def draw_pairs(count, seed=0, most=6):
    rng = np.random.default_rng(seed)
    return [[(PROMPT, draw_ids(rng, 2, most)), (WORDS, draw_ids(rng, 1, most)), (WORDS, draw_ids(rng, 1, most))]
            for _ in range(count)]


def sequences_of(kind, example, row_tokens):
    if kind == "chats":
        told = [example]
    else:
        prompt, chosen, rejected = example
        told = [[prompt, chosen], [prompt, rejected]]
    for parts in told:
        tokens = [(token, target) for target, ids in parts for token in ids]
        yield [(token, following if target else IGNORE_INDEX)
               for (token, _), (following, target) in zip(tokens, tokens[1:])][:row_tokens]


DRAW = {"chats": draw_chats, "pairs": draw_pairs}


@pytest.mark.parametrize("kind", DRAW)
@settings(max_examples=30)
@given(count=st.integers(1, 40), seed=st.integers(0, 1000), row_tokens=st.integers(36, 64), cut=st.integers(1, 2))
def test_an_epoch_holds_every_example_once_and_nothing_else(kind, tmp_path_factory, count, seed, row_tokens, cut):
    examples = DRAW[kind](count, seed)
    folder = write(tmp_path_factory.mktemp("set"), kind, examples, cuts=([cut], [1]))
    rows = ExampleRows(opened(folder, kind), row_tokens)
    batch = rows(np.arange(len(rows)))
    per_example = 1 if kind == "chats" else 2
    found = []
    for row in range(len(rows)):
        numbers = rows.examples_in(row).tolist()
        found += numbers
        expected = [sequence for number in numbers for sequence in sequences_of(kind, examples[number], row_tokens)]
        assert len(expected) == per_example * len(numbers)
        documents = [document for document, sequence in enumerate(expected, 1) for _ in sequence]
        slots = [slot for sequence in expected for slot in sequence]
        padding = row_tokens - len(slots)
        assert list(zip(batch.tokens_BT[row].tolist(), batch.targets_BT[row].tolist())) == slots + padding * [(0, IGNORE_INDEX)]
        assert batch.document_ids_BT[row].tolist() == documents + padding * [len(expected) + 1]
    assert sorted(found) == list(range(count))
    assert rows.examples == count and rows.left_out == rows.truncated == 0
    assert rows.tokens == sum(len(sequence) for example in examples for sequence in sequences_of(kind, example, row_tokens))
    assert rows.fill == rows.tokens / batch.tokens_BT.numel()
    assert batch.target_index_M.tolist() == (batch.targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten().tolist()
    assert [tensor.dtype for tensor in (batch.tokens_BT, batch.targets_BT, batch.document_ids_BT, batch.target_index_M)] == [
        torch.int64, torch.int64, torch.int32, torch.int64]


def chat(*lengths):
    return [(bool(number % 2), [1 + number] * length) for number, length in enumerate(lengths)]


def test_a_chat_is_cut_at_the_end_of_the_row_and_left_out_where_no_target_remains(tmp_path):
    chats = [chat(3, 4), chat(8, 5), chat(9, 2), chat(2, 2, 4, 1), chat(2, 2, 5, 9), chat(30, 1)]
    rows = ExampleRows(opened(write(tmp_path, "chats", chats), "chats"), 8)
    assert (rows.examples, rows.truncated, rows.left_out) == (4, 2, 2)
    assert rows.describe() == "4 chats in 4 rows, 93.8 % full, 2 cut to MAX_SEQ_LEN=8, 2 too long and left out"
    read = {}
    for row in range(len(rows)):
        batch = rows(np.array([row]))
        for document, example in enumerate(rows.examples_in(row).tolist(), 1):
            own = batch.document_ids_BT == document
            read[example] = list(zip(batch.tokens_BT[own].tolist(), batch.targets_BT[own].tolist()))
    assert sorted(read) == [0, 1, 3, 4]
    assert all(read[example] == next(sequences_of("chats", chats[example], 8)) for example in read)
    assert read[1] == [(1, IGNORE_INDEX)] * 7 + [(1, 2)]
    assert rows.tokens == 6 + 8 + 8 + 8


def test_a_pair_is_kept_if_its_documents_fit_a_row_alone_and_otherwise_cut(tmp_path):
    pairs = opened(write(tmp_path, "pairs", [[(PROMPT, [*range(1, 1 + p)]), (WORDS, [2] * c), (WORDS, [3] * r)] for p, c, r in (
        (3, 2, 3), (4, 6, 6), (50, 1, 3), (9, 30, 20))]), "pairs")
    rows = ExampleRows(pairs, 9)
    assert (rows.examples, rows.left_out, rows.truncated, rows.row_tokens) == (4, 0, 2, 18)
    assert rows.describe() == f"4 pairs in {len(rows)} rows of 18 tokens, {100 * rows.fill:.1f} % full, 2 cut to MAX_SEQ_LEN=9"
    found = {}
    for row in range(len(rows)):
        batch = rows(np.array([row]))
        for place, example in enumerate(rows.examples_in(row).tolist()):
            own = [batch.document_ids_BT == 2 * place + side for side in (1, 2)]
            found[example] = [[*batch.tokens_BT[each].tolist(), int(batch.targets_BT[each][-1])] for each in own]
    assert found == {0: [[1, 2, 3, 2, 2], [1, 2, 3, 3, 3, 3]], 1: [[1, 2, 3, 4, *[2] * 6], [1, 2, 3, 4, *[3] * 6]],
                     2: [[*range(44, 51), 2], [*range(44, 51), 3, 3, 3]],  # the prompt's end, beside the longer answer
                     3: [[*range(5, 10), *[2] * 5], [*range(5, 10), *[3] * 5]]}  # half a row
    fingerprints = {ExampleRows(pairs, *more).fingerprint for more in ((9,), (10,), (9, True, "keep_start"), (9, True, "drop"))}
    assert len(fingerprints) == 4, "runs, references and comparisons know rows by it"


@pytest.mark.parametrize("verify", ["always", "auto", "never"])
def test_damaged_segments_are_found(tmp_path, verify):
    folder = write(tmp_path, "chats", draw_chats(9))
    path = folder / "train-segments-00000.bin"
    whole = path.read_bytes()
    for cut in (whole[:-1], whole[:-4], whole + b"\0"):
        path.write_bytes(cut)
        with pytest.raises(DataError, match=path.name):
            opened(folder, "chats", verify=verify)
    swapped = bytearray(whole)
    swapped[1024] ^= 4
    path.write_bytes(swapped)
    with pytest.raises(DataError, match="damaged" if verify != "never" else "prepare the data again"):
        opened(folder, "chats", verify=verify)
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        opened(folder, "chats", verify=verify)


def test_segments_that_are_overwritten_during_a_run_change_nothing(tmp_path):
    """They are in memory, verified."""
    examples = opened(write(tmp_path, "chats", [chat(3, 4), chat(5, 6)]), "chats")
    before = [[part.tolist() for part in examples.read(number)] for number in (0, 1)]
    os.truncate(tmp_path / "train-segments-00000.bin", 0)
    assert [[part.tolist() for part in examples.read(number)] for number in (0, 1)] == before
