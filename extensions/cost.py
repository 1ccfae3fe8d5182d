"""Formulas for the FLOPs, the memory and the communication of a step.

FLOPs include matmuls (2 per multiply-add) and full attention, ignoring causality and document masks, but not
what attention kernels recompute. *Needed* FLOPs (for MFU) exclude padding and recomputation; *computed* FLOPs
(for HFU) include them. Full training without padding needs 6 N + 12 L H Q T per token. Source: Chowdhery et
al. 2022, appendix B (arXiv:2204.02311).
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from config import LORA_LAYERS, Config, ModelConfig, padded
from extensions.settings import answered_together, answers_per_row
from learn.objectives import reference_is_live
from learn.optim import OPTIMIZERS, muon_batch
from model_kernels.attention import KERNELS
from model_kernels.head import CHUNK_CHOICES, tokens_in_chunk
from model_utils import why_not_compile
from run.saving import pinned_bytes

FLOAT32 = 4
ROOM_FOR_CHUNKS = 0.8  # share of a GPU's memory that a forecast with larger chunks may need
MATMULS_KEPT = 0.6  # below this activation budget, the compiler recomputes matmuls
# Planned machines have eight GPUs, with 80 % of 450 GB/s each within a machine and of 50 GB/s each between
# machines. Seconds of a hop in a ring, and of a call, are those of NCCL's src/graph/tuning.cc ("Simple").
MACHINE, NVLINK, NETWORK = 8, 0.8 * 450e9, 0.8 * 50e9
NVLINK_LATENCY, NETWORK_LATENCY, CALL_LATENCY = 3.4e-6, 14e-6, 8.4e-6
BUCKET_BYTES = 25 * 2**20  # DDP's default
QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5 + FLOAT32 / 64}  # per weight; of nf4 with its share of a scale


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of weights, without vocabulary padding."""
    in_block = sum(math.prod(shape) for shape in config.block_shapes.values())
    matrices = 1 if config.tie_embeddings else 2
    return config.n_layers * in_block + config.dim * (1 + matrices * vocab_size)


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the (outputs, inputs) of a block's linear layers by their last name, such as "wq"."""
    return {name.rpartition(".")[2]: shape for name, shape in config.block_shapes.items() if len(shape) == 2}


def weight_bytes(config: Config) -> int:
    """Return the bytes of a number in a trained matrix and, but for REPRODUCIBLE, in its gradient."""
    return 2 if config.weight_dtype == "bf16" else FLOAT32


def state_bytes(config: Config) -> int:
    """Return the bytes of a number in the optimizer's state of a matrix."""
    return 2 if config.optimizer_dtype == "bf16" else FLOAT32


def targets_of(config: Config) -> set[str]:
    return set(config.lora_target_modules.split(",")) if config.lora_enabled else set()


def adapter_count(config: Config) -> int:
    shapes = linear_shapes(config)
    return config.n_layers * config.lora_rank * sum(sum(shapes[name]) for name in targets_of(config))


class Work(NamedTuple):
    """Token counts of some micro-batches."""

    tokens: int = 0  # including padding
    padding: int = 0
    targets: int = 0
    large: int = 0  # targets in micro-batches with several chunks of logits
    steps: int = 0


class Flops(NamedTuple):
    """FLOPs in matmuls and attention (per token) and in the head (per target)."""

    matmuls: int = 0
    attention: int = 0
    head: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*map(sum, zip(self, other)))


