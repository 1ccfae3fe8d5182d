"""Whether a run goes on, without touching its lock."""

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

from common.files import read_text
from common.text import duration

FRESH_SECONDS = 900  # since the last sign of life of a run on another machine, which may be evaluating
KILLED = "ended without a word (killed, or the machine failed)"


def holder_runs(lock: Path) -> Optional[bool]:
    """Whether the process whose name is in a run's lock runs; None if that is another machine's.

    The lock is not tried, because a job that starts at that moment would find it taken.
    """
    try:
        named = re.fullmatch(r"process (\d+) on (.+)", read_text(lock).strip())
    except (OSError, ValueError):
        return False
    if not named:
        return False
    if named[2] != socket.gethostname():
        return None
    try:
        opened = os.listdir(f"/proc/{named[1]}/fd")
    except PermissionError:  # another user's process
        return True
    except OSError:
        return False
    for descriptor in opened:  # another process may have its number by now
        with suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{named[1]}/fd/{descriptor}"), os.stat(lock)):
                return True
    return False


class Ending(NamedTuple):
    """What the newest process of a run left."""

    reason: Optional[str]  # of its end; None: it runs, was killed, or is of an older version
    has_events: bool  # so that an end would have been recorded
    last_sign: Optional[float]  # the time of its last sign of life


def run_state(folder: Path, ending: Ending, step: int, max_steps: int) -> tuple[str, str]:
    """The state of a run as in the page's data, and the sentence that tells it."""
    reason, last_sign = ending.reason, ending.last_sign
    done = f"{step:,} of {max_steps:,} steps"
    running = holder_runs(folder / "run.lock") if reason is None else False
    if running:
        return "running", f"running: {done} are done"
    if reason is None and running is None and last_sign:
        silent = time.time() - last_sign
        if silent < FRESH_SECONDS:
            return "running", f"running on another machine: {done} are done"
        return "unknown", (f"no sign of life for {duration(silent)} after {done}; it ran on another machine, "
                           "where it may go on")
    if reason == "finished" or (reason is None and step >= max_steps > 0):
        return "finished", f"finished after {done}"
    if reason == "early stopping":
        return "finished", f"stopped early after {done}"
    if reason == "stopped by a signal":
        return "stopped", f"stopped by a signal after {done}"
    if reason:
        return "failed", f"failed after {done}: {reason}"
    if ending.has_events:
        return "failed", f"{KILLED} after {done}"
    return "stopped", f"not running; {done} are done"
