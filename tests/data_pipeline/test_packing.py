import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders import pack

# (lengths, capacity)
problems = st.integers(1, 40).flatmap(lambda most: st.tuples(st.lists(st.integers(1, most), max_size=80), st.just(most)))


def best_fit_decreasing(lengths, capacity):
    """Return the room left in each bin, by the definition."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        room = min(fitting, default=capacity)
        if fitting:
            rooms.remove(room)
        rooms.append(room - length)
    return sorted(rooms)


def rooms_of(packing, lengths, capacity):
    return sorted(capacity - int(lengths[packing.items_in(bin)].sum()) for bin in range(len(packing)))


@settings(max_examples=300)
@given(problems)
def test_every_item_is_packed_once_and_as_the_naive_way_packs_it(problem):
    lengths, capacity = np.array(problem[0], np.int64), problem[1]
    packing = pack(lengths, capacity)
    assert sorted(packing.items.tolist()) == list(range(len(lengths)))
    assert packing.offsets[0] == 0 and packing.offsets[-1] == len(lengths)
    assert all(len(packing.items_in(bin)) for bin in range(len(packing)))
    assert rooms_of(packing, lengths, capacity) == best_fit_decreasing(lengths.tolist(), capacity)


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


def test_neighbours_of_one_length_come_into_different_bins():
    assert sorted(np.sort(bin).tolist() for bin in np.split(pack(np.full(12, 3), 10).items, 4)) == [
        [0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


@pytest.mark.parametrize("median, sigma, capacity", [(300, 1.0, 2048), (300, 1.0, 4096), (900, 0.9, 4096)])
def test_rows_of_chats_are_filled(median, sigma, capacity):
    """The lengths of chats are roughly log-normal."""
    lengths = np.exp(np.random.default_rng(0).normal(np.log(median), sigma, 100_000)).astype(np.int64).clip(2, capacity)
    packing = pack(lengths, capacity)
    assert rooms_of(packing, lengths, capacity)[0] == 0
    assert lengths.sum() / (len(packing) * capacity) >= 0.995


def test_no_item_is_no_bin():
    assert len(pack(np.array([], np.int64), 8)) == 0


def test_ids_beyond_16_bits_are_sorted_as_well():
    packing = pack(np.array([70_000, 3, 65_537, 30_000]), 100_000)
    assert sorted(map(len, np.split(packing.items, packing.offsets[1:-1]))) == [2, 2]
    assert packing.items_in(0).tolist() == [0, 3]
