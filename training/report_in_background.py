"""The report of a run, written by another process; until the end at the lowest priority, so no step waits."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Optional

from common.heartbeat import HEARTBEAT
from common.text import command, last_line
from parallel.exit_report import STOP_SIGNALS
from training.run_log import REPORT

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "report.py"
LOWEST_PRIORITY = 19


class BackgroundReport:
    """At most one process that writes a run's report. A failure causes a warning, and at the end another."""

    def __init__(self) -> None:
        self.process: Optional[subprocess.Popen] = None
        self.warned = False

    def start(self, folder: Path, warn: Callable[[str], None], is_final: bool = False) -> None:
        """Begin to write the report in a run's folder, unless one is being written; returns at once."""
        if self.process and self.process.poll() is None:
            return  # the next save or the end of the run writes what is new
        self._check(folder, warn)
        try:
            # In a session of its own: Ctrl-C at the terminal is for the run.
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, folder.absolute(), "--in-background"], start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if is_final:
                return
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self.process.pid, LOWEST_PRIORITY)
            with suppress(OSError):  # Linux shares the cores among sessions first, whatever their priorities
                Path(f"/proc/{self.process.pid}/autogroup").write_text(str(LOWEST_PRIORITY))
        except OSError as error:
            self._warn(folder, f"{type(error).__name__}: {error}", warn)

    def finish(self, folder: Path, seconds: float, warn: Callable[[str], None]) -> bool:
        """Write the final report, and wait for it for at most so long; returns whether it was written."""
        self._stop(folder)  # it does not know the end
        self.warned = False
        self.start(folder, warn, is_final=True)
        if self.process:
            with suppress(subprocess.TimeoutExpired), HEARTBEAT.beat_in_background():
                self.process.wait(seconds)
            if self.process.poll() is None:
                self._stop(folder)
                self._warn(folder, f"it takes longer than {seconds:.0f} s", warn)
            was_written = self.process is not None and self.process.returncode == 0
            self._check(folder, warn)
            return was_written
        return False

    def _stop(self, folder: Path) -> None:
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            (folder / f"{REPORT}.tmp-{self.process.pid}").unlink(missing_ok=True)
        self._close()

    def _check(self, folder: Path, warn: Callable[[str], None]) -> None:
        """Warn if the process has failed, but not if a stop signal to the whole job has ended it."""
        if self.process and self.process.poll() not in (0, *(-number for number in STOP_SIGNALS)):
            self._warn(folder, last_line(self.process.stderr.read().decode(errors="replace")), warn)
        self._close()

    def _close(self) -> None:
        if self.process:
            self.process.stderr.close()
            self.process = None

    def _warn(self, folder: Path, why: str, warn: Callable[[str], None]) -> None:
        if not self.warned:
            self.warned = True
            warn(f"the report was not written: {why}. The run does not need it. To write it later: "
                 f"{command('scripts/report.py', folder)}")
