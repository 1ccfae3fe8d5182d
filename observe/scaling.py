"""The scaling of training by formula: communication per step, and its time (docs/scaling.md)."""

import math
from typing import NamedTuple

from config import Config
from learn.cost import FLOAT32, adapter_count

BUCKET_BYTES = 25 * 2**20  # DDP's default
# Latency of one hop in a ring, and of one call. Source: NCCL, src/graph/tuning.cc ("Simple" protocol).
NVLINK_LATENCY, NETWORK_LATENCY, CALL_LATENCY = 3.4e-6, 14e-6, 8.4e-6


class Collective(NamedTuple):
    """Identical collectives of a step over some ranks and machines, as seen by one rank."""

    kind: str  # all_gather, reduce_scatter, all_reduce
    bytes: float  # of the whole tensor, per call
    calls: int
    ranks: int
    machines: int

    @property
    def sent(self) -> float:
        rounds = 2 if self.kind == "all_reduce" else 1
        return self.calls * rounds * self.bytes * (self.ranks - 1) / self.ranks


class Hardware(NamedTuple):
    """The assumed performance of a cluster."""

    per_machine: int
    nvlink: float  # bytes per second of a GPU, in each direction
    network: float
    flops: float

    def seconds(self, work: Collective) -> float:
        """Return the time of collectives by NCCL's model: a ring, or for small all-reduces a tree."""
        bandwidth = self.nvlink
        if work.machines > 1:  # a ring enters a machine once for each participating GPU
            bandwidth = min(self.nvlink, work.ranks / work.machines * self.network)
        rounds = 2 if work.kind == "all_reduce" else 1
        hops, far = work.ranks - 1, work.machines - 1
        latency = rounds * ((hops - far) * NVLINK_LATENCY + far * NETWORK_LATENCY)
        if work.kind == "all_reduce":
            near = work.ranks / work.machines - 1
            tree = 2 * (near * NVLINK_LATENCY + math.log2(work.machines) * NETWORK_LATENCY)
            latency = min(latency, tree)
        return work.sent / bandwidth + work.calls * (latency + CALL_LATENCY)


def collectives(mode: str, config: Config, vocab_size: int, ranks: int, per_machine: int,
                micro_batches: int = 1) -> list[Collective]:
    """Return one rank's collectives in a step with SHARDING=mode; with hybrid, each machine has a copy."""
    layers, machines = config.n_layers, math.ceil(ranks / per_machine)
    compute_bytes = FLOAT32 if config.precision == "fp32" else 2
    gradient_bytes = 8 if config.reproducible else 2 if config.gradient_dtype == "bf16" else FLOAT32
    # Weights of a block, and of the embedding or head; for trained ones, the bytes of their gradients.
    block, vocabulary = config.matrix_count // layers, vocab_size * config.dim
    tables = 1 if config.tie_embeddings else 2
    trained_block, trained_vocabulary = block * gradient_bytes, vocabulary * gradient_bytes
    vectors = (2 * layers + 1) * config.dim  # not sharded
    if config.lora_enabled:
        trained_block, trained_vocabulary, vectors = adapter_count(config) // layers * gradient_bytes, 0, 0
    if mode == "none":
        size = layers * trained_block + tables * trained_vocabulary + vectors * gradient_bytes
        calls = math.ceil(size / BUCKET_BYTES)
        return [Collective("all_reduce", size / calls, calls, ranks, machines)] if ranks > 1 else []

    shard = min(ranks, per_machine) if mode == "hybrid" else ranks
    copies, shard_machines = ranks // shard, math.ceil(shard / per_machine)
    work = [
        # Each block in the forward and again in the backward; embedding and head once.
        Collective("all_gather", block * compute_bytes, 2 * layers * micro_batches, shard, shard_machines),
        Collective("all_gather", vocabulary * compute_bytes, tables * micro_batches, shard, shard_machines),
        Collective("reduce_scatter", trained_block, layers * micro_batches, shard, shard_machines),
        Collective("reduce_scatter", trained_vocabulary, tables * micro_batches, shard, shard_machines),
        # Once a step, with the last micro-batch, between the GPUs that hold the same rows of each copy.
        Collective("all_reduce", trained_block / shard, layers, copies, copies),
        Collective("all_reduce", trained_vocabulary / shard, tables, copies, copies),
        Collective("all_reduce", vectors * max(gradient_bytes, FLOAT32), 1, ranks, machines)]
    return [each for each in work if each.ranks > 1 and each.bytes]