class StepFlops:
    """FLOPs of a model's steps with an objective; `vocab_size` excludes padding."""

    def __init__(self, config: Config, model, objective, vocab_size: int, device_type: str):
        rows = padded(vocab_size)
        self.chunk = tokens_in_chunk(config.head_chunk_tokens, rows, device_type)
        # Such an objective needs all log-probabilities before the first gradient.
        self.again = 0
        if config.training_stage in ("dpo", "grpo") and not config.distillation_enabled:
            self.again = 2 * rows * config.dim

        def flops(rows: int) -> Flops:
            forward, others = forward_flops(config, rows, config.max_seq_len), Flops()
            if reference_is_live(config):
                others = forward
            elif teacher := getattr(objective, "teacher", None):
                others = teacher_flops(teacher, rows, config.max_seq_len)
            if config.training_stage == "dpo" and config.preference_objective == "kto":
                others += others + forward  # of the other answers, before the first backward
            return forward + Flops(2 * adapter_count(config)) + backward_flops(config, model, rows) + others

        self.needed, self.computed = flops(vocab_size), flops(rows) + recomputed(config)

    def read(self, batches: Iterable) -> Work:
        """Count the contents of a step's micro-batches, without reading their tensors."""
        counts = [(batch.tokens_BT.numel(), batch.padding, batch.targets,
                   batch.targets if batch.targets > self.chunk else 0) for batch in batches]
        return Work(*map(sum, zip(*counts)), steps=1)

    def of(self, work: Work) -> tuple[Flops, Flops]:
        """Return the needed and the computed FLOPs."""
        matmuls, attention, head = self.needed
        real = work.tokens - work.padding
        needed = Flops(real * matmuls, real * attention, work.targets * head)
        matmuls, attention, head = self.computed
        again = work.large * self.again
        return needed, Flops(work.tokens * matmuls, work.tokens * attention, work.targets * head + again)


def forward_flops(config: ModelConfig, rows: int, seq_len: int) -> Flops:
    """Return the FLOPs of a forward without adapters, with a head of `rows` rows."""
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * seq_len
    return Flops(2 * config.matrix_count, attention, 2 * rows * config.dim)


def backward_flops(config: Config, model, rows: int) -> Flops:
    """Return the FLOPs of a backward. Layers before the first trained parameter need no gradients."""
    if not config.lora_enabled:
        forward = forward_flops(config, rows, config.max_seq_len)
        return forward + forward
    head, embedding = model.head_matrix, model.tok_embeddings
    shapes, targets = linear_shapes(config), targets_of(config)
    learned = rows if head.weight.requires_grad else len(getattr(head, "ids", ()))
    reached = embedding.weight.requires_grad or hasattr(embedding, "ids")  # the input needs a gradient
    matmuls = attention = 0
    for _ in range(config.n_layers):
        for layers in (("wq", "wk", "wv"), ("wo",), ("w1", "w3"), ("w2",)):  # in the order of the forward
            for name in layers:
                outputs, inputs = shapes[name]
                matmuls += 2 * inputs * outputs * reached
                if name in targets:  # gradients of both factors, and of their inputs
                    matmuls += 2 * config.lora_rank * (2 * outputs + inputs + inputs * reached)
            reached = reached or not targets.isdisjoint(layers)
            if "wq" in layers:
                attention += 8 * config.n_heads * config.head_dim * config.max_seq_len * reached
    return Flops(matmuls, attention, 2 * (rows + learned) * config.dim)


def recomputed(config: Config) -> Flops:
    """Return the FLOPs that activation checkpointing recomputes in the backward."""
    mode = config.activation_checkpointing
    if mode == "none" or (mode == "selective" and config.activation_memory_budget >= MATMULS_KEPT):
        return Flops()
    # An upper bound for lower budgets.
    forward = forward_flops(config, 0, config.max_seq_len) + Flops(2 * adapter_count(config))
    if not config.compile and "w2" not in targets_of(config):
        # Eager checkpointing stops at the last tensor that the backward needs: the input of w2.
        forward += Flops(-2 * config.n_layers * math.prod(linear_shapes(config)["w2"]))
    return forward


def teacher_flops(teacher, rows: int, seq_len: int) -> Flops:
    """Return the FLOPs of a teacher's forward, without its padding."""
    model = teacher.model
    if isinstance(model.config, ModelConfig):
        return forward_flops(model.config, rows, seq_len)
    output = model.get_output_embeddings().weight
    look_ups = [module.weight for module in model.modules() if type(module).__name__ == "Embedding"]
    known = {id(weight) for weight in (*look_ups, output)}
    sizes = [weight.numel() for weight in model.parameters() if weight.ndim > 1 and id(weight) not in known]
    attention = 4 * model.config.num_hidden_layers * model.config.hidden_size * seq_len
    return Flops(2 * sum(sizes), attention, 2 * output.numel())


