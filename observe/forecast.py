"""`train.py --check memory` and `--check scaling`: forecasts without data, weights or a GPU.

That of scaling is by formula: communication per step, and its time (docs/scaling.md).
"""

import math
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from common.command_line import CommandParser
from common.errors import SettingsError
from common.text import show
from config import Config, numeric_rules, shape_rules, sharding_rules
from learn.cost import FLOAT32, adapter_count, estimate_memory, forward_flops, parameter_count
from settings.load import load_config

MEMORY = """Trace the memory of a training step with fake tensors and ranks, for a model of any size.

    python train.py --check memory --preset llama3-8b --world-size 8

Other flags are settings; data and weights are not read. The command prints the memory of a rank as traced by
torch, and compares it with the forecast of --check. The trace is eager, with causal attention and the head's
chunks of a CPU, and that forecast assumes the same. The last line is the forecast for a GPU with the given
settings.
"""
SCALING = """Predict how training scales from 1 to 1,024 GPUs: bytes exchanged, seconds per step, efficiency.

    python train.py --check scaling --preset llama3-8b
    python train.py --check scaling --preset llama3.2-1b --network 25

Other flags are settings. The prediction uses the model's shape, MICRO_BATCH_SIZE, MAX_SEQ_LEN, PRECISION,
GRADIENT_DTYPE, ACTIVATION_CHECKPOINTING, LORA_* and PEAK_TFLOPS. The work per GPU is constant (weak scaling).
The first efficiency assumes that communication overlaps completely with computation, the second that it does
not overlap. docs/scaling.md lists the assumptions and measurements.
"""
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MODES = ("none", "full", "hybrid")
BUCKET_BYTES = 25 * 2**20  # DDP's default
# Latency of one hop in a ring, and of one call. Source: NCCL, src/graph/tuning.cc ("Simple" protocol).
NVLINK_LATENCY, NETWORK_LATENCY, CALL_LATENCY = 3.4e-6, 14e-6, 8.4e-6


def make_parser(name: str, description: str) -> ArgumentParser:
    """Return a parser with the flags that both forecasts share."""
    parser = CommandParser(description, prog=f"python train.py --check {name}", allow_abbrev=False)
    parser.add_argument("--vocab-size", type=int, default=128_256, metavar="V",
                        help="vocabulary size (default: 128256, as for Llama 3)")
    return parser


def read_settings(flags: Sequence[str], *rules: Callable[[Config], Iterator[str]]) -> Config:
    """Return the settings, checked against these rules; data and a start may be missing."""
    config = load_config(flags, complete=False).config
    if problems := [problem for rule in rules for problem in rule(config)]:
        raise SettingsError(*problems)
    return config


def forecast_memory(argv: Sequence[str]) -> None:
    """Print the memory of a traced step, and the forecast."""
    args, flags = make_parser("memory", MEMORY).parse_known_args(argv)
    given = read_settings(flags, numeric_rules, sharding_rules, shape_rules)
    for name, none in (("distillation_enabled", False), ("lora_base_quantization", "none")):
        if getattr(given, name) != none:
            raise SettingsError(f"{name.upper()} cannot be traced; set it to {str(none).lower()}")
    changes = {"document_mask": False, "async_save": False}
    changes["attention_backend"] = "sdpa"  # keeps what a GPU's kernels keep
    if given.compile:
        recompute = "block" if given.activation_checkpointing == "block" else "none"
        changes |= {"compile": False, "activation_checkpointing": recompute}
        show(f"Tracing without the compiler, with ACTIVATION_CHECKPOINTING={recompute}")
    config = given.model_copy(update=changes)

    import torch  # takes seconds

    from model_utils import DTYPES
    from observe.check import GIB, describe_batch, describe_memory
    from observe.trace import trace

    dtype = DTYPES.get(config.precision, torch.bfloat16)
    show(f"Batch: {describe_batch(config)}")
    traced = trace(config, args.vocab_size, dtype)
    held = {name: value for name, value in traced._asdict().items() if name != "peak"}
    held["activations, gathered and temporary"] = traced.peak - sum(held.values())
    for name, value in held.items():
        show(f"  {name:<36}{value / GIB:8.2f} GiB")
    forecast = estimate_memory(config, args.vocab_size, dtype.itemsize, "cpu")
    both = forecast.total + forecast.host
    on_gpu = estimate_memory(given, args.vocab_size, dtype.itemsize)
    show(f"  {'peak':<36}{traced.peak / GIB:8.2f} GiB; the forecast is {both / GIB:.2f} "
         f"({100 * (both / traced.peak - 1):+.1f} %)",
         f"Forecast: {describe_memory(forecast)}",
         f"With the given settings on a GPU: {describe_memory(on_gpu)}")


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


