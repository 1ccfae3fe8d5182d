"""Commands, each run as `python scripts/NAME.py`."""
