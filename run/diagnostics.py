"""Measurements of a run (FLOPs, memory, loss spikes), and the report of a non-finite step."""

import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor, nn

from checkpoint.tensors import write_tensors
from parallel.fsdp import own

# Dense bf16 TFLOP/s with float32 accumulation, from the vendors' data sheets. B300, GB300, H20 and RTX PRO
# 6000 come from secondary sources (figures with sparsity are halved), its Max-Q edition is computed.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "H800": 989, "H20": 148,
               "B200": 2250, "GB200": 2250, "B300": 2250, "GB300": 2500, "A100": 312, "A800": 312,
               "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
               "RTX 5090": 210, "RTX PRO 6000 Blackwell Max-Q": 439, "RTX PRO 6000": 504, "V100": 125}
CHUNK_WORDS = 2**22  # of a tensor, that a checksum multiplies at a time
KEPT_BYTES = 2**30  # of gradients in a dump

# ------------------------------------------------------------------------------- speed and memory


def peak_flops(device: torch.device, override_tflops: Optional[float] = None) -> Optional[float]:
    """Return the device's dense bf16 FLOP/s, or None if unknown."""
    if override_tflops is not None:
        return override_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items()
                 if re.search(rf"\b{known}\b", name)), None)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or how many threads of the CPU are used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# ------------------------------------------------------------------------------------ loss spikes


def robust_z_score(loss: float, recent: Sequence[float], window: int) -> float:
    """Return by how many robust standard deviations a loss exceeds the recent median.

    It is 0 until half of the window is full.
    """
    if 2 * len(recent) < window:
        return 0.0
    middle, deviation = median_and_deviation(recent)
    return (loss - middle) / deviation


def spike_limit(recent: Sequence[float], window: int, threshold: float) -> float:
    """Return the loss whose `robust_z_score` is the threshold; infinite until half the window is full."""
    if 2 * len(recent) < window:
        return math.inf
    middle, deviation = median_and_deviation(recent)
    return middle + threshold * deviation


def median_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and a standard deviation that outliers do not affect.

    It is at least 1 % of the median, so that a flat curve raises no alarm at its first ripple.
    Source: Rousseeuw and Croux 1993: 1.4826 times the median absolute deviation.
    """
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle, max(deviation, 0.01 * abs(middle), 1e-12)


# ---------------------------------------------------------------------------- what is in a tensor


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of each tensor's bits, int64 on the CPU; different tensors collide once in 2**32.

    Each word is weighted by its index, so that two changes do not cancel out as in a plain sum.
    """
    sums = []
    for tensor in tensors:
        words = tensor.detach().contiguous().flatten().view(torch.uint8)
        words = words.view(torch.int32) if len(words) % 4 == 0 else words.to(torch.int32)
        # Of nothing, too: a rank may hold no row of a sharded matrix.
        weights = 2 * torch.arange(min(len(words), CHUNK_WORDS), dtype=torch.int32, device=words.device) + 1
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for chunk in words.split(CHUNK_WORDS):
            total = total * 1_000_003 + (chunk * weights[:len(chunk)]).sum(dtype=torch.int64)
        sums.append(total)
    return torch.stack(sums).cpu()


def count_bad(tensor: Tensor) -> int:
    """Return the number of elements that are NaN or infinite."""
    return int((~torch.isfinite(tensor)).sum())


def describe_tensors(model: nn.Module) -> list[dict]:
    """Describe each parameter and gradient with NaN or infinity: name, shape, their number, first values."""
    report = []
    for name, parameter in model.named_parameters():
        for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad)):
            if tensor is not None and (bad := count_bad(tensor := own(tensor))):
                first = tensor.detach().flatten()[:4].float().tolist()
                report.append({"tensor": name, "kind": kind, "shape": list(tensor.shape), "non_finite": bad,
                               "first_values": [*map(str, first)]})
    return report


def bad_gradients(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """Return CPU copies of the gradients with NaN or infinity, by `<kind>.<parameter>`.

    Of a sharded model, they are the rank's own rows. They take at most KEPT_BYTES. The first are those with
    the smallest share of such elements, which say most about the cause.
    """
    gradients = {name: own(parameter.grad) for name, parameter in model.named_parameters()
                 if parameter.grad is not None}
    shares = {name: count_bad(gradient) / max(1, gradient.numel()) for name, gradient in gradients.items()}
    kept, room = {}, KEPT_BYTES
    for name in sorted(filter(shares.get, shares), key=shares.__getitem__):
        gradient = gradients[name]
        if gradient.nbytes <= room:
            room -= gradient.nbytes
            kept[f"{kind}.{name}"] = gradient.to("cpu", copy=True)
    return kept


class FirstBadModule:
    """Watches every module's output; `found` is the name of the first whose output is not finite (DEBUG)."""

    def __init__(self, model: nn.Module):
        self.found: Optional[str] = None
        for name, module in model.named_modules():
            module.register_forward_hook(self._watch(name or type(model).__name__))

    def _watch(self, name: str):
        def hook(module, inputs, output):
            if self.found is None and isinstance(output, Tensor) and count_bad(output):
                self.found = name
        return hook


# ------------------------------------------------------------------------- report of a failed step


def write_dump(folder: Path, report: dict, tensors: dict[str, Tensor]) -> None:
    """Write one rank's report of a failed step: `rank-N.json`, and `rank-N.safetensors` with its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{report['rank']}.json").write_text(json.dumps(report, indent=2) + "\n")
    write_tensors(folder / f"rank-{report['rank']}.safetensors", tensors)


def bad_ranks(reports: list[dict]) -> list[int]:
    """Return the ranks whose own loss or gradients are not finite when computed again."""
    return [report["rank"] for report in reports if not report["finite"]]


def banner(reports: list[dict]) -> str:
    """Return the text to print when a step was not finite, from the reports of all ranks."""
    culprits = bad_ranks(reports)
    first = reports[culprits[0] if culprits else 0]
    source = f"from rank {', '.join(map(str, culprits))}" if culprits else "and finite when computed again"
    lines = ["=" * 100,
             f"NON-FINITE in step {first['step']}, {source}: the update was skipped.",
             f"loss {first['loss']}, gradient norm {first['grad_norm']}, "
             f"rows of rank {first['rank']}: {first['rows']}"]
    if first["first_bad_module"]:
        lines.append(f"first module with a non-finite output: {first['first_bad_module']}")
    for entry in first["tensors"][:20]:
        lines.append(f"  {entry['kind']} {entry['tensor']} {tuple(entry['shape'])}: {entry['non_finite']} "
                     f"non-finite, first values {', '.join(entry['first_values'])}")
    if len(first["tensors"]) > 20:
        lines.append(f"  ... and {len(first['tensors']) - 20} more, all in the dump")
    return "\n".join([*lines, "=" * 100])
