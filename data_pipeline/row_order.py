"""The rows of each step, rank and micro-batch: a pure function of (seed, step, rank, world size).

Of a mixture also its weights, and the steps at which they change.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FEISTEL_ROUNDS = 6
WEIGHT_UNITS = 1 << 24  # in the sum of a phase's weights, so that a position times a weight is below 2^63

Permutation = Callable[[np.ndarray], np.ndarray]


def permutation(n: int, seed: int, epoch: int, source: int = 0) -> Permutation:
    """Return a pseudo-random bijection on [0, n) that needs no memory: from an array of positions to int64.

    A Feistel network over pairs (left, right) with left < a, right < b and a*b >= n, adding modulo a and b. A
    value beyond n goes through it again until it falls inside; as a*b < n + a, that is rare.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 (walking) and 5 (a*b).
    """
    assert 1 <= n < 1 << 60 and seed >= 0 and epoch >= 0
    root = math.isqrt(n - 1) + 1
    a, b = np.uint64(root), np.uint64(-(-n // root))
    # A last 0 changes nothing: NumPy fills the seeds up with zeros.
    keys = np.random.SeedSequence([seed, epoch, source]).generate_state(FEISTEL_ROUNDS, np.uint64)

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


def rows_at(positions: np.ndarray, n_rows: int, seed: int, source: int = 0) -> np.ndarray:
    """Return the int64 indices of the rows at ascending positions: one permutation of all after another."""
    epochs, within = np.divmod(positions, n_rows)
    return np.concatenate([permutation(n_rows, seed, epoch, source)(within[epochs == epoch])
                           for epoch in np.unique(epochs).tolist()])


def rows_of_step(step: int, rows_per_step: int, n_rows: int, seed: int) -> np.ndarray:
    """Return the int64 indices of the rows of a step, of all ranks; a step may cross the end of an epoch."""
    return rows_at(np.arange(step * rows_per_step, (step + 1) * rows_per_step), n_rows, seed)


class Phase(NamedTuple):
    """A part of a run in which the sources of a mixture keep their weights."""

    start: int  # its first position
    weights: tuple[int, ...]  # of each source, as `weight_units` returns them


def weight_units(weights: Sequence[float]) -> tuple[int, ...]:
    """Return weights as whole numbers with a sum of about WEIGHT_UNITS; none that is above 0 becomes 0."""
    largest = max(weights)  # dividing first, as the sum of floats could overflow or vanish
    total = sum(weight / largest for weight in weights)
    return tuple(max(1, round(weight / largest / total * WEIGHT_UNITS)) if weight else 0
                 for weight in weights)


@dataclass(frozen=True)
class Mixing:
    """Which row of which source is at each position of a run on a mixture, without any state.

    The first p positions of a phase are divided over the sources one after the other: each takes, rounded
    down, its weight's share of what those before it have left. So at every moment, and in every step, a
    source has its share to within a row or so, and each further position belongs to exactly one source.

    Args:
        sizes: the rows of each source. Its rows are numbered after those of the sources before it.
        phases: from position 0 on.
    """

    sizes: tuple[int, ...]
    phases: tuple[Phase, ...]

    def taken(self, positions: np.ndarray) -> np.ndarray:
        """Return how many rows each source gives before each position: (sources, positions), int64."""
        taken = np.zeros((len(self.sizes), len(positions)), np.int64)
        ends = [phase.start for phase in self.phases[1:]] + [1 << 38]
        for phase, end in zip(self.phases, ends):
            left, units = np.clip(positions, phase.start, end) - phase.start, sum(phase.weights)
            for source, weight in enumerate(phase.weights):
                if weight:  # the last one with a weight takes all that is left
                    own = left * weight // units
                    taken[source] += own
                    left, units = left - own, units - weight
        return taken

    def choose(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of the row at each position, and how many rows that source gave before."""
        before = self.taken(positions)
        sources = (self.taken(positions + 1) - before).argmax(axis=0)
        return sources, before[sources, np.arange(len(positions))]

    def rows_at(self, positions: np.ndarray, seed: int | None) -> np.ndarray:
        """Return the int64 indices of the rows at ascending positions; without a seed, unshuffled."""
        sources, turns = self.choose(positions)
        rows, first = np.empty(len(positions), np.int64), 0
        for source, size in enumerate(self.sizes):
            if len(own := np.flatnonzero(sources == source)):
                rows[own] = first + (turns[own] % size if seed is None else
                                     rows_at(turns[own], size, seed, source))
            first += size
        return rows


@dataclass(frozen=True)
class RowOrder:
    """The rows that one rank reads: a contiguous part of each step's rows, cut into micro-batches."""

    n_rows: int
    rows_per_step: int  # of all ranks together
    micro_batch_size: int
    seed: int
    rank: int = 0
    world_size: int = 1
    mixing: Mixing | None = None  # of a mixture's sources

    def __post_init__(self):
        assert self.rows_per_step % (self.micro_batch_size * self.world_size) == 0

    def all_rows(self, step: int) -> np.ndarray:
        """Return the row indices of a step, of all ranks, int64."""
        if self.mixing is None:
            return rows_of_step(step, self.rows_per_step, self.n_rows, self.seed)
        positions = np.arange(step * self.rows_per_step, (step + 1) * self.rows_per_step)
        return self.mixing.rows_at(positions, self.seed)

    def micro_batches(self, step: int) -> np.ndarray:
        """Return this rank's row indices of a step, int64 of shape (micro-batches, micro_batch_size)."""
        return self.all_rows(step).reshape(self.world_size, -1, self.micro_batch_size)[self.rank]
