"""Evaluation, in a run and outside of one."""
