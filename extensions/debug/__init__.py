"""Replay a step of a run row by row, and inspect prepared data."""
