"""A forecast of what a run will hold in memory, before anything is built."""

from typing import NamedTuple

from config import Config

FLOAT32 = 4
HEAD_CHUNK_BYTES = {"cuda": 2**31, "cpu": 2**28}  # as in chunked_head.py, which this room does without


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


def parameter_count(config: Config, vocab_size: int) -> int:
    """Trainable weights, without the padding of the vocabulary."""
    attention = 2 * config.dim * (config.n_heads + config.n_kv_heads) * config.head_dim
    block = attention + 3 * config.dim * config.hidden_dim + 2 * config.dim
    return config.n_layers * block + (1 if config.tie_embeddings else 2) * vocab_size * config.dim + config.dim


def adapter_count(config: Config) -> int:
    """Weights of LoRA's adapters."""
    kv_dim = config.n_kv_heads * config.head_dim
    widths = {"wq": 2 * config.dim, "wo": 2 * config.dim, "wk": config.dim + kv_dim, "wv": config.dim + kv_dim,
              **dict.fromkeys(("w1", "w2", "w3"), config.dim + config.hidden_dim)}
    targets = {name.strip() for name in config.lora_target_modules.split(",")}
    return config.n_layers * config.lora_rank * sum(width for name, width in widths.items() if name in targets)


def activation_bytes(config: Config, compute_bytes: int) -> float:
    """Bytes a token that one block keeps for its backward, unless it is recomputed as a whole."""
    attended, heads = config.n_heads * config.head_dim, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    scores = 2 * compute_bytes * config.n_heads * config.max_seq_len if config.attention_backend == "math" else 0
    if not config.compile:
        # The two inputs and their norms, q k v before and after rotation, the attended values twice, gate, up and what is made of
        # them; norms and rotations in float32 too.
        kept = compute_bytes * (4 * config.dim + 2 * heads + 2 * attended + 4 * config.hidden_dim)
        return kept + FLOAT32 * (4 * config.dim + 2 * heads) + scores
    # As the compiler's partitioner cuts the graph: the input, q k v (v is a view of all three), q and k rotated, the attended
    # values and their log-sums, what comes out of wo, gate and up, the two norms' factors ...
    least = compute_bytes * config.dim
    rotated = heads - config.n_kv_heads * config.head_dim
    half = 2 * least + compute_bytes * (heads + rotated + attended + 2 * config.hidden_dim)
    half += FLOAT32 * (config.n_heads + 2) + scores
    # ... and what only spares cheap operations: both norms' outputs, and the product of gate and up.
    whole = half + compute_bytes * (2 * config.dim + config.hidden_dim)
    if config.activation_checkpointing != "selective" or config.activation_memory_budget == 1:
        return whole
    # A budget is a share of what lies between the input alone and all; matmuls and attention are recomputed below `half`.
    return min(half, least + config.activation_memory_budget * (whole - least))


def estimate_memory(config: Config, vocab_size: int, compute_bytes: int, device_type: str = "cuda") -> MemoryEstimate:
    """The forecast for one rank, as the sum of what is alive around the end of a forward; a little less is, as a rule.

    Args:
        compute_bytes: of one number of the compute dtype: 2 for bf16 and fp16, 4 for fp32.
        device_type: "cuda" or "cpu".
    """
    parameters = parameter_count(config, vocab_size)
    trained = adapter_count(config) if config.lora_enabled else parameters
    matrices = parameters - (1 if config.tie_embeddings else 2) * vocab_size * config.dim
    muon_saves = matrices if config.optimizer == "muon" and not config.lora_enabled else 0  # one moment instead of two
    cast = parameters * compute_bytes if compute_bytes < FLOAT32 else 0  # weights in the compute dtype, kept for the backward
    tokens = config.micro_batch_size * config.max_seq_len
    block = activation_bytes(config, compute_bytes)
    kept = config.n_layers * block
    if config.activation_checkpointing == "block":  # every block's input, one block again, and its gradients
        kept = min(kept, config.n_layers * compute_bytes * config.dim + 2 * block)
    chunk = min(tokens, config.head_chunk_tokens or max(1, HEAD_CHUNK_BYTES[device_type] // (vocab_size * FLOAT32)))
    # Compiled, the chunk's logits and their gradient, both in the compute dtype. Else the logits become their gradient in place,
    # in float32; beside them lies a copy in the compute dtype, or without the padded ids.
    copy = compute_bytes if compute_bytes < FLOAT32 or vocab_size % 128 else 0
    logit = 2 * compute_bytes if config.compile else FLOAT32 + copy
    head = chunk * vocab_size * logit + vocab_size * config.dim * (FLOAT32 + compute_bytes)
    # The frozen base lies there in the compute dtype alone.
    weights = parameters * compute_bytes + trained * FLOAT32 if config.lora_enabled else parameters * FLOAT32 + cast
    return MemoryEstimate(weights, trained * FLOAT32, (2 * trained - muon_saves) * FLOAT32, tokens * kept, head)
