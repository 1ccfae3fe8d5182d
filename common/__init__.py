"""What every room may use: errors, text, files, remote files, the command line, the sign of life."""

__version__ = "0.9.0"