# ------------------------------------------------------------------------------------------ communication


class Collective(NamedTuple):
    """Equal collectives of a step, as one of their ranks takes part in them."""

    rounds: int  # 1 = all-gather or reduce-scatter, 2 = all-reduce
    bytes: float  # of the whole tensor, per call
    calls: int
    ranks: int
    machines: int

    @property
    def seconds(self) -> float:
        """The time by NCCL's model: a ring; for an all-reduce, the latency of a tree if that is lower."""
        near, far = self.ranks / self.machines - 1, self.machines - 1
        # Each rank on a machine adds a network card to the ring.
        bandwidth = min(NVLINK, (near + 1) * NETWORK) if far else NVLINK
        latency = self.rounds * ((self.ranks - 1 - far) * NVLINK_LATENCY + far * NETWORK_LATENCY)
        if self.rounds == 2:
            latency = min(latency, 2 * (near * NVLINK_LATENCY + math.log2(self.machines) * NETWORK_LATENCY))
        sent = self.rounds * self.bytes * (self.ranks - 1) / self.ranks
        return self.calls * (sent / bandwidth + latency + CALL_LATENCY)


def exchanged(config: Config, vocab_size: int) -> list[Collective]:
    """Return a rank's collectives in a step on GPUs, by the table in docs/gpus.md, without Muon's."""
    ranks, layers, gradient = config.world_size, config.n_layers, FLOAT32
    compute_bytes = FLOAT32 if config.precision == "fp32" else 2
    if config.reproducible or config.gradient_dtype == "bf16":
        gradient = 8 if config.reproducible else 2
    machines = math.ceil(ranks / MACHINE)
    # Weights of a block and of the vocabulary's matrices; bytes of the gradients of those that are trained.
    block, vocabulary = config.matrix_count / layers, vocab_size * config.dim
    tables = 1 if config.tie_embeddings else 2
    vectors = (2 * layers + 1) * config.dim  # not sharded
    in_block, in_vocabulary = block * gradient, vocabulary * gradient
    if config.lora_enabled:
        in_block, in_vocabulary, vectors = adapter_count(config) / layers * gradient, 0, 0
    if config.sharding == "none":
        size = layers * in_block + tables * in_vocabulary + vectors * gradient
        calls = math.ceil(size / BUCKET_BYTES)
        return [Collective(2, size / calls, calls, ranks, machines)] if ranks > 1 else []

    shard, count = config.ranks_per_copy, config.accumulation_steps
    copies, inside = ranks // shard, (shard, math.ceil(shard / MACHINE))
    apart = math.ceil(copies / max(1, MACHINE // shard))  # machines of the ranks that hold the same rows
    work = [Collective(1, block * compute_bytes, 2 * layers * count, *inside),  # forward and backward
            Collective(1, vocabulary * compute_bytes, tables * count, *inside),
            Collective(1, in_block, layers * count, *inside),
            Collective(1, in_vocabulary, tables * count, *inside),
            # Once a step: gradients' shards between the copies, and the norms' gradients.
            Collective(2, in_block / shard, layers, copies, apart),
            Collective(2, in_vocabulary / shard, tables, copies, apart),
            Collective(2, vectors * max(gradient, FLOAT32), 1, ranks, machines)]
    return [each for each in work if each.ranks > 1 and each.bytes]


# ------------------------------------------------------------------------------------------ memory


class MemoryEstimate(NamedTuple):
    """Peak memory of one rank: bytes on its device, and in the host's memory."""

    parameters: int
    gradients: int
    optimizer: int
    frozen: int  # weights of a teacher or a live reference; on a CPU the copy for GRPO_UPDATES
    activations: int  # kept for the backward
    working: int  # logits, gathered parameters, exchanged gradients, and temporary tensors
    host: int = 0  # the copy for ASYNC_SAVE, which the ranks of the first machine divide
    offloaded: int = 0  # in the host's memory, of each rank: with CPU_OFFLOAD, and the copy for GRPO_UPDATES
    process: int = 0  # on a CPU: Python, torch and code for matmuls

    @property
    def total(self) -> int:
        return sum(self) - self.host - self.offloaded


def activation_bytes(config: Config, compute_bytes: int) -> float:
    """Return the bytes per token that a block keeps for its backward if it is not recomputed as a whole."""
    attended = config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    heads = attended + 2 * kv  # q k v
    norms = sum(name.endswith("_norm") and "." not in name for name in config.block_shapes)
    scores = 0
    if config.attention_backend == "math":
        scores = 2 * compute_bytes * config.n_heads * config.max_seq_len
    if config.model_type == "qwen3":  # each head's factor and, if it is not a view of a joint q k v, input
        inputs = compute_bytes * (attended + kv) * (not config.compile and config.lora_enabled)
        scores += FLOAT32 * (config.n_heads + config.n_kv_heads) + inputs
    # Unless layers have adapters, v is a view of a joint q k v (without biases), and gate and up are views of
    # one tensor. Trained layers keep their inputs, those with dropout each its own with a mask.
    trained = targets_of(config) if config.lora_enabled else {*LORA_LAYERS}
    trained_qkv, trained_gate_up = trained & {"wq", "wk", "wv"}, trained & {"w1", "w3"}
    is_joint = not (config.lora_enabled and trained_qkv) and config.model_type != "qwen2"
    inputs = compute_bytes * config.dim * (bool(trained_qkv) + bool(trained_gate_up))
    if config.lora_enabled and config.lora_dropout:
        inputs = sum((compute_bytes + 1) * linear_shapes(config)[name][1] for name in trained - {"w2"})
    inputs += compute_bytes * config.hidden_dim * ("w2" in trained)
    low = len(targets_of(config)) * compute_bytes * config.lora_rank
    if not config.compile:
        # Autograd saves, for a norm: its input and a factor for each token. For attention: rotated q and k,
        # v, the attended values and their log-sums. For the feed-forward: gate, up and silu.
        kept = compute_bytes * (config.dim * norms + heads + (heads - kv) * is_joint + attended
                                + 3 * config.hidden_dim)
        kept += inputs + low + 2 * config.dim * (config.dropout > 0)  # masks
        return kept + FLOAT32 * (norms + config.n_heads) + scores
    # The compiler's partitioner keeps the input, v, rotated q and k (also before the rotation, if v is a view
    # of all three or they have norms), the attended values and their log-sums, the output of wo, gate and up,
    # and the norms' inputs and factors ...
    projected = (heads - kv) * (is_joint or config.model_type == "qwen3")
    least = compute_bytes * config.dim
    half = norms * least + compute_bytes * (heads + projected + attended + 2 * config.hidden_dim)
    half += FLOAT32 * (config.n_heads + norms) + scores + low
    # ... and, to save cheap operations only, the inputs: both norms' outputs, and the product of gate and up.
    whole = half + inputs
    if config.activation_checkpointing != "selective" or config.activation_memory_budget == 1:
        return whole
    # A budget of 0 keeps only the input, 1 keeps all; below `half`, matmuls and attention are recomputed.
    return min(half, least + config.activation_memory_budget * (whole - least))


class Sizes(NamedTuple):
    """Bytes on one rank that the phases of a step are composed of."""

    block: float  # activations of one block
    copies: float  # cast or concatenated weights of a block that autograd keeps
    block_weights: float  # whole weights of one block in the compute dtype
    block_count: float  # trained weights of one block (a number, not bytes)
    vocabulary: float  # embedding or head in the compute dtype
    learned: float  # its float32 gradient
    trained_matrices: int  # trained ones of embedding and head


def sizes_of(config: Config, vocab_size: int, compute_bytes: int, device_type: str) -> Sizes:
    """Return the sizes of a block and of the matrices over the vocabulary."""
    tokens, sharded = config.micro_batch_size * config.max_seq_len, config.sharding != "none"
    in_block = config.matrix_count / config.n_layers
    # q k v, and gate and up, are concatenated for one matmul, and the backward keeps the result. It also
    # keeps cast weights, unless the ranks gathered them in that dtype. A low budget recomputes all of these.
    shapes, copied = linear_shapes(config), 0
    if not config.lora_enabled or config.lora_base_quantization == "none":
        copied = sum(math.prod(shapes[name]) for joined in (("wq", "wk", "wv"), ("w1", "w3"))
                     for name in joined if targets_of(config).isdisjoint(joined))
    budget = config.activation_memory_budget if config.activation_checkpointing == "selective" else 1
    if budget == 1 and compute_bytes != weight_bytes(config) and not sharded:
        copied = copied + adapter_count(config) / config.n_layers if config.lora_enabled else in_block
    elif budget < MATMULS_KEPT:
        copied = 0
    in_matrix = padded(vocab_size) * config.dim
    trained = 1 if config.tie_embeddings else 2
    if config.lora_enabled:
        trained = min(trained, config.lora_train_head + config.lora_train_embeddings)
    kept = activation_bytes(config, compute_bytes)
    has_documents = config.document_mask and config.training_stage != "grpo" or config.training_stage == "dpo"
    has_documents |= answers_per_row(config) > 1
    in_blocks = config.attention_backend == "auto" and (has_documents or compute_bytes < FLOAT32)
    if device_type == "cpu" and in_blocks and (blocks := KERNELS.get("blocks")):
        kept += compute_bytes * blocks.saved(1, config.max_seq_len, config.n_heads) / config.max_seq_len
        kept -= FLOAT32 * config.n_heads  # no log-sums
        if targets_of(config).isdisjoint(("wq", "wk", "wv")):  # v is a copy: a joint q k v is not kept
            kept -= compute_bytes * (config.n_heads + config.n_kv_heads) * config.head_dim
    elif device_type == "cpu" and has_documents:
        kept += compute_bytes * config.max_seq_len  # an additive mask; GPU kernels need none
    return Sizes(block=tokens * kept,
                 copies=copied * compute_bytes,
                 block_weights=in_block * compute_bytes,
                 block_count=adapter_count(config) / config.n_layers if config.lora_enabled else in_block,
                 vocabulary=in_matrix * compute_bytes,
                 learned=in_matrix * FLOAT32 if trained else 0, trained_matrices=trained)


def head_bytes(config: Config, vocab_size: int, compute_bytes: int, chunks: int, sizes: Sizes,
               device_type: str) -> float:
    """Return the bytes that the head needs at its peak, besides its gathered matrix."""
    tokens, half = config.micro_batch_size * config.max_seq_len, compute_bytes < FLOAT32
    is_cast = compute_bytes != weight_bytes(config)
    # Per logit of a chunk: its value and gradient; without a compiler also a float32 copy, which is the
    # gradient in float32.
    copy = compute_bytes if half or vocab_size % 128 else 0
    logit = 2 * compute_bytes if config.compile else FLOAT32 + copy
    if half and not config.compile and config.training_stage in ("pretrain", "sft"):
        logit += compute_bytes
    if device_type == "cpu" and config.training_stage in ("pretrain", "sft"):  # the gradient overwrites it
        logit = compute_bytes
    if config.training_stage in ("dpo", "grpo") and not (config.compile or config.distillation_enabled):
        logit += FLOAT32  # the softmax
    elif config.distillation_enabled:  # both models' logits, and the divergence's temporaries
        logit = compute_bytes + 2 * FLOAT32
        if device_type == "cuda":
            logit += FLOAT32 if config.compile else 4 * FLOAT32
    # The ranks of a sharded model gather it in the compute dtype.
    cast = sizes.vocabulary if is_cast and sizes.learned and config.sharding == "none" else 0
    hidden = tokens * config.dim * compute_bytes  # its gradient
    return -(-tokens // chunks) * padded(vocab_size) * logit + cast + sizes.learned + hidden


def moment_count(config: Config, trained: int) -> int:
    """Return the size of the optimizer's state: two numbers per weight for AdamW, one for Muon."""
    of_matrices, of_rest = (len({*each.state_names} - {"step"}) for each in OPTIMIZERS[config.optimizer])
    matrices = 0 if config.lora_enabled else config.matrix_count
    return of_rest * trained + (of_matrices - of_rest) * matrices


def pinned_share(config: Config, vocab_size: int) -> float:
    """Return how much more host memory than its size a pinned copy of the weights takes."""
    shapes = [(config.dim, padded(vocab_size))] * (1 if config.tie_embeddings else 2)
    shapes += [*config.block_shapes.values()] * config.n_layers
    sizes = [FLOAT32 * math.prod(shape) for shape in shapes]
    return sum(map(pinned_bytes, sizes)) / sum(sizes)


def muon_bytes(config: Config, device_type: str) -> float:
    """Return the bytes that Muon's update needs besides its state, for a batch of gate and up projections.

    These are four tensors of their size and two Gram matrices, in bf16 on a GPU after two in float32.
    """
    if config.optimizer != "muon" or config.lora_enabled:
        return 0
    matrix, gram = config.dim * config.hidden_dim, min(config.dim, config.hidden_dim)**2
    wide = muon_batch(2 * config.n_layers, matrix)
    if device_type == "cuda":
        return wide * max(2 * FLOAT32 * matrix, 2 * (4 * matrix + 2 * gram))
    return wide * FLOAT32 * (4 * matrix + 2 * gram)


def generation_bytes(config: Config, vocab_size: int, compute_bytes: int, device_type: str) -> float:
    """Return the bytes for answers: rounded weights, the cache, the prompts' activations, and sampling."""
    rows, heads = config.micro_batch_size, config.n_kv_heads * config.head_dim
    most_prompts = rows  # of MAX_SEQ_LEN tokens, that are read at once
    rows *= answered_together(config, compute_bytes, device_type)
    cache = 2 * config.n_layers * rows * (config.max_seq_len + 2) * heads * compute_bytes
    prompts = min(rows // config.grpo_group, most_prompts)
    prefill = prompts * config.max_seq_len * compute_bytes * 4 * (config.dim + config.hidden_dim)
    rounded = config.matrix_count * (not config.lora_enabled) + padded(vocab_size) * config.dim
    weights = rounded * compute_bytes * (compute_bytes < FLOAT32 and config.sharding == "none")
    return weights + cache + max(prefill, rows * padded(vocab_size) * 12 * FLOAT32)


def peak_of_step(config: Config, vocab_size: int, compute_bytes: int, device_type: str,
                 gradients: float) -> tuple[float, float, float]:
    """Return the bytes of gradients, activations and work at the peak of a step after the first.

    `gradients` is the size of all gradients of a rank.
    """
    # GRPO joins short answers to a prompt in the rows that a step trains on.
    answering, together = config, answers_per_row(config)
    rows = config.micro_batch_size // together
    length = config.max_seq_len + (together - 1) * config.answer_tokens
    config = config.model_copy(update={
        "micro_batch_size": rows, "max_seq_len": length,
        "total_batch_size": rows * config.accumulation_steps * config.world_size * length})
    sizes = sizes_of(config, vocab_size, compute_bytes, device_type)
    tokens, sharded = config.micro_batch_size * config.max_seq_len, config.sharding != "none"
    chunks = -(-tokens // tokens_in_chunk(config.head_chunk_tokens, padded(vocab_size), device_type))
    recomputed = config.activation_checkpointing == "block"
    whole = sizes.block + sizes.copies
    kept = config.n_layers * whole
    if recomputed:
        kept = min(kept, config.n_layers * compute_bytes * tokens * config.dim)
    # Gradients exist before the backward in DDP's buckets, or from an earlier micro-batch.
    ddp = config.world_size > 1 and not sharded
    before = gradients if ddp or config.accumulation_steps > 1 or config.reproducible else 0.0
    gathered = sizes.vocabulary if sharded else 0  # the head, under LoRA with its frozen copy
    if config.lora_enabled and sizes.trained_matrices:
        gathered *= 2
    # A block's gradients before their exchange, or all returned by its compiled backward; its gathered
    # weights, and those of the next block.
    exchanged = (FLOAT32 if sharded else weight_bytes(config)) * sizes.block_count
    exchanged *= sharded or config.compile
    received = config.ranks_per_copy > 1  # a single rank copies a block when its turn comes
    blocks = (1 + received) * sizes.block_weights if sharded else 0

    # The head: the last norm's input and output. What was gathered last
    # (the head or, if that is the embedding, the last block) exists twice, as received. DPO peaks in the
    # backward, when the last block arrives.
    norm = 2 * tokens * config.dim * compute_bytes
    arrived = blocks / 2 if config.tie_embeddings or config.training_stage in ("dpo", "grpo") else gathered
    head = norm + gathered + arrived * received
    head += head_bytes(config, vocab_size, compute_bytes, chunks, sizes, device_type)
    # The backward of its first blocks, with the gradients of product, gate, up and residual stream. The
    # head's gradient waits for its exchange, and for the embedding's if they are one matrix.
    waiting = sizes.learned if config.tie_embeddings or not (before or sharded) else 0
    if not sharded:  # converted when it is complete
        waiting *= weight_bytes(config) / FLOAT32
    learned = sizes.learned if sharded else waiting
    inside = compute_bytes * tokens * 2 * (config.dim + config.hidden_dim) + blocks
    if config.compile and config.lora_enabled:  # the product is gone when the gate's gradient arrives
        inside -= compute_bytes * tokens * (config.dim + config.hidden_dim * ("w2" in targets_of(config)))
    last_norm = 0 if config.compile else FLOAT32 * 3 * tokens * config.dim + blocks / 2 + learned
    inside += whole if recomputed else 0
    again = compute_bytes * tokens * config.dim * recomputed  # the block's input is kept anyway
    later = kept * (1 - 1 / config.n_layers)
    # A live reference runs after the model's forward, which keeps the logits if they are one chunk.
    reference = 0
    if reference_is_live(config):
        reference = tokens * compute_bytes * 4 * (config.dim + config.hidden_dim) + blocks + gathered + norm
        reference += tokens * padded(vocab_size) * compute_bytes if chunks == 1 else 0
    # The end of the backward: the embedding's gradient, and the sum of both if tied. Then the update.
    whole_gradients = 3 if config.tie_embeddings else 2 if sharded else 1
    if not (before or sharded):  # the last of them becomes the gradient
        whole_gradients -= 1
    if config.reproducible:  # converted to int64, after FSDP has copied it
        whole_gradients = 4 if sharded else whole_gradients + 2
    if config.weight_dtype == "bf16" and not (sharded or config.reproducible):  # in float32, then converted
        whole_gradients = 2 if config.tie_embeddings else 1.5
        if not before and gradients:  # one of them is the gradient
            whole_gradients -= 0.5
    end = exchanged * sharded + whole_gradients * sizes.learned
    phases = [(before, kept, working) for working in (head, last_norm, inside + learned - again, reference)]
    phases += [(before, later, inside + exchanged + waiting), (gradients, 0, end),
               (gradients, 0, muon_bytes(config, device_type))]
    if config.training_stage == "grpo":
        phases.append((gradients, 0, generation_bytes(answering, vocab_size, compute_bytes, device_type)))
    return max(phases, key=sum)


def estimate_memory(config: Config, vocab_size: int, compute_bytes: int, device_type: str = "cuda",
                    teacher: int = 0) -> MemoryEstimate:
    """Return the forecast for one rank.

    Args:
        compute_bytes: bytes per number in the compute dtype.
        teacher: bytes of a live teacher's weights.
    """
    # Weights are float32, but a frozen base is in the compute dtype or quantized.
    sizes = sizes_of(config, vocab_size, compute_bytes, device_type)
    trained = count = parameter_count(config, padded(vocab_size))
    vectors = config.dim + config.n_layers * sum(
        math.prod(shape) for shape in config.block_shapes.values() if len(shape) == 1)
    weights = float(weight_bytes(config) * (count - vectors) + FLOAT32 * vectors)
    if config.lora_enabled:
        trained = adapter_count(config) + sizes.trained_matrices * sizes.learned // FLOAT32
        base = QUANTIZED_BYTES.get(config.lora_base_quantization, compute_bytes)
        others = count - config.matrix_count - vectors
        weights = base * config.matrix_count + compute_bytes * others + FLOAT32 * vectors
        if config.lora_base_quantization == "int8":  # a scale for each row
            weights += FLOAT32 * config.n_layers * sum(
                shape[0] for shape in config.block_shapes.values() if len(shape) > 1)
        weights += trained * FLOAT32
    moments = state_bytes(config) * moment_count(config, trained)

    # The share of one rank.
    ranks, frozen = config.ranks_per_copy, float(teacher)
    gradient = weight_bytes(config)
    if config.sharding == "hybrid" and config.accumulation_steps > 1:  # FSDP adds them in float32
        gradient = FLOAT32
    if config.reproducible:  # int64, which become gradients in the same memory; FSDP allocates its own
        gradient = 2 * FLOAT32 + (0 if ranks == 1 else FLOAT32 + 2 * (config.weight_dtype == "bf16"))
    if config.update_in_backward:
        gradient = 0
    held = [weights / ranks, trained * gradient / ranks, moments / ranks]
    if reference_is_live(config) and not config.lora_enabled:
        frozen = count * compute_bytes / ranks
    gradients, *others = peak_of_step(config, vocab_size, compute_bytes, device_type, held[1])
    copy = (FLOAT32 * trained if config.lora_enabled else weights) + moments
    before_step = copy * (config.training_stage == "grpo" and config.grpo_updates > 1)
    frozen += before_step * (device_type == "cpu")
    copied = copy * config.async_save
    if device_type == "cuda" and not config.lora_enabled:
        copied *= pinned_share(config, vocab_size)
    offloaded = before_step * (device_type != "cpu")
    if config.cpu_offload:
        return MemoryEstimate(0, 0, 0, *map(round, (frozen, *others, copied, sum(held) + offloaded)))
    return MemoryEstimate(*map(round, (held[0], gradients, held[2], frozen, *others, copied, offloaded)))


def fits(config: Config, vocab_size: int, compute_bytes: int, memory: int) -> bool:
    """Return whether the forecast leaves a part of the GPU's memory free."""
    config = config.model_copy(update={"compile": why_not_compile(config, "cuda") is None})
    return estimate_memory(config, vocab_size, compute_bytes).total < ROOM_FOR_CHUNKS * memory


def choose_head_chunk(model: Any, config: Config, compute_bytes: int, device: torch.device) -> None:
    """Set a model's head chunk by `with_head_chunk` if it is on a GPU."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        chosen = with_head_chunk(config, model.vocab_size, compute_bytes, memory)
        model.head.positions = chosen.head_chunk_tokens


def with_head_chunk(config: Config, vocab_size: int, compute_bytes: int, memory: int) -> Config:
    """Return the config with a head chunk of 4 or 2 times CHUNK_BYTES if that fits a GPU.

    Each chunk adds to the head's float32 gradient. With REPRODUCIBLE, bits do not depend on the GPU.
    """
    if config.training_stage in ("pretrain", "sft") and not (
            config.head_chunk_tokens or config.reproducible or config.distillation_enabled):
        for factor in (4, 2):
            tokens = factor * tokens_in_chunk(0, padded(vocab_size), "cuda")
            larger = config.model_copy(update={"head_chunk_tokens": tokens})
            if fits(larger, vocab_size, compute_bytes, memory):
                return larger
    return config


CHUNK_CHOICES.append(choose_head_chunk)
