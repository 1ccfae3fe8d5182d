"""The hooks of extensions, and the loader, which finds extensions by name.

The core imports no extension: without the folder `extensions/`, runs have the same bits.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Optional

from common.errors import SettingsError
from config import Config, extension_module


class Extension:
    """Hooks that a run calls on every rank, in the order of EXTENSIONS; `run_end` in the reverse order."""

    def inputs(self, config: Config, inputs, verify: str): return inputs  # no collective; perhaps other rows
    def run_start(self, run) -> None: ...  # the run's folder is open
    def step_begin(self, run) -> None: ...  # before the batches of step `run.progress.step` + 1 are read
    def phase(self, name: str) -> AbstractContextManager: return nullcontext()  # or "communication" in it
    def batches(self, run, batches: list) -> list: return batches  # of this rank; may mask targets
    def before_update(self, run, batches: list) -> None: ...  # gradients are complete, but not clipped
    def step_end(self, run, batches: list, result) -> None: ...  # before the step counts; may stop the run
    def metrics(self, run) -> dict: return {}  # for the line of a logged step, which has just been counted
    def further_evaluations(self, run) -> Iterable: return ()  # each an `Evaluation` with an interval
    def evaluate(self, run) -> dict: return {}  # metrics; after each step, and before the first
    def checkpoint_texts(self, run) -> dict: return {}  # small files of the next checkpoint, by name
    def saved(self, run) -> None: ...  # a checkpoint is complete
    def state_dict(self) -> dict: return {}  # JSON in each checkpoint
    def load_state_dict(self, state: dict) -> None: ...
    def summary(self, run) -> list: return []  # lines for the end of the console
    def run_end(self, run, error: Optional[BaseException]) -> None: ...  # perhaps before `run_start`


def load_extensions(config: Config, warn: Callable[[str], None]) -> list[Extension]:
    """Return the extensions of EXTENSIONS. A missing one is an error, or a warning if nobody named it."""
    found, missing = [], []
    for name in config.extension_names:
        if module := extension_module(name):
            # A module without a class registers what it adds.
            found.append(getattr(module, "EXTENSION", Extension)())
        else:
            missing.append(name)
    if missing and "extensions" in config.model_fields_set:
        raise SettingsError(f"EXTENSIONS: extensions/ has no {' and no '.join(missing)}; "
                            f"remove {'it' if len(missing) == 1 else 'them'}")
    if missing:
        warn(f"EXTENSIONS: the run continues without {', '.join(missing)}, which extensions/ does not have")
    return found


def find(name: str, purpose: str) -> ModuleType:
    """Return an extension's module; SettingsError if a purpose needs it and it does not exist."""
    if module := extension_module(name):
        return module
    raise SettingsError(f"{purpose} needs extensions/{name}.py, which does not exist")
