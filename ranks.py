"""The process group: who am I, and what all ranks agree on. The one room that speaks torch.distributed."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Optional, TypeVar

import torch
import torch.distributed as dist

import errors
from errors import PaddockError, SettingsError

T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
SECOND_SIGNAL_SECONDS = 1.0  # torchrun hands on a signal that the terminal has sent to the workers already


@dataclass(frozen=True)
class Ranks:
    """This process's place among all, and the few collectives that the trainer needs.

    The default is a single process, for which every collective is the identity.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add the values of all ranks, element by element, in float64. Collective: every rank must call it."""
        if self.world_size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor, on the CPU. Collective: every rank must call it."""
        if self.world_size == 1:
            return tensor
        total = tensor.to(self.device)
        dist.all_reduce(total)
        return total.cpu()

    def all_agree(self, ok: bool) -> bool:
        """Whether `ok` holds on every rank. Collective: every rank must call it."""
        return self.sum([float(not ok)])[0] == 0

    def broadcast(self, value):
        """Rank 0's JSON-like value, on every rank. Collective: every rank must call it."""
        if self.world_size == 1:
            return value
        data = json.dumps(value).encode() if self.is_main else b""
        size = int(self.sum([len(data)])[0])
        buffer = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8).to(self.device)
        dist.broadcast(buffer, src=0)
        return json.loads(bytes(buffer.tolist()))

    def gather(self, value) -> list:
        """Every rank's JSON-like value, in rank order, on every rank. Collective: every rank must call it."""
        if self.world_size == 1:
            return [value]
        data = json.dumps(value).encode()
        size = int(max(self.sum([len(data) * (rank == self.rank) for rank in range(self.world_size)])))
        mine = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [json.loads(bytes(buffer.tolist())) for buffer in everyone]

    def together(self, make: Callable[[], T]) -> T:
        """What make() gives on this rank. A PaddockError on any rank is raised on all of them, for rank 0 to tell.

        Collective: every rank must call it.
        """
        value, failure = None, None
        try:
            value = make()
        except PaddockError as error:
            failure = [type(error).__name__, str(error)]
        for rank, failed in enumerate(self.gather(failure)):
            if failed is not None:
                name, text = failed
                error = getattr(errors, name)(f"rank {rank}: {text}" if rank else text)
                error.told_by_main = not self.is_main
                raise error
        return value

    def main_first(self, make: Callable[[], T]) -> Optional[T]:
        """What make() gives, on rank 0; None on the others. Its PaddockError is raised on every rank, for rank 0 to tell.

        Collective: every rank must call it.
        """
        return self.together(lambda: make() if self.is_main else None)

    def barrier(self) -> None:
        """Wait for every rank. Collective: every rank must call it."""
        self.sum([0])


def start_ranks(device_type: str, timeout_seconds: float) -> Ranks:
    """Join the process group that torchrun describes in the environment; without torchrun, be alone.

    Args:
        device_type: "cuda" (nccl) or "cpu" (gloo).
    Raises:
        SettingsError: the environment describes a group that cannot be joined.
    """
    rank, local_rank, world_size = (int(os.environ.get(key, default)) for key, default in
                                    (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1)), torch.cuda.device_count()
        if processes > gpus:
            raise SettingsError(f"{processes} processes were started on this machine, which shows {gpus} GPUs; "
                                f"start torchrun with --nproc_per_node {gpus} at most")
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        end_with_launcher()
    if world_size > 1:
        timeout = timedelta(seconds=timeout_seconds)
        where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        try:
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout,
                                    device_id=device if device_type == "cuda" else None)
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise SettingsError(f"rank {rank} of {world_size} could not join the process group at {where}: {reason}; "
                                "check that every node was started, with the same address and a free port") from error
    return Ranks(rank, local_rank, world_size, device)


def end_with_launcher() -> None:
    """Have the system send this process a TERM, at which it saves and leaves, when the one that launched it dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_ranks() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def lost_a_rank(error: RuntimeError) -> bool:
    """Whether this is a collective that failed because another rank has ended, or did not come in time."""
    return any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting",
                                                 "remote process exited"))


class StopSignals:
    """Remembers TERM, INT and USR1, for the loop to save and leave; a second one, a moment later, quits at once.

    They mean what they meant before when the `with` block is left.
    """

    def __init__(self) -> None:
        self.received: Optional[int] = None
        self.at = 0.0

    def __enter__(self) -> "StopSignals":
        self.before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.received is not None and now - self.at > SECOND_SIGNAL_SECONDS:
            os._exit(128 + number)
        if self.received is None:
            self.received, self.at = number, now


class Interrupted(Exception):
    """A stop signal came in the middle of something long; all ranks raise it together."""


def leave_if_stopped(ranks: Ranks, signals: StopSignals) -> None:
    """Collective: every rank must call it, and all raise Interrupted when one of them was signalled."""
    if not ranks.all_agree(signals.received is None):
        raise Interrupted
