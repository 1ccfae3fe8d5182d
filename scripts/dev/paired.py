"""Shared by the benchmarks: contenders alternate, and runs next to each other in time give ratios."""

import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def in_turns(names: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, name) in the order A B B A, so that drift of the machine cancels out."""
    names = list(names)
    for number in range(rounds):
        yield from ((number, name) for name in (names if number % 2 == 0 else names[::-1]))


def bootstrap(ratios: list[float]) -> tuple[float, float, float]:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[-51]


def ratio(ratios: list[float], interval: Callable = bootstrap) -> str:
    return "{:.2f} [{:.2f}, {:.2f}]".format(*interval(ratios))


def extremes(ratios: list[float]) -> tuple[float, float, float]:
    return statistics.median(ratios), min(ratios), max(ratios)


def huggingface_model(model: Any, config: Any, vocab: int, seq_len: int, liger: bool = False) -> Any:
    """Return transformers' Llama with the weights of our model, in training mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from checkpoint.huggingface import to_huggingface
    from checkpoint.model_json import huggingface_config
    from checkpoint.tensors import read_all

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    peer = LlamaForCausalLM(LlamaConfig(**huggingface_config(config, vocab, seq_len, 0, 1, "float32")))
    tensors = read_all(to_huggingface(model.state_dict(), config, vocab))
    missing = peer.load_state_dict(tensors, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    peer.tie_weights()
    return peer.train()
