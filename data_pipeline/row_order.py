"""The rows of each step, rank and micro-batch: a pure function of (seed, step, rank, world size)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

FEISTEL_ROUNDS = 6

Permutation = Callable[[np.ndarray], np.ndarray]


def permutation(n: int, seed: int, epoch: int) -> Permutation:
    """Return a pseudo-random bijection on [0, n) that needs no memory: from an array of positions to int64.

    A Feistel network over pairs (left, right) with left < a, right < b and a*b >= n, adding modulo a and b. A
    value beyond n goes through it again until it falls inside; as a*b < n + a, that is rare.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 (walking) and 5 (a*b).
    """
    assert 1 <= n < 1 << 60 and seed >= 0 and epoch >= 0
    root = math.isqrt(n - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-n // root))
    keys = np.random.SeedSequence([seed, epoch]).generate_state(FEISTEL_ROUNDS, np.uint64)

    def encipher(values: np.ndarray) -> np.ndarray:
        left, right = values // b, values % b
        for key_left, key_right in zip(keys[::2], keys[1::2]):
            left = (left + _mix(right ^ key_left) % a) % a
            right = (right + _mix(left ^ key_right) % b) % b
        return left * b + right

    def permute(positions: np.ndarray) -> np.ndarray:
        values = encipher(np.asarray(positions, np.uint64))
        while len(outside := np.flatnonzero(values >= n)):
            values[outside] = encipher(values[outside])
        return values.astype(np.int64)

    return permute


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values, so that each input bit affects all output bits.

    Source: splitmix64's finaliser (Steele, Lea and Flood 2014), variant 13 of Stafford.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def rows_of_step(step: int, rows_per_step: int, n_rows: int, seed: int) -> np.ndarray:
    """Return the int64 indices of the rows of a step, of all ranks; a step may cross the end of an epoch."""
    positions = np.arange(step * rows_per_step, (step + 1) * rows_per_step)
    epochs, within = np.divmod(positions, n_rows)
    return np.concatenate([permutation(n_rows, seed, epoch)(within[epochs == epoch])
                           for epoch in np.unique(epochs).tolist()])


@dataclass(frozen=True)
class RowOrder:
    """The rows that one rank reads: a contiguous part of each step's rows, cut into micro-batches."""

    n_rows: int
    rows_per_step: int  # of all ranks together
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self):
        assert self.rows_per_step % (self.micro_batch_size * self.world_size) == 0

    def all_rows(self, step: int) -> np.ndarray:
        """Return the row indices of a step, of all ranks, int64."""
        return rows_of_step(step, self.rows_per_step, self.n_rows, self.seed)

    def micro_batches(self, step: int) -> np.ndarray:
        """Return this rank's row indices of a step, int64 of shape (micro-batches, micro_batch_size)."""
        return self.all_rows(step).reshape(self.world_size, -1, self.micro_batch_size)[self.rank]
