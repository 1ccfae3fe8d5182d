"""Parameter counts, and a forecast of a run's memory before anything is built; both without torch."""

from typing import NamedTuple

from config import LORA_LAYERS, Config, ModelConfig

FLOAT32 = 4
HEAD_CHUNK_BYTES = {"cuda": 2**31, "cpu": 2**28}  # as in fused/head.py, which imports torch
MATMULS_KEPT = 0.6  # a budget, below which the compiler computes matmuls twice
MUON_BATCHES, MUON_BATCH_NUMEL = 8, 2**24  # at least as many of a shape; at most as many numbers in one
QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.5 + FLOAT32 / 64}  # of a weight and its share of a scale


class MemoryEstimate(NamedTuple):
    """Bytes on the device of one rank at the moment of its peak, and in the host's memory."""

    parameters: int
    gradients: int
    optimizer: int
    frozen: int  # a teacher's or a live reference's weights
    activations: int  # kept for the backward
    working: int  # logits, gathered parameters, gradients that are exchanged, and temporary tensors
    host: int = 0  # with CPU_OFFLOAD

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self[:-1])


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of weights, without the padding of the vocabulary."""
    norms = (2 * config.n_layers + 1) * config.dim
    return config.matrix_count + norms + (1 if config.tie_embeddings else 2) * vocab_size * config.dim


def targets_of(config: Config) -> set[str]:
    """Return the layers with adapters."""
    return set(config.lora_target_modules.split(",")) if config.lora_enabled else set()


def adapter_count(config: Config) -> int:
    """Return the number of weights in LoRA's adapters."""
    kv_dim = config.n_kv_heads * config.head_dim
    widths = dict.fromkeys(("wq", "wo"), 2 * config.dim) | dict.fromkeys(("wk", "wv"), config.dim + kv_dim)
    widths |= dict.fromkeys(("w1", "w2", "w3"), config.dim + config.hidden_dim)
    return config.n_layers * config.lora_rank * sum(widths.get(name, 0) for name in targets_of(config))


def reference_is_live(config: Config) -> bool:
    """Whether a reference model, or the base under the adapters, runs in each step."""
    return (config.training_stage == "dpo" and config.preference_objective == "dpo"
            and config.dpo_reference in (("live", "auto") if config.lora_enabled else ("live",)))


def activation_bytes(config: Config, compute_bytes: int) -> float:
    """Return the bytes per token that a block keeps for its backward, unless all of it is recomputed."""
    attended = config.n_heads * config.head_dim
    kv = config.n_kv_heads * config.head_dim
    heads = attended + 2 * kv  # q k v
    scores = 0
    if config.attention_backend == "math":
        scores = 2 * compute_bytes * config.n_heads * config.max_seq_len
    if not config.compile:
        # What autograd saves. Of a norm its input and, if its weight is trained, the normalized input, in
        # float32, and its output for trained layers. Rotated q and k, v, the attended values and their
        # log-sums; gate, up, silu and, for a trained layer, their product. v is a view of q k v together,
        # gate and up of one tensor, unless layers have adapters.
        trained = targets_of(config) if config.lora_enabled else {*LORA_LAYERS}
        of_qkv, of_gate_up = trained & {"wq", "wk", "wv"}, trained & {"w1", "w3"}
        together = 0 if config.lora_enabled and of_qkv else heads - kv
        kept = compute_bytes * (config.dim * (bool(of_qkv) + bool(of_gate_up)) + heads + together + attended
                                + (3 + ("w2" in trained)) * config.hidden_dim)
        kept += len(targets_of(config)) * 2 * compute_bytes * config.lora_rank
        norms = 2 if config.lora_enabled else 4
        return kept + FLOAT32 * (norms * config.dim + config.n_heads) + scores
    # As the compiler's partitioner cuts the graph: the input, q k v (v is a view of all three), q and k
    # rotated, the attended values and their log-sums, the output of wo, gate and up, the norms' factors ...
    least = compute_bytes * config.dim
    rotated = heads - kv
    half = 2 * least + compute_bytes * (heads + rotated + attended + 2 * config.hidden_dim)
    half += FLOAT32 * (config.n_heads + 2) + scores
    # ... and what saves only cheap operations: both norms' outputs, and the product of gate and up.
    whole = half + compute_bytes * (2 * config.dim + config.hidden_dim)
    if config.activation_checkpointing != "selective" or config.activation_memory_budget == 1:
        return whole
    # A budget of 0 keeps the input only, of 1 all; below `half`, matmuls and attention are recomputed.
    return min(half, least + config.activation_memory_budget * (whole - least))


