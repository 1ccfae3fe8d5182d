"""Measure saves of random tensors with the shapes of a preset, beside `dd conv=fsync` on the same disk.

    python scripts/dev/measure_saves.py --preset 1.3b --folder /disk --ranks 4

The ranks of one machine write together, as with SHARDING=none. Prints for each save the seconds in which
training would stop (for the copy in host memory, if there is room, and to start and complete the save), the
seconds in all, and the disk's own time for as many bytes, before and after; then the medians, and by how much
each rank's resident memory grew at most. All tensors of a rank share one buffer, so the memory needed is that
of the largest tensor for each rank, besides the copy. Everything is deleted.
"""

import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from checkpoint import huggingface, store
from checkpoint.tensors import LazyTensor, TensorFile
from common.command_line import CommandParser
from common.errors import run_script
from common.text import show
from parallel.ranks import start_ranks, stop_ranks
from plan.make import make_plan
from run.saving import PendingSave, RankShard

GB = 1e9


def dd_seconds(folder: Path, count: int) -> float:
    path, started = folder / "dd.bin", time.perf_counter()
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={count // 2**22}", "conv=fsync"],
                   check=True, capture_output=True)
    path.unlink()
    return time.perf_counter() - started


def peak_memory() -> int:
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def start_others(ranks: int) -> list[subprocess.Popen]:
    """Start this command again for each other rank, and become rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": str(ranks),
             "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.update(place)
    command = [sys.executable, *sys.argv]
    return [subprocess.Popen(command, env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(1, ranks)]


def main() -> None:
    parser = CommandParser(__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder on the disk to measure")
    parser.add_argument("--vocab-size", type=int, default=128_256, help="vocabulary size (default: 128256)")
    parser.add_argument("--weights-only", action="store_true", help="without the optimizer's state")
    parser.add_argument("--repeats", type=int, default=3, help="number of saves (default: 3)")
    parser.add_argument("--ranks", type=int, default=1, help="number of processes that write (default: 1)")
    args, flags = parser.parse_known_args()
    others = start_others(args.ranks) if "RANK" not in os.environ and args.ranks > 1 else []
    config, ranks = make_plan(flags, complete=False).config, start_ranks("cpu", 600)
    shapes = config.parameter_shapes(args.vocab_size)
    buffer = torch.randn(max(map(math.prod, shapes.values())))
    tensors = {name: buffer[:math.prod(shape)].view(shape) for name, shape in shapes.items()}
    moments = {} if args.weights_only else {f"{name}.{moment}": tensor for name, tensor in tensors.items()
                                            for moment in ("exp_avg", "exp_avg_sq")}
    shard = RankShard(ranks, 1, config.head_dim, show)
    live = {name: shard.tensor(each, each, len(each)) for name, each in {**tensors, **moments}.items()}

    def files_of(state: dict[str, LazyTensor]) -> dict[str, TensorFile]:
        weights = huggingface.to_huggingface({name: state[name] for name in tensors}, config, args.vocab_size)
        optimizer = TensorFile({name: state[name] for name in moments}, None, config.head_dim)
        return huggingface.weight_files(weights, config.head_dim) | {store.OPTIMIZER: optimizer}

    files = files_of(live)
    size, folder = sum(file.nbytes for file in files.values()), args.folder / "step-00000001"
    manifest = {"step": 1, "world_size": args.ranks, "val_loss": None}
    def tell(*lines: str) -> None:
        if ranks.is_rank0:
            show(*lines)

    def measured_dd() -> float:
        return ranks.on_rank0(lambda: dd_seconds(args.folder, size))

    ranks.on_rank0(lambda: args.folder.mkdir(parents=True, exist_ok=True))
    tell(f"{size / GB:.2f} GB, {args.ranks} ranks")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    rss, rows = peak_memory(), []
    has_memory = shard.allocate(live)
    for repeat in range(args.repeats + 1):  # the first copy touches new memory, and does not count
        before, started = measured_dd(), time.perf_counter()
        temporary = Path(ranks.on_rank0(lambda: str(store.start_writing(folder, files, size))))
        saving = PendingSave(1, 0, shard, files, lambda folder: None, manifest, folder, temporary)
        if has_memory:
            copied = shard.copy(live)
            copy = time.perf_counter() - started
            saving.start(files_of(copied))
            ranks.barrier()
            blocked = time.perf_counter() - started
            if saving.thread:
                saving.thread.join()
            ranks.barrier()
        waited = time.perf_counter()
        finish = partial(store.finish_writing, temporary, folder, manifest, saving.written(tell), tell)
        ranks.on_rank0(finish)
        seconds = time.perf_counter() - started
        if not has_memory:
            copy, blocked, waited = 0.0, 0.0, started
        blocked += time.perf_counter() - waited
        ranks.on_rank0(lambda: shutil.rmtree(folder))
        disk = (before + measured_dd()) / 2
        rows.append((copy, blocked, seconds, disk, (blocked - copy) / seconds, seconds / disk))
        tell(f"copy {copy:.2f} s, stopped {blocked:.2f} s, in all {seconds:.2f} s, "
             f"{size / seconds / GB:.2f} GB/s; dd {disk:.2f} s" + " (not counted)" * (repeat == 0))
    names = "copy s", "stopped s", "in all s", "dd s", "(stopped - copy) / in all", "in all / dd"
    for name, values in zip(names, zip(*rows[1:])):
        tell(f"{name}: {median(values):.3f} [{min(values):.3f}, {max(values):.3f}]")
    growth = ranks.all_gather_json((peak_memory() - rss) / GB)
    tell(f"memory: a share is {size / args.ranks / GB:.3f} GB, and the ranks grew by at most "
         f"{', '.join(f'{each:.3f}' for each in growth)} GB")
    stop_ranks()
    for other in others:
        other.wait()


if __name__ == "__main__":
    run_script(main)
