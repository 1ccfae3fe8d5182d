import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from factories import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.shards import HEADER_BYTES, Shard, TokenizerInfo, TokenSet, header_bytes, open_token_set
from dataloaders import Batch, Mixing, RowOrder, TokenRows, load_steps, permute, validation_batches
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu():
    device = torch.device("cuda", 0)
    with load_steps(identity_rows, ORDER, device, count_targets) as loader:
        for step in range(20):
            batches, count = next(loader)
            assert count == 18 and all(batch.targets_BT.device == device for batch in batches)
            assert all(batch.document_ids_BT.is_pinned() for batch in batches), "they stay on the CPU"
            assert [batch.tokens_BT[:, 0].tolist() for batch in batches] == ORDER.micro_batches(step).tolist()
    assert identity_rows(np.arange(3)).pin_memory().targets_BT.is_pinned()
