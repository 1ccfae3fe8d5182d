"""Predict how training scales from 1 to 1,024 GPUs: bytes exchanged, seconds of a step, efficiency.

    python scripts/dev/plan_scaling.py --preset llama3-8b
    python scripts/dev/plan_scaling.py --preset llama3.2-1b --network 25

Other flags are settings of train.py, of which the shape, MICRO_BATCH_SIZE, MAX_SEQ_LEN, PRECISION,
GRADIENT_DTYPE, ACTIVATION_CHECKPOINTING, LORA_* and PEAK_TFLOPS count. Every GPU takes the same micro-batches
however many there are. The first efficiency assumes that all communication hides behind the computation, the
second that none does. What is assumed and what was measured: docs/scaling.md.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.command_line import CommandParser  # noqa: E402
from common.errors import run_script  # noqa: E402
from common.text import show  # noqa: E402

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MODES = ("none", "full", "hybrid")
FLOAT32 = 4
BUCKET_BYTES = 25 * 2**20  # of DDP
# Of one hop of a ring, and of one call. Source: NCCL, src/graph/tuning.cc (its "Simple" protocol).
NVLINK_LATENCY, NETWORK_LATENCY, CALL_LATENCY = 3.4e-6, 14e-6, 8.4e-6


class Sizes(NamedTuple):
    """Numbers of weights, and the bytes of one where it is exchanged."""

    layers: int
    block: int  # the matrices of one block
    vocabulary: int  # embedding or head
    matrices: int  # of the vocabulary: 1 if tied
    trained_block: int
    trained_vocabulary: int
    trained_vectors: int  # in the whole model; they are not sharded
    compute_bytes: int = 2
    gradient_bytes: int = FLOAT32


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


def sizes_of(config, vocab_size: int) -> Sizes:
    """The weights of a model that are exchanged together."""
    from learn.cost import adapter_count

    block = config.matrix_count // config.n_layers
    vocabulary = vocab_size * config.dim
    trained = (block, vocabulary, (2 * config.n_layers + 1) * config.dim)
    if config.lora_enabled:
        trained = (adapter_count(config) // config.n_layers, 0, 0)
    return Sizes(config.n_layers, block, vocabulary, 1 if config.tie_embeddings else 2, *trained,
                 compute_bytes=4 if config.precision == "fp32" else 2,
                 gradient_bytes=2 if config.gradient_dtype == "bf16" else FLOAT32)


def collectives(mode: str, sizes: Sizes, ranks: int, per_machine: int,
                micro_batches: int = 1) -> list[Collective]:
    """What one rank exchanges in a step under SHARDING=mode; a copy of hybrid takes one machine."""
    trained = sizes.layers * sizes.trained_block + sizes.matrices * sizes.trained_vocabulary
    trained += sizes.trained_vectors
    machines, compute_bytes, gradient_bytes = math.ceil(ranks / per_machine), *sizes[-2:]
    if mode == "none":
        size = trained * gradient_bytes
        calls = math.ceil(size / BUCKET_BYTES)
        return [Collective("all_reduce", size / calls, calls, ranks, machines)] if ranks > 1 else []

    shard = min(ranks, per_machine) if mode == "hybrid" else ranks
    copies, shard_machines = ranks // shard, math.ceil(shard / per_machine)
    blocks = sizes.layers * micro_batches
    matrices, learned = sizes.matrices, sizes.trained_vocabulary * gradient_bytes
    work = [
        # Each block for the forward and again for the backward; embedding and head once.
        Collective("all_gather", sizes.block * compute_bytes, 2 * blocks, shard, shard_machines),
        Collective("all_gather", sizes.vocabulary * compute_bytes, matrices * micro_batches, shard,
                   shard_machines),
        Collective("reduce_scatter", sizes.trained_block * gradient_bytes, blocks, shard, shard_machines),
        Collective("reduce_scatter", learned, matrices * micro_batches, shard, shard_machines),
        # Once a step, with the last micro-batch. Of each copy the same rows go around, one GPU of a machine.
        Collective("all_reduce", sizes.trained_block * gradient_bytes / shard, sizes.layers, copies, copies),
        Collective("all_reduce", learned / shard, matrices, copies, copies),
        Collective("all_reduce", sizes.trained_vectors * FLOAT32, 1, ranks, machines)]
    return [each for each in work if each.ranks > 1 and each.bytes]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = CommandParser(__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--vocab-size", type=int, default=128_256, metavar="V", help="of the tokenizer (default: Llama 3's)")
    add("--micro-batches", type=int, nargs="+", default=[1, 8], metavar="M",
        help="of a GPU in a step (default: 1 8)")
    add("--per-machine", type=int, default=8, metavar="N", help="GPUs of a machine (default: 8)")
    add("--nvlink", type=float, default=450, metavar="GB/S",
        help="inside a machine, of a GPU in each direction (default: 450, H100)")
    add("--network", type=float, default=50, metavar="GB/S",
        help="between machines, of a GPU in each direction (default: 50, which is 400 Gb/s)")
    add("--achieved", type=float, default=0.8, metavar="SHARE",
        help="of these that collectives reach (default: 0.8)")
    add("--utilization", type=float, default=0.45, metavar="SHARE",
        help="of PEAK_TFLOPS that the computation reaches (default: 0.45 of 989, H100)")
    args, flags = parser.parse_known_args()
    numbers = {**vars(args)}
    if not all(number > 0 for number in (*numbers.pop("micro_batches"), *numbers.values())):
        parser.error("all numbers must be above 0")
    return args, flags


def main() -> None:
    args, flags = parse_args()
    from learn.cost import forward_flops
    from settings.load import load_config

    config = load_config(flags, complete=False).config
    peak = (config.peak_tflops or 989) * 1e12
    hardware = Hardware(args.per_machine, args.nvlink * args.achieved * 1e9,
                        args.network * args.achieved * 1e9, peak * args.utilization)
    sizes = sizes_of(config, args.vocab_size)
    weights = sizes.layers * sizes.block + sizes.matrices * sizes.vocabulary
    flops = 3 * sum(forward_flops(config, args.vocab_size, config.max_seq_len))  # of a token
    flops *= 4 / 3 if config.activation_checkpointing == "block" else 1
    for count in args.micro_batches:
        seconds = count * config.micro_batch_size * config.max_seq_len * flops / hardware.flops
        tokens = f"{count} x {config.micro_batch_size} x {config.max_seq_len}"
        show(f"{weights / 1e6:,.0f} million weights, {tokens} tokens a GPU and step (micro-batches x rows x "
             f"length): {seconds:.3f} s of computation", "",
             "| GPUs | " + " | ".join(f"{mode}: GB sent | s | efficiency" for mode in MODES) + " |",
             "|---|" + "---|---|---|" * len(MODES))
        pays = dict.fromkeys(("hidden", "not hidden"))
        for ranks in RANKS:
            cells, step = [], {}
            for mode in MODES:
                work = collectives(mode, sizes, ranks, args.per_machine, count)
                exchange = sum(map(hardware.seconds, work))
                step[mode] = max(seconds, exchange), seconds + exchange
                cells.append(f"{sum(each.sent for each in work) / 1e9:.1f} | {exchange:.3f} | "
                             f"{seconds / step[mode][0]:.0%}, {seconds / step[mode][1]:.0%}")
            show(f"| {ranks:,} | " + " | ".join(cells) + " |")
            for index, how in enumerate(pays):
                if pays[how] is None and step["hybrid"][index] < step["full"][index]:
                    pays[how] = ranks
        show("", *(f"hybrid is faster than full from {ranks:,} GPUs on, communication {how}" if ranks else
                   f"hybrid is not faster than full up to {RANKS[-1]:,} GPUs, communication {how}"
                   for how, ranks in pays.items()), "")


if __name__ == "__main__":
    run_script(main)
