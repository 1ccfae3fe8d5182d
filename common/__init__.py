"""Shared by all packages: errors, text, files, remote files, the command line, the heartbeat."""

import sys

from common.text import report_uncaught

__version__ = "0.9.0"

sys.excepthook = report_uncaught  # here, so that a script whose first import fails explains what to do
