"""The FLOPs of steps by formula: what they needed (for MFU), and what was computed (for HFU).

Counted are matmuls, 2 FLOPs for a multiplication with its addition, and attention in full, as if it were not
causal and documents attended to each other, without what its kernels compute again. *Needed* leaves out
padding, and what is computed again. Of full training without padding it is 6 N + 12 L H Q T a token.
Source: Chowdhery et al. 2022, appendix B (arXiv:2204.02311).
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from config import Config, ModelConfig
from dataloaders import Batch
from fused.head import chunk_tokens
from learn.cost import MATMULS_KEPT, adapter_count, reference_is_live, targets_of
from learn.objectives import PairwiseObjective
from learn.teacher import LlamaTeacher
from lora import TrainableTokens
from model import Transformer, padded

# The matrices of a block in the order of the forward; attention comes after the first three.
ORDER = (("wq", "wk", "wv"), ("wo",), ("w1", "w3"), ("w2",))


class Work(NamedTuple):
    """What some steps read."""

    tokens: int = 0  # with padding
    padding: int = 0
    targets: int = 0
    large: int = 0  # targets of micro-batches with several chunks of logits


class Flops(NamedTuple):
    """FLOPs of each token, in matmuls and attention, and of each target, in the head."""

    matmuls: int = 0
    attention: int = 0
    head: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(own + added for own, added in zip(self, other)))


class StepFlops:
    """The FLOPs of a model's steps with an objective.

    Args:
        vocab_size: without padding.
    """

    def __init__(self, config: Config, model: Transformer, objective, vocab_size: int, device_type: str):
        rows = padded(vocab_size)
        self.chunk = config.head_chunk_tokens or chunk_tokens(rows, device_type)
        self.again = 2 * rows * config.dim if isinstance(objective, PairwiseObjective) else 0
        self.needed = self._flops(config, model, objective, vocab_size)
        self.computed = self._flops(config, model, objective, rows) + recomputed(config)

    @staticmethod
    def _flops(config: Config, model: Transformer, objective, rows: int) -> Flops:
        forward, others = forward_flops(config, rows, config.max_seq_len), Flops()
        if reference_is_live(config):
            others = forward
        elif teacher := getattr(objective, "teacher", None):
            others = teacher_flops(teacher, rows, config.max_seq_len)
        adapters = Flops(2 * adapter_count(config) if config.lora_enabled else 0)
        return forward + adapters + backward_flops(config, model, rows) + others

    def read(self, batches: Iterable[Batch]) -> Work:
        """Return what some micro-batches contain. Their tensors are not read."""
        counts = [(batch.tokens_BT.numel(), batch.padding, batch.targets,
                   batch.targets if batch.targets > self.chunk else 0) for batch in batches]
        return Work(*map(sum, zip(*counts)))

    def of(self, work: Work) -> tuple[Flops, Flops]:
        """Return the FLOPs that were needed, and those that were computed: in matmuls, attention, head."""
        real = work.tokens - work.padding
        needed, computed = self.needed, self.computed
        return (Flops(real * needed.matmuls, real * needed.attention, work.targets * needed.head),
                Flops(work.tokens * computed.matmuls, work.tokens * computed.attention,
                      work.targets * computed.head + work.large * self.again))


def forward_flops(config: ModelConfig, rows: int, seq_len: int) -> Flops:
    """Return the FLOPs of a forward without adapters.

    Args:
        rows: of the head.
    """
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * seq_len
    return Flops(2 * config.matrix_count, attention, 2 * rows * config.dim)


def backward_flops(config: Config, model: Transformer, rows: int) -> Flops:
    """Return the FLOPs of a backward: a frozen matrix has no gradient, and below the first trained parameter
    there is none at all.
    """
    forward = forward_flops(config, rows, config.max_seq_len)
    if not config.lora_enabled:
        return forward + forward
    head = model.tok_embeddings if model.output is None else model.output
    learned = rows if head.weight.requires_grad else len(head.ids) if isinstance(head, TrainableTokens) else 0
    embedding = model.tok_embeddings
    is_trained = embedding.weight.requires_grad or isinstance(embedding, TrainableTokens)
    first, others = block_backward(config, is_trained), block_backward(config, True)
    in_blocks = Flops(*(own + (config.n_layers - 1) * other for own, other in zip(first, others)))
    return in_blocks + Flops(head=2 * (rows + learned) * config.dim)


def block_backward(config: Config, reached: bool) -> Flops:
    """Return the FLOPs of the backward of one block with adapters.

    Args:
        reached: whether the block's input has a gradient.
    """
    kv, wide = config.n_kv_heads * config.head_dim, config.hidden_dim
    shapes = {"wq": (config.dim, config.dim), "wk": (config.dim, kv), "wv": (config.dim, kv),
              "wo": (config.dim, config.dim), "w1": (config.dim, wide), "w3": (config.dim, wide),
              "w2": (wide, config.dim)}
    targets, total = targets_of(config), Flops()
    for layers in ORDER:
        for name in layers:
            inputs, outputs = shapes[name]
            total += Flops(2 * inputs * outputs * reached)
            if name in targets:  # both adapters' gradients, and what passes through them
                total += Flops(2 * config.lora_rank * (2 * outputs + inputs + inputs * reached))
        reached = reached or not targets.isdisjoint(layers)
        if layers is ORDER[0]:
            total += Flops(attention=8 * config.n_heads * config.head_dim * config.max_seq_len * reached)
    return total


def recomputed(config: Config) -> Flops:
    """Return the FLOPs of what the backward computes again to save memory."""
    how = config.activation_checkpointing
    if how == "none" or (how == "selective" and config.activation_memory_budget >= MATMULS_KEPT):
        return Flops()
    # With a lower budget it is at most this.
    forward = forward_flops(config, 0, config.max_seq_len)
    forward += Flops(2 * adapter_count(config) if config.lora_enabled else 0)
    if not config.compile and "w2" not in targets_of(config):
        # Eager checkpointing stops at the last tensor that the backward needs: the input of w2.
        forward += Flops(-2 * config.n_layers * config.dim * config.hidden_dim)
    return forward


def teacher_flops(teacher, rows: int, seq_len: int) -> Flops:
    """Return the FLOPs of the forward of a teacher, whose own padding is not counted."""
    model = teacher.model
    if isinstance(teacher, LlamaTeacher):
        return forward_flops(model.config, rows, seq_len)
    look_ups = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    output = model.get_output_embeddings().weight
    known = {id(weight) for weight in (*look_ups, output)}
    matrices = [weight for weight in model.parameters() if weight.ndim > 1 and id(weight) not in known]
    attention = 4 * model.config.num_hidden_layers * model.config.hidden_size * seq_len
    return Flops(2 * sum(weight.numel() for weight in matrices), attention, 2 * output.numel())
