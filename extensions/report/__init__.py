"""The report of a run: one page, and the process that writes it at each save and at the end.

The package needs no torch.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Optional

from common.activity import foreign_call
from common.text import ROOT, command, last_line
from parallel.process import STOP_SIGNALS
from run.extensions import Extension
from run.log import FINISH_SECONDS, LEAVE_SECONDS, REPORT

SCRIPT = ROOT / "scripts" / "report.py"
LOWEST_PRIORITY = 19


class Report(Extension):
    """Prints the run's start and results, and writes the report of rank 0's run with REPORT=true.

    A process writes it, and may fail.
    """

    started: Optional[float] = None
    first = 0  # steps taken before
    process: Optional[subprocess.Popen] = None
    warned = False

    def run_start(self, run) -> None:
        from extensions.report import console  # with torch

        run.log.columns = console
        console.print_overview(run)
        self.started, self.first = time.perf_counter(), run.progress.step

    def saved(self, run) -> None:
        if run.config.report and run.log.lines:
            self.start(run)

    def run_end(self, run, error: Optional[BaseException]) -> None:
        if error is None and run.log.ending and run.ranks.is_rank0:
            from extensions.report import console

            was_stopped = run.progress.pending_metrics is not None or not run.takes_no_step
            result = run.log.ending[0]
            if not was_stopped:
                run.log.info(result, shown="")
                result = console.result_line(run, self.started, self.first)
            run.log.ending = console.ending(run, result)
        stops = error is not None or run.context.signals.received is not None
        seconds, path = LEAVE_SECONDS if stops else FINISH_SECONDS, run.folder.absolute() / REPORT
        if run.config.report and run.log.lines and self.finish(run, seconds):
            if run.log.ending:
                run.log.ending[1] += f"  (wrote {REPORT})"  # on the same line
            else:
                run.log.info(f"Look at the run: {path}, in a browser")
        if run.log.lines and path.is_file():
            run.log.send("report", path)

    def start(self, run, is_final: bool = False) -> None:
        """Start writing the report, unless this is in progress; before the end, at the lowest priority."""
        if self.process and self.process.poll() is None:
            return  # the next save or the end of the run will update it
        self._read_result(run)
        try:
            # A separate session does not receive Ctrl-C from the terminal.
            self.process = subprocess.Popen(
                [sys.executable, SCRIPT, run.folder.absolute(), "--in-background"], start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if is_final:
                return
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self.process.pid, LOWEST_PRIORITY)
            with suppress(OSError):  # Linux first divides the cores among sessions, regardless of priorities
                Path(f"/proc/{self.process.pid}/autogroup").write_text(str(LOWEST_PRIORITY))
        except OSError as error:
            self._warn(run, f"{type(error).__name__}: {error}")

    def finish(self, run, seconds: float) -> bool:
        """Write the final report within this many seconds; return whether it was written."""
        self._kill(run)  # an unfinished one lacks the end of the run
        self.warned = False
        self.start(run, is_final=True)
        if self.process:
            with suppress(subprocess.TimeoutExpired), foreign_call():
                self.process.wait(seconds)
            if self.process.poll() is None:
                self._kill(run)
                self._warn(run, f"it takes longer than {seconds:.0f} s")
        return self._read_result(run)

    def _kill(self, run) -> None:
        if self.process:
            self.process.kill()
            self.process.communicate()  # closes the pipe
            (run.folder / f"{REPORT}.tmp-{self.process.pid}").unlink(missing_ok=True)
        self.process = None

    def _read_result(self, run) -> bool:
        """Return whether the process wrote the report; warn if it failed other than by a stop signal."""
        if self.process is None:
            return False
        process, self.process = self.process, None
        errors = process.communicate()[1].decode(errors="replace")
        if process.returncode not in (0, *(-number for number in STOP_SIGNALS)):
            self._warn(run, last_line(errors))
        return process.returncode == 0

    def _warn(self, run, why: str) -> None:
        if not self.warned:
            self.warned = True
            run.log.warn(f"the report was not written: {why}. This does not affect the run. To write it "
                         f"later: {command('scripts/report.py', run.folder)}")


EXTENSION = Report
