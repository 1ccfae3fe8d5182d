"""Commands, each run by `./paddock` or as `python scripts/NAME.py`."""
