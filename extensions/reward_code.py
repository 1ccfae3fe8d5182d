"""Tell whether the code of a reward was changed since the checkpoint. REWARD=module:function loads this."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from config import Config
from extensions.settings import reward_terms
from run.extensions import Extension
from run.run import Run

ROOT = Path(__file__).resolve().parents[1]


def code_of_rewards(config: Config) -> dict[str, str]:
    """Return the hash of the file of each module in REWARD, but not of what these import."""
    # As in the process of the rewards, Paddock's own folder comes last.
    places = [Path(each or ".") for each in (*sys.path, os.getcwd()) if Path(each or ".").resolve() != ROOT]
    hashes = {}
    for module in {name.partition(":")[0] for name, _ in reward_terms(config) if ":" in name}:
        inside = module.replace(".", "/")
        names = f"{inside}/__init__.py", f"{inside}.py"
        files = [place / name for place in (*places, ROOT) for name in names]
        if found := next(filter(Path.is_file, files), None):
            hashes[module] = hashlib.sha256(found.read_bytes()).hexdigest()
    return hashes


class RewardCode(Extension):
    """Records the hashes of the rewards' modules in checkpoints, and compares them at a start."""

    def __init__(self):
        self.before: dict[str, str] = {}
        self.hashes: dict[str, str] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.hashes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state

    def run_start(self, run: Run) -> None:
        self.hashes = code_of_rewards(run.config)
        changed = sorted(name for name, found in self.hashes.items() if self.before.get(name, found) != found)
        if changed and run.ranks.is_rank0:
            run.log.warn(f"the code of {' and '.join(changed)} (REWARD) was changed since the checkpoint, so "
                         "earlier and later rewards may not be comparable")


EXTENSION = RewardCode
