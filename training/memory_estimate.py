"""Parameter counts, and an estimate of a run's memory before anything is built; both without torch."""

from typing import NamedTuple

from config import Config, ModelConfig

FLOAT32 = 4
HEAD_CHUNK_BYTES = {"cuda": 2**31, "cpu": 2**28}  # as in fused/chunked_head.py, which imports torch


class MemoryEstimate(NamedTuple):
    """Bytes on each device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return sum(self)


def parameter_count(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of weights, without the padding of the vocabulary."""
    norms = (2 * config.n_layers + 1) * config.dim
    return config.matrix_count + norms + (1 if config.tie_embeddings else 2) * vocab_size * config.dim


def adapter_count(config: Config) -> int:
    """Return the number of weights in LoRA's adapters."""
    kv_dim = config.n_kv_heads * config.head_dim
    widths = dict.fromkeys(("wq", "wo"), 2 * config.dim) | dict.fromkeys(("wk", "wv"), config.dim + kv_dim)
    widths |= dict.fromkeys(("w1", "w2", "w3"), config.dim + config.hidden_dim)
    targets = {name.strip() for name in config.lora_target_modules.split(",")}
    return config.n_layers * config.lora_rank * sum(widths.get(name, 0) for name in targets)


def activation_bytes(config: Config, compute_bytes: int) -> float:
    """Return the bytes per token that a block keeps for its backward, unless all of it is recomputed."""
    attended = config.n_heads * config.head_dim
    heads = attended + 2 * config.n_kv_heads * config.head_dim  # q k v
    scores = 0
    if config.attention_backend == "math":
        scores = 2 * compute_bytes * config.n_heads * config.max_seq_len
    if not config.compile:
        # The two inputs and their norms, q k v before and after rotation, the attended values twice, gate,
        # up, silu and product; norms and rotations in float32 too.
        kept = compute_bytes * (4 * config.dim + 2 * heads + 2 * attended + 4 * config.hidden_dim)
        return kept + FLOAT32 * (4 * config.dim + 2 * heads) + scores
    # As the compiler's partitioner cuts the graph: the input, q k v (v is a view of all three), q and k
    # rotated, the attended values and their log-sums, the output of wo, gate and up, the norms' factors ...
    least = compute_bytes * config.dim
    rotated = heads - config.n_kv_heads * config.head_dim
    half = 2 * least + compute_bytes * (heads + rotated + attended + 2 * config.hidden_dim)
    half += FLOAT32 * (config.n_heads + 2) + scores
    # ... and what saves only cheap operations: both norms' outputs, and the product of gate and up.
    whole = half + compute_bytes * (2 * config.dim + config.hidden_dim)
    if config.activation_checkpointing != "selective" or config.activation_memory_budget == 1:
        return whole
    # A budget of 0 keeps the input only, of 1 all; below `half`, matmuls and attention are recomputed.
    return min(half, least + config.activation_memory_budget * (whole - least))


def estimate_memory(config: Config, vocab_size: int, compute_bytes: int,
                    device_type: str = "cuda") -> MemoryEstimate:
    """Return the estimate for one rank: what is alive at the end of a forward, usually a little too much.

    Args:
        compute_bytes: of a number in the compute dtype: 2 for bf16 and fp16, 4 for fp32.
    """
    # The weights. A frozen base exists in the compute dtype only; others are also cast, for the backward.
    parameters = parameter_count(config, vocab_size)
    trained = adapter_count(config) if config.lora_enabled else parameters
    matrices = parameters - (1 if config.tie_embeddings else 2) * vocab_size * config.dim
    is_muon = config.optimizer == "muon" and not config.lora_enabled
    optimizer = (2 * trained - (matrices if is_muon else 0)) * FLOAT32  # Muon has one moment, AdamW two
    cast = parameters * compute_bytes if compute_bytes < FLOAT32 else 0
    weights = parameters * FLOAT32 + cast
    if config.lora_enabled:
        weights = parameters * compute_bytes + trained * FLOAT32

    # The blocks' activations
    tokens = config.micro_batch_size * config.max_seq_len
    block = activation_bytes(config, compute_bytes)
    kept = config.n_layers * block
    if config.activation_checkpointing == "block":  # all inputs, one block recomputed, and its gradients
        kept = min(kept, config.n_layers * compute_bytes * config.dim + 2 * block)

    # The head. Compiled, a chunk's logits and their gradient are in the compute dtype. Otherwise the float32
    # logits become their gradient in place, beside a copy in the compute dtype, or without the padded ids.
    largest = max(1, HEAD_CHUNK_BYTES[device_type] // (vocab_size * FLOAT32))
    chunk = min(tokens, config.head_chunk_tokens or largest)
    copy = compute_bytes if compute_bytes < FLOAT32 or vocab_size % 128 else 0
    logit = 2 * compute_bytes if config.compile else FLOAT32 + copy
    head = chunk * vocab_size * logit + vocab_size * config.dim * (FLOAT32 + compute_bytes)
    return MemoryEstimate(weights, trained * FLOAT32, optimizer, tokens * kept, head)
