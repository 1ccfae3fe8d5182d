"""What a run does to the machine, and what went wrong: FLOPs and MFU, throughput, non-finite dumps."""

import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor, nn

from checkpoint.tensor_files import write_tensors
from config import ModelConfig

# Dense bf16 TFLOP/s from the vendors' data sheets.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "H800": 989, "B200": 2250, "GB200": 2250, "A100": 312,
               "A800": 312, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
               "RTX 5090": 210, "V100": 125}

CHUNK_WORDS = 2**22  # that a checksum has in memory a second time


def matmul_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Weights that take part in a matmul: the blocks' and the head's (the embedding is a look-up)."""
    attention = 2 * config.dim * (config.n_heads + config.n_kv_heads) * config.head_dim
    return config.n_layers * (attention + 3 * config.dim * config.hidden_dim) + vocab_size * config.dim


def flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """FLOPs of forward and backward for one token, attention counted in full, recomputation not at all.

    Source: Chowdhery et al. 2022, appendix B (arXiv:2204.02311): 6 N + 12 L H Q T.
    """
    return 6 * matmul_parameters(config, vocab_size) + 12 * config.n_layers * config.n_heads * config.head_dim * seq_len


def peak_flops(device: torch.device, override_tflops: Optional[float] = None) -> Optional[float]:
    """The device's dense bf16 FLOP/s, or None where it is not known."""
    if override_tflops is not None:
        return override_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has held: on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Throughput:
    """Tokens a second over the steps since the last reading; pauses (evaluation, saving) do not count."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self.started = 0, 0.0, time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count a step's tokens up to now."""
        now = time.perf_counter()
        self.tokens += tokens
        self.seconds += now - self.started
        self.started = now

    def skip_pause(self) -> None:
        """Leave out the time since the last step."""
        self.started = time.perf_counter()

    def read(self) -> float:
        """Tokens per second since the last reading."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        self.tokens, self.seconds = 0, 0.0
        return rate


def robust_z_score(loss: float, recent: Sequence[float], window: int) -> float:
    """How far a loss lies above the median of the recent ones, in robust standard deviations; 0 while the window is not half
    full."""
    if 2 * len(recent) < window:
        return 0.0
    middle, deviation = median_and_deviation(recent)
    return (loss - middle) / deviation


def spike_limit(recent: Sequence[float], window: int, threshold: float) -> float:
    """The loss whose `robust_z_score` is the threshold; infinite while the window is not half full."""
    if 2 * len(recent) < window:
        return math.inf
    middle, deviation = median_and_deviation(recent)
    return middle + threshold * deviation


def median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The median, and a standard deviation that outliers cannot stretch.

    It is taken to be no less than 1 % of the median, so that a curve which is flat by design raises no alarm at its first ripple.

    Source: Rousseeuw and Croux 1993: 1.4826 times the median absolute deviation.
    """
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, max(deviation, 0.01 * abs(middle), 1e-12)


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of the bits of each tensor, int64 on the CPU: equal tensors have equal ones, and it is the other way
    round but for one chance in 2**32.

    Every word is weighted by its place, so that changes which cancel out in a plain sum do not.
    """
    sums = []
    for tensor in tensors:
        words = tensor.detach().contiguous().flatten().view(torch.uint8)
        words = words.view(torch.int32) if len(words) % 4 == 0 else words.to(torch.int32)
        weights = torch.arange(1, 2 * min(len(words), CHUNK_WORDS), 2, dtype=torch.int32, device=words.device)
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for chunk in words.split(CHUNK_WORDS):
            total = total * 1_000_003 + (chunk * weights[:len(chunk)]).sum(dtype=torch.int64)
        sums.append(total)
    return torch.stack(sums).cpu()


def count_bad(tensor: Tensor) -> int:
    """How many of its elements are NaN or infinite."""
    return int((~torch.isfinite(tensor)).sum())


def describe_tensors(model: nn.Module) -> list[dict]:
    """Name, shape, first values and count of non-finite elements of every bad parameter and gradient."""
    report = []
    for name, parameter in model.named_parameters():
        for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
            if tensor is not None and (bad := count_bad(tensor)):
                report.append({"tensor": name, "kind": kind, "shape": list(tensor.shape), "non_finite": bad,
                               "first_values": [str(value) for value in tensor.detach().flatten()[:4].float().tolist()]})
    return report


class FirstBadModule:
    """Watches every module's output, and remembers the first that is not finite (DEBUG)."""

    def __init__(self, model: nn.Module):
        self.found: Optional[str] = None
        for name, module in model.named_modules():
            module.register_forward_hook(self._watch(name or type(model).__name__))

    def _watch(self, name: str):
        def hook(module, inputs, output):
            if self.found is None and isinstance(output, Tensor) and count_bad(output):
                self.found = name
        return hook


def write_dump(folder: Path, report: dict, tensors: dict[str, Tensor]) -> None:
    """Keep what one rank knows of a failed step: `rank-N.json` to read, `rank-N.safetensors` with its batch."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{report['rank']}.json").write_text(json.dumps(report, indent=2) + "\n")
    write_tensors(folder / f"rank-{report['rank']}.safetensors", tensors)


def bad_ranks(reports: list[dict]) -> list[int]:
    """The ranks whose own loss or gradients are bad, also when they are computed again."""
    return [report["rank"] for report in reports if not report["finite"]]


def banner(reports: list[dict]) -> str:
    """The words on the screen when a step was not finite, from the reports of all ranks."""
    culprits = bad_ranks(reports)
    first = reports[culprits[0] if culprits else 0]
    source = f"from rank {', '.join(map(str, culprits))}" if culprits else "and finite when computed again"
    lines = ["=" * 100,
             f"NON-FINITE in step {first['step']}, {source}: the update was not made.",
             f"loss {first['loss']}, gradient norm {first['grad_norm']}, rows of rank {first['rank']}: {first['rows']}"]
    if first["first_bad_module"]:
        lines.append(f"first module with a bad output: {first['first_bad_module']}")
    for entry in first["tensors"][:20]:
        lines.append(f"  {entry['kind']} {entry['tensor']} {tuple(entry['shape'])}: {entry['non_finite']} not finite, "
                     f"begins {', '.join(entry['first_values'])}")
    if len(first["tensors"]) > 20:
        lines.append(f"  ... and {len(first['tensors']) - 20} more, all in the dump")
    return "\n".join([*lines, "=" * 100])
