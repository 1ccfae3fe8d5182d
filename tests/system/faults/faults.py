"""Kills in the middle of writing and damage to files, for the tests and scripts/dev/soak.py."""

import builtins
import importlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from commands import during
from factories import do_in_step, is_rank

import train
from common.activity import Background
from run import run as run_module

SYSTEM_CALLS = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def act(rank: int, when: int | tuple[str, str, int], action: Callable[[], Any]) -> None:
    """In a rank, if it is this one: call `action` in a step, counted from 1, or before the n-th call of a module's function."""
    if is_rank(rank) and isinstance(when, int):
        do_in_step(when, action)
    elif is_rank(rank):
        module, name, turn = when
        during(importlib.import_module(module), name, action, turn)


def stop_in_step(step: int, rank: int) -> None:
    """In a rank: send it a stop signal in the middle of a step, counted from 1, if it is this rank."""
    act(rank, step, terminate)


class HalfWritten:
    """A file whose fatal write puts half of its data on the disk."""

    def __init__(self, file, is_deadly: Callable[[str], bool]):
        self.file, self.is_deadly = file, is_deadly

    def write(self, data):
        if self.is_deadly("write"):
            self.file.write(data[:len(data) // 2])
            self.file.flush()
            die()
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def die_at(deadly_call: int, counts: Callable[[], bool] = lambda: True) -> list[str]:
    """Kill this process at the n-th call that opens or changes a file; a write is half done then.

    Returns a list that grows by the name of each call. Only calls of this thread and of a Background count, if `counts`().
    """
    calls: list[str] = []
    thread = threading.get_ident()

    def is_deadly(name: str) -> bool:
        is_here = threading.get_ident() == thread and counts()
        if not is_here and not isinstance(threading.current_thread(), Background):
            return False
        calls.append(name)
        return len(calls) == deadly_call

    def deadly(name: str, real: Callable) -> Callable:
        def call(*args, **kwargs):
            if is_deadly(name):
                die()
            return real(*args, **kwargs)
        return call

    real_open = deadly("open", io.open)

    def open_file(file, mode="r", *args, **kwargs):
        opened = real_open(file, mode, *args, **kwargs)
        return opened if set(mode) <= set("rbt") else HalfWritten(opened, is_deadly)

    builtins.open = io.open = open_file
    for name in SYSTEM_CALLS:
        setattr(os, name, deadly(f"os.{name}", getattr(os, name)))
    return calls


def around_saves(begin: Callable[[int], Any], end: Callable[[int], Any]) -> Callable[[], bool]:
    """In a rank: call begin(k) before its k-th save, and end(k) when that checkpoint is complete and old ones are deleted.

    Returns a function: whether this thread is in one of the two, and not in a step between them.
    """
    save, finish, numbers, inside = train.save_checkpoint, run_module.finish_saving, [], []

    def finish_saving(run) -> None:
        is_saving = run.saving is not None
        inside.append(1)
        finish(run)
        if is_saving and run.pruning:
            run.pruning.join()
        inside.pop()
        if is_saving:
            end(len(numbers))

    def save_checkpoint(run, wait: bool = False) -> None:
        finish_saving(run)
        numbers.append(1)
        begin(len(numbers))
        inside.append(1)
        save(run, wait)
        inside.pop()

    train.save_checkpoint, train.finish_saving, run_module.finish_saving = save_checkpoint, finish_saving, finish_saving
    return lambda: bool(inside)


def die_in_save(save: int, deadly_call: int, rank: int = 0) -> None:
    """In a rank: kill it at the n-th such call of its k-th save, including the deletion of old checkpoints."""
    if is_rank(rank):
        inside = around_saves(lambda number: number == save and die_at(deadly_call, inside), lambda number: None)


def list_calls_of_save(save: int, into: Path) -> None:
    """In a rank: write the names of the calls of its k-th save to a file in a folder, named by the rank."""
    calls: list[str] = []
    into.mkdir(parents=True, exist_ok=True)

    def begin(number: int) -> None:
        nonlocal calls
        if number == save:
            calls = die_at(0, inside)

    inside = around_saves(begin, lambda number: number == save and
                          (into / os.environ.get("RANK", "0")).write_text("\n".join([*calls])))


def mark_saves(folder: Path) -> None:
    """In a rank: write the times at which its saves begin and end to a file, so that a kill can aim at them."""
    folder.mkdir(parents=True, exist_ok=True)

    def note(number: int) -> None:
        with open(folder / f"rank-{os.environ.get('RANK', 0)}", "a") as file:
            file.write(f"{time.monotonic()}\n")

    around_saves(note, note)


def saves_marked(folder: Path, rank: int = 0) -> list[float]:
    """The times that `mark_saves` wrote; their number is odd during a save."""
    path = folder / f"rank-{rank}"
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def flip_bit(path: Path, rng: Random) -> str:
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} of {path.name} flipped"


def cut(path: Path, rng: Random) -> str:
    length = rng.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"{path.name} cut to {length} bytes"


def delete(path: Path, rng: Random) -> str:
    path.unlink()
    return f"{path.name} deleted"
