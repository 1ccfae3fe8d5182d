"""Objectives, teachers, the optimizer, and the cost of a step."""
