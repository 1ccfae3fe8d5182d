"""Shared by all packages: errors, text, files, remote files, the command line, signals, the activity."""

import sys

from common import interrupts

interrupts.install()  # before any other import, which a signal would interrupt with a traceback

from common.text import report_uncaught  # noqa: E402

__version__ = "1.0.0"

sys.excepthook = report_uncaught  # here, so that a script whose first import fails explains what to do
