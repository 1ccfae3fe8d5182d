"""How training scales, by formula: what ranks exchange in a step, and in what time (docs/scaling.md)."""

import math
from typing import NamedTuple

from config import Config
from learn.cost import FLOAT32, adapter_count

BUCKET_BYTES = 25 * 2**20  # of DDP
# Of one hop of a ring, and of one call. Source: NCCL, src/graph/tuning.cc (its "Simple" protocol).
NVLINK_LATENCY, NETWORK_LATENCY, CALL_LATENCY = 3.4e-6, 14e-6, 8.4e-6


class Exchanged(NamedTuple):
    """Numbers of weights that are exchanged together, and the bytes of one of them."""

    layers: int
    block: int  # the matrices of one block
    vocabulary: int  # embedding or head
    matrices: int  # of the vocabulary: 1 if tied
    trained_block: int
    trained_vocabulary: int
    trained_vectors: int  # in the whole model; they are not sharded
    compute_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "Exchanged":
        """Return those of a model."""
        block, vocabulary = config.matrix_count // config.n_layers, vocab_size * config.dim
        trained = (block, vocabulary, (2 * config.n_layers + 1) * config.dim)
        if config.lora_enabled:
            trained = (adapter_count(config) // config.n_layers, 0, 0)
        return cls(config.n_layers, block, vocabulary, 1 if config.tie_embeddings else 2, *trained,
                   compute_bytes=4 if config.precision == "fp32" else 2,
                   gradient_bytes=2 if config.gradient_dtype == "bf16" else FLOAT32)


class Collective(NamedTuple):
    """Equal collectives of a step, as one rank of `ranks` takes part in them, on so many machines."""

    kind: str  # all_gather, reduce_scatter, all_reduce
    bytes: float  # the whole tensor, of each call
    calls: int
    ranks: int
    machines: int

    @property
    def sent(self) -> float:
        """The bytes that one rank sends in a ring."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return self.calls * rounds * self.bytes * (self.ranks - 1) / self.ranks


class Hardware(NamedTuple):
    """What a cluster is assumed to reach."""

    per_machine: int
    nvlink: float  # bytes a second of a GPU, in each direction
    network: float
    flops: float

    def seconds(self, work: Collective) -> float:
        """How long the collectives take, after NCCL's model: a ring, or for small all-reduces a tree."""
        bandwidth = self.nvlink
        if work.machines > 1:  # a ring enters each machine once for each of its GPUs that take part
            bandwidth = min(self.nvlink, work.ranks / work.machines * self.network)
        rounds = 2 if work.kind == "all_reduce" else 1
        hops, far = work.ranks - 1, work.machines - 1
        latency = rounds * ((hops - far) * NVLINK_LATENCY + far * NETWORK_LATENCY)
        if work.kind == "all_reduce":
            near = work.ranks / work.machines - 1
            tree = 2 * (near * NVLINK_LATENCY + math.log2(work.machines) * NETWORK_LATENCY)
            latency = min(latency, tree)
        return work.sent / bandwidth + work.calls * (latency + CALL_LATENCY)


def collectives(mode: str, model: Exchanged, ranks: int, per_machine: int,
                micro_batches: int = 1) -> list[Collective]:
    """What one rank exchanges in a step under SHARDING=mode; a copy of hybrid takes one machine."""
    machines, compute_bytes, gradient_bytes = math.ceil(ranks / per_machine), *model[-2:]
    if mode == "none":
        trained = model.layers * model.trained_block + model.matrices * model.trained_vocabulary
        size = (trained + model.trained_vectors) * gradient_bytes
        calls = math.ceil(size / BUCKET_BYTES)
        return [Collective("all_reduce", size / calls, calls, ranks, machines)] if ranks > 1 else []

    shard = min(ranks, per_machine) if mode == "hybrid" else ranks
    copies, shard_machines = ranks // shard, math.ceil(shard / per_machine)
    blocks, matrices = model.layers * micro_batches, model.matrices * micro_batches
    block, vocabulary = model.trained_block * gradient_bytes, model.trained_vocabulary * gradient_bytes
    work = [
        # Each block for the forward and again for the backward; embedding and head once.
        Collective("all_gather", model.block * compute_bytes, 2 * blocks, shard, shard_machines),
        Collective("all_gather", model.vocabulary * compute_bytes, matrices, shard, shard_machines),
        Collective("reduce_scatter", block, blocks, shard, shard_machines),
        Collective("reduce_scatter", vocabulary, matrices, shard, shard_machines),
        # Once a step, with the last micro-batch. Of each copy the same rows go around, one GPU of a machine.
        Collective("all_reduce", block / shard, model.layers, copies, copies),
        Collective("all_reduce", vocabulary / shard, model.matrices, copies, copies),
        Collective("all_reduce", model.trained_vectors * FLOAT32, 1, ranks, machines)]
    return [each for each in work if each.ranks > 1 and each.bytes]
