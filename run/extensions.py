"""What a run calls at each point, and the loader, which alone finds the extensions, by their names.

The core imports no extension: without the folder `extensions/`, runs have the same bits.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Optional

from common.errors import SettingsError
from config import Config, Section

ORDER = Config.model_fields["extensions"].default.split(",")


class Extension:
    """What a run calls on every rank, of each extension in ORDER; `run_end` in the reverse order."""

    settings: Optional[type[Section]] = None  # its section of the settings

    # The run's folder is open.
    def run_start(self, run: Any) -> None: ...

    # Before the batches of step `run.progress.step` + 1 are read.
    def step_begin(self, run: Any) -> None: ...

    # A `with` block around a part of a step, such as "backward".
    def phase(self, name: str) -> AbstractContextManager:
        return nullcontext()

    # The step's micro-batches of this rank, perhaps with masked targets.
    def batches(self, run: Any, batches: list) -> list:
        return batches

    # The gradients are complete, but not clipped.
    def before_update(self, run: Any, batches: list) -> None: ...

    # After the update, before the step counts. An error stops the run.
    def step_end(self, run: Any, batches: list, result: Any) -> None: ...

    # For the line of a logged step, which has just been counted.
    def metrics(self, run: Any) -> dict[str, Any]:
        return {}

    # For `run.progress.pending_metrics`, after the evaluations.
    def evaluate(self, run: Any) -> dict[str, Any]:
        return {}

    # Small files of the checkpoint that is about to be written, by name; then the checkpoint is complete.
    def checkpoint_texts(self, run: Any) -> dict[str, str]:
        return {}

    def saved(self, run: Any) -> None: ...

    # What a resumed run needs from a checkpoint, as JSON.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    # Lines for the end of the console.
    def summary(self, run: Any) -> list[str]:
        return []

    # The run ends, perhaps before `run_start`; `error` is what ends it.
    def run_end(self, run: Any, error: Optional[BaseException]) -> None: ...


def load_extensions(config: Config, warn: Callable[[str], None]) -> list[Extension]:
    """Return the extensions of EXTENSIONS. What is missing of the default is a warning, else an error."""
    names = dict.fromkeys(filter(None, map(str.strip, config.extensions.split(","))))
    found, missing = [], []
    for name in sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        try:
            found.append(import_module(f"extensions.{name}").EXTENSION())
        except ModuleNotFoundError as error:
            if not f"extensions.{name}".startswith(error.name or "?"):
                raise  # it exists, and imports what does not
            missing.append(name)
    if missing and "extensions" in config.model_fields_set:
        raise SettingsError(f"EXTENSIONS={config.extensions}: extensions/ has no {' and no '.join(missing)}; "
                            f"remove {'it' if len(missing) == 1 else 'them'}")
    if missing:
        warn(f"EXTENSIONS: the run goes on without {', '.join(missing)}, which extensions/ does not have")
    return found
