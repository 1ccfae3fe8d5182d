"""Measurements of a run: phases, power, profiles, guards, forecasts, and the check before the start."""