def forecast_scaling(argv: Sequence[str]) -> None:
    """Print the communication of a GPU per step and the efficiency, by SHARDING and number of GPUs."""
    parser = make_parser("scaling", SCALING)
    add = parser.add_argument
    add("--micro-batches", type=int, nargs="+", default=[1, 8], metavar="M",
        help="micro-batches of a GPU per step (default: 1 8)")
    add("--per-machine", type=int, default=8, metavar="N", help="GPUs in a machine (default: 8)")
    add("--nvlink", type=float, default=450, metavar="GB/S",
        help="bandwidth of a GPU within a machine, each direction (default: 450, H100)")
    add("--network", type=float, default=50, metavar="GB/S",
        help="bandwidth of a GPU between machines, each direction (default: 50, which is 400 Gb/s)")
    add("--achieved", type=float, default=0.8, metavar="SHARE",
        help="share of the bandwidth that collectives achieve (default: 0.8)")
    add("--utilization", type=float, default=0.45, metavar="SHARE",
        help="share of PEAK_TFLOPS that computation achieves (default: 0.45 of 989, H100)")
    args, flags = parser.parse_known_args(argv)
    numbers = {**vars(args)}
    if not all(number > 0 for number in (*numbers.pop("micro_batches"), *numbers.values())):
        parser.error("all numbers must be above 0")

    config = read_settings(flags, shape_rules)
    peak = (config.peak_tflops or 989) * 1e12
    hardware = Hardware(args.per_machine, args.nvlink * args.achieved * 1e9,
                        args.network * args.achieved * 1e9, peak * args.utilization)
    flops = 3 * sum(forward_flops(config, args.vocab_size, config.max_seq_len))  # of a token
    flops *= 4 / 3 if config.activation_checkpointing == "block" else 1
    for count in args.micro_batches:
        seconds = count * config.micro_batch_size * config.max_seq_len * flops / hardware.flops
        tokens = f"{count} x {config.micro_batch_size} x {config.max_seq_len}"
        show(f"{parameter_count(config, args.vocab_size) / 1e6:,.0f} million weights, {tokens} tokens per "
             f"GPU and step (micro-batches x rows x length): {seconds:.3f} s of computation", "",
             "| GPUs | " + " | ".join(f"{mode}: GB sent | s | efficiency" for mode in MODES) + " |",
             "|---|" + "---|---|---|" * len(MODES))
        pays = dict.fromkeys(("with", "without"))
        for ranks in RANKS:
            cells, step = [], {}
            for mode in MODES:
                work = collectives(mode, config, args.vocab_size, ranks, args.per_machine, count)
                exchange = sum(map(hardware.seconds, work))
                step[mode] = max(seconds, exchange), seconds + exchange
                cells.append(f"{sum(each.sent for each in work) / 1e9:.1f} | {exchange:.3f} | "
                             f"{seconds / step[mode][0]:.0%}, {seconds / step[mode][1]:.0%}")
            show(f"| {ranks:,} | " + " | ".join(cells) + " |")
            for index, overlap in enumerate(pays):
                if pays[overlap] is None and step["hybrid"][index] < step["full"][index]:
                    pays[overlap] = ranks
        show("", *(f"{overlap.capitalize()} overlap, hybrid is "
                   + (f"faster than full from {ranks:,} GPUs" if ranks else
                      f"not faster than full up to {RANKS[-1]:,} GPUs")
                   for overlap, ranks in pays.items()), "")


FORECASTS = {"memory": forecast_memory, "scaling": forecast_scaling}
