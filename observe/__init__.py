"""Measurements of a run: phases, power, profiles, guards and the check before a start."""