class Sizes(NamedTuple):
    """What the phases of a step consist of, in bytes on one rank."""

    block: float  # activations of one block
    copies: float  # of its weights, cast or concatenated, that autograd keeps with them
    block_weights: float  # of one block, whole, in the compute dtype
    block_count: float  # its number of trained weights
    vocabulary: float  # one of the matrices with a row for each id, in the compute dtype
    learned: float  # its gradient, in float32
    matrices: int  # such matrices
    trained_matrices: int


def sizes_of(config: Config, vocab_size: int, compute_bytes: int, device_type: str) -> Sizes:
    """Return the sizes of a block and of the matrices over the vocabulary."""
    tokens, sharded = config.micro_batch_size * config.max_seq_len, config.sharding != "none"
    in_block = config.matrix_count / config.n_layers
    # q k v, and gate and up, are multiplied as one matrix, which the backward keeps; and it keeps what was
    # cast, unless the ranks gathered it in that dtype. A low budget makes all of these again.
    attended, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    joined = {("wq", "wk", "wv"): attended + 2 * kv, ("w1", "w3"): 2 * config.hidden_dim}
    is_plain = not config.lora_enabled or config.lora_base_quantization == "none"
    copied = sum(rows * config.dim for names, rows in joined.items()
                 if is_plain and not targets_of(config) & {*names})
    budget = config.activation_memory_budget if config.activation_checkpointing == "selective" else 1
    if budget == 1 and compute_bytes < FLOAT32 and not sharded and not config.lora_enabled:
        copied = in_block
    elif budget < MATMULS_KEPT:
        copied = 0
    padded = -(-vocab_size // 128) * 128 * config.dim
    matrices = trained = 1 if config.tie_embeddings else 2
    if config.lora_enabled:
        trained = min(matrices, config.lora_train_head + config.lora_train_embeddings)
    kept = activation_bytes(config, compute_bytes)
    if device_type == "cpu" and (config.document_mask or config.training_stage == "dpo"):
        kept += compute_bytes * config.max_seq_len  # a mask as attention adds it; GPUs have kernels without
    return Sizes(block=tokens * kept,
                 copies=copied * compute_bytes,
                 block_weights=in_block * compute_bytes,
                 block_count=adapter_count(config) / config.n_layers if config.lora_enabled else in_block,
                 vocabulary=padded * compute_bytes,
                 learned=padded * FLOAT32 if trained else 0, matrices=matrices, trained_matrices=trained)


def head_chunks(config: Config, padded_vocab: int, device_type: str) -> int:
    """Return the number of parts in which the head computes the logits of a micro-batch."""
    largest = max(1, HEAD_CHUNK_BYTES[device_type] // (padded_vocab * FLOAT32))
    return -(-config.micro_batch_size * config.max_seq_len // (config.head_chunk_tokens or largest))


def head_bytes(config: Config, vocab_size: int, compute_bytes: int, device_type: str, sizes: Sizes) -> float:
    """Return the bytes that the head needs at its peak, besides its gathered matrix."""
    tokens, padded = config.micro_batch_size * config.max_seq_len, -(-vocab_size // 128) * 128
    chunks = head_chunks(config, padded, device_type)
    half = compute_bytes < FLOAT32
    # Of each logit of a chunk: compiled, itself and its gradient in the compute dtype; else a float32 copy,
    # which becomes the gradient in place. The gradient of the chunk before lives until it is replaced.
    before = compute_bytes if chunks > 1 else 0
    copy = compute_bytes if half or vocab_size % 128 else 0
    logit = before + (2 * compute_bytes if config.compile else FLOAT32 + copy)
    if config.training_stage == "dpo" and not config.compile:  # ... and their softmax
        logit += FLOAT32
    elif config.distillation_enabled:  # the student's and the teacher's, and the divergence's temporaries
        logit = before + compute_bytes + 2 * FLOAT32
        if device_type == "cuda":
            logit += FLOAT32 if config.compile else 4 * FLOAT32
    # The ranks of a sharded model gather it in the compute dtype.
    cast = sizes.vocabulary if half and sizes.learned and config.sharding == "none" else 0
    hidden = tokens * config.dim * compute_bytes  # its gradient
    return -(-tokens // chunks) * padded * logit + cast + sizes.learned + hidden


def muon_batch(count: int, numel: int) -> int:
    """Return how many of `count` matrices of a shape Muon computes together; 8 ranks can divide them all."""
    return max(1, min(-(-count // MUON_BATCHES), MUON_BATCH_NUMEL // numel))


def muon_bytes(config: Config, device_type: str) -> float:
    """Return the bytes that Muon's update needs besides its state."""
    if config.optimizer != "muon" or config.lora_enabled:
        return 0
    # A batch of gates and up projections: four tensors of their size, and two of their Gram matrices, in
    # bf16 on a GPU after two in float32.
    matrix, gram = config.dim * config.hidden_dim, min(config.dim, config.hidden_dim)**2
    wide = muon_batch(2 * config.n_layers, matrix)
    if device_type == "cuda":
        return wide * max(2 * FLOAT32 * matrix, 2 * (4 * matrix + 2 * gram))
    return wide * FLOAT32 * (4 * matrix + 2 * gram)


class Phase(NamedTuple):
    """A moment of a step that can be its peak: bytes besides parameters and optimizer state."""

    gradients: float
    activations: float
    working: float


def peak_of_step(config: Config, vocab_size: int, compute_bytes: int, device_type: str,
                 gradients: float) -> Phase:
    """Return the phase of a step, which is not the first, that needs most.

    Args:
        gradients: bytes of the rank's own, when all are there.
    """
    sizes = sizes_of(config, vocab_size, compute_bytes, device_type)
    tokens, sharded = config.micro_batch_size * config.max_seq_len, config.sharding != "none"
    recomputed = config.activation_checkpointing == "block"
    whole = sizes.block + sizes.copies
    kept = config.n_layers * whole
    if recomputed:
        kept = min(kept, config.n_layers * compute_bytes * tokens * config.dim)
    # DDP's buckets keep the gradients; otherwise the second micro-batch finds those of the first.
    ddp = config.world_size > 1 and not sharded
    before = gradients if ddp or config.accumulation_steps > 1 else 0.0
    gathered = sizes.vocabulary if sharded else 0  # the head, under LoRA with its frozen copy
    if config.lora_enabled and sizes.trained_matrices:
        gathered *= 2
    # A block's gradients before they are exchanged, or as its compiled backward returns them together; its
    # gathered weights and those of the next one.
    exchanged = FLOAT32 * sizes.block_count if sharded or config.compile else 0
    blocks = 2 * sizes.block_weights if sharded else 0

    # The head: the last norm's input, in float32 once more normalized, and its output. What was gathered last
    # exists once more, as it arrived: the head or, if that is the embedding, the last block. DPO's peak is in
    # the backward, when the last block arrives.
    norm = tokens * config.dim * compute_bytes
    norm += tokens * config.dim * (compute_bytes if config.compile else FLOAT32 * (1 + bool(sizes.learned)))
    arrived = blocks / 2 if config.tie_embeddings or config.training_stage == "dpo" else gathered
    head = norm + gathered + arrived + head_bytes(config, vocab_size, compute_bytes, device_type, sizes)
    # The backward: its first blocks, with the gradients of product, gate, up and the residual stream. The
    # head's gradient waits for the embedding's if they are one matrix, and for its exchange.
    waiting = sizes.learned if config.tie_embeddings or not (before or sharded) else 0
    learned = sizes.learned if sharded else waiting
    inside = compute_bytes * tokens * 2 * (config.dim + config.hidden_dim) + blocks
    last_norm = 0 if config.compile else FLOAT32 * 6 * tokens * config.dim + blocks / 2 + learned
    inside += whole if recomputed else 0
    later = kept * (1 - 1 / config.n_layers)
    backward = [Phase(before, kept, inside + learned), Phase(before, later, inside + exchanged + waiting)]
    # A live reference, whose forward follows the model's, which keeps the logits if they are one chunk.
    reference = tokens * compute_bytes * 4 * (config.dim + config.hidden_dim) + blocks + gathered + norm
    padded = -(-vocab_size // 128) * 128
    if head_chunks(config, padded, device_type) == 1:
        reference += tokens * padded * compute_bytes
    # Its end: the embedding's gradient, and the sum of both if they are one matrix. Then the update.
    whole_gradients = 3 if config.tie_embeddings else 2 if sharded else 1
    if not (before or sharded):  # the last of them becomes the gradient
        whole_gradients -= 1
    end = exchanged * sharded + whole_gradients * sizes.learned
    phases = [Phase(before, kept, head), Phase(before, kept, last_norm), *backward,
              Phase(before, kept, reference if reference_is_live(config) else 0),
              Phase(gradients, 0, end), Phase(gradients, 0, muon_bytes(config, device_type))]
    return max(phases, key=sum)


def estimate_memory(config: Config, vocab_size: int, compute_bytes: int, device_type: str = "cuda",
                    teacher: int = 0) -> MemoryEstimate:
    """Return the forecast for one rank.

    Args:
        compute_bytes: of a number in the compute dtype: 2 for bf16 and fp16, 4 for fp32.
        teacher: bytes of a live teacher's weights.
    """
    # The weights: in float32; a frozen base in the compute dtype, or quantized.
    sizes = sizes_of(config, vocab_size, compute_bytes, device_type)
    rows = sizes.matrices * -(-vocab_size // 128) * 128
    trained = count = parameter_count(config, vocab_size) + config.dim * (rows - sizes.matrices * vocab_size)
    weights = float(count * FLOAT32)
    if config.lora_enabled:
        trained = adapter_count(config) + sizes.trained_matrices * sizes.learned // FLOAT32
        base = QUANTIZED_BYTES.get(config.lora_base_quantization, compute_bytes)
        weights = base * config.matrix_count + compute_bytes * (count - config.matrix_count)
        weights += trained * FLOAT32
    muon = config.matrix_count if config.optimizer == "muon" and not config.lora_enabled else 0
    moments = 2 * trained - muon  # Muon has one, AdamW two

    # A rank's part of them.
    ranks, frozen = config.ranks_per_copy, float(teacher)
    held = [weights / ranks, trained * FLOAT32 / ranks, moments * FLOAT32 / ranks]
    if reference_is_live(config) and not config.lora_enabled:
        frozen = count * compute_bytes / ranks
    peak = peak_of_step(config, vocab_size, compute_bytes, device_type, held[1])
    if config.cpu_offload:
        return MemoryEstimate(0, 0, 0, *map(round, (frozen, peak.activations, peak.working, sum(held))))
    return MemoryEstimate(*map(round, (held[0], peak.gradients, held[2], frozen, *peak[1:])))
