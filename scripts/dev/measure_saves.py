"""Measure a save of random tensors with the shapes of a preset, beside `dd conv=fsync` on the same disk.

    python scripts/dev/measure_saves.py --preset llama3.2-1b --folder /big/disk

Prints the seconds in which training would stop (for a copy in host memory, if there is room), the seconds
until the checkpoint is complete, and the disk's own time for as many bytes, before and after. All tensors
share one buffer, so the memory needed is that of the largest one, besides the copy. Everything is deleted.
"""

import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from checkpoint import huggingface, store
from checkpoint.tensors import LazyTensor, lazy, write_tensors
from common.command_line import CommandParser
from common.errors import run_script
from common.text import show
from run.saving import HostCopies
from settings.load import load_config

GB = 1e9


def dd_seconds(folder: Path, count: int) -> float:
    """Return the seconds in which dd writes and syncs this many bytes."""
    path, started = folder / "dd.bin", time.perf_counter()
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={count // 2**22}", "conv=fsync"],
                   check=True, capture_output=True)
    path.unlink()
    return time.perf_counter() - started


def random_state(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, LazyTensor], dict[str, LazyTensor]]:
    """Return weights, and AdamW's two moments of each."""
    buffer = torch.randn(max(map(math.prod, shapes.values())))
    weights = {huggingface.huggingface_name(name): lazy(buffer[:math.prod(shape)].view(shape))
               for name, shape in shapes.items()}
    return weights, {f"{name}.{moment}": weight for name, weight in weights.items()
                     for moment in ("exp_avg", "exp_avg_sq")}


def main() -> None:
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder on the disk to measure")
    parser.add_argument("--vocab-size", type=int, default=128_256, help="vocabulary size (default: 128256)")
    parser.add_argument("--weights-only", action="store_true", help="without the optimizer's state")
    args, flags = parser.parse_known_args()
    config = load_config(flags, complete=False).config
    weights, moments = random_state(huggingface.parameter_shapes(config, args.vocab_size))
    if args.weights_only:
        moments = {}
    size = sum(tensor.nbytes for tensor in (*weights.values(), *moments.values()))
    args.folder.mkdir(parents=True, exist_ok=True)
    show(f"{size / GB:.2f} GB")

    copies, state = HostCopies(torch.device("cpu")), {**weights, **moments}
    if shortage := copies.shortage(state):
        show(f"copy: none, because {shortage}")
    else:
        for attempt in ("first, which allocates", "second"):
            started = time.perf_counter()
            copies.fill(state)
            show(f"copy ({attempt}): {time.perf_counter() - started:.2f} s")

    def write_files(folder: Path) -> dict[str, str]:
        return {**huggingface.save_weights(folder, weights),
                store.OPTIMIZER: write_tensors(folder / store.OPTIMIZER, moments)}

    before, started = dd_seconds(args.folder, size), time.perf_counter()
    saved, manifest = args.folder / "step-00000001", {"step": 1, "world_size": 1, "val_loss": None}
    store.publish(saved, write_files, manifest, size)
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    shutil.rmtree(saved)
    show(f"written, hashed and synced: {seconds:.2f} s, {size / seconds / GB:.2f} GB/s",
         f"deleted: {time.perf_counter() - started:.2f} s")
    after = dd_seconds(args.folder, size)
    show(f"dd: {before:.2f} s before and {after:.2f} s after, {2 * size / (before + after) / GB:.2f} GB/s; "
         f"the save took {2 * seconds / (before + after):.2f} times as long")


if __name__ == "__main__":
    run_script(main)
